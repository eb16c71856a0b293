//! Prints a plan in Graphviz's DOT language: a box per stage, a node per layer, and edges with the data between layers.

use super::devices;
use crate::units::{bytes, plural};
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::Op;
use altiplano_ir::plan::{Plan, Stage};
use altiplano_ir::recompute::Recompute;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// The plan in the DOT language. Edges show the bytes of one microbatch, forward, over all devices. Beside them is the
/// sharding of the largest value, as it is produced and, across stages, as it arrives.
pub fn plan_dot(plan: &Plan) -> String {
    let graph = &plan.graph;
    let layer_of = plan.layer_of();
    let mut out = String::from("digraph plan {\n  rankdir = TB\n  node [shape = box]\n");
    // Writing to a string cannot fail.
    for (i, stage) in plan.stages.iter().enumerate() {
        let title = format!(
            "stage{i}: {} {}, {}{}",
            if stage.devices.len() == 1 { "device" } else { "devices" },
            devices(&stage.devices),
            stage.mesh,
            match stage.recompute.most() {
                Recompute::None => String::new(),
                _ => format!(", recomputed: {}", stage.recompute),
            }
        );
        let _ = writeln!(out, "  subgraph cluster_{i} {{\n    label = \"{}\"", escaped(&title));
        for layer in stage.layers.clone() {
            let _ = writeln!(out, "    layer{layer} [label = \"{}\"]", escaped(&label(plan, stage, layer, &layer_of)));
        }
        let _ = writeln!(out, "  }}");
    }
    // For each pair of layers, the bytes between them, and the largest value.
    let mut edges: BTreeMap<(u32, u32), (u64, ValueId)> = BTreeMap::new();
    let users = graph.users();
    for (v, from) in graph.values().filter_map(|v| Some((v, layer_of[v.index()]?))) {
        let to: BTreeSet<u32> =
            users[v.index()].iter().filter_map(|u| layer_of[u.index()]).filter(|t| *t != from).collect();
        for to in to {
            let edge = edges.entry((from, to)).or_insert((0, v));
            edge.0 += graph.ty(v).bytes();
            if graph.ty(v).bytes() > graph.ty(edge.1).bytes() {
                edge.1 = v;
            }
        }
    }
    let stage_of = |layer: u32| plan.stages.iter().find(|s| s.layers.contains(&layer));
    for ((from, to), (size, v)) in edges {
        let (Some(source), Some(target)) = (stage_of(from), stage_of(to)) else { continue };
        let mut text = format!("{}\n{}", bytes(size), laid_out(source, v));
        if let Some(arrives) = target.receives.get(&v).filter(|_| !target.layers.contains(&from)) {
            let _ = write!(text, " -> {}", arrives.display(&target.mesh));
        }
        let _ = writeln!(out, "  layer{from} -> layer{to} [label = \"{}\"]", escaped(&text));
    }
    out.push_str("}\n");
    out
}

/// A layer's ops and parameters, and the layout of its largest value.
fn label(plan: &Plan, stage: &Stage, layer: u32, layer_of: &[Option<u32>]) -> String {
    let graph = &plan.graph;
    let inside = |v: &ValueId| layer_of[v.index()] == Some(layer);
    let nodes: Vec<ValueId> = graph.values().filter(inside).collect();
    let parameters: BTreeSet<ValueId> = nodes
        .iter()
        .flat_map(|&v| &graph.node(v).operands)
        .copied()
        .filter(|&o| matches!(graph.node(o).op, Op::Parameter(_)))
        .collect();
    let size = parameters.iter().map(|&p| graph.ty(p).bytes()).sum();
    let mut text = format!("layer {layer}\n{}, parameters {}", plural(nodes.len() as u64, "op"), bytes(size));
    let work = |v: &ValueId| (graph.flop(*v), std::cmp::Reverse(*v));
    if let Some(main) = nodes.iter().copied().filter(|v| graph.node(*v).op.is_contraction()).max_by_key(work) {
        let _ = write!(text, "\n{} {}", graph.node(main).op.name(), laid_out(stage, main));
    }
    text
}

fn laid_out(stage: &Stage, v: ValueId) -> String {
    stage.shardings.get(&v).map(|s| s.sharding.clone()).unwrap_or_default()
}

/// Escapes quotes, backslashes and line ends for a string.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
