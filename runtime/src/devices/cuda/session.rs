//! Sessions on GPUs. They have a thread for each device of the programs, which runs the executor of its tape, in one
//! process or in several.
//!
//! Devices are distributed over the available GPUs. If each has its own, they communicate through NCCL; if several
//! share one, through the host. Devices of several processes always have their own GPUs, and their hosts coordinate
//! through a [`World`].

use super::bytes::{decode, encode};
use super::compile::Compiler;
use super::context::Context;
use super::driver::Driver;
use super::error::CudaError;
use super::executor::{Executor, ExecutorError, Peers, Running};
use super::library::Search;
use super::nccl::{Channel, GroupId, Nccl, Watchdog};
use super::nvtx::Ranges;
use super::survey::Survey;
use crate::check::{check, expect_plain};
use crate::device::{Command, Plan, Reply, ResultPart};
use crate::error::{RanksError, RuntimeError};
use crate::host::HostTensor;
use crate::layout::{held_indices, summand_of};
use crate::mailbox::Mailbox;
use crate::ranks::{Layout, World};
use crate::roster::Roster;
use crate::session::{Answer, Devices, Session, Workers};
use crate::tape::{Communicator, Content, Given, Options as TapeOptions, Region, Taken, Tape, build};
use altiplano_ir::program::{Buffer, BufferId, BufferKind, Programs};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

/// Options of a session on GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CudaOptions {
    pub search: Search,
    /// Folder of the cache of compiled kernels.
    pub cache: Option<PathBuf>,
    pub running: Running,
    /// Predicted memory per device of each program, for messages; empty if there is no prediction.
    pub predicted_bytes: Vec<u64>,
}

/// This process's devices. Dropping them ends their threads.
struct Gpus {
    workers: Workers,
    /// Bytes of GPU memory that each device uses for tensors.
    arena_bytes: Vec<u64>,
    /// Present if devices communicate through NCCL.
    nccl: Option<Arc<Meeting>>,
    /// Present if other processes run the other devices.
    world: Option<World>,
}

/// The distribution of devices over processes, by the ranks of tapes.
struct Shares {
    process_of: Vec<usize>,
    /// The devices of this process, each with the index of its GPU among those that the process sees.
    own: BTreeMap<usize, usize>,
}

/// Time limit for members of a group that wait for each other, longer than any reasonable step.
const PATIENCE: Duration = Duration::from_secs(600);

/// Communication of devices on several GPUs: the groups of all their tapes, and the watchdog.
struct Meeting {
    nccl: Nccl,
    /// Groups, in the order in which all devices join them.
    groups: BTreeMap<Communicator, GroupId>,
    watchdog: Watchdog,
}

impl Meeting {
    /// Creates the id of each group in the process of its first member, and distributes it to all.
    fn new(
        search: &Search,
        tapes: &[Arc<Tape>],
        shares: &Shares,
        world: Option<&World>,
    ) -> Result<Arc<Meeting>, RuntimeError> {
        let nccl = Nccl::open(search)?;
        let all: BTreeSet<&Communicator> = tapes.iter().flat_map(|tape| &tape.communicators).collect();
        let process = |group: &Communicator| group.ranks.first().map_or(0, |&first| shares.process_of[first as usize]);
        let me = world.map_or(0, World::rank);
        let mut words = Vec::new();
        for _ in all.iter().filter(|group| process(group) == me) {
            words.extend(nccl.group_id()?.words());
        }
        let told = match world {
            Some(world) => world.tell(&words)?,
            None => vec![words],
        };
        let mut told: Vec<_> = told.iter().map(|words| words.as_chunks::<{ GroupId::WORDS }>().0.iter()).collect();
        let mut groups = BTreeMap::new();
        for group in all {
            let id = told.get_mut(process(group)).and_then(Iterator::next).map(GroupId::of_words);
            groups.insert(group.clone(), id.ok_or_else(|| RuntimeError::Ranks(Box::new(RanksError::Devices)))?);
        }
        let watchdog = nccl.watch(PATIENCE);
        Ok(Arc::new(Meeting { nccl, groups, watchdog }))
    }

    /// Joins the groups of a device, whose context must be current. All devices join in one order, which avoids
    /// deadlocks.
    fn join(&self, tape: &Tape) -> Result<Vec<Channel>, CudaError> {
        let mut channels: Vec<Option<Channel>> = tape.communicators.iter().map(|_| None).collect();
        for (group, id) in &self.groups {
            if let Some(at) = tape.communicators.iter().position(|c| c == group) {
                channels[at] = Some(self.nccl.join(*id, group, tape.rank)?);
            }
        }
        Ok(channels.into_iter().flatten().collect())
    }
}

impl Session {
    /// Builds the tapes of programs and sets up a GPU for each device. Parameters and state are zero.
    pub fn on_gpus(programs: &Programs, options: &CudaOptions) -> Result<Session, RuntimeError> {
        start(programs, options, None)
    }

    /// Sets up this process's share of the GPUs; all processes of the world must call it.
    pub fn on_gpus_of(
        world: World,
        programs: &Programs,
        layout: &Layout,
        options: &CudaOptions,
    ) -> Result<Session, RuntimeError> {
        start(programs, options, Some((world, layout)))
    }
}

fn start(programs: &Programs, options: &CudaOptions, team: Option<(World, &Layout)>) -> Result<Session, RuntimeError> {
    check(programs)?;
    expect_plain(programs)?;
    let survey = Survey::of(&options.search);
    let gpus = survey.usable()?;
    let shares = Shares::of(programs, gpus.len(), team.as_ref().map(|(world, layout)| (world, *layout)))?;
    let world = team.map(|(world, _)| world);
    let driver = Driver::open(&options.search)?;
    // With several processes, each uses only its own GPUs.
    let wanted = |at: usize| world.is_none() || shares.own.values().any(|&gpu| gpu == at);
    let context = |(at, gpu)| wanted(at).then(|| Context::new(&driver, gpu)).transpose();
    let contexts = gpus.into_iter().enumerate().map(context).collect::<Result<Vec<_>, CudaError>>()?;
    let compiler = Arc::new(Compiler::open(&options.search, options.cache.clone())?);
    let tapes: Vec<Arc<Tape>> = build(programs, &TapeOptions::default())?.into_iter().map(Arc::new).collect();
    let roster = Roster::new(programs, false, |_| false);
    // NCCL needs a GPU for each device. If some share one, they communicate through the host.
    let nccl = match tapes.len() > 1 && (world.is_some() || contexts.len() >= tapes.len()) {
        true => Some(Meeting::new(&options.search, &tapes, &shares, world.as_ref())?),
        false => None,
    };
    if let (Some(world), Some(meeting)) = (&world, &nccl) {
        let nccl = meeting.nccl.clone();
        world.watch().explain(Box::new(move || nccl.under_way()));
    }
    let (mut devices, mut arena_bytes) = (Vec::new(), Vec::new());
    for (tape, mailbox) in tapes.iter().zip(Mailbox::network(tapes.len(), false)) {
        let Some(&gpu) = shares.own.get(&(tape.rank as usize)) else { continue };
        let Some(context) = contexts.get(gpu).cloned().flatten() else { continue };
        let device = Device {
            plan: roster.plans[tape.program as usize].clone(),
            tape: tape.clone(),
            context,
            compiler: compiler.clone(),
            options: options.clone(),
            nccl: nccl.clone(),
        };
        arena_bytes.push(tape.arena.bytes);
        let serve = move |commands, replies| device.serve(mailbox, &commands, &replies);
        devices.push((tape.rank as usize, tape.rank, serve));
    }
    let mut gpus = Gpus { workers: Workers::start(devices)?, arena_bytes, nccl, world };
    let own = gpus.ranks();
    gpus.collect(&own)?;
    // Joining a group waits for its other members, so all of them must be set up first.
    if gpus.nccl.is_some() {
        gpus.tell(&[])?;
        own.iter().try_for_each(|&rank| gpus.send(rank, Command::Join))?;
        gpus.collect(&own)?;
    }
    Ok(Session::over(roster, Box::new(gpus), false))
}

impl Devices for Gpus {
    fn ranks(&self) -> Vec<usize> {
        self.workers.ranks()
    }

    fn send(&mut self, rank: usize, command: Command) -> Result<(), RuntimeError> {
        self.workers.send(rank, command)
    }

    fn collect(&mut self, ranks: &[usize]) -> Result<Vec<(usize, Reply)>, RuntimeError> {
        // The error that the watchdog found is the cause of all aborted operations.
        let found = |error| match self.nccl.as_ref().and_then(|meeting| meeting.watchdog.found()) {
            Some(found) => found.into(),
            None => error,
        };
        self.workers.collect(ranks).map_err(found)
    }

    fn peak_bytes(&self) -> Vec<[u64; 2]> {
        self.arena_bytes.iter().map(|&bytes| [bytes, 0]).collect()
    }

    fn world(&self) -> Option<&World> {
        self.world.as_ref()
    }

    fn finish(self: Box<Self>) -> Result<(), RuntimeError> {
        let Gpus { workers, nccl, world, .. } = *self;
        let Some(world) = world else { return Ok(()) };
        world.meet()?;
        drop((workers, nccl));
        world.finish()
    }

    fn uses_nccl(&self) -> bool {
        self.nccl.is_some()
    }
}

impl Shares {
    /// All devices in this process or, with a world, as its processes share them. `gpus` is the number that this
    /// process sees.
    fn of(programs: &Programs, gpus: usize, team: Option<(&World, &Layout)>) -> Result<Shares, RuntimeError> {
        let devices: Vec<u32> = programs.programs.iter().flat_map(|program| &program.devices).copied().collect();
        let Some((world, layout)) = team else {
            // A usable survey has at least one GPU.
            let own = (0..devices.len()).map(|rank| (rank, rank % gpus.max(1))).collect();
            return Ok(Shares { process_of: vec![0; devices.len()], own });
        };
        let failed = |error| RuntimeError::Ranks(Box::new(error));
        let shares = layout.shares(world.nodes()).map_err(failed)?;
        let process = |device: &u32| shares.iter().position(|share| share.contains(device));
        let process_of: Option<Vec<usize>> = devices.iter().map(process).collect();
        let process_of = process_of.ok_or_else(|| failed(RanksError::Devices))?;
        let (me, own_gpus) = (world.rank(), world.gpus(&shares, gpus).map_err(failed)?);
        let own = (0..devices.len()).filter(|&rank| process_of[rank] == me);
        Ok(Shares { own: own.zip(own_gpus).collect(), process_of })
    }
}

/// The inputs of a device's thread.
struct Device {
    plan: Arc<Plan>,
    tape: Arc<Tape>,
    context: Arc<Context>,
    compiler: Arc<Compiler>,
    options: CudaOptions,
    nccl: Option<Arc<Meeting>>,
}

impl Device {
    /// Sets up the device, then executes commands until the channel closes.
    fn serve(self, mailbox: Mailbox, commands: &Receiver<Command>, replies: &Sender<Answer>) {
        let rank = self.tape.rank as usize;
        let CudaOptions { search, running, .. } = &self.options;
        let peers = Peers::Host(mailbox);
        let made = Executor::new(self.tape.clone(), &self.context, &self.compiler, search, peers, *running);
        let mut executor = match made {
            Ok(executor) => executor,
            Err(error) => {
                let error = self.explained(error);
                let _ = replies.send((rank, Err(error.into())));
                return;
            }
        };
        executor.tell(Ranges::new(search, &self.plan.program, &self.tape));
        let mut reply = Ok(Reply::Done);
        loop {
            if reply.is_err() {
                executor.stop_all();
            }
            if replies.send((rank, reply)).is_err() {
                return;
            }
            let Ok(command) = commands.recv() else { return };
            reply = self.answer(&mut executor, command);
        }
    }

    /// Adds the largest regions and the predicted memory to an error for too little memory.
    fn explained(&self, mut error: ExecutorError) -> ExecutorError {
        const NAMED: usize = 3;
        let ExecutorError::SetUp { error: cause, .. } = &mut error else { return error };
        let CudaError::OutOfMemory { detail, .. } = &mut **cause else { return error };
        let program = &self.plan.program;
        let name = |region: &Region| match &region.content {
            Content::Buffer { buffer, .. } => program.buffer(*buffer).name.clone(),
            Content::Value { body, value, .. } | Content::Constant { body, value } => {
                let graph = &program.bodies[*body as usize].graph;
                match graph.nodes.get(value.index()) {
                    Some(node) if node.name.is_empty() => format!("{value} ({})", node.op.name()),
                    Some(node) => node.name.clone(),
                    None => value.to_string(),
                }
            }
            Content::Staging { .. } => "something to send".to_string(),
        };
        // The largest region of each name, since the tensors of all microbatches share one.
        let mut largest: BTreeMap<String, u64> = BTreeMap::new();
        for region in &self.tape.regions {
            let most = largest.entry(name(region)).or_default();
            *most = (*most).max(region.bytes);
        }
        let mut largest: Vec<(String, u64)> = largest.into_iter().collect();
        largest.sort_by_key(|(_, bytes)| Reverse(*bytes));
        let named: Vec<String> = largest.iter().take(NAMED).map(|(name, bytes)| format!("{name} ({bytes})")).collect();
        let predicted = self.options.predicted_bytes.get(self.tape.program as usize);
        let predicted = predicted.map_or(String::new(), |bytes| format!("the plan predicts {bytes}; "));
        *detail = format!("{predicted}the largest tensors are {}", named.join(", "));
        error
    }

    fn answer(&self, executor: &mut Executor, command: Command) -> Result<Reply, RuntimeError> {
        match command {
            Command::Join => {
                let Some(meeting) = &self.nccl else { return Ok(Reply::Done) };
                let joined = self.context.make_current().and_then(|()| meeting.join(&self.tape));
                let failed = |error| ExecutorError::SetUp { rank: self.tape.rank, error: Box::new(error) };
                executor.meet(joined.map_err(failed)?);
                Ok(Reply::Done)
            }
            Command::Load { buffer, tensor } => {
                let description = self.plan.program.buffer(buffer);
                let part = encode(description.ty.dtype, self.cut(description, &tensor, 0));
                executor.load(buffer, &part)?;
                Ok(Reply::Done)
            }
            Command::Fetch { buffer } => Ok(Reply::Fetched(self.part(buffer, &executor.fetch(buffer)?))),
            Command::Step { inputs, scalars, results: wanted, .. } => {
                let taken = executor.step(|given, bytes| self.give(given, &inputs, &scalars, bytes))?;
                let (mut losses, mut results) = (Vec::new(), Vec::new());
                for (what, bytes) in taken {
                    match what {
                        // The loss is a float of the program's type.
                        Taken::Loss { microbatch } => {
                            let loss = self.plan.program.buffers.iter().find(|b| b.kind == BufferKind::Loss);
                            let value = loss.and_then(|loss| decode(loss.ty.dtype, &bytes).first().copied());
                            losses.extend(value.map(|value| (microbatch, value)));
                        }
                        Taken::Output { buffer, microbatch } if wanted => {
                            results.push(ResultPart { buffer, microbatch, part: self.part(buffer, &bytes) });
                        }
                        Taken::Output { .. } => {}
                    }
                }
                losses.sort_by_key(|&(microbatch, _)| microbatch);
                let losses = losses.into_iter().map(|(_, loss)| loss).collect();
                Ok(Reply::Stepped { losses, results, spans: Vec::new(), ended: Instant::now() })
            }
            // All calls of a step have run when it ends, by `expect_plain`.
            Command::Flush => Ok(Reply::Done),
            Command::Prepare { .. } | Command::Evaluate { .. } => {
                let problem = "is to run with the weights of another, which GPUs do not support yet";
                Err(RuntimeError::Program { program: self.plan.index, problem })
            }
        }
    }

    /// This device's part of a buffer, from the bytes that the GPU has.
    fn part(&self, buffer: BufferId, bytes: &[u8]) -> HostTensor {
        let Buffer { ty, sharding, .. } = self.plan.program.buffer(buffer);
        HostTensor::from_f64(sharding.local_type(ty, &self.plan.program.mesh), &decode(ty.dtype, bytes))
    }

    /// Writes the values that the host provides, which were checked to exist.
    fn give(
        &self,
        given: &Given,
        inputs: &BTreeMap<String, HostTensor>,
        scalars: &BTreeMap<String, f64>,
        bytes: &mut [u8],
    ) {
        let (Given::Input { buffer, .. } | Given::Scalar { buffer }) = given;
        let buffer = self.plan.program.buffer(*buffer);
        let values = match (given, &buffer.kind) {
            (Given::Scalar { .. }, BufferKind::Scalar { name }) => scalars.get(name).map(|value| vec![*value]),
            (Given::Input { microbatch, .. }, BufferKind::Input { name }) => {
                inputs.get(name).map(|tensor| self.cut(buffer, tensor, microbatch.unwrap_or(0).into()))
            }
            _ => None,
        };
        let encoded = encode(buffer.ty.dtype, values.unwrap_or_default());
        if encoded.len() == bytes.len() {
            bytes.copy_from_slice(&encoded);
        }
    }
    /// This device's part of a tensor, or of a microbatch's rows if the tensor has more rows than the buffer.
    fn cut(&self, buffer: &Buffer, tensor: &HostTensor, microbatch: u64) -> Vec<f64> {
        let mesh = &self.plan.program.mesh;
        let coordinates = mesh.coordinates(self.tape.position);
        let mut indices = held_indices(&buffer.sharding, mesh, &coordinates);
        for (d, list) in indices.iter_mut().enumerate().filter(|(d, _)| tensor.ty.shape[*d] != buffer.ty.shape[*d]) {
            list.iter_mut().for_each(|i| *i += buffer.ty.shape[d] * microbatch);
        }
        match summand_of(&buffer.sharding, &coordinates) {
            Some(reducer) => vec![reducer.neutral(buffer.ty.dtype); indices.iter().map(Vec::len).product()],
            None => tensor.at(&indices).to_f64(),
        }
    }
}
