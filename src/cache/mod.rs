//! The cache: which token is where, which tile closes when, who owns a block; and the calls that drive it.
//!
//! Start with [`KvCache`] for a fixed batch, [`PagedKvCache`] for continuous batching.

mod batch;
mod blocks;
mod kv;
pub mod page_io;
mod paged;
mod pool;
mod prefix;
mod state;
mod step;

pub use batch::{Batch, SlotBatch, expand_block_table};
pub use kv::KvCache;
pub use paged::PagedKvCache;
pub use pool::{HostMemory, PagePool, PoolMemory};
#[cfg(feature = "cuda")]
pub(crate) use pool::{MOST_BLOCKS, pool_bytes};
pub use prefix::Prefix;
pub use state::Stats;
pub use step::{Seat, SequenceStep, Step};
