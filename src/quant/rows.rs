//! Writing rows of one output from several threads.

use crate::tensor::{DataMut, Shape, TensorMut};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::marker::PhantomData;

/// The element pointer of an output.
#[derive(Debug, Clone, Copy)]
enum Elements {
    F16(*mut f16),
    Bf16(*mut bf16),
    F32(*mut f32),
}

/// An output whose rows `(token, head)` may be written from any thread, each by one at a time.
#[derive(Debug)]
pub(crate) struct RowsMut<'a> {
    elements: Elements,
    shape: Shape,
    borrow: PhantomData<&'a mut f32>,
}

// SAFETY: the pointer comes from an exclusive borrow that `borrow` keeps for as long as this lives. Only `write`
// uses it, and rows do not overlap (see there).
unsafe impl Sync for RowsMut<'_> {}
// SAFETY: as above.
unsafe impl Send for RowsMut<'_> {}

impl<'a> RowsMut<'a> {
    /// The rows of an output.
    pub(crate) fn new(out: &'a mut TensorMut<'_>) -> Self {
        let shape = *out.shape();
        let elements = match out.data_mut() {
            DataMut::F16(x) => Elements::F16(x.as_mut_ptr()),
            DataMut::Bf16(x) => Elements::Bf16(x.as_mut_ptr()),
            DataMut::F32(x) => Elements::F32(x.as_mut_ptr()),
        };
        Self { elements, shape, borrow: PhantomData }
    }

    /// Writes row `(token, head)`, rounded to the dtype (half to even). Two threads never write the same row:
    /// callers hand out rows by index. `row` has `dim` elements.
    #[inline]
    pub(crate) fn write(&self, token: usize, head: usize, row: &[f32]) {
        let [tokens, heads, dim] = self.shape.dims;
        assert!(token < tokens && head < heads && row.len() == dim);
        let (at, stride) = (self.shape.row(token, head), self.shape.strides[3]);
        match self.elements {
            Elements::F32(p) => {
                each(p, at, stride, row, |out| out.copy_from_slice(row), |x| x);
            }
            Elements::F16(p) => {
                each(p, at, stride, row, |out| out.convert_from_f32_slice(row), f16::from_f32);
            }
            Elements::Bf16(p) => {
                each(p, at, stride, row, |out| out.convert_from_f32_slice(row), bf16::from_f32);
            }
        }
    }
}

/// Writes one row from offset `at`, as a slice where it is contiguous.
#[inline(always)]
fn each<T>(
    p: *mut T,
    at: usize,
    stride: usize,
    row: &[f32],
    whole: impl FnOnce(&mut [T]),
    one: impl Fn(f32) -> T,
) {
    // SAFETY: `TensorMut` checked that every element of its shape lies inside the data.
    let first = unsafe { p.add(at) };
    if stride == 1 {
        // SAFETY: the row lies inside the data (as above); `TensorMut` refuses shapes in which two elements share
        // a place, so no other row touches it, and the caller writes each row from one thread only.
        whole(unsafe { std::slice::from_raw_parts_mut(first, row.len()) });
    } else {
        for (i, x) in row.iter().enumerate() {
            // SAFETY: inside the data, as above.
            let place = unsafe { first.add(i * stride) };
            // SAFETY: a place of this row only, as above; the elements are plain numbers.
            unsafe { place.write(one(*x)) };
        }
    }
}
