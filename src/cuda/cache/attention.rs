//! Attention launches of a cache.

use super::Cuda;
use crate::cuda::launch::{self, DeviceAttendParams};
use crate::cuda::{DeviceSliceMut, DeviceTensor, DeviceTensorMut};
use crate::error::Result;

/// Attention over one layer after its append. The longest sequence of the step has `max_query_len` rows.
pub(super) fn attend(
    cache: &Cuda,
    layer: usize,
    q: &DeviceTensor<'_>,
    params: &DeviceAttendParams<'_>,
    max_query_len: usize,
    out: &mut DeviceTensorMut<'_>,
    lse: Option<DeviceSliceMut<'_, f32>>,
) -> Result<()> {
    launch::attend(
        &cache.queue.device,
        cache.queue.raw(),
        &cache.config,
        layer,
        q,
        params,
        max_query_len,
        &cache.batch(),
        &cache.layer_memory(layer),
        &cache.step_memory(),
        out,
        lse,
        cache.workspace(),
    )
}

/// Attention over one layer as it was before the step, and the new tokens.
#[allow(clippy::too_many_arguments)]
pub(super) fn prefill(
    cache: &Cuda,
    layer: usize,
    q: &DeviceTensor<'_>,
    k: &DeviceTensor<'_>,
    v: &DeviceTensor<'_>,
    params: &DeviceAttendParams<'_>,
    max_query_len: usize,
    out: &mut DeviceTensorMut<'_>,
    lse: Option<DeviceSliceMut<'_, f32>>,
) -> Result<()> {
    launch::prefill(
        &cache.queue.device,
        cache.queue.raw(),
        &cache.config,
        layer,
        q,
        k,
        v,
        params,
        max_query_len,
        &cache.batch(),
        &cache.layer_memory(layer),
        &cache.step_memory(),
        out,
        lse,
    )
}
