//! `cargo xtask kernels`: builds the CUDA kernels and shows what each needs.

use crate::model::root;
use crate::table::Table;
use crate::toolkit::Toolkit;
use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// Options of `cargo xtask kernels`.
#[derive(Debug, Args)]
pub struct KernelArgs {
    /// All architectures that the toolkit knows, instead of 8.0 and 9.0.
    #[arg(long)]
    all: bool,
}

/// Bytes of the images of attention, and of all others, at most: every program that links the library carries them.
const LARGEST: [u64; 2] = [12 << 20, 3 << 20];

/// One kernel on one architecture, as ptxas reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) kernel: String,
    pub(crate) architecture: String,
    pub(crate) registers: u32,
    pub(crate) stack: u32,
    /// Bytes written and read by spills.
    pub(crate) spills: u32,
    pub(crate) shared: u32,
}

/// Builds, and prints a row for every kernel and architecture.
///
/// # Errors
/// If the build fails, or a kernel spills registers.
pub fn run(args: &KernelArgs) -> Result<()> {
    let toolkit = Toolkit::obtain()?;
    let start = Instant::now();
    let out = build(&toolkit, if args.all { "all" } else { "80,90" }, true)?;
    let seconds = start.elapsed().as_secs_f64();
    let mut table = Table::new(["kernel", "arch", "registers", "stack", "spills", "static shared"]);
    let mut images = Table::new(["image", "fatbin bytes"]);
    let (mut total, mut spilled) = ([0, 0], Vec::new());
    let mut reports: Vec<PathBuf> = fs::read_dir(&out)?.filter_map(|e| e.ok().map(|e| e.path())).collect();
    reports.sort();
    for report in reports.iter().filter(|p| p.extension().is_some_and(|e| e == "ptxas")) {
        for u in parse(&fs::read_to_string(report)?) {
            if u.spills > 0 {
                spilled.push(format!("{} on {}", u.kernel, u.architecture));
            }
            let numbers = [u.registers, u.stack, u.spills, u.shared].map(|n| n.to_string());
            let [registers, stack, spills, shared] = numbers;
            table.row([u.kernel, u.architecture, registers, stack, spills, shared]);
        }
        let bytes = fs::metadata(report.with_extension("fatbin"))?.len();
        let name = report.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let attention =
            ["attend_", "prefill_", "combine", "merge"].iter().any(|prefix| name.starts_with(prefix));
        total[usize::from(!attention)] += bytes;
        images.row([name, bytes.to_string()]);
    }
    println!("{}\n{}", table.markdown(), images.markdown());
    println!(
        "{} bytes of fatbins for attention and {} for the rest; the build took {seconds:.0} s (unchanged images are kept)",
        total[0], total[1]
    );
    if let Some((bytes, most)) = total.iter().zip(LARGEST).find(|(bytes, most)| **bytes > *most) {
        bail!("{bytes} bytes of fatbins, at most {most}");
    }
    if !spilled.is_empty() {
        bail!("registers are spilled: {}", spilled.join(", "));
    }
    Ok(())
}

/// Builds the library with the feature and returns the folder of its build script. `lean`: without line tables, as a program gets it
/// that depends on the library; the machine code is the same.
pub(crate) fn build(toolkit: &Toolkit, architectures: &str, lean: bool) -> Result<PathBuf> {
    build_by(toolkit, architectures, lean, &["build", "--release", "-p", "qkv", "--features", "cuda"])
}

/// The same by any of cargo's commands that builds the library with the feature.
pub(crate) fn build_by(toolkit: &Toolkit, architectures: &str, lean: bool, args: &[&str]) -> Result<PathBuf> {
    let mut command = cargo(toolkit, architectures, args);
    if lean {
        command.env("CARGO_PROFILE_RELEASE_DEBUG", "false");
    }
    let root = root().to_string_lossy().into_owned();
    messages(&mut command)?
        .iter()
        .filter(|m| m["reason"] == "build-script-executed")
        .filter(|m| m["package_id"].as_str().is_some_and(|id| id.contains(&format!("{root}#"))))
        .find_map(|m| m["out_dir"].as_str().map(|d| Path::new(d).to_owned()))
        .context("cargo does not say where the kernels were built")
}

/// A program that cargo made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Executable {
    pub(crate) name: String,
    /// `test`, `bench`, `bin`, ..
    pub(crate) kind: String,
    pub(crate) path: PathBuf,
}

/// Builds and returns the programs. Architectures are `given`, else the environment's, else `architectures`.
pub(crate) fn executables(
    toolkit: &Toolkit,
    given: Option<&str>,
    architectures: &str,
    args: &[&str],
) -> Result<Vec<Executable>> {
    let mut command = cargo(toolkit, architectures, args);
    if let Some(given) = given {
        command.env("CUDA_COMPUTE_CAP", given);
    }
    let messages = messages(&mut command)?;
    let artifacts = messages.iter().filter(|m| m["reason"] == "compiler-artifact");
    Ok(artifacts
        .filter_map(|m| {
            let (path, target) = (m["executable"].as_str()?, &m["target"]);
            Some(Executable {
                name: target["name"].as_str()?.into(),
                kind: target["kind"][0].as_str()?.into(),
                path: path.into(),
            })
        })
        .collect())
}

fn cargo(toolkit: &Toolkit, architectures: &str, args: &[&str]) -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(args).arg("--message-format=json-render-diagnostics").current_dir(root());
    toolkit.apply(&mut command, architectures);
    command
}

/// What cargo says while it builds, as JSON.
fn messages(command: &mut Command) -> Result<Vec<Value>> {
    let output =
        command.stdout(Stdio::piped()).stderr(Stdio::inherit()).output().context("cannot start cargo")?;
    if !output.status.success() {
        bail!("the build failed: {}", output.status);
    }
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
}

/// What `nvcc -Xptxas -v` says.
pub(crate) fn parse(text: &str) -> Vec<Usage> {
    let mut all = Vec::new();
    let mut current: Option<Usage> = None;
    let number = |line: &str, before: &str| -> u32 {
        let digits: String = line
            .split(before)
            .next()
            .map(|s| s.trim_end().chars().rev().take_while(char::is_ascii_digit).collect())
            .unwrap_or_default();
        let digits: String = digits.chars().rev().collect();
        if line.contains(before) { digits.parse().unwrap_or(0) } else { 0 }
    };
    for line in text.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let mut names = rest.split('\'');
            let (kernel, architecture) = (names.next(), names.nth(1));
            current = kernel.zip(architecture).map(|(k, a)| Usage {
                kernel: k.into(),
                architecture: a.into(),
                registers: 0,
                stack: 0,
                spills: 0,
                shared: 0,
            });
        } else if let Some(u) = &mut current {
            if line.contains("bytes stack frame") {
                u.stack = number(line, " bytes stack frame");
                u.spills = number(line, " bytes spill stores") + number(line, " bytes spill loads");
            } else if line.contains(" registers") {
                u.registers = number(line, " registers");
                u.shared = number(line, " bytes smem");
                all.extend(current.take());
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_of_ptxas_are_read() {
        let text = "ptxas info    : 0 bytes gmem\n\
            ptxas info    : Compiling entry function 'qkv_a' for 'sm_80'\n\
            ptxas info    : Function properties for qkv_a\n    \
            16 bytes stack frame, 12 bytes spill stores, 28 bytes spill loads\n\
            ptxas info    : Used 80 registers, used 1 barriers, 128 bytes smem, 472 bytes cmem[0]\n\
            ptxas info    : Compiling entry function 'qkv_b' for 'sm_90'\n\
            ptxas info    : Function properties for qkv_b\n    \
            0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Used 32 registers, used 0 barriers\n";
        let usage = |kernel: &str, architecture: &str, [registers, stack, spills, shared]: [u32; 4]| Usage {
            kernel: kernel.into(),
            architecture: architecture.into(),
            registers,
            stack,
            spills,
            shared,
        };
        assert_eq!(
            parse(text),
            [usage("qkv_a", "sm_80", [80, 16, 40, 128]), usage("qkv_b", "sm_90", [32, 0, 0, 0])]
        );
    }
}
