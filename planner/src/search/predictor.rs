//! Predicts candidates of the search, those first that promise most.
//!
//! The search estimates step times; a prediction lowers the plan and plays its programs. Predictions tell how far
//! estimates have been off, and so which of the other candidates can still be the best.

use super::choice::{UNDECIDED, fits};
use super::context::SearchContext;
use crate::assemble::{Parts, assemble};
use crate::inter_op::search::PipelineCandidate;
use crate::predict::predict_with;
use crate::request::PlanFailure;
use altiplano_ir::plan::{Plan, Schedule};
use rayon::prelude::*;

/// Candidates that are predicted at once.
const AT_A_TIME: usize = 4;

/// The relation between predicted and estimated step times.
#[derive(Clone)]
pub struct Calibration {
    /// Candidates estimated to take longer are not predicted.
    far_s: f64,
    /// Only one of the candidates estimated to take longer is predicted.
    pub one_of_s: f64,
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
    /// Candidates estimated to take longer than `far_s` are not predicted.
    pub fn up_to(far_s: f64) -> Self {
        Calibration { far_s, ..Calibration::default() }
    }

    /// Only one of the candidates estimated to take longer than `one_of_s` is predicted.
    pub fn one_beyond(one_of_s: f64) -> Self {
        Calibration { one_of_s, ..Calibration::default() }
    }

    /// True if the candidate may be as fast as the best plan, given how far estimates have been off.
    fn promises(&self, candidate: &PipelineCandidate<'_>) -> bool {
        // Estimates do not include the gain of the zero-bubble schedule.
        let estimated_s = if candidate.schedule == Schedule::ZbH1 { 0.0 } else { candidate.step_s };
        let near = !self.ratio.is_finite() || estimated_s * self.ratio <= self.best_s * (1.0 + UNDECIDED);
        near && estimated_s <= self.far_s
    }
}

/// Predicts candidates of one search, and remembers them: the search may find them again under lower or higher limits.
pub struct Predictor<'c, 'a> {
    cx: &'c SearchContext<'c>,
    pub calibration: Calibration,
    predicted: Vec<(PipelineCandidate<'a>, Plan)>,
}

impl<'c, 'a> Predictor<'c, 'a> {
    pub fn new(cx: &'c SearchContext<'c>, calibration: Calibration) -> Self {
        Predictor { cx, calibration, predicted: Vec::new() }
    }

    /// Predicts candidates a few at a time, the most promising first. Skips those that cannot be the best.
    pub fn predict_promising(&mut self, candidates: &[PipelineCandidate<'a>]) -> Result<Vec<Plan>, PlanFailure> {
        let mut order: Vec<&PipelineCandidate<'a>> = candidates.iter().collect();
        order.sort_by(|a, b| a.step_s.total_cmp(&b.step_s));
        let mut plans = Vec::new();
        while !order.is_empty() {
            order.retain(|candidate| self.calibration.promises(candidate));
            if order.first().is_some_and(|candidate| candidate.step_s > self.calibration.one_of_s) {
                order.truncate(usize::from(plans.is_empty()));
            }
            let some: Vec<&PipelineCandidate<'a>> = order.drain(..order.len().min(AT_A_TIME)).collect();
            let predict = |candidate: &&PipelineCandidate<'a>| {
                self.known(candidate).map_or_else(|| predict_candidate(self.cx, candidate), Ok)
            };
            let new: Vec<Plan> = some.par_iter().map(predict).collect::<Result<_, PlanFailure>>()?;
            for (candidate, plan) in some.into_iter().zip(new) {
                self.learn(candidate, &plan);
                plans.push(plan);
            }
        }
        Ok(plans)
    }

    fn learn(&mut self, candidate: &PipelineCandidate<'a>, plan: &Plan) {
        let step_s = plan.predicted.step_time_s;
        let ratio = step_s / candidate.step_s.max(f64::MIN_POSITIVE);
        self.calibration.ratio = self.calibration.ratio.min(ratio);
        if fits(plan) {
            self.calibration.best_s = self.calibration.best_s.min(step_s);
        }
        if self.known(candidate).is_none() {
            self.predicted.push((candidate.clone(), plan.clone()));
        }
    }

    fn known(&self, candidate: &PipelineCandidate<'_>) -> Option<Plan> {
        self.predicted.iter().find(|(known, _)| known.is(candidate)).map(|(_, plan)| plan.clone())
    }
}

/// Assembles, lowers and predicts a candidate.
pub fn predict_candidate(cx: &SearchContext<'_>, candidate: &PipelineCandidate<'_>) -> Result<Plan, PlanFailure> {
    let parts = Parts {
        layered: &candidate.candidates.layered,
        num_microbatches: candidate.candidates.num_microbatches,
        schedule: candidate.schedule,
        virtual_stages: candidate.virtual_stages,
        placement: candidate.schedule.placement(),
        stages: &candidate.stages,
    };
    let plan = assemble(cx.request, &parts, cx.costs)?;
    predict_with(plan, parts.layered, cx.costs, cx.request.cache.as_deref())
}
