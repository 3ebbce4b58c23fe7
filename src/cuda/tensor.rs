//! Strided views of device memory.

use super::abi::{QKV_BF16, QKV_F16, QKV_F32, QkvTensor};
use super::raw::{DeviceSlice, DeviceSliceMut};
use crate::error::Result;
use crate::tensor::{Dtype, Shape};
use half::{bf16, f16};
use std::marker::PhantomData;

/// A tensor `[tokens, heads, dim]` in device memory that is read: the twin of [`TensorRef`](crate::TensorRef).
#[derive(Debug, Clone, Copy)]
pub struct DeviceTensor<'a> {
    address: u64,
    len: usize,
    device: Option<u32>,
    dtype: Dtype,
    shape: Shape,
    owner: PhantomData<&'a [u8]>,
}

/// A tensor `[tokens, heads, dim]` in device memory that is written: the twin of [`TensorMut`](crate::TensorMut).
#[derive(Debug)]
pub struct DeviceTensorMut<'a> {
    address: u64,
    len: usize,
    device: Option<u32>,
    dtype: Dtype,
    shape: Shape,
    owner: PhantomData<&'a mut [u8]>,
}

/// Element types of device tensors.
pub trait DeviceElement: sealed::Sealed + 'static {
    /// The dtype.
    const DTYPE: Dtype;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! element {
    ($($t:ty => $d:ident),*) => {$(
        impl sealed::Sealed for $t {}
        impl DeviceElement for $t { const DTYPE: Dtype = Dtype::$d; }
    )*};
}
element!(f16 => F16, bf16 => Bf16, f32 => F32);

macro_rules! constructors {
    ($name:ident, $slice:ident, $unique:expr, $what:literal) => {
        impl<'a> $name<'a> {
            /// A view of device memory with any shape and strides.
            ///
            /// # Errors
            /// [`Error::Strides`](crate::Error::Strides) if the strides leave the memory (or, for an output, overlap); [`Error::Shape`](crate::Error::Shape) if the
            /// tokens are no multiple of `batch_tokens`; [`Error::Address`](crate::Error::Address) for null or a misaligned address.
            pub fn new<T: DeviceElement>(data: impl Into<$slice<'a, T>>, shape: Shape) -> Result<Self> {
                let data = data.into();
                let (address, len, device, dtype) = (data.address(), data.len(), data.device(), T::DTYPE);
                shape.check($what, len, $unique)?;
                if !shape.dims.contains(&0) {
                    super::check::address($what, address, dtype.bytes())?;
                }
                Ok(Self { address, len, device, dtype, shape, owner: PhantomData })
            }

            /// A view `[tokens, heads, dim]` of contiguous memory.
            ///
            /// # Errors
            /// As [`Self::new`].
            pub fn thd<T: DeviceElement>(data: impl Into<$slice<'a, T>>, dims: [usize; 3]) -> Result<Self> {
                Self::new(data, Shape::contiguous(dims))
            }

            /// A view of contiguous `[batch, heads, tokens, dim]` memory as `batch * tokens` tokens.
            ///
            /// # Errors
            /// As [`Self::new`].
            pub fn bhtd<T: DeviceElement>(data: impl Into<$slice<'a, T>>, dims: [usize; 4]) -> Result<Self> {
                Self::new(data, Shape::batch_first($what, dims)?)
            }

            /// `[tokens, heads, dim]`.
            pub fn dims(&self) -> [usize; 3] {
                self.shape.dims
            }

            /// Element type.
            pub fn dtype(&self) -> Dtype {
                self.dtype
            }

            /// Where elements lie.
            pub fn shape(&self) -> &Shape {
                &self.shape
            }

            /// Address of the first element.
            pub fn address(&self) -> u64 {
                self.address
            }

            /// The device that allocated it, where that is known.
            pub fn device(&self) -> Option<u32> {
                self.device
            }

            /// Elements behind the view.
            pub fn len(&self) -> usize {
                self.len
            }

            /// Whether there are none.
            pub fn is_empty(&self) -> bool {
                self.len == 0
            }

            /// What kernels take.
            pub(crate) fn parameters(&self) -> QkvTensor {
                QkvTensor {
                    data: self.address,
                    // `Shape::check` saw that no stride of an axis with two elements or more leaves the memory, which an
                    // i64 counts; others are never multiplied with anything but 0.
                    strides: self.shape.strides.map(|s| s as i64),
                    tokens: self.shape.dims[0] as u64,
                    batch_tokens: self.shape.batch_tokens.max(1) as u64,
                    heads: self.shape.dims[1] as u32,
                    dim: self.shape.dims[2] as u32,
                    dtype: match self.dtype {
                        Dtype::F16 => QKV_F16,
                        Dtype::Bf16 => QKV_BF16,
                        Dtype::F32 => QKV_F32,
                    },
                    reserved: 0,
                }
            }
        }
    };
}
constructors!(DeviceTensor, DeviceSlice, false, "tensor");
constructors!(DeviceTensorMut, DeviceSliceMut, true, "output");

impl DeviceTensorMut<'_> {
    /// The same tensor, its first `n` tokens.
    pub(crate) fn first_tokens(&mut self, n: usize) -> DeviceTensorMut<'_> {
        let [tokens, heads, dim] = self.shape.dims;
        let shape = crate::tensor::Shape { dims: [n.min(tokens), heads, dim], ..self.shape };
        DeviceTensorMut {
            shape,
            address: self.address,
            len: self.len,
            dtype: self.dtype,
            device: self.device,
            owner: PhantomData,
        }
    }

    /// The same tensor for reading.
    pub fn as_ref(&self) -> DeviceTensor<'_> {
        DeviceTensor {
            address: self.address,
            len: self.len,
            device: self.device,
            dtype: self.dtype,
            shape: self.shape,
            owner: PhantomData,
        }
    }
}
