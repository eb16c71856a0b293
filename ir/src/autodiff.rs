//! Reverse-mode differentiation of a graph, op by op.
//!
//! The backward part is appended to a copy of the forward graph. A parameter's gradient is a list of contributions, one
//! per use. Uses may lie on different stages of a pipeline (tied embeddings), and each stage accumulates its own.

use crate::graph::{Graph, ValueId};
use crate::literal::Literal;
use crate::op::{Gradient, Operator};
use crate::optimizer::leaf;
use crate::softmax_max::irrelevant_maxima;
use crate::types::TensorType;

/// A graph with its gradients.
#[derive(Clone, Debug, PartialEq)]
pub struct Differentiated {
    /// The forward graph, unchanged in the first `num_forward` nodes, followed by the backward nodes.
    pub graph: Graph,
    pub num_forward: usize,
    pub loss: ValueId,
    /// For each node, the forward node whose gradient it belongs to. Forward nodes belong to themselves. Sums of
    /// cotangents belong to the node whose cotangent they are.
    pub owner: Vec<ValueId>,
    /// For each forward value, the contributions to its cotangent, each with the user that it comes from. Empty if the
    /// loss does not depend on the value. The sum of a parameter's contributions is its gradient.
    pub contributions: Vec<Vec<(ValueId, ValueId)>>,
    /// The cotangent of each forward value that has one and is not a parameter, as the sum of its contributions.
    pub cotangents: Vec<Option<ValueId>>,
    /// True for nodes that add contributions, which a pipeline does per stage instead.
    pub is_sum: Vec<bool>,
}

/// The reason why a graph has no gradient.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum AutodiffError {
    #[error("the loss must be a float scalar, but output {output} is {ty}")]
    NotAScalar { output: ValueId, ty: TensorType },
    #[error("the loss does not depend on any parameter that is trained")]
    NoParameters,
    #[error("'{name}' names no value whose gradient could be stopped")]
    UnknownStop { name: String },
}

impl Differentiated {
    /// The cotangent of the loss, which is 1. `None` if nothing is differentiated.
    pub fn seed(&self) -> Option<ValueId> {
        self.contributions[self.loss.index()].iter().find(|(user, _)| *user == self.loss).map(|(_, seed)| *seed)
    }
}

/// The graph of a model that is run rather than trained, in which no value has a cotangent.
pub fn undifferentiated(forward: &Graph) -> Differentiated {
    let num_forward = forward.len();
    Differentiated {
        graph: forward.clone(),
        num_forward,
        loss: forward.outputs[0],
        owner: forward.values().collect(),
        contributions: vec![Vec::new(); num_forward],
        cotangents: vec![None; num_forward],
        is_sum: vec![false; num_forward],
    }
}

/// Differentiates the first output with respect to every trained parameter. No gradient flows through the values in
/// `stops`.
pub fn differentiate(forward: &Graph, stops: &[ValueId]) -> Result<Differentiated, AutodiffError> {
    differentiate_for(forward, stops, true)
}

/// [`differentiate`] for software with or without fused losses ([`crate::plan::Execution::fused_loss`]).
pub fn differentiate_for(
    forward: &Graph,
    stops: &[ValueId],
    fused_loss: bool,
) -> Result<Differentiated, AutodiffError> {
    let loss = forward.outputs[0];
    let ty = forward.ty(loss);
    if ty.rank() != 0 || !ty.dtype.is_float() {
        return Err(AutodiffError::NotAScalar { output: loss, ty: ty.clone() });
    }
    let is_parameter = |v: ValueId| forward.is_trained(v);
    let mut varies = vec![false; forward.len()];
    let irrelevant = irrelevant_maxima(forward);
    for v in forward.values() {
        let stopped = stops.contains(&v) || irrelevant[v.index()] || !forward.ty(v).dtype.is_float();
        varies[v.index()] = !stopped && (is_parameter(v) || forward.node(v).operands.iter().any(|o| varies[o.index()]));
    }
    if !varies[loss.index()] {
        return Err(AutodiffError::NoParameters);
    }
    let mut graph = forward.clone();
    let one = graph.constant(Literal::splat(TensorType::scalar(ty.dtype), 1.0));
    Ok(reverse(forward, graph, &[(loss, one)], &varies, fused_loss))
}

/// For each value of a part of a model, true if it has a derivative with respect to a leaf that can matter.
pub fn varying(part: &Graph) -> Vec<bool> {
    let irrelevant = irrelevant_maxima(part);
    let mut varies = vec![false; part.len()];
    for v in part.values() {
        let (node, stopped) = (part.node(v), irrelevant[v.index()] || !part.ty(v).dtype.is_float());
        varies[v.index()] = !stopped && (node.op.is_leaf() || node.operands.iter().any(|o| varies[o.index()]));
    }
    varies
}

/// Appends the backward pass of a part of a model: the cotangents of its leaves, for cotangents of its outputs. Those are
/// leaves, the first nodes after the part. Values that do not vary have none.
pub fn pull_back(part: &Graph, varies: &[bool], fused_loss: bool) -> Differentiated {
    let mut graph = part.clone();
    let differentiated = part.outputs.iter().filter(|output| varies[output.index()]);
    let seed = |&output: &ValueId| {
        let ty = part.ty(output);
        (output, leaf(&mut graph, format!("cotangent of {output}"), ty.with_dtype(ty.dtype.cotangent())))
    };
    let seeds: Vec<(ValueId, ValueId)> = differentiated.map(seed).collect();
    reverse(part, graph, &seeds, varies, fused_loss)
}

/// Appends the backward pass to `graph`, a copy of `forward` followed by the cotangents of its outputs. `seeds` are outputs
/// with their cotangents, and `varies` marks the values that have one.
fn reverse(
    forward: &Graph,
    mut graph: Graph,
    seeds: &[(ValueId, ValueId)],
    varies: &[bool],
    fused_loss: bool,
) -> Differentiated {
    let loss = forward.outputs[0];
    let mut owner: Vec<ValueId> = forward.values().chain(seeds.iter().map(|seed| seed.0)).collect();
    // The cotangent contributions of each forward value, with the user of each.
    let mut pending: Vec<Vec<(ValueId, ValueId)>> = vec![Vec::new(); forward.len()];
    let mut cotangents = vec![None; forward.len()];
    let mut is_sum = Vec::new();
    seeds.iter().for_each(|&(output, seed)| pending[output.index()].push((output, seed)));

    for v in forward.values().rev() {
        if !varies[v.index()] || forward.is_trained(v) || pending[v.index()].is_empty() {
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
        let mut cx =
            Gradient { graph: &mut graph, operands: &node.operands, result: v, cotangent, wanted: &wanted, fused_loss };
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
    Differentiated { graph, num_forward: forward.len(), loss, owner, contributions: pending, cotangents, is_sum }
}
