//! What a stored vector looks like: plain data, no device.
//!
//! | format | decodes as | pair / scale |
//! |---|---|---|
//! | [`Format::F16`], [`Format::Bf16`] | itself | – |
//! | [`Format::Affine`] | `x = step * code + min` | f16 step and f16 min a group |
//! | [`Format::Fp8`] | `x = scale * float(byte)` | f32 scale |

use crate::error::{Error, Result};
use std::fmt::{Display, Formatter};

/// Bits of one affine code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Bits {
    /// 1 bit.
    B1 = 1,
    /// 2 bits.
    B2 = 2,
    /// 3 bits, stored densely: 32 codes in three 32-bit words.
    B3 = 3,
    /// 4 bits.
    B4 = 4,
    /// 8 bits.
    B8 = 8,
}

impl Bits {
    /// All widths, ascending.
    pub const ALL: [Bits; 5] = [Bits::B1, Bits::B2, Bits::B3, Bits::B4, Bits::B8];

    /// The width as a number.
    pub const fn get(self) -> usize {
        self as usize
    }

    /// The largest code, `2^bits - 1`.
    pub const fn max_code(self) -> u8 {
        ((1u16 << self as u16) - 1) as u8
    }

    /// The width with this number of bits.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for anything but 1, 2, 3, 4 and 8.
    pub fn new(bits: usize) -> Result<Self> {
        Self::ALL.into_iter().find(|b| b.get() == bits).ok_or_else(|| Error::Unsupported {
            what: "bits",
            got: bits.to_string(),
            why: "codes have 1, 2, 3, 4 or 8 bits".into(),
        })
    }
}

/// Which elements share a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Axis {
    /// `group` neighbouring channels of one token and head.
    PerToken,
    /// `group` neighbouring tokens of one channel of one head; groups start at absolute token numbers
    /// divisible by `group`.
    PerChannel,
}

/// How the pair of a group is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fit {
    /// The range of the group: min rounded down to f16, step rounded up.
    MinMax,
    /// The smallest squared error among shrunken ranges, refined by least squares (at 1 bit:
    /// `mean ± E|x - mean|`).
    ErrorOptimal,
    /// Half-quadratic quantization (Badri & Shaji 2023, <https://mobiusml.github.io/hqq_blog/>): the step of
    /// the range, and a min found by half-quadratic iterations on the `l_p` error.
    Hqq {
        /// Norm of the error, `0 < p < 1`.
        p: f32,
        /// Weight of the quadratic term.
        beta: f32,
        /// Passes at most; a group stops by itself when its error no longer falls.
        iterations: u32,
    },
}

impl Fit {
    /// HQQ with the parameters of its reference implementation: p 0.7, beta 10, 20 iterations.
    pub const HQQ: Fit = Fit::Hqq { p: 0.7, beta: 10.0, iterations: 20 };

    /// The fit used when none is named: [`Fit::ErrorOptimal`] at 1 to 4 bits, [`Fit::MinMax`] at 8.
    pub const fn default_for(bits: Bits) -> Fit {
        match bits {
            Bits::B8 => Fit::MinMax,
            _ => Fit::ErrorOptimal,
        }
    }
}

/// Group-wise affine codes: `x = step * code + min`.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Affine {
    /// Bits of a code.
    pub bits: Bits,
    /// Elements that share a pair. The last group of a row is short where `group` does not divide it. In a cache: 32, 64, 128 or the whole
    /// head per token, 32 or 64 per channel.
    pub group: usize,
    /// Which elements share a pair.
    pub axis: Axis,
    /// How the pair is chosen.
    pub fit: Fit,
    /// Block Hadamard rotation of this many channels (32, 64 or 128) before quantization.
    pub rotate: Option<usize>,
    /// Subtract the mean per channel of tile 0 before rotation (per-token keys only).
    pub center: bool,
}

impl Affine {
    /// Per-token groups of `group` channels with the default fit.
    pub const fn per_token(bits: Bits, group: usize) -> Self {
        Self { bits, group, axis: Axis::PerToken, fit: Fit::default_for(bits), rotate: None, center: false }
    }

    /// Per-channel groups of `group` tokens with the default fit.
    pub const fn per_channel(bits: Bits, group: usize) -> Self {
        Self { bits, group, axis: Axis::PerChannel, fit: Fit::default_for(bits), rotate: None, center: false }
    }

    /// The same with another fit.
    pub const fn with_fit(self, fit: Fit) -> Self {
        Self { fit, ..self }
    }

    /// The same with a block Hadamard rotation of `block` channels.
    pub const fn with_rotation(self, block: usize) -> Self {
        Self { rotate: Some(block), ..self }
    }

    /// The same with keys centred on the mean of tile 0.
    pub const fn with_center(self) -> Self {
        Self { center: true, ..self }
    }
}

/// The two FP8 types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fp8Kind {
    /// OCP E4M3FN: 4 exponent bits, 3 mantissa bits, max 448, no infinity.
    E4M3,
    /// OCP E5M2: 5 exponent bits, 2 mantissa bits, max 57344.
    E5M2,
}

impl Fp8Kind {
    /// The largest finite value.
    pub const fn max(self) -> f32 {
        match self {
            Fp8Kind::E4M3 => 448.0,
            Fp8Kind::E5M2 => 57344.0,
        }
    }
}

/// Which elements share an FP8 scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Granularity {
    /// One static scale a layer (for keys, and one for values).
    Tensor,
    /// One static scale a kv head.
    Head,
    /// One scale a token and head, computed from its values and stored in the page.
    TokenHead,
}

/// FP8 codes: `x = scale * float(byte)`, stored with saturation, round half to even.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Fp8 {
    /// E4M3 or E5M2.
    pub kind: Fp8Kind,
    /// Which elements share a scale.
    pub granularity: Granularity,
}

impl Fp8 {
    /// E4M3 with this granularity.
    pub const fn e4m3(granularity: Granularity) -> Self {
        Self { kind: Fp8Kind::E4M3, granularity }
    }

    /// E5M2 with this granularity.
    pub const fn e5m2(granularity: Granularity) -> Self {
        Self { kind: Fp8Kind::E5M2, granularity }
    }
}

/// How keys or values are stored.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Format {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// Group-wise affine codes.
    Affine(Affine),
    /// FP8 bytes with FP32 scales.
    Fp8(Fp8),
}

impl From<Affine> for Format {
    fn from(a: Affine) -> Self {
        Format::Affine(a)
    }
}

impl From<Fp8> for Format {
    fn from(f: Fp8) -> Self {
        Format::Fp8(f)
    }
}

impl Format {
    /// Bits of one stored element, pairs and scales not counted.
    pub const fn code_bits(&self) -> usize {
        match self {
            Format::F16 | Format::Bf16 => 16,
            Format::Affine(a) => a.bits.get(),
            Format::Fp8(_) => 8,
        }
    }

    /// The affine description, if it is one.
    pub const fn as_affine(&self) -> Option<&Affine> {
        match self {
            Format::Affine(a) => Some(a),
            _ => None,
        }
    }

    /// Channels of a rotation block, if rotated.
    pub fn rotation(&self) -> Option<usize> {
        self.as_affine().and_then(|a| a.rotate)
    }

    /// Whether keys are centred.
    pub fn centered(&self) -> bool {
        self.as_affine().is_some_and(|a| a.center)
    }

    /// Whether single tokens can be written on their own (direct mode): everything but per-channel groups
    /// and centred keys.
    pub fn is_per_token(&self) -> bool {
        !self.as_affine().is_some_and(|a| a.axis == Axis::PerChannel || a.center)
    }

    /// Whether a scale has to be given at construction.
    pub fn needs_scale(&self) -> bool {
        matches!(self, Format::Fp8(f) if f.granularity != Granularity::TokenHead)
    }
}

/// `f16`; `bf16`; `e4m3, a scale for each token and head`; `4 bits per token, groups of 64, hqq fit, rotated by 64, centred`.
impl Display for Format {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Format::F16 => f.write_str("f16"),
            Format::Bf16 => f.write_str("bf16"),
            Format::Affine(a) => a.fmt(f),
            Format::Fp8(a) => a.fmt(f),
        }
    }
}

impl Display for Affine {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let (bits, s) = (self.bits.get(), if self.bits == Bits::B1 { "" } else { "s" });
        let axis = match self.axis {
            Axis::PerToken => "token",
            Axis::PerChannel => "channel",
        };
        write!(f, "{bits} bit{s} per {axis}, groups of {}", self.group)?;
        match self.fit {
            fit if fit == Fit::default_for(self.bits) => {}
            Fit::MinMax => f.write_str(", min-max fit")?,
            Fit::ErrorOptimal => f.write_str(", error-optimal fit")?,
            Fit::HQQ => f.write_str(", hqq fit")?,
            Fit::Hqq { p, beta, iterations } => {
                write!(f, ", hqq fit (p {p}, beta {beta}, {iterations} iterations)")?;
            }
        }
        if let Some(block) = self.rotate {
            write!(f, ", rotated by {block}")?;
        }
        f.write_str(if self.center { ", centred" } else { "" })
    }
}

impl Display for Fp8 {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let kind = match self.kind {
            Fp8Kind::E4M3 => "e4m3",
            Fp8Kind::E5M2 => "e5m2",
        };
        let of = match self.granularity {
            Granularity::Tensor => "one scale",
            Granularity::Head => "a scale for each head",
            Granularity::TokenHead => "a scale for each token and head",
        };
        write!(f, "{kind}, {of}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_in_words() {
        let text = |f: Format| f.to_string();
        assert_eq!(text(Format::Bf16), "bf16");
        assert_eq!(text(Fp8::e5m2(Granularity::Head).into()), "e5m2, a scale for each head");
        assert_eq!(text(Affine::per_token(Bits::B1, 32).into()), "1 bit per token, groups of 32");
        assert_eq!(text(Affine::per_channel(Bits::B2, 64).into()), "2 bits per channel, groups of 64");
        let a = Affine::per_token(Bits::B4, 64).with_fit(Fit::HQQ).with_rotation(64).with_center();
        assert_eq!(text(a.into()), "4 bits per token, groups of 64, hqq fit, rotated by 64, centred");
        let fit = Fit::Hqq { p: 0.5, beta: 1.0, iterations: 3 };
        let own = Affine::per_token(Bits::B8, 128).with_fit(fit);
        assert_eq!(
            text(own.into()),
            "8 bits per token, groups of 128, hqq fit (p 0.5, beta 1, 3 iterations)"
        );
    }
}
