//! Everything that can go wrong when programs are executed or data files are read.
//! Each variant names the place (device, body, op; or file and tensor), so that a caller can act on it.

use altiplano_ir::graph::{GraphError, ValueId};
use altiplano_ir::program::{BufferId, TransferId};
use altiplano_ir::types::TensorType;
use std::path::PathBuf;

/// What failed within an op.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum KernelError {
    #[error("needs {wanted_bytes} bytes more while {held_bytes} are held, above the limit of {limit_bytes} bytes")]
    MemoryLimit { wanted_bytes: u64, held_bytes: u64, limit_bytes: u64 },
    #[error("the machine has no {wanted_bytes} bytes left")]
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
    #[error("the command channel is closed")]
    Closed,
}

/// Where in a program something failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Global id of the device.
    pub device: u32,
    pub program: u32,
    /// Name of the body, or of the transfer, or what else was being done.
    pub activity: String,
    pub microbatch: Option<u32>,
    /// The op at fault, with its value in the body's graph, where one was running.
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
    #[error("the schedules wait for each other: program {program} stops at call {call}, to which nothing is ever sent")]
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
    #[error("no thread could be started for device {device}: {error}")]
    Thread { device: u32, error: std::io::Error },
    #[error("the session stopped after an earlier error")]
    Stopped,
    #[error("tensor of type {ty} needs {expected} values, found {found}")]
    ValueCount { ty: TensorType, expected: u64, found: u64 },
    #[error("{}: {error}", file.display())]
    Io { file: PathBuf, error: std::io::Error },
    #[error("{}: {error}", file.display())]
    Safetensors { file: PathBuf, error: safetensors::SafeTensorError },
    #[error("{}: {error}", file.display())]
    TorchExport { file: PathBuf, error: Box<altiplano_ir::import::torch_export::ImportError> },
    #[error("{}: {problem}", file.display())]
    Npy { file: PathBuf, problem: &'static str },
    #[error("{}: tensor '{tensor}': {problem}", file.display())]
    Tensor { file: PathBuf, tensor: String, problem: &'static str },
    #[error("{}: unknown kind of data file; .safetensors and .npy are read", file.display())]
    FileKind { file: PathBuf },
}
