//! Runs the tape of a device on a GPU. The tape decides everything; this module turns its commands into calls of the
//! driver and libraries.
//!
//! Device memory is one allocation, host memory another, and both have fixed addresses. So a step without communication
//! is recorded once as a graph, and launched as a whole from then on.

use super::blas::{Addresses, Blas, SinglePrecision};
use super::bytes::{decode, encode};
use super::compile::{Compiled, Compiler};
use super::context::{Argument, Context, Event, Function, Graph, Memory, Pinned, Stream};
use super::error::CudaError;
use super::gather;
use super::library::Search;
use super::nccl::Channel;
use super::nvtx::{Open, Ranges};
use crate::error::KernelError;
use crate::loops::Launch;
use crate::loops::cuda::{NoArithmetic, Text, text};
use crate::mailbox::Mailbox;
use crate::tape::{Command, CommunicatorId, Content, EventId, Given, Message, RegionId, StreamId, Taken, Tape, What};
use altiplano_ir::dtype::DType;
use altiplano_ir::program::BufferId;
use std::sync::Arc;

/// Reasons why a device cannot be set up, or stops.
#[derive(Debug, thiserror::Error)]
pub enum ExecutorError {
    #[error("setting up the device of rank {rank}: {error}")]
    SetUp { rank: u32, error: Box<CudaError> },
    #[error("setting up the device of rank {rank}: {error}")]
    NoText { rank: u32, error: NoArithmetic },
    #[error("{at}: {problem}")]
    Tape { at: Box<At>, problem: &'static str },
    #[error("{at}: {error}")]
    Command { at: Box<At>, error: Box<CudaError> },
    #[error("{at}: {error}")]
    Exchange { at: Box<At>, error: Box<KernelError> },
    #[error("{at} made a NaN from inputs without NaN")]
    NaN { at: Box<At> },
    #[error(
        "the device of rank {rank} has no lasting region of buffer {buffer}, or one of another size than {bytes} bytes"
    )]
    NoBuffer { rank: u32, buffer: BufferId, bytes: usize },
}

impl ExecutorError {
    /// Returns whether the device failed only because another did.
    pub(crate) fn is_consequence(&self) -> bool {
        matches!(self, ExecutorError::Exchange { error, .. } if **error == KernelError::Disconnected)
    }

    /// Returns whether the error concerns a group of devices, another of which may be gone.
    pub fn is_of_group(&self) -> bool {
        match self {
            ExecutorError::SetUp { error, .. } | ExecutorError::Command { error, .. } => {
                matches!(**error, CudaError::Group { .. })
            }
            _ => false,
        }
    }
}

/// A command of a tape, for messages.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("command {command} of the tape of rank {rank} ({what})")]
pub struct At {
    pub rank: u32,
    /// Index of the command in the tape.
    pub command: usize,
    /// The operation and its regions.
    pub what: String,
}

/// Options of running tapes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Running {
    pub precision: SinglePrecision,
    /// Check the results of every command for NaN, one command at a time.
    pub check_nan: bool,
}

/// A device's means of communicating with others.
pub enum Peers {
    /// Through the host, between the threads of a process. An exchange first waits for its stream.
    Host(Mailbox),
    /// Through NCCL, with a channel for each communicator of the tape, asynchronously in streams.
    Nccl(Vec<Channel>),
}

/// A device that runs its tape. It stays on the thread that created it.
pub struct Executor {
    tape: Arc<Tape>,
    running: Running,
    /// Ranges for profilers.
    ranges: Option<Arc<Ranges>>,
    streams: Vec<Stream>,
    events: Vec<Event>,
    /// Kernels, by launch.
    kernels: Vec<Kernel>,
    fills: Vec<Option<Function>>,
    blas: Option<Blas>,
    peers: Peers,
    graph: Option<Graph>,
    /// For each command that copies between host and device, its position in `host`.
    staged: Vec<Option<usize>>,
    host: Pinned,
    /// The part of the tape's arena in host memory.
    offloaded: Pinned,
    arena: Memory,
    workspace: Memory,
    context: Arc<Context>,
}

/// A loop program with its launch configuration.
struct Kernel {
    function: Function,
    threads: (u32, u32),
    blocks: u32,
}

/// The failure of a command, before the command is known.
enum Failure {
    Cuda(CudaError),
    Exchange(Box<KernelError>),
    Tape(&'static str),
}

impl From<CudaError> for Failure {
    fn from(error: CudaError) -> Failure {
        Failure::Cuda(error)
    }
}

impl From<KernelError> for Failure {
    fn from(error: KernelError) -> Failure {
        Failure::Exchange(Box::new(error))
    }
}

/// Element types that can be filled, by the logarithm of their size.
const FILLS: [&str; 4] = ["unsigned char", "unsigned short", "unsigned int", "unsigned long long"];

impl Executor {
    /// Compiles the kernels of a tape, allocates its memory, and fills its constants. Lasting regions are zero.
    pub fn new(
        tape: Arc<Tape>,
        context: &Arc<Context>,
        compiler: &Compiler,
        search: &Search,
        peers: Peers,
        running: Running,
    ) -> Result<Executor, ExecutorError> {
        let rank = tape.rank;
        let texts = tape.launches.iter().map(|launch| text(launch)).collect::<Result<Vec<Text>, NoArithmetic>>();
        let texts = texts.map_err(|error| ExecutorError::NoText { rank, error })?;
        Executor::set_up(tape, texts, context, compiler, search, peers, running)
            .map_err(|error| ExecutorError::SetUp { rank, error: Box::new(error) })
    }

    fn set_up(
        tape: Arc<Tape>,
        texts: Vec<Text>,
        context: &Arc<Context>,
        compiler: &Compiler,
        search: &Search,
        peers: Peers,
        running: Running,
    ) -> Result<Executor, CudaError> {
        context.make_current()?;
        // Allocate first: compiling is pointless if memory is too small.
        let what = format!("the arena of the device of rank {}", tape.rank);
        let arena = context.allocate(&what, tape.arena.bytes)?;
        let widths = |what: &What| match what {
            What::Fill { region, .. } => Some(tape.region(*region).dtype.bytes().trailing_zeros() as usize),
            _ => None,
        };
        let is_filled = |width: usize| tape.commands.iter().any(|c| widths(&c.what) == Some(width));
        let fill_texts: Vec<Option<Text>> = (0..FILLS.len()).map(|w| is_filled(w).then(|| fill_text(w))).collect();
        let compiled = compiler.compile(texts.iter().chain(fill_texts.iter().flatten()), context.gpu.architecture)?;
        let load = |text: &Text| loaded(context, &compiled, text);
        // This many blocks keep every multiprocessor busy; each takes rows in a loop.
        let most = u64::from(context.gpu.multiprocessors.max(1)) * 32;
        let kernel = |text: &Text| {
            let blocks = text.blocks.clamp(1, most) as u32;
            Ok(Kernel { function: load(text)?, threads: text.threads, blocks })
        };
        let kernels = texts.iter().map(kernel).collect::<Result<Vec<_>, CudaError>>()?;
        let fills = fill_texts.iter().map(|text| text.as_ref().map(load).transpose()).collect::<Result<_, _>>()?;

        let multiplies = tape.commands.iter().any(|c| matches!(c.what, What::Matmul(_)));
        let mut blas = multiplies.then(|| Blas::open(search, running.precision)).transpose()?;
        for command in &tape.commands {
            if let (What::Matmul(call), Some(blas)) = (&command.what, &mut blas) {
                blas.prepare(call)?;
            }
        }
        let mut host_bytes = 0;
        let mut stage = |command: &Command| {
            let region = staged_region(&command.what)?;
            let place = host_bytes;
            host_bytes += tape.region(region).bytes.next_multiple_of(64) as usize;
            Some(place)
        };
        let staged: Vec<Option<usize>> = tape.commands.iter().map(&mut stage).collect();
        let workspace = context.allocate("matmuls' workspace", if multiplies { Blas::WORKSPACE_BYTES } else { 0 })?;
        let streams = tape.streams.iter().map(|_| context.stream()).collect::<Result<Vec<_>, _>>()?;
        // One more event for each stream, by which the streams of a graph fork and join.
        let events = tape.num_events as usize + tape.streams.len();
        let executor = Executor {
            running,
            ranges: None,
            streams,
            events: (0..events).map(|_| context.event()).collect::<Result<_, _>>()?,
            kernels,
            fills,
            blas,
            peers,
            graph: None,
            staged,
            host: context.pinned(host_bytes)?,
            offloaded: context.pinned(tape.arena.host_bytes as usize)?,
            arena,
            workspace,
            context: context.clone(),
            tape,
        };
        executor.fill_lasting()?;
        Ok(executor)
    }

    /// Zeroes all memory and writes the constants.
    fn fill_lasting(&self) -> Result<(), CudaError> {
        let stream = self.context.stream()?;
        if let Some(start) = self.arena.range(0, self.arena.bytes()) {
            // SAFETY: the arena stays allocated until this is done, which is awaited below.
            unsafe { stream.zero(start, self.arena.bytes()) }?;
        }
        let bytes = self.tape.arena.host_bytes as usize;
        if let Some(start) = self.offloaded.range(0, bytes) {
            // SAFETY: it has this length, and no copy is in progress before the first step.
            unsafe { start.write_bytes(0, bytes) };
        }
        stream.synchronize()?;
        for constant in &self.tape.constants {
            let dtype = self.tape.region(constant.region).dtype;
            self.write(&stream, constant.region, &encode(dtype, constant.value.data.iter().copied()))?;
        }
        Ok(())
    }

    /// Writes a region from its start, and waits for the copy.
    fn write(&self, stream: &Stream, region: RegionId, bytes: &[u8]) -> Result<(), CudaError> {
        if let Some(to) = self.in_host(region, bytes.len()) {
            // SAFETY: it has room for the bytes, and no copy is in progress between steps.
            unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        } else if let Some(address) = self.address(region, bytes.len() as u64) {
            // SAFETY: both stay allocated until this is done, which is awaited below.
            unsafe { stream.upload(address, bytes.as_ptr(), bytes.len() as u64) }?;
        }
        stream.synchronize()
    }

    /// Reads a region once all earlier work of the stream is done.
    fn read(&self, stream: &Stream, region: RegionId) -> Result<Vec<u8>, CudaError> {
        let mut bytes = vec![0; self.used_bytes(region) as usize];
        if let Some(from) = self.in_host(region, bytes.len()) {
            stream.synchronize()?;
            // SAFETY: it has this many bytes, and all copies to it are done.
            unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(from, bytes.len()) };
        } else if let Some(address) = self.address(region, bytes.len() as u64) {
            // SAFETY: both stay allocated until this is done, which is awaited below.
            unsafe { stream.download(bytes.as_mut_ptr(), address, bytes.len() as u64) }?;
        }
        stream.synchronize()?;
        Ok(bytes)
    }

    /// Reports later steps to profilers with these ranges.
    pub(super) fn tell(&mut self, ranges: Option<Ranges>) {
        self.ranges = ranges.map(Arc::new);
    }

    /// Uses these channels from now on, one for each communicator of the tape.
    pub fn meet(&mut self, channels: Vec<Channel>) {
        self.peers = Peers::Nccl(channels);
    }

    /// Writes a lasting buffer: this device's part of it, in the device's format.
    pub fn load(&mut self, buffer: BufferId, bytes: &[u8]) -> Result<(), ExecutorError> {
        let rank = self.tape.rank;
        let region = self.tape.lasting(buffer).filter(|&region| self.used_bytes(region) == bytes.len() as u64);
        let region = region.ok_or(ExecutorError::NoBuffer { rank, buffer, bytes: bytes.len() })?;
        let written = self.context.stream().and_then(|stream| self.write(&stream, region, bytes));
        written.map_err(|error| ExecutorError::SetUp { rank, error: Box::new(error) })
    }

    /// Reads this device's part of a lasting buffer.
    pub fn fetch(&self, buffer: BufferId) -> Result<Vec<u8>, ExecutorError> {
        let rank = self.tape.rank;
        let region = self.tape.lasting(buffer).ok_or(ExecutorError::NoBuffer { rank, buffer, bytes: 0 })?;
        let read = self.context.stream().and_then(|stream| self.read(&stream, region));
        read.map_err(|error| ExecutorError::SetUp { rank, error: Box::new(error) })
    }

    /// Runs a step. `give` fills the values that the host provides; the values that it takes are returned in the tape's
    /// order.
    pub fn step(&mut self, mut give: impl FnMut(&Given, &mut [u8])) -> Result<Vec<(Taken, Vec<u8>)>, ExecutorError> {
        let rank = self.tape.rank;
        let set_up = |error| ExecutorError::SetUp { rank, error: Box::new(error) };
        self.context.make_current().map_err(set_up)?;
        let tape = self.tape.clone();
        for (command, place) in tape.commands.iter().zip(&self.staged) {
            if let (What::Upload { given, to }, Some(place)) = (&command.what, place) {
                let bytes = self.used_bytes(*to) as usize;
                // SAFETY: the previous step ended by waiting for all streams.
                give(given, &mut unsafe { self.host.bytes_mut() }[*place..*place + bytes]);
            }
        }
        let ranges = self.ranges.clone();
        let mut open = ranges.as_ref().map(|ranges| ranges.step());
        match self.is_recordable() {
            true => self.replay(open.as_mut())?,
            false => (0..tape.commands.len()).try_for_each(|index| {
                let _range = open.as_mut().map(|open| open.command(index, tape.commands[index].call));
                self.issue(index)
            })?,
        }
        for stream in &self.streams {
            stream.synchronize().map_err(set_up)?;
        }
        drop(open);
        if let Peers::Nccl(channels) = &self.peers {
            channels.iter().for_each(Channel::finished);
        }
        let mut taken = Vec::new();
        for (command, place) in tape.commands.iter().zip(&self.staged) {
            if let (What::Download { taken: what, from }, Some(place)) = (&command.what, place) {
                let bytes = self.used_bytes(*from) as usize;
                // SAFETY: all streams are done.
                taken.push((*what, unsafe { self.host.bytes() }[*place..*place + bytes].to_vec()));
            }
        }
        Ok(taken)
    }

    /// Returns whether a step is the same work each time, without host work in between.
    fn is_recordable(&self) -> bool {
        let stays = |c: &Command| !matches!(c.what, What::Collective { .. } | What::Exchange { .. });
        !self.running.check_nan && !self.streams.is_empty() && self.tape.commands.iter().all(stays)
    }

    /// Launches the recorded step, which it first records if necessary. Profiler ranges of commands are open only while
    /// recording; a launch has the range of its step.
    fn replay(&mut self, mut open: Option<&mut Open<'_>>) -> Result<(), ExecutorError> {
        let rank = self.tape.rank;
        let set_up = |error| ExecutorError::SetUp { rank, error: Box::new(error) };
        if self.graph.is_none() {
            // A stream joins the capture when it waits for the first. The first must wait for it at the end.
            let streams = std::mem::take(&mut self.streams);
            let mut blas = self.blas.take();
            let mut failure = None;
            let recorded = streams[0].capture(|| {
                let joins = &self.events[self.tape.num_events as usize..];
                streams[0].record(&joins[0])?;
                streams[1..].iter().try_for_each(|stream| stream.wait(&joins[0]))?;
                for index in 0..self.tape.commands.len() {
                    let call = self.tape.commands[index].call;
                    let _range = open.as_mut().map(|open| open.command(index, call));
                    if let Err(why) = self.issuer(&streams).issue(&mut blas, index) {
                        failure = Some((index, why));
                        break;
                    }
                }
                for (stream, join) in streams.iter().zip(joins).skip(1) {
                    stream.record(join)?;
                    streams[0].wait(join)?;
                }
                Ok(())
            });
            (self.streams, self.blas) = (streams, blas);
            if let Some((index, why)) = failure {
                return Err(self.failed(index, why));
            }
            self.graph = Some(recorded.map_err(set_up)?);
        }
        match &self.graph {
            // SAFETY: this executor's memory is the same as when the graph was recorded.
            Some(graph) => unsafe { self.streams[0].replay(graph) }.map_err(set_up),
            None => Ok(()),
        }
    }

    /// Issues a command to its stream.
    fn issue(&mut self, index: usize) -> Result<(), ExecutorError> {
        let tape = self.tape.clone();
        let command = &tape.commands[index];
        let issued = match &command.what {
            What::Collective { .. } | What::Exchange { .. } => self.exchange(command),
            _ => {
                let mut blas = self.blas.take();
                let issued = self.issuer(&self.streams).issue(&mut blas, index);
                self.blas = blas;
                issued
            }
        };
        issued.map_err(|why| self.failed(index, why))?;
        if self.running.check_nan { self.check(index) } else { Ok(()) }
    }

    fn issuer<'a>(&'a self, streams: &'a [Stream]) -> Issuer<'a> {
        Issuer {
            tape: &self.tape,
            streams,
            events: &self.events,
            kernels: &self.kernels,
            fills: &self.fills,
            arena: &self.arena,
            workspace: &self.workspace,
            host: &self.host,
            offloaded: &self.offloaded,
            staged: &self.staged,
        }
    }

    /// Communicates, with the command's waits before and its event after.
    fn exchange(&mut self, command: &Command) -> Result<(), Failure> {
        let stream = command.stream.0 as usize;
        for event in &command.waits {
            self.streams[stream].wait(&self.events[event.0 as usize])?;
        }
        match self.peers {
            Peers::Host(_) => self.exchange_by_host(command)?,
            Peers::Nccl(_) => self.exchange_by_nccl(command)?,
        }
        if let Some(event) = command.records {
            self.streams[stream].record(&self.events[event.0 as usize])?;
        }
        Ok(())
    }

    /// Enqueues the communication in the stream, where it waits for the other members.
    fn exchange_by_nccl(&self, command: &Command) -> Result<(), Failure> {
        let stream = &self.streams[command.stream.0 as usize];
        let channel = |communicator: &CommunicatorId| match &self.peers {
            Peers::Nccl(channels) => channels.get(communicator.0 as usize),
            Peers::Host(_) => None,
        };
        let none = Failure::Tape("it has no communicator");
        let beyond = Failure::Tape("a region exceeds the arena");
        let start = |region: RegionId| self.address(region, self.used_bytes(region));
        match &command.what {
            What::Collective { communicator, kind, dtype, elements, from, to } => {
                let Some(channel) = channel(communicator) else { return Err(none) };
                let (Some(from), Some(to)) = (start(*from), start(*to)) else { return Err(beyond) };
                // SAFETY: regions are in the arena, as is checked, which stays allocated until all streams are done. The tape
                // guarantees that nothing else uses them meanwhile.
                unsafe { channel.collective(stream, *kind, *dtype, *elements, from, to) }?;
            }
            What::Exchange { communicator, dtype, sends, receives } => {
                let Some(channel) = channel(communicator) else { return Err(none) };
                let of = |message: &Message| {
                    let part = message.part;
                    let address = start(part.region)? + part.from * dtype.bytes();
                    Some((message.member, address, part.elements))
                };
                let sends: Option<Vec<_>> = sends.iter().map(of).collect();
                let receives: Option<Vec<_>> = receives.iter().map(of).collect();
                let (Some(sends), Some(receives)) = (sends, receives) else { return Err(beyond) };
                // SAFETY: as for collectives.
                unsafe { channel.exchange(stream, *dtype, &sends, &receives) }?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Communicates through the host.
    fn exchange_by_host(&mut self, command: &Command) -> Result<(), Failure> {
        let tape = self.tape.clone();
        let stream = command.stream.0 as usize;
        match &command.what {
            What::Collective { communicator, kind, dtype, elements, from, to } => {
                let communicator = &tape.communicators[communicator.0 as usize];
                let members = communicator.ranks.len() as u64;
                let given = match kind {
                    crate::tape::CollectiveKind::ReduceScatter(_) => elements * members,
                    _ => *elements,
                };
                let mut mine = self.read(&self.streams[stream], *from)?;
                mine.truncate((given * dtype.bytes()) as usize);
                let got = gather::collective(self.mailbox()?, communicator, *kind, *dtype, mine)?;
                self.write(&self.streams[stream], *to, &got)?;
            }
            What::Exchange { communicator, dtype, sends, receives } => {
                let communicator = &tape.communicators[communicator.0 as usize];
                let rank = |message: &Message| communicator.ranks.get(message.member as usize).copied();
                let no_member = Failure::Tape("a message is for a member that the communicator does not have");
                for message in sends {
                    let (start, end) = range(message, *dtype);
                    let bytes = self.read(&self.streams[stream], message.part.region)?;
                    let bytes = bytes.get(start..end).ok_or(Failure::Tape("a message is longer than its region"))?;
                    let Some(to) = rank(message) else { return Err(no_member) };
                    gather::send(self.mailbox()?, communicator, to, bytes);
                }
                for message in receives {
                    let (start, end) = range(message, *dtype);
                    let Some(from) = rank(message) else { return Err(no_member) };
                    let bytes = gather::receive(self.mailbox()?, communicator, from, end - start)?;
                    let mut whole = self.read(&self.streams[stream], message.part.region)?;
                    let part = whole.get_mut(start..end).ok_or(Failure::Tape("a message is longer than its region"))?;
                    part.copy_from_slice(&bytes);
                    self.write(&self.streams[stream], message.part.region, &whole)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn mailbox(&mut self) -> Result<&mut Mailbox, Failure> {
        match &mut self.peers {
            Peers::Host(mailbox) => Ok(mailbox),
            Peers::Nccl(_) => Err(Failure::Tape("it goes through NCCL, not the host")),
        }
    }

    /// Fails if a command made a NaN. Its inputs were checked before.
    fn check(&self, index: usize) -> Result<(), ExecutorError> {
        let command = &self.tape.commands[index];
        let stream = &self.streams[command.stream.0 as usize];
        for region in written(&self.tape, &command.what) {
            let dtype = self.tape.region(region).dtype;
            let bytes = self.read(stream, region).map_err(|error| self.failed(index, error.into()))?;
            if dtype.is_float() && decode(dtype, &bytes).iter().any(|x| x.is_nan()) {
                return Err(ExecutorError::NaN { at: self.at(index) });
            }
        }
        Ok(())
    }

    fn failed(&self, command: usize, why: Failure) -> ExecutorError {
        let at = self.at(command);
        match why {
            Failure::Cuda(error) => ExecutorError::Command { at, error: Box::new(error) },
            Failure::Exchange(error) => ExecutorError::Exchange { at, error },
            Failure::Tape(problem) => ExecutorError::Tape { at, problem },
        }
    }

    fn at(&self, command: usize) -> Box<At> {
        let what = described(&self.tape, &self.tape.commands[command].what);
        Box::new(At { rank: self.tape.rank, command, what })
    }

    /// Tells all devices to stop, so that none waits for this one.
    pub(crate) fn stop_all(&self) {
        match &self.peers {
            Peers::Host(mailbox) => mailbox.stop_all(),
            Peers::Nccl(channels) => channels.iter().take(1).for_each(Channel::abort_all),
        }
    }

    fn address(&self, region: RegionId, bytes: u64) -> Option<u64> {
        self.arena.range(self.tape.region(region).offset, bytes)
    }

    /// The address of a region in host memory, if it is there.
    fn in_host(&self, region: RegionId, bytes: usize) -> Option<*mut u8> {
        self.offloaded.range(self.tape.in_host(region)? as usize, bytes)
    }

    /// Bytes of a region's elements.
    fn used_bytes(&self, region: RegionId) -> u64 {
        let region = self.tape.region(region);
        region.elements * region.dtype.bytes()
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        // Memory must outlive the work on it. Errors here were reported before.
        for stream in &self.streams {
            let _ = stream.synchronize();
        }
    }
}

/// The parts of an executor that commands without communication use.
#[derive(Clone, Copy)]
struct Issuer<'a> {
    tape: &'a Tape,
    streams: &'a [Stream],
    events: &'a [Event],
    kernels: &'a [Kernel],
    /// The kernels that fill elements, by the logarithm of their bytes.
    fills: &'a [Option<Function>],
    arena: &'a Memory,
    workspace: &'a Memory,
    host: &'a Pinned,
    offloaded: &'a Pinned,
    /// The place in host memory of each command that moves data from or to it.
    staged: &'a [Option<usize>],
}

impl Issuer<'_> {
    /// Issues a command to its stream, with its waits before and its event after.
    fn issue(&self, blas: &mut Option<Blas>, index: usize) -> Result<(), Failure> {
        let command = &self.tape.commands[index];
        let StreamId(stream) = command.stream;
        let stream = &self.streams[stream as usize];
        for &EventId(event) in &command.waits {
            stream.wait(&self.events[event as usize])?;
        }
        let in_host = |bytes: u64| {
            let place = self.staged[index].and_then(|place| self.host.range(place, bytes as usize));
            place.ok_or(Failure::Tape("it has no staging memory on the host"))
        };
        // SAFETY (of all below): regions are in the arena, as is checked. The arena, kernels and host memory stay allocated
        // until all streams are done. The tape guarantees that nothing else uses the regions meanwhile.
        match &command.what {
            What::Launch { launch, regions, coordinates } => {
                let kernel = &self.kernels[launch.0 as usize];
                let mut arguments = Vec::with_capacity(regions.len() + coordinates.len());
                for &region in regions {
                    arguments.push(Argument::Address(self.address(region)?.0));
                }
                arguments.extend(coordinates.iter().map(|&at| Argument::Int(at as i32)));
                expect_arguments(&self.tape.launches[launch.0 as usize], regions.len(), coordinates.len())?;
                // SAFETY: as above, and the arguments match the parameters.
                unsafe { stream.launch(&kernel.function, kernel.blocks, kernel.threads, &arguments) }?;
            }
            What::Matmul(call) => {
                let at = Addresses {
                    lhs: self.address(call.lhs.region)?.0,
                    rhs: self.address(call.rhs.region)?.0,
                    result: self.address(call.result.region)?.0,
                    workspace: self.workspace.range(0, self.workspace.bytes()).unwrap_or(0),
                };
                let blas = blas.as_mut().ok_or(Failure::Tape("no matmul was prepared"))?;
                // SAFETY: as above.
                unsafe { blas.run(stream, call, at) }?;
            }
            What::Fill { region, value } => self.fill(stream, *region, *value)?,
            What::Copy { from, to } => self.copy(stream, *from, *to)?,
            What::Upload { to, .. } => {
                let (to, bytes, _) = self.address(*to)?;
                // SAFETY: as above.
                unsafe { stream.upload(to, in_host(bytes)?, bytes) }?;
            }
            What::Download { from, .. } => {
                let (from, bytes, _) = self.address(*from)?;
                // SAFETY: as above.
                unsafe { stream.download(in_host(bytes)?, from, bytes) }?;
            }
            What::Collective { .. } | What::Exchange { .. } => {
                return Err(Failure::Tape("communication cannot be recorded"));
            }
        }
        if let Some(EventId(event)) = command.records {
            stream.record(&self.events[event as usize])?;
        }
        Ok(())
    }

    /// The address of a region, its bytes and its type.
    fn address(&self, region: RegionId) -> Result<(u64, u64, DType), Failure> {
        let region = self.tape.region(region);
        let bytes = region.elements * region.dtype.bytes();
        let address = self.arena.range(region.offset, bytes).ok_or(Failure::Tape("a region exceeds the arena"))?;
        Ok((address, bytes, region.dtype))
    }

    fn fill(&self, stream: &Stream, region: RegionId, value: f64) -> Result<(), Failure> {
        let (to, bytes, dtype) = self.address(region)?;
        let element = encode(dtype, [value]);
        if element.iter().all(|&byte| byte == 0) {
            // SAFETY: as in `issue`.
            unsafe { stream.zero(to, bytes) }?;
        } else if bytes > 0 {
            let mut word = [0; 8];
            word[..element.len()].copy_from_slice(&element);
            let fill = self.fills[dtype.bytes().trailing_zeros() as usize].as_ref();
            let fill = fill.ok_or(Failure::Tape("no kernel fills elements of this size"))?;
            let elements = bytes / dtype.bytes();
            let arguments = [to, u64::from_le_bytes(word), elements].map(Argument::Address);
            let blocks = elements.div_ceil(256).min(4096) as u32;
            // SAFETY: as in `issue`; all arguments have eight bytes, or the kernel reads their first bytes.
            unsafe { stream.launch(fill, blocks, (256, 1), &arguments) }?;
        }
        Ok(())
    }

    fn copy(&self, stream: &Stream, from: RegionId, to: RegionId) -> Result<(), Failure> {
        let used = |region: RegionId| self.tape.region(region).elements * self.tape.region(region).dtype.bytes();
        let bytes = used(from).min(used(to));
        let kept = |offset: u64| {
            let place = self.offloaded.range(offset as usize, bytes as usize);
            place.ok_or(Failure::Tape("a region exceeds the arena"))
        };
        match (self.tape.in_host(from), self.tape.in_host(to)) {
            // SAFETY: as in `issue`.
            (None, None) => unsafe { stream.copy(self.address(to)?.0, self.address(from)?.0, bytes) }?,
            // SAFETY: as in `issue`, and offloaded memory stays allocated as long.
            (Some(from), None) => unsafe { stream.upload(self.address(to)?.0, kept(from)?, bytes) }?,
            // SAFETY: as in `issue`, and offloaded memory stays allocated as long.
            (None, Some(to)) => unsafe { stream.download(kept(to)?, self.address(from)?.0, bytes) }?,
            (Some(_), Some(_)) => return Err(Failure::Tape("it copies within host memory")),
        }
        Ok(())
    }
}

/// Checks that a launch has as many arguments as its program has parameters and coordinates.
fn expect_arguments(launch: &Launch, regions: usize, coordinates: usize) -> Result<(), Failure> {
    match launch.params.len() == regions && launch.coordinates.len() == coordinates {
        true => Ok(()),
        false => Err(Failure::Tape("its arguments do not match the parameters of its program")),
    }
}

/// Loads the kernel of this name from the compiled ones.
fn loaded(context: &Arc<Context>, compiled: &Compiled, text: &Text) -> Result<Function, CudaError> {
    let name = text.name.as_str();
    let missing = || CudaError::Compile { kernel: name.to_string(), log: "nothing came out".to_string() };
    context.function(name, compiled.images.get(name).ok_or_else(missing)?, text.shared_bytes)
}

/// A kernel that sets elements of `1 << width` bytes.
fn fill_text(width: usize) -> Text {
    let (name, ty) = (format!("fill_{}", 1 << width), FILLS[width]);
    let source = format!(
        "extern \"C\" __global__ void {name}({ty}* to, {ty} value, long long elements) {{\n  \
         long long next = (long long)gridDim.x * blockDim.x;\n  \
         for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < elements; i += next) to[i] = value;\n}}\n"
    );
    Text { name, source, threads: (256, 1), blocks: u64::MAX, shared_bytes: 0 }
}

/// The region that a command copies from or to the host.
fn staged_region(what: &What) -> Option<RegionId> {
    match what {
        What::Upload { to, .. } => Some(*to),
        What::Download { from, .. } => Some(*from),
        _ => None,
    }
}

/// Byte range of a message in its region.
fn range(message: &Message, dtype: DType) -> (usize, usize) {
    let start = (message.part.from * dtype.bytes()) as usize;
    (start, start + (message.part.elements * dtype.bytes()) as usize)
}

/// The regions that a command writes.
fn written(tape: &Tape, what: &What) -> Vec<RegionId> {
    match what {
        What::Launch { launch, regions, .. } => {
            let params = &tape.launches[launch.0 as usize].params;
            regions.iter().zip(params).filter(|(_, p)| p.written).map(|(region, _)| *region).collect()
        }
        What::Matmul(call) => vec![call.result.region],
        What::Fill { region, .. } => vec![*region],
        What::Copy { to, .. } | What::Upload { to, .. } | What::Collective { to, .. } => vec![*to],
        What::Exchange { receives, .. } => receives.iter().map(|m| m.part.region).collect(),
        What::Download { .. } => Vec::new(),
    }
}

/// Describes a command, as in `matmul to %12 of body 3`.
fn described(tape: &Tape, what: &What) -> String {
    let name = what.verb();
    let content = |region: RegionId| match &tape.region(region).content {
        Content::Buffer { buffer, microbatch: None } => format!("buffer {buffer}"),
        Content::Buffer { buffer, microbatch: Some(microbatch) } => {
            format!("buffer {buffer} of microbatch {microbatch}")
        }
        Content::Value { body, value, .. } => format!("{value} of body {body}"),
        Content::Constant { body, value } => format!("constant {value} of body {body}"),
        Content::Staging { call } => format!("staging of call {call}"),
    };
    let to: Vec<String> = written(tape, what).into_iter().map(content).collect();
    if to.is_empty() { name.to_string() } else { format!("{name} to {}", to.join(", ")) }
}
