//! The library against reference data made by its peers: `cargo test --release --test golden`.
//!
//! Every case of the directory's manifest falls into at least one class, found by what its entry says, never by
//! its name; the test prints a count for each class.
//!
//! | class | what |
//! |---|---|
//! | a | codes for the peer's pair, decoding of the peer's codes, the HQQ solver's codes |
//! | b | our own fits against the peer's error |
//! | c | symmetric formats, decoding only |
//! | d | FP8 bytes |
//! | e | cases the peer cannot compute or leaves undefined |
//! | f | attention over plain tensors, and through a cache |
//! | g | the peers' caches, replayed step by step |

#[path = "../support/golden.rs"]
pub(crate) mod golden;
#[path = "../support/reference.rs"]
mod reference;

mod affine;
mod attention;
mod fits;
mod fp8;
mod hqq;
mod through_cache;
mod traces;
mod views;

use golden::{Case, Golden};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;

/// What was seen: cases by class, failures, and figures worth printing.
#[derive(Debug, Default)]
pub(crate) struct Report {
    classes: BTreeMap<char, BTreeSet<(String, String)>>,
    failures: Vec<String>,
    notes: Vec<String>,
}

impl Report {
    /// This case belongs to this class.
    pub(crate) fn count(&mut self, class: char, case: &Case) {
        self.classes.entry(class).or_default().insert((case.file.clone(), case.id.clone()));
    }

    /// Fails the test, later, if `ok` is false.
    pub(crate) fn check(&mut self, ok: bool, case: &Case, message: impl FnOnce() -> String) {
        if !ok {
            self.failures.push(format!("{}/{}: {}", case.file, case.id, message()));
        }
    }

    /// A figure to print.
    pub(crate) fn note(&mut self, line: String) {
        self.notes.push(line);
    }
}

#[test]
fn golden() {
    let golden = Golden::open();
    let mut report = Report::default();
    affine::run(&golden, &mut report);
    hqq::run(&golden, &mut report);
    fits::run(&golden, &mut report);
    fp8::run(&golden, &mut report);
    attention::run(&golden, &mut report);
    through_cache::run(&golden, &mut report);
    traces::run(&golden, &mut report);

    let mut text = format!("golden data in {}\n", golden.dir.display());
    for (class, cases) in &report.classes {
        writeln!(text, "class {class}: {:3} cases", cases.len()).unwrap();
    }
    for note in &report.notes {
        writeln!(text, "  {note}").unwrap();
    }
    // Past the test harness's capture, so that the counts show in every run.
    std::io::stdout().write_all(text.as_bytes()).unwrap();

    let mut failures = report.failures;
    for case in &golden.cases {
        let key = (case.file.clone(), case.id.clone());
        if !report.classes.values().any(|c| c.contains(&key)) {
            failures.push(format!("{}/{}: in no class", case.file, case.id));
        }
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
    for class in "abcdefg".chars() {
        assert!(report.classes.contains_key(&class), "class {class} is empty");
    }
}
