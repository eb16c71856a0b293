//! Values that follow from the program alone: what indices and masks are, and tensors all of whose elements are equal.

use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::literal::Literal;
use altiplano_ir::op::{Op, Operator};
use altiplano_ir::tensor::Tensor;
use std::collections::{BTreeMap, BTreeSet};

/// Larger tensors than this are not computed at import.
const MAX_ELEMENTS: u64 = 1 << 16;

/// The most ops behind a value that is asked for.
const MAX_OPS: usize = 256;

/// All elements of a value that depends on no leaf; none where it does, or where that is much work.
pub fn constant(graph: &Graph, value: ValueId) -> Option<Vec<f64>> {
    let mut needed = BTreeSet::new();
    let mut pending = vec![value];
    while let Some(at) = pending.pop() {
        if needed.insert(at) {
            if needed.len() > MAX_OPS || !is_cheap(graph, at) {
                return None;
            }
            pending.extend(&graph.node(at).operands);
        }
    }
    let mut known: BTreeMap<ValueId, Tensor> = BTreeMap::new();
    // Operands come before what uses them.
    for at in needed {
        let node = graph.node(at);
        let operands: Vec<&Tensor> = node.operands.iter().filter_map(|o| known.get(o)).collect();
        let tensor = node.op.eval(&operands, &node.ty);
        known.insert(at, tensor);
    }
    known.remove(&value).map(|tensor| rounded(graph, value, tensor).data)
}

/// Small, no leaf, and no sum over many.
fn is_cheap(graph: &Graph, value: ValueId) -> bool {
    let node = graph.node(value);
    let small = |v: ValueId| graph.ty(v).elements() <= MAX_ELEMENTS;
    small(value) && node.operands.iter().all(|&o| small(o)) && !node.op.is_leaf() && !node.op.is_contraction()
}

fn rounded(graph: &Graph, value: ValueId, mut tensor: Tensor) -> Tensor {
    let dtype = graph.ty(value).dtype;
    tensor.data.iter_mut().for_each(|x| *x = dtype.round(*x));
    tensor
}

/// The graph with constants in place of what depends on no leaf and has one value for all elements, and of lookups and
/// comparisons of such. Masks that frameworks compute from positions often come to nothing.
pub fn uniform(graph: &mut Graph) {
    // Each value is computed once, and kept while it is small; the total is bounded as well.
    const MAX_TOTAL: u64 = 1 << 24;
    let mut total = 0;
    let mut known: BTreeMap<ValueId, Tensor> = BTreeMap::new();
    for v in graph.values() {
        let node = graph.node(v);
        if let Some(value) = of_one_value(graph, v) {
            *node_mut(graph, v) = Op::Constant(Literal::splat(graph.ty(v).clone(), value));
            graph.nodes[v.index()].operands.clear();
            continue;
        }
        if !is_cheap(graph, v) || total > MAX_TOTAL {
            continue;
        }
        let made: Option<Vec<Tensor>> = node.operands.iter().map(|o| value_of(graph, &known, *o)).collect();
        let Some(operands) = made else { continue };
        total += node.ty.elements() + operands.iter().map(|t| t.ty.elements()).sum::<u64>();
        let tensor = node.op.eval(&operands.iter().collect::<Vec<_>>(), &node.ty);
        let tensor = rounded(graph, v, tensor);
        let first = tensor.data.first().copied();
        match first.filter(|first| tensor.data.iter().all(|x| x.to_bits() == first.to_bits())) {
            Some(value) => {
                *node_mut(graph, v) = Op::Constant(Literal::splat(graph.ty(v).clone(), value));
                graph.nodes[v.index()].operands.clear();
            }
            None => {
                known.insert(v, tensor);
            }
        }
    }
}

fn node_mut(graph: &mut Graph, v: ValueId) -> &mut Op {
    &mut graph.nodes[v.index()].op
}

fn splat(graph: &Graph, v: ValueId) -> Option<f64> {
    match &graph.node(v).op {
        Op::Constant(literal) => literal.as_splat(),
        _ => None,
    }
}

/// The value of all elements of an op that moves elements, or combines equal ones, whatever its size.
fn of_one_value(graph: &Graph, v: ValueId) -> Option<f64> {
    let node = graph.node(v);
    let moves = matches!(
        node.op,
        Op::Reshape(_) | Op::Transpose(_) | Op::BroadcastInDim(_) | Op::Slice(_) | Op::Reverse(_) | Op::Convert(_)
    );
    if !moves && !node.op.is_elementwise() || node.operands.is_empty() {
        return match (&node.op, node.operands.as_slice()) {
            // Indices are brought inside the operand, so that each finds an element.
            (Op::Gather(gather), [x, _]) if gather.out_of_bounds == altiplano_ir::op::OutOfBounds::Clamp => {
                splat(graph, *x)
            }
            _ => None,
        };
    }
    let values: Option<Vec<f64>> = node.operands.iter().map(|&o| splat(graph, o)).collect();
    let one = |x: f64, o: ValueId| Tensor::splat(altiplano_ir::types::TensorType::scalar(graph.ty(o).dtype), x);
    let operands: Vec<Tensor> = values?.into_iter().zip(&node.operands).map(|(x, &o)| one(x, o)).collect();
    let ty = altiplano_ir::types::TensorType::scalar(node.ty.dtype);
    let value = match &node.op {
        op if op.is_elementwise() => op.eval(&operands.iter().collect::<Vec<_>>(), &ty).data.first().copied()?,
        _ => operands[0].data[0],
    };
    Some(node.ty.dtype.round(value))
}

fn value_of(graph: &Graph, known: &BTreeMap<ValueId, Tensor>, v: ValueId) -> Option<Tensor> {
    match &graph.node(v).op {
        Op::Constant(literal) => Some(literal.to_tensor()),
        _ => known.get(&v).cloned(),
    }
}
