//! Advice on a plan: its bottlenecks, the changes that would make it faster, and the effect of a larger batch on
//! training.
//!
//! Bottlenecks follow from the plan's time account. The gain from more devices, faster links, more memory or more
//! samples is found by planning for each. Statements on batch sizes and learning rates cite their source.

use crate::error::Error;
use crate::report::{Grid, side};
use crate::simulate::Simulation;
use crate::units::{bytes, digits, gibibytes, percent, seconds};
use altiplano_cost_models::Rooflines;
use altiplano_ir::plan::Plan;
use altiplano_planner::explain::account::{Part, Work, busiest, of_lanes};
use altiplano_planner::explain::alternatives::shape;
use altiplano_planner::{PlanFailure, Progress, Request, fits, predict_plan};
use rayon::prelude::*;
use serde::Serialize;
use serde_json::{Value, json};
use std::fmt::Write;
use std::time::{Duration, Instant};

/// A hypothetical change, and the best plan with it.
#[derive(Debug)]
pub struct Scenario {
    /// A description such as `one node more`.
    pub change: String,
    pub request: Request,
    pub plan: Result<Plan, PlanFailure>,
}

/// Stops a search at its deadline, or when the user cancels the enclosing one.
struct Deadline<'a> {
    progress: &'a dyn Progress,
    end: Instant,
}

impl Progress for Deadline<'_> {
    fn step(&self, what: &str, done: usize, total: usize) {
        self.progress.step(what, done, total);
    }

    fn stopped(&self) -> bool {
        self.progress.stopped() || Instant::now() >= self.end
    }
}

/// The bottlenecks of a plan on its own devices.
#[derive(Clone, Debug, Serialize)]
pub struct Limits {
    pub time: TimeLimit,
    /// Present if there are several lanes.
    pub bubble: Option<Bubble>,
    /// The communication that takes most of a step, if any, and its links.
    pub link: Option<LinkLimit>,
    pub memory: MemoryLimit,
}

/// The time account of the devices that wait least.
#[derive(Clone, Debug, Serialize)]
pub struct TimeLimit {
    pub lane: String,
    pub parts: Vec<PartOfStep>,
}

#[derive(Clone, Debug, Serialize)]
pub struct PartOfStep {
    pub part: &'static str,
    pub seconds: f64,
    pub of_step: f64,
    /// Its largest part, and the time of that.
    pub longest: Option<Longest>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Longest {
    pub what: String,
    pub seconds: f64,
}

/// Parts of a step in which devices are idle: the mean over all devices, and that of the idlest.
#[derive(Clone, Debug, Serialize)]
pub struct Bubble {
    pub of_step: f64,
    pub most_of_step: f64,
    pub most: String,
}

#[derive(Clone, Debug, Serialize)]
pub struct LinkLimit {
    pub what: String,
    pub link: String,
    pub seconds: f64,
    pub of_step: f64,
}

/// The devices with the highest peak memory.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryLimit {
    pub lane: String,
    pub peak_bytes: u64,
    pub memory_bytes: u64,
}

impl Limits {
    pub fn new(simulation: &Simulation) -> Limits {
        let plan = simulation.plan();
        let step_s = plan.predicted.step_time_s;
        let accounts = simulation.accounts();
        let lanes = of_lanes(plan, &accounts);
        let at = busiest(&lanes);
        let account = &lanes[at];
        let largest = |part: Part| account.sorted().into_iter().find(|(work, _)| work.part() == part);
        let parts = Part::ALL.into_iter().filter(|&part| account.part_s(part) > 0.0).map(|part| {
            let longest = largest(part)
                .filter(|_| part != Part::Waiting)
                .map(|(work, seconds)| Longest { what: work.to_string(), seconds });
            let seconds = account.part_s(part);
            PartOfStep { part: part.name(), seconds, of_step: seconds / step_s, longest }
        });
        let time = TimeLimit { lane: plan.lane_name(at), parts: parts.collect() };
        let bubble = (plan.num_lanes() > 1).then(|| {
            let waits = |lane: usize| lanes[lane].part_s(Part::Waiting) / step_s;
            let weight = |lane: usize| plan.lanes()[lane].devices.len() as f64;
            let of_step = (0..lanes.len()).map(|l| waits(l) * weight(l)).sum::<f64>() / f64::from(plan.num_devices());
            let most = (0..lanes.len()).max_by(|&a, &b| waits(a).total_cmp(&waits(b))).unwrap_or(0);
            Bubble { of_step, most_of_step: waits(most), most: plan.lane_name(most) }
        });
        let over = |work: &Work| match work {
            Work::Collective { axes, .. } => simulation.link_of(at, axes),
            Work::Servers => Some("the links to parameter servers".to_string()),
            Work::Transfers => Some("the links between stages".to_string()),
            _ => None,
        };
        let link = largest(Part::Communicating).and_then(|(work, seconds)| {
            Some(LinkLimit { link: over(work)?, what: work.to_string(), seconds, of_step: seconds / step_s })
        });
        let limit = |lane: usize| {
            let stage = &plan.lanes()[lane];
            let memory_bytes = plan.usable_bytes(stage);
            MemoryLimit { lane: plan.lane_name(lane), peak_bytes: stage.predicted.peak_bytes, memory_bytes }
        };
        let fuller = |a: &MemoryLimit, b: &MemoryLimit| a.part().total_cmp(&b.part());
        let of_servers = plan.servers.iter().flat_map(|over| over.predicted.iter().enumerate());
        let of_servers = of_servers.map(|(s, server)| MemoryLimit {
            lane: plan.program_name(plan.num_workers() as usize + s),
            peak_bytes: server.peak_bytes,
            memory_bytes: plan.cluster.usable_bytes(&plan.cluster.groups[0]),
        });
        let others = (1..plan.num_lanes()).map(limit).chain(of_servers);
        let memory = others.fold(limit(0), |a, b| if fuller(&a, &b).is_le() { b } else { a });
        Limits { time, bubble, link, memory }
    }

    /// The bottlenecks in words, one per line.
    pub fn lines(&self) -> Vec<String> {
        let Limits { time, bubble, link, memory } = self;
        let parts: Vec<String> = time
            .parts
            .iter()
            .map(|part| {
                let longest = part.longest.as_ref();
                let longest =
                    longest.map_or(String::new(), |l| format!(" (longest {}, {})", l.what, seconds(l.seconds)));
                format!("{} {}{longest}", part.part, percent(part.of_step))
            })
            .collect();
        let mut lines = vec![format!("time      {} waits least: {}", time.lane, parts.join(", "))];
        lines.extend(bubble.as_ref().map(|Bubble { of_step, most_of_step, most }| {
            let (all, worst) = (percent(*of_step), percent(*most_of_step));
            format!("bubble    {all} of all devices' time is waiting; most is {worst} of {most}")
        }));
        lines.extend(link.as_ref().map(|LinkLimit { what, link, of_step, .. }| {
            format!("link      {} of a step is {what}, over {link}", percent(*of_step))
        }));
        lines.push(format!(
            "memory    {} is the fullest: {} ({}) of {} ({}) that tensors can use on each device ({})",
            memory.lane,
            bytes(memory.peak_bytes),
            gibibytes(memory.peak_bytes),
            bytes(memory.memory_bytes),
            gibibytes(memory.memory_bytes),
            percent(memory.part())
        ));
        lines
    }
}

impl MemoryLimit {
    fn part(&self) -> f64 {
        self.peak_bytes as f64 / self.memory_bytes.max(1) as f64
    }
}

/// Changed requests: one more node, links twice as fast, twice the memory, and half, twice and four times the batch.
/// The first entry is unchanged. Fixed degrees stay fixed.
pub fn changes(request: &Request) -> Vec<(String, Request)> {
    let changed = |what: &str, change: &dyn Fn(&mut Request)| {
        let mut new = request.clone();
        change(&mut new);
        (what.to_string(), new)
    };
    let groups = &request.cluster.groups;
    let mut all = vec![changed("as it is", &|_| {})];
    for group in 0..groups.len() {
        let of = match groups.len() {
            1 => String::new(),
            _ => format!(" of {}", groups[group].device.name),
        };
        let more = |r: &mut Request| r.cluster.groups[group].nodes = r.cluster.groups[group].nodes.saturating_add(1);
        all.push(changed(&format!("one node more{of}"), &more));
    }
    if groups.len() > 1 || groups.iter().any(|g| g.nodes > 1) {
        all.push(changed("the network x2", &|r| {
            r.cluster.groups.iter_mut().for_each(|g| g.inter_node.bytes_per_s *= 2.0);
            r.cluster.between_groups.iter_mut().for_each(|b| b.bytes_per_s *= 2.0);
        }));
    }
    if groups.iter().any(|g| g.devices_per_node > 1) {
        all.push(changed("links within nodes x2", &|r| {
            r.cluster.groups.iter_mut().for_each(|g| g.intra_node.bytes_per_s *= 2.0);
        }));
    }
    all.push(changed("memory x2", &|r| {
        r.cluster.groups.iter_mut().for_each(|g| g.device.memory_bytes = g.device.memory_bytes.saturating_mul(2));
    }));
    let batch = request.global_batch_size();
    if request.graph.batch != 0 {
        for (what, samples) in [("batch / 2", batch / 2), ("batch x2", batch * 2), ("batch x4", batch * 4)] {
            if samples > 0 && (what != "batch / 2" || batch.is_multiple_of(2)) {
                all.push(changed(what, &|r| r.batch.global = Some(samples)));
            }
        }
    }
    all
}

/// Plans several requests in parallel. No result is slower than `plan` itself. A search that is not done within `limit`
/// returns its best plan so far.
pub fn scenarios(
    plan: &Plan,
    changes: Vec<(String, Request)>,
    limit: Duration,
    progress: &dyn Progress,
) -> Vec<Scenario> {
    let deadline = Deadline { progress, end: Instant::now() + limit };
    let planned = |(change, request): (String, Request)| {
        let found = altiplano_planner::plan(&request, &deadline);
        let faster = |p: &Plan| {
            let found = found.as_ref().map_or(f64::INFINITY, |f| f.predicted.step_time_s);
            p.predicted.step_time_s < found
        };
        let plan = match moved_to(plan, &request).filter(faster) {
            Some(moved) => Ok(moved),
            None => found,
        };
        Scenario { change, request, plan }
    };
    changes.into_par_iter().map(planned).collect()
}

/// Applies a plan to a changed request: on another cluster, or with more microbatches of the same size. `None` if that
/// is impossible or does not fit in memory.
fn moved_to(plan: &Plan, request: &Request) -> Option<Plan> {
    let degrees =
        request.degrees.dp.or(request.degrees.tp).or(request.degrees.pp).or(request.degrees.virtual_stages).is_some();
    let ways = request.degrees.zero.is_some() || request.recompute.is_some() || request.schedule.is_some();
    if degrees || ways || request.batch.microbatch.is_some() || request.batch.num_microbatches.is_some() {
        return None;
    }
    let mut moved = plan.clone();
    moved.cluster = request.cluster.clone();
    let batch = request.global_batch_size();
    if batch != plan.global_batch {
        moved.num_microbatches = u32::try_from(batch.checked_div(plan.microbatch)?).ok()?;
        moved.global_batch = u64::from(moved.num_microbatches).checked_mul(plan.microbatch)?;
    }
    if moved.global_batch != batch || !moved.verify().is_empty() {
        return None;
    }
    let costs = Rooflines::of(&moved.cluster);
    let moved = predict_plan(moved, &costs).ok()?;
    fits(&moved).then_some(moved)
}

/// Relative number of steps and samples that a batch size needs to reach a given loss. It follows from the gradient
/// noise scale `B` (McCandlish et al. 2018, equation 2.7): a batch of `b` needs `S = S_min (1 + B/b)` steps and `E =
/// E_min (1 + b/B)` samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct BatchEffort {
    /// As multiples of the minimum over all batch sizes.
    pub steps: f64,
    pub samples: f64,
}

impl BatchEffort {
    /// The effort of a batch size; with `b = B` both are twice the minimum.
    pub(crate) fn of(batch: f64, noise_scale: f64) -> BatchEffort {
        BatchEffort { steps: 1.0 + noise_scale / batch, samples: 1.0 + batch / noise_scale }
    }
}

/// Factors by which the learning rate grows with the batch: linearly (Goyal et al. 2017, section 2.1), and by the
/// square root (Krizhevsky 2014, section 5; Hoffer et al. 2017, section 4).
pub(crate) fn learning_rates(batch: u64, other: u64) -> [f64; 2] {
    let ratio = other as f64 / batch.max(1) as f64;
    [ratio, ratio.sqrt()]
}

/// Prints the scenarios as a table beside the plan.
pub(crate) fn scenario_table(plan: &Plan, scenarios: &[Scenario]) -> String {
    let base = plan.predicted.samples_per_s;
    let mut table = Grid::new(&["what if", "s/step", "samples/s", "more", "a device", "GB/device", "how"]);
    let per_device = |p: &Plan, devices: u32| p.predicted.samples_per_s / f64::from(devices.max(1));
    for Scenario { change, request, plan: found } in scenarios {
        let Ok(found) = found else {
            let why = found.as_ref().err().map(ToString::to_string).unwrap_or_default();
            table.row([change.clone(), "-".into(), "-".into(), "-".into(), "-".into(), "-".into(), why]);
            continue;
        };
        let signed = |part: f64| format!("{}{}", if part < 0.0 { "-" } else { "+" }, percent(part.abs()));
        let devices = request.cluster.num_devices();
        let each = per_device(found, devices) / per_device(plan, plan.cluster.num_devices()) - 1.0;
        table.row([
            change.clone(),
            digits(found.predicted.step_time_s),
            digits(found.predicted.samples_per_s),
            signed(found.predicted.samples_per_s / base - 1.0),
            signed(each),
            digits(found.predicted.peak_bytes.iter().copied().max().unwrap_or(0) as f64 / 1e9),
            shape(found),
        ]);
    }
    table.right_but_last()
}

/// The effect of a batch size on training, relative to the plan's own.
#[derive(Clone, Debug, Serialize)]
pub struct Batch {
    pub samples: u64,
    pub step_time_s: f64,
    /// Factors of the learning rate; see `learning_rates`.
    pub rate_linear: f64,
    pub rate_square_root: f64,
    /// Present if the noise scale is known.
    pub effort: Option<RelativeEffort>,
}

/// The effort to reach the same loss, relative to the plan's own batch.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RelativeEffort {
    pub steps: f64,
    pub samples: f64,
    pub time: f64,
}

/// The plan's own batch and those of the scenarios, smallest first.
fn batches(plan: &Plan, scenarios: &[Scenario], noise_scale: Option<f64>) -> Vec<Batch> {
    let own = (plan.global_batch, plan.predicted.step_time_s);
    let others = scenarios.iter().filter_map(|s| s.plan.as_ref().ok());
    let others = others.map(|p| (p.global_batch, p.predicted.step_time_s)).filter(|(samples, _)| *samples != own.0);
    let mut all: Vec<(u64, f64)> = [own].into_iter().chain(others).collect();
    all.sort_by_key(|b| b.0);
    let batch = |(samples, step_time_s): (u64, f64)| {
        let [rate_linear, rate_square_root] = learning_rates(own.0, samples);
        let effort = noise_scale.map(|scale| {
            let (ours, theirs) = (BatchEffort::of(own.0 as f64, scale), BatchEffort::of(samples as f64, scale));
            let steps = theirs.steps / ours.steps;
            RelativeEffort { steps, samples: theirs.samples / ours.samples, time: steps * step_time_s / own.1 }
        });
        Batch { samples, step_time_s, rate_linear, rate_square_root, effort }
    };
    all.into_iter().map(batch).collect()
}

/// Describes the effect of batch sizes on training: learning rates, warm-up and, with a noise scale, the benefit of a
/// larger batch.
pub(crate) fn training_side(plan: &Plan, scenarios: &[Scenario], noise_scale: Option<f64>) -> String {
    let batch = plan.global_batch;
    let mut out = String::new();
    let mut columns = vec!["batch", "rate, linear", "rate, square root"];
    if noise_scale.is_some() {
        columns.extend(["steps", "samples", "time"]);
    }
    let mut table = Grid::new(&columns);
    for Batch { samples, rate_linear, rate_square_root, effort, .. } in batches(plan, scenarios, noise_scale) {
        let effort = effort.into_iter().flat_map(|e| [e.steps, e.samples, e.time]);
        let factors = [rate_linear, rate_square_root].into_iter().chain(effort);
        let factors = factors.map(|x| format!("x {}", digits(x)));
        table.row([samples.to_string()].into_iter().chain(factors).collect::<Vec<_>>());
    }
    // Writing to a string cannot fail.
    let _ = writeln!(out, "{}", table.right());
    let _ = writeln!(
        out,
        "  learning rate, as a multiple of that of {batch} samples: linear holds for SGD while the loss changes little within a step\n  (Goyal et al. 2017), the square root keeps the variance of an update (Krizhevsky 2014, Hoffer et al. 2017)\n  warm-up: raise the rate from that of the smaller batch over the first epochs (Goyal et al. 2017: 5 epochs of ImageNet)"
    );
    match noise_scale {
        None => {
            let _ = write!(
                out,
                "  how far a larger batch helps depends on the gradient's noise scale, which is measured in training; say it with --noise-scale"
            );
        }
        Some(scale) => {
            let effort = BatchEffort::of(batch as f64, scale);
            let _ = write!(
                out,
                "  steps, samples and time to come as far, as multiples of those of {batch} samples (McCandlish et al. 2018, with a noise scale\n  of {}): {batch} samples a step need {} times the fewest steps and {} times the fewest samples;\n  larger batches save time up to about {} samples, of which {} are wasted, and hardly any beyond",
                digits(scale),
                digits(effort.steps),
                digits(effort.samples),
                digits(scale),
                percent(0.5)
            );
        }
    }
    out
}

/// The complete advice in words: bottlenecks, scenarios and batches.
///
/// # Errors
/// Fails if the plan cannot be lowered.
pub fn advice(plan: &Plan, scenarios: &[Scenario], noise_scale: Option<f64>) -> Result<String, Error> {
    let simulation = Simulation::new(plan.clone(), None)?;
    let mut out = String::from("What limits this plan\n");
    Limits::new(&simulation).lines().iter().for_each(|line| {
        let _ = writeln!(out, "  {line}");
    });
    let _ = write!(
        out,
        "\nWhat others would give, each planned for anew\n{}\n  more: samples a second beside this plan's, and of each device of the cluster",
        scenario_table(plan, scenarios)
    );
    if plan.schedule.trains() {
        let _ =
            write!(out, "\n\nWhat other batches mean for training\n{}", training_side(plan, scenarios, noise_scale));
    }
    Ok(out)
}

/// The complete advice as JSON (`docs/advice.schema.json`).
///
/// # Errors
/// Fails if the plan cannot be lowered.
pub fn advice_json(plan: &Plan, scenarios: &[Scenario], noise_scale: Option<f64>) -> Result<Value, Error> {
    let simulation = Simulation::new(plan.clone(), None)?;
    let scenario = |s: &Scenario| match &s.plan {
        Ok(found) => {
            json!({"change": s.change, "cluster_devices": s.request.cluster.num_devices(), "plan": side(found)})
        }
        Err(why) => {
            json!({"change": s.change, "cluster_devices": s.request.cluster.num_devices(), "why": why.to_string()})
        }
    };
    Ok(json!({
        "format": "altiplano.advice",
        "version": 1,
        "plan": side(plan),
        "limits": Limits::new(&simulation),
        "scenarios": scenarios.iter().map(scenario).collect::<Vec<_>>(),
        "noise_scale": noise_scale,
        "batches": if plan.schedule.trains() { batches(plan, scenarios, noise_scale) } else { Vec::new() },
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_of_the_noise_scale_need_twice_of_both() {
        assert_eq!(BatchEffort::of(512.0, 512.0), BatchEffort { steps: 2.0, samples: 2.0 });
        assert_eq!(BatchEffort::of(128.0, 512.0), BatchEffort { steps: 5.0, samples: 1.25 });
        // McCandlish et al. 2018, equation 2.7: (S / S_min - 1)(E / E_min - 1) = 1 for every batch.
        for batch in [1.0, 37.0, 4096.0] {
            let effort = BatchEffort::of(batch, 300.0);
            assert!(((effort.steps - 1.0) * (effort.samples - 1.0) - 1.0).abs() < 1e-12);
        }
        assert_eq!(learning_rates(256, 1024), [4.0, 2.0]);
    }
}
