//! Comparison and selection.

use super::float32::flush;
use super::half::{self, Half};
use super::lanes::{
    BF16, Body, F16, Lane, Outcome, by_type, gather_bits, lanes, predicate, set_predicate, set_row, simple,
    source,
};
use super::parse::{Parse, flag};
use crate::exec::regs::{File, Form, LANES, Mask, Op, Regs, Source};
use crate::ptx::ast::Type;
use crate::stats::Class;
use std::marker::PhantomData;

pub(crate) fn form(p: &mut Parse<'_>) -> Result<Form, String> {
    let form = match p.opcode() {
        "setp" | "set" => set(p),
        "selp" => selp(p),
        "slct" => slct(p),
        "testp" => testp(p),
        _ => Err(p.unknown()),
    }?;
    Ok(Form { class: Class::Compare, ..form })
}

/// Comparisons. Of floats, the upper four bits are the answer for less, equal, greater and unordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Compare {
    less: bool,
    equal: bool,
    greater: bool,
    unordered: bool,
    /// `lo`, `ls`, `hi`, `hs`: of unsigned integers.
    unsigned: bool,
    /// `equ` … `nan`: of floats.
    float: bool,
}

const fn compare(less: bool, equal: bool, greater: bool) -> Compare {
    Compare { less, equal, greater, unordered: false, unsigned: false, float: false }
}
const EQ: Compare = compare(false, true, false);
const NE: Compare = compare(true, false, true);
const LT: Compare = compare(true, false, false);
const LE: Compare = compare(true, true, false);
const GT: Compare = compare(false, false, true);
const GE: Compare = compare(false, true, true);
const fn unsigned(c: Compare) -> Compare {
    Compare { unsigned: true, ..c }
}
const fn unordered(c: Compare) -> Compare {
    Compare { unordered: true, float: true, ..c }
}

const COMPARISONS: [(&str, Compare); 18] = [
    ("eq", EQ),
    ("ne", NE),
    ("lt", LT),
    ("le", LE),
    ("gt", GT),
    ("ge", GE),
    ("lo", unsigned(LT)),
    ("ls", unsigned(LE)),
    ("hi", unsigned(GT)),
    ("hs", unsigned(GE)),
    ("equ", unordered(EQ)),
    ("neu", unordered(NE)),
    ("ltu", unordered(LT)),
    ("leu", unordered(LE)),
    ("gtu", unordered(GT)),
    ("geu", unordered(GE)),
    ("num", Compare { float: true, ..compare(true, true, true) }),
    ("nan", unordered(compare(false, false, false))),
];

/// How the result is combined with c, in `imm`.
const COMBINE: [(&str, u64); 3] = [("and", 1), ("or", 2), ("xor", 3)];
/// Bits of `imm` above: 2 = flush subnormals, 4.. = what a float comparison says.
const FTZ: u64 = 1 << 2;
/// `setp` has a second destination.
const TWO: u64 = 1 << 3;
const CODE: u32 = 4;
/// What `set` writes for true.
const TRUE: u32 = 8;

#[inline(always)]
fn combine(imm: u64, t: Mask, c: Mask) -> Mask {
    match imm & 3 {
        0 => t,
        1 => t & c,
        2 => t | c,
        _ => t ^ c,
    }
}

/// A comparison of two warps.
trait Test: Copy + 'static {
    fn test(self, regs: &Regs, op: &Op) -> Mask;
    fn source() -> Source;
}

struct Lanes<T, F>(F, PhantomData<fn() -> T>);
impl<T, F: Copy> Clone for Lanes<T, F> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T, F: Copy> Copy for Lanes<T, F> {}

impl<T: Lane, F: Fn(u64, T, T) -> bool + Copy + 'static> Test for Lanes<T, F> {
    #[inline(always)]
    fn test(self, regs: &Regs, op: &Op) -> Mask {
        let (a, b) = (T::view(regs, op, 0), T::view(regs, op, 1));
        let imm = op.imm;
        let mut bytes = [0; LANES];
        for lane in 0..lanes() {
            bytes[lane] = u8::from((self.0)(imm, T::at(a, lane), T::at(b, lane)));
        }
        gather_bits(&bytes)
    }
    fn source() -> Source {
        source::<T>()
    }
}

/// `setp`
#[derive(Clone, Copy)]
struct Setp<T>(T);

impl<T: Test> Body for Setp<T> {
    #[inline(always)]
    fn run(self, regs: &mut Regs, op: &Op, mask: Mask) -> Outcome {
        let t = self.0.test(regs, op);
        // Which of c and the second destination are there is known by `imm`, to have fewer copies of the loop.
        let c = if op.imm & 3 != 0 { predicate(regs, op, 2) } else { 0 };
        set_predicate(regs, op.d[0], combine(op.imm, t, c), mask);
        if op.imm & TWO != 0 {
            set_predicate(regs, op.d[1], combine(op.imm, !t, c), mask);
        }
        Ok(())
    }
}

/// `set`: a number for true, 0 for false.
#[derive(Clone, Copy)]
struct Set<T>(T);

impl<T: Test> Body for Set<T> {
    #[inline(always)]
    fn run(self, regs: &mut Regs, op: &Op, mask: Mask) -> Outcome {
        let t = self.0.test(regs, op);
        let t = combine(op.imm, t, if op.imm & 3 != 0 { predicate(regs, op, 2) } else { 0 });
        let yes = (op.imm >> TRUE) as u32;
        let out = std::array::from_fn(|lane| if t >> lane & 1 != 0 { yes } else { 0 });
        set_row(&mut regs.narrow[op.d[0] as usize], &out, mask);
        Ok(())
    }
}

/// What the instruction asks for besides the comparison.
struct Shape {
    setp: bool,
    c: bool,
    q: bool,
    imm: u64,
}

fn with<T: Test>(p: &Parse<'_>, shape: &Shape, test: T) -> Form {
    let isa = p.isa;
    let (run, mut destinations) = if shape.setp {
        (isa.op(Setp(test)), vec![File::Pred])
    } else {
        (p.once.op(Set(test)), vec![File::Narrow])
    };
    if shape.q {
        destinations.push(File::Pred);
    }
    let mut sources = vec![T::source(); 2];
    if shape.c {
        sources.push(source::<bool>());
    }
    Form { imm: shape.imm, ..simple(run, destinations, sources) }
}

fn each<T: Lane>(p: &Parse<'_>, shape: &Shape, f: impl Fn(u64, T, T) -> bool + Copy + 'static) -> Form {
    with(p, shape, Lanes(f, PhantomData))
}

/// A float comparison from its four bits in `imm`.
#[inline(always)]
fn decide(imm: u64, less: bool, equal: bool, greater: bool) -> bool {
    let code = imm >> CODE;
    (code & 1 != 0) & less
        | (code & 2 != 0) & equal
        | (code & 4 != 0) & greater
        | (code & 8 != 0) & !(less | equal | greater)
}

#[inline(always)]
fn decide_f32(imm: u64, a: f32, b: f32) -> bool {
    let (a, b) = if imm & FTZ != 0 { (flush(a), flush(b)) } else { (a, b) };
    decide(imm, a < b, a == b, a > b)
}

#[inline(always)]
fn decide_half<H: Half>(imm: u64, a: u16, b: u16) -> bool {
    let (a, b) = if imm & FTZ != 0 { (half::flush::<H>(a), half::flush::<H>(b)) } else { (a, b) };
    let (a, b) = (H::widen(a), H::widen(b));
    decide(imm, a < b, a == b, a > b)
}

/// Packed halves: p is of the low ones, q of the high ones.
struct Packed<H>(PhantomData<H>);
impl<H> Clone for Packed<H> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<H> Copy for Packed<H> {}

impl<H: Half> Packed<H> {
    #[inline(always)]
    fn tests(regs: &Regs, op: &Op) -> [Mask; 2] {
        let (a, b) = (&regs.narrow[op.s[0] as usize], &regs.narrow[op.s[1] as usize]);
        [0, 16].map(|at| {
            let mut bytes = [0; LANES];
            for lane in 0..lanes() {
                bytes[lane] =
                    u8::from(decide_half::<H>(op.imm, (a[lane] >> at) as u16, (b[lane] >> at) as u16));
            }
            gather_bits(&bytes)
        })
    }
}

#[derive(Clone, Copy)]
struct SetpPacked<T>(T);

impl<H: Half> Body for SetpPacked<Packed<H>> {
    #[inline(always)]
    fn run(self, regs: &mut Regs, op: &Op, mask: Mask) -> Outcome {
        let [low, high] = Packed::<H>::tests(regs, op);
        let c = if op.imm & 3 != 0 { predicate(regs, op, 2) } else { 0 };
        set_predicate(regs, op.d[0], combine(op.imm, low, c), mask);
        set_predicate(regs, op.d[1], combine(op.imm, high, c), mask);
        Ok(())
    }
}

#[derive(Clone, Copy)]
struct SetPacked<T>(T);

impl<H: Half> Body for SetPacked<Packed<H>> {
    #[inline(always)]
    fn run(self, regs: &mut Regs, op: &Op, mask: Mask) -> Outcome {
        let c = if op.imm & 3 != 0 { predicate(regs, op, 2) } else { 0 };
        let [low, high] = Packed::<H>::tests(regs, op).map(|t| combine(op.imm, t, c));
        let yes = (op.imm >> TRUE) as u32 & 0xffff;
        let out = std::array::from_fn(|lane| {
            let half = |t: Mask| if t >> lane & 1 != 0 { yes } else { 0 };
            half(low) | half(high) << 16
        });
        set_row(&mut regs.narrow[op.d[0] as usize], &out, mask);
        Ok(())
    }
}

fn packed<H: Half>(p: &Parse<'_>, shape: &Shape) -> Form {
    let kind = Packed::<H>(PhantomData);
    let run = if shape.setp { p.once.op(SetpPacked(kind)) } else { p.once.op(SetPacked(kind)) };
    let destinations = if shape.setp { vec![File::Pred; 2] } else { vec![File::Narrow] };
    let mut sources = vec![source::<u32>(); 2];
    if shape.c {
        sources.push(source::<bool>());
    }
    Form { imm: shape.imm, ..simple(run, destinations, sources) }
}

fn set(p: &mut Parse<'_>) -> Result<Form, String> {
    let setp = p.opcode() == "setp";
    let op = p.pick(&COMPARISONS).ok_or_else(|| p.unknown())?;
    let with_c = p.pick(&COMBINE);
    let ftz = p.take("ftz");
    let dtype = if setp { None } else { Some(p.ty()?) };
    let ty = p.ty()?;
    let float = matches!(ty, Type::F32 | Type::F64 | Type::F16 | Type::BF16 | Type::F16x2 | Type::BF16x2);
    let bits_only = matches!(ty, Type::B16 | Type::B32 | Type::B64);
    let is_unsigned = matches!(ty, Type::U16 | Type::U32 | Type::U64);
    if op.float && !float
        || op.unsigned && !is_unsigned
        || bits_only && op != EQ && op != NE
        || ftz && !float
        || ftz && matches!(ty, Type::F64 | Type::BF16 | Type::BF16x2)
    {
        return Err(p.unknown());
    }
    let yes = match (dtype, ty) {
        (None, _) => 0,
        (Some(Type::U32 | Type::S32), _) => u32::MAX,
        (Some(Type::F32), _) => 1f32.to_bits(),
        (Some(Type::U16 | Type::S16), Type::F16 | Type::BF16) => 0xffff,
        (Some(Type::F16), _) | (Some(Type::F16x2), Type::F16x2) => 0x3c00,
        (Some(Type::BF16), _) | (Some(Type::BF16x2), Type::BF16x2) => 0x3f80,
        _ => return Err(p.unknown()),
    };
    let code = u64::from(op.less)
        | u64::from(op.equal) << 1
        | u64::from(op.greater) << 2
        | u64::from(op.unordered) << 3;
    let q = setp && matches!(p.operand(0), Some(crate::ptx::ast::Operand::Pair(..)));
    let shape = Shape {
        setp,
        c: with_c.is_some(),
        q,
        imm: with_c.unwrap_or(0) | flag(ftz, FTZ) | flag(q, TWO) | code << CODE | u64::from(yes) << TRUE,
    };
    let s = &shape;
    let form = match ty {
        Type::F32 if !ftz => Some(match op {
            EQ => each(p, s, |_, a: f32, b| a == b),
            LT => each(p, s, |_, a: f32, b| a < b),
            LE => each(p, s, |_, a: f32, b| a <= b),
            GT => each(p, s, |_, a: f32, b| a > b),
            GE => each(p, s, |_, a: f32, b| a >= b),
            _ => each(p, s, decide_f32),
        }),
        Type::F32 => Some(each(p, s, decide_f32)),
        Type::F64 => Some(each(p, s, |m, a: f64, b| decide(m, a < b, a == b, a > b))),
        Type::F16 => Some(each(p, s, |m, a: F16, b: F16| decide_half::<half::Binary16>(m, a.0, b.0))),
        Type::BF16 => Some(each(p, s, |m, a: BF16, b: BF16| decide_half::<half::Brain16>(m, a.0, b.0))),
        Type::F16x2 => Some(packed::<half::Binary16>(p, s)),
        Type::BF16x2 => Some(packed::<half::Brain16>(p, s)),
        _ => {
            let plain = Compare { unsigned: false, ..op };
            match plain {
                EQ => by_type!(ty, [B16 | U16 | S16: u16, B32 | U32 | S32: u32, B64 | U64 | S64: u64],
                    T => each(p, s, |_, a: T, b| a == b)),
                NE => by_type!(ty, [B16 | U16 | S16: u16, B32 | U32 | S32: u32, B64 | U64 | S64: u64],
                    T => each(p, s, |_, a: T, b| a != b)),
                LT => by_type!(ty, [U16: u16, S16: i16, U32: u32, S32: i32, U64: u64, S64: i64],
                    T => each(p, s, |_, a: T, b| a < b)),
                LE => by_type!(ty, [U16: u16, S16: i16, U32: u32, S32: i32, U64: u64, S64: i64],
                    T => each(p, s, |_, a: T, b| a <= b)),
                GT => by_type!(ty, [U16: u16, S16: i16, U32: u32, S32: i32, U64: u64, S64: i64],
                    T => each(p, s, |_, a: T, b| a > b)),
                _ => by_type!(ty, [U16: u16, S16: i16, U32: u32, S32: i32, U64: u64, S64: i64],
                    T => each(p, s, |_, a: T, b| a >= b)),
            }
        }
    };
    form.ok_or_else(|| p.unknown())
}

fn selp(p: &mut Parse<'_>) -> Result<Form, String> {
    use crate::exec::regs::Taint;
    let isa = p.isa;
    let ty = p.ty()?;
    let form = by_type!(ty, [B16 | U16 | S16 | F16 | BF16: u16, B32 | U32 | S32 | F16x2 | BF16x2: u32,
            B64 | U64 | S64: u64, F32: f32, F64: f64],
        T => isa.map3(|a: T, b: T, c: bool| if c { a } else { b }))
    .ok_or_else(|| p.unknown())?;
    Ok(Form { taint: Taint::Select, ..form })
}

/// A float that is -0 counts as not negative; NaN chooses b.
fn slct(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.once;
    let ftz = p.take("ftz");
    let ty = p.ty()?;
    match (p.ty()?, ftz) {
        (Type::S32, false) => by_type!(ty, [B16 | U16 | S16: u16, B32 | U32 | S32: u32, B64 | U64 | S64: u64,
                F32: f32, F64: f64],
            T => isa.map3(|a: T, b: T, c: i32| if c >= 0 { a } else { b })),
        (Type::F32, false) => by_type!(ty, [B16 | U16 | S16: u16, B32 | U32 | S32: u32, B64 | U64 | S64: u64,
                F32: f32, F64: f64],
            T => isa.map3(|a: T, b: T, c: f32| if c >= 0.0 { a } else { b })),
        (Type::F32, true) => by_type!(ty, [B16 | U16 | S16: u16, B32 | U32 | S32: u32, B64 | U64 | S64: u64,
                F32: f32, F64: f64],
            T => isa.map3(|a: T, b: T, c: f32| if flush(c) >= 0.0 { a } else { b })),
        _ => None,
    }
    .ok_or_else(|| p.unknown())
}

fn testp(p: &mut Parse<'_>) -> Result<Form, String> {
    use std::num::FpCategory as C;
    const KINDS: [(&str, u64); 6] =
        [("finite", 0), ("infinite", 1), ("number", 2), ("notanumber", 3), ("normal", 4), ("subnormal", 5)];
    let isa = p.once;
    let kind = p.pick(&KINDS).ok_or_else(|| p.unknown())?;
    let ty = p.ty()?;
    by_type!(ty, [F32: f32, F64: f64], T => isa.map1_imm(kind, |kind, a: T| match kind {
        0 => a.is_finite(),
        1 => a.is_infinite(),
        2 => !a.is_nan(),
        3 => a.is_nan(),
        // The manual counts zeros as normal.
        4 => matches!(a.classify(), C::Normal | C::Zero),
        _ => a.classify() == C::Subnormal,
    }))
    .ok_or_else(|| p.unknown())
}
