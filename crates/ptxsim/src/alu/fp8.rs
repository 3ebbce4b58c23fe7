//! The 8-bit floating formats.
//!
//! `e4m3` has no infinities: its largest number is 448 (0x7e), 0x7f is NaN. `e5m2` is f16's upper byte; conversions
//! saturate it too, at 57344 (0x7b).

use super::half::{Binary16, Half};

/// A format, for what differs.
pub(crate) trait Eight: Copy + 'static {
    /// The nearest, ties to even, of a number; saturates, NaN gives 0x7f.
    fn encode(x: f32) -> u8;
    /// To f16, exactly. NaN gives 0x7fff.
    fn decode(byte: u8) -> u16;
}

/// e4m3
#[derive(Debug, Clone, Copy)]
pub(crate) struct E4M3;
/// e5m2
#[derive(Debug, Clone, Copy)]
pub(crate) struct E5M2;

/// Rounds an f32 to `FRACTION` bits above `2^(1 - bias)`, to that number's last place below.
#[inline(always)]
fn encode<const FRACTION: u32, const BIAS: u32>(x: f32, max: f32) -> u8 {
    let sign = (x.to_bits() >> 24 & 0x80) as u8;
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
    if x.is_nan() { 0x7f } else { value as u8 | sign }
}

impl Eight for E4M3 {
    #[inline(always)]
    fn encode(x: f32) -> u8 {
        encode::<3, 7>(x, 448.0)
    }

    #[inline(always)]
    fn decode(byte: u8) -> u16 {
        let sign = u16::from(byte & 0x80) << 8;
        let magnitude = byte & 0x7f;
        let scaled = f32::from_bits(u32::from(magnitude) << 20) * f32::from_bits((127 + 120) << 23);
        if magnitude == 0x7f { 0x7fff } else { Binary16::narrow(scaled) | sign }
    }
}

impl Eight for E5M2 {
    #[inline(always)]
    fn encode(x: f32) -> u8 {
        encode::<2, 15>(x, 57344.0)
    }

    #[inline(always)]
    fn decode(byte: u8) -> u16 {
        if byte & 0x7f > 0x7c { 0x7fff } else { u16::from(byte) << 8 }
    }
}
