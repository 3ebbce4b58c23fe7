//! f32 arithmetic. Special functions are in `special`.
//!
//! Subnormals are live unless `.ftz` is there, which flushes inputs and results to zero of their sign. A result that is
//! a NaN is always 0x7fffffff, as on a card.

use super::lanes::by_type;
use super::parse::{Parse, flag};
use super::soft::{self, Round};
use crate::exec::regs::Form;
use crate::stats::Class;

pub(crate) fn form(p: &mut Parse<'_>) -> Result<Form, String> {
    let form = match p.opcode() {
        "add" | "sub" | "mul" | "fma" | "mad" => arithmetic(p),
        "min" | "max" => min_max(p),
        "abs" | "neg" => abs_neg(p),
        "copysign" => copysign(p),
        _ => Err(p.unknown()),
    }?;
    Ok(Form { class: Class::Float32, ..form })
}

/// Subnormals to zero of their sign.
#[inline(always)]
pub(crate) fn flush(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { f32::from_bits(x.to_bits() & 0x8000_0000) } else { x }
}

/// Every NaN to the one that cards return.
#[inline(always)]
pub(crate) fn canonical(x: f32) -> f32 {
    // On bits: compilers may drop a selection between NaNs.
    let bits = x.to_bits();
    f32::from_bits(if bits & 0x7fff_ffff > 0x7f80_0000 { 0x7fff_ffff } else { bits })
}

/// `.sat`: to 0 to 1; NaN and -0 to +0.
#[inline(always)]
pub(crate) fn saturate(x: f32) -> f32 {
    if x > 0.0 { if x < 1.0 { x } else { 1.0 } } else { 0.0 }
}

#[inline(always)]
fn input<const FTZ: bool>(x: f32) -> f32 {
    if FTZ { flush(x) } else { x }
}

#[inline(always)]
fn output<const FTZ: bool, const SAT: bool>(x: f32) -> f32 {
    let x = if FTZ { flush(x) } else { x };
    if SAT { saturate(x) } else { canonical(x) }
}

#[inline(always)]
fn add<const FTZ: bool, const SAT: bool>(a: f32, b: f32) -> f32 {
    output::<FTZ, SAT>(input::<FTZ>(a) + input::<FTZ>(b))
}

#[inline(always)]
fn sub<const FTZ: bool, const SAT: bool>(a: f32, b: f32) -> f32 {
    output::<FTZ, SAT>(input::<FTZ>(a) - input::<FTZ>(b))
}

#[inline(always)]
fn mul<const FTZ: bool, const SAT: bool>(a: f32, b: f32) -> f32 {
    output::<FTZ, SAT>(input::<FTZ>(a) * input::<FTZ>(b))
}

#[inline(always)]
fn fma<const FTZ: bool, const SAT: bool>(a: f32, b: f32, c: f32) -> f32 {
    output::<FTZ, SAT>(input::<FTZ>(a).mul_add(input::<FTZ>(b), input::<FTZ>(c)))
}

/// Constants of an operation with a rounding mode: the mode, and bits 8 and 9.
const FTZ: u64 = 1 << 8;
const SAT: u64 = 1 << 9;

/// The flags of `imm` on an input.
pub(crate) fn flushed(imm: u64, x: f32) -> f64 {
    f64::from(if imm & FTZ != 0 { flush(x) } else { x })
}

/// The flags of `imm` on a result's bits.
pub(crate) fn finished(imm: u64, bits: u64) -> f32 {
    let x = f32::from_bits(bits as u32);
    let x = if imm & FTZ != 0 { flush(x) } else { x };
    if imm & SAT != 0 { saturate(x) } else { x }
}

/// `imm` of a rounding mode with its flags.
pub(crate) fn rounding(mode: Round, ftz: bool, sat: bool) -> u64 {
    mode as u64 | flag(ftz, FTZ) | flag(sat, SAT)
}

macro_rules! flags {
    ($isa:ident.$map:ident($f:ident), $ftz:expr, $sat:expr) => {
        match ($ftz, $sat) {
            (false, false) => $isa.$map($f::<false, false>),
            (false, true) => $isa.$map($f::<false, true>),
            (true, false) => $isa.$map($f::<true, false>),
            (true, true) => $isa.$map($f::<true, true>),
        }
    };
}

fn arithmetic(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.isa;
    let opcode = p.opcode();
    let mode = p.pick(&soft::MODES);
    let (ftz, sat) = (p.take("ftz"), p.take("sat"));
    p.ty()?;
    let mode = match mode {
        Some(mode) => mode,
        None if matches!(opcode, "fma" | "mad") => return Err(format!("{} lacks a rounding mode", opcode)),
        None => Round::Nearest,
    };
    if mode == Round::Nearest {
        return Ok(match opcode {
            "add" => flags!(isa.map2(add), ftz, sat),
            "sub" => flags!(isa.map2(sub), ftz, sat),
            "mul" => flags!(isa.map2(mul), ftz, sat),
            _ => flags!(isa.map3(fma), ftz, sat),
        });
    }
    let isa = p.once;
    let imm = rounding(mode, ftz, sat);
    Ok(match opcode {
        "add" => isa.map2_imm(imm, |m, a, b| {
            finished(m, soft::add(flushed(m, a), flushed(m, b), soft::F32, Round::of(m)))
        }),
        "sub" => isa.map2_imm(imm, |m, a, b| {
            finished(m, soft::add(flushed(m, a), -flushed(m, b), soft::F32, Round::of(m)))
        }),
        "mul" => isa.map2_imm(imm, |m, a, b| {
            finished(m, soft::mul(flushed(m, a), flushed(m, b), soft::F32, Round::of(m)))
        }),
        _ => isa.map3_imm(imm, |m, a, b, c| {
            finished(m, soft::fma(flushed(m, a), flushed(m, b), flushed(m, c), soft::F32, Round::of(m)))
        }),
    })
}

/// Flags of `min` and `max` in `imm`.
pub(crate) mod extremum {
    pub(crate) const MAX: u64 = 1;
    pub(crate) const FTZ: u64 = 2;
    /// A NaN wins.
    pub(crate) const NAN: u64 = 4;
    /// `.xorsign.abs`
    pub(crate) const XORSIGN: u64 = 8;
}

/// `min`, `max`: -0 is below +0; of a NaN and a number the number, unless NaNs win.
#[inline(always)]
pub(crate) fn choose(m: u64, a: f32, b: f32) -> f32 {
    use extremum::{FTZ, MAX, NAN, XORSIGN};
    let (mut a, mut b) = if m & FTZ != 0 { (flush(a), flush(b)) } else { (a, b) };
    let sign = (a.to_bits() ^ b.to_bits()) & 0x8000_0000;
    if m & XORSIGN != 0 {
        (a, b) = (a.abs(), b.abs());
    }
    let nan = if m & NAN != 0 { a.is_nan() | b.is_nan() } else { a.is_nan() & b.is_nan() };
    // As integers, numbers of either sign order as they do as floats, zeros among them.
    let key = |x: f32| {
        let bits = x.to_bits() as i32;
        bits ^ (bits >> 31) & 0x7fff_ffff
    };
    let first = if m & MAX != 0 { key(a) > key(b) } else { key(a) < key(b) };
    let first = first & !a.is_nan() | b.is_nan();
    let best = if first { a } else { b };
    let best = if m & XORSIGN != 0 { f32::from_bits(best.to_bits() | sign) } else { best };
    if nan { f32::from_bits(0x7fff_ffff) } else { best }
}

/// Takes the modifiers of `min` and `max`.
pub(crate) fn extremum_flags(p: &mut Parse<'_>) -> Result<u64, String> {
    use extremum::{FTZ, MAX, NAN, XORSIGN};
    let mut m = flag(p.opcode() == "max", MAX);
    m |= flag(p.take("ftz"), FTZ) | flag(p.take("NaN"), NAN);
    match (p.take("xorsign"), p.take("abs")) {
        (false, false) => {}
        (true, true) => m |= XORSIGN,
        _ => return Err(p.unknown()),
    }
    Ok(m)
}

fn min_max(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.isa;
    let m = extremum_flags(p)?;
    p.ty()?;
    if p.operands() == 4 {
        p.need(100)?;
        if m & extremum::XORSIGN != 0 {
            return Err(p.unknown());
        }
        return Ok(p.once.map3_imm(m, |m, a, b, c| choose(m, choose(m, a, b), c)));
    }
    Ok(match m {
        0 => isa.map2(|a, b| choose(0, a, b)),
        1 => isa.map2(|a, b| choose(1, a, b)),
        2 => isa.map2(|a, b| choose(2, a, b)),
        3 => isa.map2(|a, b| choose(3, a, b)),
        _ => p.once.map2_imm(m, choose),
    })
}

fn abs_neg(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.isa;
    let ftz = p.take("ftz");
    p.ty()?;
    Ok(match (p.opcode() == "abs", ftz) {
        (true, false) => isa.map1(|a: f32| a.abs()),
        (true, true) => isa.map1(|a| flush(a).abs()),
        (false, false) => isa.map1(|a: f32| -a),
        (false, true) => isa.map1(|a| -flush(a)),
    })
}

/// The sign is that of a, the rest is b.
fn copysign(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.once;
    let ty = p.ty()?;
    by_type!(ty, [F32: f32, F64: f64], T => isa.map2(|a: T, b: T| b.copysign(a))).ok_or_else(|| p.unknown())
}
