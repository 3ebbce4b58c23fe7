//! What instructions without memory and control flow do.
//!
//! [`form`] looks at an instruction once, when its kernel is loaded, and returns a function that runs it on the
//! registers of a warp.

#![allow(clippy::needless_range_loop, reason = "a lane is the index of several rows at once")]

mod bits;
mod compare;
mod convert;
mod convert_packed;
mod float32;
mod float64;
mod fp8;
mod half;
mod half_rows;
mod integer;
mod lanes;
mod mma;
mod mma_layout;
mod moves;
mod parse;
mod shuffle;
mod soft;
mod special;
#[cfg(test)]
mod tests;

use crate::exec::regs::Form;
use crate::options::Options;
use crate::ptx::ast::{Function, Instruction, Type};
use parse::Parse;

/// How an instruction is carried out; `None` if it is none of this module's (memory, control flow, unknown).
///
/// Predicate operands may be negated (`!p`): the operation takes care of it, the row is that of `p`.
///
/// # Errors
/// A sentence, for a form that the manual does not have or that is not supported here.
pub fn form(
    instruction: &Instruction,
    function: &Function,
    cc: u32,
    options: &Options,
) -> Result<Option<Form>, String> {
    let mut p = Parse::new(instruction, function, cc, options);
    let form = match choose(&mut p) {
        Some(form) => form?,
        None => return Ok(None),
    };
    p.finish(form).map(Some)
}

/// The module of an opcode.
fn choose(p: &mut Parse<'_>) -> Option<Result<Form, String>> {
    Some(match p.opcode() {
        "add" | "sub" | "mul" | "mad" | "fma" | "min" | "max" | "abs" | "neg" => match p.last_type() {
            Some(Type::F32) => float32::form(p),
            Some(Type::F64) => float64::form(p),
            Some(Type::F32x2) => float64::pairs(p),
            Some(Type::F16 | Type::BF16 | Type::F16x2 | Type::BF16x2) => half::form(p),
            _ => integer::form(p),
        },
        "div" => match p.last_type() {
            Some(Type::F32 | Type::F64) => special::form(p),
            _ => integer::form(p),
        },
        "ex2" | "tanh" => match p.last_type() {
            Some(Type::F32) => special::form(p),
            _ => half::form(p),
        },
        "rcp" | "sqrt" | "rsqrt" | "lg2" | "sin" | "cos" => special::form(p),
        "shfl" | "vote" | "match" | "redux" | "elect" | "activemask" => shuffle::form(p),
        "mul24" | "mad24" | "sad" | "rem" | "addc" | "subc" | "madc" | "dp4a" | "dp2a" => integer::form(p),
        "and" | "or" | "xor" | "not" | "cnot" | "shl" | "shr" | "shf" | "bfe" | "bfi" | "bfind" | "brev"
        | "clz" | "popc" | "fns" | "bmsk" | "szext" | "prmt" | "lop3" => bits::form(p),
        "setp" | "set" | "selp" | "slct" | "testp" => compare::form(p),
        "copysign" => float32::form(p),
        "cvt" => convert::form(p),
        "mma" => mma::form(p),
        "movmatrix" => moves::form(p),
        "mov" => moves::form(p),
        _ => return None,
    })
}
