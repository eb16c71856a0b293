//! `--to jax`: a Python module with the mesh, a `PartitionSpec` for every parameter, gradient, optimizer state and
//! input, the plan's model as functions of JAX, and functions that train. Its fixed parts are the Python files beside
//! this one: one for all plans, one for plans of one stage, and one for pipelines.

mod model;
mod ops;

use super::{ExportProblem, Exported, Layouts, Stack};
use crate::error::Error;
use crate::units::{bytes, plural};
use altiplano_ir::batch::LossKind;
use altiplano_ir::dtype::DType;
use altiplano_ir::mesh::Mesh;
use altiplano_ir::op::Op;
use altiplano_ir::plan::Storage;
use altiplano_ir::program::{Buffer, BufferKind, Call, Phase, Program};
use altiplano_ir::rng::SAMPLE_INDEX;
use altiplano_ir::sharding::{DimLayout, Sharding};
use altiplano_planner::lower::forward::{Forward, forward};
use model::{Model, Received, key};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

const COMMON: &str = include_str!("jax/common.py");
const ONE_STAGE: &str = include_str!("jax/one_stage.py");
const PIPELINE: &str = include_str!("jax/pipeline.py");
/// The version that the module is written for and tested with.
const VERSION: &str = "0.10.2";

pub(super) fn module(layouts: &Layouts) -> Result<Exported, Error> {
    let plan = layouts.plan;
    let forward = forward(plan)?;
    let refused = |problem: ExportProblem| Error::Export { to: Stack::Jax.name(), problem: Box::new(problem) };
    let model = model::written(plan, &forward).map_err(refused)?;
    let notes = notes(layouts, &forward, &model)?;
    let mut text = header(layouts, &notes);
    let pipeline = plan.stages.len() > 1;
    let _ = writeln!(text, "GLOBAL_BATCH = {}\nMICROBATCHES = {}", plan.global_batch, plan.num_microbatches);
    let _ = writeln!(
        text,
        "# True if the loss of a step is the mean of its microbatches' losses, False if it is their sum."
    );
    let _ = writeln!(text, "LOSS_IS_MEAN = {}", if plan.loss == LossKind::Sum { "False" } else { "True" });
    tables(&mut text, layouts, &forward, &model);
    if pipeline {
        let _ = writeln!(text, "# The values that each stage sends to later ones, and their layouts.");
        let sent = |s: usize| {
            let rests =
                |&v: &altiplano_ir::graph::ValueId| (key(v), spec(&forward.resting(s, v), &forward.stages[s].mesh));
            model.sends[s].iter().map(rests).collect()
        };
        stage_tables(&mut text, "SENDS", (0..plan.stages.len()).map(sent).collect());
        let _ =
            writeln!(text, "# The values that each stage receives: the stage that sends each, its layout here, and");
        let _ = writeln!(text, "# whether its gradient goes back.");
        let entries = |s: usize| model.receives[s].iter().map(|r| received(r, &forward.stages[s].mesh)).collect();
        stage_tables(&mut text, "RECEIVES", (0..plan.stages.len()).map(entries).collect());
        order(&mut text, layouts);
        let _ = writeln!(text, "LOSS_STAGE = {}", model.loss_stage);
    }
    let functions = format!("\n\n{}", model.functions);
    Ok(Exported { text: text + &functions + COMMON + if pipeline { PIPELINE } else { ONE_STAGE }, notes })
}

fn notes(layouts: &Layouts, forward: &Forward, model: &Model) -> Result<Vec<String>, Error> {
    let mut notes: Vec<String> = Vec::new();
    notes.extend(layouts.rounding(contiguous, "a PartitionSpec splits a dimension into contiguous blocks only"));
    if model.unsaid > 0 {
        let activations = plural(model.unsaid as u64, "layout");
        notes.push(format!("XLA chooses {activations} of activations, which no PartitionSpec can say"));
    }
    notes.extend(partial_sums(layouts));
    if layouts.plan.stages.len() == 1 {
        let own = layouts.recomputation()?;
        notes.extend(own.map(|note| format!("{note}, if the step is given a loss of your own")));
    }
    let wide = |op: &altiplano_ir::graph::Node| matches!(op.ty.dtype, DType::F64 | DType::I64 | DType::U64);
    if forward.graph.nodes.iter().any(wide) {
        notes.push("the model has numbers of 64 bits: set jax_enable_x64, or JAX computes with 32".to_string());
    }
    notes.extend(layouts.update());
    Ok(notes)
}

fn tables(text: &mut String, layouts: &Layouts, forward: &Forward, model: &Model) {
    let plan = layouts.plan;
    let meshes: Vec<&Mesh> = forward.stages.iter().map(|stage| &stage.mesh).collect();
    let _ = writeln!(text, "# The mesh, major axis first, and the positions of its devices among all of the job.");
    let axes = |mesh: &&Mesh| mesh.axes.iter().map(|axis| (axis.name.clone(), axis.size.to_string())).collect();
    stage_tables(text, "MESH", meshes.iter().map(axes).collect());
    let devices: Vec<String> = plan.stages.iter().map(|stage| format!("{:?}", stage.devices)).collect();
    let _ = match devices.as_slice() {
        [one] => writeln!(text, "DEVICES = {one}"),
        several => writeln!(text, "DEVICES = [\n    {},\n]", several.join(",\n    ")),
    };
    let names: BTreeSet<&String> = plan.stages.iter().flat_map(|stage| stage.parameters.keys()).collect();
    let _ = writeln!(text, "# The arguments of the loss that hold parameters.");
    let _ = writeln!(text, "ARGUMENTS = {}", list(&arguments(&names.into_iter().collect::<Vec<_>>())));
    let mut specs = |name: &str, layout: fn(&Storage) -> &Sharding| {
        let of_stage = |(stage, mesh): (&altiplano_ir::plan::Stage, &&Mesh)| {
            let entry = |(name, storage): (&String, &Storage)| (name.clone(), spec(layout(storage), mesh));
            stage.parameters.iter().map(entry).collect()
        };
        stage_tables(text, name, plan.stages.iter().zip(&meshes).map(of_stage).collect());
    };
    specs("PARAMETERS", |storage| &storage.parameter);
    specs("GRADIENTS", summed);
    specs("STATE", |storage| &storage.state);
    if plan.stages.len() == 1 {
        let _ = writeln!(
            text,
            "# The layouts in which ops read parameters. Those that are stored in parts are gathered first."
        );
        let used = used(layouts);
        let entries = used.iter().map(|(name, sharding)| (name.to_string(), spec(sharding, meshes[0])));
        stage_tables(text, "USED", vec![entries.collect()]);
    }
    let frozen: Vec<&str> = layouts.frozen().collect();
    let _ = writeln!(text, "# Parameters that training does not change.\nFROZEN = {}", list(&frozen));
    let inputs = |s: usize| {
        let mut entries: BTreeMap<String, String> = BTreeMap::new();
        for input in layouts.inputs.iter().filter(|input| input.stage == s) {
            entries.entry(input.name.to_string()).or_insert_with(|| spec(input.sharding, meshes[s]));
        }
        for name in &model.inputs[s] {
            entries.entry(name.clone()).or_insert_with(|| "P()".to_string());
        }
        entries.into_iter().collect()
    };
    stage_tables(text, "INPUTS", (0..plan.stages.len()).map(inputs).collect());
    let _ = writeln!(text, "# The dimension of each input that grows with the batch, and its size for one sample.");
    let mut batched: BTreeMap<String, String> = BTreeMap::new();
    for (input, (dim, rows)) in layouts.inputs.iter().filter_map(|input| Some((input, input.batch_dims.first()?))) {
        batched.insert(input.name.to_string(), format!("({dim}, {rows})"));
    }
    stage_tables(text, "BATCH_DIMS", vec![batched.into_iter().collect()]);
    let _ = writeln!(text, "# The input that counts samples, where the model draws random numbers by them.");
    let _ = writeln!(text, "SAMPLES = {}", quoted(SAMPLE_INDEX));
}

fn received(r: &Received, mesh: &Mesh) -> (String, String) {
    let back = if r.differentiated { "True" } else { "False" };
    (key(r.value), format!("({}, {}, {back})", r.source, spec(&r.layout, mesh)))
}

/// The order in which each lane of devices runs its calls: `F2:5` is the forward pass of stage 2 for microbatch 5.
fn order(text: &mut String, layouts: &Layouts) {
    let _ = writeln!(
        text,
        "# The calls of each group of devices, in order: F2:5 is the forward pass of stage 2 for microbatch 5, B its\n\
         # backward pass, and W the gradients of its parameters where they are computed apart.\nORDER = ["
    );
    let call = |program: &Program, call: &Call| {
        let Call::Run { body, microbatch: Some(microbatch) } = call else { return None };
        let body = &program.bodies[*body as usize];
        let letter = match body.phase {
            Phase::Forward => "F",
            Phase::Backward => "B",
            Phase::Weights => "W",
            _ => return None,
        };
        Some(format!("{letter}{}:{microbatch}", body.stage))
    };
    for program in &layouts.lowered.programs {
        let calls: Vec<String> = program.schedule.iter().filter_map(|entry| call(program, entry)).collect();
        let _ = writeln!(text, "    \"{}\",", calls.join(" "));
    }
    text.push_str("]\n");
}

/// One table, or a list of one for each stage.
fn stage_tables(text: &mut String, name: &str, stages: Vec<Vec<(String, String)>>) {
    if let [one] = stages.as_slice() {
        return table(text, name, one.iter().map(|(key, value)| (key.as_str(), value.clone())));
    }
    let _ = writeln!(text, "{name} = [");
    for entries in stages {
        text.push_str("    {\n");
        for (key, value) in entries {
            let _ = writeln!(text, "        {}: {value},", quoted(&key));
        }
        text.push_str("    },\n");
    }
    text.push_str("]\n");
}

fn header(layouts: &Layouts, notes: &[String]) -> String {
    let plan = layouts.plan;
    let mut text = format!(
        r#""""The plan of '{}' on {}, for JAX {VERSION}.

Written by {}.

The module has the model that was planned, as functions of JAX. Its arguments are those of the loss that was lowered:

    import MODULE as plan
    mesh = plan.mesh()
    params = plan.shard_parameters(params, mesh)
    state = plan.init_state(optimizer, params, mesh)
    inputs = plan.shard_inputs({{{}}}, mesh)
    step = plan.train_step(optimizer, mesh, params, state, inputs)
    params, state, value = step(params, state, inputs)

`optimizer` has `init` and `update`, as in optax.

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
import functools

import jax
import jax.extend.core
import jax.extend.random
import jax.numpy as jnp
import numpy
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr, tree_flatten_with_path

"#
}

/// `"tokens": tokens` for each argument of the loss that holds inputs.
fn example(layouts: &Layouts) -> String {
    let given = layouts.inputs.iter().filter(|input| input.name != SAMPLE_INDEX);
    let names: Vec<&str> = given.map(|input| argument(input.name)).collect();
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
    let late = |buffer: &&Buffer| matches!(buffer.kind, BufferKind::Accumulator { .. }) && buffer.sharding.is_partial();
    let of_program = |program: &Program| -> u64 {
        let buffers = program.buffers.iter().filter(late);
        buffers.map(|buffer| buffer.sharding.local_bytes(&buffer.ty, &program.mesh)).sum()
    };
    let most = layouts.lowered.programs.iter().map(of_program).max().unwrap_or(0);
    let more = u64::from(layouts.plan.num_microbatches) - 1;
    (most > 0 && more > 0).then(|| {
        format!(
            "gradients are summed over devices after each of {}, not once a step: {} more are reduced on each device",
            plural(more + 1, "microbatch"),
            bytes(most * more)
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

/// The layout in which a parameter's gradients are summed over microbatches. XLA has no partial sums, so that what the
/// plan reduces at the end of a step goes to the layout of the state each time.
fn summed(storage: &Storage) -> &Sharding {
    if storage.gradient.is_partial() { &storage.state } else { &storage.gradient }
}

/// [`spec`] of a layout, or `None` if it differs from the layout.
fn sayable_spec(sharding: &Sharding, mesh: &Mesh) -> Option<String> {
    (contiguous(sharding).dims == sharding.dims).then(|| spec(sharding, mesh))
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
