//! The kernels through their launch functions, against the CPU: the same bits.

#[path = "../support/gpu.rs"]
#[allow(dead_code)]
mod gpu;

#[path = "../support/reference.rs"]
#[allow(dead_code)]
mod reference;

mod anchors;
mod append;
mod attend;
mod dequantize;
mod empty;
mod fp8;
mod hadamard;
mod layout;
mod merge;
mod pages;
mod prefill;
mod quantize;
mod resources;
mod steps;

/// `[tokens, heads, dim]` one after the other.
fn contiguous(dims: [usize; 3]) -> qkv::Shape {
    let [t, h, d] = dims;
    qkv::Shape { dims, batch_tokens: t.max(1), strides: [t * h * d, h * d, d, 1] }
}

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
