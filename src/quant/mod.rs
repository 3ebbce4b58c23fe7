//! The arithmetic of the formats: reference encoders and decoders.
pub mod affine;
pub(crate) mod codes;
mod fit;
pub mod fp8;
pub mod hadamard;
#[allow(dead_code)]
pub(crate) mod page;
