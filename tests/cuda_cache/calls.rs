//! What a step asks of the driver: one copy from page-locked memory, an event behind it, and launches. Nothing is allocated,
//! waited for or read back.

use crate::device::OnGpu;
use crate::gpu::Random;
use crate::machine::Machine;
use crate::model::{DIM, HEADS, contents};
use ptxsim::options::Options;
use qkv::cuda::STAGES;
use qkv::{Batch, Bits, CacheConfig, Dtype};
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
    let windowed = CacheConfig::new(layers, HEADS, DIM).with_bits(Bits::B4).with_capacity(3, 320);
    let direct = windowed.clone().with_bits(Bits::B8).direct();
    for config in [windowed, direct] {
        let mut cache = gpu.paged(config, 15).unwrap();
        let seats: Vec<_> = (0..3).map(|_| cache.open().unwrap()).collect();
        let x = gpu.input(Dtype::F32, &Random::new(3).normals(3 * HEADS * DIM));
        for step in 0..150 {
            gpu.0.stream.synchronize().unwrap();
            // A caller's part, and host work only.
            simulator.take_calls();
            for seat in &seats {
                cache.reserve(*seat, 1).unwrap();
            }
            assert_eq!(simulator.take_calls(), BTreeMap::new(), "reserve");
            let view = OnGpu::view(&x, [3, HEADS, DIM]);
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

#[test]
fn calls_between_steps_do_not_wait() {
    let gpu = OnGpu::new();
    let Some(simulator) = gpu.0.simulator else { return };
    let config = CacheConfig::new(2, HEADS, DIM).with_bits(Bits::B4).with_capacity(3, 320);
    let mut cache = gpu.paged(config, 15).unwrap();
    let seat = cache.open().unwrap();
    let x = gpu.input(Dtype::F32, &Random::new(3).normals(250 * HEADS * DIM));
    cache.reserve(seat, 250).unwrap();
    cache.begin_step(&Batch::new(&[seat], &[0, 250])).unwrap();
    for layer in 0..2 {
        let view = OnGpu::view(&x, [250, HEADS, DIM]);
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

/// The host runs ahead of a device that does nothing before somebody waits: batches of steps that were not copied yet stay whole.
#[test]
fn the_host_may_be_ahead() {
    let gpu = OnGpu::new();
    let Some(simulator) = gpu.0.simulator else { return };
    let config = CacheConfig::new(2, HEADS, DIM).with_bits(Bits::B4).with_capacity(3, 320);
    let x = gpu.input(Dtype::F32, &Random::new(3).normals(3 * HEADS * DIM));
    let run = |wait: bool| {
        let mut cache = gpu.paged(config.clone(), 15).unwrap();
        let seats: Vec<_> = (0..3).map(|_| cache.open().unwrap()).collect();
        let mut waits = 0;
        for step in 0..5 * STAGES {
            // Another batch each time, with rows of its own.
            let batch = [seats[step % 3], seats[(step + 1) % 3]];
            let starts = [0, (1 + step % 2) as i32, 3];
            cache.reserve(batch[0], starts[1] as usize).unwrap();
            cache.reserve(batch[1], (3 - starts[1]) as usize).unwrap();
            cache.begin_step(&Batch::new(&batch, &starts)).unwrap();
            let view = OnGpu::view(&x, [3, HEADS, DIM]);
            (0..2).for_each(|layer| cache.append(layer, &view, &view).unwrap());
            if wait {
                gpu.0.stream.synchronize().unwrap();
            }
            waits += simulator.take_calls().get("cuEventSynchronize").copied().unwrap_or(0);
        }
        let held: Vec<_> = seats.iter().map(|s| contents(&gpu, &cache, *s)).collect();
        assert_eq!(cache.device_status().unwrap().bad_rows, 0);
        (held, waits)
    };
    let (held, waits) = run(true);
    assert_eq!(waits, 0);
    let delayed = Options { delay_streams: true, ..Options::default() };
    let (ahead, waits) = simulator.with_options(&delayed, || run(false));
    assert!(held == ahead);
    assert!(waits > 0, "the host is ahead of the device");
}
