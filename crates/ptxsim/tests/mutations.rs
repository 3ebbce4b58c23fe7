//! Broken input, made from good input by chance: text and images are refused or taken, and nothing else happens.
//!
//! A second for each test by default; `PTXSIM_FUZZ_SECONDS` gives them longer and `PTXSIM_FUZZ_SEED` other chances.
//! An input that breaks something is kept in the target folder. `fuzz/` has the same for cargo-fuzz, which needs a
//! nightly compiler.

use ptxsim::fatbin;
use ptxsim::ptx::ast::{Base, Function, Module, Operand};
use ptxsim::ptx::parse;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

/// splitmix64
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Below `n`, or 0.
    fn below(&mut self, n: usize) -> usize {
        if n == 0 { 0 } else { (self.next() % n as u64) as usize }
    }

    fn one<'a, T: ?Sized>(&mut self, list: &[&'a T]) -> &'a T {
        list[self.below(list.len())]
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

/// Files of a folder of `tests` whose names end so.
fn files(folder: &str, ends: &[&str]) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(folder);
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|f| f.unwrap().path()).collect();
    paths.sort();
    paths.retain(|p| ends.iter().any(|end| p.to_string_lossy().ends_with(end)));
    paths.iter().map(|p| std::fs::read(p).unwrap()).collect()
}

/// What makes trouble in a text.
const WORDS: [&str; 62] = [
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    ";",
    ",",
    ":",
    "::",
    "|",
    "@",
    "!",
    "-",
    "+",
    "<",
    ">",
    "=",
    "?",
    "~",
    "/*",
    "//",
    "\"",
    "0",
    "-1",
    "4294967296",
    "18446744073709551615",
    "0xffffffffffffffffff",
    "0f",
    "0d",
    "0.",
    "1e999",
    "WARP_SZ",
    "_",
    "%r1",
    "%r99999999999",
    "%tid",
    ".x",
    ".reg",
    ".b32",
    ".pred",
    ".v4",
    ".align",
    ".param",
    ".shared",
    ".global",
    ".local",
    ".const",
    ".entry",
    ".func",
    ".extern",
    ".branchtargets",
    ".callprototype",
    ".loc",
    ".section",
    ".alias",
    "call",
    "bra",
    "mask(",
    "generic(",
    "ü",
    "\0",
];

/// One change.
fn change(bytes: &mut Vec<u8>, others: &[Vec<u8>], chance: &mut Chance) {
    let at = chance.below(bytes.len() + 1);
    let word = |bytes: &[u8], at: usize| {
        let inside = |b: &u8| b.is_ascii_alphanumeric() || b"_$%.".contains(b);
        let start = bytes[..at].iter().rposition(|b| !inside(b)).map_or(0, |i| i + 1);
        let end = bytes[at..].iter().position(|b| !inside(b)).map_or(bytes.len(), |i| at + i);
        start..end.max((start + 1).min(bytes.len()))
    };
    match chance.below(9) {
        0 if at < bytes.len() => bytes[at] ^= 1 << chance.below(8),
        1 if at < bytes.len() => bytes[at] = chance.next() as u8,
        2 => {
            let found = word(bytes, at);
            bytes.splice(found, chance.one(&WORDS).bytes());
        }
        3 => {
            bytes.splice(at..at, chance.one(&WORDS).bytes());
        }
        // a word twice, a word less, two words swapped
        4 => {
            let found = word(bytes, at);
            let copy = bytes[found.clone()].to_vec();
            bytes.splice(found.start..found.start, copy);
        }
        5 => {
            let found = word(bytes, at);
            bytes.drain(found);
        }
        6 => {
            let (first, second) = (word(bytes, at), chance.below(bytes.len() + 1));
            let second = word(bytes, second);
            if first.end <= second.start {
                let (a, b) = (bytes[first.clone()].to_vec(), bytes[second.clone()].to_vec());
                bytes.splice(second, a);
                bytes.splice(first, b);
            }
        }
        // a stretch of another file, a stretch less
        7 => {
            let other = &others[chance.below(others.len())];
            let from = chance.below(other.len());
            let len = chance.below(200).min(other.len() - from);
            bytes.splice(at..at, other[from..from + len].iter().copied());
        }
        _ => {
            let most = if chance.below(20) == 0 { bytes.len() } else { 100 };
            let len = chance.below(most);
            bytes.drain(at..(at + len).min(bytes.len()));
        }
    }
}

/// Runs `check` on changed copies of `good` for a while; returns how many and how many of them it took.
fn try_all(name: &str, good: &[Vec<u8>], check: impl Fn(&[u8]) -> bool) -> (u64, u64) {
    let mut chance = Chance(setting("PTXSIM_FUZZ_SEED", 1));
    let until = Instant::now() + Duration::from_secs(setting("PTXSIM_FUZZ_SECONDS", 1));
    let (mut tried, mut taken) = (0, 0);
    while Instant::now() < until {
        let mut bytes = good[chance.below(good.len())].clone();
        for _ in 0..=chance.below(4) {
            change(&mut bytes, good, &mut chance);
        }
        let start = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| check(&bytes)));
        let slow = start.elapsed() > Duration::from_secs(5);
        tried += 1;
        match result {
            Ok(took) if !slow => taken += u64::from(took),
            _ => {
                let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{tried}"));
                std::fs::write(&path, &bytes).unwrap();
                panic!("{} {}", path.display(), if slow { "takes long" } else { "breaks it" });
            }
        }
    }
    println!("{name}: {tried} tried, {taken} taken");
    (tried, taken)
}

/// Whole files, and single kernels with what stands before the first, which are tried faster.
fn texts() -> Vec<Vec<u8>> {
    let mut texts = files("kernels", &[".ptx"]);
    for file in texts.clone() {
        let text = String::from_utf8(file).unwrap();
        let mut kernels = text.split(".visible .entry");
        let head = kernels.next().unwrap();
        texts.extend(kernels.map(|kernel| format!("{head}.visible .entry{kernel}").into_bytes()));
    }
    texts
}

/// Everything that a tree refers to is there.
fn check_tree(module: &Module) {
    for function in &module.functions {
        for label in &function.labels {
            assert!(label.1 <= function.body.len(), "label {}", label.0);
        }
        for (_, labels) in &function.branch_targets {
            assert!(labels.iter().all(|l| function.labels.iter().any(|f| f.0 == *l)));
        }
        for instruction in &function.body {
            assert!(instruction.guard.is_none_or(|g| (g.register as usize) < function.registers.len()));
            instruction.operands.iter().for_each(|o| check_operand(module, function, o));
        }
    }
    for variable in &module.variables {
        if let Some(init) = &variable.init {
            assert!(init.bytes.len() as u64 <= variable.bytes, "{}", variable.name);
            for r in &init.relocations {
                assert!(r.offset + u64::from(r.bytes) <= variable.bytes && known(module, None, &r.symbol));
            }
        }
    }
}

fn known(module: &Module, function: Option<&Function>, name: &str) -> bool {
    let inside = |f: &Function| {
        let mut variables = f.locals.iter().chain(&f.params).chain(&f.returns);
        variables.any(|v| v.name == name)
            || f.branch_targets.iter().any(|t| t.0 == name)
            || f.prototypes.iter().any(|p| p.name == name)
    };
    function.is_some_and(inside)
        || module.variables.iter().any(|v| v.name == name)
        || module.functions.iter().any(|f| f.name == name)
}

fn check_operand(module: &Module, function: &Function, operand: &Operand) {
    let register = |r: u32| assert!((r as usize) < function.registers.len());
    let base = |b: &Base| match b {
        Base::Register(r) => register(*r),
        Base::Symbol(s) => assert!(known(module, Some(function), s), "{s}"),
        Base::Absolute => {}
    };
    let all = |list: &[Operand]| list.iter().for_each(|o| check_operand(module, function, o));
    match operand {
        Operand::Register(r) | Operand::Not(r) => register(*r),
        Operand::Vector(list) | Operand::List(list) => all(list),
        Operand::Pair(a, b) => all(&[(**a).clone(), (**b).clone()]),
        Operand::Address(a) => base(&a.base),
        Operand::Tensor(a, groups) => {
            base(&a.base);
            groups.iter().for_each(|g| all(g));
        }
        Operand::Symbol(s, _) => assert!(known(module, Some(function), s), "{s}"),
        Operand::Label(i) => assert!(*i < function.labels.len()),
        _ => {}
    }
}

#[test]
fn ptx_texts() {
    let (tried, taken) = try_all("ptx", &texts(), |bytes| match parse(&String::from_utf8_lossy(bytes)) {
        Ok(module) => {
            check_tree(&module);
            true
        }
        Err(errors) => {
            assert!(!errors.errors.is_empty() && !errors.to_string().is_empty());
            false
        }
    });
    // both ways are taken, or the changes are no good
    assert!(taken > 0 && taken < tried, "{taken} of {tried}");
}

#[test]
fn fatbins_and_cubins() {
    let (tried, taken) = try_all("fatbin", &files("data", &[".fatbin", ".cubin"]), |bytes| {
        fatbin::registers(bytes);
        if let Some(header) = bytes.first_chunk() {
            fatbin::total_len(header);
        }
        if let Some(header) = bytes.first_chunk() {
            fatbin::elf_len(header);
        }
        let Ok(entries) = fatbin::entries(bytes) else { return false };
        fatbin::registers_for(&entries, 80);
        entries.iter().for_each(|e| {
            let _ = e.text();
        });
        fatbin::select_ptx(&entries, 90).is_ok_and(|text| parse(&text).is_ok())
    });
    assert!(taken > 0 && taken < tried, "{taken} of {tried}");
}
