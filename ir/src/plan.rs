//! The plan: which layers run where, how each op is sharded there, and the predicted time and memory.
//!
//! A plan carries its forward graph, cluster and optimizer, so that it stands alone. It is plain data. `verify` checks
//! it against the graph and the cluster that it contains before anything uses it.

mod verify;

use crate::batch::LossKind;
use crate::certificate::{Certificate, ProofCertificate};
use crate::cluster::{Cluster, Group};
use crate::graph::{Graph, ValueId};
use crate::json;
use crate::loss_scale::LossScale;
use crate::mesh::Mesh;
use crate::optimizer::Optimizer;
use crate::order::{Call, CallOrder, Pass};
use crate::padding::{Extents, Padding};
use crate::recompute::{Recomputation, Recompute};
use crate::rule::Strategy;
use crate::servers::ParameterServers;
use crate::sharding::Sharding;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;

pub use crate::target::{AttentionKernels, Execution, Target};

/// The `format` of a plan file.
pub const FORMAT: &str = "altiplano.plan";
/// The `version` of a plan file.
pub const VERSION: u32 = 1;

/// The order of forward and backward passes on the stages of a pipeline. One schedule has forward passes only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Schedule {
    /// All forwards, then all backwards (Huang et al. 2019).
    #[serde(rename = "gpipe")]
    GPipe,
    /// One forward, one backward, after a warm-up (Narayanan et al. 2019, with flush).
    #[serde(rename = "1f1b")]
    OneFOneB,
    /// Like `1f1b`, but weight gradients are computed apart from input gradients, for which the previous stage waits.
    /// Weight gradients fill what would otherwise be bubble (ZB-H1 of Qi et al. 2023).
    #[serde(rename = "zb-h1")]
    ZbH1,
    /// Two stages a lane under [`Placement::V`], so that a microbatch turns on the last lane and ends on the first, and
    /// weight gradients apart (ZB-V of Qi et al. 2024, "Pipeline Parallelism with Controllable Memory"). If all calls take
    /// equally long, no lane waits, and each holds as many activations as the first one under `1f1b`.
    #[serde(rename = "zb-v")]
    ZbV,
    /// Lanes as under `zb-v`, and forward passes in turn with whole backward passes of other microbatches, which may run side
    /// by side ([`Execution::pairs_passes`]). Weight gradients are apart where the pipeline fills and drains (DualPipeV, the
    /// half of DeepSeek-AI's DualPipe 2024 that keeps one copy of each parameter).
    #[serde(rename = "dualpipe-v")]
    DualPipeV,
    /// Like `1f1b`, but without a flush between steps. A stage begins the next step early and finishes the old one in
    /// between, with the weights that the old step began with (PipeDream-2BW of Narayanan et al. 2021,
    /// "Memory-Efficient Pipeline-Parallel DNN Training"). There is no bubble, and gradients are one step late: see
    /// [`Plan::staleness`].
    #[serde(rename = "pipedream")]
    PipeDream,
    /// The plan's own order of calls ([`Plan::order`]).
    #[serde(rename = "found")]
    Found,
    /// Forward passes only. The model is run rather than trained, and its outputs are collected.
    #[serde(rename = "forward")]
    Forward,
}

impl Schedule {
    pub fn name(self) -> &'static str {
        match self {
            Schedule::GPipe => "gpipe",
            Schedule::OneFOneB => "1f1b",
            Schedule::ZbH1 => "zb-h1",
            Schedule::ZbV => "zb-v",
            Schedule::DualPipeV => "dualpipe-v",
            Schedule::PipeDream => "pipedream",
            Schedule::Found => "found",
            Schedule::Forward => "forward",
        }
    }

    /// The number of stages a lane, if the schedule fixes it.
    pub fn virtual_stages(self) -> Option<u32> {
        (self.placement() == Placement::V).then_some(2)
    }

    /// True if `shared` stages of each lane can follow the schedule. Stages that take turns under `1f1b` need groups of as
    /// many microbatches as there are lanes, and those of `dualpipe-v` need one for each stage.
    pub fn can_share(self, shared: u32, num_microbatches: u64, lanes: u32) -> bool {
        match self {
            Schedule::OneFOneB => shared == 1 || num_microbatches.is_multiple_of(u64::from(lanes.max(1))),
            Schedule::DualPipeV => shared == 2 && num_microbatches >= 2 * u64::from(lanes),
            _ => shared == self.virtual_stages().unwrap_or(1),
        }
    }

    /// True if a forward pass can run beside the backward pass of another microbatch on each of `lanes` lanes of `shared`
    /// stages: both take turns, and neither waits for the other.
    pub fn can_pair(self, shared: u32, lanes: u32) -> bool {
        self == Schedule::DualPipeV || self == Schedule::OneFOneB && (shared > 1 || lanes == 1)
    }

    /// The placement of stages if lanes have several, except under `found`, where either is possible.
    pub fn placement(self) -> Placement {
        if matches!(self, Schedule::ZbV | Schedule::DualPipeV) { Placement::V } else { Placement::Loop }
    }

    /// Returns true if the schedule computes gradients and updates weights.
    pub fn trains(self) -> bool {
        self != Schedule::Forward
    }

    /// The number of microbatches whose activations stage `stage` of `num_stages` holds at once. Microbatches that wait
    /// only for weight gradients are not counted, because less of them is held. Orders of a plan's own count as `1f1b`,
    /// which is about what they need.
    pub fn in_flight(self, num_microbatches: u32, num_stages: u32, stage: u32) -> u32 {
        match self {
            Schedule::GPipe => num_microbatches,
            Schedule::OneFOneB
            | Schedule::ZbH1
            | Schedule::ZbV
            | Schedule::DualPipeV
            | Schedule::PipeDream
            | Schedule::Found => num_microbatches.min(num_stages.saturating_sub(stage)),
            Schedule::Forward => num_microbatches.min(1),
        }
    }
}

/// The stages of each lane, if lanes have several. A round is one stage of each lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// Every round begins on the first lane: of `p` lanes, lane `l` has the stages `l`, `l + p`, `l + 2p`, ...
    #[default]
    Loop,
    /// Every round begins on the lane on which the round before ended: of `p` lanes, lane `l` has the stages `l`,
    /// `2p - 1 - l`, `2p + l`, ...
    V,
}

impl Placement {
    fn is_loop(&self) -> bool {
        *self == Placement::Loop
    }

    /// The lane of a stage. Without lanes, it is 0.
    pub fn lane_of(self, stage: usize, lanes: usize) -> usize {
        let lanes = lanes.max(1);
        self.across(stage / lanes, stage % lanes, lanes)
    }

    /// The stage of a lane in a round.
    pub fn stage_of(self, lane: usize, round: usize, lanes: usize) -> usize {
        round * lanes + self.across(round, lane, lanes)
    }

    /// The stages of a lane, first to last.
    pub fn stages_of(self, lane: usize, lanes: usize, rounds: usize) -> impl Iterator<Item = usize> + use<> {
        (0..rounds).map(move |round| self.stage_of(lane, round, lanes))
    }

    /// The stage of lane `to` in the round of a stage of lane `from`.
    pub fn moved(self, stage: usize, from: usize, to: usize, lanes: usize) -> usize {
        match self.turns(stage / lanes.max(1)) {
            true => stage + from - to,
            false => stage + to - from,
        }
    }

    /// True if stages of a round follow each other from the last lane to the first.
    fn turns(self, round: usize) -> bool {
        self == Placement::V && round % 2 == 1
    }

    /// The place in a round of a lane, and the lane of a place.
    fn across(self, round: usize, at: usize, lanes: usize) -> usize {
        if self.turns(round) { lanes - 1 - at } else { at }
    }
}

/// The time at which the gradients of a step change the weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Update {
    /// At the end of the step, which waits for their reduction.
    #[default]
    Synchronous,
    /// At the end of the next step. The reduction overlaps that step, so no step waits for its own gradients, which are
    /// one step late.
    Stale,
}

impl Update {
    pub fn name(self) -> &'static str {
        match self {
            Update::Synchronous => "synchronous",
            Update::Stale => "stale",
        }
    }

    fn is_synchronous(&self) -> bool {
        *self == Update::Synchronous
    }
}

/// The objective for a model that is run rather than trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Goal {
    /// The time of a single batch, from its arrival to its last result.
    #[default]
    Latency,
    /// The rate of batches that follow each other without waiting.
    Throughput,
}

impl Goal {
    pub fn name(self) -> &'static str {
        match self {
            Goal::Latency => "latency",
            Goal::Throughput => "throughput",
        }
    }

    fn is_latency(&self) -> bool {
        *self == Goal::Latency
    }
}

/// The parts of a stage that are in host memory rather than device memory. Written as the names of the parts,
/// `optimizer` and `activations`, separated by a comma, or as `none`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Offload {
    /// The optimizer state, including the f32 copies of half-precision parameters: everything that only the update
    /// reads. The update brings the state of a few parameters at a time to the device and back.
    pub optimizer: bool,
    /// Activations. They go to the host as the forward pass makes them and are prefetched for the backward pass.
    pub activations: bool,
}

/// A word that names no part that can be offloaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is none of optimizer and activations, which go with a comma between them, and none and all, which stand alone"
)]
pub struct UnknownOffload(pub String);

impl Offload {
    pub const NONE: Offload = Offload { optimizer: false, activations: false };
    pub const OPTIMIZER: Offload = Offload { optimizer: true, activations: false };
    pub const ACTIVATIONS: Offload = Offload { optimizer: false, activations: true };
    pub const ALL: Offload = Offload { optimizer: true, activations: true };

    /// All combinations, least offloading first.
    pub const EACH: [Offload; 4] = [Offload::NONE, Offload::OPTIMIZER, Offload::ACTIVATIONS, Offload::ALL];

    /// The name in options and files.
    pub fn name(self) -> &'static str {
        self.said("none", "optimizer", "activations", "optimizer,activations")
    }

    /// The offloaded parts in words. Empty if nothing is offloaded.
    pub fn words(self) -> &'static str {
        self.said("", "optimizer state", "activations", "optimizer state and activations")
    }

    fn said(
        self,
        none: &'static str,
        optimizer: &'static str,
        activations: &'static str,
        both: &'static str,
    ) -> &'static str {
        match (self.optimizer, self.activations) {
            (false, false) => none,
            (true, false) => optimizer,
            (false, true) => activations,
            (true, true) => both,
        }
    }

    pub fn is_none(&self) -> bool {
        *self == Offload::NONE
    }
}

impl FromStr for Offload {
    type Err = UnknownOffload;

    fn from_str(text: &str) -> Result<Offload, UnknownOffload> {
        match text {
            "none" => return Ok(Offload::NONE),
            "all" => return Ok(Offload::ALL),
            _ => {}
        }
        let mut offload = Offload::NONE;
        for part in text.split(',') {
            match part.trim() {
                "optimizer" => offload.optimizer = true,
                "activations" => offload.activations = true,
                other => return Err(UnknownOffload(other.to_string())),
            }
        }
        Ok(offload)
    }
}

impl TryFrom<String> for Offload {
    type Error = UnknownOffload;

    fn try_from(text: String) -> Result<Offload, UnknownOffload> {
        text.parse()
    }
}

impl From<Offload> for String {
    fn from(offload: Offload) -> String {
        offload.name().to_string()
    }
}

/// The memory of one device of a stage in bytes, by use. `activations_bytes` is the peak beyond the rest: saved values
/// of all microbatches in flight, and temporaries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Memory {
    pub parameters_bytes: u64,
    pub gradients_bytes: u64,
    pub optimizer_bytes: u64,
    pub activations_bytes: u64,
}

impl Memory {
    pub fn total(&self) -> u64 {
        self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes + self.activations_bytes
    }
}

/// The prediction for one stage. Times are those of one device, as all devices of a stage are equal. Stages that share
/// a device repeat its waiting time and its memory.
#[derive(Clone, Copy, Debug, PartialEq, Default, Serialize, Deserialize)]
pub struct StagePredicted {
    /// The seconds of one microbatch's forward and backward pass, including communication.
    pub forward_s: f64,
    pub backward_s: f64,
    /// The seconds spent once per step, on gradient reduction and the update.
    pub step_s: f64,
    /// The seconds per step that the device computes and communicates for this stage.
    pub compute_s: f64,
    pub communication_s: f64,
    /// The seconds per step that the device waits for others.
    pub bubble_s: f64,
    pub memory: Memory,
    pub peak_bytes: u64,
    /// The bytes that the device keeps in host memory.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub host_bytes: u64,
}

fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

/// The floating-point operations of attention that count as the model's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MfuConvention {
    /// Only operations that a mask leaves, which have to be computed.
    #[default]
    Computed,
    /// All operations, even masked ones, as the appendix of PaLM (Chowdhery et al. 2022) and Megatron-LM count them.
    Full,
}

impl MfuConvention {
    fn is_computed(&self) -> bool {
        *self == MfuConvention::Computed
    }
}

/// The prediction for the whole plan.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize)]
pub struct Predicted {
    /// The time of a step or a batch. If batches follow each other, the time from the end of one to the end of the
    /// next.
    pub step_time_s: f64,
    /// The time of a single batch, from its arrival to its last result, if batches follow each other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency_s: Option<f64>,
    /// A lower bound for every plan on these devices: the step's operations at the devices' peak rates.
    pub lower_bound_s: f64,
    pub samples_per_s: f64,
    /// The model FLOPs of a step, as a fraction of the peak of all devices over the step time.
    pub mfu: f64,
    /// The peak memory on the devices of each stage, and of each parameter server.
    pub peak_bytes: Vec<u64>,
    /// The floating-point operations of the model in a step, by `mfu_convention`. They include forward and backward
    /// passes but no recomputation.
    pub model_flop: f64,
    #[serde(default, skip_serializing_if = "MfuConvention::is_computed")]
    pub mfu_convention: MfuConvention,
}

/// The layouts in which a stage stores one parameter, its gradient and its optimizer state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Storage {
    pub parameter: Sharding,
    /// The layout of the gradient accumulator. It may stay partial until the end of the step.
    pub gradient: Sharding,
    pub state: Sharding,
}

/// The sharding of a value in readable form, with the strategy that produces it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ValueSharding {
    /// The origin of the value in the model.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// The text form of the op's result sharding. It must agree with the strategy.
    pub sharding: String,
    pub strategy: Strategy,
}

/// Consecutive layers on one submesh.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stage {
    /// The number of the first layer and of the one after the last.
    pub layers: Range<u32>,
    /// The group of the cluster that the stage's devices belong to.
    #[serde(default, skip_serializing_if = "is_first_group")]
    pub group: u32,
    /// `nodes x devices per node`.
    pub submesh: (u32, u32),
    /// Global device ids in mesh order.
    pub devices: Vec<u32>,
    pub mesh: Mesh,
    /// The values that the backward pass recomputes instead of keeping them.
    pub recompute: Recomputation,
    /// The ZeRO level, which tells what is sharded over otherwise unused axes: 0 nothing, 1 optimizer state, 2
    /// gradients too, 3 parameters too. If parameters differ, it is the level of most of their bytes, and `parameters`
    /// has each one's layouts.
    pub zero: u8,
    #[serde(default, skip_serializing_if = "Offload::is_none")]
    pub offload: Offload,
    pub shardings: BTreeMap<ValueId, ValueSharding>,
    pub parameters: BTreeMap<String, Storage>,
    /// The layout in which each value from an earlier stage arrives.
    pub receives: BTreeMap<ValueId, Sharding>,
    /// How close the shardings are to the optimum. Absent if they were not compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub solved: Option<Solved>,
    pub predicted: StagePredicted,
}

impl Stage {
    /// The recomputation of a layer of this stage. `layer` is its number in the plan.
    pub fn recomputes(&self, layer: u32) -> Recompute {
        self.recompute.of(layer.saturating_sub(self.layers.start) as usize)
    }
}

fn is_first_group(group: &u32) -> bool {
    *group == 0
}

/// How close the shardings of a stage are to the optimum of their search space, by the prices of the search. Costs are
/// seconds per microbatch, including a microbatch's share of once-per-step work.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Solved {
    pub cost_s: f64,
    /// A lower bound for all shardings of these layers on this mesh that fit its memory.
    pub lower_bound_s: f64,
}

impl Solved {
    /// The largest possible distance to the optimum, relative to it. Zero if the shardings are proven optimal, infinite
    /// if nothing is proven.
    pub fn gap(&self) -> f64 {
        if self.cost_s <= self.lower_bound_s { 0.0 } else { self.cost_s / self.lower_bound_s - 1.0 }
    }
}

/// One line of the table of alternatives that ends every plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Alternative {
    pub name: String,
    /// Absent if no such plan exists, e.g. with more pipeline stages than layers.
    pub predicted: Option<Predicted>,
    pub fits: bool,
    /// The degrees used, e.g. `dp8`, or the reason why there is no such plan.
    pub detail: String,
}

/// The program that made a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MadeBy {
    /// The version of the program.
    pub version: String,
    /// The command line, without options that only name output files.
    pub command: String,
}

/// The difference in size between a downscaled model and the original.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Downscaling {
    /// The layers of all shortened runs of equal layers, after and before.
    pub layers: (usize, usize),
    /// The elements of all parameters, after and before.
    pub parameters: (u64, u64),
}

/// The largest number of stage calls in one direction of a step: microbatches times stages. Simulations, programs and
/// pages grow with it.
pub const MOST_CALLS: u64 = 1 << 20;

/// Returns whether a step of `num_microbatches` on `num_stages` stages has at most [`MOST_CALLS`].
pub fn is_countable(num_microbatches: u32, num_stages: usize) -> bool {
    u64::from(num_microbatches).saturating_mul(num_stages as u64) <= MOST_CALLS
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    pub format: String,
    pub version: u32,
    pub model: String,
    pub graph_hash: String,
    pub cluster: Cluster,
    pub global_batch: u64,
    pub num_microbatches: u32,
    /// The samples of the global batch that pass through the pipeline at once.
    pub microbatch: u64,
    pub schedule: Schedule,
    /// The order of calls under the schedule `found`. Absent under others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<Arc<CallOrder>>,
    #[serde(default, skip_serializing_if = "Update::is_synchronous")]
    pub update: Update,
    /// The parameter servers of workers that each hold the whole model. Absent if every device updates the parameters
    /// that it holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub servers: Option<ParameterServers>,
    #[serde(default, skip_serializing_if = "Goal::is_latency")]
    pub goal: Goal,
    /// The number of stages per lane, a block of devices.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub virtual_stages: u32,
    /// Which stages those are.
    #[serde(default, skip_serializing_if = "Placement::is_loop")]
    pub placement: Placement,
    pub optimizer: Optimizer,
    /// The largest allowed norm of all gradients together. Larger gradients are scaled down before the update.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_norm: Option<f64>,
    /// The loss scaling that protects small f16 gradients from underflow. Absent if gradients are not scaled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<LossScale>,
    /// True if steps measure the norm and the variance of the gradient.
    #[serde(default, skip_serializing_if = "is_false")]
    pub measure_noise: bool,
    #[serde(default)]
    pub execution: Execution,
    /// The system that the plan is meant to run on.
    #[serde(default, skip_serializing_if = "Target::is_ours")]
    pub target: Target,
    pub loss: LossKind,
    /// The values through which no gradient flows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stop_gradients: Vec<ValueId>,
    /// The difference in size from the original, for a downscaled model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reduction: Option<Downscaling>,
    /// The measured profile that predictions are based on, in words. Absent if they are based on the figures of the
    /// cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// The program that wrote the plan. Absent if the library was used directly.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made_by: Option<MadeBy>,
    /// A compiler's figures for the plan on devices that are not at hand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<Certificate>,
    /// The proof that the plan's programs compute what one device computes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proof: Option<ProofCertificate>,
    pub predicted: Predicted,
    pub alternatives: Vec<Alternative>,
    /// The nodes of each layer, `layers[i]..layers[i + 1]`. Leaves and values that depend on no leaf are not counted.
    pub layers: Vec<u32>,
    pub stages: Vec<Stage>,
    /// The forward graph at microbatch size.
    pub graph: Arc<Graph>,
    /// The graph before its sizes were padded. Absent if the sizes are the model's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub padding: Option<Arc<Padding>>,
}

fn one() -> u32 {
    1
}

fn is_one(n: &u32) -> bool {
    *n == 1
}

fn is_false(flag: &bool) -> bool {
    !flag
}

/// An error in a plan file, with the JSON path of the place.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    #[error("{line}:{column}: {error}")]
    Json { line: usize, column: usize, error: String },
    #[error("format: expected \"{FORMAT}\", found \"{found}\"")]
    Format { found: String },
    #[error("version: this build reads version {VERSION}, the file has {found}")]
    Version { found: u32 },
    #[error("graph: {error}")]
    Graph { error: crate::graph::GraphError },
    #[error("graph_hash: the plan was made for another graph (it says {declared}, the graph in it has {actual})")]
    GraphHash { declared: String, actual: String },
    #[error("{path}: {problem}")]
    Invalid { path: String, problem: &'static str },
}

impl PlanError {
    /// A text that is not JSON, or whose fields are not those of a plan.
    pub fn not_json(error: &serde_json::Error) -> PlanError {
        let (line, column) = json::place(error);
        PlanError::Json { line, column, error: json::message(error) }
    }
}

/// A fingerprint of a graph's JSON form, as 32 hex digits.
pub fn graph_hash(graph: &Graph) -> String {
    fingerprint(&serde_json::to_string(graph).unwrap_or_default())
}

/// A 128-bit fingerprint of a text, as 32 hex digits. It consists of two FNV-1a hashes.
pub(crate) fn fingerprint(text: &str) -> String {
    let fnv = |h: u64, byte: u8| (h ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    let seeds = (0xcbf2_9ce4_8422_2325, 0x6c62_272e_07bb_0142);
    let (first, second) = text.bytes().fold(seeds, |(a, b), byte| (fnv(a, byte), fnv(b, byte)));
    format!("{first:016x}{second:016x}")
}

impl Plan {
    /// The layer of each node. `None` for leaves and for values that depend on no leaf.
    pub fn layer_of(&self) -> Vec<Option<u32>> {
        let varies = self.graph.depends_on(|v| self.graph.node(v).op.is_leaf());
        let layer = |v: ValueId| {
            let after = self.layers.partition_point(|&first| first <= v.0);
            (varies[v.index()] && !self.graph.node(v).op.is_leaf() && after > 0).then(|| (after - 1) as u32)
        };
        self.graph.values().map(layer).collect()
    }

    /// The unpadded model at microbatch size, and its values through which no gradient flows.
    pub fn own(&self) -> (&Graph, &[ValueId]) {
        match &self.padding {
            Some(padding) => (&padding.graph, &padding.stop_gradients),
            None => (&self.graph, &self.stop_gradients),
        }
    }

    /// The positions of a parameter's own elements within its padded form. `None` if the plan pads nothing of it.
    pub fn extents(&self, parameter: &str) -> Option<&Extents> {
        self.padding.as_ref()?.parameters.get(parameter)
    }

    /// The bytes of a device of a stage that tensors can use.
    pub fn usable_bytes(&self, stage: &Stage) -> u64 {
        self.cluster.usable_bytes(self.group_of(stage))
    }

    /// The group of the cluster that a stage runs on.
    pub fn group_of(&self, stage: &Stage) -> &Group {
        &self.cluster.groups[stage.group as usize]
    }

    pub fn num_layers(&self) -> u32 {
        self.layers.len() as u32 - 1
    }

    /// The number of steps by which gradients lag behind the weights that they change: `w[t+1] = w[t] - f(g(w[t - s]))`
    /// for a staleness of `s`. It is the same on all stages. Before the first step, no gradient is late.
    pub fn staleness(&self) -> u32 {
        let flushes = self.schedule != Schedule::PipeDream || self.num_lanes() <= 1;
        u32::from(self.schedule.trains() && (self.update == Update::Stale || !flushes))
    }

    /// The number of lanes, which are blocks of devices that one or more stages share.
    pub fn num_lanes(&self) -> usize {
        self.stages.len() / (self.virtual_stages as usize).max(1)
    }

    /// The lane of a stage.
    pub fn lane_of(&self, stage: usize) -> usize {
        self.placement.lane_of(stage, self.num_lanes())
    }

    /// The stages of a lane, first to last.
    pub fn stages_of(&self, lane: usize) -> impl Iterator<Item = usize> + use<> {
        let lanes = self.num_lanes();
        self.placement.stages_of(lane, lanes, self.stages.len() / lanes.max(1))
    }

    /// The first stage of each lane, which lists its devices and their mesh.
    pub fn lanes(&self) -> &[Stage] {
        &self.stages[..self.num_lanes()]
    }

    /// True if a stage computes gradients of weights apart from its backward calls.
    pub fn splits(&self, stage: usize) -> bool {
        let lane = self.order.as_ref().and_then(|order| order.lanes.get(self.lane_of(stage)));
        let weights = Call { stage: stage as u32, pass: Pass::Weights };
        let apart = matches!(self.schedule, Schedule::ZbH1 | Schedule::ZbV | Schedule::DualPipeV);
        apart || lane.is_some_and(|lane| lane.contains(&weights))
    }

    /// The stages of a lane in words: `stage0`, or `stage0, stage4`.
    pub fn lane_name(&self, lane: usize) -> String {
        self.stages_of(lane).map(|s| format!("stage{s}")).collect::<Vec<_>>().join(", ")
    }

    /// The global ids of all devices that run a program, in the order of their programs.
    pub fn devices(&self) -> Vec<u32> {
        match &self.servers {
            Some(servers) => servers.workers.iter().chain(&servers.servers).copied().collect(),
            None => self.lanes().iter().flat_map(|s| s.devices.iter().copied()).collect(),
        }
    }

    /// The number of devices that run a program.
    pub fn num_devices(&self) -> u32 {
        self.devices().len() as u32
    }

    /// The name of a program. With parameter servers it is `worker2` or `server0`, otherwise it lists the stages of the
    /// lane.
    pub fn program_name(&self, program: usize) -> String {
        let workers = self.num_workers() as usize;
        match &self.servers {
            Some(_) if program < workers => format!("worker{program}"),
            Some(_) => format!("server{}", program - workers),
            None => self.lane_name(program),
        }
    }

    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default()
    }

    /// Parses and verifies a plan file.
    pub fn from_json(text: &str) -> Result<Plan, PlanError> {
        let not_json = |e: serde_json::Error| PlanError::not_json(&e);
        #[derive(Deserialize)]
        struct Header {
            format: String,
            version: u32,
        }
        let header: Header = serde_json::from_str(text).map_err(not_json)?;
        if header.format != FORMAT {
            return Err(PlanError::Format { found: header.format });
        }
        if header.version != VERSION {
            return Err(PlanError::Version { found: header.version });
        }
        let plan: Plan = serde_json::from_str(text).map_err(not_json)?;
        match plan.verify().into_iter().next() {
            None => Ok(plan),
            Some(error) => Err(error),
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
