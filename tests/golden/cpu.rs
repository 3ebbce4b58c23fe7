//! The CPU path.

use crate::functions::{Functions, RoundTrip, format};
use crate::golden::{Tensor, filled};
use crate::views::View;
use qkv::quant::fp8::{self, Fp8Tensor};
use qkv::quant::{Quantized, dequantize, quantize, quantize_with};
use qkv::{Bits, Dtype, Error, Fit, Fp8};

/// The CPU functions over plain tensors.
#[derive(Debug)]
pub(crate) struct Cpu;

impl Functions for Cpu {
    fn quantize_with(&self, x: &Tensor, view: &View, bits: Bits, pairs: &[(f32, f32)]) -> Vec<u8> {
        quantize_with(&x.thd(view.dims), bits, view.group, view.axis, pairs).unwrap().codes()
    }

    fn dequantize(
        &self,
        view: &View,
        bits: Bits,
        codes: &[u8],
        pairs: &[(f32, f32)],
        dtype: Dtype,
    ) -> Tensor {
        let q = Quantized::from_codes(view.dims, bits, view.group, view.axis, codes, pairs).unwrap();
        filled(dtype, view.dims, |out| dequantize(&q, out).unwrap())
    }

    fn round_trip(
        &self,
        x: &Tensor,
        view: &View,
        bits: Bits,
        fit: Fit,
        dtype: Dtype,
    ) -> Result<RoundTrip, Error> {
        let q = quantize(&x.thd(view.dims), &format(view, bits, fit))?;
        let decoded = filled(dtype, view.dims, |out| dequantize(&q, out).unwrap());
        Ok(RoundTrip { pairs: q.pairs().to_f32(), decoded })
    }

    fn encode(&self, x: &Tensor, dims: [usize; 3], format: Fp8, scales: Option<&[f32]>) -> Fp8Tensor {
        fp8::encode(&x.thd(dims), format, scales).unwrap()
    }

    fn decode(&self, x: &Fp8Tensor, dtype: Dtype) -> Tensor {
        filled(dtype, x.dims(), |out| fp8::decode(x, out).unwrap())
    }
}
