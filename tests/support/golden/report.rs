//! What was seen: cases by class, failures, and figures worth printing.

use crate::golden::{Case, Golden};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;

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

    /// Fails the test, later, for something that is of no case.
    pub(crate) fn fail(&mut self, line: String) {
        self.failures.push(line);
    }

    /// A figure to print.
    pub(crate) fn note(&mut self, line: String) {
        self.notes.push(line);
    }

    /// Prints the counts; panics for a failure, for a case in no class and for an empty class.
    pub(crate) fn finish(self, golden: &Golden) {
        let mut text = format!("golden data in {}\n", golden.dir.display());
        for (class, cases) in &self.classes {
            writeln!(text, "class {class}: {:3} cases", cases.len()).unwrap();
        }
        for note in &self.notes {
            writeln!(text, "  {note}").unwrap();
        }
        // Past the test harness's capture, so that the counts show in every run.
        std::io::stdout().write_all(text.as_bytes()).unwrap();

        let mut failures = self.failures;
        for case in &golden.cases {
            let key = (case.file.clone(), case.id.clone());
            if !self.classes.values().any(|c| c.contains(&key)) {
                failures.push(format!("{}/{}: in no class", case.file, case.id));
            }
        }
        assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
        for class in "abcdefg".chars() {
            assert!(self.classes.contains_key(&class), "class {class} is empty");
        }
    }
}
