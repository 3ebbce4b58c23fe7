//! Pages, windows and sinks are built here by hand, with an own bit writer, and compared with attention in f64 over
//! what they decode as.

#[path = "../../../tests/support/reference.rs"]
mod reference;
mod stored;

use super::{Batch, Head, Needs, Rows, Workspace, attend};
use crate::config::AttendParams;
use crate::format::{Affine, Axis, Bits, Format, Fp8, Fp8Kind, Granularity};
use crate::layout::{PageLayout, TILE};
use crate::simd::Isa;
use crate::tensor::{Data, Dtype, TensorMut, TensorRef};
use half::{bf16, f16};
use reference::{Problem, worst};
use stored::{Stored, store};

/// A small generator; the tests' cases are functions of its seed.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 ^ (self.0 >> 29)) >> 16
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
    fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
    /// In [-1, 1).
    fn unit(&mut self) -> f64 {
        (self.next() % (1 << 24)) as f64 / (1 << 23) as f64 - 1.0
    }
}

/// What a test stores and asks.
#[derive(Debug, Clone)]
struct Case {
    seed: u64,
    key: Format,
    value: Format,
    key_dim: usize,
    value_dim: usize,
    kv_heads: usize,
    group: usize,
    /// Tokens before `fresh`.
    len: usize,
    packed: usize,
    sinks: usize,
    first: usize,
    fresh: usize,
    queries: usize,
    rows: Dtype,
    sliding_window: Option<usize>,
    softcap: Option<f32>,
    sink_logits: bool,
    bidirectional: Vec<(usize, usize)>,
    mean: bool,
    /// NaN in some groups and elements, -inf in some exact keys.
    poison: bool,
}

impl Case {
    fn plain(key: impl Into<Format>, value: impl Into<Format>, dim: usize, len: usize) -> Case {
        Case {
            seed: 1,
            key: key.into(),
            value: value.into(),
            key_dim: dim,
            value_dim: dim,
            kv_heads: 2,
            group: 4,
            len,
            packed: len.saturating_sub(64) / TILE * TILE,
            sinks: 4,
            first: 0,
            fresh: 0,
            queries: 1,
            rows: Dtype::F16,
            sliding_window: None,
            softcap: None,
            sink_logits: false,
            bidirectional: Vec::new(),
            mean: false,
            poison: false,
        }
    }
}

/// The exact rows of a case in its dtype.
struct Exact(Dtype, Vec<f16>, Vec<bf16>, Vec<f32>);

impl Exact {
    fn new(dtype: Dtype, x: &[f32]) -> Exact {
        match dtype {
            Dtype::F16 => Exact(dtype, x.iter().map(|x| f16::from_f32(*x)).collect(), vec![], vec![]),
            Dtype::Bf16 => Exact(dtype, vec![], x.iter().map(|x| bf16::from_f32(*x)).collect(), vec![]),
            Dtype::F32 => Exact(dtype, vec![], vec![], x.to_vec()),
        }
    }
    fn data(&self, from: usize, n: usize) -> Data<'_> {
        match self.0 {
            Dtype::F16 => Data::F16(&self.1[from..from + n]),
            Dtype::Bf16 => Data::Bf16(&self.2[from..from + n]),
            Dtype::F32 => Data::F32(&self.3[from..from + n]),
        }
    }
}

fn run(
    isa: Isa,
    cases: &[(&Case, &Stored)],
    padding: usize,
    workspace: &mut Workspace,
) -> Vec<(Vec<f32>, Vec<f32>)> {
    let c0 = cases[0].0;
    let (h, heads, kd, vd) = (c0.kv_heads, c0.kv_heads * c0.group, c0.key_dim, c0.value_dim);
    let exact: Vec<[Exact; 6]> = cases
        .iter()
        .map(|(c, s)| {
            let e = |x: &[f32]| Exact::new(c.rows, x);
            [e(&s.sinks[0]), e(&s.sinks[1]), e(&s.window[0]), e(&s.window[1]), e(&s.fresh[0]), e(&s.fresh[1])]
        })
        .collect();
    let fresh: Vec<[TensorRef<'_>; 2]> = cases
        .iter()
        .zip(&exact)
        .map(|((c, _), e)| {
            let dims = |d| [c.fresh, h, d];
            [
                TensorRef::thd(e[4].data(0, c.fresh * h * kd), dims(kd)).unwrap(),
                TensorRef::thd(e[5].data(0, c.fresh * h * vd), dims(vd)).unwrap(),
            ]
        })
        .collect();
    let mut q = Vec::new();
    let mut starts = vec![0i32];
    let mut counts = Vec::new();
    for (c, s) in cases {
        q.extend_from_slice(&s.q);
        q.extend(std::iter::repeat_n(f32::NAN, padding * heads * kd));
        starts.push(starts[starts.len() - 1] + (c.queries + padding) as i32);
        counts.push(c.queries as i32);
    }
    q.extend(std::iter::repeat_n(f32::NAN, padding * heads * kd));
    let rows = q.len() / heads / kd;
    let head_of = |i: usize, head: usize| {
        let ((c, s), e) = (cases[i], &exact[i]);
        let ring = |i: usize, n: usize, d: usize| Rows { data: e[i].data(head * n * d, n * d), capacity: n };
        Head {
            key: &c.key,
            value: &c.value,
            layout: &s.layout,
            pages: &s.pages,
            blocks: &s.blocks,
            kv_heads: h,
            head,
            len: c.len,
            packed: c.packed,
            sinks: c.sinks,
            sink_rows: (ring(0, 16, kd), ring(1, 16, vd)),
            window: (ring(2, s.window_rows, kd), ring(3, s.window_rows, vd)),
            mean: c.mean.then(|| &s.mean[head * kd..][..kd]),
            scales: s.scales,
            first: c.first,
            fresh: (c.fresh > 0).then(|| (&fresh[i][0], &fresh[i][1], 0, c.fresh)),
        }
    };
    let mut params =
        AttendParams { bidirectional: &c0.bidirectional, softcap: c0.softcap, ..AttendParams::new() };
    if c0.sink_logits {
        params.sink_logits = Some(&cases[0].1.sink_logits);
    }
    let (mut out, mut lse) = (vec![7f32; rows * heads * vd], vec![7f32; rows * heads]);
    attend(
        isa,
        &head_of,
        &Batch { query_start: &starts, queries: Some(&counts) },
        h,
        &TensorRef::thd(&q, [rows, heads, kd]).unwrap(),
        &params,
        c0.sliding_window,
        &mut TensorMut::thd(&mut out, [rows, heads, vd]).unwrap(),
        Some(&mut lse),
        workspace,
    );
    let mut results = Vec::new();
    let mut valid = vec![false; rows];
    for (i, (c, _)) in cases.iter().enumerate() {
        let (a, b) = (starts[i] as usize, starts[i] as usize + c.queries);
        valid[a..b].fill(true);
        results.push((out[a * heads * vd..b * heads * vd].to_vec(), lse[a * heads..b * heads].to_vec()));
    }
    for (row, valid) in valid.into_iter().enumerate() {
        if !valid {
            let mut left = out[row * heads * vd..][..heads * vd].iter().chain(&lse[row * heads..][..heads]);
            assert!(left.all(|x| *x == 7.0), "row {row} of no sequence was written");
        }
    }
    results
}

/// Compares a case with the reference on every level.
fn check(case: &Case) {
    let stored = store(case);
    let wide = |x: &[f32]| x.iter().map(|x| *x as f64).collect::<Vec<f64>>();
    let (q, logits) = (wide(&stored.q), wide(&stored.sink_logits));
    let heads = [case.kv_heads * case.group, case.kv_heads];
    let problem = Problem {
        softcap: case.softcap.map(f64::from),
        sliding_window: case.sliding_window,
        sink_logits: case.sink_logits.then_some(&logits),
        bidirectional: &case.bidirectional,
        ..Problem::causal(&q, &stored.k, &stored.v, heads, [case.key_dim, case.value_dim])
    };
    let (out, lse) = problem.solve();
    for &isa in Isa::available() {
        let (got, got_lse) = run(isa, &[(case, &stored)], 0, &mut Workspace::default()).remove(0);
        let (e, l) = (worst(&got, &out), worst(&got_lse, &lse));
        assert!(e.is_some_and(|e| e < 1e-5), "{isa:?} out: {e:?} {case:?}");
        assert!(l.is_some_and(|e| e < 1e-5), "{isa:?} lse: {l:?} {case:?}");
    }
}

fn affine(bits: Bits, group: usize, axis: Axis, rotate: Option<usize>) -> Format {
    Affine {
        rotate,
        ..if axis == Axis::PerToken {
            Affine::per_token(bits, group)
        } else {
            Affine::per_channel(bits, group)
        }
    }
    .into()
}

/// Every format that a head of `dim` channels can have.
fn formats(dim: usize) -> Vec<Format> {
    let mut all = vec![Format::F16, Format::Bf16];
    for bits in Bits::ALL {
        for group in [32, 64, 128, dim].into_iter().filter(|g| *g <= dim) {
            all.push(affine(bits, group, Axis::PerToken, None));
        }
        all.extend([32, 64].map(|g| affine(bits, g, Axis::PerChannel, None)));
        for block in [32, 64, 128].into_iter().filter(|b| dim.is_multiple_of(*b)) {
            all.push(affine(bits, 32, Axis::PerToken, Some(block)));
            all.push(affine(bits, 64, Axis::PerChannel, Some(block)));
        }
    }
    for granularity in [Granularity::Tensor, Granularity::Head, Granularity::TokenHead] {
        all.extend([Format::from(Fp8::e4m3(granularity)), Fp8::e5m2(granularity).into()]);
    }
    all
}

#[test]
fn every_format_as_keys_and_as_values() {
    for dim in [64, 80, 128] {
        for (i, f) in formats(dim).into_iter().enumerate() {
            for group in [1, 4, 7] {
                let other = formats(dim)[i * 7 % formats(dim).len()];
                let case = Case { group, seed: i as u64, kv_heads: 1, ..Case::plain(f, other, dim, 200) };
                check(&case);
                check(&Case { key: other, value: f, ..case });
            }
        }
    }
}

#[test]
fn head_dims_and_groups() {
    let four = |d: usize| affine(Bits::B4, 64.min(d), Axis::PerToken, None);
    for (k, v) in [
        (16, 16),
        (64, 64),
        (80, 80),
        (96, 96),
        (112, 112),
        (128, 128),
        (192, 128),
        (64, 256),
        (256, 256),
        (512, 512),
    ] {
        for group in [1, 2, 3, 4, 5, 8, 16, 40] {
            let case = Case::plain(affine(Bits::B8, 32, Axis::PerChannel, None), four(v), k, 150);
            check(&Case { value_dim: v, group, kv_heads: 1, ..case });
        }
    }
}

#[test]
fn random_histories() {
    for seed in 0..600u64 {
        check(&random(seed, false));
    }
}

#[test]
fn nan_and_infinity_stay_where_they_belong() {
    let mut hit = 0;
    for seed in 1000..1400u64 {
        let case = random(seed, true);
        let stored = store(&case);
        hit += (stored.k.iter().chain(&stored.v).any(|x| !x.is_finite())) as usize;
        check(&case);
    }
    assert!(hit > 100, "{hit} cases were poisoned");
}

fn random(seed: u64, poison: bool) -> Case {
    let mut rng = Rng(seed * 977 + 5);
    let (key_dim, value_dim) =
        rng.pick(&[(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (64, 32), (32, 64)]);
    let direct = rng.chance(30);
    let able = |f: &Format| !direct || f.is_per_token();
    let (keys, values): (Vec<_>, Vec<_>) = (
        formats(key_dim).into_iter().filter(able).collect(),
        formats(value_dim).into_iter().filter(able).collect(),
    );
    let (key, value) = (rng.pick(&keys), rng.pick(&values));
    let len = if rng.chance(10) { rng.below(5) } else { rng.below(400) };
    let packed = if direct { len } else { rng.below(len / TILE + 1) * TILE };
    let sinks = if direct { 0 } else { rng.pick(&[0, 4, 16, 1]) };
    let fresh = if rng.chance(40) { 1 + rng.below(90) } else { 0 };
    let total = len + fresh;
    let queries = if fresh > 0 { fresh } else { rng.pick(&[1, 1, 2, 5, 17]).min(len.max(1)) };
    let sliding_window = rng.chance(40).then(|| 1 + rng.below(150));
    // What lies outside every window may be gone.
    let first = sliding_window.map_or(0, |w| (total + 1).saturating_sub(queries + w)) / TILE * TILE;
    let first = if rng.chance(50) && first <= packed { first } else { 0 };
    let mut bidirectional = Vec::new();
    if fresh > 3 && first == 0 && rng.chance(40) {
        let start = len + rng.below(fresh - 2);
        bidirectional.push((start, start + 1 + rng.below(total - start)));
        bidirectional.push((len.saturating_sub(3), len + 2));
    }
    let mean = matches!(key, Format::Affine(a) if a.axis == Axis::PerToken) && rng.chance(30);
    Case {
        seed,
        key,
        value,
        key_dim,
        value_dim,
        kv_heads: rng.pick(&[1, 2, 3]),
        group: rng.pick(&[1, 2, 3, 4, 6, 8, 16]),
        len,
        packed,
        sinks,
        first,
        fresh,
        queries,
        rows: rng.pick(&[Dtype::F16, Dtype::Bf16, Dtype::F32]),
        sliding_window,
        softcap: rng.chance(30).then_some(rng.pick(&[5.0, 30.0, 50.0])),
        sink_logits: rng.chance(30),
        bidirectional,
        mean,
        poison,
    }
}

#[test]
fn long_sequences_are_split_and_combined() {
    let four = affine(Bits::B4, 64, Axis::PerToken, None);
    for len in [1023, 1024, 1025, 2111, 5000] {
        let case =
            Case { group: 2, ..Case::plain(affine(Bits::B4, 64, Axis::PerChannel, None), four, 64, len) };
        check(&case);
        check(&Case { sliding_window: Some(700), sink_logits: true, group: 5, ..case.clone() });
        check(&Case { packed: 0, fresh: len, len: 0, sinks: 0, ..case });
    }
}

#[test]
fn results_depend_neither_on_threads_nor_on_the_batch() {
    let lens = [0usize, 1, 63, 64, 200, 1500, 3000, 70];
    for (seed, queries) in [(1u64, 1usize), (2, 3), (3, 20)] {
        let base = Case::plain(
            affine(Bits::B4, 32, Axis::PerChannel, None),
            affine(Bits::B3, 64, Axis::PerToken, None),
            64,
            0,
        );
        let cases: Vec<Case> = lens
            .iter()
            .map(|len| {
                let packed = len.saturating_sub(40) / TILE * TILE;
                Case { seed, len: *len, packed, queries, ..base.clone() }
            })
            .collect();
        let stored: Vec<Stored> = cases.iter().map(store).collect();
        let all: Vec<(&Case, &Stored)> = cases.iter().zip(&stored).collect();
        let isa = Isa::detect();
        let alone: Vec<_> =
            all.iter().map(|c| run(isa, &[*c], 0, &mut Workspace::default()).remove(0)).collect();
        for threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            // The larger capacity of the second workspace must not matter.
            for tokens in [0, 100_000] {
                let needs = Needs { sequences: 9, tokens, query_heads: 8, key_dim: 64, value_dim: 64 };
                let together = pool.install(|| run(isa, &all, 2, &mut Workspace::new(needs)));
                assert!(together == alone, "{threads} threads, room for {tokens} tokens");
            }
        }
    }
}

#[test]
fn a_workspace_that_fits_does_not_grow_and_its_scratch_is_below_a_tile() {
    for dim in [64, 128, 256] {
        let needs = Needs { sequences: 1, tokens: 4096, query_heads: 8, key_dim: dim, value_dim: dim };
        let mut workspace = Workspace::new(needs);
        let bytes = workspace.bytes();
        let scratch = (bytes - workspace.partials.len() * 4) / workspace.scratch.len();
        assert!(scratch < TILE * 2 * dim * 4, "{scratch} bytes of scratch at {dim} channels");
        let case = Case { ..Case::plain(Format::F16, Format::F16, dim, 3000) };
        run(Isa::detect(), &[(&case, &store(&case))], 0, &mut workspace);
        assert_eq!(workspace.bytes(), bytes);
    }
}
