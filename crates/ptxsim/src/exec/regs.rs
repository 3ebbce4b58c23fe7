//! Registers of a warp, and the operations on them.
//!
//! A register of 32 bits or less is a row of 32 lanes; a 64-bit one is a row of 32 wide lanes; a predicate is a mask.
//! Immediates and special registers are rows too, filled when the warp starts, so that every source is a row. A
//! register's class follows from its declared type and never changes.
//!
//! 8- and 16-bit registers are kept zero-extended in their row: an operation that writes one must leave the upper bits
//! 0, and one that reads one as signed must extend it itself.

use crate::fault::FaultKind;
use std::fmt;

/// Lanes of a warp.
pub const LANES: usize = 32;
/// A row of registers of at most 32 bits.
pub type Row = [u32; LANES];
/// A row of 64-bit registers.
pub type WideRow = [u64; LANES];
/// A set of lanes.
pub type Mask = u32;

/// Which file a register lives in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum File {
    /// `.b8` to `.b32`, `.f32`, `.f16x2` …
    Narrow,
    /// `.b64`, `.f64`
    Wide,
    /// `.pred`
    Pred,
}

/// All registers of a warp.
#[derive(Debug, Default, Clone)]
pub struct Regs {
    /// [`File::Narrow`]
    pub narrow: Vec<Row>,
    /// [`File::Wide`]
    pub wide: Vec<WideRow>,
    /// [`File::Pred`]
    pub preds: Vec<Mask>,
    /// The carry flag of `add.cc` and its kin.
    pub carry: Mask,
    /// Lanes whose value depends on memory that was never written, a row of each file. Kept up by the core, not by
    /// operations.
    pub tainted: [Vec<Mask>; 3],
    /// Whether any lane of any row is tainted.
    pub any_tainted: bool,
}

/// An operation on registers: writes its destinations in the lanes of the mask and leaves the other lanes alone.
pub type OpFn = fn(&mut Regs, &Op, Mask) -> Result<(), Box<Trouble>>;

/// What an operation found wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// Class.
    pub kind: FaultKind,
    /// The lane concerned, the first one.
    pub lane: u32,
    /// A sentence.
    pub message: String,
}

/// Most destinations and sources an [`Op`] holds itself.
pub const INLINE: usize = 4;

/// An operation with its operands. All indices are rows of the file that the operation's form says.
#[derive(Clone)]
pub struct Op {
    /// What it does.
    pub run: OpFn,
    /// Destination rows: the first four, for speed.
    pub d: [u16; INLINE],
    /// Source rows: the first four.
    pub s: [u16; INLINE],
    /// All destinations and sources in order, if either has more than four: `many[..many_d]` are destinations.
    pub many: Box<[u16]>,
    /// Destinations at the start of `many`.
    pub many_d: u16,
    /// Constants of the form (a `lop3` table, a comparison, …).
    pub imm: u64,
}

impl fmt::Debug for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Op")
            .field("d", &self.d)
            .field("s", &self.s)
            .field("many", &self.many)
            .finish_non_exhaustive()
    }
}

impl Op {
    /// An operation on these rows.
    pub fn new(run: OpFn, destinations: &[u16], sources: &[u16], imm: u64) -> Self {
        let first = |rows: &[u16]| std::array::from_fn(|i| rows.get(i).copied().unwrap_or(0));
        let long = destinations.len() > INLINE || sources.len() > INLINE;
        let many = if long { [destinations, sources].concat().into() } else { Box::default() };
        let many_d = if long { destinations.len() as u16 } else { 0 };
        Self { run, d: first(destinations), s: first(sources), many, many_d, imm }
    }

    /// Destinations of an operation with many.
    pub fn many_destinations(&self) -> &[u16] {
        &self.many[..self.many_d as usize]
    }

    /// Sources of an operation with many.
    pub fn many_sources(&self) -> &[u16] {
        &self.many[self.many_d as usize..]
    }
}

/// How an instruction is carried out: chosen by `alu::form`, turned into an [`Op`] by the core once operands have
/// rows.
#[derive(Clone)]
pub struct Form {
    /// The operation.
    pub run: OpFn,
    /// File of each destination, in the order in which they stand in the text: vectors and `d|p` are flattened.
    pub destinations: Vec<File>,
    /// File of each source, likewise. A literal becomes a row of this file: a floating one is converted to the type of
    /// the instruction by `alu::form`'s `literals`.
    pub sources: Vec<Source>,
    /// Constants.
    pub imm: u64,
    /// For counters.
    pub class: crate::stats::Class,
    /// How taint goes from sources to destinations.
    pub taint: Taint,
    /// Whether the manual asks for all lanes of the warp (`.aligned` forms): the core checks it.
    pub aligned: bool,
    /// Lanes that have to come together before it runs: `.sync` forms.
    pub sync: Sync,
}

impl fmt::Debug for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Form").field("class", &self.class).finish_non_exhaustive()
    }
}

/// A source operand of a [`Form`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// Its file.
    pub file: File,
    /// What a literal means there.
    pub literal: Literal,
}

/// What a literal operand becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Literal {
    /// The low bits of an integer; of a floating literal its own bits (`0f…` in a 32-bit register).
    Bits,
    /// An f32: `0f…`, or a decimal or `0d…` literal rounded to f32.
    F32,
    /// An f64.
    F64,
    /// f16 bits of a floating literal.
    F16,
    /// bf16 bits of a floating literal.
    BF16,
}

/// How taint spreads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taint {
    /// A lane of a destination is tainted if that lane of any source is.
    Lanes,
    /// `selp d, a, b, p`: of the chosen source and of p.
    Select,
    /// Any tainted lane of any source taints all lanes (`mma`, `ldmatrix`-like moves, `redux`).
    All,
    /// `shfl`: a lane is tainted if any lane of the data source is (the first source).
    Shuffle,
    /// `mma`: a row of the result is tainted by its row of A and C and by all of B's column.
    Matrix,
}

/// Who has to be there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sync {
    /// Nobody.
    None,
    /// The lanes of this source's value (index into sources), which must be the same in all of them.
    Members(u8),
    /// All lanes of the warp that have not exited.
    Warp,
}
