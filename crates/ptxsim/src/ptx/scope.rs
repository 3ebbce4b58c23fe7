//! Names inside a function.

use super::ast::{Register, RegisterId, Type};
use std::collections::HashMap;

/// What a name stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Local {
    Register(RegisterId),
    /// A register of a vector type.
    Registers(Vec<RegisterId>),
    /// A variable or parameter, by its unique name.
    Variable(String),
}

/// What a name before a colon stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Label {
    /// Index into the function's labels.
    Code(usize),
    /// A `.branchtargets`, `.calltargets` or `.callprototype`, by its unique name.
    Table(String),
}

/// `%r<100>`
#[derive(Debug, Clone, Copy)]
struct Range {
    count: u32,
    ty: Type,
    lanes: u32,
}

#[derive(Debug, Default)]
struct Scope<'a> {
    parent: Option<usize>,
    names: HashMap<&'a str, Local>,
    labels: HashMap<&'a str, Label>,
    ranges: HashMap<&'a str, Range>,
}

/// The scopes of a function: the outermost has index 0.
#[derive(Debug)]
pub(super) struct Scopes<'a> {
    scopes: Vec<Scope<'a>>,
    current: usize,
}

impl<'a> Scopes<'a> {
    pub(super) fn new() -> Self {
        Self { scopes: vec![Scope::default()], current: 0 }
    }

    pub(super) fn current(&self) -> usize {
        self.current
    }

    pub(super) fn enter(&mut self) {
        self.scopes.push(Scope { parent: Some(self.current), ..Scope::default() });
        self.current = self.scopes.len() - 1;
    }

    /// False in the outermost scope.
    pub(super) fn leave(&mut self) -> bool {
        let parent = self.scopes[self.current].parent;
        self.current = parent.unwrap_or(0);
        parent.is_some()
    }

    /// Declares a name; false if the scope has it.
    pub(super) fn declare(&mut self, name: &'a str, local: Local) -> bool {
        let scope = &mut self.scopes[self.current];
        scope.names.insert(name, local).is_none()
    }

    /// Declares `prefix<count>`; registers are made when they are first used, so that a count costs nothing.
    pub(super) fn declare_range(&mut self, prefix: &'a str, count: u32, ty: Type, lanes: u32) -> bool {
        self.scopes[self.current].ranges.insert(prefix, Range { count, ty, lanes }).is_none()
    }

    /// Declares a label; false if the scope has it.
    pub(super) fn declare_label(&mut self, name: &'a str, label: Label) -> bool {
        self.scopes[self.current].labels.insert(name, label).is_none()
    }

    /// The label that `name` means in a scope.
    pub(super) fn label(&self, name: &str, scope: usize) -> Option<&Label> {
        let mut at = Some(scope);
        while let Some(scope) = at.and_then(|i| self.scopes.get(i)) {
            if let Some(label) = scope.labels.get(name) {
                return Some(label);
            }
            at = scope.parent;
        }
        None
    }

    /// What `name` means here.
    pub(super) fn find(&mut self, name: &'a str, registers: &mut Vec<Register>) -> Option<&Local> {
        let mut at = self.current;
        loop {
            if self.scopes[at].names.contains_key(name) {
                break;
            }
            if let Some(range) = self.scopes[at].range(name) {
                let local = make(name, range.ty, range.lanes, registers);
                self.scopes[at].names.insert(name, local);
                break;
            }
            at = self.scopes[at].parent?;
        }
        self.scopes[at].names.get(name)
    }
}

impl Scope<'_> {
    /// The range that holds this name.
    fn range(&self, name: &str) -> Option<Range> {
        if self.ranges.is_empty() {
            return None;
        }
        let prefix = name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
        // a prefix may itself end in digits; a number has at most ten
        (prefix.max(name.len().saturating_sub(10))..name.len()).find_map(|split| {
            let (prefix, digits) = name.split_at(split);
            let range = self.ranges.get(prefix)?;
            let canonical = digits == "0" || !digits.starts_with('0');
            (canonical && digits.parse::<u32>().ok()? < range.count).then_some(*range)
        })
    }
}

/// New registers for a name.
pub(super) fn make(name: &str, ty: Type, lanes: u32, registers: &mut Vec<Register>) -> Local {
    let first = registers.len() as RegisterId;
    if lanes == 1 {
        registers.push(Register { name: name.to_string(), ty });
        return Local::Register(first);
    }
    for suffix in ["x", "y", "z", "w"].iter().take(lanes as usize) {
        registers.push(Register { name: format!("{name}.{suffix}"), ty });
    }
    Local::Registers((first..registers.len() as RegisterId).collect())
}
