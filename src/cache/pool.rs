//! The memory of all pages: one allocation, made here or lent by the engine.
//!
//! Page address = `base(layer) + (block * kv_heads + head) * page_bytes(layer)`.

use super::blocks::SharedBlocks;
use crate::backend::sealed;
use crate::config::CacheConfig;
use crate::error::{Error, Result};
use std::fmt::Debug;

/// Blocks for a cache of one configuration, and who owns them.
#[derive(Debug)]
pub struct PagePool<M: PoolMemory = HostMemory> {
    memory: M,
    pub(crate) blocks: SharedBlocks,
    /// First byte of each layer's pages.
    bases: Vec<usize>,
    block_bytes: usize,
    hash: u64,
}

/// What holds the bytes of a pool: the host's memory or a device's. Sealed.
pub trait PoolMemory: sealed::Sealed + Debug + Send + Sync {
    /// Bytes.
    fn bytes(&self) -> usize;
}

/// Memory of the host, made by the pool or lent by the engine.
#[derive(Debug)]
pub struct HostMemory(Memory);

#[derive(Debug)]
enum Memory {
    Owned(Box<[u8]>),
    Lent { base: *mut u8, bytes: usize },
}

// SAFETY: lent memory is exclusively this pool's by the contract of `from_raw`, like the owned box.
unsafe impl Send for Memory {}
// SAFETY: as above; shared references only read.
unsafe impl Sync for Memory {}

impl sealed::Sealed for HostMemory {}

impl PoolMemory for HostMemory {
    fn bytes(&self) -> usize {
        self.slice().len()
    }
}

impl HostMemory {
    fn slice(&self) -> &[u8] {
        match &self.0 {
            Memory::Owned(m) => m,
            // SAFETY: `from_raw`'s caller vouches for the memory; `&self` allows reading.
            Memory::Lent { base, bytes } => unsafe { std::slice::from_raw_parts(*base, *bytes) },
        }
    }

    fn slice_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Memory::Owned(m) => &mut m[..],
            // SAFETY: `from_raw`'s caller vouches for the memory; `&mut self` is the only access to it.
            Memory::Lent { base, bytes } => unsafe { std::slice::from_raw_parts_mut(*base, *bytes) },
        }
    }
}

impl PagePool {
    /// Allocates `blocks` zero-filled blocks for caches of this configuration. With `max_sequences` times
    /// [`blocks_per_sequence`](CacheConfig::blocks_per_sequence), blocks never run out while no
    /// [`Prefix`](crate::cache::Prefix) is kept; engines that queue or preempt give fewer.
    ///
    /// # Errors
    /// As [`CacheConfig::validate`]; [`Error::Capacity`] if the size does not fit in memory's address range.
    pub fn new(config: &CacheConfig, blocks: usize) -> Result<Self> {
        let bytes = pool_bytes(config, blocks)?;
        Self::with_memory(config, blocks, HostMemory(Memory::Owned(vec![0; bytes].into_boxed_slice())))
    }

    /// Uses `bytes` bytes at `base`: as many whole blocks as fit.
    ///
    /// # Errors
    /// As [`CacheConfig::validate`]; [`Error::Strides`] if `base` is null or not 16-byte aligned.
    ///
    /// # Safety
    /// `base..base + bytes` must be initialised memory that nothing else reads or writes while the pool lives.
    pub unsafe fn from_raw(config: &CacheConfig, base: *mut u8, bytes: usize) -> Result<Self> {
        if base.is_null() || base.align_offset(16) != 0 || bytes > isize::MAX as usize {
            return Err(Error::Strides {
                what: "pool memory",
                problem: format!("base {base:p} is null or not 16-byte aligned"),
                len: bytes,
            });
        }
        let blocks = (bytes / config.block_bytes()?).min(MOST_BLOCKS);
        Self::with_memory(config, blocks, HostMemory(Memory::Lent { base, bytes }))
    }

    /// All pages of a layer, `[block][head]`.
    pub(crate) fn layer(&self, layer: usize) -> &[u8] {
        &self.memory.slice()[self.bases[layer]..]
    }

    /// All pages of a layer, mutably.
    pub(crate) fn layer_mut(&mut self, layer: usize) -> &mut [u8] {
        let base = self.bases[layer];
        &mut self.memory.slice_mut()[base..]
    }
}

impl<M: PoolMemory> PagePool<M> {
    /// A pool of that many blocks in `memory`, which holds them.
    pub(crate) fn with_memory(config: &CacheConfig, blocks: usize, memory: M) -> Result<Self> {
        let mut at = 0;
        let mut bases = Vec::with_capacity(config.layers.len());
        for l in &config.layers {
            bases.push(at);
            at += config.page_layout(l).page_bytes * config.kv_heads * blocks;
        }
        let (block_bytes, hash) = (config.block_bytes()?, config.hash());
        Ok(Self { memory, blocks: SharedBlocks::new(blocks), bases, block_bytes, hash })
    }

    /// Blocks in all.
    pub fn blocks(&self) -> usize {
        self.blocks.lock().count()
    }

    /// Blocks nobody owns.
    pub fn free_blocks(&self) -> usize {
        self.blocks.lock().free()
    }

    /// Bytes of one block: 64 tokens of all kv heads of all layers.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Bytes of the memory.
    pub fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    pub(crate) fn configuration_hash(&self) -> u64 {
        self.hash
    }

    /// What holds the pages.
    #[cfg(feature = "cuda")]
    pub(crate) fn memory(&self) -> &M {
        &self.memory
    }

    /// First byte of each layer's pages.
    #[cfg(feature = "cuda")]
    pub(crate) fn bases(&self) -> &[usize] {
        &self.bases
    }
}

/// Bytes of that many blocks.
pub(crate) fn pool_bytes(config: &CacheConfig, blocks: usize) -> Result<usize> {
    let block = config.block_bytes()?;
    let bytes = block.checked_mul(blocks).filter(|b| *b <= isize::MAX as usize);
    bytes.filter(|_| blocks <= MOST_BLOCKS).ok_or(Error::Capacity {
        what: "blocks",
        needed: blocks,
        available: MOST_BLOCKS.min(isize::MAX as usize / block.max(1)),
        help: "build the cache with fewer sequences or tokens, the pool with fewer blocks",
    })
}

/// Slots are numbered in 31 bits.
pub(crate) const MOST_BLOCKS: usize = i32::MAX as usize / 64;
