//! Every check has a kernel that trips it and a twin that does not.

use super::support::{Arg, Sim, kind};
use ptxsim::fault::FaultKind;
use ptxsim::options::{Options, Uninitialized};

fn sim() -> Sim {
    Sim::new("checks", 80)
}

/// Runs `bad_name` and `good_name` with these arguments, the last one an output of 64 words.
fn twins(name: &str, threads: u32, inputs: &[Arg], sim: &Sim, fault: FaultKind, want: &dyn Fn(usize) -> i32) {
    let out = sim.put(&[-1i32; 64]);
    let args = [inputs, &[out]].concat();
    let f = sim.run(&format!("bad_{name}"), 1, threads, &args).expect_err(name);
    assert_eq!(f.kind, fault, "{f}");
    assert!(f.kernel == format!("bad_{name}") && f.ptx_line > 0, "{f}");
    assert!(f.source.as_ref().is_some_and(|s| s.contains("checks.cu:")), "{f}");
    for seed in [None, Some(1), Some(77)] {
        let sim = Sim { options: Options { shuffle_seed: seed, ..sim.options }, ..self::sim() };
        let out = sim.put(&[-1i32; 64]);
        let inputs = again(&sim, inputs.len());
        let all = [&inputs[..], &[out]].concat();
        sim.run(&format!("good_{name}"), 1, threads, &all).unwrap_or_else(|f| panic!("{f}"));
        let got = sim.get::<i32>(out, threads as usize);
        assert_eq!(got, (0..threads as usize).map(want).collect::<Vec<_>>(), "good_{name}");
    }
}

/// The one input that these kernels have: 64 words, x[i] = 3 i.
fn again(sim: &Sim, n: usize) -> Vec<Arg> {
    (0..n).map(|_| sim.put(&(0..64).map(|i| 3 * i).collect::<Vec<i32>>())).collect()
}

#[test]
fn races_between_warps() {
    let s = sim();
    twins("missing_barrier", 64, &[], &s, FaultKind::Race, &|t| 63 - t as i32);
}

#[test]
fn races_in_one_warp() {
    let s = sim();
    twins("warp_race", 32, &[], &s, FaultKind::WarpRace, &|t| 31 - t as i32);
    twins("same_word", 32, &[], &s, FaultKind::WarpRace, &|_| 31);
    // The class can be allowed by name: lanes of a warp advance together here.
    let allowed = Sim { options: Options { warp_races: false, ..Options::default() }, ..sim() };
    let out = allowed.put(&[-1i32; 64]);
    allowed.run("bad_warp_race", 1, 32, &[out]).unwrap();
    assert_eq!(allowed.get::<i32>(out, 32), (0..32).rev().collect::<Vec<_>>());
}

#[test]
fn atomics_do_not_race() {
    let s = sim();
    let out = s.space(256);
    s.run("good_atomics", 1, 64, &[out]).unwrap();
    assert_eq!(s.get::<i32>(out, 64), [64; 64]);
}

#[test]
fn asynchronous_copies_have_to_be_waited_for() {
    let s = sim();
    let x = again(&s, 1);
    twins("missing_wait", 32, &x, &s, FaultKind::InFlight, &|t| 3 * t as i32);
    twins("wait_count", 32, &x, &s, FaultKind::InFlight, &|t| 3 * (2 * t as i32 + 32));
    twins("wait_without_barrier", 64, &x, &s, FaultKind::Race, &|t| 3 * (63 - t as i32));
}

#[test]
fn accesses_outside_are_named() {
    let s = sim();
    let (x, out) = (s.put(&[1i32; 100]), s.space(400));
    let f = s.run("bad_past_end", 1, 64, &[x, out, Arg::I32(100)]).unwrap_err();
    assert_eq!(f.kind, FaultKind::OutOfBounds);
    assert!(f.message.contains("0 bytes after the end of an allocation of 400 bytes"), "{f}");
    assert_eq!(f.thread, [36, 0, 0], "the thread that reads element 100");
    s.run("good_past_end", 1, 64, &[x, out, Arg::I32(100)]).unwrap();

    for i in [100, -1, 1 << 40] {
        assert_eq!(kind(s.run("store_at", 1, 1, &[x, Arg::I64(i), Arg::I32(5)])), FaultKind::OutOfBounds);
    }
    s.run("store_at", 1, 1, &[x, Arg::I64(99), Arg::I32(5)]).unwrap();
    assert_eq!(s.get::<i32>(x, 100)[99], 5);
    let Arg::Ptr(address) = x else { panic!() };
    s.memory.free(address).unwrap();
    assert_eq!(kind(s.run("store_at", 1, 1, &[x, Arg::I64(0), Arg::I32(5)])), FaultKind::OutOfBounds);
    assert_eq!(
        kind(s.run("store_at", 1, 1, &[Arg::Ptr(0), Arg::I64(0), Arg::I32(5)])),
        FaultKind::OutOfBounds
    );

    let out = s.space(400);
    assert_eq!(kind(s.launch("bad_shared_end", [1; 3], [64, 1, 1], 256, &[out])), FaultKind::OutOfBounds);
    s.launch("good_shared_end", [1; 3], [64, 1, 1], 256, &[out]).unwrap();

    let index = s.put(&[7i32]);
    let f = s.run("local_array_at", 1, 2, &[index, out]).unwrap_err();
    assert!(matches!(f.kind, FaultKind::Local | FaultKind::Uninitialized), "{f}");
    let index = s.put(&[6i32]);
    s.run("local_array_at", 1, 2, &[index, out]).unwrap();
    assert_eq!(s.get::<i32>(out, 2), [36, 49]);
}

#[test]
fn vectors_have_to_be_aligned() {
    let s = sim();
    let (x, out) = (s.put(&[0.5f32; 16]), s.space(4));
    assert_eq!(kind(s.run("bad_misaligned", 1, 1, &[x, out])), FaultKind::Misaligned);
    s.run("good_misaligned", 1, 1, &[x, out]).unwrap();
    assert_eq!(s.get::<f32>(out, 1), [2.0]);
}

#[test]
fn memory_that_was_never_written() {
    let s = sim();
    let out = s.space(256);
    assert_eq!(kind(s.run("bad_uninitialized_shared", 1, 32, &[out])), FaultKind::Uninitialized);
    s.run("good_uninitialized_shared", 1, 32, &[out]).unwrap();
    // Strictly a read is a read; by use, a row that is masked afterwards is none.
    assert_eq!(kind(s.run("masked_uninitialized_shared", 1, 32, &[out])), FaultKind::Uninitialized);
    let by_use = Options { uninitialized_shared: Uninitialized::OnUse, ..Options::default() };
    let s = Sim { options: by_use, ..sim() };
    let out = s.space(256);
    s.run("masked_uninitialized_shared", 1, 32, &[out]).unwrap();
    assert_eq!(kind(s.run("bad_uninitialized_shared", 1, 32, &[out])), FaultKind::Uninitialized);

    let (fresh, out) = (s.space(128), s.space(128));
    assert_eq!(kind(s.run("copy", 1, 32, &[fresh, out])), FaultKind::Uninitialized);
    let written = s.put(&[1i32; 32]);
    s.run("copy", 1, 32, &[written, out]).unwrap();
    let by_use = Options { uninitialized_global: Uninitialized::OnUse, ..Options::default() };
    let s = Sim { options: by_use, ..sim() };
    let (fresh, out) = (s.space(128), s.space(128));
    let f = s.run("copy", 1, 32, &[fresh, out]).unwrap_err();
    assert!(f.kind == FaultKind::Uninitialized && f.message.contains("stored value"), "{f}");
}

#[test]
fn barriers_shuffles_and_loops() {
    let s = sim();
    twins("divergent_barrier", 32, &[], &s, FaultKind::Divergence, &|t| i32::from(t % 2 == 0));
    twins("deadlock", 64, &[], &s, FaultKind::Deadlock, &|t| t as i32);
    let out = s.put(&[-1i32; 64]);
    assert_eq!(kind(s.run("bad_shuffle", 1, 32, &[out])), FaultKind::Shuffle);
    assert_eq!(kind(s.run("bad_shuffle_mask", 1, 32, &[out])), FaultKind::Shuffle);
    let out = s.put(&[-1i32; 64]);
    s.run("good_shuffle", 1, 32, &[out]).unwrap();
    assert_eq!(s.get::<i32>(out, 32), [[12; 16], [-1; 16]].concat());
    s.run("good_early_exit", 1, 64, &[out]).unwrap();
    assert_eq!(s.get::<i32>(out, 32), (0..32).collect::<Vec<_>>());

    let f = s.run("bad_trap", 1, 32, &[out]).unwrap_err();
    assert_eq!((f.kind, f.thread), (FaultKind::Trap, [7, 0, 0]));

    let limited = Sim { options: Options { instruction_limit: 1_000_000, ..Options::default() }, ..sim() };
    let (zero, one) = (limited.put(&[0i32]), limited.put(&[1i32]));
    let out = limited.space(4);
    assert_eq!(kind(limited.run("wait_for", 1, 1, &[zero, out])), FaultKind::Runaway);
    limited.run("wait_for", 1, 1, &[one, out]).unwrap();
}

#[test]
fn lanes_of_a_warp_get_on_while_others_spin() {
    let s = Sim { options: Options { instruction_limit: 50_000_000, ..Options::default() }, ..sim() };
    let (lock, count) = (s.put(&[0i32]), s.put(&[0i32]));
    s.run("good_warp_lock", 1, 32, &[lock, count]).unwrap();
    assert_eq!(s.get::<i32>(count, 1), [32]);
}

#[test]
fn a_failed_assertion_says_what_failed() {
    let s = Sim::new("assert", 80);
    let (x, out) = (s.put(&[1i32, 2, -3, 4]), s.space(16));
    let f = s.run("checked_copy", 1, 4, &[x, out]).unwrap_err();
    assert_eq!((f.kind, f.thread), (FaultKind::Assert, [2, 0, 0]));
    assert!(f.message.contains("x[threadIdx.x] >= 0"), "{f}");
    s.run("checked_copy", 1, 2, &[x, out]).unwrap();
}
