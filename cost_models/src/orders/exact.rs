//! A fastest order by branch and bound. Calls are placed one after the other: of the calls that can start, the one that
//! would end first names a lane, and the branches are the calls that this lane can start before that end (the active
//! schedules of Giffler and Thompson 1960). Where an early forward could take the room of another stage's, a branch
//! leaves the lane idle until then. Partial orders with the same calls made are compared: if one has all lanes free and
//! all operands there no later, the other is dropped.

use super::bound::{Forced, Table, lanes_s, starts_s, tails_s};
use super::state::State;
use super::{Call, Calls, Pass, Problem, Work};
use std::collections::HashMap;

/// Partial orders that are kept for comparison, of those with the same calls made.
const MOST_ALIKE: usize = 24;

/// Most times that lanes stay idle on the way to a partial order, which are nested calls here.
const MOST_WAITS: usize = 512;

/// The result of a search.
pub(super) struct Proof {
    /// A faster order than the one that was known, if there is one.
    pub better: Option<(f64, Calls)>,
    /// True if no order is faster than the best known.
    pub complete: bool,
}

/// Searches for orders that are faster than `known_s`, until one is as fast as `bound_s` or `most_nodes` partial orders
/// were seen.
pub(super) fn searched(problem: &Problem, known_s: f64, bound_s: f64, most_nodes: usize) -> Proof {
    let forced = Forced::of(problem);
    let tails = tails_s(problem, &forced);
    let mut search = Search {
        problem,
        forced,
        tails,
        best_s: known_s.min(longest_s(problem)),
        bound_s,
        best: None,
        placed: Vec::new(),
        seen: HashMap::new(),
        left: most_nodes,
        waits: 0,
        skipped: false,
    };
    let complete = most_nodes > 0 && search.visit(State::new(problem), false) && !search.skipped;
    Proof { better: search.best.map(|calls| (search.best_s, calls)), complete }
}

/// More than the step of any order that a device begins as early as it can: all calls and transfers one after the other.
/// Without it, lanes would wait without end where nothing can be completed any more.
fn longest_s(problem: &Problem) -> f64 {
    let each = |work: &Work| {
        let calls_s = work.forward_s + work.backward_s + work.weights_s.unwrap_or(0.0);
        (calls_s + work.transfer_forward_s + work.transfer_backward_s) * problem.microbatches as f64 + work.step_s
    };
    problem.stages.iter().map(each).sum::<f64>() * (1.0 + 1e-6) + f64::MIN_POSITIVE
}

struct Search<'a> {
    problem: &'a Problem,
    forced: Forced,
    tails: Table,
    best_s: f64,
    bound_s: f64,
    best: Option<Calls>,
    placed: Vec<Call>,
    /// Times of partial orders by the calls that they made.
    seen: HashMap<Vec<u32>, Vec<Vec<f64>>>,
    left: usize,
    /// Times that lanes stay idle on the way to the partial order at hand.
    waits: usize,
    /// True if a partial order was left out because of [`MOST_WAITS`].
    skipped: bool,
}

/// A branch: a call, or none where the lane stays idle until a time.
struct Branch {
    state: State,
    call: Option<Call>,
    bound_s: f64,
}

impl Search<'_> {
    /// Completes a partial order in all ways that may be better. `waits` if it only waits longer than the one before.
    /// False if it gave up.
    fn visit(&mut self, state: State, waits: bool) -> bool {
        if self.placed.len() == self.problem.num_calls() {
            let step_s = state.step_s(self.problem);
            if self.is_better(step_s) {
                (self.best_s, self.best) = (step_s, Some(self.written()));
            }
            return true;
        }
        if self.left == 0 {
            return false;
        }
        self.left -= 1;
        // One that waits is of course no better than the one that may do so.
        if !waits && self.is_dominated(&state) {
            return true;
        }
        let mut branches: Vec<Branch> =
            self.branches(&state).into_iter().filter(|branch| self.is_better(branch.bound_s)).collect();
        branches.sort_by(|a, b| a.bound_s.total_cmp(&b.bound_s));
        for Branch { state, call, bound_s } in branches {
            // The best order may have become better since.
            if !self.is_better(bound_s) || self.best_s <= self.bound_s * (1.0 + 1e-9) {
                continue;
            }
            let waits = call.is_none();
            if waits && self.waits == MOST_WAITS {
                self.skipped = true;
                continue;
            }
            self.placed.extend(call);
            self.waits += usize::from(waits);
            let complete = self.visit(state, waits);
            self.waits -= usize::from(waits);
            if !waits {
                self.placed.pop();
            }
            if !complete {
                return false;
            }
        }
        true
    }

    fn is_better(&self, step_s: f64) -> bool {
        step_s < self.best_s * (1.0 - 1e-9)
    }

    fn branches(&self, state: &State) -> Vec<Branch> {
        let problem = self.problem;
        let mut possible: Vec<(usize, f64, f64, Call)> = Vec::new();
        for l in 0..problem.lanes.len() {
            possible.extend(state.possible(problem, l).into_iter().map(|(ready_s, call)| {
                let start_s = state.free_s[l].max(ready_s);
                (l, start_s, ready_s, call)
            }));
        }
        let end_s = |p: &(usize, f64, f64, Call)| p.1 + problem.seconds(p.3);
        // Among equal ends, one that may always be placed early.
        let first = possible
            .iter()
            .min_by(|a, b| end_s(a).total_cmp(&end_s(b)).then(self.may_wait(a.0, a.3).cmp(&self.may_wait(b.0, b.3))));
        let Some(first) = first else { return Vec::new() };
        let (lane, until_s) = (first.0, end_s(first));
        let mut branches: Vec<Branch> = Vec::new();
        for p in possible.iter().filter(|p| p.0 == lane && (p.1 < until_s || p.3 == first.3)) {
            let mut next = state.clone();
            next.run(problem, p.3, p.2);
            branches.push(self.branch(next, Some(p.3)));
        }
        if self.may_wait(lane, first.3) && until_s > state.free_s[lane] {
            let mut next = state.clone();
            next.free_s[lane] = until_s;
            branches.push(self.branch(next, None));
        }
        branches
    }

    fn branch(&self, state: State, call: Option<Call>) -> Branch {
        let starts = starts_s(self.problem, &self.forced, &state);
        let bound_s = lanes_s(self.problem, &state, &starts, &self.tails, self.best_s);
        Branch { state, call, bound_s }
    }

    /// True if placing a call early may make a lane's other stages wait for room.
    fn may_wait(&self, lane: usize, call: Call) -> bool {
        let stages = &self.problem.lanes[lane];
        let held = stages.iter().fold(0u64, |sum, &s| sum.saturating_add(self.problem.stages[s].held_bytes));
        let whole = held.saturating_mul(self.problem.microbatches as u64);
        call.pass == Pass::Forward && stages.len() > 1 && whole > self.problem.room_bytes[lane]
    }

    /// True if an earlier partial order with the same calls is nowhere later. Otherwise keeps this one.
    fn is_dominated(&mut self, state: &State) -> bool {
        let (problem, width) = (self.problem, self.problem.microbatches);
        let key = state.done.concat();
        let mut times = state.free_s.clone();
        for s in 0..problem.stages.len() {
            let free_s = state.free_s[problem.lane_of[s]];
            for (pass, arrives_s) in state.arrives_s.iter().enumerate() {
                let from = s * width + state.done[pass][s] as usize;
                let pending = arrives_s[from..(s + 1) * width].iter().take_while(|t| !t.is_nan());
                times.extend(pending.map(|t| t.max(free_s)));
                times.push(state.sent_s[pass][s].max(free_s));
            }
        }
        let alike = self.seen.entry(key).or_default();
        let is_later = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| a >= b);
        if alike.iter().any(|other| is_later(&times, other)) {
            return true;
        }
        alike.retain(|other| !is_later(other, &times));
        if alike.len() < MOST_ALIKE {
            alike.push(times);
        }
        false
    }

    /// The calls placed, by lane.
    fn written(&self) -> Calls {
        let mut calls: Calls = vec![Vec::new(); self.problem.lanes.len()];
        for &call in &self.placed {
            calls[self.problem.lane_of[call.stage as usize]].push(call);
        }
        calls
    }
}
