//! The tokenizer inside a GGUF file, with what candle's builder leaves out.

use super::error::{LlamaError, LlamaResult};
use super::gguf::Gguf;
use candle_core::quantized::gguf_file::Value;
use candle_core::quantized::tokenizer::TokenizerFromGguf;
use tokenizers::Tokenizer;
use tokenizers::pre_tokenizers::{byte_level::ByteLevel, digits::Digits, sequence::Sequence};

/// Text to tokens and back, for the model of one file.
#[derive(Debug, Clone)]
pub struct LlamaTokenizer {
    inner: Tokenizer,
    ends: Vec<u32>,
}

impl LlamaTokenizer {
    /// Builds the tokenizer that a file describes.
    ///
    /// # Errors
    /// [`LlamaError::Tokenizer`] for a kind that is not byte-level BPE, or tables that do not fit together.
    pub fn new(gguf: &Gguf) -> LlamaResult<Self> {
        let metadata = &gguf.content().metadata;
        let mut inner =
            Tokenizer::from_gguf(gguf.content()).map_err(|e| LlamaError::Tokenizer(e.to_string()))?;
        let pre = metadata.get("tokenizer.ggml.pre").and_then(|v| v.to_string().ok()).map(String::as_str);
        if pre == Some("smollm") {
            // candle does not know it and falls back to GPT-2 with a prefix space; the model's own splits digits and
            // adds no space.
            let digits = Digits::new(true).into();
            inner.with_pre_tokenizer(Some(Sequence::new(vec![
                digits,
                ByteLevel::new(false, true, true).into(),
            ])));
        }
        let mut ends = Vec::new();
        for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"] {
            match metadata.get(key) {
                Some(Value::U32(id)) => ends.push(*id),
                Some(Value::I32(id)) if *id >= 0 => ends.push(*id as u32),
                _ => {}
            }
        }
        ends.extend(
            ["<|im_end|>", "<|endoftext|>", "<|eot_id|>"].iter().filter_map(|t| inner.token_to_id(t)),
        );
        Ok(Self { inner, ends })
    }

    /// Tokens of a text, without a token for its beginning. Special tokens may be written out in the text.
    ///
    /// # Errors
    /// [`LlamaError::EmptyPrompt`] if there is not one token.
    pub fn encode(&self, text: &str) -> LlamaResult<Vec<u32>> {
        let ids = self.inner.encode_fast(text, false).map_err(|e| LlamaError::Tokenizer(e.to_string()))?;
        if ids.get_ids().is_empty() {
            return Err(LlamaError::EmptyPrompt);
        }
        Ok(ids.get_ids().to_vec())
    }

    /// Tokens of one user turn in the chat markup of the model (ChatML, or the headers of Llama 3), ready for the
    /// answer.
    ///
    /// # Errors
    /// [`LlamaError::EmptyPrompt`] for a text of spaces only; [`LlamaError::Unsupported`] if the vocabulary has no
    /// markup that is known here.
    pub fn encode_chat(&self, text: &str) -> LlamaResult<Vec<u32>> {
        if text.trim().is_empty() {
            return Err(LlamaError::EmptyPrompt);
        }
        let has = |t| self.inner.token_to_id(t).is_some();
        if has("<|im_start|>") {
            self.encode(&format!("<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"))
        } else if has("<|start_header_id|>") {
            let header = |role| format!("<|start_header_id|>{role}<|end_header_id|>\n\n");
            self.encode(&format!(
                "<|begin_of_text|>{}{text}<|eot_id|>{}",
                header("user"),
                header("assistant")
            ))
        } else {
            let (what, got) =
                ("chat markup", "a vocabulary without <|im_start|> or <|start_header_id|>".into());
            Err(LlamaError::Unsupported { what, got, why: "give the prompt as raw text" })
        }
    }

    /// The text of tokens; special ones are left out.
    ///
    /// # Errors
    /// [`LlamaError::Tokenizer`] if the tokenizer refuses them.
    pub fn decode(&self, ids: &[u32]) -> LlamaResult<String> {
        self.inner.decode(ids, true).map_err(|e| LlamaError::Tokenizer(e.to_string()))
    }

    /// Whether a token ends the text.
    pub fn is_end(&self, id: u32) -> bool {
        self.ends.contains(&id)
    }
}
