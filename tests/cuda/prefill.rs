//! Prefill attention on the device: against the CPU's cache, and against f64 attention over the decoded values.

use crate::append::{Twins, any_format};
use crate::gpu::{Gpu, Host, Memory, Random, layout};
use crate::merge::{row, values};
use crate::reference::Problem;
use half::f16;
use qkv::cuda::launch::{
    DeviceAttendParams, DeviceBatch, STEP_WORDS, StepMemory, append, begin_step, prefill, read_status,
};
use qkv::{
    Affine, AttendParams, Batch, Bits, CacheConfig, Dtype, Error, Format, Fp8, Granularity, Scales, Seat,
    Shape, TensorMut, TensorRef,
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
        let x = values(&self.data);
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
        (Strided::new(Dtype::F32, crate::contiguous(dims), &out), lse)
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
        q: &q,
        k: &k,
        v: &v,
        query_heads: step.q.shape.dims[1],
        kv_heads: c.kv_heads,
        key_dim: c.key_dim,
        value_dim: c.value_dim,
        scale: params.scale.map_or(1.0 / (c.key_dim as f64).sqrt(), f64::from),
        softcap: params.softcap.map(f64::from),
        sliding_window: c.layers[0].sliding_window,
        sink_logits: logits.as_deref(),
        bidirectional: &params.bidirectional,
        causal: true,
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

fn any_case(random: &mut Random, dims: (usize, usize), most: usize) -> Case {
    let residual = random.pick(&[None, Some(0), Some(32), Some(64), Some(128)]);
    let (direct, heads) = (residual.is_none(), 1 + random.below(2));
    let (key, value) = (any_format(random, dims.0, direct, true), any_format(random, dims.1, direct, false));
    let group = random.pick(&[1, 1, 3, 4, 8]);
    let dtype = random.pick(&[Dtype::F16, Dtype::Bf16]);
    let config = config(random, key, value, dims, heads)
        .with_residual(residual)
        .with_sinks(if direct { 0 } else { random.pick(&[0, 4]) })
        .with_window_dtype(random.pick(&[dtype, dtype, Dtype::F16, Dtype::Bf16]))
        .with_sliding_window(random.pick(&[None, None, Some(1), Some(50), Some(130)]));
    let n = 1 + random.below(3);
    let old: Vec<usize> = (0..n).map(|_| random.pick(&[0, 3, 64, 70, 200, 330]).min(most)).collect();
    let counts: Vec<usize> =
        (0..n).map(|_| random.pick(&[1, 1, 2, 5, 17, 64, 90, 200]).min(most / group + 1)).collect();
    let mut params = Params::default();
    if random.below(3) == 0 {
        params.scale = Some(random.pick(&[0.0, -0.1, 0.3]));
    }
    if random.below(3) == 0 {
        params.softcap = Some(random.pick(&[2.0, 30.0]));
    }
    if random.below(3) == 0 {
        let logits = (0..heads * group).map(|i| if i == 1 { f32::NEG_INFINITY } else { random.normal() });
        params.sink_logits = Some(logits.collect());
    }
    if random.below(3) == 0 {
        let start = random.below(old[0] + counts[0]);
        params.bidirectional = vec![(start, start + 1 + random.below(90)), (start + 100, start + 130)];
    }
    let size = [
        random.pick(&[1.0, 1.0, 3.0, 1e-3]),
        random.pick(&[1.0, 1.0, 1e-3]),
        random.pick(&[1.0, 1.0, 1e-3, 100.0]),
    ];
    Case { config, old, counts, group, dtype, size, params, wild: false }
}

#[test]
fn random_histories_agree_with_the_cpu_and_with_f64() {
    let gpu = Gpu::new();
    for seed in 0..60 {
        let mut random = Random::new(3000 + seed);
        let dims = random.pick(&[(64, 64), (64, 64), (128, 128), (80, 80), (96, 64), (64, 96), (112, 128)]);
        let most = if dims.0 + dims.1 > 160 { 200 } else { 400 };
        let case = any_case(&mut random, dims, most);
        case.run(&gpu, &mut random, true, &format!("history {seed}"));
    }
}

#[test]
fn large_heads_and_all_outputs_agree_with_the_cpu() {
    let gpu = Gpu::new();
    for (seed, dims) in
        [(192, 128), (256, 256), (144, 64), (16, 48), (64, 64), (80, 80)].into_iter().enumerate()
    {
        let mut random = Random::new(4000 + seed as u64);
        let case = any_case(&mut random, dims, 150);
        case.run(&gpu, &mut random, false, &format!("dims {seed}"));
    }
}

#[test]
fn every_format_agrees_with_f64() {
    let gpu = Gpu::new();
    let mut formats: Vec<Format> = vec![Format::F16, Format::Bf16];
    for g in [Granularity::Tensor, Granularity::Head, Granularity::TokenHead] {
        formats.extend([Format::from(Fp8::e4m3(g)), Fp8::e5m2(g).into()]);
    }
    for bits in Bits::ALL {
        formats.extend([
            Format::from(Affine::per_token(bits, 64)),
            Affine::per_token(bits, 32).with_rotation(32).into(),
            Affine::per_channel(bits, 32).into(),
            Affine::per_channel(bits, 64).with_rotation(64).into(),
        ]);
    }
    for (i, f) in formats.iter().enumerate() {
        let mut random = Random::new(5000 + i as u64);
        let key = match f {
            Format::Affine(a) if a.axis == qkv::Axis::PerToken => a.with_center().into(),
            f => *f,
        };
        let config = config(&mut random, key, *f, (64, 64), 1)
            .with_residual(Some(32))
            .with_sinks(random.pick(&[0, 4]));
        let (old, counts) = (vec![160 + random.below(70)], vec![1 + random.below(40)]);
        let (size, params) = ([1.0; 3], Params::default());
        let case = Case { config, old, counts, group: 2, dtype: Dtype::F16, size, params, wild: false };
        case.run(&gpu, &mut random, true, &format!("format {i}"));
    }
}

/// One sequence of `old` tokens and a step of `n`, 4 bits, 64 channels, one kv head and a group of 2.
fn simple(gpu: &Gpu, random: &mut Random, config: CacheConfig, old: usize) -> (Twins, Vec<Seat>) {
    let mut twins = Twins::new(gpu, config, 16);
    twins.wild = false;
    let seats = vec![twins.cpu.open().unwrap()];
    if old > 0 {
        twins.step(gpu, random, &seats, &[old], false);
    }
    (twins, seats)
}

fn four_bits() -> CacheConfig {
    CacheConfig::new(1, 1, 64).with_bits(Bits::B4).with_residual(Some(32)).with_capacity(1, 640)
}

fn simple_step<'a>(random: &mut Random, seats: &'a [Seat], counts: &'a [usize]) -> Step<'a> {
    let rows = Step::rows(counts, 0);
    let mut tensor =
        |h: usize| Strided::new(Dtype::F16, crate::contiguous([rows, h, 64]), &random.normals(rows * h * 64));
    let (q, k, v) = (tensor(2), tensor(1), tensor(1));
    let out = (Dtype::F32, crate::contiguous([rows, 2, 64]), rows * 128);
    Step { seats, counts, pad: 0, q, k, v, out, max_query_len: rows, hide_pages: false }
}

fn set(x: &mut Strided, at: usize, value: f32) {
    if let Host::F16(x) = &mut x.data {
        x[at] = f16::from_f32(value);
    }
}

#[test]
fn a_query_that_is_no_number_makes_its_own_row_none() {
    let gpu = Gpu::new();
    let mut random = Random::new(6000);
    let (mut twins, seats) = simple(&gpu, &mut random, four_bits(), 200);
    let mut step = simple_step(&mut random, &seats, &[70]);
    let bad = [(3, f32::NAN), (40, f32::INFINITY), (41, f32::NEG_INFINITY), (139, f32::NAN)];
    for (row, x) in bad {
        set(&mut step.q, row * 64 + random.below(64), x);
    }
    let (want, _) = step.cpu(&mut twins, &Params::default());
    let (got, lse) = step.device(&gpu, &mut twins, &Params::default());
    let (got, want) = (got.rows(0, 70), want.rows(0, 70));
    for row in 0..140 {
        let none = bad.iter().any(|b| b.0 == row);
        assert_eq!(lse[row].is_nan(), none, "LSE of row {row}");
        assert!(got[row * 64..][..64].iter().all(|x| x.is_nan() == none), "row {row}");
        if !none {
            let d = distance(&got[row * 64..][..64], &want[row * 64..][..64]);
            assert!(d <= 1e-3, "row {row}: {d:e}");
        }
    }
}

#[test]
fn values_that_are_no_numbers_reach_only_rows_that_see_them() {
    let gpu = Gpu::new();
    for seed in 0..6 {
        let mut random = Random::new(6100 + seed);
        let mut config = four_bits();
        if seed % 2 == 1 {
            config = config.with_sliding_window(Some(20));
        }
        let (mut twins, seats) = simple(&gpu, &mut random, config, 150);
        let mut step = simple_step(&mut random, &seats, &[100]);
        for _ in 0..3 {
            set(&mut step.v, random.below(100 * 64), f32::NAN);
        }
        if seed > 3 {
            set(&mut step.k, (60 + random.below(40)) * 64 + 5, f32::NAN);
        }
        let want = step.cpu(&mut twins, &Params::default());
        let got = step.device(&gpu, &mut twins, &Params::default());
        assert!(
            want.0.rows(0, 100).iter().any(|x| x.is_nan())
                && want.0.rows(0, 5).iter().all(|x| !x.is_nan() || seed == 0)
        );
        agree(&step, &got, &want, &format!("seed {seed}"));
    }
}

#[test]
fn garbage_behind_the_last_token_of_a_page_does_not_leak() {
    let gpu = Gpu::new();
    let int8 = Affine::per_token(Bits::B8, 64);
    for (i, format) in
        [Format::from(int8), Format::F16, Fp8::e4m3(Granularity::TokenHead).into()].into_iter().enumerate()
    {
        let mut random = Random::new(6200 + i as u64);
        let config =
            CacheConfig::new(1, 1, 64).with_key(format).with_value(format).with_capacity(1, 640).direct();
        let (mut twins, seats) = simple(&gpu, &mut random, config, 0);
        let bytes = vec![0xffu8; gpu.down(&twins.layer.pages).len()];
        gpu.stream.memcpy_htod(&bytes, &mut twins.layer.pages).unwrap();
        twins.step(&gpu, &mut random, &seats, &[100], false);
        let step = simple_step(&mut random, &seats, &[30]);
        let want = step.cpu(&mut twins, &Params::default());
        let got = step.device(&gpu, &mut twins, &Params::default());
        agree(&step, &got, &want, &format!("{format:?}"));
    }
}

#[test]
fn rows_beyond_the_given_length_and_missing_pages_are_counted() {
    let gpu = Gpu::new();
    let mut random = Random::new(6300);
    let (mut twins, seats) = simple(&gpu, &mut random, four_bits(), 100);
    let mut step = simple_step(&mut random, &seats, &[80]);
    step.max_query_len = 50;
    let (want, _) = step.cpu(&mut twins, &Params::default());
    let (got, lse) = step.device(&gpu, &mut twins, &Params::default());
    assert!(distance(&got.rows(0, 50), &want.rows(0, 50)) <= 1e-3);
    assert!(got.rows(50, 30).iter().all(|x| *x == 7.0) && lse[100..].iter().all(|x| *x == 7.0));
    let status = read_status(gpu.down(&twins.status).try_into().unwrap());
    assert_eq!((status.bad_rows, status.missing_blocks), (1, 0));

    let (mut twins, seats) = simple(&gpu, &mut random, four_bits(), 200);
    let mut step = simple_step(&mut random, &seats, &[1]);
    step.hide_pages = true;
    step.cpu(&mut twins, &Params::default());
    let (got, _) = step.device(&gpu, &mut twins, &Params::default());
    // Window and sinks alone are seen.
    assert!(got.rows(0, 1).iter().all(|x| x.is_finite()));
    let status = read_status(gpu.down(&twins.status).try_into().unwrap());
    assert_eq!(status.missing_blocks, 2);
}

#[test]
fn what_does_not_fit_is_refused_with_the_reason() {
    let gpu = Gpu::new();
    let mut random = Random::new(6400);
    let (mut twins, _) = simple(&gpu, &mut random, four_bits(), 0);
    let (ids, start, tables) = (gpu.up(&[0i32]), gpu.up(&[0i32, 4]), gpu.up(&[-1i32; 10]));
    let batch = DeviceBatch::seats((&ids).into(), (&start).into(), (&tables).into(), 4);
    let (mut words, mut slots) = (gpu.zeros::<i32>(STEP_WORDS), gpu.zeros::<i64>(4));
    let (x, wide) = (gpu.zeros::<f16>(4 * 4 * 272), gpu.zeros::<f32>(4 * 2 * 64));
    let (mut o, mut lse) = (gpu.zeros::<f32>(4 * 4 * 272), gpu.zeros::<f32>(7));
    let mut run = |config: &CacheConfig,
                   heads: usize,
                   d: usize,
                   f32_query: bool,
                   with_lse: bool,
                   params: &DeviceAttendParams<'_>| {
        let view = |h: usize| qkv::cuda::DeviceTensor::new(&x, crate::contiguous([4, h, d])).unwrap();
        let q = if f32_query {
            qkv::cuda::DeviceTensor::new(&wide, crate::contiguous([4, 2, 64])).unwrap()
        } else {
            view(heads)
        };
        let mut out = qkv::cuda::DeviceTensorMut::new(&mut o, crate::contiguous([4, heads, d])).unwrap();
        let s = StepMemory {
            lengths: (&mut twins.lengths).into(),
            step: (&mut words).into(),
            slots: (&mut slots).into(),
            status: (&mut twins.status).into(),
        };
        let l = twins.layer.memory(&four_bits());
        let lse = with_lse.then_some((&mut lse).into());
        let (k, v) = (view(1), view(1));
        prefill(&gpu.device, gpu.raw(), config, 0, &q, &k, &v, params, 4, &batch, &l, &s, &mut out, lse)
    };
    let (config, none) = (four_bits(), DeviceAttendParams::new());
    assert!(run(&config, 2, 64, false, false, &none).is_ok());
    assert!(matches!(run(&config, 2, 64, true, false, &none), Err(Error::Unsupported { what: "q", .. })));
    assert!(matches!(run(&config, 2, 64, false, true, &none), Err(Error::Length { what: "lse", .. })));
    assert!(matches!(run(&config, 2, 80, false, false, &none), Err(Error::Shape { what: "q", .. })));
    let large = CacheConfig::new(1, 1, 272).with_bits(Bits::B4);
    assert!(matches!(
        run(&large, 2, 272, false, false, &none),
        Err(Error::Unsupported { what: "head dim", .. })
    ));
    let bad = none.with_softcap(-1.0);
    assert!(matches!(
        run(&config, 2, 64, false, false, &bad),
        Err(Error::Unsupported { what: "softcap", .. })
    ));
    let logits = gpu.zeros::<f32>(3);
    let bad = none.with_sink_logits((&logits).into());
    assert!(matches!(
        run(&config, 2, 64, false, false, &bad),
        Err(Error::Length { what: "sink_logits", .. })
    ));
}

#[test]
fn tiles_meet_no_bank_conflicts() {
    let gpu = Gpu::new();
    let formats: [Format; 6] = [
        Affine::per_token(Bits::B4, 64).into(),
        Affine::per_channel(Bits::B4, 64).into(),
        Affine::per_token(Bits::B2, 32).into(),
        Affine::per_channel(Bits::B8, 32).into(),
        Fp8::e4m3(Granularity::TokenHead).into(),
        Format::Bf16,
    ];
    for (i, format) in formats.into_iter().enumerate() {
        let mut random = Random::new(7000 + i as u64);
        let config = four_bits().with_key(format).with_value(format);
        let (mut twins, seats) = simple(&gpu, &mut random, config, 400);
        let step = simple_step(&mut random, &seats, &[200]);
        step.cpu(&mut twins, &Params::default());
        let Some(simulator) = gpu.simulator else { return };
        simulator.take_stats();
        step.device(&gpu, &mut twins, &Params::default());
        let stats = simulator.take_stats();
        let prefill = &stats[1].total;
        assert!(prefill.mma > 0, "the second launch of a step is prefill");
        // 8 a block of 64 rows when finished rows are put down, once.
        let blocks = (200usize * 2).div_ceil(64) as u64;
        assert!(prefill.shared_conflicts <= 8 * blocks, "{format:?}: {} conflicts", prefill.shared_conflicts);
    }
}
