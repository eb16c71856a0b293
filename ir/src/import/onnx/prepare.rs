//! A file as the model was before it was exported: what exporters merge, fold and leave out, undone as far as it can be.
//!
//! The graph and the weights are read from the same prepared file, so that they have the same names.

use super::files::{Files, fetch};
use super::listed::{Listed, Missing};
use super::merged::tell_apart;
use super::named::{Named, name_by_module};
use super::proto::Model;
use super::repeated::{count_positions, hold_one_sample};
use super::report::{Note, OnnxError};
use prost::Message;
use std::collections::{BTreeMap, BTreeSet};

pub(super) struct Prepared {
    pub model: Model,
    pub listed: Listed,
    /// Floats that are not trained, though the exporter does not list them as buffers.
    pub tables: BTreeSet<String>,
    /// Tensors of one sample that the model has for each of so many.
    pub repeated: BTreeMap<String, u64>,
    pub notes: Vec<Note>,
}

pub(super) fn prepare(bytes: &[u8], files: Files) -> Result<Prepared, OnnxError> {
    let mut model = Model::decode(bytes)?;
    let listed = Listed::of(&model);
    let graph = model.graph.as_mut().ok_or(OnnxError::NoGraph)?;
    fetch(graph, files);
    let mut missing = Missing::of(graph, &listed);
    let mut notes = tell_apart(graph, &listed, &mut missing);
    count_positions(graph, &mut notes);
    let repeated = hold_one_sample(graph, &listed, &mut notes);
    let Named { names, tables } = name_by_module(graph, &listed, &mut missing);
    let renamed = |(name, samples)| (names.get(&name).cloned().unwrap_or(name), samples);
    let repeated = repeated.into_iter().map(renamed).collect();
    Ok(Prepared { model, listed, tables, repeated, notes })
}
