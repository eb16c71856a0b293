//! Judges configurations of one model and one cluster: degrees that are given in full, without a search.
//!
//! A judged configuration splits all layers alike, as software with uniform degrees does. It is lowered and predicted
//! like the plans of a [`super::sweep`], and equals the plan that a sweep over it alone returns.

use super::choice::fits;
use super::fixed_degrees::Degrees;
use super::layout::Layout;
use super::space::SearchSpace;
use super::sweep::{ConfigurationCache, Configurations, is_uniform};
use crate::features::padding::{padded, with_padding};
use crate::features::stacks::splits_tokens_beside_experts;
use crate::features::{chunked_loss, pins, rings, scaled_products, stages, target};
use crate::request::{PlanFailure, Request};
use altiplano_cost_models::Costs;
use altiplano_ir::batch::LossKind;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::padding::Padding;
use altiplano_ir::plan::{Plan, Schedule};
use altiplano_ir::recompute::Recompute;
use std::sync::Arc;

/// A model on a cluster, with the parts that the judgements of its configurations share.
pub struct Judge {
    request: Request,
    models: Arc<ConfigurationCache>,
    /// The model with slightly padded sizes, as a search on GPUs pads them.
    padded: Option<PaddedModel>,
}

struct PaddedModel {
    graph: Arc<Graph>,
    stop_gradients: Vec<ValueId>,
    padding: Padding,
    models: Arc<ConfigurationCache>,
}

impl Judge {
    /// Prepares a request whose degrees are open.
    ///
    /// # Errors
    /// If the model cannot have the ring or the chunks of its loss that the request asks for.
    pub fn new(request: &Request) -> Result<Judge, PlanFailure> {
        let request = &scaled_products::with_scaled_factors(request);
        let request = &rings::with_blocks(request)?;
        let request = chunked_loss::with_chunks(request)?.into_owned();
        let first = || padded(&request).into_iter().next().filter(|(_, padding)| padding.is_slight());
        let padded = if request.has_gpus() { first() } else { None };
        let padded = padded.map(|(larger, padding)| PaddedModel {
            graph: larger.graph,
            stop_gradients: larger.stop_gradients,
            padding,
            models: Arc::default(),
        });
        Ok(Judge { request, models: Arc::default(), padded })
    }

    /// The request without fixed choices, to be completed for [`Judge::judged`].
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// Predicts the plan of the degrees, batch and recomputation that a completed request gives, fitting or not. Open
    /// degrees are 1, the data-parallel one follows from the cluster, and a replica has one sample at a time.
    ///
    /// # Errors
    /// If the choices contradict each other, the model, the cluster or the target, or if there is no such plan.
    pub fn judged(&self, request: &Request, costs: &dyn Costs) -> Result<Plan, PlanFailure> {
        target::one_group(request, "judging", "degrees")?;
        stages::not_given(request, "a judged configuration")?;
        let request = target::restrict(&completed(request))?;
        let degrees = degrees_of(&request)?;
        if let Some(of) = &self.padded {
            let graph = of.graph.clone();
            let larger = Request { graph, stop_gradients: of.stop_gradients.clone(), ..request.clone() };
            let larger = &pins::with_pins(&larger)?;
            let known = Configurations::among(larger, &of.models);
            let predicted = |degrees: &Degrees| {
                let plan = known.configured_unless_too_large(degrees, costs)?;
                plan.filter(fits).ok_or(PlanFailure::NoCombination)
            };
            if let Ok(plan) = degrees.best_for_experts(request.degrees.ep, predicted) {
                return Ok(with_padding(plan, &of.padding));
            }
        }
        let request = &pins::with_pins(&request)?;
        let known = Configurations::among(request, &self.models);
        degrees.best_for_experts(request.degrees.ep, |degrees| known.configured(degrees, costs))
    }
}

/// The request with defaults for choices that it leaves open.
fn completed(request: &Request) -> Request {
    let mut request = request.clone();
    request.fix_virtual_stages();
    let degrees = &mut request.degrees;
    degrees.tp = degrees.tp.or(Some(1));
    degrees.pp = degrees.pp.or(Some(1));
    degrees.zero = degrees.zero.or(Some(0));
    let each = [degrees.tp, degrees.pp, degrees.cp].into_iter().flatten().map(u64::from).product::<u64>();
    let devices = u64::from(request.cluster.num_devices());
    // Degrees that do not divide the devices are refused later.
    let dp = degrees.dp.map_or(devices / each.max(1), u64::from).max(1);
    let batch = &mut request.batch;
    let is_open = batch.microbatch.is_none() && batch.num_microbatches.is_none();
    let whole = request.loss == LossKind::Other && !request.allow_microbatch_semantics || request.graph.batch == 0;
    if is_open && !(whole && batch.per_replica.is_none()) {
        batch.microbatch = Some(batch.per_replica.unwrap_or(1).saturating_mul(dp));
    }
    batch.per_replica = None;
    request
}

/// The degrees of a completed request.
fn degrees_of(request: &Request) -> Result<Degrees, PlanFailure> {
    let space = SearchSpace::from_request(request)?;
    let of = |degree: Option<u32>| degree.unwrap_or(1);
    let (lanes, virtual_stages) = (of(space.degrees.pp), of(request.degrees.virtual_stages));
    let num_microbatches = space.num_microbatches[0];
    let schedule = request.schedule.unwrap_or(Schedule::OneFOneB);
    if !schedule.can_share(virtual_stages, num_microbatches.into(), lanes) {
        let problem = match schedule {
            Schedule::DualPipeV => "needs at least as many microbatches as stages under the schedule dualpipe-v",
            _ => "needs a number of microbatches that --pp divides",
        };
        return Err(PlanFailure::Option { option: "virtual-stages", value: virtual_stages.into(), problem });
    }
    let [dp, cp] = [space.degrees.dp, request.degrees.cp].map(of);
    // As in a sweep: a single replica stores all itself, whatever the level.
    let alone = dp == 1 && cp == 1 && is_uniform(request);
    Ok(Degrees {
        dp,
        tp: of(space.degrees.tp),
        cp,
        stages: lanes.saturating_mul(virtual_stages),
        virtual_stages,
        num_microbatches,
        zero: request.degrees.zero.filter(|_| !alone).unwrap_or(0),
        recompute: space.recompute.unwrap_or(Recompute::None),
        layout: Layout::Even,
        experts: 1,
        groups: of(request.degrees.groups),
        sequence: of(space.degrees.tp) > 1 && splits_tokens_beside_experts(request.target, &request.graph),
    })
}
