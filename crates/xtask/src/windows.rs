//! The token windows that are scored.

use anyhow::{Context, Result, bail};
use qkv_candle::llama::LlamaTokenizer;
use std::path::Path;

/// Tokens of a window: 512 of prefix, 512 that are scored, and the last one's successor.
pub const WINDOW: usize = 1025;
/// Tokens attended exactly before scoring starts.
pub const PREFIX: usize = 512;
/// Scored tokens of a window.
pub const SCORED: usize = 512;
/// Tokens of a step.
pub const STEP: usize = 32;

/// Windows of token ids, and where they come from.
#[derive(Debug, Clone)]
pub struct Windows {
    /// Token ids, [`WINDOW`] each.
    pub ids: Vec<Vec<u32>>,
    /// What was read.
    pub source: String,
    /// Whether these are the windows that the peers were measured on.
    pub standard: bool,
}

impl Windows {
    /// The first `n` of the six windows that the peers were measured on, as token ids of SmolLM2.
    ///
    /// # Errors
    /// If there are fewer.
    pub fn standard(n: usize) -> Result<Self> {
        let json: serde_json::Value = serde_json::from_str(include_str!("../data/windows.json"))?;
        let all: Vec<Vec<u32>> =
            serde_json::from_value(json["ids"].clone()).context("ids of data/windows.json")?;
        if n == 0 || n > all.len() {
            bail!("--windows {n}: expected 1 to {}", all.len());
        }
        if all.iter().any(|w| w.len() != WINDOW) {
            bail!("data/windows.json: expected windows of {WINDOW} tokens");
        }
        let ids = all.into_iter().take(n).collect();
        Ok(Self { ids, source: "Persuasion (data/windows.json)".into(), standard: true })
    }

    /// `n` windows spread evenly over a text.
    ///
    /// # Errors
    /// If the text is too short or cannot be read.
    pub fn of_text(path: &Path, tokenizer: &LlamaTokenizer, n: usize) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let all = tokenizer.encode(&text)?;
        Ok(Self { ids: spread(&all, n)?, source: path.display().to_string(), standard: false })
    }
}

/// `n` windows that start at even distances.
fn spread(all: &[u32], n: usize) -> Result<Vec<Vec<u32>>> {
    if n == 0 || all.len() < n * WINDOW {
        bail!("{n} windows need {} tokens and at least one window, the text has {}", n * WINDOW, all.len());
    }
    let last = all.len() - WINDOW;
    let start = |i: usize| if n == 1 { 0 } else { i * last / (n - 1) };
    Ok((0..n).map(|i| all[start(i)..start(i) + WINDOW].to_vec()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_standard_windows_are_complete() {
        let w = Windows::standard(6).unwrap();
        assert_eq!(w.ids.len(), 6);
        assert_eq!(w.ids[0][..4], [25165, 101, 4574, 198]);
        assert!(Windows::standard(0).is_err() && Windows::standard(7).is_err());
    }

    #[test]
    fn windows_of_a_text_do_not_leave_it() {
        let all: Vec<u32> = (0..3 * WINDOW as u32 + 10).collect();
        let w = spread(&all, 3).unwrap();
        assert_eq!(w[0][0], 0);
        assert_eq!(w[2].last(), all.last());
        assert!(w[1][0] > w[0][WINDOW - 1]);
        assert!(spread(&all, 4).is_err());
        assert_eq!(spread(&all[..WINDOW], 1).unwrap()[0], all[..WINDOW]);
    }
}
