//! How many blocks fit a multiprocessor.
//!
//! As NVIDIA's occupancy calculator counts: registers are handed out to warps in units of 256, a warp's in one of four
//! partitions; shared memory in units of 128 bytes, with 1 KiB a block for the driver.

use super::error::{Outcome, invalid};
use super::function::Function;
use super::host;
use super::state::driver;
use crate::card::{Card, REGISTERS_PER_SM, SHARED_RESERVED, THREADS_PER_BLOCK};

const WARP: u32 = 32;
const REGISTER_UNIT: u32 = 256;
const SHARED_UNIT: u32 = 128;
const PARTITIONS: u32 = 4;

/// Registers that a warp takes.
fn registers_of_warp(registers: u32) -> u32 {
    (registers.clamp(1, 255).next_multiple_of(8) * WARP).next_multiple_of(REGISTER_UNIT)
}

/// Registers that a block takes.
pub(crate) fn registers_of_block(registers: u32, threads: u32) -> u64 {
    u64::from(registers_of_warp(registers)) * u64::from(threads.div_ceil(WARP))
}

/// Most threads of a block that the registers suffice for.
pub(crate) fn threads_by_registers(registers: u32) -> u32 {
    REGISTERS_PER_SM / registers_of_warp(registers) * WARP
}

/// Blocks that fit a multiprocessor.
pub(crate) fn blocks(card: &Card, registers: u32, threads: u32, shared: u64) -> u32 {
    if threads == 0 || threads > THREADS_PER_BLOCK {
        return 0;
    }
    let warps = threads.div_ceil(WARP);
    let by_threads = card.threads_per_sm / WARP / warps;
    let of_partition = REGISTERS_PER_SM / PARTITIONS / registers_of_warp(registers);
    let by_registers = of_partition * PARTITIONS / warps;
    let of_block = (shared + u64::from(SHARED_RESERVED)).next_multiple_of(SHARED_UNIT.into());
    let by_shared = u64::from(card.shared_per_sm) / of_block;
    let fewest = by_threads.min(by_registers).min(card.blocks_per_sm);
    fewest.min(u32::try_from(by_shared).unwrap_or(u32::MAX))
}

/// Blocks of a kernel on a multiprocessor; none if the launch would be refused.
pub(crate) fn blocks_of(function: &Function, threads: u32, dynamic: u64) -> u32 {
    if dynamic > function.dynamic_limit().into() || threads > function.thread_limit() {
        return 0;
    }
    let shared = dynamic + u64::from(function.kernel().shared_bytes);
    blocks(function.device.card, function.registers, threads, shared)
}

fn max_active(out: usize, handle: u64, threads: i32, dynamic: u64) -> Outcome {
    host::need(out)?;
    let guard = driver().lock();
    let function = guard.function(handle)?;
    match u32::try_from(threads) {
        Ok(threads) if threads > 0 => host::put(out, blocks_of(function, threads, dynamic) as i32),
        _ => invalid(format!("blocks of {threads} threads")),
    }
}

/// The block size with most resident threads, greatest first, and the grid that fills the card.
fn best(grid: usize, block: usize, handle: u64, shared: usize, dynamic: u64, limit: i32) -> Outcome {
    host::need(grid)?;
    host::need(block)?;
    let (card, most) = {
        let guard = driver().lock();
        let function = guard.function(handle)?;
        let limit = if limit <= 0 { u32::MAX } else { limit as u32 };
        (function.device.card, function.thread_limit().min(limit))
    };
    let mut sizes: Vec<u32> = (1..=most / WARP).rev().map(|n| n * WARP).collect();
    if !most.is_multiple_of(WARP) {
        sizes.insert(0, most);
    }
    let mut found = (0, 0, 0);
    for threads in sizes {
        // The callback runs without the lock: it may call the driver.
        let dynamic = if shared == 0 { dynamic } else { ask(shared, threads) };
        let guard = driver().lock();
        let fit = blocks_of(guard.function(handle)?, threads, dynamic);
        if fit * threads > found.0 {
            found = (fit * threads, threads, fit * card.sms);
        }
    }
    host::put(grid, found.2 as i32)?;
    host::put(block, found.1 as i32)
}

/// Dynamic shared memory of a block size, from the caller's function.
fn ask(function: usize, threads: u32) -> u64 {
    // SAFETY: the API's contract: a `CUoccupancyB2DSize`, and the caller of this function saw that it is not null.
    let function: extern "C" fn(i32) -> usize = unsafe { std::mem::transmute(function) };
    function(threads as i32) as u64
}

/// A cluster launch as `CUlaunchConfig` describes it: blocks of a cluster, and clusters that are resident together.
fn clusters(handle: u64, config: usize) -> Outcome<(u32, u32)> {
    let config = super::launch::Config::read(config)?;
    let guard = driver().lock();
    let function = guard.function(handle)?;
    let card = function.device.card;
    if card.cc < 90 {
        return invalid(format!("clusters on sm_{}", card.cc));
    }
    let [x, y, z] = config.block;
    let threads = x.saturating_mul(y).saturating_mul(z);
    let cluster = config.cluster.or(function.required_cluster()).unwrap_or([1; 3]);
    let size = cluster.iter().fold(1u32, |product, n| product.saturating_mul(*n)).max(1);
    let largest = if function.large_clusters { 16 } else { 8 };
    // A cluster stays within a group of multiprocessors.
    let fit = blocks_of(function, threads, config.dynamic_shared.into()) * card.sms / size;
    Ok((if fit == 0 { 0 } else { largest }, if size > largest { 0 } else { fit }))
}

api! {
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(out: usize, function: u64, threads: i32, dynamic: u64) {
        max_active(out, function, threads, dynamic)
    }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        out: usize,
        function: u64,
        threads: i32,
        dynamic: u64,
        flags: u32,
    ) {
        if flags & !1 != 0 {
            return invalid(format!("flags {flags:#x}"));
        }
        max_active(out, function, threads, dynamic)
    }
    fn cuOccupancyMaxPotentialBlockSize(
        grid: usize,
        block: usize,
        function: u64,
        shared: usize,
        dynamic: u64,
        limit: i32,
    ) {
        best(grid, block, function, shared, dynamic, limit)
    }
    fn cuOccupancyMaxPotentialBlockSizeWithFlags(
        grid: usize,
        block: usize,
        function: u64,
        shared: usize,
        dynamic: u64,
        limit: i32,
        flags: u32,
    ) {
        if flags & !1 != 0 {
            return invalid(format!("flags {flags:#x}"));
        }
        best(grid, block, function, shared, dynamic, limit)
    }
    fn cuOccupancyAvailableDynamicSMemPerBlock(out: usize, handle: u64, blocks: i32, threads: i32) {
        host::need(out)?;
        let guard = driver().lock();
        let function = guard.function(handle)?;
        let (Ok(blocks), Ok(threads)) = (u32::try_from(blocks), u32::try_from(threads)) else {
            return invalid(format!("{blocks} blocks of {threads} threads"));
        };
        if blocks == 0 || threads == 0 || threads > function.thread_limit() {
            return invalid(format!("{blocks} blocks of {threads} threads"));
        }
        let card = function.device.card;
        let of_block = (card.shared_per_sm / blocks) / SHARED_UNIT * SHARED_UNIT;
        let room = of_block.saturating_sub(SHARED_RESERVED + function.kernel().shared_bytes);
        let largest = card.shared_per_block_optin.saturating_sub(function.kernel().shared_bytes);
        host::put(out, u64::from(room.min(largest)))
    }
    fn cuOccupancyMaxPotentialClusterSize(out: usize, function: u64, config: usize) {
        host::need(out)?;
        host::put(out, clusters(function, config)?.0 as i32)
    }
    fn cuOccupancyMaxActiveClusters(out: usize, function: u64, config: usize) {
        host::need(out)?;
        host::put(out, clusters(function, config)?.1 as i32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Figures of NVIDIA's occupancy calculator for cc 8.0 and 8.6.
    #[test]
    fn blocks_as_the_calculator_counts_them() {
        let (a100, ga102) = (Card::of(80).unwrap(), Card::of(86).unwrap());
        assert_eq!(blocks(a100, 32, 256, 0), 8);
        assert_eq!(blocks(a100, 32, 32, 0), 32);
        assert_eq!(blocks(a100, 255, 256, 0), 1);
        assert_eq!(blocks(a100, 246, 128, 0), 2);
        assert_eq!(blocks(a100, 64, 1024, 0), 1);
        assert_eq!(blocks(a100, 65, 1024, 0), 0);
        assert_eq!(blocks(a100, 32, 128, 48 << 10), 3);
        assert_eq!(blocks(a100, 32, 128, 163 << 10), 1);
        assert_eq!(blocks(a100, 32, 128, 164 << 10), 0);
        assert_eq!(blocks(ga102, 32, 1024, 0), 1);
        assert_eq!(blocks(ga102, 40, 256, 0), 6);
        assert_eq!(blocks(a100, 32, 1025, 0), 0);
    }

    #[test]
    fn registers_limit_blocks() {
        assert_eq!(threads_by_registers(64), 1024);
        assert_eq!(threads_by_registers(65), 896);
        assert_eq!(threads_by_registers(255), 256);
        assert_eq!(registers_of_block(33, 33), 2 * 40 * 32);
    }
}
