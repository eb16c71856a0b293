//! Composites written out: from the graph that plans are made of to the graph that programs are made of.
//!
//! A plan speaks of a softmax or an attention as one op with one strategy. Its decomposition has a strategy for each node,
//! which follows from that one ([`Decomposition::strategy`]), so a plan of composites is a plan of their decompositions.

use crate::graph::{Graph, Node, ValueId};
use crate::op::{Decomposition, Op};
use crate::plan::{Plan, Stage, ValueSharding};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A graph without composites, and what of the graph with them each of its nodes is.
#[derive(Clone, Debug)]
pub struct Expanded {
    pub graph: Graph,
    /// For each value of the graph with composites the one here.
    pub values: Vec<ValueId>,
    /// For each node here the node there, and where that is a composite, the node of its decomposition.
    origins: Vec<(ValueId, Option<(Arc<Decomposition>, ValueId)>)>,
}

/// Writes out every composite of a verified graph.
pub fn expand(graph: &Graph) -> Expanded {
    let mut to = Graph { name: graph.name.clone(), batch: graph.batch, ..Default::default() };
    let mut values: Vec<ValueId> = Vec::with_capacity(graph.len());
    let mut origins = Vec::with_capacity(graph.len());
    for v in graph.values() {
        let node = graph.node(v);
        let operands: Vec<ValueId> = node.operands.iter().map(|o| values[o.index()]).collect();
        let body = match &node.op {
            Op::Composite(op) => op.body(&graph.operand_types(v)).ok(),
            _ => None,
        };
        let Some(body) = body else {
            values.push(to.append(Node { operands, ..node.clone() }));
            origins.push((v, None));
            continue;
        };
        let before = to.len();
        let inside = body.append_to(&mut to, &operands);
        let of_operands = node.operands.iter().map(|&o| graph.node(o).batch_dims).collect::<Vec<_>>();
        let marks = body.batch_dims(&of_operands, node.batch_dims);
        for (inner, &value) in body.graph.values().zip(&inside).filter(|(_, value)| value.index() >= before) {
            to.nodes[value.index()].name.clone_from(&node.name);
            to.nodes[value.index()].batch_dims = marks[inner.index()];
            origins.push((v, Some((body.clone(), inner))));
        }
        values.push(inside[body.graph.outputs[0].index()]);
    }
    to.outputs = graph.outputs.iter().map(|o| values[o.index()]).collect();
    to.take_pins(graph, |v| Some(values[v.index()]));
    Expanded { graph: to, values, origins }
}

/// The graph without composites; the graph itself where it has none.
pub fn without_composites(graph: &Graph) -> Cow<'_, Graph> {
    match graph.nodes.iter().any(|n| matches!(n.op, Op::Composite(_))) {
        true => Cow::Owned(expand(graph).graph),
        false => Cow::Borrowed(graph),
    }
}

/// The plan of the graph without composites that the plan of the graph with them stands for; predictions are left as they are.
pub fn expanded_plan(plan: &Plan) -> Cow<'_, Plan> {
    if !plan.graph.nodes.iter().any(|n| matches!(n.op, Op::Composite(_))) {
        return Cow::Borrowed(plan);
    }
    let expanded = expand(&plan.graph);
    let value = |v: &ValueId| expanded.values[v.index()];
    // A layer begins where the first node of it does.
    let first = |&start: &u32| {
        let first = expanded.origins.partition_point(|(v, _)| v.0 < start);
        first as u32
    };
    let stage = |stage: &Stage| {
        let mut shardings = BTreeMap::new();
        for (at, (v, inside)) in expanded.origins.iter().enumerate() {
            let Some(known) = stage.shardings.get(v) else { continue };
            let here = ValueId(at as u32);
            let sharding = match inside {
                None => known.clone(),
                Some((body, inner)) if body.is_constant(*inner) => continue,
                Some((body, inner)) => {
                    let strategy = body.strategy(*inner, &known.strategy);
                    let result = expanded.graph.rule(here).shardings(&strategy, &stage.mesh).result;
                    let sharding = result.display(&stage.mesh).to_string();
                    ValueSharding { name: known.name.clone(), sharding, strategy }
                }
            };
            shardings.insert(here, sharding);
        }
        let receives = stage.receives.iter().map(|(v, s)| (value(v), s.clone())).collect();
        Stage { shardings, receives, ..stage.clone() }
    };
    let stages = plan.stages.iter().map(stage).collect();
    let layers = plan.layers.iter().map(first).collect();
    let stop_gradients = plan.stop_gradients.iter().map(value).collect();
    Cow::Owned(Plan { stages, layers, stop_gradients, graph: expanded.graph, ..plan.clone() })
}
