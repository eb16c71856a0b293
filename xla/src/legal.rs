//! Rewrites a graph into ops that StableHLO has, with the same values.
//!
//! Composites become their decompositions. An op that StableHLO lacks, or defines for fewer attributes, becomes several
//! ops of the graph. So the printer has one line for each node, and the interpreter can check the rewriting.

use altiplano_ir::dtype::DType;
use altiplano_ir::expand::expand;
use altiplano_ir::graph::{Graph, Node, ValueId};
use altiplano_ir::literal::Literal;
use altiplano_ir::op::{
    Binary, Concatenate, Cumulative, Direction, DotGeneral, Extremum, Gather, GatherDims, GroupedDot, GroupedOuter,
    Iota, Op, OutOfBounds, Pad, Reduce, ReduceWindow, Reducer, Scatter, ScatterAdd, SelectAndScatter, Slice, Unary,
    WindowDim,
};
use altiplano_ir::tensor::for_each_index;
use altiplano_ir::types::TensorType;

/// A graph that the printer can print.
#[derive(Clone, Debug)]
pub(crate) struct Legal {
    pub graph: Graph,
    /// For each value of the given graph, its value in [`Legal::graph`].
    pub values: Vec<ValueId>,
}

/// Rewrites a verified graph. Values, outputs and leaves keep their types and their order. `compares`: a scatter of one
/// update a row becomes a comparison, which XLA fuses with its users; it writes the result of a scatter to memory.
pub(crate) fn legalise(graph: &Graph, compares: bool) -> Legal {
    let expanded = expand(graph);
    let from = &expanded.graph;
    let mut to = Graph { name: graph.name.clone(), batch: graph.batch, ..Default::default() };
    let mut map: Vec<ValueId> = Vec::with_capacity(from.len());
    for node in &from.nodes {
        let operands: Vec<ValueId> = node.operands.iter().map(|o| map[o.index()]).collect();
        let before = to.len();
        let value = match compared(&mut to, node, &operands, compares).or_else(|| replaced(&mut to, node, &operands)) {
            Some(value) => value,
            None => to.append(Node { operands, ..node.clone() }),
        };
        for new in &mut to.nodes[before..] {
            new.name.clone_from(&node.name);
        }
        map.push(value);
    }
    to.outputs = from.outputs.iter().map(|o| map[o.index()]).collect();
    Legal { graph: to, values: expanded.values.iter().map(|v| map[v.index()]).collect() }
}

/// The value of a node that StableHLO has no op for. `None` for all others.
fn replaced(g: &mut Graph, node: &Node, x: &[ValueId]) -> Option<ValueId> {
    let dtype = node.ty.dtype;
    match &node.op {
        Op::Unary(Unary::StopGradient) | Op::Microbatches(_) | Op::HostCopy(_) => Some(x[0]),
        Op::Unary(Unary::Abs) if dtype.is_unsigned_integer() => Some(x[0]),
        Op::Unary(Unary::Sign) if dtype.is_unsigned_integer() => {
            let one = g.splat_like(x[0], 1.0);
            Some(g.emit(Op::Binary(Binary::Minimum), &[x[0], one]))
        }
        Op::Roll(roll) => Some(rolled(g, x[0], roll.dim, roll.by)),
        Op::Reduce(op) if op.dims.is_empty() => Some(x[0]),
        Op::Reduce(Reduce { reducer, .. }) => widened(g, node, x, *reducer),
        Op::Cumulative(op) if is_empty_or_single(g, x[0], op) => Some(x[0]),
        Op::Cumulative(Cumulative { reducer, .. }) => widened(g, node, x, *reducer),
        Op::ArgSort(op) if node.ty.shape[op.dim] <= 1 || node.ty.elements() == 0 => {
            Some(g.emit(Op::Iota(Iota { ty: node.ty.clone(), dim: op.dim }), &[]))
        }
        Op::ReduceWindow(op) if op.window.iter().all(WindowDim::is_one) => Some(x[0]),
        Op::ReduceWindow(ReduceWindow { reducer, .. }) => widened(g, node, x, *reducer),
        Op::SelectAndScatter(op) if !op.window.iter().all(is_plain) => Some(selected(g, op, x[0], x[1])),
        Op::Gather(op) => gathered(g, op, x[0], x[1]),
        Op::ScatterAdd(op) => scattered(g, op, x[0], x[1]),
        Op::Scatter(op) => {
            let (wide, dims) = (wide_index(g, x[1]), sorted(&op.dims));
            let changed = wide.is_some() || dims != op.dims;
            let operands = [x[0], wide.unwrap_or(x[1]), x[2]];
            changed.then(|| g.emit(Op::Scatter(Scatter { dims, combine: op.combine }), &operands))
        }
        Op::GroupedDot(op) => Some(grouped_dot(g, op, x)),
        Op::GroupedOuter(op) => Some(grouped_outer(g, op, x)),
        _ => None,
    }
}

/// The same op in f32, if it sums or multiplies elements of at most 16 bits. XLA would round every partial result.
fn widened(g: &mut Graph, node: &Node, x: &[ValueId], reducer: Reducer) -> Option<ValueId> {
    let exact = !node.ty.dtype.is_half() || !matches!(reducer, Reducer::Sum | Reducer::Product);
    if exact {
        return None;
    }
    let wide: Vec<ValueId> = x.iter().map(|&x| g.convert(x, DType::F32)).collect();
    let result = g.emit(node.op.clone(), &wide);
    Some(g.convert(result, node.ty.dtype))
}

fn rolled(g: &mut Graph, x: ValueId, dim: usize, by: u64) -> ValueId {
    let shape = g.shape(x).to_vec();
    let by = by % shape[dim].max(1);
    if by == 0 {
        return x;
    }
    let end = along(g, x, dim, by, shape[dim]);
    let start = along(g, x, dim, 0, by);
    g.emit(Op::Concatenate(Concatenate { dim }), &[end, start])
}

/// Elements `start..limit` of one dimension.
fn along(g: &mut Graph, x: ValueId, dim: usize, start: u64, limit: u64) -> ValueId {
    let shape = g.shape(x).to_vec();
    let mut slice = Slice { start: vec![0; shape.len()], limit: shape.clone(), stride: vec![1; shape.len()] };
    (slice.start[dim], slice.limit[dim]) = (start, limit);
    g.emit(Op::Slice(slice), &[x])
}

fn is_empty_or_single(g: &Graph, x: ValueId, op: &Cumulative) -> bool {
    g.shape(x)[op.dim] <= 1 || g.ty(x).elements() == 0
}

/// Windows that StableHLO's `select_and_scatter` has.
fn is_plain(window: &WindowDim) -> bool {
    window.base_dilation == 1
        && window.window_dilation == 1
        && !window.reversed
        && window.pad_low >= 0
        && window.pad_high >= 0
}

/// Selection among explicit window positions, for windows with gaps. Each position is a strided slice of the padded
/// operand, and what it selects is padded back to its place.
fn selected(g: &mut Graph, op: &SelectAndScatter, x: ValueId, source: ValueId) -> ValueId {
    let (ty, results) = (g.ty(x).clone(), g.shape(source).to_vec());
    let zero = Literal::splat(TensorType::scalar(ty.dtype), 0.0);
    let zero = g.constant(zero);
    if ty.elements() == 0 || results.contains(&0) {
        return g.splat_like(x, 0.0);
    }
    let spread = |g: &mut Graph, x, padding| {
        let pad = Pad {
            low: op.window.iter().map(|w| w.pad_low).collect(),
            high: op.window.iter().map(|w| w.pad_high).collect(),
            interior: op.window.iter().map(|w| w.base_dilation - 1).collect(),
        };
        g.emit(Op::Pad(pad), &[x, padding])
    };
    let padded = spread(g, x, zero);
    let everywhere = g.constant(Literal::splat(ty.with_dtype(DType::Bool), 1.0));
    let nowhere = g.constant(Literal::splat(TensorType::scalar(DType::Bool), 0.0));
    let present = spread(g, everywhere, nowhere);
    let sizes: Vec<u64> = op.window.iter().map(|w| w.size).collect();
    let mut slices = Vec::new();
    for_each_index(&sizes, |k| {
        let offset = |(k, w): (&u64, &WindowDim)| if w.reversed { w.size - 1 - k } else { *k } * w.window_dilation;
        let start: Vec<u64> = k.iter().zip(&op.window).map(offset).collect();
        let ends = start.iter().zip(&op.window).zip(&results);
        let limit = ends.map(|((s, w), &n)| s + (n - 1) * w.stride + 1).collect();
        slices.push(Slice { start, limit, stride: op.window.iter().map(|w| w.stride).collect() });
    });
    let keeps = if op.select == Extremum::Max { Direction::Ge } else { Direction::Le };
    let number =
        |g: &mut Graph, n: usize| g.constant(Literal::splat(TensorType::new(DType::I32, results.clone()), n as f64));
    let mut best: Option<(ValueId, ValueId, ValueId)> = None;
    for (n, slice) in slices.iter().enumerate() {
        let value = g.emit(Op::Slice(slice.clone()), &[padded]);
        let is_there = g.emit(Op::Slice(slice.clone()), &[present]);
        let this = number(g, n);
        best = Some(match best {
            None => (value, is_there, this),
            Some((kept, found, at)) => {
                let stays = g.compare(keeps, kept, value);
                let stays = g.emit(Op::Binary(Binary::And), &[found, stays]);
                let absent = g.unary(Unary::Not, is_there);
                let stays = g.emit(Op::Binary(Binary::Or), &[stays, absent]);
                let found = g.emit(Op::Binary(Binary::Or), &[found, is_there]);
                (g.select(stays, kept, value), found, g.select(stays, at, this))
            }
        });
    }
    let Some((_, found, at)) = best else { return g.splat_like(x, 0.0) };
    let nothing = g.splat_like(source, 0.0);
    let mut sum = g.splat_like(padded, 0.0);
    for (n, slice) in slices.iter().enumerate() {
        let this = number(g, n);
        let here = g.compare(Direction::Eq, at, this);
        let here = g.emit(Op::Binary(Binary::And), &[here, found]);
        let part = g.select(here, source, nothing);
        let ends = slice.limit.iter().zip(g.shape(padded));
        let pad = Pad {
            low: slice.start.iter().map(|&s| s as i64).collect(),
            high: ends.map(|(&limit, &size)| (size - limit) as i64).collect(),
            interior: slice.stride.iter().map(|s| s - 1).collect(),
        };
        let part = g.emit(Op::Pad(pad), &[part, zero]);
        sum = g.add(sum, part);
    }
    unspread(g, sum, &op.window, &ty.shape, zero)
}

/// The elements of a padded and dilated tensor that are those of the tensor. Removed elements come back as zeros.
fn unspread(g: &mut Graph, padded: ValueId, window: &[WindowDim], shape: &[u64], zero: ValueId) -> ValueId {
    let pad = Pad {
        low: window.iter().map(|w| -w.pad_low).collect(),
        high: window.iter().map(|w| -w.pad_high).collect(),
        interior: vec![0; window.len()],
    };
    let cut = g.emit(Op::Pad(pad), &[padded, zero]);
    let slice = Slice {
        start: vec![0; shape.len()],
        limit: g.shape(cut).to_vec(),
        stride: window.iter().map(|w| w.base_dilation).collect(),
    };
    g.emit(Op::Slice(slice), &[cut])
}

/// Indices whose type may be too narrow for the positions of a table, as i32. `None` if the type is wide enough.
fn wide_index(g: &mut Graph, index: ValueId) -> Option<ValueId> {
    (g.ty(index).dtype.bytes() < 4).then(|| g.convert(index, DType::I32))
}

/// The same dimension numbers with batching and collapsed dimensions in ascending order, as StableHLO asks.
fn sorted(dims: &GatherDims) -> GatherDims {
    let mut pairs: Vec<(usize, usize)> =
        dims.operand_batching_dims.iter().copied().zip(dims.indices_batching_dims.iter().copied()).collect();
    pairs.sort_unstable();
    let mut sorted = dims.clone();
    (sorted.operand_batching_dims, sorted.indices_batching_dims) = pairs.into_iter().unzip();
    sorted.collapsed_slice_dims.sort_unstable();
    sorted
}

/// A gather that clamps, with zeros in place of slices that do not lie inside.
fn gathered(g: &mut Graph, op: &Gather, x: ValueId, indices: ValueId) -> Option<ValueId> {
    let wide = wide_index(g, indices);
    let dims = sorted(&op.dims);
    if wide.is_none() && op.out_of_bounds == OutOfBounds::Clamp && dims == op.dims {
        return None;
    }
    let index = wide.unwrap_or(indices);
    let table = g.shape(x).to_vec();
    let clamped = Gather { dims: dims.clone(), out_of_bounds: OutOfBounds::Clamp };
    let value = g.emit(Op::Gather(clamped), &[x, index]);
    if op.out_of_bounds == OutOfBounds::Clamp {
        return Some(value);
    }
    let inside = inside(g, &dims, &table, index);
    let shape = g.shape(value).to_vec();
    let inside = g.broadcast(inside, &shape, &dims.batch_dims(shape.len()));
    let zeros = g.splat_like(value, 0.0);
    Some(g.select(inside, value, zeros))
}

/// A boolean for each index vector, true if its slice lies inside the table.
fn inside(g: &mut Graph, dims: &GatherDims, table: &[u64], index: ValueId) -> ValueId {
    let ty = g.ty(index).clone();
    let explicit = dims.index_vector_dim < ty.rank();
    let most = ty.dtype.round(2f64.powi(ty.dtype.width() as i32 - 1) - 1.0);
    let last = |&o: &usize| ((table[o] - dims.slice_sizes[o]) as f64).min(most);
    let last: Vec<f64> = dims.start_index_map.iter().map(last).collect();
    let zero = g.splat_like(index, 0.0);
    let bound = g.constant(Literal::dense(TensorType::new(ty.dtype, [last.len() as u64]), last));
    let bound = match explicit {
        true => g.broadcast(bound, &ty.shape, &[dims.index_vector_dim]),
        false => {
            let scalar = g.reshape(bound, &[]);
            g.broadcast_scalar(scalar, &ty.shape)
        }
    };
    let from = g.compare(Direction::Ge, index, zero);
    let to = g.compare(Direction::Le, index, bound);
    let both = g.emit(Op::Binary(Binary::And), &[from, to]);
    if explicit { g.reduce(both, Reducer::And, &[dims.index_vector_dim]) } else { both }
}

/// A scatter of one update a row as a comparison.
fn compared(g: &mut Graph, node: &Node, x: &[ValueId], compares: bool) -> Option<ValueId> {
    let Op::ScatterAdd(op) = &node.op else { return None };
    if !compares || node.ty.elements() == 0 || !op.is_compared(g.shape(x[0])) {
        return None;
    }
    let indices = wide_index(g, x[0]).unwrap_or(x[0]);
    op.compared(g, indices, x[1])
}

/// A sum of updates in f32 if their type has at most 16 bits, at indices of at least 32 bits.
fn scattered(g: &mut Graph, op: &ScatterAdd, indices: ValueId, updates: ValueId) -> Option<ValueId> {
    let dtype = g.ty(updates).dtype;
    let wide = wide_index(g, indices);
    let dims = sorted(&op.dims);
    if wide.is_none() && !dtype.is_half() && dims == op.dims {
        return None;
    }
    let updates = if dtype.is_half() { g.convert(updates, DType::F32) } else { updates };
    let op = ScatterAdd { dims, shape: op.shape.clone() };
    let sum = g.emit(Op::ScatterAdd(op), &[wide.unwrap_or(indices), updates]);
    Some(g.convert(sum, dtype))
}

/// True for the rows of each group, in the shape of `like`. Rows come first, and groups are dimension `at`.
fn rows_of_groups(g: &mut Graph, group: ValueId, shape: &[u64], at: usize) -> ValueId {
    let group = wide_index(g, group).unwrap_or(group);
    let ty = g.ty(group).with_shape(shape);
    let number = g.emit(Op::Iota(Iota { ty, dim: at }), &[]);
    let rows: Vec<usize> = (0..g.ty(group).rank()).collect();
    let group = g.broadcast(group, shape, &rows);
    g.compare(Direction::Eq, number, group)
}

/// The products of all rows with all matrices, of which each row keeps its own.
fn grouped_dot(g: &mut Graph, op: &GroupedDot, x: &[ValueId]) -> ValueId {
    let (rows, matrices, group) = (x[0], x[1], x[2]);
    let rank = g.ty(group).rank();
    let dot = DotGeneral {
        lhs_batch: Vec::new(),
        rhs_batch: Vec::new(),
        lhs_contract: vec![rank],
        rhs_contract: vec![op.contract],
    };
    let all = g.emit(Op::DotGeneral(dot), &[rows, matrices]);
    let shape = g.shape(all).to_vec();
    let own = rows_of_groups(g, group, &shape, rank);
    let zeros = g.splat_like(all, 0.0);
    let all = g.select(own, all, zeros);
    g.reduce(all, Reducer::Sum, &[rank])
}

/// The products of each group's rows, with zeros in place of all other rows.
fn grouped_outer(g: &mut Graph, op: &GroupedOuter, x: &[ValueId]) -> ValueId {
    let (left, right, group) = (x[0], x[1], x[2]);
    let rank = g.ty(group).rank();
    let mut shape = g.shape(left).to_vec();
    shape.insert(rank, op.groups);
    let own = rows_of_groups(g, group, &shape, rank);
    let kept: Vec<usize> = (0..rank).chain([rank + 1]).collect();
    let left = g.broadcast(left, &shape, &kept);
    let zeros = g.splat_like(left, 0.0);
    let left = g.select(own, left, zeros);
    let rows: Vec<usize> = (0..rank).collect();
    let dot =
        DotGeneral { lhs_batch: Vec::new(), rhs_batch: Vec::new(), lhs_contract: rows.clone(), rhs_contract: rows };
    g.emit(Op::DotGeneral(dot), &[left, right])
}

#[cfg(test)]
mod tests {
    use super::*;
    use altiplano_ir::interpret::run;
    use altiplano_ir::op::Input;
    use altiplano_ir::tensor::Tensor;
    use altiplano_ir::testing::numbers::{Rng, difference, random};

    /// A row's only update is selected by its position, also where its index is beyond the row.
    #[test]
    fn one_update_a_row_is_scattered_by_a_comparison() {
        let dims = |batch: &[usize]| GatherDims {
            offset_dims: Vec::new(),
            collapsed_slice_dims: vec![1],
            operand_batching_dims: vec![0],
            indices_batching_dims: vec![0],
            start_index_map: vec![1],
            index_vector_dim: batch.len(),
            slice_sizes: vec![1, 1],
        };
        for (shape, per_row, is_compared) in [([3, 5], 1, true), ([3, 5], 2, false)] {
            let mut graph = Graph::new("scatter");
            let mut input = |name: &str, dtype| {
                let ty = TensorType::new(dtype, [shape[0], per_row]);
                graph.emit(Op::Input(Input { name: name.into(), ty }), &[])
            };
            let (indices, updates) = (input("indices", DType::I8), input("updates", DType::BF16));
            let op = ScatterAdd { dims: dims(&[0, 1]), shape: shape.to_vec() };
            graph.outputs = vec![graph.emit(Op::ScatterAdd(op), &[indices, updates])];
            let mut rng = Rng::new(5);
            let updates = random(graph.ty(updates), (-2.0, 2.0), (0, 1), &mut rng);
            let places = [4.0, 0.0, 7.0, 2.0, 2.0, -1.0];
            let indices =
                Tensor::new(graph.ty(indices).clone(), places[..graph.ty(indices).elements() as usize].to_vec());
            let of = |g: &Graph| run(g, |v| if v.index() == 0 { indices.clone() } else { updates.clone() });
            let legal = legalise(&graph, true).graph;
            assert_eq!(legal.nodes.iter().any(|node| matches!(node.op, Op::ScatterAdd(_))), !is_compared);
            assert_eq!(difference(&of(&legal)[0], &of(&graph)[0], 1e-12), None, "{per_row} a row");
        }
    }

    /// The gradient of pooling with gaps between the elements of a window, between those of the operand, and with
    /// negative padding.
    #[test]
    fn windows_with_gaps_select_the_same_elements() {
        let plain = WindowDim::one();
        let windows = [
            WindowDim { size: 3, window_dilation: 2, pad_low: 1, pad_high: 2, ..plain },
            WindowDim { size: 2, stride: 2, base_dilation: 3, pad_low: 2, pad_high: 2, ..plain },
            WindowDim { size: 3, stride: 2, pad_low: -1, pad_high: 1, ..plain },
            WindowDim { size: 3, reversed: true, ..plain },
        ];
        let mut rng = Rng::new(3);
        for window in windows {
            for select in [Extremum::Max, Extremum::Min] {
                let op = SelectAndScatter { select, window: vec![plain, window] };
                let mut graph = Graph::new("pool");
                let result = window.result_size(7).expect("a window that fits");
                let types = [TensorType::new(DType::F32, [2, 7]), TensorType::new(DType::F32, [2, result])];
                let leaf = |g: &mut Graph, name: &str, ty: &TensorType| {
                    g.emit(Op::Input(Input { name: name.into(), ty: ty.clone() }), &[])
                };
                let operands = [leaf(&mut graph, "x", &types[0]), leaf(&mut graph, "y", &types[1])];
                graph.outputs = vec![graph.emit(Op::SelectAndScatter(op), &operands)];
                // Few different numbers, so that elements are equal.
                let values =
                    [random(&types[0], (1.0, 4.0), (0, 1), &mut rng), random(&types[1], (1.0, 2.0), (0, 1), &mut rng)];
                let coarse = Tensor::new(types[0].clone(), values[0].data.iter().map(|x| x.round()).collect());
                let given = [coarse, values[1].clone()];
                let of = |g: &Graph| run(g, |v| given[v.index()].clone());
                let legal = legalise(&graph, false);
                assert!(!legal.graph.nodes.iter().any(|n| matches!(n.op, Op::SelectAndScatter(_))));
                let problem = difference(&of(&legal.graph)[0], &of(&graph)[0], 1e-12);
                assert_eq!(problem, None, "{select:?} of {window:?}");
            }
        }
    }
}
