//! The allocations at one moment: what a launch sees, and what messages say of an address.

use super::{Allocation, GAP, GLOBAL_BASE};
use std::sync::Arc;

/// The allocations at one moment, ordered by address.
#[derive(Debug, Clone)]
pub struct View {
    live: Arc<[Arc<Allocation>]>,
    /// Base and length of freed ones.
    freed: Arc<[(u64, u64)]>,
}

impl View {
    /// Of allocations and of freed ranges, both ordered by address.
    pub(super) fn new(live: Arc<[Arc<Allocation>]>, freed: Arc<[(u64, u64)]>) -> Self {
        Self { live, freed }
    }

    /// The same with one more in front, which lies below all others.
    pub(crate) fn with_first(&self, first: Arc<Allocation>) -> Self {
        let live = std::iter::once(first).chain(self.live.iter().cloned()).collect();
        Self { live, freed: Arc::clone(&self.freed) }
    }

    /// What lies at an address, in words.
    pub fn describe(&self, address: u64, bytes: u64) -> String {
        let what = format!("{bytes} bytes at {address:#x}");
        if let Some((base, len)) = self.freed(address) {
            return format!("{what} are in an allocation of {len} bytes at {base:#x} that was freed");
        }
        let of = |a: &Allocation| match a.name() {
            Some(name) => format!("variable {name} ({} bytes at {:#x})", a.bytes(), a.base()),
            None => format!("an allocation of {} bytes at {:#x}", a.bytes(), a.base()),
        };
        let next = self.partition_point(|a| a.base() <= address);
        if let Some(a) = next.checked_sub(1).map(|i| &self[i]) {
            let into = address - a.base();
            if a.holds(into, bytes) {
                return format!("{what} lie {into} bytes into {}", of(a));
            }
            if into < a.bytes() {
                return format!(
                    "{what} reach {} bytes beyond the end of {}",
                    bytes - (a.bytes() - into),
                    of(a)
                );
            }
            if into - a.bytes() < GAP {
                return format!("{what} start {} bytes after the end of {}", into - a.bytes(), of(a));
            }
        }
        match self.get(next) {
            Some(a) if a.base() - address < GAP => {
                format!("{what} start {} bytes before {}", a.base() - address, of(a))
            }
            _ if address < GLOBAL_BASE => format!("{what} are no device memory (a host pointer, or null)"),
            _ => format!("{what} are in no allocation"),
        }
    }

    /// Base and length of a freed allocation that held an address.
    fn freed(&self, address: u64) -> Option<(u64, u64)> {
        let at = self.freed.partition_point(|(base, _)| *base <= address).checked_sub(1)?;
        let (base, bytes) = self.freed[at];
        (address - base < bytes).then_some((base, bytes))
    }
}

impl std::ops::Deref for View {
    type Target = [Arc<Allocation>];

    fn deref(&self) -> &Self::Target {
        &self.live
    }
}
