//! Planning requests, and the reasons why planning may fail.

use crate::cache::Cache;
use crate::features::chunked_loss::{self, LossChunks};
use crate::features::rings::{self, Ring};
use crate::features::stages::GivenStages;
use crate::features::target::{execution, with_up_projections};
use crate::lower::KnownComposites;
use altiplano_ir::autodiff::AutodiffError;
use altiplano_ir::batch::LossKind;
use altiplano_ir::cluster::{Cluster, DeviceKind};
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::loss_scale::LossScale;
use altiplano_ir::optimizer::Optimizer;
use altiplano_ir::plan::Downscaling;
use altiplano_ir::plan::{Execution, Goal, MfuConvention, Offload, Plan, Schedule, Stage, Target, Update};
use altiplano_ir::recompute::{Modules, Recompute};
use std::sync::Arc;

/// A planning problem. Fields that are `None` are searched.
#[derive(Clone, Debug)]
pub struct Request {
    /// Name of the model, for display.
    pub model: String,
    /// The forward graph with its batch found (see [`altiplano_ir::batch`]) and simplified; its first output is the loss.
    pub graph: Arc<Graph>,
    pub loss: LossKind,
    pub stop_gradients: Vec<ValueId>,
    /// How the graph is smaller than the user's model, for display.
    pub reduction: Option<Downscaling>,
    /// True if sizes that devices do not divide may be padded (see [`altiplano_ir::padding`]).
    pub pad: bool,
    /// Use of ring attention (see [`crate::features::rings`]).
    pub ring: Ring,
    /// Use of a loss that makes its logits in chunks (see [`crate::features::chunked_loss`]).
    pub loss_chunks: LossChunks,
    pub cluster: Cluster,
    pub batch: BatchSizes,
    pub degrees: GivenDegrees,
    /// Stages given by hand, which fix the degree of pipeline parallelism.
    pub stages: GivenStages,
    pub training: Training,
    /// [`Schedule::Forward`] plans inference instead of training.
    pub schedule: Option<Schedule>,
    /// Search for an order of the pipeline's calls, and keep it if it is faster than every named schedule.
    pub searches_order: bool,
    /// Parameter servers to use. Asynchronous ones change the result, so servers are used only on request.
    pub servers: Option<OverServers>,
    /// Objective if nothing is trained.
    pub goal: Goal,
    pub recompute: Option<Recompute>,
    /// The modules that selective recomputation repeats. Defaults to those of the target's software.
    pub recompute_modules: Option<Modules>,
    /// Data to keep in host memory. If `None`, GPUs offload where nothing fits otherwise, or where it beats
    /// recomputation.
    pub offload: Option<Offload>,
    pub execution: Execution,
    /// True if attention is one kernel. Defaults to the behaviour of the target's software on these devices.
    pub fused_attention: Option<bool>,
    /// Software that runs the plan; see [`crate::features::target::restrict`].
    pub target: Target,
    /// Part of the space to search.
    pub search: SearchKind,
    /// Split the batch into microbatches even if the loss is no mean or sum over samples.
    pub allow_microbatch_semantics: bool,
    /// Take the fastest plan even if it is hardly faster than one GPU (see [`crate::features::one_device`]).
    pub fastest: bool,
    /// Also predict the plain baselines.
    pub baselines: bool,
    /// FLOPs that count towards the plan's MFU.
    pub mfu_convention: MfuConvention,
    /// Results of earlier searches. They only change how long a search takes.
    pub cache: Option<Arc<Cache>>,
    /// Costs of composites that this request and its copies have priced.
    pub composites: Arc<KnownComposites>,
}

/// The sizes of a batch that the user gave.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BatchSizes {
    /// Samples per optimizer step. Defaults to `microbatch` times `num_microbatches` if both are given, else to the
    /// traced batch.
    pub global: Option<u64>,
    /// Samples of all replicas in one pass through a stage.
    pub microbatch: Option<u64>,
    pub num_microbatches: Option<u32>,
    /// Samples per replica and microbatch: `microbatch` over the degree of data parallelism.
    pub per_replica: Option<u64>,
}

/// Degrees of parallelism and of sharded storage that are fixed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GivenDegrees {
    /// Degree of data parallelism.
    pub dp: Option<u32>,
    /// Degree of tensor parallelism.
    pub tp: Option<u32>,
    /// Degree of pipeline parallelism.
    pub pp: Option<u32>,
    /// Degree of context parallelism: devices that split the positions of a sample, on top of the other degrees. With
    /// 1, attention keeps samples whole.
    pub cp: Option<u32>,
    /// Degree of expert parallelism: parts into which experts are divided, among the devices of the other degrees.
    pub ep: Option<u32>,
    /// Groups of replicas, each of which holds all that is sharded (hybrid sharding); with 1, all replicas share it.
    pub groups: Option<u32>,
    /// Pipeline stages per device; with 1, each stage has devices of its own.
    pub virtual_stages: Option<u32>,
    /// Level of ZeRO: 1 shards optimizer state, 2 gradients as well, 3 parameters as well.
    pub zero: Option<u8>,
}

impl GivenDegrees {
    /// True if data, tensor and pipeline parallelism are all fixed.
    pub fn are_all_given(&self) -> bool {
        self.dp.is_some() && self.tp.is_some() && self.pp.is_some()
    }

    /// Fails if a degree is 0. Whatever divides by degrees calls this first.
    pub(crate) fn expect_positive(&self) -> Result<(), PlanFailure> {
        let given = [
            ("dp", self.dp),
            ("tp", self.tp),
            ("pp", self.pp),
            ("cp", self.cp),
            ("ep", self.ep),
            ("dp-replicate", self.groups),
            ("virtual-stages", self.virtual_stages),
        ];
        match given.into_iter().find(|(_, degree)| *degree == Some(0)) {
            Some((option, _)) => Err(PlanFailure::Option { option, value: 0, problem: "must be at least 1" }),
            None => Ok(()),
        }
    }
}

/// How a step changes the weights.
#[derive(Clone, Debug)]
pub struct Training {
    pub optimizer: Optimizer,
    /// Largest norm of all gradients together.
    pub clip_norm: Option<f64>,
    /// Scale of the loss. A dynamic scale needs gradients that are not late, and is dropped if they are.
    pub loss_scale: Option<LossScale>,
    /// Late gradients change the result, so they are used only on request.
    pub update: Update,
}

impl Request {
    /// Creates a request with defaults: degrees, microbatches and schedule are searched, and nothing is offloaded.
    pub fn new(model: impl Into<String>, graph: impl Into<Arc<Graph>>, loss: LossKind, cluster: Cluster) -> Self {
        let graph = graph.into();
        let execution = execution(Target::Altiplano, &cluster, &graph, None);
        let execution = with_up_projections(execution, Target::Altiplano, &graph);
        let loss_scale = LossScale::of_model(&graph);
        Request {
            model: model.into(),
            graph,
            loss,
            stop_gradients: Vec::new(),
            reduction: None,
            pad: true,
            ring: Ring::Auto,
            loss_chunks: LossChunks::Auto,
            cluster,
            batch: BatchSizes::default(),
            degrees: GivenDegrees::default(),
            stages: GivenStages::default(),
            training: Training {
                optimizer: Optimizer::adamw(),
                clip_norm: None,
                loss_scale,
                update: Update::Synchronous,
            },
            schedule: None,
            searches_order: false,
            servers: None,
            goal: Goal::Latency,
            recompute: None,
            recompute_modules: None,
            offload: Some(Offload::NONE),
            execution,
            fused_attention: None,
            target: Target::Altiplano,
            search: SearchKind::Whole,
            allow_microbatch_semantics: false,
            fastest: true,
            baselines: true,
            mfu_convention: MfuConvention::default(),
            cache: None,
            composites: Arc::default(),
        }
    }

    /// Gives lanes as many stages as the schedule has, unless the user fixed another number.
    pub(crate) fn fix_virtual_stages(&mut self) {
        let of_schedule = self.schedule.and_then(Schedule::virtual_stages);
        self.degrees.virtual_stages = self.degrees.virtual_stages.or(of_schedule);
    }

    /// True if a plan respects the degrees and stages that the user fixed.
    pub fn allows(&self, plan: &Plan) -> bool {
        let mesh_is = |axis: usize, degree: Option<u32>| {
            degree.is_none_or(|d| plan.stages.iter().all(|s| s.mesh.axes[axis].size == d))
        };
        mesh_is(0, self.degrees.dp)
            && mesh_is(1, self.degrees.tp)
            && self.degrees.pp.is_none_or(|pp| plan.num_lanes() as u32 == pp)
            && self.degrees.virtual_stages.is_none_or(|v| plan.virtual_stages == v)
            && self.degrees.zero.is_none_or(|z| plan.stages.iter().all(|s| s.zero == z))
            && self.stages.allow(plan)
    }

    /// Samples of a step.
    pub fn global_batch_size(&self) -> u64 {
        let given = self.batch.global.or(match (self.batch.microbatch, self.batch.num_microbatches) {
            (Some(size), Some(count)) => Some(size * count as u64),
            _ => None,
        });
        given.unwrap_or(self.graph.batch.max(1))
    }

    /// True if any device is a GPU.
    pub fn has_gpus(&self) -> bool {
        self.cluster.groups.iter().any(|group| group.device.kind == DeviceKind::Gpu)
    }

    /// Reconstructs the request that a plan answers: its model, batch, optimizer, cluster and target. Other choices are
    /// left open, since a plan does not record which of them were given.
    pub fn of_plan(plan: &Plan) -> Self {
        let (graph, stop_gradients) = plan.own();
        let (graph, stop_gradients) = chunked_loss::without(&rings::without(graph), stop_gradients);
        let mut request = Request::new(plan.model.clone(), graph, plan.loss, plan.cluster.clone());
        request.stop_gradients = stop_gradients;
        request.reduction = plan.reduction;
        request.batch.global = Some(plan.global_batch);
        // Fix the schedules that change the result: no other schedule may replace them.
        let decides = !plan.schedule.trains() || plan.schedule == Schedule::PipeDream;
        request.schedule = decides.then_some(plan.schedule);
        request.training.update = plan.update;
        request.servers = plan
            .servers
            .as_ref()
            .map(|over| OverServers { count: over.servers.len() as u32, asynchronous: over.asynchronous });
        request.goal = plan.goal;
        request.training.optimizer = plan.optimizer;
        let is_offloaded = plan.stages.iter().any(|stage| !stage.offload.is_none());
        request.offload = (!is_offloaded).then_some(Offload::NONE);
        request.training.clip_norm = plan.clip_norm;
        request.training.loss_scale = plan.loss_scale;
        request.execution = plan.execution;
        request.fused_attention = Some(plan.execution.fused_attention);
        request.recompute_modules = Some(plan.execution.recompute_modules);
        request.mfu_convention = plan.predicted.mfu_convention;
        request.target = plan.target;
        request.allow_microbatch_semantics = plan.num_microbatches > 1;
        request
    }

    /// Returns true if the plan is to train the model.
    pub fn trains(&self) -> bool {
        self.schedule.is_none_or(Schedule::trains)
    }
}

/// Parameter servers to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverServers {
    /// Number of devices that hold the weights, the last of the cluster. All others compute gradients.
    pub count: u32,
    /// True if each push is an update of its own, for which no other worker waits.
    pub asynchronous: bool,
}

/// Part of the space to search.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SearchKind {
    #[default]
    Whole,
    /// The space of Alpa (Zheng et al. 2022): submeshes of a power of two within a node or of whole nodes, all devices
    /// used, every layer recomputed, one level of sharded storage, and no cost for transfers between stages.
    Alpa,
}

/// Reason why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanFailure {
    #[error(transparent)]
    Autodiff(#[from] AutodiffError),
    #[error("{option} {value} is for devices that are all alike; the cluster has {groups} groups of nodes")]
    OneGroup { option: &'static str, value: &'static str, groups: usize },
    #[error("--{option} {given} is not {allowed}, which is what {target} runs")]
    Target { target: &'static str, option: &'static str, given: u32, allowed: u32 },
    #[error("--{option} {given}: {target} {problem}")]
    Lacks { target: &'static str, option: &'static str, given: String, problem: String },
    #[error("--{option}: {value} {problem}")]
    Option { option: &'static str, value: u64, problem: &'static str },
    #[error("--{option} {given}: {problem}")]
    Stages { option: &'static str, given: String, problem: String },
    #[error("--{option} with --parameter-servers: {problem}")]
    Servers { option: &'static str, problem: &'static str },
    #[error("{}", degrees(*.dp, *.tp, *.pp, *.cp, *.product, *.devices))]
    Degrees { dp: u32, tp: u32, pp: u32, cp: u32, product: u64, devices: u32 },
    #[error(
        "--dp x --tp puts {of_stage} devices into a stage, which lies in one group of nodes; the groups of the cluster have {}",
        .groups.iter().map(u32::to_string).collect::<Vec<_>>().join(" and ")
    )]
    StageOverGroups { of_stage: u64, groups: Vec<u32> },
    #[error("the model has {layers} layers, too few for {stages} pipeline stages")]
    TooFewLayers { layers: u32, stages: u32 },
    #[error(
        "no plan fits in memory: the best needs {} per device, {} more than the {} that tensors can use of a {device} ({detail})",
        Bytes(*required_bytes),
        Bytes(*over_bytes),
        Bytes(*limit_bytes)
    )]
    Memory {
        required_bytes: u64,
        limit_bytes: u64,
        over_bytes: u64,
        device: String,
        detail: String,
        /// The plan that needs this much, if it was predicted; otherwise the required bytes are an estimate.
        closest: Option<Box<Plan>>,
    },
    #[error(
        "no plan fits in the memory of its nodes: of what fits on devices the best keeps {} of optimizer state on a node that has {}",
        Bytes(*required_bytes),
        Bytes(*limit_bytes)
    )]
    HostMemory { required_bytes: u64, limit_bytes: u64 },
    #[error(
        "no combination of stages, meshes and microbatches uses the cluster with these options; leave some of the degrees, --zero, --global-batch or the number of microbatches to the search"
    )]
    NoCombination,
    /// By the search's estimates, no candidate is worth predicting.
    #[error("by the search's estimates more than {times} times slower than the best plan")]
    FarBehind { times: f64 },
    #[error(
        "no plan for this cluster and these options lays out values as --pin, --cp, --ep or the model's own shardings ask for (--ignore-shardings leaves those of the model out): {}{}",
        .pins.iter().take(3).map(String::as_str).collect::<Vec<_>>().join("; "),
        if .pins.len() > 3 { format!("; and {} more", .pins.len() - 3) } else { String::new() }
    )]
    Pins { pins: Vec<String> },
}

impl PlanFailure {
    /// Describes why a predicted plan, the closest to fitting, does not fit.
    pub fn of_closest(closest: Plan, detail: String) -> Self {
        let part = |s: &Stage| s.predicted.peak_bytes as f64 / closest.usable_bytes(s).max(1) as f64;
        let of_stage = closest.stages.iter().max_by(|a, b| part(a).total_cmp(&part(b)));
        let of_servers = closest.servers.iter().flat_map(|over| &over.predicted).map(|server| server.peak_bytes).max();
        let group = of_stage.map_or(&closest.cluster.groups[0], |stage| closest.group_of(stage));
        let (device, limit_bytes) = (&group.device, closest.cluster.usable_bytes(group));
        let required_bytes = of_stage.map_or(0, |stage| stage.predicted.peak_bytes).max(of_servers.unwrap_or(0));
        PlanFailure::Memory {
            required_bytes,
            limit_bytes,
            over_bytes: required_bytes.saturating_sub(limit_bytes),
            device: device.name.clone(),
            detail,
            closest: Some(Box::new(closest)),
        }
    }

    /// The failure that says more: a lack of memory, and of two such failures the one nearer to fitting.
    pub fn nearer(self, other: PlanFailure) -> PlanFailure {
        let required = |failure: &PlanFailure| match failure {
            PlanFailure::Memory { required_bytes, .. } => *required_bytes,
            _ => u64::MAX,
        };
        if required(&other) < required(&self) { other } else { self }
    }

    /// Returns true if the request itself is invalid (exit code 2), rather than without a feasible plan (1).
    pub fn is_usage(&self) -> bool {
        use PlanFailure::{FarBehind, HostMemory, Memory, NoCombination, Pins};
        !matches!(self, Memory { .. } | HostMemory { .. } | NoCombination | FarBehind { .. } | Pins { .. })
    }
}

/// Observer of the search, for progress bars.
pub trait Progress: Sync {
    /// Reports that `done` of `total` pieces of work are done, and names the current one.
    fn step(&self, what: &str, done: usize, total: usize);

    /// Reports the predicted step time of a plan that fits, and a lower bound of any plan on these devices.
    fn best(&self, _step_s: f64, _bound_s: f64) {}

    /// Reports the answer to one of several questions, which stays whatever else is found.
    fn answered(&self, _what: &str, _answer: &Result<Plan, PlanFailure>) {}

    /// Returns true if the search should stop and return the best plan so far.
    fn stopped(&self) -> bool {
        false
    }
}

/// Ignores all progress.
pub struct Silent;

/// Ignores all progress, and stops when the observer inside does.
pub struct Muted<'a>(pub &'a dyn Progress);

impl Progress for Muted<'_> {
    fn step(&self, _: &str, _: usize, _: usize) {}

    fn stopped(&self) -> bool {
        self.0.stopped()
    }
}

impl Progress for Silent {
    fn step(&self, _: &str, _: usize, _: usize) {}
}

/// Bytes in human-readable form, with three digits.
struct Bytes(u64);

impl std::fmt::Display for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let units = ["B", "kB", "MB", "GB", "TB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1000.0 && unit + 1 < units.len() {
            value /= 1000.0;
            unit += 1;
        }
        let digits = if unit == 0 || value >= 100.0 { 0 } else { 2 - (value >= 10.0) as usize };
        write!(f, "{value:.digits$} {}", units[unit])
    }
}

/// Explains why degrees do not match the cluster. Together they must use all devices; a single one must divide them.
fn degrees(dp: u32, tp: u32, pp: u32, cp: u32, product: u64, devices: u32) -> String {
    let all = [("--dp", dp), ("--tp", tp), ("--pp", pp), ("--cp", cp)];
    let split: Vec<String> = all.iter().filter(|d| d.1 > 1).map(|(name, degree)| format!("{name} {degree}")).collect();
    match split.as_slice() {
        [one] if !u64::from(devices).is_multiple_of(product) => {
            format!("{one}: the cluster's {devices} devices are no multiple of it")
        }
        _ => {
            let context = if cp > 1 { format!(" x --cp {cp}") } else { String::new() };
            format!("--dp {dp} x --tp {tp} x --pp {pp}{context} is {product} devices, but the cluster has {devices}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_degree_that_divides_the_devices_is_not_said_not_to() {
        assert_eq!(degrees(3, 1, 1, 1, 3, 4), "--dp 3: the cluster's 4 devices are no multiple of it");
        let too_few = "--dp 2 x --tp 1 x --pp 1 is 2 devices, but the cluster has 4";
        assert_eq!(degrees(2, 1, 1, 1, 2, 4), too_few);
    }
}
