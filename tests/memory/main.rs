//! The suite of memory on the CPU, with an allocator that counts.

#[path = "../support/host.rs"]
#[allow(dead_code)]
mod host;
#[path = "../support/machine.rs"]
#[allow(dead_code)]
mod machine;

mod suite;

use machine::OnCpu;
use qkv::{CacheConfig, KvCache, TensorRef};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use suite::{DIM, HEADS, Probe, Sizes, check, configs};

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

const THREADS: usize = 2;

/// A tile of each head.
fn close_tiles() {
    let config = CacheConfig::new(1, HEADS, DIM).with_residual(Some(0)).with_capacity(1, 64);
    let x = vec![0.5f32; 64 * HEADS * DIM];
    let x = TensorRef::thd(&x, [64, HEADS, DIM]).unwrap();
    KvCache::new(config).unwrap().append(0, &x, &x).unwrap();
}

/// One test, since the counters are the process's.
#[test]
fn memory_is_what_the_cache_says() {
    // Inside a pool of its own, so that handing work to it is not counted.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(THREADS).build().unwrap();
    // Threads allocate while they start, and a thread's memory for a tile grows with the first that it closes: each closes some.
    // All begin before one ends, and those that have ended block, so none takes work from another.
    let gate = Barrier::new(THREADS);
    pool.broadcast(|_| {
        gate.wait();
        close_tiles();
        gate.wait();
    });
    pool.install(|| {
        let probe = Probe { live: &|| LIVE.load(SeqCst), calls: &|| CALLS.load(SeqCst) };
        let sizes = Sizes { bulk: 0, warm: 400, tokens: 1024 };
        configs::<OnCpu>(sizes).into_iter().for_each(|c| check(&OnCpu, c, sizes, &probe));
    });
}
