//! What a cache is made of: dims, formats, window, sinks, capacities; and the parameters of one attention call.

use crate::error::{Error, Result};
use crate::format::{Affine, Axis, Bits, Format, Granularity};
use crate::layout::{PageLayout, TILE};
use crate::scales::Scales;
use crate::tensor::Dtype;

/// Formats and sliding window of one layer.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct LayerConfig {
    /// How keys are stored.
    pub key: Format,
    /// How values are stored.
    pub value: Format,
    /// Tokens a query sees at most, itself included; `None` = all.
    pub sliding_window: Option<usize>,
}

/// Everything a cache needs to know at construction. All memory is allocated from it, once.
///
/// ```
/// use qkv::{Affine, Bits, CacheConfig};
/// let config = CacheConfig::new(32, 8, 128)         // layers, kv heads, head dim
///     .with_key(Affine::per_channel(Bits::B4, 64))
///     .with_value(Affine::per_token(Bits::B4, 64))
///     .with_capacity(4, 32_768);                    // sequences, tokens each
/// assert!(config.validate().is_ok());
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct CacheConfig {
    /// Layers, each with its own formats and sliding window.
    pub layers: Vec<LayerConfig>,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Channels of a key head; a multiple of 16.
    pub key_dim: usize,
    /// Channels of a value head; a multiple of 16.
    pub value_dim: usize,
    /// R: the newest tokens kept exact (0 to 192 in steps of 32). `None` = direct mode: tokens are encoded
    /// one by one straight into their slot of the block.
    pub residual: Option<usize>,
    /// First tokens kept exact (0 to 16).
    pub sinks: usize,
    /// Dtype of window and sink rows; "exact" means rounded to it.
    pub window_dtype: Dtype,
    /// Live sequences at most.
    pub max_sequences: usize,
    /// Tokens of a sequence at most.
    pub max_tokens: usize,
    /// Static scales; needed by FP8 formats with one scale a tensor or head.
    pub scales: Option<Scales>,
}

impl CacheConfig {
    /// The default 4-bit cache ([`default_formats`](Self::default_formats)): 64 newest and 4 first tokens exact, one sequence
    /// of 4,096 tokens.
    pub fn new(layers: usize, kv_heads: usize, head_dim: usize) -> Self {
        let (key, value) = Self::default_formats(Bits::B4, head_dim);
        let layer = LayerConfig { key, value, sliding_window: None };
        Self {
            layers: vec![layer; layers],
            kv_heads,
            key_dim: head_dim,
            value_dim: head_dim,
            residual: Some(64),
            sinks: 4,
            window_dtype: Dtype::F16,
            max_sequences: 1,
            max_tokens: 4096,
            scales: None,
        }
    }

    /// The recommended formats of keys and values at a width: see `docs/decisions.md` for the measurements.
    ///
    /// | bits | keys | values |
    /// |---|---|---|
    /// | 8 | per token, one group a head up to 128 | the same |
    /// | 4 | per channel, groups of 64 | per token, groups of 64, rotated |
    /// | 3, 2 | per channel, groups of 32 | per token, groups of 32, rotated |
    /// | 1 | per channel, groups of 32 | the same |
    ///
    /// Groups are no larger than the head; the rotation is the largest block of 128, 64 or 32 channels that divides it,
    /// or none.
    pub fn default_formats(bits: Bits, head_dim: usize) -> (Format, Format) {
        let group = |g: usize| g.min(head_dim);
        let rotated = |a: Affine| match [128, 64, 32].into_iter().find(|b| head_dim.is_multiple_of(*b)) {
            Some(block) => a.with_rotation(block),
            None => a,
        };
        let (k, v) = match bits {
            Bits::B8 => (Affine::per_token(bits, group(128)), Affine::per_token(bits, group(128))),
            Bits::B4 => (Affine::per_channel(bits, 64), rotated(Affine::per_token(bits, group(64)))),
            Bits::B3 | Bits::B2 => {
                (Affine::per_channel(bits, 32), rotated(Affine::per_token(bits, group(32))))
            }
            Bits::B1 => (Affine::per_channel(bits, 32), Affine::per_channel(bits, 32)),
        };
        (k.into(), v.into())
    }

    /// The recommended formats of this width for all layers, for the dims set so far; replaces what
    /// [`with_layer`](Self::with_layer) set.
    pub fn with_bits(mut self, bits: Bits) -> Self {
        for l in &mut self.layers {
            l.key = Self::default_formats(bits, self.key_dim).0;
            l.value = Self::default_formats(bits, self.value_dim).1;
        }
        self
    }

    /// Key format of all layers.
    pub fn with_key(mut self, format: impl Into<Format>) -> Self {
        let key = format.into();
        self.layers.iter_mut().for_each(|l| l.key = key);
        self
    }

    /// Value format of all layers.
    pub fn with_value(mut self, format: impl Into<Format>) -> Self {
        let value = format.into();
        self.layers.iter_mut().for_each(|l| l.value = value);
        self
    }

    /// Formats of one layer. (Its sliding window is the field `config.layers[layer].sliding_window`.)
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if there is no such layer.
    pub fn with_layer(
        mut self,
        layer: usize,
        key: impl Into<Format>,
        value: impl Into<Format>,
    ) -> Result<Self> {
        let limit = self.layers.len();
        let l = self.layers.get_mut(layer).ok_or(Error::OutOfRange {
            what: "layer",
            got: layer as i64,
            limit,
        })?;
        (l.key, l.value) = (key.into(), value.into());
        Ok(self)
    }

    /// Sliding window of all layers: tokens a query sees, itself included.
    pub fn with_sliding_window(mut self, window: Option<usize>) -> Self {
        self.layers.iter_mut().for_each(|l| l.sliding_window = window);
        self
    }

    /// Separate channels of key and value heads. Formats stay as they are: call it before [`with_bits`](Self::with_bits).
    pub fn with_dims(mut self, key_dim: usize, value_dim: usize) -> Self {
        (self.key_dim, self.value_dim) = (key_dim, value_dim);
        self
    }

    /// Sequences and tokens of each.
    pub fn with_capacity(mut self, max_sequences: usize, max_tokens: usize) -> Self {
        (self.max_sequences, self.max_tokens) = (max_sequences, max_tokens);
        self
    }

    /// R, the newest tokens kept exact; `None` = direct mode.
    pub fn with_residual(mut self, residual: Option<usize>) -> Self {
        self.residual = residual;
        self
    }

    /// First tokens kept exact.
    pub fn with_sinks(mut self, sinks: usize) -> Self {
        self.sinks = sinks;
        self
    }

    /// Dtype of window and sink rows.
    pub fn with_window_dtype(mut self, dtype: Dtype) -> Self {
        self.window_dtype = dtype;
        self
    }

    /// Static FP8 scales.
    pub fn with_scales(mut self, scales: Scales) -> Self {
        self.scales = Some(scales);
        self
    }

    /// Direct mode: tokens are encoded straight into their slot; no window, no sinks.
    pub fn direct(self) -> Self {
        self.with_residual(None).with_sinks(0)
    }

    /// Blocks that one sequence of `max_tokens` ever uses: tokens in the window need none.
    pub fn blocks_per_sequence(&self) -> usize {
        match self.residual {
            Some(r) => self.max_tokens.saturating_sub(r) / TILE,
            None => self.max_tokens.div_ceil(TILE),
        }
    }

    /// Entries of a block table.
    pub(crate) fn table_width(&self) -> usize {
        self.max_tokens.div_ceil(TILE)
    }

    /// Rows of the window: R + 64, or none in direct mode.
    pub fn window_rows(&self) -> usize {
        self.residual.map_or(0, |r| r.saturating_add(TILE))
    }

    /// Bytes of one block: 64 tokens of all kv heads of all layers.
    ///
    /// # Errors
    /// As [`validate`](Self::validate).
    pub fn block_bytes(&self) -> Result<usize> {
        self.validate()?;
        let layer = |l| self.page_layout(l).page_bytes.saturating_mul(self.kv_heads);
        Ok(self.layers.iter().map(layer).fold(0, usize::saturating_add))
    }

    /// Bytes of one open seat: window rows, sink rows and key means of all layers.
    pub fn seat_bytes(&self) -> usize {
        let channels = self.key_dim.saturating_add(self.value_dim);
        let rows = self.window_rows().saturating_add(self.sinks).saturating_mul(channels);
        let rows = rows.saturating_mul(self.window_dtype.bytes()).saturating_mul(self.layers.len());
        let centred = self.layers.iter().filter(|l| l.key.centered()).count();
        let means = centred.saturating_mul(self.key_dim).saturating_mul(2);
        rows.saturating_add(means).saturating_mul(self.kv_heads)
    }

    /// Tokens of one sequence that fit in `bytes`: whole blocks, beside the window and the sinks.
    ///
    /// # Errors
    /// As [`validate`](Self::validate).
    pub fn tokens_in(&self, bytes: usize) -> Result<usize> {
        let block = self.block_bytes()?;
        let Some(left) = bytes.checked_sub(self.seat_bytes()) else { return Ok(0) };
        // The newest tokens stay in the window and need no block.
        Ok(left / block * TILE + self.residual.unwrap_or(0))
    }

    /// Geometry of this configuration's pages of a layer.
    pub(crate) fn page_layout(&self, layer: &LayerConfig) -> PageLayout {
        PageLayout::new(&layer.key, &layer.value, self.key_dim, self.value_dim)
    }

    /// Checks everything that construction needs.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming the field, its value and the reason.
    pub fn validate(&self) -> Result<()> {
        let no = |what, got: String, why: &str| Err(Error::Unsupported { what, got, why: why.into() });
        for (what, n) in [
            ("layers", self.layers.len()),
            ("kv_heads", self.kv_heads),
            ("key_dim", self.key_dim),
            ("value_dim", self.value_dim),
            ("max_sequences", self.max_sequences),
            ("max_tokens", self.max_tokens),
        ] {
            if n == 0 {
                return no(what, "0".into(), "it must be at least 1");
            }
            if n > i32::MAX as usize {
                return no(what, n.to_string(), "it must fit in 31 bits");
            }
        }
        for (what, d) in [("key_dim", self.key_dim), ("value_dim", self.value_dim)] {
            if d % 16 != 0 || d > 512 {
                return no(what, d.to_string(), "head dims are multiples of 16 up to 512; pad the heads");
            }
        }
        if self.sinks > 16 {
            return no("sinks", self.sinks.to_string(), "0 to 16 first tokens can be kept exact");
        }
        match self.residual {
            Some(r) if r > 192 || r % 32 != 0 => {
                return no("residual", r.to_string(), "R is 0 to 192 in steps of 32");
            }
            None if self.sinks > 0 => {
                return no("sinks", self.sinks.to_string(), "direct mode keeps no sinks; use with_sinks(0)");
            }
            _ => {}
        }
        if let Some(s) = &self.scales
            && s.layers() != self.layers.len()
        {
            return Err(Error::Length {
                what: "scales (layers)",
                expected: self.layers.len(),
                got: s.layers(),
            });
        }
        for (i, l) in self.layers.iter().enumerate() {
            self.validate_format("key format", &l.key, self.key_dim, i)?;
            self.validate_format("value format", &l.value, self.value_dim, i)?;
            if l.value.centered() {
                return no("value format", l.value.to_string(), "only keys can be centred");
            }
            if l.sliding_window == Some(0) {
                return no(
                    "sliding_window",
                    "0".into(),
                    "a query sees at least itself; use None for no window",
                );
            }
        }
        Ok(())
    }

    fn validate_format(&self, what: &'static str, f: &Format, dim: usize, layer: usize) -> Result<()> {
        let no = |why: String| Err(Error::Unsupported { what, got: format!("{f} in layer {layer}"), why });
        if self.residual.is_none() && !f.is_per_token() {
            return no(
                "direct mode writes single tokens; use a per-token format without centring, or a window"
                    .into(),
            );
        }
        match f {
            Format::Affine(a) => {
                match a.axis {
                    Axis::PerToken if a.group > dim => {
                        return no(format!(
                            "the group is larger than the head ({dim} channels); call with_dims before with_bits"
                        ));
                    }
                    Axis::PerToken if ![32, 64, 128, dim].contains(&a.group) => {
                        return no("per-token groups in a cache are 32, 64, 128 or the whole head".into());
                    }
                    Axis::PerChannel if ![32, 64].contains(&a.group) => {
                        return no("per-channel groups in a cache are 32 or 64 tokens".into());
                    }
                    _ => {}
                }
                if let Some(b) = a.rotate {
                    crate::quant::hadamard::check_block(b, dim)?;
                }
                if a.center && a.axis == Axis::PerChannel {
                    return no(
                        "centring is for per-token keys; per-channel groups have a min of their own".into()
                    );
                }
                crate::quant::affine::check_fit(&a.fit)
            }
            Format::Fp8(p) if p.granularity != Granularity::TokenHead => {
                let held = |head| match (what, &self.scales) {
                    ("key format", Some(s)) => s.key(layer, head),
                    (_, Some(s)) => s.value(layer, head),
                    _ => None,
                };
                let per = self.scales.as_ref().map_or((0, 0), Scales::per_layer);
                let per = if what == "key format" { per.0 } else { per.1 };
                if (0..self.kv_heads).any(|h| held(h).is_none()) {
                    return no(
                        "it needs static scales: give with_scales, or ask for Scales::unit by name".into()
                    );
                }
                if p.granularity == Granularity::Tensor && per != 1 {
                    return no(format!("one scale a tensor, but the scales hold {per} a layer"));
                }
                if p.granularity == Granularity::Head && per != self.kv_heads && per != 1 {
                    return no(format!(
                        "one scale a head, but the scales hold {per} a layer; give {} or 1",
                        self.kv_heads
                    ));
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Hash of what a page's meaning depends on: dims, heads, every layer's formats, sinks and static FP8
    /// scale values; not R or capacities.
    pub fn hash(&self) -> u64 {
        let mut bytes = Vec::new();
        let mut put = |x: u64| bytes.extend_from_slice(&x.to_le_bytes());
        put(1); // version of this hash
        for n in [self.kv_heads, self.key_dim, self.value_dim, self.sinks, self.layers.len()] {
            put(n as u64);
        }
        for (i, l) in self.layers.iter().enumerate() {
            for (f, key) in [(&l.key, true), (&l.value, false)] {
                match f {
                    Format::F16 => put(1),
                    Format::Bf16 => put(2),
                    Format::Affine(a) => {
                        // The fit only chooses the pair; a page reads the same whatever chose it.
                        put(3 + (a.bits.get() as u64) * 256 + (a.axis == Axis::PerChannel) as u64 * 65536);
                        put(a.group as u64);
                        put(a.rotate.unwrap_or(0) as u64 * 2 + a.center as u64);
                    }
                    Format::Fp8(p) => {
                        put(4 + (p.kind as u64) * 256 + (p.granularity as u64) * 65536);
                        if f.needs_scale() {
                            for h in 0..self.kv_heads {
                                let s = self.scales.as_ref();
                                let s = s.and_then(|s| if key { s.key(i, h) } else { s.value(i, h) });
                                put(s.unwrap_or(0.0).to_bits() as u64);
                            }
                        }
                    }
                }
            }
        }
        xxhash_rust::xxh3::xxh3_64(&bytes)
    }
}

/// Parameters of one attention call: `softmax(mask(softcap(scale * q·k))) · v`.
///
/// Query head `h` reads kv head `h / (query_heads / kv_heads)`. Query `i` of `n` sits at position
/// `len - n + i` and sees keys up to itself (causal).
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub struct AttendParams<'a> {
    /// Factor of the logits; `None` = `1 / sqrt(key_dim)`.
    pub scale: Option<f32>,
    /// `cap * tanh(s / cap)` on the scaled logits.
    pub softcap: Option<f32>,
    /// One extra logit a query head that takes part in the softmax and has no value. It counts in the LSE.
    pub sink_logits: Option<&'a [f32]>,
    /// Ranges `[start, end)` of absolute token numbers whose members see each other whatever their order
    /// (prefill of images, prefix language models). Only `prefill` takes them.
    pub bidirectional: &'a [(usize, usize)],
}

impl<'a> AttendParams<'a> {
    /// Causal attention with scale `1 / sqrt(key_dim)`.
    pub fn new() -> Self {
        Self::default()
    }

    /// Factor of the logits.
    pub fn with_scale(self, scale: f32) -> Self {
        Self { scale: Some(scale), ..self }
    }

    /// `cap * tanh(s / cap)` on the scaled logits.
    pub fn with_softcap(self, cap: f32) -> Self {
        Self { softcap: Some(cap), ..self }
    }

    /// One extra logit a query head.
    pub fn with_sink_logits(self, logits: &'a [f32]) -> Self {
        Self { sink_logits: Some(logits), ..self }
    }

    /// Ranges whose members see each other (prefill only).
    pub fn with_bidirectional(self, ranges: &'a [(usize, usize)]) -> Self {
        Self { bidirectional: ranges, ..self }
    }

    pub(crate) fn check(&self, query_heads: usize) -> Result<()> {
        check_factors(self.scale, self.softcap)?;
        if let Some(r) = self.bidirectional.iter().find(|r| r.0 >= r.1) {
            return Err(Error::Unsupported {
                what: "bidirectional",
                got: format!("{r:?}"),
                why: "a range is [start, end) with start < end".into(),
            });
        }
        match self.sink_logits {
            Some(s) if s.len() != query_heads => {
                Err(Error::Length { what: "sink_logits", expected: query_heads, got: s.len() })
            }
            _ => Ok(()),
        }
    }
}

/// The factors of an attention call are numbers that it can use.
pub(crate) fn check_factors(scale: Option<f32>, softcap: Option<f32>) -> Result<()> {
    let no =
        |what, got: f32, why: &str| Err(Error::Unsupported { what, got: got.to_string(), why: why.into() });
    match (scale, softcap) {
        (Some(s), _) if !s.is_finite() => no("scale", s, "it must be finite"),
        (_, Some(c)) if !(c.is_finite() && c > 0.0) => no("softcap", c, "it must be finite and positive"),
        _ => Ok(()),
    }
}

/// Query heads that each kv head serves.
pub(crate) fn query_group(query_heads: usize, kv_heads: usize) -> Result<usize> {
    if query_heads == 0 || !query_heads.is_multiple_of(kv_heads) {
        return Err(Error::Unsupported {
            what: "query heads",
            got: query_heads.to_string(),
            why: format!("a multiple of the {kv_heads} kv heads is needed: each serves the same number"),
        });
    }
    Ok(query_heads / kv_heads)
}
