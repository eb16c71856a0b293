//! Activations that are in host memory between the forward and the backward pass of a microbatch: the forward body stores each as soon
//! as it is made, and the backward body, or the one for the gradients of weights, loads it ahead of its first use.
//!
//! What is loaded is on the device from then to its last use. A body has room for the most that is used across any of its nodes, and
//! for one and a half times the largest more, which are on their way; a load waits for the product after which there is room for
//! it, and nothing else holds it up. So loads go on beside what is computed, in the order of first uses.

use crate::lower::repeat::grows;
use altiplano_ir::graph::{Graph, Node, ValueId};
use altiplano_ir::mesh::Mesh;
use altiplano_ir::op::{HostCopy, HostRoute, Op};
use altiplano_ir::program::{Body, Buffer, BufferId, BufferKind};
use std::collections::{BTreeMap, BTreeSet};

/// What is smaller than this part of the largest activation stays on the device: statistics of rows and the like, whose copies would
/// take longer to begin than to make.
const SMALL: u64 = 64;

/// The bodies of a stage between which activations pass.
pub struct Passes<'a> {
    pub forward: &'a mut Body,
    /// Those that read what the forward body leaves, in the order in which they run.
    pub later: Vec<&'a mut Body>,
    /// What other stages are sent of the forward body's results.
    pub sent: BTreeSet<BufferId>,
    /// Whether other microbatches may run between the passes of one. Otherwise what the backward body needs first stays where it is,
    /// as much as there is room for.
    pub apart: bool,
}

/// An activation as one body uses it: at its first and its last node that do, and those between.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Used {
    leaf: ValueId,
    buffer: BufferId,
    bytes: u64,
    first: usize,
    last: usize,
    /// It is loaded; else it is there from the start.
    loads: bool,
}

/// Changes the bodies so that activations pass by way of the host. Buffers there are marked or added.
pub fn offload(passes: Passes<'_>, buffers: &mut Vec<Buffer>, mesh: &Mesh) {
    let Passes { forward, mut later, sent, apart } = passes;
    let local_bytes = |b: BufferId| {
        let Buffer { sharding, ty, .. } = &buffers[b.0 as usize];
        sharding.local_bytes(ty, mesh)
    };
    let written: BTreeSet<BufferId> = forward.writes.iter().map(|w| w.0).collect();
    let touched = || forward.reads.iter().map(|r| r.1).chain(written.iter().copied());
    let passing: BTreeSet<BufferId> = touched().filter(|b| buffers[b.0 as usize].kind == BufferKind::Value).collect();
    let read_later = |b: &BufferId| later.iter().any(|body| body.reads.iter().any(|r| r.1 == *b));
    let mut away: BTreeMap<BufferId, u64> =
        passing.into_iter().filter(read_later).map(|b| (b, local_bytes(b))).collect();
    let largest = away.values().copied().max().unwrap_or(0);
    away.retain(|_, bytes| bytes.saturating_mul(SMALL) >= largest && *bytes > 0);
    let stays: BTreeSet<BufferId> = match later.first() {
        Some(body) if !apart => used_first(body, &away),
        _ => BTreeSet::new(),
    };
    // What is sent from the device, or received there, has a buffer in each memory.
    let mut in_host: BTreeMap<BufferId, BufferId> = BTreeMap::new();
    for &buffer in away.keys().filter(|b| !stays.contains(b)) {
        let own = &mut buffers[buffer.0 as usize];
        if written.contains(&buffer) && !sent.contains(&buffer) {
            own.host = true;
            in_host.insert(buffer, buffer);
        } else {
            let copy = Buffer { name: format!("{} in the host", own.name), host: true, ..own.clone() };
            buffers.push(copy);
            in_host.insert(buffer, BufferId(buffers.len() as u32 - 1));
        }
    }
    store(forward, &in_host);
    for body in &mut later {
        let mut used = used(body, &away);
        for used in &mut used {
            used.loads = !stays.contains(&used.buffer);
        }
        load(body, &used);
        let moved = |b: &mut BufferId| *b = in_host.get(b).copied().unwrap_or(*b);
        body.reads.iter_mut().for_each(|r| moved(&mut r.1));
        body.frees.iter_mut().for_each(moved);
    }
}

/// Stores what a body leaves or reads for these buffers in those beside them, each as soon as it is made.
fn store(body: &mut Body, in_host: &BTreeMap<BufferId, BufferId>) {
    let read = body.reads.iter().map(|&(v, b)| (b, v)).filter(|(b, _)| in_host.contains_key(b));
    let stays_read: Vec<(BufferId, ValueId)> = read.collect();
    let mut stores: BTreeMap<ValueId, Vec<BufferId>> = BTreeMap::new();
    for (b, v) in body.writes.iter().chain(&stays_read) {
        if let Some(&host) = in_host.get(b) {
            stores.entry(*v).or_default().push(host);
        }
    }
    // What came from another stage is not needed on the device once this body has ended.
    body.frees.extend(stays_read.iter().map(|(b, _)| *b));
    let old = std::mem::take(&mut body.graph.nodes);
    let mut map: Vec<ValueId> = Vec::with_capacity(old.len());
    let mut stored: Vec<(BufferId, ValueId)> = Vec::new();
    for (v, node) in (0..).map(ValueId).zip(&old) {
        map.push(body.graph.append(renamed(node, &map)));
        for &host in stores.get(&v).into_iter().flatten() {
            let copy = body.graph.emit(Op::HostCopy(HostCopy { route: HostRoute::Store }), &[map[v.index()]]);
            stored.push((host, copy));
        }
    }
    body.reads.iter_mut().for_each(|r| r.0 = map[r.0.index()]);
    body.writes.retain(|(b, _)| in_host.get(b) != Some(b));
    body.writes.iter_mut().for_each(|w| w.1 = map[w.1.index()]);
    body.writes.extend(stored);
    body.graph.outputs = body.writes.iter().map(|w| w.1).collect();
}

/// Loads activations in the order of their first uses.
fn load(body: &mut Body, used: &[Used]) {
    let gates = gates(&body.graph, used);
    let loads: Vec<(ValueId, Option<usize>)> = used.iter().filter(|u| u.loads).map(|u| u.leaf).zip(gates).collect();
    let leaves: BTreeSet<ValueId> = loads.iter().map(|l| l.0).collect();
    let old = std::mem::take(&mut body.graph.nodes);
    // Of leaves that are loaded, where they are now; of all values what stands for them.
    let mut moved: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    let mut map: Vec<ValueId> = vec![ValueId(u32::MAX); old.len()];
    let graph = &mut body.graph;
    let mut next = loads.iter().peekable();
    let mut bring = |graph: &mut Graph, map: &mut [ValueId], now: Option<usize>| {
        while let Some((leaf, gate)) = next.next_if(|(_, gate)| *gate <= now) {
            let new = graph.append(old[leaf.index()].clone());
            let waits = gate.map(|gate| map[gate]);
            let operands: Vec<ValueId> = std::iter::once(new).chain(waits).collect();
            map[leaf.index()] = graph.emit(Op::HostCopy(HostCopy { route: HostRoute::Load }), &operands);
            moved.insert(*leaf, new);
        }
    };
    bring(graph, &mut map, None);
    for (i, node) in old.iter().enumerate() {
        if !leaves.contains(&ValueId(i as u32)) {
            map[i] = graph.append(renamed(node, &map));
            bring(graph, &mut map, Some(i));
        }
    }
    body.reads.iter_mut().for_each(|r| r.0 = moved.get(&r.0).copied().unwrap_or(map[r.0.index()]));
    body.writes.iter_mut().for_each(|w| w.1 = map[w.1.index()]);
    body.graph.outputs = body.writes.iter().map(|w| w.1).collect();
}

fn renamed(node: &Node, map: &[ValueId]) -> Node {
    Node { operands: node.operands.iter().map(|o| map[o.index()]).collect(), ..node.clone() }
}

/// How a body uses these buffers, those used first first.
fn used(body: &Body, away: &BTreeMap<BufferId, u64>) -> Vec<Used> {
    let graph = &body.graph;
    let end = graph.len();
    let (mut first, mut last) = (vec![end; graph.len()], vec![0; graph.len()]);
    body.writes.iter().for_each(|w| last[w.1.index()] = end);
    for v in graph.values().rev() {
        // What looks at a value in another way is where that is.
        let until = if is_view(&graph.node(v).op) { last[v.index()].max(v.index()) } else { v.index() };
        for o in &graph.node(v).operands {
            first[o.index()] = v.index();
            last[o.index()] = last[o.index()].max(until);
        }
    }
    let of = |&(leaf, buffer): &(ValueId, BufferId)| {
        let (first, last) = (first[leaf.index()], last[leaf.index()]);
        Some(Used { leaf, buffer, bytes: *away.get(&buffer)?, first, last, loads: true })
    };
    let mut used: Vec<Used> = body.reads.iter().filter_map(of).collect();
    used.sort_by_key(|u| (u.first, u.leaf));
    used
}

/// What a body uses first, as much as there is room for.
fn used_first(body: &Body, away: &BTreeMap<BufferId, u64>) -> BTreeSet<BufferId> {
    let used = used(body, away);
    let room = room(&used);
    let sums = used.iter().scan(0, |sum, u| {
        *sum += u.bytes;
        Some(*sum)
    });
    used.iter().zip(sums).take_while(|(_, sum)| *sum <= room).map(|(u, _)| u.buffer).collect()
}

/// Bytes that are on the device at once, as far as uses allow.
fn room(used: &[Used]) -> u64 {
    let mut changes: BTreeMap<usize, i64> = BTreeMap::new();
    for u in used {
        *changes.entry(u.first).or_default() += u.bytes as i64;
        *changes.entry(u.last + 1).or_default() -= u.bytes as i64;
    }
    let held = changes.values().scan(0i64, |held, change| {
        *held += change;
        Some(*held)
    });
    let most = held.max().unwrap_or(0).max(0) as u64;
    let largest = used.iter().map(|u| u.bytes).max().unwrap_or(0);
    most + largest + largest / 2
}

/// For each load the node that it waits for: the first product after which there is room for it, or the last before its first use.
fn gates(graph: &Graph, used: &[Used]) -> Vec<Option<usize>> {
    let room = room(used);
    let mut ends: BTreeMap<usize, u64> = BTreeMap::new();
    used.iter().for_each(|u| *ends.entry(u.last).or_default() += u.bytes);
    let mut held: u64 = used.iter().filter(|u| !u.loads).map(|u| u.bytes).sum();
    let loads: Vec<&Used> = used.iter().filter(|u| u.loads).collect();
    let mut gates: Vec<Option<usize>> = Vec::with_capacity(loads.len());
    let (mut gate, mut opens) = (None, true);
    for at in 0..=graph.len() {
        while let Some(u) = loads.get(gates.len()) {
            if u.first > at && !(opens && held + u.bytes <= room) {
                break;
            }
            held += u.bytes;
            gates.push(gate);
        }
        held = held.saturating_sub(ends.get(&at).copied().unwrap_or(0));
        // A value that is in memory whatever kernels the graph is cut into.
        let is_product = |v: ValueId| graph.node(v).op.is_contraction() && !grows(graph, v);
        opens = at < graph.len() && is_product(ValueId(at as u32));
        gate = if opens { Some(at) } else { gate };
    }
    gates
}

/// Whether an op only says anew which elements of its operand are where.
fn is_view(op: &Op) -> bool {
    matches!(op, Op::Reshape(_) | Op::Transpose(_) | Op::Slice(_) | Op::BroadcastInDim(_))
}

#[cfg(test)]
mod tests {
    use super::*;
    use altiplano_ir::array::matmul;
    use altiplano_ir::dtype::DType;
    use altiplano_ir::optimizer::leaf;
    use altiplano_ir::types::TensorType;
    use proptest::prelude::*;

    /// So many products one after the other, and where they are.
    fn products(count: usize) -> (Graph, Vec<usize>) {
        let mut graph = Graph::new("products");
        let ty = TensorType::new(DType::F32, vec![4, 4]);
        let weight = leaf(&mut graph, "weight", ty.clone());
        let mut value = leaf(&mut graph, "value", ty);
        let mut at = Vec::new();
        for _ in 0..count {
            value = matmul(&mut graph, value, weight).expect("a product");
            at.push(value.index());
        }
        (graph, at)
    }

    /// Values of these bytes, used from one product to another.
    fn used_at(at: &[usize], values: &[(u64, usize, usize)]) -> Vec<Used> {
        let of = |&(bytes, first, last): &(u64, usize, usize)| Used {
            leaf: ValueId(0),
            buffer: BufferId(0),
            bytes,
            first: at[first],
            last: at[last],
            loads: true,
        };
        values.iter().map(of).collect()
    }

    #[test]
    fn equal_values_are_double_buffered() {
        let (graph, at) = products(5);
        let used = used_at(&at, &[(8, 0, 0), (8, 1, 1), (8, 2, 2), (8, 3, 3), (8, 4, 4)]);
        let waits = [None, None, Some(at[0]), Some(at[1]), Some(at[2])];
        assert_eq!(gates(&graph, &used), waits);
    }

    #[test]
    fn what_is_used_for_long_is_beside_what_passes() {
        let (graph, at) = products(4);
        let used = used_at(&at, &[(8, 0, 3), (8, 0, 0), (8, 1, 1), (8, 2, 2), (8, 3, 3)]);
        // Room for two in use and one on its way.
        assert_eq!(gates(&graph, &used), [None, None, None, Some(at[0]), Some(at[1])]);
    }

    proptest! {
        /// Values are there in time, in order, and never more of them than there is room for.
        #[test]
        fn room_is_never_exceeded(values in proptest::collection::vec((1u64..50, 0usize..20, 0usize..6), 1..40)) {
            let (graph, at) = products(20);
            let mut values: Vec<(u64, usize, usize)> =
                values.into_iter().map(|(bytes, first, more)| (bytes, first, (first + more).min(19))).collect();
            values.sort_by_key(|v| v.1);
            let used = used_at(&at, &values);
            let (gates, room) = (gates(&graph, &used), room(&used));
            prop_assert!(gates.is_sorted() && gates.len() == used.len());
            prop_assert!(gates.iter().zip(&used).all(|(gate, u)| gate.is_none_or(|gate| gate < u.first)));
            for &now in &at {
                let there = gates.iter().zip(&used).filter(|(gate, u)| gate.is_none_or(|g| g < now) && u.last >= now);
                let held: u64 = there.map(|(_, u)| u.bytes).sum();
                prop_assert!(held <= room, "{held} of {room} at {now}");
            }
        }
    }
}
