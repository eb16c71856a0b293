//! Training steps with several losses, such as those of adversarial networks or of an actor and a critic.
//!
//! A step is planned by one loss. If it also differentiates another loss, the parameters of that loss have gradients
//! which the first loss does not produce. The forward values that a backward pass needs distinguish the two. A gradient
//! belongs to the other loss if it is computed from values on the way to that loss and not on the way to the first.
//! Values that are only reported (an accuracy, the norm of gradients) have no such gradients.

use crate::training_step::{TrainingStep, ancestors, updated_by};
use altiplano_ir::graph::{Graph, ValueId};
use std::collections::BTreeSet;

/// A loss in addition to the main one of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherLoss {
    /// The position of the loss among the graph's outputs.
    pub output: usize,
    /// The leaves that the loss trains.
    pub parameters: Vec<ValueId>,
}

/// The losses of a step in addition to its main one. `arguments` are the graph's leaves in the function's order.
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
        // A loss of already updated weights is computed from gradients, like a norm of gradients. Only values computed
        // from the updated weights belong to the loss.
        let late = from_gradients[other.index()];
        let is_its = |v: ValueId| {
            let i = v.index();
            let after = from_gradients[i] && !gradients.contains(&v);
            behind[i] && !needed[i] && from_leaves[i] && (!late || after) && !graph.node(v).op.is_leaf()
        };
        let differentiated = graph.depends_on(is_its);
        let is_trained =
            |p: &&crate::training_step::TrainedParameter| p.gradient.is_some_and(|g| differentiated[g.index()]);
        let mut parameters: BTreeSet<ValueId> =
            step.parameters.iter().filter(is_trained).map(|p| p.parameter).collect();
        // Weights that the step's main loss does not involve.
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
