//! What a cache on CUDA is built with beside its configuration.

use super::memory::DeviceBuffer;
use super::queue::{CacheStream, Queue};
use super::staging::{Current, Staging};
use super::{Addresses, Cuda, DeviceMemory, Parts, tiles};
use crate::cache::{KvCache, PagePool, PagedKvCache};
use crate::config::CacheConfig;
use crate::cuda::launch::{self, STATUS_WORDS, STEP_WORDS};
use crate::cuda::{Device, check};
use crate::error::{Error, Result};
use crate::layout::TILE;
use crate::tensor::Dtype;
use std::sync::Mutex;

/// The device and the stream of a cache, and the largest step that it has memory for.
///
/// ```no_run
/// use qkv::cuda::{Cuda, CudaOptions, Device};
/// use qkv::{Bits, CacheConfig, KvCache};
///
/// # fn main() -> qkv::Result<()> {
/// let device = Device::new(0)?;
/// let stream = device.context().default_stream();
/// let config = CacheConfig::new(32, 8, 128).with_bits(Bits::B4).with_capacity(4, 32_768);
/// // Batch invariance for 32 query heads and steps of one token a sequence; 256 MB for prefill behind long prefixes.
/// let options = CudaOptions::new(&device, stream).with_fixed_split(16, 32, 1).with_prefill_scratch(256 << 20);
/// let cache = KvCache::<Cuda>::on_backend(options, config)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct CudaOptions {
    device: Device,
    stream: CacheStream,
    /// Rows of a step, where memory depends on them.
    pub(super) rows: usize,
    pub(super) split: Option<FixedSplit>,
    prefill_bytes: usize,
}

/// How attention is cut, and the most that a step has of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct FixedSplit {
    pub(super) pages: usize,
    pub(super) query_heads: usize,
    pub(super) query_tokens: usize,
}

impl CudaOptions {
    /// A cache on this device, whose work goes to this stream.
    pub fn new(device: &Device, stream: impl Into<CacheStream>) -> Self {
        Self { device: device.clone(), stream: stream.into(), rows: 16_384, split: None, prefill_bytes: 0 }
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// The most rows of a step in direct mode, and of one with padding; 16,384 without this. Other steps have no such limit.
    #[must_use]
    pub fn with_rows(self, rows: usize) -> Self {
        Self { rows, ..self }
    }

    /// Bytes in which `prefill` decodes pages once, where several blocks of query rows read them: for chunks behind long prefixes. See
    /// [`prefill_scratch`](launch::prefill_scratch); none without this. [`KvCache::scratch_bytes`] counts them.
    #[must_use]
    pub fn with_prefill_scratch(self, bytes: usize) -> Self {
        Self { prefill_bytes: bytes, ..self }
    }

    /// Batch invariance: the results of a sequence have the same bits whatever else is in the batch. `attend` cuts each sequence every
    /// `pages` pages of 64 tokens (8 to 64 are usual; see [`DeviceAttendParams::fixed_split`](launch::DeviceAttendParams)), for
    /// models of `query_heads` heads and steps of up to `query_tokens` new tokens a sequence. It takes memory for every split of
    /// every sequence, which [`KvCache::scratch_bytes`] counts; an `attend` of more is refused. Appending and prefill are
    /// invariant anyhow.
    #[must_use]
    pub fn with_fixed_split(self, pages: usize, query_heads: usize, query_tokens: usize) -> Self {
        Self { split: Some(FixedSplit { pages, query_heads, query_tokens }), ..self }
    }
}

impl KvCache<Cuda> {
    /// A cache on a device with room for `max_sequences` sequences of `max_tokens`; its work goes to `stream`
    /// (an `Arc<CudaStream>`, or [`CacheStream::from_raw`]). [`on_backend`](Self::on_backend) takes
    /// more ([`CudaOptions`]).
    ///
    /// Heads of any size are stored, but `attend` has kernels for 64, 80, 96, 112, 128 and 256 channels and for 192 of keys with 128
    /// of values: for others [`attend_workspace`](launch::attend_workspace) and `attend` are errors.
    ///
    /// # Errors
    /// As [`CacheConfig::validate`]; [`Error::Unsupported`] for an f32 window, groups of more than 256 elements and heads whose tile
    /// does not fit the device's shared memory;
    /// [`Error::Cuda`] if memory or kernels are missing.
    pub fn on_device(device: &Device, stream: impl Into<CacheStream>, config: CacheConfig) -> Result<Self> {
        Self::on_backend(CudaOptions::new(device, stream), config)
    }

    /// See [`PagedKvCache::set_stream`].
    ///
    /// # Errors
    /// As there.
    pub fn set_stream(&mut self, stream: impl Into<CacheStream>) -> Result<()> {
        self.cache.set_stream(stream)
    }

    /// See [`PagedKvCache::device_status`].
    ///
    /// # Errors
    /// As there.
    pub fn device_status(&self) -> Result<crate::cuda::CacheStatus> {
        self.cache.device_status()
    }
}

impl PagedKvCache<Cuda> {
    /// A cache on a device over a pool made for the same configuration ([`PagePool::on_device`], [`PagePool::from_device`]); its
    /// work goes to `stream` (an `Arc<CudaStream>`, or [`CacheStream::from_raw`]). [`on_backend`](Self::on_backend) takes more
    /// ([`CudaOptions`]).
    ///
    /// # Errors
    /// As [`KvCache::on_device`]; [`Error::Unsupported`] if the pool is for another configuration or device.
    pub fn on_device(
        device: &Device,
        stream: impl Into<CacheStream>,
        config: CacheConfig,
        pool: PagePool<DeviceMemory>,
    ) -> Result<Self> {
        Self::on_backend(CudaOptions::new(device, stream), config, pool)
    }

    /// Goes on with another stream. What is on the old one, which must still live, comes before; nothing is waited for. In
    /// an open step its remaining layers go to the new stream. Graphs keep what they captured.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a stream of another device or context; [`Error::Cuda`] if the driver refuses.
    pub fn set_stream(&mut self, stream: impl Into<CacheStream>) -> Result<()> {
        self.backend.queue.change(stream.into())
    }

    /// What the device counted since construction. Waits for the stream. All but `clamped_values` stay 0 unless block tables
    /// or lengths in device memory are changed by others: the host checks every step before it is launched.
    ///
    /// # Errors
    /// [`Error::Cuda`] with what work on the stream did wrong.
    pub fn device_status(&self) -> Result<crate::cuda::CacheStatus> {
        self.backend.status()
    }
}

/// A number of bytes or elements, refused if it leaves the address range.
fn product(what: &'static str, factors: &[usize]) -> Result<usize> {
    let n =
        factors.iter().try_fold(1usize, |n, x| n.checked_mul(*x)).filter(|n| *n <= isize::MAX as usize / 4);
    n.ok_or(Error::Capacity {
        what,
        needed: usize::MAX,
        available: isize::MAX as usize / 4,
        help: "build the cache with fewer sequences, layers or tokens",
    })
}

impl Cuda {
    pub(super) fn build(
        options: CudaOptions,
        config: &CacheConfig,
        pool: PagePool<DeviceMemory>,
    ) -> Result<Self> {
        config.validate()?;
        let c = config;
        let direct = c.residual.is_none();
        if !direct && c.window_dtype == Dtype::F32 {
            return Err(Error::Unsupported {
                what: "window_dtype",
                got: "F32".into(),
                why: "exact rows on the GPU are F16 or BF16; use with_window_dtype".into(),
            });
        }
        c.layers.iter().try_for_each(|l| launch::append_memory(&options.device, c, l).map(drop))?;
        check::count("rows of a step", options.rows)?;
        pool.memory().check(&options.device)?;
        let queue = Queue::new(&options.device, options.stream.clone())?;
        options.device.load_all()?;

        let dims = [c.key_dim, c.value_dim];
        let (seats, layers) = (c.max_sequences, c.layers.len());
        let mut at = Addresses::default();
        let mut parts = Parts::default();
        for (op, dim) in dims.into_iter().enumerate() {
            let of = |rows| product("window rows", &[layers, seats, c.kv_heads, rows, dim, 2]);
            at.windows[op] = parts.take(of(c.window_rows())?);
            at.sinks[op] = parts.take(of(c.sinks)?);
        }
        let mean_bytes = product("key means", &[seats, c.kv_heads, c.key_dim, 2])?;
        let centred: Vec<bool> = c.layers.iter().map(|l| l.key.centered()).collect();
        at.means = centred.iter().map(|c| if *c { parts.take(mean_bytes) } else { 0 }).collect();
        let rows = DeviceBuffer::new(&options.device, parts.0)?;

        let width = c.table_width();
        let words = product("block tables", &[seats, width + 2, 4])? + 4;
        let mut parts = Parts::default();
        at.scales = c.layers.iter().map(|_| [0; 2].map(|_: u64| parts.take(c.kv_heads * 4))).collect();
        at.lengths = parts.take(product("lengths", &[seats, 8])?);
        at.step = parts.take(product("sequences of a step", &[seats, STEP_WORDS, 4])?);
        at.slots = parts.take(if direct { options.rows * 8 } else { 0 });
        at.status = parts.take(STATUS_WORDS * 8);
        at.batch = parts.take(options.rows * 8 + words);
        at.own_step = parts.take(STEP_WORDS * 4);
        at.own_status = parts.take(STATUS_WORDS * 8);
        at.own_table = parts.take(width * 4);
        at.faults = parts.take(4);
        for (op, dim) in dims.into_iter().enumerate() {
            at.tile[op] = parts.take(product("a decoded tile", &[TILE, c.kv_heads, dim, 4])?);
        }
        let area = DeviceBuffer::new(&options.device, parts.0)?;

        for x in at.windows.iter_mut().chain(&mut at.sinks) {
            *x += rows.address();
        }
        for (mean, centred) in at.means.iter_mut().zip(centred) {
            *mean = if centred { *mean + rows.address() } else { 0 };
        }
        at.scales.iter_mut().flatten().for_each(|x| *x += area.address());
        for x in [
            &mut at.lengths,
            &mut at.step,
            &mut at.slots,
            &mut at.status,
            &mut at.batch,
            &mut at.own_step,
            &mut at.own_status,
            &mut at.own_table,
            &mut at.faults,
        ] {
            *x += area.address();
        }
        at.tile.iter_mut().for_each(|x| *x += area.address());
        let elements = match options.split {
            // Heads that `attend` has no kernel for need none; it says so when it is called.
            None => launch::attend_workspace(&options.device, c).unwrap_or(0),
            Some(s) => {
                launch::attend_workspace_fixed(c, s.pages, s.query_heads, c.max_sequences, s.query_tokens)?
            }
        };
        let workspace = DeviceBuffer::new(&options.device, product("workspace", &[elements, 4])?)?;
        let prefill =
            DeviceBuffer::new(&options.device, product("prefill scratch", &[options.prefill_bytes])?)?;
        let staging = Staging::new(&options.device, words, options.rows * 8)?;
        let mut cache = Self {
            queue,
            config: c.clone(),
            pool,
            at,
            _rows: rows,
            area,
            workspace,
            prefill,
            staging,
            current: Current::default(),
            options,
            own: Mutex::new(()),
        };
        cache.write_scales()?;
        Ok(cache)
    }

    /// Static FP8 scales, a head each.
    fn write_scales(&mut self) -> Result<()> {
        let Some(scales) = &self.config.scales else { return Ok(()) };
        for (i, l) in self.config.layers.iter().enumerate() {
            let heads = 0..self.config.kv_heads;
            let all: [Vec<f32>; 2] = [
                heads.clone().map(|h| scales.key(i, h).unwrap_or(1.0)).collect(),
                heads.map(|h| scales.value(i, h).unwrap_or(1.0)).collect(),
            ];
            for (op, f) in [&l.key, &l.value].into_iter().enumerate() {
                if f.needs_scale() {
                    // SAFETY: the scales' part of the buffer holds one f32 a head.
                    unsafe { self.queue.upload(self.at.scales[i][op], &all[op]) }?;
                }
            }
        }
        self.queue.wait()
    }

    /// Bytes of page-locked memory that hold any batch without padding.
    pub(super) fn batch_bytes(&self) -> usize {
        (self.config.max_sequences * (self.config.table_width() + 2) + 1) * 4
    }

    /// Bytes beside pages, windows, sinks and means.
    pub(super) fn scratch(&self) -> usize {
        self.area.bytes() + self.workspace.bytes() + self.prefill.bytes()
    }
}

/// Columns of the block tables of a step, enough for sequences of that many tokens.
pub(super) fn columns(longest: usize) -> usize {
    tiles(longest).max(1)
}
