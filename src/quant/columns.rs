//! Per-channel groups: columns of a block of rows `[len][dim]`.

use crate::format::{Bits, Fit};
use crate::quant::affine::{MAX_GROUP, Pair, quantize_groups};
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

#[inline(always)]
fn decode_body<const FMA: bool>(row: &mut [f32], step: &[f32], min: &[f32]) {
    for ((x, s), m) in row.iter_mut().zip(step).zip(min) {
        *x = s * *x + m;
    }
}

dispatch! {
    /// `step * code + min` of a row of codes, a pair a channel.
    pub(crate) fn decode_row(row: &mut [f32], step: &[f32], min: &[f32]) = decode_body;
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
    let mut strip = [0f32; STRIP * MAX_GROUP];
    let mut strip_codes = [0u8; STRIP * MAX_GROUP];
    let mut clamped = 0;
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
