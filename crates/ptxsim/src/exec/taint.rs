//! How dependence on memory that was never written goes through registers.

use super::regs::{File, Mask, Taint};
use super::rows::{set_taint, taint_of};
use super::warp::Warp;
use crate::program::Flow;

/// After an operation ran in `mask`: marks its destinations.
pub(super) fn spread(warp: &mut Warp, flow: &Flow, mask: Mask) {
    let Some(rule) = flow.taint else { return };
    let of = |w: &Warp, i: usize| flow.from.get(i).map_or(0, |r| taint_of(w, *r));
    let any = (0..flow.from.len()).fold(0, |t, i| t | of(warp, i));
    let tainted = match rule {
        Taint::Lanes => any,
        Taint::Select => {
            let p = flow.from.get(2).filter(|r| r.file == File::Pred);
            let chosen = p.map_or(0, |r| warp.regs.preds[r.row as usize]);
            of(warp, 0) & chosen | of(warp, 1) & !chosen | of(warp, 2)
        }
        Taint::All => spread_all(any & mask),
        Taint::Shuffle => spread_all(of(warp, 0) & mask) | any,
        Taint::Matrix => return matrix(warp, flow, mask),
    };
    for to in &*flow.to {
        set_taint(warp, *to, tainted, mask);
    }
}

fn spread_all(any: Mask) -> Mask {
    if any == 0 { 0 } else { Mask::MAX }
}

/// Of an `mma`: lanes of a group of four hold a row of A, C and D; a column of B is held by the four lanes of its group too.
/// A tainted row of A taints its row of D; anything tainted in B taints all of D, because every lane holds some columns of
/// every row it has.
fn matrix(warp: &mut Warp, flow: &Flow, mask: Mask) {
    // D comes first and C last, with as many registers each; A is before B.
    let d = flow.to.len();
    let inputs = flow.from.len().saturating_sub(d);
    let taint = |w: &Warp, range: std::ops::Range<usize>| {
        flow.from.get(range).into_iter().flatten().fold(0, |t, r| t | taint_of(w, *r))
    };
    let rows = |t: Mask| (0..8).fold(0, |m, g| if t >> (4 * g) & 0xf != 0 { m | 0xf << (4 * g) } else { m });
    // A has at least half of the registers of A and B.
    let a = rows(taint(warp, 0..inputs.div_ceil(2)));
    let b = taint(warp, inputs.div_ceil(2)..inputs);
    let c = taint(warp, inputs..flow.from.len());
    let all = a | c | spread_all(b);
    for to in &*flow.to {
        set_taint(warp, *to, all, mask);
    }
}
