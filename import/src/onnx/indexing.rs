//! Lookups, their inverses, and sorting.

use super::call::{Call, Many, One, attribute, bad_value};
use super::leaves::counted;
use super::report::{ProblemKind, Reject};
use altiplano_ir::array;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::literal::Literal;
use altiplano_ir::op::{
    Binary, BroadcastInDim, Combine, Direction, Gather, GatherDims, Op, OutOfBounds, Scatter, ScatterAdd,
};
use altiplano_ir::tensor::Tensor;
use altiplano_ir::types::TensorType;

/// Returns true if an index may be negative and so count from the end. Known indices are inspected. Ids of rows of
/// weights count from the start.
fn wraps(c: &mut Call, table: ValueId, index: usize) -> bool {
    let looked_up = matches!(c.builder.graph.node(table).op, Op::Parameter(_));
    match c.known(index) {
        Some(known) => known.data.iter().any(|&i| i < 0.0),
        None => !looked_up,
    }
}

pub(crate) fn gather(c: &mut Call) -> One {
    let (x, indices) = (c.x(0)?, c.x(1)?);
    let dim = c.axis("axis", 0, x)?;
    if let Some(known) = c.known(1)
        && let ([only], 0) = (known.data.as_slice(), known.ty.rank())
    {
        return Ok(array::select_dim(c.g(), x, dim, *only as i64)?);
    }
    let wrap = wraps(c, x, 1);
    Ok(array::take(c.g(), x, dim, indices, wrap)?)
}

pub(crate) fn gather_elements(c: &mut Call) -> One {
    let (x, indices) = (c.x(0)?, c.x(1)?);
    let dim = c.axis("axis", 0, x)?;
    let wrap = wraps(c, x, 1);
    Ok(array::take_along(c.g(), x, dim, indices, wrap)?)
}

/// Index vectors in the last dimension, with negative components counted from the end of dimensions of these sizes.
fn from_start(c: &mut Call, indices: ValueId, index: usize, sizes: &[u64]) -> One {
    if c.known(index).is_some_and(|known| known.data.iter().all(|&i| i >= 0.0)) {
        return Ok(indices);
    }
    let dtype = c.dtype(indices);
    let g = c.g();
    let sizes = sizes.iter().map(|&s| s as f64).collect::<Vec<_>>();
    let sizes = g.constant(Literal::dense(TensorType::new(dtype, [sizes.len() as u64]), sizes));
    let zero = array::full_like(g, indices, 0.0)?;
    let negative = array::compare(g, Direction::Lt, indices, zero)?;
    let moved = array::binary(g, Binary::Add, indices, sizes)?;
    Ok(array::select(g, negative, moved, indices)?)
}

/// The dimension numbers of a lookup by index vectors. `batch` leading dimensions are shared, and the next `depth` are
/// indexed.
fn vector_dims(shape: &[u64], indices_rank: usize, batch: usize, depth: usize) -> GatherDims {
    let sliced = shape.len() - batch - depth;
    let mut slice_sizes = shape.to_vec();
    slice_sizes[..batch + depth].fill(1);
    GatherDims {
        offset_dims: (indices_rank - 1..indices_rank - 1 + sliced).collect(),
        collapsed_slice_dims: (batch..batch + depth).collect(),
        operand_batching_dims: (0..batch).collect(),
        indices_batching_dims: (0..batch).collect(),
        start_index_map: (batch..batch + depth).collect(),
        index_vector_dim: indices_rank - 1,
        slice_sizes,
    }
}

/// The length of the index vectors, which must fit the table together with the shared dimensions.
fn depth_of(c: &Call, shape: &[u64], indices: ValueId, batch: usize) -> Result<usize, Reject> {
    let indices = c.shape(indices);
    let depth = indices.last().and_then(|&d| usize::try_from(d).ok()).filter(|d| batch + d <= shape.len());
    let shared = indices.len() > batch && indices[..batch] == shape[..batch];
    depth.filter(|_| shared).ok_or(bad_value(1))
}

/// One component of index vectors.
struct Component {
    /// The component, without the dimension of the vectors.
    value: ValueId,
    /// The dimension of the indices along which the component counts all positions of its own dimension, if there is
    /// one. Such a lookup is in step with that dimension.
    counts: Option<usize>,
}

/// Component `at` of index vectors. If these were concatenated, it is the original part.
fn component(c: &mut Call, indices: ValueId, at: u64) -> One {
    let last = c.rank(indices) - 1;
    let node = c.builder.graph.node(indices);
    if matches!(&node.op, Op::Concatenate(op) if op.dim == last) {
        let mut start = 0;
        for part in node.operands.clone() {
            let size = c.shape(part)[last];
            if at < start + size {
                return component(c, part, at - start);
            }
            start += size;
        }
    }
    let is_constant = matches!(node.op, Op::Constant(_));
    let slice = array::select_dim(c.g(), indices, last, at as i64)?;
    let known = c.builder.known.elements(&c.builder.graph, slice).filter(|_| is_constant);
    Ok(known.map_or(slice, |known| counted(c.g(), Tensor::clone(&known))))
}

/// The components of index vectors. Each that counts along a dimension of the indices is marked.
fn components(c: &mut Call, indices: ValueId, sizes: &[u64]) -> Result<Vec<Component>, Reject> {
    let shape = c.shape(indices);
    let mut found: Vec<Component> = Vec::with_capacity(sizes.len());
    for (at, &size) in (0..).zip(sizes) {
        let value = component(c, indices, at)?;
        let known = c.builder.known.elements(&c.builder.graph, value);
        let counts_along = |dim: usize| {
            let stride: u64 = shape[dim + 1..shape.len() - 1].iter().product();
            let place = |at: usize| (at as u64 / stride.max(1) % size) as f64;
            known.as_ref().is_some_and(|known| known.data.iter().enumerate().all(|(at, &x)| x == place(at)))
        };
        let free =
            |dim: &usize| size > 1 && shape[*dim] == size && !found.iter().any(|other| other.counts == Some(*dim));
        let counts = (0..shape.len() - 1).filter(free).find(|&dim| counts_along(dim));
        found.push(Component { value, counts });
    }
    Ok(found)
}

pub(crate) fn gather_nd(c: &mut Call) -> One {
    let (x, indices) = (c.x(0)?, c.x(1)?);
    let shape = c.shape(x);
    let batch = usize::try_from(c.int("batch_dims", 0)?).ok().filter(|&b| b <= shape.len());
    let batch = batch.ok_or(attribute("batch_dims"))?;
    let depth = depth_of(c, &shape, indices, batch)?;
    let mut dims = vector_dims(&shape, c.rank(indices), batch, depth);
    let parts = components(c, indices, &shape[batch..batch + depth])?;
    if batch > 0 || parts.iter().all(|part| part.counts.is_none()) {
        let indices = from_start(c, indices, 1, &shape[batch..batch + depth])?;
        return Ok(c.g().push(Op::Gather(Gather { dims, out_of_bounds: OutOfBounds::Clamp }), &[x, indices])?);
    }
    let counts: Vec<usize> = parts.iter().filter_map(|part| part.counts).collect();
    if counts.len() == parts.len() {
        return in_step(c, x, indices, &counts);
    }
    // A component that counts, for example, the samples looks up within each sample. So the dimensions are shared.
    let (mut columns, mut looked_up) = (Vec::new(), Vec::new());
    for (at, part) in parts.iter().enumerate() {
        match part.counts {
            Some(along) => {
                dims.operand_batching_dims.push(at);
                dims.indices_batching_dims.push(along);
            }
            None => {
                let column = array::unsqueeze(c.g(), part.value, -1)?;
                columns.push(column_from_start(c, column, shape[at])?);
                looked_up.push(at);
            }
        }
    }
    let dtype = c.dtype(indices);
    let columns =
        columns.into_iter().map(|column| array::convert(c.g(), column, dtype)).collect::<Result<Vec<_>, _>>()?;
    let last = c.rank(indices) - 1;
    let indices = array::concat(c.g(), &columns, last)?;
    dims.collapsed_slice_dims.clone_from(&looked_up);
    dims.start_index_map = looked_up;
    Ok(c.g().push(Op::Gather(Gather { dims, out_of_bounds: OutOfBounds::Clamp }), &[x, indices])?)
}

/// A lookup in which every component counts: the table itself, with its dimensions moved and repeated.
fn in_step(c: &mut Call, x: ValueId, indices: ValueId, counts: &[usize]) -> One {
    let indices = c.shape(indices);
    let wide = &indices[..indices.len() - 1];
    let rest = &c.shape(x)[counts.len()..];
    let shape = [wide, rest].concat();
    let dims = counts.iter().copied().chain(wide.len()..shape.len()).collect();
    Ok(c.g().push(Op::BroadcastInDim(BroadcastInDim { shape, dims }), &[x])?)
}

/// A column of index vectors, with negative indices counted from the end unless none is known to be negative.
fn column_from_start(c: &mut Call, column: ValueId, size: u64) -> One {
    let known = c.builder.known.elements(&c.builder.graph, column);
    if known.is_some_and(|known| known.data.iter().all(|&i| i >= 0.0)) {
        return Ok(column);
    }
    let g = c.g();
    let zero = array::full_like(g, column, 0.0)?;
    let negative = array::compare(g, Direction::Lt, column, zero)?;
    let moved = array::with_number(g, Binary::Add, column, size as f64)?;
    Ok(array::select(g, negative, moved, column)?)
}

/// Combines updates into `x` as the attribute `reduction` says.
fn scatter(c: &mut Call, x: ValueId, indices: ValueId, updates: ValueId, dims: GatherDims) -> One {
    let combine = match c.text("reduction", "none")? {
        "none" => Combine::Replace,
        "add" => {
            let shape = c.shape(x);
            let added = c.g().push(Op::ScatterAdd(ScatterAdd { dims, shape }), &[indices, updates])?;
            return Ok(array::binary(c.g(), Binary::Add, x, added)?);
        }
        "mul" => Combine::Multiply,
        "min" => Combine::Minimum,
        "max" => Combine::Maximum,
        _ => return Err(attribute("reduction")),
    };
    Ok(c.g().push(Op::Scatter(Scatter { dims, combine }), &[x, indices, updates])?)
}

pub(crate) fn scatter_nd(c: &mut Call) -> One {
    let (x, indices, updates) = (c.x(0)?, c.x(1)?, c.x(2)?);
    let shape = c.shape(x);
    let depth = depth_of(c, &shape, indices, 0)?;
    let indices = from_start(c, indices, 1, &shape[..depth])?;
    let dims = vector_dims(&shape, c.rank(indices), 0, depth);
    scatter(c, x, indices, updates, dims)
}

pub(crate) fn scatter_elements(c: &mut Call) -> One {
    let (x, indices, updates) = (c.x(0)?, c.x(1)?, c.x(2)?);
    let dim = c.axis("axis", 0, x)?;
    let (shape, wanted) = (c.shape(x), c.shape(indices));
    if shape.len() != wanted.len() {
        return Err(bad_value(1));
    }
    let rank = shape.len();
    let others: Vec<usize> = (0..rank).filter(|&d| d != dim).collect();
    let column = array::unsqueeze(c.g(), indices, -1)?;
    let column = from_start(c, column, 1, &[shape[dim]])?;
    if others.iter().all(|&d| shape[d] == wanted[d]) {
        let dims = GatherDims {
            offset_dims: Vec::new(),
            collapsed_slice_dims: vec![dim],
            operand_batching_dims: others.clone(),
            indices_batching_dims: others,
            start_index_map: vec![dim],
            index_vector_dim: rank,
            slice_sizes: vec![1; rank],
        };
        return scatter(c, x, column, updates, dims);
    }
    // Updates for a part of the other dimensions use complete index vectors.
    let dtype = c.dtype(indices);
    let full = [wanted.as_slice(), &[1]].concat();
    let mut columns = Vec::with_capacity(rank);
    for d in 0..rank {
        columns.push(if d == dim { column } else { array::iota(c.g(), &full, d, dtype)? });
    }
    let vectors = array::concat(c.g(), &columns, rank)?;
    let dims = vector_dims(&shape, rank + 1, 0, rank);
    scatter(c, x, vectors, updates, dims)
}

pub(crate) fn one_hot(c: &mut Call) -> One {
    let (indices, values) = (c.x(0)?, c.x(2)?);
    let depth = c.number_of(1)?;
    if !(0.0..281e12).contains(&depth) || c.shape(values) != [2] {
        return Err(bad_value(1));
    }
    let rank = c.rank(indices);
    let axis = array::axis(c.int("axis", -1)?, rank + 1)?;
    let dtype = c.dtype(values);
    let g = c.g();
    let indices = array::convert(g, indices, DType::I64)?;
    let zero = array::full_like(g, indices, 0.0)?;
    let negative = array::compare(g, Direction::Lt, indices, zero)?;
    let moved = array::with_number(g, Binary::Add, indices, depth)?;
    let indices = array::select(g, negative, moved, indices)?;
    let hot = array::one_hot(g, indices, depth as u64, DType::Bool)?;
    let hot = array::move_dim(g, hot, rank, axis)?;
    let [off, on] = [0, 1].map(|i| array::select_dim(g, values, 0, i));
    let result = array::select(g, hot, on?, off?)?;
    Ok(array::convert(g, result, dtype)?)
}

pub(crate) fn top_k(c: &mut Call) -> Many {
    let x = c.x(0)?;
    let k = match c.int_opt("k")? {
        Some(k) => k,
        None => c.number_of(1)? as i64,
    };
    let dim = c.axis("axis", -1, x)?;
    let largest = c.flag("largest", true)?;
    let k = u64::try_from(k).map_err(|_| bad_value(1))?;
    let (values, places) = array::top_k(c.g(), x, dim, k, !largest)?;
    let places = array::convert(c.g(), places, DType::I64)?;
    Ok(vec![values, places])
}

/// Reverses the first elements of each sequence, up to its length. The rest stays.
pub(crate) fn reverse_sequence(c: &mut Call) -> One {
    let (x, lengths) = (c.x(0)?, c.x(1)?);
    let (time, batch) = (c.axis("time_axis", 0, x)?, c.axis("batch_axis", 1, x)?);
    let shape = c.shape(x);
    let dtype = c.dtype(lengths);
    let mut column = vec![1; shape.len()];
    column[batch] = c.g().ty(lengths).elements();
    let g = c.g();
    let lengths = array::reshape(g, lengths, &column)?;
    let place = array::iota(g, &shape, time, dtype)?;
    let last = array::with_number(g, Binary::Subtract, lengths, 1.0)?;
    let mirrored = array::binary(g, Binary::Subtract, last, place)?;
    let inside = array::compare(g, Direction::Lt, place, lengths)?;
    let from = array::select(g, inside, mirrored, place)?;
    Ok(array::take_along(g, x, time, from, false)?)
}

/// The positions of nonzero elements. Their number is a size, so the elements must be known.
pub(crate) fn non_zero(c: &mut Call) -> One {
    let tensor = c.elements(0)?;
    let mut places: Vec<Vec<f64>> = vec![Vec::new(); tensor.ty.rank()];
    let mut at = 0;
    altiplano_ir::tensor::for_each_index(&tensor.ty.shape, |index| {
        if tensor.data[at] != 0.0 {
            index.iter().zip(&mut places).for_each(|(&i, list)| list.push(i as f64));
        }
        at += 1;
    });
    let count = places.first().map_or(0, Vec::len) as u64;
    let ty = TensorType::new(DType::I64, [places.len() as u64, count]);
    Ok(c.g().constant(Literal::dense(ty, places.concat())))
}

/// The slices for which a condition is true. The condition must be known.
pub(crate) fn compress(c: &mut Call) -> One {
    let x = c.x(0)?;
    let kept = c.elements(1)?;
    let (x, dim) = match c.int_opt("axis")? {
        Some(axis) => (x, array::axis(axis, c.rank(x))?),
        None => {
            let all = c.g().ty(x).elements();
            (array::reshape(c.g(), x, &[all])?, 0)
        }
    };
    let places: Vec<f64> = kept.data.iter().enumerate().filter(|(_, k)| **k != 0.0).map(|(i, _)| i as f64).collect();
    if places.last().is_some_and(|&last| last >= c.shape(x)[dim] as f64) {
        return Err(Reject::Invalid(ProblemKind::Value { index: 1 }));
    }
    let places = super::movement::integers(c, places);
    Ok(array::take(c.g(), x, dim, places, false)?)
}
