//! Errors in a config, and notes for its reader.

use altiplano_ir::dtype::DType;
use altiplano_ir::op::ShapeError;
use std::fmt;

/// The reason why a config gives no graph. The caller prefixes the file name.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("{0}")]
    Syntax(#[source] serde_json::Error),
    #[error(
        "model_type: '{found}' is not known; the nearest of those known are {}; export other models with torch.export or JAX",
        .nearest.join(", ")
    )]
    ModelType { found: String, nearest: Vec<&'static str> },
    #[error("{field}: is there twice")]
    Twice { field: String },
    #[error("{field}: is missing")]
    Missing { field: String },
    #[error("{field}: expected {expected}, found {found}")]
    Expected { field: String, expected: String, found: String },
    #[error("{field}: {found} is not supported; supported are {}", .supported.join(", "))]
    Unsupported { field: String, found: String, supported: Vec<&'static str> },
    #[error("{field}: {value} is not a multiple of {by} ({of})")]
    Indivisible { field: String, value: u64, by: &'static str, of: u64 },
    #[error("{field}: {value} is more than {by} ({of})")]
    MoreThan { field: String, value: u64, by: &'static str, of: u64 },
    #[error("{option}: expected more than 0 and at most {most}, found {found}")]
    Option { option: &'static str, found: f64, most: f64 },
    #[error("--seq: {sequence} tokens are more than the {positions} positions that the model has ({field})")]
    TooLong { sequence: u64, positions: u64, field: &'static str },
    #[error("--seq: this model takes images, whose number of patches the config says")]
    NoSequence,
    #[error("{}{error}", at(.place))]
    Shape { place: String, error: ShapeError },
}

impl From<ShapeError> for ConfigError {
    /// The enclosing block fills in the place.
    fn from(error: ShapeError) -> Self {
        ConfigError::Shape { place: String::new(), error }
    }
}

fn at(place: &str) -> String {
    if place.is_empty() { String::new() } else { format!("{place}: ") }
}

/// An assumption about something that a config leaves open.
#[derive(Clone, Debug, PartialEq)]
pub enum Note {
    /// No sequence length was given.
    Sequence { tokens: u64 },
    /// The config asks for dropout, which the graph omits.
    Dropout { field: String },
    /// An expert processes this many tokens of each sequence, and drops the others that chose it.
    Capacity { tokens: u64, sequence: u64, factor: f64, all: f64 },
    /// The number of masked positions in a sequence.
    Masked { positions: u64, sequence: u64 },
    /// The config is of a model with another head than the one that is built for its type.
    Head { found: String, planned: &'static str },
    /// Sizes that the config does not state, with the defaults of Transformers.
    Assumed { sizes: Vec<(String, u64)> },
    /// The config states no type of its weights.
    Precision,
    /// The checkpoint stores quantised weights, by this method; the model is built in the type of its computations.
    Quantised { method: Option<String>, planned: DType },
    /// The model has several parts, and only its text decoder is planned.
    Part { taken: String, family: &'static str, left_out: Vec<String> },
    /// Unknown fields, which may affect the model.
    Unread { fields: Vec<String> },
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Note::Sequence { tokens } => {
                write!(f, "samples are taken to have {tokens} tokens; --seq N says another number")
            }
            Note::Dropout { field } => write!(f, "dropout ({field}) is left out"),
            Note::Capacity { tokens, sequence, factor, all } => write!(
                f,
                "an expert takes {tokens} tokens of a sequence of {sequence} at most, and others that choose it pass by; --capacity-factor X says how many (now {factor}; {all} drops none)"
            ),
            Note::Head { found, planned } => {
                write!(f, "architectures: a {found} has another head and loss; what is planned is {planned}")
            }
            Note::Assumed { sizes } => {
                let sizes: Vec<String> = sizes.iter().map(|(field, size)| format!("{field} {size}")).collect();
                write!(f, "not in the config, and taken as Transformers does: {}", sizes.join(", "))
            }
            Note::Precision => f.write_str(
                "dtype: is not in the config, so that everything is in float32; --precision bf16 says another type",
            ),
            Note::Quantised { method, planned } => {
                let method = method.as_ref().map(|method| format!(" ({method})")).unwrap_or_default();
                write!(
                    f,
                    "quantization_config: the checkpoint's weights are quantised{method}; the plan has them in {planned}"
                )
            }
            Note::Part { taken, family, left_out } => {
                write!(f, "the model has several parts; what is planned is the text model of {taken} ({family})")?;
                if left_out.is_empty() { Ok(()) } else { write!(f, ", without {}", left_out.join(", ")) }
            }
            Note::Unread { fields } => {
                let s = if fields.len() == 1 { " is" } else { "s are" };
                write!(f, "the field{s} not known here and left out: {}", fields.join(", "))
            }
            Note::Masked { positions, sequence } => {
                write!(
                    f,
                    "the loss is that of {positions} masked positions of {sequence}, which the input `masked_positions` names"
                )
            }
        }
    }
}
