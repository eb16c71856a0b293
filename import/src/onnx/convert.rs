//! Converts the nodes of a file to a graph: first the leaves, then each node in order, with functions inlined.

use super::call::{Call, Many};
use super::files::Files;
use super::known::Known;
use super::leaves::Uses;
use super::listed::{module_in_name, said_module};
use super::prepare::{Prepared, prepare};
use super::proto;
use super::report::{LAST_OPSET, MAX_DEPTH, MAX_NODES, MAX_TABLES, Note, OnnxError, ProblemKind, Reject, Report};
use super::sizes::{Size, Sizes};
use super::table::{Lowering, lowering};
use altiplano_ir::graph::{Graph, Node, ValueId};
use altiplano_ir::literal::Literal;
use altiplano_ir::op::{Input, Op, ShapeError};
use altiplano_ir::simplify::without_dead_nodes;
use altiplano_ir::types::TensorType;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Options that a file does not state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// The values of sizes that the file leaves open.
    pub sizes: Vec<(String, u64)>,
}

/// A leaf of the graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Argument {
    pub name: String,
    pub ty: TensorType,
    pub value: ValueId,
}

/// The graph of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Imported {
    pub graph: Graph,
    /// The leaves: inputs first, then tensors that the file holds.
    pub arguments: Vec<Argument>,
    /// The names of the outputs in the file.
    pub results: Vec<String>,
    /// The inputs of the graph that the file holds. They have no batch and are not trained.
    pub buffers: Vec<String>,
    /// The sizes that the file leaves open.
    pub sizes: Vec<Size>,
    /// Notes for the reader of a plan.
    pub notes: Vec<Note>,
}

/// The graph under construction.
pub(super) struct Builder<'m> {
    pub graph: Graph,
    pub known: Known,
    pub buffers: Vec<String>,
    /// The number of leaves with each name.
    pub leaf_names: HashMap<String, u32>,
    /// Tensors held for one sample that the model repeats, with the number of samples.
    pub repeated: BTreeMap<String, u64>,
    functions: BTreeMap<(&'m str, &'m str, &'m str), &'m proto::Function>,
    report: Report,
    nodes: u64,
    /// The number of table elements so far.
    tables: u64,
    depth: usize,
}

/// The names that are visible in one graph, body or function.
pub(super) struct Scope<'s, 'm> {
    /// The values by name. `None` if a value could not be made, which was reported.
    values: HashMap<&'m str, Option<ValueId>>,
    /// The inputs of the function that the call omits.
    absent: Vec<&'m str>,
    /// The enclosing scope of a body.
    outer: Option<&'s Scope<'s, 'm>>,
    opsets: &'m [proto::OperatorSet],
    /// The attributes of the function that is being inlined.
    attributes: Option<&'s BTreeMap<&'m str, &'m proto::Attribute>>,
    /// The name of the call that is being inlined.
    path: Option<&'s str>,
}

impl<'s, 'm> Scope<'s, 'm> {
    /// A scope for a body inside this one.
    pub(crate) fn body(&'s self) -> Scope<'s, 'm> {
        let Scope { opsets, attributes, path, .. } = *self;
        Scope { values: HashMap::new(), absent: Vec::new(), outer: Some(self), opsets, attributes, path }
    }

    pub(crate) fn define(&mut self, name: &'m str, value: Option<ValueId>) -> Result<(), OnnxError> {
        match self.values.insert(name, value) {
            Some(_) => Err(OnnxError::Redefined { name: name.to_string() }),
            None => Ok(()),
        }
    }

    /// The value of a name. `Some(None)` if it could not be made.
    pub(crate) fn get(&self, name: &str) -> Option<Option<ValueId>> {
        let mut scope = Some(self);
        while let Some(here) = scope {
            if let Some(&value) = here.values.get(name) {
                return Some(value);
            }
            scope = here.outer;
        }
        None
    }

    /// Returns true if the name is that of an input that the function's call omits.
    fn is_absent(&self, name: &str) -> bool {
        self.absent.contains(&name) || self.outer.is_some_and(|outer| outer.is_absent(name))
    }

    /// An attribute of a node here. A reference to an attribute of the function's call is resolved.
    pub(crate) fn resolved(&self, attribute: &'m proto::Attribute) -> Option<&'m proto::Attribute> {
        match attribute.ref_attr_name.as_str() {
            "" => Some(attribute),
            name => self.attributes?.get(name).copied(),
        }
    }

    fn opset(&self, domain: &str) -> Option<i64> {
        let same = |o: &&proto::OperatorSet| standard(&o.domain) == standard(domain);
        self.opsets.iter().find(same).map(|o| o.version)
    }
}

/// The domain, with one spelling for the standard's own.
fn standard(domain: &str) -> &str {
    if domain == "ai.onnx" { "" } else { domain }
}

/// Reads a file. `files` reads small tensors whose data is in another file.
pub fn import(bytes: &[u8], options: &Options, files: Files) -> Result<Imported, OnnxError> {
    let Prepared { model, listed, tables, repeated, mut notes } = prepare(bytes, files)?;
    let graph = model.graph.as_ref().ok_or(OnnxError::NoGraph)?;
    if graph.output.is_empty() {
        return Err(OnnxError::NoOutputs);
    }
    let version = model.opset_import.iter().find(|o| standard(&o.domain).is_empty()).map(|o| o.version);
    if let Some(version) = version.filter(|&v| v < 7) {
        return Err(OnnxError::Opset { version });
    }
    if version.is_none() && graph.node.iter().any(|n| standard(&n.domain).is_empty()) {
        return Err(OnnxError::NoOpset);
    }
    notes.extend(version.filter(|&v| v > LAST_OPSET).map(|version| Note::NewerOpset { version }));
    let functions = model.functions.iter();
    let functions = functions.map(|f| ((standard(&f.domain), f.name.as_str(), f.overload.as_str()), f)).collect();
    let mut builder = Builder {
        graph: Graph::new(graph.name.clone()),
        known: Known::default(),
        buffers: Vec::new(),
        leaf_names: HashMap::new(),
        repeated,
        functions,
        report: Report::default(),
        nodes: 0,
        tables: 0,
        depth: 0,
    };
    builder.find_unsupported(graph);
    let opsets = &model.opset_import;
    let mut scope =
        Scope { values: HashMap::new(), absent: Vec::new(), outer: None, opsets, attributes: None, path: None };
    let mut sizes = Sizes::new(&options.sizes);
    let held: BTreeSet<&str> = graph.initializer.iter().map(|t| t.name.as_str()).collect();
    let uses = Uses::of(graph).with(&listed, &tables);
    for input in graph.input.iter().filter(|input| !held.contains(input.name.as_str())) {
        let ty = sizes.type_of(input)?;
        builder.leaf_names.insert(input.name.clone(), 1);
        let fail = |_| OnnxError::InputShape { name: input.name.clone() };
        let value = builder.leaf(Op::Input(Input { name: input.name.clone(), ty })).map_err(fail)?;
        scope.define(&input.name, Some(value))?;
    }
    for tensor in graph.initializer.iter().filter(|t| uses.has(&t.name)) {
        builder.initializer(tensor, &uses, &mut scope)?;
    }
    builder.unsupported_sparse(graph);
    builder.run(&graph.node, &mut scope)?;
    let mut outputs = Vec::with_capacity(graph.output.len());
    for output in &graph.output {
        match scope.get(&output.name) {
            None => return Err(OnnxError::Output { name: output.name.clone() }),
            Some(value) => outputs.extend(value),
        }
    }
    if let Some(error) = std::mem::take(&mut builder.report).into_error() {
        return Err(error);
    }
    builder.graph.outputs = outputs;
    let graph_of = without_dead_nodes(&builder.graph);
    let arguments = arguments(&graph_of);
    let results = graph.output.iter().map(|o| o.name.clone()).collect();
    Ok(Imported { graph: graph_of, arguments, results, buffers: builder.buffers, sizes: sizes.finish()?, notes })
}

fn arguments(graph: &Graph) -> Vec<Argument> {
    let argument = |v: ValueId| {
        let name = match &graph.node(v).op {
            Op::Input(leaf) => leaf.name.clone(),
            Op::Parameter(leaf) => leaf.name.clone(),
            _ => return None,
        };
        Some(Argument { name, ty: graph.ty(v).clone(), value: v })
    };
    graph.values().filter_map(argument).collect()
}

impl<'m> Builder<'m> {
    /// Reports all unknown ops of a graph, whatever other errors there are. Bodies of branches are checked later, when
    /// it is known which branch is used.
    pub(crate) fn find_unsupported(&mut self, graph: &'m proto::Graph) {
        let mut bodies: Vec<&'m [proto::Node]> = vec![&graph.node];
        let mut seen = BTreeSet::new();
        while let Some(nodes) = bodies.pop() {
            for node in nodes {
                if let Some(function) = self.function(node) {
                    if seen.insert((standard(&function.domain), function.name.as_str(), function.overload.as_str())) {
                        bodies.push(&function.node);
                    }
                } else if lowering(standard(&node.domain), &node.op_type).is_none() {
                    self.report.unsupported(op_name(node), node_name(node));
                }
                if node.op_type != "If" {
                    bodies.extend(node.attribute.iter().filter_map(|a| a.g.as_ref()).map(|g| g.node.as_slice()));
                }
            }
        }
    }

    fn unsupported_sparse(&mut self, graph: &'m proto::Graph) {
        for tensor in &graph.sparse_initializer {
            let name = tensor.values.as_ref().map(|t| t.name.clone()).unwrap_or_default();
            self.report.unsupported("sparse initializer".into(), name);
        }
    }

    fn function(&self, node: &'m proto::Node) -> Option<&'m proto::Function> {
        self.functions.get(&(standard(&node.domain), node.op_type.as_str(), node.overload.as_str())).copied()
    }

    pub(crate) fn leaf(&mut self, op: Op) -> Result<ValueId, ShapeError> {
        self.graph.push(op, &[])
    }

    /// Converts nodes in order. Errors of a node are reported, and nodes that depend on it are skipped.
    pub(crate) fn run(&mut self, nodes: &'m [proto::Node], scope: &mut Scope<'_, 'm>) -> Result<(), OnnxError> {
        for node in nodes {
            self.nodes += 1;
            if self.nodes > MAX_NODES || self.graph.len() as u64 > MAX_NODES {
                return Err(OnnxError::TooManyNodes);
            }
            let first = self.graph.len();
            let results = match self.results(node, scope) {
                Ok(results) => results.into_iter().map(Some).collect(),
                Err(reject) => {
                    self.tell(node, reject)?;
                    vec![None; node.output.len()]
                }
            };
            self.name_nodes(first, node, scope);
            for (name, value) in node.output.iter().zip(results).filter(|(name, _)| !name.is_empty()) {
                let value = value.map(|v| self.folded(v));
                if let Err(OnnxError::Redefined { name }) = scope.define(name, value) {
                    self.report.problem(node_name(node), op_name(node), ProblemKind::Redefined { name });
                }
            }
        }
        Ok(())
    }

    fn tell(&mut self, node: &proto::Node, reject: Reject) -> Result<(), OnnxError> {
        match reject {
            Reject::Unsupported("") | Reject::Silent => {}
            Reject::Unsupported(what) => {
                self.report.unsupported(format!("{} ({what})", op_name(node)), node_name(node));
            }
            Reject::Invalid(kind) => self.report.problem(node_name(node), op_name(node), kind),
            Reject::Stop(error) => return Err(error),
        }
        Ok(())
    }

    fn results(&mut self, node: &'m proto::Node, scope: &Scope<'_, 'm>) -> Many {
        let mut operands = Vec::with_capacity(node.input.len());
        for name in &node.input {
            operands.push(match name.as_str() {
                "" => None,
                name => match scope.get(name) {
                    Some(Some(value)) => Some(value),
                    Some(None) => return Err(Reject::Silent),
                    None if scope.is_absent(name) => None,
                    None => return Err(ProblemKind::Undefined { name: name.to_string() }.into()),
                },
            });
        }
        let results = if let Some(function) = self.function(node) {
            self.inline(node, function, &operands, scope)?
        } else {
            let domain = standard(&node.domain);
            // It was reported before the first node.
            let Some(lowering) = lowering(domain, &node.op_type) else { return Err(Reject::Silent) };
            let opset = scope.opset(domain).unwrap_or(1);
            let mut call = Call { builder: self, node, scope, operands, opset };
            match lowering {
                Lowering::One(lower) => vec![lower(&mut call)?],
                Lowering::Many(lower) => lower(&mut call)?,
            }
        };
        let wanted = node.output.iter().rposition(|name| !name.is_empty()).map_or(0, |last| last + 1);
        if results.len() < wanted {
            return Err(ProblemKind::Results { found: results.len(), wanted }.into());
        }
        Ok(results)
    }

    fn inline(
        &mut self,
        node: &'m proto::Node,
        function: &'m proto::Function,
        operands: &[Option<ValueId>],
        scope: &Scope<'_, 'm>,
    ) -> Many {
        self.enter(node)?;
        let defaults = function.attribute.iter().map(|a| (a.name.as_str(), a));
        let given = node.attribute.iter().filter_map(|a| Some((a.name.as_str(), scope.resolved(a)?)));
        let attributes: BTreeMap<&str, &proto::Attribute> = defaults.chain(given).collect();
        let path = path_of(node, scope);
        let mut inner = Scope {
            values: HashMap::new(),
            absent: Vec::new(),
            outer: None,
            opsets: &function.opset_import,
            attributes: Some(&attributes),
            path: Some(&path),
        };
        for (i, name) in function.input.iter().enumerate() {
            match operands.get(i).copied().flatten() {
                Some(value) => inner.define(name, Some(value))?,
                None => inner.absent.push(name),
            }
        }
        self.run(&function.node, &mut inner)?;
        self.depth -= 1;
        let result = |name: &String| match inner.get(name) {
            Some(Some(value)) => Ok(value),
            Some(None) => Err(Reject::Silent),
            None => Err(ProblemKind::Undefined { name: name.clone() }.into()),
        };
        function.output.iter().map(result).collect()
    }

    /// Converts a body with these inputs, and returns its outputs.
    pub(crate) fn run_body(
        &mut self,
        node: &'m proto::Node,
        body: &'m proto::Graph,
        inputs: &[ValueId],
        scope: &Scope<'_, 'm>,
    ) -> Many {
        if body.input.len() != inputs.len() {
            return Err(ProblemKind::Subgraph { found: body.input.len(), wanted: inputs.len() }.into());
        }
        self.enter(node)?;
        self.unsupported_sparse(body);
        let mut inner = scope.body();
        for (input, &value) in body.input.iter().zip(inputs) {
            inner.define(&input.name, Some(value))?;
        }
        let uses = Uses::of(body);
        for tensor in body.initializer.iter().filter(|t| uses.has(&t.name)) {
            self.initializer(tensor, &uses, &mut inner)?;
        }
        self.run(&body.node, &mut inner)?;
        self.depth -= 1;
        let result = |output: &proto::ValueInfo| match inner.get(&output.name) {
            Some(Some(value)) => Ok(value),
            Some(None) => Err(Reject::Silent),
            None => Err(ProblemKind::Undefined { name: output.name.clone() }.into()),
        };
        body.output.iter().map(result).collect()
    }

    /// Counts the elements of a table before it is made.
    pub(crate) fn table(&mut self, node: &proto::Node, elements: u64) -> Result<(), OnnxError> {
        self.tables = self.tables.saturating_add(elements);
        if self.tables > MAX_TABLES { Err(OnnxError::TooLarge { node: node_name(node) }) } else { Ok(()) }
    }

    fn enter(&mut self, node: &proto::Node) -> Result<(), OnnxError> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(OnnxError::TooDeep { node: node_name(node), function: op_name(node) });
        }
        Ok(())
    }

    /// Replaces a small tensor of equal elements that follows from constants by a constant. Models compute counts and
    /// scales from sizes with many nodes.
    fn folded(&mut self, value: ValueId) -> ValueId {
        const MOST: u64 = 64;
        let node = self.graph.node(value);
        if matches!(node.op, Op::Constant(_)) || node.ty.elements() > MOST {
            return value;
        }
        let Some(tensor) = self.known.elements(&self.graph, value) else { return value };
        let first = tensor.data.first().copied();
        if first.is_none_or(|first| tensor.data.iter().any(|x| x.to_bits() != first.to_bits())) {
            return value;
        }
        self.graph.constant(Literal::dense(tensor.ty.clone(), tensor.data.clone()))
    }

    /// Names the nodes from `first` on after the node that they come from.
    fn name_nodes(&mut self, first: usize, node: &'m proto::Node, scope: &Scope<'_, 'm>) {
        if self.graph.nodes[first..].iter().all(|n| !n.name.is_empty()) {
            return;
        }
        let mut name = path_of(node, scope);
        let plain = name == node_name(node) && scope.path.is_none();
        if plain && let Some(module) = node.input.iter().find_map(|input| self.module_of(scope.get(input)??)) {
            name = module;
        }
        let unnamed = |n: &&mut Node| n.name.is_empty() && !n.op.is_leaf();
        self.graph.nodes[first..].iter_mut().filter(unnamed).for_each(|n| n.name.clone_from(&name));
    }

    /// The module of a parameter: `transformer.h.0.ln_1` for `transformer.h.0.ln_1.weight`.
    fn module_of(&self, value: ValueId) -> Option<String> {
        match &self.graph.node(value).op {
            Op::Parameter(p) => p.name.rsplit_once('.').map(|(module, _)| module.to_string()),
            _ => None,
        }
    }
}

/// The module that a node belongs to, if the file states it, or the node's own name.
fn path_of(node: &proto::Node, scope: &Scope<'_, '_>) -> String {
    if let Some(module) = said_module(node) {
        return module;
    }
    if let Some(path) = scope.path {
        return path.to_string();
    }
    module_in_name(node).unwrap_or_else(|| node_name(node))
}

pub(super) fn node_name(node: &proto::Node) -> String {
    let output = || node.output.iter().find(|name| !name.is_empty()).cloned().unwrap_or_default();
    if node.name.is_empty() { output() } else { node.name.clone() }
}

fn op_name(node: &proto::Node) -> String {
    match standard(&node.domain) {
        "" => node.op_type.clone(),
        domain => format!("{domain}.{}", node.op_type),
    }
}
