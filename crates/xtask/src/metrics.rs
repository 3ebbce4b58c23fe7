//! Perplexity, KL divergence and top-1 agreement of two sets of logits. Sums are taken in f64.

/// `ln Σ exp(x)`.
pub fn log_sum_exp(x: &[f32]) -> f64 {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
    x.iter().map(|x| (*x as f64 - max).exp()).sum::<f64>().ln() + max
}

/// `KL(softmax(p) ‖ softmax(q))` in nats.
pub fn kl_divergence(p: &[f32], q: &[f32]) -> f64 {
    let (lp, lq) = (log_sum_exp(p), log_sum_exp(q));
    p.iter()
        .zip(q)
        .map(|(p, q)| {
            let log_p = *p as f64 - lp;
            log_p.exp() * (log_p - (*q as f64 - lq))
        })
        .sum()
}

/// `-ln softmax(x)[token]`.
pub fn negative_log_likelihood(x: &[f32], token: u32) -> f64 {
    log_sum_exp(x) - x[token as usize] as f64
}

/// Sums over scored tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Score {
    /// Tokens scored.
    pub tokens: usize,
    /// Sum of negative log likelihoods of the text.
    pub nll: f64,
    /// Sum of KL divergences from the exact distribution.
    pub kl: f64,
    /// Tokens whose most likely successor is that of the exact distribution.
    pub agree: usize,
}

impl Score {
    /// The score of one token: logits to judge, exact logits, the token that follows in the text.
    pub fn of(logits: &[f32], exact: &[f32], next: u32) -> Self {
        let same = qkv_candle::llama::argmax(logits) == qkv_candle::llama::argmax(exact);
        Self {
            tokens: 1,
            nll: negative_log_likelihood(logits, next),
            kl: kl_divergence(exact, logits),
            agree: same as usize,
        }
    }

    /// Both together.
    pub fn plus(self, other: Self) -> Self {
        Self {
            tokens: self.tokens + other.tokens,
            nll: self.nll + other.nll,
            kl: self.kl + other.kl,
            agree: self.agree + other.agree,
        }
    }

    /// `exp` of the mean negative log likelihood.
    pub fn perplexity(&self) -> f64 {
        (self.nll / self.tokens as f64).exp()
    }

    /// Mean KL divergence in nats.
    pub fn mean_kl(&self) -> f64 {
        self.kl / self.tokens as f64
    }

    /// Share of tokens with the same most likely successor, in percent.
    pub fn top1_percent(&self) -> f64 {
        100.0 * self.agree as f64 / self.tokens as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kl_of_two_coins() {
        // p = (3/4, 1/4), q = (1/2, 1/2): KL = 3/4 ln(3/2) + 1/4 ln(1/2).
        let p = [3f32.ln() + 5.0, 5.0];
        let kl = kl_divergence(&p, &[1.0, 1.0]);
        assert!((kl - (0.75 * 1.5f64.ln() + 0.25 * 0.5f64.ln())).abs() < 1e-6, "{kl}");
        assert!(kl_divergence(&p, &p).abs() < 1e-12);
    }

    #[test]
    fn sums_do_not_overflow_and_ignore_minus_infinity() {
        assert!((log_sum_exp(&[1000.0, 1000.0]) - (1000.0 + 2f64.ln())).abs() < 1e-9);
        assert!((log_sum_exp(&[0.0, f32::NEG_INFINITY]) - 0.0).abs() < 1e-12);
    }

    #[test]
    fn a_uniform_guess_has_the_perplexity_of_its_choices() {
        let score = Score::of(&[0.0; 8], &[0.0; 8], 3).plus(Score::of(&[1.0; 8], &[0.0; 8], 5));
        assert!((score.perplexity() - 8.0).abs() < 1e-9);
        assert_eq!((score.tokens, score.agree), (2, 2));
        assert!(score.mean_kl().abs() < 1e-12);
        let miss = Score::of(&[0.0, 1.0], &[1.0, 0.0], 0);
        assert_eq!(miss.top1_percent(), 0.0);
        assert!(miss.mean_kl() > 0.1);
    }
}
