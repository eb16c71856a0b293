//! Searches for a plan: from a graph and a cluster to a plan, and from a plan to programs.
//!
//! [`plan`] cuts the model into layers ([`layers`]), solves each layer's strategies on each mesh ([`intra_op`]), and
//! combines layers into stages and stages into a pipeline ([`inter_op`]). [`search`] drives this: each candidate is
//! written out as a plan (`assemble`), lowered ([`mod@lower`]) and predicted ([`predict`]), as are the plain baselines.
//! The stages of the best few plans are then solved again as a whole ([`refine`]). [`features`] are choices beyond
//! sharding and stages, and [`explain`] answers questions about a plan.

#![forbid(unsafe_code)]

pub(crate) mod assemble;
pub mod cache;
pub mod explain;
pub mod features;
pub mod inter_op;
pub mod intra_op;
pub mod layers;
pub mod lower;
pub mod predict;
pub mod refine;
pub mod request;
pub mod search;
pub mod timings;

pub use features::pins::pin_positions;
pub use layers::cache::LayeredCache;
pub use lower::lower;
pub use predict::predict_plan;
pub use request::{
    BatchSizes, GivenDegrees, OverServers, PlanFailure, Progress, Request, SearchKind, Silent, Training,
};
pub use search::choice::{UNDECIDED, fits};
pub use search::closest::{closest_plan, plan_or_closest};

use altiplano_cost_models::{Costs, Rooflines};
use altiplano_ir::plan::Plan;
use altiplano_ir::program::Programs;
use std::sync::Arc;

/// Finds the fastest plan that fits, and predicts the plain baselines with the same costs.
pub fn plan(request: &Request, progress: &dyn Progress) -> Result<Plan, PlanFailure> {
    plan_with(request, &Rooflines::of(&request.cluster), progress)
}

/// Like [`plan`], for requests that share a model and differ only in cluster and batch. They share the model's cut into
/// layers.
pub fn plan_among(request: &Request, cache: &Arc<LayeredCache>, progress: &dyn Progress) -> Result<Plan, PlanFailure> {
    search::plan(request, cache, &Rooflines::of(&request.cluster), progress)
}

/// Like [`plan`], with the given costs of the cluster.
pub fn plan_with(request: &Request, costs: &dyn Costs, progress: &dyn Progress) -> Result<Plan, PlanFailure> {
    search::plan(request, &Arc::default(), costs, progress)
}

/// Lowers a plan with the default costs of its cluster.
pub fn programs(plan: &Plan) -> Result<Programs, PlanFailure> {
    Ok(lower(plan, &Rooflines::of(&plan.cluster))?)
}

/// `1 stage`, `2 stages`.
fn count(n: u32, one: &str, many: &str) -> String {
    format!("{n} {}", if n == 1 { one } else { many })
}
