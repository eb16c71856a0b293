//! Local improvement of an order: calls that the step's end depends on move to another place of their lane, as long as
//! the step gets shorter.

use super::{Call, Calls, Pass, Problem};

/// Fewest orders that are worth trying.
const FEWEST: usize = 50;
/// Farthest that a call moves within its lane.
const FARTHEST: usize = 6;

/// The order with its step, improved by moves that simulate at most `most_calls` calls, or until the step is `bound_s`.
pub(super) fn improved(
    problem: &Problem,
    mut calls: Calls,
    mut step_s: f64,
    bound_s: f64,
    most_calls: usize,
) -> (f64, Calls) {
    let mut left = most_calls / problem.num_calls().max(1);
    if left < FEWEST {
        return (step_s, calls);
    }
    let is_least = |step_s: f64| step_s <= bound_s * (1.0 + 1e-9);
    let mut ends_s = lane_ends_s(problem, &calls);
    'moves: while !is_least(step_s) {
        for (lane, from, to) in moves(problem, &calls) {
            if left == 0 {
                break 'moves;
            }
            left -= 1;
            rotate(&mut calls[lane], from, to);
            if let Some((new_s, starts)) = problem.played(&calls) {
                let new_ends_s = ends_of(problem, &calls, &starts);
                // Among equal steps, the one whose lanes are done earlier.
                let shorter = new_s < step_s * (1.0 - 1e-12);
                if shorter || new_s <= step_s && new_ends_s < ends_s * (1.0 - 1e-9) {
                    (step_s, ends_s) = (new_s, new_ends_s);
                    continue 'moves;
                }
            }
            rotate(&mut calls[lane], to, from);
        }
        break;
    }
    (step_s, calls)
}

/// Moves the call at one place to another.
fn rotate(lane: &mut [Call], from: usize, to: usize) {
    if from < to { lane[from..=to].rotate_left(1) } else { lane[to..=from].rotate_right(1) }
}

fn lane_ends_s(problem: &Problem, calls: &Calls) -> f64 {
    problem.played(calls).map_or(f64::INFINITY, |(_, starts)| ends_of(problem, calls, &starts))
}

fn ends_of(problem: &Problem, calls: &Calls, starts: &[Vec<f64>]) -> f64 {
    let end = |(lane, starts): (&Vec<Call>, &Vec<f64>)| {
        lane.last().zip(starts.last()).map_or(0.0, |(&call, start_s)| start_s + problem.seconds(call))
    };
    calls.iter().zip(starts).map(end).sum()
}

/// Moves of calls on the longest path, those of its end first: a call that waits for its lane goes before those that it
/// waits for, and those go after it.
fn moves(problem: &Problem, calls: &Calls) -> Vec<(usize, usize, usize)> {
    let Some((_, starts)) = problem.played(calls) else { return Vec::new() };
    let mut moves = Vec::new();
    for (lane, first, last) in blocks(problem, calls, &starts) {
        for at in (first + 1..=last).rev() {
            let near = at.saturating_sub(FARTHEST).max(first);
            for to in (near..at).rev() {
                let (call, other) = (calls[lane][at], calls[lane][to]);
                // Calls of one stage and pass keep their order.
                if call == other {
                    break;
                }
                moves.push((lane, at, to));
                if to + 1 < at {
                    moves.push((lane, to, at));
                }
            }
        }
    }
    moves
}

/// The runs of calls without a gap that the longest path takes: lane, first and last.
fn blocks(problem: &Problem, calls: &Calls, starts: &[Vec<f64>]) -> Vec<(usize, usize, usize)> {
    let end_s = |l: usize| {
        let last = calls[l].last().zip(starts[l].last());
        last.map_or(0.0, |(&call, start_s)| start_s + problem.seconds(call))
    };
    let done_s = |l: usize| end_s(l) + if problem.meets { 0.0 } else { problem.finish_s(l) };
    let Some(mut lane) = (0..calls.len()).max_by(|&a, &b| done_s(a).total_cmp(&done_s(b))) else { return Vec::new() };
    let at = positions(problem, calls);
    let mut last = calls[lane].len() - 1;
    let mut blocks = Vec::new();
    loop {
        let mut first = last;
        while first > 0 {
            let before_s = starts[lane][first - 1] + problem.seconds(calls[lane][first - 1]);
            if starts[lane][first] > before_s + 1e-12 {
                break;
            }
            first -= 1;
        }
        if first < last {
            blocks.push((lane, first, last));
        }
        // The first call of the run waits for its operand.
        let call = calls[lane][first];
        let m = at.number[lane][first];
        let (pass, stage) = match call.pass {
            Pass::Forward if call.stage > 0 => (Pass::Forward, call.stage as usize - 1),
            Pass::Backward if (call.stage as usize) + 1 < problem.stages.len() => {
                (Pass::Backward, call.stage as usize + 1)
            }
            Pass::Backward => (Pass::Forward, call.stage as usize),
            Pass::Forward | Pass::Weights => return blocks,
        };
        lane = problem.lane_of[stage];
        last = at.place[pass as usize][stage * problem.microbatches + m];
    }
}

/// Where calls are.
struct Positions {
    /// The microbatch of each call of a lane.
    number: Vec<Vec<usize>>,
    /// By pass, stage and microbatch: the place in the lane.
    place: [Vec<usize>; 3],
}

fn positions(problem: &Problem, calls: &Calls) -> Positions {
    let size = problem.stages.len() * problem.microbatches;
    let mut place: [Vec<usize>; 3] = std::array::from_fn(|_| vec![0; size]);
    let mut made = [(); 3].map(|()| vec![0usize; problem.stages.len()]);
    let number = calls.iter().map(|lane| {
        let of_call = |(at, call): (usize, &Call)| {
            let (pass, stage) = (call.pass as usize, call.stage as usize);
            let m = made[pass][stage];
            made[pass][stage] += 1;
            place[pass][stage * problem.microbatches + m] = at;
            m
        };
        lane.iter().enumerate().map(of_call).collect()
    });
    let number = number.collect();
    Positions { number, place }
}
