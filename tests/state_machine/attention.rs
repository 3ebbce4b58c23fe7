//! Attention of a step against f64 over the model's tokens.

use crate::machine::Answer;
use crate::model::*;
use crate::reference::Problem;

/// Query heads of a kv head.
pub(crate) const GROUP: usize = 2;

/// One sequence of a step in one layer.
pub(crate) struct Rows<'a> {
    /// All queries of the step, and this sequence's part of its rows.
    pub(crate) q: &'a [f32],
    pub(crate) first: usize,
    pub(crate) count: usize,
    /// What the sequence's last query sees: old tokens, then one for each row.
    pub(crate) tokens: &'a [Token],
    pub(crate) layer: usize,
}

/// Distances from f64 in the 2-norm: of outputs, relative; of LSEs, the largest. A few rows stand for all.
pub(crate) fn distance(rng: &mut Rng, rows: &Rows<'_>, answer: &Answer) -> (f64, f64) {
    let heads = GROUP * HEADS;
    let wide = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    let (k, v) = layer_rows(rows.tokens, rows.layer);
    let (k, v) = (wide(&k), wide(&v));
    let old = rows.tokens.len() - rows.count;
    let (mut difference, mut size, mut lse) = (0.0, 0.0, 0f64);
    let some = [0, rows.count - 1, rng.below(rows.count), rng.below(rows.count)];
    for i in some {
        let (row, seen) = (rows.first + i, (old + i + 1) * HEADS * DIM);
        let q = wide(&rows.q[row * heads * DIM..][..heads * DIM]);
        let problem = Problem::causal(&q, &k[..seen], &v[..seen], [heads, HEADS], [DIM, DIM]);
        let (want, want_lse) = problem.solve();
        let got = wide(&answer.out[row * heads * DIM..][..heads * DIM]);
        difference += got.iter().zip(&want).map(|(a, b)| (a - b).powi(2)).sum::<f64>();
        size += want.iter().map(|b| b.powi(2)).sum::<f64>();
        let far = answer.lse[row * heads..][..heads].iter().zip(&want_lse);
        // `max` would pass over NaN.
        lse = far.fold(lse, |most, (a, b)| {
            let far = (f64::from(*a) - b).abs();
            if far <= most { most } else { far }
        });
    }
    ((difference / size).sqrt(), lse)
}
