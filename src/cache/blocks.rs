//! Which block is used by how many owners. Ids only; where a block's bytes lie is the pool's business.

use crate::error::{Error, Result};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Reference counts and the free list of a pool's blocks.
#[derive(Debug)]
pub(crate) struct Blocks {
    refs: Vec<u32>,
    /// Free ids, the next one last.
    free: Vec<i32>,
    /// Blocks that a caller holds: taken one by one, in no seat's table yet.
    lent: Vec<bool>,
}

impl Blocks {
    pub(crate) fn new(count: usize) -> Self {
        Self { refs: vec![0; count], free: (0..count as i32).rev().collect(), lent: vec![false; count] }
    }

    /// Blocks of the pool.
    pub(crate) fn count(&self) -> usize {
        self.refs.len()
    }

    /// Blocks with no owner.
    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    /// Owners of a block.
    pub(crate) fn refs(&self, id: i32) -> u32 {
        usize::try_from(id).ok().and_then(|i| self.refs.get(i)).copied().unwrap_or(0)
    }

    /// A free block, now with one owner.
    pub(crate) fn take(&mut self) -> Option<i32> {
        let id = self.free.pop()?;
        self.refs[id as usize] = 1;
        Some(id)
    }

    /// A free block, now held by a caller.
    pub(crate) fn lend(&mut self) -> Option<i32> {
        let id = self.take()?;
        self.lent[id as usize] = true;
        Some(id)
    }

    /// Whether a caller holds a block.
    pub(crate) fn is_lent(&self, id: i32) -> bool {
        usize::try_from(id).is_ok_and(|i| self.lent.get(i).copied().unwrap_or(false))
    }

    /// Refuses a block that no caller holds.
    pub(crate) fn check_lent(&self, id: i32) -> Result<()> {
        match usize::try_from(id) {
            Ok(i) if i < self.count() => {}
            _ => return Err(Error::OutOfRange { what: "block", got: i64::from(id), limit: self.count() }),
        }
        if self.is_lent(id) {
            return Ok(());
        }
        let why = "only blocks that allocate_block gave and that no seat has are a caller's".into();
        Err(Error::Unsupported { what: "block", got: id.to_string(), why })
    }

    /// Takes a block over from the caller that holds it; it keeps its owner.
    pub(crate) fn take_over(&mut self, id: i32) {
        self.lent[id as usize] = false;
    }

    /// One more owner. Ids below 0 (no block) are passed over.
    pub(crate) fn retain(&mut self, id: i32) {
        if id >= 0 {
            debug_assert!(self.refs[id as usize] > 0, "block {id} has no owner to share it with");
            self.refs[id as usize] += 1;
        }
    }

    /// One owner less; without owners the block is free again. Ids below 0 are passed over.
    pub(crate) fn release(&mut self, id: i32) {
        if id >= 0 {
            let refs = &mut self.refs[id as usize];
            debug_assert!(*refs > 0, "block {id} was released once too often");
            *refs -= 1;
            if *refs == 0 {
                self.free.push(id);
            }
        }
    }
}

/// Shared, because a [`Prefix`](crate::cache::Prefix) gives its references back when it is dropped.
#[derive(Debug, Clone)]
pub(crate) struct SharedBlocks(Arc<Mutex<Blocks>>);

impl SharedBlocks {
    pub(crate) fn new(count: usize) -> Self {
        Self(Arc::new(Mutex::new(Blocks::new(count))))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Blocks> {
        // Counts are changed by single additions, so a panic elsewhere leaves them whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn same_pool(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
