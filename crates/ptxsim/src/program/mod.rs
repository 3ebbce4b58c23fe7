//! Syntax trees to operations that are ready to run.

use crate::card::Card;
use crate::memory::GlobalMemory;
use crate::options::Options;
use crate::ptx::ast::Module;
use std::collections::HashMap;
use std::sync::Arc;

/// A module on a card: its variables have addresses.
#[derive(Debug)]
pub struct Image {
    /// The syntax tree.
    pub module: Arc<Module>,
    /// Addresses and sizes of `.global` and `.const` variables.
    pub variables: HashMap<String, (u64, u64)>,
}

impl Image {
    /// Allocates and fills the module's variables.
    ///
    /// # Errors
    /// A sentence, if memory does not suffice or an initialiser names an unknown symbol.
    pub fn load(module: Arc<Module>, memory: &GlobalMemory) -> Result<Self, String> {
        let _ = memory;
        Ok(Self { module, variables: HashMap::new() })
    }

    /// Frees the variables.
    pub fn unload(&self, memory: &GlobalMemory) {
        let _ = memory;
    }

    /// Decodes a kernel.
    ///
    /// # Errors
    /// Everything in it that is not known, at once.
    pub fn kernel(&self, name: &str, card: &Card, options: &Options) -> Result<Kernel, LoadError> {
        let _ = (card, options);
        Err(LoadError::NotFound(name.to_string()))
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

/// A kernel that is ready to run.
#[derive(Debug)]
pub struct Kernel {
    /// Its name.
    pub name: String,
    /// Offset and size in bytes of each parameter.
    pub params: Vec<(u64, u64)>,
    /// Bytes of all parameters.
    pub param_bytes: u64,
    /// Static shared memory in bytes.
    pub shared_bytes: u32,
    /// Local memory of a thread in bytes.
    pub local_bytes: u32,
    /// Registers of a thread, estimated from the PTX (the driver knows better where it has a cubin).
    pub estimated_registers: u32,
    /// Directives.
    pub limits: crate::ptx::ast::Limits,
}
