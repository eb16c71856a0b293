//! Names tensors with made-up names, and determines which of them are trained.
//!
//! Optimisation of a graph folds parameters into tensors with names such as `val_110`: the transposed weight of a
//! linear layer, or the result of a lookup in a table of positions. If the exporter lists the model's parameters and
//! nodes state their modules, such a tensor is named after the module that uses it. If every parameter of that module
//! and of the modules inside it is accounted for, the tensor contains none of them. Then it is a table of cosines or a
//! mask, which is not trained.

use super::listed::{Listed, Missing, Use, module_in_name, said_module, split_name, uses_of};
use super::merged::only;
use super::proto::{Graph, Node};
use super::tensor::dtype_of;
use std::collections::{BTreeMap, BTreeSet};

/// The new names of tensors, and those that are not trained.
pub(super) struct Named {
    pub names: BTreeMap<String, String>,
    pub tables: BTreeSet<String>,
}

/// Names tensors by their modules.
pub(super) fn name_by_module(graph: &mut Graph, listed: &Listed, missing: &mut Missing) -> Named {
    let parameters: BTreeSet<&str> = listed.parameters.iter().map(String::as_str).collect();
    let uses = uses_of(graph);
    account_for_ties(graph, &uses, missing);
    // Tensors with made-up names, with the module and position of their first use.
    let mut found: Vec<(usize, String, Use)> = Vec::new();
    for (at, tensor) in graph.initializer.iter().enumerate() {
        let float = dtype_of(tensor.data_type).is_ok_and(|dtype| dtype.is_float());
        let several = tensor.dims.iter().any(|&d| d != 1);
        let made_up = match listed.is_empty() {
            true => tensor.name.starts_with("onnx::"),
            // Names of the model contain modules, and made-up names do not.
            false => {
                !tensor.name.contains('.')
                    && !parameters.contains(tensor.name.as_str())
                    && !listed.buffers.contains(&tensor.name)
            }
        };
        let Some(&first) = uses.get(&tensor.name).and_then(|places| places.first()) else { continue };
        let node = &graph.node[first.node];
        let module = said_module(node).or_else(|| module_in_name(node));
        if let Some(module) = module.filter(|m| float && several && made_up && !m.is_empty()) {
            found.push((at, module, first));
        }
    }
    let mut names: BTreeMap<String, String> = BTreeMap::new();
    let mut taken: BTreeSet<String> = graph.initializer.iter().map(|t| t.name.clone()).collect();
    taken.extend(graph.input.iter().map(|input| input.name.clone()));
    taken.extend(graph.node.iter().flat_map(|node| node.output.iter().cloned()));
    let mut rest = Vec::new();
    for (at, module, place) in found {
        let tensor = &graph.initializer[at];
        let weight = format!("{module}.weight");
        let is_weight = tensor.dims.len() > 1 && takes_weight(&graph.node[place.node], place.operand);
        if is_weight && (missing.has(&weight) || listed.is_empty()) {
            missing.take(&weight);
            // PyTorch has the result's features first, and a matrix product has them last.
            let turned = graph.node[place.node].op_type == "MatMul" && tensor.dims.len() == 2;
            let name = if turned { format!("{weight}.T") } else { weight };
            if taken.insert(name.clone()) {
                names.insert(tensor.name.clone(), name);
            }
        } else {
            rest.push((at, module));
        }
    }
    let mut tables = BTreeSet::new();
    for (at, module) in rest {
        let tensor = &graph.initializer[at].name;
        let only = only(missing.own(&module)).map(str::to_string);
        let above = std::iter::successors(Some(module.as_str()), |m| (!m.is_empty()).then(|| split_name(m).0));
        let may_be_part =
            missing.below(&module).next().is_some() || above.into_iter().any(|m| missing.own(m).next().is_some());
        let is_table = !may_be_part && !listed.is_empty();
        let part = tensor.rsplit([':', '.', '/']).next().unwrap_or(tensor);
        let name = match only {
            Some(only) => {
                missing.take(&only);
                only
            }
            None => format!("{module}.{part}"),
        };
        if taken.insert(name.clone()) {
            if is_table {
                tables.insert(name.clone());
            }
            names.insert(tensor.clone(), name);
        } else if is_table {
            tables.insert(tensor.clone());
        }
    }
    rename(graph, &names);
    Named { names, tables }
}

/// A parameter that two modules share is listed twice and held once.
fn account_for_ties(graph: &Graph, uses: &BTreeMap<String, Vec<Use>>, missing: &mut Missing) {
    for (name, places) in uses {
        for place in places {
            let Some(module) = said_module(&graph.node[place.node]) else { continue };
            let (own, part) = split_name(name);
            if module != own {
                missing.take(&format!("{module}.{part}"));
            }
        }
    }
}

/// Returns true if an operand is the matrix of a layer.
pub(super) fn takes_weight(node: &Node, operand: usize) -> bool {
    operand == 1 && matches!(node.op_type.as_str(), "MatMul" | "Gemm" | "Conv" | "ConvTranspose")
        || operand == 0 && node.op_type == "Gather"
}

fn rename(graph: &mut Graph, names: &BTreeMap<String, String>) {
    for tensor in &mut graph.initializer {
        if let Some(name) = names.get(&tensor.name) {
            tensor.name.clone_from(name);
        }
    }
    for input in graph.node.iter_mut().flat_map(|node| &mut node.input) {
        if let Some(name) = names.get(input) {
            input.clone_from(name);
        }
    }
}
