//! Activations that are offloaded to host memory between the forward and the backward pass of a microbatch. The forward
//! body stores each as soon as it is made. The backward body, or the one for the gradients of weights, prefetches it
//! before its first use.
//!
//! A loaded activation stays on the device until its last use. A body has room for the most that is used across any of
//! its nodes, plus one and a half times the largest activation for loads in transit. A load waits only for the product
//! after which there is room for it. So loads overlap with computation, in the order of first uses.

use crate::lower::repeat::grows;
use altiplano_ir::graph::{Graph, Node, ValueId};
use altiplano_ir::mesh::Mesh;
use altiplano_ir::op::{HostCopy, HostRoute, Op};
use altiplano_ir::program::{Body, Buffer, BufferId, BufferKind};
use std::collections::{BTreeMap, BTreeSet};

/// Activations smaller than this part of the largest stay on the device. Copies of row statistics and the like would
/// take longer to start than to transfer.
const SMALL: u64 = 64;

/// The bodies of a stage between which activations pass.
pub struct Passes<'a> {
    pub forward: &'a mut Body,
    /// The bodies that read what the forward body leaves, in the order in which they run.
    pub later: Vec<&'a mut Body>,
    /// Results of the forward body that are sent to other stages.
    pub sent: BTreeSet<BufferId>,
    /// True if other microbatches may run between the passes of one. Otherwise the activations that the backward body
    /// needs first stay on the device, as far as there is room.
    pub apart: bool,
}

/// An activation in one body, with its first and last use.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Used {
    leaf: ValueId,
    buffer: BufferId,
    bytes: u64,
    first: usize,
    last: usize,
    /// True if it is loaded, false if it is there from the start.
    loads: bool,
}

/// Changes the bodies so that activations pass through host memory. Host buffers are marked or added.
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
    // A buffer that the device sends or receives exists in both memories.
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

/// Stores the values that a body writes to or reads from these buffers in their host buffers, each as soon as it is
/// made.
fn store(body: &mut Body, in_host: &BTreeMap<BufferId, BufferId>) {
    let read = body.reads.iter().map(|&(v, b)| (b, v)).filter(|(b, _)| in_host.contains_key(b));
    let stays_read: Vec<(BufferId, ValueId)> = read.collect();
    let mut stores: BTreeMap<ValueId, Vec<BufferId>> = BTreeMap::new();
    for (b, v) in body.writes.iter().chain(&stays_read) {
        if let Some(&host) = in_host.get(b) {
            stores.entry(*v).or_default().push(host);
        }
    }
    // A value from another stage is not needed on the device once this body has ended.
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
    // For loaded leaves, their new position; for all values, their replacement.
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

/// Uses of these buffers in a body, in the order of first uses.
fn used(body: &Body, away: &BTreeMap<BufferId, u64>) -> Vec<Used> {
    let graph = &body.graph;
    let end = graph.len();
    let (mut first, mut last) = (vec![end; graph.len()], vec![0; graph.len()]);
    body.writes.iter().for_each(|w| last[w.1.index()] = end);
    for v in graph.values().rev() {
        // A view keeps its operand in use for as long as the view is used.
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

/// The buffers that a body uses first, as many as there is room for.
fn used_first(body: &Body, away: &BTreeMap<BufferId, u64>) -> BTreeSet<BufferId> {
    let used = used(body, away);
    let room = room(&used);
    let sums = used.iter().scan(0, |sum, u| {
        *sum += u.bytes;
        Some(*sum)
    });
    used.iter().zip(sums).take_while(|(_, sum)| *sum <= room).map(|(u, _)| u.buffer).collect()
}

/// Most bytes that are on the device at once, unless a use demands more.
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

/// For each load, the node that it waits for: the first product after which there is room for it, or the last before
/// its first use.
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
        // The result of such a product is in memory, whatever kernels the graph is cut into.
        let is_product = |v: ValueId| graph.node(v).op.is_contraction() && !grows(graph, v);
        opens = at < graph.len() && is_product(ValueId(at as u32));
        gate = if opens { Some(at) } else { gate };
    }
    gates
}

/// Returns true if an op only rearranges or selects elements of its operand.
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

    /// A chain of `count` products, and their positions.
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

    /// Values of the given bytes, each used from one product to another.
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
        // Room for two in use and one in transit.
        assert_eq!(gates(&graph, &used), [None, None, None, Some(at[0]), Some(at[1])]);
    }

    proptest! {
        /// Values are there in time and in order, and never exceed the room.
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
