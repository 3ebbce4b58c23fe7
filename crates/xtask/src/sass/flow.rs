//! Blocks of a function, who follows whom, and its loops.

use super::listing::{Function, Instruction, Predicate};
use std::collections::{BTreeSet, HashMap};

/// How a block ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// One block follows, or one of several, and nothing says which.
    Goes(Vec<usize>),
    /// `taken` follows where the predicate holds, `other` where not.
    Branches {
        /// What decides.
        on: Predicate,
        /// The block jumped to.
        taken: usize,
        /// The block behind; `None` behind the last instruction.
        other: Option<usize>,
    },
}

/// Instructions [`from`, `to`) of a function, executed one after another.
#[derive(Debug, Clone)]
pub struct Block {
    /// Index of its first instruction.
    pub from: usize,
    /// Index behind its last one.
    pub to: usize,
    /// What follows.
    pub end: End,
}

/// The control flow of a function. The first block is its entry.
#[derive(Debug, Clone)]
pub struct Flow {
    /// In the order of the code.
    pub blocks: Vec<Block>,
    /// Blocks that can be reached, each before those that follow it unless the step goes back in a loop.
    order: Vec<usize>,
    /// The immediate dominator of each reached block.
    dominator: HashMap<usize, usize>,
}

/// A natural loop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loop {
    /// The block that every turn begins with.
    pub head: usize,
    /// All its blocks.
    pub blocks: BTreeSet<usize>,
}

impl Block {
    /// The blocks that may follow.
    pub fn successors(&self) -> Vec<usize> {
        match &self.end {
            End::Goes(to) => to.clone(),
            End::Branches { taken, other, .. } => std::iter::once(*taken).chain(*other).collect(),
        }
    }
}

/// Whether the instruction ends a block.
fn is_jump(i: &Instruction) -> bool {
    matches!(i.base(), "BRA" | "BRX" | "JMP" | "JMX" | "EXIT" | "RET")
        // ptxas leaves loops on sm_80 by calls that never return.
        || (i.base() == "CALL" && !i.targets.is_empty())
}

impl Flow {
    /// The flow of a function.
    pub fn of(function: &Function) -> Self {
        let code = &function.code;
        let mut heads: BTreeSet<usize> = [0].into();
        for (at, i) in code.iter().enumerate().filter(|(_, i)| is_jump(i)) {
            heads.insert(at + 1);
            heads.extend(&i.targets);
        }
        heads.retain(|h| *h < code.len());
        let heads: Vec<usize> = heads.into_iter().collect();
        let number = |at: usize| heads.binary_search(&at).ok();
        let blocks: Vec<Block> = heads
            .iter()
            .enumerate()
            .map(|(n, &from)| {
                let to = heads.get(n + 1).copied().unwrap_or(code.len());
                Block { from, to, end: end(&code[to - 1], number(to), number) }
            })
            .collect();
        let order = reverse_postorder(&blocks);
        let dominator = dominators(&blocks, &order);
        Self { blocks, order, dominator }
    }

    fn dominates(&self, a: usize, mut b: usize) -> bool {
        while a != b {
            match self.dominator.get(&b) {
                Some(&next) if next != b => b = next,
                _ => return false,
            }
        }
        true
    }

    /// All natural loops; those with the same head are one.
    pub fn loops(&self) -> Vec<Loop> {
        let mut before: HashMap<usize, Vec<usize>> = HashMap::new();
        for &b in &self.order {
            self.blocks[b].successors().into_iter().for_each(|s| before.entry(s).or_default().push(b));
        }
        let mut loops: Vec<Loop> = Vec::new();
        for &b in &self.order {
            for head in self.blocks[b].successors() {
                if !self.dominates(head, b) {
                    continue;
                }
                let at = loops.iter().position(|l| l.head == head).unwrap_or_else(|| {
                    loops.push(Loop { head, blocks: [head].into() });
                    loops.len() - 1
                });
                let mut todo = vec![b];
                while let Some(x) = todo.pop() {
                    if loops[at].blocks.insert(x) {
                        todo.extend(before.get(&x).into_iter().flatten());
                    }
                }
            }
        }
        loops
    }

    /// Indices of the instructions of a loop.
    pub fn instructions<'a>(&'a self, l: &'a Loop) -> impl Iterator<Item = usize> + 'a {
        l.blocks.iter().flat_map(|&b| self.blocks[b].from..self.blocks[b].to)
    }
}

/// How a block with this last instruction ends; `next`: the block behind.
fn end(last: &Instruction, next: Option<usize>, number: impl Fn(usize) -> Option<usize>) -> End {
    let targets: Vec<usize> = last.targets.iter().filter_map(|t| number(*t)).collect();
    let own = last.operands.iter().find_map(|o| Predicate::parse(o)).filter(|p| !p.is_constant());
    match (last.base(), &targets[..]) {
        // Goes to a repair of warps whose lanes parted. Ours take every branch around such code together.
        ("BRA", _) if last.has("DIV") => End::Goes(next.into_iter().collect()),
        // Skips such a repair.
        ("BRA", _) if last.has("CONV") => End::Goes(targets),
        ("BRA" | "CALL", [target]) => match (last.guard.clone(), own) {
            (Some(p), None) | (None, Some(p)) => {
                if p.is_constant() {
                    return End::Goes(if p.negated { next.into_iter().collect() } else { vec![*target] });
                }
                End::Branches { on: p, taken: *target, other: next }
            }
            (None, None) => End::Goes(vec![*target]),
            (Some(_), Some(_)) => End::Goes(std::iter::once(*target).chain(next).collect()),
        },
        ("BRX" | "JMX", _) => End::Goes(targets),
        ("EXIT" | "RET" | "BRA" | "JMP", _) if last.guard.is_none() => End::Goes(Vec::new()),
        // A guarded exit: the loop goes on where it is not taken.
        _ => End::Goes(next.into_iter().collect()),
    }
}

fn reverse_postorder(blocks: &[Block]) -> Vec<usize> {
    let mut seen = vec![false; blocks.len()];
    let mut done = Vec::new();
    if blocks.is_empty() {
        return done;
    }
    seen[0] = true;
    let mut stack = vec![(0, blocks[0].successors())];
    while let Some((b, left)) = stack.last_mut() {
        match left.pop() {
            Some(s) if !seen[s] => {
                seen[s] = true;
                stack.push((s, blocks[s].successors()));
            }
            Some(_) => {}
            None => {
                done.push(*b);
                stack.pop();
            }
        }
    }
    done.reverse();
    done
}

/// Immediate dominators (Cooper, Harvey, Kennedy).
fn dominators(blocks: &[Block], order: &[usize]) -> HashMap<usize, usize> {
    let place: HashMap<usize, usize> = order.iter().enumerate().map(|(i, &b)| (b, i)).collect();
    let mut dominator: HashMap<usize, usize> = order.first().map(|&b| (b, b)).into_iter().collect();
    let mut before: HashMap<usize, Vec<usize>> = HashMap::new();
    for &b in order {
        blocks[b].successors().into_iter().for_each(|s| before.entry(s).or_default().push(b));
    }
    loop {
        let mut changed = false;
        for &b in order.iter().skip(1) {
            let mut new = None;
            for &p in before.get(&b).into_iter().flatten().filter(|p| dominator.contains_key(p)) {
                new = Some(match new {
                    None => p,
                    Some(mut a) => {
                        let mut p = p;
                        while a != p {
                            if place[&a] > place[&p] {
                                a = dominator[&a];
                            } else {
                                p = dominator[&p];
                            }
                        }
                        a
                    }
                });
            }
            if let Some(new) = new {
                changed |= dominator.insert(b, new) != Some(new);
            }
        }
        if !changed {
            return dominator;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::listing::assemble;
    use super::*;

    fn flow(code: &[&str]) -> Flow {
        Flow::of(&assemble("a", code))
    }

    #[test]
    fn loops_are_found_with_all_ways_back() {
        let f = flow(&[
            "NOP",
            ".L_1:",
            "@P0 BRA `(.L_1)",
            ".L_2:",
            "NOP",
            "@P1 BRA `(.L_2)",
            "@P2 CALL.REL.NOINC `(.L_3)",
            "BRA `(.L_1)",
            ".L_3:",
            "EXIT",
        ]);
        let mut loops = f.loops();
        loops.sort_by_key(|l| l.head);
        let found: Vec<(usize, Vec<usize>)> =
            loops.iter().map(|l| (f.blocks[l.head].from, l.blocks.iter().copied().collect())).collect();
        assert_eq!(found, [(1, vec![1, 2, 3, 4]), (2, vec![2])]);
    }

    #[test]
    fn repairs_of_parted_warps_are_not_followed() {
        let f = flow(&[
            "BRA.DIV UR4, `(.L_9)",
            "BRA.CONV ~URZ, `(.L_1)",
            "NOP",
            ".L_1:",
            "@P0 EXIT",
            "@!PT BRA `(.L_9)",
            "BRA.U UP0, `(.L_9)",
            ".L_9:",
            "EXIT",
        ]);
        assert_eq!(f.blocks[0].end, End::Goes(vec![1]));
        assert_eq!(f.blocks[1].end, End::Goes(vec![3]));
        assert_eq!(f.blocks[3].end, End::Goes(vec![4]));
        assert_eq!(f.blocks[4].end, End::Goes(vec![5]));
        assert!(
            matches!(&f.blocks[5].end, End::Branches { on, taken: 6, other: Some(6) } if on.name == "UP0")
        );
        assert_eq!(f.blocks[6].end, End::Goes(vec![]));
    }
}
