//! Exact rows: windows, sinks, and the new tokens of a prefill.

use super::kernels::expand;
use super::load;
use crate::layout::TILE;
use crate::simd::Isa;
use crate::tensor::{Data, TensorRef};

/// Exact rows `[capacity][dim]`, contiguous; token t is row `t % capacity`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows<'a> {
    /// The elements.
    pub data: Data<'a>,
    /// Rows.
    pub capacity: usize,
}

impl Rows<'_> {
    /// No rows.
    pub(crate) const NONE: Rows<'static> = Rows { data: Data::F32(&[]), capacity: 0 };
}

/// Where exact rows come from.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source<'a> {
    /// A ring of rows of this many channels.
    Ring(Rows<'a>, usize),
    /// Rows of a tensor: token `start` is row `row`; and the head.
    Tensor { tensor: &'a TensorRef<'a>, start: usize, row: usize, head: usize },
}

impl Source<'_> {
    fn data(&self) -> Data<'_> {
        match self {
            Source::Ring(rows, _) => rows.data,
            Source::Tensor { tensor, .. } => tensor.data(),
        }
    }

    /// Elements before the first channel of a token.
    #[inline]
    fn offset(&self, token: usize) -> usize {
        match self {
            Source::Ring(rows, dim) => token % rows.capacity * dim,
            Source::Tensor { tensor, start, row, head } => tensor.shape().row(token - start + row, *head),
        }
    }

    fn channel_stride(&self) -> usize {
        match self {
            Source::Ring(..) => 1,
            Source::Tensor { tensor, .. } => tensor.shape().strides[3],
        }
    }

    /// Reads `width` channels (a multiple of 8) from channel `c` on of tokens `from..to` (at most 64) into
    /// `out[token][width]`.
    pub(super) fn read(&self, isa: Isa, from: usize, to: usize, c: usize, width: usize, out: &mut [f32]) {
        let stride = self.channel_stride();
        if stride != 1 {
            for (t, row) in (from..to).zip(out.chunks_exact_mut(width)) {
                let at = self.offset(t) + c * stride;
                match self.data() {
                    Data::F32(x) => row.iter_mut().enumerate().for_each(|(i, o)| *o = x[at + i * stride]),
                    Data::F16(x) => {
                        row.iter_mut().enumerate().for_each(|(i, o)| *o = x[at + i * stride].to_f32())
                    }
                    Data::Bf16(x) => {
                        row.iter_mut().enumerate().for_each(|(i, o)| *o = x[at + i * stride].to_f32())
                    }
                }
            }
            return;
        }
        let (kind, bytes, size): (usize, &[u8], usize) = match self.data() {
            Data::F32(x) => (load::F32, bytemuck::cast_slice(x), 4),
            Data::F16(x) => (load::F16, bytemuck::cast_slice(x), 2),
            Data::Bf16(x) => (load::BF16, bytemuck::cast_slice(x), 2),
        };
        let mut at = [0usize; TILE];
        let at = &mut at[..to - from];
        at.iter_mut().enumerate().for_each(|(i, a)| *a = (self.offset(from + i) + c) * size);
        expand(isa, kind, bytes, at, width, None, 0, out);
    }
}
