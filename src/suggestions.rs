//! Suggestions if no plan exists. If none fits in memory, the plan that comes closest is lowered and followed tensor by
//! tensor to its peak. The report names the fewest tensors that exceed the memory by themselves. Then each change that
//! a user could make is planned in full, so that every suggestion is known to fit.

use crate::simulate::{HeldTensor, MemoryTimeline, Simulation};
use crate::units::{bytes, seconds};
use crate::{Error, plan};
use altiplano_cost_models::catalogue;
use altiplano_ir::batch::LossKind;
use altiplano_ir::cluster::{Device, DeviceKind};
use altiplano_ir::optimizer::Optimizer;
use altiplano_ir::plan::{Offload, Plan};
use altiplano_ir::recompute::Recompute;
use altiplano_planner::predict::memory::Category;
use altiplano_planner::search::memory_bound;
use altiplano_planner::{PlanFailure, Progress, Request, Silent};
use rayon::prelude::*;
use serde_json::json;
use std::fmt;
use std::sync::Arc;

/// A change with which there is a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Remedy {
    pub change: String,
    /// Predictions for the plan with the change.
    pub step_s: f64,
    pub peak_bytes: u64,
    pub devices: u64,
    /// Samples per step, which a change may reduce.
    pub samples: u64,
}

impl Remedy {
    fn of(change: String, request: &Request, plan: &Plan) -> Remedy {
        Remedy {
            change,
            step_s: plan.predicted.step_time_s,
            peak_bytes: plan.predicted.peak_bytes.iter().copied().max().unwrap_or(0),
            devices: request.cluster.num_devices().into(),
            samples: request.global_batch_size(),
        }
    }

    /// The cost of a sample in device-seconds.
    fn device_seconds(&self) -> f64 {
        self.step_s * self.devices as f64 / self.samples.max(1) as f64
    }
}

/// The reason why no plan of a request fits in memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Shortage {
    pub stage: usize,
    pub num_stages: usize,
    /// The moment of peak memory of the plan that comes closest.
    pub moment: String,
    pub peak_bytes: u64,
    pub limit_bytes: u64,
    /// Highest memory need on any device of the plan that comes closest.
    pub needed_bytes: u64,
    /// The fewest tensors that exceed the memory by themselves at that moment, largest first.
    pub tensors: Vec<HeldTensor>,
    /// Optimizer state held at that moment.
    pub state_bytes: u64,
    /// Changes with which a plan fits, cheapest in device-seconds per sample first.
    pub remedies: Vec<Remedy>,
}

/// The obstacle to a plan, and the changes that remove it.
#[derive(Clone, Debug, PartialEq)]
pub enum Explained {
    Memory(Shortage),
    /// The result of [`fixes`].
    Choices(Vec<Remedy>),
}

/// Maximum number of nodes to try, as a multiple of the present number.
const MOST_GROWTH: u32 = 64;
/// Memory sizes to try, as multiples of what the closest plan needs.
const LARGER: [f64; 4] = [1.01, 1.05, 1.15, 1.5];
/// Maximum number of tensors listed in words.
const LISTED: usize = 6;

/// Explains a request that failed for lack of memory, and suggests changes. `closest` is the plan that comes closest.
///
/// # Errors
/// Fails if that plan cannot be lowered.
pub fn shortage(request: &Request, closest: &Plan, progress: &dyn Progress) -> Result<Shortage, Error> {
    progress.step("largest tensors", 0, 1);
    let closest = closest.clone();
    let needed_bytes = closest.predicted.peak_bytes.iter().copied().max().unwrap_or(0);
    let limits: Vec<u64> = closest.stages.iter().map(|s| closest.usable_bytes(s)).collect();
    let simulation = Simulation::new(closest, None)?;
    let timelines = simulation.memory();
    let over = |stage: usize, m: &MemoryTimeline| m.peak_bytes as f64 / limits[stage].max(1) as f64;
    let fullest =
        timelines.iter().enumerate().max_by(|a, b| over(a.0, a.1).total_cmp(&over(b.0, b.1)).then(b.0.cmp(&a.0)));
    let Some((stage, memory)) = fullest else {
        return Err(PlanFailure::NoCombination.into());
    };
    let limit_bytes = limits[stage];
    let mut sum = 0;
    let too_much = memory.held.iter().take_while(|tensor| {
        let before = sum;
        sum += tensor.total_bytes();
        before <= limit_bytes
    });
    let tensors = too_much.cloned().collect();
    let state_bytes = memory.by_category().get(&Category::OptimizerState).copied().unwrap_or(0);
    let mut remedies = remedies(request, needed_bytes, progress);
    remedies.sort_by(|a, b| a.device_seconds().total_cmp(&b.device_seconds()));
    Ok(Shortage {
        stage,
        num_stages: timelines.len(),
        moment: simulation.moment(stage),
        peak_bytes: memory.peak_bytes,
        limit_bytes,
        needed_bytes,
        tensors,
        state_bytes,
        remedies,
    })
}

/// Suggests changes to fixed choices for a request that has no plan for other reasons than memory. They free each fixed
/// choice, or replace degrees and counts by ones that divide the devices and samples. The fastest comes first.
pub fn fixes(request: &Request, progress: &dyn Progress) -> Vec<Remedy> {
    let devices = u64::from(request.cluster.num_devices());
    let samples = request.global_batch_size();
    // The nearest divisors below and above.
    let near = |given: u64, whole: u64| {
        let divides = |n: &u64| whole.is_multiple_of(*n);
        let below = (1..given.min(whole + 1)).rev().find(divides);
        [below, (given + 1..=whole).find(divides)].into_iter().flatten().collect::<Vec<u64>>()
    };
    let mut changes: Vec<(String, Request)> = Vec::new();
    let mut change = |what: String, change: &dyn Fn(&mut Request)| {
        let mut new = request.clone();
        new.baselines = false;
        change(&mut new);
        changes.push((what, new));
    };
    type Degree = fn(&mut Request) -> &mut Option<u32>;
    let degrees: [(&str, Degree, u64); 8] = [
        ("--dp", |r| &mut r.degrees.dp, devices),
        ("--tp", |r| &mut r.degrees.tp, devices),
        ("--pp", |r| &mut r.degrees.pp, devices),
        ("--cp", |r| &mut r.degrees.cp, devices),
        ("--ep", |r| &mut r.degrees.ep, devices),
        ("--dp-replicate", |r| &mut r.degrees.groups, devices),
        ("--num-microbatches", |r| &mut r.batch.num_microbatches, samples),
        ("--virtual-stages", |r| &mut r.degrees.virtual_stages, 1),
    ];
    for (option, degree, whole) in degrees {
        let Some(given) = *degree(&mut request.clone()) else { continue };
        change(format!("{option} left free"), &|r| *degree(r) = None);
        for other in near(u64::from(given), whole) {
            change(format!("{option} {other}"), &|r| *degree(r) = u32::try_from(other).ok());
        }
    }
    if let Some(given) = request.batch.microbatch {
        change("--microbatch left free".into(), &|r| r.batch.microbatch = None);
        for other in near(given, samples) {
            change(format!("--microbatch {other}"), &|r| r.batch.microbatch = Some(other));
        }
    }
    if request.batch.per_replica.is_some() {
        change("--micro-batch-size left free".into(), &|r| r.batch.per_replica = None);
    }
    if request.degrees.zero.is_some() {
        change("--zero left free".into(), &|r| r.degrees.zero = None);
    }
    if request.schedule.is_some() && request.trains() {
        change("--schedule left free".into(), &|r| r.schedule = None);
    }
    if request.recompute.is_some() && request.trains() {
        change("--recompute left free".into(), &|r| r.recompute = None);
    }
    if !request.graph.pins.is_empty() {
        change("no --pin and no shardings of the model".into(), &|r| Arc::make_mut(&mut r.graph).pins.clear());
    }
    let total = changes.len();
    let planned = |(i, (change, request)): (usize, (String, Request))| {
        progress.step(&change, i, total);
        Some(Remedy::of(change, &request, &plan(&request, &Silent).ok()?))
    };
    let mut fixes: Vec<Remedy> = changes.into_par_iter().enumerate().filter_map(planned).collect();
    fixes.sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
    fixes
}

/// The request with a loss of its own for each microbatch. `None` if the loss is a mean or a sum over samples, which
/// microbatches leave alone, or if the batch has a fixed size.
fn with_losses_of_microbatches(request: &Request) -> Option<Request> {
    let whole = request.loss == LossKind::Other && !request.allow_microbatch_semantics && request.graph.batch != 0;
    whole.then(|| Request { allow_microbatch_semantics: true, baselines: false, ..request.clone() })
}

/// Plans each change to a request, and returns those with a plan.
fn remedies(request: &Request, needed_bytes: u64, progress: &dyn Progress) -> Vec<Remedy> {
    let mut changes: Vec<Vec<(String, Request)>> = Vec::new();
    let changed = |what: &str, change: &dyn Fn(&mut Request)| vec![changed(request, what, change)];
    let free =
        |r: &mut Request| (r.batch.microbatch, r.batch.num_microbatches, r.batch.per_replica) = (None, None, None);
    if request.batch.microbatch.is_some()
        || request.batch.num_microbatches.is_some()
        || request.batch.per_replica.is_some()
    {
        changes.push(changed("a free number of microbatches", &free));
    }
    if let Some(new) = with_losses_of_microbatches(request) {
        let change = "--allow-microbatch-semantics, with a loss of its own for each microbatch";
        changes.push(vec![(change.to_string(), new)]);
    }
    if request.recompute.is_some_and(|r| r != Recompute::Full) {
        changes.push(changed("--recompute full", &|r| r.recompute = Some(Recompute::Full)));
    }
    if request.degrees.zero.is_some_and(|level| level < 3) && request.trains() {
        changes.push(changed("--zero 3", &|r| r.degrees.zero = Some(3)));
    }
    let degrees = |r: &Request| {
        [
            ("--dp", r.degrees.dp),
            ("--tp", r.degrees.tp),
            ("--pp", r.degrees.pp),
            ("--cp", r.degrees.cp),
            ("--ep", r.degrees.ep),
            ("--dp-replicate", r.degrees.groups),
        ]
    };
    let given = degrees(request).into_iter().filter_map(|(option, degree)| degree.map(|_| option));
    let given: Vec<&str> = given.collect();
    if !given.is_empty() {
        let free = |r: &mut Request| {
            (r.degrees.dp, r.degrees.tp, r.degrees.pp) = (None, None, None);
            (r.degrees.cp, r.degrees.ep, r.degrees.groups) = (None, None, None);
        };
        changes.push(changed(&format!("free degrees (no {})", given.join(", ")), &free));
    }
    if request.trains() && !matches!(request.training.optimizer, Optimizer::Sgd { .. }) {
        changes.push(changed("--optimizer sgd, which keeps less state", &|r| r.training.optimizer = Optimizer::sgd()));
    }
    // Offloading needs devices with a memory of their own.
    let apart = request.cluster.groups.iter().all(|group| group.device.kind == DeviceKind::Gpu);
    if request.trains() && apart && request.offload == Some(Offload::NONE) {
        for what in Offload::EACH.into_iter().filter(|what| !what.is_none()) {
            let change = format!("--offload {}, with {} in the memory of the hosts", what.name(), what.words());
            changes.push(changed(&change, &|r| r.offload = Some(what)));
        }
    }
    // Among growing or shrinking sizes, the first that fits.
    let samples = request.global_batch_size();
    let halved = (1..=10).map(|n| samples >> n).filter(|&batch| batch > 0).map(|batch| {
        let change = format!("--global-batch {batch} instead of {samples}");
        let halve = |r: &mut Request| {
            free(r);
            r.batch.global = Some(batch);
        };
        changed(&change, &halve).remove(0)
    });
    changes.push(halved.collect());
    if request.degrees.dp.or(request.degrees.tp).or(request.degrees.pp).is_none() {
        changes.push(more_nodes(request));
    }
    // Among devices with slightly more memory than the closest plan needs, the first with a plan.
    changes.push(larger_devices(request, needed_bytes));
    let total = changes.len();
    let first_that_fits = |(i, row): (usize, Vec<(String, Request)>)| {
        row.into_iter().filter(|(_, request)| !memory_bound::excludes(request)).find_map(|(change, request)| {
            progress.step(&change, i, total);
            Some(Remedy::of(change, &request, &plan(&request, &Silent).ok()?))
        })
    };
    changes.into_par_iter().enumerate().filter_map(first_that_fits).collect()
}

/// A changed request, with the words for the change.
fn changed(request: &Request, what: &str, change: &dyn Fn(&mut Request)) -> (String, Request) {
    let mut new = request.clone();
    new.baselines = false;
    change(&mut new);
    (what.to_string(), new)
}

/// Requests with growing numbers of nodes.
fn more_nodes(request: &Request) -> Vec<(String, Request)> {
    let devices = request.cluster.groups.iter().map(|g| u64::from(g.num_devices())).sum::<u64>();
    let factors = (1..).map(|n| 1_u32 << n).take_while(|&by| by <= MOST_GROWTH);
    let countable = factors.filter(|&by| devices.checked_mul(by.into()).is_some_and(|n| u32::try_from(n).is_ok()));
    let grown = countable.map(|by| {
        let grow = |r: &mut Request| r.cluster.groups.iter_mut().for_each(|g| g.nodes *= by);
        changed(request, &format!("{by} times the nodes"), &grow)
    });
    grown.collect()
}

/// Requests for devices with room for `needed_bytes`, or for slightly more.
fn larger_devices(request: &Request, needed_bytes: u64) -> Vec<(String, Request)> {
    let taken = request.cluster.groups.iter().map(|g| request.cluster.taken_bytes(g).into_iter().sum::<u64>());
    let taken = taken.max().unwrap_or(0);
    let larger = LARGER.into_iter().map(|times| {
        let needed = (needed_bytes as f64 * times).ceil() as u64;
        let memory = needed + taken;
        let grow = |r: &mut Request| {
            r.cluster.groups.iter_mut().for_each(|g| g.device.memory_bytes = g.device.memory_bytes.max(memory));
        };
        let such_as = smallest_device(&request.cluster.groups[0].device, needed)
            .map_or(String::new(), |name| format!(", such as {name}"));
        changed(request, &format!("devices with {} of memory{such_as}", bytes(memory)), &grow)
    });
    larger.collect()
}

/// The smallest GPU of the same vendor in the catalogue on which tensors have room for `needed_bytes`.
fn smallest_device(like: &Device, needed_bytes: u64) -> Option<String> {
    let vendor = |device: &Device| device.generation().map(|generation| std::mem::discriminant(&generation));
    let usable = |device: &Device| {
        let taken = device.reserved.map_or(0, |r| r.context_bytes + r.communication_bytes + r.allocator_bytes);
        device.memory_bytes.saturating_sub(taken)
    };
    let devices = catalogue::device_names().into_iter().filter_map(|name| catalogue::device(&name));
    let alike = devices.filter(|d| d.kind == DeviceKind::Gpu && vendor(d) == vendor(like));
    let enough = alike.filter(|d| usable(d) >= needed_bytes);
    enough.min_by_key(|device| device.memory_bytes).map(|device| device.name)
}

/// A failed search as JSON (`docs/failure.schema.json`).
pub fn failure_json(error: &Error, explained: Option<&Explained>) -> String {
    let change = |r: &Remedy| {
        json!({
            "change": r.change, "step_time_s": r.step_s, "peak_bytes": r.peak_bytes, "devices": r.devices, "samples": r.samples,
        })
    };
    let tensor =
        |t: &HeldTensor| json!({"name": t.name, "holds": t.category.name(), "bytes": t.bytes, "count": t.count});
    let (shortage, changes) = match explained {
        Some(Explained::Memory(short)) => {
            let shortage = json!({
                "stage": short.stage,
                "stages": short.num_stages,
                "moment": short.moment,
                "peak_bytes": short.peak_bytes,
                "limit_bytes": short.limit_bytes,
                "needed_bytes": short.needed_bytes,
                "optimizer_state_bytes": short.state_bytes,
                "tensors": short.tensors.iter().map(tensor).collect::<Vec<_>>(),
            });
            (Some(shortage), short.remedies.as_slice())
        }
        Some(Explained::Choices(fixes)) => (None, fixes.as_slice()),
        None => (None, &[][..]),
    };
    let changes: Vec<_> = changes.iter().map(change).collect();
    let document = json!({"error": error.to_string(), "shortage": shortage, "changes": changes});
    serde_json::to_string_pretty(&document).unwrap_or_default()
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (step, peak) = (seconds(self.step_s), bytes(self.peak_bytes));
        write!(f, "{}: at most {step} per step, {peak} per device", self.change)
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stage = if self.num_stages > 1 { format!(" on a device of stage{}", self.stage) } else { String::new() };
        writeln!(
            f,
            "the closest plan holds {} of {}{stage} in {}; {} of its tensors at that moment exceed the memory of a device:",
            bytes(self.peak_bytes),
            bytes(self.limit_bytes),
            self.moment,
            self.tensors.len()
        )?;
        for tensor in self.tensors.iter().take(LISTED) {
            let times = if tensor.count > 1 { format!(" ({} microbatches)", tensor.count) } else { String::new() };
            writeln!(f, "  {:>8}{times}  {}  {}", bytes(tensor.total_bytes()), tensor.category.name(), tensor.name)?;
        }
        let rest = &self.tensors[self.tensors.len().min(LISTED)..];
        if !rest.is_empty() {
            let sum = rest.iter().map(HeldTensor::total_bytes).sum();
            writeln!(f, "  {:>8}  in {} more", bytes(sum), rest.len())?;
        }
        match self.remedies.is_empty() {
            true => write!(f, "no change that was tried makes it fit")?,
            false => writeln!(f, "changes that make it fit, least device time per sample first:")?,
        }
        let lines: Vec<String> = self.remedies.iter().map(|remedy| format!("  {remedy}")).collect();
        write!(f, "{}", lines.join("\n"))
    }
}
