//! Random histories of a paged cache against a plain `Vec` model. `tests/cuda_cache` runs the same on a device.
//!
//! The model keeps, for every sequence, the value of every token as attention should see it. It knows the rules of
//! the state machine and its own transcription of the min-max definition, nothing of the library's inside.

#[path = "../support/host.rs"]
#[allow(dead_code)]
mod host;
#[path = "../support/machine.rs"]
#[allow(dead_code)]
mod machine;
#[path = "../support/reference.rs"]
#[allow(dead_code)]
mod reference;

mod attention;
mod histories;
mod model;
mod splits;

use machine::OnCpu;
use rayon::prelude::*;

#[test]
fn a_thousand_random_histories_equal_the_model() {
    let seen: Vec<_> = (1..=1000).into_par_iter().map(|seed| histories::run(&OnCpu, seed)).collect();
    histories::report(&seen);
}

#[test]
fn any_split_gives_the_same_bits() {
    splits::any_split_gives_the_same_bits(&OnCpu, 60);
}
