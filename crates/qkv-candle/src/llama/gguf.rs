//! A GGUF file: metadata read and checked, weights read one by one.

use super::error::{LlamaError, LlamaResult};
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Shape};
use std::fs::File;
use std::path::Path;

/// An opened GGUF file of the Llama architecture.
#[derive(Debug)]
pub struct Gguf {
    content: Content,
    file: File,
}

/// Sizes and constants of a Llama model, from the metadata of its file.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct LlamaConfig {
    /// Transformer layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Channels of a query or key head.
    pub key_dim: usize,
    /// Channels of a value head.
    pub value_dim: usize,
    /// Channels of the residual stream.
    pub embedding: usize,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Tokens the model was trained on at once.
    pub context: usize,
    /// Base of the rotary frequencies.
    pub rope_base: f32,
    /// Leading channels of a head that are rotated.
    pub rope_dims: usize,
    /// Positions are divided by this (linear scaling).
    pub rope_divisor: f32,
    /// Epsilon of the RMS norms.
    pub epsilon: f32,
}

impl Gguf {
    /// Opens a file and checks everything that can be checked without reading the weights: the magic, the
    /// architecture, and that every tensor lies inside the file.
    ///
    /// # Errors
    /// [`LlamaError::Io`], [`LlamaError::Damaged`] for a truncated file, [`LlamaError::Architecture`] for another
    /// model.
    pub fn open(path: impl AsRef<Path>) -> LlamaResult<Self> {
        let path = path.as_ref();
        let io = |source| LlamaError::Io { path: path.display().to_string(), source };
        let mut file = File::open(path).map_err(io)?;
        let bytes = file.metadata().map_err(io)?.len();
        let content = Content::read(&mut file).map_err(|e| LlamaError::Damaged(plain(&e)))?;
        let gguf = Self { content, file };
        let got = gguf.text("general.architecture")?;
        if got != "llama" {
            return Err(LlamaError::Architecture { got: got.to_string() });
        }
        for (name, t) in &gguf.content.tensor_infos {
            let end = tensor_bytes(&t.shape, t.ggml_dtype)
                .and_then(|n| n.checked_add(t.offset)?.checked_add(gguf.content.tensor_data_offset));
            if end.is_none_or(|end| end > bytes) {
                let end = end.map_or("beyond any file".into(), |e| e.to_string());
                return Err(LlamaError::Damaged(format!(
                    "tensor {name} ends at byte {end}, the file has {bytes}"
                )));
            }
        }
        Ok(gguf)
    }

    /// Metadata and tensor table.
    pub fn content(&self) -> &Content {
        &self.content
    }

    /// The sizes of the model.
    ///
    /// # Errors
    /// [`LlamaError::Metadata`] for a missing key or sizes that do not fit together,
    /// [`LlamaError::Unsupported`] for experts or another rope scaling than linear.
    pub fn config(&self) -> LlamaResult<LlamaConfig> {
        let bad = |key: &str, problem: String| Err(LlamaError::Metadata { key: key.into(), problem });
        let embedding = self.int("llama.embedding_length")?;
        let heads = self.int("llama.attention.head_count")?;
        let kv_heads = self.int_or("llama.attention.head_count_kv", heads)?;
        if heads == 0 || kv_heads == 0 || heads % kv_heads != 0 {
            return bad(
                "llama.attention.head_count_kv",
                format!("{kv_heads} does not divide {heads} query heads"),
            );
        }
        let key_dim = self.int_or("llama.attention.key_length", embedding / heads)?;
        let value_dim = self.int_or("llama.attention.value_length", key_dim)?;
        let rope_dims = self.int_or("llama.rope.dimension_count", key_dim)?;
        if rope_dims % 2 != 0 || rope_dims > key_dim {
            let problem =
                format!("{rope_dims} rotated channels of {key_dim}; expected an even number up to it");
            return bad("llama.rope.dimension_count", problem);
        }
        let vocab = match self.content.tensor_infos.get("token_embd.weight").map(|t| t.shape.dims()) {
            Some([vocab, e]) if *e == embedding => *vocab,
            other => {
                let (name, expected) = ("token_embd.weight".into(), format!("[vocabulary, {embedding}]"));
                return Err(LlamaError::Weight { name, expected, got: format!("{other:?}") });
            }
        };
        let experts = self.int_or("llama.expert_count", 0)?;
        if experts > 0 {
            let why = "mixtures of experts are not built; use a dense model";
            return Err(LlamaError::Unsupported { what: "expert_count", got: experts.to_string(), why });
        }
        let rope_divisor = match self.text("llama.rope.scaling.type").ok().as_deref() {
            None | Some("none") => 1.0,
            Some("linear") => self.float("llama.rope.scaling.factor")?,
            Some(other) => {
                let why = "only linear scaling and per-frequency factors (rope_freqs) are built";
                return Err(LlamaError::Unsupported { what: "rope scaling", got: other.into(), why });
            }
        };
        let layers = self.int("llama.block_count")?;
        for (key, n) in [
            ("llama.block_count", layers),
            ("llama.embedding_length", embedding),
            ("llama.attention.key_length", key_dim),
            ("llama.attention.value_length", value_dim),
            ("token_embd.weight", vocab),
        ] {
            if n == 0 {
                return bad(key, "expected at least 1, got 0".into());
            }
        }
        Ok(LlamaConfig {
            layers,
            heads,
            kv_heads,
            key_dim,
            value_dim,
            embedding,
            vocab,
            context: self.int_or("llama.context_length", 2048)?,
            rope_base: self.float("llama.rope.freq_base").or_else(|e| self.default_if_absent(e, 10_000.0))?,
            rope_dims,
            rope_divisor,
            epsilon: self.float("llama.attention.layer_norm_rms_epsilon")?,
        })
    }

    /// Reads one tensor.
    pub(crate) fn tensor(&mut self, name: &str, shape: &[usize]) -> LlamaResult<QTensor> {
        let Some(t) = self.optional(name)? else {
            let got = "no such tensor".into();
            return Err(LlamaError::Weight { name: name.into(), expected: format!("{shape:?}"), got });
        };
        if t.shape().dims() != shape {
            let got = format!("{:?}", t.shape().dims());
            return Err(LlamaError::Weight { name: name.into(), expected: format!("{shape:?}"), got });
        }
        Ok(t)
    }

    /// Reads one tensor if the file has it.
    pub(crate) fn optional(&mut self, name: &str) -> LlamaResult<Option<QTensor>> {
        if !self.content.tensor_infos.contains_key(name) {
            return Ok(None);
        }
        Ok(Some(self.content.tensor(&mut self.file, name, &Device::Cpu)?))
    }

    /// An unsigned number of any width.
    pub(crate) fn int(&self, key: &str) -> LlamaResult<usize> {
        let number = |v: &Value| match *v {
            Value::U8(x) => Some(x as u64),
            Value::U16(x) => Some(x as u64),
            Value::U32(x) => Some(x as u64),
            Value::U64(x) => Some(x),
            Value::I8(x) => u64::try_from(x).ok(),
            Value::I16(x) => u64::try_from(x).ok(),
            Value::I32(x) => u64::try_from(x).ok(),
            Value::I64(x) => u64::try_from(x).ok(),
            _ => None,
        };
        // Nothing that is counted here comes near 2^31; a damaged file does.
        match number(self.value(key)?) {
            Some(x) if x < 1 << 31 => Ok(x as usize),
            _ => {
                Err(LlamaError::Metadata { key: key.into(), problem: "expected a number below 2^31".into() })
            }
        }
    }

    fn int_or(&self, key: &str, default: usize) -> LlamaResult<usize> {
        if self.content.metadata.contains_key(key) { self.int(key) } else { Ok(default) }
    }

    fn float(&self, key: &str) -> LlamaResult<f32> {
        match self.value(key)?.to_f32() {
            Ok(x) if x.is_finite() && x > 0.0 => Ok(x),
            other => {
                let problem = format!("expected a positive number, got {other:?}");
                Err(LlamaError::Metadata { key: key.into(), problem })
            }
        }
    }

    fn default_if_absent(&self, error: LlamaError, default: f32) -> LlamaResult<f32> {
        match &error {
            LlamaError::Metadata { key, .. } if !self.content.metadata.contains_key(key) => Ok(default),
            _ => Err(error),
        }
    }

    fn text(&self, key: &str) -> LlamaResult<String> {
        match self.value(key)?.to_string() {
            Ok(s) => Ok(s.clone()),
            Err(_) => Err(LlamaError::Metadata { key: key.into(), problem: "expected a text".into() }),
        }
    }

    fn value(&self, key: &str) -> LlamaResult<&Value> {
        let absent = || LlamaError::Metadata { key: key.into(), problem: "it is missing".into() };
        self.content.metadata.get(key).ok_or_else(absent)
    }
}

/// Bytes a tensor takes in the file, unless its shape overflows.
fn tensor_bytes(shape: &Shape, dtype: GgmlDType) -> Option<u64> {
    let mut n = 1u64;
    for d in shape.dims() {
        n = n.checked_mul(*d as u64)?;
    }
    (n / dtype.block_size() as u64).checked_mul(dtype.type_size() as u64)
}

/// The first line of a candle error: the rest is a backtrace when those are on.
fn plain(e: &candle_core::Error) -> String {
    e.to_string().lines().next().unwrap_or_default().to_string()
}
