//! What `prefill` refuses before it launches anything, and what is nothing to do.

use super::edges::{four_bits, simple};
use crate::gpu::{Gpu, Host, Memory, Random, contiguous};
use crate::layer::Twins;
use cudarc::driver::CudaSlice;
use qkv::cuda::launch::{DeviceAttendParams, DeviceBatch, STEP_WORDS, StepMemory, begin_step, prefill};
use qkv::cuda::{DeviceSlice, DeviceSliceMut, DeviceTensorMut};
use qkv::{Bits, CacheConfig, Dtype, Error, Result};

const ROWS: usize = 4;
/// Elements of each tensor: enough for every shape here.
const ELEMENTS: usize = ROWS * 4 * 272;

/// A call that would be all right: 4 rows of one sequence, two query heads on two kv heads, 64 channels.
struct Call<'a> {
    config: CacheConfig,
    dims: [[usize; 3]; 4],
    dtypes: [Dtype; 3],
    params: DeviceAttendParams<'a>,
    max_query_len: usize,
    /// Elements that the LSE has too many, and bytes that it is moved by.
    lse: usize,
    misplaced: u64,
}

fn two_heads() -> CacheConfig {
    let mut config = four_bits();
    config.kv_heads = 2;
    config
}

fn call() -> Call<'static> {
    Call {
        config: two_heads(),
        dims: [[ROWS, 2, 64]; 4],
        dtypes: [Dtype::F16; 3],
        params: DeviceAttendParams::new(),
        max_query_len: ROWS,
        lse: 0,
        misplaced: 0,
    }
}

struct Scene {
    gpu: Gpu,
    twins: Twins,
    batch: [CudaSlice<i32>; 3],
    step: CudaSlice<i32>,
    slots: CudaSlice<i64>,
    half: Memory,
    wide: Memory,
    out: CudaSlice<f32>,
    lse: CudaSlice<f32>,
}

impl Scene {
    fn new() -> Self {
        let gpu = Gpu::new();
        let twins = simple(&gpu, &mut Random::new(6400), call().config, 0).0;
        let x = Random::new(1).normals(ELEMENTS);
        let [half, wide] = [Dtype::F16, Dtype::F32].map(|d| Host::new(d, &x).up(&gpu));
        let batch = [vec![0], vec![0, ROWS as i32], vec![-1; 10]].map(|x: Vec<i32>| gpu.up(&x));
        let mut scene = Self {
            twins,
            batch,
            step: gpu.zeros(STEP_WORDS),
            slots: gpu.zeros(ROWS),
            half,
            wide,
            out: gpu.up(&[7f32; ELEMENTS]),
            lse: gpu.up(&[7f32; ROWS * 4 + 1]),
            gpu,
        };
        let [ids, start, tables] = &scene.batch;
        let batch = DeviceBatch::seats(ids.into(), start.into(), tables.into(), ROWS);
        let mut memory = StepMemory {
            lengths: (&mut scene.twins.lengths).into(),
            step: (&mut scene.step).into(),
            slots: (&mut scene.slots).into(),
            status: (&mut scene.twins.status).into(),
        };
        let gpu = &scene.gpu;
        begin_step(&gpu.device, gpu.raw(), &call().config, 16, &batch, &mut memory).unwrap();
        scene
    }

    fn run(&mut self, call: &Call<'_>) -> Result<()> {
        let gpu = &self.gpu;
        let rows = call.dims[0][0];
        let [ids, start, tables] = &self.batch;
        let batch = DeviceBatch::seats(ids.into(), start.into(), tables.into(), rows);
        let step = StepMemory {
            lengths: (&mut self.twins.lengths).into(),
            step: (&mut self.step).into(),
            slots: (&mut self.slots).into(),
            status: (&mut self.twins.status).into(),
        };
        let view = |i: usize| {
            let memory = if call.dtypes[i] == Dtype::F32 { &self.wide } else { &self.half };
            memory.view(contiguous(call.dims[i]))
        };
        let n = rows * call.dims[0][1] + call.lse;
        // SAFETY: refused for its address before it is used; unmoved it is a part of a live allocation.
        let lse =
            unsafe { DeviceSliceMut::from_raw(DeviceSlice::from(&self.lse).address() + call.misplaced, n) };
        prefill(
            &gpu.device,
            gpu.raw(),
            &call.config,
            0,
            &view(0),
            &view(1),
            &view(2),
            &call.params,
            call.max_query_len,
            &batch,
            &self.twins.layer.memory(&self.twins.config),
            &step,
            &mut DeviceTensorMut::thd(&mut self.out, call.dims[3]).unwrap(),
            Some(lse),
            None,
        )
    }

    /// Nobody has written an output.
    fn untouched(&self) -> bool {
        self.gpu.down(&self.out).iter().chain(&self.gpu.down(&self.lse)).all(|x| *x == 7.0)
    }
}

/// The same with another tensor: 0 = q, 1 = k, 2 = v, 3 = out.
fn reshaped(mut call: Call<'_>, i: usize, dims: [usize; 3]) -> Call<'_> {
    call.dims[i] = dims;
    call
}

#[test]
fn what_does_not_fit_is_refused_with_the_reason() {
    let mut scene = Scene::new();
    let (ranges, logits) = (scene.gpu.up(&[0i32; 3]), scene.gpu.zeros::<f32>(3));
    let plain = DeviceAttendParams::new();
    let mut large = CacheConfig::new(1, 2, 272).with_bits(Bits::B4);
    large.max_sequences = 1;
    let mut blind = call().config;
    blind.layers[0].sliding_window = Some(0);
    let wide = |i: usize| {
        let mut dtypes = [Dtype::F16; 3];
        dtypes[i] = Dtype::F32;
        Call { dtypes, ..call() }
    };
    let three = reshaped(reshaped(call(), 0, [ROWS, 3, 64]), 3, [ROWS, 3, 64]);
    let none = reshaped(reshaped(call(), 0, [ROWS, 0, 64]), 3, [ROWS, 0, 64]);
    type Wanted = fn(&Error) -> bool;
    let shape_q: Wanted = |e| matches!(e, Error::Shape { what: "q", .. });
    let cases: Vec<(Call<'_>, Wanted)> = vec![
        (wide(0), |e| matches!(e, Error::Unsupported { what: "q", .. })),
        (wide(1), |e| matches!(e, Error::Unsupported { what: "k", .. })),
        (wide(2), |e| matches!(e, Error::Unsupported { what: "v", .. })),
        (three, |e| matches!(e, Error::Unsupported { what: "query heads", .. })),
        (none, |e| matches!(e, Error::Unsupported { what: "query heads", .. })),
        (reshaped(call(), 0, [ROWS, 2, 80]), shape_q),
        (reshaped(call(), 0, [ROWS - 1, 2, 64]), |e| matches!(e, Error::Shape { .. })),
        (reshaped(call(), 1, [ROWS, 1, 64]), |e| matches!(e, Error::Shape { what: "k", .. })),
        (reshaped(call(), 2, [ROWS + 1, 2, 64]), |e| matches!(e, Error::Shape { what: "v", .. })),
        (reshaped(call(), 3, [ROWS, 4, 64]), |e| matches!(e, Error::Shape { what: "out", .. })),
        (Call { config: large, dims: [[ROWS, 2, 272]; 4], ..call() }, |e| {
            matches!(e, Error::Unsupported { what: "head dim", .. })
        }),
        (Call { config: blind, ..call() }, |e| {
            matches!(e, Error::Unsupported { what: "sliding_window", .. })
        }),
        (Call { lse: 1, ..call() }, |e| matches!(e, Error::Length { what: "lse", .. })),
        (Call { misplaced: 2, ..call() }, |e| matches!(e, Error::Address { what: "lse", .. })),
        (Call { params: plain.with_sink_logits((&logits).into()), ..call() }, |e| {
            matches!(e, Error::Length { what: "sink_logits", .. })
        }),
        (Call { params: plain.with_bidirectional((&ranges).into()), ..call() }, |e| {
            matches!(e, Error::Length { .. })
        }),
    ];
    for (i, (call, wanted)) in cases.iter().enumerate() {
        let e = scene.run(call).unwrap_err();
        assert!(wanted(&e), "case {i}: {e}");
    }
    for c in [0.0, -0.0, -1.0, f32::NAN, f32::INFINITY] {
        let e = scene.run(&Call { params: plain.with_softcap(c), ..call() }).unwrap_err();
        assert!(matches!(e, Error::Unsupported { what: "softcap", .. }), "{e}");
    }
    for s in [f32::NAN, f32::INFINITY] {
        let e = scene.run(&Call { params: plain.with_scale(s), ..call() }).unwrap_err();
        assert!(matches!(e, Error::Unsupported { what: "scale", .. }), "{e}");
    }
    assert!(scene.untouched());
    scene.run(&call()).unwrap();
    let out = scene.gpu.down(&scene.out);
    assert!(out[..ROWS * 128].iter().all(|x| x.is_finite() && *x != 7.0));
}

#[test]
fn no_rows_are_nothing_to_do() {
    let mut scene = Scene::new();
    let mut none = call();
    none.dims.iter_mut().for_each(|d| d[0] = 0);
    scene.run(&none).unwrap();
    // A step whose sequences have no new tokens.
    scene.run(&Call { max_query_len: 0, ..call() }).unwrap();
    assert!(scene.untouched());
}
