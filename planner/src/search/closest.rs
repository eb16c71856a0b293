//! The plan that comes closest to fitting, if no plan fits.
//!
//! The search gives up by its estimates of memory. A reported failure should instead rest on the prediction of a plan:
//! the one that needs least memory.

use super::choice::{fits, peak_bytes};
use super::context::SearchContext;
use super::predictor::predict_candidate;
use super::space::SearchSpace;
use super::sweep::is_uniform;
use crate::explain::alternatives;
use crate::features::{servers, stages, target};
use crate::inter_op::search::search;
use crate::layers::cache::LayeredAtBatch;
use crate::plan_with;
use crate::request::{Muted, PlanFailure, Progress, Request, Silent};
use altiplano_cost_models::Costs;
use altiplano_ir::plan::Plan;
use altiplano_ir::recompute::Recompute;
use std::collections::BTreeMap;

/// Multiple of a device's memory that amounts to no limit.
const ROOMY: u64 = 16;

/// Like [`plan_with`]. If that finds no plan that fits, takes the plan that is predicted to need least memory. That
/// plan is the answer if it fits after all, and otherwise the subject of the failure.
pub fn plan_or_closest(request: &Request, costs: &dyn Costs, progress: &dyn Progress) -> Result<Plan, PlanFailure> {
    let failure = match plan_with(request, costs, progress) {
        Err(failure @ PlanFailure::Memory { .. }) => failure,
        result => return result,
    };
    // These requests have only uniform plans, of which the leanest is known.
    if is_uniform(request) || request.batch.per_replica.is_some() || request.servers.is_some() || progress.stopped() {
        return Err(failure);
    }
    let Ok(mut leanest) = closest_plan(request, costs) else { return Err(failure) };
    // The best plan without a memory limit may need less than the one that is leanest by the estimates.
    let mut roomy = Request { baselines: false, ..request.clone() };
    roomy.cluster.groups.iter_mut().for_each(|g| g.device.memory_bytes = g.device.memory_bytes.saturating_mul(ROOMY));
    if let Ok(mut other) = plan_with(&roomy, costs, &Muted(progress))
        && peak_bytes(&other) < peak_bytes(&leanest)
    {
        other.cluster = request.cluster.clone();
        leanest = other;
    }
    if fits(&leanest) && request.allows(&leanest) {
        return Ok(leanest);
    }
    match &failure {
        PlanFailure::Memory { closest: Some(known), .. } if peak_bytes(known) <= peak_bytes(&leanest) => Err(failure),
        _ if fits(&leanest) => Err(failure),
        _ => {
            let detail = alternatives::shape(&leanest);
            Err(PlanFailure::of_closest(leanest, detail))
        }
    }
}

/// The plan that needs least memory, as far as the search can tell, fitting or not.
pub fn closest_plan(request: &Request, costs: &dyn Costs) -> Result<Plan, PlanFailure> {
    let request = &stages::with_degrees(request)?;
    if let Some(over) = request.servers {
        return servers::closest(request, over, costs);
    }
    let request = &target::restrict(request)?;
    let space = SearchSpace::from_request(request)?;
    let layered = LayeredAtBatch::new(request);
    leanest(&SearchContext { request, space: &space, costs, layered: &layered, progress: &Silent })
}

/// The leanest plan of a search space: the most microbatches, with full recomputation unless the space fixes it.
pub fn leanest(cx: &SearchContext<'_>) -> Result<Plan, PlanFailure> {
    let space = cx.space;
    let most = space.num_microbatches.iter().copied().max().unwrap_or(1);
    let lean = SearchSpace {
        num_microbatches: vec![most],
        recompute: Some(space.recompute.unwrap_or(Recompute::Full)),
        lean: true,
        memory_bytes: vec![u64::MAX; space.memory_bytes.len()],
        ..space.clone()
    };
    let cx = SearchContext { space: &lean, progress: &Silent, ..*cx };
    let found = search(&cx);
    let ranked = found.ranked(&cx, &BTreeMap::new())?;
    predict_candidate(&cx, &ranked[0])
}
