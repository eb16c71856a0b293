//! Reverse-mode differentiation of a graph, op by op.
//!
//! The backward part is appended to a copy of the forward graph. A parameter's gradient is kept as a list of
//! contributions, one per use: uses may fall on different stages of a pipeline (tied embeddings), and each stage
//! accumulates its own.

use crate::graph::{Graph, ValueId};
use crate::literal::Literal;
use crate::op::{Binary, Gradient, Op, Operator, Reducer, Unary};
use crate::types::TensorType;

/// A graph with its gradients.
#[derive(Clone, Debug, PartialEq)]
pub struct Differentiated {
    /// The forward graph, unchanged in the first `num_forward` nodes, then the backward nodes.
    pub graph: Graph,
    pub num_forward: usize,
    pub loss: ValueId,
    /// For each node the forward node whose gradient it belongs to (a forward node: itself). Sums of cotangents
    /// belong to the node whose value they are the cotangent of.
    pub owner: Vec<ValueId>,
    /// For each forward value the contributions to its cotangent: the user that each comes from and the value.
    /// Empty where the loss does not depend on it. The sum of a parameter's is its gradient.
    pub contributions: Vec<Vec<(ValueId, ValueId)>>,
    /// The cotangent of each forward value that has one and is not a parameter: the sum of its contributions.
    pub cotangents: Vec<Option<ValueId>>,
    /// Whether a node is an addition of contributions (which a pipeline does per stage instead).
    pub is_sum: Vec<bool>,
}

/// Why a graph has no gradient.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum AutodiffError {
    #[error("the loss must be a float scalar, but output {output} is {ty}")]
    NotAScalar { output: ValueId, ty: TensorType },
    #[error("the loss does not depend on any parameter")]
    NoParameters,
    #[error("'{name}' names no value whose gradient could be stopped")]
    UnknownStop { name: String },
}

/// Differentiates the first output with respect to every parameter. `stops` are values through which no gradient
/// flows.
pub fn differentiate(forward: &Graph, stops: &[ValueId]) -> Result<Differentiated, AutodiffError> {
    let loss = forward.outputs[0];
    let ty = forward.ty(loss);
    if ty.rank() != 0 || !ty.dtype.is_float() {
        return Err(AutodiffError::NotAScalar { output: loss, ty: ty.clone() });
    }
    let is_parameter = |v: ValueId| matches!(forward.node(v).op, Op::Parameter(_));
    let mut varies = vec![false; forward.len()];
    let softmax_maxima = softmax_maxima(forward);
    for v in forward.values() {
        let stopped = stops.contains(&v) || softmax_maxima[v.index()] || !forward.ty(v).dtype.is_float();
        varies[v.index()] = !stopped && (is_parameter(v) || forward.node(v).operands.iter().any(|o| varies[o.index()]));
    }
    if !varies[loss.index()] {
        return Err(AutodiffError::NoParameters);
    }

    let mut graph = forward.clone();
    let mut owner: Vec<ValueId> = forward.values().collect();
    // Cotangent contributions of each forward value, with the user each comes from.
    let mut pending: Vec<Vec<(ValueId, ValueId)>> = vec![Vec::new(); forward.len()];
    let mut cotangents = vec![None; forward.len()];
    let mut is_sum = Vec::new();
    let one = graph.constant(Literal::splat(TensorType::scalar(ty.dtype), 1.0));
    owner.push(loss);
    pending[loss.index()].push((loss, one));

    for v in forward.values().rev() {
        if !varies[v.index()] || is_parameter(v) || pending[v.index()].is_empty() {
            continue;
        }
        let mut cotangent = pending[v.index()][0].1;
        for &(_, more) in &pending[v.index()][1..] {
            cotangent = graph.add(cotangent, more);
        }
        is_sum.resize(owner.len(), false);
        is_sum.resize(graph.len(), true);
        owner.resize(graph.len(), v);
        cotangents[v.index()] = Some(cotangent);
        let node = forward.node(v);
        let wanted: Vec<bool> = node.operands.iter().map(|o| varies[o.index()]).collect();
        if !wanted.contains(&true) {
            continue;
        }
        let mut cx = Gradient { graph: &mut graph, operands: &node.operands, result: v, cotangent, wanted: &wanted };
        let contributions = node.op.gradient(&mut cx);
        owner.resize(graph.len(), v);
        for (i, contribution) in contributions.into_iter().enumerate() {
            if let Some(value) = contribution.filter(|_| wanted[i]) {
                debug_assert_eq!(graph.shape(value), graph.shape(node.operands[i]), "cotangent of {:?}", node.op);
                pending[node.operands[i].index()].push((v, value));
            }
        }
    }
    is_sum.resize(graph.len(), false);
    Ok(Differentiated { graph, num_forward: forward.len(), loss, owner, contributions: pending, cotangents, is_sum })
}

/// Values that softmax and log-softmax subtract for numerical range only: `m` in `s = x - m` where `m` is the
/// maximum of `x` along the dimensions that are then normalised. Softmax and log-softmax do not change when a
/// constant is added to `x`, so the gradient through `m` is exactly zero, and need not be computed.
///
/// Found where every use of `s` is `exp(s)`, or `s - log(sum(exp(s)))`, and every use of that `exp(s)` is its sum
/// or its quotient by that sum.
fn softmax_maxima(graph: &Graph) -> Vec<bool> {
    let users = graph.users();
    let mut found = vec![false; graph.len()];
    // Looks through what only changes the shape of a value or bounds it by minus infinity.
    let source = |mut v: ValueId| loop {
        let node = graph.node(v);
        v = match &node.op {
            Op::BroadcastInDim(_) | Op::Reshape(_) | Op::Convert(_) => node.operands[0],
            Op::Binary(Binary::Maximum) => {
                let splat = |o: ValueId| match &graph.node(o).op {
                    Op::Constant(c) => c.as_splat(),
                    Op::BroadcastInDim(_) => match &graph.node(graph.node(o).operands[0]).op {
                        Op::Constant(c) => c.as_splat(),
                        _ => None,
                    },
                    _ => None,
                };
                match (splat(node.operands[0]), splat(node.operands[1])) {
                    (Some(f64::NEG_INFINITY), _) => node.operands[1],
                    (_, Some(f64::NEG_INFINITY)) => node.operands[0],
                    _ => return v,
                }
            }
            _ => return v,
        };
    };
    let sum_of = |v: ValueId, of: ValueId, dims: &[usize]| match &graph.node(source(v)).op {
        Op::Reduce(r) => r.reducer == Reducer::Sum && r.dims == dims && graph.node(source(v)).operands[0] == of,
        _ => false,
    };
    for v in graph.values() {
        let node = graph.node(v);
        let Op::Binary(Binary::Subtract) = node.op else { continue };
        let (x, m) = (node.operands[0], node.operands[1]);
        let maximum = source(m);
        let Op::Reduce(reduce) = &graph.node(maximum).op else { continue };
        if reduce.reducer != Reducer::Max || graph.node(maximum).operands[0] != x {
            continue;
        }
        let exponentials: Vec<ValueId> = users[v.index()]
            .iter()
            .copied()
            .filter(|&u| matches!(graph.node(u).op, Op::Unary(Unary::Exponential)))
            .collect();
        let log_sum = |u: ValueId| {
            let node = graph.node(u);
            if !matches!(node.op, Op::Binary(Binary::Subtract)) || node.operands[0] != v {
                return false;
            }
            let log = graph.node(source(node.operands[1]));
            matches!(log.op, Op::Unary(Unary::Log))
                && exponentials.iter().any(|&e| sum_of(log.operands[0], e, &reduce.dims))
        };
        let normalised = |e: ValueId| {
            users[e.index()].iter().all(|&u| {
                let node = graph.node(u);
                sum_of(u, e, &reduce.dims)
                    || matches!(node.op, Op::Binary(Binary::Divide))
                        && node.operands[0] == e
                        && sum_of(node.operands[1], e, &reduce.dims)
            })
        };
        // The sum itself must feed nothing but the quotient or the logarithm.
        let sums_used_well = exponentials.iter().all(|&e| {
            users[e.index()].iter().filter(|&&u| sum_of(u, e, &reduce.dims)).all(|&sum| {
                uses_through_shape(graph, &users, sum).iter().all(|&(from, u)| {
                    let node = graph.node(u);
                    match &node.op {
                        Op::Binary(Binary::Divide) => node.operands[0] == e && node.operands[1] == from,
                        Op::Unary(Unary::Log) => uses_through_shape(graph, &users, u).iter().all(|&(_, w)| log_sum(w)),
                        _ => false,
                    }
                })
            })
        });
        let all_known = users[v.index()].iter().all(|&u| exponentials.contains(&u) || log_sum(u));
        // The maximum serves this subtraction alone.
        let private = uses_through_shape(graph, &users, maximum).iter().all(|&(_, u)| u == v);
        if !exponentials.is_empty()
            && all_known
            && private
            && sums_used_well
            && exponentials.iter().all(|&e| normalised(e))
        {
            found[maximum.index()] = true;
        }
    }
    found
}

/// The users of a value, looking through broadcasts, reshapes, converts and `max(-inf, .)`; each with the operand
/// through which it uses it.
fn uses_through_shape(graph: &Graph, users: &[Vec<ValueId>], value: ValueId) -> Vec<(ValueId, ValueId)> {
    let mut found = Vec::new();
    let mut stack = vec![value];
    while let Some(v) = stack.pop() {
        for &u in &users[v.index()] {
            match &graph.node(u).op {
                Op::BroadcastInDim(_) | Op::Reshape(_) | Op::Convert(_) => stack.push(u),
                Op::Binary(Binary::Maximum) if is_bounded_below_by_minus_infinity(graph, u) => stack.push(u),
                _ => found.push((v, u)),
            }
        }
    }
    found
}

fn is_bounded_below_by_minus_infinity(graph: &Graph, v: ValueId) -> bool {
    graph.node(v).operands.iter().any(|&o| {
        let node = graph.node(o);
        let node = if matches!(node.op, Op::BroadcastInDim(_)) { graph.node(node.operands[0]) } else { node };
        matches!(&node.op, Op::Constant(c) if c.as_splat() == Some(f64::NEG_INFINITY))
    })
}
