//! Orders of kernels that overlap communication with computation.
//!
//! Streams run their commands in order, so a collective behind one that is not ready waits with it. Gathers of stored
//! parameters are prefetched: they go ahead of kernels that read earlier ones. So do the shifts that bring a backward
//! pass the keys of a ring. The bodies after the last backward pass run in the order in which that pass completes
//! gradients. Every device of a program has the same order.

use crate::loops::launches;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::kernels::{Kernel, KernelKind, kernels_where};
use altiplano_ir::op::Op;
use altiplano_ir::program::{Body, BufferId, Phase, Program};
use altiplano_ir::reshard::Collective;
use altiplano_ir::storage::launched;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Moves each gather or shift of a leaf before the first kernel that reads the result of the gather `ahead` places
/// before it. This costs the memory of `ahead` gathered values.
fn gathers_ahead(graph: &Graph, kernels: Vec<Kernel>, ahead: usize) -> Vec<Kernel> {
    let is_gather = |kernel: &Kernel| {
        let node = graph.node(kernel.nodes[0]);
        let gathers = match &node.op {
            Op::Collective(c) => matches!(c.collective, Collective::AllGather { .. } | Collective::Shift { .. }),
            _ => false,
        };
        gathers
            && matches!(kernel.kind, KernelKind::Collective)
            && kernel.reads.iter().all(|r| graph.node(r.0).op.is_leaf())
    };
    let mut gathers: VecDeque<Kernel> = kernels.iter().filter(|k| is_gather(k)).cloned().collect();
    // The number of the gather that makes a value, until a kernel reads it.
    let mut unread: BTreeMap<ValueId, usize> = gathers.iter().map(|k| k.nodes[0]).zip(0..).collect();
    let mut done = 0;
    let mut ordered = Vec::with_capacity(kernels.len());
    for kernel in kernels {
        let needed = if is_gather(&kernel) {
            // At the latest in its own turn.
            unread.get(&kernel.nodes[0]).map_or(0, |number| number + 1)
        } else {
            let read = kernel.reads.iter().filter_map(|r| unread.remove(&r.0));
            read.map(|number| number + 1 + ahead).max().unwrap_or(0)
        };
        while done < needed
            && let Some(gather) = gathers.pop_front()
        {
            ordered.push(gather);
            done += 1;
        }
        if !is_gather(&kernel) {
            ordered.push(kernel);
        }
    }
    ordered
}

/// Sorts the kernels of a body that runs once a step by the time at which their gradients are complete.
fn as_completed(body: &Body, mut kernels: Vec<Kernel>, written: &BTreeMap<BufferId, usize>) -> Vec<Kernel> {
    if !matches!(body.phase, Phase::Reduce | Phase::Norm | Phase::Update) {
        return kernels;
    }
    let buffers: BTreeMap<ValueId, BufferId> = body.reads.iter().copied().collect();
    let mut complete: BTreeMap<ValueId, usize> = BTreeMap::new();
    let mut keys = Vec::with_capacity(kernels.len());
    for kernel in &kernels {
        let of_read = |(v, _): &(ValueId, u64)| {
            let of_buffer = buffers.get(v).and_then(|b| written.get(b));
            complete.get(v).or(of_buffer).copied()
        };
        let key = kernel.reads.iter().filter_map(of_read).max().unwrap_or(0);
        complete.extend(kernel.writes.iter().map(|w| (*w, key)));
        keys.push(key);
    }
    // A kernel's key is at least those of its operands, so sorting keeps makers before readers.
    let mut order: Vec<usize> = (0..kernels.len()).collect();
    order.sort_by_key(|&i| (keys[i], i));
    let mut slots: Vec<Option<Kernel>> = kernels.drain(..).map(Some).collect();
    order.into_iter().filter_map(|i| slots[i].take()).collect()
}

/// For each buffer, the kernel of the stage's backward bodies after which it is complete, counted over these bodies.
fn completed(program: &Program, kernels: &[Vec<Kernel>], stage: u32) -> BTreeMap<BufferId, usize> {
    let mut complete: BTreeMap<BufferId, usize> = BTreeMap::new();
    let mut count = 0;
    let mut bodies: Vec<(&Body, &Vec<Kernel>)> = program.bodies.iter().zip(kernels).collect();
    bodies.retain(|(b, _)| {
        b.stage == stage && matches!(b.phase, Phase::Backward | Phase::Weights | Phase::Reduce | Phase::Norm)
    });
    bodies.sort_by_key(|(b, _)| b.phase);
    for (body, kernels) in bodies {
        let mut makes: BTreeMap<ValueId, usize> = BTreeMap::new();
        for kernel in kernels {
            count += 1;
            makes.extend(kernel.writes.iter().map(|w| (*w, count)));
        }
        complete.extend(body.writes.iter().filter_map(|(b, v)| Some((*b, *makes.get(v)?))));
    }
    complete
}

/// The kernels of every body of a program in the order of its tapes, with `ahead` gathers prefetched.
pub fn ordered(program: &Program, ahead: usize) -> Vec<Vec<Kernel>> {
    let of_body = |body: &Body| {
        let written: BTreeSet<ValueId> = body.writes.iter().map(|w| w.1).collect();
        // Fused attention is one kernel if there are launches for it.
        let mut fuses = |kernel: &Kernel| program.fused_attention && launches(&body.graph, kernel).is_ok();
        gathers_ahead(&body.graph, kernels_where(&body.graph, &written, &mut fuses), ahead)
    };
    let mut kernels: Vec<Vec<Kernel>> = program.bodies.iter().map(of_body).collect();
    // Reductions first: updates follow their order.
    for phase in [Phase::Reduce, Phase::Norm, Phase::Update] {
        for (i, body) in program.bodies.iter().enumerate().filter(|(_, b)| b.phase == phase) {
            let complete = completed(program, &kernels, body.stage);
            let transient = |body: &Body, kernels: &[Kernel]| launched(program, body, kernels).transient_bytes;
            let backward = program.bodies.iter().zip(&kernels).filter(|(b, _)| b.stage == body.stage);
            let room = backward.map(|(b, k)| transient(b, k)).max().unwrap_or(0);
            let sorted = as_completed(body, kernels[i].clone(), &complete);
            // Keep the original order if the new one would raise the peak memory.
            if transient(body, &sorted) <= room {
                kernels[i] = sorted;
            }
        }
    }
    kernels
}
