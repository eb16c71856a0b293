//! The memory of each lane's devices in a simulated step: the tensors live at the peak with their lifetimes, totals by
//! category, and memory over time.

use super::Simulation;
use crate::report::Grid;
use crate::units::{bytes, seconds};
use altiplano_cost_models::pipeline::{PipelineCall, StageTimes};
use altiplano_ir::cluster::Group;
use altiplano_ir::program::{Call, Phase};
use altiplano_planner::predict::memory::{Category, Held, LaneMemory, name};
use altiplano_planner::predict::timing::StageTiming;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Number of tensors listed in words; the others share a line.
const LISTED: usize = 12;

/// A tensor held at the peak.
#[derive(Clone, Debug, PartialEq)]
pub struct HeldTensor {
    /// The model's name for it, with its op.
    pub name: String,
    pub category: Category,
    /// Bytes of one, and the number of microbatches that have one.
    pub bytes: u64,
    pub count: u64,
    /// Time at which the first of them is allocated and the last freed; the ends of the step for lasting ones.
    pub from_s: f64,
    pub to_s: f64,
}

impl HeldTensor {
    pub(crate) fn total_bytes(&self) -> u64 {
        self.bytes * self.count
    }
}

/// The memory of a lane's device over the step.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryTimeline {
    pub peak_bytes: u64,
    pub peak_s: f64,
    /// Tensors held at the peak, largest first.
    pub held: Vec<HeldTensor>,
    /// Times, and the bytes held from then on. Each call contributes its start, its peak and its end.
    pub points: Vec<(f64, u64)>,
}

impl MemoryTimeline {
    /// Bytes at the peak by category; they add up to it.
    pub fn by_category(&self) -> BTreeMap<Category, u64> {
        let mut sums = BTreeMap::new();
        for tensor in &self.held {
            *sums.entry(tensor.category).or_default() += tensor.total_bytes();
        }
        sums
    }
}

impl Simulation {
    /// Start and end of every call of each lane's schedule. Sends and receives take no device time. The calls after the
    /// last backward pass divide its remaining time.
    pub(super) fn call_times(&self) -> Vec<Vec<(f64, f64)>> {
        if let Some(exchanged) = &self.exchanged {
            return exchanged.calls.clone();
        }
        let mut spans: Vec<BTreeMap<(u32, Phase, u32), (f64, f64)>> = vec![BTreeMap::new(); self.plan.num_lanes()];
        self.timeline(&mut |stage, call, start, end| {
            let key = match call {
                PipelineCall::Forward { microbatch } => (stage as u32, Phase::Forward, microbatch),
                PipelineCall::Backward { microbatch } => (stage as u32, Phase::Backward, microbatch),
                PipelineCall::Weights { microbatch } => (stage as u32, Phase::Weights, microbatch),
                PipelineCall::Update { .. } => return,
            };
            spans[self.plan.lane_of(stage)].insert(key, (start, end));
        });
        let lanes = self.programs().programs.iter().zip(&spans).enumerate();
        let times = lanes.map(|(lane, (program, spans))| {
            let once_s: f64 = self.plan.stages_of(lane).map(|stage| self.timings[stage].0.step_s).sum();
            let is_once = |call: &&Call| matches!(call, Call::Run { microbatch: None, .. });
            let once = program.schedule.iter().filter(is_once).count();
            let last_s = spans.values().map(|s| s.1).fold(0.0, f64::max);
            let share_s = once_s / once.max(1) as f64;
            let mut done = 0;
            let run = |call: &Call| match *call {
                Call::Run { body, microbatch: Some(microbatch) } => {
                    let body = &program.bodies[body as usize];
                    spans.get(&(body.stage, body.phase, microbatch)).copied()
                }
                Call::Run { microbatch: None, .. } => {
                    let start_s = last_s + share_s * done as f64;
                    done += 1;
                    Some((start_s, start_s + share_s))
                }
                Call::Send { .. } | Call::Receive { .. } => None,
            };
            let mut found: Vec<Option<(f64, f64)>> = program.schedule.iter().map(run).collect();
            // A send follows the previous call; a receive precedes the next.
            let mut before_s = 0.0;
            for (call, time) in program.schedule.iter().zip(&mut found) {
                match (call, &time) {
                    (Call::Send { .. }, _) => *time = Some((before_s, before_s)),
                    (_, Some((_, end_s))) => before_s = *end_s,
                    _ => {}
                }
            }
            let mut after_s = before_s;
            for time in found.iter_mut().rev() {
                match time {
                    Some((start_s, _)) => after_s = *start_s,
                    None => *time = Some((after_s, after_s)),
                }
            }
            found.into_iter().flatten().collect()
        });
        times.collect()
    }

    /// The memory of each lane's devices over the step, or of each worker and server; a single stage is a lane of its
    /// own.
    pub fn memory(&self) -> Vec<MemoryTimeline> {
        let step_s = self.timeline(&mut |_, _, _, _| {}).step_s;
        let times = self.call_times();
        (0..times.len()).map(|lane| self.memory_of(lane, &times[lane], step_s)).collect()
    }

    fn memory_of(&self, lane: usize, times: &[(f64, f64)], step_s: f64) -> MemoryTimeline {
        let memory: &LaneMemory = &self.memories[lane];
        let at = |(position, point): (usize, u32)| {
            let Some(&(start_s, end_s)) = times.get(position) else { return 0.0 };
            let points = memory.kinds[memory.calls[position] as usize].points + 1;
            start_s + (end_s - start_s) * f64::from(point.min(points)) / f64::from(points)
        };
        let held = |h: &Held| {
            let tensor = &memory.tensors[h.tensor];
            HeldTensor {
                name: name(self.programs(), lane, tensor.origin),
                category: tensor.category,
                bytes: tensor.bytes,
                count: h.count,
                from_s: h.from.map_or(0.0, at),
                to_s: h.to.map_or(step_s, at),
            }
        };
        let (index, point) = memory.peak_at;
        let mut held: Vec<HeldTensor> = memory.held_at(index, point).iter().map(held).collect();
        held.sort_by(|a, b| b.total_bytes().cmp(&a.total_bytes()).then_with(|| a.name.cmp(&b.name)));
        let mut points: Vec<(f64, u64)> = Vec::new();
        for (position, (before, kind)) in memory.before_calls().enumerate() {
            let after = before + kind.left_bytes;
            let moments = [(0, before), (kind.most_at, before + kind.most_bytes), (kind.points + 1, after)];
            points.extend(moments.map(|(point, bytes)| (at((position, point)), bytes.max(0) as u64)));
        }
        MemoryTimeline { peak_bytes: memory.peak_bytes, peak_s: at(memory.peak_position()), held, points }
    }

    /// The call at a lane's peak of memory.
    pub fn moment(&self, lane: usize) -> String {
        let (position, _) = self.memories[lane].peak_position();
        let program = &self.programs().programs[lane];
        match program.schedule.get(position) {
            Some(&Call::Run { body, microbatch }) => {
                let phase = match program.bodies[body as usize].phase {
                    Phase::Totals => "the totals",
                    Phase::Forward => "forward",
                    Phase::Backward => "backward",
                    Phase::Weights => "the gradients of weights",
                    Phase::Reduce => "the reduction of gradients",
                    Phase::Norm => "the norm of gradients",
                    Phase::Update => "the update",
                };
                let of = match self.plan.virtual_stages {
                    1 => String::new(),
                    _ => format!(" in stage{}", program.bodies[body as usize].stage),
                };
                microbatch.map_or_else(|| format!("{phase}{of}"), |m| format!("{phase} of microbatch {m}{of}"))
            }
            Some(Call::Send { .. }) => "a send to another stage".into(),
            Some(Call::Receive { .. }) => "a receive from another stage".into(),
            None => "the end of the step".into(),
        }
    }

    /// Bytes that each device of a lane keeps in host memory.
    fn host_bytes(&self, lane: usize) -> u64 {
        self.plan.lanes().get(lane).map_or(0, |stage| stage.predicted.host_bytes)
    }

    /// Describes the memory at the peak of every lane, or of one stage.
    pub fn memory_text(&self, only: Option<usize>) -> String {
        let step_s = self.timeline(&mut |_, _, _, _| {}).step_s;
        let stage = |lane: usize| self.plan.stages.get(lane).unwrap_or(&self.plan.stages[0]);
        let limit = |lane: usize| self.plan.usable_bytes(stage(lane));
        // All workers hold the same as the first.
        let workers = self.plan.num_workers() as usize;
        let differs = |lane: usize| self.plan.servers.is_none() || lane == 0 || lane >= workers;
        let wanted = |(lane, _): &(usize, MemoryTimeline)| {
            differs(*lane) && only.is_none_or(|stage| self.plan.lane_of(stage) == *lane)
        };
        let lanes = self.memory().into_iter().enumerate().filter(wanted);
        let parts: Vec<String> =
            lanes.map(|(lane, memory)| self.memory_lines(lane, &memory, step_s, limit(lane))).collect();
        parts.join("\n\n")
    }

    fn memory_lines(&self, lane: usize, memory: &MemoryTimeline, step_s: f64, limit: u64) -> String {
        let mut lines = vec![format!(
            "{}: {} of {} on each device at the peak, {} into a step of {}",
            self.plan.program_name(lane),
            bytes(memory.peak_bytes),
            bytes(limit),
            seconds(memory.peak_s),
            seconds(step_s)
        )];
        let sums = memory.by_category();
        let sums: Vec<String> =
            sums.iter().map(|(category, sum)| format!("{} {}", category.name(), bytes(*sum))).collect();
        lines.push(format!("  {}", sums.join(", ")));
        let host_bytes = self.host_bytes(lane);
        if host_bytes > 0 {
            let what = self.plan.lanes()[lane].offload.words();
            lines.push(format!("  in the memory of its host: {what} {}", bytes(host_bytes)));
        }
        let mut table = Grid::new(&["category", "held", "each", "microbatches", "from", "to", "what"]);
        for tensor in memory.held.iter().take(LISTED) {
            let lasts = tensor.from_s == 0.0 && tensor.to_s == step_s;
            let time = |s: f64| if lasts { "always".to_string() } else { seconds(s) };
            table.row([
                tensor.category.name().to_string(),
                bytes(tensor.total_bytes()),
                bytes(tensor.bytes),
                if lasts { String::new() } else { tensor.count.to_string() },
                time(tensor.from_s),
                time(tensor.to_s),
                tensor.name.clone(),
            ]);
        }
        lines.push(table.right_but_last());
        let rest = &memory.held[memory.held.len().min(LISTED)..];
        if !rest.is_empty() {
            let sum: u64 = rest.iter().map(HeldTensor::total_bytes).sum();
            lines.push(format!("  {} in {} more; --json lists all", bytes(sum), rest.len()));
        }
        lines.join("\n")
    }

    /// Counters of the memory of each lane's devices, for the trace.
    pub(super) fn memory_events(&self) -> Vec<Value> {
        let mut events = Vec::new();
        for (lane, memory) in self.memory().into_iter().enumerate() {
            events.extend(memory.points.into_iter().map(|(at_s, held)| self.held_event(lane, at_s, held)));
        }
        events
    }

    /// The complete simulation as JSON; see docs/simulation.md.
    pub fn json(&self) -> Value {
        let timeline = self.timeline(&mut |_, _, _, _| {});
        let pass = |played: &altiplano_cost_models::timeline::Played| json!({"seconds": played.seconds, "issuing_s": played.host_s, "exposed_s": played.exposed_s});
        let device = |group: &Group| json!({"name": group.device.name, "memory_bytes": group.device.memory_bytes});
        let memories = self.memory();
        let stage = |(i, (times, timing)): (usize, &(StageTimes, StageTiming))| {
            let lane = &timeline.stages[self.plan.lane_of(i)];
            let memory = &memories[self.plan.lane_of(i)];
            let held = memory.held.iter().map(|t| {
                json!({
                    "name": t.name,
                    "category": t.category.name(),
                    "bytes": t.bytes,
                    "count": t.count,
                    "from_s": t.from_s,
                    "to_s": t.to_s,
                })
            });
            let categories: BTreeMap<&str, u64> =
                memory.by_category().iter().map(|(c, sum)| (c.name(), *sum)).collect();
            json!({
                "stage": i,
                "devices": self.plan.stages[i].devices,
                "device": device(self.plan.group_of(&self.plan.stages[i])),
                "forward": pass(&timing.forward),
                "backward": pass(&timing.backward),
                "weights": pass(&timing.weights),
                "transfer_forward_s": times.transfer_forward_s,
                "transfer_backward_s": times.transfer_backward_s,
                "after_backward_s": times.step_s,
                "busy_s": lane.busy_s,
                "bubble_s": lane.bubble_s,
                "memory": {
                    "host_bytes": self.host_bytes(i),
                    "peak_bytes": memory.peak_bytes,
                    "peak_s": memory.peak_s,
                    "categories": categories,
                    "held": held.collect::<Vec<Value>>(),
                    "timeline": memory.points.iter().map(|(at, bytes)| json!([at, bytes])).collect::<Vec<Value>>(),
                },
            })
        };
        let servers = self.exchanged.iter().flat_map(|exchanged| exchanged.servers.iter().enumerate());
        let servers = servers.map(|(s, &(compute_s, link_s))| {
            let memory = &memories[self.plan.num_workers() as usize + s];
            let categories: BTreeMap<&str, u64> =
                memory.by_category().iter().map(|(c, sum)| (c.name(), *sum)).collect();
            json!({
                "server": s,
                "compute_s": compute_s,
                "link_s": link_s,
                "memory": {"peak_bytes": memory.peak_bytes, "peak_s": memory.peak_s, "categories": categories},
            })
        });
        let servers: Vec<Value> = servers.collect();
        let mut simulated = json!({
            "format": "altiplano.simulation",
            "version": 1,
            "model": self.plan.model,
            "cluster": self.plan.cluster.name,
            "device": device(&self.plan.cluster.groups[0]),
            "schedule": self.plan.schedule.name(),
            "virtual_stages": self.plan.virtual_stages,
            "global_batch": self.plan.global_batch,
            "microbatch": self.plan.microbatch,
            "num_microbatches": self.plan.num_microbatches,
            "step_s": timeline.step_s,
            "stages": self.timings.iter().enumerate().map(stage).collect::<Vec<Value>>(),
        });
        if let Some(over) = &self.plan.servers {
            simulated["num_workers"] = json!(self.plan.num_workers());
            simulated["updates_late"] = json!(over.staleness());
            simulated["servers"] = json!(servers);
        }
        simulated
    }
}
