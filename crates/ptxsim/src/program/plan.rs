//! What instructions read, write and lead to, and the rows and order that follow from it.

use super::flow::{Blocks, Exits, Uses, assign, intervals};
use super::operands::{Rows, file_of};
use crate::exec::regs::File;
use crate::ptx::ast::{Base, Function, Instruction, Operand, RegisterId};

/// Rows of a function's registers, the order of its instructions, and how many 32-bit registers live at once.
pub(super) fn plan(function: &Function, rows: &mut Rows) -> Result<(Vec<u32>, Vec<u32>, usize), String> {
    let n = function.body.len();
    let mut order = vec![0; n];
    if n == 0 {
        return Ok((Vec::new(), order, 0));
    }
    let exits = function.body.iter().map(|i| exits(function, i)).collect::<Result<Vec<_>, _>>()?;
    let uses: Vec<Uses> = function.body.iter().map(uses).collect();
    let count = function.registers.len();
    if uses.iter().any(|u| u.reads.iter().chain(&u.writes).any(|r| *r as usize >= count)) {
        return Err("an instruction names a register that does not exist".into());
    }
    let blocks = Blocks::new(&exits);
    let position = blocks.order();
    for (b, p) in position.iter().enumerate() {
        order[blocks.starts[b]..blocks.starts[b + 1]].fill(*p as u32);
    }
    let spans = intervals(&blocks, &uses, count);
    let mut all = vec![u32::MAX; count];
    for file in [File::Narrow, File::Wide, File::Pred] {
        let first = match file {
            File::Narrow => rows.files.narrow,
            File::Wide => rows.files.wide,
            File::Pred => rows.files.preds,
        };
        let (assigned, end) =
            assign(&spans, |r| file_of(function.registers[r].ty) == Some(file), first as u32);
        all.iter_mut().zip(&assigned).filter(|(_, a)| **a != u32::MAX).for_each(|(to, a)| *to = *a);
        match file {
            File::Narrow => rows.files.narrow = end as usize,
            File::Wide => rows.files.wide = end as usize,
            File::Pred => rows.files.preds = end as usize,
        }
    }
    // Most registers that live at once, in 32-bit units: what a compiler would need at least.
    let mut change = vec![0i64; n + 1];
    for (r, span) in spans.iter().enumerate() {
        let size = match file_of(function.registers[r].ty) {
            Some(File::Narrow) => 1,
            Some(File::Wide) => 2,
            _ => 0,
        };
        if let Some((a, b)) = span {
            change[*a] += size;
            change[b + 1] -= size;
        }
    }
    let peak = change.iter().scan(0i64, |now, c| {
        *now += c;
        Some(*now)
    });
    Ok((all, order, peak.max().unwrap_or(0).max(0) as usize))
}

/// Where a label stands.
pub(super) fn label(function: &Function, operand: &Operand) -> Result<usize, String> {
    match operand {
        Operand::Label(l) => function.labels.get(*l).map(|(_, i)| *i).ok_or_else(|| "unknown label".into()),
        other => Err(format!("expected a label, got {other:?}")),
    }
}

/// Labels of a `.branchtargets` list.
pub(super) fn branch_targets(function: &Function, operand: Option<&Operand>) -> Result<Vec<usize>, String> {
    let find = |name: &str| {
        let (_, labels) = function.branch_targets.iter().find(|(n, _)| n == name)?;
        labels
            .iter()
            .map(|l| function.labels.iter().find(|(n, _)| n == l).map(|(_, i)| *i))
            .collect::<Option<Vec<_>>>()
    };
    match operand {
        Some(Operand::Symbol(name, 0)) => {
            find(name).ok_or_else(|| format!("{name} is no .branchtargets list"))
        }
        Some(Operand::Label(l)) => {
            let name = function.labels.get(*l).map(|(n, _)| n.as_str()).unwrap_or_default();
            find(name).ok_or_else(|| format!("{name} is no .branchtargets list"))
        }
        other => Err(format!("expected a .branchtargets list, got {other:?}")),
    }
}

fn exits(function: &Function, i: &Instruction) -> Result<Exits, String> {
    let guarded = i.guard.is_some();
    Ok(match &*i.opcode {
        "bra" => {
            let to = i.operands.first().ok_or("bra without a target")?;
            Exits { falls: guarded, to: vec![label(function, to)?] }
        }
        "brx" => Exits { falls: guarded, to: branch_targets(function, i.operands.get(1))? },
        "ret" | "exit" | "trap" => Exits { falls: guarded, to: Vec::new() },
        _ => Exits { falls: true, to: Vec::new() },
    })
}

/// Whether the first operand is where the result goes.
fn writes_first(i: &Instruction) -> bool {
    if !matches!(
        i.operands.first(),
        Some(Operand::Register(_) | Operand::Vector(_) | Operand::Pair(..) | Operand::Sink)
    ) {
        return false;
    }
    match &*i.opcode {
        "bar" | "barrier" => i.has("red"),
        "mbarrier" => !(i.has("init") || i.has("inval") || i.has("expect_tx") && !i.has("arrive")),
        "st" | "stmatrix" | "red" | "bra" | "brx" | "call" | "prefetch" | "prefetchu" | "cp" | "membar"
        | "fence" | "nanosleep" | "pmevent" | "discard" | "applypriority" | "setmaxnreg"
        | "griddepcontrol" | "tensormap" | "multimem" | "trap" | "exit" | "ret" | "brkpt" | "wmma" => {
            &*i.opcode == "wmma" && !i.has("store")
        }
        _ => true,
    }
}

/// Registers an instruction reads and writes.
fn uses(i: &Instruction) -> Uses {
    let mut uses = Uses { partial: i.guard.is_some(), ..Uses::default() };
    uses.reads.extend(i.guard.map(|g| g.register));
    for (n, operand) in i.operands.iter().enumerate() {
        let mut found = Vec::new();
        registers(operand, &mut found);
        let results = &*i.opcode == "call" && n == 0;
        if n == 0 && writes_first(i) || results {
            uses.writes.extend(found);
        } else {
            uses.reads.extend(found);
        }
    }
    uses
}

fn registers(operand: &Operand, out: &mut Vec<RegisterId>) {
    match operand {
        Operand::Register(r) | Operand::Not(r) => out.push(*r),
        Operand::Vector(list) | Operand::List(list) => list.iter().for_each(|o| registers(o, out)),
        Operand::Pair(a, b) => {
            registers(a, out);
            registers(b, out);
        }
        Operand::Address(a) | Operand::Tensor(a, _) => {
            if let Base::Register(r) = a.base {
                out.push(r);
            }
            if let Operand::Tensor(_, lists) = operand {
                lists.iter().flatten().for_each(|o| registers(o, out));
            }
        }
        _ => {}
    }
}
