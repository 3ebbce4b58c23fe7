//! Launches of kernels that only tests use.

use super::{Grid, blocks};
use crate::cuda::abi::{QKV_ORDER_FRAGMENT, QKV_ORDER_ROW, QkvCheckLayout, QkvCheckMma};
use crate::cuda::device::Kernel;
use crate::cuda::{Device, DeviceSlice, DeviceSliceMut, PageFormat, RawStream, check, parameters};
use crate::error::Result;
use crate::layout::{Operand, Order, TILE};

/// The places of all bits of a tile, as the device's layout functions tell them: `bits` `[64][dim][bits]` gets `8 * byte + bit`, `pairs`
/// `[64][dim][2]` the first bytes of both halves, or `u32::MAX`.
///
/// # Errors
/// [`Error::Length`](crate::Error::Length), [`Error::Cuda`](crate::Error::Cuda).
#[doc(hidden)]
pub fn check_layout(
    device: &Device,
    stream: RawStream<'_>,
    format: &PageFormat,
    operand: Operand,
    order: Order,
    bits: DeviceSliceMut<'_, u32>,
    pairs: DeviceSliceMut<'_, u32>,
) -> Result<()> {
    let (f, at) = match operand {
        Operand::Key => (format.key(), &format.layout().key),
        Operand::Value => (format.value(), &format.layout().value),
    };
    check::len("bits", TILE * at.dim * f.code_bits(), bits.len())?;
    check::len("pairs", TILE * at.dim * 2, pairs.len())?;
    let parameters = QkvCheckLayout {
        format: parameters::format(f),
        at: parameters::operand(at, operand == Operand::Value),
        bits: bits.address(),
        pairs: pairs.address(),
        order: if order == Order::Row { QKV_ORDER_ROW } else { QKV_ORDER_FRAGMENT },
        reserved: 0,
    };
    let grid = Grid { blocks: blocks(device, (TILE * at.dim) as u64, 128), threads: 128, shared: 0 };
    // SAFETY: both outputs have the lengths that the kernel writes (above).
    unsafe { device.start(Kernel::CheckLayout, grid, stream, &parameters) }
}

/// Kinds of matrix products.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Product {
    /// f16, k = 16, f32 sums.
    F16,
    /// u8 by s8, k = 32, s32 sums.
    U8S8,
    /// u8 by u8, k = 32, s32 sums.
    U8U8,
}

/// Products of tiles on tensor cores, row-major: `a` `[tiles][16][k]` by `b` `[tiles][k][8]` gives `d` `[tiles][16][8]`, in bits.
///
/// # Errors
/// [`Error::Length`](crate::Error::Length), [`Error::Cuda`](crate::Error::Cuda).
#[doc(hidden)]
pub fn check_mma(
    device: &Device,
    stream: RawStream<'_>,
    product: Product,
    a: DeviceSlice<'_, u8>,
    b: DeviceSlice<'_, u8>,
    d: DeviceSliceMut<'_, u32>,
) -> Result<()> {
    // Both kinds take 512 bytes of a and 256 of b a tile.
    let tiles = a.len() / 512;
    check::len("a", tiles * 512, a.len())?;
    check::len("b", tiles * 256, b.len())?;
    check::len("d", tiles * 128, d.len())?;
    if tiles == 0 {
        return Ok(());
    }
    check::address("a", a.address(), 4)?;
    check::address("b", b.address(), 4)?;
    let kind = match product {
        Product::F16 => 0,
        Product::U8S8 => 1,
        Product::U8U8 => 2,
    };
    let parameters = QkvCheckMma {
        a: a.address(),
        b: b.address(),
        d: d.address(),
        tiles: tiles as u64,
        kind,
        reserved: 0,
    };
    let grid = Grid { blocks: blocks(device, tiles as u64, 4), threads: 128, shared: 0 };
    // SAFETY: all three are whole tiles, as many of each, and aligned (above).
    unsafe { device.start(Kernel::CheckMma, grid, stream, &parameters) }
}
