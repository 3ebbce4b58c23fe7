//! Attention through a cache against f64 attention over what the cache says it holds, for every pair of formats, and
//! the rules for values that are not finite. `tests/cuda_cache` runs the same on a device.

#[path = "../support/host.rs"]
#[allow(dead_code)]
mod host;
#[path = "../support/machine.rs"]
#[allow(dead_code)]
mod machine;
#[path = "../support/reference.rs"]
#[allow(dead_code)]
mod reference;

mod formats;
mod special;

use machine::OnCpu;
use rayon::prelude::*;

#[test]
fn every_pair_of_formats() {
    for direct in [false, true] {
        let all = formats::formats(64, direct);
        (0..all.len() * all.len()).into_par_iter().for_each(|i| {
            let (key, value) = (all[i / all.len()], all[i % all.len()]);
            formats::run(&OnCpu, key, value, direct as u64 * 100_000 + i as u64, (64, 64), direct);
        });
    }
}

#[test]
fn other_head_dims() {
    formats::other_head_dims(&OnCpu, 12);
}

formats::every_test!(OnCpu, formats);
special::every_test!(OnCpu, special);
