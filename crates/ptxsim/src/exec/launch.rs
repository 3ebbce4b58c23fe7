//! A launch.

use super::gang::{Context, Gang};
use crate::card::Card;
use crate::fault::Fault;
use crate::memory::{Allocation, View};
use crate::options::Options;
use crate::program::Kernel;
use crate::stats::{Counts, LineCounts, Stats};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of a cooperative grid's workspace.
const WORKSPACE: u64 = 256;

/// Shape and arguments of a launch. The driver has checked them against the card's limits.
#[derive(Debug, Clone, Default)]
pub struct Launch {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Blocks of a cluster; `[1, 1, 1]` without.
    pub cluster: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub dynamic_shared: u32,
    /// All blocks are resident together.
    pub cooperative: bool,
    /// Parameters, laid out as the kernel declares them.
    pub params: Vec<u8>,
    /// Registers of a thread, for occupancy-like special registers only.
    pub registers: u32,
}

/// Bytes that blocks which poll may take for checks of shared memory.
const MOST_SHADOW: usize = 1 << 28;

/// Runs a launch to its end.
///
/// # Errors
/// The first fault, in the order of blocks.
pub fn launch(
    kernel: &Kernel,
    launch: &Launch,
    memory: &View,
    card: &Card,
    options: &Options,
) -> Result<Stats, Box<Fault>> {
    let retired = AtomicU64::new(0);
    // Cooperative groups keep the barrier of the grid in memory that the driver gives them.
    let workspace = launch.cooperative.then(|| Arc::new(Allocation::workspace(WORKSPACE)));
    let with_workspace = workspace.as_ref().map(|w| memory.with_first(Arc::clone(w)));
    let memory = with_workspace.as_ref().unwrap_or(memory);
    let mut cx = Context::new(kernel, launch, memory, card, options, &retired);
    cx.workspace = workspace.map_or(0, |w| w.base());
    let blocks = launch.grid.iter().map(|g| *g as usize).product::<usize>();
    let together = together(&cx, blocks).min(blocks).max(1);
    let gangs = blocks.div_ceil(together);
    // Blocks whose order could be seen run one after the other, or results would change from run to run.
    let parallel = gangs > 1 && !kernel.ordered && !kernel.polls && options.threads != 1;
    let counts = if parallel {
        in_parallel(&cx, gangs, together, options)?
    } else {
        let mut gang = Gang::default();
        // Who waits for earlier blocks may rely on it that they start earlier.
        let sequence: Box<dyn Iterator<Item = usize>> =
            if kernel.polls { Box::new(0..gangs) } else { order(gangs, options) };
        for n in sequence {
            gang.run(&cx, n * together, together.min(blocks - n * together))?;
        }
        gang.counts
    };
    Ok(stats(&cx, &counts))
}

/// Blocks that are resident together. A kernel that polls may wait for other blocks: a card that is idle holds at least one
/// on each of its multiprocessors.
fn together(cx: &Context<'_>, blocks: usize) -> usize {
    if cx.launch.cooperative {
        return blocks;
    }
    if !cx.kernel.polls {
        return cx.cluster_size;
    }
    // What is remembered of shared memory is many times as large as it.
    let shadow = cx.shared_bytes as usize * (cx.warps * cx.cluster_size + 8);
    let fit = (MOST_SHADOW / shadow.max(1)).min(cx.card.sms as usize);
    (fit / cx.cluster_size).max(1) * cx.cluster_size
}

/// The order in which gangs start.
fn order(gangs: usize, options: &Options) -> Box<dyn Iterator<Item = usize>> {
    match options.shuffle_seed {
        // A step that has no common divisor with the number visits each once.
        Some(seed) if gangs > 2 => {
            let gcd = |mut a: usize, mut b: usize| {
                while b != 0 {
                    (a, b) = (b, a % b);
                }
                a
            };
            let mut step = (seed as usize % gangs) | 1;
            while gcd(step, gangs) != 1 {
                step += 1;
            }
            let first = (seed >> 32) as usize % gangs;
            Box::new((0..gangs).map(move |i| (first + i * step) % gangs))
        }
        _ => Box::new(0..gangs),
    }
}

fn in_parallel(
    cx: &Context<'_>,
    gangs: usize,
    together: usize,
    options: &Options,
) -> Result<Vec<Counts>, Box<Fault>> {
    let lowest = AtomicUsize::new(usize::MAX);
    let fault: Mutex<Option<Box<Fault>>> = Mutex::new(None);
    let totals: Mutex<Vec<Counts>> = Mutex::new(vec![Counts::default(); cx.kernel.code.len()]);
    let next = AtomicUsize::new(0);
    let sequence: Vec<usize> = order(gangs, options).collect();
    let worker = || {
        let mut gang = Gang::default();
        loop {
            let i = next.fetch_add(1, Relaxed);
            let Some(n) = sequence.get(i).copied() else { break };
            // Later blocks than a faulting one cannot change what is reported.
            if n > lowest.load(Relaxed) {
                continue;
            }
            if let Err(f) = gang.run(cx, n * together, together) {
                let mut slot = fault.lock().unwrap_or_else(PoisonError::into_inner);
                if n < lowest.load(Relaxed) {
                    lowest.store(n, Relaxed);
                    *slot = Some(f);
                }
                gang = Gang::default();
            }
        }
        let mut totals = totals.lock().unwrap_or_else(PoisonError::into_inner);
        totals.iter_mut().zip(&gang.counts).for_each(|(a, b)| a.add(b));
    };
    let threads = if options.threads == 0 { rayon::current_num_threads() } else { options.threads };
    rayon::scope(|s| (0..threads.min(gangs)).for_each(|_| s.spawn(|_| worker())));
    if let Some(f) = fault.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(f);
    }
    Ok(totals.into_inner().unwrap_or_else(PoisonError::into_inner))
}

fn stats(cx: &Context<'_>, counts: &[Counts]) -> Stats {
    let mut stats = Stats {
        kernel: cx.kernel.name.clone(),
        grid: cx.launch.grid,
        block: cx.launch.block,
        shared_bytes: cx.shared_bytes,
        counters: cx.options.counters,
        ..Stats::default()
    };
    let mut lines: Vec<(String, Counts)> = Vec::new();
    let mut by_line: std::collections::HashMap<(u32, u32, u32), usize> = std::collections::HashMap::new();
    for (pc, c) in counts.iter().enumerate().filter(|(_, c)| c.warp_instructions > 0) {
        let code = &cx.kernel.code[pc];
        let mut c = *c;
        if code.class == crate::stats::Class::Matrix {
            c.mma += c.warp_instructions;
        }
        stats.total.add(&c);
        let class = stats.classes.entry(code.class).or_default();
        class[0] += c.warp_instructions;
        class[1] += c.thread_instructions;
        let at = cx.kernel.locations[pc];
        let key = if at.line == 0 { (0, 0, at.ptx_line) } else { (at.file, at.line, 0) };
        let i = *by_line.entry(key).or_insert_with(|| {
            let name = cx.kernel.source(pc).unwrap_or_else(|| format!("ptx:{}", at.ptx_line));
            lines.push((name, Counts::default()));
            lines.len() - 1
        });
        lines[i].1.add(&c);
    }
    stats.lines = lines.into_iter().map(|(line, counts)| LineCounts { line, counts }).collect();
    stats
}
