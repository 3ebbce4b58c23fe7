use crate::config::check_factors;
use crate::cuda::{DeviceSlice, check};
use crate::error::{Error, Result};

/// Parameters of an attention launch: `softmax(mask(softcap(scale * q·k))) · v`, as
/// [`AttendParams`](crate::AttendParams) with its arrays in device memory.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct DeviceAttendParams<'a> {
    /// Factor of the logits; `None` = `1 / sqrt(key_dim)`.
    pub scale: Option<f32>,
    /// `cap * tanh(s / cap)` on the scaled logits.
    pub softcap: Option<f32>,
    /// f32 `[query heads]`: one extra logit a query head that takes part in the softmax and has no value. It counts in the LSE.
    pub sink_logits: Option<DeviceSlice<'a, f32>>,
    /// i32 `[ranges][start, end)` of absolute token numbers whose members see each other whatever their order, for every
    /// sequence of the batch. Only `prefill` takes them.
    pub bidirectional: Option<DeviceSlice<'a, i32>>,
    /// Queries stay floating-point numbers. Otherwise up to 4 rows of a kv head over affine formats are rounded to 16-bit fixed point,
    /// which is more exact than f16 but for queries with a few very large elements beside much smaller ones (`attend`).
    pub exact_queries: bool,
    /// Pages of 64 tokens of a split, where a sequence's results must have the same bits whatever else is in the batch; `None` = the
    /// work is spread evenly over the device (`attend`).
    pub fixed_split: Option<usize>,
}

impl<'a> DeviceAttendParams<'a> {
    /// Causal attention with scale `1 / sqrt(key_dim)`.
    pub fn new() -> Self {
        Self::default()
    }

    /// Factor of the logits.
    pub fn with_scale(self, scale: f32) -> Self {
        Self { scale: Some(scale), ..self }
    }

    /// `cap * tanh(s / cap)` on the scaled logits.
    pub fn with_softcap(self, cap: f32) -> Self {
        Self { softcap: Some(cap), ..self }
    }

    /// One extra logit a query head.
    pub fn with_sink_logits(self, logits: DeviceSlice<'a, f32>) -> Self {
        Self { sink_logits: Some(logits), ..self }
    }

    /// Ranges whose members see each other (prefill only).
    pub fn with_bidirectional(self, ranges: DeviceSlice<'a, i32>) -> Self {
        Self { bidirectional: Some(ranges), ..self }
    }

    /// Keeps queries in floating point: for models whose queries have huge outliers.
    pub fn with_exact_queries(self) -> Self {
        Self { exact_queries: true, ..self }
    }

    /// Batch invariance: each sequence is cut every so many pages of 64 tokens. Fewer pages spread few sequences over more of the
    /// device; more take less workspace and fewer joins. 8 to 64 are usual. A cache takes it if it was built with
    /// [`CudaOptions::with_fixed_split`](crate::cuda::CudaOptions::with_fixed_split).
    pub fn with_fixed_split(self, pages: usize) -> Self {
        Self { fixed_split: Some(pages), ..self }
    }

    /// Checks factors and array lengths. Values in device memory are not read: a NaN sink logit makes its head's rows NaN.
    pub(crate) fn check(&self, query_heads: usize) -> Result<()> {
        check_factors(self.scale, self.softcap)?;
        if self.fixed_split == Some(0) {
            return Err(Error::Unsupported {
                what: "fixed_split",
                got: "0 pages".into(),
                why: "a split has at least one page of 64 tokens".into(),
            });
        }
        if let Some(s) = self.sink_logits {
            check::len("sink_logits", query_heads, s.len())?;
            check::address("sink_logits", s.address(), 4)?;
        }
        if let Some(b) = self.bidirectional {
            check::len("bidirectional (start and end of each range)", b.len().next_multiple_of(2), b.len())?;
            if !b.is_empty() {
                check::address("bidirectional", b.address(), 4)?;
            }
        }
        Ok(())
    }

    /// The factor of the logits of keys of this many channels.
    pub(crate) fn scale_for(&self, key_dim: usize) -> f32 {
        self.scale.unwrap_or(1.0 / (key_dim as f32).sqrt())
    }
}
