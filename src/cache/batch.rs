//! What a step is asked for: the sequences of a batch and their rows in the input tensors.

use super::step::Seat;
use crate::error::{Error, Result};

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
