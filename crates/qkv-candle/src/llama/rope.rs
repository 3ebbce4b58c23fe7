//! Rotary position embedding of adjacent pairs: `(x[2i], x[2i+1])` turns by `position / base^(2i/dims)`. GGUF
//! files of Llama models store Q and K permuted so that pairs are neighbours.

use super::error::{LlamaError, LlamaResult};
use super::gguf::LlamaConfig;
use candle_core::{Result, Tensor};

/// The frequencies of a model.
#[derive(Debug, Clone)]
pub(crate) struct Rope {
    frequencies: Vec<f32>,
    dim: usize,
}

/// Cosine and sine of each position of one step and each pair.
#[derive(Debug)]
pub(crate) struct Turns {
    /// `[positions][pairs]`.
    turns: Vec<(f32, f32)>,
    pairs: usize,
    dim: usize,
}

impl Rope {
    /// `factors` divide the frequencies one by one (`rope_freqs` of Llama 3.1).
    pub(crate) fn new(c: &LlamaConfig, factors: Option<&[f32]>) -> LlamaResult<Self> {
        let pairs = c.rope_dims / 2;
        if let Some(f) =
            factors.filter(|f| f.len() != pairs || f.iter().any(|x| !(x.is_finite() && *x > 0.0)))
        {
            let (name, expected) = ("rope_freqs.weight".into(), format!("{pairs} positive numbers"));
            return Err(LlamaError::Weight { name, expected, got: format!("{} numbers", f.len()) });
        }
        let frequency = |i: usize| {
            let f = c.rope_base.powf(-(2.0 * i as f32) / c.rope_dims as f32) / c.rope_divisor;
            factors.map_or(f, |x| f / x[i])
        };
        Ok(Self { frequencies: (0..pairs).map(frequency).collect(), dim: c.key_dim })
    }

    /// The turns of `n` positions from `position` on.
    pub(crate) fn turns(&self, position: usize, n: usize) -> Turns {
        let angle = |p: usize, f: f32| (p as f32 * f).sin_cos();
        let all = (position..position + n).flat_map(|p| self.frequencies.iter().map(move |f| angle(p, *f)));
        let turns = all.map(|(s, c)| (c, s)).collect();
        Turns { turns, pairs: self.frequencies.len(), dim: self.dim }
    }
}

impl Turns {
    /// Rotates `[n, heads * dim]` and returns it as a `[1, heads, n, dim]` view.
    pub(crate) fn rotate(&self, x: Tensor, heads: usize) -> Result<Tensor> {
        let n = x.dim(0)?;
        let mut y = x.flatten_all()?.to_vec1::<f32>()?;
        for (t, token) in y.chunks_exact_mut(heads * self.dim).enumerate() {
            let turns = &self.turns[t * self.pairs..(t + 1) * self.pairs];
            for head in token.chunks_exact_mut(self.dim) {
                for (p, (c, s)) in head.chunks_exact_mut(2).zip(turns) {
                    (p[0], p[1]) = (p[0] * c - p[1] * s, p[0] * s + p[1] * c);
                }
            }
        }
        Tensor::from_vec(y, (1, n, heads, self.dim), x.device())?.transpose(1, 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    fn config(rope_dims: usize) -> LlamaConfig {
        LlamaConfig {
            layers: 1,
            heads: 1,
            kv_heads: 1,
            key_dim: 16,
            value_dim: 16,
            embedding: 16,
            vocab: 8,
            context: 64,
            rope_base: 10_000.0,
            rope_dims,
            rope_divisor: 1.0,
            epsilon: 1e-5,
        }
    }

    #[test]
    fn scores_depend_on_the_distance_only_and_unrotated_channels_stay() {
        let rope = Rope::new(&config(8), None).unwrap();
        let x: Vec<f32> = (0..16).map(|i| (i as f32 * 0.7).sin() + 0.1).collect();
        let rotated = |p: usize| -> Vec<f32> {
            let t = Tensor::from_vec(x.clone(), (1, 16), &Device::Cpu).unwrap();
            let y = rope.turns(p, 1).rotate(t, 1).unwrap();
            y.flatten_all().unwrap().to_vec1().unwrap()
        };
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        assert_eq!(rotated(0), x);
        assert_eq!(rotated(5)[8..], x[8..]);
        assert!((dot(&rotated(3), &rotated(7)) - dot(&rotated(10), &rotated(14))).abs() < 1e-4);
        assert!((dot(&rotated(3), &rotated(7)) - dot(&rotated(3), &rotated(4))).abs() > 1e-3);
        // Pair 0 turns by one radian a token.
        let y = rotated(1);
        assert!((y[0] - (x[0] * 1f32.cos() - x[1] * 1f32.sin())).abs() < 1e-6);
    }

    #[test]
    fn factors_of_another_length_are_refused() {
        assert!(Rope::new(&config(8), Some(&[1.0; 3])).is_err());
        assert!(Rope::new(&config(8), Some(&[1.0, 1.0, 0.0, 1.0])).is_err());
        let halved = Rope::new(&config(8), Some(&[2.0; 4])).unwrap();
        assert_eq!(halved.frequencies[0], 0.5);
    }
}
