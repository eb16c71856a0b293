//! Prints a graph as the text of a StableHLO module.
//!
//! The entry is `@main`. Its arguments are the graph's leaves in order, each with its name as a location, and its
//! results are the graph's outputs. Layouts are printed as Shardy's shardings.

mod attention;
mod collective;
mod ops;
mod regions;
mod shardy;
mod turns;
mod types;

pub use shardy::{Layouts, contiguous};

use crate::legal::legalise;
use altiplano_ir::attention::Pass;
use altiplano_ir::graph::{Graph, Node};
use altiplano_ir::mesh::Mesh;
use altiplano_ir::op::{Input, Op, Parameter};
use altiplano_ir::types::TensorType;
use attention::Calls;
use std::collections::BTreeMap;
use std::fmt::Write;
use turns::Turns;
use types::{quoted, tensor};

/// Choices for the printed module. The default is a program for one device without layouts.
#[derive(Clone, Debug, Default)]
pub struct Options<'a> {
    /// The layouts of values on a mesh. XLA inserts the communication.
    pub layouts: Option<Layouts<'a>>,
    /// The mesh of a local graph with collectives. Its devices are the replicas of the program.
    pub replicas: Option<&'a Mesh>,
    /// Pairs of an argument and a result that may take the argument's memory.
    pub donated: Vec<(usize, usize)>,
    /// Arguments whose elements count as zeros, whatever they are.
    pub zeros: Vec<usize>,
    /// Arguments whose readers stay behind what precedes them in the graph, by an optimization barrier. If there are any,
    /// barriers also compute results that no product follows before the next value that several products read.
    pub in_turn: Vec<usize>,
    /// Names of the results, if they have any.
    pub results: Vec<String>,
    /// Passes of attention that are printed as calls of cuDNN's kernels.
    pub attention: &'a [Pass],
}

/// A value of the text: `%3`, or `%3#1` for the second result of an op.
#[derive(Clone, Debug)]
struct Value {
    name: String,
    ty: TensorType,
}

/// The text of a module while it is written.
#[derive(Default)]
struct Printer {
    body: String,
    next: usize,
    /// The location of the op that is being printed, or nothing.
    location: String,
    /// The latest value that is in memory, behind which others wait (see [`turns`]).
    latest: Option<Value>,
    /// The same behind the last barrier, for later readers.
    passed: Option<Value>,
    /// Private functions by name.
    functions: BTreeMap<String, String>,
}

impl Printer {
    /// A name that no other value has.
    fn fresh(&mut self) -> String {
        self.next += 1;
        format!("%{}", self.next - 1)
    }

    /// Appends an op with one result.
    fn op(&mut self, text: impl AsRef<str>, ty: TensorType) -> Value {
        let name = self.fresh();
        let _ = writeln!(self.body, "    {name} = {}{}", text.as_ref(), self.location);
        Value { name, ty }
    }
}

/// Prints a verified graph.
///
/// ```
/// use altiplano_ir::graph::Graph;
/// use altiplano_ir::op::{Input, Op, Unary};
/// use altiplano_ir::{dtype::DType, types::TensorType};
///
/// let mut graph = Graph::new("f");
/// let x = graph.emit(Op::Input(Input { name: "x".into(), ty: TensorType::new(DType::F32, [2]) }), &[]);
/// graph.outputs = vec![graph.unary(Unary::Tanh, x)];
/// let text = altiplano_xla::text::module(&graph, &Default::default());
/// assert!(text.contains("stablehlo.tanh %arg0 : tensor<2xf32>"));
/// ```
pub fn module(graph: &Graph, options: &Options<'_>) -> String {
    // Programs are only compiled, and other text is read back.
    let legal = legalise(graph, options.replicas.is_some());
    let layouts = options.layouts.as_ref().map(|layouts| layouts.of(&legal));
    let mut printer = Printer::default();
    // A value without a name is not printed: a kernel computes it, or all that it is for.
    let unnamed = |node: &Node| Value { name: String::new(), ty: node.ty.clone() };
    let mut values: Vec<Value> = legal.graph.nodes.iter().map(unnamed).collect();
    let mut arguments: Vec<String> = Vec::new();
    let mut calls = Calls::new(&legal, options.attention);
    let order = calls.order().unwrap_or_else(|| {
        calls = Calls::new(&legal, &[]);
        legal.graph.values().collect()
    });
    let live = calls.live();
    let mut turns = Turns::new(&legal.graph, !options.in_turn.is_empty());
    for v in turns.order(order) {
        let node = legal.graph.node(v);
        calls.print_at(v, &mut printer, &mut values);
        if calls.computed.contains(&v) {
            turns.reach(v, &mut printer, &mut values);
            continue;
        }
        let sharding = layouts.as_ref().and_then(|layouts| layouts.attribute(v));
        if let Op::Parameter(Parameter { name, .. }) | Op::Input(Input { name, .. }) = &node.op {
            let argument = Value { name: format!("%arg{}", arguments.len()), ty: node.ty.clone() };
            let is_zero = options.zeros.contains(&arguments.len());
            // Parameters are at hand at any time.
            if options.in_turn.contains(&arguments.len()) && matches!(node.op, Op::Input(_)) {
                turns.wait(v, &argument);
            }
            arguments.push(header(&argument, name, arguments.len(), sharding, options));
            printer.location = String::new();
            values[v.index()] = if is_zero { printer.splat(argument.ty, 0.0) } else { argument };
            continue;
        }
        if !live[v.index()] {
            continue;
        }
        printer.location = match node.name.is_empty() {
            true => String::new(),
            false => format!(" loc({})", quoted(&node.name)),
        };
        turns.admit(node, &mut printer, &mut values);
        let operands: Vec<Value> = node.operands.iter().map(|o| values[o.index()].clone()).collect();
        let mut value = printer.node(node, &operands);
        if let Some(sharding) = sharding {
            let ty = tensor(&value.ty);
            let constraint = format!("sdy.sharding_constraint {} {sharding} : {ty}", value.name);
            value = printer.op(constraint, node.ty.clone());
        }
        values[v.index()] = value;
        turns.reach(v, &mut printer, &mut values);
    }
    let shardings = legal.graph.outputs.iter().map(|&o| layouts.as_ref().and_then(|layouts| layouts.attribute(o)));
    let outputs: Vec<(&Value, Option<String>)> =
        legal.graph.outputs.iter().map(|o| &values[o.index()]).zip(shardings).collect();
    let mesh = options.layouts.as_ref().map(|layouts| shardy::mesh(layouts.mesh)).unwrap_or_default();
    assembled(graph, &printer, &arguments, &outputs, &mesh, options)
}

/// An argument of the entry: `%arg0: tensor<2xf32> {attributes} loc("x")`.
fn header(value: &Value, name: &str, index: usize, sharding: Option<String>, options: &Options<'_>) -> String {
    let mut attributes: Vec<String> =
        sharding.iter().map(|text| format!("sdy.sharding = #sdy.sharding{text}")).collect();
    let result = options.donated.iter().find(|(argument, _)| *argument == index);
    attributes.extend(result.map(|(_, result)| format!("tf.aliasing_output = {result} : i32")));
    let attributes = dictionary(attributes);
    format!("{}: {}{attributes} loc({})", value.name, tensor(&value.ty), quoted(name))
}

/// ` {a = 1, b = 2}`, or nothing without attributes.
fn dictionary(attributes: Vec<String>) -> String {
    if attributes.is_empty() { String::new() } else { format!(" {{{}}}", attributes.join(", ")) }
}

fn assembled(
    graph: &Graph,
    printer: &Printer,
    arguments: &[String],
    outputs: &[(&Value, Option<String>)],
    mesh: &str,
    options: &Options<'_>,
) -> String {
    let replicas = options.replicas.map_or(1, Mesh::num_devices);
    let partitions = options.layouts.as_ref().map_or(1, |layouts| layouts.mesh.num_devices());
    let result = |(at, (value, sharding)): (usize, &(&Value, Option<String>))| {
        let name = options.results.get(at).map(|name| format!("jax.result_info = {}", quoted(name)));
        let sharding = sharding.as_ref().map(|text| format!("sdy.sharding = #sdy.sharding{text}"));
        format!("{}{}", tensor(&value.ty), dictionary(name.into_iter().chain(sharding).collect()))
    };
    let results: Vec<String> = outputs.iter().enumerate().map(result).collect();
    let names: Vec<&str> = outputs.iter().map(|(value, _)| value.name.as_str()).collect();
    let types: Vec<String> = outputs.iter().map(|(value, _)| tensor(&value.ty)).collect();
    let mut text = format!(
        "module @{} attributes {{mhlo.num_partitions = {partitions} : i32, mhlo.num_replicas = {replicas} : i32}} {{\n{mesh}",
        quoted(if graph.name.is_empty() { "main" } else { &graph.name })
    );
    let _ = writeln!(text, "  func.func public @main({}) -> ({}) {{", arguments.join(", "), results.join(", "));
    text.push_str(&printer.body);
    // Without results there are no types to write.
    match names.is_empty() {
        true => text.push_str("    return\n  }\n"),
        false => {
            let _ = writeln!(text, "    return {} : {}\n  }}", names.join(", "), types.join(", "));
        }
    }
    printer.functions.values().for_each(|function| text.push_str(function));
    text + "}\n"
}

#[cfg(test)]
mod tests;
