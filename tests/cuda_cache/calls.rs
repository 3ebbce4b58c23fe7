//! What a step asks of the driver: one copy from page-locked memory, an event behind it, and launches. Nothing is allocated,
//! waited for or read back.

use crate::device::OnGpu;
use crate::gpu::Random;
use crate::machine::Machine;
use qkv::{Batch, Bits, CacheConfig};
use std::collections::BTreeMap;

/// What may be called in a step.
const ALLOWED: [&str; 7] = [
    "cuCtxGetCurrent",
    "cuEventQuery",
    "cuEventRecord",
    "cuLaunchKernel",
    "cuMemcpyHtoDAsync_v2",
    "cuStreamIsCapturing",
    "cuCtxSetCurrent",
];

#[test]
fn a_step_launches_and_nothing_else() {
    let gpu = OnGpu::new();
    let Some(simulator) = gpu.0.simulator else { return };
    let layers = 3;
    let windowed = CacheConfig::new(layers, 2, 32).with_bits(Bits::B4).with_capacity(3, 320);
    let direct = windowed.clone().with_bits(Bits::B8).direct();
    for config in [windowed, direct] {
        let mut cache = gpu.paged(config, 15).unwrap();
        let seats: Vec<_> = (0..3).map(|_| cache.open().unwrap()).collect();
        let x = gpu.input(&Random::new(3).normals(3 * 2 * 32));
        for step in 0..150 {
            gpu.0.stream.synchronize().unwrap();
            // A caller's part, and host work only.
            simulator.take_calls();
            for seat in &seats {
                cache.reserve(*seat, 1).unwrap();
            }
            assert_eq!(simulator.take_calls(), BTreeMap::new(), "reserve");
            let view = OnGpu::view(&x, [3, 2, 32]);
            simulator.take_calls();
            cache.begin_step(&Batch::new(&seats, &[0, 1, 2, 3])).unwrap();
            for layer in 0..layers {
                cache.append(layer, &view, &view).unwrap();
            }
            let calls = simulator.take_calls();
            let other: Vec<_> = calls.keys().filter(|c| !ALLOWED.contains(&c.as_str())).collect();
            assert!(other.is_empty(), "step {step}: {other:?}");
            assert_eq!(calls["cuLaunchKernel"], 1 + layers as u64, "step {step}");
            assert_eq!(calls["cuMemcpyHtoDAsync_v2"], 1, "step {step}");
        }
        assert_eq!(cache.len(seats[0]).unwrap(), 150);
    }
}

/// Launches of a step that closes no tile move a few rows.
#[test]
fn calls_between_steps_do_not_wait() {
    let gpu = OnGpu::new();
    let Some(simulator) = gpu.0.simulator else { return };
    let config = CacheConfig::new(2, 2, 32).with_bits(Bits::B4).with_capacity(3, 320);
    let mut cache = gpu.paged(config, 15).unwrap();
    let seat = cache.open().unwrap();
    let x = gpu.input(&Random::new(3).normals(250 * 2 * 32));
    cache.reserve(seat, 250).unwrap();
    cache.begin_step(&Batch::new(&[seat], &[0, 250])).unwrap();
    for layer in 0..2 {
        let view = OnGpu::view(&x, [250, 2, 32]);
        cache.append(layer, &view, &view).unwrap();
    }
    simulator.take_calls();
    let mut seats = vec![seat, cache.fork(seat).unwrap()];
    cache.truncate(seats[1], 100).unwrap();
    cache.reorder(&mut seats, &[1, 1]).unwrap();
    cache.clear(seats[0]).unwrap();
    cache.close(seats[1]).unwrap();
    cache.open().unwrap();
    let calls = simulator.take_calls();
    let waits = ["cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize", "cuMemAlloc_v2"];
    assert!(!waits.iter().any(|w| calls.contains_key(*w)), "{calls:?}");
}
