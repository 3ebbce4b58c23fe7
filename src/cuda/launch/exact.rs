use super::append::{LayerMemory, rows_of, window_dtype};
use super::{Grid, blocks};
use crate::config::CacheConfig;
use crate::cuda::abi::QkvExactRows;
use crate::cuda::device::Kernel;
use crate::cuda::{Device, DeviceTensorMut, RawStream, check};
use crate::error::{Error, Result, index};

const THREADS: u32 = 128;

/// Writes the exact tokens of one sequence in one layer, its sinks and those behind the first `packed` ones, to their places in
/// `key` `[len, kv_heads, key_dim]` and `value` `[len, kv_heads, value_dim]`, any dtype, rounded once. With
/// [`gather`](super::gather), which comes before on the same stream, these are all tokens of the sequence.
///
/// # Errors
/// [`Error::OutOfRange`] for a seat that does not exist, [`Error::BeyondLength`] if `packed` is more than the tokens,
/// [`Error::Shape`], [`Error::Length`] or [`Error::Address`] for tensors or memory that do not fit the configuration,
/// [`Error::Unsupported`] for an f32 window, [`Error::Cuda`] if the launch fails.
#[allow(clippy::too_many_arguments)]
pub fn exact_rows(
    device: &Device,
    stream: RawStream<'_>,
    config: &CacheConfig,
    memory: &LayerMemory<'_>,
    seat: usize,
    packed: usize,
    key: &mut DeviceTensorMut<'_>,
    value: &mut DeviceTensorMut<'_>,
) -> Result<()> {
    config.validate()?;
    let (c, len) = (config, key.dims()[0]);
    check::same_dims("key", [len, c.kv_heads, c.key_dim], key.dims())?;
    check::same_dims("value", [len, c.kv_heads, c.value_dim], value.dims())?;
    check::count("tokens", len)?;
    if seat >= c.max_sequences {
        return Err(Error::OutOfRange { what: "seat", got: index(seat), limit: c.max_sequences });
    }
    if packed > len {
        return Err(Error::BeyondLength { what: "exact_rows (tokens in pages)", got: packed, len });
    }
    if len == 0 || c.residual.is_none() {
        return Ok(());
    }
    let rows = c.window_rows();
    let p = QkvExactRows {
        out: [key.parameters(), value.parameters()],
        window: [
            rows_of("key_window", &memory.key_window, c, rows, c.key_dim)?,
            rows_of("value_window", &memory.value_window, c, rows, c.value_dim)?,
        ],
        sink: [
            rows_of("key_sinks", &memory.key_sinks, c, c.sinks, c.key_dim)?,
            rows_of("value_sinks", &memory.value_sinks, c, c.sinks, c.value_dim)?,
        ],
        seat: seat as u32,
        heads: c.kv_heads as u32,
        window_rows: rows as u32,
        sinks: c.sinks as u32,
        len: len as u32,
        packed: packed as u32,
        dtype: window_dtype(c)?,
        reserved: 0,
    };
    let tokens = c.sinks.min(len) + len - packed;
    let units = (tokens * c.kv_heads * 2) as u64;
    let grid = Grid { blocks: blocks(device, units, u64::from(THREADS) / 32), threads: THREADS, shared: 0 };
    // SAFETY: both tensors have `len` rows and were checked against their memory; window and sinks have the sizes that the
    // configuration gives, and the seat is one of them (above).
    unsafe { device.start(Kernel::ExactRows, grid, stream, &p) }
}
