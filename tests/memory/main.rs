//! The suite of memory on the CPU, with an allocator that counts.

#[path = "../support/host.rs"]
#[allow(dead_code)]
mod host;
#[path = "../support/machine.rs"]
#[allow(dead_code)]
mod machine;

mod suite;

use machine::OnCpu;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use suite::{Probe, Sizes, check, configs};

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

/// One test, since the counters are the process's.
#[test]
fn memory_is_what_the_cache_says() {
    // Inside a pool of its own, so that handing work to it is not counted.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    // Threads allocate while they start: wait for all of them.
    pool.broadcast(|_| std::thread::yield_now());
    pool.install(|| {
        // A thread's memory for a tile grows with the first that it closes. On a busy machine one of the two may have none of those of the
        // warm-up.
        let probe = Probe { live: &|| LIVE.load(SeqCst), calls: &|| CALLS.load(SeqCst), late: 1 };
        let sizes = Sizes { bulk: 0, warm: 400, tokens: 1024 };
        configs::<OnCpu>(sizes).into_iter().for_each(|c| check(&OnCpu, c, sizes, &probe));
    });
}
