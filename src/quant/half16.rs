//! f16 to f32 and back without calls, for the inner loops of the fits: the same results as the `half` crate.

/// Value of f16 bits; NaN keeps its payload.
#[inline(always)]
pub(crate) fn decode(h: u16) -> f32 {
    let (sign, a) = ((h as u32 & 0x8000) << 16, h as u32 & 0x7fff);
    let bits = if a >= 0x7c00 {
        a << 13 | 0x7f80_0000
    } else if a >= 0x400 {
        (a << 13) + (112 << 23)
    } else {
        (a as i32 as f32 * f32::from_bits((127 - 24) << 23)).to_bits()
    };
    f32::from_bits(bits | sign)
}

/// The nearest f16 value, half to even, as f32. |x| <= 65504.
#[inline(always)]
pub(crate) fn round(x: f32) -> f32 {
    let (sign, a) = (x.to_bits() & 0x8000_0000, x.to_bits() & 0x7fff_ffff);
    let normal = (a + 0xfff + (a >> 13 & 1)) & !0x1fff;
    // The last place of numbers from 1/2 to 1 is that of f16 subnormals.
    let small = ((f32::from_bits(a) + 0.5) - 0.5).to_bits();
    f32::from_bits(if a < 113 << 23 { small } else { normal } | sign)
}

/// Bits of an f16 value given as f32.
#[inline(always)]
pub(crate) fn bits(x: f32) -> u16 {
    let (sign, a) = ((x.to_bits() >> 16 & 0x8000) as u16, x.to_bits() & 0x7fff_ffff);
    let magnitude = if a < 113 << 23 {
        (f32::from_bits(a) * f32::from_bits((127 + 24) << 23)) as u16
    } else {
        ((a >> 13) - (112 << 10)) as u16
    };
    sign | magnitude
}

/// Bits of the largest f16 that is not above `x`, |x| <= 65504.
#[inline(always)]
pub(crate) fn bits_down(x: f32) -> u16 {
    let r = round(x);
    let h = bits(r);
    if r <= x {
        return h;
    }
    match h {
        0 | 0x8000 => 0x8001,
        h if h & 0x8000 == 0 => h - 1,
        h => h + 1,
    }
}

/// Bits of the smallest f16 that is not below `x` >= 0, at most 65504.
#[inline(always)]
pub(crate) fn bits_up(x: f32) -> u16 {
    if x >= 65504.0 {
        return 0x7bff;
    }
    let r = round(x);
    bits(r) + (r < x) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    #[test]
    fn equals_the_half_crate() {
        for h in 0..=u16::MAX {
            let want = f16::from_bits(h).to_f32();
            assert!(decode(h).to_bits() == want.to_bits() || (want.is_nan() && decode(h).is_nan()), "{h:#x}");
            if want.is_finite() {
                assert_eq!(bits(want), h);
            }
        }
        let mut x = 1e-9f32;
        while x < 65504.0 {
            for v in [x, -x, round(x).next_up(), round(x).next_down()] {
                let h = f16::from_f32(v);
                assert_eq!(bits(round(v)), h.to_bits(), "{v:e}");
                let down = f16::from_bits(bits_down(v)).to_f32();
                assert!(
                    down <= v && f16::from_bits(bits_down(v)).to_f32() >= v - (v.abs() / 1024.0).max(6e-8)
                );
                if v >= 0.0 {
                    let up = f16::from_bits(bits_up(v)).to_f32();
                    assert!(up >= v && up <= v + (v / 1024.0).max(6e-8), "{v:e} {up:e}");
                }
            }
            x *= 1.0007;
        }
        // Halfway between two subnormals, and between two normals.
        for (v, want) in [(2f32.powi(-25), 0), (1.5 * 2f32.powi(-24), 2), (1.0 + 2f32.powi(-11), 0x3c00)] {
            assert_eq!((bits(round(v)), f16::from_f32(v).to_bits()), (want, want));
        }
        assert_eq!((bits_up(1e9), bits_down(-65504.0), bits_down(0.0)), (0x7bff, 0xfbff, 0));
    }
}
