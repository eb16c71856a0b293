//! A lower bound of the memory that any plan needs. Parameters and optimizer state lie at least once in the cluster,
//! so a request whose devices and hosts cannot hold them has no plan, and nobody needs to search for one.

use crate::request::{PlanFailure, Request};
use altiplano_ir::optimizer::Optimizer;
use altiplano_ir::plan::Offload;

/// Bytes that devices and hosts hold in every plan of a request that offloads this much.
pub fn lasting_bytes(request: &Request, offload: Offload) -> (u64, u64) {
    let graph = &request.graph;
    let users = graph.users();
    // Plans may leave out parameters that nothing reads.
    let read = || graph.parameters().map(|(parameter, _)| parameter).filter(|p| !users[p.index()].is_empty());
    let trained = read().filter(|&p| request.trains() && graph.is_trained(p)).map(|p| graph.ty(p));
    let slots = |dtype| request.training.optimizer.slots(dtype).len() as u64;
    let parameters_bytes: u64 = read().map(|p| graph.ty(p).bytes()).sum();
    let state_bytes: u64 =
        trained.map(|ty| slots(ty.dtype) * ty.with_dtype(Optimizer::state_type(ty.dtype)).bytes()).sum();
    match offload.optimizer {
        true => (parameters_bytes, state_bytes),
        false => (parameters_bytes + state_bytes, 0),
    }
}

/// The failure of every plan of a request that offloads this much. `None` if a plan may fit.
pub fn failure(request: &Request, offload: Offload) -> Option<PlanFailure> {
    let (on_devices, on_hosts) = lasting_bytes(request, offload);
    let cluster = &request.cluster;
    let usable = |group| cluster.usable_bytes(group);
    let devices = cluster.groups.iter().map(|group| usable(group).saturating_mul(group.num_devices().into()));
    if on_devices > devices.fold(0, u64::saturating_add) {
        let group = cluster.groups.iter().max_by_key(|group| usable(group))?;
        let required_bytes = on_devices.div_ceil(cluster.num_devices().into());
        return Some(PlanFailure::Memory {
            required_bytes,
            limit_bytes: usable(group),
            over_bytes: required_bytes.saturating_sub(usable(group)),
            device: group.device.name.clone(),
            detail: "parameters and optimizer state, divided among all devices".into(),
            closest: None,
        });
    }
    let hosts = cluster.groups.iter().map(|group| Some(group.host_memory_bytes?.saturating_mul(group.nodes.into())));
    let on_nodes = hosts.collect::<Option<Vec<u64>>>()?.into_iter().fold(0, u64::saturating_add);
    let nodes: u64 = cluster.groups.iter().map(|group| u64::from(group.nodes)).sum();
    (on_hosts > on_nodes)
        .then(|| PlanFailure::HostMemory { required_bytes: on_hosts.div_ceil(nodes), limit_bytes: on_nodes / nodes })
}

/// True if no plan of a request fits, whatever it offloads.
pub fn excludes(request: &Request) -> bool {
    let fails = |offload| failure(request, offload).is_some();
    // Parameter servers hold state elsewhere.
    request.servers.is_none() && request.offload.map_or(Offload::EACH.into_iter().all(fails), fails)
}
