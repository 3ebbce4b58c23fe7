//! What can be switched.

use serde::{Deserialize, Serialize};

/// When a read of memory that was never written is reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Uninitialized {
    /// Never.
    Off,
    /// When the value decides something: it is used as an address or a branch condition, or stored to global memory.
    OnUse,
    /// At the read.
    Strict,
}

/// Checks and modes. `Default` has everything on, as tests want it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    /// Accesses outside allocations, after a free, of other spaces. Off: such an access still faults, but guard gaps
    /// and poisoned ranges are not told apart in the message.
    pub bounds: bool,
    /// Misaligned accesses.
    pub alignment: bool,
    /// Global memory that was never written.
    pub uninitialized_global: Uninitialized,
    /// Shared and local memory that was never written.
    pub uninitialized_shared: Uninitialized,
    /// Conflicting accesses to shared memory by two warps with nothing that orders them.
    pub races: bool,
    /// The same between lanes of one warp with no warp-level synchronisation between. Weaker: lanes of a warp advance
    /// together here, on hardware they need not.
    pub warp_races: bool,
    /// Reads and writes of the destination of an asynchronous copy that was not waited for.
    pub in_flight: bool,
    /// `.aligned` instructions that only some lanes of a warp reach.
    pub divergence: bool,
    /// `shfl` from a lane that does not take part.
    pub shuffle: bool,
    /// Lane-instructions a launch may run before it counts as a runaway loop; 0 = no limit.
    pub instruction_limit: u64,
    /// Count per-line statistics: sectors, wavefronts, classes. Without it, what concerns memory is not counted.
    pub counters: bool,
    /// Loads find the sectors that their warp loaded last, 8 KB of them, in a first-level cache. Stores, atomics and `cp.async`
    /// go past it. It only changes what is counted.
    pub first_level_cache: bool,
    /// Shuffles the order of warps and of blocks by this seed; `None`: in order.
    pub shuffle_seed: Option<u64>,
    /// Delay streams until something waits for them, and interleave them by `shuffle_seed`; without one, what was
    /// submitted last and is ready runs first.
    pub delay_streams: bool,
    /// Products of `mma` are truncated block by block as hardware does, instead of exact f32 accumulation in order.
    pub mma_truncation: bool,
    /// Threads that run blocks; 0 = all cores.
    pub threads: usize,
    /// Use AVX2, FMA and F16C where the CPU has them.
    pub simd: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            bounds: true,
            alignment: true,
            uninitialized_global: Uninitialized::Strict,
            uninitialized_shared: Uninitialized::Strict,
            races: true,
            warp_races: true,
            in_flight: true,
            divergence: true,
            shuffle: true,
            instruction_limit: 20_000_000_000,
            counters: true,
            first_level_cache: false,
            shuffle_seed: None,
            delay_streams: false,
            mma_truncation: false,
            threads: 0,
            simd: true,
        }
    }
}

impl Options {
    /// Checks and counters off: for speed. Bounds and alignment are still checked.
    pub fn unchecked() -> Self {
        Self {
            uninitialized_global: Uninitialized::Off,
            uninitialized_shared: Uninitialized::Off,
            races: false,
            warp_races: false,
            in_flight: false,
            divergence: false,
            shuffle: false,
            counters: false,
            ..Self::default()
        }
    }
}
