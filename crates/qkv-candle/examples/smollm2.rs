//! A Llama-architecture GGUF model that generates text from a quantized cache.
//!
//! ```sh
//! cargo xtask demo        # fetches the model once
//! cargo run --release -p qkv-candle --features llama --example smollm2 -- \
//!     --model target/qkv-data/SmolLM2-135M-Instruct.Q4_1.gguf --prompt 'What is the capital of France?' --bits 4
//! ```

use anyhow::{Result, anyhow, bail};
use clap::Parser;
use qkv::{Bits, CacheConfig};
use qkv_candle::Cache;
use qkv_candle::llama::{
    Exact, Gguf, Llama, LlamaTokenizer, Sampling, Weights, format_name, generate, parse_format,
};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Generates text from a quantized key/value cache.
#[derive(Debug, Parser)]
struct Args {
    /// GGUF file of the Llama architecture.
    #[arg(long)]
    model: PathBuf,
    /// What the model is asked, or continues with --raw.
    #[arg(long)]
    prompt: String,
    /// Continue the prompt as it is, without chat markup.
    #[arg(long)]
    raw: bool,
    /// Tokens to generate at most.
    #[arg(long, default_value_t = 128)]
    tokens: usize,
    /// Bits of keys and values in the recommended formats (1, 2, 3, 4, 8; 16 = f16; 32 = exact, no cache).
    #[arg(long, default_value_t = 4, conflicts_with_all = ["key", "value"])]
    bits: usize,
    /// Key format, for example f16, int4-c64 (groups of 64 tokens of a channel), int2-t32-hqq, e4m3.
    #[arg(long, requires = "value")]
    key: Option<String>,
    /// Value format, for example int4-t64 (groups of 64 channels of a token).
    #[arg(long, requires = "key")]
    value: Option<String>,
    /// Newest tokens kept exact (0 to 192 in steps of 32).
    #[arg(long, default_value_t = 64)]
    residual: usize,
    /// First tokens kept exact.
    #[arg(long, default_value_t = 4)]
    sinks: usize,
    /// 0 = always the most likely token.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Sample among the most likely tokens only; 0 = all.
    #[arg(long, default_value_t = 0)]
    top_k: usize,
    /// Sample among the tokens that together have this probability; 1 = all.
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// The same seed gives the same text.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Dequantize the weights to f32 once: slower, closer to the trained model.
    #[arg(long)]
    f32_weights: bool,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    let mut gguf = Gguf::open(&args.model)?;
    let tokenizer = LlamaTokenizer::new(&gguf)?;
    let prompt =
        if args.raw { tokenizer.encode(&args.prompt)? } else { tokenizer.encode_chat(&args.prompt)? };
    let weights = if args.f32_weights { Weights::F32 } else { Weights::Quantized };
    let model = Llama::load(&mut gguf, weights, |i, n| {
        eprint!("\rloading layer {i} of {n}{}", if i == n { "\n" } else { "" });
    })?;
    let sampling = Sampling::with_temperature(args.temperature, args.seed).limited(args.top_k, args.top_p);
    let print = |piece: &str| {
        print!("{piece}");
        // Nothing is lost if the reader has gone away.
        let _ = std::io::stdout().flush();
    };
    let room = prompt.len() + args.tokens;
    let (done, held) = match config(args, model.cache_config(room))? {
        None => {
            let mut exact = Exact::new(model.config().layers);
            (
                generate(&model, &tokenizer, &mut exact, &prompt, args.tokens, sampling, print)?,
                "exact f32".into(),
            )
        }
        Some(config) => {
            let layer = &config.layers[0];
            let names = format!("keys {}, values {}", format_name(&layer.key), format_name(&layer.value));
            let mut cache = Cache::new(config)?;
            let done = generate(&model, &tokenizer, &mut cache, &prompt, args.tokens, sampling, print)?;
            let (tokens, bytes) = (cache.current_seq_len()?, cache.bytes_used()?);
            let per = bytes as f64 / tokens.max(1) as f64;
            (
                done,
                format!("{names}: {bytes} bytes for {tokens} tokens ({per:.0} a token, exact ones included)"),
            )
        }
    };
    println!();
    eprintln!(
        "prompt {} tokens in {:.2} s; {} tokens at {:.1} tokens/s; cache {held}",
        done.prompt_tokens,
        done.prefill.as_secs_f64(),
        done.ids.len(),
        done.tokens_per_second()
    );
    Ok(())
}

/// The cache that was asked for; `None` = exact attention without one.
fn config(args: &Args, base: CacheConfig) -> Result<Option<CacheConfig>> {
    let base = base.with_residual(Some(args.residual)).with_sinks(args.sinks);
    let config = match (&args.key, &args.value) {
        (Some(k), Some(v)) => {
            let format = |name: &str| parse_format(name).map_err(|e| anyhow!(e));
            let config = base.with_key(format(k)?).with_value(format(v)?);
            if config.layers.iter().any(|l| l.key.needs_scale() || l.value.needs_scale()) {
                bail!("static FP8 scales come with a checkpoint and this file has none; use e4m3 or e5m2")
            }
            config
        }
        _ => match args.bits {
            32 => return Ok(None),
            16 => base.with_key(qkv::Format::F16).with_value(qkv::Format::F16),
            bits => base.with_bits(Bits::new(bits)?),
        },
    };
    config.validate()?;
    Ok(Some(config))
}
