//! `cvt` between numbers. Packed formats are in `convert_packed`.
//!
//! A register may be wider than the type: integers are extended into it by the sign of their type.

use super::float32::{canonical, finished, flush, rounding};
use super::half::{Binary16, Brain16, Half};
use super::lanes::{BF16, F16, Lane, by_type};
use super::parse::{Parse, bits_of, file_of, flag};
use super::soft::{self, Exact, Format, Round};
use crate::exec::regs::{File, Form};
use crate::ptx::ast::{Operand, Type};
use crate::stats::Class;

pub(crate) fn form(p: &mut Parse<'_>) -> Result<Form, String> {
    let form = if p.take("pack") { super::convert_packed::pack(p) } else { cvt(p) }?;
    Ok(Form { class: Class::Convert, ..form })
}

/// Rounding modes: to a number, and to an integer.
const ROUNDINGS: [(&str, (Round, bool)); 9] = [
    ("rn", (Round::Nearest, false)),
    ("rz", (Round::Zero, false)),
    ("rm", (Round::Down, false)),
    ("rp", (Round::Up, false)),
    ("rna", (Round::Away, false)),
    ("rni", (Round::Nearest, true)),
    ("rzi", (Round::Zero, true)),
    ("rmi", (Round::Down, true)),
    ("rpi", (Round::Up, true)),
];

/// What `cvt` asks for besides its types.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    pub(crate) mode: Option<Round>,
    /// The mode is one of integer rounding.
    pub(crate) integral: bool,
    pub(crate) ftz: bool,
    pub(crate) sat: bool,
    pub(crate) relu: bool,
    pub(crate) satfinite: bool,
}

// Constants of a conversion: the low bits as `float32::rounding` makes them, and these.
const INTEGRAL: u64 = 1 << 10;
const RELU: u64 = 1 << 11;
const SATFINITE: u64 = 1 << 12;
/// Bits of the destination integer type (7 bits), its sign, and bits of its register (7 bits).
const TO: u32 = 16;
/// Bits of the source integer type and its sign.
const FROM: u32 = 32;

impl Asked {
    fn imm(self) -> u64 {
        rounding(self.mode.unwrap_or(Round::Nearest), self.ftz, self.sat)
            | flag(self.integral, INTEGRAL)
            | flag(self.relu, RELU)
            | flag(self.satfinite, SATFINITE)
    }
}

/// Whether a type is an integer of `cvt`, and its sign.
fn integer(ty: Type) -> Option<bool> {
    match ty {
        Type::U8 | Type::U16 | Type::U32 | Type::U64 => Some(false),
        Type::S8 | Type::S16 | Type::S32 | Type::S64 => Some(true),
        _ => None,
    }
}

/// Significand bits of a floating type, to tell conversions that lose something.
fn precision(ty: Type) -> Option<u32> {
    Some(match ty {
        Type::BF16 => 8,
        Type::F16 => 11,
        Type::F32 => 24,
        Type::F64 => 53,
        _ => return None,
    })
}

fn cvt(p: &mut Parse<'_>) -> Result<Form, String> {
    let rounding = p.pick(&ROUNDINGS);
    let asked = Asked {
        mode: rounding.map(|r| r.0),
        integral: rounding.is_some_and(|r| r.1),
        ftz: p.take("ftz"),
        sat: p.take("sat"),
        relu: p.take("relu"),
        satfinite: p.take("satfinite"),
    };
    let (to, from) = (p.ty()?, p.ty()?);
    if let Some(form) = super::convert_packed::form(p, to, from, asked)? {
        return Ok(form);
    }
    if asked.mode == Some(Round::Away) {
        return Err(p.unknown());
    }
    if (asked.relu || asked.satfinite) && !(from == Type::F32 && matches!(to, Type::F16 | Type::BF16)) {
        return Err(p.unknown());
    }
    if asked.relu || asked.satfinite {
        p.need(80)?;
        if !matches!(asked.mode, Some(Round::Nearest | Round::Zero))
            || asked.integral
            || asked.sat
            || asked.ftz
        {
            return Err(p.unknown());
        }
    }
    if asked.ftz && to != Type::F32 && from != Type::F32 {
        return Err(p.unknown());
    }
    match (integer(to), integer(from)) {
        (Some(ts), Some(fs)) => int_to_int(p, (to, ts), (from, fs), asked),
        (Some(ts), None) if precision(from).is_some() => float_to_int(p, (to, ts), from, asked),
        (None, Some(fs)) if precision(to).is_some() => int_to_float(p, to, (from, fs), asked),
        (None, None) if precision(to).is_some() && precision(from).is_some() => {
            float_to_float(p, to, from, asked)
        }
        _ => Err(p.unknown()),
    }
}

/// Bits of the register of an operand; those of the type if it is no register.
fn register_bits(p: &Parse<'_>, i: usize, ty: Type) -> Result<u32, String> {
    let bits = match p.operand(i) {
        Some(o @ Operand::Register(_)) => p.register_type(o).map_or(bits_of(ty), bits_of),
        _ => bits_of(ty),
    };
    if bits < bits_of(ty) || bits > 64 {
        return Err(format!("operand {} of {} does not fit its type", i + 1, p.unknown()));
    }
    Ok(bits)
}

/// Sign- or zero-extends the low `bits` of a number. No branches: all but `x` is the same in all lanes.
#[inline(always)]
fn extend(x: u64, bits: u64, signed: bool) -> u64 {
    let bits = bits as u32;
    let sign = u64::from(signed).wrapping_shl(bits.wrapping_sub(1));
    ((x & u64::MAX.wrapping_shr(64u32.wrapping_sub(bits))) ^ sign).wrapping_sub(sign)
}

#[inline(always)]
fn extend32(x: u32, bits: u64, signed: bool) -> u32 {
    let bits = bits as u32;
    let sign = u32::from(signed).wrapping_shl(bits.wrapping_sub(1));
    ((x & u32::MAX.wrapping_shr(32u32.wrapping_sub(bits))) ^ sign).wrapping_sub(sign)
}

#[inline(always)]
fn to_bits(m: u64) -> u64 {
    m >> TO & 0x7f
}
#[inline(always)]
fn to_signed(m: u64) -> bool {
    m >> (TO + 7) & 1 != 0
}
#[inline(always)]
fn to_register(m: u64) -> u64 {
    m >> (TO + 8) & 0x7f
}
#[inline(always)]
fn from_bits(m: u64) -> u64 {
    m >> FROM & 0x7f
}
#[inline(always)]
fn from_signed(m: u64) -> bool {
    m >> (FROM + 7) & 1 != 0
}

fn destination(p: &Parse<'_>, to: Type, signed: bool) -> Result<(u64, bool), String> {
    let register = register_bits(p, 0, to)?;
    let imm = u64::from(bits_of(to)) | u64::from(signed) << 7 | u64::from(register) << 8;
    Ok((imm << TO, register == 64))
}

fn origin(p: &Parse<'_>, from: Type, signed: bool) -> Result<(u64, bool), String> {
    let register = register_bits(p, 1, from)?;
    Ok(((u64::from(bits_of(from)) | u64::from(signed) << 7) << FROM, register == 64))
}

/// The source's value, then its low bits or the nearest of the destination type, extended into the register.
#[inline(always)]
fn between(m: u64, x: u64) -> u64 {
    let value = extend(x, from_bits(m), from_signed(m));
    extend(extend(value, to_bits(m), to_signed(m)), to_register(m), false)
}

fn between_saturated(m: u64, x: u64) -> u64 {
    let value = extend(x, from_bits(m), from_signed(m));
    let value = if from_signed(m) { i128::from(value as i64) } else { i128::from(value) };
    let (low, high) = if to_signed(m) {
        (-(1i128 << (to_bits(m) - 1)), (1i128 << (to_bits(m) - 1)) - 1)
    } else {
        (0, (1i128 << to_bits(m)) - 1)
    };
    extend(value.clamp(low, high) as u64, to_register(m), false)
}

fn int_to_int(p: &Parse<'_>, to: (Type, bool), from: (Type, bool), asked: Asked) -> Result<Form, String> {
    let isa = p.isa;
    if asked.mode.is_some() {
        return Err(p.unknown());
    }
    let (d, wide_d) = destination(p, to.0, to.1)?;
    let (s, wide_s) = origin(p, from.0, from.1)?;
    let m = d | s;
    Ok(match (wide_d, wide_s, asked.sat) {
        (false, false, false) => isa.map1_imm(m, |m, a: u32| {
            let value = extend32(a, from_bits(m), from_signed(m));
            extend32(extend32(value, to_bits(m), to_signed(m)), to_register(m), false)
        }),
        (false, true, false) => p.once.map1_imm(m, |m, a: u64| between(m, a) as u32),
        (true, false, false) => p.once.map1_imm(m, |m, a: u32| between(m, u64::from(a))),
        (true, true, false) => p.once.map1_imm(m, between),
        (false, false, true) => p.once.map1_imm(m, |m, a: u32| between_saturated(m, u64::from(a)) as u32),
        (false, true, true) => p.once.map1_imm(m, |m, a: u64| between_saturated(m, a) as u32),
        (true, false, true) => p.once.map1_imm(m, |m, a: u32| between_saturated(m, u64::from(a))),
        (true, true, true) => p.once.map1_imm(m, between_saturated),
    })
}

/// A floating type as source or destination.
trait Float: Lane {
    const FORMAT: Format;
    fn value(self, m: u64) -> f64;
    fn of_bits(bits: u64) -> Self;
}

impl Float for f32 {
    const FORMAT: Format = soft::F32;
    #[inline(always)]
    fn value(self, m: u64) -> f64 {
        super::float32::flushed(m, self)
    }
    fn of_bits(bits: u64) -> Self {
        Self::from_bits(bits as u32)
    }
}

impl Float for f64 {
    const FORMAT: Format = soft::F64;
    #[inline(always)]
    fn value(self, _: u64) -> f64 {
        self
    }
    fn of_bits(bits: u64) -> Self {
        Self::from_bits(bits)
    }
}

impl Float for F16 {
    const FORMAT: Format = soft::F16;
    #[inline(always)]
    fn value(self, _: u64) -> f64 {
        f64::from(Binary16::widen(self.0))
    }
    fn of_bits(bits: u64) -> Self {
        Self(bits as u16)
    }
}

impl Float for BF16 {
    const FORMAT: Format = soft::BF16;
    #[inline(always)]
    fn value(self, _: u64) -> f64 {
        f64::from(Brain16::widen(self.0))
    }
    fn of_bits(bits: u64) -> Self {
        Self(bits as u16)
    }
}

/// To an integer in the mode's sense.
#[inline(always)]
fn integral(m: u64, x: f64) -> f64 {
    match Round::of(m) {
        Round::Nearest | Round::Away => x.round_ties_even(),
        Round::Zero => x.trunc(),
        Round::Down => x.floor(),
        Round::Up => x.ceil(),
    }
}

/// Clamps to the type. NaN is 0; from f64 or to 64 bits it is the bit of the sign.
#[inline(always)]
fn to_integer(m: u64, x: f64, from_f64: bool) -> u64 {
    let x = integral(m, x);
    let bits = to_bits(m);
    if x.is_nan() {
        let value = if from_f64 || bits == 64 { 1 << (bits - 1) } else { 0 };
        return extend(extend(value, bits, to_signed(m)), to_register(m), false);
    }
    let value = if bits == 64 {
        if to_signed(m) { (x as i64) as u64 } else { x as u64 }
    } else {
        let (low, high) = if to_signed(m) {
            (-(1i64 << (bits - 1)), (1i64 << (bits - 1)) - 1)
        } else {
            (0, (1i64 << bits) - 1)
        };
        (x as i64).clamp(low, high) as u64
    };
    extend(value, to_register(m), false)
}

fn float_to_int(p: &Parse<'_>, to: (Type, bool), from: Type, asked: Asked) -> Result<Form, String> {
    let isa = p.isa;
    if asked.mode.is_some() && !asked.integral {
        return Err(p.unknown());
    }
    // Without a mode the manual's examples truncate, as C does.
    let mode = asked.mode.unwrap_or(Round::Zero);
    let (d, wide) = destination(p, to.0, to.1)?;
    let m = Asked { mode: Some(mode), sat: false, ..asked }.imm() | d;
    if from == Type::F32 && !wide && to_register(m) == 32 {
        // The common ones: Rust's `as` saturates and gives 0 for NaN.
        match (to.0, mode) {
            (Type::S32, Round::Zero) => return Ok(isa.map1(|a: f32| a as i32)),
            (Type::U32, Round::Zero) => return Ok(isa.map1(|a: f32| a as u32)),
            (Type::S32, Round::Nearest) => return Ok(isa.map1(|a: f32| a.round_ties_even() as i32)),
            _ => {}
        }
    }
    macro_rules! both {
        ($t:ty, $double:literal) => {
            if wide {
                p.once.map1_imm(m, |m, a: $t| to_integer(m, a.value(m), $double))
            } else {
                p.once.map1_imm(m, |m, a: $t| to_integer(m, a.value(m), $double) as u32)
            }
        };
    }
    Ok(match from {
        Type::F32 => both!(f32, false),
        Type::F64 => both!(f64, true),
        Type::F16 => both!(F16, false),
        _ => both!(BF16, false),
    })
}

/// `.sat`, `.relu`, `.satfinite` and `.ftz` on a result.
fn finish<T: Float>(m: u64, bits: u64) -> T {
    let f = T::FORMAT;
    let sign = bits >> f.sign & 1 != 0;
    let magnitude = bits & ((1 << f.sign) - 1);
    let nan = magnitude > f.above;
    if m & SATFINITE != 0 && !nan && magnitude > f.max {
        return T::of_bits(
            u64::from(sign && m & RELU == 0) << f.sign | if sign && m & RELU != 0 { 0 } else { f.max },
        );
    }
    if m & RELU != 0 && sign {
        return T::of_bits(0);
    }
    // The flag that `float32::rounding` sets for `.sat`.
    if m & rounding(Round::Nearest, false, true) != 0 {
        let one = (f.bias as u64) << f.fraction;
        return T::of_bits(if sign || nan { 0 } else { magnitude.min(one) });
    }
    T::of_bits(bits)
}

fn int_to_float(p: &Parse<'_>, to: Type, from: (Type, bool), asked: Asked) -> Result<Form, String> {
    let isa = p.isa;
    let mode = match asked.mode {
        Some(mode) if !asked.integral => mode,
        _ => return Err(format!("{}: a rounding mode is needed", p.unknown())),
    };
    let (s, wide) = origin(p, from.0, from.1)?;
    let m = asked.imm() | s;
    if mode == Round::Nearest && !asked.sat && wide == (file_of(from.0) == Some(File::Wide)) {
        let form = match to {
            Type::F32 => {
                by_type!(from.0, [U8: u8, S8: i8, U16: u16, S16: i16, U32: u32, S32: i32, U64: u64, S64: i64],
                T => isa.map1(|a: T| a as f32))
            }
            Type::F64 => {
                by_type!(from.0, [U8: u8, S8: i8, U16: u16, S16: i16, U32: u32, S32: i32, U64: u64, S64: i64],
                T => isa.map1(|a: T| a as f64))
            }
            _ => None,
        };
        if let Some(form) = form {
            return Ok(form);
        }
    }
    fn convert<T: Float>(m: u64, x: u64) -> T {
        let value = extend(x, from_bits(m), from_signed(m));
        let value = if from_signed(m) { i128::from(value as i64) } else { i128::from(value) };
        finish(m, soft::round(Exact::integer(value), T::FORMAT, Round::of(m)))
    }
    macro_rules! both {
        ($t:ty) => {
            if wide {
                p.once.map1_imm(m, convert::<$t>)
            } else {
                p.once.map1_imm(m, |m, a: u32| convert::<$t>(m, u64::from(a)))
            }
        };
    }
    Ok(match to {
        Type::F32 => both!(f32),
        Type::F64 => both!(f64),
        Type::F16 => both!(F16),
        _ => both!(BF16),
    })
}

/// Any floating type to any, through f64, which holds all of them.
fn number<S: Float, T: Float>(m: u64, a: S) -> T {
    let x = a.value(m);
    let x = if m & INTEGRAL != 0 { integral(m, x) } else { x };
    // An integer of the type itself is exact in it.
    let mode = if m & INTEGRAL != 0 { Round::Nearest } else { Round::of(m) };
    let bits = soft::from_f64(x, T::FORMAT, mode);
    let small = T::FORMAT == soft::F32 && m & rounding(Round::Nearest, true, false) != 0;
    let bits = if small { u64::from(flush(f32::from_bits(bits as u32)).to_bits()) } else { bits };
    finish(m, bits)
}

fn float_to_float(p: &Parse<'_>, to: Type, from: Type, asked: Asked) -> Result<Form, String> {
    let isa = p.isa;
    let mixed = matches!((to, from), (Type::F16, Type::BF16) | (Type::BF16, Type::F16));
    let loses = precision(to) < precision(from) || mixed;
    // Rounding to an integer keeps the type; other rounding is there where something may be lost, and may be there
    // (with no effect) or be missing (to nearest) where bf16 is involved.
    let brain = to == Type::BF16 || from == Type::BF16;
    let right = match (asked.mode, asked.integral) {
        (None, _) => !loses || mixed,
        (Some(_), true) => to == from,
        (Some(_), false) => to != from && (loses || brain),
    };
    if !right {
        return Err(format!("{}: the rounding mode does not fit the types", p.unknown()));
    }
    let m = asked.imm();
    let plain = m & !7 == 0 && asked.mode.is_none_or(|mode| mode == Round::Nearest);
    let form = match (to, from) {
        (Type::F32, Type::F16) if plain => Some(isa.map1(|a: F16| canonical(Binary16::widen(a.0)))),
        (Type::F32, Type::BF16) if plain => Some(isa.map1(|a: BF16| canonical(Brain16::widen(a.0)))),
        (Type::F16, Type::F32) if plain => Some(isa.map1(|a: f32| F16(Binary16::narrow(a)))),
        (Type::BF16, Type::F32) if plain => Some(isa.map1(|a: f32| BF16(Brain16::narrow(a)))),
        (Type::F32, Type::F64) if plain => Some(isa.map1(|a: f64| canonical(a as f32))),
        (Type::F64, Type::F32) if plain => Some(isa.map1(|a: f32| super::float64::canonical(f64::from(a)))),
        (Type::F32, Type::F32) => Some(isa.map1_imm(m, |m, a: f32| {
            let x = a.value(m);
            let x = if m & INTEGRAL != 0 { integral(m, x) } else { x };
            finished(m, u64::from(canonical(x as f32).to_bits()))
        })),
        _ => None,
    };
    if let Some(form) = form {
        return Ok(form);
    }
    macro_rules! from {
        ($t:ty) => {
            match from {
                Type::F16 => p.once.map1_imm(m, number::<F16, $t>),
                Type::BF16 => p.once.map1_imm(m, number::<BF16, $t>),
                Type::F32 => p.once.map1_imm(m, number::<f32, $t>),
                _ => p.once.map1_imm(m, number::<f64, $t>),
            }
        };
    }
    Ok(match to {
        Type::F16 => from!(F16),
        Type::BF16 => from!(BF16),
        Type::F32 => from!(f32),
        _ => from!(f64),
    })
}

/// f32 to a narrower format with the flags of a conversion, for packed results.
pub(crate) fn narrow(m: u64, x: f32, half: bool) -> u16 {
    if half { number::<f32, F16>(m, x).0 } else { number::<f32, BF16>(m, x).0 }
}

pub(crate) fn constants(asked: Asked) -> u64 {
    asked.imm()
}

#[cfg(test)]
mod tests {
    use super::super::float32::saturate;
    use super::*;

    #[test]
    fn saturation_is_that_of_arithmetic() {
        for x in [f32::NAN, -0.0, 0.0, -3.0, 0.25, 1.0, 2.0, f32::INFINITY, 1e-40] {
            let m = rounding(Round::Nearest, false, true);
            assert_eq!(finish::<f32>(m, u64::from(x.to_bits())).to_bits(), saturate(x).to_bits());
        }
    }
}
