//! Elementary functions in f32 without branches, so that loops over them vectorise. Each is within about two units in
//! the last place of the exact value. `FMA` is true if fused multiply-add is one instruction for the caller; elsewhere
//! it would be a library call.

#[inline(always)]
fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// Evaluates a polynomial, highest coefficient first.
#[inline(always)]
fn polynomial<const FMA: bool, const N: usize>(x: f32, coefficients: [f32; N]) -> f32 {
    let mut sum = coefficients[0];
    let mut i = 1;
    while i < N {
        sum = fma::<FMA>(sum, x, coefficients[i]);
        i += 1;
    }
    sum
}

const LN_2_HIGH: f32 = 0.693_145_75;
const LN_2_LOW: f32 = 1.428_606_8e-6;
/// Adding this rounds to an integer, which the low bits of the sum then hold.
const ROUNDER: f32 = 12_582_912.0;

/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`: the pair `(n, r)`, for `|x| < 200`.
#[inline(always)]
fn reduce_exponent<const FMA: bool>(x: f32) -> (i32, f32) {
    let shifted = fma::<FMA>(x, std::f32::consts::LOG2_E, ROUNDER);
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUNDER.to_bits() as i32);
    let whole = shifted - ROUNDER;
    let r = fma::<FMA>(-whole, LN_2_LOW, fma::<FMA>(-whole, LN_2_HIGH, x));
    (n, r)
}

/// `2^n` for `-126 <= n <= 127`.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// `exp(r) - 1 - r` for `|r| <= ln 2 / 2`, by its Taylor series; the truncation error is below 1e-8.
#[inline(always)]
fn exp_tail<const FMA: bool>(r: f32) -> f32 {
    let series = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5];
    polynomial::<FMA, 6>(r, series) * (r * r)
}

#[inline(always)]
pub(crate) fn exp<const FMA: bool>(x: f32) -> f32 {
    // Beyond these limits the result is infinite or zero anyway; a NaN passes both comparisons.
    let clamped = if x > 100.0 { 100.0 } else { x };
    let clamped = if clamped < -110.0 { -110.0 } else { clamped };
    let (n, r) = reduce_exponent::<FMA>(clamped);
    // Two factors, since 2^n itself may overflow or be denormal.
    let half = n >> 1;
    (exp_tail::<FMA>(r) + r + 1.0) * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

#[inline(always)]
pub(crate) fn exp_m1<const FMA: bool>(x: f32) -> f32 {
    let clamped = if x > 100.0 { 100.0 } else { x };
    let clamped = if clamped < -30.0 { -30.0 } else { clamped };
    let (n, r) = reduce_exponent::<FMA>(clamped);
    let half = n >> 1;
    let (a, b) = (power_of_two(half), power_of_two(n.wrapping_sub(half)));
    // 2^n (e^r - 1) + (2^n - 1), where the second term is exact for moderate n.
    let near = (exp_tail::<FMA>(r) + r) * a * b + (a * b - 1.0);
    let far = (exp_tail::<FMA>(r) + r + 1.0) * a * b;
    let result = if x > 60.0 { far } else { near };
    if x == 0.0 { x } else { result }
}

/// Uses `ln m = 2 artanh((m - 1) / (m + 1))` for the mantissa m in `[sqrt 1/2, sqrt 2]`.
#[inline(always)]
pub(crate) fn ln<const FMA: bool>(x: f32) -> f32 {
    let denormal = x < f32::MIN_POSITIVE;
    let scaled = if denormal { x * 8_388_608.0 } else { x };
    let bits = scaled.to_bits() as i32;
    let n = bits.wrapping_sub(std::f32::consts::FRAC_1_SQRT_2.to_bits() as i32) >> 23;
    let mantissa = f32::from_bits(bits.wrapping_sub(n << 23) as u32);
    let exponent = n as f32 - if denormal { 23.0 } else { 0.0 };
    let m = mantissa - 1.0;
    let s = m / (2.0 + m);
    let z = s * s;
    // 2 artanh(s) = m - s (m - R) with R = 2 s^2 (1/3 + s^2/5 + ..), which keeps the leading term exact.
    let tail = polynomial::<FMA, 4>(z, [2.0 / 9.0, 2.0 / 7.0, 2.0 / 5.0, 2.0 / 3.0]) * z;
    let small = fma::<FMA>(exponent, LN_2_LOW, -s * (m - tail));
    let result = fma::<FMA>(exponent, LN_2_HIGH, small + m);
    let result = if x == f32::INFINITY { x } else { result };
    let result = if x == 0.0 { f32::NEG_INFINITY } else { result };
    if x < 0.0 || x.is_nan() { f32::NAN } else { result }
}

/// Uses Kahan's correction of `ln(1 + x)` for the rounding of `1 + x`.
#[inline(always)]
pub(crate) fn ln_1p<const FMA: bool>(x: f32) -> f32 {
    let u = 1.0 + x;
    let difference = u - 1.0;
    let corrected = ln::<FMA>(u) * (x / difference);
    let result = if difference == 0.0 { x } else { corrected };
    let result = if x == f32::INFINITY { x } else { result };
    if x == -1.0 { f32::NEG_INFINITY } else { result }
}

#[inline(always)]
pub(crate) fn logistic<const FMA: bool>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<FMA>(-x))
}

#[inline(always)]
pub(crate) fn tanh<const FMA: bool>(x: f32) -> f32 {
    let magnitude = x.abs();
    let magnitude = if magnitude > 10.0 { 10.0 } else { magnitude };
    // t = exp(2x) - 1, in the range where 2^n neither overflows nor dwarfs the 1.
    let (n, r) = reduce_exponent::<FMA>(2.0 * magnitude);
    let scale = power_of_two(n);
    let t = fma::<FMA>(exp_tail::<FMA>(r) + r, scale, scale - 1.0);
    (t / (t + 2.0)).copysign(x)
}

/// `erf(x) / x` as a function of `x^2 <= 1`, by its Taylor series.
#[inline(always)]
fn erf_series<const FMA: bool>(z: f32) -> f32 {
    let series = [
        -1.637_684_6e-7,
        1.646_211_4e-6,
        -1.492_565e-5,
        1.205_533_3e-4,
        -8.548_327e-4,
        5.223_977_6e-3,
        -2.686_617e-2,
        1.128_379_2e-1,
        -3.761_263_9e-1,
        std::f32::consts::FRAC_2_SQRT_PI,
    ];
    polynomial::<FMA, 10>(z, series)
}

/// `erfc(a)` for `a >= 0.45`: `exp(-a^2)` times a polynomial in `t = 1 / (1 + a/2)`, a Chebyshev fit to
/// `exp(a^2) erfc(a) / t` for a up to 10.6, beyond which the result is zero.
#[inline(always)]
fn erfc_tail<const FMA: bool>(a: f32) -> f32 {
    let a = if a > 10.6 { 10.6 } else { a };
    let t = 1.0 / (1.0 + 0.5 * a);
    let fit = [
        -0.023_054_935,
        0.036_405_037,
        0.117_647_85,
        -0.327_197_86,
        0.186_861_72,
        0.004_608_843_3,
        0.196_590_97,
        0.243_665_11,
        0.282_370_7,
        0.282_084_54,
    ];
    // a^2 = high^2 + (a - high)(a + high) with an exact first term: its rounding would be magnified by exp.
    let high = f32::from_bits(a.to_bits() & 0xffff_f000);
    let rest = (a - high) * (a + high);
    exp::<FMA>(-high * high) * (1.0 - rest + rest * rest * (0.5 - rest / 6.0)) * t * polynomial::<FMA, 10>(t, fit)
}

#[inline(always)]
pub(crate) fn erf<const FMA: bool>(x: f32) -> f32 {
    let a = x.abs();
    let near = x * erf_series::<FMA>(x * x);
    let far = (1.0 - erfc_tail::<FMA>(if a < 0.5 { 0.5 } else { a })).copysign(x);
    if a < 1.0 || x.is_nan() { near } else { far }
}

#[inline(always)]
pub(crate) fn erfc<const FMA: bool>(x: f32) -> f32 {
    let a = x.abs();
    let near = 1.0 - x * erf_series::<FMA>(x * x);
    let tail = erfc_tail::<FMA>(if a < 0.5 { 0.5 } else { a });
    let far = if x < 0.0 { 2.0 - tail } else { tail };
    if a < 0.5 || x.is_nan() { near } else { far }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with f64 over a range, in units of the last place of the exact result.
    fn check(name: &str, ulps: f64, range: (f32, f32), f: impl Fn(f32) -> f32, exact: impl Fn(f64) -> f64) {
        let steps = 40_000;
        for i in 0..=steps {
            let x = range.0 + (range.1 - range.0) * (i as f32 / steps as f32);
            let (y, e) = (f(x) as f64, exact(x as f64));
            let unit = (e.abs().max(f32::MIN_POSITIVE as f64) * f32::EPSILON as f64).max(1e-45);
            assert!((y - e).abs() <= ulps * unit, "{name}({x}) = {y}, expected {e}: {} units", (y - e).abs() / unit);
        }
    }

    fn check_all<const FMA: bool>() {
        check("exp", 1.5, (-87.0, 88.0), exp::<FMA>, f64::exp);
        check("exp", 1.5, (-0.5, 0.5), exp::<FMA>, f64::exp);
        check("exp_m1", 2.0, (-20.0, 80.0), exp_m1::<FMA>, f64::exp_m1);
        check("exp_m1", 2.0, (-0.5, 0.5), exp_m1::<FMA>, f64::exp_m1);
        check("ln", 1.5, (1e-3, 30.0), ln::<FMA>, f64::ln);
        check("ln", 1.5, (1e30, 1e38), ln::<FMA>, f64::ln);
        check("ln", 1.5, (1e-40, 1e-37), ln::<FMA>, f64::ln);
        check("ln_1p", 3.0, (-0.99, 3.0), ln_1p::<FMA>, f64::ln_1p);
        check("ln_1p", 3.0, (-1e-4, 1e-4), ln_1p::<FMA>, f64::ln_1p);
        check("logistic", 2.5, (-80.0, 80.0), logistic::<FMA>, |x| 1.0 / (1.0 + (-x).exp()));
        check("tanh", 3.0, (-12.0, 12.0), tanh::<FMA>, f64::tanh);
        check("tanh", 3.0, (-0.01, 0.01), tanh::<FMA>, f64::tanh);
        check("erf", 2.0, (-5.0, 5.0), erf::<FMA>, libm::erf);
        check("erfc", 10.0, (-5.0, 9.0), erfc::<FMA>, libm::erfc);
    }

    #[test]
    fn functions_are_close_to_the_exact_ones() {
        check_all::<false>();
        check_all::<true>();
    }

    #[test]
    fn special_values_are_those_of_ieee() {
        let inf = f32::INFINITY;
        assert_eq!(exp::<false>(inf), inf);
        assert_eq!(exp::<false>(-inf), 0.0);
        assert_eq!(exp::<false>(89.0), inf);
        assert_eq!(exp_m1::<false>(inf), inf);
        assert_eq!(exp_m1::<false>(-inf), -1.0);
        assert_eq!(ln::<false>(0.0), -inf);
        assert_eq!(ln::<false>(1.0), 0.0);
        assert_eq!(ln::<false>(inf), inf);
        assert_eq!(ln_1p::<false>(-1.0), -inf);
        assert_eq!(ln_1p::<false>(inf), inf);
        assert_eq!(logistic::<false>(-inf), 0.0);
        assert_eq!(logistic::<false>(inf), 1.0);
        assert_eq!(tanh::<false>(-inf), -1.0);
        assert_eq!(erf::<false>(inf), 1.0);
        assert_eq!(erfc::<false>(inf), 0.0);
        assert_eq!(erfc::<false>(-inf), 2.0);
        for f in [
            exp::<false>,
            exp_m1::<false>,
            ln::<false>,
            ln_1p::<false>,
            logistic::<false>,
            tanh::<false>,
            erf::<false>,
            erfc::<false>,
        ] {
            assert!(f(f32::NAN).is_nan());
        }
        assert!(ln::<false>(-1.0).is_nan());
    }
}
