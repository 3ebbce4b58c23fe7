//! Conformance: every form against a scalar model that is written from the manual's definition and shares no code with
//! the operations.
//!
//! An instruction is given as text with letters for registers: `h` 16 bits, `r` 32, `d` 64, `p` a predicate, each
//! occurrence a register of its own.

mod converts;
mod floats;
mod golden;
mod integers;
mod lanes;
mod matrices;
mod model;
mod others;

use super::form;
use crate::exec::regs::{File, Form, LANES, Literal, Mask, Op, Regs, Trouble};
use crate::options::Options;
use crate::ptx::ast::{Function, Instruction, Operand, Register, Type};

/// Compute capability of the card unless a test says otherwise: everything is allowed.
const NEWEST: u32 = 120;

fn operand(text: &str, function: &mut Function) -> Operand {
    let text = text.trim();
    let mut register = |ty| {
        function.registers.push(Register { name: format!("%{}", function.registers.len()), ty });
        function.registers.len() as u32 - 1
    };
    if let Some(inner) = text.strip_prefix('{') {
        let inner = inner.strip_suffix('}').unwrap();
        return Operand::Vector(inner.split(',').map(|o| operand(o, function)).collect());
    }
    if let Some((a, b)) = text.split_once('|') {
        return Operand::Pair(operand(a, function).into(), operand(b, function).into());
    }
    match text {
        "b" => Operand::Register(register(Type::B8)),
        "h" => Operand::Register(register(Type::B16)),
        "r" => Operand::Register(register(Type::B32)),
        "d" => Operand::Register(register(Type::B64)),
        "p" => Operand::Register(register(Type::Pred)),
        "!p" => Operand::Not(register(Type::Pred)),
        "_" => Operand::Sink,
        x if x.starts_with("0x") => Operand::Integer(i128::from_str_radix(&x[2..], 16).unwrap()),
        x if x.contains('.') => Operand::F64(x.parse::<f64>().unwrap().to_bits()),
        x => Operand::Integer(x.parse().unwrap()),
    }
}

/// Splits at commas outside braces.
fn split(text: &str) -> Vec<String> {
    let mut depth = 0;
    let mut parts = vec![String::new()];
    for c in text.chars() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(String::new());
                continue;
            }
            _ => {}
        }
        parts.last_mut().unwrap().push(c);
    }
    parts
}

/// `add.s32 r, r, 5`
fn instruction(text: &str) -> (Instruction, Function) {
    let (name, operands) = text.split_once(' ').unwrap_or((text, ""));
    let mut function = Function::default();
    let mut parts = name.split('.');
    let opcode = parts.next().unwrap().into();
    let modifiers = parts.map(Into::into).collect();
    let operands = if operands.is_empty() {
        Vec::new()
    } else {
        split(operands).iter().map(|o| operand(o, &mut function)).collect()
    };
    (
        Instruction {
            guard: None,
            opcode,
            modifiers,
            operands,
            location: crate::ptx::ast::Location::default(),
        },
        function,
    )
}

/// The form of an instruction, or why there is none.
fn form_of(text: &str, cc: u32, options: &Options) -> Result<Form, String> {
    let (instruction, function) = instruction(text);
    form(&instruction, &function, cc, options)?.ok_or_else(|| format!("{text} is not known"))
}

/// Whether the form is refused.
fn refused(text: &str) -> bool {
    form_of(text, NEWEST, &Options::default()).is_err()
}

/// An instruction with rows for its operands.
struct Machine {
    op: Op,
    regs: Regs,
    destinations: Vec<(File, u16)>,
    sources: Vec<(File, u16)>,
}

fn flat(operand: &Operand) -> Vec<Operand> {
    match operand {
        Operand::Vector(v) => v.iter().flat_map(flat).collect(),
        Operand::Pair(a, b) => [flat(a), flat(b)].concat(),
        o => vec![o.clone()],
    }
}

fn literal(operand: &Operand, literal: Literal) -> u64 {
    let number = |x: f64| match literal {
        Literal::Bits | Literal::F64 => x.to_bits(),
        Literal::F32 => u64::from((x as f32).to_bits()),
        Literal::F16 | Literal::BF16 => panic!("not used by tests"),
    };
    match operand {
        Operand::Integer(x) => *x as u64,
        Operand::F64(bits) => number(f64::from_bits(*bits)),
        _ => 0,
    }
}

impl Machine {
    fn new(text: &str, options: &Options) -> Self {
        let form = form_of(text, NEWEST, options).unwrap_or_else(|e| panic!("{text}: {e}"));
        let (instruction, _) = instruction(text);
        let operands: Vec<_> = instruction.operands.iter().flat_map(flat).collect();
        let mut regs = Regs::default();
        let mut row = |file: File| {
            let at = match file {
                File::Narrow => {
                    regs.narrow.push([0; LANES]);
                    regs.narrow.len()
                }
                File::Wide => {
                    regs.wide.push([0; LANES]);
                    regs.wide.len()
                }
                File::Pred => {
                    regs.preds.push(0);
                    regs.preds.len()
                }
            };
            (file, at as u16 - 1)
        };
        let destinations: Vec<_> = form.destinations.iter().map(|&f| row(f)).collect();
        let sources: Vec<_> = form.sources.iter().map(|s| row(s.file)).collect();
        assert_eq!(operands.len(), destinations.len() + sources.len(), "{text}");
        for (i, s) in form.sources.iter().enumerate() {
            let value = literal(&operands[destinations.len() + i], s.literal);
            put(&mut regs, sources[i], &[value; LANES]);
        }
        let rows = |r: &[(File, u16)]| r.iter().map(|&(_, i)| i).collect::<Vec<_>>();
        let op = Op::new(form.run, &rows(&destinations), &rows(&sources), form.imm);
        // Literals keep their value: they are no inputs.
        let sources = sources
            .into_iter()
            .zip(&operands[destinations.len()..])
            .filter(|(_, o)| matches!(o, Operand::Register(_) | Operand::Not(_)))
            .map(|(s, _)| s)
            .collect();
        Self { op, regs, destinations, sources }
    }

    fn set(&mut self, source: usize, lanes: &[u64; LANES]) {
        put(&mut self.regs, self.sources[source], lanes);
    }

    fn run(&mut self, mask: Mask) -> Result<(), Box<Trouble>> {
        (self.op.run)(&mut self.regs, &self.op, mask)
    }

    fn get(&self, destination: usize) -> [u64; LANES] {
        let (file, row) = self.destinations[destination];
        let row = row as usize;
        match file {
            File::Narrow => self.regs.narrow[row].map(u64::from),
            File::Wide => self.regs.wide[row],
            File::Pred => std::array::from_fn(|i| u64::from(self.regs.preds[row] >> i & 1)),
        }
    }
}

fn put(regs: &mut Regs, (file, row): (File, u16), lanes: &[u64; LANES]) {
    let row = row as usize;
    match file {
        File::Narrow => regs.narrow[row] = lanes.map(|x| x as u32),
        File::Wide => regs.wide[row] = *lanes,
        File::Pred => {
            regs.preds[row] = lanes.iter().enumerate().fold(0, |m, (i, &x)| m | ((x & 1) as u32) << i);
        }
    }
}

/// A small generator of random bits (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
}

/// Options of the two instruction sets.
fn isas() -> [Options; 2] {
    [true, false].map(|simd| Options { simd, ..Options::default() })
}

/// Runs an instruction on every tuple of inputs, on both instruction sets, with all lanes and with some, and compares
/// with a model: `same(destination, got, expected)`.
fn check_with(
    text: &str,
    tuples: &[Vec<u64>],
    model: impl Fn(&[u64]) -> Vec<u64>,
    same: impl Fn(usize, u64, u64) -> bool,
) {
    compare(text, tuples, &model, &same);
}

/// One copy of it for all models, for the sake of build time.
fn compare(
    text: &str,
    tuples: &[Vec<u64>],
    model: &dyn Fn(&[u64]) -> Vec<u64>,
    same: &dyn Fn(usize, u64, u64) -> bool,
) {
    assert!(!tuples.is_empty());
    let expected: Vec<_> = tuples.iter().map(|t| model(t)).collect();
    for options in isas() {
        let mut m = Machine::new(text, &options);
        for (chunk, want) in tuples.chunks(LANES).zip(expected.chunks(LANES)) {
            for (i, _) in m.sources.clone().iter().enumerate() {
                let lanes = std::array::from_fn(|lane| chunk[lane % chunk.len()][i]);
                m.set(i, &lanes);
            }
            let count = m.destinations.len();
            for mask in [Mask::MAX, 0x8fff_5a01] {
                // A mark that no lane outside the mask may lose.
                let before: Vec<_> =
                    (0..count).map(|d| [[0x5555, 1][usize::from(d % 2 == 1)]; LANES]).collect();
                for d in 0..count {
                    put(&mut m.regs, m.destinations[d], &before[d]);
                }
                m.run(mask).unwrap_or_else(|e| panic!("{text}: {e:?}"));
                for d in 0..count {
                    let got = m.get(d);
                    for lane in 0..LANES {
                        if mask >> lane & 1 == 0 {
                            assert_eq!(
                                got[lane],
                                before[d][lane] & m.ones(d),
                                "{text}: lane {lane} is not active"
                            );
                            continue;
                        }
                        let (inputs, want) = (&chunk[lane % chunk.len()], want[lane % chunk.len()][d]);
                        assert!(
                            same(d, got[lane], want),
                            "{text} of {inputs:x?}: destination {d} is {:x}, should be {want:x} (simd {})",
                            got[lane],
                            options.simd
                        );
                    }
                }
            }
        }
    }
}

impl Machine {
    /// Bits of a destination.
    fn ones(&self, destination: usize) -> u64 {
        match self.destinations[destination].0 {
            File::Pred => 1,
            _ => u64::MAX,
        }
    }
}

/// The same, bit for bit.
fn check(text: &str, tuples: &[Vec<u64>], model: impl Fn(&[u64]) -> Vec<u64>) {
    check_with(text, tuples, model, |_, a, b| a == b);
}

/// All pairs, triples … of these values while they are few, and as many random picks with random values among them.
fn tuples(arity: usize, edges: &[u64], random: impl Fn(&mut Random) -> u64) -> Vec<Vec<u64>> {
    let mut all: Vec<Vec<u64>> = vec![Vec::new()];
    for _ in 0..arity {
        if all.len() * edges.len() > 60_000 {
            let n = all.len();
            all.iter_mut().enumerate().for_each(|(i, t)| t.push(edges[(i * 7 + i / n) % edges.len()]));
            continue;
        }
        all = all.iter().flat_map(|t| edges.iter().map(|&e| [t.as_slice(), &[e]].concat())).collect();
    }
    let mut r = Random(arity as u64);
    for i in 0..2000 {
        all.push(
            (0..arity)
                .map(|_| {
                    if (r.next() + i).is_multiple_of(4) {
                        edges[r.next() as usize % edges.len()]
                    } else {
                        random(&mut r)
                    }
                })
                .collect(),
        );
    }
    all
}

/// Integers of a width: the edges and around, powers of two.
fn integers_of(width: u32) -> Vec<u64> {
    let ones = if width == 64 { u64::MAX } else { (1 << width) - 1 };
    let mut v = vec![
        0,
        1,
        2,
        3,
        5,
        7,
        ones,
        ones - 1,
        ones >> 1,
        (ones >> 1) + 1,
        (ones >> 1) - 1,
        0x1234_5678_9abc_def0 & ones,
    ];
    v.extend([3, 8, 15, 16, 31, 33, 63].iter().filter(|&&s| s < width).map(|&s| 1 << s));
    v.push(ones & 0xaaaa_aaaa_aaaa_aaaa);
    v.sort_unstable();
    v.dedup();
    v
}

fn integer_tuples(arity: usize, width: u32) -> Vec<Vec<u64>> {
    let ones = if width == 64 { u64::MAX } else { (1 << width) - 1 };
    tuples(arity, &integers_of(width), |r| r.next() >> (r.next() % u64::from(width)) & ones)
}
