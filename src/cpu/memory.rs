//! The memory of a cache on the CPU and the backend's calls on it.

use super::attend::{self, Head, Needs, Rows, Workspace};
use super::rows::RowStore;
use crate::backend::{Backend, Stored, sealed};
use crate::cache::{HostMemory, PagePool, Seat, SequenceStep, Step};
use crate::config::{AttendParams, CacheConfig, LayerConfig};
use crate::error::Result;
use crate::layout::{PageLayout, TILE};
use crate::quant::page::decode_rows;
use crate::simd::Isa;
use crate::tensor::{Dtype, TensorMut, TensorRef};
use half::f16;

/// The CPU backend of a cache: pages in row order, window and sink rows, key means, attention scratch.
///
/// Users name it only as the default parameter of [`KvCache`](crate::KvCache) and
/// [`PagedKvCache`](crate::PagedKvCache).
#[derive(Debug)]
pub struct Cpu {
    pub(super) isa: Isa,
    pub(super) layers: Vec<Layer>,
    pub(super) dims: Dims,
    pub(super) pool: PagePool,
    pub(super) windows: [RowStore; 2],
    pub(super) sinks: [RowStore; 2],
    /// `[seat][head][key_dim]` of each centred layer, empty elsewhere.
    pub(super) means: Vec<Vec<f16>>,
    workspace: Workspace,
    /// What a step of the largest batch needs of the workspace; query heads become known with the first query.
    needs: Needs,
}

/// What all layers share.
#[derive(Debug, Clone, Copy)]
pub(super) struct Dims {
    pub(super) heads: usize,
    pub(super) key_dim: usize,
    pub(super) value_dim: usize,
    pub(super) sinks: usize,
    pub(super) direct: bool,
    pub(super) window_dtype: Dtype,
}

/// One layer.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) config: LayerConfig,
    pub(super) pages: PageLayout,
    /// Static FP8 scales of keys and values, a head each.
    pub(super) scales: Vec<(f32, f32)>,
}

/// Sink rows and key means of a seat.
#[derive(Debug, Clone)]
pub struct CpuSnapshot {
    sinks: Vec<f32>,
    /// `[layer][head][key_dim]`, centred layers only.
    means: Vec<Vec<f16>>,
}

impl sealed::Sealed for Cpu {}

impl Cpu {
    fn mean_of(&self, layer: usize, seat: usize, head: usize) -> Option<&[f16]> {
        let d = self.dims.key_dim;
        self.means[layer].get((seat * self.dims.heads + head) * d..)?.get(..d)
    }

    /// Attention over the cache after the step's append, or before it and over the new tokens (`fresh`).
    #[allow(clippy::too_many_arguments)]
    fn run_attention(
        &mut self,
        layer: usize,
        step: &Step,
        q: &TensorRef<'_>,
        fresh: Option<(&TensorRef<'_>, &TensorRef<'_>)>,
        params: &AttendParams<'_>,
        out: &mut TensorMut<'_>,
        lse: Option<&mut &mut [f32]>,
    ) {
        let mut workspace = std::mem::take(&mut self.workspace);
        workspace.reserve(Needs { query_heads: q.dims()[1], ..self.needs });
        let head_of = |i: usize, head: usize| self.head(layer, step, i, head, fresh);
        let batch = attend::Batch { query_start: &step.starts, queries: Some(&step.counts) };
        let (heads, window) = (self.dims.heads, self.layers[layer].config.sliding_window);
        let lse = lse.map(|l| &mut **l);
        attend::attend(self.isa, &head_of, &batch, heads, q, params, window, out, lse, &mut workspace);
        self.workspace = workspace;
    }

    /// One head of one sequence of a step: before its new tokens where those come as `fresh`, else after them.
    fn head<'a>(
        &'a self,
        layer: usize,
        step: &'a Step,
        i: usize,
        head: usize,
        fresh: Option<(&'a TensorRef<'a>, &'a TensorRef<'a>)>,
    ) -> Head<'a> {
        let s: &SequenceStep = &step.sequences()[i];
        let l = &self.layers[layer];
        let seat = s.seat.map_or(0, Seat::index);
        let rows = |store: &'a [RowStore; 2]| {
            let one = |r: &'a RowStore| Rows { data: r.head(layer, seat, head), capacity: r.rows() };
            (one(&store[0]), one(&store[1]))
        };
        let before = fresh.is_some();
        let (len, packed) = if before { (s.old_len, s.old_packed) } else { (s.new_len, s.new_packed) };
        Head {
            key: &l.config.key,
            value: &l.config.value,
            layout: &l.pages,
            pages: self.pool.layer(layer),
            blocks: step.table(i),
            kv_heads: self.dims.heads,
            head,
            len,
            packed,
            sinks: self.dims.sinks,
            sink_rows: rows(&self.sinks),
            window: rows(&self.windows),
            mean: if packed > 0 { self.mean_of(layer, seat, head) } else { None },
            scales: l.scales[head],
            first: s.released,
            fresh: fresh.map(|(k, v)| (k, v, s.first_row, s.tokens)),
        }
    }

    /// All tokens of keys (`op` 0) or values (1), head by head, a tile at a time.
    fn dequantize_operand(&self, op: usize, layer: usize, stored: &Stored<'_>, out: &mut TensorMut<'_>) {
        let (l, seat) = (&self.layers[layer], stored.seat.index());
        let (format, at) =
            if op == 0 { (&l.config.key, &l.pages.key) } else { (&l.config.value, &l.pages.value) };
        let mut x = vec![0f32; TILE * at.dim];
        for head in 0..self.dims.heads {
            let mean = if op == 0 { self.mean_of(layer, seat, head) } else { None };
            let scale = if op == 0 { l.scales[head].0 } else { l.scales[head].1 };
            for start in (0..stored.packed).step_by(TILE) {
                let n = TILE.min(stored.packed - start);
                let page = self.page(layer, head, stored.table[start / TILE]);
                decode_rows(self.isa, format, at, page, 0..n, scale, mean, &mut x[..n * at.dim]);
                for (i, row) in x[..n * at.dim].chunks_exact(at.dim).enumerate() {
                    out.write_row(start + i, head, row);
                }
            }
            let row = &mut x[..at.dim];
            let rows = self.windows[op].rows();
            for t in stored.packed..stored.len {
                self.windows[op].read(layer, seat, head, t % rows, row);
                out.write_row(t, head, row);
            }
            for t in 0..self.dims.sinks.min(stored.len) {
                self.sinks[op].read(layer, seat, head, t, row);
                out.write_row(t, head, row);
            }
        }
    }

    /// The page of a block and head.
    fn page(&self, layer: usize, head: usize, block: i32) -> &[u8] {
        let bytes = self.layers[layer].pages.page_bytes;
        &self.pool.layer(layer)[(block as usize * self.dims.heads + head) * bytes..][..bytes]
    }
}

impl Backend for Cpu {
    type Tensor<'a> = TensorRef<'a>;
    type Output<'a> = TensorMut<'a>;
    type Lse<'a> = &'a mut [f32];
    type Params<'a> = AttendParams<'a>;
    type Snapshot = CpuSnapshot;
    type Memory = HostMemory;
    type Context = ();

    fn describe(tensor: &TensorRef<'_>) -> ([usize; 3], Dtype) {
        (tensor.dims(), tensor.dtype())
    }

    fn describe_output(tensor: &TensorMut<'_>) -> ([usize; 3], Dtype) {
        (tensor.dims(), tensor.dtype())
    }

    fn lse_len(lse: &&mut [f32]) -> usize {
        lse.len()
    }

    fn check_params(params: &AttendParams<'_>, query_heads: usize) -> Result<()> {
        params.check(query_heads)
    }

    fn bidirectional(params: &AttendParams<'_>) -> Option<String> {
        (!params.bidirectional.is_empty()).then(|| format!("{:?}", params.bidirectional))
    }

    fn new_pool(_: &(), config: &CacheConfig, blocks: usize) -> Result<PagePool> {
        PagePool::new(config, blocks)
    }

    fn new(_: (), config: &CacheConfig, pool: PagePool) -> Result<Self> {
        let c = config;
        let store =
            |rows, dim| RowStore::new(c.window_dtype, c.layers.len(), c.max_sequences, c.kv_heads, rows, dim);
        let layers = c.layers.iter().enumerate().map(|(i, l)| Layer {
            config: *l,
            pages: c.page_layout(l),
            scales: (0..c.kv_heads)
                .map(|h| {
                    let s = c.scales.as_ref();
                    let key = s.and_then(|s| s.key(i, h)).filter(|_| l.key.needs_scale());
                    let value = s.and_then(|s| s.value(i, h)).filter(|_| l.value.needs_scale());
                    (key.unwrap_or(1.0), value.unwrap_or(1.0))
                })
                .collect(),
        });
        let needs = Needs {
            sequences: c.max_sequences,
            tokens: c.max_tokens,
            query_heads: c.kv_heads,
            key_dim: c.key_dim,
            value_dim: c.value_dim,
        };
        let mean_len =
            |l: &LayerConfig| if l.key.centered() { c.max_sequences * c.kv_heads * c.key_dim } else { 0 };
        Ok(Self {
            isa: Isa::detect(),
            layers: layers.collect(),
            dims: Dims {
                heads: c.kv_heads,
                key_dim: c.key_dim,
                value_dim: c.value_dim,
                sinks: c.sinks,
                direct: c.residual.is_none(),
                window_dtype: c.window_dtype,
            },
            pool,
            windows: [store(c.window_rows(), c.key_dim), store(c.window_rows(), c.value_dim)],
            sinks: [store(c.sinks, c.key_dim), store(c.sinks, c.value_dim)],
            means: c.layers.iter().map(|l| vec![f16::ZERO; mean_len(l)]).collect(),
            workspace: Workspace::new(needs),
            needs,
        })
    }

    fn pool(&self) -> &PagePool {
        &self.pool
    }

    fn scratch_bytes(&self) -> usize {
        self.workspace.bytes()
    }

    fn clamped(&self) -> u64 {
        0
    }

    fn set_lengths(&mut self, _: Seat, _: usize, _: usize) -> Result<()> {
        Ok(())
    }

    fn begin(&mut self, _: &Step) -> Result<()> {
        Ok(())
    }

    fn append(&mut self, layer: usize, step: &Step, k: &TensorRef<'_>, v: &TensorRef<'_>) -> Result<u64> {
        Ok(self.append_step(layer, step, k, v))
    }

    fn attend(
        &mut self,
        layer: usize,
        step: &Step,
        q: &TensorRef<'_>,
        params: &AttendParams<'_>,
        out: &mut TensorMut<'_>,
        lse: Option<&mut &mut [f32]>,
    ) -> Result<()> {
        self.run_attention(layer, step, q, None, params, out, lse);
        Ok(())
    }

    fn prefill(
        &mut self,
        layer: usize,
        step: &Step,
        q: &TensorRef<'_>,
        k: &TensorRef<'_>,
        v: &TensorRef<'_>,
        params: &AttendParams<'_>,
        out: &mut TensorMut<'_>,
        lse: Option<&mut &mut [f32]>,
    ) -> Result<()> {
        self.run_attention(layer, step, q, Some((k, v)), params, out, lse);
        Ok(())
    }

    fn close_tiles(
        &mut self,
        layer: usize,
        seat: Seat,
        table: &[i32],
        from: usize,
        to: usize,
    ) -> Result<u64> {
        Ok(self.close(layer, seat, table, from, to, None))
    }

    fn decode_into_window(
        &mut self,
        layer: usize,
        seat: Seat,
        block: i32,
        from: usize,
        to: usize,
    ) -> Result<()> {
        let n = to - from;
        for head in 0..self.dims.heads {
            let l = &self.layers[layer];
            let mean = self.mean_of(layer, seat.index(), head);
            let (ks, vs) = l.scales[head];
            let mut k = vec![0f32; n * self.dims.key_dim];
            let mut v = vec![0f32; n * self.dims.value_dim];
            let page = self.page(layer, head, block);
            let tokens = from % TILE..from % TILE + n;
            decode_rows(self.isa, &l.config.key, &l.pages.key, page, tokens.clone(), ks, mean, &mut k);
            decode_rows(self.isa, &l.config.value, &l.pages.value, page, tokens, vs, None, &mut v);
            for (op, x) in [(0, &k), (1, &v)] {
                let d = x.len() / n.max(1);
                let rows = self.windows[op].rows();
                for (i, row) in x.chunks_exact(d.max(1)).enumerate() {
                    self.windows[op].write(layer, seat.index(), head, (from + i) % rows, row);
                }
            }
        }
        Ok(())
    }

    fn copy_block(&mut self, from: i32, to: i32) -> Result<()> {
        for layer in 0..self.layers.len() {
            let n = self.layers[layer].pages.page_bytes * self.dims.heads;
            let pages = self.pool.layer_mut(layer);
            pages.copy_within(from as usize * n..(from as usize + 1) * n, to as usize * n);
        }
        Ok(())
    }

    fn copy_seat(&mut self, from: Seat, to: Seat) -> Result<()> {
        let layers = self.layers.len();
        for store in self.windows.iter_mut().chain(&mut self.sinks) {
            store.copy_seat(layers, from.index(), to.index());
        }
        let n = self.dims.heads * self.dims.key_dim;
        for means in self.means.iter_mut().filter(|m| !m.is_empty()) {
            means.copy_within(from.index() * n..(from.index() + 1) * n, to.index() * n);
        }
        Ok(())
    }

    fn snapshot(&self, seat: Seat) -> Result<CpuSnapshot> {
        let n = self.dims.heads * self.dims.key_dim;
        let means = |m: &Vec<f16>| m.get(seat.index() * n..(seat.index() + 1) * n).unwrap_or(&[]).to_vec();
        Ok(CpuSnapshot { sinks: self.read_sinks(seat)?, means: self.means.iter().map(means).collect() })
    }

    fn restore(&mut self, seat: Seat, snapshot: &CpuSnapshot) -> Result<()> {
        self.write_sinks(seat, &snapshot.sinks)?;
        for (all, one) in self.means.iter_mut().zip(&snapshot.means) {
            if !one.is_empty() {
                all[seat.index() * one.len()..(seat.index() + 1) * one.len()].copy_from_slice(one);
            }
        }
        Ok(())
    }

    fn dequantize(
        &self,
        layer: usize,
        stored: &Stored<'_>,
        k: &mut TensorMut<'_>,
        v: &mut TensorMut<'_>,
    ) -> Result<()> {
        self.dequantize_operand(0, layer, stored, k);
        self.dequantize_operand(1, layer, stored, v);
        Ok(())
    }

    fn read_page(&self, layer: usize, head: usize, block: i32) -> Result<Vec<u8>> {
        Ok(self.page(layer, head, block).to_vec())
    }

    fn write_page(&mut self, layer: usize, head: usize, block: i32, page: &[u8]) -> Result<()> {
        let at = (block as usize * self.dims.heads + head) * page.len();
        self.pool.layer_mut(layer)[at..at + page.len()].copy_from_slice(page);
        Ok(())
    }

    fn mean(&self, layer: usize, seat: Seat, head: usize) -> Result<Option<Vec<f16>>> {
        Ok(self.mean_of(layer, seat.index(), head).map(<[f16]>::to_vec))
    }

    fn set_mean(&mut self, layer: usize, seat: Seat, head: usize, mean: &[f16]) -> Result<()> {
        let at = (seat.index() * self.dims.heads + head) * mean.len();
        self.means[layer][at..at + mean.len()].copy_from_slice(mean);
        Ok(())
    }

    fn read_sinks(&self, seat: Seat) -> Result<Vec<f32>> {
        let mut out = Vec::new();
        for layer in 0..self.layers.len() {
            for head in 0..self.dims.heads {
                for (op, d) in [(0, self.dims.key_dim), (1, self.dims.value_dim)] {
                    for row in 0..self.dims.sinks {
                        let at = out.len();
                        out.resize(at + d, 0.0);
                        self.sinks[op].read(layer, seat.index(), head, row, &mut out[at..]);
                    }
                }
            }
        }
        Ok(out)
    }

    fn write_sinks(&mut self, seat: Seat, rows: &[f32]) -> Result<()> {
        let mut rest = rows;
        for layer in 0..self.layers.len() {
            for head in 0..self.dims.heads {
                for (op, d) in [(0, self.dims.key_dim), (1, self.dims.value_dim)] {
                    for row in 0..self.dims.sinks {
                        let (x, tail) = rest.split_at(d);
                        self.sinks[op].write(layer, seat.index(), head, row, x);
                        rest = tail;
                    }
                }
            }
        }
        Ok(())
    }
}
