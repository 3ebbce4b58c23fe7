//! Raw views: one allocation written by several threads, each in its own part.

use std::marker::PhantomData;

/// A mutable slice whose disjoint parts may be borrowed from several threads at once.
#[derive(Debug)]
pub(crate) struct RawSlice<'a, T> {
    data: *mut T,
    len: usize,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: a `RawSlice` is a `&mut [T]` handed out in parts; `part` asks its callers for disjoint parts, so sharing it
// moves no more between threads than splitting the slice would.
unsafe impl<T: Send> Sync for RawSlice<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for RawSlice<'_, T> {}

impl<'a, T> RawSlice<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { data: slice.as_mut_ptr(), len: slice.len(), owner: PhantomData }
    }

    /// Elements `at..at + n`; panics when they leave the slice.
    ///
    /// # Safety
    /// While the part lives, no other part that overlaps it may be borrowed.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part(&self, at: usize, n: usize) -> &mut [T] {
        assert!(at <= self.len && n <= self.len - at, "part {at}+{n} of {} elements", self.len);
        // SAFETY: `at <= len` was just asserted, so the address stays inside the slice.
        let start = unsafe { self.data.add(at) };
        // SAFETY: `at + n <= len` was just asserted; the caller promises that nobody else uses the part, and `self`
        // holds the exclusive borrow of the whole.
        unsafe { std::slice::from_raw_parts_mut(start, n) }
    }
}
