//! The rule of thumb for plans without a search: data parallel if the model fits on a device, model parallel if it does
//! not fit, and otherwise both.

use altiplano_planner::explain::alternatives::shape;
use altiplano_planner::request::Muted;
use altiplano_planner::{LayeredCache, Progress, Request, plan_among};
use serde::Serialize;
use std::sync::Arc;

/// A step of a conventional plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Named {
    pub name: &'static str,
    pub nodes: u32,
    pub step_time_s: f64,
    pub how: String,
}

/// The first of these with a plan: every device a replica, all devices one model-parallel replica, and nodes as
/// replicas.
pub(crate) fn rule_of_thumb(request: &Request, cache: &Arc<LayeredCache>, progress: &dyn Progress) -> Option<Named> {
    let group = &request.cluster.groups[0];
    let (nodes, each) = (group.nodes, group.devices_per_node);
    let ways = [
        ("data parallel", nodes * each, 1, 1),
        ("model parallel", 1, each, nodes),
        ("data and model parallel", nodes, each, 1),
    ];
    ways.into_iter().find_map(|(name, dp, tp, pp)| {
        if progress.stopped() {
            return None;
        }
        let mut fixed = request.clone();
        (fixed.degrees.dp, fixed.degrees.tp, fixed.degrees.pp, fixed.degrees.zero) =
            (Some(dp), Some(tp), Some(pp), Some(0));
        let plan = plan_among(&fixed, cache, &Muted(progress)).ok()?;
        Some(Named { name, nodes, step_time_s: plan.predicted.step_time_s, how: shape(&plan) })
    })
}
