//! Lookups that take few elements of a large tensor, without further tensors of its size. A loss, for example, takes
//! the element at each label.
//!
//! Elementwise ops that compute the table move behind the lookup, where they process only the taken elements.
//!
//! The gradient of a lookup of one element per row compares positions with the index. Its users compute the comparison
//! on the fly, whereas a scatter is written to memory. The sum of this gradient over the row is the one element.
//!
//! So a loss over a large vocabulary makes no tensor of the logits' size. Plans for software that makes one are priced with it
//! ([`fused_loss`](crate::plan::Execution::fused_loss)).

use super::gather::greatest;
use super::*;

/// The number of table elements per taken element, from which on elementwise ops move behind the lookup.
const FEW: u64 = 4;

/// `gather(table, indices)`, where elementwise ops that compute the table are applied to the taken elements. This
/// covers ops on one tensor and on operands that are constant along the indexed dimension.
pub(super) fn looked_up(graph: &mut Graph, gather: &Gather, table: ValueId, indices: ValueId) -> ValueId {
    let plain = |graph: &mut Graph| graph.emit(Op::Gather(gather.clone()), &[table, indices]);
    let types = [graph.ty(table), graph.ty(indices)];
    let Ok(taken) = gather.infer(&types) else { return plain(graph) };
    if !takes_few(gather, types[0], &taken) {
        return plain(graph);
    }
    // Walk from the table back to its source. Each step is an op, with all its operands except the one on the path.
    let mut source = table;
    let mut steps: Vec<(ValueId, Vec<Option<ValueId>>)> = Vec::new();
    while graph.node(source).op.is_elementwise() {
        let operands = graph.node(source).operands.clone();
        let rows: Vec<Option<Row>> =
            operands.iter().map(|&o| row(graph, &gather.dims, indices, o, &taken.shape)).collect();
        let Some(main) = rows.iter().position(Option::is_none) else { break };
        if rows.iter().zip(&operands).any(|(row, &o)| row.is_none() && o != operands[main]) {
            break;
        }
        let operands_of_taken = rows.into_iter().map(|row| row.map(|row| row.emit(graph, &taken.shape))).collect();
        steps.push((source, operands_of_taken));
        source = operands[main];
    }
    if steps.is_empty() {
        return plain(graph);
    }
    let inner = Gather { dims: gather.dims.clone(), out_of_bounds: OutOfBounds::Clamp };
    let mut value = graph.emit(Op::Gather(inner), &[source, indices]);
    for (step, operands) in steps.into_iter().rev() {
        let node = graph.node(step);
        let (op, name) = (node.op.clone(), node.name.clone());
        let operands: Vec<ValueId> = operands.into_iter().map(|o| o.unwrap_or(value)).collect();
        value = graph.emit(op, &operands);
        graph.nodes[value.index()].name = name;
    }
    match gather.out_of_bounds {
        OutOfBounds::Clamp => value,
        OutOfBounds::Zero => {
            let rank = graph.shape(indices).len();
            let shape: Vec<u64> = gather.dims.indices_dims(rank).iter().map(|&d| graph.shape(indices)[d]).collect();
            let index = graph.reshape(indices, &shape);
            let table = graph.shape(source)[gather.dims.start_index_map[0]];
            let inside = inside(graph, index, table);
            let inside = graph.broadcast(inside, &taken.shape, &gather.dims.batch_dims(taken.rank()));
            let zero = graph.splat_like(value, 0.0);
            graph.select(inside, value, zero)
        }
    }
}

/// True if a lookup of elements of type `taken` moves behind elementwise ops that compute its table.
pub fn takes_few(gather: &Gather, table: &TensorType, taken: &TensorType) -> bool {
    let single = matches!(gather.dims.start_index_map[..], [d] if gather.dims.slice_sizes[d] == 1);
    single && taken.elements().saturating_mul(FEW) <= table.elements()
}

/// True if an operand of an elementwise op may be constant along the dimension that a lookup of the result indexes.
pub fn may_be_row(graph: &Graph, v: ValueId) -> bool {
    matches!(graph.node(v).op, Op::Constant(_) | Op::BroadcastInDim(_))
}

/// True if no lookup moves behind the op that makes `v`.
pub fn lookups_stop_at(graph: &Graph, v: ValueId) -> bool {
    let node = graph.node(v);
    let mut varied: Vec<ValueId> = node.operands.iter().copied().filter(|&o| !may_be_row(graph, o)).collect();
    varied.dedup();
    !node.op.is_elementwise() || varied.len() > 1
}

/// An operand that is constant along the indexed dimension, so that its value for the taken elements is known.
enum Row {
    Constant(Literal),
    /// A value, the sizes of its dimensions of more than one element, and the matching dimensions of the taken
    /// elements.
    Repeated {
        value: ValueId,
        sizes: Vec<u64>,
        dims: Vec<usize>,
    },
}

fn row(graph: &Graph, dims: &GatherDims, indices: ValueId, v: ValueId, taken: &[u64]) -> Option<Row> {
    let node = graph.node(v);
    match &node.op {
        Op::Constant(literal) if literal.as_splat().is_some() => Some(Row::Constant(literal.clone())),
        Op::BroadcastInDim(op) => {
            let value = node.operands[0];
            let along: Vec<(u64, usize)> = graph
                .shape(value)
                .iter()
                .zip(&op.dims)
                .filter(|(size, _)| **size != 1)
                .map(|(&s, &d)| (s, d))
                .collect();
            let indices_dims = dims.indices_dims(graph.shape(indices).len());
            let batch_dims = dims.batch_dims(taken.len());
            // The dimension of the taken elements that runs along with all of a dimension of the table.
            let in_taken = |&(_, d): &(u64, usize)| {
                if let Some(b) = dims.operand_batching_dims.iter().position(|&o| o == d) {
                    let place = indices_dims.iter().position(|&i| i == dims.indices_batching_dims[b])?;
                    return batch_dims.get(place).copied();
                }
                let window = dims.window_dims().iter().position(|&o| o == d)?;
                let whole = dims.slice_sizes[d] == node.ty.shape[d] && !dims.start_index_map.contains(&d);
                whole.then(|| dims.offset_dims[window])
            };
            let to: Option<Vec<usize>> = along.iter().map(in_taken).collect();
            Some(Row::Repeated { value, sizes: along.iter().map(|a| a.0).collect(), dims: to? })
        }
        _ => None,
    }
}

impl Row {
    fn emit(self, graph: &mut Graph, shape: &[u64]) -> ValueId {
        match self {
            Row::Constant(literal) => {
                let ty = literal.ty.with_shape(shape);
                graph.constant(Literal { ty, ..literal })
            }
            Row::Repeated { value, sizes, dims } => {
                let value = graph.reshape(value, &sizes);
                graph.broadcast(value, shape, &dims)
            }
        }
    }
}

/// A boolean for each index, true if it lies in `0..size`.
fn inside(graph: &mut Graph, index: ValueId, size: u64) -> ValueId {
    let zero = graph.splat_like(index, 0.0);
    let last = graph.splat_like(index, ((size - 1) as f64).min(greatest(graph.ty(index).dtype)));
    let from = graph.compare(Direction::Ge, index, zero);
    let to = graph.compare(Direction::Le, index, last);
    graph.emit(Op::Binary(Binary::And), &[from, to])
}

/// The indexed dimension, if exactly one element is taken along it for each place in the other dimensions.
pub(super) fn once_a_row(dims: &GatherDims, operand: &[u64], indices: &[u64]) -> Option<usize> {
    let [dim] = dims.start_index_map[..] else { return None };
    let row = |d: usize| d == dim || operand[d] == 1 || dims.operand_batching_dims.contains(&d);
    let place = |d: &usize| indices[*d] == 1 || dims.indices_batching_dims.contains(d);
    let once =
        dims.slice_sizes[dim] == 1 && (0..operand.len()).all(row) && dims.indices_dims(indices.len()).iter().all(place);
    once.then_some(dim)
}

/// Zeros of `shape` with each update at its index in `dim`. Each place in the other dimensions has one update
/// ([`once_a_row`]).
pub(super) fn placed(
    graph: &mut Graph,
    dims: &GatherDims,
    dim: usize,
    shape: &[u64],
    indices: ValueId,
    updates: ValueId,
) -> ValueId {
    // Both have one element per place in the batching dimensions, in the order of the indices, and otherwise sizes of
    // 1.
    let mut order: Vec<usize> = (0..dims.indices_batching_dims.len()).collect();
    order.sort_by_key(|&b| dims.indices_batching_dims[b]);
    let along: Vec<usize> = order.iter().map(|&b| dims.operand_batching_dims[b]).collect();
    let sizes: Vec<u64> = along.iter().map(|&d| shape[d]).collect();
    let mut index = indices;
    if greatest(graph.ty(index).dtype) < (shape[dim] - 1) as f64 {
        index = graph.convert(index, DType::I64);
    }
    let [index, update] = [index, updates].map(|v| {
        let v = graph.reshape(v, &sizes);
        graph.broadcast(v, shape, &along)
    });
    let positions = Iota { ty: graph.ty(index).clone(), dim };
    let positions = graph.emit(Op::Iota(positions), &[]);
    let here = graph.compare(Direction::Eq, positions, index);
    let zero = graph.splat_like(update, 0.0);
    graph.select(here, update, zero)
}

/// The sum over `reduced` of a result of [`placed`], or of its negative: the updates whose index lies inside, and zero
/// for others.
pub(super) fn sum_of_placed(graph: &mut Graph, x: ValueId, reduced: &[usize]) -> Option<ValueId> {
    let node = graph.node(x);
    if node.op == Op::Unary(Unary::Negate) {
        let sum = sum_of_placed(graph, node.operands[0], reduced)?;
        return Some(graph.unary(Unary::Negate, sum));
    }
    let shape = node.ty.shape.clone();
    let (Op::Select(_), &[here, update, zero]) = (&node.op, &node.operands[..]) else { return None };
    let zero = matches!(&graph.node(zero).op, Op::Constant(l) if l.as_splat() == Some(0.0));
    let equal = graph.node(here);
    let is_equality = matches!(&equal.op, Op::Compare(op) if op.direction == Direction::Eq);
    let &[positions, index] = &equal.operands[..] else { return None };
    let Op::Iota(Iota { dim, .. }) = graph.node(positions).op else { return None };
    let only = reduced.contains(&dim) && reduced.iter().all(|&d| d == dim || shape[d] == 1);
    if !(zero && is_equality && only) {
        return None;
    }
    let kept: Vec<usize> = (0..shape.len()).filter(|d| !reduced.contains(d)).collect();
    let sizes: Vec<u64> = kept.iter().map(|&d| shape[d]).collect();
    let source = |v: ValueId| match &graph.node(v).op {
        Op::BroadcastInDim(op) => {
            let dims: Option<Vec<usize>> = op.dims.iter().map(|d| kept.iter().position(|k| k == d)).collect();
            Some((graph.node(v).operands[0], dims?))
        }
        _ => None,
    };
    let (index, update) = (source(index)?, source(update)?);
    let [index, update] = [index, update].map(|(v, dims)| graph.broadcast(v, &sizes, &dims));
    let inside = inside(graph, index, shape[dim]);
    let zero = graph.splat_like(update, 0.0);
    Some(graph.select(inside, update, zero))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::autodiff::differentiate;
    use crate::expand::expand;

    /// A loss and its gradient scatter no tensor as large as the logits, and sum only the powers.
    #[test]
    fn a_loss_scatters_nothing() {
        let mut graph = Graph::new("loss");
        let logits = TensorType::new(DType::F32, [4, 12]);
        let logits = graph.emit(Op::Parameter(Parameter::new("logits", logits)), &[]);
        let labels = TensorType::new(DType::I32, [4]);
        let labels = graph.emit(Op::Input(Input { name: "labels".into(), ty: labels }), &[]);
        let losses = graph.emit(Function::CrossEntropy { dim: 1 }.into(), &[logits, labels]);
        graph.outputs = vec![graph.reduce(losses, Reducer::Sum, &[0])];
        let all = differentiate(&expand(&graph).graph, &[]).expect("it is differentiable").graph;
        let named = |name: &str| {
            let is_large = |v: &ValueId| all.operand_types(*v).iter().any(|ty| ty.shape == [4, 12]);
            all.values().filter(is_large).filter(|v| all.node(*v).op.name() == name).count()
        };
        assert_eq!(all.nodes.iter().filter(|n| n.op.name() == "scatter_add").count(), 0);
        let backward = all.to_string();
        assert_eq!(named("reduce"), 2, "the greatest and the sum of powers: {backward}");
    }

    /// Elementwise ops are applied to the taken elements if these are few.
    #[test]
    fn lookups_come_before_what_is_computed() {
        for (rows, taken) in [(1, "multiply"), (4, "gather")] {
            let mut graph = Graph::new("lookup");
            let mut input = |name: &str, dtype, shape: &[u64]| {
                let ty = TensorType::new(dtype, shape);
                graph.emit(Op::Input(Input { name: name.into(), ty }), &[])
            };
            let (table, scale) = (input("table", DType::F16, &[12, 3]), input("scale", DType::F32, &[3]));
            let indices = input("indices", DType::I32, &[rows]);
            let wide = graph.convert(table, DType::F32);
            let scale = graph.broadcast(scale, &[12, 3], &[1]);
            let scaled = graph.mul(wide, scale);
            let dims = GatherDims::rows(&[12, 3], 1);
            let gather = Gather { dims, out_of_bounds: OutOfBounds::Clamp };
            let value = looked_up(&mut graph, &gather, scaled, indices);
            assert_eq!(graph.node(value).op.name(), taken);
            assert_eq!(graph.ty(value), &TensorType::new(DType::F32, [rows, 3]));
        }
    }
}
