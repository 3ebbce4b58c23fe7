//! Division, roots and transcendental functions.
//!
//! The `.approx` forms are table units on a card. Here they are computed in f64 and rounded, so they are nearer to the
//! truth than a card is: never compare them bit for bit. Zeros, infinities and NaNs are as the manual says.

use super::float32::{canonical, finished, flush, flushed, rounding};
use super::float64;
use super::parse::Parse;
use super::soft::{self, Round};
use crate::exec::regs::Form;
use crate::ptx::ast::Type;
use crate::stats::Class;

pub(crate) fn form(p: &mut Parse<'_>) -> Result<Form, String> {
    let form = match p.opcode() {
        "div" => div(p),
        "rcp" => rcp(p),
        "sqrt" => sqrt(p),
        _ => approximate(p),
    }?;
    Ok(Form { class: Class::Special, ..form })
}

/// How a quotient is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Precision {
    Approximate,
    Full,
    Exact(Round),
}

fn precision(p: &mut Parse<'_>) -> Option<Precision> {
    p.pick(&[
        ("approx", Precision::Approximate),
        ("full", Precision::Full),
        ("rn", Precision::Exact(Round::Nearest)),
        ("rz", Precision::Exact(Round::Zero)),
        ("rm", Precision::Exact(Round::Down)),
        ("rp", Precision::Exact(Round::Up)),
    ])
}

/// A f64 result to f32. `imm` has the flags of `float32::rounding`.
#[inline(always)]
fn nearest(m: u64, x: f64) -> f32 {
    let x = canonical(x as f32);
    finished(m, u64::from(x.to_bits()))
}

/// `div.approx` is a times the reciprocal of b, which is 0 for the largest b.
fn quotient(m: u64, a: f32, b: f32) -> f32 {
    let (a, b) = (flushed(m, a), flushed(m, b));
    let limit = f64::from(1u32 << 31).powi(4) * 4.0;
    if b.abs() > limit && b.is_finite() {
        return nearest(m, a * 0f64.copysign(b));
    }
    nearest(m, a / b)
}

fn div(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.once;
    let precision = precision(p).ok_or_else(|| "div lacks a rounding mode".to_string())?;
    let ftz = p.take("ftz");
    match (p.ty()?, precision) {
        (Type::F32, Precision::Approximate) => {
            Ok(isa.map2_imm(rounding(Round::Nearest, ftz, false), quotient))
        }
        (Type::F32, Precision::Full) => {
            let m = rounding(Round::Nearest, ftz, false);
            Ok(isa.map2_imm(m, |m, a, b| nearest(m, flushed(m, a) / flushed(m, b))))
        }
        (Type::F32, Precision::Exact(Round::Nearest)) if !ftz => {
            Ok(p.isa.map2(|a: f32, b: f32| canonical(a / b)))
        }
        (Type::F32, Precision::Exact(Round::Nearest)) => {
            Ok(isa.map2(|a, b| canonical(flush(flush(a) / flush(b)))))
        }
        (Type::F32, Precision::Exact(mode)) => Ok(isa.map2_imm(rounding(mode, ftz, false), |m, a, b| {
            finished(m, soft::div(flushed(m, a), flushed(m, b), soft::F32, Round::of(m)))
        })),
        (Type::F64, Precision::Exact(Round::Nearest)) if !ftz => {
            Ok(isa.map2(|a: f64, b: f64| float64::canonical(a / b)))
        }
        (Type::F64, Precision::Exact(mode)) if !ftz => {
            Ok(isa.map2_imm(mode as u64, |m, a, b| f64::from_bits(soft::div(a, b, soft::F64, Round::of(m)))))
        }
        _ => Err(p.unknown()),
    }
}

/// The upper word of f64: what the approximate f64 functions read and write.
fn upper(x: f64) -> f64 {
    f64::from_bits(x.to_bits() & 0xffff_ffff_0000_0000)
}

/// `approx.ftz.f64` flushes subnormals.
fn flush64(x: f64) -> f64 {
    if x.abs() < f64::MIN_POSITIVE { 0f64.copysign(x) } else { x }
}

fn rcp(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.once;
    let precision = precision(p).ok_or_else(|| "rcp lacks a rounding mode".to_string())?;
    let ftz = p.take("ftz");
    match (p.ty()?, precision) {
        (Type::F32, Precision::Approximate | Precision::Exact(Round::Nearest)) if !ftz => {
            Ok(p.isa.map1(|a: f32| canonical(1.0 / a)))
        }
        (Type::F32, Precision::Approximate | Precision::Exact(Round::Nearest)) => {
            Ok(isa.map1(|a: f32| canonical(flush(1.0 / flush(a)))))
        }
        (Type::F32, Precision::Exact(mode)) => Ok(isa.map1_imm(rounding(mode, ftz, false), |m, a| {
            finished(m, soft::div(1.0, flushed(m, a), soft::F32, Round::of(m)))
        })),
        (Type::F64, Precision::Approximate) if ftz => {
            Ok(isa.map1(|a: f64| upper(float64::canonical(flush64(1.0 / flush64(upper(a)))))))
        }
        (Type::F64, Precision::Exact(Round::Nearest)) if !ftz => {
            Ok(isa.map1(|a: f64| float64::canonical(1.0 / a)))
        }
        (Type::F64, Precision::Exact(mode)) if !ftz => {
            Ok(isa.map1_imm(mode as u64, |m, a| f64::from_bits(soft::div(1.0, a, soft::F64, Round::of(m)))))
        }
        _ => Err(p.unknown()),
    }
}

fn sqrt(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.once;
    let precision = precision(p).ok_or_else(|| "sqrt lacks a rounding mode".to_string())?;
    let ftz = p.take("ftz");
    match (p.ty()?, precision) {
        (Type::F32, Precision::Approximate | Precision::Exact(Round::Nearest)) if !ftz => {
            Ok(p.isa.map1(|a: f32| canonical(a.sqrt())))
        }
        (Type::F32, Precision::Approximate | Precision::Exact(Round::Nearest)) => {
            Ok(isa.map1(|a| canonical(flush(a).sqrt())))
        }
        (Type::F32, Precision::Exact(mode)) => Ok(isa.map1_imm(rounding(mode, ftz, false), |m, a| {
            finished(m, soft::sqrt(flushed(m, a), soft::F32, Round::of(m)))
        })),
        (Type::F64, Precision::Exact(Round::Nearest)) if !ftz => {
            Ok(isa.map1(|a: f64| float64::canonical(a.sqrt())))
        }
        (Type::F64, Precision::Exact(mode)) if !ftz => {
            Ok(isa.map1_imm(mode as u64, |m, a| f64::from_bits(soft::sqrt(a, soft::F64, Round::of(m)))))
        }
        _ => Err(p.unknown()),
    }
}

/// `ex2`, `lg2`, `rsqrt`, `sin`, `cos`, `tanh`.
fn approximate(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.once;
    if !p.take("approx") {
        return Err(p.unknown());
    }
    let ftz = p.take("ftz");
    let ty = p.ty()?;
    if ty == Type::F64 {
        return match (p.opcode(), ftz) {
            ("rsqrt", true) => {
                Ok(isa.map1(|a: f64| upper(float64::canonical(1.0 / flush64(upper(a)).sqrt()))))
            }
            ("rsqrt", false) => Ok(isa.map1(|a: f64| float64::canonical(1.0 / a.sqrt()))),
            _ => Err(p.unknown()),
        };
    }
    if ty != Type::F32 || ftz && p.opcode() == "tanh" {
        return Err(p.unknown());
    }
    let m = rounding(Round::Nearest, ftz, false);
    Ok(match p.opcode() {
        "ex2" => isa.map1_imm(m, |m, a| nearest(m, flushed(m, a).exp2())),
        "lg2" => isa.map1_imm(m, |m, a| nearest(m, flushed(m, a).log2())),
        // -0 gives -infinity, as 1 / sqrt(-0) does.
        "rsqrt" => isa.map1_imm(m, |m, a| nearest(m, 1.0 / flushed(m, a).sqrt())),
        "sin" => isa.map1_imm(m, |m, a| nearest(m, flushed(m, a).sin())),
        "cos" => isa.map1_imm(m, |m, a| nearest(m, flushed(m, a).cos())),
        "tanh" => isa.map1_imm(m, |m, a| nearest(m, flushed(m, a).tanh())),
        _ => return Err(p.unknown()),
    })
}
