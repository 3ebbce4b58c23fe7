//! Which instructions a turn of a loop executes.
//!
//! The compiler writes code twice (with and without a mask, say) and puts rare code beside the rest, so the length of a loop's
//! body says little. Of all ways from the loop's head back to it the shortest is taken that executes all products of a turn:
//! rare work only makes a way longer. Ways that cannot be are left out:
//!
//! * a branch whose comparison is of known numbers goes one way. So loops inside that turn a constant number of times do that
//!   here, and what a first turn skips is not skipped;
//! * a predicate that a branch has read is the same at the next branch that reads it, and so is the outcome of a comparison
//!   that is made again with the same registers;
//! * a branch to a function of the compiler's (a division of unusual numbers) is not taken where there is another way;
//! * a vote of the warp (`__any_sync`: does the softmax reference move?) says no on the common way, and yes on the rescale way if it
//!   comes behind products: one before them asks something else, such as whether the page exists.
//!
//! What remains is a way that the program allows. Whether the common case takes it is seen with `cargo xtask sass --path KERNEL`. Read
//! that way against the source on sm_90 (the branches of each in order, addresses aside):
//!
//! * `qkv_attend_int8_integer_128`: the page exists (jump over its counting); no softcap (jump); the page does not begin before what
//!   all columns see (no jump), nor end behind it (jump over the mask); vote no (jump); 64 tokens exist (jump over the clearing of
//!   pairs); next page.
//! * `qkv_attend_default4_integer_128`: the page exists; first turn of the loop that folds steps into queries (no jump), whose vote says
//!   that all products fit (jump out); the norm is an ordinary number (jump to `MUFU.RCP`, beside a call); no softcap; no mask; vote
//!   no; 64 tokens exist, asked once for each of the two pairs of a token and the same both times; next page.
//! * `qkv_attend_token2_integer_128`: as int8, and loops that the compiler left in it turn as often as their counters say.
//!
//! Where a branch has several sides, such as FP8 with a scale for each token or not, the shortest is the cheapest case; that one's other case
//! is counted by `measure::decode` (`Decode::scaled`).
//!
//! A loop inside that may be left by a branch of which nothing is known turns once, and is noted in [`Way::open`].

use super::facts::{Effects, Facts};
use super::flow::{End, Flow, Loop};
use super::listing::{Function, Instruction};
use anyhow::{Context, Result, bail};
use std::collections::{BTreeSet, HashMap, HashSet};

/// A turn of a loop.
#[derive(Debug, Clone, Default)]
pub struct Way {
    /// Blocks in the order they are executed.
    pub blocks: Vec<usize>,
    /// Indices of the instructions executed, in order, those of loops inside as often as these turn.
    pub code: Vec<usize>,
    /// Heads of loops inside whose number of turns is not known: they count once.
    pub open: BTreeSet<usize>,
}

/// Ways are better in this order: more of what is wanted, more products, fewer calls, fewer instructions. Calls go to what division
/// and the like do for unusual numbers, and cost what stands elsewhere.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Score {
    wanted: usize,
    products: usize,
    calls_spared: isize,
    spared: isize,
}

/// A place on a way, what is known there, and the loops around it whose turn met an exit of which nothing is known.
type State = (usize, Facts, BTreeSet<usize>);

struct Walk<'a> {
    flow: &'a Flow,
    turn: &'a Loop,
    inner: Vec<Loop>,
    effects: Effects,
    /// What a block adds to the score.
    value: HashMap<usize, Score>,
    vote: bool,
    /// Blocks with products, and those that follow one in the turn.
    late: BTreeSet<usize>,
    best: HashMap<State, Option<(Score, Option<State>)>>,
    under_way: HashSet<State>,
    open: BTreeSet<usize>,
}

/// States of one loop at most; far more than a loop has whose facts are few.
const MOST_STATES: usize = 1_000_000;

/// The way of a turn of `turn` on which votes go like `vote`, with as many instructions as can be for which `wanted` holds.
///
/// # Errors
/// If there is none, or too much to look at.
pub fn way(
    function: &Function,
    flow: &Flow,
    turn: &Loop,
    vote: bool,
    wanted: impl Fn(&Instruction) -> bool,
) -> Result<Way> {
    let count = |b: usize, f: &dyn Fn(&Instruction) -> bool| {
        let block = &flow.blocks[b];
        function.code[block.from..block.to].iter().filter(|i| f(i)).count()
    };
    let value = |b: usize| Score {
        wanted: count(b, &wanted),
        products: count(b, &Instruction::is_mma),
        calls_spared: -(count(b, &|i| i.base() == "CALL" && i.targets.is_empty()) as isize),
        spared: -((flow.blocks[b].to - flow.blocks[b].from) as isize),
    };
    let mut late: BTreeSet<usize> = turn.blocks.iter().copied().filter(|&b| value(b).products > 0).collect();
    let mut follow: Vec<usize> = late.iter().copied().collect();
    while let Some(block) = follow.pop() {
        let next = flow.blocks[block].successors();
        follow.extend(
            next.into_iter().filter(|t| *t != turn.head && turn.blocks.contains(t) && late.insert(*t)),
        );
    }
    let inner = flow.loops().into_iter().filter(|l| l.head != turn.head && turn.blocks.contains(&l.head));
    let mut walk = Walk {
        flow,
        turn,
        inner: inner.collect(),
        effects: Effects::of(function, flow, turn),
        value: turn.blocks.iter().map(|&b| (b, value(b))).collect(),
        vote,
        late,
        best: HashMap::new(),
        under_way: HashSet::new(),
        open: BTreeSet::new(),
    };
    let start = (turn.head, Facts::default(), BTreeSet::new());
    // As deep as the way is long.
    let found = stacker(|| walk.best(&start)).with_context(|| function.name.clone())?;
    found.with_context(|| format!("{}: no way leads through the loop", function.name))?;
    let mut way = Way::default();
    let mut next = Some(start);
    while let Some(state) = next {
        way.blocks.push(state.0);
        way.code.extend(flow.blocks[state.0].from..flow.blocks[state.0].to);
        next = walk.best[&state].as_ref().and_then(|b| b.1.clone());
    }
    way.open = walk.open.into_iter().filter(|h| way.blocks.contains(h)).collect();
    Ok(way)
}

/// Runs something that calls itself deeply on a thread with room for it.
fn stacker<T: Send>(f: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|s| {
        let thread = std::thread::Builder::new().stack_size(1 << 28).spawn_scoped(s, f);
        match thread.map(std::thread::ScopedJoinHandle::join) {
            Ok(Ok(value)) => value,
            Ok(Err(panic)) => std::panic::resume_unwind(panic),
            Err(e) => panic!("no thread: {e}"),
        }
    })
}

impl Walk<'_> {
    /// The best way from a state to the loop's head.
    fn best(&mut self, state: &State) -> Result<Option<Score>> {
        if let Some(known) = self.best.get(state) {
            return Ok(known.as_ref().map(|k| k.0));
        }
        if self.best.len() > MOST_STATES {
            bail!("too many ways lead through the loop");
        }
        self.under_way.insert(state.clone());
        let (block, mut facts, open) = state.clone();
        self.effects.after(block, &mut facts, self.vote && self.late.contains(&block));
        let mut best: Option<(Score, Option<State>)> = None;
        for (to, facts, decided) in self.steps(block, facts) {
            let (rest, next) = if to == self.turn.head {
                (Score::default(), None)
            } else {
                let open = if decided { open.clone() } else { self.undecided(block, &open) };
                let Some(next) = self.enter(block, to, facts, open) else { continue };
                match self.best(&next)? {
                    Some(score) => (score, Some(next)),
                    None => continue,
                }
            };
            let own = self.value[&block];
            let score = Score {
                wanted: own.wanted + rest.wanted,
                products: own.products + rest.products,
                calls_spared: own.calls_spared + rest.calls_spared,
                spared: own.spared + rest.spared,
            };
            if best.as_ref().is_none_or(|b| score > b.0) {
                best = Some((score, next));
            }
        }
        self.under_way.remove(state);
        let score = best.as_ref().map(|b| b.0);
        self.best.insert(state.clone(), best);
        Ok(score)
    }

    /// Where a block leads: the next block, what is known there, and whether there was no choice.
    fn steps(&self, block: usize, facts: Facts) -> Vec<(usize, Facts, bool)> {
        match &self.flow.blocks[block].end {
            End::Goes(to) => to.iter().map(|&t| (t, facts.clone(), to.len() == 1)).collect(),
            End::Branches { on, taken, other } => {
                let sides = [(true, Some(*taken)), (false, *other)];
                let known = facts.value(on);
                let open = sides.into_iter().filter(|s| known.is_none_or(|k| k == s.0));
                open.filter_map(|(holds, to)| {
                    let mut facts = facts.clone();
                    facts.assume(on, holds);
                    Some((to?, facts, known.is_some()))
                })
                .collect()
            }
        }
    }

    /// Loops inside with an exit of which nothing is known, behind a block that ends with a choice.
    fn undecided(&self, block: usize, open: &BTreeSet<usize>) -> BTreeSet<usize> {
        let mut open = open.clone();
        let to = self.flow.blocks[block].successors();
        let left = |l: &&Loop| l.blocks.contains(&block) && to.iter().any(|t| !l.blocks.contains(t));
        open.extend(self.inner.iter().filter(left).map(|l| l.head));
        open
    }

    /// The state at a block that follows; `None` where the way must not go on there.
    fn enter(
        &mut self,
        from: usize,
        to: usize,
        mut facts: Facts,
        mut open: BTreeSet<usize>,
    ) -> Option<State> {
        if !self.turn.blocks.contains(&to) {
            return None;
        }
        let around = |l: &Loop| l.head == to && l.blocks.contains(&from);
        if open.contains(&to) && self.inner.iter().any(around) {
            self.open.insert(to);
            return None;
        }
        open.retain(|h| *h != to && self.inner.iter().any(|l| l.head == *h && l.blocks.contains(&to)));
        self.effects.enter(to, &mut facts);
        let state = (to, facts, open);
        if self.under_way.contains(&state) {
            self.open.insert(to);
            return None;
        }
        Some(state)
    }
}

#[cfg(test)]
mod tests;
