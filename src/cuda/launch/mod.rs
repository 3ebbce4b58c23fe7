//! One safe function a kernel.
//!
//! Each checks its arguments on the host, starts one kernel on the stream and returns; an error means that nothing was started
//! and nothing written. Zero tokens start nothing. None allocates, synchronises or reads back.
//!
//! Views of foreign memory are made by `unsafe` constructors ([`raw`](super::raw)), whose promise covers what happens here.

mod append;
mod checks;
mod dequantize;
mod exact;
mod fp8;
mod hadamard;
mod pages;
mod params;
mod quantize;
mod step;

pub use append::{LayerMemory, append, page_bytes};
#[doc(hidden)]
pub use checks::{Product, check_layout, check_mma};
pub use dequantize::{CodeLengths, CodeOrder, DevicePairs, code_lengths, dequantize};
pub use exact::exact_rows;
pub use fp8::{fp8_absmax, fp8_absmax_workspace, fp8_decode, fp8_encode, fp8_encode_fitted, fp8_scale_count};
pub use hadamard::hadamard;
pub use pages::{GatherInputs, PageList, convert_pages, copy_blocks, gather};
pub use params::DeviceAttendParams;
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
