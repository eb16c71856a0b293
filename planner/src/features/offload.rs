//! Optimizer state and activations in host memory: when that may help, which stages need it, and whether their nodes
//! have room.
//!
//! A search offloads the same data for all stages. If it does so because nothing fits otherwise, stages whose devices
//! have room for all or part of the data take it back, since offloading only costs time.

use crate::predict::predict_plan;
use crate::request::{PlanFailure, Request};
use crate::search::choice::fits;
use crate::search::memory_bound;
use altiplano_cost_models::Costs;
use altiplano_ir::cluster::DeviceKind;
use altiplano_ir::graph::ValueId;
use altiplano_ir::optimizer::Optimizer;
use altiplano_ir::plan::{Offload, Plan};
use altiplano_ir::recompute::Recompute;
use std::collections::BTreeMap;

/// Returns the data that is worth a search with it in host memory: any if nothing fits without, and activations if the
/// plan recomputes them. This applies if the request leaves the choice open and its devices have a memory of their own.
/// Data that does not make enough room in any plan is left out.
pub fn worth_trying(request: &Request, without: &Result<Plan, PlanFailure>) -> Vec<Offload> {
    let apart = request.cluster.groups.iter().all(|group| group.device.kind == DeviceKind::Gpu);
    if request.offload.is_some() || !request.trains() || !apart {
        return Vec::new();
    }
    let recomputes = |plan: &Plan| plan.stages.iter().any(|stage| stage.recompute.most() > Recompute::None);
    match without {
        Err(PlanFailure::Memory { .. }) => {
            let each = Offload::EACH.into_iter().filter(|what| !what.is_none());
            each.filter(|what| memory_bound::failure(request, *what).is_none()).collect()
        }
        Ok(plan) if request.recompute.is_none() && recomputes(plan) => vec![Offload::ACTIVATIONS],
        _ => Vec::new(),
    }
}

/// Moves offloaded data back to stages whose devices have room for it: all of it, or else the activations, which are
/// copied for each microbatch, or else the state.
///
/// # Errors
/// If the resulting plan cannot be predicted.
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
        // At the peak, the data that is in the host now would be held as well.
        let fits = |more: u64| stage.predicted.peak_bytes.saturating_add(more) <= plan.usable_bytes(stage);
        let less = parts.into_iter().filter(|(left, _)| *left == Offload::NONE || stage.offload == Offload::ALL);
        if let Some((left, _)) = less.into_iter().find(|(_, more)| fits(*more)) {
            plan.stages_of(lane).for_each(|s| back.stages[s].offload = left);
        }
    }
    if back.stages == plan.stages {
        return Ok(plan);
    }
    let back = predict_plan(back, costs)?;
    Ok(if fits(&back) { back } else { plan })
}

/// Bytes of optimizer state that each device of a stage keeps in host memory.
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

/// Bytes that devices keep in the memory of their node, by the node's first device. Nodes without any are left out.
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

/// The bytes that the fullest node must hold and those that it has; `None` if every node has enough, as far as known.
pub fn short_node(plan: &Plan) -> Option<(u64, u64)> {
    let limit = |device: u32| {
        let group = (0..plan.cluster.groups.len()).find(|&g| plan.cluster.devices_of(g).contains(&device))?;
        plan.cluster.groups[group].host_memory_bytes
    };
    let nodes = of_nodes(plan).into_iter().filter_map(|(device, bytes)| Some((bytes, limit(device)?)));
    nodes.filter(|(bytes, limit)| bytes > limit).max_by_key(|(bytes, limit)| bytes - limit)
}
