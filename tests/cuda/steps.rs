//! Steps on the device: captured graphs, what a step refuses, steps of slots, and counted bytes.

use crate::gpu::{Gpu, Host, Random};
use crate::layer::Twins;
use cudarc::driver::{CudaSlice, sys};
use qkv::cuda::launch::{
    DeviceBatch, STATUS_WORDS, STEP_WORDS, StepMemory, append, begin_step, page_bytes, read_status,
};
use qkv::cuda::{DeviceSlice, DeviceSliceMut, DeviceTensor, launch};
use qkv::layout::{Order, PageLayout, convert_page};
use qkv::{Affine, Bits, CacheConfig, Dtype, Error, Fp8, Granularity, PagePool, TensorRef, cache::SlotBatch};

/// Device memory of a step.
struct Buffers {
    step: CudaSlice<i32>,
    slots: CudaSlice<i64>,
}

impl Buffers {
    fn new(gpu: &Gpu, sequences: usize, rows: usize) -> Self {
        Self { step: gpu.zeros(STEP_WORDS * sequences), slots: gpu.zeros(rows.max(1)) }
    }

    fn memory<'a>(&'a mut self, twins: (&'a mut CudaSlice<i32>, &'a mut CudaSlice<u64>)) -> StepMemory<'a> {
        StepMemory {
            lengths: twins.0.into(),
            step: (&mut self.step).into(),
            slots: (&mut self.slots).into(),
            status: twins.1.into(),
        }
    }
}

fn four_bits(heads: usize, d: usize, sequences: usize) -> CacheConfig {
    CacheConfig::new(1, heads, d).with_bits(Bits::B4).with_residual(Some(32)).with_capacity(sequences, 512)
}

#[test]
fn a_captured_step_replayed_is_the_step_run_again() {
    const STEPS: usize = 200;
    let gpu = Gpu::new();
    // Modules are loaded before the capture.
    gpu.device.load_all().unwrap();
    let config = four_bits(2, 64, 2);
    let mut random = Random::new(5);
    let x = Host::new(Dtype::F16, &random.normals(2 * 2 * 64)).up(&gpu);
    let shape = qkv::Shape { dims: [2, 2, 64], batch_tokens: 2, strides: [256, 128, 64, 1] };
    let mut results = Vec::new();
    for captured in [false, true] {
        let mut twins = Twins::new(&gpu, config.clone(), 16);
        let (ids, start) = (gpu.up(&[0i32, 1]), gpu.up(&[0i32, 1, 2]));
        let width = 8;
        let mut table = vec![-1i32; 2 * width];
        let mut tables = gpu.up(&table);
        let mut buffers = Buffers::new(&gpu, 2, 2);
        let mut run = |twins: &mut Twins, tables: &CudaSlice<i32>| {
            let batch = DeviceBatch::seats((&ids).into(), (&start).into(), tables.into(), 2);
            let mut s = buffers.memory((&mut twins.lengths, &mut twins.status));
            begin_step(&gpu.device, gpu.raw(), &config, 16, &batch, &mut s).unwrap();
            let mut l = twins.layer.memory(&config);
            let v = x.view(shape);
            append(&gpu.device, gpu.raw(), &config, 0, &v, &v, &batch, &mut l, &mut s).unwrap();
        };
        let graph = captured.then(|| {
            let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            gpu.stream.begin_capture(mode).unwrap();
            run(&mut twins, &tables);
            let flags = sys::CUgraphInstantiate_flags(0);
            gpu.stream.end_capture(flags).unwrap().expect("a graph")
        });
        for step in 1..=STEPS {
            // The host puts a block in before the step in which a tile closes.
            if step % 64 == 32 && step > 64 {
                let tile = step / 64 - 1;
                for (i, t) in table.chunks_exact_mut(width).enumerate() {
                    t[tile] = (2 * tile + i) as i32;
                }
                gpu.stream.memcpy_htod(&table, &mut tables).unwrap();
            }
            match &graph {
                Some(g) => g.launch().unwrap(),
                None => run(&mut twins, &tables),
            }
        }
        let [k, v] = &twins.layer.window;
        results.push((
            gpu.down(&twins.lengths),
            gpu.down(&twins.status),
            gpu.down(&twins.layer.pages),
            gpu.down(k),
            gpu.down(v),
        ));
    }
    assert_eq!(results[0].0, [200, 128, 200, 128]);
    assert!(results[0] == results[1]);
    assert_eq!(results[0].1, [0; STATUS_WORDS]);
    assert!(results[0].2.iter().any(|b| *b != 0));
}

#[test]
fn a_sequence_without_a_block_or_room_stays_as_it_is() {
    let gpu = Gpu::new();
    let config = four_bits(1, 64, 3).with_capacity(3, 128);
    let mut random = Random::new(6);
    let mut twins = Twins::new(&gpu, config.clone(), 4);
    let x = Host::new(Dtype::F16, &random.normals(300 * 64)).up(&gpu);
    let step = |twins: &mut Twins, seats: &[i32], start: &[i32], table: &[i32]| {
        let rows = *start.last().unwrap() as usize;
        let (ids, start, tables) = (gpu.up(seats), gpu.up(start), gpu.up(table));
        let mut buffers = Buffers::new(&gpu, seats.len(), rows);
        let batch = DeviceBatch::seats((&ids).into(), (&start).into(), (&tables).into(), rows);
        let mut s = buffers.memory((&mut twins.lengths, &mut twins.status));
        begin_step(&gpu.device, gpu.raw(), &config, 4, &batch, &mut s).unwrap();
        let shape = qkv::Shape { dims: [rows, 1, 64], batch_tokens: rows, strides: [0, 64, 64, 1] };
        let (mut l, v) = (twins.layer.memory(&config), x.view(shape));
        append(&gpu.device, gpu.raw(), &config, 0, &v, &v, &batch, &mut l, &mut s).unwrap();
        gpu.stream.synchronize().unwrap();
        read_status(gpu.down(&twins.status).try_into().unwrap())
    };
    let none = [-1, -1];
    let status = step(&mut twins, &[0, 1], &[0, 90, 140], &[none, none].concat());
    assert_eq!(gpu.down(&twins.lengths), [90, 0, 50, 0, 0, 0]);
    assert_eq!(status, Default::default());
    let window = gpu.down(&twins.layer.window[0]);
    // Seat 0 would close a tile at 96 tokens: no block, then one beyond the pool. Seat 1 goes on.
    for (block, misses) in [(-1, 1), (4, 2)] {
        let status = step(&mut twins, &[0, 1], &[0, 10, 11], &[[block, -1], none].concat());
        assert_eq!(status.missing_blocks, misses);
        assert_eq!(gpu.down(&twins.lengths), [90, 0, 50 + misses as i32, 0, 0, 0]);
    }
    let own = 96 * 64;
    assert!(gpu.down(&twins.layer.window[0])[..own] == window[..own]);
    // More than 128 tokens, a seat that does not exist, rows that run backwards.
    let status = step(&mut twins, &[0, 7, 2], &[0, 100, 101, 101], &[[0, 1], none, none].concat());
    assert_eq!((status.over_capacity, status.bad_seats), (1, 1));
    let status = step(&mut twins, &[0, 2], &[0, -3, 2], &[[0, 1], none].concat());
    assert_eq!(status.bad_rows, 2);
    assert_eq!(gpu.down(&twins.lengths), [90, 0, 52, 0, 0, 0]);
    assert!(status.since(&Default::default()).unwrap_err().to_string().contains("block table"));
    // With a block it closes.
    let status = step(&mut twins, &[0], &[0, 10], &[0, -1]);
    assert_eq!((gpu.down(&twins.lengths), status.missing_blocks), (vec![100, 64, 52, 0, 0, 0], 2));
}

#[test]
fn steps_of_slots_write_where_the_engine_says() {
    let gpu = Gpu::new();
    let formats: [(qkv::Format, qkv::Format); 4] = [
        (Affine::per_token(Bits::B8, 64).into(), Affine::per_token(Bits::B8, 64).into()),
        (Affine::per_token(Bits::B4, 32).into(), Affine::per_token(Bits::B3, 64).into()),
        (Affine::per_token(Bits::B3, 32).into(), Affine::per_token(Bits::B1, 32).into()),
        (Fp8::e4m3(Granularity::TokenHead).into(), Affine::per_token(Bits::B2, 32).into()),
    ];
    for (seed, (key, value)) in formats.into_iter().enumerate() {
        let mut random = Random::new(seed as u64);
        let config = CacheConfig::new(1, 2, 64)
            .with_key(key)
            .with_value(value)
            .with_dims(64, 80)
            .with_capacity(2, 256)
            .direct();
        // The CPU's pages lie in memory of the test, which looks at them when the cache is gone.
        let block_bytes = config.block_bytes().unwrap();
        let mut memory = vec![0u128; 8 * block_bytes / 16];
        // SAFETY: aligned, initialised, and read only after the pool was dropped.
        let pool =
            unsafe { PagePool::from_raw(&config, memory.as_mut_ptr().cast(), 8 * block_bytes) }.unwrap();
        let mut twins = Twins::with_pool(&gpu, config.clone(), 8, pool);
        // Two sequences in scattered blocks.
        let tables = [[5i32, 0, 3, 1], [2, 7, 4, 6]];
        for b in 0..8 {
            assert_eq!(twins.cpu.allocate_block().unwrap(), b);
        }
        let mut lens = [0usize; 2];
        for counts in [[3, 70], [1, 1], [60, 57]] {
            let (mut start, mut slots) = (vec![0i32], Vec::new());
            for i in 0..2 {
                slots.push(-1i64);
                for t in lens[i]..lens[i] + counts[i] {
                    slots.push(tables[i][t / 64] as i64 * 64 + (t % 64) as i64);
                }
                lens[i] += counts[i];
                start.push(slots.len() as i32);
            }
            let context: Vec<i32> = lens.iter().map(|l| *l as i32).collect();
            let flat = tables.concat();
            let rows = slots.len();
            let (k, v) = (random.normals(rows * 2 * 64), random.normals(rows * 2 * 80));
            twins.cpu.begin_slots(&SlotBatch::new(&start, &context, &flat, &slots)).unwrap();
            let views =
                (TensorRef::thd(&k, [rows, 2, 64]).unwrap(), TensorRef::thd(&v, [rows, 2, 80]).unwrap());
            twins.cpu.append(0, &views.0, &views.1).unwrap();
            let (c, s, t, m) = (gpu.up(&context), gpu.up(&start), gpu.up(&flat), gpu.up(&slots));
            let batch = DeviceBatch::slots((&c).into(), (&s).into(), (&t).into(), (&m).into());
            let mut buffers = Buffers::new(&gpu, 2, rows);
            let mut step = buffers.memory((&mut twins.lengths, &mut twins.status));
            begin_step(&gpu.device, gpu.raw(), &config, 8, &batch, &mut step).unwrap();
            let (dk, dv) = (gpu.up(&k), gpu.up(&v));
            let (dk, dv) = (
                DeviceTensor::thd(&dk, [rows, 2, 64]).unwrap(),
                DeviceTensor::thd(&dv, [rows, 2, 80]).unwrap(),
            );
            let mut l = twins.layer.memory(&config);
            append(&gpu.device, gpu.raw(), &config, 0, &dk, &dv, &batch, &mut l, &mut step).unwrap();
            gpu.stream.synchronize().unwrap();
        }
        assert_eq!(lens, [64, 128]);
        drop(twins.cpu);
        let cpu: Vec<u8> = memory.iter().flat_map(|w| w.to_le_bytes()).collect();
        let pages = PageLayout::new(&key, &value, 64, 80);
        let got = gpu.down(&twins.layer.pages);
        for (i, table) in tables.iter().enumerate() {
            for (tile, block) in table.iter().enumerate().take(lens[i] / 64) {
                for head in 0..2 {
                    let at = (*block as usize * 2 + head) * pages.page_bytes;
                    let mut rows = vec![0u8; pages.page_bytes];
                    let page = &got[at..at + pages.page_bytes];
                    convert_page(&key, &value, &pages, Order::Fragment, page, Order::Row, &mut rows).unwrap();
                    let want = &cpu[at..at + pages.page_bytes];
                    assert!(rows == want, "{key:?} {value:?} sequence {i} tile {tile} head {head}");
                }
            }
        }
        // A slot beyond the pool is skipped and counted.
        let (c, s, t, m) = (gpu.up(&[1i32]), gpu.up(&[0i32, 1]), gpu.up(&[0i32]), gpu.up(&[8 * 64i64]));
        let batch = DeviceBatch::slots((&c).into(), (&s).into(), (&t).into(), (&m).into());
        let mut buffers = Buffers::new(&gpu, 1, 1);
        let mut step = buffers.memory((&mut twins.lengths, &mut twins.status));
        begin_step(&gpu.device, gpu.raw(), &config, 8, &batch, &mut step).unwrap();
        assert_eq!(gpu.down(&buffers.slots), [-1]);
        assert_eq!(read_status(gpu.down(&twins.status).try_into().unwrap()).bad_slots, 1);
    }
}

#[test]
fn rows_of_no_sequence_are_not_stored() {
    let gpu = Gpu::new();
    let eight = Affine::per_token(Bits::B8, 64);
    let config = CacheConfig::new(1, 1, 64).with_key(eight).with_value(eight).with_capacity(2, 128).direct();
    let x = gpu.up(&vec![1f32; 8 * 64]);
    for seated in [true, false] {
        let mut twins = Twins::new(&gpu, config.clone(), 2);
        let mut buffers = Buffers::new(&gpu, 2, 8);
        // What an earlier step of a larger batch may have left, and a place outside the pool.
        gpu.stream.memcpy_htod(&[70i64, 71, 72, 73, 74, 75, 1 << 40, 77], &mut buffers.slots).unwrap();
        let (ids, lens) = (gpu.up(&[0i32, 1]), gpu.up(&[2i32, 1]));
        // Row 0 and the last three are nobody's, and the second sequence runs backwards.
        let (start, tables) = (gpu.up(&[1i32, 3, 2]), gpu.up(&[0i32, -1, -1, -1]));
        let mapping = gpu.up(&[3i64; 6]);
        let batch = if seated {
            DeviceBatch::seats((&ids).into(), (&start).into(), (&tables).into(), 6)
        } else {
            DeviceBatch::slots((&lens).into(), (&start).into(), (&tables).into(), (&mapping).into())
        };
        let mut step = buffers.memory((&mut twins.lengths, &mut twins.status));
        begin_step(&gpu.device, gpu.raw(), &config, 2, &batch, &mut step).unwrap();
        let rows = x.slice(..6 * 64);
        let view = DeviceTensor::thd(&rows, [6, 1, 64]).unwrap();
        if seated {
            let mut l = twins.layer.memory(&config);
            append(&gpu.device, gpu.raw(), &config, 0, &view, &view, &batch, &mut l, &mut step).unwrap();
        }
        let slots = gpu.down(&buffers.slots);
        let want = if seated { [-1, 0, 1, -1, -1, -1] } else { [-1, 3, 3, -1, -1, -1] };
        assert_eq!(slots[..6], want);
        assert_eq!(slots[6..], [1 << 40, 77], "rows beyond the batch are not touched");
        assert_eq!(read_status(gpu.down(&twins.status).try_into().unwrap()).bad_rows, 1);
    }
}

#[test]
fn sequences_do_not_share_rows() {
    let gpu = Gpu::new();
    let config = four_bits(1, 64, 3).with_residual(Some(0));
    let mut twins = Twins::new(&gpu, config.clone(), 8);
    let mut buffers = Buffers::new(&gpu, 3, 192);
    let (ids, tables) = (gpu.up(&[0i32, 1, 2]), gpu.up(&[0i32, 1, 2, 3, 4, 5]));
    // The second ends before it begins, so the third would take rows of the first.
    let start = gpu.up(&[0i32, 128, 8, 192]);
    let x = gpu.up(&vec![1f32; 192 * 64]);
    let batch = DeviceBatch::seats((&ids).into(), (&start).into(), (&tables).into(), 192);
    let mut step = buffers.memory((&mut twins.lengths, &mut twins.status));
    begin_step(&gpu.device, gpu.raw(), &config, 8, &batch, &mut step).unwrap();
    let (view, mut l) = (DeviceTensor::thd(&x, [192, 1, 64]).unwrap(), twins.layer.memory(&config));
    append(&gpu.device, gpu.raw(), &config, 0, &view, &view, &batch, &mut l, &mut step).unwrap();
    gpu.stream.synchronize().unwrap();
    assert_eq!(gpu.down(&twins.lengths), [128, 128, 0, 0, 0, 0]);
    assert_eq!(read_status(gpu.down(&twins.status).try_into().unwrap()).bad_rows, 2);
}

#[test]
fn lengths_that_cannot_be_are_refused() {
    let gpu = Gpu::new();
    let eight = Affine::per_token(Bits::B8, 64);
    let direct = CacheConfig::new(1, 1, 64)
        .with_key(eight)
        .with_value(eight)
        .direct()
        .with_capacity(1, i32::MAX as usize);
    let windowed = four_bits(1, 64, 1);
    let x = gpu.up(&vec![1f32; 4 * 64]);
    let cases = [
        (&windowed, [-5, 0]),
        (&windowed, [-5, -64]),
        (&windowed, [70, 128]),
        (&windowed, [70, 30]),
        (&windowed, [96, 0]),
        (&direct, [-3, -3]),
        (&direct, [i32::MAX - 4, i32::MAX - 4]),
    ];
    let (ids, start, tables) = (gpu.up(&[0i32]), gpu.up(&[0i32, 4]), gpu.up(&[0i32, 1]));
    for (config, lengths) in cases {
        let blocks = 2;
        let (mut on_device, mut status) = (gpu.up(&lengths), gpu.zeros::<u64>(STATUS_WORDS));
        let mut buffers = Buffers::new(&gpu, 1, 4);
        let mut twins = Twins::new(&gpu, config.clone().with_capacity(1, 128), blocks);
        let batch = DeviceBatch::seats((&ids).into(), (&start).into(), (&tables).into(), 4);
        let mut step = buffers.memory((&mut on_device, &mut status));
        begin_step(&gpu.device, gpu.raw(), config, blocks, &batch, &mut step).unwrap();
        let (view, mut l) = (DeviceTensor::thd(&x, [4, 1, 64]).unwrap(), twins.layer.memory(config));
        append(&gpu.device, gpu.raw(), config, 0, &view, &view, &batch, &mut l, &mut step).unwrap();
        gpu.stream.synchronize().unwrap();
        assert_eq!(gpu.down(&on_device), lengths);
        let s = read_status(gpu.down(&status).try_into().unwrap());
        assert_eq!(s.bad_seats + s.missing_blocks, 1, "{lengths:?}: {s:?}");
    }
}

#[test]
fn a_layer_with_fewer_blocks_is_not_left() {
    let gpu = Gpu::new();
    let eight = Affine::per_token(Bits::B8, 64);
    let config = CacheConfig::new(1, 2, 64).with_key(eight).with_value(eight).with_capacity(1, 512).direct();
    let mut twins = Twins::new(&gpu, config.clone(), 2);
    let mut buffers = Buffers::new(&gpu, 1, 2);
    let (ids, start, tables) = (gpu.up(&[0i32]), gpu.up(&[0i32, 2]), gpu.up(&[7i32]));
    let batch = DeviceBatch::seats((&ids).into(), (&start).into(), (&tables).into(), 2);
    let mut step = buffers.memory((&mut twins.lengths, &mut twins.status));
    // The step is told of 8 blocks, the layer has 2.
    begin_step(&gpu.device, gpu.raw(), &config, 8, &batch, &mut step).unwrap();
    let x = gpu.up(&vec![1f32; 2 * 2 * 64]);
    let (view, mut l) = (DeviceTensor::thd(&x, [2, 2, 64]).unwrap(), twins.layer.memory(&config));
    append(&gpu.device, gpu.raw(), &config, 0, &view, &view, &batch, &mut l, &mut step).unwrap();
    gpu.stream.synchronize().unwrap();
    assert_eq!(read_status(gpu.down(&twins.status).try_into().unwrap()).bad_slots, 2);
}

#[test]
fn a_layer_with_another_batch_is_not_left() {
    let gpu = Gpu::new();
    let config = four_bits(1, 64, 1).with_residual(Some(0));
    let mut twins = Twins::new(&gpu, config.clone(), 4);
    let mut buffers = Buffers::new(&gpu, 1, 192);
    let (ids, start, tables) = (gpu.up(&[0i32]), gpu.up(&[0i32, 192]), gpu.up(&[0i32, 1, 2]));
    let x = gpu.up(&vec![1f32; 192 * 64]);
    // Fewer rows than the step has, then a narrower table.
    for (rows, width) in [(64, 3), (192, 2)] {
        gpu.stream.memcpy_htod(&[0i32, 0], &mut twins.lengths).unwrap();
        let batch = DeviceBatch::seats((&ids).into(), (&start).into(), (&tables).into(), 192);
        let mut step = buffers.memory((&mut twins.lengths, &mut twins.status));
        begin_step(&gpu.device, gpu.raw(), &config, 4, &batch, &mut step).unwrap();
        let (part, table) = (x.slice(..rows * 64), tables.slice(..width));
        let view = DeviceTensor::thd(&part, [rows, 1, 64]).unwrap();
        let batch = DeviceBatch::seats((&ids).into(), (&start).into(), (&table).into(), rows);
        let mut l = twins.layer.memory(&config);
        append(&gpu.device, gpu.raw(), &config, 0, &view, &view, &batch, &mut l, &mut step).unwrap();
        gpu.stream.synchronize().unwrap();
    }
    let status = read_status(gpu.down(&twins.status).try_into().unwrap());
    // The third tile of keys and of values.
    assert_eq!((status.bad_rows, status.missing_blocks), (1, 2));
}

#[test]
fn a_token_costs_what_it_weighs() {
    let gpu = Gpu::new();
    let Some(simulator) = gpu.simulator else { return };
    let (n, heads, d) = (32, 8, 128);
    let windowed = CacheConfig::new(1, heads, d).with_bits(Bits::B4).with_residual(Some(0)).with_sinks(0);
    let direct = CacheConfig::new(1, heads, d)
        .with_key(Affine::per_token(Bits::B8, 128))
        .with_value(Affine::per_token(Bits::B8, 128))
        .direct();
    for config in [windowed, direct] {
        let config = config.with_capacity(n, 128);
        let mut twins = Twins::new(&gpu, config.clone(), 64);
        let mut random = Random::new(8);
        let x = Host::new(Dtype::F16, &random.normals(n * heads * d)).up(&gpu);
        let shape = qkv::Shape { dims: [n, heads, d], batch_tokens: n, strides: [0, heads * d, d, 1] };
        let ids: Vec<i32> = (0..n as i32).collect();
        let start: Vec<i32> = (0..=n as i32).collect();
        let table: Vec<i32> = (0..2 * n as i32).collect();
        let (ids, start, tables) = (gpu.up(&ids), gpu.up(&start), gpu.up(&table));
        let batch = DeviceBatch::seats((&ids).into(), (&start).into(), (&tables).into(), n);
        let mut buffers = Buffers::new(&gpu, n, n);
        let row = (n * heads * 2 * d * 2) as f64;
        let page = (n * heads * page_bytes(&config, 0).unwrap()) as f64;
        for step in 1..=64 {
            let mut s = buffers.memory((&mut twins.lengths, &mut twins.status));
            begin_step(&gpu.device, gpu.raw(), &config, 64, &batch, &mut s).unwrap();
            gpu.stream.synchronize().unwrap();
            simulator.take_stats();
            let (mut l, v) = (twins.layer.memory(&config), x.view(shape));
            append(&gpu.device, gpu.raw(), &config, 0, &v, &v, &batch, &mut l, &mut s).unwrap();
            gpu.stream.synchronize().unwrap();
            let stats = simulator.take_stats();
            assert_eq!(stats.len(), 1, "one launch a layer");
            let bytes = stats[0].total.global_bytes as f64;
            let most = if config.residual.is_none() {
                // Codes out, and a pair a row and head.
                1.1 * (row + row / 2.0 + (n * heads * 2 * 4) as f64)
            } else if step < 64 {
                1.1 * 2.0 * row
            } else {
                1.1 * 2.0 * row + 64.0 * row + page
            };
            // What comes in, and what has to go out.
            let least = if config.residual.is_none() { 1.5 * row } else { 2.0 * row };
            assert!(bytes >= least, "{:?} step {step}: {bytes}, at least {least}", config.residual);
            assert!(bytes <= most, "{:?} step {step}: {bytes} of {most}", config.residual);
            assert_eq!(stats[0].total.shared_conflicts, 0, "{:?} step {step}", config.residual);
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_before_the_launch() {
    let gpu = Gpu::new();
    let config = four_bits(2, 64, 2);
    let mut twins = Twins::new(&gpu, config.clone(), 4);
    let before = gpu.down(&twins.lengths);
    let (ids, start, tables) = (gpu.up(&[0i32]), gpu.up(&[0i32, 1]), gpu.up(&[-1i32; 8]));
    let batch = DeviceBatch::seats((&ids).into(), (&start).into(), (&tables).into(), 1);
    let mut buffers = Buffers::new(&gpu, 1, 1);
    let mut run = |twins: &mut Twins, c: &CacheConfig, batch: &DeviceBatch<'_>| {
        let mut s = buffers.memory((&mut twins.lengths, &mut twins.status));
        begin_step(&gpu.device, gpu.raw(), c, 4, batch, &mut s)
    };
    let three = gpu.up(&[0i32; 3]);
    let wrong = DeviceBatch::seats((&ids).into(), (&three).into(), (&tables).into(), 1);
    assert!(matches!(run(&mut twins, &config, &wrong), Err(Error::Length { what: "query_start", .. })));
    let mapping = gpu.up(&[0i64]);
    let slots = DeviceBatch::slots((&ids).into(), (&start).into(), (&tables).into(), (&mapping).into());
    assert!(matches!(run(&mut twins, &config, &slots), Err(Error::Unsupported { .. })));
    assert!(run(&mut twins, &config.clone().with_sinks(99), &batch).is_err());
    // SAFETY: refused before anything is read.
    let null = unsafe { DeviceSlice::from_raw(0, 1) };
    let nobody = DeviceBatch::seats(null, (&start).into(), (&tables).into(), 1);
    assert!(matches!(run(&mut twins, &config, &nobody), Err(Error::Address { what: "seats", .. })));
    let x = gpu.zeros::<f32>(3 * 64);
    let view = |dims| DeviceTensor::thd(&x, dims).unwrap();
    let mut buffers = Buffers::new(&gpu, 1, 1);
    let mut append = |twins: &mut Twins, c: &CacheConfig, dims: [usize; 3]| {
        let mut s = buffers.memory((&mut twins.lengths, &mut twins.status));
        let mut l = twins.layer.memory(&config);
        append(&gpu.device, gpu.raw(), c, 0, &view(dims), &view(dims), &batch, &mut l, &mut s)
    };
    assert!(matches!(append(&mut twins, &config, [1, 3, 64]), Err(Error::Shape { .. })));
    let f32s = config.clone().with_window_dtype(Dtype::F32);
    assert!(matches!(append(&mut twins, &f32s, [1, 2, 64]), Err(Error::Unsupported { .. })));
    let wider = config.clone().with_residual(Some(64));
    assert!(matches!(append(&mut twins, &wider, [1, 2, 64]), Err(Error::Length { .. })));
    let centred = config.clone().with_key(Affine::per_token(Bits::B8, 64).with_center());
    let mut others = Twins::new(&gpu, centred.clone(), 4);
    let mut l = others.layer.memory(&centred);
    // SAFETY: refused before anything is read or written.
    l.means = unsafe { DeviceSliceMut::from_raw(0, l.means.len()) };
    let (v, mut buffers) = (view([1, 2, 64]), Buffers::new(&gpu, 1, 1));
    let mut s = buffers.memory((&mut twins.lengths, &mut twins.status));
    let r = launch::append(&gpu.device, gpu.raw(), &centred, 0, &v, &v, &batch, &mut l, &mut s);
    assert!(matches!(r, Err(Error::Address { what: "means", .. })));
    assert_eq!(gpu.down(&twins.lengths), before);
    assert!(DeviceSlice::from(&x).len() == 192);
}
