//! `mma`: products of small matrices that a warp holds in its registers.
//!
//! Floating point, by default: each element of D starts as C and takes up the products in order of k by one fused
//! multiply-add each, in f32 (f64 for f64); f16 results are rounded once at the end. Products are exact either way. With
//! `Options::mma_truncation` products are summed block by block as tensor cores do: a block's products and the sum so
//! far are cut to a fixed number of bits below the largest exponent and added exactly, and the sum is cut to f32. Block
//! size and bits follow the published models of the cards; neither mode gives a card's bits in all cases.
//!
//! Integers are exact, wrap around, or saturate with `.satfinite`.

use super::float32::canonical;
use super::fp8::{E4M3, E5M2, Eight};
use super::half::{Binary16, Brain16, Half};
use super::lanes::{Body, Outcome, set_row, simple};
use super::mma_layout as layout;
use super::parse::{Parse, flag};
use super::soft::{self, Round};
use crate::exec::regs::{File, Form, LANES, Literal, Mask, Op, OpFn, Regs, Row, Source, Sync, Taint};
use crate::ptx::ast::Type;
use crate::stats::Class;
use std::marker::PhantomData;

/// Elements of a floating-point operand.
trait Element: Copy + 'static {
    /// In a register.
    const PER: usize;
    /// Element `j` of a register; `kind` tells formats of one size apart.
    fn get(word: u32, j: usize, kind: u64) -> f32;
}

#[derive(Clone, Copy)]
struct Halves<H>(PhantomData<H>);
impl<H: Half> Element for Halves<H> {
    const PER: usize = 2;
    #[inline(always)]
    fn get(word: u32, j: usize, _: u64) -> f32 {
        H::widen((word >> (16 * j)) as u16)
    }
}

#[derive(Clone, Copy)]
struct Tf32;
impl Element for Tf32 {
    const PER: usize = 1;
    #[inline(always)]
    fn get(word: u32, _: usize, _: u64) -> f32 {
        f32::from_bits(word & !0x1fff)
    }
}

/// e4m3 (kind 0) or e5m2.
#[derive(Clone, Copy)]
struct Bytes;
impl Element for Bytes {
    const PER: usize = 4;
    #[inline(always)]
    fn get(word: u32, j: usize, kind: u64) -> f32 {
        let byte = word >> (8 * j);
        if kind == 0 { E4M3::value(byte) } else { E5M2::value(byte) }
    }
}

// Constants of the floating-point operations: kinds of A and B, the truncating mode, elements of a block, bits kept.
const KIND_B: u32 = 1;
const TRUNCATE: u64 = 1 << 2;
const BLOCK: u32 = 8;
const KEPT: u32 = 16;

/// A floating-point shape with 16 rows, `K` deep, with f16 (`H`) or f32 results.
#[derive(Clone, Copy)]
struct Float<E, const K: usize, const H: bool>(PhantomData<E>);

impl<E: Element, const K: usize, const H: bool> Body for Float<E, K, H> {
    #[inline(always)]
    fn run(self, regs: &mut Regs, op: &Op, mask: Mask) -> Outcome {
        let na = layout::registers(16 * K, E::PER);
        let nb = layout::registers(8 * K, E::PER);
        let sources = op.many_sources();
        let mut a = [[0f32; K]; 16];
        for r in 0..na {
            let row = &regs.narrow[sources[r] as usize];
            for j in 0..E::PER {
                let values = row.map(|x| E::get(x, j, op.imm & 1));
                for lane in 0..LANES {
                    let (i, k) = layout::a(lane, r, 16, E::PER);
                    a[i][k + j] = values[lane];
                }
            }
        }
        let mut b = [[0f32; 8]; K];
        for r in 0..nb {
            let row = &regs.narrow[sources[na + r] as usize];
            for j in 0..E::PER {
                let values = row.map(|x| E::get(x, j, op.imm >> KIND_B & 1));
                for lane in 0..LANES {
                    let (k, n) = layout::b(lane, r, E::PER);
                    b[k + j][n] = values[lane];
                }
            }
        }
        let mut c = [[0f32; 8]; 16];
        let nc = if H { 2 } else { 4 };
        for r in 0..nc {
            let row = &regs.narrow[sources[na + nb + r] as usize];
            for lane in 0..LANES {
                if H {
                    let (i, n) = layout::c(lane, 2 * r);
                    c[i][n] = Binary16::widen(row[lane] as u16);
                    c[i][n + 1] = Binary16::widen((row[lane] >> 16) as u16);
                } else {
                    let (i, n) = layout::c(lane, r);
                    c[i][n] = f32::from_bits(row[lane]);
                }
            }
        }
        if op.imm & TRUNCATE != 0 {
            truncating(&a, &b, &mut c, op.imm);
        } else {
            multiply(&a, &b, &mut c, f32::mul_add);
        }
        for r in 0..nc {
            let mut out = [0; LANES];
            for lane in 0..LANES {
                out[lane] = if H {
                    let (i, n) = layout::c(lane, 2 * r);
                    u32::from(Binary16::narrow(c[i][n])) | u32::from(Binary16::narrow(c[i][n + 1])) << 16
                } else {
                    let (i, n) = layout::c(lane, r);
                    canonical(c[i][n]).to_bits()
                };
            }
            set_row(&mut regs.narrow[op.many_destinations()[r] as usize], &out, mask);
        }
        Ok(())
    }
}

/// Eight rows at a time, so that their sums stay in registers and do not wait for each other. `step` is x y + sum.
#[inline(always)]
fn multiply<const M: usize, const K: usize>(
    a: &[[f32; K]; M],
    b: &[[f32; 8]; K],
    c: &mut [[f32; 8]; M],
    step: impl Fn(f32, f32, f32) -> f32,
) {
    for (a, c) in a.chunks_exact(8).zip(c.chunks_exact_mut(8)) {
        let mut sum = [[0f32; 8]; 8];
        sum.copy_from_slice(c);
        for k in 0..K {
            for i in 0..8 {
                let x = a[i][k];
                for n in 0..8 {
                    sum[i][n] = step(x, b[k][n], sum[i][n]);
                }
            }
        }
        c.copy_from_slice(&sum);
    }
}

fn truncating<const K: usize>(a: &[[f32; K]; 16], b: &[[f32; 8]; K], c: &mut [[f32; 8]; 16], imm: u64) {
    let block = (imm >> BLOCK & 0xff) as usize;
    let kept = (imm >> KEPT & 0xff) as i32;
    for i in 0..16 {
        for n in 0..8 {
            let mut k = 0;
            while k < K {
                let end = (k + block.max(1)).min(K);
                let terms = (k..end).map(|k| (a[i][k], b[k][n]));
                c[i][n] = block_sum(terms, c[i][n], kept);
                k = end;
            }
        }
    }
}

/// The exponent of a number that is not zero.
fn exponent(x: f64) -> i32 {
    (x.to_bits() >> 52 & 0x7ff) as i32 - 1023
}

/// 2^n, for n of f64's normal range.
fn power(n: i32) -> f64 {
    f64::from_bits(((n + 1023) as u64) << 52)
}

/// The sum of products and `c`, each cut `kept` bits below the largest exponent; cut to f32 at the end.
fn block_sum(terms: impl Iterator<Item = (f32, f32)> + Clone, c: f32, kept: i32) -> f32 {
    let product = |(x, y): (f32, f32)| f64::from(x) * f64::from(y);
    let c64 = f64::from(c);
    if !c.is_finite() || terms.clone().any(|t| !product(t).is_finite()) {
        return canonical(terms.fold(c64, |s, t| s + product(t)) as f32);
    }
    // A product counts with the sum of its factors' exponents, though it may be up to twice as large.
    let largest = terms
        .clone()
        .filter(|&t| product(t) != 0.0)
        .map(|(x, y)| exponent(f64::from(x)) + exponent(f64::from(y)))
        .chain((c != 0.0).then(|| exponent(c64)))
        .max();
    let Some(largest) = largest else {
        return terms.fold(c64, |s, t| s + product(t)) as f32;
    };
    let scale = power(kept - largest);
    let cut = |x: f64| (x * scale) as i64;
    let sum = terms.fold(cut(c64), |s, t| s + cut(product(t)));
    let value = sum as f64 * power(largest - kept);
    if value.abs() >= power(128) {
        return f32::INFINITY.copysign(value as f32);
    }
    f32::from_bits(soft::from_f64(value, soft::F32, Round::Zero) as u32)
}

// Constants of the integer operations.
const SIGNED_A: u64 = 1;
const SIGNED_B: u64 = 2;
const SATURATE: u64 = 4;

/// An integer shape with `M` rows, `K` deep, `PER` elements in a register.
#[derive(Clone, Copy)]
struct Integer<const M: usize, const K: usize, const PER: usize>;

impl<const M: usize, const K: usize, const PER: usize> Body for Integer<M, K, PER> {
    #[inline(always)]
    fn run(self, regs: &mut Regs, op: &Op, mask: Mask) -> Outcome {
        let na = layout::registers(M * K, PER);
        let nb = layout::registers(8 * K, PER);
        let nc = M / 4;
        let (sources, destinations) = operands(op, nc, na + nb + nc);
        let bits = 32 / PER as u32;
        // Extended by the sign; what that filled is cut off again if there is none.
        let keep = |signed: u64| if op.imm & signed != 0 { -1 } else { (1 << bits) - 1 };
        let element = |word: u32, j: usize, keep: i32| {
            ((word << (32 - bits * (j as u32 + 1))) as i32 >> (32 - bits) & keep) as f32
        };
        // In f32, which is faster and exact: sums are below 2^24.
        let mut a = [[0f32; K]; M];
        let mut b = [[0f32; 8]; K];
        for r in 0..na {
            let row: &Row = &regs.narrow[sources[r] as usize];
            let keep = keep(SIGNED_A);
            for j in 0..PER {
                let values = row.map(|x| element(x, j, keep));
                for lane in 0..LANES {
                    let (i, k) = layout::a(lane, r, M, PER);
                    a[i][k + j] = values[lane];
                }
            }
        }
        for r in 0..nb {
            let row: &Row = &regs.narrow[sources[na + r] as usize];
            let keep = keep(SIGNED_B);
            for j in 0..PER {
                let values = row.map(|x| element(x, j, keep));
                for lane in 0..LANES {
                    let (k, n) = layout::b(lane, r, PER);
                    b[k + j][n] = values[lane];
                }
            }
        }
        let mut sums = [[0f32; 8]; M];
        multiply(&a, &b, &mut sums, |x, y, sum| x * y + sum);
        // A destination may be a later register of C, so all are read before any is written.
        let mut out = [[0; LANES]; 4];
        for r in 0..nc {
            let c: &Row = &regs.narrow[sources[na + nb + r] as usize];
            for lane in 0..LANES {
                let (i, n) = layout::c(lane, r);
                let (c, sum) = (c[lane] as i32, sums[i][n] as i32);
                out[r][lane] =
                    if op.imm & SATURATE != 0 { c.saturating_add(sum) } else { c.wrapping_add(sum) } as u32;
            }
        }
        for (&d, out) in destinations.iter().zip(&out) {
            set_row(&mut regs.narrow[d as usize], out, mask);
        }
        Ok(())
    }
}

/// An f64 shape with `M` rows, `K` deep.
#[derive(Clone, Copy)]
struct Double<const M: usize, const K: usize>;

impl<const M: usize, const K: usize> Body for Double<M, K> {
    #[inline(always)]
    fn run(self, regs: &mut Regs, op: &Op, mask: Mask) -> Outcome {
        let (na, nb, nc) = (M * K / LANES, 8 * K / LANES, M / 4);
        let (sources, destinations) = operands(op, nc, na + nb + nc);
        let read = |i: usize| &regs.wide[sources[i] as usize];
        let mut a = [[0f64; K]; M];
        let mut b = [[0f64; 8]; K];
        let mut c = [[0f64; 8]; M];
        for lane in 0..LANES {
            for r in 0..na {
                let (i, k) = layout::a(lane, r, M, 1);
                a[i][k] = f64::from_bits(read(r)[lane]);
            }
            for r in 0..nb {
                let (k, n) = layout::b(lane, r, 1);
                b[k][n] = f64::from_bits(read(na + r)[lane]);
            }
            for r in 0..nc {
                let (i, n) = layout::c(lane, r);
                c[i][n] = f64::from_bits(read(na + nb + r)[lane]);
            }
        }
        for i in 0..M {
            for k in 0..K {
                for n in 0..8 {
                    c[i][n] = a[i][k].mul_add(b[k][n], c[i][n]);
                }
            }
        }
        for (r, &d) in destinations.iter().enumerate() {
            let out = std::array::from_fn(|lane| {
                let (i, n) = layout::c(lane, r);
                super::float64::canonical(c[i][n]).to_bits()
            });
            set_row(&mut regs.wide[d as usize], &out, mask);
        }
        Ok(())
    }
}

/// Sources and destinations, wherever the operation keeps them.
#[inline(always)]
fn operands(op: &Op, nd: usize, ns: usize) -> (&[u16], &[u16]) {
    if op.many.is_empty() { (&op.s[..ns], &op.d[..nd]) } else { (op.many_sources(), op.many_destinations()) }
}

/// Shapes by name: rows and depth.
const SHAPES: [(&str, (usize, usize)); 10] = [
    ("m16n8k4", (16, 4)),
    ("m16n8k8", (16, 8)),
    ("m16n8k16", (16, 16)),
    ("m16n8k32", (16, 32)),
    ("m16n8k64", (16, 64)),
    ("m8n8k4", (8, 4)),
    ("m8n8k16", (8, 16)),
    ("m8n8k32", (8, 32)),
    ("m16n8k128", (16, 128)),
    ("m16n8k256", (16, 256)),
];

/// Registers of A, B, and of C and D, with their file and what a literal C is.
fn shaped(run: OpFn, a: usize, b: usize, c: usize, file: File, literal: Literal, imm: u64) -> Form {
    let mut sources = vec![Source { file, literal: Literal::Bits }; a + b];
    sources.extend(vec![Source { file, literal }; c]);
    Form {
        imm,
        class: Class::Matrix,
        taint: Taint::Matrix,
        aligned: true,
        sync: Sync::Warp,
        ..simple(run, vec![file; c], sources)
    }
}

pub(crate) fn form(p: &mut Parse<'_>) -> Result<Form, String> {
    if !p.take("sync") || !p.take("aligned") {
        return Err(p.unknown());
    }
    let (m, k) = p.pick(&SHAPES).ok_or_else(|| p.unknown())?;
    if !p.take("row") || !p.take("col") {
        return Err(format!("{}: only row.col is supported", p.unknown()));
    }
    let satfinite = p.take("satfinite");
    let f8f6f4 = p.take("kind::f8f6f4");
    let types = (p.ty()?, p.ty()?, p.ty()?, p.ty()?);
    if types.0 != types.3 {
        return Err(p.unknown());
    }
    if f8f6f4 {
        p.need(120)?;
        if types.1 != Type::E4M3 && types.1 != Type::E5M2 || k != 32 {
            return Err(p.unknown());
        }
    }
    let (d, a, b) = (types.0, types.1, types.2);
    match d {
        Type::S32 => integers(p, m, k, a, b, satfinite),
        _ if satfinite => Err(p.unknown()),
        Type::F64 if a == Type::F64 && b == Type::F64 => doubles(p, m, k),
        Type::F32 | Type::F16 if m == 16 => floats(p, k, d == Type::F16, a, b),
        _ => Err(p.unknown()),
    }
}

fn integers(p: &Parse<'_>, m: usize, k: usize, a: Type, b: Type, satfinite: bool) -> Result<Form, String> {
    let isa = p.isa;
    let kind = |ty| match ty {
        Type::S8 => Some((4, true)),
        Type::U8 => Some((4, false)),
        Type::S4 => Some((8, true)),
        Type::U4 => Some((8, false)),
        _ => None,
    };
    let (Some((per, signed_a)), Some((per_b, signed_b))) = (kind(a), kind(b)) else {
        return Err(p.unknown());
    };
    if per != per_b {
        return Err(p.unknown());
    }
    let run = match (m, k, per) {
        (8, 16, 4) => isa.op(Integer::<8, 16, 4>),
        (16, 16, 4) => isa.op(Integer::<16, 16, 4>),
        (16, 32, 4) => isa.op(Integer::<16, 32, 4>),
        (8, 32, 8) => isa.op(Integer::<8, 32, 8>),
        (16, 32, 8) => isa.op(Integer::<16, 32, 8>),
        (16, 64, 8) => isa.op(Integer::<16, 64, 8>),
        _ => return Err(p.unknown()),
    };
    let imm = flag(signed_a, SIGNED_A) | flag(signed_b, SIGNED_B) | flag(satfinite, SATURATE);
    let (na, nb) = (layout::registers(m * k, per), layout::registers(8 * k, per));
    Ok(shaped(run, na, nb, m / 4, File::Narrow, Literal::Bits, imm))
}

fn doubles(p: &Parse<'_>, m: usize, k: usize) -> Result<Form, String> {
    let isa = p.isa;
    let run = match (m, k) {
        (8, 4) => isa.op(Double::<8, 4>),
        (16, 4) => isa.op(Double::<16, 4>),
        (16, 8) => isa.op(Double::<16, 8>),
        (16, 16) => isa.op(Double::<16, 16>),
        _ => return Err(p.unknown()),
    };
    p.need(if m == 8 { 80 } else { 90 })?;
    Ok(shaped(run, m * k / LANES, 8 * k / LANES, m / 4, File::Wide, Literal::F64, 0))
}

fn floats(p: &Parse<'_>, k: usize, half: bool, a: Type, b: Type) -> Result<Form, String> {
    let isa = p.isa;
    let eight = |ty| matches!(ty, Type::E4M3 | Type::E5M2);
    type F16 = Halves<Binary16>;
    type BF16 = Halves<Brain16>;
    let (run, per) = match (a, b, k, half) {
        (Type::F16, Type::F16, 8, false) => (isa.op(Float::<F16, 8, false>(PhantomData)), 2),
        (Type::F16, Type::F16, 8, true) => (isa.op(Float::<F16, 8, true>(PhantomData)), 2),
        (Type::F16, Type::F16, 16, false) => (isa.op(Float::<F16, 16, false>(PhantomData)), 2),
        (Type::F16, Type::F16, 16, true) => (isa.op(Float::<F16, 16, true>(PhantomData)), 2),
        (Type::BF16, Type::BF16, 8, false) => (isa.op(Float::<BF16, 8, false>(PhantomData)), 2),
        (Type::BF16, Type::BF16, 16, false) => (isa.op(Float::<BF16, 16, false>(PhantomData)), 2),
        (Type::TF32, Type::TF32, 4, false) => (isa.op(Float::<Tf32, 4, false>(PhantomData)), 1),
        (Type::TF32, Type::TF32, 8, false) => (isa.op(Float::<Tf32, 8, false>(PhantomData)), 1),
        (a, b, 16, false) if eight(a) && eight(b) => (isa.op(Float::<Bytes, 16, false>(PhantomData)), 4),
        (a, b, 16, true) if eight(a) && eight(b) => (isa.op(Float::<Bytes, 16, true>(PhantomData)), 4),
        (a, b, 32, false) if eight(a) && eight(b) => (isa.op(Float::<Bytes, 32, false>(PhantomData)), 4),
        (a, b, 32, true) if eight(a) && eight(b) => (isa.op(Float::<Bytes, 32, true>(PhantomData)), 4),
        _ => return Err(p.unknown()),
    };
    p.need(if eight(a) { 89 } else { 80 })?;
    let mut imm = u64::from(a == Type::E5M2) | u64::from(b == Type::E5M2) << KIND_B;
    if p.options.mma_truncation {
        let (block, kept) = tensor_core(p.cc, per);
        imm |= TRUNCATE | block << BLOCK | kept << KEPT;
    }
    let literal = if half { Literal::Bits } else { Literal::F32 };
    let (na, nb) = (layout::registers(16 * k, per), layout::registers(8 * k, per));
    Ok(shaped(run, na, nb, if half { 2 } else { 4 }, File::Narrow, literal, imm))
}

/// Products of a block, and bits kept below the largest exponent.
///
/// From measurements in the literature: Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores"
/// (PeerJ CS 7:e330), and MMA-Sim (arXiv 2511.10909).
fn tensor_core(cc: u32, per: usize) -> (u64, u64) {
    match (per, cc >= 90) {
        (4, false) => (16, 13),
        (4, true) => (32, if cc >= 100 { 25 } else { 13 }),
        (2, false) => (8, 24),
        (2, true) => (16, 25),
        (_, false) => (4, 24),
        (_, true) => (8, 25),
    }
}
