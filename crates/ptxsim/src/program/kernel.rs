//! A decoded kernel.

use super::code::{Code, Files, Flow, Pc, What};
use crate::ptx::ast::{Limits, Location};
use std::sync::Arc;

/// A kernel that is ready to run.
#[derive(Debug)]
pub struct Kernel {
    /// Its name.
    pub name: String,
    /// Offset and size in bytes of each parameter.
    pub params: Vec<(u64, u64)>,
    /// Bytes of all parameters.
    pub param_bytes: u64,
    /// Static shared memory in bytes; dynamic shared memory starts there.
    pub shared_bytes: u32,
    /// Local memory of a thread in bytes.
    pub local_bytes: u32,
    /// Registers of a thread, estimated from the PTX (the driver knows better where it has a cubin).
    pub estimated_registers: u32,
    /// Directives.
    pub limits: Limits,
    /// Operations of the kernel and of all it calls.
    pub(crate) code: Vec<Code>,
    /// By operation: its place in the text.
    pub(crate) locations: Vec<Location>,
    /// By operation: its name.
    pub(crate) names: Vec<Arc<str>>,
    /// By operation: what taint does.
    pub(crate) flows: Vec<Flow>,
    /// By operation: where it comes in an order in which a split warp comes together as soon as it can.
    pub(crate) order: Vec<u32>,
    /// Register files.
    pub(crate) files: Files,
    /// Source files by index.
    pub(crate) sources: Vec<(u32, String)>,
    /// Smallest access to shared memory in bytes: what races are told apart by.
    pub(crate) shared_granule: u32,
    /// Blocks must run in order: what atomics return, or in which order they add floats, could be seen.
    pub(crate) ordered: bool,
    /// It reads memory again and again that others may write meanwhile: it waits for them.
    pub(crate) polls: bool,
    /// It calls through registers.
    pub(crate) indirect: bool,
    /// First operation of each function, in order.
    pub(crate) starts: Vec<Pc>,
}

impl Kernel {
    /// First operation of the function that an operation is part of.
    pub(crate) fn start_of(&self, pc: Pc) -> Option<Pc> {
        self.starts.get(self.starts.partition_point(|s| *s <= pc).checked_sub(1)?).copied()
    }

    /// Whether control may come from one operation to another of the same function; it may have run both.
    pub(crate) fn leads_to(&self, from: Pc, to: Pc) -> bool {
        let mut seen = std::collections::HashSet::new();
        let mut work = vec![from + 1];
        while let Some(at) = work.pop() {
            // `exit` itself is where early returns wait too: being there says nothing.
            let Some(code) = self.code.get(at as usize) else { continue };
            if !seen.insert(at) || matches!(code.what, What::Exit) && code.guard.is_none() {
                continue;
            }
            if at == to {
                return true;
            }
            let falls = code.guard.is_some();
            match &code.what {
                What::Branch(target) => work.push(*target),
                What::BranchIndexed { targets, .. } => work.extend(targets.iter()),
                What::Return | What::Trap => {}
                _ => {
                    work.push(at + 1);
                    continue;
                }
            }
            if falls {
                work.push(at + 1);
            }
        }
        false
    }

    /// `path:line` of an operation, if the PTX has line information.
    pub(crate) fn source(&self, pc: usize) -> Option<String> {
        let at = self.locations.get(pc)?;
        let (_, path) = self.sources.iter().find(|(i, _)| *i == at.file)?;
        (at.line != 0).then(|| format!("{path}:{}", at.line))
    }
}
