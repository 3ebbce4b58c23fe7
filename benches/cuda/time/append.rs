//! One new token a sequence, beside an append that only copies: launches one after the other in a graph, so that the host's time
//! for a launch does not count.

use super::{Bench, Goal, Row};
use crate::cases::config;
use crate::gpu::{Gpu, Host, Random, contiguous};
use crate::still::Still;
use cudarc::driver::{CudaGraph, CudaSlice, sys};
use qkv::cuda::launch::{DeviceBatch, STEP_WORDS, StepMemory, append, plain_append};
use qkv::{Affine, Bits, CacheConfig, Dtype, Format, Fp8, Granularity};

const HEADS: usize = 8;
const DIM: usize = 128;
const SEQUENCES: usize = 128;
/// Tokens of the longest sequences; others end up to 63 earlier, so that as many tiles close in every step.
const TOKENS: usize = 2048;
/// Steps in a graph: each sequence closes one tile.
const STEPS: usize = 64;
/// Sequences and steps of a trial.
const SMOKE: [usize; 2] = [3, 5];
const GOAL: Goal = Goal::AtMost(1.15);

/// Adds a row a format.
pub(crate) fn run(bench: &mut Bench<'_>) {
    let [sequences, steps] = if bench.smoke { SMOKE } else { [SEQUENCES, STEPS] };
    let plain = plain(bench, sequences, steps);
    let bytes = sequences * HEADS * 2 * DIM * 4;
    let row = |name: String, ms: f64, ratio, goal| Row { part: "append", name, ms, bytes, ratio, goal };
    bench.rows.push(row(format!("plain 16-bit rows, {sequences} tokens"), plain, None, None));
    let same = |name: &str, f: Format| (name.to_string(), f, f, true);
    let mut all = vec![
        same("f16, direct", Format::F16),
        same("e4m3, direct", Fp8::e4m3(Granularity::TokenHead).into()),
        same("int8, direct", Affine::per_token(Bits::B8, DIM).into()),
    ];
    for bits in [Bits::B8, Bits::B4, Bits::B2] {
        let (key, value) = CacheConfig::default_formats(bits, DIM);
        all.push((format!("int{} default", bits.get()), key, value, false));
    }
    for (name, key, value, direct) in all {
        let mut c = config(key, value, HEADS, DIM).with_capacity(sequences, TOKENS + 64);
        if direct {
            c = c.direct();
        }
        let ms = quantized(bench, &c, steps);
        bench.rows.push(row(format!("{name}, {sequences} tokens"), ms, Some(ms / plain), Some(GOAL)));
    }
}

fn plain(bench: &Bench<'_>, sequences: usize, steps: usize) -> f64 {
    let gpu = bench.gpu;
    let n = HEADS * DIM;
    let [k, v] = [3, 4].map(|seed| {
        let x = Random::new(seed).normals(sequences * n);
        gpu.up(&x.iter().map(|x| half::f16::from_f32(*x).to_bits()).collect::<Vec<u16>>())
    });
    let slots = sequences * steps;
    let [mut key_cache, mut value_cache] = [gpu.zeros::<u16>(slots * n), gpu.zeros::<u16>(slots * n)];
    let mappings: Vec<CudaSlice<i64>> = (0..steps)
        .map(|step| gpu.up(&(0..sequences).map(|s| (s * steps + step) as i64).collect::<Vec<_>>()))
        .collect();
    let mut launches = || {
        for mapping in &mappings {
            plain_append(
                &gpu.device,
                gpu.raw(),
                [(&k).into(), (&v).into()],
                mapping.into(),
                [(&mut key_cache).into(), (&mut value_cache).into()],
                slots,
            )
            .expect("a launch");
        }
    };
    // Kernels are loaded before the capture.
    launches();
    replays(bench, &capture(gpu, launches)) / steps as f64
}

fn quantized(bench: &Bench<'_>, c: &CacheConfig, steps: usize) -> f64 {
    let gpu = bench.gpu;
    let sequences = c.max_sequences;
    let lens: Vec<usize> = (0..sequences).map(|s| TOKENS - 64 + s % 64).collect();
    let mut still = Still::new(gpu, c.clone(), &lens);
    // The buffers of so many steps, as `begin_step` fills them.
    let mut buffers: Vec<(CudaSlice<i32>, CudaSlice<i64>)> = Vec::new();
    for _ in 0..steps {
        still.begin(gpu);
        let step = std::mem::replace(&mut still.step, gpu.zeros(STEP_WORDS * sequences));
        buffers.push((step, std::mem::replace(&mut still.slots, gpu.zeros(sequences))));
    }
    let rows =
        [3, 4].map(|seed| Host::new(Dtype::F16, &Random::new(seed).normals(sequences * HEADS * DIM)).up(gpu));
    let shape = contiguous([sequences, HEADS, DIM]);
    let (k, v) = (rows[0].view(shape), rows[1].view(shape));
    let mut launches = || {
        for (step, slots) in &mut buffers {
            let (seats, starts, tables) =
                ((&still.seats).into(), (&still.starts).into(), (&still.tables).into());
            let batch = DeviceBatch::seats(seats, starts, tables, sequences);
            let mut memory = StepMemory {
                lengths: (&mut still.lengths).into(),
                step: step.into(),
                slots: slots.into(),
                status: (&mut still.status).into(),
            };
            let mut layer = still.layer.memory(c);
            append(&gpu.device, gpu.raw(), c, 0, &k, &v, &batch, &mut layer, &mut memory).expect("a launch");
        }
    };
    launches();
    replays(bench, &capture(gpu, launches)) / steps as f64
}

/// The launches of a call as a graph.
fn capture(gpu: &Gpu, launches: impl FnOnce()) -> CudaGraph {
    use sys::{CUgraphInstantiate_flags_enum as Flags, CUstreamCaptureMode_enum as Mode};
    gpu.stream.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).expect("a capture");
    launches();
    let flags = Flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    gpu.stream.end_capture(flags).expect("a capture without faults").expect("a graph")
}

/// Milliseconds of a replay.
fn replays(bench: &Bench<'_>, graph: &CudaGraph) -> f64 {
    bench.median(1, |_| graph.launch().expect("a replay"))
}
