use super::{Grid, blocks};
use crate::cuda::abi::{QKV_ORDER_FRAGMENT, QKV_ORDER_ROW, QkvDequantize, QkvOperand};
use crate::cuda::device::Kernel;
use crate::cuda::{Device, DeviceSlice, DeviceTensorMut, PageFormat, RawStream, check, parameters};
use crate::error::{Error, Result};
use crate::format::{Affine, Axis};
use crate::layout::{Operand, TILE, row_bytes};
use crate::quant::affine::MAX_GROUP;
use crate::quant::hadamard::check_block;
use crate::quant::page::MAX_DIM;

const THREADS: u32 = 128;

/// Shared memory of a block at most, so that several fit a multiprocessor.
const SHARED: u32 = 48 << 10;

/// In which order codes and pairs of a tensor lie in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CodeOrder {
    /// Codes as rows `[token][head]`, pairs `[token][head][group]` or `[head][token group][channel]`: those of
    /// [`quant::Quantized`](crate::quant::Quantized).
    Rows,
    /// `[head][64-token tile]`, codes and pairs of a tile as in a page of this operand, the last tile padded. The tiles of a
    /// batch row are its own.
    Fragments(Operand),
}

/// (step, min) of every group in device memory.
#[derive(Debug, Clone, Copy)]
pub enum DevicePairs<'a> {
    /// Words of two f16, step in the low half: what [`Pair::to_bits`](crate::quant::Pair::to_bits) makes.
    F16(DeviceSlice<'a, u32>),
    /// Step, min, step, min ..: row order only.
    F32(DeviceSlice<'a, f32>),
}

/// Lengths of codes (bytes) and pairs of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CodeLengths {
    /// Bytes of codes.
    pub codes: usize,
    /// Pairs.
    pub pairs: usize,
}

/// How long codes and pairs of a tensor `[tokens, heads, dim]` are; per-channel groups and tiles begin anew every `batch_tokens`
/// tokens. A tensor without tokens, heads or channels has none of either.
///
/// # Errors
/// [`Error::Unsupported`] for a group outside 2..=256, a per-token group larger than a head, heads of more than 512 channels, a rotation
/// that does not divide a head, `center` (it belongs to a cache), and, in fragment order, what a page does not hold.
/// [`Error::Shape`] for sizes beyond what a kernel counts.
pub fn code_lengths(
    dims: [usize; 3],
    batch_tokens: usize,
    format: &Affine,
    order: CodeOrder,
) -> Result<CodeLengths> {
    let [tokens, heads, dim] = dims;
    let no = |what, got: String, why: String| Err(Error::Unsupported { what, got, why });
    check::sizes("tensor", dims)?;
    if dim > MAX_DIM {
        return no("tensor", format!("{dim} channels"), format!("heads have at most {MAX_DIM} channels"));
    }
    if !(2..=MAX_GROUP).contains(&format.group) {
        return no("group", format.group.to_string(), format!("groups have 2 to {MAX_GROUP} elements"));
    }
    if format.center {
        return no(
            "center",
            "true".into(),
            "the mean belongs to a sequence of a cache; add it after the call".into(),
        );
    }
    if dims.contains(&0) {
        // What depends on the sizes is not looked at: no group is larger than nothing.
        return Ok(CodeLengths { codes: 0, pairs: 0 });
    }
    if format.axis == Axis::PerToken && format.group > dim {
        return no(
            "group",
            format.group.to_string(),
            format!("it is larger than the head ({dim} channels); use {dim} or less"),
        );
    }
    if let Some(block) = format.rotate {
        check_block(block, dim)?;
    }
    let batch = batch_tokens.max(1);
    if tokens % batch != 0 {
        return Err(Error::Shape {
            what: "tensor",
            expected: format!("a multiple of {batch} tokens"),
            got: format!("{dims:?}"),
        });
    }
    let (codes, pairs) = match order {
        CodeOrder::Rows => {
            let groups = match format.axis {
                Axis::PerToken => tokens.saturating_mul(dim.div_ceil(format.group)),
                Axis::PerChannel => (tokens / batch * batch.div_ceil(format.group)).saturating_mul(dim),
            };
            (tokens.saturating_mul(row_bytes(format.bits.get(), dim)), groups)
        }
        CodeOrder::Fragments(which) => {
            PageFormat::new((*format).into(), (*format).into(), dim, dim)?;
            let at = parameters::sections(&(*format).into(), which, dim);
            let tiles = tokens / batch * batch.div_ceil(TILE);
            (tiles.saturating_mul(at.code_bytes as usize), tiles.saturating_mul(at.pair_count as usize))
        }
    };
    Ok(CodeLengths { codes: codes.saturating_mul(heads), pairs: pairs.saturating_mul(heads) })
}

/// Heads that a block takes at a time per channel in row order: the fewest whose rows of a token are whole sectors.
fn unit_heads(row_bytes: usize, heads: usize) -> usize {
    (1..=heads)
        .find(|h| heads.is_multiple_of(*h) && (h * row_bytes).is_multiple_of(32) && *h <= 8)
        .unwrap_or(heads.min(8))
}

/// Decodes codes and pairs to `out` `[tokens, heads, dim]` of any dtype and strides: `step * code + min` in f32, both operations
/// rounded, un-rotated if `format` rotates, then rounded once to the dtype. The values of
/// [`quant::dequantize`](crate::quant::dequantize), bit for bit (NaN stays NaN).
///
/// `codes` is 16-byte aligned and `pairs` 4-byte (16 in fragment order). Per-channel groups and tiles begin anew in every batch
/// row of `out`. Codes and pairs are as long as [`code_lengths`] says (f32 pairs twice that).
///
/// # Errors
/// Those of [`code_lengths`]; [`Error::Length`] and [`Error::Address`] for codes and pairs; [`Error::Unsupported`] for f32 pairs in
/// fragment order; [`Error::Cuda`] if the launch fails.
pub fn dequantize(
    device: &Device,
    stream: RawStream<'_>,
    codes: DeviceSlice<'_, u8>,
    pairs: DevicePairs<'_>,
    format: &Affine,
    order: CodeOrder,
    out: &mut DeviceTensorMut<'_>,
) -> Result<()> {
    let home = match pairs {
        DevicePairs::F16(p) => p.device(),
        DevicePairs::F32(p) => p.device(),
    };
    check::home(device, [("codes", codes.device()), ("pairs", home), ("out", out.device())])?;
    let dims = out.dims();
    let [tokens, heads, dim] = dims;
    let batch = out.shape().batch_tokens.max(1);
    let lengths = code_lengths(dims, batch, format, order)?;
    let (address, wide, align) = match (pairs, order) {
        (DevicePairs::F16(p), _) => {
            check::len("pairs", lengths.pairs, p.len())?;
            (p.address(), false, if order == CodeOrder::Rows { 4 } else { 16 })
        }
        (DevicePairs::F32(p), CodeOrder::Rows) => {
            check::len("pairs", lengths.pairs.saturating_mul(2), p.len())?;
            (p.address(), true, 8)
        }
        (DevicePairs::F32(_), _) => {
            return Err(Error::Unsupported {
                what: "pairs",
                got: "f32".into(),
                why: "fragment order holds pairs of f16; use row order".into(),
            });
        }
    };
    check::len("codes", lengths.codes, codes.len())?;
    if dims.contains(&0) {
        return Ok(());
    }
    check::address("codes", codes.address(), 16)?;
    check::address("pairs", address, align)?;
    let stride = parameters::code_stride(dim) as u32;
    let word = if wide { 8 } else { 4 };
    let groups = dim.div_ceil(format.group);
    let bytes = row_bytes(format.bits.get(), dim);
    let (at, rows, unit, pair_bytes) = match order {
        CodeOrder::Fragments(which) => {
            let at = parameters::sections(&(*format).into(), which, dim);
            (at, TILE as u32, 1, at.pair_bytes)
        }
        CodeOrder::Rows => {
            let at = QkvOperand { dim: dim as u32, row_bytes: bytes as u32, ..QkvOperand::default() };
            if format.axis == Axis::PerChannel {
                let unit = unit_heads(bytes, heads);
                (at, TILE as u32, unit, (unit * (dim * word + 16)) as u32)
            } else {
                // As many rows as fit with their pairs; 8 always do.
                let need = |rows: u32| rows * (stride + (groups * word) as u32);
                let rows = [64, 32, 16, 8].into_iter().find(|r| need(*r) <= SHARED).unwrap_or(8);
                (at, rows, 1, rows * (groups * word) as u32)
            }
        }
    };
    let units = match (order, format.axis) {
        (CodeOrder::Fragments(_), _) => tokens / batch * batch.div_ceil(TILE) * heads,
        (_, Axis::PerToken) => (tokens * heads).div_ceil(rows as usize),
        _ => tokens / batch * batch.div_ceil(format.group) * heads.div_ceil(unit),
    };
    let parameters = QkvDequantize {
        out: out.parameters(),
        codes: codes.address(),
        pairs: address,
        format: parameters::format(&(*format).into()),
        at,
        order: if order == CodeOrder::Rows { QKV_ORDER_ROW } else { QKV_ORDER_FRAGMENT },
        wide: wide.into(),
        rows,
        code_stride: stride,
        unit_heads: unit as u32,
        reserved: 0,
    };
    let grid = Grid {
        blocks: blocks(device, units as u64, 1),
        threads: THREADS,
        shared: rows * stride + pair_bytes,
    };
    // SAFETY: codes and pairs have the lengths that shape and format need, and their alignment; the format is one that the kernel
    // knows, with at most 512 channels, so that rows fit the shared memory asked for (all above); the view of `out` was checked
    // against its memory.
    unsafe { device.start(Kernel::Dequantize, grid, stream, &parameters) }
}
