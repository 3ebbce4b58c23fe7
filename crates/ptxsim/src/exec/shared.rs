//! Shared memory of a block, with what is known about every part of it.
//!
//! Races: each granule (the smallest access of the kernel) remembers who wrote it last and when each warp read it last,
//! in the warps' own time. An access is ordered after another if the warp has learned of that time, through a barrier, an
//! mbarrier or what [`super::order`] follows (vector clocks, as in FastTrack, Flanagan and Freund 2009; all readers are
//! kept instead of one).

use super::mbarrier::MbarrierState;
use super::regs::Trouble;
use super::warp::Warp;
use crate::fault::FaultKind;
use crate::options::{Options, Uninitialized};
use crate::program::Strength;
use std::collections::HashMap;

/// A lane in `last` entries that stands for several.
const MANY: u8 = 0xff;
/// What fresh memory holds: a NaN as f32 and f16.
const PATTERN: u8 = 0xf5;

/// Who touched a granule last.
#[derive(Debug, Clone, Copy, Default)]
struct Touch {
    /// In the warp's time; 0 = never.
    clock: u32,
    /// Its count of warp-level synchronisations.
    sync: u32,
    warp: u16,
    lane: u8,
    strength: Strength,
}

/// Shared memory of one block.
#[derive(Debug, Default)]
pub(super) struct Shared {
    /// Contents.
    pub data: Vec<u8>,
    written: Vec<u64>,
    granule: u32,
    warps: usize,
    /// By granule.
    writers: Vec<Touch>,
    /// By granule and warp: when it was read last.
    reads: Vec<u32>,
    /// By granule: the last reader, for lanes of one warp.
    readers: Vec<Touch>,
    /// By 4 bytes: copies on their way there.
    flights: Vec<u8>,
    /// All of them.
    pub in_flight: usize,
    /// What strong writes of the cluster have shown, by place: kept with its first block. See [`super::order`].
    pub signals: HashMap<u64, Vec<u32>>,
    /// By offset.
    pub mbarriers: HashMap<u32, MbarrierState>,
}

/// Who accesses.
#[derive(Debug, Clone, Copy)]
pub(super) struct Who<'a> {
    /// Index in clocks.
    pub id: usize,
    /// Clocks of the warp.
    pub clocks: &'a [u32],
    /// Its count of synchronisations.
    pub sync: u32,
    /// The lane.
    pub lane: usize,
    /// It acts for several lanes: `ldmatrix` hands a row to four.
    pub several: bool,
}

impl<'a> Who<'a> {
    /// A lane of a warp.
    pub(super) fn of(warp: &'a Warp, lane: usize) -> Self {
        Self { id: warp.id, clocks: &warp.clocks, sync: warp.sync, lane, several: false }
    }
}

impl Who<'_> {
    /// Whether another lane than the one that touched is concerned.
    fn is_other(&self, touch: &Touch) -> bool {
        self.several || touch.lane as usize != self.lane
    }

    /// The lane to remember.
    fn mark(&self) -> u8 {
        if self.several { MANY } else { self.lane as u8 }
    }
}

fn trouble(kind: FaultKind, lane: usize, message: String) -> Box<Trouble> {
    Box::new(Trouble { kind, lane: lane as u32, message })
}

impl Shared {
    /// Fresh memory. Times of earlier blocks have passed, so only what is written has to be forgotten.
    pub(super) fn reset(&mut self, bytes: usize, granule: u32, warps: usize, options: &Options) {
        self.data.clear();
        self.data.resize(bytes.next_multiple_of(16), PATTERN);
        self.written.clear();
        self.written.resize(bytes.div_ceil(64), 0);
        let granules = if options.races || options.warp_races { bytes.div_ceil(granule as usize) } else { 0 };
        if self.granule != granule || self.warps != warps || self.writers.len() != granules {
            (self.granule, self.warps) = (granule, warps);
            self.writers = vec![Touch::default(); granules];
            self.readers = vec![Touch::default(); granules];
            self.reads = vec![0; granules * warps];
        }
        self.flights.clear();
        self.flights.resize(if options.in_flight { bytes.div_ceil(4) } else { 0 }, 0);
        self.in_flight = 0;
        self.mbarriers.clear();
        self.signals.clear();
    }

    /// Forgets all times: they are about to start again.
    pub(super) fn forget_times(&mut self) {
        self.writers.fill(Touch::default());
        self.readers.fill(Touch::default());
        self.reads.fill(0);
    }

    /// 1, 2, 4 or 8 bytes. In bounds: checked by the caller.
    #[inline(always)]
    pub(super) fn load(&self, at: usize, bytes: u32) -> u64 {
        match bytes {
            4 => u32::from_le_bytes(*self.data[at..].first_chunk().unwrap_or(&[0; 4])).into(),
            8 => u64::from_le_bytes(*self.data[at..].first_chunk().unwrap_or(&[0; 8])),
            2 => u16::from_le_bytes(*self.data[at..].first_chunk().unwrap_or(&[0; 2])).into(),
            _ => self.data[at].into(),
        }
    }

    /// Stores the low bytes.
    #[inline(always)]
    pub(super) fn store(&mut self, at: usize, bytes: u32, value: u64) {
        let n = bytes as usize;
        self.data[at..at + n].copy_from_slice(&value.to_le_bytes()[..n]);
    }

    /// Writes zeros, as the system does before a block starts.
    pub(super) fn clear(&mut self, at: usize, bytes: usize) {
        self.data[at..at + bytes].fill(0);
        self.mark(at, bytes);
    }

    /// Marks bytes as written.
    #[inline(always)]
    pub(super) fn mark(&mut self, at: usize, bytes: usize) {
        let (mut at, end) = (at, at + bytes);
        while at < end {
            let n = (64 - at % 64).min(end - at);
            self.written[at / 64] |= (u64::MAX >> (64 - n)) << (at % 64);
            at += n;
        }
    }

    /// Whether bytes were all written.
    #[inline(always)]
    pub(super) fn is_written(&self, at: usize, bytes: usize) -> bool {
        let (mut at, end) = (at, at + bytes);
        while at < end {
            let n = (64 - at % 64).min(end - at);
            let bits = (u64::MAX >> (64 - n)) << (at % 64);
            if self.written[at / 64] & bits != bits {
                return false;
            }
            at += n;
        }
        true
    }

    /// Checks a read of bytes and remembers it. Returns whether they depend on memory that was never written.
    #[inline]
    pub(super) fn check_read(
        &mut self,
        at: usize,
        bytes: usize,
        who: Who<'_>,
        options: &Options,
        strength: Strength,
    ) -> Result<bool, Box<Trouble>> {
        if self.in_flight > 0 {
            self.check_flights(at, bytes, who.lane)?;
        }
        if options.races || options.warp_races {
            self.note_read(at, bytes, who, options, strength)?;
        }
        if options.uninitialized_shared != Uninitialized::Off && !self.is_written(at, bytes) {
            if options.uninitialized_shared == Uninitialized::Strict {
                let message = format!("{bytes} bytes at shared offset {at} were never written");
                return Err(trouble(FaultKind::Uninitialized, who.lane, message));
            }
            return Ok(true);
        }
        Ok(false)
    }

    /// Checks a write of bytes and remembers it. `same` says whether it changes nothing: two threads that write the same
    /// are no race.
    #[inline]
    pub(super) fn check_write(
        &mut self,
        at: usize,
        bytes: usize,
        who: Who<'_>,
        options: &Options,
        same: bool,
        strength: Strength,
    ) -> Result<(), Box<Trouble>> {
        if self.in_flight > 0 {
            self.check_flights(at, bytes, who.lane)?;
        }
        if options.races || options.warp_races {
            self.note_write(at, bytes, who, options, same, strength)?;
        }
        Ok(())
    }

    fn check_flights(&self, at: usize, bytes: usize, lane: usize) -> Result<(), Box<Trouble>> {
        let end = (at + bytes).div_ceil(4).min(self.flights.len());
        if self.flights[(at / 4).min(end)..end].iter().any(|f| *f != 0) {
            let message = format!(
                "{bytes} bytes at shared offset {at} are the destination of an asynchronous copy that was not waited for"
            );
            return Err(trouble(FaultKind::InFlight, lane, message));
        }
        Ok(())
    }

    /// A copy sets out for these bytes, or arrives.
    pub(super) fn flight(&mut self, at: usize, bytes: usize, starts: bool) {
        if self.flights.is_empty() {
            return;
        }
        for f in &mut self.flights[at / 4..(at + bytes).div_ceil(4)] {
            if starts {
                *f = f.saturating_add(1);
                self.in_flight += 1;
            } else if *f > 0 {
                *f -= 1;
                self.in_flight -= 1;
            }
        }
    }

    /// A copy arrived: its bytes count as written now, by the lane that waited for it.
    pub(super) fn rewritten(&mut self, at: usize, bytes: usize, who: Who<'_>) {
        for g in self.granules(at, bytes) {
            self.writers[g] = Touch {
                clock: who.clocks[who.id],
                sync: who.sync,
                warp: who.id as u16,
                lane: who.mark(),
                strength: Strength::Weak,
            };
        }
    }

    /// A bulk copy that was issued at this tick writes these bytes.
    pub(super) fn written_by_copy(&mut self, at: usize, bytes: usize, tick: u32) {
        if self.writers.is_empty() {
            return;
        }
        let warp = (self.warps - 1) as u16;
        for g in self.granules(at, bytes) {
            self.writers[g] = Touch { clock: tick, sync: 0, warp, lane: MANY, strength: Strength::Weak };
        }
    }

    /// One reads these.
    pub(super) fn read_by_copy(&mut self, at: usize, bytes: usize, tick: u32) {
        if self.writers.is_empty() {
            return;
        }
        for g in self.granules(at, bytes) {
            self.reads[g * self.warps + self.warps - 1] = tick;
        }
    }

    #[inline(always)]
    fn granules(&self, at: usize, bytes: usize) -> std::ops::Range<usize> {
        let g = self.granule as usize;
        at / g..(at + bytes).div_ceil(g)
    }

    #[inline]
    fn note_read(
        &mut self,
        at: usize,
        bytes: usize,
        who: Who<'_>,
        options: &Options,
        strength: Strength,
    ) -> Result<(), Box<Trouble>> {
        let now = who.clocks[who.id];
        for g in self.granules(at, bytes) {
            let w = self.writers[g];
            if w.clock != 0 {
                let writer = w.warp as usize;
                let weaker = w.strength.min(strength);
                if writer != who.id {
                    if options.races && weaker == Strength::Weak && w.clock > who.clocks[writer] {
                        return Err(self.race("reads", "wrote", g, &w, who));
                    }
                } else if options.warp_races
                    && weaker < Strength::Strong
                    && w.sync == who.sync
                    && who.is_other(&w)
                {
                    return Err(self.warp_race("reads", "wrote", g, &w, who));
                }
            }
            if strength == Strength::Weak {
                self.reads[g * self.warps + who.id] = now;
            }
            if strength < Strength::Strong {
                let r = &mut self.readers[g];
                let same = r.warp as usize == who.id && r.sync == who.sync && who.is_other(r);
                let lane = if same { MANY } else { who.mark() };
                *r = Touch { clock: now, sync: who.sync, warp: who.id as u16, lane, strength };
            }
        }
        Ok(())
    }

    #[inline]
    fn note_write(
        &mut self,
        at: usize,
        bytes: usize,
        who: Who<'_>,
        options: &Options,
        same: bool,
        strength: Strength,
    ) -> Result<(), Box<Trouble>> {
        let now = who.clocks[who.id];
        for g in self.granules(at, bytes) {
            let w = self.writers[g];
            if w.clock != 0 && !same {
                let writer = w.warp as usize;
                let weaker = w.strength.min(strength);
                if writer != who.id {
                    if options.races && weaker == Strength::Weak && w.clock > who.clocks[writer] {
                        return Err(self.race("writes", "wrote", g, &w, who));
                    }
                } else if options.warp_races
                    && weaker < Strength::Strong
                    && w.sync == who.sync
                    && who.is_other(&w)
                {
                    return Err(self.warp_race("writes", "wrote", g, &w, who));
                }
            }
            if options.races {
                let row = &self.reads[g * self.warps..][..self.warps];
                for (warp, (read, known)) in row.iter().zip(who.clocks).enumerate() {
                    if read > known && warp != who.id {
                        let r = Touch { clock: *read, warp: warp as u16, lane: MANY, ..Touch::default() };
                        return Err(self.race("writes", "read", g, &r, who));
                    }
                }
            }
            let r = self.readers[g];
            if options.warp_races
                && !same
                && r.warp as usize == who.id
                && r.sync == who.sync
                && who.is_other(&r)
            {
                return Err(self.warp_race("writes", "read", g, &r, who));
            }
            self.writers[g] =
                Touch { clock: now, sync: who.sync, warp: who.id as u16, lane: who.mark(), strength };
        }
        Ok(())
    }

    #[cold]
    fn race(&self, does: &str, did: &str, g: usize, other: &Touch, who: Who<'_>) -> Box<Trouble> {
        let at = g * self.granule as usize;
        let message = if other.warp as usize == self.warps - 1 {
            format!(
                "warp {} {does} shared offset {at}, which a bulk copy {did} that it has not waited for",
                who.id
            )
        } else {
            format!(
                "warp {} {does} shared offset {at}, which warp {} {did}, and no barrier orders them",
                who.id, other.warp
            )
        };
        trouble(FaultKind::Race, who.lane, message)
    }

    #[cold]
    fn warp_race(&self, does: &str, did: &str, g: usize, other: &Touch, who: Who<'_>) -> Box<Trouble> {
        let at = g * self.granule as usize;
        let lane =
            if other.lane == MANY { "other lanes".to_string() } else { format!("lane {}", other.lane) };
        let message = format!(
            "lane {} {does} shared offset {at}, which {lane} of the same warp {did}, with no bar.warp.sync between",
            who.lane
        );
        trouble(FaultKind::WarpRace, who.lane, message)
    }
}

/// Passes that a warp's access to shared memory takes, and the least it could: 32 banks of 4 bytes; accesses of 8 bytes go
/// by half-warps, of 16 by quarter-warps.
pub(super) fn wavefronts(offsets: &[u32; 32], mask: u32, bytes: u32) -> (u32, u32) {
    let group = match bytes {
        0..=4 => 32,
        5..=8 => 16,
        9..=16 => 8,
        _ => 4,
    };
    let (mut passes, mut least) = (0, 0);
    for first in (0..32).step_by(group) {
        let lanes = (mask >> first) & (u32::MAX >> (32 - group));
        if lanes == 0 {
            continue;
        }
        least += 1;
        // One address for all, or one after the other: no two words of one bank.
        let start = offsets[first];
        let full = lanes == u32::MAX >> (32 - group);
        let run = |step: u32| (0..group).all(|l| offsets[first + l] == start.wrapping_add(step * l as u32));
        if full && bytes >= 4 && (run(bytes) || run(0)) {
            passes += 1;
            continue;
        }
        // Distinct words by bank.
        let mut words = [[0u32; 32]; 32];
        let mut counts = [0u8; 32];
        let mut worst = 1;
        super::warp::each(lanes, |l| {
            let at = offsets[first + l];
            for word in at / 4..(at + bytes).div_ceil(4) {
                let bank = (word % 32) as usize;
                let n = counts[bank] as usize;
                if !words[bank][..n.min(32)].contains(&word) && n < 32 {
                    words[bank][n] = word;
                    counts[bank] += 1;
                    worst = worst.max(counts[bank].into());
                }
            }
        });
        passes += worst;
    }
    (passes, least)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bank_conflicts_follow_from_addresses() {
        let offsets = |f: &dyn Fn(u32) -> u32| std::array::from_fn(|l| f(l as u32));
        assert_eq!(wavefronts(&offsets(&|l| 4 * l), u32::MAX, 4), (1, 1));
        assert_eq!(wavefronts(&offsets(&|_| 64), u32::MAX, 4), (1, 1), "a broadcast");
        assert_eq!(wavefronts(&offsets(&|l| 128 * l), u32::MAX, 4), (32, 1), "a column of 32 words");
        assert_eq!(wavefronts(&offsets(&|l| 132 * l), u32::MAX, 4), (1, 1), "padded");
        assert_eq!(wavefronts(&offsets(&|l| 8 * l), u32::MAX, 4), (2, 1), "stride 2");
        assert_eq!(wavefronts(&offsets(&|l| 8 * l), u32::MAX, 8), (2, 2));
        assert_eq!(wavefronts(&offsets(&|l| 16 * l), u32::MAX, 16), (4, 4));
        assert_eq!(wavefronts(&offsets(&|l| 2 * l), u32::MAX, 2), (1, 1), "two lanes a word");
        assert_eq!(wavefronts(&offsets(&|l| 128 * l), 0xff, 4), (8, 1));
    }
}
