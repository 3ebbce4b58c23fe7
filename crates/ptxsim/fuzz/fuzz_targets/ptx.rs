//! PTX text: `cargo +nightly fuzz run ptx corpus ../tests/kernels`
#![no_main]

libfuzzer_sys::fuzz_target!(|text: &str| {
    let _ = ptxsim::ptx::parse(text);
});
