//! Blocks and seats copied, and their bytes read and written by the host.

use super::{Cuda, STATUS_WORDS};
use crate::cache::Seat;
use crate::cuda::CacheStatus;
use crate::cuda::launch::read_status;
use crate::error::{Error, Result};
use crate::layout::{Order, convert_page};
use crate::quant::affine::LIMIT;
use crate::tensor::Dtype;
use half::{bf16, f16};

/// Sink rows and key means of a seat, as they lie on the device.
#[derive(Debug, Clone)]
pub struct CudaSnapshot {
    /// `[layer][keys, values][head][row][dim]`
    sinks: Vec<u16>,
    /// `[layer][head][key_dim]`, centred layers only.
    means: Vec<u16>,
}

impl Cuda {
    /// Copies all pages of a block.
    pub(super) fn copy_pages(&self, from: i32, to: i32) -> Result<()> {
        for layer in 0..self.config.layers.len() {
            let bytes = self.page_bytes(layer) * self.config.kv_heads;
            let at = |block: i32| self.layer_pages(layer).0 + block as u64 * bytes as u64;
            if from != to {
                // SAFETY: two different blocks of the pool.
                unsafe { self.queue.copy(at(from), at(to), bytes) }?;
            }
        }
        Ok(())
    }

    /// Copies windows, sinks and means of a seat.
    pub(super) fn copy_rows(&self, from: Seat, to: Seat) -> Result<()> {
        if from == to {
            return Ok(());
        }
        for layer in 0..self.config.layers.len() {
            for op in 0..2 {
                for (base, rows) in
                    [(self.at.windows[op], self.config.window_rows()), (self.at.sinks[op], self.config.sinks)]
                {
                    let n = self.seat_rows(op, rows);
                    let at = |seat: Seat| self.seat_address(base, layer, seat.index(), n);
                    // SAFETY: rows of two different seats.
                    unsafe { self.queue.copy(at(from), at(to), 2 * n) }?;
                }
            }
            let ((a, n), (b, _)) = (self.seat_means(layer, from.index()), self.seat_means(layer, to.index()));
            // SAFETY: means of two different seats.
            unsafe { self.queue.copy(a, b, 2 * n) }?;
        }
        Ok(())
    }

    /// Address and elements of the sinks of a seat, `[layer][keys, values]`.
    fn sink_parts(&self, seat: Seat) -> impl Iterator<Item = (u64, usize)> + '_ {
        (0..self.config.layers.len()).flat_map(move |layer| {
            [0, 1].map(|op| {
                let n = self.seat_rows(op, self.config.sinks);
                (self.seat_address(self.at.sinks[op], layer, seat.index(), n), n)
            })
        })
    }

    fn mean_parts(&self, seat: Seat) -> impl Iterator<Item = (u64, usize)> + '_ {
        (0..self.config.layers.len()).map(move |layer| self.seat_means(layer, seat.index()))
    }

    fn read_parts(&self, parts: impl Iterator<Item = (u64, usize)>) -> Result<Vec<u16>> {
        let mut out = Vec::new();
        for (address, n) in parts {
            let at = out.len();
            out.resize(at + n, 0);
            // SAFETY: rows or means of one seat, which were zeros at first.
            unsafe { self.queue.download(address, &mut out[at..]) }?;
        }
        Ok(out)
    }

    fn write_parts(&self, parts: impl Iterator<Item = (u64, usize)>, mut from: &[u16]) -> Result<()> {
        for (address, n) in parts {
            let (part, rest) = from.split_at(n);
            // SAFETY: rows or means of one seat.
            unsafe { self.queue.upload(address, part) }?;
            from = rest;
        }
        Ok(())
    }

    pub(super) fn read_seat(&self, seat: Seat) -> Result<CudaSnapshot> {
        Ok(CudaSnapshot {
            sinks: self.read_parts(self.sink_parts(seat))?,
            means: self.read_parts(self.mean_parts(seat))?,
        })
    }

    pub(super) fn write_seat(&self, seat: Seat, snapshot: &CudaSnapshot) -> Result<()> {
        self.write_parts(self.sink_parts(seat), &snapshot.sinks)?;
        self.write_parts(self.mean_parts(seat), &snapshot.means)
    }

    /// Sinks as f32, `[layer][head][key rows, value rows]`.
    pub(super) fn sinks_to_host(&self, seat: Seat) -> Result<Vec<f32>> {
        let bits = self.read_parts(self.sink_parts(seat))?;
        let value = |b: &u16| match self.config.window_dtype {
            Dtype::Bf16 => bf16::from_bits(*b).to_f32(),
            _ => f16::from_bits(*b).to_f32(),
        };
        let mut out = Vec::with_capacity(bits.len());
        self.for_each_head(|part| out.extend(bits[part].iter().map(value)));
        Ok(out)
    }

    pub(super) fn sinks_from_host(&self, seat: Seat, rows: &[f32]) -> Result<()> {
        let bits = |x: &f32| match self.config.window_dtype {
            Dtype::Bf16 => bf16::from_f32(*x).to_bits(),
            // As rows are written: finite values stay finite.
            _ if x.is_finite() => f16::from_f32(x.clamp(-LIMIT, LIMIT)).to_bits(),
            _ => f16::from_f32(*x).to_bits(),
        };
        let (mut all, mut rest) = (vec![0u16; rows.len()], rows);
        self.for_each_head(|part| {
            let (head, tail) = rest.split_at(part.len());
            all[part].iter_mut().zip(head).for_each(|(b, x)| *b = bits(x));
            rest = tail;
        });
        self.write_parts(self.sink_parts(seat), &all)
    }

    /// Where the rows of each (layer, head, operand) lie among a seat's sinks, in the order in which sinks are exported.
    fn for_each_head(&self, mut each: impl FnMut(std::ops::Range<usize>)) {
        let heads = self.config.kv_heads;
        let n = [0, 1].map(|op| self.config.sinks * self.dims()[op]);
        for layer in 0..self.config.layers.len() {
            let at = layer * heads * (n[0] + n[1]);
            for head in 0..heads {
                each(at + head * n[0]..at + (head + 1) * n[0]);
                let values = at + heads * n[0] + head * n[1];
                each(values..values + n[1]);
            }
        }
    }

    fn page_address(&self, layer: usize, head: usize, block: i32) -> u64 {
        let page = block as usize * self.config.kv_heads + head;
        self.layer_pages(layer).0 + (page * self.page_bytes(layer)) as u64
    }

    fn reorder_page(&self, layer: usize, from: Order, page: &[u8], to: Order) -> Result<Vec<u8>> {
        let (l, mut out) = (self.layer(layer), vec![0; page.len()]);
        convert_page(&l.key, &l.value, &self.config.page_layout(l), from, page, to, &mut out)?;
        Ok(out)
    }

    /// A page in row order.
    pub(super) fn page_to_host(&self, layer: usize, head: usize, block: i32) -> Result<Vec<u8>> {
        let mut page = vec![0u8; self.page_bytes(layer)];
        // SAFETY: a page of the pool, whose memory is initialised.
        unsafe { self.queue.download(self.page_address(layer, head, block), &mut page) }?;
        self.reorder_page(layer, Order::Fragment, &page, Order::Row)
    }

    pub(super) fn page_from_host(&self, layer: usize, head: usize, block: i32, page: &[u8]) -> Result<()> {
        let page = self.reorder_page(layer, Order::Row, page, Order::Fragment)?;
        // SAFETY: a page of the pool.
        unsafe { self.queue.upload(self.page_address(layer, head, block), &page) }
    }

    /// Key mean of a seat's layer and head.
    pub(super) fn mean_to_host(&self, layer: usize, seat: Seat, head: usize) -> Result<Option<Vec<f16>>> {
        let ((base, n), d) = (self.seat_means(layer, seat.index()), self.config.key_dim);
        if n == 0 {
            return Ok(None);
        }
        let mut mean = vec![f16::ZERO; d];
        // SAFETY: the means of one head.
        unsafe { self.queue.download(base + (head * d * 2) as u64, &mut mean) }?;
        Ok(Some(mean))
    }

    pub(super) fn mean_from_host(&self, layer: usize, seat: Seat, head: usize, mean: &[f16]) -> Result<()> {
        let (base, n) = self.seat_means(layer, seat.index());
        if n == 0 {
            return Ok(());
        }
        // SAFETY: the means of one head; the state machine gives one a channel.
        unsafe { self.queue.upload(base + (head * mean.len() * 2) as u64, mean) }
    }

    pub(super) fn write_lengths(&self, seat: Seat, len: usize, packed: usize) -> Result<()> {
        let address = self.at.lengths + 8 * seat.index() as u64;
        // SAFETY: the pair of one seat.
        unsafe { self.queue.upload(address, &[len as i32, packed as i32]) }
    }

    pub(super) fn status(&self) -> Result<CacheStatus> {
        let (mut words, mut faults) = ([0u64; STATUS_WORDS], [0u32; 1]);
        // SAFETY: the buffer's part for the status.
        unsafe { self.queue.download(self.at.status, &mut words) }?;
        // SAFETY: one word of the buffer.
        unsafe { self.queue.download(self.at.faults, &mut faults) }?;
        match faults {
            [0] => Ok(read_status(words)),
            [n] => Err(Error::Cuda {
                what: "pages",
                problem: format!(
                    "{n} were not found in the pool; was its memory or the cache's changed by others?"
                ),
            }),
        }
    }
}
