//! `cargo xtask test`: everything that has to hold, on a bare machine.

use crate::model;
use crate::quality;
use crate::sass;
use crate::schemes::Scheme;
use crate::table::Table;
use crate::toolkit::Toolkit;
use crate::windows::Windows;
use anyhow::{Context, Result, bail};
use clap::Args;
use qkv_candle::llama::{Gguf, Llama, Weights};
use std::process::Command;
use std::time::{Duration, Instant};

/// Options of `cargo xtask test`.
#[derive(Debug, Args)]
pub struct TestArgs {
    /// Formatting, lints and unit tests only.
    #[arg(long)]
    quick: bool,
}

/// A part: its name, cargo's arguments, and whether `--quick` has it.
type Part = (&'static str, &'static [&'static str], bool);

/// Everything runs in the release profile: the kernels are several times slower with less optimisation, and all parts
/// share their build with this program.
const PARTS: [Part; 6] = [
    ("format", &["fmt", "--all", "--check"], true),
    (
        "lints",
        &[
            "clippy",
            "--release",
            "--workspace",
            "--all-targets",
            "--features",
            "qkv-candle/llama",
            "--",
            "-D",
            "warnings",
        ],
        true,
    ),
    (
        "unit tests",
        &["test", "--release", "--no-fail-fast", "--workspace", "--features", "qkv-candle/llama", "--lib"],
        true,
    ),
    (
        "tests, golden ones too, and examples",
        &[
            "test",
            "--release",
            "--no-fail-fast",
            "--workspace",
            "--features",
            "qkv-candle/llama",
            "--bins",
            // All but those that need the CUDA feature.
            "--test",
            "[!c]*",
            "--test",
            "c[!u]*",
            "--examples",
        ],
        false,
    ),
    (
        "documentation",
        &[
            "doc",
            "--release",
            "--no-deps",
            "-p",
            "qkv",
            "-p",
            "qkv-candle",
            "-p",
            "ptxsim",
            "--features",
            "qkv-candle/llama",
        ],
        false,
    ),
    (
        "documentation's examples",
        &["test", "--release", "--workspace", "--doc", "--features", "qkv-candle/llama"],
        false,
    ),
];

/// Parts that need the CUDA feature. Without a GPU they run on the stand-in for the
/// driver, which checks every access; the last two with newer instructions, and with warps, blocks and streams in another order.
const CUDA_PARTS: [CudaPart; 6] = [
    CudaPart {
        name: "lints, CUDA",
        args: &[
            "clippy",
            "--release",
            "-p",
            "qkv",
            "--features",
            "cuda",
            "--all-targets",
            "--",
            "-D",
            "warnings",
        ],
        variable: None,
        quick: true,
    },
    CudaPart { name: "CUDA", args: &CUDA_TESTS, variable: None, quick: true },
    CudaPart {
        name: "documentation's examples, CUDA",
        args: &["test", "--release", "-p", "qkv", "--features", "cuda", "--doc"],
        variable: None,
        quick: false,
    },
    CudaPart {
        name: "CUDA, compute capability 9.0",
        args: &CUDA_TESTS,
        variable: Some(("PTXSIM_CC", "90")),
        quick: false,
    },
    CudaPart {
        name: "CUDA, shuffled",
        args: &CUDA_TESTS,
        variable: Some(("PTXSIM_OPTIONS", "seed=7,delay=on")),
        quick: false,
    },
    CudaPart {
        name: "documentation, CUDA",
        args: &["doc", "--release", "--no-deps", "-p", "qkv", "--features", "cuda"],
        // As docs.rs builds it: without nvcc. Last, since it replaces the images.
        variable: Some(("DOCS_RS", "1")),
        quick: false,
    },
];

/// A part that needs the CUDA feature.
#[derive(Debug, Clone, Copy)]
struct CudaPart {
    name: &'static str,
    /// cargo's arguments.
    args: &'static [&'static str],
    /// A variable of its environment.
    variable: Option<(&'static str, &'static str)>,
    /// Whether `--quick` has it.
    quick: bool,
}

const CUDA_TESTS: [&str; 8] =
    ["test", "--release", "--no-fail-fast", "-p", "qkv", "--features", "cuda", "--test=cuda*"];

/// Architectures of the tests' kernels: the oldest, and the newest whose PTX adds instructions.
const CUDA_ARCHITECTURES: &str = "80,90";

/// Largest KL divergence a scheme may have on the first window: far above what is measured, far below what a
/// mistake gives.
const LIMITS: [(&str, f64); 5] = [("f16", 1e-5), ("8", 1e-4), ("4", 0.004), ("3", 0.013), ("2", 0.11)];

/// Runs all parts, shows how long each took, and fails if one did.
///
/// # Errors
/// If a part failed: the message names it.
pub fn run(args: &TestArgs) -> Result<()> {
    let mut done: Vec<(&str, Result<()>, Duration)> = Vec::new();
    for (name, cargo_args, quick) in PARTS {
        if args.quick && !quick {
            continue;
        }
        eprintln!("\n== {name}: cargo {}", cargo_args.join(" "));
        let start = Instant::now();
        done.push((name, cargo(cargo_args), start.elapsed()));
    }
    cuda_parts(args.quick, &mut done);
    if !args.quick {
        eprintln!("\n== quality of one window");
        let start = Instant::now();
        done.push(("quality of one window", one_window(), start.elapsed()));
    }
    let mut table = Table::new(["part", "result", "seconds"]);
    for (name, result, time) in &done {
        let said = result.as_ref().map_or_else(|e| format!("{e:#}"), |()| "ok".into());
        table.row([name.to_string(), said, format!("{:.0}", time.as_secs_f64())]);
    }
    println!("\n{}", table.markdown());
    let failed: Vec<&str> = done.iter().filter(|d| d.1.is_err()).map(|d| d.0).collect();
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    Ok(())
}

/// The CUDA parts, after a toolkit was found or installed.
fn cuda_parts(quick: bool, done: &mut Vec<(&'static str, Result<()>, Duration)>) {
    let start = Instant::now();
    let toolkit = match Toolkit::obtain() {
        Ok(t) => {
            done.push(("CUDA toolkit", Ok(()), start.elapsed()));
            t
        }
        Err(e) => return done.push(("CUDA toolkit", Err(e), start.elapsed())),
    };
    for part in CUDA_PARTS.iter().filter(|p| p.quick || !quick) {
        if part.variable == Some(("DOCS_RS", "1")) {
            // Before that part replaces the images, which the tests have built.
            eprintln!("\n== SASS budget: cargo xtask sass");
            let start = Instant::now();
            done.push(("SASS budget", sass::run(&sass::SassArgs::default()), start.elapsed()));
        }
        eprintln!("\n== {}: cargo {}", part.name, part.args.join(" "));
        let start = Instant::now();
        let mut command = command(part.args);
        command.envs(part.variable);
        let result = finish(toolkit.apply(&mut command, CUDA_ARCHITECTURES));
        done.push((part.name, result, start.elapsed()));
    }
}

fn cargo(args: &[&str]) -> Result<()> {
    finish(&mut command(args))
}

fn command(args: &[&str]) -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(args).current_dir(model::root()).env("RUSTDOCFLAGS", "-D warnings");
    command
}

fn finish(command: &mut Command) -> Result<()> {
    let status = command.status().context("cannot start cargo")?;
    if !status.success() {
        bail!("{status}");
    }
    Ok(())
}

/// Measures one window and holds it against the known figures and generous limits.
fn one_window() -> Result<()> {
    let mut gguf = Gguf::open(model::obtain(None)?)?;
    let model = Llama::load(&mut gguf, Weights::F32, |_, _| {})?;
    let head_dim = model.config().key_dim;
    let schemes = LIMITS.iter().map(|l| Scheme::parse(l.0, head_dim)).collect::<Result<Vec<_>>>()?;
    let measured = quality::measure(&model, &Windows::standard(1)?, &schemes, quality::Arithmetic::Library)?;
    quality::check(&measured, 1).result()?;
    for ((name, limit), q) in LIMITS.iter().zip(&measured.schemes) {
        let kl = q.score.mean_kl();
        println!("{name}: KL {kl:.6}, at most {limit}");
        if kl.is_nan() || kl > *limit {
            bail!("scheme {name}: KL {kl} is above {limit}");
        }
    }
    Ok(())
}
