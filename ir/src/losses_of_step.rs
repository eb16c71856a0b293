//! Training steps with several losses, as those of adversarial networks or of an actor and a critic.
//!
//! A step is planned by one loss. Where the step differentiates another one as well, that loss's parameters have gradients which no
//! derivative of the first loss gives. What a backward pass needs of its forward pass tells them apart: a gradient that is made of
//! values on the way to another loss, and not on the way to the first, is that loss's. Numbers that are only reported (an
//! accuracy, the norm of gradients) have no such gradients.

use crate::graph::{Graph, ValueId};
use crate::step::{TrainingStep, ancestors, updated_by};
use std::collections::BTreeSet;

/// A loss beside the one of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherLoss {
    /// Its position among the graph's outputs.
    pub output: usize,
    /// The leaves that it trains.
    pub parameters: Vec<ValueId>,
}

/// The losses of a step beside its own. `arguments` are the graph's leaves in the function's order.
pub fn other_losses(graph: &Graph, arguments: &[ValueId], step: &TrainingStep) -> Vec<OtherLoss> {
    let needed = ancestors(graph, &[step.loss], |_| true);
    let of_loss = graph.depends_on(|v| v == step.loss);
    let gradients: BTreeSet<ValueId> = step.parameters.iter().filter_map(|p| p.gradient).collect();
    let from_gradients = graph.depends_on(|v| gradients.contains(&v));
    let from_leaves = graph.depends_on(|v| graph.node(v).op.is_leaf());
    let updates = updated_by(graph, arguments, step.loss);
    let own: BTreeSet<ValueId> = step.parameters.iter().map(|p| p.parameter).collect();
    let mut found = Vec::new();
    for (output, &other) in graph.outputs.iter().enumerate() {
        let ty = graph.ty(other);
        let is_number = ty.rank() == 0 && ty.dtype.is_float() && !graph.node(other).op.is_leaf();
        if !is_number || needed[other.index()] || of_loss[other.index()] {
            continue;
        }
        let behind = ancestors(graph, &[other], |_| true);
        let smooth = ancestors(graph, &[other], |v| graph.ty(v).dtype.is_float());
        // A loss of weights that the step has updated already is made of gradients, as a norm of gradients is; only what follows
        // from the updated weights is the loss's.
        let late = from_gradients[other.index()];
        let is_its = |v: ValueId| {
            let i = v.index();
            let after = from_gradients[i] && !gradients.contains(&v);
            behind[i] && !needed[i] && from_leaves[i] && (!late || after) && !graph.node(v).op.is_leaf()
        };
        let differentiated = graph.depends_on(is_its);
        let is_trained = |p: &&crate::step::TrainedParameter| p.gradient.is_some_and(|g| differentiated[g.index()]);
        let mut parameters: BTreeSet<ValueId> =
            step.parameters.iter().filter(is_trained).map(|p| p.parameter).collect();
        // Weights that the step's own loss knows nothing of.
        let is_weight = |(leaf, updated): &(&ValueId, &ValueId)| {
            smooth[leaf.index()] && differentiated[updated.index()] && !own.contains(leaf)
        };
        parameters.extend(updates.iter().filter(is_weight).map(|(leaf, _)| *leaf));
        if !parameters.is_empty() {
            found.push(OtherLoss { output, parameters: parameters.into_iter().collect() });
        }
    }
    found
}

#[cfg(test)]
#[path = "losses_of_step_tests.rs"]
mod tests;
