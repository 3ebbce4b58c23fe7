//! Attention on the device: what must not leak, what it costs.

use super::{config, own};
use crate::gpu::{Gpu, Host, Random, contiguous};
use crate::layer::{Layer, Twins};
use cudarc::driver::CudaSlice;
use qkv::cuda::launch::{
    DeviceAttendParams, DeviceBatch, STEP_WORDS, StepMemory, attend, attend_workspace, begin_step,
    page_bytes, read_status,
};
use qkv::{AttendParams, CacheConfig, Dtype, Seat, TensorMut};

/// A cache on the device that is told lengths instead of tokens: its memory holds what the test put there.
pub(super) struct Still {
    pub(super) config: CacheConfig,
    pub(super) layer: Layer,
    pub(super) lengths: CudaSlice<i32>,
    pub(super) status: CudaSlice<u64>,
    pub(super) step: CudaSlice<i32>,
    pub(super) slots: CudaSlice<i64>,
    pub(super) seats: CudaSlice<i32>,
    pub(super) starts: CudaSlice<i32>,
    pub(super) tables: CudaSlice<i32>,
    pub(super) workspace: CudaSlice<f32>,
    blocks: usize,
    sequences: usize,
}

impl Still {
    /// Sequences of `len` tokens, one new; their blocks in an order that is no order.
    pub(super) fn new(gpu: &Gpu, config: CacheConfig, lens: &[usize]) -> Self {
        let blocks = lens.len() * config.max_tokens.div_ceil(64);
        Self::with_blocks(gpu, config, lens, blocks)
    }

    /// The same with so many blocks, which sequences may have in common.
    pub(super) fn with_blocks(gpu: &Gpu, config: CacheConfig, lens: &[usize], blocks: usize) -> Self {
        let n = lens.len();
        let width = config.max_tokens.div_ceil(64);
        let residual = config.residual;
        let pairs: Vec<i32> = lens
            .iter()
            .flat_map(|len| {
                let packed = residual.map_or(*len, |r| len.saturating_sub(r) / 64 * 64);
                [*len as i32, packed as i32]
            })
            .collect();
        let step = (0..).map(|i| 2 * i + 1).find(|s| gcd(*s, blocks) == 1 && *s > 6).unwrap();
        let tables: Vec<i32> = (0..n * width).map(|i| (i * step % blocks) as i32).collect();
        let layer = Twins::new(gpu, config.clone(), blocks).layer;
        Self {
            layer,
            lengths: gpu.up(&pairs),
            status: gpu.zeros(4),
            step: gpu.zeros(STEP_WORDS * n),
            slots: gpu.zeros(n),
            seats: gpu.up(&(0..n as i32).collect::<Vec<_>>()),
            starts: gpu.up(&(0..=n as i32).collect::<Vec<_>>()),
            tables: gpu.up(&tables),
            workspace: gpu.zeros(attend_workspace(&gpu.device, &config).unwrap()),
            blocks,
            sequences: n,
            config,
        }
    }

    /// Pages of codes, pairs and scales that are small numbers in every format.
    pub(super) fn filled(mut self, gpu: &Gpu) -> Self {
        let mut random = Random::new(11);
        let n = self.blocks * self.config.block_bytes().unwrap();
        let bytes: Vec<u8> = (0..n).map(|_| random.bits() as u8 & 0x3b).collect();
        self.layer.pages = gpu.up(&bytes);
        self
    }

    /// One step of one token a sequence; counts launches from its attention on.
    pub(super) fn attend(&mut self, gpu: &Gpu, group: usize, q: &[f32]) -> Vec<f32> {
        self.attend_with(gpu, group, q, &DeviceAttendParams::new(), 1)
    }

    pub(super) fn attend_with(
        &mut self,
        gpu: &Gpu,
        group: usize,
        q: &[f32],
        params: &DeviceAttendParams<'_>,
        max_query_len: usize,
    ) -> Vec<f32> {
        let c = self.config.clone();
        let n = self.sequences;
        let q = Host::new(Dtype::F16, q).up(gpu);
        let mut out = gpu.zeros::<f32>(n * c.kv_heads * group * c.value_dim);
        let batch = DeviceBatch::seats((&self.seats).into(), (&self.starts).into(), (&self.tables).into(), n);
        let mut step = StepMemory {
            lengths: (&mut self.lengths).into(),
            step: (&mut self.step).into(),
            slots: (&mut self.slots).into(),
            status: (&mut self.status).into(),
        };
        begin_step(&gpu.device, gpu.raw(), &c, self.blocks, &batch, &mut step).unwrap();
        gpu.stream.synchronize().unwrap();
        if let Some(s) = gpu.simulator {
            s.take_stats();
        }
        let dims = [n, c.kv_heads * group, c.key_dim];
        let out_dims = [n, c.kv_heads * group, c.value_dim];
        attend(
            &gpu.device,
            gpu.raw(),
            &c,
            0,
            &q.view(contiguous(dims)),
            params,
            max_query_len,
            &batch,
            &self.layer.memory(&c),
            &step,
            &mut qkv::cuda::DeviceTensorMut::thd(&mut out, out_dims).unwrap(),
            None,
            (&mut self.workspace).into(),
        )
        .unwrap();
        gpu.down(&out)
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[test]
fn a_page_is_read_once_in_whole_sectors() {
    let gpu = Gpu::new();
    let Some(simulator) = gpu.simulator else { return };
    for (key, value) in own(128) {
        // The integer path where there is one, and the f16 path.
        let affine = key.as_affine().is_some();
        for group in if affine { vec![4, 8, 16] } else { vec![8, 16] } {
            let (heads, n) = (8, 2);
            let base = config(key, value, heads, 128).with_residual(Some(32)).with_sinks(0);
            let len = 4096;
            let c = base.with_capacity(n, len + 64);
            let mut still = Still::new(&gpu, c.clone(), &vec![len + 31; n]);
            still.attend(&gpu, group, &vec![0.5; n * heads * group * 128]);
            let stats = simulator.take_stats();
            let (launch, combine) = (&stats[0], &stats[1]);
            assert!(combine.kernel.contains("combine"), "{}", combine.kernel);
            let tiles = n * heads * len / 64;
            let rows = n * heads * 32 * 2 * 2 * 128;
            let page = page_bytes(&c, 0).unwrap();
            let what = format!("{key:?} {value:?} group {group}: {tiles} tiles");
            // Loads of pages are those of ptx.cuh.
            let sectors = |file: &str| -> usize {
                let of = launch.lines.iter().filter(|l| l.line.contains(file));
                32 * of.map(|l| l.counts.global_sectors).sum::<u64>() as usize
            };
            let traffic = sectors("ptx.cuh");
            assert!(traffic >= tiles * page, "{what}: {traffic} bytes are too few");
            // A lane takes the 32 bytes of its pairs in two halves; the second finds the sector in the first-level cache, but is
            // counted here.
            let layout = qkv::layout::PageLayout::new(&key, &value, 128, 128);
            let mut halves = tiles * (layout.key.pair_bytes + layout.value.pair_bytes);
            // The f16 path looks at the pairs of all groups of a token for the largest step before it takes them in turn.
            if group > 4 && layout.value.pair_count > 64 {
                halves += 2 * tiles * layout.value.pair_bytes;
            }
            let least = tiles * page;
            assert!(
                traffic as f64 <= 1.03 * least as f64 + halves as f64,
                "{what}: {traffic} bytes of pages in sectors, {least} + {halves} would do"
            );
            // Everything else: rows, queries and outputs, and what each block reads to find its work. Partial results stay in
            // the second-level cache; the grid bounds their number.
            let partial = sectors("merge.cuh");
            assert!(partial > 0, "no line of the merge was found");
            let rest = 32 * launch.total.global_sectors as usize - traffic - partial;
            let once = rows + n * heads * group * 128 * (2 + 4);
            let blocks = launch.grid[0] as usize;
            assert!(rest <= 2 * once + blocks * 8192, "{what}: {rest} bytes beside pages, {once} would do");
            // Queries are prepared once a unit; the loop over pages and rows meets none.
            let conflicts: Vec<_> = launch
                .lines
                .iter()
                .filter(|l| l.counts.shared_conflicts > 0 && !l.line.contains("query.cuh"))
                .map(|l| &l.line)
                .collect();
            assert!(conflicts.is_empty(), "{what}: bank conflicts at {conflicts:?}");
        }
    }
}

#[test]
fn queries_that_are_no_numbers_stay_in_their_rows() {
    let gpu = Gpu::new();
    for (key, value) in own(64) {
        for group in [4, 8, 16] {
            let c = config(key, value, 1, 64).with_capacity(2, 512);
            let mut random = Random::new(3);
            let mut q = random.normals(2 * group * 64);
            let new = || Still::new(&gpu, c.clone(), &[300, 200]).filled(&gpu);
            let good = new().attend(&gpu, group, &q);
            assert!(good.iter().all(|x| x.is_finite() && *x != 0.0), "{key:?} {value:?}: {good:?}");
            q[64 + 5] = f32::NAN;
            q[3 * 64] = f32::INFINITY;
            let bad = new().attend(&gpu, group, &q);
            for (row, (x, y)) in bad.chunks(64).zip(good.chunks(64)).enumerate() {
                if row == 1 || row == 3 {
                    assert!(x.iter().all(|x| x.is_nan()), "{key:?} {value:?} row {row}: {x:?}");
                } else {
                    assert_eq!(x, y, "{key:?} {value:?} row {row}");
                }
            }
        }
    }
}

#[test]
fn what_lies_behind_the_length_does_not_leak() {
    let gpu = Gpu::new();
    for (key, value) in own(64) {
        let c = config(key, value, 2, 64).direct().with_capacity(1, 256);
        if c.validate().is_err() {
            continue;
        }
        for group in [2, 8] {
            let mut random = Random::new(1);
            let mut twins = Twins::new(&gpu, c.clone(), 5);
            // NaN as a float of any width, and as a pair.
            twins.layer.pages = gpu.up(&vec![0xffu8; 5 * c.block_bytes().unwrap()]);
            twins.wild = false;
            let seats: Vec<Seat> = vec![twins.cpu.open().unwrap()];
            let heads = 2 * group;
            for count in [77, 1] {
                let q = random.normals(heads * 64);
                let mut compared = false;
                twins.step_with(&gpu, &mut Random::new(9), &seats, &[count], false, |a| {
                    if count > 1 {
                        return;
                    }
                    let q = Host::new(Dtype::F16, &q);
                    let mut out = gpu.zeros::<f32>(heads * 64);
                    let mut workspace = gpu.zeros(attend_workspace(&gpu.device, &c).unwrap());
                    attend(
                        &gpu.device,
                        gpu.raw(),
                        &c,
                        0,
                        &q.up(&gpu).view(contiguous([1, heads, 64])),
                        &DeviceAttendParams::new(),
                        1,
                        a.batch,
                        a.layer,
                        a.step,
                        &mut qkv::cuda::DeviceTensorMut::thd(&mut out, [1, heads, 64]).unwrap(),
                        None,
                        (&mut workspace).into(),
                    )
                    .unwrap();
                    let mut want = vec![0f32; heads * 64];
                    let view = qkv::TensorRef::new(q.data(), contiguous([1, heads, 64])).unwrap();
                    let mut o = TensorMut::thd(&mut want, [1, heads, 64]).unwrap();
                    a.cpu.attend(0, &view, &AttendParams::new(), &mut o, None).unwrap();
                    let got = gpu.down(&out);
                    let near = got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 0.02);
                    assert!(near, "{key:?} {value:?} group {group}: {got:?} {want:?}");
                    compared = true;
                });
                assert_eq!(compared, count == 1);
            }
        }
    }
}

#[test]
fn blocks_outside_the_pool_are_left_out_and_counted() {
    let gpu = Gpu::new();
    let (key, value) = CacheConfig::default_formats(qkv::Bits::B4, 64);
    let c = config(key, value, 2, 64).with_capacity(2, 512);
    let q = vec![0.5; 2 * 2 * 64];
    let mut still = Still::new(&gpu, c.clone(), &[330, 200]);
    let mut tables = gpu.down(&still.tables);
    tables[1] = -1;
    tables[9] = 16;
    still.tables = gpu.up(&tables);
    let out = still.attend(&gpu, 1, &q[..2 * 2 * 64]);
    assert!(out.iter().all(|x| x.is_finite()));
    let status = read_status(gpu.down(&still.status).try_into().unwrap());
    // Once a kv head.
    assert_eq!(status.missing_blocks, 4);
}

#[test]
fn equal_steps_have_equal_bits() {
    let gpu = Gpu::new();
    let (key, value) = CacheConfig::default_formats(qkv::Bits::B4, 128);
    let c = config(key, value, 2, 128).with_capacity(2, 1024);
    let q = Random::new(2).normals(2 * 2 * 4 * 128);
    let run = || Still::new(&gpu, c.clone(), &[900, 130]).filled(&gpu).attend(&gpu, 4, &q);
    let first = run();
    assert!(first.iter().all(|x| x.is_finite() && *x != 0.0), "{first:?}");
    assert_eq!(first, run());
}
