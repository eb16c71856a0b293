//! The text form of graphs, with one node per line, for reading, searching and comparing.
//!
//! ```text
//! graph "mlp" batch=8 {
//!   %0: f32[8b,64] = input "x"
//!   %1: f32[64,128] = parameter "params['w']"
//!   %2: f32[8b,128] = dot_general(%0, %1) {"lhs_contract":[1],"rhs_contract":[0]} @"jit(mlp)/dot_general"
//!   %3: f32[] = reduce(%2) {"reducer":"sum","dims":[0,1]}
//! } -> (%3)
//! ```
//!
//! `8b` is a size that scales with the batch. Attributes are JSON, and those that follow from the type are omitted (see
//! `attributes`). `@` gives the origin of a node. [`parse`] reads back exactly what was printed.

pub(crate) mod attributes;
#[cfg(test)]
pub(crate) mod tests;

pub use attributes::AttributeError;

use crate::dtype::DType;
use crate::graph::{Graph, GraphError, Node, ValueId};
use crate::op::{Op, Operator};
use crate::types::{MAX_RANK, TensorType};
use serde_json::{Map, Value};
use std::fmt;

/// The problem of a text, and its place (lines and columns count from 1).
#[derive(Debug, thiserror::Error)]
#[error("line {line}, column {column}: {problem}")]
pub struct TextError {
    pub line: usize,
    pub column: usize,
    pub problem: TextProblem,
}

#[derive(Debug, thiserror::Error)]
pub enum TextProblem {
    #[error("expected {0}")]
    Expected(&'static str),
    #[error("expected {expected}: nodes are numbered in order")]
    Number { expected: ValueId },
    #[error("{0}")]
    Json(serde_json::Error),
    #[error("{0}")]
    Op(AttributeError),
    #[error("{0}")]
    Graph(GraphError),
}

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "graph {}", quoted(&self.name))?;
        if self.batch != 0 {
            write!(f, " batch={}", self.batch)?;
        }
        writeln!(f, " {{")?;
        for v in self.values() {
            write!(f, "  {v}: ")?;
            write_node(f, self.node(v))?;
            writeln!(f)?;
        }
        for pin in &self.pins {
            writeln!(f, "  pin {}", serde_json::to_string(pin).map_err(|_| fmt::Error)?)?;
        }
        write!(f, "}} -> (")?;
        write_list(f, &self.outputs)?;
        writeln!(f, ")")
    }
}

/// A node without its number: `f32[8b,4] = add(%3, %4)`.
fn write_node(f: &mut fmt::Formatter<'_>, node: &Node) -> fmt::Result {
    write!(f, "{}[", node.ty.dtype)?;
    for (i, d) in node.ty.shape.iter().enumerate() {
        let mark = if node.batch_dims >> i.min(31) & 1 == 1 { "b" } else { "" };
        write!(f, "{}{d}{mark}", if i == 0 { "" } else { "," })?;
    }
    write!(f, "] = {}", node.op.name())?;
    if !node.operands.is_empty() {
        write!(f, "(")?;
        write_list(f, &node.operands)?;
        write!(f, ")")?;
    }
    match &node.op {
        Op::Parameter(op) => {
            write!(f, " {}", quoted(&op.name))?;
            f.write_str(if op.frozen { " frozen" } else { "" })?;
            f.write_str(if op.no_decay { " no_decay" } else { "" })?;
        }
        Op::Input(crate::op::Input { name, .. }) => write!(f, " {}", quoted(name))?,
        op => {
            let all = attributes::attributes(op, &node.ty);
            if !all.is_empty() {
                write!(f, " {}", object(&all))?;
            }
        }
    }
    if !node.name.is_empty() {
        write!(f, " @{}", quoted(&node.name))?;
    }
    Ok(())
}

fn write_list(f: &mut fmt::Formatter<'_>, values: &[ValueId]) -> fmt::Result {
    for (i, v) in values.iter().enumerate() {
        write!(f, "{}{v}", if i == 0 { "" } else { ", " })?;
    }
    Ok(())
}

/// A string with JSON's escapes.
pub(crate) fn quoted(text: &str) -> String {
    Value::String(text.to_string()).to_string()
}

/// A JSON object on one line, its keys in the order given.
pub(crate) fn object(attributes: &[attributes::Attribute]) -> String {
    let fields: Vec<String> = attributes.iter().map(|(key, value)| format!("\"{key}\":{value}")).collect();
    format!("{{{}}}", fields.join(","))
}

/// Parses the text form. Each node must fit its operands. The other requirements of [`Graph::verify`] (outputs,
/// distinct names) do not apply, since the bodies of programs are printed too.
pub fn parse(text: &str) -> Result<Graph, TextError> {
    let mut cursor = Cursor { text, at: 0 };
    cursor.word("graph")?;
    let mut graph = Graph::new(cursor.string()?);
    if cursor.take("batch") {
        cursor.symbol("=")?;
        graph.batch = cursor.number()?;
    }
    cursor.symbol("{")?;
    while !cursor.take("}") {
        if cursor.take("pin") {
            graph.pin(cursor.json("a pin")?);
            continue;
        }
        let node = cursor.node(&graph)?;
        graph.append(node);
    }
    cursor.symbol("->")?;
    for (at, output) in cursor.values()? {
        if output.index() >= graph.len() {
            return Err(cursor.error_at(at, TextProblem::Graph(GraphError::Output { output })));
        }
        graph.outputs.push(output);
    }
    cursor.skip_space();
    if cursor.at < text.len() {
        return Err(cursor.expected("the end of the text"));
    }
    Ok(graph)
}

struct Cursor<'a> {
    text: &'a str,
    /// The byte position, which is always at the start of a character.
    at: usize,
}

impl<'a> Cursor<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn error_at(&self, at: usize, problem: TextProblem) -> TextError {
        let before = &self.text[..at];
        let line_start = before.rfind('\n').map_or(0, |i| i + 1);
        TextError { line: before.matches('\n').count() + 1, column: before[line_start..].chars().count() + 1, problem }
    }

    fn expected(&self, what: &'static str) -> TextError {
        self.error_at(self.at, TextProblem::Expected(what))
    }

    fn skip_space(&mut self) {
        self.at = self.text.len() - self.rest().trim_start().len();
    }

    /// Skips `symbol` if it comes next. Returns true if it did.
    fn take(&mut self, symbol: &str) -> bool {
        self.skip_space();
        let found = self.rest().starts_with(symbol);
        self.at += if found { symbol.len() } else { 0 };
        found
    }

    fn symbol(&mut self, symbol: &'static str) -> Result<(), TextError> {
        if self.take(symbol) { Ok(()) } else { Err(self.expected_symbol(symbol)) }
    }

    fn expected_symbol(&self, symbol: &'static str) -> TextError {
        self.expected(match symbol {
            "=" => "'='",
            "{" => "'{'",
            "->" => "'->'",
            "(" => "'('",
            ")" => "')'",
            ":" => "':'",
            "[" => "'['",
            "]" => "']'",
            "%" => "a value such as %3",
            other => other,
        })
    }

    fn word(&mut self, word: &'static str) -> Result<(), TextError> {
        self.skip_space();
        let at = self.at;
        if self.identifier() == word {
            return Ok(());
        }
        self.at = at;
        Err(self.expected(word))
    }

    /// Letters, digits and underscores. Empty if another character comes next.
    fn identifier(&mut self) -> &'a str {
        self.skip_space();
        let rest = self.rest();
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        self.at += end;
        &rest[..end]
    }

    fn number<T: std::str::FromStr>(&mut self) -> Result<T, TextError> {
        self.skip_space();
        let rest = self.rest();
        let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let number = rest[..end].parse().map_err(|_| self.expected("a whole number"))?;
        self.at += end;
        Ok(number)
    }

    fn value(&mut self) -> Result<ValueId, TextError> {
        self.symbol("%")?;
        Ok(ValueId(self.number()?))
    }

    /// `(%1, %2)`, each with its position.
    fn values(&mut self) -> Result<Vec<(usize, ValueId)>, TextError> {
        self.symbol("(")?;
        let mut values = Vec::new();
        if self.take(")") {
            return Ok(values);
        }
        loop {
            self.skip_space();
            values.push((self.at, self.value()?));
            if !self.take(",") {
                self.symbol(")")?;
                return Ok(values);
            }
        }
    }

    /// The JSON value that comes next, and nothing after it.
    fn json<T: serde::de::DeserializeOwned>(&mut self, what: &'static str) -> Result<T, TextError> {
        self.skip_space();
        let mut stream = serde_json::Deserializer::from_str(self.rest()).into_iter::<T>();
        match stream.next() {
            Some(Ok(value)) => {
                self.at += stream.byte_offset();
                Ok(value)
            }
            Some(Err(error)) => {
                let start = self.error_at(self.at, TextProblem::Expected(what));
                let (line, column) = match error.line() {
                    0 | 1 => (start.line, start.column + error.column().saturating_sub(1)),
                    n => (start.line + n - 1, error.column().max(1)),
                };
                Err(TextError { line, column, problem: TextProblem::Json(error) })
            }
            None => Err(self.expected(what)),
        }
    }

    fn string(&mut self) -> Result<String, TextError> {
        self.skip_space();
        if !self.rest().starts_with('"') {
            return Err(self.expected("a quoted string"));
        }
        self.json("a quoted string")
    }

    /// A type, and the dimensions that scale with the batch.
    fn ty(&mut self) -> Result<(TensorType, u32), TextError> {
        self.skip_space();
        let at = self.at;
        let Some(dtype) = DType::parse(self.identifier()) else {
            self.at = at;
            return Err(self.expected("a type such as f32[8,64]"));
        };
        self.symbol("[")?;
        let (mut shape, mut batch_dims) = (Vec::new(), 0);
        if !self.take("]") {
            loop {
                if shape.len() == MAX_RANK {
                    return Err(self.expected("fewer dimensions"));
                }
                shape.push(self.number()?);
                if self.take("b") {
                    batch_dims |= 1 << (shape.len() - 1);
                }
                if !self.take(",") {
                    self.symbol("]")?;
                    break;
                }
            }
        }
        Ok((TensorType { dtype, shape }, batch_dims))
    }

    fn node(&mut self, graph: &Graph) -> Result<Node, TextError> {
        self.skip_space();
        let start = self.at;
        let expected = ValueId(graph.len() as u32);
        if self.value()? != expected {
            return Err(self.error_at(start, TextProblem::Number { expected }));
        }
        self.symbol(":")?;
        let (ty, batch_dims) = self.ty()?;
        self.symbol("=")?;
        self.skip_space();
        let op_at = self.at;
        let name = self.identifier();
        if name.is_empty() {
            return Err(self.expected("the name of an op"));
        }
        self.skip_space();
        let operands = if self.rest().starts_with('(') { self.values()? } else { Vec::new() };
        let mut fields = Map::new();
        self.skip_space();
        if matches!(name, "parameter" | "input") {
            fields.insert("name".to_string(), Value::String(self.string()?));
            for mark in ["frozen", "no_decay"] {
                if name == "parameter" && self.take(mark) {
                    fields.insert(mark.to_string(), Value::Bool(true));
                }
            }
        } else if self.rest().starts_with('{') {
            fields = self.json("attributes")?;
        }
        let op = attributes::op_from(name, &fields, Some(&ty)).map_err(|e| self.error_at(op_at, TextProblem::Op(e)))?;
        let comment = if self.take("@") { self.string()? } else { String::new() };

        let wrong = |at: usize, error: GraphError| self.error_at(at, TextProblem::Graph(error));
        if let Some(&(at, operand)) = operands.iter().find(|(_, v)| v.0 >= expected.0) {
            return Err(wrong(at, GraphError::Order { node: expected, operand }));
        }
        let operands: Vec<ValueId> = operands.into_iter().map(|(_, v)| v).collect();
        let types: Vec<&TensorType> = operands.iter().map(|&v| graph.ty(v)).collect();
        let name = op.name();
        match op.infer(&types) {
            Ok(inferred) if inferred == ty => Ok(Node { op, operands, ty, batch_dims, name: comment }),
            Ok(inferred) => Err(wrong(op_at, GraphError::Type { node: expected, op: name, declared: ty, inferred })),
            Err(error) => Err(wrong(op_at, GraphError::Shape { node: expected, op: name, error })),
        }
    }
}
