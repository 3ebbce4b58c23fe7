//! Syntax trees to operations that are ready to run.
//!
//! * [`Image`]: a module whose variables have addresses.
//! * `decode`: a kernel and all it calls, to one list of operations; `operands` gives registers, literals and symbols
//!   rows, `memory_ops` decodes what touches memory, `sync_ops` what waits.
//! * `calls`: functions that a kernel reaches. `plan`: what its instructions read, write and lead to, for `flow`: control
//!   flow, liveness and rows.

mod calls;
mod code;
mod decode;
mod flow;
mod kernel;
mod memory_ops;
mod operands;
mod plan;
mod sync_ops;

pub(crate) use calls::function_index;
pub(crate) use code::*;

pub use kernel::Kernel;

use crate::card::Card;
use crate::memory::{GlobalMemory, MemoryError};
use crate::options::Options;
use crate::ptx::ast::{Function, Module, Space, Variable};
use std::collections::HashMap;
use std::sync::Arc;

/// Addresses of functions: index times [`FUNCTION_STRIDE`] behind it.
pub(crate) const FUNCTION_BASE: u64 = 0x0130_0000_0000;
/// Distance of function addresses.
pub(crate) const FUNCTION_STRIDE: u64 = 16;

/// A module on a card: its variables have addresses.
#[derive(Debug)]
pub struct Image {
    /// The syntax tree.
    pub module: Arc<Module>,
    /// Addresses and sizes of `.global` and `.const` variables. Those declared inside a function are
    /// `function::variable`.
    pub variables: HashMap<String, (u64, u64)>,
}

impl Image {
    /// Allocates and fills the module's variables.
    ///
    /// # Errors
    /// A sentence, if memory does not suffice or an initialiser names an unknown symbol. Nothing stays allocated.
    pub fn load(module: Arc<Module>, memory: &GlobalMemory) -> Result<Self, String> {
        let mut image = Self { module, variables: HashMap::new() };
        let filled = image.fill(memory);
        if let Err(e) = filled {
            image.unload(memory);
            return Err(e);
        }
        Ok(image)
    }

    fn fill(&mut self, memory: &GlobalMemory) -> Result<(), String> {
        let module = Arc::clone(&self.module);
        let inside = |f: &Function, v: &Variable| format!("{}::{}", f.name, v.name);
        let local = module.functions.iter().flat_map(|f| f.locals.iter().map(move |v| (inside(f, v), v)));
        let all: Vec<(String, &Variable)> =
            module.variables.iter().map(|v| (v.name.clone(), v)).chain(local).collect();
        let placed = |v: &Variable| matches!(v.space, Space::Global | Space::Const);
        for (name, v) in all.iter().filter(|(_, v)| placed(v)) {
            if v.external {
                // Another module's; a use of it is refused when a kernel is loaded.
                continue;
            }
            let constant = v.space == Space::Const;
            let address = memory
                .alloc_named(v.bytes, v.align.into(), Some(v.name.clone()), constant)
                .map_err(|e: MemoryError| format!("variable {}: {e}", v.name))?;
            self.variables.insert(name.clone(), (address, v.bytes));
        }
        for (name, v) in all.iter().filter(|(_, v)| placed(v)) {
            let Some((address, bytes)) = self.variables.get(name).copied() else { continue };
            // Memory of module variables starts as zero (PTX ISA 5.4.4).
            let mut contents = vec![0u8; bytes as usize];
            if let Some(init) = &v.init {
                let n = init.bytes.len().min(contents.len());
                contents[..n].copy_from_slice(&init.bytes[..n]);
                for r in &init.relocations {
                    let target = self.address_of(&r.symbol).ok_or_else(|| {
                        format!("the initialiser of {} names {}, which has no address", v.name, r.symbol)
                    })?;
                    let value = target.wrapping_add_signed(r.addend) >> r.shift.min(63);
                    let (at, n) = (r.offset as usize, r.bytes.min(8) as usize);
                    let Some(place) = contents.get_mut(at..at.saturating_add(n)) else {
                        return Err(format!("the initialiser of {} is longer than the variable", v.name));
                    };
                    place.copy_from_slice(&value.to_le_bytes()[..n]);
                }
            }
            memory.write(address, &contents).map_err(|e| format!("variable {}: {e}", v.name))?;
        }
        Ok(())
    }

    /// The address of a variable or function of the module.
    pub(crate) fn address_of(&self, symbol: &str) -> Option<u64> {
        if let Some((address, _)) = self.variables.get(symbol) {
            return Some(*address);
        }
        let index = self.module.functions.iter().position(|f| f.name == symbol && !f.declaration)?;
        Some(FUNCTION_BASE + index as u64 * FUNCTION_STRIDE)
    }

    /// Frees the variables.
    pub fn unload(&self, memory: &GlobalMemory) {
        for (address, _) in self.variables.values() {
            // Each was allocated by `load` and is freed once: there is nothing to report.
            let _ = memory.free(*address);
        }
    }

    /// Decodes a kernel and all it calls.
    ///
    /// # Errors
    /// Everything in it that is not known, at once.
    pub fn kernel(&self, name: &str, card: &Card, options: &Options) -> Result<Kernel, LoadError> {
        decode::kernel(self, name, card, options)
    }
}

/// Why a kernel cannot be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LoadError {
    /// No kernel of this name.
    NotFound(String),
    /// Instructions that are not known: one sentence each, with line and kernel.
    Unsupported(Vec<String>),
}

impl std::fmt::Display for LoadError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotFound(name) => write!(f, "the module has no kernel {name}"),
            Self::Unsupported(what) => f.write_str(&what.join("\n")),
        }
    }
}

impl std::error::Error for LoadError {}
