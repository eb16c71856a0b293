//! Finds plans that fit the devices' memory by prediction.
//!
//! The search only estimates memory. Where the lowered program needs more, the search repeats with a limit that is
//! lower by as much. Where it needs less, plans that seemed a little too large are predicted as well.

use super::choice::{UNDECIDED, fits};
use super::context::SearchContext;
use super::memory_bound;
use super::predictor::{Calibration, Predictor};
use super::space::SearchSpace;
use crate::explain::alternatives;
use crate::features::offload;
use crate::inter_op::search::{PipelineCandidate, SearchResult, search};
use crate::inter_op::variants;
use crate::request::PlanFailure;
use altiplano_ir::cluster::DeviceKind;
use altiplano_ir::plan::{Offload, Plan, Stage};
use std::collections::BTreeMap;

/// Repetitions of a search with lower limits.
const TRIES: usize = 32;
/// Repetitions after a plan fits, for numbers of microbatches at which a faster one does not.
const MORE_TRIES: usize = 3;

/// Memory of a device that stages may use, by group, for each number of microbatches. The error of the estimate differs
/// between numbers of microbatches.
type Limits = BTreeMap<u32, Vec<u64>>;

/// Returns the predicted plans that fit, fastest first. Lean layouts are searched only if nothing else fits or memory
/// is cramped.
pub fn plans_that_fit(cx: &SearchContext<'_>, mut calibration: Calibration) -> Result<Vec<Plan>, PlanFailure> {
    if let Some(failure) = memory_bound::failure(cx.request, cx.request.offload.unwrap_or(Offload::NONE)) {
        return Err(failure);
    }
    let found = search(cx);
    let lean = |calibration: &mut Calibration| {
        let lean = SearchSpace { lean: true, ..cx.space.clone() };
        let cx = cx.within(&lean);
        within_memory(&cx, &search(&cx), calibration)
    };
    if cx.progress.stopped() || !is_cramped(cx, &found) {
        return match within_memory(cx, &found, &mut calibration) {
            Err(PlanFailure::Memory { .. }) => lean(&mut calibration),
            result => result,
        };
    }
    // Predictions of the lean plans tell which other plans are worth predicting.
    let Ok(mut plans) = lean(&mut calibration) else {
        return within_memory(cx, &found, &mut calibration);
    };
    plans.extend(within_memory(cx, &found, &mut calibration).into_iter().flatten());
    plans.sort_by(|a, b| a.predicted.step_time_s.total_cmp(&b.predicted.step_time_s));
    Ok(plans)
}

/// True if the memory limit slows plans down so much, by the search's estimates, that lean layouts may be faster.
fn is_cramped(cx: &SearchContext<'_>, found: &SearchResult) -> bool {
    const CRAMPED: f64 = 2.0;
    if cx.space.all_devices && !cx.space.alpa {
        return false;
    }
    let least_s = |limits: &Limits| {
        let ranked = found.ranked(cx, limits).ok();
        ranked.iter().flatten().map(|candidate| candidate.step_s).fold(f64::INFINITY, f64::min)
    };
    let fitting_s = least_s(&same_limits(found, &cx.space.memory_bytes));
    fitting_s.is_finite() && fitting_s > CRAMPED * least_s(&Limits::new())
}

fn same_limits(found: &SearchResult, memory_bytes: &[u64]) -> Limits {
    found.candidates.iter().map(|c| (c.num_microbatches, memory_bytes.to_vec())).collect()
}

/// Returns the candidates that are predicted to fit, fastest first, and what was learned of estimates.
fn within_memory(
    cx: &SearchContext<'_>,
    found: &SearchResult,
    calibration: &mut Calibration,
) -> Result<Vec<Plan>, PlanFailure> {
    let mut limits = same_limits(found, &cx.space.memory_bytes);
    let mut obstacle = Obstacle::default();
    let mut predictor = Predictor::new(cx, calibration.clone());
    let mut fitting: Vec<Plan> = Vec::new();
    let (mut ranked, mut fit_at) = (Vec::new(), None);
    for tries in 0..TRIES {
        let found_here = match variants::asked_for(cx, found, &limits) {
            Ok(ranked) => ranked,
            Err(failure) if obstacle.closest.is_none() => return Err(failure),
            Err(_) => break,
        };
        // If the user cancelled, predict only the best candidate.
        let worth = if cx.progress.stopped() { &found_here[..1] } else { &found_here[..] };
        predictor.calibration = calibration.clone();
        let plans = predictor.predict_promising(worth)?;
        // If no candidate was worth predicting, lower limits find nothing better.
        if plans.is_empty() && fitting.is_empty() {
            return Ok(plans);
        }
        ranked = found_here;
        plans.iter().for_each(|plan| obstacle.meet(cx, plan));
        let (fit, too_large): (Vec<Plan>, Vec<Plan>) = plans.into_iter().partition(fits);
        fit.iter().for_each(|plan| cx.progress.best(plan.predicted.step_time_s, plan.predicted.lower_bound_s));
        fitting.extend(fit.into_iter().filter(|plan| !fitting.contains(plan)).collect::<Vec<_>>());
        // A plan that exceeds memory is left alone if it is no faster than one that fits.
        let best_s = fitting.iter().map(|plan| plan.predicted.step_time_s).fold(f64::INFINITY, f64::min);
        let promising = too_large.iter().filter(|plan| plan.predicted.step_time_s < best_s);
        let tightened: Vec<bool> = promising.map(|plan| tighten(cx, plan, &mut limits)).collect();
        if !fitting.is_empty() && fit_at.is_none() {
            fit_at = Some(tries);
        }
        let enough = fit_at.is_some_and(|at| tries >= at + MORE_TRIES) || cx.progress.stopped();
        // Lower limits for devices do not help a node that is short of host memory.
        if !tightened.contains(&true) || enough && !fitting.is_empty() {
            break;
        }
    }
    if fitting.is_empty() {
        return Err(obstacle.failure());
    }
    let one_of_s = predictor.calibration.one_of_s;
    if fitting.iter().all(|plan| plan.predicted.step_time_s > one_of_s) {
        return Ok(fastest_first(fitting));
    }
    let plans = with_others(cx, found, &ranked, &limits, fitting, &mut predictor)?;
    *calibration = predictor.calibration;
    Ok(plans)
}

fn fastest_first(mut plans: Vec<Plan>) -> Vec<Plan> {
    plans.sort_by(|a, b| a.predicted.step_time_s.total_cmp(&b.predicted.step_time_s));
    plans
}

/// Lowers the limits of a plan's groups by as much as its predicted memory exceeds that of a device. True if any is
/// lower then.
fn tighten(cx: &SearchContext<'_>, plan: &Plan, limits: &mut Limits) -> bool {
    let devices = &cx.space.memory_bytes;
    let mut tightened = false;
    let limits = limits.entry(plan.num_microbatches).or_insert_with(|| devices.clone());
    for (group, limit) in limits.iter_mut().enumerate() {
        let of_group = plan.stages.iter().filter(|s| s.group as usize == group);
        let peak = of_group.map(|s| s.predicted.peak_bytes).max().unwrap_or(0);
        if peak > devices[group] {
            tightened = true;
            *limit = (*limit as f64 * (devices[group] as f64 / peak as f64).min(0.97)) as u64;
        }
    }
    tightened
}

/// The obstacle that keeps plans from fitting.
#[derive(Default)]
struct Obstacle {
    /// The failure of the plan closest to fitting, and the share of its fullest device that it needs.
    closest: Option<(f64, PlanFailure)>,
    short_node: Option<PlanFailure>,
}

impl Obstacle {
    fn meet(&mut self, cx: &SearchContext<'_>, plan: &Plan) {
        let part = |s: &Stage| s.predicted.peak_bytes as f64 / cx.space.memory_bytes[s.group as usize] as f64;
        let Some(part) = plan.stages.iter().map(part).max_by(f64::total_cmp) else { return };
        if self.closest.as_ref().is_none_or(|(least, _)| part < *least) {
            self.closest = Some((part, PlanFailure::of_closest(plan.clone(), alternatives::shape(plan))));
        }
        if let Some((required_bytes, limit_bytes)) = offload::short_node(plan) {
            self.short_node.get_or_insert(PlanFailure::HostMemory { required_bytes, limit_bytes });
        }
    }

    fn failure(self) -> PlanFailure {
        let fits_devices = self.closest.as_ref().is_some_and(|(part, _)| *part <= 1.0);
        match self.short_node.filter(|_| fits_devices) {
            Some(failure) => failure,
            None => self.closest.map_or(PlanFailure::NoCombination, |(_, failure)| failure),
        }
    }
}

/// The `fitting` plans, with those that need less memory than estimated, and pipelines with another order of calls.
fn with_others<'a>(
    cx: &SearchContext<'_>,
    found: &'a SearchResult,
    ranked: &[PipelineCandidate<'a>],
    limits: &Limits,
    mut fitting: Vec<Plan>,
    predictor: &mut Predictor<'_, 'a>,
) -> Result<Vec<Plan>, PlanFailure> {
    fitting.extend(a_little_too_large(cx, found, ranked, predictor)?);
    // Other orders of a pipeline's calls must be faster by more than the prediction error.
    let step_s = |plan: &Plan| plan.predicted.step_time_s;
    let most_s = fitting.iter().map(step_s).fold(f64::INFINITY, f64::min) * (1.0 - UNDECIDED);
    // Workers that share a machine's cores lose nothing while some of them wait.
    let shared = cx.request.cluster.groups.iter().any(|g| g.device.kind == DeviceKind::Cpu);
    // Limits may be lower because plain pipelines need more than estimated, which says little of others. Within lower limits
    // there are only slower ones, unless those that were tried first do not fit.
    let larger =
        cx.space.memory_bytes.iter().map(|&bytes| (bytes as f64 * OVERESTIMATED[1]) as u64).collect::<Vec<_>>();
    let mut tried: Vec<PipelineCandidate<'a>> = Vec::new();
    for limits in [&same_limits(found, &larger), limits] {
        if cx.progress.stopped() || shared {
            break;
        }
        let mut others = variants::others(cx, found, ranked, limits);
        others.retain(|other| !tried.iter().any(|known| known.is(other)));
        let predicted = predictor.predict_promising(&others)?;
        tried.extend(others);
        let (roomy, too_large): (Vec<Plan>, Vec<Plan>) = predicted.into_iter().partition(fits);
        let before = fitting.len();
        fitting.extend(roomy.into_iter().filter(|plan| step_s(plan) < most_s));
        if fitting.len() > before || too_large.is_empty() {
            break;
        }
    }
    Ok(fastest_first(fitting))
}

/// Factors by which an estimate of memory may exceed the limit although the plan fits.
const OVERESTIMATED: [f64; 2] = [1.04, 1.15];

/// Predicts plans that the search would choose if devices had slightly more memory, and returns those that fit after
/// all. The `ranked` ones are predicted already.
fn a_little_too_large<'a>(
    cx: &SearchContext<'_>,
    found: &'a SearchResult,
    ranked: &[PipelineCandidate<'a>],
    predictor: &mut Predictor<'_, 'a>,
) -> Result<Vec<Plan>, PlanFailure> {
    const MOST_OF_A_LIMIT: usize = 2;
    if cx.progress.stopped() {
        return Ok(Vec::new());
    }
    let mut new: Vec<PipelineCandidate<'_>> = Vec::new();
    // Each prediction of a very large model is a good part of the search's time.
    let factors = if found.predicted_at_most(4) < 4 { &OVERESTIMATED[..1] } else { &OVERESTIMATED[..] };
    for factor in factors {
        let limit: Vec<u64> = cx.space.memory_bytes.iter().map(|&bytes| (bytes as f64 * factor) as u64).collect();
        let Ok(larger) = variants::asked_for(cx, found, &same_limits(found, &limit)) else { continue };
        let unknown = |c: &&PipelineCandidate<'_>| !ranked.iter().chain(&new).any(|known| known.is(c));
        let mut more: Vec<_> = larger.iter().filter(unknown).cloned().collect();
        more.sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
        new.extend(more.into_iter().take(found.predicted_at_most(MOST_OF_A_LIMIT)));
    }
    let plans = predictor.predict_promising(&new)?;
    Ok(plans.into_iter().filter(fits).collect())
}
