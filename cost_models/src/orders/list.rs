//! Orders built call by call: at the earliest time at which some lane can go on, a rule picks one of its calls. Rules
//! differ in which pass goes first, in how far forwards run ahead, and in when gradients of weights fill a gap.
//!
//! Lanes with several stages admit a forward only if everything that the lane has begun can still be completed, one
//! microbatch after the other, within its room. So no order ends in a deadlock.

use super::state::State;
use super::{Call, Calls, Pass, Problem};

/// The pass that goes first if several calls can start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum First {
    Backward,
    Forward,
    /// A forward and a backward in turn.
    Turns,
    /// Backwards, then gradients of weights, which make room.
    Weights,
}

/// The stage of a lane that goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Deep {
    Last,
    First,
    /// That of the earliest microbatch.
    Oldest,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Rule {
    pub first: First,
    pub deep: Deep,
    /// Most microbatches between forward and backward, by stage.
    pub ahead: Vec<u32>,
    /// Gradients of weights start if this share of them is done when the next operand arrives.
    pub fill: f64,
}

/// Orders under the rules, as many as `most_calls` allows; the best rules of a shorter step come first.
pub(super) fn orders(problem: &Problem, bound_s: f64, most_calls: usize) -> Vec<Calls> {
    let rules = rules(problem);
    let stages = problem.stages.len();
    // A step of a few rounds tells rules apart as well as a long one.
    let short = problem.microbatches.min((4 * problem.lanes.len()).max(16));
    let mut ranked: Vec<(f64, Rule)> = Vec::new();
    let mut left = most_calls;
    let mut seen: Vec<Calls> = Vec::new();
    if short < problem.microbatches {
        let part = Problem { microbatches: short, ..problem.clone() };
        for rule in rules {
            if left < part.num_calls() {
                break;
            }
            left -= part.num_calls();
            ranked.extend(scheduled(&part, &rule).map(|(step_s, _)| (step_s, rule)));
        }
        ranked.sort_by(|a, b| a.0.total_cmp(&b.0));
    } else {
        ranked = rules.into_iter().map(|rule| (0.0, rule)).collect();
    }
    let mut best: Option<(f64, Calls)> = None;
    let mut best_rule = None;
    for (_, rule) in ranked {
        // At least one order of the whole step, however long it is.
        if left < problem.num_calls() && best.is_some() {
            break;
        }
        left = left.saturating_sub(problem.num_calls());
        if let Some((step_s, calls)) = scheduled(problem, &rule)
            && best.as_ref().is_none_or(|b| step_s < b.0)
        {
            (best, best_rule) = (Some((step_s, calls)), Some(rule));
        }
        if best.as_ref().is_some_and(|b| b.0 <= bound_s * (1.0 + 1e-9)) {
            break;
        }
    }
    // Forwards run ahead by another number on one stage at a time.
    if let (Some(best), Some(rule)) = (&mut best, best_rule) {
        let mut at = rule;
        let mut moved = true;
        while std::mem::take(&mut moved) && best.0 > bound_s * (1.0 + 1e-9) {
            for (s, more) in (0..stages).flat_map(|s| [(s, true), (s, false)]) {
                if left < problem.num_calls() {
                    break;
                }
                let mut next = at.clone();
                next.ahead[s] = if more { next.ahead[s] + 1 } else { next.ahead[s] - 1 };
                if next.ahead[s] == 0 || next.ahead[s] as usize > problem.microbatches {
                    continue;
                }
                left -= problem.num_calls();
                if let Some(found) = scheduled(problem, &next)
                    && found.0 < best.0 * (1.0 - 1e-9)
                {
                    (*best, at, moved) = (found, next, true);
                }
            }
        }
    }
    seen.extend(best.map(|b| b.1));
    seen
}

/// The rules, the most promising first.
fn rules(problem: &Problem) -> Vec<Rule> {
    let (stages, works) = (problem.stages.len(), &problem.stages);
    let apart = works.iter().any(|work| work.weights_s.is_some());
    let shared = problem.lanes.iter().any(|lane| lane.len() > 1);
    // A microbatch's way from a stage to the end and back, and the time in which the busiest lane does one microbatch.
    let mut way_s = vec![0.0; stages];
    let mut sum_s = 0.0;
    for s in (0..stages).rev() {
        let work = &works[s];
        let sends_s = if s + 1 < stages { work.transfer_forward_s + works[s + 1].transfer_backward_s } else { 0.0 };
        sum_s += work.forward_s + work.backward_s + sends_s;
        way_s[s] = sum_s;
    }
    let lane_s = |lane: &Vec<usize>| -> f64 {
        let whole = |&s: &usize| works[s].forward_s + works[s].backward_s + works[s].weights_s.unwrap_or(0.0);
        lane.iter().map(whole).sum()
    };
    let round_s = problem.lanes.iter().map(lane_s).fold(0.0, f64::max).max(f64::MIN_POSITIVE);
    let most = problem.microbatches as u32;
    let by_way = |factor: f64, more: f64| -> Vec<u32> {
        let ahead = |way_s: &f64| ((factor * way_s / round_s).ceil() + more).clamp(1.0, f64::from(most)) as u32;
        way_s.iter().map(ahead).collect()
    };
    let by_place =
        |more: u32| -> Vec<u32> { (0..stages).map(|s| ((stages - s) as u32 + more).clamp(1, most)).collect() };
    let mut aheads = vec![vec![most; stages], by_way(1.0, 0.0), by_way(1.0, 1.0), by_place(0), by_way(1.5, 0.0)];
    aheads.extend([by_place(1), by_way(2.0, 0.0), by_way(1.0, 2.0), by_way(1.25, 0.0), by_way(0.75, 0.0)]);
    aheads.extend([by_way(0.5, 0.0), by_way(0.35, 0.0)].into_iter().filter(|_| shared));
    let mut distinct: Vec<Vec<u32>> = Vec::new();
    aheads.into_iter().for_each(|ahead| {
        if !distinct.contains(&ahead) {
            distinct.push(ahead)
        }
    });
    let fills: &[f64] = if apart { &[1.0, 0.0, 0.5] } else { &[1.0] };
    let deeps: &[Deep] = if shared { &[Deep::Last, Deep::Oldest, Deep::First] } else { &[Deep::Last] };
    let firsts = [First::Backward, First::Turns, First::Forward, First::Weights];
    let firsts = firsts.into_iter().filter(|first| apart || *first != First::Weights);
    let mut rules = Vec::new();
    for first in firsts {
        for &fill in fills {
            for &deep in deeps {
                rules.extend(distinct.iter().map(|ahead| Rule { first, deep, ahead: ahead.clone(), fill }));
            }
        }
    }
    rules
}

/// The order under a rule, and its step. `None` if a lane has no room for a microbatch.
pub(super) fn scheduled(problem: &Problem, rule: &Rule) -> Option<(f64, Calls)> {
    let lanes = problem.lanes.len();
    let mut making = Making {
        problem,
        rule,
        state: State::new(problem),
        whole_bytes: problem.lanes.iter().map(|lane| held_bytes(problem, lane)).collect(),
        was_forward: vec![false; lanes],
    };
    let mut calls: Calls = vec![Vec::new(); lanes];
    let mut next: Vec<Option<(f64, f64, Call)>> = (0..lanes).map(|l| making.next(l)).collect();
    for _ in 0..problem.num_calls() {
        let start = |l: &usize| next[*l].map_or(f64::INFINITY, |n| n.0);
        let l = (0..lanes).min_by(|a, b| start(a).total_cmp(&start(b)))?;
        let (_, ready_s, call) = next[l]?;
        let (_, woken) = making.state.run(problem, call, ready_s);
        if call.pass != Pass::Weights {
            making.was_forward[l] = call.pass == Pass::Forward;
        }
        calls[l].push(call);
        next[l] = making.next(l);
        if let Some(woken) = woken.filter(|&woken| woken != l) {
            next[woken] = making.next(woken);
        }
    }
    Some((making.state.step_s(problem), calls))
}

fn held_bytes(problem: &Problem, lane: &[usize]) -> u64 {
    lane.iter().fold(0, |sum, &s| sum.saturating_add(problem.stages[s].held_bytes))
}

struct Making<'a> {
    problem: &'a Problem,
    rule: &'a Rule,
    state: State,
    /// Bytes of a microbatch on all stages of each lane.
    whole_bytes: Vec<u64>,
    was_forward: Vec<bool>,
}

impl Making<'_> {
    /// The call that a lane makes next: its start, the arrival of its operand, and itself.
    fn next(&self, lane: usize) -> Option<(f64, f64, Call)> {
        let free_s = self.state.free_s[lane];
        let mut found: [Option<(f64, f64, Call)>; 3] = [None; 3];
        let mut first_s = f64::INFINITY;
        for &s in &self.problem.lanes[lane] {
            for pass in [Pass::Forward, Pass::Backward, Pass::Weights] {
                let call = Call { stage: s as u32, pass };
                let Some(ready_s) = self.state.ready_s(self.problem, call) else { continue };
                if pass == Pass::Forward && !self.admits(lane, s) {
                    continue;
                }
                let start_s = free_s.max(ready_s);
                if pass != Pass::Weights {
                    first_s = first_s.min(start_s);
                }
                let best = &mut found[pass as usize];
                if best.is_none_or(|(at_s, _, other)| start_s < at_s || start_s == at_s && self.precedes(call, other)) {
                    *best = Some((start_s, ready_s, call));
                }
            }
        }
        let [forward, backward, weights] = found;
        // Gradients of weights fill a gap that is long enough.
        let fill_s = |call: Call| self.rule.fill * self.problem.seconds(call);
        let early = weights.filter(|&(at_s, _, call)| at_s < first_s && at_s + fill_s(call) <= first_s);
        if early.is_some() {
            return early;
        }
        let can_start = |found: Option<(f64, f64, Call)>| found.filter(|f| f.0 <= first_s);
        let (forward, backward) = (can_start(forward), can_start(backward));
        let weights = if first_s.is_finite() { weights.filter(|w| w.0 >= first_s) } else { weights };
        let forward_first = match self.rule.first {
            First::Forward => true,
            First::Backward | First::Weights => false,
            First::Turns => !self.was_forward[lane],
        };
        let by_rule = match self.rule.first {
            First::Weights => [backward, weights, forward],
            _ if forward_first => [forward, backward, weights],
            _ => [backward, forward, weights],
        };
        by_rule.into_iter().flatten().next()
    }

    /// True if a call goes before another of the same pass and lane.
    fn precedes(&self, call: Call, other: Call) -> bool {
        let done = |call: Call| self.state.done[call.pass as usize][call.stage as usize];
        match self.rule.deep {
            Deep::Last => (call.stage > other.stage) == (call.pass == Pass::Forward),
            Deep::First => (call.stage < other.stage) == (call.pass == Pass::Forward),
            Deep::Oldest => (done(call), call.stage < other.stage) < (done(other), false),
        }
    }

    /// True if a lane may run another forward of a stage.
    fn admits(&self, lane: usize, stage: usize) -> bool {
        let (problem, state) = (self.problem, &self.state);
        let [forwards, backwards] = [&state.done[0], &state.done[1]];
        if forwards[stage] - backwards[stage] >= self.rule.ahead[stage]
            || !state.fits(problem, Call { stage: stage as u32, pass: Pass::Forward })
        {
            return false;
        }
        // Pending gradients of weights can be computed at any time.
        let stages = &problem.lanes[lane];
        let held = |s: usize| problem.stages[s].held_bytes;
        let kept = stages.iter().map(|&s| u64::from(forwards[s] - backwards[s]).saturating_mul(held(s)));
        let mut kept = kept.fold(held(stage), u64::saturating_add);
        let room = problem.room_bytes[lane];
        if kept.saturating_add(self.whole_bytes[lane]) <= room {
            return true;
        }
        let made = |s: usize| forwards[s] + u32::from(s == stage);
        let (oldest, newest) = (backwards[stages[0]], made(stages[0]));
        for m in oldest..newest {
            let of = |begun: bool| {
                let stages = stages.iter().filter(|&&s| backwards[s] <= m && (made(s) > m) == begun);
                stages.fold(0u64, |sum, &s| sum.saturating_add(held(s)))
            };
            if kept.saturating_add(of(false)) > room {
                return false;
            }
            kept = kept.saturating_sub(of(true));
        }
        true
    }
}
