//! Errors of the import of a module, and their messages.

use std::fmt;

use super::lexer::{MAX_DEPTH, ParseError, Place};
use super::syntax::{Attribute, Operation};
use altiplano_ir::op::ShapeError;
use altiplano_ir::types::TensorType;

/// The reason that the text gives no graph. The caller prepends the file name.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ImportError {
    #[error(transparent)]
    Parse(#[from] ParseError),
    #[error("found {functions} functions, but none is named @main and there is not just one public function")]
    NoMain { functions: usize },
    #[error("{place}: %{name} is not defined before this")]
    Undefined { place: Place, name: Box<str> },
    #[error("{place}: %{name} is defined twice")]
    Redefined { place: Place, name: Box<str> },
    #[error("{place}: there is no function @{name}")]
    UnknownFunction { place: Place, name: Box<str> },
    #[error("{place}: @{name} calls itself")]
    Recursive { place: Place, name: Box<str> },
    #[error("{place}: calls are nested more than {MAX_DEPTH} levels deep")]
    CallsTooDeep { place: Place },
    #[error("{place}: @{name} takes {expected} arguments and gives {results} results, which this call does not match")]
    CallMismatch { place: Place, name: Box<str>, expected: usize, results: usize },
    #[error("{place}: @{name} does not end with a return of {expected} results")]
    NoReturn { place: Place, name: Box<str>, expected: usize },
    #[error("{place}: a region of {op} does not fit: it takes {arguments} values and should return {results}")]
    RegionMismatch { place: Place, op: Box<str>, arguments: usize, results: usize },
    #[error("{place}: the module has more than {limit} operations once its calls and loops are unrolled")]
    TooManyOperations { place: Place, limit: u64 },
    #[error("{place}: @{name} returns nothing; a model returns its loss first")]
    NoResults { place: Place, name: Box<str> },
    #[error("{place}: the program of one rank is not understood: {problem}")]
    Ranks { place: Place, problem: String },
    #[error("the mesh or a layout of the program of one rank does not fit: {problem}")]
    Mesh { problem: String },
    #[error("--size: there is no size '{name}'; {}", crate::known_sizes(.known))]
    UnknownSize { name: Box<str>, known: Vec<String> },
    #[error("{}", crate::listed(.unsupported, .problems, 0))]
    Operations { unsupported: Vec<Unsupported>, problems: Vec<Problem> },
}

const DTYPES: &str = "f64, f32, f16, bf16, the 8-bit floats, i64 to i2, ui64 to ui2 or i1";

/// An op that the graph cannot express.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unsupported {
    /// `stablehlo.fft`, possibly with the unsupported detail: `stablehlo.while (whose end depends on data)`.
    pub name: String,
    /// The number of occurrences after calls are inlined.
    pub count: u64,
    /// The first places in the text, at most three.
    pub places: Vec<Place>,
    /// True if there are more places.
    pub more_places: bool,
}

/// An op that contradicts itself, or an invalid argument.
#[derive(Debug, Clone, PartialEq)]
pub struct Problem {
    pub place: Place,
    /// Empty for an argument.
    pub op: String,
    pub kind: ProblemKind,
}

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ProblemKind {
    #[error("argument {index} has type {ty}; supported are tensors of known sizes of {DTYPES}")]
    ArgumentType { index: usize, ty: Box<str> },
    #[error("{0}")]
    Shape(#[from] ShapeError),
    #[error("is declared to give {declared}, but gives {inferred}")]
    ResultType { declared: Box<str>, inferred: TensorType },
    #[error("operand {index} is declared as {declared}, but is {actual}")]
    OperandType { index: usize, declared: Box<str>, actual: TensorType },
    #[error("takes {expected} operands, found {found}")]
    OperandCount { expected: usize, found: usize },
    #[error("gives {expected} results, but {found} are declared")]
    ResultCount { expected: usize, found: usize },
    #[error("attribute '{name}' is missing or has another form")]
    Attribute { name: &'static str },
    #[error("has {found} regions, but {expected} are needed")]
    RegionCount { expected: usize, found: usize },
    #[error("the literal does not have as many elements as its type")]
    LiteralCount,
    #[error("the literal has an element that its type cannot hold")]
    LiteralElement,
}

/// The reason that one op cannot be converted.
pub(super) enum Reject {
    /// The unsupported detail, or an empty string.
    Unsupported(&'static str),
    Invalid(ProblemKind),
    /// A region inside the op cannot be read.
    Stop(ImportError),
}

impl From<ShapeError> for Reject {
    fn from(error: ShapeError) -> Self {
        Reject::Invalid(error.into())
    }
}

impl From<ImportError> for Reject {
    fn from(error: ImportError) -> Self {
        Reject::Stop(error)
    }
}

/// `stablehlo.fft`, `stablehlo.custom_call @foo`.
pub(super) fn full_name(operation: &Operation) -> String {
    let target = operation.attribute("call_target_name").and_then(Attribute::as_word);
    let target = target.map(|target| format!(" @{target}")).unwrap_or_default();
    format!("{}.{}{target}", operation.dialect, operation.name)
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let places: Vec<String> = self.places.iter().map(Place::to_string).collect();
        let more = if self.more_places { ", ..." } else { "" };
        write!(f, "{}: {} at {}{more}", self.name, self.count, places.join(", "))
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.op.is_empty() {
            true => write!(f, "{}: {}", self.place, self.kind),
            false => write!(f, "{}: {}: {}", self.place, self.op, self.kind),
        }
    }
}
