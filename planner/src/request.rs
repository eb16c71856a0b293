//! What the user asks of the planner, and why it may say no.

use crate::cache::Cache;
use crate::chunked_loss::{self, LossChunks};
use crate::rings::{self, Ring};
use crate::target::execution;
use altiplano_ir::autodiff::AutodiffError;
use altiplano_ir::batch::LossKind;
use altiplano_ir::cluster::Cluster;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::loss_scale::LossScale;
use altiplano_ir::optimizer::Optimizer;
use altiplano_ir::plan::{Execution, Goal, MfuConvention, Offload, Plan, Schedule, Stage, Target, Update};
use altiplano_ir::recompute::Recompute;
use altiplano_ir::reduce::Reduction;
use std::sync::Arc;

/// A planning problem. What is `None` is searched.
#[derive(Clone, Debug)]
pub struct Request {
    /// Name of the model, for the reader.
    pub model: String,
    /// The forward graph with its batch found (see [`altiplano_ir::batch`]) and simplified; its first output is the loss.
    pub graph: Graph,
    pub loss: LossKind,
    pub stop_gradients: Vec<ValueId>,
    /// What the graph is smaller by than the model that the user has, for the reader.
    pub reduction: Option<Reduction>,
    /// Whether sizes that devices do not divide may be made larger (see [`altiplano_ir::padding`]).
    pub pad: bool,
    /// Whether attention may go around a ring (see [`crate::rings`]).
    pub ring: Ring,
    /// True if the logits of a loss may be made in chunks (see [`crate::chunked_loss`]).
    pub loss_chunks: LossChunks,
    pub cluster: Cluster,
    /// Samples per optimizer step; default: the traced batch.
    pub global_batch: Option<u64>,
    pub microbatch: Option<u64>,
    pub num_microbatches: Option<u32>,
    /// Degrees of data, tensor and pipeline parallelism.
    pub dp: Option<u32>,
    pub tp: Option<u32>,
    pub pp: Option<u32>,
    /// Devices that split the positions of samples, beside those of the other degrees; 1: attention keeps samples whole.
    pub cp: Option<u32>,
    /// Parts that experts are dealt out to, among the devices of the other degrees.
    pub ep: Option<u32>,
    /// Samples that one replica takes at a time: `microbatch` over the degree of data parallelism.
    pub micro_batch: Option<u64>,
    /// [`Schedule::Forward`] plans to run the model, not to train it.
    pub schedule: Option<Schedule>,
    /// Late gradients change what is computed, so that they are never chosen but where they are asked for.
    pub update: Update,
    /// Parameter servers change who holds what, and without waiting for each other what is computed: likewise.
    pub servers: Option<OverServers>,
    /// What counts where nothing is trained.
    pub goal: Goal,
    /// Stages of a pipeline on the same devices; 1: each stage has devices of its own.
    pub virtual_stages: Option<u32>,
    pub zero: Option<u8>,
    pub recompute: Option<Recompute>,
    pub optimizer: Optimizer,
    /// Where the optimizer's state is; left open, GPUs leave it in the memory of their hosts where nothing fits otherwise.
    pub offload: Option<Offload>,
    /// The largest norm that all gradients together may have.
    pub clip_norm: Option<f64>,
    /// By what the loss is scaled; a scale that is found needs gradients that are not late, and is left out where they are.
    pub loss_scale: Option<LossScale>,
    pub execution: Execution,
    /// True if attention is one kernel; what the target's software has on these devices where nothing is said.
    pub fused_attention: Option<bool>,
    /// What is to run the plan; see [`crate::target::aimed`].
    pub target: Target,
    /// Which part of the space is searched.
    pub search: SearchKind,
    /// Split a loss that is no mean or sum over samples into microbatches all the same.
    pub allow_microbatch_semantics: bool,
    /// Take the fastest plan also where it is hardly faster than one GPU (see [`crate::enough`]).
    pub fastest: bool,
    /// Price the plain baselines as well.
    pub baselines: bool,
    /// Which FLOPs count in the plan's MFU.
    pub mfu_convention: MfuConvention,
    /// What earlier searches found. It changes how long a search takes, and nothing else.
    pub cache: Option<Arc<Cache>>,
}

impl Request {
    /// A request in which everything is searched.
    pub fn new(model: impl Into<String>, graph: Graph, loss: LossKind, cluster: Cluster) -> Self {
        let execution = execution(Target::Altiplano, &cluster, &graph, None);
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
            global_batch: None,
            microbatch: None,
            num_microbatches: None,
            dp: None,
            tp: None,
            pp: None,
            cp: None,
            ep: None,
            micro_batch: None,
            schedule: None,
            update: Update::Synchronous,
            servers: None,
            goal: Goal::Latency,
            virtual_stages: None,
            zero: None,
            recompute: None,
            optimizer: Optimizer::adamw(),
            offload: Some(Offload::NONE),
            clip_norm: None,
            loss_scale,
            execution,
            fused_attention: None,
            target: Target::Altiplano,
            search: SearchKind::Whole,
            allow_microbatch_semantics: false,
            fastest: true,
            baselines: true,
            mfu_convention: MfuConvention::default(),
            cache: None,
        }
    }

    /// The request that a plan answers, with nothing fixed: its model, batch, optimizer, cluster and target. Which choices were free
    /// when it was made no plan says.
    pub fn of_plan(plan: &Plan) -> Self {
        let (graph, stop_gradients) = plan.own();
        let (graph, stop_gradients) = chunked_loss::without(&rings::without(graph), stop_gradients);
        let mut request = Request::new(plan.model.clone(), graph, plan.loss, plan.cluster.clone());
        request.stop_gradients = stop_gradients;
        request.reduction = plan.reduction;
        request.global_batch = Some(plan.global_batch);
        // Those that say what is computed, which no other may take the place of.
        let decides = !plan.schedule.trains() || plan.schedule == Schedule::PipeDream;
        request.schedule = decides.then_some(plan.schedule);
        request.update = plan.update;
        request.servers = plan
            .servers
            .as_ref()
            .map(|over| OverServers { count: over.servers.len() as u32, asynchronous: over.asynchronous });
        request.goal = plan.goal;
        request.optimizer = plan.optimizer;
        let is_offloaded = plan.stages.iter().any(|stage| !stage.offload.is_none());
        request.offload = (!is_offloaded).then_some(Offload::NONE);
        request.clip_norm = plan.clip_norm;
        request.loss_scale = plan.loss_scale;
        request.execution = plan.execution;
        request.fused_attention = Some(plan.execution.fused_attention);
        request.mfu_convention = plan.predicted.mfu_convention;
        request.target = plan.target;
        request.allow_microbatch_semantics = plan.num_microbatches > 1;
        request
    }

    /// Whether the plan is to train the model.
    pub fn trains(&self) -> bool {
        self.schedule.is_none_or(Schedule::trains)
    }
}

/// Parameter servers that are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverServers {
    /// Devices, the last of the cluster, that hold the weights; all others compute gradients.
    pub count: u32,
    /// Whether each push is an update of its own, for which no other worker waits.
    pub asynchronous: bool,
}

/// Which part of the space is searched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SearchKind {
    #[default]
    Whole,
    /// What Alpa searches (Zheng et al. 2022): submeshes of a power of two within a node or of whole nodes, all devices used,
    /// every layer recomputed, storage at one level, and nothing known of what stages send each other.
    Alpa,
}

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanFailure {
    #[error(transparent)]
    Autodiff(#[from] AutodiffError),
    #[error("{option} {value} is for devices that are all alike; the cluster has {groups} groups of nodes")]
    OneGroup { option: &'static str, value: &'static str, groups: usize },
    #[error("--{option} {given} is not {allowed}, which is what {target} runs")]
    Target { target: &'static str, option: &'static str, given: u32, allowed: u32 },
    #[error("--{option}: {value} {problem}")]
    Option { option: &'static str, value: u64, problem: &'static str },
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
        /// The plan that needs so much, where it was judged; else what is required is an estimate.
        closest: Option<Box<Plan>>,
    },
    #[error(
        "no plan fits in the memory of its nodes: of what fits on devices the best keeps {} of optimizer state on a node that has {}",
        Bytes(*required_bytes),
        Bytes(*limit_bytes)
    )]
    HostMemory { required_bytes: u64, limit_bytes: u64 },
    #[error("no combination of stages and submeshes uses the cluster with these options")]
    NoCombination,
    /// What the search finds is not worth judging.
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
    /// What it means that a judged plan, the nearest to fitting, does not fit.
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

    /// The one of two failures that says more: a lack of memory, of two the one that is nearer to fitting.
    pub fn nearer(self, other: PlanFailure) -> PlanFailure {
        let required = |failure: &PlanFailure| match failure {
            PlanFailure::Memory { required_bytes, .. } => *required_bytes,
            _ => u64::MAX,
        };
        if required(&other) < required(&self) { other } else { self }
    }

    /// The user asked for something that cannot be (exit code 2), as opposed to: there is no feasible plan (1).
    pub fn is_usage(&self) -> bool {
        use PlanFailure::{FarBehind, HostMemory, Memory, NoCombination, Pins};
        !matches!(self, Memory { .. } | HostMemory { .. } | NoCombination | FarBehind { .. } | Pins { .. })
    }
}

/// Told what the search is doing; for progress bars.
pub trait Progress: Sync {
    /// `done` of `total` pieces of work, and what the current one is.
    fn step(&self, what: &str, done: usize, total: usize);

    /// The step of a plan that was judged and fits, and what no plan on these devices falls below.
    fn best(&self, _step_s: f64, _bound_s: f64) {}

    /// Whether to look no further and give the best plan found so far.
    fn stopped(&self) -> bool {
        false
    }
}

/// No one is watching.
pub struct Silent;

/// Says nothing, and stops when another one does.
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

/// Bytes as people write them, to three digits.
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

/// Why degrees are not those of a cluster: together they must be all of its devices, one alone must divide them.
fn degrees(dp: u32, tp: u32, pp: u32, cp: u32, product: u64, devices: u32) -> String {
    let all = [("--dp", dp), ("--tp", tp), ("--pp", pp), ("--cp", cp)];
    let split: Vec<String> = all.iter().filter(|d| d.1 > 1).map(|(name, degree)| format!("{name} {degree}")).collect();
    match split.as_slice() {
        [one] if product <= u64::from(devices) => {
            format!("{one}: the cluster's {devices} devices are no multiple of it")
        }
        _ => {
            let context = if cp > 1 { format!(" x --cp {cp}") } else { String::new() };
            format!("--dp {dp} x --tp {tp} x --pp {pp}{context} is {product} devices, but the cluster has {devices}")
        }
    }
}
