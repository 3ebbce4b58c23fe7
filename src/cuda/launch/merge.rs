use super::{Grid, blocks};
use crate::cuda::abi::QkvMergeStates;
use crate::cuda::device::Kernel;
use crate::cuda::{Device, DeviceSlice, DeviceSliceMut, DeviceTensor, DeviceTensorMut, RawStream, check};
use crate::error::Result;

const THREADS: u32 = 128;

/// Merges a second partial attention result, over other keys, into a first one, in place: shared prefixes, cascades, ranks that
/// hold parts of a sequence. The twin of [`merge_states`](crate::merge_states), with the same rules.
///
/// `out` and `other_out` are `[tokens, heads, dim]` of f16, bf16 or f32, any strides; `lse` and `other_lse` are f32
/// `[tokens][head]`, natural logarithms. Per row, with `m = max(lse, other_lse)`, `a = e^(lse - m)`, `b = e^(other_lse - m)`:
///
/// ```text
/// out = (a * out + b * other_out) / (a + b)        lse = m + ln(a + b)
/// ```
///
/// A state with LSE -inf has seen no key and changes nothing, whatever its output holds; two such states make output 0 and
/// LSE -inf. NaN in either LSE makes the row NaN. A sink logit must be counted in one of the two only. Sums are in f32,
/// rounded once to the dtype of `out`.
///
/// # Errors
/// [`Error::Shape`](crate::Error::Shape), [`Error::Length`](crate::Error::Length) or [`Error::Address`](crate::Error::Address)
/// for results that do not fit each other; [`Error::Cuda`](crate::Error::Cuda) if the launch fails.
pub fn merge_states(
    device: &Device,
    stream: RawStream<'_>,
    out: &mut DeviceTensorMut<'_>,
    lse: DeviceSliceMut<'_, f32>,
    other_out: &DeviceTensor<'_>,
    other_lse: DeviceSlice<'_, f32>,
) -> Result<()> {
    let [tokens, heads, dim] = out.dims();
    check::same_dims("other_out", out.dims(), other_out.dims())?;
    check::sizes("out", out.dims())?;
    let rows = tokens * heads;
    check::len("lse", rows, lse.len())?;
    check::len("other_lse", rows, other_lse.len())?;
    if rows == 0 || dim == 0 {
        return Ok(());
    }
    check::home(
        device,
        [
            ("out", out.device()),
            ("lse", lse.device()),
            ("other_out", other_out.device()),
            ("other_lse", other_lse.device()),
        ],
    )?;
    check::address("lse", lse.address(), 4)?;
    check::address("other_lse", other_lse.address(), 4)?;
    let p = QkvMergeStates {
        out: out.as_ref().parameters(),
        other: other_out.parameters(),
        lse: lse.address(),
        other_lse: other_lse.address(),
    };
    let blocks = blocks(device, rows as u64, u64::from(THREADS / 32));
    let grid = Grid { blocks, threads: THREADS, shared: 0 };
    // SAFETY: both tensors have the same shape and lie in their memory, both LSEs have an element a row (above); the tensor
    // that is written overlaps nothing, as its view is unique.
    unsafe { device.start(Kernel::MergeStates, grid, stream, &p) }
}
