//! The output tensor, written by several threads at once, each its own rows.

use crate::raw::RawSlice;
use crate::tensor::{DataMut, Shape, TensorMut};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

enum Elements<'a> {
    F16(RawSlice<'a, f16>),
    Bf16(RawSlice<'a, bf16>),
    F32(RawSlice<'a, f32>),
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
            DataMut::F16(x) => Elements::F16(RawSlice::new(x)),
            DataMut::Bf16(x) => Elements::Bf16(RawSlice::new(x)),
            DataMut::F32(x) => Elements::F32(RawSlice::new(x)),
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
