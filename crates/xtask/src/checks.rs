//! `cargo xtask test`: everything that has to hold, on a bare machine.

use crate::kernels;
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

/// A part of the checks: one run of cargo.
#[derive(Debug, Clone, Copy)]
struct Part {
    name: &'static str,
    /// cargo's arguments; `FEATURES` and what follows come behind the first of them.
    args: &'static [&'static str],
    /// A variable of its environment.
    variable: Option<(&'static str, &'static str)>,
    /// Whether `--quick` has it.
    quick: bool,
}

/// All features. Everything runs with them and in the release profile, so that all parts share one build: the kernels of both sides are
/// several times slower with less optimisation.
const FEATURES: [&str; 3] = ["--release", "--features", "qkv-candle/llama,qkv/cuda"];

/// That the library is whole without features is what the build of this program shows, and these lints.
const WITHOUT_FEATURES: [Part; 2] = [
    Part { name: "format", args: &["fmt", "--all", "--check"], variable: None, quick: true },
    Part {
        name: "lints without features",
        args: &["clippy", "--release", "-p", "qkv", "--lib", "--", "-D", "warnings"],
        variable: None,
        quick: true,
    },
];

/// Parts that need a CUDA toolkit, but no GPU: without one the CUDA tests run on the stand-in for the driver, which checks every
/// access; the last two of them with newer instructions, and with warps, blocks and streams in another order.
const PARTS: [Part; 7] = [
    Part {
        name: "lints",
        args: &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"],
        variable: None,
        quick: true,
    },
    Part {
        name: "unit tests",
        args: &["test", "--no-fail-fast", "--workspace", "--lib"],
        variable: None,
        quick: true,
    },
    Part {
        name: "tests, golden ones too, and examples",
        // All but those of CUDA.
        args: &[
            "test",
            "--no-fail-fast",
            "--workspace",
            "--bins",
            "--test",
            "[!c]*",
            "--test",
            "c[!u]*",
            "--examples",
        ],
        variable: None,
        quick: false,
    },
    Part { name: "CUDA", args: &CUDA_TESTS, variable: None, quick: true },
    Part {
        name: "CUDA, compute capability 9.0",
        args: &CUDA_KERNELS,
        variable: Some(("PTXSIM_CC", "90")),
        quick: false,
    },
    Part {
        name: "CUDA, shuffled",
        args: &CUDA_ORDERS,
        variable: Some(("PTXSIM_OPTIONS", "seed=7,delay=on")),
        quick: false,
    },
    Part {
        name: "documentation's examples",
        args: &["test", "--workspace", "--doc"],
        variable: None,
        quick: false,
    },
];

/// As docs.rs builds it: without nvcc. After all that need the images, which it replaces.
const DOCUMENTATION: Part = Part {
    name: "documentation",
    args: &["doc", "--no-deps", "-p", "qkv", "-p", "qkv-candle", "-p", "ptxsim"],
    variable: Some(("DOCS_RS", "1")),
    quick: false,
};

const CUDA_TESTS: [&str; 4] = ["test", "--no-fail-fast", "--workspace", "--test=cuda*"];

/// Those that run every kernel.
const CUDA_KERNELS: [&str; 5] =
    ["test", "--no-fail-fast", "--workspace", "--test=cuda", "--test=cuda_attend"];

/// Those to which the order of warps and streams could matter: all but the golden cases, which are the same kernels again.
const CUDA_ORDERS: [&str; 7] = [
    "test",
    "--no-fail-fast",
    "--workspace",
    "--test=cuda",
    "--test=cuda_attend",
    "--test=cuda_cache",
    "--test=cuda_graph",
];

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
    let mut done = Done::default();
    for part in WITHOUT_FEATURES {
        done.add(part.name, || finish(&mut command(part.args)));
    }
    let mut toolkit = None;
    done.add("CUDA toolkit", || Toolkit::obtain().map(|t| toolkit = Some(t)));
    if let Some(toolkit) = toolkit {
        let with_features = |part: Part, done: &mut Done| {
            if args.quick && !part.quick {
                return;
            }
            let arguments = [&part.args[..1], &FEATURES, &part.args[1..]].concat();
            let mut command = command(&arguments);
            command.envs(part.variable);
            done.add(part.name, || finish(toolkit.apply(&mut command, CUDA_ARCHITECTURES)));
        };
        PARTS.iter().for_each(|part| with_features(*part, &mut done));
        if !args.quick {
            // Of the images that the tests ran.
            let built = ["test", "--no-run", "--workspace", "--test=cuda"];
            let built = [&built[..1], &FEATURES, &built[1..]].concat();
            done.add("SASS budget", || {
                let images = kernels::build_by(&toolkit, CUDA_ARCHITECTURES, false, &built)?;
                sass::run(&sass::SassArgs::of(images))
            });
        }
        with_features(DOCUMENTATION, &mut done);
    }
    if !args.quick {
        done.add("quality of one window", one_window);
    }
    done.report()
}

/// The parts that ran.
#[derive(Default)]
struct Done(Vec<(&'static str, Result<()>, Duration)>);

impl Done {
    fn add(&mut self, name: &'static str, part: impl FnOnce() -> Result<()>) {
        eprintln!("\n== {name}");
        let start = Instant::now();
        let result = part();
        self.0.push((name, result, start.elapsed()));
    }

    fn report(&self) -> Result<()> {
        let mut table = Table::new(["part", "result", "seconds"]);
        for (name, result, time) in &self.0 {
            let said = result.as_ref().map_or_else(|e| format!("{e:#}"), |()| "ok".into());
            table.row([name.to_string(), said, format!("{:.0}", time.as_secs_f64())]);
        }
        println!("\n{}", table.markdown());
        let failed: Vec<&str> = self.0.iter().filter(|d| d.1.is_err()).map(|d| d.0).collect();
        if !failed.is_empty() {
            bail!("failed: {}", failed.join(", "));
        }
        Ok(())
    }
}

fn command(args: &[&str]) -> Command {
    eprintln!("cargo {}", args.join(" "));
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
