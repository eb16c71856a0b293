//! Lookups by index, and sorting.

use super::*;
use crate::dtype::DType;
use crate::graph::{Graph, ValueId};
use crate::op::{ArgSort, Binary, Direction, Gather, GatherDims, Op, OutOfBounds};

/// Converts negative indices, which count from the end as in numpy.
fn from_start(g: &mut Graph, indices: ValueId, size: u64) -> Built {
    if g.ty(indices).dtype.is_unsigned_integer() {
        return Ok(indices);
    }
    let zero = full_like(g, indices, 0.0)?;
    let negative = compare(g, Direction::Lt, indices, zero)?;
    let moved = with_number(g, Binary::Add, indices, size as f64)?;
    select(g, negative, moved, indices)
}

/// The slices of `x` at `indices` of dimension `dim`. The dimensions of `indices` take the place of `dim`. With `wrap`,
/// negative indices count from the end. Indices outside are clamped to the nearest one.
pub fn take(g: &mut Graph, x: ValueId, dim: usize, indices: ValueId, wrap: bool) -> Built {
    let shape = g.shape(x).to_vec();
    let size = *shape.get(dim).ok_or(ShapeError::DimOutOfRange { dim: dim as u64, rank: shape.len() })?;
    if size == 0 {
        return Err(ShapeError::Attribute("there is nothing to look up in a dimension without elements"));
    }
    let indices = if wrap { from_start(g, indices, size)? } else { indices };
    let rank = g.shape(indices).len();
    let mut slice_sizes = shape.clone();
    slice_sizes[dim] = 1;
    let offset = |d: usize| if d < dim { d } else { d + rank - 1 };
    let dims = GatherDims {
        offset_dims: (0..shape.len()).filter(|&d| d != dim).map(offset).collect(),
        collapsed_slice_dims: vec![dim],
        operand_batching_dims: Vec::new(),
        indices_batching_dims: Vec::new(),
        start_index_map: vec![dim],
        index_vector_dim: rank,
        slice_sizes,
    };
    g.push(Op::Gather(Gather { dims, out_of_bounds: OutOfBounds::Clamp }), &[x, indices])
}

/// The rows of a table for the given ids.
pub fn embedding(g: &mut Graph, table: ValueId, ids: ValueId) -> Built {
    take(g, table, 0, ids, false)
}

/// For each element of `indices`, the element of `x` at the same place, except that the index is the position along
/// `dim`. Dimensions of `indices` other than `dim` may be shorter than those of `x`.
pub fn take_along(g: &mut Graph, x: ValueId, dim: usize, indices: ValueId, wrap: bool) -> Built {
    let (shape, wanted) = (g.shape(x).to_vec(), g.shape(indices).to_vec());
    if shape.len() != wanted.len() || dim >= shape.len() {
        return Err(ShapeError::ShapesDiffer { left: shape, right: wanted });
    }
    if shape[dim] == 0 {
        return Err(ShapeError::Attribute("there is nothing to look up in a dimension without elements"));
    }
    let mut x = x;
    for d in (0..shape.len()).filter(|&d| d != dim) {
        if wanted[d] > shape[d] {
            return Err(ShapeError::ShapesDiffer { left: shape, right: wanted });
        }
        x = slice_dim(g, x, d, 0, wanted[d] as i64, 1)?;
    }
    let indices = if wrap { from_start(g, indices, shape[dim])? } else { indices };
    let others: Vec<usize> = (0..shape.len()).filter(|&d| d != dim).collect();
    let dims = GatherDims {
        offset_dims: Vec::new(),
        collapsed_slice_dims: vec![dim],
        operand_batching_dims: others.clone(),
        indices_batching_dims: others,
        start_index_map: vec![dim],
        index_vector_dim: shape.len(),
        slice_sizes: vec![1; shape.len()],
    };
    g.push(Op::Gather(Gather { dims, out_of_bounds: OutOfBounds::Clamp }), &[x, indices])
}

/// Adds a last dimension of `classes` elements: one at the index, and zero elsewhere.
pub fn one_hot(g: &mut Graph, indices: ValueId, classes: u64, dtype: DType) -> Built {
    let shape = [g.shape(indices), &[classes]].concat();
    let classes = iota(g, &shape, shape.len() - 1, g.ty(indices).dtype)?;
    let indices = unsqueeze(g, indices, -1)?;
    let hit = compare(g, Direction::Eq, indices, classes)?;
    Ok(g.convert(hit, dtype))
}

/// `x` sorted along `dim`, and the former position of each element (`i32`). Equal elements keep their order.
pub fn sort(g: &mut Graph, x: ValueId, dim: usize, descending: bool) -> Result<(ValueId, ValueId), ShapeError> {
    let order = g.push(Op::ArgSort(ArgSort { dim, descending: vec![descending] }), &[x])?;
    Ok((take_along(g, x, dim, order, false)?, order))
}

/// A boolean for each element, true if it is among the `k` greatest along `dim`. The first of equal ones count as
/// greater.
pub fn among_greatest(g: &mut Graph, x: ValueId, dim: usize, k: u64) -> Built {
    let order = g.push(Op::ArgSort(ArgSort { dim, descending: vec![true] }), &[x])?;
    // The inverse of an order gives the place of each element in it.
    let place = g.push(Op::ArgSort(ArgSort { dim, descending: vec![false] }), &[order])?;
    let end = full_like(g, place, k as f64)?;
    compare(g, Direction::Lt, place, end)
}

/// The weights of a mixture of experts, `[.., experts]` like the router's `logits`: the softmax for the `k` greatest
/// logits, and zero for the others. With `normalised`, they sum to one.
pub fn gates(g: &mut Graph, logits: ValueId, k: u64, normalised: bool) -> Built {
    let rank = g.shape(logits).len();
    let dim = rank.checked_sub(1).ok_or(ShapeError::DimOutOfRange { dim: 0, rank })?;
    let scores = softmax(g, logits, dim)?;
    let chosen = among_greatest(g, logits, dim, k)?;
    let zero = full_like(g, scores, 0.0)?;
    let gates = select(g, chosen, scores, zero)?;
    if !normalised {
        return Ok(gates);
    }
    let total = sum(g, gates, &[dim], true)?;
    binary(g, Binary::Divide, gates, total)
}

/// The `k` greatest elements along `dim` (with `least`, the smallest), and their positions (`i32`).
pub fn top_k(g: &mut Graph, x: ValueId, dim: usize, k: u64, least: bool) -> Result<(ValueId, ValueId), ShapeError> {
    let order = g.push(Op::ArgSort(ArgSort { dim, descending: vec![!least] }), &[x])?;
    if k > g.shape(x)[dim] {
        return Err(ShapeError::SizesDiffer { what: "k and the sorted dimension", left: k, right: g.shape(x)[dim] });
    }
    let first = slice_dim(g, order, dim, 0, k as i64, 1)?;
    Ok((take_along(g, x, dim, first, false)?, first))
}
