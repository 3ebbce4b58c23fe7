//! Blocks that are resident together: one block, a cluster, or the whole grid of a cooperative launch.

use super::launch::Launch;
use super::regs::{LANES, Mask};
use super::shared::Shared;
use super::warp::{Split, Wait, Warp, each};
use crate::card::Card;
use crate::fault::{Fault, FaultKind};
use crate::memory::View;
use crate::options::{Options, Uninitialized};
use crate::program::Kernel;
use crate::ptx::ast::Special;
use crate::stats::Counts;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Bytes of shared memory that the system reserves for itself in every block.
const RESERVED: u32 = 1024;

/// What all blocks of a launch share.
#[derive(Debug)]
pub(super) struct Context<'a> {
    pub kernel: &'a Kernel,
    pub launch: &'a Launch,
    pub view: &'a View,
    pub card: &'a Card,
    pub options: &'a Options,
    /// Parameters.
    pub params: &'a [u8],
    /// Static and dynamic shared memory, and what the system reserves for kernels that ask where.
    pub shared_bytes: u32,
    /// Where the reserved part starts. On cards it comes first; here it comes last, and only if it is asked for.
    pub reserved: u32,
    /// Whether accesses to shared memory are checked at all.
    pub shared_checks: bool,
    /// Blocks of a cluster, 1 without.
    pub cluster_size: usize,
    /// Warps of a block.
    pub warps: usize,
    /// Lane-instructions so far, by all threads, as far as they have reported them.
    pub retired: &'a AtomicU64,
    /// Address of a cooperative grid's workspace, 0 without.
    pub workspace: u64,
    /// For `%gridid`.
    pub grid_id: u64,
}

impl<'a> Context<'a> {
    pub(super) fn new(
        kernel: &'a Kernel,
        launch: &'a Launch,
        view: &'a View,
        card: &'a Card,
        options: &'a Options,
        retired: &'a AtomicU64,
    ) -> Self {
        let threads = launch.block.iter().product::<u32>() as usize;
        let o = options;
        let used = kernel.shared_bytes + launch.dynamic_shared;
        let asks = kernel.files.specials.iter().any(|(_, s)| matches!(s, Special::ReservedSmemOffset(_)));
        let reserved = used.next_multiple_of(128);
        Self {
            kernel,
            launch,
            view,
            card,
            options,
            params: &launch.params,
            shared_bytes: if asks { reserved + RESERVED } else { used },
            reserved,
            shared_checks: o.races
                || o.warp_races
                || o.in_flight
                || o.uninitialized_shared != Uninitialized::Off,
            cluster_size: launch.cluster.iter().product::<u32>().max(1) as usize,
            warps: threads.div_ceil(LANES),
            retired,
            workspace: 0,
            grid_id: 1,
        }
    }

    /// Position of a block in the grid; blocks of a cluster are neighbours in this numbering.
    pub(super) fn block_id(&self, n: usize) -> [u32; 3] {
        let [cx, cy, _] = self.launch.cluster.map(|c| c.max(1) as usize);
        let [gx, gy, _] = self.launch.grid.map(|g| g as usize);
        let (cluster, rank) = (n / self.cluster_size, n % self.cluster_size);
        let (kx, ky) = (gx / cx, gy / cy);
        let c = [cluster % kx, cluster / kx % ky, cluster / (kx * ky)];
        let r = [rank % cx, rank / cx % cy, rank / (cx * cy)];
        let size = self.launch.cluster.map(|c| c.max(1) as usize);
        std::array::from_fn(|i| (c[i] * size[i] + r[i]) as u32)
    }

    /// Position of a thread in its block.
    pub(super) fn thread_id(&self, n: usize) -> [u32; 3] {
        let [x, y, _] = self.launch.block.map(|b| b.max(1) as usize);
        [(n % x) as u32, (n / x % y) as u32, (n / (x * y)) as u32]
    }
}

/// A barrier of a block.
#[derive(Debug, Clone, Default)]
pub(super) struct BarrierState {
    /// Lanes of each warp that have arrived and whose warp is not complete.
    pub partial: Vec<(usize, Mask)>,
    /// Warps that have arrived.
    pub arrived: u32,
    /// Threads that were asked for; `None`: all of the block.
    pub threads: Option<u32>,
    /// What they knew.
    pub clocks: Vec<u32>,
    /// `red`: lanes with a true predicate, and whether all had one.
    pub count: u32,
    pub all: bool,
    pub any: bool,
    /// Whether anyone is there.
    pub open: bool,
}

/// A block.
#[derive(Debug, Default)]
pub(super) struct Block {
    /// Its place in the grid.
    pub id: [u32; 3],
    /// Its warps in the gang.
    pub first_warp: usize,
    /// Barriers 0 to 15.
    pub barriers: Vec<BarrierState>,
}

/// The barrier of a cluster.
#[derive(Debug, Clone, Default)]
pub(super) struct ClusterState {
    /// Warps that have arrived in the current phase.
    pub arrived: usize,
    /// Phases completed.
    pub phase: u32,
    /// What they knew, in this phase and in the last one.
    pub clocks: Vec<u32>,
    pub released: Vec<u32>,
    /// By warp of the gang: phase in which it arrived last, plus one.
    pub seen: Vec<u32>,
}

/// Blocks that run together.
#[derive(Debug, Default)]
pub(super) struct Gang {
    pub blocks: Vec<Block>,
    pub shared: Vec<Shared>,
    pub warps: Vec<Warp>,
    pub clusters: Vec<ClusterState>,
    /// Bulk copies on their way.
    pub bulk: Vec<super::bulk::Pending>,
    /// By operation.
    pub counts: Vec<Counts>,
    /// Latest time of any warp: the next gang starts behind it.
    time: u32,
    /// Time of bulk copies: one more for each.
    pub(super) ticks: u32,
    /// Lane-instructions that `Context::retired` lacks.
    pub(super) unreported: u64,
    /// State of the generator that shuffles warps.
    shuffle: u64,
    /// Times in a row that waits were answered with "not yet" because nothing could run.
    pub(super) stuck: u32,
}

/// Operations a warp runs before another has its turn.
const QUANTUM: u32 = 4096;

impl Gang {
    /// Runs the blocks with these numbers to their end.
    pub(super) fn run(&mut self, cx: &Context<'_>, first: usize, count: usize) -> Result<(), Box<Fault>> {
        self.reset(cx, first, count);
        if let Some(seed) = cx.options.shuffle_seed {
            self.shuffle = (seed ^ first as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        }
        let mut order: Vec<usize> = (0..self.warps.len()).collect();
        loop {
            let mut progress = false;
            if cx.options.shuffle_seed.is_some() {
                self.shuffle(&mut order);
            }
            for w in &order {
                if self.warps[*w].is_ready() {
                    progress = true;
                    let quantum = if cx.options.shuffle_seed.is_some() {
                        1 + self.random() as u32 % 512
                    } else {
                        QUANTUM
                    };
                    self.run_warp(cx, *w, quantum)?;
                }
            }
            if self.warps.iter().all(|w| w.live == 0) {
                break;
            }
            if !progress && !self.deliver(None, None) {
                self.answer_waits_or_report(cx)?;
            }
        }
        cx.retired.fetch_add(std::mem::take(&mut self.unreported), Relaxed);
        let times = self.warps.iter().flat_map(|w| w.clocks.iter().chain([&w.sync]));
        self.time = times.copied().max().unwrap_or(0).max(self.time).max(self.ticks);
        Ok(())
    }

    fn random(&mut self) -> u64 {
        self.shuffle ^= self.shuffle << 13;
        self.shuffle ^= self.shuffle >> 7;
        self.shuffle ^= self.shuffle << 17;
        self.shuffle
    }

    fn shuffle(&mut self, order: &mut [usize]) {
        for i in (1..order.len()).rev() {
            let j = self.random() as usize % (i + 1);
            order.swap(i, j);
        }
    }

    fn reset(&mut self, cx: &Context<'_>, first: usize, count: usize) {
        let per_block = cx.warps;
        let threads = cx.launch.block.iter().product::<u32>() as usize;
        // Warps of a cluster can share memory; those of other blocks cannot.
        // Bulk copies have a time of their own: whoever issues one does not know that it is done.
        let clocks = cx.cluster_size * per_block + 1;
        self.ticks = self.time;
        self.blocks.resize_with(count, Block::default);
        self.shared.resize_with(count, Shared::default);
        self.warps.resize_with(count * per_block, Warp::default);
        self.clusters.clear();
        self.clusters.resize(
            count.div_ceil(cx.cluster_size),
            ClusterState {
                clocks: vec![0; clocks],
                released: vec![0; clocks],
                seen: vec![0; cx.cluster_size * per_block],
                ..ClusterState::default()
            },
        );
        self.bulk.clear();
        self.stuck = 0;
        self.counts.resize(cx.kernel.code.len(), Counts::default());
        if self.time > 1 << 30 {
            self.time = 0;
            self.shared.iter_mut().for_each(Shared::forget_times);
        }
        for b in 0..count {
            let block = &mut self.blocks[b];
            block.id = cx.block_id(first + b);
            block.first_warp = b * per_block;
            block.barriers.clear();
            block
                .barriers
                .resize(16, BarrierState { clocks: vec![0; clocks], all: true, ..BarrierState::default() });
            self.shared[b].reset(cx.shared_bytes as usize, cx.kernel.shared_granule, clocks, cx.options);
            if cx.shared_bytes > cx.reserved {
                self.shared[b].clear(cx.reserved as usize, (cx.shared_bytes - cx.reserved) as usize);
            }
            for w in 0..per_block {
                let warp = &mut self.warps[b * per_block + w];
                let lanes = (threads - w * LANES).min(LANES);
                warp.block = b;
                warp.index = w;
                warp.id = (b % cx.cluster_size) * per_block + w;
                warp.lanes = if lanes == LANES { Mask::MAX } else { (1 << lanes) - 1 };
                warp.live = warp.lanes;
                warp.splits.clear();
                warp.splits.push(Split {
                    pc: 0,
                    mask: warp.live,
                    stack: Vec::new(),
                    wait: Wait::Ready,
                    skipped: 0,
                });
                warp.clocks.clear();
                warp.clocks.resize(clocks, self.time);
                warp.clocks[warp.id] = self.time + 1;
                warp.published.clear();
                warp.seen.clear();
                // Unlike any count that shared memory may remember of earlier blocks.
                warp.sync = self.time + 1;
                warp.copies = super::async_copy::Copies::default();
                warp.sources = super::async_copy::Sources::default();
                (warp.backs, warp.turn) = (0, 0);
                warp.recent.clear();
                let local = cx.kernel.local_bytes as usize * LANES;
                warp.local.clear();
                warp.local.resize(local, 0xf5);
                warp.local_written.clear();
                warp.local_written.resize(local.div_ceil(64), 0);
                warp.local_peeked.clear();
                warp.local_peeked.resize(local.div_ceil(64), 0);
                registers(cx, warp, block.id, first + b);
            }
        }
    }

    /// A fault with its place.
    pub(super) fn fault(
        &self,
        cx: &Context<'_>,
        w: usize,
        pc: u32,
        kind: FaultKind,
        lane: u32,
        message: String,
    ) -> Box<Fault> {
        let warp = &self.warps[w];
        let at = pc as usize;
        Box::new(Fault {
            kind,
            kernel: cx.kernel.name.clone(),
            block: self.blocks[warp.block].id,
            thread: cx.thread_id(warp.index * LANES + lane as usize),
            instruction: cx.kernel.names.get(at).map(|n| n.to_string()).unwrap_or_default(),
            ptx_line: cx.kernel.locations.get(at).map_or(0, |l| l.ptx_line),
            source: cx.kernel.source(at),
            message,
        })
    }

    /// Nothing can run: `try_wait` may say "not yet"; if that changed nothing either, it is a deadlock.
    fn answer_waits_or_report(&mut self, cx: &Context<'_>) -> Result<(), Box<Fault>> {
        self.stuck += 1;
        let mut answered = false;
        if self.stuck <= 64 {
            for warp in &mut self.warps {
                for s in 0..warp.splits.len() {
                    if let Wait::Mbarrier { done, .. } = warp.splits[s].wait {
                        let mask = warp.splits[s].mask;
                        warp.regs.preds[done as usize] &= !mask;
                        warp.splits[s].wait = Wait::Ready;
                        answered = true;
                    }
                }
            }
        }
        if answered {
            return Ok(());
        }
        let waits = |w: &Warp| -> Vec<String> {
            w.splits
                .iter()
                .map(|s| match s.wait {
                    Wait::Barrier(id) => format!("warp {} waits at barrier {id}", w.index),
                    Wait::Cluster => format!("warp {} waits for its cluster", w.index),
                    Wait::Mbarrier { at, .. } => format!("warp {} waits for the mbarrier at {at}", w.index),
                    _ => format!("warp {} waits", w.index),
                })
                .collect()
        };
        let mut all: Vec<String> = self.warps.iter().filter(|w| w.live != 0).flat_map(waits).collect();
        let more = all.len().saturating_sub(8);
        all.truncate(8);
        let mut message = format!("no warp can go on: {}", all.join(", "));
        if more > 0 {
            message += &format!(" and {more} more");
        }
        let gone = self.warps.iter().filter(|w| w.live == 0).count();
        if gone > 0 {
            message += &format!("; {gone} warps have exited");
        }
        let w = self.warps.iter().position(|w| w.live != 0).unwrap_or(0);
        let (pc, lane) =
            self.warps[w].splits.first().map_or((0, 0), |s| (s.pc.saturating_sub(1), Warp::first(s.mask)));
        Err(self.fault(cx, w, pc, FaultKind::Deadlock, lane as u32, message))
    }
}

/// Fills the rows whose values are known when a warp starts.
fn registers(cx: &Context<'_>, warp: &mut Warp, block: [u32; 3], number: usize) {
    let files = &cx.kernel.files;
    let regs = &mut warp.regs;
    if regs.narrow.len() != files.narrow || regs.wide.len() != files.wide || regs.preds.len() != files.preds {
        regs.narrow = vec![[0; LANES]; files.narrow];
        regs.wide = vec![[0; LANES]; files.wide];
        regs.preds = vec![0; files.preds];
        regs.tainted = [vec![0; files.narrow], vec![0; files.wide], vec![0; files.preds]];
        regs.any_tainted = false;
        files.narrow_constants.iter().for_each(|(row, v)| regs.narrow[*row as usize] = [*v; LANES]);
        files.wide_constants.iter().for_each(|(row, v)| regs.wide[*row as usize] = [*v; LANES]);
        files
            .pred_constants
            .iter()
            .for_each(|(row, v)| regs.preds[*row as usize] = if *v { Mask::MAX } else { 0 });
    }
    if regs.any_tainted {
        regs.tainted.iter_mut().for_each(|t| t.fill(0));
        regs.any_tainted = false;
    }
    for (to, special) in &files.specials {
        let value = |l: usize| special_register(cx, *special, warp.index, l, block, number);
        let values: [u64; LANES] = std::array::from_fn(value);
        match to.file {
            super::regs::File::Wide => regs.wide[to.row as usize] = values,
            super::regs::File::Narrow => regs.narrow[to.row as usize] = values.map(|v| v as u32),
            super::regs::File::Pred => {
                let mut mask = 0;
                each(Mask::MAX, |l| mask |= u32::from(values[l] != 0) << l);
                regs.preds[to.row as usize] = mask;
            }
        }
    }
}

fn special_register(
    cx: &Context<'_>,
    s: Special,
    warp: usize,
    lane: usize,
    block: [u32; 3],
    number: usize,
) -> u64 {
    let thread = cx.thread_id(warp * LANES + lane);
    let launch = cx.launch;
    let cluster = launch.cluster.map(|c| c.max(1));
    let at = |v: [u32; 3], i: u8| u64::from(v.get(i as usize).copied().unwrap_or(0));
    let lane = lane as u32;
    match s {
        Special::Tid(i) => at(thread, i),
        Special::Ntid(i) => at(launch.block, i),
        Special::Ctaid(i) => at(block, i),
        Special::Nctaid(i) => at(launch.grid, i),
        Special::ClusterId(i) => at(std::array::from_fn(|i| block[i] / cluster[i]), i),
        Special::NClusterId(i) => at(std::array::from_fn(|i| launch.grid[i] / cluster[i]), i),
        Special::ClusterCtaid(i) => at(std::array::from_fn(|i| block[i] % cluster[i]), i),
        Special::ClusterNctaid(i) => at(cluster, i),
        Special::ClusterCtarank => (number % cx.cluster_size) as u64,
        Special::ClusterNctarank => cx.cluster_size as u64,
        Special::IsExplicitCluster => u64::from(cx.cluster_size > 1),
        Special::Laneid => lane.into(),
        Special::Warpid => warp as u64,
        Special::Nwarpid => u64::from(cx.card.threads_per_sm) / LANES as u64,
        Special::Smid => number as u64 % u64::from(cx.card.sms),
        Special::Nsmid => cx.card.sms.into(),
        Special::Gridid => cx.grid_id,
        Special::LanemaskEq => 1 << lane,
        Special::LanemaskLe => (2u64 << lane) - 1,
        Special::LanemaskLt => (1 << lane) - 1,
        Special::LanemaskGe => u64::from(u32::MAX << lane),
        Special::LanemaskGt => u64::from(u32::MAX) & !((2u64 << lane) - 1),
        Special::DynamicSmemSize => launch.dynamic_shared.into(),
        Special::TotalSmemSize | Special::AggrSmemSize => {
            (cx.kernel.shared_bytes + launch.dynamic_shared).into()
        }
        Special::ReservedSmemOffset(0 | 3) => cx.reserved.into(),
        Special::ReservedSmemOffset(1) => (cx.reserved + RESERVED).into(),
        Special::ReservedSmemOffset(2) => RESERVED.into(),
        // Cooperative groups keep barriers of tiles of several warps there.
        Special::ReservedSmemOffset(_) => (cx.reserved + RESERVED / 2).into(),
        // How cooperative groups find the workspace.
        Special::Envreg(1) => cx.workspace >> 32,
        Special::Envreg(2) => cx.workspace & 0xffff_ffff,
        Special::WarpSize => LANES as u64,
        _ => 0,
    }
}
