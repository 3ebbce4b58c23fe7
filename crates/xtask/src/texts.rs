//! What the model writes under each scheme, side by side.

use crate::progress::Progress;
use crate::schemes::Scheme;
use anyhow::Result;
use qkv_candle::Cache;
use qkv_candle::llama::{Exact, Llama, LlamaTokenizer, Sampling, generate};

/// One text.
#[derive(Debug, Clone)]
pub struct Text {
    /// The scheme, or "exact".
    pub scheme: String,
    /// What came after the prompt.
    pub text: String,
    /// Tokens generated.
    pub tokens: usize,
    /// Leading tokens that are those of the exact run.
    pub same: usize,
    /// Tokens of the sequence that were read from codes in the last step.
    pub quantized: usize,
    /// Tokens a second, the prompt left out.
    pub tokens_per_second: f64,
}

/// The exact text, then every scheme with its window, then every scheme in direct mode (every token quantized as
/// it comes), all greedy.
///
/// # Errors
/// If the prompt is empty or a scheme does not fit the model.
pub fn texts(
    model: &Llama,
    tokenizer: &LlamaTokenizer,
    prompt: &[u32],
    tokens: usize,
    schemes: &[Scheme],
) -> Result<(Text, Vec<Text>, Vec<Text>)> {
    let progress = Progress::new("texts", 1 + 2 * schemes.len());
    progress.say("exact");
    let mut exact = Exact::new(model.config().layers);
    let reference = generate(model, tokenizer, &mut exact, prompt, tokens, Sampling::greedy(), |_| {})?;
    progress.step();
    let first = Text {
        scheme: "exact f32".into(),
        text: reference.text.clone(),
        tokens: reference.ids.len(),
        same: reference.ids.len(),
        quantized: 0,
        tokens_per_second: reference.tokens_per_second(),
    };
    let run = |scheme: &Scheme| -> Result<Text> {
        progress.say(&scheme.name);
        let base = model.cache_config(prompt.len() + tokens);
        let mut cache = Cache::new(scheme.config(base, None)?)?;
        let done = generate(model, tokenizer, &mut cache, prompt, tokens, Sampling::greedy(), |_| {})?;
        progress.step();
        Ok(Text {
            scheme: scheme.name.clone(),
            same: done.ids.iter().zip(&reference.ids).take_while(|(a, b)| a == b).count(),
            tokens: done.ids.len(),
            quantized: quantized(scheme, cache.current_seq_len()?),
            tokens_per_second: done.tokens_per_second(),
            text: done.text,
        })
    };
    let windowed = schemes.iter().map(&run).collect::<Result<Vec<_>>>()?;
    let head_dim = model.config().key_dim;
    let direct = schemes.iter().map(|s| run(&s.clone().direct(head_dim))).collect::<Result<Vec<_>>>()?;
    progress.done(&format!("{} texts of {tokens} tokens", 1 + windowed.len() + direct.len()));
    Ok((first, windowed, direct))
}

/// Tokens that are read from codes when a sequence holds `len`: closed tiles without the sinks.
fn quantized(scheme: &Scheme, len: usize) -> usize {
    match scheme.residual {
        None => len,
        Some(r) => {
            (len.saturating_sub(r) / qkv::layout::TILE * qkv::layout::TILE).saturating_sub(scheme.sinks)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qkv::Bits;

    #[test]
    fn nothing_is_quantized_before_a_tile_has_left_the_window() {
        let s = Scheme::width(Bits::B4, 64);
        assert_eq!([0, 127, 128, 191, 192].map(|n| quantized(&s, n)), [0, 0, 60, 60, 124]);
        assert_eq!(quantized(&s.clone().bare(), 64), 64);
        assert_eq!(quantized(&s.direct(64), 5), 5);
    }
}
