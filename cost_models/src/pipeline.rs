//! The time of one step of a synchronous pipeline, by playing its schedule: each stage is one serial stream of forward
//! and backward calls, each link one serial stream of transfers. Stages are priced once and their calls only added up,
//! so that 64 stages and 512 microbatches cost 65,536 additions, and the planner can ask for every candidate.

use altiplano_ir::plan::Schedule;
use serde::{Deserialize, Serialize};

/// What one stage takes, in seconds; forward and backward are of one microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Default, Serialize, Deserialize)]
pub struct StageTimes {
    pub forward_s: f64,
    pub backward_s: f64,
    /// From the end of a forward until the next stage holds its result.
    pub transfer_forward_s: f64,
    /// From the end of a backward until the previous stage holds its result.
    pub transfer_backward_s: f64,
    /// Once per step, after the stage's last backward: gradient reduction and update.
    pub step_s: f64,
}

/// Where the time of one stage goes; `busy_s + bubble_s` is the step.
#[derive(Clone, Copy, Debug, PartialEq, Default, Serialize, Deserialize)]
pub struct StageTimeline {
    pub busy_s: f64,
    /// Waiting: for the first microbatch, for transfers, for slower stages, for the end of the step.
    pub bubble_s: f64,
}

/// One step.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize)]
pub struct Timeline {
    pub step_s: f64,
    pub stages: Vec<StageTimeline>,
}

/// One call on a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PipelineCall {
    Forward { microbatch: u32 },
    Backward { microbatch: u32 },
}

/// The call at `position` of a stage's order, `None` past its `2 * num_microbatches` calls (`forward`: `num_microbatches`).
///
/// `forward`: all forwards, and no backwards.
/// `gpipe`: all forwards, then all backwards (Huang et al. 2019). `1f1b`: as many forwards as there are stages behind,
/// then a forward and a backward in turn, then the backwards that are left (Narayanan et al. 2021, section 2.2.1).
///
/// Example: stage 0 of 2 with 3 microbatches under `1f1b`: F0 F1 B0 F2 B1 B2.
pub fn call_at(
    schedule: Schedule,
    stage: usize,
    num_stages: usize,
    num_microbatches: u32,
    position: u64,
) -> Option<PipelineCall> {
    let forward = |m: u64| Some(PipelineCall::Forward { microbatch: m as u32 });
    let backward = |m: u64| Some(PipelineCall::Backward { microbatch: m as u32 });
    let microbatches = u64::from(num_microbatches);
    if schedule == Schedule::Forward {
        return if position < microbatches { forward(position) } else { None };
    }
    if position >= 2 * microbatches {
        return None;
    }
    let warm_up = match schedule {
        Schedule::GPipe | Schedule::Forward => microbatches,
        Schedule::OneFOneB => microbatches.min(num_stages.saturating_sub(stage + 1) as u64),
    };
    if position < warm_up {
        return forward(position);
    }
    let turn = position - warm_up;
    let turns = 2 * (microbatches - warm_up);
    if turn >= turns {
        return backward(turn - turns + microbatches - warm_up);
    }
    if turn.is_multiple_of(2) { forward(warm_up + turn / 2) } else { backward(turn / 2) }
}

/// Plays one step of `num_microbatches` under `schedule`.
///
/// A call starts when the stage is free and its operand has arrived; sending does not hold the sender up, but a link
/// carries one transfer at a time in each direction. Times must be finite and not negative.
///
/// Example: S equal stages without transfers take `(S - 1 + B) * (forward_s + backward_s) + step_s` under either schedule.
pub fn simulate(stages: &[StageTimes], num_microbatches: u32, schedule: Schedule) -> Timeline {
    let num_stages = stages.len();
    let width = num_microbatches as usize;
    // When a stage's operands arrive, by stage and microbatch; NaN until they are sent.
    let mut forward_ready_s = vec![f64::NAN; num_stages * width];
    let mut backward_ready_s = vec![f64::NAN; num_stages * width];
    forward_ready_s[..width.min(num_stages * width)].fill(0.0);
    let mut streams: Vec<Stream> = vec![Stream::default(); num_stages];

    // A stage runs until it lacks an operand; whoever sends it that operand puts it back on the list.
    let mut runnable: Vec<usize> = (0..num_stages).rev().collect();
    while let Some(s) = runnable.pop() {
        let times = &stages[s];
        while let Some(call) = call_at(schedule, s, num_stages, num_microbatches, streams[s].position) {
            let stream = &mut streams[s];
            match call {
                PipelineCall::Forward { microbatch } => {
                    let at = s * width + microbatch as usize;
                    if forward_ready_s[at].is_nan() {
                        break;
                    }
                    let end_s = stream.run(forward_ready_s[at], times.forward_s);
                    if s + 1 < num_stages {
                        stream.sent_forward_s = stream.sent_forward_s.max(end_s) + times.transfer_forward_s;
                        forward_ready_s[at + width] = stream.sent_forward_s;
                        runnable.push(s + 1);
                    } else {
                        backward_ready_s[at] = end_s;
                    }
                }
                PipelineCall::Backward { microbatch } => {
                    let at = s * width + microbatch as usize;
                    if backward_ready_s[at].is_nan() {
                        break;
                    }
                    let end_s = stream.run(backward_ready_s[at], times.backward_s);
                    if s > 0 {
                        stream.sent_backward_s = stream.sent_backward_s.max(end_s) + times.transfer_backward_s;
                        backward_ready_s[at - width] = stream.sent_backward_s;
                        runnable.push(s - 1);
                    }
                }
            }
        }
    }

    let step_s = streams.iter().zip(stages).map(|(stream, times)| stream.free_s + times.step_s).fold(0.0, f64::max);
    let timeline = |(stream, times): (&Stream, &StageTimes)| {
        let busy_s = stream.busy_s + times.step_s;
        StageTimeline { busy_s, bubble_s: (step_s - busy_s).max(0.0) }
    };
    Timeline { step_s, stages: streams.iter().zip(stages).map(timeline).collect() }
}

/// A stage as it plays its calls.
#[derive(Clone, Default)]
struct Stream {
    /// Calls made.
    position: u64,
    free_s: f64,
    busy_s: f64,
    /// When the last transfer to either neighbour has arrived.
    sent_forward_s: f64,
    sent_backward_s: f64,
}

impl Stream {
    /// Makes the next call, not before `ready_s`; returns when it ends.
    fn run(&mut self, ready_s: f64, seconds: f64) -> f64 {
        self.position += 1;
        self.busy_s += seconds;
        self.free_s = self.free_s.max(ready_s) + seconds;
        self.free_s
    }
}

#[cfg(test)]
#[path = "pipeline_tests.rs"]
mod tests;
