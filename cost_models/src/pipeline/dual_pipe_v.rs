//! The calls of `dualpipe-v` on lanes of two stages that form a V: DualPipeV, which keeps one copy of each parameter where
//! DeepSeek-AI's DualPipe (2024, "DeepSeek-V3 Technical Report", section 3.2.1) keeps two. A forward pass of one stage of a
//! lane takes turns with a whole backward pass of the other, and the two may run side by side.
//!
//! A lane has eight phases: forwards down; forwards down and up; backwards with forwards on the way up; pairs in both
//! directions; pairs down with backwards up; backwards, whole ones first; backwards with delayed gradients of weights; the
//! rest of these. The rule is for at least `2p` microbatches on `p` lanes. With fewer, the calls of those that are missing are
//! left out.

use altiplano_ir::order::{Call, CallOrder, Pass};
use altiplano_ir::plan::Placement;
use std::collections::VecDeque;

/// The calls of all lanes, and the positions of each lane at which a forward call begins a pair: it and the two calls after
/// it, a backward call and its gradients of weights, may run side by side.
pub(super) fn calls(num_lanes: usize, num_microbatches: u32) -> (CallOrder, Vec<Vec<usize>>) {
    let of_lane = |lane| {
        let made = of_lane(lane, num_lanes, num_microbatches);
        (made.calls, made.pairs)
    };
    let (lanes, pairs) = (0..num_lanes).map(of_lane).unzip();
    (CallOrder { lanes }, pairs)
}

fn of_lane(lane: usize, num_lanes: usize, num_microbatches: u32) -> Made {
    // Lanes after this one, and those up to it.
    let (after, upto) = (num_lanes - lane - 1, lane + 1);
    let all = (num_microbatches as usize).max(2 * num_lanes);
    let mut made = Made::new(lane, num_lanes, num_microbatches);
    (0..2 * after).for_each(|_| made.forward(DOWN));
    for _ in 0..upto {
        made.forward(DOWN);
        made.forward(UP);
    }
    for _ in 0..after {
        made.backward(UP, true);
        made.delayed();
        made.forward(UP);
    }
    for turn in 0..all - 2 * num_lanes + upto {
        if turn == 0 && after == 0 {
            // The lane where microbatches turn would only wait longer for a pair.
            made.forward(DOWN);
            made.backward(UP, false);
        } else {
            made.pair(DOWN, UP);
        }
        made.pair(UP, DOWN);
    }
    for _ in 0..after {
        made.backward(UP, false);
        made.pair(UP, DOWN);
    }
    // Gradients of weights are delayed from the middle of this phase on.
    let mut delays = false;
    for turn in 0..upto {
        let middle = turn == upto / 2;
        delays |= middle && !lane.is_multiple_of(2);
        made.backward(UP, delays);
        delays |= middle && lane.is_multiple_of(2);
        made.backward(DOWN, delays);
    }
    for _ in 0..after {
        made.delayed();
        made.backward(DOWN, delays);
    }
    (0..upto).for_each(|_| made.delayed());
    made
}

/// The rounds of a lane: its stage on the way down, and its stage on the way up.
const DOWN: usize = 0;
const UP: usize = 1;

/// The calls of a lane so far.
struct Made {
    calls: Vec<Call>,
    pairs: Vec<usize>,
    stages: [u32; 2],
    num_microbatches: u32,
    /// By round and pass, with those that are left out. Gradients of weights follow in the order of the backward calls.
    counts: [[u32; 2]; 2],
    /// The rounds of backward calls whose gradients of weights are delayed; `None` if the microbatch is left out.
    delayed: VecDeque<Option<usize>>,
}

impl Made {
    fn new(lane: usize, num_lanes: usize, num_microbatches: u32) -> Made {
        let stages = [DOWN, UP].map(|round| Placement::V.stage_of(lane, round, num_lanes) as u32);
        let (calls, pairs, delayed) = (Vec::new(), Vec::new(), VecDeque::new());
        Made { calls, pairs, stages, num_microbatches, counts: [[0; 2]; 2], delayed }
    }

    /// Makes the next call of a pass, and returns true, unless its microbatch is left out.
    fn call(&mut self, round: usize, pass: Pass) -> bool {
        let count = &mut self.counts[round][usize::from(pass == Pass::Backward)];
        let is_made = *count < self.num_microbatches;
        *count += 1;
        if is_made {
            self.calls.push(Call { stage: self.stages[round], pass });
        }
        is_made
    }

    fn forward(&mut self, round: usize) {
        self.call(round, Pass::Forward);
    }

    /// Makes a backward call, and its gradients of weights unless `delays`.
    fn backward(&mut self, round: usize, delays: bool) {
        let is_made = self.call(round, Pass::Backward);
        match delays {
            true => self.delayed.push_back(is_made.then_some(round)),
            false if is_made => self.calls.push(Call { stage: self.stages[round], pass: Pass::Weights }),
            false => {}
        }
    }

    /// Makes the gradients of weights that have been delayed longest.
    fn delayed(&mut self) {
        if let Some(Some(round)) = self.delayed.pop_front() {
            self.calls.push(Call { stage: self.stages[round], pass: Pass::Weights });
        }
    }

    /// Makes a forward call of one round and a whole backward call of the other.
    fn pair(&mut self, forward: usize, backward: usize) {
        let position = self.calls.len();
        self.forward(forward);
        self.backward(backward, false);
        if self.calls.len() == position + 3 {
            self.pairs.push(position);
        }
    }
}
