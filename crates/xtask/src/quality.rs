//! What a scheme costs in quality.
//!
//! A window is 1,025 tokens. Tokens 0–511 are attended exactly and then stored; tokens 512–1023 go through the
//! cache in 16 steps of 32: append, close tiles, attend. That gives 512 distributions of the next token, each
//! compared with the exact one: KL(exact ‖ scheme) in nats, top-1 agreement, and perplexity of the text. Weights
//! are dequantized to f32 once, activations stay f32, and window and sink rows are f32 too.
//!
//! The exact pass is made once a window and shared: its keys and values of tokens 0–511 are what every scheme
//! stores, its logits are what every scheme is compared with.

use crate::decoded::Decoded;
use crate::metrics::Score;
use crate::progress::Progress;
use crate::schemes::Scheme;
use crate::windows::{PREFIX, SCORED, STEP, Windows};
use anyhow::{Result, bail};
use candle_core::Tensor;
use qkv_candle::Cache;
use qkv_candle::llama::{Attention, Exact, Llama};
use rayon::prelude::*;

/// What one scheme reached.
#[derive(Debug, Clone)]
pub struct Quality {
    /// Over all windows.
    pub score: Score,
    /// Window by window.
    pub windows: Vec<Score>,
    /// Seconds for all windows, the shared exact pass left out.
    pub seconds: f64,
}

/// The exact pass over one window.
#[derive(Debug)]
pub struct Reference {
    ids: Vec<u32>,
    prefix: Exact,
    /// `[SCORED][vocabulary]`.
    logits: Vec<f32>,
    vocab: usize,
}

impl Reference {
    /// Runs a window exactly, in one pass.
    ///
    /// # Errors
    /// For token ids that the model does not have.
    pub fn new(model: &Llama, ids: &[u32]) -> Result<Self> {
        let mut exact = Exact::new(model.config().layers);
        let hidden = model.forward(&ids[..PREFIX + SCORED], &mut exact)?;
        let vocab = model.config().vocab;
        let mut logits = Vec::with_capacity(SCORED * vocab);
        for step in 0..SCORED / STEP {
            let rows = hidden.narrow(0, PREFIX + step * STEP, STEP)?.contiguous()?;
            logits.extend(model.logits(&rows)?.flatten_all()?.to_vec1::<f32>()?);
        }
        Ok(Self { ids: ids.to_vec(), prefix: exact.prefix(PREFIX)?, logits, vocab })
    }

    /// Exact keys and values of tokens 0–511.
    pub fn prefix(&self) -> &Exact {
        &self.prefix
    }

    /// The score of the exact pass itself: its perplexity is the baseline.
    pub fn own_score(&self) -> Score {
        self.score_rows(0, &self.logits)
    }

    /// Scores `attention`, which holds tokens 0–511, on the rest in steps of 32.
    ///
    /// # Errors
    /// What the attention returns, or if it does not hold 512 tokens.
    pub fn score(&self, model: &Llama, attention: &mut dyn Attention) -> Result<Score> {
        let held = attention.position()?;
        if held != PREFIX {
            bail!("the cache holds {held} tokens, expected {PREFIX}");
        }
        let mut score = Score::default();
        for step in 0..SCORED / STEP {
            let at = PREFIX + step * STEP;
            let hidden = model.forward(&self.ids[at..at + STEP], attention)?;
            let logits = model.logits(&hidden)?.flatten_all()?.to_vec1::<f32>()?;
            score = score.plus(self.score_rows(step * STEP, &logits));
        }
        Ok(score)
    }

    /// Scores rows from `first` on.
    fn score_rows(&self, first: usize, logits: &[f32]) -> Score {
        let exact = &self.logits[first * self.vocab..];
        let rows = logits.par_chunks_exact(self.vocab).zip(exact.par_chunks_exact(self.vocab)).enumerate();
        let scores = rows.map(|(i, (row, exact))| Score::of(row, exact, self.ids[PREFIX + first + i + 1]));
        // Collected first: a sum in the order of rows is the same on any number of cores.
        scores.collect::<Vec<_>>().into_iter().fold(Score::default(), Score::plus)
    }
}

/// A cache of this scheme that holds the exact prefix, with f32 window and sinks.
///
/// # Errors
/// If the configuration is refused.
pub fn loaded_cache(model: &Llama, scheme: &Scheme, prefix: &Exact) -> Result<Cache> {
    let base = model.cache_config(PREFIX + SCORED);
    let config = scheme.config(base, Some(prefix))?.with_window_dtype(qkv::Dtype::F32);
    let cache = Cache::new(config)?;
    for layer in cache.layers() {
        let Some((k, v)) = prefix.layer(layer.layer()) else {
            bail!("layer {} holds nothing", layer.layer())
        };
        layer.append(k, v)?;
    }
    Ok(cache)
}

/// Plain f32 tensors under the library's own attention: what is left of a scheme when nothing is quantized.
struct Plain(Exact);

impl Attention for Plain {
    fn position(&self) -> candle_core::Result<usize> {
        self.0.position()
    }

    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Tensor> {
        self.0.append(layer, k, v)?;
        let Some((k, v)) = self.0.layer(layer) else { candle_core::bail!("layer {layer} holds nothing") };
        let (_, heads, n, _) = q.dims4()?;
        let (_, _, _, dim) = v.dims4()?;
        let mut out = vec![0f32; heads * n * dim];
        let data = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
        let (qd, kd, vd) = (data(q)?, data(k)?, data(v)?);
        let done = (|| {
            qkv::attention(
                &qkv::TensorRef::bhtd(&qd, q.dims4().map_or([0; 4], <[usize; 4]>::from))?,
                &qkv::TensorRef::bhtd(&kd, k.dims4().map_or([0; 4], <[usize; 4]>::from))?,
                &qkv::TensorRef::bhtd(&vd, v.dims4().map_or([0; 4], <[usize; 4]>::from))?,
                &qkv::AttendParams::new(),
                None,
                &mut qkv::TensorMut::bhtd(&mut out[..], [1, heads, n, dim])?,
                None,
            )
        })();
        done.map_err(candle_core::Error::wrap)?;
        Tensor::from_vec(out, (1, heads, n, dim), q.device())
    }
}

/// How attention over a cache is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// By the library, from the packed codes.
    Library,
    /// In f64 over decoded values; with a seed, with noise of a few f32 roundings on the outputs.
    F64(Option<u64>),
}

/// Everything measured on some windows.
#[derive(Debug)]
pub struct Measured {
    /// Perplexity of the exact pass.
    pub exact: Score,
    /// One entry a scheme, in their order.
    pub schemes: Vec<Quality>,
    /// KL of plain f32 attention in steps of 32, on the first window: the noise of the harness.
    pub plain_kl: f64,
    /// KL of FP8 with one scale a tensor, if that scheme was asked for on two or six windows: the peers measured it there
    /// too. Attention in f64 over decoded values, because rounding in f32 moves this one by more than it may be off.
    pub fp8_kl: Option<f64>,
}

/// Measures schemes on windows: windows outside, schemes inside, so that one exact pass is in memory at a time.
///
/// # Errors
/// If a scheme does not fit the model.
pub fn measure(model: &Llama, windows: &Windows, schemes: &[Scheme], by: Arithmetic) -> Result<Measured> {
    let mut exact = Score::default();
    let mut plain_kl = 0.0;
    let fp8 =
        Some(Scheme::fp8_tensor()).filter(|f| schemes.contains(f) && matches!(windows.ids.len(), 2 | 6));
    let mut fp8_score = Score::default();
    let empty = Quality { score: Score::default(), windows: Vec::new(), seconds: 0.0 };
    let mut results = vec![empty; schemes.len()];
    let progress = Progress::new("quality", windows.ids.len() * (schemes.len() + 1));
    for (i, ids) in windows.ids.iter().enumerate() {
        progress.say(format!("window {}: exact pass", i + 1));
        let reference = Reference::new(model, ids)?;
        exact = exact.plus(reference.own_score());
        if i == 0 {
            plain_kl = reference.score(model, &mut Plain(reference.prefix().clone()))?.mean_kl();
        }
        if let Some(fp8) = &fp8 {
            let mut cache = Decoded::new(loaded_cache(model, fp8, reference.prefix())?);
            fp8_score = fp8_score.plus(reference.score(model, &mut cache)?);
        }
        progress.step();
        for (scheme, result) in schemes.iter().zip(&mut results) {
            progress.say(format!("window {}: {}", i + 1, scheme.name));
            let start = std::time::Instant::now();
            let mut cache = loaded_cache(model, scheme, reference.prefix())?;
            let score = match by {
                Arithmetic::Library => reference.score(model, &mut cache),
                Arithmetic::F64(None) => reference.score(model, &mut Decoded::new(cache)),
                Arithmetic::F64(Some(seed)) => {
                    reference.score(model, &mut Decoded::new(cache).with_noise(seed))
                }
            }?;
            result.seconds += start.elapsed().as_secs_f64();
            result.score = result.score.plus(score);
            result.windows.push(score);
            progress.step();
        }
    }
    progress.done(&format!("{} windows, {} schemes", windows.ids.len(), schemes.len()));
    let fp8_kl = fp8.map(|_| fp8_score.mean_kl());
    Ok(Measured { exact, schemes: results, plain_kl, fp8_kl })
}

/// The perplexity of the exact pass on the first `n` standard windows, where it is known.
pub fn known_perplexity(n: usize) -> Option<f64> {
    match n {
        1 => Some(39.05),
        2 => Some(44.70),
        6 => Some(37.38),
        _ => None,
    }
}

/// Checks of the harness itself, on the standard windows and model.
pub fn check(measured: &Measured, windows: usize) -> Checks {
    let mut checks = Checks::default();
    let mut claim = |holds: bool, what: String| {
        checks.failed |= !holds;
        checks.said.push(if holds { what } else { format!("NOT MET: {what}") });
    };
    let ppl = measured.exact.perplexity();
    if let Some(known) = known_perplexity(windows) {
        claim((ppl - known).abs() <= 0.02, format!("exact perplexity {ppl:.3}, expected {known} ± 0.02"));
    }
    let plain = measured.plain_kl;
    claim(
        plain.abs() < 1e-7,
        format!("KL of plain f32 attention in steps of 32: {plain:.1e}, expected below 1e-7"),
    );
    if let Some(kl) = measured.fp8_kl {
        // The peers' own figure for it is 0.0061 on the first two windows and 0.0058 on all six.
        claim(
            (kl - 0.0059).abs() <= 0.0003,
            format!("KL of fp8 per tensor in f64 {kl:.5}, expected 0.0059 ± 0.0003"),
        );
    }
    checks
}

/// What the harness checked about itself.
#[derive(Debug, Clone, Default)]
pub struct Checks {
    /// One line a check; those that were not met say so.
    pub said: Vec<String>,
    failed: bool,
}

impl Checks {
    /// Nothing to check, and why.
    pub fn unknown(why: &str) -> Self {
        Self { said: vec![why.to_string()], failed: false }
    }

    /// Fails if a check was not met. Called last, so that what was measured can be seen.
    ///
    /// # Errors
    /// If a check was not met.
    pub fn result(&self) -> Result<()> {
        if self.failed { bail!("the harness fails its own check: {}", self.said.join("; ")) } else { Ok(()) }
    }
}
