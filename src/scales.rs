//! Static FP8 scales. They live inside the cache, so writing and reading cannot disagree.

use crate::error::{Error, Result};

/// Scales beyond these have no use, and their products with codes and queries would leave f32.
const SMALLEST: f32 = 1e-30;
const LARGEST: f32 = 1e30;

/// Static FP8 scales of keys and values: one a layer, or one a layer and kv head.
///
/// A format with [`Granularity::Tensor`](crate::Granularity::Tensor) or
/// [`Granularity::Head`](crate::Granularity::Head) needs them; unit scales have to be asked for by name.
///
/// A scale multiplies the code (`x = scale * float(byte)`), so it is about the largest magnitude over the largest byte
/// ([`Fp8Kind::max`](crate::Fp8Kind::max)), not its inverse; [`quant::fp8::scales`](crate::quant::fp8::scales) computes it from
/// a calibration tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Scales {
    key: Vec<f32>,
    value: Vec<f32>,
    layers: usize,
}

impl Scales {
    /// Scale 1 for every layer: plain FP8 storage.
    pub fn unit(layers: usize) -> Self {
        Self { key: vec![1.0; layers], value: vec![1.0; layers], layers }
    }

    /// One scale a layer, or one a layer and kv head (`[layers][kv_heads]`, row-major), for keys and values. All layers have
    /// an entry in both; where a layer's format is not static FP8 it is not read (give 1). Keys and values may differ in
    /// the number a layer. `Tensor` takes one a layer only; `Head` takes either.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if a length is no multiple of `layers`, or for a scale that is not between 1e-30 and
    /// 1e30.
    pub fn new(layers: usize, key: Vec<f32>, value: Vec<f32>) -> Result<Self> {
        for (what, s) in [("key scales", &key), ("value scales", &value)] {
            if layers == 0 {
                let why = "a cache has at least one".into();
                return Err(Error::Unsupported { what: "layers", got: "0".into(), why });
            }
            if s.is_empty() || !s.len().is_multiple_of(layers) {
                return Err(Error::Unsupported {
                    what,
                    got: format!("{} values", s.len()),
                    why: format!(
                        "{layers} layers need {layers} values or {layers} * kv_heads; layers that are not static FP8 need an \
                         entry too, give 1"
                    ),
                });
            }
            if let Some(x) = s.iter().find(|x| !(SMALLEST..=LARGEST).contains(*x)) {
                return Err(Error::Unsupported {
                    what,
                    got: x.to_string(),
                    why: format!(
                        "an FP8 scale lies between {SMALLEST:e} and {LARGEST:e}; products with it stay finite there"
                    ),
                });
            }
        }
        Ok(Self { key, value, layers })
    }

    /// Layers covered.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Scales a layer holds: (keys, values).
    pub fn per_layer(&self) -> (usize, usize) {
        (self.key.len() / self.layers.max(1), self.value.len() / self.layers.max(1))
    }

    /// The scale of keys of a layer and head, if held.
    pub fn key(&self, layer: usize, head: usize) -> Option<f32> {
        Self::at(&self.key, self.layers, layer, head)
    }

    /// The scale of values of a layer and head, if held.
    pub fn value(&self, layer: usize, head: usize) -> Option<f32> {
        Self::at(&self.value, self.layers, layer, head)
    }

    fn at(s: &[f32], layers: usize, layer: usize, head: usize) -> Option<f32> {
        let per = s.len() / layers.max(1);
        if layer >= layers {
            return None;
        }
        if per == 1 {
            s.get(layer).copied()
        } else if head < per {
            s.get(layer * per + head).copied()
        } else {
            None
        }
    }
}
