//! The library against reference data made by its peers: `cargo test --release --test golden`.
//!
//! Every case of the directory's manifest falls into at least one class, found by what its entry says, never by
//! its name; the test prints a count for each class.
//!
//! | class | what |
//! |---|---|
//! | a | codes for the peer's pair, decoding of the peer's codes, the HQQ solver's codes |
//! | b | our own fits against the peer's error |
//! | c | symmetric formats, decoding only |
//! | d | FP8 bytes |
//! | e | cases the peer cannot compute or leaves undefined |
//! | f | attention over plain tensors, and through a cache |
//! | g | the peers' caches, replayed step by step |

#[path = "../support/golden.rs"]
mod golden;
#[path = "../support/host.rs"]
#[allow(dead_code)]
mod host;
#[path = "../support/machine.rs"]
#[allow(dead_code)]
mod machine;
#[path = "../support/reference.rs"]
mod reference;

// What the CUDA test runs too.
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

mod attention;
mod cpu;

use cpu::Cpu;
use golden::Golden;
use machine::OnCpu;
use report::Report;

#[test]
fn golden() {
    let golden = Golden::open();
    let mut report = Report::default();
    affine::run(&Cpu, &golden, &mut report);
    hqq::run(&Cpu, &golden, &mut report);
    fits::run(&Cpu, &golden, &mut report);
    fp8::run(&Cpu, &golden, &mut report);
    attention::run(&golden, &mut report);
    through_cache::run(&OnCpu, &golden, &mut report);
    traces::run(&Cpu, &golden, &mut report);
    report.finish(&golden);
}
