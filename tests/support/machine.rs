//! What a test needs of a backend, so that one source runs on all of them.

use qkv::backend::Backend;
use qkv::{
    AttendParams, CacheConfig, Cpu, Dtype, KvCache, PagePool, PagedKvCache, Result, TensorMut, TensorRef,
};

/// A backend with its memory for inputs and outputs.
pub(crate) trait Machine {
    type B: Backend;
    /// f32 elements that a cache reads.
    type Input;
    /// f32 elements that a cache writes.
    type Output;
    /// Whether `attend` and `prefill` are there.
    const ATTENDS: bool;
    /// Dtypes of a window.
    const WINDOWS: &'static [Dtype];

    fn paged(&self, config: CacheConfig, blocks: usize) -> Result<PagedKvCache<Self::B>>;
    fn contiguous(&self, config: CacheConfig) -> Result<KvCache<Self::B>>;
    fn input(&self, x: &[f32]) -> Self::Input;
    fn view(input: &Self::Input, dims: [usize; 3]) -> <Self::B as Backend>::Tensor<'_>;
    /// Elements that are NaN until they are written.
    fn output(&self, n: usize) -> Self::Output;
    fn view_mut(output: &mut Self::Output, dims: [usize; 3]) -> <Self::B as Backend>::Output<'_>;
    fn read(&self, output: Self::Output) -> Vec<f32>;
    fn params<'a>() -> <Self::B as Backend>::Params<'a>;
}

/// The CPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Host;

impl Machine for Host {
    type B = Cpu;
    type Input = Vec<f32>;
    type Output = Vec<f32>;
    const ATTENDS: bool = true;
    const WINDOWS: &'static [Dtype] = &[Dtype::F16, Dtype::Bf16, Dtype::F32];

    fn paged(&self, config: CacheConfig, blocks: usize) -> Result<PagedKvCache> {
        let pool = PagePool::new(&config, blocks)?;
        PagedKvCache::new(config, pool)
    }

    fn contiguous(&self, config: CacheConfig) -> Result<KvCache> {
        KvCache::new(config)
    }

    fn input(&self, x: &[f32]) -> Vec<f32> {
        x.to_vec()
    }

    fn view(input: &Vec<f32>, dims: [usize; 3]) -> TensorRef<'_> {
        TensorRef::thd(input, dims).unwrap()
    }

    fn output(&self, n: usize) -> Vec<f32> {
        vec![f32::NAN; n]
    }

    fn view_mut(output: &mut Vec<f32>, dims: [usize; 3]) -> TensorMut<'_> {
        TensorMut::thd(output, dims).unwrap()
    }

    fn read(&self, output: Vec<f32>) -> Vec<f32> {
        output
    }

    fn params<'a>() -> AttendParams<'a> {
        AttendParams::new()
    }
}
