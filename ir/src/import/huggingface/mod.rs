//! Hugging Face configs: a `config.json` names an architecture and its sizes, and the training graph follows from the
//! architecture's published definition.
//!
//! Weights have the names and shapes of the published checkpoints, so that files of them load; experts are stacked in one
//! tensor, as Transformers stacks them when it loads such files. One file a family says how its blocks are put together;
//! the blocks are in [`blocks`], [`attention`], [`rope`] and [`moe`].

mod attention;
mod bert;
mod blocks;
mod config;
mod decoder;
mod deepseek;
mod error;
mod gpt2;
mod moe;
mod nemotron;
mod rope;
mod t5;
mod vit;

#[cfg(test)]
mod tests;

use crate::dtype::DType;
use crate::graph::Graph;
use blocks::Builder;
use config::{Fields, Keys, MAX_SEQUENCE, MAX_SIZE};
pub use error::{ConfigError, Note};

/// What a config does not say.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct ConfigOptions {
    /// Samples in the batch; 0 and 1 are one sample.
    pub batch: u64,
    /// Tokens in a sample; default: as many as the model has positions, but [`DEFAULT_SEQUENCE`] at most.
    pub sequence: Option<u64>,
    /// How many times the tokens that each expert gets of a sequence where all get the same are computed: see [`moe`].
    pub capacity_factor: Option<f64>,
    /// Precision of the weights; default: that of the checkpoint. Norms, the softmax and the loss are f32 at least.
    pub dtype: Option<DType>,
    /// The output is what the loss would be taken of: logits.
    pub without_loss: bool,
}

/// Longer sequences are asked for.
pub const DEFAULT_SEQUENCE: u64 = 4096;

/// The graph of a config, its loss being the output, and what the reader should know of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Imported {
    pub graph: Graph,
    pub notes: Vec<Note>,
}

/// A family: how its config is read and its graph built.
struct Family {
    /// The config's `model_type`.
    name: &'static str,
    build: fn(&Fields<'_>, &mut Builder) -> Result<(), ConfigError>,
    loss: Loss,
}

/// What the models of a family are trained for.
#[derive(Clone, Copy)]
enum Loss {
    NextTokens,
    MaskedTokens,
    TextToText,
    Classes,
}

impl Loss {
    fn name(self) -> &'static str {
        match self {
            Loss::NextTokens => "a model of next tokens",
            Loss::MaskedTokens => "a model of masked tokens",
            Loss::TextToText => "a model of a text that follows from another",
            Loss::Classes => "a classifier of images",
        }
    }

    /// Ends of the names that Transformers gives models with this head.
    fn heads(self) -> &'static [&'static str] {
        match self {
            Loss::NextTokens => &["ForCausalLM", "LMHeadModel"],
            Loss::MaskedTokens => &["ForMaskedLM"],
            Loss::TextToText => &["ForConditionalGeneration", "LMHeadModel"],
            Loss::Classes => &["ForImageClassification"],
        }
    }
}

const fn family(
    name: &'static str,
    build: fn(&Fields<'_>, &mut Builder) -> Result<(), ConfigError>,
    loss: Loss,
) -> Family {
    Family { name, build, loss }
}

/// The families in alphabetical order.
const FAMILIES: &[Family] = &[
    family("bert", bert::build, Loss::MaskedTokens),
    family("deepseek_v3", deepseek::build, Loss::NextTokens),
    family("gpt2", gpt2::build, Loss::NextTokens),
    family("llama", decoder::build, Loss::NextTokens),
    family("mistral", decoder::build, Loss::NextTokens),
    family("mixtral", decoder::build, Loss::NextTokens),
    family("nemotron", nemotron::build, Loss::NextTokens),
    family("qwen2", decoder::build, Loss::NextTokens),
    family("qwen3", decoder::build, Loss::NextTokens),
    family("t5", t5::build, Loss::TextToText),
    family("vit", vit::build, Loss::Classes),
];

/// Reads a config and builds the graph of its training loss.
///
/// ```
/// use altiplano_ir::import::huggingface::{ConfigOptions, import};
///
/// let config = r#"{"model_type": "gpt2", "vocab_size": 100, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}"#;
/// let options = ConfigOptions { batch: 4, ..Default::default() };
/// let graph = import(config, &options)?.graph;
/// assert_eq!(graph.inputs().map(|(_, name)| name).collect::<Vec<_>>(), ["input_ids", "labels"]);
/// # Ok::<(), altiplano_ir::import::huggingface::ConfigError>(())
/// ```
pub fn import(text: &str, options: &ConfigOptions) -> Result<Imported, ConfigError> {
    let Keys { map, twice } = serde_json::from_str(text).map_err(ConfigError::Syntax)?;
    if let Some(field) = twice {
        return Err(ConfigError::Twice { field });
    }
    let fields = Fields::new(&map);
    let model_type = fields.word("model_type")?;
    let known = || FAMILIES.iter().map(|family| family.name).collect();
    let family = FAMILIES.iter().find(|family| family.name == model_type);
    let family = family.ok_or_else(|| ConfigError::ModelType { found: model_type.clone(), known: known() })?;
    if options.batch > MAX_SIZE {
        return Err(ConfigError::Option { option: "the batch", found: options.batch as f64, most: MAX_SIZE as f64 });
    }
    if let Some(sequence) = options.sequence.filter(|&s| s == 0 || s > MAX_SEQUENCE) {
        return Err(ConfigError::Option { option: "--seq", found: sequence as f64, most: MAX_SEQUENCE as f64 });
    }
    if let Some(factor) = options.capacity_factor.filter(|f| !(*f > 0.0 && *f <= MAX_SIZE as f64)) {
        return Err(ConfigError::Option { option: "--capacity-factor", found: factor, most: MAX_SIZE as f64 });
    }
    let stated = dtype(&fields)?;
    let mut builder = Builder::new(family.name, options.dtype.unwrap_or(stated), options);
    (family.build)(&fields, &mut builder)?;
    // One without a head is taken to get it.
    let stated = fields.words("architectures")?.unwrap_or_default();
    let no_head = |name: &str| name.ends_with("Model") && !name.contains("Head");
    let is_ours = |name: &&str| no_head(name) || family.loss.heads().iter().any(|head| name.ends_with(head));
    if let Some(other) = stated.first().filter(|name| !is_ours(name)) {
        builder.notes.push(Note::Head { found: other.to_string(), planned: family.loss.name() });
    }
    let fields = fields.unread();
    if !fields.is_empty() {
        builder.notes.push(Note::Unread { fields });
    }
    Ok(builder.finish())
}

/// Precision of the weights. Quantised checkpoints are trained in the type that this says, too.
fn dtype(fields: &Fields<'_>) -> Result<DType, ConfigError> {
    // Newer versions of Transformers call it `dtype`.
    let key = if fields.has("dtype") { "dtype" } else { "torch_dtype" };
    match fields.word_or(key, "float32")?.as_str() {
        "float32" => Ok(DType::F32),
        "bfloat16" => Ok(DType::BF16),
        "float16" => Ok(DType::F16),
        "float64" => Ok(DType::F64),
        _ => Err(fields.unsupported(key, &["float32", "bfloat16", "float16", "float64"])),
    }
}
