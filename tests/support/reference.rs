//! Attention in f64, in the plainest form: what the library is compared with.

/// One sequence: `[queries][query_heads][key_dim]` against `[tokens][kv_heads][dim]`.
#[derive(Debug, Clone)]
pub(crate) struct Problem<'a> {
    pub(crate) q: &'a [f64],
    pub(crate) k: &'a [f64],
    pub(crate) v: &'a [f64],
    pub(crate) query_heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) key_dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) scale: f64,
    pub(crate) softcap: Option<f64>,
    pub(crate) sliding_window: Option<usize>,
    pub(crate) sink_logits: Option<&'a [f64]>,
    pub(crate) bidirectional: &'a [(usize, usize)],
    pub(crate) causal: bool,
}

impl<'a> Problem<'a> {
    /// Causal attention, scale `1 / sqrt(key_dim)`, nothing else. `heads`: of queries and of keys and values; `dims`: of keys and values.
    pub(crate) fn causal(
        q: &'a [f64],
        k: &'a [f64],
        v: &'a [f64],
        heads: [usize; 2],
        dims: [usize; 2],
    ) -> Self {
        Self {
            q,
            k,
            v,
            query_heads: heads[0],
            kv_heads: heads[1],
            key_dim: dims[0],
            value_dim: dims[1],
            scale: 1.0 / (dims[0] as f64).sqrt(),
            softcap: None,
            sliding_window: None,
            sink_logits: None,
            bidirectional: &[],
            causal: true,
        }
    }

    /// Whether the query at a position sees a token.
    fn sees(&self, position: i64, token: i64) -> bool {
        let together = |(s, e): &(usize, usize)| {
            let inside = |t: i64| (*s as i64..*e as i64).contains(&t);
            inside(position) && inside(token)
        };
        let near = self.sliding_window.is_none_or(|w| token > position - w as i64);
        position >= 0
            && (self.bidirectional.iter().any(together) || (!self.causal || token <= position) && near)
    }

    /// Output `[queries][query_heads][value_dim]` and LSE `[queries][query_heads]`.
    pub(crate) fn solve(&self) -> (Vec<f64>, Vec<f64>) {
        self.solve_rounded(|x| x)
    }

    /// The same with every weight (of at most 1) rounded.
    pub(crate) fn solve_rounded(&self, round: impl Fn(f64) -> f64) -> (Vec<f64>, Vec<f64>) {
        let queries = self.q.len() / (self.query_heads * self.key_dim);
        let tokens = self.k.len() / (self.kv_heads * self.key_dim);
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        for i in 0..queries {
            let position = tokens as i64 - queries as i64 + i as i64;
            for h in 0..self.query_heads {
                let kv = h / (self.query_heads / self.kv_heads);
                let q = &self.q[(i * self.query_heads + h) * self.key_dim..][..self.key_dim];
                let mut seen = Vec::new();
                for t in 0..tokens {
                    if self.sees(position, t as i64) {
                        let k = &self.k[(t * self.kv_heads + kv) * self.key_dim..][..self.key_dim];
                        let s = self.scale * q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>();
                        let s = self.softcap.map_or(s, |cap| cap * (s / cap).tanh());
                        if s != f64::NEG_INFINITY {
                            seen.push((t, s));
                        }
                    }
                }
                let sink = self.sink_logits.map(|s| s[h]).filter(|s| *s != f64::NEG_INFINITY);
                let logits = || seen.iter().map(|x| x.1).chain(sink);
                let max = logits().fold(f64::NEG_INFINITY, |a, b| {
                    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
                });
                let sum: f64 = logits().map(|s| (s - max).exp()).sum();
                let mut row = vec![0f64; self.value_dim];
                for (t, s) in &seen {
                    let v = &self.v[(t * self.kv_heads + kv) * self.value_dim..][..self.value_dim];
                    let p = round((s - max).exp()) / sum;
                    row.iter_mut().zip(v).for_each(|(o, v)| *o += p * v);
                }
                out.extend(row);
                lse.push(if logits().next().is_none() { f64::NEG_INFINITY } else { max + sum.ln() });
            }
        }
        (out, lse)
    }
}

/// Largest difference, where NaN must meet NaN and infinity the same infinity; `None` if they do not.
pub(crate) fn worst(got: &[f32], want: &[f64]) -> Option<f64> {
    assert_eq!(got.len(), want.len());
    let mut worst = 0f64;
    for (g, w) in got.iter().zip(want) {
        let g = *g as f64;
        if g.is_nan() && w.is_nan() || g == *w {
            continue;
        }
        if !g.is_finite() || !w.is_finite() {
            return None;
        }
        worst = worst.max((g - w).abs());
    }
    Some(worst)
}
