//! The kernels against reference data made by the library's peers: `cargo test --release --features cuda --test cuda_golden`.
//!
//! The cases, classes and limits of the test `golden`, through the launch functions; and every result has the bits of the CPU
//! function (any NaN is equal to any other). Classes f and g need attention on the device: they are counted only.

#[path = "../support/golden.rs"]
#[allow(dead_code)]
mod golden;
#[path = "../support/gpu.rs"]
#[allow(dead_code)]
mod gpu;
#[path = "../support/host.rs"]
#[allow(dead_code)]
mod host;

#[path = "../support/golden/affine.rs"]
mod affine;
#[path = "../support/golden/fits.rs"]
mod fits;
#[path = "../support/golden/fp8.rs"]
mod fp8;
#[path = "../support/golden/functions.rs"]
mod functions;
#[path = "../support/golden/hqq.rs"]
#[allow(dead_code)]
mod hqq;
#[path = "../support/golden/report.rs"]
mod report;
#[path = "../support/golden/views.rs"]
#[allow(dead_code)]
mod views;

mod launches;

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
    for case in &golden.cases {
        if case.is_attention() {
            report.count('f', case);
        }
        if case.is_trace() {
            report.count('g', case);
        }
    }
    gpu.finish(&mut report);
    report.finish(&golden, "fg");
}
