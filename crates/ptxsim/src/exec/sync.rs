//! Barriers, mbarriers and `cp.async`.

use super::access::shared_place;
use super::async_copy::Copy;
use super::gang::{Context, Gang};
use super::mbarrier::{MAX_COUNT, MbarrierState};
use super::regs::{File, LANES, Mask};
use super::rows::{Done, addresses, check_address_taint, put, taint_of, trouble};
use super::shared::Who;
use super::warp::{Wait, Warp, each, try_each};
use crate::fault::FaultKind;
use crate::program::{AsyncCopy, Barrier, Mbarrier, Reduce, Strength};
use crate::stats::Counts;

/// Whether the split that ran goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// With the next operation.
    On,
    /// It waits.
    Waits(Wait),
}

impl Gang {
    /// `bar`, `barrier`. The warp is taken out of the gang while it runs.
    pub(super) fn barrier(&mut self, warp: &mut Warp, mask: Mask, b: &Barrier) -> Done<Next> {
        let lane = Warp::first(mask);
        let id = warp.regs.narrow[b.id as usize][lane];
        // It orders all accesses before it, those that others saw by polling too.
        warp.fence();
        if id >= 16 {
            return trouble(FaultKind::Trap, lane, format!("there are barriers 0 to 15, not {id}"));
        }
        let threads = b.threads.map(|t| warp.regs.narrow[t as usize][lane]);
        if let Some(n) = threads
            && (n == 0 || !n.is_multiple_of(LANES as u32))
        {
            return trouble(
                FaultKind::Trap,
                lane,
                format!("{n} threads at a barrier: expected a multiple of 32"),
            );
        }
        let state = &mut self.blocks[warp.block].barriers[id as usize];
        if state.open && state.threads != threads {
            return trouble(
                FaultKind::Trap,
                lane,
                format!(
                    "barrier {id} is used with {:?} threads by some and {threads:?} by others",
                    state.threads
                ),
            );
        }
        state.open = true;
        state.threads = threads;
        if let Some((_, _, p, negated)) = b.reduce {
            let p = warp.regs.preds[p as usize] ^ if negated { Mask::MAX } else { 0 };
            state.count += (p & mask).count_ones();
            state.all &= p & mask == mask;
            state.any |= p & mask != 0;
        }
        state.clocks.iter_mut().zip(&warp.clocks).for_each(|(a, b)| *a = (*a).max(*b));
        // A warp counts once all its live lanes are there.
        let arrived = match state.partial.iter_mut().find(|(w, _)| *w == warp.index) {
            Some((_, lanes)) => {
                *lanes |= mask;
                *lanes
            }
            None => {
                state.partial.push((warp.index, mask));
                mask
            }
        };
        if arrived & warp.live == warp.live {
            state.partial.retain(|(w, _)| *w != warp.index);
            state.arrived += 1;
        }
        warp.release();
        let wait = Wait::Barrier(id as u8);
        Ok(if b.arrive { Next::On } else { Next::Waits(wait) })
    }

    /// Lets those go who wait at a barrier that is complete. `out` is the warp that is taken out of the gang.
    pub(super) fn check_barriers(&mut self, cx: &Context<'_>, out: &mut Warp) {
        let block = out.block;
        let first = self.blocks[block].first_warp;
        let live = (0..cx.warps)
            .filter(|w| if *w == out.index { out.live != 0 } else { self.warps[first + w].live != 0 })
            .count() as u32;
        for id in 0..16 {
            let state = &self.blocks[block].barriers[id];
            if !state.open {
                continue;
            }
            let complete = match state.threads {
                Some(n) => state.arrived * LANES as u32 >= n,
                None => state.arrived >= live,
            };
            if !complete {
                continue;
            }
            let clocks = vec![0; state.clocks.len()];
            let done = std::mem::replace(
                &mut self.blocks[block].barriers[id],
                super::gang::BarrierState { clocks, all: true, ..Default::default() },
            );
            let code = &cx.kernel.code;
            let wake = |warp: &mut Warp| {
                let mut woken = false;
                for s in 0..warp.splits.len() {
                    if warp.splits[s].wait != Wait::Barrier(id as u8) {
                        continue;
                    }
                    woken = true;
                    warp.splits[s].wait = Wait::Ready;
                    // The barrier is the operation before.
                    let pc = warp.splits[s].pc as usize - 1;
                    if let crate::program::What::Barrier(b) = &code[pc].what
                        && let Some((kind, to, ..)) = b.reduce
                    {
                        let value = match kind {
                            Reduce::Count => u64::from(done.count),
                            Reduce::All => u64::from(done.all),
                            Reduce::Any => u64::from(done.any),
                        };
                        let mask = warp.splits[s].mask;
                        put(warp, to, &[value; LANES], mask);
                    }
                }
                if woken {
                    warp.acquire(&done.clocks);
                }
            };
            for w in 0..cx.warps {
                if w == out.index {
                    wake(out);
                } else {
                    wake(&mut self.warps[first + w]);
                }
            }
        }
    }

    /// `barrier.cluster`
    pub(super) fn cluster_barrier(
        &mut self,
        cx: &Context<'_>,
        warp: &mut Warp,
        arrive: bool,
        mask: Mask,
    ) -> Done<Next> {
        let cluster = warp.block / cx.cluster_size;
        let me = warp.block % cx.cluster_size * cx.warps + warp.index;
        let state = &mut self.clusters[cluster];
        if arrive {
            if state.seen[me] == state.phase + 1 {
                return trouble(
                    FaultKind::Trap,
                    Warp::first(mask),
                    "the warp arrives twice at the cluster barrier without waiting",
                );
            }
            state.seen[me] = state.phase + 1;
            state.arrived += 1;
            state.clocks.iter_mut().zip(&warp.clocks).for_each(|(a, b)| *a = (*a).max(*b));
            warp.release();
            return Ok(Next::On);
        }
        if state.seen[me] == 0 {
            return trouble(FaultKind::Trap, Warp::first(mask), "barrier.cluster.wait without arrive");
        }
        if state.seen[me] <= state.phase {
            let released = state.released.clone();
            warp.acquire(&released);
            return Ok(Next::On);
        }
        Ok(Next::Waits(Wait::Cluster))
    }

    /// Ends the phase of a cluster barrier that all live warps have reached.
    pub(super) fn check_cluster(&mut self, cx: &Context<'_>, out: &mut Warp) {
        let cluster = out.block / cx.cluster_size;
        let first = cluster * cx.cluster_size * cx.warps;
        let n = (cx.cluster_size * cx.warps).min(self.warps.len() - first);
        let out_at = out.block * cx.warps + out.index;
        let live = (first..first + n)
            .filter(|w| if *w == out_at { out.live != 0 } else { self.warps[*w].live != 0 })
            .count();
        let state = &mut self.clusters[cluster];
        if state.arrived == 0 || state.arrived < live {
            return;
        }
        state.arrived = 0;
        state.phase += 1;
        state.released = std::mem::replace(&mut state.clocks, vec![0; state.released.len()]);
        let released = state.released.clone();
        let wake = |warp: &mut Warp| {
            let mut woken = false;
            for s in warp.splits.iter_mut().filter(|s| s.wait == Wait::Cluster) {
                s.wait = Wait::Ready;
                woken = true;
            }
            if woken {
                warp.acquire(&released);
            }
        };
        for w in first..first + n {
            if w != out_at {
                wake(&mut self.warps[w]);
            }
        }
        wake(out);
    }

    /// `cp.async`: the data is read now and written when it is waited for.
    pub(super) fn async_copy(
        &mut self,
        cx: &Context<'_>,
        warp: &mut Warp,
        counts: &mut Counts,
        mask: Mask,
        c: &AsyncCopy,
    ) -> Done {
        check_address_taint(warp, c.to.row, mask)?;
        check_address_taint(warp, c.from.row, mask)?;
        let (to, from) = (addresses(warp, c.to), addresses(warp, c.from));
        let mut reads: Mask = 0;
        let mut copies = Vec::with_capacity(mask.count_ones() as usize);
        let ignore = c
            .ignore
            .map_or(0, |(p, negated)| warp.regs.preds[p as usize] ^ if negated { Mask::MAX } else { 0 });
        try_each(mask, |l| {
            let n = match c.source_bytes {
                _ if ignore >> l & 1 == 1 => 0,
                Some(row) => warp.regs.narrow[row as usize][l].min(c.bytes),
                None => c.bytes,
            };
            let (owner, offset) = shared_place(cx, &self.shared, warp.block, to[l], c.bytes, l)?;
            let mut data = [0u8; 16];
            let mut tainted = false;
            if n > 0 {
                reads |= 1 << l;
                if !from[l].is_multiple_of(c.bytes.into()) {
                    return trouble(
                        FaultKind::Misaligned,
                        l,
                        format!("the source {:#x} is no multiple of {}", from[l], c.bytes),
                    );
                }
                let m = match super::global::find(cx.view, &mut warp.last_allocation, from[l]) {
                    Some(m) if m.holds(from[l] - m.base(), n.into()) => m,
                    _ => return Err(super::global::outside(cx.view, from[l], n, l)),
                };
                let at = from[l] - m.base();
                if cx.options.uninitialized_global != crate::options::Uninitialized::Off
                    && !m.is_written(at, n.into())
                {
                    if cx.options.uninitialized_global == crate::options::Uninitialized::Strict {
                        return trouble(
                            FaultKind::Uninitialized,
                            l,
                            format!("{n} bytes at {:#x} were never written", from[l]),
                        );
                    }
                    tainted = true;
                }
                if n == 16 {
                    data[..8].copy_from_slice(&m.load(at, 8).to_le_bytes());
                    data[8..].copy_from_slice(&m.load(at + 8, 8).to_le_bytes());
                } else {
                    (0..n as usize).for_each(|i| data[i] = m.load(at + i as u64, 1) as u8);
                }
            }
            let memory = &mut self.shared[owner];
            if cx.shared_checks {
                let who = Who { id: warp.id, clocks: &warp.clocks, sync: warp.sync, lane: l, several: false };
                memory.check_write(offset, c.bytes as usize, who, cx.options, false, Strength::Weak)?;
                memory.flight(offset, c.bytes as usize, true);
            }
            copies.push(Copy { lane: l as u8, to: offset as u32, bytes: c.bytes as u8, data, tainted });
            Ok(())
        })?;
        warp.copies.open.extend(copies);
        if cx.options.counters && reads != 0 {
            super::global::count(counts, &from, reads, c.bytes);
        }
        Ok(())
    }

    /// Copies that were waited for arrive.
    pub(super) fn arrive(&mut self, cx: &Context<'_>, warp: &Warp, copies: &[Copy]) {
        let memory = &mut self.shared[warp.block];
        for c in copies {
            let (at, n) = (c.to as usize, c.bytes as usize);
            memory.data[at..at + n].copy_from_slice(&c.data[..n]);
            if cx.shared_checks {
                if !c.tainted {
                    memory.mark(at, n);
                }
                memory.flight(at, n, false);
            }
        }
        if cx.options.races || cx.options.warp_races {
            for c in copies {
                memory.rewritten(c.to as usize, c.bytes as usize, Who::of(warp, c.lane as usize));
            }
        }
    }

    /// Wakes those who wait for the phase of an mbarrier that has ended. `out` is the warp that is taken out of the gang.
    pub(super) fn wake_mbarrier(&mut self, out: Option<&mut Warp>, block: usize, at: usize) {
        let Some(state) = self.shared[block].mbarriers.get(&(at as u32)) else { return };
        for warp in self.warps.iter_mut().chain(out) {
            wake_one(warp, block, at, state);
        }
        self.stuck = 0;
    }

    /// `mbarrier.*`
    pub(super) fn mbarrier(
        &mut self,
        cx: &Context<'_>,
        warp: &mut Warp,
        mask: Mask,
        m: &Mbarrier,
    ) -> Done<Next> {
        let place = |g: &Self, warp: &Warp, row, lane: usize| -> Done<(usize, usize)> {
            shared_place(cx, &g.shared, warp.block, addresses(warp, row)[lane], 8, lane)
        };
        let missing = |lane: usize, at: usize| -> Done<Next> {
            trouble(
                FaultKind::Trap,
                lane,
                format!("there is no mbarrier at shared offset {at}: mbarrier.init comes first"),
            )
        };
        match m {
            Mbarrier::Init { address, count } => {
                try_each(mask, |l| {
                    let (block, at) = place(self, warp, *address, l)?;
                    let n = warp.regs.narrow[*count as usize][l];
                    if n == 0 || n > MAX_COUNT {
                        return trouble(
                            FaultKind::Trap,
                            l,
                            format!("an mbarrier for {n} arrivals: expected 1 to {MAX_COUNT}"),
                        );
                    }
                    let memory = &mut self.shared[block];
                    if cx.shared_checks {
                        memory.check_write(at, 8, Who::of(warp, l), cx.options, true, Strength::Weak)?;
                    }
                    memory.store(at, 8, 0x6d62_6172_0000_0000 | u64::from(n));
                    memory.mark(at, 8);
                    memory.mbarriers.insert(at as u32, MbarrierState::new(n, warp.clocks.len()));
                    Ok(())
                })?;
                Ok(Next::On)
            }
            Mbarrier::Invalidate { address } => {
                try_each(mask, |l| {
                    let (block, at) = place(self, warp, *address, l)?;
                    if self.shared[block].mbarriers.remove(&(at as u32)).is_none() {
                        return missing(l, at).map(|_| ());
                    }
                    Ok(())
                })?;
                Ok(Next::On)
            }
            Mbarrier::Arrive { address, state, count, expect, drop, .. } => {
                let mut tokens = [0u64; LANES];
                let mut ended = Vec::new();
                let clocks = warp.clocks.clone();
                try_each(mask, |l| {
                    let (block, at) = place(self, warp, *address, l)?;
                    let n = count.map_or(1, |c| warp.regs.narrow[c as usize][l]);
                    let bytes = expect.map_or(0, |e| warp.regs.narrow[e as usize][l]);
                    let Some(b) = self.shared[block].mbarriers.get_mut(&(at as u32)) else {
                        return missing(l, at).map(|_| ());
                    };
                    if i64::from(n) > b.pending {
                        return trouble(
                            FaultKind::Trap,
                            l,
                            format!("{n} arrivals at an mbarrier whose phase needs {} more", b.pending),
                        );
                    }
                    tokens[l] = b.token();
                    b.bytes += i64::from(bytes);
                    b.pending -= i64::from(n);
                    if *drop {
                        b.dropped += n;
                    }
                    b.learn(&clocks);
                    if b.advance() {
                        ended.push((block, at));
                    }
                    Ok(())
                })?;
                warp.release();
                if let Some(row) = state {
                    each(mask, |l| warp.regs.wide[*row as usize][l] = tokens[l]);
                }
                for (block, at) in ended {
                    self.wake_mbarrier(Some(warp), block, at);
                }
                Ok(Next::On)
            }
            Mbarrier::Expect { address, bytes, .. } | Mbarrier::Complete { address, bytes, .. } => {
                let complete = matches!(m, Mbarrier::Complete { .. });
                let mut ended = Vec::new();
                try_each(mask, |l| {
                    let (block, at) = place(self, warp, *address, l)?;
                    let n = i64::from(warp.regs.narrow[*bytes as usize][l]);
                    let Some(b) = self.shared[block].mbarriers.get_mut(&(at as u32)) else {
                        return missing(l, at).map(|_| ());
                    };
                    b.bytes += if complete { -n } else { n };
                    if b.advance() {
                        ended.push((block, at));
                    }
                    Ok(())
                })?;
                for (block, at) in ended {
                    self.wake_mbarrier(Some(warp), block, at);
                }
                Ok(Next::On)
            }
            Mbarrier::Wait { address, done, phase, parity, blocks } => {
                // Lanes of one split ask about one object nearly always; each answer is its own.
                let mut answer: Mask = 0;
                let mut waits = None;
                let mut known = vec![0; warp.clocks.len()];
                try_each(mask, |l| {
                    let (block, at) = place(self, warp, *address, l)?;
                    let asked = match phase.file {
                        File::Narrow => u64::from(warp.regs.narrow[phase.row as usize][l]),
                        _ => warp.regs.wide[phase.row as usize][l],
                    };
                    let finished = |b: &MbarrierState| {
                        if *parity { b.parity_done(asked as u32) } else { b.token_done(asked) }
                    };
                    let Some(b) = self.shared[block].mbarriers.get(&(at as u32)) else {
                        return missing(l, at).map(|_| ());
                    };
                    if !finished(b) && self.bulk.iter().any(|p| p.mbarrier == (block, at)) {
                        // Copies arrive when someone looks for them.
                        self.deliver(Some(warp), Some((block, at)));
                    }
                    let b = &self.shared[block].mbarriers[&(at as u32)];
                    if finished(b) {
                        answer |= 1 << l;
                        known.iter_mut().zip(&b.released).for_each(|(a, b)| *a = (*a).max(*b));
                    } else {
                        waits = Some(Wait::Mbarrier {
                            block: block as u32,
                            at: at as u32,
                            phase: b.phase,
                            done: *done,
                        });
                    }
                    Ok(())
                })?;
                let row = &mut warp.regs.preds[*done as usize];
                *row = *row & !mask | answer;
                if answer != 0 {
                    warp.acquire(&known);
                }
                match waits {
                    // All lanes wait for the same: the split sleeps until the phase ends. Otherwise it asks again.
                    Some(wait) if *blocks && answer == 0 => Ok(Next::Waits(wait)),
                    _ => Ok(Next::On),
                }
            }
            Mbarrier::Pending { count, state } => {
                each(mask, |l| {
                    warp.regs.narrow[*count as usize][l] = warp.regs.wide[*state as usize][l] as u32;
                });
                Ok(Next::On)
            }
        }
    }

    /// `cp.async.mbarrier.arrive`: earlier copies of the lane arrive, then the lane.
    pub(super) fn copy_arrive(
        &mut self,
        cx: &Context<'_>,
        warp: &mut Warp,
        mask: Mask,
        address: crate::program::AddressRow,
        no_increment: bool,
    ) -> Done {
        let copies = warp.copies.wait_all(mask);
        self.arrive(cx, warp, &copies);
        if !no_increment {
            // The pending count goes up by one and down by one again.
            return Ok(());
        }
        let arrive = Mbarrier::Arrive { address, state: None, count: None, expect: None, drop: false };
        self.mbarrier(cx, warp, mask, &arrive).map(|_| ())
    }
}

/// Wakes splits of a warp that wait for an ended phase.
fn wake_one(warp: &mut Warp, block: usize, at: usize, state: &MbarrierState) {
    let mut woken = false;
    for s in 0..warp.splits.len() {
        if let Wait::Mbarrier { block: b, at: a, phase, done } = warp.splits[s].wait
            && (b as usize, a as usize) == (block, at)
            && phase != state.phase
        {
            let mask = warp.splits[s].mask;
            warp.regs.preds[done as usize] |= mask;
            warp.splits[s].wait = Wait::Ready;
            woken = true;
        }
    }
    if woken {
        warp.acquire(&state.released);
    }
}

/// Refuses a decision that depends on memory that was never written.
pub(super) fn check_branch_taint(warp: &Warp, guard: Option<(u16, bool)>, mask: Mask) -> Done {
    let Some((p, _)) = guard else { return Ok(()) };
    let row = crate::program::RowRef { file: File::Pred, row: p };
    let tainted = taint_of(warp, row) & mask;
    if tainted != 0 {
        return trouble(
            FaultKind::Uninitialized,
            Warp::first(tainted),
            "the branch depends on memory that was never written",
        );
    }
    Ok(())
}
