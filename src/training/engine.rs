//! A common interface to the devices that train a plan: CPU workers, GPUs of one process or of many, or one device of
//! many ranks. So the loop of steps, checkpoints and data are written once.
//!
//! All processes of a run execute that loop together. Joint decisions go through their [`World`], whatever transport it
//! uses.

use crate::error::Error;
use crate::simulate::Recorded;
use crate::training::checkpoint::TensorOf;
use crate::training::{Training, session};
use altiplano_ir::plan::Plan;
use altiplano_ir::program::ALL_PARAMETERS;
use altiplano_planner::programs;
use altiplano_runtime::devices::cuda::{CudaOptions, CudaSession, CudaStep};
#[cfg(feature = "mpi")]
use altiplano_runtime::mpi::{Communicator, RankOptions, RankSession};
use altiplano_runtime::ranks::{Layout, World};
#[cfg(feature = "mpi")]
use altiplano_runtime::recording::Recording;
use altiplano_runtime::{HostTensor, Options, RuntimeError, Session, StepReport};
use std::collections::BTreeMap;
#[cfg(feature = "mpi")]
use std::sync::Arc;

/// A session of any kind.
pub enum Engine {
    Cpu(Session),
    /// All GPUs, or this process's share of them.
    Cuda(CudaSession),
    /// This rank's part.
    #[cfg(feature = "mpi")]
    Ranks(Box<RankSession>),
}

/// A step in progress.
pub enum Begun {
    Running,
    /// The result of an engine that runs a step synchronously.
    Done(f64, Recorded),
}

/// The processes that run a plan.
pub enum Team {
    /// This process alone.
    Alone,
    /// All processes that were started together, regardless of nodes if `anywhere`. If they are MPI ranks, CPU devices
    /// communicate over MPI.
    Ranks {
        world: World,
        anywhere: bool,
        #[cfg(feature = "mpi")]
        mpi: Option<(Arc<Communicator>, RankOptions)>,
    },
}

impl Team {
    /// Returns whether this process leads.
    pub fn leads(&self) -> bool {
        match self {
            Team::Alone => true,
            Team::Ranks { world, .. } => world.leads(),
        }
    }

    /// Fails if the processes would run different plans or options.
    pub fn expect_same(&self, plan: &Plan, training: &Training) -> Result<(), Error> {
        let Team::Ranks { world, anywhere, .. } = self else { return Ok(()) };
        world.expect_same("another version", env!("CARGO_PKG_VERSION"))?;
        world.expect_same("another plan", &fingerprint(&plan.to_json()))?;
        // Library locations differ between hosts, and free GPU memory is no option.
        let cuda = training.cuda.as_ref().map(|options| options.running);
        let said = format!("{:?} {cuda:?} {anywhere}{}", Training { cuda: None, ..training.clone() }, self.of_mpi());
        Ok(world.expect_same("other options", &fingerprint(&said))?)
    }

    #[cfg(feature = "mpi")]
    fn of_mpi(&self) -> String {
        match self {
            Team::Ranks { mpi: Some((_, options)), .. } => format!(" {options:?}"),
            _ => String::new(),
        }
    }

    #[cfg(not(feature = "mpi"))]
    fn of_mpi(&self) -> String {
        String::new()
    }

    /// Creates the engine for this process's part, with nothing loaded.
    pub fn engine(self, plan: &Plan, training: &Training) -> Result<Engine, Error> {
        let (world, anywhere) = match self {
            Team::Alone => return Engine::new(plan, training),
            #[cfg(feature = "mpi")]
            Team::Ranks { world, anywhere, mpi: Some((all, options)) } if training.cuda.is_none() => {
                let options = RankOptions { check_nan: training.check_nan, ..options };
                let layout = Layout { nodes: nodes(plan), anywhere };
                let session = RankSession::new(world, &all, &programs(plan)?, &layout, &options)?;
                return Ok(Engine::Ranks(Box::new(session)));
            }
            Team::Ranks { world, anywhere, .. } => (world, anywhere),
        };
        let Some(options) = &training.cuda else {
            let problem =
                "needs GPUs (--device cuda); CPUs of several processes communicate over MPI, with --engine mpi";
            return Err(Error::Option { option: "--engine processes", problem });
        };
        let layout = Layout { nodes: nodes(plan), anywhere };
        let session = CudaSession::of_ranks(world, &programs(plan)?, &layout, &of_plan(plan, options))?;
        Ok(Engine::Cuda(session))
    }
}

/// Adds the plan's predicted memory to the options of GPUs.
fn of_plan(plan: &Plan, options: &CudaOptions) -> CudaOptions {
    let predicted_bytes = plan.lanes().iter().map(|lane| lane.predicted.peak_bytes).collect();
    CudaOptions { predicted_bytes, ..options.clone() }
}

/// The devices that a plan uses, by node of its cluster.
fn nodes(plan: &Plan) -> Vec<Vec<u32>> {
    let used: std::collections::BTreeSet<u32> = plan.devices().into_iter().collect();
    let mut next = 0;
    let mut nodes: Vec<Vec<u32>> = Vec::new();
    for group in &plan.cluster.groups {
        for _ in 0..group.nodes {
            let devices = next..next + group.devices_per_node;
            next = devices.end;
            nodes.push(devices.filter(|device| used.contains(device)).collect());
        }
    }
    nodes.retain(|node| !node.is_empty());
    nodes
}

/// A short hash of a text.
fn fingerprint(text: &str) -> String {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

impl Engine {
    /// Creates workers or GPUs for a plan, with nothing loaded.
    pub fn new(plan: &Plan, training: &Training) -> Result<Engine, Error> {
        match &training.cuda {
            Some(options) => Ok(Engine::Cuda(CudaSession::new(&programs(plan)?, &of_plan(plan, options))?)),
            None => {
                let options = Options { record: true, check_nan: training.check_nan, ..Options::default() };
                Ok(Engine::Cpu(session(plan, &options)?))
            }
        }
    }

    /// All processes of the run, if there are several.
    fn world(&self) -> Option<&World> {
        match self {
            Engine::Cpu(_) => None,
            Engine::Cuda(session) => session.world(),
            #[cfg(feature = "mpi")]
            Engine::Ranks(session) => Some(session.world()),
        }
    }

    pub fn load_parameter(&mut self, name: &str, tensor: &HostTensor) -> Result<(), RuntimeError> {
        match self {
            Engine::Cpu(session) => session.load_parameter(name, tensor),
            Engine::Cuda(session) => session.load_parameter(name, tensor),
            #[cfg(feature = "mpi")]
            Engine::Ranks(session) => session.load_parameter(name, tensor),
        }
    }

    pub fn load_state(&mut self, parameter: &str, slot: &str, tensor: &HostTensor) -> Result<(), RuntimeError> {
        match self {
            Engine::Cpu(session) => session.load_state(parameter, slot, tensor),
            Engine::Cuda(session) => session.load_state(parameter, slot, tensor),
            #[cfg(feature = "mpi")]
            Engine::Ranks(session) => session.load_state(parameter, slot, tensor),
        }
    }

    pub fn parameter(&mut self, name: &str) -> Result<HostTensor, RuntimeError> {
        match self {
            Engine::Cpu(session) => session.parameter(name),
            Engine::Cuda(session) => session.parameter(name),
            #[cfg(feature = "mpi")]
            Engine::Ranks(session) => {
                session.parameter(name)?.ok_or_else(|| RuntimeError::Elsewhere { name: name.to_string() })
            }
        }
    }

    pub fn state(&mut self, parameter: &str, slot: &str) -> Result<HostTensor, RuntimeError> {
        match self {
            Engine::Cpu(session) => session.state(parameter, slot),
            Engine::Cuda(session) => session.state(parameter, slot),
            #[cfg(feature = "mpi")]
            Engine::Ranks(session) => {
                let name = || format!("{parameter}/{slot}");
                session.state(parameter, slot)?.ok_or_else(|| RuntimeError::Elsewhere { name: name() })
            }
        }
    }

    /// Assembles a parameter or state where [`Engine::leads`]. All ranks must call it.
    pub fn gather(&mut self, of: TensorOf<'_>) -> Result<Option<HostTensor>, RuntimeError> {
        match (self, of) {
            #[cfg(feature = "mpi")]
            (Engine::Ranks(session), TensorOf::Parameter { name }) => session.parameter(name),
            #[cfg(feature = "mpi")]
            (Engine::Ranks(session), TensorOf::State { parameter, slot }) => session.state(parameter, slot),
            (Engine::Cuda(session), TensorOf::Parameter { name }) => session.gather_parameter(name),
            (Engine::Cuda(session), TensorOf::State { parameter, slot }) => session.gather_state(parameter, slot),
            (engine, TensorOf::Parameter { name }) => engine.parameter(name).map(Some),
            (engine, TensorOf::State { parameter, slot }) => engine.state(parameter, slot).map(Some),
        }
    }

    /// Returns whether this process leads.
    pub fn leads(&self) -> bool {
        self.world().is_none_or(World::leads)
    }

    /// Returns whether this process holds a part of a parameter.
    pub fn holds(&self, name: &str) -> bool {
        match self {
            Engine::Cpu(_) => true,
            Engine::Cuda(session) => session.holds(name),
            #[cfg(feature = "mpi")]
            Engine::Ranks(session) => session.holds(name),
        }
    }

    /// The rows of an input, along its batch dimension, that this process reads; `None` if all are read.
    pub fn rows_read(&self, input: &str, dim: usize, rows: usize) -> Option<Vec<bool>> {
        let mut read = vec![false; rows];
        match self {
            Engine::Cuda(session) if session.world().is_some() => session.mark_rows(input, dim, &mut read),
            #[cfg(feature = "mpi")]
            Engine::Ranks(session) => session.mark_rows(input, dim, &mut read),
            _ => return None,
        }
        Some(read)
    }

    /// Broadcasts the leader's text.
    pub fn hear_first(&self, text: String) -> Result<String, RuntimeError> {
        self.world().map_or(Ok(text.clone()), |world| world.hear_first(&text))
    }

    /// Waits for all processes of the run.
    pub fn meet(&self) -> Result<(), RuntimeError> {
        self.world().map_or(Ok(()), World::meet)
    }

    /// Records the activity between steps, for the message if this process is lost.
    pub fn note(&self, activity: impl FnOnce() -> String) {
        if let Some(world) = self.world() {
            world.note(&activity());
        }
    }

    /// The signal that any process has received.
    fn agreed(&self, signal: Option<i32>) -> Result<Option<i32>, RuntimeError> {
        let Some(world) = self.world() else { return Ok(signal) };
        let said = world.largest(signal.map_or(0, i32::unsigned_abs).into())?;
        Ok(i32::try_from(said).ok().filter(|&signal| signal != 0))
    }

    /// The recordings of the last step from all processes.
    pub fn recorded(&self, last: Recorded) -> Result<Recorded, RuntimeError> {
        match self {
            #[cfg(feature = "mpi")]
            Engine::Ranks(session) => {
                let recordings: Vec<Recording> = session.recordings()?;
                Ok(Recorded { recordings, ..last })
            }
            _ => Ok(last),
        }
    }

    /// Ends the run in all processes.
    pub fn finish(self) -> Result<(), RuntimeError> {
        match self {
            #[cfg(feature = "mpi")]
            Engine::Ranks(session) => session.finish(),
            Engine::Cuda(session) => session.finish(),
            Engine::Cpu(_) => Ok(()),
        }
    }

    /// A scalar of optimizer state for all parameters together, as the plan's last step left it. NaN unless
    /// [`Engine::leads`]. All ranks must call it.
    pub fn state_of_step(&mut self, slot: &str) -> Result<f64, RuntimeError> {
        let state = self.gather(TensorOf::State { parameter: ALL_PARAMETERS, slot })?;
        Ok(state.and_then(|state| state.to_f64().first().copied()).unwrap_or(f64::NAN))
    }

    /// Runs one step on a global batch without overlap. Returns its loss and recording.
    pub fn step(
        &mut self,
        batch: &BTreeMap<String, HostTensor>,
        scalars: &BTreeMap<String, f64>,
    ) -> Result<(f64, Recorded), RuntimeError> {
        let begun = self.begin(batch, scalars, None)?;
        let (loss, recorded, _) = self.end(begun, None)?;
        Ok((loss, recorded))
    }

    /// Returns whether a step begins before the previous one has ended, so that one step should be begun ahead.
    pub fn overlaps(&self) -> bool {
        match self {
            Engine::Cpu(session) => session.overlaps(),
            Engine::Cuda(_) => false,
            #[cfg(feature = "mpi")]
            Engine::Ranks(session) => session.overlaps(),
        }
    }

    /// Returns whether steps without overlap can be queued, so that devices start the next one at once without a
    /// wake-up.
    pub fn queues(&self) -> bool {
        matches!(self, Engine::Cpu(_))
    }

    /// Begins a step on a global batch. `signal` is a signal that this process has received, to be shared with all.
    pub fn begin(
        &mut self,
        batch: &BTreeMap<String, HostTensor>,
        scalars: &BTreeMap<String, f64>,
        _signal: Option<i32>,
    ) -> Result<Begun, RuntimeError> {
        match self {
            Engine::Cpu(session) => session.begin_step(batch, scalars).map(|()| Begun::Running),
            Engine::Cuda(session) => {
                let CudaStep { loss, seconds, .. } = session.step(batch, scalars)?;
                Ok(Begun::Done(loss, Recorded { seconds, recordings: Vec::new() }))
            }
            #[cfg(feature = "mpi")]
            Engine::Ranks(session) => {
                let signal = _signal.map_or(0, i32::unsigned_abs);
                session.begin_step(batch, scalars, signal.into()).map(|()| Begun::Running)
            }
        }
    }

    /// Ends the oldest step in progress. Returns its loss, its recording, and the signal that any process has received.
    /// On GPUs only the time is recorded.
    pub fn end(&mut self, begun: Begun, signal: Option<i32>) -> Result<(f64, Recorded, Option<i32>), RuntimeError> {
        match (self, begun) {
            (engine, Begun::Done(loss, recorded)) => Ok((loss, recorded, engine.agreed(signal)?)),
            (Engine::Cpu(session), Begun::Running) => {
                let StepReport { loss, seconds, recordings, .. } = session.end_step()?;
                Ok((loss, Recorded { seconds, recordings }, signal))
            }
            (Engine::Cuda(_), Begun::Running) => Err(RuntimeError::NoStep),
            #[cfg(feature = "mpi")]
            (engine @ Engine::Ranks(_), Begun::Running) => {
                let Engine::Ranks(session) = &mut *engine else { return Err(RuntimeError::NoStep) };
                let (report, said) = session.end_step()?;
                let StepReport { loss, seconds, recordings, .. } = report;
                let signal = match session.overlaps() {
                    true => i32::try_from(said).ok().filter(|&signal| signal != 0),
                    false => engine.agreed(signal)?,
                };
                Ok((loss, Recorded { seconds, recordings }, signal))
            }
        }
    }

    /// Runs the remaining calls of the last step, so that all gradients reach the weights. All ranks must call it.
    pub fn flush(&mut self) -> Result<(), RuntimeError> {
        match self {
            Engine::Cpu(session) => session.flush(),
            Engine::Cuda(_) => Ok(()),
            #[cfg(feature = "mpi")]
            Engine::Ranks(session) => session.flush(),
        }
    }

    /// Peak bytes of each device. All ranks must call it.
    pub fn peak_bytes(&self) -> Result<Vec<u64>, RuntimeError> {
        match self {
            Engine::Cpu(session) => Ok(session.peak_bytes()),
            Engine::Cuda(session) => Ok(session.held_bytes()),
            #[cfg(feature = "mpi")]
            Engine::Ranks(session) => session.peak_bytes(),
        }
    }
}
