//! Logic, shifts and bit fields.

use super::lanes::{Body, Outcome, by_type, lanes, set_predicate, set_row, simple, source};
use super::parse::Parse;
use crate::exec::regs::{File, Form, LANES, Mask, Op, Regs};
use crate::ptx::ast::Type;
use crate::stats::Class;

pub(crate) fn form(p: &mut Parse<'_>) -> Result<Form, String> {
    let form = match p.opcode() {
        "and" | "or" | "xor" | "not" | "cnot" => logic(p),
        "shl" | "shr" => shift(p),
        "shf" => funnel(p),
        "bfe" | "bfi" => field(p),
        "bfind" | "brev" | "clz" | "popc" => count(p),
        "fns" | "bmsk" | "szext" => rare(p),
        "prmt" => prmt(p),
        "lop3" => lop3(p),
        _ => Err(p.unknown()),
    }?;
    Ok(Form { class: Class::Integer, ..form })
}

fn logic(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.isa;
    let ty = p.ty()?;
    match p.opcode() {
        "and" => by_type!(ty, [Pred: bool, B16: u16, B32: u32, B64: u64], T => isa.map2(|a: T, b: T| a & b)),
        "or" => by_type!(ty, [Pred: bool, B16: u16, B32: u32, B64: u64], T => isa.map2(|a: T, b: T| a | b)),
        "xor" => by_type!(ty, [Pred: bool, B16: u16, B32: u32, B64: u64], T => isa.map2(|a: T, b: T| a ^ b)),
        "not" => by_type!(ty, [Pred: bool, B16: u16, B32: u32, B64: u64], T => isa.map1(|a: T| !a)),
        _ => by_type!(ty, [B16: u16, B32: u32, B64: u64], T => isa.map1(|a: T| T::from(a == 0))),
    }
    .ok_or_else(|| p.unknown())
}

/// Amounts of the width and more shift everything out; they do not wrap as C's may.
fn shift(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.isa;
    let ty = p.ty()?;
    if p.opcode() == "shl" {
        by_type!(ty, [B16: u16, B32: u32, B64: u64],
            T => isa.map2(|a: T, n: u32| if n < T::BITS { a << n } else { 0 }))
    } else {
        by_type!(ty, [B16 | U16: u16, B32 | U32: u32, B64 | U64: u64],
            T => isa.map2(|a: T, n: u32| if n < T::BITS { a >> n } else { 0 }))
        .or_else(|| {
            by_type!(ty, [S16: i16, S32: i32, S64: i64],
                T => isa.map2(|a: T, n: u32| a >> n.min(T::BITS - 1)))
        })
    }
    .ok_or_else(|| p.unknown())
}

/// `hi:lo` as one number.
#[inline(always)]
fn joined(lo: u32, hi: u32) -> u64 {
    u64::from(hi) << 32 | u64::from(lo)
}

fn funnel(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.isa;
    let left = p.pick(&[("l", true), ("r", false)]).ok_or_else(|| p.unknown())?;
    let wrap = p.pick(&[("wrap", true), ("clamp", false)]).ok_or_else(|| p.unknown())?;
    if p.ty()? != Type::B32 {
        return Err(p.unknown());
    }
    Ok(match (left, wrap) {
        (true, true) => isa.map3(|a, b, n: u32| (joined(a, b) << (n & 31) >> 32) as u32),
        (true, false) => isa.map3(|a, b, n: u32| (joined(a, b) << n.min(32) >> 32) as u32),
        (false, true) => isa.map3(|a, b, n: u32| (joined(a, b) >> (n & 31)) as u32),
        (false, false) => isa.map3(|a, b, n: u32| (joined(a, b) >> n.min(32)) as u32),
    })
}

/// `len` ones.
#[inline(always)]
fn ones(len: u32) -> u64 {
    if len >= 64 { u64::MAX } else { (1 << len) - 1 }
}

/// `bfe`: bits past the end are the sign (unsigned: zero), a field of no bits is 0.
#[inline(always)]
fn extract(a: u64, width: u32, pos: u32, len: u32, signed: bool) -> u64 {
    let (pos, len) = (pos & 0xff, len & 0xff);
    if len == 0 {
        return 0;
    }
    let field = if pos >= width { 0 } else { a >> pos } & ones(len);
    // The bit that fills up: the field's last one that exists.
    let top = (pos + len - 1).min(width - 1);
    let negative = signed && a >> top & 1 != 0;
    let have = width.saturating_sub(pos).min(len);
    if negative { field | !ones(have) } else { field }
}

#[inline(always)]
fn insert(a: u64, b: u64, width: u32, pos: u32, len: u32) -> u64 {
    let (pos, len) = (pos & 0xff, len & 0xff);
    if pos >= width {
        return b;
    }
    let mask = ones(len) << pos;
    b & !mask | a << pos & mask
}

fn field(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.isa;
    let ty = p.ty()?;
    Ok(match (p.opcode(), ty) {
        ("bfe", Type::U32) => isa.map3(|a: u32, pos, len| extract(u64::from(a), 32, pos, len, false) as u32),
        ("bfe", Type::S32) => isa.map3(|a: u32, pos, len| extract(u64::from(a), 32, pos, len, true) as u32),
        ("bfe", Type::U64) => isa.map3(|a: u64, pos, len| extract(a, 64, pos, len, false)),
        ("bfe", Type::S64) => isa.map3(|a: u64, pos, len| extract(a, 64, pos, len, true)),
        ("bfi", Type::B32) => {
            isa.map4(|a: u32, b: u32, pos, len| insert(u64::from(a), u64::from(b), 32, pos, len) as u32)
        }
        ("bfi", Type::B64) => isa.map4(|a: u64, b: u64, pos, len| insert(a, b, 64, pos, len)),
        _ => return Err(p.unknown()),
    })
}

fn count(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.once;
    let amount = p.opcode() == "bfind" && p.take("shiftamt");
    let ty = p.ty()?;
    match p.opcode() {
        "popc" => by_type!(ty, [B32: u32, B64: u64], T => isa.map1(|a: T| a.count_ones())),
        "clz" => by_type!(ty, [B32: u32, B64: u64], T => isa.map1(|a: T| a.leading_zeros())),
        "brev" => by_type!(ty, [B32: u32, B64: u64], T => isa.map1(|a: T| a.reverse_bits())),
        _ if amount => by_type!(ty, [U32: u32, U64: u64],
            T => isa.map1(|a: T| if a == 0 { u32::MAX } else { a.leading_zeros() }))
        .or_else(|| {
            by_type!(ty, [S32: i32, S64: i64], T => isa.map1(|a: T| {
                let a = if a < 0 { !a } else { a };
                if a == 0 { u32::MAX } else { a.leading_zeros() }
            }))
        }),
        _ => by_type!(ty, [U32: u32, U64: u64],
            T => isa.map1(|a: T| (T::BITS - 1).wrapping_sub(a.leading_zeros())))
        .or_else(|| {
            by_type!(ty, [S32: i32, S64: i64], T => isa.map1(|a: T| {
                let a = if a < 0 { !a } else { a };
                (T::BITS - 1).wrapping_sub(a.leading_zeros())
            }))
        }),
    }
    .ok_or_else(|| p.unknown())
}

/// Position of the `|offset|`-th set bit from `base` on, upwards or downwards.
fn nth_set(mask: u32, base: u32, offset: i32) -> u32 {
    if base > 31 {
        return u32::MAX;
    }
    let (from, step) = (base as i32, if offset < 0 { -1 } else { 1 });
    if offset == 0 {
        return if mask >> base & 1 != 0 { base } else { u32::MAX };
    }
    let mut left = offset.unsigned_abs();
    let mut at = from;
    while (0..32).contains(&at) {
        if mask >> at & 1 != 0 {
            left -= 1;
            if left == 0 {
                return at as u32;
            }
        }
        at += step;
    }
    u32::MAX
}

/// `len` ones from bit `pos` on.
#[inline(always)]
fn bit_mask(pos: u32, len: u32, clamp: bool) -> u32 {
    if clamp && pos >= 32 {
        return 0;
    }
    let len = if clamp { len.min(32) } else { len & 31 };
    (ones(len) << (pos & 31)) as u32
}

/// Keeps the low `n` bits and extends them.
#[inline(always)]
fn extend(a: u32, n: u32, clamp: bool, signed: bool) -> u32 {
    if clamp && n >= 32 {
        return a;
    }
    let n = n & 31;
    if n == 0 {
        return 0;
    }
    let up = 32 - n;
    if signed { ((a << up) as i32 >> up) as u32 } else { a << up >> up }
}

fn rare(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.once;
    if p.opcode() == "fns" {
        if p.ty()? != Type::B32 {
            return Err(p.unknown());
        }
        return Ok(isa.map3(|mask: u32, base: u32, offset: i32| nth_set(mask, base, offset)));
    }
    let clamp = p.pick(&[("clamp", true), ("wrap", false)]).ok_or_else(|| p.unknown())?;
    let imm = u64::from(clamp);
    match (p.opcode(), p.ty()?) {
        ("bmsk", Type::B32) => Ok(isa.map2_imm(imm, |m, a, b| bit_mask(a, b, m != 0))),
        ("szext", Type::U32) => Ok(isa.map2_imm(imm, |m, a, b| extend(a, b, m != 0, false))),
        ("szext", Type::S32) => Ok(isa.map2_imm(imm, |m, a, b| extend(a, b, m != 0, true))),
        _ => Err(p.unknown()),
    }
}

/// A byte of the eight by a selector whose bit 3 asks for the byte's sign instead.
#[inline(always)]
fn pick_byte(x: u64, selector: u32) -> u32 {
    let byte = (x >> (8 * (selector & 7))) as u8;
    if selector & 8 != 0 { u32::from((byte as i8 >> 7) as u8) } else { u32::from(byte) }
}

/// Selectors of the modes, by the low two bits of the control: four nibbles, the low one for the lowest byte.
const MODES: [(&str, [u16; 4]); 6] = [
    ("f4e", [0x3210, 0x4321, 0x5432, 0x6543]),
    ("b4e", [0x5670, 0x6701, 0x7012, 0x0123]),
    ("rc8", [0x0000, 0x1111, 0x2222, 0x3333]),
    ("ecl", [0x3210, 0x3211, 0x3222, 0x3333]),
    ("ecr", [0x0000, 0x1110, 0x2210, 0x3210]),
    ("rc16", [0x1010, 0x3232, 0x1010, 0x3232]),
];

#[inline(always)]
fn permute(a: u32, b: u32, selectors: u32) -> u32 {
    let x = joined(a, b);
    pick_byte(x, selectors)
        | pick_byte(x, selectors >> 4) << 8
        | pick_byte(x, selectors >> 8) << 16
        | pick_byte(x, selectors >> 12) << 24
}

fn prmt(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.isa;
    let mode = p.pick(&MODES);
    if p.ty()? != Type::B32 {
        return Err(p.unknown());
    }
    Ok(match mode {
        None => isa.map3(permute),
        Some(table) => {
            // The highest nibble of a mode's selectors is at most 7, but `imm` keeps its upper byte for itself: the
            // table has 3 bits for each.
            let packed = table.iter().rev().fold(0u64, |all, &s| {
                (0..4).rev().fold(all, |all, i| all << 3 | u64::from(s >> (4 * i) & 7))
            });
            isa.map3_imm(packed, |table, a, b, c: u32| {
                let s = (table >> (12 * (c & 3))) as u32;
                permute(a, b, s & 7 | (s & 0x38) << 1 | (s & 0x1c0) << 2 | (s & 0xe00) << 3)
            })
        }
    })
}

/// Any function of three bits, by its table: bit 4a + 2b + c is the result.
#[inline(always)]
fn by_table(table: u64, a: u32, b: u32, c: u32) -> u32 {
    let bit = |i: u32| if table >> i & 1 != 0 { u32::MAX } else { 0 };
    let by_c = |i: u32| bit(i) ^ c & (bit(i) ^ bit(i + 1));
    let by_b = |i: u32| {
        let (zero, one) = (by_c(i), by_c(i + 2));
        zero ^ b & (zero ^ one)
    };
    let (zero, one) = (by_b(0), by_b(4));
    zero ^ a & (zero ^ one)
}

/// `lop3.BoolOp d|p, a, b, c, table, q`
#[derive(Clone, Copy)]
struct Lop3Pred;

impl Body for Lop3Pred {
    #[inline(always)]
    fn run(self, regs: &mut Regs, op: &Op, mask: Mask) -> Outcome {
        let &[a, b, c, _, q] = op.many_sources() else { return Ok(()) };
        let &[d, p] = op.many_destinations() else { return Ok(()) };
        let flip = if op.imm >> (super::lanes::NEGATED + 4) & 1 != 0 { Mask::MAX } else { 0 };
        let q = regs.preds[q as usize] ^ flip;
        let mut out = [0; LANES];
        let (a, b, c) = (&regs.narrow[a as usize], &regs.narrow[b as usize], &regs.narrow[c as usize]);
        for lane in 0..lanes() {
            out[lane] = by_table(op.imm & 0xff, a[lane], b[lane], c[lane]);
        }
        let set = super::lanes::gather_bits(&out.map(|x| u8::from(x != 0)));
        let value = if op.imm >> 8 & 1 != 0 { set & q } else { set | q };
        set_row(&mut regs.narrow[d as usize], &out, mask);
        set_predicate(regs, p, value, mask);
        Ok(())
    }
}

fn lop3(p: &mut Parse<'_>) -> Result<Form, String> {
    let isa = p.isa;
    let and = p.pick(&[("and", true), ("or", false)]);
    if p.ty()? != Type::B32 {
        return Err(p.unknown());
    }
    let table = p.constant(4)?;
    let Ok(table) = u8::try_from(table) else {
        return Err(format!("the table {table} of lop3 is not within 0 to 255"));
    };
    let table = u64::from(table);
    Ok(match and {
        None => isa.map4_imm(table, |table, a, b, c, _: u32| by_table(table, a, b, c)),
        Some(and) => {
            let n = source::<u32>();
            let sources = vec![n, n, n, n, source::<bool>()];
            let form = simple(isa.op(Lop3Pred), vec![File::Narrow, File::Pred], sources);
            Form { imm: table | u64::from(and) << 8, ..form }
        }
    })
}
