//! Affine codes: `x = step * code + min` (product rounded, then sum rounded, both in f32), a pair of f16 a group.
//!
//! Everything here is f32 with explicit operations, no contraction, IEEE division, and every sum over a group is
//! the same tree: pad with 0 to a power of two, then `x[i] += x[i + s]` for s = half, quarter, … 1. So codes and
//! pairs are the same bits on every machine and backend. A group's result depends on that group only.

use crate::error::{Error, Result};
use crate::format::{Bits, Fit};
use crate::quant::{fit, half16};
use crate::simd::dispatch;
use half::f16;

/// The largest magnitude that is fitted: the largest finite f16. Values beyond it are clamped and counted.
pub(crate) const LIMIT: f32 = 65504.0;

/// The largest group of the stand-alone functions.
pub(crate) const MAX_GROUP: usize = 256;

/// 1.5 * 2^23: adding and subtracting it rounds |t| < 2^22 to an integer, half to even.
pub(crate) const MAGIC: f32 = 12_582_912.0;

/// What a group's codes mean: `x = step * code + min`. A pair of NaNs marks a group that held NaN or infinity;
/// its elements decode to NaN.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[repr(C)]
pub struct Pair {
    /// Distance of neighbouring codes.
    pub step: f16,
    /// Value of code 0.
    pub min: f16,
}

impl Pair {
    /// The pair of a group that held NaN or infinity.
    pub const NAN: Pair = Pair { step: f16::NAN, min: f16::NAN };

    /// The stored word: step in the low half, min in the high half.
    pub const fn to_bits(self) -> u32 {
        self.step.to_bits() as u32 | (self.min.to_bits() as u32) << 16
    }

    /// The pair of a stored word.
    pub const fn from_bits(word: u32) -> Self {
        Self { step: f16::from_bits(word as u16), min: f16::from_bits((word >> 16) as u16) }
    }

    /// (step, min) as f32.
    #[inline]
    pub fn to_f32(self) -> (f32, f32) {
        (half16::decode(self.step.to_bits()), half16::decode(self.min.to_bits()))
    }
}

/// Checks the parameters of a fit.
pub(crate) fn check_fit(fit: &Fit) -> Result<()> {
    let no = |what, got: String, why: &str| Err(Error::Unsupported { what, got, why: why.into() });
    if let Fit::Hqq { p, beta, iterations } = *fit {
        if !(p > 0.0 && p < 1.0) {
            return no("p", p.to_string(), "the norm of an HQQ fit lies between 0 and 1, 0.7 by default");
        }
        if !(beta > 0.0 && beta.is_finite()) {
            return no("beta", beta.to_string(), "it must be positive and finite, 10 by default");
        }
        if !(1..=100).contains(&iterations) {
            return no(
                "iterations",
                iterations.to_string(),
                "an HQQ fit takes 1 to 100 passes, 20 by default",
            );
        }
    }
    Ok(())
}

/// What a code divides by: a step of 0 makes every code 0.
#[inline(always)]
pub(crate) fn divisor(step: f32) -> f32 {
    if step == 0.0 { f32::INFINITY } else { step }
}

/// Clamps to 0..=max and rounds half to even; NaN becomes 0.
#[inline(always)]
pub(crate) fn round_code(t: f32, max: f32) -> f32 {
    let t = if t > 0.0 { t } else { 0.0 };
    let t = if t < max { t } else { max };
    (t + MAGIC) - MAGIC
}

/// `clamp(rne((x - min) / step), 0, max)` as bytes. `div` comes from [`divisor`].
#[inline(always)]
pub(crate) fn codes_body<const FMA: bool>(x: &[f32], div: f32, min: f32, max: f32, codes: &mut [u8]) {
    for (c, x) in codes.iter_mut().zip(x) {
        let t = (*x - min) / div;
        let t = if t > 0.0 { t } else { 0.0 };
        let t = if t < max { t } else { max };
        *c = (t + MAGIC).to_bits() as u8;
    }
}

dispatch! {
    /// Codes of a row for a given pair.
    pub(crate) fn codes_with(x: &[f32], div: f32, min: f32, max: f32, codes: &mut [u8]) = codes_body;
}

/// Smallest and largest element and the largest magnitude's bits (so that NaN and infinity show).
#[inline(always)]
fn range(x: &[f32]) -> (f32, f32, u32) {
    let (mut lo, mut hi, mut top) = ([f32::INFINITY; 8], [f32::NEG_INFINITY; 8], [0u32; 8]);
    let chunks = x.chunks_exact(8);
    let tail = chunks.remainder();
    for c in chunks {
        for i in 0..8 {
            lo[i] = if c[i] < lo[i] { c[i] } else { lo[i] };
            hi[i] = if c[i] > hi[i] { c[i] } else { hi[i] };
            let a = c[i].to_bits() & 0x7fff_ffff;
            top[i] = if a > top[i] { a } else { top[i] };
        }
    }
    for (i, v) in tail.iter().enumerate() {
        lo[i] = if *v < lo[i] { *v } else { lo[i] };
        hi[i] = if *v > hi[i] { *v } else { hi[i] };
        top[i] = top[i].max(v.to_bits() & 0x7fff_ffff);
    }
    let mut s = 4;
    while s > 0 {
        for i in 0..s {
            lo[i] = if lo[i + s] < lo[i] { lo[i + s] } else { lo[i] };
            hi[i] = if hi[i + s] > hi[i] { hi[i + s] } else { hi[i] };
            top[i] = top[i].max(top[i + s]);
        }
        s /= 2;
    }
    // + 0.0 makes -0 a 0, so that the sign of a zero does not depend on the order of the search.
    (lo[0] + 0.0, hi[0] + 0.0, top[0])
}

/// A group before its pair is known.
#[derive(Clone, Copy)]
pub(crate) struct Range {
    /// Smallest element.
    pub(crate) lo: f32,
    /// Largest element.
    pub(crate) hi: f32,
}

/// What the range of a group says.
enum Prepared {
    /// The pair needs no fit: nothing but skipped elements, NaN or infinity, or a constant. All codes are 0.
    Done(Pair),
    /// Finite, unequal elements.
    Open(Range),
}

/// Clamps and counts, and finds the range.
#[inline(always)]
fn prepare(x: &mut [f32], clamped: &mut usize) -> Prepared {
    if x.is_empty() {
        return Prepared::Done(Pair::default());
    }
    let (mut lo, mut hi, top) = range(x);
    if top > LIMIT.to_bits() {
        if top >= f32::INFINITY.to_bits() {
            return Prepared::Done(Pair::NAN);
        }
        for v in x.iter_mut() {
            *clamped += (v.abs() > LIMIT) as usize;
            *v = v.clamp(-LIMIT, LIMIT);
        }
        (lo, hi, _) = range(x);
    }
    if lo == hi {
        return Prepared::Done(constant(lo));
    }
    Prepared::Open(Range { lo, hi })
}

/// The pair of a constant group, |x| <= 65504.
#[inline(always)]
pub(crate) fn constant(x: f32) -> Pair {
    Pair { step: f16::ZERO, min: f16::from_bits(half16::bits(half16::round(x))) }
}

/// The pair of a range: min rounded down, step rounded up.
#[inline(always)]
pub(crate) fn min_max(r: Range, max: f32) -> Pair {
    let min = half16::bits_down(r.lo);
    let step = half16::bits_up((r.hi - half16::decode(min)) / max);
    Pair { step: f16::from_bits(step), min: f16::from_bits(min) }
}

#[inline(always)]
fn finish<const FMA: bool>(x: &[f32], pair: Pair, max: f32, codes: &mut [u8]) {
    let (step, min) = pair.to_f32();
    codes_body::<FMA>(x, divisor(step), min, max, codes);
}

#[inline(always)]
fn groups_body<const FMA: bool>(
    x: &mut [f32],
    group: usize,
    skip: usize,
    bits: Bits,
    fit: &Fit,
    codes: &mut [u8],
    pairs: &mut [Pair],
) -> usize {
    let max = bits.max_code() as f32;
    let mut clamped = 0;
    if let Fit::MinMax = fit {
        for ((x, codes), pair) in x.chunks_mut(group).zip(codes.chunks_mut(group)).zip(pairs) {
            let skip = skip.min(x.len());
            codes[..skip].fill(0);
            let (x, codes) = (&mut x[skip..], &mut codes[skip..]);
            match prepare(x, &mut clamped) {
                Prepared::Done(p) => {
                    *pair = p;
                    codes.fill(0);
                }
                Prepared::Open(r) => {
                    *pair = min_max(r, max);
                    finish::<FMA>(x, *pair, max, codes);
                }
            }
        }
        return clamped;
    }
    // Several groups at a time, so that one's sums wait while another's elements are worked on.
    let batch = fit::BATCH * group;
    for ((x, codes), pairs) in
        x.chunks_mut(batch).zip(codes.chunks_mut(batch)).zip(pairs.chunks_mut(fit::BATCH))
    {
        let mut open = [None; fit::BATCH];
        for ((x, pair), open) in x.chunks_mut(group).zip(pairs.iter_mut()).zip(&mut open) {
            let skip = skip.min(x.len());
            match prepare(&mut x[skip..], &mut clamped) {
                Prepared::Done(p) => *pair = p,
                Prepared::Open(r) => *open = Some(r),
            }
        }
        fit::solve::<FMA>(x, group, skip, &open, bits, fit, pairs);
        for (i, (x, codes)) in x.chunks(group).zip(codes.chunks_mut(group)).enumerate() {
            let skip = if open[i].is_some() { skip.min(x.len()) } else { x.len() };
            codes[..skip].fill(0);
            finish::<FMA>(&x[skip..], pairs[i], max, &mut codes[skip..]);
        }
    }
    clamped
}

dispatch! {
    /// Fits neighbouring groups of `group` elements (at most 512; the last may be short) and writes their codes and
    /// pairs; returns how many elements were clamped to ±65504 (in place). The first `skip` elements of every
    /// group (sinks) get code 0 and take no part in range, mean and error. A group with NaN or infinity outside
    /// them has the pair (NaN, NaN) and codes 0; a wholly skipped one has (0, 0).
    pub(crate) fn quantize_groups(
        x: &mut [f32], group: usize, skip: usize, bits: Bits, fit: &Fit, codes: &mut [u8], pairs: &mut [Pair],
    ) -> usize = groups_body;
}

/// [`quantize_groups`] for one group: its pair, and how many elements were clamped.
#[cfg(test)]
pub(crate) fn quantize_group(
    isa: crate::simd::Isa,
    x: &mut [f32],
    skip: usize,
    bits: Bits,
    fit: &Fit,
    codes: &mut [u8],
) -> (Pair, usize) {
    let mut pair = [Pair::default()];
    let clamped = quantize_groups(isa, x, x.len().max(1), skip, bits, fit, codes, &mut pair);
    (pair[0], clamped)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::fit::power;
    use crate::simd::Isa;

    const FITS: [Fit; 3] = [Fit::MinMax, Fit::ErrorOptimal, Fit::HQQ];

    /// Uniform in [0, 1).
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> f32 {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.0 >> 40) as f32 / (1u64 << 24) as f32
        }

        fn normal(&mut self) -> f32 {
            (-2.0 * (1.0 - self.next()).ln()).sqrt() * (std::f32::consts::TAU * self.next()).cos()
        }
    }

    fn decode(pair: Pair, codes: &[u8]) -> Vec<f32> {
        let (step, min) = pair.to_f32();
        codes.iter().map(|c| step * *c as f32 + min).collect()
    }

    fn squared(x: &[f32], y: &[f32]) -> f64 {
        x.iter().zip(y).map(|(a, b)| (*a as f64 - *b as f64).powi(2)).sum()
    }

    fn fit_one(isa: Isa, x: &[f32], skip: usize, bits: Bits, fit: &Fit) -> (Pair, usize, Vec<u8>, Vec<f32>) {
        let (mut x, mut codes) = (x.to_vec(), vec![0xeeu8; x.len()]);
        let (pair, clamped) = quantize_group(isa, &mut x, skip, bits, fit, &mut codes);
        (pair, clamped, codes, x)
    }

    #[test]
    fn the_power_is_as_exact_as_stated() {
        for c in [-0.3f32, -0.9, -0.05, -0.5] {
            let mut a = 1e-30f32;
            while a < 1.4e5 {
                let (got, want) = (power([a], c)[0] as f64, (a as f64).powf(c as f64));
                assert!((got / want - 1.0).abs() < 2e-4, "{a:e}^{c}: {got} {want}");
                a *= 1.001;
            }
        }
        assert!(power([0.0], -0.3)[0] > 1e11);
    }

    #[test]
    fn min_max_keeps_every_element_within_half_a_step() {
        let mut r = Random(1);
        for bits in Bits::ALL {
            for case in 0..400 {
                let n = 2 + (case * 7) % 255;
                let (scale, offset) =
                    (10f32.powf(r.next() * 8.0 - 4.0), (r.next() - 0.5) * 10f32.powf(r.next() * 4.0));
                let x: Vec<f32> = (0..n).map(|_| r.normal() * scale + offset).collect();
                let (pair, clamped, codes, x) = fit_one(Isa::detect(), &x, 0, bits, &Fit::MinMax);
                assert!(codes.iter().all(|c| *c <= bits.max_code()));
                let (step, min) = pair.to_f32();
                let (lo, hi) = x.iter().fold((f32::MAX, f32::MIN), |(l, h), v| (l.min(*v), h.max(*v)));
                assert!(min <= lo);
                if clamped == 0 && step < LIMIT {
                    let top = step as f64 * bits.max_code() as f64 + min as f64;
                    assert!(top >= hi as f64 - 1e-6 * (hi - lo) as f64, "{top} {hi}");
                }
                for (a, b) in x.iter().zip(decode(pair, &codes)) {
                    // Beside half a step only the two roundings of the decoder and the division's.
                    let slack =
                        2f64.powi(-22) * (a.abs().max(min.abs()) + step * bits.max_code() as f32) as f64;
                    assert!(
                        (*a as f64 - b as f64).abs() <= step as f64 / 2.0 + slack,
                        "{bits:?} {a} {b} {step}"
                    );
                }
                // Never much larger than the range needs: one f16 place of min, then one of step.
                let ulp = (min.abs() / 1024.0).max(6e-8);
                let need = (hi - lo + ulp) / bits.max_code() as f32;
                assert!(step <= need * 1.002 + 6e-8, "{step} {need}");
            }
        }
    }

    #[test]
    fn every_level_gives_the_same_bits() {
        let mut r = Random(2);
        for bits in Bits::ALL {
            for fit in FITS {
                for n in [2usize, 3, 7, 8, 16, 31, 32, 33, 64, 80, 100, 128, 200, 256] {
                    let skip = if n > 8 { n % 5 } else { 0 };
                    let x: Vec<f32> = (0..n).map(|_| r.normal() * 3.0).collect();
                    let all: Vec<_> =
                        Isa::available().iter().map(|isa| fit_one(*isa, &x, skip, bits, &fit)).collect();
                    for a in &all {
                        assert_eq!(a.0.to_bits(), all[0].0.to_bits(), "{bits:?} {fit:?} {n}");
                        assert_eq!(a.2, all[0].2, "{bits:?} {fit:?} {n}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_error_optimal_fit_is_not_worse_than_the_range() {
        let mut r = Random(3);
        for bits in [Bits::B2, Bits::B3, Bits::B4, Bits::B8] {
            let (mut gain, mut base) = (0.0, 0.0);
            for case in 0..200 {
                let offset = if case % 4 == 0 { 100.0 } else { 0.0 };
                let x: Vec<f32> = (0..64).map(|_| r.normal() + offset).collect();
                let isa = Isa::detect();
                let (p, _, c, _) = fit_one(isa, &x, 0, bits, &Fit::MinMax);
                let (q, _, d, _) = fit_one(isa, &x, 0, bits, &Fit::ErrorOptimal);
                let (a, b) = (squared(&x, &decode(p, &c)), squared(&x, &decode(q, &d)));
                // Its first candidate is the same range, rounded to nearest instead of outwards.
                let rounding = 64.0 * (2.0 * (offset as f64 + 4.0) * 2f64.powi(-11)).powi(2);
                assert!(b <= a * 1.02 + rounding, "{bits:?} {a} {b}");
                (gain, base) = (gain + b, base + a);
            }
            assert!(gain < base, "{bits:?}: {gain} against {base}");
        }
    }

    #[test]
    fn one_bit_takes_the_mean_and_the_mean_deviation() {
        let mut r = Random(4);
        for n in [32usize, 64, 100] {
            let x: Vec<f32> = (0..n).map(|_| r.normal() + 2.0).collect();
            let (pair, ..) = fit_one(Isa::detect(), &x, 3, Bits::B1, &Fit::ErrorOptimal);
            let live: Vec<f64> = x[3..].iter().map(|x| *x as f64).collect();
            let mean = live.iter().sum::<f64>() / live.len() as f64;
            let spread = live.iter().map(|x| (x - mean).abs()).sum::<f64>() / live.len() as f64;
            assert!((pair.step.to_f64() - 2.0 * spread).abs() < 2e-3);
            assert!((pair.min.to_f64() - (mean - spread)).abs() < 2e-3);
        }
    }

    /// The iterations written down once more, in f64 and in the zero form of the method.
    fn hqq_in_f64(x: &[f64], bits: Bits) -> (f64, f64) {
        let max = bits.max_code() as f64;
        let (lo, hi) = x.iter().fold((f64::MAX, f64::MIN), |(l, h), v| (l.min(*v), h.max(*v)));
        let step = f16::from_f64((hi - lo) / max).to_f64();
        let (s, mut z, mut best) = (1.0 / step, -lo / step, f64::INFINITY);
        for _ in 0..20 {
            let code = |x: f64| (x * s + z).clamp(0.0, max).round_ties_even();
            let e: Vec<f64> = x.iter().map(|x| x - (code(*x) - z) / s).collect();
            let shrink = |e: f64| e.signum() * (e.abs() - e.abs().powf(-0.3) / 10.0).max(0.0);
            z = x.iter().zip(&e).map(|(x, e)| code(*x) - (x - shrink(*e)) * s).sum::<f64>() / x.len() as f64;
            let error = e.iter().map(|e| e.abs()).sum::<f64>() / x.len() as f64;
            if error >= best {
                break;
            }
            best = error;
        }
        (step, -z / s)
    }

    #[test]
    fn hqq_follows_its_iterations() {
        let mut r = Random(5);
        let mut close = 0;
        for case in 0..300 {
            let bits = [Bits::B1, Bits::B2, Bits::B3, Bits::B4, Bits::B8][case % 5];
            let x: Vec<f32> = (0..64).map(|_| r.normal()).collect();
            let (pair, ..) = fit_one(Isa::detect(), &x, 0, bits, &Fit::HQQ);
            let (step, min) = hqq_in_f64(&x.iter().map(|x| *x as f64).collect::<Vec<_>>(), bits);
            assert_eq!(pair.step.to_f64(), step);
            close += ((pair.min.to_f64() - min).abs() < 2e-3 * step.max(1.0)) as usize;
        }
        // A stop one pass earlier or later, or a code on the edge, parts the two now and then.
        assert!(close > 285, "{close} of 300");
    }

    #[test]
    fn constants_zeros_huge_values_and_nan() {
        let isa = Isa::detect();
        for bits in Bits::ALL {
            for fit in FITS {
                for v in [0.0f32, -0.0, 1.0, -3.3, 1e-9, 65504.0, -65504.0] {
                    let (pair, clamped, codes, _) = fit_one(isa, &[v; 48], 0, bits, &fit);
                    assert_eq!((pair.step, pair.min, clamped), (f16::ZERO, f16::from_f32(v), 0));
                    assert!(codes.iter().all(|c| *c == 0));
                }
                let (pair, clamped, codes, x) = fit_one(isa, &[1e9, -3e38, 0.0, 65504.0], 0, bits, &fit);
                assert_eq!((clamped, x), (2, vec![65504.0, -65504.0, 0.0, 65504.0]));
                assert!(decode(pair, &codes).iter().all(|x| x.is_finite()));
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let mut x = [1.0f32; 40];
                    x[17] = bad;
                    let (pair, _, codes, _) = fit_one(isa, &x, 0, bits, &fit);
                    assert!(pair.step.is_nan() && pair.min.is_nan() && codes.iter().all(|c| *c == 0));
                    // Left out, it does no harm.
                    let (pair, ..) = fit_one(isa, &x, 18, bits, &fit);
                    assert_eq!(pair, Pair { step: f16::ZERO, min: f16::ONE });
                }
                let (pair, _, codes, _) = fit_one(isa, &[f32::NAN; 8], 8, bits, &fit);
                assert_eq!((pair.to_bits(), codes), (0, vec![0; 8]));
                // Tiny ranges whose step falls below the smallest f16.
                let (pair, _, codes, _) = fit_one(isa, &[1.0, 1.0 + 1e-7, 1.0, 1.0], 0, bits, &fit);
                assert!(
                    decode(pair, &codes).iter().all(|x| (x - 1.0).abs() < 2e-5),
                    "{bits:?} {fit:?} {pair:?}"
                );
            }
        }
    }

    #[test]
    fn parameters_of_a_fit_are_checked() {
        assert!(check_fit(&Fit::HQQ).is_ok());
        for (p, beta, iterations) in [
            (0.0, 10.0, 20),
            (1.0, 10.0, 20),
            (f32::NAN, 10.0, 20),
            (0.7, 0.0, 20),
            (0.7, f32::INFINITY, 20),
            (0.7, 10.0, 0),
            (0.7, 10.0, 101),
        ] {
            assert!(check_fit(&Fit::Hqq { p, beta, iterations }).is_err());
        }
    }
}
