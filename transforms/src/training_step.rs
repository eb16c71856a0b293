//! Whole training steps: functions that return a loss and updated weights.
//!
//! A framework may export not only a loss but also its gradients and the optimizer's update, in one function. Such a
//! function is recognised by the inputs of its results. An updated weight depends on the weight and its state through
//! elementwise ops and norms. It depends on the loss only through one value, the gradient. The update is then a
//! function of few numbers, and trying it out identifies the optimizer. The loss remains, and is planned.

mod fit;
mod lanes;

use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{Binary, Input, Op, Parameter, Unary};
use altiplano_ir::optimizer::Optimizer;
use std::collections::{BTreeMap, BTreeSet};

/// A function that is one step of training.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingStep {
    /// The loss that the step returns, a scalar.
    pub loss: ValueId,
    /// The parameters that the step updates.
    pub parameters: Vec<TrainedParameter>,
    /// Weights that the step returns unchanged.
    pub frozen: Vec<ValueId>,
    /// Parameters that weight decay excludes.
    pub no_decay: Vec<ValueId>,
    /// The optimizer that updates all parameters, if this crate has it.
    pub optimizer: Option<Fitted>,
    /// True if gradients are changed before the update, other than by a clip of their norm.
    pub changed: bool,
}

/// A parameter of a training step.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainedParameter {
    /// The parameter before the step, a leaf.
    pub parameter: ValueId,
    /// Its optimizer state before the step, leaves.
    pub states: Vec<ValueId>,
    /// The parameter's gradient, if it can be told apart from changes to it before the update.
    pub gradient: Option<ValueId>,
    /// The input of the update: the gradient, or a value computed from all gradients.
    pub applied: Option<ValueId>,
    /// The parameter after the step.
    pub updated: ValueId,
    /// Its state after the step, in the order of `states`.
    pub updated_states: Vec<ValueId>,
}

/// An optimizer identified by trying out an update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fitted {
    /// The optimizer with its settings.
    pub optimizer: Optimizer,
    /// The learning rate of the first step in which it is not zero.
    pub learning_rate: f64,
    /// True if the learning rate follows a schedule.
    pub scheduled: bool,
    /// The norm at which gradients are clipped.
    pub clip_norm: Option<f64>,
}

/// Recognises a graph with several results as a training step. `arguments` are its leaves in the function's order, and
/// `names` the function's names for its results, if any. Among several scalars, those with "loss" in their name are
/// tried first.
pub fn recognise(graph: &Graph, arguments: &[ValueId], names: &[Option<String>]) -> Option<TrainingStep> {
    let reach: Vec<BTreeSet<ValueId>> = graph.outputs.iter().map(|&o| elementwise_leaves(graph, o)).collect();
    let is_scalar = |i: &usize| {
        let ty = graph.ty(graph.outputs[*i]);
        ty.rank() == 0 && ty.dtype.is_float() && reach[*i].is_empty()
    };
    let mut scalars: Vec<usize> = (0..graph.outputs.len()).filter(is_scalar).collect();
    let is_called_loss = |i: usize| matches!(names.get(i), Some(Some(name)) if name.to_lowercase().contains("loss"));
    scalars.sort_by_key(|&i| !is_called_loss(i));
    scalars.into_iter().find_map(|i| step_of_loss(graph, arguments, &reach, i))
}

/// For each leaf that the function returns updated, beside this loss, its updated value.
pub(crate) fn updated_by(graph: &Graph, arguments: &[ValueId], loss: ValueId) -> BTreeMap<ValueId, ValueId> {
    let reach: Vec<BTreeSet<ValueId>> = graph.outputs.iter().map(|&o| elementwise_leaves(graph, o)).collect();
    let index = graph.outputs.iter().position(|o| *o == loss).unwrap_or(graph.outputs.len());
    let found = matched(graph, arguments, &reach, index).unwrap_or_default();
    found.into_iter().map(|(leaf, (updated, _))| (leaf, updated)).collect()
}

/// The step whose loss is the output at `loss`. `arguments` are the graph's leaves in the function's order.
pub(crate) fn recognise_by(graph: &Graph, arguments: &[ValueId], loss: usize) -> Option<TrainingStep> {
    let reach: Vec<BTreeSet<ValueId>> = graph.outputs.iter().map(|&o| elementwise_leaves(graph, o)).collect();
    step_of_loss(graph, arguments, &reach, loss)
}

/// The step whose loss is this output. The loss must depend on everything that is trained, and must not itself be
/// computed from gradients.
fn step_of_loss(
    graph: &Graph,
    arguments: &[ValueId],
    reach: &[BTreeSet<ValueId>],
    loss_index: usize,
) -> Option<TrainingStep> {
    let loss = graph.outputs[loss_index];
    let updates = matched(graph, arguments, reach, loss_index)?;
    let needed = ancestors(graph, &[loss], |_| true);
    let smooth = ancestors(graph, &[loss], |v| graph.ty(v).dtype.is_float());
    let from_loss = graph.depends_on(|v| graph.node(v).op.is_leaf() && needed[v.index()]);
    // A count that the loss is divided by is not a norm of gradients.
    let learnt = graph.depends_on(|v| smooth[v.index()] && updates.contains_key(&v));
    let users = graph.users();
    let (mut parameters, mut frozen) = (Vec::new(), Vec::new());
    let mut strange = false;
    for (&parameter, &(updated, index)) in updates.iter().filter(|(a, _)| smooth[a.index()]) {
        if graph.is_frozen(parameter) {
            continue;
        }
        if fit::is_same(graph, updated, parameter) {
            frozen.push(parameter);
            continue;
        }
        // A count of steps is updated as well, but learns nothing from the batch.
        let learns = |s: &ValueId| updates.get(s).is_some_and(|(updated, _)| from_loss[updated.index()]);
        let is_state = |s: &&ValueId| **s != parameter && learns(s) && !needed[s.index()];
        let states: Vec<ValueId> = reach[index].iter().filter(is_state).copied().collect();
        let updated_states: Vec<ValueId> = states.iter().map(|s| updates[s].0).collect();
        let results: Vec<ValueId> = [&[updated], updated_states.as_slice()].concat();
        let own: BTreeSet<ValueId> = states.iter().copied().chain([parameter]).collect();
        // If the loss has a penalty on the weights themselves, the gradient depends on them directly.
        let is_penalty = |u: &&ValueId| {
            let node = graph.node(**u);
            let keeps = matches!(node.op, Op::Convert(_) | Op::Reshape(_) | Op::Unary(Unary::StopGradient));
            needed[u.index()] && node.op.is_elementwise() && !keeps && node.ty.shape == graph.shape(parameter)
        };
        let penalised = users[parameter.index()].iter().any(|u| is_penalty(&u));
        let applied = gradient(graph, &results, &own, penalised);
        let gradient = match !penalised && graph.ty(parameter).rank() > 0 {
            true => applied.and_then(|g| before_changes(graph, g, &learnt)),
            false => applied,
        };
        strange |= gradient.is_none();
        parameters.push(TrainedParameter { parameter, states, gradient, applied, updated, updated_states });
    }
    let gradients: BTreeSet<ValueId> = parameters.iter().filter_map(|p| p.gradient).collect();
    let from_gradients = graph.depends_on(|v| gradients.contains(&v));
    if from_gradients[loss.index()] {
        return None;
    }
    // State that affects parameters and belongs to none of them is that of an optimizer with another kind of memory.
    let known: BTreeSet<ValueId> = parameters.iter().flat_map(|p| &p.states).copied().collect();
    let updated: Vec<ValueId> = parameters.iter().map(|p| p.updated).collect();
    let steers = ancestors(graph, &updated, |_| true);
    let foreign = |a: &ValueId| {
        let ty = graph.ty(*a);
        steers[a.index()] && !needed[a.index()] && !known.contains(a) && ty.dtype.is_float() && ty.rank() > 0
    };
    strange |= updates.keys().any(foreign);
    if parameters.is_empty() {
        return None;
    }
    let counts = fit::counts(graph, &updates);
    let found = if strange { None } else { fit::fit(graph, &parameters, &counts) };
    let changed = found.is_none() && parameters.iter().any(|p| p.gradient != p.applied);
    let (optimizer, no_decay) = found.map_or((None, Vec::new()), |found| (Some(found.fitted), found.no_decay));
    Some(TrainingStep { loss, parameters, frozen, no_decay, optimizer, changed })
}

/// For each node, true if `outputs` depend on it through nodes for which `passes` holds.
pub(crate) fn ancestors(graph: &Graph, outputs: &[ValueId], passes: impl Fn(ValueId) -> bool) -> Vec<bool> {
    let mut needed = vec![false; graph.len()];
    outputs.iter().for_each(|o| needed[o.index()] = true);
    for v in graph.values().rev() {
        if needed[v.index()] {
            graph.node(v).operands.iter().filter(|o| passes(**o)).for_each(|o| needed[o.index()] = true);
        }
    }
    needed
}

/// Returns true if a value is a single number computed from `learnt` values, repeated to a shape.
fn is_spread(graph: &Graph, v: ValueId, learnt: &[bool]) -> bool {
    let node = graph.node(v);
    let smaller = |o: ValueId| graph.ty(o).elements() < node.ty.elements();
    matches!(node.op, Op::BroadcastInDim(_)) && smaller(node.operands[0]) && learnt[v.index()] && !is_uniform(graph, v)
}

/// The gradient before changes such as clipping or normalisation. These use numbers computed from gradients, or
/// functions with which no gradient of a sum of products ends. `None` if the gradient cannot be told apart.
fn before_changes(graph: &Graph, gradient: ValueId, learnt: &[bool]) -> Option<ValueId> {
    let shape = graph.shape(gradient);
    let plain = |v: ValueId| {
        let node = graph.node(v);
        let linear = matches!(
            node.op,
            Op::Binary(Binary::Add | Binary::Subtract | Binary::Multiply | Binary::Divide)
                | Op::Unary(Unary::Negate)
                | Op::Convert(_)
        );
        !node.op.is_elementwise() || linear && !node.operands.iter().any(|&o| is_spread(graph, o, learnt))
    };
    // The elementwise part of the gradient, from the last op to the first.
    let mut changes = false;
    let (mut seen, mut stack) = (BTreeSet::new(), vec![gradient]);
    while let Some(at) = stack.pop() {
        if graph.shape(at) != shape || !graph.node(at).op.is_elementwise() || !seen.insert(at) {
            continue;
        }
        changes |= !plain(at);
        stack.extend(&graph.node(at).operands);
    }
    if !changes {
        return Some(gradient);
    }
    let mut parts = BTreeSet::from([gradient]);
    loop {
        let last = *parts.last()?;
        let is_last_change = parts.len() == 1 && !elementwise_above(graph, last).iter().any(|&v| !plain(v));
        if is_last_change {
            return Some(last);
        }
        parts.pop_last();
        let node = graph.node(last);
        if !node.op.is_elementwise() && !matches!(node.op, Op::Reshape(_)) {
            return None;
        }
        let varies =
            |o: &&ValueId| graph.shape(**o) == shape && !is_uniform(graph, **o) && !is_spread(graph, **o, learnt);
        parts.extend(node.operands.iter().filter(varies));
    }
}

/// A value and the elementwise ops of its shape that it is computed by.
fn elementwise_above(graph: &Graph, v: ValueId) -> BTreeSet<ValueId> {
    let (mut found, mut stack) = (BTreeSet::new(), vec![v]);
    while let Some(at) = stack.pop() {
        if graph.shape(at) == graph.shape(v) && graph.node(at).op.is_elementwise() && found.insert(at) {
            stack.extend(&graph.node(at).operands);
        }
    }
    found
}

impl TrainingStep {
    /// The loss alone, with trained leaves as parameters and without nodes that only gradients and updates need.
    pub fn loss_graph(&self, graph: &Graph) -> Graph {
        self.part(graph, &[self.loss])
    }

    /// The loss and the gradients as the step computes them, one for each of `self.parameters` that has one.
    pub fn gradient_graph(&self, graph: &Graph) -> Graph {
        let gradients = self.parameters.iter().filter_map(|p| p.gradient);
        self.part(graph, &[self.loss].into_iter().chain(gradients).collect::<Vec<_>>())
    }

    fn part(&self, graph: &Graph, outputs: &[ValueId]) -> Graph {
        let needed = ancestors(graph, outputs, |_| true);
        let trained: BTreeSet<ValueId> = self.parameters.iter().map(|p| p.parameter).collect();
        let mut map = vec![ValueId(u32::MAX); graph.len()];
        let mut part = Graph { name: graph.name.clone(), batch: graph.batch, ..Default::default() };
        for v in graph.values().filter(|v| needed[v.index()]) {
            let mut node = graph.node(v).clone();
            node.operands.iter_mut().for_each(|o| *o = map[o.index()]);
            node.op = match node.op {
                Op::Input(Input { name, ty }) if trained.contains(&v) || self.frozen.contains(&v) => {
                    let (frozen, no_decay) = (!trained.contains(&v), self.no_decay.contains(&v));
                    Op::Parameter(Parameter { frozen, no_decay, ..Parameter::new(name, ty) })
                }
                op => op,
            };
            map[v.index()] = part.append(node);
        }
        part.outputs = outputs.iter().map(|o| map[o.index()]).collect();
        part.take_pins(graph, |v| needed[v.index()].then(|| map[v.index()]));
        part
    }
}

/// The leaves that a function returns updated by elementwise ops: weights, moments, running statistics.
pub fn updated_leaves(graph: &Graph) -> BTreeSet<ValueId> {
    let others = graph.outputs.iter().filter(|o| !graph.node(**o).op.is_leaf());
    let same_type = |o: ValueId| move |v: &ValueId| graph.ty(*v) == graph.ty(o);
    others.flat_map(|&o| elementwise_leaves(graph, o).into_iter().filter(same_type(o))).collect()
}

/// The leaves of the shape of `v` that it depends on through elementwise ops.
fn elementwise_leaves(graph: &Graph, v: ValueId) -> BTreeSet<ValueId> {
    let ty = graph.ty(v);
    let (mut leaves, mut seen, mut stack) = (BTreeSet::new(), BTreeSet::new(), vec![v]);
    while let Some(at) = stack.pop() {
        let node = graph.node(at);
        if node.ty.shape != ty.shape || !seen.insert(at) {
            continue;
        }
        if node.op.is_leaf() {
            // State may have another precision.
            if node.ty == *ty || node.ty.dtype.is_float() && ty.dtype.is_float() {
                leaves.insert(at);
            }
        } else if node.op.is_elementwise() || matches!(node.op, Op::Reshape(_)) {
            stack.extend(&node.operands);
        }
    }
    leaves
}

/// For each updated argument, its new value and the position of that among the outputs.
fn matched(
    graph: &Graph,
    arguments: &[ValueId],
    reach: &[BTreeSet<ValueId>],
    loss: usize,
) -> Option<BTreeMap<ValueId, (ValueId, usize)>> {
    let updates: Vec<usize> = (0..graph.outputs.len()).filter(|&i| i != loss && !reach[i].is_empty()).collect();
    // Functions usually return their state in the order of their arguments.
    let mut rest = arguments.iter();
    let in_order = |i: &usize| rest.find(|a| graph.ty(**a) == graph.ty(graph.outputs[*i])).copied().zip(Some(*i));
    let in_order: Option<Vec<(ValueId, usize)>> = updates.iter().map(in_order).collect();
    let pairs = match in_order {
        Some(pairs) if pairs.iter().all(|(a, i)| reach[*i].contains(a)) => pairs,
        // If the order differs, match an update to the one leaf that only it depends on.
        _ => {
            let mut left: Vec<(usize, BTreeSet<ValueId>)> = updates.iter().map(|&i| (i, reach[i].clone())).collect();
            let mut pairs = Vec::new();
            while let Some(at) = left.iter().position(|(_, set)| set.len() == 1) {
                let (i, set) = left.swap_remove(at);
                let argument = *set.first()?;
                pairs.push((argument, i));
                left.iter_mut().for_each(|(_, set)| {
                    set.remove(&argument);
                });
            }
            if !left.is_empty() {
                return None;
            }
            pairs
        }
    };
    let matched: BTreeMap<_, _> = pairs.iter().map(|&(a, i)| (a, (graph.outputs[i], i))).collect();
    (matched.len() == pairs.len() && !matched.is_empty()).then_some(matched)
}

/// The one value through which results depend on anything but `own`, scalars and constants. If the loss has a penalty
/// on the parameter, values computed from the parameter alone belong to the gradient.
fn gradient(graph: &Graph, results: &[ValueId], own: &BTreeSet<ValueId>, penalised: bool) -> Option<ValueId> {
    let shape = graph.shape(results[0]);
    let parameter = |v: ValueId| graph.node(v).op.is_leaf() && own.contains(&v);
    let states = results.len() > 1;
    // The parameter is the leaf of `own` that results[0] replaces. The others are states.
    let sources = own.iter().filter(|&&v| !penalised || states && elementwise_leaves(graph, results[1]).contains(&v));
    let mut depends: BTreeMap<ValueId, bool> = sources.map(|&v| (v, true)).collect();
    for &r in results {
        depends_on(graph, r, shape, &mut depends);
    }
    // Values outside of the update that it reads.
    let mut outside: BTreeSet<ValueId> = BTreeSet::new();
    let mut seen = BTreeSet::new();
    let mut stack = results.to_vec();
    while let Some(at) = stack.pop() {
        if own.contains(&at) || !seen.insert(at) {
            continue;
        }
        if depends.get(&at) == Some(&true) || results.contains(&at) {
            stack.extend(&graph.node(at).operands);
        } else if graph.shape(at) == shape && !is_uniform(graph, at) {
            outside.insert(at);
        }
    }
    // They all come from the last value that all of them pass through.
    while outside.len() > 1 {
        let last = outside.pop_last()?;
        let node = graph.node(last);
        if !node.op.is_elementwise() && !matches!(node.op, Op::Reshape(_)) {
            return None;
        }
        outside.extend(node.operands.iter().filter(|&&o| !is_uniform(graph, o) && !parameter(o)));
    }
    let gradient = outside.pop_first()?;
    // With less state than Adam's, only a factor distinguishes the change from the gradient.
    let node = graph.node(gradient);
    match (&node.op, results.len()) {
        (Op::Binary(Binary::Multiply), 1 | 2) => {
            let varies: Vec<ValueId> = node.operands.iter().copied().filter(|&o| !is_uniform(graph, o)).collect();
            Some(if let [only] = varies[..] { only } else { gradient })
        }
        _ => Some(gradient),
    }
}

/// Returns true if `v` depends on `own` (the `true` entries of `known`) through elementwise ops of this shape, and
/// through numbers computed from all elements, such as norms.
fn depends_on(graph: &Graph, v: ValueId, shape: &[u64], known: &mut BTreeMap<ValueId, bool>) -> bool {
    let mut stack = vec![(v, false)];
    while let Some((at, ready)) = stack.pop() {
        if known.contains_key(&at) {
            continue;
        }
        let node = graph.node(at);
        // Norms may be computed from flattened tensors.
        let elements: u64 = shape.iter().product();
        let of_elements = |o: ValueId| graph.ty(o).elements() == elements;
        let number = node.ty.elements() == 1;
        let inside = match &node.op {
            Op::BroadcastInDim(_) => {
                let from = graph.ty(node.operands[0]).elements();
                (number || of_elements(at)) && (from == 1 || from == node.ty.elements())
            }
            Op::Reduce(_) | Op::DotGeneral(_) => number && node.operands.iter().all(|&o| of_elements(o)),
            Op::Reshape(_) => of_elements(at) || number,
            op => (number || of_elements(at)) && op.is_elementwise(),
        };
        if !inside || ready {
            let depends = inside && node.operands.iter().any(|o| known.get(o) == Some(&true));
            known.insert(at, depends);
            continue;
        }
        stack.push((at, true));
        stack.extend(node.operands.iter().map(|&o| (o, false)));
    }
    known.get(&v) == Some(&true)
}

/// Returns true if all elements are one number: a constant, a scalar argument, or computed from these.
fn is_uniform(graph: &Graph, v: ValueId) -> bool {
    let node = graph.node(v);
    match &node.op {
        Op::Constant(literal) => literal.as_splat().is_some(),
        op if op.is_leaf() => node.ty.rank() == 0,
        Op::BroadcastInDim(_) | Op::Reshape(_) => is_uniform(graph, node.operands[0]),
        op => node.ty.rank() == 0 && op.is_elementwise() && node.operands.iter().all(|&o| is_uniform(graph, o)),
    }
}

#[cfg(test)]
#[path = "training_step_tests.rs"]
mod tests;
