//! Restores the model as it was before export. It undoes merging, folding and omission by exporters as far as possible.
//!
//! The graph and the weights are read from the same prepared file, so that they have the same names.

use super::files::{Files, fetch};
use super::listed::{Listed, Missing};
use super::merged::tell_apart;
use super::named::{Named, name_by_module};
use super::proto::{Graph, Model, Node, Tensor};
use super::repeated::{fill_indices, hold_one_sample};
use super::report::{Note, OnnxError};
use super::tensor::type_of;
use super::wire::charge;
use crate::budget::Budget;
use prost::Message;
use std::collections::{BTreeMap, BTreeSet};

pub(super) struct Prepared {
    pub model: Model,
    pub listed: Listed,
    /// Floats that are not trained, although the exporter does not list them as buffers.
    pub tables: BTreeSet<String>,
    /// Tensors held for one sample that the model repeats, with the number of samples.
    pub repeated: BTreeMap<String, u64>,
    pub notes: Vec<Note>,
}

pub(super) fn prepare(bytes: &[u8], files: Files) -> Result<Prepared, OnnxError> {
    charge(bytes, &mut Budget::of(bytes.len()))?;
    let mut model = Model::decode(bytes)?;
    let listed = Listed::of(&model);
    let graph = model.graph.as_mut().ok_or(OnnxError::NoGraph)?;
    hold_constants(graph);
    fetch(graph, files);
    let mut missing = Missing::of(graph, &listed);
    let mut notes = tell_apart(graph, &listed, &mut missing);
    let repeated = hold_one_sample(graph, &listed, &mut notes);
    fill_indices(graph, &mut notes);
    let Named { names, tables } = name_by_module(graph, &listed, &mut missing);
    let renamed = |(name, samples)| (names.get(&name).cloned().unwrap_or(name), samples);
    let repeated = repeated.into_iter().map(renamed).collect();
    Ok(Prepared { model, listed, tables, repeated, notes })
}

/// Ops whose second operand is a weight.
const WEIGHTED: [&str; 5] = ["Conv", "ConvTranspose", "MatMul", "Gemm", "BatchNormalization"];

/// Converts floats in nodes to initializers, for files in which such weights are in nodes and no float is an
/// initializer. Some exporters (paddle2onnx) write all weights like this. If there are initializers, constants in nodes
/// are real constants.
fn hold_constants(graph: &mut Graph) {
    let is_float = |tensor: &Tensor| type_of(tensor).is_ok_and(|ty| ty.dtype.is_float() && ty.elements() > 1);
    let weights: BTreeSet<&str> = graph
        .node
        .iter()
        .filter(|n| WEIGHTED.contains(&n.op_type.as_str()))
        .filter_map(|n| Some(n.input.get(1)?.as_str()))
        .collect();
    let holds_weight = |n: &Node| n.op_type == "Constant" && n.output.iter().any(|o| weights.contains(o.as_str()));
    if graph.initializer.iter().any(is_float) || !graph.node.iter().any(holds_weight) {
        return;
    }
    let mut held: BTreeSet<String> = graph.initializer.iter().map(|tensor| tensor.name.clone()).collect();
    graph.node.retain_mut(|node| {
        let ("Constant", [output]) = (node.op_type.as_str(), node.output.as_slice()) else { return true };
        let value = node.attribute.iter_mut().find(|a| a.name == "value").and_then(|a| a.t.as_mut());
        let Some(tensor) = value.filter(|tensor| is_float(tensor)) else { return true };
        if !held.insert(output.clone()) {
            return true;
        }
        graph.initializer.push(Tensor { name: output.clone(), ..std::mem::take(tensor) });
        false
    });
}
