//! A shared beginning of sequences.

use super::blocks::SharedBlocks;
use crate::backend::Backend;
use crate::cpu::Cpu;
use crate::layout::TILE;

/// The first tokens of a sequence, in whole tiles: block references, sinks, key means and the configuration hash. It
/// gives its references back when it is dropped.
#[derive(Debug)]
pub struct Prefix<B: Backend = Cpu> {
    pub(super) shared: Vec<i32>,
    pub(super) snapshot: B::Snapshot,
    pub(super) blocks: SharedBlocks,
    pub(super) hash: u64,
}

impl<B: Backend> Prefix<B> {
    /// Tokens it holds, a multiple of 64.
    pub fn tokens(&self) -> usize {
        self.shared.len() * TILE
    }

    /// Its blocks, one a tile.
    pub fn blocks(&self) -> &[i32] {
        &self.shared
    }
}

impl<B: Backend> Clone for Prefix<B> {
    fn clone(&self) -> Self {
        let mut blocks = self.blocks.lock();
        self.shared.iter().for_each(|b| blocks.retain(*b));
        drop(blocks);
        Self {
            shared: self.shared.clone(),
            snapshot: self.snapshot.clone(),
            blocks: self.blocks.clone(),
            hash: self.hash,
        }
    }
}

impl<B: Backend> Drop for Prefix<B> {
    fn drop(&mut self) {
        let mut blocks = self.blocks.lock();
        self.shared.iter().for_each(|b| blocks.release(*b));
    }
}
