//! CUDA: the same caches and formats on the GPU, and one safe function a kernel.
//!
//! * [`KvCache::<Cuda>::on_device`](crate::KvCache::on_device) and
//!   [`PagedKvCache::<Cuda>::on_device`](crate::PagedKvCache::on_device) build caches whose pages, windows and steps are on a
//!   device. They take a stream of cudarc's or somebody else's handle ([`CacheStream`]), and pages of their own or lent ones.
//!   [`CapturedStep`] has a step in a graph.
//! * [`is_available`] says whether there is a driver with a device; it never panics.
//! * [`Device`] holds the loaded kernels of one GPU. All handles of a GPU share one set of modules.
//! * [`raw`] has the two things that cross the border to an engine: an address and a stream handle. [`DeviceTensor`] and
//!   [`DeviceTensorMut`] are strided views of such memory; `From` makes them of cudarc's slices.
//! * [`launch`] has the launch functions. Each checks everything on the host and starts its kernel (`attend` and `prefill` up to two), or nothing; none
//!   allocates, synchronises or reads back, so all can be captured in a graph.
//!
//! ```no_run
//! use qkv::Fp8Kind;
//! use qkv::cuda::{Device, DeviceTensor, RawStream, launch};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Memory and stream of the engine, here by cudarc. (Its own `CudaContext::new` panics where there is no driver.)
//! let device = Device::new(0)?;
//! let stream = device.context().new_stream()?;
//! let keys = stream.clone_htod(&vec![0.5f32; 7 * 8 * 128])?; // [tokens, heads, dim]
//! let (mut bytes, mut scales) = (stream.alloc_zeros::<u8>(7 * 8 * 128)?, stream.alloc_zeros::<f32>(7 * 8)?);
//!
//! launch::fp8_encode_fitted(
//!     &device,
//!     RawStream::from(&*stream),
//!     &DeviceTensor::thd(&keys, [7, 8, 128])?,
//!     Fp8Kind::E4M3,
//!     (&mut scales).into(),
//!     (&mut bytes).into(),
//! )?;
//! # Ok(())
//! # }
//! ```
//!
//! # Caches
//!
//! All device memory of a cache is allocated when it is built. A step is one copy of its batch from page-locked memory, one launch
//! of `begin_step`, and the launches of each layer: nothing is allocated, waited for or read back. (The host may be [`STAGES`]
//! steps ahead of the device; one that is further waits for it.)
//!
//! Between steps, calls that read what is stored wait for the stream: `stats`, `prefix`, `export_page`, `export_sinks`,
//! `import_page` of centred keys, and `device_status`, which tells what kernels counted. Those that change lengths (`open`, `clear`,
//! `truncate`, `fork`, `reorder` ..) put small copies and launches on the stream. `dequantize` only launches. Pages, windows and
//! decoded values have the bits of the CPU backend, so exported pages go from one to the other.
//!
//! ```no_run
//! use qkv::cuda::{Cuda, Device, DeviceTensor};
//! use qkv::{Bits, CacheConfig, KvCache};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Device::new(0)?;
//! let stream = device.context().new_stream()?;
//! let config = CacheConfig::new(32, 8, 128).with_bits(Bits::B4); // layers, kv heads, head dim
//! let mut cache = KvCache::<Cuda>::on_device(&device, stream.clone(), config)?;
//! let keys = stream.clone_htod(&vec![0.5f32; 8 * 128])?; // of one token, by the engine
//! for layer in 0..32 {
//!     let keys = DeviceTensor::thd(&keys, [1, 8, 128])?;
//!     cache.append(layer, &keys, &keys)?;
//! }
//! assert_eq!(cache.len(0), 1);
//! # Ok(())
//! # }
//! ```
//!
//! # Streams
//!
//! A cache has a stream, on which all its work is; launch functions are given one. A launch runs on the stream that it is given, in order with whatever else is on it, and makes no event. The handle 2 is
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
