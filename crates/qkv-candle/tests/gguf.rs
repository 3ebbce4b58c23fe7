//! GGUF files: a tiny model written here, then cut, changed and run.
#![cfg(feature = "llama")]

use candle_core::quantized::gguf_file::{Value, write};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use qkv_candle::Cache;
use qkv_candle::llama::{Exact, Gguf, Llama, LlamaError, LlamaTokenizer, Sampling, Weights, generate};
use std::path::{Path, PathBuf};

const EMBEDDING: usize = 64;
const HEADS: usize = 4;
const KV: usize = 2;
const DIM: usize = 16;
const HIDDEN: usize = 96;
const VOCAB: usize = 259;

/// A file that is removed at the end of a test.
struct Temporary(PathBuf);

impl Temporary {
    fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("qkv-{}-{name}.gguf", std::process::id())))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn text(s: &str) -> Value {
    Value::String(s.into())
}

/// The byte alphabet of GPT-2: every byte as one printable character.
fn bytes() -> Vec<Value> {
    let printable = |b: u32| (33..127).contains(&b) || (161..173).contains(&b) || (174..256).contains(&b);
    let mut next = 256;
    let mut all = Vec::new();
    for b in 0..256u32 {
        let c = if printable(b) { b } else { next };
        next += !printable(b) as u32;
        all.push(text(&char::from_u32(c).unwrap().to_string()));
    }
    all.extend(["<|im_start|>", "<|im_end|>", "<|endoftext|>"].map(text));
    all
}

fn metadata() -> Vec<(String, Value)> {
    let n = |x: usize| Value::U32(x as u32);
    let kinds: Vec<Value> = (0..VOCAB).map(|i| Value::I32(if i < 256 { 1 } else { 3 })).collect();
    [
        ("general.architecture", text("llama")),
        ("llama.block_count", n(2)),
        ("llama.embedding_length", n(EMBEDDING)),
        ("llama.feed_forward_length", n(HIDDEN)),
        ("llama.attention.head_count", n(HEADS)),
        ("llama.attention.head_count_kv", n(KV)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ("llama.rope.freq_base", Value::F32(10_000.0)),
        ("llama.context_length", n(512)),
        ("tokenizer.ggml.model", text("gpt2")),
        ("tokenizer.ggml.pre", text("smollm")),
        ("tokenizer.ggml.tokens", Value::Array(bytes())),
        ("tokenizer.ggml.token_type", Value::Array(kinds)),
        ("tokenizer.ggml.merges", Value::Array(vec![])),
        ("tokenizer.ggml.eos_token_id", n(257)),
    ]
    .map(|(k, v)| (k.to_string(), v))
    .into()
}

fn weights(own_head: bool) -> Vec<(String, QTensor)> {
    let random = |rows: usize, cols: usize, dtype| {
        // Fixed numbers, so that a failure repeats.
        let x: Vec<f32> = (0..rows * cols)
            .map(|i| ((i as f32 * 12.9898 + rows as f32).sin() * 43_758.547).fract() * 0.4)
            .collect();
        QTensor::quantize(&Tensor::from_vec(x, (rows, cols), &Device::Cpu).unwrap(), dtype).unwrap()
    };
    let ones = |n: usize| {
        QTensor::quantize(&Tensor::ones(n, candle_core::DType::F32, &Device::Cpu).unwrap(), GgmlDType::F32)
    };
    let mut all = vec![("token_embd.weight".to_string(), random(VOCAB, EMBEDDING, GgmlDType::Q8_0))];
    for i in 0..2 {
        let mut add = |name: &str, t: QTensor| all.push((format!("blk.{i}.{name}.weight"), t));
        add("attn_norm", ones(EMBEDDING).unwrap());
        add("ffn_norm", ones(EMBEDDING).unwrap());
        for (name, rows, cols) in [
            ("attn_q", HEADS * DIM, EMBEDDING),
            ("attn_k", KV * DIM, EMBEDDING),
            ("attn_v", KV * DIM, EMBEDDING),
            ("attn_output", EMBEDDING, HEADS * DIM),
            ("ffn_gate", HIDDEN, EMBEDDING),
            ("ffn_up", HIDDEN, EMBEDDING),
            ("ffn_down", EMBEDDING, HIDDEN),
        ] {
            add(name, random(rows, cols, GgmlDType::Q8_0));
        }
    }
    all.push(("output_norm.weight".into(), ones(EMBEDDING).unwrap()));
    if own_head {
        all.push(("output.weight".into(), random(VOCAB, EMBEDDING, GgmlDType::F32)));
    }
    all
}

fn save(path: &Path, metadata: &[(String, Value)], weights: &[(String, QTensor)]) {
    let mut file = std::fs::File::create(path).unwrap();
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(k, v)| (k.as_str(), v)).collect();
    let weights: Vec<(&str, &QTensor)> = weights.iter().map(|(k, v)| (k.as_str(), v)).collect();
    write(&mut file, &metadata, &weights).unwrap();
}

fn with(key: &str, value: Value) -> Vec<(String, Value)> {
    let mut all = metadata();
    all.retain(|(k, _)| k != key);
    all.push((key.into(), value));
    all
}

#[test]
fn a_model_runs_exactly_and_through_the_cache() {
    for own_head in [false, true] {
        let file = Temporary::new(&format!("runs-{own_head}"));
        save(&file.0, &metadata(), &weights(own_head));
        let mut gguf = Gguf::open(&file.0).unwrap();
        let config = gguf.config().unwrap();
        assert_eq!((config.layers, config.kv_heads, config.key_dim, config.vocab), (2, KV, DIM, VOCAB));
        let tokenizer = LlamaTokenizer::new(&gguf).unwrap();
        let mut loaded = 0;
        let model = Llama::load(&mut gguf, Weights::F32, |_, _| loaded += 1).unwrap();
        assert_eq!(loaded, 2);
        let prompt = tokenizer.encode_chat("two words, 12 é").unwrap();
        assert_eq!(prompt[0], 256);
        assert_eq!(
            tokenizer.decode(&tokenizer.encode("two words, 12 é").unwrap()).unwrap(),
            "two words, 12 é"
        );

        let mut exact = Exact::new(2);
        let mut streamed = String::new();
        let a = generate(&model, &tokenizer, &mut exact, &prompt, 40, Sampling::greedy(), |s| streamed += s)
            .unwrap();
        assert_eq!(streamed, a.text);
        let f32 = model.cache_config(128).with_window_dtype(qkv::Dtype::F32);
        let mut cache = Cache::new(f32.with_key(qkv::Format::F16).with_value(qkv::Format::F16)).unwrap();
        let b = generate(&model, &tokenizer, &mut cache, &prompt, 40, Sampling::greedy(), |_| {}).unwrap();
        assert_eq!(a.ids, b.ids);

        // Seeds repeat, and differ.
        let draw = |seed| {
            let sampling = Sampling::with_temperature(1.0, seed);
            generate(&model, &tokenizer, &mut Exact::new(2), &prompt, 20, sampling, |_| {}).unwrap().ids
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));

        assert!(matches!(tokenizer.encode(""), Err(LlamaError::EmptyPrompt)));
        assert!(matches!(tokenizer.encode_chat(" \n"), Err(LlamaError::EmptyPrompt)));
        let none = generate(&model, &tokenizer, &mut Exact::new(2), &[], 4, Sampling::greedy(), |_| {});
        assert!(matches!(none, Err(LlamaError::EmptyPrompt)));
        let far = model.next_logits(&[VOCAB as u32], &mut Exact::new(2));
        assert!(matches!(far, Err(LlamaError::Token { .. })));
    }
}

#[test]
fn weights_in_the_file_and_in_f32_agree() {
    let file = Temporary::new("agree");
    save(&file.0, &metadata(), &weights(false));
    let load = |w| Llama::load(&mut Gguf::open(&file.0).unwrap(), w, |_, _| {}).unwrap();
    let ids = [1, 2, 3, 4];
    let a = load(Weights::F32).next_logits(&ids, &mut Exact::new(2)).unwrap();
    let b = load(Weights::Quantized).next_logits(&ids, &mut Exact::new(2)).unwrap();
    let scale = a.iter().fold(0f32, |m, x| m.max(x.abs()));
    let difference = a.iter().zip(&b).fold(0f32, |m, (x, y)| m.max((x - y).abs()));
    assert!(difference < 0.05 * scale, "{difference} of {scale}");
}

#[test]
fn a_truncated_file_is_an_error_wherever_it_is_cut() {
    let file = Temporary::new("cut");
    save(&file.0, &metadata(), &weights(true));
    let whole = std::fs::read(&file.0).unwrap();
    assert!(Gguf::open(&file.0).is_ok());
    for cut in (0..60).map(|i| whole.len() * i / 60).chain([1, 3, 20, whole.len() - 40]) {
        std::fs::write(&file.0, &whole[..cut]).unwrap();
        let e = Gguf::open(&file.0).unwrap_err();
        assert!(matches!(e, LlamaError::Damaged(_)), "{cut}: {e}");
    }
    assert!(matches!(Gguf::open("/nowhere/model.gguf"), Err(LlamaError::Io { .. })));
}

#[test]
fn other_models_are_refused_by_name() {
    let file = Temporary::new("other");
    save(&file.0, &with("general.architecture", text("qwen2")), &weights(false));
    let e = Gguf::open(&file.0).unwrap_err();
    assert!(matches!(&e, LlamaError::Architecture { got } if got == "qwen2"), "{e}");
    let refused = |key: &str, value: Value| {
        save(&file.0, &with(key, value), &weights(false));
        let mut gguf = Gguf::open(&file.0).unwrap();
        Llama::load(&mut gguf, Weights::F32, |_, _| {}).unwrap_err().to_string()
    };
    for (key, value, part) in [
        ("llama.expert_count", Value::U32(8), "mixtures"),
        ("llama.rope.scaling.type", text("yarn"), "yarn"),
        ("llama.attention.head_count_kv", Value::U32(3), "does not divide"),
        ("llama.attention.head_count_kv", Value::U32(0), "does not divide"),
        ("llama.rope.dimension_count", Value::U32(17), "rotated"),
        ("llama.embedding_length", Value::U32(80), "token_embd"),
        ("llama.embedding_length", text("wide"), "number"),
        ("llama.rope.freq_base", Value::F32(f32::NAN), "positive"),
        ("llama.block_count", Value::U32(3), "blk.2"),
        ("llama.feed_forward_length", Value::U32(97), "ffn_gate"),
    ] {
        let e = refused(key, value);
        assert!(e.contains(part), "{key}: {e}");
    }
    let mut all = metadata();
    all.retain(|(k, _)| k != "llama.attention.head_count");
    save(&file.0, &all, &weights(false));
    let e = Gguf::open(&file.0).unwrap().config().unwrap_err().to_string();
    assert!(e.contains("head_count") && e.contains("missing"), "{e}");
    let wordpiece = with("tokenizer.ggml.model", text("bert"));
    save(&file.0, &wordpiece, &weights(false));
    assert!(LlamaTokenizer::new(&Gguf::open(&file.0).unwrap()).is_err());
}
