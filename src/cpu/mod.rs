//! The CPU backend: pages in row order, attention over packed codes on all cores, and the memory of a cache.

mod append;
pub(crate) mod attend;
mod memory;
mod rows;

pub use memory::{Cpu, CpuSnapshot};
