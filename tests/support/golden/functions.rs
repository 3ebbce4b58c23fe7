//! What the classes call: the same cases and limits for every path of the library.

use crate::golden::Tensor;
use crate::views::View;
use qkv::quant::fp8::Fp8Tensor;
use qkv::{Affine, Axis, Bits, Dtype, Error, Fit, Fp8};

/// A tensor quantized with our own fit and decoded again.
#[derive(Debug)]
pub(crate) struct RoundTrip {
    /// (step, min) in the order of the view.
    pub(crate) pairs: Vec<(f32, f32)>,
    pub(crate) decoded: Tensor,
}

/// The functions under test. Codes are one a byte, pairs in the order of the view.
pub(crate) trait Functions {
    /// Codes for given pairs.
    fn quantize_with(&self, x: &Tensor, view: &View, bits: Bits, pairs: &[(f32, f32)]) -> Vec<u8>;

    /// Given codes and pairs, decoded to a dtype.
    fn dequantize(&self, view: &View, bits: Bits, codes: &[u8], pairs: &[(f32, f32)], dtype: Dtype)
    -> Tensor;

    /// Our own pairs and codes, decoded to a dtype.
    fn round_trip(
        &self,
        x: &Tensor,
        view: &View,
        bits: Bits,
        fit: Fit,
        dtype: Dtype,
    ) -> Result<RoundTrip, Error>;

    /// FP8 bytes with given scales or our own.
    fn encode(&self, x: &Tensor, dims: [usize; 3], format: Fp8, scales: Option<&[f32]>) -> Fp8Tensor;

    /// FP8 bytes decoded to a dtype.
    fn decode(&self, x: &Fp8Tensor, dtype: Dtype) -> Tensor;
}

/// The affine format of a view.
pub(crate) fn format(view: &View, bits: Bits, fit: Fit) -> Affine {
    match view.axis {
        Axis::PerToken => Affine::per_token(bits, view.group),
        Axis::PerChannel => Affine::per_channel(bits, view.group),
    }
    .with_fit(fit)
}
