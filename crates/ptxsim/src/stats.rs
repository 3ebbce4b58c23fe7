//! Counters of a launch.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Classes of instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Integer arithmetic and logic.
    Integer,
    /// f32 arithmetic.
    Float32,
    /// f64 arithmetic.
    Float64,
    /// f16 and bf16 arithmetic, packed too.
    Half,
    /// `cvt`
    Convert,
    /// `ex2`, `rcp`, `sin` …
    Special,
    /// Comparison and selection.
    Compare,
    /// `mov`, address arithmetic by `cvta`, packing.
    Move,
    /// `shfl`, `vote`, `match`, `redux`
    Shuffle,
    /// `mma`, `wmma.mma`
    Matrix,
    /// `ldmatrix`, `stmatrix`, `movmatrix`
    MatrixMove,
    /// `ld.global`
    LoadGlobal,
    /// `st.global`
    StoreGlobal,
    /// `ld.shared`
    LoadShared,
    /// `st.shared`
    StoreShared,
    /// Local, param and const memory.
    OtherMemory,
    /// `atom`, `red`
    Atomic,
    /// `cp.async` and bulk copies.
    AsyncCopy,
    /// `bra`, `call`, `ret`, `exit`
    Control,
    /// `bar`, `mbarrier`, fences.
    Barrier,
    /// Everything else.
    Other,
}

/// Counts of one line, or of a whole launch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Instructions issued by warps (with at least one lane active).
    pub warp_instructions: u64,
    /// The same times active lanes.
    pub thread_instructions: u64,
    /// Bytes that lanes asked for from global memory.
    pub global_bytes: u64,
    /// Global requests: warp instructions that reach global memory.
    pub global_requests: u64,
    /// 32-byte sectors of these.
    pub global_sectors: u64,
    /// Those of them that reach the second-level cache: all, unless
    /// [`Options::first_level_cache`](crate::options::Options::first_level_cache) is on.
    pub l2_sectors: u64,
    /// Shared-memory requests: warp instructions.
    pub shared_requests: u64,
    /// Passes they take.
    pub shared_wavefronts: u64,
    /// Passes above the minimum for their bytes: bank conflicts.
    pub shared_conflicts: u64,
    /// `mma` instructions.
    pub mma: u64,
    /// Barriers that warps arrived at.
    pub barriers: u64,
    /// Branches that split a warp.
    pub divergent_branches: u64,
}

impl Counts {
    /// Sectors of an average request.
    pub fn sectors_per_request(&self) -> f64 {
        if self.global_requests == 0 { 0.0 } else { self.global_sectors as f64 / self.global_requests as f64 }
    }

    /// Adds another's counts.
    pub fn add(&mut self, o: &Self) {
        self.warp_instructions += o.warp_instructions;
        self.thread_instructions += o.thread_instructions;
        self.global_bytes += o.global_bytes;
        self.global_requests += o.global_requests;
        self.global_sectors += o.global_sectors;
        self.l2_sectors += o.l2_sectors;
        self.shared_requests += o.shared_requests;
        self.shared_wavefronts += o.shared_wavefronts;
        self.shared_conflicts += o.shared_conflicts;
        self.mma += o.mma;
        self.barriers += o.barriers;
        self.divergent_branches += o.divergent_branches;
    }
}

/// Counts of one source line.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LineCounts {
    /// `path:line`, or `ptx:line` without line information.
    pub line: String,
    /// Its counts.
    pub counts: Counts,
}

/// Counters of one launch.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// The kernel.
    pub kernel: String,
    /// Grid in blocks.
    pub grid: [u32; 3],
    /// Block in threads.
    pub block: [u32; 3],
    /// Static and dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// Whether everything was counted. If not, what concerns memory is 0 whatever happened.
    pub counters: bool,
    /// Totals.
    pub total: Counts,
    /// Warp and thread instructions by class.
    pub classes: BTreeMap<Class, [u64; 2]>,
    /// By source line, in order of the text.
    pub lines: Vec<LineCounts>,
}
