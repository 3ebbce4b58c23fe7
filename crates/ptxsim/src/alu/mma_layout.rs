//! Which lane holds which element of a matrix of `mma`.
//!
//! Lane 4g + t. With n elements in a register, a register of A holds n neighbours in a row, one of B n neighbours in a
//! column:
//!
//! ```text
//! A, register r: row g + 8 (r mod h), columns 4n (r / h) + n t + 0 .. n     (h = rows / 8)
//! B, register r: rows 4n r + n t + 0 .. n, column g
//! C and D, register r: row g + 8 (r / 2), column 2 t + r mod 2
//! C and D of f16, register r: row g + 8 r, columns 2 t and 2 t + 1
//! ```
//!
//! This holds for every shape but `m8n8k4` of f16.

use crate::exec::regs::LANES;

/// Row and first column of a register of A.
#[inline(always)]
pub(crate) fn a(lane: usize, register: usize, rows: usize, per: usize) -> (usize, usize) {
    let halves = rows / 8;
    (lane / 4 + 8 * (register % halves), 4 * per * (register / halves) + per * (lane % 4))
}

/// First row and column of a register of B.
#[inline(always)]
pub(crate) fn b(lane: usize, register: usize, per: usize) -> (usize, usize) {
    (4 * per * register + per * (lane % 4), lane / 4)
}

/// Row and column of a register of C and D.
#[inline(always)]
pub(crate) fn c(lane: usize, register: usize) -> (usize, usize) {
    (lane / 4 + 8 * (register / 2), 2 * (lane % 4) + register % 2)
}

/// Registers of a matrix with `elements` elements, `per` in each.
pub(crate) fn registers(elements: usize, per: usize) -> usize {
    elements / (LANES * per)
}
