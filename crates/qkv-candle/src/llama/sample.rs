//! Choosing the next token: greedy, or seeded sampling by temperature, top-k and top-p.

use super::error::{LlamaError, LlamaResult};

/// How tokens are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Sampling {
    /// 0 = always the most likely token; otherwise logits are divided by it.
    pub temperature: f32,
    /// Only the most likely `k` tokens; 0 = all.
    pub top_k: usize,
    /// Only the most likely tokens that together have this probability; 1 = all.
    pub top_p: f32,
    /// The same seed gives the same text.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 }
    }
}

impl Sampling {
    /// Always the most likely token.
    pub fn greedy() -> Self {
        Self::default()
    }

    /// Sampling at a temperature with a seed.
    pub fn with_temperature(temperature: f32, seed: u64) -> Self {
        Self { temperature, seed, ..Self::default() }
    }

    /// The same among the most likely `k` tokens (0 = all) and those that together have probability `p` (1 = all).
    pub fn limited(self, top_k: usize, top_p: f32) -> Self {
        Self { top_k, top_p, ..self }
    }
}

/// Chooses tokens, one stream of random numbers.
#[derive(Debug, Clone)]
pub struct Sampler {
    sampling: Sampling,
    state: u64,
}

impl Sampler {
    /// A sampler.
    ///
    /// # Errors
    /// [`LlamaError::Sampling`] for a negative or infinite temperature or `top_p` outside (0, 1].
    pub fn new(sampling: Sampling) -> LlamaResult<Self> {
        let Sampling { temperature, top_p, seed, .. } = sampling;
        if !(temperature.is_finite() && temperature >= 0.0) {
            let why = "it must be 0 or a positive number";
            return Err(LlamaError::Sampling { what: "temperature", got: temperature, why });
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(LlamaError::Sampling {
                what: "top_p",
                got: top_p,
                why: "it must be above 0 and at most 1",
            });
        }
        Ok(Self { sampling, state: seed })
    }

    /// The next token; the lowest id wins a tie. NaN logits are never chosen.
    pub fn choose(&mut self, logits: &[f32]) -> u32 {
        let Sampling { temperature, top_k, top_p, .. } = self.sampling;
        let best = argmax(logits);
        if temperature == 0.0 {
            return best;
        }
        let max = logits.get(best as usize).copied().unwrap_or(0.0);
        let weight = |x: f32| (((x - max) / temperature) as f64).exp();
        let mut kept: Vec<(u32, f64)> = (0u32..).zip(logits).map(|(i, x)| (i, weight(*x))).collect();
        kept.retain(|x| x.1 > 0.0);
        if top_k > 0 || top_p < 1.0 {
            kept.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            kept.truncate(if top_k > 0 { top_k } else { kept.len() });
            let enough = top_p as f64 * kept.iter().map(|x| x.1).sum::<f64>();
            let mut sum = 0.0;
            let reached = kept.iter().position(|x| {
                sum += x.1;
                sum >= enough
            });
            kept.truncate(reached.map_or(kept.len(), |i| i + 1));
        }
        let mut left = self.uniform() * kept.iter().map(|x| x.1).sum::<f64>();
        for (id, w) in &kept {
            left -= w;
            if left < 0.0 {
                return *id;
            }
        }
        kept.last().map_or(best, |x| x.0)
    }

    /// A number in [0, 1): SplitMix64, fixed here so that a seed means the same text in every release.
    fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// The index of the largest number, the first on ties; 0 if there is none.
pub fn argmax(x: &[f32]) -> u32 {
    let mut best = (0u32, f32::NEG_INFINITY);
    for (i, x) in (0u32..).zip(x) {
        if *x > best.1 {
            best = (i, *x);
        }
    }
    best.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_takes_the_first_largest_and_skips_nan() {
        assert_eq!(argmax(&[1.0, f32::NAN, 3.0, 3.0]), 2);
        assert_eq!(Sampler::new(Sampling::greedy()).unwrap().choose(&[0.0, 5.0]), 1);
    }

    #[test]
    fn frequencies_follow_the_softmax_and_a_seed_repeats() {
        let logits = [0.0f32, 1.0, 2.0, f32::NAN];
        let draw = |seed| -> Vec<u32> {
            let mut s = Sampler::new(Sampling::with_temperature(1.0, seed)).unwrap();
            (0..20_000).map(|_| s.choose(&logits)).collect()
        };
        let (a, b) = (draw(7), draw(8));
        assert_eq!(a, draw(7));
        assert_ne!(a, b);
        let sum: f64 = (0..3).map(|i| (i as f64).exp()).sum();
        for i in 0..3u32 {
            let share = a.iter().filter(|x| **x == i).count() as f64 / a.len() as f64;
            assert!((share - (i as f64).exp() / sum).abs() < 0.015, "{i}: {share}");
        }
        assert!(!a.contains(&3));
    }

    #[test]
    fn limits_cut_the_tail() {
        let logits = [0.0f32, 1.0, 2.0, 3.0];
        let seen = |k, p| {
            let sampling = Sampling::with_temperature(1.0, 1).limited(k, p);
            let mut s = Sampler::new(sampling).unwrap();
            let mut ids: Vec<u32> = (0..2000).map(|_| s.choose(&logits)).collect();
            ids.sort_unstable();
            ids.dedup();
            ids
        };
        assert_eq!(seen(2, 1.0), [2, 3]);
        assert_eq!(seen(0, 0.5), [3]); // softmax of the last is 0.64
        assert_eq!(seen(0, 0.7), [2, 3]);
        assert_eq!(seen(0, 1.0), [0, 1, 2, 3]);
    }

    #[test]
    fn impossible_parameters_are_refused() {
        assert!(Sampler::new(Sampling::with_temperature(-1.0, 0)).is_err());
        assert!(Sampler::new(Sampling::with_temperature(f32::NAN, 0)).is_err());
        assert!(Sampler::new(Sampling::greedy().limited(0, 0.0)).is_err());
    }
}
