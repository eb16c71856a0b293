//! Verifies that a plan computes what one device computes. It runs one step of the plan and one of the unpartitioned
//! graph from the same weights and batch, and compares loss, gradients and updated weights. It can also compare with
//! values recorded in another framework.

use crate::error::{DataProblem, Error};
use crate::inference::{Results, results_on};
use crate::model::GivenStep;
use crate::training::team::Team;
use crate::training::{Batch, Batches, Training, expect_memory, scalars, session, start, weights_of};
use altiplano_ir::batch::LossKind;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::Graph;
use altiplano_ir::names::row_name;
use altiplano_ir::plan::{Plan, Schedule};
use altiplano_ir::recompute::Recompute;
use altiplano_ir::types::TensorType;
use altiplano_planner::{PlanFailure, Progress, Request, Silent, programs};
use altiplano_runtime::data::{read_safetensors, tensor_named};
use altiplano_runtime::random::Stream;
use altiplano_runtime::{HostTensor, Options, Session, evaluate};
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

/// A compared quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantity {
    /// The results of a model that is run without training.
    Results,
    Loss,
    Gradient,
    Weights,
}

impl Quantity {
    pub fn name(self) -> &'static str {
        match self {
            Quantity::Results => "results",
            Quantity::Loss => "loss",
            Quantity::Gradient => "gradient",
            Quantity::Weights => "updated weights",
        }
    }
}

/// The unit of a difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// Relative to the norm of the reference.
    Own,
    /// Absolute, since that norm is small.
    Absolute,
}

/// The difference between a tensor of the plan and that of a reference.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    pub tensor: String,
    /// Norm of the difference in this unit, and its limit.
    pub amount: f64,
    pub allowed: f64,
    pub measure: Measure,
    /// True if the limit is larger than elsewhere, because rounding alone changes this much; see [`verify`].
    pub rounded: bool,
    /// True if some values are NaN, and the same ones on both sides.
    pub both_nan: bool,
}

impl Difference {
    /// The difference relative to its limit: at most 1 if the two agree.
    pub(crate) fn severity(&self) -> f64 {
        self.amount / self.allowed
    }
}

/// Prints `3.57e-7 relative, 1e-4 allowed`.
impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = match self.measure {
            Measure::Own => "relative",
            Measure::Absolute => "absolute",
        };
        let why = if self.rounded { ", as much as rounding does" } else { "" };
        write!(f, "{:.2e} {how}, {:.0e} allowed{why}", self.amount, self.allowed)
    }
}

/// The outcome of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Agrees,
    Differs,
    BothNaN,
    NotCompared,
}

/// The comparison of all tensors of one quantity with one reference.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    pub quantity: Quantity,
    /// Number of compared tensors.
    pub tensors: usize,
    /// The difference that is largest relative to its limit.
    pub worst: Difference,
}

impl Comparison {
    pub fn verdict(&self) -> Verdict {
        match &self.worst {
            _ if self.tensors == 0 => Verdict::NotCompared,
            worst if worst.both_nan => Verdict::BothNaN,
            // A NaN agrees with nothing.
            worst if worst.severity() <= 1.0 => Verdict::Agrees,
            _ => Verdict::Differs,
        }
    }

    pub fn fails(&self) -> bool {
        matches!(self.verdict(), Verdict::Differs | Verdict::BothNaN)
    }
}

/// Tensors by name.
type Tensors = BTreeMap<String, Vec<f64>>;

/// The results of a step.
struct Outcome {
    loss: f64,
    gradients: Tensors,
    weights: Tensors,
}

impl Outcome {
    /// The differences to another outcome, value by value.
    fn apart_from(&self, other: &Outcome) -> Outcome {
        let tensors = |ours: &Tensors, other: &Tensors| -> Tensors {
            let both = ours.iter().filter_map(|(name, x)| Some((name, x, other.get(name)?)));
            both.map(|(name, x, y)| (name.clone(), x.iter().zip(y).map(|(x, y)| x - y).collect())).collect()
        };
        Outcome {
            loss: self.loss - other.loss,
            gradients: tensors(&self.gradients, &other.gradients),
            weights: tensors(&self.weights, &other.weights),
        }
    }
}

/// The comparisons of a plan with one device and, if given, with a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Verified {
    /// `None` if nothing is trained.
    pub loss: Option<f64>,
    pub one_device: Vec<Comparison>,
    pub expected: Vec<Comparison>,
    /// Comparisons with the gradients that a whole training step computes itself.
    pub given: Vec<Comparison>,
    /// True if every gradient is zero, on the plan's devices and on one, so that agreement means little.
    pub no_gradient: bool,
}

impl Verified {
    /// The worst failed comparison.
    pub fn failure(&self) -> Option<&Comparison> {
        let all = self.one_device.iter().chain(&self.expected).chain(&self.given).filter(|c| c.fails());
        all.max_by(|a, b| a.worst.severity().abs().total_cmp(&b.worst.severity().abs()))
    }
}

/// Runs a plan's step and compares it.
///
/// `expect` is a file with weights under the parameters' names, the batch as `input/NAME`, `loss`, and gradients as
/// `grad/NAME`. For a model without training, it holds only results as `result/0` and so on. Without it, weights and
/// batch are as for training. `given` is the training step from which the model was extracted, if the plan's batch is
/// the traced one. The plan runs on GPUs or XLA's devices if the training says so; the single device is always a CPU.
///
/// If the plan and a reference differ by more than the order of additions explains, the effect of rounding is measured:
/// the change of one device's results when the last bits of the weights change. Some values are known no better than
/// that: gradients that are zero except for rounding (of a bias whose mean is subtracted again), and values at the kink
/// of a rectifier.
pub fn verify(
    plan: &Plan,
    training: &Training,
    expect: Option<&Path>,
    given: Option<&GivenStep>,
    progress: &dyn Progress,
) -> Result<Verified, Error> {
    progress.step("the plan's devices", 0, 2);
    let recorded = expect.map(|file| Ok::<_, Error>((file, read_safetensors(file)?))).transpose()?;
    let (weights, batch) = match &recorded {
        Some((file, tensors)) => (weights_of(plan, file, tensors)?, recorded_batch(plan, file, tensors)?),
        None => {
            let (weights, mut batches) = start(plan, training)?;
            (weights, batches.take()?)
        }
    };
    let tolerance = Tolerance::of(plan);
    let one = single_device(plan)?;
    expect_memory("the single device for comparison", &programs(&one)?)?;
    if !plan.schedule.trains() {
        let values = |plan: &Plan, session: &mut Session| results_on(session, plan, &weights, &batch).map(as_numbers);
        let ours = values(plan, &mut Team::Alone.session(plan, training)?)?;
        progress.step("one device", 1, 2);
        let single = values(&one, &mut session(&one, &Options::default())?)?;
        let one_device = vec![tolerance.tensors(Quantity::Results, &ours, &single)];
        let expected = match &recorded {
            None => Vec::new(),
            Some((file, tensors)) => {
                let recorded = recorded_results(ours.keys(), file, tensors)?;
                vec![tolerance.tensors(Quantity::Results, &ours, &recorded)]
            }
        };
        return Ok(Verified { loss: None, one_device, expected, given: Vec::new(), no_gradient: false });
    }
    // Without loss scaling: the scale is a power of two at best, and a step that it makes overflow says nothing about
    // gradients.
    let unscaled = |plan: &Plan| Plan { loss_scale: None, ..plan.clone() };
    let (plan, one) = (&unscaled(plan), unscaled(&one));
    let mut devices = Team::Alone.session(plan, training)?;
    let ours = outcome_on(&mut devices, plan, &weights, &batch, training.learning_rate)?;
    drop(devices);
    progress.step("one device", 1, 2);
    let single = outcome(&one, &weights, &batch, training.learning_rate)?;
    let expected = recorded.as_ref().map(|(file, tensors)| recorded_values(plan, file, tensors)).transpose()?;
    let given = given.filter(|g| !g.parameters.is_empty() && is_traced_batch(g, &batch));
    let given = given.map(|given| given_values(given, &weights, &batch)).transpose()?;
    let zero = |o: &Outcome| o.gradients.values().flatten().all(|&g| g == 0.0);
    let no_gradient = zero(&ours) && zero(&single);
    let compare = |rounding: &[Outcome]| {
        let with = |values: &Option<(f64, Tensors)>| {
            values
                .as_ref()
                .map_or(Vec::new(), |(loss, gradients)| tolerance.values(&ours, (*loss, gradients), rounding))
        };
        let (mut one_device, expected, given) =
            (tolerance.outcomes(&ours, &single, rounding), with(&expected), with(&given));
        // One device updates once per step.
        one_device.retain(|c| c.quantity != Quantity::Weights || plan.updates_of_step() == 1);
        Verified { loss: Some(ours.loss), one_device, expected, given, no_gradient }
    };
    let verified = compare(&[]);
    if verified.failure().is_none() {
        return Ok(verified);
    }
    let nudge = |seed: u64| {
        outcome(&one, &nudged(&weights, seed), &batch, training.learning_rate).map(|o| o.apart_from(&single))
    };
    Ok(compare(&(0..NUDGES).map(nudge).collect::<Result<Vec<_>, _>>()?))
}

/// The same training on a single device with enough memory. A mean or sum over samples takes the whole batch at once
/// there, which verifies that it is one. Any other loss is defined by its microbatches and keeps them.
pub fn single_device(plan: &Plan) -> Result<Plan, PlanFailure> {
    let mut cluster = plan.cluster.clone();
    cluster.name = "one device".to_string();
    cluster.groups.truncate(1);
    cluster.between_groups = None;
    for group in &mut cluster.groups {
        group.nodes = 1;
        group.devices_per_node = 1;
        group.device.memory_bytes = 1 << 60;
    }
    // Requested layouts need several devices.
    let (graph, stop_gradients) = plan.own();
    let graph = Graph { pins: Vec::new(), ..graph.clone() };
    let mut request = Request::new(plan.model.clone(), graph, plan.loss, cluster);
    request.stop_gradients = stop_gradients.to_vec();
    request.pad = false;
    request.batch.global = Some(plan.global_batch);
    let whole = plan.loss != LossKind::Other && plan.graph.batch != 0;
    request.batch.num_microbatches = Some(if whole { 1 } else { plan.num_microbatches });
    request.training.optimizer = plan.optimizer;
    request.training.clip_norm = plan.clip_norm;
    request.training.loss_scale = plan.loss_scale;
    request.allow_microbatch_semantics = true;
    (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (Some(1), Some(1), Some(1));
    request.degrees.zero = Some(0);
    request.recompute = Some(Recompute::None);
    request.schedule = Some(if plan.schedule.trains() { Schedule::OneFOneB } else { plan.schedule });
    request.baselines = false;
    altiplano_planner::plan(&request, &Silent)
}

fn as_numbers(results: Results) -> BTreeMap<String, Vec<f64>> {
    results.into_iter().map(|(name, tensor)| (name, tensor.to_f64())).collect()
}

/// The recorded results with these names.
fn recorded_results<'a>(
    names: impl Iterator<Item = &'a String>,
    file: &Path,
    tensors: &BTreeMap<String, HostTensor>,
) -> Result<BTreeMap<String, Vec<f64>>, Error> {
    let find = |name: &String| {
        let missing = || {
            let problem = Box::new(DataProblem::Missing { name: name.clone() });
            Error::Data { file: file.to_path_buf(), problem }
        };
        Ok((name.clone(), tensors.get(name).ok_or_else(missing)?.to_f64()))
    };
    names.map(find).collect()
}

/// Runs one step from these weights, on CPU workers.
fn outcome(
    plan: &Plan,
    weights: &BTreeMap<String, HostTensor>,
    batch: &Batch,
    learning_rate: f64,
) -> Result<Outcome, Error> {
    outcome_on(&mut session(plan, &Options::default())?, plan, weights, batch, learning_rate)
}

fn outcome_on(
    session: &mut Session,
    plan: &Plan,
    weights: &BTreeMap<String, HostTensor>,
    batch: &Batch,
    learning_rate: f64,
) -> Result<Outcome, Error> {
    for (name, tensor) in weights {
        session.load_parameter(name, tensor)?;
    }
    let loss = session.step(batch, &scalars(learning_rate, 1))?.loss;
    session.flush()?;
    // Accumulators hold sums over microbatches.
    let scale = if plan.loss == LossKind::Sum { 1.0 } else { 1.0 / plan.num_microbatches as f64 };
    let (mut gradients, mut updated) = (BTreeMap::new(), BTreeMap::new());
    for name in weights.keys() {
        updated.insert(name.clone(), session.parameter(name)?.to_f64());
    }
    for (_, name) in plan.graph.trained_parameters() {
        let sum = session.accumulator(name)?.to_f64();
        gradients.insert(name.to_string(), sum.into_iter().map(|g| g * scale).collect());
    }
    Ok(Outcome { loss, gradients, weights: updated })
}

/// Returns whether a batch has the sizes at which a whole training step was traced.
fn is_traced_batch(given: &GivenStep, batch: &Batch) -> bool {
    given.graph.inputs().all(|(v, name)| batch.get(name).is_some_and(|t| t.ty.shape == given.graph.shape(v)))
}

/// Loss and gradients as a whole training step computes them, on one device, under the names of the plan's parameters.
fn given_values(
    given: &GivenStep,
    weights: &BTreeMap<String, HostTensor>,
    batch: &Batch,
) -> Result<(f64, BTreeMap<String, Vec<f64>>), Error> {
    let mut leaves: BTreeMap<String, HostTensor> = batch.clone();
    // For each stacked parameter, its rows, which the plan has as separate parameters.
    let mut rows: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    // Frozen parameters are read as well, and have no gradient.
    for (_, name) in given.graph.parameters() {
        let tensor = stacked(weights, name, rows.entry(name).or_default());
        leaves.extend(tensor.map(|t| (name.to_string(), t)));
    }
    let mut results = evaluate(&given.graph, &leaves)?.into_iter();
    let loss = results.next().and_then(|t| t.to_f64().first().copied()).unwrap_or(f64::NAN);
    let mut gradients = BTreeMap::new();
    for (name, gradient) in given.parameters.iter().zip(results) {
        let names = &rows[name.as_str()];
        let values = gradient.to_f64();
        for (row, part) in names.iter().zip(values.chunks((values.len() / names.len().max(1)).max(1))) {
            gradients.insert(row.clone(), part.to_vec());
        }
    }
    Ok((loss, gradients))
}

/// A parameter, or the stack of its rows, which may be stacks themselves; `names` collects its parts.
fn stacked(weights: &BTreeMap<String, HostTensor>, name: &str, names: &mut Vec<String>) -> Option<HostTensor> {
    if let Some(tensor) = weights.get(name) {
        names.push(name.to_string());
        return Some(tensor.clone());
    }
    let prefix = format!("{name}[");
    if !weights.keys().any(|k| k.starts_with(&prefix)) {
        return None;
    }
    let mut all: Vec<f64> = Vec::new();
    let mut ty: Option<TensorType> = None;
    let mut count = 0;
    while let Some(row) = stacked(weights, &row_name(name, count), names) {
        all.extend(row.to_f64());
        ty = Some(row.ty);
        count += 1;
    }
    let row = ty?;
    let shape: Vec<u64> = [&[count], row.shape.as_slice()].concat();
    Some(HostTensor::from_f64(row.with_shape(shape), &all))
}

/// The batch in a file of recorded values, which must match the plan's exactly.
fn recorded_batch(plan: &Plan, file: &Path, tensors: &BTreeMap<String, HostTensor>) -> Result<Batch, Error> {
    let batch = Batches::open(plan, file)?.take()?;
    for (name, ours) in &batch {
        let recorded = tensors.get(name).or_else(|| tensors.get(&format!("input/{name}")));
        if let Some(recorded) = recorded.filter(|r| r.ty.shape != ours.ty.shape) {
            let (found, expected) = (recorded.ty.clone(), ours.ty.clone());
            let problem = DataProblem::Type { name: name.clone(), found, expected };
            return Err(Error::Data { file: file.to_path_buf(), problem: Box::new(problem) });
        }
    }
    Ok(batch)
}

fn recorded_values(
    plan: &Plan,
    file: &Path,
    tensors: &BTreeMap<String, HostTensor>,
) -> Result<(f64, BTreeMap<String, Vec<f64>>), Error> {
    let find = |name: String| {
        let missing = || {
            let problem = DataProblem::Missing { name: name.clone() };
            Error::Data { file: file.to_path_buf(), problem: Box::new(problem) }
        };
        tensor_named(tensors, &name).ok_or_else(missing)
    };
    let loss = find("loss".to_string())?.to_f64().first().copied().unwrap_or(f64::NAN);
    let mut gradients = BTreeMap::new();
    for (v, name) in plan.own().0.trained_parameters() {
        let tensor = find(format!("grad/{name}"))?;
        let expected = plan.own().0.ty(v);
        if tensor.ty.shape != expected.shape {
            let (name, found) = (format!("grad/{name}"), tensor.ty.clone());
            let problem = DataProblem::Type { name, found, expected: expected.clone() };
            return Err(Error::Data { file: file.to_path_buf(), problem: Box::new(problem) });
        }
        gradients.insert(name.to_string(), tensor.to_f64());
    }
    Ok((loss, gradients))
}

/// Limits on differences between results that differ only in the order of additions.
struct Tolerance {
    loss: f64,
    tensor: f64,
}

/// Absolute differences below this count as rounding, however small the values. Sums of terms that cancel, such as
/// probabilities minus labels, are only as precise as the terms.
const TINY_DIFFERENCE: f64 = 1e-7;
/// Number of experiments that measure the effect of rounding.
const NUDGES: u64 = 4;
/// Rounding of intermediate values has a larger effect than rounding of the weights.
const MARGIN: f64 = 4.0;
/// Mantissa bits of the weights that are changed: wider weights are computed in single precision.
const DOUBTFUL_BITS: u32 = 23;

impl Tolerance {
    /// 1e-5 and 1e-4 in single precision; larger in half precision, in proportion to its unit roundoff.
    fn of(plan: &Plan) -> Tolerance {
        let unit = |dtype: DType| match dtype.float_format() {
            Some(format) if dtype.is_half() => 0.5f64.powi(format.mantissa_bits as i32 + 1),
            _ => 0.0,
        };
        // Results in half precision are rounded to it, whatever the type of the parameters. Factors of 8 bits have
        // products of 16, and a sum in another order moves few of them to the next 8-bit number.
        let varies = plan.graph.depends_on(|v| plan.graph.node(v).op.is_leaf());
        let computed = plan.graph.values().filter(|v| varies[v.index()]);
        let unit = computed.map(|v| unit(plan.graph.ty(v).dtype.cotangent())).fold(0.0, f64::max);
        Tolerance { loss: (4.0 * unit).max(1e-5), tensor: (16.0 * unit).max(1e-4) }
    }

    /// Compares a step with the same step on one device. `rounding` holds the measured effects of rounding, here and
    /// below.
    fn outcomes(&self, ours: &Outcome, reference: &Outcome, rounding: &[Outcome]) -> Vec<Comparison> {
        let mut all = self.values(ours, (reference.loss, &reference.gradients), rounding);
        all.push(self.weights(ours, reference, rounding));
        all
    }

    /// Compares loss and gradients of a step with recorded ones.
    fn values(&self, ours: &Outcome, reference: (f64, &Tensors), rounding: &[Outcome]) -> Vec<Comparison> {
        let (loss, gradients) = reference;
        let changes: Vec<Vec<f64>> = rounding.iter().map(|o| vec![o.loss]).collect();
        let worst = difference("loss", &[ours.loss], &[loss], self.loss, &changes);
        let changes: Vec<&Tensors> = rounding.iter().map(|o| &o.gradients).collect();
        vec![
            Comparison { quantity: Quantity::Loss, tensors: 1, worst },
            self.among(Quantity::Gradient, &ours.gradients, gradients, &changes),
        ]
    }

    fn tensors(&self, quantity: Quantity, ours: &Tensors, reference: &Tensors) -> Comparison {
        self.among(quantity, ours, reference, &[])
    }

    fn among(&self, quantity: Quantity, ours: &Tensors, reference: &Tensors, rounding: &[&Tensors]) -> Comparison {
        let nothing: Vec<f64> = Vec::new();
        let all = reference.iter().filter(|(_, reference)| !reference.is_empty()).map(|(name, reference)| {
            let changes: Vec<Vec<f64>> = rounding.iter().filter_map(|r| r.get(name).cloned()).collect();
            difference(name, ours.get(name).unwrap_or(&nothing), reference, self.tensor, &changes)
        });
        self.worst_of(quantity, all)
    }

    /// Compares updated weights. Adam divides a gradient by its own size, so rounding decides the sign of the update where
    /// the gradient is mere rounding. Elements whose gradient is smaller than its tolerance, or than its change by rounding,
    /// are left out. A frozen parameter is unchanged.
    fn weights(&self, ours: &Outcome, reference: &Outcome, rounding: &[Outcome]) -> Comparison {
        let all = reference.weights.iter().filter_map(|(name, updated)| {
            let Some(ours_updated) = ours.weights.get(name) else {
                return Some(difference(name, &[], updated, self.tensor, &[]));
            };
            // A frozen parameter is as it was.
            let Some(gradient) = reference.gradients.get(name) else {
                return Some(difference(name, ours_updated, updated, self.tensor, &[]));
            };
            let root_mean_square = |x: &[f64]| norm(x) / (x.len().max(1) as f64).sqrt();
            let changes = rounding.iter().filter_map(|o| Some(root_mean_square(o.gradients.get(name)?)));
            let seen = changes.filter(|x| x.is_finite()).fold(0.0, f64::max) * MARGIN;
            let noise = (10.0 * self.tensor * root_mean_square(gradient)).max(seen).max(TINY_DIFFERENCE);
            // A non-finite gradient is not noise.
            let counts = |g: f64| !g.is_finite() || g.abs() > noise;
            let kept: Vec<usize> =
                (0..updated.len()).filter(|&i| counts(gradient[i]) || !updated[i].is_finite()).collect();
            let pick =
                |from: &[f64]| kept.iter().map(|&i| from.get(i).copied().unwrap_or(f64::NAN)).collect::<Vec<_>>();
            let changes: Vec<Vec<f64>> = rounding.iter().filter_map(|o| Some(pick(o.weights.get(name)?))).collect();
            (!kept.is_empty()).then(|| difference(name, &pick(ours_updated), &pick(updated), self.tensor, &changes))
        });
        self.worst_of(Quantity::Weights, all)
    }

    fn worst_of(&self, quantity: Quantity, differences: impl Iterator<Item = Difference>) -> Comparison {
        let none = Difference {
            tensor: String::new(),
            amount: 0.0,
            allowed: self.tensor,
            measure: Measure::Own,
            rounded: false,
            both_nan: false,
        };
        let mut tensors = 0;
        let worst = differences.fold(none, |worst, d| {
            tensors += 1;
            // Written so that a NaN severity wins.
            let (a, b) = (worst.severity(), d.severity());
            if a.is_nan() || b <= a && !worst.tensor.is_empty() { worst } else { d }
        });
        Comparison { quantity, tensors, worst }
    }
}

fn norm(x: &[f64]) -> f64 {
    // An empty sum would be -0.
    x.iter().fold(0.0, |sum, v| sum + v * v).sqrt()
}

/// `changes` holds the measured effects of rounding on the values.
fn difference(tensor: &str, ours: &[f64], reference: &[f64], tolerance: f64, changes: &[Vec<f64>]) -> Difference {
    let tensor = tensor.to_string();
    let size = norm(reference);
    let (unit, allowed, measure) = match tolerance * size < TINY_DIFFERENCE {
        true => (1.0, TINY_DIFFERENCE, Measure::Absolute),
        false => (size, tolerance, Measure::Own),
    };
    if ours.len() != reference.len() {
        return Difference { tensor, amount: f64::NAN, allowed, measure, rounded: false, both_nan: false };
    }
    let mut pairs = ours.iter().zip(reference);
    let both_nan = reference.iter().any(|r| r.is_nan()) && pairs.all(|(a, b)| a.is_nan() == b.is_nan());
    let amount = norm(&ours.iter().zip(reference).map(|(a, b)| a - b).collect::<Vec<_>>()) / unit;
    let rounding = changes.iter().map(|x| norm(x) / unit).filter(|x| x.is_finite()).fold(0.0, f64::max) * MARGIN;
    let rounded = rounding > allowed;
    Difference { tensor, amount, allowed: allowed.max(rounding), measure, rounded, both_nan }
}

/// Weights in which the last bit of each is randomly changed or not.
fn nudged(weights: &BTreeMap<String, HostTensor>, seed: u64) -> BTreeMap<String, HostTensor> {
    let nudge = |(name, tensor): (&String, &HostTensor)| {
        let Some(format) = tensor.ty.dtype.float_format() else { return (name.clone(), tensor.clone()) };
        let bit = 0.5f64.powi(format.mantissa_bits.min(DOUBTFUL_BITS) as i32);
        let stream = Stream::new(seed, name);
        let values = tensor.to_f64().into_iter().zip(0..);
        let values: Vec<f64> = values.map(|(x, i)| x * (1.0 + bit * (stream.below(i, 3) as f64 - 1.0))).collect();
        (name.clone(), HostTensor::from_f64(tensor.ty.clone(), &values))
    };
    weights.iter().map(nudge).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_agrees_and_nothing_else_does() {
        let severity = |a: &[f64], b: &[f64]| difference("x", a, b, 1e-4, &[]).severity();
        assert!(severity(&[1.0, 2.0], &[1.0, 2.0 + 1e-5]) < 1.0);
        assert!(severity(&[1.0, 2.0], &[1.0, 2.1]) > 1.0);
        assert!(severity(&[1e-9], &[-1e-9]) < 1.0);
        assert!(severity(&[1e-6], &[-1e-9]) > 1.0);
        assert!(severity(&[f64::NAN], &[1.0]).is_nan());
        assert!(severity(&[], &[1.0]).is_nan());
    }

    /// The report of a gradient that is zero except for rounding is in the unit of its limit.
    #[test]
    fn the_worst_is_told_by_what_it_was_measured_by() {
        let tolerance = Tolerance { loss: 1e-5, tensor: 1e-4 };
        let map =
            |zero: f64, one: f64| BTreeMap::from([("zero".to_string(), vec![zero]), ("one".to_string(), vec![one])]);
        let check = |zero: f64, one: f64, expected: &str| {
            let found = tolerance.tensors(Quantity::Gradient, &map(zero, one), &map(0.0, 1.0));
            assert_eq!(format!("{}: {}", found.worst.tensor, found.worst), expected);
        };
        check(1e-8, 1.00009, "one: 9.00e-5 relative, 1e-4 allowed");
        check(2e-8, 1.00001, "zero: 2.00e-8 absolute, 1e-7 allowed");
        check(f64::NAN, 1.0, "zero: NaN absolute, 1e-7 allowed");
    }

    #[test]
    fn what_rounding_does_is_allowed_and_no_more() {
        let tolerance = Tolerance { loss: 1e-5, tensor: 1e-4 };
        let of = |loss: f64, gradient: f64, weight: f64| Outcome {
            loss,
            gradients: BTreeMap::from([("a".to_string(), vec![gradient])]),
            weights: BTreeMap::from([("a".to_string(), vec![weight])]),
        };
        let rounding = [of(1.0, 1.001, 1.0), of(1.0, f64::NAN, 1.0)].map(|o| o.apart_from(&of(1.0, 1.0, 1.0)));
        let verdicts = |ours: Outcome, rounding: &[Outcome]| -> Vec<Verdict> {
            tolerance.outcomes(&ours, &of(1.0, 1.0, 1.0), rounding).iter().map(Comparison::verdict).collect()
        };
        let (agrees, differs) = (Verdict::Agrees, Verdict::Differs);
        assert_eq!(verdicts(of(1.0, 0.998, 1.0), &[]), [agrees, differs, agrees]);
        assert_eq!(verdicts(of(1.0, 0.998, 1.0), &rounding), [agrees, agrees, agrees]);
        // A fault that one device shares is not rounding.
        let recorded = BTreeMap::from([("a".to_string(), vec![1.1])]);
        assert!(tolerance.values(&of(1.0, 1.0, 1.0), (1.0, &recorded), &rounding)[1].fails());
        assert_eq!(verdicts(of(1.0, 0.99, 1.1), &rounding), [agrees, differs, differs]);
        assert_eq!(verdicts(of(1.1, f64::NAN, 1.0), &rounding), [differs, differs, agrees]);
    }

    #[test]
    fn a_nudge_is_a_last_bit() {
        let ty = TensorType::new(DType::F32, [64]);
        let weights = BTreeMap::from([("w".to_string(), HostTensor::from_f64(ty, &[1.5; 64]))]);
        let values = nudged(&weights, 1)["w"].to_f64();
        assert!(values.iter().all(|x| (x - 1.5).abs() <= 2.0 * f64::from(f32::EPSILON)), "{values:?}");
        assert!(values.iter().any(|&x| x > 1.5) && values.iter().any(|&x| x < 1.5), "{values:?}");
        assert_ne!(values, nudged(&weights, 2)["w"].to_f64());
    }

    #[test]
    fn what_is_no_number_is_the_worst() {
        let tolerance = Tolerance { loss: 1e-5, tensor: 1e-4 };
        let map = |x: f64, y: f64| BTreeMap::from([("a".to_string(), vec![x]), ("b".to_string(), vec![y])]);
        let check = |ours: BTreeMap<String, Vec<f64>>| tolerance.tensors(Quantity::Gradient, &ours, &map(1.0, 1.0));
        assert_eq!(check(map(1.0, 1.0)).verdict(), Verdict::Agrees);
        assert_eq!(check(map(1.0, 2.0)).worst.tensor, "b");
        for ours in [map(f64::NAN, 2.0), map(2.0, f64::NAN)] {
            let found = check(ours);
            assert!(found.verdict() == Verdict::Differs && found.worst.severity().is_nan());
        }
        let nan = || map(f64::NAN, 1.0);
        assert_eq!(tolerance.tensors(Quantity::Gradient, &nan(), &nan()).verdict(), Verdict::BothNaN);
    }

    #[test]
    fn weights_count_where_their_gradient_does() {
        let tolerance = Tolerance { loss: 1e-5, tensor: 1e-4 };
        let outcome = |gradient: f64, weight: f64| Outcome {
            loss: 0.0,
            gradients: BTreeMap::from([("a".to_string(), vec![gradient])]),
            weights: BTreeMap::from([("a".to_string(), vec![weight])]),
        };
        let nan = f64::NAN;
        let cases = [
            ((1.0, 1.0), (1.0, 1.0), Verdict::Agrees),
            ((1.0, 1.0), (1.0, 2.0), Verdict::Differs),
            ((0.0, 1.0), (0.0, 2.0), Verdict::NotCompared),
            ((1.0, 1.0), (nan, nan), Verdict::Differs),
            ((nan, nan), (1.0, 1.0), Verdict::Differs),
            ((nan, nan), (nan, nan), Verdict::BothNaN),
        ];
        for (ours, reference, expect) in cases {
            let found = tolerance.weights(&outcome(ours.0, ours.1), &outcome(reference.0, reference.1), &[]);
            assert_eq!(found.verdict(), expect, "{ours:?} {reference:?}");
        }
        // A gradient that rounding changes by a third of itself or more has no sign to speak of.
        for (change, expect) in [(0.3, Verdict::NotCompared), (0.1, Verdict::Differs)] {
            let found = tolerance.weights(&outcome(1.0, 1.0), &outcome(1.0, 2.0), &[outcome(change, 0.0)]);
            assert_eq!(found.verdict(), expect, "{change}");
        }
    }
}
