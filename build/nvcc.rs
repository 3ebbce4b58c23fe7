//! nvcc: finding it, choosing architectures, running it in parallel, keeping what has not changed.

use super::find;
use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs, thread};

/// The oldest toolkit that is supported.
const OLDEST: (u32, u32) = (12, 4);

/// Machine code is made for these where nobody asks for others, as far as the toolkit knows them.
const ARCHITECTURES: [u32; 6] = [80, 86, 89, 90, 100, 120];

/// PTX is added for the lowest architecture: it serves cards that are newer than the toolkit. Where this one is listed, files that
/// convert FP8 have its PTX too, since its instructions for that have no older form; the PTX of all others would be the same again.
const FP8_PTX: u32 = 90;

/// Files that convert FP8, and what the names of others begin with.
const CONVERT_FP8: [&str; 4] = ["append", "attend_e4m3", "fp8", "pages"];
const CONVERT_ANY: &str = "attend_any_";

const VARIABLES: [&str; 10] = [
    "NVCC",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_ROOT",
    "CUDA_TOOLKIT_ROOT_DIR",
    "CUDA_COMPUTE_CAP",
    "NVCC_CCBIN",
    "NVCC_FLAGS",
    "QKV_KERNEL_CACHE",
    "DOCS_RS",
];

type Result<T> = std::result::Result<T, String>;

/// Builds all images and writes `images.rs`, the table of them.
pub(crate) fn run() -> Result<()> {
    for v in VARIABLES {
        println!("cargo:rerun-if-env-changed={v}");
    }
    for folder in ["kernels", "build"] {
        println!("cargo:rerun-if-changed={folder}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set; cargo sets it")?);
    let sources = if env::var_os("DOCS_RS").is_some() { Vec::new() } else { files("kernels", "cu")? };
    if !sources.is_empty() {
        sweep(&out, &sources)?;
        let compiler = Compiler::new()?;
        compiler.build_all(&sources, &out)?;
    }
    let mut table = String::from("&[\n");
    for source in &sources {
        let name = stem(source);
        table += &format!(
            "    Image {{ name: {name:?}, bytes: include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{name}.fatbin\")) }},\n"
        );
    }
    write(&out.join("images.rs"), &(table + "]\n"))
}

/// Removes what was made of sources that are gone.
fn sweep(out: &Path, sources: &[PathBuf]) -> Result<()> {
    for extension in ["fatbin", "ptxas", "key"] {
        for file in files(&out.to_string_lossy(), extension)? {
            if !sources.iter().any(|s| stem(s) == stem(&file)) {
                fs::remove_file(&file).map_err(|e| format!("{}: {e}", file.display()))?;
            }
        }
    }
    Ok(())
}

/// nvcc with everything that its output depends on, sources aside.
struct Compiler {
    nvcc: PathBuf,
    flags: Vec<String>,
    /// Of files that convert FP8.
    fp8_flag: Option<String>,
    environment: Vec<(OsString, OsString)>,
    key: DefaultHasher,
    /// Where images are kept for other profiles and feature sets, which have output folders of their own.
    cache: Option<PathBuf>,
}

impl Compiler {
    fn new() -> Result<Self> {
        let nvcc = find()?;
        let version = version(&nvcc)?;
        if version < OLDEST {
            return Err(format!(
                "{} is of CUDA {}.{}; {}.{} or newer is needed. Set CUDA_HOME or NVCC to another toolkit.",
                nvcc.display(),
                version.0,
                version.1,
                OLDEST.0,
                OLDEST.1
            ));
        }
        // Contraction would change the last bit of what the CPU computes; nothing flushes subnormals to 0.
        let mut flags: Vec<String> =
            ["-fatbin", "-std=c++17", "-O3", "-Ikernels", "-fmad=false", "-Xptxas", "-v"]
                .map(String::from)
                .into();
        // Line tables follow the profile's debug information: they take as much room as code.
        if env::var("DEBUG").is_ok_and(|d| d != "false" && d != "0") {
            flags.push("-lineinfo".into());
        }
        if version >= (12, 9) {
            flags.push("--compress-mode=size".into());
        }
        let (architectures, fp8_flag) = architecture_flags(&nvcc)?;
        flags.extend(architectures);
        flags.extend(env::var("NVCC_FLAGS").unwrap_or_default().split_whitespace().map(String::from));
        let host = host_compiler()?;
        flags.push(format!("-ccbin={}", host.program.display()));
        if host.msvc {
            // The headers of newer toolkits insist on it.
            flags.push("-Xcompiler=/Zc:preprocessor".into());
        }
        let mut key = DefaultHasher::new();
        (version, &flags, &fp8_flag).hash(&mut key);
        let cache = env::var_os("QKV_KERNEL_CACHE").filter(|c| !c.is_empty()).map(PathBuf::from);
        if let Some(folder) = &cache {
            fs::create_dir_all(folder).map_err(|e| format!("QKV_KERNEL_CACHE={}: {e}", folder.display()))?;
        }
        Ok(Self { nvcc, flags, fp8_flag, environment: host.environment, key, cache })
    }

    /// Compiles what has changed, on as many cores as cargo allows.
    fn build_all(&self, sources: &[PathBuf], out: &Path) -> Result<()> {
        let jobs = env::var("NUM_JOBS").ok().and_then(|j| j.parse().ok()).unwrap_or(1usize);
        let next = AtomicUsize::new(0);
        let failed = Mutex::new(None);
        let work = || {
            while let Some(source) = sources.get(next.fetch_add(1, Ordering::Relaxed)) {
                if let Err(problem) = self.build(source, out) {
                    failed.lock().map(|mut f| f.get_or_insert(problem).truncate(20_000)).ok();
                    next.store(sources.len(), Ordering::Relaxed);
                }
            }
        };
        thread::scope(|scope| {
            for _ in 0..jobs.clamp(1, sources.len()) {
                scope.spawn(work);
            }
        });
        match failed.into_inner() {
            Ok(Some(problem)) => Err(problem),
            _ => Ok(()),
        }
    }

    fn build(&self, source: &Path, out: &Path) -> Result<()> {
        let image = out.join(stem(source)).with_extension("fatbin");
        let (stamp, report) = (image.with_extension("key"), image.with_extension("ptxas"));
        let mut key = self.key.clone();
        hash_with_includes(source, &mut Vec::new(), &mut key)?;
        let key = format!("{:016x}", key.finish());
        if image.exists() && report.exists() && fs::read_to_string(&stamp).is_ok_and(|k| k == key) {
            return Ok(());
        }
        let shared = self.cache.as_ref().map(|c| c.join(format!("{}-{key}", stem(source))));
        if let Some(shared) = &shared {
            let there = |extension: &str, to: &Path| fs::copy(shared.with_extension(extension), to).is_ok();
            if there("ptxas", &report) && there("fatbin", &image) {
                return write(&stamp, &key);
            }
        }
        let mut command = Command::new(&self.nvcc);
        let name = stem(source);
        let converts = CONVERT_FP8.contains(&name.as_str()) || name.starts_with(CONVERT_ANY);
        command
            .args(&self.flags)
            .args(self.fp8_flag.iter().filter(|_| converts))
            .arg(source)
            .arg("-o")
            .arg(&image);
        command.envs(self.environment.iter().map(|(k, v)| (k, v)));
        command.stdin(Stdio::null());
        let output = command.output().map_err(|e| format!("{} does not start: {e}", self.nvcc.display()))?;
        let said =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            let unsupported =
                ["unsupported GNU version", "unsupported Microsoft Visual Studio", "unsupported clang"];
            let hint = if unsupported.iter().any(|u| said.contains(u)) {
                "\nThis CUDA does not know the host compiler: set NVCC_CCBIN to an older one, for example g++-13."
            } else {
                ""
            };
            return Err(format!("{}: {command:?}\n{said}{hint}", source.display()));
        }
        // Registers and spills of every kernel, for `cargo xtask kernels` and a test.
        write(&report, &said)?;
        if let Some(shared) = &shared {
            keep(&report, &shared.with_extension("ptxas"))?;
            keep(&image, &shared.with_extension("fatbin"))?;
        }
        write(&stamp, &key)
    }
}

/// Copies a file under its name at once, since another build may look for it.
fn keep(file: &Path, to: &Path) -> Result<()> {
    let part = to.with_extension(format!("part{}", std::process::id()));
    fs::copy(file, &part).and_then(|_| fs::rename(&part, to)).map_err(|e| format!("{}: {e}", to.display()))
}

/// A source and every header of ours that it includes, each once.
fn hash_with_includes(file: &Path, seen: &mut Vec<PathBuf>, key: &mut DefaultHasher) -> Result<()> {
    let file = file.canonicalize().map_err(|e| format!("{}: {e}", file.display()))?;
    if seen.contains(&file) {
        return Ok(());
    }
    let text = read(&file)?;
    text.hash(key);
    seen.push(file.clone());
    for line in String::from_utf8_lossy(&text).lines() {
        let name = line.trim().strip_prefix("#include \"").and_then(|l| l.split('"').next());
        if let (Some(name), Some(folder)) = (name, file.parent()) {
            hash_with_includes(&folder.join(name), seen, key)?;
        }
    }
    Ok(())
}

/// The compiler that nvcc hands host code to.
struct Host {
    program: PathBuf,
    environment: Vec<(OsString, OsString)>,
    msvc: bool,
}

fn host_compiler() -> Result<Host> {
    // `cc` knows CXX, cross prefixes and where cl.exe is; nvcc alone does not.
    let found = cc::Build::new().cpp(true).cargo_metadata(false).try_get_compiler();
    let given = env::var_os("NVCC_CCBIN").map(PathBuf::from);
    match (given, found) {
        (Some(program), Ok(tool)) => {
            Ok(Host { program, environment: owned(&tool), msvc: tool.is_like_msvc() })
        }
        (Some(program), Err(_)) => Ok(Host { program, environment: Vec::new(), msvc: false }),
        (None, Ok(tool)) => {
            Ok(Host { program: tool.path().to_owned(), environment: owned(&tool), msvc: tool.is_like_msvc() })
        }
        (None, Err(e)) => Err(format!(
            "nvcc needs a C++ compiler and none was found ({e}). Install one, or set CXX or NVCC_CCBIN."
        )),
    }
}

fn owned(tool: &cc::Tool) -> Vec<(OsString, OsString)> {
    tool.get_envs().map(|(k, v)| (k.to_owned(), v.to_owned())).collect()
}

fn find() -> Result<PathBuf> {
    if let Some(nvcc) = env::var_os("NVCC").filter(|v| !v.is_empty()) {
        let nvcc = PathBuf::from(nvcc);
        // A bare name is looked for as a shell does.
        let bare = nvcc.components().count() == 1 && !nvcc.is_file();
        let path = env::var_os("PATH").unwrap_or_default();
        let found = if bare {
            let named = |folder: PathBuf| folder.join(&nvcc);
            env::split_paths(&path).map(named).find(|f| f.is_file())
        } else {
            Some(nvcc.clone()).filter(|f| f.is_file())
        };
        return found.ok_or_else(|| {
            format!(
                "NVCC={} is {}. Set it to nvcc itself, with its folder, or unset it: then CUDA_HOME, PATH and the usual \
                 folders are looked in.",
                nvcc.display(),
                if bare { "not on PATH" } else { "no file" }
            )
        });
    }
    let tried = match find::nvcc() {
        Ok(nvcc) => return Ok(nvcc),
        Err(tried) => tried.iter().map(|d| d.display().to_string()).collect::<Vec<_>>(),
    };
    Err(format!(
        "nvcc was not found. Install the CUDA toolkit ({}.{} or newer) and put nvcc on PATH, or set CUDA_HOME or NVCC.\n\
         A GPU is not needed to build. Without the feature `cuda`, qkv builds with its CPU backend only.\n\
         Looked in: {}",
        OLDEST.0,
        OLDEST.1,
        tried.join(", ")
    ))
}

fn version(nvcc: &Path) -> Result<(u32, u32)> {
    let said = ask(nvcc, "--version")?;
    let parse = || {
        let (major, rest) = said.split_once("release ")?.1.split_once('.')?;
        let minor: String = rest.chars().take_while(char::is_ascii_digit).collect();
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    parse().ok_or_else(|| {
        let first = said.lines().next().unwrap_or_default();
        format!(
            "{} is not nvcc: --version names no release, it says \"{first}\". Set NVCC or CUDA_HOME to a CUDA toolkit.",
            nvcc.display()
        )
    })
}

fn architecture_flags(nvcc: &Path) -> Result<(Vec<String>, Option<String>)> {
    let listed = ask(nvcc, "--list-gpu-arch")?;
    let known: Vec<u32> =
        listed.split_whitespace().filter_map(|a| a.strip_prefix("compute_")?.parse().ok()).collect();
    let asked = env::var("CUDA_COMPUTE_CAP").unwrap_or_default();
    let mut wanted = match asked.trim() {
        "" | "all" => ARCHITECTURES.iter().copied().filter(|a| known.contains(a)).collect(),
        list => list
            .split([',', ';', ' '])
            .filter(|a| !a.is_empty())
            .map(|a| {
                let number = a.trim_start_matches("sm_").replace('.', "");
                let number = number.parse().map_err(|_| {
                    format!(
                        "CUDA_COMPUTE_CAP={asked}: {a} is no architecture; give numbers such as 80,90 (no letter behind them), \
                         or all"
                    )
                })?;
                if number < 80 {
                    return Err(format!(
                        "CUDA_COMPUTE_CAP={asked}: the kernels need compute capability 8.0 or more, written 80 or 8.0"
                    ));
                }
                if !known.contains(&number) {
                    return Err(format!(
                        "CUDA_COMPUTE_CAP={asked}: {} does not know {number}, it knows {known:?}",
                        nvcc.display()
                    ));
                }
                Ok(number)
            })
            .collect::<Result<Vec<u32>>>()?,
    };
    wanted.sort_unstable();
    wanted.dedup();
    let lowest = *wanted.first().ok_or_else(|| {
        format!(
            "CUDA_COMPUTE_CAP={asked}: no architecture is left to build for; give numbers such as 80,90. {} knows {known:?}",
            nvcc.display()
        )
    })?;
    let machine = wanted.iter().map(|a| format!("-gencode=arch=compute_{a},code=sm_{a}"));
    let ptx = |a| format!("-gencode=arch=compute_{a},code=compute_{a}");
    let fp8 = (lowest < FP8_PTX && wanted.contains(&FP8_PTX)).then(|| ptx(FP8_PTX));
    Ok((machine.chain([ptx(lowest)]).collect(), fp8))
}

fn ask(nvcc: &Path, question: &str) -> Result<String> {
    let output = Command::new(nvcc)
        .arg(question)
        .output()
        .map_err(|e| format!("{} does not start: {e}", nvcc.display()))?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn files(folder: &str, extension: &str) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).map_err(|e| format!("{folder}: {e}"))?;
    let mut found: Vec<PathBuf> = entries
        .filter_map(|e| e.ok().map(|e| e.path()))
        .filter(|p| p.extension().is_some_and(|e| e == extension))
        .collect();
    found.sort();
    Ok(found)
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(|e| format!("{}: {e}", path.display()))
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()))
}
