//! Memory pools. All share the card's memory; a pool only has its attributes.

use super::error::{Code, Outcome, fail, invalid};
use super::host;
use super::memory::alloc_async;
use super::state::{Kind, State, driver};

/// A pool.
#[derive(Debug)]
pub(crate) struct Pool {
    device: usize,
    /// The device's own.
    default: bool,
    /// The one that `cuMemAllocAsync` uses.
    current: bool,
    /// Attributes 1 to 3: how memory may be reused.
    reuse: [i32; 3],
    threshold: u64,
}

impl Pool {
    /// A device's own pool.
    pub(crate) fn default_of(device: usize) -> Self {
        Self { device, default: true, current: true, reuse: [1; 3], threshold: 0 }
    }
}

impl State {
    fn pool(&mut self, handle: u64) -> Outcome<&mut Pool> {
        self.started()?;
        match self.pools.get_mut(&handle) {
            Some(pool) => Ok(pool),
            None => invalid(format!("{handle:#x} is no memory pool, or one that was destroyed")),
        }
    }

    fn find_pool(&self, ordinal: i32, wanted: fn(&Pool) -> bool) -> Outcome<u64> {
        let device = self.device(ordinal)?;
        match self.pools.iter().find(|(_, p)| p.device == device.ordinal && wanted(p)) {
            Some((handle, _)) => Ok(*handle),
            None => fail(Code::NotSupported, "the device has no memory pool"),
        }
    }
}

api! {
    fn cuDeviceGetDefaultMemPool(out: usize, ordinal: i32) {
        let guard = driver().lock();
        host::put(out, guard.find_pool(ordinal, |p| p.default)?)
    }
    fn cuDeviceGetMemPool(out: usize, ordinal: i32) {
        let guard = driver().lock();
        host::put(out, guard.find_pool(ordinal, |p| p.current)?)
    }
    fn cuDeviceSetMemPool(ordinal: i32, handle: u64) {
        let mut guard = driver().lock();
        let device = guard.device(ordinal)?;
        if guard.pool(handle)?.device != device.ordinal {
            return invalid("the pool belongs to another device");
        }
        for (other, pool) in &mut guard.pools {
            if pool.device == device.ordinal {
                pool.current = *other == handle;
            }
        }
        Ok(())
    }
    fn cuMemPoolCreate(out: usize, properties: usize) {
        host::need(out)?;
        // CUmemPoolProps: allocation type, handle types, location type, location id
        let [kind, handles, location, id] =
            [0, 4, 8, 12].map(|at| host::get::<i32>(properties.wrapping_add(at)));
        if kind? != 1 || handles? != 0 || location? != 1 {
            return invalid("pools are of pinned memory on a device, without handles to share");
        }
        let mut guard = driver().lock();
        let device = guard.device(id?)?.ordinal;
        let handle = guard.handle(Kind::Pool);
        host::put(out, handle)?;
        guard.pools.insert(handle, Pool { default: false, current: false, ..Pool::default_of(device) });
        Ok(())
    }
    fn cuMemPoolDestroy(handle: u64) {
        let mut guard = driver().lock();
        let pool = guard.pool(handle)?;
        if pool.default {
            return invalid("a device's default pool cannot be destroyed");
        }
        let (device, current) = (pool.device, pool.current);
        guard.pools.remove(&handle);
        if current {
            for pool in guard.pools.values_mut().filter(|p| p.device == device && p.default) {
                pool.current = true;
            }
        }
        Ok(())
    }
    fn cuMemPoolTrimTo(handle: u64, _keep: usize) {
        driver().lock().pool(handle).map(drop)
    }
    fn cuMemPoolGetAttribute(handle: u64, attribute: i32, out: usize) {
        let mut guard = driver().lock();
        let pool = guard.pool(handle)?;
        let device = pool.device;
        match attribute {
            1..=3 => host::put(out, pool.reuse[attribute as usize - 1]),
            4 => host::put(out, pool.threshold),
            5..=8 => host::put(out, guard.devices[device].memory.used()),
            _ => invalid(format!("pool attribute {attribute}")),
        }
    }
    fn cuMemPoolSetAttribute(handle: u64, attribute: i32, value: usize) {
        let mut guard = driver().lock();
        let pool = guard.pool(handle)?;
        match attribute {
            1..=3 => pool.reuse[attribute as usize - 1] = host::get(value)?,
            4 => pool.threshold = host::get(value)?,
            // high-water marks: they may only be reset
            6 | 8 if host::get::<u64>(value)? == 0 => {}
            _ => return invalid(format!("pool attribute {attribute} cannot be set")),
        }
        Ok(())
    }
    fn cuMemAllocFromPoolAsync(out: usize, bytes: u64, handle: u64, stream: u64) {
        driver().lock().pool(handle)?;
        alloc_async(out, bytes, stream)
    }
}
