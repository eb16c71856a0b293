//! Simulates one step of a plan: the timeline of every stage, the reasons for each kernel's time, and the same as a
//! trace for a browser.

mod memory;
mod trace;

pub use memory::{HeldTensor, MemoryTimeline};
pub use trace::Recorded;

use crate::Error;
use crate::measured_costs::Profiled;
use crate::units::{bytes, digits, percent, plural, seconds};
use altiplano_cost_models::collective::{self, Operation};
use altiplano_cost_models::compute::Bound;
use altiplano_cost_models::kernels::{Kernel, KernelKind};
use altiplano_cost_models::pipeline::{Order, PipelineCall, StageTimes, Timeline};
use altiplano_cost_models::profile::Profile;
use altiplano_cost_models::timeline::Played;
use altiplano_cost_models::{Compute, CostModel, Costs, Rooflines, catalogue};
use altiplano_ir::cluster::Device;
use altiplano_ir::plan::Plan;
use altiplano_ir::program::{Body, Phase, Programs};
use altiplano_ir::reshard::Collective;
use altiplano_ir::work::Term;
use altiplano_planner::PlanFailure;
use altiplano_planner::explain::account::{Account, Part, accounts_of, of_lanes};
use altiplano_planner::explain::alternatives::overlaps;
use altiplano_planner::lower::{Prices, TrainingGraphs, lower_deduped, lowered};
use altiplano_planner::predict::memory::LaneMemory;
use altiplano_planner::predict::timing::{BodyWork, StageTiming};
use altiplano_planner::predict::{Exchanged, exchange_of, lane_memories, played, timings_of, whole_work_of};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::sync::OnceLock;

/// A call of a stage's body with its time. Everything after the last backward pass of a step is one call without a
/// microbatch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CallSpan {
    pub stage: usize,
    pub phase: Phase,
    pub microbatch: Option<u32>,
    pub start_s: f64,
    pub end_s: f64,
}

/// The simulated step of a plan.
pub struct Simulation {
    plan: Plan,
    derived: TrainingGraphs,
    /// The lowered programs of all lanes, created on demand. Predicted times need only those that differ.
    programs: OnceLock<Programs>,
    costs: Box<dyn Costs + Send>,
    /// The same as `costs`, if it is a measured profile.
    profiled: Option<Profiled>,
    work: Vec<Vec<BodyWork>>,
    timings: Vec<(StageTimes, StageTiming)>,
    /// Memory by program: of a lane, or of a worker or server.
    memories: Vec<LaneMemory>,
    /// The communication between workers and parameter servers, if there are any.
    exchanged: Option<Exchanged>,
}

impl Simulation {
    /// Simulates a plan's step by the figures of its cluster, or by a measured profile of this machine.
    pub fn new(plan: Plan, profile: Option<&Profile>) -> Result<Simulation, Error> {
        let derived = TrainingGraphs::of(&plan);
        let derived = derived.map_err(PlanFailure::from)?;
        let profiled = profile.map(|p| Profiled::of_plan(p, &plan)).transpose()?;
        let costs: Box<dyn Costs + Send> = match &profiled {
            Some(profiled) => Box::new(profiled.clone()),
            None => Box::new(Rooflines::of(&plan.cluster)),
        };
        // Workers on one machine slow each other down, which requires all programs.
        let alone = costs.runtime().is_none();
        let deduped = lower_deduped(&plan, &derived, &Rooflines::of(&plan.cluster), alone);
        let work = whole_work_of(&plan, &deduped, &*costs);
        let timings = timings_of(&plan, &deduped, &work, &*costs);
        let exchanged = exchange_of(&plan, &deduped, &work, &*costs).map(|(_, exchanged)| exchanged);
        let memories = lane_memories(&plan, &deduped, &work);
        Ok(Simulation { plan, derived, programs: OnceLock::new(), costs, profiled, work, timings, memories, exchanged })
    }

    /// The programs of all lanes.
    fn programs(&self) -> &Programs {
        self.programs.get_or_init(|| lowered(&self.plan, &self.derived, &Rooflines::of(&self.plan.cluster)))
    }

    pub fn num_stages(&self) -> usize {
        self.timings.len()
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The time account of each stage.
    pub fn accounts(&self) -> Vec<Account> {
        accounts_of(&self.plan, &self.work, &self.timings)
    }

    /// The link that a stage's collectives over some axes (`data+tensor`) use, in words.
    pub(crate) fn link_of(&self, stage: usize, axes: &str) -> Option<String> {
        let of_plan = self.plan.stages.get(stage)?;
        let group = self.plan.group_of(of_plan);
        let axes: Vec<_> = axes.split('+').map(|name| of_plan.mesh.find(name)).collect::<Option<_>>()?;
        let prices = self.prices(stage);
        let rate = |bytes_per_s: f64| format!("{}/s", bytes(bytes_per_s as u64));
        Some(match prices.link(&axes).nodes {
            0 | 1 => format!("the links within a node ({} a device)", rate(group.intra_node.bytes_per_s)),
            _ => {
                let nics = f64::from(group.inter_node.nics);
                format!("the network ({} a node)", rate(nics * group.inter_node.bytes_per_s))
            }
        })
    }

    fn order(&self) -> Order {
        Order::of(&self.plan)
    }

    fn timeline(&self, watch: &mut dyn FnMut(usize, PipelineCall, f64, f64)) -> Timeline {
        played(&self.plan, &self.timings, &self.order(), watch)
    }

    /// The duration of a step, and the calls of each lane in order. If steps overlap, this is a single step, which
    /// takes longer than the interval between steps.
    pub fn calls(&self) -> (f64, Vec<Vec<CallSpan>>) {
        let mut lanes: Vec<Vec<CallSpan>> = vec![Vec::new(); self.plan.num_lanes()];
        let timeline = self.timeline(&mut |stage, call, start_s, end_s| {
            let (phase, microbatch) = match call {
                PipelineCall::Forward { microbatch } => (Phase::Forward, microbatch),
                PipelineCall::Backward { microbatch } => (Phase::Backward, microbatch),
                PipelineCall::Weights { microbatch } => (Phase::Weights, microbatch),
                PipelineCall::Update { .. } => return,
            };
            let span = CallSpan { stage, phase, microbatch: Some(microbatch), start_s, end_s };
            lanes[self.plan.lane_of(stage)].push(span);
        });
        for (stage, (times, _)) in self.timings.iter().enumerate().filter(|(_, t)| t.0.step_s > 0.0) {
            let lane = &mut lanes[self.plan.lane_of(stage)];
            let start_s = lane.last().map_or(0.0, |call| call.end_s);
            let (phase, end_s) = (Phase::Update, start_s + times.step_s);
            lane.push(CallSpan { stage, phase, microbatch: None, start_s, end_s });
        }
        let end_s =
            lanes.iter().filter_map(|calls| calls.last()).map(|call| call.end_s).fold(timeline.step_s, f64::max);
        (if self.order().late(0).is_empty() { timeline.step_s } else { end_s }, lanes)
    }

    /// The prices on a stage's mesh.
    fn prices(&self, stage: usize) -> Prices<'_> {
        let stage = &self.plan.stages[stage];
        Prices::new(self.costs.of_group(stage.group), self.plan.group_of(stage), stage.submesh, &stage.mesh)
    }

    /// The cost model of each group that has a stage.
    fn used(&self) -> impl Iterator<Item = &dyn CostModel> {
        let groups: BTreeSet<u32> = self.plan.stages.iter().map(|s| s.group).collect();
        groups.into_iter().map(|group| self.costs.of_group(group))
    }

    /// Describes the work of each stage. Equal adjacent stages share a line.
    pub fn text(&self) -> String {
        let timeline = self.timeline(&mut |_, _, _, _| {});
        let lanes = of_lanes(&self.plan, &self.accounts());
        let mut out = String::new();
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "{} on {}: {} a step of {} in microbatches of {}, {}{}\n",
            self.plan.model,
            self.plan.cluster.name,
            seconds(timeline.step_s),
            plural(self.plan.global_batch, "sample"),
            self.plan.microbatch,
            self.plan.schedule.name(),
            overlaps(&self.plan)
        );
        let _ = writeln!(
            out,
            "  stage        forward                         backward                        after the last  waiting\n  {:11}  seconds  issuing  sending alone   seconds  issuing  sending alone   backward        a step",
            ""
        );
        let lines: Vec<String> = self
            .timings
            .iter()
            .enumerate()
            .map(|(i, (times, timing))| {
                let waiting_s = lanes[self.plan.lane_of(i)].part_s(Part::Waiting);
                let pass = |parts: &[&Played]| {
                    let sum = |of: fn(&Played) -> f64| seconds(parts.iter().map(|p| of(p)).sum());
                    format!("{:>7}  {:>7}  {:>13}", sum(|p| p.seconds), sum(|p| p.host_s), sum(|p| p.exposed_s))
                };
                format!(
                    "{}   {}   {:>14}  {:>7}",
                    pass(&[&timing.forward]),
                    pass(&[&timing.backward, &timing.weights]),
                    seconds(times.step_s),
                    seconds(waiting_s)
                )
            })
            .collect();
        let mut first = 0;
        while first < lines.len() {
            let same = lines[first..].iter().take_while(|l| **l == lines[first]).count();
            let name = if same == 1 { format!("stage{first}") } else { format!("stage{first}-{}", first + same - 1) };
            let _ = writeln!(out, "  {name:11}  {}", lines[first]);
            first += same;
        }
        if let Some(exchanged) = &self.exchanged {
            let _ = write!(out, "{}", self.servers_text(exchanged, timeline.step_s));
        }
        let _ = write!(
            out,
            "\n  issuing: the host's part, while the device may be busy; sending alone: nothing is computed meanwhile"
        );
        for cost in self.used() {
            let _ = write!(out, "\n  figures of {}: {}", cost.device().name, self.source(cost));
        }
        out
    }

    /// Describes the work of parameter servers in a step, and the delay of their gradients.
    fn servers_text(&self, exchanged: &Exchanged, step_s: f64) -> String {
        let mut out = format!(
            "\n  a worker's messages are on their way for {}; {} workers, each as stage0\n",
            seconds(exchanged.sent_s),
            self.plan.num_workers()
        );
        for (s, &(compute_s, link_s)) in exchanged.servers.iter().enumerate() {
            let (compute, link) = (seconds(compute_s), seconds(link_s));
            let part = percent((compute_s + link_s) / step_s.max(f64::MIN_POSITIVE));
            let _ = writeln!(
                out,
                "  server{s}: {compute} of adding up and updating, its link taken for {link} ({part} of a step)"
            );
        }
        if let Some(over) = self.plan.servers.as_ref().filter(|over| over.asynchronous) {
            let _ = writeln!(out, "  gradients are {} late", plural(over.staleness().into(), "update"));
        }
        out
    }

    /// The source of a device's figures.
    fn source(&self, cost: &dyn CostModel) -> String {
        if let Some(profiled) = &self.profiled {
            return profiled.profile().label();
        }
        if cost.device().constants.is_some() {
            "calibrated, with the constants that the plan's device has".into()
        } else if catalogue::is_fitted(&cost.device().name) {
            "calibrated on published steps or kernels of this device (cost_models/src/fitted.rs)".into()
        } else {
            "roofline of its datasheet".into()
        }
    }

    /// Describes the kernels that compute a value or op called `name`, with their costs and the reasons. `None` if
    /// there is none.
    pub fn explain(&self, name: &str) -> Option<String> {
        let mut out = String::new();
        for (i, bodies) in self.work.iter().enumerate() {
            let program = &self.programs().programs[self.plan.lane_of(i)];
            let prices = self.prices(i);
            for work in bodies {
                let Some(body) = program.body_of(i as u32, work.phase) else { continue };
                let body = &program.bodies[body as usize];
                let costs = work.prices(&prices, &self.plan.execution);
                for ((kernel, price), sent) in work.kernels.iter().zip(&costs).zip(&work.sent) {
                    if !concerns(body, kernel, name) {
                        continue;
                    }
                    let measured = self.profiled.as_ref().and_then(|p| measured(p, kernel));
                    let why = match sent {
                        _ if measured.is_some() => measured.unwrap_or_default(),
                        Some((collective, operand, result)) => {
                            let link = prices.link(collective.axes());
                            let operation = match collective {
                                Collective::ReduceScatter { .. } => Operation::ReduceScatter,
                                Collective::AllGather { .. } => Operation::AllGather,
                                Collective::AllToAll { .. } => Operation::AllToAll,
                                Collective::Halo { .. } | Collective::Shift { .. } => Operation::SendReceive,
                                _ => Operation::AllReduce,
                            };
                            let sent = *operand.max(result);
                            let best = collective::best(operation, sent, link);
                            format!(
                                "{:?} with protocol {:?} of {} over {} devices on {} nodes: {} to start, {} of hops, {} on the wire, at {:.3} of that rate; waiting for the last device {}",
                                best.algorithm,
                                best.protocol,
                                bytes(sent),
                                link.devices,
                                link.nodes,
                                seconds(best.start_s),
                                seconds(best.hops_s),
                                seconds(best.wire_s),
                                Compute::new(prices.cost.device().clone()).constants.collective_efficiency,
                                seconds(prices.cost.waiting_s(link.devices))
                            )
                        }
                        // If the profile lacks the kernel, the roofline prices it.
                        None if self.profiled.is_some() => {
                            format!("source roofline: {}", why(&compute(work, prices.cost.device()), kernel))
                        }
                        None => why(&compute(work, prices.cost.device()), kernel),
                    };
                    let _ = writeln!(
                        out,
                        "stage{i} {:8} {:>8}  {}\n    {why}",
                        work.phase.name(),
                        seconds(price.seconds),
                        title(body, kernel)
                    );
                }
            }
        }
        if out.is_empty() {
            return None;
        }
        let figures = self.used().map(|cost| format!("figures of {}: {}", cost.device().name, self.source(cost)));
        out.push_str(&figures.collect::<Vec<_>>().join("\n"));
        Some(out)
    }
}

/// The formulas that price a body's kernels.
fn compute(work: &BodyWork, device: &Device) -> Compute {
    let compute = Compute::new(device.clone());
    if work.is_once() { compute.of_updates() } else { compute }
}

/// A kernel's time by the formulas, and its bottleneck.
fn why(compute: &Compute, kernel: &Kernel) -> String {
    let moved = kernel.read_bytes + kernel.written_bytes;
    let c = &compute.constants;
    let memory = format!(
        "{} read and {} written at {:.3} of {}/s: {}",
        bytes(kernel.read_bytes),
        bytes(kernel.written_bytes),
        compute.memory_part(&kernel.kind),
        bytes(compute.device.memory_bytes_per_s as u64),
        seconds(moved as f64 / (compute.device.memory_bytes_per_s * compute.memory_part(&kernel.kind)))
    );
    let arithmetic = match &kernel.kind {
        KernelKind::Matmul(m) => format!(
            "{} x [{}, {}] x [{}, {}] {}: {:.3e} FLOP in tiles at {:.3} of the peak: {}",
            m.batch,
            m.m,
            m.k,
            m.k,
            m.n,
            m.dtype,
            m.flop(),
            c.matmul_efficiency,
            seconds(compute.matmul_s(m))
        ),
        KernelKind::Convolution { flop, .. } => {
            format!("{flop:.3e} FLOP at {:.3} of the peak", c.matmul_efficiency)
        }
        KernelKind::Attention(a) => {
            let [forward, backward, fill] = compute.attention(a.software);
            let efficiency = if a.backward { backward } else { forward };
            let (share, keys) = (digits(a.share), a.keys);
            format!(
                "fused attention: {share} of {:.3e} FLOP over {keys} keys, and {fill} keys to fill, at {efficiency:.3} of the peak: {}",
                a.flop,
                seconds(compute.attention_s(a))
            )
        }
        KernelKind::Fused { operations } if c.vector_flops > 0.0 => {
            format!("{operations:.3e} operations at {:.3e}/s", c.vector_flops)
        }
        KernelKind::Fused { operations } => format!("{operations:.3e} operations"),
        KernelKind::Indexed => "lookups".into(),
        KernelKind::Sort { passes } => format!("{passes} passes"),
        KernelKind::HostCopy(_) => {
            let link_s = seconds(compute.host_copy_s(kernel.read_bytes as f64));
            return format!("{} over the link to the host: {link_s}", bytes(kernel.read_bytes));
        }
        KernelKind::Collective => String::new(),
    };
    let bound = match compute.kernel(kernel).bound {
        Bound::Arithmetic => "bound by arithmetic",
        Bound::Memory => "bound by memory",
        Bound::Launch => "bound by its launch",
    };
    format!("{bound}; {arithmetic}; {memory}; launch {}", seconds(compute.device.launch_s))
}

/// A kernel in the terms of a profile: `source profile: 3 x multiply f32 [4096]: 1.2 us`. `None` if the profile lacks a
/// term.
fn measured(profiled: &Profiled, kernel: &Kernel) -> Option<String> {
    let work = profiled.work(kernel)?;
    let term = |term: &Term| {
        let priced = profiled.term(term, &work)?;
        let size: Vec<String> = term.size.iter().map(|&n| digits(n)).collect();
        let threads = if term.threads > 1 { format!(" on {} threads", term.threads) } else { String::new() };
        let outside = if priced.outside > 1.0 {
            format!(" (roofline from the end of the profile, {} times outside)", digits(priced.outside))
        } else {
            String::new()
        };
        let (times, size) = (digits(term.times), size.join(", "));
        Some(format!(
            "{times} x {} {} [{size}]{threads}: {}{outside}",
            term.family,
            term.dtype,
            seconds(priced.seconds)
        ))
    };
    let terms: Vec<String> = work.terms.iter().map(term).collect::<Option<_>>()?;
    Some(format!("source profile, interpolated log against log and added up: {}", terms.join("; ")))
}

/// Names a kernel by its last named node and its ops.
fn title(body: &Body, kernel: &Kernel) -> String {
    match named_and_ops(body, kernel) {
        (Some(name), ops) => format!("{name} ({ops})"),
        (None, ops) => ops,
    }
}

/// The last name in a kernel, and its ops in words.
pub(crate) fn named_and_ops<'a>(body: &'a Body, kernel: &Kernel) -> (Option<&'a str>, String) {
    let graph = &body.graph;
    let named = kernel.nodes.iter().rev().map(|v| graph.node(*v).name.as_str()).find(|name| !name.is_empty());
    // A kernel that computes nothing copies between tensors and the buffer of a collective.
    let last = kernel.nodes.last().map_or("copy", |v| graph.node(*v).op.name());
    let ops = if kernel.nodes.len() > 1 { format!("{} ops to {last}", kernel.nodes.len()) } else { last.to_string() };
    (named, ops)
}

/// Returns whether a kernel computes a value called `name`, a part of one, or such an op.
fn concerns(body: &Body, kernel: &Kernel, name: &str) -> bool {
    kernel.nodes.iter().any(|v| {
        let node = body.graph.node(*v);
        let inside = node.name.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        inside || node.op.name() == name
    })
}
