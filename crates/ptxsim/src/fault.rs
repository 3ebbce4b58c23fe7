//! What went wrong in a kernel.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Classes of faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FaultKind {
    /// Outside every allocation, in a guard gap, or of a freed one.
    OutOfBounds,
    /// Not a multiple of the access size.
    Misaligned,
    /// Memory that was never written.
    Uninitialized,
    /// Two warps, no order.
    Race,
    /// Two lanes of a warp, no order.
    WarpRace,
    /// Destination of an asynchronous copy that was not waited for.
    InFlight,
    /// An `.aligned` instruction that only some lanes reach.
    Divergence,
    /// `shfl` from a lane that does not take part, or a member mask without the calling lane.
    Shuffle,
    /// Warps that wait for each other forever.
    Deadlock,
    /// More instructions than the limit.
    Runaway,
    /// Stack or local memory.
    Local,
    /// `trap`, or an operation that hardware does not define.
    Trap,
    /// A failed `assert` of the kernel.
    Assert,
}

impl FaultKind {
    /// The `CUresult` that the caller gets.
    pub fn code(self) -> i32 {
        match self {
            Self::OutOfBounds | Self::Local => 700,
            Self::Misaligned => 716,
            Self::Runaway => 702,
            Self::Assert => 710,
            _ => 719,
        }
    }
}

/// A fault and where it happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Its class.
    pub kind: FaultKind,
    /// The kernel.
    pub kernel: String,
    /// The block.
    pub block: [u32; 3],
    /// The thread; of a warp-wide fault the first one concerned.
    pub thread: [u32; 3],
    /// Name of the instruction.
    pub instruction: String,
    /// Line in the PTX text.
    pub ptx_line: u32,
    /// `path:line` in the `.cu` source, if the PTX has line information.
    pub source: Option<String>,
    /// What happened, in a sentence.
    pub message: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [bx, by, bz] = self.block;
        let [tx, ty, tz] = self.thread;
        write!(
            f,
            "{:?} in {}, block ({bx},{by},{bz}), thread ({tx},{ty},{tz}), {} at PTX line {}",
            self.kind, self.kernel, self.instruction, self.ptx_line
        )?;
        if let Some(source) = &self.source {
            write!(f, " ({source})")?;
        }
        write!(f, ": {}", self.message)
    }
}

impl std::error::Error for Fault {}
