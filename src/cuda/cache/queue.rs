//! The stream of a cache, and copies on it.

use crate::cuda::device::failed;
use crate::cuda::{Device, RawStream};
use crate::error::{Error, Result};
use bytemuck::{NoUninit, Pod};
use cudarc::driver::{CudaStream, result, sys};
use std::ffi::c_void;
use std::sync::Arc;

/// The stream of a cache: cudarc's, held, or a handle of somebody else's, borrowed.
#[derive(Debug, Clone)]
pub struct CacheStream(Kind);

#[derive(Debug, Clone)]
enum Kind {
    Owned(Arc<CudaStream>),
    Raw(*mut c_void),
}

// SAFETY: the driver takes stream handles from any thread; the per-thread handle names each thread's own stream, which
// `from_raw` leaves to its caller.
unsafe impl Send for CacheStream {}
// SAFETY: as above.
unsafe impl Sync for CacheStream {}

impl From<Arc<CudaStream>> for CacheStream {
    fn from(stream: Arc<CudaStream>) -> Self {
        Self(Kind::Owned(stream))
    }
}

impl CacheStream {
    /// A `CUstream` (the same as `cudaStream_t`) of the device's primary context, or one of CUDA's special handles (null, 1 =
    /// legacy, 2 = per thread).
    ///
    /// # Safety
    /// The stream lives until the cache is dropped or has another one (`set_stream`).
    pub const unsafe fn from_raw(handle: *mut c_void) -> Self {
        Self(Kind::Raw(handle))
    }

    fn handle(&self) -> *mut c_void {
        match &self.0 {
            Kind::Owned(s) => s.cu_stream().cast(),
            Kind::Raw(h) => *h,
        }
    }

    fn check(&self, device: &Device) -> Result<()> {
        match &self.0 {
            Kind::Owned(s) if s.context().cu_ctx() != device.context().cu_ctx() => Err(Error::Unsupported {
                what: "stream",
                got: format!("a stream of device {}", s.context().ordinal()),
                why: format!("the cache is on device {}; take a stream of its context", device.ordinal()),
            }),
            Kind::Owned(_) => Ok(()),
            // Null and CUDA's special handles are of any device.
            Kind::Raw(handle) if (*handle as usize) < 3 => Ok(()),
            Kind::Raw(handle) => {
                let here = device.context();
                here.bind_to_thread().map_err(failed("the context"))?;
                let mut context = std::ptr::null_mut();
                // SAFETY: `from_raw`'s caller vouches for the stream.
                let asked = unsafe { sys::cuStreamGetCtx((*handle).cast(), &mut context) };
                asked.result().map_err(failed("the stream"))?;
                if context == here.cu_ctx() {
                    return Ok(());
                }
                Err(Error::Unsupported {
                    what: "stream",
                    got: "a stream of another context".into(),
                    why: format!("the cache is in the primary context of device {}", device.ordinal()),
                })
            }
        }
    }
}

/// An event, for waiting without timing.
#[derive(Debug)]
pub(super) struct Event(sys::CUevent);

// SAFETY: the driver takes event handles from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    pub(super) fn new(device: &Device) -> Result<Self> {
        device.context().bind_to_thread().map_err(failed("the context"))?;
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        result::event::create(flags).map(Self).map_err(failed("an event"))
    }

    /// Waits until the stream has come to where the event was recorded last.
    pub(super) fn wait(&self) -> Result<()> {
        // SAFETY: the event lives.
        match unsafe { result::event::query(self.0) } {
            Ok(()) => Ok(()),
            Err(e) if e.0 == sys::CUresult::CUDA_ERROR_NOT_READY => {
                // SAFETY: as above.
                unsafe { result::event::synchronize(self.0) }.map_err(failed("the stream"))
            }
            Err(e) => Err(failed("the stream")(e)),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `create`, destroyed once.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

/// A device and the stream that orders all work of a cache.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) device: Device,
    stream: CacheStream,
}

impl Queue {
    pub(super) fn new(device: &Device, stream: CacheStream) -> Result<Self> {
        stream.check(device)?;
        Ok(Self { device: device.clone(), stream })
    }

    pub(super) fn raw(&self) -> RawStream<'_> {
        // SAFETY: the stream lives as long as this does: it is held, or `from_raw`'s caller vouches for it.
        unsafe { RawStream::from_raw(self.stream.handle()) }
    }

    fn handle(&self) -> sys::CUstream {
        self.stream.handle().cast()
    }

    fn bind(&self) -> Result<()> {
        self.device.context().bind_to_thread().map_err(failed("the context"))
    }

    /// Goes on with another stream, which comes after what is on the old one.
    pub(super) fn change(&mut self, stream: CacheStream) -> Result<()> {
        stream.check(&self.device)?;
        let event = Event::new(&self.device)?;
        self.record(&event)?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: stream and event live; the driver keeps what it needs of the event.
        unsafe { result::stream::wait_event(stream.handle().cast(), event.0, flags) }
            .map_err(failed("the new stream"))?;
        self.stream = stream;
        Ok(())
    }

    pub(super) fn record(&self, event: &Event) -> Result<()> {
        self.bind()?;
        // SAFETY: stream and event live.
        unsafe { result::event::record(event.0, self.handle()) }.map_err(failed("the stream"))
    }

    pub(super) fn wait(&self) -> Result<()> {
        self.bind()?;
        // SAFETY: the stream lives.
        unsafe { result::stream::synchronize(self.handle()) }.map_err(failed("the stream"))
    }

    pub(super) fn is_capturing(&self) -> Result<bool> {
        self.bind()?;
        // SAFETY: the stream lives.
        let status = unsafe { result::stream::is_capturing(self.handle()) }.map_err(failed("the stream"))?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Copies to the device. Page-locked memory must stay as it is until the stream has come here; other memory is free at once
    /// (the driver copies it, for which it may wait).
    ///
    /// # Safety
    /// `to` is device memory of that many elements.
    pub(super) unsafe fn upload<T: NoUninit>(&self, to: u64, x: &[T]) -> Result<()> {
        if x.is_empty() {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: the caller's promise, and above.
        unsafe { result::memcpy_htod_async(to, x, self.handle()) }.map_err(failed("a copy to the device"))
    }

    /// Copies from the device and waits.
    ///
    /// # Safety
    /// `from` is device memory of that many initialised elements.
    pub(super) unsafe fn download<T: Pod>(&self, from: u64, x: &mut [T]) -> Result<()> {
        if x.is_empty() {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: the caller's promise; the memory is not touched before the stream has been waited for, below.
        let copied = unsafe { result::memcpy_dtoh_async(x, from, self.handle()) };
        copied.map_err(failed("a copy from the device"))?;
        self.wait()
    }

    /// Copies inside the device.
    ///
    /// # Safety
    /// Both are device memory of that many bytes and do not overlap.
    pub(super) unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: the caller's promise.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.handle()) }.map_err(failed("a copy"))
    }
}
