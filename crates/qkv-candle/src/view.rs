//! candle tensors as qkv views: any strides, no copy.

use candle_core::{CpuStorage, DType, Result, Storage, StorageRef, Tensor, bail};
use qkv::{Data, TensorRef};

/// A candle tensor that is held for reading while qkv looks at its elements.
pub(crate) struct Held<'a> {
    storage: StorageRef<'a>,
    dims: [usize; 4],
    strides: [usize; 4],
    offset: usize,
    what: &'static str,
}

/// Holds a `[batch, heads, tokens, dim]` tensor on the CPU.
pub(crate) fn hold<'a>(what: &'static str, x: &'a Tensor) -> Result<Held<'a>> {
    if !x.device().is_cpu() {
        bail!(
            "{what}: this cache lives on the CPU, the tensor on {:?}; move it with to_device(&Device::Cpu)",
            x.device()
        )
    }
    let (storage, layout) = x.storage_and_layout();
    let (Ok(dims), Ok(strides)) = (layout.dims().try_into(), layout.stride().try_into()) else {
        bail!("{what}: expected [batch, heads, tokens, dim], got shape {:?}", layout.dims())
    };
    Ok(Held { storage, dims, strides, offset: layout.start_offset(), what })
}

impl Held<'_> {
    /// The tensor as `batch * tokens` tokens.
    pub(crate) fn view(&self) -> Result<TensorRef<'_>> {
        let Storage::Cpu(cpu) = &*self.storage else { bail!("{}: the storage is not on the CPU", self.what) };
        let data = match cpu {
            CpuStorage::F32(x) => x.get(self.offset..).map(Data::F32),
            CpuStorage::F16(x) => x.get(self.offset..).map(Data::F16),
            CpuStorage::BF16(x) => x.get(self.offset..).map(Data::Bf16),
            _ => bail!("{}: expected dtype f32, f16 or bf16", self.what),
        };
        let Some(data) = data else { bail!("{}: the tensor starts beyond its storage", self.what) };
        TensorRef::bhtd_strided(data, self.dims, self.strides).map_err(candle_core::Error::wrap)
    }
}

/// The qkv dtype of a candle dtype.
pub(crate) fn dtype(what: &'static str, d: DType) -> Result<qkv::Dtype> {
    match d {
        DType::F32 => Ok(qkv::Dtype::F32),
        DType::F16 => Ok(qkv::Dtype::F16),
        DType::BF16 => Ok(qkv::Dtype::Bf16),
        got => bail!("{what}: expected dtype f32, f16 or bf16, got {got:?}"),
    }
}
