//! Runs a warp.

use super::access;
use super::gang::{Context, Gang};
use super::regs::{LANES, Mask, Trouble, WideRow};
use super::rows::{Done, get, little, put, set_taint, taint_of, trouble};
use super::sync::{Next, check_branch_taint};
use super::taint;
use super::warp::{Frame, Pick, Split, Wait, Warp, each};
use super::{atomics, matrix, system};
use crate::fault::{Fault, FaultKind};
use crate::memory::{LOCAL_BASE, PARAM_BASE, SHARED_BASE, SHARED_STRIDE, WINDOW};
use crate::program::{AddressKind, AddressOp, Move, Need, What, Where, function_index};
use std::sync::atomic::Ordering::Relaxed;

/// Lane-instructions after which a gang reports them to the launch.
const REPORT: u64 = 1 << 16;

impl Gang {
    /// Runs a warp until it waits, ends, or has had `quantum` operations.
    pub(super) fn run_warp(&mut self, cx: &Context<'_>, w: usize, quantum: u32) -> Result<(), Box<Fault>> {
        let mut warp = std::mem::take(&mut self.warps[w]);
        let mut at = 0;
        let mut lanes = 0;
        let ran = self.run_taken(cx, &mut warp, quantum, &mut at, &mut lanes);
        self.warps[w] = warp;
        if let Err(t) = ran {
            return Err(self.fault(cx, w, at, t.kind, t.lane, t.message));
        }
        self.unreported += lanes;
        let total = cx.retired.load(Relaxed) + self.unreported;
        // Warps that meet at a barrier every few instructions would else take this from other threads all the time.
        if self.unreported > REPORT {
            cx.retired.fetch_add(std::mem::take(&mut self.unreported), Relaxed);
        }
        let limit = cx.options.instruction_limit;
        if limit != 0 && total > limit {
            let lane = self.warps[w].splits.first().map_or(0, |s| Warp::first(s.mask)) as u32;
            let message = format!("more than {limit} instructions ran: an endless loop?");
            return Err(self.fault(cx, w, at, FaultKind::Runaway, lane, message));
        }
        Ok(())
    }

    fn run_taken(
        &mut self,
        cx: &Context<'_>,
        warp: &mut Warp,
        quantum: u32,
        at: &mut u32,
        lanes: &mut u64,
    ) -> Done {
        let mut budget = quantum;
        loop {
            let (s, forced) = match warp.pick(cx.kernel) {
                Pick::Run(s) => (s, false),
                Pick::Forced(s) => (s, true),
                Pick::None => return Ok(()),
            };
            warp.splits[s].wait = Wait::Ready;
            self.run_split(cx, warp, s, forced, &mut budget, at, lanes)?;
            if budget == 0 {
                return Ok(());
            }
        }
    }

    /// Runs one split until another should run.
    #[allow(clippy::too_many_arguments)]
    fn run_split(
        &mut self,
        cx: &Context<'_>,
        warp: &mut Warp,
        s: usize,
        mut forced: bool,
        budget: &mut u32,
        at: &mut u32,
        lanes: &mut u64,
    ) -> Done {
        let kernel = cx.kernel;
        let mut pc = warp.splits[s].pc;
        let mut mask = warp.splits[s].mask;
        let mut fresh = true;
        loop {
            let code = &kernel.code[pc as usize];
            *at = pc;
            if code.leader && !fresh && warp.splits.len() > 1 {
                warp.splits[s].pc = pc;
                if warp.should_switch(kernel, s) {
                    return Ok(());
                }
            }
            fresh = false;
            if *budget == 0 {
                warp.splits[s].pc = pc;
                return Ok(());
            }
            *budget -= 1;
            warp.turn = warp.turn.saturating_sub(1);
            let run = match code.guard {
                None => mask,
                Some((p, false)) => mask & warp.regs.preds[p as usize],
                Some((p, true)) => mask & !warp.regs.preds[p as usize],
            };
            if warp.regs.any_tainted && code.guard.is_some() {
                check_branch_taint(warp, code.guard, mask)?;
            }
            if run == 0 {
                pc += 1;
                continue;
            }
            // Counted when it runs: lanes that wait for others come here again, and so do those it runs without.
            let need = code.what.need();
            let run = if need == Need::Nothing {
                run
            } else {
                let Some(go) = self.gate(cx, warp, s, pc, run, need, forced)? else { return Ok(()) };
                if go != run {
                    self.part(warp, s, pc, mask & !go, go);
                    mask = go;
                }
                go
            };
            let count = &mut self.counts[pc as usize];
            count.warp_instructions += 1;
            count.thread_instructions += u64::from(run.count_ones());
            *lanes += u64::from(run.count_ones());
            match &code.what {
                What::Alu { op, .. } => {
                    (op.run)(&mut warp.regs, op, run)?;
                    if warp.regs.any_tainted {
                        taint::spread(warp, &kernel.flows[pc as usize], run);
                    }
                    pc += 1;
                }
                What::Branch(target) => {
                    if *target <= pc {
                        warp.backs += 1;
                    }
                    let rest = mask & !run;
                    if rest != 0 {
                        self.counts[pc as usize].divergent_branches += 1;
                        self.part(warp, s, pc + 1, rest, run);
                        warp.splits[s].pc = *target;
                        return Ok(());
                    }
                    pc = *target;
                }
                What::Load(a) => {
                    let counts = &mut self.counts[pc as usize];
                    access::load(cx, warp, &mut self.shared, counts, run, a)?;
                    pc += 1;
                }
                What::Store(a) => {
                    let counts = &mut self.counts[pc as usize];
                    access::store(cx, warp, &mut self.shared, counts, run, a)?;
                    pc += 1;
                }
                What::Atomic(a) => {
                    let counts = &mut self.counts[pc as usize];
                    atomics::atomic(cx, warp, &mut self.shared, counts, run, a)?;
                    pc += 1;
                }
                What::Matrix(m) => {
                    let counts = &mut self.counts[pc as usize];
                    matrix::matrix(cx, warp, &mut self.shared, counts, run, m)?;
                    pc += 1;
                }
                What::Address(a) => {
                    address_op(cx, warp, run, a)?;
                    pc += 1;
                }
                What::Copy(c) => {
                    let mut counts = std::mem::take(&mut self.counts[pc as usize]);
                    let done = self.async_copy(cx, warp, &mut counts, run, c);
                    self.counts[pc as usize] = counts;
                    done?;
                    pc += 1;
                }
                What::CopyCommit => {
                    warp.copies.commit(run);
                    pc += 1;
                }
                What::CopyWait { leave, all } => {
                    let copies = if *all { warp.copies.wait_all(run) } else { warp.copies.wait(run, *leave) };
                    self.arrive(cx, warp, &copies);
                    pc += 1;
                }
                What::CopyArrive { address, no_increment } => {
                    self.copy_arrive(cx, warp, run, *address, *no_increment)?;
                    pc += 1;
                }
                What::Barrier(b) => {
                    self.counts[pc as usize].barriers += 1;
                    self.part(warp, s, pc + 1, mask & !run, run);
                    mask = run;
                    let next = self.barrier(warp, run, b)?;
                    pc += 1;
                    let stop = self.wait(warp, s, pc, next);
                    self.check_barriers(cx, warp);
                    if stop && warp.splits[s].wait != Wait::Ready {
                        return Ok(());
                    }
                }
                What::ClusterBarrier { arrive, .. } => {
                    self.counts[pc as usize].barriers += 1;
                    self.part(warp, s, pc + 1, mask & !run, run);
                    mask = run;
                    let next = self.cluster_barrier(cx, warp, *arrive, run)?;
                    pc += 1;
                    let stop = self.wait(warp, s, pc, next);
                    self.check_cluster(cx, warp);
                    if stop && warp.splits[s].wait != Wait::Ready {
                        return Ok(());
                    }
                }
                What::Mbarrier(m) => {
                    let waits = matches!(**m, crate::program::Mbarrier::Wait { .. });
                    let next = self.mbarrier(cx, warp, run, m)?;
                    pc += 1;
                    if next != Next::On && run != mask {
                        self.part(warp, s, pc, mask & !run, run);
                    }
                    if self.wait(warp, s, pc, next) {
                        return Ok(());
                    }
                    if waits && next == Next::On {
                        // Whoever polls makes room for those it waits for.
                        warp.splits[s].pc = pc;
                        *budget = (*budget).min(64);
                    }
                }
                What::WarpSync { .. } => {
                    warp.sync += 1;
                    pc += 1;
                }
                What::Exit => {
                    warp.live &= !run;
                    mask &= !run;
                    warp.splits[s].mask = mask;
                    warp.splits[s].pc = pc + 1;
                    if mask == 0 {
                        warp.splits.swap_remove(s);
                    }
                    self.check_barriers(cx, warp);
                    if cx.cluster_size > 1 {
                        self.check_cluster(cx, warp);
                    }
                    return Ok(());
                }
                What::Call { target, arguments, returns } => {
                    check_recursion(cx, &warp.splits[s], pc, *target, run)?;
                    copy_local(cx, warp, run, arguments);
                    if run != mask {
                        self.part(warp, s, pc + 1, mask & !run, run);
                        mask = run;
                    }
                    warp.splits[s].stack.push(Frame { pc: pc + 1, returns: returns.clone() });
                    pc = *target;
                }
                What::CallIndirect { function, targets } => {
                    let row = warp.regs.wide[*function as usize];
                    let lane = Warp::first(run);
                    let go = alike(&row, run);
                    let found = function_index(row[lane]).and_then(|i| targets.get(i).cloned().flatten());
                    let Some(call) = found else {
                        return trouble(
                            FaultKind::Trap,
                            lane,
                            format!("{:#x} is no function that this call can reach", row[lane]),
                        );
                    };
                    check_recursion(cx, &warp.splits[s], pc, call.target, go)?;
                    copy_local(cx, warp, go, &call.arguments);
                    if go != mask {
                        // Lanes with another function stay; lanes without one go on.
                        self.leave(warp, s, pc, run & !go, go);
                        *lanes -= u64::from((run & !go).count_ones());
                        self.part(warp, s, pc + 1, mask & !run, go);
                        mask = go;
                    }
                    warp.splits[s].stack.push(Frame { pc: pc + 1, returns: call.returns });
                    pc = call.target;
                }
                What::Return => {
                    let Some(frame) = warp.splits[s].stack.last().cloned() else {
                        return trouble(FaultKind::Trap, Warp::first(run), "ret outside of a call");
                    };
                    copy_local(cx, warp, run, &frame.returns);
                    if run != mask {
                        self.part(warp, s, pc + 1, mask & !run, run);
                    }
                    let split = &mut warp.splits[s];
                    split.stack.pop();
                    split.mask = run;
                    split.pc = frame.pc;
                    mask = run;
                    pc = frame.pc;
                }
                What::BranchIndexed { index, targets } => {
                    let row = warp.regs.narrow[*index as usize];
                    let lane = Warp::first(run);
                    let Some(target) = targets.get(row[lane] as usize).copied() else {
                        return trouble(
                            FaultKind::Trap,
                            lane,
                            format!("index {} of a table of {} branch targets", row[lane], targets.len()),
                        );
                    };
                    let go = alike(&row, run);
                    if go != mask {
                        self.counts[pc as usize].divergent_branches += 1;
                        self.leave(warp, s, pc, run & !go, go);
                        *lanes -= u64::from((run & !go).count_ones());
                        self.part(warp, s, pc + 1, mask & !run, go);
                        warp.splits[s].pc = target;
                        return Ok(());
                    }
                    pc = target;
                }
                What::System { function, arguments, result } => {
                    system::call(cx, warp, run, *function, arguments, *result)?;
                    pc += 1;
                }
                What::Trap => {
                    return trouble(FaultKind::Trap, Warp::first(run), "the kernel executed a trap");
                }
                What::Refused(why) => return trouble(FaultKind::Trap, Warp::first(run), why.to_string()),
                What::Bulk(b) => {
                    self.bulk_copy(cx, warp, run, b)?;
                    pc += 1;
                }
                What::Clock(to) => {
                    // Never the same twice, and it advances with what runs, not with the host's clock.
                    let now = cx.retired.load(Relaxed) + self.unreported + *lanes;
                    put(warp, *to, &[now; LANES], run);
                    set_taint(warp, *to, 0, run);
                    pc += 1;
                }
                What::Fence => {
                    warp.fence();
                    pc += 1;
                }
                What::BulkCommit => {
                    warp.sources.commit();
                    pc += 1;
                }
                What::BulkWait { leave } => {
                    if let Some(tick) = warp.sources.wait(*leave) {
                        warp.learn_of_copies(tick);
                    }
                    pc += 1;
                }
                What::Nothing | What::Checked => pc += 1,
            }
            forced = false;
        }
    }

    /// Lanes that may run an operation now; `None` if others have to come first.
    #[allow(clippy::too_many_arguments)]
    fn gate(
        &mut self,
        cx: &Context<'_>,
        warp: &mut Warp,
        s: usize,
        pc: u32,
        run: Mask,
        need: Need,
        forced: bool,
    ) -> Done<Option<Mask>> {
        let mask = warp.splits[s].mask;
        let (go, required) = match need {
            Need::Nothing => return Ok(Some(run)),
            Need::Warp => (run, warp.live),
            Need::Members(row) => {
                let row = &warp.regs.narrow[row as usize];
                (alike(row, run), row[Warp::first(run)] & warp.live)
            }
        };
        let missing = required & !go;
        let skipped = std::mem::take(&mut warp.splits[s].skipped) & !go;
        if missing == 0 {
            if skipped != 0 && cx.options.divergence {
                let message = format!(
                    "lanes {go:#010x} run it, lanes {skipped:#010x} went around it to the end of the kernel"
                );
                return trouble(FaultKind::Divergence, Warp::first(go), message);
            }
            return Ok(Some(go));
        }
        // Lanes that are here but switched off by the guard cannot come.
        let elsewhere = missing & !mask;
        if elsewhere != 0 && !forced && warp.splits.len() > 1 {
            // Lanes that returned early never held up a barrier; those that could have run it and did not are an error, also
            // if they exit before anyone notices.
            if need == Need::Warp {
                let depth = warp.splits[s].stack.len();
                let beyond = |o: &Split| o.stack.len() == depth && cx.kernel.leads_to(pc, o.pc);
                let others = warp.splits.iter().enumerate().filter(|(i, o)| *i != s && beyond(o));
                let ahead = others.fold(0, |m, (_, o)| m | o.mask);
                warp.splits[s].skipped = skipped | ahead;
            }
            warp.splits[s].pc = pc;
            warp.splits[s].wait = Wait::Lanes;
            return Ok(None);
        }
        if !cx.options.divergence {
            return Ok(Some(go));
        }
        let lane = Warp::first(missing);
        let why = if elsewhere != 0 { "are elsewhere" } else { "are switched off by its guard" };
        let message = format!(
            "lanes {go:#010x} run it together with lanes {missing:#010x}, which {why}: {}",
            match need {
                Need::Warp => "all lanes of the warp have to run it",
                _ => "all lanes of its member mask have to run it",
            }
        );
        Err(Box::new(Trouble { kind: FaultKind::Divergence, lane: lane as u32, message }))
    }

    /// Leaves `rest` behind at `pc`; the split goes on with `stay`.
    fn part(&mut self, warp: &mut Warp, s: usize, pc: u32, rest: Mask, stay: Mask) {
        if rest != 0 {
            let stack = warp.splits[s].stack.clone();
            warp.splits.push(Split { pc, mask: rest, stack, wait: Wait::Ready, skipped: 0 });
        }
        warp.splits[s].mask = stay;
    }

    /// Leaves `rest` behind to run the same operation later, which has been counted for them.
    fn leave(&mut self, warp: &mut Warp, s: usize, pc: u32, rest: Mask, stay: Mask) {
        self.counts[pc as usize].thread_instructions -= u64::from(rest.count_ones());
        self.part(warp, s, pc, rest, stay);
    }

    /// Notes where a split goes on. Returns whether it waits.
    fn wait(&mut self, warp: &mut Warp, s: usize, pc: u32, next: Next) -> bool {
        warp.splits[s].pc = pc;
        match next {
            Next::On => false,
            Next::Waits(wait) => {
                warp.splits[s].wait = wait;
                true
            }
        }
    }
}

/// Lanes of a set that hold the same as its first one.
fn alike<T: PartialEq>(row: &[T; LANES], mask: Mask) -> Mask {
    let first = &row[Warp::first(mask)];
    let mut same = 0;
    each(mask, |l| same |= u32::from(row[l] == *first) << l);
    same
}

/// Registers and local memory have one place a function. Calls that are known beforehand were looked at when the kernel was
/// loaded; one through a register may still lead back.
fn check_recursion(cx: &Context<'_>, split: &Split, pc: u32, target: u32, mask: Mask) -> Done {
    if !cx.kernel.indirect {
        return Ok(());
    }
    // A frame's place is behind its call.
    let callers = split.stack.iter().map(|f| f.pc.saturating_sub(1)).chain([pc]);
    if callers.into_iter().any(|c| cx.kernel.start_of(c) == Some(target)) {
        return trouble(
            FaultKind::Trap,
            Warp::first(mask),
            "the function called is running already: recursion is not supported",
        );
    }
    Ok(())
}

/// Copies arguments or return values of some lanes.
fn copy_local(cx: &Context<'_>, warp: &mut Warp, mask: Mask, moves: &[Move]) {
    let size = cx.kernel.local_bytes as usize;
    each(mask, |l| {
        for m in moves {
            let (from, to, n) = (l * size + m.from as usize, l * size + m.to as usize, m.bytes as usize);
            warp.local.copy_within(from..from + n, to);
            for i in 0..n {
                let written = warp.local_written[(from + i) / 64] >> ((from + i) % 64) & 1;
                let (word, bit) = ((to + i) / 64, (to + i) % 64);
                warp.local_written[word] = warp.local_written[word] & !(1 << bit) | written << bit;
            }
        }
    });
}

/// `cvta`, `isspacep`, `mapa`, `getctarank`.
fn address_op(cx: &Context<'_>, warp: &mut Warp, mask: Mask, a: &AddressOp) -> Done {
    let window = |space: Where| match space {
        Where::Shared | Where::Cluster => SHARED_BASE,
        Where::Local => LOCAL_BASE,
        Where::Param => PARAM_BASE,
        _ => 0,
    };
    let from = get(warp, a.from);
    let mut out: WideRow = [0; LANES];
    let own = warp.block % cx.cluster_size;
    for l in 0..LANES {
        let x = from[l];
        out[l] = match a.kind {
            AddressKind::ToGeneric(space) => x.wrapping_add(window(space)),
            AddressKind::FromGeneric(space) => x.wrapping_sub(window(space)),
            AddressKind::IsSpace(space) => u64::from(match window(space) {
                0 => [SHARED_BASE, LOCAL_BASE, PARAM_BASE].iter().all(|b| x.wrapping_sub(*b) >= WINDOW),
                base if space == Where::Shared => {
                    let at = x.wrapping_sub(base);
                    at < SHARED_STRIDE || at < WINDOW && at / SHARED_STRIDE == own as u64 + 1
                }
                base => x.wrapping_sub(base) < WINDOW,
            }),
            AddressKind::MapGeneric | AddressKind::MapShared => {
                let base = if a.kind == AddressKind::MapGeneric { SHARED_BASE } else { 0 };
                let rank = a.rank.map_or(0, |r| warp.regs.narrow[r as usize][l]);
                if mask >> l & 1 == 1 && rank as usize >= cx.cluster_size {
                    return trouble(
                        FaultKind::Trap,
                        l,
                        format!("rank {rank} in a cluster of {} blocks", cx.cluster_size),
                    );
                }
                base + x.wrapping_sub(base) % SHARED_STRIDE + (u64::from(rank) + 1) * SHARED_STRIDE
            }
            AddressKind::Rank => {
                let at = if x >= SHARED_BASE { x - SHARED_BASE } else { x };
                (at / SHARED_STRIDE).checked_sub(1).unwrap_or(own as u64)
            }
        };
    }
    put(warp, a.to, &out, mask);
    let tainted = taint_of(warp, a.from);
    set_taint(warp, a.to, tainted, mask);
    Ok(())
}

/// The address rows of a system call's arguments lie in local memory.
pub(super) fn local_value(cx: &Context<'_>, warp: &Warp, lane: usize, at: u32) -> u64 {
    let from = lane * cx.kernel.local_bytes as usize + at as usize;
    warp.local.get(from..from + 8).map_or(0, little)
}

/// Used by `system` to read what a generic address holds.
pub(super) fn byte_at(
    cx: &Context<'_>,
    warp: &mut Warp,
    shared: &[u8],
    lane: usize,
    address: u64,
) -> Option<u8> {
    if address.wrapping_sub(LOCAL_BASE) < WINDOW {
        let at = (address - LOCAL_BASE) as usize;
        let size = cx.kernel.local_bytes as usize;
        return (at < size).then(|| warp.local[lane * size + at]);
    }
    if address.wrapping_sub(SHARED_BASE) < WINDOW {
        return shared.get((address - SHARED_BASE) as usize).copied();
    }
    let m = super::global::find(cx.view, &mut warp.last_allocation, address)?;
    m.holds(address - m.base(), 1).then(|| m.load(address - m.base(), 1) as u8)
}
