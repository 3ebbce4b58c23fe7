//! Class a without the HQQ solver: codes for the peer's pair, and decoding of the peer's codes. Class c.

use crate::functions::Functions;
use crate::golden::{Case, Elements, Golden, ulp};
use crate::report::Report;
use crate::views::{View, bits, pairs};
use qkv::quant::fp8;
use qkv::{Axis, Bits, Dtype, Fp8, Granularity};

pub(crate) fn run(on: &dyn Functions, golden: &Golden, report: &mut Report) {
    let mut worst = [0f64; 3];
    for case in &golden.cases {
        if case.lists_tensor("codes") {
            report.count('a', case);
            if case.file != "hqq" {
                let share = codes(on, golden, case, report);
                let at = case.dtype("dtype") as usize;
                worst[at] = worst[at].max(share);
            }
            decode(on, golden, case, report);
        }
        if case.str("scheme") == Some("symmetric") {
            report.count('c', case);
            symmetric(on, golden, case, report);
        }
    }
    report.note(format!(
        "a: codes one apart, largest share of a case: f16 {:.4} %, bf16 {:.4} %, f32 {:.4} %",
        worst[Dtype::F16 as usize] * 100.0,
        worst[Dtype::Bf16 as usize] * 100.0,
        worst[Dtype::F32 as usize] * 100.0
    ));
}

/// The share of elements that may be one code apart: the peer rounds every operation to its dtype.
pub(crate) fn share(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F16 => 0.005,
        Dtype::Bf16 => 0.026,
        Dtype::F32 => 0.0,
    }
}

/// Our codes for the peer's pair against the peer's codes; the share that differs.
fn codes(on: &dyn Functions, golden: &Golden, case: &Case, report: &mut Report) -> f64 {
    let (view, input) = (View::affine(case), golden.input(case));
    let pairs = pairs(golden, case, &view, false);
    let ours = on.quantize_with(input, &view, bits(case), &pairs);
    let theirs = golden.tensor(case, "codes").u8();
    let (mut one, mut more, mut seen) = (0usize, 0usize, 0usize);
    for (i, (a, b)) in ours.iter().zip(theirs).enumerate() {
        let (step, min) = pairs[view.pair_of(i)];
        // Where the step is 0 or not finite, the peer casts NaN to a byte: nothing is defined there.
        if step == 0.0 || !step.is_finite() || !min.is_finite() {
            report.check(case.flag("codes_undefined"), case, || "undefined codes without the flag".into());
            continue;
        }
        seen += 1;
        match a.abs_diff(*b) {
            0 => {}
            1 => one += 1,
            _ => more += 1,
        }
    }
    let part = one as f64 / seen.max(1) as f64;
    report.check(more == 0, case, || format!("{more} of {seen} codes more than one apart"));
    let limit = share(input.dtype());
    report.check(part <= limit, case, || {
        format!("{one} of {seen} codes one apart, {:.3} % of {:.3} % allowed", part * 100.0, limit * 100.0)
    });
    part
}

/// Largest error of a decoded element: two places of the peer's dtype at the larger of the two terms.
pub(crate) fn tolerance(dtype: Dtype, code: u8, (step, min): (f32, f32)) -> f64 {
    2.0 * ulp(dtype, (step as f64 * code as f64).abs().max((min as f64).abs()))
}

/// The peer's codes and pair, decoded by us.
fn decode(on: &dyn Functions, golden: &Golden, case: &Case, report: &mut Report) {
    let (view, codes) = (View::affine(case), golden.tensor(case, "codes"));
    let pairs = pairs(golden, case, &view, false);
    let want = golden.tensor(case, "dequant");
    let ours = on.dequantize(&view, bits(case), codes.u8(), &pairs, want.dtype()).f64();
    let (mut bad, mut example) = (0, String::new());
    for (i, (a, b)) in ours.iter().zip(want.f64()).enumerate() {
        let (code, pair) = (codes.u8()[i], pairs[view.pair_of(i)]);
        let close = if b.is_finite() {
            (a - b).abs() <= tolerance(want.dtype(), code, pair)
        } else {
            // NaN or infinity came from the pair, and must show here too.
            !a.is_finite()
        };
        if !close {
            bad += 1;
            example = format!("element {i}: {a} against {b}, code {code}, pair {pair:?}");
        }
    }
    report.check(bad == 0, case, || format!("{bad} elements decode differently, {example}"));
}

/// Symmetric int8 and e4m3: `x = scale * q`, one scale a tensor, a batch row, or a channel.
fn symmetric(on: &dyn Functions, golden: &Golden, case: &Case, report: &mut Report) {
    let (q, want) = (golden.tensor(case, "q"), golden.tensor(case, "dequant"));
    let scale = golden.tensor(case, "scale").f32();
    let shape = case.usizes("shape");
    let (n, dim) = (want.len(), *shape.last().unwrap());
    let axis = case.int("axis");
    let scale_of = |flat: usize| match axis {
        None => scale[0],
        Some(0) => scale[flat / (n / shape[0])],
        Some(_) => scale[flat % dim],
    };
    let mut bad = 0;
    match &q.elements {
        Elements::I8(q) => {
            // A signed code is an unsigned one with min = -128 * step.
            let codes: Vec<u8> = q.iter().map(|q| (*q as i16 + 128) as u8).collect();
            let dims = [n / dim, 1, dim];
            // Tokens in pairs: the smallest groups, so that any scale can stand in any row or column.
            let (axis, group) = match axis {
                Some(-1) => (Axis::PerChannel, 2),
                _ => (Axis::PerToken, dim.min(256)),
            };
            let view = View { dims, axis, group };
            let mut pairs = vec![(0f32, 0f32); view.pair_count()];
            for i in 0..n {
                let s = scale_of(i);
                pairs[view.pair_of(i)] = (s, -128.0 * s);
            }
            let ours = on.dequantize(&view, Bits::B8, &codes, &pairs, want.dtype()).f64();
            for (i, (a, b)) in ours.iter().zip(want.f64()).enumerate() {
                let limit = tolerance(want.dtype(), codes[i], pairs[view.pair_of(i)]);
                bad += ((a - b).abs() > limit) as usize;
            }
        }
        _ => {
            // One scale a head: heads are what shares a scale.
            let (dims, scales): ([usize; 3], Vec<f32>) = match axis {
                None => ([n / dim, 1, dim], vec![scale[0]]),
                Some(0) => ([1, shape[0], n / shape[0]], scale.clone()),
                Some(_) => ([n / dim, dim, 1], scale.clone()),
            };
            let format = Fp8::e4m3(Granularity::Head);
            let q = fp8::Fp8Tensor::from_bytes(dims, format, q.u8().to_vec(), scales).unwrap();
            let ours = on.decode(&q, want.dtype()).f64();
            bad = ours.iter().zip(want.f64()).filter(|(a, b)| **a != *b).count();
        }
    }
    report.check(bad == 0, case, || format!("{bad} of {n} elements decode differently"));
}
