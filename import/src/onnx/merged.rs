//! Separates parameters that an exporter merged because they start out equal.
//!
//! Exporters keep a single tensor for several with equal elements. In an untrained model, all gains of norms become one
//! tensor of ones, and all biases one of zeros. Training would make them different, so they are as many parameters as
//! the model has.
//!
//! Other shared tensors really are one parameter, such as an embedding that is also the last layer, or a block that is
//! applied several times. Uses of a tensor are separated if both conditions hold:
//!
//! * Its elements are known and all equal, or are unknown and lie along one dimension. Gains and biases start as a
//!   single number. Matrices do not, since equal units stay equal, so equal matrices were tied.
//! * The uses are in different modules, by the scopes or the names of nodes, and the exporter lists a parameter of that
//!   module which the file does not hold. If nothing names modules, nodes take the modules without a tensor in the
//!   order of the list, if the numbers match.
//!
//! Omitted biases of zeros, of matrix products and convolutions, are restored if they are listed.

use super::files::is_of_one_value;
use super::listed::{Listed, Missing, Use, module_in_name, said_module, split_name, uses_of};
use super::proto::{Graph, Node, Tensor};
use super::report::Note;
use super::tensor::{dtype_of, type_of};
use std::collections::{BTreeMap, BTreeSet};

/// The largest number of elements of all copies of a tensor together. A tensor with more stays merged.
const MOST_ELEMENTS: u64 = 1 << 25;

/// The largest restored bias that includes its zeros. Real ones are not longer.
const MOST_ZEROS: u64 = 1 << 20;

/// A use, with the name of its own parameter.
struct Renamed {
    at: Use,
    from: String,
    to: String,
}

/// Gives each module its own copy of merged parameters, and restores its bias.
pub(super) fn tell_apart(graph: &mut Graph, listed: &Listed, missing: &mut Missing) -> Vec<Note> {
    let mut notes = Vec::new();
    let merged = merged_tensors(graph);
    let mut renamed = aliases(graph, &merged);
    renamed.extend(by_module(graph, &merged, listed, missing));
    apply(graph, &merged, renamed, &mut notes);
    let restored = restore_biases(graph, missing);
    if let Some(first) = restored.first() {
        notes.push(Note::Restored { first: first.clone(), count: restored.len() });
    }
    notes
}

/// The tensors whose several uses may be several parameters, with these uses.
fn merged_tensors(graph: &Graph) -> BTreeMap<String, Vec<Use>> {
    let mut uses = uses_of(graph);
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    graph.initializer.iter().for_each(|t| *counts.entry(&t.name).or_default() += 1);
    let may_be = |tensor: &Tensor| {
        let float = dtype_of(tensor.data_type).is_ok_and(|dtype| dtype.is_float());
        let vector = tensor.dims.iter().filter(|&&d| d != 1).count() == 1;
        float && vector && counts[tensor.name.as_str()] == 1 && is_of_one_value(tensor).unwrap_or(true)
            || float && tensor.dims.len() > 1 && is_of_one_value(tensor) == Some(true)
    };
    let kept: BTreeSet<&str> = graph.initializer.iter().filter(|t| may_be(t)).map(|t| t.name.as_str()).collect();
    uses.retain(|name, places| places.len() > 1 && kept.contains(name.as_str()));
    uses
}

/// The older exporter's form of a merged parameter: a copy of the tensor under the parameter's own name.
fn aliases(graph: &Graph, merged: &BTreeMap<String, Vec<Use>>) -> Vec<Renamed> {
    let mut found = Vec::new();
    for (name, places) in merged {
        for &at in places {
            if let ("Identity", [own]) = (graph.node[at.node].op_type.as_str(), graph.node[at.node].output.as_slice())
                && own.contains('.')
                && split_name(own).0 != split_name(name).0
            {
                found.push(Renamed { at, from: name.clone(), to: own.clone() });
            }
        }
    }
    found
}

fn by_module(
    graph: &Graph,
    merged: &BTreeMap<String, Vec<Use>>,
    listed: &Listed,
    missing: &mut Missing,
) -> Vec<Renamed> {
    let modules = modules_of(graph, merged, listed, missing);
    let parameters: BTreeSet<&str> = listed.parameters.iter().map(String::as_str).collect();
    let mut found = Vec::new();
    for (name, places) in merged {
        // A made-up name stands for a folded tensor, or perhaps a mask.
        if !listed.is_empty() && !parameters.contains(name.as_str()) {
            continue;
        }
        let (own, component) = split_name(name);
        let at_home = places.iter().any(|at| modules.get(&at.node).is_some_and(|m| m == own));
        // Without a list, a name is only known to contain a module if that module uses it.
        if listed.is_empty() && (!at_home || own.is_empty()) {
            continue;
        }
        let mut home = at_home.then(|| own.to_string());
        let mut of_modules: BTreeMap<String, Option<String>> = BTreeMap::new();
        for &at in places {
            let Some(module) = modules.get(&at.node) else { continue };
            // If no node names the tensor's own module, take the first one for it.
            if *home.get_or_insert_with(|| module.clone()) == *module {
                continue;
            }
            let to = of_modules.entry(module.clone()).or_insert_with(|| {
                if listed.is_empty() {
                    let to = format!("{module}.{component}");
                    return (!module.is_empty() && !graph.initializer.iter().any(|t| t.name == to)).then_some(to);
                }
                let kind = kind_of(&graph.node[at.node], at.operand).unwrap_or(kind_of_name(component));
                let fits = |name: &&str| kind_of_name(split_name(name).1) == kind;
                let direct = only(missing.own(module).filter(fits));
                direct.or_else(|| only(missing.below(module).filter(fits))).map(str::to_string)
            });
            if let Some(to) = to {
                missing.take(to);
                found.push(Renamed { at, from: name.clone(), to: to.clone() });
            }
        }
    }
    found
}

/// The single item, if there is exactly one.
pub(super) fn only<'s>(mut names: impl Iterator<Item = &'s str>) -> Option<&'s str> {
    names.next().filter(|_| names.next().is_none())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Gain,
    Bias,
}

fn kind_of_name(component: &str) -> Kind {
    if component.contains("bias") || component.contains("beta") { Kind::Bias } else { Kind::Gain }
}

/// The kind of parameter that an operand is, if the op determines it.
fn kind_of(node: &Node, operand: usize) -> Option<Kind> {
    match (node.op_type.as_str(), operand) {
        ("LayerNormalization" | "GroupNormalization" | "InstanceNormalization" | "BatchNormalization", 2)
        | ("Gemm" | "Conv" | "ConvTranspose", 2)
        | ("Add", _) => Some(Kind::Bias),
        ("LayerNormalization" | "GroupNormalization" | "InstanceNormalization" | "BatchNormalization", 1)
        | ("RMSNormalization" | "SimplifiedLayerNormalization", 1)
        | ("Mul", _) => Some(Kind::Gain),
        _ => None,
    }
}

/// The module of each node that uses a merged tensor, if it is known or can be inferred.
fn modules_of(
    graph: &Graph,
    merged: &BTreeMap<String, Vec<Use>>,
    listed: &Listed,
    missing: &Missing,
) -> BTreeMap<usize, String> {
    let nodes: BTreeSet<usize> = merged.values().flatten().map(|at| at.node).collect();
    let said = |&at: &usize| {
        let node = &graph.node[at];
        said_module(node).or_else(|| module_in_name(node)).map(|module| (at, module))
    };
    let mut modules: BTreeMap<usize, String> = nodes.iter().filter_map(said).collect();
    if modules.is_empty() && !listed.is_empty() {
        modules = in_order(merged, listed, missing);
    }
    modules
}

/// Assigns modules of the list, in order, to nodes without a known module. These are modules whose parameters are all
/// merged, and there must be as many as nodes that use such tensors. Each merged tensor must then lie in its own
/// module.
fn in_order(merged: &BTreeMap<String, Vec<Use>>, listed: &Listed, missing: &Missing) -> BTreeMap<usize, String> {
    // The last parts of the names in a module, or of the names that a node uses.
    type Parts<'a> = BTreeSet<&'a str>;
    let mut slots: BTreeMap<usize, (Parts, BTreeSet<&str>)> = BTreeMap::new();
    for (name, places) in merged {
        for at in places {
            let (parts, names) = slots.entry(at.node).or_default();
            parts.insert(split_name(name).1);
            names.insert(name);
        }
    }
    let mut listed_modules: Vec<(&str, Parts, bool)> = Vec::new();
    let mut places: BTreeMap<&str, usize> = BTreeMap::new();
    for name in &listed.parameters {
        let (module, part) = split_name(name);
        let at = *places.entry(module).or_insert_with(|| {
            listed_modules.push((module, Parts::new(), true));
            listed_modules.len() - 1
        });
        listed_modules[at].1.insert(part);
        listed_modules[at].2 &= missing.has(name) || merged.contains_key(name.as_str());
    }
    let kinds: BTreeSet<&Parts> = slots.values().map(|(parts, _)| parts).collect();
    let mut found = BTreeMap::new();
    for parts in kinds {
        let nodes: Vec<(usize, &BTreeSet<&str>)> =
            slots.iter().filter(|(_, (p, _))| p == parts).map(|(&at, (_, names))| (at, names)).collect();
        let modules: Vec<&str> =
            listed_modules.iter().filter(|(_, p, free)| p == parts && *free).map(|(m, ..)| *m).collect();
        let at_home = |name: &str, module: &str| match modules.contains(&split_name(name).0) {
            true => nodes.iter().zip(&modules).any(|((_, names), m)| names.contains(name) && *m == module),
            false => false,
        };
        let names: BTreeSet<&str> = nodes.iter().flat_map(|(_, names)| names.iter().copied()).collect();
        if nodes.len() == modules.len() && names.iter().all(|name| at_home(name, split_name(name).0)) {
            found.extend(nodes.iter().zip(&modules).map(|((at, _), module)| (*at, module.to_string())));
        }
    }
    found
}

fn apply(graph: &mut Graph, merged: &BTreeMap<String, Vec<Use>>, renamed: Vec<Renamed>, notes: &mut Vec<Note>) {
    let tensors: BTreeMap<String, Tensor> = graph
        .initializer
        .iter()
        .filter(|t| merged.contains_key(&t.name))
        .map(|t| (t.name.clone(), t.clone()))
        .collect();
    let mut taken: BTreeSet<String> = graph.initializer.iter().map(|t| t.name.clone()).collect();
    taken.extend(graph.input.iter().map(|i| i.name.clone()));
    let mut made: BTreeMap<String, String> = BTreeMap::new();
    let mut told: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut left = MOST_ELEMENTS;
    let mut gone = BTreeSet::new();
    for Renamed { at, from, to } in renamed {
        if !made.contains_key(&to) {
            let tensor = &tensors[&from];
            let elements = type_of(tensor).map_or(u64::MAX, |ty| ty.elements());
            if elements > left || taken.contains(&to) {
                continue;
            }
            left -= elements;
            graph.initializer.push(Tensor { name: to.clone(), ..tensor.clone() });
            made.insert(to.clone(), from.clone());
        } else if made[&to] != from {
            continue;
        }
        // The copy is the tensor from now on.
        if graph.node[at.node].output.contains(&to) {
            gone.insert(at.node);
        } else {
            graph.node[at.node].input[at.operand].clone_from(&to);
        }
        told.entry(from).or_default().insert(to);
    }
    let mut at = 0..;
    graph.node.retain(|_| at.next().is_none_or(|at| !gone.contains(&at)));
    if let (Some((name, first)), count) = (told.iter().next(), told.values().map(BTreeSet::len).sum()) {
        let other = first.first().cloned().unwrap_or_default();
        notes.push(Note::ToldApart { name: name.clone(), other, count });
    }
}

/// Restores biases that the list has and the file lacks, for products and convolutions without one.
fn restore_biases(graph: &mut Graph, missing: &mut Missing) -> Vec<String> {
    let weights: BTreeMap<String, Tensor> = graph
        .initializer
        .iter()
        .map(|t| {
            (
                t.name.clone(),
                Tensor { name: t.name.clone(), dims: t.dims.clone(), data_type: t.data_type, ..Default::default() },
            )
        })
        .collect();
    let mut restored = Vec::new();
    for node in &mut graph.node {
        let takes_bias = matches!(node.op_type.as_str(), "Gemm" | "Conv" | "ConvTranspose") && node.domain.is_empty();
        if !takes_bias || node.input.len() < 2 || node.input.get(2).is_some_and(|name| !name.is_empty()) {
            continue;
        }
        let Some(weight) = weights.get(&node.input[1]) else { continue };
        let module = said_module(node).unwrap_or_else(|| split_name(&weight.name).0.to_string());
        let name = format!("{module}.bias");
        let Some(length) = bias_length(node, weight).filter(|_| missing.has(&name)) else { continue };
        missing.take(&name);
        let zeros =
            if length <= MOST_ZEROS { vec![0; (length * width(weight.data_type)) as usize] } else { Vec::new() };
        graph.initializer.push(Tensor {
            name: name.clone(),
            dims: vec![length as i64],
            data_type: weight.data_type,
            raw_data: zeros,
            ..Default::default()
        });
        node.input.truncate(2);
        node.input.push(name.clone());
        restored.push(name);
    }
    restored
}

fn width(data_type: i32) -> u64 {
    dtype_of(data_type).map_or(0, |dtype| dtype.bytes())
}

/// The number of features in the result of a product or a convolution with this weight.
fn bias_length(node: &Node, weight: &Tensor) -> Option<u64> {
    let int = |name: &str| node.attribute.iter().find(|a| a.name == name).and_then(|a| a.i);
    let float = |name: &str| node.attribute.iter().find(|a| a.name == name).and_then(|a| a.f);
    let length = match (node.op_type.as_str(), weight.dims.as_slice()) {
        // The bias is scaled by beta.
        ("Gemm", &[rows, columns]) if float("beta").unwrap_or(1.0) == 1.0 => {
            if int("transB").unwrap_or(0) != 0 {
                rows
            } else {
                columns
            }
        }
        ("Conv", &[features, ..]) => features,
        ("ConvTranspose", &[_, features, ..]) => features.checked_mul(int("group").unwrap_or(1))?,
        _ => return None,
    };
    u64::try_from(length).ok().filter(|_| dtype_of(weight.data_type).is_ok_and(|dtype| dtype.is_float()))
}
