//! The C functions of the CUDA driver API.
//!
//! Handles are keys into tables and addresses of the caller are never followed without a check, so that nonsense gives
//! an error code. Work goes through `work`, a graph of operations that streams, events and captured graphs order; by
//! default each runs at once, in the order of submission.
//!
//! Everything is exported under its C name and takes integers where C has pointers: all are one word.

use error::{Code, Failure, Outcome};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Defines exported functions. The body returns an [`Outcome`]; a panic in it becomes `CUDA_ERROR_UNKNOWN`.
macro_rules! api {
    ($($(#[$attribute:meta])* fn $name:ident($($argument:ident: $ty:ty),* $(,)?) $body:block)*) => { $(
        $(#[$attribute])*
        #[doc = concat!("`", stringify!($name), "`")]
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, unreachable_pub, clippy::too_many_arguments, reason = "the driver API's")]
        pub extern "C" fn $name($($argument: $ty),*) -> i32 {
            $crate::driver::call(stringify!($name), move || -> $crate::driver::error::Outcome { $body })
        }
    )* };
}

mod capture;
mod context;
mod device;
mod error;
mod event;
mod extras;
mod function;
mod graph;
mod host;
mod launch;
mod memory;
mod module;
mod occupancy;
mod pool;
mod state;
mod stream;
pub mod tensor_map;
mod unsupported;
mod work;

thread_local! {
    /// Whether this thread runs a host function of a stream, which may not call the driver.
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
    /// Calls of this thread, by function, since they were taken last.
    static CALLS: RefCell<BTreeMap<&'static str, u64>> = const { RefCell::new(BTreeMap::new()) };
}

/// What is wrong with the variables of the environment that choose cards and options.
pub(crate) fn mistake_in_environment() -> Option<String> {
    extras::from_environment().err()
}

/// Runs the inside of an exported function.
fn call(name: &'static str, inside: impl FnOnce() -> Outcome) -> i32 {
    if name.starts_with("cu") {
        // A thread that ends has nobody left who asks.
        let _ = CALLS.try_with(|calls| *calls.borrow_mut().entry(name).or_default() += 1);
    }
    let outcome = match catch_unwind(AssertUnwindSafe(inside)) {
        Ok(outcome) => outcome,
        Err(panic) => {
            let text = panic_text(panic.as_ref());
            Err(Failure { code: Code::Unknown, reason: format!("internal error: {text}") })
        }
    };
    match outcome {
        Ok(()) => 0,
        Err(Failure { code, reason }) => {
            if !reason.is_empty() {
                eprintln!("ptxsim: {name}: {} ({}): {reason}", code.name(), code as i32);
            }
            code as i32
        }
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "panic".to_string())
}

/// Whether an address lies where device memory is handed out.
fn looks_like_device(address: u64) -> bool {
    use crate::memory::GLOBAL_BASE;
    (GLOBAL_BASE..GLOBAL_BASE << 4).contains(&address)
}
