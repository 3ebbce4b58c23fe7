//! A device as the suites need it.

use crate::gpu::{Gpu, Host, Memory};
use crate::host::each;
use crate::machine::{Machine, Params};
use cudarc::driver::CudaSlice;
use qkv::cuda::launch::DeviceAttendParams;
use qkv::cuda::{Cuda, DeviceSliceMut, DeviceTensor, DeviceTensorMut};
use qkv::{CacheConfig, Dtype, KvCache, PagePool, PagedKvCache, Result};

/// A device whose stream is the cache's, too.
pub(crate) struct OnGpu(pub(crate) Gpu);

impl OnGpu {
    pub(crate) fn new() -> Self {
        Self(Gpu::new())
    }
}

/// Parameters whose arrays are on the device.
pub(crate) struct OnDevice {
    params: Params,
    sink_logits: Option<CudaSlice<f32>>,
    bidirectional: Option<CudaSlice<i32>>,
}

impl Machine for OnGpu {
    type B = Cuda;
    /// There is an element where none is needed, since the driver has no empty memory.
    type Input = Memory;
    type Output = (Memory, usize);
    type Held = OnDevice;
    const WINDOWS: &'static [Dtype] = &[Dtype::F16, Dtype::Bf16];
    const QUERIES: &'static [Dtype] = &[Dtype::F16, Dtype::Bf16];
    const ERROR: f64 = 1e-3;
    const LARGEST_GROUP: usize = 256;

    fn paged(&self, config: CacheConfig, blocks: usize) -> Result<PagedKvCache<Cuda>> {
        let pool = PagePool::on_device(&self.0.device, &config, blocks)?;
        PagedKvCache::on_device(&self.0.device, self.0.stream.clone(), config, pool)
    }

    fn contiguous(&self, config: CacheConfig) -> Result<KvCache<Cuda>> {
        KvCache::on_device(&self.0.device, self.0.stream.clone(), config)
    }

    fn attends(dims: (usize, usize)) -> bool {
        dims == (192, 128) || dims.0 == dims.1 && [64, 80, 96, 112, 128, 256].contains(&dims.0)
    }

    fn input(&self, dtype: Dtype, x: &[f32]) -> Memory {
        Host::new(dtype, if x.is_empty() { &[0.0] } else { x }).up(&self.0)
    }

    fn view(input: &Memory, dims: [usize; 3]) -> DeviceTensor<'_> {
        each!(input, Memory, x => DeviceTensor::thd(x, dims)).unwrap()
    }

    fn output(&self, dtype: Dtype, n: usize) -> (Memory, usize) {
        (Host::nan(dtype, n.max(1)).up(&self.0), n)
    }

    fn view_mut(output: &mut (Memory, usize), dims: [usize; 3]) -> DeviceTensorMut<'_> {
        each!(&mut output.0, Memory, x => DeviceTensorMut::thd(x, dims)).unwrap()
    }

    fn lse(output: &mut (Memory, usize)) -> DeviceSliceMut<'_, f32> {
        match output {
            // SAFETY: a part of a live allocation, borrowed mutably.
            (Memory::F32(x), n) => unsafe { DeviceSliceMut::from_raw(DeviceSliceMut::from(x).address(), *n) },
            _ => panic!("the LSE is f32"),
        }
    }

    fn read(&self, output: (Memory, usize)) -> Vec<f32> {
        let mut x = output.0.down(&self.0).f32();
        x.truncate(output.1);
        x
    }

    fn hold(&self, params: &Params) -> OnDevice {
        let ranges: Vec<i32> = params.bidirectional.iter().flat_map(|r| [r.0 as i32, r.1 as i32]).collect();
        OnDevice {
            params: params.clone(),
            sink_logits: params.sink_logits.as_ref().map(|s| self.0.up(s)),
            bidirectional: (!ranges.is_empty()).then(|| self.0.up(&ranges)),
        }
    }

    fn params(held: &OnDevice) -> DeviceAttendParams<'_> {
        let mut params = DeviceAttendParams::new();
        (params.scale, params.softcap) = (held.params.scale, held.params.softcap);
        params.sink_logits = held.sink_logits.as_ref().map(Into::into);
        params.bidirectional = held.bidirectional.as_ref().map(Into::into);
        params
    }
}
