//! The `altiplano.graph` format: a graph as JSON, easy to write in any language.
//!
//! ```json
//! {"format": "altiplano.graph", "version": 1, "name": "mlp", "batch": 8,
//!  "nodes": [
//!   {"op": "input", "attributes": {"name": "x"}, "type": {"dtype": "f32", "shape": [8, 64]}, "batch_dims": [0]},
//!   {"op": "parameter", "attributes": {"name": "w"}, "type": {"dtype": "f32", "shape": [64, 128]}},
//!   {"op": "dot_general", "operands": [0, 1], "attributes": {"lhs_contract": [1], "rhs_contract": [0]}},
//!   {"op": "reduce", "operands": [2], "attributes": {"reducer": "sum", "dims": [0, 1]}, "name": "jit(mlp)/sum"}],
//!  "outputs": [3]}
//! ```
//!
//! A node is identified by its position. `operands` and `outputs` are positions, and operands come before their users.
//! `type` may be omitted from a node whose op and operands determine it (leaves, constants and iotas need it). If it is
//! given, attributes that repeat it (`shape` of a reshape, `dtype` of a convert) may be omitted.
//!
//! `batch_dims` are the dimensions whose size is proportional to `batch`. `name` is the origin of the node. A constant
//! has one `value` for all elements or a flat list of `values`, row major. Infinities and NaN are `"inf"`, `"-inf"` and
//! `"nan"`. Unknown keys are errors. The ops and their attributes are those of `docs/ops.md`, and
//! `docs/graph.schema.json` is a JSON Schema of the format.

/// The text of a JSON error without its position, for messages that begin with the position.
pub fn message(error: &serde_json::Error) -> String {
    if error.is_eof() {
        return "it ends here, in the middle of a value: perhaps it was not written to its end".to_string();
    }
    error.to_string().split(" at line ").next().unwrap_or_default().to_string()
}

/// The line and column of a JSON error, from 1.
pub fn place(error: &serde_json::Error) -> (usize, usize) {
    // The end of a file after a line break is in column 0 of the next line.
    (error.line(), error.column().max(1))
}

#[cfg(test)]
mod schema;
#[cfg(test)]
mod tests;

use crate::dtype::DType;
use crate::graph::{Graph, GraphError, Node, Pin, ValueId};
use crate::op::{Op, Operator, ShapeError};
use crate::text::attributes::{Attribute, attributes, hint, near, op_from};
use crate::text::{AttributeError, object, quoted};
use crate::types::TensorType;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The version that [`write`](write()) writes, and the newest that [`read`] reads.
pub(crate) const VERSION: u64 = 1;

const FORMAT: &str = "altiplano.graph";

/// The reason why a text is not a graph. A path such as `nodes[12].operands[1]` gives the position.
#[derive(Debug, thiserror::Error)]
pub enum JsonError {
    /// The message ends with the line and column.
    #[error("not JSON: {0}")]
    Syntax(#[source] serde_json::Error),
    #[error("format: expected \"altiplano.graph\"; this file is something else")]
    Format,
    #[error("version: this file has version {found}, but only versions up to {VERSION} can be read")]
    Version { found: u64 },
    #[error("{path}: expected {expected}")]
    Expected { path: String, expected: &'static str },
    #[error("{}: '{key}' is missing", at(.path))]
    Missing { path: String, key: &'static str },
    #[error("{}: there is no key '{key}' here{}", at(.path), hint(.nearest))]
    UnknownKey { path: String, key: String, nearest: Option<&'static str> },
    #[error("{path}: {error}")]
    Attributes { path: String, error: AttributeError },
    #[error("{path}: node {operand} does not come before node {node}; nodes must be listed after their operands")]
    Order { path: String, node: u32, operand: u64 },
    #[error("{path}: there is no node {output}; the last one is {last}")]
    Output { path: String, output: u64, last: usize },
    #[error("{path}: '{op}' {error}")]
    Shape { path: String, op: &'static str, error: ShapeError },
    #[error("{path}: '{op}' gives {inferred}, but the type says {declared}")]
    Type { path: String, op: &'static str, declared: TensorType, inferred: TensorType },
    #[error("{path}: {ty} is larger than any tensor can be")]
    TooLarge { path: String, ty: TensorType },
    #[error("{path}: node {first} is named '{name}' too; names of parameters and inputs must be distinct")]
    DuplicateName { path: String, name: String, first: usize },
    #[error("outputs: the graph has no outputs")]
    NoOutputs,
    #[error("{0}")]
    Graph(GraphError),
}

fn at(path: &str) -> &str {
    if path.is_empty() { "the file" } else { path }
}

/// Writes a graph, one node per line.
pub fn write(graph: &Graph) -> String {
    let mut text = format!(
        "{{\"format\":\"{FORMAT}\",\"version\":{VERSION},\"name\":{},\"batch\":{},\"nodes\":[",
        quoted(&graph.name),
        graph.batch
    );
    for (i, node) in graph.nodes.iter().enumerate() {
        text.push_str(if i == 0 { "\n" } else { ",\n" });
        text.push_str(&object_of(node));
    }
    let outputs: Vec<String> = graph.outputs.iter().map(|v| v.0.to_string()).collect();
    text.push_str(&format!("\n],\"outputs\":[{}]", outputs.join(",")));
    if !graph.pins.is_empty() {
        let pins: Vec<String> = graph.pins.iter().filter_map(|pin| serde_json::to_string(pin).ok()).collect();
        text.push_str(&format!(",\"pins\":[\n{}\n]", pins.join(",\n")));
    }
    text.push_str("}\n");
    text
}

fn object_of(node: &Node) -> String {
    let numbers = |ids: &mut dyn Iterator<Item = u64>| Value::Array(ids.map(Value::from).collect()).to_string();
    let mut fields = vec![format!("\"op\":{}", quoted(node.op.name()))];
    if !node.operands.is_empty() {
        fields.push(format!("\"operands\":{}", numbers(&mut node.operands.iter().map(|v| v.0 as u64))));
    }
    let all: Vec<Attribute> = attributes(&node.op, &node.ty);
    if !all.is_empty() {
        fields.push(format!("\"attributes\":{}", object(&all)));
    }
    let shape = numbers(&mut node.ty.shape.iter().copied());
    fields.push(format!("\"type\":{{\"dtype\":\"{}\",\"shape\":{shape}}}", node.ty.dtype));
    if node.batch_dims != 0 {
        let dims = numbers(&mut (0..32).filter(|i| node.batch_dims >> i & 1 == 1));
        fields.push(format!("\"batch_dims\":{dims}"));
    }
    if !node.name.is_empty() {
        fields.push(format!("\"name\":{}", quoted(&node.name)));
    }
    format!("{{{}}}", fields.join(","))
}

/// Reads a graph and verifies it.
///
/// ```
/// let text = r#"{"format": "altiplano.graph", "version": 1, "outputs": [1], "nodes": [
///     {"op": "input", "attributes": {"name": "x"}, "type": {"dtype": "f32", "shape": [8, 64]}},
///     {"op": "tanh", "operands": [0]}]}"#;
/// let graph = altiplano_ir::json::read(text)?;
/// assert_eq!(graph.nodes[1].ty.to_string(), "f32[8,64]");
///
/// let error = altiplano_ir::json::read(&text.replace("tanh", "tahn")).unwrap_err();
/// assert_eq!(error.to_string(), "nodes[1].op: there is no op 'tahn'; the nearest is 'tan'");
/// # Ok::<(), altiplano_ir::json::JsonError>(())
/// ```
pub fn read(text: &str) -> Result<Graph, JsonError> {
    let document: Value = serde_json::from_str(text).map_err(JsonError::Syntax)?;
    let root = Entry { path: String::new(), value: &document };
    if document.get("format").and_then(Value::as_str) != Some(FORMAT) {
        return Err(JsonError::Format);
    }
    let map = root.object("an object", &["format", "version", "name", "batch", "nodes", "outputs", "pins"])?;
    match root.required(map, "version")?.number()? {
        VERSION => {}
        found => return Err(JsonError::Version { found }),
    }
    let mut graph = Graph::new(root.optional(map, "name").map(|e| e.text()).transpose()?.unwrap_or_default());
    graph.batch = root.optional(map, "batch").map(|e| e.number()).transpose()?.unwrap_or(0);

    let mut names: BTreeMap<String, usize> = BTreeMap::new();
    for entry in root.required(map, "nodes")?.items()? {
        let node = read_node(&entry, &graph)?;
        if let Op::Parameter(crate::op::Parameter { name, .. }) | Op::Input(crate::op::Input { name, .. }) = &node.op
            && let Some(first) = names.insert(name.clone(), graph.len())
        {
            let path = format!("{}.attributes.name", entry.path);
            return Err(JsonError::DuplicateName { path, name: name.clone(), first });
        }
        graph.append(node);
    }
    for entry in root.required(map, "outputs")?.items()? {
        let output = entry.number()?;
        if output >= graph.len() as u64 {
            let last = graph.len().saturating_sub(1);
            return Err(JsonError::Output { path: entry.path, output, last });
        }
        graph.outputs.push(ValueId(output as u32));
    }
    if graph.outputs.is_empty() {
        return Err(JsonError::NoOutputs);
    }
    if let Some(pins) = root.optional(map, "pins") {
        for entry in pins.items()? {
            let pin: Pin = serde_json::from_value(entry.value.clone())
                .map_err(|_| entry.expected("a value, a mesh and a list of dimensions"))?;
            graph.pin(pin);
        }
    }
    match graph.verify().into_iter().next() {
        None => Ok(graph),
        Some(error) => Err(JsonError::Graph(error)),
    }
}

fn read_node(entry: &Entry<'_>, graph: &Graph) -> Result<Node, JsonError> {
    let map = entry.object("a node", &["op", "operands", "attributes", "type", "batch_dims", "name"])?;
    let op_entry = entry.required(map, "op")?;
    let op_name = op_entry.text()?;
    let declared = entry.optional(map, "type").map(|e| read_type(&e)).transpose()?;
    let empty = Map::new();
    let fields = match entry.optional(map, "attributes") {
        Some(e) => e.value.as_object().ok_or_else(|| e.expected("an object"))?,
        None => &empty,
    };
    let op = op_from(&op_name, fields, declared.as_ref()).map_err(|error| {
        let path = match &error {
            AttributeError::UnknownOp { .. } => op_entry.path.clone(),
            AttributeError::Expected { key, .. } => format!("{}.attributes.{key}", entry.path),
            AttributeError::Unknown { .. } | AttributeError::Missing { .. } => format!("{}.attributes", entry.path),
            AttributeError::MissingType { .. } | AttributeError::MissingTypeOr { .. } => entry.path.clone(),
        };
        JsonError::Attributes { path, error }
    })?;

    let mut operands = Vec::new();
    if let Some(list) = entry.optional(map, "operands") {
        for e in list.items()? {
            let operand = e.number()?;
            if operand >= graph.len() as u64 {
                return Err(JsonError::Order { path: e.path, node: graph.len() as u32, operand });
            }
            operands.push(ValueId(operand as u32));
        }
    }
    let types: Vec<&TensorType> = operands.iter().map(|&v| graph.ty(v)).collect();
    let inferred = op.infer(&types).map_err(|error| {
        let path = entry.path.clone();
        JsonError::Shape { path, op: op.name(), error }
    })?;
    if let Some(declared) = declared.filter(|d| *d != inferred) {
        return Err(JsonError::Type { path: format!("{}.type", entry.path), op: op.name(), declared, inferred });
    }
    let mut batch_dims = 0u32;
    if let Some(list) = entry.optional(map, "batch_dims") {
        for e in list.items()? {
            match e.number()? {
                dim if (dim as usize) < inferred.rank() => batch_dims |= 1 << dim,
                _ => return Err(e.expected("a dimension of the result")),
            }
        }
    }
    let name = entry.optional(map, "name").map(|e| e.text()).transpose()?.unwrap_or_default();
    Ok(Node { op, operands, ty: inferred, batch_dims, name })
}

fn read_type(entry: &Entry<'_>) -> Result<TensorType, JsonError> {
    let map = entry.object("a type", &["dtype", "shape"])?;
    let dtype = entry.required(map, "dtype")?;
    let Some(dtype) = dtype.value.as_str().and_then(DType::parse) else {
        return Err(dtype.expected("an element type such as \"f32\""));
    };
    let shape = entry.required(map, "shape")?.items()?.iter().map(Entry::number).collect::<Result<Vec<_>, _>>()?;
    let ty = TensorType::new(dtype, shape);
    if ty.check() { Ok(ty) } else { Err(JsonError::TooLarge { path: entry.path.clone(), ty }) }
}

/// A value of the document, with its path.
struct Entry<'a> {
    path: String,
    value: &'a Value,
}

impl<'a> Entry<'a> {
    fn expected(&self, expected: &'static str) -> JsonError {
        JsonError::Expected { path: at(&self.path).to_string(), expected }
    }

    /// The object here, which may only have `known` keys.
    fn object(&self, what: &'static str, known: &[&'static str]) -> Result<&'a Map<String, Value>, JsonError> {
        let map = self.value.as_object().ok_or_else(|| self.expected(what))?;
        match map.keys().find(|k| !known.contains(&k.as_str())) {
            None => Ok(map),
            Some(key) => Err(JsonError::UnknownKey {
                path: self.path.clone(),
                key: key.chars().take(80).collect(),
                nearest: near(key, known),
            }),
        }
    }

    fn optional(&self, map: &'a Map<String, Value>, key: &'static str) -> Option<Entry<'a>> {
        let path = if self.path.is_empty() { key.to_string() } else { format!("{}.{key}", self.path) };
        map.get(key).map(|value| Entry { path, value })
    }

    fn required(&self, map: &'a Map<String, Value>, key: &'static str) -> Result<Entry<'a>, JsonError> {
        self.optional(map, key).ok_or_else(|| JsonError::Missing { path: self.path.clone(), key })
    }

    fn items(&self) -> Result<Vec<Entry<'a>>, JsonError> {
        let items = self.value.as_array().ok_or_else(|| self.expected("a list"))?;
        Ok(items.iter().enumerate().map(|(i, value)| Entry { path: format!("{}[{i}]", self.path), value }).collect())
    }

    fn number(&self) -> Result<u64, JsonError> {
        self.value.as_u64().ok_or_else(|| self.expected("a whole number that is not negative"))
    }

    fn text(&self) -> Result<String, JsonError> {
        self.value.as_str().map(str::to_string).ok_or_else(|| self.expected("a string"))
    }
}
