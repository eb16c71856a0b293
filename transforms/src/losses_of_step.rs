//! Training steps with several losses, such as those of adversarial networks or of an actor and a critic.
//!
//! A step is planned by one loss. If it also differentiates another loss, the parameters of that loss have gradients
//! which the first loss does not produce. The forward values that a backward pass needs distinguish the two. A gradient
//! belongs to the other loss if it is computed from values on the way to that loss and not on the way to the first.
//! Values that are only reported (an accuracy, the norm of gradients) have no such gradients.
//!
//! Losses that train parameters of their own are planned as one, their sum. No gradient flows in a loss through
//! parameters of another, so the gradients of the sum are those of each loss.

use crate::training_step::{TrainingStep, ancestors, recognise_by, updated_by};
use altiplano_ir::array;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::Binary;
use std::collections::{BTreeMap, BTreeSet};

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

/// The step by the sum of its main loss and `others`, and its graph. Each loss trains parameters of its own, and the
/// others are constants to it. `arguments` are the graph's leaves in the function's order.
///
/// `None` if a loss is computed from gradients, such as that of an adversary which is already updated, or if losses
/// share parameters.
pub fn joined(
    graph: &Graph,
    arguments: &[ValueId],
    step: &TrainingStep,
    others: &[OtherLoss],
) -> Option<(Graph, TrainingStep)> {
    let gradients: BTreeSet<ValueId> = step.parameters.iter().filter_map(|p| p.gradient).collect();
    let late = graph.depends_on(|v| gradients.contains(&v));
    let of_others: BTreeSet<ValueId> = others.iter().flat_map(|other| other.parameters.iter().copied()).collect();
    let trained: BTreeSet<ValueId> = step.parameters.iter().map(|p| p.parameter).chain(of_others.clone()).collect();
    let main: BTreeSet<ValueId> = trained.difference(&of_others).copied().collect();
    let mut losses = vec![(step.loss, main)];
    for other in others {
        losses.push((graph.outputs[other.output], other.parameters.iter().copied().collect()));
    }
    let apart = losses.iter().map(|(_, own)| own.len()).sum::<usize>() == trained.len();
    if !apart || losses.iter().any(|(loss, own)| own.is_empty() || late[loss.index()]) {
        return None;
    }
    let mut sum = graph.clone();
    let mut total: Option<ValueId> = None;
    for (loss, own) in &losses {
        let loss = of_own_parameters(&mut sum, graph, *loss, own, &trained)?;
        total = Some(match total {
            None => loss,
            Some(total) => {
                let dtype = sum.ty(total).dtype;
                let loss = array::convert(&mut sum, loss, dtype).ok()?;
                array::binary(&mut sum, Binary::Add, total, loss).ok()?
            }
        });
    }
    let main = graph.outputs.iter().position(|o| *o == step.loss)?;
    sum.outputs[main] = total?;
    let is_other = |at: usize| others.iter().any(|other| other.output == at);
    let before = (0..main).filter(|&at| is_other(at)).count();
    let kept: Vec<ValueId> = (0..sum.outputs.len()).filter(|&at| !is_other(at)).map(|at| sum.outputs[at]).collect();
    sum.outputs = kept;
    let joined = recognise_by(&sum, arguments, main - before)?;
    let known: BTreeSet<ValueId> = joined.parameters.iter().map(|p| p.parameter).collect();
    (known == trained).then_some((sum, joined))
}

/// `loss` as a function of its own parameters. Other `trained` leaves, and values that are computed from those alone,
/// pass on no gradient. Nodes on the way are copied to the end of `to`, which begins with the nodes of `graph`.
fn of_own_parameters(
    to: &mut Graph,
    graph: &Graph,
    loss: ValueId,
    own: &BTreeSet<ValueId>,
    trained: &BTreeSet<ValueId>,
) -> Option<ValueId> {
    let from_own = graph.depends_on(|v| own.contains(&v));
    let from_others = graph.depends_on(|v| trained.contains(&v) && !own.contains(&v));
    let needed = ancestors(graph, &[loss], |_| true);
    let mut copies: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    let mut stopped: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    for v in graph.values().filter(|v| needed[v.index()] && from_own[v.index()] && !own.contains(v)) {
        let mut node = graph.node(v).clone();
        for o in &mut node.operands {
            if let Some(&copy) = copies.get(o) {
                *o = copy;
            } else if from_others[o.index()] && !from_own[o.index()] && graph.ty(*o).dtype.is_float() {
                *o = match stopped.get(o) {
                    Some(&stop) => stop,
                    None => *stopped.entry(*o).or_insert(array::stop_gradient(to, *o).ok()?),
                };
            }
        }
        if node.operands != graph.node(v).operands {
            copies.insert(v, to.append(node));
        }
    }
    from_own[loss.index()].then(|| copies.get(&loss).copied().unwrap_or(loss))
}

#[cfg(test)]
#[path = "losses_of_step_tests.rs"]
mod tests;
