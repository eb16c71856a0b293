//! Sessions on the devices of XLA, through a PJRT plugin for CPUs, GPUs or TPUs.
//!
//! The thread of the session drives all devices: it follows the schedules of all programs and starts their bodies without
//! waiting for them, in an order in which every value exists when it is read. Parameters, optimizer state, gradients and
//! values between bodies stay on the devices.

mod bytes;
mod compile;
mod nan;
mod running;
mod stage;
mod transfer;

use crate::check::check;
use crate::device::{Command, Plan, Reply};
use crate::error::{KernelError, Place, RuntimeError};
use crate::host::HostTensor;
use crate::roster::Roster;
use crate::session::{Devices, Session};
use altiplano_ir::program::{BufferId, Programs};
use altiplano_xla::certify::peak;
use altiplano_xla::join;
use altiplano_xla::pjrt::{Client, ClientOption, Memory, PjrtError, Platform, Plugin, platform_of};
use compile::Compiler;
use running::Running;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

/// Options of a session on XLA's devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XlaOptions {
    /// The file of the plugin.
    pub plugin: PathBuf,
    /// The platform that the plugin must be for; any if absent.
    pub platform: Option<Platform>,
    /// Stop at the first op that makes a NaN from inputs without one.
    pub check_nan: bool,
    /// The folder of compiled programs, created on demand; nothing is kept without one.
    pub cache: Option<PathBuf>,
}

/// The reason why programs do not run on XLA's devices.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum XlaError {
    #[error("{}: is a plugin for {found}, not for {wanted}", path.display())]
    Platform { path: PathBuf, found: String, wanted: &'static str },
    #[error("the plan needs {needed} devices, and {} has {found} ({platform})", path.display())]
    Devices { path: PathBuf, platform: String, needed: usize, found: usize },
    #[error("{place}: {error}")]
    At { place: Box<Place>, error: PjrtError },
    #[error(transparent)]
    Plugin(#[from] PjrtError),
}

impl Session {
    /// Compiles the bodies of programs for the devices of a plugin. Parameters and state are zero. A plugin for CPUs makes
    /// as many devices as the programs need.
    pub fn on_xla(programs: &Programs, options: &XlaOptions) -> Result<Session, RuntimeError> {
        check(programs)?;
        let programs = &joined_bodies(programs, options);
        let ids: BTreeSet<u32> = programs.programs.iter().flat_map(|program| &program.devices).copied().collect();
        let client = open(options, ids.len())?;
        let compiler =
            Rc::new(Compiler::new(client, ids.into_iter().collect(), options.cache.clone()).map_err(XlaError::from)?);
        let roster = Roster::new(programs, options.check_nan, |_| false);
        let running = Running::new(&roster, &compiler)?;
        let bodies: Vec<Vec<Memory>> = running.stages.iter().map(|stage| stage.memory()).collect();
        let most = programs.programs.iter().zip(&bodies).map(|(p, bodies)| peak(p, &programs.transfers, bodies).bytes);
        let devices = XlaDevices {
            peaks: most.zip(&programs.programs).flat_map(|(bytes, p)| vec![[bytes, 0]; p.devices.len()]).collect(),
            replies: (0..roster.num_ranks()).map(|_| VecDeque::new()).collect(),
            roster: roster.clone(),
            compiler,
            running,
            arrived: 0,
            prepared: Vec::new(),
            evaluation: None,
        };
        Ok(Session::over(roster, Box::new(devices), false))
    }
}

/// The programs with bodies joined that run one after another, unless each op has to be found again.
fn joined_bodies(programs: &Programs, options: &XlaOptions) -> Programs {
    let mut joined = programs.clone();
    if !options.check_nan {
        joined.programs.iter_mut().for_each(|program| *program = join::joined(program));
    }
    joined
}

/// The part of a GPU's memory that XLA gives to tensors. Its default is three quarters, and plans fill devices; the rest is
/// for libraries and the context.
const MEMORY_FRACTION: f32 = 0.95;

/// Opens the plugin and makes a client with enough devices.
fn open(options: &XlaOptions, needed: usize) -> Result<Client, XlaError> {
    let path = &options.plugin;
    let plugin = Plugin::open(path)?;
    let count = [ClientOption::Number("cpu_device_count".to_string(), needed as i64)];
    let client = match options.platform.or_else(|| platform_of(path)) {
        Some(Platform::Cpu) => plugin.client(&count)?,
        Some(Platform::Cuda | Platform::Rocm) => {
            plugin.client(&[ClientOption::Real("memory_fraction".to_string(), MEMORY_FRACTION)])?
        }
        Some(Platform::Tpu) => plugin.client(&[])?,
        None => {
            let client = plugin.client(&[])?;
            match client.platform()? == Platform::Cpu.name() && client.num_devices() < needed {
                true => plugin.client(&count)?,
                false => client,
            }
        }
    };
    let (platform, found) = (client.platform()?, client.num_devices());
    match options.platform.map(Platform::name) {
        Some(wanted) if wanted != platform => Err(XlaError::Platform { path: path.clone(), found: platform, wanted }),
        _ if needed > found => Err(XlaError::Devices { path: path.clone(), platform, needed, found }),
        _ => Ok(client),
    }
}

/// A fault of a call, before it has a place.
enum Fault {
    Kernel(KernelError),
    Plugin(PjrtError),
}

impl From<PjrtError> for Fault {
    fn from(error: PjrtError) -> Fault {
        Fault::Plugin(error)
    }
}

/// Pairs of a buffer of the trained program and the one of the evaluated program that reads it.
type Weights = Vec<(BufferId, BufferId)>;

/// All devices of a session.
struct XlaDevices {
    roster: Roster,
    compiler: Rc<Compiler>,
    running: Running,
    /// The replies of each rank that were not collected yet.
    replies: Vec<VecDeque<Result<Reply, RuntimeError>>>,
    /// The number of devices that have the command which all devices execute together.
    arrived: usize,
    /// The plan of each program of an evaluation, and the weights that it shares, until all are known.
    prepared: Vec<(Arc<Plan>, Weights)>,
    /// The programs of the evaluation, and the weights of each.
    evaluation: Option<(Running, Vec<Weights>)>,
    peaks: Vec<[u64; 2]>,
}

impl XlaDevices {
    /// Runs a command that is for one device.
    fn answer(&mut self, rank: usize, command: Command) -> Result<Reply, RuntimeError> {
        let p = self.roster.program_of(rank);
        let position = rank - self.roster.ranks(p).start;
        match command {
            Command::Load { buffer, tensor } => {
                self.running.stages[p].load(buffer, position, &tensor).map(|()| Reply::Done)
            }
            Command::Fetch { buffer } => self.running.stages[p].fetch(buffer, position).map(Reply::Fetched),
            Command::Prepare { plan, weights } if position == 0 => {
                self.prepared.push((plan, weights));
                if self.prepared.len() == self.roster.plans.len() {
                    let (plans, weights) = std::mem::take(&mut self.prepared).into_iter().unzip();
                    let roster = Roster { plans, loss_is_mean: self.roster.loss_is_mean };
                    self.evaluation = Some((Running::without_weights(&roster, &self.compiler)?, weights));
                }
                Ok(Reply::Done)
            }
            _ => Ok(Reply::Done),
        }
    }

    /// Runs a command that all devices have.
    fn answer_together(&mut self, command: &Command) -> Result<Vec<Reply>, RuntimeError> {
        match command {
            Command::Step { inputs, scalars, results, .. } => self.running.step(inputs, scalars, *results),
            Command::Evaluate { inputs } => self.evaluate(inputs),
            _ => {
                self.running.flush()?;
                Ok((0..self.replies.len()).map(|_| Reply::Done).collect())
            }
        }
    }

    /// Runs the evaluation with the weights of the trained programs.
    fn evaluate(&mut self, inputs: &Arc<BTreeMap<String, HostTensor>>) -> Result<Vec<Reply>, RuntimeError> {
        let (evaluated, weights) = self.evaluation.as_mut().ok_or(RuntimeError::NoStep)?;
        let stages = evaluated.stages.iter_mut().zip(&self.running.stages);
        for ((stage, trained), pairs) in stages.zip(weights) {
            let held = |&mut (held, read): &mut (BufferId, BufferId)| {
                Some(((read, 0), trained.lasting.get(&(held, 0))?.clone()))
            };
            stage.lasting = pairs.iter_mut().filter_map(held).collect();
        }
        let replies = evaluated.step(inputs, &BTreeMap::new(), true);
        // A weight that two programs refer to would be copied by the next update.
        evaluated.stages.iter_mut().for_each(|stage| stage.lasting.clear());
        replies
    }
}

impl Devices for XlaDevices {
    fn ranks(&self) -> Vec<usize> {
        (0..self.replies.len()).collect()
    }

    fn send(&mut self, rank: usize, command: Command) -> Result<(), RuntimeError> {
        if !matches!(command, Command::Step { .. } | Command::Flush | Command::Evaluate { .. }) {
            let reply = self.answer(rank, command);
            self.replies[rank].push_back(reply);
            return Ok(());
        }
        self.arrived += 1;
        if self.arrived < self.replies.len() {
            return Ok(());
        }
        self.arrived = 0;
        match self.answer_together(&command) {
            Ok(replies) => self.replies.iter_mut().zip(replies).for_each(|(list, reply)| list.push_back(Ok(reply))),
            Err(error) => self.replies[0].push_back(Err(error)),
        }
        Ok(())
    }

    fn collect(&mut self, ranks: &[usize]) -> Result<Vec<(usize, Reply)>, RuntimeError> {
        // The first device reports an error of all, and the others have no reply then.
        let take = |&rank: &usize| Ok((rank, self.replies[rank].pop_front().unwrap_or(Err(RuntimeError::Stopped))?));
        ranks.iter().map(take).collect()
    }

    fn peak_bytes(&self) -> Vec<[u64; 2]> {
        self.peaks.clone()
    }
}
