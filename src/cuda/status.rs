//! What a device could not tell when it happened.

use crate::error::{Error, Result};

/// Counters that kernels write and the host reads when it likes; they only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CacheStatus {
    /// Values clamped to what f16 holds, or saturated in FP8.
    pub clamped_values: u64,
    /// Sequences that a step left as they were because a tile that closes had no block. Pages that attention would have read
    /// and the block table does not name are counted too, once a block of rows.
    pub missing_blocks: u32,
    /// The same, because they would have had more tokens than a sequence may have.
    pub over_capacity: u32,
    /// The same, because the seat does not exist, or its lengths are none that a sequence can have.
    pub bad_seats: u32,
    /// The same, because their rows do not ascend, are another sequence's, are more than the tensors have, or have padding in
    /// between. Sequences with more rows than prefill was told are counted too.
    pub bad_rows: u32,
    /// Tokens skipped because their slot is beyond the pool.
    pub bad_slots: u32,
}

impl CacheStatus {
    /// An error that names what has gone wrong since `before`, if anything has.
    ///
    /// # Errors
    /// [`Error::Cuda`] with the counters.
    pub fn since(&self, before: &Self) -> Result<()> {
        let all = [
            (
                self.missing_blocks,
                before.missing_blocks,
                "sequences without a block for a tile that closes; put its \
             id into the block table before the step",
            ),
            (self.over_capacity, before.over_capacity, "sequences beyond max_tokens"),
            (self.bad_seats, before.bad_seats, "seats that do not exist or have impossible lengths"),
            (self.bad_rows, before.bad_rows, "sequences whose rows are not in the tensors or have gaps"),
            (self.bad_slots, before.bad_slots, "tokens whose slot is beyond the pool"),
        ];
        let problems: Vec<String> = all
            .iter()
            .filter(|(now, then, _)| now != then)
            .map(|(now, then, what)| format!("{} {what}", now.wrapping_sub(*then)))
            .collect();
        if problems.is_empty() {
            return Ok(());
        }
        Err(Error::Cuda { what: "a step left out", problem: problems.join("; ") })
    }
}
