//! The suite of memory on a device: what the driver has given is what the cache says.

#[path = "../support/device.rs"]
mod device;
#[path = "../support/gpu.rs"]
#[allow(dead_code)]
mod gpu;
#[path = "../support/host.rs"]
#[allow(dead_code)]
mod host;
#[path = "../support/machine.rs"]
#[allow(dead_code)]
mod machine;
#[path = "../memory/suite.rs"]
mod suite;

use device::OnGpu;
use machine::Machine;
use std::cell::Cell;
use suite::{Probe, Sizes, check, configs};

/// One test, since a device's free memory is everybody's. A real driver gives memory by the megabyte, and to other programs: what
/// it has left says nothing of a cache, so only the simulated one is asked.
#[test]
fn memory_is_what_the_cache_says() {
    let gpu = OnGpu::new();
    let Some(simulator) = gpu.0.simulator else { return };
    let used = || {
        gpu.0.stream.synchronize().unwrap();
        simulator.used_bytes() as usize
    };
    let calls = Cell::new(0);
    let allocations = || {
        let new = simulator.take_calls();
        let new: u64 = new.iter().filter(|c| c.0.contains("Alloc")).map(|c| *c.1).sum();
        calls.set(calls.get() + new as usize);
        calls.get()
    };
    let probe = Probe { live: &used, calls: &allocations };
    let sizes = Sizes { bulk: 176, warm: 180, tokens: 192 };
    // The first cache loads the kernels.
    drop(gpu.contiguous(configs::<OnGpu>(sizes).remove(0)).unwrap());
    configs::<OnGpu>(sizes).into_iter().for_each(|c| check(&gpu, c, sizes, &probe));
    assert!(calls.get() > 0, "caches allocate when they are made");
}
