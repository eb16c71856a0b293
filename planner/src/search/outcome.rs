//! The search of one graph with one set of costs.

use super::baselines::{self, Baseline};
use super::choice::{UNDECIDED, choose, finalists, fits};
use super::context::SearchContext;
use super::fitting::plans_that_fit;
use super::ordered;
use super::predictor::Calibration;
use super::sweep;
use super::uniform;
use crate::layers::graph::LayeredGraph;
use crate::predict::predict_with;
use crate::refine::refine;
use crate::request::{PlanFailure, Request};
use altiplano_ir::cluster::DeviceKind;
use altiplano_ir::plan::{Alternative, Plan, Schedule, Target};
use rayon::prelude::*;

/// A plan and the alternatives to it.
pub struct Outcome {
    pub plan: Result<Plan, PlanFailure>,
    /// One line for each plain baseline.
    pub baselines: Vec<Alternative>,
    /// Other plans that the search found.
    pub others: Vec<Plan>,
}

impl Outcome {
    /// The predicted step time; infinite without a plan.
    pub fn step_s(&self) -> f64 {
        self.plan.as_ref().map_or(f64::INFINITY, |plan| plan.predicted.step_time_s)
    }

    /// The best of several outcomes of the same request, with the better line for each baseline. If all fail, the
    /// failure that is nearest to fitting.
    pub fn best(outcomes: Vec<Outcome>) -> Outcome {
        let (mut plans, mut failures) = (Vec::new(), Vec::new());
        let (mut baselines, mut others): (Vec<Alternative>, Vec<Plan>) = (Vec::new(), Vec::new());
        let rank = |a: &Alternative| (!a.fits, a.predicted.as_ref().map_or(f64::INFINITY, |p| p.step_time_s));
        for outcome in outcomes {
            match outcome.plan {
                Ok(plan) => plans.push(plan),
                Err(why) => failures.push(why),
            }
            others.extend(outcome.others);
            if baselines.is_empty() {
                baselines = outcome.baselines;
                continue;
            }
            for (line, other) in baselines.iter_mut().zip(outcome.baselines) {
                if rank(&other) < rank(line) {
                    *line = other;
                }
            }
        }
        // The chosen plan stays in the list: `alternatives::attach` leaves out plans that look like it.
        others.extend(plans.iter().cloned());
        let plan = match plans.is_empty() {
            true => Err(failures.into_iter().reduce(PlanFailure::nearer).unwrap_or(PlanFailure::NoCombination)),
            false => Ok(choose(plans)),
        };
        Outcome { plan, baselines, others }
    }
}

/// Finds the fastest plan that fits, baselines included. The stages of the best few plans are solved again as a whole.
pub fn search_graph(cx: &SearchContext<'_>) -> Outcome {
    let (mut plans, failure) = match plans_that_fit(cx, Calibration::default()) {
        Ok(plans) => (plans, None),
        Err(PlanFailure::NoCombination) if !cx.request.graph.pins.is_empty() => {
            let pins = cx.request.graph.pins.iter().map(ToString::to_string).collect();
            (Vec::new(), Some(PlanFailure::Pins { pins }))
        }
        Err(failure) => (Vec::new(), Some(failure)),
    };
    let best_s = plans.first().map(|plan| plan.predicted.step_time_s);
    // A baseline of a large model is one stage, which is lowered on one thread. Other ways to run the best plan need no
    // baseline, so both are predicted at once.
    let others = || variants_of_best(cx, std::mem::take(&mut plans));
    let ((mut plans, other_layout), baselines) = rayon::join(others, || baselines::predict_all(cx, best_s));
    plans.retain(|plan| cx.request.stages.allow(plan));
    let lines = baselines.iter().map(|baseline| baseline.line(cx)).collect();
    let candidates: Vec<Plan> = baselines.into_iter().filter_map(|b: Baseline| b.candidate(cx)).collect();
    let (mut finalists, others) = finalists(candidates, plans, cx.request.graph.len());
    // Beside the others and not in place of one, since solving stages again may gain less on it.
    finalists.extend(other_layout);
    let refined: Result<Vec<Plan>, PlanFailure> =
        finalists.into_par_iter().map(|plan| refine_finalist(cx, plan)).collect();
    let plan = refined.and_then(|refined| match refined.is_empty() {
        true => Err(failure.unwrap_or(PlanFailure::NoCombination)),
        false => Ok(match ordered::fastest(cx, &refined) {
            Some(found) => found,
            None => choose(refined),
        }),
    });
    if let Ok(plan) = plan.as_ref().map_err(|_| ())
        && fits(plan)
    {
        cx.progress.best(plan.predicted.step_time_s, plan.predicted.lower_bound_s);
    }
    Outcome { plan, baselines: lines, others }
}

/// Adds uniform plans and the best plan without its bubble to `plans`, and sorts them by predicted step time. Returns them
/// and the best plan with other layouts of its layers.
fn variants_of_best(cx: &SearchContext<'_>, mut plans: Vec<Plan>) -> (Vec<Plan>, Option<Plan>) {
    let by_step = |a: &Plan, b: &Plan| a.predicted.step_time_s.total_cmp(&b.predicted.step_time_s);
    let uniform = plans.first().map_or(Vec::new(), |found| uniform_plans(cx, found));
    plans.extend(uniform);
    plans.sort_by(by_step);
    let other_layout = plans.first().and_then(|best| laid_out(cx, best));
    plans.extend(plans.first().and_then(|best| without_bubble(cx, best)));
    plans.sort_by(by_step);
    (plans, other_layout)
}

/// Solves the stages of a plan again, unless the user cancelled or Alpa's space is searched.
fn refine_finalist(cx: &SearchContext<'_>, plan: Plan) -> Result<Plan, PlanFailure> {
    if cx.progress.stopped() || cx.space.alpa {
        return Ok(plan);
    }
    match cx.layered.at(plan.num_microbatches).filter(|layered| layered.starts == plan.layers) {
        Some(layered) => refine(cx, &layered, plan),
        None => refine(cx, &LayeredGraph::of_plan(&plan), plan),
    }
}

/// True if devices are workers that share the cores of a machine.
fn has_workers(cx: &SearchContext<'_>) -> bool {
    cx.request.cluster.groups.iter().any(|group| group.device.kind == DeviceKind::Cpu)
}

/// Uniform plans as users write them by hand, if they are faster than `found`.
fn uniform_plans(cx: &SearchContext<'_>, found: &Plan) -> Vec<Plan> {
    let request = cx.request;
    // The sweep honours neither pins nor a given schedule, and covers only training on GPUs.
    let given = !request.stages.is_empty() || cx.space.only_group.is_some();
    let asked = !request.graph.pins.is_empty() || request.schedule.is_some() || given;
    let other = cx.space.alpa || request.target != Target::Altiplano || !request.trains() || has_workers(cx);
    if asked || other || cx.progress.stopped() {
        return Vec::new();
    }
    // Skip plans that are as fast as `found` within the prediction error.
    let most_s = found.predicted.step_time_s / (1.0 + UNDECIDED);
    let mut plans = sweep::climb(request, found, cx.costs, cx.progress);
    plans.retain(|plan| plan.predicted.step_time_s < most_s);
    plans
}

/// The best plan with its layers dealt out to stages in another way, if that is faster. Errors of predictions cancel
/// between plans with the same degrees.
fn laid_out(cx: &SearchContext<'_>, best: &Plan) -> Option<Plan> {
    let request = cx.request;
    let given = !request.stages.is_empty() || cx.space.only_group.is_some();
    let asked = !request.graph.pins.is_empty() || request.degrees.ep.is_some() || given;
    let other = cx.space.alpa || request.target != Target::Altiplano || !request.trains() || has_workers(cx);
    let several = request.cluster.groups.len() > 1;
    if asked || other || several || cx.progress.stopped() || !fits(best) {
        return None;
    }
    let request = Request { schedule: Some(best.schedule), ..request.clone() };
    let step_s = |plan: &Plan| plan.predicted.step_time_s;
    let fastest =
        uniform::laid_out(&request, best, cx.costs).into_iter().min_by(|a, b| step_s(a).total_cmp(&step_s(b)));
    fastest.filter(|plan| step_s(plan) < step_s(best))
}

/// Returns the pipeline under the zero-bubble schedule, if the schedule is free and the gain exceeds the prediction
/// error.
fn without_bubble(cx: &SearchContext<'_>, plan: &Plan) -> Option<Plan> {
    let plain = (plan.schedule, plan.virtual_stages) == (Schedule::OneFOneB, 1) && plan.stages.len() > 1;
    if !cx.space.zero_bubble || has_workers(cx) || !plain {
        return None;
    }
    let layered = cx.layered.at(plan.num_microbatches)?;
    let variant = Plan { schedule: Schedule::ZbH1, ..plan.clone() };
    let variant = predict_with(variant, &layered, cx.costs, cx.request.cache.as_deref()).ok()?;
    let most_s = plan.predicted.step_time_s / (1.0 + UNDECIDED);
    (fits(&variant) && variant.predicted.step_time_s < most_s).then_some(variant)
}
