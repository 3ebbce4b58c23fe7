//! Which functions a kernel may call.

use super::operands::symbols;
use super::{FUNCTION_BASE, FUNCTION_STRIDE, Image};
use crate::ptx::ast::Operand;
use std::collections::HashMap;

/// The kernel and the functions that it may call, itself first.
pub(super) fn reach(image: &Image, kernel: usize) -> Result<Vec<usize>, String> {
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
    Ok(reached)
}

/// The function whose address this is.
pub(crate) fn function_index(address: u64) -> Option<usize> {
    let offset = address.checked_sub(FUNCTION_BASE)?;
    offset.is_multiple_of(FUNCTION_STRIDE).then_some((offset / FUNCTION_STRIDE) as usize)
}
