//! `cp.async`: copies that arrive when they are waited for.

use super::regs::{LANES, Mask};
use std::collections::VecDeque;

/// One copy of one lane.
#[derive(Debug, Clone, Copy)]
pub(super) struct Copy {
    /// Who issued it.
    pub lane: u8,
    /// Destination offset in shared memory of the block.
    pub to: u32,
    /// 4, 8 or 16.
    pub bytes: u8,
    /// What it brings.
    pub data: [u8; 16],
    /// The source was never written.
    pub tainted: bool,
}

/// Copies that were committed together.
#[derive(Debug, Clone)]
pub(super) struct Group {
    /// Lanes for which the group still counts.
    pub lanes: Mask,
    /// What is on its way.
    pub copies: Vec<Copy>,
}

/// Copies of a warp.
#[derive(Debug, Clone, Default)]
pub(super) struct Copies {
    /// Not committed yet.
    pub open: Vec<Copy>,
    /// Oldest first.
    pub groups: std::collections::VecDeque<Group>,
}

impl Copies {
    /// `commit_group` of some lanes.
    pub(super) fn commit(&mut self, lanes: Mask) {
        let of = |c: &Copy| lanes >> c.lane & 1 == 1;
        let copies = self.open.iter().copied().filter(of).collect();
        self.open.retain(|c| !of(c));
        self.groups.push_back(Group { lanes, copies });
    }

    /// `wait_group leave` of some lanes: what arrives, oldest first.
    pub(super) fn wait(&mut self, lanes: Mask, leave: u32) -> Vec<Copy> {
        // From the newest on, each lane keeps `leave` groups.
        let mut kept = [0u32; LANES];
        let mut arrived: Vec<Vec<Copy>> = Vec::new();
        for group in self.groups.iter_mut().rev() {
            let mut done: Mask = 0;
            super::warp::each(group.lanes & lanes, |l| {
                if kept[l] < leave {
                    kept[l] += 1;
                } else {
                    done |= 1 << l;
                }
            });
            if done != 0 {
                let of = |c: &Copy| done >> c.lane & 1 == 1;
                arrived.push(group.copies.iter().copied().filter(of).collect());
                group.copies.retain(|c| !of(c));
                group.lanes &= !done;
            }
        }
        self.groups.retain(|g| g.lanes != 0);
        arrived.into_iter().rev().flatten().collect()
    }

    /// Everything of some lanes, committed or not: `wait_all`.
    pub(super) fn wait_all(&mut self, lanes: Mask) -> Vec<Copy> {
        self.commit(lanes);
        self.wait(lanes, 0)
    }
}

/// Bulk copies out of shared memory of a warp: by group the tick of the last one that reads.
#[derive(Debug, Default)]
pub(super) struct Sources {
    open: Option<u32>,
    groups: VecDeque<Option<u32>>,
}

impl Sources {
    /// A copy starts to read.
    pub(super) fn start(&mut self, tick: u32) {
        self.open = Some(tick);
    }

    /// `cp.async.bulk.commit_group`
    pub(super) fn commit(&mut self) {
        self.groups.push_back(self.open.take());
    }

    /// `cp.async.bulk.wait_group`: the last tick among the groups that have finished.
    pub(super) fn wait(&mut self, leave: u32) -> Option<u32> {
        let done = self.groups.len().saturating_sub(leave as usize);
        self.groups.drain(..done).flatten().max()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy(lane: u8, to: u32) -> Copy {
        Copy { lane, to, bytes: 4, data: [0; 16], tainted: false }
    }

    #[test]
    fn groups_arrive_in_order_and_lane_by_lane() {
        let mut c = Copies::default();
        c.open.extend([copy(0, 1), copy(1, 2)]);
        c.commit(0b11);
        c.open.push(copy(0, 3));
        c.commit(0b01);
        let to = |v: Vec<Copy>| v.iter().map(|c| c.to).collect::<Vec<_>>();
        // Lane 1 has one group and keeps it; lane 0 has two and keeps the newer.
        assert_eq!(to(c.wait(0b11, 1)), [1]);
        assert_eq!(to(c.wait(0b10, 0)), [2]);
        c.open.push(copy(0, 4));
        assert_eq!(to(c.wait_all(0b01)), [3, 4]);
        assert!(c.groups.is_empty());
    }
}
