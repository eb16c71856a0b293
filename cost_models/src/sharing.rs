//! The time of a pipeline step on one machine whose cores all stages share. The time of a call depends on how many
//! devices compute at the same time. Calls are simulated as fluids: whenever one starts or ends, the speed of all
//! others changes.

use crate::pipeline::{Order, PipelineCall, StageTimeline, StageTimes, Timeline};

/// A stage on a shared machine.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedStage {
    pub devices: u32,
    /// The stage's times by the number of devices of all stages that compute at once, in rising order.
    pub times: Vec<(u32, StageTimes)>,
}

/// The current work of a lane.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Doing {
    Call(usize, PipelineCall),
    /// The work of a stage after its last backward call.
    Finish(usize),
}

struct Lane {
    position: u64,
    doing: Option<Doing>,
    /// Remaining share of the current work.
    left: f64,
    started_s: f64,
    busy_s: f64,
    finished: Vec<usize>,
}

impl SharedStage {
    /// Seconds of some work with `busy` devices computing: linear between the known numbers, proportional beyond.
    fn seconds(&self, doing: Doing, busy: u32) -> f64 {
        let of = |times: &StageTimes| match doing {
            Doing::Call(_, PipelineCall::Forward { .. }) => times.forward_s,
            Doing::Call(_, PipelineCall::Backward { .. }) => times.backward_s,
            Doing::Call(_, PipelineCall::Weights { .. }) => times.weights_s,
            Doing::Call(_, PipelineCall::Update { .. }) | Doing::Finish(_) => times.step_s,
        };
        let known = &self.times;
        let Some(upper) = known.iter().position(|k| k.0 >= busy) else {
            return known.last().map_or(0.0, |(n, times)| of(times) * f64::from(busy) / f64::from(*n));
        };
        let (n, time) = (known[upper].0, of(&known[upper].1));
        if n == busy || upper == 0 {
            return time;
        }
        let (m, below) = (known[upper - 1].0, of(&known[upper - 1].1));
        below + (time - below) * f64::from(busy - m) / f64::from(n - m)
    }
}

/// Simulates one step. As in [`crate::pipeline::simulate_order`], a call starts when its lane is free and its operand
/// has arrived. A stage makes one transfer after the other; transfers take no core, and always the same time. If times
/// do not depend on the number of busy devices, both functions give the same result.
pub fn simulate_shared(
    stages: &[SharedStage],
    order: &Order,
    watch: &mut dyn FnMut(usize, PipelineCall, f64, f64),
) -> Timeline {
    let (num_stages, num_lanes, width) = (stages.len(), order.num_lanes(), order.all_microbatches());
    // Times at which the operands of each stage's calls arrive; infinite until they are sent.
    let mut forward_at = vec![f64::INFINITY; num_stages * width];
    let mut backward_at = vec![f64::INFINITY; num_stages * width];
    forward_at[..width.min(num_stages * width)].fill(0.0);
    // Times at which each stage's links to the next and to the previous stage are free again.
    let mut forward_sent_s = vec![0.0f64; num_stages];
    let mut backward_sent_s = vec![0.0f64; num_stages];
    let transfer_s =
        |s: usize| stages[s].times.last().map_or((0.0, 0.0), |(_, t)| (t.transfer_forward_s, t.transfer_backward_s));
    let lane = |_| Lane { position: 0, doing: None, left: 0.0, started_s: 0.0, busy_s: 0.0, finished: Vec::new() };
    let mut lanes: Vec<Lane> = (0..num_lanes).map(lane).collect();
    let mut now_s = 0.0f64;
    loop {
        // The first arrival of an operand that a lane waits for.
        let mut arrives_s = f64::INFINITY;
        for (l, lane) in lanes.iter_mut().enumerate().filter(|(_, lane)| lane.doing.is_none()) {
            let next = match order.call(l, lane.position) {
                Some((s, call)) => {
                    let at_s = match call {
                        PipelineCall::Forward { microbatch } => forward_at[s * width + microbatch as usize],
                        PipelineCall::Backward { microbatch } => backward_at[s * width + microbatch as usize],
                        PipelineCall::Weights { .. } | PipelineCall::Update { .. } => now_s,
                    };
                    if at_s > now_s {
                        arrives_s = arrives_s.min(at_s);
                    }
                    (at_s <= now_s).then_some(Doing::Call(s, call))
                }
                None => (l..num_stages).step_by(num_lanes).find(|s| !lane.finished.contains(s)).map(Doing::Finish),
            };
            lane.doing = next;
            (lane.left, lane.started_s) = (1.0, now_s);
        }
        let at_work = |lane: &Lane| match lane.doing {
            Some(Doing::Call(s, _) | Doing::Finish(s)) => stages[s].devices,
            None => 0,
        };
        let busy: u32 = lanes.iter().map(at_work).sum();
        let rest_s = |lane: &Lane| match lane.doing {
            Some(doing @ (Doing::Call(s, _) | Doing::Finish(s))) => lane.left * stages[s].seconds(doing, busy),
            None => f64::INFINITY,
        };
        // The first work to end, in the first lane among equals, unless an operand arrives before. If nobody works and
        // nothing is in transit, the step is complete.
        let rests: Vec<f64> = lanes.iter().map(rest_s).collect();
        let first = (0..num_lanes).filter(|&l| rests[l].is_finite()).min_by(|&a, &b| rests[a].total_cmp(&rests[b]));
        let first = first.filter(|&l| now_s + rests[l] <= arrives_s);
        let step_s = match first {
            Some(l) => rests[l],
            None if arrives_s.is_finite() => arrives_s - now_s,
            None => break,
        };
        now_s = if first.is_some() { now_s + step_s } else { arrives_s };
        for (l, lane) in lanes.iter_mut().enumerate().filter(|(l, _)| rests[*l].is_finite()) {
            lane.busy_s += step_s;
            let is_done = first == Some(l) || rests[l] <= 0.0;
            lane.left = if is_done { 0.0 } else { lane.left * (1.0 - step_s / rests[l]) };
        }
        let Some(first) = first else { continue };
        let lane = &mut lanes[first];
        match lane.doing.take() {
            Some(Doing::Call(s, call)) => {
                lane.position += 1;
                watch(s, call, lane.started_s, now_s);
                match call {
                    PipelineCall::Forward { microbatch } if s + 1 < num_stages => {
                        forward_sent_s[s] = forward_sent_s[s].max(now_s) + transfer_s(s).0;
                        forward_at[(s + 1) * width + microbatch as usize] = forward_sent_s[s];
                    }
                    PipelineCall::Forward { microbatch } => backward_at[s * width + microbatch as usize] = now_s,
                    PipelineCall::Backward { microbatch } if s > 0 => {
                        backward_sent_s[s] = backward_sent_s[s].max(now_s) + transfer_s(s).1;
                        backward_at[(s - 1) * width + microbatch as usize] = backward_sent_s[s];
                    }
                    PipelineCall::Backward { .. } | PipelineCall::Weights { .. } | PipelineCall::Update { .. } => {}
                }
            }
            Some(Doing::Finish(s)) => lane.finished.push(s),
            None => {}
        }
    }
    let timeline = |lane: &Lane| StageTimeline { busy_s: lane.busy_s, bubble_s: (now_s - lane.busy_s).max(0.0) };
    Timeline { step_s: now_s, stages: lanes.iter().map(timeline).collect() }
}

#[cfg(test)]
#[path = "sharing_tests.rs"]
mod tests;
