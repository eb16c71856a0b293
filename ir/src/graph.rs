//! The graph: a list of nodes in topological order, each one op with one result.
//!
//! The node that makes a value names it, so a `ValueId` is the node's position. Leaves are nodes too. Passes build new
//! graphs by appending. Nothing is edited in place.

use crate::dtype::DType;
use crate::literal::Literal;
use crate::mesh::{AxisId, Mesh};
use crate::op::{
    Binary, BroadcastInDim, Compare, Convert, Direction, Op, Operator, Reduce, Reducer, Reshape, Select, ShapeError,
    Transpose, Unary,
};
use crate::rule::ShardingRule;
use crate::sharding::Sharding;
use crate::types::TensorType;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A value: the result of the node at this position. It is written as `%12`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ValueId(pub u32);

impl ValueId {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for ValueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "%{}", self.0)
    }
}

/// One op applied to earlier values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    pub op: Op,
    pub operands: Vec<ValueId>,
    pub ty: TensorType,
    /// The dimensions (bit `i` for dimension `i`) whose size is proportional to the batch.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub batch_dims: u32,
    /// The origin of the op in the model, e.g. `jit(gpt)/dot_general`. Empty if unknown.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
}

fn is_zero(bits: &u32) -> bool {
    *bits == 0
}

/// A computation. `outputs[0]` of a training graph is its loss.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize)]
pub struct Graph {
    pub name: String,
    pub nodes: Vec<Node>,
    pub outputs: Vec<ValueId>,
    /// The number of samples in the batch that the shapes are written for. 0 if the graph has no batch.
    #[serde(default)]
    pub batch: u64,
    /// The layouts that the model's author asks for, in ascending order of values.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pins: Vec<Pin>,
}

impl Graph {
    /// The values that are summed over the microbatches of a step before its first microbatch runs (`Microbatches`).
    pub fn totals(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.values().filter(|&v| self.is_total(v))
    }

    pub fn is_total(&self, v: ValueId) -> bool {
        matches!(self.node(v).op, Op::Microbatches(op) if op.is_total())
    }

    /// Errors for totals that depend on a parameter or on another total. These are not known before the first
    /// microbatch runs.
    fn totals_too_late(&self) -> Vec<GraphError> {
        if self.totals().next().is_none() {
            return Vec::new();
        }
        let trained = self.depends_on(|v| matches!(self.node(v).op, Op::Parameter(_)));
        let totalled = self.depends_on(|v| self.is_total(v));
        let late = |node: ValueId| {
            let operand = self.node(node).operands[0].index();
            let what = match (trained[operand], totalled[operand]) {
                (true, _) => "a parameter",
                (_, true) => "another total",
                _ => return None,
            };
            Some(GraphError::Total { node, op: self.node(node).op.name(), what })
        };
        self.totals().filter_map(late).collect()
    }
}

/// The layout that a model asks for one of its values, on a mesh of its own.
///
/// `%3 on mesh<data=2, model=4>: [{data}, {?}]` splits dimension 0 over two devices and leaves dimension 1 open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pin {
    pub value: ValueId,
    /// Names and sizes of the axes, major first.
    pub mesh: Vec<(String, u64)>,
    /// One entry for each dimension of the value.
    pub dims: Vec<PinnedDim>,
}

/// The layout that a pin asks for one dimension.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PinnedDim {
    /// The axes that split it, major first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub axes: Vec<String>,
    /// True if further axes may split it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub open: bool,
}

impl Pin {
    /// Returns true if a layout on another mesh satisfies the pin.
    ///
    /// If that mesh has all axes of the pin, by name and size, the layout must use the same axes. Otherwise the meshes
    /// have different axes, so only the number of contiguous parts of each dimension counts. It must equal the number
    /// that the pin asks for, or be a multiple of it if the dimension is open.
    pub fn allows(&self, layout: &Sharding, mesh: &Mesh) -> bool {
        let size = |name: &String| self.mesh.iter().find(|(axis, _)| axis == name).map_or(1, |(_, size)| *size);
        let same = |(name, size): &(String, u64)| mesh.find(name).is_some_and(|axis| mesh.size(axis) == *size);
        let by_name = self.mesh.iter().all(same);
        self.dims.iter().zip(&layout.dims).all(|(pinned, dim)| {
            let wanted: u64 = pinned.axes.iter().map(size).product();
            let axes: Vec<AxisId> = dim.axes().collect();
            let parts = mesh.product(&axes);
            let contiguous = dim.segments().len() == 1 || parts == 1;
            let enough = if pinned.open { parts.is_multiple_of(wanted.max(1)) } else { parts == wanted };
            let named = pinned.axes.iter().filter(|name| size(name) > 1).filter_map(|name| mesh.find(name));
            enough && (contiguous || wanted == 1) && (!by_name || named.into_iter().all(|axis| axes.contains(&axis)))
        })
    }
}

/// An error in a graph, found by [`Graph::verify`].
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GraphError {
    #[error("node {node}: operand {operand} is not defined before it")]
    Order { node: ValueId, operand: ValueId },
    #[error("node {node} ({op}): {error}")]
    Shape { node: ValueId, op: &'static str, error: ShapeError },
    #[error("node {node} ({op}): declared {declared}, but the op gives {inferred}")]
    Type { node: ValueId, op: &'static str, declared: TensorType, inferred: TensorType },
    #[error("output {output} is not defined")]
    Output { output: ValueId },
    #[error("two leaves are named '{name}'")]
    DuplicateName { name: String },
    #[error("the graph has no outputs")]
    NoOutputs,
    #[error("{op} {node} depends on {what}, but must be known before the first microbatch is worked on")]
    Total { node: ValueId, op: &'static str, what: &'static str },
    #[error("pin of {value}: {problem}")]
    Pin { value: ValueId, problem: &'static str },
}

impl Graph {
    pub fn new(name: impl Into<String>) -> Self {
        Graph { name: name.into(), ..Default::default() }
    }

    /// Appends a node after checking that the op accepts these operands.
    pub fn push(&mut self, op: Op, operands: &[ValueId]) -> Result<ValueId, ShapeError> {
        let ty = {
            let types: Vec<&TensorType> = operands.iter().map(|&v| self.ty(v)).collect();
            op.infer(&types)?
        };
        Ok(self.append(Node { op, operands: operands.to_vec(), ty, batch_dims: 0, name: String::new() }))
    }

    /// Adds a pin unless the graph has the same one already.
    pub fn pin(&mut self, pin: Pin) {
        if !self.pins.contains(&pin) {
            let at = self.pins.partition_point(|known| known.value <= pin.value);
            self.pins.insert(at, pin);
        }
    }

    /// The pins of a value.
    pub fn pins_of(&self, value: ValueId) -> &[Pin] {
        let range = |edge: fn(ValueId, ValueId) -> bool| self.pins.partition_point(|pin| edge(pin.value, value));
        &self.pins[range(|pin, value| pin < value)..range(|pin, value| pin <= value)]
    }

    /// A graph in which every pinned value can take any layout. A pinned value that is neither elementwise nor a
    /// parameter gets a conversion to its own type behind it. That op changes nothing but can change the layout.
    pub fn with_free_pins(&self) -> Graph {
        let free = |v: ValueId| self.node(v).op.is_elementwise() || matches!(self.node(v).op, Op::Parameter(_));
        if self.pins.iter().all(|pin| free(pin.value)) {
            return self.clone();
        }
        let mut to = Graph { name: self.name.clone(), batch: self.batch, ..Default::default() };
        let mut map = Vec::with_capacity(self.len());
        for v in self.values() {
            let mut node = self.node(v).clone();
            node.operands.iter_mut().for_each(|o| *o = map[o.index()]);
            let (dtype, batch_dims, name) = (node.ty.dtype, node.batch_dims, node.name.clone());
            let mut value = to.append(node);
            if !self.pins_of(v).is_empty() && !free(v) {
                value = to.emit(Op::Convert(crate::op::Convert { dtype }), &[value]);
                to.nodes[value.index()].batch_dims = batch_dims;
                to.nodes[value.index()].name = name;
            }
            map.push(value);
        }
        to.outputs = self.outputs.iter().map(|o| map[o.index()]).collect();
        to.take_pins(self, |v| Some(map[v.index()]));
        to
    }

    /// Copies the pins of another graph, whose values `map` translates. Pins of values without a counterpart are
    /// dropped.
    pub fn take_pins(&mut self, from: &Graph, map: impl Fn(ValueId) -> Option<ValueId>) {
        for pin in &from.pins {
            if let Some(value) = map(pin.value) {
                self.pin(Pin { value, ..pin.clone() });
            }
        }
    }

    /// Appends a node without checks.
    pub fn append(&mut self, node: Node) -> ValueId {
        self.nodes.push(node);
        ValueId((self.nodes.len() - 1) as u32)
    }

    /// [`Graph::push`] for ops that a pass derives from a verified graph.
    ///
    /// # Panics
    /// If the op does not accept these operands. That is an error of the pass, not of the user.
    pub fn emit(&mut self, op: Op, operands: &[ValueId]) -> ValueId {
        let types: Vec<&TensorType> = operands.iter().map(|&v| self.ty(v)).collect();
        match op.infer(&types) {
            Ok(ty) => self.append(Node { op, operands: operands.to_vec(), ty, batch_dims: 0, name: String::new() }),
            Err(error) => {
                let types: Vec<String> = types.iter().map(|ty| ty.to_string()).collect();
                panic!("a pass emitted {op:?} on {types:?}, but it {error}")
            }
        }
    }

    pub fn node(&self, value: ValueId) -> &Node {
        &self.nodes[value.index()]
    }

    pub fn ty(&self, value: ValueId) -> &TensorType {
        &self.nodes[value.index()].ty
    }

    pub fn shape(&self, value: ValueId) -> &[u64] {
        &self.nodes[value.index()].ty.shape
    }

    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// All values in order.
    pub fn values(&self) -> impl DoubleEndedIterator<Item = ValueId> + use<> {
        (0..self.nodes.len() as u32).map(ValueId)
    }

    pub fn operand_types(&self, value: ValueId) -> Vec<&TensorType> {
        self.node(value).operands.iter().map(|&v| self.ty(v)).collect()
    }

    /// The sharding rule of a node.
    pub fn rule(&self, value: ValueId) -> ShardingRule {
        let node = self.node(value);
        node.op.rule(&self.operand_types(value), &node.ty)
    }

    /// The floating-point operations of a node.
    pub fn flop(&self, value: ValueId) -> u64 {
        let node = self.node(value);
        node.op.flop(&self.operand_types(value), &node.ty)
    }

    /// The element operations that evaluating a node takes.
    pub fn work(&self, value: ValueId) -> u64 {
        let node = self.node(value);
        node.op.work(&self.operand_types(value), &node.ty)
    }

    /// Returns true if a value is a trained parameter.
    pub fn is_trained(&self, value: ValueId) -> bool {
        matches!(&self.node(value).op, Op::Parameter(p) if !p.frozen)
    }

    /// Returns true if a value is a parameter that training does not change.
    pub fn is_frozen(&self, value: ValueId) -> bool {
        matches!(&self.node(value).op, Op::Parameter(p) if p.frozen)
    }

    /// The trained parameters in order, with their names.
    pub fn trained_parameters(&self) -> impl Iterator<Item = (ValueId, &str)> {
        self.parameters().filter(|(v, _)| self.is_trained(*v))
    }

    /// The parameters in order, frozen ones included, with their names.
    pub fn parameters(&self) -> impl Iterator<Item = (ValueId, &str)> {
        self.values().filter_map(|v| match &self.node(v).op {
            Op::Parameter(p) => Some((v, p.name.as_str())),
            _ => None,
        })
    }

    /// The inputs in order, with their names.
    pub fn inputs(&self) -> impl Iterator<Item = (ValueId, &str)> {
        self.values().filter_map(|v| match &self.node(v).op {
            Op::Input(p) => Some((v, p.name.as_str())),
            _ => None,
        })
    }

    /// The nodes that use each value, in order. A node that uses a value twice is listed twice.
    pub fn users(&self) -> Vec<Vec<ValueId>> {
        let mut users = vec![Vec::new(); self.len()];
        for v in self.values() {
            for operand in &self.node(v).operands {
                users[operand.index()].push(v);
            }
        }
        users
    }

    /// For each value, true if `is_source` holds for it or for a value that it depends on.
    pub fn depends_on(&self, is_source: impl Fn(ValueId) -> bool) -> Vec<bool> {
        let mut depends = vec![false; self.len()];
        for v in self.values() {
            depends[v.index()] = is_source(v) || self.node(v).operands.iter().any(|o| depends[o.index()]);
        }
        depends
    }

    /// Returns all errors: order, shapes, declared types, outputs, names, totals and pins.
    pub fn verify(&self) -> Vec<GraphError> {
        let mut errors = Vec::new();
        let mut names = std::collections::BTreeSet::new();
        for v in self.values() {
            let node = self.node(v);
            if let Some(&operand) = node.operands.iter().find(|o| o.0 >= v.0) {
                errors.push(GraphError::Order { node: v, operand });
                continue;
            }
            match node.op.infer(&self.operand_types(v)) {
                Err(error) => errors.push(GraphError::Shape { node: v, op: node.op.name(), error }),
                Ok(inferred) if inferred != node.ty => {
                    errors.push(GraphError::Type { node: v, op: node.op.name(), declared: node.ty.clone(), inferred })
                }
                Ok(_) => {}
            }
            if let Op::Parameter(crate::op::Parameter { name, .. }) | Op::Input(crate::op::Input { name, .. }) =
                &node.op
                && !names.insert(name.as_str())
            {
                errors.push(GraphError::DuplicateName { name: name.clone() });
            }
        }
        // Totals can be checked only if every operand is defined before its users.
        if errors.is_empty() {
            errors.extend(self.totals_too_late());
        }
        if self.outputs.is_empty() {
            errors.push(GraphError::NoOutputs);
        }
        for &output in &self.outputs {
            if output.index() >= self.len() {
                errors.push(GraphError::Output { output });
            }
        }
        for pin in &self.pins {
            let value = pin.value;
            let mut seen = std::collections::BTreeSet::new();
            let known = |axis: &String| pin.mesh.iter().any(|(name, _)| name == axis);
            let problem = match self.nodes.get(value.index()) {
                None => "the value is not defined",
                Some(node) if node.ty.rank() != pin.dims.len() => "it needs one entry for each dimension",
                Some(_) if pin.dims.iter().flat_map(|dim| &dim.axes).any(|axis| !known(axis)) => "an axis has no size",
                Some(_) if !pin.dims.iter().flat_map(|dim| &dim.axes).all(|axis| seen.insert(axis)) => {
                    "an axis splits two dimensions"
                }
                Some(_) => continue,
            };
            errors.push(GraphError::Pin { value, problem });
        }
        errors
    }
}

/// `%3 on mesh<data=2, model=4>: [{data}, {?}]`.
impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes: Vec<String> = self.mesh.iter().map(|(name, size)| format!("{name}={size}")).collect();
        write!(f, "{} on mesh<{}>: [", self.value, axes.join(", "))?;
        for (index, dim) in self.dims.iter().enumerate() {
            let open = dim.open.then_some("?");
            let axes: Vec<&str> = dim.axes.iter().map(String::as_str).chain(open).collect();
            write!(f, "{}{{{}}}", if index == 0 { "" } else { ", " }, axes.join(", "))?;
        }
        f.write_str("]")
    }
}

/// Shorthands for passes that emit ops. Like [`Graph::emit`], they expect operands that fit.
impl Graph {
    pub fn constant(&mut self, literal: Literal) -> ValueId {
        self.emit(Op::Constant(literal), &[])
    }

    /// A constant with the type of `like` and `value` in every element.
    pub fn splat_like(&mut self, like: ValueId, value: f64) -> ValueId {
        let ty = self.ty(like).clone();
        self.constant(Literal::splat(ty, value))
    }

    pub fn unary(&mut self, op: Unary, x: ValueId) -> ValueId {
        self.emit(Op::Unary(op), &[x])
    }

    pub fn add(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.emit(Op::Binary(Binary::Add), &[a, b])
    }

    pub fn sub(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.emit(Op::Binary(Binary::Subtract), &[a, b])
    }

    pub fn mul(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.emit(Op::Binary(Binary::Multiply), &[a, b])
    }

    pub fn div(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.emit(Op::Binary(Binary::Divide), &[a, b])
    }

    pub fn compare(&mut self, direction: Direction, a: ValueId, b: ValueId) -> ValueId {
        self.emit(Op::Compare(Compare { direction }), &[a, b])
    }

    pub fn select(&mut self, predicate: ValueId, on_true: ValueId, on_false: ValueId) -> ValueId {
        self.emit(Op::Select(Select {}), &[predicate, on_true, on_false])
    }

    /// Converts a value, or returns it unchanged if it has this type already.
    pub fn convert(&mut self, x: ValueId, dtype: DType) -> ValueId {
        if self.ty(x).dtype == dtype { x } else { self.emit(Op::Convert(Convert { dtype }), &[x]) }
    }

    /// Reshapes a value, or returns it unchanged if it has this shape already.
    pub fn reshape(&mut self, x: ValueId, shape: &[u64]) -> ValueId {
        if self.shape(x) == shape { x } else { self.emit(Op::Reshape(Reshape { shape: shape.to_vec() }), &[x]) }
    }

    /// Transposes a value, or returns it unchanged if the permutation is the identity.
    pub fn transpose(&mut self, x: ValueId, permutation: &[usize]) -> ValueId {
        if permutation.is_sorted() {
            return x;
        }
        self.emit(Op::Transpose(Transpose { permutation: permutation.to_vec() }), &[x])
    }

    /// Reduces a value, or returns it unchanged if `dims` is empty.
    pub fn reduce(&mut self, x: ValueId, reducer: Reducer, dims: &[usize]) -> ValueId {
        if dims.is_empty() { x } else { self.emit(Op::Reduce(Reduce { reducer, dims: dims.to_vec() }), &[x]) }
    }

    pub fn broadcast(&mut self, x: ValueId, shape: &[u64], dims: &[usize]) -> ValueId {
        if self.shape(x) == shape && dims.is_sorted() {
            return x;
        }
        self.emit(Op::BroadcastInDim(BroadcastInDim { shape: shape.to_vec(), dims: dims.to_vec() }), &[x])
    }

    pub fn broadcast_scalar(&mut self, x: ValueId, shape: &[u64]) -> ValueId {
        self.broadcast(x, shape, &[])
    }
}
