//! CUDA: the same formats on the GPU, with one safe function a kernel.
//!
//! * [`is_available`] says whether there is a driver with a device; it never panics.
//! * [`Device`] holds the loaded kernels of one GPU. All handles of a GPU share one set of modules.
//! * [`raw`] has the two things that cross the border to an engine: an address and a stream handle. [`DeviceTensor`] and
//!   [`DeviceTensorMut`] are strided views of such memory; `From` makes them of cudarc's slices.
//! * [`launch`] has the launch functions. Each checks everything on the host and starts one kernel, or nothing; none
//!   allocates, synchronises or reads back, so all can be captured in a graph.
//!
//! ```no_run
//! use qkv::cuda::{Device, DeviceSliceMut, DeviceTensor, RawStream, launch};
//! use qkv::{Fp8Kind, cuda::cudarc::driver::CudaContext};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Memory and stream of the engine, here by cudarc.
//! let stream = CudaContext::new(0)?.new_stream()?;
//! let keys = stream.clone_htod(&vec![0.5f32; 7 * 8 * 128])?; // [tokens, heads, dim]
//! let (mut bytes, mut scales) = (stream.alloc_zeros::<u8>(7 * 8 * 128)?, stream.alloc_zeros::<f32>(7 * 8)?);
//!
//! let device = Device::new(0)?;
//! launch::fp8_encode_fitted(
//!     &device,
//!     RawStream::from(&*stream),
//!     &DeviceTensor::thd(&keys, [7, 8, 128])?,
//!     Fp8Kind::E4M3,
//!     &mut DeviceSliceMut::from(&mut scales),
//!     &mut DeviceSliceMut::from(&mut bytes),
//! )?;
//! # Ok(())
//! # }
//! ```
//!
//! # Streams
//!
//! A launch runs on the stream that it is given, in order with whatever else is on it, and makes no event. The handle 2 is
//! CUDA's per-thread default stream: it names another stream in every thread, so pass it from the thread whose work it
//! should follow. Memory must stay alive until the stream has done the work.

#[allow(missing_docs, unreachable_pub, dead_code, clippy::all)]
#[rustfmt::skip]
mod abi;
mod cache;
mod check;
mod device;
mod images;
pub mod launch;
mod pages;
mod parameters;
pub mod raw;
mod status;
mod tensor;

pub use cache::{CacheStream, CapturedStep, Cuda, CudaOptions, CudaSnapshot, DeviceMemory, STAGES};
pub use device::{Device, is_available};
pub use pages::{PageFormat, Pages, PagesMut};
pub use raw::{DeviceSlice, DeviceSliceMut, RawStream};
pub use status::CacheStatus;
pub use tensor::{DeviceElement, DeviceTensor, DeviceTensorMut};

/// The cudarc that this crate is built with, for `From` conversions.
pub use cudarc;
