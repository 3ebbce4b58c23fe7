//! What happens before the first call that succeeds: each of these needs a process of its own.

use cudarc::driver::sys;
use ptxsim::options::Options;
use ptxsim::testing::ensure_simulator;
use std::process::{Command, Output};
use std::ptr::null_mut;

macro_rules! cu {
    ($function:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: the simulator looks at every handle and address before it uses them.
        let code = unsafe { sys::$function($($argument),*) };
        code as u32
    }};
}

/// Runs one of the ignored tests below in another process.
fn run(test: &str, variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", test, "--nocapture"]).envs(variables.iter().copied());
    let output = command.output().unwrap();
    println!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    output
}

fn passes(test: &str, variables: &[(&str, &str)]) -> bool {
    let output = run(test, variables);
    output.status.success() && String::from_utf8_lossy(&output.stdout).contains("1 passed")
}

#[test]
fn calls_before_the_start_are_refused() {
    assert!(passes("before_the_start", &[]));
}

#[test]
#[ignore = "run by calls_before_the_start_are_refused"]
fn before_the_start() {
    ensure_simulator();
    let mut context: sys::CUcontext = null_mut();
    assert_eq!(cu!(cuDeviceGetCount(&mut 0)), 3);
    assert_eq!(cu!(cuDeviceGet(&mut 0, 0)), 3);
    assert_eq!(cu!(cuCtxGetCurrent(&mut context)), 3);
    assert_eq!(cu!(cuDevicePrimaryCtxRetain(&mut context, 0)), 3);
    assert_eq!(cu!(cuMemAlloc_v2(&mut 0, 4)), 3);
    assert_eq!(cu!(cuStreamSynchronize(null_mut())), 3);
    assert_eq!(cu!(cuGraphDestroy(null_mut())), 3);
    let mut version = 0;
    assert_eq!(cu!(cuDriverGetVersion(&mut version)), 0);
    assert!(version >= 13_000);
    assert_eq!(cu!(cuInit(0)), 0);
    assert_eq!(cu!(cuDeviceGetCount(&mut 0)), 0);
    assert_eq!(cu!(cuMemAlloc_v2(&mut 0, 4)), 201, "no context yet");
    assert_eq!(cu!(cuCtxSetCurrent(null_mut())), 0);
    assert_eq!(cu!(cuCtxGetCurrent(&mut context)), 0);
    assert!(context.is_null());
}

#[test]
fn the_environment_sets_cards_and_options() {
    let wanted = [("PTXSIM_CC", "9.0,80"), ("PTXSIM_OPTIONS", "races=off,seed=7,delay")];
    assert!(passes("environment", &wanted));
    assert!(!passes("environment", &wanted[..1]));
    assert!(!passes("environment", &wanted[1..]));
}

#[test]
#[ignore = "run by the_environment_sets_cards_and_options"]
fn environment() {
    let simulator = ensure_simulator();
    let wanted = Options { races: false, shuffle_seed: Some(7), delay_streams: true, ..Options::default() };
    assert_eq!(simulator.options(), wanted);
    assert_eq!(cu!(cuInit(0)), 0);
    let (mut count, mut major) = (0, 0);
    assert_eq!(cu!(cuDeviceGetCount(&mut count)), 0);
    assert_eq!(count, 2);
    let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
    assert_eq!(cu!(cuDeviceGetAttribute(&mut major, attribute, 0)), 0);
    assert_eq!(major, 9);
    assert_eq!(simulator.with_options(&Options::unchecked(), || simulator.options()), Options::unchecked());
    assert_eq!(simulator.options(), wanted);
}

/// Tests that ran with defaults instead would prove something else.
#[test]
fn mistakes_in_the_environment_stop_the_test() {
    for (variable, value, part) in [
        ("PTXSIM_OPTIONS", "rces=off", "no option \"rces\""),
        ("PTXSIM_OPTIONS", "races=of", "races=of"),
        ("PTXSIM_OPTIONS", "seed=7,uninitialized=maybe", "uninitialized=maybe"),
        ("PTXSIM_CC", "75", "choose one of 80, 86"),
    ] {
        let output = run("environment", &[(variable, value)]);
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success());
        assert!(message.contains(variable) && message.contains(part), "{variable}={value}");
    }
    assert!(passes("start_with_a_mistake", &[]));
}

#[test]
#[ignore = "run by mistakes_in_the_environment_stop_the_test"]
fn start_with_a_mistake() {
    ensure_simulator();
    // SAFETY: this process runs one test, and no other thread of it looks at the environment now.
    unsafe { std::env::set_var("PTXSIM_OPTIONS", "rces=off") };
    for _ in 0..2 {
        assert_eq!(cu!(cuInit(0)), 1);
        assert_eq!(cu!(cuDeviceGetCount(&mut 0)), 3);
    }
}

/// A process that probes for a real driver must not run its tests, or they would run twice.
#[test]
fn the_probe_runs_no_test() {
    let output = run("before_the_start", &[("PTXSIM_PROBE_REAL_DRIVER", "1")]);
    assert!(output.stdout.is_empty());
    assert!([Some(0), Some(93)].contains(&output.status.code()));
}

#[test]
fn the_choice_can_be_made_by_hand() {
    assert!(passes("chosen", &[("PTXSIM_DRIVER", "sim")]));
    assert!(!passes("chosen", &[("PTXSIM_DRIVER", "other")]));
    let output = run("chosen", &[("PTXSIM_DRIVER", "real")]);
    assert!(!output.status.success());
    if !std::path::Path::new("/dev/nvidiactl").exists() {
        assert!(String::from_utf8_lossy(&output.stderr).contains("no NVIDIA driver works here"));
    }
}

#[test]
fn another_library_is_refused() {
    for (library, part) in [("libm.so.6", "is another library"), ("/nowhere/lib.so", "/nowhere/lib.so")] {
        let output = run("chosen", &[("PTXSIM_DRIVER", "sim"), ("PTXSIM_LIBRARY", library)]);
        assert!(!output.status.success());
        assert!(String::from_utf8_lossy(&output.stderr).contains(part), "{library}");
    }
}

#[test]
#[ignore = "run by the_choice_can_be_made_by_hand"]
fn chosen() {
    let first = ptxsim::testing::ensure_driver();
    assert!(first.simulator().is_some());
    let others: Vec<_> = (0..8).map(|_| std::thread::spawn(ptxsim::testing::ensure_driver)).collect();
    assert!(others.into_iter().all(|t| t.join().unwrap().simulator().is_some()));
}
