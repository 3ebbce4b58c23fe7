use super::append::{LayerParts, layer_of};
use super::instances::{Instance, instance};
use super::{DeviceAttendParams, DeviceBatch, Grid, LayerMemory, StepMemory};
use crate::config::{CacheConfig, LayerConfig, query_group};
use crate::cuda::abi::QkvAttend;
use crate::cuda::device::Kernel;
use crate::cuda::{Device, DeviceSliceMut, DeviceTensor, DeviceTensorMut, RawStream, check, parameters};
use crate::error::{Error, Result};
use crate::tensor::Dtype;

const THREADS: u32 = 128;
/// Exact rows that are one item of work, as a page is.
const ITEM_ROWS: usize = 16;

/// f32 elements of workspace that [`attend`] needs on this device, whatever the batch, unless splits are fixed.
///
/// # Errors
/// As [`CacheConfig::validate`]; [`Error::Unsupported`] for head dims without a kernel.
pub fn attend_workspace(device: &Device, config: &CacheConfig) -> Result<usize> {
    config.validate()?;
    config.layers.iter().try_fold(0, |most, l| Ok(most.max(layer_workspace(device, config, l)?)))
}

/// The part of one layer.
fn layer_workspace(device: &Device, c: &CacheConfig, l: &LayerConfig) -> Result<usize> {
    let mut most = 0;
    // Any number of columns, on both paths.
    for (columns, integer) in [(1, true), (1, false), (9, false)] {
        let i = instance((c.key_dim, c.value_dim), l, columns, integer)?;
        most = most.max(i.blocks(device) as usize * 2 * place(i, c));
    }
    Ok(most)
}

/// f32 elements of workspace that [`attend`] needs with [`fixed_split`](DeviceAttendParams::fixed_split) `pages`, for batches of
/// up to `sequences` sequences that have up to `max_query_len` new tokens, of `query_heads` heads: room for every split of every
/// sequence as long as the configuration allows.
///
/// # Errors
/// As [`CacheConfig::validate`]; [`Error::Unsupported`] for head dims without a kernel, no pages or query heads that kv heads do
/// not divide; [`Error::Capacity`] if there are more than 2^31 splits.
pub fn attend_workspace_fixed(
    config: &CacheConfig,
    pages: usize,
    query_heads: usize,
    sequences: usize,
    max_query_len: usize,
) -> Result<usize> {
    config.validate()?;
    DeviceAttendParams::new().with_fixed_split(pages).check(query_heads)?;
    let group = query_group(query_heads, config.kv_heads)?;
    let mut most = 0;
    for l in &config.layers {
        for integer in [false, true] {
            let i = instance((config.key_dim, config.value_dim), l, group, integer)?;
            let units = column_blocks(i, group, max_query_len)
                .saturating_mul(config.kv_heads)
                .saturating_mul(sequences);
            most = most.max(places(config, units, pages, config.table_width())? * place(i, config));
        }
    }
    Ok(most)
}

/// f32 elements of a partial result.
fn place(i: &Instance, c: &CacheConfig) -> usize {
    i.columns * (c.value_dim + 2)
}

/// Partial results of so many units in splits of `pages`, over block tables of `width`.
fn places(c: &CacheConfig, units: usize, pages: usize, width: usize) -> Result<usize> {
    let items = width + c.window_rows().div_ceil(ITEM_ROWS) + usize::from(c.sinks > 0);
    let chunks = items.div_ceil(pages);
    let n = if chunks > 1 { units.saturating_mul(chunks) } else { 0 };
    if n > i32::MAX as usize {
        return Err(Error::Capacity {
            what: "splits of a launch (sequences x kv heads x column blocks x splits of a sequence)",
            needed: n,
            available: i32::MAX as usize,
            help: "attend fewer sequences at a time, or use larger splits",
        });
    }
    Ok(n)
}

/// Units of a kv head of a sequence.
fn column_blocks(i: &Instance, group: usize, query_tokens: usize) -> usize {
    group.saturating_mul(query_tokens).div_ceil(i.columns)
}

/// Whether queries and weights may be in fixed point: not where 8-bit products are slow.
fn integer_is_fast(device: &Device) -> bool {
    device.compute_capability() != 103
}

/// Attention of the step's new tokens over one layer, as the cache is after this layer's [`append`](super::append): pages, window
/// and sinks, in one launch, and a small second one that joins what blocks shared.
///
/// `q` is `[rows, query heads, key_dim]` in f16 or bf16, `out` `[rows, query heads, value_dim]` in any type; `lse`, f32
/// `[rows, query heads]`, gets natural logarithms. Query head h reads kv head `h / (query heads / kv heads)`. Query i of a sequence's
/// n stands at token `len - n + i` and sees tokens up to itself, with a sliding window only that many. A row that sees
/// nothing has output 0 and LSE -inf (its sink logit where there is one). A row with NaN or infinity in its query is NaN.
/// A value of NaN or infinity makes its channel NaN in the rows that see its token, and may do so in rows of the same sequence that do
/// not (for which it lies outside the sliding window, or is newer): what such a row multiplies by 0 is NaN. [`prefill`](super::prefill) looks for them.
/// A key of NaN makes NaN the rows that see its token, or with per-channel keys any token of its group; so does infinity, but in FP8 pages,
/// where it is the largest number (on the CPU an exact key of infinity may have weight 0).
/// Rows of no sequence are left as they are.
///
/// Outputs are within about twice the error of f16 arithmetic on decoded elements, and beyond that:
///
/// * Affine per-token values: up to 2^-12 of their group's range, which is `2^bits - 1` steps (a channel far from the others of its group;
///   8 bits and values below 1e-5, where steps are as small as f16 has them and few codes are used).
/// * Affine per-channel keys: all scores of a group of tokens may be off by up to 2^-12 of a channel's range in it, times the query (a token far
///   from the others). Up to 4 rows: by up to 2^-15 of the largest range for each channel, should all round alike; ranges that add less than
///   5.5 to a logit count in the pages behind as well. Channels whose steps are 2^14 times smaller than another's of the group, where that is 2
///   or more, lose bits.
/// * Up to 4 rows and affine formats: queries are 16-bit integers relative to their largest element (per-channel keys: two f16 numbers for
///   mins), so elements 2^6 (2^14) times smaller have fewer bits than f16. It shows where the large element meets keys that are nearly 0;
///   [`with_exact_queries`](DeviceAttendParams::with_exact_queries) takes the f16 path.
/// * Weights times steps, or times scales of tokens, are f16 numbers relative to the largest step: values of groups or tokens some 2^24
///   times smaller than others of the sequence lose bits.
/// * Sizes that no model has: a softcap c costs scores up to 2^-24 c (use none instead of 10^4 and more); logits beyond 10^7 and queries beyond
///   10^30 may give NaN.
///
/// It is made for decoding and speculation: up to 16 rows of a kv head (queries times its query heads) share one pass over the pages, or
/// 8 with heads of 112 and 256 channels and keys of 192; more take a pass for each 16 or 8. Use [`prefill`](super::prefill) for long
/// chunks.
///
/// `max_query_len` is the most new tokens that a sequence of the batch has; 0 is nothing to do. One that has more is left out, and counted in the
/// status as `bad_rows`. A page whose block is outside the pool takes no part and is counted as `missing_blocks`.
///
/// `batch`, `memory` and `step` are those of `begin_step` and `append`, which come before on the same stream. `workspace` has
/// [`attend_workspace`] elements; what it holds does not matter, but no other launch may use it at the same time. For a given batch
/// and device the result has the same bits every time.
///
/// With [`fixed_split`](DeviceAttendParams::fixed_split) a sequence's results also have the same bits whatever else is in the batch,
/// wherever it stands there, whatever `max_query_len` is, and however many multiprocessors the device has: work is cut where the sequence says,
/// not where it would be even, and the kernel follows the number of query heads alone. `workspace` then has
/// [`attend_workspace_fixed`] elements.
///
/// # Errors
/// [`Error::Shape`], [`Error::Length`] or [`Error::Address`] for tensors or memory that do not fit the configuration;
/// [`Error::Unsupported`] for f32 queries, bidirectional ranges, factors that are not finite, query heads that kv heads do not
/// divide, or head dims without a kernel; [`Error::Cuda`] if a launch fails.
#[allow(clippy::too_many_arguments)]
pub fn attend(
    device: &Device,
    stream: RawStream<'_>,
    config: &CacheConfig,
    layer: usize,
    q: &DeviceTensor<'_>,
    params: &DeviceAttendParams<'_>,
    max_query_len: usize,
    batch: &DeviceBatch<'_>,
    memory: &LayerMemory<'_>,
    step: &StepMemory<'_>,
    out: &mut DeviceTensorMut<'_>,
    lse: Option<DeviceSliceMut<'_, f32>>,
    workspace: DeviceSliceMut<'_, f32>,
) -> Result<()> {
    config.validate()?;
    let (c, l) = (config, layer_of(config, layer)?);
    let (rows, sequences) = (batch.rows(), batch.sequences());
    let query_heads = q.dims()[1];
    let no = |what, got: String, why: &str| Err(Error::Unsupported { what, got, why: why.into() });
    let group = query_group(query_heads, c.kv_heads)?;
    check::same_dims("q", [rows, query_heads, c.key_dim], q.dims())?;
    check::same_dims("out", [rows, query_heads, c.value_dim], out.dims())?;
    check::sizes("q", q.dims())?;
    params.check(query_heads)?;
    if q.dtype() == Dtype::F32 {
        return no("q", "F32".into(), "queries on the GPU are F16 or BF16; convert them");
    }
    if params.bidirectional.is_some_and(|b| !b.is_empty()) {
        return no("bidirectional", "ranges".into(), "only prefill takes them");
    }
    if let Some(lse) = &lse {
        check::len("lse", rows * query_heads, lse.len())?;
        if !lse.is_empty() {
            check::address("lse", lse.address(), 4)?;
        }
    }
    check::home(
        device,
        [
            ("q", q.device()),
            ("out", out.device()),
            ("lse", lse.as_ref().and_then(DeviceSliceMut::device)),
            ("workspace", workspace.device()),
            ("sink_logits", params.sink_logits.and_then(|s| s.device())),
        ],
    )?;
    memory.home(device)?;
    step.home(device)?;
    batch.home(device)?;
    let dims = (c.key_dim, c.value_dim);
    // Where splits are fixed, so is the kernel.
    let columns = if params.fixed_split.is_some() { group } else { group.saturating_mul(max_query_len) };
    let i = instance(dims, l, columns, !params.exact_queries && integer_is_fast(device))?;
    let parts = LayerParts::new(c, l, memory)?;
    if params.fixed_split.is_none() {
        check::at_least("workspace (attend_workspace)", layer_workspace(device, c, l)?, workspace.len())?;
    }
    if !workspace.is_empty() {
        check::address("workspace", workspace.address(), 4)?;
    }
    if rows == 0 || sequences == 0 || max_query_len == 0 {
        return Ok(());
    }
    check::count("rows", rows)?;
    step.check(c, sequences, rows)?;
    let width = batch.table_width()?;
    check::address("block_tables", batch.block_tables().address(), 4)?;
    if i.shared > device.shared_limit() {
        return no(
            "head dims",
            format!("{} and {}", c.key_dim, c.value_dim),
            "the device has too little shared memory",
        );
    }
    check::count("rows of a kv head", group.saturating_mul(max_query_len.min(rows)))?;
    let column_blocks = column_blocks(i, group, max_query_len.min(rows));
    let per_sequence = c.kv_heads.saturating_mul(column_blocks);
    let units = sequences.checked_mul(per_sequence).filter(|n| *n <= i32::MAX as usize);
    let Some(units) = units else {
        return Err(Error::Capacity {
            what: "units of a launch (sequences x kv heads x column blocks)",
            needed: sequences.saturating_mul(per_sequence),
            available: i32::MAX as usize,
            help: "attend fewer sequences at a time",
        });
    };
    // The kernels find a page by a product of two 32-bit numbers.
    let block_bytes = c.kv_heads.saturating_mul(parts.pages.page_bytes);
    if block_bytes > i32::MAX as usize || parts.blocks > i32::MAX as usize {
        return Err(Error::Capacity {
            what: "bytes of a block, or blocks",
            needed: block_bytes.max(parts.blocks),
            available: i32::MAX as usize,
            help: "spread the layer over several caches",
        });
    }
    let mut splits = 0;
    if let Some(pages) = params.fixed_split {
        splits = places(c, units, pages, width.min(c.table_width()))?;
        check::at_least(
            "workspace for fixed splits (attend_workspace_fixed)",
            splits * place(i, c),
            workspace.len(),
        )?;
    }
    // Costs in units of 256 bytes; a unit costs about what loading its queries and merging its warps takes.
    let weight = |bytes: usize| (bytes / 256).max(1) as u32;
    let blocks_launched = i.blocks(device);
    let p = QkvAttend {
        q: q.parameters(),
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
        lse: lse.as_ref().map_or(0, DeviceSliceMut::address),
        sink_logits: params.sink_logits.map_or(0, |s| s.address()),
        workspace: workspace.address(),
        status: step.status.address(),
        heads: c.kv_heads as u32,
        group: group as u32,
        sequences: sequences as u32,
        table_width: width as u32,
        blocks: parts.blocks as u32,
        page_bytes: parts.pages.page_bytes as u32,
        window_rows: c.window_rows() as u32,
        sinks: c.sinks as u32,
        window_dtype: parts.window_dtype,
        direct: u32::from(c.residual.is_none()),
        max_query: max_query_len.min(rows) as u32,
        columns: i.columns as u32,
        column_blocks: column_blocks as u32,
        sliding_window: l.sliding_window.map_or(0, |w| w.min(i32::MAX as usize) as u32),
        page_weight: weight(parts.pages.page_bytes),
        row_weight: weight(ITEM_ROWS * 2 * (c.key_dim + c.value_dim)),
        unit_weight: weight(4096),
        split: params.fixed_split.map_or(0, |pages| pages.min(i32::MAX as usize) as u32),
        places: splits as u32,
        blocks_launched,
        scale: params.scale_for(c.key_dim),
        softcap: params.softcap.unwrap_or(0.0),
    };
    let grid = Grid { blocks: blocks_launched, threads: THREADS, shared: i.shared };
    // SAFETY: tensors, pages, rows, means, scales, step, tables and workspace have the sizes that the configuration gives and their
    // alignment (above), and views were checked against their memory; the kernel checks blocks and lengths that it reads from
    // the device against the numbers given here before it uses them.
    unsafe { device.start(i.kernel, grid, stream, &p) }?;
    let grid = Grid { blocks: units as u32, threads: THREADS, shared: 0 };
    // SAFETY: as above; it reads what the launch before wrote to the workspace.
    unsafe { device.start(Kernel::Combine, grid, stream, &p) }
}
