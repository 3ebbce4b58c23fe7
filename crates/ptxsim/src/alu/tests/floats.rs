//! f32, f64, f16 and bf16 arithmetic.

use super::model::{self, BF16, F16, F32, F64, Fmt, MODES, Mode, edges, product};
use super::*;
use std::cmp::Ordering;

/// Inputs of a format: edges, random bits, and random numbers near each other.
fn inputs(f: Fmt, arity: usize) -> Vec<Vec<u64>> {
    let one = f.special_one();
    tuples(arity, &edges(f), move |r| {
        let bits = r.next() >> (64 - f.width);
        if r.next() % 2 == 0 { bits } else { one + (bits & ((1 << (f.fraction + 2)) - 1)) }
    })
}

impl Fmt {
    fn special_one(self) -> u64 {
        self.of(1.0, Mode::Nearest)
    }

    /// Subnormals to zero.
    fn flush(self, bits: u64) -> u64 {
        let sign = 1 << (self.width - 1);
        if bits & (sign - 1) < 1 << self.fraction { bits & sign } else { bits }
    }

    fn saturate(self, bits: u64) -> u64 {
        let x = self.value(bits);
        if x.is_nan() || x <= 0.0 {
            0
        } else if x >= 1.0 {
            self.special_one()
        } else {
            bits
        }
    }
}

/// The exact result of a fused operation on numbers of at most 24 bits.
fn fused(f: Fmt, v: &[f64], mode: Mode) -> u64 {
    let finite = v.iter().all(|x| x.is_finite());
    match v {
        [a, b] => f.sum(&[*a, *b], mode),
        // -0 and +0 products keep their sign in a sum of zeros.
        [a, b, c] if finite => f.sum(&[a * b, *c], mode),
        [a, b, c] => f.special(a * b + c),
        _ => unreachable!(),
    }
}

#[test]
fn f32_in_every_mode() {
    for (name, mode) in MODES {
        for ftz in [false, true] {
            for sat in [false, true] {
                let mods =
                    format!(".{name}{}{}", if ftz { ".ftz" } else { "" }, if sat { ".sat" } else { "" });
                let run = |text: String, arity: usize, f: &dyn Fn(&[f64]) -> u64| {
                    check(&text, &inputs(F32, arity), |x| {
                        let v: Vec<_> =
                            x.iter().map(|&b| F32.value(if ftz { F32.flush(b) } else { b })).collect();
                        let bits = f(&v);
                        let bits = if ftz { F32.flush(bits) } else { bits };
                        vec![if sat { F32.saturate(bits) } else { bits }]
                    });
                };
                run(format!("add{mods}.f32 r, r, r"), 2, &|v| fused(F32, v, mode));
                run(format!("sub{mods}.f32 r, r, r"), 2, &|v| fused(F32, &[v[0], -v[1]], mode));
                run(format!("mul{mods}.f32 r, r, r"), 2, &|v| {
                    if v[0].is_finite() && v[1].is_finite() {
                        F32.of(v[0] * v[1], mode)
                    } else {
                        F32.special(v[0] * v[1])
                    }
                });
                run(format!("fma{mods}.f32 r, r, r, r"), 3, &|v| fused(F32, v, mode));
                if !sat {
                    run(format!("div{mods}.f32 r, r, r"), 2, &|v| quotient(v[0], v[1], mode));
                    run(format!("rcp{mods}.f32 r, r"), 1, &|v| quotient(1.0, v[0], mode));
                    run(format!("sqrt{mods}.f32 r, r"), 1, &|v| root(v[0], mode));
                }
            }
        }
    }
    for (a, b) in [("add", "add.rn"), ("sub", "sub.rn"), ("mul", "mul.rn"), ("mad.rn", "fma.rn")] {
        let n = if a.starts_with("mad") { "r, r, r, r" } else { "r, r, r" };
        let (mut a, mut b) = (
            Machine::new(&format!("{a}.f32 {n}"), &isas()[0]),
            Machine::new(&format!("{b}.f32 {n}"), &isas()[0]),
        );
        for m in [&mut a, &mut b] {
            (0..m.sources.len()).for_each(|i| m.set(i, &[0x3f80_0001 + i as u64; LANES]));
            m.run(Mask::MAX).unwrap();
        }
        assert_eq!(a.get(0), b.get(0));
    }
    for wrong in ["fma.f32 r, r, r, r", "add.rn.rz.f32 r, r, r", "div.f32 r, r, r", "add.rni.f32 r, r, r"] {
        assert!(refused(wrong), "{wrong}");
    }
}

fn quotient(a: f64, b: f64, mode: Mode) -> u64 {
    let q = a / b;
    if q.is_nan() || !a.is_finite() || !b.is_finite() || a == 0.0 || b == 0.0 {
        return F32.special(q);
    }
    // a / b against h is a against h b, turned round if b is negative; h b is exact.
    F32.round(
        |h| {
            let o = a.partial_cmp(&(h * b)).unwrap();
            if b < 0.0 { o.reverse() } else { o }
        },
        mode,
    )
}

fn root(a: f64, mode: Mode) -> u64 {
    if !(a.is_finite() && a > 0.0) {
        return F32.special(a.sqrt());
    }
    F32.round(|h| if h < 0.0 { Ordering::Greater } else { a.partial_cmp(&(h * h)).unwrap() }, mode)
}

/// f64 inputs whose products and remainders stay in range.
fn doubles(arity: usize) -> Vec<Vec<u64>> {
    let middle = |bits: u64| {
        let e = bits >> 52 & 0x7ff;
        e == 0 && bits << 1 == 0 || (600..1450).contains(&e)
    };
    let mut v = inputs(F64, arity);
    let mut r = Random(9);
    for x in &mut v {
        for bits in x.iter_mut().filter(|b| !middle(**b)) {
            *bits = *bits & !(0x7ff << 52) | (1000 + r.next() % 40) << 52;
        }
    }
    v
}

#[test]
fn f64_in_every_mode() {
    for (name, mode) in MODES {
        let v = |x: &[u64]| x.iter().map(|&b| f64::from_bits(b)).collect::<Vec<_>>();
        // The search cannot halve between two f64; the CPU's own result stands for the nearest.
        let pick = |terms: &[f64], nearest: f64| {
            vec![if mode == Mode::Nearest { nearest.to_bits() } else { F64.sum(terms, mode) }]
        };
        check(&format!("add.{name}.f64 d, d, d"), &doubles(2), |x| {
            let v = v(x);
            pick(&v, v[0] + v[1])
        });
        check(&format!("sub.{name}.f64 d, d, d"), &doubles(2), |x| {
            let v = v(x);
            pick(&[v[0], -v[1]], v[0] - v[1])
        });
        check(&format!("mul.{name}.f64 d, d, d"), &doubles(2), |x| {
            let v = v(x);
            if v[0] == 0.0 || v[1] == 0.0 {
                vec![(v[0] * v[1]).to_bits()]
            } else {
                pick(&product(v[0], v[1]), v[0] * v[1])
            }
        });
        check(&format!("fma.{name}.f64 d, d, d, d"), &doubles(3), |x| {
            let v = v(x);
            let [p, e] = product(v[0], v[1]);
            let terms = if e == 0.0 { vec![p, v[2]] } else { vec![p, e, v[2]] };
            pick(&terms, v[0].mul_add(v[1], v[2]))
        });
        let quotient = |a: f64, b: f64| {
            if a == 0.0 || b == 0.0 {
                return vec![F64.special(a / b)];
            }
            if mode == Mode::Nearest {
                return vec![(a / b).to_bits()];
            }
            let against = |h: f64| {
                let [p, e] = product(-h, b);
                let o = model::order(&[a, p, e], 0.0);
                if b < 0.0 { o.reverse() } else { o }
            };
            // Far from the quotient h b leaves the range, but there the f64 quotient decides as well.
            let near = |h: f64| (h / (a / b) - 1.0).abs() < 0.5;
            vec![F64.round(|h| if near(h) { against(h) } else { (a / b).partial_cmp(&h).unwrap() }, mode)]
        };
        check(&format!("div.{name}.f64 d, d, d"), &doubles(2), |x| {
            quotient(f64::from_bits(x[0]), f64::from_bits(x[1]))
        });
        check(&format!("rcp.{name}.f64 d, d"), &doubles(1), |x| quotient(1.0, f64::from_bits(x[0])));
        check(&format!("sqrt.{name}.f64 d, d"), &doubles(1), |x| {
            let a = f64::from_bits(x[0]);
            if a <= 0.0 {
                return vec![F64.special(a.sqrt())];
            }
            if mode == Mode::Nearest {
                return vec![a.sqrt().to_bits()];
            }
            let near = |h: f64| (h / a.sqrt() - 1.0).abs() < 0.5;
            let against = |h: f64| {
                let [p, e] = product(-h, h);
                model::order(&[a, p, e], 0.0)
            };
            vec![F64.round(|h| if near(h) { against(h) } else { a.sqrt().partial_cmp(&h).unwrap() }, mode)]
        });
    }
}

/// Overflow, underflow and specials of f64, where the sum above is not exact: results by hand.
#[test]
fn f64_at_the_ends_of_its_range() {
    let (max, tiny, small) = (f64::MAX, f64::from_bits(1), f64::MIN_POSITIVE);
    let inf = f64::INFINITY;
    // a, b, and their product rounded to nearest, zero, down, up.
    let products = [
        (max, 2.0, [inf, max, max, inf]),
        (-max, 2.0, [-inf, -max, -inf, -max]),
        (tiny, 0.5, [0.0, 0.0, 0.0, tiny]),
        (-tiny, 0.5, [-0.0, -0.0, -tiny, -0.0]),
        (tiny, 1.5, [2.0 * tiny, tiny, tiny, 2.0 * tiny]),
        (small, small, [0.0, 0.0, 0.0, tiny]),
        (small.next_up(), 0.5, [small / 2.0, small / 2.0, small / 2.0, small / 2.0 + tiny]),
        (inf, -2.0, [-inf; 4]),
    ];
    for (a, b, want) in products {
        for ((name, _), want) in MODES.iter().zip(want) {
            check(&format!("mul.{name}.f64 d, d, d"), &[vec![a.to_bits(), b.to_bits()]], |_| {
                vec![want.to_bits()]
            });
            if want != 0.0 || a.abs() == small {
                let x = vec![a.to_bits(), b.to_bits(), 0f64.copysign(a * b).to_bits()];
                check(&format!("fma.{name}.f64 d, d, d, d"), &[x], |_| vec![want.to_bits()]);
            }
        }
    }
    let nan = vec![F64.nan];
    let bits = |v: &[f64]| vec![v.iter().map(|x| x.to_bits()).collect::<Vec<_>>()];
    for (name, _) in MODES {
        check(&format!("add.{name}.f64 d, d, d"), &bits(&[inf, -inf]), |_| nan.clone());
        check(&format!("fma.{name}.f64 d, d, d, d"), &bits(&[inf, 0.0, 1.0]), |_| nan.clone());
        check(&format!("fma.{name}.f64 d, d, d, d"), &bits(&[max, max, -inf]), |_| vec![(-inf).to_bits()]);
        check(&format!("div.{name}.f64 d, d, d"), &bits(&[0.0, 0.0]), |_| nan.clone());
        check(&format!("sqrt.{name}.f64 d, d"), &bits(&[-1.0]), |_| nan.clone());
    }
}

/// `min` or `max` as the manual's listing has it.
fn listing(f: Fmt, max: bool, nan: bool, xorsign: bool, a: u64, b: u64) -> u64 {
    let sign = 1u64 << (f.width - 1);
    let turned = (a ^ b) & sign;
    let (a, b) = if xorsign { (a & !sign, b & !sign) } else { (a, b) };
    let (x, y) = (f.value(a), f.value(b));
    if x.is_nan() && y.is_nan() || nan && (x.is_nan() || y.is_nan()) {
        return f.nan;
    }
    let d = if x.is_nan() {
        b
    } else if y.is_nan() {
        a
    } else if x == y {
        // Only zeros differ in sign alone: -0 is the smaller one.
        if (a & sign != 0) != max { a } else { b }
    } else if (x < y) != max {
        a
    } else {
        b
    };
    if xorsign { d | turned } else { d }
}

#[test]
fn extremes() {
    for (op, max) in [("min", false), ("max", true)] {
        for nan in [false, true] {
            for xorsign in [false, true] {
                for ftz in [false, true] {
                    let mods = format!(
                        "{}{}{}",
                        if ftz { ".ftz" } else { "" },
                        if nan { ".NaN" } else { "" },
                        if xorsign { ".xorsign.abs" } else { "" }
                    );
                    for (ty, f, l) in [("f32", F32, 'r'), ("f16", F16, 'h'), ("bf16", BF16, 'h')] {
                        if f == BF16 && ftz {
                            continue;
                        }
                        let flush = |x| if ftz { f.flush(x) } else { x };
                        check(&format!("{op}{mods}.{ty} {l}, {l}, {l}"), &inputs(f, 2), |x| {
                            vec![listing(f, max, nan, xorsign, flush(x[0]), flush(x[1]))]
                        });
                        if f != F32 {
                            check(&format!("{op}{mods}.{ty}x2 r, r, r"), &packed(f, 2), |x| {
                                pairwise(x, |v| listing(f, max, nan, xorsign, flush(v[0]), flush(v[1])))
                            });
                        }
                    }
                    if !xorsign {
                        check(&format!("{op}{mods}.f32 r, r, r, r"), &inputs(F32, 3), |x| {
                            let x: Vec<_> = x.iter().map(|&b| if ftz { F32.flush(b) } else { b }).collect();
                            let two = listing(F32, max, nan, false, x[0], x[1]);
                            vec![listing(F32, max, nan, false, two, x[2])]
                        });
                    }
                }
            }
        }
        check(&format!("{op}.f64 d, d, d"), &inputs(F64, 2), |x| {
            vec![listing(F64, max, false, false, x[0], x[1])]
        });
    }
    assert!(refused("min.xorsign.f32 r, r, r") && refused("min.ftz.bf16 h, h, h"));
}

/// Two halves in each register.
fn packed(f: Fmt, arity: usize) -> Vec<Vec<u64>> {
    let v = inputs(f, arity);
    let n = v.len();
    (0..n)
        .map(|i| v[i].iter().zip(&v[(i * 31 + 7) % n]).map(|(low, high)| low | high << 16).collect())
        .collect()
}

fn pairwise(x: &[u64], f: impl Fn(&[u64]) -> u64) -> Vec<u64> {
    let half = |at: u32| f(&x.iter().map(|v| v >> at & 0xffff).collect::<Vec<_>>());
    vec![half(0) | half(16) << 16]
}

/// A product of halves and a sum of it are exact in two f64.
#[test]
fn halves() {
    for (ty, f) in [("f16", F16), ("bf16", BF16)] {
        for flag in ["", ".ftz", ".sat", ".ftz.sat", ".relu", ".ftz.relu"] {
            let (ftz, sat, relu) = (flag.contains("ftz"), flag.contains("sat"), flag.contains("relu"));
            if f == BF16 && (ftz || sat) {
                continue;
            }
            let finish = |bits: u64| {
                let bits = if ftz { f.flush(bits) } else { bits };
                let bits = if sat { f.saturate(bits) } else { bits };
                if relu && bits >> 15 != 0 { 0 } else { bits }
            };
            let values = |x: &[u64]| -> Vec<f64> {
                x.iter().map(|&b| f.value(if ftz { f.flush(b) } else { b })).collect()
            };
            type Case<'a> = (&'a str, usize, &'a dyn Fn(&[f64]) -> u64);
            let ops: [Case<'_>; 4] = [
                ("add", 2, &|v| fused(f, v, Mode::Nearest)),
                ("sub", 2, &|v| fused(f, &[v[0], -v[1]], Mode::Nearest)),
                ("mul", 2, &|v| {
                    if v[0].is_finite() && v[1].is_finite() {
                        f.of(v[0] * v[1], Mode::Nearest)
                    } else {
                        f.special(v[0] * v[1])
                    }
                }),
                ("fma", 3, &|v| fused(f, v, Mode::Nearest)),
            ];
            for (op, n, model) in ops {
                if relu && op != "fma" {
                    continue;
                }
                let (h, r) = (["h, h, h", "h, h, h, h"][n - 2], ["r, r, r", "r, r, r, r"][n - 2]);
                check(&format!("{op}.rn{flag}.{ty} {h}"), &inputs(f, n), |x| vec![finish(model(&values(x)))]);
                check(&format!("{op}.rn{flag}.{ty}x2 {r}"), &packed(f, n), |x| {
                    pairwise(x, |x| finish(model(&values(x))))
                });
            }
        }
    }
}

/// All 65536 inputs.
#[test]
fn unary_halves() {
    let all: Vec<Vec<u64>> = (0..0x1_0000).map(|x| vec![x]).collect();
    let pairs: Vec<Vec<u64>> = (0..0x1_0000u64).map(|x| vec![x | (x ^ 0x5a5a) << 16]).collect();
    // The value in f64 is within an ulp of it of the truth: where that could tip the rounding, either side will do.
    let near = |f: Fmt, got: u64, x: f64| {
        let want = f.of(x, Mode::Nearest);
        got == want
            || (f.of(x.next_up(), Mode::Nearest) == got)
            || (f.of(x.next_down(), Mode::Nearest) == got)
    };
    for (ty, f) in [("f16", F16), ("bf16", BF16)] {
        for ftz in if f == F16 { &[false, true][..] } else { &[false] } {
            let m = if *ftz { ".ftz" } else { "" };
            let flush = |x: u64| if *ftz { f.flush(x) } else { x };
            check(&format!("abs{m}.{ty} h, h"), &all, |x| vec![flush(x[0]) & 0x7fff]);
            check(&format!("neg{m}.{ty} h, h"), &all, |x| vec![flush(x[0]) ^ 0x8000]);
            check(&format!("abs{m}.{ty}x2 r, r"), &pairs, |x| pairwise(x, |x| flush(x[0]) & 0x7fff));
            check(&format!("neg{m}.{ty}x2 r, r"), &pairs, |x| pairwise(x, |x| flush(x[0]) ^ 0x8000));
        }
        let brain = f == BF16;
        let flush = |x: u64| if brain { f.flush(x) } else { x };
        let ex2 = format!("ex2.approx{}.{ty}", if brain { ".ftz" } else { "" });
        let power = |x: u64| f.value(flush(x)).exp2();
        let tanh = |x: u64| f.value(x).tanh();
        let as_bits = |x: f64| vec![x.to_bits()];
        check_with(
            &format!("{ex2} h, h"),
            &all,
            |x| as_bits(power(x[0])),
            |_, got, want| {
                let x = f64::from_bits(want);
                flush(got) == got && (near(f, got, x) || got == flush(f.of(x, Mode::Nearest)))
            },
        );
        check_with(
            &format!("tanh.approx.{ty} h, h"),
            &all,
            |x| as_bits(tanh(x[0])),
            |_, got, want| near(f, got, f64::from_bits(want)),
        );
        check(&format!("tanh.approx.{ty}x2 r, r"), &pairs, |x| {
            pairwise(x, |x| f.of(tanh(x[0]), Mode::Nearest))
        });
    }
}

#[test]
fn signs_and_kinds() {
    for (ty, f, l) in [("f32", F32, 'r'), ("f64", F64, 'd')] {
        let sign = 1u64 << (f.width - 1);
        check(&format!("abs.{ty} {l}, {l}"), &inputs(f, 1), |x| vec![x[0] & !sign]);
        check(&format!("neg.{ty} {l}, {l}"), &inputs(f, 1), |x| vec![x[0] ^ sign]);
        check(&format!("copysign.{ty} {l}, {l}, {l}"), &inputs(f, 2), |x| vec![x[1] & !sign | x[0] & sign]);
        let magnitude = |x: u64| x & !sign;
        let infinity = f.above;
        let kinds: [(&str, &dyn Fn(u64) -> bool); 6] = [
            ("finite", &|x| magnitude(x) < infinity),
            ("infinite", &|x| magnitude(x) == infinity),
            ("number", &|x| magnitude(x) <= infinity),
            ("notanumber", &|x| magnitude(x) > infinity),
            ("normal", &|x| magnitude(x) == 0 || (1 << f.fraction..infinity).contains(&magnitude(x))),
            ("subnormal", &|x| (1..1 << f.fraction).contains(&magnitude(x))),
        ];
        for (kind, test) in kinds {
            check(&format!("testp.{kind}.{ty} p, {l}"), &inputs(f, 1), |x| vec![u64::from(test(x[0]))]);
        }
    }
    check("abs.ftz.f32 r, r", &inputs(F32, 1), |x| vec![F32.flush(x[0]) & 0x7fff_ffff]);
    check("neg.ftz.f32 r, r", &inputs(F32, 1), |x| vec![F32.flush(x[0]) ^ 0x8000_0000]);
}

/// Pairs of f32 do what single ones do.
#[test]
fn pairs_of_f32() {
    let join = |v: &[Vec<u64>]| -> Vec<Vec<u64>> {
        (0..v.len())
            .map(|i| {
                v[i].iter().zip(&v[(i * 31 + 7) % v.len()]).map(|(low, high)| low | high << 32).collect()
            })
            .collect()
    };
    for (name, mode) in MODES {
        let each = |x: &[u64], f: &dyn Fn(&[f64]) -> u64| {
            let part = |at: u32| f(&x.iter().map(|v| F32.value(v >> at & 0xffff_ffff)).collect::<Vec<_>>());
            vec![part(0) | part(32) << 32]
        };
        let (two, three) = (join(&inputs(F32, 2)), join(&inputs(F32, 3)));
        check(&format!("add.{name}.f32x2 d, d, d"), &two, |x| each(x, &|v| fused(F32, v, mode)));
        check(&format!("sub.{name}.f32x2 d, d, d"), &two, |x| each(x, &|v| fused(F32, &[v[0], -v[1]], mode)));
        check(&format!("fma.{name}.f32x2 d, d, d, d"), &three, |x| each(x, &|v| fused(F32, v, mode)));
        check(&format!("mul.{name}.f32x2 d, d, d"), &two, |x| {
            each(x, &|v| {
                if v.iter().all(|x| x.is_finite()) {
                    F32.of(v[0] * v[1], mode)
                } else {
                    F32.special(v[0] * v[1])
                }
            })
        });
    }
}
