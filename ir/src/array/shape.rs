//! Shapes: numpy's broadcasting, axes that count from the end, and moving elements around.

use super::Built;
use crate::dtype::DType;
use crate::graph::{Graph, ValueId};
use crate::literal::Literal;
use crate::op::{
    Binary, BroadcastInDim, Compare, Concatenate, Direction, Iota, Op, Pad, Reshape, Reverse, Select, ShapeError,
    Slice, Transpose,
};
use crate::types::TensorType;

/// The dimension that `axis` selects in a tensor of this rank. Negative axes count from the end.
pub fn axis(axis: i64, rank: usize) -> Result<usize, ShapeError> {
    let from_start = if axis < 0 { axis.checked_add(rank as i64) } else { Some(axis) };
    let inside = from_start.and_then(|a| usize::try_from(a).ok()).filter(|&a| a < rank);
    inside.ok_or(ShapeError::DimOutOfRange { dim: axis.unsigned_abs(), rank })
}

/// The dimensions that `axes` select, in ascending order. None may occur twice.
pub fn axes(list: &[i64], rank: usize) -> Result<Vec<usize>, ShapeError> {
    let mut dims = list.iter().map(|&a| axis(a, rank)).collect::<Result<Vec<_>, _>>()?;
    dims.sort_unstable();
    if dims.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err(ShapeError::Attribute("an axis is named twice"));
    }
    Ok(dims)
}

/// The shape that both broadcast to. Shapes are aligned at the last dimension, and sizes must be equal or one of them
/// 1.
pub fn broadcast_shapes(a: &[u64], b: &[u64]) -> Result<Vec<u64>, ShapeError> {
    let rank = a.len().max(b.len());
    let size = |shape: &[u64], d: usize| if d + shape.len() < rank { 1 } else { shape[d + shape.len() - rank] };
    let both = |d: usize| match (size(a, d), size(b, d)) {
        (x, y) if x == y || y == 1 => Some(x),
        (1, y) => Some(y),
        _ => None,
    };
    let shape: Option<Vec<u64>> = (0..rank).map(both).collect();
    shape.ok_or_else(|| ShapeError::ShapesDiffer { left: a.to_vec(), right: b.to_vec() })
}

/// Repeats `x` to `shape`, like numpy's `broadcast_to`.
pub fn broadcast_to(g: &mut Graph, x: ValueId, shape: &[u64]) -> Built {
    let from = g.shape(x).to_vec();
    if from == shape {
        return Ok(x);
    }
    let differ = || ShapeError::ShapesDiffer { left: from.clone(), right: shape.to_vec() };
    let offset = shape.len().checked_sub(from.len()).ok_or_else(differ)?;
    if from.iter().zip(&shape[offset..]).any(|(&f, &s)| f != s && f != 1) {
        return Err(differ());
    }
    if let Op::Constant(l) = &g.node(x).op
        && let Some(value) = l.as_splat().filter(|_| l.batch_power == 0)
    {
        return full(g, shape, value, g.ty(x).dtype);
    }
    // Remove repeated dimensions of size 1 first, so that each kept dimension is a factor of the broadcast.
    let kept: Vec<usize> = (0..from.len()).filter(|&d| from[d] == shape[d + offset]).collect();
    let sizes: Vec<u64> = kept.iter().map(|&d| from[d]).collect();
    let x = reshape(g, x, &sizes)?;
    let dims = kept.iter().map(|d| d + offset).collect();
    g.push(Op::BroadcastInDim(BroadcastInDim { shape: shape.to_vec(), dims }), &[x])
}

/// Broadcasts both operands to their common shape.
pub fn broadcast(g: &mut Graph, a: ValueId, b: ValueId) -> Result<(ValueId, ValueId), ShapeError> {
    let shape = broadcast_shapes(g.shape(a), g.shape(b))?;
    Ok((broadcast_to(g, a, &shape)?, broadcast_to(g, b, &shape)?))
}

/// An elementwise function of two operands of one element type, with broadcasting.
pub fn binary(g: &mut Graph, op: Binary, a: ValueId, b: ValueId) -> Built {
    let (a, b) = broadcast(g, a, b)?;
    g.push(Op::Binary(op), &[a, b])
}

/// `op` with a number as its right operand, in the element type of `x`.
pub fn with_number(g: &mut Graph, op: Binary, x: ValueId, number: f64) -> Built {
    let number = full_like(g, x, number)?;
    g.push(Op::Binary(op), &[x, number])
}

/// A comparison of two operands of one element type, with broadcasting.
pub fn compare(g: &mut Graph, direction: Direction, a: ValueId, b: ValueId) -> Built {
    let (a, b) = broadcast(g, a, b)?;
    g.push(Op::Compare(Compare { direction }), &[a, b])
}

/// numpy's `where`, with broadcasting.
pub fn select(g: &mut Graph, predicate: ValueId, on_true: ValueId, on_false: ValueId) -> Built {
    let shape = broadcast_shapes(g.shape(on_true), g.shape(on_false))?;
    let shape = broadcast_shapes(&shape, g.shape(predicate))?;
    let operands = [predicate, on_true, on_false].map(|v| broadcast_to(g, v, &shape));
    let [p, t, f] = operands;
    g.push(Op::Select(Select {}), &[p?, t?, f?])
}

/// A tensor with `value` in every element, rounded to its type.
pub fn full(g: &mut Graph, shape: &[u64], value: f64, dtype: DType) -> Built {
    let ty = TensorType::new(dtype, shape);
    if !ty.check() {
        return Err(ShapeError::TooLarge { shape: ty.shape });
    }
    Ok(g.constant(Literal::splat(ty, crate::simplify::rounded(value, DType::F64, dtype))))
}

pub fn full_like(g: &mut Graph, x: ValueId, value: f64) -> Built {
    let ty = g.ty(x).clone();
    full(g, &ty.shape, value, ty.dtype)
}

/// A constant of rank 0.
pub fn scalar(g: &mut Graph, value: f64, dtype: DType) -> Built {
    full(g, &[], value, dtype)
}

/// `0, 1, ..` along `dim` of `shape`.
pub fn iota(g: &mut Graph, shape: &[u64], dim: usize, dtype: DType) -> Built {
    g.push(Op::Iota(Iota { ty: TensorType::new(dtype, shape), dim }), &[])
}

/// `count` numbers: `start, start + step, ..`.
pub fn arange(g: &mut Graph, count: u64, start: f64, step: f64, dtype: DType) -> Built {
    let mut x = iota(g, &[count], 0, dtype)?;
    if step != 1.0 {
        x = with_number(g, Binary::Multiply, x, step)?;
    }
    if start != 0.0 {
        x = with_number(g, Binary::Add, x, start)?;
    }
    Ok(x)
}

/// Converts to another element type, or returns the value unchanged if it has that type. Floats become integers by
/// truncation. Any number but zero is true.
pub fn convert(g: &mut Graph, x: ValueId, dtype: DType) -> Built {
    if dtype == DType::Bool && g.ty(x).dtype != DType::Bool {
        let zero = full_like(g, x, 0.0)?;
        return g.push(Op::Compare(Compare { direction: Direction::Ne }), &[x, zero]);
    }
    Ok(g.convert(x, dtype))
}

pub fn reshape(g: &mut Graph, x: ValueId, shape: &[u64]) -> Built {
    if g.shape(x) == shape { Ok(x) } else { g.push(Op::Reshape(Reshape { shape: shape.to_vec() }), &[x]) }
}

/// A reshape in which one size may be -1, which stands for the remaining elements.
pub fn reshape_to(g: &mut Graph, x: ValueId, sizes: &[i64]) -> Built {
    let elements = g.ty(x).elements();
    let known = sizes.iter().filter(|&&s| s != -1).try_fold(1u64, |n, &s| n.checked_mul(u64::try_from(s).ok()?));
    let known = known.ok_or(ShapeError::Attribute("sizes must be positive, and one of them may be -1"))?;
    let open = sizes.iter().filter(|&&s| s == -1).count();
    if open > 1 || open == 1 && (known == 0 || !elements.is_multiple_of(known)) {
        return Err(ShapeError::Attribute("one size may be -1, and the others must divide the number of elements"));
    }
    let shape: Vec<u64> = sizes.iter().map(|&s| if s == -1 { elements / known } else { s as u64 }).collect();
    reshape(g, x, &shape)
}

/// Merges dimensions `from..=to` into one.
pub fn flatten(g: &mut Graph, x: ValueId, from: i64, to: i64) -> Built {
    let shape = g.shape(x).to_vec();
    if shape.is_empty() {
        return reshape(g, x, &[1]);
    }
    let (from, to) = (axis(from, shape.len())?, axis(to, shape.len())?);
    if from > to {
        return Err(ShapeError::Attribute("the first dimension to flatten must not come after the last"));
    }
    let one = shape[from..=to].iter().product();
    reshape(g, x, &[&shape[..from], &[one], &shape[to + 1..]].concat())
}

/// Inserts a dimension of size 1 before dimension `at` of the result.
pub fn unsqueeze(g: &mut Graph, x: ValueId, at: i64) -> Built {
    let mut shape = g.shape(x).to_vec();
    let at = axis(at, shape.len() + 1)?;
    shape.insert(at, 1);
    reshape(g, x, &shape)
}

/// Removes those of `dims` that have size 1.
pub fn squeeze(g: &mut Graph, x: ValueId, dims: &[usize]) -> Built {
    let shape = g.shape(x).to_vec();
    let keep = |d: &usize| !(dims.contains(d) && shape[*d] == 1);
    let left: Vec<u64> = (0..shape.len()).filter(keep).map(|d| shape[d]).collect();
    reshape(g, x, &left)
}

/// Dimension `i` of the result is dimension `permutation[i]` of `x`.
pub fn permute(g: &mut Graph, x: ValueId, permutation: &[usize]) -> Built {
    if permutation.len() == g.shape(x).len() && permutation.iter().enumerate().all(|(i, &p)| i == p) {
        return Ok(x);
    }
    g.push(Op::Transpose(Transpose { permutation: permutation.to_vec() }), &[x])
}

pub fn swap_dims(g: &mut Graph, x: ValueId, a: i64, b: i64) -> Built {
    let rank = g.shape(x).len();
    let mut permutation: Vec<usize> = (0..rank).collect();
    permutation.swap(axis(a, rank)?, axis(b, rank)?);
    permute(g, x, &permutation)
}

/// Moves dimension `from` to position `to` and keeps the order of the others.
pub fn move_dim(g: &mut Graph, x: ValueId, from: usize, to: usize) -> Built {
    let mut permutation: Vec<usize> = (0..g.shape(x).len()).filter(|&d| d != from).collect();
    if to > permutation.len() {
        return Err(ShapeError::DimOutOfRange { dim: to as u64, rank: permutation.len() });
    }
    permutation.insert(to, from);
    permute(g, x, &permutation)
}

/// Elements `start, start + step, ..` before `end` along `dim`, with the semantics of Python slices. Positions outside
/// are clamped, and negative ones count from the end.
pub fn slice_dim(g: &mut Graph, x: ValueId, dim: usize, start: i64, end: i64, step: u64) -> Built {
    let shape = g.shape(x).to_vec();
    let size = *shape.get(dim).ok_or(ShapeError::DimOutOfRange { dim: dim as u64, rank: shape.len() })?;
    let inside = |at: i64| if at < 0 { at.saturating_add(size as i64).max(0) as u64 } else { (at as u64).min(size) };
    let (start, end) = (inside(start), inside(end));
    let mut slice = Slice { start: vec![0; shape.len()], limit: shape.clone(), stride: vec![1; shape.len()] };
    (slice.start[dim], slice.limit[dim], slice.stride[dim]) = (start, end.max(start), step);
    if slice.start[dim] == 0 && slice.limit[dim] == size && step == 1 {
        return Ok(x);
    }
    g.push(Op::Slice(slice), &[x])
}

/// Element `at` of dimension `dim`, which is removed.
pub fn select_dim(g: &mut Graph, x: ValueId, dim: usize, at: i64) -> Built {
    let shape = g.shape(x).to_vec();
    let size = *shape.get(dim).ok_or(ShapeError::DimOutOfRange { dim: dim as u64, rank: shape.len() })?;
    let at = if at < 0 { at.saturating_add(size as i64) } else { at };
    if at < 0 || at as u64 >= size {
        return Err(ShapeError::Attribute("the position to select lies outside"));
    }
    let one = slice_dim(g, x, dim, at, at + 1, 1)?;
    squeeze(g, one, &[dim])
}

/// Splits `dim` into consecutive parts of these sizes, which must add up to its size.
pub fn split(g: &mut Graph, x: ValueId, dim: usize, sizes: &[u64]) -> Result<Vec<ValueId>, ShapeError> {
    let size = *g.shape(x).get(dim).ok_or(ShapeError::DimOutOfRange { dim: dim as u64, rank: g.shape(x).len() })?;
    let total = sizes.iter().try_fold(0u64, |n, &s| n.checked_add(s));
    if total != Some(size) {
        return Err(ShapeError::SizesDiffer { what: "parts together", left: total.unwrap_or(u64::MAX), right: size });
    }
    let mut start = 0i64;
    let mut parts = Vec::with_capacity(sizes.len());
    for &part in sizes {
        parts.push(slice_dim(g, x, dim, start, start + part as i64, 1)?);
        start += part as i64;
    }
    Ok(parts)
}

pub fn concat(g: &mut Graph, parts: &[ValueId], dim: usize) -> Built {
    match parts {
        [one] => Ok(*one),
        _ => g.push(Op::Concatenate(Concatenate { dim }), parts),
    }
}

/// Stacks the parts along a new dimension `dim` of the result.
pub fn stack(g: &mut Graph, parts: &[ValueId], dim: usize) -> Built {
    let parts = parts.iter().map(|&p| unsqueeze(g, p, dim as i64)).collect::<Result<Vec<_>, _>>()?;
    concat(g, &parts, dim)
}

/// Surrounds `x` with `value`: `low` elements before and `high` after each dimension. Negative numbers remove elements.
pub fn pad(g: &mut Graph, x: ValueId, low: &[i64], high: &[i64], value: f64) -> Built {
    if low.iter().chain(high).all(|&n| n == 0) {
        return Ok(x);
    }
    let value = scalar(g, value, g.ty(x).dtype)?;
    let interior = vec![0; low.len()];
    g.push(Op::Pad(Pad { low: low.to_vec(), high: high.to_vec(), interior }), &[x, value])
}

pub fn flip(g: &mut Graph, x: ValueId, dims: &[usize]) -> Built {
    if dims.is_empty() { Ok(x) } else { g.push(Op::Reverse(Reverse { dims: dims.to_vec() }), &[x]) }
}
