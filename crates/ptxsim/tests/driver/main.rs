//! The driver API through unmodified cudarc: the way a program takes, and every way that it should not.

mod abuse;
mod capture;
mod context;
mod copies;
mod kernels;
mod streams;
mod symbols;

use cudarc::driver::{CudaContext, DriverError};
use ptxsim::testing::{Exclusive, ensure_simulator};
use std::sync::Arc;

/// Calls a function of `sys` and gives its code as a number.
macro_rules! cu {
    ($function:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: the simulator looks at every handle and address before it uses them, which is what is tested here.
        let code = unsafe { cudarc::driver::sys::$function($($argument),*) };
        code as u32
    }};
}
use cu;

/// The simulator for one test alone, with a context.
fn session() -> (Exclusive, Arc<CudaContext>) {
    let exclusive = ensure_simulator().exclusive();
    let context = CudaContext::new(0).expect("a context");
    (exclusive, context)
}

/// The code of a failure.
fn code<T>(result: Result<T, DriverError>) -> u32 {
    result.err().map_or(0, |e| e.0 as u32)
}
