//! Elements of tensors on the host.

use half::{bf16, f16};
use qkv::{Data, DataMut, Dtype};

macro_rules! each {
    ($on:expr, $kind:ident, $x:ident => $e:expr) => {
        match $on {
            $kind::F16($x) => $e,
            $kind::Bf16($x) => $e,
            $kind::F32($x) => $e,
        }
    };
}
pub(crate) use each;

/// Elements of one of the three dtypes on the host.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Host {
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    F32(Vec<f32>),
}

impl Host {
    /// f32 values rounded to a dtype.
    pub(crate) fn new(dtype: Dtype, x: &[f32]) -> Self {
        match dtype {
            Dtype::F16 => Host::F16(x.iter().map(|x| f16::from_f32(*x)).collect()),
            Dtype::Bf16 => Host::Bf16(x.iter().map(|x| bf16::from_f32(*x)).collect()),
            Dtype::F32 => Host::F32(x.to_vec()),
        }
    }

    pub(crate) fn f32(&self) -> Vec<f32> {
        match self {
            Host::F16(x) => x.iter().map(|x| x.to_f32()).collect(),
            Host::Bf16(x) => x.iter().map(|x| x.to_f32()).collect(),
            Host::F32(x) => x.clone(),
        }
    }

    pub(crate) fn data(&self) -> Data<'_> {
        each!(self, Host, x => x.into())
    }

    pub(crate) fn data_mut(&mut self) -> DataMut<'_> {
        each!(self, Host, x => x.into())
    }

    /// So many elements that no result is.
    pub(crate) fn nan(dtype: Dtype, n: usize) -> Self {
        Self::new(dtype, &vec![f32::NAN; n])
    }

    /// Bits, so that NaN compares and -0 differs from 0.
    pub(crate) fn bits(&self) -> Vec<u32> {
        match self {
            Host::F16(x) => x.iter().map(|x| x.to_bits().into()).collect(),
            Host::Bf16(x) => x.iter().map(|x| x.to_bits().into()).collect(),
            Host::F32(x) => x.iter().map(|x| x.to_bits()).collect(),
        }
    }
}
