//! Rewriting to normal forms: frameworks write the same computation in many ways.
//!
//! A region of the graph (about a block of a layer) becomes an e-graph, i.e. classes of expressions that are known to
//! be equal (Willsey et al. 2021, the crate `egg`). Each of the rules inspects a class and adds equal expressions: a
//! cancelled transpose, a recognised softmax. At the end, the cheapest way to compute the region's results is
//! extracted.
//!
//! Equal regions, such as those of repeated layers, are rewritten once. Rules, classes and ties are taken in a fixed
//! order, and their number is bounded. So the same graph gives the same result in bounded time.
//!
//! Every rule is tested on random sizes and values, and a rule without an example fails that test. A rewritten graph must verify and scale
//! with the batch as before, or the original is kept.

mod egraph;
mod extract;
mod facts;
mod region;
mod rules;

#[cfg(test)]
mod tests;

use altiplano_ir::batch::rebatch;
use altiplano_ir::graph::{Graph, Node, ValueId};
use altiplano_ir::op::Op;
use altiplano_ir::simplify::{simplify, without_dead_nodes};
use facts::Facts;
use region::{Region, regions};
use std::collections::BTreeMap;

/// The graph in the fewest and cheapest ops that the rules find. Pinned values and those in `keep` stay unchanged.
pub fn rewrite(graph: &Graph, keep: &[ValueId]) -> Graph {
    if graph.batch == 1 {
        // A batch of one sample is indistinguishable from other dimensions of size 1.
        let two = rebatch(graph, 2).map(|two| rewrite(&two, keep));
        return two.and_then(|two| rebatch(&two, 1)).unwrap_or_else(|_| graph.clone());
    }
    let pinned: Vec<ValueId> = graph.pins.iter().map(|pin| pin.value).collect();
    let kept = |v: ValueId| keep.contains(&v) || pinned.contains(&v);
    let facts = Facts::new(graph);
    let mut to = Graph { name: graph.name.clone(), batch: graph.batch, ..Default::default() };
    let mut map: Vec<Option<ValueId>> = vec![None; graph.len()];
    let mut known: BTreeMap<String, region::Rewritten> = BTreeMap::new();
    let mut regions = regions(graph, &facts, kept).into_iter().peekable();
    for v in graph.values() {
        if facts.is_constant(v) || graph.node(v).op.is_leaf() {
            let node = graph.node(v);
            let operands = node.operands.iter().filter_map(|o| map[o.index()]).collect();
            map[v.index()] = Some(to.append(Node { operands, ..node.clone() }));
        }
        while let Some(region) = regions.next_if(|region| region.last() == v) {
            let rewritten =
                known.entry(region.fingerprint(graph, &facts)).or_insert_with(|| region.rewrite(graph, &facts));
            emit(graph, &region, rewritten, &mut to, &mut map);
        }
    }
    to.outputs = graph.outputs.iter().filter_map(|o| map[o.index()]).collect();
    to.take_pins(graph, |v| map[v.index()]);
    let to = simplify(&without_dead_nodes(&to));
    // Reject a result that no longer scales with the batch.
    let scales = graph.batch == 0 || rebatch(&to, 2 * graph.batch).is_ok();
    if scales && to.verify().is_empty() { to } else { graph.clone() }
}

/// Appends a rewritten region.
fn emit(graph: &Graph, region: &Region, rewritten: &region::Rewritten, to: &mut Graph, map: &mut [Option<ValueId>]) {
    let mut values: Vec<Option<ValueId>> = Vec::with_capacity(rewritten.nodes.len());
    for node in &rewritten.nodes {
        let operand = |child: &region::Child| match *child {
            region::Child::Leaf(i) => map[region.leaves[i].index()],
            region::Child::Node(i) => values[i],
        };
        let operands: Option<Vec<ValueId>> = node.children.iter().map(operand).collect();
        let name = node.name.map(|i| graph.node(region.nodes[i]).name.clone()).unwrap_or_default();
        let (op, ty, batch_dims): (Op, _, _) = (node.op.clone(), node.ty.clone(), node.batch_dims);
        values.push(operands.map(|operands| to.append(Node { op, operands, ty, batch_dims, name })));
    }
    for (&v, child) in region.outputs.iter().zip(&rewritten.outputs) {
        map[v.index()] = match *child {
            region::Child::Leaf(i) => map[region.leaves[i].index()],
            region::Child::Node(i) => values[i],
        };
    }
}
