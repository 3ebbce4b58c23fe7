//! Per-channel groups: columns of a block of rows `[len][dim]`.

use crate::format::{Bits, Fit};
use crate::quant::affine::{self, LIMIT, MAGIC, MAX_GROUP, Pair, Range, quantize_groups};
use crate::quant::codes;
use crate::simd::{Isa, dispatch};

/// Channels that are transposed at a time: whole bytes of codes at every width.
const STRIP: usize = 16;

/// Where rows of packed codes go.
#[derive(Debug)]
pub(crate) struct Codes<'a> {
    /// Bits of a code.
    pub(crate) bits: usize,
    /// The bytes that hold the rows.
    pub(crate) bytes: &'a mut [u8],
    /// First byte of row 0.
    pub(crate) first: usize,
    /// Bytes between rows.
    pub(crate) stride: usize,
}

impl Codes<'_> {
    /// Packs codes of channels from `from` (a multiple of 8) of a row.
    #[inline(always)]
    fn put(&mut self, isa: Isa, row: usize, from: usize, row_codes: &[u8]) {
        let at = self.first + row * self.stride + from * self.bits / 8;
        let bytes = (row_codes.len() * self.bits).div_ceil(8);
        codes::pack_row(isa, self.bits, row_codes, &mut self.bytes[at..at + bytes]);
    }
}

/// Columns `[width][len]` of rows `[len][dim]`, from channel `from`.
#[inline(always)]
fn transpose_body<const FMA: bool>(x: &[f32], dim: usize, from: usize, len: usize, out: &mut [f32]) {
    let width = STRIP.min(dim - from);
    for t in 0..len {
        for (c, v) in x[t * dim + from..][..width].iter().enumerate() {
            out[c * len + t] = *v;
        }
    }
}

dispatch! { fn transpose(x: &[f32], dim: usize, from: usize, len: usize, out: &mut [f32]) = transpose_body; }

/// Channels whose ranges are found at a time by [`min_max`].
const BLOCK: usize = 64;

/// Channels that stay in registers while their range is found.
const LANES: usize = 8;

/// [`Fit::MinMax`] of channels `from..from + pairs.len()` without a transposition: ranges and codes a row at a time.
/// The same results as the path over groups. `codes` is `[len][BLOCK]`.
#[inline(always)]
fn min_max_body<const FMA: bool>(
    x: &mut [f32],
    dim: usize,
    from: usize,
    skip: usize,
    max: f32,
    pairs: &mut [Pair],
    codes: &mut [u8],
) -> usize {
    let width = pairs.len();
    let (mut lo, mut hi) = ([f32::INFINITY; BLOCK], [f32::NEG_INFINITY; BLOCK]);
    let mut top = [0u32; BLOCK];
    for c in (0..width).step_by(LANES) {
        let lanes = LANES.min(width - c);
        let (mut l, mut h, mut m) = ([f32::INFINITY; LANES], [f32::NEG_INFINITY; LANES], [0u32; LANES]);
        if lanes == LANES {
            for row in x.chunks_exact(dim).skip(skip) {
                let v = &row[from + c..from + c + LANES];
                for i in 0..LANES {
                    l[i] = if v[i] < l[i] { v[i] } else { l[i] };
                    h[i] = if v[i] > h[i] { v[i] } else { h[i] };
                    let a = v[i].to_bits() & 0x7fff_ffff;
                    m[i] = if a > m[i] { a } else { m[i] };
                }
            }
        } else {
            for row in x.chunks_exact(dim).skip(skip) {
                for (i, v) in row[from + c..from + width].iter().enumerate() {
                    l[i] = if *v < l[i] { *v } else { l[i] };
                    h[i] = if *v > h[i] { *v } else { h[i] };
                    m[i] = m[i].max(v.to_bits() & 0x7fff_ffff);
                }
            }
        }
        lo[c..c + lanes].copy_from_slice(&l[..lanes]);
        hi[c..c + lanes].copy_from_slice(&h[..lanes]);
        top[c..c + lanes].copy_from_slice(&m[..lanes]);
    }
    let mut clamped = 0;
    // What makes every code 0, whatever the element: a constant, NaN, nothing to fit.
    let (mut div, mut min) = ([f32::INFINITY; BLOCK], [0f32; BLOCK]);
    for (c, pair) in pairs.iter_mut().enumerate() {
        if top[c] > LIMIT.to_bits() && top[c] < f32::INFINITY.to_bits() {
            for v in x.iter_mut().skip(from + c).step_by(dim).skip(skip) {
                clamped += (v.abs() > LIMIT) as usize;
                *v = v.clamp(-LIMIT, LIMIT);
            }
            (lo[c], hi[c]) = (lo[c].clamp(-LIMIT, LIMIT), hi[c].clamp(-LIMIT, LIMIT));
        }
        // + 0.0 makes -0 a 0.
        let range = Range { lo: lo[c] + 0.0, hi: hi[c] + 0.0 };
        *pair = if top[c] >= f32::INFINITY.to_bits() {
            Pair::NAN
        } else if range.lo > range.hi {
            Pair::default()
        } else if range.lo == range.hi {
            affine::constant(range.lo)
        } else {
            let pair = affine::min_max(range, max);
            let (step, m) = pair.to_f32();
            (div[c], min[c]) = (affine::divisor(step), m);
            pair
        };
    }
    for (t, row) in x.chunks_exact(dim).enumerate() {
        let out = &mut codes[t * BLOCK..t * BLOCK + width];
        if t < skip {
            out.fill(0);
            continue;
        }
        for (((v, div), min), code) in row[from..from + width].iter().zip(&div).zip(&min).zip(out) {
            let t = (v - min) / div;
            let t = if t > 0.0 { t } else { 0.0 };
            let t = if t < max { t } else { max };
            *code = (t + MAGIC).to_bits() as u8;
        }
    }
    clamped
}

dispatch! {
    fn min_max(
        x: &mut [f32], dim: usize, from: usize, skip: usize, max: f32, pairs: &mut [Pair], codes: &mut [u8],
    ) -> usize = min_max_body;
}

/// Quantizes rows `x` = `[len][dim]` (`len` <= 256): one group a column. The first `skip` rows get code 0 and take no
/// part. `pairs` has `dim` elements. Returns how many elements were clamped.
#[allow(clippy::too_many_arguments)]
pub(crate) fn quantize(
    isa: Isa,
    x: &mut [f32],
    dim: usize,
    skip: usize,
    bits: Bits,
    fit: &Fit,
    pairs: &mut [Pair],
    out: &mut Codes<'_>,
) -> usize {
    let len = x.len() / dim;
    let mut clamped = 0;
    if let Fit::MinMax = fit {
        let mut codes = [0u8; BLOCK * MAX_GROUP];
        for (i, pairs) in pairs.chunks_mut(BLOCK).enumerate() {
            let from = i * BLOCK;
            clamped += min_max(isa, x, dim, from, skip, bits.max_code() as f32, pairs, &mut codes);
            for (t, row) in codes.chunks_exact(BLOCK).enumerate().take(len) {
                out.put(isa, t, from, &row[..pairs.len()]);
            }
        }
        return clamped;
    }
    let mut strip = [0f32; STRIP * MAX_GROUP];
    let mut strip_codes = [0u8; STRIP * MAX_GROUP];
    for from in (0..dim).step_by(STRIP) {
        let width = STRIP.min(dim - from);
        transpose(isa, x, dim, from, len, &mut strip);
        let used = width * len;
        let (x, codes) = (&mut strip[..used], &mut strip_codes[..used]);
        clamped += quantize_groups(isa, x, len, skip, bits, fit, codes, &mut pairs[from..from + width]);
        for t in 0..len {
            let row: [u8; STRIP] = std::array::from_fn(|c| strip_codes[c * len + t]);
            out.put(isa, t, from, &row[..width]);
        }
    }
    clamped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_at_a_time_give_what_groups_give() {
        let mut seed = 11u32;
        let mut next = || {
            seed = seed.wrapping_mul(1664525).wrapping_add(1013904223);
            (seed >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        for (dim, len, skip) in [(80usize, 64usize, 4usize), (128, 32, 0), (7, 5, 1), (130, 2, 0), (9, 3, 3)]
        {
            let mut x: Vec<f32> = (0..dim * len).map(|_| next() * 5.0).collect();
            x[skip.min(len - 1) * dim + 1] = f32::NAN;
            x[(len - 1) * dim + 2] = f32::NEG_INFINITY;
            x[(len - 1) * dim + 3] = -1e20;
            for t in 0..len {
                (x[t * dim + 4], x[t * dim + 5]) = (-0.3, if t % 2 == 0 { 0.0 } else { -0.0 });
            }
            for bits in Bits::ALL {
                for &isa in Isa::available() {
                    let stride = (dim * bits.get()).div_ceil(8);
                    let mut bytes = vec![0u8; stride * len];
                    let mut pairs = vec![Pair::default(); dim];
                    let mut out = Codes { bits: bits.get(), bytes: &mut bytes, first: 0, stride };
                    let n =
                        quantize(isa, &mut x.clone(), dim, skip, bits, &Fit::MinMax, &mut pairs, &mut out);
                    let mut clamped = 0;
                    for c in 0..dim {
                        let mut column: Vec<f32> = (0..len).map(|t| x[t * dim + c]).collect();
                        let mut codes = vec![0u8; len];
                        let (pair, k) =
                            affine::quantize_group(isa, &mut column, skip, bits, &Fit::MinMax, &mut codes);
                        clamped += k;
                        assert_eq!(pair.to_bits(), pairs[c].to_bits(), "{dim} {len} {bits:?} channel {c}");
                        for (t, code) in codes.iter().enumerate() {
                            let mut row = vec![0u8; dim];
                            codes::unpack_u8(isa, bits.get(), &bytes[t * stride..][..stride], &mut row);
                            assert_eq!(row[c], *code, "{dim} {len} {bits:?} token {t} channel {c}");
                        }
                    }
                    assert_eq!(n, clamped);
                }
            }
        }
    }
}
