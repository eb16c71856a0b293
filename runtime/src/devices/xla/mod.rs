//! Sessions on the devices of XLA, through a PJRT plugin for CPUs, GPUs or TPUs.
//!
//! The thread of the session drives all devices of its process: it follows the schedules of their programs and starts
//! bodies without waiting for them, in an order in which every value exists when it is read. Parameters, optimizer state,
//! gradients and values between bodies stay on the devices.
//!
//! Collectives stay in one process, so that each process runs whole programs, and sends what others read.

mod bytes;
mod clock;
mod compile;
mod nan;
mod running;
mod stage;
mod team;
mod transfer;

use crate::check::check;
use crate::device::{Command, Reply};
use crate::error::{KernelError, Place, RuntimeError};
use crate::host::HostTensor;
use crate::ranks::{Layout, World};
use crate::roster::Roster;
use crate::session::{Devices, Session};
use altiplano_ir::program::{BufferId, Program, Programs};
use altiplano_xla::certify::peak;
use altiplano_xla::join;
use altiplano_xla::pjrt::{Client, ClientOption, Memory, PjrtError, Platform, Plugin, platform_of};
use compile::Compiler;
use running::Running;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use team::Share;

/// Options of a session on XLA's devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XlaOptions {
    /// The file of the plugin.
    pub plugin: PathBuf,
    /// The platform that the plugin must be for; any if absent.
    pub platform: Option<Platform>,
    /// Stop at the first op that makes a NaN from inputs without one.
    pub check_nan: bool,
    /// Record a timeline of each step.
    pub record: bool,
    /// The memory of a device. Programs that would take more are compiled to hold less, with less overlap.
    pub memory_bytes: Option<u64>,
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
        start(programs, options, Share::whole(programs))
    }

    /// As [`Session::on_xla`], for this process's share of the programs. All processes of the world must call it.
    pub fn on_xla_of(
        world: World,
        programs: &Programs,
        layout: &Layout,
        options: &XlaOptions,
    ) -> Result<Session, RuntimeError> {
        start(programs, options, Share::of(world, programs, layout)?)
    }
}

/// A plugin that several sessions use one after another, with all of its devices.
pub struct OpenedPlugin {
    options: XlaOptions,
    compiler: Rc<Compiler>,
}

impl OpenedPlugin {
    /// Opens a plugin. One for CPUs makes this many devices.
    pub fn new(options: &XlaOptions, cpus: usize) -> Result<OpenedPlugin, RuntimeError> {
        let platform = options.platform.or_else(|| platform_of(&options.plugin));
        let client = open(options, if platform == Some(Platform::Cpu) { cpus } else { 1 }, None)?;
        let ids = (0..client.num_devices() as u32).collect();
        let compiler = Compiler::new(client, ids, options.cache.clone()).map_err(XlaError::from)?;
        Ok(OpenedPlugin { options: options.clone(), compiler: Rc::new(compiler) })
    }

    pub fn num_devices(&self) -> usize {
        self.compiler.client.num_devices()
    }

    /// Returns whether the devices are CPUs.
    pub fn is_cpu(&self) -> bool {
        self.compiler.client.platform().is_ok_and(|platform| platform == Platform::Cpu.name())
    }

    /// The model of the first device, such as `NVIDIA H100 80GB HBM3`.
    pub fn kind(&self) -> Result<String, RuntimeError> {
        Ok(self.compiler.client.kind(0).map_err(XlaError::from)?)
    }

    /// A session with the bodies of programs as they are. Programs that were compiled before are not compiled again.
    pub fn session(&self, programs: &Programs) -> Result<Session, RuntimeError> {
        check(programs)?;
        start_on(programs, &self.compiler, Share::whole(programs), &self.options)
    }
}

fn start(programs: &Programs, options: &XlaOptions, share: Share) -> Result<Session, RuntimeError> {
    check(programs)?;
    let programs = &joined_bodies(programs, options);
    let own = share.own.iter().map(|&p| &programs.programs[p]);
    let ids: BTreeSet<u32> = own.flat_map(|program| &program.devices).copied().collect();
    let client = open(options, ids.len(), Some(&share))?;
    let compiler = Compiler::new(client, ids.into_iter().collect(), options.cache.clone()).map_err(XlaError::from)?;
    start_on(programs, &Rc::new(compiler), share, options)
}

fn start_on(
    programs: &Programs,
    compiler: &Rc<Compiler>,
    share: Share,
    options: &XlaOptions,
) -> Result<Session, RuntimeError> {
    let share = Rc::new(share);
    let own = || share.own.iter().map(|&p| &programs.programs[p]);
    let roster = Roster::new(programs, options.check_nan, |_| false);
    let limit = options.memory_bytes.map(|bytes| (bytes as f64 * f64::from(MEMORY_FRACTION)) as u64);
    let running = Running::new(&roster, compiler, &share, limit)?;
    let bodies = running.stages.iter().map(|stage| stage.memory());
    let peaks = own().zip(bodies).flat_map(|(program, bodies): (&Program, Vec<Memory>)| {
        vec![[peak(program, &programs.transfers, &bodies).bytes, 0]; program.devices.len()]
    });
    let devices = XlaDevices {
        peaks: peaks.collect(),
        replies: share.own.iter().flat_map(|&p| roster.ranks(p)).map(|rank| (rank, VecDeque::new())).collect(),
        roster: roster.clone(),
        compiler: compiler.clone(),
        running,
        share,
        arrived: 0,
        prepared: (None, Vec::new()),
        evaluation: None,
    };
    Ok(Session::over(roster, Box::new(devices), options.record))
}

/// The programs with bodies joined that run one after another, unless each op or body has to be found again.
fn joined_bodies(programs: &Programs, options: &XlaOptions) -> Programs {
    let mut joined = programs.clone();
    if !options.check_nan && !options.record {
        joined.programs.iter_mut().for_each(|program| *program = join::joined(program));
    }
    joined
}

/// The part of a GPU's memory that XLA gives to tensors. Its default is three quarters, and plans fill devices; the rest is
/// for libraries and the context.
const MEMORY_FRACTION: f32 = 0.95;

/// Opens the plugin and makes a client with enough devices for a process, which has all GPUs that it sees or a share.
fn open(options: &XlaOptions, needed: usize, share: Option<&Share>) -> Result<Client, RuntimeError> {
    let path = &options.plugin;
    let plugin = Plugin::open(path).map_err(XlaError::from)?;
    let count = [ClientOption::Number("cpu_device_count".to_string(), needed as i64)];
    let client = match options.platform.or_else(|| platform_of(path)) {
        Some(Platform::Cpu) => plugin.client(&count),
        Some(platform @ (Platform::Cuda | Platform::Rocm)) => {
            let mut settings = vec![ClientOption::Real("memory_fraction".to_string(), MEMORY_FRACTION)];
            if platform == Platform::Cuda {
                // Processes of a node share its GPUs.
                let gpus = share.map(Share::gpus).transpose()?.flatten();
                let gpus = gpus.map(|gpus| gpus.map(|gpu| gpu as i64).collect());
                settings.extend(gpus.map(|gpus| ClientOption::Numbers("visible_devices".to_string(), gpus)));
            }
            plugin.client(&settings)
        }
        Some(Platform::Tpu) => plugin.client(&[]),
        None => plugin.client(&[]).and_then(|client| {
            match client.platform()? == Platform::Cpu.name() && client.num_devices() < needed {
                true => plugin.client(&count),
                false => Ok(client),
            }
        }),
    };
    let client = client.map_err(XlaError::from)?;
    let (platform, found) = (client.platform().map_err(XlaError::from)?, client.num_devices());
    match options.platform.map(Platform::name) {
        Some(wanted) if wanted != platform => {
            Err(XlaError::Platform { path: path.clone(), found: platform, wanted }.into())
        }
        _ if needed > found => Err(XlaError::Devices { path: path.clone(), platform, needed, found }.into()),
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

/// The devices of a session in this process.
struct XlaDevices {
    roster: Roster,
    compiler: Rc<Compiler>,
    share: Rc<Share>,
    running: Running,
    /// The replies of each rank that were not collected yet.
    replies: BTreeMap<usize, VecDeque<Result<Reply, RuntimeError>>>,
    /// The number of devices that have the command which all devices execute together.
    arrived: usize,
    /// The programs of the next evaluation, and the weights that those of this process share, until all are known.
    prepared: (Option<Roster>, Vec<Weights>),
    /// The programs of the evaluation, and the weights of each.
    evaluation: Option<(Running, Vec<Weights>)>,
    peaks: Vec<[u64; 2]>,
}

impl XlaDevices {
    /// Runs a command that is for one device.
    fn answer(&mut self, rank: usize, command: Command) -> Result<Reply, RuntimeError> {
        let p = self.roster.program_of(rank);
        let position = rank - self.roster.ranks(p).start;
        let own = self.share.own.iter().position(|&own| own == p).ok_or(RuntimeError::Stopped)?;
        let stage = &mut self.running.stages[own];
        match command {
            Command::Load { buffer, tensor } => stage.load(buffer, position, &tensor).map(|()| Reply::Done),
            Command::Fetch { buffer } => stage.fetch(buffer, position).map(Reply::Fetched),
            Command::Prepare { weights, .. } if position == 0 => {
                let (roster, all) = &mut self.prepared;
                all.push(weights);
                if all.len() == self.share.own.len()
                    && let Some(roster) = roster.take()
                {
                    let weights = std::mem::take(all);
                    let evaluated = Running::without_weights(&roster, &self.compiler, &self.share)?;
                    self.evaluation = Some((evaluated, weights));
                }
                Ok(Reply::Done)
            }
            _ => Ok(Reply::Done),
        }
    }

    /// Runs a command that all devices have.
    fn answer_together(&mut self, command: &Command) -> Result<Vec<Reply>, RuntimeError> {
        match command {
            Command::Step { inputs, scalars, results, origin } => self.running.step(inputs, scalars, *results, *origin),
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
        let replies = evaluated.step(inputs, &BTreeMap::new(), true, None);
        // A weight that two programs refer to would be copied by the next update.
        evaluated.stages.iter_mut().for_each(|stage| stage.lasting.clear());
        replies
    }
}

impl Devices for XlaDevices {
    fn ranks(&self) -> Vec<usize> {
        self.replies.keys().copied().collect()
    }

    fn send(&mut self, rank: usize, command: Command) -> Result<(), RuntimeError> {
        if !matches!(command, Command::Step { .. } | Command::Flush | Command::Evaluate { .. }) {
            let reply = self.answer(rank, command);
            self.replies.entry(rank).or_default().push_back(reply);
            return Ok(());
        }
        self.arrived += 1;
        if self.arrived < self.replies.len() {
            return Ok(());
        }
        self.arrived = 0;
        match self.answer_together(&command) {
            Ok(replies) => {
                self.replies.values_mut().zip(replies).for_each(|(list, reply)| list.push_back(Ok(reply)));
            }
            Err(error) => {
                if let Some(first) = self.replies.values_mut().next() {
                    first.push_back(Err(error));
                }
            }
        }
        Ok(())
    }

    fn collect(&mut self, ranks: &[usize]) -> Result<Vec<(usize, Reply)>, RuntimeError> {
        // The first device reports an error of all, and the others have no reply then.
        let mut next = |rank: &usize| self.replies.get_mut(rank).and_then(VecDeque::pop_front);
        ranks.iter().map(|rank| Ok((*rank, next(rank).unwrap_or(Err(RuntimeError::Stopped))?))).collect()
    }

    fn peak_bytes(&self) -> Vec<[u64; 2]> {
        self.peaks.clone()
    }

    fn will_evaluate(&mut self, roster: &Roster) {
        self.prepared = (Some(roster.clone()), Vec::new());
    }

    fn world(&self) -> Option<&World> {
        self.share.world()
    }

    fn finish(self: Box<Self>) -> Result<(), RuntimeError> {
        let XlaDevices { share, running, evaluation, .. } = *self;
        drop((running, evaluation));
        // Nothing else refers to it now.
        Rc::into_inner(share).map_or(Ok(()), Share::finish)
    }
}
