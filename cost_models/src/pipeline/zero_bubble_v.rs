//! The calls of `zb-v`, the zero-bubble schedule on lanes of two stages that form a V (Qi et al. 2024, "Pipeline
//! Parallelism with Controllable Memory", section 4). A microbatch goes down the lanes and up again. The first lane ends
//! it, so backward passes begin everywhere after about the same time, and no lane holds more than another.
//!
//! A lane has four phases: forwards that fill the pipeline; forwards and whole backwards of the way up; all passes in
//! turn; backwards, with gradients of weights where lanes would wait. The rule is for at least `2p - 1` microbatches on
//! `p` lanes. With fewer, the calls of those that are missing are left out.

use altiplano_ir::order::{Call, CallOrder, Pass};
use altiplano_ir::plan::Placement;

/// The calls of all lanes.
pub(super) fn calls(num_lanes: usize, num_microbatches: u32) -> CallOrder {
    CallOrder { lanes: (0..num_lanes).map(|lane| of_lane(lane, num_lanes, num_microbatches)).collect() }
}

fn of_lane(lane: usize, num_lanes: usize, num_microbatches: u32) -> Vec<Call> {
    // Lanes before this one, and those from it on.
    let (before, after) = (lane as u32, (num_lanes - lane) as u32);
    let all = num_microbatches.max(2 * num_lanes as u32 - 1);
    let mut made = Made::new(lane, num_lanes, num_microbatches);
    for _ in 0..2 * after - 1 {
        made.call(DOWN, Pass::Forward);
    }
    for _ in 0..before {
        made.call(UP, Pass::Forward);
        made.call(DOWN, Pass::Forward);
    }
    for _ in 0..after {
        made.call(UP, Pass::Forward);
        made.backward(UP);
    }
    while made.count(UP, Pass::Forward) < all {
        if made.count(DOWN, Pass::Forward) < all {
            made.call(DOWN, Pass::Forward);
        }
        made.backward(DOWN);
        made.call(UP, Pass::Forward);
        made.backward(UP);
    }
    for _ in 0..before {
        made.call(DOWN, Pass::Backward);
        made.call(UP, Pass::Backward);
    }
    for _ in 0..after {
        made.call(DOWN, Pass::Backward);
        made.call(DOWN, Pass::Weights);
    }
    for round in [UP, DOWN] {
        while made.count(round, Pass::Weights) < all {
            made.call(round, Pass::Weights);
        }
    }
    made.calls
}

/// The rounds of a lane: its stage on the way down, and its stage on the way up.
const DOWN: usize = 0;
const UP: usize = 1;

/// The calls of a lane so far.
struct Made {
    calls: Vec<Call>,
    stages: [u32; 2],
    num_microbatches: u32,
    /// By round and pass, with those that are left out.
    counts: [[u32; 3]; 2],
}

impl Made {
    fn new(lane: usize, num_lanes: usize, num_microbatches: u32) -> Made {
        let stages = [DOWN, UP].map(|round| Placement::V.stage_of(lane, round, num_lanes) as u32);
        Made { calls: Vec::new(), stages, num_microbatches, counts: [[0; 3]; 2] }
    }

    fn count(&self, round: usize, pass: Pass) -> u32 {
        self.counts[round][pass as usize]
    }

    fn call(&mut self, round: usize, pass: Pass) {
        if self.count(round, pass) < self.num_microbatches {
            self.calls.push(Call { stage: self.stages[round], pass });
        }
        self.counts[round][pass as usize] += 1;
    }

    fn backward(&mut self, round: usize) {
        self.call(round, Pass::Backward);
        self.call(round, Pass::Weights);
    }
}
