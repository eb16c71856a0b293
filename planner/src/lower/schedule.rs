//! The order of a lane's calls: microbatches of its stages under the plan's schedule, then reductions and updates. Late
//! backward passes and updates, which remain when the next step begins, run among that step's calls.

use super::Cut;
use super::stage::{Boundary, Links, Lowered};
use altiplano_cost_models::pipeline::PipelineCall;
use altiplano_ir::graph::ValueId;
use altiplano_ir::plan::Update;
use altiplano_ir::program::{BufferId, Call, Program, TransferId};
use std::collections::BTreeMap;

/// Indices of a stage's bodies in the program, and its transfers.
struct Calls {
    forward: u32,
    backward: u32,
    /// Absent if the backward body computes them.
    weights: Option<u32>,
    /// Absent if nothing is exchanged once a step.
    reduce: Option<u32>,
    /// Absent if there are no sums over all gradients.
    norm: Option<u32>,
    update: u32,
    /// Absent if nothing is summed over all microbatches.
    totals: Option<u32>,
    receives_forward: Vec<TransferId>,
    receives_backward: Vec<TransferId>,
    receives_tied: Vec<TransferId>,
    /// Transfers with the buffers that they send.
    sends_forward: Vec<(TransferId, BufferId)>,
    sends_backward: Vec<(TransferId, BufferId)>,
    sends_tied: Vec<(TransferId, BufferId)>,
    sends_shares: Vec<(TransferId, BufferId)>,
    receives_shares: Vec<TransferId>,
    /// Buffers freed by the backward body or the one for gradients of weights, and those freed by norm and update.
    backward_frees: Vec<BufferId>,
    once_frees: Vec<BufferId>,
}

/// The program of a lane without bodies and buffers: its schedule, for stages lowered here or on an equal lane.
pub fn program(cut: &Cut<'_>, lane: usize, stages: &[Lowered], boundaries: &[Boundary], links: &Links) -> Program {
    let plan = cut.plan;
    let first = &plan.lanes()[lane];
    let mut of_stage: BTreeMap<usize, Calls> = BTreeMap::new();
    let mut body = 0;
    for ((stage, lowered), boundary) in plan.stages_of(lane).zip(stages).zip(boundaries) {
        of_stage.insert(stage, Calls::new(stage as u32, body, lowered, boundary, links));
        body += 4 + lowered.weights.iter().chain(&lowered.norm).chain(&lowered.totals).count() as u32;
    }

    let mut schedule = Vec::new();
    for body in of_stage.values().filter_map(|calls| calls.totals) {
        schedule.extend((0..plan.num_microbatches).map(|m| Call::Run { body, microbatch: Some(m) }));
    }
    // The order is the cost model's, so that the simulated order is the one that runs.
    let order = &cut.order;
    let late_calls = order.late(lane);
    let num_prompt = order.calls(lane).count() - late_calls.len();
    // For each call of the pipeline, its end in the schedule.
    let mut ends: Vec<usize> = Vec::new();
    let mut late = Late::new(plan.staleness() > 0);
    for (number, (stage, call)) in order.calls(lane).enumerate() {
        if let Some(&after) = number.checked_sub(num_prompt).and_then(|of_late| late_calls.get(of_late)) {
            late.from(schedule.len(), ends[after as usize - 1]);
        }
        let Some(calls) = of_stage.get(&stage) else { continue };
        let (body, receives, sends, kept, m) = match call {
            PipelineCall::Forward { microbatch } => {
                let kept = calls.backward_frees.as_slice();
                (calls.forward, &calls.receives_forward, &calls.sends_forward, kept, microbatch)
            }
            PipelineCall::Backward { microbatch } => {
                (calls.backward, &calls.receives_backward, &calls.sends_backward, [].as_slice(), microbatch)
            }
            PipelineCall::Weights { microbatch } => {
                let microbatch = Some(microbatch);
                schedule.extend(calls.weights.map(|body| Call::Run { body, microbatch }));
                ends.push(schedule.len());
                continue;
            }
            // The calls after the last backward pass are added below.
            PipelineCall::Update { .. } => continue,
        };
        let microbatch = Some(m);
        schedule.extend(receives.iter().map(|&transfer| Call::Receive { transfer, microbatch }));
        schedule.push(Call::Run { body, microbatch });
        schedule.extend(send(sends, kept, microbatch));
        ends.push(schedule.len());
    }
    let end = late.first.unwrap_or(schedule.len());
    // Gradients that are reduced during the next step are used at its end. Others change the weights at once, so that
    // no second sum of gradients is held, unless that means waiting for other stages.
    match plan.update {
        Update::Stale => late.from(schedule.len(), end),
        Update::Synchronous => late.go_on(schedule.len()),
    }
    finish(&mut schedule, &of_stage, plan.schedule.trains(), |at| late.from(at, end));
    Program {
        devices: first.devices.clone(),
        mesh: first.mesh.clone(),
        buffers: Vec::new(),
        bodies: Vec::new(),
        late: late.of(&schedule),
        flush: Vec::new(),
        schedule,
        fused_attention: plan.execution.fused_attention,
    }
}

/// Adds the calls that happen once a step: reductions, exchanges and updates. `waits` gets the position from which on
/// they wait for other stages.
fn finish(schedule: &mut Vec<Call>, of_stage: &BTreeMap<usize, Calls>, trains: bool, waits: impl FnOnce(usize)) {
    // Send everything before waiting for anything, which may come from another stage of this lane.
    for calls in of_stage.values() {
        if let Some(body) = calls.reduce {
            schedule.push(Call::Run { body, microbatch: None });
            schedule.extend(send(&calls.sends_tied, &calls.once_frees, None));
        }
    }
    if of_stage.values().any(|calls| !calls.receives_tied.is_empty() || !calls.receives_shares.is_empty()) {
        waits(schedule.len());
    }
    let tied = of_stage.values().flat_map(|calls| &calls.receives_tied);
    schedule.extend(tied.map(|&transfer| Call::Receive { transfer, microbatch: None }));
    for calls in of_stage.values() {
        if let Some(body) = calls.norm {
            schedule.push(Call::Run { body, microbatch: None });
            schedule.extend(send(&calls.sends_shares, &calls.once_frees, None));
        }
    }
    let shares = of_stage.values().flat_map(|calls| &calls.receives_shares);
    schedule.extend(shares.map(|&transfer| Call::Receive { transfer, microbatch: None }));
    if trains {
        schedule.extend(of_stage.values().map(|calls| Call::Run { body: calls.update, microbatch: None }));
    }
}

/// Calls that run during the next step, and when.
struct Late {
    /// True if there are any.
    any: bool,
    /// Position of the first.
    first: Option<usize>,
    /// Pairs of a position in the schedule and a number of calls of the next step that come before the calls from there
    /// on.
    after: Vec<(usize, usize)>,
}

impl Late {
    fn new(any: bool) -> Late {
        Late { any, first: None, after: Vec::new() }
    }

    /// Calls from `position` on come after `after` calls of the next step.
    fn from(&mut self, position: usize, after: usize) {
        if self.any {
            self.first.get_or_insert(position);
            self.after.push((position, after));
        }
    }

    /// Calls from `position` on follow those before them immediately.
    fn go_on(&mut self, position: usize) {
        self.from(position, self.after.last().map_or(0, |last| last.1));
    }

    fn of(&self, schedule: &[Call]) -> Vec<u32> {
        let after = |position: usize| {
            let found = self.after.partition_point(|&(from, _)| from <= position);
            found.checked_sub(1).map_or(0, |i| self.after[i].1 as u32)
        };
        self.first.map_or(Vec::new(), |first| (first..schedule.len()).map(after).collect())
    }
}

impl Calls {
    /// `body`: index of the stage's first body.
    fn new(here: u32, body: u32, lowered: &Lowered, boundary: &Boundary, links: &Links) -> Calls {
        let outgoing = |links: &BTreeMap<(ValueId, u32, u32), TransferId>, sends: &BTreeMap<ValueId, BufferId>| {
            let mut sent: Vec<(TransferId, BufferId)> = links
                .iter()
                .filter(|((_, s, _), _)| *s == here)
                .filter_map(|((v, _, _), &t)| sends.get(v).map(|&b| (t, b)))
                .collect();
            sent.sort_by_key(|&(t, b)| (b, t));
            sent
        };
        let incoming = |links: &BTreeMap<(ValueId, u32, u32), TransferId>| -> Vec<TransferId> {
            links.iter().filter(|((_, _, t), _)| *t == here).map(|(_, &t)| t).collect()
        };
        let shares = || links.shares.iter();
        let sent = shares().filter(|((_, s, _), _)| *s == here);
        let mut sends_shares: Vec<(TransferId, BufferId)> =
            sent.filter_map(|((sum, _, _), &t)| Some((t, *boundary.sends_shares.get(*sum as usize)?))).collect();
        sends_shares.sort_by_key(|&(t, b)| (b, t));
        let weights = lowered.weights.as_ref().map(|_| body + 4);
        let exchanges = !lowered.reduce.writes.is_empty();
        Calls {
            forward: body,
            backward: body + 1,
            norm: lowered.norm.as_ref().map(|_| weights.map_or(body + 4, |weights| weights + 1)),
            weights,
            reduce: exchanges.then_some(body + 2),
            update: body + 3,
            totals: lowered
                .totals
                .as_ref()
                .map(|_| body + 4 + lowered.weights.iter().chain(&lowered.norm).count() as u32),
            receives_forward: incoming(&links.forward),
            receives_backward: incoming(&links.backward),
            receives_tied: incoming(&links.tied),
            sends_forward: outgoing(&links.forward, &boundary.sends_forward),
            sends_backward: outgoing(&links.backward, &boundary.sends_backward),
            sends_tied: outgoing(&links.tied, &boundary.sends_tied),
            backward_frees: lowered
                .weights
                .iter()
                .chain([&lowered.backward])
                .flat_map(|body| body.frees.iter().copied())
                .collect(),
            sends_shares,
            receives_shares: shares().filter(|((_, _, t), _)| *t == here).map(|(_, &t)| t).collect(),
            once_frees: lowered.norm.iter().chain([&lowered.update]).flat_map(|b| b.frees.iter().copied()).collect(),
        }
    }
}

/// Calls that send buffers. A sent buffer is freed by its last send, unless a later body reads and frees it.
fn send(sent: &[(TransferId, BufferId)], kept: &[BufferId], microbatch: Option<u32>) -> Vec<Call> {
    let mut calls = Vec::new();
    for (i, &(transfer, buffer)) in sent.iter().enumerate() {
        let last = sent.get(i + 1).is_none_or(|&(_, next)| next != buffer);
        calls.push(Call::Send { transfer, microbatch, free: last && !kept.contains(&buffer) });
    }
    calls
}
