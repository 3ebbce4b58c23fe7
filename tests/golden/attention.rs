//! Class f: attention over plain tensors against f64. Placeholder until it is merged.

use crate::Report;
use crate::golden::Golden;

pub(crate) const CLASS: Option<char> = None;

pub(crate) fn run(golden: &Golden, report: &mut Report) {
    for case in golden.of("attention") {
        report.count('f', case);
    }
}
