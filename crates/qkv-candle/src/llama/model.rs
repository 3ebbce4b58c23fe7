//! A Llama forward pass whose attention is one call into an [`Attention`].

use super::attention::Attention;
use super::error::{LlamaError, LlamaResult};
use super::gguf::{Gguf, LlamaConfig};
use super::rope::Rope;
use candle_core::quantized::{QMatMul, QTensor};
use candle_core::{D, Device, Module, Tensor};
use std::sync::Arc;

/// How weights are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weights {
    /// As in the file; matrix products round activations to 8 bits. Small, and fast for one token at a time where no
    /// other program wants the cores: candle's threads wait for each other busily (`CANDLE_NUM_THREADS=1` ends that).
    Quantized,
    /// Dequantized to f32 once; plain f32 matrix products. For measuring quality.
    F32,
}

/// A matrix `[out, in]` with an optional bias.
#[derive(Debug, Clone)]
struct Linear {
    matrix: Matrix,
    bias: Option<Tensor>,
}

#[derive(Debug, Clone)]
enum Matrix {
    Quantized(QMatMul),
    /// `[out, in]`, multiplied transposed: a view, not a copy.
    F32(Tensor),
}

impl Linear {
    fn new(weight: Arc<QTensor>, bias: Option<Tensor>, weights: Weights) -> LlamaResult<Self> {
        let matrix = match weights {
            Weights::Quantized => Matrix::Quantized(QMatMul::from_arc(weight)?),
            Weights::F32 => Matrix::F32(weight.dequantize(&Device::Cpu)?),
        };
        Ok(Self { matrix, bias })
    }

    /// `[n, in]` to `[n, out]`.
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let y = match &self.matrix {
            Matrix::Quantized(m) => m.forward(x)?,
            Matrix::F32(m) => x.matmul(&m.t()?)?,
        };
        match &self.bias {
            Some(b) => y.broadcast_add(b),
            None => Ok(y),
        }
    }
}

/// `x / sqrt(mean(x²) + epsilon) * weight` over the last dimension.
#[derive(Debug, Clone)]
struct RmsNorm {
    weight: Vec<f32>,
    epsilon: f32,
}

impl RmsNorm {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let mut y = x.flatten_all()?.to_vec1::<f32>()?;
        for row in y.chunks_exact_mut(self.weight.len()) {
            let square: f64 = row.iter().map(|x| (*x as f64) * (*x as f64)).sum();
            let norm = 1.0 / ((square / row.len() as f64) as f32 + self.epsilon).sqrt();
            row.iter_mut().zip(&self.weight).for_each(|(x, w)| *x = *x * norm * w);
        }
        Tensor::from_vec(y, x.shape(), x.device())
    }
}

#[derive(Debug, Clone)]
struct Layer {
    attention_norm: RmsNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    feed_norm: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// A Llama model on the CPU.
#[derive(Debug, Clone)]
pub struct Llama {
    config: LlamaConfig,
    embedding: Tensor,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Linear,
    rope: Rope,
}

impl Llama {
    /// Reads the weights. `loaded(i, layers)` is called after each layer, for a progress bar.
    ///
    /// # Errors
    /// [`LlamaError::Weight`] for a tensor that is missing or has another shape than the metadata say.
    pub fn load(
        gguf: &mut Gguf,
        weights: Weights,
        mut loaded: impl FnMut(usize, usize),
    ) -> LlamaResult<Self> {
        let c = gguf.config()?;
        let (e, q, k, v) =
            (c.embedding, c.heads * c.key_dim, c.kv_heads * c.key_dim, c.kv_heads * c.value_dim);
        let hidden = gguf.int("llama.feed_forward_length")?;
        let norm = |gguf: &mut Gguf, name: &str| -> LlamaResult<RmsNorm> {
            let weight = gguf.tensor(&format!("{name}.weight"), &[e])?.dequantize(&Device::Cpu)?.to_vec1()?;
            Ok(RmsNorm { weight, epsilon: c.epsilon })
        };
        let linear = |gguf: &mut Gguf, name: &str, out: usize, inner: usize| -> LlamaResult<Linear> {
            let weight = gguf.tensor(&format!("{name}.weight"), &[out, inner])?;
            let bias = match gguf.optional(&format!("{name}.bias"))? {
                Some(b) => Some(b.dequantize(&Device::Cpu)?.reshape(out)?),
                None => None,
            };
            Linear::new(Arc::new(weight), bias, weights)
        };
        let mut layers = Vec::with_capacity(c.layers.min(1024));
        for i in 0..c.layers {
            let name = |part: &str| format!("blk.{i}.{part}");
            layers.push(Layer {
                attention_norm: norm(gguf, &name("attn_norm"))?,
                query: linear(gguf, &name("attn_q"), q, e)?,
                key: linear(gguf, &name("attn_k"), k, e)?,
                value: linear(gguf, &name("attn_v"), v, e)?,
                output: linear(gguf, &name("attn_output"), e, c.heads * c.value_dim)?,
                feed_norm: norm(gguf, &name("ffn_norm"))?,
                gate: linear(gguf, &name("ffn_gate"), hidden, e)?,
                up: linear(gguf, &name("ffn_up"), hidden, e)?,
                down: linear(gguf, &name("ffn_down"), e, hidden)?,
            });
            loaded(i + 1, c.layers);
        }
        let embedding = Arc::new(gguf.tensor("token_embd.weight", &[c.vocab, e])?);
        // Without a head of its own the model uses its embedding.
        let head = match gguf.optional("output.weight")? {
            Some(_) => linear(gguf, "output", c.vocab, e)?,
            None => Linear::new(embedding.clone(), None, weights)?,
        };
        let factors = match gguf.optional("rope_freqs.weight")? {
            Some(f) => Some(f.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>()?),
            None => None,
        };
        let embedding = match (&head.matrix, weights) {
            // A tied f32 head already holds it.
            (Matrix::F32(m), Weights::F32) if !gguf.content().tensor_infos.contains_key("output.weight") => {
                m.clone()
            }
            _ => embedding.dequantize(&Device::Cpu)?,
        };
        let norm = norm(gguf, "output_norm")?;
        let rope = Rope::new(&c, factors.as_deref())?;
        Ok(Self { config: c, embedding, layers, norm, head, rope })
    }

    /// Sizes of the model.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// Runs `ids` through all layers, starting at the attention's position: the normalized hidden states
    /// `[tokens, embedding]`, which [`logits`](Self::logits) turns into logits.
    ///
    /// # Errors
    /// [`LlamaError::EmptyPrompt`] without ids, [`LlamaError::Token`] for an id outside the vocabulary, and what the
    /// attention returns.
    pub fn forward(&self, ids: &[u32], attention: &mut dyn Attention) -> LlamaResult<Tensor> {
        let (c, n) = (&self.config, ids.len());
        if n == 0 {
            return Err(LlamaError::EmptyPrompt);
        }
        if let Some(got) = ids.iter().find(|id| **id as usize >= c.vocab) {
            return Err(LlamaError::Token { got: *got, vocab: c.vocab });
        }
        let position = attention.position()?;
        let turns = self.rope.turns(position, n);
        let mut x = self.embedding.index_select(&Tensor::new(ids, &Device::Cpu)?, 0)?;
        for (i, l) in self.layers.iter().enumerate() {
            let h = l.attention_norm.forward(&x)?;
            let q = turns.rotate(l.query.forward(&h)?, c.heads)?;
            let k = turns.rotate(l.key.forward(&h)?, c.kv_heads)?;
            let v = l.value.forward(&h)?.reshape((1, n, c.kv_heads, c.value_dim))?.transpose(1, 2)?;
            let y = attention.attend(i, &q, &k, &v)?; // [1, heads, n, value_dim]
            let y = y.transpose(1, 2)?.contiguous()?.reshape((n, c.heads * c.value_dim))?;
            x = (x + l.output.forward(&y)?)?;
            let h = l.feed_norm.forward(&x)?;
            let h = (l.gate.forward(&h)?.silu()? * l.up.forward(&h)?)?;
            x = (x + l.down.forward(&h)?)?;
        }
        Ok(self.norm.forward(&x)?)
    }

    /// Logits `[tokens, vocabulary]` of hidden states.
    ///
    /// # Errors
    /// A candle error for a wrong shape.
    pub fn logits(&self, hidden: &Tensor) -> LlamaResult<Tensor> {
        Ok(self.head.forward(hidden)?)
    }

    /// Logits after the last of `ids`.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn next_logits(&self, ids: &[u32], attention: &mut dyn Attention) -> LlamaResult<Vec<f32>> {
        let hidden = self.forward(ids, attention)?;
        let last = hidden.narrow(0, hidden.dim(D::Minus2)? - 1, 1)?.contiguous()?;
        Ok(self.logits(&last)?.flatten_all()?.to_vec1()?)
    }

    /// A cache configuration for this model with the default formats and room for one sequence of `tokens`.
    pub fn cache_config(&self, tokens: usize) -> qkv::CacheConfig {
        let c = &self.config;
        qkv::CacheConfig::new(c.layers, c.kv_heads, c.key_dim)
            .with_dims(c.key_dim, c.value_dim)
            .with_capacity(1, tokens)
    }
}
