//! The search over microbatches, submeshes, meshes and configurations of a stage.
//!
//! For each number of microbatches, every mesh gets its layer tables; meshes are independent and solved in parallel.
//! Runs of layers become stage candidates, and the dynamic program combines them into stages.

use super::compose::Runs;
use super::dynamic::{Candidate, NoStages, Query, Room, StageTable, Stages, plan_stages};
use super::submesh::{Block, SubmeshShape, shapes};
use super::tables::boundaries;
use crate::intra_op::layer::{MemoryPrice, Variant};
use crate::intra_op::recompute_fraction::RecomputeFraction;
use crate::intra_op::space::{AxisRoles, Spaces};
use crate::intra_op::stage_cost::StageCost;
use crate::layers::graph::LayeredGraph;
use crate::lower::{CompositeCosts, Fusion, Prices};
use crate::predict::timing::{host_copy_s, queue_s};
use crate::request::{PlanFailure, Request};
use crate::search::context::SearchContext;
use crate::search::fixed_degrees::evenly;
use crate::search::space::SearchSpace;
use crate::timings::{Phase, timed};
use altiplano_cost_models::pipeline::Order;
use altiplano_cost_models::{CostModel, Costs, path_between_groups, transfer_path};
use altiplano_ir::cluster::{Cluster, Group};
use altiplano_ir::mesh::{AxisId, Mesh};
use altiplano_ir::plan::{Schedule, Target};
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// One stage as the search chose it.
#[derive(Clone, Debug)]
pub struct ChosenStage {
    pub layers: std::ops::Range<usize>,
    pub block: Block,
    pub config: StageConfig,
}

/// The configuration of a stage: a mesh, and how to run the stage on it.
#[derive(Clone, Debug, PartialEq)]
pub struct StageConfig {
    pub mesh: Mesh,
    pub roles: AxisRoles,
    pub variant: Variant,
    pub fraction: RecomputeFraction,
}

impl StageConfig {
    /// Returns true if another configuration has the same mesh and recomputes as much.
    pub(super) fn is_like(&self, other: &StageConfig) -> bool {
        self.mesh == other.mesh && self.fraction == other.fraction
    }
}

/// A pipeline found for one number of microbatches.
#[derive(Clone)]
pub struct PipelineCandidate<'a> {
    pub candidates: &'a CandidatesAtMicrobatch,
    pub schedule: Schedule,
    /// Stages per device.
    pub virtual_stages: u32,
    pub stages: Vec<ChosenStage>,
    pub step_s: f64,
}

impl PipelineCandidate<'_> {
    /// Returns true if `other` is the same plan.
    pub fn is(&self, other: &PipelineCandidate<'_>) -> bool {
        let same =
            |a: &ChosenStage, b: &ChosenStage| a.layers == b.layers && a.block == b.block && a.config == b.config;
        self.candidates.num_microbatches == other.candidates.num_microbatches
            && (self.schedule, self.virtual_stages) == (other.schedule, other.virtual_stages)
            && self.stages.len() == other.stages.len()
            && self.stages.iter().zip(&other.stages).all(|(a, b)| same(a, b))
    }
}

/// Logical meshes of a submesh that match the fixed degrees.
fn meshes(shape: SubmeshShape, space: &SearchSpace, pinned: bool) -> Vec<Mesh> {
    let devices = shape.num_devices() as u32;
    // Unless axes are named, each may play either role. Then meshes with the same two sizes are equivalent if one size
    // is 1. Within a node, where all links are alike, they always are.
    let named = space.degrees.dp.is_some() || space.degrees.tp.is_some() || pinned;
    let known = |data: u32, tensor: u32| !named && data < tensor && (data == 1 || shape.nodes == 1);
    // Try most data parallelism first, so that equal meshes are named after it.
    (1..=devices)
        .rev()
        .filter(|data| devices % data == 0)
        .map(|data| (data, devices / data))
        .filter(|&(data, tensor)| {
            space.degrees.dp.is_none_or(|d| d == data) && space.degrees.tp.is_none_or(|t| t == tensor)
        })
        .filter(|&(data, tensor)| !known(data, tensor))
        .map(|(data, tensor)| Mesh::new(&[("data", data), ("tensor", tensor)]))
        .collect()
}

/// Candidates of every layer sequence on one mesh, each with the index of its configuration.
fn candidates_of_mesh(on: &OnBlock<'_>, block: Block, mesh: &Mesh) -> CandidatesOfMesh {
    let OnBlock { cx, layered, runs, composites, num_microbatches } = *on;
    let SearchContext { request, space, costs, .. } = *cx;
    let (cost, composites) = (costs.of_group(block.group as u32), &composites[block.group]);
    let roles = AxisRoles {
        // If either degree is given, the first axis holds replicas and the second splits features.
        data_axes: u8::from(space.degrees.dp.is_some() || space.degrees.tp.is_some()),
        model_axis: space.degrees.tp.map(|_| AxisId(1)),
        experts: request.degrees.ep.filter(|&ep| ep > 1).map(|_| AxisId(0)),
        ..AxisRoles::default()
    };
    let (group, shape) = (&request.cluster.groups[block.group], block.shape);
    let prices = Prices::new(cost, group, (shape.nodes, shape.devices), mesh)
        .fused(Fusion::of(&request.execution))
        .knowing(composites);
    let mut spaces = Spaces::new(&prices, roles);
    let levels = match space.degrees.zero {
        Some(level) => vec![level],
        None if mesh.num_devices() == 1 => vec![0],
        // Without training, only parameters can be sharded.
        None if !request.trains() => vec![0, 3],
        None if request.target == Target::Fsdp => vec![2, 3],
        None => vec![1, 3],
    };
    let fractions = RecomputeFraction::choices(space.recompute, &request.execution, !space.all_devices);
    // Layers of one kind have inputs of the same types.
    let entering_s = |&l: &usize| match l {
        0 => 0.0,
        _ if space.alpa => 0.0,
        l => crossings(request) * inside_s(cost, group, shape, layered.entering_bytes(l)),
    };
    let entering: Vec<f64> = layered.representatives.iter().map(entering_s).collect();
    let away = request.offload.is_some_and(|offload| offload.activations);
    let queue_s = queue_s(cost);
    let (mut configs, mut found) = (Vec::new(), Vec::new());
    for zero in levels {
        let memory = if space.lean { MemoryPrice::Large } else { MemoryPrice::Small };
        let variant = Variant { zero, memory, num_microbatches, execution: request.execution };
        let Some(tables) = boundaries(layered, request, &mut spaces, variant) else { continue };
        let chains = runs.chains(&tables);
        for &fraction in &fractions {
            let id = configs.len() as u32;
            configs.push(StageConfig { mesh: mesh.clone(), roles, variant, fraction });
            for (sequence, chain) in chains.iter().enumerate() {
                let Some((_, terms, _)) = chain.best() else { continue };
                let (kind, length) = runs.head(sequence);
                if !fraction.is_distinct(length) {
                    continue;
                }
                let in_order = cost.runtime().is_some();
                let passes_s = terms.passes_s(fraction, length, in_order, queue_s);
                let copies_s = if away { host_copy_s(cost, terms.in_flight_bytes(fraction, length)) } else { 0.0 };
                // Stores overlap with the forward pass, loads with the backward pass.
                let with_copies_s = |pass_s: f64| if in_order { pass_s + copies_s } else { pass_s.max(copies_s) };
                let microbatch_s = with_copies_s(passes_s.0) + with_copies_s(passes_s.1) + entering[kind];
                let candidate = candidate(terms, chain.transient_bytes, microbatch_s, fraction, length, away);
                found.push((sequence, Candidate { id, ..candidate }));
            }
        }
    }
    CandidatesOfMesh { configs, found }
}

/// The inputs for candidates at one number of microbatches.
#[derive(Clone, Copy)]
struct OnBlock<'a> {
    cx: &'a SearchContext<'a>,
    layered: &'a LayeredGraph,
    runs: &'a Runs,
    /// Costs of composites that are known already, by group.
    composites: &'a [Arc<CompositeCosts>],
    num_microbatches: u32,
}

/// Configurations of stages on one mesh, and for layer sequences a candidate with the index of its configuration.
struct CandidatesOfMesh {
    configs: Vec<StageConfig>,
    found: Vec<(usize, Candidate)>,
}

/// Makes the candidate of a run of layers. `away`: activations are in host memory between the passes.
fn candidate(
    terms: &StageCost,
    transient_bytes: f64,
    microbatch_s: f64,
    fraction: RecomputeFraction,
    layers: usize,
    away: bool,
) -> Candidate {
    let inflight = terms.in_flight_bytes(fraction, layers);
    // Recomputed activations of one layer are alive during its backward pass.
    let transient = match fraction.shares(layers) {
        (0.0, _) => transient_bytes,
        _ => transient_bytes + terms.kept_bytes / layers as f64,
    };
    // The device holds one layer's offloaded activations in use and as much again in transit, besides temporaries of
    // about that size. Where temporaries are larger, as around a loss, few activations are offloaded.
    let (inflight, transient) = match away {
        true => {
            let window = inflight.min(2.0 * inflight / layers as f64);
            (0.0, transient.max(window + transient.min(window)))
        }
        false => (inflight, transient),
    };
    Candidate {
        microbatch_s,
        step_s: terms.step_s,
        static_bytes: terms.static_bytes as u64,
        bytes_per_inflight_microbatch: inflight as u64,
        transient_bytes: transient as u64,
        id: 0,
    }
}

/// Returns the Pareto-optimal candidates in time, time per step and memory, fastest first.
fn unbeaten(mut all: Vec<Candidate>) -> Vec<Candidate> {
    all.sort_by(|a, b| a.microbatch_s.total_cmp(&b.microbatch_s).then(a.step_s.total_cmp(&b.step_s)));
    let mut kept: Vec<Candidate> = Vec::new();
    for candidate in all {
        let beaten = kept.iter().any(|k| {
            k.microbatch_s <= candidate.microbatch_s
                && k.step_s <= candidate.step_s
                && k.static_bytes <= candidate.static_bytes
                && k.bytes_per_inflight_microbatch <= candidate.bytes_per_inflight_microbatch
                && k.transient_bytes <= candidate.transient_bytes
        });
        if !beaten {
            kept.push(candidate);
        }
    }
    kept
}

/// Thins out more than a few candidates, given fastest first. Keeps the fastest that fit about `limit_bytes` at some
/// position of a pipeline, and the leanest.
fn of_use(kept: Vec<Candidate>, limit_bytes: u64) -> Vec<Candidate> {
    const FEW: usize = 6;
    /// Numbers of microbatches that a stage may hold at once.
    const IN_FLIGHT: [u32; 12] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64];
    /// Factors of the limit, since the prediction may find that less fits than estimated, or more.
    const ABOUT: [f64; 3] = [0.9, 1.0, 1.1];
    if kept.len() <= FEW {
        return kept;
    }
    let fits = |bytes: f64| move |held: u32| move |c: &Candidate| c.peak_bytes(held) as f64 <= bytes;
    let fastest = ABOUT.iter().flat_map(|part| IN_FLIGHT.map(fits(part * limit_bytes as f64)));
    let leanest = IN_FLIGHT.map(|held| (0..kept.len()).min_by_key(|&i| kept[i].peak_bytes(held)));
    let mut picks: Vec<usize> = fastest.filter_map(|fits| kept.iter().position(fits)).collect();
    picks.extend([leanest[0], leanest[IN_FLIGHT.len() - 1], Some(0)].into_iter().flatten());
    picks.sort_unstable();
    picks.dedup();
    picks.into_iter().map(|i| kept[i]).collect()
}

/// Drops candidates that a smaller submesh of the same group matches: more devices that repeat the same work do not
/// help. `cells` holds the candidates of one run of layers by block.
fn drop_idle_growth(cells: &mut [Vec<Candidate>], blocks: &[Block]) {
    const AS_WELL: f64 = 1.02;
    let mut order: Vec<usize> = (0..blocks.len()).collect();
    order.sort_by_key(|&i| blocks[i].shape.num_devices());
    let mut smaller: Vec<(Block, Candidate)> = Vec::new();
    for i in order {
        let block = blocks[i];
        cells[i].retain(|c| {
            !smaller.iter().any(|(b, k)| {
                b.group == block.group
                    && b.shape.num_devices() < block.shape.num_devices()
                    && k.microbatch_s <= AS_WELL * c.microbatch_s
                    && k.step_s <= AS_WELL * c.step_s
                    && k.peak_bytes(1) as f64 <= AS_WELL * c.peak_bytes(1) as f64
                    && k.bytes_per_inflight_microbatch as f64 <= AS_WELL * c.bytes_per_inflight_microbatch as f64
            })
        });
        smaller.extend(cells[i].iter().map(|c| (block, *c)));
    }
}

/// Returns true if a submesh is worth trying. On large clusters, submeshes must divide the cluster evenly and must not
/// be far smaller than an even share for one stage per layer. Otherwise the number of submeshes would grow with the
/// square of the devices, and the dynamic program with the number of smallest submeshes.
fn worth_trying(shape: SubmeshShape, group: &Group, num_layers: usize) -> bool {
    const SMALL: u32 = 16;
    const FAR: u64 = 8;
    let even = |part: u32, whole: u32| whole <= SMALL || whole % part == 0;
    let large = group.nodes > SMALL && shape.num_devices() != group.num_devices() as u64;
    let tiny = large && shape.num_devices() * FAR * (num_layers as u64) < group.num_devices() as u64;
    even(shape.nodes, group.nodes) && even(shape.devices, group.devices_per_node) && !tiny
}

/// Drops the smallest blocks of groups whose devices could otherwise be combined in too many ways.
fn countable(mut blocks: Vec<Block>, cluster: &Cluster) -> Vec<Block> {
    const MOST: u64 = 5000;
    let used: BTreeSet<usize> = blocks.iter().map(|b| b.group).collect();
    let mut least = vec![1; cluster.groups.len()];
    let combinations = |least: &[u64], group: usize| u64::from(cluster.groups[group].num_devices()) / least[group] + 1;
    while used.len() > 1 {
        let all = used.iter().try_fold(1u64, |product, &group| product.checked_mul(combinations(&least, group)));
        if all.is_some_and(|all| all <= MOST) {
            break;
        }
        // In the group with most units, the next larger size becomes the unit, and only blocks that are multiples of it
        // stay.
        let next = |group: usize| {
            let sizes = blocks.iter().filter(|b| b.group == group).map(|b| b.shape.num_devices());
            sizes.filter(|&size| size > least[group]).min()
        };
        let larger = used.iter().filter_map(|&group| Some((group, next(group)?)));
        let Some((group, size)) = larger.max_by_key(|&(group, _)| combinations(&least, group)) else { break };
        least[group] = size;
        blocks.retain(|b| b.group != group || b.shape.num_devices() % size == 0);
    }
    blocks
}

/// Plans whose numbers of microbatches are still tried.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Wanted<'a> {
    pipelines: bool,
    singles: bool,
    /// Blocks that had the best plans of one stage at other numbers of microbatches.
    of_singles: &'a [Block],
}

impl Wanted<'_> {
    /// True if a stage on this block may be part of a plan that is wanted. A stage on all devices is the only one, and a
    /// plan of one stage mostly takes all devices of a group.
    fn allows(&self, block: Block, cluster: &Cluster) -> bool {
        let is_all = block.shape.num_devices() == u64::from(cluster.groups[block.group].num_devices());
        let of_pipeline = self.pipelines && (!is_all || cluster.groups.len() > 1);
        of_pipeline || self.singles && (is_all || self.pipelines || self.of_singles.contains(&block))
    }
}

/// The blocks that stages may be on.
fn blocks(request: &Request, space: &SearchSpace, num_layers: usize) -> Vec<Block> {
    let cluster = &request.cluster;
    let blocks_of = |group: usize| {
        let of_group = &cluster.groups[group];
        let wanted = move |block: &Block| {
            let devices = block.shape.num_devices();
            let product = space.degrees.dp.map(|d| d as u64 * space.degrees.tp.unwrap_or(1) as u64);
            let exact = space.degrees.dp.is_some() && space.degrees.tp.is_some();
            let whole = space.all_devices && space.degrees.pp == Some(1) && devices != of_group.num_devices() as u64;
            let alpas = !space.alpa || block.shape.nodes > 1 || block.shape.devices.is_power_of_two();
            let given = &request.stages.devices;
            let worth = match given.is_empty() {
                true => worth_trying(block.shape, of_group, num_layers),
                false => given.iter().any(|&size| u64::from(size) == devices),
            };
            alpas && !whole && (!exact || product == Some(devices)) && worth
        };
        let shapes = shapes(of_group.nodes, of_group.devices_per_node).into_iter();
        shapes.map(move |shape| Block { group, shape }).filter(wanted)
    };
    let groups = (0..cluster.groups.len()).filter(|&group| space.allows(group));
    countable(groups.flat_map(blocks_of).collect(), cluster)
}

/// All stage candidates on every submesh, for one number of microbatches.
pub struct CandidatesAtMicrobatch {
    pub layered: Arc<LayeredGraph>,
    pub num_microbatches: u32,
    /// Devices of each group of the cluster.
    pub num_devices: Vec<u64>,
    pub(super) blocks: Vec<Block>,
    pub(super) table: StageTable,
    pub(super) configs: Vec<StageConfig>,
    /// Answers of the dynamic program, by schedule, memory and number of stages.
    answers: Mutex<BTreeMap<(&'static str, Vec<u64>, Option<u32>), Result<Stages, NoStages>>>,
}

/// Solves every mesh for one number of microbatches.
fn candidates(
    cx: &SearchContext<'_>,
    composites: &[Arc<CompositeCosts>],
    layered: Arc<LayeredGraph>,
    num_microbatches: u32,
    wanted: Wanted<'_>,
) -> CandidatesAtMicrobatch {
    let SearchContext { request, space, costs, .. } = *cx;
    let cluster = &request.cluster;
    let num_layers = layered.layers.len();
    let mut blocks = blocks(request, space, num_layers);
    blocks.retain(|block| wanted.allows(*block, cluster));
    let pinned = !layered.graph.pins.is_empty();
    let jobs: Vec<(usize, Mesh)> = blocks
        .iter()
        .enumerate()
        .flat_map(|(i, block)| meshes(block.shape, space, pinned).into_iter().map(move |m| (i, m)))
        .collect();
    let runs = Runs::new(&layered.kinds);
    let on = OnBlock { cx, layered: &layered, runs: &runs, composites, num_microbatches };
    let results: Vec<CandidatesOfMesh> =
        jobs.par_iter().map(|(block, mesh)| candidates_of_mesh(&on, blocks[*block], mesh)).collect();

    // Candidates by sequence and block.
    let mut cells: Vec<Vec<Candidate>> = vec![Vec::new(); runs.count() * blocks.len()];
    let mut configs: Vec<StageConfig> = Vec::new();
    for ((block, _), of_mesh) in jobs.iter().zip(results) {
        for (sequence, candidate) in of_mesh.found {
            let id = configs.len() as u32 + candidate.id;
            cells[sequence * blocks.len() + block].push(Candidate { id, ..candidate });
        }
        configs.extend(of_mesh.configs);
    }
    let limits: Vec<u64> = blocks.iter().map(|block| space.memory_bytes[block.group]).collect();
    let cells = cells.into_par_iter().enumerate();
    // Keep all candidates for the whole model as one stage: few are predicted, and only the prediction says which is
    // fastest.
    let whole = runs.of(0, num_layers);
    let mut kept: Vec<Vec<Candidate>> = cells
        .map(|(i, cell)| {
            let best = unbeaten(cell);
            if i / blocks.len() == whole { best } else { of_use(best, limits[i % blocks.len()]) }
        })
        .collect();
    if !space.all_devices && !blocks.is_empty() && request.stages.devices.is_empty() {
        kept.par_chunks_mut(blocks.len()).for_each(|cells| drop_idle_growth(cells, &blocks));
    }
    let layers = layered.layers.len();
    let mut table = StageTable::new(layers, blocks.clone());
    let given = given_stages(request, &layered);
    for first in 0..layers {
        if first > 0 {
            for (i, &block) in blocks.iter().enumerate() {
                table.set_crossing(first, i, crossing_s(request, costs, block, layered.entering_bytes(first)));
            }
        }
        for end in (first + 1..=layers).filter(|end| given.is_empty() || given.contains(&(first..*end))) {
            let cells = &kept[runs.of(first, end) * blocks.len()..][..blocks.len()];
            for (block, cell) in cells.iter().enumerate() {
                cell.iter().for_each(|&candidate| table.push(first, end, block, candidate));
            }
        }
    }
    let num_devices = cluster.groups.iter().map(|g| g.num_devices() as u64).collect();
    CandidatesAtMicrobatch { layered, num_microbatches, num_devices, blocks, table, configs, answers: Mutex::default() }
}

/// The layers of each stage that the user gives; empty if the search decides.
fn given_stages(request: &Request, layered: &LayeredGraph) -> Vec<Range<usize>> {
    let starts = request.stages.starts(&layered.graph).unwrap_or_default();
    let layers = starts.iter().map(|start| layered.starts.partition_point(|s| s < start));
    let ends = layers.clone().skip(1).chain([layered.layers.len()]);
    layers.zip(ends).map(|(start, end)| start..end).collect()
}

/// Extra seconds if the inputs of a stage on a block come from another group instead of its own.
fn crossing_s(request: &Request, costs: &dyn Costs, block: Block, bytes: u64) -> f64 {
    let Some(between) = &request.cluster.between_groups else { return 0.0 };
    let (group, cost) = (&request.cluster.groups[block.group], costs.of_group(block.group as u32));
    let submesh = (block.shape.nodes, block.shape.devices);
    // The other side is unknown here; the link between the groups is mostly the bottleneck.
    let outside = path_between_groups((group, submesh), (group, submesh), between);
    let inside_s = inside_s(cost, group, block.shape, bytes);
    crossings(request) * (cost.transfer_s(bytes, &outside) - inside_s).max(0.0)
}

/// Seconds to send the inputs of a stage on a submesh from an equally large stage of its group. Of several stages side
/// by side on a node, only the first receives from another node.
fn inside_s(cost: &dyn CostModel, group: &Group, shape: SubmeshShape, bytes: u64) -> f64 {
    let submesh = (shape.nodes, shape.devices);
    let seconds = |same_node: bool| cost.transfer_s(bytes, &transfer_path(group, submesh, submesh, same_node));
    if group.nodes == 1 {
        return seconds(true);
    }
    let crossing = if shape.nodes > 1 { 1.0 } else { f64::from(shape.devices) / f64::from(group.devices_per_node) };
    crossing * seconds(false) + (1.0 - crossing) * seconds(true)
}

/// Number of times that a stage's inputs cross its boundary: forward, and backward as cotangents if there are any. In a
/// pipeline of one forward and one backward in turn, each microbatch waits for both.
fn crossings(request: &Request) -> f64 {
    if request.trains() { 2.0 } else { 1.0 }
}

impl PipelineCandidate<'_> {
    /// The largest share of a device's memory that a stage takes under a schedule, by the estimates.
    pub fn share_of_memory(&self, schedule: Schedule, memory_bytes: &[u64]) -> f64 {
        let (num_stages, num_microbatches) = (self.stages.len(), self.candidates.num_microbatches);
        let order = Order::new(schedule, num_stages, num_microbatches);
        let share = |(i, stage): (usize, &ChosenStage)| {
            let block = self.candidates.blocks.iter().position(|b| *b == stage.block)?;
            let candidate = self.candidates.run(stage.layers.clone(), block, &stage.config)?;
            Some(candidate.peak_bytes(order.in_flight(i)) as f64 / memory_bytes[stage.block.group].max(1) as f64)
        };
        self.stages.iter().enumerate().filter_map(share).fold(0.0, f64::max)
    }
}

impl CandidatesAtMicrobatch {
    /// Finds the best stages. Each device uses at most the `memory_bytes` of its group. `num_stages` fixes the number
    /// of stages.
    pub fn best(
        &self,
        cx: &SearchContext<'_>,
        memory_bytes: &[u64],
        num_stages: Option<u32>,
    ) -> Result<PipelineCandidate<'_>, NoStages> {
        let SearchContext { request, space, .. } = *cx;
        let room = |(group, (of_group, &device_memory_bytes)): (usize, (&Group, &u64))| Room {
            nodes: if space.allows(group) { of_group.nodes } else { 0 },
            devices_per_node: of_group.devices_per_node,
            device_memory_bytes,
        };
        let rooms: Vec<Room> = request.cluster.groups.iter().zip(memory_bytes).enumerate().map(room).collect();
        let steps = space.steps_together();
        let mut best: Option<(Stages, Schedule)> = None;
        let mut failure = NoStages::NoCandidates { num_layers: self.layered.layers.len() };
        for &schedule in &space.schedules {
            let query = Query {
                rooms: rooms.clone(),
                num_microbatches: self.num_microbatches.saturating_mul(steps),
                schedule,
                num_stages,
                devices: request.stages.devices.iter().map(|&n| u64::from(n)).collect(),
                all_devices: space.all_devices,
                relative_tolerance: 1e-3,
            };
            let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
            let key = (schedule.name(), memory_bytes.to_vec(), num_stages);
            let answer =
                answers.entry(key).or_insert_with(|| timed(Phase::Stages, || plan_stages(&self.table, &query))).clone();
            match answer {
                Ok(stages) if best.as_ref().is_none_or(|(b, _)| stages.step_s < b.step_s) => {
                    best = Some((stages, schedule));
                }
                Ok(_) => {}
                Err(error) => failure = error,
            }
        }
        let (stages, schedule) = best.ok_or(failure)?;
        let chosen = stages
            .stages
            .into_iter()
            .map(|(layers, block, id)| ChosenStage {
                layers,
                block: self.blocks[block],
                config: self.configs[id as usize].clone(),
            })
            .collect();
        let step_s = stages.step_s / f64::from(steps);
        Ok(PipelineCandidate { candidates: self, schedule, virtual_stages: 1, stages: chosen, step_s })
    }
}

impl CandidatesAtMicrobatch {
    /// The whole model as one stage: for each mesh the best configuration that takes at most `most_s`. Fewest devices
    /// come first, then the fastest.
    pub(super) fn singles(&self, space: &SearchSpace, memory_bytes: &[u64], most_s: f64) -> Vec<PipelineCandidate<'_>> {
        let layers = self.layered.layers.len();
        let Some(&schedule) = space.schedules.first() else { return Vec::new() };
        let mut found: Vec<PipelineCandidate<'_>> = Vec::new();
        for (i, &block) in self.blocks.iter().enumerate() {
            let limit = memory_bytes[block.group];
            let fit = self.table.candidates(0, layers, i).iter().filter(|c| c.peak_bytes(1) <= limit);
            for candidate in fit {
                let step_s = self.num_microbatches as f64 * candidate.microbatch_s + candidate.step_s;
                let config = &self.configs[candidate.id as usize];
                let known =
                    found.iter_mut().find(|f| f.stages[0].block == block && f.stages[0].config.mesh == config.mesh);
                let stages = || vec![ChosenStage { layers: 0..layers, block, config: config.clone() }];
                match known {
                    _ if step_s > most_s => {}
                    Some(known) if known.step_s <= step_s => {}
                    Some(known) => (known.stages, known.step_s) = (stages(), step_s),
                    None => found.push(PipelineCandidate {
                        candidates: self,
                        schedule,
                        virtual_stages: 1,
                        stages: stages(),
                        step_s,
                    }),
                }
            }
        }
        let devices = |f: &PipelineCandidate<'_>| f.stages[0].block.shape.num_devices();
        found.sort_by(|a, b| devices(a).cmp(&devices(b)).then(a.step_s.total_cmp(&b.step_s)));
        found
    }
}

impl CandidatesAtMicrobatch {
    /// Kinds of layers, where layers that take about as long on a block as the most common kind count as that kind. The
    /// first block of a model often differs from the others only in the source of its input.
    fn alike(&self, block: usize) -> Vec<usize> {
        const AS_LONG: f64 = 0.1;
        let kinds = &self.layered.kinds;
        let count = |kind: usize| kinds.iter().filter(|k| **k == kind).count();
        let Some(common) = kinds.iter().copied().max_by_key(|&k| (count(k), std::cmp::Reverse(k))) else {
            return Vec::new();
        };
        let seconds = |l: usize| {
            let candidates = self.table.candidates(l, l + 1, block).iter();
            candidates.map(|c| c.microbatch_s).fold(f64::INFINITY, f64::min)
        };
        let common_s = seconds(self.layered.representatives[common]);
        let near = |l: usize| (seconds(l) / common_s - 1.0).abs() <= AS_LONG;
        kinds.iter().enumerate().map(|(l, &kind)| if near(l) { common } else { kind }).collect()
    }

    /// Pipelines of equal stages: for every submesh that tiles its group, layers dealt out evenly, and for each stage
    /// the fastest configuration that fits. The dynamic program prefers unequal stages for any gain in its estimates.
    /// Where estimates are about equal, the simple pipeline may be better.
    pub(super) fn uniform(&self, cx: &SearchContext<'_>, memory_bytes: &[u64]) -> Vec<PipelineCandidate<'_>> {
        let SearchContext { request, space, .. } = *cx;
        let Some(&schedule) = space.schedules.first() else { return Vec::new() };
        let mut found = Vec::new();
        for (i, &block) in self.blocks.iter().enumerate() {
            let devices = u64::from(request.cluster.groups[block.group].num_devices());
            let num_stages = devices / block.shape.num_devices();
            let fixed = space.degrees.pp.is_some_and(|pp| u64::from(pp) != num_stages);
            if fixed || num_stages < 2 || devices % block.shape.num_devices() != 0 {
                continue;
            }
            let Some(ranges) = evenly(&self.alike(i), num_stages as usize) else { continue };
            let fastest = |(position, range): (u32, &Range<usize>)| {
                let held = schedule.in_flight(self.num_microbatches, num_stages as u32, position);
                let candidates = self.table.candidates(range.start, range.end, i).iter();
                let fitting = candidates.filter(|c| c.peak_bytes(held) <= memory_bytes[block.group]);
                fitting.min_by(|a, b| a.microbatch_s.total_cmp(&b.microbatch_s))
            };
            let Some(chosen) = (0u32..).zip(&ranges).map(fastest).collect::<Option<Vec<&Candidate>>>() else {
                continue;
            };
            let longest = |of: fn(&Candidate) -> f64| chosen.iter().map(|c| of(c)).fold(0.0, f64::max);
            let sum_s: f64 = chosen.iter().map(|c| c.microbatch_s).sum();
            let steps = f64::from(space.steps_together());
            let turns = f64::from(self.num_microbatches) - 1.0 / steps;
            let step_s = sum_s / steps + turns * longest(|c| c.microbatch_s) + longest(|c| c.step_s);
            let config = |c: &&Candidate| self.configs[c.id as usize].clone();
            let stage = |(layers, c)| ChosenStage { layers, block, config: config(c) };
            let stages = ranges.iter().cloned().zip(&chosen).map(stage).collect();
            found.push(PipelineCandidate { candidates: self, schedule, stages, virtual_stages: 1, step_s });
        }
        found
    }
}

/// The candidates for each number of microbatches that may have the best plan.
pub struct SearchResult {
    pub candidates: Vec<CandidatesAtMicrobatch>,
}

/// Searches over the numbers of microbatches, starting from one that fills the deepest pipeline and going both ways.
///
/// Pipelines and plans of one stage are followed apart: in a direction, either ends after two numbers in a row at which
/// it is no better, or one that is far worse. Pipelines count as better if the best is, or the best whose stages share
/// devices, and all plans only if they are worth a look. More microbatches shrink the bubble and the activations held,
/// but leave less work per call; once that only costs, it stays so.
pub fn search(cx: &SearchContext<'_>) -> SearchResult {
    let counts = &cx.space.num_microbatches;
    let start = counts.partition_point(|&count| count < filling(cx)).min(counts.len().saturating_sub(1));
    let groups = 0..cx.request.cluster.groups.len() as u32;
    let composites = groups
        .map(|group| cx.request.composites.of(cx.costs.of_group(group), Fusion::of(&cx.request.execution)))
        .collect();
    let mut climb = Climb {
        cx,
        composites,
        found: Vec::new(),
        of_singles: Vec::new(),
        least: [f64::INFINITY; 3],
        tried: 0,
        any_fits: false,
    };
    // More microbatches may fit where fewer do not. The other way, nothing that does not fit is followed by what fits.
    climb.go(start..counts.len(), 0);
    climb.go((0..start).rev(), 1);
    cx.progress.step("done", counts.len(), counts.len());
    climb.found.sort_by_key(|c| c.num_microbatches);
    SearchResult { candidates: climb.found }
}

/// The number of microbatches that fills the deepest pipeline.
fn filling(cx: &SearchContext<'_>) -> u32 {
    let groups = cx.request.cluster.groups.iter().enumerate().filter(|(group, _)| cx.space.allows(*group));
    let nodes: u32 = groups.map(|(_, group)| group.nodes).sum();
    let most = cx.space.num_microbatches.last().copied().unwrap_or(1);
    let layers = || cx.layered.at(most).map_or(u32::MAX, |layered| layered.layers.len() as u32);
    let stages = cx.space.degrees.pp.unwrap_or_else(|| if nodes > 1 { nodes.min(layers()) } else { 1 });
    if nodes == 1 || stages == 1 { 1 } else { FULL.saturating_mul(stages) }
}

/// A search over numbers of microbatches.
struct Climb<'a> {
    cx: &'a SearchContext<'a>,
    /// Costs of composites that are known already, by group.
    composites: Vec<Arc<CompositeCosts>>,
    found: Vec<CandidatesAtMicrobatch>,
    /// Blocks of the best plans of one stage.
    of_singles: Vec<Block>,
    /// Least seconds of a step so far: of any plan, without a pipeline, and with stages that share devices.
    least: [f64; 3],
    tried: usize,
    any_fits: bool,
}

impl Climb<'_> {
    /// Tries numbers of microbatches until neither pipelines nor plans of one stage get better. A number at which nothing
    /// fits counts as `unfit` numbers that are no better.
    fn go(&mut self, counts: impl Iterator<Item = usize>, unfit: u32) {
        // A given number of stages leaves one kind of plan.
        let is_given = self.cx.space.degrees.pp.is_some();
        let mut worse = [0, if is_given { ENOUGH } else { 0 }];
        for i in counts {
            let wanted = worse.map(|worse| worse < ENOUGH);
            if wanted == [false; 2] || self.any_fits && self.cx.progress.stopped() {
                break;
            }
            let compared = self.try_count(i, [wanted[0], wanted[1] || is_given]);
            self.any_fits |= compared.is_some();
            for (kind, worse) in worse.iter_mut().enumerate() {
                *worse = match compared.map(|compared| compared[kind]) {
                    Some(Compared::Better) => 0,
                    Some(Compared::NoBetter) => *worse + 1,
                    Some(Compared::FarWorse) => ENOUGH,
                    None => *worse + unfit,
                };
            }
        }
    }

    /// Compares pipelines and plans of one stage, as far as they are wanted, with those of the numbers of microbatches
    /// before; `None` if nothing fits.
    fn try_count(&mut self, i: usize, [pipelines, singles]: [bool; 2]) -> Option<[Compared; 2]> {
        let SearchContext { request, space, layered, progress, .. } = *self.cx;
        let (count, total) = (space.num_microbatches[i], space.num_microbatches.len());
        progress.step(&format!("{count} microbatches"), self.tried, total);
        self.tried += 1;
        let layered = layered.at(count)?;
        if i + 1 < total && least_bytes(&layered, request) > space.memory_bytes.iter().copied().max().unwrap_or(0) {
            return None;
        }
        let wanted = Wanted { pipelines, singles, of_singles: &self.of_singles };
        let candidates = candidates(self.cx, &self.composites, layered, count, wanted);
        let found = |pp| candidates.best(self.cx, &space.memory_bytes, pp).ok();
        let best = found(space.degrees.pp);
        let single = if space.degrees.pp.is_none() { found(Some(1)) } else { None };
        let shared = timed(Phase::Stages, || candidates.interleaved_s(space));
        let is_pipeline = best.as_ref().is_some_and(|best| best.stages.len() > 1 || space.degrees.pp.is_some());
        let best = best.map(|best| best.step_s);
        let of_single = single.as_ref().map(|single| single.stages[0].block);
        let mut better = [false; 3];
        for (i, step_s) in [best, single.map(|single| single.step_s), shared].into_iter().enumerate() {
            let step_s = step_s.unwrap_or(f64::INFINITY);
            better[i] = step_s < self.least[i] && step_s <= WORTH_A_LOOK * self.least[0];
            self.least[i] = self.least[i].min(step_s);
        }
        self.found.push(candidates);
        self.of_singles.extend(of_single.filter(|block| better[1] && !self.of_singles.contains(block)));
        let step_s = best?;
        let compared = |is_better: bool| match is_better {
            true => Compared::Better,
            false if better == [false; 3] && step_s > FAR_WORSE * self.least[0] => Compared::FarWorse,
            false => Compared::NoBetter,
        };
        Some([compared(better[0] && is_pipeline || better[2]), compared(better[1])])
    }
}

/// Numbers of microbatches in a row that are no better, after which no better one is expected.
const ENOUGH: u32 = 2;

/// Comparison of a number of microbatches with the best of those before it.
#[derive(Clone, Copy)]
enum Compared {
    Better,
    NoBetter,
    /// By more than [`FAR_WORSE`].
    FarWorse,
}

/// If a number of microbatches takes this many times as long as the best, the next ones are not expected to gain.
const FAR_WORSE: f64 = 2.0;

/// Microbatches per stage that mostly fill a pipeline.
const FULL: u32 = 4;

/// Lower bound of the bytes per device for a microbatch of this size: its largest value and that value's cotangent,
/// split over all devices.
fn least_bytes(layered: &LayeredGraph, request: &Request) -> u64 {
    let graph = &layered.graph;
    let largest = graph.values().filter(|v| layered.layer_of[v.index()].is_some()).map(|v| graph.ty(v).bytes()).max();
    2 * largest.unwrap_or(0) / request.cluster.num_devices() as u64
}

/// A plan without a pipeline is predicted unless it is slower than the best estimate by more than this factor.
pub(super) const WORTH_A_LOOK: f64 = 4.0;

/// Number of devices that stages may use.
pub fn num_devices(cx: &SearchContext<'_>) -> u64 {
    let groups = cx.request.cluster.groups.iter().enumerate().filter(|(group, _)| cx.space.allows(*group));
    groups.map(|(_, group)| u64::from(group.num_devices())).sum()
}

pub(super) fn explain(error: NoStages, request: &Request) -> PlanFailure {
    match error {
        NoStages::Memory { required_bytes, limit_bytes, layers, block, stage, num_stages, in_flight } => {
            PlanFailure::Memory {
                required_bytes,
                limit_bytes,
                over_bytes: required_bytes.saturating_sub(limit_bytes),
                device: request.cluster.groups[block.group].device.name.clone(),
                detail: format!(
                    "stage {stage} of {num_stages}: layers {}..{} on {} devices, {in_flight} microbatches in flight",
                    layers.start, layers.end, block.shape
                ),
                closest: None,
            }
        }
        NoStages::MoreStagesThanLayers { num_stages, num_layers } => {
            PlanFailure::TooFewLayers { layers: num_layers as u32, stages: num_stages }
        }
        NoStages::NoTiling { .. } | NoStages::NoCandidates { .. } => PlanFailure::NoCombination,
    }
}
