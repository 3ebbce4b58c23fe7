//! Start-up and contexts.

use super::error::{Code, Outcome, fail, invalid};
use super::host;
use super::state::{self, Context, Guard, Kind, State, driver};
use super::stream::Stream;
use std::collections::HashMap;

/// CUDA 13.5: the newest PTX that is accepted is 9.5.
const DRIVER_VERSION: i32 = 13_050;

/// `CU_CTX_FLAGS_MASK`
const FLAGS: u32 = 0xff;

impl State {
    fn create_context(&mut self, ordinal: usize, primary: bool, flags: u32) -> u64 {
        let handle = self.handle(Kind::Context);
        let legacy = self.handle(Kind::Stream);
        self.streams.insert(legacy, Stream::legacy(handle));
        let context = Context {
            device: self.devices[ordinal].clone(),
            primary,
            flags,
            sticky: None,
            legacy,
            per_thread: HashMap::new(),
            limits: HashMap::new(),
            cache_config: 0,
        };
        self.contexts.insert(handle, context);
        handle
    }

    /// Removes a context and everything in it. Its work has ended.
    fn remove_context(&mut self, handle: u64) {
        let Some(context) = self.contexts.remove(&handle) else { return };
        let memory = &context.device.memory;
        self.pending.retain(|_, op| op.context != handle);
        self.allocations.retain(|address, a| {
            if a.context == handle {
                // It is in the table, so it is allocated.
                let _ = memory.free(*address);
            }
            a.context != handle
        });
        for (_, module) in self.modules.extract_if(|_, m| m.context == handle) {
            module.image.unload(memory);
        }
        self.functions.retain(|_, f| f.context != handle);
        self.streams.retain(|_, s| s.context != handle);
        self.events.retain(|_, e| e.context != handle);
        self.graphs.retain(|_, g| g.context != handle);
        self.execs.retain(|_, e| e.context != handle);
        self.captures.retain(|_, c| c.context != handle);
        self.pinned.retain(|_, p| p.context != handle);
    }

    fn primary_of(&mut self, ordinal: i32) -> Outcome<&mut state::Primary> {
        let device = self.device(ordinal)?;
        Ok(&mut self.primaries[device.ordinal])
    }
}

/// Ends a context's work and the context.
fn end_context(mut guard: Guard, handle: u64) -> Guard {
    let rest = guard.unfinished(handle);
    guard = driver().finish_all(guard, &rest);
    guard.remove_context(handle);
    guard
}

/// Ends all contexts: the state after `cuInit`.
pub(crate) fn end_all(mut guard: Guard) -> Guard {
    let contexts: Vec<u64> = guard.contexts.keys().copied().collect();
    for handle in contexts {
        guard = end_context(guard, handle);
    }
    guard.primaries.iter_mut().for_each(|p| *p = state::Primary::default());
    guard
}

fn create(out: usize, flags: u32, ordinal: i32) -> Outcome {
    host::need(out)?;
    let mut guard = driver().lock();
    let device = guard.device(ordinal)?;
    check_flags(flags)?;
    let handle = guard.create_context(device.ordinal, false, flags);
    host::put(out, handle)?;
    state::push_current(handle);
    Ok(())
}

fn check_flags(flags: u32) -> Outcome {
    // The low three bits are one of four ways to wait.
    if flags & !FLAGS != 0 || flags & 7 > 4 || (flags & 7).count_ones() > 1 {
        return invalid(format!("context flags {flags:#x}"));
    }
    Ok(())
}

/// `CUlimit` and what a context has of it at first.
fn limit_of(limit: i32) -> Outcome<usize> {
    match limit {
        0 => Ok(1024),
        1 => Ok(1 << 20),
        2 => Ok(8 << 20),
        3 => Ok(2),
        4 => Ok(2048),
        5 => Ok(128),
        6 => Ok(0),
        _ => fail(Code::UnsupportedLimit, format!("limit {limit}")),
    }
}

api! {
    fn cuInit(flags: u32) {
        if flags != 0 {
            return invalid(format!("cuInit flags {flags:#x}, must be 0"));
        }
        let mut guard = driver().lock();
        if let Some(mistake) = guard.mistake.clone() {
            return invalid(mistake);
        }
        guard.initialized = true;
        Ok(())
    }
    fn cuDriverGetVersion(out: usize) {
        host::put(out, DRIVER_VERSION)
    }
    fn cuDevicePrimaryCtxRetain(out: usize, ordinal: i32) {
        host::need(out)?;
        let mut guard = driver().lock();
        let Primary { handle, flags } = Primary::of(&mut guard, ordinal)?;
        let handle = match handle {
            Some(handle) => handle,
            None => guard.create_context(ordinal as usize, true, flags),
        };
        host::put(out, handle)?;
        let primary = guard.primary_of(ordinal)?;
        primary.handle = Some(handle);
        primary.retained += 1;
        Ok(())
    }
    fn cuDevicePrimaryCtxRelease_v2(ordinal: i32) {
        let mut guard = driver().lock();
        let primary = guard.primary_of(ordinal)?;
        let Some(handle) = primary.handle.filter(|_| primary.retained > 0) else {
            return fail(Code::InvalidContext, "the primary context is not retained");
        };
        primary.retained -= 1;
        if primary.retained == 0 {
            primary.handle = None;
            drop(end_context(guard, handle));
        }
        Ok(())
    }
    fn cuDevicePrimaryCtxReset_v2(ordinal: i32) {
        let mut guard = driver().lock();
        if let Some(handle) = guard.primary_of(ordinal)?.handle.take() {
            guard = end_context(guard, handle);
            // Whoever retained it goes on with a fresh one of the same handle.
            let flags = guard.primary_of(ordinal)?.flags;
            let fresh = guard.create_context(ordinal as usize, true, flags);
            guard.rename_context(fresh, handle);
            guard.primary_of(ordinal)?.handle = Some(handle);
        }
        Ok(())
    }
    fn cuDevicePrimaryCtxGetState(ordinal: i32, flags: usize, active: usize) {
        host::need(flags)?;
        host::need(active)?;
        let mut guard = driver().lock();
        let primary = *guard.primary_of(ordinal)?;
        host::put(flags, primary.flags)?;
        host::put(active, i32::from(primary.handle.is_some()))
    }
    fn cuDevicePrimaryCtxSetFlags_v2(ordinal: i32, flags: u32) {
        check_flags(flags)?;
        let mut guard = driver().lock();
        let primary = guard.primary_of(ordinal)?;
        primary.flags = flags;
        if let Some(handle) = primary.handle
            && let Some(context) = guard.contexts.get_mut(&handle)
        {
            context.flags = flags;
        }
        Ok(())
    }
    fn cuCtxCreate_v2(out: usize, flags: u32, ordinal: i32) {
        create(out, flags, ordinal)
    }
    fn cuCtxCreate_v3(out: usize, _affinity: usize, affinities: i32, flags: u32, ordinal: i32) {
        if affinities != 0 {
            return fail(Code::NotSupported, "execution affinity");
        }
        create(out, flags, ordinal)
    }
    fn cuCtxCreate_v4(out: usize, parameters: usize, flags: u32, ordinal: i32) {
        if parameters != 0 {
            return fail(Code::NotSupported, "context creation parameters");
        }
        create(out, flags, ordinal)
    }
    fn cuCtxDestroy_v2(handle: u64) {
        let guard = driver().lock();
        guard.started()?;
        match guard.contexts.get(&handle) {
            None => return fail(Code::InvalidContext, format!("{handle:#x} is no context")),
            Some(c) if c.primary => {
                return fail(Code::InvalidContext, "a primary context is released, not destroyed");
            }
            Some(_) => {}
        }
        drop(end_context(guard, handle));
        if state::current() == Some(handle) {
            state::pop_current();
        }
        Ok(())
    }
    fn cuCtxGetCurrent(out: usize) {
        driver().lock().started()?;
        host::put(out, state::current().unwrap_or(0))
    }
    fn cuCtxSetCurrent(handle: u64) {
        let guard = driver().lock();
        guard.started()?;
        if handle == 0 {
            state::set_current(None);
            return Ok(());
        }
        if !guard.contexts.contains_key(&handle) {
            return fail(Code::InvalidContext, format!("{handle:#x} is no context, or one that was destroyed"));
        }
        state::set_current(Some(handle));
        Ok(())
    }
    fn cuCtxPushCurrent_v2(handle: u64) {
        let guard = driver().lock();
        guard.started()?;
        if !guard.contexts.contains_key(&handle) {
            return fail(Code::InvalidContext, format!("{handle:#x} is no context, or one that was destroyed"));
        }
        state::push_current(handle);
        Ok(())
    }
    fn cuCtxPopCurrent_v2(out: usize) {
        driver().lock().started()?;
        match state::pop_current() {
            Some(handle) => host::put_if(out, handle),
            None => fail(Code::InvalidContext, "no context is current in this thread"),
        }
    }
    fn cuCtxGetDevice(out: usize) {
        let guard = driver().lock();
        let context = guard.bound()?;
        host::put(out, guard.device_of(context)?.ordinal as i32)
    }
    fn cuCtxGetFlags(out: usize) {
        let guard = driver().lock();
        let context = guard.bound()?;
        host::put(out, guard.contexts[&context].flags)
    }
    fn cuCtxSetFlags(flags: u32) {
        check_flags(flags)?;
        let mut guard = driver().lock();
        let context = guard.bound()?;
        if let Some(c) = guard.contexts.get_mut(&context) {
            c.flags = flags;
        }
        Ok(())
    }
    fn cuCtxGetApiVersion(handle: u64, out: usize) {
        let guard = driver().lock();
        guard.started()?;
        if handle != 0 && !guard.contexts.contains_key(&handle) {
            return fail(Code::InvalidContext, format!("{handle:#x} is no context"));
        }
        host::put(out, 3020u32)
    }
    fn cuCtxSynchronize() {
        let mut guard = driver().lock();
        let context = guard.usable()?;
        guard.refuse_while_capturing(context)?;
        let rest = guard.unfinished(context);
        guard = driver().finish_all(guard, &rest);
        guard.usable().map(drop)
    }
    fn cuCtxGetLimit(out: usize, limit: i32) {
        let guard = driver().lock();
        let context = guard.usable()?;
        let initial = limit_of(limit)?;
        host::put(out, guard.contexts[&context].limits.get(&limit).copied().unwrap_or(initial))
    }
    fn cuCtxSetLimit(limit: i32, value: usize) {
        let mut guard = driver().lock();
        let context = guard.usable()?;
        limit_of(limit)?;
        if let Some(c) = guard.contexts.get_mut(&context) {
            c.limits.insert(limit, value);
        }
        Ok(())
    }
    fn cuCtxGetCacheConfig(out: usize) {
        let guard = driver().lock();
        let context = guard.usable()?;
        host::put(out, guard.contexts[&context].cache_config)
    }
    fn cuCtxSetCacheConfig(config: i32) {
        if !(0..4).contains(&config) {
            return invalid(format!("cache configuration {config}"));
        }
        let mut guard = driver().lock();
        let context = guard.usable()?;
        if let Some(c) = guard.contexts.get_mut(&context) {
            c.cache_config = config;
        }
        Ok(())
    }
    fn cuCtxGetStreamPriorityRange(least: usize, greatest: usize) {
        driver().lock().usable()?;
        host::put_if(least, super::stream::LEAST_PRIORITY)?;
        host::put_if(greatest, super::stream::GREATEST_PRIORITY)
    }
    fn cuProfilerStart() {
        let mut guard = driver().lock();
        let context = guard.usable()?;
        guard.profiling.insert(context);
        Ok(())
    }
    fn cuProfilerStop() {
        let mut guard = driver().lock();
        let context = guard.usable()?;
        guard.profiling.remove(&context);
        Ok(())
    }
}

/// What `cuDevicePrimaryCtxRetain` needs of a primary context.
struct Primary {
    handle: Option<u64>,
    flags: u32,
}

impl Primary {
    fn of(state: &mut State, ordinal: i32) -> Outcome<Self> {
        let p = state.primary_of(ordinal)?;
        Ok(Self { handle: p.handle, flags: p.flags })
    }
}

impl State {
    /// Gives a fresh context the handle of one that is gone.
    fn rename_context(&mut self, fresh: u64, handle: u64) {
        if let Some(context) = self.contexts.remove(&fresh) {
            if let Some(stream) = self.streams.get_mut(&context.legacy) {
                stream.context = handle;
            }
            self.contexts.insert(handle, context);
        }
    }
}
