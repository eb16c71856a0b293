//! What can be wrong with an exported program, and how it is told.

use super::archive::ArchiveError;
use crate::op::ShapeError;
use crate::types::TensorType;
use std::fmt;

/// Why an archive gives no graph. The caller puts the file name in front.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ImportError {
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    #[error("--size: there is no size '{name}'; {}", known_sizes(.known))]
    UnknownSize { name: Box<str>, known: Vec<String> },
    #[error("--size: '{name}' is {value}, but the program is for {} to {}", limit(*.least), limit(*.most))]
    SizeRange { name: Box<str>, value: u64, least: Option<i64>, most: Option<i64> },
    #[error("input '{name}': {problem}")]
    Input { name: Box<str>, problem: &'static str },
    #[error("result {index}: {problem}")]
    Output { index: usize, problem: &'static str },
    #[error("the program returns no tensor; a model returns its loss first")]
    NoResults,
    #[error("the program has more than {limit} operations")]
    TooManyOperations { limit: usize },
    #[error("{}", crate::import::listed(.unsupported, .problems))]
    Operations { unsupported: Vec<Unsupported>, problems: Vec<Problem> },
}

/// An op that the graph cannot express.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unsupported {
    /// `torch.ops.aten.fft_fft.default`, or with what makes it unsupported.
    pub name: String,
    pub count: u64,
    /// The first places, three at most: the program's name of the result, and the module that computes it.
    pub places: Vec<String>,
}

/// An op that contradicts itself.
#[derive(Debug, Clone, PartialEq)]
pub struct Problem {
    pub place: String,
    pub op: String,
    pub kind: ProblemKind,
}

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ProblemKind {
    #[error("{0}")]
    Shape(#[from] ShapeError),
    #[error("argument '{name}' is missing or is not {expected}")]
    Argument { name: Box<str>, expected: &'static str },
    #[error("value '{name}' is not defined before this")]
    Undefined { name: Box<str> },
    #[error("has {declared} results, but gives {found}")]
    ResultCount { declared: usize, found: usize },
    #[error("is declared to give {declared}, but gives {found}")]
    ResultType { declared: TensorType, found: TensorType },
    #[error("reads a value that may or may not share memory with one that was changed in place; clone it in the model")]
    Aliased,
    #[error("{0}")]
    Other(&'static str),
}

/// Why one op cannot be converted.
pub(super) enum Reject {
    /// With what is special about it, or an empty string.
    Unsupported(&'static str),
    Invalid(ProblemKind),
    Stop(ImportError),
}

impl From<ShapeError> for Reject {
    fn from(error: ShapeError) -> Self {
        Reject::Invalid(error.into())
    }
}

impl From<ProblemKind> for Reject {
    fn from(kind: ProblemKind) -> Self {
        Reject::Invalid(kind)
    }
}

/// A contradiction that has no kind of its own.
pub(super) fn other(problem: &'static str) -> Reject {
    Reject::Invalid(ProblemKind::Other(problem))
}

fn limit(value: Option<i64>) -> String {
    value.map_or("any".to_string(), |v| v.to_string())
}

fn known_sizes(known: &[String]) -> String {
    match known {
        [] => "all sizes of this program are fixed".to_string(),
        known => format!("the sizes that the program leaves open are {}", known.join(", ")),
    }
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let more = if self.count > self.places.len() as u64 { ", ..." } else { "" };
        write!(f, "{}: {} at {}{more}", self.name, self.count, self.places.join(", "))
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.place, self.op, self.kind)
    }
}
