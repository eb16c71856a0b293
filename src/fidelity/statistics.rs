//! Measures of prediction accuracy: errors, ranks and regret.

use super::PredictedRow;
use serde::Serialize;
use std::collections::BTreeMap;

/// Statistics over all rows of a table.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Statistics {
    pub rows: usize,
    /// Mean absolute error, in percent of the measured time.
    pub mape_percent: f64,
    /// Mean signed error: above 0 if predictions are too slow.
    pub bias_percent: f64,
    /// Median rank correlation of the groups with at least `RANKED` rows; absent if there is none.
    pub spearman: Option<f64>,
    /// The lowest rank correlation.
    pub spearman_least: Option<f64>,
    /// Mean regret over groups of at least two rows: how much slower the row predicted fastest is than the fastest
    /// measured.
    pub regret_percent: Option<f64>,
    /// The highest regret.
    pub regret_most_percent: Option<f64>,
    /// Number of groups whose row predicted fastest is among the three fastest measured, and number of all groups.
    pub among_best_three: usize,
    pub compared_groups: usize,
}

/// The key of rows that can be ranked: of one group, on as many devices, with the same batch. Steps that do different
/// work are not alternatives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Comparable<'a> {
    pub group: &'a str,
    pub gpus: u32,
    pub global_batch: u64,
}

/// Statistics over rows that can be ranked.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GroupStatistics {
    pub group: String,
    pub gpus: u32,
    pub global_batch: u64,
    pub rows: usize,
    pub spearman: Option<f64>,
    pub regret_percent: f64,
    /// Rank of the row predicted fastest among the measured ones, from 1.
    pub rank_of_choice: usize,
}

/// Minimum number of rows for a meaningful rank correlation.
pub(crate) const RANKED: usize = 5;

/// Statistics of predictions, over all rows and by group.
pub fn statistics(predicted: &[PredictedRow]) -> (Statistics, Vec<GroupStatistics>) {
    let rows = predicted.iter().map(|row| {
        let PredictedRow { gpus, global_batch, .. } = *row;
        (Comparable { group: &row.group, gpus, global_batch }, row.measured_step_s, row.predicted_step_s)
    });
    let groups = group_statistics(rows);
    let mean = |values: &[f64]| (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64);
    let errors: Vec<f64> = predicted.iter().map(|r| r.error_percent).collect();
    let absolute: Vec<f64> = errors.iter().map(|e| e.abs()).collect();
    let mut ranks: Vec<f64> = groups.iter().filter_map(|g| g.spearman).collect();
    ranks.sort_by(f64::total_cmp);
    let regrets: Vec<f64> = groups.iter().map(|g| g.regret_percent).collect();
    let statistics = Statistics {
        rows: predicted.len(),
        mape_percent: mean(&absolute).unwrap_or(0.0),
        bias_percent: mean(&errors).unwrap_or(0.0),
        spearman: median(&ranks),
        spearman_least: ranks.first().copied(),
        regret_percent: mean(&regrets),
        regret_most_percent: regrets.iter().copied().reduce(f64::max),
        among_best_three: groups.iter().filter(|g| g.rank_of_choice <= 3).count(),
        compared_groups: groups.len(),
    };
    (statistics, groups)
}

/// Statistics of the groups with at least two rows. Each row has its key, and its measured and predicted seconds.
pub(crate) fn group_statistics<'a>(rows: impl Iterator<Item = (Comparable<'a>, f64, f64)>) -> Vec<GroupStatistics> {
    let mut of_group: BTreeMap<Comparable<'_>, Vec<(f64, f64)>> = BTreeMap::new();
    for (group, measured_s, predicted_s) in rows {
        of_group.entry(group).or_default().push((measured_s, predicted_s));
    }
    of_group.into_iter().filter(|(_, rows)| rows.len() > 1).map(|(group, rows)| of(group, &rows)).collect()
}

fn median(sorted: &[f64]) -> Option<f64> {
    let n = sorted.len();
    (n > 0).then(|| (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0)
}

/// `rows` holds measured and predicted seconds.
fn of(Comparable { group, gpus, global_batch }: Comparable<'_>, rows: &[(f64, f64)]) -> GroupStatistics {
    let chosen = rows.iter().min_by(|a, b| a.1.total_cmp(&b.1)).map_or(0.0, |r| r.0);
    let fastest = rows.iter().map(|r| r.0).fold(f64::INFINITY, f64::min);
    let (measured, predicted): (Vec<f64>, Vec<f64>) = rows.iter().copied().unzip();
    GroupStatistics {
        group: group.to_string(),
        gpus,
        global_batch,
        rows: rows.len(),
        spearman: (rows.len() >= RANKED).then(|| correlation(&ranks(&measured), &ranks(&predicted))),
        regret_percent: 100.0 * (chosen / fastest - 1.0),
        rank_of_choice: 1 + rows.iter().filter(|r| r.0 < chosen).count(),
    }
}

/// The rank of each value; equal values share the mean of their ranks.
fn ranks(values: &[f64]) -> Vec<f64> {
    values
        .iter()
        .map(|v| {
            let below = values.iter().filter(|w| *w < v).count();
            let equal = values.iter().filter(|w| *w == v).count();
            below as f64 + (equal as f64 + 1.0) / 2.0
        })
        .collect()
}

/// Pearson's correlation, which is Spearman's for ranks; 0 if one side does not vary.
fn correlation(a: &[f64], b: &[f64]) -> f64 {
    let n = a.len() as f64;
    let (mean_a, mean_b) = (a.iter().sum::<f64>() / n, b.iter().sum::<f64>() / n);
    let (mut ab, mut aa, mut bb) = (0.0, 0.0, 0.0);
    for (x, y) in a.iter().zip(b) {
        ab += (x - mean_a) * (y - mean_b);
        aa += (x - mean_a).powi(2);
        bb += (y - mean_b).powi(2);
    }
    if aa > 0.0 && bb > 0.0 { ab / (aa * bb).sqrt() } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(group: &str, measured: f64, predicted: f64) -> PredictedRow {
        PredictedRow {
            line: 1,
            group: group.into(),
            gpus: 8,
            global_batch: 64,
            model: String::new(),
            plan: String::new(),
            measured_step_s: measured,
            predicted_step_s: predicted,
            error_percent: 100.0 * (predicted / measured - 1.0),
        }
    }

    #[test]
    fn errors_ranks_and_regret_of_a_table_worked_out_by_hand() {
        // The ranks differ by one swap of adjacent rows: 1 - 6 * 2 / (5 * 24) = 0.9. The choice (1.1) is the second
        // fastest: 10 %.
        let rows: Vec<PredictedRow> =
            [(1.0, 1.2), (1.1, 1.1), (2.0, 2.0), (3.0, 3.3), (4.0, 4.4)].map(|(m, p)| row("a", m, p)).into();
        let (all, groups) = statistics(&rows);
        assert!((all.mape_percent - 8.0).abs() < 1e-9 && (all.bias_percent - 8.0).abs() < 1e-9);
        assert!((groups[0].spearman.unwrap() - 0.9).abs() < 1e-12);
        assert!((groups[0].regret_percent - 10.0).abs() < 1e-9);
        assert_eq!(groups[0].rank_of_choice, 2);
        assert_eq!((all.among_best_three, all.compared_groups), (1, 1));
    }

    #[test]
    fn rows_on_other_devices_or_with_another_batch_are_not_ranked_together() {
        let mut rows: Vec<PredictedRow> = (1..=6).map(|i| row("a", f64::from(i), f64::from(7 - i))).collect();
        (rows[4].gpus, rows[5].global_batch) = (16, 128);
        let (all, groups) = statistics(&rows);
        assert_eq!((groups.len(), groups[0].rows, all.spearman, all.compared_groups), (1, 4, None, 1));
    }

    #[test]
    fn groups_of_one_row_are_not_compared_and_small_ones_not_ranked() {
        let (all, groups) = statistics(&[row("a", 1.0, 2.0), row("b", 1.0, 1.0), row("b", 2.0, 1.5)]);
        assert_eq!((groups.len(), all.spearman, all.compared_groups), (1, None, 1));
        assert_eq!(all.regret_percent, Some(0.0));
    }
}
