//! `cvt` of packed formats, tf32, and `cvt.pack`. The first source goes to the upper part.

use super::convert::{Asked, constants, narrow};
use super::float32::canonical;
use super::fp8::{E4M3, E5M2, Eight};
use super::half::{Binary16, Brain16, Half};
use super::parse::{Parse, flag};
use super::soft::{self, Round};
use crate::exec::regs::Form;
use crate::ptx::ast::Type;

/// `None` if the types are of another kind.
pub(crate) fn form(p: &Parse<'_>, to: Type, from: Type, asked: Asked) -> Result<Option<Form>, String> {
    match (to, from) {
        (Type::F16x2 | Type::BF16x2, Type::F32) => halves(p, to, asked),
        (Type::E4M3x2 | Type::E5M2x2, Type::F32) => eights(p, to, asked),
        (Type::E4M3x2 | Type::E5M2x2, Type::F16x2) => eights_of_halves(p, to, asked),
        (Type::F16x2, Type::E4M3x2 | Type::E5M2x2) => halves_of_eights(p, from, asked),
        (Type::TF32, Type::F32) => tf32(p, asked),
        _ => return Ok(None),
    }
    .map(Some)
}

fn halves(p: &Parse<'_>, to: Type, asked: Asked) -> Result<Form, String> {
    let isa = p.isa;
    p.need(80)?;
    let fits = matches!(asked.mode, Some(Round::Nearest | Round::Zero)) && !asked.integral;
    if !fits || asked.ftz || asked.sat {
        return Err(p.unknown());
    }
    let m = constants(asked);
    Ok(match (to == Type::F16x2, m) {
        (true, 0) => isa.map2(|a, b| u32::from(Binary16::narrow(a)) << 16 | u32::from(Binary16::narrow(b))),
        (false, 0) => isa.map2(|a, b| u32::from(Brain16::narrow(a)) << 16 | u32::from(Brain16::narrow(b))),
        (true, _) => {
            isa.map2_imm(m, |m, a, b| u32::from(narrow(m, a, true)) << 16 | u32::from(narrow(m, b, true)))
        }
        (false, _) => {
            isa.map2_imm(m, |m, a, b| u32::from(narrow(m, a, false)) << 16 | u32::from(narrow(m, b, false)))
        }
    })
}

/// `.relu` on an input does what it does on the result, as zero is exact; NaN passes.
#[inline(always)]
fn relu(m: u64, x: f32) -> f32 {
    if m != 0 && x <= 0.0 { 0.0 } else { x }
}

fn eights(p: &Parse<'_>, to: Type, asked: Asked) -> Result<Form, String> {
    fn join<T: Eight>(m: u64, a: f32, b: f32) -> u16 {
        (T::encode(relu(m, a)) << 8 | T::encode(relu(m, b))) as u16
    }
    let isa = p.isa;
    eight_flags(p, asked, true)?;
    let m = u64::from(asked.relu);
    Ok(if to == Type::E4M3x2 { isa.map2_imm(m, join::<E4M3>) } else { isa.map2_imm(m, join::<E5M2>) })
}

fn eights_of_halves(p: &Parse<'_>, to: Type, asked: Asked) -> Result<Form, String> {
    fn join<T: Eight>(m: u64, a: u32) -> u16 {
        let part = |h: u32| T::encode(relu(m, Binary16::widen(h as u16)));
        (part(a >> 16) << 8 | part(a)) as u16
    }
    let isa = p.isa;
    eight_flags(p, asked, true)?;
    let m = u64::from(asked.relu);
    Ok(if to == Type::E4M3x2 { isa.map1_imm(m, join::<E4M3>) } else { isa.map1_imm(m, join::<E5M2>) })
}

fn halves_of_eights(p: &Parse<'_>, from: Type, asked: Asked) -> Result<Form, String> {
    fn split<T: Eight>(m: u64, a: u16) -> u32 {
        let part = |byte: u32| {
            let h = T::decode(byte);
            if m != 0 && h & 0x8000 != 0 { 0 } else { h }
        };
        part(a.into()) | part(u32::from(a) >> 8) << 16
    }
    let isa = p.isa;
    eight_flags(p, asked, false)?;
    let m = u64::from(asked.relu);
    Ok(if from == Type::E4M3x2 { isa.map1_imm(m, split::<E4M3>) } else { isa.map1_imm(m, split::<E5M2>) })
}

fn eight_flags(p: &Parse<'_>, asked: Asked, satfinite: bool) -> Result<(), String> {
    p.need(89)?;
    let nearest = asked.mode == Some(Round::Nearest) && !asked.integral;
    if nearest && !asked.ftz && !asked.sat && asked.satfinite == satfinite {
        return Ok(());
    }
    Err(p.unknown())
}

/// tf32 is an f32 whose low 13 bits are zero.
fn tf32(p: &Parse<'_>, asked: Asked) -> Result<Form, String> {
    const RELU: u64 = 8;
    const SATFINITE: u64 = 16;
    let isa = p.once;
    p.need(80)?;
    let mode = match asked.mode {
        Some(mode @ (Round::Nearest | Round::Zero | Round::Away)) if !asked.integral => mode,
        _ => return Err(p.unknown()),
    };
    if asked.ftz || asked.sat || mode == Round::Away && asked.relu {
        return Err(p.unknown());
    }
    if mode != Round::Away {
        p.need(90)?;
    }
    let m = mode as u64 | flag(asked.relu, RELU) | flag(asked.satfinite, SATFINITE);
    if m == Round::Away as u64 {
        return Ok(isa.map1(|a: f32| {
            let bits = a.to_bits().wrapping_add(0x1000) & !0x1fff;
            if a.is_nan() { canonical(a) } else { f32::from_bits(bits) }
        }));
    }
    Ok(isa.map1_imm(m, |m, a: f32| {
        if a.is_nan() {
            return canonical(a);
        }
        let bits = (soft::from_f64(f64::from(a), soft::TF32, Round::of(m)) << 13) as u32;
        let x = f32::from_bits(bits);
        let max = f32::from_bits((soft::TF32.max << 13) as u32);
        let x = if m & SATFINITE != 0 && x.is_infinite() { max.copysign(x) } else { x };
        if m & RELU != 0 && x.is_sign_negative() { 0.0 } else { x }
    }))
}

/// Integer types of `cvt.pack`: bits, and whether they have a sign.
const PACKED: [(&str, (u32, bool)); 8] = [
    ("u2", (2, false)),
    ("s2", (2, true)),
    ("u4", (4, false)),
    ("s4", (4, true)),
    ("u8", (8, false)),
    ("s8", (8, true)),
    ("u16", (16, false)),
    ("s16", (16, true)),
];

/// `d = sat(a):sat(b)`, below the low bits of c for types narrower than 16 bits.
pub(crate) fn pack(p: &mut Parse<'_>) -> Result<Form, String> {
    fn clamp(m: u64, x: i32) -> u32 {
        let bits = m & 31;
        let (low, high) =
            if m & 32 != 0 { (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) } else { (0, (1 << bits) - 1) };
        x.clamp(low, high) as u32 & ((1 << bits) - 1)
    }
    let isa = p.once;
    if !p.take("sat") {
        return Err(p.unknown());
    }
    let (bits, signed) = p.pick(&PACKED).ok_or_else(|| p.unknown())?;
    if p.ty()? != Type::S32 {
        return Err(p.unknown());
    }
    let m = u64::from(bits) | u64::from(signed) << 5;
    if bits == 16 {
        return Ok(isa.map2_imm(m, |m, a, b| clamp(m, a) << 16 | clamp(m, b)));
    }
    if p.ty()? != Type::B32 {
        return Err(p.unknown());
    }
    Ok(isa.map3_imm(m, |m, a, b, c: u32| {
        let bits = m & 31;
        c << (2 * bits) | clamp(m, a) << bits | clamp(m, b)
    }))
}
