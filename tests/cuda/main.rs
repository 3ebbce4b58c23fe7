//! The kernels through their launch functions, against the CPU: the same bits.

#[path = "../support/gpu.rs"]
#[allow(dead_code)]
mod gpu;

mod anchors;
mod append;
mod dequantize;
mod fp8;
mod hadamard;
mod layout;
mod pages;
mod quantize;
mod steps;
