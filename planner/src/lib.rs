//! Searches for a plan: from a graph and a cluster to a plan, and from a plan to programs.
//!
//! [`plan`] reads top to bottom. It cuts the model into layers, solves each layer's strategies on each mesh
//! ([`intra_op`]), and combines layers into stages and stages into a pipeline ([`inter_op`]). Each candidate is written
//! out as a plan ([`assemble`]), lowered ([`lower`]) and predicted ([`predict`]), as are the plain baselines. The
//! stages of the best few plans are then solved again as a whole ([`refine`]).

#![forbid(unsafe_code)]

pub mod account;
pub mod again;
mod asked;
pub mod assemble;
pub mod cache;
pub mod chunked_loss;
mod closest;
mod cuts;
pub mod enough;
pub mod fixed;
pub mod flop;
mod freedom;
pub mod frontier;
pub mod inter_op;
pub mod intra_op;
pub mod layers;
pub mod lost;
pub mod lower;
pub mod memory;
pub mod model;
pub mod neighbours;
pub mod offload;
pub mod parallelism;
pub mod predict;
pub mod refine;
pub mod request;
pub mod rings;
pub mod servers;
pub mod sweep;
pub mod target;
pub mod timing;
pub mod why;

pub use asked::pin_positions;
use cache::Cache;
use closest::leanest;
pub use closest::{closest_plan, plan_or_closest};
pub use cuts::Cuts;
use cuts::Sizes;
pub use freedom::global_batch;
use freedom::{allowed, baselines, freedom};
use lower::Derived;
pub use lower::lower;
use request::Muted;
pub use request::SearchKind;
pub use request::{OverServers, PlanFailure, Progress, Request, Silent};

use altiplano_cost_models::{Costs, Rooflines};
use altiplano_ir::batch::rebatch;
use altiplano_ir::cluster::{DeviceKind, Group};
use altiplano_ir::graph::ValueId;
use altiplano_ir::padding::Padding;
use altiplano_ir::plan::{Alternative, Plan, Predicted, Schedule, Stage, StagePredicted, Target};
use altiplano_ir::program::Programs;
use altiplano_transforms::padding::{self, Padded};
use inter_op::search::{Found, Freedom, Searched, search};
use inter_op::variants;
use model::Layered;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Finds the fastest plan that fits, and predicts the plain baselines with the same costs.
pub fn plan(request: &Request, progress: &dyn Progress) -> Result<Plan, PlanFailure> {
    plan_with(request, &Rooflines::of(&request.cluster), progress)
}

/// Like [`plan`], for requests that share a model and differ only in cluster and batch. They share the model's cut into
/// layers.
pub fn plan_among(request: &Request, cuts: &Arc<Cuts>, progress: &dyn Progress) -> Result<Plan, PlanFailure> {
    planned(request, cuts, &Rooflines::of(&request.cluster), progress)
}

/// Like [`plan`], with the given costs of the cluster.
pub fn plan_with(request: &Request, costs: &dyn Costs, progress: &dyn Progress) -> Result<Plan, PlanFailure> {
    planned(request, &Arc::default(), costs, progress)
}

fn planned(
    request: &Request,
    cuts: &Arc<Cuts>,
    costs: &dyn Costs,
    progress: &dyn Progress,
) -> Result<Plan, PlanFailure> {
    if let Some(size) = request.micro_batch {
        return asked::by_micro_batch(request, size, progress, |fixed| planned(fixed, cuts, costs, progress));
    }
    let pinned = asked::with_pins(request)?;
    let request = pinned.as_ref().unwrap_or(request);
    let in_blocks = rings::asked_for(request)?;
    let request = in_blocks.as_ref().unwrap_or(request);
    let in_chunks = chunked_loss::asked_for(request)?;
    let request = in_chunks.as_ref().unwrap_or(request);
    if let Some(over) = request.servers {
        return servers::planned(request, over, costs, progress);
    }
    let request = &target::aimed(request)?;
    let mut padded = padded(request);
    // Slight padding is almost free, speeds up tensor cores, and avoids a second search of large models.
    let better = request.graph.len() > LARGE_MODEL || has_gpus(request);
    if better && padded.first().is_some_and(|(_, padding)| padding.is_slight()) {
        let (larger, padding) = padded.remove(0);
        let larger = Request { baselines: request.baselines, ..larger };
        match planned_among(&larger, &padded, &Arc::default(), costs, progress) {
            Ok(plan) if plan.padding.is_none() => return Ok(with_padding(plan, &padding)),
            Err(PlanFailure::Memory { .. }) => {}
            result => return result,
        }
    }
    planned_among(request, &padded, cuts, costs, progress)
}

fn has_gpus(request: &Request) -> bool {
    request.cluster.groups.iter().any(|g| g.device.kind == DeviceKind::Gpu)
}

/// Plans a request that already has the form its target needs, and `padded` variants of the same model.
fn planned_among(
    request: &Request,
    padded: &[(Request, Padding)],
    cuts: &Arc<Cuts>,
    costs: &dyn Costs,
    progress: &dyn Progress,
) -> Result<Plan, PlanFailure> {
    let freedom = freedom(request)?;
    if request.target == Target::Megatron || request.cp.is_some_and(|cp| cp > 1) {
        // Megatron pads vocabularies, which slight padding covers, and never adds heads.
        return best_of_sweep(request, costs, progress);
    }
    let sizes = Sizes::among(request, cuts);
    let layered = |count: u32| sizes.at(count);
    if request.trains() {
        sizes.readers()?;
    }
    let chosen = |request: &Request| {
        let mut found = vec![choose(request, &freedom, costs, &layered, progress)];
        for (larger, padding) in padded {
            if progress.stopped() {
                break;
            }
            let larger = Request { offload: request.offload, ..larger.clone() };
            let sizes = Sizes::new(&larger);
            let layered = |count: u32| sizes.at(count);
            let choice = choose(&larger, &freedom, costs, &layered, progress);
            found.push(Choice { plan: choice.plan.map(|plan| with_padding(plan, padding)), ..choice });
        }
        // Try ring attention with the better of the graphs so far, all of which gather keys and values.
        let best = best_of(&found);
        let (base, padding) = match best.checked_sub(1).and_then(|at| padded.get(at)) {
            Some((larger, padding)) => (Request { offload: request.offload, ..larger.clone() }, Some(padding)),
            None => (request.clone(), None),
        };
        let choose_variant = |variant: &Request| {
            let sizes = Sizes::new(variant);
            let layered = |count: u32| sizes.at(count);
            let choice = choose(variant, &freedom, costs, &layered, progress);
            let plan = match padding {
                Some(padding) => choice.plan.map(|plan| with_padding(plan, padding)),
                None => choice.plan,
            };
            Choice { plan, ..choice }
        };
        let ringed = match progress.stopped() {
            true => None,
            false => rings::variant(&base, &found[best].plan, costs),
        };
        found.extend(ringed.as_ref().map(choose_variant));
        // Try logits in chunks with the better of gathered and ringed attention; if all choices fail, with both.
        let (better, last) = (best_of(&found), found.len() - 1);
        let fails = found.iter().all(|choice| choice.plan.is_err());
        let in_chunks = [Some((&base, best)), ringed.as_ref().map(|ringed| (ringed, last))].into_iter().flatten();
        let in_chunks: Vec<Request> = in_chunks
            .filter(|(_, at)| fails || *at == better)
            .filter_map(|(whole, at)| chunked_loss::variant(whole, &found[at].plan))
            .collect();
        for variant in in_chunks {
            if progress.stopped() {
                break;
            }
            found.push(choose_variant(&variant));
        }
        // The search only estimates transfers between groups, so compare plans on several groups with plans on each
        // group alone.
        let several = request.cluster.groups.len() > 1;
        for group in (0..request.cluster.groups.len()).filter(|_| several) {
            if progress.stopped() && found[0].plan.is_ok() {
                break;
            }
            let alone = Freedom { only_group: Some(group), ..freedom.clone() };
            found.push(choose(request, &alone, costs, &layered, progress));
        }
        best_choice(found)
    };
    let mut choice = chosen(request);
    let mut tried: Vec<Choice> = Vec::new();
    for what in offload::worth_trying(request, &choice.plan) {
        if progress.stopped() {
            break;
        }
        let mut offloaded = chosen(&Request { offload: Some(what), baselines: false, ..request.clone() });
        offloaded.plan = offloaded.plan.and_then(|plan| offload::only_where_needed(plan, costs));
        tried.push(offloaded);
    }
    if !tried.is_empty() {
        let Choice { plan, others, .. } = best_choice(tried);
        let step_s =
            |plan: &Result<Plan, PlanFailure>| plan.as_ref().map_or(f64::INFINITY, |p| p.predicted.step_time_s);
        if choice.plan.is_err() || step_s(&plan) < step_s(&choice.plan) {
            (choice.plan, choice.others) = (plan, others);
        }
    }
    let Choice { plan, mut baselines, mut others } = choice;
    let mut plan = plan?;
    let mut faster = None;
    if let Some(of_one) = enough::one_device(request, &plan, &freedom, costs, &layered, progress) {
        faster = Some(enough::line(&plan, &of_one));
        plan = of_one;
    }
    if progress.stopped() || !request.baselines {
        plan.alternatives.extend(faster);
        return Ok(plan);
    }
    others.sort_by(|a, b| a.predicted.step_time_s.total_cmp(&b.predicted.step_time_s));
    others.retain(|other| faster.is_none() || other.num_devices() == plan.num_devices());
    baselines.extend(faster);
    baselines.extend(lost::alternatives(&plan, others));
    baselines.push(Alternative {
        name: "chosen".into(),
        predicted: Some(plan.predicted.clone()),
        fits: fits(&plan),
        detail: lost::shape(&plan),
    });
    plan.alternatives = baselines;
    Ok(plan)
}

/// Returns the request with the model padded to sizes that more devices divide, each with the original model. Alpa pads
/// nothing. Padded parameters are zero, so the optimizer must keep zeros.
fn padded(request: &Request) -> Vec<(Request, Padding)> {
    if !request.pad || request.search == SearchKind::Alpa || !request.optimizer.keeps_zeros() {
        return Vec::new();
    }
    let groups = &request.cluster.groups;
    let multiple =
        |of: &dyn Fn(&Group) -> u32| groups.iter().map(|g| u64::from(of(g))).fold(1, padding::common_multiple);
    let near = multiple(&|g| if g.devices_per_node > 1 { g.devices_per_node } else { g.nodes });
    let all = multiple(&|g| g.nodes.saturating_mul(g.devices_per_node));
    // Tensor cores multiply 16 bytes of half precision at a time.
    let unit = if has_gpus(request) { 8 } else { 1 };
    let variant = |padded: Padded| {
        let of = |v: &ValueId| padded.map[v.index()];
        let padding = Padding {
            graph: request.graph.clone(),
            stop_gradients: request.stop_gradients.clone(),
            parameters: padded.parameters,
        };
        let larger = Request {
            stop_gradients: request.stop_gradients.iter().map(of).collect(),
            graph: padded.graph,
            baselines: false,
            ..request.clone()
        };
        (larger, padding)
    };
    padding::variants(&request.graph, [unit, near, all]).into_iter().map(variant).collect()
}

/// Attaches the original graph to a plan of the padded one, at the plan's microbatch size.
fn with_padding(plan: Plan, padding: &Padding) -> Plan {
    let graph = rebatch(&padding.graph, plan.microbatch).unwrap_or_else(|_| padding.graph.clone());
    Plan { padding: Some(Arc::new(Padding { graph, ..padding.clone() })), ..plan }
}

/// A plan and the alternatives to it.
struct Choice {
    plan: Result<Plan, PlanFailure>,
    /// One line for each plain baseline.
    baselines: Vec<Alternative>,
    /// Other plans that the search found.
    others: Vec<Plan>,
}

/// Index of the choice with the fastest plan; 0 if none has a plan.
fn best_of(choices: &[Choice]) -> usize {
    let step_s = |c: &Choice| c.plan.as_ref().map_or(f64::INFINITY, |plan| plan.predicted.step_time_s);
    (0..choices.len()).min_by(|&a, &b| step_s(&choices[a]).total_cmp(&step_s(&choices[b]))).unwrap_or(0)
}

/// The best of several choices of the same request, with the better line for each baseline. If all fail, the failure
/// that is nearest to fitting.
fn best_choice(choices: Vec<Choice>) -> Choice {
    let (mut plans, mut failures) = (Vec::new(), Vec::new());
    let (mut baselines, mut others): (Vec<Alternative>, Vec<Plan>) = (Vec::new(), Vec::new());
    let rank = |a: &Alternative| (!a.fits, a.predicted.as_ref().map_or(f64::INFINITY, |p| p.step_time_s));
    for choice in choices {
        match choice.plan {
            Ok(plan) => plans.push(plan),
            Err(why) => failures.push(why),
        }
        others.extend(choice.others);
        if baselines.is_empty() {
            baselines = choice.baselines;
            continue;
        }
        for (line, other) in baselines.iter_mut().zip(choice.baselines) {
            if rank(&other) < rank(line) {
                *line = other;
            }
        }
    }
    // The chosen plan stays in the list: `lost::alternatives` leaves out plans that look like it.
    others.extend(plans.iter().cloned());
    let plan = match plans.is_empty() {
        true => Err(failures.into_iter().reduce(PlanFailure::nearer).unwrap_or(PlanFailure::NoCombination)),
        false => Ok(chosen_of(plans)),
    };
    Choice { plan, baselines, others }
}

/// Finds the fastest plan that fits, baselines included. The stages of the best few plans are solved again as a whole.
fn choose(
    request: &Request,
    freedom: &Freedom,
    costs: &dyn Costs,
    layered: &(dyn Fn(u32) -> Option<Arc<Layered>> + Sync),
    progress: &dyn Progress,
) -> Choice {
    let searched =
        plans_that_fit(request, freedom, costs, layered, progress, Calibration::default()).map_err(|failure| {
            match failure {
                PlanFailure::NoCombination if !request.graph.pins.is_empty() => {
                    PlanFailure::Pins { pins: request.graph.pins.iter().map(ToString::to_string).collect() }
                }
                failure => failure,
            }
        });
    let (mut plans, failure) = match searched {
        Ok(plans) => (plans, None),
        Err(failure) => (Vec::new(), Some(failure)),
    };
    let hand_written = || plans.first().map_or(Vec::new(), |found| by_hand(request, freedom, found, costs, progress));
    let best_s = plans.first().map(|p| p.predicted.step_time_s);
    let plain = || judged_baselines(request, freedom, best_s, costs, layered, progress);
    let (more, judged_baselines) = rayon::join(hand_written, plain);
    plans.extend(more);
    plans.sort_by(|a, b| a.predicted.step_time_s.total_cmp(&b.predicted.step_time_s));
    if let Some(variant) = plans.first().and_then(|best| without_bubble(request, freedom, best, costs, layered)) {
        plans.push(variant);
    }
    plans.sort_by(|a, b| a.predicted.step_time_s.total_cmp(&b.predicted.step_time_s));
    let again = |plan: Plan| match progress.stopped() || freedom.alpa {
        true => Ok(plan),
        false => match layered(plan.num_microbatches).filter(|layered| layered.starts == plan.layers) {
            Some(layered) => refine::refined(request, freedom, &layered, plan, costs),
            None => {
                let Plan { graph, layers, stop_gradients, schedule, .. } = &plan;
                let layered = Layered::new(graph.clone(), layers.clone(), stop_gradients, schedule.trains());
                refine::refined(request, freedom, &layered, plan, costs)
            }
        },
    };
    let mut alternatives = Vec::new();
    let mut candidates: Vec<Plan> = Vec::new();
    for (name, result) in judged_baselines {
        let degrees = |p: &Plan| {
            let mesh = &p.stages[0].mesh;
            format!(
                "dp{} tp{} pp{}, {}{}{}",
                mesh.axes[0].size,
                mesh.axes[1].size,
                p.stages.len(),
                count(p.num_microbatches, "microbatch", "microbatches"),
                lost::recomputed(p),
                match freedom.only_group.map(|group| &p.cluster.groups[group]) {
                    Some(group) => format!(", on the {} x {} alone", group.num_devices(), group.device.name),
                    None => String::new(),
                }
            )
        };
        alternatives.push(match result {
            Ok(plan) => {
                let fits = fits(&plan);
                let line = Alternative {
                    name: name.into(),
                    predicted: Some(plan.predicted.clone()),
                    fits,
                    detail: degrees(&plan),
                };
                // Predictions decide, so a baseline may become the plan.
                if fits && allowed(request, &plan) && !freedom.alpa {
                    candidates.push(plan);
                }
                line
            }
            Err(failure) => {
                Alternative { name: name.into(), predicted: None, fits: false, detail: failure.to_string() }
            }
        });
    }
    let (finalists, others) = finalists(candidates, plans, request.graph.len());
    let refined: Result<Vec<Plan>, PlanFailure> = finalists.into_par_iter().map(again).collect();
    let plan = refined.and_then(|refined| match refined.is_empty() {
        true => Err(failure.unwrap_or(PlanFailure::NoCombination)),
        false => Ok(chosen_of(refined)),
    });
    if let Ok(plan) = plan.as_ref()
        && fits(plan)
    {
        progress.best(plan.predicted.step_time_s, plan.predicted.lower_bound_s);
    }
    Choice { plan, baselines: alternatives, others }
}

/// Most plans whose stages are solved again before one is chosen. The gain differs from plan to plan.
const MOST_REFINED: usize = 5;
/// Plans up to this many times slower than the fastest are worth solving again.
const WORTH_REFINING: f64 = 1.05;

/// Splits baselines and plans of the search, of a model of `num_nodes` nodes, into finalists and the search's other
/// plans. Finalists are the plan to choose by its prediction so far, and plans that may be faster once their stages are
/// solved again.
fn finalists(baselines: Vec<Plan>, plans: Vec<Plan>, num_nodes: usize) -> (Vec<Plan>, Vec<Plan>) {
    /// Graph nodes of all finalists together.
    const NODES_REFINED: usize = 3_600;
    let most = MOST_REFINED.min(NODES_REFINED / num_nodes.max(1)).max(1);
    let of_search = baselines.len()..;
    let mut all: Vec<(usize, Plan)> = baselines.into_iter().chain(plans).enumerate().collect();
    let step_s = |of: &(usize, Plan)| of.1.predicted.step_time_s;
    all.sort_by(|a, b| (!fits(&a.1)).cmp(&!fits(&b.1)).then(step_s(a).total_cmp(&step_s(b))));
    let num_fitting = all.partition_point(|(_, plan)| fits(plan));
    if num_fitting > 0 {
        let (at, most_s) = (leanest_of_the_fastest(&all[..num_fitting], |of| &of.1), step_s(&all[0]) * WORTH_REFINING);
        let chosen = all.remove(at);
        all.insert(0, chosen);
        let near = all[..num_fitting].iter().filter(|of| step_s(of) <= most_s).count();
        let lost = all.split_off(near.min(most));
        let lost = lost.into_iter().filter(|(i, _)| of_search.contains(i)).map(|(_, plan)| plan).collect();
        return (all.into_iter().map(|(_, plan)| plan).collect(), lost);
    }
    let lost = all.split_off(all.len().min(1));
    (all.into_iter().map(|(_, plan)| plan).collect(), lost.into_iter().map(|(_, plan)| plan).collect())
}

/// Uniform plans as users write them by hand, if they are faster than `found`.
fn by_hand(
    request: &Request,
    freedom: &Freedom,
    found: &Plan,
    costs: &dyn Costs,
    progress: &dyn Progress,
) -> Vec<Plan> {
    // The sweep honours neither pins nor a given schedule, and covers only training on GPUs.
    let asked = !request.graph.pins.is_empty() || request.schedule.is_some() || freedom.only_group.is_some();
    let workers = request.cluster.groups.iter().any(|g| g.device.kind == DeviceKind::Cpu);
    let other = freedom.alpa || request.target != Target::Altiplano || !request.trains() || workers;
    if asked || other || progress.stopped() {
        return Vec::new();
    }
    // Skip plans that are as fast as `found` within the prediction error.
    let most_s = found.predicted.step_time_s / (1.0 + UNDECIDED);
    let mut plans = sweep::climb(request, found, costs, progress);
    plans.retain(|p| p.predicted.step_time_s < most_s);
    plans
}

/// Returns the pipeline under the zero-bubble schedule, if the schedule is free and the gain exceeds the prediction
/// error.
fn without_bubble(
    request: &Request,
    freedom: &Freedom,
    plan: &Plan,
    costs: &dyn Costs,
    layered: &(dyn Fn(u32) -> Option<Arc<Layered>> + Sync),
) -> Option<Plan> {
    let workers = request.cluster.groups.iter().any(|g| g.device.kind == DeviceKind::Cpu);
    let plain = (plan.schedule, plan.virtual_stages) == (Schedule::OneFOneB, 1) && plan.stages.len() > 1;
    if !freedom.zero_bubble || workers || !plain {
        return None;
    }
    let at_size = layered(plan.num_microbatches)?;
    let variant = Plan { schedule: Schedule::ZbH1, ..plan.clone() };
    let variant = predicted(variant, &at_size, costs, request.cache.as_deref()).ok()?;
    let most_s = plan.predicted.step_time_s / (1.0 + UNDECIDED);
    (fits(&variant) && variant.predicted.step_time_s < most_s).then_some(variant)
}

/// Nodes from which on predicting a plan of a single stage takes seconds.
const LARGE_MODEL: usize = 8_000;
/// Baselines whose estimate is this many times slower than the best plan are not predicted in a large model. In others,
/// only one such candidate is.
const FAR_BEHIND: f64 = 4.0;

/// Predicts the plain baselines, if the request asks for them: for each the best plan that fits, else the leanest. In a
/// large model, baselines that do not fit or are far behind `best_s` are reported from the search's estimates alone.
fn judged_baselines(
    request: &Request,
    freedom: &Freedom,
    best_s: Option<f64>,
    costs: &dyn Costs,
    layered: &(dyn Fn(u32) -> Option<Arc<Layered>> + Sync),
    progress: &dyn Progress,
) -> Vec<(&'static str, Result<Plan, PlanFailure>)> {
    if progress.stopped() || !request.baselines {
        return Vec::new();
    }
    let baselines = baselines(request, freedom);
    progress.step("baselines", 0, baselines.len());
    let judged = |(name, freedom): (&'static str, Freedom)| {
        let quietly = Muted(progress);
        let large = request.graph.len() > LARGE_MODEL;
        let far_s = best_s.map_or(f64::INFINITY, |best_s| FAR_BEHIND * best_s);
        let known = match large {
            true => Calibration { far_s, ..Calibration::default() },
            false => Calibration { one_of_s: far_s, ..Calibration::default() },
        };
        let fitting = plans_that_fit(request, &freedom, costs, layered, &quietly, known);
        let far = PlanFailure::FarBehind { times: FAR_BEHIND };
        let mut result = fitting.and_then(|plans| plans.into_iter().next().ok_or(far));
        if !large && matches!(result, Err(PlanFailure::Memory { .. })) {
            result = leanest(request, &freedom, costs, layered);
        }
        (name, result)
    };
    baselines.into_par_iter().map(judged).collect()
}

/// Returns the best configuration of a sweep, with the next ones as alternatives.
fn best_of_sweep(request: &Request, costs: &dyn Costs, progress: &dyn Progress) -> Result<Plan, PlanFailure> {
    let mut space = sweep::Space::default();
    if request.target != Target::Megatron {
        space.zero.push(3);
    }
    let swept = sweep::sweep(request, &space, costs, progress)?;
    let mut plans: Vec<Plan> = swept.into_iter().map(|s| s.plan).collect();
    let mut best = plans.remove(0);
    best.alternatives = lost::alternatives(&best, plans);
    Ok(best)
}

/// `1 stage`, `2 stages`.
fn count(n: u32, one: &str, many: &str) -> String {
    format!("{n} {}", if n == 1 { one } else { many })
}

/// Lowers a plan with the default costs of its cluster.
pub fn programs(plan: &Plan) -> Result<Programs, PlanFailure> {
    Ok(lower(plan, &Rooflines::of(&plan.cluster))?)
}

/// Returns the predicted plans that fit, fastest first. Lean layouts are searched only if nothing else fits or memory
/// is cramped.
fn plans_that_fit(
    request: &Request,
    freedom: &Freedom,
    costs: &dyn Costs,
    layered: &(dyn Fn(u32) -> Option<Arc<Layered>> + Sync),
    progress: &dyn Progress,
    mut known: Calibration,
) -> Result<Vec<Plan>, PlanFailure> {
    let searched = search(request, freedom, costs, layered, progress);
    let lean = |known: &mut Calibration| {
        let lean = Freedom { lean: true, ..freedom.clone() };
        let searched = search(request, &lean, costs, layered, progress);
        within_memory(request, &lean, &searched, costs, progress, known)
    };
    if progress.stopped() || !is_cramped(request, freedom, &searched) {
        return match within_memory(request, freedom, &searched, costs, progress, &mut known) {
            Err(PlanFailure::Memory { .. }) => lean(&mut known),
            result => result,
        };
    }
    // Predictions of the lean plans tell which other plans are worth predicting.
    let Ok(mut plans) = lean(&mut known) else {
        return within_memory(request, freedom, &searched, costs, progress, &mut known);
    };
    plans.extend(within_memory(request, freedom, &searched, costs, progress, &mut known).into_iter().flatten());
    plans.sort_by(|a, b| a.predicted.step_time_s.total_cmp(&b.predicted.step_time_s));
    Ok(plans)
}

/// Returns true if the memory limit slows plans down so much, by the search's estimates, that lean layouts may be
/// faster.
fn is_cramped(request: &Request, freedom: &Freedom, searched: &Searched) -> bool {
    const CRAMPED: f64 = 2.0;
    if freedom.all_devices && !freedom.alpa {
        return false;
    }
    let limits = searched.candidates.iter().map(|c| (c.num_microbatches, freedom.memory_bytes.clone())).collect();
    let least_s = |limits: &BTreeMap<u32, Vec<u64>>| {
        let found = searched.ranked(request, freedom, limits).ok();
        found.iter().flatten().map(|f| f.step_s).fold(f64::INFINITY, f64::min)
    };
    let fitting_s = least_s(&limits);
    fitting_s.is_finite() && fitting_s > CRAMPED * least_s(&BTreeMap::new())
}

/// Returns the candidates that are predicted to fit, fastest first. The search only estimates memory. Where the lowered
/// program needs more, the search repeats with a limit that is lower by as much.
fn within_memory(
    request: &Request,
    freedom: &Freedom,
    searched: &Searched,
    costs: &dyn Costs,
    progress: &dyn Progress,
    before: &mut Calibration,
) -> Result<Vec<Plan>, PlanFailure> {
    let devices = &freedom.memory_bytes;
    // Each number of microbatches has its own limits, since the error of the estimate differs.
    let mut limits: BTreeMap<u32, Vec<u64>> =
        searched.candidates.iter().map(|c| (c.num_microbatches, devices.clone())).collect();
    let mut closest: Option<(f64, PlanFailure)> = None;
    let mut short_node: Option<PlanFailure> = None;
    let mut judged = Judged::default();
    for _ in 0..32 {
        let ranked = match variants::asked_for(searched, request, freedom, &limits) {
            Ok(ranked) => ranked,
            Err(failure) if closest.is_none() => return Err(failure),
            Err(_) => break,
        };
        // If the user cancelled, predict only the best candidate.
        let worth = if progress.stopped() { &ranked[..1] } else { &ranked[..] };
        let mut known = before.clone();
        let plans = judged_while_promising(request, worth, costs, &mut known, &mut judged)?;
        let mut fitting: Vec<Plan> = Vec::new();
        // If no candidate was worth predicting, lower limits find nothing better.
        let judged_some = !plans.is_empty();
        let mut tightened = false;
        for plan in plans {
            // Share of a device's memory that its stage needs.
            let part = |s: &Stage| s.predicted.peak_bytes as f64 / devices[s.group as usize] as f64;
            let Some(fullest) = plan.stages.iter().max_by(|a, b| part(a).total_cmp(&part(b))) else { continue };
            if closest.as_ref().is_none_or(|(least, _)| part(fullest) < *least) {
                closest = Some((part(fullest), PlanFailure::of_closest(plan.clone(), lost::shape(&plan))));
            }
            if let Some((required_bytes, limit_bytes)) = offload::short_node(&plan) {
                short_node.get_or_insert(PlanFailure::HostMemory { required_bytes, limit_bytes });
            }
            if !fits(&plan) {
                let limits = limits.entry(plan.num_microbatches).or_insert_with(|| devices.clone());
                for (group, limit) in limits.iter_mut().enumerate() {
                    let of_group = plan.stages.iter().filter(|s| s.group as usize == group);
                    let peak = of_group.map(|s| s.predicted.peak_bytes).max().unwrap_or(0);
                    if peak > devices[group] {
                        tightened = true;
                        *limit = (*limit as f64 * (devices[group] as f64 / peak as f64).min(0.97)) as u64;
                    }
                }
            } else {
                progress.best(plan.predicted.step_time_s, plan.predicted.lower_bound_s);
                fitting.push(plan);
            }
        }
        if !fitting.is_empty() && fitting.iter().all(|p| p.predicted.step_time_s > known.one_of_s) {
            fitting.sort_by(|a, b| a.predicted.step_time_s.total_cmp(&b.predicted.step_time_s));
            return Ok(fitting);
        }
        if !fitting.is_empty() {
            let more = (&mut known, &mut judged);
            fitting.extend(a_little_too_large(request, freedom, searched, &ranked, costs, progress, more)?);
            // Other orders of a pipeline's calls must be faster by more than the prediction error.
            let step_s = |p: &Plan| p.predicted.step_time_s;
            let most_s = fitting.iter().map(step_s).fold(f64::INFINITY, f64::min) * (1.0 - UNDECIDED);
            // Workers that share a machine's cores lose nothing while some of them wait.
            let shared = request.cluster.groups.iter().any(|g| g.device.kind == DeviceKind::Cpu);
            let others = match progress.stopped() || shared {
                true => Vec::new(),
                false => variants::others(searched, freedom, &ranked, &limits),
            };
            let others = judged_while_promising(request, &others, costs, &mut known, &mut judged)?;
            fitting.extend(others.into_iter().filter(|p| fits(p) && step_s(p) < most_s));
            fitting.sort_by(|a, b| step_s(a).total_cmp(&step_s(b)));
            *before = known;
            return Ok(fitting);
        }
        if !judged_some {
            return Ok(fitting);
        }
        // Lower limits for devices do not help a node that is short of host memory.
        if !tightened {
            break;
        }
    }
    let fits_devices = closest.as_ref().is_some_and(|(part, _)| *part <= 1.0);
    match short_node.filter(|_| fits_devices) {
        Some(failure) => Err(failure),
        None => Err(closest.map_or(PlanFailure::NoCombination, |(_, failure)| failure)),
    }
}

/// Factors by which an estimate of memory may exceed the limit although the plan fits.
const OVERESTIMATED: [f64; 2] = [1.04, 1.15];

/// Predicts plans that the search would choose if devices had slightly more memory, and returns those that fit after
/// all. `known` are predicted already.
fn a_little_too_large<'a>(
    request: &Request,
    freedom: &Freedom,
    searched: &'a Searched,
    known: &[Found<'a>],
    costs: &dyn Costs,
    progress: &dyn Progress,
    (calibration, judged): (&mut Calibration, &mut Judged<'a>),
) -> Result<Vec<Plan>, PlanFailure> {
    const JUDGED: usize = 2;
    if progress.stopped() {
        return Ok(Vec::new());
    }
    let mut new: Vec<Found<'_>> = Vec::new();
    // Each prediction of a very large model is a good part of the search's time.
    let factors = if searched.judged_at_most(4) < 4 { &OVERESTIMATED[..1] } else { &OVERESTIMATED[..] };
    for factor in factors {
        let limit: Vec<u64> = freedom.memory_bytes.iter().map(|&bytes| (bytes as f64 * factor) as u64).collect();
        let limits = searched.candidates.iter().map(|c| (c.num_microbatches, limit.clone())).collect();
        let Ok(ranked) = variants::asked_for(searched, request, freedom, &limits) else { continue };
        let unknown = |f: &&Found<'_>| !known.iter().chain(&new).any(|k| k.is(f));
        let mut more: Vec<_> = ranked.iter().filter(unknown).cloned().collect();
        more.sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
        new.extend(more.into_iter().take(searched.judged_at_most(JUDGED)));
    }
    let plans = judged_while_promising(request, &new, costs, calibration, judged)?;
    Ok(plans.into_iter().filter(fits).collect())
}

/// Relation between predicted and estimated step times.
#[derive(Clone)]
struct Calibration {
    /// Candidates estimated to take longer are not predicted.
    far_s: f64,
    /// Only one of the candidates estimated to take longer is predicted.
    one_of_s: f64,
    /// Predicted step time of the fastest plan that fits.
    best_s: f64,
    /// Least ratio of predicted to estimated step time so far.
    ratio: f64,
}

impl Default for Calibration {
    fn default() -> Self {
        Calibration { far_s: f64::INFINITY, one_of_s: f64::INFINITY, best_s: f64::INFINITY, ratio: f64::INFINITY }
    }
}

impl Calibration {
    /// Returns true if the candidate may be as fast as the best plan, given how far estimates have been off.
    fn promises(&self, found: &Found<'_>) -> bool {
        // Estimates do not include the gain of the zero-bubble schedule.
        let estimated_s = if found.schedule == Schedule::ZbH1 { 0.0 } else { found.step_s };
        let near = !self.ratio.is_finite() || estimated_s * self.ratio <= self.best_s * (1.0 + UNDECIDED);
        near && estimated_s <= self.far_s
    }
}

/// Candidates that were predicted not to fit. The search may find them again under lower or higher limits.
#[derive(Default)]
struct Judged<'a>(Vec<(Found<'a>, Plan)>);

impl Judged<'_> {
    fn known(&self, found: &Found<'_>) -> Option<Plan> {
        self.0.iter().find(|(known, _)| known.is(found)).map(|(_, plan)| plan.clone())
    }
}

/// Predicts candidates a few at a time, the most promising first. Skips those that cannot be the best, given how far
/// estimates have been off.
fn judged_while_promising<'a>(
    request: &Request,
    found: &[Found<'a>],
    costs: &dyn Costs,
    known: &mut Calibration,
    before: &mut Judged<'a>,
) -> Result<Vec<Plan>, PlanFailure> {
    const AT_A_TIME: usize = 4;
    let mut order: Vec<&Found<'a>> = found.iter().collect();
    order.sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
    let mut plans = Vec::new();
    while !order.is_empty() {
        order.retain(|f| known.promises(f));
        if order.first().is_some_and(|f| f.step_s > known.one_of_s) {
            order.truncate(usize::from(plans.is_empty()));
        }
        let some: Vec<&Found<'a>> = order.drain(..order.len().min(AT_A_TIME)).collect();
        let judge = |found: &&Found<'a>| before.known(found).map_or_else(|| judged(request, found, costs), Ok);
        let new: Vec<Plan> = some.par_iter().map(judge).collect::<Result<_, PlanFailure>>()?;
        for (found, plan) in some.into_iter().zip(new) {
            let step_s = plan.predicted.step_time_s;
            known.ratio = known.ratio.min(step_s / found.step_s.max(f64::MIN_POSITIVE));
            if fits(&plan) {
                known.best_s = known.best_s.min(step_s);
            } else if before.known(found).is_none() {
                before.0.push((found.clone(), plan.clone()));
            }
            plans.push(plan);
        }
    }
    Ok(plans)
}

/// Assembles, lowers and predicts a candidate.
fn judged(request: &Request, found: &Found<'_>, costs: &dyn Costs) -> Result<Plan, PlanFailure> {
    let parts = assemble::Parts {
        layered: &found.candidates.layered,
        num_microbatches: found.candidates.num_microbatches,
        schedule: found.schedule,
        virtual_stages: found.virtual_stages,
        stages: &found.stages,
    };
    let plan = assemble::assemble(request, &parts, costs)?;
    predicted(plan, parts.layered, costs, request.cache.as_deref())
}

/// Predicts a plan again with the given costs.
pub fn judged_again(plan: Plan, costs: &dyn Costs) -> Result<Plan, PlanFailure> {
    let derived = Derived::of(&plan)?;
    Ok(judged_as(plan, &derived, costs))
}

/// Like [`judged_again`], for a model that is already cut into layers. Uses a cached prediction if there is one.
fn predicted(mut plan: Plan, layered: &Layered, costs: &dyn Costs, cache: Option<&Cache>) -> Result<Plan, PlanFailure> {
    // Cached predictions do not include servers.
    let cache = cache.filter(|_| plan.servers.is_none());
    let kept = cache.and_then(|cache| Some((cache, cache::of_plan(&plan, costs)?)));
    if let Some((whole, stages)) = kept.and_then(|(cache, key)| cache.get::<(Predicted, Vec<StagePredicted>)>(key)) {
        plan.predicted = whole;
        plan.stages.iter_mut().zip(stages).for_each(|(stage, predicted)| stage.predicted = predicted);
        return Ok(plan);
    }
    let derived = layered.derived(plan.execution)?;
    let plan = judged_as(plan, derived, costs);
    if let Some((cache, key)) = kept {
        let stages: Vec<&StagePredicted> = plan.stages.iter().map(|stage| &stage.predicted).collect();
        cache.keep(key, &(&plan.predicted, stages));
    }
    Ok(plan)
}

/// Fills in a plan's predictions, for a model whose derivative is known.
fn judged_as(mut plan: Plan, derived: &Derived, costs: &dyn Costs) -> Plan {
    // The programs must follow from the plan alone, not from the costs by which it was chosen.
    let prices = Rooflines::of(&plan.cluster);
    // Workers on one machine slow each other down, so predicting them takes the programs of all.
    let alone = costs.runtime().is_none();
    let sketch = lower::sketch(&plan, derived, &prices, alone);
    predict::predict(&mut plan, &sketch, costs);
    debug_assert!(plan.verify().is_empty(), "{:?}", plan.verify());
    plan
}

/// Relative difference of predictions below which no plan is preferred. On published step times, the errors of similar
/// plans differ by about as much (benches/results/fidelity.md).
pub const UNDECIDED: f64 = 0.02;

/// Index of the plan to choose: among plans as fast as the fastest within the prediction error, those on the fewest
/// devices, and of these the one with the least memory. Among plans with about the same memory, the fastest wins.
fn leanest_of_the_fastest<T>(all: &[T], plan: impl Fn(&T) -> &Plan) -> usize {
    let step_s = |i: &usize| plan(&all[*i]).predicted.step_time_s;
    let mut order: Vec<usize> = (0..all.len()).collect();
    order.sort_by(|a, b| step_s(a).total_cmp(&step_s(b)));
    let most_s = order.first().map_or(0.0, step_s) * (1.0 + UNDECIDED);
    order.retain(|i| step_s(i) <= most_s);
    let fewest = order.iter().map(|&i| plan(&all[i]).num_devices()).min();
    order.retain(|&i| Some(plan(&all[i]).num_devices()) == fewest);
    let least = order.iter().map(|&i| peak_bytes(plan(&all[i]))).min().unwrap_or(0);
    let about = least.saturating_add(least / 50);
    order.into_iter().find(|&i| peak_bytes(plan(&all[i])) <= about).unwrap_or(0)
}

/// Takes the plan that [`leanest_of_the_fastest`] picks. `plans` must not be empty.
fn chosen_of(mut plans: Vec<Plan>) -> Plan {
    let at = leanest_of_the_fastest(&plans, |plan| plan);
    plans.swap_remove(at)
}

/// Peak bytes of the fullest device.
fn peak_bytes(plan: &Plan) -> u64 {
    plan.predicted.peak_bytes.iter().copied().max().unwrap_or(0)
}

/// Returns true if every device has the memory that its stage is predicted to need, and every node the host memory for
/// offloaded state.
pub fn fits(plan: &Plan) -> bool {
    let of_servers = plan.servers.iter().flat_map(|over| &over.predicted);
    plan.stages.iter().all(|s| s.predicted.peak_bytes <= plan.usable_bytes(s))
        && of_servers.into_iter().all(|s| s.peak_bytes <= plan.cluster.usable_bytes(&plan.cluster.groups[0]))
        && offload::short_node(plan).is_none()
}
