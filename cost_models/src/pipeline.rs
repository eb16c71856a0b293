//! The time of one pipeline step, by simulating its schedule. Each stage is one serial stream of forward and backward
//! calls, and each link one serial stream of transfers. Stages are priced once and their calls only added up, so 64
//! stages and 512 microbatches cost 65,536 additions, and the planner can ask for every candidate.

mod dual_pipe_v;
mod zero_bubble_v;

use altiplano_ir::order::{Call, CallOrder, Pass};
use altiplano_ir::plan::{Placement, Plan, Schedule};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::sync::Arc;

/// The times of one stage in seconds. Forward and backward are those of one microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Default, Serialize, Deserialize)]
pub struct StageTimes {
    pub forward_s: f64,
    pub backward_s: f64,
    /// The gradients of weights, if the schedule runs them apart from the rest of the backward pass.
    pub weights_s: f64,
    /// From the end of a forward call until the next stage holds its result.
    pub transfer_forward_s: f64,
    /// From the end of a backward call until the previous stage holds its result.
    pub transfer_backward_s: f64,
    /// Once per step, after the stage's last backward call: gradient reduction and update.
    pub step_s: f64,
}

/// The time of one stage; `busy_s + bubble_s` is the step.
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
    Forward {
        microbatch: u32,
    },
    Backward {
        microbatch: u32,
    },
    /// The gradients of weights, if the schedule runs them apart.
    Weights {
        microbatch: u32,
    },
    /// The work after the last backward call of a step, if the next step is under way. Otherwise that work comes after
    /// all calls.
    Update {
        step: u32,
    },
}

/// The order of calls on the devices of a pipeline. A *lane* is the set of devices that one or more stages share. It has
/// `virtual_stages` of them, and `placement` says which.
#[derive(Clone, Debug, PartialEq)]
pub struct Order {
    pub schedule: Schedule,
    pub num_stages: usize,
    pub virtual_stages: usize,
    pub placement: Placement,
    pub num_microbatches: u32,
    /// True if all devices wait for the last gradient of any before they update, as for the norm of all gradients.
    pub meets: bool,
    /// Number of steps of `num_microbatches` each that run without a flush between them. Their microbatches are
    /// numbered consecutively. It is 1 except for `pipedream` and `forward`.
    pub steps: u32,
    /// Passes can run side by side in this order. Under `1f1b`, forwards run further ahead, so that no backward pass waits for
    /// the forward pass beside it. [`Order::pairing`] gives the seconds of such pairs.
    pub pairs: bool,
    /// Seconds of a stage's forward pass beside the backward pass of each stage of its lane, first to last, if passes that take
    /// turns run side by side. If it is absent, they run one after the other.
    paired_s: Option<Arc<Vec<Vec<f64>>>>,
    /// The calls of each lane under `found`, which has no rule, and under `zb-v` and `dualpipe-v`, whose rules give whole
    /// lanes.
    found: Option<Arc<FoundCalls>>,
}

/// The calls of a plan's own order with their microbatches.
#[derive(Debug, PartialEq, Eq)]
struct FoundCalls {
    lanes: Vec<Vec<(usize, PipelineCall)>>,
    /// The positions of each lane, in order, at which a forward call begins a pair.
    pairs: Vec<Vec<usize>>,
    /// By stage: true if it computes gradients of weights apart.
    splits: Vec<bool>,
}

impl FoundCalls {
    fn of(order: &CallOrder, num_stages: usize) -> FoundCalls {
        let mut splits = vec![false; num_stages];
        let mut made = vec![[0u32; 3]; num_stages];
        let lanes = order.lanes.iter().map(|lane| {
            let numbered = lane.iter().map(|call| {
                let stage = call.stage as usize;
                let microbatch = made[stage][call.pass as usize];
                made[stage][call.pass as usize] += 1;
                splits[stage] |= call.pass == Pass::Weights;
                let call = match call.pass {
                    Pass::Forward => PipelineCall::Forward { microbatch },
                    Pass::Backward => PipelineCall::Backward { microbatch },
                    Pass::Weights => PipelineCall::Weights { microbatch },
                };
                (stage, call)
            });
            numbered.collect()
        });
        let lanes: Vec<_> = lanes.collect();
        FoundCalls { pairs: vec![Vec::new(); lanes.len()], lanes, splits }
    }
}

impl Order {
    /// An order with one stage per lane, and with two under `zb-v` and `dualpipe-v`.
    pub fn new(schedule: Schedule, num_stages: usize, num_microbatches: u32) -> Order {
        let (lanes, of_rule) = (num_stages / 2, |calls: CallOrder| FoundCalls::of(&calls, num_stages));
        let found = match schedule {
            Schedule::ZbV => Some(of_rule(zero_bubble_v::calls(lanes, num_microbatches))),
            Schedule::DualPipeV => {
                let (calls, pairs) = dual_pipe_v::calls(lanes, num_microbatches);
                Some(FoundCalls { pairs, ..of_rule(calls) })
            }
            _ => None,
        };
        Order {
            schedule,
            num_stages,
            virtual_stages: schedule.virtual_stages().unwrap_or(1) as usize,
            placement: schedule.placement(),
            num_microbatches,
            meets: false,
            steps: 1,
            pairs: false,
            paired_s: None,
            found: found.map(Arc::new),
        }
    }

    /// The same order with `virtual_stages` stages per lane.
    pub fn sharing(self, virtual_stages: usize) -> Order {
        Order { virtual_stages, ..self }
    }

    /// The same order with passes that run side by side. `paired_s` has the seconds of each stage's forward pass beside the
    /// backward pass of each stage of its lane, first to last.
    pub fn pairing(self, paired_s: Vec<Vec<f64>>) -> Order {
        Order { paired_s: Some(Arc::new(paired_s)), ..self }
    }

    /// The stages of a lane, first to last.
    pub fn stages_of(&self, lane: usize) -> impl Iterator<Item = usize> + use<> {
        self.placement.stages_of(lane, self.num_lanes(), self.num_stages / self.num_lanes().max(1))
    }

    /// The order in which a plan is run. The plan must be verified.
    pub fn of(plan: &Plan) -> Order {
        let own = plan.order.as_ref().map(|order| Arc::new(FoundCalls::of(order, plan.stages.len())));
        let named = Order::new(plan.schedule, plan.stages.len(), plan.microbatches_of_worker());
        Order {
            virtual_stages: plan.virtual_stages as usize,
            placement: plan.placement,
            // Late gradients are summed long before they are needed.
            meets: (plan.clip_norm.is_some() || plan.measure_noise || plan.loss_scale.is_some())
                && plan.staleness() == 0,
            pairs: plan.execution.pairs_passes,
            found: own.or(named.found.clone()),
            ..named
        }
    }

    /// The calls of a step as data. Updates are left out, since they come after all calls.
    pub fn written(&self) -> CallOrder {
        let call = |(stage, call): (usize, PipelineCall)| {
            let pass = match call {
                PipelineCall::Forward { .. } => Pass::Forward,
                PipelineCall::Backward { .. } => Pass::Backward,
                PipelineCall::Weights { .. } => Pass::Weights,
                PipelineCall::Update { .. } => return None,
            };
            Some(Call { stage: stage as u32, pass })
        };
        CallOrder { lanes: (0..self.num_lanes()).map(|lane| self.calls(lane).filter_map(call).collect()).collect() }
    }

    /// Microbatches of all steps.
    pub(crate) fn all_microbatches(&self) -> usize {
        self.num_microbatches as usize * self.steps.max(1) as usize
    }

    /// Calls of a lane that remain of a step when the next begins: for each, the number of calls of the next step after
    /// which it comes. Under `pipedream` these are the backward calls of microbatches that are in later stages. Each
    /// follows a forward call of the next step.
    pub fn late(&self, lane: usize) -> Vec<u32> {
        let flushes = self.schedule != Schedule::PipeDream || self.num_stages <= 1;
        let ahead = if flushes { 0 } else { self.num_stages.saturating_sub(lane + 1) as u32 };
        (1..=ahead.min(self.num_microbatches)).collect()
    }

    pub fn num_lanes(&self) -> usize {
        self.num_stages / self.virtual_stages.max(1)
    }

    /// The call at `position` of a lane, and its stage; `None` past its last.
    ///
    /// `forward`: all forwards, and no backwards. `gpipe`: all forwards, then all backwards (Huang et al. 2019).
    /// `1f1b`: as many forwards as there are later stages, then a forward and a backward in turn, then the remaining
    /// backwards (Narayanan et al. 2021, section 2.2.1).
    ///
    /// Several stages per lane run the interleaved 1F1B of Narayanan et al. 2021 (section 2.2.2). Microbatches pass in
    /// groups of as many as there are lanes, each group through all of a lane's stages in turn. Backwards do likewise,
    /// starting at the last stage. A lane runs `2 (p - l - 1) + (v - 1) p` forwards ahead. If the last group would not
    /// be full, waiting could become circular, so all forwards come first.
    ///
    /// `zb-h1` (Qi et al. 2023, section 2.3, as in their implementation for stages of any lengths): like `1f1b`, with
    /// the gradients of weights of stage `l` delayed by `l` backwards. So every stage has work of as many microbatches
    /// as there are stages, and later stages fill the bubble with gradients of weights.
    ///
    /// `pipedream` (Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training"): `1f1b` that continues
    /// over steps. A stage updates after the last backward of a step, when forwards of the next step have already run.
    ///
    /// Example: stage 0 of 2 with 3 microbatches under `1f1b`: F0 F1 B0 F2 B1 B2.
    ///
    /// With [`Order::pairs`], `1f1b` runs `2 (p - l - 1) + (v - 1) p + 1` forwards ahead, as Megatron-LM does for
    /// `--overlap-moe-expert-parallel-comm`: the next lanes get a forward pass and give a cotangent in each turn.
    ///
    /// `zb-v` and `dualpipe-v`: as `zero_bubble_v` and `dual_pipe_v` say. `found`: as the plan says.
    pub fn call(&self, lane: usize, position: u64) -> Option<(usize, PipelineCall)> {
        if let Some(found) = &self.found {
            return found.lanes.get(lane)?.get(usize::try_from(position).ok()?).copied();
        }
        if self.schedule == Schedule::ZbH1 {
            return Some((lane, self.zero_bubble_call(lane, position)?));
        }
        if self.schedule == Schedule::PipeDream {
            return Some((lane, self.flushless_call(lane, position)?));
        }
        let (lanes, chunks) = (self.num_lanes().max(1) as u64, self.virtual_stages.max(1) as u64);
        let microbatches = self.all_microbatches() as u64;
        let (total, ahead) = (self.forwards_of_lane(), self.forwards_ahead(lane));
        if self.schedule == Schedule::Forward && position >= total {
            return None;
        }
        let (is_forward, k) = match position {
            _ if position >= 2 * total => return None,
            _ if position < ahead => (true, position),
            _ if position < 2 * total - ahead => {
                let turn = position - ahead;
                if turn.is_multiple_of(2) { (true, ahead + turn / 2) } else { (false, turn / 2) }
            }
            _ => (false, position - total),
        };
        let (turn, microbatch) = match chunks {
            1 => (0, k as u32),
            _ => {
                // A last group that is not full has fewer microbatches and passes through all stages as well.
                let group = k / (lanes * chunks);
                let width = lanes.min(microbatches - group * lanes);
                let within = k - group * lanes * chunks;
                (within / width, (group * lanes + within % width) as u32)
            }
        };
        let chunk = if is_forward { turn } else { chunks - 1 - turn };
        let stage = self.placement.stage_of(lane, chunk as usize, lanes as usize);
        let call =
            if is_forward { PipelineCall::Forward { microbatch } } else { PipelineCall::Backward { microbatch } };
        Some((stage, call))
    }

    /// [`Order::call`] for `pipedream`: forwards ahead, then turns of a forward, while there are any, and a backward.
    /// An update follows the last backward of each step. The update of the last step comes after all calls.
    fn flushless_call(&self, stage: usize, position: u64) -> Option<PipelineCall> {
        let of_step = u64::from(self.num_microbatches).max(1);
        let all = self.all_microbatches() as u64;
        // No more than a step has, so that at most one earlier step is under way. Fewer microbatches than stages leave
        // bubbles.
        let ahead = of_step.min(self.num_stages.saturating_sub(stage + 1) as u64);
        let forward = |m: u64| PipelineCall::Forward { microbatch: m as u32 };
        if position < ahead {
            return Some(forward(position));
        }
        let at = position - ahead;
        // Number of calls before a turn.
        let before = |turn: u64| 2 * turn.min(all - ahead) + turn.saturating_sub(all - ahead) + turn / of_step;
        let (mut turn, mut end) = (0, all);
        while end - turn > 1 {
            let middle = (turn + end) / 2;
            if before(middle) <= at { turn = middle } else { end = middle }
        }
        let forwards = u64::from(turn + ahead < all);
        match at - before(turn) {
            0 if forwards == 1 => Some(forward(turn + ahead)),
            call if call == forwards => Some(PipelineCall::Backward { microbatch: turn as u32 }),
            call if call == forwards + 1 && (turn + 1).is_multiple_of(of_step) && turn + 1 < all => {
                Some(PipelineCall::Update { step: (turn / of_step) as u32 })
            }
            _ => None,
        }
    }

    /// [`Order::call`] for `zb-h1`: forwards ahead, turns of a forward and a backward, and the remaining backwards. The
    /// first backwards, as many as the stage's number, stand alone. Each later one is followed by the gradients of
    /// weights of the earliest microbatch that still lacks them. The remaining gradients of weights come last.
    fn zero_bubble_call(&self, stage: usize, position: u64) -> Option<PipelineCall> {
        let call = |kind: u64, m: u64| {
            let microbatch = m as u32;
            Some(match kind {
                0 => PipelineCall::Forward { microbatch },
                1 => PipelineCall::Backward { microbatch },
                _ => PipelineCall::Weights { microbatch },
            })
        };
        let microbatches = u64::from(self.num_microbatches);
        let ahead = microbatches.min(self.num_stages.saturating_sub(stage + 1) as u64);
        let (turns, late) = (microbatches - ahead, microbatches.min(stage as u64));
        if position < ahead {
            return call(0, position);
        }
        // Turns without gradients of weights, and turns with them.
        let (mut at, short) = (position - ahead, turns.min(late));
        if at < 2 * short {
            return call(at % 2, at / 2 + if at % 2 == 0 { ahead } else { 0 });
        }
        at -= 2 * short;
        if at < 3 * (turns - short) {
            let turn = short + at / 3;
            return call(at % 3, [turn + ahead, turn, turn.saturating_sub(late)][(at % 3) as usize]);
        }
        at -= 3 * (turns - short);
        // The remaining backwards, alone and with gradients of weights.
        let alone = late - short;
        if at < alone {
            return call(1, turns + at);
        }
        at -= alone;
        if at < 2 * (ahead - alone) {
            let backward = turns + alone + at / 2;
            return if at % 2 == 0 { call(1, backward) } else { call(2, backward.saturating_sub(late)) };
        }
        at -= 2 * (ahead - alone);
        if at < late { call(2, microbatches - late + at) } else { None }
    }

    /// The number of calls from `position` of a lane on that run side by side: a forward pass and a backward pass, with its
    /// gradients of weights if they are apart. Otherwise it is 1.
    pub fn together(&self, lane: usize, position: u64) -> usize {
        if !self.pairs {
            return 1;
        }
        if let Some(found) = &self.found {
            let Some(pairs) = found.pairs.get(lane) else { return 1 };
            return if pairs.binary_search(&(position as usize)).is_ok() { 3 } else { 1 };
        }
        let (ahead, total) = (self.forwards_ahead(lane), self.forwards_of_lane());
        let takes_turns = self.schedule == Schedule::OneFOneB && (ahead..2 * total - ahead).contains(&position);
        if takes_turns && (position - ahead).is_multiple_of(2) { 2 } else { 1 }
    }

    /// Forwards of a lane under `forward`, `gpipe` and `1f1b`.
    fn forwards_of_lane(&self) -> u64 {
        (self.all_microbatches() * self.virtual_stages.max(1)) as u64
    }

    /// Forwards of a lane before its first backward, under `gpipe` and `1f1b`.
    fn forwards_ahead(&self, lane: usize) -> u64 {
        let (lanes, chunks) = (self.num_lanes().max(1) as u64, self.virtual_stages.max(1) as u64);
        let (behind, total) = (lanes.saturating_sub(lane as u64 + 1), self.forwards_of_lane());
        match self.schedule {
            Schedule::OneFOneB if chunks == 1 && !self.pairs => behind.min(total),
            Schedule::OneFOneB if chunks == 1 || (self.all_microbatches() as u64).is_multiple_of(lanes) => {
                (2 * behind + (chunks - 1) * lanes + u64::from(self.pairs)).min(total)
            }
            _ => total,
        }
    }

    /// The calls of a lane, first to last.
    pub fn calls(&self, lane: usize) -> impl Iterator<Item = (usize, PipelineCall)> {
        let order = self.clone();
        (0..).map_while(move |position| order.call(lane, position))
    }

    /// The most microbatches whose activations a stage holds at once.
    pub fn in_flight(&self, stage: usize) -> u32 {
        let lanes = self.num_lanes().max(1);
        self.in_flight_of(self.placement.lane_of(stage, lanes)).get(stage / lanes).copied().unwrap_or(0)
    }

    /// True if a stage computes gradients of weights apart from its backward calls.
    fn splits(&self, stage: usize) -> bool {
        self.schedule == Schedule::ZbH1 || self.found.as_ref().is_some_and(|found| found.splits[stage])
    }

    /// The most bytes that a lane holds at once, if a microbatch that is in flight takes `of_stage` bytes on its stages,
    /// first to last.
    pub fn held_bytes(&self, lane: usize, of_stage: &[u64]) -> u64 {
        let (mut held, mut most) = (0u64, 0u64);
        for (round, begins) in self.begun_and_ended(lane) {
            let bytes = of_stage.get(round).copied().unwrap_or(0);
            held = if begins { held.saturating_add(bytes) } else { held.saturating_sub(bytes) };
            most = most.max(held);
        }
        most
    }

    /// The rounds of a lane in which a call begins to hold a microbatch's activations (true) or frees them, in order.
    fn begun_and_ended(&self, lane: usize) -> impl Iterator<Item = (usize, bool)> {
        let lanes = self.num_lanes().max(1);
        self.calls(lane).filter_map(move |(stage, call)| match call {
            PipelineCall::Forward { .. } => Some((stage / lanes, true)),
            PipelineCall::Backward { .. } if self.splits(stage) => None,
            PipelineCall::Backward { .. } | PipelineCall::Weights { .. } => Some((stage / lanes, false)),
            PipelineCall::Update { .. } => None,
        })
    }

    /// [`Order::in_flight`] of the stages of a lane, first to last.
    pub fn in_flight_of(&self, lane: usize) -> Vec<u32> {
        let mut held = vec![0u32; self.num_stages.div_ceil(self.num_lanes().max(1))];
        let mut most = held.clone();
        for (round, begins) in self.begun_and_ended(lane) {
            let held = &mut held[round];
            *held = match begins {
                // Without a backward pass, no activations are kept for one.
                true if !self.schedule.trains() => 1,
                true => *held + 1,
                false => held.saturating_sub(1),
            };
            most[round] = most[round].max(*held);
        }
        most
    }
}

/// Simulates one step of `num_microbatches` under `schedule`.
///
/// A call starts when the stage is free and its operand has arrived. Sending does not block the sender, but a link
/// carries one transfer at a time in each direction. Times must be finite and not negative. Passes that run side by side
/// ([`Order::pairing`]) start when the operands of both have arrived, and send when both have ended.
///
/// Example: S equal stages without transfers take `(S - 1 + B) * (forward_s + backward_s) + step_s` under `gpipe` and
/// `1f1b`.
pub fn simulate(stages: &[StageTimes], num_microbatches: u32, schedule: Schedule) -> Timeline {
    simulate_order(stages, &Order::new(schedule, stages.len(), num_microbatches), &mut |_, _, _, _| {})
}

/// The time of a step if the next may begin before it ends. `play` simulates a number of steps, of which the first fill
/// the pipeline and the last drain it. Bubbles and busy times are those of a step in between.
pub fn in_steady_state(order: &Order, play: impl Fn(&Order) -> Timeline) -> Timeline {
    // The microbatches of a step are at least as many as stages, so the second step finds the pipeline full.
    const STEPS: u32 = 4;
    let of_steps = |steps: u32| play(&Order { steps, ..order.clone() });
    let (short, long) = (of_steps(STEPS), of_steps(2 * STEPS));
    let each = |short: f64, long: f64| (long - short) / f64::from(STEPS);
    let step_s = each(short.step_s, long.step_s);
    let stage = |(short, long): (&StageTimeline, &StageTimeline)| {
        let busy_s = each(short.busy_s, long.busy_s);
        StageTimeline { busy_s, bubble_s: (step_s - busy_s).max(0.0) }
    };
    Timeline { step_s, stages: short.stages.iter().zip(&long.stages).map(stage).collect() }
}

/// Like [`simulate`], for any order. `watch` gets the stage, start and end of each call.
pub fn simulate_order(
    stages: &[StageTimes],
    order: &Order,
    watch: &mut dyn FnMut(usize, PipelineCall, f64, f64),
) -> Timeline {
    let num_stages = stages.len();
    let num_lanes = order.num_lanes();
    let lane_of = |stage: usize| order.placement.lane_of(stage, num_lanes);
    let width = order.all_microbatches();
    // Times at which a stage's operands arrive, by stage and microbatch; NaN until they are sent.
    let mut forward_ready_s = vec![f64::NAN; num_stages * width];
    let mut backward_ready_s = vec![f64::NAN; num_stages * width];
    forward_ready_s[..width.min(num_stages * width)].fill(0.0);
    let next = |l: usize, position: u64| -> Calls {
        let count = if order.paired_s.is_some() { order.together(l, position) } else { 1 };
        (position..position + count as u64).map_while(|position| order.call(l, position)).collect()
    };
    let mut lanes: Vec<Stream> = (0..num_lanes).map(|l| Stream { next: next(l, 0), ..Stream::default() }).collect();
    // Time at which a stage's last transfer to either neighbour has arrived.
    let mut sent_forward_s = vec![0.0f64; num_stages];
    let mut sent_backward_s = vec![0.0f64; num_stages];

    // A lane runs until it lacks an operand. The sender of that operand puts it back on the list.
    let mut runnable: Vec<usize> = (0..num_lanes).rev().collect();
    while let Some(l) = runnable.pop() {
        loop {
            let at = |s: usize, microbatch: u32| s * width + microbatch as usize;
            let ready_s = |&(s, call): &(usize, PipelineCall)| match call {
                PipelineCall::Forward { microbatch } => forward_ready_s[at(s, microbatch)],
                PipelineCall::Backward { microbatch } => backward_ready_s[at(s, microbatch)],
                // They follow a backward on the same devices.
                PipelineCall::Weights { .. } | PipelineCall::Update { .. } => 0.0,
            };
            let seconds = |&(s, call): &(usize, PipelineCall)| match call {
                PipelineCall::Forward { .. } => stages[s].forward_s,
                PipelineCall::Backward { .. } => stages[s].backward_s,
                PipelineCall::Weights { .. } => stages[s].weights_s,
                PipelineCall::Update { .. } => stages[s].step_s,
            };
            let calls = &lanes[l].next;
            if calls.is_empty() || calls.iter().any(|call| ready_s(call).is_nan()) {
                break;
            }
            let after = next(l, lanes[l].position + calls.len() as u64);
            let ready_s = calls.iter().map(ready_s).fold(0.0, f64::max);
            let alone_s: f64 = calls.iter().map(seconds).sum();
            let together_s = match (&order.paired_s, calls.as_slice()) {
                (Some(paired_s), [(forward, _), (backward, _), ..]) => paired_s[*forward][backward / num_lanes],
                _ => alone_s,
            };
            let (calls, end_s) = lanes[l].run(after, ready_s, together_s);
            // Side by side, calls are shown one after the other, each with its part of the time.
            let (mut start_s, part) = (end_s - together_s, if alone_s > 0.0 { together_s / alone_s } else { 1.0 });
            for of_stage in &calls {
                let call_s = part * seconds(of_stage);
                watch(of_stage.0, of_stage.1, start_s, if calls.len() == 1 { end_s } else { start_s + call_s });
                start_s += call_s;
            }
            for (s, call) in calls {
                match call {
                    PipelineCall::Forward { microbatch } if s + 1 < num_stages => {
                        sent_forward_s[s] = sent_forward_s[s].max(end_s) + stages[s].transfer_forward_s;
                        forward_ready_s[at(s + 1, microbatch)] = sent_forward_s[s];
                        runnable.push(lane_of(s + 1));
                    }
                    PipelineCall::Forward { microbatch } => backward_ready_s[at(s, microbatch)] = end_s,
                    PipelineCall::Backward { microbatch } if s > 0 => {
                        sent_backward_s[s] = sent_backward_s[s].max(end_s) + stages[s].transfer_backward_s;
                        backward_ready_s[at(s - 1, microbatch)] = sent_backward_s[s];
                        runnable.push(lane_of(s - 1));
                    }
                    PipelineCall::Backward { .. } | PipelineCall::Weights { .. } | PipelineCall::Update { .. } => {}
                }
            }
        }
    }

    // A lane's final work is that of all its stages.
    let finish_s = |l: usize| order.stages_of(l).map(|s| stages[s].step_s).sum::<f64>();
    let last_s = lanes.iter().map(|lane| lane.free_s).fold(0.0, f64::max);
    let done_s = |lane: &Stream| if order.meets { last_s } else { lane.free_s };
    let step_s = lanes.iter().enumerate().map(|(l, lane)| done_s(lane) + finish_s(l)).fold(0.0, f64::max);
    let timeline = |(l, lane): (usize, &Stream)| {
        let busy_s = lane.busy_s + finish_s(l);
        StageTimeline { busy_s, bubble_s: (step_s - busy_s).max(0.0) }
    };
    Timeline { step_s, stages: lanes.iter().enumerate().map(timeline).collect() }
}

/// Calls of a lane that run together, with their stages.
type Calls = SmallVec<[(usize, PipelineCall); 3]>;

/// The state of a lane in the simulation.
#[derive(Default)]
struct Stream {
    /// Number of calls made.
    position: u64,
    /// The calls at `position`; none past the last.
    next: Calls,
    free_s: f64,
    busy_s: f64,
}

impl Stream {
    /// Makes the next calls together, not before `ready_s`. The calls `after` come then. Returns the calls made, and
    /// their end.
    fn run(&mut self, after: Calls, ready_s: f64, seconds: f64) -> (Calls, f64) {
        let calls = std::mem::replace(&mut self.next, after);
        self.position += calls.len() as u64;
        self.busy_s += seconds;
        self.free_s = self.free_s.max(ready_s) + seconds;
        (calls, self.free_s)
    }
}

#[cfg(test)]
#[path = "pipeline_tests.rs"]
mod tests;
