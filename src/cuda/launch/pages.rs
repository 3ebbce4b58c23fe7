use super::{Grid, blocks};
use crate::cuda::abi::{
    QKV_ORDER_FRAGMENT, QKV_ORDER_ROW, QkvConvertPages, QkvCopyBlocks, QkvGather, QkvTensor,
};
use crate::cuda::device::Kernel;
use crate::cuda::{Device, DeviceSlice, DeviceSliceMut, DeviceTensorMut, Pages, PagesMut, RawStream, check};
use crate::error::{Error, Result};
use crate::format::{Format, Granularity};
use crate::layout::{Order, TILE};
use half::f16;

const THREADS: u32 = 128;

/// Bytes of a block that `qkv_copy_blocks` moves at a time.
const PART: u64 = 4 * 128 * 16;

fn check_status(status: &DeviceSliceMut<'_, u32>) -> Result<u64> {
    check::len("status", 1, status.len())?;
    check::address("status", status.address(), 4)?;
    Ok(status.address())
}

fn order(o: Order) -> u32 {
    match o {
        Order::Row => QKV_ORDER_ROW,
        Order::Fragment => QKV_ORDER_FRAGMENT,
    }
}

/// Copies blocks inside a pool: the pairs (from, to), i32 side by side in device memory, in one launch (fork, defragment).
///
/// A pair with a -1 is left out, and so is one from a block to itself. One that names no block is left out and counted in
/// `status`, one u32 to which the kernel adds.
///
/// Pairs are copied at the same time, in no order. So no block may be written by two pairs, or written by one and read by
/// another: what such a block holds afterwards is undefined. The pairs lie on the device, where this function cannot look;
/// [`check_copies`] finds it while they are still on the host. Chains, such as 1 to 2 and 2 to 3, take a launch for each link, the last
/// one first.
///
/// # Errors
/// [`Error::Length`] for an odd number of `pairs` or a status of another length than 1, [`Error::Address`] for misaligned
/// memory (`pairs` 8 bytes), [`Error::Cuda`] if the launch fails.
pub fn copy_blocks(
    device: &Device,
    stream: RawStream<'_>,
    pool: &mut PagesMut<'_>,
    pairs: DeviceSlice<'_, i32>,
    status: DeviceSliceMut<'_, u32>,
) -> Result<()> {
    check::home(device, [("pool", pool.device()), ("pairs", pairs.device()), ("status", status.device())])?;
    let status = check_status(&status)?;
    let count = pairs.len() / 2;
    check::len("pairs", 2 * count, pairs.len())?;
    if count == 0 {
        return Ok(());
    }
    check::address("pairs", pairs.address(), 8)?;
    let block_bytes = (pool.format().layout().page_bytes * pool.heads()) as u64;
    let parameters = QkvCopyBlocks {
        base: pool.address(),
        block_bytes,
        pairs: pairs.address(),
        count: count as u64,
        status,
        blocks: pool.blocks() as u32,
        reserved: 0,
    };
    let units = (count as u64).saturating_mul(block_bytes.div_ceil(PART));
    let grid = Grid { blocks: blocks(device, units, 1), threads: THREADS, shared: 0 };
    // SAFETY: the pool is whole blocks of 16-byte vectors, the pairs are `count` aligned pairs and the status one word (above, and when
    // the pool was made); the kernel touches no block outside the pool.
    unsafe { device.start(Kernel::CopyBlocks, grid, stream, &parameters) }
}

/// Whether these pairs (from, to), side by side, are what [`copy_blocks`] may be given for a pool of `blocks` blocks: call it
/// before they go to the device. Pairs with a -1 and pairs from a block to itself copy nothing and are not looked at further.
///
/// # Errors
/// [`Error::Length`] for an odd number of elements, [`Error::OutOfRange`] for a block that the pool does not have,
/// [`Error::Unsupported`] for a block that two pairs write, or that one writes and another reads.
pub fn check_copies(pairs: &[i32], blocks: usize) -> Result<()> {
    check::len("pairs (from and to of each copy)", pairs.len().next_multiple_of(2), pairs.len())?;
    let moves = || pairs.chunks_exact(2).map(|p| (p[0], p[1])).filter(|p| p.0 != -1 && p.1 != -1);
    for block in moves().flat_map(|p| [p.0, p.1]) {
        if usize::try_from(block).map_or(true, |b| b >= blocks) {
            return Err(Error::OutOfRange { what: "block", got: block.into(), limit: blocks });
        }
    }
    let mut written: Vec<i32> = moves().filter(|p| p.0 != p.1).map(|p| p.1).collect();
    written.sort_unstable();
    let no = |got: String| {
        let why =
            "the pairs of a launch are copied at the same time; put one of them into a launch of its own";
        Err(Error::Unsupported { what: "copies", got, why: why.into() })
    };
    if let Some(w) = written.windows(2).find(|w| w[0] == w[1]) {
        return no(format!("writing block {} twice", w[0]));
    }
    match moves().find(|p| p.0 != p.1 && written.binary_search(&p.0).is_ok()) {
        Some((read, _)) => no(format!("writing and reading block {read}")),
        None => Ok(()),
    }
}

/// Static FP8 scales and the mean of a sequence's keys, for [`gather`].
#[derive(Debug, Clone, Copy, Default)]
pub struct GatherInputs<'a> {
    /// Scales of keys, one or one a head, where they are FP8 with static scales.
    pub key_scales: Option<DeviceSlice<'a, f32>>,
    /// Scales of values, likewise.
    pub value_scales: Option<DeviceSlice<'a, f32>>,
    /// f16 `[heads][key_dim]`, where keys are centred: added to what is decoded.
    pub key_mean: Option<DeviceSlice<'a, f16>>,
}

fn check_scales(
    what: &'static str,
    format: &Format,
    heads: usize,
    scales: Option<DeviceSlice<'_, f32>>,
) -> Result<(u64, u32)> {
    let Some(s) = scales else {
        return match format {
            Format::Fp8(f) if f.granularity != Granularity::TokenHead => Err(Error::Unsupported {
                what,
                got: "none".into(),
                why: "FP8 with static scales needs them: one, or one a head".into(),
            }),
            _ => Ok((0, 0)),
        };
    };
    if s.len() != 1 {
        check::len(what, heads, s.len())?;
    }
    check::address(what, s.address(), 4)?;
    Ok((s.address(), (s.len() > 1).into()))
}

fn check_output(what: &'static str, out: &DeviceTensorMut<'_>, dims: [usize; 3]) -> Result<QkvTensor> {
    check::same_dims(what, dims, out.dims())?;
    Ok(out.parameters())
}

/// Decodes the first tokens of one sequence from its pages to contiguous or strided tensors: `key` `[tokens, heads, key_dim]` and
/// `value` `[tokens, heads, value_dim]`, any dtype. Values are those of the cache: decoded, un-rotated, the mean added, rounded once.
/// Window and sinks are not looked at: sinks come as their codes say.
///
/// `table` holds the block of every 64 tokens, in device memory. A tile whose number names no block is counted in `status`, and its
/// tokens stay what they were. `pool_order` is [`Order::Fragment`] for the pools of this backend.
///
/// # Errors
/// [`Error::Shape`] if the tensors differ from the pool or each other, [`Error::Length`] for a table of fewer blocks than the tokens
/// have, or wrong lengths of scales, mean or status, [`Error::Unsupported`] for scales that are missing, or a mean where keys are not
/// centred, [`Error::Address`] for misaligned memory, [`Error::Cuda`] if the launch fails.
#[allow(clippy::too_many_arguments)]
pub fn gather(
    device: &Device,
    stream: RawStream<'_>,
    pool: &Pages<'_>,
    pool_order: Order,
    table: DeviceSlice<'_, i32>,
    inputs: &GatherInputs<'_>,
    key: &mut DeviceTensorMut<'_>,
    value: &mut DeviceTensorMut<'_>,
    status: DeviceSliceMut<'_, u32>,
) -> Result<()> {
    let (format, heads) = (pool.format(), pool.heads());
    let tokens = key.dims()[0];
    let k = check_output("key", key, [tokens, heads, format.layout().key.dim])?;
    let v = check_output("value", value, [tokens, heads, format.layout().value.dim])?;
    check::sizes("key", key.dims())?;
    check::sizes("value", value.dims())?;
    let memory = [
        ("pool", pool.device()),
        ("table", table.device()),
        ("key", key.device()),
        ("value", value.device()),
        ("key scales", inputs.key_scales.and_then(|s| s.device())),
        ("value scales", inputs.value_scales.and_then(|s| s.device())),
        ("key mean", inputs.key_mean.and_then(|s| s.device())),
        ("status", status.device()),
    ];
    check::home(device, memory)?;
    let status = check_status(&status)?;
    let tiles = tokens.div_ceil(TILE);
    check::at_least("table", tiles, table.len())?;
    let (key_scales, key_scale_step) = check_scales("key scales", format.key(), heads, inputs.key_scales)?;
    let (value_scales, value_scale_step) =
        check_scales("value scales", format.value(), heads, inputs.value_scales)?;
    let key_mean = match inputs.key_mean {
        Some(_) if !format.key().centered() => {
            return Err(Error::Unsupported {
                what: "key mean",
                got: "some".into(),
                why: "keys of this format are not centred".into(),
            });
        }
        Some(mean) => {
            check::len("key mean", heads * format.layout().key.dim, mean.len())?;
            check::address("key mean", mean.address(), 2)?;
            mean.address()
        }
        None if format.key().centered() => {
            return Err(Error::Unsupported {
                what: "key mean",
                got: "none".into(),
                why: "keys are centred; give the mean of the sequence".into(),
            });
        }
        None => 0,
    };
    if tokens == 0 {
        return Ok(());
    }
    check::address("table", table.address(), 4)?;
    let parameters = QkvGather {
        pool: pool.parameters(),
        key: k,
        value: v,
        table: table.address(),
        key_mean,
        key_scales,
        value_scales,
        status,
        key_scale_step,
        value_scale_step,
        order: order(pool_order),
        code_stride: format.code_stride(),
    };
    let units = tiles as u64 * heads as u64 * 2;
    let grid = Grid { blocks: blocks(device, units, 1), threads: THREADS, shared: format.shared() };
    // SAFETY: both tensors have the pool's shape and were checked against their memory; the table covers the tokens, scales and mean the
    // heads (above); the kernel reads no block outside the pool.
    unsafe { device.start(Kernel::Gather, grid, stream, &parameters) }
}

/// Pages as a list, side by side, for [`convert_pages`].
#[derive(Debug)]
pub enum PageList<'a> {
    /// Export: pages are written here.
    Export(DeviceSliceMut<'a, u8>),
    /// Import: pages are read from here.
    Import(DeviceSlice<'a, u8>),
}

/// Rewrites pages between a pool in `pool_order` and a list of pages in `list_order`, section by section as
/// [`layout::convert_page`](crate::layout::convert_page) does; padding becomes 0. Page `i` of the list belongs to page `pages[i]` of the
/// pool, which is `block * heads + head`.
///
/// A number of -1 is left out. One that names no page is left out and counted in `status`, one u32 to which the kernel adds. An
/// import may name no page twice: what the page holds afterwards is undefined, and the numbers lie where this function cannot look.
/// An export writes nothing to the pool.
///
/// # Errors
/// [`Error::Length`] if the list is not one page a number, or the status not one word, [`Error::Address`] for misaligned memory (the
/// list 16 bytes), [`Error::Cuda`] if the launch fails.
#[allow(clippy::too_many_arguments)]
pub fn convert_pages(
    device: &Device,
    stream: RawStream<'_>,
    pool: &mut PagesMut<'_>,
    pool_order: Order,
    pages: DeviceSlice<'_, i64>,
    list: PageList<'_>,
    list_order: Order,
    status: DeviceSliceMut<'_, u32>,
) -> Result<()> {
    let (address, len, home, to_pool) = match &list {
        PageList::Export(x) => (x.address(), x.len(), x.device(), false),
        PageList::Import(x) => (x.address(), x.len(), x.device(), true),
    };
    let memory =
        [("pool", pool.device()), ("pages", pages.device()), ("list", home), ("status", status.device())];
    check::home(device, memory)?;
    let format = pool.format();
    let status = check_status(&status)?;
    check::len("list", pages.len().saturating_mul(format.layout().page_bytes), len)?;
    if pages.is_empty() {
        return Ok(());
    }
    check::address("pages", pages.address(), 8)?;
    check::address("list", address, 16)?;
    let parameters = QkvConvertPages {
        pool: pool.parameters(),
        pages: pages.address(),
        count: pages.len() as u64,
        list: address,
        status,
        pool_order: order(pool_order),
        list_order: order(list_order),
        to_pool: to_pool.into(),
        code_stride: format.code_stride(),
    };
    let units = pages.len() as u64 * 2;
    let grid = Grid { blocks: blocks(device, units, 1), threads: THREADS, shared: format.shared() };
    // SAFETY: the list is one page a number, aligned, and the pool whole pages (above, and when it was made); both orders fill exactly the
    // sections of a page; the kernel touches no page outside the pool.
    unsafe { device.start(Kernel::ConvertPages, grid, stream, &parameters) }
}
