//! Launches of kernels that only benchmarks use, to hold the others against.

use super::{Grid, blocks};
use crate::cuda::abi::{QkvPlainAppend, QkvStream};
use crate::cuda::device::Kernel;
use crate::cuda::{Device, DeviceSlice, DeviceSliceMut, RawStream, check};
use crate::error::{Error, Result};

/// Threads of a block that streams, and blocks that a multiprocessor holds of them.
const STREAM: (u32, u32) = (256, 8);
/// Bytes that a thread takes at a time.
const VECTOR: usize = 16;

/// Reads all of `from` once; the XOR of its 32-bit words is added to `sum`, one word.
///
/// # Errors
/// [`Error::Shape`] for bytes that are no multiple of 16, [`Error::Length`], [`Error::Address`] for memory that is not aligned to
/// them, [`Error::Unsupported`] for memory of another device, [`Error::Cuda`] if the launch fails.
#[doc(hidden)]
pub fn stream_read(
    device: &Device,
    stream: RawStream<'_>,
    from: DeviceSlice<'_, u8>,
    sum: DeviceSliceMut<'_, u32>,
) -> Result<()> {
    check::len("sum", 1, sum.len())?;
    check::address("sum", sum.address(), 4)?;
    check::home(device, [("from", from.device()), ("sum", sum.device())])?;
    start(device, stream, Kernel::StreamRead, from, sum.address())
}

/// Copies `from` to `to`.
///
/// # Errors
/// As [`stream_read`].
#[doc(hidden)]
pub fn stream_copy(
    device: &Device,
    stream: RawStream<'_>,
    from: DeviceSlice<'_, u8>,
    to: DeviceSliceMut<'_, u8>,
) -> Result<()> {
    check::len("to", from.len(), to.len())?;
    check::address("to", to.address(), VECTOR)?;
    check::home(device, [("from", from.device()), ("to", to.device())])?;
    start(device, stream, Kernel::StreamCopy, from, to.address())
}

fn start(
    device: &Device,
    stream: RawStream<'_>,
    kernel: Kernel,
    from: DeviceSlice<'_, u8>,
    to: u64,
) -> Result<()> {
    check::address("from", from.address(), VECTOR)?;
    let parameters = QkvStream { from: from.address(), to, vectors: vectors("from", from.len())? as u64 };
    let grid = Grid { blocks: device.multiprocessors() * STREAM.1, threads: STREAM.0, shared: 0 };
    // SAFETY: both sides are as long as the kernel reads and writes, and aligned (above and in the callers).
    unsafe { device.start(kernel, grid, stream, &parameters) }
}

/// Writes rows of 16-bit keys and values to their slots, without quantization: `keys` and `values` are `[rows, n]`, `key_cache` and
/// `value_cache` `[slots, n]`, each with its own `n`; `slot_mapping` has the slot of each row, -1 = skip. Slots outside are skipped.
///
/// # Errors
/// As [`stream_read`].
#[doc(hidden)]
pub fn plain_append(
    device: &Device,
    stream: RawStream<'_>,
    [keys, values]: [DeviceSlice<'_, u16>; 2],
    slot_mapping: DeviceSlice<'_, i64>,
    [key_cache, value_cache]: [DeviceSliceMut<'_, u16>; 2],
    slots: usize,
) -> Result<()> {
    let rows = slot_mapping.len();
    check::count("rows", rows)?;
    check::home(
        device,
        [
            ("keys", keys.device()),
            ("values", values.device()),
            ("slot_mapping", slot_mapping.device()),
            ("key_cache", key_cache.device()),
            ("value_cache", value_cache.device()),
        ],
    )?;
    if rows == 0 {
        return Ok(());
    }
    check::address("slot_mapping", slot_mapping.address(), 8)?;
    let width = |what, from: &DeviceSlice<'_, u16>, to: &DeviceSliceMut<'_, u16>| {
        let n = from.len() / rows;
        check::len(what, rows * n, from.len())?;
        check::len("slots of a cache", slots.saturating_mul(n), to.len())?;
        check::address(what, from.address(), VECTOR)?;
        check::address("a cache", to.address(), VECTOR)?;
        vectors(what, 2 * n)
    };
    let row_vectors = [width("keys", &keys, &key_cache)?, width("values", &values, &value_cache)?];
    row_vectors.iter().try_for_each(|n| check::count("elements of a row", *n))?;
    let parameters = QkvPlainAppend {
        from: [keys.address(), values.address()],
        to: [key_cache.address(), value_cache.address()],
        slot_mapping: slot_mapping.address(),
        slots: slots as u64,
        row_vectors: row_vectors.map(|n| n as u32),
        rows: rows as u32,
        reserved: 0,
    };
    let units = rows as u64 * (row_vectors[0] + row_vectors[1]) as u64;
    let grid = Grid { blocks: blocks(device, units, 128), threads: 128, shared: 0 };
    // SAFETY: inputs and caches have rows and slots of the same number of vectors, and are aligned (above); the kernel looks at
    // each slot before it writes there.
    unsafe { device.start(Kernel::PlainAppend, grid, stream, &parameters) }
}

/// Vectors in so many bytes.
fn vectors(what: &'static str, bytes: usize) -> Result<usize> {
    if !bytes.is_multiple_of(VECTOR) {
        return Err(Error::Shape {
            what,
            expected: format!("a multiple of {VECTOR} bytes"),
            got: format!("{bytes}"),
        });
    }
    Ok(bytes / VECTOR)
}
