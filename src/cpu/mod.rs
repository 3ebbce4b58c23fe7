//! The CPU backend.

pub(crate) mod attend;
