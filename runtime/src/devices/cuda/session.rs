//! A session on GPUs. It has a thread for each device of the programs, which runs the executor of its tape, in one
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
use crate::check::{check, checked_inputs, expect_plain, step_loss};
use crate::collective::words_of;
use crate::error::{KernelError, RanksError, RuntimeError};
use crate::host::HostTensor;
use crate::layout::{held_indices, is_replica, mark_rows, summand_of};
use crate::mailbox::Mailbox;
use crate::ranks::connect::host_name;
use crate::ranks::{Layout, World};
use crate::tape::{Communicator, Content, Given, Options as TapeOptions, Region, Taken, Tape, build};
use altiplano_ir::program::{Buffer, BufferId, BufferKind, Program, Programs};
use altiplano_ir::tensor::for_each_index;
use altiplano_ir::types::strides;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Options of a session.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CudaOptions {
    pub search: Search,
    /// Folder of the cache of compiled kernels.
    pub cache: Option<PathBuf>,
    pub running: Running,
    /// Predicted memory per device of each program, for messages; empty if there is no prediction.
    pub predicted_bytes: Vec<u64>,
}

/// The results of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct CudaStep {
    /// Mean or sum of the losses, as the programs say.
    pub loss: f64,
    /// The loss of each microbatch.
    pub losses: Vec<f64>,
    /// Wall-clock seconds.
    pub seconds: f64,
}

/// Running programs on GPUs. Dropping it ends its threads.
pub struct CudaSession {
    programs: Arc<Programs>,
    /// The tapes of all devices, by rank.
    tapes: Vec<Arc<Tape>>,
    /// Command channels of this process's devices, by rank.
    orders: BTreeMap<usize, Sender<Order>>,
    replies: Receiver<(usize, Result<Reply, RuntimeError>)>,
    threads: Vec<JoinHandle<()>>,
    stopped: bool,
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

/// Host tensors, from which devices cut their parts.
type Tensors = BTreeMap<String, HostTensor>;

enum Order {
    /// Joins the groups of the tape.
    Join,
    Load {
        buffer: BufferId,
        bytes: Vec<u8>,
    },
    Fetch {
        buffer: BufferId,
    },
    Step {
        inputs: Arc<Tensors>,
        scalars: Arc<BTreeMap<String, f64>>,
    },
}

enum Reply {
    /// The device is set up, or has joined its groups.
    Ready,
    Loaded,
    Fetched(Vec<u8>),
    Stepped(Vec<(Option<u32>, f64)>),
}

impl CudaSession {
    /// Builds the tapes of programs and sets up a device for each. Parameters and state are zero.
    pub fn new(programs: &Programs, options: &CudaOptions) -> Result<CudaSession, RuntimeError> {
        CudaSession::start(programs, options, None)
    }

    /// Sets up this process's share of the devices; all processes of the world must call it.
    pub fn of_ranks(
        world: World,
        programs: &Programs,
        layout: &Layout,
        options: &CudaOptions,
    ) -> Result<CudaSession, RuntimeError> {
        CudaSession::start(programs, options, Some((world, layout)))
    }

    fn start(
        programs: &Programs,
        options: &CudaOptions,
        team: Option<(World, &Layout)>,
    ) -> Result<CudaSession, RuntimeError> {
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
        let programs = Arc::new(programs.clone());
        let tapes: Vec<Arc<Tape>> = build(&programs, &TapeOptions::default())?.into_iter().map(Arc::new).collect();
        let (reply, replies) = channel();
        // NCCL needs a GPU for each device. If some share one, they communicate through the host.
        let nccl = match tapes.len() > 1 && (world.is_some() || contexts.len() >= tapes.len()) {
            true => Some(Meeting::new(&options.search, &tapes, &shares, world.as_ref())?),
            false => None,
        };
        if let (Some(world), Some(meeting)) = (&world, &nccl) {
            let nccl = meeting.nccl.clone();
            world.watch().explain(Box::new(move || nccl.under_way()));
        }
        let (orders, threads, stopped) = (BTreeMap::new(), Vec::new(), false);
        let mut session = CudaSession { programs, tapes, orders, replies, threads, stopped, nccl, world };
        for (tape, mailbox) in session.tapes.iter().zip(Mailbox::network(session.tapes.len(), false)) {
            let Some(&gpu) = shares.own.get(&(tape.rank as usize)) else { continue };
            let Some(context) = contexts.get(gpu).cloned().flatten() else { continue };
            let (order, orders) = channel();
            let device = Device {
                programs: session.programs.clone(),
                tape: tape.clone(),
                context,
                compiler: compiler.clone(),
                options: options.clone(),
                nccl: session.nccl.clone(),
            };
            let (reply, rank) = (reply.clone(), tape.rank);
            let thread = std::thread::Builder::new()
                .name(format!("device {rank}"))
                .spawn(move || device.serve(mailbox, &orders, &reply))
                .map_err(|error| RuntimeError::Thread { device: rank, error })?;
            session.threads.push(thread);
            session.orders.insert(rank as usize, order);
        }
        session.answers(session.orders.len())?;
        // Joining a group waits for its other members, so all of them must be set up first.
        if session.nccl.is_some() {
            session.meet()?;
            let asked = session.orders.values().filter(|device| device.send(Order::Join).is_ok()).count();
            session.answers(asked)?;
        }
        Ok(session)
    }

    /// The processes that run the devices, if there are several.
    pub fn world(&self) -> Option<&World> {
        self.world.as_ref()
    }

    fn meet(&self) -> Result<(), RuntimeError> {
        self.world.as_ref().map_or(Ok(()), World::meet)
    }

    /// Ends the session in all processes.
    pub fn finish(mut self) -> Result<(), RuntimeError> {
        let world = self.world.take();
        if let Some(world) = &world {
            world.meet()?;
        }
        drop(self);
        world.map_or(Ok(()), World::finish)
    }

    /// Returns whether a device of this process holds a part of a parameter.
    pub fn holds(&self, name: &str) -> bool {
        let is_it = |kind: &BufferKind| matches!(kind, BufferKind::Parameter { name: n } if n == name);
        let of_device = |rank: &usize| {
            let program = &self.programs.programs[self.tapes[*rank].program as usize];
            program.buffers.iter().any(|buffer| is_it(&buffer.kind))
        };
        self.orders.keys().any(of_device)
    }

    /// Marks the rows of an input that devices of this process read; see [`mark_rows`].
    pub fn mark_rows(&self, input: &str, dim: usize, read: &mut [bool]) {
        for rank in self.orders.keys() {
            let tape = &self.tapes[*rank];
            mark_rows(&self.programs.programs[tape.program as usize], tape.position, input, dim, read);
        }
    }

    /// Loads a parameter into every device that holds a part of it, and into its `master` state.
    pub fn load_parameter(&mut self, name: &str, tensor: &HostTensor) -> Result<(), RuntimeError> {
        let is_it = |kind: &BufferKind| match kind {
            BufferKind::Parameter { name: n } => n == name,
            BufferKind::State { parameter, slot } => parameter == name && slot == "master",
            _ => false,
        };
        match self.load(name, is_it, tensor)? {
            0 => Err(RuntimeError::UnknownParameter { name: name.to_string() }),
            _ => Ok(()),
        }
    }

    /// Loads one tensor of optimizer state into every device that holds a part of it.
    pub fn load_state(&mut self, parameter: &str, slot: &str, tensor: &HostTensor) -> Result<(), RuntimeError> {
        match self.load(&format!("{parameter}/{slot}"), is_state(parameter, slot), tensor)? {
            0 => Err(RuntimeError::UnknownState { parameter: parameter.to_string(), slot: slot.to_string() }),
            _ => Ok(()),
        }
    }

    /// Loads a tensor into all buffers of a kind in this process. Returns the number of such buffers in all processes.
    fn load(
        &mut self,
        name: &str,
        is_it: impl Fn(&BufferKind) -> bool,
        tensor: &HostTensor,
    ) -> Result<usize, RuntimeError> {
        self.expect_running()?;
        tensor.check()?;
        let (mut asked, mut found) = (0, 0);
        for (rank, tape) in self.tapes.iter().enumerate() {
            let program = &self.programs.programs[tape.program as usize];
            for (id, buffer) in (0u32..).map(BufferId).zip(&program.buffers) {
                if !is_it(&buffer.kind) || tape.lasting(id).is_none() {
                    continue;
                }
                let expected = buffer.own_type();
                if expected.shape != tensor.ty.shape {
                    let found = tensor.ty.clone();
                    return Err(RuntimeError::TensorType { name: name.to_string(), expected, found });
                }
                found += 1;
                let Some(order) = self.orders.get(&rank) else { continue };
                let held = tensor.as_in(buffer);
                let part = cut(&self.programs, tape, buffer, &held, 0);
                let bytes = encode(buffer.ty.dtype, part);
                asked += usize::from(order.send(Order::Load { buffer: id, bytes }).is_ok());
            }
        }
        self.answers(asked).map(|_| found)
    }

    /// Assembles a parameter from one program that holds it. With several processes, all must call it, and only the
    /// first gets the result.
    pub fn gather_parameter(&mut self, name: &str) -> Result<Option<HostTensor>, RuntimeError> {
        let is_it = |kind: &BufferKind| matches!(kind, BufferKind::Parameter { name: n } if n == name);
        let holder = self.holder(is_it, || RuntimeError::UnknownParameter { name: name.to_string() })?;
        self.gather(holder)
    }

    /// Assembles one tensor of optimizer state, as [`Self::gather_parameter`] does.
    pub fn gather_state(&mut self, parameter: &str, slot: &str) -> Result<Option<HostTensor>, RuntimeError> {
        let unknown = || RuntimeError::UnknownState { parameter: parameter.to_string(), slot: slot.to_string() };
        let holder = self.holder(is_state(parameter, slot), unknown)?;
        self.gather(holder)
    }

    /// As [`Self::gather_parameter`], if this process assembles the tensor.
    pub fn parameter(&mut self, name: &str) -> Result<HostTensor, RuntimeError> {
        self.gather_parameter(name)?.ok_or_else(|| RuntimeError::Elsewhere { name: name.to_string() })
    }

    /// As [`Self::gather_state`], if this process assembles the tensor.
    pub fn state(&mut self, parameter: &str, slot: &str) -> Result<HostTensor, RuntimeError> {
        let elsewhere = || RuntimeError::Elsewhere { name: format!("{parameter}/{slot}") };
        self.gather_state(parameter, slot)?.ok_or_else(elsewhere)
    }

    /// The accumulated gradient of a parameter in the last step, summed over all programs that hold a copy.
    pub fn accumulator(&mut self, parameter: &str) -> Result<HostTensor, RuntimeError> {
        let is_it = |kind: &BufferKind| matches!(kind, BufferKind::Accumulator { parameter: p } if p == parameter);
        let mut sum: Option<HostTensor> = None;
        for holder in self.holders(is_it) {
            let Some(part) = self.gather(holder)? else { continue };
            sum = Some(match sum {
                None => part,
                Some(sum) => {
                    let both: Vec<f64> = sum.to_f64().iter().zip(part.to_f64()).map(|(x, y)| x + y).collect();
                    HostTensor::from_f64(sum.ty, &both)
                }
            });
        }
        sum.ok_or_else(|| RuntimeError::UnknownParameter { name: parameter.to_string() })
    }

    /// The first program with a buffer of a kind, and that buffer.
    fn holder(
        &self,
        is_it: impl Fn(&BufferKind) -> bool,
        unknown: impl Fn() -> RuntimeError,
    ) -> Result<(u32, BufferId), RuntimeError> {
        self.holders(is_it).first().copied().ok_or_else(unknown)
    }

    /// All programs with a buffer of a kind, and the first such buffer of each.
    fn holders(&self, is_it: impl Fn(&BufferKind) -> bool) -> Vec<(u32, BufferId)> {
        let of = |program: &Program| program.buffers.iter().position(|b| is_it(&b.kind));
        let all = (0u32..).zip(&self.programs.programs);
        all.filter_map(|(p, program)| Some((p, BufferId(of(program)? as u32)))).collect()
    }

    /// Assembles a buffer from the devices of its program, and reduces partial sums. With several processes, the first
    /// assembles it.
    fn gather(&mut self, (p, buffer_id): (u32, BufferId)) -> Result<Option<HostTensor>, RuntimeError> {
        self.expect_running()?;
        let programs = self.programs.clone();
        let program = &programs.programs[p as usize];
        let buffer = &program.buffers[buffer_id.0 as usize];
        let is_first = |tape: &Tape| {
            let coordinates = program.mesh.coordinates(tape.position);
            !is_replica(&buffer.sharding, &program.mesh, &coordinates)
        };
        let holds = |tape: &&Arc<Tape>| tape.program == p && tape.lasting(buffer_id).is_some() && is_first(tape);
        let holders = self.tapes.iter().filter(holds).filter_map(|tape| self.orders.get(&(tape.rank as usize)));
        let asked = holders.filter(|order| order.send(Order::Fetch { buffer: buffer_id }).is_ok()).count();
        let answers = self.answers(asked)?;
        let fetched = answers.into_iter().filter_map(|(rank, reply)| match reply {
            Reply::Fetched(bytes) => Some((rank, bytes)),
            _ => None,
        });
        let mut parts: BTreeMap<usize, Vec<u8>> = fetched.collect();
        if let Some(world) = &self.world {
            let told =
                |(rank, bytes): (&usize, &Vec<u8>)| [vec![*rank as u64, bytes.len() as u64], words_of(bytes)].concat();
            let Some(all) = world.gather(parts.iter().flat_map(told).collect())? else { return Ok(None) };
            for words in all.iter().skip(1) {
                let mut rest = &words[..];
                while let [rank, length, after @ ..] = rest {
                    let length = *length as usize;
                    let (part, after) = after.split_at_checked(length.div_ceil(8)).unwrap_or_default();
                    let bytes: &[u8] = bytemuck::cast_slice(part);
                    parts.insert(*rank as usize, bytes[..length.min(bytes.len())].to_vec());
                    rest = after;
                }
            }
        }
        let mut whole = vec![0.0; buffer.ty.elements() as usize];
        for (rank, bytes) in parts {
            let Some(tape) = self.tapes.get(rank) else { continue };
            let coordinates = program.mesh.coordinates(tape.position);
            let mut part = decode(buffer.ty.dtype, &bytes).into_iter();
            let indices = held_indices(&buffer.sharding, &program.mesh, &coordinates);
            each_held(&indices, &buffer.ty.shape, |i| whole[i] += part.next().unwrap_or(f64::NAN));
        }
        Ok(Some(HostTensor::from_f64(buffer.ty.clone(), &whole).out_of(buffer)))
    }

    /// Runs one step on a global batch, as [`crate::Session::step`] takes it.
    pub fn step(
        &mut self,
        inputs: &BTreeMap<String, HostTensor>,
        scalars: &BTreeMap<String, f64>,
    ) -> Result<CudaStep, RuntimeError> {
        self.expect_running()?;
        let Programs { programs, num_microbatches, .. } = &*self.programs;
        let inputs: Arc<Tensors> = Arc::new(checked_inputs(programs, *num_microbatches, inputs, scalars)?);
        let scalars = Arc::new(scalars.clone());
        let start = Instant::now();
        let order = || Order::Step { inputs: inputs.clone(), scalars: scalars.clone() };
        if let Some(world) = &self.world {
            world.note(&format!("in step {}", scalars.get("step").copied().unwrap_or_default()));
        }
        let asked = self.orders.values().filter(|device| device.send(order()).is_ok()).count();
        let replies = self.answers(asked)?;
        let mut losses: Vec<(Option<u32>, f64)> = Vec::new();
        for (_, reply) in replies {
            if let Reply::Stepped(of_device) = reply {
                losses.extend(of_device);
            }
        }
        if let Some(world) = &self.world {
            let word =
                |&(microbatch, loss): &(Option<u32>, f64)| [microbatch.map_or(0, |m| u64::from(m) + 1), loss.to_bits()];
            let all = world.tell(&losses.iter().flat_map(word).collect::<Vec<u64>>())?;
            let pair = |pair: &[u64]| (pair[0].checked_sub(1).map(|m| m as u32), f64::from_bits(pair[1]));
            losses = all.iter().flat_map(|words| words.chunks_exact(2)).map(pair).collect();
        }
        let seconds = start.elapsed().as_secs_f64();
        losses.sort_by_key(|loss| loss.0);
        let losses: Vec<f64> = losses.into_iter().map(|loss| loss.1).collect();
        let loss = step_loss(&losses, self.programs.loss_is_mean);
        Ok(CudaStep { loss, losses, seconds })
    }

    /// Returns whether devices communicate through NCCL, as opposed to the host.
    pub fn uses_nccl(&self) -> bool {
        self.nccl.is_some()
    }

    /// Bytes of GPU memory that each device (by rank) uses for tensors.
    pub fn held_bytes(&self) -> Vec<u64> {
        self.tapes.iter().map(|tape| tape.arena.bytes).collect()
    }

    /// Fails if an earlier error has stopped the session.
    fn expect_running(&self) -> Result<(), RuntimeError> {
        if self.stopped { Err(RuntimeError::Stopped) } else { Ok(()) }
    }

    /// Waits for this many replies.
    fn answers(&mut self, asked: usize) -> Result<Vec<(usize, Reply)>, RuntimeError> {
        let mut failure: Option<RuntimeError> = None;
        let mut answers = Vec::with_capacity(asked);
        for _ in 0..asked {
            match self.replies.recv() {
                Ok((rank, Ok(reply))) => answers.push((rank, reply)),
                Ok((_, Err(error))) => {
                    if failure.is_none() || !is_consequence(&error) {
                        failure = Some(error);
                    }
                }
                Err(_) => failure = failure.or(Some(RuntimeError::Stopped)),
            }
        }
        self.stopped = failure.is_some();
        // The error that the watchdog found is the cause of all aborted operations.
        if let (Some(_), Some(found)) = (&failure, self.nccl.as_ref().and_then(|meeting| meeting.watchdog.found())) {
            failure = Some(found.into());
        }
        match failure {
            Some(error) => Err(error),
            None => Ok(answers),
        }
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
        // A process sees all GPUs of its node, or only its own.
        let (me, nodes) = (world.rank(), world.nodes());
        let on_node = |ranks: std::ops::Range<usize>| {
            ranks.filter(|&rank| nodes[rank] == nodes[me]).map(|rank| shares[rank].len()).sum::<usize>()
        };
        let (before, all, count) = (on_node(0..me), on_node(0..world.size()), shares[me].len());
        let first = match gpus {
            gpus if gpus >= all => before,
            gpus if gpus >= count => 0,
            _ => {
                let host = host_name();
                return Err(failed(RanksError::Gpus { rank: me, host, devices: count, on_node: all, gpus }));
            }
        };
        let own = (0..devices.len()).filter(|&rank| process_of[rank] == me);
        Ok(Shares { own: own.zip(first..).collect(), process_of })
    }
}

/// Returns whether a buffer is this state of this parameter.
fn is_state(parameter: &str, slot: &str) -> impl Fn(&BufferKind) -> bool {
    move |kind| matches!(kind, BufferKind::State { parameter: p, slot: s } if p == parameter && s == slot)
}

impl Drop for CudaSession {
    fn drop(&mut self) {
        self.orders.clear();
        for thread in self.threads.drain(..) {
            // A thread that panicked has nothing more to report.
            let _ = thread.join();
        }
    }
}

/// The inputs of a device's thread.
struct Device {
    programs: Arc<Programs>,
    tape: Arc<Tape>,
    context: Arc<Context>,
    compiler: Arc<Compiler>,
    options: CudaOptions,
    nccl: Option<Arc<Meeting>>,
}

impl Device {
    /// Sets up the device, then executes commands until the channel closes.
    fn serve(self, mailbox: Mailbox, orders: &Receiver<Order>, replies: &Sender<(usize, Result<Reply, RuntimeError>)>) {
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
        executor.tell(Ranges::new(search, &self.programs, &self.tape));
        let mut reply = Ok(Reply::Ready);
        loop {
            if reply.is_err() {
                executor.stop_all();
            }
            if replies.send((rank, reply)).is_err() {
                return;
            }
            let Ok(order) = orders.recv() else { return };
            reply = self.answer(&mut executor, order).map_err(RuntimeError::from);
        }
    }

    /// Adds the largest regions and the predicted memory to an error for too little memory.
    fn explained(&self, mut error: ExecutorError) -> ExecutorError {
        const NAMED: usize = 3;
        let ExecutorError::SetUp { error: cause, .. } = &mut error else { return error };
        let CudaError::OutOfMemory { detail, .. } = &mut **cause else { return error };
        let buffers = &self.programs.programs[self.tape.program as usize].buffers;
        let name = |region: &Region| match &region.content {
            Content::Buffer { buffer, .. } => buffers[buffer.0 as usize].name.clone(),
            Content::Value { body, value, .. } | Content::Constant { body, value } => {
                let graph = &self.programs.programs[self.tape.program as usize].bodies[*body as usize].graph;
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

    fn answer(&self, executor: &mut Executor, order: Order) -> Result<Reply, ExecutorError> {
        match order {
            Order::Join => {
                let Some(meeting) = &self.nccl else { return Ok(Reply::Ready) };
                let joined = self.context.make_current().and_then(|()| meeting.join(&self.tape));
                let failed = |error| ExecutorError::SetUp { rank: self.tape.rank, error: Box::new(error) };
                executor.meet(joined.map_err(failed)?);
                Ok(Reply::Ready)
            }
            Order::Load { buffer, bytes } => executor.load(buffer, &bytes).map(|()| Reply::Loaded),
            Order::Fetch { buffer } => executor.fetch(buffer).map(Reply::Fetched),
            Order::Step { inputs, scalars } => {
                let taken = executor.step(|given, bytes| self.give(given, &inputs, &scalars, bytes))?;
                let loss = |(what, bytes): (Taken, Vec<u8>)| match what {
                    // The loss is a float of the program's type.
                    Taken::Loss { microbatch } => {
                        let loss = self.programs.programs[self.tape.program as usize].buffers.iter();
                        let dtype = loss.clone().find(|b| b.kind == BufferKind::Loss)?.ty.dtype;
                        Some((microbatch, *decode(dtype, &bytes).first()?))
                    }
                    Taken::Output { .. } => None,
                };
                Ok(Reply::Stepped(taken.into_iter().filter_map(loss).collect()))
            }
        }
    }

    /// Writes the values that the host provides, which were checked to exist.
    fn give(&self, given: &Given, inputs: &Tensors, scalars: &BTreeMap<String, f64>, bytes: &mut [u8]) {
        let buffers = &self.programs.programs[self.tape.program as usize].buffers;
        let (Given::Input { buffer, .. } | Given::Scalar { buffer }) = given;
        let buffer = &buffers[buffer.0 as usize];
        let values = match (given, &buffer.kind) {
            (Given::Scalar { .. }, BufferKind::Scalar { name }) => scalars.get(name).map(|value| vec![*value]),
            (Given::Input { microbatch, .. }, BufferKind::Input { name }) => inputs
                .get(name)
                .map(|tensor| cut(&self.programs, &self.tape, buffer, tensor, microbatch.unwrap_or(0).into())),
            _ => None,
        };
        let encoded = encode(buffer.ty.dtype, values.unwrap_or_default());
        if encoded.len() == bytes.len() {
            bytes.copy_from_slice(&encoded);
        }
    }
}

/// A device's part of a tensor, or of a microbatch's rows if the tensor has more rows than the buffer.
fn cut(programs: &Programs, tape: &Tape, buffer: &Buffer, tensor: &HostTensor, microbatch: u64) -> Vec<f64> {
    let mesh = &programs.programs[tape.program as usize].mesh;
    let coordinates = mesh.coordinates(tape.position);
    let mut indices = held_indices(&buffer.sharding, mesh, &coordinates);
    for (d, list) in indices.iter_mut().enumerate().filter(|(d, _)| tensor.ty.shape[*d] != buffer.ty.shape[*d]) {
        list.iter_mut().for_each(|i| *i += buffer.ty.shape[d] * microbatch);
    }
    match summand_of(&buffer.sharding, &coordinates) {
        Some(reducer) => vec![reducer.neutral(buffer.ty.dtype); indices.iter().map(Vec::len).product()],
        None => tensor.at(&indices).to_f64(),
    }
}

/// Visits the elements at the cross product of index lists, in row-major order.
fn each_held(indices: &[Vec<u64>], shape: &[u64], mut visit: impl FnMut(usize)) {
    let (strides, sizes) = (strides(shape), indices.iter().map(|list| list.len() as u64).collect::<Vec<_>>());
    for_each_index(&sizes, |at| {
        let position: u64 = at.iter().zip(indices).zip(&strides).map(|((&i, list), s)| list[i as usize] * s).sum();
        visit(position as usize);
    });
}

/// Returns whether a device failed only because another did.
fn is_consequence(error: &RuntimeError) -> bool {
    let RuntimeError::Executor(error) = error else { return false };
    matches!(&**error, ExecutorError::Exchange { error, .. } if **error == KernelError::Disconnected)
}
