//! Pages, windows and sinks are built here by hand, with an own bit writer, and compared with attention in f64 over
//! what they decode as.

#[path = "../../../tests/support/reference.rs"]
mod reference;

use super::{Batch, Head, Needs, Rows, Workspace, attend};
use crate::config::AttendParams;
use crate::format::{Affine, Axis, Bits, Format, Fp8, Fp8Kind, Granularity};
use crate::layout::{PageLayout, TILE};
use crate::simd::Isa;
use crate::tensor::{Data, Dtype, TensorMut, TensorRef};
use half::{bf16, f16};
use reference::{Problem, worst};

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

/// The stored bytes of a case and what they decode as.
struct Stored {
    layout: PageLayout,
    pages: Vec<u8>,
    blocks: Vec<i32>,
    sinks: [Vec<f32>; 2],
    window: [Vec<f32>; 2],
    window_rows: usize,
    fresh: [Vec<f32>; 2],
    mean: Vec<f16>,
    scales: (f32, f32),
    /// `[token][head][dim]`
    k: Vec<f64>,
    v: Vec<f64>,
    q: Vec<f32>,
    sink_logits: Vec<f32>,
}

fn put_bits(bytes: &mut [u8], bit: usize, n: usize, code: u32) {
    for i in 0..n {
        let at = bit + i;
        bytes[at / 8] = bytes[at / 8] & !(1 << (at % 8)) | (((code >> i & 1) as u8) << (at % 8));
    }
}

/// One f32 that the dtype holds exactly.
fn round(dtype: Dtype, x: f64) -> f32 {
    match dtype {
        Dtype::F32 => x as f32,
        Dtype::F16 => f16::from_f64(x).to_f32(),
        Dtype::Bf16 => bf16::from_f64(x).to_f32(),
    }
}

fn fp8_value(kind: Fp8Kind, byte: u8) -> f64 {
    let (m_bits, bias) = if kind == Fp8Kind::E4M3 { (3, 7) } else { (2, 15) };
    let (e, m) =
        (((byte & 0x7f) >> m_bits) as i32, (byte & ((1 << m_bits) - 1)) as f64 / (1 << m_bits) as f64);
    let x = if e == 0 { m * 2f64.powi(1 - bias) } else { (1.0 + m) * 2f64.powi(e - bias) };
    if byte & 0x80 != 0 { -x } else { x }
}

/// Fills one operand of one page and decodes it: `[token][dim]`, rotated as stored.
fn fill_operand(
    rng: &mut Rng,
    page: &mut [u8],
    f: &Format,
    at: &crate::layout::OperandLayout,
    scale: f32,
    poison: bool,
) -> Vec<f64> {
    let dim = at.dim;
    let mut x = vec![0f64; TILE * dim];
    match f {
        Format::F16 | Format::Bf16 => {
            for t in 0..TILE {
                for c in 0..dim {
                    let bad = poison && rng.below(20_000) == 0;
                    let value = if bad { f64::NAN } else { rng.unit() };
                    let (bits, value) = if matches!(f, Format::F16) {
                        (f16::from_f64(value).to_bits(), f16::from_f64(value).to_f64())
                    } else {
                        (bf16::from_f64(value).to_bits(), bf16::from_f64(value).to_f64())
                    };
                    page[at.codes + t * dim * 2 + c * 2..][..2].copy_from_slice(&bits.to_le_bytes());
                    x[t * dim + c] = value;
                }
            }
        }
        Format::Fp8(p) => {
            for t in 0..TILE {
                let factor = if p.granularity == Granularity::TokenHead {
                    let s = 0.003 + 0.002 * rng.unit() as f32;
                    page[at.pairs + t * 4..][..4].copy_from_slice(&s.to_le_bytes());
                    s
                } else {
                    scale
                };
                for c in 0..dim {
                    // Large exponents are left out: they would drown the rest.
                    let mut byte = rng.next() as u8;
                    if p.kind == Fp8Kind::E5M2 && byte & 0x7f > 0x56 || byte & 0x7f == 0x7f {
                        byte &= 0x8f;
                    }
                    let bad = poison && rng.below(20_000) == 0;
                    page[at.codes + t * dim + c] = if bad { 0x7f } else { byte };
                    x[t * dim + c] = if bad { f64::NAN } else { factor as f64 * fp8_value(p.kind, byte) };
                }
            }
        }
        Format::Affine(a) => {
            let (bits, most) = (a.bits.get(), a.bits.max_code() as u32);
            let per_token = a.axis == Axis::PerToken;
            let groups = if per_token { dim.div_ceil(a.group) } else { TILE / a.group };
            let count = if per_token { TILE * groups } else { groups * dim };
            let mut pairs = Vec::new();
            for i in 0..count {
                let mut step = f16::from_f64((2.0 + 0.5 * rng.unit()) / most as f64);
                let min = f16::from_f64(-1.0 + 0.3 * rng.unit());
                if poison && rng.below(1500) == 0 {
                    step = f16::NAN;
                }
                page[at.pairs + i * 4..][..2].copy_from_slice(&step.to_bits().to_le_bytes());
                page[at.pairs + i * 4 + 2..][..2].copy_from_slice(&min.to_bits().to_le_bytes());
                pairs.push((step.to_f64(), min.to_f64()));
            }
            let row_bits = (dim * bits).div_ceil(8) * 8;
            for t in 0..TILE {
                for c in 0..dim {
                    let code = rng.next() as u32 & most;
                    put_bits(&mut page[at.codes..], t * row_bits + c * bits, bits, code);
                    let i = if per_token { t * groups + c / a.group } else { t / a.group * dim + c };
                    x[t * dim + c] = pairs[i].0 * code as f64 + pairs[i].1;
                }
            }
        }
        #[allow(unreachable_patterns)]
        _ => unreachable!(),
    }
    x
}

/// Makes what lies beyond `tokens` and below `sinks` NaN where a token's data are its own.
fn spoil(page: &mut [u8], f: &Format, at: &crate::layout::OperandLayout, token: usize) {
    match f {
        Format::Affine(a) if a.axis == Axis::PerToken => {
            let n = at.dim.div_ceil(a.group) * 4;
            page[at.pairs + token * n..][..n].fill(0xff);
        }
        Format::Affine(_) => {}
        Format::Fp8(_) => page[at.codes + token * at.row_bytes..][..at.row_bytes].fill(0xff),
        _ => page[at.codes + token * at.row_bytes..][..at.row_bytes].fill(0xff),
    }
}

/// Hadamard rotation straight from the matrix: entry (i, j) is the parity of `i & j`.
fn rotate(x: &mut [f64], block: usize) {
    for b in x.chunks_exact_mut(block) {
        let old = b.to_vec();
        for (i, o) in b.iter_mut().enumerate() {
            let sign = |j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
            *o = old.iter().enumerate().map(|(j, x)| sign(j) * x).sum::<f64>() / (block as f64).sqrt();
        }
    }
}

fn store(case: &Case) -> Stored {
    let mut rng = Rng(case.seed);
    let layout = PageLayout::new(&case.key, &case.value, case.key_dim, case.value_dim);
    let tiles = case.packed.div_ceil(TILE);
    // Blocks in another order than tiles, with one unused in front.
    let blocks: Vec<i32> = (0..tiles).map(|i| (tiles - i) as i32).collect();
    let mut pages = vec![0u8; (tiles + 1) * case.kv_heads * layout.page_bytes];
    let total = case.len + case.fresh;
    let (kd, vd, h) = (case.key_dim, case.value_dim, case.kv_heads);
    let (mut k, mut v) = (vec![f64::NAN; total * h * kd], vec![f64::NAN; total * h * vd]);
    let scales = (0.0041f32, 0.0057f32);
    let mean: Vec<f16> = (0..h * kd).map(|_| f16::from_f64(2.0 * rng.unit())).collect();
    for (tile, block) in blocks.iter().enumerate() {
        for head in 0..h {
            let page = &mut pages[(*block as usize * h + head) * layout.page_bytes..][..layout.page_bytes];
            let mut pk = fill_operand(&mut rng, page, &case.key, &layout.key, scales.0, case.poison);
            let mut pv = fill_operand(&mut rng, page, &case.value, &layout.value, scales.1, case.poison);
            if let Some(b) = case.key.rotation() {
                pk.chunks_exact_mut(kd).for_each(|row| rotate(row, b));
            }
            if let Some(b) = case.value.rotation() {
                pv.chunks_exact_mut(vd).for_each(|row| rotate(row, b));
            }
            for t in 0..TILE {
                let token = tile * TILE + t;
                if token < case.sinks || token >= case.packed {
                    spoil(page, &case.key, &layout.key, t);
                    spoil(page, &case.value, &layout.value, t);
                    continue;
                }
                for c in 0..kd {
                    let m = if case.mean { mean[head * kd + c].to_f64() } else { 0.0 };
                    k[(token * h + head) * kd + c] = pk[t * kd + c] + m;
                }
                v[(token * h + head) * vd..][..vd].copy_from_slice(&pv[t * vd..][..vd]);
            }
        }
    }
    // Exact rows, head by head; slots that hold nothing are NaN.
    let window_rows = (case.len - case.packed + 7).next_multiple_of(16);
    let sinks = [vec![f32::NAN; h * 16 * kd], vec![f32::NAN; h * 16 * vd]];
    let window = [vec![f32::NAN; h * window_rows * kd], vec![f32::NAN; h * window_rows * vd]];
    let fresh = [vec![0f32; case.fresh * h * kd], vec![0f32; case.fresh * h * vd]];
    let mut s = Stored {
        layout,
        pages,
        blocks,
        sinks,
        window,
        window_rows,
        fresh,
        mean,
        scales,
        k,
        v,
        q: Vec::new(),
        sink_logits: Vec::new(),
    };
    for operand in 0..2 {
        let d = [kd, vd][operand];
        for head in 0..h {
            for token in 0..total {
                if token >= case.sinks && token < case.packed {
                    continue;
                }
                for c in 0..d {
                    let mut x = round(case.rows, rng.unit());
                    if case.poison && rng.below(20_000) == 0 {
                        x = if operand == 0 && rng.chance(80) { f32::NEG_INFINITY } else { f32::NAN };
                    }
                    let all = if operand == 0 { &mut s.k } else { &mut s.v };
                    all[(token * h + head) * d + c] = x as f64;
                    if token >= case.len {
                        s.fresh[operand][((token - case.len) * h + head) * d + c] = x;
                    } else if token < case.sinks {
                        s.sinks[operand][(head * 16 + token) * d + c] = x;
                    } else {
                        s.window[operand][(head * window_rows + token % window_rows) * d + c] = x;
                    }
                }
            }
        }
    }
    // The released prefix is not there any more.
    for b in &mut s.blocks[..case.first / TILE] {
        *b = -1;
    }
    s.q = (0..case.queries * h * case.group * kd).map(|_| (3.0 * rng.unit()) as f32).collect();
    s.sink_logits = (0..h * case.group).map(|_| (2.0 * rng.unit()) as f32).collect();
    s
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
            assert!(out[row * heads * vd..][..heads * vd].iter().all(|x| *x == 0.0));
            assert!(lse[row * heads..][..heads].iter().all(|x| *x == f32::NEG_INFINITY));
        }
    }
    results
}

/// Compares a case with the reference on every level.
fn check(case: &Case) {
    let stored = store(case);
    let wide = |x: &[f32]| x.iter().map(|x| *x as f64).collect::<Vec<f64>>();
    let (q, logits) = (wide(&stored.q), wide(&stored.sink_logits));
    let problem = Problem {
        q: &q,
        k: &stored.k,
        v: &stored.v,
        query_heads: case.kv_heads * case.group,
        kv_heads: case.kv_heads,
        key_dim: case.key_dim,
        value_dim: case.value_dim,
        scale: 1.0 / (case.key_dim as f64).sqrt(),
        softcap: case.softcap.map(f64::from),
        sliding_window: case.sliding_window,
        sink_logits: case.sink_logits.then_some(&logits),
        bidirectional: &case.bidirectional,
        causal: true,
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
        for block in [32, 64, 128].into_iter().filter(|b| dim % b == 0) {
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

/// Not a test: `cargo test --release --lib attend_speed -- --ignored --nocapture`.
#[test]
#[ignore = "prints timings"]
fn attend_speed() {
    use std::time::Instant;
    let a = |b, g, axis| affine(b, g, axis, None);
    let (pt, pc) = (Axis::PerToken, Axis::PerChannel);
    let all: Vec<(&str, Format, Format)> = vec![
        ("f16", Format::F16, Format::F16),
        ("bf16", Format::Bf16, Format::Bf16),
        ("int8", a(Bits::B8, 128, pt), a(Bits::B8, 128, pt)),
        ("int8 g32", a(Bits::B8, 32, pt), a(Bits::B8, 32, pt)),
        ("int4 g32", a(Bits::B4, 32, pt), a(Bits::B4, 32, pt)),
        ("int4", a(Bits::B4, 64, pc), a(Bits::B4, 64, pt)),
        ("int3", a(Bits::B3, 32, pc), a(Bits::B3, 32, pt)),
        ("int2", a(Bits::B2, 32, pc), a(Bits::B2, 32, pt)),
        ("int1", a(Bits::B1, 32, pc), a(Bits::B1, 32, pt)),
        ("e4m3", Fp8::e4m3(Granularity::TokenHead).into(), Fp8::e4m3(Granularity::TokenHead).into()),
        ("e5m2", Fp8::e5m2(Granularity::Tensor).into(), Fp8::e5m2(Granularity::Tensor).into()),
    ];
    let group: usize = std::env::var("GROUP").map_or(4, |g| g.parse().unwrap());
    let only = std::env::var("ONLY").ok();
    for (name, key, value) in all.into_iter().filter(|x| only.as_ref().is_none_or(|o| o == x.0)) {
        for len in std::env::var("LEN").map_or(vec![4096usize, 16384], |l| vec![l.parse().unwrap()]) {
            let case = Case { kv_heads: 32 / group, group, ..Case::plain(key, value, 128, len) };
            let stored = store(&case);
            let mut workspace = Workspace::default();
            let mut best = f64::MAX;
            for _ in 0..std::env::var("RUNS").map_or(12, |r| r.parse().unwrap()) {
                let t = Instant::now();
                run_timed(&case, &stored, &mut workspace);
                best = best.min(t.elapsed().as_secs_f64());
            }
            let bytes = (case.packed / TILE * case.kv_heads * stored.layout.page_bytes) as f64;
            println!("{name:9} {len:6} tokens: {:7.3} ms {:6.1} GB/s", best * 1e3, bytes / best / 1e9);
        }
    }
}

fn run_timed(case: &Case, s: &Stored, workspace: &mut Workspace) {
    let (kd, vd, h) = (case.key_dim, case.value_dim, case.kv_heads);
    let heads = h * case.group;
    let mut out = vec![0f32; heads * vd];
    let empty = Rows { data: Data::F32(&[]), capacity: 1 };
    let head_of = |_: usize, head: usize| Head {
        key: &case.key,
        value: &case.value,
        layout: &s.layout,
        pages: &s.pages,
        blocks: &s.blocks,
        kv_heads: h,
        head,
        len: case.packed,
        packed: case.packed,
        sinks: 0,
        sink_rows: (empty, empty),
        window: (empty, empty),
        mean: None,
        scales: s.scales,
        first: 0,
        fresh: None,
    };
    let q = TensorRef::thd(&s.q, [1, heads, kd]).unwrap();
    let batch = Batch { query_start: &[0, 1], queries: None };
    let mut o = TensorMut::thd(&mut out, [1, heads, vd]).unwrap();
    attend(Isa::detect(), &head_of, &batch, h, &q, &AttendParams::new(), None, &mut o, None, workspace);
    std::hint::black_box(&out);
}
