//! Generation, one token at a time.

use super::attention::Attention;
use super::error::{LlamaError, LlamaResult};
use super::model::Llama;
use super::sample::{Sampler, Sampling};
use super::tokenizer::LlamaTokenizer;
use std::time::{Duration, Instant};

/// What a generation gave and took.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Generation {
    /// Tokens after the prompt, the ending one left out.
    pub ids: Vec<u32>,
    /// Their text.
    pub text: String,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Time for the prompt and the first token.
    pub prefill: Duration,
    /// Time for all other tokens.
    pub decode: Duration,
}

impl Generation {
    /// Tokens a second after the first one.
    pub fn tokens_per_second(&self) -> f64 {
        self.ids.len().saturating_sub(1) as f64 / self.decode.as_secs_f64().max(1e-9)
    }
}

/// Continues `prompt` by at most `tokens` tokens. `on_text` gets each piece of text as soon as it is whole.
///
/// # Errors
/// [`LlamaError::EmptyPrompt`], a sampling parameter that is not possible, or what the attention returns (for
/// example a cache without room).
pub fn generate(
    model: &Llama,
    tokenizer: &LlamaTokenizer,
    attention: &mut dyn Attention,
    prompt: &[u32],
    tokens: usize,
    sampling: Sampling,
    mut on_text: impl FnMut(&str),
) -> LlamaResult<Generation> {
    if prompt.is_empty() {
        return Err(LlamaError::EmptyPrompt);
    }
    let mut sampler = Sampler::new(sampling)?;
    let mut out = Generation {
        ids: Vec::new(),
        text: String::new(),
        prompt_tokens: prompt.len(),
        prefill: Duration::ZERO,
        decode: Duration::ZERO,
    };
    let start = Instant::now();
    let mut next = sampler.choose(&model.next_logits(prompt, attention)?);
    out.prefill = start.elapsed();
    let start = Instant::now();
    while out.ids.len() < tokens && !tokenizer.is_end(next) {
        out.ids.push(next);
        let text = tokenizer.decode(&out.ids)?;
        // A token may end in the middle of a character: wait for the rest.
        if let Some(piece) = text.strip_prefix(&out.text).filter(|p| !p.ends_with('\u{fffd}')) {
            on_text(piece);
            out.text = text;
        }
        if out.ids.len() < tokens {
            next = sampler.choose(&model.next_logits(&[next], attention)?);
        }
    }
    out.decode = start.elapsed();
    let text = tokenizer.decode(&out.ids)?;
    on_text(text.strip_prefix(&out.text).unwrap_or_default());
    out.text = text;
    Ok(out)
}
