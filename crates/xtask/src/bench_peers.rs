//! `cargo xtask bench-peers`: quantizers of optimum-quanto and HQQ, and llama.cpp's flash attention, timed beside our
//! own on the same shapes, in the same run, on the same cores.

use crate::model;
use crate::table::Table;
use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use qkv::quant::{dequantize, quantize};
use qkv::{Affine, AttendParams, Bits, CacheConfig, Fit, Format, KvCache, TensorMut, TensorRef};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The npm package that carries prebuilt libraries of llama.cpp.
const LLAMA_PACKAGE: &str = "@node-llama-cpp/linux-x64@3.22.1";
/// `[heads, tokens, dim]` of the tensor that is quantized.
const SHAPE: [usize; 3] = [8, 4096, 128];
/// Query heads and tokens of the attention.
const QUERY_HEADS: usize = 32;
const LENGTHS: [usize; 2] = [4096, 16_384];

/// Options of `cargo xtask bench-peers`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// One half only.
    #[arg(long)]
    only: Option<Half>,
    /// Print one JSON object on stdout instead of a table.
    #[arg(long)]
    json: bool,
}

/// The two halves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Half {
    /// Quantizers (optimum-quanto, HQQ).
    Quantize,
    /// Decode attention (llama.cpp).
    Attention,
}

/// One timing.
#[derive(Debug, Clone, PartialEq)]
struct Timing {
    what: String,
    name: String,
    ms: f64,
}

/// A pair of timings that are held against each other.
struct Pair {
    what: &'static str,
    ours: String,
    theirs: String,
    /// How many times faster we want to be.
    goal: f64,
}

/// Runs it.
///
/// # Errors
/// If a package cannot be installed, or a script fails.
pub fn run(args: &BenchArgs) -> Result<()> {
    let mut all = Vec::new();
    let mut pairs = Vec::new();
    if args.only != Some(Half::Attention) {
        let python = quantizer_environment()?;
        let own = own_quantizers()?;
        all.extend(script(&python, &["quantize"])?);
        all.extend(mean(own, own_quantizers()?));
        pairs.extend(quantizer_pairs());
    }
    if args.only != Some(Half::Quantize) {
        let (python, libraries) = attention_environment()?;
        let own = own_attention()?;
        all.extend(script(&python, &["attention", &libraries.to_string_lossy()])?);
        all.extend(mean(own, own_attention()?));
        pairs.extend(attention_pairs());
    }
    let find = |what: &str, name: &str| all.iter().find(|t| t.what == what && t.name == name).map(|t| t.ms);
    let mut table = Table::new(["what", "qkv", "ms", "other", "ms", "times faster", "goal"]);
    let mut rows = Vec::new();
    for p in &pairs {
        let (Some(a), Some(b)) = (find(p.what, &p.ours), find(p.what, &p.theirs)) else { continue };
        let cell = |x: f64| format!("{x:.2}");
        table.row([
            p.what.into(),
            p.ours.clone(),
            cell(a),
            p.theirs.clone(),
            cell(b),
            cell(b / a),
            format!("{:.1}", p.goal),
        ]);
        rows.push(serde_json::json!({
            "what": p.what, "qkv": p.ours, "qkv_ms": a, "other": p.theirs, "other_ms": b, "times_faster": b / a, "goal": p.goal,
        }));
    }
    if rows.is_empty() {
        bail!("nothing could be compared");
    }
    if args.json {
        let timings: Vec<Value> =
            all.iter().map(|t| serde_json::json!({"what": t.what, "name": t.name, "ms": t.ms})).collect();
        println!(
            "{}",
            serde_json::json!({"cores": rayon::current_num_threads(), "rows": rows, "timings": timings})
        );
    } else {
        let mut timings = Table::new(["timing", "name", "ms"]);
        all.iter().for_each(|t| timings.row([t.what.clone(), t.name.clone(), format!("{:.2}", t.ms)]));
        println!("{} cores\n\n{}\n{}", rayon::current_num_threads(), table.markdown(), timings.markdown());
    }
    Ok(())
}

fn quantizer_pairs() -> Vec<Pair> {
    let mut pairs = Vec::new();
    for bits in [4, 2] {
        for (axis, quanto) in [("per token", "0"), ("per channel", "-1")] {
            let ours = format!("int{bits} {axis} g64, min-max");
            let theirs = format!("quanto int{bits} axis {quanto} g64");
            for what in ["quantize", "dequantize"] {
                pairs.push(Pair { what, ours: ours.clone(), theirs: theirs.clone(), goal: 2.0 });
            }
        }
    }
    for bits in [8, 4, 2, 1] {
        // HQQ's axis 1 is per token; its axis 0 has groups that no cache can keep, the nearest are per channel.
        for (axis, hqq) in [("per token", "1"), ("per channel", "0")] {
            let ours = format!("int{bits} {axis} g64, HQQ");
            let theirs = format!("HQQ {bits} bit axis {hqq} g64, solver");
            pairs.push(Pair { what: "quantize", ours: ours.clone(), theirs: theirs.clone(), goal: 10.0 });
            pairs.push(Pair { what: "dequantize", ours, theirs, goal: 1.0 });
        }
    }
    pairs
}

fn attention_pairs() -> Vec<Pair> {
    let mut pairs = Vec::new();
    for tokens in LENGTHS {
        for (ours, theirs) in [
            ("f16", "f16"),
            ("int8 per token", "q8_0"),
            ("4-bit default", "q4_0"),
            ("int4 per token g64", "q4_0"),
        ] {
            let (ours, theirs) =
                (format!("{ours}, {tokens} tokens"), format!("llama.cpp {theirs}, {tokens} tokens"));
            pairs.push(Pair { what: "attend", ours, theirs, goal: 1.0 });
        }
        for ours in ["int8 per token", "4-bit default", "int4 per token g64"] {
            let (ours, theirs) = (format!("{ours}, {tokens} tokens"), format!("f16, {tokens} tokens"));
            pairs.push(Pair { what: "attend", ours, theirs, goal: 1.0 });
        }
    }
    pairs
}

/// Numbers that look like keys: normal, the same in every run.
fn normal(n: usize) -> Vec<f32> {
    let mut state = 0x2545_f491_4f6c_dd1du64;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    // The sum of four uniform numbers is close enough for timing.
    (0..n).map(|_| (uniform() + uniform() + uniform() + uniform() - 2.0) * 1.73).collect()
}

fn own_quantizers() -> Result<Vec<Timing>> {
    let [h, t, d] = SHAPE;
    let x: Vec<half::f16> = normal(h * t * d).into_iter().map(half::f16::from_f32).collect();
    let mut out = vec![half::f16::ZERO; x.len()];
    let view = TensorRef::bhtd(&x[..], [1, h, t, d])?;
    let mut timings = Vec::new();
    let copy = median(|| out.copy_from_slice(&x));
    timings.push(Timing { what: "copy".into(), name: "copy f16, one core".into(), ms: copy });
    for (fit, name) in [(Fit::MinMax, "min-max"), (Fit::HQQ, "HQQ")] {
        for bits in [Bits::B8, Bits::B4, Bits::B2, Bits::B1] {
            for (format, axis) in
                [(Affine::per_token(bits, 64), "per token"), (Affine::per_channel(bits, 64), "per channel")]
            {
                let format = format.with_fit(fit);
                let name = format!("int{} {axis} g64, {name}", bits.get());
                let packed = quantize(&view, &format)?;
                let ms = median(|| drop(quantize(&view, &format)));
                timings.push(Timing { what: "quantize".into(), name: name.clone(), ms });
                let mut to = TensorMut::bhtd(&mut out[..], [1, h, t, d])?;
                let mut result = Ok(());
                let ms = median(|| result = dequantize(&packed, &mut to));
                result?;
                timings.push(Timing { what: "dequantize".into(), name, ms });
            }
        }
    }
    Ok(timings)
}

fn own_attention() -> Result<Vec<Timing>> {
    let (h, d) = (SHAPE[0], SHAPE[2]);
    let int4 = Affine::per_token(Bits::B4, 64);
    let default = CacheConfig::default_formats(Bits::B4, d);
    let int8 = CacheConfig::default_formats(Bits::B8, d);
    let formats: [(&str, (Format, Format)); 4] = [
        ("f16", (Format::F16, Format::F16)),
        ("int8 per token", int8),
        ("4-bit default", default),
        ("int4 per token g64", (int4.into(), int4.into())),
    ];
    let mut timings = Vec::new();
    for tokens in LENGTHS {
        let x = normal(tokens * h * d);
        let q = normal(QUERY_HEADS * d);
        let mut out = vec![0f32; QUERY_HEADS * d];
        for (name, (key, value)) in formats {
            let config = CacheConfig::new(1, h, d).with_key(key).with_value(value).with_capacity(1, tokens);
            let mut cache = KvCache::new(config)?;
            let (loaded, last) = x.split_at((tokens - 1) * h * d);
            let all = TensorRef::thd(loaded, [tokens - 1, h, d])?;
            cache.append(0, &all, &all)?;
            let last = TensorRef::thd(last, [1, h, d])?;
            cache.append(0, &last, &last)?;
            let q = TensorRef::thd(&q[..], [1, QUERY_HEADS, d])?;
            let mut to = TensorMut::thd(&mut out[..], [1, QUERY_HEADS, d])?;
            let mut result = Ok(());
            let ms = median(|| result = cache.attend(0, &q, &AttendParams::new(), &mut to, None));
            result?;
            timings.push(Timing { what: "attend".into(), name: format!("{name}, {tokens} tokens"), ms });
        }
    }
    Ok(timings)
}

/// Median of at least five runs after one to warm up; more for a second.
fn median(mut run: impl FnMut()) -> f64 {
    run();
    let mut times = Vec::new();
    let start = Instant::now();
    while times.len() < 5 || (start.elapsed() < Duration::from_secs(1) && times.len() < 200) {
        let t = Instant::now();
        run();
        times.push(t.elapsed().as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Our own timings are taken before and after the others, so that a machine that slows down does not decide.
fn mean(before: Vec<Timing>, after: Vec<Timing>) -> Vec<Timing> {
    before.into_iter().zip(after).map(|(a, b)| Timing { ms: (a.ms + b.ms) / 2.0, ..a }).collect()
}

fn folder() -> PathBuf {
    model::target().join("peers")
}

/// A virtual environment with the pinned packages.
fn quantizer_environment() -> Result<PathBuf> {
    let python = environment("venv")?;
    let requirements = model::root().join("crates/xtask/peers/requirements.txt");
    eprintln!(
        "installing torch, optimum-quanto and HQQ into {} (about 3 GB to download, 6 GB on disk, once)",
        folder().join("venv").display()
    );
    pip(&python, &["-r", &requirements.to_string_lossy()])?;
    Ok(python)
}

/// A small environment, and the folder of llama.cpp's libraries.
fn attention_environment() -> Result<(PathBuf, PathBuf)> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        bail!("the prebuilt llama.cpp is for Linux on x86-64; use --only quantize");
    }
    let python = environment("venv-attention")?;
    eprintln!("installing numpy (20 MB) and {LLAMA_PACKAGE} (11 MB) into {}", folder().display());
    pip(&python, &["numpy"])?;
    let dir = folder().join("llama");
    let libraries = dir.join("package/bins/linux-x64");
    if !libraries.join("libggml-base.so").is_file() {
        std::fs::create_dir_all(&dir)?;
        let packed = command("npm", &["pack", LLAMA_PACKAGE], &dir)?;
        let archive = packed.lines().last().context("npm pack names no file")?.trim().to_string();
        command("tar", &["xzf", &archive], &dir)?;
    }
    Ok((python, libraries))
}

fn environment(name: &str) -> Result<PathBuf> {
    let dir = folder().join(name);
    let python = dir.join("bin/python");
    if !python.is_file() {
        std::fs::create_dir_all(folder())?;
        command("python3", &["-m", "venv", &dir.to_string_lossy()], &folder())?;
    }
    Ok(python)
}

fn pip(python: &Path, what: &[&str]) -> Result<()> {
    let mut args = vec!["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
    args.extend(what);
    command(&python.to_string_lossy(), &args, &folder()).map(drop)
}

/// Runs a command; stderr goes through, stdout is returned.
fn command(program: &str, args: &[&str], dir: &Path) -> Result<String> {
    let mut command = Command::new(program);
    command.args(args).current_dir(dir).stdout(Stdio::piped());
    // quanto compiles an extension with ninja, which lies beside the environment's python.
    if let (Some(beside), Some(path)) =
        (Path::new(program).parent().filter(|p| p.is_absolute()), std::env::var_os("PATH"))
    {
        let all = [beside.to_path_buf()].into_iter().chain(std::env::split_paths(&path));
        command.env("PATH", std::env::join_paths(all)?);
    }
    let out = command
        .spawn()
        .and_then(|c| c.wait_with_output())
        .with_context(|| format!("cannot run {program}"))?;
    if !out.status.success() {
        bail!("{program} {}: {}", args.join(" "), out.status);
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

fn script(python: &Path, args: &[&str]) -> Result<Vec<Timing>> {
    let path = model::root().join("crates/xtask/peers/bench.py");
    let path = path.to_string_lossy();
    let mut all = vec![&*path];
    all.extend(args);
    let text = command(&python.to_string_lossy(), &all, &folder())?;
    parse(&text)
}

/// Timings from the script's lines; what failed there is said.
fn parse(text: &str) -> Result<Vec<Timing>> {
    let mut timings = Vec::new();
    for line in text.lines().filter(|l| l.starts_with('{')) {
        let json: Value = serde_json::from_str(line).with_context(|| line.to_string())?;
        let text = |key: &str| json[key].as_str().unwrap_or_default().to_string();
        match json["ms"].as_f64() {
            Some(ms) => {
                let tokens = json["tokens"].as_u64().map_or(String::new(), |t| format!(", {t} tokens"));
                timings.push(Timing { what: text("what"), name: text("name") + &tokens, ms });
            }
            None => eprintln!("{} failed: {}", text("name"), text("error")),
        }
    }
    Ok(timings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_script_are_read() {
        let text = "noise\n{\"what\": \"attend\", \"name\": \"llama.cpp q8_0\", \"ms\": 1.5, \"tokens\": 4096}\n\
                    {\"what\": \"error\", \"name\": \"x\", \"ms\": null, \"error\": \"no compiler\"}\n";
        let all = parse(text).unwrap();
        assert_eq!(all.len(), 1);
        assert_eq!((all[0].name.as_str(), all[0].ms), ("llama.cpp q8_0, 4096 tokens", 1.5));
        assert!(attention_pairs().iter().any(|p| p.theirs == all[0].name));
        assert!(parse("{broken").is_err());
    }

    #[test]
    fn every_own_name_in_a_pair_is_timed() {
        // Names only: the timing itself is for the command.
        let bits = [8, 4, 2, 1];
        for p in quantizer_pairs() {
            let known = |fit: &str| {
                bits.iter().any(|b| {
                    ["per token", "per channel"].iter().any(|a| p.ours == format!("int{b} {a} g64, {fit}"))
                })
            };
            assert!(known("min-max") || known("HQQ"), "{}", p.ours);
        }
    }

    #[test]
    fn timed_numbers_are_spread_like_keys() {
        let x = normal(10_000);
        let mean = x.iter().sum::<f32>() / x.len() as f32;
        let square = x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32;
        assert!(mean.abs() < 0.05 && (square - 1.0).abs() < 0.05, "{mean} {square}");
    }
}
