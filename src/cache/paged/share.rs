//! Cutting, copying and sharing sequences.

use super::PagedKvCache;
use crate::backend::Backend;
use crate::cache::blocks::SharedBlocks;
use crate::cache::prefix::Prefix;
use crate::cache::state::Cut;
use crate::cache::step::Seat;
use crate::error::{Error, Result, index};
use crate::layout::TILE;

impl<B: Backend> PagedKvCache<B> {
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
                    self.backend.decode_into_window(layer, seat, block, from, to)?;
                }
            }
            Cut::Copy { from, to } => self.backend.copy_block(from, to)?,
        }
        self.state.apply_cut(seat, len, cut);
        self.tell_lengths(seat)
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
            self.backend.copy_block(from, to)?;
        }
        self.backend.copy_seat(from, to)?;
        self.tell_lengths(to)?;
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
            return Err(Error::OutOfRange { what: "parent", got: index(*p), limit: seats.len() });
        }
        // The first child of a parent takes its seat; further children take the seats of those without a child.
        let mut free: Vec<Seat> =
            (0..seats.len()).filter(|i| !parents.contains(i)).map(|i| seats[i]).collect();
        let extra = |i: usize| parents[..i].contains(&parents[i]);
        let partial =
            |s: Seat| self.state.is_direct() && !self.state.seats[s.index()].packed.is_multiple_of(TILE);
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
                self.backend.copy_block(a, b)?;
            }
            self.backend.copy_seat(parent, to)?;
            self.tell_lengths(to)?;
            seats[i] = to;
        }
        self.state.step.valid = false;
        Ok(())
    }

    /// The first `tokens` of a sequence, rounded down to closed tiles, to start other sequences from. It may hold fewer than
    /// asked for, none of a prompt still in the window: a tile closes when R newer tokens have come. Go on with token
    /// [`Prefix::tokens`].
    ///
    /// # Errors
    /// [`Error::UnknownSeat`], [`Error::StepOpen`], [`Error::BeyondLength`], [`Error::Released`].
    pub fn prefix(&mut self, seat: Seat, tokens: usize) -> Result<Prefix<B>> {
        self.state.no_open_step()?;
        self.state.seat(seat)?;
        let snapshot = self.backend.snapshot(seat)?;
        let shared = self.state.share(seat, tokens)?;
        let (blocks, hash) = (self.state.blocks.clone(), self.config.hash());
        Ok(Prefix { shared, snapshot, blocks, hash })
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
        self.backend.restore(seat, &prefix.snapshot)?;
        self.tell_lengths(seat)?;
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
}
