//! Which instructions the CPU code uses. A kernel is plain Rust over small arrays of lanes, compiled once a level; the
//! level is chosen at run time. The compiler turns the lanes into vectors, so there is one source and nothing to keep
//! in step. (Attention spells its few operations out: `cpu/attend/lanes.rs`.)
//!
//! All levels do the same operations in the same order. Encoders and decoders never contract a product and a sum, so codes,
//! pairs and decoded values have the same bits on every machine; attention does where the level has FMA.

use std::sync::OnceLock;

/// An instruction level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Isa {
    /// What the target guarantees (SSE2 on x86-64).
    Plain,
    /// AVX2, FMA, F16C and BMI2.
    Avx2,
    /// AVX-512 F, BW, DQ and VL on top.
    Avx512,
}

impl Isa {
    /// The best level of this machine, found once. `QKV_ISA=plain|avx2|avx512` lowers it.
    pub(crate) fn detect() -> Isa {
        static ISA: OnceLock<Isa> = OnceLock::new();
        *ISA.get_or_init(|| {
            let best = *Self::available().last().unwrap_or(&Isa::Plain);
            let asked = match std::env::var("QKV_ISA").as_deref() {
                Ok("plain") => Isa::Plain,
                Ok("avx2") => Isa::Avx2,
                _ => Isa::Avx512,
            };
            best.min(asked)
        })
    }

    /// The levels this machine can run, lowest first.
    pub(crate) fn available() -> &'static [Isa] {
        static ALL: [Isa; 3] = [Isa::Plain, Isa::Avx2, Isa::Avx512];
        #[cfg(target_arch = "x86_64")]
        {
            let has2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
                && is_x86_feature_detected!("bmi2");
            let has512 = has2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            &ALL[..1 + has2 as usize + has512 as usize]
        }
        #[cfg(not(target_arch = "x86_64"))]
        &ALL[..1]
    }
}

/// Compiles a function once a level: `dispatch! { fn name(args) -> ret = body::<..>; }` makes `name(isa, args)`
/// which runs `body::<FMA>(args)`; `body` must be `#[inline(always)]`.
macro_rules! dispatch {
    ($(#[$doc:meta])* $vis:vis fn $name:ident $(<$(const $c:ident: $ct:ty),*>)? ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident;) => {
        $(#[$doc])*
        #[inline]
        #[allow(clippy::too_many_arguments)]
        $vis fn $name $(<$(const $c: $ct),*>)? (isa: $crate::simd::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma,f16c,bmi2")]
                fn avx2 $(<$(const $c: $ct),*>)? ($($arg: $ty),*) $(-> $ret)? { $body::<$($($c,)*)? true>($($arg),*) }
                #[target_feature(enable = "avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl")]
                fn avx512 $(<$(const $c: $ct),*>)? ($($arg: $ty),*) $(-> $ret)? { $body::<$($($c,)*)? true>($($arg),*) }
                match isa {
                    // SAFETY: `Isa::available` lists these levels only where the CPU has their features, and
                    // `Isa` values come from there.
                    $crate::simd::Isa::Avx512 => return unsafe { avx512 $(::<$($c),*>)? ($($arg),*) },
                    // SAFETY: as above.
                    $crate::simd::Isa::Avx2 => return unsafe { avx2 $(::<$($c),*>)? ($($arg),*) },
                    $crate::simd::Isa::Plain => {}
                }
            }
            let _ = isa;
            $body::<$($($c,)*)? false>($($arg),*)
        }
    };
}
pub(crate) use dispatch;

/// `a * b + c`, contracted where the level has FMA. For attention only.
#[inline(always)]
pub(crate) fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}
