//! One allocation: its bytes, and which of them were ever written.

use super::{ALIGN, GAP, GLOBAL_BASE};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};

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
    pub(super) fn new(base: u64, bytes: u64, name: Option<String>, read_only: bool) -> Self {
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
    pub(super) fn unmark(&self, offset: u64, len: u64) {
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
    pub(super) fn complete_if_all_written(&self) {
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

    pub(super) fn write(&self, offset: u64, data: &[u8]) {
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

    pub(super) fn read(&self, offset: u64, out: &mut [u8]) {
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
