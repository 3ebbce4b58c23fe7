//! Every function that cudarc can call is there.

use libloading::Library;
use ptxsim::testing::ensure_simulator;

/// Made by `grep -ohE 'sys::cu[A-Z][A-Za-z0-9_]*' driver/result.rs driver/safe/*.rs | sort -u` in cudarc 0.19.10.
const SYMBOLS: &str = include_str!("symbols.txt");

#[test]
fn everything_that_cudarc_calls_is_exported() {
    ensure_simulator();
    // SAFETY: it is loaded already: the same library is found by its name.
    let library = unsafe { Library::new("libcuda.so") }.unwrap();
    let missing: Vec<&str> = SYMBOLS
        .lines()
        .filter(|name| {
            // SAFETY: only presence is asked.
            unsafe { library.get::<extern "C" fn()>(name.as_bytes()) }.is_err()
        })
        .collect();
    assert!(SYMBOLS.lines().count() > 90);
    assert_eq!(missing, [""; 0]);
    // SAFETY: only presence is asked.
    assert!(unsafe { library.get::<extern "C" fn()>(b"ptxsim_options") }.is_ok(), "and it is the simulator");
}
