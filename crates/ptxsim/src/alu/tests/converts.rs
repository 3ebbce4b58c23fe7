//! `cvt` of every pair of types. Sources of 16 bits or fewer are tried in full.

use super::model::{BF16, E4M3, E5M2, F16, F32, F64, Fmt, MODES, Mode, TF32, edges};
use super::*;
use std::cmp::Ordering;

/// An integer type of `cvt`.
#[derive(Clone, Copy)]
struct Int {
    name: &'static str,
    bits: u32,
    signed: bool,
}

const INTS: [Int; 8] = [
    Int { name: "u8", bits: 8, signed: false },
    Int { name: "s8", bits: 8, signed: true },
    Int { name: "u16", bits: 16, signed: false },
    Int { name: "s16", bits: 16, signed: true },
    Int { name: "u32", bits: 32, signed: false },
    Int { name: "s32", bits: 32, signed: true },
    Int { name: "u64", bits: 64, signed: false },
    Int { name: "s64", bits: 64, signed: true },
];

const FLOATS: [(&str, Fmt); 4] = [("f16", F16), ("bf16", BF16), ("f32", F32), ("f64", F64)];

impl Int {
    fn value(self, bits: u64) -> i128 {
        let x = i128::from(bits) & ((1 << self.bits) - 1);
        if self.signed && x >> (self.bits - 1) != 0 { x - (1 << self.bits) } else { x }
    }
    fn min(self) -> i128 {
        if self.signed { -(1 << (self.bits - 1)) } else { 0 }
    }
    fn max(self) -> i128 {
        self.min() + (1 << self.bits) - 1
    }
}

/// Letters of registers that a type of this width fits into, and their bits.
fn registers(bits: u32) -> Vec<(&'static str, u32)> {
    [("b", 8), ("h", 16), ("r", 32), ("d", 64)].into_iter().filter(|r| r.1 >= bits).collect()
}

fn in_register(x: i128, bits: u32) -> u64 {
    (x & ((1 << bits) - 1)) as u64
}

fn letter(bits: u32) -> &'static str {
    registers(bits)[0].0
}

/// All values of 16 bits or fewer; edges and random ones above.
fn integers(bits: u32) -> Vec<Vec<u64>> {
    if bits <= 16 {
        // Bits above the type's do not count: set in every other one, as a wider register may have them.
        (0..1u64 << bits).map(|x| vec![x]).collect()
    } else {
        integer_tuples(1, bits)
    }
}

fn floats(f: Fmt) -> Vec<Vec<u64>> {
    if f.width <= 16 {
        return (0..1u64 << f.width).map(|x| vec![x]).collect();
    }
    let mut v = tuples(1, &edges(f), |r| r.next() >> (64 - f.width));
    let mut r = Random(8);
    // Integers, halves and what is next to them; the ends of every integer type; ties of the narrower formats.
    for i in 0..4000i64 {
        let x = (i - 2000) as f64 / 4.0;
        let near = if i % 3 == 0 { x.next_up() } else { x };
        v.push(vec![f.of(near, Mode::Nearest)]);
        let e = (r.next() % 70) as i32;
        let power = 2f64.powi(e) * if i % 2 == 0 { 1.0 } else { -1.0 };
        for x in [
            power,
            power - 0.5,
            power - 1.0,
            power + 0.5,
            power * (1.0 + 2f64.powi(-9)),
            power * (1.0 + 2f64.powi(-12)),
        ] {
            v.push(vec![f.of(x, Mode::Nearest)]);
        }
        let bits = r.next();
        let tie = f64::from_bits(
            (bits & 0xffff_f000_0000_0000 | 0x800_0000_0000) & !(0x7fe << 52) | ((1000 + bits % 40) << 52),
        );
        v.push(vec![f.of(tie, Mode::Zero)]);
        v.push(vec![f.of(f64::from(F16.value(bits >> 48) as f32) * (1.0 + 2f64.powi(-12)), Mode::Nearest)]);
    }
    v
}

fn flush(f: Fmt, bits: u64) -> u64 {
    let sign = 1u64 << (f.width - 1);
    if f == F32 && bits & (sign - 1) < 1 << f.fraction { bits & sign } else { bits }
}

fn saturate(f: Fmt, bits: u64) -> u64 {
    let x = f.value(bits);
    if x.is_nan() || x <= 0.0 { 0 } else { f.of(x.min(1.0), Mode::Nearest) }
}

#[test]
fn integers_to_integers() {
    for from in INTS {
        for to in INTS {
            for sat in [false, true] {
                for (d, width) in registers(to.bits) {
                    for (s, source_width) in registers(from.bits) {
                        let name = if sat { "cvt.sat" } else { "cvt" };
                        let mut inputs = integers(from.bits);
                        if inputs.len() > 3000 {
                            let step = if (width, source_width) == (to.bits, from.bits) { 1 } else { 37 };
                            inputs = inputs.into_iter().step_by(step).collect();
                        }
                        // Garbage above the type in a wider register.
                        if source_width > from.bits {
                            inputs.iter_mut().skip(1).step_by(2).for_each(|x| {
                                x[0] |=
                                    (0xdead_beef_dead_beef << from.bits) & (u64::MAX >> (64 - source_width));
                            });
                        }
                        check(&format!("{name}.{}.{} {d}, {s}", to.name, from.name), &inputs, |x| {
                            let v = from.value(x[0]);
                            let v = if sat {
                                v.clamp(to.min(), to.max())
                            } else {
                                to.value((v & ((1 << 64) - 1)) as u64)
                            };
                            vec![in_register(v, width)]
                        });
                    }
                }
            }
        }
    }
    for wrong in ["cvt.rn.u8.u32 h, r", "cvt.u64.u32 r, r", "cvt.ftz.u32.u64 r, d", "cvt.relu.s32.s64 r, d"] {
        assert!(refused(wrong), "{wrong}");
    }
}

#[test]
fn integers_to_floats() {
    for from in INTS {
        for (name, f) in FLOATS {
            for (mode_name, mode) in MODES {
                for sat in [false, true] {
                    let sats = if sat { ".sat" } else { "" };
                    let text = format!(
                        "cvt.{mode_name}{sats}.{name}.{} {}, {}",
                        from.name,
                        letter(f.width),
                        letter(from.bits)
                    );
                    check(&text, &integers(from.bits), |x| {
                        let v = from.value(x[0]);
                        if v == 0 {
                            return vec![0];
                        }
                        // f64 holds an integer of 64 bits only in part: the rest decides against f64's own.
                        let compare = |h: f64| {
                            let floor = h.floor();
                            if floor.abs() >= 2f64.powi(100) {
                                return if h > 0.0 { Ordering::Less } else { Ordering::Greater };
                            }
                            v.cmp(&(floor as i128)).then(if h > floor {
                                Ordering::Less
                            } else {
                                Ordering::Equal
                            })
                        };
                        let bits = if f == F64 && mode == Mode::Nearest {
                            (v as f64).to_bits()
                        } else {
                            f.round(compare, mode)
                        };
                        // Of the formats only f16 overflows; saturating, it does not matter.
                        vec![if sat { saturate(f, bits) } else { overflow(f, bits, v < 0, mode) }]
                    });
                }
            }
        }
    }
    assert!(refused("cvt.f32.s32 r, r") && refused("cvt.rni.f32.s32 r, r"));
}

/// `Fmt::round` gives infinity only where the mode rounds away: then nothing is left to do.
fn overflow(_: Fmt, bits: u64, _: bool, _: Mode) -> u64 {
    bits
}

fn to_integral(x: f64, mode: Mode) -> f64 {
    match mode {
        Mode::Nearest | Mode::Away => {
            let low = x.floor();
            let diff = x - low;
            let up = diff > 0.5 || diff == 0.5 && low % 2.0 != 0.0;
            if up { low + 1.0 } else { low }
        }
        Mode::Zero => x.trunc(),
        Mode::Down => x.floor(),
        Mode::Up => x.ceil(),
    }
}

const INTEGRAL: [(&str, Mode); 4] =
    [("rni", Mode::Nearest), ("rzi", Mode::Zero), ("rmi", Mode::Down), ("rpi", Mode::Up)];

#[test]
fn floats_to_integers() {
    for (name, f) in FLOATS {
        for to in INTS {
            for (mode_name, mode) in INTEGRAL {
                for ftz in [false, true] {
                    if ftz && f != F32 {
                        continue;
                    }
                    for (d, width) in registers(to.bits) {
                        if width > to.bits && mode != Mode::Zero {
                            continue;
                        }
                        let m = if ftz { ".ftz" } else { "" };
                        let text = format!("cvt.{mode_name}{m}.{}.{name} {d}, {}", to.name, letter(f.width));
                        check(&text, &floats(f), |x| {
                            let x = f.value(if ftz { flush(f, x[0]) } else { x[0] });
                            if x.is_nan() {
                                let high = f == F64 || to.bits == 64;
                                let v = to.value(if high { 1 << (to.bits - 1) } else { 0 });
                                return vec![in_register(v, width)];
                            }
                            let r = to_integral(x, mode);
                            let v = if r.is_infinite() || r.abs() > 1e30 {
                                if r > 0.0 { to.max() } else { to.min() }
                            } else {
                                (r as i128).clamp(to.min(), to.max())
                            };
                            vec![in_register(v, width)]
                        });
                    }
                }
            }
        }
    }
    assert!(refused("cvt.rn.s32.f32 r, r") && refused("cvt.rzi.ftz.s32.f64 r, d"));
}

#[test]
fn floats_to_floats() {
    for (from_name, from) in FLOATS {
        for (to_name, to) in FLOATS {
            let same = from == to;
            let modes: Vec<(&str, Option<Mode>)> = if same {
                INTEGRAL.iter().map(|&(n, m)| (n, Some(m))).chain([("", None)]).collect()
            } else {
                let loses = to.fraction < from.fraction || to.width == from.width;
                let brain = to == BF16 || from == BF16;
                let mixed = to.width == from.width;
                let rounded = MODES.iter().filter(|_| loses || brain).map(|&(n, m)| (n, Some(m)));
                rounded.chain((!loses || mixed).then_some(("", None))).collect()
            };
            for (mode_name, mode) in modes {
                for flags in 0..4 {
                    let (ftz, sat) = (flags & 1 != 0, flags & 2 != 0);
                    if ftz && from != F32 && to != F32 {
                        continue;
                    }
                    let dot = if mode_name.is_empty() { "" } else { "." };
                    let m = format!("{}{}", if ftz { ".ftz" } else { "" }, if sat { ".sat" } else { "" });
                    let text = format!(
                        "cvt{dot}{mode_name}{m}.{to_name}.{from_name} {}, {}",
                        letter(to.width),
                        letter(from.width)
                    );
                    check(&text, &floats(from), |x| {
                        let x = from.value(if ftz { flush(from, x[0]) } else { x[0] });
                        let bits = match mode {
                            Some(mode) if same => {
                                if x.is_finite() {
                                    let r = to_integral(x, mode);
                                    to.of(if r == 0.0 { 0f64.copysign(x) } else { r }, Mode::Nearest)
                                } else {
                                    to.special(x)
                                }
                            }
                            _ if from == F64 && to == F64 => {
                                if x.is_nan() {
                                    to.nan
                                } else {
                                    x.to_bits()
                                }
                            }
                            _ if to == F64 => {
                                if x.is_nan() {
                                    to.nan
                                } else {
                                    x.to_bits()
                                }
                            }
                            _ => to.of(x, mode.unwrap_or(Mode::Nearest)),
                        };
                        let bits = if ftz { flush(to, bits) } else { bits };
                        vec![if sat { saturate(to, bits) } else { bits }]
                    });
                }
            }
        }
    }
    for wrong in [
        "cvt.f32.f64 r, d",
        "cvt.f16.f32 h, r",
        "cvt.rn.f32.f32 r, r",
        "cvt.rni.f32.f16 r, h",
        "cvt.rn.f64.f32 d, r",
    ] {
        assert!(refused(wrong), "{wrong}");
    }
}

/// The flags of conversions to narrow formats. `.relu` turns what is negative into +0.
fn narrow(f: Fmt, x: f64, mode: Mode, relu: bool, satfinite: bool) -> u64 {
    let bits = f.of(x, mode);
    let sign = 1u64 << (f.width - 1);
    if relu && !x.is_nan() && bits & sign != 0 {
        return 0;
    }
    let magnitude = bits & (sign - 1);
    if satfinite && !x.is_nan() && magnitude > f.max { bits & sign | f.max } else { bits }
}

#[test]
fn f32_to_narrow_formats() {
    let inputs = floats(F32);
    let n = inputs.len();
    let pairs: Vec<Vec<u64>> = (0..n).map(|i| vec![inputs[i][0], inputs[(i * 17 + 3) % n][0]]).collect();
    for relu in [false, true] {
        for satfinite in [false, true] {
            let m =
                format!("{}{}", if relu { ".relu" } else { "" }, if satfinite { ".satfinite" } else { "" });
            for (mode_name, mode) in [("rn", Mode::Nearest), ("rz", Mode::Zero)] {
                for (name, f) in [("f16", F16), ("bf16", BF16)] {
                    let to = |x: u64| narrow(f, F32.value(x), mode, relu, satfinite);
                    check(&format!("cvt.{mode_name}{m}.{name}.f32 h, r"), &inputs, |x| vec![to(x[0])]);
                    check(&format!("cvt.{mode_name}{m}.{name}x2.f32 r, r, r"), &pairs, |x| {
                        vec![to(x[0]) << 16 | to(x[1])]
                    });
                }
                check(&format!("cvt.{mode_name}{m}.tf32.f32 r, r"), &inputs, |x| {
                    vec![tf32(x[0], mode, relu, satfinite)]
                });
            }
            if !relu {
                check(&format!("cvt.rna{m}.tf32.f32 r, r"), &inputs, |x| {
                    vec![tf32(x[0], Mode::Away, relu, satfinite)]
                });
            }
        }
        let m = if relu { ".relu" } else { "" };
        for (name, f) in [("e4m3x2", E4M3), ("e5m2x2", E5M2)] {
            let to = |x: f64| narrow(f, x, Mode::Nearest, relu, true);
            check(&format!("cvt.rn.satfinite{m}.{name}.f32 h, r, r"), &pairs, |x| {
                vec![to(F32.value(x[0])) << 8 | to(F32.value(x[1]))]
            });
            // All f16 values in both places, all bytes likewise.
            let halves: Vec<Vec<u64>> =
                (0..0x1_0000u64).map(|x| vec![x << 16 | (x * 31 + 5) & 0xffff]).collect();
            check(&format!("cvt.rn.satfinite{m}.{name}.f16x2 h, r"), &halves, |x| {
                vec![to(F16.value(x[0] >> 16)) << 8 | to(F16.value(x[0] & 0xffff))]
            });
            let bytes: Vec<Vec<u64>> = (0..0x1_0000u64).map(|x| vec![x]).collect();
            check(&format!("cvt.rn{m}.f16x2.{name} r, h"), &bytes, |x| {
                let half = |b: u64| {
                    let x = f.value(b);
                    if relu && x.is_sign_negative() && !x.is_nan() { 0 } else { F16.of(x, Mode::Nearest) }
                };
                vec![half(x[0] >> 8) << 16 | half(x[0] & 0xff)]
            });
        }
    }
    for wrong in [
        "cvt.rn.e4m3x2.f32 h, r, r",
        "cvt.rz.satfinite.e4m3x2.f32 h, r, r",
        "cvt.f16x2.f32 r, r, r",
        "cvt.rm.f16x2.f32 r, r, r",
        "cvt.rs.f16x2.f32 r, r, r, r",
        "cvt.rna.f16.f32 h, r",
        "cvt.rna.relu.tf32.f32 r, r",
    ] {
        assert!(refused(wrong), "{wrong}");
    }
    assert!(form_of("cvt.rn.satfinite.e4m3x2.f32 h, r, r", 86, &Options::default()).is_err());
}

fn tf32(x: u64, mode: Mode, relu: bool, satfinite: bool) -> u64 {
    let x = F32.value(x);
    if x.is_nan() { F32.nan } else { narrow(TF32, x, mode, relu, satfinite) << 13 }
}

#[test]
fn packing() {
    for (name, bits, signed) in [
        ("u2", 2, false),
        ("s2", 2, true),
        ("u4", 4, false),
        ("s4", 4, true),
        ("u8", 8, false),
        ("s8", 8, true),
        ("u16", 16, false),
        ("s16", 16, true),
    ] {
        let t = Int { name: "", bits, signed };
        let clamp = |x: u64| in_register(i128::from(x as u32 as i32).clamp(t.min(), t.max()), bits);
        if bits == 16 {
            check(&format!("cvt.pack.sat.{name}.s32 r, r, r"), &integer_tuples(2, 32), |x| {
                vec![clamp(x[0]) << 16 | clamp(x[1])]
            });
        } else {
            check(&format!("cvt.pack.sat.{name}.s32.b32 r, r, r, r"), &integer_tuples(3, 32), |x| {
                vec![(x[2] << (2 * bits) | clamp(x[0]) << bits | clamp(x[1])) & 0xffff_ffff]
            });
        }
    }
}
