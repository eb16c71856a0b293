//! Errors of the facade. Each message names the file and the place in it, or the option, so that the reader knows what
//! to change.

use crate::arguments::ArgumentError;
use crate::certify::Refusal;
use crate::export::ExportProblem;
use crate::fidelity::{TableError, TraceError};
use crate::pins::PinProblem;
use crate::scale::QueueProblem;
use crate::stacks::StackProblem;
use crate::training::checkpoint::CheckpointProblem;
use crate::units::{bytes, plural};
use altiplano_cost_models::ClusterError;
use altiplano_cost_models::profile::ProfileError;
use altiplano_import::huggingface::ConfigError;
use altiplano_import::onnx::OnnxError;
use altiplano_import::stablehlo::ImportError;
use altiplano_import::torch_export;
use altiplano_ir::batch::SettleError;
use altiplano_ir::graph::{Graph, GraphError, ValueId};
use altiplano_ir::json::{self, JsonError};
use altiplano_ir::op::ShapeError;
use altiplano_ir::plan::{PlanError, Target};
use altiplano_ir::types::TensorType;
use altiplano_planner::PlanFailure;
use altiplano_runtime::RuntimeError;
use altiplano_runtime::devices::cuda::CudaError;
use altiplano_runtime::devices::xla::XlaError;
use altiplano_runtime::error::{KernelError, RanksError, WatchError};
use altiplano_runtime::tape::BuildError;
use altiplano_xla::certify::CertifyError;
use altiplano_xla::pjrt::PjrtError;
use std::fmt;
use std::path::{Path, PathBuf};

/// Ways to export a readable model from each framework.
const RECIPES: &str = r#"  JAX:           open("model.mlir", "w").write(jax.jit(loss).lower(params, batch).as_text(debug_info=True))
  PyTorch:       torch.export.save(torch.export.export(module, (batch,)), "model.pt2"); then --loss cross-entropy
  ONNX:          model.onnx as it is, --loss cross-entropy, and --size NAME=N for sizes that it leaves open
  Hugging Face:  the model's config.json, with --seq N and --global-batch N
  others:        altiplano.graph JSON (docs/graph.schema.json)"#;

/// Errors of the facade and of the command line.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{}: {error}", file.display())]
    Read { file: PathBuf, error: std::io::Error },
    #[error("{}: {error}", file.display())]
    Write { file: PathBuf, error: std::io::Error },
    /// Detected before any work is done.
    #[error("{}: {error}", file.display())]
    NoPlace { file: PathBuf, error: std::io::Error },
    #[error("no tape for GPUs: {error}")]
    Tape { error: Box<BuildError> },
    #[error("--tape {rank}: the plan has the ranks 0 to {}", devices.saturating_sub(1))]
    NoRank { rank: u32, devices: u32 },
    #[error("{}:1:1: the file is empty", file.display())]
    Empty { file: PathBuf },
    #[error("{}: this is {found}, which cannot be read; convert it to text by a Python with JAX:\n\npython - {} > model.mlir <<'EOF'\n{script}\nEOF", file.display(), file.display())]
    Binary { file: PathBuf, found: &'static str, script: &'static str },
    #[error("{}:1:1: not a known model format; ways to export a model:\n{RECIPES}", file.display())]
    UnknownFormat { file: PathBuf },
    #[error("{}: this is {found}; {advice}", file.display())]
    OtherArtefact { file: PathBuf, found: &'static str, advice: &'static str },
    #[error("{}", stablehlo(file, error))]
    StableHlo { file: PathBuf, error: Box<ImportError> },
    #[error("{}: {error}", file.display())]
    TorchExport { file: PathBuf, error: Box<torch_export::ImportError> },
    #[error("{}", graph_json(file, error))]
    Json { file: PathBuf, error: Box<JsonError> },
    #[error("{}: {error}", file.display())]
    Onnx { file: PathBuf, error: Box<OnnxError> },
    #[error("{}", config(file, error))]
    Config { file: PathBuf, error: Box<ConfigError> },
    #[error(
        "--global-batch: the model cannot have a batch of {batch} samples: the size of {value}, would be too large or no whole number"
    )]
    Rebatch { batch: u64, value: String },
    #[error("{}: {error}", file.display())]
    Graph { file: PathBuf, error: Box<GraphError> },
    #[error("{}: {error}", file.display())]
    Arguments { file: PathBuf, error: Box<ArgumentError> },
    #[error("--loss: there is no result '{name}'; the results are {results}")]
    UnknownResult { name: String, results: Names },
    #[error(
        "{}: the function has more losses than '{loss}': gradients of {parameters} are those of '{other}'. A plan has one loss: plan each separately, with --loss '{other}' and --params for the parameters that it trains", file.display()
    )]
    SeveralLosses { file: PathBuf, loss: String, other: String, parameters: Names },
    #[error("--loss: the loss {error}")]
    Attach { error: ShapeError },
    #[error(
        "{}: the model's result is {ty}, no scalar and so no loss: attach one with --loss cross-entropy (it takes an input `labels`) or --loss mse (`targets`), plan to run the model without training with --loss none, or export a function that returns its loss", file.display()
    )]
    NoLoss { file: PathBuf, ty: TensorType },
    #[error("--batch-dim: there is no input '{name}'; the inputs are {inputs}")]
    UnknownInput { name: String, inputs: Names },
    #[error("--batch-dim: input '{name}' is {ty} and has no dimension {dim}")]
    NoSuchDimension { name: String, ty: TensorType, dim: usize },
    #[error("{}: --also {}: {error}", file.display(), also.display())]
    Settle { file: PathBuf, also: PathBuf, error: Box<SettleError> },
    #[error("--precision: {error}")]
    Precision { error: ShapeError },
    #[error(
        "--precision fp8: no product has a weight of its own whose sizes are multiples of 16, so that nothing would be computed in 8 bits; use --precision bf16"
    )]
    NoProductsInEightBits,
    #[error(
        "--stop-gradient: '{name}' names no value; use a name or a number (%12) as `altiplano show MODEL` prints them"
    )]
    UnknownValue { name: String },
    #[error(
        "{option}: the plan decides nothing named '{name}'; similar names are {near} (`altiplano show MODEL` prints all names)"
    )]
    NoSuchName { option: &'static str, name: String, near: Names },
    #[error("--layer: {asked} is not a layer of the plan, which has {layers} and counts them from 0")]
    NoSuchLayer { asked: u32, layers: u32 },
    #[error("{option}: {asked} is not a stage of the plan, which has {stages} and counts them from 0")]
    NoSuchStage { option: &'static str, asked: usize, stages: usize },
    #[error("--pin {pin}: {problem}")]
    Pin { pin: String, problem: Box<PinProblem> },
    #[error("{}: {error}", file.display())]
    Trace { file: PathBuf, error: Box<TraceError> },
    #[error("{}: {problem}", file.display())]
    QueueWaits { file: PathBuf, problem: Box<QueueProblem> },
    #[error("{}:{line}: {error}", file.display())]
    Row { file: PathBuf, line: u64, error: Box<TableError> },
    #[error(
        "--explain: nothing in the plan's programs is named '{name}'; `altiplano inspect PLAN --programs` prints all names"
    )]
    UnknownOp { name: String },
    #[error("--to {to}: {problem}")]
    Export { to: &'static str, problem: Box<ExportProblem> },
    #[error("--to {to}: {problem}")]
    StackExport { to: &'static str, problem: Box<StackProblem> },
    #[error("{}", stack(file.as_deref(), problem))]
    Stack { file: Option<PathBuf>, problem: Box<StackProblem> },
    #[error("{}", At(file, error))]
    PlanFile { file: PathBuf, error: Box<PlanError> },
    #[error("{}", At(file, error))]
    Profile { file: PathBuf, error: Box<ProfileError> },
    #[error("--profile: {error}")]
    ProfileOption { error: Box<ProfileError> },
    #[error("{}", cluster(.text, error))]
    Cluster { text: String, error: Box<ClusterError> },
    #[error(transparent)]
    Plan(Box<PlanFailure>),
    #[error(transparent)]
    Runtime(Box<RuntimeError>),
    #[error(transparent)]
    Cuda(Box<CudaError>),
    #[error(transparent)]
    Xla(Box<XlaError>),
    #[error(transparent)]
    Certify(Box<CertifyError>),
    #[error("{}", uncompiled(target, refusals))]
    Uncompiled { target: String, refusals: Vec<Refusal> },
    #[error("the compiled plan does not fit: up to {needed} per device in {stages}, where {target} has {there}")]
    CertifiedMemory { stages: String, needed: String, target: String, there: String },
    #[error("{}: {problem}", file.display())]
    Data { file: PathBuf, problem: Box<DataProblem> },
    #[error(
        "{}: the function is a whole training step with {update}; choose the update to plan with --optimizer (and --clip-norm, --weight-decay)",
        file.display()
    )]
    UnknownUpdate { file: PathBuf, update: &'static str },
    #[error("{option}: {problem}")]
    Option { option: &'static str, problem: &'static str },
    /// An option of other software.
    #[error("{problem}")]
    NoSuchOption { problem: String },
    /// A launcher started processes without an option that makes them share the work.
    #[error(
        "a launcher started {size} processes, each of which would do all of the work; to run them together, with one device each, type\n  mpirun -n {size} {command}\nor start one process, without a launcher, whose threads are the devices (--engine threads runs each process separately)"
    )]
    Launched { size: usize, command: String },
    #[error("{}:{line}:{column}: {problem}", file.display())]
    Options { file: PathBuf, line: usize, column: usize, problem: Box<OptionsProblem> },
    #[error("the plan has {devices} devices; one machine runs at most {most} CPU workers")]
    TooManyWorkers { devices: u32, most: u32 },
    #[error(
        "{who} would need {} of memory here, but this machine has {}; use a smaller batch or sequence (--seq), or a downscaled model (--reduce)",
        bytes(*needed_bytes),
        bytes(*has_bytes)
    )]
    TooLargeForMachine { who: &'static str, needed_bytes: u64, has_bytes: u64 },
    #[error("the loss is {loss} at step {step}: {}", diverged(.step))]
    Diverged { step: u64, loss: f64 },
    #[error("step {step}: {error}")]
    NaN { step: u64, error: Box<RuntimeError> },
    #[error("the numbers differ: {what} of '{tensor}' is off by {difference:.2e}, more than {tolerance:.0e}")]
    NumbersDiffer { what: &'static str, tensor: String, difference: f64, tolerance: f64 },
    #[error(
        "{}: is written, but {stack} would take {} on a device with this configuration, of which tensors can use {}; plan with --target {} for one that fits",
        file.display(),
        bytes(*needed_bytes),
        bytes(*usable_bytes),
        target.name()
    )]
    Misfit { file: PathBuf, stack: &'static str, target: Target, needed_bytes: u64, usable_bytes: u64 },
    #[error("{}", crate::prove::gap_text(gap))]
    Unproved { gap: Box<altiplano_prover::Gap> },
    #[error("{}", crate::pairs::pair_gap_text(file, gap))]
    UnprovedPair { file: PathBuf, gap: Box<altiplano_prover::Gap> },
    /// The program of each rank has other arguments or results than the sequential one, or a file is no StableHLO.
    #[error("{}: {problem}", file.display())]
    Pair { file: PathBuf, problem: String },
    #[error(
        "nothing to compare: {what} of '{tensor}' is not a number on both sides; look for such values in the weights and the data"
    )]
    NoNumbers { what: &'static str, tensor: String },
    #[error("{}: {problem}", place.display())]
    Checkpoint { place: PathBuf, problem: Box<CheckpointProblem> },
    /// An error beside the trained state, such as of stdout or of data, which ends a run.
    #[error("{error}; the run ended after step {step}, {}", match saved {
        true => "whose checkpoint is written",
        false => "of which there is no checkpoint",
    })]
    Halted { error: Box<Error>, step: u64, saved: bool },
    #[error("ended by a signal after step {step}")]
    Interrupted { signal: i32, step: u64 },
    #[error("writing to standard output: {0}")]
    Output(std::io::Error),
}

/// Faults of a file of data, weights or expected values.
#[derive(Debug, thiserror::Error)]
pub enum DataProblem {
    #[error("it has no tensor '{name}'")]
    Missing { name: String },
    #[error("tensor '{name}' is {found}, expected {expected}")]
    Type { name: String, found: TensorType, expected: TensorType },
    #[error(
        "it holds one tensor, but the model has {}, which are not tokens and labels [batch, sequence]; give a .safetensors file with their names", plural(*inputs as u64, "input")
    )]
    OneTensor { inputs: usize },
    #[error(
        "the inputs '{}' and '{}' could be tokens and labels, but no name says which is which; give a .safetensors file with their names", inputs[0], inputs[1]
    )]
    WhichIsLabel { inputs: [String; 2] },
    #[error("give the type of its ids by --token-type u16|u32")]
    TokenType,
    #[error("there is no .safetensors file in it")]
    EmptyFolder,
    #[error("it has {}, fewer than the {needed} of one batch", plural(*samples, "sample"))]
    TooFewSamples { samples: u64, needed: u64 },
    #[error("tensor '{name}' holds {value}, but table {table} that it indexes has {}", plural(*rows, "row"))]
    IndexOutOfRange { name: String, value: i64, table: String, rows: u64 },
}

/// Faults of an options file.
#[derive(Debug, thiserror::Error)]
pub enum OptionsProblem {
    #[error("{}", .0.message())]
    Toml(Box<toml::de::Error>),
    #[error("`run` has no option '{name}'{}", perhaps(near))]
    Unknown { name: String, near: Names },
    #[error("'{name}' is true or false")]
    NotAFlag { name: String },
    #[error("'{name}' takes a string or a number")]
    NoValue { name: String },
    #[error("{said}")]
    Refused { said: String },
}

/// `the plan does not compile for cuda:H100: backward of stage 1: XLA cannot ..., and 2 more parts`.
fn uncompiled(target: &str, refusals: &[Refusal]) -> String {
    let Some(first) = refusals.first() else { return format!("the plan does not compile for {target}") };
    let more = match refusals.len() - 1 {
        0 => String::new(),
        n => format!("; {} more do not compile either", plural(n as u64, "part")),
    };
    format!("the plan does not compile for {target}: {} of stage {}: {}{more}", first.body, first.stage, first.message)
}

/// `; similar names are 'steps'`, or nothing.
fn perhaps(near: &Names) -> String {
    if near.0.is_empty() { String::new() } else { format!("; similar names are {near}") }
}

impl Error {
    /// A value of the traced graph that has no size at this batch.
    pub fn rebatch(graph: &Graph, batch: u64, value: ValueId) -> Error {
        let node = graph.node(value);
        let name = Some(&node.name).filter(|name| !name.is_empty()).map_or(String::new(), |name| format!(" '{name}'"));
        let traced = plural(graph.batch, "sample");
        let value = format!("the {}{name}, {} for {traced}", node.op.name(), node.ty);
        Error::Rebatch { batch, value }
    }

    pub fn profile_option(error: ProfileError) -> Error {
        Error::ProfileOption { error: Box::new(error) }
    }

    /// Returns whether the input or the options are at fault (exit code 2), as opposed to work that failed (1).
    pub fn is_usage(&self) -> bool {
        match self {
            Error::Plan(failure) => failure.is_usage(),
            Error::Runtime(error) => match **error {
                RuntimeError::Cuda(ref problem) => problem.is_setup(),
                RuntimeError::Watch(ref problem) => matches!(**problem, WatchError::NoInterface { .. }),
                RuntimeError::Io { .. }
                | RuntimeError::Safetensors { .. }
                | RuntimeError::Npy { .. }
                | RuntimeError::Tensor { .. }
                | RuntimeError::FileKind { .. }
                | RuntimeError::TensorType { .. }
                | RuntimeError::InputType { .. }
                | RuntimeError::Ranks(_)
                | RuntimeError::Rendezvous(_)
                | RuntimeError::Xla(_) => true,
                _ => false,
            },
            Error::Checkpoint { problem, .. } => !matches!(**problem, CheckpointProblem::NotWritten { .. }),
            Error::Cuda(error) => error.is_setup(),
            Error::Write { .. }
            | Error::Diverged { .. }
            | Error::NaN { .. }
            | Error::NumbersDiffer { .. }
            | Error::Misfit { .. }
            | Error::Unproved { .. }
            | Error::UnprovedPair { .. }
            | Error::NoNumbers { .. }
            | Error::Interrupted { .. }
            | Error::Halted { .. }
            | Error::Output(_) => false,
            _ => true,
        }
    }

    /// The kind of the error, for programs: `memory`, `no_plan`, `option`, `model`, `cluster`, `file`, `export`,
    /// `numbers` or `run`.
    pub fn kind(&self) -> &'static str {
        match self {
            Error::Plan(failure) => match **failure {
                PlanFailure::Memory { .. } | PlanFailure::HostMemory { .. } => "memory",
                PlanFailure::Autodiff(_) => "model",
                _ if failure.is_usage() => "option",
                _ => "no_plan",
            },
            Error::TooLargeForMachine { .. } | Error::CertifiedMemory { .. } | Error::Misfit { .. } => "memory",
            Error::Empty { .. }
            | Error::Binary { .. }
            | Error::UnknownFormat { .. }
            | Error::OtherArtefact { .. }
            | Error::StableHlo { .. }
            | Error::Pair { .. }
            | Error::TorchExport { .. }
            | Error::Json { .. }
            | Error::Onnx { .. }
            | Error::Config { .. }
            | Error::Graph { .. }
            | Error::Arguments { .. }
            | Error::SeveralLosses { .. }
            | Error::NoLoss { .. }
            | Error::Settle { .. }
            | Error::UnknownUpdate { .. } => "model",
            Error::Cluster { .. } => "cluster",
            Error::Read { .. }
            | Error::Write { .. }
            | Error::NoPlace { .. }
            | Error::PlanFile { .. }
            | Error::Profile { .. }
            | Error::Data { .. }
            | Error::Trace { .. }
            | Error::QueueWaits { .. }
            | Error::Row { .. }
            | Error::Checkpoint { .. }
            | Error::Output(_) => "file",
            Error::Export { .. } => "export",
            Error::Unproved { .. } | Error::UnprovedPair { .. } => "proof",
            Error::NumbersDiffer { .. } | Error::NoNumbers { .. } | Error::Diverged { .. } | Error::NaN { .. } => {
                "numbers"
            }
            Error::Runtime(_)
            | Error::Cuda(_)
            | Error::Tape { .. }
            | Error::TooManyWorkers { .. }
            | Error::Launched { .. }
            | Error::Interrupted { .. } => "run",
            _ => "option",
        }
    }

    /// The exit code: 1 if work failed, 2 for unusable options or input, and 128 plus the signal's number after a
    /// signal.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Interrupted { signal, .. } => u8::try_from(128 + signal).unwrap_or(1),
            _ if self.is_usage() => 2,
            _ => 1,
        }
    }

    /// Returns whether all ranks of a run find the same error, so that any of them may report it.
    pub fn is_of_all_ranks(&self) -> bool {
        match self {
            Error::Interrupted { .. } | Error::Diverged { .. } | Error::Option { .. } | Error::Launched { .. } => true,
            Error::Runtime(error) => of_all_ranks(error),
            _ => false,
        }
    }

    /// Returns whether the error may be a consequence of losing another rank.
    pub fn follows(&self) -> bool {
        let of_carrier = |error: &RuntimeError| match error {
            RuntimeError::Carrier(_) => true,
            RuntimeError::Device { error, .. } => {
                matches!(error, KernelError::Carrier { .. } | KernelError::Disconnected)
            }
            RuntimeError::Cuda(error) => matches!(**error, CudaError::Group { .. }),
            RuntimeError::Executor(error) => error.is_of_group(),
            _ => false,
        };
        matches!(self, Error::Runtime(error) if of_carrier(error))
    }
}

impl From<PlanFailure> for Error {
    fn from(failure: PlanFailure) -> Self {
        Error::Plan(Box::new(failure))
    }
}

impl From<RuntimeError> for Error {
    fn from(error: RuntimeError) -> Self {
        Error::Runtime(Box::new(error))
    }
}

impl From<XlaError> for Error {
    fn from(error: XlaError) -> Self {
        Error::Xla(Box::new(error))
    }
}

impl From<CertifyError> for Error {
    fn from(error: CertifyError) -> Self {
        Error::Certify(Box::new(error))
    }
}

impl From<PjrtError> for Error {
    fn from(error: PjrtError) -> Self {
        XlaError::from(error).into()
    }
}

impl From<CudaError> for Error {
    fn from(error: CudaError) -> Self {
        Error::Cuda(Box::new(error))
    }
}

/// Returns whether ranks do not fit the plan or each other.
fn of_all_ranks(error: &RuntimeError) -> bool {
    let of_one = |error: &RanksError| matches!(error, RanksError::Gpus { .. });
    matches!(error, RuntimeError::Ranks(error) if !of_one(error))
}

/// A list of names, for messages.
#[derive(Clone, Debug)]
pub struct Names(pub Vec<String>);

impl fmt::Display for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        let quoted: Vec<String> = self.0.iter().take(SHOWN).map(|n| format!("'{n}'")).collect();
        write!(f, "{}", quoted.join(", "))?;
        if self.0.len() > SHOWN {
            write!(f, " and {} more", self.0.len() - SHOWN)?;
        }
        Ok(())
    }
}

/// A step number with an explanation. Before the first update the learning rate has had no effect.
fn diverged(step: &u64) -> &'static str {
    match step {
        1 => "no update was made yet, so the weights or the data hold NaN, infinite or too large values",
        _ => "training diverged; try a smaller --lr",
    }
}

/// A file and a message, joined without a space if the message starts with line and column.
struct At<'a, E>(&'a Path, &'a E);

impl<E: fmt::Display> fmt::Display for At<'_, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let message = self.1.to_string();
        let gap = if starts_with_place(&message) { "" } else { " " };
        write!(f, "{}:{gap}{message}", self.0.display())
    }
}

/// Returns whether a message starts with a place, as in `12:7: ...`.
fn starts_with_place(message: &str) -> bool {
    let mut parts = message.split(':');
    let mut number = || parts.next().is_some_and(|p| !p.is_empty() && p.bytes().all(|b| b.is_ascii_digit()));
    number() && number()
}

/// If some ops are not supported, the place of the first one leads the list.
fn stablehlo(file: &Path, error: &ImportError) -> String {
    match error {
        ImportError::Operations { unsupported, .. } if !unsupported.is_empty() => {
            let first = unsupported.iter().filter_map(|u| u.places.first()).min();
            let place = first.map(|p| format!("{p}: ")).unwrap_or_default();
            format!("{}:{place}{error}", file.display())
        }
        _ => At(file, error).to_string(),
    }
}

/// A syntax error has its place at the end of its message; this moves it behind the file's name.
fn graph_json(file: &Path, error: &JsonError) -> String {
    match error {
        JsonError::Syntax(syntax) => not_json(file, syntax),
        _ => At(file, error).to_string(),
    }
}

/// A syntax problem starts with its line, which follows the file's name directly.
fn stack(file: Option<&Path>, problem: &StackProblem) -> String {
    let gap = if matches!(problem, StackProblem::Syntax(_)) { "" } else { " " };
    file.map_or(problem.to_string(), |file| format!("{}:{gap}{problem}", file.display()))
}

fn config(file: &Path, error: &ConfigError) -> String {
    match error {
        ConfigError::Syntax(syntax) => not_json(file, syntax),
        _ => At(file, error).to_string(),
    }
}

fn not_json(file: &Path, syntax: &serde_json::Error) -> String {
    let (line, column) = json::place(syntax);
    format!("{}:{line}:{column}: not JSON: {}", file.display(), json::message(syntax))
}

/// The place of a cluster error is `line 3, column 5`, to which the file's name is added. A preset has no file.
fn cluster(text: &str, error: &ClusterError) -> String {
    match error.to_string() {
        message if message.starts_with("line ") => {
            let place = message.replacen("line ", "", 1).replacen(", column ", ":", 1);
            format!("{text}:{place}")
        }
        message => format!("cluster {text}: {message}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use altiplano_cost_models::error::Place;

    #[test]
    fn places_follow_the_file_directly() {
        let negative = ClusterError::Negative { place: Place { line: 3, column: 5 }, key: "latency_s", value: -1.0 };
        let error = Error::Cluster { text: "c.toml".into(), error: Box::new(negative) };
        assert!(error.to_string().starts_with("c.toml:3:5: `latency_s`"), "{error}");
        let file = Path::new("m.mlir");
        assert_eq!(At(file, &"3:5: x").to_string(), "m.mlir:3:5: x");
        assert_eq!(At(file, &"3 functions: x").to_string(), "m.mlir: 3 functions: x");
    }
}
