//! The project's commands: `cargo xtask demo`, `cargo xtask test`, `cargo xtask quality`, `cargo xtask bench-peers`.
//!
//! * [`model`] fetches the model, [`quality`] measures what a scheme costs in quality, [`memory`] what it takes in
//!   bytes and time, [`texts`] generates; [`demo`] puts them into one [`report`].
//! * [`metrics`], [`schemes`], [`windows`], [`peers`], [`capacity`], [`table`] and [`chart`] are their parts.

pub mod metrics;
pub mod model;
pub mod progress;
pub mod quality;
pub mod schemes;
pub mod windows;
