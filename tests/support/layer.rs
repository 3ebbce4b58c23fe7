//! One layer through the launch functions beside a cache on the CPU that is told the same: what one holds the other must
//! hold, bit by bit.

use crate::gpu::{Gpu, Host, Memory, Random, layout};
use cudarc::driver::CudaSlice;
use half::{bf16, f16};
use qkv::cuda::launch::{
    DeviceBatch, LayerMemory, STATUS_WORDS, STEP_WORDS, StepMemory, append, begin_step, read_status,
};
use qkv::cuda::{CacheStatus, DeviceSlice, DeviceSliceMut};
use qkv::layout::{Order, PageLayout, convert_page};
use qkv::{Batch, CacheConfig, Dtype, Format, PagePool, PagedKvCache, Seat, Shape, TensorMut, TensorRef};

/// One layer's memory on the device.
pub(crate) struct Layer {
    pub(crate) pages: CudaSlice<u8>,
    pub(crate) window: [CudaSlice<u16>; 2],
    pub(crate) sinks: [CudaSlice<u16>; 2],
    pub(crate) means: CudaSlice<u16>,
    scales: [CudaSlice<f32>; 2],
}

/// A cache of one layer on the device beside one on the CPU that is told the same.
pub(crate) struct Twins {
    pub(crate) config: CacheConfig,
    pub(crate) cpu: PagedKvCache,
    pub(crate) layer: Layer,
    pub(crate) lengths: CudaSlice<i32>,
    pub(crate) status: CudaSlice<u64>,
    pub(crate) blocks: usize,
    /// First real row of each sequence in the last step.
    pub(crate) last_rows: Vec<usize>,
    /// Whether inputs may have NaN, infinity and huge values.
    pub(crate) wild: bool,
    /// Size of keys and values.
    pub(crate) magnitude: [f32; 2],
    /// Whether values are of one size, so that steps of all tokens are the same.
    pub(crate) signs: bool,
    /// What the first channel of values is.
    pub(crate) outlier: Option<f32>,
    /// Channel 5 of the keys in rows 64 to 127 of each step is so far below 0, or a little more.
    pub(crate) huge: Option<f32>,
    /// Channel of the values that is no number, in all heads: of a row of each step, or of all rows.
    pub(crate) hole: Option<(Option<usize>, usize)>,
}

/// A step whose layer has appended on both sides.
pub(crate) struct Appended<'a> {
    pub(crate) cpu: &'a mut PagedKvCache,
    pub(crate) batch: &'a DeviceBatch<'a>,
    pub(crate) layer: &'a LayerMemory<'a>,
    pub(crate) step: &'a StepMemory<'a>,
    pub(crate) rows: usize,
}

fn empty<T>(x: &CudaSlice<T>, n: usize) -> DeviceSlice<'_, T> {
    // SAFETY: a part of a live allocation.
    unsafe { DeviceSlice::from_raw(DeviceSlice::from(x).address(), n) }
}

fn lent<T>(x: &mut CudaSlice<T>, n: usize) -> DeviceSliceMut<'_, T> {
    // SAFETY: a part of a live allocation, borrowed mutably.
    unsafe { DeviceSliceMut::from_raw(DeviceSlice::from(&*x).address(), n) }
}

impl Twins {
    pub(crate) fn new(gpu: &Gpu, config: CacheConfig, blocks: usize) -> Self {
        let pool = PagePool::new(&config, blocks).unwrap();
        Self::with_pool(gpu, config, blocks, pool)
    }

    pub(crate) fn with_pool(gpu: &Gpu, config: CacheConfig, blocks: usize, pool: PagePool) -> Self {
        let cpu = PagedKvCache::new(config.clone(), pool).unwrap();
        let layer = Layer::new(gpu, &config, blocks);
        let (lengths, status) = (gpu.zeros(2 * config.max_sequences), gpu.zeros(STATUS_WORDS));
        Self {
            config,
            cpu,
            layer,
            lengths,
            status,
            blocks,
            last_rows: Vec::new(),
            wild: true,
            magnitude: [1.0; 2],
            signs: false,
            outlier: None,
            huge: None,
            hole: None,
        }
    }

    /// One step on both sides. `counts` are rows of each seat, `padding` how many of them stand before and behind as padding.
    pub(crate) fn step(
        &mut self,
        gpu: &Gpu,
        random: &mut Random,
        seats: &[Seat],
        counts: &[usize],
        pad: bool,
    ) {
        self.step_with(gpu, random, seats, counts, pad, |_| ());
    }

    /// The same, with a look at the step when the layer has appended.
    pub(crate) fn step_with(
        &mut self,
        gpu: &Gpu,
        random: &mut Random,
        seats: &[Seat],
        counts: &[usize],
        pad: bool,
        then: impl FnOnce(Appended<'_>),
    ) {
        let c = self.config.clone();
        let (mut start, mut slots) = (vec![0i32], Vec::new());
        let mut first_rows = Vec::new();
        for (seat, n) in seats.iter().zip(counts) {
            let (front, back) = if pad { (random.below(3), random.below(3)) } else { (0, 0) };
            slots.extend(std::iter::repeat_n(-1i64, front));
            first_rows.push(slots.len());
            slots.extend(std::iter::repeat_n(5i64, *n));
            slots.extend(std::iter::repeat_n(-1i64, back));
            start.push(slots.len() as i32);
            self.cpu.reserve(*seat, *n).unwrap();
        }
        let rows = slots.len();
        self.last_rows = first_rows;
        if rows == 0 {
            return;
        }
        let mut batch = Batch::new(seats, &start);
        if pad {
            batch = batch.with_slot_mapping(&slots);
        }
        self.cpu.begin_step(&batch).unwrap();

        let dtype = random.pick(&[Dtype::F16, Dtype::Bf16, Dtype::F32]);
        let inputs: Vec<(Host, Shape)> = [c.key_dim, c.value_dim]
            .iter()
            .enumerate()
            .map(|(i, d)| {
                let (shape, n) = layout(random, [rows, c.kv_heads, *d]);
                let wild = random.below(4) == 0 && self.wild;
                let mut x: Vec<f32> = (0..n)
                    .map(|_| match random.below(600) {
                        0 if wild => random.pick(&[f32::NAN, f32::INFINITY, 1e30, -7e4, 0.0, -0.0, 1e-7]),
                        _ if i == 1 && self.signs => self.magnitude[i].copysign(random.normal()),
                        _ => random.normal() * self.magnitude[i],
                    })
                    .collect();
                if let (1, Some(outlier)) = (i, self.outlier) {
                    for (row, head) in (0..rows).flat_map(|row| (0..c.kv_heads).map(move |h| (row, h))) {
                        x[crate::gpu::row(&shape, row, head)] = outlier;
                    }
                }
                if let (0, Some(huge)) = (i, self.huge) {
                    for (row, head) in (64..rows.min(128)).flat_map(|r| (0..c.kv_heads).map(move |h| (r, h)))
                    {
                        let at = crate::gpu::row(&shape, row, head) + 5 * shape.strides[3];
                        x[at] = -huge * (1.0 + 0.25 * (x[at] / self.magnitude[0]).abs());
                    }
                }
                if let (1, Some((row, channel))) = (i, self.hole) {
                    for row in (0..rows).filter(|r| row.is_none_or(|row| row == *r)) {
                        for head in 0..c.kv_heads {
                            x[crate::gpu::row(&shape, row, head) + channel * shape.strides[3]] = f32::NAN;
                        }
                    }
                }
                (Host::new(dtype, &x), shape)
            })
            .collect();
        let view = |i: usize| TensorRef::new(inputs[i].0.data(), inputs[i].1).unwrap();
        self.cpu.append(0, &view(0), &view(1)).unwrap();

        let ids: Vec<i32> = seats.iter().map(|s| s.index() as i32).collect();
        let tables: Vec<i32> =
            seats.iter().flat_map(|s| self.cpu.block_table(*s).unwrap().to_vec()).collect();
        let (ids, start, tables) = (gpu.up(&ids), gpu.up(&start), gpu.up(&tables));
        let mapping = gpu.up(&slots);
        let mut device = DeviceBatch::seats((&ids).into(), (&start).into(), (&tables).into(), rows);
        if pad {
            device = device.with_padding((&mapping).into());
        }
        let (mut step, mut slot_memory) =
            (gpu.zeros::<i32>(STEP_WORDS * seats.len()), gpu.zeros::<i64>(rows.max(1)));
        let memory: Vec<Memory> = inputs.iter().map(|x| x.0.up(gpu)).collect();
        let (k, v) = (memory[0].view(inputs[0].1), memory[1].view(inputs[1].1));
        let mut s = StepMemory {
            lengths: (&mut self.lengths).into(),
            step: (&mut step).into(),
            slots: (&mut slot_memory).into(),
            status: (&mut self.status).into(),
        };
        begin_step(&gpu.device, gpu.raw(), &c, self.blocks, &device, &mut s).unwrap();
        let mut l = self.layer.memory(&c);
        append(&gpu.device, gpu.raw(), &c, 0, &k, &v, &device, &mut l, &mut s).unwrap();
        then(Appended { cpu: &mut self.cpu, batch: &device, layer: &l, step: &s, rows });
        gpu.stream.synchronize().unwrap();
    }

    /// Everything that the device holds is what the CPU holds. Returns how many pages there are.
    pub(crate) fn compare(&self, gpu: &Gpu, seats: &[Seat], what: &str) -> usize {
        let mut pages_compared = 0;
        let (c, l) = (&self.config, &self.config.layers[0]);
        let pages = PageLayout::new(&l.key, &l.value, c.key_dim, c.value_dim);
        let lengths = gpu.down(&self.lengths);
        let device_pages = gpu.down(&self.layer.pages);
        let means = gpu.down(&self.layer.means);
        for seat in seats {
            let (len, packed) = (self.cpu.len(*seat).unwrap(), self.cpu.packed_len(*seat).unwrap());
            assert_eq!(lengths[2 * seat.index()..][..2], [len as i32, packed as i32], "{what}");
            let table = self.cpu.block_table(*seat).unwrap();
            for (tile, block) in table.iter().enumerate().take(packed / 64) {
                for head in 0..c.kv_heads {
                    let exported = self.cpu.export_page(*seat, 0, head, tile).unwrap();
                    let payload = &exported[exported.len() - pages.page_bytes..];
                    let mut want = vec![0u8; pages.page_bytes];
                    convert_page(&l.key, &l.value, &pages, Order::Row, payload, Order::Fragment, &mut want)
                        .unwrap();
                    let at = (*block as usize * c.kv_heads + head) * pages.page_bytes;
                    let got = &device_pages[at..at + pages.page_bytes];
                    let different = got.iter().zip(&want).position(|(a, b)| a != b);
                    pages_compared += 1;
                    assert_eq!(different, None, "{what}: byte of {pages:?}, tile {tile} head {head}");
                    if l.key.centered() {
                        let mean = &exported[64..64 + 2 * c.key_dim];
                        let at = (seat.index() * c.kv_heads + head) * c.key_dim;
                        let got: Vec<u8> =
                            means[at..at + c.key_dim].iter().flat_map(|m| m.to_le_bytes()).collect();
                        assert_eq!(got, mean, "{what}: mean");
                    }
                }
            }
            if c.residual.is_some() {
                self.compare_exact(gpu, *seat, (len, packed), what);
            }
        }
        let words: [u64; STATUS_WORDS] = gpu.down(&self.status).try_into().unwrap();
        let mut want = CacheStatus::default();
        want.clamped_values = self.cpu.stats().clamped_values;
        assert_eq!(read_status(words), want, "{what}");
        pages_compared
    }

    fn compare_exact(&self, gpu: &Gpu, seat: Seat, (len, packed): (usize, usize), what: &str) {
        let c = &self.config;
        if len == 0 {
            return;
        }
        let dims = [c.key_dim, c.value_dim];
        let mut host = dims.map(|d| vec![0f32; len * c.kv_heads * d]);
        let [k, v] = &mut host;
        let mut k = TensorMut::thd(k, [len, c.kv_heads, dims[0]]).unwrap();
        let mut v = TensorMut::thd(v, [len, c.kv_heads, dims[1]]).unwrap();
        self.cpu.dequantize(0, seat, &mut k, &mut v).unwrap();
        for op in 0..2 {
            let (window, sinks) = (gpu.down(&self.layer.window[op]), gpu.down(&self.layer.sinks[op]));
            let d = dims[op];
            for t in (0..c.sinks.min(len)).chain(packed.max(c.sinks)..len) {
                for head in 0..c.kv_heads {
                    let (rows, row, from) = if t < c.sinks {
                        (c.sinks, t, &sinks)
                    } else {
                        (c.window_rows(), t % c.window_rows(), &window)
                    };
                    let at = ((seat.index() * c.kv_heads + head) * rows + row) * d;
                    let want = &host[op][(t * c.kv_heads + head) * d..][..d];
                    for (bits, want) in from[at..at + d].iter().zip(want) {
                        let got = match c.window_dtype {
                            Dtype::Bf16 => bf16::from_bits(*bits).to_f32(),
                            _ => f16::from_bits(*bits).to_f32(),
                        };
                        let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
                        assert!(same, "{what}: operand {op} token {t} head {head}: {got} {want}");
                    }
                }
            }
        }
    }
}

impl Layer {
    /// All zeros, for the first layer of a configuration.
    pub(crate) fn new(gpu: &Gpu, c: &CacheConfig, blocks: usize) -> Self {
        let l = &c.layers[0];
        let (seats, rows) = (c.max_sequences * c.kv_heads, c.window_rows());
        let zeros = |n: usize| gpu.zeros::<u16>(n.max(1));
        let scales = |f: &Format, value: bool| {
            let of = |h| c.scales.as_ref().and_then(|s| if value { s.value(0, h) } else { s.key(0, h) });
            gpu.up(&(0..c.kv_heads)
                .map(|h| if f.needs_scale() { of(h).unwrap() } else { 1.0 })
                .collect::<Vec<_>>())
        };
        Self {
            pages: gpu.zeros(blocks * c.block_bytes().unwrap()),
            window: [zeros(seats * rows * c.key_dim), zeros(seats * rows * c.value_dim)],
            sinks: [zeros(seats * c.sinks * c.key_dim), zeros(seats * c.sinks * c.value_dim)],
            means: zeros(seats * c.key_dim),
            scales: [scales(&l.key, false), scales(&l.value, true)],
        }
    }

    pub(crate) fn memory(&mut self, c: &CacheConfig) -> LayerMemory<'_> {
        let l = &c.layers[0];
        let (seats, rows) = (c.max_sequences * c.kv_heads, c.window_rows());
        let [kw, vw] = &mut self.window;
        let [ks, vs] = &mut self.sinks;
        LayerMemory {
            pages: (&mut self.pages).into(),
            key_window: lent(kw, seats * rows * c.key_dim),
            value_window: lent(vw, seats * rows * c.value_dim),
            key_sinks: lent(ks, seats * c.sinks * c.key_dim),
            value_sinks: lent(vs, seats * c.sinks * c.value_dim),
            means: lent(&mut self.means, if l.key.centered() { seats * c.key_dim } else { 0 }),
            key_scales: empty(&self.scales[0], if l.key.needs_scale() { c.kv_heads } else { 0 }),
            value_scales: empty(&self.scales[1], if l.value.needs_scale() { c.kv_heads } else { 0 }),
        }
    }
}
