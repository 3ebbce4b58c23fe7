//! Instructions that touch memory.

use super::code::*;
use super::decode::Decoder;
use super::operands::{Place, flatten};
use crate::exec::regs::{File, Literal, Source};
use crate::ptx::ast::{Address, Base, Instruction, Operand, Type};
use crate::stats::Class;

/// Modifiers that change nothing here: caching, scopes and orders that are always kept.
const HINTS: &[&str] = &[
    "ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "weak", "cta", "cluster", "gpu", "sys", "volatile",
    "relaxed", "acquire", "release", "acq_rel", "sc", "mmio", "uni", "unified", "noftz", "coherent",
];

fn is_hint(m: &str) -> bool {
    HINTS.contains(&m)
        || m.starts_with("L1::")
        || m.starts_with("L2::")
        || m.starts_with("level::")
        || m.starts_with("sem::")
}

/// Elements of `.v2`, `.v4`, `.v8`.
fn vector(m: &str) -> Option<u32> {
    match m {
        "v2" => Some(2),
        "v4" => Some(4),
        "v8" => Some(8),
        _ => None,
    }
}

impl Decoder<'_> {
    /// A memory instruction, or `None` if it is none.
    pub(super) fn memory(&mut self, i: &Instruction) -> Result<Option<(What, Class)>, String> {
        Ok(Some(match &*i.opcode {
            "ld" | "ldu" => self.load(i)?,
            "st" => self.store(i)?,
            "atom" | "red" => self.atomic(i)?,
            "ldmatrix" | "stmatrix" => self.matrix(i)?,
            "cvta" | "isspacep" | "mapa" | "getctarank" => self.address_op(i)?,
            "prefetch" | "prefetchu" | "discard" | "applypriority" => (What::Nothing, Class::Other),
            "createpolicy" => {
                let Some(Operand::Register(r)) = i.operands.first() else {
                    return Err("expected a register".into());
                };
                // Cache policies change nothing here; the register gets a value like any other.
                (What::Clock(self.register(*r)?), Class::Other)
            }
            _ => return Ok(None),
        }))
    }

    /// Refuses modifiers that are neither known nor hints.
    pub(super) fn only(i: &Instruction, known: impl Fn(&str) -> bool) -> Result<(), String> {
        match i.modifiers.iter().find(|m| !is_hint(m) && !known(m) && Type::parse(m).is_none()) {
            Some(m) => Err(format!("the modifier .{m} is not known here")),
            None => Ok(()),
        }
    }

    /// The address an operand stands for.
    pub(super) fn address(&mut self, operand: Option<&Operand>) -> Result<AddressRow, String> {
        match operand {
            Some(Operand::Address(a)) => self.address_of(a),
            Some(Operand::Register(_)) => {
                let row = self.register(match operand {
                    Some(Operand::Register(r)) => *r,
                    _ => 0,
                })?;
                Ok(AddressRow { row, offset: 0 })
            }
            other => Err(format!("expected an address in brackets, got {other:?}")),
        }
    }

    pub(super) fn address_of(&mut self, a: &Address) -> Result<AddressRow, String> {
        let constant = |d: &mut Self, value: u64| -> Result<AddressRow, String> {
            let row = d.rows.constant(File::Wide, value)?;
            Ok(AddressRow { row: RowRef { file: File::Wide, row }, offset: 0 })
        };
        match &a.base {
            Base::Register(r) => {
                let row = self.register(*r)?;
                if row.file == File::Pred {
                    return Err("an address cannot be a predicate".into());
                }
                Ok(AddressRow { row, offset: a.offset })
            }
            Base::Symbol(name) => {
                let value = self.symbol(name)?.wrapping_add_signed(a.offset);
                constant(self, value)
            }
            Base::Absolute => constant(self, a.offset as u64),
        }
    }

    /// Where a modifier or a symbol says that an access goes.
    fn space(&self, i: &Instruction, address: Option<&Operand>) -> Result<Where, String> {
        let symbol = match address {
            Some(Operand::Address(Address { base: Base::Symbol(name), .. })) => {
                self.layout.find(self.index, name)
            }
            _ => None,
        };
        let has_param = i.modifiers.iter().any(|m| m.starts_with("param"));
        for m in &i.modifiers {
            match &**m {
                "global" | "const" => return Ok(Where::Global),
                "shared" | "shared::cta" => return Ok(Where::Shared),
                "shared::cluster" => return Ok(Where::Cluster),
                "local" => return Ok(Where::Local),
                _ => {}
            }
        }
        if has_param {
            return Ok(match symbol {
                Some(Place::Local(_)) => Where::Local,
                Some(Place::Param(_)) => Where::Param,
                _ if self.is_kernel => Where::Param,
                _ => Where::Local,
            });
        }
        Ok(match symbol {
            // A symbol without a space is an address in its own window.
            Some(Place::Shared(_)) => Where::Shared,
            Some(Place::Local(_)) => Where::Local,
            Some(Place::Param(_)) => Where::Param,
            _ => Where::Generic,
        })
    }

    fn strength(i: &Instruction) -> Strength {
        match () {
            () if ["relaxed", "acquire", "release", "mmio"].iter().any(|m| i.has(m)) => Strength::Strong,
            () if i.has("volatile") => Strength::Volatile,
            () => Strength::Weak,
        }
    }

    fn element(i: &Instruction) -> Result<(Type, u32), String> {
        let ty = i.ty().ok_or("the type is missing")?;
        if ty.bits() < 8 || ty.bits() > 64 {
            return Err(format!("accesses of type {ty:?} are not supported"));
        }
        let n = i.modifiers.iter().find_map(|m| vector(m)).unwrap_or(1);
        Ok((ty, n))
    }

    fn access_class(space: Where, load: bool) -> Class {
        match (space, load) {
            (Where::Global | Where::Generic, true) => Class::LoadGlobal,
            (Where::Global | Where::Generic, false) => Class::StoreGlobal,
            (Where::Shared | Where::Cluster, true) => Class::LoadShared,
            (Where::Shared | Where::Cluster, false) => Class::StoreShared,
            _ => Class::OtherMemory,
        }
    }

    fn known_access(m: &str) -> bool {
        vector(m).is_some()
            || matches!(m, "global" | "const" | "shared" | "shared::cta" | "shared::cluster" | "local")
            || m.starts_with("param")
    }

    fn load(&mut self, i: &Instruction) -> Result<(What, Class), String> {
        Self::only(i, Self::known_access)?;
        let (ty, n) = Self::element(i)?;
        let space = self.space(i, i.operands.get(1))?;
        let address = self.address(i.operands.get(1))?;
        let mut flat = Vec::new();
        i.operands.first().into_iter().for_each(|o| flatten(o, &mut flat));
        if flat.len() != n as usize {
            return Err(format!("expected {n} destinations, got {}", flat.len()));
        }
        let mut register_bits = ty.bits().max(32);
        let mut rows = Vec::new();
        for o in flat {
            rows.push(match o {
                Operand::Register(r) => {
                    register_bits = self.function.registers.get(*r as usize).map_or(32, |r| r.ty.bits());
                    let row = self.register(*r)?;
                    if row.file == File::Pred || (row.file == File::Narrow && ty.bits() > 32) {
                        return Err(format!("{} is too small", self.function.register_name(*r)));
                    }
                    row
                }
                Operand::Sink => {
                    let file = if ty.bits() > 32 { File::Wide } else { File::Narrow };
                    RowRef { file, row: self.rows.scratch(file)? }
                }
                other => return Err(format!("{other:?} cannot be loaded into")),
            });
        }
        self.flow.to = rows.clone().into();
        self.flow.from = [address.row].into();
        let access = Access {
            space,
            address,
            bytes: ty.bytes(),
            rows: rows.into(),
            signed: ty.is_signed(),
            register_bits,
            strength: Self::strength(i),
            acquire: i.has("acquire"),
            release: i.has("release"),
            inserts: false,
        };
        Ok((What::Load(Box::new(access)), Self::access_class(space, true)))
    }

    fn store(&mut self, i: &Instruction) -> Result<(What, Class), String> {
        if i.has("async") {
            return Err("st.async is not supported".into());
        }
        Self::only(i, Self::known_access)?;
        let (ty, n) = Self::element(i)?;
        let space = self.space(i, i.operands.first())?;
        let address = self.address(i.operands.first())?;
        let mut flat = Vec::new();
        i.operands.get(1).into_iter().for_each(|o| flatten(o, &mut flat));
        if flat.len() != n as usize {
            return Err(format!("expected {n} sources, got {}", flat.len()));
        }
        let mut rows = Vec::new();
        for o in flat {
            let row = self.data(o, ty)?;
            if row.file == File::Pred || (row.file == File::Narrow && ty.bits() > 32) {
                return Err("a source is smaller than the type".into());
            }
            rows.push(row);
        }
        self.flow.from = rows.clone().into();
        let access = Access {
            space,
            address,
            bytes: ty.bytes(),
            rows: rows.into(),
            signed: false,
            register_bits: ty.bits(),
            strength: Self::strength(i),
            acquire: i.has("acquire"),
            release: i.has("release"),
            inserts: false,
        };
        Ok((What::Store(Box::new(access)), Self::access_class(space, false)))
    }

    fn atomic(&mut self, i: &Instruction) -> Result<(What, Class), String> {
        if i.has("async") {
            return Err("red.async is not supported".into());
        }
        let returns = &*i.opcode == "atom";
        let kind_of = |m: &str| {
            Some(match m {
                "add" => AtomicKind::Add,
                "min" => AtomicKind::Min,
                "max" => AtomicKind::Max,
                "and" => AtomicKind::And,
                "or" => AtomicKind::Or,
                "xor" => AtomicKind::Xor,
                "exch" => AtomicKind::Exchange,
                "cas" => AtomicKind::CompareSwap,
                "inc" => AtomicKind::Increment,
                "dec" => AtomicKind::Decrement,
                _ => return None,
            })
        };
        Self::only(i, |m| Self::known_access(m) || kind_of(m).is_some())?;
        let kind = i.modifiers.iter().find_map(|m| kind_of(m)).ok_or("the operation is missing")?;
        let (ty, elements) = Self::element(i)?;
        let float = matches!(ty, Type::F16 | Type::F16x2 | Type::BF16 | Type::BF16x2 | Type::F32 | Type::F64);
        let fine = match kind {
            AtomicKind::Add => ty.bits() >= 16,
            AtomicKind::Min | AtomicKind::Max => !matches!(ty, Type::F64) && ty.bits() >= 16,
            AtomicKind::And | AtomicKind::Or | AtomicKind::Xor => !float && ty.bits() >= 32,
            AtomicKind::Exchange | AtomicKind::CompareSwap => !float && ty.bits() >= 16,
            AtomicKind::Increment | AtomicKind::Decrement => ty == Type::U32,
        };
        if !fine {
            return Err(format!("there is no such operation on {ty:?}"));
        }
        let at = usize::from(returns);
        let space = self.space(i, i.operands.get(at))?;
        let address = self.address(i.operands.get(at))?;
        let mut old = None;
        if returns && i.operands.first() != Some(&Operand::Sink) {
            let mut flat = Vec::new();
            i.operands.first().into_iter().for_each(|o| flatten(o, &mut flat));
            let mut rows = Vec::new();
            for o in flat {
                match o {
                    Operand::Register(r) => rows.push(self.register(*r)?),
                    Operand::Sink => {
                        let file = if ty.bits() > 32 { File::Wide } else { File::Narrow };
                        rows.push(RowRef { file, row: self.rows.scratch(file)? });
                    }
                    other => return Err(format!("{other:?} cannot be a destination")),
                }
            }
            old = Some(rows.into_boxed_slice());
        }
        let operands = if kind == AtomicKind::CompareSwap { 2 } else { 1 };
        let mut sources = Vec::new();
        for o in i.operands.iter().skip(at + 1).take(operands) {
            let mut flat = Vec::new();
            flatten(o, &mut flat);
            for o in flat {
                sources.push(self.data(o, ty)?);
            }
        }
        let wanted = operands * elements as usize;
        if sources.len() != wanted || old.as_ref().is_some_and(|o| o.len() != elements as usize) {
            return Err(format!("expected {wanted} operands, got {}", sources.len()));
        }
        let small = |r: &RowRef| r.file == File::Pred || (r.file == File::Narrow) != (ty.bits() <= 32);
        if sources.iter().chain(old.iter().flatten()).any(small) {
            return Err("an operand has the wrong size".into());
        }
        self.flow.to = old.clone().unwrap_or_default();
        self.flow.from = sources.clone().into();
        let sources = sources.into();
        let (acquire, release) = (i.has("acquire") || i.has("acq_rel"), i.has("release") || i.has("acq_rel"));
        let atomic = Atomic { space, address, kind, ty, old, sources, elements, acquire, release };
        Ok((What::Atomic(Box::new(atomic)), Class::Atomic))
    }

    fn matrix(&mut self, i: &Instruction) -> Result<(What, Class), String> {
        let store = &*i.opcode == "stmatrix";
        Self::only(i, |m| {
            matches!(m, "sync" | "aligned" | "m8n8" | "x1" | "x2" | "x4" | "trans") || m.starts_with("shared")
        })?;
        if i.ty() != Some(Type::B16) {
            return Err("only .m8n8 matrices of .b16 are supported".into());
        }
        let n = if i.has("x4") {
            4
        } else if i.has("x2") {
            2
        } else {
            1
        };
        let (registers, address) = if store { (1, 0) } else { (0, 1) };
        let mut flat = Vec::new();
        i.operands.get(registers).into_iter().for_each(|o| flatten(o, &mut flat));
        let mut rows = Vec::new();
        for o in flat {
            match o {
                Operand::Register(r) => {
                    let row = self.register(*r)?;
                    if row.file != File::Narrow {
                        return Err("expected 32-bit registers".into());
                    }
                    rows.push(row.row);
                }
                Operand::Sink if !store => rows.push(self.rows.scratch(File::Narrow)?),
                other => return Err(format!("expected registers, got {other:?}")),
            }
        }
        if rows.len() != n {
            return Err(format!("expected {n} registers, got {}", rows.len()));
        }
        let address = self.address(i.operands.get(address))?;
        let narrow = rows.iter().map(|row| RowRef { file: File::Narrow, row: *row }).collect();
        if store {
            self.flow.from = narrow;
        } else {
            self.flow.to = narrow;
        }
        let matrix = Matrix { address, rows: rows.into(), transposed: i.has("trans"), store };
        Ok((What::Matrix(Box::new(matrix)), Class::MatrixMove))
    }

    fn address_op(&mut self, i: &Instruction) -> Result<(What, Class), String> {
        let mut space = None;
        for m in &i.modifiers {
            space = match &**m {
                "global" | "const" => Some(Where::Global),
                "shared" | "shared::cta" => Some(Where::Shared),
                "shared::cluster" => Some(Where::Cluster),
                "local" => Some(Where::Local),
                m if m.starts_with("param") => Some(Where::Param),
                _ => space,
            };
        }
        let to = match i.operands.first() {
            Some(Operand::Register(r)) => self.register(*r)?,
            other => return Err(format!("expected a register, got {other:?}")),
        };
        let ty = i.ty().unwrap_or(if to.file == File::Narrow { Type::U32 } else { Type::U64 });
        let from = match i.operands.get(1) {
            Some(Operand::Register(r)) => self.register(*r)?,
            Some(o) => {
                let file = if ty.bits() > 32 { File::Wide } else { File::Narrow };
                RowRef { file, row: self.source(o, Source { file, literal: Literal::Bits })? }
            }
            None => return Err("an operand is missing".into()),
        };
        let mut rank = None;
        let kind = match (&*i.opcode, space) {
            ("cvta", Some(space)) if i.has("to") => AddressKind::FromGeneric(space),
            ("cvta", Some(space)) => AddressKind::ToGeneric(space),
            ("isspacep", Some(space)) => AddressKind::IsSpace(space),
            ("mapa", space) => {
                rank = Some(self.narrow(i.operands.get(2))?);
                if space.is_some() { AddressKind::MapShared } else { AddressKind::MapGeneric }
            }
            ("getctarank", _) => AddressKind::Rank,
            _ => return Err("the state space is missing".into()),
        };
        let is_pred = matches!(kind, AddressKind::IsSpace(_));
        if is_pred != (to.file == File::Pred) || from.file == File::Pred {
            return Err("an operand has the wrong type".into());
        }
        self.flow.to = [to].into();
        self.flow.from = [from].into();
        Ok((What::Address(Box::new(AddressOp { kind, to, from, rank })), Class::Move))
    }
}
