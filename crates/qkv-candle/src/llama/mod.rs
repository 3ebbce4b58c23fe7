//! Llama-architecture models from GGUF files on the CPU, attending through a [`Cache`](crate::Cache) or exactly:
//! what the example runs and what the quality of the formats is measured on.
//!
//! ```no_run
//! use qkv_candle::Cache;
//! use qkv_candle::llama::{Gguf, Llama, LlamaTokenizer, Sampling, Weights, generate};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut gguf = Gguf::open("model.gguf")?;
//! let tokenizer = LlamaTokenizer::new(&gguf)?;
//! let model = Llama::load(&mut gguf, Weights::Quantized, |_, _| {})?;
//! let mut cache = Cache::new(model.cache_config(2048).with_bits(qkv::Bits::B4))?;
//! let prompt = tokenizer.encode_chat("What is the capital of France?")?;
//! generate(&model, &tokenizer, &mut cache, &prompt, 64, Sampling::greedy(), |piece| print!("{piece}"))?;
//! # Ok(())
//! # }
//! ```

mod attention;
mod error;
mod generate;
mod gguf;
mod model;
mod names;
mod rope;
mod sample;
mod tokenizer;

pub use attention::{Attention, Exact};
pub use error::{LlamaError, LlamaResult};
pub use generate::{Generation, generate};
pub use gguf::{Gguf, LlamaConfig};
pub use model::{Llama, Weights};
pub use names::{format_name, parse_format};
pub use sample::{Sampler, Sampling, argmax};
pub use tokenizer::LlamaTokenizer;
