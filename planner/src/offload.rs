//! Optimizer state in the memory of hosts: where that may help, which stages need it, and whether their nodes have room for it.
//!
//! A search assumes one place for the state of all stages. Where that is the host because nothing fits otherwise, stages whose
//! devices have room for it take it back, since all that it costs is time.

use crate::request::{PlanFailure, Request};
use crate::{fits, judged_again};
use altiplano_cost_models::Costs;
use altiplano_ir::cluster::DeviceKind;
use altiplano_ir::plan::{Offload, Plan};
use std::collections::BTreeMap;

/// Whether a request leaves open where state is, and its devices have a memory that is not the host's.
pub fn may_help(request: &Request) -> bool {
    let apart = request.cluster.groups.iter().all(|group| group.device.kind == DeviceKind::Gpu);
    request.offload.is_none() && request.trains() && apart
}

/// A plan of which all stages leave state in the host, with that of stages on their devices where these have room for it.
///
/// # Errors
/// Where the plan that this makes cannot be judged.
pub fn only_where_needed(plan: Plan, costs: &dyn Costs) -> Result<Plan, PlanFailure> {
    let mut back = plan.clone();
    for lane in 0..plan.num_lanes() {
        let stage = &plan.stages[lane];
        // Whenever most is held, what is in the host now would be held as well.
        let held = stage.predicted.peak_bytes.saturating_add(stage.predicted.host_bytes);
        if held <= plan.group_of(stage).device.memory_bytes {
            plan.stages_of(lane).for_each(|s| back.stages[s].offload = Offload::None);
        }
    }
    if back.stages == plan.stages {
        return Ok(plan);
    }
    let back = judged_again(back, costs)?;
    Ok(if fits(&back) { back } else { plan })
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
