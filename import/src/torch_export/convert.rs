//! Turns an exported program into a graph: its leaves, its nodes in order, and its results.

use super::archive::{Archive, ArchiveError, Stored};
use super::call::{Call, Item, SIZE_OF_DATA};
use super::memory::{Memory, Tensor};
use super::report::{ImportError, Problem, ProblemKind, Reject, Unsupported};
use super::schema::{self, Argument, Program, Size, TensorMeta};
use super::sizes;
use super::table;
use crate::OpenSize;
use altiplano_ir::graph::{Graph, Node, ValueId};
use altiplano_ir::literal::Literal;
use altiplano_ir::op::{Input, Op, Parameter, Unary};
use altiplano_ir::types::TensorType;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// The maximum number of operations of a program, including its subgraphs.
pub(crate) const MAX_OPERATIONS: usize = 1 << 20;

/// The maximum number of elements of constants of the graph. Larger constants of an archive become inputs.
const MAX_CONSTANT: u64 = 1 << 16;

/// Settings for an import that the file itself does not contain.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    /// Values for open sizes, by symbol (`s77`) or by input and dimension (`input_ids.0`).
    pub sizes: Vec<(String, u64)>,
}

/// A program as a graph.
#[derive(Clone, Debug)]
pub struct Imported {
    pub graph: Graph,
    /// The leaves that callers provide, in the function's order: neither parameters nor buffers.
    pub user_inputs: Vec<ValueId>,
    /// Inputs that are state or tables of the model, without a batch dimension.
    pub buffers: Vec<String>,
    /// Names that the model gives its results, if any.
    pub results: Vec<Option<String>>,
    /// Open sizes of the program, sorted by name.
    pub open_sizes: Vec<OpenSize>,
    /// True if the program was decomposed, which loses the points where gradients stop.
    pub decomposed: bool,
    /// The version of the file's format, if it is newer than [`NEWEST`](schema::NEWEST).
    pub newer: Option<i64>,
}

/// Reads an archive.
///
/// # Errors
/// [`ImportError`] with all operations that the graph cannot express, or with the first error that prevents
/// reading the archive.
pub fn import(bytes: &[u8], options: &Options) -> Result<Imported, ImportError> {
    let mut archive = Archive::open(bytes)?;
    let program = archive.program()?;
    let open_sizes = open_sizes(&program, options)?;
    let sizes = open_sizes.iter().map(|s| (s.symbol.clone(), s.value as i64)).collect();
    let mut to = Converter { sizes, ..Converter::new() };
    let mut environment = Environment::new();
    to.leaves(&program, &mut archive, &mut environment)?;
    let outputs = to.run(&program.graph_module.graph, environment)?;
    to.finish(&program, outputs, open_sizes)
}

/// The values of all weights and buffers in an archive, under their names in the graph.
///
/// # Errors
/// [`ArchiveError::NoValues`](super::ArchiveError::NoValues) if the model was exported on the meta device.
pub fn weights(bytes: &[u8]) -> Result<Vec<Stored>, ImportError> {
    let mut archive = Archive::open(bytes)?;
    let mut all = Vec::new();
    for kind in ["weights", "constants"] {
        let payloads = archive.payloads(kind)?;
        for (name, payload) in &payloads.config {
            if payload.is_meta() {
                return Err(ArchiveError::NoValues { name: name.as_str().into() }.into());
            }
            all.extend(archive.stored(kind, name, payload)?);
        }
    }
    Ok(all)
}

/// The items that the names of a graph refer to.
pub type Environment = HashMap<String, Item>;

/// A graph under construction.
pub struct Converter {
    pub graph: Graph,
    pub memory: Memory,
    pub sizes: BTreeMap<String, i64>,
    /// The input for the key of random bits, and the number of draws so far.
    pub random: Option<(ValueId, u32)>,
    /// The half-precision type for matrix products, if the program requests autocast.
    pub autocast: Option<altiplano_ir::dtype::DType>,
    /// State of the rows that masks mark.
    pub marked: super::ops::marked::Marked,
    /// True while gradients are not recorded.
    pub no_grad: bool,
    /// Known parts of complex values.
    pub pairs: BTreeMap<ValueId, [ValueId; 2]>,
    /// Leaves in place of results that could not be computed.
    stand_ins: BTreeSet<ValueId>,
    /// The number of ops that were not converted because they depend on such leaves.
    consequences: usize,
    /// For each value so far, true if it follows from a trained parameter.
    trained: Vec<bool>,
    operations: usize,
    unsupported: Vec<Unsupported>,
    problems: Vec<Problem>,
    user_inputs: Vec<ValueId>,
    buffers: Vec<String>,
}

impl Converter {
    fn new() -> Converter {
        Converter {
            graph: Graph::new("main"),
            memory: Memory::default(),
            sizes: BTreeMap::new(),
            random: None,
            autocast: None,
            marked: Default::default(),
            no_grad: false,
            pairs: BTreeMap::new(),
            stand_ins: BTreeSet::new(),
            consequences: 0,
            trained: Vec::new(),
            operations: 0,
            unsupported: Vec::new(),
            problems: Vec::new(),
            user_inputs: Vec::new(),
            buffers: Vec::new(),
        }
    }

    /// The declared type; `None` if a size or the element type is not supported.
    pub fn declared(&self, meta: &TensorMeta) -> Option<TensorType> {
        let size = |size: &Size| match size {
            Size::Int(n) => u64::try_from(*n).ok(),
            Size::Expr(e) => sizes::evaluate(&e.expr_str, &self.sizes).and_then(|n| u64::try_from(n).ok()),
        };
        let shape: Option<Vec<u64>> = meta.sizes.iter().map(size).collect();
        meta.with_shape(shape?)
    }

    fn leaves(
        &mut self,
        program: &Program,
        archive: &mut Archive<'_>,
        environment: &mut Environment,
    ) -> Result<(), ImportError> {
        let graph = &program.graph_module.graph;
        let (weights, constants) = (archive.payloads("weights")?, archive.payloads("constants")?);
        let changed = changed_buffers(program);
        // Parameters that are stored as one tensor are tied, and share the name of the first. On the meta
        // device all parameters have the same path, but there the program itself reads tied parameters by one
        // of their names.
        let mut tied: BTreeMap<&str, Tensor> = BTreeMap::new();
        for spec in &program.graph_module.signature.input_specs {
            let Some((kind, spec)) = spec.iter().find(|(_, value)| !value.is_null()) else { continue };
            let text = |key: &str| spec.get(key).and_then(Value::as_str);
            let argument = spec.get("arg");
            let tensor_name = argument.and_then(|a| a.get("name").or_else(|| a.get("as_tensor")?.get("name")));
            let Some(name) = tensor_name.and_then(Value::as_str) else {
                self.other_input(kind, spec, environment);
                continue;
            };
            let failed = |problem| ImportError::Input { name: name.into(), problem };
            if matches!(kind.as_str(), "custom_obj" | "token") {
                environment.insert(name.to_string(), Item::Opaque);
                continue;
            }
            let meta = graph.tensor_values.get(name).ok_or_else(|| failed("the program does not say its type"))?;
            let Some(ty) = self.declared(meta) else {
                let (place, kind) = (format!("input '{name}'"), "its type is none that tensors here can have");
                self.problems.push(Problem { place, op: String::new(), kind: ProblemKind::Other(kind) });
                environment.insert(name.to_string(), Item::Missing);
                continue;
            };
            let tensor = match kind.as_str() {
                "parameter" => {
                    let name = text("parameter_name").unwrap_or(name);
                    let stored = weights.config.get(name).filter(|payload| !payload.is_meta());
                    let stored = stored.map_or(name, |payload| &payload.path_name);
                    let frozen = meta.requires_grad == Some(false);
                    let op = || Op::Parameter(Parameter { frozen, ..Parameter::new(name, ty.clone()) });
                    *tied.entry(stored).or_insert_with(|| self.leaf(op(), ty.clone()))
                }
                "user_input" => {
                    let tensor = self.leaf(Op::Input(Input { name: name.to_string(), ty: ty.clone() }), ty);
                    self.user_inputs.push(ValueId(self.graph.len() as u32 - 1));
                    tensor
                }
                _ => {
                    let (own, state) = match kind.as_str() {
                        "buffer" => (text("buffer_name"), spec.get("persistent") != Some(&Value::Bool(false))),
                        _ => (text("tensor_constant_name"), false),
                    };
                    let own = own.unwrap_or(name);
                    // Tensors that are not model state keep the file's values, as do masks and integers that nothing
                    // changes.
                    let state = state && (ty.dtype.is_float() || changed.iter().any(|name| name == own));
                    let kinds = [("constants", &constants), ("weights", &weights)];
                    let payload = kinds.into_iter().find_map(|(kind, all)| Some((kind, all.config.get(own)?)));
                    let stored = match payload.filter(|_| !state && ty.elements() <= MAX_CONSTANT) {
                        Some((kind, payload)) => archive.stored(kind, own, payload)?,
                        None => None,
                    };
                    match stored.filter(|stored| stored.ty == ty) {
                        Some(stored) => {
                            let value = self.graph.constant(Literal::dense(ty, stored.values()));
                            self.memory.fresh(value)
                        }
                        None => {
                            self.buffers.push(own.to_string());
                            self.leaf(Op::Input(Input { name: own.to_string(), ty: ty.clone() }), ty)
                        }
                    }
                }
            };
            let item = if meta.is_complex() { Item::Complex(tensor) } else { Item::Tensor(tensor) };
            environment.insert(name.to_string(), item);
        }
        Ok(())
    }

    /// Adds an argument that is not a tensor: a number from the trace, or a symbol.
    fn other_input(&mut self, kind: &str, spec: &Value, environment: &mut Environment) {
        let argument = match kind {
            "constant_input" => spec.get("value"),
            _ => spec.get("arg"),
        };
        let Some(argument) = argument.and_then(|a| serde_json::from_value::<Argument>(a.clone()).ok()) else { return };
        let name = spec.get("name").and_then(Value::as_str).or(argument.name());
        if let Some(name) = name {
            let item = match kind {
                "constant_input" => Call::item(&argument, environment).unwrap_or(Item::Opaque),
                // A symbol that is itself an input has the value of its declaration.
                _ => self.sizes.get(name).map_or(Item::Opaque, |&n| Item::Int(n)),
            };
            environment.insert(name.to_string(), item);
        }
    }

    fn leaf(&mut self, op: Op, ty: TensorType) -> Tensor {
        let value = self.graph.append(Node { op, operands: Vec::new(), ty, batch_dims: 0, name: String::new() });
        self.memory.fresh(value)
    }

    /// True if a value follows from a trained parameter through floats only.
    pub fn is_trained(&mut self, value: ValueId) -> bool {
        for v in self.trained.len()..self.graph.len() {
            let node = &self.graph.nodes[v];
            let of_trained = node.operands.iter().any(|o| self.trained[o.index()]);
            let flows = node.ty.dtype.is_float() && !matches!(node.op, Op::Unary(Unary::StopGradient));
            self.trained.push(self.graph.is_trained(ValueId(v as u32)) || (of_trained && flows));
        }
        self.trained[value.index()]
    }

    /// Converts the nodes of a graph, and returns its outputs.
    pub fn run(&mut self, graph: &schema::Graph, mut environment: Environment) -> Result<Vec<Item>, ImportError> {
        for node in &graph.nodes {
            self.operations += 1;
            if self.operations > MAX_OPERATIONS {
                return Err(ImportError::TooManyOperations { limit: MAX_OPERATIONS });
            }
            let before = self.graph.len();
            match self.node(graph, node, &mut environment) {
                Ok(()) => {}
                Err(Reject::Stop(error)) => return Err(error),
                Err(reject) => {
                    let mut given = node.inputs.iter().filter_map(|i| Call::item(&i.arg, &environment).ok());
                    let follows = given.any(|item| self.is_doubtful(&item));
                    match reject {
                        Reject::Invalid(_) | Reject::Unsupported(SIZE_OF_DATA) if follows => self.consequences += 1,
                        reject => self.note(node, reject),
                    }
                    // Later nodes are checked too, with results of the declared types.
                    self.stand_ins(graph, node, &mut environment);
                }
            }
            let name = origin(node);
            self.graph.nodes[before..].iter_mut().filter(|n| n.name.is_empty()).for_each(|n| n.name.clone_from(&name));
        }
        Ok(graph.outputs.iter().map(|o| Call::item(o, &environment).unwrap_or(Item::Opaque)).collect())
    }

    fn node(
        &mut self,
        graph: &schema::Graph,
        node: &schema::Node,
        environment: &mut Environment,
    ) -> Result<(), Reject> {
        let mut arguments = Vec::with_capacity(node.inputs.len());
        let (name, lowering) = table::find(&node.target);
        for argument in &node.inputs {
            arguments.push((argument.name.as_str(), Call::item(&argument.arg, environment)?));
        }
        let outputs = output_names(&node.outputs);
        if !self.marked.symbols.is_empty() {
            let is_marked = |name: &str| {
                let sizes = graph.tensor_values.get(name).map_or(&[][..], |meta| &meta.sizes);
                sizes.iter().any(|size| match size {
                    Size::Expr(e) => sizes::symbols(&e.expr_str).iter().any(|s| self.marked.symbols.contains(s)),
                    Size::Int(_) => false,
                })
            };
            let taken = node.inputs.iter().any(|input| tensor_names(&input.arg).iter().any(|name| is_marked(name)));
            let keeps = outputs.iter().flatten().all(|name| is_marked(name));
            self.marked.taken = taken;
            if taken && !super::ops::marked::may_take(name, keeps) {
                return Err(super::call::data_dependent());
            }
        }
        let metas = outputs.iter().map(|name| graph.tensor_values.get(name.as_deref()?));
        let complex = metas.clone().flatten().any(TensorMeta::is_complex);
        let declared: Vec<Option<TensorType>> = metas.map(|meta| meta.and_then(|meta| self.declared(meta))).collect();
        let strides = |item: &Item, name: &str| is_row_major(graph, node, name) && matches!(item, Item::Tensor(_));
        let row_major = arguments.iter().any(|(name, item)| *name == "self" && strides(item, name));
        let number = outputs.first().and_then(|name| match graph.sym_int_values.get(name.as_deref()?)? {
            Size::Int(n) => Some(*n),
            Size::Expr(e) => sizes::evaluate(&e.expr_str, &self.sizes),
        });
        let mut call = Call { to: self, name, arguments, declared: declared.clone(), number, row_major };
        let items = match lowering {
            _ if call.is_mapped() => call.mapped_results(lowering)?,
            _ if complex || call.is_complex() => call.complex_results(lowering)?,
            Some(lowering) => call.results(lowering)?,
            None => return Err(Reject::Unsupported("")),
        };
        if items.is_empty() {
            return Ok(());
        }
        let given = outputs.iter().filter(|o| o.is_some()).count();
        if items.len() < given {
            return Err(ProblemKind::ResultCount { declared: given, found: items.len() }.into());
        }
        for ((name, item), declared) in outputs.into_iter().zip(items).zip(declared) {
            let Some(name) = name else { continue };
            if let (Item::Tensor(tensor) | Item::Complex(tensor), Some(declared)) = (&item, declared) {
                let value = self.memory.read(&mut self.graph, *tensor)?;
                let found = self.graph.ty(value);
                if *found != declared {
                    return Err(ProblemKind::ResultType { declared, found: found.clone() }.into());
                }
            } else if let (Item::Tensor(tensor), Some(meta)) = (&item, graph.tensor_values.get(&name))
                && meta.sizes.iter().any(|size| self.unknown_symbol(size).is_some())
            {
                // A data-dependent size is the number of all rows.
                let value = self.memory.read(&mut self.graph, *tensor)?;
                for (size, &found) in meta.sizes.iter().zip(self.graph.shape(value)) {
                    if let Some(symbol) = self.unknown_symbol(size) {
                        self.sizes.insert(symbol.clone(), found as i64);
                        self.marked.symbols.insert(symbol);
                    }
                }
            }
            environment.insert(name, item);
        }
        Ok(())
    }

    /// The symbol of a size, if its value is still unknown.
    fn unknown_symbol(&self, size: &Size) -> Option<String> {
        match size {
            Size::Expr(e) => sizes::only_symbol(&e.expr_str).filter(|s| !self.sizes.contains_key(s)),
            Size::Int(_) => None,
        }
    }

    /// Replaces results that could not be computed with leaves of the declared types. Such a graph is never
    /// returned.
    fn stand_ins(&mut self, graph: &schema::Graph, node: &schema::Node, environment: &mut Environment) {
        for name in output_names(&node.outputs).into_iter().flatten() {
            let declared = graph.tensor_values.get(&name).and_then(|meta| self.declared(meta));
            let complex = graph.tensor_values.get(&name).is_some_and(TensorMeta::is_complex);
            let item = match declared {
                Some(ty) => {
                    let tensor = self.leaf(Op::Input(Input { name: name.clone(), ty: ty.clone() }), ty);
                    self.stand_ins.insert(ValueId(self.graph.len() as u32 - 1));
                    if complex { Item::Complex(tensor) } else { Item::Tensor(tensor) }
                }
                None => Item::Missing,
            };
            environment.insert(name, item);
        }
    }

    /// True if an item depends on the result of an op that could not be converted.
    fn is_doubtful(&self, item: &Item) -> bool {
        match item {
            Item::Missing => true,
            Item::List(items) => items.iter().any(|item| self.is_doubtful(item)),
            Item::Tensor(tensor) | Item::Complex(tensor) => {
                let mut seen = BTreeSet::new();
                let mut pending = vec![self.memory.last_value(*tensor)];
                while let Some(at) = pending.pop() {
                    if self.stand_ins.contains(&at) {
                        return true;
                    }
                    if seen.insert(at) {
                        pending.extend(&self.graph.node(at).operands);
                    }
                }
                false
            }
            _ => false,
        }
    }

    fn note(&mut self, node: &schema::Node, reject: Reject) {
        const PLACES: usize = 3;
        let place = place(node);
        match reject {
            Reject::Unsupported(special) => {
                let special = if special.is_empty() { String::new() } else { format!(" ({special})") };
                let name = format!("{}{special}", node.target);
                match self.unsupported.iter_mut().find(|entry| entry.name == name) {
                    Some(entry) => {
                        entry.count += 1;
                        if entry.places.len() < PLACES {
                            entry.places.push(place);
                        }
                    }
                    None => self.unsupported.push(Unsupported { name, count: 1, places: vec![place] }),
                }
            }
            Reject::Invalid(kind) => self.problems.push(Problem { place, op: node.target.clone(), kind }),
            Reject::Stop(_) => {}
        }
    }

    fn finish(
        mut self,
        program: &Program,
        outputs: Vec<Item>,
        open_sizes: Vec<OpenSize>,
    ) -> Result<Imported, ImportError> {
        if !self.unsupported.is_empty() || !self.problems.is_empty() {
            let Converter { unsupported, problems, consequences, .. } = self;
            let guessed = open_sizes.into_iter().filter(|size| size.chosen).collect();
            return Err(ImportError::Operations { unsupported, problems, consequences, guessed });
        }
        let names = result_names(program);
        let specs = &program.graph_module.signature.output_specs;
        let (mut values, mut results) = (Vec::new(), Vec::new());
        for (index, (spec, item)) in specs.iter().zip(outputs).enumerate() {
            let kind = spec.iter().find(|(_, value)| !value.is_null()).map(|(kind, _)| kind.as_str());
            let kind = kind.unwrap_or_default();
            if let ("user_output" | "loss_output", Item::Tensor(tensor) | Item::Complex(tensor)) = (kind, item) {
                let read = self.memory.read(&mut self.graph, tensor);
                let unknown = "it may or may not share memory with a tensor that was changed in place";
                values.push(read.map_err(|_| ImportError::Output { index, problem: unknown })?);
                let user = specs[..index].iter().filter(|s| s.contains_key("user_output")).count();
                results.push(match kind {
                    "loss_output" => Some("loss".to_string()),
                    _ => names.get(user).cloned(),
                });
            }
        }
        if values.is_empty() {
            return Err(ImportError::NoResults);
        }
        self.graph.outputs = values;
        super::fold::uniform(&mut self.graph);
        let (graph, map) = without_unused(&self.graph, &self.user_inputs);
        let user_inputs = self.user_inputs.iter().filter_map(|v| map[v.index()]).collect();
        let inputs: Vec<&str> = graph.inputs().map(|(_, name)| name).collect();
        let buffers = self.buffers.into_iter().filter(|b| inputs.contains(&b.as_str())).collect();
        let newer = Some(program.schema_version.major).filter(|&major| major > schema::NEWEST);
        let decomposed = !program.verifiers.is_empty() && !program.verifiers.iter().any(|v| v == "TRAINING");
        Ok(Imported { user_inputs, buffers, results, open_sizes, decomposed, newer, graph })
    }
}

/// Removes nodes that no output needs. Unread leaves are removed too, unless callers provide them.
fn without_unused(graph: &Graph, user_inputs: &[ValueId]) -> (Graph, Vec<Option<ValueId>>) {
    let mut live = vec![false; graph.len()];
    graph.outputs.iter().chain(user_inputs).for_each(|o| live[o.index()] = true);
    for v in graph.values().rev() {
        if live[v.index()] {
            graph.node(v).operands.iter().for_each(|o| live[o.index()] = true);
        }
    }
    let mut to = Graph { name: graph.name.clone(), ..Default::default() };
    let mut map: Vec<Option<ValueId>> = vec![None; graph.len()];
    for v in graph.values().filter(|v| live[v.index()]) {
        let node = graph.node(v);
        let operands = node.operands.iter().filter_map(|o| map[o.index()]).collect();
        map[v.index()] = Some(to.append(Node { operands, ..node.clone() }));
    }
    to.outputs = graph.outputs.iter().filter_map(|o| map[o.index()]).collect();
    (to, map)
}

/// The names that a node gives its results, flattened; `None` for results that are not values.
fn output_names(outputs: &[Argument]) -> Vec<Option<String>> {
    fn named(value: &Value) -> Option<&str> {
        value.get("name").or_else(|| value.get("as_name")).and_then(Value::as_str)
    }
    let name = |value: &Value| named(value).or_else(|| named(value.get("as_tensor")?)).map(str::to_string);
    let mut names = Vec::new();
    for output in outputs {
        match output.parts() {
            Some((_, Value::Array(all))) => names.extend(all.iter().map(name)),
            Some((_, value)) => names.push(name(value)),
            None => names.push(None),
        }
    }
    names
}

/// The names of the tensors in an argument.
fn tensor_names(argument: &Argument) -> Vec<&str> {
    match argument.parts() {
        Some(("as_tensor", value)) => value.get("name").and_then(Value::as_str).into_iter().collect(),
        Some(("as_tensors" | "as_optional_tensors", Value::Array(all))) => {
            let one = |value| {
                Value::get(value, "name").or_else(|| value.get("as_tensor")?.get("name")).and_then(Value::as_str)
            };
            all.iter().filter_map(one).collect()
        }
        _ => Vec::new(),
    }
}

/// True if the memory of an argument is in row-major order without gaps.
fn is_row_major(graph: &schema::Graph, node: &schema::Node, argument: &str) -> bool {
    let found = node.inputs.iter().find(|i| i.name == argument).and_then(|i| i.arg.name());
    let Some(meta) = found.and_then(|name| graph.tensor_values.get(name)) else { return false };
    // The example's sizes suffice, since the order is the same for all sizes.
    let number = |size: &Size| match size {
        Size::Int(n) => Some(*n),
        Size::Expr(e) => e.hint(),
    };
    let numbers = |sizes: &[Size]| -> Option<Vec<i64>> { sizes.iter().map(number).collect() };
    let (Some(shape), Some(strides)) = (numbers(&meta.sizes), numbers(&meta.strides)) else { return false };
    let mut expected: i64 = 1;
    shape.len() == strides.len()
        && shape.iter().zip(&strides).rev().all(|(&n, &stride)| {
            let fits = n == 1 || stride == expected;
            expected = expected.saturating_mul(n);
            fits
        })
}

/// The module that a node belongs to, with the name of its op: `transformer.h.0.attn`.
fn origin(node: &schema::Node) -> String {
    // Entries are `key,path,type`, with the innermost last.
    let stack = node.metadata.get("nn_module_stack").map_or("", String::as_str);
    let path = stack.rsplit(';').next().and_then(|last| last.split(',').nth(1)).unwrap_or("");
    let op = node.target.trim_start_matches("torch.ops.").trim_start_matches("aten.");
    let op = op.split('.').next().unwrap_or(op);
    if path.is_empty() { op.to_string() } else { format!("{path}/{op}") }
}

fn place(node: &schema::Node) -> String {
    let first = output_names(&node.outputs).into_iter().flatten().next();
    let module = origin(node);
    match first {
        Some(name) => format!("{name} ({module})"),
        None => module,
    }
}

/// Keys of the model's result, if it is a dictionary or a named structure of tensors.
fn result_names(program: &Program) -> Vec<String> {
    let calls = &program.graph_module.module_call_graph;
    let root = calls.iter().find(|call| call.fqn.is_empty()).and_then(|call| call.signature.as_ref());
    let Some(signature) = root else { return Vec::new() };
    let Ok(Value::Array(parts)) = serde_json::from_str::<Value>(&signature.out_spec) else { return Vec::new() };
    let Some(spec) = parts.get(1) else { return Vec::new() };
    let keys =
        spec.get("context").and_then(Value::as_str).and_then(|text| serde_json::from_str::<Vec<String>>(text).ok());
    let leaf = |child: &Value| child.get("children_spec").and_then(Value::as_array).is_some_and(Vec::is_empty);
    let flat = spec.get("children_spec").and_then(Value::as_array).is_some_and(|all| all.iter().all(leaf));
    keys.filter(|_| flat).unwrap_or_default()
}

/// The open sizes of a program's inputs, with their values.
fn open_sizes(program: &Program, options: &Options) -> Result<Vec<OpenSize>, ImportError> {
    let graph = &program.graph_module.graph;
    let mut found: BTreeMap<String, OpenSize> = BTreeMap::new();
    let mut hints: BTreeMap<String, i64> = BTreeMap::new();
    for input in graph.inputs.iter().filter_map(Argument::name) {
        let Some(meta) = graph.tensor_values.get(input) else { continue };
        for (dim, size) in meta.sizes.iter().enumerate() {
            let Size::Expr(expression) = size else { continue };
            let only = sizes::only_symbol(&expression.expr_str);
            for symbol in sizes::symbols(&expression.expr_str) {
                let range = program.range_constraints.get(&symbol);
                let entry = found.entry(symbol.clone()).or_insert_with(|| OpenSize {
                    symbol,
                    value: 0,
                    dims: Vec::new(),
                    chosen: false,
                    least: range.and_then(|r| r.min_val),
                    most: range.and_then(|r| r.max_val),
                });
                if only.as_ref() == Some(&entry.symbol) {
                    entry.dims.push((input.to_string(), dim));
                    if let Some(hint) = expression.hint() {
                        hints.entry(entry.symbol.clone()).or_insert(hint);
                    }
                }
            }
        }
    }
    let mut all: Vec<OpenSize> = found.into_values().collect();
    for size in &mut all {
        let hint = hints.get(&size.symbol).and_then(|&h| u64::try_from(h).ok());
        // PyTorch specialises on sizes of one, so files often declare a minimum of two. It is not significant.
        let least = size.least.unwrap_or(2).max(2).unsigned_abs();
        (size.value, size.chosen) = (hint.unwrap_or(least), hint.is_none());
    }
    // A data-dependent size belongs to no input, but a value may be given for it too.
    for (name, value) in &options.sizes {
        let range = program.range_constraints.get(name).filter(|_| !all.iter().any(|size| size.symbol == *name));
        if let Some(range) = range {
            let (least, most) = (range.min_val, range.max_val);
            let (symbol, dims) = (name.clone(), Vec::new());
            all.push(OpenSize { symbol, value: *value, dims, chosen: false, least, most });
        }
    }
    for (name, value) in &options.sizes {
        let Some(size) = all.iter_mut().find(|size| size.is_called(name)) else {
            let known = all.iter().map(OpenSize::to_string).collect();
            return Err(ImportError::UnknownSize { name: name.as_str().into(), known });
        };
        let inside = i64::try_from(*value).is_ok_and(|v| {
            v > 0 && size.least.is_none_or(|least| v >= least) && size.most.is_none_or(|most| v <= most)
        });
        if !inside {
            let (least, most) = (size.least, size.most);
            return Err(ImportError::SizeRange { name: name.as_str().into(), value: *value, least, most });
        }
        (size.value, size.chosen) = (*value, false);
    }
    Ok(all)
}

/// The names of buffers that the program changes.
fn changed_buffers(program: &Program) -> Vec<String> {
    let specs = &program.graph_module.signature.output_specs;
    let changed = |spec: &serde_json::Map<String, Value>| {
        Some(spec.get("buffer_mutation")?.get("buffer_name")?.as_str()?.to_string())
    };
    specs.iter().filter_map(changed).collect()
}
