//! Captured steps: replayed while tiles close, they leave what direct steps leave.

use crate::caches::any_config;
use crate::device::OnGpu;
use crate::gpu::Random;
use crate::machine::{Machine, held};
use cudarc::driver::{CudaGraph, CudaSlice, sys};
use ptxsim::options::Options;
use qkv::cuda::{CapturedStep, Cuda, DeviceTensor};
use qkv::{Batch, Bits, CacheConfig, Error, KvCache, PagedKvCache, Seat};
use std::ops::Range;

const LAYERS: usize = 2;

fn capture(gpu: &OnGpu, cache: &mut PagedKvCache<Cuda>, step: &CapturedStep, input: &Input) -> CudaGraph {
    let stream = &gpu.0.stream;
    // Views first: making one asks cudarc for its events.
    let views = input.views();
    stream.begin_capture(sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    cache.capture_step(step).unwrap();
    for layer in 0..LAYERS {
        cache.append(layer, &views[0], &views[1]).unwrap();
    }
    let flags = sys::CUgraphInstantiate_flags_enum::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    stream.end_capture(flags).unwrap().expect("a graph")
}

/// The memory that new keys and values are written to.
struct Input {
    memory: [CudaSlice<f32>; 2],
    dims: [[usize; 3]; 2],
}

impl Input {
    fn new(gpu: &OnGpu, c: &CacheConfig, rows: usize) -> Self {
        let dims = [c.key_dim, c.value_dim].map(|d| [rows, c.kv_heads, d]);
        Self { memory: dims.map(|d| gpu.0.zeros(d.iter().product())), dims }
    }

    fn views(&self) -> [DeviceTensor<'_>; 2] {
        [0, 1].map(|i| DeviceTensor::thd(&self.memory[i], self.dims[i]).unwrap())
    }

    /// Numbers of step `i`.
    fn write(&mut self, gpu: &OnGpu, i: usize) {
        for (op, memory) in self.memory.iter_mut().enumerate() {
            let x = Random::new((2 * i + op) as u64).normals(memory.len());
            gpu.0.stream.memcpy_htod(&x, memory).unwrap();
        }
    }
}

fn direct_step(cache: &mut PagedKvCache<Cuda>, seats: &[Seat], starts: &[i32], input: &Input) {
    for (i, seat) in seats.iter().enumerate() {
        cache.reserve(*seat, (starts[i + 1] - starts[i]) as usize).unwrap();
    }
    cache.begin_step(&Batch::new(seats, starts)).unwrap();
    let views = input.views();
    for layer in 0..LAYERS {
        cache.append(layer, &views[0], &views[1]).unwrap();
    }
}

/// Pages, windows and sinks.
fn all(gpu: &OnGpu, cache: &PagedKvCache<Cuda>, seat: Seat) -> (Vec<Vec<u8>>, Vec<Vec<u32>>) {
    let (c, tiles) = (cache.config(), cache.packed_len(seat).unwrap() / 64);
    let (mut pages, mut decoded) = (vec![cache.export_sinks(seat).unwrap()], vec![]);
    for layer in 0..LAYERS {
        for (head, tile) in (0..c.kv_heads).flat_map(|h| (0..tiles).map(move |t| (h, t))) {
            pages.push(cache.export_page(seat, layer, head, tile).unwrap());
        }
        decoded
            .extend(held(gpu, cache, layer, seat).map(|x| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>()));
    }
    (pages, decoded)
}

#[test]
fn replays_are_steps() {
    let gpu = OnGpu::new();
    replay(&gpu, 0..3);
    // The same where the device does nothing before somebody waits: tables that it has not copied yet must stay.
    let delayed = Options { delay_streams: true, ..Options::default() };
    if let Some(simulator) = gpu.0.simulator {
        simulator.with_options(&delayed, || replay(&gpu, 3..6));
    }
}

fn replay(gpu: &OnGpu, cases: Range<u64>) {
    for case in cases {
        let mut random = Random::new(500 + case);
        let config = any_config(&mut random);
        // Sequences of different lengths, one and two tokens a step.
        let (starts, lengths) = ([0, 1, 3], [37, 5]);
        let mut caches = [0, 1].map(|_| gpu.paged(config.clone(), 16).unwrap());
        let seats = [0, 1].map(|_| caches[0].open().unwrap());
        assert_eq!(seats, [0, 1].map(|_| caches[1].open().unwrap()));
        let mut first = Input::new(gpu, &config, 42);
        first.write(gpu, 999);
        for cache in &mut caches {
            direct_step(cache, &seats, &[0, lengths[0], lengths[0] + lengths[1]], &first);
        }
        let [direct, replayed] = &mut caches;
        let mut input = Input::new(gpu, &config, 3);
        let step = replayed.prepare_capture(&Batch::new(&seats, &starts)).unwrap();
        let before = (replayed.len(seats[0]).unwrap(), replayed.stats());
        let graph = capture(gpu, replayed, &step, &input);
        assert_eq!((replayed.len(seats[0]).unwrap(), replayed.stats()), before, "nothing has run");
        for i in 0..150 {
            input.write(gpu, i);
            direct_step(direct, &seats, &starts, &input);
            replayed.advance(&step).unwrap();
            graph.launch().unwrap();
            // What changes lengths in between is followed by the graph.
            if i == 60 || i == 100 {
                for cache in [&mut *direct, &mut *replayed] {
                    let n = cache.len(seats[0]).unwrap();
                    cache.truncate(seats[0], n - [3, 70][usize::from(i == 100)]).unwrap();
                }
            }
        }
        for seat in seats {
            assert_eq!(direct.len(seat), replayed.len(seat));
            assert!(all(gpu, direct, seat) == all(gpu, replayed, seat), "case {case}, {config:?}");
        }
        assert_eq!(direct.stats(), replayed.stats());
        let status = replayed.device_status().unwrap();
        assert_eq!((status.missing_blocks, status.over_capacity, status.bad_seats), (0, 0, 0));
        drop(graph);
    }
}

#[test]
fn a_contiguous_cache_is_replayed() {
    let gpu = OnGpu::new();
    let config =
        CacheConfig::new(LAYERS, 2, 32).with_bits(Bits::B2).with_residual(Some(32)).with_capacity(2, 128);
    let (mut direct, mut replayed) =
        (gpu.contiguous(config.clone()).unwrap(), gpu.contiguous(config.clone()).unwrap());
    let mut input = Input::new(&gpu, &config, 2);
    let step = replayed.prepare_capture(1).unwrap();
    let views = input.views();
    gpu.0.stream.begin_capture(sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    replayed.capture_step(&step).unwrap();
    (0..LAYERS).for_each(|layer| replayed.append(layer, &views[0], &views[1]).unwrap());
    let flags = sys::CUgraphInstantiate_flags_enum::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = gpu.0.stream.end_capture(flags).unwrap().expect("a graph");
    for i in 0..128 {
        input.write(&gpu, i);
        let views = input.views();
        (0..LAYERS).for_each(|layer| direct.append(layer, &views[0], &views[1]).unwrap());
        replayed.advance(&step).unwrap();
        graph.launch().unwrap();
    }
    for seat in [Seat::new(0), Seat::new(1)] {
        assert!(all(&gpu, direct.paged(), seat) == all(&gpu, replayed.paged(), seat), "{seat:?}");
    }
    assert!(matches!(replayed.advance(&step), Err(Error::Capacity { .. })));
    assert_eq!((replayed.len(0), replayed.len(1)), (128, 128));
}

/// An engine loads another model meanwhile: that is no reason for a capture to end.
#[test]
fn caches_come_and_go_while_another_thread_captures() {
    let gpu = OnGpu::new();
    let config = CacheConfig::new(LAYERS, 1, 32).with_bits(Bits::B4).with_capacity(1, 128);
    let mut cache = gpu.paged(config.clone(), 2).unwrap();
    let seats = [cache.open().unwrap()];
    let input = Input::new(&gpu, &config, 1);
    let step = cache.prepare_capture(&Batch::new(&seats, &[0, 1])).unwrap();
    let other = gpu.0.device.context().new_stream().unwrap();
    let (stream, views) = (&gpu.0.stream, input.views());
    stream.begin_capture(sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    cache.capture_step(&step).unwrap();
    let device = gpu.0.device.clone();
    let made = std::thread::spawn(move || KvCache::on_device(&device, other, config).map(drop)).join();
    made.unwrap().unwrap();
    (0..LAYERS).for_each(|layer| cache.append(layer, &views[0], &views[1]).unwrap());
    let flags = sys::CUgraphInstantiate_flags_enum::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags).unwrap().expect("a graph");
    cache.advance(&step).unwrap();
    graph.launch().unwrap();
    assert_eq!(cache.len(seats[0]).unwrap(), 1);
    assert_eq!(cache.device_status().unwrap(), Default::default());
}

#[test]
fn a_replay_is_refused_like_a_step() {
    let gpu = OnGpu::new();
    let config =
        CacheConfig::new(LAYERS, 1, 32).with_bits(Bits::B8).with_residual(Some(0)).with_capacity(2, 128);
    let mut cache = gpu.paged(config.clone(), 2).unwrap();
    let seats = [cache.open().unwrap(), cache.open().unwrap()];
    let input = Input::new(&gpu, &config, 128);
    let step = cache.prepare_capture(&Batch::new(&seats, &[0, 64, 128])).unwrap();
    // Outside a capture; in one, by `begin_step`; by another cache; before there is a graph.
    assert!(matches!(cache.capture_step(&step), Err(Error::Unsupported { .. })));
    assert!(matches!(cache.advance(&step), Err(Error::Unsupported { what: "a captured step", .. })));
    assert_eq!(cache.len(seats[0]).unwrap(), 0);
    let mut contiguous = gpu.contiguous(config.clone()).unwrap();
    assert!(matches!(contiguous.prepare_capture(0), Err(Error::Unsupported { what: "tokens", .. })));
    let mut other = gpu.paged(config.clone(), 2).unwrap();
    let at = [other.open().unwrap(), other.open().unwrap()];
    assert!(matches!(other.advance(&step), Err(Error::Unsupported { what: "a captured step", .. })));
    gpu.0.stream.begin_capture(sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    let refused = other.begin_step(&Batch::new(&at, &[0, 1, 2]));
    assert!(matches!(refused, Err(Error::Unsupported { what: "a step", .. })), "{refused:?}");
    let flags = sys::CUgraphInstantiate_flags_enum::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let _ = gpu.0.stream.end_capture(flags);
    assert_eq!(other.len(at[0]).unwrap(), 0);

    let graph = capture(&gpu, &mut cache, &step, &input);
    cache.advance(&step).unwrap();
    graph.launch().unwrap();
    // No block is left for the second tiles, then no room for a third.
    assert!(matches!(cache.advance(&step), Err(Error::Capacity { what: "blocks", .. })));
    assert_eq!((cache.len(seats[0]).unwrap(), cache.len(seats[1]).unwrap()), (64, 64));
    cache.clear(seats[1]).unwrap();
    cache.close(seats[1]).unwrap();
    assert!(matches!(cache.advance(&step), Err(Error::UnknownSeat { .. })));
    assert_eq!(cache.len(seats[0]).unwrap(), 64);
    assert_eq!(cache.open().unwrap(), seats[1]);
    cache.truncate(seats[0], 0).unwrap();
    cache.advance(&step).unwrap();
    graph.launch().unwrap();
    assert_eq!((cache.len(seats[0]).unwrap(), cache.len(seats[1]).unwrap()), (64, 64));
    let status = cache.device_status().unwrap();
    assert_eq!((status.missing_blocks, status.over_capacity), (0, 0));
}
