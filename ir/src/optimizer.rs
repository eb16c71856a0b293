//! Optimizer updates as graphs: elementwise ops on a parameter, its gradient and its state.
//!
//! An update is the same for every shard of a parameter, so it is written once for a local shape and runs under
//! any storage sharding. State is f32; parameters of half precision keep an f32 master copy that is updated and
//! then rounded.

use crate::dtype::DType;
use crate::graph::{Graph, ValueId};
use crate::op::{Binary, Input, Op, Unary};
use crate::types::TensorType;
use serde::{Deserialize, Serialize};

/// How parameters are updated from gradients.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Optimizer {
    /// `u = momentum * u + g + weight_decay * p; p -= lr * u`. Without momentum there is no state.
    Sgd { momentum: f64, weight_decay: f64 },
    /// Adam (Kingma & Ba 2015), decay added to the gradient.
    Adam {
        beta1: f64,
        beta2: f64,
        epsilon: f64,
        weight_decay: f64,
        /// Averages are divided by `1 - beta^step`.
        #[serde(default = "yes")]
        bias_correction: bool,
    },
    /// AdamW (Loshchilov & Hutter 2019), decay applied to the parameter.
    Adamw {
        beta1: f64,
        beta2: f64,
        epsilon: f64,
        weight_decay: f64,
        #[serde(default = "yes")]
        bias_correction: bool,
    },
}

fn yes() -> bool {
    true
}

impl Optimizer {
    pub fn sgd() -> Self {
        Optimizer::Sgd { momentum: 0.9, weight_decay: 0.0 }
    }

    pub fn adam() -> Self {
        Optimizer::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0, bias_correction: true }
    }

    pub fn adamw() -> Self {
        Optimizer::Adamw { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.01, bias_correction: true }
    }

    /// The default settings of the optimizer of this name.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "sgd" => Some(Optimizer::sgd()),
            "adam" => Some(Optimizer::adam()),
            "adamw" => Some(Optimizer::adamw()),
            _ => None,
        }
    }

    pub fn name(&self) -> &'static str {
        match self {
            Optimizer::Sgd { .. } => "sgd",
            Optimizer::Adam { .. } => "adam",
            Optimizer::Adamw { .. } => "adamw",
        }
    }

    /// Names of the f32 state tensors that a parameter of this type has.
    pub fn slots(&self, parameter: DType) -> Vec<&'static str> {
        let mut slots = match self {
            Optimizer::Sgd { momentum, .. } if *momentum == 0.0 => vec![],
            Optimizer::Sgd { .. } => vec!["momentum"],
            Optimizer::Adam { .. } | Optimizer::Adamw { .. } => vec!["m", "v"],
        };
        if parameter.is_half() {
            slots.push("master");
        }
        slots
    }

    /// Bytes of state of one element of a parameter.
    pub fn state_bytes_per_element(&self, parameter: DType) -> u64 {
        4 * self.slots(parameter).len() as u64
    }
}

/// The update of one parameter shard.
pub struct Update {
    pub parameter: ValueId,
    pub states: Vec<ValueId>,
}

/// Appends the update of a parameter shard to `graph`. `gradient` is the sum over microbatches and `gradient_scale`
/// what turns it into the mean; `states` are in the order of [`Optimizer::slots`]; `learning_rate` and `step` are
/// f32 scalars.
#[allow(clippy::too_many_arguments)]
pub fn update(
    graph: &mut Graph,
    optimizer: &Optimizer,
    parameter: ValueId,
    gradient: ValueId,
    gradient_scale: f64,
    states: &[ValueId],
    learning_rate: ValueId,
    step: ValueId,
) -> Update {
    let dtype = graph.ty(parameter).dtype;
    let shape = graph.shape(parameter).to_vec();
    let slots = optimizer.slots(dtype);
    let slot = |name: &str| slots.iter().position(|s| *s == name).map(|i| states[i]);
    let half = dtype.is_half();
    let weights = if half { slot("master").unwrap_or(parameter) } else { parameter };
    let compute = graph.ty(weights).dtype;
    let mut grad = graph.convert(gradient, compute);
    if gradient_scale != 1.0 {
        grad = scale(graph, grad, gradient_scale);
    }
    let lr = graph.convert(learning_rate, compute);
    let lr = graph.broadcast_scalar(lr, &shape);

    let mut new_states = Vec::new();
    let new_weights = match *optimizer {
        Optimizer::Sgd { momentum, weight_decay } => {
            grad = decayed(graph, grad, weights, weight_decay);
            let direction = match slot("momentum") {
                Some(old) => {
                    let kept = scale(graph, old, momentum);
                    let velocity = graph.add(kept, grad);
                    new_states.push(velocity);
                    velocity
                }
                None => grad,
            };
            let change = graph.mul(lr, direction);
            graph.sub(weights, change)
        }
        Optimizer::Adam { beta1, beta2, epsilon, weight_decay, bias_correction }
        | Optimizer::Adamw { beta1, beta2, epsilon, weight_decay, bias_correction } => {
            let decoupled = matches!(optimizer, Optimizer::Adamw { .. });
            if !decoupled {
                grad = decayed(graph, grad, weights, weight_decay);
            }
            let (Some(m), Some(v)) = (slot("m"), slot("v")) else {
                unreachable!("Adam has the slots m and v");
            };
            let m = average(graph, m, grad, beta1);
            let square = graph.mul(grad, grad);
            let v = average(graph, v, square, beta2);
            new_states.extend([m, v]);
            let (mut m_hat, mut v_hat) = (m, v);
            if bias_correction {
                m_hat = unbiased(graph, m, beta1, step, &shape);
                v_hat = unbiased(graph, v, beta2, step, &shape);
            }
            let root = graph.unary(Unary::Sqrt, v_hat);
            let epsilon = graph.splat_like(root, epsilon);
            let denominator = graph.add(root, epsilon);
            let mut direction = graph.div(m_hat, denominator);
            if decoupled && weight_decay != 0.0 {
                direction = decayed(graph, direction, weights, weight_decay);
            }
            let change = graph.mul(lr, direction);
            graph.sub(weights, change)
        }
    };
    if half {
        new_states.push(new_weights);
    }
    Update { parameter: graph.convert(new_weights, dtype), states: new_states }
}

fn scale(graph: &mut Graph, x: ValueId, factor: f64) -> ValueId {
    let factor = graph.splat_like(x, factor);
    graph.mul(x, factor)
}

/// `x + decay * weights`.
fn decayed(graph: &mut Graph, x: ValueId, weights: ValueId, decay: f64) -> ValueId {
    if decay == 0.0 {
        return x;
    }
    let pull = scale(graph, weights, decay);
    graph.add(x, pull)
}

/// `beta * old + (1 - beta) * new`.
fn average(graph: &mut Graph, old: ValueId, new: ValueId, beta: f64) -> ValueId {
    let old = scale(graph, old, beta);
    let new = scale(graph, new, 1.0 - beta);
    graph.add(old, new)
}

/// `x / (1 - beta^step)`.
fn unbiased(graph: &mut Graph, x: ValueId, beta: f64, step: ValueId, shape: &[u64]) -> ValueId {
    let dtype = graph.ty(x).dtype;
    let step = graph.convert(step, dtype);
    let beta = graph.splat_like(step, beta);
    let power = graph.emit(Op::Binary(Binary::Power), &[beta, step]);
    let one = graph.splat_like(power, 1.0);
    let rest = graph.sub(one, power);
    let rest = graph.broadcast_scalar(rest, shape);
    graph.div(x, rest)
}

/// A leaf of a body: a local tensor that the executor binds to a buffer.
pub fn leaf(graph: &mut Graph, name: impl Into<String>, ty: TensorType) -> ValueId {
    graph.emit(Op::Input(Input { name: name.into(), ty }), &[])
}
