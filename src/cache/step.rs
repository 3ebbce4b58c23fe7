//! The step buffer: what one step does to each sequence of the batch. `begin_step` writes it, every layer reads
//! it, no layer changes it.

/// A live sequence's small stable integer, from `open` to `close`. Numbers are used again: a seat kept after `close` may
/// name another sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct Seat(u32);

impl Seat {
    /// The seat with this number. Whether it is open is checked by every call that takes it.
    pub const fn new(index: u32) -> Self {
        Self(index)
    }

    /// Its number, below `max_sequences`.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// One sequence's part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SequenceStep {
    /// The seat; `None` in a step of slots (direct mode without seats).
    pub seat: Option<Seat>,
    /// Row of its first new token in the input tensors; the others follow.
    pub first_row: usize,
    /// New tokens, padding not counted.
    pub tokens: usize,
    /// Entry of its first new token in the step's slots (direct mode).
    pub(crate) first_slot: usize,
    /// Tokens held before.
    pub old_len: usize,
    /// Tokens held after.
    pub new_len: usize,
    /// Tokens in closed tiles before.
    pub old_packed: usize,
    /// Tokens in closed tiles after.
    pub new_packed: usize,
    /// First token still held (`release_before`).
    pub released: usize,
}

/// The step buffer.
#[derive(Debug, Default)]
pub struct Step {
    pub(crate) sequences: Vec<SequenceStep>,
    /// First new row of each sequence, and the number of all rows.
    pub(crate) starts: Vec<i32>,
    /// New rows of each sequence.
    pub(crate) counts: Vec<i32>,
    /// Slot (`block * 64 + offset`) of each new token, direct mode only.
    pub(crate) slots: Vec<i64>,
    /// Block tables, `[sequences][blocks of a sequence]`.
    pub(crate) tables: Vec<i32>,
    pub(crate) table_width: usize,
    /// Rows the input tensors have, padding counted.
    pub(crate) input_rows: usize,
    /// Layers that have appended or prefilled.
    pub(crate) done: Vec<bool>,
    pub(crate) open: bool,
    /// Whether `attend` may still read it: no length has changed since.
    pub(crate) valid: bool,
    /// Whether it is recorded and not run: lengths stay what they are.
    pub(crate) captured: bool,
}

impl Step {
    pub(crate) fn new(layers: usize, max_sequences: usize, table_width: usize) -> Self {
        Self {
            sequences: Vec::with_capacity(max_sequences),
            starts: Vec::with_capacity(max_sequences + 1),
            counts: Vec::with_capacity(max_sequences),
            slots: Vec::with_capacity(max_sequences),
            tables: Vec::with_capacity(max_sequences * table_width),
            table_width,
            done: vec![false; layers],
            ..Self::default()
        }
    }

    /// Sequences of the batch.
    pub fn sequences(&self) -> &[SequenceStep] {
        &self.sequences
    }

    /// The block table of sequence `i`: entry `t` is the block of tile `t`, -1 = none.
    pub fn table(&self, i: usize) -> &[i32] {
        &self.tables[i * self.table_width..(i + 1) * self.table_width]
    }

    /// Layers that have not appended yet.
    pub fn missing(&self) -> Vec<usize> {
        self.done.iter().enumerate().filter(|x| !x.1).map(|x| x.0).collect()
    }

    pub(crate) fn clear(&mut self) {
        self.sequences.clear();
        self.starts.clear();
        self.counts.clear();
        self.slots.clear();
        self.tables.clear();
        self.input_rows = 0;
        self.open = false;
        self.valid = false;
        self.captured = false;
    }
}
