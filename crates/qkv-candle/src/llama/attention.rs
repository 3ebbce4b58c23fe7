//! The seam between the model and what holds its keys and values.

use crate::cache::Cache;
use candle_core::{Result, Tensor};
use qkv::AttendParams;

/// Holds keys and values of all layers and attends over them. Tensors are `[batch, heads, tokens, dim]`, after
/// RoPE; attention is causal with scale `1 / sqrt(dim)`.
pub trait Attention {
    /// Tokens held: the position of the next one. Equal in all layers between steps.
    fn position(&self) -> Result<usize>;

    /// Appends `k` and `v` to `layer`, then attends with `q`: `[batch, query heads, tokens, value dim]`.
    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor>;
}

impl Attention for Cache {
    fn position(&self) -> Result<usize> {
        self.current_seq_len()
    }

    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        self.layer(layer)?.attend(q, k, v, &AttendParams::new())
    }
}

/// Exact attention over f32 keys and values: what a quantized cache is compared with.
#[derive(Debug, Clone, Default)]
pub struct Exact {
    /// Keys and values of each layer, `[1, kv heads, tokens, dim]`.
    layers: Vec<Option<(Tensor, Tensor)>>,
}

impl Exact {
    /// An empty one for this many layers.
    pub fn new(layers: usize) -> Self {
        Self { layers: vec![None; layers] }
    }

    /// Keys and values of a layer, `[1, kv heads, tokens, dim]`, if it holds any.
    pub fn layer(&self, layer: usize) -> Option<&(Tensor, Tensor)> {
        self.layers.get(layer)?.as_ref()
    }

    /// Appends keys and values, `[1, kv heads, tokens, dim]`, to a layer.
    ///
    /// # Errors
    /// If there is no such layer or the shapes differ.
    pub fn append(&mut self, layer: usize, k: &Tensor, v: &Tensor) -> Result<()> {
        let Some(slot) = self.layers.get_mut(layer) else {
            candle_core::bail!("layer {layer} is out of range")
        };
        *slot = Some(match slot.take() {
            Some((k0, v0)) => (Tensor::cat(&[&k0, k], 2)?, Tensor::cat(&[&v0, v], 2)?),
            None => (k.contiguous()?, v.contiguous()?),
        });
        Ok(())
    }

    /// The first `tokens` tokens only, sharing memory with this one.
    pub fn prefix(&self, tokens: usize) -> Result<Self> {
        let cut = |x: &Tensor| x.narrow(2, 0, tokens.min(x.dim(2)?));
        let layers = self.layers.iter().map(|l| match l {
            Some((k, v)) => Ok(Some((cut(k)?, cut(v)?))),
            None => Ok(None),
        });
        Ok(Self { layers: layers.collect::<Result<_>>()? })
    }
}

impl Attention for Exact {
    fn position(&self) -> Result<usize> {
        // The last layer is the last to grow.
        match self.layers.last() {
            Some(Some((k, _))) => k.dim(2),
            _ => Ok(0),
        }
    }

    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        self.append(layer, k, v)?;
        match self.layer(layer) {
            Some((k, v)) => causal(q, k, v),
            None => candle_core::bail!("layer {layer} holds nothing"),
        }
    }
}

/// `softmax(q kᵀ / sqrt(d) + causal mask) v` in f32, one matrix product for scores and one for values.
fn causal(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let (b, heads, n, d) = q.dims4()?;
    let (_, kv_heads, t, dv) = (k.dim(0)?, k.dim(1)?, k.dim(2)?, v.dim(3)?);
    let group = heads / kv_heads;
    // Query heads of one kv head are rows of one product: [b, kv, group * n, d].
    let q = q.contiguous()?.reshape((b, kv_heads, group * n, d))?;
    let scores = q.matmul(&k.transpose(2, 3)?)?;
    let mut scores = scores.flatten_all()?.to_vec1::<f32>()?;
    let scale = 1.0 / (d as f32).sqrt();
    for (row, s) in scores.chunks_exact_mut(t).enumerate() {
        let seen = t - n + row % n + 1;
        softmax(&mut s[..seen], scale);
        s[seen..].fill(0.0);
    }
    let p = Tensor::from_vec(scores, (b, kv_heads, group * n, t), q.device())?;
    p.matmul(&v.contiguous()?)?.reshape((b, heads, n, dv))
}

/// Softmax of `scale * s` in place; the sum is taken in f64.
fn softmax(s: &mut [f32], scale: f32) {
    let max = s.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0f64;
    for x in s.iter_mut() {
        *x = (scale * (*x - max)).exp();
        sum += *x as f64;
    }
    let norm = (1.0 / sum) as f32;
    s.iter_mut().for_each(|x| *x *= norm);
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn exact_attention_does_not_depend_on_the_split_into_steps() {
        let dev = Device::Cpu;
        let (heads, kv, n, d) = (4, 2, 9, 16);
        let q = Tensor::randn(0f32, 1.0, (1, heads, n, d), &dev).unwrap();
        let k = Tensor::randn(0f32, 1.0, (1, kv, n, d), &dev).unwrap();
        let v = Tensor::randn(0f32, 1.0, (1, kv, n, d), &dev).unwrap();
        let whole = Exact::new(1).attend(0, &q, &k, &v).unwrap();
        let mut stepwise = Exact::new(1);
        for i in 0..n {
            let at = |x: &Tensor| x.narrow(2, i, 1).unwrap();
            assert_eq!(stepwise.position().unwrap(), i);
            let row = stepwise.attend(0, &at(&q), &at(&k), &at(&v)).unwrap();
            let difference = (row - at(&whole)).unwrap().abs().unwrap().max_all().unwrap();
            assert!(difference.to_scalar::<f32>().unwrap() < 1e-5);
        }
        // The first token sees only itself.
        let first = whole.narrow(2, 0, 1).unwrap().narrow(1, 0, 1).unwrap();
        let own = v.narrow(2, 0, 1).unwrap().narrow(1, 0, 1).unwrap();
        let difference = (first - own).unwrap().abs().unwrap().max_all().unwrap();
        assert!(difference.to_scalar::<f32>().unwrap() < 1e-6);
    }
}
