//! Branch and bound over the slowest stage and the largest step cost, which the recurrence takes as limits.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::recurrence::{Arc, Arcs, Costs, Leg, Limits, Prune, Space};

/// A set of plans: those whose slowest stage and largest step cost lie in index ranges (inclusive) of the distinct
/// values.
#[derive(Debug)]
struct Region {
    /// No plan of the region has a lower objective.
    bound_s: f64,
    /// No plan of the region has a lower sum of microbatch times.
    sum_s: f64,
    times: (usize, usize),
    steps: (usize, usize),
    /// Order of creation, so that equal bounds have an order.
    serial: usize,
}

impl Ord for Region {
    /// The greatest is the one with the least bound: `BinaryHeap` pops the greatest.
    fn cmp(&self, other: &Self) -> Ordering {
        other.bound_s.total_cmp(&self.bound_s).then(other.serial.cmp(&self.serial))
    }
}

impl PartialOrd for Region {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Region {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Region {}

#[derive(Debug)]
pub(super) struct Found {
    pub(super) legs: Vec<Leg>,
    pub(super) step_s: f64,
}

/// Plans closer than this, relative to their step time, count as equally fast.
const TIE: f64 = 1e-10;

/// The longest time of a microbatch, and the largest cost of a step, of all stages.
fn maxima(legs: &[Leg]) -> (f64, f64) {
    let of = |seconds: fn(&Leg) -> f64| legs.iter().map(seconds).fold(0.0, f64::max);
    (of(|leg| leg.choice.microbatch_s), of(|leg| leg.choice.step_s))
}

impl Space {
    /// Branch and bound over regions. With limits `t <= T` and `step <= P` on every stage, the recurrence gives the
    /// least sum `g` of any plan in the region below (T, P). So `g + (B - 1) * (least t of the region) + (least step of
    /// the region)` bounds the region. The solution has actual maxima `t'` and `p'`; the rest of the region to search
    /// is where one of the two is smaller.
    pub(super) fn search(&self) -> Option<Found> {
        let weight = f64::from(self.num_microbatches - 1);
        let times = distinct(self.choices.iter().map(|choice| choice.microbatch_s));
        let steps = distinct(self.choices.iter().map(|choice| choice.step_s));
        let (last_time, last_step) = (times.len().checked_sub(1)?, steps.len().checked_sub(1)?);
        let unlimited = Limits { microbatch_s: f64::INFINITY, step_s: f64::INFINITY };
        let least_sum = self.relaxed(&self.arcs, unlimited, 0.0).1?;
        // Charge every stage a trifle, so that among equal sums the one with fewer stages is least. All charges
        // together stay below the tie, even if times are zero.
        let positive = times.iter().chain(&steps).copied().filter(|&t| t > 0.0);
        let scale = if least_sum > 0.0 { least_sum } else { positive.reduce(f64::min).unwrap_or(1.0) };
        let per_stage = scale * TIE / (2.0 * self.max_stages as f64);
        // With one microbatch the slowest stage does not matter: one region for all times.
        let first_time = if weight > 0.0 { 0 } else { last_time };

        let mut best: Option<Found> = None;
        let mut serial = 0;
        let mut open = BinaryHeap::from([Region {
            bound_s: least_sum,
            sum_s: least_sum,
            times: (first_time, last_time),
            steps: (0, last_step),
            serial,
        }]);
        while let Some(region) = open.pop() {
            let cutoff =
                best.as_ref().map_or(f64::INFINITY, |best| best.step_s * (1.0 - self.relative_tolerance + TIE));
            if region.bound_s > cutoff {
                break;
            }
            let (time, step) = (times[region.times.0], steps[region.steps.0]);
            // Exclude times and step costs with which no plan of the region beats the best.
            let left = cutoff - region.sum_s;
            let high_time = last_at_most(&times, region.times, |t| weight * t + step <= left);
            let high_step = last_at_most(&steps, region.steps, |p| weight * time + p <= left);
            let limits = Limits { microbatch_s: times[high_time], step_s: steps[high_step] };
            let cap = cutoff - weight * time - step;
            let Some((sum_s, legs)) = self.solve(limits, per_stage, cap) else {
                continue;
            };
            let (longest, largest) = maxima(&legs);
            let sum: f64 = legs.iter().map(|leg| leg.choice.microbatch_s).sum();
            let found = Found { step_s: sum + weight * longest + largest, legs };
            if best.as_ref().is_none_or(|best| is_better(&found, best)) {
                best = Some(found);
            }
            let below_time = times.partition_point(|&t| t < longest);
            let below_step = steps.partition_point(|&p| p < largest);
            let mut add = |times_in: (usize, usize), steps_in: (usize, usize)| {
                let lower = weight * times[times_in.0] + steps[steps_in.0];
                serial += 1;
                open.push(Region { bound_s: sum_s + lower, sum_s, times: times_in, steps: steps_in, serial });
            };
            let mut split = |times_in: (usize, usize), steps_in: (usize, usize)| {
                let time_span = weight * (times[times_in.1] - times[times_in.0]);
                let step_span = steps[steps_in.1] - steps[steps_in.0];
                if time_span >= step_span && time_span > 0.0 {
                    let middle = middle(&times, times_in);
                    add((times_in.0, middle), steps_in);
                    add((middle + 1, times_in.1), steps_in);
                } else if step_span > 0.0 {
                    let middle = middle(&steps, steps_in);
                    add(times_in, (steps_in.0, middle));
                    add(times_in, (middle + 1, steps_in.1));
                } else {
                    add(times_in, steps_in);
                }
            };
            if below_time > region.times.0 {
                let high = high_time.min(below_time - 1);
                split((region.times.0, high), (region.steps.0, high_step));
            }
            if below_step > region.steps.0 && below_time <= high_time {
                let low = region.times.0.max(below_time);
                let high = high_step.min(below_step - 1);
                split((low, high_time), (region.steps.0, high));
            }
        }
        best
    }

    fn cost_within(&self, limits: Limits, per_stage: f64) -> impl Fn(&Arc, usize) -> f64 {
        move |arc, position| {
            self.pick(arc, limits, position).map_or(f64::INFINITY, |choice| choice.microbatch_s + per_stage)
        }
    }

    /// The recurrence without the number of stages, as if every stage needed the memory of a last one. It gives a lower
    /// bound quickly, and the answer itself if memory is ample.
    fn relaxed(&self, arcs: &Arcs, limits: Limits, per_stage: f64) -> (Costs, Option<f64>) {
        let cost = self.cost_within(limits, per_stage);
        let costs = self.costs(arcs, 1, true, &cost, |rest, arc| rest + arc, None);
        let sum = self.cheapest(&costs).map(|(sum, _)| sum);
        (costs, sum)
    }

    /// The stages with the least sum of microbatch times within the limits, and a lower bound on that sum; `None` if
    /// the sum would exceed `cap`.
    fn solve(&self, limits: Limits, per_stage: f64, cap: f64) -> Option<(f64, Vec<Leg>)> {
        let cost = self.cost_within(limits, per_stage);
        let add = |rest: f64, arc: f64| rest + arc;
        let arcs = self.arcs_within(limits);
        let to_legs = |path: Vec<(&Arc, usize)>| -> Option<Vec<Leg>> {
            path.into_iter()
                .map(|(arc, position)| {
                    self.pick(arc, limits, position).map(|choice| Leg {
                        first: arc.first,
                        end: arc.end,
                        block: arc.block,
                        choice,
                    })
                })
                .collect()
        };
        // Far below `per_stage`, so that it cannot admit a further stage.
        let slack = per_stage / (4.0 * self.max_stages as f64);
        let mut after = None;
        if self.num_stages.is_none() {
            let (costs, sum) = self.relaxed(&arcs, limits, per_stage);
            let sum = sum.filter(|sum| *sum <= cap)?;
            let legs = to_legs(self.walk(&arcs, &costs, 1, &cost, add, slack))?;
            let num_stages = legs.len();
            let fits = |(i, leg): (usize, &Leg)| leg.choice.max_position as usize >= num_stages - i;
            if self.saturation == 1 || legs.iter().enumerate().all(fits) {
                return Some((sum, legs));
            }
            after = Some(costs);
        }
        let (levels, saturating) = match self.num_stages {
            Some(n) => (n, false),
            None => (self.saturation.min(self.max_stages), true),
        };
        let prune = cap.is_finite().then(|| {
            // A stage before one of level `s` has at least `s + 1` stages to the end, itself included. Two bounds, for
            // levels from 1 and from 3, are worth their cost; more are not.
            let positions = [2, 4].into_iter().filter(|&p| p == 2 || p <= levels);
            let prefix = |position| {
                let after = after.as_ref().map(|costs| (costs, cap));
                self.prefix_costs(&arcs, |arc| cost(arc, position), after)
            };
            let prefixes = positions.map(|p| (p, prefix(p.min(self.saturation)))).collect();
            Prune { prefixes, cap }
        });
        // Levels are positions here; the bounds above do not know them.
        let cost =
            |arc: &Arc, position| if self.may_be_at(arc, position) { cost(arc, position) } else { f64::INFINITY };
        let costs = self.costs(&arcs, levels, saturating, cost, add, prune);
        let (sum, level) = self.cheapest(&costs).filter(|(sum, _)| *sum <= cap)?;
        let legs = to_legs(self.walk(&arcs, &costs, level, cost, add, slack))?;
        Some((sum, legs))
    }
}

/// Returns true if `found` is faster, or equally fast and first in the order of ties.
fn is_better(found: &Found, best: &Found) -> bool {
    let tie = best.step_s * TIE;
    if (found.step_s - best.step_s).abs() > tie {
        return found.step_s < best.step_s;
    }
    let ends = |found: &Found| -> Vec<(usize, usize)> { found.legs.iter().map(|leg| (leg.end, leg.block)).collect() };
    (found.legs.len(), ends(found)) < (best.legs.len(), ends(best))
}

fn distinct(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.dedup();
    values
}

/// The last index of the range (inclusive) whose value satisfies a condition that holds for a prefix of it; the
/// first index if none does.
fn last_at_most(values: &[f64], range: (usize, usize), holds: impl Fn(f64) -> bool) -> usize {
    let count = values[range.0..=range.1].partition_point(|&value| holds(value));
    range.0 + count.saturating_sub(1)
}

/// The index after which a range (inclusive, of two different values at least) is cut: halfway in value.
fn middle(values: &[f64], range: (usize, usize)) -> usize {
    let half = values[range.0] + (values[range.1] - values[range.0]) / 2.0;
    last_at_most(values, range, |value| value <= half).min(range.1 - 1)
}
