//! Quantized key/value cache (crate docs to be written last).

mod attention;
pub mod backend;
pub mod cache;
mod config;
mod cpu;
mod error;
mod format;
pub mod layout;
pub mod quant;
mod raw;
mod scales;
mod simd;
mod tensor;

pub use attention::{attention, merge_states};
pub use cache::{KvCache, PagedKvCache};
pub use config::{AttendParams, CacheConfig, LayerConfig};
pub use cpu::{Cpu, CpuSnapshot};
pub use error::{Error, Result};
pub use format::{Affine, Axis, Bits, Fit, Format, Fp8, Fp8Kind, Granularity};
pub use scales::Scales;
pub use tensor::{Data, DataMut, Dtype, Shape, TensorMut, TensorRef};
