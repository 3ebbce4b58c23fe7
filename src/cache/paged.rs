//! The paged cache: seats, steps, blocks. See the [module](super) for the words.

use super::blocks::SharedBlocks;
use super::page_io;
use super::pool::PagePool;
use super::prefix::Prefix;
use super::state::{Batch, Cut, SlotBatch, State, Stats};
use super::step::{Seat, Step};
use crate::backend::{Backend, Stored};
use crate::config::{AttendParams, CacheConfig};
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
#[derive(Debug)]
pub struct PagedKvCache<B: Backend = Cpu> {
    config: CacheConfig,
    pub(super) state: State,
    pub(super) backend: B,
}

impl<B: Backend> PagedKvCache<B> {
    /// A cache over a pool made for the same configuration.
    ///
    /// # Errors
    /// As [`CacheConfig::validate`]; [`Error::Unsupported`] if the pool is for another configuration.
    pub fn new(config: CacheConfig, pool: PagePool) -> Result<Self> {
        config.validate()?;
        if pool.configuration_hash() != config.hash() || pool.block_bytes() != config.block_bytes()? {
            return Err(Error::Unsupported {
                what: "pool",
                got: format!("blocks of {} bytes", pool.block_bytes()),
                why: "it was made for another configuration; use PagePool::new with this one".into(),
            });
        }
        let state = State::new(&config, pool.blocks.clone());
        let backend = B::new(&config, pool)?;
        Ok(Self { config, state, backend })
    }

    /// The configuration.
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// The pool.
    pub fn pool(&self) -> &PagePool {
        self.backend.pool()
    }

    // Seats

    /// Starts a sequence.
    ///
    /// # Errors
    /// [`Error::Capacity`] if `max_sequences` are open.
    pub fn open(&mut self) -> Result<Seat> {
        self.state.open()
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
        self.state.clear(seat)
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
        self.state.blocks.lock().take().ok_or(Error::Capacity {
            what: "blocks",
            needed: 1,
            available: 0,
            help: "close or truncate sequences, drop prefixes, or build the pool with more blocks",
        })
    }

    /// Gives back a block taken with [`allocate_block`](Self::allocate_block) that no seat owns.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if nobody owns it, [`Error::Duplicate`] if a seat does.
    pub fn free_block(&mut self, block: i32) -> Result<()> {
        if self.state.seats.iter().any(|s| s.table.contains(&block)) {
            return Err(Error::Duplicate { what: "owner of block", got: block as i64 });
        }
        let mut blocks = self.state.blocks.lock();
        if blocks.refs(block) == 0 {
            return Err(Error::OutOfRange { what: "block", got: block as i64, limit: blocks.count() });
        }
        blocks.release(block);
        Ok(())
    }

    /// Enters a block taken with [`allocate_block`](Self::allocate_block) for a tile that is not closed yet; the seat owns
    /// it from then on.
    ///
    /// # Errors
    /// [`Error::UnknownSeat`], [`Error::StepOpen`]; [`Error::OutOfRange`] for a tile or block that does not exist;
    /// [`Error::Duplicate`] if the tile has a block or a seat has this block.
    pub fn set_block(&mut self, seat: Seat, tile: usize, block: i32) -> Result<()> {
        self.state.no_open_step()?;
        self.state.seat(seat)?;
        if self.state.seats.iter().any(|s| s.table.contains(&block)) {
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
        self.state.begin_step(batch)
    }

    /// Opens a step of slots: direct mode with sequences that the caller places, no seats.
    ///
    /// # Errors
    /// As [`begin_step`](Self::begin_step); [`Error::OutOfRange`] or [`Error::Duplicate`] slots and blocks; a slot that is
    /// not where the block table puts its token; [`Error::Unsupported`] in windowed mode.
    pub fn begin_slots(&mut self, batch: &SlotBatch<'_>) -> Result<()> {
        self.state.begin_slots(batch)
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
        let step = std::mem::take(&mut self.state.step);
        let any = step.done.iter().any(|d| *d);
        for (i, s) in step.sequences().iter().enumerate().filter(|_| any) {
            let Some(seat) = s.seat else { continue };
            let (packed, decode) = self.state.cancel_plan(s);
            for (layer, done) in step.done.iter().enumerate() {
                match (done, decode) {
                    (true, Some((from, to))) if from < to => {
                        let block = step.table(i)[from / TILE];
                        self.backend.decode_into_window(layer, seat, block, from, to);
                    }
                    (false, _) if packed > s.old_packed && self.config.residual.is_some() => {
                        let table = step.table(i);
                        let clamped = self.backend.close_tiles(layer, seat, table, s.old_packed, packed);
                        self.state.stats.clamped_values += clamped;
                    }
                    _ => {}
                }
            }
        }
        self.state.step = step;
        self.state.cancelled();
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
        self.append_checked(layer, k, v);
        Ok(())
    }

    fn append_checked(&mut self, layer: usize, k: &B::Tensor<'_>, v: &B::Tensor<'_>) {
        self.state.stats.clamped_values += self.backend.append(layer, &self.state.step, k, v);
        self.state.appended(layer);
    }

    /// Attention of the step's queries over everything stored, the new tokens included: `q` is
    /// `[rows, query_heads, key_dim]`, `out` `[rows, query_heads, value_dim]`, `lse` (natural log)
    /// `[rows][query_heads]`. Rows of padding and rows that see no key give 0 and −inf.
    ///
    /// # Errors
    /// [`Error::StepOrder`] before this layer's append, or with more than max(R, 64) new tokens in a sequence (some of
    /// them are already quantized then: use [`prefill`](Self::prefill)); [`Error::Shape`], [`Error::Length`], and parameters
    /// out of range.
    pub fn attend(
        &mut self,
        layer: usize,
        q: &B::Tensor<'_>,
        params: &AttendParams<'_>,
        out: &mut B::Output<'_>,
        lse: Option<B::Lse<'_>>,
    ) -> Result<()> {
        self.state.may_attend(layer)?;
        if !params.bidirectional.is_empty() {
            return Err(Error::Unsupported {
                what: "bidirectional",
                got: format!("{:?}", params.bidirectional),
                why: "ranges that see each other are for `prefill`; `attend` is causal".into(),
            });
        }
        self.check_query(self.state.step.input_rows, q, params, out, lse.as_ref())?;
        let mut lse = lse;
        self.backend.attend(layer, &self.state.step, q, params, out, lse.as_mut());
        Ok(())
    }

    /// Attention over what was stored before this step plus all new tokens, exact, then one append: for prompts and
    /// chunks of any length. Shapes as in [`append`](Self::append) and [`attend`](Self::attend).
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
        params: &AttendParams<'_>,
        out: &mut B::Output<'_>,
        lse: Option<B::Lse<'_>>,
    ) -> Result<()> {
        self.state.may_append(layer)?;
        self.check_prefill(self.state.step.input_rows, q, k, v, params, out, lse.as_ref())?;
        let mut lse = lse;
        self.backend.prefill(layer, &self.state.step, q, k, v, params, out, lse.as_mut());
        self.append_checked(layer, k, v);
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn check_prefill(
        &self,
        rows: usize,
        q: &B::Tensor<'_>,
        k: &B::Tensor<'_>,
        v: &B::Tensor<'_>,
        params: &AttendParams<'_>,
        out: &B::Output<'_>,
        lse: Option<&B::Lse<'_>>,
    ) -> Result<()> {
        self.check_kv(rows, k, v)?;
        if let Some(r) = params.bidirectional.iter().find(|r| r.0 >= r.1) {
            return Err(Error::Unsupported {
                what: "bidirectional",
                got: format!("{r:?}"),
                why: "a range is [start, end) with start < end".into(),
            });
        }
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
        params: &AttendParams<'_>,
        out: &B::Output<'_>,
        lse: Option<&B::Lse<'_>>,
    ) -> Result<()> {
        let kv_heads = self.config.kv_heads;
        let heads = B::describe(q).0[1];
        check_shape("queries", B::describe(q), [rows, heads, self.config.key_dim])?;
        if heads == 0 || heads % kv_heads != 0 {
            return Err(Error::Shape {
                what: "queries",
                expected: format!(
                    "a multiple of {kv_heads} query heads (each kv head serves the same number)"
                ),
                got: format!("{heads} query heads"),
            });
        }
        check_shape("output", B::describe_output(out), [rows, heads, self.config.value_dim])?;
        if let Some(got) = lse.map(B::lse_len).filter(|n| *n != rows * heads) {
            return Err(Error::Length { what: "lse", expected: rows * heads, got });
        }
        params.check(heads)
    }

    // Cutting, copying, sharing

    /// Keeps the first `len` tokens. A cut inside the window touches no page. A cut into a page drops the reference to it
    /// and puts its surviving tokens, decoded, into the window; when that tile closes again they are quantized a
    /// second time, which [`stats`](Self::stats) counts.
    ///
    /// # Errors
    /// [`Error::UnknownSeat`], [`Error::StepOpen`], [`Error::BeyondLength`]; [`Error::Released`] if the next query would see
    /// released tokens; [`Error::Capacity`] in direct mode if a shared tile must be copied and the pool has no block.
    pub fn truncate(&mut self, seat: Seat, len: usize) -> Result<()> {
        let cut = self.state.plan_cut(seat, len)?;
        match cut {
            Cut::None => {}
            Cut::Decode { block, from, to } => {
                for layer in 0..self.config.layers.len() {
                    self.backend.decode_into_window(layer, seat, block, from, to);
                }
            }
            Cut::Copy { from, to } => self.backend.copy_block(from, to),
        }
        self.state.apply_cut(seat, len, cut);
        Ok(())
    }

    /// A second sequence with the same tokens: one more reference to each closed block, and a copy of window and sinks.
    ///
    /// # Errors
    /// [`Error::UnknownSeat`], [`Error::StepOpen`], [`Error::Capacity`].
    pub fn fork(&mut self, from: Seat) -> Result<Seat> {
        self.state.no_open_step()?;
        self.state.seat(from)?;
        let to = self.state.open()?;
        let copied = self.state.fork_into(from, to).inspect_err(|_| {
            // The new seat is empty, so closing it cannot fail.
            let _ = self.state.close(to);
        })?;
        if let Some((from, to)) = copied {
            self.backend.copy_block(from, to);
        }
        self.backend.copy_seat(from, to);
        Ok(to)
    }

    /// Beam search: afterwards `seats[i]` continues what `seats[parents[i]]` was. The slice is rewritten, since a parent
    /// with one child keeps its seat and nothing is copied for it.
    ///
    /// # Errors
    /// [`Error::UnknownSeat`], [`Error::Duplicate`] seats, [`Error::StepOpen`], [`Error::Length`], [`Error::OutOfRange`];
    /// [`Error::Capacity`] in direct mode if partly filled tiles must be copied and the pool has too few blocks.
    pub fn reorder(&mut self, seats: &mut [Seat], parents: &[usize]) -> Result<()> {
        self.state.no_open_step()?;
        if parents.len() != seats.len() {
            return Err(Error::Length { what: "parents", expected: seats.len(), got: parents.len() });
        }
        for (i, s) in seats.iter().enumerate() {
            self.state.seat(*s)?;
            if seats[..i].contains(s) {
                return Err(Error::Duplicate { what: "seat", got: s.index() as i64 });
            }
        }
        if let Some(p) = parents.iter().find(|p| **p >= seats.len()) {
            return Err(Error::OutOfRange { what: "parent", got: *p as i64, limit: seats.len() });
        }
        // The first child of a parent takes its seat; further children take the seats of those without a child.
        let mut free: Vec<Seat> =
            (0..seats.len()).filter(|i| !parents.contains(i)).map(|i| seats[i]).collect();
        let extra = |i: usize| parents[..i].contains(&parents[i]);
        let partial = |s: Seat| self.state.is_direct() && self.state.seats[s.index()].packed % TILE != 0;
        let needed = (0..parents.len()).filter(|i| extra(*i) && partial(seats[parents[*i]])).count();
        let freed = free.iter().filter(|s| partial(**s)).count(); // their partly filled tiles come free first
        let available = self.state.blocks.lock().free() + freed;
        if needed > available {
            return Err(Error::Capacity {
                what: "blocks (partly filled tiles are copied by reorder)",
                needed,
                available,
                help: "close or truncate sequences, drop prefixes, or build the pool with more blocks",
            });
        }
        for s in &free {
            self.state.clear(*s)?;
        }
        let old = seats.to_vec();
        for i in 0..seats.len() {
            let parent = old[parents[i]];
            if !extra(i) {
                seats[i] = parent;
                continue;
            }
            let Some(to) = free.pop() else { break }; // as many free seats as further children
            if let Some((a, b)) = self.state.fork_into(parent, to)? {
                self.backend.copy_block(a, b);
            }
            self.backend.copy_seat(parent, to);
            seats[i] = to;
        }
        self.state.step.valid = false;
        Ok(())
    }

    /// The first `tokens` of a sequence, rounded down to closed tiles, to start other sequences from.
    ///
    /// # Errors
    /// [`Error::UnknownSeat`], [`Error::StepOpen`], [`Error::BeyondLength`], [`Error::Released`].
    pub fn prefix(&mut self, seat: Seat, tokens: usize) -> Result<Prefix<B>> {
        let shared = self.state.share(seat, tokens)?;
        let (blocks, hash) = (self.state.blocks.clone(), self.config.hash());
        Ok(Prefix { shared, snapshot: self.backend.snapshot(seat), blocks, hash })
    }

    /// Starts a sequence from a prefix: shares its blocks, copies its sinks.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a prefix of another pool or configuration; [`Error::Capacity`].
    pub fn open_with(&mut self, prefix: &Prefix<B>) -> Result<Seat> {
        if !SharedBlocks::same_pool(&prefix.blocks, &self.state.blocks) || prefix.hash != self.config.hash() {
            return Err(Error::Unsupported {
                what: "prefix",
                got: format!("configuration {:016x}", prefix.hash),
                why: "it comes from another cache; a prefix starts sequences of the cache that made it"
                    .into(),
            });
        }
        if prefix.tokens() > self.config.max_tokens {
            return Err(Error::Capacity {
                what: "tokens of a sequence",
                needed: prefix.tokens(),
                available: self.config.max_tokens,
                help: "build the cache with a larger max_tokens",
            });
        }
        let seat = self.state.open()?;
        self.state.adopt(seat, &prefix.shared);
        self.backend.restore(seat, &prefix.snapshot);
        Ok(seat)
    }

    /// Frees blocks wholly below `token`, which no layer's sliding window may reach any more. Returns how many references
    /// were given back.
    ///
    /// # Errors
    /// [`Error::UnknownSeat`], [`Error::StepOpen`]; [`Error::Unsupported`] if a layer still sees `token − 1`.
    pub fn release_before(&mut self, seat: Seat, token: usize) -> Result<usize> {
        self.state.release_before(seat, token)
    }

    // Reading, writing, counting

    /// Keys and values of one layer as attention sees them (decoded, un-rotated, exact rows as they are),
    /// `[len, kv_heads, dim]`, rounded to the outputs' dtype. O(len): for tests and migration, not for a step. In an open
    /// step a layer that has appended has its new length, the others their old one.
    ///
    /// # Errors
    /// [`Error::UnknownSeat`], [`Error::OutOfRange`], [`Error::Shape`]; [`Error::Released`].
    pub fn dequantize(&self, layer: usize, seat: Seat, k: &mut B::Output<'_>, v: &mut B::Output<'_>) -> Result<()> {
        let s = self.state.seat(seat)?;
        let limit = self.config.layers.len();
        if layer >= limit {
            return Err(Error::OutOfRange { what: "layer", got: layer as i64, limit });
        }
        if s.released > 0 {
            return Err(Error::Released { what: "dequantize", released: s.released, got: 0 });
        }
        // A layer that has appended in the open step already holds the new tokens.
        let step = &self.state.step;
        let in_step = (step.open && step.done[layer]).then(|| step.sequences.iter().position(|x| x.seat == Some(seat)));
        let stored = match in_step.flatten() {
            Some(i) => {
                let x = step.sequences[i];
                Stored { seat, len: x.new_len, packed: x.new_packed, table: step.table(i) }
            }
            None => Stored { seat, len: s.len, packed: s.packed, table: &s.table },
        };
        let c = &self.config;
        let (k_shape, v_shape) = (B::describe_output(k), B::describe_output(v));
        for (what, t, d) in [("keys", k_shape, c.key_dim), ("values", v_shape, c.value_dim)] {
            check_shape(what, t, [stored.len, c.kv_heads, d])?;
        }
        self.backend.dequantize(layer, &stored, k, v);
        Ok(())
    }

    /// A closed tile's page in row order with header and checksum, see [`page_io`](super::page_io).
    ///
    /// # Errors
    /// [`Error::UnknownSeat`], [`Error::StepOpen`], [`Error::OutOfRange`]; [`Error::BeyondLength`] for a tile that is not
    /// closed; [`Error::Released`].
    pub fn export_page(&self, seat: Seat, layer: usize, head: usize, tile: usize) -> Result<Vec<u8>> {
        self.state.no_open_step()?;
        let s = self.state.seat(seat)?;
        for (what, got, limit) in
            [("layer", layer, self.config.layers.len()), ("head", head, self.config.kv_heads)]
        {
            if got >= limit {
                return Err(Error::OutOfRange { what, got: got as i64, limit });
            }
        }
        if tile >= s.packed / TILE {
            return Err(Error::BeyondLength {
                what: "export_page",
                got: tile.saturating_add(1).saturating_mul(TILE),
                len: s.packed,
            });
        }
        if tile * TILE < s.released {
            return Err(Error::Released { what: "export_page", released: s.released, got: tile * TILE });
        }
        let mean = self.backend.mean(layer, seat, head);
        let payload = self.backend.read_page(layer, head, s.table[tile]);
        let place = page_io::Place { layer, head, token: tile * TILE };
        Ok(page_io::write_page(self.config.hash(), &place, mean.as_deref(), &payload))
    }

    /// Writes an exported page behind the closed tiles of a sequence whose window is empty. When the pages of all layers
    /// and heads of a tile have come (in any order), the sequence is 64 tokens longer and `true` is returned.
    /// Sinks are not in pages: see [`import_sinks`](Self::import_sinks).
    ///
    /// # Errors
    /// [`Error::Page`] for a damaged page, one of another configuration, one for another place, or one whose key mean
    /// differs from the sequence's; [`Error::UnknownSeat`], [`Error::StepOpen`], [`Error::Capacity`], [`Error::Duplicate`].
    pub fn import_page(&mut self, seat: Seat, bytes: &[u8]) -> Result<bool> {
        self.state.seat(seat)?;
        let page = page_io::read_page(self.config.hash(), bytes, |layer| {
            let l = self.config.layers.get(layer)?;
            Some((self.config.page_layout(l).page_bytes, l.key.centered().then_some(self.config.key_dim)))
        })?;
        let page_io::Place { layer, head, token } = page.place;
        if let (Some(mean), true) = (&page.mean, token > 0) {
            let held = self.backend.mean(layer, seat, head.min(self.config.kv_heads - 1));
            let same = held
                .as_ref()
                .is_some_and(|h| h.iter().map(|x| x.to_bits()).eq(mean.iter().map(|x| x.to_bits())));
            if !same {
                return Err(Error::Page {
                    problem: "its key mean is not the sequence's, so it belongs to another sequence",
                    expected: "the mean of tile 0".into(),
                    got: "another mean".into(),
                });
            }
        }
        let block = self.state.import_target(seat, layer, head, token)?;
        self.backend.write_page(layer, head, block, page.payload);
        if let Some(mean) = page.mean.filter(|_| token == 0) {
            self.backend.set_mean(layer, seat, head, &mean);
        }
        Ok(self.state.imported(seat, layer, head))
    }

    /// The exact first tokens of a sequence (they are not in pages), with header and checksum.
    ///
    /// # Errors
    /// [`Error::UnknownSeat`], [`Error::StepOpen`].
    pub fn export_sinks(&self, seat: Seat) -> Result<Vec<u8>> {
        self.state.no_open_step()?;
        self.state.seat(seat)?;
        Ok(page_io::write_sinks(self.config.hash(), &self.backend.read_sinks(seat)))
    }

    /// Puts exported sinks into a sequence, before or after its pages.
    ///
    /// # Errors
    /// [`Error::Page`] if damaged or of another configuration; [`Error::UnknownSeat`], [`Error::StepOpen`].
    pub fn import_sinks(&mut self, seat: Seat, bytes: &[u8]) -> Result<()> {
        self.state.no_open_step()?;
        self.state.seat(seat)?;
        let c = &self.config;
        let n = c.layers.len() * c.kv_heads * c.sinks * (c.key_dim + c.value_dim);
        let rows = page_io::read_sinks(c.hash(), bytes, n)?;
        self.backend.write_sinks(seat, &rows);
        Ok(())
    }

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

    /// Counters since construction.
    pub fn stats(&self) -> Stats {
        self.state.stats
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
