//! Device memory: allocations in an address range of their own, with gaps between them, and one bit a byte that says
//! whether it was ever written.
//!
//! Addresses are never handed out twice, so a freed one stays recognisable. Blocks of a launch run on several threads
//! and may race on purpose, as on a card: every access is a relaxed atomic of its size.

mod allocation;
mod view;

pub use allocation::Allocation;
pub use view::View;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

/// First address of global memory. No host pointer of Linux looks like it.
pub const GLOBAL_BASE: u64 = 0x0200_0000_0000;
/// Generic address of shared memory of the block with rank 0 of a cluster; others follow at [`SHARED_STRIDE`].
pub const SHARED_BASE: u64 = 0x0100_0000_0000;
/// Distance of the shared windows of a cluster's blocks.
pub const SHARED_STRIDE: u64 = 1 << 24;
/// Generic address of a thread's local memory.
pub const LOCAL_BASE: u64 = 0x0110_0000_0000;
/// Generic address of kernel parameters.
pub const PARAM_BASE: u64 = 0x0120_0000_0000;
/// Bytes of each of the windows above.
pub const WINDOW: u64 = 0x0010_0000_0000;

/// Alignment of allocations, as `cuMemAlloc` guarantees.
const ALIGN: u64 = 256;
/// Least distance between the end of an allocation and the next.
const GAP: u64 = 4096;
/// Why device memory refused a request of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MemoryError {
    /// More than the card has left.
    OutOfMemory {
        /// Bytes asked for.
        asked: u64,
        /// Bytes free.
        free: u64,
    },
    /// The range is not inside one allocation; the text says what lies there.
    Invalid(String),
}

impl fmt::Display for MemoryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfMemory { asked, free } => {
                write!(f, "{asked} bytes asked for, {free} are free on the simulated card")
            }
            Self::Invalid(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for MemoryError {}

#[derive(Debug, Default)]
struct Table {
    /// By base address.
    live: BTreeMap<u64, Arc<Allocation>>,
    /// Base and length of freed ones.
    freed: BTreeMap<u64, u64>,
    next: u64,
    used: u64,
    /// The live ones in order, for launches; rebuilt when asked for after a change.
    view: Option<View>,
}

/// The memory of a card.
#[derive(Debug)]
pub struct GlobalMemory {
    table: RwLock<Table>,
    capacity: u64,
}

impl GlobalMemory {
    /// Memory of this many bytes.
    pub fn new(capacity: u64) -> Self {
        Self { table: RwLock::new(Table { next: GLOBAL_BASE, ..Table::default() }), capacity }
    }

    /// Total bytes.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Bytes allocated.
    pub fn used(&self) -> u64 {
        self.table.read().unwrap_or_else(PoisonError::into_inner).used
    }

    /// Allocates: the memory holds a pattern and counts as never written.
    ///
    /// # Errors
    /// [`MemoryError::OutOfMemory`]
    pub fn alloc(&self, bytes: u64) -> Result<u64, MemoryError> {
        self.alloc_named(bytes, ALIGN, None, false)
    }

    /// Allocates for a module variable.
    ///
    /// # Errors
    /// [`MemoryError::OutOfMemory`]
    pub fn alloc_named(
        &self,
        bytes: u64,
        align: u64,
        name: Option<String>,
        read_only: bool,
    ) -> Result<u64, MemoryError> {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let free = self.capacity - table.used;
        if bytes > free {
            return Err(MemoryError::OutOfMemory { asked: bytes, free });
        }
        let base = table.next.next_multiple_of(ALIGN.max(align));
        table.next = base + bytes.max(1) + GAP;
        table.used += bytes;
        table.view = None;
        table.live.insert(base, Arc::new(Allocation::new(base, bytes, name, read_only)));
        Ok(base)
    }

    /// Frees an allocation by its first address.
    ///
    /// # Errors
    /// [`MemoryError::Invalid`] if nothing was allocated there, or it was freed before.
    pub fn free(&self, base: u64) -> Result<(), MemoryError> {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let Some(a) = table.live.remove(&base) else {
            drop(table);
            return Err(MemoryError::Invalid(self.describe(base, 0)));
        };
        table.used -= a.bytes();
        table.freed.insert(base, a.bytes());
        table.view = None;
        Ok(())
    }

    /// The allocation that holds an address, if one does.
    pub fn find(&self, address: u64) -> Option<Arc<Allocation>> {
        self.holding(address, 1)
    }

    /// The allocation that holds all of a range, if one does.
    fn holding(&self, address: u64, bytes: u64) -> Option<Arc<Allocation>> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        let (_, a) = table.live.range(..=address).next_back()?;
        a.holds(address - a.base(), bytes).then(|| Arc::clone(a))
    }

    fn range(&self, address: u64, bytes: u64) -> Result<Arc<Allocation>, MemoryError> {
        self.holding(address, bytes).ok_or_else(|| MemoryError::Invalid(self.describe(address, bytes)))
    }

    /// Copies from the host.
    ///
    /// # Errors
    /// [`MemoryError::Invalid`]
    pub fn write(&self, address: u64, data: &[u8]) -> Result<(), MemoryError> {
        if !data.is_empty() {
            let a = self.range(address, data.len() as u64)?;
            a.write(address - a.base(), data);
        }
        Ok(())
    }

    /// Copies to the host.
    ///
    /// # Errors
    /// [`MemoryError::Invalid`]
    pub fn read(&self, address: u64, out: &mut [u8]) -> Result<(), MemoryError> {
        if !out.is_empty() {
            let a = self.range(address, out.len() as u64)?;
            a.read(address - a.base(), out);
        }
        Ok(())
    }

    /// Copies inside the device. Bytes that were never written stay so.
    ///
    /// # Errors
    /// [`MemoryError::Invalid`]
    pub fn copy(&self, to: u64, from: u64, bytes: u64) -> Result<(), MemoryError> {
        if bytes == 0 {
            return Ok(());
        }
        let (source, target) = (self.range(from, bytes)?, self.range(to, bytes)?);
        let (from, to) = (from - source.base(), to - target.base());
        let mut data = vec![0; bytes as usize];
        source.read(from, &mut data);
        if source.is_written(from, bytes) {
            target.write(to, &data);
        } else {
            let written: Vec<bool> = (0..bytes).map(|i| source.is_written(from + i, 1)).collect();
            for (i, (byte, written)) in (0u64..).zip(data.iter().zip(written)) {
                target.store(to + i, 1, (*byte).into());
                if written { target.mark(to + i, 1) } else { target.unmark(to + i, 1) }
            }
            target.complete_if_all_written();
        }
        Ok(())
    }

    /// Fills with a value of 1, 2 or 4 bytes.
    ///
    /// # Errors
    /// [`MemoryError::Invalid`]
    pub fn fill(&self, address: u64, value: &[u8], count: u64) -> Result<(), MemoryError> {
        let bytes = count * value.len() as u64;
        if bytes == 0 {
            return Ok(());
        }
        let a = self.range(address, bytes)?;
        let chunk: Vec<u8> = value.iter().copied().cycle().take(4096).collect();
        let mut at = 0;
        while at < bytes {
            let n = (bytes - at).min(4096);
            a.write(address - a.base() + at, &chunk[..n as usize]);
            at += n;
        }
        Ok(())
    }

    /// The allocations now, for a launch.
    pub fn view(&self) -> View {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(view) = &table.view {
            return view.clone();
        }
        // Addresses only grow, so these are the youngest: older ones are seldom touched, and a view stays cheap.
        let mut freed: Vec<_> =
            table.freed.iter().rev().take(1024).map(|(base, bytes)| (*base, *bytes)).collect();
        freed.reverse();
        let view = View::new(table.live.values().cloned().collect(), freed.into());
        table.view = Some(view.clone());
        view
    }

    /// What lies at an address, in words.
    pub fn describe(&self, address: u64, bytes: u64) -> String {
        self.view().describe(address, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_known_byte_by_byte() {
        let m = GlobalMemory::new(1 << 20);
        let p = m.alloc(200).unwrap();
        m.write(p + 3, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]).unwrap();
        let a = m.find(p + 199).unwrap();
        assert!(a.is_written(3, 10) && !a.is_written(2, 2) && !a.is_written(12, 2));
        let mut out = [0; 12];
        m.read(p + 2, &mut out).unwrap();
        assert_eq!(out[1..11], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
        assert!(!a.is_complete());
        m.fill(p, &[0], 200).unwrap();
        assert!(a.is_complete());
        let q = m.alloc(100).unwrap();
        m.copy(p + 10, q, 5).unwrap();
        assert!(!a.is_complete() && !a.is_written(14, 1) && a.is_written(15, 1));
    }

    #[test]
    fn messages_say_what_lies_there() {
        let m = GlobalMemory::new(1 << 20);
        let p = m.alloc(100).unwrap();
        assert!(m.describe(p + 98, 4).contains("reach 2 bytes beyond"));
        assert!(m.describe(p + 98, u64::MAX).contains("beyond"));
        assert!(m.describe(p + 4, 4).contains("lie 4 bytes into"));
        assert!(m.describe(p + 100, 4).contains("start 0 bytes after"));
        m.free(p).unwrap();
        assert!(m.describe(p + 4, 4).contains("freed"));
        assert!(m.describe(0, 4).contains("host pointer"));
        assert!(m.free(p).is_err() && m.write(p, &[1]).is_err());
        assert_eq!(m.used(), 0);
        assert!(matches!(m.alloc(2 << 20), Err(MemoryError::OutOfMemory { .. })));
    }
}
