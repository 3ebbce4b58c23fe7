//! `bytes_allocated` is what the allocator saw, `bytes_used` equals it when the cache is full, and a decode step
//! allocates nothing after warm-up.

use qkv::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static CALLS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system allocator unchanged; the counters do not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), SeqCst);
        CALLS.fetch_add(1, SeqCst);
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), SeqCst);
        CALLS.fetch_add(1, SeqCst);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, p: *mut u8, layout: Layout, new: usize) -> *mut u8 {
        LIVE.fetch_add(new, SeqCst);
        LIVE.fetch_sub(layout.size(), SeqCst);
        CALLS.fetch_add(1, SeqCst);
        // SAFETY: as above.
        unsafe { System.realloc(p, layout, new) }
    }
    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), SeqCst);
        // SAFETY: as above.
        unsafe { System.dealloc(p, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const PAGE: usize = 4096;
const HEADS: usize = 2;
const DIM: usize = 64;

fn configs() -> Vec<CacheConfig> {
    let base = CacheConfig::new(3, HEADS, DIM).with_capacity(2, 1024);
    let token = Affine::per_token(Bits::B4, 64);
    vec![
        base.clone(),
        base.clone().with_bits(Bits::B3).with_window_dtype(Dtype::F32),
        base.clone().with_bits(Bits::B1).with_sinks(16).with_residual(Some(192)),
        base.clone().with_key(token.with_center().with_rotation(64)).with_value(token.with_rotation(32)),
        base.clone().with_bits(Bits::B8).direct(),
        base.with_key(Fp8::e4m3(Granularity::TokenHead)).with_value(Format::F16).with_residual(Some(0)),
    ]
}

/// One test, since the counters are the process's.
#[test]
fn memory_is_what_the_cache_says() {
    // Inside a pool of its own, so that handing work to it is not counted.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    // Threads allocate while they start: wait for all of them.
    pool.broadcast(|_| std::thread::yield_now());
    pool.install(|| configs().into_iter().for_each(check));
}

fn check(config: CacheConfig) {
    let what = format!("{config:?}");
    let before = LIVE.load(SeqCst);
    let mut cache = KvCache::new(config.clone()).unwrap();
    let seen = LIVE.load(SeqCst) - before;
    let said = cache.bytes_allocated() + cache.scratch_bytes();
    // Tables, counts and the copy of the configuration: a few bytes a block and layer.
    assert!(seen.abs_diff(said) <= PAGE, "allocator {seen}, cache {said}: {what}");

    let rows = 2;
    let kv: Vec<f32> = (0..rows * HEADS * DIM).map(|i| (i as f32 * 0.37).sin()).collect();
    let q: Vec<f32> = (0..rows * 3 * HEADS * DIM).map(|i| (i as f32 * 0.73).cos()).collect();
    let mut out = vec![0f32; q.len()];
    let mut step = |cache: &mut KvCache| {
        let t = TensorRef::thd(&kv, [rows, HEADS, DIM]).unwrap();
        let q = TensorRef::thd(&q, [rows, 3 * HEADS, DIM]).unwrap();
        for layer in 0..3 {
            let mut out = TensorMut::thd(&mut out, [rows, 3 * HEADS, DIM]).unwrap();
            cache.append(layer, &t, &t).unwrap();
            cache.attend(layer, &q, &AttendParams::new(), &mut out, None).unwrap();
        }
    };
    // Warm-up: until every thread has closed a tile.
    for _ in 0..400 {
        step(&mut cache);
    }
    let calls = CALLS.load(SeqCst);
    for _ in 400..1024 {
        step(&mut cache);
    }
    assert_eq!(CALLS.load(SeqCst) - calls, 0, "allocations in 624 steps: {what}");
    assert_eq!(cache.bytes_used(), cache.bytes_allocated(), "full: {what}");
    assert_eq!(cache.len(0), 1024);
    drop(cache);
    let left = LIVE.load(SeqCst).saturating_sub(before);
    assert!(left <= 16 * PAGE * 4, "left behind {left}: {what}");
}
