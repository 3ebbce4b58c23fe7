//! The machine code of the kernels: out of the fatbins that the build script made, through `nvdisasm`.

use super::listing::{self, Function};
use crate::kernels::{self, Usage};
use crate::model::target;
use anyhow::{Context, Result, bail};
use ptxsim::fatbin::{self, Kind};
use rayon::prelude::*;
use std::fs;
use std::path::Path;
use std::process::Command;

/// A kernel on one architecture.
#[derive(Debug, Clone)]
pub struct Compiled {
    /// 80 for sm_80.
    pub architecture: u32,
    /// Its instructions.
    pub function: Function,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes that ptxas says are written and read by spills.
    pub spills: u32,
}

/// The kernels of all images in a folder whose name begins with one of `prefixes`, sorted by name, then by architecture.
///
/// # Errors
/// If an image or a listing is not understood, or nvdisasm fails.
pub fn read(folder: &Path, prefixes: &[&str], nvdisasm: &Path) -> Result<Vec<Compiled>> {
    let scratch = target().join("qkv-sass");
    fs::create_dir_all(&scratch)?;
    let mut cubins = Vec::new();
    let mut usage = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if path.extension().is_none_or(|e| e != "fatbin") || !prefixes.iter().any(|p| name.starts_with(p)) {
            continue;
        }
        usage.extend(kernels::parse(&fs::read_to_string(path.with_extension("ptxas"))?));
        let image = fs::read(&path)?;
        for e in fatbin::entries(&image).with_context(|| path.display().to_string())? {
            if e.kind == Kind::Elf {
                let file = scratch.join(format!("{name}.sm_{}.cubin", e.target));
                fs::write(&file, e.contents().with_context(|| path.display().to_string())?)?;
                cubins.push((e.target.arch, file));
            }
        }
    }
    if cubins.is_empty() {
        bail!("{} has no machine code of {}", folder.display(), prefixes.join("*, "));
    }
    let listings: Vec<Vec<Compiled>> = cubins
        .par_iter()
        .map(|(architecture, file)| {
            let text = disassemble(nvdisasm, file)?;
            let functions = listing::parse(&text).with_context(|| file.display().to_string())?;
            functions.into_iter().map(|f| compiled(*architecture, f, &usage)).collect()
        })
        .collect::<Result<_>>()?;
    let mut all: Vec<Compiled> = listings.into_iter().flatten().collect();
    all.sort_by(|a, b| (&a.function.name, a.architecture).cmp(&(&b.function.name, b.architecture)));
    Ok(all)
}

fn compiled(architecture: u32, function: Function, usage: &[Usage]) -> Result<Compiled> {
    let target = format!("sm_{architecture}");
    let of = usage.iter().find(|u| {
        u.kernel == function.name
            && u.architecture.trim_end_matches(|c: char| c.is_ascii_lowercase()) == target
    });
    let u = of.with_context(|| format!("ptxas reports nothing of {} on {target}", function.name))?;
    Ok(Compiled { architecture, function, registers: u.registers, spills: u.spills })
}

fn disassemble(nvdisasm: &Path, cubin: &Path) -> Result<String> {
    let output = Command::new(nvdisasm)
        .arg("-c")
        .arg(cubin)
        .output()
        .with_context(|| format!("{} does not start", nvdisasm.display()))?;
    if !output.status.success() {
        bail!("nvdisasm {}: {}", cubin.display(), String::from_utf8_lossy(&output.stderr).trim());
    }
    String::from_utf8(output.stdout).with_context(|| cubin.display().to_string())
}
