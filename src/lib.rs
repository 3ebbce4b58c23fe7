//! A **quantized key/value cache** for large language models, and attention that reads it as it is stored.
//!
//! ```
//! use qkv::{AttendParams, Bits, CacheConfig, KvCache, TensorMut, TensorRef};
//! # fn main() -> qkv::Result<()> {
//! let config = CacheConfig::new(2, 4, 64).with_bits(Bits::B4); // layers, kv heads, head dim
//! let mut cache = KvCache::new(config)?;
//! let (k, v, q) = (vec![0.5f32; 4 * 64], vec![0.1f32; 4 * 64], vec![0.2f32; 8 * 64]);
//! let mut out = vec![0f32; 8 * 64];
//! for layer in 0..2 {
//!     cache.append(layer, &TensorRef::thd(&k, [1, 4, 64])?, &TensorRef::thd(&v, [1, 4, 64])?)?;
//!     let mut view = TensorMut::thd(&mut out, [1, 8, 64])?;
//!     cache.attend(layer, &TensorRef::thd(&q, [1, 8, 64])?, &AttendParams::new(), &mut view, None)?;
//! }
//! assert_eq!(cache.len(0), 1);
//! # Ok(())
//! # }
//! ```
//!
//! # Words
//!
//! | word | meaning |
//! |---|---|
//! | code | the stored unsigned integer |
//! | step, min | a group's affine pair: `x = step * code + min`, both f16 |
//! | scale | FP8's f32 factor |
//! | group | the elements that share a pair |
//! | per token / per channel | a group is neighbouring channels of one token / neighbouring tokens of one channel |
//! | tile | 64 tokens of one kv head of one layer |
//! | page | a tile of K and of V with their pairs |
//! | block | 64 tokens of all kv heads of all layers: the unit of block tables, reference counts and prefix sharing |
//! | window | the newest tokens, exact: R or more, fewer than R + 64 |
//! | sinks | the first tokens, exact |
//! | seat | a live sequence's small stable integer |
//! | append, attend, prefill | store new tokens; attention over what is stored; both for many tokens, exact |
//! | LSE | log-sum-exp of a query's logits, natural log |
//!
//! Tensors are `[tokens, heads, dim]` with strides ([`TensorRef`], [`TensorMut`]), so that `[batch, heads, tokens, dim]` is a
//! view and never a copy.
//!
//! # Where to start
//!
//! * [`KvCache`]: a fixed batch. [`PagedKvCache`]: continuous batching with seats, blocks, prefixes and forks.
//! * [`CacheConfig`]: formats, window, sinks, capacity. [`Format`]: what can be stored.
//! * [`attention`] over plain tensors, [`merge_states`] for split or cascaded attention.
//! * `cuda` (feature `cuda`): the same caches on the GPU (`KvCache<Cuda>`), and its kernels, one launch function each.
//! * [`quant`]: the formats' encoders and decoders on their own. [`layout`]: where every bit lies.
//!
//! # Rules that hold everywhere
//!
//! * Bad input is an [`Error`] that says what was expected, what came and what to do; the cache is what it was before the
//!   call. Nothing panics on user input.
//! * NaN and infinity in keys or values are not errors: their group decodes to NaN, no other. Values beyond ±65,504
//!   are clamped and counted in [`cache::Stats`].
//! * Codes, pairs and decoded values have the same bits on every machine and instruction set, CPU or GPU. Attention is deterministic;
//!   on the CPU it is independent of the number of threads and of the rest of the batch, on a GPU the latter is an option
//!   (`CudaOptions::with_fixed_split`).
//! * A step allocates nothing once its buffers have seen the largest batch.

mod attention;
pub mod backend;
pub mod cache;
mod config;
mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
mod format;
pub mod layout;
pub mod quant;
mod raw;
mod scales;
mod simd;
mod tensor;

pub use attention::{attention, merge_states};
pub use cache::{Batch, KvCache, PagePool, PagedKvCache, Prefix, Seat};
pub use config::{AttendParams, CacheConfig, LayerConfig};
pub use cpu::{Cpu, CpuSnapshot};
pub use error::{Error, Result};
pub use format::{Affine, Axis, Bits, Fit, Format, Fp8, Fp8Kind, Granularity};
pub use scales::Scales;
pub use tensor::{Data, DataMut, Dtype, Shape, TensorMut, TensorRef};

/// The README's code compiles and runs.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
