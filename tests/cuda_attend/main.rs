//! Attention on the device: against f64 attention over the decoded values, and against the CPU's cache.

#[path = "../support/caches.rs"]
#[allow(dead_code)]
mod caches;
#[path = "../support/gpu.rs"]
#[allow(dead_code)]
mod gpu;
#[path = "../support/host.rs"]
#[allow(dead_code)]
mod host;
#[path = "../support/layer.rs"]
#[allow(dead_code)]
mod layer;
#[path = "../support/reference.rs"]
#[allow(dead_code)]
mod reference;
#[path = "../support/still.rs"]
mod still;

mod attend;
mod merge;
mod prefill;
