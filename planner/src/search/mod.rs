//! The search for a plan, from a request to the best plan with its alternatives.
//!
//! [`plan`] brings the request into the form that its target runs. `variants` searches the model and other graphs of
//! it; each is searched by `outcome::search_graph`: candidates come from [`crate::inter_op`], predictions from
//! [`predictor`], and the stages of the best few plans are solved again as a whole ([`crate::refine`]).

pub(crate) mod baselines;
pub(crate) mod choice;
pub(crate) mod closest;
pub mod context;
mod estimate;
mod expectations;
pub(crate) mod fitting;
pub mod fixed_degrees;
pub mod judge;
pub mod layout;
pub mod memory_bound;
pub mod ordered;
pub(crate) mod outcome;
pub mod pareto;
pub mod predictor;
pub mod space;
pub mod stated;
pub mod sweep;
mod uniform;
mod variants;

use crate::explain::alternatives;
use crate::features::padding::{padded, with_padding};
use crate::features::{chunked_loss, one_device, overlaps, pins, rings, scaled_products, servers, stages, target};
use crate::layers::cache::{LayeredAtBatch, LayeredCache};
use crate::request::{PlanFailure, Progress, Request};
use altiplano_cost_models::Costs;
use altiplano_ir::padding::Padding;
use altiplano_ir::plan::Plan;
use baselines::LARGE_MODEL;
use context::SearchContext;
use outcome::Outcome;
use space::SearchSpace;
use std::sync::Arc;

/// Plans a request. `cache` holds cuts of its model into layers.
pub fn plan(
    request: &Request,
    cache: &Arc<LayeredCache>,
    costs: &dyn Costs,
    progress: &dyn Progress,
) -> Result<Plan, PlanFailure> {
    if let Some(size) = request.batch.per_replica {
        let plans = pins::by_micro_batch(request, size, progress, |fixed| plan(fixed, cache, costs, progress))?;
        return Ok(choice::choose(plans));
    }
    Ok(plan_and_others(request, cache, costs, progress)?.0)
}

/// The plan of a request, and others that were found on the way. The microbatch of a replica is not fixed.
fn plan_and_others(
    request: &Request,
    cache: &Arc<LayeredCache>,
    costs: &dyn Costs,
    progress: &dyn Progress,
) -> Result<(Plan, Vec<Plan>), PlanFailure> {
    // Given stages are cuts of their own.
    let cache = if request.stages.is_empty() { cache } else { &Arc::default() };
    let request = &with_options(request)?;
    if let Some(over) = request.servers {
        return Ok((servers::plan(request, over, costs, progress)?, Vec::new()));
    }
    let request = &target::restrict(request)?;
    let mut padded = padded(request);
    // Slight padding is almost free, speeds up tensor cores, and avoids a second search of large models.
    let better = request.graph.len() > LARGE_MODEL || request.has_gpus();
    if better && padded.first().is_some_and(|(_, padding)| padding.is_slight()) {
        let (larger, padding) = padded.remove(0);
        let larger = Request { baselines: request.baselines, ..larger };
        match plan_padded(&larger, &padded, &Arc::default(), costs, progress) {
            Ok((plan, mut others)) if plan.padding.is_none() => {
                others.retain(|other| other.padding.is_none());
                let others = others.into_iter().map(|other| with_padding(other, &padding)).collect();
                return Ok((with_padding(plan, &padding), others));
            }
            Err(PlanFailure::Memory { .. }) => {}
            result => return result,
        }
    }
    plan_padded(request, &padded, cache, costs, progress)
}

/// The request with what its target and its options say in its degrees and its graph: gates of experts, stages, context and
/// expert parallelism, blocks of rings, and chunks of the loss.
///
/// # Errors
/// If an option does not fit the model or the cluster.
fn with_options(request: &Request) -> Result<Request, PlanFailure> {
    let mut of_lanes = request.clone();
    of_lanes.fix_virtual_stages();
    // Pins name values of the graph that is planned.
    let request = &scaled_products::with_scaled_factors(&of_lanes);
    let request = &stages::with_degrees(request)?;
    let request = &pins::with_pins(request)?;
    let request = &rings::with_blocks(request)?;
    Ok(chunked_loss::with_chunks(request)?.into_owned())
}

/// True if the degrees may be possible where a part of the replicas divides the experts on a mesh of its own, which only
/// plans with one set of degrees have.
fn needs_expert_mesh(request: &Request, why: &PlanFailure) -> bool {
    let is_of_degrees = matches!(why, PlanFailure::NoCombination | PlanFailure::Pins { .. });
    is_of_degrees && request.degrees.ep.is_some_and(|ep| ep > 1)
}

/// Plans a request in the form that its target runs, and `padded` forms of the same model.
fn plan_padded(
    request: &Request,
    padded: &[(Request, Padding)],
    cache: &Arc<LayeredCache>,
    costs: &dyn Costs,
    progress: &dyn Progress,
) -> Result<(Plan, Vec<Plan>), PlanFailure> {
    let space = SearchSpace::from_request(request)?;
    let of_sweep = || Ok((uniform::best(request, costs, progress)?, Vec::new()));
    if sweep::is_uniform(request) {
        // Megatron pads vocabularies, which slight padding covers, and never adds heads.
        return of_sweep();
    }
    let layered = LayeredAtBatch::among(request, cache);
    if request.trains() {
        layered.readers()?;
    }
    let cx = SearchContext { request, space: &space, costs, layered: &layered, progress };
    let Outcome { plan, mut baselines, mut others } = variants::search_with_offloading(&cx, padded);
    let mut plan = match plan {
        Err(why) if needs_expert_mesh(request, &why) => return of_sweep(),
        plan => overlaps::with_overlaps(plan?, costs)?,
    };
    let (mut faster, mut of_other_devices) = (None, Vec::new());
    if let Some(of_one) = one_device::instead_of(&cx, &plan) {
        faster = Some(one_device::line(&plan, &of_one));
        let of_all = std::mem::replace(&mut plan, of_one);
        let alike = |other: &Plan| other.num_devices() == plan.num_devices();
        (others, of_other_devices) = others.into_iter().partition(alike);
        of_other_devices.push(of_all);
    }
    if progress.stopped() || !request.baselines {
        plan.alternatives.extend(faster);
    } else {
        baselines.extend(faster);
        plan = alternatives::attach(plan, baselines, &mut others);
    }
    others.extend(of_other_devices);
    Ok((plan, others))
}
