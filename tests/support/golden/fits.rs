//! Class b: our own fits against the peer's error, in f64. Class e: what the peer cannot do.

use crate::functions::Functions;
use crate::golden::{Case, Golden};
use crate::report::Report;
use crate::views::{View, bits};
use half::f16;
use qkv::Fit;

pub(crate) fn run(on: &dyn Functions, golden: &Golden, report: &mut Report) {
    let mut worst: Vec<(f64, String)> = Vec::new();
    for case in golden.cases.iter().filter(|c| c.has("bits") && c.has("group_size")) {
        if case.peer_failed() || case.flag("codes_undefined") {
            report.count('e', case);
            round_trip(on, golden, case, report);
        }
        if case.peer_failed() || case.flag("per_element_scale_quirk") {
            continue;
        }
        report.count('b', case);
        worst.push(compare(on, golden, case, report));
    }
    worst.sort_by(|a, b| b.0.total_cmp(&a.0));
    for (ratio, line) in worst.iter().take(5) {
        report.note(format!("b: error against the peer's {ratio:.4}: {line}"));
    }
}

/// Our result for a case with one fit, as f64, in the peer's dtype.
fn ours(on: &dyn Functions, golden: &Golden, case: &Case, view: &View, fit: Fit) -> Vec<f64> {
    let input = golden.input(case);
    // The peer's output dtype where there is one.
    let dtype = golden.find(&case.file, &format!("{}.dequant", case.id)).unwrap_or(input).dtype();
    on.round_trip(input, view, bits(case), fit, dtype).unwrap().decoded.f64()
}

/// The ratio of our error to the peer's, checked against its limit.
fn compare(on: &dyn Functions, golden: &Golden, case: &Case, report: &mut Report) -> (f64, String) {
    let view = View::affine(case);
    let x = golden.input(case).f64();
    let peer = golden.tensor(case, "dequant").f64();
    let kind = case.str("kind").unwrap_or_default();
    let hqq = case.file == "hqq";
    // HQQ minimises |e|^0.7, the others are judged by the squared error.
    let power = if hqq { 0.7 } else { 2.0 };
    let limit = match (hqq, kind) {
        (true, "offset") => f64::INFINITY,
        (true, _) if golden.find(&case.file, &format!("{}.input", case.id)).is_some() => 1.05,
        (false, "tiny" | "offset") => 1.06,
        _ => 1.01,
    };
    let default = Fit::default_for(bits(case));
    let fits = if hqq { vec![Fit::HQQ] } else { vec![default, Fit::MinMax] };
    let mut largest = 0f64;
    for fit in fits {
        let own = ours(on, golden, case, &view, fit);
        let (mut a, mut b) = (0f64, 0f64);
        for members in view.groups() {
            let first = x[members[0]];
            if members.iter().any(|i| !x[*i].is_finite()) {
                report.check(members.iter().all(|i| own[*i].is_nan()), case, || {
                    "a group with NaN or infinity does not decode to NaN".into()
                });
            } else if members.iter().all(|i| x[*i] == first) {
                let value = f16::from_f64(first).to_f64();
                report.check(members.iter().all(|i| own[*i] == value), case, || {
                    format!("a constant group of {first} decodes to {}", own[members[0]])
                });
            } else {
                report.check(members.iter().all(|i| own[*i].is_finite()), case, || {
                    "a finite group does not decode to finite values".into()
                });
                // The peer overflows in some groups where we do not.
                if members.iter().all(|i| peer[*i].is_finite()) {
                    a += members.iter().map(|i| (x[*i] - own[*i]).abs().powf(power)).sum::<f64>();
                    b += members.iter().map(|i| (x[*i] - peer[*i]).abs().powf(power)).sum::<f64>();
                }
            }
        }
        if !hqq {
            (a, b) = (a.sqrt(), b.sqrt());
        }
        let ratio = if b == 0.0 { if a == 0.0 { 0.0 } else { f64::INFINITY } } else { a / b };
        report.check(ratio <= limit, case, || {
            format!("{fit:?}: error {a:.6e} is {ratio:.4} times the peer's {b:.6e}, allowed {limit}")
        });
        largest = largest.max(ratio);
    }
    (largest, format!("{}/{} (allowed {limit})", case.file, case.id))
}

/// The call succeeds, what it gives decodes within half a step, and damage stays in its group.
fn round_trip(on: &dyn Functions, golden: &Golden, case: &Case, report: &mut Report) {
    let view = View::affine(case);
    let input = golden.input(case);
    let x = input.f64();
    let q = on.round_trip(input, &view, bits(case), Fit::MinMax, qkv::Dtype::F32);
    report.check(q.is_ok(), case, || format!("{:?}", q.as_ref().err()));
    let Ok(q) = q else { return };
    let (own, pairs) = (q.decoded.f64(), q.pairs);
    for (g, members) in view.groups().iter().enumerate() {
        let (step, min) = (pairs[g].0 as f64, pairs[g].1 as f64);
        if members.iter().any(|i| !x[*i].is_finite()) {
            report.check(members.iter().all(|i| own[*i].is_nan()), case, || format!("group {g} is not NaN"));
            continue;
        }
        for i in members {
            // A constant group is rounded to f16; else half a step and the decoder's roundings.
            let slack = if step == 0.0 { x[*i].abs() / 2048.0 } else { (min.abs() + 256.0 * step) * 1e-6 };
            let error = (own[*i] - x[*i].clamp(-65504.0, 65504.0)).abs();
            report.check(error <= step / 2.0 + slack, case, || {
                format!("element {i}: {} became {}", x[*i], own[*i])
            });
        }
    }
}
