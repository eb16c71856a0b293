//! How long a program's bodies take: their kernels on the streams of a device.
//!
//! Forward and backward bodies are played as they stand. What follows the last of them in a step (gradients reduced, parameters
//! updated) is played together with it, since reductions may start as soon as their gradient is complete.
//! Reductions of many gradients are sent in buckets, and updates of many small parameters share launches, as they do in
//! every framework. A runtime that says itself what its kernels are runs them one after the other ([`CostModel::runtime`]).

use crate::lower::Prices;
use altiplano_cost_models::kernels::{Kernel, KernelKind, kernels};
use altiplano_cost_models::pipeline::StageTimes;
use altiplano_cost_models::timeline::{Host, Played, Price, Stream, Task, play, tasks};
use altiplano_cost_models::{CostModel, Runtime};
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{Binary, HostRoute, Op};
use altiplano_ir::plan::Execution;
use altiplano_ir::program::{Body, BufferId, Phase, Program};
use altiplano_ir::reshard::Collective;
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

/// Parameters that one launch of an optimizer updates: what fits into a kernel's arguments. Apex's `multi_tensor_apply` takes
/// 30 tensors at the depth of Adam (csrc/multi_tensor_apply.cuh).
const PARAMETERS_PER_LAUNCH: f64 = 30.0;

/// What a body asks of a device, before anything is priced: its kernels, and for those that send something what it is.
#[derive(Clone, Debug, PartialEq)]
pub struct BodyWork {
    /// The plan's stage that the body is of.
    pub stage: u32,
    pub phase: Phase,
    pub kernels: Vec<Kernel>,
    /// Of a collective: what is done, and local bytes of its operand and result.
    pub sent: Vec<Option<(Collective, u64, u64)>>,
    /// Whether it is sent together with what else its block has ([`Execution::unit_bytes`]).
    of_unit: Vec<bool>,
    reads: FxHashMap<ValueId, BufferId>,
    writes: Vec<(BufferId, ValueId)>,
}

impl BodyWork {
    /// The same of a stage that is as this body's.
    pub fn of_stage(&self, stage: u32) -> BodyWork {
        BodyWork { stage, ..self.clone() }
    }

    pub fn new(body: &Body, execution: &Execution, cost: &dyn CostModel) -> BodyWork {
        let graph = &body.graph;
        let written: BTreeSet<ValueId> = body.writes.iter().map(|w| w.1).collect();
        let mut kernels = match cost.runtime() {
            Some(runtime) => runtime.kernels(body),
            None => kernels(graph, &written, execution.fused_attention),
        };
        for kernel in &mut kernels {
            if let KernelKind::Attention(attention) = &mut kernel.kind {
                attention.software = execution.attention;
            }
        }
        let in_passes = matches!(body.phase, Phase::Forward | Phase::Backward | Phase::Weights);
        let has_units = in_passes && execution.unit_bytes > 0 && cost.runtime().is_none();
        if has_units {
            kernels = with_copies(graph, kernels, &written);
        }
        let sent = |kernel: &Kernel| {
            let (collective, v) = collective_of(graph, kernel)?;
            let node = graph.node(v);
            Some((collective.clone(), graph.ty(node.operands[0]).bytes(), node.ty.bytes()))
        };
        let sent = kernels.iter().map(sent).collect();
        let of_unit = |kernel: &Kernel| has_units && unit_part(graph, kernel, &written).is_some();
        BodyWork {
            stage: body.stage,
            phase: body.phase,
            of_unit: kernels.iter().map(of_unit).collect(),
            kernels,
            sent,
            reads: body.reads.iter().copied().collect(),
            writes: body.writes.clone(),
        }
    }

    /// Work of which only the kernels matter.
    #[cfg(test)]
    pub(crate) fn made_of(phase: Phase, kernels: Vec<Kernel>, sent: Vec<Option<(Collective, u64, u64)>>) -> BodyWork {
        let of_unit = vec![false; kernels.len()];
        BodyWork { stage: 0, phase, kernels, sent, of_unit, reads: FxHashMap::default(), writes: Vec::new() }
    }

    /// Says of collectives between nodes what a runtime does for these.
    pub(crate) fn sent_between_nodes(&mut self, runtime: &dyn Runtime, prices: &Prices<'_>) {
        for (kernel, sent) in self.kernels.iter_mut().zip(&self.sent) {
            if let Some((collective, operand, result)) = sent
                && let link = prices.link(collective.axes())
                && link.nodes > 1
            {
                kernel.work = Some(runtime.collective_work(collective, *operand, *result, link));
            }
        }
    }

    /// Whether it sums gradients or updates parameters, once a step.
    pub fn is_once(&self) -> bool {
        matches!(self.phase, Phase::Reduce | Phase::Norm | Phase::Update)
    }

    /// Seconds of each kernel and collective.
    pub fn prices(&self, prices: &Prices<'_>, execution: &Execution) -> Vec<Price> {
        let price = |kernel: &Kernel| match self.is_once() {
            true => prices.cost.update_kernel(kernel),
            false if is_copy(kernel) => Price { seconds: copy_s(prices.cost, kernel.read_bytes as f64), issue_s: 0.0 },
            false => prices.cost.kernel(kernel),
        };
        let mut costs: Vec<Price> = self.kernels.iter().map(price).collect();
        if prices.cost.runtime().is_some() {
            // What a kernel does says nothing of the link that it goes over.
            for (cost, sent) in costs.iter_mut().zip(&self.sent) {
                if let Some((collective, operand, result)) = sent
                    && prices.link(collective.axes()).nodes > 1
                {
                    cost.seconds = prices.collective_s(collective, *operand, *result);
                }
            }
            return costs;
        }
        if self.is_once() {
            let launch_s = prices.cost.device().launch_s;
            for (kernel, cost) in self.kernels.iter().zip(&mut costs) {
                match kernel.kind {
                    KernelKind::Fused { .. } => {
                        cost.issue_s /= PARAMETERS_PER_LAUNCH;
                        cost.seconds -= launch_s * (1.0 - 1.0 / PARAMETERS_PER_LAUNCH);
                    }
                    // Whoever updates many parameters at once copies their state at once, on engines that begin each copy anew.
                    KernelKind::HostCopy(_) => cost.issue_s /= PARAMETERS_PER_LAUNCH,
                    _ => {}
                }
            }
        }
        self.price_collectives(&mut costs, prices, execution);
        costs
    }

    /// Prices what is sent. Collectives of one kind over the same axes are sent together, so many bytes at a time; each takes its share
    /// of the bucket's seconds, and the first is issued for all.
    fn price_collectives(&self, costs: &mut [Price], prices: &Prices<'_>, execution: &Execution) {
        #[derive(Default)]
        struct Bucket {
            operand: u64,
            result: u64,
            members: Vec<(usize, u64)>,
        }
        let mut close = |bucket: Bucket, collective: &Collective| {
            let seconds = prices.waited_s(collective, bucket.operand, bucket.result);
            for (i, &(member, bytes)) in bucket.members.iter().enumerate() {
                costs[member].seconds = seconds * bytes as f64 / bucket.operand.max(1) as f64;
                if i > 0 {
                    costs[member].issue_s = 0.0;
                }
            }
        };
        let mut open: Vec<(&Collective, u64, Bucket)> = Vec::new();
        for (i, sent) in self.sent.iter().enumerate() {
            let Some((collective, operand, result)) = sent else { continue };
            let bucket_bytes = match () {
                _ if self.is_once() => execution.bucket_bytes,
                _ if self.of_unit[i] => execution.unit_bytes,
                _ => 0,
            };
            let alike = |c: &Collective| {
                std::mem::discriminant(c) == std::mem::discriminant(collective) && c.axes() == collective.axes()
            };
            let at = open.iter().position(|(c, b, _)| alike(c) && *b == bucket_bytes).unwrap_or_else(|| {
                open.push((collective, bucket_bytes, Bucket::default()));
                open.len() - 1
            });
            let bucket = &mut open[at].2;
            bucket.operand += operand;
            bucket.result += result;
            bucket.members.push((i, *operand));
            if bucket.operand.max(bucket.result) >= bucket_bytes {
                close(std::mem::take(bucket), collective);
            }
        }
        for (collective, _, bucket) in open {
            if !bucket.members.is_empty() {
                close(bucket, collective);
            }
        }
    }
}

/// What is sent by a kernel, and the value that this makes.
fn collective_of<'a>(graph: &'a Graph, kernel: &Kernel) -> Option<(&'a Collective, ValueId)> {
    let v = *kernel.nodes.first()?;
    match (&kernel.kind, &graph.node(v).op) {
        (KernelKind::Collective, Op::Collective(op)) => Some((&op.collective, v)),
        _ => None,
    }
}

/// What a collective of a block has to do with it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum UnitPart {
    Gather,
    Reduce,
}

/// Whether a kernel gathers what the pass reads from outside, as parameters are, or reduces what it only adds up and leaves, as gradients
/// of parameters are.
fn unit_part(graph: &Graph, kernel: &Kernel, written: &BTreeSet<ValueId>) -> Option<UnitPart> {
    let (collective, v) = collective_of(graph, kernel)?;
    let gathers = |v: ValueId| match &graph.node(v).op {
        Op::Collective(op) if matches!(op.collective, Collective::AllGather { .. }) => Some(graph.node(v).operands[0]),
        _ => None,
    };
    match collective {
        Collective::AllGather { .. } => {
            let mut from = v;
            while let Some(operand) = gathers(from) {
                from = operand;
            }
            graph.node(from).op.is_leaf().then_some(UnitPart::Gather)
        }
        Collective::ReduceScatter { .. } => {
            // What adds it up comes after it.
            let adds = |of: ValueId| {
                let users =
                    (of.0 + 1..graph.len() as u32).map(ValueId).filter(move |u| graph.node(*u).operands.contains(&of));
                users.take(1).find(|u| matches!(graph.node(*u).op, Op::Convert(_) | Op::Binary(Binary::Add)))
            };
            let mut of = Some(v);
            while let Some(value) = of.filter(|value| !written.contains(value)) {
                of = adds(value);
            }
            of.map(|_| UnitPart::Reduce)
        }
        _ => None,
    }
}

/// Whether a kernel copies between tensors and the buffer of a collective.
fn is_copy(kernel: &Kernel) -> bool {
    kernel.nodes.is_empty() && matches!(kernel.kind, KernelKind::Fused { .. })
}

/// Kernels with those that copy parameters out of the buffer that they were gathered in, where they are first read, and gradients into
/// the one that they are reduced from.
fn with_copies(graph: &Graph, kernels: Vec<Kernel>, written: &BTreeSet<ValueId>) -> Vec<Kernel> {
    let copy = |v: ValueId| {
        let bytes = graph.ty(v).bytes();
        let copy = Kernel::moving(KernelKind::Fused { operations: 0.0 }, bytes);
        Kernel { reads: vec![(v, bytes)], written_bytes: bytes, ..copy }
    };
    let mut gathered: BTreeSet<ValueId> = BTreeSet::new();
    let mut copied: Vec<Kernel> = Vec::with_capacity(2 * kernels.len());
    for kernel in kernels {
        match unit_part(graph, &kernel, written) {
            Some(UnitPart::Gather) => drop(gathered.insert(kernel.nodes[0])),
            part => {
                copied.extend(kernel.reads.iter().filter(|read| gathered.remove(&read.0)).map(|read| copy(read.0)));
                copied.extend(part.map(|_| copy(graph.node(kernel.nodes[0]).operands[0])));
            }
        }
        copied.push(kernel);
    }
    copied
}

/// Seconds to copy so many bytes from one place of a device's memory to another, beside others.
pub fn copy_s(cost: &dyn CostModel, bytes: f64) -> f64 {
    let kernel = Kernel::moving(KernelKind::Fused { operations: 0.0 }, 2 * bytes as u64);
    (cost.update_kernel(&kernel).seconds - cost.device().launch_s).max(0.0)
}

/// Seconds to update a parameter by a kernel that moves so many bytes.
pub fn update_s(cost: &dyn CostModel, bytes: f64) -> f64 {
    let kernel = Kernel::moving(KernelKind::Fused { operations: 0.0 }, bytes as u64);
    let shared = if cost.runtime().is_some() { 0.0 } else { 1.0 - 1.0 / PARAMETERS_PER_LAUNCH };
    cost.update_kernel(&kernel).seconds - cost.device().launch_s * shared
}

/// Seconds of the host for all kernels that it may be ahead of the device.
pub fn queue_s(cost: &dyn CostModel) -> f64 {
    match cost.queued_kernels() {
        usize::MAX => f64::INFINITY,
        most => most as f64 * cost.kernel(&Kernel::moving(KernelKind::Indexed, 0)).issue_s,
    }
}

/// Seconds of so many bytes between a device and the memory of its host, one way.
pub fn host_copy_s(cost: &dyn CostModel, bytes: f64) -> f64 {
    match bytes > 0.0 {
        true => cost.kernel(&Kernel::moving(KernelKind::HostCopy(HostRoute::Load), bytes as u64)).seconds,
        false => 0.0,
    }
}

/// What a stage takes.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct StageTiming {
    pub forward: Played,
    pub backward: Played,
    /// The gradients of weights, where they are run apart.
    pub weights: Played,
    /// From the end of the last backward.
    pub finish_s: f64,
    pub finish_compute_s: f64,
    pub finish_communication_s: f64,
    /// Start and end of each kernel that runs once a step, in the order of bodies, from the end of the last backward on: where
    /// reductions start earlier, before zero.
    pub finish_spans: Vec<(f64, f64)>,
    /// Of what the stage takes once a step, seconds in which its devices wait for parameter servers.
    pub waits_s: f64,
    /// On a machine that all devices share, what the stage takes where so many of them compute at once.
    pub shared: Vec<(u32, StageTimes)>,
}

/// The work of a stage's bodies in its program, in the order in which a step runs them.
pub fn work(program: &Program, stage: u32, execution: &Execution, cost: &dyn CostModel) -> Vec<BodyWork> {
    let of_stage = program.bodies.iter().filter(|b| b.stage == stage);
    let mut bodies: Vec<BodyWork> = of_stage.map(|b| BodyWork::new(b, execution, cost)).collect();
    bodies.sort_by_key(|b| b.phase);
    bodies
}

/// Kernels and collectives one after the other.
pub fn played_in_order(kernels: &[Kernel], prices: &[Price]) -> Played {
    let mut played = Played::default();
    for (kernel, price) in kernels.iter().zip(prices) {
        let end_s = played.seconds + price.seconds;
        played.spans.push((played.seconds, end_s));
        match kernel.kind {
            KernelKind::Collective | KernelKind::HostCopy(_) => played.communication_s += price.seconds,
            _ => played.compute_s += price.seconds,
        }
        played.seconds = end_s;
    }
    played.exposed_s = played.communication_s;
    played
}

/// Times a stage's bodies. `late`: gradients are those of the step before, and are reduced while so many microbatches are worked on.
pub fn stage_timing(bodies: &[BodyWork], prices: &Prices<'_>, execution: &Execution, late: Option<u32>) -> StageTiming {
    if prices.cost.runtime().is_some() {
        let mut timing = StageTiming::default();
        let mut totals = Played::default();
        for body in bodies {
            let played = played_in_order(&body.kernels, &body.prices(prices, execution));
            match body.phase {
                Phase::Totals => totals = played,
                Phase::Forward => timing.forward = played,
                Phase::Backward => timing.backward = played,
                Phase::Weights => timing.weights = played,
                Phase::Reduce | Phase::Norm | Phase::Update => {
                    let start_s = timing.finish_s;
                    timing.finish_spans.extend(played.spans.iter().map(|(from, to)| (start_s + from, start_s + to)));
                    timing.finish_s += played.seconds;
                    timing.finish_compute_s += played.compute_s;
                    timing.finish_communication_s += played.communication_s;
                }
            }
        }
        begin_with(&mut timing.forward, &totals);
        return timing;
    }
    let mut timing = StageTiming::default();
    let host = |ahead_s: f64| Host { ahead_s, queued: prices.cost.queued_kernels() };
    let mut totals = Played::default();
    let mut list: Vec<Task> = Vec::new();
    // The task after which each buffer holds its last value of the step.
    let mut written: FxHashMap<BufferId, u32> = FxHashMap::default();
    let mut before_s = 0.0;
    let mut gathers_s = 0.0;
    let mut num_before = 0;
    for body in bodies {
        let costs = body.prices(prices, execution);
        let tasks = tasks(&body.kernels, &costs);
        match body.phase {
            Phase::Totals => totals = play(&tasks, host(0.0)),
            Phase::Forward => timing.forward = play(&tasks, host(0.0)),
            Phase::Backward | Phase::Weights => {
                let before = match body.phase {
                    Phase::Weights => &timing.backward,
                    _ => &timing.forward,
                };
                let played = play(&tasks, host(before.ahead_s[1]));
                before_s += played.seconds;
                let barrier = (body.phase == Phase::Weights).then_some(timing.backward.seconds);
                match body.phase {
                    Phase::Weights => timing.weights = played,
                    _ => timing.backward = played,
                }
                if late.is_some() {
                    // Nothing that follows has to do with this step's gradients.
                    continue;
                }
                append(&mut list, &mut written, body, tasks, barrier);
                num_before = list.len();
            }
            Phase::Reduce | Phase::Norm | Phase::Update => {
                if let Some(microbatches) = late {
                    before_s = f64::from(microbatches)
                        * (timing.forward.seconds + timing.backward.seconds + timing.weights.seconds);
                }
                let mut tasks = tasks;
                for (task, sent) in tasks.iter_mut().zip(&body.sent) {
                    if matches!(task.stream, Stream::Load | Stream::Store) {
                        // What is brought for the update has no room before.
                        task.ready_s = task.ready_s.max(before_s);
                        timing.finish_communication_s += task.seconds;
                        continue;
                    }
                    if task.stream != Stream::Communication {
                        timing.finish_compute_s += task.seconds;
                        if late.is_some() {
                            task.ready_s = task.ready_s.max(before_s);
                        }
                        continue;
                    }
                    task.stream = Stream::Gradients;
                    timing.finish_communication_s += task.seconds;
                    if matches!(sent, Some((Collective::AllGather { .. }, _, _))) {
                        gathers_s += task.seconds;
                    }
                }
                // Without overlap nothing starts before the last backward has ended.
                let barrier = (!execution.overlap && late.is_none()).then_some(before_s);
                append(&mut list, &mut written, body, tasks, barrier);
            }
        }
    }
    let ahead_s = if late.is_some() { 0.0 } else { timing.forward.ahead_s[1] };
    let played = play(&list, host(ahead_s));
    timing.finish_s = (played.seconds - before_s).max(0.0);
    if execution.unit_bytes > 0 {
        // Blocks are gathered and reduced in all of each pass.
        let part = prices.cost.sending_part();
        for pass in [&mut timing.forward, &mut timing.backward, &mut timing.weights] {
            *pass = std::mem::take(pass).shared(part);
        }
    }
    begin_with(&mut timing.forward, &totals);
    timing.finish_spans =
        played.spans[num_before..].iter().map(|(from, to)| (from - before_s, to - before_s)).collect();
    if execution.overlap {
        // Updated parameters are gathered while the next step's first forward runs.
        timing.finish_s -= gathers_s.min(timing.forward.seconds).min(timing.finish_s);
    }
    timing
}

/// Counts what runs once for a microbatch before any forward pass as the beginning of its own.
fn begin_with(forward: &mut Played, totals: &Played) {
    forward.spans.iter_mut().for_each(|(from, to)| (*from, *to) = (*from + totals.seconds, *to + totals.seconds));
    forward.seconds += totals.seconds;
    forward.compute_s += totals.compute_s;
    forward.communication_s += totals.communication_s;
    forward.exposed_s += totals.exposed_s;
}

/// Adds a body's tasks to those of the bodies before it, not to start before `barrier_s`.
fn append(
    list: &mut Vec<Task>,
    written: &mut FxHashMap<BufferId, u32>,
    body: &BodyWork,
    tasks: Vec<Task>,
    barrier_s: Option<f64>,
) {
    let base = list.len() as u32;
    let mut maker: FxHashMap<ValueId, u32> = FxHashMap::default();
    for ((i, kernel), mut task) in (0..).zip(&body.kernels).zip(tasks) {
        for after in &mut task.after {
            *after += base;
        }
        let writers = kernel.reads.iter().filter_map(|(read, _)| written.get(body.reads.get(read)?).copied());
        task.after.extend(writers);
        task.ready_s = task.ready_s.max(barrier_s.unwrap_or(0.0));
        for &write in &kernel.writes {
            maker.insert(write, base + i);
        }
        list.push(task);
    }
    for (buffer, value) in &body.writes {
        if let Some(&task) = maker.get(value) {
            written.insert(*buffer, task);
        }
    }
}
