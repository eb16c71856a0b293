//! Activations, and normalisations to probabilities.

use super::call::{Call, Many, One, attribute};
use super::report::Reject;
use altiplano_ir::array::{self, Built};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{Binary, Direction, Unary};

pub(crate) fn relu(c: &mut Call) -> One {
    let x = c.x(0)?;
    Ok(array::relu(c.g(), x)?)
}

pub(crate) fn elu(c: &mut Call) -> One {
    let (x, alpha) = (c.x(0)?, c.float("alpha", 1.0)?);
    Ok(array::elu(c.g(), x, alpha, 1.0, 1.0)?)
}

pub(crate) fn celu(c: &mut Call) -> One {
    let (x, alpha) = (c.x(0)?, c.float("alpha", 1.0)?);
    Ok(array::elu(c.g(), x, alpha, 1.0, 1.0 / alpha)?)
}

/// Klambauer et al. 2017.
pub(crate) fn selu(c: &mut Call) -> One {
    let (alpha, gamma) = (c.float("alpha", 1.673_263_192_176_819)?, c.float("gamma", 1.050_701_022_148_132_3)?);
    let x = c.x(0)?;
    Ok(array::elu(c.g(), x, alpha, gamma, 1.0)?)
}

pub(crate) fn leaky_relu(c: &mut Call) -> One {
    let (x, alpha) = (c.x(0)?, c.float("alpha", 0.01)?);
    Ok(array::leaky_relu(c.g(), x, alpha)?)
}

pub(crate) fn prelu(c: &mut Call) -> One {
    let (x, slope) = (c.x(0)?, c.x(1)?);
    let g = c.g();
    let low = array::binary(g, Binary::Multiply, x, slope)?;
    let zero = array::full_like(g, x, 0.0)?;
    let positive = array::compare(g, Direction::Ge, x, zero)?;
    Ok(array::select(g, positive, x, low)?)
}

pub(crate) fn thresholded_relu(c: &mut Call) -> One {
    let (x, alpha) = (c.x(0)?, c.float("alpha", 1.0)?);
    let g = c.g();
    let limit = array::full_like(g, x, alpha)?;
    let zero = array::full_like(g, x, 0.0)?;
    let beyond = array::compare(g, Direction::Gt, x, limit)?;
    Ok(array::select(g, beyond, x, zero)?)
}

pub(crate) fn hard_sigmoid(c: &mut Call) -> One {
    let (alpha, beta) = (c.float("alpha", 0.2)?, c.float("beta", 0.5)?);
    let x = c.x(0)?;
    Ok(array::hard_sigmoid(c.g(), x, alpha, beta)?)
}

pub(crate) fn hard_swish(c: &mut Call) -> One {
    let x = c.x(0)?;
    Ok(array::hard_swish(c.g(), x)?)
}

pub(crate) fn mish(c: &mut Call) -> One {
    let x = c.x(0)?;
    Ok(array::mish(c.g(), x)?)
}

pub(crate) fn softplus(c: &mut Call) -> One {
    let x = c.x(0)?;
    Ok(array::softplus(c.g(), x, 1.0, f64::INFINITY)?)
}

pub(crate) fn softsign(c: &mut Call) -> One {
    let x = c.x(0)?;
    let g = c.g();
    let size = array::unary(g, Unary::Abs, x)?;
    let divisor = array::with_number(g, Binary::Add, size, 1.0)?;
    Ok(array::binary(g, Binary::Divide, x, divisor)?)
}

pub(crate) fn swish(c: &mut Call) -> One {
    let (x, alpha) = (c.x(0)?, c.float("alpha", 1.0)?);
    Ok(sigmoid_weighted(c.g(), x, alpha)?)
}

/// SwiGLU: a sigmoid-weighted gate times a value.
pub(crate) fn swiglu(c: &mut Call) -> One {
    let (gate, value, alpha) = (c.x(0)?, c.x(1)?, c.float("alpha", 1.0)?);
    let gate = sigmoid_weighted(c.g(), gate, alpha)?;
    Ok(array::binary(c.g(), Binary::Multiply, gate, value)?)
}

/// `x sigmoid(alpha x)`.
fn sigmoid_weighted(g: &mut Graph, x: ValueId, alpha: f64) -> Built {
    if alpha == 1.0 {
        return array::silu(g, x);
    }
    let scaled = array::with_number(g, Binary::Multiply, x, alpha)?;
    let weight = array::sigmoid(g, scaled)?;
    array::binary(g, Binary::Multiply, x, weight)
}

pub(crate) fn quick_gelu(c: &mut Call) -> One {
    let (x, alpha) = (c.x(0)?, c.float("alpha", 1.702)?);
    Ok(sigmoid_weighted(c.g(), x, alpha)?)
}

pub(crate) fn gelu(c: &mut Call) -> One {
    let x = c.x(0)?;
    match c.text("approximate", "none")? {
        "none" => Ok(array::gelu_erf(c.g(), x)?),
        "tanh" => Ok(array::gelu_tanh(c.g(), x)?),
        _ => Err(attribute("approximate")),
    }
}

/// The operand plus an optional bias.
fn biased(c: &mut Call) -> One {
    let x = c.x(0)?;
    match c.opt(1) {
        Some(bias) => Ok(array::binary(c.g(), Binary::Add, x, bias)?),
        None => Ok(x),
    }
}

pub(crate) fn bias_gelu(c: &mut Call) -> One {
    let x = biased(c)?;
    Ok(array::gelu_erf(c.g(), x)?)
}

pub(crate) fn fast_gelu(c: &mut Call) -> One {
    let x = biased(c)?;
    Ok(array::gelu_tanh(c.g(), x)?)
}

/// Moves elements towards zero by `bias`, and sets those within `lambd` of zero to zero.
pub(crate) fn shrink(c: &mut Call) -> One {
    let (bias, lambd) = (c.float("bias", 0.0)?, c.float("lambd", 0.5)?);
    let x = c.x(0)?;
    let dtype = c.dtype(x);
    let g = c.g();
    // Integers are compared with a number that need not be an integer.
    let wide = if dtype.is_float() { x } else { array::convert(g, x, DType::F64)? };
    let [low, high] = [-lambd, lambd].map(|limit| array::full_like(g, wide, limit));
    let above = array::compare(g, Direction::Gt, wide, high?)?;
    let below = array::compare(g, Direction::Lt, wide, low?)?;
    let down = array::with_number(g, Binary::Subtract, wide, bias)?;
    let up = array::with_number(g, Binary::Add, wide, bias)?;
    let zero = array::full_like(g, wide, 0.0)?;
    let negative = array::select(g, below, up, zero)?;
    let result = array::select(g, above, down, negative)?;
    Ok(array::convert(g, result, dtype)?)
}

/// Clips to limits, which were attributes before they became operands.
pub(crate) fn clip(c: &mut Call) -> One {
    let x = c.x(0)?;
    let mut result = x;
    for (index, name, op) in [(1, "min", Binary::Maximum), (2, "max", Binary::Minimum)] {
        let said = c.float_opt(name)?;
        let known = c.known(index).and_then(|t| <[f64; 1]>::try_from(t.data.as_slice()).ok()).map(|[only]| only);
        result = match (said.or(known), c.opt(index)) {
            (Some(number), _) => array::with_number(c.g(), op, result, number)?,
            (None, Some(limit)) => array::binary(c.g(), op, result, limit)?,
            (None, None) => result,
        };
    }
    Ok(result)
}

/// The identity, as in evaluation. The second result says that no element was dropped.
pub(crate) fn dropout(c: &mut Call) -> Many {
    let x = c.x(0)?;
    let training = c.opt(2).is_some() && c.number_of(2)? != 0.0;
    let ratio = c.number_either("ratio", 1)?.unwrap_or(0.5);
    if training && ratio != 0.0 {
        return Err(Reject::Unsupported("that drops elements"));
    }
    let shape = c.shape(x);
    let mut results = vec![x];
    if c.wants(1) {
        results.push(array::full(c.g(), &shape, 1.0, DType::Bool)?);
    }
    Ok(results)
}

pub(crate) fn softmax(c: &mut Call) -> One {
    along(c, array::softmax)
}

pub(crate) fn log_softmax(c: &mut Call) -> One {
    along(c, array::log_softmax)
}

pub(crate) fn hardmax(c: &mut Call) -> One {
    along(c, |g, x, dim| {
        let (shape, dtype) = (g.shape(x).to_vec(), g.ty(x).dtype);
        let best = array::arg_max(g, x, dim, true, false)?;
        let place = array::iota(g, &shape, dim, DType::I32)?;
        let hit = array::compare(g, Direction::Eq, place, best)?;
        array::convert(g, hit, dtype)
    })
}

/// Applies `f` along `axis`. Before opset 13, the dimensions from `axis` on count as one.
fn along(c: &mut Call, f: fn(&mut Graph, ValueId, usize) -> Built) -> One {
    let x = c.x(0)?;
    let old = c.opset < 13;
    let dim = c.axis("axis", if old { 1 } else { -1 }, x)?;
    let shape = c.shape(x);
    if !old || dim + 1 == shape.len() {
        return Ok(f(c.g(), x, dim)?);
    }
    let together: u64 = shape[dim..].iter().product();
    let flat = array::reshape(c.g(), x, &[&shape[..dim], &[together]].concat())?;
    let result = f(c.g(), flat, dim)?;
    Ok(array::reshape(c.g(), result, &shape)?)
}
