//! Padded forms of a request's model, whose sizes more devices divide.

use crate::request::{Request, SearchKind};
use altiplano_ir::batch::rebatch;
use altiplano_ir::cluster::Group;
use altiplano_ir::graph::ValueId;
use altiplano_ir::padding::Padding;
use altiplano_ir::plan::Plan;
use altiplano_transforms::padding::{Padded, common_multiple, variants};
use std::sync::Arc;

/// Returns the request with the model padded, each with the original model. Alpa pads nothing. Padded parameters are
/// zero, so the optimizer must keep zeros.
pub fn padded(request: &Request) -> Vec<(Request, Padding)> {
    if !request.pad || request.search == SearchKind::Alpa || !request.training.optimizer.keeps_zeros() {
        return Vec::new();
    }
    let groups = &request.cluster.groups;
    let multiple = |of: &dyn Fn(&Group) -> u32| groups.iter().map(|g| u64::from(of(g))).fold(1, common_multiple);
    let near = multiple(&|g| if g.devices_per_node > 1 { g.devices_per_node } else { g.nodes });
    let all = multiple(&|g| g.nodes.saturating_mul(g.devices_per_node));
    // Tensor cores multiply 16 bytes of half precision at a time.
    let unit = if request.has_gpus() { 8 } else { 1 };
    let variant = |padded: Padded| {
        let of = |v: &ValueId| padded.map[v.index()];
        let padding = Padding {
            graph: request.graph.clone(),
            stop_gradients: request.stop_gradients.clone(),
            parameters: padded.parameters,
        };
        let larger = Request {
            stop_gradients: request.stop_gradients.iter().map(of).collect(),
            graph: padded.graph.into(),
            baselines: false,
            ..request.clone()
        };
        (larger, padding)
    };
    variants(&request.graph, [unit, near, all]).into_iter().map(variant).collect()
}

/// Attaches the original graph to a plan of the padded one, at the plan's microbatch size.
pub fn with_padding(plan: Plan, padding: &Padding) -> Plan {
    let graph = rebatch(&padding.graph, plan.microbatch).map_or_else(|_| padding.graph.clone(), Arc::new);
    Plan { padding: Some(Arc::new(Padding { graph, ..padding.clone() })), ..plan }
}
