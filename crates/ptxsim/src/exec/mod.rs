//! Runs kernels: grids, blocks, warps.

pub mod launch;
pub mod regs;
