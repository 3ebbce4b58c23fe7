//! A device as the suites need it.

use crate::gpu::Gpu;
use crate::machine::Machine;
use cudarc::driver::CudaSlice;
use qkv::cuda::launch::DeviceAttendParams;
use qkv::cuda::{Cuda, DeviceTensor, DeviceTensorMut};
use qkv::{CacheConfig, Dtype, KvCache, PagePool, PagedKvCache, Result};

/// A device whose stream is the cache's, too.
pub(crate) struct OnGpu(pub(crate) Gpu);

impl OnGpu {
    pub(crate) fn new() -> Self {
        Self(Gpu::new())
    }
}

impl Machine for OnGpu {
    type B = Cuda;
    type Input = CudaSlice<f32>;
    type Output = CudaSlice<f32>;
    const ATTENDS: bool = false;
    const WINDOWS: &'static [Dtype] = &[Dtype::F16, Dtype::Bf16];

    fn paged(&self, config: CacheConfig, blocks: usize) -> Result<PagedKvCache<Cuda>> {
        let pool = PagePool::on_device(&self.0.device, &config, blocks)?;
        PagedKvCache::on_device(&self.0.device, self.0.stream.clone(), config, pool)
    }

    fn contiguous(&self, config: CacheConfig) -> Result<KvCache<Cuda>> {
        KvCache::on_device(&self.0.device, self.0.stream.clone(), config)
    }

    fn input(&self, x: &[f32]) -> CudaSlice<f32> {
        if x.is_empty() { self.0.zeros(1) } else { self.0.up(x) }
    }

    fn view(input: &CudaSlice<f32>, dims: [usize; 3]) -> DeviceTensor<'_> {
        DeviceTensor::thd(input, dims).unwrap()
    }

    fn output(&self, n: usize) -> CudaSlice<f32> {
        self.0.up(&vec![f32::NAN; n.max(1)])
    }

    fn view_mut(output: &mut CudaSlice<f32>, dims: [usize; 3]) -> DeviceTensorMut<'_> {
        DeviceTensorMut::thd(output, dims).unwrap()
    }

    fn read(&self, output: CudaSlice<f32>) -> Vec<f32> {
        self.0.down(&output)
    }

    fn params<'a>() -> DeviceAttendParams<'a> {
        DeviceAttendParams::new()
    }
}
