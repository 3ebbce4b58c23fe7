use super::{Grid, blocks};
use crate::cuda::abi::{QkvFp8, QkvTensor};
use crate::cuda::device::Kernel;
use crate::cuda::{
    Device, DeviceSlice, DeviceSliceMut, DeviceTensor, DeviceTensorMut, RawStream, check, parameters,
};
use crate::error::Result;
use crate::format::{Fp8, Fp8Kind, Granularity};

const THREADS: u32 = 256;

/// Scales of a tensor `[tokens, heads, dim]`: one, one a head, or one a token and head (`[token][head]`).
pub fn fp8_scale_count(dims: [usize; 3], granularity: Granularity) -> usize {
    match granularity {
        Granularity::Tensor => 1,
        Granularity::Head => dims[1],
        Granularity::TokenHead => dims[0].saturating_mul(dims[1]),
    }
}

/// Elements of the workspace of [`fp8_absmax`]: 0 for one scale a token and head, which needs none.
pub fn fp8_absmax_workspace(dims: [usize; 3], granularity: Granularity) -> usize {
    match granularity {
        Granularity::TokenHead => 0,
        g => 1 + fp8_scale_count(dims, g),
    }
}

fn base(x: QkvTensor, format: Fp8) -> QkvFp8 {
    let f = parameters::format(&format.into());
    QkvFp8 { x, kind: f.kind, granularity: f.granularity, ..QkvFp8::default() }
}

fn check_bytes(dims: [usize; 3], address: u64, len: usize) -> Result<()> {
    check::sizes("x", dims)?;
    let elements = dims.iter().product();
    check::len("bytes", elements, len)?;
    if elements > 0 { check::address("bytes", address, 16) } else { Ok(()) }
}

fn check_scales(dims: [usize; 3], format: Fp8, address: u64, len: usize) -> Result<()> {
    check::len("scales", fp8_scale_count(dims, format.granularity), len)?;
    if len > 0 { check::address("scales", address, 4) } else { Ok(()) }
}

fn check_counter(counter: Option<&DeviceSliceMut<'_, u64>>) -> Result<u64> {
    let Some(c) = counter else { return Ok(0) };
    check::len("saturated", 1, c.len())?;
    check::address("saturated", c.address(), 8)?;
    Ok(c.address())
}

/// A launch over rows; `dims` are not empty.
fn grid(device: &Device, dims: [usize; 3]) -> Grid {
    // Eight elements a lane: what most rows take.
    let rows_per_block = (u64::from(THREADS) * 8 / dims[2] as u64).max(u64::from(THREADS / 32));
    let rows = dims[0] as u64 * dims[1] as u64;
    Grid { blocks: blocks(device, rows, rows_per_block), threads: THREADS, shared: 0 }
}

/// Encodes `x` `[tokens, heads, dim]` of any dtype and strides: `byte = satfinite(x / scale)` with IEEE division, half to even.
/// Infinity saturates, NaN stays NaN. The CPU's bytes, bit for bit.
///
/// `scales` are read from device memory: one, one a head, or one a token and head, as `format` says; they must be finite
/// and positive. `bytes` is `[token][head][channel]`, 16-byte aligned. Finite elements that were too large for their scale
/// are added to `saturated`, one element, if given.
///
/// # Errors
/// [`Error::Length`](crate::Error::Length) for the wrong number of bytes, scales or counters,
/// [`Error::Address`](crate::Error::Address) for misaligned memory, [`Error::Cuda`](crate::Error::Cuda) if the launch fails.
pub fn fp8_encode(
    device: &Device,
    stream: RawStream<'_>,
    x: &DeviceTensor<'_>,
    format: Fp8,
    scales: DeviceSlice<'_, f32>,
    bytes: DeviceSliceMut<'_, u8>,
    saturated: Option<DeviceSliceMut<'_, u64>>,
) -> Result<()> {
    let dims = x.dims();
    let counter = saturated.as_ref().and_then(DeviceSliceMut::device);
    let memory =
        [("x", x.device()), ("scales", scales.device()), ("bytes", bytes.device()), ("saturated", counter)];
    check::home(device, memory)?;
    check_bytes(dims, bytes.address(), bytes.len())?;
    check_scales(dims, format, scales.address(), scales.len())?;
    let saturated = check_counter(saturated.as_ref())?;
    if dims.contains(&0) {
        return Ok(());
    }
    let p = QkvFp8 {
        bytes: bytes.address(),
        scales: scales.address(),
        saturated,
        ..base(x.parameters(), format)
    };
    // SAFETY: bytes and scales have the lengths that the shape needs, and their alignment (above); the view of `x` was
    // checked against its memory; without `fit` the scales are only read.
    unsafe { device.start(Kernel::Fp8Encode, grid(device, dims), stream, &p) }
}

/// [`fp8_encode`] with one scale a token and head, computed from the row and written to `scales` `[token][head]` in the same
/// pass: the largest finite magnitude maps to the largest finite byte, a row of zeros has scale 1.
///
/// # Errors
/// As [`fp8_encode`].
pub fn fp8_encode_fitted(
    device: &Device,
    stream: RawStream<'_>,
    x: &DeviceTensor<'_>,
    kind: Fp8Kind,
    scales: DeviceSliceMut<'_, f32>,
    bytes: DeviceSliceMut<'_, u8>,
) -> Result<()> {
    let (dims, format) = (x.dims(), Fp8 { kind, granularity: Granularity::TokenHead });
    check::home(device, [("x", x.device()), ("scales", scales.device()), ("bytes", bytes.device())])?;
    check_bytes(dims, bytes.address(), bytes.len())?;
    check_scales(dims, format, scales.address(), scales.len())?;
    if dims.contains(&0) {
        return Ok(());
    }
    let p =
        QkvFp8 { bytes: bytes.address(), scales: scales.address(), fit: 1, ..base(x.parameters(), format) };
    // SAFETY: as in `fp8_encode`; the scales are written and lent for that.
    unsafe { device.start(Kernel::Fp8Encode, grid(device, dims), stream, &p) }
}

/// Decodes to `out` `[tokens, heads, dim]` of any dtype and strides: `scale * float(byte)` in f32, rounded once to the dtype.
///
/// # Errors
/// As [`fp8_encode`].
pub fn fp8_decode(
    device: &Device,
    stream: RawStream<'_>,
    bytes: DeviceSlice<'_, u8>,
    format: Fp8,
    scales: DeviceSlice<'_, f32>,
    out: &mut DeviceTensorMut<'_>,
) -> Result<()> {
    let dims = out.dims();
    check::home(device, [("bytes", bytes.device()), ("scales", scales.device()), ("out", out.device())])?;
    check_bytes(dims, bytes.address(), bytes.len())?;
    check_scales(dims, format, scales.address(), scales.len())?;
    if dims.contains(&0) {
        return Ok(());
    }
    let p = QkvFp8 { bytes: bytes.address(), scales: scales.address(), ..base(out.parameters(), format) };
    // SAFETY: bytes and scales have the lengths that the shape needs, and their alignment (above); the view of `out` was
    // checked against its memory and is lent for writing.
    unsafe { device.start(Kernel::Fp8Decode, grid(device, dims), stream, &p) }
}

/// Scales that map the largest finite magnitude of the tensor, of each head, or of each token and head to the largest finite
/// byte. NaN and infinity are ignored; a scale is at least `f32::MIN_POSITIVE`, and 1 where there is nothing but zeros.
///
/// `workspace` has [`fp8_absmax_workspace`] elements, all 0; the kernel leaves them 0, so one buffer serves every call on one
/// stream. Of a tensor without tokens, heads or channels there is no largest magnitude: its scales stay what they were.
///
/// # Errors
/// As [`fp8_encode`].
pub fn fp8_absmax(
    device: &Device,
    stream: RawStream<'_>,
    x: &DeviceTensor<'_>,
    format: Fp8,
    scales: DeviceSliceMut<'_, f32>,
    workspace: DeviceSliceMut<'_, u32>,
) -> Result<()> {
    let dims = x.dims();
    check::home(device, [("x", x.device()), ("scales", scales.device()), ("workspace", workspace.device())])?;
    check::sizes("x", dims)?;
    check_scales(dims, format, scales.address(), scales.len())?;
    let needed = fp8_absmax_workspace(dims, format.granularity);
    check::at_least("workspace", needed, workspace.len())?;
    if needed > 0 {
        check::address("workspace", workspace.address(), 4)?;
    }
    if dims.contains(&0) {
        return Ok(());
    }
    let p =
        QkvFp8 { scales: scales.address(), workspace: workspace.address(), ..base(x.parameters(), format) };
    // SAFETY: scales and workspace have the lengths that the shape needs, and their alignment (above); the view of `x` was
    // checked against its memory.
    unsafe { device.start(Kernel::Fp8Absmax, grid(device, dims), stream, &p) }
}
