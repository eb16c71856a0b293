//! The memory of an NVIDIA GPU that runs a body: the values that its kernels read and write.

use super::gathered::{Products, TILE_BYTES};
use super::{Leaf, Output, Step, Steps, assign};
use crate::dtype::DType;
use crate::graph::{Graph, ValueId};
use crate::kernels::{Kernel, KernelKind};
use crate::op::Op;
use crate::program::{Body, BufferId, Program};
use std::collections::{BTreeMap, BTreeSet};

/// Blocks of device memory are multiples of this many bytes: PyTorch's caching allocator rounds to 512
/// (c10/cuda/CUDACachingAllocator.h, `kMinBlockSize`), and the CUDA driver aligns to at least 256.
pub const BLOCK_BYTES: u64 = 512;

/// Converts kernels to steps. Values inside a fused kernel are not in memory, and an elementwise kernel may overwrite
/// an input that it reads for the last time.
///
/// Persistent buffers are allocated once, and their new value is written into them. It needs memory of its own only
/// while the old value is still to be read. An output of zero bytes is written into its buffer.
///
/// A step is a kernel, by its position in `kernels`. Without one, it is a value known beforehand.
pub fn launched(program: &Program, body: &Body, kernels: &[Kernel]) -> Steps<Option<usize>> {
    let graph = &body.graph;
    let step = |kernel, node, inputs, outputs, workspace_bytes, replaceable| Step {
        node,
        members: Vec::new(),
        kernel,
        inputs,
        outputs,
        workspace_bytes,
        replaceable,
        in_place: Vec::new(),
        dies: Vec::new(),
    };
    let lasts = |b: BufferId| !program.buffer(b).kind.is_of_step();
    // The last kernel that reads each value.
    let mut last_read: Vec<Option<usize>> = vec![None; graph.len()];
    let mut made = vec![false; graph.len()];
    for (i, kernel) in kernels.iter().enumerate() {
        kernel.reads.iter().for_each(|r| last_read[r.0.index()] = Some(i));
        kernel.writes.iter().for_each(|v| made[v.index()] = true);
    }
    let leaves: BTreeMap<BufferId, ValueId> = body.reads.iter().map(|&(v, b)| (b, v)).collect();
    // The values that are written only into persistent buffers, each with the kernel from which on this is allowed.
    let mut into_buffer: BTreeMap<ValueId, usize> = BTreeMap::new();
    for &(b, v) in body.writes.iter().filter(|w| lasts(w.0)) {
        let from = leaves.get(&b).and_then(|leaf| last_read[leaf.index()]).unwrap_or(0);
        let known = into_buffer.entry(v).or_insert(from);
        *known = from.max(*known);
    }
    for (_, v) in body.writes.iter().filter(|w| !lasts(w.0)) {
        into_buffer.remove(v);
    }
    let output = |i: usize, v: ValueId| {
        let ty = graph.ty(v);
        let host = graph.node(v).op.stores_in_host();
        let written = host || into_buffer.get(&v).is_some_and(|&from| from <= i);
        let bytes = if written { 0 } else { block_bytes(ty.bytes()) };
        Output { value: v, dtype: ty.dtype, elements: ty.elements() as usize, bytes, host }
    };
    let mut steps = Vec::with_capacity(kernels.len() + 1);
    // Values known beforehand are written to memory if the body writes them.
    let known = |v: &ValueId| !made[v.index()] && !graph.node(*v).op.is_leaf();
    let constants: BTreeSet<ValueId> = body.writes.iter().map(|w| w.1).filter(known).collect();
    steps.extend(constants.into_iter().map(|v| step(None, v, Vec::new(), vec![output(0, v)], 0, Vec::new())));
    for (i, kernel) in kernels.iter().enumerate() {
        let inputs: Vec<ValueId> = kernel.reads.iter().map(|r| r.0).collect();
        let outputs: Vec<Output> = kernel.writes.iter().map(|&v| output(i, v)).collect();
        let mut replaceable: Vec<(usize, ValueId)> = Vec::new();
        if matches!(kernel.kind, KernelKind::Fused { .. }) {
            for (i, v) in kernel.writes.iter().enumerate().filter(|(_, v)| !into_buffer.contains_key(v)) {
                let whole = |(read, bytes): &&(ValueId, u64)| {
                    graph.ty(*read).bytes() == *bytes && graph.ty(*v).bytes() == *bytes
                };
                replaceable.extend(kernel.reads.iter().filter(whole).map(|r| (i, r.0)));
            }
        }
        let node = kernel.nodes.last().copied().unwrap_or(ValueId(0));
        steps.push(step(Some(i), node, inputs, outputs, workspace_bytes(graph, node), replaceable));
    }
    let host = super::in_host(graph);
    let freed: BTreeSet<BufferId> = body.frees.iter().copied().collect();
    let replaced: BTreeSet<BufferId> = body.writes.iter().map(|w| w.0).collect();
    let leaf = |&(value, buffer): &(ValueId, BufferId)| Leaf {
        value,
        buffer,
        owned: !lasts(buffer) && (freed.contains(&buffer) || replaced.contains(&buffer)),
        bytes: if host[value.index()] { 0 } else { block_bytes(graph.ty(value).bytes()) },
    };
    let mut steps = Steps {
        name: body.name.clone(),
        steps,
        leaves: body.reads.iter().map(leaf).collect(),
        writes: body.writes.clone(),
        frees: body.frees.clone(),
        num_values: graph.len(),
        transient_bytes: 0,
    };
    assign(&mut steps);
    steps
}

/// The bytes of the blocks that a tensor of this size takes.
pub fn block_bytes(bytes: u64) -> u64 {
    bytes.next_multiple_of(BLOCK_BYTES)
}

/// The workspace of an op while it runs, beyond its operands and its result. A convolution needs the matrices that it
/// multiplies. A collective needs the data that it sends and receives, in the order that libraries require.
fn workspace_bytes(graph: &Graph, v: ValueId) -> u64 {
    let node = graph.node(v);
    match &node.op {
        Op::Convolution(op) => {
            let shapes = [graph.shape(node.operands[0]), graph.shape(node.operands[1]), &node.ty.shape];
            let dtype = node.ty.dtype;
            let scratch = Products::of(op, shapes, dtype, TILE_BYTES).map_or([0; 3], |p| p.scratch());
            let widths = [dtype.bytes(), dtype.bytes(), DType::F32.bytes()];
            scratch.iter().zip(widths).map(|(n, width)| block_bytes(n * width)).sum()
        }
        Op::Collective(op) => {
            let elements = op.collective.rearranged_elements(graph.shape(node.operands[0]), &op.mesh);
            elements.iter().map(|n| block_bytes(n * node.ty.dtype.bytes())).sum()
        }
        _ => 0,
    }
}
