//! References for tests of training: one device's gradients, and the optimizer's update as a separate graph.

use altiplano::ir::dtype::DType;
use altiplano::ir::graph::Graph;
use altiplano::ir::op::{Input, Op};
use altiplano::ir::optimizer::{self, Given, clip_factor, squares};
use altiplano::ir::plan::Plan;
use altiplano::ir::types::TensorType;
use altiplano::runtime::data::synthetic;
use altiplano::runtime::{HostTensor, Options, Session, evaluate};
use altiplano::training::{scalars, session};
use std::collections::BTreeMap;

pub type Tensors = BTreeMap<String, HostTensor>;

/// Weights and state, updated in sequence by the gradients of any device.
pub struct OneByOne {
    pub weights: Tensors,
    states: Tensors,
    update: Graph,
}

impl OneByOne {
    pub fn new(plan: &Plan, weights: &Tensors) -> OneByOne {
        let mut states: Tensors = BTreeMap::new();
        for (v, name) in plan.graph.parameters() {
            for slot in plan.optimizer.slots(DType::F32) {
                states.insert(format!("{slot} {name}"), HostTensor::zeros(plan.graph.ty(v).with_dtype(DType::F32)));
            }
        }
        OneByOne { weights: weights.clone(), states, update: update_of(plan) }
    }

    /// Updates by the gradients of a device's last step.
    pub fn update(&mut self, plan: &Plan, device: &mut Session, scalars: &BTreeMap<String, f64>) {
        let mut leaves: Tensors = [self.weights.clone(), self.states.clone()].into_iter().flatten().collect();
        for (name, &value) in scalars {
            leaves.insert(name.clone(), HostTensor::from_f64(TensorType::scalar(DType::F32), &[value]));
        }
        for name in self.weights.keys() {
            leaves.insert(format!("gradient {name}"), device.accumulator(name).expect("a gradient"));
        }
        let mut results = evaluate(&self.update, &leaves).expect("an update").into_iter();
        for (_, name) in plan.graph.parameters() {
            self.weights.insert(name.to_string(), results.next().expect("a parameter"));
            for slot in plan.optimizer.slots(DType::F32) {
                self.states.insert(format!("{slot} {name}"), results.next().expect("a state"));
            }
        }
    }
}

/// A synthetic batch, different for each step.
pub fn batch_of(plan: &Plan, step: u64) -> Tensors {
    let whole = |ty: &TensorType| {
        let mut shape = ty.shape.clone();
        shape[0] *= u64::from(plan.num_microbatches);
        TensorType::new(ty.dtype, shape)
    };
    let of = |(v, name): (_, &str)| (name.to_string(), synthetic(name, &whole(plan.graph.ty(v)), 64, step));
    plan.graph.inputs().map(of).collect()
}

/// The optimizer's update of all parameters of a plan, as a function of weights, gradient sums and states.
fn update_of(plan: &Plan) -> Graph {
    let mut graph = Graph::new("update");
    let leaf = |graph: &mut Graph, name: String, ty: TensorType| graph.emit(Op::Input(Input { name, ty }), &[]);
    let scale = 1.0 / f64::from(plan.num_microbatches);
    let scalar = TensorType::scalar(DType::F32);
    let learning_rate = leaf(&mut graph, "learning_rate".into(), scalar.clone());
    let step = leaf(&mut graph, "step".into(), scalar);
    let parameters: Vec<_> = plan.graph.parameters().map(|(v, n)| (n.to_string(), plan.graph.ty(v).clone())).collect();
    let gradient = |graph: &mut Graph, (name, ty): &(String, TensorType)| {
        graph.emit(Op::Input(Input { name: format!("gradient {name}"), ty: ty.clone() }), &[])
    };
    let gradients: Vec<_> = parameters.iter().map(|p| gradient(&mut graph, p)).collect();
    let clip = plan.clip_norm.map(|most| {
        let all: Vec<_> = gradients.iter().map(|&g| squares(&mut graph, g, scale)).collect();
        let sum = all.into_iter().reduce(|a, b| graph.add(a, b)).expect("a parameter");
        clip_factor(&mut graph, sum, most)
    });
    let mut outputs = Vec::new();
    for ((name, ty), gradient) in parameters.iter().zip(gradients) {
        let parameter = leaf(&mut graph, name.clone(), ty.clone());
        let slots = plan.optimizer.slots(ty.dtype);
        let states: Vec<_> =
            slots.iter().map(|slot| leaf(&mut graph, format!("{slot} {name}"), ty.with_dtype(DType::F32))).collect();
        let whole = |_: &mut Graph, x| x;
        let (states, whole) = (&states[..], &whole);
        let given =
            Given { parameter, gradient, gradient_scale: scale, factor: clip, states, learning_rate, step, whole };
        let new = optimizer::update(&mut graph, &plan.optimizer, &given);
        outputs.push(new.parameter);
        outputs.extend(new.states);
    }
    graph.outputs = outputs;
    graph
}

/// The largest difference of weights, relative to the norm of a parameter.
pub fn difference(ours: &Tensors, expected: &Tensors) -> f64 {
    let of = |(name, expected): (&String, &HostTensor)| {
        let (ours, expected) = (ours[name].to_f64(), expected.to_f64());
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        norm(&mut ours.iter().zip(&expected).map(|(a, b)| a - b)) / norm(&mut expected.iter().copied()).max(1e-30)
    };
    expected.iter().map(of).fold(0.0, f64::max)
}

/// Losses, weights and the session after `steps` steps on the devices of a plan. Each step begins before the previous
/// one has ended, unless that is in `flushed`.
pub fn trained(plan: &Plan, weights: &Tensors, steps: u64, rate: f64, flushed: &[u64]) -> (Vec<f64>, Tensors, Session) {
    let mut devices = session(plan, &Options::default()).expect("a session");
    for (name, tensor) in weights {
        devices.load_parameter(name, tensor).expect("loaded");
    }
    let mut losses = Vec::new();
    for step in 1..=steps {
        devices.begin_step(&batch_of(plan, step), &scalars(rate, step)).expect("begun");
        if step > 1 && !flushed.contains(&(step - 1)) {
            losses.push(devices.end_step().expect("a step").loss);
        }
        if flushed.contains(&step) || step == steps {
            losses.push(devices.end_step().expect("a step").loss);
            devices.flush().expect("flushed");
        }
    }
    let names = devices.parameters();
    let updated = names.iter().map(|name| (name.clone(), devices.parameter(name).expect("a parameter"))).collect();
    (losses, updated, devices)
}
