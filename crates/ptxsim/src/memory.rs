//! Device memory: allocations in an address range of their own, with gaps between them, and one bit a byte that says
//! whether it was ever written.
//!
//! Addresses are never handed out twice, so a freed one stays recognisable. Blocks of a launch run on several threads
//! and may race on purpose, as on a card: every access is a relaxed atomic of its size.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};
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
/// What fresh memory holds: as f32 and f16 a NaN, as an index far out of range.
const PATTERN: u64 = 0xfff5_fff5_fff5_fff5;

/// One allocation.
pub struct Allocation {
    base: u64,
    bytes: u64,
    words: Box<[AtomicU64]>,
    /// One bit a byte.
    written: Box<[AtomicU64]>,
    /// Every byte was written.
    complete: AtomicBool,
    /// Of a module variable.
    name: Option<String>,
    /// `.const` memory.
    read_only: bool,
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Allocation")
            .field("base", &self.base)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

/// The bits of `len` bytes from bit `at` of a 64-bit word.
fn span(at: u64, len: u64) -> u64 {
    let ones = if len >= 64 { u64::MAX } else { (1 << len) - 1 };
    ones << at
}

impl Allocation {
    fn new(base: u64, bytes: u64, name: Option<String>, read_only: bool) -> Self {
        let words = (bytes.div_ceil(8)) as usize;
        Self {
            base,
            bytes,
            words: (0..words).map(|_| AtomicU64::new(PATTERN)).collect(),
            written: (0..bytes.div_ceil(64) as usize).map(|_| AtomicU64::new(0)).collect(),
            complete: AtomicBool::new(bytes == 0),
            name,
            read_only,
        }
    }

    /// Memory of the driver's own for a launch, zero, below all others.
    pub(crate) fn workspace(bytes: u64) -> Self {
        let base = GLOBAL_BASE - (bytes + GAP).next_multiple_of(ALIGN);
        let a = Self::new(base, bytes, Some("the grid's workspace".into()), false);
        a.write(0, &vec![0; bytes as usize]);
        a
    }

    /// First address.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The module variable it belongs to.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Whether kernels may not write it.
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// Whether `len` bytes from `offset` are inside.
    #[inline]
    pub fn holds(&self, offset: u64, len: u64) -> bool {
        offset <= self.bytes && len <= self.bytes - offset
    }

    /// Where `len` bytes from `offset` lie; panics if they are outside or misaligned, which callers check first.
    #[inline]
    fn pointer(&self, offset: u64, len: u64) -> *mut u8 {
        assert!(self.holds(offset, len) && offset.is_multiple_of(len), "checked by the caller");
        self.words.as_ptr().cast::<u8>().cast_mut().wrapping_add(offset as usize)
    }

    /// The byte at `offset` as an atomic. Panics outside.
    #[inline]
    pub fn byte(&self, offset: u64) -> &AtomicU8 {
        // SAFETY: `pointer` checked bounds and alignment; the words are atomics, so writing through a shared reference
        // is allowed, and they live as long as `self`.
        unsafe { AtomicU8::from_ptr(self.pointer(offset, 1)) }
    }

    /// Two bytes at `offset` as an atomic. Panics outside or misaligned.
    #[inline]
    pub fn half(&self, offset: u64) -> &AtomicU16 {
        // SAFETY: as for `byte`.
        unsafe { AtomicU16::from_ptr(self.pointer(offset, 2).cast()) }
    }

    /// Four bytes at `offset` as an atomic. Panics outside or misaligned.
    #[inline]
    pub fn word(&self, offset: u64) -> &AtomicU32 {
        // SAFETY: as for `byte`.
        unsafe { AtomicU32::from_ptr(self.pointer(offset, 4).cast()) }
    }

    /// Eight bytes at `offset` as an atomic. Panics outside or misaligned.
    #[inline]
    pub fn double(&self, offset: u64) -> &AtomicU64 {
        // SAFETY: as for `byte`.
        unsafe { AtomicU64::from_ptr(self.pointer(offset, 8).cast()) }
    }

    /// 1, 2, 4 or 8 bytes at an aligned `offset`, zero-extended.
    #[inline]
    pub fn load(&self, offset: u64, bytes: u32) -> u64 {
        match bytes {
            1 => self.byte(offset).load(Relaxed).into(),
            2 => self.half(offset).load(Relaxed).into(),
            4 => self.word(offset).load(Relaxed).into(),
            _ => self.double(offset).load(Relaxed),
        }
    }

    /// Stores the low 1, 2, 4 or 8 bytes of `value` at an aligned `offset`; does not mark them.
    #[inline]
    pub fn store(&self, offset: u64, bytes: u32, value: u64) {
        match bytes {
            1 => self.byte(offset).store(value as u8, Relaxed),
            2 => self.half(offset).store(value as u16, Relaxed),
            4 => self.word(offset).store(value as u32, Relaxed),
            _ => self.double(offset).store(value, Relaxed),
        }
    }

    /// One element of 1, 2, 4 or 8 bytes of each of 32 places, zero-extended. Panics outside or misaligned.
    #[inline]
    pub(crate) fn gather(&self, places: &[u64; 32], bytes: u32, out: &mut [u64; 32]) {
        let size = u64::from(bytes);
        let (mut highest, mut low) = (0, 0);
        for p in places {
            highest = highest.max(*p);
            low |= *p;
        }
        assert!(self.holds(highest, size) && low & (size - 1) == 0, "checked by the caller");
        let base = self.words.as_ptr().cast::<u8>().cast_mut();
        for (p, out) in places.iter().zip(out) {
            let at = base.wrapping_add(*p as usize);
            // All places are in bounds and aligned, as asserted above for the highest one and the low bits of all; the memory is
            // made of atomics that live as long as `self`.
            *out = match bytes {
                // SAFETY: as above.
                4 => unsafe { AtomicU32::from_ptr(at.cast()) }.load(Relaxed).into(),
                // SAFETY: as above.
                8 => unsafe { AtomicU64::from_ptr(at.cast()) }.load(Relaxed),
                // SAFETY: as above.
                2 => unsafe { AtomicU16::from_ptr(at.cast()) }.load(Relaxed).into(),
                // SAFETY: as above.
                _ => unsafe { AtomicU8::from_ptr(at) }.load(Relaxed).into(),
            };
        }
    }

    /// Whether every byte of the allocation was written.
    #[inline]
    pub fn is_complete(&self) -> bool {
        self.complete.load(Relaxed)
    }

    /// Marks bytes as written.
    #[inline]
    pub fn mark(&self, offset: u64, len: u64) {
        if self.is_complete() {
            return;
        }
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let n = (64 - at % 64).min(end - at);
            let bits = span(at % 64, n);
            let word = &self.written[(at / 64) as usize];
            if word.load(Relaxed) & bits != bits {
                word.fetch_or(bits, Relaxed);
            }
            at += n;
        }
    }

    /// Whether bytes were all written.
    #[inline]
    pub fn is_written(&self, offset: u64, len: u64) -> bool {
        if self.is_complete() {
            return true;
        }
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let n = (64 - at % 64).min(end - at);
            let bits = span(at % 64, n);
            if self.written[(at / 64) as usize].load(Relaxed) & bits != bits {
                return false;
            }
            at += n;
        }
        true
    }

    /// Marks bytes as never written.
    fn unmark(&self, offset: u64, len: u64) {
        let (mut at, end) = (offset, offset + len);
        if at < end && self.complete.swap(false, Relaxed) {
            self.written.iter().for_each(|w| w.store(u64::MAX, Relaxed));
        }
        while at < end {
            let n = (64 - at % 64).min(end - at);
            self.written[(at / 64) as usize].fetch_and(!span(at % 64, n), Relaxed);
            at += n;
        }
    }

    /// After host writes: notes if nothing is missing any more.
    fn complete_if_all_written(&self) {
        if !self.is_complete() {
            let last = self.bytes % 64;
            let (tail, full) = match self.written.split_last() {
                Some((tail, full)) if last != 0 => {
                    (tail.load(Relaxed) & span(0, last) == span(0, last), full)
                }
                _ => (true, &self.written[..]),
            };
            if tail && full.iter().all(|w| w.load(Relaxed) == u64::MAX) {
                self.complete.store(true, Relaxed);
            }
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut at = offset;
        let mut rest = data;
        while let Some(first) = rest.first() {
            if at.is_multiple_of(8)
                && let Some((eight, more)) = rest.split_first_chunk::<8>()
            {
                self.store(at, 8, u64::from_le_bytes(*eight));
                (at, rest) = (at + 8, more);
            } else {
                self.store(at, 1, (*first).into());
                (at, rest) = (at + 1, &rest[1..]);
            }
        }
        self.mark(offset, data.len() as u64);
        self.complete_if_all_written();
    }

    fn read(&self, offset: u64, out: &mut [u8]) {
        let mut at = offset;
        let mut rest = out;
        while !rest.is_empty() {
            if at.is_multiple_of(8) && rest.len() >= 8 {
                let (eight, more) = rest.split_at_mut(8);
                eight.copy_from_slice(&self.load(at, 8).to_le_bytes());
                (at, rest) = (at + 8, more);
            } else {
                let (one, more) = rest.split_at_mut(1);
                one[0] = self.load(at, 1) as u8;
                (at, rest) = (at + 1, more);
            }
        }
    }
}

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

/// The allocations at one moment, ordered by address.
#[derive(Debug, Clone)]
pub struct View {
    live: Arc<[Arc<Allocation>]>,
    /// Base and length of freed ones.
    freed: Arc<[(u64, u64)]>,
}

impl View {
    /// The same with one more in front, which lies below all others.
    pub(crate) fn with_first(&self, first: Arc<Allocation>) -> Self {
        let live = std::iter::once(first).chain(self.live.iter().cloned()).collect();
        Self { live, freed: Arc::clone(&self.freed) }
    }

    /// Base and length of a freed allocation that held an address.
    pub fn freed(&self, address: u64) -> Option<(u64, u64)> {
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
        match table.live.remove(&base) {
            Some(a) => {
                table.used -= a.bytes;
                table.freed.insert(base, a.bytes);
                table.view = None;
                Ok(())
            }
            None => Err(MemoryError::Invalid(describe(&table, base, 0))),
        }
    }

    /// The allocation that holds an address, if one does.
    pub fn find(&self, address: u64) -> Option<Arc<Allocation>> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        let (_, a) = table.live.range(..=address).next_back()?;
        a.holds(address - a.base, 1).then(|| Arc::clone(a))
    }

    fn range(&self, address: u64, bytes: u64) -> Result<Arc<Allocation>, MemoryError> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        match table.live.range(..=address).next_back() {
            Some((_, a)) if a.holds(address - a.base, bytes) => Ok(Arc::clone(a)),
            _ => Err(MemoryError::Invalid(describe(&table, address, bytes))),
        }
    }

    /// Copies from the host.
    ///
    /// # Errors
    /// [`MemoryError::Invalid`]
    pub fn write(&self, address: u64, data: &[u8]) -> Result<(), MemoryError> {
        if !data.is_empty() {
            let a = self.range(address, data.len() as u64)?;
            a.write(address - a.base, data);
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
            a.read(address - a.base, out);
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
        let (from, to) = (from - source.base, to - target.base);
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
            a.write(address - a.base + at, &chunk[..n as usize]);
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
        let view = View { live: table.live.values().cloned().collect(), freed: freed.into() };
        table.view = Some(view.clone());
        view
    }

    /// What lies at an address, in words.
    pub fn describe(&self, address: u64, bytes: u64) -> String {
        describe(&self.table.read().unwrap_or_else(PoisonError::into_inner), address, bytes)
    }
}

fn describe(table: &Table, address: u64, bytes: u64) -> String {
    let what = format!("{bytes} bytes at {address:#x}");
    let live = table.live.range(..=address).next_back();
    let freed = table.freed.range(..=address).next_back();
    if let Some((base, len)) = freed
        && address < base + len
    {
        return format!("{what} are in an allocation of {len} bytes at {base:#x} that was freed");
    }
    let next = table.live.range(address..).next();
    let of = |a: &Allocation| match &a.name {
        Some(name) => format!("variable {name} ({} bytes at {:#x})", a.bytes, a.base),
        None => format!("an allocation of {} bytes at {:#x}", a.bytes, a.base),
    };
    match (live, next) {
        (Some((base, a)), _) if a.holds(address - base, bytes) => {
            format!("{what} lie {} bytes into {}", address - base, of(a))
        }
        (Some((base, a)), _) if address < base + a.bytes => {
            let beyond = bytes - (base + a.bytes - address);
            format!("{what} reach {beyond} bytes beyond the end of {}", of(a))
        }
        (Some((base, a)), _) if address - base - a.bytes < GAP => {
            format!("{what} start {} bytes after the end of {}", address - base - a.bytes, of(a))
        }
        (_, Some((base, a))) if base - address < GAP => {
            format!("{what} start {} bytes before {}", base - address, of(a))
        }
        _ if address < GLOBAL_BASE => format!("{what} are no device memory (a host pointer, or null)"),
        _ => format!("{what} are in no allocation"),
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
