//! A model's file: its format, recognised by content, and its graph.

use super::{Aside, ImportOptions, Warning};
use crate::arguments::Argument;
use crate::error::Error;
use crate::training::onnx_weights::beside;
use altiplano_import::huggingface::{self, ConfigOptions};
use altiplano_import::{OpenSize, onnx, stablehlo, torch_export};
use altiplano_ir::dtype::DType;
use altiplano_ir::expand::without_composites;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::json;
use altiplano_ir::op::Op;
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt;
use std::path::{Path, PathBuf};

/// The name of a config in a published model's folder.
const CONFIG: &str = "config.json";

/// The file that defines a model: the config of a folder, or the file itself.
pub(super) fn config_in(file: &Path) -> PathBuf {
    if file.is_dir() { file.join(CONFIG) } else { file.to_path_buf() }
}

/// The model's name: its file's name without the extension, or its folder's name.
pub(super) fn name_of(file: &Path) -> String {
    let named = if file.is_dir() { file.file_name() } else { file.file_stem() };
    named.map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// The format of a file, by its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    StableHlo,
    GraphJson,
    PlanJson,
    ClusterToml,
    Onnx,
    TorchExport,
    MlirBytecode,
    JaxExport,
    HuggingFaceConfig,
    Unknown,
}

impl Format {
    /// Recognises the format by content; the file's name does not matter.
    pub fn of(bytes: &[u8]) -> Format {
        if bytes.starts_with(b"PK\x03\x04") {
            return Format::TorchExport;
        }
        if bytes.starts_with(b"ML\xefR") {
            return Format::MlirBytecode;
        }
        let Ok(text) = std::str::from_utf8(bytes) else {
            // A serialized `jax.export` holds the module as bytecode behind a table of offsets.
            if bytes.windows(14).any(|part| part == b"ML\xefR\rStableHLO") {
                return Format::JaxExport;
            }
            // An ONNX file is a protocol buffer whose first field is the version of its IR.
            return if bytes.starts_with(&[0x08]) { Format::Onnx } else { Format::Unknown };
        };
        match text.trim_start().chars().next() {
            Some('{') => json_format(text),
            Some('\u{8}') => Format::Onnx,
            _ if looks_like_toml(text) => Format::ClusterToml,
            _ if ["module", "func", "#loc", "//", "\"builtin.module\"", "\"func"]
                .iter()
                .any(|start| text.trim_start().starts_with(start)) =>
            {
                Format::StableHlo
            }
            _ => Format::Unknown,
        }
    }
}

/// Recognises a JSON document by its `format`, or by its beginning if it is truncated. A document with neither a format
/// nor nodes counts as a config, so that the error names what it lacks.
fn json_format(text: &str) -> Format {
    match serde_json::from_str::<Header>(&huggingface::finite_numbers(text)) {
        Ok(header) if header.format.as_deref() == Some(altiplano_ir::plan::FORMAT) => Format::PlanJson,
        Ok(header) if header.format.is_none() && !header.nodes => Format::HuggingFaceConfig,
        Err(_) if text.chars().take(200).collect::<String>().contains("altiplano.plan") => Format::PlanJson,
        _ => Format::GraphJson,
    }
}

/// The header of a JSON document; duplicate keys are allowed.
#[derive(Default)]
struct Header {
    format: Option<String>,
    nodes: bool,
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Keys;
        impl<'de> Visitor<'de> for Keys {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut header = Header::default();
                while let Some(key) = map.next_key::<String>()? {
                    match key.as_str() {
                        "format" => header.format = map.next_value()?,
                        _ => {
                            map.next_value::<IgnoredAny>()?;
                            header.nodes |= key == "nodes";
                        }
                    }
                }
                Ok(header)
            }
        }
        from.deserialize_map(Keys)
    }
}

/// A cluster file's first statement is a name or a table header.
fn looks_like_toml(text: &str) -> bool {
    let lines = text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#'));
    let first = lines.clone().next().unwrap_or("");
    let table = |l: &str| ["[[group]]", "[device", "[between_groups]"].iter().any(|t| l.starts_with(t));
    table(first) || first.split('=').next().is_some_and(|key| key.trim() == "name" && first.contains('='))
}

/// Reads a whole file, or the config of a folder. The caller checks that it is text.
pub fn read_bytes(file: &Path) -> Result<Vec<u8>, Error> {
    if file.is_dir() && !config_in(file).exists() {
        let error = std::io::Error::new(std::io::ErrorKind::NotFound, no_config(file));
        return Err(Error::Read { file: file.to_path_buf(), error });
    }
    let mut bytes = altiplano_runtime::files::read(&config_in(file))
        .map_err(|error| Error::Read { file: file.to_path_buf(), error })?;
    // Some editors put a byte-order mark before text.
    if bytes.starts_with(b"\xef\xbb\xbf") {
        bytes.drain(..3);
    }
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Err(Error::Empty { file: file.to_path_buf() });
    }
    Ok(bytes)
}

/// The reason why a folder holds no model.
fn no_config(folder: &Path) -> &'static str {
    match ["adapter_config.json", "model_index.json"].map(|name| folder.join(name).exists()) {
        [true, _] => "a folder with only an adapter and no config.json; give the folder of the model that it adapts",
        [_, true] => "a folder of several models; give the folder of one of them, with its config.json",
        _ => "a folder without a config.json; a Hugging Face model's folder has one",
    }
}

/// The content of a model file.
pub(super) struct Read {
    pub graph: Graph,
    pub arguments: Vec<Argument>,
    pub results: Vec<Option<String>>,
    pub aside: Aside,
}

/// A script that prints StableHLO bytecode as text. JAX's own serialization is versioned; plain bytecode is not.
const BYTECODE_AS_TEXT: &str = r#"import sys
from jax._src.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo
context, data = mlir.make_ir_context(), open(sys.argv[1], "rb").read()
if b"StableHLO_v" in data[:64]:
    data = stablehlo.deserialize_portable_artifact(context, data)
module = ir.Module.parse(data, context) if isinstance(data, (bytes, str)) else data
print(module.operation.get_asm(enable_debug_info=True))"#;

/// A script that prints a serialized `jax.export` as text.
const EXPORT_AS_TEXT: &str = r#"import sys, jax.export
print(jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read())).mlir_module())"#;

/// The batch size with which graphs are built; a batch of one could not be distinguished from other sizes of one.
pub(super) const SEVERAL: u64 = 2;

/// An option that was given and that only other formats have, with the problem.
fn option_of_other_formats(format: Format, options: &ImportOptions) -> Option<(&'static str, &'static str)> {
    let is_config = format == Format::HuggingFaceConfig;
    let of_configs = [("--seq", options.sequence.is_some()), ("--capacity-factor", options.capacity_factor.is_some())];
    if let Some((option, _)) = of_configs.into_iter().find(|(_, given)| *given && !is_config) {
        return Some((option, "applies only to Hugging Face configs; other models keep their traced sizes"));
    }
    let closed = !options.sizes.is_empty() && (is_config || format == Format::GraphJson);
    closed.then_some(("--size", "applies only to files that leave sizes open, and this one leaves none open"))
}

pub(super) fn graph_of(file: &Path, bytes: &[u8], options: &ImportOptions) -> Result<Read, Error> {
    let file = config_in(file);
    let text = std::str::from_utf8(bytes).unwrap_or_default();
    let format = Format::of(bytes);
    let graph_json = || json::read(text).map_err(|error| Error::Json { file: file.clone(), error: Box::new(error) });
    if let Some((option, problem)) = option_of_other_formats(format, options) {
        // A config that is cut off looks like a graph, and its end is the problem.
        if format == Format::GraphJson {
            graph_json()?;
        }
        return Err(Error::Option { option, problem });
    }
    match format {
        Format::StableHlo => {
            let imported = stablehlo::import_with(text, &options.sizes)
                .map_err(|error| Error::StableHlo { file, error: Box::new(error) })?;
            let arguments = imported.arguments.into_iter();
            let arguments = arguments.map(|a| Argument { name: a.name, ty: a.ty, value: a.value }).collect();
            let (graph, results) = (imported.graph, imported.results);
            let mut aside = left_open(&imported.open_sizes, &options.sizes);
            aside.notes.extend(imported.notes.into_iter().map(Warning::StableHlo));
            Ok(Read { graph, arguments, results, aside })
        }
        Format::GraphJson => {
            let graph = graph_json()?;
            // Expanded composites are analysed like everything else, and recognised again. With one sample, the file's
            // marks are the only information on its batch, and a composite keeps them.
            let graph = if graph.batch == 1 { graph } else { without_composites(&graph).into_owned() };
            let arguments = leaves(&graph);
            let results = vec![None; graph.outputs.len()];
            Ok(Read { graph, arguments, results, aside: Aside::default() })
        }
        Format::HuggingFaceConfig => {
            let how = ConfigOptions {
                batch: SEVERAL,
                sequence: options.sequence,
                capacity_factor: options.capacity_factor,
                dtype: options.precision.map(DType::cotangent),
                without_loss: options.attached().is_some(),
            };
            let imported =
                huggingface::import(text, &how).map_err(|error| Error::Config { file, error: Box::new(error) })?;
            let notes = imported.notes.into_iter().map(Warning::Config).collect();
            let graph = imported.graph;
            let (arguments, results) = (leaves(&graph), vec![None; graph.outputs.len()]);
            let (batch, routing) = (Some(options.batch.unwrap_or(1)), imported.routing);
            let aside = Aside { notes, batch, routing, ..Aside::default() };
            Ok(Read { graph, arguments, results, aside })
        }
        Format::PlanJson => Err(Error::OtherArtefact {
            file,
            found: "a plan",
            advice: "use it with inspect, show, run or verify, or give the model that it was made from",
        }),
        Format::ClusterToml => {
            Err(Error::OtherArtefact { file, found: "a cluster", advice: "give it with --cluster, and a model here" })
        }
        Format::Onnx => {
            let how = onnx::Options { sizes: options.sizes.clone() };
            let imported = onnx::import(bytes, &how, &|place, most| beside(&file, place, most));
            let imported = imported.map_err(|error| Error::Onnx { file, error: Box::new(error) })?;
            let arguments = imported.arguments.into_iter();
            let arguments = arguments.map(|a| Argument { name: Some(a.name), ty: a.ty, value: a.value }).collect();
            let results = imported.results.into_iter().map(Some).collect();
            let mut aside = Aside { buffers: imported.buffers, ..open_sizes(&imported.sizes, &options.sizes) };
            aside.notes.extend(imported.notes.into_iter().map(Warning::Onnx));
            Ok(Read { graph: imported.graph, arguments, results, aside })
        }
        Format::TorchExport => torch_program(file, bytes, options),
        Format::MlirBytecode => Err(Error::Binary { file, found: "MLIR bytecode", script: BYTECODE_AS_TEXT }),
        Format::JaxExport => Err(Error::Binary { file, found: "a serialized jax.export", script: EXPORT_AS_TEXT }),
        Format::Unknown => Err(Error::UnknownFormat { file }),
    }
}

/// Reads a `torch.export` program. Its batch is the open size that the first dimensions of its inputs share.
fn torch_program(file: PathBuf, bytes: &[u8], options: &ImportOptions) -> Result<Read, Error> {
    let how = torch_export::Options { sizes: options.sizes.clone() };
    let imported =
        torch_export::import(bytes, &how).map_err(|error| Error::TorchExport { file, error: Box::new(error) })?;
    let newer = imported.newer.map(|found| Warning::Newer { found, known: torch_export::NEWEST });
    let decomposed = imported.decomposed.then_some(Warning::Decomposed);
    let mut aside = left_open(&imported.open_sizes, &options.sizes);
    aside.notes.extend(newer.into_iter().chain(decomposed));
    aside.buffers = imported.buffers;
    let arguments = leaves(&imported.graph);
    Ok(Read { graph: imported.graph, arguments, results: imported.results, aside })
}

/// Records the chosen values of a file's open sizes, and those for another batch, which is the size that the first
/// dimensions of inputs share.
fn left_open(sizes: &[OpenSize], said: &[(String, u64)]) -> Aside {
    let guessed: Vec<String> = sizes.iter().filter(|s| s.chosen).map(|s| format!("{s}={}", s.value)).collect();
    let batch = sizes.iter().find(|size| size.dims.iter().any(|(_, dim)| *dim == 0));
    let other = batch.and_then(|size| {
        let may_be = |&value: &u64| {
            let signed = value as i64;
            signed > 1 && size.least.is_none_or(|least| signed >= least) && size.most.is_none_or(|m| signed <= m)
        };
        let n = size.value;
        let other = [n.saturating_mul(2), n / 2, n + 1, n.saturating_sub(1)].into_iter().find(may_be)?;
        Some(said.iter().cloned().chain([(size.symbol.clone(), other)]).collect())
    });
    let notes = (!guessed.is_empty()).then_some(Warning::OpenSizes(guessed)).into_iter().collect();
    Aside { notes, other_sizes: other, ..Aside::default() }
}

/// Records the chosen values of a file's open sizes, and those for a batch twice as large.
fn open_sizes(sizes: &[onnx::Size], said: &[(String, u64)]) -> Aside {
    let guessed = sizes.iter().filter(|size| !size.said).map(|size| format!("{}={}", size.name, size.value));
    let guessed: Vec<String> = guessed.collect();
    let batch = sizes.iter().filter(|size| size.is_batch);
    let twice: Vec<(String, u64)> = batch.map(|size| (size.name.clone(), size.value.saturating_mul(2))).collect();
    let others = said.iter().filter(|(name, _)| !twice.iter().any(|(batch, _)| batch == name)).cloned();
    let other_sizes = (!twice.is_empty()).then(|| others.chain(twice.iter().cloned()).collect());
    let notes = (!guessed.is_empty()).then_some(Warning::OpenSizes(guessed)).into_iter().collect();
    Aside { notes, other_sizes, ..Aside::default() }
}

/// The leaves of a graph in order, which are its arguments.
pub(super) fn leaves(graph: &Graph) -> Vec<Argument> {
    let leaf = |v: ValueId| match &graph.node(v).op {
        Op::Parameter(altiplano_ir::op::Parameter { name, ty, .. })
        | Op::Input(altiplano_ir::op::Input { name, ty }) => {
            Some(Argument { name: Some(name.clone()), ty: ty.clone(), value: v })
        }
        _ => None,
    };
    graph.values().filter_map(leaf).collect()
}
