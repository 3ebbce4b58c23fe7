//! What can go wrong with a model file or a prompt.

/// Errors of the `llama` module.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LlamaError {
    /// The file could not be opened or read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// No GGUF file, or one that is cut off or damaged.
    #[error("the model file is damaged: {0}; fetch it again")]
    Damaged(String),
    /// A model of another architecture.
    #[error("expected a GGUF of architecture llama, got {got}")]
    Architecture {
        /// The architecture named in the file.
        got: String,
    },
    /// Metadata that is missing or makes no sense.
    #[error("GGUF metadata {key}: {problem}")]
    Metadata {
        /// The key.
        key: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A tensor that is missing or has the wrong shape.
    #[error("GGUF tensor {name}: expected {expected}, got {got}")]
    Weight {
        /// The tensor.
        name: String,
        /// The shape that was expected.
        expected: String,
        /// What the file holds.
        got: String,
    },
    /// Something of the model that is not built.
    #[error("{what}: {got} is not supported: {why}")]
    Unsupported {
        /// Which part of the model.
        what: &'static str,
        /// Its value.
        got: String,
        /// The reason.
        why: &'static str,
    },
    /// A prompt without a single token.
    #[error("the prompt is empty; give at least one token")]
    EmptyPrompt,
    /// A token id outside the vocabulary.
    #[error("token {got} is out of range, the vocabulary has {vocab} tokens")]
    Token {
        /// The id.
        got: u32,
        /// Tokens in the vocabulary.
        vocab: usize,
    },
    /// A sampling parameter that is not possible.
    #[error("{what}: {got} is not possible; {why}")]
    Sampling {
        /// Which parameter.
        what: &'static str,
        /// Its value.
        got: f32,
        /// What it must be.
        why: &'static str,
    },
    /// The tokenizer failed.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// A tensor operation or the cache failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// `Result` with [`LlamaError`].
pub type LlamaResult<T> = Result<T, LlamaError>;
