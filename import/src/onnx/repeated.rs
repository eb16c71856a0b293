//! Tensors that an exporter made for a fixed batch: one sample's, repeated.
//!
//! A file whose batch is a number may hold what the model expands to the batch (a class token, a mask, indices) as the expanded
//! tensor. One slice is held instead, and expanded, where the slices along the first dimension are equal.
//!
//! Three things are taken for granted of integers whose data is gone, and said. Such a tensor is the same for every sample, since
//! a model's own data seldom tells samples apart. One that looks up as many rows as a table of positions has counts them. Two that are
//! only compared for equality name documents, and a sample is one.

use super::files::is_small;
use super::leaves::MOST_CONSTANT_ELEMENTS;
use super::listed::{Listed, uses_of};
use super::named::takes_weight;
use super::proto::{Graph, Tensor};
use super::report::Note;
use super::tensor::{dtype_of, elements_of, has_data};
use std::collections::{BTreeMap, BTreeSet};

/// Cuts what is repeated for each sample to one slice. Gives the names of these tensors, each with the number of samples.
pub(super) fn hold_one_sample(graph: &mut Graph, listed: &Listed, notes: &mut Vec<Note>) -> BTreeMap<String, u64> {
    let Some(batch) = fixed_batch(graph) else { return BTreeMap::new() };
    let parameters: BTreeSet<&str> = listed.parameters.iter().map(String::as_str).collect();
    let uses = uses_of(graph);
    let is_weight = |name: &str| match uses.get(name) {
        Some(places) => places.iter().any(|place| takes_weight(&graph.node[place.node], place.operand)),
        None => true,
    };
    let weights: BTreeSet<String> =
        graph.initializer.iter().filter(|t| is_weight(&t.name)).map(|t| t.name.clone()).collect();
    let mut cut = BTreeMap::new();
    let mut guessed = Vec::new();
    for tensor in &mut graph.initializer {
        let one_each = tensor.dims.len() > 1 && tensor.dims[0] == batch && !parameters.contains(tensor.name.as_str());
        let one_each = one_each && !weights.contains(&tensor.name);
        let Some(dtype) = dtype_of(tensor.data_type).ok().filter(|_| one_each) else { continue };
        // A parameter with as many rows as there are samples may start with equal ones: without a list none is known not to be.
        if dtype.is_float() && listed.is_empty() {
            continue;
        }
        if let Some(data) = is_small(tensor).then(|| elements_of(tensor).ok()).flatten().map(|t| t.data) {
            let width = data.len() / batch as usize;
            let same = |slice: &[f64]| slice.iter().zip(&data).all(|(a, b)| a.to_bits() == b.to_bits());
            // Elements narrower than a byte may not split at a byte boundary.
            if width == 0 || dtype.width() < 8 || !data.chunks_exact(width).all(same) {
                continue;
            }
            cut_data(tensor, batch as usize);
        } else if dtype.is_float() || has_data(tensor) || tensor.dims.len() < 3 {
            continue;
        } else {
            guessed.push(tensor.name.clone());
            tensor.data_location = 0;
            tensor.external_data.clear();
        }
        tensor.dims[0] = 1;
        cut.insert(tensor.name.clone(), batch as u64);
    }
    if !guessed.is_empty() {
        notes.push(Note::SameForEverySample { names: guessed });
    }
    cut
}

/// Fills integers that are gone, where their use says what they are. Positions count from 0: they look up each row of a table once,
/// or are only ordered against others of their length, as those of queries and keys are in a causal mask. Names of documents are all
/// the same: they are only compared for equality with each other.
pub(super) fn fill_indices(graph: &mut Graph, notes: &mut Vec<Note>) {
    const INT64: i32 = 7;
    let rows: BTreeMap<&str, i64> =
        graph.initializer.iter().filter_map(|t| Some((t.name.as_str(), *t.dims.first()?))).collect();
    let absent = |t: &Tensor| t.data_type == INT64 && !has_data(t);
    let length = |t: &Tensor| t.dims.iter().try_fold(1i64, |n, &d| n.checked_mul(d));
    let uses = uses_of(graph);
    let (mut counted, mut documents) = (Vec::new(), Vec::new());
    for (at, tensor) in graph.initializer.iter().enumerate().filter(|(_, t)| absent(t)) {
        let places = uses.get(&tensor.name).map(Vec::as_slice).unwrap_or_default();
        let looks_up_all = places.iter().all(|place| {
            let node = &graph.node[place.node];
            let axis = node.attribute.iter().find(|a| a.name == "axis").and_then(|a| a.i).unwrap_or(0);
            let table = node.input.first().and_then(|name| rows.get(name.as_str()));
            node.op_type == "Gather" && place.operand == 1 && axis == 0 && table.copied() == length(tensor)
        });
        let compared_by = |ops: &[&str]| {
            places.iter().all(|place| {
                let node = &graph.node[place.node];
                let other = node.input.get(1 - place.operand.min(1));
                let same = |t: &&Tensor| Some(&t.name) == other && absent(t) && length(t) == length(tensor);
                ops.contains(&node.op_type.as_str()) && graph.initializer.iter().any(|t| same(&t))
            })
        };
        let small = length(tensor).is_some_and(|n| n > 1 && n <= MOST_CONSTANT_ELEMENTS as i64);
        let one_dim = tensor.dims.iter().filter(|&&d| d != 1).count() == 1;
        if places.is_empty() || !small || !one_dim {
            continue;
        }
        if looks_up_all || compared_by(&["Less", "LessOrEqual", "Greater", "GreaterOrEqual"]) {
            counted.push(at);
        } else if compared_by(&["Equal"]) {
            documents.push(at);
        }
    }
    let mut fill = |all: Vec<usize>, value: fn(i64) -> i64| -> Vec<String> {
        all.into_iter()
            .map(|at| {
                let tensor = &mut graph.initializer[at];
                tensor.int64_data = (0..length(tensor).unwrap_or(0)).map(value).collect();
                tensor.data_location = 0;
                tensor.external_data.clear();
                tensor.name.clone()
            })
            .collect()
    };
    let (counted, documents) = (fill(counted, |i| i), fill(documents, |_| 0));
    if !counted.is_empty() {
        notes.push(Note::Counts { names: counted });
    }
    if !documents.is_empty() {
        notes.push(Note::OneDocument { names: documents });
    }
}

/// The first dimension of the first input, where it is a number of several samples.
fn fixed_batch(graph: &Graph) -> Option<i64> {
    let held: BTreeSet<&str> = graph.initializer.iter().map(|t| t.name.as_str()).collect();
    let first = graph.input.iter().find(|input| !held.contains(input.name.as_str()))?;
    let shape = first.ty.as_ref()?.tensor.as_ref()?.shape.as_ref()?;
    shape.dim.first()?.value.filter(|&size| size > 1)
}

/// Leaves the first of so many equal parts of the data, in whichever field it is.
fn cut_data(tensor: &mut Tensor, parts: usize) {
    tensor.raw_data.truncate(tensor.raw_data.len() / parts);
    tensor.float_data.truncate(tensor.float_data.len() / parts);
    tensor.int32_data.truncate(tensor.int32_data.len() / parts);
    tensor.int64_data.truncate(tensor.int64_data.len() / parts);
    tensor.double_data.truncate(tensor.double_data.len() / parts);
    tensor.uint64_data.truncate(tensor.uint64_data.len() / parts);
}
