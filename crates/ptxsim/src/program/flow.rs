//! Control flow: basic blocks, an order for split warps, and which rows registers get.
//!
//! A split warp always runs the part that comes first in an order in which every loop is contiguous and otherwise
//! follows the arrows (a weak topological order: Bourdoncle, "Efficient chaotic iteration strategies with widenings",
//! 1993). So no part runs ahead of another that could still come to the same place, which brings lanes together at the
//! earliest point, never later than the immediate post-dominator.

/// The blocks of one function.
#[derive(Debug)]
pub(crate) struct Blocks {
    /// First instruction of each, and one past the last of all.
    pub starts: Vec<usize>,
    /// Blocks control goes to from each.
    pub successors: Vec<Vec<usize>>,
}

/// Where control goes after an instruction.
#[derive(Debug, Clone, Default)]
pub(crate) struct Exits {
    /// To the next instruction.
    pub falls: bool,
    /// To these.
    pub to: Vec<usize>,
}

impl Blocks {
    /// Cuts `exits.len()` instructions into blocks.
    pub(crate) fn new(exits: &[Exits]) -> Self {
        let n = exits.len();
        let mut leader = vec![false; n + 1];
        leader[0] = true;
        for (i, e) in exits.iter().enumerate() {
            if !e.to.is_empty() || !e.falls {
                leader[i + 1] = true;
            }
            e.to.iter().for_each(|t| leader[(*t).min(n)] = true);
        }
        let mut starts: Vec<usize> = (0..n).filter(|i| leader[*i]).collect();
        let mut block_of = vec![0; n + 1];
        for (b, s) in starts.iter().enumerate() {
            let end = starts.get(b + 1).copied().unwrap_or(n);
            block_of[*s..end].fill(b);
        }
        starts.push(n);
        let successors = starts
            .windows(2)
            .map(|w| {
                let last = &exits[w[1] - 1];
                let mut to: Vec<usize> = last.to.iter().filter(|t| **t < n).map(|t| block_of[*t]).collect();
                if last.falls && w[1] < n {
                    to.push(block_of[w[1]]);
                }
                to.sort_unstable();
                to.dedup();
                to
            })
            .collect();
        Self { starts, successors }
    }

    /// Number of blocks.
    pub(crate) fn len(&self) -> usize {
        self.successors.len()
    }

    /// A position for each block: loops are contiguous, everything else follows the arrows.
    pub(crate) fn order(&self) -> Vec<usize> {
        let mut position = vec![usize::MAX; self.len()];
        let mut next = 0;
        let all: Vec<usize> = (0..self.len()).collect();
        self.place(&all, &mut position, &mut next, 0);
        position
    }

    /// Places `nodes`; arrows that leave them, or lead to placed ones, do not count.
    fn place(&self, nodes: &[usize], position: &mut [usize], next: &mut usize, depth: usize) {
        for component in self.components(nodes, position) {
            // The first node reached is the head of a loop.
            let head = component[0];
            position[head] = *next;
            *next += 1;
            // Nobody writes loops this deep; text order is still an order.
            if depth < 200 {
                self.place(&component[1..], position, next, depth + 1);
            } else {
                for node in &component[1..] {
                    position[*node] = *next;
                    *next += 1;
                }
            }
        }
    }

    /// Strongly connected components among the unplaced `nodes`, in topological order (Tarjan). In each the node that was
    /// reached first is first.
    fn components(&self, nodes: &[usize], position: &[usize]) -> Vec<Vec<usize>> {
        const NEW: usize = usize::MAX;
        let mut inside: std::collections::HashMap<usize, (usize, usize, bool)> =
            nodes.iter().map(|n| (*n, (NEW, NEW, false))).collect();
        let (mut counter, mut stack, mut found) = (0, Vec::new(), Vec::new());
        for root in nodes {
            if inside[root].0 != NEW {
                continue;
            }
            let mut work = vec![(*root, 0usize)];
            inside.insert(*root, (counter, counter, true));
            counter += 1;
            stack.push(*root);
            while let Some((node, edge)) = work.pop() {
                let successors = &self.successors[node];
                if edge < successors.len() {
                    work.push((node, edge + 1));
                    let to = successors[edge];
                    if position[to] != usize::MAX {
                        continue;
                    }
                    match inside.get(&to).copied() {
                        Some((NEW, ..)) => {
                            inside.insert(to, (counter, counter, true));
                            counter += 1;
                            stack.push(to);
                            work.push((to, 0));
                        }
                        Some((index, _, true)) => {
                            let low = inside[&node].1.min(index);
                            inside.entry(node).and_modify(|e| e.1 = low);
                        }
                        _ => {}
                    }
                    continue;
                }
                let (index, low, _) = inside[&node];
                if index == low {
                    let at = stack.iter().rposition(|n| *n == node).unwrap_or(0);
                    let component: Vec<usize> = stack.drain(at..).collect();
                    component.iter().for_each(|n| {
                        inside.entry(*n).and_modify(|e| e.2 = false);
                    });
                    found.push(component);
                }
                if let Some((parent, _)) = work.last() {
                    let low = inside[parent].1.min(low);
                    inside.entry(*parent).and_modify(|e| e.1 = low);
                }
            }
        }
        found.reverse();
        found
    }
}

/// Registers that an instruction reads and writes, by number.
#[derive(Debug, Clone, Default)]
pub(crate) struct Uses {
    /// Read.
    pub reads: Vec<u32>,
    /// Written, in all lanes that run.
    pub writes: Vec<u32>,
    /// Written under a guard: the old value may live on.
    pub partial: bool,
}

/// For each register the first and last instruction at which its value matters; `None` if it is never used.
pub(crate) fn intervals(blocks: &Blocks, uses: &[Uses], registers: usize) -> Vec<Option<(usize, usize)>> {
    let words = registers.div_ceil(64);
    let n = blocks.len();
    let (mut gen_, mut kill) = (vec![0u64; n * words], vec![0u64; n * words]);
    let mut spans: Vec<Option<(usize, usize)>> = vec![None; registers];
    let touch = |spans: &mut Vec<Option<(usize, usize)>>, r: usize, i: usize| {
        spans[r] = Some(spans[r].map_or((i, i), |(a, b): (usize, usize)| (a.min(i), b.max(i))));
    };
    for b in 0..n {
        let range = blocks.starts[b]..blocks.starts[b + 1];
        for (i, uses) in range.clone().zip(&uses[range]) {
            for r in &uses.reads {
                let (w, bit) = (b * words + *r as usize / 64, 1u64 << (r % 64));
                if kill[w] & bit == 0 {
                    gen_[w] |= bit;
                }
                touch(&mut spans, *r as usize, i);
            }
            for r in &uses.writes {
                let (w, bit) = (b * words + *r as usize / 64, 1u64 << (r % 64));
                if !uses.partial {
                    kill[w] |= bit;
                } else if kill[w] & bit == 0 {
                    // The lanes that do not run keep what they had.
                    gen_[w] |= bit;
                }
                touch(&mut spans, *r as usize, i);
            }
        }
    }
    let mut live_in = gen_.clone();
    let mut live_out = vec![0u64; n * words];
    let mut changed = true;
    while changed {
        changed = false;
        for b in (0..n).rev() {
            for w in 0..words {
                let out = blocks.successors[b].iter().fold(0, |o, s| o | live_in[s * words + w]);
                let at = b * words + w;
                let into = gen_[at] | (out & !kill[at]);
                changed |= out != live_out[at] || into != live_in[at];
                live_out[at] = out;
                live_in[at] = into;
            }
        }
    }
    for b in 0..n {
        for w in 0..words {
            for (live, i) in [
                (live_in[b * words + w], blocks.starts[b]),
                (live_out[b * words + w], blocks.starts[b + 1] - 1),
            ] {
                let mut bits = live;
                while bits != 0 {
                    touch(&mut spans, w * 64 + bits.trailing_zeros() as usize, i);
                    bits &= bits - 1;
                }
            }
        }
    }
    spans
}

/// Gives registers of one file rows from `first` on, so that two whose intervals touch never share one. Returns a row for
/// each and the number of rows used up to. `u32::MAX` for unused ones.
pub(crate) fn assign(
    spans: &[Option<(usize, usize)>],
    of_file: impl Fn(usize) -> bool,
    first: u32,
) -> (Vec<u32>, u32) {
    let mut order: Vec<usize> = (0..spans.len()).filter(|r| of_file(*r) && spans[*r].is_some()).collect();
    order.sort_by_key(|r| spans[*r]);
    let mut rows = vec![u32::MAX; spans.len()];
    let mut free: Vec<u32> = Vec::new();
    let mut busy: std::collections::BinaryHeap<std::cmp::Reverse<(usize, u32)>> =
        std::collections::BinaryHeap::new();
    let mut next = first;
    for r in order {
        let (start, end) = spans[r].unwrap_or_default();
        while let Some(std::cmp::Reverse((until, row))) = busy.peek().copied()
            && until < start
        {
            busy.pop();
            free.push(row);
        }
        let row = free.pop().unwrap_or_else(|| {
            next += 1;
            next - 1
        });
        rows[r] = row;
        busy.push(std::cmp::Reverse((end, row)));
    }
    (rows, next)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exits(list: &[(bool, &[usize])]) -> Vec<Exits> {
        list.iter().map(|(falls, to)| Exits { falls: *falls, to: to.to_vec() }).collect()
    }

    #[test]
    fn loops_are_contiguous_and_exits_come_after_them() {
        // 0: head, exits to 3; 1: body with a branch to 3 (break); 2: back to 0; 3: end.
        let e = exits(&[(true, &[3]), (true, &[3]), (false, &[0]), (false, &[])]);
        let b = Blocks::new(&e);
        let order = b.order();
        assert_eq!(b.len(), 4);
        assert!(order[3] > order[0] && order[3] > order[1] && order[3] > order[2]);
        // Text order puts the exit before the loop: 0 -> 2, 2 loops to itself, then 1.
        let e = exits(&[(false, &[2]), (false, &[]), (false, &[2, 1])]);
        let order = Blocks::new(&e).order();
        assert!(order[1] > order[2]);
    }

    #[test]
    fn a_value_that_lives_around_a_loop_keeps_its_row() {
        // r0 = ..; loop { r1 = r0; use r1 } ; r2 = ..
        let uses = vec![
            Uses { writes: vec![0], ..Uses::default() },
            Uses { writes: vec![1], reads: vec![0], partial: false },
            Uses { reads: vec![1], ..Uses::default() },
            Uses { writes: vec![2], ..Uses::default() },
            Uses { reads: vec![2], ..Uses::default() },
        ];
        let e = exits(&[(true, &[]), (true, &[]), (true, &[1]), (true, &[]), (false, &[])]);
        let spans = intervals(&Blocks::new(&e), &uses, 3);
        assert_eq!(spans, [Some((0, 2)), Some((1, 2)), Some((3, 4))]);
        let (rows, used) = assign(&spans, |_| true, 10);
        assert!(rows[0] != rows[1] && used == 12);
    }
}
