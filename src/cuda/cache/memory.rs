//! Memory that a cache owns: on the device, and page-locked on the host.

use crate::backend::sealed;
use crate::cache::{MOST_BLOCKS, PagePool, PoolMemory, pool_bytes};
use crate::config::CacheConfig;
use crate::cuda::device::failed;
use crate::cuda::{Device, check};
use crate::error::{Error, Result};
use cudarc::driver::{CudaContext, DriverError, result};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicI64, Ordering};

/// Zero-filled device memory.
#[derive(Debug)]
pub(super) struct DeviceBuffer {
    context: Arc<CudaContext>,
    /// 0 if there are no bytes.
    address: u64,
    bytes: usize,
}

impl DeviceBuffer {
    /// Allocates, fills with zeros and waits until that is done.
    pub(super) fn new(device: &Device, bytes: usize) -> Result<Self> {
        let context = device.context().clone();
        context.bind_to_thread().map_err(failed("the context"))?;
        if bytes == 0 {
            return Ok(Self { context, address: 0, bytes });
        }
        // SAFETY: the context is current; freed once, by `drop`.
        let address = unsafe { result::malloc_sync(bytes) }.map_err(|e| Error::Cuda {
            what: "device memory",
            problem: format!("{bytes} bytes: {e}; build the cache with fewer blocks, sequences or tokens"),
        })?;
        let buffer = Self { context, address, bytes };
        // SAFETY: the memory was just allocated with this size.
        unsafe { zero(address, bytes) }.map_err(failed("device memory"))?;
        Ok(buffer)
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.address != 0 && self.context.bind_to_thread().is_ok() {
            // SAFETY: made by `malloc_sync`, freed once. The driver waits for work that uses it.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Fills memory of the current context with zeros, on a stream of its own, and waits for that. Who waits for the whole context instead
/// ends the captures of other threads.
///
/// # Safety
/// The memory is there, and nothing else uses it.
unsafe fn zero(address: u64, bytes: usize) -> std::result::Result<(), DriverError> {
    let stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
    // SAFETY: the caller's.
    let filled = unsafe { result::memset_d8_async(address, 0, bytes, stream) };
    // SAFETY: made above.
    let filled = filled.and_then(|()| unsafe { result::stream::synchronize(stream) });
    // SAFETY: made above; destroyed once.
    let gone = unsafe { result::stream::destroy(stream) };
    filled.and(gone)
}

/// Page-locked memory of the host, which copies read when the stream comes to them. Written by relaxed atomic stores, since a
/// replayed copy may read an entry's neighbours at the same time.
#[derive(Debug)]
pub(super) struct Pinned {
    context: Arc<CudaContext>,
    base: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory of the process, accessed by atomics only.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// `bytes` > 0 bytes, zero-filled.
    pub(super) fn new(device: &Device, bytes: usize) -> Result<Self> {
        let context = device.context().clone();
        context.bind_to_thread().map_err(failed("the context"))?;
        // SAFETY: the context is current; freed once, by `drop`.
        let base = unsafe { result::malloc_host(bytes, 0) }.map_err(failed("page-locked memory"))?;
        // SAFETY: the memory was just allocated with this size.
        unsafe { std::ptr::write_bytes(base.cast::<u8>(), 0, bytes) };
        Ok(Self { context, base: base.cast(), bytes })
    }

    fn at(&self, byte: usize, size: usize) -> *mut u8 {
        assert!(byte.is_multiple_of(size) && byte + size <= self.bytes, "byte {byte} of {}", self.bytes);
        self.base.wrapping_add(byte)
    }

    fn i32_at(&self, byte: usize) -> &AtomicI32 {
        // SAFETY: inside the memory and aligned (asserted); page-locked memory is page-aligned and initialised.
        unsafe { AtomicI32::from_ptr(self.at(byte, 4).cast()) }
    }

    pub(super) fn i32(&self, byte: usize) -> i32 {
        self.i32_at(byte).load(Ordering::Relaxed)
    }

    pub(super) fn set_i32(&self, byte: usize, x: i32) {
        self.i32_at(byte).store(x, Ordering::Relaxed);
    }

    pub(super) fn set_i64(&self, byte: usize, x: i64) {
        // SAFETY: as in `i32_at`.
        unsafe { AtomicI64::from_ptr(self.at(byte, 8).cast()) }.store(x, Ordering::Relaxed);
    }

    /// The first bytes, for a copy that the caller gives to the driver.
    ///
    /// # Safety
    /// Nothing is stored to them while the slice lives.
    pub(super) unsafe fn slice(&self, bytes: usize) -> &[u8] {
        assert!(bytes <= self.bytes, "{bytes} of {} bytes", self.bytes);
        // SAFETY: inside the memory, which is initialised; the caller keeps stores away.
        unsafe { std::slice::from_raw_parts(self.base, bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: made by `malloc_host`, freed once; the cache waits for its stream before it drops its memory.
            let _ = unsafe { result::free_host(self.base.cast()) };
        }
    }
}

/// Memory of a device, made by the pool or lent by the engine.
#[derive(Debug)]
pub struct DeviceMemory {
    memory: Memory,
    /// Number of the device, if known.
    device: Option<usize>,
}

#[derive(Debug)]
enum Memory {
    Owned(DeviceBuffer),
    Lent { base: u64, bytes: usize },
}

impl sealed::Sealed for DeviceMemory {}

impl PoolMemory for DeviceMemory {
    fn bytes(&self) -> usize {
        match &self.memory {
            Memory::Owned(m) => m.bytes(),
            Memory::Lent { bytes, .. } => *bytes,
        }
    }
}

impl DeviceMemory {
    pub(super) fn address(&self) -> u64 {
        match &self.memory {
            Memory::Owned(m) => m.address(),
            Memory::Lent { base, .. } => *base,
        }
    }

    /// Refuses memory of another device.
    pub(super) fn check(&self, device: &Device) -> Result<()> {
        match self.device {
            Some(d) if d != device.ordinal() => Err(Error::Unsupported {
                what: "pool",
                got: format!("memory of device {d}"),
                why: format!("the cache is on device {}; make the pool there", device.ordinal()),
            }),
            _ => Ok(()),
        }
    }
}

impl PagePool<DeviceMemory> {
    /// Allocates `blocks` zero-filled blocks on a device; see [`PagePool::new`] for how many.
    ///
    /// # Errors
    /// As [`CacheConfig::validate`]; [`Error::Capacity`] if the size does not fit in an address range; [`Error::Cuda`] if the
    /// device has no such memory.
    pub fn on_device(device: &Device, config: &CacheConfig, blocks: usize) -> Result<Self> {
        let memory = Memory::Owned(DeviceBuffer::new(device, pool_bytes(config, blocks)?)?);
        Self::with_memory(config, blocks, DeviceMemory { memory, device: Some(device.ordinal()) })
    }

    /// Uses `bytes` bytes of device memory at `base`: as many whole blocks as fit.
    ///
    /// # Errors
    /// As [`CacheConfig::validate`]; [`Error::Address`] if `base` is null or not 16-byte aligned.
    ///
    /// # Safety
    /// `base..base + bytes` must be initialised memory of the device that the cache is built on. While the pool lives nothing
    /// else writes it, and nothing reads it but on the cache's stream.
    pub unsafe fn from_device(config: &CacheConfig, base: u64, bytes: usize) -> Result<Self> {
        check::address("pool memory", base, 16)?;
        let blocks = (bytes / config.block_bytes()?).min(MOST_BLOCKS);
        let memory = Memory::Lent { base, bytes };
        Self::with_memory(config, blocks, DeviceMemory { memory, device: None })
    }
}
