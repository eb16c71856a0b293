//! Optimizer updates as graphs: elementwise ops on a parameter, its gradient and its state.
//!
//! An update is the same for every shard of a parameter. So it is written once for a local shape and runs under any
//! storage sharding. If it needs a sum over the whole tensor, the caller provides the sum over shards. State is f32, or
//! f64 for f64 parameters. Parameters of less than single precision have an f32 master copy, which is updated and then
//! rounded.

use crate::dtype::DType;
use crate::graph::{Graph, ValueId};
use crate::op::{Binary, Direction, Input, Op, Reducer, Unary};
use crate::types::TensorType;
use serde::{Deserialize, Serialize};

/// An optimizer and its settings.
///
/// LARS, LARC and LAMB scale the step of each parameter by a ratio of norms over the whole tensor, however it is
/// sharded. The ratio is 1 if one of the norms is 0. By default, parameters of one dimension (biases and gains) have no
/// ratio and step by the learning rate alone.
///
/// The papers write a ratio for every layer. Their implementations omit it for such parameters, which may start at
/// zero. LAMB's for BERT excludes them by name, and LARS's for ResNet-50 excludes batch normalisation and biases.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Optimizer {
    /// `u = momentum * u + g + weight_decay * p; p -= lr * u`. With zero momentum there is no state.
    Sgd { momentum: f64, weight_decay: f64 },
    /// Nesterov momentum (Sutskever et al. 2013, equation 7, in the form that frameworks use):
    /// `u = momentum * u + g + weight_decay * p; p -= lr * (g + weight_decay * p + momentum * u)`.
    Nesterov { momentum: f64, weight_decay: f64 },
    /// Adam (Kingma & Ba 2015), with decay added to the gradient.
    Adam {
        beta1: f64,
        beta2: f64,
        epsilon: f64,
        weight_decay: f64,
        /// True if averages are divided by `1 - beta^step`.
        #[serde(default = "yes")]
        bias_correction: bool,
    },
    /// AdamW (Loshchilov & Hutter 2019), with decay applied to the parameter.
    Adamw {
        beta1: f64,
        beta2: f64,
        epsilon: f64,
        weight_decay: f64,
        #[serde(default = "yes")]
        bias_correction: bool,
    },
    /// RMSProp (Tieleman & Hinton 2012, lecture 6.5), with decay added to the gradient:
    /// `v = decay * v + (1 - decay) * g^2`, `u = momentum * u + g / (sqrt(v) + epsilon)`, `p -= lr * u`.
    Rmsprop {
        decay: f64,
        epsilon: f64,
        momentum: f64,
        weight_decay: f64,
        /// True to use `sqrt(v + epsilon)` instead of `sqrt(v) + epsilon`.
        #[serde(default, skip_serializing_if = "is_false")]
        epsilon_in_root: bool,
    },
    /// Adagrad (Duchi, Hazan & Singer 2011), with decay added to the gradient:
    /// `s += g^2; p -= lr * g / (sqrt(s) + epsilon)`.
    Adagrad {
        epsilon: f64,
        weight_decay: f64,
        /// True to use `sqrt(s + epsilon)` instead of `sqrt(s) + epsilon`.
        #[serde(default, skip_serializing_if = "is_false")]
        epsilon_in_root: bool,
    },
    /// Adadelta (Zeiler 2012, algorithm 1), with decay added to the gradient: `v = rho * v + (1 - rho) * g^2`,
    /// `d = g * sqrt(u + epsilon) / sqrt(v + epsilon)`, `u = rho * u + (1 - rho) * d^2`, `p -= lr * d`. Its usual
    /// learning rate is 1.
    Adadelta { rho: f64, epsilon: f64, weight_decay: f64 },
    /// LARS (You, Gitman & Ginsburg 2017, algorithm 1): `r = trust * |p| / (|g| + weight_decay * |p|)`,
    /// `u = momentum * u + lr * r * (g + weight_decay * p)`, `p -= u`.
    Lars {
        momentum: f64,
        weight_decay: f64,
        trust: f64,
        /// True if parameters of fewer than two dimensions use the ratio too.
        #[serde(default, skip_serializing_if = "is_false")]
        ratio_of_all: bool,
    },
    /// LARC (Ginsburg, Gitman & You 2018): LARS with a layer's rate limited to the given one.
    /// `r = min(trust * |p| / (|g| + weight_decay * |p|), lr)`, `u = momentum * u + r * (g + weight_decay * p)`,
    /// `p -= u`.
    Larc { momentum: f64, weight_decay: f64, trust: f64 },
    /// LAMB (You et al. 2020, algorithm 2, with the identity for its phi):
    /// `d = m_hat / (sqrt(v_hat) + epsilon) + weight_decay * p` with Adam's averages, `p -= lr * |p| / |d| * d`.
    Lamb {
        beta1: f64,
        beta2: f64,
        epsilon: f64,
        weight_decay: f64,
        /// True if parameters of fewer than two dimensions use the ratio too.
        #[serde(default, skip_serializing_if = "is_false")]
        ratio_of_all: bool,
    },
}

fn yes() -> bool {
    true
}

fn is_false(flag: &bool) -> bool {
    !flag
}

impl Optimizer {
    /// The names of all optimizers.
    pub const NAMES: [&str; 10] =
        ["sgd", "nesterov", "adam", "adamw", "rmsprop", "adagrad", "adadelta", "lars", "larc", "lamb"];

    pub fn sgd() -> Self {
        Optimizer::Sgd { momentum: 0.9, weight_decay: 0.0 }
    }

    pub fn adam() -> Self {
        Optimizer::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0, bias_correction: true }
    }

    pub fn adamw() -> Self {
        Optimizer::Adamw { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.01, bias_correction: true }
    }

    /// The optimizer of this name with default settings: those of its paper, or PyTorch's if the paper has none.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "sgd" => Some(Optimizer::sgd()),
            "nesterov" => Some(Optimizer::Nesterov { momentum: 0.9, weight_decay: 0.0 }),
            "adam" => Some(Optimizer::adam()),
            "adamw" => Some(Optimizer::adamw()),
            "rmsprop" => Some(Optimizer::Rmsprop {
                decay: 0.99,
                epsilon: 1e-8,
                momentum: 0.0,
                weight_decay: 0.0,
                epsilon_in_root: false,
            }),
            "adagrad" => Some(Optimizer::Adagrad { epsilon: 1e-10, weight_decay: 0.0, epsilon_in_root: false }),
            "adadelta" => Some(Optimizer::Adadelta { rho: 0.95, epsilon: 1e-6, weight_decay: 0.0 }),
            "lars" => Some(Optimizer::Lars { momentum: 0.9, weight_decay: 5e-4, trust: 1e-3, ratio_of_all: false }),
            "larc" => Some(Optimizer::Larc { momentum: 0.9, weight_decay: 5e-4, trust: 1e-3 }),
            "lamb" => Some(Optimizer::Lamb {
                beta1: 0.9,
                beta2: 0.999,
                epsilon: 1e-6,
                weight_decay: 0.01,
                ratio_of_all: false,
            }),
            _ => None,
        }
    }

    pub fn name(&self) -> &'static str {
        match self {
            Optimizer::Sgd { .. } => "sgd",
            Optimizer::Nesterov { .. } => "nesterov",
            Optimizer::Adam { .. } => "adam",
            Optimizer::Adamw { .. } => "adamw",
            Optimizer::Rmsprop { .. } => "rmsprop",
            Optimizer::Adagrad { .. } => "adagrad",
            Optimizer::Adadelta { .. } => "adadelta",
            Optimizer::Lars { .. } => "lars",
            Optimizer::Larc { .. } => "larc",
            Optimizer::Lamb { .. } => "lamb",
        }
    }

    /// Returns true if a zero element without gradient stays zero. Without a positive epsilon, it would be divided by
    /// the root of its zero state.
    pub fn keeps_zeros(&self) -> bool {
        let mut settings = *self;
        settings.setting("epsilon").is_none_or(|epsilon| *epsilon > 1e-30)
    }

    /// The names of all numeric settings.
    pub const SETTINGS: [&str; 8] = ["momentum", "beta1", "beta2", "epsilon", "weight_decay", "decay", "rho", "trust"];

    /// A setting by its name, one of [`Optimizer::SETTINGS`]. `None` if this optimizer does not have it.
    ///
    /// ```
    /// use altiplano_ir::optimizer::Optimizer;
    ///
    /// let mut sgd = Optimizer::sgd();
    /// *sgd.setting("momentum").expect("SGD has a momentum") = 0.8;
    /// assert_eq!(sgd, Optimizer::Sgd { momentum: 0.8, weight_decay: 0.0 });
    /// assert!(sgd.setting("beta1").is_none());
    /// ```
    pub fn setting(&mut self, name: &str) -> Option<&mut f64> {
        use Optimizer::{Adadelta, Adagrad, Adam, Adamw, Lamb, Larc, Lars, Nesterov, Rmsprop, Sgd};
        match (name, self) {
            (
                "momentum",
                Sgd { momentum: x, .. }
                | Nesterov { momentum: x, .. }
                | Rmsprop { momentum: x, .. }
                | Lars { momentum: x, .. }
                | Larc { momentum: x, .. },
            )
            | ("beta1", Adam { beta1: x, .. } | Adamw { beta1: x, .. } | Lamb { beta1: x, .. })
            | ("beta2", Adam { beta2: x, .. } | Adamw { beta2: x, .. } | Lamb { beta2: x, .. })
            | (
                "epsilon",
                Adam { epsilon: x, .. }
                | Adamw { epsilon: x, .. }
                | Rmsprop { epsilon: x, .. }
                | Adagrad { epsilon: x, .. }
                | Adadelta { epsilon: x, .. }
                | Lamb { epsilon: x, .. },
            )
            | (
                "weight_decay",
                Sgd { weight_decay: x, .. }
                | Nesterov { weight_decay: x, .. }
                | Adam { weight_decay: x, .. }
                | Adamw { weight_decay: x, .. }
                | Rmsprop { weight_decay: x, .. }
                | Adagrad { weight_decay: x, .. }
                | Adadelta { weight_decay: x, .. }
                | Lars { weight_decay: x, .. }
                | Larc { weight_decay: x, .. }
                | Lamb { weight_decay: x, .. },
            )
            | ("decay", Rmsprop { decay: x, .. })
            | ("rho", Adadelta { rho: x, .. })
            | ("trust", Lars { trust: x, .. } | Larc { trust: x, .. }) => Some(x),
            _ => None,
        }
    }

    /// The type of a parameter's state, in which the update is computed: the parameter's type, but at least single
    /// precision.
    pub fn state_type(parameter: DType) -> DType {
        if parameter == DType::F64 { DType::F64 } else { DType::F32 }
    }

    /// The names of the state tensors of a parameter of this type, each of [`Optimizer::state_type`].
    pub fn slots(&self, parameter: DType) -> Vec<&'static str> {
        let master = (parameter != Optimizer::state_type(parameter)).then_some("master");
        self.moments().iter().copied().chain(master).collect()
    }

    /// The state tensors that every parameter has, whatever its type.
    fn moments(&self) -> &'static [&'static str] {
        match self {
            Optimizer::Sgd { momentum, .. } if *momentum == 0.0 => &[],
            Optimizer::Sgd { .. } | Optimizer::Nesterov { .. } => &["momentum"],
            Optimizer::Lars { .. } | Optimizer::Larc { .. } => &["momentum"],
            Optimizer::Adam { .. } | Optimizer::Adamw { .. } | Optimizer::Lamb { .. } => &["m", "v"],
            Optimizer::Rmsprop { momentum, .. } if *momentum == 0.0 => &["v"],
            Optimizer::Rmsprop { .. } => &["v", "momentum"],
            Optimizer::Adagrad { .. } => &["sum"],
            Optimizer::Adadelta { .. } => &["v", "u"],
        }
    }

    /// The bytes of state per element of a parameter.
    pub fn state_bytes_per_element(&self, parameter: DType) -> u64 {
        let state = Optimizer::state_type(parameter);
        let tensors = self.moments().len() + usize::from(parameter != state);
        state.bytes() * tensors as u64
    }
}

/// The inputs of the update of a parameter shard.
pub struct Given<'a> {
    pub parameter: ValueId,
    /// The sum over microbatches, and the factor that turns it into the mean.
    pub gradient: ValueId,
    pub gradient_scale: f64,
    /// A scalar that also multiplies the gradient, if it is clipped or the loss was scaled.
    pub factor: Option<ValueId>,
    /// The states, in the order of [`Optimizer::slots`].
    pub states: &'a [ValueId],
    /// The learning rate and the step as f32 scalars.
    pub learning_rate: ValueId,
    pub step: ValueId,
    /// Sums a local scalar over all shards of the tensor.
    pub whole: &'a dyn Fn(&mut Graph, ValueId) -> ValueId,
}

/// The results of the update of one parameter shard.
pub struct Update {
    pub parameter: ValueId,
    pub states: Vec<ValueId>,
}

/// The factor that limits the norm of gradients to `most`: `min(1, most / (norm + 1e-6))` (Pascanu, Mikolov & Bengio
/// 2013, algorithm 1, with the constant of PyTorch's `clip_grad_norm_`). `squares` is the sum of the squares of all
/// gradients.
pub fn clip_factor(graph: &mut Graph, squares: ValueId, most: f64) -> ValueId {
    let norm = graph.unary(Unary::Sqrt, squares);
    let little = graph.splat_like(norm, 1e-6);
    let norm = graph.add(norm, little);
    let most = graph.splat_like(norm, most);
    let factor = graph.div(most, norm);
    let one = graph.splat_like(factor, 1.0);
    graph.emit(Op::Binary(Binary::Minimum), &[factor, one])
}

/// The sum of the squares of a local tensor, times `factor`, as an f32 scalar.
pub fn squares(graph: &mut Graph, x: ValueId, factor: f64) -> ValueId {
    // Squares leave the range of half precision long before the numbers themselves do.
    let mut x = graph.convert(x, DType::F32);
    if factor != 1.0 {
        x = scale(graph, x, factor);
    }
    let square = graph.mul(x, x);
    let dims: Vec<usize> = (0..graph.ty(square).rank()).collect();
    graph.reduce(square, Reducer::Sum, &dims)
}

/// Appends the update of a parameter shard to `graph`.
pub fn update(graph: &mut Graph, optimizer: &Optimizer, given: &Given<'_>) -> Update {
    let parameter = given.parameter;
    let dtype = graph.ty(parameter).dtype;
    let shape = graph.shape(parameter).to_vec();
    let slots = optimizer.slots(dtype);
    let master = slots.iter().position(|s| *s == "master").map(|i| given.states[i]);
    let weights = master.unwrap_or(parameter);
    let compute = graph.ty(weights).dtype;
    let mut gradient = graph.convert(given.gradient, compute);
    if given.gradient_scale != 1.0 {
        gradient = scale(graph, gradient, given.gradient_scale);
    }
    if let Some(factor) = given.factor {
        let factor = graph.convert(factor, compute);
        let factor = graph.broadcast_scalar(factor, &shape);
        gradient = graph.mul(gradient, factor);
    }
    let rate = graph.convert(given.learning_rate, compute);
    let rates = graph.broadcast_scalar(rate, &shape);
    let mut terms = Terms { given, slots, shape, weights, gradient, rate, states: Vec::new() };
    let change = match *optimizer {
        Optimizer::Lars { momentum, weight_decay, trust, ratio_of_all } => {
            terms.change_by_trust(graph, optimizer, [momentum, weight_decay, trust], ratio_of_all)
        }
        Optimizer::Larc { momentum, weight_decay, trust } => {
            terms.change_by_trust(graph, optimizer, [momentum, weight_decay, trust], false)
        }
        Optimizer::Lamb { ratio_of_all, .. } => {
            let direction = terms.direction(graph, optimizer);
            let rate = terms.rate_by_norms(graph, direction, ratio_of_all);
            graph.mul(rate, direction)
        }
        _ => {
            let direction = terms.direction(graph, optimizer);
            graph.mul(rates, direction)
        }
    };
    let new_weights = graph.sub(weights, change);
    let mut states = terms.states;
    if master.is_some() {
        states.push(new_weights);
    }
    Update { parameter: graph.convert(new_weights, dtype), states }
}

/// The tensors that an update is computed from, all of the weights' type.
struct Terms<'a> {
    given: &'a Given<'a>,
    slots: Vec<&'static str>,
    shape: Vec<u64>,
    weights: ValueId,
    gradient: ValueId,
    /// The learning rate, a scalar.
    rate: ValueId,
    /// The new states so far, in the order of [`Optimizer::slots`].
    states: Vec<ValueId>,
}

impl Terms<'_> {
    fn slot(&self, name: &str) -> Option<ValueId> {
        self.slots.iter().position(|s| *s == name).map(|i| self.given.states[i])
    }

    fn state(&self, name: &str) -> ValueId {
        self.slot(name).unwrap_or_else(|| unreachable!("the optimizer has the slot {name}"))
    }

    /// The tensor that a step subtracts from the weights, before it is scaled by the rate.
    fn direction(&mut self, graph: &mut Graph, optimizer: &Optimizer) -> ValueId {
        let weights = self.weights;
        match *optimizer {
            Optimizer::Sgd { momentum, weight_decay } => {
                let gradient = decayed(graph, self.gradient, weights, weight_decay);
                if self.slot("momentum").is_some() { self.velocity(graph, gradient, momentum) } else { gradient }
            }
            Optimizer::Nesterov { momentum, weight_decay } => {
                let gradient = decayed(graph, self.gradient, weights, weight_decay);
                let velocity = self.velocity(graph, gradient, momentum);
                moved(graph, velocity, gradient, momentum)
            }
            Optimizer::Adam { beta1, beta2, epsilon, weight_decay, bias_correction } => {
                let gradient = decayed(graph, self.gradient, weights, weight_decay);
                self.adam(graph, gradient, [beta1, beta2], epsilon, bias_correction)
            }
            Optimizer::Adamw { beta1, beta2, epsilon, weight_decay, bias_correction } => {
                let direction = self.adam(graph, self.gradient, [beta1, beta2], epsilon, bias_correction);
                decayed(graph, direction, weights, weight_decay)
            }
            Optimizer::Lamb { beta1, beta2, epsilon, weight_decay, .. } => {
                let direction = self.adam(graph, self.gradient, [beta1, beta2], epsilon, true);
                decayed(graph, direction, weights, weight_decay)
            }
            Optimizer::Rmsprop { decay, epsilon, momentum, weight_decay, epsilon_in_root } => {
                let gradient = decayed(graph, self.gradient, weights, weight_decay);
                let square = graph.mul(gradient, gradient);
                let v = average(graph, self.state("v"), square, decay);
                self.states.push(v);
                let direction = by_root(graph, gradient, v, epsilon, epsilon_in_root);
                if self.slot("momentum").is_some() { self.velocity(graph, direction, momentum) } else { direction }
            }
            Optimizer::Adagrad { epsilon, weight_decay, epsilon_in_root } => {
                let gradient = decayed(graph, self.gradient, weights, weight_decay);
                let square = graph.mul(gradient, gradient);
                let sum = graph.add(self.state("sum"), square);
                self.states.push(sum);
                by_root(graph, gradient, sum, epsilon, epsilon_in_root)
            }
            Optimizer::Adadelta { rho, epsilon, weight_decay } => {
                let gradient = decayed(graph, self.gradient, weights, weight_decay);
                self.adadelta(graph, gradient, rho, epsilon)
            }
            Optimizer::Lars { weight_decay, .. } | Optimizer::Larc { weight_decay, .. } => {
                decayed(graph, self.gradient, weights, weight_decay)
            }
        }
    }

    /// The new momentum.
    fn velocity(&mut self, graph: &mut Graph, new: ValueId, momentum: f64) -> ValueId {
        let velocity = moved(graph, self.state("momentum"), new, momentum);
        self.states.push(velocity);
        velocity
    }

    /// Adam's direction. Its new averages `m` and `v` become states.
    fn adam(
        &mut self,
        graph: &mut Graph,
        gradient: ValueId,
        [beta1, beta2]: [f64; 2],
        epsilon: f64,
        bias_correction: bool,
    ) -> ValueId {
        let m = average(graph, self.state("m"), gradient, beta1);
        let square = graph.mul(gradient, gradient);
        let v = average(graph, self.state("v"), square, beta2);
        self.states.extend([m, v]);
        let (mut m_hat, mut v_hat) = (m, v);
        if bias_correction {
            m_hat = unbiased(graph, m, beta1, self.given.step, &self.shape);
            v_hat = unbiased(graph, v, beta2, self.given.step, &self.shape);
        }
        by_root(graph, m_hat, v_hat, epsilon, false)
    }

    fn adadelta(&mut self, graph: &mut Graph, gradient: ValueId, rho: f64, epsilon: f64) -> ValueId {
        let square = graph.mul(gradient, gradient);
        let v = average(graph, self.state("v"), square, rho);
        let root = |graph: &mut Graph, x: ValueId| {
            let epsilon = graph.splat_like(x, epsilon);
            let sum = graph.add(x, epsilon);
            graph.unary(Unary::Sqrt, sum)
        };
        let (of_steps, of_gradients) = (root(graph, self.state("u")), root(graph, v));
        let ratio = graph.div(of_steps, of_gradients);
        let direction = graph.mul(gradient, ratio);
        let square = graph.mul(direction, direction);
        let u = average(graph, self.state("u"), square, rho);
        self.states.extend([v, u]);
        direction
    }

    /// Returns true if the step of this parameter is scaled by a ratio of norms.
    fn has_ratio(&self, ratio_of_all: bool) -> bool {
        ratio_of_all || self.shape.len() > 1
    }

    /// The change of LARS and LARC.
    fn change_by_trust(
        &mut self,
        graph: &mut Graph,
        optimizer: &Optimizer,
        [momentum, weight_decay, trust]: [f64; 3],
        ratio_of_all: bool,
    ) -> ValueId {
        let mut rate = self.rate;
        if self.has_ratio(ratio_of_all) {
            let [of_weights, of_gradient] = [self.weights, self.gradient].map(|x| norm(graph, x, self.given.whole));
            let denominator = decayed(graph, of_gradient, of_weights, weight_decay);
            let numerator = scale(graph, of_weights, trust);
            let ratio = where_positive(graph, numerator, denominator, [of_weights, of_gradient]);
            let ratio = graph.convert(ratio, graph.ty(rate).dtype);
            let is_limited = matches!(optimizer, Optimizer::Larc { .. });
            let op = if is_limited { Binary::Minimum } else { Binary::Multiply };
            rate = graph.emit(Op::Binary(op), &[ratio, rate]);
        }
        let rate = graph.broadcast_scalar(rate, &self.shape);
        let direction = self.direction(graph, optimizer);
        let change = graph.mul(rate, direction);
        self.velocity(graph, change, momentum)
    }

    /// LAMB's rate for each element.
    fn rate_by_norms(&self, graph: &mut Graph, direction: ValueId, ratio_of_all: bool) -> ValueId {
        let mut rate = self.rate;
        if self.has_ratio(ratio_of_all) {
            let [of_weights, of_direction] = [self.weights, direction].map(|x| norm(graph, x, self.given.whole));
            let ratio = where_positive(graph, of_weights, of_direction, [of_weights, of_direction]);
            let ratio = graph.convert(ratio, graph.ty(rate).dtype);
            rate = graph.mul(rate, ratio);
        }
        graph.broadcast_scalar(rate, &self.shape)
    }
}

/// `x / (sqrt(square) + epsilon)`, or `x / sqrt(square + epsilon)`.
fn by_root(graph: &mut Graph, x: ValueId, square: ValueId, epsilon: f64, in_root: bool) -> ValueId {
    if in_root {
        let epsilon = graph.splat_like(square, epsilon);
        let sum = graph.add(square, epsilon);
        let root = graph.unary(Unary::Sqrt, sum);
        return graph.div(x, root);
    }
    let root = graph.unary(Unary::Sqrt, square);
    let epsilon = graph.splat_like(root, epsilon);
    let denominator = graph.add(root, epsilon);
    graph.div(x, denominator)
}

/// The norm of the whole tensor that `x` is a shard of, as an f32 scalar.
fn norm(graph: &mut Graph, x: ValueId, whole: &dyn Fn(&mut Graph, ValueId) -> ValueId) -> ValueId {
    let local = squares(graph, x, 1.0);
    let sum = whole(graph, local);
    graph.unary(Unary::Sqrt, sum)
}

/// `numerator / denominator`, or 1 if one of the norms is 0.
fn where_positive(graph: &mut Graph, numerator: ValueId, denominator: ValueId, norms: [ValueId; 2]) -> ValueId {
    let least = graph.emit(Op::Binary(Binary::Minimum), &norms);
    let zero = graph.splat_like(least, 0.0);
    let one = graph.splat_like(least, 1.0);
    let positive = graph.compare(Direction::Gt, least, zero);
    let ratio = graph.div(numerator, denominator);
    graph.select(positive, ratio, one)
}

/// `momentum * old + new`.
fn moved(graph: &mut Graph, old: ValueId, new: ValueId, momentum: f64) -> ValueId {
    let kept = scale(graph, old, momentum);
    graph.add(kept, new)
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

#[cfg(test)]
#[path = "optimizer_tests.rs"]
mod tests;
