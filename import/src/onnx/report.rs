//! Errors of a model, and their presentation.

use super::tensor::TensorError;
use altiplano_ir::op::ShapeError;
use std::fmt;

/// The largest nesting depth of functions and subgraphs.
pub const MAX_DEPTH: usize = 64;

/// The largest number of nodes of a model after inlining functions and unrolling loops.
pub const MAX_NODES: u64 = 1_000_000;

/// The largest number of elements in all tables that the import makes: constants in nodes, windows, and matrices of
/// resizes.
pub(crate) const MAX_TABLES: u64 = 1 << 25;

/// The reason why a file gives no graph. The caller prefixes the file name.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum OnnxError {
    #[error("not a complete ONNX file: {0}")]
    Decode(#[from] prost::DecodeError),
    #[error(transparent)]
    OutOfProportion(#[from] crate::OutOfProportion),
    #[error("the file has no graph")]
    NoGraph,
    #[error("the file does not say which version of the standard's ops it uses")]
    NoOpset,
    #[error(
        "the ops are those of opset {version}; supported are 7 and later. `onnx.version_converter` updates a model"
    )]
    Opset { version: i64 },
    #[error("the graph has no outputs")]
    NoOutputs,
    #[error("output '{name}' is made by no node")]
    Output { name: String },
    #[error("'{name}' is defined twice")]
    Redefined { name: String },
    #[error("input '{name}' is no tensor")]
    InputKind { name: String },
    #[error("input '{name}' has no shape")]
    InputShape { name: String },
    #[error("input '{name}': {error}")]
    Input { name: String, error: TensorError },
    #[error("initializer '{name}': {error}")]
    Initializer { name: String, error: TensorError },
    #[error("--size: the model has no size '{name}'; it has {}", if .known.is_empty() { "none that is open".to_string() } else { .known.join(", ") })]
    UnknownSize { name: String, known: Vec<String> },
    #[error(
        "node '{node}': the function {function} calls itself, or calls are nested more than {MAX_DEPTH} levels deep"
    )]
    TooDeep { node: String, function: String },
    #[error("node '{node}': the model's constants, windows and resizes have more than {MAX_TABLES} elements")]
    TooLarge { node: String },
    #[error("the model has more than {MAX_NODES} nodes once its functions are inlined and its loops unrolled")]
    TooManyNodes,
    #[error("{}", crate::listed(.unsupported, .problems, 0))]
    Nodes { unsupported: Vec<Unsupported>, problems: Vec<Problem> },
}

/// A note for the reader of a plan about a file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Note {
    #[error(
        "the exporter merged parameters that start out equal, '{other}' and others with '{name}': {count} {} told apart again", if *.count == 1 { "is" } else { "are" }
    )]
    ToldApart { name: String, other: String, count: usize },
    #[error("the exporter left out {count} {} of zeros, which {} put back: '{first}'{}", if *.count == 1 { "bias" } else { "biases" }, if *.count == 1 { "is" } else { "are" }, if *.count == 1 { "" } else { " and others" })]
    Restored { first: String, count: usize },
    #[error("the data of {} is neither in the file nor beside it; it is taken to be the same for every sample", quoted(.names))]
    SameForEverySample { names: Vec<String> },
    #[error("the data of {} is neither in the file nor beside it; it is taken to count rows or positions", quoted(.names))]
    Counts { names: Vec<String> },
    #[error("the data of {} is neither in the file nor beside it; it is taken to name one document for all positions", quoted(.names))]
    OneDocument { names: Vec<String> },
    #[error("the ops are those of opset {version}, and those of {LAST_OPSET} are known; what changed since is not")]
    NewerOpset { version: i64 },
}

/// The newest version of the standard's ops that was reviewed.
pub(crate) const LAST_OPSET: i64 = 28;

/// The first names, in quotes.
fn quoted(names: &[String]) -> String {
    const MOST: usize = 3;
    let first: Vec<String> = names.iter().take(MOST).map(|name| format!("'{name}'")).collect();
    let more = if names.len() > MOST { " and others" } else { "" };
    format!("{}{more}", first.join(", "))
}

/// An op that the graph cannot express.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unsupported {
    /// `NonZero`, `com.microsoft.Foo`, or with the unsupported property: `Loop (whose end depends on data)`.
    pub name: String,
    /// The number of such ops.
    pub count: u64,
    /// The first nodes, at most three.
    pub nodes: Vec<String>,
}

/// A node that contradicts itself or its operands.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    pub node: String,
    pub op: String,
    pub kind: ProblemKind,
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ProblemKind {
    #[error("{0}")]
    Shape(#[from] ShapeError),
    #[error("{0}")]
    Tensor(#[from] TensorError),
    #[error("attribute '{name}' is missing, or not what this op can have")]
    Attribute { name: &'static str },
    #[error("operand {index} is missing")]
    Operand { index: usize },
    #[error("operand {index} must follow from constants and sizes alone, so that the shapes of the graph are known")]
    NotConstant { index: usize },
    #[error("operand {index} has values that this op cannot have")]
    Value { index: usize },
    #[error("'{name}' is not defined before this node, which a graph without cycles in topological order has to do")]
    Undefined { name: String },
    #[error("'{name}' is defined twice")]
    Redefined { name: String },
    #[error("gives {found} results, but {wanted} are named")]
    Results { found: usize, wanted: usize },
    #[error("a subgraph takes or gives {found} values where {wanted} are needed")]
    Subgraph { found: usize, wanted: usize },
}

/// The reason why one node cannot be converted.
pub(super) enum Reject {
    /// Unsupported, with the unsupported property or an empty string.
    Unsupported(&'static str),
    Invalid(ProblemKind),
    /// An input could not be made, which was already reported.
    Silent,
    /// Ends the whole import.
    Stop(OnnxError),
}

impl<T: Into<ProblemKind>> From<T> for Reject {
    fn from(error: T) -> Self {
        Reject::Invalid(error.into())
    }
}

impl From<OnnxError> for Reject {
    fn from(error: OnnxError) -> Self {
        Reject::Stop(error)
    }
}

/// The errors so far, reported together at the end.
#[derive(Default)]
pub(super) struct Report {
    unsupported: Vec<Unsupported>,
    problems: Vec<Problem>,
}

impl Report {
    pub(crate) fn unsupported(&mut self, name: String, node: String) {
        const PLACES: usize = 3;
        let at = self.unsupported.iter().position(|u| u.name == name).unwrap_or_else(|| {
            self.unsupported.push(Unsupported { name, count: 0, nodes: Vec::new() });
            self.unsupported.len() - 1
        });
        let entry = &mut self.unsupported[at];
        entry.count += 1;
        if entry.nodes.len() < PLACES {
            entry.nodes.push(node);
        }
    }

    pub(crate) fn problem(&mut self, node: String, op: String, kind: ProblemKind) {
        self.problems.push(Problem { node, op, kind });
    }

    /// The error with the whole report, if there is any.
    pub(crate) fn into_error(self) -> Option<OnnxError> {
        let Report { unsupported, problems } = self;
        let quiet = unsupported.is_empty() && problems.is_empty();
        (!quiet).then_some(OnnxError::Nodes { unsupported, problems })
    }
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let more = if self.count > self.nodes.len() as u64 { ", ..." } else { "" };
        write!(f, "{}: {} at {}{more}", self.name, self.count, self.nodes.join(", "))
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node '{}' ({}): {}", self.node, self.op, self.kind)
    }
}
