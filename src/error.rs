//! The one error type. Every variant carries what was expected and what came, and its message says what
//! to do about it. After an error the cache is what it was before the call.

/// What can go wrong in `qkv`. No public function panics on user input.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor has the wrong shape.
    #[error("{what}: expected shape {expected}, got {got}")]
    Shape {
        /// Which tensor.
        what: &'static str,
        /// The shape that was expected.
        expected: String,
        /// The shape that came.
        got: String,
    },
    /// The strides of a view reach beyond its data, or make elements of an output overlap.
    #[error("{what}: {problem}; the data have {len} elements")]
    Strides {
        /// Which tensor.
        what: &'static str,
        /// What is wrong with them.
        problem: String,
        /// Elements in the data behind the view.
        len: usize,
    },
    /// A tensor has a dtype that this call does not take.
    #[error("{what}: expected dtype {expected}, got {got}")]
    Dtype {
        /// Which tensor.
        what: &'static str,
        /// The dtypes that are accepted.
        expected: String,
        /// The dtype that came.
        got: String,
    },
    /// A format, a configuration or a parameter is refused.
    #[error("{what}: {got} is not possible: {why}")]
    Unsupported {
        /// Which field or argument.
        what: &'static str,
        /// Its value.
        got: String,
        /// The reason, and what to use instead.
        why: String,
    },
    /// A slice has the wrong number of elements.
    #[error("{what}: expected {expected} elements, got {got}")]
    Length {
        /// Which slice.
        what: &'static str,
        /// Elements expected.
        expected: usize,
        /// Elements that came.
        got: usize,
    },
    /// An index is out of range.
    #[error("{what} {got} is out of range, {limit} exist")]
    OutOfRange {
        /// Which index.
        what: &'static str,
        /// The index.
        got: i64,
        /// How many there are.
        limit: usize,
    },
    /// A seat that is not open.
    #[error("seat {seat} is not open; `open` gives a seat, `close` ends it")]
    UnknownSeat {
        /// The seat.
        seat: usize,
    },
    /// An index is named twice where each may be named once.
    #[error("{what} {got} is named twice; each may appear once in a step")]
    Duplicate {
        /// Which index.
        what: &'static str,
        /// The index.
        got: i64,
    },
    /// The cache has no room.
    #[error("{what}: {needed} needed, {available} available; {help}")]
    Capacity {
        /// What ran out.
        what: &'static str,
        /// How much the call needs.
        needed: usize,
        /// How much there is.
        available: usize,
        /// What to do.
        help: &'static str,
    },
    /// A tile closes in this step and the block table has no block for it.
    #[error(
        "seat {seat} needs a block for tile {tile} in this step; call `reserve` (or `set_block`) before `begin_step`"
    )]
    MissingBlock {
        /// The seat.
        seat: usize,
        /// The tile without a block.
        tile: usize,
    },
    /// A step is open, so calls that change lengths are refused.
    #[error(
        "a step is open: layers {missing:?} have not appended; append or prefill them, or call `cancel_step`"
    )]
    StepOpen {
        /// The layers that have not appended.
        missing: Vec<usize>,
    },
    /// No step is open, or this layer cannot do this now.
    #[error("layer {layer}: {problem}")]
    StepOrder {
        /// The layer.
        layer: usize,
        /// What is wrong, and what to call first.
        problem: String,
    },
    /// A length beyond what the sequence holds.
    #[error("{what}: {got} tokens asked for, the sequence holds {len}")]
    BeyondLength {
        /// Which call.
        what: &'static str,
        /// Tokens asked for.
        got: usize,
        /// Tokens held.
        len: usize,
    },
    /// Tokens that are no longer there.
    #[error("{what}: tokens below {released} were released, token {got} is needed")]
    Released {
        /// Which call.
        what: &'static str,
        /// First token still held.
        released: usize,
        /// Token that is needed.
        got: usize,
    },
    /// A device address that cannot be used.
    #[error("{what}: address {got:#x} must be device memory aligned to {align} bytes")]
    Address {
        /// Which argument.
        what: &'static str,
        /// The address.
        got: u64,
        /// Bytes of alignment needed.
        align: usize,
    },
    /// The CUDA driver, or what it was asked for, failed.
    #[error("CUDA, {what}: {problem}")]
    Cuda {
        /// What was being done.
        what: &'static str,
        /// What the driver says, and what to do about it.
        problem: String,
    },
    /// An exported page that does not fit or is damaged.
    #[error("page: {problem}; expected {expected}, got {got}")]
    Page {
        /// What is wrong.
        problem: &'static str,
        /// Expected value.
        expected: String,
        /// Value found.
        got: String,
    },
}

/// An index as errors hold it.
pub(crate) fn index(i: usize) -> i64 {
    i64::try_from(i).unwrap_or(i64::MAX)
}

/// `Result` with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
