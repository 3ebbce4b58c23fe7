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

mod share;
mod steps;

use super::blocks::SharedBlocks;
use super::step::{Seat, Step};

use crate::config::CacheConfig;
use crate::error::{Error, Result, index};
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
pub(crate) use share::Cut;

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

    /// Whether a seat has this block.
    pub(crate) fn is_owned(&self, block: i32) -> bool {
        block >= 0 && self.seats.iter().any(|s| s.table.contains(&block))
    }

    /// Puts a block taken with `allocate_block` into the table; the seat owns it from here on.
    pub(crate) fn set_block(&mut self, seat: Seat, tile: usize, block: i32) -> Result<()> {
        let s = self.seat(seat)?;
        let limit = s.table.len();
        let current =
            *s.table.get(tile).ok_or(Error::OutOfRange { what: "tile", got: index(tile), limit })?;
        if current >= 0 {
            return Err(Error::Duplicate { what: "block of tile", got: tile as i64 });
        }
        if tile * TILE < s.packed {
            return Err(Error::Released { what: "set_block", released: s.released, got: tile * TILE });
        }
        let mut blocks = self.blocks.lock();
        blocks.check_lent(block)?;
        blocks.take_over(block);
        drop(blocks);
        self.seat_mut(seat).table[tile] = block;
        Ok(())
    }
}
