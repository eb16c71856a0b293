//! Reductions and running sums.

use super::*;
use crate::dtype::DType;
use crate::graph::{Graph, ValueId};
use crate::op::{Binary, Cumulative, Op, Reducer, Unary};

/// Combines the elements of `dims`. With `keep`, these remain as dimensions of size 1.
pub fn reduce(g: &mut Graph, x: ValueId, reducer: Reducer, dims: &[usize], keep: bool) -> Built {
    if dims.is_empty() {
        return Ok(x);
    }
    let mut shape = g.shape(x).to_vec();
    let reduced = g.push(Op::Reduce(crate::op::Reduce { reducer, dims: dims.to_vec() }), &[x])?;
    if !keep {
        return Ok(reduced);
    }
    dims.iter().for_each(|&d| shape[d] = 1);
    reshape(g, reduced, &shape)
}

pub fn sum(g: &mut Graph, x: ValueId, dims: &[usize], keep: bool) -> Built {
    reduce(g, x, Reducer::Sum, dims, keep)
}

pub fn max(g: &mut Graph, x: ValueId, dims: &[usize], keep: bool) -> Built {
    reduce(g, x, Reducer::Max, dims, keep)
}

pub fn min(g: &mut Graph, x: ValueId, dims: &[usize], keep: bool) -> Built {
    reduce(g, x, Reducer::Min, dims, keep)
}

pub fn prod(g: &mut Graph, x: ValueId, dims: &[usize], keep: bool) -> Built {
    reduce(g, x, Reducer::Product, dims, keep)
}

/// The number of elements that are combined into one.
fn count(g: &Graph, x: ValueId, dims: &[usize]) -> Result<u64, ShapeError> {
    let rank = g.shape(x).len();
    let size = |&d: &usize| g.shape(x).get(d).copied().ok_or(ShapeError::DimOutOfRange { dim: d as u64, rank });
    dims.iter().map(size).product()
}

pub fn mean(g: &mut Graph, x: ValueId, dims: &[usize], keep: bool) -> Built {
    let n = count(g, x, dims)?;
    let total = sum(g, x, dims, keep)?;
    if dims.is_empty() { Ok(total) } else { with_number(g, Binary::Divide, total, n as f64) }
}

/// The mean squared distance from the mean. `correction` (1 for the unbiased variance) is subtracted from the number of
/// elements.
pub fn variance(g: &mut Graph, x: ValueId, dims: &[usize], correction: f64, keep: bool) -> Built {
    let n = count(g, x, dims)?;
    let centre = mean(g, x, dims, true)?;
    let distance = binary(g, Binary::Subtract, x, centre)?;
    let square = g.push(Op::Binary(Binary::Multiply), &[distance, distance])?;
    let total = sum(g, square, dims, keep)?;
    with_number(g, Binary::Divide, total, (n as f64 - correction).max(0.0))
}

/// `log(sum(exp(x)))`, with the maximum subtracted first so that it does not overflow.
pub fn log_sum_exp(g: &mut Graph, x: ValueId, dims: &[usize], keep: bool) -> Built {
    let most = max(g, x, dims, true)?;
    let below = binary(g, Binary::Subtract, x, most)?;
    let powers = g.push(Op::Unary(Unary::Exponential), &[below])?;
    let total = sum(g, powers, dims, true)?;
    let log = g.push(Op::Unary(Unary::Log), &[total])?;
    let result = g.push(Op::Binary(Binary::Add), &[log, most])?;
    if keep { Ok(result) } else { squeeze(g, result, dims) }
}

/// Running sums, products and extrema along `dim`.
pub fn cumulative(g: &mut Graph, x: ValueId, reducer: Reducer, dim: usize, reverse: bool) -> Built {
    g.push(Op::Cumulative(Cumulative { reducer, dim, reverse }), &[x])
}

/// The position of the greatest element along `dim` (with `least`, the smallest), as `i32`. The first of equal ones
/// wins.
pub fn arg_max(g: &mut Graph, x: ValueId, dim: usize, keep: bool, least: bool) -> Built {
    let shape = g.shape(x).to_vec();
    let size = *shape.get(dim).ok_or(ShapeError::DimOutOfRange { dim: dim as u64, rank: shape.len() })?;
    let reducer = if least { Reducer::Min } else { Reducer::Max };
    let best = reduce(g, x, reducer, &[dim], true)?;
    let is_best = compare(g, crate::op::Direction::Eq, x, best)?;
    let place = iota(g, &shape, dim, DType::I32)?;
    let beyond = full(g, &shape, size as f64, DType::I32)?;
    let places = select(g, is_best, place, beyond)?;
    min(g, places, &[dim], keep)
}
