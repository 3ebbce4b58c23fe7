//! Rounding by integer arithmetic: every format, every mode, one rounding. Slow; for what the CPU has no instruction
//! for.

/// Where to round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Round {
    /// `.rn`, ties to even
    Nearest,
    /// `.rz`
    Zero,
    /// `.rm`
    Down,
    /// `.rp`
    Up,
    /// `.rna`, ties away from zero
    Away,
}

/// Names of the modes that arithmetic has.
pub(crate) const MODES: [(&str, Round); 4] =
    [("rn", Round::Nearest), ("rz", Round::Zero), ("rm", Round::Down), ("rp", Round::Up)];

impl Round {
    /// From a constant of an operation.
    #[inline]
    pub(crate) fn of(code: u64) -> Self {
        match code & 7 {
            0 => Self::Nearest,
            1 => Self::Zero,
            2 => Self::Down,
            3 => Self::Up,
            _ => Self::Away,
        }
    }
}

/// A binary floating-point format without its sign.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Format {
    /// Stored bits of the significand.
    pub(crate) fraction: u32,
    /// Exponent bias.
    pub(crate) bias: i32,
    /// The largest finite number.
    pub(crate) max: u64,
    /// What lies above it: infinity, or the largest finite number again where there is none.
    pub(crate) above: u64,
    /// The NaN that results have.
    pub(crate) nan: u64,
    /// Place of the sign.
    pub(crate) sign: u32,
}

impl Format {
    const fn ieee(exponent: u32, fraction: u32, nan: u64) -> Self {
        let infinity = ((1u64 << exponent) - 1) << fraction;
        Self {
            fraction,
            bias: (1 << (exponent - 1)) - 1,
            max: infinity - 1,
            above: infinity,
            nan,
            sign: exponent + fraction,
        }
    }
}

pub(crate) const F64: Format = Format::ieee(11, 52, 0x7fff_ffff_ffff_ffff);
pub(crate) const F32: Format = Format::ieee(8, 23, 0x7fff_ffff);
pub(crate) const F16: Format = Format::ieee(5, 10, 0x7fff);
/// Without the 13 low bits that its register has.
pub(crate) const TF32: Format = Format::ieee(8, 10, 0x3_ffff);
pub(crate) const BF16: Format = Format::ieee(8, 7, 0x7fff);

/// A finite number: `(-1)^negative * mantissa * 2^exponent`, and a little more in magnitude if `sticky` (less than one
/// unit of the mantissa).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Exact {
    pub(crate) negative: bool,
    pub(crate) mantissa: u128,
    pub(crate) exponent: i32,
    pub(crate) sticky: bool,
}

impl Exact {
    /// A finite f64 as it is.
    pub(crate) fn of(x: f64) -> Self {
        let bits = x.to_bits();
        let biased = (bits >> 52 & 0x7ff) as i32;
        let fraction = bits & ((1 << 52) - 1);
        let mantissa = if biased == 0 { fraction } else { fraction | 1 << 52 };
        Self {
            negative: x.is_sign_negative(),
            mantissa: u128::from(mantissa),
            exponent: biased.max(1) - 1075,
            sticky: false,
        }
    }

    pub(crate) fn integer(x: i128) -> Self {
        Self { negative: x < 0, mantissa: x.unsigned_abs(), exponent: 0, sticky: false }
    }

    fn is_zero(self) -> bool {
        self.mantissa == 0 && !self.sticky
    }

    /// The same number with its highest bit at bit 120; what falls out below becomes sticky.
    fn at_120(self) -> Self {
        if self.mantissa == 0 {
            return self;
        }
        let up = self.mantissa.leading_zeros() as i32 - 7;
        let (mantissa, lost) =
            if up >= 0 { (self.mantissa << up, false) } else { drop_bits(self.mantissa, (-up) as u32) };
        Self { mantissa, exponent: self.exponent - up, sticky: self.sticky | lost, ..self }
    }

    fn times(self, o: Self) -> Self {
        // Both have at most 53 bits.
        Self {
            negative: self.negative != o.negative,
            mantissa: self.mantissa * o.mantissa,
            exponent: self.exponent + o.exponent,
            sticky: false,
        }
    }

    /// The sum, with at least 14 exact bits below those of a 106-bit summand.
    fn plus(self, o: Self) -> Self {
        let (a, b) = (self.at_120(), o.at_120());
        if a.mantissa == 0 || b.mantissa == 0 {
            return if a.mantissa == 0 { b } else { a };
        }
        let (mut a, mut b) =
            if (a.exponent, a.mantissa) >= (b.exponent, b.mantissa) { (a, b) } else { (b, a) };
        let (mantissa, lost) = drop_bits(b.mantissa, (a.exponent - b.exponent) as u32);
        // A jammed last bit stands for what was lost; it is far below every rounding position.
        b.mantissa = mantissa | u128::from(lost);
        a.mantissa = if a.negative == b.negative { a.mantissa + b.mantissa } else { a.mantissa - b.mantissa };
        a
    }
}

/// `x >> n`, and whether ones were lost.
fn drop_bits(x: u128, n: u32) -> (u128, bool) {
    if n >= 128 { (0, x != 0) } else { (x >> n, x & ((1 << n) - 1) != 0) }
}

/// The nearest number of the format in the mode's sense.
pub(crate) fn round(x: Exact, f: Format, mode: Round) -> u64 {
    let sign = u64::from(x.negative) << f.sign;
    if x.is_zero() {
        return sign;
    }
    let top = 127 - x.mantissa.leading_zeros() as i32;
    let exponent = (x.exponent + top).max(1 - f.bias);
    let shift = exponent - f.fraction as i32 - x.exponent;
    let (kept, half, below) = if shift <= 0 {
        (x.mantissa << -shift, false, x.sticky)
    } else {
        let (upper, below) = drop_bits(x.mantissa, shift as u32 - 1);
        (upper >> 1, upper & 1 != 0, below | x.sticky)
    };
    let up = match mode {
        Round::Nearest => half && (below || kept & 1 != 0),
        Round::Away => half,
        Round::Zero => false,
        Round::Down => x.negative && (half || below),
        Round::Up => !x.negative && (half || below),
    };
    // A carry out of the significand moves on into the exponent.
    let magnitude = (((exponent + f.bias - 1) as u64) << f.fraction) + kept as u64 + u64::from(up);
    if magnitude <= f.max {
        return sign | magnitude;
    }
    let infinite = match mode {
        Round::Nearest | Round::Away => true,
        Round::Zero => false,
        Round::Down => x.negative,
        Round::Up => !x.negative,
    };
    sign | if infinite { f.above } else { f.max }
}

/// An f64 to a narrower format. NaN gives the format's NaN.
pub(crate) fn from_f64(x: f64, f: Format, mode: Round) -> u64 {
    if x.is_nan() {
        f.nan
    } else if x.is_infinite() {
        u64::from(x < 0.0) << f.sign | f.above
    } else {
        round(Exact::of(x), f, mode)
    }
}

/// A sum that is not finite, or not known to be: by the CPU, which has no rounding to do.
fn special(x: f64, f: Format) -> u64 {
    from_f64(x, f, Round::Nearest)
}

fn rounded_sum(a: Exact, b: Exact, f: Format, mode: Round) -> u64 {
    let sum = a.plus(b);
    if sum.is_zero() {
        // x - x is +0, but -0 when rounding down; -0 + -0 stays.
        let negative = if a.negative == b.negative { a.negative } else { mode == Round::Down };
        return u64::from(negative) << f.sign;
    }
    round(sum, f, mode)
}

pub(crate) fn add(a: f64, b: f64, f: Format, mode: Round) -> u64 {
    if !(a.is_finite() && b.is_finite()) {
        return special(a + b, f);
    }
    rounded_sum(Exact::of(a), Exact::of(b), f, mode)
}

pub(crate) fn mul(a: f64, b: f64, f: Format, mode: Round) -> u64 {
    if !(a.is_finite() && b.is_finite()) {
        return special(a * b, f);
    }
    round(Exact::of(a).times(Exact::of(b)), f, mode)
}

pub(crate) fn fma(a: f64, b: f64, c: f64, f: Format, mode: Round) -> u64 {
    if !(a.is_finite() && b.is_finite() && c.is_finite()) {
        // A finite product must not overflow on its way to an infinite c.
        return special(if a.is_finite() && b.is_finite() { c } else { a * b + c }, f);
    }
    rounded_sum(Exact::of(a).times(Exact::of(b)), Exact::of(c), f, mode)
}

pub(crate) fn div(a: f64, b: f64, f: Format, mode: Round) -> u64 {
    if !(a.is_finite() && b.is_finite()) || a == 0.0 || b == 0.0 {
        return special(a / b, f);
    }
    let (a, b) = (Exact::of(a).at_120(), Exact::of(b));
    // At most 53 bits below 121: 68 bits of quotient.
    let quotient = Exact {
        negative: a.negative != b.negative,
        mantissa: a.mantissa / b.mantissa,
        exponent: a.exponent - b.exponent,
        sticky: a.mantissa % b.mantissa != 0,
    };
    round(quotient, f, mode)
}

pub(crate) fn sqrt(a: f64, f: Format, mode: Round) -> u64 {
    if !a.is_finite() || a <= 0.0 {
        return special(a.sqrt(), f);
    }
    let mut a = Exact::of(a).at_120();
    if a.exponent % 2 != 0 {
        a.mantissa <<= 1;
        a.exponent -= 1;
    }
    let root = a.mantissa.isqrt();
    let root = Exact {
        negative: false,
        mantissa: root,
        exponent: a.exponent / 2,
        sticky: root * root != a.mantissa,
    };
    round(root, f, mode)
}
