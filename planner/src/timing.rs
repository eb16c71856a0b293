//! How long a program's bodies take: their kernels on the streams of a device.
//!
//! Forward and backward bodies are played as they stand. What follows the last backward of a step (gradients reduced, parameters
//! updated) is played together with it, since reductions may start as soon as their gradient is complete.
//! Reductions of many gradients are sent in buckets, and updates of many small parameters share launches, as they do in
//! every framework.

use crate::lower::Prices;
use altiplano_cost_models::kernels::{Kernel, KernelKind, kernels};
use altiplano_cost_models::timeline::{Played, Price, Stream, Task, play, tasks};
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::Op;
use altiplano_ir::plan::Execution;
use altiplano_ir::program::{Body, BufferId, Phase, Program};
use altiplano_ir::reshard::Collective;
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

/// Parameters that one launch of an optimizer updates: what fits into a kernel's arguments. Apex's `multi_tensor_apply` takes
/// 30 tensors at the depth of Adam (csrc/multi_tensor_apply.cuh).
const PARAMETERS_PER_LAUNCH: f64 = 30.0;

/// A body's kernels and what they cost.
#[derive(Clone, Debug, PartialEq)]
pub struct Priced {
    pub kernels: Vec<Kernel>,
    pub prices: Vec<Price>,
}

/// What a stage takes.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct StageTiming {
    pub forward: Played,
    pub backward: Played,
    /// From the end of the last backward.
    pub finish_s: f64,
    pub finish_compute_s: f64,
    pub finish_communication_s: f64,
}

/// Prices the kernels of a body.
pub fn priced(body: &Body, prices: &Prices<'_>, execution: &Execution) -> Priced {
    let graph = &body.graph;
    let written: BTreeSet<ValueId> = body.writes.iter().map(|w| w.1).collect();
    let kernels = kernels(graph, &written);
    let once = matches!(body.phase, Phase::Reduce | Phase::Update);
    let mut costs: Vec<Price> = kernels.iter().map(|kernel| prices.cost.kernel(kernel)).collect();
    if once {
        let launch_s = prices.cost.device().launch_s;
        for (kernel, cost) in kernels.iter().zip(&mut costs) {
            if matches!(kernel.kind, KernelKind::Fused { .. }) {
                cost.issue_s /= PARAMETERS_PER_LAUNCH;
                cost.seconds -= launch_s * (1.0 - 1.0 / PARAMETERS_PER_LAUNCH);
            }
        }
    }
    price_collectives(graph, &kernels, &mut costs, prices, if once { execution.bucket_bytes } else { 0 });
    Priced { kernels, prices: costs }
}

/// Prices what is sent. Collectives of one kind over the same axes are sent together, up to `bucket_bytes` at a time; each takes
/// its share of the bucket's seconds, and the first is issued for all.
fn price_collectives(
    graph: &Graph,
    kernels: &[Kernel],
    costs: &mut [Price],
    prices: &Prices<'_>,
    bucket_bytes: u64,
) {
    #[derive(Default)]
    struct Bucket {
        operand: u64,
        result: u64,
        members: Vec<(usize, u64)>,
    }
    let mut close = |bucket: Bucket, collective: &Collective| {
        let seconds = prices.collective_s(collective, bucket.operand, bucket.result);
        for (i, &(member, bytes)) in bucket.members.iter().enumerate() {
            costs[member].seconds = seconds * bytes as f64 / bucket.operand.max(1) as f64;
            if i > 0 {
                costs[member].issue_s = 0.0;
            }
        }
    };
    let mut open: Vec<(&Collective, Bucket)> = Vec::new();
    for (i, kernel) in kernels.iter().enumerate() {
        let node = graph.node(kernel.nodes[0]);
        let (KernelKind::Collective, Op::Collective(op)) = (kernel.kind, &node.op) else { continue };
        let operand = graph.ty(node.operands[0]);
        let alike = |c: &Collective| {
            std::mem::discriminant(c) == std::mem::discriminant(&op.collective) && c.axes() == op.collective.axes()
        };
        let at = open.iter().position(|(c, _)| alike(c)).unwrap_or_else(|| {
            open.push((&op.collective, Bucket::default()));
            open.len() - 1
        });
        let bucket = &mut open[at].1;
        bucket.operand += operand.bytes();
        bucket.result += node.ty.bytes();
        bucket.members.push((i, operand.bytes()));
        if bucket.operand.max(bucket.result) >= bucket_bytes {
            close(std::mem::take(bucket), &op.collective);
        }
    }
    for (collective, bucket) in open {
        if !bucket.members.is_empty() {
            close(bucket, collective);
        }
    }
}

/// Times a stage's bodies.
pub fn stage_timing(program: &Program, prices: &Prices<'_>, execution: &Execution) -> StageTiming {
    let alone = |body: &Body| {
        let priced = priced(body, prices, execution);
        let played = play(&tasks(&priced.kernels, &priced.prices, |_| 0.0));
        (priced, played)
    };
    let mut timing = StageTiming::default();
    let mut list: Vec<Task> = Vec::new();
    // The task after which each buffer holds its last value of the step.
    let mut written: FxHashMap<BufferId, u32> = FxHashMap::default();
    let mut before_s = 0.0;
    let mut gathers_s = 0.0;
    let order = [Phase::Forward, Phase::Backward, Phase::Reduce, Phase::Update];
    for phase in order {
        for body in program.bodies.iter().filter(|b| b.phase == phase) {
            let (priced, played) = alone(body);
            match phase {
                Phase::Forward => timing.forward = played,
                Phase::Backward => {
                    before_s = played.seconds;
                    timing.backward = played;
                    append(&mut list, &mut written, body, &priced, |_| None);
                }
                Phase::Reduce | Phase::Update => {
                    timing.finish_compute_s += played.compute_s;
                    timing.finish_communication_s += played.communication_s;
                    let from = list.len();
                    let end = |list: &[Task]| (!execution.overlap).then(|| list.len() as u32 - 1);
                    let barrier = if list.is_empty() { None } else { end(&list) };
                    append(&mut list, &mut written, body, &priced, |_| barrier);
                    for (task, kernel) in list[from..].iter_mut().zip(&priced.kernels) {
                        if task.stream == Stream::Communication {
                            task.stream = Stream::Gradients;
                            let op = &body.graph.node(kernel.nodes[0]).op;
                            let gathers = matches!(op, Op::Collective(c) if matches!(c.collective, Collective::AllGather { .. }));
                            gathers_s += if gathers { task.seconds } else { 0.0 };
                        }
                    }
                }
            }
        }
    }
    timing.finish_s = (play(&list).seconds - before_s).max(0.0);
    if execution.overlap {
        // Updated parameters are gathered while the next step's first forward runs.
        timing.finish_s -= gathers_s.min(timing.forward.seconds).min(timing.finish_s);
    }
    timing
}

/// Adds a body's tasks to those of the bodies before it. `barrier`: a task that all of them wait for.
fn append(
    list: &mut Vec<Task>,
    written: &mut FxHashMap<BufferId, u32>,
    body: &Body,
    priced: &Priced,
    barrier: impl Fn(ValueId) -> Option<u32>,
) {
    let base = list.len() as u32;
    let buffer_of: FxHashMap<ValueId, BufferId> = body.reads.iter().copied().collect();
    let mut maker: FxHashMap<ValueId, u32> = FxHashMap::default();
    for ((i, kernel), mut task) in
        priced.kernels.iter().enumerate().zip(tasks(&priced.kernels, &priced.prices, |_| 0.0))
    {
        for after in &mut task.after {
            *after += base;
        }
        for (read, _) in &kernel.reads {
            let writer = buffer_of.get(read).and_then(|b| written.get(b).copied());
            task.after.extend(writer.into_iter().chain(barrier(*read)));
        }
        kernel.writes.iter().for_each(|w| {
            maker.insert(*w, base + i as u32);
        });
        list.push(task);
    }
    for (buffer, value) in &body.writes {
        if let Some(&task) = maker.get(value) {
            written.insert(*buffer, task);
        }
    }
}
