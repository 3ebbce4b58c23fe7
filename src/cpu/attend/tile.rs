//! A tile in a page: scores from its keys, weighted sums of its values, without ever making it dense.

use super::kernels::{
    Epilogue, GroupSteps, Strided, add_scaled, add_to_all, affine, dot, expand, fold, inner, multiply, pairs,
    reads_packed, rows_at_once, total, weigh,
};
use super::workspace::{Row, Scratch};
use super::{Head, SLAB, SLICE, load};
use crate::format::{Affine, Axis, Format, Fp8Kind, Granularity};
use crate::layout::{OperandLayout, TILE};
use crate::quant::hadamard::rotate;
use crate::simd::Isa;

/// f32 rows `[row][dim]`.
pub(super) fn as_rows(data: &[f32], dim: usize) -> Strided<'_> {
    Strided { bytes: bytemuck::cast_slice(data), stride: dim * 4, kind: load::F32 }
}

/// Consecutive pieces `from..to` of a range; they end at multiples of a size.
pub(super) struct Slices {
    pub(super) from: usize,
    pub(super) to: usize,
}

impl Slices {
    pub(super) fn of(from: usize, to: usize, size: usize) -> impl Iterator<Item = Slices> {
        (from / size..to.div_ceil(size))
            .map(move |i| Slices { from: from.max(i * size), to: to.min((i + 1) * size) })
    }
}

/// Calls `f(first row, rows, (from, to))` for every run of tokens that 4, 2 or 1 neighbouring rows see: first what all
/// of them see, then what single rows see beside it. Only tokens of `mask` count.
pub(super) fn by_rows(rows: &[Row], mask: u64, mut f: impl FnMut(usize, usize, (usize, usize))) {
    let mut r = 0;
    while r < rows.len() {
        let n = rows_at_once(rows.len() - r);
        let common = rows[r..r + n].iter().fold(mask, |m, row| m & row.live);
        runs(common, |span| f(r, n, span));
        for (i, row) in rows[r..r + n].iter().enumerate() {
            runs(row.live & mask & !common, |span| f(r + i, 1, span));
        }
        r += n;
    }
}

/// Calls `f` for every run of set bits.
fn runs(mut mask: u64, mut f: impl FnMut((usize, usize))) {
    while mask != 0 {
        let from = mask.trailing_zeros() as usize;
        let n = (mask >> from).trailing_ones() as usize;
        f((from, from + n));
        mask &= !super::softmax::bits(from, from + n);
    }
}

/// The pages of a head.
#[derive(Debug)]
pub(super) struct Page<'a> {
    isa: Isa,
    head: &'a Head<'a>,
    key_dim: usize,
    value_dim: usize,
    /// Query rows.
    rows: usize,
}

impl<'a> Page<'a> {
    pub(super) fn new(isa: Isa, head: &'a Head<'a>, key_dim: usize, value_dim: usize, rows: usize) -> Self {
        Self { isa, head, key_dim, value_dim, rows }
    }

    fn bytes(&self, tile: usize) -> &'a [u8] {
        let n = self.head.layout.page_bytes;
        let page = self.head.blocks[tile] as usize * self.head.kv_heads + self.head.head;
        &self.head.pages[page * n..][..n]
    }

    /// Makes the query rows what the pages want: rotated like the keys, times their static scale; with their sums over
    /// groups and their product with the mean.
    pub(super) fn prepare(&self, scratch: &mut Scratch) {
        let dim = self.key_dim;
        let Scratch { q, paged, group_sums, rows, by_group, .. } = scratch;
        if let Some(mean) = self.head.mean {
            let m = &mut by_group[..dim];
            m.iter_mut().zip(mean).for_each(|(o, x)| *o = x.to_f32());
            for (r, row) in rows[..self.rows].iter_mut().enumerate() {
                row.mean = inner(self.isa, &q[r * dim..][..dim], m);
            }
        }
        let paged = &mut paged[..self.rows * dim];
        paged.copy_from_slice(&q[..self.rows * dim]);
        match self.head.key {
            Format::Affine(a) => {
                if let Some(block) = a.rotate {
                    paged.chunks_exact_mut(dim).for_each(|row| rotate(self.isa, row, block));
                }
                if a.axis == Axis::PerToken {
                    let sums = paged.chunks_exact(dim).flat_map(|row| row.chunks(a.group));
                    group_sums.iter_mut().zip(sums).for_each(|(s, x)| *s = total(self.isa, x));
                }
            }
            Format::Fp8(f) if f.granularity != Granularity::TokenHead => {
                super::kernels::scale(self.isa, paged, self.head.scales.0 * fp8_factor(f.kind));
            }
            _ => {}
        }
    }

    /// Rotates the output back where values are rotated.
    pub(super) fn finish(&self, scratch: &mut Scratch) {
        if let Some(block) = self.head.value.rotation() {
            let out = &mut scratch.out[..self.rows * self.value_dim];
            out.chunks_exact_mut(self.value_dim).for_each(|row| rotate(self.isa, row, block));
        }
    }

    /// Scores of tokens `from..to` for all rows.
    pub(super) fn scores(&self, scratch: &mut Scratch, tile: usize, range: (usize, usize)) {
        let (page, layout) = (self.bytes(tile), &self.head.layout.key);
        let codes = codes(page, layout, self.head.key);
        let pair_bytes = &page[layout.pairs..][..layout.pair_bytes];
        match self.head.key {
            Format::Affine(a) if a.axis == Axis::PerChannel => {
                self.scores_per_channel(scratch, a, codes, pair_bytes, range)
            }
            Format::Affine(a) => self.scores_per_token(scratch, a, codes, pair_bytes, range),
            Format::Fp8(f) if f.granularity == Granularity::TokenHead => {
                let Scratch { paged, scores, slice, by_group, .. } = scratch;
                self.dots(codes, range, paged, None, slice, scores);
                token_scales(pair_bytes, f.kind, by_group);
                let scales = &by_group.as_chunks::<TILE>().0[0];
                for row in scores.as_chunks_mut::<TILE>().0[..self.rows].iter_mut() {
                    affine(self.isa, row, scales, &[0.0; TILE], 0.0);
                }
            }
            _ => {
                let Scratch { paged, scores, slice, .. } = scratch;
                self.dots(codes, range, paged, None, slice, scores);
            }
        }
        if self.head.mean.is_some() {
            for (r, row) in scratch.rows[..self.rows].iter().enumerate() {
                add_to_all(self.isa, &mut scratch.scores[r * TILE..][..TILE], row.mean);
            }
        }
    }

    fn scores_per_token(
        &self,
        scratch: &mut Scratch,
        a: &Affine,
        codes: Strided<'_>,
        pair_bytes: &[u8],
        range: (usize, usize),
    ) {
        let Scratch { paged, scores, slice, step, min, by_group, group_sums, .. } = scratch;
        let groups = self.key_dim.div_ceil(a.group);
        let n = groups * TILE;
        pairs(self.isa, pair_bytes, &mut step[..n], &mut min[..n]);
        let scale = GroupSteps { steps: &step[..n], groups, vectors: a.group / 8 };
        self.dots(codes, range, paged, (groups > 1).then_some(scale), slice, scores);
        let tiles = &mut scores.as_chunks_mut::<TILE>().0[..self.rows];
        if groups == 1 {
            let (step, min) = (&step.as_chunks::<TILE>().0[0], &min.as_chunks::<TILE>().0[0]);
            for (s, sum) in tiles.iter_mut().zip(group_sums) {
                affine(self.isa, s, step, min, *sum);
            }
            return;
        }
        to_group_order(&min[..n], groups, by_group);
        for (s, sums) in tiles.iter_mut().zip(group_sums.chunks_exact(groups)) {
            for (min, sum) in by_group.chunks_exact(TILE).zip(sums) {
                add_scaled(self.isa, s, min, *sum);
            }
        }
    }

    fn scores_per_channel(
        &self,
        scratch: &mut Scratch,
        a: &Affine,
        codes: Strided<'_>,
        pair_bytes: &[u8],
        (from, to): (usize, usize),
    ) {
        let Scratch { paged, folded, scores, slice, step, min, .. } = scratch;
        let dim = self.key_dim;
        let (step, min) = (&mut step[..dim], &mut min[..dim]);
        for Slices { from, to } in Slices::of(from, to, a.group) {
            pairs(self.isa, &pair_bytes[from / a.group * dim * 4..][..dim * 4], step, min);
            let mut zero = [0f32; super::ROWS];
            fold(self.isa, paged, step, min, folded, &mut zero[..self.rows]);
            self.dots(codes, (from, to), folded, None, slice, scores);
            for (r, zero) in zero[..self.rows].iter().enumerate() {
                let row = &mut scores[r * TILE..][from..to];
                if row.len().is_multiple_of(8) {
                    add_to_all(self.isa, row, *zero);
                } else {
                    row.iter_mut().for_each(|s| *s += zero);
                }
            }
        }
    }

    /// `scores[row][token] = sum(q * codes)`.
    fn dots(
        &self,
        codes: Strided<'_>,
        (from, to): (usize, usize),
        q: &[f32],
        scale: Option<GroupSteps<'_>>,
        slice: &mut [f32],
        scores: &mut [f32],
    ) {
        let (rows, dim) = (self.rows, self.key_dim);
        if reads_packed(self.isa, rows) {
            return dot(self.isa, codes, (from, to), q, rows, dim, scale, scores);
        }
        for Slices { from, to } in Slices::of(from, to, SLICE) {
            let at: [usize; SLICE] = std::array::from_fn(|i| (from + i) * codes.stride);
            expand(self.isa, codes.kind, codes.bytes, &at[..to - from], dim, scale, from, slice);
            dot(self.isa, as_rows(slice, dim), (0, to - from), q, rows, dim, None, &mut scores[from..]);
        }
    }

    /// Adds the weighted values of tokens `from..to` to the output of all rows.
    pub(super) fn values(&self, scratch: &mut Scratch, tile: usize, range: (usize, usize)) {
        let (page, layout) = (self.bytes(tile), &self.head.layout.value);
        let codes = codes(page, layout, self.head.value);
        let pair_bytes = &page[layout.pairs..][..layout.pair_bytes];
        let dim = self.value_dim;
        match self.head.value {
            Format::Affine(a) if a.axis == Axis::PerChannel => {
                let Scratch { scores, slice, step, min, rows, out, .. } = scratch;
                let (step, min) = (&mut step[..dim], &mut min[..dim]);
                for Slices { from, to } in Slices::of(range.0, range.1, a.group) {
                    pairs(self.isa, &pair_bytes[from / a.group * dim * 4..][..dim * 4], step, min);
                    let end = Epilogue::PerChannel { step, min };
                    self.sums(codes, (from, to), (0, dim), scores, rows, end, slice, out);
                }
            }
            Format::Affine(a) => self.values_per_token(scratch, a, codes, pair_bytes, range),
            Format::Fp8(f) => {
                let Scratch { scores, slice, rows, out, weights, by_group, .. } = scratch;
                if f.granularity == Granularity::TokenHead {
                    token_scales(pair_bytes, f.kind, by_group);
                } else {
                    by_group[..TILE].fill(self.head.scales.1 * fp8_factor(f.kind));
                }
                for (w, p) in weights.chunks_exact_mut(TILE).zip(scores.chunks_exact(TILE)).take(self.rows) {
                    multiply(self.isa, p, &by_group[..TILE], w);
                }
                self.sums(codes, range, (0, dim), weights, rows, Epilogue::Add, slice, out);
            }
            _ => {
                let Scratch { scores, slice, rows, out, .. } = scratch;
                self.sums(codes, range, (0, dim), scores, rows, Epilogue::Add, slice, out);
            }
        }
    }

    fn values_per_token(
        &self,
        scratch: &mut Scratch,
        a: &Affine,
        codes: Strided<'_>,
        pair_bytes: &[u8],
        range: (usize, usize),
    ) {
        let Scratch { scores, slice, step, min, rows, out, weights, by_group, .. } = scratch;
        let dim = self.value_dim;
        let groups = dim.div_ceil(a.group);
        let n = groups * TILE;
        pairs(self.isa, pair_bytes, &mut step[..n], &mut min[..n]);
        // Both by group; the buffers of what was decoded are free for it one after the other.
        to_group_order(&step[..n], groups, by_group);
        to_group_order(&min[..n], groups, step);
        let (step, min) = (&by_group[..n], &step[..n]);
        for g in 0..groups {
            let (c, end) = (g * a.group, ((g + 1) * a.group).min(dim));
            let (step, min) = (&step[g * TILE..][..TILE], &min[g * TILE..][..TILE]);
            let mut zeros = [0f32; super::ROWS];
            fold(self.isa, scores, step, min, weights, &mut zeros[..self.rows]);
            for (r, row) in rows[..self.rows].iter().enumerate() {
                let mut zero = zeros[r];
                if row.live != u64::MAX {
                    let p = &scores[r * TILE..][..TILE];
                    zero = 0.0;
                    runs(row.live, |(from, to)| zero += inner(self.isa, &p[from..to], &min[from..to]));
                }
                add_to_all(self.isa, &mut out[r * dim + c..r * dim + end], zero);
            }
            self.sums(codes, range, (c, end), weights, rows, Epilogue::Add, slice, out);
        }
    }

    /// `out[row][channel] += sum over tokens of weights * codes` for channels `first..last`.
    #[allow(clippy::too_many_arguments)]
    fn sums(
        &self,
        codes: Strided<'_>,
        (from, to): (usize, usize),
        (first, last): (usize, usize),
        weights: &[f32],
        rows: &[Row],
        end: Epilogue<'_>,
        slice: &mut [f32],
        out: &mut [f32],
    ) {
        let (dim, rows) = (self.value_dim, &rows[..self.rows]);
        let mask = super::softmax::bits(from, to);
        let offset = |c: usize| c / 8 * load::bytes_of_eight(codes.kind);
        if reads_packed(self.isa, rows.len()) {
            let codes = Strided { bytes: &codes.bytes[offset(first)..], ..codes };
            return by_rows(rows, mask, |r, n, span| {
                let out = &mut out[r * dim + first..];
                weigh(self.isa, codes, span, &weights[r * TILE..], n, last - first, end, out, dim);
            });
        }
        for c in (first..last).step_by(SLAB) {
            let at: [usize; TILE] = std::array::from_fn(|t| t * codes.stride + offset(c));
            let piece = &mut slice[from * SLAB..];
            expand(self.isa, codes.kind, codes.bytes, &at[from..to], SLAB, None, 0, piece);
            let end = match end {
                Epilogue::Add => Epilogue::Add,
                Epilogue::PerChannel { step, min } => {
                    Epilogue::PerChannel { step: &step[c..], min: &min[c..] }
                }
            };
            let values = as_rows(slice, SLAB);
            by_rows(rows, mask, |r, n, span| {
                weigh(
                    self.isa,
                    values,
                    span,
                    &weights[r * TILE..],
                    n,
                    SLAB,
                    end,
                    &mut out[r * dim + c..],
                    dim,
                );
            });
        }
    }
}

/// The codes of an operand in a page.
fn codes<'a>(page: &'a [u8], layout: &OperandLayout, format: &Format) -> Strided<'a> {
    let kind = match format {
        Format::F16 => load::F16,
        Format::Bf16 => load::BF16,
        Format::Affine(a) => a.bits.get(),
        Format::Fp8(f) if f.kind == Fp8Kind::E4M3 => load::E4M3,
        Format::Fp8(_) => load::E5M2,
    };
    Strided { bytes: &page[layout.codes..], stride: layout.row_bytes, kind }
}

/// What kernels leave out when they unpack FP8.
fn fp8_factor(kind: Fp8Kind) -> f32 {
    load::factor(if kind == Fp8Kind::E4M3 { load::E4M3 } else { load::E5M2 })
}

/// The f32 scale of each token, times what kernels leave out.
fn token_scales(bytes: &[u8], kind: Fp8Kind, out: &mut [f32]) {
    for (b, o) in bytes.as_chunks::<4>().0.iter().zip(&mut out[..TILE]) {
        *o = f32::from_le_bytes(*b) * fp8_factor(kind);
    }
}

/// From `[token][group]` to `[group][token]`.
fn to_group_order(x: &[f32], groups: usize, out: &mut [f32]) {
    match groups {
        2 => to_group_order_of::<2>(x, out),
        4 => to_group_order_of::<4>(x, out),
        1 => out[..TILE].copy_from_slice(x),
        _ => {
            for (t, token) in x.chunks_exact(groups).enumerate() {
                token.iter().enumerate().for_each(|(g, x)| out[g * TILE + t] = *x);
            }
        }
    }
}

fn to_group_order_of<const GROUPS: usize>(x: &[f32], out: &mut [f32]) {
    for (g, row) in out.chunks_exact_mut(TILE).take(GROUPS).enumerate() {
        for (token, o) in x.as_chunks::<GROUPS>().0.iter().zip(row) {
            *o = token[g];
        }
    }
}
