//! Cutting sequences, sharing their tiles, and importing pages.

use super::State;
use crate::cache::step::Seat;
use crate::error::{Error, Result, index};
use crate::layout::TILE;

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
impl State {
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
                why: match self.widest_window {
                    Some(_) => {
                        format!("a layer's sliding window still sees token {visible}; release at most that")
                    }
                    None => {
                        "a layer has no sliding window and sees every token; nothing can be released".into()
                    }
                },
            });
        }
        // The last step's queries may still see what is freed here.
        self.step.valid = false;
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
            return Err(Error::OutOfRange { what: "head", got: index(head), limit: self.heads });
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
            None => Err(Error::OutOfRange { what: "tile", got: index(tile), limit }),
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
