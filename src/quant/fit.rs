//! The fits that look at the error: [`Fit::ErrorOptimal`] and [`Fit::Hqq`]. They choose a pair; the codes are
//! made from the rounded pair afterwards.
//!
//! A group is copied to a buffer of a power of two of elements, so that every loop has a constant length and
//! becomes vector instructions. Terms of padding and of skipped elements are set to 0 before each tree sum.

use crate::format::{Bits, Fit};
use crate::quant::affine::{MAGIC, Pair, divisor, round_code};

/// Half-ranges tried by the error-optimal fit, as parts of the group's own.
const SHRINK: [f32; 9] = [1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6];

/// The elements that count, at their places in the group: `at .. at + len` of `P`.
#[derive(Clone, Copy)]
struct Live {
    at: usize,
    len: usize,
}

impl Live {
    /// Sets the terms of everything else to 0 and adds up.
    #[inline(always)]
    fn sum<const P: usize>(self, t: &mut [f32; P]) -> f32 {
        if self.len < P {
            t[..self.at].fill(0.0);
            t[self.at + self.len..].fill(0.0);
        }
        tree(t)
    }
}

#[inline(always)]
fn fold<const S: usize>(t: &mut [f32]) {
    for i in 0..S {
        t[i] += t[i + S];
    }
}

/// The one order of every sum: halves onto each other until one element is left.
#[inline(always)]
fn tree<const P: usize>(t: &mut [f32; P]) -> f32 {
    if P >= 256 {
        fold::<128>(t);
    }
    if P >= 128 {
        fold::<64>(t);
    }
    if P >= 64 {
        fold::<32>(t);
    }
    fold::<16>(t);
    fold::<8>(t);
    let a: [f32; 4] = std::array::from_fn(|i| t[i] + t[i + 4]);
    (a[0] + a[2]) + (a[1] + a[3])
}

/// `a^c` for a > 0 and |c| < 1, from fixed polynomials: `exp2(c * log2 a)`. Relative error below 2e-5 for normal
/// `a` (tested against f64); 0 and subnormal `a` count as about 2^-127.
#[inline(always)]
pub(crate) fn power(a: f32, c: f32) -> f32 {
    // log2: mantissa in [sqrt(1/2), sqrt 2), |error| < 1.5e-5
    let bits = a.to_bits();
    let exponent = (bits.wrapping_sub(0x3f35_04f3) as i32) >> 23;
    let t = f32::from_bits(bits.wrapping_sub((exponent as u32) << 23)) - 1.0;
    let p = 0.252_660_36_f32;
    let p = p * t + -0.394_575_5;
    let p = p * t + 0.486_686_17;
    let p = p * t + -0.720_241_8;
    let p = p * t + 1.442_578;
    let l = exponent as f32 + p * t;
    // exp2: fraction in [-1/2, 1/2], relative error < 2.7e-6
    let y = c * l;
    let y = if y > -126.0 { y } else { -126.0 };
    let y = if y < 126.0 { y } else { 126.0 };
    let k = y + MAGIC;
    let f = y - (k - MAGIC);
    let p = 0.009_570_102_f32;
    let p = p * f + 0.055_917_863;
    let p = p * f + 0.240_247_44;
    let p = p * f + 0.693_121_8;
    let p = p * f + 0.999_999_3;
    // The low 9 bits of k's mantissa are the exponent in two's complement.
    f32::from_bits(p.to_bits().wrapping_add(k.to_bits() << 23))
}

/// `mean ± E|x - mean|`.
#[inline(always)]
fn two_levels<const P: usize>(x: &[f32; P], live: Live) -> Pair {
    let n = live.len as f32;
    let mut t = *x;
    let mean = live.sum(&mut t) / n;
    for i in 0..P {
        t[i] = (x[i] - mean).abs();
    }
    let spread = live.sum(&mut t) / n;
    Pair::nearest(2.0 * spread, mean - spread)
}

/// The smallest squared error of nine ranges around one centre and two least-squares refits of each; first on
/// ties. Every candidate is rounded, coded, and measured.
#[inline(always)]
fn least_squares<const P: usize>(x: &[f32; P], live: Live, lo: f32, hi: f32, max: f32) -> Pair {
    let n = live.len as f32;
    let (centre, half) = ((lo + hi) * 0.5, (hi - lo) * 0.5);
    // Sums are taken around the centre: the products would cancel for data far from 0.
    let (mut q, mut t, mut u) = ([0f32; P], [0f32; P], [0f32; P]);
    for i in 0..P {
        t[i] = x[i] - centre;
    }
    let mean = live.sum(&mut t) / n;
    let mut best = (f32::INFINITY, Pair::default());
    for shrink in SHRINK {
        let mut pair = Pair::nearest(2.0 * half * shrink / max, centre - half * shrink);
        for refits in 0..3 {
            let (step, min) = pair.to_f32();
            let div = divisor(step);
            for i in 0..P {
                q[i] = round_code((x[i] - min) / div, max);
                let e = x[i] - (step * q[i] + min);
                t[i] = e * e;
            }
            let error = live.sum(&mut t);
            if error < best.0 {
                best = (error, pair);
            }
            // Codes grow with x: all are equal if those of the extremes are. A refit then keeps the pair.
            if refits == 2 || round_code((lo - min) / div, max) == round_code((hi - min) / div, max) {
                break;
            }
            for i in 0..P {
                t[i] = q[i] * q[i];
                u[i] = q[i] * (x[i] - centre);
            }
            let (squares, products) = (live.sum(&mut t), live.sum(&mut u));
            let sum = live.sum(&mut q);
            let code_mean = sum / n;
            let variance = squares - code_mean * sum;
            let step = (products - sum * mean) / variance;
            pair = Pair::nearest(step.max(0.0), centre + (mean - step * code_mean));
        }
    }
    best.1
}

/// Half-quadratic iterations for min; the step is the range's, rounded first.
#[inline(always)]
fn half_quadratic<const P: usize>(
    x: &[f32; P],
    live: Live,
    lo: f32,
    hi: f32,
    max: f32,
    (p, beta, iterations): (f32, f32, u32),
) -> Pair {
    let n = live.len as f32;
    let step = Pair::nearest((hi - lo) / max, 0.0).step.max(f16_tiny());
    let s = step.to_f32();
    let (inverse, weight, exponent) = (1.0 / s, 1.0 / beta, p - 1.0);
    let (mut error, mut shift) = ([0f32; P], [0f32; P]);
    let (mut min, mut best) = (lo, f32::INFINITY);
    for _ in 0..iterations {
        for i in 0..P {
            let code = round_code((x[i] - min) * inverse, max);
            let e = x[i] - (s * code + min);
            let a = e.abs();
            // e - shrink(e), where shrink(e) = sign(e) * max(|e| - |e|^(p-1) / beta, 0)
            let w = power(a, exponent) * weight;
            let w = if w < a { w } else { a };
            error[i] = a;
            shift[i] = f32::from_bits(w.to_bits() | (e.to_bits() & 0x8000_0000));
        }
        let total = live.sum(&mut error);
        // mean(x - shrink(e) - step * code) = min + mean(e - shrink(e))
        min += live.sum(&mut shift) / n;
        if total >= best {
            break;
        }
        best = total;
    }
    Pair { step, ..Pair::nearest(0.0, min) }
}

/// The smallest positive f16.
const fn f16_tiny() -> half::f16 {
    half::f16::from_bits(1)
}

#[inline(always)]
fn solve_padded<const P: usize>(x: &[f32], at: usize, lo: f32, hi: f32, bits: Bits, fit: &Fit) -> Pair {
    // Padding holds a value of the group, so that it codes like one.
    let mut buffer = [lo; P];
    buffer[at..at + x.len()].copy_from_slice(x);
    let live = Live { at, len: x.len() };
    let max = bits.max_code() as f32;
    match *fit {
        Fit::Hqq { p, beta, iterations } => half_quadratic(&buffer, live, lo, hi, max, (p, beta, iterations)),
        _ if bits == Bits::B1 => two_levels(&buffer, live),
        _ => least_squares(&buffer, live, lo, hi, max),
    }
}

/// The pair of a group of finite, clamped, unequal elements `x` that starts `at` elements after the group does.
#[inline(always)]
pub(crate) fn solve<const FMA: bool>(x: &[f32], at: usize, lo: f32, hi: f32, bits: Bits, fit: &Fit) -> Pair {
    // More zeros in front of the same tree change nothing, so 32 is the least.
    match at + x.len() {
        0..=32 => solve_padded::<32>(x, at, lo, hi, bits, fit),
        33..=64 => solve_padded::<64>(x, at, lo, hi, bits, fit),
        65..=128 => solve_padded::<128>(x, at, lo, hi, bits, fit),
        _ => solve_padded::<256>(x, at, lo, hi, bits, fit),
    }
}
