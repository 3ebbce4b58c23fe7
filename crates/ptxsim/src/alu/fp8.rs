//! The 8-bit floating formats.
//!
//! `e4m3` has no infinities: its largest number is 448 (0x7e), 0x7f is NaN. `e5m2` is f16's upper byte; conversions
//! saturate it too, at 57344 (0x7b).

use super::half::{Binary16, Half};

/// A format, for what differs.
pub(crate) trait Eight: Copy + 'static {
    /// The nearest, ties to even, of a number; saturates, NaN gives 0x7f.
    fn encode(x: f32) -> u32;
    /// The low byte to f16, exactly. NaN gives 0x7fff.
    fn decode(byte: u32) -> u32;
    /// The low byte to f32, exactly. NaN gives some NaN.
    fn value(byte: u32) -> f32;
}

/// e4m3
#[derive(Debug, Clone, Copy)]
pub(crate) struct E4M3;
/// e5m2
#[derive(Debug, Clone, Copy)]
pub(crate) struct E5M2;

/// Rounds an f32 to `FRACTION` bits above `2^(1 - bias)`, to that number's last place below.
#[inline(always)]
fn encode<const FRACTION: u32, const BIAS: u32>(x: f32, max: f32) -> u32 {
    let sign = x.to_bits() >> 24 & 0x80;
    let magnitude = x.abs();
    let magnitude = if magnitude > max { max } else { magnitude };
    let bits = magnitude.to_bits();
    let cut = 23 - FRACTION;
    let smallest = f32::from_bits((128 - BIAS) << 23);
    let normal = (bits + (1 << (cut - 1)) - 1 + (bits >> cut & 1)).wrapping_sub((127 - BIAS) << 23) >> cut;
    // Adding a number whose last place is the format's smallest rounds to that.
    let step = f32::from_bits((128 - BIAS - FRACTION + 23) << 23);
    let subnormal = (magnitude + step).to_bits().wrapping_sub(step.to_bits());
    let value = if magnitude < smallest { subnormal } else { normal };
    if x.is_nan() { 0x7f } else { value | sign }
}

/// The magnitude of a finite e4m3.
#[inline(always)]
fn scaled(magnitude: u32) -> f32 {
    // As an f32 with the same exponent field, subnormal or not, the number is too small by 2^120.
    f32::from_bits(magnitude << 20) * f32::from_bits((127 + 120) << 23)
}

impl Eight for E4M3 {
    #[inline(always)]
    fn encode(x: f32) -> u32 {
        encode::<3, 7>(x, 448.0)
    }

    #[inline(always)]
    fn decode(byte: u32) -> u32 {
        let sign = (byte & 0x80) << 8;
        let magnitude = byte & 0x7f;
        // Whatever is subnormal here is normal in f16.
        let normal = (scaled(magnitude).to_bits() >> 13).wrapping_sub(112 << 10);
        let value = if magnitude == 0 { 0 } else { normal };
        if magnitude == 0x7f { 0x7fff } else { value | sign }
    }

    #[inline(always)]
    fn value(byte: u32) -> f32 {
        let magnitude = byte & 0x7f;
        let bits = if magnitude == 0x7f { 0x7fff_ffff } else { scaled(magnitude).to_bits() };
        f32::from_bits(bits | (byte & 0x80) << 24)
    }
}

impl Eight for E5M2 {
    #[inline(always)]
    fn encode(x: f32) -> u32 {
        encode::<2, 15>(x, 57344.0)
    }

    #[inline(always)]
    fn decode(byte: u32) -> u32 {
        if byte & 0x7f > 0x7c { 0x7fff } else { (byte & 0xff) << 8 }
    }

    #[inline(always)]
    fn value(byte: u32) -> f32 {
        Binary16::widen((byte << 8) as u16)
    }
}
