//! The paged cache: seats, steps, blocks. See the [module](super) for the words.

use super::pool::PagePool;
mod share;
mod transfer;

use super::batch::{Batch, SlotBatch};
use super::state::{State, Stats};
use super::step::{Seat, Step};
use crate::backend::Backend;
use crate::config::{CacheConfig, query_group};
use crate::cpu::Cpu;
use crate::error::{Error, Result};
use crate::layout::TILE;
use crate::tensor::Dtype;

/// A cache whose sequences live in 64-token blocks of a [`PagePool`].
///
/// A step is: [`reserve`](Self::reserve) blocks, [`begin_step`](Self::begin_step), then for every layer
/// [`append`](Self::append) and [`attend`](Self::attend), or [`prefill`](Self::prefill). Lengths change when the last layer
/// has appended. Nothing is allocated in a step once its buffers have seen the largest batch.
///
/// Tensors are `[rows, heads, dim]`; sequence `i` of the batch has rows `query_start[i]..query_start[i + 1]`.
///
/// ```
/// use qkv::cache::{Batch, PagePool};
/// use qkv::{AttendParams, Bits, CacheConfig, PagedKvCache, TensorMut, TensorRef};
/// # fn main() -> qkv::Result<()> {
/// let config = CacheConfig::new(1, 2, 64).with_bits(Bits::B4).with_capacity(8, 1024);
/// let pool = PagePool::new(&config, 4 * config.blocks_per_sequence())?; // four full sequences; more if they share
/// let mut cache = PagedKvCache::new(config, pool)?;
///
/// // One step: a prompt of 200 tokens and one of 30, the rows of one behind those of the other.
/// let (a, b) = (cache.open()?, cache.open()?);
/// cache.reserve(a, 200)?;
/// cache.reserve(b, 30)?;
/// cache.begin_step(&Batch::new(&[a, b], &[0, 200, 230]))?;
/// let (q, kv, mut out) = (vec![0.1f32; 230 * 4 * 64], vec![0.2f32; 230 * 2 * 64], vec![0f32; 230 * 4 * 64]);
/// let (q, kv) = (TensorRef::thd(&q, [230, 4, 64])?, TensorRef::thd(&kv, [230, 2, 64])?);
/// for layer in 0..1 {
///     let mut out = TensorMut::thd(&mut out, [230, 4, 64])?;
///     cache.prefill(layer, &q, &kv, &kv, &AttendParams::new(), &mut out, None)?;
/// }
/// assert_eq!((cache.len(a)?, cache.len(b)?), (200, 30));
///
/// // 200 tokens have two closed tiles: a new sequence shares them and goes on with token 128.
/// let prefix = cache.prefix(a, 200)?;
/// let c = cache.open_with(&prefix)?;
/// assert_eq!((prefix.tokens(), cache.len(c)?), (128, 128));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct PagedKvCache<B: Backend = Cpu> {
    config: CacheConfig,
    pub(crate) state: State,
    pub(crate) backend: B,
}

impl PagedKvCache {
    /// A cache on the CPU over a pool made for the same configuration.
    ///
    /// # Errors
    /// As [`CacheConfig::validate`]; [`Error::Unsupported`] if the pool is for another configuration.
    pub fn new(config: CacheConfig, pool: PagePool) -> Result<Self> {
        Self::on_backend((), config, pool)
    }
}

impl<B: Backend> PagedKvCache<B> {
    /// A cache on the backend `B` over a pool made for the same configuration.
    ///
    /// # Errors
    /// As [`PagedKvCache::new`].
    pub fn on_backend(context: B::Context, config: CacheConfig, pool: PagePool<B::Memory>) -> Result<Self> {
        config.validate()?;
        if pool.configuration_hash() != config.hash() || pool.block_bytes() != config.block_bytes()? {
            return Err(Error::Unsupported {
                what: "pool",
                got: format!("a pool of configuration {:016x}", pool.configuration_hash()),
                why: format!(
                    "this cache is of configuration {:016x}; dims, heads, formats, sinks and static scales must be the \
                     same, so make the pool with this configuration",
                    config.hash()
                ),
            });
        }
        let state = State::new(&config, pool.blocks.clone());
        let backend = B::new(context, &config, pool)?;
        Ok(Self { config, state, backend })
    }

    /// The configuration.
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// The pool.
    pub fn pool(&self) -> &PagePool<B::Memory> {
        self.backend.pool()
    }

    // Seats

    /// Starts a sequence.
    ///
    /// # Errors
    /// [`Error::Capacity`] if `max_sequences` are open.
    pub fn open(&mut self) -> Result<Seat> {
        let seat = self.state.open()?;
        self.tell_lengths(seat)?;
        Ok(seat)
    }

    /// Tells the backend a sequence's lengths after the state machine changed them.
    pub(super) fn tell_lengths(&mut self, seat: Seat) -> Result<()> {
        let s = &self.state.seats[seat.index()];
        self.backend.set_lengths(seat, s.len, s.packed)
    }

    /// Ends a sequence; its blocks lose one owner.
    ///
    /// # Errors
    /// [`Error::UnknownSeat`], [`Error::StepOpen`].
    pub fn close(&mut self, seat: Seat) -> Result<()> {
        self.state.close(seat)
    }

    /// Empties a sequence; the seat stays open.
    ///
    /// # Errors
    /// [`Error::UnknownSeat`], [`Error::StepOpen`].
    pub fn clear(&mut self, seat: Seat) -> Result<()> {
        self.state.clear(seat)?;
        self.tell_lengths(seat)
    }

    /// Tokens of a sequence. During a step this is the length before it, so it is the position of the first new
    /// token in every layer.
    ///
    /// # Errors
    /// [`Error::UnknownSeat`].
    pub fn len(&self, seat: Seat) -> Result<usize> {
        Ok(self.state.seat(seat)?.len)
    }

    /// Whether a sequence has no tokens.
    ///
    /// # Errors
    /// [`Error::UnknownSeat`].
    pub fn is_empty(&self, seat: Seat) -> Result<bool> {
        Ok(self.len(seat)? == 0)
    }

    /// Tokens of a sequence that are in closed tiles (direct mode: in slots).
    ///
    /// # Errors
    /// [`Error::UnknownSeat`].
    pub fn packed_len(&self, seat: Seat) -> Result<usize> {
        Ok(self.state.seat(seat)?.packed)
    }

    /// Block of each tile of a sequence, -1 = none.
    ///
    /// # Errors
    /// [`Error::UnknownSeat`].
    pub fn block_table(&self, seat: Seat) -> Result<&[i32]> {
        Ok(&self.state.seat(seat)?.table)
    }

    // Blocks

    /// Blocks that appending `new_tokens` needs beyond those in the table.
    ///
    /// # Errors
    /// [`Error::UnknownSeat`]; [`Error::Capacity`] if the sequence would exceed `max_tokens`.
    pub fn blocks_needed(&self, seat: Seat, new_tokens: usize) -> Result<usize> {
        self.state.blocks_needed(seat, new_tokens)
    }

    /// Takes the blocks that appending `new_tokens` needs from the pool and enters them in the table: all or none.
    /// Returns how many.
    ///
    /// # Errors
    /// As [`blocks_needed`](Self::blocks_needed); [`Error::Capacity`] if the pool has too few;
    /// [`Error::StepOpen`].
    pub fn reserve(&mut self, seat: Seat, new_tokens: usize) -> Result<usize> {
        self.state.no_open_step()?;
        self.state.reserve(seat, new_tokens)
    }

    /// Takes a block from the pool for [`set_block`](Self::set_block) or for a step of slots. The caller owns it until
    /// then; [`free_block`](Self::free_block) gives it back.
    ///
    /// # Errors
    /// [`Error::Capacity`] if the pool has none.
    pub fn allocate_block(&mut self) -> Result<i32> {
        self.state.blocks.lock().lend().ok_or(Error::Capacity {
            what: "blocks",
            needed: 1,
            available: 0,
            help: "close or truncate sequences, drop prefixes, or build the pool with more blocks",
        })
    }

    /// Gives back a block taken with [`allocate_block`](Self::allocate_block) that no seat owns.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if there is none, [`Error::Unsupported`] if no caller took it, [`Error::Duplicate`] if a seat owns it.
    pub fn free_block(&mut self, block: i32) -> Result<()> {
        if self.state.is_owned(block) {
            return Err(Error::Duplicate { what: "owner of block", got: block as i64 });
        }
        let mut blocks = self.state.blocks.lock();
        blocks.check_lent(block)?;
        blocks.take_over(block);
        blocks.release(block);
        Ok(())
    }

    /// Enters a block taken with [`allocate_block`](Self::allocate_block) for a tile that is not closed yet; the seat owns
    /// it from then on.
    ///
    /// # Errors
    /// [`Error::UnknownSeat`], [`Error::StepOpen`]; [`Error::OutOfRange`] for a tile or block that does not exist;
    /// [`Error::Unsupported`] for a block that nobody took; [`Error::Duplicate`] if the tile has a block or a seat has this block.
    pub fn set_block(&mut self, seat: Seat, tile: usize, block: i32) -> Result<()> {
        self.state.no_open_step()?;
        self.state.seat(seat)?;
        if self.state.is_owned(block) {
            return Err(Error::Duplicate { what: "block", got: block as i64 });
        }
        self.state.set_block(seat, tile, block)
    }

    // Steps

    /// Opens a step. It is open until every layer has appended or prefilled once.
    ///
    /// # Errors
    /// [`Error::StepOpen`]; [`Error::UnknownSeat`], [`Error::Duplicate`] seats; a malformed `query_start`
    /// or `slot_mapping`; [`Error::Capacity`] beyond `max_tokens`; [`Error::MissingBlock`] for a tile that closes in this
    /// step and has no block.
    pub fn begin_step(&mut self, batch: &Batch<'_>) -> Result<()> {
        self.state.begin_step(batch)?;
        self.begin_on_backend()
    }

    pub(crate) fn begin_on_backend(&mut self) -> Result<()> {
        self.backend.begin(&self.state.step).inspect_err(|_| self.state.step.clear())
    }

    /// Opens a step of slots: direct mode with sequences that the caller places, no seats.
    ///
    /// # Errors
    /// As [`begin_step`](Self::begin_step); [`Error::OutOfRange`] or [`Error::Duplicate`] slots and blocks; a slot that is
    /// not where the block table puts its token, or in a block that a seat or a prefix owns; [`Error::Unsupported`] in
    /// windowed mode.
    pub fn begin_slots(&mut self, batch: &SlotBatch<'_>) -> Result<()> {
        self.state.begin_slots(batch)?;
        self.begin_on_backend()
    }

    /// Ends an open step with the old lengths. Layers that have appended are cut back as by
    /// [`truncate`](Self::truncate): tokens that were closed into tiles together with new ones are decoded into the window.
    ///
    /// # Errors
    /// [`Error::StepOrder`] if no step is open.
    pub fn cancel_step(&mut self) -> Result<()> {
        if !self.state.step.open {
            return Err(Error::StepOrder { layer: 0, problem: "no step is open, nothing to cancel".into() });
        }
        if self.state.step.captured {
            // Nothing has run.
            self.state.step.clear();
            return Ok(());
        }
        // Put back in any case: it owns the buffers.
        let step = std::mem::take(&mut self.state.step);
        let cut = self.cut_back(&step);
        self.state.step = step;
        cut?;
        let seats: Vec<Seat> = self.state.step.sequences.iter().filter_map(|s| s.seat).collect();
        self.state.cancelled();
        seats.into_iter().try_for_each(|seat| self.tell_lengths(seat))
    }

    /// The backend's part of a cancelled step: all layers hold the same again.
    fn cut_back(&mut self, step: &Step) -> Result<()> {
        let any = step.done.iter().any(|d| *d);
        for (i, s) in step.sequences().iter().enumerate().filter(|_| any) {
            let Some(seat) = s.seat else { continue };
            let (packed, decode) = self.state.cancel_plan(s);
            for (layer, done) in step.done.iter().enumerate() {
                match (done, decode) {
                    (true, Some((from, to))) if from < to => {
                        let block = step.table(i)[from / TILE];
                        self.backend.decode_into_window(layer, seat, block, from, to)?;
                    }
                    (false, _) if packed > s.old_packed && self.config.residual.is_some() => {
                        let table = step.table(i);
                        let clamped = self.backend.close_tiles(layer, seat, table, s.old_packed, packed)?;
                        self.state.stats.clamped_values += clamped;
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// New keys and values of one layer, `[rows, kv_heads, key_dim]` and `[rows, kv_heads, value_dim]`.
    ///
    /// Non-finite values make their group decode to NaN; values beyond ±65,504 are clamped and counted.
    ///
    /// # Errors
    /// [`Error::StepOrder`] without an open step or a second time; [`Error::Shape`].
    pub fn append(&mut self, layer: usize, k: &B::Tensor<'_>, v: &B::Tensor<'_>) -> Result<()> {
        self.state.may_append(layer)?;
        self.check_kv(self.state.step.input_rows, k, v)?;
        self.append_checked(layer, k, v)
    }

    fn append_checked(&mut self, layer: usize, k: &B::Tensor<'_>, v: &B::Tensor<'_>) -> Result<()> {
        self.state.stats.clamped_values += self.backend.append(layer, &self.state.step, k, v)?;
        self.state.appended(layer);
        Ok(())
    }

    /// Attention of the step's queries over everything stored, the new tokens included: `q` is
    /// `[rows, query_heads, key_dim]`, `out` `[rows, query_heads, value_dim]`, `lse` (natural log)
    /// `[rows][query_heads]`. Rows that see no key give 0 and −inf; rows of padding are left as they are. After the step's last
    /// append it may be called again and again, until lengths change: so a next step's `append` that was forgotten is not noticed here
    /// ([`len`](Self::len) tells).
    ///
    /// # Errors
    /// [`Error::StepOrder`] before this layer's append in an open step, or in windowed mode with more than max(R, 64) new tokens in a
    /// sequence (some of them are already quantized then: [`cancel_step`](Self::cancel_step), and use
    /// [`prefill`](Self::prefill)); [`Error::Shape`], [`Error::Length`], and parameters out of range.
    pub fn attend(
        &mut self,
        layer: usize,
        q: &B::Tensor<'_>,
        params: &B::Params<'_>,
        out: &mut B::Output<'_>,
        lse: Option<B::Lse<'_>>,
    ) -> Result<()> {
        self.state.may_attend(layer)?;
        if let Some(got) = B::bidirectional(params) {
            return Err(Error::Unsupported {
                what: "bidirectional",
                got,
                why: "ranges that see each other are for `prefill`; `attend` is causal".into(),
            });
        }
        self.check_query(self.state.step.input_rows, q, params, out, lse.as_ref())?;
        let mut lse = lse;
        self.backend.attend(layer, &self.state.step, q, params, out, lse.as_mut())
    }

    /// Attention over what was stored before this step plus all new tokens, exact, then one append: for prompts and
    /// chunks of any length. Shapes, and rows of padding, as in [`append`](Self::append) and [`attend`](Self::attend).
    ///
    /// # Errors
    /// As `append` and `attend`, without the limit on new tokens.
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
        self.state.may_append(layer)?;
        self.check_prefill(self.state.step.input_rows, q, k, v, params, out, lse.as_ref())?;
        let mut lse = lse;
        self.backend.prefill(layer, &self.state.step, q, k, v, params, out, lse.as_mut())?;
        self.append_checked(layer, k, v)
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn check_prefill(
        &self,
        rows: usize,
        q: &B::Tensor<'_>,
        k: &B::Tensor<'_>,
        v: &B::Tensor<'_>,
        params: &B::Params<'_>,
        out: &B::Output<'_>,
        lse: Option<&B::Lse<'_>>,
    ) -> Result<()> {
        self.check_kv(rows, k, v)?;
        self.check_query(rows, q, params, out, lse)
    }

    pub(super) fn check_kv(&self, rows: usize, k: &B::Tensor<'_>, v: &B::Tensor<'_>) -> Result<()> {
        let c = &self.config;
        for (what, t, d) in [("keys", B::describe(k), c.key_dim), ("values", B::describe(v), c.value_dim)] {
            check_shape(what, t, [rows, c.kv_heads, d])?;
        }
        Ok(())
    }

    fn check_query(
        &self,
        rows: usize,
        q: &B::Tensor<'_>,
        params: &B::Params<'_>,
        out: &B::Output<'_>,
        lse: Option<&B::Lse<'_>>,
    ) -> Result<()> {
        let heads = B::describe(q).0[1];
        check_shape("queries", B::describe(q), [rows, heads, self.config.key_dim])?;
        query_group(heads, self.config.kv_heads)?;
        check_shape("output", B::describe_output(out), [rows, heads, self.config.value_dim])?;
        if let Some(got) = lse.map(B::lse_len).filter(|n| *n != rows * heads) {
            return Err(Error::Length { what: "lse", expected: rows * heads, got });
        }
        B::check_params(params, heads)
    }

    // Counting

    /// Bytes of pages, windows, sinks and means, all allocated at construction.
    pub fn bytes_allocated(&self) -> usize {
        self.pool().bytes() + self.config.max_sequences * self.config.seat_bytes()
    }

    /// Bytes in use: referenced blocks (codes, pairs, padding) and open seats (windows, sinks, means). Equal to
    /// [`bytes_allocated`](Self::bytes_allocated) when the cache is full.
    pub fn bytes_used(&self) -> usize {
        let blocks = self.pool().blocks() - self.pool().free_blocks();
        let seats = self.state.seats.iter().filter(|s| s.open).count();
        blocks * self.pool().block_bytes() + seats * self.config.seat_bytes()
    }

    /// Bytes of the attention scratch, allocated at construction.
    pub fn scratch_bytes(&self) -> usize {
        self.backend.scratch_bytes()
    }

    /// Counters since construction. Some are counted on the device: reading them waits for the cache's stream, so it has no
    /// place in a step. (A device that fails gives no count; every other call then says why.)
    pub fn stats(&self) -> Stats {
        let mut stats = self.state.stats;
        stats.clamped_values += self.backend.clamped();
        stats
    }

    /// The current (or last) step.
    pub fn step(&self) -> &Step {
        &self.state.step
    }
}

fn check_shape(what: &'static str, (got, _): ([usize; 3], Dtype), expected: [usize; 3]) -> Result<()> {
    if got == expected {
        return Ok(());
    }
    Err(Error::Shape { what, expected: format!("{expected:?}"), got: format!("{got:?}") })
}
