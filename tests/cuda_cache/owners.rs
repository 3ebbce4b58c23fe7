//! Memory and streams of others, and what a cache refuses.

use crate::device::OnGpu;
use crate::gpu::Random;
use crate::machine::{Machine, Params};
use qkv::cuda::{CacheStream, Cuda, CudaOptions, DeviceSlice};
use qkv::{Affine, Batch, Bits, CacheConfig, Dtype, Error, KvCache, PagePool, PagedKvCache, Seat};

fn config() -> CacheConfig {
    CacheConfig::new(2, 2, 32).with_bits(Bits::B4).with_capacity(2, 256)
}

fn grow(gpu: &OnGpu, cache: &mut PagedKvCache<Cuda>, seat: Seat, n: usize, seed: u64) {
    let x = gpu.input(Dtype::F32, &Random::new(seed).normals(n * 2 * 32));
    // The cache may be on another stream: it reads what is there, and the memory goes back when it has read.
    gpu.0.stream.synchronize().unwrap();
    cache.reserve(seat, n).unwrap();
    cache.begin_step(&Batch::new(&[seat], &[0, n as i32])).unwrap();
    for layer in 0..2 {
        let view = OnGpu::view(&x, [n, 2, 32]);
        cache.append(layer, &view, &view).unwrap();
    }
    gpu.0.device.context().synchronize().unwrap();
}

fn page(cache: &PagedKvCache<Cuda>, seat: Seat) -> Vec<u8> {
    cache.export_page(seat, 1, 1, 0).unwrap()
}

#[test]
fn memory_and_stream_can_be_lent() {
    let gpu = OnGpu::new();
    let block = config().block_bytes().unwrap();
    let memory = gpu.0.zeros::<u8>(4 * block + 100);
    let base = DeviceSlice::from(&memory).address();
    // SAFETY: zeroed memory that outlives the cache and is used by nothing else.
    let pool = unsafe { PagePool::from_device(&config(), base, memory.len()) }.unwrap();
    assert_eq!((pool.blocks(), pool.bytes()), (4, 4 * block + 100));
    // SAFETY: the stream outlives the cache.
    let stream = unsafe { CacheStream::from_raw(gpu.0.stream.cu_stream().cast()) };
    let mut lent = PagedKvCache::on_device(&gpu.0.device, stream, config(), pool).unwrap();
    let mut own = gpu.paged(config(), 4).unwrap();
    for cache in [&mut lent, &mut own] {
        let seat = cache.open().unwrap();
        grow(&gpu, cache, seat, 150, 1);
    }
    let seat = Seat::new(0);
    assert_eq!(page(&lent, seat), page(&own, seat));
    drop(lent);
    // The pages are in the owner's memory.
    assert!(gpu.0.down(&memory).iter().any(|b| *b != 0));
    // SAFETY: refused before it is touched.
    let r = unsafe { PagePool::from_device(&config(), base + 8, block) };
    assert!(matches!(r, Err(Error::Address { .. })));
}

#[test]
fn a_cache_changes_its_stream() {
    let gpu = OnGpu::new();
    let (mut moved, mut own) = (gpu.paged(config(), 4).unwrap(), gpu.paged(config(), 4).unwrap());
    let other = gpu.0.device.context().new_stream().unwrap();
    let seat = Seat::new(0);
    for cache in [&mut moved, &mut own] {
        assert_eq!(cache.open().unwrap(), seat);
        grow(&gpu, cache, seat, 100, 1);
    }
    moved.set_stream(other).unwrap();
    for cache in [&mut moved, &mut own] {
        grow(&gpu, cache, seat, 100, 2);
        assert_eq!(cache.device_status().unwrap().missing_blocks, 0);
    }
    assert_eq!(page(&moved, seat), page(&own, seat));
}

#[test]
fn a_contiguous_cache_counts_its_bytes() {
    let gpu = OnGpu::new();
    let cache = gpu.contiguous(config()).unwrap();
    let on_host = KvCache::new(config()).unwrap();
    assert_eq!(cache.bytes_allocated(), on_host.bytes_allocated());
    assert_eq!(cache.bytes_used(), on_host.bytes_used());
    assert!(cache.scratch_bytes() > 0);
    let mut cache = cache;
    let x = gpu.input(Dtype::F32, &Random::new(1).normals(2 * 256 * 2 * 32));
    let view = OnGpu::view(&x, [2 * 256, 2, 32]);
    (0..2).for_each(|layer| cache.append(layer, &view, &view).unwrap());
    assert_eq!(cache.bytes_used(), cache.bytes_allocated());
}

#[test]
fn what_does_not_fit_is_refused() {
    let gpu = OnGpu::new();
    let no = |c: CacheConfig| gpu.contiguous(c).unwrap_err();
    assert!(matches!(
        no(config().with_window_dtype(Dtype::F32)),
        Error::Unsupported { what: "window_dtype", .. }
    ));
    assert!(matches!(no(config().with_sinks(99)), Error::Unsupported { what: "sinks", .. }));
    // What a step could not store is refused before memory is taken for it.
    let groups = Affine::per_token(Bits::B4, 512);
    let long = CacheConfig::new(1, 1, 512).with_key(groups).with_value(groups).with_capacity(1, 64);
    assert!(matches!(no(long), Error::Unsupported { what: "key format", .. }));
    let pool = PagePool::on_device(&gpu.0.device, &config(), 2).unwrap();
    let other = config().with_bits(Bits::B2);
    let r = PagedKvCache::on_device(&gpu.0.device, gpu.0.stream.clone(), other, pool);
    assert!(matches!(r, Err(Error::Unsupported { what: "pool", .. })));

    // What the GPU does not take leaves the last step what it was: attention over it may go on.
    let mut cache = gpu.contiguous(config()).unwrap();
    let one = gpu.input(Dtype::F16, &Random::new(4).normals(2 * 2 * 32));
    let one = OnGpu::view(&one, [2, 2, 32]);
    (0..2).for_each(|layer| cache.append(layer, &one, &one).unwrap());
    let step = format!("{:?}", cache.paged().step());
    let x = gpu.input(Dtype::F32, &Random::new(5).normals(4 * 2 * 32));
    let (x, params) = (OnGpu::view(&x, [4, 2, 32]), qkv::cuda::launch::DeviceAttendParams::new());
    let mut out = gpu.output(Dtype::F32, 4 * 2 * 32);
    let r = cache.prefill(0, &x, &x, &x, &params, &mut OnGpu::view_mut(&mut out, [4, 2, 32]), None);
    assert!(matches!(r, Err(Error::Unsupported { .. })), "{r:?}");
    assert_eq!(cache.len(0), 1);
    assert_eq!(format!("{:?}", cache.paged().step()), step);
    let mut out = gpu.output(Dtype::F32, 2 * 2 * 32);
    let r =
        cache.attend(1, &one, &params.with_fixed_split(4), &mut OnGpu::view_mut(&mut out, [2, 2, 32]), None);
    assert!(matches!(r, Err(Error::Unsupported { what: "fixed_split", .. })), "{r:?}");
    (0..2).for_each(|layer| cache.append(layer, &one, &one).unwrap());
    assert_eq!(cache.len(0), 2);

    // Direct mode: no more rows in a step than there is memory for; the step is not opened.
    let eight = Affine::per_token(Bits::B8, 32);
    let direct = config().with_key(eight).with_value(eight).direct();
    let options = CudaOptions::new(&gpu.0.device, gpu.0.stream.clone()).with_rows(10);
    let pool = PagePool::on_device(&gpu.0.device, &direct, 2).unwrap();
    let mut cache: PagedKvCache<Cuda> = PagedKvCache::on_backend(options, direct, pool).unwrap();
    let seat = cache.open().unwrap();
    cache.reserve(seat, 11).unwrap();
    let r = cache.begin_step(&Batch::new(&[seat], &[0, 11]));
    assert!(matches!(r, Err(Error::Capacity { needed: 11, available: 10, .. })), "{r:?}");
    assert!(cache.step().sequences().is_empty());
    grow(&gpu, &mut cache, seat, 10, 3);
    assert_eq!(cache.len(seat).unwrap(), 10);

    // Wrong shapes are refused before anything is launched, and the step goes on.
    let mut cache = gpu.paged(config(), 4).unwrap();
    let seat = cache.open().unwrap();
    cache.begin_step(&Batch::new(&[seat], &[0, 1])).unwrap();
    let x = gpu.input(Dtype::F32, &[1.0; 3 * 2 * 32]);
    let wrong = OnGpu::view(&x, [3, 2, 32]);
    assert!(matches!(cache.append(0, &wrong, &wrong), Err(Error::Shape { .. })));
    let (q, mut out) = (OnGpu::view(&x, [1, 2, 32]), gpu.output(Dtype::F32, 2 * 32));
    let mut out = OnGpu::view_mut(&mut out, [1, 2, 32]);
    assert!(matches!(
        cache.attend(0, &q, &OnGpu::params(&gpu.hold(&Params::default())), &mut out, None),
        Err(Error::StepOrder { .. })
    ));
    cache.cancel_step().unwrap();
    grow(&gpu, &mut cache, seat, 1, 4);
    assert_eq!(cache.device_status().unwrap().bad_seats, 0);
}
