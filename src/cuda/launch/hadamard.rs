use super::{Grid, blocks};
use crate::cuda::abi::QkvHadamard;
use crate::cuda::device::Kernel;
use crate::cuda::{Device, DeviceTensor, DeviceTensorMut, RawStream, check};
use crate::error::Result;
use crate::quant::hadamard::check_block;

const THREADS: u32 = 128;

/// Rotates every block of `block` channels (32, 64 or 128) of `x` `[tokens, heads, dim]` with the orthonormal Hadamard matrix
/// and writes it to `out`, of the same shape and any dtype and strides. The rotation is its own inverse. The arithmetic is
/// f32 and gives the CPU's bits.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) for another block or a `dim` that it does not divide,
/// [`Error::Shape`](crate::Error::Shape) if the shapes differ, [`Error::Cuda`](crate::Error::Cuda) if the launch fails.
pub fn hadamard(
    device: &Device,
    stream: RawStream<'_>,
    x: &DeviceTensor<'_>,
    block: usize,
    out: &mut DeviceTensorMut<'_>,
) -> Result<()> {
    let dims @ [tokens, heads, dim] = x.dims();
    // Of no channels any block is possible.
    check_block(block, if dim == 0 { block } else { dim })?;
    check::home(device, [("x", x.device()), ("out", out.device())])?;
    check::sizes("x", dims)?;
    check::same_dims("out", dims, out.dims())?;
    if dims.contains(&0) {
        return Ok(());
    }
    let count = (tokens * heads * (dim / block)) as u64;
    let parameters =
        QkvHadamard { x: x.parameters(), out: out.parameters(), block: block as u32, reserved: 0 };
    let grid = Grid { blocks: blocks(device, count, u64::from(THREADS / 32)), threads: THREADS, shared: 0 };
    // SAFETY: the shapes are equal and `dim` is whole blocks (above); both views were checked against their memory when they
    // were made; `sizes` keeps all counts within their types.
    unsafe { device.start(Kernel::Hadamard, grid, stream, &parameters) }
}
