//! Attention launches of a cache.

use super::Cuda;
use crate::config::CacheConfig;
use crate::cuda::launch::DeviceAttendParams;
use crate::cuda::{Device, DeviceSliceMut, DeviceTensor, DeviceTensorMut};
use crate::error::{Error, Result};

fn missing<T>(what: &'static str) -> Result<T> {
    Err(Error::Unsupported {
        what,
        got: "a cache on CUDA".into(),
        why: "this build has no attention kernels for the device; `append` and `dequantize` work".into(),
    })
}

/// f32 elements of the workspace that `attend` needs.
pub(super) fn workspace(
    _device: &Device,
    _config: &CacheConfig,
    _query_heads: usize,
    _max_query_len: usize,
) -> Result<usize> {
    Ok(0)
}

/// Attention over one layer after its append. The longest sequence of the step has `max_query_len` rows.
#[allow(clippy::too_many_arguments)]
pub(super) fn attend(
    _cache: &Cuda,
    _layer: usize,
    _q: &DeviceTensor<'_>,
    _params: &DeviceAttendParams<'_>,
    _max_query_len: usize,
    _out: &mut DeviceTensorMut<'_>,
    _lse: Option<&mut DeviceSliceMut<'_, f32>>,
) -> Result<()> {
    missing("attend")
}

/// Attention over one layer as it was before the step, and the new tokens.
#[allow(clippy::too_many_arguments)]
pub(super) fn prefill(
    _cache: &Cuda,
    _layer: usize,
    _q: &DeviceTensor<'_>,
    _k: &DeviceTensor<'_>,
    _v: &DeviceTensor<'_>,
    _params: &DeviceAttendParams<'_>,
    _max_query_len: usize,
    _out: &mut DeviceTensorMut<'_>,
    _lse: Option<&mut DeviceSliceMut<'_, f32>>,
) -> Result<()> {
    missing("prefill")
}
