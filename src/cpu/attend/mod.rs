//! Attention over packed codes.
//!
//! One pass in the manner of flash attention: tile by tile, scores, online softmax, weighted sum of values, all in
//! f32. Codes are used as the integers they are; steps and mins are folded in where they cost least:
//!
//! | operand | step | min |
//! |---|---|---|
//! | K per channel | into q, once a token group | one number a row: `sum(q * min)` |
//! | K per token, one group a head | into the score | `min * sum(q)` into the score |
//! | K per token, more groups | into the codes as they are unpacked | `min * sum(q in the group)` into the score |
//! | V per token | into the weight, once a group | one number a row and group: `sum(p * min)` |
//! | V per channel | into the sum over the token group | `min * sum(p)` |
//! | FP8 | into q, the score or the weight | – |
//!
//! A **work item** is up to 16 query rows (queries times the heads that share a kv head) of one kv head of one
//! sequence, so that a key or value is unpacked once for all heads of a group. A sequence with one query is also
//! split along its tokens into chunks whose size depends on its length only; chunks are combined in order.
//! So results depend neither on the number of threads nor on the rest of the batch.
//!
//! Tokens that a row does not see are never multiplied by a weight of 0, which would let a NaN through: every sum runs
//! over ranges of visible tokens.

mod block;
mod kernels;
mod lanes;
mod load;
mod output;
mod softmax;
mod source;
#[cfg(test)]
mod tests;
mod tile;
mod workspace;

use crate::config::AttendParams;
use crate::format::Format;
use crate::layout::{PageLayout, TILE};
use crate::raw::RawSlice;
use crate::simd::Isa;
use crate::tensor::{TensorMut, TensorRef};
use block::Item;
use half::f16;
use output::Output;
use rayon::prelude::*;
pub(crate) use source::Rows;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use workspace::Scratch;
pub(crate) use workspace::{Needs, Workspace};

/// Query rows of a work item.
const ROWS: usize = 16;
/// Tokens of keys unpacked at a time.
const SLICE: usize = 16;
/// Channels of values unpacked at a time (for a tile of tokens).
const SLAB: usize = 16;
/// Tokens of a chunk of a sequence with one query, at least; a multiple of a tile.
const MIN_CHUNK: usize = 1024;
/// Chunks of a sequence, at most.
const MAX_CHUNKS: usize = 16;

/// One kv head of one sequence in one layer, as stored.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Head<'a> {
    /// How keys are stored.
    pub key: &'a Format,
    /// How values are stored.
    pub value: &'a Format,
    /// Geometry of the pages.
    pub layout: &'a PageLayout,
    /// This layer's pages: that of tile i starts at `(blocks[i] * kv_heads + head) * layout.page_bytes`.
    pub pages: &'a [u8],
    /// The block of each tile.
    pub blocks: &'a [i32],
    /// Kv heads of a block.
    pub kv_heads: usize,
    /// The kv head.
    pub head: usize,
    /// Tokens held, without `fresh`.
    pub len: usize,
    /// Tokens in pages: a multiple of 64 in windowed mode, `len` in direct mode, where the rest of the last tile is
    /// garbage.
    pub packed: usize,
    /// Tokens below it are read from `sink_rows` only.
    pub sinks: usize,
    /// K and V of the first tokens.
    pub sink_rows: (Rows<'a>, Rows<'a>),
    /// K and V of tokens `max(packed, sinks)..len`.
    pub window: (Rows<'a>, Rows<'a>),
    /// Mean per channel of centred keys: `q · mean` joins the scores of page tokens.
    pub mean: Option<&'a [f16]>,
    /// Static FP8 scales of K and V, 1 where unused.
    pub scales: (f32, f32),
    /// First token still held; those below are outside every sliding window and never touched.
    pub first: usize,
    /// New tokens that are not in the cache yet, at positions `len..len + count`: K, V, their first row in the tensors,
    /// count. Their head is `head`.
    pub fresh: Option<(&'a TensorRef<'a>, &'a TensorRef<'a>, usize, usize)>,
}

impl Head<'_> {
    /// Tokens with `fresh`.
    fn total(&self) -> usize {
        self.len + self.fresh.map_or(0, |f| f.3)
    }
}

/// Which query rows belong to which sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Batch<'a> {
    /// First query row of each sequence, and one past the last: `[sequences + 1]`, ascending.
    pub query_start: &'a [i32],
    /// Rows of each sequence that count, from its first on (`None` = all); the others, and those outside
    /// `query_start`, are padding: what stands in their output and LSE stays.
    pub queries: Option<&'a [i32]>,
}

impl Batch<'_> {
    fn sequences(&self) -> usize {
        self.query_start.len().saturating_sub(1)
    }

    /// Query rows of a sequence that count.
    fn rows(&self, sequence: usize) -> Range<usize> {
        let (start, end) = (self.query_start[sequence] as usize, self.query_start[sequence + 1] as usize);
        start..self.queries.map_or(end, |q| (start + q[sequence] as usize).min(end))
    }
}

/// Tokens of a chunk of a sequence of `total` tokens with one query.
fn chunk_tokens(total: usize) -> usize {
    total.div_ceil(MAX_CHUNKS).next_multiple_of(TILE).max(MIN_CHUNK)
}

/// How the work of one sequence is cut.
#[derive(Clone, Copy, Debug)]
struct Cut {
    queries: usize,
    total: usize,
    blocks: usize,
    chunks: usize,
}

impl Cut {
    fn new(queries: usize, group: usize, total: usize) -> Self {
        let chunks = if queries == 1 { total.div_ceil(chunk_tokens(total)).max(1) } else { 1 };
        Self { queries, total, blocks: (queries * group).div_ceil(ROWS), chunks }
    }

    fn items(&self, kv_heads: usize) -> usize {
        self.blocks * self.chunks * kv_heads
    }
}

/// Attention of `q` `[tokens, query heads, key_dim]` over stored heads into `out` `[tokens, query heads, value_dim]`
/// and the LSE `[token][query head]` (natural logarithm).
///
/// Query i of the n of a sequence sits at position `total - n + i`. A row that sees no key has output 0 and LSE -inf (or
/// its sink logit); rows of no sequence are left as they are.
/// `head_of(sequence, kv head)` says what is stored. The caller has checked shapes.
pub(crate) fn attend<'h>(
    isa: Isa,
    head_of: &(impl Fn(usize, usize) -> Head<'h> + Sync),
    batch: &Batch<'_>,
    kv_heads: usize,
    q: &TensorRef<'_>,
    params: &AttendParams<'_>,
    sliding_window: Option<usize>,
    out: &mut TensorMut<'_>,
    lse: Option<&mut [f32]>,
    workspace: &mut Workspace,
) {
    let [_, query_heads, key_dim] = q.dims();
    let value_dim = out.dims()[2];
    let group = query_heads / kv_heads;
    let sequences = batch.sequences();
    let cut = |s: usize| Cut::new(batch.rows(s).len(), group, head_of(s, 0).total());

    let longest = (0..sequences).map(cut).filter(|c| c.chunks > 1).map(|c| c.total).max();
    workspace.reserve(Needs { sequences, tokens: longest.unwrap_or(0), query_heads, key_dim, value_dim });
    let Workspace { partials, starts, scratch, .. } = workspace;
    let state = value_dim + 2;
    let per_sequence = partials.len() / sequences.max(1) / state * state;
    starts[0] = 0;
    for s in 0..sequences {
        starts[s + 1] = starts[s] + cut(s).items(kv_heads);
    }
    let starts = &starts[..sequences + 1];

    let (out, lse) = (Output::new(out), lse.map(RawSlice::new));
    let partials = RawSlice::new(partials);
    let finish = Finish { out: &out, lse: lse.as_ref(), query_heads, sink_logits: params.sink_logits };

    each(scratch, starts[sequences], |scratch, item| {
        let s = starts.partition_point(|x| *x <= item) - 1;
        let c = cut(s);
        let item = item - starts[s];
        let (kv_head, block, chunk) =
            (item / (c.blocks * c.chunks), item / c.chunks % c.blocks, item % c.chunks);
        let tokens = if c.chunks == 1 {
            0..c.total
        } else {
            let n = chunk_tokens(c.total);
            chunk * n..((chunk + 1) * n).min(c.total)
        };
        let flat = block * ROWS..((block + 1) * ROWS).min(c.queries * group);
        let item = Item {
            isa,
            head: &head_of(s, kv_head),
            q,
            first_row: batch.rows(s).start,
            queries: c.queries,
            group,
            flat: flat.clone(),
            tokens,
            params,
            sliding_window,
            value_dim,
        };
        item.run(scratch);
        for (r, flat) in flat.enumerate() {
            let (token, head) = (batch.rows(s).start + flat / group, kv_head * group + flat % group);
            let (row, out) = (&scratch.rows[r], &mut scratch.out[r * value_dim..][..value_dim]);
            if c.chunks == 1 {
                finish.row(isa, token, head, row.max, row.sum, out);
            } else {
                let at = s * per_sequence + (chunk * query_heads + head) * state;
                // SAFETY: this item is the only one with this sequence, chunk and head.
                let partial = unsafe { partials.part(at, state) };
                (partial[0], partial[1]) = (row.max, row.sum);
                partial[2..].copy_from_slice(out);
            }
        }
    });
    if (0..sequences).all(|s| cut(s).chunks == 1) {
        return;
    }
    each(scratch, sequences * kv_heads, |scratch, item| {
        let (s, kv_head) = (item / kv_heads, item % kv_heads);
        let c = cut(s);
        if c.chunks == 1 {
            return;
        }
        for head in kv_head * group..(kv_head + 1) * group {
            let part = |chunk: usize| {
                // SAFETY: the writers are done, and this item is the only one with this sequence and head.
                &*unsafe { partials.part(s * per_sequence + (chunk * query_heads + head) * state, state) }
            };
            let max =
                (0..c.chunks).map(|i| part(i)[0]).fold(f32::NEG_INFINITY, |a, b| if b > a { b } else { a });
            let out = &mut scratch.out[..value_dim];
            let mut sum = 0.0;
            out.fill(0.0);
            for i in 0..c.chunks {
                let part = part(i);
                let factor = softmax::rescale(part[0], max);
                sum += part[1] * factor;
                kernels::add_scaled(isa, out, &part[2..], factor);
            }
            finish.row(isa, batch.rows(s).start, head, max, sum, out);
        }
    });
}

/// Runs work items on all threads; each takes the next one when it is done with the last.
fn each(scratch: &mut [Scratch], items: usize, work: impl Fn(&mut Scratch, usize) + Sync) {
    let workers = scratch.len().min(items).min(rayon::current_num_threads());
    if workers <= 1 {
        (0..items).for_each(|i| work(&mut scratch[0], i));
        return;
    }
    let next = AtomicUsize::new(0);
    scratch[..workers].par_iter_mut().with_max_len(1).for_each(|scratch| {
        loop {
            let item = next.fetch_add(1, Ordering::Relaxed);
            if item >= items {
                break;
            }
            work(scratch, item);
        }
    });
}

/// Writes finished rows.
struct Finish<'a> {
    out: &'a Output<'a>,
    lse: Option<&'a RawSlice<'a, f32>>,
    query_heads: usize,
    sink_logits: Option<&'a [f32]>,
}

impl Finish<'_> {
    /// Joins the sink logit, divides by the sum of weights and writes output and LSE. `(token, head)` belongs to one
    /// work item only.
    fn row(&self, isa: Isa, token: usize, head: usize, max: f32, sum: f32, out: &mut [f32]) {
        let (mut max, mut sum) = (max, sum);
        if let Some(logit) = self.sink_logits.map(|s| s[head]) {
            let top = if logit > max { logit } else { max };
            let factor = softmax::rescale(max, top);
            sum = sum * factor + if logit == f32::NEG_INFINITY { 0.0 } else { (logit - top).exp() };
            if factor != 1.0 {
                kernels::scale(isa, out, factor);
            }
            max = top;
        }
        let nothing = sum == 0.0;
        kernels::scale(isa, out, if nothing { 0.0 } else { 1.0 / sum });
        // SAFETY: work items have disjoint rows, and each row is finished once.
        unsafe { self.out.write_row(token, head, out) };
        if let Some(lse) = self.lse {
            // SAFETY: as above.
            let lse = unsafe { lse.part(token * self.query_heads + head, 1) };
            lse[0] = if nothing { f32::NEG_INFINITY } else { max + sum.ln() };
        }
    }
}
