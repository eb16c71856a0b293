//! Predicts a lowered plan: seconds and bytes of each stage, and the step time. Stages on the same devices share their
//! memory.
//!
//! Times come from the bodies that devices really run, simulated on a device's streams and placed on the pipeline's
//! schedule. Bytes come from [`crate::predict::memory`].

mod exchange;
pub(crate) mod flop;
pub mod memory;
mod on_xla;
pub mod timing;

pub use exchange::Exchanged;

use crate::cache::{self, Cache};
use crate::layers::graph::LayeredGraph;
use crate::lower::{DedupedPrograms, Prices, TrainingGraphs, lower_deduped};
use crate::predict::flop::step_work;
use crate::predict::memory::{LaneMemory, steps};
use crate::predict::timing::{BodyWork, StageTiming, paired_s, stage_timing, work};
use crate::request::PlanFailure;
use crate::timings::{Phase, part_of, timed};
use altiplano_cost_models::pipeline::{
    Order, PipelineCall, StageTimeline, StageTimes, Timeline, in_steady_state, simulate_order,
};
use altiplano_cost_models::sharing::{SharedStage, simulate_shared};
use altiplano_cost_models::timeline::Played;
use altiplano_cost_models::{Costs, Rooflines, Runtime, TransferPath, path_between_groups, transfer_path};
use altiplano_ir::plan::{
    AttentionKernels, Execution, Goal, MfuConvention, Plan, Predicted, Stage, StagePredicted, Target, Update,
};
use altiplano_ir::program::{Call, Programs};
use altiplano_ir::servers::ServerPredicted;
use rayon::prelude::*;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};

/// Predicts a plan with the given costs.
pub fn predict_plan(plan: Plan, costs: &dyn Costs) -> Result<Plan, PlanFailure> {
    let graphs = TrainingGraphs::of(&plan)?;
    Ok(predict_from(plan, &graphs, costs))
}

/// Predicts a plan under executions that overlap more or less, in any order. Only passes side by side change its programs.
pub fn predict_overlaps(plan: &Plan, executions: &[Execution], costs: &dyn Costs) -> Result<Vec<Plan>, PlanFailure> {
    if executions.is_empty() {
        return Ok(Vec::new());
    }
    let graphs = TrainingGraphs::of(plan)?;
    let mut predicted = Vec::with_capacity(executions.len());
    for pairs_passes in [false, true] {
        let mut alike = executions.iter().filter(|execution| execution.pairs_passes == pairs_passes).peekable();
        let Some(&&first) = alike.peek() else { continue };
        let deduped = lowered(&Plan { execution: first, ..plan.clone() }, &graphs, costs);
        for &execution in alike {
            let mut other = Plan { execution, ..plan.clone() };
            predict(&mut other, &deduped, costs);
            predicted.push(other);
        }
    }
    Ok(predicted)
}

/// The most bytes of a device of each lane if XLA allocates them, whatever software the plan is for.
pub fn peaks_on_xla(plan: &Plan, costs: &dyn Costs) -> Result<Vec<u64>, PlanFailure> {
    let mut plan = plan.clone();
    plan.execution.attention = AttentionKernels::Cudnn;
    let deduped = lowered(&plan, &TrainingGraphs::of(&plan)?, costs);
    let work = work_of(&plan, &deduped, costs);
    Ok(memories(&plan, &deduped, &work, true).iter().map(|memory| memory.peak_bytes).collect())
}

/// Like [`predict_plan`], for a model that is already cut into layers. Uses a cached prediction if there is one.
pub fn predict_with(
    mut plan: Plan,
    layered: &LayeredGraph,
    costs: &dyn Costs,
    cache: Option<&Cache>,
) -> Result<Plan, PlanFailure> {
    // Cached predictions do not include servers.
    let cache = cache.filter(|_| plan.servers.is_none());
    let kept = cache.and_then(|cache| Some((cache, cache::of_plan(&plan, costs)?)));
    if let Some((whole, stages)) = kept.and_then(|(cache, key)| cache.get::<(Predicted, Vec<StagePredicted>)>(key)) {
        plan.predicted = whole;
        plan.stages.iter_mut().zip(stages).for_each(|(stage, predicted)| stage.predicted = predicted);
        return Ok(plan);
    }
    let graphs = layered.training_graphs(plan.execution)?;
    let plan = predict_from(plan, graphs, costs);
    if let Some((cache, key)) = kept {
        let stages: Vec<&StagePredicted> = plan.stages.iter().map(|stage| &stage.predicted).collect();
        cache.keep(key, &(&plan.predicted, stages));
    }
    Ok(plan)
}

/// Fills in a plan's predictions, for a model whose training graphs are known.
pub fn predict_from(mut plan: Plan, graphs: &TrainingGraphs, costs: &dyn Costs) -> Plan {
    let deduped = lowered(&plan, graphs, costs);
    predict(&mut plan, &deduped, costs);
    debug_assert!(plan.verify().is_empty(), "{:?}", plan.verify());
    plan
}

/// The programs of a plan that is predicted by `costs`.
fn lowered(plan: &Plan, graphs: &TrainingGraphs, costs: &dyn Costs) -> DedupedPrograms<'static> {
    // The programs must follow from the plan alone, not from the costs by which it was chosen.
    let prices = Rooflines::of(&plan.cluster);
    // Workers on one machine slow each other down, so predicting them takes the programs of all.
    let alone = costs.runtime().is_none();
    timed(Phase::Lowering, || lower_deduped(plan, graphs, &prices, alone))
}

/// Returns the work of a plan's programs, by stage; it is empty for stages that duplicate another.
pub fn work_of(plan: &Plan, deduped: &DedupedPrograms<'_>, costs: &dyn Costs) -> Vec<Vec<BodyWork>> {
    let devices = plan.num_devices();
    let at = costs.runtime().map(|r| r.at(devices, devices));
    let of_stage = |i: usize| {
        if same_as(plan, deduped, i) != i {
            return Vec::new();
        }
        let stage = &plan.stages[i];
        let cost = at.as_ref().map_or(costs.of_group(stage.group), |r| r.as_cost());
        let program = deduped.program_of(plan.lane_of(i));
        let mut bodies = work(program, i as u32, &plan.execution, cost);
        if let Some(runtime) = &at {
            let prices = Prices::new(cost, plan.group_of(stage), stage.submesh, &stage.mesh);
            bodies.iter_mut().for_each(|body| body.sent_between_nodes(runtime.as_ref(), &prices));
        }
        bodies
    };
    (0..plan.stages.len()).into_par_iter().map(of_stage).collect()
}

/// Like [`work_of`], with the work of duplicate stages filled in.
pub fn whole_work_of(plan: &Plan, deduped: &DedupedPrograms<'_>, costs: &dyn Costs) -> Vec<Vec<BodyWork>> {
    let mut work = work_of(plan, deduped, costs);
    for i in 0..work.len() {
        let first = same_as(plan, deduped, i);
        if first != i {
            work[i] = work[first].iter().map(|body| body.of_stage(i as u32)).collect();
        }
    }
    work
}

/// The stage that represents stage `i` in a deduplicated deduped.
fn same_as(plan: &Plan, deduped: &DedupedPrograms<'_>, i: usize) -> usize {
    let lane = plan.lane_of(i);
    plan.placement.moved(i, lane, deduped.same_as[lane], plan.num_lanes())
}

/// Times every stage of a plan from the work of its programs.
pub fn timings_of(
    plan: &Plan,
    deduped: &DedupedPrograms<'_>,
    work: &[Vec<BodyWork>],
    costs: &dyn Costs,
) -> Vec<(StageTimes, StageTiming)> {
    if plan.servers.is_some() {
        return exchange_of(plan, deduped, work, costs).map_or_else(Vec::new, |(timing, _)| vec![timing]);
    }
    if let Some(runtime) = costs.runtime() {
        return shared_timings(plan, deduped, work, runtime);
    }
    let timing = |i: usize| {
        if same_as(plan, deduped, i) != i {
            return StageTiming::default();
        }
        let stage = &plan.stages[i];
        let prices = Prices::new(costs.of_group(stage.group), plan.group_of(stage), stage.submesh, &stage.mesh);
        timed(Phase::Timing, || stage_timing(&work[i], &prices, &plan.execution, late_by(plan)))
    };
    let mut timings: Vec<StageTiming> = (0..plan.stages.len()).into_par_iter().map(timing).collect();
    if plan.execution.pairs_passes {
        pair(plan, deduped, work, costs, &mut timings);
    }
    let with_sends = |i: usize| {
        let timing = timings[same_as(plan, deduped, i)].clone();
        let cost = costs.of_group(plan.stages[i].group);
        let sends = sends(plan, deduped, i, |bytes, path| cost.transfer_s(bytes, path));
        let times = StageTimes {
            forward_s: timing.forward.seconds,
            backward_s: timing.backward.seconds,
            weights_s: timing.weights.seconds,
            transfer_forward_s: sends[0],
            transfer_backward_s: sends[1],
            step_s: timing.finish_s + sends[2],
        };
        (times, timing)
    };
    (0..plan.stages.len()).into_par_iter().map(with_sends).collect()
}

/// Times the forward pass of each stage beside the backward pass of each stage of its lane. Stages of equal times have equal
/// work, of which one pair is timed.
fn pair(
    plan: &Plan,
    deduped: &DedupedPrograms<'_>,
    work: &[Vec<BodyWork>],
    costs: &dyn Costs,
    timings: &mut [StageTiming],
) {
    let key = |timing: &StageTiming| {
        let of = |played: &Played| [played.seconds, played.compute_s, played.communication_s].map(f64::to_bits);
        [of(&timing.forward), of(&timing.backward), of(&timing.weights)]
    };
    let mut known = FxHashMap::default();
    for i in (0..plan.stages.len()).filter(|&i| same_as(plan, deduped, i) == i) {
        let stage = &plan.stages[i];
        let prices = Prices::new(costs.of_group(stage.group), plan.group_of(stage), stage.submesh, &stage.mesh);
        let beside = |other: usize| {
            let (forward, backward) = (&timings[i], &timings[other]);
            *known
                .entry((key(forward), key(backward)))
                .or_insert_with(|| paired_s((&work[i], forward), (&work[other], backward), &prices, &plan.execution))
        };
        timings[i].paired_s = plan.stages_of(plan.lane_of(i)).map(beside).collect();
    }
}

/// Times a worker of a plan with parameter servers while all workers compute, and its exchange with the servers.
/// Returns `None` if the plan has no servers.
pub fn exchange_of(
    plan: &Plan,
    deduped: &DedupedPrograms<'_>,
    work: &[Vec<BodyWork>],
    costs: &dyn Costs,
) -> Option<((StageTimes, StageTiming), Exchanged)> {
    let over = plan.servers.as_ref()?;
    let stage = &plan.stages[0];
    let at_work = costs.runtime().map(|r| r.at(plan.num_devices(), plan.num_workers()));
    let cost = at_work.as_ref().map_or(costs.of_group(stage.group), |r| r.as_cost());
    let prices = Prices::new(cost, plan.group_of(stage), stage.submesh, &stage.mesh);
    let mut timing = stage_timing(&work[0], &prices, &plan.execution, None);
    let prepared_s = at_work.as_ref().map_or(0.0, |r| r.preparation_s(deduped.program_of(0), 0, true));
    let mut times = StageTimes {
        forward_s: timing.forward.seconds + prepared_s,
        backward_s: timing.backward.seconds,
        ..StageTimes::default()
    };
    let exchanged = exchange::exchanged(plan, over, deduped, &times, costs);
    let computed_s = f64::from(plan.microbatches_of_worker()) * (times.forward_s + times.backward_s);
    times.step_s = (exchanged.step_s - computed_s).max(0.0);
    timing.waits_s = (times.step_s - exchanged.sent_s).max(0.0);
    if costs.runtime().is_some() {
        // All workers compute at once, and this one represents them.
        timing.shared = vec![(stage.devices.len() as u32, times)];
    }
    Some(((times, timing), exchanged))
}

/// Number of microbatches that overlap with the reduction of late gradients; `None` if gradients are not late.
fn late_by(plan: &Plan) -> Option<u32> {
    (plan.update == Update::Stale).then_some(plan.num_microbatches)
}

/// Most numbers of busy devices for which stages on a shared machine are timed.
const MAX_LOADS: usize = 8;

/// Times stages on a machine that all devices share. The times of a stage assume that all devices compute. Sender and
/// receiver each spend time on copying a message, and the message takes time in between.
fn shared_timings(
    plan: &Plan,
    deduped: &DedupedPrograms<'_>,
    work: &[Vec<BodyWork>],
    runtime: &dyn Runtime,
) -> Vec<(StageTimes, StageTiming)> {
    let (devices, programs) = (plan.num_devices(), &deduped.programs);
    let mut sums: BTreeSet<u32> = BTreeSet::from([0]);
    for stage in plan.lanes() {
        sums = sums.iter().flat_map(|&n| [n, n + stage.devices.len() as u32]).collect();
    }
    sums.remove(&0);
    let loads: Vec<u32> = sums.iter().copied().collect();
    let every = loads.len().div_ceil(MAX_LOADS);
    // Counted from the last load, which is all devices.
    let loads: Vec<u32> = loads.into_iter().rev().step_by(every.max(1)).collect();
    let copied: Vec<[u64; 6]> = (0..plan.stages.len()).map(|i| copied_bytes(plan, programs, i)).collect();
    let times = work.par_iter().enumerate().map(|(i, bodies)| {
        let stage = &plan.stages[i];
        let program = &programs.programs[plan.lane_of(i)];
        let sent_s = sends(plan, deduped, i, |bytes, path| runtime.message_s(bytes, path));
        let at = |busy: u32| {
            let cost = runtime.at(devices, busy);
            let prices = Prices::new(cost.as_cost(), plan.group_of(stage), stage.submesh, &stage.mesh);
            let timing = stage_timing(bodies, &prices, &plan.execution, None);
            let [f, b, s, rf, rb, rs] = copied[i];
            let copies = |sent: u64, received: u64| cost.send_s(sent) + cost.receive_s(received);
            let times = StageTimes {
                forward_s: timing.forward.seconds + copies(f, rf) + cost.preparation_s(program, i as u32, true),
                backward_s: timing.backward.seconds + copies(b, rb),
                weights_s: timing.weights.seconds,
                transfer_forward_s: sent_s[0],
                transfer_backward_s: sent_s[1],
                step_s: timing.finish_s + copies(s, rs) + sent_s[2] + cost.preparation_s(program, i as u32, false),
            };
            (times, timing)
        };
        let (times, mut timing) = at(devices);
        timing.shared = loads.iter().rev().map(|&n| (n, if n == devices { times } else { at(n).0 })).collect();
        (times, timing)
    });
    times.collect()
}

/// Bytes that the busiest device of a stage sends forward and backward with each microbatch and once a step, followed
/// by the bytes that it receives.
fn copied_bytes(plan: &Plan, programs: &Programs, i: usize) -> [u64; 6] {
    let mut bytes = [0; 6];
    for call in &programs.programs[plan.lane_of(i)].schedule {
        let (transfer, microbatch, sends) = match *call {
            Call::Send { transfer, microbatch, .. } => (transfer, microbatch, true),
            Call::Receive { transfer, microbatch } => (transfer, microbatch, false),
            Call::Run { .. } => continue,
        };
        if microbatch.is_some_and(|m| m != 0) {
            continue;
        }
        let (source, target) = programs.stages_of(transfer);
        if i as u32 != if sends { source } else { target } {
            continue;
        }
        let t = &programs.transfers[transfer.0 as usize];
        let width = programs.programs[t.source.0 as usize].buffer(t.source.1).ty.dtype.bytes();
        let mut of_device: BTreeMap<u32, u64> = BTreeMap::new();
        for message in programs.messages(transfer) {
            let elements: u64 = message.source_indices.iter().map(|list| list.len() as u64).product();
            *of_device.entry(if sends { message.source } else { message.target }).or_default() += elements * width;
        }
        let slot = match microbatch {
            None => 2,
            Some(_) if target > source => 0,
            Some(_) => 1,
        };
        bytes[slot + if sends { 0 } else { 3 }] += of_device.into_values().max().unwrap_or(0);
    }
    bytes
}

/// Simulates the calls of a step, on devices of their own or on a machine that all share. `watch` observes a step that
/// runs alone. If steps overlap, the result is a step in steady state.
pub fn played(
    plan: &Plan,
    timings: &[(StageTimes, StageTiming)],
    order: &Order,
    watch: &mut dyn FnMut(usize, PipelineCall, f64, f64),
) -> Timeline {
    let alone = played_as(plan, timings, order, watch);
    if order.late(0).is_empty() && plan.goal == Goal::Latency {
        return alone;
    }
    in_steady_state(order, |order| played_as(plan, timings, order, &mut |_, _, _, _| {}))
}

fn played_as(
    plan: &Plan,
    timings: &[(StageTimes, StageTiming)],
    order: &Order,
    watch: &mut dyn FnMut(usize, PipelineCall, f64, f64),
) -> Timeline {
    if timings.iter().all(|(_, timing)| timing.shared.is_empty()) {
        return played_alone(timings, order, watch);
    }
    let stage = |(stage, (_, timing)): (&Stage, &(StageTimes, StageTiming))| SharedStage {
        devices: stage.devices.len() as u32,
        times: timing.shared.clone(),
    };
    let stages: Vec<SharedStage> = plan.stages.iter().zip(timings).map(stage).collect();
    simulate_shared(&stages, order, watch)
}

/// For each lane, the part of the exposed communication of its passes that the passes beside them hide; zero if passes run
/// one after the other.
pub(crate) fn hidden_parts(plan: &Plan, timings: &[(StageTimes, StageTiming)], timeline: &Timeline) -> Vec<f64> {
    let batches = f64::from(plan.microbatches_of_worker());
    let of_lane = |(lane, played): (usize, &StageTimeline)| {
        let (mut whole_s, mut exposed_s) = (0.0, 0.0);
        for (times, timing) in plan.stages_of(lane).map(|i| &timings[i]) {
            whole_s += batches * (times.forward_s + times.backward_s + times.weights_s) + times.step_s;
            exposed_s += batches * (timing.forward.exposed_s + timing.backward.exposed_s + timing.weights.exposed_s);
        }
        let pairs = plan.execution.pairs_passes && exposed_s > 0.0;
        if pairs { ((whole_s - played.busy_s) / exposed_s).clamp(0.0, 1.0) } else { 0.0 }
    };
    timeline.stages.iter().enumerate().map(of_lane).collect()
}

/// Simulates the calls of a step on devices that share nothing.
pub fn played_alone(
    timings: &[(StageTimes, StageTiming)],
    order: &Order,
    watch: &mut dyn FnMut(usize, PipelineCall, f64, f64),
) -> Timeline {
    let times: Vec<StageTimes> = timings.iter().map(|t| t.0).collect();
    if !order.pairs {
        return simulate_order(&times, order, watch);
    }
    let order = order.clone().pairing(timings.iter().map(|t| t.1.paired_s.clone()).collect());
    simulate_order(&times, &order, watch)
}

/// Seconds that a stage's sends take: forward and backward with each microbatch, and once a step.
fn sends(
    plan: &Plan,
    deduped: &DedupedPrograms<'_>,
    i: usize,
    transfer_s: impl Fn(u64, &TransferPath) -> f64,
) -> [f64; 3] {
    let lane = plan.lane_of(i);
    let (stage, program) = (&plan.stages[i], deduped.program_of(lane));
    let mut sends = [0.0; 3];
    for call in &deduped.programs.programs[lane].schedule {
        let Call::Send { transfer, microbatch, .. } = call else { continue };
        let (from, to) = deduped.stages_of(*transfer);
        // A transfer between stages on the same devices is a local copy, which is negligible beside one over a link.
        let stays = plan.lane_of(from as usize) == plan.lane_of(to as usize);
        if from != i as u32 || stays || microbatch.is_some_and(|m| m != 0) {
            continue;
        }
        let t = &deduped.programs.transfers[transfer.0 as usize];
        let target = &plan.stages[to as usize];
        let seconds = transfer_s(program.buffer(t.source.1).ty.bytes(), &path(plan, stage, target));
        let slot = match microbatch {
            None => 2,
            Some(_) if to > from => 0,
            Some(_) => 1,
        };
        sends[slot] += seconds;
    }
    sends
}

/// The links from one stage to another.
fn path(plan: &Plan, source: &Stage, target: &Stage) -> TransferPath {
    let group = plan.group_of(source);
    match &plan.cluster.between_groups {
        Some(between) if source.group != target.group => {
            path_between_groups((group, source.submesh), (plan.group_of(target), target.submesh), between)
        }
        _ => {
            let first = plan.cluster.devices_of(source.group as usize).start;
            let node = |d: u32| (d - first) / group.devices_per_node;
            let same_node = source.devices.iter().chain(&target.devices).all(|&d| node(d) == node(source.devices[0]));
            transfer_path(group, source.submesh, target.submesh, same_node)
        }
    }
}

/// Memory of every lane over a step, on the devices that the plan is for.
pub fn lane_memories(plan: &Plan, deduped: &DedupedPrograms<'_>, work: &[Vec<BodyWork>]) -> Vec<LaneMemory> {
    memories(plan, deduped, work, plan.target == Target::Xla)
}

/// `on_xla`: XLA allocates memory.
fn memories(plan: &Plan, deduped: &DedupedPrograms<'_>, work: &[Vec<BodyWork>], on_xla: bool) -> Vec<LaneMemory> {
    // Workers and servers run on devices of one group.
    let kind = |lane: usize| plan.group_of(plan.stages.get(lane).unwrap_or(&plan.stages[0])).device.kind;
    let programs = &deduped.programs.programs;
    let steps_of = |lane: usize| match deduped.same_as[lane] == lane {
        true => part_of(Phase::Memory, || steps(&programs[lane], kind(lane), work)),
        false => Vec::new(),
    };
    let steps: Vec<_> = (0..programs.len()).into_par_iter().map(steps_of).collect();
    let memory = |lane: usize| {
        let (written, steps) = (deduped.program_of(lane), &steps[deduped.same_as[lane]]);
        let both = [written, &programs[lane]];
        LaneMemory::of(both, &deduped.programs.transfers, steps, kind(lane), on_xla)
    };
    (0..programs.len()).into_par_iter().map(memory).collect()
}

/// Fills in all predictions of a plan from its programs.
pub fn predict(plan: &mut Plan, deduped: &DedupedPrograms<'_>, costs: &dyn Costs) {
    let work = work_of(plan, deduped, costs);
    let (timings, memories) = {
        let memories = || timed(Phase::Memory, || lane_memories(plan, deduped, &work));
        rayon::join(|| timings_of(plan, deduped, &work, costs), memories)
    };
    let order = Order::of(plan);
    let timeline = part_of(Phase::Timing, || played(plan, &timings, &order, &mut |_, _, _, _| {}));
    let alone = || played_as(plan, &timings, &order, &mut |_, _, _, _| {}).step_s;
    let latency_s = (plan.goal == Goal::Throughput).then(alone);
    let batches = f64::from(plan.microbatches_of_worker());
    let hidden = hidden_parts(plan, &timings, &timeline);
    let parts = timings.iter().enumerate().map(|(i, (times, timing))| {
        let bodies = [&timing.forward, &timing.backward, &timing.weights];
        let exposed_s: f64 = bodies.iter().map(|b| b.exposed_s).sum();
        let waited_s = exposed_s * (1.0 - hidden[plan.lane_of(i)]);
        let seconds: f64 = bodies.iter().map(|b| b.seconds).sum();
        // Sends may overlap with computation, but count in full as communication here.
        let sends_s = batches * (times.transfer_forward_s + times.transfer_backward_s);
        let finish_compute_s = timing.finish_compute_s.min(timing.finish_s);
        let compute_s = batches * (seconds - exposed_s) + finish_compute_s;
        let communication_s = batches * waited_s + sends_s + times.step_s - finish_compute_s - timing.waits_s;
        (compute_s, communication_s)
    });
    let parts: Vec<(f64, f64)> = parts.collect();
    for (lane, (played, memory)) in timeline.stages.iter().zip(&memories).enumerate() {
        let mut whole_s = plan.stages_of(lane).map(|i| parts[i].0 + parts[i].1).sum::<f64>();
        // On a shared machine, stages run faster whenever others wait.
        let is_shared = plan.servers.is_none() && plan.stages_of(lane).any(|i| !timings[i].1.shared.is_empty());
        let part = if is_shared { played.busy_s / whole_s.max(f64::MIN_POSITIVE) } else { 1.0 };
        whole_s *= part;
        for i in plan.stages_of(lane) {
            let times = &timings[i].0;
            plan.stages[i].predicted = StagePredicted {
                forward_s: times.forward_s,
                backward_s: times.backward_s + times.weights_s,
                step_s: times.step_s,
                compute_s: part * parts[i].0,
                communication_s: part * parts[i].1,
                bubble_s: (timeline.step_s - whole_s).max(0.0),
                peak_bytes: memory.peak_bytes,
                host_bytes: memory.host_peak_bytes,
                memory: memory.memory(),
            };
        }
    }
    if let Some((_, exchanged)) = exchange_of(plan, deduped, &work, costs)
        && let Some(over) = &mut plan.servers
    {
        let of_servers = exchanged.servers.into_iter().zip(&memories[over.workers.len()..]);
        let predicted = of_servers.map(|((compute_s, link_s), memory)| {
            let peak_bytes = memory.peak_bytes;
            ServerPredicted { compute_s, link_s, memory: memory.memory_of_server(), peak_bytes }
        });
        over.predicted = predicted.collect();
    }
    let of_servers = plan.servers.iter().flat_map(|over| &over.predicted).map(|server| server.peak_bytes);
    let work =
        |counts| step_work(&plan.graph, &plan.stop_gradients, plan.schedule.trains(), plan.num_microbatches, counts);
    let mfu_convention = plan.predicted.mfu_convention;
    let computed = work(MfuConvention::Computed);
    let lower_bound_s = computed.seconds(&plan.cluster);
    let counted = if mfu_convention == MfuConvention::Computed { computed } else { work(mfu_convention) };
    plan.predicted = Predicted {
        step_time_s: timeline.step_s,
        latency_s,
        lower_bound_s,
        samples_per_s: plan.global_batch as f64 / timeline.step_s,
        mfu: counted.seconds(&plan.cluster) / timeline.step_s,
        peak_bytes: plan.stages.iter().map(|s| s.predicted.peak_bytes).chain(of_servers).collect(),
        model_flop: counted.flop(),
        mfu_convention,
    };
}
