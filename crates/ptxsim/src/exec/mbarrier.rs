//! `mbarrier` objects. PTX ISA 9.7.13.15.
//!
//! The 64-bit object in shared memory is opaque; what it counts is kept beside the memory it lies in.

/// State of one object.
#[derive(Debug, Clone, Default)]
pub(super) struct MbarrierState {
    /// Arrivals that a phase needs.
    pub expected: u32,
    /// Arrivals that the current phase still needs.
    pub pending: i64,
    /// Bytes announced and not arrived in the current phase.
    pub bytes: i64,
    /// Phases completed.
    pub phase: u32,
    /// Arrivals that later phases will not need.
    pub dropped: u32,
    /// What those who arrived in the current phase knew.
    pub clocks: Vec<u32>,
    /// What those who arrived in the last completed phase knew.
    pub released: Vec<u32>,
}

/// Largest arrival count.
pub(super) const MAX_COUNT: u32 = (1 << 20) - 1;

impl MbarrierState {
    /// `mbarrier.init`
    pub(super) fn new(expected: u32, warps: usize) -> Self {
        Self {
            expected,
            pending: expected.into(),
            clocks: vec![0; warps],
            released: vec![0; warps],
            ..Self::default()
        }
    }

    /// Notes what someone who arrives knows.
    pub(super) fn learn(&mut self, clocks: &[u32]) {
        self.clocks.iter_mut().zip(clocks).for_each(|(a, b)| *a = (*a).max(*b));
    }

    /// Notes that a bulk copy has arrived, in the time of copies: the last of the clocks.
    pub(super) fn learn_of_copies(&mut self, tick: u32) {
        if let Some(known) = self.clocks.last_mut() {
            *known = (*known).max(tick);
        }
    }

    /// Ends the phase if nothing is missing. Returns whether it did.
    pub(super) fn advance(&mut self) -> bool {
        if self.pending > 0 || self.bytes != 0 {
            return false;
        }
        self.phase = self.phase.wrapping_add(1);
        self.expected = self.expected.saturating_sub(self.dropped);
        self.dropped = 0;
        self.pending = self.expected.into();
        self.released = std::mem::replace(&mut self.clocks, vec![0; self.released.len()]);
        true
    }

    /// Whether the phase with this parity has completed: a fresh object says so of parity 1.
    pub(super) fn parity_done(&self, parity: u32) -> bool {
        (self.phase & 1) != (parity & 1)
    }

    /// The state token of the current phase.
    pub(super) fn token(&self) -> u64 {
        u64::from(self.phase) << 32 | (self.pending.max(0) as u64 & 0xffff_ffff)
    }

    /// Whether the phase of a token has completed.
    pub(super) fn token_done(&self, token: u64) -> bool {
        (token >> 32) as u32 != self.phase
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_end_when_arrivals_and_bytes_are_there() {
        let mut m = MbarrierState::new(2, 1);
        assert!(m.parity_done(1) && !m.parity_done(0));
        let token = m.token();
        m.pending -= 1;
        m.bytes += 64;
        assert!(!m.advance());
        m.pending -= 1;
        assert!(!m.advance());
        m.bytes -= 64;
        assert!(m.advance() && m.parity_done(0) && !m.parity_done(1) && m.token_done(token));
        assert_eq!(m.pending, 2);
        m.dropped = 1;
        m.pending = 0;
        assert!(m.advance() && m.pending == 1 && m.parity_done(1));
    }
}
