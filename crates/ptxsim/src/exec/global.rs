//! Global memory: finding allocations, checking and counting.

use super::regs::{LANES, Mask, Trouble, WideRow};
use super::warp::{each, try_each};
use crate::fault::FaultKind;
use crate::memory::{Allocation, View};
use crate::stats::Counts;
use std::sync::Arc;

/// Counts the request of a warp: bytes, sectors of 32 bytes.
pub(super) fn count(counts: &mut Counts, addresses: &WideRow, mask: Mask, bytes: u32) {
    counts.global_requests += 1;
    counts.global_bytes += u64::from(mask.count_ones() * bytes);
    let bytes = u64::from(bytes);
    // Most requests of full warps are one after the other, at the same distance.
    if mask == Mask::MAX {
        let step = addresses[1].wrapping_sub(addresses[0]);
        if step <= 32 && addresses.windows(2).all(|w| w[1].wrapping_sub(w[0]) == step) {
            let (first, end) = (addresses[0] / 32, (addresses[LANES - 1] + bytes - 1) / 32);
            // No sector between is left out: neighbours are at most a sector apart.
            counts.global_sectors += end - first + 1;
            counts.l2_sectors += end - first + 1;
            return;
        }
    }
    // Sectors in lane order; most requests are ascending, so comparing with the last one finds nearly all repeats.
    let mut sectors = [0u64; 2 * LANES];
    let mut n = 0;
    let mut last = u64::MAX;
    let mut ascending = true;
    each(mask, |l| {
        let (first, end) = (addresses[l] / 32, (addresses[l] + bytes - 1) / 32);
        for s in first..=end {
            if s != last && n < sectors.len() {
                ascending &= last == u64::MAX || s > last;
                sectors[n] = s;
                n += 1;
                last = s;
            }
        }
    });
    if !ascending {
        sectors[..n].sort_unstable();
        let mut unique = 0;
        let mut last = u64::MAX;
        for s in &sectors[..n] {
            unique += usize::from(*s != last);
            last = *s;
        }
        n = unique;
    }
    counts.global_sectors += n as u64;
    counts.l2_sectors += n as u64;
}

/// Sectors that fit into what a warp has of the first-level cache: 8 KB, as where sixteen warps share 128 KB.
const RECENT: usize = 256;
/// Places that a sector may have there. With one, the codes of a page would drive out its pairs, which lie a multiple of the size behind.
const WAYS: usize = 4;

/// The sectors that a warp loaded last; of those with the same places the last one used comes first.
#[derive(Debug, Default)]
pub(super) struct Recent(Vec<[u64; WAYS]>);

impl Recent {
    /// For a new block.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Whether a sector is there; it is from now on.
    fn holds(&mut self, sector: u64) -> bool {
        if self.0.is_empty() {
            self.0.resize(RECENT / WAYS, [u64::MAX; WAYS]);
        }
        let set = &mut self.0[sector as usize % (RECENT / WAYS)];
        let found = set.iter().position(|s| *s == sector);
        set[..=found.unwrap_or(WAYS - 1)].rotate_right(1);
        set[0] = sector;
        found.is_some()
    }
}

/// Counts the request of a load, as [`count`], behind a first-level cache.
pub(super) fn count_cached(
    counts: &mut Counts,
    recent: &mut Recent,
    addresses: &WideRow,
    mask: Mask,
    bytes: u32,
) {
    let before = counts.l2_sectors;
    count(counts, addresses, mask, bytes);
    let mut fetched = 0;
    each(mask, |l| {
        let (first, end) = (addresses[l] / 32, (addresses[l] + u64::from(bytes) - 1) / 32);
        (first..=end).for_each(|s| fetched += u64::from(!recent.holds(s)));
    });
    counts.l2_sectors = before + fetched;
}

/// The allocation that holds an address.
pub(super) fn find<'a>(view: &'a View, last: &mut usize, address: u64) -> Option<&'a Arc<Allocation>> {
    let inside = |a: &Allocation| address >= a.base() && address - a.base() < a.bytes().max(1);
    if let Some(a) = view.get(*last)
        && inside(a)
    {
        return Some(a);
    }
    let at = view.partition_point(|a| a.base() <= address).checked_sub(1)?;
    let a = &view[at];
    inside(a).then(|| {
        *last = at;
        a
    })
}

/// An access outside every allocation.
#[cold]
pub(super) fn outside(view: &View, address: u64, bytes: u32, lane: usize) -> Box<Trouble> {
    let message = view.describe(address, bytes.into());
    Box::new(Trouble { kind: FaultKind::OutOfBounds, lane: lane as u32, message })
}

/// Refuses addresses that are not multiples of the access.
pub(super) fn check_alignment(addresses: &WideRow, mask: Mask, bytes: u32) -> Result<(), Box<Trouble>> {
    let low = u64::from(bytes) - 1;
    if bytes.is_power_of_two() && mask == Mask::MAX && addresses.iter().fold(0, |a, b| a | b) & low == 0 {
        return Ok(());
    }
    try_each(mask, |l| {
        if addresses[l].is_multiple_of(u64::from(bytes)) {
            return Ok(());
        }
        let message = format!("the address {:#x} is no multiple of {bytes}", addresses[l]);
        Err(Box::new(Trouble { kind: FaultKind::Misaligned, lane: l as u32, message }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sectors_are_counted_once_each() {
        let count = |f: &dyn Fn(u64) -> u64, mask: Mask, bytes: u32| {
            let mut c = Counts::default();
            super::count(&mut c, &std::array::from_fn(|l| 0x1000 + f(l as u64)), mask, bytes);
            c.global_sectors
        };
        assert_eq!(count(&|l| 4 * l, Mask::MAX, 4), 4);
        assert_eq!(count(&|l| 16 * l, Mask::MAX, 16), 16);
        assert_eq!(count(&|_| 0, Mask::MAX, 4), 1);
        assert_eq!(count(&|l| 128 * l, Mask::MAX, 4), 32);
        assert_eq!(count(&|l| 4 * (31 - l), Mask::MAX, 4), 4);
        assert_eq!(count(&|l| 4 * (l % 2) * 64, Mask::MAX, 4), 2);
        assert_eq!(count(&|l| 4 * l + 16, Mask::MAX, 4), 5);
        assert_eq!(count(&|l| 4 * l, 1, 4), 1);
    }

    #[test]
    fn loads_find_what_the_warp_loaded_last() {
        let (mut c, mut recent) = (Counts::default(), Recent::default());
        let mut load = |first: u64| {
            let before = c.l2_sectors;
            let at = std::array::from_fn(|l| first + 4 * l as u64);
            count_cached(&mut c, &mut recent, &at, Mask::MAX, 4);
            c.l2_sectors - before
        };
        assert_eq!([load(0), load(0), load(64)], [4, 0, 2]);
        // Sectors 2 KB apart have the same four places: a fifth takes that of the one used longest ago.
        assert_eq!([load(2048), load(4096), load(6144), load(0), load(8192)], [4, 4, 4, 0, 4]);
        assert_eq!([load(2048), load(0)], [4, 0]);
        assert_eq!(c.global_sectors, 40);
        recent.clear();
        count_cached(&mut c, &mut recent, &[64; LANES], Mask::MAX, 4);
        assert_eq!(c.l2_sectors, 27);
    }
}
