//! Binary floating-point formats: the real numbers that a format has, the rounding of others, and their bits.
//!
//! One description covers all formats of at most 64 bits, from `f64` to the eight-bit formats of the Open Compute
//! Project (OFP8, MX) and of Noune et al. 2022 (`fnuz`). Every value of a format is an `f64`, so rounding is exact.

/// The meaning of a format's extreme bit patterns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Specials {
    /// IEEE 754: the greatest exponent is reserved for infinities and NaNs.
    Ieee,
    /// No infinities. Only all ones in exponent and mantissa is NaN (`fn`).
    Finite,
    /// No infinities and no negative zero, whose pattern is NaN (`fnuz`).
    UnsignedZero,
    /// Powers of two only: no sign, no zero, no infinities. All ones are NaN (`e8m0fnu`).
    Scale,
}

/// A format: the widths of its fields, the bias of the stored exponent, and its special values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FloatFormat {
    pub exponent_bits: u32,
    pub mantissa_bits: u32,
    pub bias: i32,
    pub specials: Specials,
}

impl FloatFormat {
    /// A format like those of IEEE 754.
    pub(crate) const fn ieee(exponent_bits: u32, mantissa_bits: u32) -> Self {
        let bias = (1 << (exponent_bits - 1)) - 1;
        FloatFormat { exponent_bits, mantissa_bits, bias, specials: Specials::Ieee }
    }

    /// The bits of an element.
    pub fn width(self) -> u32 {
        (self.specials != Specials::Scale) as u32 + self.exponent_bits + self.mantissa_bits
    }

    /// The exponent of the smallest normal number. Smaller numbers share it and lose digits instead.
    fn least_exponent(self) -> i32 {
        if self.specials == Specials::Scale { -self.bias } else { 1 - self.bias }
    }

    fn greatest_exponent(self) -> i32 {
        let reserved = matches!(self.specials, Specials::Ieee | Specials::Scale) as i32;
        (1 << self.exponent_bits) - 1 - reserved - self.bias
    }

    /// The greatest finite number.
    pub fn greatest(self) -> f64 {
        let reserved = (self.specials == Specials::Finite) as u32;
        let steps = (2u64 << self.mantissa_bits) - 1 - u64::from(reserved);
        steps as f64 * power_of_two(self.greatest_exponent() - self.mantissa_bits as i32)
    }

    /// The upper bound of all numbers: infinity if the format has one.
    pub fn most(self) -> f64 {
        if self.specials == Specials::Ieee { f64::INFINITY } else { self.greatest() }
    }

    /// The lower bound of all numbers.
    pub fn least(self) -> f64 {
        if self.specials == Specials::Scale { power_of_two(self.least_exponent()) } else { -self.most() }
    }

    /// The result of rounding a number beyond the greatest.
    fn overflow(self, sign: f64) -> f64 {
        if self.specials == Specials::Ieee { f64::INFINITY.copysign(sign) } else { f64::NAN }
    }

    /// The nearest number of the format. Ties go to the number whose last digit is even.
    ///
    /// ```
    /// use altiplano_ir::dtype::DType;
    /// let bf16 = DType::BF16.float_format().expect("a float");
    /// assert_eq!(bf16.round(1.0 + 1.0 / 256.0), 1.0);
    /// assert_eq!(bf16.round(1.0 + 3.0 / 256.0), 1.0 + 1.0 / 64.0);
    /// assert_eq!(bf16.round(1e39), f64::INFINITY);
    /// ```
    pub fn round(self, x: f64) -> f64 {
        if x.is_nan() || self.specials == Specials::Scale && x <= 0.0 {
            return f64::NAN;
        }
        if x.is_infinite() {
            return self.overflow(x);
        }
        let step = power_of_two(exponent(x).max(self.least_exponent()) - self.mantissa_bits as i32);
        let magnitude = (x.abs() / step).round_ties_even() * step;
        match self.specials {
            _ if magnitude > self.greatest() => self.overflow(x),
            Specials::UnsignedZero if magnitude == 0.0 => 0.0,
            Specials::Scale => magnitude.max(power_of_two(self.least_exponent())),
            _ => magnitude.copysign(x),
        }
    }

    /// The bits of the format's number nearest to `x`.
    pub fn to_bits(self, x: f64) -> u64 {
        let x = self.round(x);
        let sign = 1u64 << (self.width() - 1);
        let exponents = ((1u64 << self.exponent_bits) - 1) << self.mantissa_bits;
        if x.is_nan() {
            return match self.specials {
                Specials::Ieee => exponents | (1u64 << self.mantissa_bits) >> 1,
                Specials::Finite | Specials::Scale => exponents | ((1u64 << self.mantissa_bits) - 1),
                Specials::UnsignedZero => sign,
            };
        }
        let negative = if x.is_sign_negative() { sign } else { 0 };
        if x.is_infinite() {
            return negative | exponents;
        }
        let scale = exponent(x).max(self.least_exponent());
        let steps = (x.abs() / power_of_two(scale - self.mantissa_bits as i32)) as u64;
        // The leading digit of a normal number adds one to the exponent field.
        let below = (scale + self.bias - 1) as i64;
        negative | ((below << self.mantissa_bits) + steps as i64) as u64
    }

    /// The number with these bits. Bits above [`FloatFormat::width`] are ignored.
    pub fn from_bits(self, bits: u64) -> f64 {
        let mantissa = bits & ((1u64 << self.mantissa_bits) - 1);
        let exponents = (1u64 << self.exponent_bits) - 1;
        let exponent = bits >> self.mantissa_bits & exponents;
        let negative = self.specials != Specials::Scale && bits >> (self.width() - 1) & 1 == 1;
        let sign = if negative { -1.0 } else { 1.0 };
        let nan = match self.specials {
            Specials::Ieee if exponent == exponents && mantissa == 0 => return sign * f64::INFINITY,
            Specials::Ieee => exponent == exponents,
            Specials::Finite | Specials::Scale => exponent == exponents && mantissa + 1 == 1 << self.mantissa_bits,
            Specials::UnsignedZero => negative && exponent == 0 && mantissa == 0,
        };
        if nan {
            return f64::NAN;
        }
        let least = power_of_two(self.least_exponent() - self.mantissa_bits as i32);
        if exponent == 0 && self.specials != Specials::Scale {
            return sign * mantissa as f64 * least;
        }
        let steps = (1u64 << self.mantissa_bits) + mantissa;
        sign * steps as f64 * power_of_two(exponent as i32 - self.bias - self.mantissa_bits as i32)
    }
}

/// StableHLO's `reduce_precision`. It rounds to `mantissa_bits`, then turns numbers whose exponent does not fit
/// `exponent_bits` into infinities or zeros (including subnormal numbers, as XLA does). A width of at least `source`'s
/// has no effect.
pub fn reduce_precision(x: f64, exponent_bits: u32, mantissa_bits: u32, source: FloatFormat) -> f64 {
    if !x.is_finite() || x == 0.0 {
        return x;
    }
    let mut rounded = x;
    if mantissa_bits < source.mantissa_bits {
        // Round the bits, so that without a mantissa ties go to the even stored exponent.
        let dropped = 52 - mantissa_bits;
        let bits = x.to_bits();
        let half = (1u64 << (dropped - 1)) - 1 + (bits >> dropped & 1);
        rounded = f64::from_bits((bits + half) >> dropped << dropped);
    }
    if exponent_bits < source.exponent_bits {
        let bias = (1 << (exponent_bits - 1)) - 1;
        if exponent(rounded) > bias {
            rounded = f64::INFINITY.copysign(x);
        } else if exponent(rounded) <= -bias {
            rounded = 0f64.copysign(x);
        }
    }
    rounded
}

/// `e` with `2^e <= |x| < 2^(e+1)`, or -1023 if `x` is smaller than any normal `f64`.
fn exponent(x: f64) -> i32 {
    (x.to_bits() >> 52 & 0x7ff) as i32 - 1023
}

/// `2^e` for `e` from -1074 to 1023.
fn power_of_two(e: i32) -> f64 {
    if e >= -1022 { f64::from_bits(((e + 1023) as u64) << 52) } else { f64::from_bits(1u64 << (e + 1074).max(0)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use half::{bf16, f16};

    fn formats() -> impl Iterator<Item = (DType, FloatFormat)> {
        DType::ALL.into_iter().filter_map(|d| Some((d, d.float_format()?)))
    }

    #[test]
    fn all_bits_of_short_formats_read_back_and_lie_in_order() {
        for (dtype, format) in formats().filter(|(_, f)| f.width() <= 16) {
            assert_eq!(u64::from(format.width()), 8 * dtype.bytes(), "{dtype}");
            let signless = format.width() - (format.specials != Specials::Scale) as u32;
            let mut last = f64::NEG_INFINITY;
            for bits in 0..1u64 << format.width() {
                let value = format.from_bits(bits);
                if value.is_nan() {
                    assert!(format.from_bits(format.to_bits(value)).is_nan(), "{dtype} {bits:#x}");
                    continue;
                }
                assert_eq!(format.to_bits(value), bits, "{dtype} {bits:#x} is {value}");
                assert_eq!(format.round(value).to_bits(), value.to_bits(), "{dtype} {bits:#x}");
                if bits < 1 << signless {
                    assert!(value > last, "{dtype} {bits:#x}: {value} after {last}");
                    // The middle between two neighbours rounds to the even one. Numbers nearer to one of them round to
                    // it.
                    if last.is_finite() && value.is_finite() && format.mantissa_bits > 0 {
                        let middle = (value + last) / 2.0;
                        let even = if bits % 2 == 0 { value } else { last };
                        assert_eq!(format.round(middle), even, "{dtype} {bits:#x}");
                        assert_eq!(format.round(middle + (value - last) / 64.0), value, "{dtype} {bits:#x}");
                        assert_eq!(format.round(middle - (value - last) / 64.0), last, "{dtype} {bits:#x}");
                    }
                    last = value;
                }
            }
        }
    }

    /// Compares rounding with that of the processor and of the crate `half`.
    #[test]
    fn wide_formats_round_as_the_processor_does() {
        let mut rng = crate::testing::numbers::Rng::new(11);
        for _ in 0..200_000 {
            let x = f64::from_bits(rng.draw());
            let near = rng.real(-1.0, 1.0) * f64::powi(2.0, rng.below(300) as i32 - 150);
            for x in [x, near] {
                let same = |dtype: DType, expected: f64| {
                    let found = dtype.float_format().expect("a float").round(x);
                    assert!(found.to_bits() == expected.to_bits() || x.is_nan() && found.is_nan(), "{dtype} {x:e}");
                };
                same(DType::F64, x);
                same(DType::F32, f64::from(x as f32));
                // Rounding through f32 would round other numbers twice.
                if f64::from(x as f32) == x {
                    same(DType::F16, f16::from_f32(x as f32).to_f64());
                    same(DType::BF16, bf16::from_f32(x as f32).to_f64());
                }
                if !x.is_nan() {
                    assert_eq!(DType::F32.to_bits(x), u64::from((x as f32).to_bits()));
                    assert_eq!(DType::F64.to_bits(x), x.to_bits());
                }
            }
        }
    }

    /// The extremes and numbers beyond them, as in `ml_dtypes` 0.5.
    #[test]
    fn eight_bit_formats_end_where_they_should() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        for (dtype, greatest, beyond, least, nan_bits) in [
            (DType::F8E4M3FN, 448.0, nan, f64::powi(2.0, -9), 0x7f),
            (DType::F8E5M2, 57344.0, inf, f64::powi(2.0, -16), 0x7e),
            (DType::F8E4M3, 240.0, inf, f64::powi(2.0, -9), 0x7c),
            (DType::F8E3M4, 15.5, inf, f64::powi(2.0, -6), 0x78),
            (DType::F8E4M3FNUZ, 240.0, nan, f64::powi(2.0, -10), 0x80),
            (DType::F8E5M2FNUZ, 57344.0, nan, f64::powi(2.0, -17), 0x80),
            (DType::F8E4M3B11FNUZ, 30.0, nan, f64::powi(2.0, -13), 0x80),
            (DType::F8E8M0FNU, f64::powi(2.0, 127), nan, f64::powi(2.0, -126), 0xff),
        ] {
            let format = dtype.float_format().expect("a float");
            assert_eq!(format.greatest(), greatest, "{dtype}");
            let same = |found: f64, expected: f64| found == expected || found.is_nan() && expected.is_nan();
            assert!(same(format.round(1.6 * greatest), beyond), "{dtype}");
            assert!(same(format.round(inf), beyond), "{dtype}");
            assert_eq!(format.from_bits(1), least, "{dtype}");
            assert_eq!(format.to_bits(nan), nan_bits, "{dtype}");
        }
        let scale = DType::F8E8M0FNU.float_format().expect("a float");
        assert!(scale.round(0.0).is_nan() && scale.round(-1.0).is_nan());
        assert_eq!([0.75, 1.5, 3.0, 1e-45].map(|x| scale.to_bits(x)), [127, 128, 129, 0]);
    }

    /// Compared with `jax.lax.reduce_precision` of JAX 0.10 on a CPU.
    #[test]
    fn reduced_precision_is_that_of_xla() {
        let f32 = FloatFormat::ieee(8, 23);
        let half = [(1e-7, 0.0), (6.103515625e-05, 6.103515625e-05), (65519.0, 65504.0), (65520.0, f64::INFINITY)];
        for (x, expected) in half.into_iter().chain([(-1e-8, -0.0), (2049.0, 2048.0), (2051.0, 2052.0)]) {
            assert_eq!(reduce_precision(x, 5, 10, f32).to_bits(), f64::to_bits(expected), "{x}");
        }
        for (x, expected) in [(0.3, 0.25), (0.6, 0.5), (1.4, 1.0), (1.5, 2.0), (3.0, 2.0), (-1.6, -2.0)] {
            assert_eq!(reduce_precision(x, 4, 0, f32), expected, "{x}");
        }
        for (x, expected) in [(0.5, 0.0), (1.4, 0.0), (1.5, f64::INFINITY), (-3.0, f64::NEG_INFINITY)] {
            assert_eq!(reduce_precision(x, 1, 0, f32), expected, "{x}");
        }
        assert_eq!(reduce_precision(1e-300, 8, 52, f32), 1e-300);
        assert!(reduce_precision(f64::NAN, 5, 0, f32).is_nan());
    }
}
