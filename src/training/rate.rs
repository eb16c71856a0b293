//! The learning rate of each step, as a function of its number alone, so that a resumed run follows the same curve.

use std::f64::consts::PI;

/// The decay of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shape {
    /// No decay.
    #[default]
    Constant,
    /// Linear, to the final rate.
    Linear,
    /// By a factor at regular intervals.
    Step,
    /// Exponential, to the final rate.
    Exponential,
    /// To the final rate, as a power of the remaining fraction of the steps.
    Polynomial,
    /// Half a cosine wave to the final rate (Loshchilov & Hutter 2017, without restarts).
    Cosine,
    /// Inversely proportional to the step (Robbins & Monro 1951), from the end of the warm-up.
    Inverse,
    /// Inversely proportional to the square root of the step (Vaswani et al. 2017).
    InverseSqrt,
}

/// A learning-rate schedule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RateSchedule {
    pub shape: Shape,
    /// Steps of the linear warm-up, the last of which has the peak rate.
    pub warmup_steps: u64,
    /// The step that reaches the final rate, warm-up included.
    pub total_steps: u64,
    pub final_rate: f64,
    /// Interval of [`Shape::Step`].
    pub every: u64,
    /// Factor of [`Shape::Step`].
    pub factor: f64,
    /// Exponent of [`Shape::Polynomial`].
    pub power: f64,
}

impl Default for RateSchedule {
    fn default() -> RateSchedule {
        let shape = Shape::Constant;
        RateSchedule { shape, warmup_steps: 0, total_steps: 1, final_rate: 0.0, every: 1, factor: 0.1, power: 2.0 }
    }
}

impl RateSchedule {
    /// The rate of step `step`, counted from 1, with the peak rate `peak`.
    ///
    /// ```
    /// use altiplano::training::rate::{RateSchedule, Shape};
    ///
    /// let schedule = RateSchedule { shape: Shape::Linear, warmup_steps: 2, total_steps: 6, ..RateSchedule::default() };
    /// let rates: Vec<f64> = (1..=7).map(|step| schedule.at(step, 1.0)).collect();
    /// assert_eq!(rates, [0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]);
    /// ```
    pub fn at(&self, step: u64, peak: f64) -> f64 {
        let RateSchedule { warmup_steps, total_steps, final_rate, .. } = *self;
        if step <= warmup_steps {
            return peak * step as f64 / warmup_steps as f64;
        }
        let falling = total_steps.saturating_sub(warmup_steps).max(1) as f64;
        let done = ((step - warmup_steps) as f64 / falling).min(1.0);
        let between = |share: f64| final_rate + (peak - final_rate) * share;
        match self.shape {
            Shape::Constant => peak,
            Shape::Linear => between(1.0 - done),
            Shape::Polynomial => between((1.0 - done).powf(self.power)),
            Shape::Cosine => between((1.0 + (PI * done).cos()) / 2.0),
            Shape::Exponential => peak * (final_rate / peak).powf(done),
            Shape::Step => {
                let falls = (step - warmup_steps - 1) / self.every.max(1);
                (peak * self.factor.powf(falls as f64)).max(final_rate)
            }
            Shape::Inverse => (peak * warmup_steps.max(1) as f64 / step as f64).max(final_rate),
            Shape::InverseSqrt => (peak * (warmup_steps.max(1) as f64 / step as f64).sqrt()).max(final_rate),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(schedule: RateSchedule, peak: f64, expected: &[(u64, f64)]) {
        for &(step, rate) in expected {
            let found = schedule.at(step, peak);
            assert!((found - rate).abs() < 1e-12, "{schedule:?}: step {step} has {found}, not {rate}");
        }
    }

    #[test]
    fn shapes_have_their_closed_forms() {
        let of =
            |shape| RateSchedule { shape, warmup_steps: 10, total_steps: 110, final_rate: 0.1, ..Default::default() };
        for shape in [
            Shape::Constant,
            Shape::Linear,
            Shape::Step,
            Shape::Exponential,
            Shape::Polynomial,
            Shape::Cosine,
            Shape::Inverse,
            Shape::InverseSqrt,
        ] {
            check(of(shape), 2.0, &[(1, 0.2), (5, 1.0), (10, 2.0)]);
            let rates: Vec<f64> = (10..300).map(|step| of(shape).at(step, 2.0)).collect();
            assert!(
                rates.windows(2).all(|pair| pair[1] <= pair[0] && pair[1] >= 0.1),
                "{shape:?} rises or falls too far"
            );
        }
        check(of(Shape::Constant), 2.0, &[(11, 2.0), (1000, 2.0)]);
        check(of(Shape::Linear), 2.0, &[(60, 1.05), (85, 0.575), (110, 0.1), (500, 0.1)]);
        check(of(Shape::Cosine), 2.0, &[(60, 1.05), (35, 0.1 + 0.95 * (1.0 + 0.5f64.sqrt())), (110, 0.1), (500, 0.1)]);
        check(of(Shape::Polynomial), 2.0, &[(60, 0.1 + 1.9 / 4.0), (110, 0.1)]);
        check(of(Shape::Exponential), 2.0, &[(60, 0.2f64.sqrt()), (110, 0.1), (111, 0.1)]);
        check(of(Shape::Inverse), 2.0, &[(40, 0.5), (100, 0.2), (1_000_000, 0.1)]);
        check(of(Shape::InverseSqrt), 2.0, &[(40, 1.0), (90, 2.0 / 3.0), (1_000_000, 0.1)]);
        let steps = RateSchedule { every: 20, factor: 0.5, ..of(Shape::Step) };
        check(steps, 2.0, &[(11, 2.0), (30, 2.0), (31, 1.0), (50, 1.0), (51, 0.5), (1000, 0.1)]);
    }

    #[test]
    fn without_a_warm_up_the_first_step_is_near_the_peak() {
        let schedule = RateSchedule { shape: Shape::Cosine, total_steps: 4, ..Default::default() };
        check(schedule, 1.0, &[(1, (1.0 + 0.5f64.sqrt()) / 2.0), (2, 0.5), (4, 0.0)]);
        let at_once = RateSchedule { shape: Shape::Linear, total_steps: 0, ..Default::default() };
        check(at_once, 1.0, &[(1, 0.0), (2, 0.0)]);
    }
}
