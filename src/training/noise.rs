//! The gradient noise scale: the batch size up to which larger batches save steps.
//!
//! McCandlish et al. 2018 (appendix A.1) estimate two quantities from gradient norms at two batch sizes: the square
//! `|G|^2` of the true gradient, and the trace `S` of the covariance of single samples' gradients. The sizes here are
//! equal parts of the batch, which devices and microbatches see before the sum, and the whole. Both quantities are
//! averaged over steps before taking their ratio.

use crate::error::Error;
use crate::training::state_of_step;
use altiplano_ir::program::{GRADIENT_VARIANCE, MEASURED_SQUARES};
use altiplano_runtime::Session;
use std::fmt;

/// Number of blocks of steps for the jackknife error of the ratio.
const BLOCKS: usize = 10;

/// The measurements of all steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NoiseScale {
    global_batch: u64,
    /// `|G|^2` and `S` of each step, and their prefix sums.
    steps: Vec<[f64; 2]>,
    sums: Vec<[f64; 2]>,
}

/// `S / |G|^2` in samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NoiseEstimate {
    pub samples: f64,
    /// Its standard deviation, by leaving out a tenth of the steps at a time.
    pub error: f64,
    /// Number of steps of the estimate.
    pub steps: usize,
}

impl NoiseScale {
    pub fn new(global_batch: u64) -> Self {
        NoiseScale { global_batch, steps: Vec::new(), sums: vec![[0.0; 2]] }
    }

    /// Adds the measurement of the session's last step, under a plan with `measure_noise`.
    ///
    /// # Errors
    /// Fails if the whole batch's gradient was one part.
    pub fn measure(&mut self, session: &mut Session) -> Result<(), Error> {
        let squares = state_of_step(session, MEASURED_SQUARES)?;
        if squares == 0.0 {
            let problem = "needs several microbatches, or data parallelism with one reduction of gradients per step";
            return Err(Error::Option { option: "--measure-noise-scale", problem });
        }
        let variance = state_of_step(session, GRADIENT_VARIANCE)?;
        // A step whose gradients overflowed measured nothing.
        if squares.is_finite() && variance.is_finite() {
            self.add(squares, variance);
        }
        Ok(())
    }

    /// Adds a step: the squared norm of its gradient, and the variance of that gradient over batches.
    pub fn add(&mut self, squares: f64, variance: f64) {
        let step = [squares - variance, self.global_batch as f64 * variance];
        let before = self.sums[self.steps.len()];
        self.sums.push([before[0] + step[0], before[1] + step[1]]);
        self.steps.push(step);
    }

    /// The scale over the later half of the steps, since it grows as a model learns. `None` if `|G|^2` is not
    /// distinguishable from 0.
    pub fn now(&self) -> Option<f64> {
        let (first, end) = (self.steps.len() / 2, self.steps.len());
        ratio(self.sum(first, end))
    }

    /// [`Self::now`] with its error, which needs several steps.
    pub fn estimate(&self) -> Option<NoiseEstimate> {
        let (first, end) = (self.steps.len() / 2, self.steps.len());
        let steps = end - first;
        let blocks = BLOCKS.min(steps);
        if blocks < 2 {
            return None;
        }
        let all = self.sum(first, end);
        let without = |k: usize| {
            let block = self.sum(first + steps * k / blocks, first + steps * (k + 1) / blocks);
            ratio([all[0] - block[0], all[1] - block[1]])
        };
        let left: Vec<f64> = (0..blocks).map(without).collect::<Option<_>>()?;
        let mean = left.iter().sum::<f64>() / blocks as f64;
        let spread: f64 = left.iter().map(|x| (x - mean).powi(2)).sum();
        let error = (spread * (blocks - 1) as f64 / blocks as f64).sqrt();
        Some(NoiseEstimate { samples: ratio(all)?, error, steps })
    }

    fn sum(&self, first: usize, end: usize) -> [f64; 2] {
        [0, 1].map(|i| self.sums[end][i] - self.sums[first][i])
    }
}

fn ratio([gradient, variance]: [f64; 2]) -> Option<f64> {
    (gradient > 0.0).then(|| (variance / gradient).max(0.0))
}

impl fmt::Display for NoiseEstimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NoiseEstimate { samples, error, steps } = self;
        write!(
            f,
            "gradient noise scale: {samples:.1} samples, with a standard error of {error:.1}, over the last {steps} steps"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Synthetic sample gradients: each element has mean 0.1 and variance 1, so the scale is 100.
    #[test]
    fn the_scale_of_known_gradients_is_found() {
        let (parts, batch, size, steps) = (4u64, 32u64, 400u64, 400u64);
        let mut state = 1u64;
        let mut normal = || {
            // A sum of twelve uniform numbers is approximately normal.
            let sum: f64 = (0..12)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    (state >> 11) as f64 / (1u64 << 53) as f64
                })
                .sum();
            sum - 6.0
        };
        let mut noise = NoiseScale::new(batch);
        for _ in 0..steps {
            let (mut squares, mut of_parts) = (0.0, 0.0);
            for _ in 0..size {
                let of_part = (batch / parts) as f64;
                let means: Vec<f64> = (0..parts).map(|_| 0.1 + normal() / of_part.sqrt()).collect();
                // A part's contribution to the batch gradient is its mean divided by the number of parts.
                squares += (means.iter().sum::<f64>() / parts as f64).powi(2);
                of_parts += means.iter().map(|x| (x / parts as f64).powi(2)).sum::<f64>();
            }
            noise.add(squares, (parts as f64 * of_parts - squares) / (parts - 1) as f64);
        }
        let found = noise.estimate().expect("an estimate");
        assert_eq!(found.steps, 200);
        assert!((found.samples - 100.0).abs() < 3.0 * found.error && found.error < 5.0, "{found}");
        assert_eq!(noise.now(), Some(found.samples));
    }

    #[test]
    fn what_is_not_told_from_noise_is_not_told() {
        let mut noise = NoiseScale::new(8);
        assert_eq!((noise.now(), noise.estimate()), (None, None));
        noise.add(1.0, 2.0);
        noise.add(1.0, 2.0);
        noise.add(1.0, 2.0);
        noise.add(1.0, 2.0);
        assert_eq!((noise.now(), noise.estimate()), (None, None));
    }
}
