use super::dequantize::{CodeLengths, CodeOrder, code_lengths};
use super::{Grid, blocks};
use crate::cuda::abi::{QKV_ORDER_FRAGMENT, QKV_ORDER_ROW, QkvOperand, QkvQuantize};
use crate::cuda::device::Kernel;
use crate::cuda::{Device, DeviceSlice, DeviceSliceMut, DeviceTensor, RawStream, check, parameters};
use crate::error::{Error, Result};
use crate::format::{Affine, Axis, Bits, Fit};
use crate::layout::{TILE, row_bytes};
use crate::quant::affine::check_fit;

/// f32 elements that a block holds at a time, in bytes: several blocks fit a multiprocessor.
const ELEMENTS: usize = 36 << 10;

/// Shared memory of a block that every device has.
const SHARED: usize = 96 << 10;

/// Quantizes `x` `[tokens, heads, dim]`, of any dtype and strides: codes and pairs are the bits of
/// [`quant::quantize`](crate::quant::quantize), with the format's fit, clamping, NaN groups and rotation.
///
/// `codes` and `pairs` are as long as [`code_lengths`] says, in the order that [`CodeOrder`] tells; pairs are words of two f16,
/// step in the low half ([`Pair::to_bits`](crate::quant::Pair::to_bits)). In fragment order both are 16-byte aligned, and padding becomes
/// 0. Per-channel groups and tiles begin anew in every batch row. `clamped`, one counter, grows by the number of finite elements
/// that were clamped to ±65504.
///
/// # Errors
/// Those of [`code_lengths`]; [`Error::Unsupported`] for a parameter of the fit out of range; [`Error::Length`] and
/// [`Error::Address`] for codes, pairs and the counter; [`Error::Cuda`] if the launch fails.
#[allow(clippy::too_many_arguments)]
pub fn quantize(
    device: &Device,
    stream: RawStream<'_>,
    x: &DeviceTensor<'_>,
    format: &Affine,
    order: CodeOrder,
    codes: DeviceSliceMut<'_, u8>,
    pairs: DeviceSliceMut<'_, u32>,
    clamped: Option<DeviceSliceMut<'_, u64>>,
) -> Result<()> {
    check_fit(&format.fit)?;
    let counter = clamped.as_ref().and_then(DeviceSliceMut::device);
    check::home(device, [("x", x.device()), ("pairs", pairs.device()), ("clamped", counter)])?;
    let lengths = code_lengths(x.dims(), x.shape().batch_tokens, format, order)?;
    check::len("pairs", lengths.pairs, pairs.len())?;
    if let Some(counter) = &clamped {
        check::len("clamped", 1, counter.len())?;
        check::address("clamped", counter.address(), 8)?;
    }
    if lengths.pairs > 0 {
        check::address("pairs", pairs.address(), if order == CodeOrder::Rows { 4 } else { 16 })?;
    }
    let parameters = QkvQuantize {
        pairs: pairs.address(),
        clamped: clamped.map_or(0, |c| c.address()),
        ..QkvQuantize::default()
    };
    start(device, stream, x, format, order, codes, lengths, parameters)
}

/// Codes of `x` for pairs that are given: the bits of [`quant::quantize_with`](crate::quant::quantize_with). `pairs` holds step, min,
/// step, min .. in row order, also where the codes go to fragment order: `[token][head][group]`, or `[head][token group][channel]`.
///
/// # Errors
/// As [`quantize`]; `pairs` is 8-byte aligned and has two elements a pair.
#[allow(clippy::too_many_arguments)]
pub fn quantize_with(
    device: &Device,
    stream: RawStream<'_>,
    x: &DeviceTensor<'_>,
    bits: Bits,
    group: usize,
    axis: Axis,
    pairs: DeviceSlice<'_, f32>,
    order: CodeOrder,
    codes: DeviceSliceMut<'_, u8>,
) -> Result<()> {
    let mut format = match axis {
        Axis::PerToken => Affine::per_token(bits, group),
        Axis::PerChannel => Affine::per_channel(bits, group),
    };
    format.fit = Fit::MinMax;
    check::home(device, [("x", x.device()), ("pairs", pairs.device())])?;
    let batch = x.shape().batch_tokens;
    let lengths = code_lengths(x.dims(), batch, &format, order)?;
    let count = code_lengths(x.dims(), batch, &format, CodeOrder::Rows)?.pairs;
    check::len("pairs", count.saturating_mul(2), pairs.len())?;
    if count > 0 {
        check::address("pairs", pairs.address(), 8)?;
    }
    let parameters = QkvQuantize { given: pairs.address(), ..QkvQuantize::default() };
    start(device, stream, x, &format, order, codes, lengths, parameters)
}

/// How the work is cut.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Cut {
    units: u64,
    rows: usize,
    width: usize,
    row_channels: usize,
    row_count: usize,
    chunk: usize,
    x_stride: usize,
    x_rows: usize,
    code_rows: usize,
    code_stride: usize,
    /// Pairs of a unit.
    pairs: usize,
}

impl Cut {
    /// Row order, per token: as many rows as shared memory takes well; a multiple of 16 rows is whole 16-byte vectors of codes.
    fn rows(dims: [usize; 3], group: usize, multiprocessors: usize) -> Self {
        let [tokens, heads, dim] = dims;
        let (count, stride) = (tokens * heads, dim.next_multiple_of(32));
        let few = count <= 32 * multiprocessors;
        let rows = if few || 32 * stride * 4 > ELEMENTS { 16 } else { 32 };
        Self {
            units: count.div_ceil(rows) as u64,
            rows,
            width: dim,
            row_channels: dim,
            row_count: 1,
            chunk: rows,
            x_stride: stride,
            x_rows: rows,
            code_rows: rows,
            code_stride: stride,
            pairs: rows * dim.div_ceil(group),
        }
    }

    /// Row order, per channel: a span of channels whose codes are whole 32-byte sectors of every token, where they fit.
    fn spans(dims: [usize; 3], batch: usize, bits: Bits, group: usize, rotate: usize) -> Self {
        let [tokens, heads, dim] = dims;
        // Heads that end on whole bytes lie side by side.
        let joined = (dim * bits.get()).is_multiple_of(8) && heads * dim <= i32::MAX as usize;
        let (row_channels, row_count) = if joined { (heads * dim, 1) } else { (dim, heads) };
        let whole = match bits {
            Bits::B8 | Bits::B4 => 64,
            Bits::B2 => 128,
            Bits::B1 | Bits::B3 => 256,
        };
        let rows = group.min(batch);
        let mut width = whole.max(rotate);
        // Both copies of a span and its pairs.
        while width > 32.max(rotate) && rows * (4 * (width + 8) + width + 144) + 8 * width > SHARED {
            width /= 2;
        }
        let width = width.min(row_channels);
        let codes = if bits == Bits::B3 { width.next_multiple_of(32) } else { width };
        Self {
            units: (tokens / batch * batch.div_ceil(group) * row_count * row_channels.div_ceil(width)) as u64,
            rows,
            width,
            row_channels,
            row_count,
            chunk: width,
            x_stride: parameters::channel_stride(width, rows),
            x_rows: rows,
            code_rows: rows,
            code_stride: parameters::code_stride(codes),
            pairs: width,
        }
    }

    /// Fragment order: a tile of a head, whose f32 elements pass in chunks.
    fn tiles(dims: [usize; 3], batch: usize, format: &Affine) -> Self {
        let [tokens, heads, dim] = dims;
        let per_channel = format.axis == Axis::PerChannel;
        let (chunk, x_stride, x_rows) = if per_channel {
            let chunk = dim.min(128);
            (chunk, parameters::channel_stride(chunk, format.group), TILE)
        } else {
            let stride = parameters::row_stride(dim);
            let chunk = [64, 32, 16].into_iter().find(|r| r * stride * 4 <= ELEMENTS / 2).unwrap_or(8);
            (chunk, stride, chunk)
        };
        let pairs = match format.axis {
            Axis::PerToken => TILE * dim.div_ceil(format.group),
            Axis::PerChannel => TILE / format.group * dim,
        };
        Self {
            units: (tokens / batch * batch.div_ceil(TILE) * heads) as u64,
            rows: TILE,
            width: dim,
            row_channels: dim,
            row_count: 1,
            chunk,
            x_stride,
            x_rows,
            code_rows: TILE,
            code_stride: parameters::code_stride(dim),
            pairs,
        }
    }
}

#[allow(clippy::too_many_arguments)]
fn start(
    device: &Device,
    stream: RawStream<'_>,
    x: &DeviceTensor<'_>,
    format: &Affine,
    order: CodeOrder,
    codes: DeviceSliceMut<'_, u8>,
    lengths: CodeLengths,
    parameters: QkvQuantize,
) -> Result<()> {
    let dims = x.dims();
    let batch = x.shape().batch_tokens.max(1);
    check::len("codes", lengths.codes, codes.len())?;
    check::home(device, [("codes", codes.device())])?;
    if dims.contains(&0) {
        return Ok(());
    }
    check::address("codes", codes.address(), if order == CodeOrder::Rows { 1 } else { 16 })?;
    let (cut, at) = match order {
        CodeOrder::Fragments(operand) => {
            (Cut::tiles(dims, batch, format), parameters::sections(&(*format).into(), operand, dims[2]))
        }
        CodeOrder::Rows => {
            let cut = match format.axis {
                Axis::PerToken => Cut::rows(dims, format.group, device.multiprocessors() as usize),
                Axis::PerChannel => {
                    Cut::spans(dims, batch, format.bits, format.group, format.rotate.unwrap_or(0))
                }
            };
            (cut, QkvOperand::default())
        }
    };
    let codes_at = (cut.x_rows * cut.x_stride * 4).next_multiple_of(16);
    let pairs_at = codes_at + cut.code_rows * cut.code_stride;
    let shared = pairs_at + cut.pairs * if parameters.given == 0 { 4 } else { 8 };
    if shared > device.shared_limit() as usize {
        return Err(Error::Unsupported {
            what: "group",
            got: format.group.to_string(),
            why: format!(
                "{shared} bytes of shared memory are needed and the device has {}; use a smaller group or rotation block",
                device.shared_limit()
            ),
        });
    }
    let parameters = QkvQuantize {
        x: x.parameters(),
        format: parameters::format(&(*format).into()),
        at,
        codes: codes.address(),
        units: cut.units,
        order: if order == CodeOrder::Rows { QKV_ORDER_ROW } else { QKV_ORDER_FRAGMENT },
        rows: cut.rows as u32,
        width: cut.width as u32,
        row_channels: cut.row_channels as u32,
        row_count: cut.row_count as u32,
        row_units: cut.row_channels.div_ceil(cut.width) as u32,
        row_bytes: row_bytes(format.bits.get(), cut.row_channels) as u32,
        chunk: cut.chunk as u32,
        x_stride: cut.x_stride as u32,
        code_stride: cut.code_stride as u32,
        codes_at: codes_at as u32,
        pairs_at: pairs_at as u32,
        ..parameters
    };
    let threads = if order == CodeOrder::Rows && format.axis == Axis::PerToken { 128 } else { 256 };
    let grid = Grid { blocks: blocks(device, cut.units, 1), threads, shared: shared as u32 };
    // SAFETY: codes, pairs and the counter have the lengths and alignments that the kernel writes (checked above and by the
    // callers), the tensor's view was checked against its memory when it was made, and shared memory is within the limit.
    unsafe { device.start(Kernel::Quantize, grid, stream, &parameters) }
}
