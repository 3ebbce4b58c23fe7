//! Block Hadamard rotation.
use crate::Result;
pub(crate) fn check_block(_block: usize, _dim: usize) -> Result<()> { Ok(()) }
