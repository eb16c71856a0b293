//! Fewer layers. The first two of a run of equal layers stay, and users of the last one use the second.

use crate::repetition::{Repetition, longest, numbered};
use altiplano_ir::graph::{Graph, Node, ValueId};
use altiplano_ir::op::Op;
use std::collections::BTreeSet;

/// The number of layers of each run that stay: one that begins it, and one that continues it.
const KEPT: usize = 2;

/// A graph with fewer layers.
pub(crate) struct FewerLayers {
    pub graph: Graph,
    /// For each value of the original graph, the same value here or its counterpart in a remaining layer.
    pub map: Vec<Option<ValueId>>,
    /// The layers of all shortened runs, after and before.
    pub layers: (usize, usize),
}

impl FewerLayers {
    /// All layers of a graph, unshortened.
    pub(crate) fn all(graph: &Graph) -> FewerLayers {
        FewerLayers { graph: graph.clone(), map: graph.values().map(Some).collect(), layers: (0, 0) }
    }

    /// Shortens every run of more than two equal layers, the longest first.
    pub(crate) fn shorten(&mut self) {
        while let Some((shorter, map, count)) = shortened(&self.graph) {
            self.map.iter_mut().for_each(|v| *v = v.and_then(|v| map[v.index()]));
            self.graph = shorter;
            self.layers = (self.layers.0 + KEPT, self.layers.1 + count);
        }
    }
}

/// The graph with its longest run of layers shortened, the new place of its values, and the number of layers of the
/// run.
fn shortened(graph: &Graph) -> Option<(Graph, Vec<Option<ValueId>>, usize)> {
    let varies = graph.depends_on(|v| graph.node(v).op.is_leaf());
    let nodes: Vec<ValueId> = graph.values().filter(|v| varies[v.index()] && !graph.node(*v).op.is_leaf()).collect();
    let signature = |&v: &ValueId| {
        let node = graph.node(v);
        format!("{:?} {:?} {} {}", node.op, graph.operand_types(v), node.ty, node.batch_dims)
    };
    let ids = numbered(&nodes.iter().map(signature).collect::<Vec<_>>());
    let parameters = |layer: &[ValueId]| -> BTreeSet<ValueId> {
        let operands = layer.iter().flat_map(|&v| graph.node(v).operands.iter().copied());
        operands.filter(|&o| matches!(graph.node(o).op, Op::Parameter(_))).collect()
    };
    // A layer contracts the previous layer's result with its own weights. A repetition without weights is a polynomial,
    // or the steps of a loop over time. Parallel repetitions are queries, keys and values.
    let is_layer = |run: Repetition| {
        let layer = |number: usize| &nodes[run.first + number * run.period..run.first + (number + 1) * run.period];
        let works = |&v: &ValueId| graph.node(v).op.is_contraction();
        let follows = |v: &ValueId| graph.node(*v).operands.iter().any(|o| layer(0).binary_search(o).is_ok());
        run.count > KEPT
            && layer(0).iter().any(works)
            && layer(1).iter().any(follows)
            && !parameters(layer(1)).is_subset(&parameters(layer(0)))
    };
    let run = longest(&ids, is_layer)?;
    let dropped = run.first + KEPT * run.period..run.first + run.count * run.period;
    let mut counterpart: Vec<ValueId> = graph.values().collect();
    for at in dropped {
        let same = run.first + (KEPT - 1) * run.period + (at - run.first) % run.period;
        counterpart[nodes[at].index()] = nodes[same];
    }

    let mut live = vec![false; graph.len()];
    let users = graph.users();
    // Leaves that were already unused stay.
    graph
        .values()
        .filter(|v| graph.node(*v).op.is_leaf() && users[v.index()].is_empty())
        .for_each(|v| live[v.index()] = true);
    graph.outputs.iter().for_each(|o| live[counterpart[o.index()].index()] = true);
    for v in graph.values().rev().filter(|v| counterpart[v.index()] == *v) {
        if live[v.index()] {
            graph.node(v).operands.iter().for_each(|o| live[counterpart[o.index()].index()] = true);
        }
    }
    let mut to = Graph { name: graph.name.clone(), batch: graph.batch, ..Default::default() };
    let mut map: Vec<Option<ValueId>> = vec![None; graph.len()];
    for v in graph.values() {
        let same = counterpart[v.index()];
        if same != v {
            map[v.index()] = map[same.index()];
        } else if live[v.index()] {
            let node = graph.node(v);
            let operands = node.operands.iter().map(|o| map[o.index()]).collect::<Option<_>>()?;
            map[v.index()] = Some(to.append(Node { operands, ..node.clone() }));
        }
    }
    to.outputs = graph.outputs.iter().map(|o| map[o.index()]).collect::<Option<_>>()?;
    to.take_pins(graph, |v| map[v.index()].filter(|_| counterpart[v.index()] == v));
    Some((to, map, run.count))
}
