//! Named ways to store a cache: the rows of the tables.

use anyhow::{Result, anyhow, bail};
use candle_core::Tensor;
use qkv::{Affine, Bits, CacheConfig, Format, Fp8, Granularity, Scales};
use qkv_candle::llama::{Exact, format_name, parse_format};

/// A way to store keys and values.
#[derive(Debug, Clone, PartialEq)]
pub struct Scheme {
    /// Short name, the first column.
    pub name: String,
    /// The line of the chart it belongs to.
    pub family: &'static str,
    /// Key format.
    pub key: Format,
    /// Value format.
    pub value: Format,
    /// R; `None` = direct mode.
    pub residual: Option<usize>,
    /// First tokens kept exact.
    pub sinks: usize,
}

/// The lines of the chart.
pub const FAMILIES: [&str; 4] = ["qkv", "qkv, no exact tokens", "qkv fp8", "qkv, other"];

impl Scheme {
    /// The recommended formats at a width, with the default window and sinks.
    pub fn width(bits: Bits, head_dim: usize) -> Self {
        let (key, value) = CacheConfig::default_formats(bits, head_dim);
        let name = format!("{} bit", bits.get());
        Self { name, family: FAMILIES[0], key, value, residual: Some(64), sinks: 4 }
    }

    /// Half precision.
    pub fn half() -> Self {
        let name = "f16".into();
        Self { name, family: FAMILIES[0], key: Format::F16, value: Format::F16, residual: Some(64), sinks: 4 }
    }

    /// E4M3 with one scale a token and head.
    pub fn fp8() -> Self {
        let f: Format = Fp8::e4m3(Granularity::TokenHead).into();
        Self { name: "fp8".into(), family: FAMILIES[2], key: f, value: f, residual: Some(64), sinks: 4 }
    }

    /// E4M3 with one static scale a tensor, every token quantized: what engines call an fp8 cache.
    pub fn fp8_tensor() -> Self {
        let f: Format = Fp8::e4m3(Granularity::Tensor).into();
        let name = "fp8 per tensor, direct".into();
        Self { name, family: FAMILIES[2], key: f, value: f, residual: None, sinks: 0 }
    }

    /// The schemes of the demo: f16, fp8 and 8, 4, 3, 2, 1 bits.
    pub fn demo(head_dim: usize) -> Vec<Self> {
        let mut all = vec![Self::half(), Self::fp8()];
        all.extend(Bits::ALL.iter().rev().map(|b| Self::width(*b, head_dim)));
        all
    }

    /// The same without window and sinks beyond the open tile.
    pub fn bare(self) -> Self {
        let name = format!("{}, R=0, no sinks", self.name);
        let family = if self.family == FAMILIES[0] { FAMILIES[1] } else { self.family };
        Self { name, family, residual: Some(0), sinks: 0, ..self }
    }

    /// The same with every token quantized as it comes: direct mode, per token. Up to 4 bits keys and values are
    /// rotated, which is what helps most where no group of tokens can be waited for.
    pub fn direct(self, head_dim: usize) -> Self {
        let block = [128, 64, 32].into_iter().find(|b| head_dim.is_multiple_of(*b));
        let per_token = |f: Format| match f {
            Format::Affine(a) => {
                let group = a.group.min(head_dim);
                let per_token = Affine::per_token(a.bits, group).with_fit(a.fit);
                match block {
                    Some(b) if a.bits.get() <= 4 => per_token.with_rotation(b).into(),
                    _ => per_token.into(),
                }
            }
            other => other,
        };
        let (key, value) = (per_token(self.key), per_token(self.value));
        Self { name: format!("{}, direct", self.name), key, value, residual: None, sinks: 0, ..self }
    }

    /// Reads `f16`, `fp8`, `8`, `4`, `3`, `2`, `1` (recommended formats), the same with `-bare`, `fp8-tensor`, or
    /// `key/value/R/sinks`, for example `int4-c64/int4-t64/128/4` or `e4m3/e4m3/direct`.
    ///
    /// # Errors
    /// A sentence that names what is not known.
    pub fn parse(text: &str, head_dim: usize) -> Result<Self> {
        if let Some(name) = text.strip_suffix("-bare") {
            return Ok(Self::parse(name, head_dim)?.bare());
        }
        match text {
            "f16" => return Ok(Self::half()),
            "fp8" => return Ok(Self::fp8()),
            "fp8-tensor" => return Ok(Self::fp8_tensor()),
            _ => {}
        }
        if let Ok(bits) = text.parse::<usize>() {
            return Ok(Self::width(Bits::new(bits)?, head_dim));
        }
        let parts: Vec<&str> = text.split('/').collect();
        let (key, value) = match parts[..] {
            [k, v, ..] => (k, v),
            _ => bail!("scheme {text:?} is not known: use f16, fp8, a number of bits, or key/value/R/sinks"),
        };
        let number = |i: usize, default: usize| -> Result<usize> {
            parts.get(i).map_or(Ok(default), |x| {
                x.parse().map_err(|_| anyhow!("{x:?} in scheme {text:?} is no number"))
            })
        };
        let direct = parts.get(2) == Some(&"direct");
        Ok(Self {
            name: text.to_string(),
            family: FAMILIES[3],
            key: parse_format(key).map_err(|e| anyhow!(e))?,
            value: parse_format(value).map_err(|e| anyhow!(e))?,
            residual: if direct { None } else { Some(number(2, 64)?) },
            sinks: number(3, if direct { 0 } else { 4 })?,
        })
    }

    /// Formats, window and sinks in words.
    pub fn detail(&self) -> String {
        let (k, v) = (format_name(&self.key), format_name(&self.value));
        let formats = if k == v { k } else { format!("K {k}, V {v}") };
        match self.residual {
            None => format!("{formats}, direct"),
            Some(r) => format!("{formats}, R={r}, {} sinks", self.sinks),
        }
    }

    /// `base` (dims and capacity) with this scheme's formats, window and sinks. Static FP8 scales are the absolute
    /// maximum of `prefix` over the largest number of the type, a layer, for keys and for values; 1 without a prefix.
    ///
    /// # Errors
    /// If the configuration is refused, or the prefix does not hold all layers.
    pub fn config(&self, base: CacheConfig, prefix: Option<&Exact>) -> Result<CacheConfig> {
        let layers = base.layers.len();
        let mut config = base
            .with_key(self.key)
            .with_value(self.value)
            .with_residual(self.residual)
            .with_sinks(self.sinks);
        if self.key.needs_scale() || self.value.needs_scale() {
            config = config.with_scales(match prefix {
                None => Scales::unit(layers),
                Some(exact) => {
                    let (mut keys, mut values) = (Vec::new(), Vec::new());
                    for layer in 0..layers {
                        let (k, v) =
                            exact.layer(layer).ok_or_else(|| anyhow!("layer {layer} holds no keys"))?;
                        keys.push(absolute_max(k)? / largest(&self.key));
                        values.push(absolute_max(v)? / largest(&self.value));
                    }
                    Scales::new(layers, keys, values)?
                }
            });
        }
        config.validate()?;
        Ok(config)
    }
}

fn largest(format: &Format) -> f32 {
    match format {
        Format::Fp8(f) => f.kind.max(),
        _ => 1.0,
    }
}

fn absolute_max(x: &Tensor) -> Result<f32> {
    Ok(x.abs()?.max_all()?.to_scalar::<f32>()?)
}

/// Bits an element of whole blocks: codes, pairs and padding, without window and sinks.
///
/// # Errors
/// If the configuration is refused.
pub fn bits_per_element(config: &CacheConfig) -> Result<f64> {
    let elements =
        config.layers.len() * config.kv_heads * (config.key_dim + config.value_dim) * qkv::layout::TILE;
    Ok(config.block_bytes()? as f64 * 8.0 / elements as f64)
}

/// Bytes of a plain half-precision cache.
pub fn half_bytes(config: &CacheConfig, tokens: usize) -> usize {
    config.layers.len() * config.kv_heads * (config.key_dim + config.value_dim) * 2 * tokens
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemes_are_parsed() {
        assert_eq!(Scheme::parse("4", 64).unwrap(), Scheme::width(Bits::B4, 64));
        assert_eq!(Scheme::parse("2-bare", 64).unwrap().residual, Some(0));
        let s = Scheme::parse("int4-c64/int4-t64-r64/128/4", 64).unwrap();
        assert_eq!((s.residual, s.sinks, s.value.rotation()), (Some(128), 4, Some(64)));
        assert_eq!(Scheme::parse("e4m3/e5m2/direct", 64).unwrap().residual, None);
        for wrong in ["5", "q4", "int4-c64", "int4-c64/int4-q2", "f16/f16/x"] {
            assert!(Scheme::parse(wrong, 64).is_err(), "{wrong}");
        }
    }

    #[test]
    fn bits_count_codes_and_pairs() {
        let bits = |s: &str| {
            let s = Scheme::parse(s, 64).unwrap();
            let c = CacheConfig::new(2, 3, 64).with_key(s.key).with_value(s.value);
            bits_per_element(&c).unwrap()
        };
        assert_eq!(bits("f16"), 16.0);
        assert_eq!(bits("4"), 4.5);
        assert_eq!(bits("2"), 3.0);
        assert_eq!(bits("8"), 8.5);
        assert_eq!(bits("fp8"), 8.5);
        assert_eq!(half_bytes(&CacheConfig::new(32, 32, 128), 1), 524_288);
    }

    #[test]
    fn every_demo_scheme_fits_the_model() {
        let mut all = Scheme::demo(64);
        all.extend(Scheme::demo(64).into_iter().map(Scheme::bare));
        all.extend(Scheme::demo(64).into_iter().map(|s| s.direct(64)));
        all.push(Scheme::fp8_tensor());
        for s in all {
            s.config(CacheConfig::new(30, 3, 64), None).unwrap();
        }
    }

    #[test]
    fn static_scales_come_from_the_prefix() {
        use candle_core::Device;
        use qkv_candle::llama::Attention;
        let mut exact = Exact::new(1);
        let k = Tensor::new(&[[[[1f32, -4.48], [2.0, 3.0]]]], &Device::Cpu).unwrap();
        let v = Tensor::new(&[[[[8.96f32, 0.0], [0.5, -1.0]]]], &Device::Cpu).unwrap();
        exact.attend(0, &k, &k, &v).unwrap();
        let c = Scheme::fp8_tensor().config(CacheConfig::new(1, 1, 16), Some(&exact)).unwrap();
        let scales = c.scales.unwrap();
        assert!((scales.key(0, 0).unwrap() - 0.01).abs() < 1e-8);
        assert!((scales.value(0, 0).unwrap() - 0.02).abs() < 1e-8);
    }
}
