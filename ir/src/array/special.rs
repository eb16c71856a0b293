//! Mathematical functions that no op stands for, as compositions of ops, accurate to single precision.
//!
//! Each formula avoids the cancellation of the textbook one near zero and its overflow for large arguments. Where a formula
//! holds on one side of a bound, it gets an argument near that side on the other one too: its slope there is multiplied by zero,
//! and must not be infinite. At the bound itself the argument is as it is, since slopes are shared where two values are equal.

use std::f64::consts::{FRAC_1_SQRT_2, LN_2, PI};

use super::*;
use crate::dtype::DType;
use crate::graph::{Graph, ValueId};
use crate::op::{Binary, Direction, Unary};

fn plus(g: &mut Graph, x: ValueId, number: f64) -> Built {
    with_number(g, Binary::Add, x, number)
}

fn times(g: &mut Graph, x: ValueId, number: f64) -> Built {
    with_number(g, Binary::Multiply, x, number)
}

/// `number - x`.
fn from(g: &mut Graph, number: f64, x: ValueId) -> Built {
    let number = full_like(g, x, number)?;
    binary(g, Binary::Subtract, number, x)
}

fn test(g: &mut Graph, x: ValueId, direction: Direction, number: f64) -> Built {
    let number = full_like(g, x, number)?;
    compare(g, direction, x, number)
}

/// `x` where `predicate` holds, a number elsewhere.
fn where_or(g: &mut Graph, predicate: ValueId, x: ValueId, number: f64) -> Built {
    let number = full_like(g, x, number)?;
    select(g, predicate, x, number)
}

/// `(e + e / (e + 1)) / 2` with `e = exp(x) - 1` near zero. Elsewhere halves are taken inside the exponentials, which then
/// overflow no sooner than the result.
pub fn sinh(g: &mut Graph, x: ValueId) -> Built {
    let close = clamp(g, x, Some(-2.0), Some(2.0))?;
    let e = unary(g, Unary::ExponentialMinusOne, close)?;
    let e1 = plus(g, e, 1.0)?;
    let ratio = binary(g, Binary::Divide, e, e1)?;
    let sum = binary(g, Binary::Add, e, ratio)?;
    let near = times(g, sum, 0.5)?;
    let (up, down) = half_exponentials(g, x)?;
    let far = binary(g, Binary::Subtract, up, down)?;
    let size = unary(g, Unary::Abs, x)?;
    let small = test(g, size, Direction::Lt, 1.0)?;
    select(g, small, near, far)
}

pub fn cosh(g: &mut Graph, x: ValueId) -> Built {
    let (up, down) = half_exponentials(g, x)?;
    binary(g, Binary::Add, up, down)
}

/// `exp(x) / 2` and `exp(-x) / 2`.
fn half_exponentials(g: &mut Graph, x: ValueId) -> Result<(ValueId, ValueId), ShapeError> {
    let (up, down) = (plus(g, x, -LN_2)?, from(g, -LN_2, x)?);
    Ok((unary(g, Unary::Exponential, up)?, unary(g, Unary::Exponential, down)?))
}

/// `sqrt((1 - x)(1 + x))`.
fn cosine_of(g: &mut Graph, x: ValueId) -> Built {
    let (below, above) = (from(g, 1.0, x)?, plus(g, x, 1.0)?);
    let product = binary(g, Binary::Multiply, below, above)?;
    unary(g, Unary::Sqrt, product)
}

pub fn asin(g: &mut Graph, x: ValueId) -> Built {
    let cosine = cosine_of(g, x)?;
    binary(g, Binary::Atan2, x, cosine)
}

pub fn acos(g: &mut Graph, x: ValueId) -> Built {
    let sine = cosine_of(g, x)?;
    binary(g, Binary::Atan2, sine, x)
}

pub fn atan(g: &mut Graph, x: ValueId) -> Built {
    with_number(g, Binary::Atan2, x, 1.0)
}

/// `atanh(x / sqrt(x^2 + 1))` near zero, elsewhere `sign(x) log(1 + a + a^2 / (1 + sqrt(a^2 + 1)))` with `a = |x|`, and
/// `sign(x) log(2 a)` where `a^2` could overflow.
pub fn asinh(g: &mut Graph, x: ValueId) -> Built {
    let close = clamp(g, x, Some(-2.0), Some(2.0))?;
    let square = binary(g, Binary::Multiply, close, close)?;
    let above = plus(g, square, 1.0)?;
    let root = unary(g, Unary::Rsqrt, above)?;
    let tangent = binary(g, Binary::Multiply, close, root)?;
    let near = atanh(g, tangent)?;

    let size = unary(g, Unary::Abs, x)?;
    let far = with_number(g, Binary::Maximum, size, 0.5)?;
    let square = binary(g, Binary::Multiply, far, far)?;
    let above = plus(g, square, 1.0)?;
    let root = unary(g, Unary::Sqrt, above)?;
    let below = plus(g, root, 1.0)?;
    let ratio = binary(g, Binary::Divide, square, below)?;
    let sum = binary(g, Binary::Add, far, ratio)?;
    let middle = unary(g, Unary::LogPlusOne, sum)?;
    let log = unary(g, Unary::Log, far)?;
    let twice = plus(g, log, LN_2)?;
    let bound = overflow_of_square(g, x);
    let large = test(g, size, Direction::Ge, bound)?;
    let value = select(g, large, twice, middle)?;
    let sign = unary(g, Unary::Sign, x)?;
    let value = binary(g, Binary::Multiply, sign, value)?;
    let small = test(g, size, Direction::Lt, 1.0)?;
    select(g, small, near, value)
}

/// `log(1 + t + sqrt(t (t + 2)))` with `t = x - 1`; where squares could overflow, `log(2 x)`.
pub fn acosh(g: &mut Graph, x: ValueId) -> Built {
    let t = plus(g, x, -1.0)?;
    let t2 = plus(g, t, 2.0)?;
    let product = binary(g, Binary::Multiply, t, t2)?;
    let root = unary(g, Unary::Sqrt, product)?;
    let sum = binary(g, Binary::Add, t, root)?;
    let near = unary(g, Unary::LogPlusOne, sum)?;
    let log = unary(g, Unary::Log, x)?;
    let far = plus(g, log, LN_2)?;
    let bound = overflow_of_square(g, x);
    let large = test(g, x, Direction::Ge, bound)?;
    select(g, large, far, near)
}

/// Squares of smaller numbers are finite in the type of `x`, and one is lost beside them.
fn overflow_of_square(g: &Graph, x: ValueId) -> f64 {
    match g.ty(x).dtype {
        DType::F64 => 1e150,
        DType::F16 => 200.0,
        _ => 1e18,
    }
}

/// `(log(1 + x) - log(1 - x)) / 2`.
pub fn atanh(g: &mut Graph, x: ValueId) -> Built {
    let minus = unary(g, Unary::Negate, x)?;
    let (up, down) = (unary(g, Unary::LogPlusOne, x)?, unary(g, Unary::LogPlusOne, minus)?);
    let difference = binary(g, Binary::Subtract, up, down)?;
    times(g, difference, 0.5)
}

/// `c0 + x (c1 + x (...))` with the highest coefficient first in the list.
fn polynomial(g: &mut Graph, x: ValueId, [first, rest @ ..]: [f64; 9]) -> Built {
    let mut sum = full_like(g, x, first)?;
    for coefficient in rest {
        let product = binary(g, Binary::Multiply, sum, x)?;
        sum = plus(g, product, coefficient)?;
    }
    Ok(sum)
}

/// The single-precision polynomials of Giles, "Approximating the erfinv function" (2010). In double precision two
/// steps of Newton's method follow.
pub fn erf_inv(g: &mut Graph, x: ValueId) -> Built {
    const CENTRAL: [f64; 9] = [
        2.81022636e-08,
        3.43273939e-07,
        -3.5233877e-06,
        -4.39150654e-06,
        0.00021858087,
        -0.00125372503,
        -0.00417768164,
        0.246640727,
        1.50140941,
    ];
    const TAIL: [f64; 9] = [
        -0.000200214257,
        0.000100950558,
        0.00134934322,
        -0.00367342844,
        0.00573950773,
        -0.0076224613,
        0.00943887047,
        1.00167406,
        2.83297682,
    ];
    let minus = unary(g, Unary::Negate, x)?;
    let square = binary(g, Binary::Multiply, x, minus)?;
    let log = unary(g, Unary::LogPlusOne, square)?;
    let w = unary(g, Unary::Negate, log)?;
    let centre = plus(g, w, -2.5)?;
    let central = polynomial(g, centre, CENTRAL)?;
    // The slope of a root has no value at zero.
    let far = with_number(g, Binary::Maximum, w, 4.0)?;
    let root = unary(g, Unary::Sqrt, far)?;
    let shifted = plus(g, root, -3.0)?;
    let tail = polynomial(g, shifted, TAIL)?;
    let is_central = test(g, w, Direction::Lt, 5.0)?;
    let factor = select(g, is_central, central, tail)?;
    let mut y = binary(g, Binary::Multiply, factor, x)?;
    for _ in 0..if g.ty(x).dtype == DType::F64 { 2 } else { 0 } {
        let value = unary(g, Unary::Erf, y)?;
        let error = binary(g, Binary::Subtract, value, x)?;
        let square = binary(g, Binary::Multiply, y, y)?;
        let inverse = unary(g, Unary::Exponential, square)?;
        let step = binary(g, Binary::Multiply, error, inverse)?;
        let step = times(g, step, PI.sqrt() / 2.0)?;
        y = binary(g, Binary::Subtract, y, step)?;
    }
    let size = unary(g, Unary::Abs, x)?;
    let at_one = test(g, size, Direction::Eq, 1.0)?;
    // The sign has no slope, which infinity times anything would spoil.
    let sign = unary(g, Unary::Sign, x)?;
    let infinite = times(g, sign, f64::INFINITY)?;
    select(g, at_one, infinite, y)
}

/// The cumulative distribution of the normal distribution: `erfc(-x / sqrt(2)) / 2`.
pub fn normal_cdf(g: &mut Graph, x: ValueId) -> Built {
    let scaled = times(g, x, -FRAC_1_SQRT_2)?;
    let both = unary(g, Unary::Erfc, scaled)?;
    times(g, both, 0.5)
}

/// The inverse of [`normal_cdf`].
pub fn normal_quantile(g: &mut Graph, p: ValueId) -> Built {
    let twice = times(g, p, 2.0)?;
    let centred = plus(g, twice, -1.0)?;
    let y = erf_inv(g, centred)?;
    times(g, y, 2f64.sqrt())
}

/// Lanczos' series at `z`: its sum and the sum of its derivative (Lanczos 1964, g = 7 with nine coefficients).
fn lanczos(g: &mut Graph, z: ValueId) -> Result<(ValueId, ValueId), ShapeError> {
    const FIRST: f64 = 0.999_999_999_999_809_9;
    const COEFFICIENTS: [f64; 8] = [
        676.520_368_121_885_1,
        -1_259.139_216_722_402_8,
        771.323_428_777_653_1,
        -176.615_029_162_140_6,
        12.507_343_278_686_905,
        -0.138_571_095_265_720_12,
        9.984_369_578_019_572e-6,
        1.505_632_735_149_311_6e-7,
    ];
    let (mut sum, mut slope) = (full_like(g, z, FIRST)?, full_like(g, z, 0.0)?);
    for (index, coefficient) in COEFFICIENTS.into_iter().enumerate() {
        let below = plus(g, z, index as f64 + 1.0)?;
        let coefficient = full_like(g, z, coefficient)?;
        let term = binary(g, Binary::Divide, coefficient, below)?;
        sum = binary(g, Binary::Add, sum, term)?;
        let term = binary(g, Binary::Divide, term, below)?;
        slope = binary(g, Binary::Subtract, slope, term)?;
    }
    Ok((sum, slope))
}

/// `x - 1`, or `-x` where the reflection formula is used, and where that is.
fn reflected(g: &mut Graph, x: ValueId) -> Result<(ValueId, ValueId), ShapeError> {
    let small = test(g, x, Direction::Lt, 0.5)?;
    let (minus, less) = (unary(g, Unary::Negate, x)?, plus(g, x, -1.0)?);
    Ok((select(g, small, minus, less)?, small))
}

/// `log |gamma(x)|`.
pub fn lgamma(g: &mut Graph, x: ValueId) -> Built {
    let infinite = unary(g, Unary::Abs, x)?;
    let infinite = test(g, infinite, Direction::Eq, f64::INFINITY)?;
    let one = full_like(g, x, 1.0)?;
    let x = select(g, infinite, one, x)?;
    let (z, small) = reflected(g, x)?;
    let (sum, _) = lanczos(g, z)?;
    let t = plus(g, z, 7.5)?;
    let ratio = times(g, z, 1.0 / 7.5)?;
    let log = unary(g, Unary::LogPlusOne, ratio)?;
    let log_t = plus(g, log, 7.5f64.ln())?;
    let shifted = plus(g, z, 0.5)?;
    let over = binary(g, Binary::Divide, t, log_t)?;
    let power = binary(g, Binary::Subtract, shifted, over)?;
    let power = binary(g, Binary::Multiply, power, log_t)?;
    let log_sum = unary(g, Unary::Log, sum)?;
    let value = binary(g, Binary::Add, power, log_sum)?;
    let value = plus(g, value, (2.0 * PI).sqrt().ln())?;
    // log |gamma(x)| = log(pi / |sin(pi x)|) - log gamma(1 - x), with the sine of the distance to an integer.
    let away = where_or(g, small, x, 0.25)?;
    let size = unary(g, Unary::Abs, away)?;
    let floor = unary(g, Unary::Floor, size)?;
    let part = binary(g, Binary::Subtract, size, floor)?;
    let rest = from(g, 1.0, part)?;
    let part = binary(g, Binary::Minimum, part, rest)?;
    let angle = times(g, part, PI)?;
    let sine = unary(g, Unary::Sine, angle)?;
    let log_sine = unary(g, Unary::Log, sine)?;
    let reflected = from(g, PI.ln(), log_sine)?;
    let reflected = binary(g, Binary::Subtract, reflected, value)?;
    let value = select(g, small, reflected, value)?;
    let infinity = full_like(g, x, f64::INFINITY)?;
    select(g, infinite, infinity, value)
}

/// The derivative of `log gamma`.
pub fn digamma(g: &mut Graph, x: ValueId) -> Built {
    let (z, small) = reflected(g, x)?;
    let (sum, slope) = lanczos(g, z)?;
    let t = plus(g, z, 7.5)?;
    let ratio = times(g, z, 1.0 / 7.5)?;
    let log = unary(g, Unary::LogPlusOne, ratio)?;
    let log_t = plus(g, log, 7.5f64.ln())?;
    let relative = binary(g, Binary::Divide, slope, sum)?;
    let seven = full_like(g, x, 7.0)?;
    let over = binary(g, Binary::Divide, seven, t)?;
    let value = binary(g, Binary::Add, log_t, relative)?;
    let value = binary(g, Binary::Subtract, value, over)?;
    // digamma(x) = digamma(1 - x) - pi / tan(pi x), with the tangent of the distance to an integer.
    let away = where_or(g, small, x, 0.25)?;
    let half = plus(g, away, 0.5)?;
    let nearest = unary(g, Unary::Floor, half)?;
    let part = binary(g, Binary::Subtract, away, nearest)?;
    let angle = times(g, part, PI)?;
    let tangent = unary(g, Unary::Tan, angle)?;
    let pi = full_like(g, x, PI)?;
    let correction = binary(g, Binary::Divide, pi, tangent)?;
    let reflected = binary(g, Binary::Subtract, value, correction)?;
    let value = select(g, small, reflected, value)?;
    // At zero and the negative integers it is not defined.
    let floor = unary(g, Unary::Floor, x)?;
    let whole = compare(g, Direction::Eq, x, floor)?;
    let negative = test(g, x, Direction::Le, 0.0)?;
    let pole = binary(g, Binary::And, whole, negative)?;
    let undefined = full_like(g, x, f64::NAN)?;
    select(g, pole, undefined, value)
}
