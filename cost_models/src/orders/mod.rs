//! The search for the order of calls of a pipeline: which lane runs which stage's forward, backward and weights call
//! next, so that a step is as short as possible and activations fit. It is pure: times and bytes in, calls out.
//!
//! Microbatches are alike, so every stage runs its forwards, its backwards and its gradients of weights in the order of
//! microbatches. An order is then one sequence of (stage, pass) per lane. [`search`] takes the best of given orders, of
//! those that `list` builds under several rules and `improve` changes, and of `exact`, which proves small cases.
//! [`Problem::bound_s`] holds for every order.

mod bound;
mod exact;
mod improve;
mod list;
mod state;

pub use altiplano_ir::order::{Call, Pass};
use state::State;

/// The calls of each lane, first to last.
pub type Calls = Vec<Vec<Call>>;

/// The work of a stage on one microbatch in seconds, and what it holds in bytes of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    pub forward_s: f64,
    pub backward_s: f64,
    /// Absent if a backward call computes the gradients of weights as well.
    pub weights_s: Option<f64>,
    /// From the end of a forward call until the next stage has its result.
    pub transfer_forward_s: f64,
    /// From the end of a backward call until the previous stage has its result.
    pub transfer_backward_s: f64,
    /// Once per step, after all calls.
    pub step_s: f64,
    /// Held from the start of a forward call to the end of the backward call.
    pub held_bytes: u64,
    /// Held from the end of a backward call to the end of the weights call.
    pub weights_bytes: u64,
}

/// A pipeline whose order of calls is sought.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    stages: Vec<Work>,
    lanes: Vec<Vec<usize>>,
    lane_of: Vec<usize>,
    microbatches: usize,
    room_bytes: Vec<u64>,
    meets: bool,
}

/// Why there is no such problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProblemError {
    #[error("times must be finite and not negative")]
    Time,
    #[error("every stage must be on one lane, and every lane needs its stages in rising order and its bytes")]
    Lanes,
    #[error("a step has at least one microbatch and at most {MOST_CALLS} calls")]
    Calls,
}

/// Most calls of one pass in a step.
pub const MOST_CALLS: usize = 1 << 20;

/// An order, and how good it is.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    pub calls: Calls,
    pub step_s: f64,
    /// No order is faster.
    pub bound_s: f64,
    /// True if the order is known to be a fastest one.
    pub proven: bool,
}

impl Problem {
    /// `lanes[l]` are the stages of lane `l`, and `room_bytes[l]` the bytes that their activations may take. With
    /// `meets`, all lanes wait for the last call of any before the work that ends the step.
    ///
    /// # Errors
    ///
    /// If times are not finite, lanes do not hold each stage once, or there are no or too many calls.
    pub fn new(
        mut stages: Vec<Work>,
        lanes: Vec<Vec<usize>>,
        microbatches: usize,
        room_bytes: Vec<u64>,
        meets: bool,
    ) -> Result<Problem, ProblemError> {
        for work in &mut stages {
            let times = [work.forward_s, work.backward_s, work.weights_s.unwrap_or(0.0), work.step_s];
            let sent = [work.transfer_forward_s, work.transfer_backward_s];
            if !times.iter().chain(&sent).all(|s| s.is_finite() && *s >= 0.0) {
                return Err(ProblemError::Time);
            }
            // A backward call then never needs more room. This counts too much where gradients of weights need more.
            work.held_bytes = work.held_bytes.max(work.weights_bytes);
            work.weights_bytes = if work.weights_s.is_some() { work.weights_bytes } else { 0 };
        }
        let mut lane_of = vec![usize::MAX; stages.len()];
        for (l, lane) in lanes.iter().enumerate() {
            for &s in lane {
                match lane_of.get_mut(s) {
                    Some(of) if *of == usize::MAX => *of = l,
                    _ => return Err(ProblemError::Lanes),
                }
            }
        }
        let rises = lanes.iter().all(|lane| !lane.is_empty() && lane.windows(2).all(|w| w[0] < w[1]));
        if !rises || lane_of.contains(&usize::MAX) || room_bytes.len() != lanes.len() {
            return Err(ProblemError::Lanes);
        }
        let calls = stages.len().saturating_mul(microbatches);
        if calls == 0 || calls > MOST_CALLS {
            return Err(ProblemError::Calls);
        }
        Ok(Problem { stages, lanes, lane_of, microbatches, room_bytes, meets })
    }

    pub fn num_lanes(&self) -> usize {
        self.lanes.len()
    }

    fn seconds(&self, call: Call) -> f64 {
        let work = &self.stages[call.stage as usize];
        match call.pass {
            Pass::Forward => work.forward_s,
            Pass::Backward => work.backward_s,
            Pass::Weights => work.weights_s.unwrap_or(0.0),
        }
    }

    /// Work of a lane that ends the step.
    fn finish_s(&self, lane: usize) -> f64 {
        let of_lane = |lane: usize| self.lanes[lane].iter().map(|&s| self.stages[s].step_s).sum::<f64>();
        match self.meets {
            // All begin at once, so the longest decides.
            true => (0..self.lanes.len()).map(of_lane).fold(0.0, f64::max),
            false => of_lane(lane),
        }
    }

    /// Calls of one step.
    fn num_calls(&self) -> usize {
        let apart = self.stages.iter().filter(|work| work.weights_s.is_some()).count();
        self.microbatches * (2 * self.stages.len() + apart)
    }

    /// The time of a step in an order. Sending does not block, and a link carries one transfer at a time each way.
    /// `None` if the order lacks a call, has one too many, stops in a deadlock, or needs more room than there is.
    pub fn step_s(&self, calls: &Calls) -> Option<f64> {
        self.played(calls).map(|(step_s, _)| step_s)
    }

    /// [`Problem::step_s`], with the start of every call.
    fn played(&self, calls: &Calls) -> Option<(f64, Vec<Vec<f64>>)> {
        if calls.len() != self.lanes.len() {
            return None;
        }
        let mut state = State::new(self);
        let mut starts: Vec<Vec<f64>> = calls.iter().map(|lane| Vec::with_capacity(lane.len())).collect();
        let mut runnable: Vec<usize> = (0..calls.len()).rev().collect();
        while let Some(l) = runnable.pop() {
            while let Some(&call) = calls[l].get(starts[l].len()) {
                if self.lane_of.get(call.stage as usize) != Some(&l) {
                    return None;
                }
                let Some(ready_s) = state.ready_s(self, call) else { break };
                if !state.fits(self, call) {
                    return None;
                }
                let (start_s, woken) = state.run(self, call, ready_s);
                starts[l].push(start_s);
                runnable.extend(woken);
            }
        }
        let complete = starts.iter().zip(calls).all(|(made, all)| made.len() == all.len());
        let made: usize = starts.iter().map(Vec::len).sum();
        (complete && made == self.num_calls()).then(|| (state.step_s(self), starts))
    }

    /// The most bytes that an order's activations take on each lane. Calls past what there is of them are ignored.
    pub fn peak_bytes(&self, calls: &Calls) -> Vec<u64> {
        let of_lane = |lane: &Vec<Call>| {
            let (mut held, mut most) = (0u64, 0u64);
            for call in lane {
                let Some(work) = self.stages.get(call.stage as usize) else { continue };
                held = match call.pass {
                    Pass::Forward => held.saturating_add(work.held_bytes),
                    Pass::Backward => held.saturating_sub(work.held_bytes - work.weights_bytes),
                    Pass::Weights => held.saturating_sub(work.weights_bytes),
                };
                most = most.max(held);
            }
            most
        };
        calls.iter().map(of_lane).collect()
    }

    /// The same pipeline with other room on its lanes.
    ///
    /// # Errors
    ///
    /// If there are not as many numbers as lanes.
    pub fn within(mut self, room_bytes: Vec<u64>) -> Result<Problem, ProblemError> {
        if room_bytes.len() != self.lanes.len() {
            return Err(ProblemError::Lanes);
        }
        self.room_bytes = room_bytes;
        Ok(self)
    }

    /// A lower bound for the step of every order that fits.
    pub fn bound_s(&self) -> f64 {
        bound::bound_s(self)
    }
}

/// The amount of searching, in calls that are simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Effort {
    pub list_calls: usize,
    pub improve_calls: usize,
    pub exact_calls: usize,
}

impl Default for Effort {
    fn default() -> Effort {
        Effort { list_calls: 6_000_000, improve_calls: 3_000_000, exact_calls: 20_000_000 }
    }
}

/// The fastest order found, never slower than the best of `known` that fits. `None` if no order is found that fits, as
/// where a lane has no room for one microbatch.
pub fn search(problem: &Problem, known: &[Calls], effort: Effort) -> Option<Found> {
    let bound_s = problem.bound_s();
    let mut best: Option<(f64, Calls)> = None;
    let mut offer = |calls: Calls| {
        if let Some(step_s) = problem.step_s(&calls)
            && best.as_ref().is_none_or(|b| step_s < b.0)
        {
            best = Some((step_s, calls));
        }
    };
    known.iter().cloned().for_each(&mut offer);
    list::orders(problem, bound_s, effort.list_calls).into_iter().for_each(&mut offer);
    let (mut step_s, mut calls) = best?;
    let is_least = |step_s: f64, bound_s: f64| step_s <= bound_s * (1.0 + 1e-9);
    if !is_least(step_s, bound_s) {
        (step_s, calls) = improve::improved(problem, calls, step_s, bound_s, effort.improve_calls);
    }
    if is_least(step_s, bound_s) {
        return Some(Found { calls, step_s, bound_s: bound_s.min(step_s), proven: true });
    }
    let proof = exact::searched(problem, step_s, bound_s, effort.exact_calls / problem.num_calls());
    if let Some((better_s, better)) = proof.better {
        (step_s, calls) = (better_s, better);
    }
    let bound_s = if proof.complete { step_s } else { bound_s };
    Some(Found { calls, step_s, bound_s, proven: proof.complete })
}

#[cfg(test)]
mod tests;
