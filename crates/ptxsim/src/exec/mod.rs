//! Runs kernels: grids, blocks, warps.
//!
//! * `launch`: a grid over threads of the host. `gang`: blocks that are resident together, their warps in turn. `warp`:
//!   lanes that diverge and come together. `run`: one operation after the other.
//! * `rows`: lanes of a register. `access`, `global`, `shared`, `atomics`, `matrix`: memory. `sync`, `mbarrier`,
//!   `async_copy`, `bulk`, `tensor`: what waits and what is waited for. `order`: what fences order. `taint`: reads of
//!   memory that was never written. `system`: `printf`, `assert`.
//! * [`regs`]: registers, and what `crate::alu` runs on them.

mod access;
mod async_copy;
mod atomics;
mod bulk;
mod gang;
mod global;
pub mod launch;
mod matrix;
mod mbarrier;
mod order;
pub mod regs;
mod rows;
mod run;
mod shared;
mod sync;
mod system;
mod taint;
mod tensor;
mod warp;
