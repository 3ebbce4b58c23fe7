//! One safe function a kernel.
//!
//! Each checks its arguments on the host, starts its kernel (`attend` and `prefill` up to two) on the stream and returns; an error means that nothing was started
//! and nothing written. A tensor without tokens, heads or channels is no error and starts nothing. None allocates, synchronises or reads back.
//!
//! Slices are passed by value: `(&slice).into()` and
//! `(&mut slice).into()` make them of cudarc's, and [`DeviceSliceMut::reborrow`](super::DeviceSliceMut::reborrow) lends one that is
//! needed again. Tensors, pools and a step's memory are passed by reference.
//!
//! Memory of another device is [`Error::Unsupported`](crate::Error::Unsupported) where it is known, that is, of cudarc's slices; a
//! stream of another device is refused by the driver.
//!
//! Views of foreign memory are made by `unsafe` constructors ([`raw`](super::raw)), whose promise covers what happens here.

mod append;
mod attend;
mod baselines;
mod checks;
mod dequantize;
mod exact;
mod fp8;
mod hadamard;
mod instances;
mod merge;
mod pages;
mod params;
mod prefill;
mod quantize;
mod step;

pub(crate) use append::append_memory;
pub use append::{LayerMemory, append, page_bytes};
pub use attend::{attend, attend_workspace, attend_workspace_fixed};
#[doc(hidden)]
pub use baselines::{plain_append, stream_copy, stream_read};
#[doc(hidden)]
pub use checks::{Product, check_layout, check_mma};
pub use dequantize::{CodeLengths, CodeOrder, DevicePairs, code_lengths, dequantize};
pub use exact::exact_rows;
pub use fp8::{fp8_absmax, fp8_absmax_workspace, fp8_decode, fp8_encode, fp8_encode_fitted, fp8_scale_count};
pub use hadamard::hadamard;
pub use merge::merge_states;
pub use pages::{GatherInputs, PageList, check_copies, convert_pages, copy_blocks, gather};
pub use params::DeviceAttendParams;
pub(crate) use prefill::check_prefill;
pub use prefill::{prefill, prefill_scratch};
pub use quantize::{quantize, quantize_with};
pub use step::{DeviceBatch, STATUS_WORDS, STEP_WORDS, StepMemory, begin_step, read_status};

use super::Device;
use super::device::Grid;

/// Blocks for `units` of work of which a block takes `per_block` at a time: enough to fill the device several times over, and
/// never more than there is work. Kernels loop over what is left.
fn blocks(device: &Device, units: u64, per_block: u64) -> u32 {
    let most = u64::from(device.multiprocessors()) * 32;
    units.div_ceil(per_block).clamp(1, most) as u32
}
