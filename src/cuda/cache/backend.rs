//! The backend's calls on a device.

use super::moves::CudaSnapshot;
use super::{Cuda, CudaOptions, DeviceMemory};
use crate::backend::{Backend, Stored, sealed};
use crate::cache::{PagePool, Seat, Step};
use crate::config::CacheConfig;
use crate::cuda::check;
use crate::cuda::launch::{self, DeviceAttendParams};
use crate::cuda::{DeviceSliceMut, DeviceTensor, DeviceTensorMut};
use crate::error::{Error, Result};
use crate::tensor::Dtype;
use half::f16;

impl sealed::Sealed for Cuda {}

impl Backend for Cuda {
    type Tensor<'a> = DeviceTensor<'a>;
    type Output<'a> = DeviceTensorMut<'a>;
    type Lse<'a> = DeviceSliceMut<'a, f32>;
    type Params<'a> = DeviceAttendParams<'a>;
    type Snapshot = CudaSnapshot;
    type Memory = DeviceMemory;
    type Context = CudaOptions;

    fn describe(tensor: &DeviceTensor<'_>) -> ([usize; 3], Dtype) {
        (tensor.dims(), tensor.dtype())
    }

    fn describe_output(tensor: &DeviceTensorMut<'_>) -> ([usize; 3], Dtype) {
        (tensor.dims(), tensor.dtype())
    }

    fn lse_len(lse: &DeviceSliceMut<'_, f32>) -> usize {
        lse.len()
    }

    fn check_params(params: &DeviceAttendParams<'_>, query_heads: usize) -> Result<()> {
        params.check(query_heads)
    }

    fn bidirectional(params: &DeviceAttendParams<'_>) -> Option<String> {
        let ranges = params.bidirectional.filter(|b| !b.is_empty())?;
        Some(format!("{} ranges", ranges.len() / 2))
    }

    fn new_pool(
        context: &CudaOptions,
        config: &CacheConfig,
        blocks: usize,
    ) -> Result<PagePool<DeviceMemory>> {
        PagePool::on_device(context.device(), config, blocks)
    }

    fn new(context: CudaOptions, config: &CacheConfig, pool: PagePool<DeviceMemory>) -> Result<Self> {
        Self::build(context, config, pool)
    }

    fn pool(&self) -> &PagePool<DeviceMemory> {
        &self.pool
    }

    fn scratch_bytes(&self) -> usize {
        self.scratch()
    }

    fn clamped(&self) -> u64 {
        self.status().map_or(0, |s| s.clamped_values)
    }

    fn set_lengths(&mut self, seat: Seat, len: usize, packed: usize) -> Result<()> {
        self.write_lengths(seat, len, packed)
    }

    fn check_append(&self, k: &DeviceTensor<'_>, v: &DeviceTensor<'_>) -> Result<()> {
        check::home(&self.queue.device, [("k", k.device()), ("v", v.device())])
    }

    fn check_prefill(
        &self,
        q: &DeviceTensor<'_>,
        k: &DeviceTensor<'_>,
        v: &DeviceTensor<'_>,
        params: &DeviceAttendParams<'_>,
        out: &DeviceTensorMut<'_>,
        lse: Option<&DeviceSliceMut<'_, f32>>,
    ) -> Result<()> {
        launch::check_prefill(&self.queue.device, &self.config, [q, k, v], params, out, lse)
    }

    fn begin(&mut self, step: &Step) -> Result<()> {
        self.begin_on_device(step)
    }

    fn append(&mut self, layer: usize, _: &Step, k: &DeviceTensor<'_>, v: &DeviceTensor<'_>) -> Result<u64> {
        let (device, stream, batch) = (&self.queue.device, self.queue.raw(), self.batch());
        let (mut memory, mut step) = (self.layer_memory(layer), self.step_memory());
        launch::append(device, stream, &self.config, layer, k, v, &batch, &mut memory, &mut step)?;
        Ok(0)
    }

    fn attend(
        &mut self,
        layer: usize,
        _: &Step,
        q: &DeviceTensor<'_>,
        params: &DeviceAttendParams<'_>,
        out: &mut DeviceTensorMut<'_>,
        lse: Option<&mut DeviceSliceMut<'_, f32>>,
    ) -> Result<()> {
        let mut params = *params;
        if let Some(split) = self.options.split {
            for (what, needed, available) in [
                ("new tokens of a sequence with fixed splits", self.current.query_tokens, split.query_tokens),
                ("query heads with fixed splits", q.dims()[1], split.query_heads),
            ] {
                if needed > available {
                    let help = "build the cache with CudaOptions::with_fixed_split for as many";
                    return Err(Error::Capacity { what, needed, available, help });
                }
            }
            params.fixed_split = Some(params.fixed_split.unwrap_or(split.pages));
        } else if params.fixed_split.is_some() {
            return Err(Error::Unsupported {
                what: "fixed_split",
                got: "a cache without memory for it".into(),
                why: "build the cache with CudaOptions::with_fixed_split".into(),
            });
        }
        launch::attend(
            &self.queue.device,
            self.queue.raw(),
            &self.config,
            layer,
            q,
            &params,
            self.current.query_tokens,
            &self.batch(),
            &self.layer_memory(layer),
            &self.step_memory(),
            out,
            lse.map(DeviceSliceMut::reborrow),
            self.workspace(),
        )
    }

    fn prefill(
        &mut self,
        layer: usize,
        _: &Step,
        q: &DeviceTensor<'_>,
        k: &DeviceTensor<'_>,
        v: &DeviceTensor<'_>,
        params: &DeviceAttendParams<'_>,
        out: &mut DeviceTensorMut<'_>,
        lse: Option<&mut DeviceSliceMut<'_, f32>>,
    ) -> Result<()> {
        launch::prefill(
            &self.queue.device,
            self.queue.raw(),
            &self.config,
            layer,
            q,
            k,
            v,
            params,
            self.current.query_tokens,
            &self.batch(),
            &self.layer_memory(layer),
            &self.step_memory(),
            out,
            lse.map(DeviceSliceMut::reborrow),
            Some(self.prefill_scratch()),
        )
    }

    fn close_tiles(
        &mut self,
        layer: usize,
        seat: Seat,
        table: &[i32],
        from: usize,
        to: usize,
    ) -> Result<u64> {
        self.close_from_window(layer, seat, table, from, to)?;
        Ok(0)
    }

    fn decode_into_window(
        &mut self,
        layer: usize,
        seat: Seat,
        block: i32,
        from: usize,
        to: usize,
    ) -> Result<()> {
        self.decode_block(layer, seat, block, from, to)
    }

    fn copy_block(&mut self, from: i32, to: i32) -> Result<()> {
        self.copy_pages(from, to)
    }

    fn copy_seat(&mut self, from: Seat, to: Seat) -> Result<()> {
        self.copy_rows(from, to)
    }

    fn snapshot(&self, seat: Seat) -> Result<CudaSnapshot> {
        self.read_seat(seat)
    }

    fn restore(&mut self, seat: Seat, snapshot: &CudaSnapshot) -> Result<()> {
        self.write_seat(seat, snapshot)
    }

    fn dequantize(
        &self,
        layer: usize,
        stored: &Stored<'_>,
        k: &mut DeviceTensorMut<'_>,
        v: &mut DeviceTensorMut<'_>,
    ) -> Result<()> {
        self.decode_all(layer, stored, k, v)
    }

    fn read_page(&self, layer: usize, head: usize, block: i32) -> Result<Vec<u8>> {
        self.page_to_host(layer, head, block)
    }

    fn write_page(&mut self, layer: usize, head: usize, block: i32, page: &[u8]) -> Result<()> {
        self.page_from_host(layer, head, block, page)
    }

    fn mean(&self, layer: usize, seat: Seat, head: usize) -> Result<Option<Vec<f16>>> {
        self.mean_to_host(layer, seat, head)
    }

    fn set_mean(&mut self, layer: usize, seat: Seat, head: usize, mean: &[f16]) -> Result<()> {
        self.mean_from_host(layer, seat, head, mean)
    }

    fn read_sinks(&self, seat: Seat) -> Result<Vec<f32>> {
        self.sinks_to_host(seat)
    }

    fn write_sinks(&mut self, seat: Seat, rows: &[f32]) -> Result<()> {
        self.sinks_from_host(seat, rows)
    }
}
