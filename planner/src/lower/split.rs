//! Splits a backward body in two: cotangents that earlier stages wait for, and gradients of weights, which nobody waits
//! for.
//!
//! The first part computes only the values that are sent. Values of it that the second part needs pass through buffers,
//! unless they are cheap to recompute from values that are available anyway.
//!
//! The split is at what the stage sends; the rest are the gradients of weights, which `zb-h1` delays.

use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::Op;
use altiplano_ir::optimizer::leaf;
use altiplano_ir::program::{Body, Buffer, BufferId, BufferKind, Phase};
use altiplano_ir::sharding::Sharding;
use std::collections::{BTreeMap, BTreeSet};

/// Splits `backward`. `sent` are the buffers that others wait for. Buffers for values that pass between the parts are
/// added to `buffers`.
pub fn split(backward: Body, sent: &BTreeSet<BufferId>, buffers: &mut Vec<Buffer>) -> (Body, Body) {
    let (first, mut second): (Vec<(BufferId, ValueId)>, Vec<(BufferId, ValueId)>) =
        backward.writes.iter().copied().partition(|w| sent.contains(&w.0));
    let graph = &backward.graph;
    let waited = ancestors(graph, first.iter().map(|w| w.1));
    let buffer_of: BTreeMap<ValueId, BufferId> = backward.reads.iter().copied().collect();

    let mut weights = Graph::new(graph.name.clone());
    let mut map: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    let mut reads = Vec::new();
    let mut passed: Vec<(BufferId, ValueId)> = Vec::new();
    let own = computed_later(graph, &waited, &second);
    let needed: BTreeSet<ValueId> =
        own.iter().flat_map(|v| graph.node(*v).operands.iter().copied()).chain(second.iter().map(|w| w.1)).collect();
    for v in graph.values() {
        let node = graph.node(v);
        if let Some(&buffer) = buffer_of.get(&v) {
            if own.contains(&v) || needed.contains(&v) {
                let new = weights.append(node.clone());
                reads.push((new, buffer));
                map.insert(v, new);
            }
        } else if own.contains(&v) {
            let mut node = node.clone();
            node.operands.iter_mut().for_each(|o| *o = map[o]);
            map.insert(v, weights.append(node));
        } else if needed.contains(&v) {
            // Each device has a tensor of its own here, so the global type is that of the local part.
            let id = BufferId(buffers.len() as u32);
            let (name, ty) = (format!("{v} for the gradients of weights"), node.ty.clone());
            let sharding = Sharding::replicated(&ty.shape);
            buffers.push(Buffer {
                name,
                stage: backward.stage,
                kind: BufferKind::Value,
                ty: ty.clone(),
                sharding,
                extents: None,
                host: false,
            });
            let new = leaf(&mut weights, id.to_string(), ty);
            reads.push((new, id));
            passed.push((id, v));
            map.insert(v, new);
        }
    }
    second.iter_mut().for_each(|w| w.1 = map[&w.1]);
    weights.outputs = second.iter().map(|w| w.1).collect();

    let writes = first.into_iter().chain(passed.iter().copied()).collect();
    let (graph, first_reads, writes) = only(graph, &backward.reads, writes);
    // The second part frees the buffers that both parts read, and those that pass between them.
    let later: BTreeSet<BufferId> = reads.iter().map(|r| r.1).collect();
    let (mut later_frees, frees): (Vec<BufferId>, Vec<BufferId>) =
        backward.frees.iter().copied().partition(|b| later.contains(b));
    later_frees.extend(passed.iter().map(|p| p.0));
    let stage = backward.stage;
    let weights = Body {
        name: format!("stage{stage} weights"),
        stage,
        phase: Phase::Weights,
        graph: weights,
        reads,
        writes: second,
        frees: later_frees,
    };
    (Body { graph, reads: first_reads, writes, frees, ..backward }, weights)
}

/// Values that the second part computes: those that the first does not, which `waited` for, and needed ones that are
/// cheap.
fn computed_later(graph: &Graph, waited: &BTreeSet<ValueId>, second: &[(BufferId, ValueId)]) -> BTreeSet<ValueId> {
    let results: BTreeSet<ValueId> = second.iter().map(|w| w.1).collect();
    let (rest, cheap) = (ancestors(graph, results.iter().copied()), cheap(graph));
    let mut own: BTreeSet<ValueId> = rest.iter().filter(|v| !waited.contains(v)).copied().collect();
    for v in graph.values().rev().filter(|v| rest.contains(v)) {
        let needed = results.contains(&v) || own.contains(&v);
        if needed && (own.contains(&v) || cheap[v.index()]) {
            own.insert(v);
            own.extend(graph.node(v).operands.iter().filter(|o| cheap[o.index()]));
        }
    }
    own
}

/// The part of a graph that some values need, with its reads and writes.
fn only(
    graph: &Graph,
    reads: &[(ValueId, BufferId)],
    writes: Vec<(BufferId, ValueId)>,
) -> (Graph, Vec<(ValueId, BufferId)>, Vec<(BufferId, ValueId)>) {
    let live = ancestors(graph, writes.iter().map(|w| w.1));
    let mut kept = Graph::new(graph.name.clone());
    let mut map: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    for &v in &live {
        let mut node = graph.node(v).clone();
        node.operands.iter_mut().for_each(|o| *o = map[o]);
        map.insert(v, kept.append(node));
    }
    let writes: Vec<(BufferId, ValueId)> = writes.into_iter().map(|(b, v)| (b, map[&v])).collect();
    kept.outputs = writes.iter().map(|w| w.1).collect();
    let reads = reads.iter().filter_map(|(v, b)| Some((*map.get(v)?, *b))).collect();
    (kept, reads, writes)
}

/// Values and everything that they are computed from.
fn ancestors(graph: &Graph, of: impl Iterator<Item = ValueId>) -> BTreeSet<ValueId> {
    let mut found: BTreeSet<ValueId> = of.collect();
    for v in graph.values().rev() {
        if found.contains(&v) {
            found.extend(graph.node(v).operands.iter().copied());
        }
    }
    found
}

/// Values derived from a body's reads by ops that are cheaper to repeat than their results are to keep.
fn cheap(graph: &Graph) -> Vec<bool> {
    let mut cheap: Vec<bool> = Vec::with_capacity(graph.len());
    for v in graph.values() {
        let node = graph.node(v);
        let repeats = !super::is_kept(&node.op) && !matches!(node.op, Op::Collective(_));
        cheap.push(repeats && node.operands.iter().all(|o| cheap[o.index()]));
    }
    cheap
}
