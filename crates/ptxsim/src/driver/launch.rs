//! Launches: limits, parameters, attributes.

use super::error::{Code, Outcome, fail, invalid};
use super::function::Function;
use super::host;
use super::occupancy;
use super::state::driver;
use super::work::{Action, KernelCall};
use crate::card::{REGISTERS_PER_SM, THREADS_PER_BLOCK};
use crate::exec::launch::Launch;
use crate::program::Kernel;
use std::sync::Arc;

/// Most threads in each direction of a block.
const BLOCK: [u32; 3] = [1024, 1024, 64];
/// Most blocks in each direction of a grid.
const GRID: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];
/// Blocks of a cluster on every card that has them.
const PORTABLE_CLUSTER: u32 = 8;
/// Blocks of a cluster if the kernel opted in.
const LARGEST_CLUSTER: u32 = 16;
/// Most attributes of a launch.
const ATTRIBUTES: u32 = 64;

/// Shape of a launch, from the arguments of one of several functions.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) dynamic_shared: u32,
    stream: u64,
    pub(crate) cluster: Option<[u32; 3]>,
    cooperative: bool,
    /// An event to record after the launch.
    event: Option<u64>,
}

impl Config {
    /// `CUlaunchConfig` and its attributes.
    pub(crate) fn read(address: usize) -> Outcome<Self> {
        let word = |at: usize| host::get::<u32>(address.wrapping_add(at));
        let mut config = Self {
            grid: [word(0)?, word(4)?, word(8)?],
            block: [word(12)?, word(16)?, word(20)?],
            dynamic_shared: word(24)?,
            stream: host::get(address.wrapping_add(32))?,
            cluster: None,
            cooperative: false,
            event: None,
        };
        let list: usize = host::get(address.wrapping_add(40))?;
        let count = word(48)?;
        if count > ATTRIBUTES {
            return invalid(format!("{count} launch attributes"));
        }
        for i in 0..count as usize {
            config.attribute(list.wrapping_add(72 * i))?;
        }
        Ok(config)
    }

    /// A `CUlaunchAttribute`: id, padding, value of 64 bytes.
    fn attribute(&mut self, address: usize) -> Outcome {
        let value = address.wrapping_add(8);
        let word = |at: usize| host::get::<u32>(value.wrapping_add(at));
        match host::get::<u32>(address)? {
            2 => self.cooperative = word(0)? != 0,
            4 => self.cluster = Some([word(0)?, word(4)?, word(8)?]),
            7 | 12 => self.event = Some(host::get(value)?),
            // Overlap with the launch before, priorities, caching and scheduling hints: no effect on results.
            0 | 1 | 3 | 5 | 6 | 8 | 9 | 10 | 11 | 14 | 15 | 16 => {}
            13 => return fail(Code::NotSupported, "device-updatable kernel nodes"),
            id => return invalid(format!("launch attribute {id}")),
        }
        Ok(())
    }
}

fn product(dims: [u32; 3]) -> u64 {
    dims.iter().fold(1u64, |p, n| p.saturating_mul((*n).into()))
}

fn shape(dims: [u32; 3]) -> String {
    let [x, y, z] = dims;
    format!("({x},{y},{z})")
}

/// Checks a launch as the driver does before it gives it to the card.
fn check(function: &Function, config: &Config) -> Outcome<[u32; 3]> {
    let (name, card, kernel) = (&function.name, function.device.card, function.kernel());
    for (what, dims, most) in [("grid", config.grid, GRID), ("block", config.block, BLOCK)] {
        if dims.contains(&0) || dims.iter().zip(most).any(|(n, most)| *n > most) {
            return invalid(format!("{name}: {what} {}; allowed are 1 to {}", shape(dims), shape(most)));
        }
    }
    let threads = product(config.block);
    if threads > THREADS_PER_BLOCK.into() {
        return invalid(format!("{name}: a block of {threads} threads; {THREADS_PER_BLOCK} are allowed"));
    }
    let threads = threads as u32;
    if let Some(required) = kernel.limits.required_threads
        && required.map(|n| n.max(1)) != config.block
    {
        return invalid(format!("{name}: block {}; .reqntid is {}", shape(config.block), shape(required)));
    }
    if let Some(most) = kernel.limits.max_threads
        && u64::from(threads) > product(most.map(|n| n.max(1)))
    {
        return invalid(format!("{name}: a block of {threads} threads; .maxntid is {}", shape(most)));
    }
    let dynamic = config.dynamic_shared;
    if dynamic > function.dynamic_limit() {
        return invalid(format!(
            "{name}: {dynamic} bytes of dynamic shared memory; {} are allowed (more after cuFuncSetAttribute \
             MAX_DYNAMIC_SHARED_SIZE_BYTES)",
            function.dynamic_limit()
        ));
    }
    let shared = u64::from(dynamic) + u64::from(kernel.shared_bytes);
    if shared > card.shared_per_block_optin.into() {
        return invalid(format!(
            "{name}: {shared} bytes of shared memory; the card has {} for a block",
            card.shared_per_block_optin
        ));
    }
    let registers = occupancy::registers_of_block(function.registers, threads);
    if registers > REGISTERS_PER_SM.into() {
        return fail(
            Code::LaunchOutOfResources,
            format!(
                "{name}: {threads} threads of {} registers take {registers}; there are {REGISTERS_PER_SM}",
                function.registers
            ),
        );
    }
    let cluster = check_cluster(function, config)?;
    if config.cooperative {
        let fit = u64::from(occupancy::blocks_of(function, threads, dynamic.into())) * u64::from(card.sms);
        if product(config.grid) > fit {
            return fail(
                Code::CooperativeLaunchTooLarge,
                format!("{name}: {} blocks; {fit} are resident together", product(config.grid)),
            );
        }
    }
    Ok(cluster)
}

fn check_cluster(function: &Function, config: &Config) -> Outcome<[u32; 3]> {
    let name = &function.name;
    let compiled = function.required_cluster();
    let cluster = match (config.cluster, compiled) {
        (Some(asked), Some(compiled)) if asked != compiled => {
            return invalid(format!(
                "{name}: cluster {}; it was compiled for {}",
                shape(asked),
                shape(compiled)
            ));
        }
        (Some(cluster), _) | (None, Some(cluster)) => cluster,
        (None, None) if function.kernel().limits.explicit_cluster => {
            return invalid(format!("{name}: .explicitcluster asks for cluster dimensions at the launch"));
        }
        (None, None) => return Ok([1; 3]),
    };
    if cluster == [1; 3] {
        return Ok(cluster);
    }
    let cc = function.device.card.cc;
    if cc < 90 {
        return invalid(format!("{name}: cluster {}; sm_{cc} has no clusters", shape(cluster)));
    }
    let most = if function.large_clusters { LARGEST_CLUSTER } else { PORTABLE_CLUSTER };
    if cluster.contains(&0) || product(cluster) > most.into() {
        return fail(
            Code::InvalidClusterSize,
            format!("{name}: cluster {}; {most} blocks are allowed", shape(cluster)),
        );
    }
    if config.grid.iter().zip(cluster).any(|(n, c)| !n.is_multiple_of(c)) {
        return invalid(format!(
            "{name}: grid {} is not a multiple of cluster {}",
            shape(config.grid),
            shape(cluster)
        ));
    }
    Ok(cluster)
}

/// Copies the arguments.
fn parameters(kernel: &Kernel, list: usize, extra: usize) -> Outcome<Vec<u8>> {
    if list != 0 && extra != 0 {
        return invalid(format!("{}: arguments both as a list and as a buffer", kernel.name));
    }
    let mut params = vec![0; kernel.param_bytes as usize];
    if kernel.params.is_empty() {
        return Ok(params);
    }
    if extra != 0 {
        return from_buffer(kernel, extra, params);
    }
    if list == 0 {
        return invalid(format!("{}: no arguments; it has {} parameters", kernel.name, kernel.params.len()));
    }
    for (i, (offset, bytes)) in kernel.params.iter().enumerate() {
        let Some(target) = params.get_mut(*offset as usize..(offset + bytes) as usize) else {
            return fail(
                Code::Unknown,
                format!("{}: parameter {i} lies outside the parameters", kernel.name),
            );
        };
        let wrong = |mut failure: super::error::Failure| {
            failure.reason = format!(
                "{}: argument {i} of {} ({bytes} bytes): {}",
                kernel.name,
                kernel.params.len(),
                failure.reason
            );
            failure
        };
        let pointer: usize = host::get(list.wrapping_add(8 * i)).map_err(wrong)?;
        host::read(pointer, target).map_err(wrong)?;
    }
    Ok(params)
}

/// `CU_LAUNCH_PARAM_BUFFER_POINTER` and `…_SIZE`.
fn from_buffer(kernel: &Kernel, extra: usize, mut params: Vec<u8>) -> Outcome<Vec<u8>> {
    let (mut buffer, mut size) = (None, None);
    for i in 0..4 {
        let at = extra.wrapping_add(16 * i);
        match host::get::<usize>(at)? {
            0 => break,
            1 => buffer = Some(host::get::<usize>(at.wrapping_add(8))?),
            2 => size = Some(host::get::<usize>(host::get::<usize>(at.wrapping_add(8))?)?),
            other => return invalid(format!("{}: extra item {other}", kernel.name)),
        }
    }
    let (Some(buffer), Some(size)) = (buffer, size) else {
        return invalid(format!("{}: a buffer of arguments needs a pointer and a size", kernel.name));
    };
    let last = kernel.params.iter().map(|(offset, bytes)| offset + bytes).max().unwrap_or(0) as usize;
    // The caller may have padded its struct.
    if size < last || size > last.next_multiple_of(16) {
        return invalid(format!("{}: {size} bytes of arguments; the parameters take {last}", kernel.name));
    }
    let n = size.min(params.len());
    host::read(buffer, &mut params[..n])?;
    Ok(params)
}

fn launch(handle: u64, config: &Config, list: usize, extra: usize) -> Outcome {
    let mut guard = driver().lock();
    let (stream, context) = guard.stream(config.stream)?;
    let function = guard.function(handle)?;
    if function.context != context {
        return fail(Code::InvalidHandle, "kernel and stream belong to different contexts");
    }
    let cluster = check(function, config)?;
    let options = guard.options();
    let function = guard.function_mut(handle)?;
    let kernel = function.kernel_for(&options)?;
    let launch = Launch {
        grid: config.grid,
        block: config.block,
        cluster,
        dynamic_shared: config.dynamic_shared,
        cooperative: config.cooperative,
        params: parameters(&kernel, list, extra)?,
        registers: function.registers,
    };
    let call = KernelCall { kernel, launch, device: Arc::clone(&function.device), options };
    if let Some(op) = guard.enqueue(stream, Action::Kernel(Arc::new(call)))? {
        drop(driver().settle(guard, op));
    } else {
        drop(guard);
    }
    match config.event {
        Some(event) => super::event::record(event, config.stream, 0),
        None => Ok(()),
    }
}

#[allow(clippy::too_many_arguments, reason = "the arguments of cuLaunchKernel")]
fn plain(x: u32, y: u32, z: u32, bx: u32, by: u32, bz: u32, dynamic_shared: u32, stream: u64) -> Config {
    Config {
        grid: [x, y, z],
        block: [bx, by, bz],
        dynamic_shared,
        stream,
        cluster: None,
        cooperative: false,
        event: None,
    }
}

api! {
    fn cuLaunchKernel(
        function: u64,
        x: u32,
        y: u32,
        z: u32,
        bx: u32,
        by: u32,
        bz: u32,
        shared: u32,
        stream: u64,
        list: usize,
        extra: usize,
    ) {
        launch(function, &plain(x, y, z, bx, by, bz, shared, stream), list, extra)
    }
    fn cuLaunchCooperativeKernel(
        function: u64,
        x: u32,
        y: u32,
        z: u32,
        bx: u32,
        by: u32,
        bz: u32,
        shared: u32,
        stream: u64,
        list: usize,
    ) {
        let config = Config { cooperative: true, ..plain(x, y, z, bx, by, bz, shared, stream) };
        launch(function, &config, list, 0)
    }
    fn cuLaunchKernelEx(config: usize, function: u64, list: usize, extra: usize) {
        launch(function, &Config::read(config)?, list, extra)
    }
}
