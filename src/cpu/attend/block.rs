//! One work item: some query rows of one kv head over a range of tokens.
//!
//! Pages come first; their output is rotated back where values are rotated, then exact rows join: sinks, window, new
//! tokens.

use super::kernels::{dot, scale, weigh};
use super::source::Source;
use super::tile::{Page, Slices, as_rows, by_rows};
use super::workspace::{Row, Scratch};
use super::{Head, ROWS, SLAB, SLICE, softmax};
use crate::config::AttendParams;
use crate::layout::TILE;
use crate::simd::Isa;
use crate::tensor::TensorRef;
use std::ops::Range;

/// A work item.
#[derive(Debug)]
pub(super) struct Item<'a> {
    pub(super) isa: Isa,
    pub(super) head: &'a Head<'a>,
    pub(super) q: &'a TensorRef<'a>,
    /// Row of the sequence's first query in `q`.
    pub(super) first_row: usize,
    /// Queries of the sequence.
    pub(super) queries: usize,
    /// Query heads of the kv head.
    pub(super) group: usize,
    /// Rows of this item, counted as `query * group + head in the group`.
    pub(super) flat: Range<usize>,
    /// Tokens of this item.
    pub(super) tokens: Range<usize>,
    pub(super) params: &'a AttendParams<'a>,
    pub(super) sliding_window: Option<usize>,
    pub(super) value_dim: usize,
}

impl Item<'_> {
    /// Leaves max, sum and unnormalized output of every row in the scratch.
    pub(super) fn run(&self, scratch: &mut Scratch) {
        let rows = self.flat.len();
        scratch.out[..rows * self.value_dim].fill(0.0);
        self.read_queries(scratch);
        let head = self.head;
        let pages = head.sinks.min(head.packed).max(head.first)..head.packed;
        if self.sees(scratch, &pages) {
            let page = Page::new(self.isa, head, self.key_dim(), self.value_dim, rows);
            page.prepare(scratch);
            for tile in self.tiles(scratch, &pages) {
                if let Some(range) = self.enter(scratch, &pages, tile) {
                    page.scores(scratch, tile, range);
                    self.weights(scratch, range);
                    page.values(scratch, tile, range);
                }
            }
            page.finish(scratch);
        }
        let sinks = head.first..head.sinks.min(head.len);
        let (k, v) = head.sink_rows;
        self.exact(scratch, sinks, Source::Ring(k, self.key_dim()), Source::Ring(v, self.value_dim));
        let window = head.packed.max(head.sinks).max(head.first)..head.len;
        let (k, v) = head.window;
        self.exact(scratch, window, Source::Ring(k, self.key_dim()), Source::Ring(v, self.value_dim));
        if let Some((k, v, row, count)) = head.fresh {
            let from = |tensor| Source::Tensor { tensor, start: head.len, row, head: head.head };
            self.exact(scratch, head.len..head.len + count, from(k), from(v));
        }
    }

    fn key_dim(&self) -> usize {
        self.q.dims()[2]
    }

    /// Reads and scales the query rows, and finds which tokens each sees.
    fn read_queries(&self, scratch: &mut Scratch) {
        let dim = self.key_dim();
        let factor = self.params.scale.unwrap_or(1.0 / (dim as f32).sqrt());
        let total = self.head.total();
        for (r, flat) in self.flat.clone().enumerate() {
            let (query, head) = (flat / self.group, self.head.head * self.group + flat % self.group);
            let q = &mut scratch.q[r * dim..][..dim];
            self.q.read_row(self.first_row + query, head, q);
            scale(self.isa, q, factor);
            let (from, to) =
                visible(query, self.queries, total, self.sliding_window, self.params.bidirectional);
            scratch.rows[r] = Row {
                from: from.max(self.tokens.start).max(self.head.first),
                to: to.min(self.tokens.end),
                max: f32::NEG_INFINITY,
                ..Row::default()
            };
        }
    }

    /// Whether any row sees a token of a range.
    fn sees(&self, scratch: &Scratch, range: &Range<usize>) -> bool {
        !self.tiles(scratch, range).is_empty()
    }

    /// Tiles of a range that lie between the first and the last token that the rows see.
    fn tiles(&self, scratch: &Scratch, range: &Range<usize>) -> Range<usize> {
        let rows = &scratch.rows[..self.flat.len()];
        let seen = || rows.iter().filter(|r| r.from < r.to);
        let from = seen().map(|r| r.from).min().unwrap_or(0).max(range.start);
        let to = seen().map(|r| r.to).max().unwrap_or(0).min(range.end);
        if from < to { from / TILE..to.div_ceil(TILE) } else { 0..0 }
    }

    /// Notes which tokens of a tile each row sees; the range of them all, if any.
    fn enter(&self, scratch: &mut Scratch, range: &Range<usize>, tile: usize) -> Option<(usize, usize)> {
        let start = tile * TILE;
        let inside = |t: usize| t.clamp(start, start + TILE) - start;
        let (mut from, mut to) = (TILE, 0);
        for row in &mut scratch.rows[..self.flat.len()] {
            row.here = (inside(row.from.max(range.start)), inside(row.to.min(range.end)));
            if row.here.0 < row.here.1 {
                (from, to) = (from.min(row.here.0), to.max(row.here.1));
            } else {
                row.here = (0, 0);
            }
        }
        (from < to).then_some((from, to))
    }

    /// Turns scores into weights and brings what was summed so far to the new maximum.
    fn weights(&self, scratch: &mut Scratch, (from, to): (usize, usize)) {
        let tiles = scratch.scores.as_chunks_mut::<TILE>().0;
        for (r, (row, scores)) in scratch.rows[..self.flat.len()].iter_mut().zip(tiles).enumerate() {
            if row.here.0 == row.here.1 {
                row.live = 0;
                continue;
            }
            if let Some(cap) = self.params.softcap {
                softmax::softcap(self.isa, &mut scores[from..to], cap);
            }
            let step = softmax::tile(self.isa, scores, row.here.0, row.here.1, row.max);
            if step.max != row.max {
                let factor = softmax::rescale(row.max, step.max);
                row.sum *= factor;
                scale(self.isa, &mut scratch.out[r * self.value_dim..][..self.value_dim], factor);
                row.max = step.max;
            }
            row.sum += step.sum;
            row.live = step.live;
        }
    }

    /// Attention over exact rows.
    fn exact(&self, scratch: &mut Scratch, range: Range<usize>, keys: Source<'_>, values: Source<'_>) {
        for tile in self.tiles(scratch, &range) {
            if let Some(seen) = self.enter(scratch, &range, tile) {
                self.exact_tile(scratch, tile * TILE, seen, keys, values);
            }
        }
    }

    fn exact_tile(
        &self,
        scratch: &mut Scratch,
        start: usize,
        (from, to): (usize, usize),
        keys: Source<'_>,
        values: Source<'_>,
    ) {
        let (rows, dim) = (self.flat.len(), self.key_dim());
        for Slices { from, to } in Slices::of(from, to, SLICE) {
            keys.read(self.isa, start + from, start + to, 0, dim, &mut scratch.slice);
            let keys = as_rows(&scratch.slice, dim);
            dot(self.isa, keys, (0, to - from), &scratch.q, rows, dim, None, &mut scratch.scores[from..]);
        }
        self.weights(scratch, (from, to));
        for c in (0..self.value_dim).step_by(SLAB) {
            values.read(self.isa, start + from, start + to, c, SLAB, &mut scratch.slice[from * SLAB..]);
            let values = as_rows(&scratch.slice, SLAB);
            by_rows(&scratch.rows[..rows], u64::MAX, |r, n, span| {
                let out = &mut scratch.out[r * self.value_dim + c..];
                let weights = &scratch.scores[r * TILE..];
                weigh(
                    self.isa,
                    values,
                    span,
                    weights,
                    n,
                    SLAB,
                    super::kernels::Epilogue::Add,
                    out,
                    self.value_dim,
                );
            });
        }
    }
}

/// Tokens `[from, to)` that query `i` of `n` sees of a sequence of `total` tokens: itself and what is before it, inside
/// the sliding window; and all members of a bidirectional range that it is in.
fn visible(
    i: usize,
    n: usize,
    total: usize,
    sliding_window: Option<usize>,
    bidirectional: &[(usize, usize)],
) -> (usize, usize) {
    // Without a position (fewer tokens than queries) there is nothing to see.
    let Some(position) = (total + i).checked_sub(n) else { return (0, 0) };
    let mut from = sliding_window.map_or(0, |w| (position + 1).saturating_sub(w));
    let mut to = position + 1;
    for (s, e) in bidirectional {
        if (*s..*e).contains(&position) {
            (from, to) = (from.min(*s), to.max(*e));
        }
    }
    (from, to.min(total))
}

const _: () = assert!(ROWS.is_multiple_of(4) && TILE.is_multiple_of(SLICE));
