//! Lowers ops on rows that a mask marks, whose number depends on data: `where`, `nonzero` and masks as indices.
//!
//! All positions of the mask become rows, in row-major order, and the mask is kept with them. Row-wise ops
//! compute all rows, but only marked rows are written back or added up. Sizes are therefore known, and the
//! result does not change. An op that mixes such rows in any other way is refused.

use super::super::call::data_dependent;
use super::*;
use altiplano_ir::op::BroadcastInDim;
use std::collections::{BTreeMap, BTreeSet};

/// The masks of a program, and the values derived from them.
#[derive(Default)]
pub struct Marked {
    masks: Vec<Mask>,
    /// Positions of marked rows: the index of the mask, and its dimension.
    positions: BTreeMap<ValueId, (usize, usize)>,
    /// Symbols of sizes that are a number of marked rows.
    pub symbols: BTreeSet<String>,
    /// True if the current op takes marked rows.
    pub taken: bool,
}

struct Mask {
    shape: Vec<u64>,
    /// The mask, flattened to one truth value per row.
    rows: ValueId,
}

/// Row-wise ops other than elementwise ones. Their results keep the size that stands for the rows.
const BY_ROW: &[&str] = &[
    "index",
    "linear",
    "addmm",
    "matmul",
    "mm",
    "unsqueeze",
    "squeeze",
    "view",
    "_unsafe_view",
    "reshape",
    "expand",
    "flatten",
    "chunk",
    "split",
    "split_with_sizes",
    "slice",
    "select",
    "sum",
    "mean",
    "layer_norm",
    "native_layer_norm",
    "rms_norm",
    "to",
    "_to_copy",
    "contiguous",
    "clone",
    "alias",
    "detach",
    "dropout",
    "unbind",
    "zeros_like",
    "ones_like",
    "bmm",
    "glu",
    "view_as",
    "expand_as",
    "type_as",
    "index_select",
];

/// Ops that write rows back, or return their number.
const ENDS: &[&str] = &[
    "index_add",
    "index_put",
    "_index_put_impl",
    "_unsafe_index_put",
    "sym_size",
    "_assert_tensor_metadata",
    "_assert_async",
];

/// True if an op may take marked rows. `keeps` means that all its results have the same number of rows.
pub(crate) fn may_take(name: &str, keeps: bool) -> bool {
    let name = name.trim_end_matches('_');
    let by_row = BY_ROW.contains(&name)
        || super::elementwise::TABLE.iter().chain(super::activation::TABLE).any(|(known, _)| *known == name);
    let mixes = ["softmax", "log_softmax", "_softmax", "_log_softmax"].contains(&name);
    ENDS.contains(&name) || by_row && keeps && !mixes
}

/// The positions of all rows of a mask, one value for each of its dimensions.
pub(crate) fn mark(c: &mut Call<'_>, condition: ValueId) -> Result<Vec<ValueId>, Reject> {
    let mask = a::convert(c.g(), condition, DType::Bool)?;
    let shape = c.shape_of(mask);
    let count: u64 = shape.iter().product();
    let rows = a::reshape(c.g(), mask, &[count])?;
    let number = c.to.marked.masks.len();
    c.to.marked.masks.push(Mask { shape: shape.clone(), rows });
    let mut all = Vec::with_capacity(shape.len());
    for d in 0..shape.len() {
        let position = a::iota(c.g(), &shape, d, DType::I64)?;
        c.to.marked.positions.insert(position, (number, d));
        all.push(a::reshape(c.g(), position, &[count])?);
    }
    Ok(all)
}

/// `nonzero`: the positions as the rows of one tensor.
pub(crate) fn nonzero(c: &mut Call<'_>) -> Lowered {
    let x = c.first()?;
    if c.constant(x).is_some() {
        return Err(data_dependent());
    }
    let mut columns = Vec::new();
    for position in mark(c, x)? {
        columns.push(a::unsqueeze(c.g(), position, 1)?);
    }
    value(a::concat(c.g(), &columns, 1)?)
}

/// The mask and the dimension whose positions an index holds, if any.
fn positions(c: &Call<'_>, mut index: ValueId) -> Option<(usize, usize)> {
    let g = &c.to.graph;
    loop {
        if let Some(found) = c.to.marked.positions.get(&index) {
            return Some(*found);
        }
        let node = g.node(index);
        index = match &node.op {
            Op::Reshape(_) | Op::Convert(_) => node.operands[0],
            Op::Slice(slice) => {
                let from = node.operands[0];
                match (&g.node(from).op, g.shape(from)) {
                    // A column of `nonzero`.
                    (Op::Concatenate(_), [_, _]) if slice.limit[1] == slice.start[1] + 1 => {
                        *g.node(from).operands.get(slice.start[1] as usize)?
                    }
                    (Op::Reshape(_), [_, 1]) => from,
                    _ => return None,
                }
            }
            _ => return None,
        };
    }
}

/// Indices with the positions of one mask: the first dimension that they index, the mask, and its dimensions in
/// order.
struct Indices {
    first: usize,
    mask: usize,
    dims: Vec<usize>,
}

fn indices(c: &mut Call<'_>) -> Result<Option<Indices>, Reject> {
    let mut found: Option<Indices> = None;
    let given = c.maybe_tensors("indices")?;
    for (at, index) in given.into_iter().enumerate() {
        let Some(index) = index else { continue };
        let is_mask = matches!(c.dtype_of(index), DType::Bool | DType::U8) && c.constant(index).is_none();
        let (mask, dims) = match positions(c, index) {
            Some((mask, dim)) => (mask, vec![dim]),
            None if is_mask => {
                mark(c, index)?;
                (c.to.marked.masks.len() - 1, (0..c.rank(index)).collect())
            }
            None if found.is_some() => return Err(data_dependent()),
            None => return Ok(None),
        };
        match &mut found {
            None => found = Some(Indices { first: at, mask, dims }),
            Some(known)
                if known.mask == mask && at == known.first + known.dims.len() && !known.dims.contains(&dims[0]) =>
            {
                known.dims.extend(dims);
            }
            Some(_) => return Err(data_dependent()),
        }
    }
    Ok(found)
}

/// The sizes before the indexed dimensions, the sizes of the mask, and the sizes after the indexed dimensions.
fn parts(c: &Call<'_>, x: ValueId, at: &Indices) -> Result<[Vec<u64>; 3], Reject> {
    let shape = c.shape_of(x);
    let of_mask = c.to.marked.masks[at.mask].shape.clone();
    let end = at.first + at.dims.len();
    let fits = end <= shape.len() && at.dims.iter().enumerate().all(|(i, &d)| shape[at.first + i] == of_mask[d]);
    if !fits {
        return Err(data_dependent());
    }
    Ok([shape[..at.first].to_vec(), of_mask, shape[end..].to_vec()])
}

/// `x[positions]` or `x[mask]`; `None` if no index is a position or a mask.
pub(crate) fn index(c: &mut Call<'_>, x: ValueId) -> Result<Option<ValueId>, Reject> {
    let Some(at) = indices(c)? else { return Ok(None) };
    let [before, of_mask, behind] = parts(c, x, &at)?;
    let wide = [before.as_slice(), &of_mask, &behind].concat();
    let dims = (0..before.len())
        .chain(at.dims.iter().map(|d| before.len() + d))
        .chain((0..behind.len()).map(|i| before.len() + of_mask.len() + i));
    let dims: Vec<usize> = dims.collect();
    // Dimensions of the mask are first sorted into its own order.
    let mut order: Vec<usize> = (0..dims.len()).collect();
    order.sort_by_key(|&i| dims[i]);
    let x = a::permute(c.g(), x, &order)?;
    let dims = order.iter().map(|&i| dims[i]).collect();
    let spread = match c.shape_of(x) == wide {
        true => x,
        false => c.g().push(Op::BroadcastInDim(BroadcastInDim { shape: wide, dims }), &[x])?,
    };
    let rows = of_mask.iter().product();
    Ok(Some(a::reshape(c.g(), spread, &[before.as_slice(), &[rows], &behind].concat())?))
}

/// Reshapes `source` (`[before, rows, behind]`) to the dimensions of the mask, and broadcasts the mask to that
/// shape.
fn unfolded(
    c: &mut Call<'_>,
    source: ValueId,
    at: &Indices,
    [before, of_mask, behind]: &[Vec<u64>; 3],
) -> Result<(ValueId, ValueId), Reject> {
    let rows: u64 = of_mask.iter().product();
    let source = a::broadcast_to(c.g(), source, &[before.as_slice(), &[rows], behind].concat())?;
    let wide = [before.as_slice(), of_mask, behind].concat();
    let source = a::reshape(c.g(), source, &wide)?;
    let marks = c.to.marked.masks[at.mask].rows;
    let ones = [of_mask.as_slice(), &vec![1; behind.len()]].concat();
    let marks = a::reshape(c.g(), marks, &ones)?;
    Ok((source, a::broadcast_to(c.g(), marks, &wide)?))
}

/// Writes marked rows to their positions, or adds them.
fn put(c: &mut Call<'_>, x: ValueId, at: &Indices, source: ValueId, adds: bool) -> Result<ValueId, Reject> {
    let parts = parts(c, x, at)?;
    let rows = source;
    let (source, marks) = unfolded(c, source, at, &parts)?;
    let (before, of_mask) = (parts[0].len(), parts[1].len());
    let missing: Vec<usize> = (0..of_mask).filter(|d| !at.dims.contains(d)).map(|d| before + d).collect();
    let order = |c: &Call<'_>| -> Vec<usize> {
        // Permutes the remaining dimensions of the mask from its order to that of `x`.
        let mut left: Vec<usize> = at.dims.clone();
        left.sort_unstable();
        let place = |d: &usize| before + left.iter().position(|l| l == d).unwrap_or(0);
        let rank = c.to.graph.shape(x).len();
        (0..before).chain(at.dims.iter().map(place)).chain(before + at.dims.len()..rank).collect()
    };
    if adds {
        let zero = a::full_like(c.g(), source, 0.0)?;
        let kept = a::select(c.g(), marks, source, zero)?;
        let sum = a::sum(c.g(), kept, &missing, false)?;
        let order = order(c);
        let sum = a::permute(c.g(), sum, &order)?;
        return two(c, Binary::Add, x, sum);
    }
    // Writing the old value plus an addend is an addition, since each position is marked at most once.
    // Otherwise, the order of the writes would be undefined.
    if let Some(more) = added_to(c, x, rows) {
        return put(c, x, at, more, true);
    }
    if !missing.is_empty() {
        return Err(data_dependent());
    }
    let order = order(c);
    let (source, marks) = (a::permute(c.g(), source, &order)?, a::permute(c.g(), marks, &order)?);
    Ok(a::select(c.g(), marks, source, x)?)
}

/// The other addend, if the rows are those of `x` plus another value.
fn added_to(c: &Call<'_>, x: ValueId, rows: ValueId) -> Option<ValueId> {
    let g = &c.to.graph;
    let from = |mut v: ValueId| {
        while v != x && matches!(g.node(v).op, Op::Reshape(_) | Op::BroadcastInDim(_)) {
            v = g.node(v).operands[0];
        }
        v == x
    };
    let node = g.node(rows);
    match (&node.op, node.operands.as_slice()) {
        (Op::Binary(Binary::Add), &[a, b]) if from(a) => Some(b),
        (Op::Binary(Binary::Add), &[a, b]) if from(b) => Some(a),
        _ => None,
    }
}

/// Refuses to write marked rows at other positions than their own, since unmarked rows would be written too.
fn unmarked(c: &Call<'_>) -> Result<Option<ValueId>, Reject> {
    if c.to.marked.taken { Err(data_dependent()) } else { Ok(None) }
}

/// `index_put` at marked positions; `None` if no index holds any.
pub(crate) fn index_put(c: &mut Call<'_>, x: ValueId, values: ValueId, adds: bool) -> Result<Option<ValueId>, Reject> {
    let Some(at) = indices(c)? else { return unmarked(c) };
    put(c, x, &at, values, adds).map(Some)
}

/// `index_add` at marked positions; `None` if the index is of another kind.
pub(crate) fn index_add(c: &mut Call<'_>, source: ValueId) -> Result<Option<ValueId>, Reject> {
    let (x, index) = (c.first()?, c.tensor("index")?);
    let Some((mask, dim)) = positions(c, index) else { return unmarked(c) };
    let rank = c.rank(x);
    let at = Indices { first: c.dim("dim", 0, rank)?, mask, dims: vec![dim] };
    put(c, x, &at, source, true).map(Some)
}
