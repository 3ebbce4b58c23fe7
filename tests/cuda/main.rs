//! The kernels through their launch functions, against the CPU: the same bits.

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

mod anchors;
mod append;
mod baselines;
mod dequantize;
mod empty;
mod fp8;
mod hadamard;
mod layout;
mod pages;
mod quantize;
mod resources;
mod steps;

/// The one launch since the last look moved no more bytes than it had to, in whole sectors, and met no bank conflict.
fn cost(simulator: ptxsim::testing::Simulator, least: usize, what: &str) {
    let stats = simulator.take_stats();
    assert_eq!(stats.len(), 1, "{what}");
    let t = &stats[0].total;
    let bytes = t.global_bytes as f64;
    assert!(bytes <= 1.02 * least as f64, "{what}: {bytes} bytes, {least} would do");
    let full = bytes / (32 * t.global_sectors) as f64;
    assert!(full >= 0.95, "{what}: sectors are {:.1} % full", 100.0 * full);
    let where_ = stats[0].lines.iter().filter(|l| l.counts.shared_conflicts > 0).map(|l| &l.line);
    assert_eq!(t.shared_conflicts, 0, "{what}: bank conflicts at {:?}", where_.collect::<Vec<_>>());
}
