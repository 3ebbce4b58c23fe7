//! Runs the kernels of `tests/kernels`, as nvcc compiled them for several architectures.

mod basic;
mod checks;
mod counters;
mod habits;
mod hopper;
mod matrix;
mod order;
mod support;
