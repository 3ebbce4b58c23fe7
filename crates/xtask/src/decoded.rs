//! Attention in f64 over what a cache decodes to: the same stored codes without the library's attention kernels.
//!
//! A figure that differs between the two is either an error of the kernels or rounding that a model amplifies. Noise of
//! a few f32 roundings on every output ([`Decoded::with_noise`]) tells which: it shows how far a figure moves by rounding
//! alone.

use candle_core::{Result, Tensor};
use qkv_candle::Cache;
use qkv_candle::llama::Attention;
use rayon::prelude::*;

/// A cache whose attention is computed in f64 over decoded keys and values. O(tokens held) a step.
#[derive(Debug)]
pub struct Decoded {
    cache: Cache,
    noise: Option<u64>,
}

impl Decoded {
    /// Attends over what `cache` holds.
    pub fn new(cache: Cache) -> Self {
        Self { cache, noise: None }
    }

    /// The same with every output multiplied by `1 + e`, random by `seed`, `e` evenly spread within `2^-22`: 1.4e-7 as
    /// root mean square.
    #[must_use]
    pub fn with_noise(self, seed: u64) -> Self {
        Self { noise: Some(seed), ..self }
    }
}

impl Attention for Decoded {
    fn position(&self) -> Result<usize> {
        self.cache.current_seq_len()
    }

    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let (k, v) = self.cache.layer(layer)?.append_dense(k, v)?;
        let (batch, heads, n, dim) = q.dims4()?;
        let (_, kv_heads, len, value_dim) = v.dims4()?;
        let data = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
        let (q, k, v) = (data(q)?, data(&k)?, data(&v)?);
        let mut out = vec![0f32; batch * heads * n * value_dim];
        out.par_chunks_exact_mut(value_dim).enumerate().for_each(|(row, out)| {
            let (head, i) = (row / n, row % n);
            let head_kv = head / heads * kv_heads + head % heads / (heads / kv_heads);
            let seen = len - n + i + 1;
            let k = &k[head_kv * len * dim..][..seen * dim];
            let v = &v[head_kv * len * value_dim..][..seen * value_dim];
            attend_row(&q[row * dim..][..dim], k, v, out);
        });
        if let Some(state) = &mut self.noise {
            let mut draw = || {
                *state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
                (*state >> 40) as f64 / (1u64 << 23) as f64 - 1.0
            };
            let unit = 2f64.powi(-22);
            out.iter_mut().for_each(|x| *x = (*x as f64 * (1.0 + unit * draw())) as f32);
        }
        Tensor::from_vec(out, (batch, heads, n, value_dim), &candle_core::Device::Cpu)
    }
}

/// One row of q over keys and values `[token][dim]`, in f64.
fn attend_row(q: &[f32], k: &[f32], v: &[f32], out: &mut [f32]) {
    let dim = q.len();
    let scale = 1.0 / (dim as f64).sqrt();
    let dot = |key: &[f32]| key.iter().zip(q).map(|(k, q)| *k as f64 * *q as f64).sum::<f64>() * scale;
    let scores: Vec<f64> = k.chunks_exact(dim).map(dot).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut sums = vec![0f64; out.len()];
    let mut total = 0.0;
    for (s, v) in scores.iter().zip(v.chunks_exact(out.len())) {
        let p = (s - max).exp();
        total += p;
        sums.iter_mut().zip(v).for_each(|(o, v)| *o += p * *v as f64);
    }
    out.iter_mut().zip(sums).for_each(|(o, s)| *o = (s / total) as f32);
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use qkv::{CacheConfig, Format};

    /// Grouped queries, two sequences and several steps against the library's attention over the same f16 values.
    #[test]
    fn it_agrees_with_the_library() {
        let config =
            || CacheConfig::new(1, 2, 32).with_key(Format::F16).with_value(Format::F16).with_capacity(2, 64);
        let cache = Cache::new(config()).unwrap();
        let mut decoded = Decoded::new(Cache::new(config()).unwrap());
        for n in [5, 1, 7] {
            let random = |heads: usize| Tensor::randn(0f32, 1.0, (2, heads, n, 32), &Device::Cpu).unwrap();
            let (q, k, v) = (random(6), random(2), random(2));
            let ours = cache.layer(0).unwrap();
            let a = ours.attend(&q, &k, &v, &qkv::AttendParams::new()).unwrap();
            let b = decoded.attend(0, &q, &k, &v).unwrap();
            let worst = (a - b).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
            assert!(worst < 1e-5, "{worst:e}");
        }
        assert_eq!(decoded.position().unwrap(), 13);
    }

    #[test]
    fn noise_is_small_and_follows_its_seed() {
        let run = |seed: Option<u64>| {
            let cache = Cache::new(CacheConfig::new(1, 1, 32).with_capacity(1, 64)).unwrap();
            let mut d = Decoded::new(cache);
            d.noise = seed;
            let x = Tensor::arange(1f32, 65.0, &Device::Cpu).unwrap().reshape((1, 1, 2, 32)).unwrap();
            let x = (x / 64.0).unwrap();
            d.attend(0, &x, &x, &x).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
        };
        let (exact, a, b) = (run(None), run(Some(1)), run(Some(2)));
        assert!(a != exact && a != b && a == run(Some(1)));
        assert!(exact.iter().zip(&a).all(|(x, y)| (x / y - 1.0).abs() < 4e-7));
    }
}
