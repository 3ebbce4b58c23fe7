//! A kernel and all it calls, to one list of operations.

use super::calls::{Reached, reach};
use super::code::*;
use super::kernel::Kernel;
use super::operands::{Layout, Place, Rows, flatten, literal};
use super::plan::{branch_targets, label, plan};
use super::{Image, LoadError};
use crate::alu;
use crate::card::Card;
use crate::exec::regs::{File, Literal, Op, Source};
use crate::options::Options;
use crate::ptx::ast::{Function, Instruction, Operand, RegisterId, Special, Type};
use crate::stats::Class;
use std::collections::HashMap;
use std::sync::Arc;

/// Everything needed to decode one function.
pub(super) struct Decoder<'a> {
    pub image: &'a Image,
    pub card: &'a Card,
    pub options: &'a Options,
    pub layout: &'a Layout,
    pub rows: &'a mut Rows,
    /// Index of the function in the module.
    pub index: usize,
    pub function: &'a Function,
    /// Whether it is the kernel itself.
    pub is_kernel: bool,
    /// First operation of each decoded function.
    pub starts: &'a HashMap<usize, usize>,
    /// Data rows of the operation being decoded, for taint.
    pub flow: Flow,
}

/// See [`Image::kernel`].
pub(super) fn kernel(image: &Image, name: &str, card: &Card, options: &Options) -> Result<Kernel, LoadError> {
    let module = &image.module;
    let index = module.functions.iter().position(|f| f.kernel && !f.declaration && f.name == name);
    let index = index.ok_or_else(|| LoadError::NotFound(name.to_string()))?;
    let one = |e: String| LoadError::Unsupported(vec![format!("{name}: {e}")]);
    let Reached { functions: reached, by_table } = reach(image, index).map_err(one)?;
    let layout = Layout::new(image, &reached).map_err(one)?;

    let mut rows = Rows::default();
    let (mut starts, mut orders, mut live) = (HashMap::new(), HashMap::new(), 0);
    let mut at = 0;
    let mut problems = Vec::new();
    for f in &reached {
        let function = &module.functions[*f];
        starts.insert(*f, at);
        at += function.body.len() + 1;
        match plan(function, &mut rows) {
            Ok((assigned, order, peak)) => {
                rows.set_registers(*f, assigned);
                orders.insert(*f, order);
                live = live.max(peak);
            }
            Err(e) => problems.push(format!("{}: {e}", function.name)),
        }
    }
    if !problems.is_empty() {
        return Err(LoadError::Unsupported(problems));
    }

    let (mut code, mut locations, mut names, mut flows, mut order) = (vec![], vec![], vec![], vec![], vec![]);
    let mut interned: HashMap<String, Arc<str>> = HashMap::new();
    for (position, f) in reached.iter().enumerate() {
        let function = &module.functions[*f];
        let mut decoder = Decoder {
            image,
            card,
            options,
            layout: &layout,
            rows: &mut rows,
            index: *f,
            function,
            is_kernel: *f == index,
            starts: &starts,
            flow: Flow::default(),
        };
        for (i, instruction) in function.body.iter().enumerate() {
            decoder.flow = Flow::default();
            match decoder.instruction(instruction) {
                Ok(mut decoded) => {
                    if let What::Store(a) = &mut decoded.what {
                        a.inserts = inserts(&function.body[..i], instruction);
                    }
                    code.push(decoded);
                }
                Err(e) => {
                    let mut what = What::Trap;
                    if position >= by_table {
                        // Most such functions are never called: refused only if it comes to that.
                        what = What::Refused(e.into());
                    } else if problems.len() < 1000 {
                        problems.push(format!(
                            "{} in {}, PTX line {}: {e}",
                            instruction.name(),
                            function.name,
                            instruction.location.ptx_line
                        ));
                    }
                    code.push(Code { guard: None, what, class: Class::Other, leader: true });
                }
            }
            flows.push(std::mem::take(&mut decoder.flow));
            locations.push(instruction.location);
            let name = instruction.name();
            let name = interned.entry(name).or_insert_with_key(|n| Arc::from(n.as_str()));
            names.push(Arc::clone(name));
            order.push(orders[f].get(i).copied().unwrap_or(u32::MAX));
        }
        // Control that runs off the end returns.
        let what = if *f == index { What::Exit } else { What::Return };
        code.push(Code { guard: None, what, class: Class::Control, leader: true });
        flows.push(Flow::default());
        locations.push(function.body.last().map(|i| i.location).unwrap_or_default());
        names.push(Arc::from("ret"));
        order.push(u32::MAX);
    }
    if !problems.is_empty() {
        return Err(LoadError::Unsupported(problems));
    }
    mark_leaders(&mut code, &starts);
    let function = &module.functions[index];
    Ok(Kernel {
        name: name.to_string(),
        params: function.param_offsets(),
        param_bytes: function.param_bytes(),
        shared_bytes: layout.shared,
        local_bytes: layout.local,
        estimated_registers: (live as u32 + 8).min(255),
        limits: function.limits,
        shared_granule: granule(&code),
        ordered: code.iter().any(is_ordered),
        polls: polls(&code),
        indirect: code.iter().any(|c| matches!(c.what, What::CallIndirect { .. })),
        starts: reached.iter().filter_map(|f| starts.get(f)).map(|s| *s as Pc).collect(),
        code,
        locations,
        names,
        flows,
        order,
        files: rows.files,
        sources: module.files.clone(),
    })
}

/// Operations that control may reach in another way than from the one before.
fn mark_leaders(code: &mut [Code], starts: &HashMap<usize, usize>) {
    let mut leader = vec![false; code.len() + 1];
    starts.values().for_each(|s| leader[*s] = true);
    for (i, c) in code.iter().enumerate() {
        match &c.what {
            What::Branch(to) => {
                leader[*to as usize] = true;
                leader[i + 1] = true;
            }
            What::BranchIndexed { targets, .. } => {
                targets.iter().for_each(|t| leader[*t as usize] = true);
                leader[i + 1] = true;
            }
            What::Call { .. } | What::CallIndirect { .. } | What::Return | What::Exit => leader[i + 1] = true,
            _ => {}
        }
    }
    code.iter_mut().zip(leader).for_each(|(c, l)| c.leader = l);
}

/// Longest loop around an atomic that counts as waiting: locks are taken by short ones.
const SPIN: usize = 12;

/// Whether a loop reads global memory in a way that sees what others write.
fn polls(code: &[Code]) -> bool {
    let global = |space: Where| matches!(space, Where::Global | Where::Generic);
    let backwards = code.iter().enumerate().filter_map(|(end, c)| match c.what {
        What::Branch(to) if to as usize <= end => Some((to as usize, end)),
        _ => None,
    });
    // The longest loop that starts at each place covers the shorter ones.
    let mut ends = vec![0; code.len()];
    let mut spin = vec![false; code.len()];
    for (start, end) in backwards {
        ends[start] = end.max(ends[start]);
        if end - start <= SPIN {
            spin[start..=end].fill(true);
        }
    }
    let mut reaches = 0;
    code.iter().enumerate().any(|(at, c)| {
        reaches = ends[at].max(reaches);
        match &c.what {
            What::Load(a) => global(a.space) && a.strength != Strength::Weak && at < reaches,
            What::Atomic(a) => global(a.space) && a.old.is_some() && spin[at],
            _ => false,
        }
    })
}

/// Whether a store writes what bitwise operations made, as compilers write a bit-field.
fn inserts(before: &[Instruction], store: &Instruction) -> bool {
    let Some(&Operand::Register(mut r)) = store.operands.get(1) else { return false };
    for i in before.iter().rev().take(8) {
        if i.operands.first() != Some(&Operand::Register(r)) {
            continue;
        }
        match (&*i.opcode, i.operands.get(1)) {
            ("and" | "or" | "lop3" | "bfi", _) => return true,
            ("mov" | "cvt", Some(Operand::Register(from))) => r = *from,
            _ => return false,
        }
    }
    false
}

/// The smallest element that reaches shared memory, at most 4 bytes.
fn granule(code: &[Code]) -> u32 {
    let shared = |w: Where| matches!(w, Where::Shared | Where::Cluster | Where::Generic);
    let of = |c: &Code| match &c.what {
        What::Load(a) | What::Store(a) if shared(a.space) => a.bytes.min(4),
        What::Atomic(a) if shared(a.space) => a.ty.bytes().min(4),
        _ => 4,
    };
    code.iter().map(of).min().unwrap_or(4).max(1)
}

/// Whether the order of blocks can be seen through it.
fn is_ordered(c: &Code) -> bool {
    match &c.what {
        What::Atomic(a) => {
            let float = matches!(
                a.ty,
                Type::F16 | Type::F16x2 | Type::BF16 | Type::BF16x2 | Type::F32 | Type::F64 | Type::F32x2
            );
            matches!(a.space, Where::Global | Where::Generic)
                && (a.old.is_some() || float && a.kind == AtomicKind::Add)
        }
        What::Load(a) | What::Store(a) => {
            a.strength == Strength::Strong && matches!(a.space, Where::Global | Where::Generic)
        }
        What::Bulk(b) => b.reduce.is_some(),
        What::Clock(_) => true,
        _ => false,
    }
}

impl Decoder<'_> {
    /// One instruction.
    fn instruction(&mut self, i: &Instruction) -> Result<Code, String> {
        let guard = match i.guard {
            None => None,
            Some(g) => {
                let row = self.register(g.register)?;
                if row.file != File::Pred {
                    return Err("the guard is no predicate".into());
                }
                Some((row.row, g.negated))
            }
        };
        let (what, class) = self.what(i)?;
        Ok(Code { guard, what, class, leader: false })
    }

    fn what(&mut self, i: &Instruction) -> Result<(What, Class), String> {
        if let Some(clock) = self.clock(i)? {
            return Ok((clock, Class::Move));
        }
        if let Some(form) = alu::form(i, self.function, self.card.cc, self.options)? {
            return self.alu(i, &form);
        }
        let n = self.starts.get(&self.index).copied().unwrap_or(0);
        let pc = |i: usize| (n + i) as Pc;
        Ok(match &*i.opcode {
            "bra" => {
                let to = label(self.function, i.operands.first().ok_or("bra without a target")?)?;
                (What::Branch(pc(to)), Class::Control)
            }
            "brx" => {
                let index = self.narrow(i.operands.first())?;
                let targets = branch_targets(self.function, i.operands.get(1))?;
                (
                    What::BranchIndexed { index, targets: targets.into_iter().map(pc).collect() },
                    Class::Control,
                )
            }
            "call" => (self.call(i)?, Class::Control),
            "ret" => (if self.is_kernel { What::Exit } else { What::Return }, Class::Control),
            "exit" => (What::Exit, Class::Control),
            "trap" | "brkpt" => (What::Trap, Class::Control),
            _ => match self.memory(i)? {
                Some(found) => found,
                None => match self.synchronisation(i)? {
                    Some(found) => found,
                    None => return Err(format!("the instruction {} is not known", i.name())),
                },
            },
        })
    }

    /// `mov` of a special register that changes while a warp runs.
    fn clock(&mut self, i: &Instruction) -> Result<Option<What>, String> {
        use Special::*;
        let changes = |o: &Operand| {
            matches!(
                o,
                Operand::Special(Clock | ClockHi | Clock64 | Globaltimer | GlobaltimerLo | GlobaltimerHi)
            )
        };
        if &*i.opcode != "mov" || !i.operands.iter().any(changes) {
            return Ok(None);
        }
        match i.operands.first() {
            Some(Operand::Register(r)) => Ok(Some(What::Clock(self.register(*r)?))),
            Some(Operand::Sink) => Ok(Some(What::Nothing)),
            _ => Err("expected a register for the clock".into()),
        }
    }

    fn alu(&mut self, i: &Instruction, form: &crate::exec::regs::Form) -> Result<(What, Class), String> {
        let mut flat = Vec::new();
        i.operands.iter().for_each(|o| flatten(o, &mut flat));
        let n = form.destinations.len();
        if flat.len() != n + form.sources.len() {
            return Err(format!("expected {} operands, got {}", n + form.sources.len(), flat.len()));
        }
        let mut destinations = Vec::with_capacity(n);
        for (o, file) in flat.iter().zip(&form.destinations) {
            let row = match o {
                Operand::Register(r) => {
                    let row = self.register(*r)?;
                    if row.file != *file {
                        return Err(format!("{} has the wrong size here", self.function.register_name(*r)));
                    }
                    row.row
                }
                Operand::Sink => self.rows.scratch(*file)?,
                other => return Err(format!("{other:?} cannot be a destination")),
            };
            destinations.push(row);
        }
        let mut sources = Vec::with_capacity(form.sources.len());
        for (o, source) in flat[n..].iter().zip(&form.sources) {
            sources.push(self.source(o, *source)?);
        }
        let files = |rows: &[u16], files: Vec<File>| -> Box<[RowRef]> {
            rows.iter().zip(files).map(|(row, file)| RowRef { file, row: *row }).collect()
        };
        self.flow = Flow {
            to: files(&destinations, form.destinations.clone()),
            from: files(&sources, form.sources.iter().map(|s| s.file).collect()),
            taint: Some(form.taint),
        };
        let need = Need::of(form.sync, form.aligned, &sources);
        Ok((What::Alu { op: Op::new(form.run, &destinations, &sources, form.imm), need }, form.class))
    }

    /// The row of a register.
    pub(super) fn register(&mut self, id: RegisterId) -> Result<RowRef, String> {
        self.rows.register(self.index, self.function, id)
    }

    /// The row of a source operand.
    pub(super) fn source(&mut self, operand: &Operand, source: Source) -> Result<u16, String> {
        match operand {
            Operand::Register(r) | Operand::Not(r) => {
                let row = self.register(*r)?;
                if row.file != source.file {
                    return Err(format!("{} has the wrong size here", self.function.register_name(*r)));
                }
                Ok(row.row)
            }
            Operand::Special(s) => self.rows.special(source.file, *s),
            Operand::Symbol(name, addend) => {
                let value = self.symbol(name)?.wrapping_add_signed(*addend);
                self.rows.constant(source.file, value)
            }
            Operand::Sink => self.rows.constant(source.file, 0),
            other => match literal(other, source.file, source.literal) {
                Some(value) => self.rows.constant(source.file, value),
                None => Err(format!("{other:?} cannot stand here")),
            },
        }
    }

    /// The value of a symbol as operand.
    pub(super) fn symbol(&self, name: &str) -> Result<u64, String> {
        match self.layout.find(self.index, name) {
            Some(Place::Shared(at) | Place::Local(at) | Place::Param(at)) => Ok(at.into()),
            Some(Place::Global(at) | Place::Function(at)) => Ok(at),
            None => Err(format!("{name} has no address here (an external variable of another module?)")),
        }
    }

    /// A narrow source: a register or an integer.
    pub(super) fn narrow(&mut self, operand: Option<&Operand>) -> Result<u16, String> {
        let operand = operand.ok_or("an operand is missing")?;
        self.source(operand, Source { file: File::Narrow, literal: Literal::Bits })
    }

    /// A register of any file, or a literal in one of `bits`.
    pub(super) fn data(&mut self, operand: &Operand, ty: Type) -> Result<RowRef, String> {
        if let Operand::Register(r) = operand {
            return self.register(*r);
        }
        let file = if ty.bits() > 32 { File::Wide } else { File::Narrow };
        let literal = match ty {
            Type::F32 => Literal::F32,
            Type::F64 => Literal::F64,
            Type::F16 => Literal::F16,
            Type::BF16 => Literal::BF16,
            _ => Literal::Bits,
        };
        Ok(RowRef { file, row: self.source(operand, Source { file, literal })? })
    }

    fn call(&mut self, i: &Instruction) -> Result<What, String> {
        let list = |o: Option<&Operand>| match o {
            Some(Operand::List(l)) => l.clone(),
            _ => Vec::new(),
        };
        let (results, arguments) = (list(i.operands.first()), list(i.operands.get(2)));
        let local = |d: &Self, o: &Operand| match o {
            Operand::Symbol(s, 0) => match d.layout.find(d.index, s) {
                Some(Place::Local(at)) => Ok(at),
                _ => Err(format!("{s} is no .param variable of this function")),
            },
            _ => Err("arguments of calls must be .param variables (registers are not supported)".to_string()),
        };
        let from = arguments.iter().map(|a| local(self, a)).collect::<Result<Vec<_>, _>>()?;
        let to = results.iter().map(|a| local(self, a)).collect::<Result<Vec<_>, _>>()?;
        let module = &self.image.module;
        let target = |index: usize| -> Result<CallTarget, String> {
            let f = &module.functions[index];
            if f.params.len() != from.len() || f.returns.len() != to.len() {
                return Err(format!(
                    "{} takes {} arguments and returns {}, the call has {} and {}",
                    f.name,
                    f.params.len(),
                    f.returns.len(),
                    from.len(),
                    to.len()
                ));
            }
            let place = |name: &str| match self.layout.find(index, name) {
                Some(Place::Local(at)) => Ok(at),
                _ => Err(format!("{name} of {} is no .param variable (registers are not supported)", f.name)),
            };
            let mut moves = Vec::new();
            for (from, p) in from.iter().zip(&f.params) {
                moves.push(Move { from: *from, to: place(&p.name)?, bytes: p.bytes as u32 });
            }
            let mut returns = Vec::new();
            for (to, p) in to.iter().zip(&f.returns) {
                returns.push(Move { from: place(&p.name)?, to: *to, bytes: p.bytes as u32 });
            }
            let target = self.starts.get(&index).copied().ok_or("the function was not decoded")? as Pc;
            Ok(CallTarget { target, arguments: moves.into(), returns: returns.into() })
        };
        match i.operands.get(1) {
            Some(Operand::Symbol(name, 0)) => {
                if let Some(index) = module.functions.iter().position(|f| f.name == *name && !f.declaration) {
                    let CallTarget { target, arguments, returns } = target(index)?;
                    return Ok(What::Call { target, arguments, returns });
                }
                let function = match name.as_str() {
                    "vprintf" => System::Printf,
                    "__assertfail" => System::AssertFail,
                    _ => return Err(format!("the function {name} is not defined in the module")),
                };
                Ok(What::System { function, arguments: from.into(), result: to.first().copied() })
            }
            Some(Operand::Register(r)) => {
                let row = self.register(*r)?;
                if row.file != File::Wide {
                    return Err("the address of an indirect call must be a 64-bit register".into());
                }
                let targets = (0..module.functions.len()).map(|f| target(f).ok()).collect();
                Ok(What::CallIndirect { function: row.row, targets })
            }
            other => Err(format!("cannot call {other:?}")),
        }
    }
}
