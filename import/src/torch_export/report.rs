//! Errors of the import of an exported program, and their messages.

use super::archive::ArchiveError;
use super::call::SIZE_OF_DATA;
use crate::OpenSize;
use altiplano_ir::op::ShapeError;
use altiplano_ir::types::TensorType;
use std::fmt;

/// The reason that an archive gives no graph. The caller prepends the file name.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ImportError {
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    #[error("--size: there is no size '{name}'; {}", crate::known_sizes(.known))]
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
    #[error("{}{}", crate::listed(.unsupported, .problems, *.consequences), advice(.unsupported, .guessed))]
    Operations {
        unsupported: Vec<Unsupported>,
        problems: Vec<Problem>,
        /// The number of ops that were skipped because they depend on these.
        consequences: usize,
        /// Sizes that were guessed, which may be the cause.
        guessed: Vec<OpenSize>,
    },
}

/// An op that the graph cannot express.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unsupported {
    /// `torch.ops.aten.fft_fft.default`, possibly with the unsupported detail.
    pub name: String,
    pub count: u64,
    /// The first places, at most three: the program's name of the result, and the module that computes it.
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

/// The reason that one op cannot be converted.
pub(super) enum Reject {
    /// The unsupported detail, or an empty string.
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

/// A contradiction without a kind of its own.
pub(super) fn other(problem: &'static str) -> Reject {
    Reject::Invalid(ProblemKind::Other(problem))
}

/// Advice on unsupported ops, and on guessed sizes.
fn advice(unsupported: &[Unsupported], guessed: &[OpenSize]) -> String {
    let mut text = String::new();
    let decomposes = |op: &&Unsupported| {
        let name = op.name.strip_prefix("torch.ops.aten.").unwrap_or_default();
        let name = name.split('.').next().unwrap_or_default();
        DECOMPOSED.contains(&name)
    };
    let names: Vec<&str> = unsupported.iter().filter(decomposes).map(|op| op.name.as_str()).collect();
    if !names.is_empty() {
        text += &format!(
            "\nprogram.run_decompositions() before torch.export.save writes {} in simpler ops; it also drops detach and no_grad, so that gradients flow where the model stops them",
            names.join(", ")
        );
    }
    if unsupported.iter().any(|op| op.name.contains(SIZE_OF_DATA)) {
        text += "\na size that is taken from a tensor (.item()) can be given: --size u0=N, with the symbol that the program has for it";
    }
    if !guessed.is_empty() {
        let guesses: Vec<String> = guessed.iter().map(|size| format!("{size}={}", size.value)).collect();
        text += &format!(
            "\nthe program leaves sizes open, which were taken to be {}; --size NAME=N says otherwise",
            guesses.join(", ")
        );
    }
    text
}

/// Ops that PyTorch's decompositions rewrite, mostly to supported ops.
const DECOMPOSED: &[&str] = &[
    "addr",
    "alias_copy",
    "alpha_dropout",
    "atleast_1d",
    "atleast_2d",
    "atleast_3d",
    "bilinear",
    "block_diag",
    "cartesian_prod",
    "column_stack",
    "combinations",
    "corrcoef",
    "cov",
    "cross",
    "deg2rad",
    "diagflat",
    "diagonal_copy",
    "dsplit",
    "dstack",
    "feature_alpha_dropout",
    "float_power",
    "heaviside",
    "hsplit",
    "inner",
    "isclose",
    "isin",
    "isneginf",
    "isposinf",
    "kron",
    "linalg_cross",
    "linalg_diagonal",
    "linalg_matrix_norm",
    "linalg_matrix_power",
    "linalg_multi_dot",
    "linalg_vander",
    "linalg_vecdot",
    "log_sigmoid_forward",
    "logaddexp2",
    "logspace",
    "matrix_power",
    "msort",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "mvlgamma",
    "nanmean",
    "norm_except_dim",
    "pdist",
    "rad2deg",
    "renorm",
    "resize_as",
    "rot90",
    "row_stack",
    "sinc",
    "slow_conv3d",
    "squeeze_copy",
    "sum_to_size",
    "t_copy",
    "tensordot",
    "transpose_copy",
    "trapezoid",
    "trapz",
    "unfold_copy",
    "unsqueeze_copy",
    "vander",
    "vsplit",
];

fn limit(value: Option<i64>) -> String {
    value.map_or("any".to_string(), |v| v.to_string())
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let more = if self.count > self.places.len() as u64 { ", ..." } else { "" };
        write!(f, "{}: {} at {}{more}", self.name, self.count, self.places.join(", "))
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
