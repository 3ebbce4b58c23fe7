//! The fits that look at the error: [`Fit::ErrorOptimal`] and [`Fit::Hqq`]. They choose a pair; the codes are
//! made from the rounded pair afterwards.
//!
//! A group is copied to a buffer of a power of two of elements, so that every loop has a constant length and
//! becomes vector instructions. Terms of padding and of skipped elements are set to 0 before each tree sum.

use crate::format::{Bits, Fit};
use crate::quant::affine::{LIMIT, MAGIC, Pair, Range, divisor, round_code};
use crate::quant::half16;
use half::f16;
use std::array::from_fn;

/// Groups that are fitted together.
pub(crate) const BATCH: usize = 4;

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

/// The one order of every sum: halves onto each other until one element is left. Written for eight neighbours side
/// by side, whose sums never meet before the last three levels.
#[inline(always)]
fn tree<const P: usize>(t: &[f32; P]) -> f32 {
    let mut sums = [0f32; 8];
    for (l, sum) in sums.iter_mut().enumerate() {
        let mut v = [0f32; 64];
        for k in 0..P / 8 {
            v[k] = t[8 * k + l];
        }
        for half in [32, 16, 8, 4, 2, 1] {
            if 2 * half <= P / 8 {
                for k in 0..half {
                    v[k] += v[k + half];
                }
            }
        }
        *sum = v[0];
    }
    let a: [f32; 4] = from_fn(|i| sums[i] + sums[i + 4]);
    (a[0] + a[2]) + (a[1] + a[3])
}

/// Chains of operations that are worked on in turn: each waits for its own results, so one alone leaves the machine
/// idle.
const CHAINS: usize = 4;

/// `a^c` for 0 < a < 2^18 and -1 < c < 0, from fixed polynomials: `exp2(c * log2 a)`, for K numbers side by side.
/// Relative error below 2e-4 for normal `a` (tested against f64), far below what shrinking by it can show; 0 and
/// subnormal `a` count as about 2^-127.
#[inline(always)]
pub(crate) fn power<const K: usize>(a: [f32; K], c: f32) -> [f32; K] {
    let step = |p: [f32; K], t: [f32; K], next: f32| -> [f32; K] { from_fn(|k| p[k] * t[k] + next) };
    // log2: mantissa in [sqrt(1/2), sqrt 2), |error| < 1.1e-4
    let exponent: [i32; K] = from_fn(|k| (a[k].to_bits().wrapping_sub(0x3f35_04f3) as i32) >> 23);
    let t: [f32; K] =
        from_fn(|k| f32::from_bits(a[k].to_bits().wrapping_sub((exponent[k] as u32) << 23)) - 1.0);
    let p = [-0.329_629_9_f32; K];
    let p = step(p, t, 0.517_509_6);
    let p = step(p, t, -0.724_904_2);
    let p = step(p, t, 1.441_760_7);
    // From -18 to 127, so that the exponent below stays in range.
    let y: [f32; K] = from_fn(|k| c * (exponent[k] as f32 + p[k] * t[k]));
    // exp2: fraction in [-1/2, 1/2], relative error < 7.6e-5
    let n: [f32; K] = from_fn(|k| y[k] + MAGIC);
    let f: [f32; K] = from_fn(|k| y[k] - (n[k] - MAGIC));
    let p = [0.055_171_67_f32; K];
    let p = step(p, f, 0.242_611_14);
    let p = step(p, f, 0.693_260_97);
    let p = step(p, f, 0.999_928_06);
    // The low 9 bits of n's mantissa are the exponent in two's complement.
    from_fn(|k| f32::from_bits(p[k].to_bits().wrapping_add(n[k].to_bits() << 23)))
}

/// A pair rounded half to even after clamping to what f16 holds, still as f32.
#[inline(always)]
fn nearest(step: f32, min: f32) -> (f32, f32) {
    let step = if step < LIMIT { step } else { LIMIT };
    let min = if min < LIMIT { min } else { LIMIT };
    let min = if min > -LIMIT { min } else { -LIMIT };
    (half16::round(step), half16::round(min))
}

#[inline(always)]
fn pair((step, min): (f32, f32)) -> Pair {
    Pair { step: f16::from_bits(half16::bits(step)), min: f16::from_bits(half16::bits(min)) }
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
    pair(nearest(2.0 * spread, mean - spread))
}

/// The smallest squared error of nine ranges around one centre and two least-squares refits of each; first on
/// ties, a range before its refits. Every candidate is rounded, coded, and measured.
#[inline(always)]
fn least_squares<const P: usize>(x: &[f32; P], live: Live, r: Range, max: f32) -> Pair {
    let n = live.len as f32;
    let (centre, half) = ((r.lo + r.hi) * 0.5, (r.hi - r.lo) * 0.5);
    // Sums are taken around the centre: the products would cancel for data far from 0.
    let (mut q, mut t, mut u, mut y) = ([0f32; P], [0f32; P], [0f32; P], [0f32; P]);
    for i in 0..P {
        y[i] = x[i] - centre;
        t[i] = y[i];
    }
    let mean = live.sum(&mut t) / n;
    let mut candidates = [[(f32::INFINITY, (0f32, 0f32)); 3]; 9];
    for (c, shrink) in candidates.iter_mut().zip(SHRINK) {
        c[0].1 = nearest(2.0 * half * shrink / max, centre - half * shrink);
    }
    // The nine do not wait for each other, so one's refit hides behind the next one's codes.
    for stage in 0..3 {
        for c in &mut candidates {
            // A refit that keeps its pair has the same error and cannot win.
            if stage > 0 && c[stage].1 == c[stage - 1].1 {
                if stage < 2 {
                    c[stage + 1].1 = c[stage].1;
                }
                continue;
            }
            let (step, min) = c[stage].1;
            let div = divisor(step);
            for i in 0..P {
                q[i] = round_code((x[i] - min) / div, max);
                let e = x[i] - (step * q[i] + min);
                t[i] = e * e;
            }
            c[stage].0 = live.sum(&mut t);
            if stage == 2 {
                continue;
            }
            // Codes grow with x: all are equal if those of the extremes are. A refit then keeps the pair.
            if round_code((r.lo - min) / div, max) == round_code((r.hi - min) / div, max) {
                c[stage + 1].1 = c[stage].1;
                continue;
            }
            for i in 0..P {
                t[i] = q[i] * q[i];
                u[i] = q[i] * y[i];
            }
            let (squares, products) = (live.sum(&mut t), live.sum(&mut u));
            let sum = live.sum(&mut q);
            let code_mean = sum / n;
            let variance = squares - code_mean * sum;
            let step = (products - sum * mean) / variance;
            let step = if step > 0.0 { step } else { 0.0 };
            c[stage + 1].1 = nearest(step, centre + (mean - step * code_mean));
        }
    }
    let mut best = candidates[0][0];
    for c in candidates.iter().flatten() {
        if c.0 < best.0 {
            best = *c;
        }
    }
    pair(best.1)
}

/// One group's half-quadratic iterations.
#[derive(Clone, Copy)]
struct Iteration {
    live: Live,
    /// The range's step, rounded to f16, and its reciprocal.
    step: f32,
    inverse: f32,
    min: f32,
    /// The smallest sum of errors so far.
    best: f32,
    running: bool,
}

impl Iteration {
    #[inline(always)]
    fn new(live: Live, r: Range, max: f32) -> Self {
        let step = nearest((r.hi - r.lo) / max, 0.0).0;
        // The smallest positive f16.
        let tiny = f32::from_bits((127 - 24) << 23);
        let step = if step > tiny { step } else { tiny };
        Self { live, step, inverse: 1.0 / step, min: r.lo, best: f32::INFINITY, running: true }
    }

    /// One pass; returns whether another one follows. The min of the pass that ends is kept.
    #[inline(always)]
    fn pass<const P: usize>(&mut self, x: &[f32; P], max: f32, exponent: f32, weight: f32) -> bool {
        let (mut error, mut shift) = ([0f32; P], [0f32; P]);
        let (step, inverse, min) = (self.step, self.inverse, self.min);
        let quarter = P / CHAINS;
        for i in 0..quarter {
            let x: [f32; CHAINS] = from_fn(|k| x[i + k * quarter]);
            let code: [f32; CHAINS] = from_fn(|k| round_code((x[k] - min) * inverse, max));
            let e: [f32; CHAINS] = from_fn(|k| x[k] - (step * code[k] + min));
            let a: [f32; CHAINS] = from_fn(|k| e[k].abs());
            // e - shrink(e), where shrink(e) = sign(e) * max(|e| - |e|^(p-1) / beta, 0)
            let w = power(a, exponent);
            for k in 0..CHAINS {
                let w = w[k] * weight;
                let w = if w < a[k] { w } else { a[k] };
                error[i + k * quarter] = a[k];
                shift[i + k * quarter] = f32::from_bits(w.to_bits() | (e[k].to_bits() & 0x8000_0000));
            }
        }
        let total = self.live.sum(&mut error);
        // mean(x - shrink(e) - step * code) = min + mean(e - shrink(e))
        self.min += self.live.sum(&mut shift) / self.live.len as f32;
        self.running = total < self.best;
        self.best = total;
        self.running
    }
}

/// Half-quadratic iterations for min of several groups; each stops by itself. The step is the range's, rounded
/// first.
#[inline(always)]
fn half_quadratic<const P: usize>(
    x: &[[f32; P]; BATCH],
    state: &mut [Option<Iteration>; BATCH],
    max: f32,
    (p, beta, iterations): (f32, f32, u32),
) {
    let (weight, exponent) = (1.0 / beta, p - 1.0);
    for _ in 0..iterations {
        let mut running = false;
        for (x, s) in x.iter().zip(state.iter_mut()) {
            if let Some(s) = s
                && s.running
            {
                running |= s.pass(x, max, exponent, weight);
            }
        }
        if !running {
            break;
        }
    }
}

#[inline(always)]
fn solve_padded<const P: usize>(
    x: &[f32],
    group: usize,
    skip: usize,
    open: &[Option<Range>; BATCH],
    bits: Bits,
    fit: &Fit,
    pairs: &mut [Pair],
) {
    let max = bits.max_code() as f32;
    let mut buffers = [[0f32; P]; BATCH];
    let mut state = [None; BATCH];
    for (i, x) in x.chunks(group).enumerate() {
        let Some(range) = open[i] else { continue };
        let skip = skip.min(x.len());
        let live = Live { at: skip, len: x.len() - skip };
        // Padding holds a value of the group, so that it codes like one.
        let buffer = &mut buffers[i];
        if live.len < P {
            buffer.fill(range.lo);
        }
        buffer[skip..x.len()].copy_from_slice(&x[skip..]);
        match fit {
            Fit::Hqq { .. } => state[i] = Some(Iteration::new(live, range, max)),
            _ if bits == Bits::B1 => pairs[i] = two_levels(buffer, live),
            _ => pairs[i] = least_squares(buffer, live, range, max),
        }
    }
    if let Fit::Hqq { p, beta, iterations } = *fit {
        half_quadratic(&buffers, &mut state, max, (p, beta, iterations));
        for (s, p) in state.iter().zip(pairs) {
            if let Some(s) = s {
                *p = pair((s.step, nearest(0.0, s.min).1));
            }
        }
    }
}

/// The pairs of up to [`BATCH`] neighbouring groups: of those that are `open`, whose elements from `skip` on are
/// finite, clamped and unequal.
#[inline(always)]
pub(crate) fn solve<const FMA: bool>(
    x: &[f32],
    group: usize,
    skip: usize,
    open: &[Option<Range>; BATCH],
    bits: Bits,
    fit: &Fit,
    pairs: &mut [Pair],
) {
    // More zeros behind the same tree change nothing, so 32 is the least.
    match group.min(x.len()) {
        0..=32 => solve_padded::<32>(x, group, skip, open, bits, fit, pairs),
        33..=64 => solve_padded::<64>(x, group, skip, open, bits, fit, pairs),
        65..=128 => solve_padded::<128>(x, group, skip, open, bits, fit, pairs),
        129..=256 => solve_padded::<256>(x, group, skip, open, bits, fit, pairs),
        // The whole head of a cache.
        _ => solve_padded::<512>(x, group, skip, open, bits, fit, pairs),
    }
}
