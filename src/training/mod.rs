//! Trains a plan on the workers of this machine.
//!
//! Workers, GPUs and ranks go through one loop of steps ([`train_on`]), which all processes of a run execute together.
//! Steps of less than a tenth of a second are queued on devices ahead of time if nobody reads the state in between. A
//! step is timed from the end of the step before to its own end on all devices.

mod bounds;
pub mod checkpoint;
mod data;
pub mod evaluation;
mod loader;
mod metrics;
pub mod noise;
pub(crate) mod onnx_weights;
pub mod rate;
mod shuffle;
mod source;
mod steps;
pub mod team;

pub use bounds::{Bound, bound};
pub use data::{Batch, Batches, DataOptions};
pub use loader::{InputSpeed, input_speed};

use crate::error::{DataProblem, Error};
use crate::simulate::Recorded;
use altiplano_import::torch_export;
use altiplano_ir::expand::without_composites;
use altiplano_ir::loss_scale::{self, LossScale};
use altiplano_ir::plan::Plan;
use altiplano_ir::program::{ALL_PARAMETERS, GRADIENT_SQUARES, Programs};
use altiplano_planner::predict::memory::{cpu_host_peaks, cpu_peaks};
use altiplano_planner::programs;
use altiplano_runtime::data::{decode, read_safetensors, tensor_named};
use altiplano_runtime::devices::cuda::{CudaOptions, ExecutorError};
use altiplano_runtime::devices::xla::XlaOptions;
use altiplano_runtime::error::KernelError;
use altiplano_runtime::init::{initial, role};
use altiplano_runtime::{HostTensor, Options, RuntimeError, Session, files};
use altiplano_xla::pjrt::Platform;
use checkpoint::{Checkpoints, DataState, Folder, Manifest, newest};
use evaluation::EvaluationOptions;
use noise::{NoiseEstimate, NoiseScale};
use rate::RateSchedule;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use steps::train_in;
use team::Team;

/// Maximum number of devices that run as threads of one machine.
pub const MAX_WORKERS: u32 = 64;

/// Options of training.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Training {
    pub steps: u64,
    /// The peak learning rate.
    pub learning_rate: f64,
    pub rate_schedule: RateSchedule,
    /// Seed of weights and synthetic batches.
    pub seed: u64,
    /// Weights by parameter name; default: initialised by seed.
    pub weights: Option<PathBuf>,
    pub data: DataOptions,
    /// Stop at the first op that makes a NaN.
    pub check_nan: bool,
    /// Train on these GPUs; on CPU workers if absent.
    pub cuda: Option<CudaOptions>,
    /// Train on the devices of this PJRT plugin instead.
    pub xla: Option<XlaOptions>,
    pub checkpoints: Option<Checkpoints>,
    /// File of metrics, with a line for each step.
    pub metrics: Option<PathBuf>,
    /// Held-out data to evaluate between steps.
    pub evaluation: Option<EvaluationOptions>,
}

/// The results of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Number of the step, from 1.
    pub number: u64,
    pub loss: f64,
    pub learning_rate: f64,
    pub seconds: f64,
    pub samples_per_s: f64,
    /// Seconds spent waiting for the batch before the step.
    pub data_wait_s: f64,
    /// Norm of the gradient of all parameters together, before clipping; present if the plan computes it.
    pub gradient_norm: Option<f64>,
    /// Gradient noise scale in samples, over the later half of the steps so far. Present if the plan measures it and it
    /// is distinguishable from 0.
    pub noise_scale: Option<f64>,
    /// Present if the plan scales the loss and no gradient is late.
    pub scaling: Option<Scaling>,
}

/// The state of loss scaling after a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scaling {
    /// The scale of the next step.
    pub scale: f64,
    /// True if gradients were not finite, so that only the scale changed.
    pub skipped: bool,
    /// Number of skipped steps so far.
    pub skipped_steps: u64,
}

/// Events during a run.
pub enum Event<'a> {
    Step(&'a Step),
    /// The loss on held-out data after a step.
    Evaluated {
        step: u64,
        loss: f64,
        seconds: f64,
    },
    /// The run resumes after this step.
    Resumed {
        step: u64,
        place: &'a Path,
    },
    /// The description of the training data, unless it is synthetic.
    Data {
        description: &'a str,
    },
    /// There is no checkpoint to resume from.
    FromTheStart,
    /// A checkpoint is damaged, and an older one is tried.
    Damaged {
        error: &'a Error,
    },
    Written {
        step: u64,
        place: &'a Path,
    },
    /// A checkpoint could not be written; earlier ones are unaffected.
    NotWritten {
        step: u64,
        error: &'a Error,
    },
    /// Held-out data could not be read; there are no more evaluations.
    NotEvaluated {
        step: u64,
        error: &'a Error,
    },
    /// Metrics could not be written; there are no more.
    MetricsEnded {
        error: &'a Error,
    },
    /// The file of metrics had later lines than those of the steps done. A copy keeps them.
    MetricsCopied {
        copy: &'a Path,
    },
}

/// The records of a completed run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ran {
    /// Peak bytes of each worker.
    pub peak_bytes: Vec<u64>,
    /// The timeline of the last step.
    pub last: Recorded,
    /// The noise estimate, if the plan measures it and it is distinguishable from 0.
    pub noise: Option<NoiseEstimate>,
}

/// Trains `training.steps` steps and calls `on_step` for each.
pub fn train(
    plan: &Plan,
    training: &Training,
    mut on_step: impl FnMut(&Step) -> Result<(), Error>,
) -> Result<Ran, Error> {
    let on_event = |event: Event<'_>| if let Event::Step(step) = event { on_step(step) } else { Ok(()) };
    train_until(plan, training, || None, on_event)
}

/// As [`train`], with checkpoints: resumes and writes them as `training` says. Ends after the step at which `signal`
/// holds a signal's number.
pub fn train_until(
    plan: &Plan,
    training: &Training,
    signal: impl Fn() -> Option<i32>,
    mut on_event: impl FnMut(Event<'_>) -> Result<(), Error>,
) -> Result<Ran, Error> {
    let folder = training.checkpoints.as_ref().map(Folder::open).transpose()?;
    train_in(plan, training, &mut Team::Alone.session(plan, training)?, folder, signal, &mut on_event)
}

/// As [`train_until`], as one of the processes that run the plan together. Only the leader reports events and writes
/// files.
pub fn train_on(
    session: &mut Session,
    plan: &Plan,
    training: &Training,
    signal: impl Fn() -> Option<i32>,
    mut on_event: impl FnMut(Event<'_>) -> Result<(), Error>,
) -> Result<Ran, Error> {
    let checkpoints = training.checkpoints.as_ref().filter(|_| session.leads());
    let folder = checkpoints.map(Folder::open).transpose()?;
    train_in(plan, training, session, folder, signal, &mut on_event)
}

/// The newest checkpoint from which the run can resume, as found by the leader.
fn resumed(
    plan: &Plan,
    session: &Session,
    options: &Checkpoints,
    mut on_event: impl FnMut(Event<'_>) -> Result<(), Error>,
) -> Result<Option<(Manifest, PathBuf)>, Error> {
    let mut said = String::new();
    if session.leads() {
        let found = newest(&options.folder, |error| on_event(Event::Damaged { error }))?;
        if let Some((manifest, place)) = &found {
            manifest.expect_fits(plan).map_err(|problem| problem.at(place))?;
            let name = place.file_name().unwrap_or_default().to_string_lossy();
            said = format!("{name}\n{}", manifest.to_json());
        }
    }
    let said = session.world().map_or_else(|| Ok(said.clone()), |world| world.hear_first(&said))?;
    let Some((name, manifest)) = said.split_once('\n') else { return Ok(None) };
    let place = options.folder.join(name);
    let manifest = Manifest::from_json(manifest).map_err(|problem| problem.at(&place))?;
    Ok(Some((manifest, place)))
}

/// The source of batches, and the current position.
fn data_state(training: &Training, batches: &Batches) -> DataState {
    DataState {
        file: training.data.file.as_ref().map(|file| file.display().to_string()),
        content: batches.content().cloned(),
        seed: training.seed,
        shuffle: training.data.shuffle,
        position: batches.position(),
    }
}

/// Steps shorter than this are queued, since wake-ups would be noticeable. An interrupt still takes effect without a
/// noticeable delay.
const SHORT_S: f64 = 0.1;

/// Total duration of queued steps, and the limit on their number.
const AHEAD_S: f64 = 0.01;
const MAX_AHEAD: usize = 64;

/// The number of a signal as a word for the other processes; 0 is none.
fn word_of(signal: Option<i32>) -> u64 {
    signal.map_or(0, i32::unsigned_abs).into()
}

/// Records the activity between steps, for the message if this process is lost.
fn note(session: &Session, activity: impl FnOnce() -> String) {
    if let Some(world) = session.world() {
        world.note(&activity());
    }
}

/// A scalar of optimizer state for all parameters together, as the plan's last step left it. NaN unless this process
/// leads. All processes must call it.
fn state_of_step(session: &mut Session, slot: &str) -> Result<f64, RuntimeError> {
    let state = session.gather_state(ALL_PARAMETERS, slot)?;
    Ok(state.and_then(|state| state.to_f64().first().copied()).unwrap_or(f64::NAN))
}

/// The loss scale over the steps of a run.
struct Scales {
    of_plan: LossScale,
    skipped_steps: u64,
}

impl Scales {
    fn new(of_plan: LossScale) -> Scales {
        Scales { of_plan, skipped_steps: 0 }
    }

    /// Reads the state that the last step left. All ranks must call it.
    fn read(&mut self, plan: &Plan, session: &mut Session) -> Result<Scaling, Error> {
        let skipped_steps = state_of_step(session, loss_scale::SKIPPED_STEPS)? as u64;
        let is_kept = self.of_plan.slots().contains(&loss_scale::SCALE);
        let kept = if is_kept { state_of_step(session, loss_scale::SCALE)? } else { 0.0 };
        let first = || self.of_plan.first(plan.graph.ty(plan.graph.outputs[0]).dtype);
        let scale = if kept == 0.0 { first() } else { kept };
        let skipped = skipped_steps > self.skipped_steps;
        self.skipped_steps = skipped_steps;
        Ok(Scaling { scale, skipped, skipped_steps })
    }
}

/// Reads the gradient norm of a step, and adds its measurement to `noise`.
fn measured(
    plan: &Plan,
    training: &Training,
    session: &mut Session,
    noise: &mut NoiseScale,
) -> Result<Option<f64>, Error> {
    if plan.measure_noise {
        noise.measure(session)?;
    }
    Ok(if asks_for_norm(plan, training) { Some(state_of_step(session, GRADIENT_SQUARES)?.sqrt()) } else { None })
}

/// Returns whether the gradient norm is read after each step. Without metrics no one would see it, so it is not
/// awaited. The norm of late gradients is unknown when their step ends.
fn asks_for_norm(plan: &Plan, training: &Training) -> bool {
    plan.measure_noise || plan.staleness() == 0 && plan.clip_norm.is_some() && training.metrics.is_some()
}

/// Adds the step to the error of an op that made a NaN.
pub(crate) fn at_step(step: u64, error: RuntimeError) -> Error {
    match &error {
        RuntimeError::Device { error: KernelError::MadeNaN { .. } | KernelError::HoldsNaN { .. }, .. } => {
            Error::NaN { step, error: Box::new(error) }
        }
        RuntimeError::Executor(of_gpu) if matches!(**of_gpu, ExecutorError::NaN { .. }) => {
            Error::NaN { step, error: Box::new(error) }
        }
        _ => error.into(),
    }
}

/// Creates workers for a plan, with nothing loaded.
pub fn session(plan: &Plan, options: &Options) -> Result<Session, Error> {
    Ok(Session::new(&programs_here(plan)?, options)?)
}

/// Creates XLA's devices for a plan, with nothing loaded.
fn xla_session(plan: &Plan, options: &XlaOptions) -> Result<Session, Error> {
    let on_cpu = options.platform == Some(Platform::Cpu);
    let programs = if on_cpu { programs_here(plan)? } else { programs(plan)? };
    Ok(Session::on_xla(&programs, &with_memory(plan, options))?)
}

/// The options with the memory of the plan's devices, unless another limit is given.
fn with_memory(plan: &Plan, options: &XlaOptions) -> XlaOptions {
    let of_plan = || plan.cluster.groups.iter().map(|group| group.device.memory_bytes).min();
    XlaOptions { memory_bytes: options.memory_bytes.or_else(of_plan), ..options.clone() }
}

/// The programs of a plan, all devices of which have to fit into this machine.
fn programs_here(plan: &Plan) -> Result<Programs, Error> {
    let devices = plan.num_devices();
    if devices > MAX_WORKERS {
        return Err(Error::TooManyWorkers { devices, most: MAX_WORKERS });
    }
    let programs = programs(plan)?;
    expect_memory("the plan's workers", &programs)?;
    Ok(programs)
}

/// Fails if workers would need more memory than there is, since the system would kill the process without a message.
pub(crate) fn expect_memory(who: &'static str, programs: &Programs) -> Result<(), Error> {
    // The hosts' memory is that of this machine as well.
    let peaks = cpu_peaks(programs).into_iter().zip(cpu_host_peaks(programs)).map(|(own, host)| own + host);
    let held = programs.programs.iter().zip(peaks).map(|(p, bytes)| p.devices.len() as u64 * bytes);
    let needed_bytes = held.sum();
    match files::whole_memory() {
        Some(has_bytes) if needed_bytes > has_bytes => Err(Error::TooLargeForMachine { who, needed_bytes, has_bytes }),
        _ => Ok(()),
    }
}

/// The scalars of a step; `step` counts from 1.
pub fn scalars(learning_rate: f64, step: u64) -> BTreeMap<String, f64> {
    BTreeMap::from([("learning_rate".to_string(), learning_rate), ("step".to_string(), step as f64)])
}

/// The initial weights by name, and the training batches. A file of weights may also hold the model's state.
pub fn start(plan: &Plan, training: &Training) -> Result<(BTreeMap<String, HostTensor>, Batches), Error> {
    start_of(plan, training, |_| true)
}

/// As [`start`], with only the wanted weights.
fn start_of(
    plan: &Plan,
    training: &Training,
    wanted: impl Fn(&str) -> bool,
) -> Result<(BTreeMap<String, HostTensor>, Batches), Error> {
    let (data, seed) = (&training.data, training.seed);
    match &training.weights {
        Some(file) => {
            let tensors = weights_in(file)?;
            let mut weights = weights_of(plan, file, &tensors)?;
            weights.retain(|name, _| wanted(name));
            Ok((weights, Batches::with_state(plan, data, seed, &tensors)?))
        }
        None => {
            let graph = without_composites(plan.own().0);
            let users = graph.users();
            let value = |&(v, name): &(_, &str)| {
                let role = role(&graph, &users, v);
                (String::from(name), initial(name, graph.ty(v), role, training.seed))
            };
            let parameters: Vec<_> = graph.parameters().filter(|(_, name)| wanted(name)).collect();
            let weights = parameters.par_iter().map(value).collect();
            Ok((weights, Batches::with_state(plan, data, seed, &BTreeMap::new())?))
        }
    }
}

/// Reads all tensors of a file of weights: `.safetensors`, a `torch.export` archive, or an ONNX model.
fn weights_in(file: &Path) -> Result<BTreeMap<String, HostTensor>, Error> {
    let is_onnx = file.extension().is_some_and(|e| e.eq_ignore_ascii_case("onnx"));
    if is_onnx {
        return onnx_weights::read(file);
    }
    let unreadable = |error| RuntimeError::Io { file: file.to_path_buf(), error };
    let mut start = [0; 2];
    let mut open = files::open(file).map_err(unreadable)?;
    // Archives of `torch.export` are zip files.
    if std::io::Read::read_exact(&mut open, &mut start).is_err() || &start != b"PK" {
        return Ok(read_safetensors(file)?);
    }
    let stored = torch_export::weights(&files::read(file).map_err(unreadable)?)
        .map_err(|error| Error::TorchExport { file: file.to_path_buf(), error: Box::new(error) })?;
    let tensor = |stored: torch_export::Stored| {
        let data = decode(stored.ty.dtype, &stored.bytes);
        (stored.name, HostTensor { ty: stored.ty, data })
    };
    Ok(stored.into_iter().map(tensor).collect())
}

/// Selects the parameters among a file's tensors and casts them to their types. `transformer.wte.weight` may be named
/// `wte.weight`.
pub fn weights_of(
    plan: &Plan,
    file: &Path,
    tensors: &BTreeMap<String, HostTensor>,
) -> Result<BTreeMap<String, HostTensor>, Error> {
    let mut weights = BTreeMap::new();
    for (v, name) in plan.own().0.parameters() {
        let problem = |problem| Error::Data { file: file.to_path_buf(), problem: Box::new(problem) };
        // The checkpoint of a model without a head omits the first part of the names.
        let headless = || tensor_named(tensors, name.split_once('.')?.1);
        let tensor = tensor_named(tensors, name).or_else(headless);
        let tensor = tensor.ok_or_else(|| problem(DataProblem::Missing { name: name.to_string() }))?;
        let expected = plan.own().0.ty(v);
        if tensor.ty.shape != expected.shape || !tensor.ty.dtype.is_float() {
            let (found, expected) = (tensor.ty.clone(), expected.clone());
            return Err(problem(DataProblem::Type { name: name.to_string(), found, expected }));
        }
        weights.insert(name.to_string(), tensor.cast(expected.dtype));
    }
    Ok(weights)
}
