//! Borrowed strided views `[tokens, heads, dim]`, so that `[batch, heads, tokens, dim]` is a view and never a
//! copy.

use crate::error::{Error, Result};
use half::{bf16, f16};

/// Element type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// IEEE single precision.
    F32,
}

impl Dtype {
    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::F32 => 4,
        }
    }
}

/// Borrowed elements of one of the three dtypes.
#[derive(Debug, Clone, Copy)]
pub enum Data<'a> {
    /// IEEE half precision.
    F16(&'a [f16]),
    /// bfloat16.
    Bf16(&'a [bf16]),
    /// IEEE single precision.
    F32(&'a [f32]),
}

/// Mutably borrowed elements of one of the three dtypes.
#[derive(Debug)]
pub enum DataMut<'a> {
    /// IEEE half precision.
    F16(&'a mut [f16]),
    /// bfloat16.
    Bf16(&'a mut [bf16]),
    /// IEEE single precision.
    F32(&'a mut [f32]),
}

macro_rules! from_slice {
    ($($t:ty => $v:ident),*) => {$(
        impl<'a> From<&'a [$t]> for Data<'a> { fn from(x: &'a [$t]) -> Self { Data::$v(x) } }
        impl<'a> From<&'a Vec<$t>> for Data<'a> { fn from(x: &'a Vec<$t>) -> Self { Data::$v(x) } }
        impl<'a> From<&'a mut [$t]> for DataMut<'a> { fn from(x: &'a mut [$t]) -> Self { DataMut::$v(x) } }
        impl<'a> From<&'a mut Vec<$t>> for DataMut<'a> { fn from(x: &'a mut Vec<$t>) -> Self { DataMut::$v(x) } }
    )*};
}
from_slice!(f16 => F16, bf16 => Bf16, f32 => F32);

impl Data<'_> {
    /// Element type.
    pub fn dtype(&self) -> Dtype {
        match self {
            Data::F16(_) => Dtype::F16,
            Data::Bf16(_) => Dtype::Bf16,
            Data::F32(_) => Dtype::F32,
        }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        match self {
            Data::F16(x) => x.len(),
            Data::Bf16(x) => x.len(),
            Data::F32(x) => x.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl DataMut<'_> {
    /// The same elements, shared.
    pub fn as_ref(&self) -> Data<'_> {
        match self {
            DataMut::F16(x) => Data::F16(x),
            DataMut::Bf16(x) => Data::Bf16(x),
            DataMut::F32(x) => Data::F32(x),
        }
    }
}

/// Where element `(token, head, channel)` lies. Tokens come in batches of `batch_tokens`, so that a
/// contiguous `[batch, heads, tokens, dim]` tensor is one view of `batch * tokens` tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// `[tokens, heads, dim]`.
    pub dims: [usize; 3],
    /// Tokens of one batch row; equal to the number of tokens where there is one row.
    pub batch_tokens: usize,
    /// Elements between batch rows, tokens, heads and channels.
    pub strides: [usize; 4],
}

impl Shape {
    pub(crate) fn contiguous(dims: [usize; 3]) -> Self {
        let [t, h, d] = dims;
        // Sizes that overflow reach beyond any data, which `check` finds.
        let row = h.saturating_mul(d);
        Self { dims, batch_tokens: t, strides: [t.saturating_mul(row), row, d, 1] }
    }

    /// Offset of the first channel of `(token, head)`.
    #[inline]
    pub(crate) fn row(&self, token: usize, head: usize) -> usize {
        let [b, t, h, _] = self.strides;
        if token < self.batch_tokens {
            token * t + head * h
        } else {
            (token / self.batch_tokens) * b + (token % self.batch_tokens) * t + head * h
        }
    }

    /// Contiguous `[batch, heads, tokens, dim]` data.
    pub(crate) fn batch_first(what: &'static str, dims: [usize; 4]) -> Result<Self> {
        let [_, h, t, d] = dims;
        let head = t.saturating_mul(d);
        Self::batch_first_strided(what, dims, [h.saturating_mul(head), head, d, 1])
    }

    /// `[batch, heads, tokens, dim]` data with these strides, in the same order.
    pub(crate) fn batch_first_strided(
        what: &'static str,
        dims: [usize; 4],
        strides: [usize; 4],
    ) -> Result<Self> {
        let [b, h, t, d] = dims;
        let [sb, sh, st, sd] = strides;
        let tokens = b.checked_mul(t).ok_or_else(|| Error::Shape {
            what,
            expected: "batch * tokens that fit in a usize".into(),
            got: format!("{dims:?}"),
        })?;
        Ok(Self { dims: [tokens, h, d], batch_tokens: t, strides: [sb, st, sh, sd] })
    }

    pub(crate) fn check(&self, what: &'static str, len: usize, unique: bool) -> Result<()> {
        let [t, h, d] = self.dims;
        if t > 0 && (self.batch_tokens == 0 || t % self.batch_tokens != 0) {
            return Err(Error::Shape {
                what,
                expected: match self.batch_tokens {
                    0 => "a batch_tokens of 1 or more (that of one batch row: all tokens)".into(),
                    n => format!("a multiple of {n} tokens"),
                },
                got: match self.batch_tokens {
                    0 => "0".into(),
                    _ => format!("{:?}", self.dims),
                },
            });
        }
        if t == 0 || h == 0 || d == 0 {
            return Ok(());
        }
        let sizes = [t / self.batch_tokens, self.batch_tokens, h, d];
        let mut last = 0usize;
        for (n, s) in sizes.iter().zip(self.strides) {
            let reach = (n - 1).checked_mul(s).and_then(|x| last.checked_add(x));
            last = reach.unwrap_or(usize::MAX);
        }
        if last >= len {
            return Err(Error::Strides {
                what,
                problem: format!(
                    "shape {:?} with strides {:?} needs {} elements",
                    self.dims,
                    self.strides,
                    last.saturating_add(1)
                ),
                len,
            });
        }
        if unique {
            // On the stack: a step makes views and allocates nothing.
            let mut axes: [(usize, usize); 4] = std::array::from_fn(|i| (self.strides[i], sizes[i]));
            axes.sort_unstable();
            let mut reach = 0;
            for (s, n) in axes.into_iter().filter(|x| x.1 > 1) {
                if s <= reach {
                    let problem = format!("strides {:?} make elements of an output overlap", self.strides);
                    return Err(Error::Strides { what, problem, len });
                }
                reach += s * (n - 1);
            }
        }
        Ok(())
    }
}

/// Builds the two view types with the same constructors.
macro_rules! constructors {
    ($view:ident, $data:ident, $unique:expr, $what:literal) => {
        impl<'a> $view<'a> {
            /// A view `[tokens, heads, dim]` of contiguous data.
            ///
            /// # Errors
            /// [`Error::Strides`] if the data are too short.
            pub fn thd(data: impl Into<$data<'a>>, dims: [usize; 3]) -> Result<Self> {
                Self::new(data, Shape::contiguous(dims))
            }

            /// A view of contiguous `[batch, heads, tokens, dim]` data as `batch * tokens` tokens.
            ///
            /// # Errors
            /// [`Error::Strides`] if the data are too short.
            pub fn bhtd(data: impl Into<$data<'a>>, dims: [usize; 4]) -> Result<Self> {
                Self::new(data, Shape::batch_first($what, dims)?)
            }

            /// A view of `[batch, heads, tokens, dim]` data with these strides (in elements, same order).
            ///
            /// # Errors
            /// [`Error::Strides`] if the strides leave the data; [`Error::Shape`] if the tokens overflow.
            pub fn bhtd_strided(
                data: impl Into<$data<'a>>,
                dims: [usize; 4],
                strides: [usize; 4],
            ) -> Result<Self> {
                Self::new(data, Shape::batch_first_strided($what, dims, strides)?)
            }

            /// A view with any shape and strides.
            ///
            /// # Errors
            /// [`Error::Strides`] if the strides leave the data (or, for an output, overlap);
            /// [`Error::Shape`] if the tokens are no multiple of `batch_tokens`.
            pub fn new(data: impl Into<$data<'a>>, shape: Shape) -> Result<Self> {
                let data = data.into();
                #[allow(clippy::useless_asref)]
                shape.check($what, data.as_ref().len(), $unique)?;
                Ok(Self { data, shape })
            }

            /// `[tokens, heads, dim]`.
            pub fn dims(&self) -> [usize; 3] {
                self.shape.dims
            }

            /// Element type.
            pub fn dtype(&self) -> Dtype {
                self.data.as_ref().dtype()
            }

            /// Where elements lie.
            pub fn shape(&self) -> &Shape {
                &self.shape
            }
        }
    };
}

/// A borrowed tensor `[tokens, heads, dim]`.
#[derive(Debug, Clone, Copy)]
pub struct TensorRef<'a> {
    data: Data<'a>,
    shape: Shape,
}

/// A mutably borrowed tensor `[tokens, heads, dim]`.
#[derive(Debug)]
pub struct TensorMut<'a> {
    data: DataMut<'a>,
    shape: Shape,
}

impl<'a> Data<'a> {
    fn as_ref(&self) -> Data<'a> {
        *self
    }
}

constructors!(TensorRef, Data, false, "tensor");
constructors!(TensorMut, DataMut, true, "output");

impl<'a> TensorRef<'a> {
    /// The elements behind the view.
    pub fn data(&self) -> Data<'a> {
        self.data
    }

    /// Reads row `(token, head)` as f32. `out` has `dim` elements.
    #[inline]
    pub(crate) fn read_row(&self, token: usize, head: usize, out: &mut [f32]) {
        let (at, d, s) = (self.shape.row(token, head), out.len(), self.shape.strides[3]);
        debug_assert_eq!(d, self.shape.dims[2]);
        use half::slice::HalfFloatSliceExt;
        match self.data {
            Data::F32(x) if s == 1 => out.copy_from_slice(&x[at..at + d]),
            Data::F16(x) if s == 1 => x[at..at + d].convert_to_f32_slice(out),
            Data::Bf16(x) if s == 1 => x[at..at + d].convert_to_f32_slice(out),
            Data::F32(x) => (0..d).for_each(|i| out[i] = x[at + i * s]),
            Data::F16(x) => (0..d).for_each(|i| out[i] = x[at + i * s].to_f32()),
            Data::Bf16(x) => (0..d).for_each(|i| out[i] = x[at + i * s].to_f32()),
        }
    }
}

impl TensorMut<'_> {
    /// The elements behind the view. They are lent, so nobody can put others behind a shape that was checked for these:
    ///
    /// ```compile_fail
    /// # use qkv::{DataMut, TensorMut};
    /// let (mut long, mut short) = ([0f32; 8], [0f32; 1]);
    /// let mut view = TensorMut::thd(&mut long[..], [1, 1, 8]).unwrap();
    /// *view.data_mut() = DataMut::F32(&mut short);
    /// ```
    pub fn data_mut(&mut self) -> DataMut<'_> {
        match &mut self.data {
            DataMut::F16(x) => DataMut::F16(x),
            DataMut::Bf16(x) => DataMut::Bf16(x),
            DataMut::F32(x) => DataMut::F32(x),
        }
    }

    /// The same tensor, shared.
    pub fn as_ref(&self) -> TensorRef<'_> {
        TensorRef { data: self.data.as_ref(), shape: self.shape }
    }

    /// Writes row `(token, head)`, rounded to the dtype (half to even). `row` has `dim` elements.
    #[inline]
    pub(crate) fn write_row(&mut self, token: usize, head: usize, row: &[f32]) {
        let (at, d, s) = (self.shape.row(token, head), row.len(), self.shape.strides[3]);
        debug_assert_eq!(d, self.shape.dims[2]);
        use half::slice::HalfFloatSliceExt;
        match &mut self.data {
            DataMut::F32(x) if s == 1 => x[at..at + d].copy_from_slice(row),
            DataMut::F16(x) if s == 1 => x[at..at + d].convert_from_f32_slice(row),
            DataMut::Bf16(x) if s == 1 => x[at..at + d].convert_from_f32_slice(row),
            DataMut::F32(x) => (0..d).for_each(|i| x[at + i * s] = row[i]),
            DataMut::F16(x) => (0..d).for_each(|i| x[at + i * s] = f16::from_f32(row[i])),
            DataMut::Bf16(x) => (0..d).for_each(|i| x[at + i * s] = bf16::from_f32(row[i])),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_first_tensor_is_a_view() {
        let data: Vec<f32> = (0..2 * 3 * 4 * 2).map(|x| x as f32).collect();
        let view = TensorRef::bhtd(&data, [2, 3, 4, 2]).unwrap();
        assert_eq!(view.dims(), [8, 3, 2]);
        let mut row = [0.0; 2];
        view.read_row(4 + 1, 2, &mut row); // batch 1, token 1, head 2
        let at = ((3 + 2) * 4 + 1) * 2;
        assert_eq!(row, [at as f32, at as f32 + 1.0]);
    }

    #[test]
    fn strides_that_leave_the_data_or_overlap_are_refused() {
        let mut data = vec![0f32; 12];
        assert!(matches!(TensorRef::thd(&data, [2, 3, 3]), Err(Error::Strides { .. })));
        let shape = Shape { dims: [2, 1, 3], batch_tokens: 2, strides: [0, 2, 3, 1] };
        assert!(TensorRef::new(&data, shape).is_ok());
        assert!(matches!(TensorMut::new(&mut data, shape), Err(Error::Strides { .. })));
        let huge = Shape { dims: [usize::MAX, 2, 2], batch_tokens: usize::MAX, strides: [0, 2, 1, 1] };
        assert!(TensorRef::new(&data, huge).is_err());
    }
}
