//! Writes a step as Chrome trace events (for Perfetto and chrome://tracing), both simulated and as recorded on this
//! machine. Both have the same tracks and names, so that they can be compared. Measured times are summed in the same
//! account as predictions.

use super::{Simulation, title};
use crate::report::Grid;
use crate::units::{digits, plural, seconds};
use altiplano_cost_models::kernels::{Kernel, KernelKind};
use altiplano_cost_models::timeline::{Stream, stream};
use altiplano_ir::cluster::DeviceKind;
use altiplano_ir::graph::ValueId;
use altiplano_ir::program::{Body, Call, Phase};
use altiplano_planner::explain::account::{Account, Work, of_lanes};
use altiplano_planner::predict::timing::BodyWork;
use altiplano_runtime::recording::{Recording, Span, What};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// A step as recorded on the first device of each lane.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recorded {
    pub seconds: f64,
    pub recordings: Vec<Recording>,
}

/// The name of a call in traces: `forward 3`, or `reduce and update` for the work done once per step.
pub(crate) fn trace_name(phase: Phase, microbatch: Option<u32>) -> String {
    microbatch.map_or_else(|| "reduce and update".to_string(), |m| format!("{} {m}", phase.name()))
}

/// Kinds of work below this fraction of a step share one line of a table.
const SHOWN: f64 = 1e-3;

impl Simulation {
    /// The simulated step. Each lane is a process with a track of its calls, the kernels of the first microbatch, and a
    /// counter of the memory of each device.
    pub fn trace(&self) -> Value {
        let mut events = self.tracks();
        let (step_s, lanes) = self.calls();
        let mut first: Vec<(usize, Phase, f64)> = Vec::new();
        for call in lanes.into_iter().flatten() {
            if call.microbatch == Some(0) {
                first.push((call.stage, call.phase, call.start_s));
            }
            let lane = self.plan.lane_of(call.stage);
            events.push(self.call_event(lane, call.stage, call.phase, call.microbatch, call.start_s, call.end_s));
        }
        events.extend(self.exchange_events());
        for (stage, phase, start_s) in first {
            let Some((work, body)) = self.work_and_body(stage, phase) else { continue };
            let timing = &self.timings[stage].1;
            let played = match phase {
                Phase::Forward => &timing.forward,
                Phase::Backward => &timing.backward,
                Phase::Weights => &timing.weights,
                Phase::Totals | Phase::Reduce | Phase::Norm | Phase::Update => continue,
            };
            for (kernel, &(from, to)) in work.kernels.iter().zip(&played.spans) {
                let sends = stream(&kernel.kind) != Stream::Compute;
                let lane = self.plan.lane_of(stage);
                events.push(event(title(body, kernel), lane, track(sends), start_s + from, start_s + to));
            }
        }
        events.extend(self.memory_events());
        json!({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"step_s": step_s}})
    }

    /// A recorded step, under the names of [`Simulation::trace`]. Kernels are those of the simulation, each with the
    /// runtime calls that make its values. A kernel that the runtime computes as part of another takes no time.
    /// Separately timed kernels describe themselves in `args`, which `altiplano calibrate` reads.
    pub fn trace_of(&self, recorded: &Recorded) -> Value {
        let mut events = self.tracks();
        for recording in &recorded.recordings {
            let lane = recording.program as usize;
            let program = &self.programs().programs[lane];
            let mut once: BTreeMap<u32, (f64, f64)> = BTreeMap::new();
            for (position, span) in calls(recording) {
                let Some(&Call::Run { body, microbatch }) = program.schedule.get(position) else { continue };
                let body = &program.bodies[body as usize];
                if microbatch.is_some() {
                    let stage = body.stage as usize;
                    events.push(self.call_event(lane, stage, body.phase, microbatch, span.start_s, span.end_s));
                } else if self.plan.servers.is_some() {
                    events.push(event(body.name.clone(), lane, 0, span.start_s, span.end_s));
                } else {
                    let all = once.entry(body.stage).or_insert((span.start_s, span.end_s));
                    *all = (all.0.min(span.start_s), all.1.max(span.end_s));
                }
                if microbatch == Some(0) {
                    events.extend(self.kernel_events(recording, position, body, span));
                }
            }
            for (stage, (start_s, end_s)) in once {
                events.push(self.call_event(lane, stage as usize, Phase::Update, None, start_s, end_s));
            }
            for span in &recording.spans {
                if let What::AsyncCollective { position, node } = span.what
                    && let Some(&Call::Run { body, .. }) = program.schedule.get(position)
                    && let Some(node) = program.bodies[body as usize].graph.nodes.get(node.index())
                {
                    let name = format!("{} of the step before", node.op.name());
                    events.push(event(name, lane, track(true), span.start_s, span.end_s));
                }
            }
            let held = calls(recording).map(|(_, span)| (span.end_s, span.held_bytes));
            events.extend(held.map(|(at_s, held)| self.held_event(lane, at_s, held)));
        }
        let device = &self.plan.cluster.groups[0].device;
        // In the format of PyTorch's profiler.
        let properties = json!([{"name": device.name, "totalGlobalMem": device.memory_bytes}]);
        json!({
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "deviceProperties": properties,
            "otherData": {"step_s": recorded.seconds},
        })
    }

    /// The kernels of one recorded call of a body.
    fn kernel_events(&self, recording: &Recording, position: usize, body: &Body, call: &Span) -> Vec<Value> {
        let Some(work) = self.work[body.stage as usize].iter().find(|w| w.phase == body.phase) else {
            return Vec::new();
        };
        let owner = owners(work);
        let mut timed: BTreeMap<usize, (u32, bool, f64)> = BTreeMap::new();
        let mut spans: Vec<(usize, &Span)> = Vec::new();
        for (node, span) in kernels_of(recording, position) {
            let Some(kernel) = owner(node) else { continue };
            let known = timed.entry(kernel).or_insert((0, false, 0.0));
            known.0 += 1;
            known.1 |= work.kernels[kernel].nodes.last() == Some(&node);
            known.2 += span.end_s - span.start_s;
            spans.push((kernel, span));
        }
        let described = |kernel: usize| match timed.get(&kernel) {
            Some(&(1, true, seconds)) => description(&work.kernels[kernel], seconds),
            _ => None,
        };
        let lane = recording.program as usize;
        let of_kernel = |kernel: usize, start_s: f64, end_s: f64| {
            let is_sent = work.kernels[kernel].kind.communicates();
            let name = title(body, &work.kernels[kernel]);
            let mut event = event(name, lane, track(is_sent), start_s, end_s);
            if let Some(description) = described(kernel) {
                event["cat"] = json!("kernel");
                event["args"] = json!({ "kernel": description });
            }
            event
        };
        let mut events: Vec<Value> =
            spans.iter().map(|&(kernel, span)| of_kernel(kernel, span.start_s, span.end_s)).collect();
        let untimed = (0..work.kernels.len()).filter(|kernel| !timed.contains_key(kernel));
        events.extend(untimed.map(|kernel| of_kernel(kernel, call.start_s, call.start_s)));
        events
    }

    /// The time account of a recorded step, for the first device of each lane.
    pub fn measured(&self, recorded: &Recorded) -> Vec<Account> {
        let of = |recording: &Recording| {
            let program = &self.programs().programs[recording.program as usize];
            let mut account = Account::default();
            for (position, span) in calls(recording) {
                let call_s = span.end_s - span.start_s;
                let Some(&Call::Run { body, .. }) = program.schedule.get(position) else {
                    account.add(Work::Waiting, span.waited_s);
                    let exchanged = if self.plan.servers.is_some() { Work::Servers } else { Work::Transfers };
                    account.add(exchanged, call_s - span.waited_s);
                    continue;
                };
                let body = &program.bodies[body as usize];
                let once = matches!(body.phase, Phase::Reduce | Phase::Norm | Phase::Update);
                let mesh = &self.plan.stages[body.stage as usize].mesh;
                let work = self.work[body.stage as usize].iter().find(|w| w.phase == body.phase);
                let owner = work.map(owners);
                let mut inside_s = 0.0;
                for (node, span) in kernels_of(recording, position) {
                    let kernel_s = span.end_s - span.start_s;
                    let kernel = owner.as_ref().and_then(|owner| owner(node)).zip(work);
                    let what = match kernel {
                        Some((kernel, work)) => {
                            let sent = work.sent[kernel].as_ref().map(|s| &s.0);
                            match Work::of(&work.kernels[kernel].kind, sent, mesh) {
                                what @ Work::Collective { .. } => what,
                                _ if once => Work::Update,
                                what => what,
                            }
                        }
                        None => Work::Elementwise,
                    };
                    account.add(what, kernel_s);
                    inside_s += kernel_s;
                }
                account.add(if once { Work::Update } else { Work::Issuing }, call_s - inside_s);
            }
            let rest_s = recorded.seconds - account.sum_s();
            account.add(Work::Waiting, rest_s);
            account
        };
        recorded.recordings.iter().map(of).collect()
    }

    /// Compares predicted and measured seconds by kind of work, averaged over all devices. `None` if the plan is for
    /// devices other than workers of this machine, or if nothing was recorded.
    pub fn measured_text(&self, recorded: &Recorded) -> Option<String> {
        let is_here = |s: &altiplano_ir::plan::Stage| self.plan.group_of(s).device.kind == DeviceKind::Cpu;
        if recorded.recordings.is_empty() || !self.plan.stages.iter().all(is_here) {
            return None;
        }
        let (predicted, measured) = (of_lanes(&self.plan, &self.accounts()), self.measured(recorded));
        // The first worker stands for all; servers have no such prediction.
        let devices: f64 = self.plan.lanes().iter().map(|stage| stage.devices.len() as f64).sum();
        let mean = |accounts: &[Account]| {
            let mut mean = Account::default();
            for (account, stage) in accounts.iter().zip(self.plan.lanes()) {
                let part = stage.devices.len() as f64 / devices;
                account.0.iter().for_each(|(work, s)| mean.add(work.clone(), part * s));
            }
            mean
        };
        let (predicted, measured) = (mean(&predicted), mean(&measured));
        let works: BTreeSet<&Work> = predicted.0.keys().chain(measured.0.keys()).collect();
        // Rounding errors of differences count as zero.
        let of = |account: &Account, work: &Work| {
            let seconds = account.0.get(work).copied().unwrap_or(0.0);
            if seconds.abs() > 1e-9 * account.sum_s() { seconds } else { 0.0 }
        };
        let mut rows: Vec<(String, f64, f64)> =
            works.into_iter().map(|w| (w.to_string(), of(&predicted, w), of(&measured, w))).collect();
        rows.sort_by(|a, b| b.1.max(b.2).total_cmp(&a.1.max(a.2)).then(a.0.cmp(&b.0)));
        let (least, least_measured) = (SHOWN * predicted.sum_s(), SHOWN * measured.sum_s());
        rows.retain(|(_, a, b)| a.abs() > least || b.abs() > least_measured);
        rows.push(("the step".into(), predicted.sum_s(), measured.sum_s()));
        let mut table = Grid::new(&["what", "predicted", "measured", "measured by predicted"]);
        for (what, predicted, measured) in rows {
            let plain = |s: f64| match s {
                0.0 => "-".to_string(),
                s if s < 0.0 => format!("-{}", seconds(-s)),
                s => seconds(s),
            };
            let times = match predicted > 0.0 && measured > 0.0 {
                true => format!("x {}", digits(measured / predicted)),
                false => String::new(),
            };
            table.row([what, plain(predicted), plain(measured), times]);
        }
        let by = match &self.profiled {
            Some(_) => "by the profile",
            None => "by the cluster's figures",
        };
        let whose = if self.plan.servers.is_some() { "of the first worker" } else { "mean over devices" };
        Some(format!("seconds of the last step, {whose}, predicted {by}\n{}", table.right()))
    }

    /// Names of processes and tracks.
    fn tracks(&self) -> Vec<Value> {
        let mut events = Vec::new();
        let lanes = self.plan.lanes().iter().map(|stage| stage.devices.len());
        let devices: Vec<usize> = match &self.exchanged {
            Some(_) => vec![1; self.plan.num_devices() as usize],
            None => lanes.collect(),
        };
        for (i, devices) in devices.into_iter().enumerate() {
            let name = format!("{}: {}", self.plan.program_name(i), plural(devices as u64, "device"));
            events.push(json!({"name": "process_name", "ph": "M", "pid": i, "args": {"name": name}}));
            for (track, name) in
                [(0, "calls"), (1, "compute, first microbatch"), (2, "communication, first microbatch")]
            {
                events.push(json!({"name": "thread_name", "ph": "M", "pid": i, "tid": track, "args": {"name": name}}));
            }
        }
        events
    }

    /// The calls of all workers except the first, whose calls are those of the stage, and of all servers.
    fn exchange_events(&self) -> Vec<Value> {
        let Some(exchanged) = &self.exchanged else { return Vec::new() };
        let mut events = Vec::new();
        for (lane, (program, spans)) in self.programs().programs.iter().zip(&exchanged.calls).enumerate().skip(1) {
            for (call, &(start_s, end_s)) in program.schedule.iter().zip(spans) {
                let Call::Run { body, microbatch } = *call else { continue };
                let body = &program.bodies[body as usize];
                events.push(match microbatch {
                    Some(_) => self.call_event(lane, body.stage as usize, body.phase, microbatch, start_s, end_s),
                    None => event(body.name.clone(), lane, 0, start_s, end_s),
                });
            }
        }
        events
    }

    fn call_event(
        &self,
        lane: usize,
        stage: usize,
        phase: Phase,
        microbatch: Option<u32>,
        start_s: f64,
        end_s: f64,
    ) -> Value {
        // If a lane has several stages, the name includes the stage.
        let of = if self.plan.virtual_stages == 1 { String::new() } else { format!(" of stage{stage}") };
        event(trace_name(phase, microbatch) + &of, lane, 0, start_s, end_s)
    }

    pub(super) fn held_event(&self, lane: usize, at_s: f64, held: u64) -> Value {
        json!({"name": "memory of a device", "ph": "C", "pid": lane, "ts": at_s * 1e6, "args": {"bytes": held}})
    }

    fn work_and_body(&self, stage: usize, phase: Phase) -> Option<(&BodyWork, &Body)> {
        let work = self.work[stage].iter().find(|b| b.phase == phase)?;
        let program = &self.programs().programs[self.plan.lane_of(stage)];
        let body = program.body_of(stage as u32, phase)?;
        Some((work, &program.bodies[body as usize]))
    }
}

/// An event of a lane, or of a worker or server.
fn event(name: String, lane: usize, track: u32, start_s: f64, end_s: f64) -> Value {
    json!({
        "name": name, "ph": "X", "pid": lane, "tid": track,
        "ts": 1e6 * start_s, "dur": 1e6 * (end_s - start_s),
    })
}

fn track(is_sent: bool) -> u32 {
    if is_sent { 2 } else { 1 }
}

/// The calls of a recording, by position in the schedule.
fn calls(recording: &Recording) -> impl Iterator<Item = (usize, &Span)> {
    recording.spans.iter().filter_map(|span| match span.what {
        What::Call { position } => Some((position, span)),
        What::AsyncCollective { .. } | What::Kernel { .. } => None,
    })
}

/// The kernels within a call of a recording, by the nodes that they make.
fn kernels_of(recording: &Recording, call: usize) -> impl Iterator<Item = (ValueId, &Span)> {
    // Calls of the previous step may be interleaved, so positions need not increase.
    recording.spans.iter().filter(move |span| position(span) == call).filter_map(|span| match span.what {
        What::Kernel { node, .. } => Some((node, span)),
        What::Call { .. } | What::AsyncCollective { .. } => None,
    })
}

fn position(span: &Span) -> usize {
    match span.what {
        What::Call { position } | What::AsyncCollective { position, .. } | What::Kernel { position, .. } => position,
    }
}

/// The kernel of the simulation that contains a node; otherwise the first that ends after it, which depends on it.
fn owners(work: &BodyWork) -> impl Fn(ValueId) -> Option<usize> {
    let mut of_node: BTreeMap<ValueId, usize> = BTreeMap::new();
    let mut ends: Vec<(ValueId, usize)> = Vec::new();
    for (i, kernel) in work.kernels.iter().enumerate() {
        of_node.extend(kernel.nodes.iter().map(|&v| (v, i)));
        ends.extend(kernel.nodes.last().map(|&v| (v, i)));
    }
    ends.sort();
    move |node| {
        let after = || ends.get(ends.partition_point(|(v, _)| *v < node)).or(ends.last()).map(|(_, i)| *i);
        of_node.get(&node).copied().or_else(after)
    }
}

/// A kernel in the terms in which constants are fitted; `None` if these do not cover it.
fn description(kernel: &Kernel, seconds: f64) -> Option<Value> {
    let what = match &kernel.kind {
        KernelKind::Matmul(m) => json!({"matmul": {
            "batch": m.batch, "m": m.m, "n": m.n, "k": m.k, "dtype": m.dtype, "aligned": m.aligned,
        }}),
        KernelKind::Fused { operations } => json!({"elementwise": {"operations": operations}}),
        _ => return None,
    };
    (seconds > 0.0)
        .then(|| json!({"what": what, "read_bytes": kernel.read_bytes, "written_bytes": kernel.written_bytes}))
}
