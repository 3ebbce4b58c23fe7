//! Arithmetic on rows of f16 and bf16.
//!
//! All lanes go through one step after the other (to f32, the operation, back), as compilers make vector loops of such
//! short steps and not of the whole.

use super::float32::extremum;
use super::half::{FTZ, Half, RELU, SAT, flush};
use super::lanes::{Body, Isa, Outcome, lanes, set_row, simple};
use crate::exec::regs::{File, Form, LANES, Literal, Mask, Op, Regs, Row, Source};
use std::marker::PhantomData;

/// An operation on halves.
pub(crate) trait RowOp: Copy + 'static {
    /// Sources.
    const SOURCES: usize;
    /// Of the halves that start at bit `at` of the sources, in the low bits of the result. `m` are the form's constants,
    /// `n` is [`lanes`], asked for once.
    fn run<H: Half>(m: u64, sources: [&Row; 3], at: u32, n: usize) -> Row;
}

/// An operation on numbers; what it returns is rounded by [`Half::narrow`].
pub(crate) trait Arithmetic: Copy + 'static {
    /// Sources.
    const SOURCES: usize;
    /// Of one lane.
    fn apply<H: Half>(a: f32, b: f32, c: f32) -> f32;
}

/// `add`: sums lose nothing in f32 that matters to either format.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Add;
/// `sub`
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sub;
/// `mul`
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mul;
/// `fma`
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fma;
/// `min` and `max`. Their flags stand above [`CHOICE`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Extreme;

impl Arithmetic for Add {
    const SOURCES: usize = 2;
    #[inline(always)]
    fn apply<H: Half>(a: f32, b: f32, _: f32) -> f32 {
        a + b
    }
}

impl Arithmetic for Sub {
    const SOURCES: usize = 2;
    #[inline(always)]
    fn apply<H: Half>(a: f32, b: f32, _: f32) -> f32 {
        a - b
    }
}

impl Arithmetic for Mul {
    const SOURCES: usize = 2;
    #[inline(always)]
    fn apply<H: Half>(a: f32, b: f32, _: f32) -> f32 {
        H::mul(a, b)
    }
}

impl Arithmetic for Fma {
    const SOURCES: usize = 3;
    #[inline(always)]
    fn apply<H: Half>(a: f32, b: f32, c: f32) -> f32 {
        H::fma(a, b, c)
    }
}

/// To f32.
#[inline(always)]
fn widen<H: Half>(m: u64, row: &Row, at: u32, n: usize, out: &mut [f32; LANES]) {
    if m & FTZ != 0 {
        for lane in 0..n {
            out[lane] = H::widen(flush::<H>((row[lane] >> at) as u16));
        }
    } else {
        for lane in 0..n {
            out[lane] = H::widen((row[lane] >> at) as u16);
        }
    }
}

impl<O: Arithmetic> RowOp for O {
    const SOURCES: usize = O::SOURCES;
    #[inline(always)]
    fn run<H: Half>(m: u64, sources: [&Row; 3], at: u32, n: usize) -> Row {
        let [mut a, mut b, mut c] = [[0f32; LANES]; 3];
        widen::<H>(m, sources[0], at, n, &mut a);
        widen::<H>(m, sources[1], at, n, &mut b);
        if O::SOURCES == 3 {
            widen::<H>(m, sources[2], at, n, &mut c);
        }
        let mut values = [0f32; LANES];
        for lane in 0..n {
            values[lane] = O::apply::<H>(a[lane], b[lane], c[lane]);
        }
        let mut bits: Row = [0; LANES];
        for lane in 0..n {
            bits[lane] = u32::from(H::narrow(values[lane]));
        }
        if m & (FTZ | SAT | RELU) != 0 {
            for lane in 0..n {
                let mut x = bits[lane];
                if m & FTZ != 0 {
                    x = u32::from(flush::<H>(x as u16));
                }
                if m & SAT != 0 {
                    // Negative, NaN or zero; above one; else it stays.
                    let one = u32::from(H::narrow(1.0));
                    x = if x & 0x8000 != 0 || x == 0x7fff { 0 } else { x.min(one) };
                }
                bits[lane] = if m & RELU != 0 && x & 0x8000 != 0 { 0 } else { x };
            }
        }
        bits
    }
}

/// Where the flags of `min` and `max` start in the constants.
pub(crate) const CHOICE: u32 = 8;

impl RowOp for Extreme {
    const SOURCES: usize = 2;
    #[inline(always)]
    fn run<H: Half>(m: u64, sources: [&Row; 3], at: u32, n: usize) -> Row {
        let mut out: Row = [0; LANES];
        for lane in 0..n {
            out[lane] = extreme::<H>(m, sources[0][lane] >> at & 0xffff, sources[1][lane] >> at & 0xffff);
        }
        out
    }
}

/// `min`, `max`: -0 is below +0; of a NaN and a number the number, unless NaNs win.
#[inline(always)]
fn extreme<H: Half>(m: u64, a: u32, b: u32) -> u32 {
    let flags = m >> CHOICE;
    let input = |x: u32| if m & FTZ != 0 { u32::from(flush::<H>(x as u16)) } else { x };
    let (a, b) = (input(a), input(b));
    let signs = if flags & extremum::XORSIGN != 0 { 0x8000 } else { 0 };
    let sign = (a ^ b) & signs;
    let (a, b) = (a & !signs, b & !signs);
    let is_nan = |x: u32| x & 0x7fff > u32::from(H::INFINITY);
    let (nan_a, nan_b) = (is_nan(a), is_nan(b));
    let nan = nan_a & nan_b | (nan_a | nan_b) & (flags & extremum::NAN != 0);
    // As integers, numbers of either sign order as they do as floats, zeros among them.
    let key = |x: u32| {
        let bits = i32::from(x as u16 as i16);
        bits ^ (bits >> 31) & 0x7fff
    };
    let first = if flags & extremum::MAX != 0 { key(a) > key(b) } else { key(a) < key(b) };
    let first = first & !nan_a | nan_b;
    let best = if first { a } else { b } | sign;
    if nan { 0x7fff } else { best }
}

/// `N` halves of a register (1 or 2), of format `H`.
struct Halves<H, O, const N: usize>(PhantomData<fn() -> (H, O)>);

impl<H, O, const N: usize> Clone for Halves<H, O, N> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<H, O, const N: usize> Copy for Halves<H, O, N> {}

impl<H: Half, O: RowOp, const N: usize> Body for Halves<H, O, N> {
    #[inline(always)]
    fn run(self, regs: &mut Regs, op: &Op, mask: Mask) -> Outcome {
        let sources = [0, 1, 2].map(|i| &regs.narrow[op.s[if i < O::SOURCES { i } else { 0 }] as usize]);
        let n = lanes();
        let mut out = O::run::<H>(op.imm, sources, 0, n);
        if N == 2 {
            let high = O::run::<H>(op.imm, sources, 16, n);
            for lane in 0..n {
                out[lane] |= high[lane] << 16;
            }
        }
        set_row(&mut regs.narrow[op.d[0] as usize], &out, mask);
        Ok(())
    }
}

/// The form of an operation on the lower half of each lane (then `literal` is what a literal means), or on both.
pub(crate) fn form<H: Half, O: RowOp>(isa: Isa, m: u64, one: Option<Literal>) -> Form {
    let (run, literal) = match one {
        Some(literal) => (isa.op(Halves::<H, O, 1>(PhantomData)), literal),
        None => (isa.op(Halves::<H, O, 2>(PhantomData)), Literal::Bits),
    };
    let source = Source { file: File::Narrow, literal };
    Form { imm: m, ..simple(run, vec![File::Narrow], vec![source; O::SOURCES]) }
}
