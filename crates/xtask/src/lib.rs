//! The project's commands: `cargo xtask demo`, `cargo xtask test`, `cargo xtask quality`, `cargo xtask bench-peers`,
//! `cargo xtask kernels`, `cargo xtask sass`, `cargo xtask bytes`, `cargo xtask gpu`.
//!
//! * [`model`] fetches the model, [`texts`] generates, [`memory`] measures bytes and times, [`quality`] what a scheme
//!   costs in quality ([`decoded`]: with attention in f64); [`demo`] puts them into one [`report`].
//! * [`metrics`], [`schemes`], [`windows`], [`peers`], [`capacity`], [`table`], [`chart`] and [`progress`] are their parts.
//! * [`toolkit`] finds or installs nvcc, [`kernels`] builds the CUDA kernels and shows what each needs, [`sass`] holds the instructions
//!   of the attention kernels against their budget, [`bytes`] what they move against the fewest bytes that would do.
//! * [`gpu`] makes a folder that tests and times the kernels where there is only a driver.
//! * [`checks`] runs every check there is; [`bench_peers`] times other projects beside this one.

pub mod bench_peers;
pub mod bytes;
pub mod capacity;
pub mod chart;
pub mod checks;
pub mod decoded;
pub mod demo;
pub mod gpu;
pub mod kernels;
pub mod memory;
pub mod metrics;
pub mod model;
pub mod peers;
pub mod progress;
pub mod quality;
pub mod report;
pub mod sass;
pub mod schemes;
pub mod table;
pub mod texts;
pub mod toolkit;
pub mod windows;
