//! What a backend must do. The state machine (`cache::state`) decides; a backend moves, encodes and reads.
//!
//! Every call comes validated: seats are open, blocks exist, shapes and dtypes fit the configuration. A backend
//! therefore cannot fail halfway.

use crate::cache::{PagePool, Seat, Step};
use crate::config::{AttendParams, CacheConfig};
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

/// The kernels' side of a cache. Implemented by [`Cpu`](crate::Cpu); sealed, since it is the library's inside.
pub trait Backend: sealed::Sealed + Debug + Sized {
    /// An input tensor `[tokens, heads, dim]`.
    type Tensor<'a>: Copy;
    /// An output tensor `[tokens, heads, dim]`.
    type Output<'a>;
    /// Log-sum-exp out, `[tokens][query heads]`, f32.
    type Lse<'a>;
    /// The exact rows and means a [`Prefix`](crate::cache::Prefix) carries.
    type Snapshot: Debug + Clone + Send + Sync;

    /// Shape and dtype of an input.
    fn describe(tensor: &Self::Tensor<'_>) -> ([usize; 3], Dtype);
    /// Shape and dtype of an output.
    fn describe_output(tensor: &Self::Output<'_>) -> ([usize; 3], Dtype);
    /// Elements of an LSE output.
    fn lse_len(lse: &Self::Lse<'_>) -> usize;

    /// All memory of a cache, from its pool's pages to the scratch of a step.
    ///
    /// # Errors
    /// What the backend cannot store or allocate.
    fn new(config: &CacheConfig, pool: PagePool) -> Result<Self>;
    /// The pages.
    fn pool(&self) -> &PagePool;
    /// Bytes of the scratch that steps use.
    fn scratch_bytes(&self) -> usize;

    /// New tokens of all sequences of the step into one layer: closes tiles, then writes window and sink rows
    /// (direct mode: encodes into slots). Returns values clamped.
    fn append(&mut self, layer: usize, step: &Step, k: &Self::Tensor<'_>, v: &Self::Tensor<'_>) -> u64;
    /// Attention over the cache as it is after this layer's append.
    fn attend(
        &mut self,
        layer: usize,
        step: &Step,
        q: &Self::Tensor<'_>,
        params: &AttendParams<'_>,
        out: &mut Self::Output<'_>,
        lse: Option<&mut Self::Lse<'_>>,
    );
    /// Attention over the cache as it was before the step, plus the new tokens, exact.
    #[allow(clippy::too_many_arguments)]
    fn prefill(
        &mut self,
        layer: usize,
        step: &Step,
        q: &Self::Tensor<'_>,
        k: &Self::Tensor<'_>,
        v: &Self::Tensor<'_>,
        params: &AttendParams<'_>,
        out: &mut Self::Output<'_>,
        lse: Option<&mut Self::Lse<'_>>,
    );

    /// Closes tiles `from / 64 .. to / 64` of a seat from its window. Returns values clamped.
    fn close_tiles(&mut self, layer: usize, seat: Seat, table: &[i32], from: usize, to: usize) -> u64;
    /// Decodes tokens `from..to` of a block into the window.
    fn decode_into_window(&mut self, layer: usize, seat: Seat, block: i32, from: usize, to: usize);
    /// Copies all pages of a block.
    fn copy_block(&mut self, from: i32, to: i32);
    /// Copies window, sinks and means of a seat.
    fn copy_seat(&mut self, from: Seat, to: Seat);
    /// Sinks and means of a seat.
    fn snapshot(&self, seat: Seat) -> Self::Snapshot;
    /// Puts a snapshot into a seat.
    fn restore(&mut self, seat: Seat, snapshot: &Self::Snapshot);
    /// Keys and values as the model sees them, `[len, kv_heads, dim]`.
    fn dequantize(
        &self,
        layer: usize,
        stored: &Stored<'_>,
        k: &mut Self::Output<'_>,
        v: &mut Self::Output<'_>,
    );

    /// A page in row order.
    fn read_page(&self, layer: usize, head: usize, block: i32) -> Vec<u8>;
    /// Writes a page in row order.
    fn write_page(&mut self, layer: usize, head: usize, block: i32, page: &[u8]);
    /// Key mean of a seat's layer and head; `None` for formats without centring.
    fn mean(&self, layer: usize, seat: Seat, head: usize) -> Option<Vec<f16>>;
    /// Sets it.
    fn set_mean(&mut self, layer: usize, seat: Seat, head: usize, mean: &[f16]);
    /// The sink rows of a seat, `[layer][head][key rows, value rows]` as f32.
    fn read_sinks(&self, seat: Seat) -> Vec<f32>;
    /// Writes them.
    fn write_sinks(&mut self, seat: Seat, rows: &[f32]);
}
