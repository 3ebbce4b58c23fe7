//! `cargo xtask gpu`: tests and benchmarks of the CUDA kernels as a folder that runs where there is only a driver.

use crate::kernels::{self, Executable};
use crate::model::{root, target};
use crate::toolkit::Toolkit;
use anyhow::{Context, Result, bail};
use clap::Args;
use std::fmt::Write;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Options of `cargo xtask gpu`.
#[derive(Debug, Args)]
pub struct GpuArgs {
    /// Where the folder is made; what is in it is replaced. `target/qkv-gpu` by default.
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// Architectures, such as 80,90 (the default) or all. PTX for newer cards is always added.
    #[arg(long, value_name = "LIST")]
    arch: Option<String>,
}

/// Built for these where nobody asks for others.
const ARCHITECTURES: &str = "80,90";

/// Seconds that the script may take: eight minutes, less what ends late.
const TOTAL: u32 = 465;

/// A part of the script.
#[derive(Debug, Clone, Copy)]
struct Part {
    name: &'static str,
    /// Seconds at most.
    limit: u32,
    /// Whether `--quick` leaves it out.
    slow: bool,
    /// A test binary, or `bench`.
    program: &'static str,
    /// Its arguments, as the shell reads them.
    arguments: &'static str,
}

const fn test(name: &'static str, limit: u32, slow: bool) -> Part {
    Part { name, limit, slow, program: name, arguments: "" }
}

/// What runs, in this order. What everything else relies on comes first.
const PARTS: [Part; 10] = [
    Part { name: "driver", limit: 30, slow: false, program: "bench", arguments: "--device" },
    Part { name: "anchors", limit: 20, slow: false, program: "cuda", arguments: "anchors::" },
    // What the compiler reported is no matter of the GPU, and lies in the build folder.
    Part {
        name: "cuda",
        limit: 60,
        slow: false,
        program: "cuda",
        arguments: "--skip anchors:: --skip resources::",
    },
    test("cuda_attend", 100, false),
    test("cuda_cache", 45, false),
    test("cuda_graph", 30, false),
    test("cuda_devices", 10, false),
    test("cuda_memory", 10, false),
    test("cuda_golden", 60, true),
    Part { name: "bench", limit: 90, slow: false, program: "bench", arguments: "$smoke ${quick:+--quick}" },
];

/// Builds, and makes the folder.
///
/// # Errors
/// If the build fails, a test binary has no part in the script, or the folder cannot be written.
pub fn run(args: &GpuArgs) -> Result<()> {
    let toolkit = Toolkit::obtain()?;
    let out = args.out.clone().unwrap_or_else(|| target().join("qkv-gpu"));
    let architectures = match (&args.arch, std::env::var("CUDA_COMPUTE_CAP")) {
        (Some(list), _) => list.clone(),
        (None, Ok(list)) if !list.is_empty() => list,
        _ => ARCHITECTURES.into(),
    };
    // With the features of `cargo xtask test`, so that both share a build.
    let build = [
        "test",
        "--no-run",
        "--release",
        "--features",
        "qkv-candle/llama,qkv/cuda",
        "--workspace",
        "--test=cuda*",
        "--bench=cuda",
    ];
    let built = kernels::executables(&toolkit, Some(&architectures), ARCHITECTURES, &build)?;
    let programs = programs(&built)?;
    if out.join("run.sh").is_file() {
        fs::remove_dir_all(&out).with_context(|| out.display().to_string())?;
    } else if out.is_dir() && fs::read_dir(&out)?.next().is_some() {
        bail!("{} has other things in it than what this command made; name an empty folder", out.display());
    }
    let (bin, golden) = (out.join("bin"), out.join("golden"));
    for folder in [&bin, &golden] {
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    for (name, path) in &programs {
        let to = bin.join(name);
        fs::copy(path, &to).with_context(|| to.display().to_string())?;
        strip(&to);
    }
    for entry in fs::read_dir(root().join("tests/data/golden"))? {
        let from = entry?.path();
        let to = golden.join(from.file_name().unwrap_or_default());
        fs::copy(&from, &to).with_context(|| to.display().to_string())?;
    }
    let path = out.join("run.sh");
    fs::write(&path, script(&architectures)).with_context(|| path.display().to_string())?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    println!(
        "{}: {:.0} MB, for compute capability {architectures}. Copy the folder to a machine with an NVIDIA driver and run ./run.sh \
         there: less than eight minutes, the table last.",
        out.display(),
        size(&out)? as f64 / 1e6
    );
    Ok(())
}

/// Names that binaries have in the folder. Every test of the GPU must be in a part.
fn programs(built: &[Executable]) -> Result<Vec<(String, PathBuf)>> {
    let name = |e: &Executable| if e.kind == "bench" { "bench".to_string() } else { e.name.clone() };
    let all: Vec<(String, PathBuf)> = built.iter().map(|e| (name(e), e.path.clone())).collect();
    for (name, _) in &all {
        if !PARTS.iter().any(|p| p.program == name) {
            bail!("{name} was built, but has no part in crates/xtask/src/gpu.rs");
        }
    }
    for part in PARTS {
        if !all.iter().any(|(name, _)| name == part.program) {
            bail!("cargo built no {}, which the part {} runs", part.program, part.name);
        }
    }
    Ok(all)
}

fn script(architectures: &str) -> String {
    let mut parts = String::new();
    for p in PARTS {
        let when = if p.slow { "slow" } else { "always" };
        let line = format!("part {} {} {when} bin/{} {}", p.name, p.limit, p.program, p.arguments);
        let _ = writeln!(parts, "{}", line.trim_end());
    }
    include_str!("gpu/run.sh")
        .replace("@TOTAL@", &TOTAL.to_string())
        .replace("@VERSION@", &version())
        .replace("@ARCHITECTURES@", architectures)
        .replace("@PARTS@\n", &parts)
}

/// The library's version, and the commit where git knows it.
fn version() -> String {
    let version = env!("CARGO_PKG_VERSION");
    let git = Command::new("git").args(["describe", "--always", "--dirty"]).current_dir(root()).output();
    let commit = git.ok().filter(|o| o.status.success());
    let commit = commit.map(|o| String::from_utf8_lossy(&o.stdout).trim().to_string());
    commit.map_or_else(|| version.into(), |c| format!("commit {c}"))
}

/// Debug information is most of a binary, and nobody reads it there.
fn strip(file: &Path) {
    let done = Command::new("strip").arg("--strip-debug").arg(file).status();
    if !done.is_ok_and(|s| s.success()) {
        eprintln!("{} keeps its debug information: strip (binutils) did not run", file.display());
    }
}

/// Bytes of all files of a folder.
fn size(folder: &Path) -> Result<u64> {
    let mut sum = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let about = entry.metadata()?;
        sum += if about.is_dir() { size(&entry.path())? } else { about.len() };
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_ends_within_eight_minutes() {
        // A killed part takes two seconds more.
        let late = 2 * PARTS.len() as u32;
        assert!(PARTS.iter().map(|p| p.limit).sum::<u32>() <= TOTAL);
        assert!(TOTAL + 2 < 480 && late < 30, "{TOTAL}");
    }

    #[test]
    fn the_script_has_every_part_and_no_place_left() {
        let text = script("80,90");
        assert!(!text.contains('@') || !text.contains("@PARTS"), "{text}");
        for part in PARTS {
            assert!(text.contains(&format!("\npart {} {} ", part.name, part.limit)), "{text}");
        }
        let first = text.find("\npart anchors").unwrap();
        assert!(first < text.find("\npart cuda ").unwrap());
        let checked = Command::new("bash").arg("-n").arg("-c").arg(&text).status().unwrap();
        assert!(checked.success());
    }

    #[test]
    fn every_cuda_test_has_a_part() {
        let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
        let names = manifest.split("[[test]]").skip(1).filter_map(|t| t.split('"').nth(1));
        for name in names.filter(|n| n.starts_with("cuda")) {
            assert!(PARTS.iter().any(|p| p.program == name), "{name}");
        }
    }
}
