//! Lower bounds of the memory that plans need. Parameters and optimizer state lie at least once in the cluster,
//! so a request whose devices and hosts cannot hold them has no plan, and nobody needs to search for one. Plans with given
//! degrees hold as many copies as their replicas do not divide.

use super::fixed_degrees::Degrees;
use crate::features::parallelism::expert_products;
use crate::predict::memory::copies_of_parameter;
use crate::request::{PlanFailure, Request};
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::Op;
use altiplano_ir::optimizer::Optimizer;
use altiplano_ir::plan::Offload;
use std::collections::BTreeSet;

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

/// Bytes of weights, gradients and optimizer state in one replica of a model.
#[derive(Default)]
pub(super) struct Lasting {
    /// Those of experts, which replicas may divide.
    experts: [u64; 3],
    others: [u64; 3],
    usable_bytes: u64,
}

impl Lasting {
    pub fn of(request: &Request) -> Lasting {
        let Request { graph, cluster, training, .. } = request;
        let depends = graph.depends_on(|v| matches!(graph.node(v).op, Op::Input(_)));
        let weights = |v: ValueId| graph.node(v).operands.iter().copied().filter(|o| !depends[o.index()]);
        let mut sources: Vec<ValueId> = expert_products(graph).into_iter().flat_map(|(v, _)| weights(v)).collect();
        let mut of_experts = BTreeSet::new();
        while let Some(v) = sources.pop() {
            if of_experts.insert(v) {
                sources.extend(&graph.node(v).operands);
            }
        }
        let group = &cluster.groups[0];
        let mut lasting = Lasting { usable_bytes: cluster.usable_bytes(group), ..Lasting::default() };
        for (p, _) in graph.parameters() {
            let ty = graph.ty(p);
            let weights = copies_of_parameter(ty.dtype, group.device.kind) * ty.bytes();
            let state = ty.elements() * training.optimizer.state_bytes_per_element(ty.dtype);
            let state = if request.offload.is_some_and(|offload| offload.optimizer) { 0 } else { state };
            let gradients = request.execution.accumulator(ty).bytes();
            let is_trained = request.trains() && graph.is_trained(p);
            let bytes = if is_trained { [weights, gradients, state] } else { [weights, 0, 0] };
            let sum = if of_experts.contains(&p) { &mut lasting.experts } else { &mut lasting.others };
            sum.iter_mut().zip(bytes).for_each(|(sum, bytes)| *sum += bytes);
        }
        lasting
    }

    /// Returns false if weights, gradients and state exceed the memory of devices, however evenly they are divided.
    pub fn may_fit(&self, degrees: &Degrees) -> bool {
        let Degrees { dp, tp, cp, stages, virtual_stages, num_microbatches, zero, experts, groups, .. } = *degrees;
        let replicas = u64::from(dp * cp / groups.max(1)).max(1);
        let devices = u64::from(tp) * u64::from(stages / virtual_stages.max(1));
        let held = |bytes: [u64; 3], parts: u64| {
            let share = |level: u8| if zero >= level { replicas.max(parts) } else { parts };
            // A single microbatch needs no sum of gradients.
            let gradients = if num_microbatches > 1 { bytes[1] / share(2) } else { 0 };
            bytes[0] / share(3) + gradients + bytes[2] / share(1)
        };
        // Devices that split positions may divide experts too.
        (held(self.others, 1) + held(self.experts, u64::from(experts * cp).max(1))) / devices.max(1)
            <= self.usable_bytes
    }
}
