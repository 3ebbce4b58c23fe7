//! Prefill attention on the device: against the CPU's cache, and against f64 attention over the decoded values.

mod cases;
mod edges;
mod refused;

use crate::gpu::{Gpu, Host, Memory, Random, contiguous, layout, row};
use crate::layer::Twins;
use crate::reference::Problem;
use half::f16;
use qkv::cuda::launch::{
    DeviceAttendParams, DeviceBatch, STEP_WORDS, StepMemory, append, begin_step, prefill, prefill_scratch,
};
use qkv::{
    AttendParams, Batch, CacheConfig, Dtype, Format, Granularity, Scales, Seat, Shape, TensorMut, TensorRef,
};

/// Parameters of a call, on the host.
#[derive(Debug, Clone, Default)]
struct Params {
    scale: Option<f32>,
    softcap: Option<f32>,
    sink_logits: Option<Vec<f32>>,
    bidirectional: Vec<(usize, usize)>,
}

impl Params {
    fn host(&self) -> AttendParams<'_> {
        let mut p = AttendParams::new().with_bidirectional(&self.bidirectional);
        (p.scale, p.softcap, p.sink_logits) = (self.scale, self.softcap, self.sink_logits.as_deref());
        p
    }
}

/// A tensor on the host with its layout.
#[derive(Debug, Clone)]
struct Strided {
    data: Host,
    shape: Shape,
}

impl Strided {
    fn new(dtype: Dtype, shape: Shape, x: &[f32]) -> Self {
        Self { data: Host::new(dtype, x), shape }
    }

    fn random(random: &mut Random, dtype: Dtype, dims: [usize; 3], size: f32) -> Self {
        let (shape, n) = layout(random, dims);
        Self::new(dtype, shape, &(0..n).map(|_| size * random.normal()).collect::<Vec<_>>())
    }

    fn view(&self) -> TensorRef<'_> {
        TensorRef::new(self.data.data(), self.shape).unwrap()
    }

    /// Rows `from..from + n` as `[n][heads][dim]`.
    fn rows(&self, from: usize, n: usize) -> Vec<f64> {
        let x = self.data.f32();
        let [_, heads, dim] = self.shape.dims;
        let mut all = Vec::new();
        for t in from..from + n {
            for h in 0..heads {
                let at = row(&self.shape, t, h);
                all.extend((0..dim).map(|c| x[at + c * self.shape.strides[3]] as f64));
            }
        }
        all
    }
}

/// A step of prefill: rows of each sequence with padding before them.
struct Step<'a> {
    seats: &'a [Seat],
    counts: &'a [usize],
    pad: usize,
    q: Strided,
    k: Strided,
    v: Strided,
    out: (Dtype, Shape, usize),
    max_query_len: usize,
    /// The device's block table names no pages.
    hide_pages: bool,
    /// Pages of a sequence that are decoded ahead where enough rows read them.
    ahead: usize,
}

/// What a call gave: output elements and LSE.
type Result = (Strided, Vec<f32>);

impl Step<'_> {
    fn rows(counts: &[usize], pad: usize) -> usize {
        counts.iter().map(|n| n + pad).sum()
    }

    fn first_row(&self, i: usize) -> usize {
        self.counts[..i].iter().map(|n| n + self.pad).sum::<usize>() + self.pad
    }

    fn start_and_slots(&self) -> (Vec<i32>, Vec<i64>) {
        let (mut start, mut slots) = (vec![0i32], Vec::new());
        for n in self.counts {
            slots.extend(std::iter::repeat_n(-1i64, self.pad));
            slots.extend(std::iter::repeat_n(3i64, *n));
            start.push(slots.len() as i32);
        }
        (start, slots)
    }

    /// On the CPU, in f32.
    fn cpu(&self, twins: &mut Twins, params: &Params) -> Result {
        let (start, slots) = self.start_and_slots();
        for (seat, n) in self.seats.iter().zip(self.counts) {
            twins.cpu.reserve(*seat, *n).unwrap();
        }
        twins.cpu.begin_step(&Batch::new(self.seats, &start).with_slot_mapping(&slots)).unwrap();
        let [rows, heads, _] = self.q.shape.dims;
        let dims = [rows, heads, twins.config.value_dim];
        let (mut out, mut lse) = (vec![0f32; dims.iter().product()], vec![0f32; rows * heads]);
        let mut o = TensorMut::thd(&mut out, dims).unwrap();
        twins
            .cpu
            .prefill(
                0,
                &self.q.view(),
                &self.k.view(),
                &self.v.view(),
                &params.host(),
                &mut o,
                Some(&mut lse),
            )
            .unwrap();
        (Strided::new(Dtype::F32, contiguous(dims), &out), lse)
    }

    /// On the device: the step, prefill, append. The CPU has begun its step.
    fn device(&self, gpu: &Gpu, twins: &mut Twins, params: &Params) -> Result {
        let c = twins.config.clone();
        let (start, slots) = self.start_and_slots();
        let rows = slots.len();
        let ids: Vec<i32> = self.seats.iter().map(|s| s.index() as i32).collect();
        let mut tables: Vec<i32> =
            self.seats.iter().flat_map(|s| twins.cpu.block_table(*s).unwrap().to_vec()).collect();
        if self.hide_pages {
            tables.fill(-1);
        }
        let (ids, start, tables, mapping) = (gpu.up(&ids), gpu.up(&start), gpu.up(&tables), gpu.up(&slots));
        let batch = DeviceBatch::seats((&ids).into(), (&start).into(), (&tables).into(), rows)
            .with_padding((&mapping).into());
        let (mut step, mut slot_memory) =
            (gpu.zeros::<i32>(STEP_WORDS * self.seats.len()), gpu.zeros::<i64>(rows));
        let (q, k, v) = (self.q.data.up(gpu), self.k.data.up(gpu), self.v.data.up(gpu));
        let (q, k, v) = (q.view(self.q.shape), k.view(self.k.shape), v.view(self.v.shape));
        let (dtype, shape, n) = self.out;
        // What is there already must stay where no row is.
        let mut out: Memory = Host::new(dtype, &vec![7.0; n]).up(gpu);
        let heads = self.q.shape.dims[1];
        let mut lse = gpu.up(&vec![7f32; rows * heads]);
        let logits = params.sink_logits.as_ref().map(|s| gpu.up(s));
        let ranges: Vec<i32> = params.bidirectional.iter().flat_map(|r| [r.0 as i32, r.1 as i32]).collect();
        let ranges = (!ranges.is_empty()).then(|| gpu.up(&ranges));
        let mut p = DeviceAttendParams::new();
        (p.scale, p.softcap) = (params.scale, params.softcap);
        (p.sink_logits, p.bidirectional) = (logits.as_ref().map(Into::into), ranges.as_ref().map(Into::into));
        let mut s = StepMemory {
            lengths: (&mut twins.lengths).into(),
            step: (&mut step).into(),
            slots: (&mut slot_memory).into(),
            status: (&mut twins.status).into(),
        };
        begin_step(&gpu.device, gpu.raw(), &c, twins.blocks, &batch, &mut s).unwrap();
        let mut l = twins.layer.memory(&c);
        // What is there does not matter, nor what is too little for a page.
        let bytes = prefill_scratch(&c, 64 * self.ahead, self.seats.len()).unwrap();
        let mut scratch = gpu.up(&vec![0xffu8; bytes + 100]);
        prefill(
            &gpu.device,
            gpu.raw(),
            &c,
            0,
            &q,
            &k,
            &v,
            &p,
            self.max_query_len,
            &batch,
            &l,
            &s,
            &mut out.view_mut(shape),
            Some((&mut lse).into()),
            (self.ahead > 0).then(|| (&mut scratch).into()),
        )
        .unwrap();
        append(&gpu.device, gpu.raw(), &c, 0, &k, &v, &batch, &mut l, &mut s).unwrap();
        (Strided { data: out.down(gpu), shape }, gpu.down(&lse))
    }
}

/// Relative distance in the 2-norm.
fn distance(got: &[f64], want: &[f64]) -> f64 {
    let sum = |f: &dyn Fn(usize) -> f64| (0..got.len()).map(f).sum::<f64>();
    let difference = sum(&|i| (got[i] - want[i]).powi(2));
    (difference / sum(&|i| want[i].powi(2)).max(1e-300)).sqrt()
}

/// Both results agree, row by row where one is NaN, and rows of no sequence are as they were.
fn agree(step: &Step<'_>, got: &Result, want: &Result, what: &str) {
    let heads = step.q.shape.dims[1];
    let mut belongs = vec![false; step.q.shape.dims[0]];
    for (i, n) in step.counts.iter().enumerate() {
        let (first, n) = (step.first_row(i), *n);
        belongs[first..first + n].fill(true);
        let (g, w) = (got.0.rows(first, n), want.0.rows(first, n));
        let dim = got.0.shape.dims[2];
        let (mut good_g, mut good_w) = (Vec::new(), Vec::new());
        for r in 0..n * heads {
            let (g, w) = (&g[r * dim..][..dim], &w[r * dim..][..dim]);
            for c in 0..dim {
                assert_eq!(
                    g[c].is_nan(),
                    w[c].is_nan(),
                    "{what}: sequence {i} row {r} channel {c}: {} {}",
                    g[c],
                    w[c]
                );
            }
            let finite = w.iter().zip(g).filter(|(w, _)| !w.is_nan());
            for (w, g) in finite {
                good_w.push(*w);
                good_g.push(*g);
            }
            let (g, w) = (got.1[first * heads + r], want.1[first * heads + r]);
            let same = g == w || g.is_nan() && w.is_nan();
            assert!(
                same || (g - w).abs() <= 2e-3 * w.abs().max(1.0),
                "{what}: sequence {i} row {r}: LSE {g}, {w}"
            );
        }
        // bf16 results have 8 bits.
        let most = if step.out.0 == Dtype::Bf16 { 3e-3 } else { 1e-3 };
        let d = distance(&good_g, &good_w);
        assert!(d <= most, "{what}: sequence {i} ({n} rows) differs by {d:e}");
    }
    for (row, _) in belongs.iter().enumerate().filter(|(_, b)| !**b) {
        assert!(got.0.rows(row, 1).iter().all(|x| *x == 7.0), "{what}: row {row} belongs to no sequence");
        assert!(got.1[row * heads..][..heads].iter().all(|x| *x == 7.0), "{what}: LSE of row {row}");
    }
}

/// The decoded tokens of a seat: `[len][kv heads][dim]` of keys and values.
fn decoded(twins: &Twins, seat: Seat) -> [Vec<f64>; 2] {
    let (c, len) = (&twins.config, twins.cpu.len(seat).unwrap());
    if len == 0 {
        return [Vec::new(), Vec::new()];
    }
    let (mut k, mut v) =
        (vec![0f32; len * c.kv_heads * c.key_dim], vec![0f32; len * c.kv_heads * c.value_dim]);
    let mut kt = TensorMut::thd(&mut k, [len, c.kv_heads, c.key_dim]).unwrap();
    let mut vt = TensorMut::thd(&mut v, [len, c.kv_heads, c.value_dim]).unwrap();
    twins.cpu.dequantize(0, seat, &mut kt, &mut vt).unwrap();
    [k, v].map(|x| x.iter().map(|x| *x as f64).collect())
}

/// f64 attention of one sequence, exact or with keys, values and weights rounded to f16.
fn solve(
    twins: &Twins,
    old: &[Vec<f64>; 2],
    step: &Step<'_>,
    i: usize,
    params: &Params,
    rounded: bool,
) -> Vec<f64> {
    let (first, n) = (step.first_row(i), step.counts[i]);
    let round = |x: f64| if rounded { f16::from_f64(x).to_f64() } else { x };
    let all =
        |old: &[f64], new: Vec<f64>| -> Vec<f64> { old.iter().copied().chain(new).map(round).collect() };
    let (q, k, v) =
        (step.q.rows(first, n), all(&old[0], step.k.rows(first, n)), all(&old[1], step.v.rows(first, n)));
    let c = &twins.config;
    let logits = params.sink_logits.as_ref().map(|s| s.iter().map(|x| *x as f64).collect::<Vec<_>>());
    let problem = Problem {
        scale: params.scale.map_or(1.0 / (c.key_dim as f64).sqrt(), f64::from),
        softcap: params.softcap.map(f64::from),
        sliding_window: c.layers[0].sliding_window,
        sink_logits: logits.as_deref(),
        bidirectional: &params.bidirectional,
        ..Problem::causal(&q, &k, &v, [step.q.shape.dims[1], c.kv_heads], [c.key_dim, c.value_dim])
    };
    if rounded { problem.solve_rounded(|x| f16::from_f64(x).to_f64()).0 } else { problem.solve().0 }
}

fn describe(c: &CacheConfig) -> String {
    let l = &c.layers[0];
    format!(
        "{:?} {:?} R {:?} sinks {} {:?} dims {} {} heads {} window {:?}",
        l.key,
        l.value,
        c.residual,
        c.sinks,
        c.window_dtype,
        c.key_dim,
        c.value_dim,
        c.kv_heads,
        l.sliding_window
    )
}

/// Scales of a cache of one layer.
fn scales(random: &mut Random, key: &Format, value: &Format, heads: usize) -> Scales {
    let mut some = || (0..heads).map(|_| 0.003 + random.unit() * 0.02).collect::<Vec<_>>();
    let (a, b) = (some(), some());
    let per = |f: &Format, s: Vec<f32>| match f {
        Format::Fp8(f) if f.granularity == Granularity::Head => s,
        _ => s[..1].to_vec(),
    };
    Scales::new(1, per(key, a), per(value, b)).unwrap()
}

/// A cache that holds `old` tokens of each sequence, and a step of `counts` new ones.
struct Case {
    config: CacheConfig,
    old: Vec<usize>,
    counts: Vec<usize>,
    group: usize,
    dtype: Dtype,
    size: [f32; 3],
    params: Params,
    wild: bool,
    /// See [`Step::ahead`].
    ahead: usize,
}

impl Case {
    /// Runs on both sides. `check` also compares with f64.
    fn run(&self, gpu: &Gpu, random: &mut Random, check: bool, what: &str) {
        let what =
            &format!("{what}: {} {:?} {:?} {:?}", describe(&self.config), self.old, self.counts, self.params);
        let c = &self.config;
        let mut twins = Twins::new(gpu, c.clone(), 40);
        twins.wild = self.wild;
        let seats: Vec<Seat> = self.old.iter().map(|_| twins.cpu.open().unwrap()).collect();
        // In two steps, so that the window has wrapped.
        let half: Vec<usize> = self.old.iter().map(|n| n / 3).collect();
        let rest: Vec<usize> = self.old.iter().zip(&half).map(|(n, h)| n - h).collect();
        twins.step(gpu, random, &seats, &half, false);
        twins.step(gpu, random, &seats, &rest, false);
        let old: Vec<[Vec<f64>; 2]> = seats.iter().map(|s| decoded(&twins, *s)).collect();
        let pad = random.below(2) * 3;
        let rows = Step::rows(&self.counts, pad);
        let heads = c.kv_heads * self.group;
        let mut tensor =
            |h: usize, d: usize, i: usize| Strided::random(random, self.dtype, [rows, h, d], self.size[i]);
        let (q, k, v) = (
            tensor(heads, c.key_dim, 0),
            tensor(c.kv_heads, c.key_dim, 1),
            tensor(c.kv_heads, c.value_dim, 2),
        );
        let dtype = if check { Dtype::F32 } else { random.pick(&[Dtype::F16, Dtype::Bf16, Dtype::F32]) };
        let (shape, n) = layout(random, [rows, heads, c.value_dim]);
        let step = Step {
            seats: &seats,
            counts: &self.counts,
            pad,
            q,
            k,
            v,
            out: (dtype, shape, n),
            max_query_len: *self.counts.iter().max().unwrap() + random.below(70),
            hide_pages: false,
            ahead: self.ahead,
        };
        let want = step.cpu(&mut twins, &self.params);
        let got = step.device(gpu, &mut twins, &self.params);
        agree(&step, &got, &want, what);
        if c.residual.is_some() && !self.wild {
            twins.compare(gpu, &seats, what);
        }
        if check {
            for (i, n) in step.counts.iter().enumerate() {
                let exact = solve(&twins, &old[i], &step, i, &self.params, false);
                let rounded = solve(&twins, &old[i], &step, i, &self.params, true);
                let ours = distance(&got.0.rows(step.first_row(i), *n), &exact);
                let theirs = distance(&rounded, &exact);
                assert!(
                    ours <= 2.0 * theirs + 2e-6,
                    "{what}: sequence {i}: {ours:e}, f16 element by element {theirs:e}"
                );
            }
        }
    }
}

fn config(
    random: &mut Random,
    key: Format,
    value: Format,
    dims: (usize, usize),
    heads: usize,
) -> CacheConfig {
    let scales = scales(random, &key, &value, heads);
    CacheConfig::new(1, heads, dims.0)
        .with_dims(dims.0, dims.1)
        .with_key(key)
        .with_value(value)
        .with_scales(scales)
        .with_capacity(3, 640)
}
