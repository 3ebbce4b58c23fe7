//! The contiguous cache: a fixed batch of sequences that step together, blocks managed inside.

use super::batch::Batch;
use super::paged::PagedKvCache;
use super::state::Stats;
use super::step::Seat;
use crate::backend::Backend;
use crate::config::CacheConfig;
use crate::cpu::Cpu;
use crate::error::{Error, Result, index};
use crate::layout::TILE;

/// A cache of `max_sequences` sequences, all open, that take the same number of new tokens in a step
/// (`append_varlen` and `prefill_varlen`: any numbers).
///
/// The `append` (or `prefill`) of any layer opens a step; the other layers, in any order, bring the same number of tokens.
/// Tensors are `[sequences * n, heads, dim]` views: a `[batch, heads, tokens, dim]` tensor is one
/// ([`TensorRef::bhtd`](crate::TensorRef::bhtd)).
#[derive(Debug)]
pub struct KvCache<B: Backend = Cpu> {
    pub(crate) cache: PagedKvCache<B>,
    pub(crate) seats: Vec<Seat>,
    /// `query_start` of the step.
    pub(crate) starts: Vec<i32>,
}

impl KvCache {
    /// A cache on the CPU with room for `max_sequences` sequences of `max_tokens`.
    ///
    /// # Errors
    /// As [`CacheConfig::validate`]; [`Error::Capacity`] if the size does not fit in memory's address range.
    pub fn new(config: CacheConfig) -> Result<Self> {
        Self::on_backend((), config)
    }
}

impl<B: Backend> KvCache<B> {
    /// A cache on the backend `B`.
    ///
    /// # Errors
    /// As [`KvCache::new`].
    pub fn on_backend(context: B::Context, config: CacheConfig) -> Result<Self> {
        config.validate()?;
        let n = config.max_sequences;
        let blocks = config.blocks_per_sequence().saturating_mul(n);
        let pool = B::new_pool(&context, &config, blocks)?;
        let mut cache = PagedKvCache::on_backend(context, config, pool)?;
        let seats = (0..n).map(|_| cache.open()).collect::<Result<_>>()?;
        Ok(Self { cache, seats, starts: Vec::with_capacity(n + 1) })
    }

    /// The configuration.
    pub fn config(&self) -> &CacheConfig {
        self.cache.config()
    }

    /// The paged cache inside, for everything not repeated here.
    pub fn paged(&self) -> &PagedKvCache<B> {
        &self.cache
    }

    /// Sequences.
    pub fn sequences(&self) -> usize {
        self.seats.len()
    }

    fn seat(&self, sequence: usize) -> Result<Seat> {
        let limit = self.seats.len();
        let seat = self.seats.get(sequence).copied();
        seat.ok_or(Error::OutOfRange { what: "sequence", got: index(sequence), limit })
    }

    /// Tokens of a sequence (0 for one that does not exist). During a step, the length before it.
    pub fn len(&self, sequence: usize) -> usize {
        self.seat(sequence).and_then(|s| self.cache.len(s)).unwrap_or(0)
    }

    /// Whether no sequence has tokens.
    pub fn is_empty(&self) -> bool {
        (0..self.seats.len()).all(|i| self.len(i) == 0)
    }

    /// Opens the step if none is open, or checks that this layer brings what the first one did.
    fn step(&mut self, layer: usize, rows: usize, starts: Option<&[i32]>) -> Result<()> {
        let n = self.seats.len();
        let layers = self.config().layers.len();
        if layer >= layers {
            return Err(Error::OutOfRange { what: "layer", got: index(layer), limit: layers });
        }
        if rows > i32::MAX as usize {
            return Err(Error::Shape {
                what: "keys",
                expected: "fewer than 2^31 rows".into(),
                got: format!("{rows} rows"),
            });
        }
        if starts.is_none() && !rows.is_multiple_of(n) {
            return Err(Error::Shape {
                what: "keys",
                expected: format!("a multiple of {n} rows, the same number for each sequence"),
                got: format!("{rows} rows"),
            });
        }
        let same = |held: &[i32]| match starts {
            Some(s) => s == held,
            None => held.len() == n + 1 && (0..=n).all(|i| held[i] as usize == i * (rows / n)),
        };
        if self.cache.step().open {
            if same(&self.starts) {
                return Ok(());
            }
            return Err(Error::Shape {
                what: "keys",
                expected: format!("query_start {:?}, as the other layers of this step have it", self.starts),
                got: starts.map_or(format!("{rows} rows"), |s| format!("query_start {s:?}")),
            });
        }
        if rows == 0 {
            return Err(Error::Shape {
                what: "keys",
                expected: "at least 1 row".into(),
                got: "0 rows".into(),
            });
        }
        if let Some(s) = starts
            && (s.len() != n + 1 || s[0] != 0 || s.windows(2).any(|w| w[0] > w[1]) || s[n] as usize != rows)
        {
            return Err(Error::Unsupported {
                what: "query_start",
                got: format!("{s:?}"),
                why: format!(
                    "{} entries are needed, ascending from 0 to the {rows} rows: one in front of each sequence's rows, and the end",
                    n + 1
                ),
            });
        }
        self.starts.clear();
        match starts {
            Some(s) => self.starts.extend_from_slice(s),
            None => self.starts.extend((0..=n).map(|i| (i * (rows / n)) as i32)),
        }
        let new_tokens = |starts: &[i32], i: usize| (starts[i + 1] - starts[i]) as usize;
        for i in 0..n {
            self.cache.state.may_grow(self.seats[i], new_tokens(&self.starts, i))?;
        }
        // The pool holds every sequence at its longest, so blocks cannot run out.
        for i in 0..n {
            self.cache.reserve(self.seats[i], new_tokens(&self.starts, i))?;
        }
        self.cache.begin_step(&Batch::new(&self.seats, &self.starts))
    }

    /// Does a layer's work in the step that is open, or in a new one: which is cancelled where the work is refused.
    fn in_step(
        &mut self,
        layer: usize,
        k: &B::Tensor<'_>,
        v: &B::Tensor<'_>,
        starts: Option<&[i32]>,
        work: impl FnOnce(&mut PagedKvCache<B>) -> Result<()>,
    ) -> Result<()> {
        let opens = !self.cache.step().open;
        self.begin(layer, k, v, starts)?;
        let done = work(&mut self.cache);
        if done.is_err() && opens {
            // The reason of the refusal tells more than a second one would.
            self.cancel_step().ok();
        }
        done
    }

    /// Checks keys and values, then opens the step if none is open: after this the append cannot fail but for a layer
    /// that has appended.
    fn begin(
        &mut self,
        layer: usize,
        k: &B::Tensor<'_>,
        v: &B::Tensor<'_>,
        starts: Option<&[i32]>,
    ) -> Result<()> {
        let rows = B::describe(k).0[0];
        self.cache.check_kv(rows, k, v)?;
        self.cache.backend.check_append(k, v)?;
        self.step(layer, rows, starts)
    }

    /// New keys and values of one layer, `[sequences * n, kv_heads, dim]`.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::StepOrder`] for a layer that has appended, [`Error::Capacity`] beyond `max_tokens`.
    pub fn append(&mut self, layer: usize, k: &B::Tensor<'_>, v: &B::Tensor<'_>) -> Result<()> {
        self.in_step(layer, k, v, None, |cache| cache.append(layer, k, v))
    }

    /// The same with `query_start[i]..query_start[i + 1]` as the rows of sequence `i`.
    ///
    /// # Errors
    /// As [`append`](Self::append); a malformed `query_start`.
    pub fn append_varlen(
        &mut self,
        layer: usize,
        query_start: &[i32],
        k: &B::Tensor<'_>,
        v: &B::Tensor<'_>,
    ) -> Result<()> {
        self.in_step(layer, k, v, Some(query_start), |cache| cache.append(layer, k, v))
    }

    /// Attention after this layer's append; see [`PagedKvCache::attend`].
    ///
    /// # Errors
    /// As there.
    pub fn attend(
        &mut self,
        layer: usize,
        q: &B::Tensor<'_>,
        params: &B::Params<'_>,
        out: &mut B::Output<'_>,
        lse: Option<B::Lse<'_>>,
    ) -> Result<()> {
        self.cache.attend(layer, q, params, out, lse)
    }

    /// Exact attention over what is stored and all new tokens, then the append; see [`PagedKvCache::prefill`].
    ///
    /// # Errors
    /// As there and as [`append`](Self::append).
    #[allow(clippy::too_many_arguments)]
    pub fn prefill(
        &mut self,
        layer: usize,
        q: &B::Tensor<'_>,
        k: &B::Tensor<'_>,
        v: &B::Tensor<'_>,
        params: &B::Params<'_>,
        out: &mut B::Output<'_>,
        lse: Option<B::Lse<'_>>,
    ) -> Result<()> {
        self.cache.check_prefill(B::describe(k).0[0], q, k, v, params, out, lse.as_ref())?;
        self.cache.backend.check_prefill(q, k, v, params, out, lse.as_ref())?;
        self.in_step(layer, k, v, None, |cache| cache.prefill(layer, q, k, v, params, out, lse))
    }

    /// The same with `query_start[i]..query_start[i + 1]` as the rows of sequence `i`.
    ///
    /// # Errors
    /// As [`prefill`](Self::prefill); a malformed `query_start`.
    #[allow(clippy::too_many_arguments)]
    pub fn prefill_varlen(
        &mut self,
        layer: usize,
        query_start: &[i32],
        q: &B::Tensor<'_>,
        k: &B::Tensor<'_>,
        v: &B::Tensor<'_>,
        params: &B::Params<'_>,
        out: &mut B::Output<'_>,
        lse: Option<B::Lse<'_>>,
    ) -> Result<()> {
        self.cache.check_prefill(B::describe(k).0[0], q, k, v, params, out, lse.as_ref())?;
        self.cache.backend.check_prefill(q, k, v, params, out, lse.as_ref())?;
        self.in_step(layer, k, v, Some(query_start), |cache| cache.prefill(layer, q, k, v, params, out, lse))
    }

    /// Keys and values of a sequence as attention sees them; see [`PagedKvCache::dequantize`].
    ///
    /// # Errors
    /// As there.
    pub fn dequantize(
        &self,
        layer: usize,
        sequence: usize,
        k: &mut B::Output<'_>,
        v: &mut B::Output<'_>,
    ) -> Result<()> {
        self.cache.dequantize(layer, self.seat(sequence)?, k, v)
    }

    /// Keeps the first `len` tokens of a sequence; see [`PagedKvCache::truncate`].
    ///
    /// # Errors
    /// As there.
    pub fn truncate(&mut self, sequence: usize, len: usize) -> Result<()> {
        self.cache.truncate(self.seat(sequence)?, len)
    }

    /// Makes sequence `to` a copy of sequence `from`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::StepOpen`].
    pub fn fork(&mut self, from: usize, to: usize) -> Result<()> {
        self.seat(from)?;
        self.seat(to)?;
        let parents: Vec<usize> = (0..self.seats.len()).map(|i| if i == to { from } else { i }).collect();
        self.reorder(&parents)
    }

    /// Beam search: sequence `i` continues what sequence `parents[i]` was.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::OutOfRange`], [`Error::StepOpen`].
    pub fn reorder(&mut self, parents: &[usize]) -> Result<()> {
        self.cache.reorder(&mut self.seats, parents)
    }

    /// Frees what no sliding window reaches; see [`PagedKvCache::release_before`].
    ///
    /// # Errors
    /// As there.
    pub fn release_before(&mut self, sequence: usize, token: usize) -> Result<usize> {
        self.cache.release_before(self.seat(sequence)?, token)
    }

    /// Empties all sequences.
    ///
    /// # Errors
    /// [`Error::StepOpen`].
    pub fn clear(&mut self) -> Result<()> {
        for i in 0..self.seats.len() {
            self.cache.clear(self.seats[i])?;
        }
        Ok(())
    }

    /// Empties one sequence.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::StepOpen`].
    pub fn clear_sequence(&mut self, sequence: usize) -> Result<()> {
        self.cache.clear(self.seat(sequence)?)
    }

    /// Ends an open step with the old lengths; see [`PagedKvCache::cancel_step`].
    ///
    /// # Errors
    /// [`Error::StepOrder`] if no step is open.
    pub fn cancel_step(&mut self) -> Result<()> {
        self.cache.cancel_step()?;
        self.seats.iter().for_each(|s| self.cache.state.unreserve(*s));
        Ok(())
    }

    /// See [`PagedKvCache::export_page`].
    ///
    /// # Errors
    /// As there.
    pub fn export_page(&self, sequence: usize, layer: usize, head: usize, tile: usize) -> Result<Vec<u8>> {
        self.cache.export_page(self.seat(sequence)?, layer, head, tile)
    }

    /// See [`PagedKvCache::import_page`].
    ///
    /// # Errors
    /// As there.
    pub fn import_page(&mut self, sequence: usize, bytes: &[u8]) -> Result<bool> {
        let seat = self.seat(sequence)?;
        // The pool holds the tiles that a sequence closes by itself, no more: others count on theirs.
        let (needed, available) =
            (self.cache.packed_len(seat)? / TILE + 1, self.config().blocks_per_sequence());
        if needed > available {
            return Err(Error::Capacity {
                what: "closed tiles of a sequence",
                needed,
                available,
                help: "append the newest tokens, they belong into the window; or build the cache with a larger max_tokens",
            });
        }
        self.cache.import_page(seat, bytes)
    }

    /// See [`PagedKvCache::export_sinks`].
    ///
    /// # Errors
    /// As there.
    pub fn export_sinks(&self, sequence: usize) -> Result<Vec<u8>> {
        self.cache.export_sinks(self.seat(sequence)?)
    }

    /// See [`PagedKvCache::import_sinks`].
    ///
    /// # Errors
    /// As there.
    pub fn import_sinks(&mut self, sequence: usize, bytes: &[u8]) -> Result<()> {
        self.cache.import_sinks(self.seat(sequence)?, bytes)
    }

    /// Bytes of pages, windows, sinks and means, all allocated at construction.
    pub fn bytes_allocated(&self) -> usize {
        self.cache.bytes_allocated()
    }

    /// Bytes in use; see [`PagedKvCache::bytes_used`].
    pub fn bytes_used(&self) -> usize {
        self.cache.bytes_used()
    }

    /// Bytes of the attention scratch.
    pub fn scratch_bytes(&self) -> usize {
        self.cache.scratch_bytes()
    }

    /// Counters since construction; see [`PagedKvCache::stats`].
    pub fn stats(&self) -> Stats {
        self.cache.stats()
    }
}
