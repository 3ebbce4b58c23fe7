//! Order between warps by strong accesses and fences: flags, locks, tickets. PTX ISA 8.8 to 8.10.
//!
//! A fence notes what its warp knows; a strong write after it shows that at its place (a release pattern, as a write with
//! `.release` does at once). A strong read takes it along, and the next fence lets it count (an acquire pattern, as a read
//! with `.acquire` does at once). Places may lie in global memory and still order accesses to shared memory.

use super::gang::Context;
use super::regs::{Mask, WideRow};
use super::shared::Shared;
use super::warp::{Warp, each};
use crate::memory::{SHARED_BASE, SHARED_STRIDE, WINDOW};
use crate::program::Where;

/// Keys of places in shared memory have this bit; device addresses do not.
const IN_SHARED: u64 = 1 << 63;

/// The first block of the warp's cluster.
fn home(cx: &Context<'_>, warp: &Warp) -> usize {
    warp.block / cx.cluster_size * cx.cluster_size
}

/// What names the word that an address means.
fn key(cx: &Context<'_>, warp: &Warp, space: Where, address: u64) -> u64 {
    let inside = address.wrapping_sub(SHARED_BASE) < WINDOW;
    if !(inside || matches!(space, Where::Shared | Where::Cluster)) {
        return address & !3;
    }
    let at = if inside { address - SHARED_BASE } else { address };
    let own = (warp.block % cx.cluster_size) as u64;
    let rank = (at / SHARED_STRIDE).checked_sub(1).unwrap_or(own);
    IN_SHARED | rank << 32 | (at % SHARED_STRIDE) & !3
}

fn learn(to: &mut Vec<u32>, from: &[u32]) {
    if to.len() < from.len() {
        to.resize(from.len(), 0);
    }
    to.iter_mut().zip(from).for_each(|(a, b)| *a = (*a).max(*b));
}

/// After a strong read.
pub(super) fn seen(
    cx: &Context<'_>,
    warp: &mut Warp,
    shared: &[Shared],
    mask: Mask,
    at: &WideRow,
    space: Where,
    acquire: bool,
) {
    let Some(home) = shared.get(home(cx, warp)) else { return };
    if !cx.options.races || home.signals.is_empty() {
        return;
    }
    each(mask, |l| {
        if let Some(clocks) = home.signals.get(&key(cx, warp, space, at[l])) {
            learn(if acquire { &mut warp.clocks } else { &mut warp.seen }, clocks);
        }
    });
}

/// After a strong write.
pub(super) fn shown(
    cx: &Context<'_>,
    warp: &mut Warp,
    shared: &mut [Shared],
    mask: Mask,
    at: &WideRow,
    space: Where,
    release: bool,
) {
    // Only shared memory is checked for races.
    if !cx.options.races || cx.shared_bytes == 0 || !release && warp.published.is_empty() {
        return;
    }
    let Some(home) = shared.get_mut(home(cx, warp)) else { return };
    let clocks = if release { &warp.clocks } else { &warp.published };
    each(mask, |l| learn(home.signals.entry(key(cx, warp, space, at[l])).or_default(), clocks));
    if release {
        warp.clocks[warp.id] += 1;
    }
}
