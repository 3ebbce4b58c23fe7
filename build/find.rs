//! Where tools of a CUDA toolkit are looked for, `NVCC` aside: shared by the build script and the project's commands.

use std::env;
use std::path::PathBuf;

/// Variables that name a toolkit's folder.
const HOMES: [&str; 4] = ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CUDA_TOOLKIT_ROOT_DIR"];

/// nvcc of a named toolkit, on `PATH` or in the usual places; else the folders that were looked in.
pub(crate) fn nvcc() -> Result<PathBuf, Vec<PathBuf>> {
    tool("nvcc")
}

/// Any tool, as [`nvcc`].
pub(crate) fn tool(name: &str) -> Result<PathBuf, Vec<PathBuf>> {
    let homes = HOMES.iter().filter_map(env::var_os).filter(|h| !h.is_empty());
    let homes = homes.map(|h| PathBuf::from(h).join("bin"));
    let path = env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/local/cuda/bin", "/opt/cuda/bin", "/usr/lib/cuda/bin"].map(PathBuf::from);
    let name = format!("{name}{}", env::consts::EXE_SUFFIX);
    let mut tried = Vec::new();
    for folder in homes.chain(env::split_paths(&path)).chain(usual) {
        let tool = folder.join(&name);
        if tool.is_file() {
            return Ok(tool);
        }
        if !tried.contains(&folder) {
            tried.push(folder);
        }
    }
    Err(tried)
}
