//! The timeline and memory of each lane's devices over a step, in a form whose size grows little with the step. Each
//! kind of call has its ops and its change of memory. The schedule lists calls with the waits before them.

use super::Table;
use crate::simulate::named_and_ops;
use altiplano_cost_models::kernels::{Kernel, KernelKind};
use altiplano_cost_models::pipeline::{PipelineCall, StageTimeline, StageTimes};
use altiplano_cost_models::timeline::{Stream, tasks};
use altiplano_ir::mesh::Mesh;
use altiplano_ir::op::HostRoute;
use altiplano_ir::plan::Plan;
use altiplano_ir::program::{Body, Call, Phase, Programs};
use altiplano_ir::reshard::Collective;
use altiplano_planner::lower::Prices;
use altiplano_planner::predict::memory::{CallKind, Category, LaneMemory};
use altiplano_planner::predict::timing::{BodyWork, StageTiming};
use serde::Serialize;
use std::collections::BTreeMap;

/// The classes in which memory is drawn: parameters, gradients, optimizer state, activations, and everything that lives
/// within a body or beside it.
const SHARES: usize = 5;
type Bytes = [i64; SHARES];

fn share(category: Category) -> usize {
    match category {
        Category::Parameters | Category::Stashed => 0,
        Category::Gradients => 1,
        Category::OptimizerState => 2,
        Category::Activations => 3,
        Category::Inputs | Category::Received | Category::Temporaries | Category::Workspace | Category::Other => 4,
    }
}

/// A simulated call: stage, call, start and end.
pub(crate) type Played = (usize, PipelineCall, f64, f64);

/// A block of devices that do the same work at the same time.
#[derive(Serialize)]
pub(crate) struct Lane {
    pub name: String,
    pub group: u32,
    pub submesh: (u32, u32),
    pub devices: Vec<u32>,
    pub stages: Vec<usize>,
    pub limit_bytes: u64,
    pub peak_bytes: u64,
    pub busy_s: f64,
    pub bubble_s: f64,
    /// Bytes held before the step.
    pub lasting: Bytes,
    pub kinds: Vec<Kind>,
    /// For each call its kind, its microbatch, and the seconds that the lane waits before it.
    pub calls: Vec<(usize, u32, f64)>,
}

/// Calls with the same time and memory.
#[derive(Serialize)]
pub(crate) struct Kind {
    pub stage: usize,
    /// `forward`, `backward`, `weights`, or `finish`: the work done once after the last of these.
    pub phase: &'static str,
    pub seconds: f64,
    /// Its list of ops, and the number that replaces the `*` in their names; each op adds its own offset.
    pub body: usize,
    pub first_number: u64,
    /// The fraction of the call that has passed, and the change of memory since its start, by class.
    pub memory: Vec<(f64, Bytes)>,
}

/// A kernel or a collective of a body.
#[derive(Serialize)]
pub(crate) struct OpFacts {
    /// The model's name for it, with `*` for the first number.
    pub name: String,
    /// The ops that it computes.
    pub ops: String,
    pub what: String,
    /// True if it communicates, and so runs beside computation.
    pub sends: bool,
    pub seconds: f64,
    /// Bytes read and written, or bytes sent.
    pub bytes: u64,
}

/// An op in a body: its number, its offset to the first number (negative if its name has none), and the seconds since
/// the end of the previous op that computes or, for a communicating op, communicates.
pub(crate) type Placed = (usize, i64, f64);

/// The bodies of all lanes. Bodies with the same ops are shared.
#[derive(Default)]
pub(crate) struct Bodies {
    pub ops: Table<OpFacts>,
    pub lists: Table<Vec<Placed>>,
}

/// A plan with its predictions.
pub(crate) struct PlayedPlan<'a> {
    pub plan: &'a Plan,
    pub programs: &'a Programs,
    pub work: &'a [Vec<BodyWork>],
    pub timings: &'a [(StageTimes, StageTiming)],
    pub prices: &'a [Prices<'a>],
}

/// An op with its time, before its body is looked up.
struct Spanned {
    facts: OpFacts,
    number: Option<u64>,
    from_s: f64,
    to_s: f64,
}

impl PlayedPlan<'_> {
    /// A lane, from its simulated calls and its memory, with the fraction of the step that it works.
    pub(crate) fn lane(
        &self,
        lane: usize,
        played: &[Played],
        memory: &LaneMemory,
        timeline: &StageTimeline,
        bodies: &mut Bodies,
    ) -> Lane {
        let (plan, first) = (self.plan, &self.plan.lanes()[lane]);
        let mut lasting = Bytes::default();
        for tensor in memory.tensors.iter().filter(|t| t.born.is_none()) {
            lasting[share(tensor.category)] += tensor.bytes as i64;
        }
        let mut kinds = Vec::new();
        let mut known: BTreeMap<(usize, &str, Vec<u32>), usize> = BTreeMap::new();
        let mut calls = Vec::new();
        let mut free_s = 0.0;
        for (call, changes) in grouped(self.programs, lane, memory).into_iter().enumerate() {
            let (stage, phase, microbatch, start_s, seconds) = match played.get(call) {
                Some(&(stage, call, start, end)) => {
                    let (phase, microbatch) = match call {
                        PipelineCall::Forward { microbatch } => ("forward", microbatch),
                        PipelineCall::Backward { microbatch } => ("backward", microbatch),
                        PipelineCall::Weights { microbatch } => ("weights", microbatch),
                        PipelineCall::Update { step } => ("finish", step),
                    };
                    (stage, phase, microbatch, start, end - start)
                }
                None => (lane, "finish", 0, free_s, plan.stages_of(lane).map(|s| self.timings[s].0.step_s).sum()),
            };
            let seconds = self.seconds(stage, phase).unwrap_or(seconds);
            let kind = *known.entry((stage, phase, changes.clone())).or_insert_with(|| {
                let (body, first_number) = bodies.number(self.ops(lane, stage, phase));
                let memory = moments(memory, &changes);
                kinds.push(Kind { stage, phase, seconds, body, first_number, memory });
                kinds.len() - 1
            });
            // A wait below a picosecond is rounding.
            let wait_s = if start_s - free_s < 1e-12 { 0.0 } else { start_s - free_s };
            calls.push((kind, microbatch, wait_s));
            free_s = start_s + seconds;
        }
        Lane {
            name: plan.lane_name(lane),
            group: first.group,
            submesh: first.submesh,
            devices: first.devices.clone(),
            stages: plan.stages_of(lane).collect(),
            limit_bytes: plan.usable_bytes(first),
            peak_bytes: memory.peak_bytes,
            busy_s: timeline.busy_s,
            bubble_s: timeline.bubble_s,
            lasting,
            kinds,
            calls,
        }
    }

    /// Seconds of a call of a microbatch.
    fn seconds(&self, stage: usize, phase: &str) -> Option<f64> {
        let times = &self.timings[stage].0;
        match phase {
            "forward" => Some(times.forward_s),
            "backward" => Some(times.backward_s),
            "weights" => Some(times.weights_s),
            _ => None,
        }
    }

    /// The ops of a stage's body, or those that all stages of a lane run once.
    fn ops(&self, lane: usize, stage: usize, phase: &str) -> Vec<Spanned> {
        let timing = &self.timings[stage].1;
        let body = |phase| self.work[stage].iter().filter(move |w| w.phase == phase);
        match phase {
            "forward" => self.spanned(stage, body(Phase::Forward), &timing.forward.spans, 0.0),
            "backward" => self.spanned(stage, body(Phase::Backward), &timing.backward.spans, 0.0),
            "weights" => self.spanned(stage, body(Phase::Weights), &timing.weights.spans, 0.0),
            _ => {
                let mut all = Vec::new();
                let mut start_s = 0.0;
                for stage in self.plan.stages_of(lane) {
                    let (times, timing) = &self.timings[stage];
                    let once = self.work[stage]
                        .iter()
                        .filter(|w| matches!(w.phase, Phase::Reduce | Phase::Norm | Phase::Update));
                    all.extend(self.spanned(stage, once, &timing.finish_spans, start_s));
                    start_s += times.step_s;
                }
                all
            }
        }
    }

    /// The ops of some bodies of a stage, with consecutive starts and ends.
    fn spanned<'b>(
        &self,
        stage: usize,
        work: impl Iterator<Item = &'b BodyWork>,
        spans: &[(f64, f64)],
        start_s: f64,
    ) -> Vec<Spanned> {
        let program = &self.programs.programs[self.plan.lane_of(stage)];
        let mut ops = Vec::new();
        let mut spans = spans.iter();
        for work in work {
            let Some(body) = program.body_of(stage as u32, work.phase) else { continue };
            let body = &program.bodies[body as usize];
            let tasks = tasks(&work.kernels, &work.prices(&self.prices[stage], &self.plan.execution));
            for ((kernel, sent), (task, (from, to))) in
                work.kernels.iter().zip(&work.sent).zip(tasks.iter().zip(&mut spans))
            {
                let (facts, number) = facts(body, kernel, sent, task.seconds, &program.mesh);
                let facts = OpFacts { sends: task.stream != Stream::Compute, ..facts };
                ops.push(Spanned { facts, number, from_s: start_s + from, to_s: start_s + to });
            }
        }
        ops
    }
}

/// The name and work of an op, and the first number of its name.
fn facts(
    body: &Body,
    kernel: &Kernel,
    sent: &Option<(Collective, u64, u64)>,
    seconds: f64,
    mesh: &Mesh,
) -> (OpFacts, Option<u64>) {
    let (named, ops) = named_and_ops(body, kernel);
    let (name, number) = numbered(named.unwrap_or_default());
    let what = match (&kernel.kind, sent) {
        (_, Some((collective, ..))) => over(collective, mesh),
        (KernelKind::Matmul(_), _) => "matmul".into(),
        (KernelKind::Convolution { .. }, _) => "convolution".into(),
        (KernelKind::Fused { .. }, _) => "elementwise".into(),
        (KernelKind::Attention(_), _) => "attention".into(),
        (KernelKind::Indexed, _) => "lookup".into(),
        (KernelKind::Sort { .. }, _) => "sort".into(),
        (KernelKind::Collective, _) => "collective".into(),
        (KernelKind::HostCopy(HostRoute::Load), _) => "from host".into(),
        (KernelKind::HostCopy(HostRoute::Store), _) => "to host".into(),
    };
    let bytes = match sent {
        Some((_, operand, result)) => *operand.max(result),
        None => kernel.read_bytes.saturating_add(kernel.written_bytes),
    };
    (OpFacts { name, ops, what, sends: false, seconds, bytes }, number)
}

/// `all_reduce over tensor`.
pub(crate) fn over(collective: &Collective, mesh: &Mesh) -> String {
    let axes: Vec<&str> = collective.axes().iter().map(|&a| mesh.name(a)).collect();
    format!("{} over {}", collective.name(), axes.join(", "))
}

/// Replaces the first number of a name by `*`, and returns it. A number with leading zeros stays, since these would be
/// lost.
fn numbered(name: &str) -> (String, Option<u64>) {
    let Some(start) = name.find(|c: char| c.is_ascii_digit()) else { return (name.to_string(), None) };
    let rest = name[start..].trim_start_matches(|c: char| c.is_ascii_digit());
    let digits = &name[start..name.len() - rest.len()];
    let number = digits.parse::<u32>().ok().filter(|n| n.to_string() == digits && !name.contains('*'));
    match number {
        Some(number) => (format!("{}*{rest}", &name[..start]), Some(number.into())),
        None => (name.to_string(), None),
    }
}

impl Bodies {
    /// The number of a list of ops, and the smallest number in their names.
    fn number(&mut self, ops: Vec<Spanned>) -> (usize, u64) {
        let first = ops.iter().filter_map(|op| op.number).min().unwrap_or(0);
        let mut end_s = [0.0f64; 2];
        let mut list = Vec::with_capacity(ops.len());
        for op in ops {
            let end_s = &mut end_s[usize::from(op.facts.sends)];
            let gap_s = op.from_s - *end_s;
            // Sums of seconds differ in their last digits, which would make equal bodies differ.
            let gap_s = (gap_s * 1e12).round() / 1e12;
            *end_s = op.to_s;
            let number = op.number.map_or(-1, |n| (n - first) as i64);
            list.push((self.ops.number(op.facts), number, if gap_s == 0.0 { 0.0 } else { gap_s }));
        }
        (self.lists.number(list), first)
    }
}

/// The calls of a lane that take time, each with the kinds of its sends and receives, which take none. All work done
/// once per step is the last call.
fn grouped(programs: &Programs, lane: usize, memory: &LaneMemory) -> Vec<Vec<u32>> {
    let mut calls: Vec<Vec<u32>> = Vec::new();
    let mut received: Vec<u32> = Vec::new();
    let mut is_last = false;
    for (call, &kind) in programs.programs[lane].schedule.iter().zip(&memory.calls) {
        match (call, calls.last_mut()) {
            (_, Some(last)) if is_last => last.push(kind),
            (Call::Send { .. }, Some(last)) => last.push(kind),
            (Call::Send { .. } | Call::Receive { .. }, _) => received.push(kind),
            (Call::Run { microbatch, .. }, _) => {
                is_last = microbatch.is_none();
                received.push(kind);
                calls.push(std::mem::take(&mut received));
            }
        }
    }
    calls
}

/// Maximum number of moments of a body.
const MOST_MOMENTS: usize = 24;

/// The change of memory in a group of calls. Bodies share its time; the rest happens at its start and end. A body is
/// divided into stretches of equal length. Each contributes its fullest point, and the body its end.
fn moments(memory: &LaneMemory, calls: &[u32]) -> Vec<(f64, Bytes)> {
    let kind = |&k: &u32| &memory.kinds[k as usize];
    let runs = |k: &&u32| matches!(kind(k).call, CallKind::Run(_));
    let num_bodies = calls.iter().filter(runs).count().max(1) as f64;
    let (mut done, mut held) = (0.0, Bytes::default());
    let mut moments = Vec::new();
    for k in calls {
        let last = kind(k).points as usize + 1;
        let width = if runs(&k) { 1.0 } else { 0.0 };
        let mut course = vec![held; last + 1];
        for (category, changes) in memory.course(*k) {
            course.iter_mut().zip(changes).for_each(|(at, change)| at[share(category)] += change);
        }
        for stretch in (0..last).collect::<Vec<_>>().chunks(last.div_ceil(MOST_MOMENTS)) {
            let total = |&point: &usize| course[point].iter().sum::<i64>();
            // Among equal points the first.
            let Some(fullest) = stretch.iter().copied().rev().max_by_key(total) else { continue };
            let at = done + width * fullest as f64 / last as f64;
            if course[fullest] != moments.last().map_or(Bytes::default(), |m: &(f64, Bytes)| m.1) {
                moments.push((at / num_bodies, course[fullest]));
            }
        }
        done += width;
        held = course[last];
        moments.push((done / num_bodies, held));
    }
    moments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_number_of_a_name_is_told_apart() {
        let numbers = |name: &str| numbered(name);
        assert_eq!(numbers("params['h12']['fc1']"), ("params['h*']['fc1']".to_string(), Some(12)));
        assert_eq!(numbers("block.007.w"), ("block.007.w".to_string(), None));
        assert_eq!(numbers("wte"), ("wte".to_string(), None));
        assert_eq!(numbers("a*b3"), ("a*b3".to_string(), None));
    }
}
