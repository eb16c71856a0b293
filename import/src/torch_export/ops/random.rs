//! Lowers random numbers. Each step has a key, and a counter per element, so the numbers do not depend on how
//! the batch is split.

use super::*;
use Lowering::Function;
use altiplano_ir::op::{Threefry, ThreefryWord};
use altiplano_ir::rng::RANDOM_KEY;
use altiplano_ir::types::TensorType;

pub(crate) const TABLE: &[(&str, Lowering)] = &[
    ("dropout", Function(dropout)),
    ("native_dropout", Function(dropout)),
    ("feature_dropout", Function(feature_dropout)),
    ("rand", Function(|c| drawn(c, uniform))),
    ("rand_like", Function(|c| drawn(c, uniform))),
    ("randn", Function(|c| drawn(c, normal))),
    ("randn_like", Function(|c| drawn(c, normal))),
    ("randint", Function(whole_numbers)),
    ("randint_like", Function(whole_numbers)),
    ("uniform", Function(scaled_uniform)),
    ("exponential", Function(exponential)),
    ("normal", Function(scaled_normal)),
    ("bernoulli", Function(bernoulli)),
];

/// A word of random bits for each element of `shape`, for each of `words`, all of one draw.
fn bits(c: &mut Call<'_>, shape: &[u64], words: &[ThreefryWord]) -> Result<Vec<ValueId>, Reject> {
    let (key, draws) = match c.to.random {
        Some(random) => random,
        None => {
            let ty = TensorType::new(DType::U32, [2]);
            let input = altiplano_ir::op::Input { name: RANDOM_KEY.to_string(), ty };
            (c.g().push(Op::Input(input), &[])?, 0)
        }
    };
    c.to.random = Some((key, draws + 1));
    // Rows are counted separately from their elements. If rows are samples, each has the same numbers in any
    // batch.
    let rows = shape.first().copied().unwrap_or(1);
    let each: u64 = shape.iter().skip(1).product();
    let counters = [rows, each];
    let row = a::iota(c.g(), &counters, 0, DType::U32)?;
    let within = a::iota(c.g(), &counters, 1, DType::U32)?;
    let first = number(c, Binary::Multiply, row, f64::from(each as u32))?;
    let count = two(c, Binary::Add, first, within)?;
    let count = a::reshape(c.g(), count, shape)?;
    let draw = a::full(c.g(), shape, f64::from(draws), DType::U32)?;
    let mut operands = Vec::new();
    for at in 0..2 {
        let word = a::select_dim(c.g(), key, 0, at)?;
        operands.push(a::broadcast_to(c.g(), word, shape)?);
    }
    operands.extend([draw, count]);
    words.iter().map(|&word| Ok(c.g().push(Op::Threefry(Threefry { word }), &operands)?)).collect()
}

/// Booleans that are true with probability `p`.
fn chosen(c: &mut Call<'_>, shape: &[u64], p: f64) -> Result<ValueId, Reject> {
    let word = bits(c, shape, &[ThreefryWord::Xor])?[0];
    let edge = (p * 2f64.powi(32)).round().clamp(0.0, f64::from(u32::MAX));
    let edge = a::full_like(c.g(), word, edge)?;
    Ok(a::compare(c.g(), Direction::Lt, word, edge)?)
}

/// Zeros a fraction `p` of the elements of `x`, and scales up the others.
pub(crate) fn dropped(c: &mut Call<'_>, x: ValueId, p: f64) -> Result<ValueId, Reject> {
    let shape = c.shape_of(x);
    let keep = chosen(c, &shape, 1.0 - p)?;
    apply(c, x, keep, p)
}

fn apply(c: &mut Call<'_>, x: ValueId, keep: ValueId, p: f64) -> Result<ValueId, Reject> {
    let zero = a::full_like(c.g(), x, 0.0)?;
    if p >= 1.0 {
        return Ok(zero);
    }
    let scaled = number(c, Binary::Multiply, x, 1.0 / (1.0 - p))?;
    Ok(a::select(c.g(), keep, scaled, zero)?)
}

fn probability(c: &Call<'_>) -> Result<f64, Reject> {
    let p = c.float("p", 0.5)?;
    if (0.0..=1.0).contains(&p) { Ok(p) } else { Err(other("has a probability that is none")) }
}

fn dropout(c: &mut Call<'_>) -> Lowered {
    let p = probability(c)?;
    if !c.bool("train", true)? || p == 0.0 {
        return Ok(Out::Same);
    }
    let x = c.first()?;
    if c.name != "native_dropout" {
        return value(dropped(c, x, p)?);
    }
    let shape = c.shape_of(x);
    let keep = chosen(c, &shape, 1.0 - p)?;
    let y = apply(c, x, keep, p)?;
    Ok(Out::Values(vec![y, keep]))
}

/// Drops whole features.
fn feature_dropout(c: &mut Call<'_>) -> Lowered {
    let p = probability(c)?;
    if !c.bool("train", true)? || p == 0.0 {
        return Ok(Out::Same);
    }
    let x = c.first()?;
    let shape = c.shape_of(x);
    let features: Vec<u64> = (0..).zip(&shape).map(|(d, &n)| if d < 2 { n } else { 1 }).collect();
    let keep = chosen(c, &features, 1.0 - p)?;
    value(apply(c, x, keep, p)?)
}

/// Uniform numbers of 24 bits in `[0, 1)`.
fn unit(c: &mut Call<'_>, word: ValueId) -> Result<ValueId, Reject> {
    let high = number(c, Binary::ShiftRightLogical, word, 8.0)?;
    let x = a::convert(c.g(), high, DType::F32)?;
    number(c, Binary::Multiply, x, 2f64.powi(-24))
}

fn uniform(c: &mut Call<'_>, shape: &[u64]) -> Result<ValueId, Reject> {
    let word = bits(c, shape, &[ThreefryWord::Xor])?[0];
    unit(c, word)
}

/// Normal numbers, from two uniform ones each (Box and Muller 1958).
fn normal(c: &mut Call<'_>, shape: &[u64]) -> Result<ValueId, Reject> {
    let words = bits(c, shape, &[ThreefryWord::First, ThreefryWord::Second])?;
    let (u, v) = (unit(c, words[0])?, unit(c, words[1])?);
    // The logarithm of 1 - u, which is never zero.
    let negative = one(c, Unary::Negate, u)?;
    let log = one(c, Unary::LogPlusOne, negative)?;
    let square = number(c, Binary::Multiply, log, -2.0)?;
    let radius = one(c, Unary::Sqrt, square)?;
    let angle = number(c, Binary::Multiply, v, std::f64::consts::TAU)?;
    let cosine = one(c, Unary::Cosine, angle)?;
    two(c, Binary::Multiply, radius, cosine)
}

type Draw = fn(&mut Call<'_>, &[u64]) -> Result<ValueId, Reject>;

fn drawn(c: &mut Call<'_>, draw: Draw) -> Lowered {
    let (shape, default) = match c.is_tensor("self") {
        true => {
            let x = c.first()?;
            (c.shape_of(x), c.dtype_of(x))
        }
        false => (c.shape("size")?, DEFAULT_FLOAT),
    };
    let dtype = c.dtype("dtype")?.unwrap_or(c.declared_dtype(default));
    let x = draw(c, &shape)?;
    value(a::convert(c.g(), x, dtype)?)
}

/// Integers from `low` up to but excluding `high`, from uniform numbers of 24 bits.
fn whole_numbers(c: &mut Call<'_>) -> Lowered {
    let (low, high) = (c.int("low", 0)?, c.needed_int("high")?);
    let range = high.checked_sub(low).filter(|range| (1..=1 << 24).contains(range));
    let Some(range) = range else { return Err(Reject::Unsupported("of more than 2^24 numbers")) };
    let (shape, dtype) = match c.is_tensor("self") {
        true => {
            let x = c.first()?;
            (c.shape_of(x), c.dtype_of(x))
        }
        false => (c.shape("size")?, DType::I64),
    };
    let dtype = c.dtype("dtype")?.unwrap_or(c.declared_dtype(dtype));
    let x = uniform(c, &shape)?;
    let x = number(c, Binary::Multiply, x, range as f64)?;
    let x = one(c, Unary::Floor, x)?;
    let x = a::convert(c.g(), x, DType::I64)?;
    let x = number(c, Binary::Add, x, low as f64)?;
    value(a::convert(c.g(), x, dtype)?)
}

/// Exponential numbers, which are above zero: samplers of Gumbel's distribution take their logarithm.
fn exponential(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let (shape, dtype, rate) = (c.shape_of(x), c.dtype_of(x), c.float("lambd", 1.0)?);
    let u = uniform(c, &shape)?;
    let inside = number(c, Binary::Add, u, 2f64.powi(-25))?;
    let negative = one(c, Unary::Negate, inside)?;
    let log = one(c, Unary::LogPlusOne, negative)?;
    let x = number(c, Binary::Multiply, log, -1.0 / rate)?;
    value(a::convert(c.g(), x, dtype)?)
}

fn scaled_uniform(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let (from, to) = (c.float("from", 0.0)?, c.float("to", 1.0)?);
    value(between(c, x, from, to)?)
}

/// Uniform numbers between two bounds, in the shape and type of `like`.
pub(crate) fn between(c: &mut Call<'_>, like: ValueId, from: f64, to: f64) -> Result<ValueId, Reject> {
    let (shape, dtype) = (c.shape_of(like), c.dtype_of(like));
    let x = uniform(c, &shape)?;
    let x = number(c, Binary::Multiply, x, to - from)?;
    let x = number(c, Binary::Add, x, from)?;
    Ok(a::convert(c.g(), x, dtype)?)
}

fn scaled_normal(c: &mut Call<'_>) -> Lowered {
    // An elementwise mean or deviation is a constant of the draw, so its gradient is stopped.
    let given = |c: &mut Call<'_>, name: &str| -> Result<Option<ValueId>, Reject> {
        if !c.is_tensor(name) {
            return Ok(None);
        }
        let x = c.tensor(name)?;
        Ok(Some(a::stop_gradient(c.g(), x)?))
    };
    let (means, deviations) = (given(c, "mean")?, given(c, "std")?);
    let (shape, dtype) = match (means, deviations) {
        (None, None) if !c.is_tensor("self") => (c.shape("size")?, c.declared_dtype(DEFAULT_FLOAT)),
        (None, None) => {
            let x = c.first()?;
            (c.shape_of(x), c.dtype_of(x))
        }
        (Some(x), None) | (None, Some(x)) => (c.shape_of(x), c.dtype_of(x)),
        (Some(x), Some(y)) => (a::broadcast_shapes(&c.shape_of(x), &c.shape_of(y))?, c.dtype_of(x)),
    };
    let x = normal(c, &shape)?;
    let mut x = a::convert(c.g(), x, dtype)?;
    x = match deviations {
        Some(deviations) => two(c, Binary::Multiply, x, deviations)?,
        None => number(c, Binary::Multiply, x, c.float("std", 1.0)?)?,
    };
    value(match means {
        Some(means) => two(c, Binary::Add, x, means)?,
        None => number(c, Binary::Add, x, c.float("mean", 0.0)?)?,
    })
}

fn bernoulli(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    let (shape, dtype) = (c.shape_of(x), c.dtype_of(x));
    let hit = if c.has("p") && !c.is_tensor("p") {
        let p = probability(c)?;
        chosen(c, &shape, p)?
    } else {
        let p = if c.is_tensor("p") { c.tensor("p")? } else { x };
        let u = uniform(c, &shape)?;
        let p = a::convert(c.g(), p, DType::F32)?;
        a::compare(c.g(), Direction::Lt, u, p)?
    };
    value(a::convert(c.g(), hit, dtype)?)
}
