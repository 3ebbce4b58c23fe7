//! `mov`: copies, and packing and unpacking of vectors.

use super::lanes::{Body, Outcome, by_type, set_row, simple};
use super::parse::{Parse, bits_of, file_of};
use crate::exec::regs::{File, Form, LANES, Literal, Mask, Op, Regs, Source, Sync, Taint};
use crate::ptx::ast::{Operand, Type};
use crate::stats::Class;

pub(crate) fn form(p: &mut Parse<'_>) -> Result<Form, String> {
    let form = match p.opcode() {
        "mov" => Form { class: Class::Move, ..mov(p)? },
        "movmatrix" => movmatrix(p)?,
        _ => return Err(p.unknown()),
    };
    Ok(form)
}

/// `d = {a, b, …}`, the first one lowest. `imm` is the bits of one.
#[derive(Clone, Copy)]
struct Pack<const TO_WIDE: bool, const FROM: usize>;

impl<const TO_WIDE: bool, const FROM: usize> Body for Pack<TO_WIDE, FROM> {
    #[inline(always)]
    fn run(self, regs: &mut Regs, op: &Op, mask: Mask) -> Outcome {
        let bits = op.imm & 63;
        let mut out = [0u64; LANES];
        for i in 0..FROM {
            let row = &regs.narrow[op.s[i] as usize];
            for lane in 0..LANES {
                out[lane] |= (u64::from(row[lane]) & ((1 << bits) - 1)) << (bits * i as u64);
            }
        }
        if TO_WIDE {
            set_row(&mut regs.wide[op.d[0] as usize], &out, mask);
        } else {
            set_row(&mut regs.narrow[op.d[0] as usize], &out.map(|x| x as u32), mask);
        }
        Ok(())
    }
}

/// `{a, b, …} = s`
#[derive(Clone, Copy)]
struct Unpack<const FROM_WIDE: bool, const TO: usize>;

impl<const FROM_WIDE: bool, const TO: usize> Body for Unpack<FROM_WIDE, TO> {
    #[inline(always)]
    fn run(self, regs: &mut Regs, op: &Op, mask: Mask) -> Outcome {
        let bits = op.imm & 63;
        let whole: [u64; LANES] = if FROM_WIDE {
            regs.wide[op.s[0] as usize]
        } else {
            regs.narrow[op.s[0] as usize].map(u64::from)
        };
        for i in 0..TO {
            let part = whole.map(|x| (x >> (bits * i as u64) & ((1 << bits) - 1)) as u32);
            set_row(&mut regs.narrow[op.d[i] as usize], &part, mask);
        }
        Ok(())
    }
}

fn mov(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.isa;
    let ty = p.ty()?;
    let vector = |i| match p.operand(i) {
        Some(Operand::Vector(v)) => Some(v.len()),
        _ => None,
    };
    let (to, from) = (vector(0), vector(1));
    let file = file_of(ty).ok_or_else(|| format!("{}-bit registers are not supported", bits_of(ty)))?;
    if let Some(n) = to.or(from) {
        let untyped = matches!(ty, Type::B16 | Type::B32 | Type::B64);
        if to.is_some() && from.is_some() || !untyped || !matches!(n, 2 | 4) {
            return Err(p.unknown());
        }
        let bits = bits_of(ty) / n as u32;
        if bits < 8 {
            return Err(p.unknown());
        }
        let wide = file == File::Wide;
        let parts = vec![File::Narrow; n];
        let part = Source { file: File::Narrow, literal: Literal::Bits };
        let form = if from.is_some() {
            let run = match (wide, n) {
                (true, 2) => isa.op(Pack::<true, 2>),
                (true, _) => isa.op(Pack::<true, 4>),
                (false, 2) => isa.op(Pack::<false, 2>),
                (false, _) => isa.op(Pack::<false, 4>),
            };
            simple(run, vec![file], vec![part; n])
        } else {
            let run = match (wide, n) {
                (true, 2) => isa.op(Unpack::<true, 2>),
                (true, _) => isa.op(Unpack::<true, 4>),
                (false, 2) => isa.op(Unpack::<false, 2>),
                (false, _) => isa.op(Unpack::<false, 4>),
            };
            simple(run, parts, vec![Source { file, literal: Literal::Bits }])
        };
        return Ok(Form { imm: u64::from(bits), ..form });
    }
    // Literals of `mov.f32` and the like are numbers, all others are bits.
    by_type!(ty, [Pred: bool, B16 | U16 | S16: u16, F16: super::lanes::F16, BF16: super::lanes::BF16,
            B32 | U32 | S32 | F16x2 | BF16x2: u32, B64 | U64 | S64: u64, F32: f32, F64: f64],
        T => isa.map1(|a: T| a))
    .ok_or_else(|| p.unknown())
}

/// Transposes an 8 x 8 matrix of 16-bit elements: lane 4g + t holds row g, columns 2t and 2t + 1.
#[derive(Clone, Copy)]
struct Transpose;

impl Body for Transpose {
    #[inline(always)]
    fn run(self, regs: &mut Regs, op: &Op, mask: Mask) -> Outcome {
        let row = &regs.narrow[op.s[0] as usize];
        let element = |r: usize, c: usize| row[(4 * r + c / 2) % LANES] >> (16 * (c % 2)) & 0xffff;
        let out = std::array::from_fn(|lane| {
            let (g, t) = (lane / 4, lane % 4);
            element(2 * t, g) | element(2 * t + 1, g) << 16
        });
        set_row(&mut regs.narrow[op.d[0] as usize], &out, mask);
        Ok(())
    }
}

fn movmatrix(p: &mut Parse<'_>) -> Result<Form, String> {
    if !["sync", "aligned", "m8n8", "trans"].into_iter().all(|m| p.take(m)) || p.ty()? != Type::B16 {
        return Err(p.unknown());
    }
    let source = Source { file: File::Narrow, literal: Literal::Bits };
    Ok(Form {
        class: Class::MatrixMove,
        taint: Taint::All,
        aligned: true,
        sync: Sync::Warp,
        ..simple(p.isa.op(Transpose), vec![File::Narrow], vec![source])
    })
}
