//! Errors of executing programs and reading data files. Each variant names the place (device, body, op; or file and
//! tensor), so that a caller can act on it.

use crate::devices::cuda::{CudaError, ExecutorError};
use crate::devices::xla::XlaError;
use crate::tape::BuildError;
use altiplano_ir::graph::{GraphError, ValueId};
use altiplano_ir::program::{BufferId, TransferId};
use altiplano_ir::types::TensorType;
use std::path::PathBuf;

/// Errors of a single op or command, without their place.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum KernelError {
    #[error("needs {wanted_bytes} bytes more while {held_bytes} are held, above the limit of {limit_bytes} bytes")]
    MemoryLimit { wanted_bytes: u64, held_bytes: u64, limit_bytes: u64 },
    #[error("the machine has fewer than {wanted_bytes} free bytes")]
    OutOfMemory { wanted_bytes: u64 },
    #[error("panicked: {message}")]
    Panic { message: String },
    #[error("another device stopped before the data arrived")]
    Disconnected,
    #[error("buffer {buffer} holds nothing for microbatch {microbatch:?}")]
    MissingValue { buffer: BufferId, microbatch: Option<u32> },
    #[error("input '{name}' of type {given} has no rows for microbatch {microbatch:?} of type {wanted}")]
    InputShape { name: String, given: TensorType, wanted: TensorType, microbatch: Option<u32> },
    #[error("a message has {found} bytes where {expected} were expected")]
    MessageSize { expected: usize, found: usize },
    /// `fused` lists the ops of the kernel if there are several; `infinite` is the first op of the step that made an
    /// infinity.
    #[error("made a NaN from inputs without NaN{}{}", one_of(.fused), after(.infinite.as_deref()))]
    MadeNaN { fused: Vec<(ValueId, &'static str)>, infinite: Option<Box<Place>> },
    #[error("'{buffer}' holds a NaN before any op of the body has run")]
    HoldsNaN { buffer: String },
    #[error("the command channel is closed")]
    Closed,
    /// Communication between processes failed, for example because one of them is gone.
    #[error("{call}: {message}")]
    Carrier { call: String, message: String },
}

/// `, in one of %4 subtract, %5 divide`, or nothing.
fn one_of(fused: &[(ValueId, &'static str)]) -> String {
    let ops: Vec<String> = fused.iter().map(|(value, name)| format!("{value} {name}")).collect();
    if ops.len() < 2 { String::new() } else { format!(", in one of {}", ops.join(", ")) }
}

/// `; the first infinity was made by ...`, or nothing.
fn after(infinite: Option<&Place>) -> String {
    infinite.map(|place| format!("; the first infinity was made by {place}")).unwrap_or_default()
}

/// The place in a program at which something failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Global id of the device.
    pub device: u32,
    pub program: u32,
    /// Name of the body or transfer, or a description of other work.
    pub activity: String,
    pub microbatch: Option<u32>,
    /// The op that was running, with its value in the body's graph.
    pub op: Option<(ValueId, &'static str)>,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "device {} (program {}), {}", self.device, self.program, self.activity)?;
        if let Some(microbatch) = self.microbatch {
            write!(f, ", microbatch {microbatch}")?;
        }
        match self.op {
            Some((value, name)) => write!(f, ", {value} {name}"),
            None => Ok(()),
        }
    }
}

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    #[error("{place}: {error}")]
    Device { place: Box<Place>, error: KernelError },
    #[error("program {program}: {problem}")]
    Program { program: u32, problem: &'static str },
    #[error("program {program}, body '{body}': {error}")]
    Graph { program: u32, body: String, error: GraphError },
    #[error("program {program}, body '{body}', {value}: {problem}")]
    Body { program: u32, body: String, value: ValueId, problem: &'static str },
    #[error("program {program}, buffer {buffer}: {problem}")]
    Buffer { program: u32, buffer: BufferId, problem: &'static str },
    #[error("program {program}, call {call} of the schedule: {problem}")]
    Call { program: u32, call: usize, problem: &'static str },
    #[error("transfer {transfer}: {problem}")]
    Transfer { transfer: TransferId, problem: &'static str },
    #[error("the schedules deadlock: program {program} waits at call {call} for a message that is never sent")]
    Deadlock { program: u32, call: usize },
    #[error("no program has a parameter named '{name}'")]
    UnknownParameter { name: String },
    #[error("no program holds state '{slot}' of a parameter named '{parameter}'")]
    UnknownState { parameter: String, slot: String },
    #[error("'{name}' has type {found}, expected {expected}")]
    TensorType { name: String, expected: TensorType, found: TensorType },
    #[error(
        "input '{name}' has type {found}; expected {expected}, or its batch dimensions {microbatches} times as large"
    )]
    InputType { name: String, expected: TensorType, found: TensorType, microbatches: u32 },
    #[error("the step needs an input named '{name}'")]
    MissingInput { name: String },
    #[error("the step needs a scalar named '{name}'")]
    MissingScalar { name: String },
    #[error("cannot start a thread for device {device}: {error}")]
    Thread { device: u32, error: std::io::Error },
    #[error("the session stopped after an earlier error")]
    Stopped,
    #[error("no step is in progress")]
    NoStep,
    #[error("tensor of type {ty} needs {expected} values, found {found}")]
    ValueCount { ty: TensorType, expected: u64, found: u64 },
    #[error(transparent)]
    Ranks(Box<RanksError>),
    #[error("the ranks cannot watch each other: {0}")]
    Watch(Box<WatchError>),
    #[error(transparent)]
    Rendezvous(Box<RendezvousError>),
    #[error("{0}")]
    Carrier(KernelError),
    #[error("only the first rank assembles '{name}'")]
    Elsewhere { name: String },
    #[error(transparent)]
    Tape(Box<BuildError>),
    #[error(transparent)]
    Cuda(Box<CudaError>),
    #[error(transparent)]
    Executor(Box<ExecutorError>),
    #[error(transparent)]
    Xla(Box<XlaError>),
    #[error("{}: {error}", file.display())]
    Io { file: PathBuf, error: std::io::Error },
    #[error("{}: {error}", file.display())]
    Safetensors { file: PathBuf, error: safetensors::SafeTensorError },
    #[error("{}: {problem}", file.display())]
    Npy { file: PathBuf, problem: &'static str },
    #[error("{}: tensor '{tensor}': {problem}", file.display())]
    Tensor { file: PathBuf, tensor: String, problem: &'static str },
    #[error("{}: unknown kind of data file; supported are .safetensors and .npy", file.display())]
    FileKind { file: PathBuf },
}

impl From<BuildError> for RuntimeError {
    fn from(error: BuildError) -> RuntimeError {
        RuntimeError::Tape(Box::new(error))
    }
}

impl From<XlaError> for RuntimeError {
    fn from(error: XlaError) -> RuntimeError {
        RuntimeError::Xla(Box::new(error))
    }
}

impl From<CudaError> for RuntimeError {
    fn from(error: CudaError) -> RuntimeError {
        RuntimeError::Cuda(Box::new(error))
    }
}

impl From<ExecutorError> for RuntimeError {
    fn from(error: ExecutorError) -> RuntimeError {
        RuntimeError::Executor(Box::new(error))
    }
}

/// Reasons why ranks cannot run a plan together.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum RanksError {
    #[error(
        "the plan has {devices} devices, but {ranks} ranks were started; start one per device: mpirun -n {devices}"
    )]
    Count { devices: usize, ranks: usize },
    #[error(
        "the plan is for nodes with {} devices, but the ranks are on nodes with {}; start them to match (mpirun --map-by ppr:N:node), or add --ranks-anywhere",
        list(planned),
        list(found)
    )]
    Nodes { planned: Vec<usize>, found: Vec<usize> },
    #[error(
        "the plan is for nodes with {} GPUs, but the nodes run {} processes; start one per node or one per GPU, or add --ranks-anywhere if their number divides that of all GPUs",
        list(planned),
        list(found)
    )]
    Shares { planned: Vec<usize>, found: Vec<usize> },
    #[error(
        "the plan has {devices} devices, which {ranks} processes cannot share evenly; start one per node or one per GPU"
    )]
    Uneven { devices: usize, ranks: usize },
    #[error(
        "rank {rank} on {host} runs {devices} of the plan's {on_node} devices per node, but the number of GPUs that it sees is {gpus}; give each process its own GPUs, or all of the node's (CUDA_VISIBLE_DEVICES, srun --gpus-per-task)"
    )]
    Gpus { rank: usize, host: String, devices: usize, on_node: usize, gpus: usize },
    #[error(
        "the devices of stage {stage} are in {processes} processes, and collectives of XLA's devices stay in one; start at most one process for each stage, or plan at least as many stages as processes (--pp)"
    )]
    Split { stage: usize, processes: usize },
    #[error("rank {rank} has {what} than rank 0; give all ranks the same files and options")]
    Differs { rank: usize, what: &'static str },
    #[error("this MPI supports only single-threaded programs; use a build with thread support")]
    Threads,
    #[error("the plan's programs do not have one device per rank")]
    Devices,
    #[error("one rank has no links to measure; start at least two: mpirun -n 2")]
    NoLinks,
}

/// `4, 4`, or `64 times 8`.
fn list(sizes: &[usize]) -> String {
    match sizes {
        [first, .., last] if sizes.len() > 8 && first == last => format!("{} times {first}", sizes.len()),
        _ => sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(", "),
    }
}

/// Reasons why ranks cannot watch each other.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    #[error("cannot listen for other ranks: {0}")]
    Listen(std::io::Error),
    #[error(
        "only {joined} of {ranks} ranks could connect to the first; a firewall between them must allow connections to any port"
    )]
    NotAll { joined: usize, ranks: usize },
    #[error("cannot connect to the first rank at {host}: {error}")]
    Join { host: std::net::IpAddr, error: std::io::Error },
    #[error("the host of the first rank has no address")]
    NoAddress,
    #[error("--listen: this host has no address in {network}")]
    NoInterface { network: String },
}

/// Reasons why processes that were started together did not find each other. Each names the process at fault and the
/// remedy.
#[derive(Debug, thiserror::Error)]
pub enum RendezvousError {
    #[error(
        "the rank and number of the processes are unknown; start them by srun, mpirun or torchrun --no-python, or set RANK and WORLD_SIZE"
    )]
    NoLauncher,
    #[error("{name} is '{value}', and {problem}")]
    Variable { name: &'static str, value: String, problem: &'static str },
    #[error("rank {rank} of {size} cannot find the others: name a directory that all hosts share by --rendezvous DIR")]
    NoDirectory { rank: usize, size: usize },
    #[error(
        "rank {rank} on {host} cannot write to the rendezvous directory {}: {error}; choose another by --rendezvous",
        directory.display()
    )]
    Write { rank: usize, host: String, directory: PathBuf, error: std::io::Error },
    #[error("rank 0 on {host} cannot listen for the others: {error}")]
    Listen { host: String, error: std::io::Error },
    #[error(
        "{} (of {size} processes) did not arrive at {} within {seconds} s; start all of them with that directory, on hosts that share it, or raise --rendezvous-timeout",
        ranks_of(missing),
        directory.display()
    )]
    Missing { missing: Vec<usize>, size: usize, directory: PathBuf, seconds: u64 },
    #[error(
        "rank {rank} on {host} found no address of rank 0 in {} within {seconds} s; start rank 0 with that directory, on a host that shares it, or raise --rendezvous-timeout",
        directory.display()
    )]
    NoFirst { rank: usize, host: String, directory: PathBuf, seconds: u64 },
    #[error(
        "rank {rank} on {host} could not reach rank 0 within {seconds} s; according to {} it is process {first_pid} on {first_host}: {error}; if that was an earlier run, this run's rank 0 did not start; otherwise a firewall must allow connections to any port",
        directory.display()
    )]
    Unreachable {
        rank: usize,
        host: String,
        directory: PathBuf,
        seconds: u64,
        first_host: String,
        first_pid: u32,
        error: Box<WatchError>,
    },
    #[error(
        "rank {rank} on {host} was started as one of {found}, rank 0 as one of {size}; start all of them together, or give each run its own rendezvous directory (here {})",
        directory.display()
    )]
    Size { rank: usize, host: String, found: usize, size: usize, directory: PathBuf },
    #[error(
        "two processes in {} claim rank {rank}: process {} on {} and process {} on {}; give each run its own rendezvous directory",
        directory.display(), .first.0, .first.1, .second.0, .second.1
    )]
    Twice { rank: usize, directory: PathBuf, first: (u32, String), second: (u32, String) },
    #[error(
        "{} is the rendezvous of another run, whose rank 0 is process {pid} on {host}; give each run its own directory",
        directory.display()
    )]
    Taken { directory: PathBuf, pid: u32, host: String },
    #[error("rank {rank} on {host} ended before all {size} processes had arrived at {}", directory.display())]
    Gone { rank: usize, host: String, size: usize, directory: PathBuf },
    /// Rank 0 has reported the reason.
    #[error("rank 0 ended the run before it began")]
    Ended,
}

/// `rank 3`, or `ranks 3, 5, 6 and 4 more`.
fn ranks_of(ranks: &[usize]) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<String> = ranks.iter().take(SHOWN).map(usize::to_string).collect();
    let more = ranks.len().saturating_sub(SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{} {}{more}", if ranks.len() == 1 { "rank" } else { "ranks" }, shown.join(", "))
}
