//! What a backend must do. The state machine (`cache::state`) decides; a backend moves, encodes and reads.
//!
//! Every call comes validated: seats are open, blocks exist, shapes and dtypes fit the configuration. So the CPU cannot fail
//! halfway. On a device a launch or a copy can, with [`Error::Cuda`](crate::Error::Cuda): what the call was to change is
//! undefined then.

use crate::cache::{PagePool, PoolMemory, Seat, Step};
use crate::config::CacheConfig;
use crate::error::Result;
use crate::tensor::Dtype;
use half::f16;
use std::fmt::Debug;

pub(crate) mod sealed {
    pub trait Sealed {}
}

/// Tokens of one sequence in one layer, as `dequantize` reads them.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Stored<'a> {
    /// The sequence's seat.
    pub seat: Seat,
    /// Tokens held.
    pub len: usize,
    /// Tokens in pages.
    pub packed: usize,
    /// Block of each tile.
    pub table: &'a [i32],
}

/// The kernels' side of a cache. Implemented by [`Cpu`](crate::Cpu) and, with the feature `cuda`, by `cuda::Cuda`; sealed, since
/// it is the library's inside.
pub trait Backend: sealed::Sealed + Debug + Sized {
    /// An input tensor `[tokens, heads, dim]`.
    type Tensor<'a>: Copy;
    /// An output tensor `[tokens, heads, dim]`.
    type Output<'a>;
    /// Log-sum-exp out, `[tokens][query heads]`, f32.
    type Lse<'a>;
    /// Parameters of one attention call.
    type Params<'a>;
    /// The exact rows and means a [`Prefix`](crate::cache::Prefix) carries.
    type Snapshot: Debug + Clone + Send + Sync;
    /// Where pages lie.
    type Memory: PoolMemory;
    /// What a cache is built with beside its configuration: the device and its stream; nothing on the CPU.
    type Context;

    /// Shape and dtype of an input.
    fn describe(tensor: &Self::Tensor<'_>) -> ([usize; 3], Dtype);
    /// Shape and dtype of an output.
    fn describe_output(tensor: &Self::Output<'_>) -> ([usize; 3], Dtype);
    /// Elements of an LSE output.
    fn lse_len(lse: &Self::Lse<'_>) -> usize;
    /// Checks parameters for queries of that many heads.
    ///
    /// # Errors
    /// Factors that are no use, arrays of another length.
    fn check_params(params: &Self::Params<'_>, query_heads: usize) -> Result<()>;
    /// The ranges of tokens that see each other, in words; `None` if there is none.
    fn bidirectional(params: &Self::Params<'_>) -> Option<String>;

    /// An empty pool.
    ///
    /// # Errors
    /// Memory that there is not.
    fn new_pool(
        context: &Self::Context,
        config: &CacheConfig,
        blocks: usize,
    ) -> Result<PagePool<Self::Memory>>;
    /// All memory of a cache, from its pool's pages to the scratch of a step.
    ///
    /// # Errors
    /// What the backend cannot store or allocate.
    fn new(context: Self::Context, config: &CacheConfig, pool: PagePool<Self::Memory>) -> Result<Self>;
    /// The pages.
    fn pool(&self) -> &PagePool<Self::Memory>;
    /// Bytes of the scratch that steps use.
    fn scratch_bytes(&self) -> usize;
    /// Values clamped that no call has returned.
    fn clamped(&self) -> u64;

    /// A sequence has these lengths now, and no step did it.
    ///
    /// # Errors
    /// As the [module](self) says; so for all below.
    fn set_lengths(&mut self, seat: Seat, len: usize, packed: usize) -> Result<()>;
    /// Refuses new keys and values that `append` would. Called before a step opens on the caller's behalf: a refusal in it would cost the
    /// last one.
    ///
    /// # Errors
    /// Tensors of another device.
    fn check_append(&self, _: &Self::Tensor<'_>, _: &Self::Tensor<'_>) -> Result<()> {
        Ok(())
    }
    /// The same of a prefill.
    ///
    /// # Errors
    /// Tensors of another device, dtypes and head dims that prefill has no kernel for.
    fn check_prefill(
        &self,
        _q: &Self::Tensor<'_>,
        _k: &Self::Tensor<'_>,
        _v: &Self::Tensor<'_>,
        _params: &Self::Params<'_>,
        _out: &Self::Output<'_>,
        _lse: Option<&Self::Lse<'_>>,
    ) -> Result<()> {
        Ok(())
    }
    /// Opens a step. An error means that nothing was done.
    ///
    /// # Errors
    /// Also what does not fit the memory of a step.
    fn begin(&mut self, step: &Step) -> Result<()>;
    /// New tokens of all sequences of the step into one layer: closes tiles, then writes window and sink rows
    /// (direct mode: encodes into slots). Returns values clamped, where that is known at once.
    ///
    /// # Errors
    /// See above.
    fn append(
        &mut self,
        layer: usize,
        step: &Step,
        k: &Self::Tensor<'_>,
        v: &Self::Tensor<'_>,
    ) -> Result<u64>;
    /// Attention over the cache as it is after this layer's append.
    ///
    /// # Errors
    /// See above.
    fn attend(
        &mut self,
        layer: usize,
        step: &Step,
        q: &Self::Tensor<'_>,
        params: &Self::Params<'_>,
        out: &mut Self::Output<'_>,
        lse: Option<&mut Self::Lse<'_>>,
    ) -> Result<()>;
    /// Attention over the cache as it was before the step, plus the new tokens, exact.
    ///
    /// # Errors
    /// See above.
    #[allow(clippy::too_many_arguments)]
    fn prefill(
        &mut self,
        layer: usize,
        step: &Step,
        q: &Self::Tensor<'_>,
        k: &Self::Tensor<'_>,
        v: &Self::Tensor<'_>,
        params: &Self::Params<'_>,
        out: &mut Self::Output<'_>,
        lse: Option<&mut Self::Lse<'_>>,
    ) -> Result<()>;

    /// Closes tiles `from / 64 .. to / 64` of a seat from its window. Returns values clamped, where that is known at once.
    ///
    /// # Errors
    /// See above.
    fn close_tiles(&mut self, layer: usize, seat: Seat, table: &[i32], from: usize, to: usize)
    -> Result<u64>;
    /// Decodes tokens `from..to` of a block into the window.
    ///
    /// # Errors
    /// See above.
    fn decode_into_window(
        &mut self,
        layer: usize,
        seat: Seat,
        block: i32,
        from: usize,
        to: usize,
    ) -> Result<()>;
    /// Copies all pages of a block.
    ///
    /// # Errors
    /// See above.
    fn copy_block(&mut self, from: i32, to: i32) -> Result<()>;
    /// Copies window, sinks and means of a seat.
    ///
    /// # Errors
    /// See above.
    fn copy_seat(&mut self, from: Seat, to: Seat) -> Result<()>;
    /// Sinks and means of a seat.
    ///
    /// # Errors
    /// See above.
    fn snapshot(&self, seat: Seat) -> Result<Self::Snapshot>;
    /// Puts a snapshot into a seat.
    ///
    /// # Errors
    /// See above.
    fn restore(&mut self, seat: Seat, snapshot: &Self::Snapshot) -> Result<()>;
    /// Keys and values as the model sees them, `[len, kv_heads, dim]`.
    ///
    /// # Errors
    /// See above.
    fn dequantize(
        &self,
        layer: usize,
        stored: &Stored<'_>,
        k: &mut Self::Output<'_>,
        v: &mut Self::Output<'_>,
    ) -> Result<()>;

    /// A page in row order.
    ///
    /// # Errors
    /// See above.
    fn read_page(&self, layer: usize, head: usize, block: i32) -> Result<Vec<u8>>;
    /// Writes a page in row order.
    ///
    /// # Errors
    /// See above.
    fn write_page(&mut self, layer: usize, head: usize, block: i32, page: &[u8]) -> Result<()>;
    /// Key mean of a seat's layer and head; `None` for formats without centring.
    ///
    /// # Errors
    /// See above.
    fn mean(&self, layer: usize, seat: Seat, head: usize) -> Result<Option<Vec<f16>>>;
    /// Sets it.
    ///
    /// # Errors
    /// See above.
    fn set_mean(&mut self, layer: usize, seat: Seat, head: usize, mean: &[f16]) -> Result<()>;
    /// The sink rows of a seat, `[layer][head][key rows, value rows]` as f32.
    ///
    /// # Errors
    /// See above.
    fn read_sinks(&self, seat: Seat) -> Result<Vec<f32>>;
    /// Writes them.
    ///
    /// # Errors
    /// See above.
    fn write_sinks(&mut self, seat: Seat, rows: &[f32]) -> Result<()>;
}
