//! Steps captured in CUDA graphs.

#[path = "../support/caches.rs"]
#[allow(dead_code)]
mod caches;
#[path = "../support/device.rs"]
mod device;
#[path = "../support/gpu.rs"]
#[allow(dead_code)]
mod gpu;
#[path = "../support/host.rs"]
#[allow(dead_code)]
mod host;
#[path = "../support/machine.rs"]
#[allow(dead_code)]
mod machine;

mod replays;
