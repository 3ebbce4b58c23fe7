//! What `attend` refuses before it launches anything, and what is nothing to do.

use super::config;
use crate::gpu::{Gpu, Host, Memory, contiguous};
use crate::still::Still;
use cudarc::driver::CudaSlice;
use qkv::cuda::launch::{
    DeviceAttendParams, DeviceBatch, StepMemory, attend, attend_workspace, begin_step, read_status,
};
use qkv::cuda::{CacheStatus, DeviceSlice, DeviceSliceMut, DeviceTensorMut};
use qkv::{CacheConfig, Dtype, Error, Result};

/// A call that would be all right.
struct Call<'a> {
    config: CacheConfig,
    q: [usize; 3],
    dtype: Dtype,
    out: [usize; 3],
    params: DeviceAttendParams<'a>,
    max_query_len: usize,
    /// Elements that the LSE has too many, the workspace too few.
    lse: usize,
    workspace: usize,
    /// Bytes that LSE and workspace are moved by.
    misplaced: [u64; 2],
}

struct Scene {
    gpu: Gpu,
    still: Still,
    config: CacheConfig,
    /// Queries of each dtype.
    queries: Vec<Memory>,
    out: CudaSlice<f32>,
    lse: CudaSlice<f32>,
}

fn moved<T>(x: &mut CudaSlice<T>, n: usize, bytes: u64) -> DeviceSliceMut<'_, T> {
    // SAFETY: the launch is refused for its address before it is used; unmoved it is a part of a live allocation.
    unsafe { DeviceSliceMut::from_raw(DeviceSlice::from(&*x).address() + bytes, n) }
}

impl Scene {
    fn new() -> Self {
        let gpu = Gpu::new();
        let (key, value) = CacheConfig::default_formats(qkv::Bits::B4, 64);
        let config = config(key, value, 2, 64).with_capacity(1, 512);
        let mut still = Still::new(&gpu, config.clone(), &[100]).filled(&gpu);
        let batch =
            DeviceBatch::seats((&still.seats).into(), (&still.starts).into(), (&still.tables).into(), 1);
        let mut step = StepMemory {
            lengths: (&mut still.lengths).into(),
            step: (&mut still.step).into(),
            slots: (&mut still.slots).into(),
            status: (&mut still.status).into(),
        };
        begin_step(&gpu.device, gpu.raw(), &config, 8, &batch, &mut step).unwrap();
        let all = [Dtype::F16, Dtype::Bf16, Dtype::F32];
        let queries = all.iter().map(|d| Host::new(*d, &[0.5; 4 * 128]).up(&gpu)).collect();
        let (out, lse) = (gpu.up(&[7f32; 4 * 64]), gpu.up(&[7f32; 8]));
        Self { gpu, still, config, queries, out, lse }
    }

    fn call(&self) -> Call<'static> {
        Call {
            config: self.config.clone(),
            q: [1, 4, 64],
            dtype: Dtype::F16,
            out: [1, 4, 64],
            params: DeviceAttendParams::new(),
            max_query_len: 1,
            lse: 0,
            workspace: 0,
            misplaced: [0; 2],
        }
    }

    fn run(&mut self, call: &Call<'_>) -> Result<()> {
        let (gpu, still) = (&self.gpu, &mut self.still);
        let batch = DeviceBatch::seats(
            (&still.seats).into(),
            (&still.starts).into(),
            (&still.tables).into(),
            call.q[0],
        );
        let step = StepMemory {
            lengths: (&mut still.lengths).into(),
            step: (&mut still.step).into(),
            slots: (&mut still.slots).into(),
            status: (&mut still.status).into(),
        };
        let q = match call.dtype {
            Dtype::F16 => &self.queries[0],
            Dtype::Bf16 => &self.queries[1],
            Dtype::F32 => &self.queries[2],
        };
        let workspace = attend_workspace(&gpu.device, &self.config).unwrap() - call.workspace;
        attend(
            &gpu.device,
            gpu.raw(),
            &call.config,
            0,
            &q.view(contiguous(call.q)),
            &call.params,
            call.max_query_len,
            &batch,
            &still.layer.memory(&self.config),
            &step,
            &mut DeviceTensorMut::thd(&mut self.out, call.out).unwrap(),
            Some(moved(&mut self.lse, call.q[0] * call.q[1] + call.lse, call.misplaced[0])),
            moved(&mut still.workspace, workspace, call.misplaced[1]),
        )
    }
}

#[test]
fn what_attend_refuses() {
    let mut scene = Scene::new();
    let ranges = scene.gpu.up(&[0i32, 4]);
    let three = scene.gpu.zeros::<f32>(3);
    let (good, plain) = (scene.call(), DeviceAttendParams::new());
    let with = |params| Call { params, ..scene.call() };
    type Wanted = fn(&Error) -> bool;
    let refused = |what: &str, e: &Error| matches!(e, Error::Unsupported { what: w, .. } if *w == what);
    let mut unlike = scene.config.clone();
    unlike.layers[0].sliding_window = Some(0);
    let cases: Vec<(Call<'_>, Wanted)> = vec![
        (Call { q: [1, 3, 64], out: [1, 3, 64], ..scene.call() }, |e| {
            matches!(e, Error::Unsupported { what: "query heads", .. })
        }),
        (Call { q: [1, 0, 64], out: [1, 0, 64], ..scene.call() }, |e| {
            matches!(e, Error::Unsupported { what: "query heads", .. })
        }),
        (Call { q: [1, 4, 32], ..scene.call() }, |e| matches!(e, Error::Shape { what: "q", .. })),
        (Call { out: [1, 2, 64], ..scene.call() }, |e| matches!(e, Error::Shape { what: "out", .. })),
        (Call { dtype: Dtype::F32, ..scene.call() }, |e| matches!(e, Error::Unsupported { what: "q", .. })),
        (with(plain.with_bidirectional((&ranges).into())), |e| {
            matches!(e, Error::Unsupported { what: "bidirectional", .. })
        }),
        (with(plain.with_sink_logits((&three).into())), |e| {
            matches!(e, Error::Length { what: "sink_logits", expected: 4, got: 3 })
        }),
        (Call { lse: 1, ..scene.call() }, |e| matches!(e, Error::Length { what: "lse", .. })),
        (
            Call { workspace: 1, ..scene.call() },
            |e| matches!(e, Error::Length { what, .. } if what.contains("(attend_workspace)")),
        ),
        (with(plain.with_fixed_split(0)), |e| matches!(e, Error::Unsupported { what: "fixed_split", .. })),
        (
            Call { workspace: scene.still.workspace.len(), ..with(plain.with_fixed_split(1)) },
            |e| matches!(e, Error::Length { what, got: 0, .. } if what.starts_with("workspace")),
        ),
        (Call { misplaced: [2, 0], ..scene.call() }, |e| matches!(e, Error::Address { what: "lse", .. })),
        (Call { misplaced: [0, 2], ..scene.call() }, |e| {
            matches!(e, Error::Address { what: "workspace", .. })
        }),
        (Call { config: unlike, ..scene.call() }, |e| {
            matches!(e, Error::Unsupported { what: "sliding_window", .. })
        }),
    ];
    let factors: Vec<Call<'_>> = [0.0, -0.0, -1.0, f32::NAN, f32::INFINITY]
        .map(|c| with(plain.with_softcap(c)))
        .into_iter()
        .chain([f32::NAN, f32::INFINITY].map(|s| with(plain.with_scale(s))))
        .collect();
    for (i, (call, wanted)) in cases.iter().enumerate() {
        let e = scene.run(call).unwrap_err();
        assert!(wanted(&e), "case {i}: {e}");
    }
    for call in &factors {
        let e = scene.run(call).unwrap_err();
        assert!(refused("softcap", &e) || refused("scale", &e), "{e}");
    }
    // Nothing was launched, and the same call is all right otherwise.
    assert!(scene.gpu.down(&scene.out).iter().all(|x| *x == 7.0));
    scene.run(&good).unwrap();
    assert!(scene.gpu.down(&scene.out).iter().all(|x| x.is_finite() && *x != 7.0));
    assert_eq!(read_status(scene.gpu.down(&scene.still.status).try_into().unwrap()), CacheStatus::default());
}

#[test]
fn no_rows_are_nothing_to_do() {
    let mut scene = Scene::new();
    let none =
        [Call { q: [0, 4, 64], out: [0, 4, 64], ..scene.call() }, Call { max_query_len: 0, ..scene.call() }];
    scene.gpu.stream.synchronize().unwrap();
    if let Some(s) = scene.gpu.simulator {
        s.take_stats();
    }
    none.iter().for_each(|call| scene.run(call).unwrap());
    scene.gpu.stream.synchronize().unwrap();
    if let Some(s) = scene.gpu.simulator {
        assert_eq!(s.take_stats().len(), 0);
    }
    assert!(scene.gpu.down(&scene.out).iter().all(|x| *x == 7.0));
}
