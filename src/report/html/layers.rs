//! The model's graph by layers: ops with their layouts and seconds, and the resharding before them. Equal layers are
//! described once.

use super::facts::{Facts, FactsOfLayer};
use super::lanes::over;
use super::questions::{Questions, is_asked};
use super::{Table, numberless};
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::Op;
use altiplano_ir::plan::{Plan, Stage};
use altiplano_ir::reshard::reshard;
use altiplano_ir::sharding::Sharding;
use altiplano_planner::lower::Prices;
use serde::Serialize;
use std::collections::BTreeSet;

#[derive(Serialize)]
pub struct Layers {
    /// The class of each layer.
    class_of: Vec<usize>,
    classes: Vec<Class>,
}

/// The description of equal layers, by the first of them.
#[derive(Serialize)]
struct Class {
    ops: Vec<OpRow>,
    /// Seconds of one microbatch's forward pass, op by op, by the prices of the search.
    compute_s: f64,
    reshards_s: f64,
    parameter_elements: u64,
    /// The steps of the proof in this layer, if the plan is proved.
    facts: FactsOfLayer,
}

/// An op of the forward graph under its strategy.
#[derive(Serialize)]
struct OpRow {
    name: String,
    op: String,
    ty: String,
    sharding: String,
    /// The axes that split the result, in order of the mesh.
    axes: Vec<String>,
    is_partial: bool,
    seconds: f64,
    /// Its operands: preceding rows by distance, and parameters by name.
    reads: Vec<u32>,
    parameters: Vec<String>,
    /// Resharding before it can start.
    reshards: Vec<Resharded>,
    /// The number of the question about its layout, if the page answers it.
    why: Option<usize>,
    /// The step of the proof at which it is reached.
    fact: Option<usize>,
}

/// A collective that brings an operand into the layout that an op needs.
#[derive(Serialize)]
struct Resharded {
    value: String,
    from: String,
    to: String,
    collective: String,
    /// Bytes of one device: the larger of its input and its output.
    bytes: u64,
    seconds: f64,
}

impl Layers {
    pub fn new(plan: &Plan, prices: &[Prices<'_>], questions: &Questions, facts: &Facts) -> Layers {
        let layer_of = plan.layer_of();
        let mut members: Vec<Vec<ValueId>> = vec![Vec::new(); plan.num_layers() as usize];
        for v in plan.graph.values() {
            if let Some(layer) = layer_of[v.index()] {
                members[layer as usize].push(v);
            }
        }
        let mut classes: Table<Vec<String>> = Table::default();
        let mut told: Vec<Class> = Vec::new();
        let mut class_of = Vec::with_capacity(members.len());
        for ((stage, prices), number_of_stage) in plan.stages.iter().zip(prices).zip(0u32..) {
            // A resharded value is reused by later ops that need the same layout.
            let mut brought: BTreeSet<(ValueId, Sharding)> = BTreeSet::new();
            for layer in stage.layers.clone() {
                let members = &members[layer as usize];
                let class = class(plan, stage, prices, members, questions, &mut brought);
                let number = classes.number(class.signature());
                if number == told.len() {
                    let (in_layer, of_ops) = facts.of_layer(number_of_stage, members);
                    let mut class = Class { facts: in_layer, ..class };
                    let laid_out = members.iter().zip(of_ops).filter(|(v, _)| stage.shardings.contains_key(v));
                    class.ops.iter_mut().zip(laid_out).for_each(|(op, (_, fact))| op.fact = fact);
                    told.push(class);
                }
                class_of.push(number);
            }
        }
        Layers { class_of, classes: told }
    }
}

impl Class {
    /// A key for equal layers: everything but the numbers in names.
    fn signature(&self) -> Vec<String> {
        let reshard = |r: &Resharded| format!("{} {} {} {} {}", r.from, r.to, r.collective, r.bytes, r.seconds);
        let row = |r: &OpRow| {
            let reshards: Vec<String> = r.reshards.iter().map(reshard).collect();
            let parameters: Vec<String> = r.parameters.iter().map(|p| numberless(p)).collect();
            let (name, reads) = (numberless(&r.name), &r.reads);
            format!("{name} {} {} {} {} {reads:?} {parameters:?} {reshards:?}", r.op, r.ty, r.sharding, r.seconds)
        };
        self.ops.iter().map(row).collect()
    }
}

fn class(
    plan: &Plan,
    stage: &Stage,
    prices: &Prices<'_>,
    members: &[ValueId],
    questions: &Questions,
    brought: &mut BTreeSet<(ValueId, Sharding)>,
) -> Class {
    let (graph, mesh) = (&plan.graph, &stage.mesh);
    let mut ops: Vec<OpRow> = Vec::new();
    let mut seen: BTreeSet<ValueId> = BTreeSet::new();
    let mut parameter_elements = 0;
    for (row, &v) in members.iter().enumerate() {
        let Some(value) = stage.shardings.get(&v) else { continue };
        let node = graph.node(v);
        let rule = graph.rule(v);
        let shardings = rule.shardings(&value.strategy, mesh);
        let (mut reads, mut parameters, mut reshards) = (Vec::new(), Vec::new(), Vec::new());
        for (&o, wanted) in node.operands.iter().zip(&shardings.operands) {
            if let Ok(at) = members.binary_search(&o) {
                reads.push((row - at) as u32);
            }
            if let Op::Parameter(p) = &graph.node(o).op {
                parameters.push(p.name.clone());
                parameter_elements += if seen.insert(o) { graph.ty(o).elements() } else { 0 };
            }
            let Some(had) = layout(plan, stage, o) else { continue };
            let ty = graph.ty(o);
            let mut from = had;
            for step in reshard(&from.clone(), wanted, mesh) {
                let is_new = brought.insert((o, step.result.clone()));
                let (operand, result) = (from.local_bytes(ty, mesh), step.result.local_bytes(ty, mesh));
                if step.collective.communicates() && is_new {
                    reshards.push(Resharded {
                        value: called(plan, o),
                        from: from.display(mesh).to_string(),
                        to: step.result.display(mesh).to_string(),
                        collective: over(&step.collective, mesh),
                        bytes: operand.max(result),
                        seconds: prices.waited_s(&step.collective, operand, result),
                    });
                }
                from = step.result;
            }
        }
        let types = graph.operand_types(v);
        let split: BTreeSet<_> = shardings.result.split_axes().filter(|a| mesh.size(*a) > 1).collect();
        ops.push(OpRow {
            name: value.name.clone(),
            op: node.op.name().to_string(),
            ty: node.ty.to_string(),
            sharding: value.sharding.clone(),
            axes: split.into_iter().map(|a| mesh.name(a).to_string()).collect(),
            is_partial: shardings.result.partial.iter().any(|p| mesh.size(p.0) > 1),
            seconds: prices.op_s(&node.op, &types, &node.ty, &rule, &value.strategy, &shardings),
            reads,
            parameters,
            reshards,
            why: is_asked(plan, v).then(|| questions.of_value(plan, stage, v, value)).flatten(),
            fact: None,
        });
    }
    Class {
        compute_s: ops.iter().map(|op| op.seconds).sum(),
        reshards_s: ops.iter().flat_map(|op| &op.reshards).map(|r| r.seconds).sum(),
        parameter_elements,
        ops,
        facts: FactsOfLayer::default(),
    }
}

/// The layout of a value in a stage; `None` if it is produced in whatever layout is needed.
fn layout(plan: &Plan, stage: &Stage, v: ValueId) -> Option<Sharding> {
    if let Some(value) = stage.shardings.get(&v) {
        return Some(plan.graph.rule(v).shardings(&value.strategy, &stage.mesh).result);
    }
    match &plan.graph.node(v).op {
        Op::Parameter(p) => stage.parameters.get(&p.name).map(|s| s.parameter.clone()),
        _ => stage.receives.get(&v).cloned(),
    }
}

fn called(plan: &Plan, v: ValueId) -> String {
    let node = plan.graph.node(v);
    match &node.op {
        Op::Parameter(p) => p.name.clone(),
        op if node.name.is_empty() => op.name().to_string(),
        _ => node.name.clone(),
    }
}
