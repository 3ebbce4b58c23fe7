//! Integer arithmetic.

use super::lanes::{Body, Lane, Outcome, by_type, gather_bits, lanes, simple, source};
use super::parse::{Parse, flag};
use crate::exec::regs::{Form, LANES, Mask, Op, Regs};
use crate::ptx::ast::Type;
use crate::stats::Class;
use std::marker::PhantomData;

pub(crate) fn form(p: &mut Parse<'_>) -> Result<Form, String> {
    let form = match p.opcode() {
        "add" | "addc" | "sub" | "subc" => add_sub(p),
        "mul" | "mad" | "madc" => mul_mad(p),
        "mul24" | "mad24" => mul24(p),
        "sad" => sad(p),
        "div" | "rem" => div_rem(p),
        "min" | "max" => min_max(p),
        "abs" | "neg" => abs_neg(p),
        "dp4a" | "dp2a" => dot(p),
        _ => Err(p.unknown()),
    }?;
    Ok(Form { class: Class::Integer, ..form })
}

/// Both halves of packed 16-bit integers.
#[inline(always)]
fn halves(a: u32, b: u32, f: impl Fn(u16, u16) -> u16) -> u32 {
    u32::from(f(a as u16, b as u16)) | u32::from(f((a >> 16) as u16, (b >> 16) as u16)) << 16
}

fn add_sub(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.isa;
    let add = p.opcode().starts_with("add");
    let with_carry = p.opcode().ends_with('c');
    let cc = p.take("cc");
    let sat = p.take("sat");
    let ty = p.ty()?;
    if with_carry || cc {
        if sat {
            return Err(p.unknown());
        }
        let imm = flag(with_carry, READS) | flag(cc, WRITES) | flag(!add, BORROWS);
        let form = match (ty, add) {
            (Type::U32 | Type::S32, true) => carry2(p, imm, add_carry32),
            (Type::U32 | Type::S32, false) => carry2(p, imm, sub_borrow32),
            (Type::U64 | Type::S64, true) => carry2(p, imm, add_carry64),
            (Type::U64 | Type::S64, false) => carry2(p, imm, sub_borrow64),
            _ => return Err(p.unknown()),
        };
        return Ok(form);
    }
    if sat {
        return match (ty, add) {
            (Type::S32, true) => Ok(isa.map2(|a: i32, b: i32| a.saturating_add(b))),
            (Type::S32, false) => Ok(isa.map2(|a: i32, b: i32| a.saturating_sub(b))),
            _ => Err(p.unknown()),
        };
    }
    if matches!(ty, Type::U16x2 | Type::S16x2) && add {
        p.need(90)?;
        return Ok(isa.map2(|a: u32, b: u32| halves(a, b, u16::wrapping_add)));
    }
    if add {
        by_type!(ty, [U16 | S16: u16, U32 | S32: u32, U64 | S64: u64],
            T => isa.map2(|a: T, b: T| a.wrapping_add(b)))
    } else {
        by_type!(ty, [U16 | S16: u16, U32 | S32: u32, U64 | S64: u64],
            T => isa.map2(|a: T, b: T| a.wrapping_sub(b)))
    }
    .ok_or_else(|| p.unknown())
}

#[inline(always)]
fn add_carry32(a: u32, b: u32, c: bool) -> (u32, bool) {
    let s = u64::from(a) + u64::from(b) + u64::from(c);
    (s as u32, s >> 32 != 0)
}

#[inline(always)]
fn sub_borrow32(a: u32, b: u32, c: bool) -> (u32, bool) {
    let s = u64::from(a).wrapping_sub(u64::from(b)).wrapping_sub(u64::from(c));
    (s as u32, s >> 32 != 0)
}

#[inline(always)]
fn add_carry64(a: u64, b: u64, c: bool) -> (u64, bool) {
    let (s, over) = a.overflowing_add(b);
    let (s, over_again) = s.overflowing_add(u64::from(c));
    (s, over | over_again)
}

#[inline(always)]
fn sub_borrow64(a: u64, b: u64, c: bool) -> (u64, bool) {
    let (s, under) = a.overflowing_sub(b);
    let (s, under_again) = s.overflowing_sub(u64::from(c));
    (s, under | under_again)
}

/// Bits of `imm` of the carry operations: whether they read and write the flag.
const READS: u64 = 1;
const WRITES: u64 = 2;
/// It subtracts. The flag is the carry of `a + !b + 1` then: clear after a borrow. The manual does not say so, but the
/// compiler's 128-bit division reads the flag of `subc.cc` with `addc`.
const BORROWS: u64 = 4;

struct Carry2<T, F>(F, PhantomData<fn() -> T>);
struct Carry3<T, F>(F, PhantomData<fn() -> T>);

macro_rules! carry {
    ($name:ident, $Name:ident, ($($t:ident),*), ($($a:ident $i:tt),*)) => {
        impl<T, F: Copy> Clone for $Name<T, F> {
            fn clone(&self) -> Self {
                *self
            }
        }
        impl<T, F: Copy> Copy for $Name<T, F> {}
        impl<T: Lane, F: Fn($($t,)* bool) -> (T, bool) + Copy + 'static> Body for $Name<T, F> {
            #[inline(always)]
            fn run(self, regs: &mut Regs, op: &Op, mask: Mask) -> Outcome {
                let inverted = if op.imm & BORROWS != 0 { Mask::MAX } else { 0 };
                let carry = if op.imm & READS != 0 { regs.carry ^ inverted } else { 0 };
                let mut cells = [T::Cell::default(); LANES];
                let mut carries = [0u8; LANES];
                $(let $a = T::view(regs, op, $i);)*
                for lane in 0..lanes() {
                    let (d, c) = (self.0)($(T::at($a, lane),)* carry >> lane & 1 != 0);
                    cells[lane] = d.cell();
                    carries[lane] = u8::from(c);
                }
                T::store(regs, op, 0, &cells, mask);
                if op.imm & WRITES != 0 {
                    regs.carry = regs.carry & !mask | (gather_bits(&carries) ^ inverted) & mask;
                }
                Ok(())
            }
        }
        fn $name<T: Lane, F>(p: &Parse<'_>, imm: u64, f: F) -> Form
        where
            F: Fn($($t,)* bool) -> (T, bool) + Copy + 'static,
        {
            let run = p.once.op($Name(f, PhantomData));
            let sources = [$($i),*].map(|_: usize| source::<T>()).to_vec();
            Form { imm, ..simple(run, vec![T::FILE], sources) }
        }
    };
}
carry!(carry2, Carry2, (T, T), (a 0, b 1));
carry!(carry3, Carry3, (T, T, T), (a 0, b 1, c 2));

/// Which part of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Lo,
    Hi,
    Wide,
}

/// Upper half of a product.
trait High {
    fn high(self, other: Self) -> Self;
}

macro_rules! high {
    ($($t:ty: $wide:ty),*) => {$(
        impl High for $t {
            #[inline(always)]
            fn high(self, other: Self) -> Self {
                ((<$wide>::from(self) * <$wide>::from(other)) >> <$t>::BITS) as $t
            }
        }
    )*};
}
high!(u16: u32, i16: i32, u32: u64, i32: i64, u64: u128, i64: i128);

fn mul_mad(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.isa;
    let part =
        p.pick(&[("lo", Part::Lo), ("hi", Part::Hi), ("wide", Part::Wide)]).ok_or_else(|| p.unknown())?;
    let cc = p.take("cc");
    let sat = p.take("sat");
    let ty = p.ty()?;
    let mad = p.opcode() != "mul";
    if p.opcode() == "madc" || cc {
        let imm = flag(p.opcode() == "madc", READS) | flag(cc, WRITES);
        if !mad || sat {
            return Err(p.unknown());
        }
        return match (part, ty) {
            (Part::Lo, Type::U32 | Type::S32) => {
                Ok(carry3(p, imm, |a: u32, b, c, f| add_carry32(a.wrapping_mul(b), c, f)))
            }
            (Part::Hi, Type::U32) => Ok(carry3(p, imm, |a: u32, b, c, f| add_carry32(a.high(b), c, f))),
            (Part::Hi, Type::S32) => {
                Ok(carry3(p, imm, |a: u32, b: u32, c, f| add_carry32((a as i32).high(b as i32) as u32, c, f)))
            }
            (Part::Lo, Type::U64 | Type::S64) => {
                Ok(carry3(p, imm, |a: u64, b, c, f| add_carry64(a.wrapping_mul(b), c, f)))
            }
            (Part::Hi, Type::U64) => Ok(carry3(p, imm, |a: u64, b, c, f| add_carry64(a.high(b), c, f))),
            (Part::Hi, Type::S64) => {
                Ok(carry3(p, imm, |a: u64, b: u64, c, f| add_carry64((a as i64).high(b as i64) as u64, c, f)))
            }
            _ => Err(p.unknown()),
        };
    }
    if sat {
        if (part, ty, mad) != (Part::Hi, Type::S32, true) {
            return Err(p.unknown());
        }
        return Ok(isa.map3(|a: i32, b: i32, c: i32| a.high(b).saturating_add(c)));
    }
    match (part, mad) {
        (Part::Lo, false) => by_type!(ty, [U16 | S16: u16, U32 | S32: u32, U64 | S64: u64],
            T => isa.map2(|a: T, b: T| a.wrapping_mul(b))),
        (Part::Lo, true) => by_type!(ty, [U16 | S16: u16, U32 | S32: u32, U64 | S64: u64],
            T => isa.map3(|a: T, b: T, c: T| a.wrapping_mul(b).wrapping_add(c))),
        (Part::Hi, false) => by_type!(ty, [U16: u16, S16: i16, U32: u32, S32: i32, U64: u64, S64: i64],
            T => isa.map2(|a: T, b: T| a.high(b))),
        (Part::Hi, true) => by_type!(ty, [U16: u16, S16: i16, U32: u32, S32: i32, U64: u64, S64: i64],
            T => isa.map3(|a: T, b: T, c: T| a.high(b).wrapping_add(c))),
        (Part::Wide, false) => match ty {
            Type::U16 => Some(isa.map2(|a: u16, b: u16| u32::from(a) * u32::from(b))),
            Type::S16 => Some(isa.map2(|a: i16, b: i16| i32::from(a) * i32::from(b))),
            Type::U32 => Some(isa.map2(|a: u32, b: u32| u64::from(a) * u64::from(b))),
            Type::S32 => Some(isa.map2(|a: i32, b: i32| i64::from(a) * i64::from(b))),
            _ => None,
        },
        (Part::Wide, true) => match ty {
            Type::U16 => {
                Some(isa.map3(|a: u16, b: u16, c: u32| (u32::from(a) * u32::from(b)).wrapping_add(c)))
            }
            Type::S16 => {
                Some(isa.map3(|a: i16, b: i16, c: i32| (i32::from(a) * i32::from(b)).wrapping_add(c)))
            }
            Type::U32 => {
                Some(isa.map3(|a: u32, b: u32, c: u64| (u64::from(a) * u64::from(b)).wrapping_add(c)))
            }
            Type::S32 => {
                Some(isa.map3(|a: i32, b: i32, c: i64| (i64::from(a) * i64::from(b)).wrapping_add(c)))
            }
            _ => None,
        },
    }
    .ok_or_else(|| p.unknown())
}

/// 48-bit product of 24-bit factors.
#[inline(always)]
fn unsigned24(a: u32, b: u32) -> u64 {
    u64::from(a & 0xff_ffff) * u64::from(b & 0xff_ffff)
}

#[inline(always)]
fn signed24(a: i32, b: i32) -> i64 {
    i64::from(a << 8 >> 8) * i64::from(b << 8 >> 8)
}

fn mul24(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.once;
    let hi = p.pick(&[("lo", false), ("hi", true)]).ok_or_else(|| p.unknown())?;
    let sat = p.take("sat");
    let ty = p.ty()?;
    let form = match (p.opcode() == "mad24", hi, ty, sat) {
        (false, false, Type::U32, false) => isa.map2(|a, b| unsigned24(a, b) as u32),
        (false, true, Type::U32, false) => isa.map2(|a, b| (unsigned24(a, b) >> 16) as u32),
        (false, false, Type::S32, false) => isa.map2(|a, b| signed24(a, b) as i32),
        (false, true, Type::S32, false) => isa.map2(|a, b| (signed24(a, b) >> 16) as i32),
        (true, false, Type::U32, false) => isa.map3(|a, b, c: u32| (unsigned24(a, b) as u32).wrapping_add(c)),
        (true, true, Type::U32, false) => {
            isa.map3(|a, b, c: u32| ((unsigned24(a, b) >> 16) as u32).wrapping_add(c))
        }
        (true, false, Type::S32, false) => isa.map3(|a, b, c: i32| (signed24(a, b) as i32).wrapping_add(c)),
        (true, true, Type::S32, false) => {
            isa.map3(|a, b, c: i32| ((signed24(a, b) >> 16) as i32).wrapping_add(c))
        }
        (true, true, Type::S32, true) => {
            isa.map3(|a, b, c: i32| ((signed24(a, b) >> 16) as i32).saturating_add(c))
        }
        _ => return Err(p.unknown()),
    };
    Ok(form)
}

fn sad(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.once;
    let ty = p.ty()?;
    by_type!(ty, [U16: u16, S16: i16, U32: u32, S32: i32, U64: u64, S64: i64],
        T => isa.map3(|a: T, b: T, c: T| c.wrapping_add(if a < b { b.wrapping_sub(a) } else { a.wrapping_sub(b) })))
    .ok_or_else(|| p.unknown())
}

/// The manual leaves division by zero open; cards give all ones, for the remainder too.
fn div_rem(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.once;
    let ty = p.ty()?;
    if p.opcode() == "div" {
        by_type!(ty, [U16: u16, S16: i16, U32: u32, S32: i32, U64: u64, S64: i64],
            T => isa.map2(|a: T, b: T| if b == 0 { !0 } else { a.wrapping_div(b) }))
    } else {
        by_type!(ty, [U16: u16, S16: i16, U32: u32, S32: i32, U64: u64, S64: i64],
            T => isa.map2(|a: T, b: T| if b == 0 { !0 } else { a.wrapping_rem(b) }))
    }
    .ok_or_else(|| p.unknown())
}

fn min_max(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.isa;
    let min = p.opcode() == "min";
    let relu = p.take("relu");
    let ty = p.ty()?;
    if relu || matches!(ty, Type::U16x2 | Type::S16x2) {
        p.need(90)?;
    }
    let form = match (ty, relu, min) {
        (Type::S32, true, true) => isa.map2(|a: i32, b: i32| a.min(b).max(0)),
        (Type::S32, true, false) => isa.map2(|a: i32, b: i32| a.max(b).max(0)),
        (Type::U16x2, false, true) => isa.map2(|a: u32, b: u32| halves(a, b, |x, y| x.min(y))),
        (Type::U16x2, false, false) => isa.map2(|a: u32, b: u32| halves(a, b, |x, y| x.max(y))),
        (Type::S16x2, false, true) => {
            isa.map2(|a: u32, b: u32| halves(a, b, |x, y| (x as i16).min(y as i16) as u16))
        }
        (Type::S16x2, false, false) => {
            isa.map2(|a: u32, b: u32| halves(a, b, |x, y| (x as i16).max(y as i16) as u16))
        }
        (Type::S16x2, true, true) => {
            isa.map2(|a: u32, b: u32| halves(a, b, |x, y| (x as i16).min(y as i16).max(0) as u16))
        }
        (Type::S16x2, true, false) => {
            isa.map2(|a: u32, b: u32| halves(a, b, |x, y| (x as i16).max(y as i16).max(0) as u16))
        }
        (_, true, _) => return Err(p.unknown()),
        (_, _, true) => by_type!(ty, [U16: u16, S16: i16, U32: u32, S32: i32, U64: u64, S64: i64],
            T => isa.map2(|a: T, b: T| a.min(b)))
        .ok_or_else(|| p.unknown())?,
        (_, _, false) => by_type!(ty, [U16: u16, S16: i16, U32: u32, S32: i32, U64: u64, S64: i64],
            T => isa.map2(|a: T, b: T| a.max(b)))
        .ok_or_else(|| p.unknown())?,
    };
    Ok(form)
}

fn abs_neg(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.isa;
    let ty = p.ty()?;
    if p.opcode() == "abs" {
        by_type!(ty, [S16: i16, S32: i32, S64: i64], T => isa.map1(|a: T| a.wrapping_abs()))
    } else {
        by_type!(ty, [S16: i16, S32: i32, S64: i64], T => isa.map1(|a: T| a.wrapping_neg()))
    }
    .ok_or_else(|| p.unknown())
}

/// Byte `i`, extended.
#[inline(always)]
fn byte(x: u32, i: u32, signed: bool) -> i32 {
    let b = (x >> (8 * i)) as u8;
    if signed { i32::from(b as i8) } else { i32::from(b) }
}

#[inline(always)]
fn half(x: u32, i: u32, signed: bool) -> i32 {
    let h = (x >> (16 * i)) as u16;
    if signed { i32::from(h as i16) } else { i32::from(h) }
}

#[inline(always)]
fn dot4(a: u32, b: u32, c: u32, sa: bool, sb: bool) -> u32 {
    (0..4).fold(c, |d, i| d.wrapping_add(byte(a, i, sa).wrapping_mul(byte(b, i, sb)) as u32))
}

#[inline(always)]
fn dot2(a: u32, b: u32, c: u32, sa: bool, sb: bool, upper: bool) -> u32 {
    let at = if upper { 2 } else { 0 };
    (0..2).fold(c, |d, i| d.wrapping_add(half(a, i, sa).wrapping_mul(byte(b, at + i, sb)) as u32))
}

fn dot(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.isa;
    let two = p.opcode() == "dp2a";
    let upper = two && p.pick(&[("lo", false), ("hi", true)]).ok_or_else(|| p.unknown())?;
    let (sa, sb) = match (p.ty()?, p.ty()?) {
        (Type::U32, Type::U32) => (false, false),
        (Type::U32, Type::S32) => (false, true),
        (Type::S32, Type::U32) => (true, false),
        (Type::S32, Type::S32) => (true, true),
        _ => return Err(p.unknown()),
    };
    if two {
        let imm = u64::from(sa) | u64::from(sb) << 1 | u64::from(upper) << 2;
        return Ok(p.once.map3_imm(imm, |m, a, b, c| dot2(a, b, c, m & 1 != 0, m & 2 != 0, m & 4 != 0)));
    }
    Ok(match (sa, sb) {
        (false, false) => isa.map3(|a, b, c| dot4(a, b, c, false, false)),
        (false, true) => isa.map3(|a, b, c| dot4(a, b, c, false, true)),
        (true, false) => isa.map3(|a, b, c| dot4(a, b, c, true, false)),
        (true, true) => isa.map3(|a, b, c| dot4(a, b, c, true, true)),
    })
}
