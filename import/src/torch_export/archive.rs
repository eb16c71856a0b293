//! Reads entries of the zip archive. Writes nothing to disk, and limits the size of each entry by its use.

use super::schema::{Payload, Payloads, Program, Size, TensorMeta};
use crate::budget::{Budget, OutOfProportion};
use altiplano_ir::json;
use altiplano_ir::types::TensorType;
use serde::de::DeserializeOwned;
use std::io::{Cursor, Read};
use zip::ZipArchive;
use zip::read::{ArchiveOffset, Config};

/// Bytes of memory for a byte of JSON: a short entry of an object takes a node of a tree.
const OF_JSON: u64 = 32;

/// An error in an archive.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ArchiveError {
    #[error("the zip archive cannot be read: {0}")]
    Zip(Box<str>),
    #[error("the zip archive has no end: the file is cut off")]
    CutOff,
    #[error("entry '{0}' has a name that leads out of the archive")]
    Name(Box<str>),
    #[error("{0}")]
    NoProgram(&'static str),
    #[error("it holds several programs ({0}); export one")]
    Several(Box<str>),
    #[error("entry '{entry}': {problem}")]
    TooLarge { entry: Box<str>, problem: OutOfProportion },
    #[error("entry '{entry}' cannot be read: {problem}")]
    Entry { entry: Box<str>, problem: Box<str> },
    #[error("{entry}:{line}:{column}: {problem}")]
    Json { entry: Box<str>, line: usize, column: usize, problem: Box<str> },
    #[error("'{name}' of {entry}: {problem}")]
    Payload { entry: Box<str>, name: Box<str>, problem: &'static str },
    #[error(
        "'{name}' has no values, since the model was exported on the meta device; plan with this file, and give weights with --weights FILE.safetensors or export the model on a device that has memory"
    )]
    NoValues { name: Box<str> },
}

/// An archive of one exported program.
pub struct Archive<'b> {
    zip: ZipArchive<Cursor<&'b [u8]>>,
    names: Vec<String>,
    /// The folder that contains all entries, with a trailing slash, or empty.
    root: String,
    /// The entry with the program.
    program: String,
    budget: Budget,
}

/// The values of a tensor in row-major order, as bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    pub name: String,
    pub ty: TensorType,
    pub bytes: Vec<u8>,
}

impl<'b> Archive<'b> {
    pub fn open(bytes: &'b [u8]) -> Result<Archive<'b>, ArchiveError> {
        // Example inputs are archives within the archive, so the start of this one must not be searched for.
        if !has_end(bytes) {
            return Err(ArchiveError::CutOff);
        }
        let config = Config { archive_offset: ArchiveOffset::Known(0) };
        let zip =
            ZipArchive::with_config(config, Cursor::new(bytes)).map_err(|e| ArchiveError::Zip(e.to_string().into()))?;
        let names: Result<Vec<String>, _> = zip.file_names().map(|name| name.map(|n| n.into_owned())).collect();
        let names = names.map_err(|e| ArchiveError::Zip(e.to_string().into()))?;
        let mut programs = Vec::new();
        for name in names.iter().map(String::as_str) {
            let inside = !name.starts_with(['/', '\\']) && !name.contains(':');
            if !inside || name.split(['/', '\\']).any(|part| part == "..") {
                return Err(ArchiveError::Name(name.into()));
            }
            let (folder, file) = name.rsplit_once('/').unwrap_or(("", name));
            let program = folder == "models" || folder.ends_with("/models");
            if (program && file.ends_with(".json")) || file == "serialized_exported_program.json" {
                programs.push(name.to_string());
            }
        }
        programs.sort();
        let program = match programs.as_slice() {
            [only] => only.clone(),
            [] if names.iter().any(|n| n.ends_with("/constants.pkl")) => {
                return Err(ArchiveError::NoProgram(
                    "this is a TorchScript archive, which has no graph of ATen ops; export the model with torch.export",
                ));
            }
            [] if names.iter().any(|n| n.ends_with("data.pkl")) => {
                return Err(ArchiveError::NoProgram(
                    "this is a checkpoint of torch.save, which has weights but no graph; export the model with torch.export",
                ));
            }
            [] => {
                return Err(ArchiveError::NoProgram(
                    "the zip archive holds no exported program (models/*.json); write it with torch.export.save",
                ));
            }
            several => return Err(ArchiveError::Several(several.join(", ").into())),
        };
        let folder = program.rsplit_once('/').map_or("", |(folder, _)| folder);
        let root = folder.strip_suffix("models").unwrap_or(folder);
        let root = if root.is_empty() || root.ends_with('/') { root.to_string() } else { format!("{root}/") };
        Ok(Archive { zip, names, root, program, budget: Budget::of(bytes.len()) })
    }

    pub fn program(&mut self) -> Result<Program, ArchiveError> {
        let entry = self.program.clone();
        self.json(&entry)
    }

    fn json<T: DeserializeOwned>(&mut self, entry: &str) -> Result<T, ArchiveError> {
        let bytes = self.read(entry, OF_JSON)?;
        serde_json::from_slice(&bytes).map_err(|error| {
            let (line, column) = json::place(&error);
            ArchiveError::Json { entry: entry.into(), line, column, problem: json::message(&error).into() }
        })
    }

    /// The contents of an entry, each byte of which takes `times` bytes of memory.
    fn read(&mut self, entry: &str, times: u64) -> Result<Vec<u8>, ArchiveError> {
        let failed = |problem: String| ArchiveError::Entry { entry: entry.into(), problem: problem.into() };
        let file = self.zip.by_name(entry).map_err(|e| failed(e.to_string()))?;
        let declared = file.size();
        let charged = self.budget.charge(declared.saturating_mul(times));
        charged.map_err(|problem| ArchiveError::TooLarge { entry: entry.into(), problem })?;
        // The declared size may be wrong. Reading one more byte detects a larger entry.
        let mut bytes = Vec::new();
        file.take(declared + 1).read_to_end(&mut bytes).map_err(|e| failed(e.to_string()))?;
        if bytes.len() as u64 != declared {
            return Err(failed(format!("it is not the {declared} bytes that it should be")));
        }
        Ok(bytes)
    }

    /// The first bytes of an entry, which take `memory` bytes with their copies; `None` if it is shorter.
    fn beginning(&mut self, entry: &str, bytes: u64, memory: u64) -> Result<Option<Vec<u8>>, ArchiveError> {
        let failed = |problem: String| ArchiveError::Entry { entry: entry.into(), problem: problem.into() };
        let file = self.zip.by_name(entry).map_err(|e| failed(e.to_string()))?;
        if file.size() < bytes {
            return Ok(None);
        }
        let charged = self.budget.charge(memory);
        charged.map_err(|problem| ArchiveError::TooLarge { entry: entry.into(), problem })?;
        let mut all = Vec::new();
        file.take(bytes).read_to_end(&mut all).map_err(|e| failed(e.to_string()))?;
        Ok((all.len() as u64 == bytes).then_some(all))
    }

    /// The metadata of the tensors in a folder of `data/`; empty if the archive has none.
    pub(crate) fn payloads(&mut self, kind: &str) -> Result<Payloads, ArchiveError> {
        let folder = format!("{}data/{kind}/", self.root);
        let is_config = |name: &&String| name.starts_with(&folder) && name.ends_with("_config.json");
        match self.names.iter().find(is_config).cloned() {
            Some(entry) => self.json(&entry),
            None => Ok(Payloads::default()),
        }
    }

    /// The values of a tensor. `None` if the archive lacks them, stores them only as a pickle (which is code),
    /// or the tensor is on the meta device.
    pub fn stored(&mut self, kind: &str, name: &str, payload: &Payload) -> Result<Option<Stored>, ArchiveError> {
        let entry = format!("{}data/{kind}/{}", self.root, payload.path_name);
        let problem = |problem| ArchiveError::Payload { entry: entry.as_str().into(), name: name.into(), problem };
        let Some(meta) = payload.tensor_meta.as_ref().filter(|meta| !payload.use_pickle && !meta.is_meta()) else {
            return Ok(None);
        };
        if !self.names.contains(&entry) {
            return Ok(None);
        }
        let ty = plain_type(meta).ok_or_else(|| problem("its type is none that tensors here can have"))?;
        let numbers = |sizes: &[Size]| -> Option<Vec<u64>> { sizes.iter().map(plain).collect() };
        // Strides and offset count elements. A complex element is two numbers here.
        let width = if meta.is_complex() { 2 } else { 1 };
        let counted = |n: u64| n.checked_mul(width).ok_or_else(|| problem("its strides go beyond any file"));
        let strides = match meta.strides.len() == meta.sizes.len() {
            true => {
                let own = numbers(&meta.strides).ok_or_else(|| problem("its strides are no numbers"))?;
                let mut strides = own.into_iter().map(counted).collect::<Result<Vec<_>, _>>()?;
                strides.extend(meta.is_complex().then_some(1));
                strides
            }
            false => altiplano_ir::types::strides(&ty.shape),
        };
        let offset = meta.storage_offset.as_ref().map_or(Some(0), plain);
        let offset = counted(offset.ok_or_else(|| problem("its offset is no number"))?)?;
        let reach = ty
            .shape
            .iter()
            .zip(&strides)
            .try_fold(offset, |at, (&n, &stride)| at.checked_add(n.saturating_sub(1).checked_mul(stride)?));
        let width = ty.dtype.bytes();
        let needed = reach.and_then(|last| last.checked_add(1)?.checked_mul(width));
        let needed = needed.ok_or_else(|| problem("its strides go beyond any file"))?;
        let needed = if ty.elements() == 0 { 0 } else { needed };
        // Repeated elements take memory here and not in the file, and several tensors may have one entry.
        let Some(all) = self.beginning(&entry, needed, needed.saturating_add(ty.bytes()))? else {
            return Err(problem("it has fewer bytes than its type needs"));
        };
        let plain_order = strides == altiplano_ir::types::strides(&ty.shape) || ty.elements() == 0;
        let bytes = match plain_order {
            true => all[all.len() - ty.bytes() as usize..].to_vec(),
            false => strided(&all, &ty, &strides, offset),
        };
        Ok(Some(Stored { name: name.to_string(), ty, bytes }))
    }
}

/// True if the bytes end with the end record of an archive: 22 bytes, and a comment of at most 64 KiB.
fn has_end(bytes: &[u8]) -> bool {
    let end = &bytes[bytes.len().saturating_sub(22 + (1 << 16))..];
    end.windows(4).any(|mark| mark == b"PK\x05\x06")
}

/// Copies a tensor with any strides to row-major order.
fn strided(all: &[u8], ty: &TensorType, strides: &[u64], offset: u64) -> Vec<u8> {
    let width = ty.dtype.bytes() as usize;
    let mut bytes = Vec::with_capacity(ty.bytes() as usize);
    altiplano_ir::tensor::for_each_index(&ty.shape, |index| {
        let at = offset + index.iter().zip(strides).map(|(i, s)| i * s).sum::<u64>();
        bytes.extend_from_slice(&all[at as usize * width..][..width]);
    });
    bytes
}

fn plain(size: &Size) -> Option<u64> {
    match size {
        Size::Int(n) => u64::try_from(*n).ok(),
        Size::Expr(_) => None,
    }
}

fn plain_type(meta: &TensorMeta) -> Option<TensorType> {
    let shape: Option<Vec<u64>> = meta.sizes.iter().map(plain).collect();
    meta.with_shape(shape?)
}

impl Stored {
    /// The values as used by the reference semantics.
    pub fn values(&self) -> Vec<f64> {
        let dtype = self.ty.dtype;
        let one = |bytes: &[u8]| {
            let bits = bytes.iter().rev().fold(0u64, |all, &byte| all << 8 | u64::from(byte));
            if dtype == altiplano_ir::dtype::DType::Bool {
                f64::from(u8::from(bits != 0))
            } else {
                dtype.from_bits(bits)
            }
        };
        self.bytes.chunks_exact(dtype.bytes() as usize).map(one).collect()
    }
}
