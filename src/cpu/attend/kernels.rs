//! The inner loops: scores (rows of q against rows of keys) and weighted sums of values.
//!
//! Rows of q are taken four, two or one at a time, so that eight sums of eight lanes live in registers and every
//! key or value is unpacked once for all of them:
//!
//! | rows | scores: tokens at a time | values: channels at a time |
//! |---|---|---|
//! | 4 | 2 | 16 |
//! | 2 | 4 | 32 |
//! | 1 | 8 | 64 |

use super::lanes::Lanes;
use super::load::{self, with_kind};
use crate::layout::TILE;
use crate::simd::Isa;

/// Compiles `name(isa, args)` from `body::<consts, lanes>(args)`, in plain code and with AVX2. Lanes are eight wide, so
/// AVX-512 machines run the AVX2 code. `body` must be `#[inline(always)]`.
macro_rules! levels {
    ($(#[$doc:meta])* $vis:vis fn $name:ident $(<$(const $c:ident: $ct:ty),*>)? ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident;) => {
        $(#[$doc])*
        #[inline]
        #[allow(clippy::too_many_arguments)]
        $vis fn $name $(<$(const $c: $ct),*>)? (isa: $crate::simd::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma,f16c,bmi2")]
                fn avx2 $(<$(const $c: $ct),*>)? ($($arg: $ty),*) $(-> $ret)? {
                    $body::<$($($c,)*)? $crate::cpu::attend::lanes::Avx2>($($arg),*)
                }
                if isa != $crate::simd::Isa::Plain {
                    // SAFETY: every level of `Isa::available` above plain has these features.
                    return unsafe { avx2 $(::<$($c),*>)? ($($arg),*) };
                }
            }
            let _ = isa;
            $body::<$($($c,)*)? $crate::cpu::attend::lanes::Plain>($($arg),*)
        }
    };
}
pub(super) use levels;

/// Rows of stored elements at a constant distance.
#[derive(Clone, Copy, Debug)]
pub(super) struct Strided<'a> {
    /// The first row starts here.
    pub bytes: &'a [u8],
    /// Bytes between rows.
    pub stride: usize,
    /// What they are made of (`load.rs`).
    pub kind: usize,
}

/// A factor for each token and group of channels, `[token][groups]`; groups are `vectors * 8` channels wide.
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupSteps<'a> {
    /// `[token][groups]`.
    pub steps: &'a [f32],
    /// Groups of a row.
    pub groups: usize,
    /// Vectors of eight channels in a group.
    pub vectors: usize,
}

/// Rows the kernels take of `left`.
pub(super) const fn rows_at_once(left: usize) -> usize {
    match left {
        4.. => 4,
        2.. => 2,
        n => n,
    }
}

/// Whether [`dot`] and [`weigh`] read packed rows themselves for this many rows of q; else they want f32, made by
/// [`expand`]. More rows share what is unpacked, so a slice of f32 pays; other numbers, and machines without vectors, are
/// rare, and every instance costs compile time.
pub(super) fn reads_packed(isa: Isa, rows: usize) -> bool {
    isa != Isa::Plain && (rows == 4 || rows == 1)
}

#[inline(always)]
fn dot_body<
    const KIND: usize,
    const BYTES: usize,
    const ROWS: usize,
    const TOKENS: usize,
    const SCALED: bool,
    L: Lanes,
>(
    keys: Strided<'_>,
    from: usize,
    to: usize,
    q: &[f32],
    dim: usize,
    scale: GroupSteps<'_>,
    scores: &mut [f32],
) {
    let n = dim / 8;
    let mut rows_q: [&[[f32; 8]]; ROWS] = [&[]; ROWS];
    for (r, row) in rows_q.iter_mut().enumerate() {
        *row = &q[r * dim..][..dim].as_chunks::<8>().0[..n];
    }
    let mut t = from;
    while t < to {
        let mut token = [0; TOKENS];
        let mut rows: [&[[u8; BYTES]]; TOKENS] = [&[]; TOKENS];
        for i in 0..TOKENS {
            token[i] = (t + i).min(to - 1);
            rows[i] = &keys.bytes[token[i] * keys.stride..][..n * BYTES].as_chunks::<BYTES>().0[..n];
        }
        let mut acc = [L::splat(0.0); 8];
        if SCALED {
            let mut at = 0;
            for g in 0..scale.groups {
                let mut step = [L::splat(0.0); TOKENS];
                for i in 0..TOKENS {
                    step[i] = L::splat(scale.steps[token[i] * scale.groups + g]);
                }
                let end = (at + scale.vectors).min(n);
                for v in at..end {
                    for i in 0..TOKENS {
                        let k = L::codes::<KIND, BYTES>(&rows[i][v]).mul(step[i]);
                        for r in 0..ROWS {
                            acc[i * ROWS + r] = k.fma(L::load(&rows_q[r][v]), acc[i * ROWS + r]);
                        }
                    }
                }
                at = end;
            }
        } else {
            for v in 0..n {
                for i in 0..TOKENS {
                    let k = L::codes::<KIND, BYTES>(&rows[i][v]);
                    for r in 0..ROWS {
                        acc[i * ROWS + r] = k.fma(L::load(&rows_q[r][v]), acc[i * ROWS + r]);
                    }
                }
            }
        }
        let s = L::sums(acc);
        for i in 0..TOKENS.min(to - t) {
            for r in 0..ROWS {
                scores[r * TILE + t + i] = s[i * ROWS + r];
            }
        }
        t += TOKENS;
    }
}

levels! {
    fn dot_k<const KIND: usize, const BYTES: usize, const ROWS: usize, const TOKENS: usize, const SCALED: bool>(
        keys: Strided<'_>, from: usize, to: usize, q: &[f32], dim: usize, scale: GroupSteps<'_>, scores: &mut [f32],
    ) = dot_body;
}

/// Scores of tokens `from..to` for all `rows` of q (`[rows][dim]`): `scores[row][token] = sum(q * key)`, with the
/// keys multiplied by `scale` where one is given (packed keys only).
pub(super) fn dot(
    isa: Isa,
    keys: Strided<'_>,
    (from, to): (usize, usize),
    q: &[f32],
    rows: usize,
    dim: usize,
    scale: Option<GroupSteps<'_>>,
    scores: &mut [f32],
) {
    let none = GroupSteps { steps: &[], groups: 0, vectors: 0 };
    let mut r = 0;
    while r < rows {
        let n = rows_at_once(rows - r);
        let (k, q, s) = (keys, &q[r * dim..], &mut scores[r * TILE..]);
        match (keys.kind, scale) {
            (load::F32, _) => match n {
                4 => dot_k::<32, 32, 4, 2, false>(isa, k, from, to, q, dim, none, s),
                2 => dot_k::<32, 32, 2, 4, false>(isa, k, from, to, q, dim, none, s),
                _ => dot_k::<32, 32, 1, 8, false>(isa, k, from, to, q, dim, none, s),
            },
            (kind, None) => match n {
                4 => {
                    with_kind!(kind, |K, B| dot_k::<K, B, 4, 2, false>(isa, k, from, to, q, dim, none, s); packed)
                }
                _ => {
                    with_kind!(kind, |K, B| dot_k::<K, B, 1, 8, false>(isa, k, from, to, q, dim, none, s); packed)
                }
            },
            (kind, Some(g)) => match n {
                4 => {
                    with_kind!(kind, |K, B| dot_k::<K, B, 4, 2, true>(isa, k, from, to, q, dim, g, s); affine)
                }
                _ => {
                    with_kind!(kind, |K, B| dot_k::<K, B, 1, 8, true>(isa, k, from, to, q, dim, g, s); affine)
                }
            },
        }
        r += n;
    }
}

/// What becomes of a sum over tokens before it joins the output.
#[derive(Clone, Copy, Debug)]
pub(super) enum Epilogue<'a> {
    /// It is added.
    Add,
    /// `step[channel] * sum + min[channel] * (sum of the weights)` is added.
    PerChannel {
        /// Steps of the channels.
        step: &'a [f32],
        /// Mins of the channels.
        min: &'a [f32],
    },
}

#[inline(always)]
fn weigh_body<const KIND: usize, const BYTES: usize, const ROWS: usize, const VECTORS: usize, L: Lanes>(
    values: Strided<'_>,
    from: usize,
    to: usize,
    weights: &[f32],
    width: usize,
    end: Epilogue<'_>,
    out: &mut [f32],
    out_stride: usize,
) {
    let n = to - from;
    let mut w: [&[f32]; ROWS] = [&[]; ROWS];
    let mut total = [0f32; ROWS];
    for r in 0..ROWS {
        w[r] = &weights[r * TILE + from..][..n];
        if let Epilogue::PerChannel { .. } = end {
            total[r] = total_body::<L>(w[r]);
        }
    }
    let mut c = 0;
    while c + VECTORS * 8 <= width {
        weigh_block::<KIND, BYTES, ROWS, VECTORS, L>(values, from, n, &w, c, end, &total, out, out_stride);
        c += VECTORS * 8;
    }
    if VECTORS > 2 {
        while c < width {
            weigh_block::<KIND, BYTES, ROWS, 2, L>(values, from, n, &w, c, end, &total, out, out_stride);
            c += 16;
        }
    }
}

/// `VECTORS * 8` channels from channel `c` on.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn weigh_block<const KIND: usize, const BYTES: usize, const ROWS: usize, const VECTORS: usize, L: Lanes>(
    values: Strided<'_>,
    from: usize,
    n: usize,
    w: &[&[f32]; ROWS],
    c: usize,
    end: Epilogue<'_>,
    total: &[f32; ROWS],
    out: &mut [f32],
    out_stride: usize,
) {
    let mut weights: [&[f32]; ROWS] = [&[]; ROWS];
    for r in 0..ROWS {
        weights[r] = &w[r][..n];
    }
    let mut acc = [[L::splat(0.0); VECTORS]; ROWS];
    let mut at = from * values.stride + c / 8 * BYTES;
    // One index into several slices.
    #[allow(clippy::needless_range_loop)]
    for t in 0..n {
        let row = values.bytes[at..at + VECTORS * BYTES].as_chunks::<BYTES>().0;
        let mut x = [L::splat(0.0); VECTORS];
        for v in 0..VECTORS {
            x[v] = L::codes::<KIND, BYTES>(&row[v]);
        }
        for r in 0..ROWS {
            let p = L::splat(weights[r][t]);
            for v in 0..VECTORS {
                acc[r][v] = p.fma(x[v], acc[r][v]);
            }
        }
        at += values.stride;
    }
    for r in 0..ROWS {
        let o = &mut out[r * out_stride + c..][..VECTORS * 8].as_chunks_mut::<8>().0[..VECTORS];
        for v in 0..VECTORS {
            let old = L::load(&o[v]);
            match end {
                Epilogue::Add => old.add(acc[r][v]).store(&mut o[v]),
                Epilogue::PerChannel { step, min } => {
                    let vector = |x: &[f32]| L::load(&x[c + v * 8..][..8].as_chunks::<8>().0[0]);
                    let shifted = vector(min).fma(L::splat(total[r]), old);
                    vector(step).fma(acc[r][v], shifted).store(&mut o[v]);
                }
            }
        }
    }
}

levels! {
    fn weigh_k<const KIND: usize, const BYTES: usize, const ROWS: usize, const VECTORS: usize>(
        values: Strided<'_>, from: usize, to: usize, weights: &[f32], width: usize, end: Epilogue<'_>,
        out: &mut [f32], out_stride: usize,
    ) = weigh_body;
}

/// `out[row][channel] += sum over tokens from..to of weights[row][token] * value[token][channel]` for `width`
/// channels (a multiple of 16) and 1, 2 or 4 rows.
pub(super) fn weigh(
    isa: Isa,
    values: Strided<'_>,
    (from, to): (usize, usize),
    weights: &[f32],
    rows: usize,
    width: usize,
    end: Epilogue<'_>,
    out: &mut [f32],
    out_stride: usize,
) {
    let (v, w, d, o, s) = (values, weights, width, out, out_stride);
    match (v.kind, rows) {
        (load::F32, 4) => weigh_k::<32, 32, 4, 2>(isa, v, from, to, w, d, end, o, s),
        (load::F32, 2) => weigh_k::<32, 32, 2, 4>(isa, v, from, to, w, d, end, o, s),
        (load::F32, _) => weigh_k::<32, 32, 1, 8>(isa, v, from, to, w, d, end, o, s),
        (kind, 4) => {
            with_kind!(kind, |K, B| weigh_k::<K, B, 4, 2>(isa, v, from, to, w, d, end, o, s); packed)
        }
        (kind, _) => {
            with_kind!(kind, |K, B| weigh_k::<K, B, 1, 8>(isa, v, from, to, w, d, end, o, s); packed)
        }
    }
}

#[inline(always)]
fn expand_body<const KIND: usize, const BYTES: usize, L: Lanes>(
    bytes: &[u8],
    at: &[usize],
    width: usize,
    scale: Option<GroupSteps<'_>>,
    first: usize,
    out: &mut [f32],
) {
    let n = width / 8;
    for (t, (at, o)) in at.iter().zip(out.chunks_exact_mut(width)).enumerate() {
        let row = &bytes[*at..][..n * BYTES].as_chunks::<BYTES>().0[..n];
        let o = &mut o.as_chunks_mut::<8>().0[..n];
        match scale {
            None => row.iter().zip(o).for_each(|(b, o)| L::codes::<KIND, BYTES>(b).store(o)),
            Some(s) => {
                let steps = &s.steps[(first + t) * s.groups..][..s.groups];
                for ((row, o), step) in row.chunks(s.vectors).zip(o.chunks_mut(s.vectors)).zip(steps) {
                    let step = L::splat(*step);
                    row.iter().zip(o).for_each(|(b, o)| L::codes::<KIND, BYTES>(b).mul(step).store(o));
                }
            }
        }
    }
}

levels! {
    fn expand_k<const KIND: usize, const BYTES: usize>(
        bytes: &[u8], at: &[usize], width: usize, scale: Option<GroupSteps<'_>>, first: usize, out: &mut [f32],
    ) = expand_body;
}

/// Unpacks `width` elements (a multiple of 8) at each of the byte offsets `at` into `out[row][width]`. `scale` applies
/// to the rows as those of tokens `first` on.
pub(super) fn expand(
    isa: Isa,
    kind: usize,
    bytes: &[u8],
    at: &[usize],
    width: usize,
    scale: Option<GroupSteps<'_>>,
    first: usize,
    out: &mut [f32],
) {
    with_kind!(kind, |K, B| expand_k::<K, B>(isa, bytes, at, width, scale, first, out); all)
}

#[inline(always)]
fn pairs_body<L: Lanes>(bytes: &[u8], step: &mut [f32], min: &mut [f32]) {
    let (steps, mins) = (step.as_chunks_mut::<8>().0, min.as_chunks_mut::<8>().0);
    for ((b, s), m) in bytes.as_chunks::<32>().0.iter().zip(steps).zip(mins) {
        let (x, y) = L::pairs(b);
        x.store(s);
        y.store(m);
    }
}
levels! {
    /// Decodes pairs (4 bytes each, a multiple of 8 of them) to steps and mins.
    pub(super) fn pairs(bytes: &[u8], step: &mut [f32], min: &mut [f32]) = pairs_body;
}

#[inline(always)]
fn fold_some<const ROWS: usize, L: Lanes>(
    x: &[f32],
    step: &[f32],
    min: &[f32],
    out: &mut [f32],
    zero: &mut [f32],
) {
    let dim = step.len();
    let (step, min) = (step.as_chunks::<8>().0, min.as_chunks::<8>().0);
    let n = step.len();
    let min = &min[..n];
    let mut acc = [L::splat(0.0); ROWS];
    for v in 0..n {
        let (s, m) = (L::load(&step[v]), L::load(&min[v]));
        for (r, acc) in acc.iter_mut().enumerate() {
            let at = r * dim + v * 8;
            let x = L::load(&x[at..at + 8].as_chunks::<8>().0[0]);
            x.mul(s).store(&mut out[at..at + 8].as_chunks_mut::<8>().0[0]);
            *acc = x.fma(m, *acc);
        }
    }
    zero.iter_mut().zip(acc).for_each(|(z, a)| *z = a.sum());
}

#[inline(always)]
fn fold_body<L: Lanes>(x: &[f32], step: &[f32], min: &[f32], out: &mut [f32], zero: &mut [f32]) {
    let dim = step.len();
    let mut r = 0;
    while r < zero.len() {
        let (x, out, zero) = (&x[r * dim..], &mut out[r * dim..], &mut zero[r..]);
        match rows_at_once(zero.len()) {
            4 => fold_some::<4, L>(x, step, min, out, zero),
            2 => fold_some::<2, L>(x, step, min, out, zero),
            _ => fold_some::<1, L>(x, step, min, out, zero),
        }
        r += rows_at_once(zero.len());
    }
}
levels! {
    /// For every row of x (as many as `zero` has elements, each as long as `step`): `out = x * step` and
    /// `zero = sum(x * min)`. The length of a row is a multiple of 8.
    pub(super) fn fold(x: &[f32], step: &[f32], min: &[f32], out: &mut [f32], zero: &mut [f32]) = fold_body;
}

#[inline(always)]
fn total_body<L: Lanes>(x: &[f32]) -> f32 {
    let (chunks, rest) = x.as_chunks::<8>();
    let mut acc = L::splat(0.0);
    for c in chunks {
        acc = acc.add(L::load(c));
    }
    rest.iter().fold(acc.sum(), |sum, x| sum + x)
}
levels! {
    /// Sum of a slice.
    pub(super) fn total(x: &[f32]) -> f32 = total_body;
}

#[inline(always)]
fn inner_body<L: Lanes>(x: &[f32], y: &[f32]) -> f32 {
    let ((x, xr), (y, yr)) = (x.as_chunks::<8>(), y.as_chunks::<8>());
    let mut acc = L::splat(0.0);
    for (x, y) in x.iter().zip(y) {
        acc = L::load(x).fma(L::load(y), acc);
    }
    xr.iter().zip(yr).fold(acc.sum(), |sum, (x, y)| sum + x * y)
}
levels! {
    /// Inner product of two slices of one length.
    pub(super) fn inner(x: &[f32], y: &[f32]) -> f32 = inner_body;
}

#[inline(always)]
fn affine_body<L: Lanes>(x: &mut [f32; TILE], factor: &[f32; TILE], term: &[f32; TILE], weight: f32) {
    let (factor, term, weight) = (factor.as_chunks::<8>().0, term.as_chunks::<8>().0, L::splat(weight));
    for ((x, f), t) in x.as_chunks_mut::<8>().0.iter_mut().zip(factor).zip(term) {
        L::load(x).fma(L::load(f), L::load(t).mul(weight)).store(x);
    }
}
levels! {
    /// `x = x * factor + term * weight`, by token of a tile.
    pub(super) fn affine(x: &mut [f32; TILE], factor: &[f32; TILE], term: &[f32; TILE], weight: f32) = affine_body;
}

#[inline(always)]
fn add_scaled_body<L: Lanes>(x: &mut [f32], y: &[f32], weight: f32) {
    let weight = L::splat(weight);
    for (x, y) in x.as_chunks_mut::<8>().0.iter_mut().zip(y.as_chunks::<8>().0) {
        weight.fma(L::load(y), L::load(x)).store(x);
    }
}
levels! {
    /// `x += y * weight`; lengths are multiples of 8.
    pub(super) fn add_scaled(x: &mut [f32], y: &[f32], weight: f32) = add_scaled_body;
}

#[inline(always)]
fn multiply_body<L: Lanes>(x: &[f32], y: &[f32], out: &mut [f32]) {
    let (x, y) = (x.as_chunks::<8>().0, y.as_chunks::<8>().0);
    for ((x, y), o) in x.iter().zip(y).zip(out.as_chunks_mut::<8>().0) {
        L::load(x).mul(L::load(y)).store(o);
    }
}
levels! {
    /// `out = x * y`; lengths are multiples of 8.
    pub(super) fn multiply(x: &[f32], y: &[f32], out: &mut [f32]) = multiply_body;
}

#[inline(always)]
fn add_to_all_body<L: Lanes>(x: &mut [f32], y: f32) {
    x.as_chunks_mut::<8>().0.iter_mut().for_each(|x| L::load(x).add(L::splat(y)).store(x));
}
levels! {
    /// `x += y`; the length is a multiple of 8.
    pub(super) fn add_to_all(x: &mut [f32], y: f32) = add_to_all_body;
}

#[inline(always)]
fn scale_body<L: Lanes>(x: &mut [f32], factor: f32) {
    x.as_chunks_mut::<8>().0.iter_mut().for_each(|x| L::load(x).mul(L::splat(factor)).store(x));
}
levels! {
    /// `x *= factor`; the length is a multiple of 8.
    pub(super) fn scale(x: &mut [f32], factor: f32) = scale_body;
}

const _: () = assert!(TILE.is_multiple_of(8));
