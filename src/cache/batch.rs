//! What a step is asked for: the sequences of a batch and their rows in the input tensors.

use super::step::Seat;
use crate::error::{Error, Result};
use crate::layout::TILE;

/// Input of a step of seats.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Batch<'a> {
    /// The seats, each once.
    pub seats: &'a [Seat],
    /// Rows of the input tensors: sequence `i` has rows `query_start[i]..query_start[i + 1]`; `seats.len() + 1`
    /// entries, ascending from 0.
    pub query_start: &'a [i32],
    /// One entry a row; -1 marks padding, which is skipped. Other values are ignored: seats know their slots.
    pub slot_mapping: Option<&'a [i64]>,
}

impl<'a> Batch<'a> {
    /// A batch without padding.
    pub fn new(seats: &'a [Seat], query_start: &'a [i32]) -> Self {
        Self { seats, query_start, slot_mapping: None }
    }

    /// The same with rows marked as padding by -1.
    pub fn with_slot_mapping(self, slot_mapping: &'a [i64]) -> Self {
        Self { slot_mapping: Some(slot_mapping), ..self }
    }
}

/// Input of a step of slots: direct mode without seats, for engines that place tokens themselves.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct SlotBatch<'a> {
    /// As in [`Batch`].
    pub query_start: &'a [i32],
    /// Tokens of each sequence after this step.
    pub context_lens: &'a [i32],
    /// `[sequences, max_blocks]` block ids, row-major.
    pub block_tables: &'a [i32],
    /// Slot of each row, `block * 64 + offset`; -1 = skip.
    pub slot_mapping: &'a [i64],
}

impl<'a> SlotBatch<'a> {
    /// A batch of sequences placed by the caller.
    pub fn new(
        query_start: &'a [i32],
        context_lens: &'a [i32],
        block_tables: &'a [i32],
        slot_mapping: &'a [i64],
    ) -> Self {
        Self { query_start, context_lens, block_tables, slot_mapping }
    }
}
/// First row and number of the rows of sequence `i` that are not padding. Padding may stand before or behind them.
pub(super) fn real_rows(query_start: &[i32], i: usize, slots: Option<&[i64]>) -> Result<(usize, usize)> {
    let (start, end) = (query_start[i] as usize, query_start[i + 1] as usize);
    let Some(slots) = slots else { return Ok((start, end - start)) };
    let real = |r: &usize| slots[*r] >= 0;
    let Some(first) = (start..end).find(real) else { return Ok((start, 0)) };
    let n = (first..end).take_while(real).count();
    match (first + n..end).find(real) {
        Some(row) => Err(Error::Unsupported {
            what: "slot_mapping",
            got: format!("padding between rows {first} and {row} of sequence {i}"),
            why: "padding (-1) stands before or behind a sequence's tokens, never between them".into(),
        }),
        None => Ok((first, n)),
    }
}

/// Turns block tables of an engine with larger blocks into tables of 64-token blocks: an engine's block `b` of 128 tokens
/// is our blocks `2b` and `2b + 1`, one of 256 tokens is four. Entries below 0 (no block) stay -1. The pool needs
/// `block_tokens / 64` blocks for each of the engine's.
///
/// `tables` is `[sequences, max_blocks]`, row-major; the result is `[sequences, max_blocks * block_tokens / 64]`.
///
/// # Errors
/// [`Error::Unsupported`] unless `block_tokens` is a multiple of 64 up to 65,536, or if an expanded id does not fit in 31 bits.
pub fn expand_block_table(tables: &[i32], block_tokens: usize) -> Result<Vec<i32>> {
    let no = |what, got: String, why: &str| Err(Error::Unsupported { what, got, why: why.into() });
    let n = block_tokens / TILE;
    if n == 0 || n > 1024 || !block_tokens.is_multiple_of(TILE) {
        return no(
            "block_tokens",
            block_tokens.to_string(),
            "a tile of 64 tokens shares pairs and packed words, so it cannot be cut into smaller blocks; give the engine \
             blocks of 64, 128 or 256 tokens",
        );
    }
    let mut out = Vec::with_capacity(tables.len().saturating_mul(n));
    for &b in tables {
        for i in 0..n as i64 {
            match i32::try_from(b as i64 * n as i64 + i) {
                _ if b < 0 => out.push(-1),
                Ok(id) => out.push(id),
                Err(_) => return no("block", b.to_string(), "its 64-token blocks do not fit in 31 bits"),
            }
        }
    }
    Ok(out)
}
