//! The arithmetic of the formats: reference encoders and decoders, and quantization of whole tensors.

pub(crate) mod affine;
pub(crate) mod codes;
pub(crate) mod columns;
mod fit;
pub mod fp8;
mod fp8_tensor;
pub(crate) mod hadamard;
mod half16;
pub(crate) mod page;
pub(crate) mod rows;
mod tensor;

pub use affine::Pair;
pub use tensor::{Pairs, Quantized, dequantize, pack, quantize, quantize_with, unpack};
