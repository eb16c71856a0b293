//! The effect of a batch size on training: steps and samples to reach the same loss, learning rates and warm-up, and
//! the largest batch for which a rule was demonstrated. Everything here is published; nothing is predicted.

use crate::advice::{BatchEffort, learning_rates};
use crate::report::Grid;
use crate::scale::practice;
use crate::units::{count, digits};
use altiplano_ir::optimizer::Optimizer;
use serde::Serialize;

/// A learning rate that is known to work with a batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BaseRate {
    pub rate: f64,
    pub batch: u64,
}

/// The effects of one batch size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct BatchRow {
    pub batch: u64,
    /// Steps and samples as multiples of the minimum over all batches, if the noise scale is known.
    pub steps: Option<f64>,
    pub samples: Option<f64>,
    /// Scaled learning rates, if a base rate is known.
    pub rate_linear: Option<f64>,
    pub rate_square_root: Option<f64>,
}

/// One row per batch, in the given order.
pub(crate) fn batch_rows(batches: &[u64], noise_scale: Option<f64>, base: Option<BaseRate>) -> Vec<BatchRow> {
    let row = |&batch: &u64| {
        let effort = noise_scale.map(|scale| BatchEffort::of(batch as f64, scale));
        let rates = base.map(|base| learning_rates(base.batch, batch).map(|factor| base.rate * factor));
        BatchRow {
            batch,
            steps: effort.map(|e| e.steps),
            samples: effort.map(|e| e.samples),
            rate_linear: rates.map(|r| r[0]),
            rate_square_root: rates.map(|r| r[1]),
        }
    };
    batches.iter().map(row).collect()
}

/// Batches to discuss if all rows of a sweep have the same one.
pub fn around(batch: u64) -> Vec<u64> {
    let smaller = [16, 4].into_iter().filter(|&n| batch.is_multiple_of(n)).map(|n| batch / n);
    smaller.chain([1, 4, 16].into_iter().map(|n| batch.saturating_mul(n))).collect()
}

/// The rows as a table, with notes.
pub(crate) fn batch_text(rows: &[BatchRow], noise_scale: Option<f64>, base: Option<BaseRate>) -> String {
    let mut columns = vec!["batch"];
    if noise_scale.is_some() {
        columns.extend(["steps / fewest", "samples / fewest"]);
    }
    if base.is_some() {
        columns.extend(["rate, linear", "rate, square root"]);
    }
    let mut table = Grid::new(&columns);
    for row in rows {
        let effort = [row.steps, row.samples].into_iter().flatten().map(digits);
        // Rates are small, so print their significant digits.
        let rates = [row.rate_linear, row.rate_square_root].into_iter().flatten().map(|rate| format!("{rate:.2e}"));
        table.row([row.batch.to_string()].into_iter().chain(effort).chain(rates).collect::<Vec<_>>());
    }
    let mut lines = vec![table.right()];
    if let Some(scale) = noise_scale {
        lines.push(format!(
            "  the critical batch is {} samples: it takes twice the fewest steps and twice the fewest samples; smaller ones save samples,\n  larger ones hardly any steps (McCandlish et al. 2018, equation 2.7)",
            digits(scale)
        ));
    }
    lines.join("\n")
}

/// Customary practice with an optimizer up to the largest batch, and the warm-up from the batch of a known rate.
pub(crate) fn practice_lines(largest: u64, base: Option<BaseRate>, optimizer: &Optimizer) -> Vec<String> {
    let mut lines = vec![
        format!("{}'s customary rate: {}", optimizer.name(), practice::base_rate(optimizer)),
        format!("take {}", practice::rule(largest, optimizer)),
    ];
    if let Some(base) = base {
        let growth = largest as f64 / base.batch.max(1) as f64;
        let warm_up = match optimizer {
            Optimizer::Sgd { .. } | Optimizer::Nesterov { .. } => {
                "5 epochs from the base's rate (Goyal et al. 2017)".to_string()
            }
            _ => format!(
                "as many steps as with {}, which is {} times the part of all steps (You et al. 2020 lengthen it with the batch)",
                count(base.batch),
                digits(growth.max(1.0))
            ),
        };
        lines.push(format!("warm-up: {warm_up}"));
    }
    lines.push(format!("fall: {}", practice::decay(optimizer)));
    lines
}

/// A warning about a batch that is large relative to an epoch.
pub(crate) fn batch_warning(batch: u64, in_epoch: Option<u64>) -> Option<String> {
    let root = (in_epoch? as f64).sqrt();
    (batch as f64 > root).then(|| {
        format!(
            "the batch of {batch} is above {}, the square root of the samples: steps no longer gain what their samples cost, unless the gradient's noise scale says so (Dekel et al. 2012)",
            digits(root)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_have_their_steps_samples_and_rates() {
        let rows = batch_rows(&[64, 256, 1024], Some(256.0), Some(BaseRate { rate: 0.1, batch: 256 }));
        let of =
            |row: &BatchRow| [row.steps, row.samples, row.rate_linear, row.rate_square_root].map(|x| x.expect("known"));
        assert_eq!(
            rows.iter().map(of).collect::<Vec<_>>(),
            [[5.0, 1.25, 0.025, 0.05], [2.0, 2.0, 0.1, 0.1], [1.25, 5.0, 0.4, 0.2]]
        );
        let plain = batch_rows(&[64], None, None);
        assert!(plain[0].steps.is_none() && plain[0].rate_linear.is_none());
        assert_eq!(around(64), [4, 16, 64, 256, 1024]);
        assert_eq!(around(6), [6, 24, 96]);
    }

    #[test]
    fn rules_are_those_of_the_optimizer_and_the_batch() {
        let base = BaseRate { rate: 0.1, batch: 256 };
        let said = |batch: u64, optimizer: &Optimizer| practice_lines(batch, Some(base), optimizer).join("\n");
        assert!(said(8192, &Optimizer::sgd()).contains("take linear"));
        assert!(said(16384, &Optimizer::sgd()).contains("take LARS"));
        let adamw = said(8192, &Optimizer::adamw());
        assert!(adamw.contains("take square root") && adamw.contains("32.0 times the part"), "{adamw}");
        assert_eq!(practice_lines(8192, None, &Optimizer::adamw()).len(), 3, "no warm-up without a base");
    }

    #[test]
    fn batches_beyond_the_root_of_the_samples_are_warned_of() {
        assert_eq!(batch_warning(1000, Some(1_000_000)), None);
        assert!(batch_warning(1001, Some(1_000_000)).is_some_and(|w| w.contains("1000")));
        assert_eq!(batch_warning(1 << 40, None), None);
    }
}
