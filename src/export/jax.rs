//! `--to jax`: a Python module with the mesh, a `PartitionSpec` for every parameter, gradient, optimizer state and
//! input, and functions that apply them. Its fixed part is `jax.py`.

use super::{Exported, Layouts};
use crate::error::Error;
use crate::units::plural;
use altiplano_ir::batch::LossKind;
use altiplano_ir::mesh::Mesh;
use altiplano_ir::op::Op;
use altiplano_ir::plan::Storage;
use altiplano_ir::program::BufferKind;
use altiplano_ir::sharding::{DimLayout, Sharding};
use std::collections::BTreeMap;
use std::fmt::Write;

const FUNCTIONS: &str = include_str!("jax.py");
/// The version that the module is written for and tested with.
const VERSION: &str = "0.10.2";

pub(super) fn module(layouts: &Layouts) -> Result<Exported, Error> {
    let (plan, mesh) = (layouts.plan, layouts.mesh());
    let mut notes: Vec<String> = Vec::new();
    notes.extend(layouts.rounding(contiguous, "a PartitionSpec splits a dimension into contiguous blocks only"));
    notes.extend(partial_sums(layouts));
    notes.extend(layouts.recomputation()?);
    notes.extend(layouts.update());
    let mut text = header(layouts, &notes);
    let parameters = &layouts.stage.parameters;
    let names: Vec<&String> = parameters.keys().collect();
    let _ = writeln!(text, "# The mesh, major axis first, and the positions of its devices among all of the job.");
    table(&mut text, "MESH", mesh.axes.iter().map(|axis| (axis.name.as_str(), axis.size.to_string())));
    let _ = writeln!(text, "DEVICES = {:?}", layouts.stage.devices);
    let _ = writeln!(text, "GLOBAL_BATCH = {}\nMICROBATCHES = {}", plan.global_batch, plan.num_microbatches);
    let _ = writeln!(
        text,
        "# True if the loss of a step is the mean of its microbatches' losses, False if it is their sum."
    );
    let _ = writeln!(text, "LOSS_IS_MEAN = {}", if plan.loss == LossKind::Sum { "False" } else { "True" });
    let _ = writeln!(text, "# The arguments of the loss that hold parameters.");
    let _ = writeln!(text, "ARGUMENTS = {}", list(&arguments(&names)));
    let specs = |layout: fn(&Storage) -> &Sharding| {
        parameters.iter().map(move |(name, storage)| (name.as_str(), spec(layout(storage), mesh)))
    };
    table(&mut text, "PARAMETERS", specs(|storage| &storage.parameter));
    let _ = writeln!(
        text,
        "# The layouts in which ops read parameters. Those that are stored in parts are gathered first."
    );
    let used = used(layouts);
    table(&mut text, "USED", used.iter().map(|(name, sharding)| (*name, spec(sharding, mesh))));
    let _ = writeln!(text, "# Sums of gradients.");
    table(&mut text, "GRADIENTS", specs(|storage| &storage.gradient));
    let _ = writeln!(text, "# The optimizer's state of each parameter.");
    table(&mut text, "STATE", specs(|storage| &storage.state));
    let frozen: Vec<&str> = layouts.frozen().collect();
    let _ = writeln!(text, "# Parameters that training does not change.\nFROZEN = {}", list(&frozen));
    table(&mut text, "INPUTS", layouts.inputs.iter().map(|input| (input.name, spec(input.sharding, mesh))));
    let _ = writeln!(text, "# The dimension of each input that grows with the batch, and its size for one sample.");
    let batched = layouts.inputs.iter().filter_map(|input| Some((input.name, input.batch_dims.first()?)));
    table(&mut text, "BATCH_DIMS", batched.map(|(name, (dim, rows))| (name, format!("({dim}, {rows})"))));
    Ok(Exported { text: text + FUNCTIONS, notes })
}

fn header(layouts: &Layouts, notes: &[String]) -> String {
    let plan = layouts.plan;
    let mut text = format!(
        r#""""The layouts of '{}' on {}, for JAX {VERSION}.

Written by {}.

The plan's arguments are those of the loss that was lowered for it. With that function, its parameters and its inputs:

    import MODULE as plan
    mesh = plan.mesh()
    params = plan.shard_parameters(params, mesh)
    state = plan.init_state(optimizer, params, mesh)
    inputs = plan.shard_inputs({{{}}}, mesh)
    step = plan.train_step(loss, optimizer, mesh, params, state, inputs)
    params, state, value = step(params, state, inputs)

`optimizer` has `init` and `update`, as in optax.
XLA chooses the layouts of activations from those of parameters and inputs.

The plan and this module differ in:
"#,
        quiet(&plan.model),
        quiet(&plan.cluster.name),
        layouts.origin(),
        example(layouts),
    );
    for note in notes {
        let _ = writeln!(text, "  * {}", quiet(note));
    }
    text + r#""""

import difflib

import jax
import numpy
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr, tree_flatten_with_path

"#
}

/// `"tokens": tokens` for each argument of the loss that holds inputs.
fn example(layouts: &Layouts) -> String {
    let names: Vec<&str> = layouts.inputs.iter().map(|input| argument(input.name)).collect();
    let mut once: Vec<String> = Vec::new();
    for name in names {
        let entry = format!("{}: {}", quoted(name), quiet(name));
        if !once.contains(&entry) {
            once.push(entry);
        }
    }
    once.join(", ")
}

/// A note on gradients that the plan sums over devices once a step. XLA sums those of each microbatch.
fn partial_sums(layouts: &Layouts) -> Option<String> {
    let late = |buffer: &&altiplano_ir::program::Buffer| {
        matches!(buffer.kind, BufferKind::Accumulator { .. }) && buffer.sharding.is_partial()
    };
    let buffers = layouts.program.buffers.iter().filter(late);
    let bytes: u64 = buffers.map(|buffer| buffer.sharding.local_bytes(&buffer.ty, layouts.mesh())).sum();
    let more = u64::from(layouts.plan.num_microbatches) - 1;
    (bytes > 0 && more > 0).then(|| {
        format!(
            "gradients are summed over devices after each of {}, not once a step: {} more are reduced on each device",
            plural(more + 1, "microbatch"),
            crate::units::bytes(bytes * more)
        )
    })
}

/// The layout that a `PartitionSpec` can say: of each dimension only the outermost contiguous blocks.
fn contiguous(sharding: &Sharding) -> Sharding {
    let outermost = |dim: &DimLayout| match dim.segments() {
        [first, _, ..] => DimLayout::split(dim.size(), first.axes.iter().copied()),
        _ => dim.clone(),
    };
    Sharding { dims: sharding.dims.iter().map(outermost).collect(), partial: sharding.partial.clone() }
}

fn spec(sharding: &Sharding, mesh: &Mesh) -> String {
    let dim = |dim: &DimLayout| {
        let axes: Vec<String> = dim.axes().map(|axis| quoted(mesh.name(axis))).collect();
        match axes.as_slice() {
            [] => "None".to_string(),
            [axis] => axis.clone(),
            several => format!("({})", several.join(", ")),
        }
    };
    format!("P({})", contiguous(sharding).dims.iter().map(dim).collect::<Vec<_>>().join(", "))
}

/// The argument of a function that the name of one of its leaves begins with: `params` of `params['w'].value`.
fn argument(name: &str) -> &str {
    name.split(['[', '.']).next().unwrap_or(name)
}

fn arguments<'a>(names: &[&'a String]) -> Vec<&'a str> {
    let mut found: Vec<&str> = names.iter().map(|&name| argument(name)).collect();
    found.sort_unstable();
    found.dedup();
    found
}

/// The layout in which the ops of the plan read each parameter, or in which it is stored if they differ.
fn used<'a>(layouts: &'a Layouts) -> BTreeMap<&'a str, Sharding> {
    let (graph, stage) = (&layouts.plan.graph, layouts.stage);
    let mut read: BTreeMap<&str, Vec<Sharding>> = BTreeMap::new();
    for (&v, value) in &stage.shardings {
        let operands = graph.rule(v).shardings(&value.strategy, &stage.mesh).operands;
        for (&operand, sharding) in graph.node(v).operands.iter().zip(operands) {
            if let Op::Parameter(op) = &graph.node(operand).op {
                read.entry(&op.name).or_default().push(sharding);
            }
        }
    }
    let layout = |(name, storage): (&'a String, &Storage)| match read.get(name.as_str()).map(Vec::as_slice) {
        Some([first, rest @ ..]) if rest.iter().all(|other| other == first) => (name.as_str(), first.clone()),
        _ => (name.as_str(), storage.parameter.clone()),
    };
    stage.parameters.iter().map(layout).collect()
}

pub(super) fn table<'a>(text: &mut String, name: &str, entries: impl Iterator<Item = (&'a str, String)>) {
    let _ = writeln!(text, "{name} = {{");
    for (key, value) in entries {
        let _ = writeln!(text, "    {}: {value},", quoted(key));
    }
    text.push_str("}\n");
}

pub(super) fn list(names: &[&str]) -> String {
    format!("[{}]", names.iter().map(|name| quoted(name)).collect::<Vec<_>>().join(", "))
}

/// A string of Python. JSON's escapes are Python's too.
pub(super) fn quoted(text: &str) -> String {
    serde_json::to_string(text).unwrap_or_default()
}

/// Text inside a docstring, which nothing in a plan may end.
pub(super) fn quiet(text: &str) -> String {
    text.chars().filter(|c| !matches!(c, '"' | '\\') && !c.is_control()).collect()
}
