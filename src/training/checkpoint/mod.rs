//! Checkpoints: everything that a run needs to resume, written so that a reader never takes half of one for a complete
//! one.
//!
//! A checkpoint is a folder of tensor files and a manifest, which is written last and has a checksum of each file.
//! Tensors are whole, however the plan splits them. So a checkpoint fits any plan of the same model and optimizer.

mod folder;
mod read;
mod write;

pub use folder::{Folder, Found, list, verify};
pub use read::{for_each_tensor, load, newest, weights};
pub use write::{Writer, Written};

use crate::error::Error;
use crate::units::plural;
use altiplano_ir::batch::rebatch;
use altiplano_ir::graph::Graph;
use altiplano_ir::literal::{Real, Values};
use altiplano_ir::loss_scale::LossScale;
use altiplano_ir::op::Op;
use altiplano_ir::optimizer::Optimizer;
use altiplano_ir::plan::{Plan, graph_hash};
use altiplano_ir::program::ALL_PARAMETERS;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_128;

pub const FORMAT: &str = "altiplano.checkpoint";
pub const VERSION: u32 = 2;
pub const MANIFEST: &str = "manifest.json";

/// Options of a run's checkpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoints {
    pub folder: PathBuf,
    /// Steps between two checkpoints. There is always one at the end, and after an interrupt.
    pub every: Option<u64>,
    /// Number of checkpoints to keep; all if absent.
    pub keep: Option<u64>,
    /// Resume from the newest.
    pub resume: bool,
    /// Maximum bytes of tensors in one file, unless a single tensor has more.
    pub shard_bytes: u64,
}

impl Checkpoints {
    /// Checkpoints at the end and after an interrupt.
    pub fn new(folder: impl Into<PathBuf>) -> Checkpoints {
        Checkpoints { folder: folder.into(), every: None, keep: None, resume: false, shard_bytes: 256 << 20 }
    }
}

/// The metadata of a checkpoint (`manifest.json`, docs/checkpoint.schema.json).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    pub format: String,
    pub version: u32,
    pub model: String,
    /// See [`model_hash`].
    pub graph_hash: String,
    /// Number of completed steps.
    pub step: u64,
    pub optimizer: Optimizer,
    /// The norm to which gradients were clipped, if they were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_norm: Option<f64>,
    /// The loss scaling, if there was any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<LossScale>,
    pub data: DataState,
    pub files: Vec<Shard>,
    /// XXH3 (128 bits, hex) of the manifest's text with this field empty. Before version 2, CRC-32 of its fields.
    pub checksum: String,
}

/// A run's position in its data, and the options that selected the data.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataState {
    /// `None` for synthetic batches.
    pub file: Option<String>,
    /// Fingerprint of the file; absent in older checkpoints.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<DataContent>,
    /// Seed of weights, synthetic batches and random bits.
    pub seed: u64,
    /// Seed of the order of samples; `None` for file order.
    pub shuffle: Option<u64>,
    #[serde(flatten)]
    pub position: Position,
}

/// A fingerprint of a data file, or of the files of a folder, independent of their location.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataContent {
    pub bytes: u64,
    /// CRC-32, in hex, of the length, beginning and end of each file, in the order of their names.
    pub crc32: String,
    /// The same over samples at equal distances in between; absent in earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sampled_crc32: Option<String>,
}

impl DataContent {
    /// Returns whether the fingerprints agree in all parts that both have.
    pub(crate) fn is_same(&self, other: &DataContent) -> bool {
        let samples = self.sampled_crc32.iter().zip(&other.sampled_crc32).all(|(a, b)| a == b);
        (self.bytes, &self.crc32) == (other.bytes, &other.crc32) && samples
    }
}

/// The amount of data taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    pub batches: u64,
    pub samples: u64,
}

/// One file of tensors (safetensors), named `parameter/NAME` and `state/SLOT/NAME`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shard {
    pub name: String,
    pub bytes: u64,
    /// XXH3 (128 bits) of the file, in hex.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub xxh3: Option<String>,
    /// CRC-32 of the file, in hex, before version 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crc32: Option<String>,
}

/// The identity of a checkpoint's tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorOf<'a> {
    Parameter { name: &'a str },
    State { parameter: &'a str, slot: &'a str },
}

/// All tensors of a run of a plan: its parameters, the state of each trained one, and the state of the whole step.
pub fn tensors_of(plan: &Plan) -> impl Iterator<Item = TensorOf<'_>> {
    let of_parameter = |(v, name): (_, _)| {
        let slots = match plan.graph.is_trained(v) {
            true => plan.optimizer.slots(plan.graph.ty(v).dtype),
            false => Vec::new(),
        };
        let states = slots.into_iter().map(move |slot| TensorOf::State { parameter: name, slot });
        std::iter::once(TensorOf::Parameter { name }).chain(states)
    };
    let slots = plan.loss_scale.iter().flat_map(LossScale::slots);
    let of_step = slots.map(|slot| TensorOf::State { parameter: ALL_PARAMETERS, slot });
    plan.graph.parameters().flat_map(of_parameter).chain(of_step)
}

impl TensorOf<'_> {
    fn key(&self) -> String {
        match self {
            TensorOf::Parameter { name } => format!("parameter/{name}"),
            TensorOf::State { parameter, slot } => format!("state/{slot}/{parameter}"),
        }
    }

    fn of_key(key: &str) -> Option<TensorOf<'_>> {
        if let Some(name) = key.strip_prefix("parameter/") {
            return Some(TensorOf::Parameter { name });
        }
        let (slot, parameter) = key.strip_prefix("state/")?.split_once('/')?;
        Some(TensorOf::State { parameter, slot })
    }
}

/// Faults of a checkpoint or its folder.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointProblem {
    #[error("{0}")]
    Io(std::io::Error),
    #[error("another run{by} writes its checkpoints here; end it, or give this run its own folder")]
    InUse { by: String },
    #[error(
        "there are checkpoints of an earlier run (the last is of step {step}): add --resume to continue it, or give this run its own folder"
    )]
    NotEmpty { step: u64 },
    #[error("not a checkpoint: its manifest is no {FORMAT} JSON")]
    NotAManifest,
    #[error(
        "the checkpoint has version {found} of the format and this build reads version {VERSION}; a newer altiplano wrote it"
    )]
    Version { found: u64 },
    #[error("the manifest was changed or damaged: its checksum does not hold")]
    ManifestChecksum,
    #[error("'{file}' is missing")]
    Missing { file: String },
    #[error("'{file}' has {found} bytes and should have {expected}")]
    Length { file: String, expected: u64, found: u64 },
    #[error("'{file}' was changed or damaged: its checksum does not hold")]
    Checksum { file: String },
    #[error("'{file}' holds '{tensor}', which is neither a parameter nor state")]
    Tensor { file: String, tensor: String },
    #[error("the checkpoint has no tensor '{tensor}', which the model has")]
    NoTensor { tensor: String },
    #[error(
        "the checkpoint is of another model: it was made of '{found}', and this is '{expected}'{}",
        same_name(found, expected)
    )]
    OtherModel { found: String, expected: String },
    #[error("the checkpoint is of another optimizer: it was made with {found}, and the plan has {expected}")]
    OtherOptimizer { found: String, expected: String },
    #[error("the checkpoint was made with {}, and this run has {}; use the same --clip-norm", clip(*found), clip(*expected))]
    OtherClip { found: Option<f64>, expected: Option<f64> },
    #[error(
        "the checkpoint was made on {found}, and this run has {expected}; give it the same --data, or start a new run from the checkpoint's weights"
    )]
    OtherData { found: String, expected: String },
    #[error("the checkpoint was made with {}, and this run has {}; use the same --loss-scale", scale(*found), scale(*expected))]
    OtherScale { found: Option<LossScale>, expected: Option<LossScale> },
    #[error("there is no checkpoint")]
    None,
    #[error("none of {} is complete; the newest: {newest}", plural(*count, "checkpoint"))]
    NoneWhole { count: u64, newest: Box<Error> },
    #[error("the last checkpoint, of step {step}, was not written: {error}")]
    NotWritten { step: u64, error: Box<Error> },
    #[error("writing ended early, and nothing was kept")]
    Abandoned,
}

impl DataState {
    /// Fails if a resumed run has other data. Files may have moved. A checkpoint without a fingerprint fits any data.
    pub fn expect_same(&self, other: &DataState) -> Result<(), CheckpointProblem> {
        let is_unknown = self.file.is_some() && self.content.is_none();
        let is_same = match (&self.content, &other.content) {
            (Some(content), Some(other)) => content.is_same(other),
            (content, other) => content == other,
        };
        if is_unknown || is_same {
            return Ok(());
        }
        Err(CheckpointProblem::OtherData { found: self.words(), expected: other.words() })
    }

    fn words(&self) -> String {
        match (&self.file, &self.content) {
            (Some(file), Some(DataContent { bytes, crc32, sampled_crc32 })) => {
                let samples = sampled_crc32.iter().map(|crc32| format!(", of samples {crc32}")).collect::<String>();
                format!("'{file}' ({bytes} bytes, CRC-32 {crc32}{samples})")
            }
            (Some(file), None) => format!("'{file}'"),
            (None, _) => "synthetic batches".to_string(),
        }
    }
}

fn clip(norm: Option<f64>) -> String {
    norm.map_or("gradients as they are".to_string(), |most| format!("gradients clipped at norm {most}"))
}

fn scale(scale: Option<LossScale>) -> String {
    scale.map_or("no loss scaling".to_string(), |scale| format!("the loss scaled: {scale}"))
}

fn same_name(found: &str, expected: &str) -> &'static str {
    if found == expected { " with other sizes or ops" } else { "" }
}

impl CheckpointProblem {
    /// Returns whether the checkpoint is damaged, so that an older one is the best available.
    fn is_damage(&self) -> bool {
        match self {
            CheckpointProblem::Io(error) => error.kind() != std::io::ErrorKind::PermissionDenied,
            CheckpointProblem::NotAManifest
            | CheckpointProblem::ManifestChecksum
            | CheckpointProblem::Missing { .. }
            | CheckpointProblem::Length { .. }
            | CheckpointProblem::Checksum { .. } => true,
            _ => false,
        }
    }

    /// Attaches a place to the problem.
    pub fn at(self, place: &Path) -> Error {
        Error::Checkpoint { place: place.to_path_buf(), problem: Box::new(self) }
    }
}

impl Manifest {
    /// The manifest of a run of this plan after `step` steps, without its files.
    pub fn new(plan: &Plan, step: u64, data: DataState) -> Manifest {
        Manifest {
            format: FORMAT.to_string(),
            version: VERSION,
            model: plan.model.clone(),
            graph_hash: model_hash(plan.own().0),
            step,
            optimizer: plan.optimizer,
            clip_norm: plan.clip_norm,
            loss_scale: plan.loss_scale,
            data,
            files: Vec::new(),
            checksum: String::new(),
        }
    }

    /// The manifest as JSON, with its checksum.
    pub fn to_json(&self) -> String {
        let open = Manifest { checksum: String::new(), ..self.clone() };
        // Strings and numbers always have a JSON form.
        let text = serde_json::to_string_pretty(&open).unwrap_or_default() + "\n";
        let seal = wide_hex(xxh3_128(text.as_bytes()));
        match checksum_in(&text) {
            Some(place) => [&text[..place.start], &seal, &text[place.end..]].concat(),
            None => text,
        }
    }

    /// Parses a manifest and verifies its checksum, before anything in it is believed.
    pub fn from_json(text: &str) -> Result<Manifest, CheckpointProblem> {
        let value: serde_json::Value = serde_json::from_str(text).map_err(|_| CheckpointProblem::NotAManifest)?;
        if value.get("format").and_then(|f| f.as_str()) != Some(FORMAT) {
            return Err(CheckpointProblem::NotAManifest);
        }
        let sealed = value.get("checksum").and_then(|c| c.as_str()).is_some_and(|c| c.len() == WIDE);
        // The seal of a text holds for later versions, whose fields are unknown here.
        if sealed && !is_sealed(text) {
            return Err(CheckpointProblem::ManifestChecksum);
        }
        let found = value.get("version").and_then(|v| v.as_u64()).ok_or(CheckpointProblem::NotAManifest)?;
        let newer = CheckpointProblem::Version { found };
        let is_newer = found > u64::from(VERSION);
        if sealed && is_newer {
            return Err(newer);
        }
        let manifest: Manifest = serde_json::from_value(value).map_err(|_| CheckpointProblem::NotAManifest)?;
        match () {
            _ if !sealed && manifest.checksum != manifest.narrow_checksum() => Err(CheckpointProblem::ManifestChecksum),
            _ if is_newer => Err(newer),
            _ => Ok(manifest),
        }
    }

    /// The checksum before version 2.
    fn narrow_checksum(&self) -> String {
        let bare = Manifest { checksum: String::new(), ..self.clone() };
        hex(crc32fast::hash(&serde_json::to_vec(&bare).unwrap_or_default()))
    }

    /// Fails if a plan cannot resume from this checkpoint.
    pub fn expect_fits(&self, plan: &Plan) -> Result<(), CheckpointProblem> {
        if self.graph_hash != model_hash(plan.own().0) {
            return Err(CheckpointProblem::OtherModel { found: self.model.clone(), expected: plan.model.clone() });
        }
        if self.optimizer != plan.optimizer {
            let words = |optimizer: &Optimizer| serde_json::to_string(optimizer).unwrap_or_default();
            let (found, expected) = (words(&self.optimizer), words(&plan.optimizer));
            return Err(CheckpointProblem::OtherOptimizer { found, expected });
        }
        if self.clip_norm != plan.clip_norm {
            return Err(CheckpointProblem::OtherClip { found: self.clip_norm, expected: plan.clip_norm });
        }
        if self.loss_scale != plan.loss_scale {
            return Err(CheckpointProblem::OtherScale { found: self.loss_scale, expected: plan.loss_scale });
        }
        Ok(())
    }
}

fn hex(crc: u32) -> String {
    format!("{crc:08x}")
}

/// Digits of a checksum of 128 bits.
const WIDE: usize = 32;

fn wide_hex(hash: u128) -> String {
    format!("{hash:032x}")
}

/// The place of a checksum in the text of a manifest, without its quotes. Quotes inside strings are escaped, so that no
/// string looks like it.
fn checksum_in(text: &str) -> Option<Range<usize>> {
    const KEY: &str = "\"checksum\": \"";
    let start = text.rfind(KEY)? + KEY.len();
    Some(start..start + text[start..].find('"')?)
}

/// Returns whether a text has the checksum of what it is without.
fn is_sealed(text: &str) -> bool {
    let Some(place) = checksum_in(text) else { return false };
    let open = [&text[..place.start], &text[place.end..]].concat();
    text[place] == wide_hex(xxh3_128(open.as_bytes()))
}

/// A fingerprint of a model that all its plans share: of the graph for one sample, without pins. Constants that scale
/// with the batch are rounded, since scaling to a microbatch and back rounds them too.
pub fn model_hash(graph: &Graph) -> String {
    // If the graph cannot have one sample, its parameters alone determine the fingerprint.
    let mut one = rebatch(graph, 1).unwrap_or_else(|_| {
        let mut leaves = Graph::new(&graph.name);
        for (v, _) in graph.parameters() {
            leaves.append(graph.node(v).clone());
        }
        leaves
    });
    one.pins.clear();
    for node in &mut one.nodes {
        if let Op::Constant(literal) = &mut node.op
            && literal.batch_power != 0
            && let Values::Splat(value) = &mut literal.values
        {
            *value = Real(f64::from(value.0 as f32));
        }
    }
    graph_hash(&one)
}
