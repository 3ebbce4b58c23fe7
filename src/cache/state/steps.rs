//! Steps: `begin_step` checks a batch and writes the step buffer; lengths change when every layer has appended.

use super::{SeatState, State};
use crate::cache::batch::{Batch, SlotBatch, real_rows};
use crate::cache::step::{Seat, SequenceStep};
use crate::error::{Error, Result, index};
use crate::layout::TILE;

impl State {
    /// Checks the rows of a batch; returns how many there are.
    fn check_rows(query_start: &[i32], sequences: usize, slots: Option<&[i64]>) -> Result<usize> {
        if sequences == 0 {
            return Err(Error::Length { what: "sequences of a step (at least one)", expected: 1, got: 0 });
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
        if !batch.block_tables.len().is_multiple_of(n) {
            return Err(Error::Length { what: "block_tables", expected: n, got: batch.block_tables.len() });
        }
        let width = batch.block_tables.len() / n;
        let blocks = self.blocks.lock();
        let count = blocks.count();
        let limit = count * TILE;
        for (i, &len) in batch.context_lens.iter().enumerate() {
            let range = batch.query_start[i] as usize..batch.query_start[i + 1] as usize;
            let (_, tokens) = real_rows(batch.query_start, i, Some(batch.slot_mapping))?;
            if len < 0 || (len as usize) < tokens {
                return Err(Error::Unsupported {
                    what: "context_lens",
                    got: len.to_string(),
                    why: format!("sequence {i} has {tokens} new tokens, which its length counts"),
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
                // Blocks of seats and prefixes are read here, never written.
                let block = table[t / TILE];
                if blocks.refs(block) > 0 && !blocks.is_lent(block) {
                    return Err(Error::Duplicate { what: "owner of block", got: block as i64 });
                }
                t += 1;
            }
        }
        drop(blocks);
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
                problem: format!(
                    "it has appended in this step; layers {:?} have not: append to them, or cancel_step",
                    self.step.missing()
                ),
            });
        }
        Ok(())
    }

    pub(super) fn check_layer(&self, layer: usize) -> Result<()> {
        if layer < self.layers {
            return Ok(());
        }
        Err(Error::OutOfRange { what: "layer", got: index(layer), limit: self.layers })
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
        if self.step.captured {
            return;
        }
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
}
