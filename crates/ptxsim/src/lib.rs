//! A stand-in for the NVIDIA driver: runs CUDA kernels on a machine without a GPU.
//!
//! `libptxsim.so` exports the part of the CUDA driver API that cudarc calls. A module's PTX (alone or from a fatbin) is
//! interpreted warp by warp, with more checks than compute-sanitizer makes and with counters that hardware profilers
//! give.
//!
//! * [`ptx`]: text to syntax tree. [`fatbin`]: finds the PTX in what nvcc made.
//! * [`program`]: a syntax tree to operations that are ready to run; [`alu`]: what instructions without memory do.
//! * [`exec`]: grids, blocks and warps; shared and local memory, barriers, checks, counters.
//! * [`memory`], [`card`], [`options`], [`stats`], [`fault`]: what these share.
//! * [`driver`]: the C functions. [`testing`]: chooses a driver for tests, and reads counters and reports.

pub mod alu;
pub mod card;
pub mod driver;
pub mod exec;
pub mod fatbin;
pub mod fault;
pub mod files;
pub mod memory;
pub mod options;
pub mod program;
pub mod ptx;
pub mod stats;
pub mod testing;
