//! Recommends a number of nodes. It plans for each of several numbers of nodes, predicts training time and cost, marks
//! the Pareto-optimal ones, and recommends one. All predictions use the same model. So the bottleneck of a larger
//! number is whatever takes more device-seconds per sample than with the smallest.

pub mod arithmetic;
mod batches;
mod chart;
mod config;
mod exchange;
mod input;
mod named;
mod page;
mod practice;
mod queue;
mod text;

pub use batches::{BaseRate, around};
pub(crate) use batches::{BatchRow, batch_rows, batch_text, batch_warning, practice_lines};
pub use config::train_config;
pub use exchange::Exchange;
pub use input::{Input, Samples, Staged, sample_bytes, sample_tokens};
pub use named::Named;
pub use page::scaling_html;
pub use queue::{QueueProblem, QueueWaits};
pub use text::{scaling_json, scaling_text};

use crate::advice::BatchEffort;
use crate::error::Error;
use crate::simulate::Simulation;
use altiplano_cost_models::catalogue::MAX_DEVICES;
use altiplano_ir::optimizer::Optimizer;
use altiplano_ir::plan::Plan;
use altiplano_ir::recompute::Recompute;
use altiplano_planner::explain::account::{Part, Work, of_lanes};
use altiplano_planner::explain::alternatives::shape;
use altiplano_planner::request::Muted;
use altiplano_planner::{BatchSizes, LayeredCache, PlanFailure, Progress, Request, plan_among};
use rayon::prelude::*;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The quantity that grows with the nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Growth {
    /// The global batch; each device has the same number of samples at any size.
    Weak,
    /// Nothing; the global batch is divided among more devices.
    Strong,
}

/// The length of training in samples; if a noise scale is known, with the batch of the smallest number of nodes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Length {
    /// Samples per epoch, if there are epochs.
    pub in_epoch: Option<u64>,
    pub samples: f64,
    /// Number of tokens, if given as such.
    pub tokens: Option<f64>,
}

/// The inputs of a sweep besides model and cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    /// Numbers of nodes, ascending and distinct.
    pub nodes: Vec<u32>,
    pub growth: Growth,
    pub length: Option<Length>,
    /// Gradient noise scale in samples (McCandlish et al. 2018).
    pub noise_scale: Option<f64>,
    pub max_hours: Option<f64>,
    /// Stored samples, if the cluster describes its storage.
    pub samples: Option<Samples>,
    pub base_rate: Option<BaseRate>,
    /// Waiting times for nodes.
    pub queue_waits: Option<QueueWaits>,
    /// Variation of worker step times: a standard deviation as a fraction of their computing time.
    pub jitter: f64,
}

/// The result for one number of nodes.
#[derive(Debug)]
pub struct Row {
    pub nodes: u32,
    pub devices: u32,
    /// The plan for exactly this number.
    pub plan: Result<Plan, PlanFailure>,
    /// Training on this number of nodes, by its own plan or by that of fewer nodes.
    pub point: Option<Point>,
}

/// Training on a number of nodes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Point {
    /// Number of nodes used; the others are idle.
    pub nodes_used: u32,
    pub devices: u32,
    pub devices_used: u32,
    pub global_batch: u64,
    /// Samples of the global batch per used device.
    pub local_batch: f64,
    pub step_time_s: f64,
    /// Throughput, waits for input included.
    pub samples_per_s: f64,
    pub mfu: f64,
    /// Model FLOP/s per used device, without recomputation.
    pub device_flop_per_s: f64,
    /// True if all activations are recomputed.
    pub recomputed: bool,
    pub peak_bytes: u64,
    pub how: String,
    /// Throughput per device, relative to the smallest number of nodes with a plan.
    pub efficiency: f64,
    pub input: Option<Input>,
    /// Device-seconds per sample by kind of work, largest first.
    pub parts: Vec<Spent>,
    /// Relative to the smallest number with a plan: the kind of work with the largest increase per sample, or the
    /// largest decrease.
    pub change: Option<Change>,
    pub training: Option<Training>,
    /// True if the point is Pareto-optimal in time and device-hours.
    pub on_front: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Spent {
    pub what: String,
    pub device_s: f64,
    /// Fraction of all device-seconds of a sample.
    pub part: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    pub what: String,
    /// Device-seconds per sample beyond those with the smallest number of nodes.
    pub device_s: f64,
    /// Fraction of all changes in the same direction.
    pub part: f64,
}

/// The duration and cost of training.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Training {
    pub steps: f64,
    pub samples: f64,
    pub hours: f64,
    /// Hours until the nodes are available, if known; they cost nothing.
    pub wait_hours: Option<f64>,
    /// Device-hours of all devices of the nodes, idle or not.
    pub device_hours: f64,
    /// Price, if the cluster states that of a node.
    pub price: Option<f64>,
    /// Energy of the devices alone, if the cluster states their power.
    pub kwh: Option<f64>,
    /// Hours by the published formula, if training is counted in tokens.
    pub formula_hours: Option<f64>,
}

impl Training {
    /// Hours until the result is available, waits for nodes included.
    pub(crate) fn done_hours(&self) -> f64 {
        self.hours + self.wait_hours.unwrap_or(0.0)
    }
}

/// The recommended number of nodes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Recommended {
    pub nodes: u32,
    pub rule: Rule,
}

/// The reason for a recommendation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// It needs the fewest device-hours of those done in time.
    WithinHours,
    /// None is done in time, and it is the fastest.
    Fastest,
    /// It minimises time, waits included, times device-hours, which maximises efficiency over time (Eager, Zahorjan and
    /// Lazowska 1989).
    Knee,
}

/// A sweep over numbers of nodes.
#[derive(Debug)]
pub struct Scaling {
    pub model: String,
    pub cluster: String,
    pub question: Question,
    pub optimizer: Optimizer,
    pub parameters: u64,
    pub rows: Vec<Row>,
    /// With the smallest number of nodes and `LARGER` times its batch: samples per device, and model FLOP/s over the
    /// peak.
    pub larger_batch: Option<(f64, f64)>,
    pub recommended: Option<Recommended>,
    /// Conventional plans without a search, on the recommended number of nodes, else the largest.
    pub named: Vec<Named>,
    /// Ways to exchange gradients, on the same number of nodes.
    pub exchanges: Vec<Exchange>,
    /// True if the search was cancelled before all numbers were planned.
    pub stopped: bool,
}

/// Factor of the local batch in the test whether devices could be busier.
const LARGER: u64 = 4;

/// Parses numbers of nodes: `1,2,3`, and `1,2,4,...,64` for doublings between two.
///
/// # Errors
/// Fails if a number is below 1 or no number, or occurs twice.
pub fn node_counts(text: &str) -> Result<Vec<u32>, Error> {
    let wrong = |problem| Err(Error::Option { option: "--nodes", problem });
    let mut counts: Vec<u32> = Vec::new();
    let mut doubling = false;
    for word in text.split(',').map(str::trim) {
        if word == "..." && !counts.is_empty() && !doubling {
            doubling = true;
            continue;
        }
        let Ok(count) = word.parse::<u32>() else {
            return wrong("expected counts of nodes such as 1,2,4 or 1,2,4,...,64");
        };
        if count == 0 {
            return wrong("0 nodes train nothing");
        }
        if let (true, Some(&last)) = (doubling, counts.last()) {
            let doubled = (1..32).map_while(|i| last.checked_mul(1 << i)).take_while(|&n| n < count);
            counts.extend(doubled.collect::<Vec<_>>());
        }
        doubling = false;
        counts.push(count);
    }
    if doubling {
        return wrong("`...` needs a count after it");
    }
    counts.sort_unstable();
    match counts.windows(2).any(|pair| pair[0] == pair[1]) {
        true => wrong("a count occurs twice"),
        false => Ok(counts),
    }
}

/// The request for each number of nodes, with a constant or growing batch.
fn requests(request: &Request, question: &Question) -> Result<Vec<(u32, Request)>, Error> {
    fn wrong<T>(option: &'static str, problem: &'static str) -> Result<T, Error> {
        Err(Error::Option { option, problem })
    }
    let [group] = request.cluster.groups.as_slice() else {
        return wrong("--nodes", "needs equal nodes, but the cluster has several groups");
    };
    let (Some(&fewest), Some(&most)) = (question.nodes.first(), question.nodes.last()) else {
        return wrong("--nodes", "names no count");
    };
    if u64::from(most) * u64::from(group.devices_per_node) > MAX_DEVICES {
        return wrong("--nodes", "more than 1000000 devices");
    }
    if question.growth == Growth::Weak && request.graph.batch == 0 {
        return wrong("--weak", "the model's batch was not found, so it cannot grow");
    }
    let batch = request.global_batch_size();
    let of_count = |&nodes: &u32| {
        let mut of_count = Request { fastest: true, ..request.clone() };
        of_count.cluster.groups[0].nodes = nodes;
        if question.growth == Growth::Weak {
            let Some(samples) = batch.checked_mul(u64::from(nodes)) else {
                return wrong("--weak", "the batch of the largest count is too large");
            };
            if !samples.is_multiple_of(u64::from(fewest)) {
                return wrong(
                    "--weak",
                    "a batch would not be a whole number of samples; --global-batch is that of the smallest count",
                );
            }
            of_count.batch.global = Some(samples / u64::from(fewest));
        }
        Ok((nodes, of_count))
    };
    question.nodes.iter().map(of_count).collect()
}

/// Plans for all numbers of nodes in parallel, and predicts training on each.
///
/// # Errors
/// Fails if the question does not apply to this model and cluster. A number without a plan is a row with the reason.
pub fn scaling(request: &Request, question: &Question, progress: &dyn Progress) -> Result<Scaling, Error> {
    let requests = requests(request, question)?;
    let fewest = &requests[0].1;
    let larger = Request {
        batch: BatchSizes { global: fewest.global_batch_size().checked_mul(LARGER), ..fewest.batch },
        ..fewest.clone()
    };
    let (done, total) = (AtomicUsize::new(0), requests.len() + 1);
    let cache: Arc<LayeredCache> = Arc::default();
    let planned = |nodes: Option<u32>, request: &Request| {
        // Skip plans that had not started when the user cancelled.
        let found = (!progress.stopped()).then(|| plan_among(request, &cache, &Muted(progress)));
        if let (Some(found), Some(nodes)) = (&found, nodes) {
            let s = if nodes == 1 { "" } else { "s" };
            progress.answered(&format!("{nodes} node{s}"), found);
        }
        progress.step("counts of nodes", done.fetch_add(1, Ordering::Relaxed) + 1, total);
        found
    };
    // A larger batch shows whether devices could be busier, unless the batch cannot grow.
    let busier = || (request.graph.batch != 0).then(|| planned(None, &larger)).flatten().and_then(Result::ok);
    let each = || {
        requests.par_iter().map(|(nodes, request)| Some((*nodes, planned(Some(*nodes), request)?))).collect::<Vec<_>>()
    };
    let (found, busier) = rayon::join(each, busier);
    let all = found.len();
    let found: Vec<(u32, Result<Plan, PlanFailure>)> = found.into_iter().flatten().collect();
    let parameters = request.graph.parameters().map(|(v, _)| request.graph.ty(v).elements());
    let larger_batch = busier.map(|plan| (local_batch(&plan), plan.predicted.mfu));
    let mut scaling = Scaling {
        model: request.model.clone(),
        cluster: request.cluster.name.clone(),
        question: question.clone(),
        optimizer: request.training.optimizer,
        parameters: parameters.fold(0, u64::saturating_add),
        stopped: found.len() < all || progress.stopped(),
        rows: Vec::new(),
        larger_batch,
        recommended: None,
        named: Vec::new(),
        exchanges: Vec::new(),
    };
    scaling.rows = rows(request, question, scaling.parameters, found)?;
    if question.length.is_some() {
        mark_front(&mut scaling.rows);
        scaling.recommended = recommended(&scaling.rows, question.max_hours);
    }
    let with_plan = scaling.rows.iter().filter(|row| row.point.is_some()).map(|row| row.nodes).next_back();
    if let Some(nodes) = scaling.recommended.map(|r| r.nodes).or(with_plan) {
        (scaling.named, scaling.exchanges) = beside(&requests, nodes, &scaling.rows, question.jitter, &cache, progress);
    }
    Ok(scaling)
}

/// Conventional plans on a number of nodes, and ways to exchange gradients there if the model is trained.
fn beside(
    requests: &[(u32, Request)],
    nodes: u32,
    rows: &[Row],
    jitter: f64,
    cache: &Arc<LayeredCache>,
    progress: &dyn Progress,
) -> (Vec<Named>, Vec<Exchange>) {
    let request = requests.iter().find(|(count, _)| *count == nodes).map(|(_, request)| request);
    let point = rows.iter().find(|row| row.nodes == nodes).and_then(|row| row.point.as_ref());
    let Some((request, point)) = request.zip(point).filter(|(request, _)| request.trains()) else {
        return Default::default();
    };
    let bytes = request.graph.parameters().map(|(v, _)| request.graph.ty(v).bytes()).fold(0, u64::saturating_add);
    let exchanges = exchange::exchanges(&request.cluster.groups[0], nodes, point, bytes, jitter);
    (named::rule_of_thumb(request, cache, progress).into_iter().collect(), exchanges)
}

fn local_batch(plan: &Plan) -> f64 {
    plan.global_batch as f64 / f64::from(plan.num_devices().max(1))
}

/// Training on each number of nodes.
fn rows(
    request: &Request,
    question: &Question,
    parameters: u64,
    found: Vec<(u32, Result<Plan, PlanFailure>)>,
) -> Result<Vec<Row>, Error> {
    let each = request.cluster.groups[0].devices_per_node;
    let row = |(nodes, plan): (u32, Result<Plan, PlanFailure>)| {
        let point = plan.as_ref().ok().map(|plan| point(plan, nodes, nodes * each, request, question)).transpose()?;
        Ok(Row { nodes, devices: nodes * each, plan, point })
    };
    let mut rows = found.into_par_iter().map(row).collect::<Result<Vec<_>, Error>>()?;
    // All others are relative to the smallest one with a plan.
    let Some(base) = rows.iter().find_map(|row| row.point.clone()) else { return Ok(rows) };
    let of_point = |row: &mut Row, fastest: Option<&Point>| {
        let own = row.point.take();
        let slower =
            |own: &Point| fastest.is_some_and(|f| useful_s(f, question, &base) < useful_s(own, question, &base));
        let mut point = match (own, fastest) {
            (Some(own), _) if !slower(&own) => own,
            (_, Some(fastest)) => Point { devices: row.devices, ..fastest.clone() }.idle(),
            (own, None) => own?,
        };
        let of_base = base.samples_per_s / f64::from(base.devices);
        point.efficiency = point.samples_per_s / f64::from(point.devices) / of_base;
        point.change = change(&base.parts, &point.parts);
        point.training = training(&point, row.nodes, request, question, parameters, base.global_batch);
        Some(point)
    };
    let mut fastest: Option<Point> = None;
    for row in &mut rows {
        row.point = of_point(row, fastest.as_ref());
        fastest = row.point.clone().or(fastest);
    }
    Ok(rows)
}

/// Seconds per sample's worth of progress. A sample of a larger batch is worth less if the noise scale is known.
fn useful_s(point: &Point, question: &Question, base: &Point) -> f64 {
    worth(point.global_batch, base.global_batch, question.noise_scale) / point.samples_per_s
}

/// Samples that a batch needs for each sample of another one.
fn worth(batch: u64, base: u64, noise_scale: Option<f64>) -> f64 {
    let samples = |batch: u64| noise_scale.map_or(1.0, |scale| BatchEffort::of(batch as f64, scale).samples);
    samples(batch) / samples(base)
}

impl Point {
    /// Adds the device-seconds of idle devices.
    fn idle(mut self) -> Point {
        let all: f64 = f64::from(self.devices) / self.samples_per_s;
        let busy: f64 = self.parts.iter().filter(|p| p.what != IDLE).map(|p| p.device_s).sum();
        let mut parts: BTreeMap<String, f64> = self.parts.drain(..).map(|p| (p.what, p.device_s)).collect();
        parts.insert(IDLE.to_string(), (all - busy).max(0.0));
        self.parts = sorted(parts);
        self
    }
}

const IDLE: &str = "idle devices";
const INPUT: &str = "waiting for input";

/// Predicts a plan on a number of nodes. Fields relative to others are filled in later.
fn point(plan: &Plan, nodes: u32, devices: u32, request: &Request, question: &Question) -> Result<Point, Error> {
    let p = &plan.predicted;
    let storage = request.cluster.storage.as_ref();
    let input =
        storage.zip(question.samples.as_ref()).map(|(s, samples)| Input::new(s, samples, nodes, p.samples_per_s));
    let utilisation = input.map_or(1.0, |input| input.utilisation);
    let samples_per_s = p.samples_per_s * utilisation;
    Ok(Point {
        nodes_used: plan.num_devices().div_ceil(devices / nodes.max(1)),
        devices,
        devices_used: plan.num_devices(),
        global_batch: plan.global_batch,
        local_batch: local_batch(plan),
        step_time_s: p.step_time_s,
        samples_per_s,
        mfu: p.mfu * utilisation,
        device_flop_per_s: p.model_flop * utilisation / p.step_time_s / f64::from(plan.num_devices().max(1)),
        recomputed: plan.stages.iter().all(|s| s.recompute.least() == Recompute::Full),
        peak_bytes: p.peak_bytes.iter().copied().max().unwrap_or(0),
        how: shape(plan),
        efficiency: 1.0,
        input,
        parts: parts(plan, devices, samples_per_s)?,
        change: None,
        training: None,
        on_front: false,
    })
}

/// Device-seconds per sample by kind of work: computation, each collective over each kind of link, waits for other
/// stages and for input, and unused devices.
fn parts(plan: &Plan, devices: u32, samples_per_s: f64) -> Result<Vec<Spent>, Error> {
    let simulation = Simulation::new(plan.clone(), None)?;
    let accounts = simulation.accounts();
    let samples = plan.global_batch as f64;
    let mut parts: BTreeMap<String, f64> = BTreeMap::new();
    for (lane, account) in of_lanes(plan, &accounts).iter().enumerate() {
        let devices = plan.lanes()[lane].devices.len() as f64;
        for (work, seconds) in account.sorted() {
            let what = match work {
                Work::Collective { axes, .. } => match simulation.link_of(lane, axes) {
                    Some(link) => format!("{work}, over {}", link.split(" (").next().unwrap_or(&link)),
                    None => work.to_string(),
                },
                Work::Transfers | Work::Overlapping => Work::Transfers.to_string(),
                Work::Waiting => "waiting for other stages".to_string(),
                _ => Part::Computing.name().to_string(),
            };
            *parts.entry(what).or_default() += seconds * devices / samples;
        }
    }
    let idle = f64::from(devices.saturating_sub(plan.num_devices()));
    let step_s = plan.predicted.step_time_s;
    let unfed_s = (samples / samples_per_s - step_s) * f64::from(plan.num_devices());
    parts.insert(IDLE.to_string(), idle / samples_per_s);
    parts.insert(INPUT.to_string(), unfed_s / samples);
    Ok(sorted(parts))
}

/// Sorts parts by size, without those that are zero.
fn sorted(parts: BTreeMap<String, f64>) -> Vec<Spent> {
    let all: f64 = parts.values().sum();
    let spent = |(what, device_s): (String, f64)| Spent { what, device_s, part: device_s / all };
    let mut spent: Vec<Spent> = parts.into_iter().map(spent).filter(|s| s.part > 1e-9).collect();
    spent.sort_by(|a, b| b.device_s.total_cmp(&a.device_s).then(a.what.cmp(&b.what)));
    spent
}

/// The largest change in the direction of the total change.
fn change(base: &[Spent], other: &[Spent]) -> Option<Change> {
    let mut changes: BTreeMap<&str, f64> = other.iter().map(|s| (s.what.as_str(), s.device_s)).collect();
    base.iter().for_each(|s| *changes.entry(&s.what).or_default() -= s.device_s);
    let all: f64 = changes.values().sum();
    let along: Vec<(&str, f64)> = changes.into_iter().filter(|(_, c)| c * all > 0.0).collect();
    let sum: f64 = along.iter().map(|(_, c)| c).sum();
    let (what, device_s) = along.into_iter().max_by(|a, b| a.1.abs().total_cmp(&b.1.abs()))?;
    Some(Change { what: what.to_string(), device_s, part: device_s / sum })
}

/// The duration and cost of training at a point.
fn training(
    point: &Point,
    nodes: u32,
    request: &Request,
    question: &Question,
    parameters: u64,
    base_batch: u64,
) -> Option<Training> {
    let length = question.length?;
    let samples = length.samples * worth(point.global_batch, base_batch, question.noise_scale);
    let steps = (samples / point.global_batch as f64).ceil();
    let hours = samples / point.samples_per_s / 3600.0;
    let group = &request.cluster.groups[0];
    let device_hours = hours * f64::from(point.devices);
    let formula_hours = length.tokens.map(|tokens| {
        // The rate of devices includes recomputation.
        let flop = arithmetic::flop_per_parameter_and_token;
        let rate = point.device_flop_per_s * flop(point.recomputed) / flop(false);
        let (tokens, devices) = (tokens * samples / length.samples, u64::from(point.devices_used));
        24.0 * arithmetic::training_days(tokens, parameters as f64, devices, rate, point.recomputed)
    });
    Some(Training {
        steps,
        samples,
        hours,
        wait_hours: question.queue_waits.as_ref().and_then(|waits| waits.hours(nodes)),
        device_hours,
        price: group.price_per_hour.map(|price| price * f64::from(nodes) * hours),
        kwh: group.device.watts.map(|watts| watts * device_hours / 1e3),
        formula_hours,
    })
}

/// Marks the points that are Pareto-optimal in time and device-hours.
fn mark_front(rows: &mut [Row]) {
    let costs = |row: &Row| row.point.as_ref().and_then(|p| p.training).map(|t| (t.done_hours(), t.device_hours));
    let all: Vec<(f64, f64)> = rows.iter().filter_map(costs).collect();
    for row in rows {
        let Some(own) = costs(row) else { continue };
        let beats = |other: &(f64, f64)| other.0 <= own.0 && other.1 <= own.1 && *other != own;
        if let Some(point) = &mut row.point {
            point.on_front = !all.iter().any(beats);
        }
    }
}

/// The recommendation: the fewest device-hours of those done in time, or the knee. Among equals the smaller number.
fn recommended(rows: &[Row], max_hours: Option<f64>) -> Option<Recommended> {
    let all = rows.iter().filter_map(|row| Some((row.nodes, row.point.as_ref()?.training?)));
    let least = |all: &[(u32, Training)], by: &dyn Fn(&Training) -> f64| {
        all.iter().min_by(|a, b| by(&a.1).total_cmp(&by(&b.1)).then(a.0.cmp(&b.0))).map(|(nodes, _)| *nodes)
    };
    let all: Vec<(u32, Training)> = all.collect();
    let in_time: Vec<_> =
        all.iter().copied().filter(|(_, t)| max_hours.is_none_or(|most| t.done_hours() <= most)).collect();
    let (nodes, rule) = match (max_hours, in_time.is_empty()) {
        (Some(_), false) => (least(&in_time, &|t| t.device_hours), Rule::WithinHours),
        (Some(_), true) => (least(&all, &Training::done_hours), Rule::Fastest),
        (None, _) => (least(&all, &|t| t.done_hours() * t.device_hours), Rule::Knee),
    };
    Some(Recommended { nodes: nodes?, rule })
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
