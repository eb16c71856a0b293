//! Evaluation of updates on numbers. Every tensor of an update stands for two of its elements, the lanes. A value that
//! is the same for all elements is one number.
//!
//! Elementwise ops work lane by lane, and a reduction of a whole tensor adds up the lanes. This distinguishes norms of
//! tensors from functions of single elements, and tries out an update of billions of elements on two of them.

use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{Op, Operator, Reducer};
use altiplano_ir::tensor::Tensor;
use altiplano_ir::types::TensorType;
use std::collections::BTreeMap;

/// The values of the two lanes. They are equal for a value that is one number.
pub(crate) type Lanes = [f64; 2];

/// A computed value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Value {
    /// The number of all elements, or of a scalar.
    One(f64),
    Two(Lanes),
}

impl Value {
    pub(crate) fn lanes(self) -> Lanes {
        match self {
            Value::One(x) => [x, x],
            Value::Two(lanes) => lanes,
        }
    }
}

/// The lanes of a value of a graph.
pub(crate) fn value_of(graph: &Graph, v: ValueId, lanes: Lanes) -> Value {
    if graph.ty(v).rank() == 0 { Value::One(lanes[0]) } else { Value::Two(lanes) }
}

/// The values of `wanted`, computed from `given`. `None` if one of them depends on anything else, or on ops that lanes
/// do not support.
pub(crate) fn evaluate(graph: &Graph, wanted: &[ValueId], given: &BTreeMap<ValueId, Value>) -> Option<Vec<Lanes>> {
    let mut known = given.clone();
    let mut stack: Vec<ValueId> = wanted.to_vec();
    while let Some(&at) = stack.last() {
        if known.contains_key(&at) {
            stack.pop();
            continue;
        }
        let node = graph.node(at);
        if let Some(&missing) = node.operands.iter().find(|o| !known.contains_key(o)) {
            stack.push(missing);
            continue;
        }
        let value = node_value(graph, at, &known)?;
        known.insert(at, value);
    }
    wanted.iter().map(|v| known.get(v).map(|value| value.lanes())).collect()
}

fn node_value(graph: &Graph, v: ValueId, known: &BTreeMap<ValueId, Value>) -> Option<Value> {
    let node = graph.node(v);
    let operands: Vec<Value> = node.operands.iter().map(|o| known[o]).collect();
    let elements = |v: ValueId| graph.ty(v).elements();
    match &node.op {
        // Round like the framework and the optimizer, because one minus a number near one is sensitive to the last
        // bits.
        Op::Constant(literal) => {
            let rounded = |x: f64| if node.ty.dtype == DType::F32 { f64::from(x as f32) } else { x };
            literal.as_splat().map(|x| Value::One(rounded(x)))
        }
        Op::BroadcastInDim(_) | Op::Reshape(_) | Op::Transpose(_) => match operands[0] {
            // A single element may be repeated, but not each of several.
            Value::Two(_) if elements(node.operands[0]) != elements(v) => None,
            value => Some(value),
        },
        // Narrower formats are meant to hold the same number.
        Op::Convert(_) if graph.ty(node.operands[0]).dtype.is_float() && node.ty.dtype.is_float() => Some(operands[0]),
        Op::ReducePrecision(_) => Some(operands[0]),
        Op::Reduce(op) => match (operands[0], op.reducer, elements(v)) {
            (value, ..) if elements(node.operands[0]) == elements(v) => Some(value),
            (Value::Two([a, b]), Reducer::Sum, 1) => Some(Value::One(a + b)),
            (Value::Two([a, b]), Reducer::Product | Reducer::And, 1) => Some(Value::One(a * b)),
            (Value::Two([a, b]), Reducer::Max | Reducer::Or, 1) => Some(Value::One(a.max(b))),
            (Value::Two([a, b]), Reducer::Min, 1) => Some(Value::One(a.min(b))),
            (Value::One(x), Reducer::Max | Reducer::Min, _) => Some(Value::One(x)),
            _ => None,
        },
        Op::DotGeneral(_) if elements(v) == 1 && elements(node.operands[0]) == elements(node.operands[1]) => {
            match (operands[0], operands[1]) {
                (Value::Two(a), Value::Two(b)) => Some(Value::One(a[0] * b[0] + a[1] * b[1])),
                (Value::One(a), Value::One(b)) if elements(node.operands[0]) == 1 => Some(Value::One(a * b)),
                _ => None,
            }
        }
        op if op.is_elementwise() => {
            let lane = |lane: usize| -> f64 {
                let tensors: Vec<Tensor> = (node.operands.iter().zip(&operands))
                    .map(|(o, value)| Tensor::scalar(graph.ty(*o).dtype, value.lanes()[lane]))
                    .collect();
                op.eval(&tensors.iter().collect::<Vec<_>>(), &TensorType::scalar(node.ty.dtype)).data[0]
            };
            match operands.iter().any(|value| matches!(value, Value::Two(_))) {
                true => Some(Value::Two([lane(0), lane(1)])),
                false => Some(Value::One(lane(0))),
            }
        }
        _ => None,
    }
}
