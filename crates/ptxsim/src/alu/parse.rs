//! An instruction's modifiers and operands.

use super::lanes::{Isa, NEGATED, Once};
use crate::exec::regs::{File, Form};
use crate::options::Options;
use crate::ptx::ast::{Function, Instruction, Operand, Type};

/// An instruction being looked at. Modifiers are a set: each is taken by what understands it, and one that is left at
/// the end is an error.
#[derive(Debug)]
pub(crate) struct Parse<'a> {
    instruction: &'a Instruction,
    function: &'a Function,
    left: Vec<&'a str>,
    /// Compute capability of the card.
    pub(crate) cc: u32,
    /// Options of the launch.
    pub(crate) options: &'a Options,
    /// Instruction set to compile for.
    pub(crate) isa: Isa,
    /// For operations that are not worth compiling twice.
    pub(crate) once: Once,
}

impl<'a> Parse<'a> {
    pub(crate) fn new(
        instruction: &'a Instruction,
        function: &'a Function,
        cc: u32,
        options: &'a Options,
    ) -> Self {
        let left = instruction.modifiers.iter().map(|m| &**m).collect();
        Self { instruction, function, left, cc, options, isa: Isa::new(options), once: Once }
    }

    /// `add` of `add.s32`.
    pub(crate) fn opcode(&self) -> &'a str {
        &self.instruction.opcode
    }

    /// Takes a modifier; whether it was there.
    pub(crate) fn take(&mut self, name: &str) -> bool {
        match self.left.iter().position(|m| *m == name) {
            Some(i) => {
                self.left.remove(i);
                true
            }
            None => false,
        }
    }

    /// Takes the first modifier that is in the table.
    pub(crate) fn pick<T: Copy>(&mut self, table: &[(&str, T)]) -> Option<T> {
        let (i, value) = self
            .left
            .iter()
            .enumerate()
            .find_map(|(i, m)| table.iter().find(|(name, _)| name == m).map(|&(_, v)| (i, v)))?;
        self.left.remove(i);
        Some(value)
    }

    /// Takes the next type.
    pub(crate) fn ty(&mut self) -> Result<Type, String> {
        let (i, ty) = self
            .left
            .iter()
            .enumerate()
            .find_map(|(i, m)| Type::parse(m).map(|t| (i, t)))
            .ok_or_else(|| format!("{} has no type", self.instruction))?;
        self.left.remove(i);
        Ok(ty)
    }

    /// The last type, without taking it.
    pub(crate) fn last_type(&self) -> Option<Type> {
        self.left.iter().rev().find_map(|m| Type::parse(m))
    }

    /// Refuses the instruction below a compute capability.
    pub(crate) fn need(&self, cc: u32) -> Result<(), String> {
        if self.cc >= cc {
            return Ok(());
        }
        Err(format!(
            "{} needs compute capability {}.{}, the card has {}.{}",
            self.instruction,
            cc / 10,
            cc % 10,
            self.cc / 10,
            self.cc % 10
        ))
    }

    /// The error of a form that is not known.
    pub(crate) fn unknown(&self) -> String {
        format!("{} is not known in this form", self.instruction)
    }

    /// An operand by its place, vectors not flattened.
    pub(crate) fn operand(&self, i: usize) -> Option<&'a Operand> {
        self.instruction.operands.get(i)
    }

    /// How many operands there are, vectors and pairs not flattened.
    pub(crate) fn operands(&self) -> usize {
        self.instruction.operands.len()
    }

    /// An integer literal that the form needs when it is chosen.
    pub(crate) fn constant(&self, i: usize) -> Result<i128, String> {
        match self.operand(i) {
            Some(&Operand::Integer(x)) => Ok(x),
            _ => Err(format!("operand {} of {} has to be a constant", i + 1, self.instruction)),
        }
    }

    /// The declared type of a register operand.
    pub(crate) fn register_type(&self, operand: &Operand) -> Option<Type> {
        match operand {
            Operand::Register(id) | Operand::Not(id) => {
                self.function.registers.get(*id as usize).map(|r| r.ty)
            }
            _ => None,
        }
    }

    /// Checks that nothing is left over and that operands fit, and notes which predicates are negated.
    pub(crate) fn finish(self, mut form: Form) -> Result<Form, String> {
        let name = self.instruction;
        if let Some(m) = self.left.first() {
            return Err(format!("unknown modifier .{m} in {name}"));
        }
        let mut flat = Vec::new();
        for o in &name.operands {
            flatten(o, &mut flat);
        }
        let (nd, ns) = (form.destinations.len(), form.sources.len());
        if flat.len() != nd + ns {
            return Err(format!("{name} takes {} operands, here are {}", nd + ns, flat.len()));
        }
        let files = form.destinations.iter().copied().chain(form.sources.iter().map(|s| s.file));
        for (i, (operand, file)) in flat.iter().zip(files).enumerate() {
            if let Operand::Not(_) = operand {
                if i < nd || file != File::Pred || i - nd >= 8 {
                    return Err(format!("operand {} of {name} cannot be negated", i + 1));
                }
                form.imm |= 1 << (NEGATED as usize + i - nd);
            }
            if let Some(ty) = self.register_type(operand)
                && file_of(ty) != Some(file)
            {
                return Err(format!(
                    "operand {} of {name} is a register of {ty:?}, which does not fit",
                    i + 1
                ));
            }
            if i < nd && !matches!(operand, Operand::Register(_) | Operand::Sink) {
                return Err(format!("operand {} of {name} has to be a register", i + 1));
            }
        }
        Ok(form)
    }
}

/// A bit of a form's constants, if it is wanted.
pub(crate) fn flag(on: bool, bit: u64) -> u64 {
    if on { bit } else { 0 }
}

/// Operands in order, those of vectors and pairs among them.
fn flatten<'a>(operand: &'a Operand, flat: &mut Vec<&'a Operand>) {
    match operand {
        Operand::Vector(v) => v.iter().for_each(|o| flatten(o, flat)),
        Operand::Pair(a, b) => {
            flatten(a, flat);
            flatten(b, flat);
        }
        o => flat.push(o),
    }
}

/// The register file of a declared type; `None` for 128-bit registers.
pub(crate) fn file_of(ty: Type) -> Option<File> {
    Some(match ty {
        Type::Pred => File::Pred,
        Type::B128 => return None,
        Type::B64 | Type::U64 | Type::S64 | Type::F64 | Type::F32x2 => File::Wide,
        _ => File::Narrow,
    })
}

/// Bits of a type.
pub(crate) fn bits_of(ty: Type) -> u32 {
    match ty {
        Type::Pred | Type::B1 => 1,
        Type::S4 | Type::U4 => 4,
        Type::B8 | Type::U8 | Type::S8 | Type::E4M3 | Type::E5M2 => 8,
        Type::B16 | Type::U16 | Type::S16 | Type::F16 | Type::BF16 | Type::E4M3x2 | Type::E5M2x2 => 16,
        Type::B64 | Type::U64 | Type::S64 | Type::F64 | Type::F32x2 => 64,
        Type::B128 => 128,
        _ => 32,
    }
}
