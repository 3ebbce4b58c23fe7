//! What memory gives.

use super::Bench;
use qkv::cuda::launch::{stream_copy, stream_read};

/// Bytes of a buffer at least.
const BYTES: usize = 1 << 30;

/// Bytes a millisecond of a kernel that reads, and of one that copies (reads and writes counted).
pub(crate) fn run(bench: &mut Bench<'_>) -> (f64, f64) {
    let gpu = bench.gpu;
    let n = if bench.smoke { 1 << 16 } else { BYTES.max(8 * bench.cache).next_multiple_of(16) };
    let (from, mut to, mut sum) = (gpu.zeros::<u8>(n), gpu.zeros::<u8>(n), gpu.zeros::<u32>(1));
    let read = bench.median(1, |_| {
        stream_read(&gpu.device, gpu.raw(), (&from).into(), (&mut sum).into()).expect("a launch");
    });
    let copy = bench.median(1, |_| {
        stream_copy(&gpu.device, gpu.raw(), (&from).into(), (&mut to).into()).expect("a launch");
    });
    bench.add("stream", "read".into(), read, n, None, None);
    bench.add("stream", "copy".into(), copy, 2 * n, None, None);
    (n as f64 / read, 2.0 * n as f64 / copy)
}
