//! Order between warps without barriers, and functions behind tables.

use super::support::{Arg, Random, Sim, kind, variants};
use ptxsim::fault::FaultKind;

#[test]
fn flags_locks_and_tickets_order_accesses() {
    let mut sim = Sim::new("order", 80);
    for options in variants() {
        sim.options = options;
        let reversed: Vec<i32> = (0..32).rev().collect();
        let out = sim.space(512);
        sim.run("good_flag", 1, 64, &[out]).unwrap_or_else(|f| panic!("{f}"));
        assert_eq!(sim.get::<i32>(out, 32), reversed);
        let (flag, out) = (sim.put(&[0i32]), sim.space(128));
        sim.run("good_global_flag", 1, 64, &[flag, out]).unwrap_or_else(|f| panic!("{f}"));
        assert_eq!(sim.get::<i32>(out, 32), reversed);
        sim.run("good_lock", 1, 128, &[out]).unwrap_or_else(|f| panic!("{f}"));
        assert_eq!(sim.get::<i32>(out, 1), [5 * (1 + 2 + 3 + 4)]);
        sim.run("good_ticket", 1, 128, &[out]).unwrap_or_else(|f| panic!("{f}"));
        assert_eq!(sim.get::<i32>(out, 1), [32 + 64 + 96]);
        let out = sim.space(256);
        sim.run("good_same_value", 1, 64, &[out]).unwrap_or_else(|f| panic!("{f}"));
        assert_eq!(sim.get::<i32>(out, 64), [1; 64]);
    }
}

#[test]
fn without_a_fence_they_do_not() {
    let mut sim = Sim::new("order", 80);
    for options in variants().into_iter().filter(|o| o.races) {
        sim.options = options;
        let out = sim.space(256);
        for (kernel, threads, fault) in [
            ("bad_flag", 64, FaultKind::Race),
            ("bad_ticket", 128, FaultKind::Race),
            ("bad_strong_and_weak", 64, FaultKind::Race),
            ("bad_fence_in_warp", 32, FaultKind::WarpRace),
        ] {
            let f = sim.run(kernel, 1, threads, &[out]).expect_err(kernel);
            assert_eq!(f.kind, fault, "{kernel}: {f}");
        }
    }
}

#[test]
fn tiles_of_several_warps_use_reserved_memory() {
    let mut sim = Sim::new("order", 80);
    for options in variants() {
        sim.options = options;
        let x: Vec<i32> = (0..128).map(|i| i * 5 - 7).collect();
        let (dx, out) = (sim.put(&x), sim.space(512));
        sim.run("good_tile", 1, 128, &[dx, out]).unwrap_or_else(|f| panic!("{f}"));
        let want: Vec<i32> = (0..128).map(|i| x[i / 64 * 64..][..64].iter().sum::<i32>() + 7).collect();
        assert_eq!(sim.get::<i32>(out, 128), want);
    }
}

#[test]
fn functions_in_tables_are_judged_when_they_are_called() {
    let sim = Sim::new("tables", 80);
    let out = sim.space(128);
    sim.run("good_virtual", 1, 32, &[out]).unwrap_or_else(|f| panic!("{f}"));
    let want: Vec<i32> = (0..32).map(|i| if i % 2 == 0 { i + 3 } else { i * i + 3 }).collect();
    assert_eq!(sim.get::<i32>(out, 32), want);

    // One call is none too many; the second one is.
    let run = |n: i32| sim.run("bad_recursion", 1, 1, &[sim.put(&[n]), out]);
    run(0).unwrap_or_else(|f| panic!("{f}"));
    let f = run(1).unwrap_err();
    assert!(f.kind == FaultKind::Trap && f.message.contains("recursion"), "{f}");
    assert_eq!(kind(run(3)), FaultKind::Trap);
}

#[test]
fn division_of_128_bits() {
    let sim = Sim::new("tables", 80);
    let mut r = Random(11);
    let mut word = |bits: u32| {
        (u64::from(r.next()) << 33 ^ u64::from(r.next()) << 11 ^ u64::from(r.next())) >> (64 - bits)
    };
    for round in 0..8 {
        let high: Vec<u64> = (0..32).map(|i| if round == 0 { 0 } else { word(1 + i * 2) }).collect();
        let low: Vec<u64> = (0..32).map(|_| word(64)).collect();
        let by: Vec<u64> = (0..32).map(|i| word(64 - 2 * i).max(1)).collect();
        let out = sim.space(512);
        let args: [Arg; 4] = [sim.put(&high), sim.put(&low), sim.put(&by), out];
        sim.run("divide128", 1, 32, &args).unwrap_or_else(|f| panic!("{f}"));
        let want: Vec<u64> = (0..32)
            .flat_map(|i| {
                let q = (u128::from(high[i]) << 64 | u128::from(low[i])) / u128::from(by[i]);
                [q as u64, (q >> 64) as u64]
            })
            .collect();
        assert_eq!(sim.get::<u64>(out, 64), want);
    }
}

#[test]
fn blocks_may_wait_for_resident_ones() {
    let mut sim = Sim::new("order", 80);
    for options in variants() {
        sim.options = options;
        let (turn, out) = (sim.put(&[0i32]), sim.space(4 * 20));
        sim.run("good_chain", 20, 32, &[turn, out]).unwrap_or_else(|f| panic!("{f}"));
        assert_eq!(sim.get::<i32>(out, 20), (0..20).map(|i| i * (i + 1) / 2).collect::<Vec<i32>>());
        let (turn, out) = (sim.put(&[0i32]), sim.space(4 * 20));
        sim.run("good_chain_back", 20, 32, &[turn, out]).unwrap_or_else(|f| panic!("{f}"));
        assert_eq!(sim.get::<i32>(out, 20), (0..20).map(|i| (i..20).sum()).collect::<Vec<i32>>());
    }
    // More blocks than the card holds at once: earlier ones go first.
    let (turn, out) = (sim.put(&[0i32]), sim.space(4 * 300));
    sim.run("good_chain", 300, 32, &[turn, out]).unwrap_or_else(|f| panic!("{f}"));
    assert_eq!(sim.get::<i32>(out, 300)[299], 299 * 300 / 2);
}
