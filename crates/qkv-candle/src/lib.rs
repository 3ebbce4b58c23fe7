//! The [`qkv`] quantized key/value cache for candle models: tensors `[batch, heads, tokens, dim]` in, tensors out,
//! and attention that reads the packed cache instead of a dense copy of it.
//!
//! * [`Cache`] holds all layers; [`Cache::layers`] gives one [`LayerCache`] a layer.
//! * [`LayerCache::attend`] appends and attends: it replaces `cache.append` and the whole attention after it.
//! * [`LayerCache::append_dense`] has the signature of `candle_nn::kv_cache`, for a first try; it costs O(tokens).
//! * `llama` (feature): Llama-architecture GGUF models that run on it.

mod cache;
mod view;

#[cfg(feature = "llama")]
pub mod llama;

pub use cache::{Cache, LayerCache};
pub use qkv;
