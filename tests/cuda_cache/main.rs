//! The cache on a device: the state machine's suite, and everything against the cache on the CPU, to the bit.

#[path = "../state_machine/attention.rs"]
mod attention;
#[path = "../support/device.rs"]
mod device;
#[path = "../support/formats.rs"]
#[allow(dead_code)]
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
#[path = "../state_machine/splits.rs"]
mod splits;

mod calls;
mod model_loop;
mod owners;
mod twins;

use device::OnGpu;
use machine::on;

on!(
    OnGpu::new(),
    paged: blocks_below_every_sliding_window_are_given_back,
    padding_is_skipped_in_windowed_mode,
    a_prefix_outlives_its_sequence,
    ranges_that_see_each_other_are_for_prefill,
    a_step_ends_when_its_blocks_are_released,
    blocks_of_seats_and_prefixes_are_not_the_callers,
    imports_leave_the_other_sequences_their_blocks
);

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
