//! The state machine: which token is where, which tile closes when, who owns a block. It knows no backend and
//! touches no key or value; backends carry out its orders.
//!
//! ```text
//! sinks | tiles ...................... | window
//! exact   [tile i = tokens 64i..64i+63]  exact: the newest R tokens or more, fewer than R + 64
//! ```
//!
//! Per seat it holds `len` (tokens), `packed` (tokens in closed tiles: state, never derived from `len`, since a
//! truncated sequence keeps its tiles) and the block table. `begin_step` writes old and new values of both into the
//! step buffer; they become the seat's when every layer has appended.

use super::blocks::SharedBlocks;
use super::step::{Seat, SequenceStep, Step};
use crate::config::CacheConfig;
use crate::error::{Error, Result};
use crate::layout::TILE;

/// Counters since construction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Stats {
    /// Values beyond ±65,504 that were clamped before they were stored.
    pub clamped_values: u64,
    /// Tokens quantized a second time because `truncate` (or `cancel_step`) cut into their tile.
    pub requantized_tokens: u64,
    /// Tiles closed, counted once for all layers and heads.
    pub closed_tiles: u64,
}

/// One live sequence.
#[derive(Debug, Clone, Default)]
pub(crate) struct SeatState {
    pub(crate) open: bool,
    pub(crate) len: usize,
    pub(crate) packed: usize,
    /// Window tokens below this were decoded from a page; they are no longer what the model gave.
    pub(crate) decoded: usize,
    /// First token whose block was not released.
    pub(crate) released: usize,
    /// Block of each tile, -1 = none.
    pub(crate) table: Vec<i32>,
    /// Pages of the next tile that `import_page` has written (`[layer][head]`); empty when none is under way.
    pub(crate) imported: Vec<bool>,
}

/// What `truncate` asks of the backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Nothing: the cut is inside the window, or on a tile's edge.
    None,
    /// Decode tokens `from..to` of this block into the window, before it is released.
    Decode { block: i32, from: usize, to: usize },
    /// Direct mode: the cut tile is shared, so its block is copied before it is written again.
    Copy { from: i32, to: i32 },
}

/// Input of a step of seats.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Batch<'a> {
    /// The seats, each once.
    pub seats: &'a [Seat],
    /// Rows of the input tensors: sequence `i` has rows `query_start[i]..query_start[i + 1]`; `seats.len() + 1`
    /// entries, ascending from 0.
    pub query_start: &'a [i32],
    /// One entry a row; -1 marks padding, which is skipped. Other values are ignored: seats know their slots.
    pub slot_mapping: Option<&'a [i64]>,
}

impl<'a> Batch<'a> {
    /// A batch without padding.
    pub fn new(seats: &'a [Seat], query_start: &'a [i32]) -> Self {
        Self { seats, query_start, slot_mapping: None }
    }

    /// The same with rows marked as padding by -1.
    pub fn with_slot_mapping(self, slot_mapping: &'a [i64]) -> Self {
        Self { slot_mapping: Some(slot_mapping), ..self }
    }
}

/// Input of a step of slots: direct mode without seats, for engines that place tokens themselves.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct SlotBatch<'a> {
    /// As in [`Batch`].
    pub query_start: &'a [i32],
    /// Tokens of each sequence after this step.
    pub context_lens: &'a [i32],
    /// `[sequences, max_blocks]` block ids, row-major.
    pub block_tables: &'a [i32],
    /// Slot of each row, `block * 64 + offset`; -1 = skip.
    pub slot_mapping: &'a [i64],
}

impl<'a> SlotBatch<'a> {
    /// A batch of sequences placed by the caller.
    pub fn new(
        query_start: &'a [i32],
        context_lens: &'a [i32],
        block_tables: &'a [i32],
        slot_mapping: &'a [i64],
    ) -> Self {
        Self { query_start, context_lens, block_tables, slot_mapping }
    }
}

/// The state of all seats, the current step and the block counts.
#[derive(Debug)]
pub(crate) struct State {
    residual: Option<usize>,
    max_tokens: usize,
    layers: usize,
    heads: usize,
    sinks: usize,
    /// Largest sliding window; `None` if some layer sees everything.
    widest_window: Option<usize>,
    pub(crate) seats: Vec<SeatState>,
    pub(crate) step: Step,
    pub(crate) blocks: SharedBlocks,
    pub(crate) stats: Stats,
    /// Sorted copy of the slots, to find duplicates.
    sorted: Vec<i64>,
}

impl State {
    pub(crate) fn new(config: &CacheConfig, blocks: SharedBlocks) -> Self {
        let width = config.table_width();
        let seat = SeatState { table: vec![-1; width], ..SeatState::default() };
        let windows: Option<Vec<usize>> = config.layers.iter().map(|l| l.sliding_window).collect();
        Self {
            residual: config.residual,
            max_tokens: config.max_tokens,
            layers: config.layers.len(),
            heads: config.kv_heads,
            sinks: config.sinks,
            widest_window: windows.and_then(|w| w.into_iter().max()),
            seats: vec![seat; config.max_sequences],
            step: Step::new(config.layers.len(), config.max_sequences, width),
            blocks,
            stats: Stats::default(),
            sorted: Vec::with_capacity(config.max_sequences),
        }
    }

    pub(crate) fn is_direct(&self) -> bool {
        self.residual.is_none()
    }

    pub(crate) fn seat(&self, seat: Seat) -> Result<&SeatState> {
        let s = self.seats.get(seat.index()).filter(|s| s.open);
        s.ok_or(Error::UnknownSeat { seat: seat.index() })
    }

    fn seat_mut(&mut self, seat: Seat) -> &mut SeatState {
        &mut self.seats[seat.index()]
    }

    /// Refuses calls that change lengths while a step is open.
    pub(crate) fn no_open_step(&self) -> Result<()> {
        if self.step.open { Err(Error::StepOpen { missing: self.step.missing() }) } else { Ok(()) }
    }

    /// Tokens in closed tiles once a sequence has `len` tokens.
    fn packed_after(&self, packed: usize, len: usize) -> usize {
        match self.residual {
            Some(r) => packed.max(len.saturating_sub(r) / TILE * TILE),
            None => len,
        }
    }

    /// Tiles (first, end) that need a block when a sequence grows to `new_len`.
    fn tiles_written(&self, s: &SeatState, new_len: usize) -> (usize, usize) {
        let first = s.packed / TILE;
        (first, self.packed_after(s.packed, new_len).div_ceil(TILE).max(first))
    }

    // Seats

    pub(crate) fn open(&mut self) -> Result<Seat> {
        let max = self.seats.len();
        let free = self.seats.iter().position(|s| !s.open).ok_or(Error::Capacity {
            what: "sequences",
            needed: max + 1,
            available: max,
            help: "close a seat, or build the cache with a larger max_sequences",
        })?;
        let s = &mut self.seats[free];
        s.open = true;
        (s.len, s.packed, s.decoded, s.released) = (0, 0, 0, 0);
        s.imported.clear();
        debug_assert!(s.table.iter().all(|b| *b == -1));
        Ok(Seat::new(free as u32))
    }

    /// Ends a sequence and gives its blocks back.
    pub(crate) fn close(&mut self, seat: Seat) -> Result<()> {
        self.clear(seat)?;
        self.seat_mut(seat).open = false;
        Ok(())
    }

    /// Empties a sequence; the seat stays open.
    pub(crate) fn clear(&mut self, seat: Seat) -> Result<()> {
        self.no_open_step()?;
        self.seat(seat)?;
        self.step.valid = false;
        let s = &mut self.seats[seat.index()];
        let mut blocks = self.blocks.lock();
        s.table.iter_mut().for_each(|b| blocks.release(std::mem::replace(b, -1)));
        (s.len, s.packed, s.decoded, s.released) = (0, 0, 0, 0);
        s.imported.clear();
        Ok(())
    }

    // Blocks

    /// Blocks that a step of `new_tokens` would need beyond those in the table.
    pub(crate) fn blocks_needed(&self, seat: Seat, new_tokens: usize) -> Result<usize> {
        let s = self.seat(seat)?;
        let new_len = self.grown(s, new_tokens)?;
        let (first, end) = self.tiles_written(s, new_len);
        Ok(s.table[first..end].iter().filter(|b| **b < 0).count())
    }

    fn grown(&self, s: &SeatState, new_tokens: usize) -> Result<usize> {
        s.len.checked_add(new_tokens).filter(|n| *n <= self.max_tokens).ok_or(Error::Capacity {
            what: "tokens of a sequence",
            needed: s.len.saturating_add(new_tokens),
            available: self.max_tokens,
            help: "truncate or clear the sequence, or build the cache with a larger max_tokens",
        })
    }

    /// Takes the blocks that a step of `new_tokens` needs from the pool: all or none.
    pub(crate) fn reserve(&mut self, seat: Seat, new_tokens: usize) -> Result<usize> {
        let needed = self.blocks_needed(seat, new_tokens)?;
        let s = &self.seats[seat.index()];
        let (first, end) = self.tiles_written(s, s.len + new_tokens);
        let mut blocks = self.blocks.lock();
        if blocks.free() < needed {
            return Err(Error::Capacity {
                what: "blocks",
                needed,
                available: blocks.free(),
                help: "close or truncate sequences, drop prefixes, or build the pool with more blocks",
            });
        }
        for b in &mut self.seats[seat.index()].table[first..end] {
            if *b < 0 {
                *b = blocks.take().unwrap_or(-1);
            }
        }
        Ok(needed)
    }

    /// Gives back blocks of tiles that are not closed.
    pub(crate) fn unreserve(&mut self, seat: Seat) {
        let s = &mut self.seats[seat.index()];
        let mut blocks = self.blocks.lock();
        for b in &mut s.table[s.packed.div_ceil(TILE)..] {
            blocks.release(std::mem::replace(b, -1));
        }
    }

    /// Puts a block taken with `allocate_block` into the table; the seat owns it from here on.
    pub(crate) fn set_block(&mut self, seat: Seat, tile: usize, block: i32) -> Result<()> {
        let s = self.seat(seat)?;
        let limit = s.table.len();
        let current =
            *s.table.get(tile).ok_or(Error::OutOfRange { what: "tile", got: tile as i64, limit })?;
        if current >= 0 {
            return Err(Error::Duplicate { what: "block of tile", got: tile as i64 });
        }
        if tile * TILE < s.packed {
            return Err(Error::Released { what: "set_block", released: s.released, got: tile * TILE });
        }
        let blocks = self.blocks.lock();
        if blocks.refs(block) == 0 {
            let limit = blocks.count();
            return Err(Error::OutOfRange {
                what: "block (take it with allocate_block)",
                got: block as i64,
                limit,
            });
        }
        drop(blocks);
        self.seat_mut(seat).table[tile] = block;
        Ok(())
    }

    // Steps

    /// Checks the rows of a batch; returns how many there are.
    fn check_rows(query_start: &[i32], sequences: usize, slots: Option<&[i64]>) -> Result<usize> {
        if sequences == 0 {
            return Err(Error::Length { what: "sequences of a step (at least)", expected: 1, got: 0 });
        }
        if query_start.len() != sequences + 1 {
            return Err(Error::Length {
                what: "query_start",
                expected: sequences + 1,
                got: query_start.len(),
            });
        }
        let ascending = query_start.windows(2).all(|w| w[0] <= w[1]);
        if query_start[0] != 0 || !ascending {
            return Err(Error::Unsupported {
                what: "query_start",
                got: format!("{query_start:?}"),
                why: "it ascends from 0: sequence i has rows query_start[i]..query_start[i + 1]".into(),
            });
        }
        let rows = query_start[sequences] as usize;
        match slots {
            Some(s) if s.len() != rows => {
                Err(Error::Length { what: "slot_mapping", expected: rows, got: s.len() })
            }
            _ => Ok(rows),
        }
    }

    fn no_partial_import(&self, s: &SeatState) -> Result<()> {
        match s.imported.iter().position(|d| !d) {
            Some(page) => Err(Error::StepOrder {
                layer: page / self.heads,
                problem: "import_page has brought only part of the next tile; import the rest, or truncate"
                    .into(),
            }),
            None => Ok(()),
        }
    }

    /// Checks everything that could refuse a step of `new_tokens` for this seat, but for blocks.
    pub(crate) fn may_grow(&self, seat: Seat, new_tokens: usize) -> Result<()> {
        let s = self.seat(seat)?;
        self.no_partial_import(s)?;
        self.grown(s, new_tokens).map(|_| ())
    }

    /// Opens a step for a batch of seats. Nothing changes unless everything is in order.
    pub(crate) fn begin_step(&mut self, batch: &Batch<'_>) -> Result<()> {
        self.no_open_step()?;
        let rows = Self::check_rows(batch.query_start, batch.seats.len(), batch.slot_mapping)?;
        if let Some(s) = batch.slot_mapping.and_then(|s| s.iter().find(|s| **s < -1)) {
            return Err(Error::OutOfRange { what: "slot", got: *s, limit: i64::MAX as usize });
        }
        // First pass: checks only.
        for (i, &seat) in batch.seats.iter().enumerate() {
            let s = self.seat(seat)?;
            if batch.seats[..i].contains(&seat) {
                return Err(Error::Duplicate { what: "seat", got: seat.index() as i64 });
            }
            self.no_partial_import(s)?;
            let (_, tokens) = real_rows(batch.query_start, i, batch.slot_mapping)?;
            let new_len = self.grown(s, tokens)?;
            let (first, end) = self.tiles_written(s, new_len);
            if let Some(tile) = (first..end).find(|t| s.table[*t] < 0) {
                return Err(Error::MissingBlock { seat: seat.index(), tile });
            }
        }
        // Second pass: write the buffer.
        self.step.clear();
        for (i, &seat) in batch.seats.iter().enumerate() {
            let (first_row, tokens) = real_rows(batch.query_start, i, batch.slot_mapping)?;
            let s = &self.seats[seat.index()];
            let new_len = s.len + tokens;
            let first_slot = self.step.slots.len();
            if self.residual.is_none() {
                let slot = |t: usize| s.table[t / TILE] as i64 * TILE as i64 + (t % TILE) as i64;
                self.step.slots.extend((s.len..new_len).map(slot));
            }
            self.step.tables.extend_from_slice(&s.table);
            self.step.sequences.push(SequenceStep {
                seat: Some(seat),
                first_row,
                tokens,
                first_slot,
                old_len: s.len,
                new_len,
                old_packed: s.packed,
                new_packed: self.packed_after(s.packed, new_len),
                released: s.released,
            });
        }
        self.open_step(rows);
        Ok(())
    }

    /// Opens a step of slots (direct mode). Nothing changes unless everything is in order.
    pub(crate) fn begin_slots(&mut self, batch: &SlotBatch<'_>) -> Result<()> {
        self.no_open_step()?;
        if self.residual.is_some() {
            return Err(Error::Unsupported {
                what: "a step of slots",
                got: format!("R = {}", self.residual.unwrap_or(0)),
                why: "slots without seats are for direct mode; build the cache with CacheConfig::direct"
                    .into(),
            });
        }
        let n = batch.context_lens.len();
        let rows = Self::check_rows(batch.query_start, n, Some(batch.slot_mapping))?;
        if batch.block_tables.len() % n != 0 {
            return Err(Error::Length { what: "block_tables", expected: n, got: batch.block_tables.len() });
        }
        let width = batch.block_tables.len() / n;
        let count = self.blocks.lock().count();
        let limit = count * TILE;
        for (i, &len) in batch.context_lens.iter().enumerate() {
            let range = batch.query_start[i] as usize..batch.query_start[i + 1] as usize;
            let (_, tokens) = real_rows(batch.query_start, i, Some(batch.slot_mapping))?;
            if len < 0 || (len as usize) < tokens {
                return Err(Error::BeyondLength {
                    what: "context_lens (new tokens)",
                    got: tokens,
                    len: len.max(0) as usize,
                });
            }
            let tiles = (len as usize).div_ceil(TILE);
            if tiles > width || len as usize > self.max_tokens {
                return Err(Error::Capacity {
                    what: "context_lens (tokens)",
                    needed: len as usize,
                    available: self.max_tokens.min(width * TILE),
                    help: "give block_tables more columns, or build the cache with a larger max_tokens",
                });
            }
            let table = &batch.block_tables[i * width..][..tiles];
            if let Some(b) = table.iter().find(|b| **b < 0 || **b as usize >= count) {
                return Err(Error::OutOfRange { what: "block", got: *b as i64, limit: count });
            }
            // Each new token's slot is where the block table will look for it.
            let mut t = len as usize - tokens;
            for row in range {
                let slot = batch.slot_mapping[row];
                if slot == -1 {
                    continue;
                }
                if slot < 0 || slot as usize >= limit {
                    return Err(Error::OutOfRange { what: "slot", got: slot, limit });
                }
                let expected = table[t / TILE] as i64 * TILE as i64 + (t % TILE) as i64;
                if slot != expected {
                    return Err(Error::Unsupported {
                        what: "slot_mapping",
                        got: format!("slot {slot} for token {t} of sequence {i}"),
                        why: format!("its block table and context length put that token at slot {expected}"),
                    });
                }
                t += 1;
            }
        }
        self.sorted.clear();
        self.sorted.extend(batch.slot_mapping.iter().filter(|s| **s >= 0));
        self.sorted.sort_unstable();
        if let Some(w) = self.sorted.windows(2).find(|w| w[0] == w[1]) {
            return Err(Error::Duplicate { what: "slot", got: w[0] });
        }
        self.step.clear();
        for (i, &len) in batch.context_lens.iter().enumerate() {
            let (first_row, tokens) = real_rows(batch.query_start, i, Some(batch.slot_mapping))?;
            let first_slot = self.step.slots.len();
            self.step.slots.extend_from_slice(&batch.slot_mapping[first_row..first_row + tokens]);
            let new_len = len as usize;
            let at = self.step.tables.len();
            let copied = width.min(self.step.table_width);
            self.step.tables.extend_from_slice(&batch.block_tables[i * width..][..copied]);
            self.step.tables.resize(at + self.step.table_width, -1);
            self.step.sequences.push(SequenceStep {
                seat: None,
                first_row,
                tokens,
                first_slot,
                old_len: new_len - tokens,
                new_len,
                old_packed: new_len - tokens,
                new_packed: new_len,
                released: 0,
            });
        }
        self.open_step(rows);
        Ok(())
    }

    fn open_step(&mut self, rows: usize) {
        self.step.input_rows = rows;
        for s in &self.step.sequences {
            self.step.starts.push(s.first_row as i32);
            self.step.counts.push(s.tokens as i32);
        }
        self.step.starts.push(rows as i32);
        self.step.done.fill(false);
        self.step.open = true;
        self.step.valid = true;
    }

    /// Whether a layer may append now.
    pub(crate) fn may_append(&self, layer: usize) -> Result<()> {
        self.check_layer(layer)?;
        if !self.step.open {
            return Err(Error::StepOrder {
                layer,
                problem: "no step is open; call `begin_step` first".into(),
            });
        }
        if self.step.done[layer] {
            return Err(Error::StepOrder {
                layer,
                problem: format!("it has appended in this step; layers {:?} have not", self.step.missing()),
            });
        }
        Ok(())
    }

    fn check_layer(&self, layer: usize) -> Result<()> {
        if layer < self.layers {
            return Ok(());
        }
        Err(Error::OutOfRange { what: "layer", got: layer as i64, limit: self.layers })
    }

    /// Whether a layer may attend now.
    pub(crate) fn may_attend(&self, layer: usize) -> Result<()> {
        self.check_layer(layer)?;
        if !self.step.valid || !self.step.done[layer] {
            let problem = "`attend` comes after this layer's `append` of the same step".into();
            return Err(Error::StepOrder { layer, problem });
        }
        let Some(limit) = self.residual.map(|r| r.max(TILE)) else { return Ok(()) };
        if let Some(s) = self.step.sequences.iter().find(|s| s.tokens > limit) {
            return Err(Error::StepOrder {
                layer,
                problem: format!(
                    "{} new tokens are more than max(R, 64) = {limit}, some are already quantized; use `prefill`",
                    s.tokens
                ),
            });
        }
        Ok(())
    }

    /// A layer has appended. After the last one the step's lengths become the seats'.
    pub(crate) fn appended(&mut self, layer: usize) {
        self.step.done[layer] = true;
        if !self.step.done.iter().all(|d| *d) {
            return;
        }
        self.step.open = false;
        for s in &self.step.sequences {
            let Some(seat) = s.seat else { continue };
            let state = &mut self.seats[seat.index()];
            if self.residual.is_some() {
                self.stats.closed_tiles += ((s.new_packed - s.old_packed) / TILE) as u64;
                let again = state.decoded.min(s.new_packed).saturating_sub(s.old_packed.max(self.sinks));
                self.stats.requantized_tokens += again as u64;
            }
            (state.len, state.packed) = (s.new_len, s.new_packed);
            state.decoded = if state.decoded > state.packed { state.decoded } else { 0 };
        }
    }

    /// What is left of a cancelled step for sequence `i`: the packed length all layers agree on, and the tokens
    /// that layers which have appended hold only in a page.
    pub(crate) fn cancel_plan(&self, s: &SequenceStep) -> (usize, Option<(usize, usize)>) {
        if self.is_direct() {
            return (s.old_len, None);
        }
        let packed = s.new_packed.min(s.old_len / TILE * TILE).max(s.old_packed);
        (packed, (s.new_packed > s.old_len).then_some((packed, s.old_len)))
    }

    /// Ends the step with the old lengths, after the backend has brought all layers to `cancel_plan`.
    pub(crate) fn cancelled(&mut self) {
        for i in 0..self.step.sequences.len() {
            let s = self.step.sequences[i];
            let Some(seat) = s.seat else { continue };
            let (packed, decode) = self.cancel_plan(&s);
            let any = self.step.done.iter().any(|d| *d);
            let state = &mut self.seats[seat.index()];
            if !any {
                continue; // no layer has touched anything
            }
            let again = state.decoded.min(packed).saturating_sub(s.old_packed.max(self.sinks));
            if self.residual.is_some() {
                self.stats.requantized_tokens += again as u64;
                self.stats.closed_tiles += ((packed - s.old_packed) / TILE) as u64;
            }
            state.packed = packed;
            if let Some((_, to)) = decode.filter(|(from, to)| from < to) {
                state.decoded = to;
            }
        }
        self.step.clear();
    }

    // Cutting, copying, sharing

    /// Plans the cut of a sequence to `len` tokens; `apply_cut` makes it.
    pub(crate) fn plan_cut(&mut self, seat: Seat, len: usize) -> Result<Cut> {
        self.no_open_step()?;
        let s = self.seat(seat)?;
        if len > s.len {
            return Err(Error::BeyondLength { what: "truncate", got: len, len: s.len });
        }
        let needed = self.first_visible(len);
        if len > 0 && needed < s.released {
            return Err(Error::Released { what: "truncate", released: s.released, got: needed });
        }
        let (tile, rest) = (len / TILE, len % TILE);
        if self.residual.is_some() {
            if len >= s.packed || rest == 0 {
                return Ok(Cut::None);
            }
            return Ok(Cut::Decode { block: s.table[tile], from: tile * TILE, to: len });
        }
        let mut blocks = self.blocks.lock();
        if rest == 0 || len == s.len || blocks.refs(s.table[tile]) <= 1 {
            return Ok(Cut::None);
        }
        let to = blocks.take().ok_or(Error::Capacity {
            what: "blocks (the cut tile is shared and has to be copied)",
            needed: 1,
            available: 0,
            help: "close or truncate sequences, drop prefixes, or build the pool with more blocks",
        })?;
        Ok(Cut::Copy { from: s.table[tile], to })
    }

    /// First token that a query at position `len` or later can see.
    fn first_visible(&self, len: usize) -> usize {
        self.widest_window.map_or(0, |w| (len + 1).saturating_sub(w))
    }

    /// Makes the cut, after the backend has done its part of `cut`.
    pub(crate) fn apply_cut(&mut self, seat: Seat, len: usize, cut: Cut) {
        self.step.valid = false;
        let direct = self.is_direct();
        let s = &mut self.seats[seat.index()];
        let mut blocks = self.blocks.lock();
        s.imported.clear();
        s.len = len;
        s.decoded = s.decoded.min(len);
        if len < s.packed {
            s.packed = if direct { len } else { len / TILE * TILE };
            if let Cut::Decode { to, .. } = cut {
                s.decoded = to;
            }
            if let Cut::Copy { from, to } = cut {
                s.table[len / TILE] = to;
                blocks.release(from);
            }
        }
        if len == 0 {
            s.released = 0;
        }
        drop(blocks);
        self.unreserve(seat);
    }

    /// Makes `to` (an open seat, empty) a copy of `from`. Returns (source, copy) blocks whose bytes have to be
    /// copied: the partly filled tile of direct mode.
    pub(crate) fn fork_into(&mut self, from: Seat, to: Seat) -> Result<Option<(i32, i32)>> {
        let direct = self.is_direct();
        let source = self.seat(from)?.clone();
        let mut blocks = self.blocks.lock();
        let whole = source.packed / TILE;
        let tail = if direct && source.packed % TILE != 0 {
            let copy = blocks.take().ok_or(Error::Capacity {
                what: "blocks (a partly filled tile is copied by fork)",
                needed: 1,
                available: 0,
                help: "close or truncate sequences, drop prefixes, or build the pool with more blocks",
            })?;
            Some((source.table[whole], copy))
        } else {
            None
        };
        let s = &mut self.seats[to.index()];
        (s.len, s.packed, s.decoded, s.released) =
            (source.len, source.packed, source.decoded, source.released);
        s.imported.clear();
        s.table.fill(-1);
        s.table[..whole].copy_from_slice(&source.table[..whole]);
        s.table[..whole].iter().for_each(|b| blocks.retain(*b));
        if let Some((_, copy)) = tail {
            s.table[whole] = copy;
        }
        Ok(tail)
    }

    /// Blocks of the closed tiles among the first `tokens`, with one more owner each.
    pub(crate) fn share(&mut self, seat: Seat, tokens: usize) -> Result<Vec<i32>> {
        self.no_open_step()?;
        let s = self.seat(seat)?;
        if tokens > s.len {
            return Err(Error::BeyondLength { what: "prefix", got: tokens, len: s.len });
        }
        if s.released > 0 {
            return Err(Error::Released { what: "prefix", released: s.released, got: 0 });
        }
        let shared = s.table[..tokens.min(s.packed) / TILE].to_vec();
        let mut blocks = self.blocks.lock();
        shared.iter().for_each(|b| blocks.retain(*b));
        Ok(shared)
    }

    /// Fills an open, empty seat with shared tiles.
    pub(crate) fn adopt(&mut self, seat: Seat, shared: &[i32]) {
        let s = &mut self.seats[seat.index()];
        s.table[..shared.len()].copy_from_slice(shared);
        (s.len, s.packed) = (shared.len() * TILE, shared.len() * TILE);
        let mut blocks = self.blocks.lock();
        shared.iter().for_each(|b| blocks.retain(*b));
    }

    /// Gives back blocks wholly below `token`.
    pub(crate) fn release_before(&mut self, seat: Seat, token: usize) -> Result<usize> {
        self.no_open_step()?;
        let s = self.seat(seat)?;
        let visible = self.first_visible(s.len);
        if token > visible {
            return Err(Error::Unsupported {
                what: "release_before",
                got: token.to_string(),
                why: format!("a layer still sees token {visible} (its sliding window); release at most that"),
            });
        }
        let s = &mut self.seats[seat.index()];
        let end = token.min(s.packed) / TILE;
        let mut blocks = self.blocks.lock();
        let mut freed = 0;
        for b in &mut s.table[..end] {
            freed += (*b >= 0) as usize;
            blocks.release(std::mem::replace(b, -1));
        }
        s.released = s.released.max(end * TILE);
        Ok(freed)
    }

    // Import

    /// Checks that page (`layer`, `head`) of the tile that starts at `start` may be imported now; returns its block.
    pub(crate) fn import_target(
        &mut self,
        seat: Seat,
        layer: usize,
        head: usize,
        start: usize,
    ) -> Result<i32> {
        self.no_open_step()?;
        self.check_layer(layer)?;
        if head >= self.heads {
            return Err(Error::OutOfRange { what: "head", got: head as i64, limit: self.heads });
        }
        let s = self.seat(seat)?;
        if s.packed != s.len || s.len % TILE != 0 || start != s.len {
            return Err(Error::Page {
                problem: "a page is imported behind the closed tiles of a sequence with an empty window",
                expected: format!("token start {} with {} tokens packed", s.len, s.len),
                got: format!("token start {start} with {} tokens packed", s.packed),
            });
        }
        if s.imported.get(layer * self.heads + head).copied().unwrap_or(false) {
            return Err(Error::Duplicate { what: "imported page of layer", got: layer as i64 });
        }
        self.grown(s, TILE)?;
        let tile = start / TILE;
        let limit = s.table.len();
        match s.table.get(tile) {
            None => Err(Error::OutOfRange { what: "tile", got: tile as i64, limit }),
            Some(&b) if b >= 0 => Ok(b),
            Some(_) => {
                let block = self.blocks.lock().take().ok_or(Error::Capacity {
                    what: "blocks",
                    needed: 1,
                    available: 0,
                    help: "close or truncate sequences, drop prefixes, or build the pool with more blocks",
                })?;
                self.seats[seat.index()].table[tile] = block;
                Ok(block)
            }
        }
    }

    /// A page was imported. Returns whether the tile is complete; then the sequence is 64 tokens longer.
    pub(crate) fn imported(&mut self, seat: Seat, layer: usize, head: usize) -> bool {
        let (layers, heads) = (self.layers, self.heads);
        self.step.valid = false;
        let s = &mut self.seats[seat.index()];
        s.imported.resize(layers * heads, false);
        s.imported[layer * heads + head] = true;
        let complete = s.imported.iter().all(|d| *d);
        if complete {
            s.imported.clear();
            (s.len, s.packed) = (s.len + TILE, s.packed + TILE);
        }
        complete
    }
}

/// First row and number of the rows of sequence `i` that are not padding. Padding may stand before or behind them.
fn real_rows(query_start: &[i32], i: usize, slots: Option<&[i64]>) -> Result<(usize, usize)> {
    let (start, end) = (query_start[i] as usize, query_start[i + 1] as usize);
    let Some(slots) = slots else { return Ok((start, end - start)) };
    let real = |r: &usize| slots[*r] >= 0;
    let Some(first) = (start..end).find(real) else { return Ok((start, 0)) };
    let n = (first..end).take_while(real).count();
    match (first + n..end).find(real) {
        Some(row) => Err(Error::Unsupported {
            what: "slot_mapping",
            got: format!("padding between rows {first} and {row} of sequence {i}"),
            why: "padding (-1) stands before or behind a sequence's tokens, never between them".into(),
        }),
        None => Ok((first, n)),
    }
}
