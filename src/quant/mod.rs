//! The arithmetic of the formats: reference encoders and decoders.
pub mod affine;
pub(crate) mod codes;
pub mod fp8;
pub mod hadamard;
