//! The list of PyTorch's exporter: the parameters and buffers of the model before optimisation.
//!
//! A listed parameter that the file does not hold was merged with another that starts out equal, folded into another
//! tensor (a transposed weight), or omitted (a bias of zeros).

use super::proto::{Graph, Model, Node, Property};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug, Default)]
pub(super) struct Listed {
    /// The parameters in order of definition.
    pub parameters: Vec<String>,
    pub buffers: BTreeSet<String>,
}

impl Listed {
    pub(crate) fn of(model: &Model) -> Self {
        let own = model.graph.as_ref().map(|g| g.metadata_props.as_slice()).unwrap_or_default();
        let properties: &[Property] = if own.is_empty() { &model.metadata_props } else { own };
        let signature = |p: &&Property| p.key == "pkg.torch.export.ExportedProgram.graph_signature";
        let mut listed = Listed::default();
        for line in properties.iter().find(signature).into_iter().flat_map(|p| p.value.lines()) {
            let target = line.split_once("target='").and_then(|(_, rest)| rest.split('\'').next());
            match target {
                Some(name) if line.contains(": PARAMETER ") => listed.parameters.push(name.to_string()),
                Some(name) if line.contains(": BUFFER ") => {
                    listed.buffers.insert(name.to_string());
                }
                _ => {}
            }
        }
        listed
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.parameters.is_empty()
    }
}

/// The listed parameters that the file does not hold, by module.
pub(super) struct Missing {
    names: BTreeSet<String>,
}

impl Missing {
    pub(crate) fn of(graph: &Graph, listed: &Listed) -> Self {
        let held: BTreeSet<&str> = graph.initializer.iter().map(|t| t.name.as_str()).collect();
        Missing { names: listed.parameters.iter().filter(|name| !held.contains(name.as_str())).cloned().collect() }
    }

    /// The missing parameters of a module itself.
    pub(crate) fn own<'s>(&'s self, module: &'s str) -> impl Iterator<Item = &'s str> {
        self.below(module).filter(move |name| split_name(name).0 == module)
    }

    /// The missing parameters of a module and the modules inside it. The empty name stands for the whole model.
    pub(crate) fn below<'s>(&'s self, module: &'s str) -> impl Iterator<Item = &'s str> {
        let prefix = if module.is_empty() { String::new() } else { format!("{module}.") };
        let from = self.names.range(prefix.clone()..);
        from.take_while(move |name| name.starts_with(&prefix)).map(String::as_str)
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    /// Removes a parameter that is accounted for.
    pub(crate) fn take(&mut self, name: &str) {
        self.names.remove(name);
    }
}

/// Splits `transformer.h.0.ln_1.weight` into `transformer.h.0.ln_1` and `weight`.
pub(super) fn split_name(name: &str) -> (&str, &str) {
    name.rsplit_once('.').unwrap_or(("", name))
}

/// The module that a node belongs to, if the file states it.
pub(super) fn said_module(node: &Node) -> Option<String> {
    // A list as printed by Python, from the whole model to the node itself: ['', 'h', 'h.0', 'h.0.ln', 'layer_norm'].
    if let Some(scopes) = node.metadata_props.iter().find(|p| p.key == "pkg.torch.onnx.name_scopes") {
        let parts: Vec<&str> = scopes.value.split('\'').skip(1).step_by(2).collect();
        if let [.., module, _] = parts.as_slice()
            && !module.is_empty()
        {
            return Some(module.to_string());
        }
    }
    None
}

/// The module path in a node's name, as the older exporter writes it: `/h/h.0/ln/LayerNormalization`.
pub(super) fn module_in_name(node: &Node) -> Option<String> {
    let (modules, _) = node.name.strip_prefix('/')?.rsplit_once('/')?;
    let mut path = String::new();
    // Items of a list repeat the list's name: `h.0.ln` comes from `h/h.0/ln`.
    for part in modules.split('/') {
        let last = path.rsplit('.').next().unwrap_or_default();
        let item = part.strip_prefix(last).and_then(|rest| rest.strip_prefix('.'));
        match item.filter(|_| !last.is_empty()) {
            Some(item) => path = format!("{path}.{item}"),
            None if path.is_empty() => path = part.to_string(),
            None => path = format!("{path}.{part}"),
        }
    }
    Some(path)
}

/// A use of a tensor by a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Use {
    pub node: usize,
    pub operand: usize,
}

/// The uses of each tensor by the graph's own nodes. Tensors that bodies of loops and branches use, or that the graph
/// returns, are excluded and stay unchanged.
pub(super) fn uses_of(graph: &Graph) -> BTreeMap<String, Vec<Use>> {
    let mut uses: BTreeMap<String, Vec<Use>> =
        graph.initializer.iter().map(|tensor| (tensor.name.clone(), Vec::new())).collect();
    let mut elsewhere: BTreeSet<&str> = graph.output.iter().map(|output| output.name.as_str()).collect();
    let mut bodies: Vec<&Graph> = Vec::new();
    for (at, node) in graph.node.iter().enumerate() {
        for (operand, name) in node.input.iter().enumerate() {
            if let Some(places) = uses.get_mut(name) {
                places.push(Use { node: at, operand });
            }
        }
        bodies.extend(node.attribute.iter().filter_map(|a| a.g.as_deref()));
    }
    while let Some(body) = bodies.pop() {
        for node in &body.node {
            elsewhere.extend(node.input.iter().map(String::as_str));
            bodies.extend(node.attribute.iter().filter_map(|a| a.g.as_deref()));
        }
        elsewhere.extend(body.output.iter().map(|output| output.name.as_str()));
    }
    for name in elsewhere {
        uses.remove(name);
    }
    uses
}
