//! Random histories of a paged cache against a plain `Vec` model. `tests/cuda_cache` runs the same on a device.
//!
//! The model keeps, for every sequence, the value of every token as attention should see it. It knows the rules of
//! the state machine and its own transcription of the min-max definition, nothing of the library's inside.

#[path = "../support/machine.rs"]
mod machine;

mod histories;
mod model;
mod splits;

use machine::Host;
use rayon::prelude::*;

#[test]
fn a_thousand_random_histories_equal_the_model() {
    let closed: Vec<usize> = (1..=1000).into_par_iter().map(|seed| histories::run(&Host, seed)).collect();
    histories::report(&closed);
}

#[test]
fn any_split_gives_the_same_bits() {
    splits::any_split_gives_the_same_bits(&Host, 60);
}
