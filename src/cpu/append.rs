//! Append: closed tiles are encoded into their pages, then the remaining new tokens are written to the window;
//! in direct mode every token is encoded into its slot.
//!
//! A tile's tokens come from the window (old ones) and from the input (new ones). Input is rounded to the window
//! dtype first, so it makes no difference whether a token waited in the window: chunked and one-shot appends
//! give the same pages, bit for bit. Tiles are closed before new window rows are written, since a new row may
//! take the slot of a token that the tile still needs.

use super::memory::{Cpu, Dims, Layer};
use super::rows::RowStore;
use crate::cache::{Seat, SequenceStep, Step};
use crate::layout::TILE;
use crate::quant::page::{encode_tile, encode_token};
use crate::raw::RawSlice;
use crate::simd::Isa;
use crate::tensor::TensorRef;
use half::f16;
use rayon::prelude::*;
use std::cell::RefCell;

thread_local! {
    /// One tile in f32; grows once a thread.
    static TILE_SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// New tokens of one sequence in the input tensors: token `start + i` is row `first_row + i`.
#[derive(Clone, Copy)]
pub(super) struct Input<'a> {
    tensors: [&'a TensorRef<'a>; 2],
    first_row: usize,
    start: usize,
}

/// Closes tiles of one seat in one layer.
struct Closing<'a> {
    isa: Isa,
    layer: &'a Layer,
    dims: Dims,
    table: &'a [i32],
    layer_index: usize,
    seat: usize,
    windows: &'a [RowStore; 2],
    pages: RawSlice<'a, u8>,
    /// `[head][key_dim]` of this seat, empty if not centred.
    means: &'a [f16],
    input: Option<Input<'a>>,
}

impl Closing<'_> {
    /// The 64 tokens of a tile, `[64][dim]`, rounded to the window dtype; sinks are zero. Returns new values clamped.
    fn gather(&self, op: usize, head: usize, tile: usize, x: &mut [f32]) -> usize {
        let mut clamped = 0;
        let d = x.len() / TILE;
        for (i, row) in x.chunks_exact_mut(d).enumerate() {
            let t = tile * TILE + i;
            if t < self.dims.sinks {
                row.fill(0.0);
                continue;
            }
            match self.input {
                Some(input) if t >= input.start => {
                    input.tensors[op].read_row(input.first_row + t - input.start, head, row);
                    clamped += RowStore::round(self.dims.window_dtype, row);
                }
                _ => {
                    let w = &self.windows[op];
                    w.read(self.layer_index, self.seat, head, t % w.rows(), row);
                }
            }
        }
        clamped
    }

    fn close(&self, head: usize, tile: usize) -> u64 {
        let page_bytes = self.layer.pages.page_bytes;
        let at = (self.table[tile] as usize * self.dims.heads + head) * page_bytes;
        // SAFETY: each (block, head) page is closed by one job: the tiles of a step have different blocks.
        let page = unsafe { self.pages.part(at, page_bytes) };
        let skip = if tile == 0 { self.dims.sinks } else { 0 };
        let mean = self.means.get(head * self.dims.key_dim..(head + 1) * self.dims.key_dim);
        let (ks, vs) = self.layer.scales[head];
        let (kl, vl) = (&self.layer.pages.key, &self.layer.pages.value);
        TILE_SCRATCH.with_borrow_mut(|x| {
            x.resize(TILE * self.dims.key_dim.max(self.dims.value_dim), 0.0);
            let keys = &mut x[..TILE * self.dims.key_dim];
            let rounded = self.gather(0, head, tile, keys);
            let k = rounded + encode_tile(self.isa, &self.layer.config.key, kl, keys, skip, mean, ks, page);
            let values = &mut x[..TILE * self.dims.value_dim];
            let rounded = self.gather(1, head, tile, values);
            let v =
                rounded + encode_tile(self.isa, &self.layer.config.value, vl, values, skip, None, vs, page);
            (k + v) as u64
        })
    }

    /// Mean per channel of tile 0's keys without the sinks, over finite values, rounded to f16. The sum is the tree
    /// over the tile's 64 tokens that every group sum uses.
    fn mean(&self, head: usize, out: &mut [f16]) {
        let d = self.dims.key_dim;
        TILE_SCRATCH.with_borrow_mut(|x| {
            x.resize(TILE * self.dims.key_dim.max(self.dims.value_dim), 0.0);
            let x = &mut x[..TILE * d];
            self.gather(0, head, 0, x);
            for (c, mean) in out.iter_mut().enumerate() {
                let mut sum = [0f32; TILE];
                let mut n = 0;
                for t in self.dims.sinks..TILE {
                    let v = x[t * d + c];
                    if v.is_finite() {
                        sum[t] = v;
                        n += 1;
                    }
                }
                let mut s = TILE / 2;
                while s > 0 {
                    (0..s).for_each(|i| sum[i] += sum[i + s]);
                    s /= 2;
                }
                let m = if n > 0 { sum[0] / n as f32 } else { 0.0 };
                *mean = f16::from_f32(m.clamp(-65504.0, 65504.0));
            }
        });
    }
}

impl Cpu {
    pub(super) fn append_step(
        &mut self,
        layer: usize,
        step: &Step,
        k: &TensorRef<'_>,
        v: &TensorRef<'_>,
    ) -> u64 {
        let mut clamped = 0;
        for (i, s) in step.sequences().iter().enumerate() {
            let input = Input { tensors: [k, v], first_row: s.first_row, start: s.old_len };
            if self.dims.direct {
                clamped += self.append_direct(layer, step, s, &input);
                continue;
            }
            let Some(seat) = s.seat else { continue };
            clamped += self.close(layer, seat, step.table(i), s.old_packed, s.new_packed, Some(input));
            clamped += self.write_exact(layer, seat, s, &input);
        }
        clamped
    }

    /// Closes tiles `from / 64 .. to / 64`.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn close(
        &mut self,
        layer: usize,
        seat: Seat,
        table: &[i32],
        from: usize,
        to: usize,
        input: Option<Input<'_>>,
    ) -> u64 {
        let tiles = from / TILE..to / TILE;
        if tiles.is_empty() {
            return 0;
        }
        let dims = self.dims;
        let (n, at) = (dims.heads * dims.key_dim, seat.index() * dims.heads * dims.key_dim);
        let mut closing = Closing {
            isa: self.isa,
            layer: &self.layers[layer],
            dims,
            table,
            layer_index: layer,
            seat: seat.index(),
            windows: &self.windows,
            pages: RawSlice::new(self.pool.layer_mut(layer)),
            means: &[],
            input,
        };
        let centred = !self.means[layer].is_empty();
        if centred && tiles.start == 0 {
            for (head, mean) in self.means[layer][at..at + n].chunks_exact_mut(dims.key_dim).enumerate() {
                closing.mean(head, mean);
            }
        }
        if centred {
            closing.means = &self.means[layer][at..at + n];
        }
        let jobs = tiles.len() * dims.heads;
        let job = |j: usize| closing.close(j % dims.heads, tiles.start + j / dims.heads);
        if jobs > 1 { (0..jobs).into_par_iter().map(job).sum() } else { (0..jobs).map(job).sum() }
    }

    /// New tokens that stay exact: window rows behind the closed tiles, and sink rows. Returns values clamped.
    fn write_exact(&mut self, layer: usize, seat: Seat, s: &SequenceStep, input: &Input<'_>) -> u64 {
        let rows = self.windows[0].rows();
        let sinks = self.dims.sinks;
        TILE_SCRATCH.with_borrow_mut(|x| {
            let mut clamped = 0;
            for op in 0..2 {
                let d = if op == 0 { self.dims.key_dim } else { self.dims.value_dim };
                x.resize(x.len().max(d), 0.0);
                for t in
                    (s.old_len..sinks.min(s.new_len)).chain(s.new_packed.max(s.old_len).max(sinks)..s.new_len)
                {
                    for head in 0..self.dims.heads {
                        input.tensors[op].read_row(input.first_row + t - s.old_len, head, &mut x[..d]);
                        clamped += if t < sinks {
                            self.sinks[op].write(layer, seat.index(), head, t, &x[..d])
                        } else {
                            self.windows[op].write(layer, seat.index(), head, t % rows, &x[..d])
                        };
                    }
                }
            }
            clamped as u64
        })
    }

    fn append_direct(&mut self, layer: usize, step: &Step, s: &SequenceStep, input: &Input<'_>) -> u64 {
        let (isa, dims) = (self.isa, self.dims);
        let slots = &step.slots[s.first_slot..s.first_slot + s.tokens];
        let l = &self.layers[layer];
        let page_bytes = l.pages.page_bytes;
        let pages = RawSlice::new(self.pool.layer_mut(layer));
        let one_head = |head: usize| {
            let (ks, vs) = l.scales[head];
            TILE_SCRATCH.with_borrow_mut(|x| {
                let mut clamped = 0;
                x.resize(x.len().max(dims.key_dim.max(dims.value_dim)), 0.0);
                for (row, &slot) in (input.first_row..).zip(slots) {
                    let (block, token) = (slot as usize / TILE, slot as usize % TILE);
                    // SAFETY: this job alone touches pages of its head.
                    let page = unsafe { pages.part((block * dims.heads + head) * page_bytes, page_bytes) };
                    let k = &mut x[..dims.key_dim];
                    input.tensors[0].read_row(row, head, k);
                    clamped += encode_token(isa, &l.config.key, &l.pages.key, token, k, ks, page);
                    let v = &mut x[..dims.value_dim];
                    input.tensors[1].read_row(row, head, v);
                    clamped += encode_token(isa, &l.config.value, &l.pages.value, token, v, vs, page);
                }
                clamped as u64
            })
        };
        if slots.len() > 16 {
            (0..dims.heads).into_par_iter().map(one_head).sum()
        } else {
            (0..dims.heads).map(one_head).sum()
        }
    }
}
