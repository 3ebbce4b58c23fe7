//! Warps: lanes that advance together, and apart after a divergent branch.

use super::async_copy::{Copies, Sources};
use super::global::Recent;
use super::regs::{LANES, Mask, Regs, Trouble};
use crate::program::{Kernel, Move};
use std::sync::Arc;

/// Part of a warp that is at one place.
#[derive(Debug, Clone)]
pub(super) struct Split {
    /// Next operation.
    pub pc: u32,
    /// Its lanes.
    pub mask: Mask,
    /// Calls it is in.
    pub stack: Vec<Frame>,
    /// What it waits for.
    pub wait: Wait,
    /// Lanes that were seen beyond the operation it waits to run: they went around it.
    pub skipped: Mask,
}

/// A call.
#[derive(Debug, Clone)]
pub(super) struct Frame {
    /// Where it returns to.
    pub pc: u32,
    /// What is copied then.
    pub returns: Arc<[Move]>,
}

/// What a split waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    /// Nothing.
    Ready,
    /// Other lanes of its warp, to run the next operation together.
    Lanes,
    /// A barrier of its block.
    Barrier(u8),
    /// The barrier of its cluster.
    Cluster,
    /// An mbarrier: owner block in the gang, offset, the phase it waits for to end, and the predicate row for the answer.
    Mbarrier { block: u32, at: u32, phase: u32, done: u16 },
}

/// Back edges after which another part of the warp gets a turn.
const PATIENCE: u32 = 2048;
/// Operations of such a turn.
const TURN: u32 = 512;

/// A warp.
#[derive(Debug, Default)]
pub(super) struct Warp {
    /// Its registers.
    pub regs: Regs,
    /// Where its lanes are.
    pub splits: Vec<Split>,
    /// Lanes that have not exited.
    pub live: Mask,
    /// Lanes that exist.
    pub lanes: Mask,
    /// Its block's index in the gang.
    pub block: usize,
    /// Its index in the block.
    pub index: usize,
    /// Its index in `clocks`.
    pub id: usize,
    /// Vector clock: for every warp it can share memory with, and for bulk copies, the latest time known.
    pub clocks: Vec<u32>,
    /// What it knew at its last fence: strong writes since then show it. Empty: no fence yet.
    pub published: Vec<u32>,
    /// What strong reads have shown and no fence has taken over yet. Empty: nothing.
    pub seen: Vec<u32>,
    /// Counts synchronisations inside the warp.
    pub sync: u32,
    /// Local memory of the lanes, one after the other.
    pub local: Vec<u8>,
    /// One bit a byte of it: written.
    pub local_written: Vec<u64>,
    /// One bit a byte of it: read since the block started, and not written before.
    pub local_peeked: Vec<u64>,
    /// `cp.async` and bulk groups.
    pub copies: Copies,
    /// Bulk copies that read shared memory.
    pub sources: Sources,
    /// Back edges since another part had a turn.
    pub backs: u32,
    /// Operations left of a turn out of order.
    pub turn: u32,
    /// Allocation that the last global access hit.
    pub last_allocation: usize,
    /// What its loads left in the first-level cache.
    pub recent: Recent,
}

/// What [`Warp::pick`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pick {
    /// This split can run.
    Run(usize),
    /// This one waits for lanes that cannot come any more.
    Forced(usize),
    /// All wait for something outside the warp, or all lanes have exited.
    None,
}

impl Warp {
    /// Whether anything can run.
    pub(super) fn is_ready(&self) -> bool {
        self.splits.iter().any(|s| matches!(s.wait, Wait::Ready | Wait::Lanes))
    }

    /// The first lane of a set.
    pub(super) fn first(mask: Mask) -> usize {
        (mask.trailing_zeros() as usize).min(LANES - 1)
    }

    /// Joins splits that are at the same place, then chooses one: the first in the order of places.
    pub(super) fn pick(&mut self, kernel: &Kernel) -> Pick {
        if self.splits.len() == 1 {
            return match self.splits[0].wait {
                Wait::Ready => Pick::Run(0),
                Wait::Lanes => Pick::Forced(0),
                _ => Pick::None,
            };
        }
        self.join();
        let ready = |s: &Split| s.wait == Wait::Ready;
        let first = |w: &Self, which: &dyn Fn(&Split) -> bool| {
            let mut best: Option<usize> = None;
            for i in (0..w.splits.len()).filter(|i| which(&w.splits[*i])) {
                if best.is_none_or(|b| before(kernel, &w.splits[i], &w.splits[b])) {
                    best = Some(i);
                }
            }
            best
        };
        let Some(mut chosen) = first(self, &ready) else {
            return first(self, &|s| s.wait == Wait::Lanes).map_or(Pick::None, Pick::Forced);
        };
        if self.backs >= PATIENCE {
            // A loop that waits for lanes of its own warp would never end: the others get a turn.
            self.backs = 0;
            if let Some(other) = (chosen + 1..chosen + self.splits.len())
                .map(|i| i % self.splits.len())
                .find(|i| ready(&self.splits[*i]))
            {
                chosen = other;
                self.turn = TURN;
            }
        }
        Pick::Run(chosen)
    }

    fn join(&mut self) {
        let mut i = 0;
        while i < self.splits.len() {
            let mut j = i + 1;
            while j < self.splits.len() {
                let (a, b) = (&self.splits[i], &self.splits[j]);
                let free = |s: &Split| matches!(s.wait, Wait::Ready | Wait::Lanes);
                let same_calls =
                    a.stack.len() == b.stack.len() && a.stack.iter().zip(&b.stack).all(|(a, b)| a.pc == b.pc);
                if a.pc == b.pc && same_calls && free(a) && free(b) {
                    let mask = b.mask;
                    self.splits.swap_remove(j);
                    let skipped = self.splits[i].skipped;
                    self.splits[i].skipped = skipped & !mask;
                    self.splits[i].mask |= mask;
                    self.splits[i].wait = Wait::Ready;
                } else {
                    j += 1;
                }
            }
            i += 1;
        }
    }

    /// Whether the split should make room: another one is at its place or comes before it.
    pub(super) fn should_switch(&self, kernel: &Kernel, at: usize) -> bool {
        let me = &self.splits[at];
        self.splits.iter().enumerate().any(|(i, s)| {
            i != at
                && match s.wait {
                    Wait::Ready => s.pc == me.pc || (self.turn == 0 && before(kernel, s, me)),
                    Wait::Lanes => s.pc == me.pc,
                    _ => false,
                }
        }) || self.backs >= PATIENCE
    }

    /// Passes a point that orders everything before it before everything after it, for those who learn of it.
    pub(super) fn release(&mut self) {
        self.clocks[self.id] += 1;
        self.sync += 1;
    }

    /// Learns that bulk copies up to a tick of theirs have finished. Their time is the last of the clocks.
    pub(super) fn learn_of_copies(&mut self, tick: u32) {
        if let Some(known) = self.clocks.last_mut() {
            *known = (*known).max(tick);
        }
    }

    /// A fence: what strong reads have shown counts now, and strong writes from now on show what happened before.
    pub(super) fn fence(&mut self) {
        self.clocks.iter_mut().zip(&self.seen).for_each(|(mine, seen)| *mine = (*mine).max(*seen));
        self.seen.clear();
        self.published.clone_from(&self.clocks);
        self.clocks[self.id] += 1;
    }

    /// Learns what happened before.
    pub(super) fn acquire(&mut self, clocks: &[u32]) {
        self.clocks.iter_mut().zip(clocks).for_each(|(mine, theirs)| *mine = (*mine).max(*theirs));
        self.sync += 1;
    }
}

/// Whether a comes before b: by the outermost call in which they are at different places.
fn before(kernel: &Kernel, a: &Split, b: &Split) -> bool {
    let order = |pc: u32| (kernel.order.get(pc as usize).copied().unwrap_or(u32::MAX), pc);
    let key = |s: &Split, level: usize| match s.stack.get(level) {
        // The call itself, not where it returns to.
        Some(frame) => Some(order(frame.pc - 1)),
        None if level == s.stack.len() => Some(order(s.pc)),
        None => None,
    };
    for level in 0..=a.stack.len().max(b.stack.len()) {
        match (key(a, level), key(b, level)) {
            (Some(x), Some(y)) if x != y => return x < y,
            (Some(_), Some(_)) => {}
            // Inside a call comes before the call's place itself.
            (x, y) => return x.is_some() && y.is_none(),
        }
    }
    false
}

/// Calls `f` for each lane of a set.
#[inline(always)]
pub(super) fn each(mask: Mask, mut f: impl FnMut(usize)) {
    let mut left = mask;
    while left != 0 {
        f(left.trailing_zeros() as usize);
        left &= left - 1;
    }
}

/// Calls `f` for each lane of a set until it fails.
#[inline(always)]
pub(super) fn try_each(
    mask: Mask,
    mut f: impl FnMut(usize) -> Result<(), Box<Trouble>>,
) -> Result<(), Box<Trouble>> {
    let mut left = mask;
    while left != 0 {
        f(left.trailing_zeros() as usize)?;
        left &= left - 1;
    }
    Ok(())
}
