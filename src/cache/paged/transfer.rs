//! Reading what a cache holds, and moving pages in and out.

use super::{PagedKvCache, check_shape};
use crate::backend::{Backend, Stored};
use crate::cache::page_io;
use crate::cache::step::Seat;
use crate::error::{Error, Result, index};
use crate::layout::TILE;

impl<B: Backend> PagedKvCache<B> {
    /// Keys and values of one layer as attention sees them (decoded, un-rotated, exact rows as they are),
    /// `[len, kv_heads, dim]`, rounded to the outputs' dtype. O(len): for tests and migration, not for a step. In an open
    /// step a layer that has appended has its new length, the others their old one.
    ///
    /// # Errors
    /// [`Error::UnknownSeat`], [`Error::OutOfRange`], [`Error::Shape`]; [`Error::Released`].
    pub fn dequantize(
        &self,
        layer: usize,
        seat: Seat,
        k: &mut B::Output<'_>,
        v: &mut B::Output<'_>,
    ) -> Result<()> {
        let s = self.state.seat(seat)?;
        let limit = self.config.layers.len();
        if layer >= limit {
            return Err(Error::OutOfRange { what: "layer", got: index(layer), limit });
        }
        if s.released > 0 {
            return Err(Error::Released { what: "dequantize", released: s.released, got: 0 });
        }
        // A layer that has appended in the open step already holds the new tokens.
        let step = &self.state.step;
        let in_step =
            (step.open && step.done[layer]).then(|| step.sequences.iter().position(|x| x.seat == Some(seat)));
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
        self.backend.dequantize(layer, &stored, k, v)
    }

    /// A closed tile's page in row order with header and checksum, see [`page_io`](crate::cache::page_io).
    ///
    /// # Errors
    /// [`Error::UnknownSeat`], [`Error::StepOpen`]; [`Error::OutOfRange`] also for a tile that is not closed;
    /// [`Error::Released`].
    pub fn export_page(&self, seat: Seat, layer: usize, head: usize, tile: usize) -> Result<Vec<u8>> {
        self.state.no_open_step()?;
        let s = self.state.seat(seat)?;
        for (what, got, limit) in [
            ("layer", layer, self.config.layers.len()),
            ("head", head, self.config.kv_heads),
            ("closed tile of the sequence", tile, s.packed / TILE),
        ] {
            if got >= limit {
                return Err(Error::OutOfRange { what, got: index(got), limit });
            }
        }
        if tile * TILE < s.released {
            return Err(Error::Released { what: "export_page", released: s.released, got: tile * TILE });
        }
        let mean = self.backend.mean(layer, seat, head)?;
        let payload = self.backend.read_page(layer, head, s.table[tile])?;
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
            let held = self.backend.mean(layer, seat, head.min(self.config.kv_heads - 1))?;
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
        self.backend.write_page(layer, head, block, page.payload)?;
        if let Some(mean) = page.mean.filter(|_| token == 0) {
            self.backend.set_mean(layer, seat, head, &mean)?;
        }
        let complete = self.state.imported(seat, layer, head);
        if complete {
            self.tell_lengths(seat)?;
        }
        Ok(complete)
    }

    /// The exact first tokens of a sequence (they are not in pages), with header and checksum.
    ///
    /// # Errors
    /// [`Error::UnknownSeat`], [`Error::StepOpen`].
    pub fn export_sinks(&self, seat: Seat) -> Result<Vec<u8>> {
        self.state.no_open_step()?;
        self.state.seat(seat)?;
        Ok(page_io::write_sinks(self.config.hash(), &self.backend.read_sinks(seat)?))
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
        self.backend.write_sinks(seat, &rows)
    }
}
