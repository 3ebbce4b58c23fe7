//! Rows for registers, literals, symbols and special registers.

use super::code::{Files, RowRef};
use super::{FUNCTION_BASE, FUNCTION_STRIDE, Image};
use crate::exec::regs::{File, Literal};
use crate::ptx::ast::{Address, Base, Function, Operand, RegisterId, Space, Special, Type};
use std::collections::HashMap;

/// The file a register of this type lives in; `None` for `.b128`.
pub(crate) fn file_of(ty: Type) -> Option<File> {
    match ty.bits() {
        _ if ty == Type::Pred => Some(File::Pred),
        0..=32 => Some(File::Narrow),
        33..=64 => Some(File::Wide),
        _ => None,
    }
}

/// What a name in a function stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Offset in shared memory.
    Shared(u32),
    /// Offset in a thread's local memory.
    Local(u32),
    /// Offset in the kernel's parameters.
    Param(u32),
    /// Address.
    Global(u64),
    /// Address of a function.
    Function(u64),
}

/// Shared and local memory, laid out.
#[derive(Debug, Default)]
pub(crate) struct Layout {
    /// Names of module scope.
    pub module: HashMap<String, Place>,
    /// Names of each decoded function, by its index in the module.
    pub functions: HashMap<usize, HashMap<String, Place>>,
    /// Static shared memory; dynamic shared memory starts there.
    pub shared: u32,
    /// Local memory of a thread.
    pub local: u32,
}

impl Layout {
    /// Lays out what the functions `reached` name; the first one is the kernel.
    pub(crate) fn new(image: &Image, reached: &[usize]) -> Result<Self, String> {
        let module = &image.module;
        let mut layout = Self::default();
        for (name, (address, _)) in &image.variables {
            layout.module.insert(name.clone(), Place::Global(*address));
        }
        for (i, f) in module.functions.iter().enumerate().filter(|(_, f)| !f.declaration) {
            layout.module.insert(f.name.clone(), Place::Function(FUNCTION_BASE + i as u64 * FUNCTION_STRIDE));
        }
        let mut used = std::collections::HashSet::new();
        for f in reached {
            for i in &module.functions[*f].body {
                i.operands.iter().for_each(|o| symbols(o, &mut used));
            }
        }
        let mut dynamic = Vec::new();
        let mut align = 16;
        let take = |at: &mut u32, align: u32, bytes: u64| -> Result<u32, String> {
            let start = u64::from(*at).next_multiple_of(align.max(1).into());
            let end = start + bytes;
            if end > 1 << 24 {
                return Err(format!("{end} bytes of shared or local memory are more than any card has"));
            }
            *at = end as u32;
            Ok(start as u32)
        };
        for v in
            module.variables.iter().filter(|v| v.space == Space::Shared && used.contains(v.name.as_str()))
        {
            if v.external || v.bytes == 0 {
                align = align.max(v.align);
                dynamic.push((None, v.name.clone()));
            } else {
                let at = take(&mut layout.shared, v.align, v.bytes)?;
                layout.module.insert(v.name.clone(), Place::Shared(at));
            }
        }
        for (n, f) in reached.iter().enumerate() {
            let function = &module.functions[*f];
            let mut names = HashMap::new();
            if n == 0 {
                for (p, (offset, _)) in function.params.iter().zip(function.param_offsets()) {
                    names.insert(p.name.clone(), Place::Param(offset as u32));
                }
            }
            let formal = function.params.iter().filter(|_| n != 0).chain(&function.returns);
            for v in formal.chain(&function.locals) {
                let place = match v.space {
                    Space::Shared if v.external || v.bytes == 0 => {
                        align = align.max(v.align);
                        dynamic.push((Some(*f), v.name.clone()));
                        continue;
                    }
                    Space::Shared => Place::Shared(take(&mut layout.shared, v.align, v.bytes)?),
                    Space::Local | Space::Param => {
                        Place::Local(take(&mut layout.local, v.align.max(1), v.bytes)?)
                    }
                    Space::Global | Space::Const => {
                        match image.variables.get(&format!("{}::{}", function.name, v.name)) {
                            Some((address, _)) => Place::Global(*address),
                            None => continue,
                        }
                    }
                    Space::Reg => continue,
                };
                names.insert(v.name.clone(), place);
            }
            layout.functions.insert(*f, names);
        }
        // Dynamic shared memory follows the static one, at the largest alignment asked for.
        layout.shared = take(&mut layout.shared.clone(), align, 0)?;
        for (function, name) in dynamic {
            let place = Place::Shared(layout.shared);
            match function {
                Some(f) => layout.functions.entry(f).or_default().insert(name, place),
                None => layout.module.insert(name, place),
            };
        }
        layout.local = layout.local.next_multiple_of(16);
        Ok(layout)
    }

    /// What a name stands for in a function.
    pub(crate) fn find(&self, function: usize, name: &str) -> Option<Place> {
        self.functions.get(&function).and_then(|f| f.get(name)).or_else(|| self.module.get(name)).copied()
    }
}

/// Names that an operand holds.
pub(crate) fn symbols<'a>(operand: &'a Operand, out: &mut std::collections::HashSet<&'a str>) {
    let address = |a: &'a Address| match &a.base {
        Base::Symbol(s) => Some(s.as_str()),
        _ => None,
    };
    match operand {
        Operand::Symbol(s, _) => {
            out.insert(s);
        }
        Operand::Address(a) => out.extend(address(a)),
        Operand::Tensor(a, lists) => {
            out.extend(address(a));
            lists.iter().flatten().for_each(|o| symbols(o, out));
        }
        Operand::Vector(list) | Operand::List(list) => list.iter().for_each(|o| symbols(o, out)),
        Operand::Pair(a, b) => {
            symbols(a, out);
            symbols(b, out);
        }
        _ => {}
    }
}

/// Vectors and pairs taken apart.
pub(crate) fn flatten<'a>(operand: &'a Operand, out: &mut Vec<&'a Operand>) {
    match operand {
        Operand::Vector(list) => list.iter().for_each(|o| flatten(o, out)),
        Operand::Pair(a, b) => {
            flatten(a, out);
            flatten(b, out);
        }
        o => out.push(o),
    }
}

/// Hands out rows while a kernel is decoded.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    /// Files so far: constants and special registers grow them.
    pub files: Files,
    narrow: HashMap<u32, u16>,
    wide: HashMap<u64, u16>,
    preds: HashMap<bool, u16>,
    specials: HashMap<(Special, File), u16>,
    scratch: HashMap<File, u16>,
    /// Row of each register of each function, set before it is decoded.
    registers: HashMap<usize, Vec<u32>>,
}

fn fits(n: usize) -> Result<u16, String> {
    u16::try_from(n).map_err(|_| "more than 65,535 live registers in one kernel".to_string())
}

impl Rows {
    /// A new row of a file.
    pub(crate) fn fresh(&mut self, file: File) -> Result<u16, String> {
        let n = match file {
            File::Narrow => &mut self.files.narrow,
            File::Wide => &mut self.files.wide,
            File::Pred => &mut self.files.preds,
        };
        *n += 1;
        fits(*n - 1)
    }

    /// Sets the rows of a function's registers.
    pub(crate) fn set_registers(&mut self, function: usize, rows: Vec<u32>) {
        self.registers.insert(function, rows);
    }

    /// The row of a register.
    pub(crate) fn register(&mut self, index: usize, f: &Function, id: RegisterId) -> Result<RowRef, String> {
        let Some(register) = f.registers.get(id as usize) else { return Err("unknown register".into()) };
        let Some(file) = file_of(register.ty) else {
            return Err(format!("128-bit registers are not supported ({})", register.name));
        };
        match self.registers.get(&index).and_then(|rows| rows.get(id as usize)) {
            Some(row) if *row != u32::MAX => Ok(RowRef { file, row: fits(*row as usize)? }),
            _ => Ok(RowRef { file, row: self.scratch(file)? }),
        }
    }

    /// Where results go that nobody reads.
    pub(crate) fn scratch(&mut self, file: File) -> Result<u16, String> {
        if let Some(row) = self.scratch.get(&file) {
            return Ok(*row);
        }
        let row = self.fresh(file)?;
        self.scratch.insert(file, row);
        Ok(row)
    }

    /// A row that holds a number.
    pub(crate) fn constant(&mut self, file: File, value: u64) -> Result<u16, String> {
        match file {
            File::Narrow => {
                if let Some(row) = self.narrow.get(&(value as u32)) {
                    return Ok(*row);
                }
                let row = self.fresh(file)?;
                self.narrow.insert(value as u32, row);
                self.files.narrow_constants.push((row, value as u32));
                Ok(row)
            }
            File::Wide => {
                if let Some(row) = self.wide.get(&value) {
                    return Ok(*row);
                }
                let row = self.fresh(file)?;
                self.wide.insert(value, row);
                self.files.wide_constants.push((row, value));
                Ok(row)
            }
            File::Pred => {
                if let Some(row) = self.preds.get(&(value != 0)) {
                    return Ok(*row);
                }
                let row = self.fresh(file)?;
                self.preds.insert(value != 0, row);
                self.files.pred_constants.push((row, value != 0));
                Ok(row)
            }
        }
    }

    /// A row that holds a special register.
    pub(crate) fn special(&mut self, file: File, special: Special) -> Result<u16, String> {
        if let Some(row) = self.specials.get(&(special, file)) {
            return Ok(*row);
        }
        let row = self.fresh(file)?;
        self.specials.insert((special, file), row);
        self.files.specials.push((RowRef { file, row }, special));
        Ok(row)
    }
}

/// The bits of a literal for a row of a file. `bits` are those of the register or type it stands for, which it must fit.
pub(crate) fn literal(operand: &Operand, file: File, meaning: Literal) -> Option<u64> {
    let f64_of = |o: &Operand| match o {
        Operand::F32(b) => Some(f64::from(f32::from_bits(*b))),
        Operand::F64(b) => Some(f64::from_bits(*b)),
        Operand::Integer(i) => Some(*i as f64),
        _ => None,
    };
    Some(match (operand, meaning) {
        (Operand::F32(b), Literal::F32) => u64::from(*b),
        (_, Literal::F32) => u64::from((f64_of(operand)? as f32).to_bits()),
        (_, Literal::F64) => f64_of(operand)?.to_bits(),
        (Operand::Integer(i), _) => *i as u64,
        (Operand::F32(b), Literal::Bits) => u64::from(*b),
        (Operand::F64(b), Literal::Bits) => {
            if file == File::Wide {
                *b
            } else {
                u64::from((f64::from_bits(*b) as f32).to_bits())
            }
        }
        (_, Literal::F16) => half::f16::from_f64(f64_of(operand)?).to_bits().into(),
        (_, Literal::BF16) => half::bf16::from_f64(f64_of(operand)?).to_bits().into(),
        _ => return None,
    })
}
