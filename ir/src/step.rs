//! Whole training steps: functions that return a loss and updated weights.
//!
//! A framework may hand over more than a loss: its gradients and the optimizer's update as well, in one function. Such a
//! function is recognised by what its results are made of: an updated weight is the weight and its state under elementwise
//! ops, and all that the loss has to say about it comes in through one value, the gradient. The update is a function of a
//! few numbers then, and trying it out tells which optimizer it is. What remains is the loss, which is planned.

use crate::graph::{Graph, ValueId};
use crate::interpret;
use crate::op::{Binary, Input, Op, Operator, Parameter, Unary};
use crate::optimizer::{Given, Optimizer, leaf, update};
use crate::tensor::Tensor;
use crate::types::TensorType;
use std::collections::{BTreeMap, BTreeSet};

/// A function that is one step of training.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingStep {
    pub loss: ValueId,
    pub parameters: Vec<TrainedParameter>,
    /// What all parameters are updated by, if it is an optimizer that this crate knows.
    pub optimizer: Option<Fitted>,
    /// Gradients are clipped or otherwise changed before the update.
    pub changed: bool,
}

/// A parameter of a training step.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainedParameter {
    pub parameter: ValueId,
    pub states: Vec<ValueId>,
    /// What the loss is differentiated to by it, where that can be told from what is done to it before the update.
    pub gradient: Option<ValueId>,
    pub updated: ValueId,
    pub updated_states: Vec<ValueId>,
}

/// An optimizer found by trying out an update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fitted {
    pub optimizer: Optimizer,
    /// That of the first step.
    pub learning_rate: f64,
    /// The learning rate follows a schedule.
    pub scheduled: bool,
}

/// The training step that a graph with several results is. `arguments` are its leaves in the function's order, and `names` what
/// the function calls its results, where it says: of several scalars one that is called a loss is tried first.
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

/// The step whose loss is this output: all that is trained must be what the loss can be differentiated by, and the loss must
/// not itself be made of gradients.
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
    let users = graph.users();
    let mut parameters = Vec::new();
    let (mut changed, mut strange) = (false, false);
    for (&parameter, &(updated, index)) in updates.iter().filter(|(a, _)| smooth[a.index()]) {
        // A count of steps is updated as well, but learns nothing from the batch.
        let learns = |s: &ValueId| updates.get(s).is_some_and(|(updated, _)| from_loss[updated.index()]);
        let is_state = |s: &&ValueId| **s != parameter && learns(s) && !needed[s.index()];
        let states: Vec<ValueId> = reach[index].iter().filter(is_state).copied().collect();
        let updated_states: Vec<ValueId> = states.iter().map(|s| updates[s].0).collect();
        let results: Vec<ValueId> = [&[updated], updated_states.as_slice()].concat();
        let own: BTreeSet<ValueId> = states.iter().copied().chain([parameter]).collect();
        // A loss with a penalty on the weights themselves has them in its gradient.
        let is_penalty = |u: &&ValueId| {
            let node = graph.node(**u);
            let keeps = matches!(node.op, Op::Convert(_) | Op::Reshape(_));
            needed[u.index()] && node.op.is_elementwise() && !keeps && node.ty.shape == graph.shape(parameter)
        };
        let penalised = users[parameter.index()].iter().any(|u| is_penalty(&u));
        let mut gradient = gradient(graph, &results, &own, penalised);
        if !penalised && graph.ty(parameter).rank() > 0 {
            let raw = gradient.and_then(|g| before_changes(graph, g));
            changed |= raw != gradient;
            gradient = raw;
        }
        strange |= gradient.is_none();
        parameters.push(TrainedParameter { parameter, states, gradient, updated, updated_states });
    }
    let gradients: BTreeSet<ValueId> = parameters.iter().filter_map(|p| p.gradient).collect();
    let from_gradients = graph.depends_on(|v| gradients.contains(&v));
    if from_gradients[loss.index()] {
        return None;
    }
    // State that changes parameters and belongs to none of them is that of an optimizer with a memory of another form.
    let known: BTreeSet<ValueId> = parameters.iter().flat_map(|p| &p.states).copied().collect();
    let updated: Vec<ValueId> = parameters.iter().map(|p| p.updated).collect();
    let steers = ancestors(graph, &updated, |_| true);
    let foreign = |a: &ValueId| {
        let ty = graph.ty(*a);
        steers[a.index()] && !needed[a.index()] && !known.contains(a) && ty.dtype.is_float() && ty.rank() > 0
    };
    strange |= changed || updates.keys().any(foreign);
    let mut fits = parameters.iter().map(|p| if strange { None } else { fit(graph, p) });
    let first = fits.next()?;
    let same = fits.all(|f| f == first);
    Some(TrainingStep { loss, parameters, optimizer: first.filter(|_| same), changed })
}

/// The nodes that `outputs` are made of, through nodes that `passes` holds for.
fn ancestors(graph: &Graph, outputs: &[ValueId], passes: impl Fn(ValueId) -> bool) -> Vec<bool> {
    let mut needed = vec![false; graph.len()];
    outputs.iter().for_each(|o| needed[o.index()] = true);
    for v in graph.values().rev() {
        if needed[v.index()] {
            graph.node(v).operands.iter().filter(|o| passes(**o)).for_each(|o| needed[o.index()] = true);
        }
    }
    needed
}

/// Whether a value is one number computed from others, in a shape.
fn is_spread(graph: &Graph, v: ValueId) -> bool {
    let node = graph.node(v);
    let smaller = |o: ValueId| graph.ty(o).elements() < node.ty.elements();
    matches!(node.op, Op::BroadcastInDim(_)) && smaller(node.operands[0]) && !is_uniform(graph, v)
}

/// The gradient before it was clipped, normalised or the like: by numbers made of gradients, or by functions that no
/// gradient of a sum of products ends with. `None` where it cannot be told apart.
fn before_changes(graph: &Graph, gradient: ValueId) -> Option<ValueId> {
    let shape = graph.shape(gradient);
    let plain = |v: ValueId| {
        let node = graph.node(v);
        let linear = matches!(
            node.op,
            Op::Binary(Binary::Add | Binary::Subtract | Binary::Multiply | Binary::Divide)
                | Op::Unary(Unary::Negate)
                | Op::Convert(_)
        );
        !node.op.is_elementwise() || linear && !node.operands.iter().any(|&o| is_spread(graph, o))
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
        let varies = |o: &&ValueId| graph.shape(**o) == shape && !is_uniform(graph, **o) && !is_spread(graph, **o);
        parts.extend(node.operands.iter().filter(varies));
    }
}

/// A value and the elementwise ops of its shape that it is made of.
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
    /// The loss alone, with what is trained as parameters; what only gradients and updates need is left out.
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
                Op::Input(Input { name, ty }) if trained.contains(&v) => Op::Parameter(Parameter::new(name, ty)),
                op => op,
            };
            map[v.index()] = part.append(node);
        }
        part.outputs = outputs.iter().map(|o| map[o.index()]).collect();
        part.take_pins(graph, |v| needed[v.index()].then(|| map[v.index()]));
        part
    }
}

/// Leaves that a function gives back updated by elementwise ops: weights, moments, running statistics.
pub fn updated_leaves(graph: &Graph) -> BTreeSet<ValueId> {
    let others = graph.outputs.iter().filter(|o| !graph.node(**o).op.is_leaf());
    let same_type = |o: ValueId| move |v: &ValueId| graph.ty(*v) == graph.ty(o);
    others.flat_map(|&o| elementwise_leaves(graph, o).into_iter().filter(same_type(o))).collect()
}

/// Leaves of the shape of `v` that it is made of by elementwise ops.
fn elementwise_leaves(graph: &Graph, v: ValueId) -> BTreeSet<ValueId> {
    let ty = graph.ty(v);
    let (mut leaves, mut seen, mut stack) = (BTreeSet::new(), BTreeSet::new(), vec![v]);
    while let Some(at) = stack.pop() {
        let node = graph.node(at);
        if node.ty.shape != ty.shape || !seen.insert(at) {
            continue;
        }
        if node.op.is_leaf() {
            // State may be kept in another precision.
            if node.ty == *ty || node.ty.dtype.is_float() && ty.dtype.is_float() {
                leaves.insert(at);
            }
        } else if node.op.is_elementwise() || matches!(node.op, Op::Reshape(_)) {
            stack.extend(&node.operands);
        }
    }
    leaves
}

/// For each argument that has one, its updated value and the position of that among the outputs.
fn matched(
    graph: &Graph,
    arguments: &[ValueId],
    reach: &[BTreeSet<ValueId>],
    loss: usize,
) -> Option<BTreeMap<ValueId, (ValueId, usize)>> {
    let updates: Vec<usize> = (0..graph.outputs.len()).filter(|&i| i != loss && !reach[i].is_empty()).collect();
    // Functions return their state in the order in which they take it.
    let mut rest = arguments.iter();
    let in_order = |i: &usize| rest.find(|a| graph.ty(**a) == graph.ty(graph.outputs[*i])).copied().zip(Some(*i));
    let in_order: Option<Vec<(ValueId, usize)>> = updates.iter().map(in_order).collect();
    let pairs = match in_order {
        Some(pairs) if pairs.iter().all(|(a, i)| reach[*i].contains(a)) => pairs,
        // In another order an update is told by what it alone is made of.
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

/// The one value through which results depend on anything but `own`, scalars and constants. Where the loss has a penalty on
/// the parameter, what is made of the parameter alone belongs to the gradient.
fn gradient(graph: &Graph, results: &[ValueId], own: &BTreeSet<ValueId>, penalised: bool) -> Option<ValueId> {
    let shape = graph.shape(results[0]);
    let parameter = |v: ValueId| graph.node(v).op.is_leaf() && own.contains(&v);
    let states = results.len() > 1;
    // The parameter is the one of `own` that results[0] replaces; states are the others.
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
    // They all come from one, which is the last that all of them pass through.
    while outside.len() > 1 {
        let last = outside.pop_last()?;
        let node = graph.node(last);
        if !node.op.is_elementwise() && !matches!(node.op, Op::Reshape(_)) {
            return None;
        }
        outside.extend(node.operands.iter().filter(|&&o| !is_uniform(graph, o) && !parameter(o)));
    }
    let gradient = outside.pop_first()?;
    // With less state than Adam's a factor is all that tells the change from the gradient.
    let node = graph.node(gradient);
    match (&node.op, results.len()) {
        (Op::Binary(Binary::Multiply), 1 | 2) => {
            let varies: Vec<ValueId> = node.operands.iter().copied().filter(|&o| !is_uniform(graph, o)).collect();
            Some(if let [only] = varies[..] { only } else { gradient })
        }
        _ => Some(gradient),
    }
}

/// Whether `v` is made of `own` (the `true` entries of `known`) by elementwise ops of this shape.
fn depends_on(graph: &Graph, v: ValueId, shape: &[u64], known: &mut BTreeMap<ValueId, bool>) -> bool {
    let mut stack = vec![(v, false)];
    while let Some((at, ready)) = stack.pop() {
        if known.contains_key(&at) {
            continue;
        }
        let node = graph.node(at);
        let inside = node.ty.shape == shape && (node.op.is_elementwise() || matches!(node.op, Op::Reshape(_)));
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

/// Whether all elements are one number: a constant, a scalar argument, or made of these.
fn is_uniform(graph: &Graph, v: ValueId) -> bool {
    let node = graph.node(v);
    match &node.op {
        Op::Constant(literal) => literal.as_splat().is_some(),
        op if op.is_leaf() => node.ty.rank() == 0,
        Op::BroadcastInDim(_) | Op::Reshape(_) => is_uniform(graph, node.operands[0]),
        op => node.ty.rank() == 0 && op.is_elementwise() && node.operands.iter().all(|&o| is_uniform(graph, o)),
    }
}

/// The value of one element of `v`, where those of the `given` values are known and scalar arguments are `scalar`.
fn element(graph: &Graph, v: ValueId, given: &BTreeMap<ValueId, f64>, scalar: f64) -> Option<f64> {
    let mut known: BTreeMap<ValueId, f64> = given.clone();
    let mut stack = vec![v];
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
        let operands: Vec<Tensor> =
            node.operands.iter().map(|o| Tensor::scalar(graph.ty(*o).dtype, known[o])).collect();
        let value = match &node.op {
            Op::Constant(literal) => literal.as_splat()?,
            Op::BroadcastInDim(_) | Op::Reshape(_) => operands[0].data[0],
            op if op.is_leaf() && node.ty.rank() == 0 => scalar,
            op if op.is_elementwise() => {
                op.eval(&operands.iter().collect::<Vec<_>>(), &TensorType::scalar(node.ty.dtype)).data[0]
            }
            _ => return None,
        };
        known.insert(at, value);
    }
    known.get(&v).copied()
}

/// The optimizer that computes an update, its settings read off at chosen points and then confirmed at others.
fn fit(graph: &Graph, p: &TrainedParameter) -> Option<Fitted> {
    // Scalar arguments are counts of steps done.
    let after = |steps: f64, result: ValueId, weight: f64, states: &[f64], g: f64| {
        let mut given: BTreeMap<ValueId, f64> = p.states.iter().copied().zip(states.iter().copied()).collect();
        given.extend([(p.parameter, weight)].into_iter().chain(p.gradient.map(|gradient| (gradient, g))));
        element(graph, result, &given, steps)
    };
    let at = |result: ValueId, weight: f64, states: &[f64], g: f64| after(0.0, result, weight, states, g);
    let weight = |w: f64, states: &[f64], g: f64| at(p.updated, w, states, g);
    let fitted = |optimizer, learning_rate| Fitted { optimizer, learning_rate, scheduled: false };
    let mut candidates = Vec::new();
    match *p.updated_states.as_slice() {
        [] => {
            let learning_rate = -weight(0.0, &[], 1.0)?;
            let weight_decay = (1.0 - weight(1.0, &[], 0.0)?) / learning_rate;
            candidates.push(fitted(Optimizer::Sgd { momentum: 0.0, weight_decay }, learning_rate));
        }
        [velocity] => {
            let momentum = at(velocity, 0.0, &[1.0], 0.0)?;
            let learning_rate = -weight(0.0, &[0.0], 1.0)?;
            let weight_decay = at(velocity, 1.0, &[0.0], 0.0)?;
            candidates.push(fitted(Optimizer::Sgd { momentum, weight_decay }, learning_rate));
        }
        [m, v] => {
            let (beta1, beta2) = (at(m, 0.0, &[1.0, 0.0], 0.0)?, at(v, 0.0, &[0.0, 1.0], 0.0)?);
            for bias_correction in [false, true] {
                let unbiased = |x: f64, beta: f64| if bias_correction { x / (1.0 - beta) } else { x };
                let (m_hat, root) = (unbiased(beta1, beta1), unbiased(beta2, beta2).sqrt());
                // -lr * m_hat / (sqrt(v_hat) + epsilon), with and without v.
                let (with, without) = (-weight(0.0, &[1.0, 1.0], 0.0)?, -weight(0.0, &[1.0, 0.0], 0.0)?);
                let epsilon = if without.is_finite() { with * root / (without - with) } else { 0.0 };
                let learning_rate = with * (root + epsilon) / m_hat;
                let decoupled = (1.0 - weight(1.0, &[0.0, 1.0], 0.0)?) / learning_rate;
                let coupled = at(m, 1.0, &[0.0, 0.0], 0.0)? / (1.0 - beta1);
                let settings = |weight_decay| (beta1, beta2, epsilon, weight_decay, bias_correction);
                let fitted = |optimizer| fitted(optimizer, learning_rate);
                // Without decay they are the same.
                let plain = settings(0.0);
                candidates.push(fitted(adam(plain)));
                candidates.push(fitted(adamw(settings(decoupled))));
                candidates.push(fitted(adam(settings(coupled))));
            }
        }
        _ => return None,
    }
    // How much farther than the candidate the update goes, the same everywhere; `None` where it goes elsewhere.
    let rate = |f: &Fitted, steps: f64| -> Option<f64> {
        let mut rate: Option<f64> = None;
        for i in 0..16u32 {
            let number = |k: u32| f64::from((i * 7 + k * 5) % 11) / 4.0 - 1.2;
            let states: Vec<f64> = (0..p.states.len() as u32).map(|k| number(k + 2).abs() + 0.01).collect();
            let expected = step_of(f, steps + 1.0, number(0), &states, number(1));
            for (&r, expected) in p.updated_states.iter().zip(&expected[1..]) {
                let found = after(steps, r, number(0), &states, number(1))?;
                if (found - expected).abs() > 1e-5 * expected.abs() + 1e-12 {
                    return None;
                }
            }
            // Of the weight it is the change that counts, which is small.
            let (change, expected) =
                (after(steps, p.updated, number(0), &states, number(1))? - number(0), expected[0] - number(0));
            let known = *rate.get_or_insert(change / expected);
            if (change - known * expected).abs() > 1e-5 * change.abs() + 1e-12 {
                return None;
            }
        }
        rate.filter(|r| *r > 0.0)
    };
    let first = |f: &&Fitted| f.learning_rate > 0.0 && rate(f, 0.0).is_some_and(|r| (r - 1.0).abs() < 1e-4);
    let always = candidates.iter().filter(first).find(|f| rate(f, 9.0).is_some_and(|r| (r - 1.0).abs() < 1e-4));
    let mut fitted = match always {
        Some(f) => *f,
        // Another step size at another step is a schedule.
        // (Averages without a bias are a schedule of those with one, so these are tried last.)
        None => Fitted { scheduled: true, ..*candidates.iter().rev().filter(first).find(|f| rate(f, 9.0).is_some())? },
    };
    // Settings that are constants of the text in single precision are meant in decimal.
    let decimal =
        |x: f64| format!("{x:.5e}").parse::<f64>().ok().filter(|d| (d - x).abs() <= 1e-6 * x.abs()).unwrap_or(x);
    fitted.learning_rate = decimal(fitted.learning_rate);
    fitted.optimizer = match fitted.optimizer {
        Optimizer::Sgd { momentum, weight_decay } => {
            Optimizer::Sgd { momentum: decimal(momentum), weight_decay: decimal(weight_decay) }
        }
        Optimizer::Adam { beta1, beta2, epsilon, weight_decay, bias_correction } => {
            adam((decimal(beta1), decimal(beta2), decimal(epsilon), small(decimal(weight_decay)), bias_correction))
        }
        Optimizer::Adamw { beta1, beta2, epsilon, weight_decay, bias_correction } => {
            adamw((decimal(beta1), decimal(beta2), decimal(epsilon), small(decimal(weight_decay)), bias_correction))
        }
        other => other,
    };
    Some(fitted)
}

/// What is left of a zero after a division.
fn small(x: f64) -> f64 {
    if x.abs() < 1e-9 { 0.0 } else { x }
}

fn adam((beta1, beta2, epsilon, weight_decay, bias_correction): (f64, f64, f64, f64, bool)) -> Optimizer {
    Optimizer::Adam { beta1, beta2, epsilon, weight_decay, bias_correction }
}

fn adamw((beta1, beta2, epsilon, weight_decay, bias_correction): (f64, f64, f64, f64, bool)) -> Optimizer {
    Optimizer::Adamw { beta1, beta2, epsilon, weight_decay, bias_correction }
}

/// One step of an optimizer on one weight: the new weight, then the new state.
fn step_of(fitted: &Fitted, step: f64, weight: f64, states: &[f64], gradient: f64) -> Vec<f64> {
    let scalar = TensorType::scalar(crate::dtype::DType::F32);
    let mut graph = Graph::new("step");
    let values = [&[weight, gradient, fitted.learning_rate, step], states].concat();
    let leaves: Vec<ValueId> = (0..values.len()).map(|i| leaf(&mut graph, i.to_string(), scalar.clone())).collect();
    let given = Given {
        parameter: leaves[0],
        gradient: leaves[1],
        gradient_scale: 1.0,
        factor: None,
        states: &leaves[4..],
        learning_rate: leaves[2],
        step: leaves[3],
        whole: &|_, x| x,
    };
    let new = update(&mut graph, &fitted.optimizer, &given);
    graph.outputs = [&[new.parameter], new.states.as_slice()].concat();
    let results = interpret::run(&graph, |v| Tensor::scalar(scalar.dtype, values[v.index()]));
    results.iter().map(|t| t.data[0]).collect()
}

#[cfg(test)]
#[path = "step_tests.rs"]
mod tests;
