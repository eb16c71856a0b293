//! Training a plan on the workers of this machine.

mod bounds;
mod data;
pub(crate) mod onnx_weights;

pub use bounds::{Bound, bound};
pub use data::{Batch, Batches};

use crate::error::{DataProblem, Error};
use crate::simulate::Recorded;
use altiplano_ir::expand::without_composites;
use altiplano_ir::plan::Plan;
use altiplano_planner::programs;
use altiplano_runtime::data::{read_weights, tensor_named};
use altiplano_runtime::init::{initial, role};
use altiplano_runtime::{HostTensor, Options, Session, StepReport};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The most devices that are run as threads of one machine.
pub const MAX_WORKERS: u32 = 64;

/// What to train with.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Training {
    pub steps: u64,
    pub learning_rate: f64,
    /// Of weights and of made-up batches.
    pub seed: u64,
    /// Weights by the names of the parameters; default: initialised by seed.
    pub weights: Option<PathBuf>,
    /// Batches; default: made up.
    pub data: Option<PathBuf>,
}

/// One step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Counted from 1.
    pub number: u64,
    pub loss: f64,
    pub seconds: f64,
    pub samples_per_s: f64,
}

/// What is left of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ran {
    /// The most bytes that each worker held.
    pub peak_bytes: Vec<u64>,
    /// What workers did in the last step, and when.
    pub last: Recorded,
}

/// Trains `training.steps` steps and tells `on_step` of each.
pub fn train(
    plan: &Plan,
    training: &Training,
    mut on_step: impl FnMut(&Step) -> Result<(), Error>,
) -> Result<Ran, Error> {
    let mut last = Recorded::default();
    let mut session = session(plan, true)?;
    let (weights, mut batches) = start(plan, training)?;
    for (name, weights) in weights {
        session.load_parameter(&name, &weights)?;
    }
    for number in 1..=training.steps {
        let StepReport { loss, seconds, recordings, .. } =
            session.step(&batches.take(), &scalars(training.learning_rate, number))?;
        last = Recorded { seconds, recordings };
        on_step(&Step { number, loss, seconds, samples_per_s: plan.global_batch as f64 / seconds })?;
        if !loss.is_finite() {
            return Err(Error::Diverged { step: number, loss });
        }
    }
    Ok(Ran { peak_bytes: session.peak_bytes(), last })
}

/// Workers for a plan, with nothing loaded yet, whose steps say what they did if `record`.
pub fn session(plan: &Plan, record: bool) -> Result<Session, Error> {
    let devices = plan.num_devices();
    if devices > MAX_WORKERS {
        return Err(Error::TooManyWorkers { devices, most: MAX_WORKERS });
    }
    Ok(Session::new(&programs(plan)?, &Options { record, ..Options::default() })?)
}

/// The scalars that a step is given; `step` counts from 1.
pub fn scalars(learning_rate: f64, step: u64) -> BTreeMap<String, f64> {
    BTreeMap::from([("learning_rate".to_string(), learning_rate), ("step".to_string(), step as f64)])
}

/// The weights to start from, by name, and the batches to train on. A file of weights may hold the model's state too.
pub fn start(plan: &Plan, training: &Training) -> Result<(BTreeMap<String, HostTensor>, Batches), Error> {
    let (data, seed) = (training.data.as_deref(), training.seed);
    match &training.weights {
        Some(file) => {
            let tensors = weights_in(file)?;
            Ok((weights_of(plan, file, &tensors)?, Batches::with_state(plan, data, seed, &tensors)?))
        }
        None => {
            let graph = without_composites(&plan.graph);
            let users = graph.users();
            let value = |(v, name)| {
                let role = role(&graph, &users, v);
                (String::from(name), initial(name, graph.ty(v), role, training.seed))
            };
            let weights = graph.parameters().map(value).collect();
            Ok((weights, Batches::with_state(plan, data, seed, &BTreeMap::new())?))
        }
    }
}

/// All tensors of a file of weights: `.safetensors`, a `torch.export` archive, or an ONNX model that holds them.
fn weights_in(file: &Path) -> Result<BTreeMap<String, HostTensor>, Error> {
    let is_onnx = file.extension().is_some_and(|e| e.eq_ignore_ascii_case("onnx"));
    if is_onnx { onnx_weights::read(file) } else { Ok(read_weights(file)?) }
}

/// The parameters among the tensors of a file, in the parameters' types. `transformer.wte.weight` may be called `wte.weight`.
pub fn weights_of(
    plan: &Plan,
    file: &Path,
    tensors: &BTreeMap<String, HostTensor>,
) -> Result<BTreeMap<String, HostTensor>, Error> {
    let mut weights = BTreeMap::new();
    for (v, name) in plan.graph.parameters() {
        let problem = |problem| Error::Data { file: file.to_path_buf(), problem: Box::new(problem) };
        // The checkpoint of a model without a head, of which this one has one, leaves out the first part of names.
        let headless = || tensor_named(tensors, name.split_once('.')?.1);
        let tensor = tensor_named(tensors, name).or_else(headless);
        let tensor = tensor.ok_or_else(|| problem(DataProblem::Missing { name: name.to_string() }))?;
        let expected = plan.graph.ty(v);
        if tensor.ty.shape != expected.shape || !tensor.ty.dtype.is_float() {
            let (found, expected) = (tensor.ty.clone(), expected.clone());
            return Err(problem(DataProblem::Type { name: name.to_string(), found, expected }));
        }
        weights.insert(name.to_string(), tensor.cast(expected.dtype));
    }
    Ok(weights)
}
