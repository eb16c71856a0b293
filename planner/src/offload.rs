//! Optimizer state and activations in the memory of hosts: where that may help, which stages need it, and whether their nodes have
//! room for it.
//!
//! A search assumes one place for what all stages may leave in host memory. Where that is the host because nothing fits otherwise,
//! stages whose devices have room for all of it, or for a part, take it back, since all that it costs is time.

use crate::request::{PlanFailure, Request};
use crate::{fits, judged_again};
use altiplano_cost_models::Costs;
use altiplano_ir::cluster::DeviceKind;
use altiplano_ir::graph::ValueId;
use altiplano_ir::optimizer::Optimizer;
use altiplano_ir::plan::{Offload, Plan};
use altiplano_ir::recompute::Recompute;
use std::collections::BTreeMap;

/// What is worth a search with it in host memory, where a request leaves that open, its devices have a memory that is not the host's, and
/// a search without has come to this: anything where nothing fits, and activations where they are recomputed.
pub fn worth_trying(request: &Request, without: &Result<Plan, PlanFailure>) -> Vec<Offload> {
    let apart = request.cluster.groups.iter().all(|group| group.device.kind == DeviceKind::Gpu);
    if request.offload.is_some() || !request.trains() || !apart {
        return Vec::new();
    }
    let recomputes = |plan: &Plan| plan.stages.iter().any(|stage| stage.recompute.most() > Recompute::None);
    match without {
        Err(PlanFailure::Memory { .. }) => Offload::EACH.into_iter().filter(|what| !what.is_none()).collect(),
        Ok(plan) if request.recompute.is_none() && recomputes(plan) => vec![Offload::ACTIVATIONS],
        _ => Vec::new(),
    }
}

/// A plan of which all stages leave something in the host, with that of stages on their devices where these have room for it: all of it,
/// or else the activations, which go to and fro for each microbatch, or else the state.
///
/// # Errors
/// Where the plan that this makes cannot be judged.
pub fn only_where_needed(plan: Plan, costs: &dyn Costs) -> Result<Plan, PlanFailure> {
    let mut back = plan.clone();
    for lane in 0..plan.num_lanes() {
        let stage = &plan.stages[lane];
        let state_bytes: u64 = plan.stages_of(lane).map(|s| state_bytes(&plan, s)).sum();
        let host_bytes = stage.predicted.host_bytes;
        let parts = [
            (Offload::NONE, host_bytes),
            (Offload::OPTIMIZER, host_bytes.saturating_sub(state_bytes)),
            (Offload::ACTIVATIONS, state_bytes),
        ];
        // Whenever most is held, what is in the host now would be held as well.
        let fits = |more: u64| stage.predicted.peak_bytes.saturating_add(more) <= plan.usable_bytes(stage);
        let less = parts.into_iter().filter(|(left, _)| *left == Offload::NONE || stage.offload == Offload::ALL);
        if let Some((left, _)) = less.into_iter().find(|(_, more)| fits(*more)) {
            plan.stages_of(lane).for_each(|s| back.stages[s].offload = left);
        }
    }
    if back.stages == plan.stages {
        return Ok(plan);
    }
    let back = judged_again(back, costs)?;
    Ok(if fits(&back) { back } else { plan })
}

/// Bytes of optimizer state on each device of a stage that are in host memory.
fn state_bytes(plan: &Plan, stage: usize) -> u64 {
    let stage = &plan.stages[stage];
    let of_parameter = |(p, name): (ValueId, &str)| {
        let (ty, storage) = (plan.graph.ty(p), stage.parameters.get(name)?);
        let slots = plan.optimizer.slots(ty.dtype).len() as u64;
        Some(slots * storage.state.local_bytes(&ty.with_dtype(Optimizer::state_type(ty.dtype)), &stage.mesh))
    };
    match stage.offload.optimizer {
        true => plan.graph.trained_parameters().filter_map(of_parameter).sum(),
        false => 0,
    }
}

/// Bytes that devices keep in the memory of each node that has any of them, by the node's first device.
pub fn of_nodes(plan: &Plan) -> BTreeMap<u32, u64> {
    let mut nodes: BTreeMap<u32, u64> = BTreeMap::new();
    for stage in plan.lanes().iter().filter(|stage| stage.predicted.host_bytes > 0) {
        let first = plan.cluster.devices_of(stage.group as usize).start;
        let each = plan.group_of(stage).devices_per_node;
        for device in &stage.devices {
            *nodes.entry(device - (device - first) % each).or_default() += stage.predicted.host_bytes;
        }
    }
    nodes
}

/// What the fullest node has to hold and what it has, where that is known and too little.
pub fn short_node(plan: &Plan) -> Option<(u64, u64)> {
    let limit = |device: u32| {
        let group = (0..plan.cluster.groups.len()).find(|&g| plan.cluster.devices_of(g).contains(&device))?;
        plan.cluster.groups[group].host_memory_bytes
    };
    let nodes = of_nodes(plan).into_iter().filter_map(|(device, bytes)| Some((bytes, limit(device)?)));
    nodes.filter(|(bytes, limit)| bytes > limit).max_by_key(|(bytes, limit)| bytes - limit)
}
