//! Memory of attention beside its inputs and outputs. Everything is allocated ahead, nothing in a call that fits.

use super::{MAX_CHUNKS, MIN_CHUNK, ROWS, SLAB, SLICE};
use crate::layout::TILE;

/// What a workspace has to be big enough for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Sequences of a call.
    pub sequences: usize,
    /// Tokens of a sequence.
    pub tokens: usize,
    /// Query heads.
    pub query_heads: usize,
    /// Channels of a key head.
    pub key_dim: usize,
    /// Channels of a value head.
    pub value_dim: usize,
}

impl Needs {
    fn max(self, other: Needs) -> Needs {
        Needs {
            sequences: self.sequences.max(other.sequences),
            tokens: self.tokens.max(other.tokens),
            query_heads: self.query_heads.max(other.query_heads),
            key_dim: self.key_dim.max(other.key_dim),
            value_dim: self.value_dim.max(other.value_dim),
        }
    }

    /// f32 of the partial results of sequences that are split.
    fn partials(&self) -> usize {
        let chunks = self.tokens.div_ceil(MIN_CHUNK).min(MAX_CHUNKS);
        if chunks <= 1 { 0 } else { self.sequences * chunks * self.query_heads * (self.value_dim + 2) }
    }
}

/// Partial results and one [`Scratch`] a thread.
#[derive(Debug, Default)]
pub(crate) struct Workspace {
    needs: Needs,
    /// `[sequence][chunk][query head][max, sum, output...]` of sequences that are split.
    pub(super) partials: Vec<f32>,
    /// First work item of each sequence, and the number of all.
    pub(super) starts: Vec<usize>,
    pub(super) scratch: Vec<Scratch>,
}

impl Workspace {
    /// A workspace for calls up to these needs from the current thread pool.
    pub(crate) fn new(needs: Needs) -> Self {
        let mut new = Self::default();
        new.reserve(needs);
        new
    }

    /// Grows to these needs. A call that fits allocates nothing.
    pub(crate) fn reserve(&mut self, needs: Needs) {
        let threads = rayon::current_num_threads();
        let needs = self.needs.max(needs);
        if needs == self.needs && threads <= self.scratch.len() {
            return;
        }
        let threads = threads.max(self.scratch.len());
        if (needs.key_dim, needs.value_dim) != (self.needs.key_dim, self.needs.value_dim) {
            self.scratch.clear();
        }
        let partials = needs.partials().max(self.partials.len());
        self.partials.resize(partials, 0.0);
        self.starts.resize(needs.sequences + 1, 0);
        self.scratch.resize_with(threads, || Scratch::new(needs.key_dim, needs.value_dim));
        self.needs = needs;
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.partials.capacity() * 4
            + self.starts.capacity() * size_of::<usize>()
            + (self.scratch.capacity() - self.scratch.len()) * size_of::<Scratch>()
            + self.scratch.iter().map(Scratch::bytes).sum::<usize>()
    }
}

/// What one thread needs for one work item: the state of up to [`ROWS`] query rows, and a slice of unpacked keys or
/// values, which is smaller than a tile.
#[derive(Debug)]
pub(crate) struct Scratch {
    /// Query rows, scaled: `[row][key_dim]`.
    pub(super) q: Vec<f32>,
    /// Query rows as pages want them: rotated, times a static FP8 scale.
    pub(super) paged: Vec<f32>,
    /// Query rows times the steps of per-channel keys.
    pub(super) folded: Vec<f32>,
    /// Sums of `paged` over the groups of per-token keys: `[row][group]`.
    pub(super) group_sums: Vec<f32>,
    /// Weighted sums of values: `[row][value_dim]`.
    pub(super) out: Vec<f32>,
    /// Scores, then weights of a tile: `[row][token]`.
    pub(super) scores: Vec<f32>,
    /// Weights times the steps of per-token values: `[row][token]`.
    pub(super) weights: Vec<f32>,
    /// A slice of unpacked keys `[SLICE][key_dim]` or values `[TILE][SLAB]`.
    pub(super) slice: Vec<f32>,
    /// Steps of a tile, as stored.
    pub(super) step: Vec<f32>,
    /// Mins of a tile, as stored.
    pub(super) min: Vec<f32>,
    /// Steps or mins of a tile by group: `[group][token]`.
    pub(super) by_group: Vec<f32>,
    /// The state of the rows.
    pub(super) rows: [Row; ROWS],
}

/// The state of one query row.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Row {
    /// First token seen.
    pub from: usize,
    /// One past the last token seen.
    pub to: usize,
    /// The same inside the current tile.
    pub here: (usize, usize),
    /// Tokens of the current tile that count, a bit each.
    pub live: u64,
    /// Largest score so far.
    pub max: f32,
    /// Sum of weights against it.
    pub sum: f32,
    /// `q · mean` of centred keys.
    pub mean: f32,
}

impl Scratch {
    fn new(key_dim: usize, value_dim: usize) -> Self {
        // Per-token groups have at least 32 channels; a smaller head is one group.
        let groups = |dim: usize| dim.div_ceil(32).max(1);
        let most = groups(key_dim.max(value_dim));
        let pairs = (TILE * most).max(key_dim).max(value_dim);
        let zero = |n: usize| vec![0f32; n];
        Self {
            q: zero(ROWS * key_dim),
            paged: zero(ROWS * key_dim),
            folded: zero(ROWS * key_dim),
            group_sums: zero(ROWS * groups(key_dim)),
            out: zero(ROWS * value_dim),
            scores: zero(ROWS * TILE),
            weights: zero(ROWS * TILE),
            slice: zero((SLICE * key_dim).max(TILE * SLAB)),
            step: zero(pairs),
            min: zero(pairs),
            by_group: zero(TILE * most),
            rows: [Row::default(); ROWS],
        }
    }

    fn bytes(&self) -> usize {
        let all = [
            &self.q,
            &self.paged,
            &self.folded,
            &self.group_sums,
            &self.out,
            &self.scores,
            &self.weights,
            &self.slice,
            &self.step,
            &self.min,
            &self.by_group,
        ];
        all.iter().map(|v| v.capacity() * 4).sum::<usize>() + size_of::<Self>()
    }
}
