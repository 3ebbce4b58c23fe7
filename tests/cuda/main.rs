//! The kernels through their launch functions, against the CPU: the same bits.

#[path = "../support/gpu.rs"]
#[allow(dead_code)]
mod gpu;

mod append;
mod fp8;
mod hadamard;
mod steps;
