//! The kernels against reference data made by the library's peers: `cargo test --release --features cuda --test cuda_golden`.
//!
//! The cases, classes and limits of the test `golden`, through the launch functions; and every result has the bits of the CPU
//! function (any NaN is equal to any other). Attention goes through a cache on the device: what is
//! exact there keeps the CPU's limit of 1e-5; where weights or products are in f16, outputs may be twice as far from f64 as f16
//! arithmetic that decodes each element.

#[path = "../support/device.rs"]
mod device;
#[path = "../support/golden.rs"]
#[allow(dead_code)]
mod golden;
#[path = "../support/gpu.rs"]
#[allow(dead_code)]
mod gpu;
#[path = "../support/host.rs"]
#[allow(dead_code)]
mod host;
#[path = "../support/machine.rs"]
#[allow(dead_code)]
mod machine;
#[path = "../support/reference.rs"]
#[allow(dead_code)]
mod reference;

#[path = "../support/golden/affine.rs"]
mod affine;
#[path = "../support/golden/fits.rs"]
mod fits;
#[path = "../support/golden/fp8.rs"]
mod fp8;
#[path = "../support/golden/functions.rs"]
mod functions;
#[path = "../support/golden/hqq.rs"]
mod hqq;
#[path = "../support/golden/report.rs"]
mod report;
#[path = "../support/golden/through_cache.rs"]
mod through_cache;
#[path = "../support/golden/traces.rs"]
mod traces;
#[path = "../support/golden/views.rs"]
mod views;

mod launches;

use device::OnGpu;
use golden::Golden;
use launches::Launches;
use report::Report;

#[test]
fn golden() {
    let golden = Golden::open();
    let gpu = Launches::new();
    let mut report = Report::default();
    affine::run(&gpu, &golden, &mut report);
    hqq::run(&gpu, &golden, &mut report);
    fits::run(&gpu, &golden, &mut report);
    fp8::run(&gpu, &golden, &mut report);
    through_cache::run(&OnGpu::new(), &golden, &mut report);
    traces::run(&gpu, &golden, &mut report);
    gpu.finish(&mut report);
    report.finish(&golden);
}
