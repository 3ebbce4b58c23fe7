//! What is known of registers and predicates on the way through a loop: constants, and branches taken before.
//!
//! Only what can decide a branch is followed: predicates that branches read, and registers from which integer comparisons
//! make them.

use super::flow::{End, Flow, Loop};
use super::listing::{Function, Instruction, Predicate};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// What is known at a place. Small, since it is compared and kept for every place a way passes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Facts {
    predicates: BTreeMap<String, Fact>,
    registers: BTreeMap<String, u32>,
    /// Outcomes of comparisons that stand in several places, while what they compare stays.
    tests: BTreeMap<usize, bool>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Fact {
    Known(bool),
    /// The outcome of a comparison, or its opposite.
    Test(usize, bool),
}

/// What an instruction does to the facts.
#[derive(Debug, Clone)]
enum Effect {
    Set(String, u32),
    Copy(String, String),
    Add(String, String, u32),
    Forget(String),
    ForgetPredicate(String),
    ForgetTest(usize),
    /// Whether any lane votes so.
    Vote(String),
    VoteMask(String),
    Compare {
        into: String,
        test: Option<(usize, bool)>,
        how: Comparison,
        a: String,
        b: String,
    },
}

#[derive(Debug, Clone, Copy)]
struct Comparison {
    kind: Kind,
    signed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Lt,
    Eq,
    Le,
    Gt,
    Ne,
    Ge,
}

impl Kind {
    fn of(i: &Instruction) -> Option<Self> {
        let kinds = [
            ("LT", Self::Lt),
            ("EQ", Self::Eq),
            ("LE", Self::Le),
            ("GT", Self::Gt),
            ("NE", Self::Ne),
            ("GE", Self::Ge),
        ];
        kinds.into_iter().find(|k| i.has(k.0)).map(|k| k.1)
    }

    /// The kind that stands for this one and its opposite, and whether this is the opposite.
    fn canonical(self) -> (&'static str, bool) {
        match self {
            Self::Lt => ("LT", false),
            Self::Ge => ("LT", true),
            Self::Eq => ("EQ", false),
            Self::Ne => ("EQ", true),
            Self::Gt => ("GT", false),
            Self::Le => ("GT", true),
        }
    }
}

impl Comparison {
    fn holds(self, a: u32, b: u32) -> bool {
        let order = if self.signed { (a as i32).cmp(&(b as i32)) } else { a.cmp(&b) };
        match self.kind {
            Kind::Lt => order.is_lt(),
            Kind::Eq => order.is_eq(),
            Kind::Le => order.is_le(),
            Kind::Gt => order.is_gt(),
            Kind::Ne => order.is_ne(),
            Kind::Ge => order.is_ge(),
        }
    }
}

/// What may decide a branch further on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Live {
    names: BTreeSet<String>,
    tests: BTreeSet<usize>,
}

impl Live {
    /// From behind an effect to before it.
    fn before(&mut self, e: &Effect) {
        match e {
            Effect::Set(r, _) | Effect::Forget(r) | Effect::VoteMask(r) => {
                self.names.remove(r);
            }
            Effect::ForgetPredicate(p) | Effect::Vote(p) => {
                self.names.remove(p);
            }
            Effect::ForgetTest(id) => {
                self.tests.remove(id);
            }
            Effect::Copy(r, from) | Effect::Add(r, from, _) => {
                if self.names.remove(r) {
                    self.names.insert(from.clone());
                }
            }
            Effect::Compare { into, test, a, b, .. } => {
                if self.names.remove(into) {
                    let plain = |o: &String| o.trim_start_matches('-').to_string();
                    self.names.extend([a, b].map(plain));
                    self.tests.extend(test.map(|t| t.0));
                }
            }
        }
    }
}

/// How the blocks of a loop change the facts.
#[derive(Debug)]
pub struct Effects {
    of_block: HashMap<usize, Vec<Effect>>,
    /// What may still decide a branch when a block begins: names of predicates and registers, and tests.
    live: HashMap<usize, Live>,
}

impl Effects {
    /// Those of a loop's blocks.
    pub fn of(function: &Function, flow: &Flow, l: &Loop) -> Self {
        let code = || flow.instructions(l).map(|at| &function.code[at]);
        let predicates: BTreeSet<String> = l
            .blocks
            .iter()
            .filter_map(|&b| match &flow.blocks[b].end {
                End::Branches { on, .. } => Some(on.name.clone()),
                End::Goes(_) => None,
            })
            .collect();
        let registers = followed(code, &predicates);
        let mut tests: BTreeMap<String, usize> = BTreeMap::new();
        for i in code() {
            if let Some((text, _)) = test(i).filter(|_| i.guard.is_none()) {
                *tests.entry(text).or_default() += 1;
            }
        }
        tests.retain(|_, count| *count > 1);
        tests.values_mut().enumerate().for_each(|(id, t)| *t = id);
        let context = Context { predicates: &predicates, registers: &registers, tests: &tests };
        let mut all = Self { of_block: HashMap::new(), live: HashMap::new() };
        for &b in &l.blocks {
            let block = &flow.blocks[b];
            let mut effects = Vec::new();
            function.code[block.from..block.to].iter().for_each(|i| context.effects(i, &mut effects));
            all.of_block.insert(b, effects);
        }
        all.live = all.live(flow, l);
        all
    }

    fn live(&self, flow: &Flow, l: &Loop) -> HashMap<usize, Live> {
        let mut live: HashMap<usize, Live> = HashMap::new();
        loop {
            let mut changed = false;
            for b in l.blocks.iter().rev() {
                let block = &flow.blocks[*b];
                let mut wanted = Live::default();
                for next in block.successors().iter().filter(|s| **s != l.head).filter_map(|s| live.get(s)) {
                    wanted.names.extend(next.names.iter().cloned());
                    wanted.tests.extend(&next.tests);
                }
                if let End::Branches { on, .. } = &block.end {
                    wanted.names.insert(on.name.clone());
                }
                self.of_block[b].iter().rev().for_each(|e| wanted.before(e));
                if live.get(b) != Some(&wanted) {
                    live.insert(*b, wanted);
                    changed = true;
                }
            }
            if !changed {
                return live;
            }
        }
    }

    /// Facts behind a block; `vote`: how votes of a warp go.
    pub fn after(&self, block: usize, facts: &mut Facts, vote: bool) {
        for e in &self.of_block[&block] {
            facts.apply(e, vote);
        }
    }

    /// Drops what no branch from here on can read.
    pub fn enter(&self, block: usize, facts: &mut Facts) {
        let live = &self.live[&block];
        facts.predicates.retain(|p, _| live.names.contains(p));
        facts.registers.retain(|r, _| live.names.contains(r));
        let used = |id: &usize| facts.predicates.values().any(|f| matches!(f, Fact::Test(t, _) if t == id));
        facts.tests.retain(|id, _| live.tests.contains(id) || used(id));
    }
}

impl Facts {
    /// Whether the predicate holds, if that is known.
    pub fn value(&self, p: &Predicate) -> Option<bool> {
        let plain = match self.predicates.get(&p.name)? {
            Fact::Known(v) => *v,
            Fact::Test(id, opposite) => self.tests.get(id)? ^ opposite,
        };
        Some(plain ^ p.negated)
    }

    /// From now on the predicate holds, or does not.
    pub fn assume(&mut self, p: &Predicate, holds: bool) {
        let plain = holds ^ p.negated;
        if let Some(Fact::Test(id, opposite)) = self.predicates.get(&p.name) {
            self.tests.insert(*id, plain ^ opposite);
        }
        self.predicates.insert(p.name.clone(), Fact::Known(plain));
    }

    fn number(&self, operand: &str) -> Option<u32> {
        constant(operand).or_else(|| match operand.strip_prefix('-') {
            Some(r) => self.registers.get(r).map(|x| x.wrapping_neg()),
            None => self.registers.get(operand).copied(),
        })
    }

    fn put(&mut self, register: &str, value: Option<u32>) {
        match value {
            Some(v) => self.registers.insert(register.into(), v),
            None => self.registers.remove(register),
        };
    }

    fn apply(&mut self, e: &Effect, vote: bool) {
        match e {
            Effect::Set(r, v) => self.put(r, Some(*v)),
            Effect::Copy(r, from) => self.put(r, self.number(from)),
            Effect::Add(r, from, n) => self.put(r, self.number(from).map(|x| x.wrapping_add(*n))),
            Effect::Forget(r) => self.put(r, None),
            Effect::VoteMask(r) => self.put(r, Some(if vote { u32::MAX } else { 0 })),
            Effect::ForgetPredicate(p) => {
                self.predicates.remove(p);
            }
            Effect::ForgetTest(id) => {
                // Predicates keep what they hold, but it is no longer what the comparison would say.
                let outcome = self.tests.remove(id);
                self.predicates.retain(|_, f| match f {
                    Fact::Test(t, opposite) if t == id => match outcome {
                        Some(v) => {
                            *f = Fact::Known(v ^ *opposite);
                            true
                        }
                        None => false,
                    },
                    _ => true,
                });
            }
            Effect::Vote(p) => {
                self.predicates.insert(p.clone(), Fact::Known(vote));
            }
            Effect::Compare { into, test, how, a, b } => {
                let fact = match (self.number(a).zip(self.number(b)), test) {
                    (Some((a, b)), _) => Some(Fact::Known(how.holds(a, b))),
                    (None, Some((id, opposite))) => Some(Fact::Test(*id, *opposite)),
                    (None, None) => None,
                };
                match fact {
                    Some(f) => self.predicates.insert(into.clone(), f),
                    None => self.predicates.remove(into),
                };
            }
        }
    }
}

struct Context<'a> {
    predicates: &'a BTreeSet<String>,
    registers: &'a BTreeSet<String>,
    tests: &'a BTreeMap<String, usize>,
}

impl Context<'_> {
    fn effects(&self, i: &Instruction, out: &mut Vec<Effect>) {
        let guarded = match &i.guard {
            Some(g) if g.is_constant() && g.negated => return,
            Some(g) => !g.is_constant(),
            None => false,
        };
        let (registers, predicates) = written(i);
        let first = |set: &[String], of: &BTreeSet<String>| set.first().filter(|r| of.contains(*r)).cloned();
        let (register, predicate) = (first(&registers, self.registers), first(&predicates, self.predicates));
        let vote = is_vote(i) && !guarded;
        // What compares a register knows nothing of it any more, before the instruction's own outcome is noted.
        for (text, id) in self.tests {
            if registers.iter().any(|r| text.split(' ').any(|o| o.trim_start_matches(['-', '|', '~']) == r)) {
                out.push(Effect::ForgetTest(*id));
            }
        }
        let special = match (test(i), vote) {
            (Some((text, opposite)), _) if !guarded => predicate.clone().map(|into| Effect::Compare {
                into,
                test: self.tests.get(&text).map(|id| (*id, opposite)),
                how: Comparison { kind: Kind::of(i).unwrap_or(Kind::Eq), signed: !i.has("U32") },
                a: i.operands[2].clone(),
                b: i.operands[3].clone(),
            }),
            (None, true) => {
                predicate.clone().map(Effect::Vote).or_else(|| register.clone().map(Effect::VoteMask))
            }
            _ if guarded => None,
            _ => register.clone().and_then(|r| arithmetic(i, r)),
        };
        let done = special.is_some();
        for (n, r) in registers.iter().enumerate().filter(|(_, r)| self.registers.contains(*r)) {
            if n > 0 || !done {
                out.push(Effect::Forget(r.clone()));
            }
        }
        for (n, p) in predicates.iter().enumerate().filter(|(_, p)| self.predicates.contains(*p)) {
            if n > 0 || !done {
                out.push(Effect::ForgetPredicate(p.clone()));
            }
        }
        out.extend(special);
    }
}

/// Whether any lane of the warp sees something.
fn is_vote(i: &Instruction) -> bool {
    matches!(i.base(), "VOTE" | "VOTEU") && i.has("ANY")
}

/// `ISETP.GE.AND P0, PT, a, b, PT`: its text without the outcome, and whether that is the opposite of what the text says.
fn test(i: &Instruction) -> Option<(String, bool)> {
    let plain = matches!(i.base(), "ISETP" | "UISETP")
        && i.has("AND")
        && !i.has("EX")
        && i.operands.len() == 5
        && matches!(i.operands[1].as_str(), "PT" | "UPT")
        && matches!(i.operands[4].as_str(), "PT" | "UPT");
    let (kind, opposite) = Kind::of(i)?.canonical();
    let sign = if i.has("U32") { "U32" } else { "S32" };
    plain.then(|| (format!("{kind} {sign} {} {}", i.operands[2], i.operands[3]), opposite))
}

/// A number as an operand: `0x3f`, `-0x1`, `RZ`.
fn constant(operand: &str) -> Option<u32> {
    if matches!(operand, "RZ" | "URZ" | "SRZ" | "-RZ") {
        return Some(0);
    }
    let (negative, digits) = match operand.strip_prefix('-') {
        Some(d) => (true, d),
        None => (false, operand),
    };
    let value = u32::from_str_radix(digits.strip_prefix("0x")?, 16).ok()?;
    Some(if negative { value.wrapping_neg() } else { value })
}

/// What moves and additions do to a register.
fn arithmetic(i: &Instruction, into: String) -> Option<Effect> {
    let o: Vec<&str> = i.operands.iter().skip(1).map(String::as_str).collect();
    let copy = |from: &str| match constant(from) {
        Some(v) => Effect::Set(into.clone(), v),
        None => Effect::Copy(into.clone(), from.into()),
    };
    match (i.base(), &o[..]) {
        ("MOV" | "UMOV" | "R2UR" | "CS2R", [from]) => Some(copy(from)),
        ("IMAD", ["RZ", "RZ", from]) if i.has("MOV") => Some(copy(from)),
        ("IADD3" | "UIADD3" | "IADD" | "UIADD" | "VIADD" | "UVIADD", [from, n, rest @ ..])
            if rest.iter().all(|r| constant(r) == Some(0)) && !i.has("X") =>
        {
            match (constant(from), constant(n)) {
                (Some(a), Some(b)) => Some(Effect::Set(into, a.wrapping_add(b))),
                (None, Some(n)) => Some(Effect::Add(into, from.to_string(), n)),
                (Some(n), None) => Some(Effect::Add(into, o[1].to_string(), n)),
                (None, None) => None,
            }
        }
        _ => None,
    }
}

/// `R12` or `UR4`: its letters and number.
fn register(operand: &str) -> Option<(&str, u32)> {
    let letters = if operand.starts_with("UR") { "UR" } else { "R" };
    let number = operand.strip_prefix(letters)?.parse().ok()?;
    Some((letters, number))
}

/// Registers and predicates that an instruction may write: rather too many, which only makes less known.
fn written(i: &Instruction) -> (Vec<String>, Vec<String>) {
    let (mut registers, mut predicates) = (Vec::new(), Vec::new());
    if matches!(i.base(), "STG" | "STS" | "STL" | "ST" | "RED" | "BRA" | "BAR") {
        return (registers, predicates);
    }
    if i.base() == "R2P" {
        predicates.extend((0..7).map(|n| format!("P{n}")));
        return (registers, predicates);
    }
    let wide = i.opcode.contains("128") || i.is_mma() || i.has("M88");
    let double = i.opcode.contains("64") || i.has("WIDE") || i.base() == "CS2R" || i.base().starts_with('D');
    let count = if wide {
        4
    } else if double {
        2
    } else {
        1
    };
    for (n, operand) in i.operands.iter().enumerate().take(3) {
        if let Some(p) = Predicate::parse(operand) {
            if !p.negated && !p.is_constant() {
                predicates.push(p.name);
            }
        } else {
            // A register is written in the first place, or in the second behind a predicate.
            let into = n == 0 || (n == 1 && Predicate::parse(&i.operands[0]).is_some());
            if let Some((letters, first)) = register(operand).filter(|_| into) {
                registers.extend((first..first + count).map(|r| format!("{letters}{r}")));
            }
            if n > 0 {
                break;
            }
        }
    }
    (registers, predicates)
}

/// Registers from which comparisons make these predicates, and those that they are copied or counted from.
fn followed<'a, I: Iterator<Item = &'a Instruction>>(
    code: impl Fn() -> I,
    predicates: &BTreeSet<String>,
) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    let names = |o: &[String]| -> Vec<String> {
        let plain = o.iter().map(|o| o.trim_start_matches(['-', '~', '|']));
        plain.filter(|o| register(o).is_some()).map(String::from).collect()
    };
    for i in code().filter(|i| test(i).is_some()) {
        if i.operands.first().is_some_and(|p| predicates.contains(p)) {
            all.extend(names(&i.operands[2..4]));
        }
    }
    loop {
        let before = all.len();
        for i in code() {
            let into = i.operands.first().filter(|r| all.contains(*r)).cloned();
            if let Some(Effect::Copy(_, from) | Effect::Add(_, from, _)) = into.and_then(|r| arithmetic(i, r))
            {
                all.extend(names(&[from]));
            }
        }
        if all.len() == before {
            return all;
        }
    }
}
