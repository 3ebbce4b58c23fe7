//! Counters against numbers that follow from the kernels.

use super::support::{Arg, Sim};
use ptxsim::stats::Class;

#[test]
fn bank_conflicts_of_a_transposition() {
    let sim = Sim::new("basic", 80);
    let x = vec![0f32; 64 * 64];
    let (dx, out) = (sim.put(&x), sim.space(4 * x.len()));
    let args = [dx, out, Arg::I32(64), Arg::I32(64)];
    let plain = sim.launch("transpose", [2, 2, 1], [32, 8, 1], 0, &args).unwrap();
    let padded = sim.launch("transpose_padded", [2, 2, 1], [32, 8, 1], 0, &args).unwrap();
    // 4 blocks of 8 warps; each warp stores 4 rows and loads 4 columns of the tile.
    let accesses = 4 * 8 * 4;
    assert_eq!(plain.total.shared_requests, 2 * accesses);
    assert_eq!(plain.total.shared_wavefronts, accesses + 32 * accesses);
    assert_eq!(plain.total.shared_conflicts, 31 * accesses);
    assert_eq!(padded.total.shared_wavefronts, 2 * accesses);
    assert_eq!(padded.total.shared_conflicts, 0);
    // 128 bytes a warp, in 4 sectors, in and out.
    assert_eq!(plain.total.global_requests, 2 * accesses);
    assert_eq!(plain.total.global_sectors, 4 * 2 * accesses);
    assert_eq!(plain.total.global_bytes, 128 * 2 * accesses);
    assert_eq!(plain.total.barriers, 4 * 8);
    let at = plain.lines.iter().find(|l| l.counts.shared_conflicts > 0).unwrap();
    assert!(at.line.contains("basic.cu:"), "{}", at.line);
}

#[test]
fn instructions_by_class_and_line() {
    let sim = Sim::new("gemm", 80);
    let (m, n, k) = (64, 64, 96);
    let (a, b, c) = (sim.put(&vec![0u16; m * k]), sim.put(&vec![0u16; k * n]), sim.space(4 * m * n));
    let args = [a, b, c, Arg::I32(64), Arg::I32(64), Arg::I32(96)];
    let stats = sim.launch("gemm", [1; 3], [128, 1, 1], 0, &args).unwrap();
    // A product of 16 x 8 x 16 each.
    assert_eq!(stats.total.mma as usize, (m / 16) * (n / 8) * (k / 16));
    assert_eq!(stats.classes[&Class::Matrix], [stats.total.mma, 32 * stats.total.mma]);
    // Every element of A and B is read once by 16-byte copies: no sector twice.
    let bytes = 2 * (m * k + k * n) as u64;
    let copies = stats.lines.iter().filter(|l| l.counts.global_bytes == bytes).count();
    assert_eq!(copies, 1, "one line issues all copies");
    assert_eq!(stats.total.global_bytes, bytes + 4 * (m * n) as u64);
    assert_eq!(stats.total.global_sectors, (bytes + 4 * (m * n) as u64) / 32);
    assert_eq!(stats.total.shared_conflicts, 0, "the pitches avoid conflicts");
    let lines: u64 = stats.lines.iter().map(|l| l.counts.warp_instructions).sum();
    let classes: u64 = stats.classes.values().map(|c| c[0]).sum();
    assert_eq!((lines, classes), (stats.total.warp_instructions, stats.total.warp_instructions));
}

/// Half of the warp returns early, the rest waits for that at a barrier; then a branch table with three targets.
const EARLY: &str = r"
.version 7.0
.target sm_80
.address_size 64
.visible .entry early()
{
    .reg .b32 %r<4>; .reg .pred %p<2>;
    mov.u32 %r0, %tid.x;
    setp.ge.u32 %p0, %r0, 16;
    @%p0 bra OUT;
    bar.sync 0;
    rem.u32 %r1, %r0, 3;
ts: .branchtargets A, B, C;
    brx.idx %r1, ts;
A:  bra OUT;
B:  bra OUT;
C:  bra OUT;
OUT:
    ret;
}";

#[test]
fn an_instruction_is_counted_when_it_runs() {
    let sim = Sim::of(EARLY, 80);
    let stats = sim.run("early", 1, 32, &[]).unwrap();
    let at = |line: &str| stats.lines.iter().find(|l| l.line == line).unwrap().counts;
    let counts = |line: &str| (at(line).warp_instructions, at(line).thread_instructions);
    assert_eq!(counts("ptx:11"), (1, 16), "the barrier waits once and runs once");
    // Three targets: the warp runs it three times, each lane once.
    assert_eq!(counts("ptx:14"), (3, 16));
    assert_eq!(stats.total.barriers, 1);
}
