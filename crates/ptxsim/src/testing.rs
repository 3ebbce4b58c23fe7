//! For tests: chooses the driver, and reads what the simulator counted and found.
//!
//! Call [`ensure_driver`] before anything that may load `libcuda.so`. It takes a real driver that works, else this
//! crate's shared library, which cargo builds beside the tests of every package that depends on this one.
//!
//! ```no_run
//! let driver = ptxsim::testing::ensure_driver();
//! // … cudarc or other users of the driver API …
//! if let Some(simulator) = driver.simulator() {
//!     assert!(simulator.take_faults().is_empty());
//! }
//! ```
//!
//! Options and counters have two scopes: what concerns the calling thread, so that tests can run side by side, and the
//! whole process. A fault ends the primary context for all tests of a process: let a test that provokes one hold
//! [`Simulator::exclusive`], and those that must not see it too.

use crate::fault::Fault;
use crate::options::Options;
use crate::stats::Stats;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW, Symbol};
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Chooses the driver: `real` or `sim`.
const CHOICE: &str = "PTXSIM_DRIVER";
/// Path of the shared library, if it is not beside the program.
const LIBRARY: &str = "PTXSIM_LIBRARY";
/// Tells a copy of this program to probe for a real driver and exit.
const PROBE: &str = "PTXSIM_PROBE_REAL_DRIVER";
/// What such a copy exits with if there is one.
const FOUND: i32 = 93;

/// The driver of this process.
#[derive(Debug, Clone, Copy)]
pub enum Driver {
    /// NVIDIA's.
    Real,
    /// This crate.
    Simulated(Simulator),
}

impl Driver {
    /// The simulator, if it is the driver.
    pub fn simulator(self) -> Option<Simulator> {
        match self {
            Self::Real => None,
            Self::Simulated(simulator) => Some(simulator),
        }
    }
}

/// Chooses the driver of this process, once, and says on stderr which it is.
///
/// The choice is the environment variable `PTXSIM_DRIVER` (`real` or `sim`), else a real driver that starts and has a
/// device, else the simulator.
///
/// # Panics
/// If `PTXSIM_DRIVER` is neither, or asks for a real driver and none works; if the simulator is wanted and its shared
/// library is not found, or `PTXSIM_CC` or `PTXSIM_OPTIONS` asks for what there is not.
pub fn ensure_driver() -> Driver {
    choose(|| match std::env::var(CHOICE).ok().as_deref() {
        Some("real") => {
            let how =
                "it does not start, or there is no device; without the variable the simulator stands in";
            assert!(probe_in_child(), "{CHOICE}=real: no NVIDIA driver works here: {how}");
            true
        }
        Some("sim") => false,
        None | Some("") => real_driver_works(),
        Some(other) => panic!("{CHOICE}={other}: must be `real` or `sim`"),
    })
}

/// The simulator, whatever else there is: for tests that only it can pass.
///
/// # Panics
/// If [`ensure_driver`] chose a real driver before, or the shared library is not found.
pub fn ensure_simulator() -> Simulator {
    let driver = choose(|| false);
    driver.simulator().expect("this process has loaded a real driver")
}

fn choose(real: impl FnOnce() -> bool) -> Driver {
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    *DRIVER.get_or_init(|| {
        if real() {
            eprintln!("ptxsim: the CUDA driver is the real one");
            Driver::Real
        } else {
            if let Some(mistake) = crate::driver::mistake_in_environment() {
                panic!("ptxsim: {mistake}");
            }
            let simulator = Simulator::load().unwrap_or_else(|error| panic!("ptxsim: {error}"));
            eprintln!("ptxsim: the CUDA driver is simulated");
            Driver::Simulated(simulator)
        }
    })
}

/// Whether there is a real driver that works. Most machines without one are known by their files.
fn real_driver_works() -> bool {
    // Kernel module, or WSL's.
    if !["/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia/version", "/dev/nvhost-ctrl"]
        .iter()
        .any(|p| Path::new(p).exists())
    {
        return false;
    }
    probe_in_child()
}

/// Whether a real driver starts, as a child process finds out: once loaded here, it could not be replaced.
fn probe_in_child() -> bool {
    let Ok(program) = std::env::current_exe() else { return false };
    let child = Command::new(program).env(PROBE, "1").stdin(Stdio::null()).stdout(Stdio::null()).status();
    child.is_ok_and(|status| status.code() == Some(FOUND))
}

/// Runs before `main` in every program that links this crate: in a child that [`probe_in_child`] started, probes
/// and exits. So no test of the program runs a second time.
extern "C" fn probe_and_exit() {
    if std::env::var_os(PROBE).is_some() {
        std::process::exit(if probe().is_some() { FOUND } else { 0 });
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = probe_and_exit;

/// Starts a real driver.
fn probe() -> Option<()> {
    let library = ["libcuda.so.1", "libcuda.so"].into_iter().find_map(|name| {
        // SAFETY: loading the driver runs its initialisers, as every CUDA program does.
        unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) }.ok()
    })?;
    // SAFETY: only the presence of the symbol is looked at.
    let simulated = unsafe { library.get::<extern "C" fn()>(b"ptxsim_options\0") }.is_ok();
    // SAFETY: the driver API's signature.
    let init = unsafe { library.get::<extern "C" fn(u32) -> i32>(b"cuInit\0") }.ok()?;
    // SAFETY: the driver API's signature.
    let count = unsafe { library.get::<extern "C" fn(*mut i32) -> i32>(b"cuDeviceGetCount\0") }.ok()?;
    let mut devices = 0;
    let works = !simulated && init(0) == 0 && count(&raw mut devices) == 0 && devices > 0;
    // The process ends now; unloading a driver is a risk for nothing.
    std::mem::forget(library);
    works.then_some(())
}

/// The simulator, loaded into this process.
#[derive(Debug, Clone, Copy)]
pub struct Simulator {
    library: &'static Library,
}

impl Simulator {
    fn load() -> Result<Self, String> {
        let path = find()?;
        // SAFETY: the library is this crate's; its initialisers only look for the probe's variable.
        let opened = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) };
        // dlopen's own words, which name the path; libloading's leave them out
        let library = opened.map_err(|e| match std::error::Error::source(&e) {
            Some(reason) => reason.to_string(),
            None => format!("{}: {e}", path.display()),
        })?;
        // SAFETY: only the presence of the symbol is looked at.
        if unsafe { library.get::<extern "C" fn()>(b"ptxsim_options\0") }.is_err() {
            return Err(format!("{} is another library: it has no ptxsim_options", path.display()));
        }
        // Never unloaded: whoever opens `libcuda.so` from now on gets it.
        Ok(Self { library: Box::leak(Box::new(library)) })
    }

    fn function<T>(&self, name: &CStr) -> Symbol<T> {
        // SAFETY: the callers below name functions of `driver::extras` with their types.
        let found = unsafe { self.library.get::<T>(name.to_bytes_with_nul()) };
        found.unwrap_or_else(|e| {
            panic!("{name:?} is missing from the simulator's library, is it an old one? {e}")
        })
    }

    /// A function that hands out a JSON text.
    fn text<T: DeserializeOwned>(&self, call: impl FnOnce(*mut *mut c_char) -> i32) -> T {
        let mut text: *mut c_char = std::ptr::null_mut();
        let code = call(&raw mut text);
        assert!(code == 0 && !text.is_null(), "the simulator answered {code}");
        // SAFETY: the function succeeded, so `text` is a C string until it is given back below.
        let json = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
        self.function::<extern "C" fn(*mut c_char) -> i32>(c"ptxsim_free")(text);
        serde_json::from_str(&json)
            .unwrap_or_else(|e| panic!("the simulator's library is another version: {e}"))
    }

    fn take<T: DeserializeOwned>(&self, name: &CStr, scope: i32) -> T {
        self.text(|out| self.function::<extern "C" fn(*mut *mut c_char, i32) -> i32>(name)(out, scope))
    }

    fn set_options_in(&self, options: Option<&Options>, scope: i32) {
        let json = options.map(|o| serde_json::to_string(o).expect("options are plain data"));
        let json = json.map(|text| CString::new(text).expect("JSON has no NUL"));
        let pointer = json.as_ref().map_or(std::ptr::null(), |text| text.as_ptr());
        let set = self.function::<extern "C" fn(*const c_char, i32) -> i32>(c"ptxsim_set_options");
        let code = set(pointer, scope);
        assert!(code == 0, "the simulator's library is another version (answer {code})");
    }

    /// Sets the options of the process. What was submitted keeps those it was submitted with.
    pub fn set_options(&self, options: &Options) {
        self.set_options_in(Some(options), 1);
    }

    /// Runs something with other options for what this thread submits.
    pub fn with_options<T>(&self, options: &Options, run: impl FnOnce() -> T) -> T {
        struct Back(Simulator);
        impl Drop for Back {
            fn drop(&mut self) {
                self.0.set_options_in(None, 0);
            }
        }
        self.set_options_in(Some(options), 0);
        let _back = Back(*self);
        run()
    }

    /// The options that hold for this thread.
    pub fn options(&self) -> Options {
        self.text(|out| self.function::<extern "C" fn(*mut *mut c_char) -> i32>(c"ptxsim_options")(out))
    }

    /// Counters of the launches that this thread submitted and that have run, since the last call.
    ///
    /// # Panics
    /// If one of them ran with counters off ([`Options::counters`]): its zeros would pass for a measurement.
    pub fn take_stats(&self) -> Vec<Stats> {
        self.take_counted(0)
    }

    /// Counters of all launches since the last call.
    ///
    /// # Panics
    /// As [`Simulator::take_stats`] does.
    pub fn take_all_stats(&self) -> Vec<Stats> {
        self.take_counted(1)
    }

    fn take_counted(&self, scope: i32) -> Vec<Stats> {
        let all: Vec<Stats> = self.take(c"ptxsim_take_stats", scope);
        if let Some(launch) = all.iter().find(|launch| !launch.counters) {
            let kernel = &launch.kernel;
            panic!("{kernel} ran with counters off (PTXSIM_OPTIONS=checks=off, or the options of the test)");
        }
        all
    }

    /// How often this thread called each function of the driver since the last call.
    pub fn take_calls(&self) -> BTreeMap<String, u64> {
        self.text(|out| self.function::<extern "C" fn(*mut *mut c_char) -> i32>(c"ptxsim_take_calls")(out))
    }

    /// Bytes that are allocated on the device of this thread's context. `cuMemGetInfo` also tells what the host has left.
    ///
    /// # Panics
    /// If no context is current.
    pub fn used_bytes(&self) -> u64 {
        let mut used = 0u64;
        let code = self.function::<extern "C" fn(*mut u64) -> i32>(c"ptxsim_used")(&mut used);
        assert_eq!(code, 0, "no context is current");
        used
    }

    /// Faults in launches that this thread submitted, since the last call.
    pub fn take_faults(&self) -> Vec<Fault> {
        self.take(c"ptxsim_take_reports", 0)
    }

    /// All faults since the last call.
    pub fn take_all_faults(&self) -> Vec<Fault> {
        self.take(c"ptxsim_take_reports", 1)
    }

    /// Ends all contexts: their handles are invalid from now on. Counters and reports are dropped.
    pub fn reset(&self) {
        self.function::<extern "C" fn() -> i32>(c"ptxsim_reset")();
    }

    /// Replaces the device by one of this compute capability (80, 86, 89, 90 or 120), after [`Simulator::reset`].
    ///
    /// # Errors
    /// If there is no such card.
    pub fn card(&self, cc: u32) -> Result<(), String> {
        self.cards(&[cc])
    }

    /// The same with several devices.
    ///
    /// # Errors
    /// If there is no such card.
    pub fn cards(&self, ccs: &[u32]) -> Result<(), String> {
        let list = ccs.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        self.set_cards(&CString::new(list).map_err(|e| e.to_string())?)
    }

    fn set_cards(&self, list: &CStr) -> Result<(), String> {
        self.reset();
        let set = self.function::<extern "C" fn(*const c_char, *const c_char) -> i32>(c"ptxsim_set_option");
        match set(c"cc".as_ptr(), list.as_ptr()) {
            0 => Ok(()),
            code => Err(format!("cards {list:?}: the simulator answered {code}")),
        }
    }

    /// Keeps out other holders, for tests that provoke faults or change the process's options or cards. When it goes,
    /// contexts are ended, and cards and options are the default again.
    pub fn exclusive(&self) -> Exclusive {
        static LOCK: Mutex<()> = Mutex::new(());
        let guard = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        Exclusive { simulator: *self, _guard: guard }
    }
}

/// See [`Simulator::exclusive`].
#[derive(Debug)]
pub struct Exclusive {
    simulator: Simulator,
    _guard: MutexGuard<'static, ()>,
}

impl Drop for Exclusive {
    fn drop(&mut self) {
        // The default is always known.
        let _ = self.simulator.set_cards(c"default");
        self.simulator.set_options_in(None, 0);
        self.simulator.set_options_in(None, 1);
    }
}

/// The shared library: named by the environment, or in the folders where cargo puts it.
fn find() -> Result<PathBuf, String> {
    if let Some(path) = std::env::var_os(LIBRARY) {
        return Ok(path.into());
    }
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let mut looked = Vec::new();
    // target/PROFILE/deps/test, target/PROFILE/program, target/PROFILE/examples/example
    for folder in program.ancestors().skip(1).take(3) {
        for place in [folder.to_path_buf(), folder.join("deps")] {
            let path = place.join("libptxsim.so");
            if path.is_file() {
                return Ok(path);
            }
            looked.push(place.display().to_string());
        }
    }
    Err(format!(
        "libptxsim.so is not in {}; make ptxsim a (dev-)dependency, or set {LIBRARY}",
        looked.join(", ")
    ))
}
