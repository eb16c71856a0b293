//! A step under way: what each stage has done, when operands arrive, and what lanes hold.

use super::{Call, Pass, Problem};

#[derive(Clone)]
pub(super) struct State {
    /// Calls made, by pass and stage.
    pub done: [Vec<u32>; 3],
    pub free_s: Vec<f64>,
    /// Arrival of the operands of forwards and backwards, by stage and microbatch; NaN until they are sent.
    pub arrives_s: [Vec<f64>; 2],
    /// When a stage's last transfer to the next and to the previous stage has arrived.
    pub sent_s: [Vec<f64>; 2],
    pub used_bytes: Vec<u64>,
}

impl State {
    pub fn new(problem: &Problem) -> State {
        let (stages, width) = (problem.stages.len(), problem.microbatches);
        let mut forward_s = vec![f64::NAN; stages * width];
        forward_s[..width].fill(0.0);
        State {
            done: std::array::from_fn(|_| vec![0; stages]),
            free_s: vec![0.0; problem.lanes.len()],
            arrives_s: [forward_s, vec![f64::NAN; stages * width]],
            sent_s: std::array::from_fn(|_| vec![0.0; stages]),
            used_bytes: vec![0; problem.lanes.len()],
        }
    }

    /// When the operand of a stage's next call of a pass is there. `None` if nobody has sent it, or no call is left.
    pub fn ready_s(&self, problem: &Problem, call: Call) -> Option<f64> {
        let s = call.stage as usize;
        let [forwards, backwards, weights] = [&self.done[0], &self.done[1], &self.done[2]].map(|done| done[s]);
        let at = |pass: usize, m: u32| {
            let arrives_s = *self.arrives_s[pass].get(s * problem.microbatches + m as usize)?;
            (!arrives_s.is_nan()).then_some(arrives_s)
        };
        match call.pass {
            Pass::Forward if forwards as usize >= problem.microbatches => None,
            Pass::Forward => at(0, forwards),
            Pass::Backward if backwards >= forwards => None,
            Pass::Backward => at(1, backwards),
            Pass::Weights => (problem.stages[s].weights_s.is_some() && weights < backwards).then_some(0.0),
        }
    }

    /// True if the lane has room for the call.
    pub fn fits(&self, problem: &Problem, call: Call) -> bool {
        let (lane, work) = (problem.lane_of[call.stage as usize], &problem.stages[call.stage as usize]);
        call.pass != Pass::Forward || self.used_bytes[lane].saturating_add(work.held_bytes) <= problem.room_bytes[lane]
    }

    /// Makes a call whose operand is there at `ready_s`. Returns its start, and the lane that waits for its result.
    pub fn run(&mut self, problem: &Problem, call: Call, ready_s: f64) -> (f64, Option<usize>) {
        let (s, width) = (call.stage as usize, problem.microbatches);
        let (lane, work) = (problem.lane_of[s], &problem.stages[s]);
        let start_s = self.free_s[lane].max(ready_s);
        let end_s = start_s + problem.seconds(call);
        self.free_s[lane] = end_s;
        let m = self.done[call.pass as usize][s] as usize;
        self.done[call.pass as usize][s] += 1;
        let used = &mut self.used_bytes[lane];
        let mut woken = None;
        match call.pass {
            Pass::Forward => {
                *used = used.saturating_add(work.held_bytes);
                if s + 1 < problem.stages.len() {
                    self.sent_s[0][s] = self.sent_s[0][s].max(end_s) + work.transfer_forward_s;
                    self.arrives_s[0][(s + 1) * width + m] = self.sent_s[0][s];
                    woken = Some(problem.lane_of[s + 1]);
                } else {
                    self.arrives_s[1][s * width + m] = end_s;
                }
            }
            Pass::Backward => {
                *used = used.saturating_sub(work.held_bytes - work.weights_bytes);
                if s > 0 {
                    self.sent_s[1][s] = self.sent_s[1][s].max(end_s) + work.transfer_backward_s;
                    self.arrives_s[1][(s - 1) * width + m] = self.sent_s[1][s];
                    woken = Some(problem.lane_of[s - 1]);
                }
            }
            Pass::Weights => *used = used.saturating_sub(work.weights_bytes),
        }
        (start_s, woken)
    }

    /// The step's end, if all calls are made.
    pub fn step_s(&self, problem: &Problem) -> f64 {
        let last_s = self.free_s.iter().copied().fold(0.0, f64::max);
        let end_s = |(lane, &free_s): (usize, &f64)| {
            let end_s = if problem.meets { last_s } else { free_s };
            end_s + problem.finish_s(lane)
        };
        self.free_s.iter().enumerate().map(end_s).fold(0.0, f64::max)
    }

    /// Calls that a lane can make next, with the arrival of their operands.
    pub fn possible(&self, problem: &Problem, lane: usize) -> Vec<(f64, Call)> {
        let passes =
            |&s: &usize| [Pass::Forward, Pass::Backward, Pass::Weights].map(|pass| Call { stage: s as u32, pass });
        let calls = problem.lanes[lane].iter().flat_map(passes);
        let ready = |call| Some((self.ready_s(problem, call)?, call));
        calls.filter(|&call| self.fits(problem, call)).filter_map(ready).collect()
    }
}
