//! What crosses the border to an engine: a device address and a stream handle, whatever library made them.
//!
//! The driver counts references to a device's primary context, so a [`Device`](super::Device) uses the same context as the
//! engine, even with another version of cudarc in the same program.

use std::ffi::c_void;
use std::marker::PhantomData;

/// A borrowed `CUstream` (the same as `cudaStream_t`). The default one is null; see the
/// [module's](super) words on streams.
#[derive(Debug, Clone, Copy)]
pub struct RawStream<'a> {
    handle: *mut c_void,
    owner: PhantomData<&'a ()>,
}

impl RawStream<'_> {
    /// # Safety
    /// `handle` is a stream of the device's primary context that lives for `'a`, or one of CUDA's special handles (null,
    /// 1 = legacy, 2 = per thread).
    pub const unsafe fn from_raw(handle: *mut c_void) -> Self {
        Self { handle, owner: PhantomData }
    }

    /// The default stream of the context (null).
    pub const fn default_stream() -> RawStream<'static> {
        RawStream { handle: std::ptr::null_mut(), owner: PhantomData }
    }

    /// The handle.
    pub const fn as_raw(self) -> *mut c_void {
        self.handle
    }
}

impl<'a> From<&'a cudarc::driver::CudaStream> for RawStream<'a> {
    fn from(stream: &'a cudarc::driver::CudaStream) -> Self {
        Self { handle: stream.cu_stream().cast(), owner: PhantomData }
    }
}

/// Device memory that is read: an address and a length in elements.
#[derive(Debug)]
pub struct DeviceSlice<'a, T> {
    address: u64,
    len: usize,
    device: Option<u32>,
    owner: PhantomData<&'a [T]>,
}

impl<T> Clone for DeviceSlice<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DeviceSlice<'_, T> {}

/// Device memory that is written: an address and a length in elements.
#[derive(Debug)]
pub struct DeviceSliceMut<'a, T> {
    address: u64,
    len: usize,
    device: Option<u32>,
    owner: PhantomData<&'a mut [T]>,
}

macro_rules! slice {
    ($name:ident, $access:literal) => {
        impl<T> $name<'_, T> {
            /// # Safety
            #[doc = concat!(
                                                "`address` is memory that the launch's device reaches, aligned for `T` and valid for ",
                                                $access,
                                                " of `len` elements until the work that uses it is done."
                                            )]
            pub const unsafe fn from_raw(address: u64, len: usize) -> Self {
                Self { address, len, device: None, owner: PhantomData }
            }

            /// Elements.
            pub const fn len(&self) -> usize {
                self.len
            }

            /// Whether there is none.
            pub const fn is_empty(&self) -> bool {
                self.len == 0
            }

            /// The address.
            pub const fn address(&self) -> u64 {
                self.address
            }

            /// The device that allocated it, where that is known: of cudarc's slices, not of addresses.
            pub const fn device(&self) -> Option<u32> {
                self.device
            }
        }
    };
}
slice!(DeviceSlice, "reads");
slice!(DeviceSliceMut, "writes by nobody else");

impl<'a, T> DeviceSliceMut<'a, T> {
    /// The same memory for reading.
    pub const fn as_ref(&self) -> DeviceSlice<'_, T> {
        DeviceSlice { address: self.address, len: self.len, device: self.device, owner: PhantomData }
    }

    /// The same memory, lent on.
    pub const fn reborrow(&mut self) -> DeviceSliceMut<'_, T> {
        DeviceSliceMut { address: self.address, len: self.len, device: self.device, owner: PhantomData }
    }
}

macro_rules! halves {
    ($($t:ty),*) => {$(
        impl<'a> DeviceSlice<'a, $t> {
            /// The same memory as the 16-bit words that a cache's memory is given as.
            pub const fn bits(self) -> DeviceSlice<'a, u16> {
                DeviceSlice { address: self.address, len: self.len, device: self.device, owner: PhantomData }
            }
        }

        impl<'a> DeviceSliceMut<'a, $t> {
            /// The same memory as the 16-bit words that a cache's memory is given as.
            pub const fn bits(self) -> DeviceSliceMut<'a, u16> {
                DeviceSliceMut { address: self.address, len: self.len, device: self.device, owner: PhantomData }
            }
        }
    )*};
}
halves!(half::f16, half::bf16);

/// cudarc's slices and views. cudarc waits between its streams by events that this library's launches do not make: launch on the
/// stream that the slice belongs to, or order the streams yourself. The conversion itself waits for such an event while cudarc
/// tracks them, which a capture does not allow: convert before it, or disable event tracking.
///
/// Launch functions refuse a slice of another device. Where devices reach each other's memory, make the view of its address.
impl<'a, T, S: cudarc::driver::DevicePtr<T>> From<&'a S> for DeviceSlice<'a, T> {
    fn from(slice: &'a S) -> Self {
        let (address, _wait) = slice.device_ptr(slice.stream());
        let device = Some(slice.stream().context().ordinal() as u32);
        Self { address, len: slice.len(), device, owner: PhantomData }
    }
}

/// As for [`DeviceSlice`].
impl<'a, T, S: cudarc::driver::DevicePtrMut<T>> From<&'a mut S> for DeviceSliceMut<'a, T> {
    fn from(slice: &'a mut S) -> Self {
        let (len, stream) = (slice.len(), slice.stream().clone());
        let (address, _wait) = slice.device_ptr_mut(&stream);
        Self { address, len, device: Some(stream.context().ordinal() as u32), owner: PhantomData }
    }
}
