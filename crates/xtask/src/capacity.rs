//! How many tokens fit beside a model's weights on a card: arithmetic, nothing is run.

use crate::schemes::{Scheme, half_bytes};
use anyhow::Result;
use qkv::CacheConfig;

/// Sizes of a model whose cache is counted.
#[derive(Debug, Clone, Copy)]
pub struct Model {
    /// Its name.
    pub name: &'static str,
    /// Parameters; held in half precision.
    pub parameters: usize,
    /// Layers.
    pub layers: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
}

/// The two models of the table.
pub const MODELS: [Model; 2] = [
    Model { name: "Llama-2-7B", parameters: 6_738_415_616, layers: 32, kv_heads: 32, head_dim: 128 },
    Model { name: "Llama-3.1-8B", parameters: 8_030_261_248, layers: 32, kv_heads: 8, head_dim: 128 },
];

/// Memory of the cards, in GB of 10⁹ bytes.
pub const CARDS: [usize; 3] = [24, 80, 141];

/// One row: a model, a scheme, and tokens on each card.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// The model.
    pub model: &'static str,
    /// The scheme.
    pub scheme: String,
    /// Tokens of one sequence beside the weights, for each of [`CARDS`].
    pub tokens: [usize; 3],
}

impl Model {
    /// A cache configuration of a scheme with the recommended formats for this head.
    fn config(&self, scheme: &Scheme) -> Result<CacheConfig> {
        scheme.config(CacheConfig::new(self.layers, self.kv_heads, self.head_dim), None)
    }
}

/// The table for every model and scheme. `schemes` gives the schemes for a head dim.
///
/// # Errors
/// If a scheme does not fit a model.
pub fn rows(schemes: impl Fn(usize) -> Vec<Scheme>) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for model in MODELS {
        let weights = model.parameters * 2;
        let per_token = half_bytes(&model.config(&Scheme::half())?, 1);
        let free = |card: usize| (card * 1_000_000_000).saturating_sub(weights);
        let plain = CARDS.map(|card| free(card) / per_token);
        rows.push(Row { model: model.name, scheme: "plain f16 tensors".into(), tokens: plain });
        for scheme in schemes(model.head_dim) {
            let config = model.config(&scheme)?;
            let mut tokens = [0; 3];
            for (t, card) in tokens.iter_mut().zip(CARDS) {
                *t = config.tokens_in(free(card))?;
            }
            rows.push(Row { model: model.name, scheme: scheme.name, tokens });
        }
    }
    Ok(rows)
}

/// What is known from elsewhere, to hold the table against.
pub const PUBLISHED: &str = "Published for Llama-2-7B on 80 GB (Hugging Face, 2024): 40k tokens in half precision, \
     128k with a quantized cache, activations included; and 5 GB for 10,000 tokens in half precision";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_thousand_tokens_of_llama_2_take_five_gigabytes() {
        let config = MODELS[0].config(&Scheme::half()).unwrap();
        let bytes = half_bytes(&config, 10_000);
        assert_eq!(bytes, 5_242_880_000);
        // qkv's own f16 format: the same, but for whole blocks, window and sinks.
        let fit = config.tokens_in(bytes).unwrap();
        assert!((9_800..=10_000).contains(&fit), "{fit}");
    }

    #[test]
    fn narrower_caches_hold_more_and_bigger_cards_too() {
        let rows = rows(Scheme::demo).unwrap();
        assert_eq!(rows.len(), 2 * 8);
        for model in rows.chunks(8) {
            let at = |name: &str| model.iter().find(|r| r.scheme == name).unwrap().tokens;
            for wide_narrow in ["f16", "8 bit", "4 bit", "3 bit", "2 bit", "1 bit"].windows(2) {
                let (wide, narrow) = (at(wide_narrow[0]), at(wide_narrow[1]));
                assert!(wide.iter().zip(narrow).all(|(w, n)| *w < n), "{wide_narrow:?}");
            }
            assert!(at("f16")[0] < at("f16")[1] && at("f16")[1] < at("f16")[2]);
        }
        // 80 GB less 13.5 GB of weights at 512 KiB a token.
        assert_eq!(rows[0].tokens[1], (80_000_000_000 - 2 * 6_738_415_616) / 524_288);
    }
}
