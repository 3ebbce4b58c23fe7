//! `ptxsim info`

use super::image::{File, read};
use super::names::{parameter_type, readable};
use ptxsim::memory::GlobalMemory;
use ptxsim::options::Options;
use ptxsim::program::{Image, LoadError};
use ptxsim::ptx::ast::Function;
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;

#[derive(Serialize)]
struct Info {
    target: String,
    version: String,
    card: &'static str,
    kernels: Vec<KernelInfo>,
    /// Global and constant variables: name, state space, bytes.
    variables: Vec<VariableInfo>,
}

#[derive(Serialize)]
struct KernelInfo {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    readable: Option<String>,
    parameters: Vec<ParameterInfo>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sizes: Option<Sizes>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_threads: Option<[u32; 3]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cluster: Option<[u32; 3]>,
    instructions: usize,
    /// What ptxsim cannot run.
    unsupported: Vec<String>,
}

#[derive(Serialize)]
struct ParameterInfo {
    name: String,
    #[serde(rename = "type")]
    ty: String,
    offset: u64,
    bytes: u64,
}

/// What is known of a kernel that can be loaded.
#[derive(Serialize)]
struct Sizes {
    shared_bytes: u32,
    local_bytes: u32,
    registers: u32,
    /// No cubin said it.
    registers_estimated: bool,
}

#[derive(Serialize)]
struct VariableInfo {
    name: String,
    space: String,
    bytes: u64,
}

/// Prints what a file holds.
pub(crate) fn info(path: &Path, cc: Option<&str>, json: bool) -> Result<(), String> {
    let file = read(path, cc)?;
    let memory = GlobalMemory::new(file.card.memory_bytes);
    let image = Image::load(Arc::clone(&file.module), &memory)?;
    let kernels = file.module.functions.iter().filter(|f| f.kernel && !f.declaration);
    let module = &file.module;
    let info = Info {
        target: format!("sm_{}", module.target),
        version: format!("{}.{}", module.version.0, module.version.1),
        card: file.card.name,
        kernels: kernels.map(|f| kernel(f, &file, &image)).collect(),
        variables: module
            .variables
            .iter()
            .filter(|v| !v.external)
            .map(|v| VariableInfo {
                name: v.name.clone(),
                space: format!("{:?}", v.space).to_lowercase(),
                bytes: v.bytes,
            })
            .collect(),
    };
    if json {
        println!("{}", serde_json::to_string_pretty(&info).map_err(|e| e.to_string())?);
    } else {
        print!("{}", text(&info));
    }
    Ok(())
}

fn kernel(function: &Function, file: &File, image: &Image) -> KernelInfo {
    let parameters = function.params.iter().zip(function.param_offsets());
    let parameters = parameters.map(|(p, (offset, bytes))| ParameterInfo {
        name: p.name.clone(),
        ty: parameter_type(p),
        offset,
        bytes,
    });
    let (sizes, unsupported) = match image.kernel(&function.name, file.card, &Options::default()) {
        Ok(kernel) => {
            let known = file.registers.get(&function.name).copied();
            let sizes = Sizes {
                shared_bytes: kernel.shared_bytes,
                local_bytes: kernel.local_bytes,
                registers: known.unwrap_or(kernel.estimated_registers),
                registers_estimated: known.is_none(),
            };
            (Some(sizes), Vec::new())
        }
        Err(LoadError::Unsupported(all)) => (None, all),
        Err(LoadError::NotFound(name)) => (None, vec![format!("{name} was not found")]),
    };
    let limits = function.limits;
    KernelInfo {
        name: function.name.clone(),
        readable: readable(&function.name),
        parameters: parameters.collect(),
        sizes,
        max_threads: limits.required_threads.or(limits.max_threads),
        cluster: limits.cluster,
        instructions: function.body.len(),
        unsupported,
    }
}

fn text(info: &Info) -> String {
    use std::fmt::Write;
    let mut out = String::new();
    // writing to a string does not fail
    let _ = writeln!(out, "PTX {} for {}, on {}", info.version, info.target, info.card);
    for k in &info.kernels {
        let readable = k.readable.as_ref().map_or(String::new(), |r| format!("  ({r})"));
        let _ = writeln!(out, "\nkernel {}{readable}", k.name);
        for (i, p) in k.parameters.iter().enumerate() {
            let _ =
                writeln!(out, "  {i:>3}  {:<10} at {:>4}, {:>4} bytes  {}", p.ty, p.offset, p.bytes, p.name);
        }
        if let Some(s) = &k.sizes {
            let estimated = if s.registers_estimated { " (estimated)" } else { "" };
            let _ = writeln!(
                out,
                "  {} instructions, {} registers{estimated}, {} bytes of shared and {} of local memory",
                k.instructions, s.registers, s.shared_bytes, s.local_bytes
            );
        }
        if let Some([x, y, z]) = k.max_threads {
            let _ = writeln!(out, "  blocks of at most {x} x {y} x {z} threads");
        }
        if let Some([x, y, z]) = k.cluster {
            let _ = writeln!(out, "  clusters of {x} x {y} x {z} blocks");
        }
        for what in &k.unsupported {
            let _ = writeln!(out, "  cannot run: {what}");
        }
    }
    if !info.variables.is_empty() {
        let _ = writeln!(out, "\nvariables");
    }
    for v in &info.variables {
        let _ = writeln!(out, "  {:<7} {:>8} bytes  {}", v.space, v.bytes, v.name);
    }
    out
}
