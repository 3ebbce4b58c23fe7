use super::append::{LayerParts, layer_of};
use super::{DeviceAttendParams, DeviceBatch, Grid, LayerMemory, StepMemory};
use crate::config::{CacheConfig, query_group};
use crate::cuda::abi::{QKV_ROWS_EVEN, QKV_ROWS_VECTORS, QkvPrefill, QkvTensor};
use crate::cuda::device::Kernel;
use crate::cuda::{Device, DeviceSliceMut, DeviceTensor, DeviceTensorMut, RawStream, check, parameters};
use crate::error::{Error, Result};
use crate::format::Format;
use crate::layout::TILE;
use crate::tensor::Dtype;

/// Threads of a block that has so many query rows: a warp for 16, or two where values have more than 128 channels (`kSharing` of
/// `kernels/prefill_queries.cuh`).
const fn threads(value_dim: usize, rows: usize) -> usize {
    rows * if value_dim > 128 { 4 } else { 2 }
}

/// Query rows of a block: as many as its warps hold if such blocks keep all of the device's multiprocessors busy, since a block
/// decodes a tile for all its rows; half of that otherwise. Results do not depend on it, bf16 values aside
/// that are so far apart that bits are lost (`stage_rows` takes the largest of what the block sees).
fn block_rows(value_dim: usize, rows: usize, others: usize, multiprocessors: usize) -> usize {
    let blocks = others.saturating_mul(rows.div_ceil(MOST_ROWS));
    if value_dim > 128 || rows <= ROWS || blocks < multiprocessors { ROWS } else { MOST_ROWS }
}

/// Blocks of a multiprocessor that decode pages.
const DECODERS: usize = 2;

/// Query rows of a block, and of a large one.
const ROWS: usize = 64;
const MOST_ROWS: usize = 128;

/// Instances: (kernel, the one that decodes pages for it, channels of keys and of values at most), smallest first.
const INSTANCES: [(Kernel, Kernel, usize, usize); 5] = [
    (Kernel::Prefill64, Kernel::PrefillDecode64, 64, 64),
    (Kernel::Prefill96, Kernel::PrefillDecode96, 96, 96),
    (Kernel::Prefill128, Kernel::PrefillDecode128, 128, 128),
    (Kernel::Prefill192, Kernel::PrefillDecode192, 192, 128),
    (Kernel::Prefill256, Kernel::PrefillDecode256, 256, 256),
];

/// Blocks of [`ROWS`] query rows that read the same pages from which on these are decoded ahead. By instructions it pays from two on; what
/// decoded pages cost in bytes is to be measured.
const READERS: usize = 4;

/// Bytes of a decoded page, and of its two tiles: `DecodedPage` of `kernels/prefill_decode.cuh`.
const fn decoded_bytes(key_dim: usize, value_dim: usize) -> usize {
    TILE * 2 * (key_dim + 8) + TILE * 2 * value_dim + 16
}

/// What prefill does not take of a cache's step, besides shapes.
pub(crate) fn check_prefill(
    device: &Device,
    config: &CacheConfig,
    [q, k, v]: [&DeviceTensor<'_>; 3],
    params: &DeviceAttendParams<'_>,
    out: &DeviceTensorMut<'_>,
    lse: Option<&DeviceSliceMut<'_, f32>>,
) -> Result<()> {
    for (what, x) in [("q", q), ("k", k), ("v", v)] {
        if x.dtype() == Dtype::F32 {
            return Err(Error::Unsupported {
                what,
                got: "F32".into(),
                why: "prefill multiplies on f16 tensor cores; give F16 or BF16".into(),
            });
        }
    }
    instance(config)?;
    check::home(
        device,
        [
            ("q", q.device()),
            ("k", k.device()),
            ("v", v.device()),
            ("out", out.device()),
            ("lse", lse.and_then(DeviceSliceMut::device)),
            ("sink_logits", params.sink_logits.and_then(|s| s.device())),
            ("bidirectional", params.bidirectional.and_then(|s| s.device())),
        ],
    )
}

/// The kernels for heads like that.
fn instance(c: &CacheConfig) -> Result<&'static (Kernel, Kernel, usize, usize)> {
    INSTANCES.iter().find(|i| c.key_dim <= i.2 && c.value_dim <= i.3).ok_or_else(|| Error::Unsupported {
        what: "head dim",
        got: format!("{} and {}", c.key_dim, c.value_dim),
        why: "a block of prefill holds tiles of at most 256 channels in shared memory".into(),
    })
}

/// Bytes of scratch with which [`prefill`] decodes the first `tokens` visible tokens of up to `sequences` sequences once, instead of
/// once for every 64 rows (queries times the query heads of a kv head) that read them.
///
/// # Errors
/// As [`CacheConfig::validate`]; [`Error::Unsupported`] for heads of more than 256 channels; [`Error::Capacity`] for more bytes than
/// an address range has.
pub fn prefill_scratch(config: &CacheConfig, tokens: usize, sequences: usize) -> Result<usize> {
    config.validate()?;
    let (_, _, key_dim, value_dim) = *instance(config)?;
    [config.kv_heads, tokens.div_ceil(TILE), sequences]
        .iter()
        .try_fold(decoded_bytes(key_dim, value_dim), |n, x| n.checked_mul(*x))
        .filter(|n| *n <= isize::MAX as usize)
        .ok_or(Error::Capacity {
            what: "bytes of prefill scratch",
            needed: usize::MAX,
            available: isize::MAX as usize,
            help: "decode fewer tokens ahead; the rest is decoded where it is read",
        })
}

/// `QKV_ROWS_*` of a tensor of 16-bit elements.
fn rows_kind(t: &QkvTensor) -> u32 {
    let apart = t.strides[..3].iter().all(|s| s % 8 == 0);
    let vectors = apart && t.strides[3] == 1 && t.dim.is_multiple_of(8) && t.data.is_multiple_of(16);
    match vectors {
        false => 0,
        true if t.tokens > t.batch_tokens => QKV_ROWS_VECTORS,
        true => QKV_ROWS_VECTORS | QKV_ROWS_EVEN,
    }
}

/// Shared memory of an instance: `PrefillShared` of `kernels/prefill.cuh`. A tile of keys, one of values and the queries, rows of
/// f16 with 16 bytes behind each.
const fn shared_bytes(key_dim: usize, value_dim: usize, rows: usize) -> usize {
    TILE * 2 * (key_dim + 8 + value_dim + 8) + rows * 2 * (key_dim + 8)
}

/// Attention of a step's new tokens over what their sequences held before the step, decoded, plus the new tokens themselves,
/// exact: prompts and chunks of any length, in one launch. It runs after [`begin_step`](super::begin_step) and **before** this
/// layer's [`append`](super::append), on the same stream, with the same `batch`, `memory` and `step`.
///
/// `q` is `[rows, query heads, key_dim]`, `k` `[rows, kv heads, key_dim]`, `v` `[rows, kv heads, value_dim]`, each f16 or bf16
/// with any strides; `out` is `[rows, query heads, value_dim]` of f16, bf16 or f32. Query head h reads kv head
/// `h / (query heads / kv heads)`. A query sees keys up to itself, with the layer's sliding window only that many; a query in one of
/// `params.bidirectional` also sees all keys of the range. There is no ALiBi: no bias is added to
/// scores.
///
/// `lse` gets `ln(sum of exp(logits))`, `[row][query head]`. A row whose logits are all -inf has output 0 and LSE -inf (its sink
/// logit where there is one). NaN or infinity in a row of q makes that row NaN and no other; in a
/// value, its channel in the rows that see it. Rows of `out` and `lse` that belong
/// to no sequence (padding, or a sequence that the step refused) are left as they are.
///
/// `max_query_len` is the largest number of new tokens of a sequence in this step; it sizes the launch. Where a sequence has
/// more, its first `max_query_len` rows are served, the others are left as they are, and the status counts the sequence in
/// [`bad_rows`](crate::cuda::CacheStatus::bad_rows). A page that the block table does not name is left out, and counted in
/// [`missing_blocks`](crate::cuda::CacheStatus::missing_blocks) once a block of rows.
///
/// With `scratch` (16-byte aligned, of any length; what it holds does not matter) a launch before that decodes as many pages of each
/// sequence and kv head as it has room for, from the first that is seen on, where at least four blocks of 64 rows read them; others
/// are decoded where they are read. [`prefill_scratch`] says how much a prefix takes. Results may differ in last bits.
///
/// Keys, values and weights go through f16 tensor cores, sums are f32. bf16 is scaled by a power of two for each 64 tokens: a value
/// that is more than 2^14 below the largest of its 64 may lose bits, and be 0 from 2^22 below on, also for rows that do not see the
/// largest; 2^90 between the values of 64 tokens and those of others may overflow.
///
/// # Errors
/// [`Error::Shape`], [`Error::Length`] or [`Error::Address`] for tensors or memory that do not fit the configuration or each
/// other; [`Error::Unsupported`] for f32 queries, keys or values, heads of more than 256 channels, an f32 window, and
/// parameters out of range; [`Error::Capacity`] for more blocks than a launch has; [`Error::Cuda`] if the launch fails.
#[allow(clippy::too_many_arguments)]
pub fn prefill(
    device: &Device,
    stream: RawStream<'_>,
    config: &CacheConfig,
    layer: usize,
    q: &DeviceTensor<'_>,
    k: &DeviceTensor<'_>,
    v: &DeviceTensor<'_>,
    params: &DeviceAttendParams<'_>,
    max_query_len: usize,
    batch: &DeviceBatch<'_>,
    memory: &LayerMemory<'_>,
    step: &StepMemory<'_>,
    out: &mut DeviceTensorMut<'_>,
    lse: Option<DeviceSliceMut<'_, f32>>,
    scratch: Option<DeviceSliceMut<'_, u8>>,
) -> Result<()> {
    config.validate()?;
    let (c, l) = (config, layer_of(config, layer)?);
    let (rows, sequences) = (batch.rows(), batch.sequences());
    let query_heads = q.dims()[1];
    check::same_dims("q", [rows, query_heads, c.key_dim], q.dims())?;
    check::same_dims("k", [rows, c.kv_heads, c.key_dim], k.dims())?;
    check::same_dims("v", [rows, c.kv_heads, c.value_dim], v.dims())?;
    check::same_dims("out", [rows, query_heads, c.value_dim], out.dims())?;
    let group = query_group(query_heads, c.kv_heads)?;
    check_prefill(device, c, [q, k, v], params, out, lse.as_ref())?;
    let (kernel, decode, key_dim, value_dim) = instance(c)?;
    params.check(query_heads)?;
    if let Some(lse) = &lse {
        check::len("lse", rows * query_heads, lse.len())?;
    }
    if rows == 0 || sequences == 0 || max_query_len == 0 {
        return Ok(());
    }
    check::count("rows", rows)?;
    check::sizes("q", q.dims())?;
    step.check(c, sequences, rows)?;
    if let Some(lse) = &lse {
        check::address("lse", lse.address(), 4)?;
    }
    if let Some(scratch) = scratch.as_ref().filter(|s| !s.is_empty()) {
        check::address("scratch", scratch.address(), 16)?;
    }
    check::home(device, [("scratch", scratch.as_ref().and_then(DeviceSliceMut::device))])?;
    memory.home(device)?;
    step.home(device)?;
    batch.home(device)?;
    let parts = LayerParts::new(c, l, memory)?;
    let width = batch.table_width()?;
    check::address("block_tables", batch.block_tables().address(), 4)?;
    let max_query_len = max_query_len.min(rows);
    // Rows of a sequence are counted in 31 bits.
    check::count("query rows", max_query_len.saturating_mul(group))?;
    check::count("query rows", rows.saturating_mul(query_heads))?;
    let query_rows = max_query_len * group;
    let others = sequences.saturating_mul(c.kv_heads);
    let wanted = block_rows(*value_dim, query_rows, others, device.multiprocessors() as usize);
    // Keys of 192 channels leave no room for many rows on some devices.
    let fits = shared_bytes(*key_dim, *value_dim, wanted) <= device.shared_limit() as usize;
    let block_rows = if fits { wanted } else { ROWS };
    let row_blocks = query_rows.div_ceil(block_rows);
    let jobs = others.saturating_mul(row_blocks);
    if jobs > i32::MAX as usize {
        return Err(Error::Capacity {
            what: "blocks of a launch",
            needed: jobs,
            available: i32::MAX as usize,
            help: "prefill fewer sequences at a time",
        });
    }
    // f16 pages are only copied; so they are where they lie.
    let coded = [&l.key, &l.value].iter().any(|f| !matches!(f, Format::F16));
    let page_bytes = decoded_bytes(*key_dim, *value_dim);
    let decoded_pages = match &scratch {
        Some(s) if coded && query_rows.div_ceil(ROWS) >= READERS => {
            (s.len() / page_bytes / others).min(width).min(i32::MAX as usize)
        }
        _ => 0,
    };
    let shared = shared_bytes(*key_dim, *value_dim, block_rows);
    check::shared(device, c, shared)?;
    let p = QkvPrefill {
        q: q.parameters(),
        input: [k.parameters(), v.parameters()],
        out: out.as_ref().parameters(),
        format: [parameters::format(&l.key), parameters::format(&l.value)],
        at: [parameters::operand(&parts.pages.key, false), parameters::operand(&parts.pages.value, true)],
        window: parts.window,
        sink: parts.sink,
        scales: parts.scales,
        means: parts.means,
        pages: memory.pages.address(),
        step: step.step.address(),
        block_tables: batch.block_tables().address(),
        status: step.status.address(),
        lse: lse.as_ref().map_or(0, DeviceSliceMut::address),
        sink_logits: params.sink_logits.map_or(0, |x| x.address()),
        bidirectional: params.bidirectional.map_or(0, |x| x.address()),
        heads: c.kv_heads as u32,
        sequences: sequences as u32,
        rows: rows as u32,
        table_width: width as u32,
        blocks: parts.blocks as u32,
        page_bytes: parts.pages.page_bytes as u32,
        window_rows: c.window_rows() as u32,
        sinks: c.sinks as u32,
        window_dtype: parts.window_dtype,
        group: group as u32,
        ranges: params.bidirectional.map_or(0, |x| x.len() / 2) as u32,
        sliding_window: l.sliding_window.map_or(0, |w| w.min(i32::MAX as usize)) as u32,
        max_query_len: max_query_len as u32,
        row_blocks: row_blocks as u32,
        decoded_pages: decoded_pages as u32,
        decoded: scratch.as_ref().map_or(0, DeviceSliceMut::address),
        input_rows: rows_kind(&k.parameters()) | rows_kind(&v.parameters()) << 2,
        scale: params.scale_for(c.key_dim),
        softcap: params.softcap.unwrap_or(0.0),
    };
    if decoded_pages > 0 {
        let pages = others.saturating_mul(decoded_pages);
        let blocks = pages.min(DECODERS * device.multiprocessors() as usize) as u32;
        let grid = Grid { blocks, threads: 128, shared: page_bytes as u32 };
        // SAFETY: `scratch` has room for `decoded_pages` pages of each sequence and kv head, and its alignment was checked; all else
        // as below.
        unsafe { device.start(*decode, grid, stream, &p) }?;
    }
    let grid =
        Grid { blocks: jobs as u32, threads: threads(*value_dim, block_rows) as u32, shared: shared as u32 };
    // SAFETY: tensors, pages, rows, means, scales, parameters and LSE have the sizes that the configuration and the batch give,
    // and their alignment (above); views were checked against their memory; rows and blocks that the kernel reads from the
    // device are checked by it against the numbers given here before it uses them, lengths are begin_step's.
    unsafe { device.start(*kernel, grid, stream, &p) }
}
