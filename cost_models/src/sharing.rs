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

/// A step as it goes on.
struct Simulation<'a> {
    stages: &'a [SharedStage],
    order: &'a Order,
    /// Microbatches of all stages' turns: entries of a stage in the tables of arrivals.
    width: usize,
    lanes: Vec<Lane>,
    now_s: f64,
    /// Times at which the operands of each stage's calls arrive; infinite until they are sent.
    forward_at: Vec<f64>,
    backward_at: Vec<f64>,
    /// Times at which each stage's links to the next and to the previous stage are free again.
    forward_sent_s: Vec<f64>,
    backward_sent_s: Vec<f64>,
}

/// Simulates one step. As in [`crate::pipeline::simulate_order`], a call starts when its lane is free and its operand
/// has arrived. A stage makes one transfer after the other; transfers take no core, and always the same time. If times
/// do not depend on the number of busy devices, both functions give the same result.
pub fn simulate_shared(
    stages: &[SharedStage],
    order: &Order,
    watch: &mut dyn FnMut(usize, PipelineCall, f64, f64),
) -> Timeline {
    let mut simulation = Simulation::new(stages, order);
    loop {
        let arrives_s = simulation.start();
        if !simulation.go_on(arrives_s, watch) {
            break;
        }
    }
    let now_s = simulation.now_s;
    let timeline = |lane: &Lane| StageTimeline { busy_s: lane.busy_s, bubble_s: (now_s - lane.busy_s).max(0.0) };
    Timeline { step_s: now_s, stages: simulation.lanes.iter().map(timeline).collect() }
}

impl<'a> Simulation<'a> {
    fn new(stages: &'a [SharedStage], order: &'a Order) -> Simulation<'a> {
        let (num_stages, width) = (stages.len(), order.all_microbatches());
        let mut forward_at = vec![f64::INFINITY; num_stages * width];
        forward_at[..width.min(num_stages * width)].fill(0.0);
        let lane = |_| Lane { position: 0, doing: None, left: 0.0, started_s: 0.0, busy_s: 0.0, finished: Vec::new() };
        Simulation {
            stages,
            order,
            width,
            lanes: (0..order.num_lanes()).map(lane).collect(),
            now_s: 0.0,
            forward_at,
            backward_at: vec![f64::INFINITY; num_stages * width],
            forward_sent_s: vec![0.0; num_stages],
            backward_sent_s: vec![0.0; num_stages],
        }
    }

    /// Gives work to the lanes that have none and whose operand is there. Returns the first arrival of an operand that
    /// a lane waits for.
    fn start(&mut self) -> f64 {
        let (width, now_s) = (self.width, self.now_s);
        let mut arrives_s = f64::INFINITY;
        for (l, lane) in self.lanes.iter_mut().enumerate().filter(|(_, lane)| lane.doing.is_none()) {
            lane.doing = match self.order.call(l, lane.position) {
                Some((s, call)) => {
                    let at_s = match call {
                        PipelineCall::Forward { microbatch } => self.forward_at[s * width + microbatch as usize],
                        PipelineCall::Backward { microbatch } => self.backward_at[s * width + microbatch as usize],
                        PipelineCall::Weights { .. } | PipelineCall::Update { .. } => now_s,
                    };
                    if at_s > now_s {
                        arrives_s = arrives_s.min(at_s);
                    }
                    (at_s <= now_s).then_some(Doing::Call(s, call))
                }
                None => self.order.stages_of(l).find(|s| !lane.finished.contains(s)).map(Doing::Finish),
            };
            (lane.left, lane.started_s) = (1.0, now_s);
        }
        arrives_s
    }

    /// Goes on to the first end of some work, in the first lane among equals, or to the arrival of an operand if that
    /// is earlier. False if nobody works and nothing is in transit: the step is complete.
    fn go_on(&mut self, arrives_s: f64, watch: &mut dyn FnMut(usize, PipelineCall, f64, f64)) -> bool {
        let at_work = |lane: &Lane| match lane.doing {
            Some(Doing::Call(s, _) | Doing::Finish(s)) => self.stages[s].devices,
            None => 0,
        };
        let busy: u32 = self.lanes.iter().map(at_work).sum();
        let rest_s = |lane: &Lane| match lane.doing {
            Some(doing @ (Doing::Call(s, _) | Doing::Finish(s))) => lane.left * self.stages[s].seconds(doing, busy),
            None => f64::INFINITY,
        };
        let rests: Vec<f64> = self.lanes.iter().map(rest_s).collect();
        let first = (0..rests.len()).filter(|&l| rests[l].is_finite()).min_by(|&a, &b| rests[a].total_cmp(&rests[b]));
        let first = first.filter(|&l| self.now_s + rests[l] <= arrives_s);
        let step_s = match first {
            Some(l) => rests[l],
            None if arrives_s.is_finite() => arrives_s - self.now_s,
            None => return false,
        };
        self.now_s = if first.is_some() { self.now_s + step_s } else { arrives_s };
        for (l, lane) in self.lanes.iter_mut().enumerate().filter(|(l, _)| rests[*l].is_finite()) {
            lane.busy_s += step_s;
            let is_done = first == Some(l) || rests[l] <= 0.0;
            lane.left = if is_done { 0.0 } else { lane.left * (1.0 - step_s / rests[l]) };
        }
        if let Some(first) = first {
            self.end(first, watch);
        }
        true
    }

    /// Ends the work of a lane, and sends its result.
    fn end(&mut self, lane: usize, watch: &mut dyn FnMut(usize, PipelineCall, f64, f64)) {
        let (stages, width, now_s) = (self.stages, self.width, self.now_s);
        let lane = &mut self.lanes[lane];
        let (s, call) = match lane.doing.take() {
            Some(Doing::Call(s, call)) => (s, call),
            Some(Doing::Finish(s)) => return lane.finished.push(s),
            None => return,
        };
        lane.position += 1;
        watch(s, call, lane.started_s, now_s);
        let last = stages[s].times.last();
        let (forward_s, backward_s) = last.map_or((0.0, 0.0), |(_, t)| (t.transfer_forward_s, t.transfer_backward_s));
        match call {
            PipelineCall::Forward { microbatch } if s + 1 < stages.len() => {
                self.forward_sent_s[s] = self.forward_sent_s[s].max(now_s) + forward_s;
                self.forward_at[(s + 1) * width + microbatch as usize] = self.forward_sent_s[s];
            }
            PipelineCall::Forward { microbatch } => self.backward_at[s * width + microbatch as usize] = now_s,
            PipelineCall::Backward { microbatch } if s > 0 => {
                self.backward_sent_s[s] = self.backward_sent_s[s].max(now_s) + backward_s;
                self.backward_at[(s - 1) * width + microbatch as usize] = self.backward_sent_s[s];
            }
            PipelineCall::Backward { .. } | PipelineCall::Weights { .. } | PipelineCall::Update { .. } => {}
        }
    }
}

#[cfg(test)]
#[path = "sharing_tests.rs"]
mod tests;
