//! Which functions a kernel may call.

use super::operands::symbols;
use super::{FUNCTION_BASE, FUNCTION_STRIDE, Image};
use crate::ptx::ast::Operand;
use std::collections::HashMap;

/// The functions that a kernel may call.
pub(super) struct Reached {
    /// By index, the kernel first.
    pub functions: Vec<usize>,
    /// From here on functions are called through tables only, if at all: destructors of every class with virtual ones.
    pub by_table: usize,
}

/// The functions that the kernel may call.
pub(super) fn reach(image: &Image, kernel: usize) -> Result<Reached, String> {
    let module = &image.module;
    let by_name: HashMap<&str, usize> = module
        .functions
        .iter()
        .enumerate()
        .filter(|(_, f)| !f.declaration)
        .map(|(i, f)| (f.name.as_str(), i))
        .collect();
    let mut reached = vec![kernel];
    let mut edges: Vec<(usize, usize)> = Vec::new();
    let mut at = 0;
    let mut indirect = false;
    let mut by_table = None;
    while at < reached.len() {
        let from = reached[at];
        at += 1;
        let mut names = std::collections::HashSet::new();
        for i in &module.functions[from].body {
            i.operands.iter().for_each(|o| symbols(o, &mut names));
            indirect |= &*i.opcode == "call" && matches!(i.operands.get(1), Some(Operand::Register(_)));
        }
        let mut names: Vec<&str> = names.into_iter().collect();
        names.sort_unstable();
        for to in names.into_iter().filter_map(|n| by_name.get(n)) {
            edges.push((from, *to));
            if !reached.contains(to) {
                reached.push(*to);
            }
        }
        if at == reached.len() && indirect {
            // Any function whose address stands in a table may be called.
            by_table.get_or_insert(at);
            for v in &module.variables {
                let relocations = v.init.iter().flat_map(|i| &i.relocations);
                for to in relocations.filter_map(|r| by_name.get(r.symbol.as_str())) {
                    if !reached.contains(to) {
                        reached.push(*to);
                    }
                }
            }
        }
    }
    // Local memory and registers have one place a function: no recursion.
    let mut state = HashMap::new();
    for start in &reached {
        let mut work = vec![(*start, false)];
        while let Some((f, done)) = work.pop() {
            if done {
                state.insert(f, 2);
                continue;
            }
            match state.get(&f) {
                Some(_) => continue,
                None => state.insert(f, 1),
            };
            work.push((f, true));
            for (_, to) in edges.iter().filter(|(from, _)| *from == f) {
                match state.get(to) {
                    Some(1) => {
                        return Err(format!(
                            "{} calls itself: recursion is not supported",
                            module.functions[*to].name
                        ));
                    }
                    Some(_) => {}
                    None => work.push((*to, false)),
                }
            }
        }
    }
    Ok(Reached { by_table: by_table.unwrap_or(reached.len()), functions: reached })
}

/// The function whose address this is.
pub(crate) fn function_index(address: u64) -> Option<usize> {
    let offset = address.checked_sub(FUNCTION_BASE)?;
    offset.is_multiple_of(FUNCTION_STRIDE).then_some((offset / FUNCTION_STRIDE) as usize)
}
