//! A CUDA toolkit for builds: the machine's own, or the compiler's wheels from PyPI under `target/`.

#[path = "../../../build/find.rs"]
mod find;

use crate::model::{root, target};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The compiler without the rest of a toolkit: 105 MB. Pinned to the series whose binaries load on driver 580 and newer.
const WHEELS: [&str; 5] = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
];

/// The disassembler, which has no release of that series on PyPI; it reads older ones' machine code.
const NVDISASM: &str = "nvidia-cuda-nvdisasm==13.2.51";

/// What a build with the feature `cuda` is told by the environment.
#[derive(Debug, Clone)]
pub struct Toolkit {
    /// `CUDA_HOME`, where nvcc is not to be found by itself.
    home: Option<PathBuf>,
}

impl Toolkit {
    /// Finds nvcc where the build script looks, or installs it.
    ///
    /// # Errors
    /// If there is none and pip cannot fetch it: the message says what to install or set.
    pub fn obtain() -> Result<Self> {
        if on_the_machine() {
            return Ok(Self { home: None });
        }
        let folder = target().join("qkv-cuda");
        let home = folder.join("nvidia/cu13");
        if !home.join("bin/nvcc").is_file() {
            install(&folder, "nvcc", "NVIDIA's compiler (about 105 MB)", &WHEELS)?;
        }
        if !home.join("bin/nvcc").is_file() {
            bail!("{} has no nvcc after the installation; remove the folder and try again", home.display());
        }
        Ok(Self { home: Some(home) })
    }

    /// Puts the toolkit into the environment of a command. Architectures that the caller did not choose are `architectures`; `all` of them
    /// were chosen by an option.
    pub fn apply<'a>(&self, command: &'a mut Command, architectures: &str) -> &'a mut Command {
        if let Some(home) = &self.home {
            command.env("CUDA_HOME", home);
        }
        if architectures == "all" || std::env::var_os("CUDA_COMPUTE_CAP").is_none() {
            command.env("CUDA_COMPUTE_CAP", architectures);
        }
        if std::env::var_os("QKV_KERNEL_CACHE").is_none() {
            // Profiles and feature sets build in folders of their own; the images are the same.
            command.env("QKV_KERNEL_CACHE", target().join("qkv-kernels"));
        }
        command
    }
}

/// Finds nvdisasm where nvcc is looked for, or installs it.
///
/// # Errors
/// If there is none and pip cannot fetch it: the message says what to install or set.
pub fn nvdisasm() -> Result<PathBuf> {
    if let Ok(found) = find::tool("nvdisasm") {
        return Ok(found);
    }
    // A folder of its own: pip does not add to one that is there.
    let folder = target().join("qkv-nvdisasm");
    let tool = folder.join("nvidia/cu13/bin/nvdisasm");
    if !tool.is_file() {
        install(&folder, "nvdisasm", "NVIDIA's disassembler (about 4 MB)", &[NVDISASM])?;
    }
    if !tool.is_file() {
        bail!("{} is not there after the installation; remove the folder and try again", tool.display());
    }
    Ok(tool)
}

fn on_the_machine() -> bool {
    std::env::var_os("NVCC").is_some_and(|n| Path::new(&n).is_file()) || find::nvcc().is_ok()
}

/// Installs wheels into a folder.
fn install(folder: &Path, tool: &str, what: &str, wheels: &[&str]) -> Result<()> {
    eprintln!("no {tool} on this machine: installing {what} into {}", folder.display());
    let mut command = Command::new("python3");
    command
        .args([
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--retries",
            "5",
            "--disable-pip-version-check",
            "--target",
        ])
        .arg(folder)
        .args(wheels)
        .current_dir(root());
    let how = format!(
        "install the CUDA toolkit and set CUDA_HOME, or run this with network access: python3 -m pip install --no-deps \
         --target {} {}",
        folder.display(),
        wheels.join(" ")
    );
    let status = command.status().with_context(|| format!("python3 does not start; {how}"))?;
    if !status.success() {
        bail!("pip could not fetch {tool} ({status}); {how}");
    }
    Ok(())
}
