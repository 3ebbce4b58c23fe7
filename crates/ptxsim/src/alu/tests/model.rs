//! Rounding by search: the numbers of a format are enumerated by the formula of the manual, and the one wanted is found
//! by exact comparison. Nothing here shifts, adds or rounds bits.

use std::cmp::Ordering;

/// A floating-point format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fmt {
    exponent: u32,
    pub(super) fraction: u32,
    /// Bits of the largest finite number.
    pub(super) max: u64,
    /// What overflow gives.
    pub(super) above: u64,
    pub(super) nan: u64,
    pub(super) width: u32,
}

pub(super) const F16: Fmt =
    Fmt { exponent: 5, fraction: 10, max: 0x7bff, above: 0x7c00, nan: 0x7fff, width: 16 };
pub(super) const BF16: Fmt =
    Fmt { exponent: 8, fraction: 7, max: 0x7f7f, above: 0x7f80, nan: 0x7fff, width: 16 };
pub(super) const TF32: Fmt =
    Fmt { exponent: 8, fraction: 10, max: 0x3_fbff, above: 0x3_fc00, nan: 0x3_ffff, width: 19 };
pub(super) const F32: Fmt =
    Fmt { exponent: 8, fraction: 23, max: 0x7f7f_ffff, above: 0x7f80_0000, nan: 0x7fff_ffff, width: 32 };
pub(super) const F64: Fmt = Fmt {
    exponent: 11,
    fraction: 52,
    max: 0x7fef_ffff_ffff_ffff,
    above: 0x7ff0_0000_0000_0000,
    nan: 0x7fff_ffff_ffff_ffff,
    width: 64,
};
pub(super) const E4M3: Fmt = Fmt { exponent: 4, fraction: 3, max: 0x7e, above: 0x7e, nan: 0x7f, width: 8 };
pub(super) const E5M2: Fmt = Fmt { exponent: 5, fraction: 2, max: 0x7b, above: 0x7b, nan: 0x7f, width: 8 };

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    Nearest,
    Zero,
    Down,
    Up,
    Away,
}

pub(super) const MODES: [(&str, Mode); 4] =
    [("rn", Mode::Nearest), ("rz", Mode::Zero), ("rm", Mode::Down), ("rp", Mode::Up)];

impl Fmt {
    fn bias(self) -> i32 {
        (1 << (self.exponent - 1)) - 1
    }

    /// The number of a magnitude that is finite, or the next power of two after the largest.
    fn magnitude(self, bits: u64) -> f64 {
        let e = (bits >> self.fraction) as i32;
        let f = (bits & ((1 << self.fraction) - 1)) as f64 / (1u64 << self.fraction) as f64;
        if e == 0 {
            f * 2f64.powi(1 - self.bias())
        } else if e - self.bias() > 1023 {
            f64::INFINITY
        } else {
            (1.0 + f) * 2f64.powi(e - self.bias())
        }
    }

    pub(super) fn is_nan(self, bits: u64) -> bool {
        let magnitude = bits & ((1 << (self.width - 1)) - 1);
        if self.max == self.above && self.exponent == 4 {
            magnitude == 0x7f
        } else {
            magnitude > ((1 << self.exponent) - 1) << self.fraction
        }
    }

    pub(super) fn value(self, bits: u64) -> f64 {
        let sign = if bits >> (self.width - 1) & 1 != 0 { -1.0 } else { 1.0 };
        let magnitude = bits & ((1 << (self.width - 1)) - 1);
        if self.is_nan(bits) {
            f64::NAN
        } else if self.exponent != 4 && magnitude == ((1 << self.exponent) - 1) << self.fraction {
            sign * f64::INFINITY
        } else {
            sign * self.magnitude(magnitude)
        }
    }

    fn sign(self, negative: bool) -> u64 {
        u64::from(negative) << (self.width - 1)
    }

    /// The number that a mode chooses for what `compare` compares with: `compare(h)` is how it stands to h. It is not
    /// zero.
    pub(super) fn round(self, compare: impl Fn(f64) -> Ordering, mode: Mode) -> u64 {
        let negative = compare(0.0) == Ordering::Less;
        let against = |h: f64| if negative { compare(-h).reverse() } else { compare(h) };
        let (mut low, mut high) = (0, self.max + 1);
        while high - low > 1 {
            let middle = u64::midpoint(low, high);
            if against(self.magnitude(middle)) == Ordering::Less { high = middle } else { low = middle }
        }
        let sign = self.sign(negative);
        if against(self.magnitude(low)) == Ordering::Equal {
            return sign | low;
        }
        let half = || (self.magnitude(low) + self.magnitude(low + 1)) / 2.0;
        let up = match mode {
            Mode::Zero => false,
            Mode::Down => negative,
            Mode::Up => !negative,
            Mode::Nearest | Mode::Away => match against(half()) {
                Ordering::Less => false,
                Ordering::Greater => true,
                Ordering::Equal => mode == Mode::Away || low & 1 == 1,
            },
        };
        let magnitude = low + u64::from(up);
        sign | if magnitude > self.max { self.above } else { magnitude }
    }

    /// A sum of f64 that is exact as a whole.
    pub(super) fn sum(self, terms: &[f64], mode: Mode) -> u64 {
        if terms.iter().any(|t| !t.is_finite()) {
            return self.special(terms.iter().sum());
        }
        if order(terms, 0.0) == Ordering::Equal {
            let negative = if terms.iter().all(|t| t.is_sign_negative()) {
                true
            } else if terms.iter().all(|t| t.is_sign_positive()) {
                false
            } else {
                mode == Mode::Down
            };
            return self.sign(negative);
        }
        self.round(|h| order(terms, h), mode)
    }

    /// One f64.
    pub(super) fn of(self, x: f64, mode: Mode) -> u64 {
        if x.is_nan() || x.is_infinite() {
            return self.special(x);
        }
        if x == 0.0 {
            self.sign(x.is_sign_negative())
        } else {
            self.round(|h| x.partial_cmp(&h).unwrap(), mode)
        }
    }

    /// Infinity, zero or NaN.
    pub(super) fn special(self, x: f64) -> u64 {
        if x.is_nan() {
            self.nan
        } else {
            assert!(x == 0.0 || x.is_infinite());
            self.sign(x.is_sign_negative()) | if x == 0.0 { 0 } else { self.above }
        }
    }
}

/// How an exact sum stands to h: by an expansion whose parts do not overlap (Shewchuk), of which the last one that is
/// not zero has the sign.
pub(super) fn order(terms: &[f64], h: f64) -> Ordering {
    let mut parts: Vec<f64> = Vec::with_capacity(terms.len() + 1);
    for &term in terms.iter().chain([&-h]) {
        let mut carried = term;
        for part in &mut parts {
            let sum = carried + *part;
            let back = sum - carried;
            let rest = (carried - (sum - back)) + (*part - back);
            (*part, carried) = (rest, sum);
        }
        parts.push(carried);
    }
    let top = parts.iter().rev().find(|p| **p != 0.0).copied().unwrap_or(0.0);
    top.partial_cmp(&0.0).unwrap()
}

/// `a * b` as two f64, if nothing underflows.
pub(super) fn product(a: f64, b: f64) -> [f64; 2] {
    let p = a * b;
    [p, a.mul_add(b, -p)]
}

/// f32 values where something happens, of both signs.
pub(super) fn edges(f: Fmt) -> Vec<u64> {
    let one = (f.bias() as u64) << f.fraction;
    let infinity = ((1u64 << f.exponent) - 1) << f.fraction;
    let half_ulp = 1u64 << f.fraction;
    let mut v = vec![
        0,
        1,
        2,
        3,
        half_ulp - 1,
        half_ulp,
        half_ulp + 1,
        one,
        one - 1,
        one + 1,
        one + half_ulp,
        one - half_ulp,
        one + half_ulp / 2,
        one + half_ulp + half_ulp / 4,
        f.max,
        f.max - 1,
        f.max - half_ulp,
        one + 10 * half_ulp + 5,
    ];
    v.extend(
        [1, 2, 7].map(|n| one + u64::from(f.fraction + n) * half_ulp).into_iter().filter(|x| *x < f.max),
    );
    v.extend([1, 2].map(|n| one.saturating_sub(u64::from(f.fraction + n) * half_ulp)));
    if f.exponent != 4 {
        v.extend([infinity, infinity + 1, infinity | (half_ulp / 2)]);
    } else {
        v.push(f.nan);
    }
    let signs: Vec<_> = v.iter().map(|x| x | 1 << (f.width - 1)).collect();
    v.extend(signs);
    v.sort_unstable();
    v.dedup();
    v
}
