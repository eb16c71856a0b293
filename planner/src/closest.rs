//! The plan that comes closest to fitting, if no plan fits.
//!
//! The search gives up by its estimates of memory. A reported failure should instead rest on the prediction of a plan:
//! the one that needs least memory.

use crate::cuts::Sizes;
use crate::freedom::{allowed, freedom};
use crate::inter_op::search::{Freedom, search};
use crate::model::Layered;
use crate::request::{Muted, PlanFailure, Progress, Request, Silent};
use crate::{fits, judged, lost, peak_bytes, plan_with, servers, target};
use altiplano_cost_models::Costs;
use altiplano_ir::plan::{Plan, Target};
use altiplano_ir::recompute::Recompute;
use std::collections::BTreeMap;
use std::sync::Arc;

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
    let uniform = request.target == Target::Megatron || request.cp.is_some_and(|cp| cp > 1);
    if uniform || request.micro_batch.is_some() || request.servers.is_some() || progress.stopped() {
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
    if fits(&leanest) && allowed(request, &leanest) {
        return Ok(leanest);
    }
    match &failure {
        PlanFailure::Memory { closest: Some(known), .. } if peak_bytes(known) <= peak_bytes(&leanest) => Err(failure),
        _ if fits(&leanest) => Err(failure),
        _ => {
            let detail = lost::shape(&leanest);
            Err(PlanFailure::of_closest(leanest, detail))
        }
    }
}

/// The plan that needs least memory, as far as the search can tell, fitting or not.
pub fn closest_plan(request: &Request, costs: &dyn Costs) -> Result<Plan, PlanFailure> {
    if let Some(over) = request.servers {
        return servers::closest(request, over, costs);
    }
    let request = &target::aimed(request)?;
    let freedom = freedom(request)?;
    let sizes = Sizes::new(request);
    let layered = |count: u32| sizes.at(count);
    leanest(request, &freedom, costs, &layered)
}

/// The leanest plan of a search space: the most microbatches, with full recomputation unless the space fixes it.
pub fn leanest(
    request: &Request,
    freedom: &Freedom,
    costs: &dyn Costs,
    layered: &(dyn Fn(u32) -> Option<Arc<Layered>> + Sync),
) -> Result<Plan, PlanFailure> {
    let most = freedom.num_microbatches.iter().copied().max().unwrap_or(1);
    let recompute = Some(freedom.recompute.unwrap_or(Recompute::Full));
    let memory_bytes = vec![u64::MAX; freedom.memory_bytes.len()];
    let lean = Freedom { num_microbatches: vec![most], recompute, lean: true, memory_bytes, ..freedom.clone() };
    let searched = search(request, &lean, costs, layered, &Silent);
    let ranked = searched.ranked(request, &lean, &BTreeMap::new())?;
    judged(request, &ranked[0], costs)
}
