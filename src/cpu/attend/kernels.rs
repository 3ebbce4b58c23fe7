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

use super::load::{self, load8, pairs8, with_kind};
use crate::layout::TILE;
use crate::simd::{Isa, dispatch, fma};

/// Sums of the lanes of eight vectors, by halves: lane `l` meets `l + 4`, then `l + 2`, then `l + 1`.
#[inline(always)]
fn sums(a: [[f32; 8]; 8]) -> [f32; 8] {
    let halves = |x: [f32; 8], y: [f32; 8]| -> [f32; 8] {
        [
            x[0] + x[4],
            x[1] + x[5],
            x[2] + x[6],
            x[3] + x[7],
            y[0] + y[4],
            y[1] + y[5],
            y[2] + y[6],
            y[3] + y[7],
        ]
    };
    let quarters = |x: [f32; 8], y: [f32; 8]| -> [f32; 8] {
        [
            x[0] + x[2],
            x[1] + x[3],
            y[0] + y[2],
            y[1] + y[3],
            x[4] + x[6],
            x[5] + x[7],
            y[4] + y[6],
            y[5] + y[7],
        ]
    };
    let eighths = |x: [f32; 8], y: [f32; 8]| -> [f32; 8] {
        [
            x[0] + x[1],
            x[2] + x[3],
            y[0] + y[1],
            y[2] + y[3],
            x[4] + x[5],
            x[6] + x[7],
            y[4] + y[5],
            y[6] + y[7],
        ]
    };
    let z = [halves(a[0], a[4]), halves(a[1], a[5]), halves(a[2], a[6]), halves(a[3], a[7])];
    let u = [quarters(z[0], z[2]), quarters(z[1], z[3])];
    let v = eighths(u[0], u[1]);
    [v[0], v[2], v[1], v[3], v[4], v[6], v[5], v[7]]
}

/// Sum of eight lanes in the same order.
#[inline(always)]
fn sum(x: [f32; 8]) -> f32 {
    ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]))
}

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

#[inline(always)]
fn dot_body<
    const KIND: usize,
    const BYTES: usize,
    const ROWS: usize,
    const TOKENS: usize,
    const SCALED: bool,
    const FMA: bool,
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
    let q: [&[[f32; 8]]; ROWS] = std::array::from_fn(|r| &q[r * dim..][..dim].as_chunks::<8>().0[..n]);
    let mut t = from;
    while t < to {
        let token: [usize; TOKENS] = std::array::from_fn(|i| (t + i).min(to - 1));
        let rows: [&[[u8; BYTES]]; TOKENS] = std::array::from_fn(|i| {
            &keys.bytes[token[i] * keys.stride..][..n * BYTES].as_chunks::<BYTES>().0[..n]
        });
        let mut acc = [[0f32; 8]; 8];
        if SCALED {
            let mut at = 0;
            for g in 0..scale.groups {
                let step: [f32; TOKENS] = std::array::from_fn(|i| scale.steps[token[i] * scale.groups + g]);
                let end = (at + scale.vectors).min(n);
                for v in at..end {
                    for i in 0..TOKENS {
                        let mut k = load8::<KIND, BYTES, FMA>(&rows[i][v]);
                        k.iter_mut().for_each(|x| *x *= step[i]);
                        for r in 0..ROWS {
                            for l in 0..8 {
                                acc[i * ROWS + r][l] = fma::<FMA>(k[l], q[r][v][l], acc[i * ROWS + r][l]);
                            }
                        }
                    }
                }
                at = end;
            }
        } else {
            for v in 0..n {
                for i in 0..TOKENS {
                    let k = load8::<KIND, BYTES, FMA>(&rows[i][v]);
                    for r in 0..ROWS {
                        for l in 0..8 {
                            acc[i * ROWS + r][l] = fma::<FMA>(k[l], q[r][v][l], acc[i * ROWS + r][l]);
                        }
                    }
                }
            }
        }
        let s = sums(acc);
        for i in 0..TOKENS.min(to - t) {
            for r in 0..ROWS {
                scores[r * TILE + t + i] = s[i * ROWS + r];
            }
        }
        t += TOKENS;
    }
}

/// As `dispatch!`, for kernels with many instances: lanes are eight wide, so AVX-512 machines run the AVX2 code; and
/// with `packed`, for kinds other than f32, there is no plain code (see [`reads_packed`]).
macro_rules! instances {
    ($name:ident, $packed:ident, <$($c:ident: $ct:ty),*>, ($($arg:ident: $ty:ty),* $(,)?), $body:ident) => {
        #[allow(clippy::too_many_arguments)]
        #[inline]
        fn $packed<$(const $c: $ct),*>($($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma,f16c,bmi2")]
                fn avx2<$(const $c: $ct),*>($($arg: $ty),*) { $body::<$($c,)* true>($($arg),*) }
                // SAFETY: callers have a level of `Isa::available` above plain, so the CPU has the features.
                unsafe { avx2::<$($c),*>($($arg),*) }
            }
            #[cfg(not(target_arch = "x86_64"))]
            $body::<$($c,)* false>($($arg),*)
        }
        #[allow(clippy::too_many_arguments)]
        #[inline]
        fn $name<$(const $c: $ct),*>(isa: Isa, $($arg: $ty),*) {
            if isa == Isa::Plain { $body::<$($c,)* false>($($arg),*) } else { $packed::<$($c),*>($($arg),*) }
        }
    };
}

instances!(
    dot_f32,
    dot_packed,
    <KIND: usize, BYTES: usize, ROWS: usize, TOKENS: usize, SCALED: bool>,
    (keys: Strided<'_>, from: usize, to: usize, q: &[f32], dim: usize, scale: GroupSteps<'_>, scores: &mut [f32]),
    dot_body
);

/// Whether [`dot`] and [`weigh`] read packed rows themselves for this many rows of q; else they want f32, made by
/// [`expand`]. More rows share what is unpacked, so a slice of f32 pays; other numbers are rare.
pub(super) fn reads_packed(isa: Isa, rows: usize) -> bool {
    isa != Isa::Plain && (rows == 4 || rows == 1)
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
                4 => dot_f32::<32, 32, 4, 2, false>(isa, k, from, to, q, dim, none, s),
                2 => dot_f32::<32, 32, 2, 4, false>(isa, k, from, to, q, dim, none, s),
                _ => dot_f32::<32, 32, 1, 8, false>(isa, k, from, to, q, dim, none, s),
            },
            (kind, None) => match n {
                4 => {
                    with_kind!(kind, |K, B| dot_packed::<K, B, 4, 2, false>(k, from, to, q, dim, none, s); packed)
                }
                _ => {
                    with_kind!(kind, |K, B| dot_packed::<K, B, 1, 8, false>(k, from, to, q, dim, none, s); packed)
                }
            },
            (kind, Some(g)) => match n {
                4 => {
                    with_kind!(kind, |K, B| dot_packed::<K, B, 4, 2, true>(k, from, to, q, dim, g, s); affine)
                }
                _ => {
                    with_kind!(kind, |K, B| dot_packed::<K, B, 1, 8, true>(k, from, to, q, dim, g, s); affine)
                }
            },
        }
        r += n;
    }
}

/// Rows the kernels take of `left`.
pub(super) const fn rows_at_once(left: usize) -> usize {
    match left {
        4.. => 4,
        2.. => 2,
        n => n,
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
fn weigh_body<
    const KIND: usize,
    const BYTES: usize,
    const ROWS: usize,
    const VECTORS: usize,
    const FMA: bool,
>(
    values: Strided<'_>,
    from: usize,
    to: usize,
    weights: &[f32],
    width: usize,
    end: Epilogue<'_>,
    out: &mut [f32],
    out_stride: usize,
) {
    let w: [&[f32]; ROWS] = std::array::from_fn(|r| &weights[r * TILE..][from..to]);
    let total: [f32; ROWS] = match end {
        Epilogue::Add => [0.0; ROWS],
        Epilogue::PerChannel { .. } => std::array::from_fn(|r| total_body::<FMA>(w[r])),
    };
    let mut c = 0;
    while c + VECTORS * 8 <= width {
        weigh_block::<KIND, BYTES, ROWS, VECTORS, FMA>(values, from, w, c, end, total, out, out_stride);
        c += VECTORS * 8;
    }
    while c < width {
        weigh_block::<KIND, BYTES, ROWS, 2, FMA>(values, from, w, c, end, total, out, out_stride);
        c += 16;
    }
}

/// `VECTORS * 8` channels from channel `c` on.
#[inline(always)]
fn weigh_block<
    const KIND: usize,
    const BYTES: usize,
    const ROWS: usize,
    const VECTORS: usize,
    const FMA: bool,
>(
    values: Strided<'_>,
    from: usize,
    w: [&[f32]; ROWS],
    c: usize,
    end: Epilogue<'_>,
    total: [f32; ROWS],
    out: &mut [f32],
    out_stride: usize,
) {
    let n = w[0].len();
    let w: [&[f32]; ROWS] = std::array::from_fn(|r| &w[r][..n]);
    let mut acc = [[[0f32; 8]; VECTORS]; ROWS];
    let mut at = from * values.stride + c / 8 * BYTES;
    for t in 0..n {
        let row: &[[u8; BYTES]; VECTORS] =
            match values.bytes[at..at + VECTORS * BYTES].as_chunks::<BYTES>().0.try_into() {
                Ok(row) => row,
                Err(_) => unreachable!("the slice has VECTORS chunks"),
            };
        for v in 0..VECTORS {
            let x = load8::<KIND, BYTES, FMA>(&row[v]);
            for r in 0..ROWS {
                for l in 0..8 {
                    acc[r][v][l] = fma::<FMA>(w[r][t], x[l], acc[r][v][l]);
                }
            }
        }
        at += values.stride;
    }
    for r in 0..ROWS {
        let o = &mut out[r * out_stride + c..][..VECTORS * 8];
        match end {
            Epilogue::Add => {
                for v in 0..VECTORS {
                    for l in 0..8 {
                        o[v * 8 + l] += acc[r][v][l];
                    }
                }
            }
            Epilogue::PerChannel { step, min } => {
                let (step, min) = (&step[c..][..VECTORS * 8], &min[c..][..VECTORS * 8]);
                for v in 0..VECTORS {
                    for l in 0..8 {
                        let i = v * 8 + l;
                        o[i] = fma::<FMA>(step[i], acc[r][v][l], fma::<FMA>(min[i], total[r], o[i]));
                    }
                }
            }
        }
    }
}

instances!(
    weigh_f32,
    weigh_packed,
    <KIND: usize, BYTES: usize, ROWS: usize, VECTORS: usize>,
    (
        values: Strided<'_>, from: usize, to: usize, weights: &[f32], width: usize, end: Epilogue<'_>,
        out: &mut [f32], out_stride: usize,
    ),
    weigh_body
);

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
        (load::F32, 4) => weigh_f32::<32, 32, 4, 2>(isa, v, from, to, w, d, end, o, s),
        (load::F32, 2) => weigh_f32::<32, 32, 2, 4>(isa, v, from, to, w, d, end, o, s),
        (load::F32, _) => weigh_f32::<32, 32, 1, 8>(isa, v, from, to, w, d, end, o, s),
        (kind, 4) => {
            with_kind!(kind, |K, B| weigh_packed::<K, B, 4, 2>(v, from, to, w, d, end, o, s); packed)
        }
        (kind, _) => {
            with_kind!(kind, |K, B| weigh_packed::<K, B, 1, 8>(v, from, to, w, d, end, o, s); packed)
        }
    }
}

#[inline(always)]
fn expand_body<const KIND: usize, const BYTES: usize, const FMA: bool>(
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
            None => (0..n).for_each(|v| o[v] = load8::<KIND, BYTES, FMA>(&row[v])),
            Some(s) => {
                for (g, step) in s.steps[(first + t) * s.groups..][..s.groups].iter().enumerate() {
                    for v in g * s.vectors..((g + 1) * s.vectors).min(n) {
                        let x = load8::<KIND, BYTES, FMA>(&row[v]);
                        o[v] = std::array::from_fn(|l| x[l] * step);
                    }
                }
            }
        }
    }
}

dispatch! {
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
fn pairs_body<const FMA: bool>(bytes: &[u8], step: &mut [f32], min: &mut [f32]) {
    let (steps, mins) = (step.as_chunks_mut::<8>().0, min.as_chunks_mut::<8>().0);
    for ((b, s), m) in bytes.as_chunks::<32>().0.iter().zip(steps).zip(mins) {
        (*s, *m) = pairs8::<FMA>(b);
    }
}
dispatch! {
    /// Decodes pairs (4 bytes each, a multiple of 8 of them) to steps and mins.
    pub(super) fn pairs(bytes: &[u8], step: &mut [f32], min: &mut [f32]) = pairs_body;
}

#[inline(always)]
fn fold_body<const FMA: bool>(q: &[f32], step: &[f32], min: &[f32], out: &mut [f32]) -> f32 {
    let mut zero = [0f32; 8];
    let (q, step, min) = (q.as_chunks::<8>().0, step.as_chunks::<8>().0, min.as_chunks::<8>().0);
    for (((q, s), m), o) in q.iter().zip(step).zip(min).zip(out.as_chunks_mut::<8>().0) {
        for l in 0..8 {
            o[l] = q[l] * s[l];
            zero[l] = fma::<FMA>(q[l], m[l], zero[l]);
        }
    }
    sum(zero)
}
dispatch! {
    /// `out = q * step` by channel; returns `sum(q * min)`.
    pub(super) fn fold(q: &[f32], step: &[f32], min: &[f32], out: &mut [f32]) -> f32 = fold_body;
}

#[inline(always)]
fn total_body<const FMA: bool>(x: &[f32]) -> f32 {
    let (chunks, rest) = x.as_chunks::<8>();
    let mut acc = [0f32; 8];
    for c in chunks {
        for l in 0..8 {
            acc[l] += c[l];
        }
    }
    rest.iter().zip(&mut acc).for_each(|(x, a)| *a += x);
    sum(acc)
}
dispatch! {
    /// Sum of a slice.
    pub(super) fn total(x: &[f32]) -> f32 = total_body;
}

#[inline(always)]
fn inner_body<const FMA: bool>(x: &[f32], y: &[f32]) -> f32 {
    let ((x, xr), (y, yr)) = (x.as_chunks::<8>(), y.as_chunks::<8>());
    let mut acc = [0f32; 8];
    for (x, y) in x.iter().zip(y) {
        for l in 0..8 {
            acc[l] = fma::<FMA>(x[l], y[l], acc[l]);
        }
    }
    xr.iter().zip(yr).zip(&mut acc).for_each(|((x, y), a)| *a = fma::<FMA>(*x, *y, *a));
    sum(acc)
}
dispatch! {
    /// Inner product of two slices of one length.
    pub(super) fn inner(x: &[f32], y: &[f32]) -> f32 = inner_body;
}

#[inline(always)]
fn affine_body<const FMA: bool>(x: &mut [f32; TILE], factor: &[f32; TILE], term: &[f32; TILE], weight: f32) {
    for i in 0..TILE {
        x[i] = fma::<FMA>(x[i], factor[i], term[i] * weight);
    }
}
dispatch! {
    /// `x = x * factor + term * weight`, by token of a tile.
    pub(super) fn affine(x: &mut [f32; TILE], factor: &[f32; TILE], term: &[f32; TILE], weight: f32) = affine_body;
}

#[inline(always)]
fn add_scaled_body<const FMA: bool>(x: &mut [f32], y: &[f32], weight: f32) {
    for (x, y) in x.iter_mut().zip(y) {
        *x = fma::<FMA>(*y, weight, *x);
    }
}
dispatch! {
    /// `x += y * weight`.
    pub(super) fn add_scaled(x: &mut [f32], y: &[f32], weight: f32) = add_scaled_body;
}

#[inline(always)]
fn multiply_body<const FMA: bool>(x: &[f32], y: &[f32], out: &mut [f32]) {
    for ((x, y), o) in x.iter().zip(y).zip(out) {
        *o = x * y;
    }
}
dispatch! {
    /// `out = x * y`.
    pub(super) fn multiply(x: &[f32], y: &[f32], out: &mut [f32]) = multiply_body;
}

#[inline(always)]
fn scale_body<const FMA: bool>(x: &mut [f32], factor: f32) {
    x.iter_mut().for_each(|x| *x *= factor);
}
dispatch! {
    /// `x *= factor`.
    pub(super) fn scale(x: &mut [f32], factor: f32) = scale_body;
}
