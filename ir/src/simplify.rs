//! Small exact clean-ups that every graph goes through: constants are folded into their broadcasts, chains of
//! broadcasts, reshapes and transposes become one, neutral elements vanish, equal nodes are shared, dead ones go.
//!
//! The result computes the same values bit for bit (constants are folded in their own type's precision).

use crate::dtype::DType;
use crate::graph::{Graph, Node, ValueId};
use crate::literal::Literal;
use crate::op::{Binary, BroadcastInDim, Op, Reshape, Transpose};
use crate::types::TensorType;
use std::collections::BTreeMap;

/// The simplified graph. Leaves keep their order; all of them stay, used or not.
pub fn simplify(graph: &Graph) -> Graph {
    let mut to = Graph { name: graph.name.clone(), batch: graph.batch, ..Default::default() };
    let mut map: Vec<ValueId> = Vec::with_capacity(graph.len());
    let mut seen: BTreeMap<(String, Vec<ValueId>, u32), ValueId> = BTreeMap::new();
    for v in graph.values() {
        let node = graph.node(v);
        let operands = node.operands.iter().map(|o| map[o.index()]).collect();
        let mut node = Node { operands, ..node.clone() };
        let value = loop {
            match rewrite(&to, &node) {
                Rewrite::Keep => {
                    let key = (format!("{:?} {}", node.op, node.ty), node.operands.clone(), node.batch_dims);
                    break match seen.get(&key) {
                        Some(&same) if !node.op.is_leaf() => same,
                        _ => {
                            let value = to.append(node);
                            seen.insert(key, value);
                            value
                        }
                    };
                }
                Rewrite::Value(value) => break value,
                Rewrite::Node(op, operands) => {
                    node.op = op;
                    node.operands = operands;
                }
            }
        };
        map.push(value);
    }
    to.outputs = graph.outputs.iter().map(|o| map[o.index()]).collect();
    without_dead_nodes(&to)
}

/// The graph without nodes that no output needs. Leaves stay.
pub fn without_dead_nodes(graph: &Graph) -> Graph {
    let mut live = vec![false; graph.len()];
    graph.outputs.iter().for_each(|o| live[o.index()] = true);
    for v in graph.values().rev() {
        if live[v.index()] {
            graph.node(v).operands.iter().for_each(|o| live[o.index()] = true);
        } else if graph.node(v).op.is_leaf() {
            live[v.index()] = true;
        }
    }
    let mut to = Graph { name: graph.name.clone(), batch: graph.batch, ..Default::default() };
    let mut map = vec![ValueId(u32::MAX); graph.len()];
    for v in graph.values().filter(|v| live[v.index()]) {
        let node = graph.node(v);
        let operands = node.operands.iter().map(|o| map[o.index()]).collect();
        map[v.index()] = to.append(Node { operands, ..node.clone() });
    }
    to.outputs = graph.outputs.iter().map(|o| map[o.index()]).collect();
    to
}

enum Rewrite {
    Keep,
    /// The node equals an existing value.
    Value(ValueId),
    /// The node equals another op on existing values.
    Node(Op, Vec<ValueId>),
}

fn rewrite(graph: &Graph, node: &Node) -> Rewrite {
    let operand = |i: usize| node.operands[i];
    let splat = |i: usize| literal(graph, operand(i)).and_then(|l| l.as_splat().filter(|_| l.batch_power == 0));
    match &node.op {
        Op::BroadcastInDim(_) | Op::Reshape(_) | Op::Transpose(_) | Op::Convert(_)
            if *graph.ty(operand(0)) == node.ty && keeps_order(&node.op) =>
        {
            Rewrite::Value(operand(0))
        }
        Op::BroadcastInDim(_) | Op::Reshape(_) | Op::Transpose(_) | Op::Convert(_)
            if literal(graph, operand(0)).is_some_and(|l| l.as_splat().is_some()) =>
        {
            match literal(graph, operand(0)) {
                Some(l) => {
                    let value = rounded(l.as_splat().unwrap_or(0.0), l.ty.dtype, node.ty.dtype);
                    let folded = Literal { batch_power: l.batch_power, ..Literal::splat(node.ty.clone(), value) };
                    Rewrite::Node(Op::Constant(folded), Vec::new())
                }
                None => Rewrite::Keep,
            }
        }
        Op::BroadcastInDim(outer) => match graph.node(operand(0)) {
            Node { op: Op::BroadcastInDim(inner), operands, .. } => {
                let dims = inner.dims.iter().map(|&d| outer.dims[d]).collect();
                Rewrite::Node(Op::BroadcastInDim(BroadcastInDim { shape: outer.shape.clone(), dims }), operands.clone())
            }
            _ => Rewrite::Keep,
        },
        Op::Reshape(outer) => match graph.node(operand(0)) {
            Node { op: Op::Reshape(_), operands, .. } => {
                Rewrite::Node(Op::Reshape(Reshape { shape: outer.shape.clone() }), operands.clone())
            }
            _ => Rewrite::Keep,
        },
        Op::Transpose(outer) => match graph.node(operand(0)) {
            Node { op: Op::Transpose(inner), operands, .. } => {
                let permutation = outer.permutation.iter().map(|&d| inner.permutation[d]).collect();
                Rewrite::Node(Op::Transpose(Transpose { permutation }), operands.clone())
            }
            _ => Rewrite::Keep,
        },
        Op::Unary(op) => match splat(0) {
            Some(x) => constant(&node.ty, op.apply(x, graph.ty(operand(0)).dtype)),
            None => Rewrite::Keep,
        },
        Op::Binary(op) => {
            let (a, b) = (splat(0), splat(1));
            if let (Some(a), Some(b)) = (a, b) {
                return constant(&node.ty, op.apply(a, b, node.ty.dtype));
            }
            let float = node.ty.dtype.is_float();
            match op {
                Binary::Add if a == Some(0.0) => Rewrite::Value(operand(1)),
                Binary::Add | Binary::Subtract if b == Some(0.0) => Rewrite::Value(operand(0)),
                Binary::Multiply if a == Some(1.0) => Rewrite::Value(operand(1)),
                Binary::Multiply | Binary::Divide if b == Some(1.0) => Rewrite::Value(operand(0)),
                Binary::Maximum if float && a == Some(f64::NEG_INFINITY) => Rewrite::Value(operand(1)),
                Binary::Maximum if float && b == Some(f64::NEG_INFINITY) => Rewrite::Value(operand(0)),
                Binary::Minimum if float && a == Some(f64::INFINITY) => Rewrite::Value(operand(1)),
                Binary::Minimum if float && b == Some(f64::INFINITY) => Rewrite::Value(operand(0)),
                Binary::And if node.ty.dtype == DType::Bool && a == Some(1.0) => Rewrite::Value(operand(1)),
                Binary::And if node.ty.dtype == DType::Bool && b == Some(1.0) => Rewrite::Value(operand(0)),
                Binary::Or if a == Some(0.0) => Rewrite::Value(operand(1)),
                Binary::Or if b == Some(0.0) => Rewrite::Value(operand(0)),
                _ => Rewrite::Keep,
            }
        }
        Op::Compare(op) => match (splat(0), splat(1)) {
            (Some(a), Some(b)) => constant(&node.ty, op.direction.holds(a, b) as u8 as f64),
            _ => Rewrite::Keep,
        },
        Op::Select(_) => match splat(0) {
            Some(predicate) => Rewrite::Value(operand(if predicate != 0.0 { 1 } else { 2 })),
            None if operand(1) == operand(2) => Rewrite::Value(operand(1)),
            None => Rewrite::Keep,
        },
        _ => Rewrite::Keep,
    }
}

fn literal(graph: &Graph, v: ValueId) -> Option<&Literal> {
    match &graph.node(v).op {
        Op::Constant(l) => Some(l),
        _ => None,
    }
}

fn constant(ty: &TensorType, value: f64) -> Rewrite {
    let value = rounded(value, DType::F64, ty.dtype);
    Rewrite::Node(Op::Constant(Literal::splat(ty.clone(), value)), Vec::new())
}

/// An op that gives its operand's type back is the identity, unless it moves elements.
fn keeps_order(op: &Op) -> bool {
    match op {
        Op::Transpose(t) => t.permutation.is_sorted(),
        Op::BroadcastInDim(b) => b.dims.is_sorted(),
        _ => true,
    }
}

/// `value` as the nearest value of type `to`.
pub fn rounded(value: f64, from: DType, to: DType) -> f64 {
    to.round(if from.is_float() && to.is_integer() { value.trunc() } else { value })
}
