use super::Grid;
use super::step::{DeviceBatch, StepMemory};
use crate::config::{CacheConfig, LayerConfig};
use crate::cuda::abi::{QKV_BF16, QKV_F16, QkvAppend};
use crate::cuda::device::Kernel;
use crate::cuda::{Device, DeviceSlice, DeviceSliceMut, DeviceTensor, RawStream, check, parameters};
use crate::error::{Error, Result, index};
use crate::format::Format;
use crate::layout::{OperandLayout, PageLayout, TILE};
use crate::quant::affine::MAX_GROUP;
use crate::tensor::Dtype;

const THREADS: u32 = 128;

/// Input rows of a block in direct mode: `kRows` of `kernels/append.cu`.
const DIRECT_ROWS: usize = 8;

/// Device memory of one layer of a cache. Elements of window and sinks are f16 or bf16, as
/// [`CacheConfig::window_dtype`] says, given as their 16 bits: [`DeviceSliceMut::bits`] makes that of a slice of either.
///
/// What is empty has length 0, at any address. Rows (window, sinks, means) and pages are 16-byte aligned, scales 4-byte.
#[derive(Debug)]
pub struct LayerMemory<'a> {
    /// Pages `[blocks, kv_heads]` of [`page_bytes`] each, in fragment order; zeros at first.
    pub pages: DeviceSliceMut<'a, u8>,
    /// Keys' window, `[max_sequences, kv_heads, window_rows, key_dim]`; empty in direct mode.
    pub key_window: DeviceSliceMut<'a, u16>,
    /// Values' window.
    pub value_window: DeviceSliceMut<'a, u16>,
    /// Keys' sink rows, `[max_sequences, kv_heads, sinks, key_dim]`; empty without sinks.
    pub key_sinks: DeviceSliceMut<'a, u16>,
    /// Values' sink rows.
    pub value_sinks: DeviceSliceMut<'a, u16>,
    /// f16 `[max_sequences, kv_heads, key_dim]`: means of centred keys; empty for others.
    pub means: DeviceSliceMut<'a, u16>,
    /// `[kv_heads]`: static FP8 scales of keys; empty for other formats.
    pub key_scales: DeviceSlice<'a, f32>,
    /// The same of values.
    pub value_scales: DeviceSlice<'a, f32>,
}

impl LayerMemory<'_> {
    /// All of it is the device's, as far as that is known.
    pub(super) fn home(&self, device: &Device) -> Result<()> {
        let all = [
            ("pages", self.pages.device()),
            ("key_window", self.key_window.device()),
            ("value_window", self.value_window.device()),
            ("key_sinks", self.key_sinks.device()),
            ("value_sinks", self.value_sinks.device()),
            ("means", self.means.device()),
            ("key_scales", self.key_scales.device()),
            ("value_scales", self.value_scales.device()),
        ];
        check::home(device, all)
    }
}

/// Bytes of a page of a layer: one kv head, 64 tokens.
///
/// # Errors
/// As [`CacheConfig::validate`]; [`Error::OutOfRange`] for a layer that does not exist.
pub fn page_bytes(config: &CacheConfig, layer: usize) -> Result<usize> {
    config.validate()?;
    Ok(config.page_layout(layer_of(config, layer)?).page_bytes)
}

pub(super) fn layer_of(config: &CacheConfig, layer: usize) -> Result<&LayerConfig> {
    let limit = config.layers.len();
    config.layers.get(layer).ok_or(Error::OutOfRange { what: "layer", got: index(layer), limit })
}

/// Shared memory of a block: (tile, codes, pairs) in bytes. The same for keys and values, so each is the larger of the two.
fn shared_bytes(l: &LayerConfig, at: [&OperandLayout; 2], rows: usize) -> (usize, usize, usize) {
    let of = |f: &Format, at: &OperandLayout| {
        let half = matches!(f, Format::F16 | Format::Bf16);
        let codes = parameters::code_stride(at.dim * if half { 2 } else { 1 });
        let tile = (rows * parameters::unit_stride(f, at.dim) * 4).next_multiple_of(16);
        (tile, rows * codes, (at.pair_count * 4 * rows.div_ceil(TILE)).next_multiple_of(16))
    };
    let (k, v) = (of(&l.key, at[0]), of(&l.value, at[1]));
    (k.0.max(v.0), k.1.max(v.1), k.2.max(v.2))
}

/// Shared memory of a block as [`shared_bytes`], of a layer that the kernel takes on this device.
///
/// # Errors
/// [`Error::Unsupported`] for groups of more than [`MAX_GROUP`] elements and for heads whose tile does not fit.
pub(crate) fn append_memory(
    device: &Device,
    c: &CacheConfig,
    l: &LayerConfig,
) -> Result<(usize, usize, usize)> {
    for (what, f) in [("key format", &l.key), ("value format", &l.value)] {
        if let Some(a) = f.as_affine().filter(|a| a.group > MAX_GROUP) {
            return Err(Error::Unsupported {
                what,
                got: format!("groups of {} elements", a.group),
                why: format!("groups on the GPU have at most {MAX_GROUP} elements; use smaller ones"),
            });
        }
    }
    let pages = c.page_layout(l);
    let rows = if c.residual.is_none() { DIRECT_ROWS } else { TILE };
    let parts = shared_bytes(l, [&pages.key, &pages.value], rows);
    // A little of the limit is the kernel's own.
    check::shared(device, c, parts.0 + parts.1 + parts.2 + 1024)?;
    Ok(parts)
}

/// Element type of exact rows. Direct mode has none.
pub(super) fn window_dtype(c: &CacheConfig) -> Result<u32> {
    match c.window_dtype {
        Dtype::F16 => Ok(QKV_F16),
        Dtype::Bf16 => Ok(QKV_BF16),
        Dtype::F32 if c.residual.is_none() => Ok(QKV_F16),
        Dtype::F32 => Err(Error::Unsupported {
            what: "window_dtype",
            got: "F32".into(),
            why: "exact rows on the GPU are F16 or BF16; use with_window_dtype".into(),
        }),
    }
}

/// Blocks of a layer's pages.
fn blocks_of(memory: &LayerMemory<'_>, block_bytes: usize) -> Result<usize> {
    if !memory.pages.len().is_multiple_of(block_bytes) {
        return Err(Error::Shape {
            what: "pages",
            expected: format!(
                "a multiple of {block_bytes} bytes, which is a block (page_bytes times kv heads)"
            ),
            got: format!("{} bytes", memory.pages.len()),
        });
    }
    let blocks = memory.pages.len() / block_bytes;
    check::count("blocks", blocks)?;
    if blocks > 0 {
        check::address("pages", memory.pages.address(), 16)?;
    }
    Ok(blocks)
}

pub(super) fn rows_of(
    what: &'static str,
    memory: &DeviceSliceMut<'_, u16>,
    c: &CacheConfig,
    rows: usize,
    dim: usize,
) -> Result<u64> {
    let needed = [c.max_sequences, c.kv_heads, rows, dim].iter().try_fold(1usize, |n, x| n.checked_mul(*x));
    check::len(what, needed.unwrap_or(usize::MAX), memory.len())?;
    if memory.is_empty() {
        return Ok(0);
    }
    check::address(what, memory.address(), 16)?;
    Ok(memory.address())
}

fn scales_of(what: &'static str, memory: DeviceSlice<'_, f32>, f: &Format, heads: usize) -> Result<u64> {
    check::len(what, if f.needs_scale() { heads } else { 0 }, memory.len())?;
    if memory.is_empty() {
        return Ok(0);
    }
    check::address(what, memory.address(), 4)?;
    Ok(memory.address())
}

/// A layer's memory as kernels take it.
#[derive(Debug)]
pub(super) struct LayerParts {
    pub(super) pages: PageLayout,
    pub(super) blocks: usize,
    pub(super) window: [u64; 2],
    pub(super) sink: [u64; 2],
    pub(super) scales: [u64; 2],
    pub(super) means: u64,
    /// `QKV_F16` or `QKV_BF16`.
    pub(super) window_dtype: u32,
}

impl LayerParts {
    /// Checks sizes and alignment of everything.
    pub(super) fn new(c: &CacheConfig, l: &LayerConfig, memory: &LayerMemory<'_>) -> Result<Self> {
        let pages = c.page_layout(l);
        let blocks = blocks_of(memory, pages.page_bytes * c.kv_heads)?;
        let window_dtype = window_dtype(c)?;
        let window = c.window_rows();
        Ok(Self {
            pages,
            blocks,
            window: [
                rows_of("key_window", &memory.key_window, c, window, c.key_dim)?,
                rows_of("value_window", &memory.value_window, c, window, c.value_dim)?,
            ],
            sink: [
                rows_of("key_sinks", &memory.key_sinks, c, c.sinks, c.key_dim)?,
                rows_of("value_sinks", &memory.value_sinks, c, c.sinks, c.value_dim)?,
            ],
            scales: [
                scales_of("key_scales", memory.key_scales, &l.key, c.kv_heads)?,
                scales_of("value_scales", memory.value_scales, &l.value, c.kv_heads)?,
            ],
            means: rows_of("means", &memory.means, c, usize::from(l.key.centered()), c.key_dim)?,
            window_dtype,
        })
    }
}

/// Stores new keys and values `[rows, kv_heads, dim]` of a batch in one layer, in one launch: closes every tile that the step
/// completes (fit, codes, pairs, in fragment order), then writes window and sink rows; in direct mode each token goes to its slot.
/// `batch` and `memory` are those of [`begin_step`](super::begin_step), which comes before on the same stream.
///
/// Pages, window and sinks have the CPU backend's bits. A graph that holds this launch can be replayed while sequences grow, as
/// long as the batch has as many sequences and rows.
///
/// All memory is the caller's; addresses are enough:
///
/// ```no_run
/// use half::f16;
/// use qkv::cuda::launch::{
///     self, DeviceAttendParams, DeviceBatch, LayerMemory, STATUS_WORDS, STEP_WORDS, StepMemory,
/// };
/// use qkv::cuda::{Device, DeviceSlice, DeviceSliceMut, DeviceTensor, DeviceTensorMut, RawStream};
/// use qkv::{Bits, CacheConfig};
///
/// /// Device addresses, of whatever made them.
/// struct Engine {
///     pages: u64, rows: [u64; 4], lengths: u64, step: u64, status: u64,
///     seats: u64, query_start: u64, tables: u64, k: u64, v: u64, q: u64, out: u64, workspace: u64,
///     stream: *mut std::ffi::c_void,
/// }
///
/// /// Two sequences, in seats 0 and 1, with 200 and 7 new tokens.
/// fn step(e: &Engine) -> qkv::Result<()> {
///     let (kv_heads, dim, blocks, rows, sequences) = (8, 128, 32, 207, 2);
///     // Window and sinks are f16, groups of 64; a table has 1024 / 64 = 16 blocks.
///     let config = CacheConfig::new(1, kv_heads, dim).with_bits(Bits::B4).with_capacity(16, 1024);
///     let seats = config.max_sequences * kv_heads;
///     let (window, sinks) = (seats * config.window_rows() * dim, seats * config.sinks * dim);
///     let pages = blocks * kv_heads * launch::page_bytes(&config, 0)?;
///     // SAFETY: device memory of these lengths, which no other stream touches until this one has done the step.
///     unsafe fn at<T>(address: u64, len: usize) -> DeviceSliceMut<'static, T> {
///         unsafe { DeviceSliceMut::from_raw(address, len) }
///     }
///     unsafe {
///         let stream = RawStream::from_raw(e.stream);
///         let batch = DeviceBatch::seats(
///             DeviceSlice::from_raw(e.seats, sequences),
///             DeviceSlice::from_raw(e.query_start, sequences + 1), // 0, 200, 207
///             DeviceSlice::from_raw(e.tables, sequences * 16),
///             rows,
///         );
///         let mut step = StepMemory {
///             lengths: at(e.lengths, 2 * config.max_sequences),
///             step: at(e.step, STEP_WORDS * sequences),
///             slots: at(0, 0),
///             status: at(e.status, STATUS_WORDS),
///         };
///         let mut layer = LayerMemory {
///             pages: at(e.pages, pages),
///             key_window: at(e.rows[0], window),
///             value_window: at(e.rows[1], window),
///             key_sinks: at(e.rows[2], sinks),
///             value_sinks: at(e.rows[3], sinks),
///             means: at(0, 0),
///             key_scales: DeviceSlice::from_raw(0, 0),
///             value_scales: DeviceSlice::from_raw(0, 0),
///         };
///         let input = |address| DeviceSlice::<f16>::from_raw(address, rows * kv_heads * dim);
///         let k = DeviceTensor::thd(input(e.k), [rows, kv_heads, dim])?;
///         let v = DeviceTensor::thd(input(e.v), [rows, kv_heads, dim])?;
///         let device = Device::new(0)?;
///         launch::begin_step(&device, stream, &config, blocks, &batch, &mut step)?;
///         // Once for every layer, with its memory.
///         launch::append(&device, stream, &config, 0, &k, &v, &batch, &mut layer, &mut step)?;
///
///         // Attention of the new tokens: 32 query heads. (Of so many, `prefill` before `append` is meant for it.)
///         let heads = 32;
///         let q = DeviceTensor::thd(DeviceSlice::<f16>::from_raw(e.q, rows * heads * dim), [rows, heads, dim])?;
///         let out = at::<f16>(e.out, rows * heads * dim);
///         let mut out = DeviceTensorMut::thd(out, [rows, heads, dim])?;
///         let workspace = at::<f32>(e.workspace, launch::attend_workspace(&device, &config)?);
///         // The most new tokens of a sequence.
///         let max_query_len = 200;
///         let params = DeviceAttendParams::new();
///         launch::attend(
///             &device, stream, &config, 0, &q, &params, max_query_len, &batch, &layer, &step, &mut out, None, workspace,
///         )
///     }
/// }
/// ```
///
/// # Errors
/// [`Error::Shape`], [`Error::Length`] or [`Error::Address`] for tensors or memory that do not fit the configuration;
/// [`Error::Unsupported`] for an f32 window (rows on the GPU are f16 or bf16) and for heads whose tile does not fit the
/// device's shared memory or that have groups of more than 256 channels; [`Error::Cuda`] if the launch fails.
#[allow(clippy::too_many_arguments)]
pub fn append(
    device: &Device,
    stream: RawStream<'_>,
    config: &CacheConfig,
    layer: usize,
    k: &DeviceTensor<'_>,
    v: &DeviceTensor<'_>,
    batch: &DeviceBatch<'_>,
    memory: &mut LayerMemory<'_>,
    step: &mut StepMemory<'_>,
) -> Result<()> {
    config.validate()?;
    let (c, l) = (config, layer_of(config, layer)?);
    let (rows, sequences) = (batch.rows(), batch.sequences());
    check::same_dims("k", [rows, c.kv_heads, c.key_dim], k.dims())?;
    check::same_dims("v", [rows, c.kv_heads, c.value_dim], v.dims())?;
    if rows == 0 || sequences == 0 {
        return Ok(());
    }
    check::count("rows", rows)?;
    check::home(device, [("k", k.device()), ("v", v.device())])?;
    memory.home(device)?;
    step.home(device)?;
    batch.home(device)?;
    step.check(c, sequences, rows)?;
    let direct = c.residual.is_none();
    let parts = LayerParts::new(c, l, memory)?;
    let (pages, blocks) = (parts.pages, parts.blocks);
    let width = batch.table_width()?;
    check::address("block_tables", batch.block_tables().address(), 4)?;
    let (tile_bytes, code_bytes, pair_bytes) = append_memory(device, c, l)?;
    let shared = tile_bytes + code_bytes + pair_bytes;
    let p = QkvAppend {
        input: [k.parameters(), v.parameters()],
        format: [parameters::format(&l.key), parameters::format(&l.value)],
        at: [parameters::operand(&pages.key, false), parameters::operand(&pages.value, true)],
        window: parts.window,
        sink: parts.sink,
        scales: parts.scales,
        means: parts.means,
        pages: memory.pages.address(),
        step: step.step.address(),
        block_tables: batch.block_tables().address(),
        slots: step.slots.address(),
        status: step.status.address(),
        heads: c.kv_heads as u32,
        sequences: sequences as u32,
        rows: rows as u32,
        table_width: width as u32,
        blocks: blocks as u32,
        page_bytes: pages.page_bytes as u32,
        window_rows: c.window_rows() as u32,
        sinks: c.sinks as u32,
        window_dtype: parts.window_dtype,
        direct: u32::from(direct),
        tile_bytes: tile_bytes as u32,
        code_bytes: code_bytes as u32,
    };
    let jobs = if direct { rows.div_ceil(DIRECT_ROWS) } else { sequences + rows / TILE };
    let blocks = jobs.checked_mul(2 * c.kv_heads).filter(|n| *n <= i32::MAX as usize);
    let blocks = blocks.ok_or(Error::Capacity {
        what: "blocks of a launch",
        needed: jobs.saturating_mul(2 * c.kv_heads),
        available: i32::MAX as usize,
        help: "append fewer rows at a time",
    })?;
    let grid = Grid { blocks: blocks as u32, threads: THREADS, shared: shared as u32 };
    // SAFETY: tensors, pages, rows, means and scales have the sizes that the configuration gives and their alignment (above),
    // and views were checked against their memory; the kernel checks lengths, blocks and slots that it reads from the device
    // against the numbers given here before it uses them.
    unsafe { device.start(Kernel::Append, grid, stream, &p) }
}
