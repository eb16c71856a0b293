//! Lower bounds. The start of every call is bounded by what must come before it: the same microbatch on earlier stages,
//! earlier microbatches, all work of its own lane that these imply, and the calls that make room for it. The time from
//! its end to the step's end is bounded likewise. Then each lane alone, if it could interrupt calls, gives a bound.

use super::state::State;
use super::{Call, Pass, Problem};
use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Per pass, stage and microbatch: seconds.
pub(super) type Table = [Vec<f64>; 3];

/// Numbers that room forces on a stage.
pub(super) struct Forced {
    /// Most microbatches between forward and backward.
    ahead: Vec<usize>,
    /// Most microbatches between forward and gradients of weights.
    pending: Vec<usize>,
}

impl Forced {
    pub fn of(problem: &Problem) -> Forced {
        let (stages, count) = (problem.stages.len(), problem.microbatches);
        let mut forced = Forced { ahead: vec![count; stages], pending: vec![count; stages] };
        for (lane, &room) in problem.lanes.iter().zip(&problem.room_bytes) {
            // A microbatch that is on a stage is also held by the lane's earlier stages.
            let mut held = 0u64;
            for &s in lane {
                held = held.saturating_add(problem.stages[s].held_bytes);
                let most = |bytes: u64| room.checked_div(bytes).map_or(count, |n| (n as usize).min(count));
                forced.ahead[s] = most(held);
                if problem.stages[s].weights_s.is_some() {
                    forced.pending[s] = most(problem.stages[s].weights_bytes);
                }
            }
        }
        forced
    }
}

pub(super) fn bound_s(problem: &Problem) -> f64 {
    let forced = Forced::of(problem);
    if forced.ahead.contains(&0) {
        return f64::INFINITY;
    }
    let starts = starts_s(problem, &forced, &State::new(problem));
    let tails = tails_s(problem, &forced);
    lanes_s(problem, &State::new(problem), &starts, &tails, f64::INFINITY)
}

/// The largest bound of a single lane for the calls that remain, or of one call with what is before and after it.
/// Stops at the first that is at least `enough_s`.
pub(super) fn lanes_s(problem: &Problem, state: &State, starts: &Table, tails: &Table, enough_s: f64) -> f64 {
    let width = problem.microbatches;
    let mut most_s = 0.0f64;
    let mut jobs: Vec<Job> = Vec::new();
    for (l, lane) in problem.lanes.iter().enumerate() {
        jobs.clear();
        for &s in lane {
            for pass in passes(problem, s) {
                let call = Call { stage: s as u32, pass };
                let seconds = problem.seconds(call);
                for m in state.done[pass as usize][s] as usize..width {
                    let at = s * width + m;
                    jobs.push(Job { start_s: starts[pass as usize][at], seconds, tail_s: tails[pass as usize][at] });
                }
            }
        }
        most_s = most_s.max(one_lane_s(&mut jobs)).max(state.free_s[l] + problem.finish_s(l));
        if most_s >= enough_s {
            break;
        }
    }
    most_s
}

fn passes(problem: &Problem, stage: usize) -> impl Iterator<Item = Pass> {
    let apart = problem.stages[stage].weights_s.is_some();
    [Pass::Forward, Pass::Backward, Pass::Weights].into_iter().take(if apart { 3 } else { 2 })
}

/// Earliest starts of the calls that a state leaves.
pub(super) fn starts_s(problem: &Problem, forced: &Forced, state: &State) -> Table {
    let (stages, width) = (problem.stages.len(), problem.microbatches);
    let mut starts: Table = std::array::from_fn(|_| vec![0.0; stages * width]);
    let mut sent = state.sent_s.clone();
    let done = |pass: Pass, s: usize| state.done[pass as usize][s] as usize;
    let before = |pass: Pass, s: usize, m: usize, starts: &Table| match (m.checked_sub(1), pass) {
        (Some(m), pass) if m >= done(pass, s) => {
            starts[pass as usize][s * width + m] + problem.seconds(Call { stage: s as u32, pass })
        }
        _ => 0.0,
    };
    for m in 0..width {
        for s in 0..stages {
            let (at, work) = (s * width + m, &problem.stages[s]);
            if m >= done(Pass::Forward, s) {
                let arrives_s = state.arrives_s[0][at];
                let arrives_s = if arrives_s.is_nan() { sent[0][s - 1] } else { arrives_s };
                let mut start_s = arrives_s.max(before(Pass::Forward, s, m, &starts));
                if let Some(freed) = m.checked_sub(forced.ahead[s])
                    && freed >= done(Pass::Backward, s)
                {
                    start_s = start_s.max(starts[1][s * width + freed] + work.backward_s);
                }
                if let Some(freed) = m.checked_sub(forced.pending[s])
                    && freed >= done(Pass::Weights, s)
                {
                    start_s = start_s.max(starts[2][s * width + freed] + work.weights_s.unwrap_or(0.0));
                }
                let lane = problem.lane_of[s];
                start_s = start_s.max(state.free_s[lane] + implied_s(problem, forced, state, s, m, Pass::Forward));
                starts[0][at] = start_s;
                sent[0][s] = sent[0][s].max(start_s + work.forward_s) + work.transfer_forward_s;
            }
        }
        for s in (0..stages).rev() {
            let (at, work) = (s * width + m, &problem.stages[s]);
            let lane = problem.lane_of[s];
            if m >= done(Pass::Backward, s) {
                let arrives_s = state.arrives_s[1][at];
                let arrives_s = match arrives_s.is_nan() {
                    false => arrives_s,
                    true if s + 1 < stages => sent[1][s + 1],
                    true => starts[0][at] + work.forward_s,
                };
                let start_s = arrives_s.max(before(Pass::Backward, s, m, &starts));
                let start_s = start_s.max(state.free_s[lane] + implied_s(problem, forced, state, s, m, Pass::Backward));
                starts[1][at] = start_s;
                sent[1][s] = sent[1][s].max(start_s + work.backward_s) + work.transfer_backward_s;
            }
            if work.weights_s.is_some() && m >= done(Pass::Weights, s) {
                let after = if m >= done(Pass::Backward, s) { starts[1][at] + work.backward_s } else { 0.0 };
                let start_s = after.max(before(Pass::Weights, s, m, &starts)).max(state.free_s[lane]);
                starts[2][at] =
                    start_s.max(state.free_s[lane] + implied_s(problem, forced, state, s, m, Pass::Weights));
            }
        }
    }
    starts
}

/// Seconds of the lane's own calls that come before a call and that a state leaves.
fn implied_s(problem: &Problem, forced: &Forced, state: &State, stage: usize, m: usize, pass: Pass) -> f64 {
    let left = |pass: Pass, s: usize, count: usize| {
        let left = count.saturating_sub(state.done[pass as usize][s] as usize);
        left as f64 * problem.seconds(Call { stage: s as u32, pass })
    };
    let mut sum_s = 0.0;
    for &s in &problem.lanes[problem.lane_of[stage]] {
        // Numbers of forwards and backwards of the stage that are complete.
        let (forwards, backwards) = match pass {
            Pass::Forward => {
                let freed = (m + 1).saturating_sub(forced.ahead[stage]);
                let forwards = if s < stage {
                    m + 1
                } else if s == stage {
                    m
                } else {
                    freed
                };
                (forwards, if s >= stage { freed } else { (m + 1).saturating_sub(forced.ahead[s]) })
            }
            Pass::Backward | Pass::Weights => {
                let own = m + usize::from(pass == Pass::Weights);
                let backwards = match s.cmp(&stage) {
                    Ordering::Greater => m + 1,
                    Ordering::Equal => own,
                    Ordering::Less => (m + 1).saturating_sub(forced.ahead[s]),
                };
                (m + 1, backwards)
            }
        };
        let weights =
            if pass == Pass::Weights && s == stage { m } else { (forwards).saturating_sub(forced.pending[s]) };
        sum_s += left(Pass::Forward, s, forwards) + left(Pass::Backward, s, backwards);
        if problem.stages[s].weights_s.is_some() {
            sum_s += left(Pass::Weights, s, weights);
        }
    }
    sum_s
}

/// Least time from the end of each call to the end of the step.
pub(super) fn tails_s(problem: &Problem, forced: &Forced) -> Table {
    let (stages, width) = (problem.stages.len(), problem.microbatches);
    let mut tails: Table = std::array::from_fn(|_| vec![0.0; stages * width]);
    for m in (0..width).rev() {
        let next = |table: &[f64], s: usize, seconds: f64| match m + 1 < width {
            true => table[s * width + m + 1] + seconds,
            false => 0.0,
        };
        for s in 0..stages {
            let (at, work) = (s * width + m, &problem.stages[s]);
            let finish_s = problem.finish_s(problem.lane_of[s]);
            let weights_s = work.weights_s.unwrap_or(0.0);
            let mut tail_s = finish_s;
            if work.weights_s.is_some() {
                let mut own_s = finish_s.max(next(&tails[2], s, weights_s));
                if m + forced.pending[s] < width {
                    own_s = own_s.max(tails[0][at + forced.pending[s]] + work.forward_s);
                }
                tails[2][at] = own_s;
                tail_s = own_s + weights_s;
            }
            tail_s = tail_s
                .max(next(&tails[1], s, work.backward_s))
                .max(finish_s + following_s(problem, s, m, Pass::Backward));
            if s > 0 {
                let earlier = &problem.stages[s - 1];
                tail_s = tail_s.max(work.transfer_backward_s + earlier.backward_s + tails[1][at - width]);
            }
            if m + forced.ahead[s] < width {
                tail_s = tail_s.max(tails[0][at + forced.ahead[s]] + work.forward_s);
            }
            tails[1][at] = tail_s;
        }
        for s in (0..stages).rev() {
            let (at, work) = (s * width + m, &problem.stages[s]);
            let finish_s = problem.finish_s(problem.lane_of[s]);
            let mut tail_s = (tails[1][at] + work.backward_s).max(next(&tails[0], s, work.forward_s));
            tail_s = tail_s.max(finish_s + following_s(problem, s, m, Pass::Forward));
            if s + 1 < stages {
                let later = &problem.stages[s + 1];
                tail_s = tail_s.max(work.transfer_forward_s + later.forward_s + tails[0][at + width]);
            }
            tails[0][at] = tail_s;
        }
    }
    tails
}

/// Seconds of the lane's own calls that come after a call.
fn following_s(problem: &Problem, stage: usize, m: usize, pass: Pass) -> f64 {
    let width = problem.microbatches;
    let mut sum_s = 0.0;
    for &s in &problem.lanes[problem.lane_of[stage]] {
        let work = &problem.stages[s];
        // Later forwards of later stages, and all backwards, of this microbatch and later ones.
        let rest = (width - m - 1) as f64;
        let (forwards, backwards) = match pass {
            Pass::Forward if s > stage => (rest + 1.0, rest + 1.0),
            Pass::Forward if s == stage => (rest, rest + 1.0),
            Pass::Forward => (0.0, rest + 1.0),
            _ if s < stage => (0.0, rest + 1.0),
            _ if s == stage => (0.0, rest),
            _ => (0.0, 0.0),
        };
        // Gradients of weights follow their backward.
        let weights = match (pass, s == stage) {
            (Pass::Backward, true) => rest + 1.0,
            _ => backwards,
        };
        sum_s += forwards * work.forward_s + backwards * work.backward_s + weights * work.weights_s.unwrap_or(0.0);
    }
    sum_s
}

/// A call of a lane on its own.
#[derive(Clone, Copy)]
struct Job {
    start_s: f64,
    seconds: f64,
    tail_s: f64,
}

/// The least end of all jobs with their tails on one lane that may interrupt them: the job with the longest tail runs
/// (Jackson's preemptive schedule, which is optimal).
fn one_lane_s(jobs: &mut [Job]) -> f64 {
    jobs.sort_unstable_by(|a, b| a.start_s.total_cmp(&b.start_s));
    // Tails and seconds left of jobs under way. They are not negative, so their bits have their order.
    let mut open: BinaryHeap<(u64, u64)> = BinaryHeap::new();
    let (mut now_s, mut most_s, mut next) = (0.0f64, 0.0f64, 0);
    loop {
        if open.is_empty() {
            let Some(job) = jobs.get(next) else { return most_s };
            now_s = now_s.max(job.start_s);
        }
        while let Some(job) = jobs.get(next).filter(|job| job.start_s <= now_s) {
            open.push((job.tail_s.to_bits(), job.seconds.to_bits()));
            next += 1;
        }
        let Some((tail, left)) = open.pop() else { continue };
        let (tail_s, left_s) = (f64::from_bits(tail), f64::from_bits(left));
        let until_s = jobs.get(next).map_or(f64::INFINITY, |job| job.start_s);
        if now_s + left_s <= until_s {
            now_s += left_s;
            most_s = most_s.max(now_s + tail_s);
        } else {
            open.push((tail, (left_s - (until_s - now_s)).max(0.0).to_bits()));
            now_s = until_s;
        }
    }
}
