//! Identifies the optimizer of updates. Its settings are derived from chosen points and then confirmed at others.

use super::lanes::{Lanes, Value, evaluate, value_of};
use super::{Fitted, TrainedParameter};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::Op;
use altiplano_ir::optimizer::{Given, Optimizer, leaf, update};
use altiplano_ir::types::TensorType;
use std::collections::BTreeMap;

/// The step counts at which an update is tried out.
const STEPS: [f64; 5] = [0.0, 1.0, 9.0, 99.0, 999.0];
/// The number of points per step at which an update is compared.
const POINTS: u32 = 7;
const TOLERANCE: f64 = 1e-5;

/// The optimizer of all parameters.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Found {
    pub fitted: Fitted,
    /// The parameters that weight decay excludes.
    pub no_decay: Vec<ValueId>,
}

/// The optimizer of all these updates. `None` if this crate does not have it, or if it is not the same for all.
pub(crate) fn fit(graph: &Graph, parameters: &[TrainedParameter], counts: &[ValueId]) -> Option<Found> {
    let clip_norm = match parameters.iter().any(|p| p.gradient != p.applied) {
        true => Some(clip_norm(graph, parameters)?),
        false => None,
    };
    let mut trials: Vec<Trial<'_>> = Vec::new();
    let mut candidates: Vec<Candidate> = Vec::new();
    for p in parameters {
        let trial = Trial::new(graph, parameters, p, counts)?;
        for candidate in trial.candidates() {
            if !candidates.contains(&candidate) {
                candidates.push(candidate);
            }
        }
        trials.push(trial);
    }
    // Averages without bias correction look like corrected ones on a schedule. So where a schedule is allowed, candidates
    // are tried in reverse, corrected ones first.
    let in_turn = candidates.iter().map(|c| (c, false)).chain(candidates.iter().rev().map(|c| (c, true)));
    for (candidate, may_follow_schedule) in in_turn {
        let mut no_decay = Vec::new();
        let mut scheduled = false;
        let fits = trials.iter().all(|trial| {
            let plain = candidate.without_decay();
            let (rates, decays) = match (trial.rates(candidate), &plain) {
                (Some(rates), _) => (rates, true),
                (None, Some(plain)) => match trial.rates(plain) {
                    Some(rates) => (rates, false),
                    None => return false,
                },
                (None, None) => return false,
            };
            if !decays {
                no_decay.push(trial.p.parameter);
            }
            let varies = rates.iter().any(|r| (r - 1.0).abs() > 1e-4);
            scheduled |= varies;
            may_follow_schedule || !varies
        });
        if fits {
            let Candidate { mut optimizer, learning_rate, .. } = *candidate;
            // Without decay, Adam and AdamW are the same.
            if let Optimizer::Adamw { beta1, beta2, epsilon, weight_decay: 0.0, bias_correction } = optimizer {
                optimizer = Optimizer::Adam { beta1, beta2, epsilon, weight_decay: 0.0, bias_correction };
            }
            return Some(Found { fitted: Fitted { optimizer, learning_rate, scheduled, clip_norm }, no_decay });
        }
    }
    None
}

/// The norm at which all gradients together are clipped before the update reads them.
fn clip_norm(graph: &Graph, parameters: &[TrainedParameter]) -> Option<f64> {
    let raw = |scale: f64| -> Option<(BTreeMap<ValueId, Value>, f64)> {
        let (mut given, mut squares) = (BTreeMap::new(), 0.0);
        for (i, p) in (0u32..).zip(parameters) {
            let lanes = [number(i, 0) * scale, number(i, 1) * scale];
            let value = value_of(graph, p.gradient?, lanes);
            squares += match value {
                Value::One(x) => x * x,
                Value::Two([a, b]) => a * a + b * b,
            };
            given.insert(p.gradient?, value);
        }
        Some((given, squares.sqrt()))
    };
    let applied: Option<Vec<ValueId>> = parameters.iter().map(|p| p.applied).collect();
    let applied = applied?;
    let factors = |scale: f64| -> Option<(Vec<f64>, f64)> {
        let (given, norm) = raw(scale)?;
        let clipped = evaluate(graph, &applied, &given)?;
        let factor = |(p, clipped): (&TrainedParameter, &Lanes)| -> Option<[f64; 2]> {
            let raw = given[&p.gradient?].lanes();
            Some([clipped[0] / raw[0], clipped[1] / raw[1]])
        };
        let factors: Option<Vec<[f64; 2]>> = parameters.iter().zip(&clipped).map(factor).collect();
        Some((factors?.concat(), norm))
    };
    let (large, norm) = factors(1e6)?;
    let most = decimal(large.first()? * norm);
    for share in [1e-3, 0.3, 3.0, 1e3] {
        let (_, unit) = raw(1.0)?;
        let (factors, norm) = factors(most * share / unit)?;
        let expected = (most / norm).min(1.0);
        if !factors.iter().all(|f| (f - expected).abs() <= TOLERANCE * expected) {
            return None;
        }
    }
    (most > 0.0 && most.is_finite()).then_some(most)
}

/// An optimizer that an update may have.
#[derive(Clone, Debug, PartialEq)]
struct Candidate {
    optimizer: Optimizer,
    learning_rate: f64,
    /// The factor of each state relative to the optimizer's own.
    scales: Vec<f64>,
    /// The order of the states in the update.
    order: Vec<usize>,
}

impl Candidate {
    fn without_decay(&self) -> Option<Candidate> {
        let mut plain = self.clone();
        let decay = plain.optimizer.setting("weight_decay").filter(|decay| **decay != 0.0)?;
        *decay = 0.0;
        Some(plain)
    }
}

/// One parameter's update, to be tried out.
struct Trial<'a> {
    graph: &'a Graph,
    p: &'a TrainedParameter,
    /// Other values that the update may read: gradients of other parameters.
    others: BTreeMap<ValueId, Value>,
    counts: &'a [ValueId],
    /// The first of [`STEPS`] in which the weight moves.
    base: f64,
}

/// The inputs at which an update is tried out.
#[derive(Clone, Debug)]
struct Point {
    weight: Lanes,
    states: Vec<Lanes>,
    gradient: Lanes,
}

impl<'a> Trial<'a> {
    fn new(
        graph: &'a Graph,
        parameters: &[TrainedParameter],
        p: &'a TrainedParameter,
        counts: &'a [ValueId],
    ) -> Option<Trial<'a>> {
        let others = parameters.iter().flat_map(|other| other.gradient.into_iter().chain(other.applied));
        let others = others.map(|v| (v, value_of(graph, v, [0.1, 0.2]))).collect();
        let mut trial = Trial { graph, p, others, counts, base: 0.0 };
        let point = trial.point(3);
        let moves = |trial: &Trial<'_>, steps: f64| {
            Some(trial.at(steps, &point)?[0] != value_of(graph, p.parameter, point.weight).lanes())
        };
        for steps in STEPS {
            trial.base = steps;
            if moves(&trial, steps)? {
                return Some(trial);
            }
        }
        None
    }

    fn rank(&self) -> usize {
        self.graph.ty(self.p.parameter).rank()
    }

    /// The new weight, then the new states, after `steps` steps.
    fn at(&self, steps: f64, point: &Point) -> Option<Vec<Lanes>> {
        let mut given = self.others.clone();
        let mut give = |v: ValueId, lanes: Lanes| given.insert(v, value_of(self.graph, v, lanes));
        self.p.gradient.into_iter().chain(self.p.applied).for_each(|v| _ = give(v, point.gradient));
        give(self.p.parameter, point.weight);
        self.p.states.iter().zip(&point.states).for_each(|(&v, &lanes)| _ = give(v, lanes));
        self.counts.iter().for_each(|&v| _ = give(v, [steps, steps]));
        let wanted: Vec<ValueId> = [&[self.p.updated], self.p.updated_states.as_slice()].concat();
        evaluate(self.graph, &wanted, &given)
    }

    /// Point number `i`.
    fn point(&self, i: u32) -> Point {
        let lanes = |k: u32| [number(i, k), number(i + 5, k + 3)];
        let mut states: Vec<Lanes> =
            (0..self.p.states.len() as u32).map(|k| lanes(k + 2).map(|x| x.abs() + 0.01)).collect();
        match i {
            0 => {}
            // Values as small as epsilon, which show whether it is added within a root or outside.
            1 => {
                let states = states.into_iter().map(|state| state.map(|x| x * 1e-14)).collect();
                return Point { weight: lanes(0), states, gradient: lanes(1).map(|x| x * 1e-7) };
            }
            _ => return Point { weight: lanes(0), states, gradient: lanes(1) },
        }
        // Without a gradient only decay moves the weight, however small it is beside other steps.
        if let Some(first) = states.first_mut() {
            *first = [0.0; 2];
        }
        Point { weight: lanes(0), states, gradient: [0.0; 2] }
    }

    /// For each of [`STEPS`], how much farther the update moves than the candidate, equal at all points. `None` if the
    /// directions differ.
    fn rates(&self, candidate: &Candidate) -> Option<Vec<f64>> {
        let states = candidate.optimizer.slots(DType::F32).len();
        if states != self.p.states.len() || candidate.order.len() != states {
            return None;
        }
        let reference = Reference::new(&candidate.optimizer, self.rank());
        let mut rates = Vec::new();
        for steps in [self.base].into_iter().chain(STEPS.into_iter().filter(|s| *s != self.base)) {
            // At each point, the movement of the weight by the update and by the candidate.
            let mut moves: Vec<[Lanes; 2]> = Vec::new();
            for i in 0..POINTS {
                let point = self.point(i);
                let own = |k: usize| point.states[candidate.order[k]].map(|x| x / candidate.scales[k]);
                let states = (0..candidate.order.len()).map(own).collect();
                let expected =
                    reference.at(candidate.learning_rate, steps + 1.0, &Point { states, ..point.clone() })?;
                let found = self.at(steps, &point)?;
                for (k, &at) in candidate.order.iter().enumerate() {
                    let expected = expected[k + 1].map(|x| x * candidate.scales[k]);
                    if !(0..2).all(|l| near(found[at + 1][l], expected[l], TOLERANCE * expected[l].abs() + 1e-12)) {
                        return None;
                    }
                }
                let weight = value_of(self.graph, self.p.parameter, point.weight).lanes();
                let moved = |new: Lanes| [new[0] - weight[0], new[1] - weight[1]];
                moves.push([moved(found[0]), moved(expected[0])]);
            }
            if moves.iter().all(|[found, _]| *found == [0.0, 0.0]) {
                rates.push(0.0);
                continue;
            }
            let size = |lanes: Lanes| lanes[0].abs().max(lanes[1].abs());
            let [found, expected] = moves.iter().max_by(|a, b| size(a[1]).total_cmp(&size(b[1])))?;
            let rate =
                if expected[0].abs() >= expected[1].abs() { found[0] / expected[0] } else { found[1] / expected[1] };
            // Decay and gradient may cancel in one lane, where single-precision constants then show.
            let agrees = |[found, expected]: &[Lanes; 2]| {
                let allowed = 2.0 * TOLERANCE * size(*found) + 1e-15;
                (0..2).all(|l| near(found[l], rate * expected[l], allowed))
            };
            if !(rate > 0.0 && moves.iter().all(agrees)) {
                return None;
            }
            rates.push(rate);
        }
        // The first rate is that of the step in which the candidate was found.
        near(rates[0], 1.0, 1e-4).then_some(rates)
    }

    /// Optimizers with settings derived from a few points of the update.
    fn candidates(&self) -> Vec<Candidate> {
        let mut all = Vec::new();
        match self.p.states.len() {
            0 => self.of_no_state(&mut all),
            1 => self.of_one_state(&mut all),
            2 => {
                self.of_two_states(&mut all, [0, 1]);
                self.of_two_states(&mut all, [1, 0]);
            }
            _ => {}
        }
        for candidate in &mut all {
            candidate.learning_rate = decimal(candidate.learning_rate);
            for name in Optimizer::SETTINGS {
                if let Some(setting) = candidate.optimizer.setting(name) {
                    *setting = if setting.abs() < 1e-9 && name != "epsilon" { 0.0 } else { decimal(*setting) };
                }
            }
        }
        all.retain(|c| {
            let mut optimizer = c.optimizer;
            let in_range = |x: f64| x.is_finite() && x >= 0.0;
            let settings = Optimizer::SETTINGS.into_iter().filter_map(|name| optimizer.setting(name).copied());
            settings.collect::<Vec<_>>().into_iter().all(in_range)
                && c.learning_rate > 0.0
                && c.learning_rate.is_finite()
                && c.scales.iter().all(|s| *s != 0.0 && s.is_finite())
        });
        all
    }

    /// The first lane of the new weight and of the new states, in the step in which candidates are found.
    fn first(&self, weight: f64, states: &[f64], gradient: f64) -> Option<Vec<f64>> {
        let states = states.iter().map(|&s| [s, s]).collect();
        let point = Point { weight: [weight; 2], states, gradient: [gradient; 2] };
        Some(self.at(self.base, &point)?.iter().map(|lanes| lanes[0]).collect())
    }

    fn of_no_state(&self, all: &mut Vec<Candidate>) {
        let settings = || {
            let learning_rate = -self.first(0.0, &[], 1.0)?[0];
            Some((learning_rate, (1.0 - self.first(1.0, &[], 0.0)?[0]) / learning_rate))
        };
        if let Some((learning_rate, weight_decay)) = settings() {
            let optimizer = Optimizer::Sgd { momentum: 0.0, weight_decay };
            all.push(Candidate { optimizer, learning_rate, scales: Vec::new(), order: Vec::new() });
        }
    }

    fn of_one_state(&self, all: &mut Vec<Candidate>) {
        let mut add = |optimizer, learning_rate, scale| {
            all.push(Candidate { optimizer, learning_rate, scales: vec![scale], order: vec![0] });
        };
        let first = |weight: f64, state: f64, gradient: f64| {
            let new = self.first(weight, &[state], gradient)?;
            Some((new[0], new[1]))
        };
        let Some((_, kept)) = first(0.0, 1.0, 0.0) else { return };
        let (Some((step, added)), Some((_, decayed))) = (first(0.0, 0.0, 1.0), first(1.0, 0.0, 0.0)) else { return };
        let (momentum, step) = (kept, -step);
        // The state may be a sum of steps rather than of gradients, with either sign.
        let weight_decay = decayed / added;
        add(Optimizer::Sgd { momentum, weight_decay }, step, added);
        add(Optimizer::Nesterov { momentum, weight_decay }, step / (1.0 + momentum), added);
        if let Some((_, with_ratio)) = first(1.0, 0.0, 1.0) {
            // If a norm is zero, there is no ratio.
            let trust = with_ratio / added;
            for ratio_of_all in [false, true] {
                add(Optimizer::Lars { momentum, weight_decay, trust, ratio_of_all }, step, added / step);
            }
        }
        // The state is a sum or an average of squares.
        let is_sum = near(kept, 1.0, 1e-6);
        let share = if is_sum { 1.0 } else { 1.0 - decimal(kept) };
        let (Some((large, _)), Some((little, _))) = (first(0.0, 0.0, 1e9), first(0.0, 0.0, 1e-9)) else { return };
        let learning_rate = -large * share.sqrt();
        let weight_decay = (decayed / share).sqrt();
        for (epsilon_in_root, epsilon) in epsilons(share, learning_rate, -little) {
            let optimizer = match is_sum {
                true => Optimizer::Adagrad { epsilon, weight_decay, epsilon_in_root },
                false => Optimizer::Rmsprop { decay: kept, epsilon, momentum: 0.0, weight_decay, epsilon_in_root },
            };
            add(optimizer, learning_rate, 1.0);
        }
    }

    /// Adds candidates with two states. `order` gives the positions of the optimizer's states among those of the
    /// update.
    fn of_two_states(&self, all: &mut Vec<Candidate>, order: [usize; 2]) {
        let arranged = |[a, b]: [f64; 2]| if order == [0, 1] { [a, b] } else { [b, a] };
        let first = |weight: f64, states: [f64; 2], gradient: f64| -> Option<[f64; 3]> {
            let new = self.first(weight, &arranged(states), gradient)?;
            Some([new[0], new[1 + order[0]], new[1 + order[1]]])
        };
        let mut add = |optimizer, learning_rate, scales: [f64; 2]| {
            all.push(Candidate { optimizer, learning_rate, scales: scales.to_vec(), order: order.to_vec() });
        };
        let t = self.base + 1.0;
        let adams = |add: &mut dyn FnMut(Optimizer, f64, [f64; 2])| -> Option<()> {
            let (beta1, beta2) = (first(0.0, [1.0, 0.0], 0.0)?[1], first(0.0, [0.0, 1.0], 0.0)?[2]);
            for bias_correction in [false, true] {
                let unbiased = |x: f64, beta: f64| if bias_correction { x / (1.0 - beta.powf(t)) } else { x };
                let (m_hat, root) = (unbiased(beta1, beta1), unbiased(beta2, beta2).sqrt());
                // -lr * m_hat / (sqrt(v_hat) + epsilon), with and without v.
                let (with, without) = (-first(0.0, [1.0, 1.0], 0.0)?[0], -first(0.0, [1.0, 0.0], 0.0)?[0]);
                let epsilon = if without.is_finite() { with * root / (without - with) } else { 0.0 };
                let learning_rate = with * (root + epsilon) / m_hat;
                let decoupled = (1.0 - first(1.0, [0.0, 1.0], 0.0)?[0]) / learning_rate;
                let coupled = first(1.0, [0.0, 0.0], 0.0)?[1] / (1.0 - decimal(beta1));
                let adam = |weight_decay| Optimizer::Adam { beta1, beta2, epsilon, weight_decay, bias_correction };
                add(adam(0.0), learning_rate, [1.0; 2]);
                let weight_decay = decoupled;
                add(Optimizer::Adamw { beta1, beta2, epsilon, weight_decay, bias_correction }, learning_rate, [1.0; 2]);
                add(adam(coupled), learning_rate, [1.0; 2]);
                if bias_correction && self.rank() > 0 {
                    // A ratio scales both lanes alike. Only one lane has a direction beside the decay.
                    let states = arranged([0.0, 1.0]).map(|s| if s == 0.0 { [1.0, 0.0] } else { [1.0, 1.0] }).to_vec();
                    let point = Point { weight: [1.0, 1.0], states, gradient: [0.0; 2] };
                    let moved = self.at(self.base, &point)?[0].map(|x| 1.0 - x);
                    let share = moved[1] / moved[0];
                    let weight_decay = m_hat / (root + epsilon) * share / (1.0 - share);
                    for ratio_of_all in [false, true] {
                        let lamb = Optimizer::Lamb { beta1, beta2, epsilon, weight_decay, ratio_of_all };
                        add(lamb, learning_rate, [1.0; 2]);
                    }
                }
            }
            Some(())
        };
        let _ = adams(&mut add);
        let others = |add: &mut dyn FnMut(Optimizer, f64, [f64; 2])| -> Option<()> {
            let decay = first(0.0, [1.0, 0.0], 0.0)?[1];
            let decay = decimal(decay);
            let root = (1.0 - decay).sqrt();
            let weight_decay = first(1.0, [0.0; 2], 0.0)?[1].sqrt() / root;
            // An average of squares and a momentum of steps, which may include the learning rate.
            let momentum = first(0.0, [0.0, 1.0], 0.0)?[2];
            let [large, _, velocity] = first(0.0, [0.0; 2], 1e9)?;
            let learning_rate = -large * root;
            for (epsilon_in_root, epsilon) in epsilons(1.0 - decay, learning_rate, -first(0.0, [0.0; 2], 1e-9)?[0]) {
                let rmsprop = Optimizer::Rmsprop { decay, epsilon, momentum, weight_decay, epsilon_in_root };
                add(rmsprop, learning_rate, [1.0, velocity * root]);
            }
            // Averages of squares of gradients and of steps.
            let learning_rate = -first(0.0, [0.0, 1e18], 1e9)?[0] * root / 1e9;
            let ratio = (-first(0.0, [0.0; 2], 1.0)?[0] / learning_rate).powi(2);
            let epsilon = ratio * (1.0 - decay) / (1.0 - ratio);
            add(Optimizer::Adadelta { rho: decay, epsilon, weight_decay }, learning_rate, [1.0; 2]);
            Some(())
        };
        let _ = others(&mut add);
    }
}

/// The possible epsilons, added within the root or outside. A gradient of `1e-9`, whose square has this share in an
/// average, makes a step of `little`.
fn epsilons(share: f64, learning_rate: f64, little: f64) -> [(bool, f64); 2] {
    let below = learning_rate * 1e-9 / little;
    let square = share * 1e-18;
    let cleaned = |x: f64| if x.abs() < 1e-14 { 0.0 } else { x };
    [(false, cleaned(below - square.sqrt())), (true, cleaned(below * below - square))]
}

/// An optimizer's update of a parameter, in lanes.
struct Reference {
    graph: Graph,
    leaves: Vec<ValueId>,
}

impl Reference {
    fn new(optimizer: &Optimizer, rank: usize) -> Reference {
        let shape: &[u64] = match rank {
            0 => &[],
            1 => &[2],
            _ => &[1, 2],
        };
        let (scalar, ty) = (TensorType::scalar(DType::F32), TensorType::new(DType::F32, shape));
        let mut graph = Graph::new("reference");
        let mut leaves: Vec<ValueId> = [&ty, &ty, &scalar, &scalar]
            .into_iter()
            .enumerate()
            .map(|(i, ty)| leaf(&mut graph, i.to_string(), ty.clone()))
            .collect();
        let states: Vec<ValueId> =
            optimizer.slots(DType::F32).into_iter().map(|slot| leaf(&mut graph, slot, ty.clone())).collect();
        let given = Given {
            parameter: leaves[0],
            gradient: leaves[1],
            gradient_scale: 1.0,
            factor: None,
            states: &states,
            learning_rate: leaves[2],
            step: leaves[3],
            whole: &|_, x| x,
        };
        let new = update(&mut graph, optimizer, &given);
        graph.outputs = [&[new.parameter], new.states.as_slice()].concat();
        leaves.extend(states);
        Reference { graph, leaves }
    }

    fn at(&self, learning_rate: f64, step: f64, point: &Point) -> Option<Vec<Lanes>> {
        let values = [point.weight, point.gradient, [learning_rate; 2], [step; 2]];
        let values = values.into_iter().chain(point.states.iter().copied());
        let given = self.leaves.iter().zip(values).map(|(&v, lanes)| (v, value_of(&self.graph, v, lanes))).collect();
        evaluate(&self.graph, &self.graph.outputs, &given)
    }
}

/// The scalar arguments that count steps: integers, and floats that grow by one in a step.
pub(crate) fn counts(graph: &Graph, updates: &BTreeMap<ValueId, (ValueId, usize)>) -> Vec<ValueId> {
    let counts = |v: ValueId| {
        let after = |x: f64| {
            let (updated, _) = updates.get(&v)?;
            Some(evaluate(graph, &[*updated], &BTreeMap::from([(v, Value::One(x))]))?[0][0])
        };
        let dtype = graph.ty(v).dtype;
        !dtype.is_float() || after(0.0) == Some(1.0) && after(9.0) == Some(10.0)
    };
    let scalars = graph.values().filter(|&v| graph.node(v).op.is_leaf() && graph.ty(v).rank() == 0);
    scalars.filter(|&v| !matches!(graph.node(v).op, Op::Parameter(_)) && counts(v)).collect()
}

/// Returns true if a value equals the unchanged leaf.
pub(crate) fn is_same(graph: &Graph, updated: ValueId, leaf: ValueId) -> bool {
    let value = value_of(graph, leaf, [0.3, -0.7]);
    evaluate(graph, &[updated], &BTreeMap::from([(leaf, value)])).is_some_and(|found| found[0] == value.lanes())
}

/// The decimal number that a setting stands for, if it is a single-precision constant of the text.
fn decimal(x: f64) -> f64 {
    let rounded = |digits: usize| format!("{x:.digits$e}").parse::<f64>().ok();
    let near = |d: &f64| (d - x).abs() <= 2e-6 * x.abs();
    (0..6).filter_map(rounded).find(near).unwrap_or(x)
}

fn near(a: f64, b: f64, by: f64) -> bool {
    (a - b).abs() <= by
}

fn number(i: u32, k: u32) -> f64 {
    f64::from((i * 7 + k * 5) % 11) / 4.0 - 1.2
}
