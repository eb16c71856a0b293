//! The configuration that is nearest to a plan: one mesh for all stages, whole layers, and one kind of recomputation.

use super::Configuration;
use super::StackProblem;
use crate::report::words::level_of_most;
use altiplano_ir::dtype::DType;
use altiplano_ir::mesh::CONTEXT_AXIS;
use altiplano_ir::plan::{Plan, Schedule, Stage, Update};
use altiplano_ir::recompute::Recompute;
use altiplano_planner::features::parallelism::{parallelism, splits_tokens_between_products};
use altiplano_planner::search::stated::blocks_of;
use std::collections::BTreeMap;

/// Describes a plan as a configuration.
///
/// # Errors
/// [`StackProblem::Unsayable`] for plans that no stack runs: without training, with late gradients or parameter servers,
/// on several kinds of devices, or with stages that cannot be brought to one size.
pub fn configuration(plan: &Plan) -> Result<Configuration, StackProblem> {
    sayable(plan)?;
    let [dp, tp, cp, ep, etp] = degrees(plan)?;
    let groups = parallelism(plan).iter().map(|stage| stage.groups).min().unwrap_or(1);
    // Groups of one replica share nothing among replicas. All of these sharing takes less memory.
    let groups = if groups < dp && dp.is_multiple_of(groups) { groups } else { 1 };
    let lanes = plan.num_lanes() as u32;
    let mut c = Configuration {
        devices: Some(dp * tp * cp * lanes),
        devices_per_node: Some(plan.cluster.groups[0].devices_per_node),
        replicate: Some(groups),
        shard: Some(dp / groups),
        tp: Some(tp),
        cp: Some(cp),
        ep: Some(ep),
        etp: Some(etp).filter(|_| ep > 1),
        pp: Some(lanes),
        virtual_stages: Some(plan.virtual_stages),
        schedule: Some(plan.schedule),
        micro_batch: Some(plan.microbatch / u64::from(dp)),
        accumulation: Some(plan.num_microbatches),
        global_batch: Some(plan.global_batch),
        zero: Some(zero(plan)),
        precision: precision(plan).map(DType::cotangent),
        eight_bit: plan.graph.parameters().any(|(v, _)| plan.graph.ty(v).dtype.is_eight_bit_float()),
        offload: plan.stages[0].offload,
        optimizer: Some(plan.optimizer.name().to_string()),
        clip_norm: plan.clip_norm,
        pairs_passes: Some(plan.execution.pairs_passes),
        overlaps_tensor_parallel: Some(plan.execution.overlaps_tensor_parallel),
        sends_tokens_once: Some(plan.cluster.groups.iter().any(|group| group.dispatch.is_some())),
        sequence_parallel: Some(tp > 1 && splits_tokens_between_products(&plan.graph, &plan.stages)),
        layout: Some(blocks_of(plan).into_iter().map(|(count, _)| count).collect()),
        ..Configuration::default()
    };
    if lanes > 1 {
        c.local_batch = Some(plan.global_batch / u64::from(dp));
    }
    let devices_per_node = c.devices_per_node.unwrap_or(1).max(1);
    c.nodes = c.devices.map(|devices| devices.div_ceil(devices_per_node));
    set_recomputation(plan, &mut c);
    if plan.microbatch % u64::from(dp) != 0 {
        return Err(unsayable("its microbatches cannot be dealt out to replicas", "--micro-batch-size"));
    }
    Ok(c)
}

fn unsayable(problem: &'static str, option: &'static str) -> StackProblem {
    StackProblem::Unsayable { problem, option }
}

fn sayable(plan: &Plan) -> Result<(), StackProblem> {
    match () {
        () if !plan.schedule.trains() => Err(unsayable("the plan trains nothing", "a loss")),
        () if plan.schedule == Schedule::PipeDream => {
            Err(unsayable("the plan's gradients are late", "--schedule 1f1b"))
        }
        () if plan.schedule == Schedule::Found => {
            Err(unsayable("the plan has an order of calls of its own", "--schedule 1f1b"))
        }
        () if plan.update == Update::Stale => Err(unsayable("the plan's gradients are late", "--update synchronous")),
        () if plan.servers.is_some() => Err(StackProblem::Plan("the plan has parameter servers; plan without them")),
        () if plan.cluster.groups.len() > 1 => {
            Err(StackProblem::Plan("the cluster has several kinds of devices, which no stack shares work among"))
        }
        () => Ok(()),
    }
}

/// Replicas, devices that split features and positions, parts of experts and devices that share an expert, which all
/// stages share. Stages of several sizes are brought to one.
fn degrees(plan: &Plan) -> Result<[u32; 5], StackProblem> {
    let lanes = plan.num_lanes().max(1) as u32;
    let all: u32 = plan.lanes().iter().map(|stage| stage.devices.len() as u32).sum();
    let each = all / lanes;
    let of_stages = parallelism(plan);
    // The stage with the most layers says what the others become.
    let weight = |i: &usize| (plan.stages[*i].layers.len(), std::cmp::Reverse(*i));
    let most = (0..plan.stages.len()).max_by_key(weight).unwrap_or(0);
    let found = of_stages[most];
    let (experts, within) = of_stages.iter().map(|stage| (stage.expert, stage.within_expert)).max().unwrap_or((1, 1));
    let uneven = "its stages have different numbers of devices";
    if each * lanes != all {
        return Err(unsayable(uneven, "--target megatron"));
    }
    // Positions that are split by no axis of their own are so by tensor-parallel devices.
    let has_context = plan.stages[most].mesh.axes.iter().any(|axis| axis.name == CONTEXT_AXIS);
    // Devices that repeat work share their samples, as tensor-parallel ones do.
    let tensor = found.tensor.saturating_mul(found.repeated);
    let [of_tensor, context] = match has_context {
        true => [tensor, found.context.min(each)],
        false => [tensor.saturating_mul(found.context), 1],
    };
    let tensor = (1..=of_tensor).rev().find(|tp| each % (tp * context) == 0).unwrap_or(1);
    if each % (tensor * context) != 0 {
        return Err(unsayable(uneven, "--target megatron"));
    }
    let dp = each / (tensor * context);
    let region = u64::from(dp) * u64::from(tensor) * u64::from(context);
    let experts = (1..=experts).rev().find(|&ep| region % u64::from(ep) == 0).unwrap_or(1);
    Ok([dp, tensor, context, experts, if within > 1 { tensor } else { 1 }])
}

/// The level of sharded storage that most stages have, by most of their bytes.
fn zero(plan: &Plan) -> u8 {
    let users = plan.graph.users();
    let levels: Vec<u8> = plan.stages.iter().map(|stage| level_of_most(plan, stage, &users)).collect();
    let count = |level: u8| levels.iter().filter(|&&of_stage| of_stage == level).count();
    (0..=3).max_by_key(|&level| (count(level), level)).unwrap_or(0)
}

fn precision(plan: &Plan) -> Option<DType> {
    let graph = &plan.graph;
    let mut types: BTreeMap<DType, u64> = BTreeMap::new();
    for (v, _) in graph.parameters().filter(|(v, _)| graph.ty(*v).dtype.is_float()) {
        *types.entry(graph.ty(v).dtype).or_default() += graph.ty(v).bytes();
    }
    types.into_iter().max_by_key(|(_, bytes)| *bytes).map(|(dtype, _)| dtype)
}

/// The recomputation of whole layers: all, the first of each stage, or the core of attention in all.
fn set_recomputation(plan: &Plan, c: &mut Configuration) {
    let stages = blocks_of(plan);
    let is_all = |level: Recompute| stages.iter().all(|(count, levels)| levels[level as usize] == *count);
    let fully = |(_, levels): &(u32, [u32; 3])| levels[Recompute::Full as usize];
    c.recompute_modules = Some(plan.execution.recompute_modules);
    c.recompute = match () {
        () if stages.iter().all(|(count, _)| *count == 0) => Some(most(&plan.stages)),
        () if is_all(Recompute::Full) => Some(Recompute::Full),
        () if is_all(Recompute::None) => Some(Recompute::None),
        () if is_all(Recompute::Selective) => Some(Recompute::Selective),
        () if stages.iter().any(|stage| fully(stage) > 0) => {
            // As many as the stage with the most, so that every stage has the memory.
            c.recomputed_layers = stages.iter().map(fully).max();
            Some(Recompute::Full)
        }
        () => Some(Recompute::Selective),
    };
}

fn most(stages: &[Stage]) -> Recompute {
    stages.iter().map(|stage| stage.recompute.most()).max().unwrap_or_default()
}
