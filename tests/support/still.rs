//! A cache on the device for what does not depend on the tokens in it.

use crate::gpu::{Gpu, Host, Random, contiguous};
use crate::layer::Layer;
use cudarc::driver::CudaSlice;
use qkv::cuda::launch::{
    DeviceAttendParams, DeviceBatch, STEP_WORDS, StepMemory, attend, attend_workspace, begin_step,
};
use qkv::cuda::{DeviceSliceMut, DeviceTensor, DeviceTensorMut};
use qkv::{CacheConfig, Dtype};

/// A cache on the device that is told lengths instead of tokens: its memory holds what the test put there.
pub(crate) struct Still {
    pub(crate) config: CacheConfig,
    pub(crate) layer: Layer,
    pub(crate) lengths: CudaSlice<i32>,
    pub(crate) status: CudaSlice<u64>,
    pub(crate) step: CudaSlice<i32>,
    pub(crate) slots: CudaSlice<i64>,
    pub(crate) seats: CudaSlice<i32>,
    pub(crate) starts: CudaSlice<i32>,
    pub(crate) tables: CudaSlice<i32>,
    pub(crate) workspace: CudaSlice<f32>,
    /// Pages of a split, where splits are fixed.
    pub(crate) split: Option<usize>,
    /// What launches are told; sequences have one new token.
    pub(crate) max_query_len: usize,
    blocks: usize,
    sequences: usize,
}

impl Still {
    /// Sequences of `len` tokens, one new; their blocks in an order that is no order.
    pub(crate) fn new(gpu: &Gpu, config: CacheConfig, lens: &[usize]) -> Self {
        let blocks = lens.len() * config.max_tokens.div_ceil(64);
        Self::with_blocks(gpu, config, lens, blocks)
    }

    /// The same with so many blocks, which sequences may have in common.
    pub(crate) fn with_blocks(gpu: &Gpu, config: CacheConfig, lens: &[usize], blocks: usize) -> Self {
        let n = lens.len();
        let residual = config.residual;
        let pairs: Vec<i32> = lens
            .iter()
            .flat_map(|len| {
                let packed = residual.map_or(*len, |r| len.saturating_sub(r) / 64 * 64);
                [*len as i32, packed as i32]
            })
            .collect();
        Self {
            layer: Layer::new(gpu, &config, blocks),
            lengths: gpu.up(&pairs),
            status: gpu.zeros(4),
            step: gpu.zeros(STEP_WORDS * n),
            slots: gpu.zeros(n),
            seats: gpu.up(&(0..n as i32).collect::<Vec<_>>()),
            starts: gpu.up(&(0..=n as i32).collect::<Vec<_>>()),
            tables: tables(gpu, &config, n, blocks, 0),
            workspace: gpu.zeros(attend_workspace(&gpu.device, &config).unwrap()),
            split: None,
            max_query_len: 1,
            blocks,
            sequences: n,
            config,
        }
    }

    /// Pages of codes, pairs and scales that are small numbers in every format.
    pub(crate) fn filled(mut self, gpu: &Gpu) -> Self {
        let n = self.blocks * self.config.block_bytes().unwrap();
        self.layer.pages = gpu.up(&small_bytes(n));
        self
    }

    /// Opens a step of one token a sequence.
    pub(crate) fn begin(&mut self, gpu: &Gpu) {
        let n = self.sequences;
        let batch = DeviceBatch::seats((&self.seats).into(), (&self.starts).into(), (&self.tables).into(), n);
        let mut step = StepMemory {
            lengths: (&mut self.lengths).into(),
            step: (&mut self.step).into(),
            slots: (&mut self.slots).into(),
            status: (&mut self.status).into(),
        };
        begin_step(&gpu.device, gpu.raw(), &self.config, self.blocks, &batch, &mut step).unwrap();
    }

    /// Attention of the open step.
    pub(crate) fn launch(
        &mut self,
        gpu: &Gpu,
        q: &DeviceTensor<'_>,
        out: &mut DeviceTensorMut<'_>,
        lse: Option<DeviceSliceMut<'_, f32>>,
    ) {
        let n = self.sequences;
        let batch = DeviceBatch::seats((&self.seats).into(), (&self.starts).into(), (&self.tables).into(), n);
        let step = StepMemory {
            lengths: (&mut self.lengths).into(),
            step: (&mut self.step).into(),
            slots: (&mut self.slots).into(),
            status: (&mut self.status).into(),
        };
        let mut params = DeviceAttendParams::new();
        params.fixed_split = self.split;
        attend(
            &gpu.device,
            gpu.raw(),
            &self.config,
            0,
            q,
            &params,
            self.max_query_len,
            &batch,
            &self.layer.memory(&self.config),
            &step,
            out,
            lse,
            (&mut self.workspace).into(),
        )
        .unwrap();
    }

    /// One step of one token a sequence; counts launches from its attention on.
    pub(crate) fn attend(&mut self, gpu: &Gpu, group: usize, q: &[f32]) -> Vec<f32> {
        let (c, n) = (&self.config, self.sequences);
        let (heads, dims) = (c.kv_heads * group, [c.key_dim, c.value_dim]);
        let q = Host::new(Dtype::F16, q).up(gpu);
        let mut out = gpu.zeros::<f32>(n * heads * dims[1]);
        self.begin(gpu);
        gpu.stream.synchronize().unwrap();
        if let Some(s) = gpu.simulator {
            s.take_stats();
        }
        let mut to = DeviceTensorMut::thd(&mut out, [n, heads, dims[1]]).unwrap();
        self.launch(gpu, &q.view(contiguous([n, heads, dims[0]])), &mut to, None);
        gpu.down(&out)
    }
}

/// Block tables of `sequences` whose blocks are those of the pool in an order that is no order, from number `first` on.
pub(crate) fn tables(
    gpu: &Gpu,
    config: &CacheConfig,
    sequences: usize,
    blocks: usize,
    first: usize,
) -> CudaSlice<i32> {
    let n = sequences * config.max_tokens.div_ceil(64);
    let step = (0..).map(|i| 2 * i + 1).find(|s| gcd(*s, blocks) == 1 && *s > 6).unwrap();
    gpu.up(&(first..first + n).map(|i| (i * step % blocks) as i32).collect::<Vec<_>>())
}

/// Codes, pairs and scales that are small numbers in every format.
pub(crate) fn small_bytes(n: usize) -> Vec<u8> {
    let mut random = Random::new(11);
    (0..n).map(|_| random.bits() as u8 & 0x3b).collect()
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
