//! Steps that uniform configurations are expected to take, so that only promising ones are predicted.
//!
//! A configuration is expected to take its estimate, times the ratio of prediction and estimate of the most similar one
//! that has been predicted. One that surely does not fit, or that is sure to be slower than another, is left out.

use super::choice::{fits, peak_bytes};
use super::estimate::Estimate;
use super::fixed_degrees::Degrees;
use super::sweep::{Configurations, Swept, devices, distance};
use crate::request::{PlanFailure, Progress};
use altiplano_cost_models::Costs;
use altiplano_ir::plan::Plan;
use rayon::prelude::*;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};

/// Configurations that are expected to be slower than the best by more than this factor are not predicted. Expectations
/// by a similar configuration are within a tenth of predictions for 96 of 100 configurations of dense models.
const MARGIN: f64 = 1.2;

/// The same as long as predictions are cheap. Expectations are worst for small models, whose kernels mostly wait.
const WIDE_MARGIN: f64 = 1.6;
/// Total graph nodes of all configurations that are predicted within the wide margin.
const CHEAP_NODES: usize = 40_000;
/// The margin beside a known configuration on the same devices. Overlaps that are tried later may gain a tenth.
const BESIDE: f64 = 1.15;
/// The margin of a climb, which compares configurations that differ in one thing.
const NEAR: f64 = 1.1;

/// A configuration that exceeds a device's memory by this factor does so for more than its temporaries.
const TOO_LARGE: f64 = 1.05;

/// The part of the least known ratio of needed to surely held bytes that other configurations have as well.
const SURE: f64 = 0.9;

/// Estimates of configurations, and the predictions of some.
pub(super) struct Expectations<'a> {
    configurations: &'a Configurations<'a>,
    costs: &'a dyn Costs,
    usable_bytes: u64,
    /// Bytes count as well as seconds: whatever may be faster or leaner than all that is known is predicted.
    for_bytes: bool,
    estimates: FxHashMap<Degrees, Option<Estimate>>,
    predicted: Vec<Predicted>,
}

/// The outcome of a prediction.
#[derive(Clone, Copy)]
struct Predicted {
    degrees: Degrees,
    estimate: Option<Estimate>,
    step_s: f64,
    peak_bytes: u64,
    fits: bool,
    /// It exceeds the memory of a device by so much that temporaries do not explain it.
    is_too_large: bool,
}

impl<'a> Expectations<'a> {
    pub fn new(configurations: &'a Configurations<'a>, for_bytes: bool, costs: &'a dyn Costs) -> Self {
        let cluster = &configurations.request.cluster;
        let usable_bytes = cluster.usable_bytes(&cluster.groups[0]);
        let (estimates, predicted) = (FxHashMap::default(), Vec::new());
        Expectations { configurations, costs, usable_bytes, for_bytes, estimates, predicted }
    }

    /// Estimates configurations that have not been.
    pub fn estimate(&mut self, all: &[Degrees]) {
        let executed_as = self.configurations.executed_as();
        let mut alike: BTreeMap<_, Vec<Degrees>> = BTreeMap::new();
        for degrees in all.iter().filter(|degrees| !self.estimates.contains_key(degrees)) {
            let Degrees { dp, tp, cp, num_microbatches, zero, experts, groups, sequence, .. } = *degrees;
            let execution = executed_as[usize::from(zero.min(3))];
            let key = (dp, tp, cp, num_microbatches, execution, experts, groups, sequence);
            alike.entry(key).or_default().push(*degrees);
        }
        let (configurations, costs) = (self.configurations, self.costs);
        let estimated = alike.into_par_iter().map(|(_, alike)| {
            let estimates = configurations.estimates(&alike, costs);
            alike.into_iter().zip(estimates).collect::<Vec<_>>()
        });
        self.estimates.extend(estimated.collect::<Vec<_>>().into_iter().flatten());
    }

    /// Predicts configurations side by side. Those that cannot be are left out.
    pub fn predict(&mut self, batch: &[Degrees]) -> Vec<Swept> {
        let (configurations, costs) = (self.configurations, self.costs);
        let predicted = batch.par_iter().map(|degrees| configurations.configured(degrees, costs));
        let predicted: Vec<Result<Plan, PlanFailure>> = predicted.collect();
        let mut plans = Vec::new();
        for (&degrees, plan) in batch.iter().zip(predicted) {
            match plan {
                Ok(plan) => {
                    self.know(&degrees, &plan);
                    plans.push(Swept { degrees, plan });
                }
                Err(_) => drop(self.estimates.insert(degrees, None)),
            }
        }
        plans
    }

    /// Takes the prediction of a configuration.
    pub fn know(&mut self, degrees: &Degrees, plan: &Plan) {
        let estimate = self.estimates.get(degrees).copied().flatten();
        let (step_s, fits) = (plan.predicted.step_time_s, fits(plan));
        let peak_bytes = peak_bytes(plan);
        let is_too_large = !fits && peak_bytes as f64 > TOO_LARGE * self.usable_bytes as f64;
        self.predicted.push(Predicted { degrees: *degrees, estimate, step_s, peak_bytes, fits, is_too_large });
    }

    /// The fewest bytes that an estimated configuration is expected to need: those that it surely holds, times the least
    /// ratio of a prediction with its recomputation. Above all selective recomputation frees far less than it surely may.
    fn least_bytes(&self, degrees: &Degrees, estimate: &Estimate) -> f64 {
        let alike = self.predicted.iter().filter(|known| known.degrees.recompute == degrees.recompute);
        let ratios = alike.filter_map(|known| Some(known.peak_bytes as f64 / known.estimate?.held_bytes.max(1) as f64));
        let ratio = ratios.reduce(f64::min).map_or(1.0, |least| (SURE * least).max(1.0));
        ratio * estimate.held_bytes as f64
    }

    /// The seconds of a step that an estimated configuration is expected to take; `None` if it cannot be, has been
    /// predicted, needs no prediction because it does not fit, or repeats more than another that fits.
    fn expected_s(&self, degrees: &Degrees) -> Option<f64> {
        let estimate = self.estimates.get(degrees).copied().flatten()?;
        if self.least_bytes(degrees, &estimate) > self.usable_bytes as f64
            || self.predicted.iter().any(|known| known.excludes(degrees, &estimate, self.for_bytes))
        {
            return None;
        }
        let alike = self.predicted.iter().filter(|known| devices(&known.degrees) == devices(degrees));
        let nearest = alike.filter_map(|known| Some((distance(&known.degrees, degrees), known.ratio()?)));
        let ratio = match nearest.min_by(|a, b| a.0.total_cmp(&b.0)) {
            Some((_, ratio)) => ratio,
            // Of other devices little is known, so that the best is assumed.
            None => self.predicted.iter().filter_map(Predicted::ratio).reduce(f64::min).unwrap_or(1.0),
        };
        Some(ratio * estimate.step_s)
    }

    /// True if an estimated configuration may be faster than a similar one with steps of `best_s`.
    pub fn is_near(&self, degrees: &Degrees, best_s: f64) -> bool {
        self.expected_s(degrees).is_some_and(|expected_s| expected_s <= NEAR * best_s)
    }

    /// The configuration on each shape of devices that is expected to be the fastest, among those worth predicting.
    fn promising(&self, open: &[Degrees]) -> Vec<Degrees> {
        let is_cheap = self.predicted.len() * self.configurations.request.graph.len() < CHEAP_NODES;
        let [margin, beside] = if is_cheap { [WIDE_MARGIN; 2] } else { [MARGIN, BESIDE] };
        let known_devices: BTreeSet<[u32; 3]> = self.predicted.iter().map(|known| devices(&known.degrees)).collect();
        let fitting: Vec<&Predicted> = self.predicted.iter().filter(|known| known.fits).collect();
        let is_leaner = |known: &Predicted, degrees: &Degrees| {
            let estimate = self.estimates.get(degrees).copied().flatten();
            estimate.is_none_or(|estimate| known.peak_bytes <= estimate.held_bytes)
        };
        let mut best: BTreeMap<[u32; 3], (f64, Degrees)> = BTreeMap::new();
        for degrees in open {
            let Some(expected_s) = self.expected_s(degrees) else { continue };
            let margin = if known_devices.contains(&devices(degrees)) { beside } else { margin };
            let mut faster = fitting.iter().filter(|known| margin * known.step_s < expected_s);
            if faster.any(|known| !self.for_bytes || is_leaner(known, degrees)) {
                continue;
            }
            let of_shape = best.entry(devices(degrees)).or_insert((expected_s, *degrees));
            if expected_s < of_shape.0 {
                *of_shape = (expected_s, *degrees);
            }
        }
        let least_s = best.values().map(|of_shape| of_shape.0).fold(f64::INFINITY, f64::min);
        let most_s = if fitting.is_empty() && !self.for_bytes { margin * least_s } else { f64::INFINITY };
        best.into_values().filter(|of_shape| of_shape.0 <= most_s).map(|of_shape| of_shape.1).collect()
    }

    /// Predicts promising configurations until none is left. Returns those that fit.
    pub fn explore(&mut self, open: &[Degrees], progress: &dyn Progress) -> Vec<Swept> {
        self.estimate(open);
        let mut found = Vec::new();
        while found.is_empty() || !progress.stopped() {
            let batch = self.promising(open);
            let Some(Degrees { dp, tp, stages, virtual_stages, .. }) = batch.first() else { break };
            let pp = stages / virtual_stages.max(&1);
            progress.step(&format!("dp{dp} tp{tp} pp{pp}"), self.predicted.len(), open.len());
            found.extend(self.predict(&batch).into_iter().filter(|swept| fits(&swept.plan)));
        }
        found
    }
}

impl Predicted {
    /// Prediction by estimate.
    fn ratio(&self) -> Option<f64> {
        let estimate = self.estimate.filter(|estimate| estimate.step_s > 0.0)?;
        Some(self.step_s / estimate.step_s)
    }

    /// True if a configuration is this one, or is no better. A level of recomputation repeats all that the levels below
    /// it do, so that none above one that fits is faster. Beside a configuration that is too large, one with as much of
    /// everything is too.
    fn excludes(&self, degrees: &Degrees, estimate: &Estimate, for_bytes: bool) -> bool {
        let known = &self.degrees;
        if *known == *degrees {
            return true;
        }
        if self.fits {
            let repeats_more = known.recompute < degrees.recompute;
            return !for_bytes && repeats_more && Degrees { recompute: degrees.recompute, ..*known } == *degrees;
        }
        let Degrees { recompute, zero, num_microbatches, .. } = *degrees;
        let as_much = recompute <= known.recompute && zero <= known.zero && num_microbatches <= known.num_microbatches;
        let holds_less = self.estimate.is_some_and(|known| estimate.held_bytes < known.held_bytes);
        self.is_too_large
            && as_much
            && !holds_less
            && Degrees { recompute, zero, num_microbatches, ..*known } == *degrees
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::search::layout::Layout;
    use altiplano_ir::recompute::Recompute;

    #[test]
    fn configurations_that_are_no_better_than_a_known_one_are_left_out() {
        let at = Degrees {
            dp: 4,
            tp: 2,
            cp: 1,
            stages: 4,
            virtual_stages: 1,
            num_microbatches: 8,
            zero: 1,
            recompute: Recompute::Selective,
            layout: Layout::Even,
            experts: 1,
            groups: 1,
            sequence: false,
        };
        let estimate = |held_bytes| Estimate { step_s: 1.0, held_bytes };
        let known = |fits| Predicted {
            degrees: at,
            estimate: Some(estimate(100)),
            step_s: 1.0,
            peak_bytes: 110,
            fits,
            is_too_large: !fits,
        };
        let repeats_more = Degrees { recompute: Recompute::Full, ..at };
        let repeats_less = Degrees { recompute: Recompute::None, ..at };
        let shards_less = Degrees { zero: 0, ..at };
        let larger_microbatches = Degrees { num_microbatches: 4, ..at };
        let smaller_microbatches = Degrees { num_microbatches: 16, ..at };
        let deeper = Degrees { stages: 8, virtual_stages: 2, ..at };
        for (degrees, beside_fitting, beside_too_large) in [
            (at, true, true),
            (repeats_more, true, false),
            (repeats_less, false, true),
            (shards_less, false, true),
            (larger_microbatches, false, true),
            (smaller_microbatches, false, false),
            (deeper, false, false),
        ] {
            for (fits, excluded) in [(true, beside_fitting), (false, beside_too_large)] {
                assert_eq!(known(fits).excludes(&degrees, &estimate(120), false), excluded, "{fits} {degrees:?}");
            }
        }
        // Bytes speak for recomputation, and an estimate for a configuration that has as much of everything.
        assert!(!known(true).excludes(&repeats_more, &estimate(80), true));
        assert!(!known(false).excludes(&shards_less, &estimate(80), false));
        let almost_fits = Predicted { is_too_large: false, ..known(false) };
        assert!(!almost_fits.excludes(&shards_less, &estimate(120), false));
    }
}
