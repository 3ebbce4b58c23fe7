//! Class a of HQQ: the solver written down in f32 with its own stopping rule (the whole tensor's error), and the
//! codes of `quantize_with` for its pair.
//!
//! HQQ codes `rne(x * s + z)`; `quantize_with` codes `rne((x - min) / step)`. They are the same thing for the input
//! `x * s` and the pair (1, -z), and then the codes are equal. For the input `x` and the pair (1/s, -z/s) they are
//! equal but for elements within f32 rounding of a tie.

use crate::functions::Functions;
use crate::golden::{Case, Golden, Tensor, ulp};
use crate::report::Report;
use crate::views::{View, bits, pairs};
use qkv::{Axis, Bits, Dtype};

/// The solver's result, a group each, in the order of the view.
#[derive(Debug, Clone)]
pub(crate) struct Solved {
    /// 1 / scale, the distance of codes.
    pub(crate) step: Vec<f32>,
    pub(crate) zero: Vec<f32>,
    /// s = (2^bits - 1) / range, before it was inverted.
    pub(crate) scale: Vec<f32>,
}

/// The order in which the peer's framework adds f32 numbers: its last bits move the zero, and near a tie a code.
///
/// Rows of `group` neighbours are read in vectors of 8; vectors go round robin to four sums. Columns are added
/// down the rows: alone where 32 columns are side by side, else again round robin to four sums.
struct Sums {
    strided: bool,
    columns: usize,
}

const LANES: usize = 8;

impl Sums {
    fn of(view: &View) -> Self {
        Self { strided: view.axis == Axis::PerChannel, columns: view.dims[2] }
    }

    /// Adds every `stride`-th element in blocks of 16 that are added up in turn.
    fn cascade(t: &[f32], from: usize, stride: usize, count: usize) -> f32 {
        let (mut low, mut high) = (0f32, 0f32);
        for i in 0..count {
            low += t[from + i * stride];
            if i % 16 == 15 {
                high += low;
                low = 0.0;
            }
        }
        low + high
    }

    fn round_robin(t: &[f32]) -> f32 {
        let each = t.len() / 4;
        let mut parts: [f32; 4] = std::array::from_fn(|k| Self::cascade(t, k, 4, each));
        for x in &t[each * 4..] {
            parts[0] += x;
        }
        ((parts[0] + parts[1]) + parts[2]) + parts[3]
    }

    fn sum(&self, group: usize, t: &[f32]) -> f32 {
        if self.strided {
            return if group < self.columns / (4 * LANES) * (4 * LANES) {
                Self::cascade(t, 0, 1, t.len())
            } else {
                Self::round_robin(t)
            };
        }
        let vectors = t.len() / LANES;
        let lane = |l: usize| Self::round_robin(&(0..vectors).map(|v| t[v * LANES + l]).collect::<Vec<_>>());
        let mut total = t[vectors * LANES..].iter().fold(0f32, |a, b| a + b);
        for l in 0..LANES {
            total += lane(l);
        }
        total
    }
}

/// HQQ's quantizer as published: `p` 0.7, `beta` 10, at most 20 passes; only the zero moves; it stops for all
/// groups together, and keeps the zero of the pass that stops.
pub(crate) fn solve(x: &[f32], view: &View, bits: Bits, optimize: bool) -> Solved {
    let max = bits.max_code() as f32;
    let groups = view.groups();
    let (mut scale, mut zero) = (Vec::new(), Vec::new());
    for g in &groups {
        let lo = g.iter().fold(f32::INFINITY, |m, i| if x[*i].is_nan() { f32::NAN } else { m.min(x[*i]) });
        let hi =
            g.iter().fold(f32::NEG_INFINITY, |m, i| if x[*i].is_nan() { f32::NAN } else { m.max(x[*i]) });
        // The framework divides a number by a tensor as reciprocal, then product.
        let mut s = (1.0 / (hi - lo)) * max;
        if (hi - lo).abs() <= 1e-4 {
            s = 1.0;
        }
        let s = if s > 2e4 { 2e4 } else { s };
        scale.push(s);
        zero.push(-lo * s);
    }
    let code = |x: f32, s: f32, z: f32| (x * s + z).round_ties_even().clamp(0.0, max);
    let sums = Sums::of(view);
    let mut best = f64::INFINITY;
    for _ in 0..if optimize { 20 } else { 0 } {
        let mut total = 0f64;
        for (g, members) in groups.iter().enumerate() {
            let (s, z) = (scale[g], zero[g]);
            let mut terms = Vec::with_capacity(members.len());
            for i in members {
                let q = code(x[*i], s, z);
                let xr = (q - z) / s;
                let e = x[*i] - xr;
                let a = e.abs();
                total += a as f64;
                let shrunk = (a - 0.1 * a.powf(-0.3)).max(0.0).copysign(e);
                terms.push(q - (x[*i] - shrunk) * s);
            }
            zero[g] = sums.sum(g, &terms) / members.len() as f32;
        }
        let error = total / x.len() as f64;
        if error.is_nan() || error >= best {
            break;
        }
        best = error;
    }
    Solved { step: scale.iter().map(|s| 1.0 / s).collect(), zero, scale }
}

impl Solved {
    /// The library's codes: for `x * s` and the pair (1, -z).
    pub(crate) fn codes(&self, on: &dyn Functions, x: &[f32], view: &View, bits: Bits) -> Vec<u8> {
        let scaled: Vec<f32> = x.iter().enumerate().map(|(i, x)| x * self.scale[view.pair_of(i)]).collect();
        let pairs: Vec<(f32, f32)> = self.zero.iter().map(|z| (1.0, -z)).collect();
        on.quantize_with(&Tensor::from_f32(Dtype::F32, &view.dims, &scaled), view, bits, &pairs)
    }
}

pub(crate) fn run(on: &dyn Functions, golden: &Golden, report: &mut Report) {
    let (mut ties, mut all) = (0usize, 0usize);
    for case in golden.of("hqq").filter(|c| c.lists_tensor("codes")) {
        let x = golden.input(case).f32();
        if x.iter().all(|x| x.is_finite()) {
            ties += codes(on, golden, case, &x, report);
            all += x.len();
        }
    }
    report.note(format!(
        "a: HQQ codes of {all} elements equal; {ties} at a tie fall the other way for (1/s, -z/s)"
    ));
}

fn codes(on: &dyn Functions, golden: &Golden, case: &Case, x: &[f32], report: &mut Report) -> usize {
    let (view, bits) = (View::affine(case), bits(case));
    let theirs = golden.tensor(case, "codes").u8();
    let own = solve(x, &view, bits, case.flag("optimize"));
    let ours = own.codes(on, x, &view, bits);
    let differ = ours.iter().zip(theirs).filter(|(a, b)| a != b).count();
    report.check(differ == 0, case, || format!("{differ} codes differ"));
    let pairs = pairs(golden, case, &view, true);
    let ours = on.quantize_with(golden.input(case), &view, bits, &pairs);
    let mut ties = 0;
    for (i, (a, b)) in ours.iter().zip(theirs).enumerate().filter(|(_, (a, b))| a != b) {
        ties += 1;
        let g = view.pair_of(i);
        let (s, z) = (own.scale[g] as f64, own.zero[g] as f64);
        let t = x[i] as f64 * s + z;
        let from_tie = ((t - t.floor()) - 0.5).abs();
        let rounding = 2.0 * ulp(Dtype::F32, z.abs().max((x[i] as f64 * s).abs()));
        report.check(a.abs_diff(*b) == 1 && from_tie <= rounding, case, || {
            format!("element {i}: code {a} against {b} at {t}")
        });
    }
    ties
}
