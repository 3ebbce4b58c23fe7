//! The online softmax of one row over one tile, with its own `exp` and `tanh`.

use super::kernels::levels;
use super::lanes::Lanes;
use crate::layout::TILE;
use crate::simd::{dispatch, fma};

/// Below this `exp` is 0 here: `e^-87` is near the smallest normal f32.
pub(super) const LOWEST: f32 = -87.0;
/// Adding and taking away 1.5 * 2^23 rounds to an integer, which stays readable in the low bits.
pub(super) const ROUND: f32 = 12_582_912.0;
/// ln 2 in two parts: `n * LN2_HIGH` is exact.
pub(super) const LN2_HIGH: f32 = 355.0 / 512.0;
/// The rest of ln 2.
pub(super) const LN2_LOW: f32 = -2.121_944_4e-4;
/// Taylor series of exp, highest degree first.
pub(super) const EXP_SERIES: [f32; 8] =
    [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];

/// `e^x` for x ≤ 0 (and up to 88) to about 1e-7 relative: `2^n * e^r` with `|r| ≤ ln 2 / 2` and the Taylor series of
/// degree 7, whose remainder there is 5e-9. NaN stays NaN.
#[inline(always)]
pub(super) fn exp_lane<const FMA: bool>(x: f32) -> f32 {
    // A comparison instead of `max` keeps NaN.
    let y = if x < LOWEST { LOWEST } else { x };
    let shifted = fma::<FMA>(y, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = fma::<FMA>(n, -LN2_LOW, fma::<FMA>(n, -LN2_HIGH, y));
    let mut p = EXP_SERIES[0];
    for c in &EXP_SERIES[1..] {
        p = fma::<FMA>(p, r, *c);
    }
    let power = f32::from_bits((shifted.to_bits().wrapping_add(127)) << 23);
    if x < LOWEST { 0.0 } else { p * power }
}

/// `tanh x`: a continued fraction near 0, where `1 - 2 / (e^2x + 1)` would cancel.
#[inline(always)]
fn tanh_lane<const FMA: bool>(x: f32) -> f32 {
    let z = x * x;
    let near = x * (fma::<FMA>(z, z + 105.0, 945.0) / fma::<FMA>(z, fma::<FMA>(z, 15.0, 420.0), 945.0));
    let e = exp_lane::<FMA>(-2.0 * x.abs());
    let far = ((1.0 - e) / (1.0 + e)).copysign(x);
    if z < 0.36 { near } else { far }
}

#[inline(always)]
fn softcap_body<const FMA: bool>(scores: &mut [f32], cap: f32) {
    let inverse = 1.0 / cap;
    scores.iter_mut().for_each(|s| *s = cap * tanh_lane::<FMA>(*s * inverse));
}
dispatch! {
    /// `cap * tanh(s / cap)`.
    pub(super) fn softcap(scores: &mut [f32], cap: f32) = softcap_body;
}

/// The bits of tokens `from..to` of a tile.
#[inline(always)]
pub(super) fn bits(from: usize, to: usize) -> u64 {
    if from >= to { 0 } else { (u64::MAX >> (TILE - (to - from))) << from }
}

/// What one tile did to a row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    /// The largest score so far.
    pub max: f32,
    /// Sum of this tile's weights.
    pub sum: f32,
    /// Tokens that the row sees, a bit each. A score of -inf counts as masked.
    pub live: u64,
}

#[inline(always)]
fn tile_body<L: Lanes>(scores: &mut [f32; TILE], from: usize, to: usize, max: f32) -> Step {
    let mut live = 0u64;
    let mut top = L::splat(f32::NEG_INFINITY);
    for (i, s) in scores.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let (x, bits) = L::load(s).mask(8 * i, from, to);
        live |= bits << (8 * i);
        // NaN is never larger: it comes back through the sum.
        top = x.max(top);
        x.store(s);
    }
    let mut tops = [0f32; 8];
    top.store(&mut tops);
    let max = tops.into_iter().fold(max, |a, b| if b > a { b } else { a });
    let base = L::splat(if max == f32::NEG_INFINITY { 0.0 } else { -max });
    let mut sum = L::splat(0.0);
    for s in scores.as_chunks_mut::<8>().0 {
        let p = L::load(s).add(base).exp();
        sum = sum.add(p);
        p.store(s);
    }
    Step { max, sum: sum.sum(), live }
}
levels! {
    /// Turns the scores of tokens `from..to` into weights `exp(score - new max)`, all others into 0.
    pub(super) fn tile(scores: &mut [f32; TILE], from: usize, to: usize, max: f32) -> Step = tile_body;
}

/// Brings two running maxima together: the factor of sums that were built against `from`.
#[inline]
pub(super) fn rescale(from: f32, to: f32) -> f32 {
    if from == to {
        1.0
    } else if from == f32::NEG_INFINITY {
        // Nothing was summed (or only NaN, which 0 keeps).
        0.0
    } else {
        exp_lane::<false>(from - to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Isa;

    #[test]
    fn exp_and_tanh_are_accurate() {
        let (mut worst_exp, mut worst_tanh) = (0f64, 0f64);
        for i in 0..200_000 {
            let x = -86.9 + 86.9 * (i as f32 / 199_999.0);
            for e in [exp_lane::<true>(x), exp_lane::<false>(x)] {
                worst_exp = worst_exp.max((e as f64 / (x as f64).exp() - 1.0).abs());
            }
            let y = (i as f32 - 100_000.0) / 10_000.0;
            if y != 0.0 {
                for t in [tanh_lane::<true>(y), tanh_lane::<false>(y)] {
                    worst_tanh = worst_tanh.max((t as f64 / (y as f64).tanh() - 1.0).abs());
                }
            }
        }
        assert!(worst_exp < 2.5e-7, "exp: {worst_exp:e}");
        assert!(worst_tanh < 3e-7, "tanh: {worst_tanh:e}");
        assert_eq!(exp_lane::<true>(0.0), 1.0);
        assert_eq!(exp_lane::<true>(f32::NEG_INFINITY), 0.0);
        assert!(exp_lane::<true>(f32::NAN).is_nan());
        assert!(tanh_lane::<true>(f32::NAN).is_nan());
        assert_eq!(tanh_lane::<true>(f32::NEG_INFINITY), -1.0);
        assert_eq!(tanh_lane::<false>(1e30), 1.0);
    }

    #[test]
    fn a_tile_masks_what_lies_outside_and_keeps_nan() {
        for &isa in Isa::available() {
            let mut s = [f32::NAN; TILE];
            for (t, x) in s.iter_mut().enumerate().take(20).skip(10) {
                *x = t as f32;
            }
            let step = tile(isa, &mut s, 10, 20, f32::NEG_INFINITY);
            assert_eq!(step.max, 19.0);
            assert_eq!(step.live, 0x3ff << 10);
            assert!((0..TILE).all(|t| (s[t] != 0.0) == (10..20).contains(&t)));
            let want: f64 = (0..10).map(|i| (-i as f64).exp()).sum();
            assert!((step.sum as f64 - want).abs() < 1e-6);

            let mut s = [f32::NEG_INFINITY; TILE];
            let step = tile(isa, &mut s, 0, 3, f32::NEG_INFINITY);
            assert!(step.live == 0 && step.sum == 0.0 && step.max == f32::NEG_INFINITY);
            let mut s = [1.0; TILE];
            s[7] = f32::NAN;
            assert!(tile(isa, &mut s, 0, TILE, 0.0).sum.is_nan());
        }
    }
}
