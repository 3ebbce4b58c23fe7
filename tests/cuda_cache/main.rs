//! The cache on a device: the state machine's suite, and everything against the cache on the CPU, to the bit.

#[path = "../state_machine/attention.rs"]
mod attention;
#[path = "../support/caches.rs"]
#[allow(dead_code)]
mod caches;
#[path = "../support/device.rs"]
mod device;
#[path = "../cache_attention/formats.rs"]
mod formats;
#[path = "../support/gpu.rs"]
#[allow(dead_code)]
mod gpu;
#[path = "../state_machine/histories.rs"]
mod histories;
#[path = "../support/host.rs"]
#[allow(dead_code)]
mod host;
#[path = "../support/machine.rs"]
#[allow(dead_code)]
mod machine;
#[path = "../state_machine/model.rs"]
mod model;
#[path = "../paged/suite.rs"]
mod paged;
#[path = "../support/reference.rs"]
#[allow(dead_code)]
mod reference;
#[path = "../cache_attention/special.rs"]
mod special;
#[path = "../state_machine/splits.rs"]
mod splits;

mod calls;
mod invariance;
mod model_loop;
mod owners;
mod twins;

use device::OnGpu;

paged::every_test!(OnGpu::new(), paged);

formats::every_test!(OnGpu::new(), formats);
special::every_test!(OnGpu::new(), special);

/// Every format as keys and as values, not every pair.
#[test]
fn every_format_in_both_modes() {
    let gpu = OnGpu::new();
    for direct in [false, true] {
        let all = formats::formats(64, direct);
        for (i, key) in all.iter().enumerate() {
            let value = all[(7 * i + 3) % all.len()];
            formats::run(&gpu, *key, value, direct as u64 * 100_000 + i as u64, (64, 64), direct);
        }
    }
}

#[test]
fn other_head_dims() {
    formats::other_head_dims(&OnGpu::new(), 1);
}

#[test]
fn random_histories_equal_the_model() {
    let gpu = OnGpu::new();
    let seen: Vec<_> = (1..=24).map(|seed| histories::run(&gpu, seed)).collect();
    histories::report(&seen);
}

#[test]
fn any_split_gives_the_same_bits() {
    splits::any_split_gives_the_same_bits(&OnGpu::new(), 6);
}
