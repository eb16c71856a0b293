//! Hugging Face configs. A `config.json` gives an architecture and its sizes, and the training graph follows from the
//! architecture's published definition.
//!
//! Weights have the names and shapes of the published checkpoints, so that their files load. Experts are stacked in one
//! tensor, as Transformers stacks them when it loads such files. Text decoders share one description, `decoder`, to
//! which `families` map their configs. Encoders have a file each. The blocks are in `blocks`, `attention`,
//! `feed`, `moe`, `latent`, `state_space`, `selective` and `rope`.

mod attention;
mod bert;
mod blocks;
mod clip;
mod config;
mod decoder;
mod error;
mod families;
mod feed;
mod latent;
mod modernbert;
mod moe;
mod rope;
mod selective;
mod state_space;
mod t5;
mod vit;
mod whisper;
mod zamba2;

#[cfg(test)]
mod tests;

use altiplano_ir::cluster::Routing;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::Graph;
use blocks::Builder;
use config::{Fields, Keys, MAX_SEQUENCE, MAX_SIZE};
pub use error::{ConfigError, Note};
use families::{command, experts, gemma, glm, gpt, hybrid, llama, mamba};
use serde_json::{Map, Value};
use std::borrow::Cow;

/// Options that a config does not state.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct ConfigOptions {
    /// The number of samples in the batch. 0 and 1 are one sample.
    pub batch: u64,
    /// The number of tokens in a sample. By default, the model's number of positions, but at most `DEFAULT_SEQUENCE`.
    pub sequence: Option<u64>,
    /// The number of tokens that each expert processes in a sequence, relative to an even spread: see `moe`.
    pub capacity_factor: Option<f64>,
    /// The precision of the weights, by default that of the checkpoint. Norms, the softmax and the loss are at least
    /// f32.
    pub dtype: Option<DType>,
    /// True if the output is the logits instead of the loss.
    pub without_loss: bool,
}

/// The default limit of the sequence length. Longer sequences must be requested.
pub(crate) const DEFAULT_SEQUENCE: u64 = 4096;

/// The graph of a config, with its loss as output, and notes for the reader.
#[derive(Clone, Debug, PartialEq)]
pub struct Imported {
    pub graph: Graph,
    pub notes: Vec<Note>,
    /// How tokens are routed to experts, if there are any.
    pub routing: Option<Routing>,
}

/// A family: how to read its config and build its graph.
struct Family {
    /// The config's `model_type`.
    name: &'static str,
    /// The aliases of fields, as pairs of a name and its alias.
    aliases: &'static [(&'static str, &'static str)],
    build: fn(&Fields<'_>, &mut Builder) -> Result<(), ConfigError>,
    loss: Loss,
}

/// The training objective of a family's models.
#[derive(Clone, Copy)]
enum Loss {
    NextTokens,
    MaskedTokens,
    TextToText,
    Classes,
    Pairs,
}

impl Loss {
    fn name(self) -> &'static str {
        match self {
            Loss::NextTokens => "a model of next tokens",
            Loss::MaskedTokens => "a model of masked tokens",
            Loss::TextToText => "a model of a text that follows from another",
            Loss::Classes => "a classifier of images",
            Loss::Pairs => "a model of pairs of an image and a text",
        }
    }

    /// The endings of Transformers' names of models with this head.
    fn heads(self) -> &'static [&'static str] {
        match self {
            Loss::NextTokens => &["ForCausalLM", "LMHeadModel"],
            Loss::MaskedTokens => &["ForMaskedLM"],
            Loss::TextToText => &["ForConditionalGeneration", "LMHeadModel"],
            Loss::Classes => &["ForImageClassification"],
            // Transformers uses only the model's name here.
            Loss::Pairs => &["Model"],
        }
    }
}

const fn family(
    name: &'static str,
    build: fn(&Fields<'_>, &mut Builder) -> Result<(), ConfigError>,
    loss: Loss,
) -> Family {
    Family { name, aliases: &[], build, loss }
}

const fn decoder(name: &'static str, build: fn(&Fields<'_>, &mut Builder) -> Result<(), ConfigError>) -> Family {
    family(name, build, Loss::NextTokens)
}

/// A decoder whose fields have aliases in Transformers.
const fn decoder_of(
    name: &'static str,
    aliases: &'static [(&'static str, &'static str)],
    build: fn(&Fields<'_>, &mut Builder) -> Result<(), ConfigError>,
) -> Family {
    Family { aliases, ..decoder(name, build) }
}

const GPT2_NAMES: &[(&str, &str)] = &[
    ("n_embd", "hidden_size"),
    ("n_head", "num_attention_heads"),
    ("n_layer", "num_hidden_layers"),
    ("n_positions", "max_position_embeddings"),
];
const BLOOM_NAMES: &[(&str, &str)] =
    &[("hidden_size", "n_embed"), ("n_head", "num_attention_heads"), ("n_layer", "num_hidden_layers")];
const FALCON_NAMES: &[(&str, &str)] = &[
    ("hidden_size", "n_embed"),
    ("num_attention_heads", "n_head"),
    ("num_hidden_layers", "n_layer"),
    ("num_kv_heads", "n_head_kv"),
];
const MPT_NAMES: &[(&str, &str)] =
    &[("d_model", "hidden_size"), ("n_heads", "num_attention_heads"), ("n_layers", "num_hidden_layers")];
const EXPERTS_NAMES: &[(&str, &str)] = &[
    ("num_experts", "num_local_experts"),
    ("num_local_experts", "num_experts"),
    ("n_routed_experts", "num_local_experts"),
];

const HYBRID_NAMES: &[(&str, &str)] = &[("layer_types", "layers_block_type")];

/// The families in alphabetical order.
const FAMILIES: &[Family] = &[
    decoder("bamba", hybrid::bamba),
    family("bert", bert::build, Loss::MaskedTokens),
    decoder_of("bloom", BLOOM_NAMES, gpt::bloom),
    family("clip", clip::clip, Loss::Pairs),
    decoder("cohere", command::cohere),
    decoder("cohere2", command::cohere2),
    decoder_of("deepseek_v3", EXPERTS_NAMES, experts::deepseek_v3),
    decoder("ernie4_5", llama::ernie4_5),
    decoder_of("falcon", FALCON_NAMES, gpt::falcon),
    decoder("falcon_mamba", mamba::falcon_mamba),
    decoder("gemma", gemma::gemma),
    decoder("gemma2", gemma::gemma2),
    decoder("gemma3_text", gemma::gemma3),
    decoder("glm", glm::glm),
    decoder("glm4", glm::glm),
    decoder_of("glm4_moe", EXPERTS_NAMES, experts::glm4_moe),
    decoder_of("gpt2", GPT2_NAMES, gpt::gpt2),
    decoder("gpt_neox", gpt::gpt_neox),
    decoder_of("gpt_oss", EXPERTS_NAMES, experts::gpt_oss),
    decoder_of("gptj", GPT2_NAMES, gpt::gptj),
    decoder("granite", llama::granite),
    decoder("granitemoe", experts::granitemoe),
    decoder_of("granitemoehybrid", HYBRID_NAMES, hybrid::granitemoehybrid),
    decoder_of("jamba", EXPERTS_NAMES, mamba::jamba),
    decoder_of("kimi_k2", EXPERTS_NAMES, experts::deepseek_v3),
    decoder("llama", llama::llama),
    decoder("llama4_text", experts::llama4),
    decoder("mamba", mamba::mamba),
    decoder("mamba2", hybrid::mamba2),
    decoder("mistral", llama::mistral),
    decoder_of("mixtral", EXPERTS_NAMES, experts::mixtral),
    family("modernbert", modernbert::build, Loss::MaskedTokens),
    decoder_of("mpt", MPT_NAMES, gpt::mpt),
    decoder("nemotron", llama::nemotron),
    decoder_of("nemotron_h", HYBRID_NAMES, hybrid::nemotron_h),
    decoder("olmo", llama::olmo),
    decoder("olmo2", llama::olmo2),
    decoder("olmo3", llama::olmo2),
    decoder_of("olmoe", EXPERTS_NAMES, experts::olmoe),
    decoder("opt", gpt::opt),
    decoder("phi", llama::phi),
    decoder("phi3", llama::phi3),
    decoder("qwen2", llama::qwen2),
    decoder("qwen2_5_vl_text", llama::qwen2),
    decoder_of("qwen2_moe", EXPERTS_NAMES, experts::qwen2_moe),
    decoder("qwen2_vl_text", llama::qwen2),
    decoder("qwen3", llama::qwen3),
    decoder_of("qwen3_moe", EXPERTS_NAMES, experts::qwen3_moe),
    decoder_of("qwen3_vl_moe_text", EXPERTS_NAMES, experts::qwen3_moe),
    decoder("qwen3_vl_text", llama::qwen3),
    family("siglip", clip::siglip, Loss::Pairs),
    decoder("smollm3", llama::smollm3),
    decoder("stablelm", llama::stablelm),
    decoder("starcoder2", llama::starcoder2),
    family("t5", t5::build, Loss::TextToText),
    family("vit", vit::build, Loss::Classes),
    family("whisper", whisper::build, Loss::TextToText),
    decoder_of("zamba2", HYBRID_NAMES, zamba2::build),
];

/// Reads a config and builds the graph of its training loss.
///
/// ```
/// use altiplano_import::huggingface::{ConfigOptions, import};
///
/// let config = r#"{"model_type": "gpt2", "vocab_size": 100, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}"#;
/// let options = ConfigOptions { batch: 4, ..Default::default() };
/// let graph = import(config, &options)?.graph;
/// assert_eq!(graph.inputs().map(|(_, name)| name).collect::<Vec<_>>(), ["input_ids", "labels"]);
/// # Ok::<(), altiplano_import::huggingface::ConfigError>(())
/// ```
pub fn import(text: &str, options: &ConfigOptions) -> Result<Imported, ConfigError> {
    let Keys { map, twice } = serde_json::from_str(&finite_numbers(text)).map_err(ConfigError::Syntax)?;
    if let Some(field) = twice {
        return Err(ConfigError::Twice { field });
    }
    if options.batch > MAX_SIZE {
        return Err(ConfigError::Option { option: "the batch", found: options.batch as f64, most: MAX_SIZE as f64 });
    }
    if let Some(sequence) = options.sequence.filter(|&s| s == 0 || s > MAX_SEQUENCE) {
        return Err(ConfigError::Option { option: "--seq", found: sequence as f64, most: MAX_SEQUENCE as f64 });
    }
    if let Some(factor) = options.capacity_factor.filter(|f| !(*f > 0.0 && *f <= MAX_SIZE as f64)) {
        return Err(ConfigError::Option { option: "--capacity-factor", found: factor, most: MAX_SIZE as f64 });
    }
    let part = text_part(&map)?;
    let (family, part_note) = planned(&map, part.as_ref())?;
    let whole = Fields::new(&map, &[]);
    let fields = match part.as_ref().filter(|_| part_note.is_some()) {
        Some((path, part)) => Fields::of_part(part, path),
        None => Fields::new(&map, &[]),
    };
    // Parts that the note names need no further note.
    if let Some(Note::Part { left_out, .. }) = &part_note {
        left_out.iter().for_each(|part| fields.ignore(&[part]));
    }
    let fields = fields.with_aliases(family.aliases);
    // Newer versions of Transformers use the name `dtype`.
    let states = |fields: &Fields<'_>| fields.has("dtype") || fields.has("torch_dtype");
    let stated = dtype(if states(&fields) { &fields } else { &whole })?;
    let mut builder = Builder::new(family.name, options.dtype.unwrap_or(stated), options);
    builder.notes.extend(part_note);
    if options.dtype.is_none() && !states(&fields) && !states(&whole) {
        builder.notes.push(Note::Precision);
    }
    const QUANTISED: &str = "quantization_config";
    if let Some(Value::Object(how)) = map.get(QUANTISED) {
        fields.ignore(&[QUANTISED]);
        let method = how.get("quant_method").and_then(Value::as_str).map(str::to_string);
        builder.notes.push(Note::Quantised { method, planned: options.dtype.unwrap_or(stated) });
    }
    (family.build)(&fields, &mut builder)?;
    // A model without a head gets this one. The class name of a model with several parts says nothing about the part
    // that is planned.
    let stated = fields.words("architectures")?.unwrap_or_default();
    let no_head = |name: &str| name.ends_with("Model") && !name.contains("Head");
    let is_ours = |name: &&str| no_head(name) || family.loss.heads().iter().any(|head| name.ends_with(head));
    if let Some(other) = stated.first().filter(|name| !is_ours(name)) {
        builder.notes.push(Note::Head { found: other.to_string(), planned: family.loss.name() });
    }
    let assumed = fields.assumed();
    if !assumed.is_empty() {
        builder.notes.push(Note::Assumed { sizes: assumed });
    }
    let fields = fields.unread();
    if !fields.is_empty() {
        builder.notes.push(Note::Unread { fields });
    }
    Ok(builder.finish())
}

/// Replaces `Infinity`, which Python writes and JSON lacks, by a number near the greatest. The replacement has the same
/// length, so that error positions stay valid.
pub fn finite_numbers(text: &str) -> Cow<'_, str> {
    const WORD: &str = "Infinity";
    if !text.contains(WORD) {
        return Cow::Borrowed(text);
    }
    let mut numbers = String::with_capacity(text.len());
    let (mut quoted, mut escaped, mut rest) = (false, false, text);
    while let Some(next) = rest.chars().next() {
        if !quoted && let Some(after) = rest.strip_prefix(WORD) {
            numbers.push_str("1.7e+308");
            rest = after;
            continue;
        }
        quoted ^= next == '"' && !escaped;
        escaped = quoted && next == '\\' && !escaped;
        numbers.push(next);
        rest = &rest[next.len_utf8()..];
    }
    Cow::Owned(numbers)
}

/// The places in configs of models with several parts that describe the text decoder.
const TEXT_PARTS: &[&str] = &["text_config", "llm_config", "language_config", "thinker_config.text_config"];

/// The families of text decoders, by the `model_type` of models with several parts. They are for models that do not
/// name the family in the part.
const TEXT_OF: &[(&str, &str)] = &[
    ("aya_vision", "cohere2"),
    ("gemma3", "gemma3_text"),
    ("idefics3", "llama"),
    ("internvl", "qwen2"),
    ("kimi_k25", "deepseek_v3"),
    ("llama4", "llama4_text"),
    ("llava", "llama"),
    ("llava_next", "llama"),
    ("mistral3", "mistral"),
    ("paligemma", "gemma"),
    ("qwen2_5_vl", "qwen2_5_vl_text"),
    ("qwen2_vl", "qwen2_vl_text"),
    ("qwen3_vl", "qwen3_vl_text"),
    ("qwen3_vl_moe", "qwen3_vl_moe_text"),
    ("smolvlm", "llama"),
];

/// The part of a config about a text decoder, and its path.
fn text_part(map: &Map<String, Value>) -> Result<Option<(String, Map<String, Value>)>, ConfigError> {
    for path in TEXT_PARTS {
        let mut found = Some(map);
        for key in path.split('.') {
            found = found.and_then(|map| map.get(key)).and_then(Value::as_object);
        }
        if let Some(part) = found {
            return Ok(Some((path.to_string(), part.clone())));
        }
    }
    Ok(None)
}

/// The family that is planned, and a note if it is that of a part.
fn planned(
    map: &Map<String, Value>,
    part: Option<&(String, Map<String, Value>)>,
) -> Result<(&'static Family, Option<Note>), ConfigError> {
    let word = |map: &Map<String, Value>| map.get("model_type").and_then(Value::as_str).map(str::to_string);
    let known = |name: &str| FAMILIES.iter().find(|family| family.name == name);
    let unknown = |found: String| ConfigError::ModelType { nearest: nearest(&found), found };
    let whole = Fields::new(map, &[]).word("model_type");
    if let Some(family) = whole.as_ref().ok().and_then(|name| known(name)) {
        return Ok((family, None));
    }
    let contained = whole.as_ref().ok().and_then(|name| TEXT_OF.iter().find(|(whole, _)| whole == name));
    let contained = contained.map(|(_, text)| text.to_string());
    let others = |taken: &str| {
        let first = taken.split('.').next().unwrap_or(taken);
        let parts = map.iter().filter(|(key, value)| value.is_object() && key.ends_with("_config") && *key != first);
        parts.map(|(key, _)| key.clone()).filter(|key| key != "quantization_config").collect::<Vec<_>>()
    };
    match part {
        Some((path, part)) => {
            let found = match word(part).or(contained) {
                Some(found) => found,
                None => whole?,
            };
            let family = known(&found).ok_or_else(|| unknown(found))?;
            let note = Note::Part { taken: path.clone(), family: family.name, left_out: others(path) };
            Ok((family, Some(note)))
        }
        // Older configs mix the fields of the text decoder with those of the other parts.
        None => match contained.as_deref().and_then(known) {
            Some(family) => {
                let note = Note::Part { taken: "the config".into(), family: family.name, left_out: others("") };
                Ok((family, Some(note)))
            }
            None => Err(unknown(whole?)),
        },
    }
}

/// The families with the names closest to `found`, closest first.
fn nearest(found: &str) -> Vec<&'static str> {
    let mut all: Vec<(usize, &str)> = FAMILIES.iter().map(|f| (distance(found, f.name), f.name)).collect();
    all.sort();
    all.into_iter().take(5).map(|(_, name)| name).collect()
}

/// The distance of two names: their edit distance, plus the length of the longer one after their common prefix.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().take(64).collect(), b.chars().collect());
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let changed = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(diagonal + 1);
        }
    }
    let alike = a.iter().zip(&b).take_while(|(x, y)| x == y).count();
    row[b.len()] + a.len().max(b.len()) - alike
}

/// The precision of the weights. Quantised checkpoints are trained in this type too.
fn dtype(fields: &Fields<'_>) -> Result<DType, ConfigError> {
    let key = if fields.has("dtype") { "dtype" } else { "torch_dtype" };
    match fields.word_or(key, "float32")?.as_str() {
        "float32" => Ok(DType::F32),
        "bfloat16" => Ok(DType::BF16),
        "float16" => Ok(DType::F16),
        "float64" => Ok(DType::F64),
        _ => Err(fields.unsupported(key, &["float32", "bfloat16", "float16", "float64"])),
    }
}
