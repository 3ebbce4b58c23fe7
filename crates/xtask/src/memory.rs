//! What a scheme takes: bytes of a really filled cache, scratch of a step, time of a token.

use crate::schemes::Scheme;
use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use qkv::AttendParams;
use qkv_candle::Cache;
use qkv_candle::llama::{Attention, Llama};
use std::time::{Duration, Instant};

/// Tokens at which bytes are counted.
pub const LENGTHS: [usize; 3] = [2048, 8192, 32_768];
/// Tokens at which a step is timed and its peak taken.
pub const TIMED: usize = 8192;
/// Tokens of a loading append.
const CHUNK: usize = 1024;
/// Timed steps; the median counts.
const STEPS: usize = 7;

/// What one scheme takes.
#[derive(Debug, Clone)]
pub struct Memory {
    /// `bytes_used` at each of [`LENGTHS`].
    pub bytes: [usize; 3],
    /// Cache and scratch in a decode step at [`TIMED`] tokens.
    pub peak_bytes: usize,
    /// Time of a decode step of the whole model at [`TIMED`] tokens.
    pub token: Duration,
    /// Of which append and attention of all layers.
    pub attention: Duration,
    /// Time to load [`TIMED`] tokens, quantization included.
    pub load: Duration,
}

/// Random keys and values with the shape of a chunk.
#[derive(Debug)]
pub struct Filler {
    k: Tensor,
    v: Tensor,
}

impl Filler {
    /// Normal numbers.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn new(model: &Llama) -> Result<Self> {
        let c = model.config();
        let normal = |dim| Tensor::randn(0f32, 1.0, (1, c.kv_heads, CHUNK, dim), &Device::Cpu);
        Ok(Self { k: normal(c.key_dim)?, v: normal(c.value_dim)? })
    }

    /// Fills all layers of a cache up to `tokens`.
    ///
    /// # Errors
    /// If the cache has no room.
    pub fn fill(&self, cache: &Cache, tokens: usize) -> Result<()> {
        loop {
            let n = tokens.saturating_sub(cache.current_seq_len()?).min(CHUNK);
            if n == 0 {
                return Ok(());
            }
            let (k, v) = (self.k.narrow(2, 0, n)?, self.v.narrow(2, 0, n)?);
            for layer in cache.layers() {
                layer.append(&k, &v)?;
            }
        }
    }
}

/// Fills a cache of this scheme to 32k tokens and times steps on the way.
///
/// # Errors
/// If the scheme does not fit the model.
pub fn measure(model: &Llama, scheme: &Scheme, filler: &Filler) -> Result<Memory> {
    let config = scheme.config(model.cache_config(LENGTHS[2] + 1), None)?;
    let cache = Cache::new(config)?;
    let mut bytes = [0; 3];
    let mut timed = None;
    let start = Instant::now();
    let mut load = Duration::ZERO;
    for (i, length) in LENGTHS.into_iter().enumerate() {
        filler.fill(&cache, length)?;
        if length == TIMED {
            load = start.elapsed();
            timed = Some(steps(model, &cache)?);
        }
        bytes[i] = cache.bytes_used()?;
    }
    let (token, attention, peak_bytes) = timed.context("no length is timed")?;
    Ok(Memory { bytes, peak_bytes, token, attention, load })
}

/// Medians of the time of a step and of attention in it, and the most bytes seen. The tokens are taken back: a cut
/// of so few touches no page.
fn steps(model: &Llama, cache: &Cache) -> Result<(Duration, Duration, usize)> {
    let held = cache.current_seq_len()?;
    let (mut whole, mut attention, mut peak) = (Vec::new(), Vec::new(), 0);
    for step in 0..=STEPS {
        let mut timed = Timed { cache: cache.clone(), spent: Duration::ZERO };
        let start = Instant::now();
        model.next_logits(&[1], &mut timed)?;
        // The first step warms up.
        if step > 0 {
            whole.push(start.elapsed());
            attention.push(timed.spent);
        }
        peak = peak.max(cache.bytes_used()? + cache.scratch_bytes()?);
        cache.truncate(held)?;
    }
    Ok((median(whole), median(attention), peak))
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// A cache that adds up the time spent in it.
struct Timed {
    cache: Cache,
    spent: Duration,
}

impl Attention for Timed {
    fn position(&self) -> candle_core::Result<usize> {
        self.cache.current_seq_len()
    }

    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Tensor> {
        let start = Instant::now();
        let out = self.cache.layer(layer)?.attend(q, k, v, &AttendParams::new());
        self.spent += start.elapsed();
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_one() {
        let ms = Duration::from_millis;
        assert_eq!(median(vec![ms(9), ms(1), ms(5)]), ms(5));
        assert_eq!(median(Vec::new()), ms(0));
    }
}
