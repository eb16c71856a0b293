//! Lowers arithmetic, comparisons and functions of one element.

use super::*;
use Lowering::{Compare, Function, Logical, OfFloats, OfNumbers, ToWhole};

pub(crate) const TABLE: &[(&str, Lowering)] = &[
    ("exp", OfFloats(Unary::Exponential)),
    ("expm1", OfFloats(Unary::ExponentialMinusOne)),
    ("special_expm1", OfFloats(Unary::ExponentialMinusOne)),
    ("log", OfFloats(Unary::Log)),
    ("log1p", OfFloats(Unary::LogPlusOne)),
    ("special_log1p", OfFloats(Unary::LogPlusOne)),
    ("sigmoid", OfFloats(Unary::Logistic)),
    ("special_expit", OfFloats(Unary::Logistic)),
    ("tanh", OfFloats(Unary::Tanh)),
    ("sqrt", OfFloats(Unary::Sqrt)),
    ("rsqrt", OfFloats(Unary::Rsqrt)),
    ("sin", OfFloats(Unary::Sine)),
    ("cos", OfFloats(Unary::Cosine)),
    ("tan", OfFloats(Unary::Tan)),
    ("erf", OfFloats(Unary::Erf)),
    ("special_erf", OfFloats(Unary::Erf)),
    ("erfc", OfFloats(Unary::Erfc)),
    ("special_erfc", OfFloats(Unary::Erfc)),
    ("neg", OfNumbers(Unary::Negate)),
    ("negative", OfNumbers(Unary::Negate)),
    ("abs", OfNumbers(Unary::Abs)),
    ("absolute", OfNumbers(Unary::Abs)),
    ("sign", OfNumbers(Unary::Sign)),
    ("sgn", OfNumbers(Unary::Sign)),
    ("bitwise_not", OfNumbers(Unary::Not)),
    ("floor", ToWhole(Unary::Floor)),
    ("ceil", ToWhole(Unary::Ceil)),
    ("round", Function(round)),
    ("trunc", Function(trunc)),
    ("fix", Function(trunc)),
    ("frac", Function(frac)),
    ("reciprocal", Function(reciprocal)),
    ("square", Function(square)),
    ("log2", Function(|c| scaled_log(c, std::f64::consts::LN_2))),
    ("log10", Function(|c| scaled_log(c, std::f64::consts::LN_10))),
    ("exp2", Function(exp2)),
    ("special_exp2", Function(exp2)),
    ("sinh", Function(|c| of_floats(c, a::sinh))),
    ("cosh", Function(|c| of_floats(c, a::cosh))),
    ("asin", Function(|c| of_floats(c, a::asin))),
    ("arcsin", Function(|c| of_floats(c, a::asin))),
    ("acos", Function(|c| of_floats(c, a::acos))),
    ("arccos", Function(|c| of_floats(c, a::acos))),
    ("atan", Function(|c| of_floats(c, a::atan))),
    ("arctan", Function(|c| of_floats(c, a::atan))),
    ("asinh", Function(|c| of_floats(c, a::asinh))),
    ("arcsinh", Function(|c| of_floats(c, a::asinh))),
    ("acosh", Function(|c| of_floats(c, a::acosh))),
    ("arccosh", Function(|c| of_floats(c, a::acosh))),
    ("atanh", Function(|c| of_floats(c, a::atanh))),
    ("arctanh", Function(|c| of_floats(c, a::atanh))),
    ("erfinv", Function(|c| of_floats(c, a::erf_inv))),
    ("special_erfinv", Function(|c| of_floats(c, a::erf_inv))),
    ("lgamma", Function(|c| of_floats(c, a::lgamma))),
    ("special_gammaln", Function(|c| of_floats(c, a::lgamma))),
    ("digamma", Function(|c| of_floats(c, a::digamma))),
    ("special_digamma", Function(|c| of_floats(c, a::digamma))),
    ("special_psi", Function(|c| of_floats(c, a::digamma))),
    ("special_ndtr", Function(|c| of_floats(c, a::normal_cdf))),
    ("special_ndtri", Function(|c| of_floats(c, a::normal_quantile))),
    ("positive", Function(|_| Ok(Out::Same))),
    ("isnan", Function(isnan)),
    ("isinf", Function(isinf)),
    ("isfinite", Function(isfinite)),
    ("nan_to_num", Function(nan_to_num)),
    ("logical_not", Function(logical_not)),
    ("add", Function(|c| sum(c, Binary::Add, &["self", "other"]))),
    ("sub", Function(|c| sum(c, Binary::Subtract, &["self", "other"]))),
    ("subtract", Function(|c| sum(c, Binary::Subtract, &["self", "other"]))),
    ("rsub", Function(|c| sum(c, Binary::Subtract, &["other", "self"]))),
    ("mul", Lowering::Binary(Binary::Multiply)),
    ("multiply", Lowering::Binary(Binary::Multiply)),
    ("div", Function(div)),
    ("divide", Function(div)),
    ("true_divide", Function(div)),
    ("floor_divide", Function(|c| divided(c, Some("floor")))),
    ("remainder", Function(remainder)),
    ("fmod", Lowering::Binary(Binary::Remainder)),
    ("pow", Function(pow)),
    ("maximum", Lowering::Binary(Binary::Maximum)),
    ("minimum", Lowering::Binary(Binary::Minimum)),
    ("atan2", Function(atan2)),
    ("arctan2", Function(atan2)),
    ("hypot", Function(hypot)),
    ("logaddexp", Function(logaddexp)),
    ("xlogy", Function(xlogy)),
    ("special_xlogy", Function(xlogy)),
    ("eq", Compare(Direction::Eq)),
    ("ne", Compare(Direction::Ne)),
    ("not_equal", Compare(Direction::Ne)),
    ("lt", Compare(Direction::Lt)),
    ("less", Compare(Direction::Lt)),
    ("le", Compare(Direction::Le)),
    ("less_equal", Compare(Direction::Le)),
    ("gt", Compare(Direction::Gt)),
    ("greater", Compare(Direction::Gt)),
    ("ge", Compare(Direction::Ge)),
    ("greater_equal", Compare(Direction::Ge)),
    ("logical_and", Logical(Binary::And)),
    ("logical_or", Logical(Binary::Or)),
    ("logical_xor", Logical(Binary::Xor)),
    ("__and__", Lowering::Binary(Binary::And)),
    ("__or__", Lowering::Binary(Binary::Or)),
    ("__xor__", Lowering::Binary(Binary::Xor)),
    ("bitwise_and", Lowering::Binary(Binary::And)),
    ("bitwise_or", Lowering::Binary(Binary::Or)),
    ("bitwise_xor", Lowering::Binary(Binary::Xor)),
    ("__lshift__", Lowering::Binary(Binary::ShiftLeft)),
    ("__rshift__", Lowering::Binary(Binary::ShiftRightArithmetic)),
    ("bitwise_left_shift", Lowering::Binary(Binary::ShiftLeft)),
    ("bitwise_right_shift", Lowering::Binary(Binary::ShiftRightArithmetic)),
    ("where", Function(select)),
    ("masked_fill", Function(masked_fill)),
    ("clamp", Function(clamp)),
    ("clip", Function(clamp)),
    ("clamp_min", Function(clamp)),
    ("clamp_max", Function(clamp)),
    ("addcmul", Function(|c| add_scaled(c, Binary::Multiply))),
    ("addcdiv", Function(|c| add_scaled(c, Binary::Divide))),
    ("lerp", Function(lerp)),
    ("fill", Function(fill)),
    ("zero", Function(zero)),
    ("copy", Function(copy)),
];

/// `left op alpha * right` for the arguments with these names. `alpha` scales the argument other than `self`,
/// except in `rsub`, where it scales `self`.
fn sum(c: &mut Call<'_>, op: Binary, names: &[&str]) -> Lowered {
    let both = c.promoted(names, false)?;
    let alpha = c.float("alpha", 1.0)?;
    let right = if alpha == 1.0 { both[1] } else { number(c, Binary::Multiply, both[1], alpha)? };
    // Sums of truth values are truth values, and so is our addition of them.
    value(two(c, op, both[0], right)?)
}

fn div(c: &mut Call<'_>) -> Lowered {
    let mode = c.text("rounding_mode").map(str::to_string);
    divided(c, mode.as_deref())
}

fn divided(c: &mut Call<'_>, rounding: Option<&str>) -> Lowered {
    let both = c.promoted(&["self", "other"], rounding.is_none())?;
    let (x, y) = (both[0], both[1]);
    let quotient = two(c, Binary::Divide, x, y)?;
    if rounding.is_none() {
        return value(quotient);
    }
    let floor = rounding == Some("floor");
    if c.dtype_of(quotient).is_float() {
        return match floor {
            true => value(one(c, Unary::Floor, quotient)?),
            false => value(truncated(c, quotient)?),
        };
    }
    if !floor || c.dtype_of(quotient).is_unsigned_integer() {
        return value(quotient);
    }
    // The quotient is rounded towards zero. Subtracts one if there is a remainder and the signs differ.
    let rest = two(c, Binary::Remainder, x, y)?;
    let wrong = off_by_divisor(c, rest, y)?;
    let dtype = c.dtype_of(quotient);
    let less = a::convert(c.g(), wrong, dtype)?;
    value(two(c, Binary::Subtract, quotient, less)?)
}

/// True if the remainder of a division is not zero and its sign differs from that of the divisor.
fn off_by_divisor(c: &mut Call<'_>, rest: ValueId, y: ValueId) -> Result<ValueId, Reject> {
    let y = {
        let shape = c.shape_of(rest);
        a::broadcast_to(c.g(), y, &shape)?
    };
    let zero = a::full_like(c.g(), rest, 0.0)?;
    let there = a::compare(c.g(), Direction::Ne, rest, zero)?;
    let below = a::compare(c.g(), Direction::Lt, rest, zero)?;
    let negative = a::compare(c.g(), Direction::Lt, y, zero)?;
    let differ = a::compare(c.g(), Direction::Ne, below, negative)?;
    two(c, Binary::And, there, differ)
}

/// The remainder with the sign of the divisor.
fn remainder(c: &mut Call<'_>) -> Lowered {
    let both = c.promoted(&["self", "other"], false)?;
    let rest = two(c, Binary::Remainder, both[0], both[1])?;
    let wrong = off_by_divisor(c, rest, both[1])?;
    let moved = two(c, Binary::Add, rest, both[1])?;
    value(a::select(c.g(), wrong, moved, rest)?)
}

fn truncated(c: &mut Call<'_>, x: ValueId) -> Result<ValueId, Reject> {
    let zero = a::full_like(c.g(), x, 0.0)?;
    let below = a::compare(c.g(), Direction::Lt, x, zero)?;
    let (up, down) = (one(c, Unary::Ceil, x)?, one(c, Unary::Floor, x)?);
    Ok(a::select(c.g(), below, up, down)?)
}

fn trunc(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    if c.dtype_of(x).is_float() { value(truncated(c, x)?) } else { value(x) }
}

fn frac(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let whole = truncated(c, x)?;
    value(two(c, Binary::Subtract, x, whole)?)
}

fn round(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    if !c.dtype_of(x).is_float() {
        return value(x);
    }
    let places = c.int("decimals", 0)?;
    if places == 0 {
        return value(one(c, Unary::RoundNearestEven, x)?);
    }
    let unit = 10f64.powi(i32::try_from(places).unwrap_or(0));
    let scaled = number(c, Binary::Multiply, x, unit)?;
    let whole = one(c, Unary::RoundNearestEven, scaled)?;
    value(number(c, Binary::Divide, whole, unit)?)
}

fn reciprocal(c: &mut Call<'_>) -> Lowered {
    let x = c.float_tensor()?;
    value(inverse(c, x)?)
}

fn inverse(c: &mut Call<'_>, x: ValueId) -> Result<ValueId, Reject> {
    let unit = a::full_like(c.g(), x, 1.0)?;
    two(c, Binary::Divide, unit, x)
}

fn square(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    value(two(c, Binary::Multiply, x, x)?)
}

fn scaled_log(c: &mut Call<'_>, unit: f64) -> Lowered {
    let x = c.float_tensor()?;
    let log = one(c, Unary::Log, x)?;
    value(number(c, Binary::Multiply, log, 1.0 / unit)?)
}

fn exp2(c: &mut Call<'_>) -> Lowered {
    let x = c.float_tensor()?;
    let scaled = number(c, Binary::Multiply, x, std::f64::consts::LN_2)?;
    value(one(c, Unary::Exponential, scaled)?)
}

/// A function of `array`, computed in f32 if the type is narrower.
fn of_floats(c: &mut Call<'_>, f: impl FnOnce(&mut altiplano_ir::graph::Graph, ValueId) -> a::Built) -> Lowered {
    let x = c.float_tensor()?;
    value(a::in_f32(c.g(), x, f)?)
}

fn atan2(c: &mut Call<'_>) -> Lowered {
    let both = c.promoted(&["self", "other"], true)?;
    value(two(c, Binary::Atan2, both[0], both[1])?)
}

fn hypot(c: &mut Call<'_>) -> Lowered {
    let both = c.promoted(&["self", "other"], true)?;
    let (x, y) = (two(c, Binary::Multiply, both[0], both[0])?, two(c, Binary::Multiply, both[1], both[1])?);
    let sum = two(c, Binary::Add, x, y)?;
    value(one(c, Unary::Sqrt, sum)?)
}

fn logaddexp(c: &mut Call<'_>) -> Lowered {
    let both = c.promoted(&["self", "other"], true)?;
    let most = two(c, Binary::Maximum, both[0], both[1])?;
    let apart = two(c, Binary::Subtract, both[0], both[1])?;
    let apart = one(c, Unary::Abs, apart)?;
    let apart = one(c, Unary::Negate, apart)?;
    let less = one(c, Unary::Exponential, apart)?;
    let log = one(c, Unary::LogPlusOne, less)?;
    value(two(c, Binary::Add, most, log)?)
}

/// `x log(y)`, which is zero if `x` is zero.
fn xlogy(c: &mut Call<'_>) -> Lowered {
    let both = c.promoted(&["self", "other"], true)?;
    let (x, y) = a::broadcast(c.g(), both[0], both[1])?;
    let zero = a::full_like(c.g(), x, 0.0)?;
    let none = a::compare(c.g(), Direction::Eq, x, zero)?;
    let unit = a::full_like(c.g(), y, 1.0)?;
    let y = a::select(c.g(), none, unit, y)?;
    let log = one(c, Unary::Log, y)?;
    value(two(c, Binary::Multiply, x, log)?)
}

fn isnan(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    value(a::compare(c.g(), Direction::Ne, x, x)?)
}

fn isfinite(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    if c.dtype_of(x).is_float() {
        return value(one(c, Unary::IsFinite, x)?);
    }
    let shape = c.shape_of(x);
    value(a::full(c.g(), &shape, 1.0, DType::Bool)?)
}

fn isinf(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    if !c.dtype_of(x).is_float() {
        let shape = c.shape_of(x);
        return value(a::full(c.g(), &shape, 0.0, DType::Bool)?);
    }
    let size = one(c, Unary::Abs, x)?;
    let infinity = a::full_like(c.g(), x, f64::INFINITY)?;
    value(a::compare(c.g(), Direction::Eq, size, infinity)?)
}

fn nan_to_num(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let dtype = c.dtype_of(x);
    if !dtype.is_float() {
        return value(x);
    }
    let most = dtype.float_format().map_or(f64::MAX, |format| format.greatest());
    let (nan, high) = (c.float("nan", 0.0)?, c.float("posinf", most)?);
    let low = c.float("neginf", -most)?;
    let mut y = x;
    for (found, put) in [(f64::INFINITY, high), (f64::NEG_INFINITY, low)] {
        let found = a::full_like(c.g(), x, found)?;
        let hit = a::compare(c.g(), Direction::Eq, x, found)?;
        let put = a::full_like(c.g(), x, put)?;
        y = a::select(c.g(), hit, put, y)?;
    }
    let hit = a::compare(c.g(), Direction::Ne, x, x)?;
    let put = a::full_like(c.g(), x, nan)?;
    value(a::select(c.g(), hit, put, y)?)
}

fn logical_not(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let truth = a::convert(c.g(), x, DType::Bool)?;
    value(one(c, Unary::Not, truth)?)
}

fn pow(c: &mut Call<'_>) -> Lowered {
    let exponent = c.operand("exponent")?;
    let base = c.operand("self")?;
    let dtype = c.common_type(&[base, exponent]);
    let x = c.as_tensor(base, dtype)?;
    let power = match exponent {
        Operand::Int(n) => Some(n as f64),
        Operand::Float(p) => Some(p),
        _ => None,
    };
    // Small powers become products, which are exact and have gradients everywhere.
    let small = match power {
        Some(0.5) if dtype.is_float() => Some(one(c, Unary::Sqrt, x)?),
        Some(-0.5) if dtype.is_float() => Some(one(c, Unary::Rsqrt, x)?),
        Some(-1.0) if dtype.is_float() => Some(inverse(c, x)?),
        Some(1.0) => Some(x),
        Some(2.0) => Some(two(c, Binary::Multiply, x, x)?),
        Some(3.0) => {
            let square = two(c, Binary::Multiply, x, x)?;
            Some(two(c, Binary::Multiply, square, x)?)
        }
        Some(4.0) => {
            let square = two(c, Binary::Multiply, x, x)?;
            Some(two(c, Binary::Multiply, square, square)?)
        }
        Some(-2.0) if dtype.is_float() => {
            let square = two(c, Binary::Multiply, x, x)?;
            Some(inverse(c, square)?)
        }
        _ => None,
    };
    match small {
        Some(y) => value(y),
        None => {
            let exponent = c.as_tensor(exponent, dtype)?;
            value(two(c, Binary::Power, x, exponent)?)
        }
    }
}

fn select(c: &mut Call<'_>) -> Lowered {
    if !c.has("self") || !c.has("other") {
        let condition = c.tensor("condition")?;
        return Ok(Out::Values(super::marked::mark(c, condition)?));
    }
    let condition = c.tensor("condition")?;
    let condition = a::convert(c.g(), condition, DType::Bool)?;
    let both = c.promoted(&["self", "other"], false)?;
    value(a::select(c.g(), condition, both[0], both[1])?)
}

fn masked_fill(c: &mut Call<'_>) -> Lowered {
    let (x, mask) = (c.tensor("self")?, c.tensor("mask")?);
    let put = c.operand("value")?;
    let dtype = c.dtype_of(x);
    let put = c.as_tensor(put, dtype)?;
    value(a::select(c.g(), mask, put, x)?)
}

fn clamp(c: &mut Call<'_>) -> Lowered {
    let x = c.operand("self")?;
    let mut operands = vec![x];
    for name in ["min", "max"] {
        if c.has(name) {
            operands.push(c.operand(name)?);
        }
    }
    let dtype = c.common_type(&operands);
    let mut y = c.as_tensor(x, dtype)?;
    for (name, op) in [("min", Binary::Maximum), ("max", Binary::Minimum)] {
        if c.has(name) {
            let bound = c.operand(name)?;
            let bound = c.as_tensor(bound, dtype)?;
            y = two(c, op, y, bound)?;
        }
    }
    value(y)
}

fn add_scaled(c: &mut Call<'_>, op: Binary) -> Lowered {
    let all = c.promoted(&["self", "tensor1", "tensor2"], op == Binary::Divide)?;
    let both = two(c, op, all[1], all[2])?;
    let factor = c.float("value", 1.0)?;
    let both = if factor == 1.0 { both } else { number(c, Binary::Multiply, both, factor)? };
    value(two(c, Binary::Add, all[0], both)?)
}

fn lerp(c: &mut Call<'_>) -> Lowered {
    let all = c.promoted(&["self", "end", "weight"], true)?;
    let way = two(c, Binary::Subtract, all[1], all[0])?;
    let part = two(c, Binary::Multiply, way, all[2])?;
    value(two(c, Binary::Add, all[0], part)?)
}

fn fill(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let put = c.operand("value")?;
    let (dtype, shape) = (c.dtype_of(x), c.shape_of(x));
    let put = c.as_tensor(put, dtype)?;
    value(a::broadcast_to(c.g(), put, &shape)?)
}

fn zero(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    value(a::full_like(c.g(), x, 0.0)?)
}

fn copy(c: &mut Call<'_>) -> Lowered {
    let (x, source) = (c.first()?, c.tensor("src")?);
    let (dtype, shape) = (c.dtype_of(x), c.shape_of(x));
    let source = a::convert(c.g(), source, dtype)?;
    value(a::broadcast_to(c.g(), source, &shape)?)
}
