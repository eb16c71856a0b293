//! Evaluates values that follow from the program alone: indices, masks, and tensors whose elements are all
//! equal.

use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::interpret::Allowance;
use altiplano_ir::literal::Literal;
use altiplano_ir::op::{Op, Operator};
use altiplano_ir::tensor::Tensor;
use std::collections::{BTreeMap, BTreeSet};

/// The maximum number of elements of tensors that are evaluated at import.
const MAX_ELEMENTS: u64 = 1 << 16;

/// The maximum number of ops behind an evaluated value.
const MAX_OPS: usize = 256;

/// The limits of work for one op and for all ops behind an evaluated value.
const MAX_WORK: (u64, u64) = (1 << 22, 1 << 26);

/// All elements of a value that depends on no leaf; `None` if it does, or if evaluating it is expensive.
pub(crate) fn constant(graph: &Graph, value: ValueId) -> Option<Vec<f64>> {
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
    let mut allowance = Allowance::new(MAX_WORK.0, MAX_WORK.1);
    if !needed.iter().all(|&at| allowance.take(graph.work(at))) {
        return None;
    }
    let mut known: BTreeMap<ValueId, Tensor> = BTreeMap::new();
    // Operands come before their users.
    for at in needed {
        let node = graph.node(at);
        let operands: Vec<&Tensor> = node.operands.iter().filter_map(|o| known.get(o)).collect();
        let tensor = node.op.eval(&operands, &node.ty);
        known.insert(at, tensor);
    }
    known.remove(&value).map(|tensor| rounded(graph, value, tensor).data)
}

/// True for a small value that is neither a leaf nor a sum over many elements.
fn is_cheap(graph: &Graph, value: ValueId) -> bool {
    let node = graph.node(value);
    let small = |v: ValueId| graph.ty(v).elements() <= MAX_ELEMENTS;
    let is_small = small(value) && node.operands.iter().all(|&o| small(o));
    is_small && !node.op.is_leaf() && !node.op.is_contraction()
}

fn rounded(graph: &Graph, value: ValueId, mut tensor: Tensor) -> Tensor {
    let dtype = graph.ty(value).dtype;
    tensor.data.iter_mut().for_each(|x| *x = dtype.round(*x));
    tensor
}

/// Replaces values that depend on no leaf and have one value for all elements with constants, as well as
/// lookups and comparisons of such values. Masks that frameworks compute from positions are often trivial.
pub(crate) fn uniform(graph: &mut Graph) {
    // Each value is computed once, and kept if it is small; the total is limited as well.
    let mut allowance = Allowance::new(MAX_WORK.0, 1 << 25);
    let mut known: BTreeMap<ValueId, Tensor> = BTreeMap::new();
    for v in graph.values() {
        let node = graph.node(v);
        if let Some(value) = of_one_value(graph, v) {
            *node_mut(graph, v) = Op::Constant(Literal::splat(graph.ty(v).clone(), value));
            graph.nodes[v.index()].operands.clear();
            continue;
        }
        if !is_cheap(graph, v) {
            continue;
        }
        let made: Option<Vec<Tensor>> = node.operands.iter().map(|o| value_of(graph, &known, *o)).collect();
        let Some(operands) = made.filter(|_| allowance.take(graph.work(v))) else { continue };
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

/// The common value of the elements of an op of any size that moves elements or combines equal ones.
fn of_one_value(graph: &Graph, v: ValueId) -> Option<f64> {
    let node = graph.node(v);
    let moves = matches!(
        node.op,
        Op::Reshape(_) | Op::Transpose(_) | Op::BroadcastInDim(_) | Op::Slice(_) | Op::Reverse(_) | Op::Convert(_)
    );
    if !moves && !node.op.is_elementwise() || node.operands.is_empty() {
        return match (&node.op, node.operands.as_slice()) {
            // Indices are clamped, so that each finds an element.
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
