//! The reference: the step that one device computes, as terms.
//!
//! It comes from the plan's graph, optimizer and number of microbatches alone. For every microbatch the graph without
//! composites is evaluated and differentiated. Gradients are summed over microbatches, and each parameter is updated once.

use crate::term::{Term, Terms};
use altiplano_ir::autodiff::{AutodiffError, differentiate_for, undifferentiated};
use altiplano_ir::batch::LossKind;
use altiplano_ir::dtype::DType;
use altiplano_ir::expand::expand;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::literal::Literal;
use altiplano_ir::loss_scale::{self, LossScale, ScaleState};
use altiplano_ir::mesh::Mesh;
use altiplano_ir::op::{Direction, Local, Op, Operator};
use altiplano_ir::optimizer::{self, Given, Optimizer, clip_factor, leaf, squares};
use altiplano_ir::plan::Plan;
use altiplano_ir::program::{ALL_PARAMETERS, GRADIENT_SQUARES, OVERFLOWS};
use altiplano_ir::types::TensorType;
use std::collections::BTreeMap;

/// The terms of a step.
pub struct Reference {
    pub terms: Terms,
    /// The loss of a microbatch; `None` if nothing is trained.
    pub loss: Option<Term>,
    /// The outputs of a microbatch of a model that is run.
    pub outputs: Vec<Term>,
    /// The gradients of trained parameters for one microbatch.
    pub gradients: BTreeMap<String, Term>,
    /// The new values of trained parameters.
    pub parameters: BTreeMap<String, Term>,
    /// The new values of optimizer state, by parameter and slot.
    pub states: BTreeMap<(String, String), Term>,
}

/// The name of a parameter's leaf.
pub fn parameter(name: &str) -> String {
    format!("parameter {name}")
}

/// The name of an input's leaf.
pub fn input(name: &str) -> String {
    format!("input {name}")
}

/// The name of a scalar's leaf.
pub fn scalar(name: &str) -> String {
    format!("scalar {name}")
}

/// The name of a state's leaf.
pub fn state(parameter: &str, slot: &str) -> String {
    format!("{slot} of {parameter}")
}

impl Reference {
    pub fn new(plan: &Plan) -> Result<Reference, AutodiffError> {
        let expanded = expand(&plan.graph);
        let stops: Vec<ValueId> = plan.stop_gradients.iter().map(|v| expanded.values[v.index()]).collect();
        let trains = plan.schedule.trains();
        let training = match trains {
            true => differentiate_for(&expanded.graph, &stops, plan.execution.fused_loss)?,
            false => undifferentiated(&expanded.graph),
        };
        let mut graph = training.graph.clone();
        let looked_up = looked_up(plan, &mut graph);
        let mut terms = Terms::new(plan.num_microbatches);
        let mut values = Vec::with_capacity(graph.len());
        let scaled_seed = training.seed().zip(plan.loss_scale.filter(|_| trains));
        let scaled_seed = scaled_seed.map(|(seed, scale)| (seed, scale_now(&mut terms, &scale, graph.ty(seed).dtype)));
        terms.add_graph(&graph, &mut values, |terms, op, ty, at| match op {
            _ if scaled_seed.is_some_and(|(seed, _)| seed.0 == at) => scaled_seed.map(|(_, scale)| scale),
            Op::Parameter(p) => Some(terms.leaf(parameter(&p.name), &ty.shape)),
            Op::Input(i) => Some(terms.leaf(input(&i.name), &ty.shape)),
            _ => None,
        });
        for (lookup, equal) in looked_up {
            let node = graph.node(equal);
            let operands: Vec<Term> = node.operands.iter().map(|o| values[o.index()]).collect();
            terms.record(&node.op, &operands, &graph.operand_types(equal), &node.ty, values[lookup.index()]);
        }
        let mut reference = Reference {
            loss: trains.then(|| values[training.loss.index()]),
            outputs: graph.outputs.iter().map(|o| values[o.index()]).collect(),
            terms,
            gradients: BTreeMap::new(),
            parameters: BTreeMap::new(),
            states: BTreeMap::new(),
        };
        if trains {
            let mut gradients = BTreeMap::new();
            for (p, name) in expanded.graph.trained_parameters() {
                let mut sum = reference.terms.splat(0.0);
                for (_, contribution) in &training.contributions[p.index()] {
                    sum = reference.terms.add(sum, values[contribution.index()]);
                }
                reference.gradients.insert(name.to_string(), sum);
                gradients.insert(p, reference.terms.over_microbatches(sum));
            }
            let loss = graph.ty(training.loss).dtype;
            reference.update(plan, &expanded.graph, &gradients, loss);
        }
        reference.terms.keep_graph(graph, values);
        Ok(reference)
    }

    /// Adds the update of all parameters. `gradients` are the sums over microbatches.
    fn update(&mut self, plan: &Plan, model: &Graph, gradients: &BTreeMap<ValueId, Term>, loss: DType) {
        let mut graph = Graph::new("update");
        let mut leaves: BTreeMap<ValueId, Term> = BTreeMap::new();
        let scale = match plan.loss {
            LossKind::Sum => 1.0,
            _ => 1.0 / f64::from(plan.microbatches_of_update()),
        };
        let [rate, step] = ["learning_rate", "step"].map(|name| {
            let v = leaf(&mut graph, name, TensorType::scalar(DType::F32));
            leaves.insert(v, self.terms.leaf(scalar(name), &[]));
            v
        });
        let mut given = BTreeMap::new();
        for (&p, &gradient) in gradients {
            let ty = plan.execution.accumulator(model.ty(p));
            let v = leaf(&mut graph, format!("gradient {p}"), ty);
            leaves.insert(v, gradient);
            given.insert(p, v);
        }
        let scaling = plan.loss_scale.map(|of_plan| Scaling::new(&mut graph, of_plan, loss));
        for (slot, v) in scaling.iter().flat_map(|scaling| &scaling.states) {
            leaves.insert(*v, self.terms.leaf(state(ALL_PARAMETERS, slot), &[]));
        }
        let Sums { squared, skip, factor } = Sums::new(plan, &mut graph, scaling.as_ref(), &given, scale);
        let step = skip.as_ref().map_or(step, |skip| graph.sub(step, skip.skipped));
        let mut results: Vec<(String, ValueId, Vec<(String, ValueId)>)> = Vec::new();
        for (p, name) in model.trained_parameters() {
            let ty = model.ty(p);
            let old = leaf(&mut graph, format!("parameter {p}"), ty.clone());
            leaves.insert(old, self.terms.leaf(parameter(name), &ty.shape));
            let slots = plan.optimizer.slots(ty.dtype);
            let state_ty = ty.with_dtype(Optimizer::state_type(ty.dtype));
            let states: Vec<ValueId> = slots
                .iter()
                .map(|slot| {
                    let v = leaf(&mut graph, format!("{slot} {p}"), state_ty.clone());
                    leaves.insert(v, self.terms.leaf(state(name, slot), &ty.shape));
                    v
                })
                .collect();
            let given = Given {
                parameter: old,
                gradient: given[&p],
                gradient_scale: scale,
                factor,
                states: &states,
                learning_rate: rate,
                step,
                whole: &|_, x| x,
            };
            let mut update = optimizer::update(&mut graph, &optimizer_of(plan, model, p), &given);
            if let Some(skip) = &skip {
                update.parameter = skip.unless(&mut graph, old, update.parameter);
                for (new, &old) in update.states.iter_mut().zip(&states) {
                    *new = skip.unless(&mut graph, old, *new);
                }
            }
            let named = slots.iter().map(|s| (*s).to_string()).zip(update.states).collect();
            results.push((name.to_string(), update.parameter, named));
        }
        let mut values = Vec::with_capacity(graph.len());
        self.terms.add_graph(&graph, &mut values, |_, _, _, at| leaves.get(&ValueId(at)).copied());
        for (name, new, states) in results {
            for (slot, v) in states {
                self.states.insert((name.clone(), slot), values[v.index()]);
            }
            self.parameters.insert(name, values[new.index()]);
        }
        for (slot, v) in skip.iter().flat_map(|skip| &skip.after) {
            self.states.insert((ALL_PARAMETERS.to_string(), slot.clone()), values[v.index()]);
        }
        if let Some(squared) = squared {
            let key = (ALL_PARAMETERS.to_string(), GRADIENT_SQUARES.to_string());
            self.states.insert(key, values[squared.index()]);
        }
    }
}

/// The scale of a step's loss in the loss's type.
fn scale_now(terms: &mut Terms, of_plan: &LossScale, loss: DType) -> Term {
    let mut graph = Graph::new("scale");
    let scaling = Scaling::new(&mut graph, *of_plan, loss);
    let scale = graph.convert(scaling.now, loss);
    let mut leaves = BTreeMap::new();
    for (slot, v) in &scaling.states {
        leaves.insert(*v, terms.leaf(state(ALL_PARAMETERS, slot), &[]));
    }
    let mut values = Vec::new();
    terms.add_graph(&graph, &mut values, |_, _, _, at| leaves.get(&ValueId(at)).copied());
    values[scale.index()]
}

/// Values that depend on all gradients of a step.
struct Sums {
    /// The squared norm of all gradients, if they are clipped.
    squared: Option<ValueId>,
    skip: Option<Skip>,
    /// The factor of all gradients, if they are clipped or the loss was scaled.
    factor: Option<ValueId>,
}

impl Sums {
    /// `scale` turns sums over microbatches into the step's gradients.
    fn new(
        plan: &Plan,
        graph: &mut Graph,
        scaling: Option<&Scaling>,
        gradients: &BTreeMap<ValueId, ValueId>,
        scale: f64,
    ) -> Sums {
        let unscale = scaling.map(|scaling| {
            let one = graph.splat_like(scaling.now, 1.0);
            graph.div(one, scaling.now)
        });
        let mut squared: Option<ValueId> = None;
        for &gradient in gradients.values().filter(|_| plan.clip_norm.is_some()) {
            let gradient = unscale.map_or(gradient, |unscale| times(graph, gradient, unscale));
            let of_one = squares(graph, gradient, scale);
            squared = Some(squared.map_or(of_one, |sum| graph.add(sum, of_one)));
        }
        let skip = scaling.map(|scaling| scaling.skip(graph, gradients.values().copied()));
        let clip = plan.clip_norm.zip(squared).map(|(most, squared)| clip_factor(graph, squared, most));
        let factor = match (clip, unscale) {
            (Some(clip), Some(unscale)) => Some(graph.mul(clip, unscale)),
            (clip, unscale) => clip.or(unscale),
        };
        Sums { squared, skip, factor }
    }
}

/// Loss scaling in the reference's update.
struct Scaling {
    of_plan: LossScale,
    loss: DType,
    states: Vec<(&'static str, ValueId)>,
    now: ValueId,
}

/// A step that changes nothing if gradients are not finite.
struct Skip {
    when: ValueId,
    skipped: ValueId,
    /// The new states, by slot.
    after: Vec<(String, ValueId)>,
}

impl Scaling {
    fn new(graph: &mut Graph, of_plan: LossScale, loss: DType) -> Scaling {
        let scalar = || TensorType::scalar(DType::F32);
        let states: Vec<(&'static str, ValueId)> =
            of_plan.slots().iter().map(|&slot| (slot, leaf(graph, slot, scalar()))).collect();
        let kept = states.iter().find(|s| s.0 == loss_scale::SCALE).map(|s| s.1);
        let now = of_plan.now(graph, kept, loss);
        Scaling { of_plan, loss, states, now }
    }

    fn skip(&self, graph: &mut Graph, gradients: impl Iterator<Item = ValueId>) -> Skip {
        let mut sum: Option<ValueId> = None;
        for gradient in gradients {
            let of_one = loss_scale::overflows(graph, gradient);
            sum = Some(sum.map_or(of_one, |sum| graph.add(sum, of_one)));
        }
        let sum = sum.unwrap_or_else(|| graph.constant(Literal::splat(TensorType::scalar(DType::F32), 0.0)));
        let none = graph.splat_like(sum, 0.0);
        let when = graph.compare(Direction::Gt, sum, none);
        let read = |name: &str| self.states.iter().find(|s| s.0 == name).map(|s| s.1);
        // Every scale counts the skipped steps.
        let skipped = read(loss_scale::SKIPPED_STEPS).unwrap_or(self.now);
        let state = ScaleState { skipped, unchanged: read(loss_scale::UNCHANGED_STEPS) };
        let after = self.of_plan.after(graph, state, self.now, when, self.loss);
        let mut named: Vec<(String, ValueId)> = self.states.iter().map(|s| s.0.to_string()).zip(after).collect();
        named.push((OVERFLOWS.to_string(), sum));
        Skip { when, skipped, after: named }
    }
}

impl Skip {
    fn unless(&self, graph: &mut Graph, old: ValueId, new: ValueId) -> ValueId {
        let shape = graph.shape(new).to_vec();
        let when = graph.broadcast_scalar(self.when, &shape);
        graph.select(when, old, new)
    }
}

/// A tensor times a scalar, in single precision.
fn times(graph: &mut Graph, x: ValueId, factor: ValueId) -> ValueId {
    let (x, shape) = (graph.convert(x, DType::F32), graph.shape(x).to_vec());
    let factor = graph.broadcast_scalar(factor, &shape);
    graph.mul(x, factor)
}

/// The optimizer of a parameter, which may be exempt from weight decay.
fn optimizer_of(plan: &Plan, model: &Graph, p: ValueId) -> Optimizer {
    let mut optimizer = plan.optimizer;
    let exempt = matches!(&model.node(p).op, Op::Parameter(parameter) if parameter.no_decay);
    if let Some(decay) = optimizer.setting("weight_decay").filter(|_| exempt) {
        *decay = 0.0;
    }
    optimizer
}

/// For each lookup, the equal value that looks up before it computes, appended to the graph.
fn looked_up(plan: &Plan, graph: &mut Graph) -> Vec<(ValueId, ValueId)> {
    let mesh = Mesh { axes: Vec::new() };
    let mut aliases = Vec::new();
    for v in graph.values() {
        let node = graph.node(v).clone();
        let Op::Gather(op) = &node.op else { continue };
        let operand_types: Vec<TensorType> = graph.operand_types(v).into_iter().cloned().collect();
        let types: Vec<&TensorType> = operand_types.iter().collect();
        let factors = op.rule(&types, &node.ty).factors.len();
        let mut cx = Local {
            graph,
            mesh: &mesh,
            operands: node.operands.to_vec(),
            operand_types: operand_types.clone(),
            result_shape: node.ty.shape.clone(),
            factor_axes: vec![Vec::new(); factors],
            fused_loss: plan.execution.fused_loss,
        };
        let to = op.local(&mut cx);
        aliases.push((v, to));
    }
    aliases
}
