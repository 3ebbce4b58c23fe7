//! `cargo xtask bytes`: what decode attention moves, beside the fewest bytes that would do, its sectors and its bank conflicts.
//!
//! `benches/cuda` makes the launches, on the simulated driver, which counts. A load finds what its warp loaded last (8 KB) in a
//! first-level cache; nothing is found in the second-level cache, so that a page which is read twice counts twice.

use crate::kernels;
use crate::table::{Table, megabytes};
use crate::toolkit::Toolkit;
use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

/// Options of `cargo xtask bytes`.
#[derive(Debug, Args)]
pub struct BytesArgs {
    /// Tokens of a sequence in pages at least, a multiple of 64 (4096 by default); there are more where 32 MB of pages need them.
    #[arg(long)]
    tokens: Option<usize>,
    /// Heads of 128 channels and groups 4 and 8 only.
    #[arg(long)]
    quick: bool,
    /// Prints what was counted as JSON.
    #[arg(long)]
    json: bool,
}

/// Bytes from memory, as a multiple of the fewest.
const MEMORY: f64 = 1.03;
/// Bytes from the second-level cache, partial results of units that blocks share among them.
const L2: f64 = 1.1;
/// Parts of the sectors' bytes that lanes asked for.
const FULL: f64 = 0.99;

/// What was counted in one launch.
#[derive(Debug, Clone, PartialEq)]
struct Row {
    format: String,
    dim: u64,
    group: u64,
    kernel: String,
    tokens: u64,
    least: f64,
    memory: f64,
    l2: f64,
    asked: f64,
    conflicts: u64,
    loop_conflicts: u64,
}

impl Row {
    fn parse(json: &Value) -> Result<Self> {
        let number = |key: &str| json[key].as_u64().with_context(|| format!("no {key} in {json}"));
        let text =
            |key: &str| json[key].as_str().map(String::from).with_context(|| format!("no {key} in {json}"));
        let row = Self {
            format: text("format")?,
            dim: number("dim")?,
            group: number("group")?,
            kernel: text("kernel")?,
            tokens: number("tokens")?,
            least: number("least")? as f64,
            memory: number("memory")? as f64,
            l2: number("l2")? as f64,
            asked: number("asked")? as f64,
            conflicts: number("conflicts")?,
            loop_conflicts: number("loop_conflicts")?,
        };
        // Fewer than the fewest: the launch did not do the work.
        if row.least == 0.0 || row.memory < 0.99 * row.least {
            bail!("{} bytes were counted where {} are needed: {json}", row.memory, row.least);
        }
        Ok(row)
    }

    /// What is not as it should be.
    fn missed(&self) -> Vec<String> {
        let mut missed = Vec::new();
        let (memory, l2, full) = (self.memory / self.least, self.l2 / self.least, self.asked / self.l2);
        if memory > MEMORY {
            missed.push(format!("memory {memory:.3} > {MEMORY}"));
        }
        if l2 > L2 {
            missed.push(format!("L2 {l2:.3} > {L2}"));
        }
        if full < FULL {
            missed.push(format!("sectors {:.1} % full < {:.0} %", 100.0 * full, 100.0 * FULL));
        }
        if self.loop_conflicts > 0 {
            missed.push(format!("{} bank conflicts in the loop", self.loop_conflicts));
        }
        missed
    }

    fn cells(&self) -> [String; 12] {
        let missed = self.missed();
        [
            self.format.clone(),
            self.dim.to_string(),
            self.group.to_string(),
            self.tokens.to_string(),
            self.kernel.trim_start_matches("qkv_attend_").into(),
            megabytes(self.least),
            megabytes(self.memory),
            format!("{:.3}", self.memory / self.least),
            format!("{:.3}", self.l2 / self.least),
            format!("{:.1}", 100.0 * self.asked / self.l2),
            format!("{}/{}", self.loop_conflicts, self.conflicts),
            if missed.is_empty() { "yes".into() } else { "NO".into() },
        ]
    }
}

/// Builds, counts, prints a row a format, head dim and group, and holds each against the goals.
///
/// # Errors
/// If the build or a launch fails, or a goal is missed: the message names the rows.
pub fn run(args: &BytesArgs) -> Result<()> {
    let lines = count(args)?;
    let rows = lines.iter().map(Row::parse).collect::<Result<Vec<_>>>()?;
    if args.json {
        println!("{}", Value::from(lines));
    } else {
        print(&rows);
    }
    let missed: Vec<String> = rows
        .iter()
        .filter(|r| !r.missed().is_empty())
        .map(|r| format!("{}, heads of {}, group {}: {}", r.format, r.dim, r.group, r.missed().join(", ")))
        .collect();
    if !missed.is_empty() {
        bail!("{} of {} rows miss a goal:\n  {}", missed.len(), rows.len(), missed.join("\n  "));
    }
    Ok(())
}

fn print(rows: &[Row]) {
    let head = [
        "format",
        "dim",
        "group",
        "tokens",
        "kernel",
        "fewest MB",
        "MB",
        "ratio",
        "L2",
        "% full",
        "conflicts",
        "goals",
    ];
    let mut table = Table::new(head);
    rows.iter().for_each(|r| table.row(r.cells()));
    println!("{}", table.markdown());
    println!(
        "fewest: packed tiles, window and sinks that are seen, queries, outputs, LSE. MB: all that passes the first-level cache, but \
         partial results, which stay in the second; ratio: of the two, at most {MEMORY}. L2: partial results too, at most {L2}. % \
         full: bytes of these sectors that lanes asked for, at least {:.0}. conflicts: in the loop over pages and rows (none is \
         allowed), and with the preparation of queries, once a unit of work.",
        100.0 * FULL
    );
}

/// The lines of the benchmark's counting mode.
fn count(args: &BytesArgs) -> Result<Vec<Value>> {
    let toolkit = Toolkit::obtain()?;
    // With the features of `cargo xtask test`, so that both share a build.
    let build =
        ["build", "--release", "--workspace", "--features", "qkv-candle/llama,qkv/cuda", "--bench=cuda"];
    let built = kernels::executables(&toolkit, None, "80,90", &build)?;
    let bench = built.iter().find(|e| e.kind == "bench").context("cargo built no benchmark")?;
    let mut command = Command::new(&bench.path);
    command.arg("bytes").stdout(Stdio::piped());
    if args.quick {
        command.arg("--quick");
    }
    if let Some(n) = args.tokens {
        command.args(["--tokens", &n.to_string()]);
    }
    let mut child = command.spawn().with_context(|| bench.path.display().to_string())?;
    let output = child.stdout.take().context("the benchmark has no output")?;
    let mut lines = Vec::new();
    for line in BufReader::new(output).lines() {
        let line = line?;
        let json: Value =
            serde_json::from_str(&line).with_context(|| format!("the benchmark says {line}"))?;
        eprintln!("{}, heads of {}, group {}", json["format"], json["dim"], json["group"]);
        lines.push(json);
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("the benchmark failed: {status}");
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn line() -> Value {
        json!({
            "format": "f16", "dim": 128, "group": 8, "kernel": "qkv_attend_f16_half_128", "tokens": 4096,
            "least": 1000, "memory": 1020, "l2": 1090, "asked": 1085, "conflicts": 7, "loop_conflicts": 0,
        })
    }

    #[test]
    fn goals_are_held_against_what_was_counted() {
        let row = Row::parse(&line()).unwrap();
        assert_eq!(row.missed(), [""; 0]);
        assert_eq!(row.cells()[7..], ["1.020", "1.090", "99.5", "0/7", "yes"]);
        let bad = Row { memory: 2000.0, l2: 2100.0, asked: 2000.0, loop_conflicts: 3, ..row };
        assert_eq!(
            bad.missed(),
            [
                "memory 2.000 > 1.03",
                "L2 2.100 > 1.1",
                "sectors 95.2 % full < 99 %",
                "3 bank conflicts in the loop"
            ]
        );
        assert_eq!(bad.cells()[11], "NO");
    }

    #[test]
    fn launches_that_did_nothing_are_no_success() {
        let mut idle = line();
        idle["memory"] = 12.into();
        assert!(
            Row::parse(&idle)
                .unwrap_err()
                .to_string()
                .contains("12 bytes were counted where 1000 are needed")
        );
        let mut other = line();
        other["memory"] = "many".into();
        assert!(Row::parse(&other).is_err());
    }
}
