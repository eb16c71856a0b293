//! Reductions and running sums.

use super::call::{Call, One};
use super::report::Reject;
use altiplano_ir::array::{self, Built};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{Binary, Reducer, Unary};

type Reduction = fn(&mut Graph, ValueId, &[usize], bool) -> Built;

/// Reduces over `axes`, which are an attribute or an operand. Without any, reduces over all dimensions.
pub(crate) fn reduce(c: &mut Call, f: Reduction) -> One {
    let x = c.x(0)?;
    let keep = c.flag("keepdims", true)?;
    let nothing = c.flag("noop_with_empty_axes", false)?;
    let axes = c.ints_either("axes", 1)?.unwrap_or_default();
    let rank = c.rank(x);
    let dims = if axes.is_empty() && !nothing { (0..rank).collect() } else { array::axes(&axes, rank)? };
    Ok(f(c.g(), x, &dims, keep)?)
}

pub(crate) fn mean(g: &mut Graph, x: ValueId, dims: &[usize], keep: bool) -> Built {
    array::mean(g, x, dims, keep)
}

/// The maximum. For booleans, it is true if any element is true.
pub(crate) fn max(g: &mut Graph, x: ValueId, dims: &[usize], keep: bool) -> Built {
    let reducer = if g.ty(x).dtype == DType::Bool { Reducer::Or } else { Reducer::Max };
    array::reduce(g, x, reducer, dims, keep)
}

pub(crate) fn min(g: &mut Graph, x: ValueId, dims: &[usize], keep: bool) -> Built {
    let reducer = if g.ty(x).dtype == DType::Bool { Reducer::And } else { Reducer::Min };
    array::reduce(g, x, reducer, dims, keep)
}

pub(crate) fn l1(g: &mut Graph, x: ValueId, dims: &[usize], keep: bool) -> Built {
    let size = array::unary(g, Unary::Abs, x)?;
    array::sum(g, size, dims, keep)
}

pub(crate) fn sum_square(g: &mut Graph, x: ValueId, dims: &[usize], keep: bool) -> Built {
    let square = array::binary(g, Binary::Multiply, x, x)?;
    array::sum(g, square, dims, keep)
}

/// The Euclidean norm. For integers, the root is taken in f64 and truncated.
pub(crate) fn l2(g: &mut Graph, x: ValueId, dims: &[usize], keep: bool) -> Built {
    let dtype = g.ty(x).dtype;
    let wide = if dtype.is_float() { x } else { array::convert(g, x, DType::F64)? };
    let sum = sum_square(g, wide, dims, keep)?;
    let root = array::unary(g, Unary::Sqrt, sum)?;
    array::convert(g, root, dtype)
}

pub(crate) fn log_sum(g: &mut Graph, x: ValueId, dims: &[usize], keep: bool) -> Built {
    let sum = array::sum(g, x, dims, keep)?;
    array::unary(g, Unary::Log, sum)
}

/// The position of the greatest (or smallest) element.
pub(crate) fn arg(c: &mut Call, least: bool) -> One {
    let x = c.x(0)?;
    let dim = c.axis("axis", 0, x)?;
    let (keep, last) = (c.flag("keepdims", true)?, c.flag("select_last_index", false)?);
    let size = c.shape(x)[dim];
    let g = c.g();
    let x = if last { array::flip(g, x, &[dim])? } else { x };
    let mut found = array::arg_max(g, x, dim, keep, least)?;
    if last {
        let most = array::full_like(g, found, size as f64 - 1.0)?;
        found = array::binary(g, Binary::Subtract, most, found)?;
    }
    Ok(array::convert(g, found, DType::I64)?)
}

pub(crate) fn cumulative(c: &mut Call, reducer: Reducer) -> One {
    let x = c.x(0)?;
    let axis = c.number_of(1)? as i64;
    let dim = array::axis(axis, c.rank(x))?;
    let (exclusive, reverse) = (c.flag("exclusive", false)?, c.flag("reverse", false)?);
    let neutral = match reducer {
        Reducer::Sum => 0.0,
        Reducer::Product => 1.0,
        _ => return Err(Reject::Unsupported("of this kind")),
    };
    let rank = c.rank(x);
    let g = c.g();
    let mut x = x;
    if exclusive {
        // Shift by one position and fill the free one with the neutral element.
        let (mut low, mut high) = (vec![0; rank], vec![0; rank]);
        (low[dim], high[dim]) = if reverse { (-1, 1) } else { (1, -1) };
        x = array::pad(g, x, &low, &high, neutral)?;
    }
    Ok(array::cumulative(g, x, reducer, dim, reverse)?)
}
