//! f16 and bf16, alone and packed.
//!
//! Arithmetic is done in a wider format whose result is rounded to odd (the last bit is set if anything was lost), so
//! that rounding it once more gives the correctly rounded result.

use super::float32::{canonical, extremum, extremum_flags};
use super::half_rows::{self, Add, CHOICE, Extreme, Fma, Mul, RowOp, Sub};
use super::lanes::{BF16, F16, Isa};
use super::parse::{Parse, flag};
use crate::exec::regs::{Form, Literal};
use crate::ptx::ast::Type;
use crate::stats::Class;

/// A 16-bit format.
pub(crate) trait Half: Copy + 'static {
    /// Smallest normal number as bits.
    const NORMAL: u16;
    /// Infinity as bits.
    const INFINITY: u16;
    /// To f32, exactly.
    fn widen(bits: u16) -> f32;
    /// The nearest, ties to even. NaN gives 0x7fff.
    fn narrow(x: f32) -> u16;
    /// `a * b + c`, as an f32 that `narrow` rounds correctly.
    fn fma(a: f32, b: f32, c: f32) -> f32;
    /// `a * b`, likewise.
    fn mul(a: f32, b: f32) -> f32;
}

/// f16
#[derive(Debug, Clone, Copy)]
pub(crate) struct Binary16;
/// bf16
#[derive(Debug, Clone, Copy)]
pub(crate) struct Brain16;

/// A sum and what it lacks, rounded to odd. `sum` is finite where `rest` is a number.
#[inline(always)]
fn odd32(sum: f32, rest: f32) -> f32 {
    let bits = sum.to_bits();
    // Towards zero first, if the sum was rounded away from it.
    let away = (rest.to_bits() ^ bits) >> 31;
    let odd = bits.wrapping_sub(away) | 1;
    if rest != 0.0 && !rest.is_nan() { f32::from_bits(odd) } else { sum }
}

#[inline(always)]
fn odd64(sum: f64, rest: f64) -> f64 {
    let bits = sum.to_bits();
    let away = (rest.to_bits() ^ bits) >> 63;
    let odd = bits.wrapping_sub(away) | 1;
    if rest != 0.0 && !rest.is_nan() { f64::from_bits(odd) } else { sum }
}

/// To f32, rounded to odd.
#[inline(always)]
pub(crate) fn odd_from_f64(x: f64) -> f32 {
    let near = x as f32;
    let back = f64::from(near);
    let bits = near.to_bits();
    let odd = bits.wrapping_sub(u32::from(back.abs() > x.abs())) | 1;
    if back != x && !x.is_nan() { f32::from_bits(odd) } else { near }
}

impl Half for Binary16 {
    const NORMAL: u16 = 0x0400;
    const INFINITY: u16 = 0x7c00;

    #[inline(always)]
    fn widen(bits: u16) -> f32 {
        let magnitude = u32::from(bits & 0x7fff);
        let sign = u32::from(bits & 0x8000) << 16;
        // As an f32 with the same exponent field, subnormal or not, the number is too small by 2^112.
        let scaled = f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23);
        let special = f32::from_bits(magnitude << 13 | 0x7f80_0000);
        let x = if magnitude >= 0x7c00 { special } else { scaled };
        f32::from_bits(x.to_bits() | sign)
    }

    #[inline(always)]
    fn narrow(x: f32) -> u16 {
        let bits = x.to_bits();
        let sign = (bits >> 16 & 0x8000) as u16;
        let magnitude = bits & 0x7fff_ffff;
        // Normal: round at bit 13, then take 112 off the exponent.
        let normal = magnitude.wrapping_add(0xfff + (magnitude >> 13 & 1)).wrapping_sub(112 << 23) >> 13;
        // Subnormal: adding 0.5 leaves a last bit of 2^-24.
        let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
        let value = if magnitude < 0x3880_0000 { subnormal } else { normal };
        let value = if magnitude >= 0x4780_0000 { 0x7c00 } else { value };
        if magnitude > 0x7f80_0000 { 0x7fff } else { value as u16 | sign }
    }

    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        // The product of two 11-bit significands is exact.
        let product = a * b;
        let sum = product + c;
        let back = sum - product;
        let rest = (product - (sum - back)) + (c - back);
        odd32(sum, rest)
    }

    #[inline(always)]
    fn mul(a: f32, b: f32) -> f32 {
        a * b
    }
}

impl Half for Brain16 {
    const NORMAL: u16 = 0x0080;
    const INFINITY: u16 = 0x7f80;

    #[inline(always)]
    fn widen(bits: u16) -> f32 {
        f32::from_bits(u32::from(bits) << 16)
    }

    #[inline(always)]
    fn narrow(x: f32) -> u16 {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        if x.is_nan() { 0x7fff } else { rounded as u16 }
    }

    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        // In f64, for the range: the product of two small ones has bits below f32's last.
        let product = f64::from(a) * f64::from(b);
        let c = f64::from(c);
        let sum = product + c;
        let back = sum - product;
        let rest = (product - (sum - back)) + (c - back);
        odd_from_f64(odd64(sum, rest))
    }

    #[inline(always)]
    fn mul(a: f32, b: f32) -> f32 {
        odd_from_f64(f64::from(a) * f64::from(b))
    }
}

/// Subnormals to zero of their sign.
#[inline(always)]
pub(crate) fn flush<H: Half>(x: u16) -> u16 {
    if x & 0x7fff < H::NORMAL { x & 0x8000 } else { x }
}

/// Flags of an operation on halves, in `imm`.
pub(crate) const FTZ: u64 = 1;
pub(crate) const SAT: u64 = 2;
pub(crate) const RELU: u64 = 4;

#[inline(always)]
fn input<H: Half>(m: u64, x: u16) -> f32 {
    H::widen(if m & FTZ != 0 { flush::<H>(x) } else { x })
}

#[inline(always)]
fn output<H: Half>(m: u64, x: f32) -> u16 {
    let bits = H::narrow(x);
    if m & FTZ != 0 { flush::<H>(bits) } else { bits }
}

#[inline(always)]
fn absolute<H: Half>(m: u64, a: u16) -> u16 {
    (if m & FTZ != 0 { flush::<H>(a) } else { a }) & 0x7fff
}

#[inline(always)]
fn negated<H: Half>(m: u64, a: u16) -> u16 {
    (if m & FTZ != 0 { flush::<H>(a) } else { a }) ^ 0x8000
}

#[inline(always)]
fn power_of_two<H: Half>(m: u64, a: u16) -> u16 {
    output::<H>(m, canonical(odd_from_f64(f64::from(input::<H>(m, a)).exp2())))
}

#[inline(always)]
fn tangent<H: Half>(m: u64, a: u16) -> u16 {
    output::<H>(m, canonical(odd_from_f64(f64::from(input::<H>(m, a)).tanh())))
}

#[inline(always)]
fn join(low: u16, high: u16) -> u32 {
    u32::from(low) | u32::from(high) << 16
}

/// The upper half.
#[inline(always)]
fn high(x: u32) -> u16 {
    (x >> 16) as u16
}

/// The function of one half, for the four types. The lane functions are `fn`s, for a closure of this size would not
/// be inlined into the loop over lanes.
macro_rules! of_halves {
    ($map:ident, $isa:expr, $ty:expr, $m:expr, $f:ident, $($a:ident),+) => {{
        #[inline(always)]
        fn one<H: Half>(m: u64, $($a: u16),+) -> u16 {
            $f::<H>(m, $($a),+)
        }
        #[inline(always)]
        fn f16(m: u64, $($a: F16),+) -> F16 {
            F16(one::<Binary16>(m, $($a.0),+))
        }
        #[inline(always)]
        fn bf16(m: u64, $($a: BF16),+) -> BF16 {
            BF16(one::<Brain16>(m, $($a.0),+))
        }
        #[inline(always)]
        fn two<H: Half>(m: u64, $($a: u32),+) -> u32 {
            join(one::<H>(m, $($a as u16),+), one::<H>(m, $(high($a)),+))
        }
        match $ty {
            Type::F16 => Some($isa.$map($m, f16)),
            Type::BF16 => Some($isa.$map($m, bf16)),
            Type::F16x2 => Some($isa.$map($m, two::<Binary16>)),
            Type::BF16x2 => Some($isa.$map($m, two::<Brain16>)),
            _ => None,
        }
    }};
}

pub(crate) fn form(p: &mut Parse<'_>) -> Result<Form, String> {
    let form = match p.opcode() {
        "add" | "sub" | "mul" | "fma" => arithmetic(p),
        "min" | "max" => min_max(p),
        "abs" | "neg" => abs_neg(p),
        "ex2" | "tanh" => special(p),
        _ => Err(p.unknown()),
    }?;
    Ok(Form { class: Class::Half, ..form })
}

/// Both are one rounding of an exact result for f16 and bf16 alike: sums lose nothing in f32 that matters here.
fn arithmetic(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.isa;
    let opcode = p.opcode();
    let rounded = p.take("rn");
    let (ftz, sat, relu) = (p.take("ftz"), p.take("sat"), p.take("relu"));
    let ty = p.ty()?;
    let brain = matches!(ty, Type::BF16 | Type::BF16x2);
    if brain && (ftz || sat) || sat && relu || relu && opcode != "fma" || opcode == "fma" && !rounded {
        return Err(p.unknown());
    }
    if brain && opcode != "fma" {
        p.need(90)?;
    }
    let m = flag(ftz, FTZ) | flag(sat, SAT) | flag(relu, RELU);
    match opcode {
        "add" => rows::<Add>(isa, ty, m),
        "sub" => rows::<Sub>(isa, ty, m),
        "mul" => rows::<Mul>(isa, ty, m),
        _ => rows::<Fma>(isa, ty, m),
    }
    .ok_or_else(|| p.unknown())
}

/// An operation for the four types.
fn rows<O: RowOp>(isa: Isa, ty: Type, m: u64) -> Option<Form> {
    Some(match ty {
        Type::F16 => half_rows::form::<Binary16, O>(isa, m, Some(Literal::F16)),
        Type::BF16 => half_rows::form::<Brain16, O>(isa, m, Some(Literal::BF16)),
        Type::F16x2 => half_rows::form::<Binary16, O>(isa, m, None),
        Type::BF16x2 => half_rows::form::<Brain16, O>(isa, m, None),
        _ => return None,
    })
}

fn min_max(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.isa;
    let m = extremum_flags(p)?;
    let ty = p.ty()?;
    let ftz = m & extremum::FTZ != 0;
    if matches!(ty, Type::BF16 | Type::BF16x2) && ftz {
        return Err(p.unknown());
    }
    // Flushed as halves: what is subnormal there is normal in f32.
    let m = flag(ftz, FTZ) | (m & !extremum::FTZ) << CHOICE;
    rows::<Extreme>(isa, ty, m).ok_or_else(|| p.unknown())
}

fn abs_neg(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.once;
    let m = flag(p.take("ftz"), FTZ);
    let ty = p.ty()?;
    if matches!(ty, Type::BF16 | Type::BF16x2) && m != 0 {
        return Err(p.unknown());
    }
    match p.opcode() {
        "abs" => of_halves!(map1_imm, isa, ty, m, absolute, a),
        _ => of_halves!(map1_imm, isa, ty, m, negated, a),
    }
    .ok_or_else(|| p.unknown())
}

/// Approximate on a card; here the nearest number. `ex2` of bf16 is flushed: the manual has only that form.
fn special(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.once;
    let ftz = p.take("ftz");
    if !p.take("approx") {
        return Err(p.unknown());
    }
    let ty = p.ty()?;
    let brain = matches!(ty, Type::BF16 | Type::BF16x2);
    let m = flag(ftz, FTZ);
    if p.opcode() == "ex2" {
        if brain != ftz {
            return Err(p.unknown());
        }
        if brain {
            p.need(90)?;
        }
        return of_halves!(map1_imm, isa, ty, m, power_of_two, a).ok_or_else(|| p.unknown());
    }
    if ftz {
        return Err(p.unknown());
    }
    if brain {
        p.need(90)?;
    }
    of_halves!(map1_imm, isa, ty, m, tangent, a).ok_or_else(|| p.unknown())
}
