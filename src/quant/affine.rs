//! Affine codes.
use crate::{Fit, Result};
pub(crate) fn check_fit(_fit: &Fit) -> Result<()> { Ok(()) }
