//! The cache on a device: the state machine's suite, and everything against the cache on the CPU, to the bit.

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
#[path = "../support/machine.rs"]
mod machine;
#[path = "../state_machine/model.rs"]
mod model;
#[path = "../state_machine/splits.rs"]
mod splits;

mod attention;
mod calls;
mod owners;
mod twins;

use device::OnGpu;

#[test]
fn random_histories_equal_the_model() {
    let gpu = OnGpu::new();
    let closed: Vec<usize> = (1..=40).map(|seed| histories::run(&gpu, seed)).collect();
    histories::report(&closed);
}

#[test]
fn any_split_gives_the_same_bits() {
    splits::any_split_gives_the_same_bits(&OnGpu::new(), 6);
}
