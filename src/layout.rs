//! Where things lie. A **tile** is 64 tokens of one kv head; a **page** is a tile of keys and one of values with
//! their pairs: K codes, V codes, K pairs, V pairs, each section rounded up to 16 bytes.
//!
//! Two orders hold the same codes: **row order** (this backend, interchange, exported pages) and **fragment
//! order** (CUDA). Sections have the same offsets in both, so a page is converted section by section and
//! `page_bytes` is the same on every backend.

mod order;

use crate::format::{Affine, Axis, Bits, Format, Granularity};

pub use order::{Order, code_bit, convert_page, pair_bytes};

/// Tokens of a tile.
pub const TILE: usize = 64;

/// Which of the two cached tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operand {
    /// Keys: rows are tokens, columns are channels.
    Key,
    /// Values, transposed: rows are channels, columns are tokens.
    Value,
}

/// Where one operand's codes and pairs lie in a page, in row order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct OperandLayout {
    /// Channels.
    pub dim: usize,
    /// First byte of the codes.
    pub codes: usize,
    /// Bytes of the codes' section.
    pub code_bytes: usize,
    /// Bytes of one token's codes in row order.
    pub row_bytes: usize,
    /// First byte of the pairs or scales.
    pub pairs: usize,
    /// Bytes of the pairs' section.
    pub pair_bytes: usize,
    /// Pairs in a tile: `[token][group]` per token, `[token group][channel]` per channel, one f32 a token for
    /// FP8 with one scale a token and head, else 0.
    pub pair_count: usize,
}

/// Geometry of the pages of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PageLayout {
    /// Keys.
    pub key: OperandLayout,
    /// Values.
    pub value: OperandLayout,
    /// Bytes of a page, a multiple of 16.
    pub page_bytes: usize,
}

impl PageLayout {
    /// The geometry for a pair of formats and head dims (multiples of 16). Sizes beyond the address range saturate.
    pub fn new(key: &Format, value: &Format, key_dim: usize, value_dim: usize) -> Self {
        let mut at = 0usize;
        let mut section = |bytes: usize| {
            let start = at;
            at = at.saturating_add(whole(bytes, 16));
            start
        };
        let kc = section(code_bytes(key, Operand::Key, key_dim));
        let vc = section(code_bytes(value, Operand::Value, value_dim));
        let kp = section(pair_count(key, key_dim).saturating_mul(4));
        let vp = section(pair_count(value, value_dim).saturating_mul(4));
        let operand = |f: &Format, op, dim, codes, pairs| OperandLayout {
            dim,
            codes,
            code_bytes: code_bytes(f, op, dim),
            row_bytes: row_bytes(f.code_bits(), dim),
            pairs,
            pair_bytes: pair_count(f, dim).saturating_mul(4),
            pair_count: pair_count(f, dim),
        };
        Self {
            key: operand(key, Operand::Key, key_dim, kc, kp),
            value: operand(value, Operand::Value, value_dim, vc, vp),
            page_bytes: at,
        }
    }
}

/// Bytes of a row of `dim` codes in row order: a dense bit stream, low bits first, rounded up to whole bytes.
pub const fn row_bytes(bits: usize, dim: usize) -> usize {
    dim.saturating_mul(bits).div_ceil(8)
}

/// Rows of an operand's tile in fragment order, padding included: V rows are padded to 32 at 2 bits and to 64 at
/// 1 and 3 bits.
pub fn padded_rows(format: &Format, operand: Operand, dim: usize) -> usize {
    match operand {
        Operand::Key => TILE,
        Operand::Value => match format {
            Format::Affine(Affine { bits: Bits::B1 | Bits::B3, .. }) => whole(dim, 64),
            Format::Affine(Affine { bits: Bits::B2, .. }) => whole(dim, 32),
            _ => whole(dim, 16),
        },
    }
}

/// `n` rounded up to a multiple.
fn whole(n: usize, multiple: usize) -> usize {
    n.checked_next_multiple_of(multiple).unwrap_or(usize::MAX)
}

/// Bytes of an operand's codes section.
fn code_bytes(format: &Format, operand: Operand, dim: usize) -> usize {
    let cols = if operand == Operand::Key { dim } else { TILE };
    padded_rows(format, operand, dim).saturating_mul(cols).saturating_mul(format.code_bits()) / 8
}

/// Pairs (or FP8 scales) of a tile, 4 bytes each.
fn pair_count(format: &Format, dim: usize) -> usize {
    match format {
        Format::Affine(a) if a.axis == Axis::PerToken => TILE.saturating_mul(dim.div_ceil(a.group.max(1))),
        Format::Affine(a) => TILE.div_ceil(a.group.max(1)).saturating_mul(dim),
        Format::Fp8(f) if f.granularity == Granularity::TokenHead => TILE,
        _ => 0,
    }
}
