//! The cache on CUDA: [`KvCache<Cuda>`](crate::KvCache) and [`PagedKvCache<Cuda>`](crate::PagedKvCache).
//!
//! What a step and the calls between steps do is told in [`cuda`](super), what users read first.

mod backend;
mod capture;
mod memory;
mod moves;
mod options;
mod queue;
mod staging;
mod windows;

pub use capture::CapturedStep;
pub use memory::DeviceMemory;
pub use moves::CudaSnapshot;
pub use options::CudaOptions;
pub use queue::CacheStream;
pub use staging::STAGES;

use super::launch::{DeviceBatch, LayerMemory, STATUS_WORDS, STEP_WORDS, StepMemory};
use super::{DeviceSlice, DeviceSliceMut, Pages};
use crate::cache::PagePool;
use crate::config::{CacheConfig, LayerConfig};
use crate::cuda::PageFormat;
use crate::error::Result;
use crate::format::Format;
use crate::layout::TILE;
use memory::DeviceBuffer;
use queue::Queue;
use staging::{Current, Staging};
use std::sync::Mutex;

/// The CUDA backend of a cache: pages in fragment order, window and sink rows, key means, the buffers of a step.
///
/// Users name it as the parameter of [`KvCache`](crate::KvCache) and [`PagedKvCache`](crate::PagedKvCache), whose
/// `on_device` builds one.
#[derive(Debug)]
pub struct Cuda {
    queue: Queue,
    config: CacheConfig,
    pool: PagePool<DeviceMemory>,
    /// Addresses in `_rows` and `area`.
    at: Addresses,
    _rows: DeviceBuffer,
    area: DeviceBuffer,
    workspace: DeviceBuffer,
    prefill: DeviceBuffer,
    staging: Staging,
    /// The batch on the device.
    current: Current,
    options: CudaOptions,
    /// Held from the write of `own_table` to the launches that read it: `dequantize` may be called by several threads.
    own: Mutex<()>,
}

/// Where the parts of the two buffers begin.
#[derive(Debug, Default, Clone)]
struct Addresses {
    /// `[layer][seat][head][row][dim]` of keys and values.
    windows: [u64; 2],
    sinks: [u64; 2],
    /// `[seat][head][key_dim]` of each centred layer, 0 for others.
    means: Vec<u64>,
    /// f32 `[head]` of keys and values of each layer, 0 where there are none.
    scales: Vec<[u64; 2]>,
    lengths: u64,
    step: u64,
    slots: u64,
    status: u64,
    /// What `staging` copies.
    batch: u64,
    /// A step buffer of one sequence, a status that nobody reads, and a block table: for work between steps.
    own_step: u64,
    own_status: u64,
    own_table: u64,
    /// u32: pages that launches between steps did not find. Stays 0.
    faults: u64,
    /// f32 `[64][heads][dim]` of keys and values: a decoded tile.
    tile: [u64; 2],
}

/// Deals out parts of a buffer, 256 bytes apart.
#[derive(Default)]
struct Parts(usize);

impl Parts {
    fn take(&mut self, bytes: usize) -> u64 {
        let at = self.0;
        self.0 = self.0.saturating_add(bytes).saturating_add(255) / 256 * 256;
        at as u64
    }
}

impl Cuda {
    fn layer(&self, layer: usize) -> &LayerConfig {
        &self.config.layers[layer]
    }

    fn dims(&self) -> [usize; 2] {
        [self.config.key_dim, self.config.value_dim]
    }

    /// Elements of one seat's rows in one layer: `rows` rows of all heads.
    fn seat_rows(&self, op: usize, rows: usize) -> usize {
        self.config.kv_heads * rows * self.dims()[op]
    }

    /// Address of a seat's rows of a layer.
    fn seat_address(&self, base: u64, layer: usize, seat: usize, elements: usize) -> u64 {
        base + ((layer * self.config.max_sequences + seat) * elements * 2) as u64
    }

    /// Address and elements of a seat's means of a layer; no elements where keys are not centred.
    fn seat_means(&self, layer: usize, seat: usize) -> (u64, usize) {
        let n = self.config.kv_heads * self.config.key_dim;
        match self.at.means[layer] {
            0 => (0, 0),
            base => (base + (seat * n * 2) as u64, n),
        }
    }

    fn page_bytes(&self, layer: usize) -> usize {
        self.config.page_layout(self.layer(layer)).page_bytes
    }

    fn layer_pages(&self, layer: usize) -> (u64, usize) {
        let address = self.pool.memory().address() + self.pool.bases()[layer] as u64;
        (address, self.page_bytes(layer) * self.config.kv_heads * self.pool.blocks())
    }

    fn page_format(&self, layer: usize) -> Result<PageFormat> {
        let l = self.layer(layer);
        PageFormat::new(l.key, l.value, self.config.key_dim, self.config.value_dim)
    }

    fn pages(&self, layer: usize) -> Result<Pages<'_>> {
        let (address, bytes) = self.layer_pages(layer);
        // SAFETY: the layer's part of the pool.
        let memory = unsafe { DeviceSlice::<u8>::from_raw(address, bytes) };
        Pages::new(memory, self.config.kv_heads, self.page_format(layer)?)
    }

    fn slice<T>(&self, address: u64, len: usize) -> DeviceSlice<'_, T> {
        // SAFETY: callers name parts of this cache's buffers; the stream orders all that use them.
        unsafe { DeviceSlice::from_raw(address, len) }
    }

    fn slice_mut<T>(&self, address: u64, len: usize) -> DeviceSliceMut<'_, T> {
        // SAFETY: as above; only work on the cache's stream writes them.
        unsafe { DeviceSliceMut::from_raw(address, len) }
    }

    fn layer_memory(&self, layer: usize) -> LayerMemory<'_> {
        let (c, l) = (&self.config, self.layer(layer));
        let rows = |base: u64, op: usize, rows: usize| {
            let n = self.seat_rows(op, rows);
            self.slice_mut(self.seat_address(base, layer, 0, n), c.max_sequences * n)
        };
        let (window, sinks) = (c.window_rows(), c.sinks);
        let (pages, page_bytes) = self.layer_pages(layer);
        let (means, mean_len) = self.seat_means(layer, 0);
        let scale_len = |f: &Format| if f.needs_scale() { c.kv_heads } else { 0 };
        LayerMemory {
            pages: self.slice_mut(pages, page_bytes),
            key_window: rows(self.at.windows[0], 0, window),
            value_window: rows(self.at.windows[1], 1, window),
            key_sinks: rows(self.at.sinks[0], 0, sinks),
            value_sinks: rows(self.at.sinks[1], 1, sinks),
            means: self.slice_mut(means, mean_len * c.max_sequences),
            key_scales: self.slice(self.at.scales[layer][0], scale_len(&l.key)),
            value_scales: self.slice(self.at.scales[layer][1], scale_len(&l.value)),
        }
    }

    fn step_memory(&self) -> StepMemory<'_> {
        let c = &self.config;
        StepMemory {
            lengths: self.slice_mut(self.at.lengths, 2 * c.max_sequences),
            step: self.slice_mut(self.at.step, STEP_WORDS * c.max_sequences),
            slots: self.slice_mut(self.at.slots, if c.residual.is_none() { self.options.rows } else { 0 }),
            status: self.slice_mut(self.at.status, STATUS_WORDS),
        }
    }

    /// The batch of the current step.
    fn batch(&self) -> DeviceBatch<'_> {
        self.current.on_device(self)
    }

    /// Where `prefill` decodes pages ahead.
    fn prefill_scratch(&self) -> DeviceSliceMut<'_, u8> {
        self.slice_mut(self.prefill.address(), self.prefill.bytes())
    }

    /// The workspace of `attend`.
    fn workspace(&self) -> DeviceSliceMut<'_, f32> {
        self.slice_mut(self.workspace.address(), self.workspace.bytes() / 4)
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // Copies may still read page-locked memory, and a lent pool goes back to its owner.
        let _ = self.queue.wait();
    }
}

/// Tiles of a sequence of that many tokens.
fn tiles(tokens: usize) -> usize {
    tokens.div_ceil(TILE)
}
