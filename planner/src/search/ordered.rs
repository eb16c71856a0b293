//! Orders of calls for pipelines that the search has found: the stages' times and what they hold come from lowered
//! programs, `altiplano_cost_models::orders` finds an order, and the prediction decides whether it pays.
//!
//! Orders are sought with gradients of weights in the backward calls, apart from them, and apart where there is room.

use super::choice::fits;
use super::context::SearchContext;
use crate::layers::graph::LayeredGraph;
use crate::lower::{DedupedPrograms, TrainingGraphs, lower_deduped};
use crate::predict::memory::LaneMemory;
use crate::predict::{lane_memories, predict_from, timings_of, work_of};
use altiplano_cost_models::orders::{Call, Calls, Effort, Pass, Problem, Work, search};
use altiplano_cost_models::pipeline::{Order, StageTimes};
use altiplano_cost_models::{Costs, Rooflines};
use altiplano_ir::order::CallOrder;
use altiplano_ir::plan::{Placement, Plan, Schedule, Update};
use altiplano_ir::program::{Call as ProgramCall, Phase};
use rayon::prelude::*;
use std::sync::Arc;

/// Tries with less room, if the order of a try needs more than estimated.
const TRIES: usize = 4;

/// The fastest of `plans` under an order of its own, if the user asks for one and it is faster than all of them that
/// fit.
pub(super) fn fastest(cx: &SearchContext<'_>, plans: &[Plan]) -> Option<Plan> {
    if !cx.request.searches_order || cx.progress.stopped() {
        return None;
    }
    let step_s = |plan: &Plan| plan.predicted.step_time_s;
    let least_s = plans.iter().filter(|plan| fits(plan)).map(step_s).fold(f64::INFINITY, f64::min);
    let ordered = plans.par_iter().map(|plan| {
        match cx.layered.at(plan.num_microbatches).filter(|layered| layered.starts == plan.layers) {
            Some(layered) => ordered(plan, layered.training_graphs(plan.execution).ok()?, cx.costs),
            None => ordered(plan, LayeredGraph::of_plan(plan).training_graphs(plan.execution).ok()?, cx.costs),
        }
    });
    let ordered: Vec<Plan> = ordered.collect::<Vec<_>>().into_iter().flatten().map(|found| found.plan).collect();
    let best = ordered.into_iter().min_by(|a, b| step_s(a).total_cmp(&step_s(b)));
    best.filter(|plan| step_s(plan) < least_s * (1.0 - 1e-6))
}

/// A plan under an order of its own.
pub struct Ordered {
    pub plan: Plan,
    /// A lower bound for the step under any order of the same calls in the room that the devices have, in seconds.
    pub bound_s: f64,
}

/// The plan under the fastest order found for it, if that fits. `None` if it has one stage, or steps that overlap.
pub fn ordered(plan: &Plan, graphs: &TrainingGraphs, costs: &dyn Costs) -> Option<Ordered> {
    let overlaps = plan.update == Update::Stale || plan.staleness() > 0;
    if plan.num_lanes() < 2 || !plan.schedule.trains() || overlaps || plan.servers.is_some() {
        return None;
    }
    let stages = plan.stages.len();
    let pipelines = [false, true].into_par_iter().map(|apart| Pipeline::of(plan, vec![apart; stages], graphs, costs));
    let mut pipelines: Vec<Pipeline<'_>> = pipelines.collect::<Vec<_>>().into_iter().flatten().collect();
    // Parts of a backward pass may need more together than the whole.
    let roomy: Vec<bool> = pipelines.last().map_or(Vec::new(), |apart| apart.roomy.clone());
    if roomy.contains(&false) && roomy.contains(&true) {
        pipelines.extend(Pipeline::of(plan, roomy, graphs, costs));
    }
    let found: Vec<Ordered> = pipelines.into_par_iter().filter_map(Pipeline::found).collect();
    let step_s = |found: &Ordered| found.plan.predicted.step_time_s;
    found.into_iter().min_by(|a, b| step_s(a).total_cmp(&step_s(b)))
}

/// A pipeline whose order is sought.
struct Pipeline<'a> {
    plan: &'a Plan,
    graphs: &'a TrainingGraphs,
    costs: &'a dyn Costs,
    problem: Problem,
    room_bytes: Vec<u64>,
    known: Vec<Calls>,
    /// By stage: true if its lane has room for the first of the known orders.
    roomy: Vec<bool>,
}

impl<'a> Pipeline<'a> {
    /// `apart` are the stages that compute gradients of weights apart from their backward calls.
    fn of(plan: &'a Plan, apart: Vec<bool>, graphs: &'a TrainingGraphs, costs: &'a dyn Costs) -> Option<Pipeline<'a>> {
        let known = named(plan, &apart);
        let plain = under(plan, known.first()?.clone());
        let deduped = lower_deduped(&plain, graphs, &Rooflines::of(&plan.cluster), costs.runtime().is_none());
        let work = work_of(&plain, &deduped, costs);
        let timings = timings_of(&plain, &deduped, &work, costs);
        let memories = lane_memories(&plain, &deduped, &work);
        let mut stages = vec![Work::default(); plan.stages.len()];
        for (lane, memory) in memories.iter().enumerate() {
            hold(&mut stages, lane, &deduped, memory);
        }
        for ((stage, (times, _)), apart) in stages.iter_mut().zip(&timings).zip(&apart) {
            let StageTimes { forward_s, backward_s, weights_s, transfer_forward_s, transfer_backward_s, step_s } =
                *times;
            let weights_s = apart.then_some(weights_s);
            *stage =
                Work { forward_s, backward_s, weights_s, transfer_forward_s, transfer_backward_s, step_s, ..*stage };
        }
        let lanes: Vec<Vec<usize>> = (0..plan.num_lanes()).map(|lane| plan.stages_of(lane).collect()).collect();
        let count = plan.num_microbatches as usize;
        let unlimited = vec![u64::MAX; lanes.len()];
        let problem = Problem::new(stages, lanes, count, unlimited, Order::of(&plain).meets).ok()?;
        // Room for activations: what the lane needs besides those of this order is the same under others.
        let model = problem.peak_bytes(&known[0]);
        let room = plan.lanes().iter().zip(&memories).zip(model);
        let room = room.map(|((lane, memory), model)| {
            plan.usable_bytes(lane).saturating_add(model).saturating_sub(memory.peak_bytes)
        });
        let room_bytes = room.collect();
        let fits = |lane: usize| memories[lane].peak_bytes <= plan.usable_bytes(&plan.stages[lane]);
        let roomy = (0..plan.stages.len()).map(|stage| fits(plan.lane_of(stage))).collect();
        Some(Pipeline { plan, graphs, costs, room_bytes, problem, known, roomy })
    }

    /// The plan under the best order that fits by its prediction.
    fn found(self) -> Option<Ordered> {
        let bound_s = self.problem.clone().within(self.room_bytes.clone()).ok()?.bound_s();
        let mut room = self.room_bytes.clone();
        // The bytes that the first of the known orders holds.
        let least = self.problem.peak_bytes(&self.known[0]);
        for left in (0..TRIES).rev() {
            let problem = self.problem.clone().within(room.clone()).ok()?;
            let Some(order) = search(&problem, &self.known, effort(self.costs)) else { break };
            let plan = predict_from(under(self.plan, order.calls), self.graphs, self.costs);
            if fits(&plan) {
                return Some(Ordered { plan, bound_s });
            }
            for ((lane, room), &least) in plan.lanes().iter().zip(&mut room).zip(&least) {
                let over = lane.predicted.peak_bytes.saturating_sub(plan.usable_bytes(lane));
                *room = match left {
                    1 => least.min(*room),
                    _ => room.saturating_sub(over.max(room.saturating_sub(least) / 2)),
                };
            }
        }
        let plan = predict_from(under(self.plan, self.known[0].clone()), self.graphs, self.costs);
        fits(&plan).then_some(Ordered { plan, bound_s })
    }
}

/// Calls that may be simulated.
fn effort(costs: &dyn Costs) -> Effort {
    // Times of workers that share cores depend on each other, so a proof of these proves nothing.
    let exact_calls = if costs.runtime().is_some() { 0 } else { 4_000_000 };
    Effort { list_calls: 4_000_000, improve_calls: 2_000_000, exact_calls }
}

/// The plan under an order of its own.
fn under(plan: &Plan, calls: Calls) -> Plan {
    Plan { schedule: Schedule::Found, order: Some(Arc::new(CallOrder { lanes: calls })), ..plan.clone() }
}

/// The orders of named schedules on the plan's lanes, with gradients of weights of the stages that compute them apart. The
/// first is that of `1f1b`, or of `zb-v` on lanes that form a V.
fn named(plan: &Plan, apart: &[bool]) -> Vec<Calls> {
    let shared = plan.virtual_stages as usize;
    let of = |schedule| Order::new(schedule, plan.stages.len(), plan.num_microbatches).sharing(shared).written().lanes;
    let is_apart = |call: &Call| call.pass != Pass::Weights || apart[call.stage as usize];
    let where_apart =
        |calls: Calls| -> Calls { calls.into_iter().map(|lane| lane.into_iter().filter(is_apart).collect()).collect() };
    if plan.placement == Placement::V {
        return [of(Schedule::ZbV), of(Schedule::DualPipeV)].map(where_apart).into();
    }
    let with_weights = |calls: Calls| -> Calls {
        let weights = |call: Call| {
            let splits = call.pass == Pass::Backward && apart[call.stage as usize];
            splits.then_some(Call { pass: Pass::Weights, ..call })
        };
        let lane = |lane: Vec<Call>| lane.into_iter().flat_map(|call| [Some(call), weights(call)]).flatten().collect();
        calls.into_iter().map(lane).collect()
    };
    let zero_bubble = (shared == 1 && apart.contains(&true)).then(|| where_apart(of(Schedule::ZbH1)));
    [of(Schedule::OneFOneB), of(Schedule::GPipe)].map(with_weights).into_iter().chain(zero_bubble).collect()
}

/// Writes down what the stages of a lane hold of a microbatch, by what its calls leave.
fn hold(stages: &mut [Work], lane: usize, deduped: &DedupedPrograms<'_>, memory: &LaneMemory) {
    let (written, scheduled) = (deduped.program_of(lane), &deduped.programs.programs[lane]);
    // Bytes that the first forward and the first backward of each stage leave, with their transfers.
    let mut left = vec![[0i64; 2]; stages.len()];
    let (mut received, mut last) = (0, None);
    for (call, &kind) in scheduled.schedule.iter().zip(&memory.calls) {
        let bytes = memory.kinds[kind as usize].left_bytes;
        match *call {
            ProgramCall::Receive { microbatch: Some(0), .. } => received += bytes,
            ProgramCall::Run { body, microbatch: Some(0) } => {
                let body = &written.bodies[body as usize];
                let pass = match body.phase {
                    Phase::Forward => 0,
                    Phase::Backward => 1,
                    _ => continue,
                };
                let stage = deduped.stage_on(lane, body.stage) as usize;
                last = Some((stage, pass));
                left[stage][pass] += std::mem::take(&mut received) + bytes;
            }
            ProgramCall::Send { microbatch: Some(0), .. } => {
                if let Some((stage, pass)) = last {
                    left[stage][pass] += bytes;
                }
            }
            _ => {}
        }
    }
    for (stage, [forward, backward]) in stages.iter_mut().zip(left).filter(|(_, left)| *left != [0; 2]) {
        let bytes = |bytes: i64| u64::try_from(bytes).unwrap_or(0);
        (stage.held_bytes, stage.weights_bytes) = (bytes(forward), bytes(forward + backward));
    }
}
