//! Elementwise functions between layers, and normalisations to probabilities.

use super::*;
use crate::dtype::DType;
use crate::graph::{Graph, ValueId};
use crate::op::{Binary, Direction, Op, Unary};

pub fn unary(g: &mut Graph, op: Unary, x: ValueId) -> Built {
    g.push(Op::Unary(op), &[x])
}

/// Runs `f` in f32 if `x` has a narrower float type. Frameworks do so where sums or powers would lose digits.
pub fn in_f32(g: &mut Graph, x: ValueId, f: impl FnOnce(&mut Graph, ValueId) -> Built) -> Built {
    let dtype = g.ty(x).dtype;
    if !dtype.is_float() || dtype.bytes() >= DType::F32.bytes() {
        return f(g, x);
    }
    let wide = g.convert(x, DType::F32);
    let y = f(g, wide)?;
    Ok(g.convert(y, dtype))
}

pub fn softmax(g: &mut Graph, x: ValueId, dim: usize) -> Built {
    in_f32(g, x, |g, x| {
        let most = max(g, x, &[dim], true)?;
        let below = binary(g, Binary::Subtract, x, most)?;
        let powers = unary(g, Unary::Exponential, below)?;
        let total = sum(g, powers, &[dim], true)?;
        binary(g, Binary::Divide, powers, total)
    })
}

/// The softmax of `x` along `dim` with a competitor `beside`, which broadcasts against its sums. It is the exponentials
/// of `x` over the sum of theirs and that of `beside`.
pub fn softmax_beside(g: &mut Graph, x: ValueId, dim: usize, beside: ValueId) -> Built {
    in_f32(g, x, |g, x| {
        let beside = g.convert(beside, g.ty(x).dtype);
        let most = max(g, x, &[dim], true)?;
        let most = binary(g, Binary::Maximum, most, beside)?;
        let below = binary(g, Binary::Subtract, x, most)?;
        let powers = unary(g, Unary::Exponential, below)?;
        let total = sum(g, powers, &[dim], true)?;
        let other = binary(g, Binary::Subtract, beside, most)?;
        let other = unary(g, Unary::Exponential, other)?;
        let total = binary(g, Binary::Add, total, other)?;
        binary(g, Binary::Divide, powers, total)
    })
}

/// `cap tanh(x / cap)`: close to `x` for small `x`, and never beyond `cap`.
pub fn capped(g: &mut Graph, x: ValueId, cap: f64) -> Built {
    let scaled = with_number(g, Binary::Divide, x, cap)?;
    let bounded = unary(g, Unary::Tanh, scaled)?;
    with_number(g, Binary::Multiply, bounded, cap)
}

pub fn log_softmax(g: &mut Graph, x: ValueId, dim: usize) -> Built {
    in_f32(g, x, |g, x| {
        let most = max(g, x, &[dim], true)?;
        let below = binary(g, Binary::Subtract, x, most)?;
        let powers = unary(g, Unary::Exponential, below)?;
        let total = sum(g, powers, &[dim], true)?;
        let log = unary(g, Unary::Log, total)?;
        binary(g, Binary::Subtract, below, log)
    })
}

pub fn relu(g: &mut Graph, x: ValueId) -> Built {
    with_number(g, Binary::Maximum, x, 0.0)
}

/// `x` clipped to `low` and `high`.
pub fn clamp(g: &mut Graph, x: ValueId, low: Option<f64>, high: Option<f64>) -> Built {
    let above = match low {
        Some(low) => with_number(g, Binary::Maximum, x, low)?,
        None => x,
    };
    match high {
        Some(high) => with_number(g, Binary::Minimum, above, high),
        None => Ok(above),
    }
}

pub fn relu6(g: &mut Graph, x: ValueId) -> Built {
    clamp(g, x, Some(0.0), Some(6.0))
}

/// `x`, through which no gradient flows.
pub fn stop_gradient(g: &mut Graph, x: ValueId) -> Built {
    unary(g, Unary::StopGradient, x)
}

pub fn sigmoid(g: &mut Graph, x: ValueId) -> Built {
    unary(g, Unary::Logistic, x)
}

pub fn silu(g: &mut Graph, x: ValueId) -> Built {
    let s = sigmoid(g, x)?;
    g.push(Op::Binary(Binary::Multiply), &[x, s])
}

/// `x (1 + erf(x / sqrt 2)) / 2`.
pub fn gelu_erf(g: &mut Graph, x: ValueId) -> Built {
    let scaled = with_number(g, Binary::Multiply, x, std::f64::consts::FRAC_1_SQRT_2)?;
    let erf = unary(g, Unary::Erf, scaled)?;
    let one = with_number(g, Binary::Add, erf, 1.0)?;
    let half = with_number(g, Binary::Multiply, x, 0.5)?;
    g.push(Op::Binary(Binary::Multiply), &[half, one])
}

/// `x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2` (Hendrycks & Gimpel 2016).
pub fn gelu_tanh(g: &mut Graph, x: ValueId) -> Built {
    let square = g.push(Op::Binary(Binary::Multiply), &[x, x])?;
    let cube = g.push(Op::Binary(Binary::Multiply), &[square, x])?;
    let small = with_number(g, Binary::Multiply, cube, 0.044715)?;
    let inner = g.push(Op::Binary(Binary::Add), &[x, small])?;
    let scaled = with_number(g, Binary::Multiply, inner, (2.0 / std::f64::consts::PI).sqrt())?;
    let tanh = unary(g, Unary::Tanh, scaled)?;
    let one = with_number(g, Binary::Add, tanh, 1.0)?;
    let half = with_number(g, Binary::Multiply, x, 0.5)?;
    g.push(Op::Binary(Binary::Multiply), &[half, one])
}

/// `x sigmoid(1.702 x)`.
pub fn gelu_sigmoid(g: &mut Graph, x: ValueId) -> Built {
    let scaled = with_number(g, Binary::Multiply, x, 1.702)?;
    let s = sigmoid(g, scaled)?;
    g.push(Op::Binary(Binary::Multiply), &[x, s])
}

/// `log(1 + exp(beta x)) / beta`, or `x` if `beta x > threshold`.
pub fn softplus(g: &mut Graph, x: ValueId, beta: f64, threshold: f64) -> Built {
    let scaled = with_number(g, Binary::Multiply, x, beta)?;
    // This form, max(s, 0) + log(1 + exp(-|s|)), does not overflow.
    let zero = relu(g, scaled)?;
    let size = unary(g, Unary::Abs, scaled)?;
    let negative = unary(g, Unary::Negate, size)?;
    let power = unary(g, Unary::Exponential, negative)?;
    let log = unary(g, Unary::LogPlusOne, power)?;
    let both = g.push(Op::Binary(Binary::Add), &[zero, log])?;
    let soft = with_number(g, Binary::Divide, both, beta)?;
    if threshold == f64::INFINITY {
        return Ok(soft);
    }
    let limit = full_like(g, x, threshold)?;
    let beyond = compare(g, Direction::Gt, scaled, limit)?;
    select(g, beyond, x, soft)
}

/// `x` if positive, else `alpha (exp(input x) - 1)`, times `scale`.
pub fn elu(g: &mut Graph, x: ValueId, alpha: f64, scale: f64, input: f64) -> Built {
    let negative = with_number(g, Binary::Minimum, x, 0.0)?;
    let scaled = with_number(g, Binary::Multiply, negative, input)?;
    let power = unary(g, Unary::ExponentialMinusOne, scaled)?;
    let low = with_number(g, Binary::Multiply, power, alpha * scale)?;
    let high = with_number(g, Binary::Multiply, x, scale)?;
    let zero = full_like(g, x, 0.0)?;
    let positive = compare(g, Direction::Gt, x, zero)?;
    select(g, positive, high, low)
}

pub fn leaky_relu(g: &mut Graph, x: ValueId, slope: f64) -> Built {
    let low = with_number(g, Binary::Multiply, x, slope)?;
    let zero = full_like(g, x, 0.0)?;
    let positive = compare(g, Direction::Gt, x, zero)?;
    select(g, positive, x, low)
}

/// `alpha x + beta`, clipped to the range from 0 to 1.
pub fn hard_sigmoid(g: &mut Graph, x: ValueId, alpha: f64, beta: f64) -> Built {
    let scaled = with_number(g, Binary::Multiply, x, alpha)?;
    let moved = with_number(g, Binary::Add, scaled, beta)?;
    clamp(g, moved, Some(0.0), Some(1.0))
}

/// `x hard_sigmoid(x)` with the line `x / 6 + 1 / 2`.
pub fn hard_swish(g: &mut Graph, x: ValueId) -> Built {
    let s = hard_sigmoid(g, x, 1.0 / 6.0, 0.5)?;
    g.push(Op::Binary(Binary::Multiply), &[x, s])
}

pub fn mish(g: &mut Graph, x: ValueId) -> Built {
    let soft = softplus(g, x, 1.0, f64::INFINITY)?;
    let tanh = unary(g, Unary::Tanh, soft)?;
    g.push(Op::Binary(Binary::Multiply), &[x, tanh])
}
