//! Instructions across lanes.

use super::*;
use crate::exec::regs::{Sync, Taint};
use crate::fault::FaultKind;

/// The manual's listing of `shfl`: the lane read from and the predicate.
fn listing(mode: &str, lane: i64, b: i64, c: i64) -> (i64, bool) {
    let (bval, cval, mask) = (b & 31, c & 31, c >> 8 & 31);
    let max_lane = (lane & mask) | (cval & !mask & 31);
    let min_lane = lane & mask;
    let (j, ok) = match mode {
        "up" => (lane - bval, lane - bval >= max_lane),
        "down" => (lane + bval, lane + bval <= max_lane),
        "bfly" => (lane ^ bval, (lane ^ bval) <= max_lane),
        _ => {
            let j = min_lane | (bval & !mask & 31);
            (j, j <= max_lane)
        }
    };
    if ok { (j, true) } else { (lane, false) }
}

#[test]
fn shuffles() {
    let mut r = Random(5);
    for mode in ["up", "down", "bfly", "idx"] {
        for options in isas() {
            for with_p in [true, false] {
                let d = if with_p { "r|p" } else { "r" };
                let mut m = Machine::new(&format!("shfl.sync.{mode}.b32 {d}, r, r, r, r"), &options);
                m.set(3, &[0xffff_ffff; LANES]);
                // What compilers emit for widths 32 to 1, and all other clamps and segments.
                let mut controls: Vec<u64> =
                    (0..=5).map(|w| (32 - (1 << w)) << 8 | if mode == "up" { 0 } else { 31 }).collect();
                controls.extend((0..200).map(|_| r.next() & 0x1f1f));
                for c in controls {
                    for b in 0..34u64 {
                        let data: [u64; LANES] = std::array::from_fn(|_| r.next() & 0xffff_ffff);
                        // Lanes may disagree on b.
                        let bs = std::array::from_fn(|lane| if c & 1 == 0 { b } else { b + lane as u64 });
                        m.set(0, &data);
                        m.set(1, &bs);
                        m.set(2, &[c; LANES]);
                        m.run(Mask::MAX).unwrap();
                        for lane in 0..LANES {
                            let (j, ok) = listing(mode, lane as i64, bs[lane] as i64, c as i64);
                            assert_eq!(m.get(0)[lane], data[j as usize], "{mode} b {b} c {c:#x} lane {lane}");
                            if with_p {
                                assert_eq!(
                                    m.get(1)[lane],
                                    u64::from(ok),
                                    "{mode} b {b} c {c:#x} lane {lane}"
                                );
                            }
                        }
                    }
                }
            }
        }
    }
    let form = form_of("shfl.sync.bfly.b32 r|p, r, r, r, r", 80, &Options::default()).unwrap();
    assert_eq!((form.sync, form.taint, form.aligned), (Sync::Members(3), Taint::Shuffle, false));
    assert!(refused("shfl.bfly.b32 r, r, r, r") && refused("shfl.sync.bfly.b64 d, d, r, r, r"));
}

#[test]
fn a_shuffle_from_a_lane_that_is_off_is_reported() {
    let text = "shfl.sync.down.b32 r, r, 1, 31, r";
    let mut m = Machine::new(text, &Options::default());
    m.set(0, &std::array::from_fn(|i| i as u64));
    m.set(1, &[0xffff; LANES]);
    let trouble = m.run(0xffff).unwrap_err();
    assert_eq!((trouble.kind, trouble.lane), (FaultKind::Shuffle, 15));
    assert!(trouble.message.contains("lane 16"), "{}", trouble.message);
    // The mask that does not name its own lane.
    m.set(1, &[0xfffe_ffff; LANES]);
    assert_eq!(m.run(Mask::MAX).unwrap_err().lane, 16);
    let mut quiet = Machine::new(text, &Options { shuffle: false, ..Options::default() });
    quiet.set(1, &[0xffff; LANES]);
    quiet.run(0xffff).unwrap();
    // Out of the segment, a lane reads itself: nothing to report.
    let mut m = Machine::new("shfl.sync.down.b32 r, r, 1, 0x180f, r", &Options::default());
    m.set(1, &[0xffff; LANES]);
    m.run(0xffff).unwrap();
}

/// Two groups of lanes with masks of their own come together as well as one.
fn groups() -> Vec<(Mask, [u64; LANES])> {
    let split = |m: u32| std::array::from_fn(|i| u64::from(if m >> i & 1 != 0 { m } else { !m }));
    vec![
        (Mask::MAX, [0xffff_ffff; LANES]),
        (0x0000_ff0f, [0x0000_ff0f; LANES]),
        (Mask::MAX, split(0x0f0f_3355)),
        (0x8000_0000, [0x8000_0000; LANES]),
    ]
}

fn across(text: &str, inputs: &[[u64; LANES]], model: impl Fn(&[u64; LANES], &[usize], usize) -> Vec<u64>) {
    for options in isas() {
        let mut m = Machine::new(text, &options);
        for input in inputs {
            for (mask, members) in groups() {
                let last = m.sources.len() - 1;
                if last > 0 {
                    m.set(0, input);
                }
                m.set(last, &members);
                let before: Vec<_> = (0..m.destinations.len()).map(|d| m.get(d)).collect();
                m.run(mask).unwrap();
                for lane in 0..LANES {
                    if mask >> lane & 1 == 0 {
                        (0..before.len()).for_each(|d| assert_eq!(m.get(d)[lane], before[d][lane], "{text}"));
                        continue;
                    }
                    let group: Vec<usize> =
                        (0..LANES).filter(|&i| mask >> i & 1 != 0 && members[lane] >> i & 1 != 0).collect();
                    for (d, want) in model(input, &group, lane).into_iter().enumerate() {
                        assert_eq!(m.get(d)[lane], want, "{text} destination {d} lane {lane} of {input:x?}");
                    }
                }
            }
        }
    }
}

#[test]
fn votes() {
    let mut r = Random(2);
    let inputs: Vec<[u64; LANES]> = [0, u64::MAX, 0x8000_0000, 0x0f0f_3355, 0xf0f0_ccaa]
        .into_iter()
        .chain((0..20).map(|_| r.next()))
        .map(|bits| std::array::from_fn(|i| bits >> i & 1))
        .collect();
    let yes = |x: &[u64; LANES], g: &[usize]| g.iter().filter(|&&i| x[i] != 0).count();
    across("vote.sync.all.pred p, p, r", &inputs, |x, g, _| vec![u64::from(yes(x, g) == g.len())]);
    across("vote.sync.any.pred p, p, r", &inputs, |x, g, _| vec![u64::from(yes(x, g) > 0)]);
    across("vote.sync.uni.pred p, p, r", &inputs, |x, g, _| vec![u64::from(yes(x, g) % g.len() == 0)]);
    across("vote.sync.any.pred p, !p, r", &inputs, |x, g, _| vec![u64::from(yes(x, g) < g.len())]);
    across("vote.sync.ballot.b32 r, p, r", &inputs, |x, g, _| vec![g.iter().map(|&i| x[i] << i).sum()]);
    across("elect.sync r|p, r", &inputs[..1], |_, g, lane| vec![g[0] as u64, u64::from(g[0] == lane)]);
    assert!(refused("vote.all.pred p, p") && refused("vote.sync.ballot.pred p, p, r"));
}

#[test]
fn matches_and_reductions() {
    let mut r = Random(4);
    let mut inputs: Vec<[u64; LANES]> = vec![[7; LANES], [0xffff_ffff; LANES]];
    inputs
        .extend((0..20).map(|k| {
            std::array::from_fn(|_| if k % 2 == 0 { r.next() % 3 } else { r.next() & 0xffff_ffff })
        }));
    let same = |x: &[u64; LANES], g: &[usize], lane: usize| {
        g.iter().filter(|&&i| x[i] == x[lane]).map(|&i| 1u64 << i).sum::<u64>()
    };
    let all = |g: &[usize]| g.iter().map(|&i| 1u64 << i).sum::<u64>();
    for (ty, l) in [("b32", "r"), ("b64", "d")] {
        across(&format!("match.any.sync.{ty} r, {l}, r"), &inputs, |x, g, lane| vec![same(x, g, lane)]);
        across(&format!("match.all.sync.{ty} r|p, {l}, r"), &inputs, |x, g, lane| {
            let whole = same(x, g, lane) == all(g);
            vec![if whole { all(g) } else { 0 }, u64::from(whole)]
        });
    }
    let reduce = |x: &[u64; LANES], g: &[usize], f: &dyn Fn(i64, i64) -> i64, signed: bool| {
        let v = |i: usize| if signed { i64::from(x[i] as i32) } else { x[i] as i64 };
        let all = g[1..].iter().fold(v(g[0]), |s, &i| f(s, v(i)));
        vec![all as u64 & 0xffff_ffff]
    };
    for signed in [false, true] {
        let t = if signed { "s32" } else { "u32" };
        across(&format!("redux.sync.add.{t} r, r, r"), &inputs, |x, g, _| {
            reduce(x, g, &|a, b| a + b, signed)
        });
        across(&format!("redux.sync.min.{t} r, r, r"), &inputs, |x, g, _| {
            reduce(x, g, &|a, b| a.min(b), signed)
        });
        across(&format!("redux.sync.max.{t} r, r, r"), &inputs, |x, g, _| {
            reduce(x, g, &|a, b| a.max(b), signed)
        });
    }
    across("redux.sync.and.b32 r, r, r", &inputs, |x, g, _| reduce(x, g, &|a, b| a & b, false));
    across("redux.sync.or.b32 r, r, r", &inputs, |x, g, _| reduce(x, g, &|a, b| a | b, false));
    across("redux.sync.xor.b32 r, r, r", &inputs, |x, g, _| reduce(x, g, &|a, b| a ^ b, false));
    assert!(refused("redux.sync.min.f32 r, r, r") && refused("redux.sync.and.u32 r, r, r"));
}

#[test]
fn active_lanes() {
    let mut m = Machine::new("activemask.b32 r", &Options::default());
    m.run(0x8001).unwrap();
    assert_eq!((m.get(0)[0], m.get(0)[15], m.get(0)[1]), (0x8001, 0x8001, 0));
}

#[test]
fn a_transposed_matrix() {
    for options in isas() {
        let mut m = Machine::new("movmatrix.sync.aligned.m8n8.trans.b16 r, r", &options);
        let element = |row: usize, column: usize| (100 * row + column + 1) as u64;
        let fragment = |f: &dyn Fn(usize, usize) -> u64| {
            std::array::from_fn(|lane| f(lane / 4, lane % 4 * 2) | f(lane / 4, lane % 4 * 2 + 1) << 16)
        };
        m.set(0, &fragment(&element));
        m.run(Mask::MAX).unwrap();
        assert_eq!(m.get(0), fragment(&|r, c| element(c, r)));
    }
    let form = form_of("movmatrix.sync.aligned.m8n8.trans.b16 r, r", 80, &Options::default()).unwrap();
    assert!(form.aligned && form.sync == Sync::Warp);
}
