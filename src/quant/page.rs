//! Encodes and decodes one operand of one page in row order: codes `[token][channel]`, pairs `[token][group]` or
//! `[token group][channel]` as little-endian words (step low, min high), or one f32 scale a token.
//!
//! Nothing here allocates.

use crate::format::{Affine, Axis, Format, Fp8, Granularity};
use crate::layout::{OperandLayout, TILE};
use crate::quant::affine::{LIMIT, Pair, quantize_groups};
use crate::quant::{codes, columns, fp8, hadamard};
use crate::simd::Isa;
use half::{bf16, f16};
use std::ops::Range;

/// The most channels of a head in a cache.
pub(crate) const MAX_DIM: usize = 512;

/// The most per-token groups of a head: a cache's groups have 16 channels (the smallest head) or more.
const MAX_GROUPS: usize = MAX_DIM / 16;

fn put_word(section: &mut [u8], index: usize, word: u32) {
    section[4 * index..4 * index + 4].copy_from_slice(&word.to_le_bytes());
}

fn word(section: &[u8], index: usize) -> u32 {
    let at = 4 * index;
    u32::from_le_bytes([section[at], section[at + 1], section[at + 2], section[at + 3]])
}

/// Clamps the finite elements beyond ±65504 and counts them.
pub(crate) fn clamp_finite(x: &mut [f32]) -> usize {
    let mut clamped = 0;
    for v in x {
        if v.abs() > LIMIT && v.is_finite() {
            *v = LIMIT.copysign(*v);
            clamped += 1;
        }
    }
    clamped
}

/// Subtracts the mean and rotates one row. Finite values beyond ±65504 are clamped before, so that a finite row
/// stays finite.
fn transform(isa: Isa, row: &mut [f32], rotate: Option<usize>, mean: Option<&[f16]>) -> usize {
    if rotate.is_none() && mean.is_none() {
        return 0;
    }
    let clamped = clamp_finite(row);
    if let Some(mean) = mean {
        for (x, m) in row.iter_mut().zip(mean) {
            *x -= m.to_f32();
        }
    }
    if let Some(block) = rotate {
        hadamard::rotate(isa, row, block);
    }
    clamped
}

/// One token's row of per-token groups: codes and pairs.
fn encode_affine_row(
    isa: Isa,
    a: &Affine,
    at: &OperandLayout,
    token: usize,
    row: &mut [f32],
    page: &mut [u8],
) -> usize {
    let mut buffer = [0u8; MAX_DIM];
    let row_codes = &mut buffer[..at.dim];
    let groups = at.dim.div_ceil(a.group);
    let mut pairs = [Pair::default(); MAX_GROUPS];
    let pairs = &mut pairs[..groups];
    let clamped = quantize_groups(isa, row, a.group, 0, a.bits, &a.fit, row_codes, pairs);
    for (j, pair) in pairs.iter().enumerate() {
        put_word(&mut page[at.pairs..], token * groups + j, pair.to_bits());
    }
    codes::pack_row(
        isa,
        a.bits.get(),
        row_codes,
        &mut page[at.codes + token * at.row_bytes..][..at.row_bytes],
    );
    clamped
}

/// A tile of per-channel groups.
fn encode_affine_columns(
    isa: Isa,
    a: &Affine,
    at: &OperandLayout,
    x: &mut [f32],
    skip: usize,
    page: &mut [u8],
) -> usize {
    let mut pairs = [Pair::default(); MAX_DIM];
    let mut clamped = 0;
    for (g, rows) in x.chunks_mut(a.group * at.dim).enumerate() {
        let start = g * a.group;
        let pairs = &mut pairs[..at.dim];
        let mut out = columns::Codes {
            bits: a.bits.get(),
            bytes: &mut *page,
            first: at.codes + start * at.row_bytes,
            stride: at.row_bytes,
        };
        let skip = skip.saturating_sub(start).min(a.group);
        clamped += columns::quantize(isa, rows, at.dim, skip, a.bits, &a.fit, pairs, &mut out);
        for (c, pair) in pairs.iter().enumerate() {
            put_word(&mut page[at.pairs..], g * at.dim + c, pair.to_bits());
        }
    }
    clamped
}

/// One token's row of a 16-bit format.
fn encode_half_row(format: &Format, row: &mut [f32], bytes: &mut [u8]) -> usize {
    let clamped = if matches!(format, Format::F16) { clamp_finite(row) } else { 0 };
    for (x, b) in row.iter().zip(bytes.chunks_exact_mut(2)) {
        let bits = match format {
            Format::F16 => f16::from_f32(*x).to_bits(),
            _ => bf16::from_f32(*x).to_bits(),
        };
        b.copy_from_slice(&bits.to_le_bytes());
    }
    clamped
}

/// One token's row of FP8 bytes, and its scale where the page holds it.
fn encode_fp8_row(
    isa: Isa,
    f: &Fp8,
    at: &OperandLayout,
    token: usize,
    row: &[f32],
    scale: f32,
    page: &mut [u8],
) -> usize {
    let scale = match f.granularity {
        Granularity::TokenHead => {
            let scale = fp8::token_head_scale(f.kind, row);
            put_word(&mut page[at.pairs..], token, scale.to_bits());
            scale
        }
        _ => scale,
    };
    fp8::encode_row(isa, f.kind, scale, row, &mut page[at.codes + token * at.row_bytes..][..at.row_bytes]);
    fp8::saturated(f.kind, scale, row)
}

/// Encodes one token into its slot of a page: per-token formats only ([`Format::is_per_token`]). `x` has `dim`
/// elements and is changed. `scale` counts for FP8 with a static scale. Returns how many elements were clamped.
pub(crate) fn encode_token(
    isa: Isa,
    format: &Format,
    at: &OperandLayout,
    token: usize,
    x: &mut [f32],
    scale: f32,
    page: &mut [u8],
) -> usize {
    encode_row(isa, format, at, token, x, None, scale, page)
}

fn encode_row(
    isa: Isa,
    format: &Format,
    at: &OperandLayout,
    token: usize,
    x: &mut [f32],
    mean: Option<&[f16]>,
    scale: f32,
    page: &mut [u8],
) -> usize {
    debug_assert_eq!(x.len(), at.dim);
    match format {
        Format::F16 | Format::Bf16 => {
            let first = at.codes + token * at.row_bytes;
            encode_half_row(format, x, &mut page[first..first + at.row_bytes])
        }
        Format::Affine(a) => {
            transform(isa, x, a.rotate, mean) + encode_affine_row(isa, a, at, token, x, page)
        }
        Format::Fp8(f) => encode_fp8_row(isa, f, at, token, x, scale, page),
    }
}

/// Encodes a tile: `x` is `[64][dim]`, token-major, and is changed. The first `skip` tokens (sinks) get code 0
/// and take no part in any pair; per token, theirs is (0, 0) and an FP8 scale is 0. `mean` is subtracted before
/// the rotation. `scale` counts for FP8 with a static scale. Returns how many elements were clamped.
#[allow(clippy::too_many_arguments)]
pub(crate) fn encode_tile(
    isa: Isa,
    format: &Format,
    at: &OperandLayout,
    x: &mut [f32],
    skip: usize,
    mean: Option<&[f16]>,
    scale: f32,
    page: &mut [u8],
) -> usize {
    debug_assert_eq!(x.len(), TILE * at.dim);
    let skip = skip.min(TILE);
    // Padding after the rows (V rows of 1, 2 and 3 bits) is 0.
    page[at.codes + TILE * at.row_bytes..at.codes + at.code_bytes].fill(0);
    if let Format::Affine(a) = format
        && a.axis == Axis::PerChannel
    {
        let mut clamped = 0;
        for row in x[skip * at.dim..].chunks_exact_mut(at.dim) {
            clamped += transform(isa, row, a.rotate, mean);
        }
        return clamped + encode_affine_columns(isa, a, at, x, skip, page);
    }
    page[at.codes..at.codes + skip * at.row_bytes].fill(0);
    let skipped_pairs = at.pair_bytes / TILE * skip;
    page[at.pairs..at.pairs + skipped_pairs].fill(0);
    let mut clamped = 0;
    for (t, row) in x.chunks_exact_mut(at.dim).enumerate().skip(skip) {
        clamped += encode_row(isa, format, at, t, row, mean, scale, page);
    }
    clamped
}

/// Decodes tokens of a tile as the model sees them: decoded, un-rotated, the mean added back. `out` is
/// `[tokens][dim]`. Sinks decode as their codes say (0 per token); their exact rows are kept elsewhere.
pub(crate) fn decode_rows(
    isa: Isa,
    format: &Format,
    at: &OperandLayout,
    page: &[u8],
    tokens: Range<usize>,
    scale: f32,
    mean: Option<&[f16]>,
    out: &mut [f32],
) {
    debug_assert_eq!(out.len(), tokens.len() * at.dim);
    let pairs = &page[at.pairs..at.pairs + at.pair_bytes];
    let row = |t: usize| &page[at.codes + t * at.row_bytes..][..at.row_bytes];
    match format {
        Format::F16 | Format::Bf16 => {
            for (t, out) in tokens.zip(out.chunks_exact_mut(at.dim)) {
                for (b, o) in row(t).chunks_exact(2).zip(out) {
                    let bits = u16::from_le_bytes([b[0], b[1]]);
                    *o = match format {
                        Format::F16 => f16::from_bits(bits).to_f32(),
                        _ => bf16::from_bits(bits).to_f32(),
                    };
                }
            }
        }
        Format::Fp8(f) => {
            for (t, out) in tokens.zip(out.chunks_exact_mut(at.dim)) {
                let scale = match f.granularity {
                    Granularity::TokenHead => f32::from_bits(word(pairs, t)),
                    _ => scale,
                };
                fp8::decode_row(isa, f.kind, scale, row(t), out);
            }
        }
        Format::Affine(a) => {
            decode_affine(isa, a, at, page, tokens, out);
            for out in out.chunks_exact_mut(at.dim) {
                if let Some(block) = a.rotate {
                    hadamard::rotate(isa, out, block);
                }
                if let Some(mean) = mean {
                    for (o, m) in out.iter_mut().zip(mean) {
                        *o += m.to_f32();
                    }
                }
            }
        }
    }
}

/// `step * code + min` of some tokens of a tile.
fn decode_affine(
    isa: Isa,
    a: &Affine,
    at: &OperandLayout,
    page: &[u8],
    tokens: Range<usize>,
    out: &mut [f32],
) {
    let pairs = &page[at.pairs..at.pairs + at.pair_bytes];
    let groups = at.dim.div_ceil(a.group);
    let (mut step, mut min) = ([0f32; MAX_DIM], [0f32; MAX_DIM]);
    let mut of_row = [(0f32, 0f32); MAX_GROUPS];
    let mut held = usize::MAX;
    let bits = a.bits.get();
    for (t, out) in tokens.zip(out.chunks_exact_mut(at.dim)) {
        let row = &page[at.codes + t * at.row_bytes..][..at.row_bytes];
        match a.axis {
            Axis::PerToken => {
                for (j, pair) in of_row[..groups].iter_mut().enumerate() {
                    *pair = Pair::from_bits(word(pairs, t * groups + j)).to_f32();
                }
                codes::decode_groups(isa, bits, row, a.group, &of_row[..groups], out);
            }
            Axis::PerChannel => {
                let g = t / a.group;
                if g != held {
                    held = g;
                    for c in 0..at.dim {
                        (step[c], min[c]) = Pair::from_bits(word(pairs, g * at.dim + c)).to_f32();
                    }
                }
                codes::decode_channels(isa, bits, row, &step[..at.dim], &min[..at.dim], out);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{Bits, Fit};
    use crate::layout::PageLayout;

    /// Deterministic values with a few large channels.
    fn tile(dim: usize, seed: u32) -> Vec<f32> {
        let mut s = seed;
        (0..TILE * dim)
            .map(|i| {
                let mut u = 0.0;
                for _ in 0..4 {
                    s = s.wrapping_mul(1664525).wrapping_add(1013904223);
                    u += (s >> 8) as f32 / (1 << 24) as f32 - 0.5;
                }
                u * if i % dim % 17 == 3 { 8.0 } else { 1.0 } + (i % dim) as f32 * 0.01
            })
            .collect()
    }

    fn formats(dim: usize) -> Vec<Format> {
        let mut all = vec![Format::F16, Format::Bf16];
        for g in [Granularity::Tensor, Granularity::Head, Granularity::TokenHead] {
            all.extend([Format::Fp8(Fp8::e4m3(g)), Format::Fp8(Fp8::e5m2(g))]);
        }
        for bits in Bits::ALL {
            for fit in [Fit::MinMax, Fit::ErrorOptimal, Fit::HQQ] {
                for group in [32, dim] {
                    let a = Affine::per_token(bits, group).with_fit(fit);
                    all.push(a.into());
                    all.push(a.with_center().into());
                    if dim.is_multiple_of(32) {
                        all.push(a.with_rotation(32).with_center().into());
                    }
                }
                all.push(Affine::per_channel(bits, 32).with_fit(fit).into());
                all.push(Affine::per_channel(bits, 64).with_fit(fit).into());
            }
        }
        all
    }

    /// The largest error a format may make on the test data (|x| < 22).
    fn bound(f: &Format) -> f32 {
        match f {
            Format::F16 => 0.01,
            Format::Bf16 => 0.1,
            Format::Fp8(p) => 22.0 / if p.kind == crate::Fp8Kind::E4M3 { 16.0 } else { 8.0 },
            Format::Affine(a) => match a.bits {
                Bits::B8 => 0.3,
                Bits::B4 => 3.0,
                _ => 30.0,
            },
        }
    }

    #[test]
    fn a_tile_decodes_to_itself_within_its_format_and_the_same_on_every_level() {
        for dim in [80usize, 128] {
            let mean: Vec<f16> = (0..dim).map(|c| f16::from_f32(c as f32 * 0.01)).collect();
            for format in formats(dim) {
                let layout = PageLayout::new(&format, &format, dim, dim);
                for (at, skip) in [(layout.key, 4), (layout.value, 0)] {
                    let x = tile(dim, 3);
                    let mean = format.centered().then_some(&mean[..]);
                    let mut pages: Vec<Vec<u8>> = Vec::new();
                    for &isa in Isa::available() {
                        let mut page = vec![0xa5u8; layout.page_bytes];
                        let n = encode_tile(isa, &format, &at, &mut x.clone(), skip, mean, 0.05, &mut page);
                        assert_eq!(n, 0, "{format:?}");
                        let mut out = vec![0f32; TILE * dim];
                        decode_rows(isa, &format, &at, &page, 0..TILE, 0.05, mean, &mut out);
                        for (i, (a, b)) in x.iter().zip(&out).enumerate().skip(skip * dim) {
                            assert!((a - b).abs() <= bound(&format), "{format:?} {i}: {a} {b}");
                        }
                        let mut some = vec![0f32; 5 * dim];
                        decode_rows(isa, &format, &at, &page, 31..36, 0.05, mean, &mut some);
                        assert_eq!(some, out[31 * dim..36 * dim], "{format:?}");
                        pages.push(page);
                    }
                    assert!(pages.iter().all(|p| *p == pages[0]), "{format:?}");
                }
            }
        }
    }

    #[test]
    fn single_tokens_write_what_a_tile_writes() {
        let dim = 96;
        for format in formats(dim).into_iter().filter(|f| f.is_per_token()) {
            let layout = PageLayout::new(&format, &format, dim, dim);
            let isa = Isa::detect();
            let mut x = tile(dim, 9);
            let (mut a, mut b) = (vec![0u8; layout.page_bytes], vec![0u8; layout.page_bytes]);
            for (t, row) in x.clone().chunks_exact_mut(dim).enumerate().rev() {
                encode_token(isa, &format, &layout.value, t, row, 0.25, &mut a);
            }
            encode_tile(isa, &format, &layout.value, &mut x, 0, None, 0.25, &mut b);
            assert!(a == b, "{format:?}");
        }
    }

    #[test]
    fn sinks_leave_no_trace_and_nan_stays_in_its_group() {
        let dim = 64;
        for format in formats(dim) {
            let layout = PageLayout::new(&format, &format, dim, dim);
            let (isa, at) = (Isa::detect(), layout.key);
            let mean = vec![f16::ZERO; dim];
            let mean = format.centered().then_some(&mean[..]);
            let mut x = tile(dim, 5);
            let mut page = vec![0u8; layout.page_bytes];
            encode_tile(isa, &format, &at, &mut x.clone(), 4, mean, 1.0, &mut page);
            x[..4 * dim].fill(f32::NAN);
            let mut again = vec![0u8; layout.page_bytes];
            encode_tile(isa, &format, &at, &mut x.clone(), 4, mean, 1.0, &mut again);
            assert!(page == again, "{format:?}");
            x[40 * dim + 7] = f32::INFINITY;
            x[41 * dim + 40] = f32::NAN;
            encode_tile(isa, &format, &at, &mut x.clone(), 4, mean, 1.0, &mut again);
            let (mut clean, mut hurt) = (vec![0f32; TILE * dim], vec![0f32; TILE * dim]);
            decode_rows(isa, &format, &at, &page, 0..TILE, 1.0, mean, &mut clean);
            decode_rows(isa, &format, &at, &again, 0..TILE, 1.0, mean, &mut hurt);
            for t in 4..TILE {
                for c in 0..dim {
                    let (a, b) = (clean[t * dim + c], hurt[t * dim + c]);
                    let hit = match &format {
                        Format::Affine(f) if f.axis == Axis::PerChannel => {
                            (c == 7 || c == 40) && t / f.group == 40 / f.group
                        }
                        Format::Affine(f) => {
                            (t == 40 && c / f.group == 7 / f.group)
                                || (t == 41 && c / f.group == 40 / f.group)
                        }
                        _ => (t, c) == (40, 7) || (t, c) == (41, 40),
                    };
                    // FP8 saturates infinity, and a 16-bit format keeps it.
                    let defined = if (t, c) == (40, 7) && format.as_affine().is_none() {
                        !b.is_nan()
                    } else {
                        b.is_nan()
                    };
                    assert!(
                        if hit { defined } else { a.to_bits() == b.to_bits() },
                        "{format:?} {t} {c}: {a} {b}"
                    );
                }
            }
        }
    }

    #[test]
    fn values_beyond_f16_are_clamped_and_counted() {
        let dim = 64;
        for format in formats(dim).into_iter().filter(|f| !matches!(f, Format::Bf16 | Format::Fp8(_))) {
            let layout = PageLayout::new(&format, &format, dim, dim);
            let isa = Isa::detect();
            let mut x = tile(dim, 5);
            (x[100], x[2000]) = (1e30, -70000.0);
            let mean = vec![f16::ZERO; dim];
            let mean = format.centered().then_some(&mean[..]);
            let mut page = vec![0u8; layout.page_bytes];
            let n = encode_tile(isa, &format, &layout.key, &mut x, 0, mean, 1.0, &mut page);
            assert!(n >= 2, "{format:?} {n}");
            let mut out = vec![0f32; TILE * dim];
            decode_rows(isa, &format, &layout.key, &page, 0..TILE, 1.0, mean, &mut out);
            assert!(out.iter().all(|x| x.is_finite()), "{format:?}");
        }
    }
}
