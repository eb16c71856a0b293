//! Plans with parameter servers: the last devices of the cluster hold the weights, and all others train replicas of the
//! whole model. The only choices are a worker's number of microbatches and its level of recomputation. All such plans
//! are predicted, and the fastest that fits is taken.

use crate::explain::alternatives;
use crate::intra_op::layer::MemoryPrice;
use crate::layers::cache::at_microbatches;
use crate::predict::predict_from;
use crate::request::{OverServers, PlanFailure, Progress, Request};
use crate::search::choice::{fits, peak_bytes};
use crate::search::fixed_degrees::{Degrees, finely_layered, fixed_of};
use crate::search::layout::Layout;
use altiplano_cost_models::Costs;
use altiplano_ir::batch::LossKind;
use altiplano_ir::plan::{Alternative, Plan, Schedule, Target, Update};
use altiplano_ir::recompute::Recompute;
use altiplano_ir::servers::ParameterServers;
use rayon::prelude::*;

/// Finds the fastest plan over servers that fits. Its alternatives are plain data parallelism and the other mode of as
/// many servers.
pub fn plan(
    request: &Request,
    over: OverServers,
    costs: &dyn Costs,
    progress: &dyn Progress,
) -> Result<Plan, PlanFailure> {
    let workers = workers_of(request, over)?;
    let counts = counts_of(request, workers)?;
    progress.step("parameter servers", 0, 1);
    let mut plan = fastest(request, &counts, 1, Some(over), costs)?;
    if !request.baselines || progress.stopped() {
        return Ok(plan);
    }
    let line = |name: &str, plan: Result<Plan, PlanFailure>| match plan {
        Ok(plan) => Alternative {
            name: name.to_string(),
            fits: fits(&plan),
            detail: alternatives::shape(&plan),
            predicted: Some(plan.predicted),
        },
        Err(failure) => {
            Alternative { name: name.to_string(), predicted: None, fits: false, detail: failure.to_string() }
        }
    };
    let devices = request.cluster.num_devices();
    let replicas = multiples(request, 1);
    let plain =
        replicas.into_iter().filter(|&count| request.global_batch_size() / u64::from(count) % u64::from(devices) == 0);
    let other = OverServers { asynchronous: !over.asynchronous, ..over };
    // Asynchronous servers cannot know the norm of all gradients.
    let predict = |over: OverServers| match over.asynchronous && request.training.clip_norm.is_some() {
        true => Err(PlanFailure::Servers { option: "clip-norm", problem: CLIPPED }),
        false => fastest(request, &counts, 1, Some(over), costs),
    };
    let others = [
        line("data parallel", fastest(request, &plain.collect::<Vec<_>>(), devices, None, costs)),
        line(if other.asynchronous { "asynchronous" } else { "synchronous" }, predict(other)),
    ];
    let chosen = Alternative {
        name: "chosen".to_string(),
        predicted: Some(plan.predicted.clone()),
        fits: true,
        detail: alternatives::shape(&plan),
    };
    plan.alternatives = others.into_iter().chain([chosen]).collect();
    Ok(plan)
}

const CLIPPED: &str =
    "needs the norm of all gradients at once, and asynchronous servers update by one push after another";

/// Number of workers. Options that exclude servers are errors.
fn workers_of(request: &Request, over: OverServers) -> Result<u32, PlanFailure> {
    let devices = request.cluster.num_devices();
    let invalid = |option, value: u64, problem| Err(PlanFailure::Option { option, value, problem });
    let of_servers = |problem| invalid("parameter-servers", over.count.into(), problem);
    if request.cluster.groups.len() > 1 {
        return of_servers("need devices that are all alike, and the cluster has several groups of nodes");
    }
    if over.count == 0 {
        return of_servers("must be at least 1");
    }
    let workers = devices.saturating_sub(over.count);
    if workers == 0 {
        return of_servers("leaves no device of the cluster for a worker");
    }
    if request.degrees.dp.is_some_and(|dp| dp != workers) {
        return invalid(
            "dp",
            request.degrees.dp.unwrap_or(0).into(),
            "is not the number of workers, which are all devices but the servers",
        );
    }
    let refused = [
        ("tp", request.degrees.tp.is_some_and(|tp| tp != 1), "must be 1: every worker holds all of the model"),
        ("pp", request.degrees.pp.is_some_and(|pp| pp != 1), "must be 1: every worker holds all of the model"),
        (
            "virtual-stages",
            request.degrees.virtual_stages.is_some_and(|v| v != 1),
            "must be 1: every worker has one stage",
        ),
        (
            "zero",
            request.degrees.zero.is_some_and(|z| z != 0),
            "must be 0: the servers hold all state, and workers whole weights",
        ),
        (
            "offload",
            request.offload.is_some_and(|o| !o.is_none()),
            "must be none: workers have no state, and keep their activations",
        ),
        ("loss", !request.trains(), "none runs the model, and servers train it"),
        (
            "schedule",
            request.schedule.is_some_and(|s| s != Schedule::OneFOneB),
            "must be 1f1b: every worker has one stage",
        ),
        (
            "update",
            request.training.update != Update::Synchronous,
            "stale is of plans without servers; --asynchronous is theirs",
        ),
        ("target", request.target != Target::Altiplano, "must be altiplano: only its own runtime has such servers"),
        (
            "pin",
            !request.graph.pins.is_empty(),
            "lays values out over devices, and every worker holds all of the model",
        ),
        (
            "loss-scale",
            request.training.loss_scale.is_some(),
            "must be off: servers do not tell workers when to change it",
        ),
        ("clip-norm", request.training.clip_norm.is_some() && over.asynchronous, CLIPPED),
    ];
    match refused.into_iter().find(|(_, refused, _)| *refused) {
        Some((option, _, problem)) => Err(PlanFailure::Servers { option, problem }),
        None => Ok(workers),
    }
}

/// Numbers of microbatches that divide the samples and deal out evenly to `workers`, at least a factor of 1.5 apart.
fn multiples(request: &Request, workers: u32) -> Vec<u32> {
    let global = request.global_batch_size();
    let mut counts: Vec<u32> = Vec::new();
    for each in 1..=(global / u64::from(workers)).min(1024) as u32 {
        let count = each * workers;
        if global % u64::from(count) == 0 && counts.last().is_none_or(|&l| f64::from(count) >= 1.5 * f64::from(l)) {
            counts.push(count);
        }
    }
    counts
}

/// Numbers of microbatches to predict.
fn counts_of(request: &Request, workers: u32) -> Result<Vec<u32>, PlanFailure> {
    let global = request.global_batch_size();
    let invalid = |option, value: u64, problem| Err(PlanFailure::Option { option, value, problem });
    if request.loss == LossKind::Other && !request.allow_microbatch_semantics && workers > 1 {
        return invalid(
            "parameter-servers",
            request.servers.map_or(0, |over| over.count).into(),
            "would change the loss, which is not a mean over samples: each worker has its own; --allow-microbatch-semantics permits it",
        );
    }
    if request.graph.totals().next().is_some() {
        return invalid(
            "parameter-servers",
            request.servers.map_or(0, |over| over.count).into(),
            "would change the loss, which is divided by a total of the whole batch: each worker has its own; leave --parameter-servers out",
        );
    }
    let given = match (request.batch.num_microbatches, request.batch.microbatch) {
        (Some(0), _) => return invalid("num-microbatches", 0, "must be at least 1"),
        (_, Some(0)) => return invalid("microbatch", 0, "must be at least 1"),
        (Some(count), Some(size)) if size.checked_mul(count.into()) != Some(global) => {
            return invalid("microbatch", size, "times --num-microbatches is not --global-batch");
        }
        (Some(count), _) => Some(count),
        (None, Some(size)) if global % size != 0 => {
            return invalid("microbatch", size, "does not divide the global batch");
        }
        (None, Some(size)) => Some(u32::try_from(global / size).unwrap_or(u32::MAX)),
        (None, None) if request.graph.batch == 0 => Some(u32::try_from(global).unwrap_or(u32::MAX)),
        (None, None) => None,
    };
    match given {
        Some(count) if global % u64::from(count) != 0 => {
            invalid("num-microbatches", count.into(), "does not divide the global batch")
        }
        Some(count) if !count.is_multiple_of(workers) => invalid(
            "num-microbatches",
            count.into(),
            "is no multiple of the number of workers, which each take as many",
        ),
        Some(count) => Ok(vec![count]),
        None => match multiples(request, workers) {
            counts if counts.is_empty() => invalid(
                "global-batch",
                global,
                "is no multiple of the number of workers, which each take as many samples",
            ),
            counts => Ok(counts),
        },
    }
}

/// Predicts plans of one stage, over servers or with `dp` replicas alone, fastest first.
fn predict_all(
    request: &Request,
    counts: &[u32],
    dp: u32,
    over: Option<OverServers>,
    costs: &dyn Costs,
) -> Result<Vec<Plan>, PlanFailure> {
    let levels = request.recompute.map_or(Recompute::ALL.to_vec(), |level| vec![level]);
    let choices: Vec<(u32, Recompute)> =
        counts.iter().flat_map(|&count| levels.iter().map(move |&level| (count, level))).collect();
    let predict = |&(num_microbatches, recompute): &(u32, Recompute)| {
        let graph = at_microbatches(request, num_microbatches).ok_or(PlanFailure::NoCombination)?;
        let request = Request { graph, ..request.clone() };
        let layered = finely_layered(&request);
        let degrees = Degrees {
            dp,
            tp: 1,
            cp: 1,
            stages: 1,
            virtual_stages: 1,
            num_microbatches,
            zero: 0,
            recompute,
            layout: Layout::Even,
            experts: 1,
            groups: 1,
            sequence: false,
        };
        let mut plan = fixed_of(&request, &layered, &degrees, MemoryPrice::None, costs)?;
        plan.servers = over.map(|over| servers_of(&plan, over));
        if plan.servers.is_some() {
            // A single device has nothing to reduce.
            let storages = plan.stages.iter_mut().flat_map(|stage| stage.parameters.values_mut());
            storages.for_each(|storage| storage.gradient = storage.gradient.reduced());
        }
        let graphs = layered.training_graphs(plan.execution)?;
        Ok(predict_from(plan, graphs, costs))
    };
    let mut plans: Vec<Plan> = choices.par_iter().map(predict).collect::<Result<_, PlanFailure>>()?;
    plans.sort_by(|a, b| a.predicted.step_time_s.total_cmp(&b.predicted.step_time_s));
    Ok(plans)
}

/// Returns the fastest plan that fits.
///
/// # Errors
/// [`PlanFailure::Memory`] with the least memory that any plan needs, if none fits.
fn fastest(
    request: &Request,
    counts: &[u32],
    dp: u32,
    over: Option<OverServers>,
    costs: &dyn Costs,
) -> Result<Plan, PlanFailure> {
    let mut plans = predict_all(request, counts, dp, over, costs)?;
    if let Some(at) = plans.iter().position(fits) {
        return Ok(plans.swap_remove(at));
    }
    let leanest = leanest(plans)?;
    let detail = alternatives::shape(&leanest);
    Err(PlanFailure::of_closest(leanest, detail))
}

/// Returns the plan over servers that needs least memory.
pub fn closest(request: &Request, over: OverServers, costs: &dyn Costs) -> Result<Plan, PlanFailure> {
    let counts = counts_of(request, workers_of(request, over)?)?;
    leanest(predict_all(request, &counts, 1, Some(over), costs)?)
}

fn leanest(plans: Vec<Plan>) -> Result<Plan, PlanFailure> {
    plans.into_iter().min_by_key(peak_bytes).ok_or(PlanFailure::NoCombination)
}

/// Makes the last devices of the plan's cluster servers, and all others workers.
fn servers_of(plan: &Plan, over: OverServers) -> ParameterServers {
    let devices = plan.cluster.num_devices();
    let workers = devices.saturating_sub(over.count);
    ParameterServers::dealt(&plan.graph, (0..workers).collect(), (workers..devices).collect(), over.asynchronous)
}
