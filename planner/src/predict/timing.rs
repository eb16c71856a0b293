//! Times a program's bodies: their kernels on the streams of a device.
//!
//! Forward and backward bodies are simulated as they are. Work after the last of them in a step (gradient reduction,
//! parameter update) is simulated together with it, since reductions may start as soon as their gradient is complete.
//! Reductions of many gradients are sent in buckets, and updates of many small parameters share launches, as in every
//! framework. A runtime that defines its own kernels runs them one after the other ([`CostModel::runtime`]).

use crate::lower::Prices;
use crate::timings::{self, timed};
use altiplano_cost_models::kernels::{Kernel, KernelKind, kernels_where};
use altiplano_cost_models::pipeline::StageTimes;
use altiplano_cost_models::timeline::{Host, Played, Price, Stream, Task, play, play_beside, tasks};
use altiplano_cost_models::{CostModel, Runtime};
use altiplano_ir::attention::{Pass, WIDEST, find};
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::mesh::AxisId;
use altiplano_ir::op::{Binary, HostRoute, Op};
use altiplano_ir::plan::{AttentionKernels, Execution};
use altiplano_ir::program::{Body, BufferId, BufferKind, Phase, Program};
use altiplano_ir::reshard::Collective;
use rayon::prelude::*;
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

/// Parameters that one launch of an optimizer updates: as many as a kernel's arguments can name. Apex's
/// `multi_tensor_apply` takes 30 tensors at the depth of Adam (csrc/multi_tensor_apply.cuh).
const PARAMETERS_PER_LAUNCH: f64 = 30.0;

/// The work of a body before it is priced: its kernels, and the payload of its collectives.
#[derive(Clone, Debug, PartialEq)]
pub struct BodyWork {
    /// Index of the stage in the plan.
    pub stage: u32,
    pub phase: Phase,
    pub kernels: Vec<Kernel>,
    /// For each kernel that is a collective: the collective, and the local bytes of its operand and result.
    pub sent: Vec<Option<(Collective, u64, u64)>>,
    /// True if it is sent together with the other collectives of its block ([`Execution::unit_bytes`]).
    of_unit: Vec<bool>,
    /// For each kernel, the products that it runs in parts beside ([`Execution::overlaps_tensor_parallel`]).
    beside: Vec<Vec<usize>>,
    reads: FxHashMap<ValueId, BufferId>,
    writes: Vec<(BufferId, ValueId)>,
}

impl BodyWork {
    /// The same work, for a stage with an equal body.
    pub fn of_stage(&self, stage: u32) -> BodyWork {
        BodyWork { stage, ..self.clone() }
    }

    /// `passes`: those of attention in the body, if these alone have kernels.
    pub fn new(
        program: &Program,
        body: &Body,
        execution: &Execution,
        cost: &dyn CostModel,
        passes: Option<&[Pass]>,
    ) -> BodyWork {
        let graph = &body.graph;
        let written: BTreeSet<ValueId> = body.writes.iter().map(|w| w.1).collect();
        let mut kernels = match cost.runtime() {
            Some(runtime) => runtime.kernels(body),
            None => {
                let found = passes.map(|passes| passes.iter().flat_map(Pass::computes).collect::<BTreeSet<_>>());
                let is_found = |kernel: &Kernel| match &found {
                    Some(found) => kernel.nodes.iter().any(|v| found.contains(v)),
                    None => true,
                };
                kernels_where(graph, &written, &mut |kernel| execution.fused_attention && is_found(kernel))
            }
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
        let beside = match execution.overlaps_tensor_parallel && in_passes && cost.runtime().is_none() {
            true => beside_products(program, body, &kernels, &written),
            false => vec![Vec::new(); kernels.len()],
        };
        BodyWork {
            stage: body.stage,
            phase: body.phase,
            of_unit: kernels.iter().map(of_unit).collect(),
            beside,
            kernels,
            sent,
            reads: body.reads.iter().copied().collect(),
            writes: body.writes.clone(),
        }
    }

    /// Creates work of which only the kernels matter.
    #[cfg(test)]
    pub(crate) fn made_of(phase: Phase, kernels: Vec<Kernel>, sent: Vec<Option<(Collective, u64, u64)>>) -> BodyWork {
        let (of_unit, beside) = (vec![false; kernels.len()], vec![Vec::new(); kernels.len()]);
        BodyWork { stage: 0, phase, kernels, sent, of_unit, beside, reads: FxHashMap::default(), writes: Vec::new() }
    }

    /// Sets the work of collectives between nodes to what the runtime does for them.
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

    /// Returns true if the body sums gradients or updates parameters, once a step.
    pub fn is_once(&self) -> bool {
        matches!(self.phase, Phase::Reduce | Phase::Norm | Phase::Update)
    }

    /// Prices each kernel and collective.
    pub fn prices(&self, prices: &Prices<'_>, execution: &Execution) -> Vec<Price> {
        let price = |kernel: &Kernel| match self.is_once() {
            true => prices.cost.update_kernel(kernel),
            false if is_copy(kernel) => Price { seconds: copy_s(prices.cost, kernel.read_bytes as f64), issue_s: 0.0 },
            false => prices.cost.kernel(kernel),
        };
        let mut costs: Vec<Price> = self.kernels.iter().map(price).collect();
        if prices.cost.runtime().is_some() {
            // The work of a kernel does not tell which link the collective goes over.
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
                    // An optimizer that updates many parameters at once also issues their copies at once; the copy
                    // engine starts each anew.
                    KernelKind::HostCopy(_) => cost.issue_s /= PARAMETERS_PER_LAUNCH,
                    _ => {}
                }
            }
        }
        self.price_collectives(&mut costs, prices, execution);
        self.hide_beside_products(&mut costs, prices);
        costs
    }

    /// Deducts the seconds of collectives that products hide. Both are cut into as many parts as devices take part, and the
    /// first or the last part has nothing beside it. A product hides no more than it takes. The parts go through memory that
    /// devices of a node share, so that transfers between nodes stay as they are (Transformer Engine's user buffers, PyTorch's
    /// symmetric memory).
    fn hide_beside_products(&self, costs: &mut [Price], prices: &Prices<'_>) {
        let mut left_s: Vec<f64> = costs.iter().map(|cost| cost.seconds).collect();
        for (i, products) in self.beside.iter().enumerate() {
            let Some((collective, ..)) = &self.sent[i] else { continue };
            if products.is_empty() || prices.link(collective.axes()).nodes > 1 {
                continue;
            }
            let parts = prices.mesh.product(collective.axes()).max(1) as f64;
            let mut may_hide_s = costs[i].seconds * (parts - 1.0) / parts;
            for &product in products {
                let hidden_s = may_hide_s.min(left_s[product]);
                left_s[product] -= hidden_s;
                may_hide_s -= hidden_s;
                costs[i].seconds -= hidden_s;
            }
        }
    }

    /// Prices collectives. Those of one kind over the same axes are sent together, up to a number of bytes at a time. Each
    /// takes its share of the bucket's seconds, and the first carries the issue time of all.
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

/// The collective that a kernel sends, and its result.
fn collective_of<'a>(graph: &'a Graph, kernel: &Kernel) -> Option<(&'a Collective, ValueId)> {
    let v = *kernel.nodes.first()?;
    match (&kernel.kind, &graph.node(v).op) {
        (KernelKind::Collective, Op::Collective(op)) => Some((&op.collective, v)),
        _ => None,
    }
}

/// The part of a collective in the exchange of a block's parameters.
#[derive(Clone, Copy, PartialEq, Eq)]
enum UnitPart {
    Gather,
    Reduce,
}

/// Tells a kernel that gathers values from outside the pass, as parameters are, and one that reduces values which the pass only
/// adds up and leaves, as gradients of parameters are.
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
            // Its accumulation comes after it.
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

/// For each kernel that gathers activations, the products that read the result, and for each that reduces and scatters a sum
/// which the pass goes on with, the products that it sums. One elementwise kernel may lie between: a conversion, or the sum
/// of several products.
fn beside_products(program: &Program, body: &Body, kernels: &[Kernel], written: &BTreeSet<ValueId>) -> Vec<Vec<usize>> {
    let graph = &body.graph;
    let weights = body.reads.iter().filter(|(_, b)| matches!(program.buffer(*b).kind, BufferKind::Parameter { .. }));
    let weights: BTreeSet<ValueId> = weights.map(|read| read.0).collect();
    let gathers_weight = |mut v: ValueId| {
        while !graph.node(v).op.is_leaf() && graph.node(v).operands.len() == 1 {
            v = graph.node(v).operands[0];
        }
        weights.contains(&v)
    };
    let mut maker: FxHashMap<ValueId, usize> = FxHashMap::default();
    let mut readers: FxHashMap<ValueId, Vec<usize>> = FxHashMap::default();
    for (i, kernel) in kernels.iter().enumerate() {
        maker.extend(kernel.writes.iter().map(|&v| (v, i)));
        kernel.reads.iter().for_each(|(v, _)| readers.entry(*v).or_default().push(i));
    }
    let is_product = |i: &usize| matches!(kernels[*i].kind, KernelKind::Matmul(_));
    let is_between = |i: &usize| matches!(kernels[*i].kind, KernelKind::Fused { .. });
    let readers_of = |v: &ValueId| readers.get(v).into_iter().flatten().copied();
    let makers_of =
        |kernel: &Kernel| kernel.reads.iter().filter_map(|(v, _)| maker.get(v).copied()).collect::<Vec<_>>();
    let of = |kernel: &Kernel| -> Vec<usize> {
        let Some((collective, v)) = collective_of(graph, kernel) else { return Vec::new() };
        let next: Vec<usize> = match collective {
            Collective::AllGather { .. } if !gathers_weight(v) => {
                let next: Vec<usize> = readers_of(&v).collect();
                let beyond =
                    next.iter().filter(|i| is_between(i)).flat_map(|&i| &kernels[i].writes).flat_map(readers_of);
                next.iter().copied().chain(beyond).collect()
            }
            Collective::ReduceScatter { .. } if unit_part(graph, kernel, written).is_none() => {
                let next = makers_of(kernel);
                let beyond = next.iter().filter(|i| is_between(i)).flat_map(|&i| makers_of(&kernels[i]));
                next.iter().copied().chain(beyond).collect()
            }
            _ => Vec::new(),
        };
        next.into_iter().filter(is_product).collect()
    };
    kernels.iter().map(of).collect()
}

/// Returns true if a kernel copies between tensors and the buffer of a collective.
fn is_copy(kernel: &Kernel) -> bool {
    kernel.nodes.is_empty() && matches!(kernel.kind, KernelKind::Fused { .. })
}

/// Adds kernels that copy parameters out of the gather buffer before their first use, and gradients into the reduce buffer.
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

/// Seconds of a kernel that copies `bytes` within a device's memory, without its launch.
pub fn copy_s(cost: &dyn CostModel, bytes: f64) -> f64 {
    let kernel = Kernel::moving(KernelKind::Fused { operations: 0.0 }, 2 * bytes as u64);
    (cost.update_kernel(&kernel).seconds - cost.device().launch_s).max(0.0)
}

/// Seconds to update a parameter by a kernel that moves `bytes`.
pub fn update_s(cost: &dyn CostModel, bytes: f64) -> f64 {
    let kernel = Kernel::moving(KernelKind::Fused { operations: 0.0 }, bytes as u64);
    let shared = if cost.runtime().is_some() { 0.0 } else { 1.0 - 1.0 / PARAMETERS_PER_LAUNCH };
    cost.update_kernel(&kernel).seconds - cost.device().launch_s * shared
}

/// Run-ahead of the host in seconds: the time to issue as many kernels as the launch queue holds.
pub fn queue_s(cost: &dyn CostModel) -> f64 {
    match cost.queued_kernels() {
        usize::MAX => f64::INFINITY,
        most => most as f64 * cost.kernel(&Kernel::moving(KernelKind::Indexed, 0)).issue_s,
    }
}

/// Seconds to copy `bytes` between a device and its host's memory, one way.
pub fn host_copy_s(cost: &dyn CostModel, bytes: f64) -> f64 {
    match bytes > 0.0 {
        true => cost.kernel(&Kernel::moving(KernelKind::HostCopy(HostRoute::Load), bytes as u64)).seconds,
        false => 0.0,
    }
}

/// Timing of a stage.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct StageTiming {
    pub forward: Played,
    pub backward: Played,
    /// Gradients of weights, if they run apart from the backward pass.
    pub weights: Played,
    /// Seconds from the end of the last backward pass.
    pub finish_s: f64,
    pub finish_compute_s: f64,
    pub finish_communication_s: f64,
    /// Start and end of each kernel that runs once a step, in the order of bodies, relative to the end of the last
    /// backward pass. Reductions that start earlier have negative times.
    pub finish_spans: Vec<(f64, f64)>,
    /// Seconds of the work once a step in which the devices wait for parameter servers.
    pub waits_s: f64,
    /// On a machine that all devices share, the stage's times by the number of devices that compute at once.
    pub shared: Vec<(u32, StageTimes)>,
    /// Seconds of the forward pass beside the backward pass of each stage of the lane, first to last, if passes run side by
    /// side ([`Execution::pairs_passes`]).
    pub paired_s: Vec<f64>,
}

/// The work of a stage's bodies in its program, in the order in which a step runs them.
pub fn work(program: &Program, stage: u32, execution: &Execution, cost: &dyn CostModel) -> Vec<BodyWork> {
    let by_cudnn = execution.fused_attention && execution.attention == AttentionKernels::Cudnn;
    let passes = by_cudnn.then(|| find(program, WIDEST));
    let of_stage = program.bodies.par_iter().enumerate().filter(|(_, b)| b.stage == stage);
    let of_body = |(at, body): (usize, &Body)| {
        let passes = passes.as_ref().map(|passes| passes[at].as_slice());
        timed(timings::Phase::Kernels, || BodyWork::new(program, body, execution, cost, passes))
    };
    let mut bodies: Vec<BodyWork> = of_stage.map(of_body).collect();
    bodies.sort_by_key(|b| b.phase);
    bodies
}

/// Runs kernels and collectives one after the other.
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

/// Times the bodies of a stage whose device runs one kernel after another.
fn timing_in_order(bodies: &[BodyWork], prices: &Prices<'_>, execution: &Execution) -> StageTiming {
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
    timing
}

/// Moves the kernels of a body that runs once a step to their streams, ready when all passes have ended at `passes_s`
/// where they need that. Adds up their seconds in `timing`, and returns those of gathers.
fn finish_tasks(body: &BodyWork, tasks: &mut [Task], passes_s: f64, late: bool, timing: &mut StageTiming) -> f64 {
    let mut gathers_s = 0.0;
    for (task, sent) in tasks.iter_mut().zip(&body.sent) {
        if matches!(task.stream, Stream::Load | Stream::Store) {
            // Data for the update has no room on the device before that.
            task.ready_s = task.ready_s.max(passes_s);
            timing.finish_communication_s += task.seconds;
            continue;
        }
        if task.stream != Stream::Communication {
            timing.finish_compute_s += task.seconds;
            if late {
                task.ready_s = task.ready_s.max(passes_s);
            }
            continue;
        }
        task.stream = Stream::Gradients;
        timing.finish_communication_s += task.seconds;
        if matches!(sent, Some((Collective::AllGather { .. }, _, _))) {
            gathers_s += task.seconds;
        }
    }
    gathers_s
}

/// Times a stage's bodies. With `late`, gradients are those of the previous step, and their reduction overlaps with
/// that many microbatches.
pub fn stage_timing(bodies: &[BodyWork], prices: &Prices<'_>, execution: &Execution, late: Option<u32>) -> StageTiming {
    if prices.cost.runtime().is_some() {
        return timing_in_order(bodies, prices, execution);
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
                    // The remaining work does not depend on this step's gradients.
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
                gathers_s += finish_tasks(body, &mut tasks, before_s, late.is_some(), &mut timing);
                // Without overlap, nothing starts before the last backward pass ends.
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
        // Gathering updated parameters overlaps with the next step's first forward pass.
        timing.finish_s -= gathers_s.min(timing.forward.seconds).min(timing.finish_s);
    }
    timing
}

/// Seconds of one stage's forward pass beside another's backward pass, with its gradients of weights. Both stages are on the
/// same devices. Collectives occupy a part of the device while the other pass computes. Those over the same axes queue.
pub fn paired_s(
    forward: (&[BodyWork], &StageTiming),
    backward: (&[BodyWork], &StageTiming),
    prices: &Prices<'_>,
    execution: &Execution,
) -> f64 {
    let mut channels: Vec<Vec<AxisId>> = Vec::new();
    let mut of_phases = |bodies: &[BodyWork], phases: &[Phase]| {
        let mut list = Vec::new();
        for body in bodies.iter().filter(|body| phases.contains(&body.phase)) {
            let base = list.len() as u32;
            let mut of_body = tasks(&body.kernels, &body.prices(prices, execution));
            for (task, sent) in of_body.iter_mut().zip(&body.sent) {
                task.after.iter_mut().for_each(|after| *after += base);
                let Some((collective, ..)) = sent else { continue };
                let known = channels.iter().position(|axes| axes == collective.axes());
                task.channel = known.unwrap_or(channels.len()) as u8;
                channels.extend(known.is_none().then(|| collective.axes().to_vec()));
            }
            list.append(&mut of_body);
        }
        list
    };
    let lists = [of_phases(forward.0, &[Phase::Forward]), of_phases(backward.0, &[Phase::Backward, Phase::Weights])];
    let host = Host { ahead_s: forward.1.forward.ahead_s[1], queued: prices.cost.queued_kernels() };
    let played = play_beside([&lists[0], &lists[1]], host).shared(prices.cost.sending_part());
    let alone_s = forward.1.forward.seconds + backward.1.backward.seconds + backward.1.weights.seconds;
    played.seconds.min(alone_s)
}

/// Counts the work that precedes a microbatch's forward pass as the beginning of that pass.
fn begin_with(forward: &mut Played, totals: &Played) {
    forward.spans.iter_mut().for_each(|(from, to)| (*from, *to) = (*from + totals.seconds, *to + totals.seconds));
    forward.seconds += totals.seconds;
    forward.compute_s += totals.compute_s;
    forward.communication_s += totals.communication_s;
    forward.exposed_s += totals.exposed_s;
}

/// Appends a body's tasks to those of earlier bodies. They start no earlier than `barrier_s`.
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
