//! f64 arithmetic, and f32 in packed pairs. Special functions are in `special`.

use super::float32;
use super::lanes::by_type;
use super::parse::Parse;
use super::soft::{self, Round};
use crate::exec::regs::Form;
use crate::ptx::ast::Type;
use crate::stats::Class;

pub(crate) fn form(p: &mut Parse<'_>) -> Result<Form, String> {
    let form = match p.opcode() {
        "add" | "sub" | "mul" | "fma" | "mad" => arithmetic(p),
        "min" | "max" => min_max(p),
        "abs" | "neg" => abs_neg(p),
        _ => Err(p.unknown()),
    }?;
    Ok(Form { class: Class::Float64, ..form })
}

/// Every NaN to one. (Cards keep some payloads; nothing may depend on them.)
#[inline(always)]
pub(crate) fn canonical(x: f64) -> f64 {
    // On bits: compilers may drop a selection between NaNs.
    let bits = x.to_bits();
    f64::from_bits(if bits & i64::MAX as u64 > 0x7ff0_0000_0000_0000 { i64::MAX as u64 } else { bits })
}

fn arithmetic(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.isa;
    let opcode = p.opcode();
    let mode = p.pick(&soft::MODES);
    p.ty()?;
    let mode = match mode {
        Some(mode) => mode,
        None if matches!(opcode, "fma" | "mad") => return Err(format!("{opcode} lacks a rounding mode")),
        None => Round::Nearest,
    };
    let m = mode as u64;
    Ok(match (opcode, mode) {
        ("add", Round::Nearest) => isa.map2(|a: f64, b: f64| canonical(a + b)),
        ("sub", Round::Nearest) => isa.map2(|a: f64, b: f64| canonical(a - b)),
        ("mul", Round::Nearest) => isa.map2(|a: f64, b: f64| canonical(a * b)),
        (_, Round::Nearest) => isa.map3(|a: f64, b: f64, c: f64| canonical(a.mul_add(b, c))),
        ("add", _) => p.once.map2_imm(m, |m, a, b| f64::from_bits(soft::add(a, b, soft::F64, Round::of(m)))),
        ("sub", _) => {
            isa.map2_imm(m, |m, a, b: f64| f64::from_bits(soft::add(a, -b, soft::F64, Round::of(m))))
        }
        ("mul", _) => p.once.map2_imm(m, |m, a, b| f64::from_bits(soft::mul(a, b, soft::F64, Round::of(m)))),
        _ => p.once.map3_imm(m, |m, a, b, c| f64::from_bits(soft::fma(a, b, c, soft::F64, Round::of(m)))),
    })
}

/// -0 is below +0; of a NaN and a number the number.
#[inline(always)]
fn choose(max: bool, a: f64, b: f64) -> f64 {
    let key = |x: f64| {
        let bits = x.to_bits() as i64;
        bits ^ (bits >> 63) & i64::MAX
    };
    let first = if max { key(a) > key(b) } else { key(a) < key(b) };
    canonical(if first & !a.is_nan() | b.is_nan() { a } else { b })
}

fn min_max(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.once;
    p.ty()?;
    Ok(match p.opcode() {
        "min" => isa.map2(|a, b| choose(false, a, b)),
        _ => isa.map2(|a, b| choose(true, a, b)),
    })
}

fn abs_neg(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.once;
    let abs = p.opcode() == "abs";
    let ty = p.ty()?;
    if abs {
        by_type!(ty, [F64: f64], T => isa.map1(|a: T| a.abs()))
    } else {
        by_type!(ty, [F64: f64], T => isa.map1(|a: T| -a))
    }
    .ok_or_else(|| p.unknown())
}

/// The two f32 of a 64-bit register, the low one first.
#[inline(always)]
fn parts(x: u64) -> [f32; 2] {
    [f32::from_bits(x as u32), f32::from_bits((x >> 32) as u32)]
}

#[inline(always)]
fn pair(f: impl Fn(usize) -> f32) -> u64 {
    u64::from(f(0).to_bits()) | u64::from(f(1).to_bits()) << 32
}

/// `add`, `sub`, `mul`, `fma` of `.f32x2`.
pub(crate) fn pairs(p: &mut Parse<'_>) -> Result<Form, String> {
    use float32::{finished, flushed};
    p.need(100)?;
    let isa = p.once;
    let opcode = p.opcode();
    let mode = p.pick(&soft::MODES);
    let ftz = p.take("ftz");
    if p.ty()? != Type::F32x2 {
        return Err(p.unknown());
    }
    let mode = match mode {
        Some(mode) => mode,
        None if opcode == "fma" => return Err("fma lacks a rounding mode".into()),
        None => Round::Nearest,
    };
    let m = float32::rounding(mode, ftz, false);
    let form = match opcode {
        "add" => isa.map2_imm(m, |m, a: u64, b: u64| {
            let (a, b) = (parts(a), parts(b));
            pair(|i| finished(m, soft::add(flushed(m, a[i]), flushed(m, b[i]), soft::F32, Round::of(m))))
        }),
        "sub" => isa.map2_imm(m, |m, a: u64, b: u64| {
            let (a, b) = (parts(a), parts(b));
            pair(|i| finished(m, soft::add(flushed(m, a[i]), -flushed(m, b[i]), soft::F32, Round::of(m))))
        }),
        "mul" => isa.map2_imm(m, |m, a: u64, b: u64| {
            let (a, b) = (parts(a), parts(b));
            pair(|i| finished(m, soft::mul(flushed(m, a[i]), flushed(m, b[i]), soft::F32, Round::of(m))))
        }),
        "fma" => isa.map3_imm(m, |m, a: u64, b: u64, c: u64| {
            let (a, b, c) = (parts(a), parts(b), parts(c));
            pair(|i| {
                let (a, b, c) = (flushed(m, a[i]), flushed(m, b[i]), flushed(m, c[i]));
                finished(m, soft::fma(a, b, c, soft::F32, Round::of(m)))
            })
        }),
        _ => return Err(p.unknown()),
    };
    Ok(Form { class: Class::Float32, ..form })
}
