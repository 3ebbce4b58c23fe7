//! Comparison, selection, moves, special functions.

use super::model::{BF16, F16, F32, F64, Fmt, Mode, edges};
use super::*;
use std::cmp::Ordering;

const ORDERED: [&str; 6] = ["eq", "ne", "lt", "le", "gt", "ge"];

fn holds(op: &str, o: Ordering) -> bool {
    match op {
        "eq" => o.is_eq(),
        "ne" => o.is_ne(),
        "lt" | "lo" => o.is_lt(),
        "le" | "ls" => o.is_le(),
        "gt" | "hi" => o.is_gt(),
        _ => o.is_ge(),
    }
}

/// The value of a comparison of floats, by the manual's table.
fn float_holds(op: &str, a: f64, b: f64) -> bool {
    match (op, a.partial_cmp(&b)) {
        ("num", o) => o.is_some(),
        ("nan", o) => o.is_none(),
        (op, None) => op.ends_with('u'),
        (op, Some(o)) => holds(op.strip_suffix('u').unwrap_or(op), o),
    }
}

/// `setp` and `set` of one type in all their shapes.
fn comparisons(ty: &str, l: &str, op: &str, pairs: &[Vec<u64>], t: impl Fn(&[u64]) -> bool) {
    let bit = |b: bool| vec![u64::from(b)];
    check(&format!("setp.{op}.{ty} p, {l}, {l}"), pairs, |x| bit(t(x)));
    check(&format!("set.{op}.u32.{ty} r, {l}, {l}"), pairs, |x| vec![if t(x) { 0xffff_ffff } else { 0 }]);
    check(&format!("set.{op}.f32.{ty} r, {l}, {l}"), pairs, |x| vec![if t(x) { 0x3f80_0000 } else { 0 }]);
    let with_c: Vec<Vec<u64>> =
        pairs.iter().enumerate().map(|(i, x)| [x.as_slice(), &[(i / 3 % 2) as u64]].concat()).collect();
    check(&format!("setp.{op}.{ty} p|p, {l}, {l}"), pairs, |x| vec![u64::from(t(x)), u64::from(!t(x))]);
    for (name, combine) in
        [("and", (|a, b| a & b) as fn(bool, bool) -> bool), ("or", |a, b| a | b), ("xor", |a, b| a ^ b)]
    {
        for not in [false, true] {
            let c = if not { "!p" } else { "p" };
            check(&format!("setp.{op}.{name}.{ty} p|p, {l}, {l}, {c}"), &with_c, |x| {
                let c = (x[2] != 0) != not;
                vec![u64::from(combine(t(x), c)), u64::from(combine(!t(x), c))]
            });
            check(&format!("set.{op}.{name}.s32.{ty} r, {l}, {l}, {c}"), &with_c, |x| {
                vec![if combine(t(x), (x[2] != 0) != not) { 0xffff_ffff } else { 0 }]
            });
        }
    }
}

#[test]
fn integers() {
    for (bits, l) in [(16u32, "h"), (32, "r"), (64, "d")] {
        let pairs: Vec<_> = integer_tuples(2, bits).into_iter().step_by(2).collect();
        let value = |x: u64, signed: bool| {
            let v = i128::from(x);
            if signed && v >> (bits - 1) != 0 { v - (1i128 << bits) } else { v }
        };
        for op in ORDERED {
            for (t, signed) in [("u", false), ("s", true)] {
                comparisons(&format!("{t}{bits}"), l, op, &pairs, |x| {
                    holds(op, value(x[0], signed).cmp(&value(x[1], signed)))
                });
            }
        }
        for op in ["eq", "ne"] {
            comparisons(&format!("b{bits}"), l, op, &pairs, |x| holds(op, x[0].cmp(&x[1])));
        }
        for op in ["lo", "ls", "hi", "hs"] {
            comparisons(&format!("u{bits}"), l, op, &pairs, |x| holds(op, x[0].cmp(&x[1])));
        }
    }
    for wrong in [
        "setp.lt.b32 p, r, r",
        "setp.lo.s32 p, r, r",
        "setp.equ.s32 p, r, r",
        "setp.lt.ftz.s32 p, r, r",
        "setp.lt.and.s32 p, r, r",
        "setp.s32 p, r, r",
    ] {
        assert!(refused(wrong), "{wrong}");
    }
}

fn float_pairs(f: Fmt) -> Vec<Vec<u64>> {
    let mut v = tuples(2, &edges(f), |r| r.next() >> (64 - f.width));
    v.iter_mut().skip(3).step_by(5).for_each(|x| x[1] = x[0]);
    v
}

#[test]
fn floats() {
    const ALL: [&str; 14] =
        ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"];
    let flush = |f: Fmt, bits: u64| {
        let sign = 1u64 << (f.width - 1);
        if bits & (sign - 1) < 1 << f.fraction { bits & sign } else { bits }
    };
    for (ty, f, l) in [("f32", F32, "r"), ("f64", F64, "d"), ("f16", F16, "h"), ("bf16", BF16, "h")] {
        for op in ALL {
            let pairs = float_pairs(f);
            comparisons(ty, l, op, &pairs, |x| float_holds(op, f.value(x[0]), f.value(x[1])));
            if f == F32 || f == F16 {
                check(&format!("setp.{op}.ftz.{ty} p, {l}, {l}"), &pairs, |x| {
                    vec![u64::from(float_holds(op, f.value(flush(f, x[0])), f.value(flush(f, x[1]))))]
                });
            }
            if f.width == 16 {
                let packed: Vec<Vec<u64>> = (0..pairs.len())
                    .map(|i| {
                        let (low, high) = (&pairs[i], &pairs[(i * 13 + 1) % pairs.len()]);
                        vec![low[0] | high[0] << 16, low[1] | high[1] << 16, (i % 2) as u64]
                    })
                    .collect();
                let half = |x: &[u64], at: u32| {
                    float_holds(op, f.value(x[0] >> at & 0xffff), f.value(x[1] >> at & 0xffff))
                };
                let two: Vec<_> = packed.iter().map(|x| x[..2].to_vec()).collect();
                check(&format!("setp.{op}.{ty}x2 p|p, r, r"), &two, |x| {
                    vec![u64::from(half(x, 0)), u64::from(half(x, 16))]
                });
                check(&format!("setp.{op}.or.{ty}x2 p|p, r, r, p"), &packed, |x| {
                    vec![u64::from(half(x, 0)) | x[2], u64::from(half(x, 16)) | x[2]]
                });
                let one = f.of(1.0, Mode::Nearest);
                for (dtype, yes) in [(format!("{ty}x2"), one), ("u32".into(), 0xffff)] {
                    check(&format!("set.{op}.{dtype}.{ty}x2 r, r, r"), &two, |x| {
                        vec![if half(x, 0) { yes } else { 0 } | if half(x, 16) { yes << 16 } else { 0 }]
                    });
                }
                check(&format!("set.{op}.{ty}.{ty} h, h, h"), &pairs, |x| {
                    vec![if float_holds(op, f.value(x[0]), f.value(x[1])) { one } else { 0 }]
                });
            }
        }
    }
}

#[test]
fn selection() {
    for (ty, bits, l) in
        [("b16", 16, "h"), ("u32", 32, "r"), ("s64", 64, "d"), ("f32", 32, "r"), ("f64", 64, "d")]
    {
        let mut inputs = integer_tuples(3, bits);
        inputs.iter_mut().enumerate().for_each(|(i, x)| x[2] = i as u64 / 5 % 2);
        check(&format!("selp.{ty} {l}, {l}, {l}, p"), &inputs, |x| vec![if x[2] != 0 { x[0] } else { x[1] }]);
        check(&format!("selp.{ty} {l}, {l}, {l}, !p"), &inputs, |x| {
            vec![if x[2] == 0 { x[0] } else { x[1] }]
        });
        let c = edges(F32);
        inputs.iter_mut().enumerate().for_each(|(i, x)| x[2] = c[i % c.len()]);
        check(&format!("slct.{ty}.s32 {l}, {l}, {l}, r"), &inputs, |x| {
            vec![if x[2] as u32 as i32 >= 0 { x[0] } else { x[1] }]
        });
        check(&format!("slct.{ty}.f32 {l}, {l}, {l}, r"), &inputs, |x| {
            vec![if F32.value(x[2]) >= 0.0 { x[0] } else { x[1] }]
        });
        check(&format!("slct.ftz.{ty}.f32 {l}, {l}, {l}, r"), &inputs, |x| {
            let c = F32.value(x[2]);
            vec![if c >= 0.0 || c.abs() < 2f64.powi(-126) { x[0] } else { x[1] }]
        });
    }
    let form = form_of("selp.b32 r, r, r, p", 80, &Options::default()).unwrap();
    assert_eq!(form.taint, crate::exec::regs::Taint::Select);
}

#[test]
fn moves() {
    for (ty, bits, l) in [
        ("b16", 16, "h"),
        ("u16", 16, "h"),
        ("b32", 32, "r"),
        ("s32", 32, "r"),
        ("f32", 32, "r"),
        ("u64", 64, "d"),
        ("f64", 64, "d"),
    ] {
        check(&format!("mov.{ty} {l}, {l}"), &integer_tuples(1, bits), |x| vec![x[0]]);
    }
    check("mov.pred p, p", &[vec![0], vec![1]], |x| vec![x[0]]);
    check("mov.pred p, !p", &[vec![0], vec![1]], |x| vec![1 - x[0]]);
    for (whole, l, part, n, bits) in [
        ("b64", "d", "r", 2, 32),
        ("b64", "d", "h", 4, 16),
        ("b32", "r", "h", 2, 16),
        ("b32", "r", "b", 4, 8),
        ("b16", "h", "b", 2, 8),
    ] {
        let parts = vec![part; n].join(", ");
        check(&format!("mov.{whole} {l}, {{{parts}}}"), &integer_tuples(n, bits), |x| {
            vec![x.iter().enumerate().map(|(i, v)| v << (i as u32 * bits)).sum()]
        });
        check(&format!("mov.{whole} {{{parts}}}, {l}"), &integer_tuples(1, n as u32 * bits), |x| {
            (0..n).map(|i| x[0] >> (i as u32 * bits) & ((1 << bits) - 1)).collect()
        });
    }
    check("mov.b64 {r, _}, d", &integer_tuples(1, 64), |x| vec![x[0] & 0xffff_ffff, x[0] >> 32]);
    check("mov.b64 d, {r, -1}", &integer_tuples(1, 32), |x| vec![x[0] | 0xffff_ffff_0000_0000]);
    check("mov.b32 r, {h, -1}", &integer_tuples(1, 16), |x| vec![x[0] | 0xffff_0000]);
    let mut m = Machine::new("mov.f32 r, 1.5", &Options::default());
    m.run(Mask::MAX).unwrap();
    assert_eq!(m.get(0)[5], 0x3fc0_0000);
    for wrong in [
        "mov.b64 d, {r, r, r}",
        "mov.f32 r, {h, h}",
        "mov.b32 d, r",
        "mov.b128 d, {d, d}",
        "mov.foo.b32 r, r",
    ] {
        assert!(refused(wrong), "{wrong}");
    }
}

/// Within a few units in the last place of the true value, and exact where the manual says what comes out.
#[test]
fn approximations() {
    let values: Vec<Vec<u64>> = tuples(1, &edges(F32), |r| {
        let x = (r.next() % 4000) as f64 / 37.0 - 50.0;
        F32.of(x, Mode::Nearest)
    });
    type Case = (&'static str, fn(f64) -> f64);
    let functions: [Case; 8] = [
        ("ex2.approx", f64::exp2),
        ("lg2.approx", f64::log2),
        ("rcp.approx", |x| 1.0 / x),
        ("sqrt.approx", f64::sqrt),
        ("rsqrt.approx", |x| 1.0 / x.sqrt()),
        ("sin.approx", f64::sin),
        ("cos.approx", f64::cos),
        ("tanh.approx", f64::tanh),
    ];
    for (name, f) in functions {
        for ftz in [false, true] {
            if ftz && name == "tanh.approx" {
                continue;
            }
            let m = if ftz { ".ftz" } else { "" };
            let small = |x: f64| ftz && x.abs() < 2f64.powi(-126);
            check_with(
                &format!("{name}{m}.f32 r, r"),
                &values,
                |x| {
                    let x = F32.value(x[0]);
                    vec![f(if small(x) { 0f64.copysign(x) } else { x }).to_bits()]
                },
                |_, got, want| {
                    let (got, want) = (F32.value(got), f64::from_bits(want));
                    if want.is_nan() {
                        return got.is_nan();
                    }
                    let near = F32.value(F32.of(want, Mode::Nearest));
                    let near = if small(near) || small(want) { 0f64.copysign(near) } else { near };
                    got == near && got.is_sign_negative() == near.is_sign_negative()
                        || near != 0.0 && near.is_finite() && ((got - want) / want).abs() < 2f64.powi(-22)
                },
            );
        }
    }
    let pairs = float_pairs(F32);
    check_with(
        "div.full.f32 r, r, r",
        &pairs,
        |x| vec![(F32.value(x[0]) / F32.value(x[1])).to_bits()],
        |_, got, want| got == F32.of(f64::from_bits(want), Mode::Nearest),
    );
    check("div.approx.f32 r, r, r", &pairs, |x| {
        let (a, b) = (F32.value(x[0]), F32.value(x[1]));
        // The manual: 0 for a divisor above 2^126, NaN if the dividend is infinite as well.
        let huge = b.abs() > 2f64.powi(126) && b.is_finite();
        let q = if huge { a * 0f64.copysign(b) } else { a / b };
        vec![F32.of(q, Mode::Nearest)]
    });
    for wrong in ["sin.f32 r, r", "tanh.approx.ftz.f32 r, r", "ex2.approx.f64 d, d", "div.approx.f64 d, d, d"]
    {
        assert!(refused(wrong), "{wrong}");
    }
}

/// What is left over names itself.
#[test]
fn what_is_not_known_is_refused_by_name() {
    let error = |text: &str| form_of(text, NEWEST, &Options::default()).unwrap_err();
    assert!(error("add.foo.s32 r, r, r").contains(".foo"), "{}", error("add.foo.s32 r, r, r"));
    assert!(error("add.s32 r, r").contains("operands"));
    assert!(error("add.s32 d, r, r").contains("operand 1"));
    assert!(error("add.s32 r, p, r").contains("operand 2"));
    assert!(error("add.s32 5, r, r").contains("register"));
    let old = form_of("fma.rn.f32x2 d, d, d, d", 90, &Options::default()).unwrap_err();
    assert!(old.contains("10.0") && old.contains("9.0"), "{old}");
    for none in ["ld.global.b32 r, r", "bra r", "atom.add.u32 r, r", "frobnicate"] {
        let (i, f) = instruction(none);
        assert!(form(&i, &f, 90, &Options::default()).unwrap().is_none(), "{none}");
    }
}
