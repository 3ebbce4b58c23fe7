//! Tiles closed from the window, tiles decoded into it, and everything that a sequence holds decoded.
//!
//! Between steps the append kernel is given a step of one sequence that the host made up: with as many tokens after as before it
//! closes tiles and writes no rows; with as many closed tiles after as before it writes rows and closes nothing.

use super::{Cuda, STATUS_WORDS, STEP_WORDS, tiles};
use crate::backend::Stored;
use crate::cache::Seat;
use crate::cuda::launch::{self, DeviceBatch, GatherInputs, StepMemory};
use crate::cuda::{DeviceTensor, DeviceTensorMut};
use crate::error::Result;
use crate::format::Format;
use crate::layout::Order;
use std::sync::PoisonError;

impl Cuda {
    /// Closes tiles `from / 64 .. to / 64` of a seat from its window.
    pub(super) fn close_from_window(
        &self,
        layer: usize,
        seat: Seat,
        table: &[i32],
        from: usize,
        to: usize,
    ) -> Result<()> {
        if from == to {
            return Ok(());
        }
        // SAFETY: the buffer has a table of the configuration's width.
        unsafe { self.queue.upload(self.at.own_table, &table[..tiles(to)]) }?;
        // One row that belongs to no token: the kernel leaves out sequences without rows.
        let (from, to) = (from as i32, to as i32);
        self.own_append(layer, 1, tiles(to as usize), [seat.index() as i32, 0, 1, to, to, from, to, 0], true)
    }

    /// Decodes tokens `from..to` of a block into the window.
    pub(super) fn decode_block(
        &self,
        layer: usize,
        seat: Seat,
        block: i32,
        from: usize,
        to: usize,
    ) -> Result<()> {
        // Sinks are read from their own rows.
        let first = from.max(self.config.sinks);
        if first >= to {
            return Ok(());
        }
        // SAFETY: the buffer has a table of one column or more.
        unsafe { self.queue.upload(self.at.own_table, &[block]) }?;
        let n = to - from;
        let [mut k, mut v] = self.tile_output(n)?;
        self.gather(layer, seat.index(), 1, &mut k, &mut v)?;
        let (skip, n32, packed) = ((first - from) as i32, (to - first) as i32, from as i32);
        let step = [seat.index() as i32, skip, n32, first as i32, to as i32, packed, packed, 0];
        self.own_append(layer, n, 1, step, false)
    }

    /// Views of the decoded tile, `n` tokens of keys and of values.
    fn tile_output(&self, n: usize) -> Result<[DeviceTensorMut<'_>; 2]> {
        let one = |op: usize| {
            let dims = [n, self.config.kv_heads, self.dims()[op]];
            let memory = self.slice_mut::<f32>(self.at.tile[op], dims.iter().product());
            DeviceTensorMut::thd(memory, dims)
        };
        Ok([one(0)?, one(1)?])
    }

    /// Runs the append kernel on a step of one sequence of `rows` rows, which are those of the decoded tile.
    fn own_append(
        &self,
        layer: usize,
        rows: usize,
        columns: usize,
        sequence: [i32; STEP_WORDS],
        counted: bool,
    ) -> Result<()> {
        self.own_step(sequence)?;
        let input = |op: usize| {
            let dims = [rows, self.config.kv_heads, self.dims()[op]];
            DeviceTensor::thd(self.slice::<f32>(self.at.tile[op], dims.iter().product()), dims)
        };
        let nothing = self.slice(self.at.own_step, 1);
        let tables = self.slice(self.at.own_table, columns);
        let batch = DeviceBatch::seats(nothing, self.slice(self.at.own_step, 2), tables, rows);
        let mut step = StepMemory {
            step: self.slice_mut(self.at.own_step, STEP_WORDS),
            status: self.slice_mut(if counted { self.at.status } else { self.at.own_status }, STATUS_WORDS),
            ..self.step_memory()
        };
        let (device, stream) = (&self.queue.device, self.queue.raw());
        let mut memory = self.layer_memory(layer);
        let (k, v) = (input(0)?, input(1)?);
        launch::append(device, stream, &self.config, layer, &k, &v, &batch, &mut memory, &mut step)
    }

    /// Decodes the tokens of the tiles that `own_table` names.
    fn gather(
        &self,
        layer: usize,
        seat: usize,
        columns: usize,
        k: &mut DeviceTensorMut<'_>,
        v: &mut DeviceTensorMut<'_>,
    ) -> Result<()> {
        let l = self.layer(layer);
        let scales = |f: &Format, op: usize| {
            f.needs_scale().then(|| self.slice(self.at.scales[layer][op], self.config.kv_heads))
        };
        let (mean, n) = self.seat_means(layer, seat);
        let inputs = GatherInputs {
            key_scales: scales(&l.key, 0),
            value_scales: scales(&l.value, 1),
            key_mean: (n > 0).then(|| self.slice(mean, n)),
        };
        let table = self.slice(self.at.own_table, columns);
        let faults = self.slice_mut(self.at.faults, 1);
        let (device, stream) = (&self.queue.device, self.queue.raw());
        let pages = self.pages(layer)?;
        launch::gather(device, stream, &pages, Order::Fragment, table, &inputs, k, v, faults)
    }

    /// Everything that a sequence holds in a layer.
    pub(super) fn decode_all(
        &self,
        layer: usize,
        stored: &Stored<'_>,
        k: &mut DeviceTensorMut<'_>,
        v: &mut DeviceTensorMut<'_>,
    ) -> Result<()> {
        let _own = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        let columns = tiles(stored.packed);
        if columns > 0 {
            // SAFETY: the buffer has a table of the configuration's width.
            unsafe { self.queue.upload(self.at.own_table, &stored.table[..columns]) }?;
            let (mut k, mut v) = (k.first_tokens(stored.packed), v.first_tokens(stored.packed));
            self.gather(layer, stored.seat.index(), columns, &mut k, &mut v)?;
        }
        let (device, stream) = (&self.queue.device, self.queue.raw());
        let (memory, seat) = (self.layer_memory(layer), stored.seat.index());
        launch::exact_rows(device, stream, &self.config, &memory, seat, stored.packed, k, v)
    }
}
