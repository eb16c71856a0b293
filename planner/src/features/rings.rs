//! Ring attention, as another graph of the same model (see [`array::ring_attention`]).
//!
//! A plan that splits the positions of an attention gathers its keys and values, so every device holds all of them.
//! With as many blocks as there are parts, the same strategy sends them around a ring, one block at a time and
//! overlapped with computation. So the plan found is first predicted with rings and nothing else changed, which takes
//! no search. The graph with rings is searched if that is faster or leaner, or if nothing fits and keys need a good
//! part of memory. Predictions decide between the results.
//!
//! [`array::ring_attention`]: altiplano_ir::array::ring_attention

use crate::layers::graph::LayeredGraph;
use crate::predict::predict_with;
use crate::request::{PlanFailure, Request, SearchKind};
use crate::search::choice::UNDECIDED;
use altiplano_cost_models::Costs;
use altiplano_ir::array::MOST_BLOCKS;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{Function, Op, Operator};
use altiplano_ir::plan::{Plan, Stage, Target, graph_hash};
use altiplano_ir::recompute::Recompute;
use altiplano_ir::rule::AxisUse;
use std::borrow::Cow;
use std::collections::BTreeMap;

/// Number of blocks into which an attention's keys and values are cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ring {
    /// The number for which the plan is better.
    #[default]
    Auto,
    /// One: keys and values are gathered if positions are split.
    None,
    /// This many, for every attention that can be cut so.
    Blocks(u64),
}

/// Share of a device's memory. If nothing fits, a ring is tried if the keys and values of one sample need this much. If
/// a ring takes as long, it is searched if it saves this much.
const WORTH_A_RING: f64 = 1.0 / 32.0;
/// Time of a step that recomputes everything, relative to one that recomputes nothing.
const RECOMPUTED: f64 = 4.0 / 3.0;

/// For an attention, true if it is one block; `None` for other ops.
fn is_whole_attention(op: &Op) -> Option<bool> {
    match op {
        Op::Composite(op) => match op.function {
            Function::Attention { blocks, .. } => Some(blocks == 1),
            _ => None,
        },
        _ => None,
    }
}

/// The graph with these attentions in blocks; `None` if that changes nothing.
fn in_blocks(graph: &Graph, blocks: &BTreeMap<ValueId, u64>) -> Option<Graph> {
    let mut cut = graph.clone();
    let mut changed = false;
    for (&v, &blocks) in blocks {
        let Op::Composite(op) = &graph.node(v).op else { continue };
        let Function::Attention { scale, causal, .. } = op.function else { continue };
        let op: Op = Function::Attention { scale, causal, blocks }.into();
        // A mask that differs between queries allows no blocks, nor do positions that are not divisible.
        if op != graph.node(v).op && op.infer(&graph.operand_types(v)).is_ok_and(|ty| ty == *graph.ty(v)) {
            cut.nodes[v.index()].op = op;
            changed = true;
        }
    }
    changed.then_some(cut)
}

/// The attentions of a graph that are one block, or those that are not.
fn attentions(graph: &Graph, whole: bool) -> impl Iterator<Item = ValueId> + '_ {
    graph.values().filter(move |v| is_whole_attention(&graph.node(*v).op) == Some(whole))
}

/// The request with as many blocks as it asks for; an error if no attention can be cut so.
pub fn with_blocks(request: &Request) -> Result<Cow<'_, Request>, PlanFailure> {
    let Ring::Blocks(blocks) = request.ring else { return Ok(Cow::Borrowed(request)) };
    let refused = |problem| Err(PlanFailure::Option { option: "ring", value: blocks, problem });
    if !(2..=MOST_BLOCKS).contains(&blocks) {
        return refused("must be between 2 and 64, or 'auto' or 'none'");
    }
    let all = attentions(&request.graph, true).map(|v| (v, blocks)).collect();
    match in_blocks(&request.graph, &all) {
        Some(graph) => Ok(Cow::Owned(Request { graph: graph.into(), ring: Ring::None, ..request.clone() })),
        None => refused("blocks are what no attention of the model can be cut into"),
    }
}

/// The same request with rings, if its plan gathers keys, or if none fits and rings may help.
pub fn variant(request: &Request, plan: &Result<Plan, PlanFailure>, costs: &dyn Costs) -> Option<Request> {
    let searches =
        request.ring == Ring::Auto && request.target == Target::Altiplano && request.search != SearchKind::Alpa;
    if !searches || !request.graph.pins.is_empty() {
        return None;
    }
    let blocks = match plan {
        Ok(plan) => Some(gathered(plan)).filter(|blocks| gains(plan, blocks, costs))?,
        Err(PlanFailure::Memory { .. }) => of_memory(request),
        Err(_) => return None,
    };
    let graph = in_blocks(&request.graph, &blocks)?;
    Some(Request { graph: graph.into(), baselines: false, ..request.clone() })
}

/// The attentions whose positions a plan splits, and the number of parts.
fn gathered(plan: &Plan) -> BTreeMap<ValueId, u64> {
    let mut found = BTreeMap::new();
    for v in attentions(&plan.graph, true) {
        let rule = plan.graph.rule(v);
        let stage = plan.stages.iter().find_map(|stage| Some((stage, stage.shardings.get(&v)?)));
        let Some((stage, sharding)) = stage else { continue };
        let axes = sharding.strategy.factor_axes(rule.factors.len());
        let positions = rule.operands[0][1].iter().flat_map(|&f| axes[usize::from(f)].iter().copied());
        let parts = stage.mesh.product(&positions.collect::<Vec<_>>());
        if parts > 1 {
            found.insert(v, parts);
        }
    }
    found
}

/// The plan with attentions in these blocks, each split as before; `None` if there is no such strategy.
fn ringed(plan: &Plan, graph: Graph, blocks: &BTreeMap<ValueId, u64>) -> Option<Plan> {
    let mut stages = plan.stages.clone();
    for &v in blocks.keys() {
        let (was, is) = (plan.graph.rule(v), graph.rule(v));
        // An axis that split a dimension of the result now splits the first factors of that dimension; for positions,
        // the blocks.
        let renamed = |factor: u8| {
            let mut dims = was.result.iter().zip(&is.result);
            dims.find_map(|(was, is)| is.get(was.iter().position(|&f| f == factor)?).copied())
        };
        for stage in &mut stages {
            let Some(of_value) = stage.shardings.get_mut(&v) else { continue };
            for axis in &mut of_value.strategy.0 {
                if let AxisUse::Factor { factor, .. } = axis {
                    *factor = renamed(*factor)?;
                }
            }
            if !is.allows(&of_value.strategy, &stage.mesh) {
                return None;
            }
        }
    }
    Some(Plan { graph_hash: graph_hash(&graph), graph: graph.into(), stages, padding: None, ..plan.clone() })
}

/// Returns true if a plan is faster with these blocks, or needs notably less memory for an acceptable time. If that
/// cannot be predicted, returns true as well.
fn gains(plan: &Plan, blocks: &BTreeMap<ValueId, u64>, costs: &dyn Costs) -> bool {
    let Some(graph) = in_blocks(&plan.graph, blocks) else { return false };
    let layered = LayeredGraph::new(graph.clone(), plan.layers.clone(), &plan.stop_gradients, plan.schedule.trains());
    let ringed = ringed(plan, graph, blocks).and_then(|ringed| predict_with(ringed, &layered, costs, None).ok());
    let Some(ringed) = ringed else { return true };
    let fullest = |plan: &Plan| {
        let part = |s: &Stage| s.predicted.peak_bytes as f64 / plan.usable_bytes(s) as f64;
        plan.stages.iter().map(part).fold(0.0, f64::max)
    };
    let times = ringed.predicted.step_time_s / plan.predicted.step_time_s;
    // Saved memory may be worth as much time as recomputation takes.
    let recomputes = plan.stages.iter().any(|s| s.layers.clone().any(|l| s.recomputes(l) != Recompute::None));
    let most = if recomputes { RECOMPUTED } else { 1.0 + UNDECIDED };
    times < 1.0 || (times < most && fullest(&ringed) < fullest(plan) - WORTH_A_RING)
}

/// If keys and values are large, as many blocks as a node has devices.
fn of_memory(request: &Request) -> BTreeMap<ValueId, u64> {
    let Some(group) = request.cluster.groups.iter().max_by_key(|g| g.num_devices()) else { return BTreeMap::new() };
    let blocks = u64::from(if group.devices_per_node > 1 { group.devices_per_node } else { group.nodes });
    let graph = &request.graph;
    let bytes = |v: ValueId| -> u64 { graph.node(v).operands[1..3].iter().map(|&o| graph.ty(o).bytes()).sum() };
    let all: u64 = attentions(graph, true).map(bytes).sum();
    let of_sample = all as f64 / graph.batch.max(1) as f64;
    if blocks < 2 || of_sample < WORTH_A_RING * request.cluster.usable_bytes(group) as f64 {
        return BTreeMap::new();
    }
    attentions(graph, true).map(|v| (v, blocks)).collect()
}

/// The graph without rings, for which a plan with rings was requested.
pub fn without(graph: &Graph) -> Graph {
    let all = attentions(graph, false).map(|v| (v, 1)).collect();
    in_blocks(graph, &all).unwrap_or_else(|| graph.clone())
}
