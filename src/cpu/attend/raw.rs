//! Memory that several threads write at once, each its own part.

use crate::tensor::{DataMut, Shape, TensorMut};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::marker::PhantomData;

/// A slice whose disjoint parts are written by different threads.
pub(super) struct Shared<'a, T> {
    ptr: *mut T,
    len: usize,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for `&mut [T]`; its one accessor demands that parts used at the same time are disjoint.
unsafe impl<T: Send> Sync for Shared<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(super) fn new(slice: &'a mut [T]) -> Self {
        Self { ptr: slice.as_mut_ptr(), len: slice.len(), life: PhantomData }
    }

    /// Elements `at..at + n`.
    ///
    /// # Safety
    /// Nobody else uses one of these elements while the result lives.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn part(&self, at: usize, n: usize) -> &mut [T] {
        assert!(at <= self.len && n <= self.len - at, "{n} elements from {at} of {}", self.len);
        // SAFETY: `at <= len` was just asserted, so the address stays inside the slice.
        let start = unsafe { self.ptr.add(at) };
        // SAFETY: `at + n <= len` was just asserted, and the caller promises that nobody else uses the part.
        unsafe { std::slice::from_raw_parts_mut(start, n) }
    }
}

enum Elements<'a> {
    F16(Shared<'a, f16>),
    Bf16(Shared<'a, bf16>),
    F32(Shared<'a, f32>),
}

/// An output tensor whose rows are written by different threads. `TensorMut` has checked that no two elements overlap.
pub(super) struct Output<'a> {
    data: Elements<'a>,
    shape: Shape,
}

impl<'a> Output<'a> {
    pub(super) fn new(out: &'a mut TensorMut<'_>) -> Self {
        let shape = *out.shape();
        let data = match out.data_mut() {
            DataMut::F16(x) => Elements::F16(Shared::new(x)),
            DataMut::Bf16(x) => Elements::Bf16(Shared::new(x)),
            DataMut::F32(x) => Elements::F32(Shared::new(x)),
        };
        Self { data, shape }
    }

    /// Writes row `(token, head)`, rounded half to even to the dtype.
    ///
    /// # Safety
    /// Nobody else writes this row at the same time.
    pub(super) unsafe fn write_row(&self, token: usize, head: usize, row: &[f32]) {
        let [tokens, heads, dim] = self.shape.dims;
        assert!(
            token < tokens && head < heads && row.len() == dim,
            "row ({token}, {head}) of {:?}",
            self.shape.dims
        );
        let (at, n, stride) = (self.shape.row(token, head), row.len(), self.shape.strides[3]);
        let whole = if stride == 1 { n } else { 1 };
        for (i, part) in row.chunks(whole).enumerate() {
            let at = at + i * stride;
            match &self.data {
                // SAFETY: rows of the tensor do not overlap, and the caller promises that this one is ours.
                Elements::F32(x) => unsafe { x.part(at, whole) }.copy_from_slice(part),
                // SAFETY: as above.
                Elements::F16(x) => unsafe { x.part(at, whole) }.convert_from_f32_slice(part),
                // SAFETY: as above.
                Elements::Bf16(x) => unsafe { x.part(at, whole) }.convert_from_f32_slice(part),
            }
        }
    }
}
