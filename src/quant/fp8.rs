//! FP8 bytes: OCP E4M3FN and E5M2, round half to even, stored with saturation (as `cvt.rn.satfinite` does): any
//! overflow and infinity become the largest finite value, NaN becomes 0x7f, the sign of zero is kept.

use crate::format::Fp8Kind;
use crate::simd::{Isa, dispatch};

pub use crate::quant::fp8_tensor::{Fp8Tensor, decode, encode, scales, value};

/// Byte of one value; `E5` chooses the kind at compile time. Branch-free, so that a loop of it vectorizes.
#[inline(always)]
fn encode_one<const E5: bool>(v: f32) -> u8 {
    let (max, shift, bias) = if E5 { (57344.0f32, 21u32, 15u32) } else { (448.0, 20, 7) };
    // Adding this makes the last place of the sum the smallest subnormal: 2^-9 (E4M3), 2^-16 (E5M2).
    let magic = if E5 { 128.0f32 } else { 16384.0 };
    let min_normal = f32::from_bits((128 - bias) << 23);
    let bits = v.to_bits();
    let a = f32::from_bits(bits & 0x7fff_ffff);
    let a = if a > max { max } else { a };
    let b = a.to_bits();
    let normal = (b.wrapping_add((1 << (shift - 1)) - 1 + ((b >> shift) & 1)) >> shift)
        .wrapping_sub((127 - bias) << (23 - shift));
    let subnormal = (a + magic).to_bits().wrapping_sub(magic.to_bits());
    let code = if a < min_normal { subnormal } else { normal };
    let code = code & 0x7f | bits >> 24 & 0x80;
    (if v.is_nan() { 0x7f } else { code }) as u8
}

/// Value of one byte, exact.
#[inline(always)]
fn decode_one<const E5: bool>(byte: u8) -> f32 {
    let (shift, bias) = if E5 { (21u32, 15u32) } else { (20, 7) };
    let smallest = f32::from_bits((127 + 1 - bias - (23 - shift)) << 23);
    let a = (byte & 0x7f) as u32;
    let normal = f32::from_bits((a << shift).wrapping_add((127 - bias) << 23));
    let subnormal = a as i32 as f32 * smallest;
    let x = if a < 1 << (23 - shift) { subnormal } else { normal };
    let x = if E5 {
        // Exponent 31 is infinity and NaN.
        let special = if a == 0x7c { f32::INFINITY } else { f32::NAN };
        if a >= 0x7c { special } else { x }
    } else if a == 0x7f {
        f32::NAN
    } else {
        x
    };
    f32::from_bits(x.to_bits() | (byte as u32 & 0x80) << 24)
}

#[inline(always)]
fn encode_body<const E5: bool, const FMA: bool>(scale: f32, x: &[f32], out: &mut [u8]) {
    for (o, x) in out.iter_mut().zip(x) {
        *o = encode_one::<E5>(*x / scale);
    }
}

#[inline(always)]
fn decode_body<const E5: bool, const FMA: bool>(scale: f32, bytes: &[u8], out: &mut [f32]) {
    for (o, b) in out.iter_mut().zip(bytes) {
        *o = decode_one::<E5>(*b) * scale;
    }
}

dispatch! { fn encode_kind<const E5: bool>(scale: f32, x: &[f32], out: &mut [u8]) = encode_body; }
dispatch! { fn decode_kind<const E5: bool>(scale: f32, bytes: &[u8], out: &mut [f32]) = decode_body; }

/// `byte = satfinite(x / scale)`, with IEEE division, for a row.
#[inline]
pub(crate) fn encode_row(isa: Isa, kind: Fp8Kind, scale: f32, x: &[f32], out: &mut [u8]) {
    match kind {
        Fp8Kind::E4M3 => encode_kind::<false>(isa, scale, x, out),
        Fp8Kind::E5M2 => encode_kind::<true>(isa, scale, x, out),
    }
}

/// `x = scale * float(byte)`, for a row.
#[inline]
pub(crate) fn decode_row(isa: Isa, kind: Fp8Kind, scale: f32, bytes: &[u8], out: &mut [f32]) {
    match kind {
        Fp8Kind::E4M3 => decode_kind::<false>(isa, scale, bytes, out),
        Fp8Kind::E5M2 => decode_kind::<true>(isa, scale, bytes, out),
    }
}

/// The largest finite magnitude of a row, 0 if there is none.
pub(crate) fn finite_amax(x: &[f32]) -> f32 {
    let mut amax = 0f32;
    for v in x {
        let a = v.abs();
        if a <= f32::MAX && a > amax {
            amax = a;
        }
    }
    amax
}

/// The scale that maps this magnitude to the largest finite byte, at least `f32::MIN_POSITIVE`; 1.0 for 0.
pub(crate) fn scale_for(kind: Fp8Kind, amax: f32) -> f32 {
    if amax == 0.0 { 1.0 } else { (amax / kind.max()).max(f32::MIN_POSITIVE) }
}

/// The scale of a row, from its largest finite magnitude.
pub(crate) fn token_head_scale(kind: Fp8Kind, x: &[f32]) -> f32 {
    scale_for(kind, finite_amax(x))
}

/// Finite elements that saturate under this scale: those that would round beyond the largest finite byte.
pub(crate) fn saturated(kind: Fp8Kind, scale: f32, x: &[f32]) -> usize {
    // The ties above the largest values: 464 rounds down to even, 61440 up.
    let lost = |a: f32| match kind {
        Fp8Kind::E4M3 => a > 464.0,
        Fp8Kind::E5M2 => a >= 61440.0,
    };
    x.iter().filter(|v| v.is_finite() && lost((*v / scale).abs())).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> [(Fp8Kind, u32, i32); 2] {
        [(Fp8Kind::E4M3, 3, 7), (Fp8Kind::E5M2, 2, 15)]
    }

    /// Value of a byte from the definition, in f64; `None` for infinity and NaN.
    fn value(kind: Fp8Kind, byte: u8) -> Option<f64> {
        let (_, mantissa, bias) = all().into_iter().find(|x| x.0 == kind).unwrap();
        let (e, m) = (((byte & 0x7f) >> mantissa) as i32, (byte & ((1 << mantissa) - 1)) as f64);
        let special = match kind {
            Fp8Kind::E4M3 => byte & 0x7f == 0x7f,
            Fp8Kind::E5M2 => byte & 0x7f >= 0x7c,
        };
        let unit = 2f64.powi(-(mantissa as i32));
        let magnitude =
            if e == 0 { m * unit * 2f64.powi(1 - bias) } else { (1.0 + m * unit) * 2f64.powi(e - bias) };
        (!special).then_some(if byte & 0x80 != 0 { -magnitude } else { magnitude })
    }

    /// Nearest finite byte, ties to the even one: a search, not arithmetic.
    fn nearest(kind: Fp8Kind, x: f64) -> u8 {
        let sign = if x.is_sign_negative() { 0x80 } else { 0 };
        let mut best = (f64::INFINITY, 0u8);
        for b in 0..0x80u8 {
            let Some(v) = value(kind, b) else { continue };
            let d = (v - x.abs()).abs();
            if d < best.0 || (d == best.0 && b % 2 == 0) {
                best = (d, b);
            }
        }
        best.1 | sign
    }

    #[test]
    fn every_byte_decodes_to_its_definition_and_encodes_back() {
        for (kind, ..) in all() {
            for &isa in Isa::available() {
                let bytes: Vec<u8> = (0..=255).collect();
                let mut x = vec![0f32; 256];
                decode_row(isa, kind, 1.0, &bytes, &mut x);
                let mut back = vec![0u8; 256];
                encode_row(isa, kind, 1.0, &x, &mut back);
                for b in 0..=255u8 {
                    match value(kind, b) {
                        Some(v) => {
                            assert_eq!(
                                x[b as usize].to_bits(),
                                (v as f32).to_bits(),
                                "{kind:?} {b:#x} {isa:?}"
                            );
                            assert_eq!(back[b as usize], b);
                        }
                        None if kind == Fp8Kind::E5M2 && b & 0x7f == 0x7c => {
                            assert_eq!(
                                x[b as usize],
                                if b < 0x80 { f32::INFINITY } else { f32::NEG_INFINITY }
                            );
                            assert_eq!(back[b as usize] & 0x7f, 0x7b);
                        }
                        None => {
                            assert!(x[b as usize].is_nan());
                            assert_eq!(back[b as usize], 0x7f);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn all_f16_and_bf16_values_and_ties_round_as_a_search_says() {
        for (kind, ..) in all() {
            let mut x: Vec<f32> = (0..=u16::MAX).map(|b| half::f16::from_bits(b).to_f32()).collect();
            x.extend((0..=u16::MAX).map(|b| half::bf16::from_bits(b).to_f32()));
            for b in 0..0x7eu8 {
                if let (Some(a), Some(c)) = (value(kind, b), value(kind, b + 1)) {
                    let tie = ((a + c) / 2.0) as f32;
                    x.extend([tie, -tie, tie.next_up(), tie.next_down()]);
                }
            }
            x.extend([464.0, 464.1, 61440.0, 61441.0, f32::MAX, f32::MIN_POSITIVE, 1e-40]);
            for &isa in Isa::available() {
                let mut out = vec![0u8; x.len()];
                encode_row(isa, kind, 1.0, &x, &mut out);
                for (v, o) in x.iter().zip(&out) {
                    let want = if v.is_nan() {
                        0x7f
                    } else {
                        nearest(kind, (*v as f64).clamp(-kind.max() as f64, kind.max() as f64))
                    };
                    assert_eq!(*o, want, "{kind:?} {v:e} {isa:?}");
                }
            }
        }
    }

    #[test]
    fn the_scale_ignores_what_is_not_finite() {
        assert_eq!(token_head_scale(Fp8Kind::E4M3, &[1.0, -896.0, f32::NAN, f32::INFINITY]), 2.0);
        assert_eq!(token_head_scale(Fp8Kind::E4M3, &[0.0, -0.0]), 1.0);
        assert_eq!(token_head_scale(Fp8Kind::E5M2, &[f32::NAN]), 1.0);
        assert_eq!(token_head_scale(Fp8Kind::E4M3, &[1e-44]), f32::MIN_POSITIVE);
        assert_eq!(saturated(Fp8Kind::E4M3, 1.0, &[464.0, 465.0, f32::NAN, f32::INFINITY, -500.0]), 2);
    }
}
