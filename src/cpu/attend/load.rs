//! What stored rows are made of, and how eight elements become f32 in plain code (`lanes.rs` has the same in
//! registers).
//!
//! A **kind** says what a row is made of and is a constant of every kernel, so unpacking happens right before the
//! multiplication. Affine codes come out as plain integers: step and min are applied elsewhere (`tile.rs`).

/// Affine codes have their number of bits as kind.
pub(super) const E4M3: usize = 9;
/// FP8 with 5 exponent bits.
pub(super) const E5M2: usize = 10;
/// IEEE half precision.
pub(super) const F16: usize = 16;
/// bfloat16.
pub(super) const BF16: usize = 17;
/// IEEE single precision.
pub(super) const F32: usize = 32;

/// Bytes of eight elements of a kind.
pub(super) const fn bytes_of_eight(kind: usize) -> usize {
    match kind {
        E4M3 | E5M2 => 8,
        F16 | BF16 => 16,
        F32 => 32,
        bits => bits,
    }
}

/// Evaluates an expression with the kind and its bytes as constants, for `all` kinds, `packed` ones (all but f32) or
/// `affine` ones.
macro_rules! with_kind {
    ($kind:expr, |$k:ident, $b:ident| $e:expr; $($n:literal)+) => {
        match $kind {
            $($n => { const $k: usize = $n; const $b: usize = $crate::cpu::attend::load::bytes_of_eight($n); $e })+
            other => unreachable!("row kind {other}"),
        }
    };
    ($kind:expr, |$k:ident, $b:ident| $e:expr; all) => {
        $crate::cpu::attend::load::with_kind!($kind, |$k, $b| $e; 1 2 3 4 8 9 10 16 17 32)
    };
    ($kind:expr, |$k:ident, $b:ident| $e:expr; packed) => {
        $crate::cpu::attend::load::with_kind!($kind, |$k, $b| $e; 1 2 3 4 8 9 10 16 17)
    };
    ($kind:expr, |$k:ident, $b:ident| $e:expr; affine) => {
        $crate::cpu::attend::load::with_kind!($kind, |$k, $b| $e; 1 2 3 4 8)
    };
}
pub(super) use with_kind;

/// What kernels leave out when they unpack a kind; it is folded into q, a score or a weight. E4M3 bits that are moved
/// into f16 make 2^-8 of the value.
pub(super) const fn factor(kind: usize) -> f32 {
    if kind == E4M3 { 256.0 } else { 1.0 }
}

/// Eight elements of a row, divided by the factor of the kind.
#[inline(always)]
pub(super) fn load8<const KIND: usize, const BYTES: usize>(b: &[u8; BYTES]) -> [f32; 8] {
    let word = |i: usize| u16::from_le_bytes([b[2 * i], b[2 * i + 1]]);
    match KIND {
        F32 => {
            std::array::from_fn(|i| f32::from_le_bytes([b[4 * i], b[4 * i + 1], b[4 * i + 2], b[4 * i + 3]]))
        }
        BF16 => std::array::from_fn(|i| f32::from_bits((word(i) as u32) << 16)),
        F16 => std::array::from_fn(|i| half(word(i))),
        E4M3 => std::array::from_fn(|i| e4m3(b[i]) / factor(E4M3)),
        E5M2 => std::array::from_fn(|i| e5m2(b[i])),
        8 => std::array::from_fn(|i| b[i] as i32 as f32),
        _ => {
            let mut w = [0u8; 4];
            w[..BYTES].copy_from_slice(b);
            let w = u32::from_le_bytes(w);
            std::array::from_fn(|i| ((w >> (KIND * i)) & ((1 << KIND) - 1)) as i32 as f32)
        }
    }
}

/// One f16 number without the help of the CPU: the exponent is rebiased by a multiplication, which also makes
/// subnormals right.
#[inline(always)]
pub(super) fn half(h: u16) -> f32 {
    let magnitude = ((h & 0x7fff) as u32) << 13;
    let scaled = f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23);
    let bits = if magnitude >= 0x0f80_0000 { magnitude | 0x7f80_0000 } else { scaled.to_bits() };
    f32::from_bits(bits | ((h & 0x8000) as u32) << 16)
}

/// One E4M3 byte. Numbers below the normal ones are built one exponent up and brought down by a subtraction.
#[inline(always)]
fn e4m3(byte: u8) -> f32 {
    let magnitude = (byte & 0x7f) as u32;
    let subnormal = f32::from_bits((magnitude << 20) + (121 << 23)) - 0.015625;
    let bits = if magnitude < 8 { subnormal.to_bits() } else { (magnitude << 20) + (120 << 23) };
    let bits = if magnitude == 0x7f { 0x7fc0_0000 } else { bits };
    f32::from_bits(bits | ((byte & 0x80) as u32) << 24)
}

/// One E5M2 byte.
#[inline(always)]
fn e5m2(byte: u8) -> f32 {
    let magnitude = (byte & 0x7f) as u32;
    let subnormal = f32::from_bits((magnitude << 21) + (113 << 23)) - f32::from_bits((127 - 14) << 23);
    let bits = if magnitude < 4 { subnormal.to_bits() } else { (magnitude << 21) + (112 << 23) };
    let bits = if magnitude >= 0x7c { (magnitude << 21) | 0x7f80_0000 } else { bits };
    f32::from_bits(bits | ((byte & 0x80) as u32) << 24)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    /// The value of a small float from its definition.
    fn decode(byte: u8, exponent_bits: i32, has_infinity: bool) -> f64 {
        let mantissa_bits = 7 - exponent_bits;
        let bias = (1 << (exponent_bits - 1)) - 1;
        let e = ((byte & 0x7f) >> mantissa_bits) as i32;
        let m = (byte & ((1 << mantissa_bits) - 1)) as f64 / (1 << mantissa_bits) as f64;
        let sign = if byte & 0x80 != 0 { -1.0 } else { 1.0 };
        let top = (1 << exponent_bits) - 1;
        if has_infinity && e == top {
            return if m == 0.0 { sign * f64::INFINITY } else { f64::NAN };
        }
        if !has_infinity && byte & 0x7f == 0x7f {
            return f64::NAN;
        }
        sign * if e == 0 { m * 2f64.powi(1 - bias) } else { (1.0 + m) * 2f64.powi(e - bias) }
    }

    fn same(a: f32, b: f64) -> bool {
        a.is_nan() && b.is_nan() || (a as f64 == b && a.is_sign_negative() == b.is_sign_negative())
    }

    #[test]
    fn every_fp8_byte_decodes_as_its_definition_says() {
        for byte in 0..=255u8 {
            assert!(same(e4m3(byte), decode(byte, 4, false)), "e4m3 {byte:#x}: {}", e4m3(byte));
            assert!(same(e5m2(byte), decode(byte, 5, true)), "e5m2 {byte:#x}: {}", e5m2(byte));
        }
    }

    #[test]
    fn every_f16_decodes_without_hardware() {
        for h in 0..=u16::MAX {
            let want = f16::from_bits(h).to_f32();
            let got = half(h);
            assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{h:#x}");
        }
    }
}
