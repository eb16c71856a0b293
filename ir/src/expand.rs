//! Expansion of composites: from the graph that plans consist of to the graph that programs consist of.
//!
//! In a plan, a softmax or an attention is one op with one strategy. Its decomposition has a strategy for each node,
//! which follows from that one ([`Decomposition::strategy`]). So a plan of composites is a plan of their
//! decompositions.

use crate::graph::{Graph, Node, ValueId};
use crate::op::{Decomposition, Op};
use crate::plan::{Stage, ValueSharding};
use crate::rule::Strategy;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// A graph without composites, with the origin of each of its nodes in the graph with composites.
#[derive(Clone, Debug)]
pub struct Expanded {
    pub graph: Graph,
    /// For each value of the graph with composites, the value here.
    pub values: Vec<ValueId>,
    /// For each node here, the node there. If that is a composite, also the node of its decomposition.
    origins: Vec<(ValueId, Option<(Arc<Decomposition>, ValueId)>)>,
}

/// Expands every composite of a verified graph.
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

/// The graph without composites. The graph itself if it has none.
pub fn without_composites(graph: &Graph) -> Cow<'_, Graph> {
    match graph.nodes.iter().any(|n| matches!(n.op, Op::Composite(_))) {
        true => Cow::Owned(expand(graph).graph),
        false => Cow::Borrowed(graph),
    }
}

impl Expanded {
    /// For each value here, true if every plan recomputes it in the backward pass ([`Function::recomputes_inside`]).
    /// Results of composites are not among them.
    ///
    /// [`Function::recomputes_inside`]: crate::op::Function::recomputes_inside
    pub fn recomputed(&self, from: &Graph) -> Vec<bool> {
        let inside = |(at, (v, inside)): (usize, &(ValueId, Option<(Arc<Decomposition>, ValueId)>))| {
            let is_result = self.values[v.index()].index() == at;
            let recomputes = matches!(&from.node(*v).op, Op::Composite(op) if op.function.recomputes_inside());
            recomputes && inside.is_some() && !is_result
        };
        self.origins.iter().enumerate().map(inside).collect()
    }

    /// The first node here that stems from node `start` there or a later one.
    pub fn start(&self, start: u32) -> u32 {
        self.origins.partition_point(|(v, _)| v.0 < start) as u32
    }

    /// Converts a stage of a plan of the graph with composites to one of the graph without. The stage has the nodes
    /// from `nodes.start` to `nodes.end`. `written` writes out the layout of a node's result under a strategy.
    pub fn stage(
        &self,
        stage: &Stage,
        nodes: Range<u32>,
        written: &mut impl FnMut(ValueId, &Strategy) -> String,
    ) -> Stage {
        let mut shardings = BTreeMap::new();
        for at in self.start(nodes.start)..self.start(nodes.end) {
            let (v, inside) = &self.origins[at as usize];
            let Some(known) = stage.shardings.get(v) else { continue };
            let here = ValueId(at);
            let sharding = match inside {
                None => known.clone(),
                Some((body, inner)) if body.is_constant(*inner) => continue,
                Some((body, inner)) => {
                    let strategy = body.strategy(*inner, &known.strategy);
                    ValueSharding { name: known.name.clone(), sharding: written(here, &strategy), strategy }
                }
            };
            shardings.insert(here, sharding);
        }
        let receives = stage.receives.iter().map(|(v, s)| (self.values[v.index()], s.clone())).collect();
        Stage { shardings, receives, ..stage.clone() }
    }
}
