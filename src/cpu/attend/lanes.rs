//! Eight f32 lanes: plain arrays, or AVX2 registers.
//!
//! Elsewhere in this crate the compiler turns arrays of lanes into vectors by itself. For the kernels here, with eight
//! sums in registers next to unpacking, it does not (it was measured: ten times slower, and different with every
//! compiler flag), so the few operations they need are spelled out. Kernels are written once over [`Lanes`].

use super::load;
use super::softmax::exp_lane;

/// Eight lanes and what the kernels do with them. Arguments and results are by lane unless said otherwise.
pub(super) trait Lanes: Copy {
    /// All lanes equal.
    fn splat(x: f32) -> Self;
    fn load(x: &[f32; 8]) -> Self;
    fn store(self, out: &mut [f32; 8]);
    fn add(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    /// `self * b + c`, contracted where the machine can.
    fn fma(self, b: Self, c: Self) -> Self;
    /// The larger; `other` where one is NaN.
    fn max(self, other: Self) -> Self;
    /// `e^x`, see [`exp_lane`].
    fn exp(self) -> Self;
    /// Lanes as tokens from `at` on: those outside `from..to` become -inf. Also the bits of those inside that were not
    /// -inf.
    fn mask(self, at: usize, from: usize, to: usize) -> (Self, u64);
    /// Eight elements of a row of a kind, divided by its [`load::factor`].
    fn codes<const KIND: usize, const BYTES: usize>(b: &[u8; BYTES]) -> Self;
    /// Eight pairs: steps and mins.
    fn pairs(b: &[u8; 32]) -> (Self, Self);
    /// The sums of the lanes of eight vectors.
    fn sums(a: [Self; 8]) -> [f32; 8];

    /// The sum of the lanes.
    #[inline(always)]
    fn sum(self) -> f32 {
        let mut x = [0f32; 8];
        self.store(&mut x);
        ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]))
    }
}

/// Lanes as an array.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plain([f32; 8]);

impl Plain {
    #[inline(always)]
    fn with(self, other: Plain, f: impl Fn(f32, f32) -> f32) -> Plain {
        Plain(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

impl Lanes for Plain {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        Plain([x; 8])
    }
    #[inline(always)]
    fn load(x: &[f32; 8]) -> Self {
        Plain(*x)
    }
    #[inline(always)]
    fn store(self, out: &mut [f32; 8]) {
        *out = self.0;
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.with(other, |a, b| a + b)
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.with(other, |a, b| a * b)
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        self.mul(b).add(c)
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.with(other, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn exp(self) -> Self {
        Plain(self.0.map(exp_lane::<false>))
    }
    #[inline(always)]
    fn mask(self, at: usize, from: usize, to: usize) -> (Self, u64) {
        let mut bits = 0;
        let x = std::array::from_fn(|i| {
            let seen = (from..to).contains(&(at + i));
            let x = if seen { self.0[i] } else { f32::NEG_INFINITY };
            bits |= ((x != f32::NEG_INFINITY) as u64) << i;
            x
        });
        (Plain(x), bits)
    }
    #[inline(always)]
    fn codes<const KIND: usize, const BYTES: usize>(b: &[u8; BYTES]) -> Self {
        Plain(load::load8::<KIND, BYTES>(b))
    }
    #[inline(always)]
    fn pairs(b: &[u8; 32]) -> (Self, Self) {
        let half = |i: usize| load::half(u16::from_le_bytes([b[2 * i], b[2 * i + 1]]));
        (Plain(std::array::from_fn(|i| half(2 * i))), Plain(std::array::from_fn(|i| half(2 * i + 1))))
    }
    #[inline(always)]
    fn sums(a: [Self; 8]) -> [f32; 8] {
        a.map(Self::sum)
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::Avx2;

/// The same in registers. The methods of [`Avx2`] must only run on CPUs that have AVX2, FMA and F16C: `levels!` in
/// `kernels.rs` is the only place that uses the type.
#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::super::load;
    use super::super::softmax::{EXP_SERIES, LN2_HIGH, LN2_LOW, LOWEST, ROUND};
    use super::Lanes;
    use std::arch::x86_64::*;

    /// Lanes in a register.
    #[derive(Clone, Copy, Debug)]
    pub(in super::super) struct Avx2(__m256);

    /// Small functions with the features; the compiler inlines them into kernels with the same features.
    macro_rules! ops {
        ($($(#[$attr:meta])* fn $name:ident $(<$(const $c:ident: usize),*>)? ($($arg:ident: $t:ty),*) -> $ret:ty $body:block)*) => {$(
            $(#[$attr])*
            #[inline]
            #[target_feature(enable = "avx2,fma,f16c,bmi2")]
            fn $name $(<$(const $c: usize),*>)? ($($arg: $t),*) -> $ret $body
        )*};
    }

    ops! {
        fn splat(x: f32) -> __m256 { _mm256_set1_ps(x) }
        fn add(a: __m256, b: __m256) -> __m256 { _mm256_add_ps(a, b) }
        fn mul(a: __m256, b: __m256) -> __m256 { _mm256_mul_ps(a, b) }
        fn fma(a: __m256, b: __m256, c: __m256) -> __m256 { _mm256_fmadd_ps(a, b, c) }
        fn max(a: __m256, b: __m256) -> __m256 { _mm256_max_ps(a, b) }

        fn exp(x: __m256) -> __m256 {
            let lowest = _mm256_set1_ps(LOWEST);
            // `max` gives its second operand where one is NaN, so NaN stays.
            let y = _mm256_max_ps(lowest, x);
            let round = _mm256_set1_ps(ROUND);
            let shifted = _mm256_fmadd_ps(y, _mm256_set1_ps(std::f32::consts::LOG2_E), round);
            let n = _mm256_sub_ps(shifted, round);
            let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(LN2_HIGH), y);
            let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(LN2_LOW), r);
            let mut p = _mm256_set1_ps(EXP_SERIES[0]);
            for c in &EXP_SERIES[1..] {
                p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(*c));
            }
            let power = _mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(127));
            let power = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(power));
            let below = _mm256_cmp_ps::<_CMP_LT_OQ>(x, lowest);
            _mm256_andnot_ps(below, _mm256_mul_ps(p, power))
        }

        fn mask(x: __m256, at: i32, from: i32, to: i32) -> (__m256, u64) {
            let t = _mm256_add_epi32(_mm256_set1_epi32(at), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
            let late = _mm256_cmpgt_epi32(_mm256_set1_epi32(from), t);
            let early = _mm256_cmpgt_epi32(_mm256_set1_epi32(to), t);
            let seen = _mm256_castsi256_ps(_mm256_andnot_si256(late, early));
            let none = _mm256_set1_ps(f32::NEG_INFINITY);
            let x = _mm256_blendv_ps(none, x, seen);
            let live = _mm256_cmp_ps::<_CMP_NEQ_UQ>(x, none);
            (x, _mm256_movemask_ps(live) as u32 as u64)
        }

        fn halves(b: [u8; 16]) -> __m256 { _mm256_cvtph_ps(bytemuck::cast(b)) }

        fn bf16(b: [u8; 16]) -> __m256 {
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bytemuck::cast(b))))
        }

        fn bytes(b: [u8; 8]) -> __m256 {
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(i64::from_le_bytes(b))))
        }

        fn bits<const N: usize>(word: u32) -> __m256 {
            let n = N as i32;
            let shifts = _mm256_setr_epi32(0, n, 2 * n, 3 * n, 4 * n, 5 * n, 6 * n, 7 * n);
            let codes = _mm256_srlv_epi32(_mm256_set1_epi32(word as i32), shifts);
            _mm256_cvtepi32_ps(_mm256_and_si256(codes, _mm256_set1_epi32((1 << N) - 1)))
        }

        /// Sign, exponent and mantissa bits in the places of f16 make 2^-8 of the value, subnormals included.
        fn e4m3(b: [u8; 8]) -> __m256 {
            let x = _mm_cvtsi64_si128(i64::from_le_bytes(b));
            let nan = _mm_cmpeq_epi8(_mm_or_si128(x, _mm_set1_epi8(-128)), _mm_set1_epi8(-1));
            let high = _mm_srai_epi16::<1>(_mm_unpacklo_epi8(_mm_setzero_si128(), x));
            let half = _mm_and_si128(high, _mm_set1_epi16(0xbfffu16 as i16));
            _mm256_cvtph_ps(_mm_or_si128(half, _mm_unpacklo_epi8(nan, nan)))
        }

        /// The upper byte of an f16.
        fn e5m2(b: [u8; 8]) -> __m256 {
            let x = _mm_cvtepu8_epi16(_mm_cvtsi64_si128(i64::from_le_bytes(b)));
            _mm256_cvtph_ps(_mm_slli_epi16::<8>(x))
        }

        fn pairs(b: [u8; 32]) -> (__m256, __m256) {
            let x: __m256i = bytemuck::cast(b);
            let low = _mm256_and_si256(x, _mm256_set1_epi32(0xffff));
            let both = _mm256_packus_epi32(low, _mm256_srli_epi32::<16>(x));
            let both = _mm256_permute4x64_epi64::<0b11_01_10_00>(both);
            (
                _mm256_cvtph_ps(_mm256_castsi256_si128(both)),
                _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(both)),
            )
        }

        fn sums(a: [__m256; 8]) -> __m256 {
            let low = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
            let high = _mm256_hadd_ps(_mm256_hadd_ps(a[4], a[5]), _mm256_hadd_ps(a[6], a[7]));
            _mm256_add_ps(
                _mm256_permute2f128_ps::<0x20>(low, high),
                _mm256_permute2f128_ps::<0x31>(low, high),
            )
        }
    }

    /// The first bytes of a longer or shorter array; the kinds know how many there are.
    #[inline(always)]
    fn first<const N: usize>(b: &[u8]) -> [u8; N] {
        let mut out = [0; N];
        let n = N.min(b.len());
        out[..n].copy_from_slice(&b[..n]);
        out
    }

    impl Lanes for Avx2 {
        #[inline(always)]
        fn splat(x: f32) -> Self {
            // SAFETY: the type is used on CPUs with these features only (see the module).
            Avx2(unsafe { splat(x) })
        }
        #[inline(always)]
        fn load(x: &[f32; 8]) -> Self {
            Avx2(bytemuck::cast(*x))
        }
        #[inline(always)]
        fn store(self, out: &mut [f32; 8]) {
            *out = bytemuck::cast(self.0);
        }
        #[inline(always)]
        fn add(self, other: Self) -> Self {
            // SAFETY: as in `splat`.
            Avx2(unsafe { add(self.0, other.0) })
        }
        #[inline(always)]
        fn mul(self, other: Self) -> Self {
            // SAFETY: as in `splat`.
            Avx2(unsafe { mul(self.0, other.0) })
        }
        #[inline(always)]
        fn fma(self, b: Self, c: Self) -> Self {
            // SAFETY: as in `splat`.
            Avx2(unsafe { fma(self.0, b.0, c.0) })
        }
        #[inline(always)]
        fn max(self, other: Self) -> Self {
            // SAFETY: as in `splat`.
            Avx2(unsafe { max(self.0, other.0) })
        }
        #[inline(always)]
        fn exp(self) -> Self {
            // SAFETY: as in `splat`.
            Avx2(unsafe { exp(self.0) })
        }
        #[inline(always)]
        fn mask(self, at: usize, from: usize, to: usize) -> (Self, u64) {
            // SAFETY: as in `splat`.
            let (x, bits) = unsafe { mask(self.0, at as i32, from as i32, to as i32) };
            (Avx2(x), bits)
        }
        #[inline(always)]
        fn codes<const KIND: usize, const BYTES: usize>(b: &[u8; BYTES]) -> Self {
            let word = u32::from_le_bytes(first(b));
            Avx2(match KIND {
                load::F32 => bytemuck::cast(first::<32>(b)),
                // SAFETY: as in `splat`.
                load::F16 => unsafe { halves(first(b)) },
                // SAFETY: as in `splat`.
                load::BF16 => unsafe { bf16(first(b)) },
                // SAFETY: as in `splat`.
                load::E4M3 => unsafe { e4m3(first(b)) },
                // SAFETY: as in `splat`.
                load::E5M2 => unsafe { e5m2(first(b)) },
                // SAFETY: as in `splat`.
                8 => unsafe { bytes(first(b)) },
                // SAFETY: as in `splat`.
                4 => unsafe { bits::<4>(word) },
                // SAFETY: as in `splat`.
                3 => unsafe { bits::<3>(word) },
                // SAFETY: as in `splat`.
                2 => unsafe { bits::<2>(word) },
                // SAFETY: as in `splat`.
                _ => unsafe { bits::<1>(word) },
            })
        }
        #[inline(always)]
        fn pairs(b: &[u8; 32]) -> (Self, Self) {
            // SAFETY: as in `splat`.
            let (step, min) = unsafe { pairs(*b) };
            (Avx2(step), Avx2(min))
        }
        #[inline(always)]
        fn sums(a: [Self; 8]) -> [f32; 8] {
            // SAFETY: as in `splat`.
            bytemuck::cast(unsafe { sums(a.map(|x| x.0)) })
        }
    }
}
