//! Infers whether a table's rows did what their column `recompute` says.
//!
//! The column records an experimenter's belief about a framework's configuration, and it changes a step by a third. A
//! campaign (rows of one source on one kind of node) used one configuration, so its steps show which setting was in
//! effect: computing layers twice makes them expensive relative to embeddings and heads, which no other constant does.
//!
//! If rows that state full recomputation agree far better without it, the whole campaign is read so, and the report
//! says so. It is one bit per campaign, and only for campaigns large enough to rule out chance. `--recompute stated`
//! turns it off.

use super::predict::{Prepared, RowPredictor};
use super::table::Row;
use crate::Error;
use altiplano_cost_models::Roofline;
use altiplano_ir::recompute::Recompute;
use rayon::prelude::*;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// The interpretation of the column `recompute`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recomputation {
    /// As inferred from the steps of a campaign.
    #[default]
    Inferred,
    /// As the rows state.
    Stated,
}

/// A campaign whose recomputation is read differently from its statement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Reading {
    pub source: String,
    pub cluster: String,
    pub rows: usize,
    /// Mean absolute percentage error of its rows as stated, with full recomputation, and as read, without any.
    pub stated_mape_percent: f64,
    pub read_mape_percent: f64,
}

/// Minimum number of rows of a campaign for an inference.
const ENOUGH: usize = 16;

/// Upper limit on the ratio of the errors that counts as far better.
const FAR_BETTER: f64 = 0.85;

/// Rows with their inferred recomputation.
pub struct Read {
    /// The recomputation of each row.
    pub recompute: Vec<Recompute>,
    /// Predicted seconds of each row under the catalogue's constants.
    pub predicted_s: Vec<f64>,
    pub readings: Vec<Reading>,
}

/// Predicts rows under the catalogue's constants and infers their recomputation.
pub fn read(file: &Path, rows: &[Row], predictor: &RowPredictor, recomputation: Recomputation) -> Result<Read, Error> {
    let seconds = |recompute: fn(&Row) -> Recompute, rows: &[&Row]| -> Result<Vec<f64>, Error> {
        rows.par_iter()
            .map(|row| {
                let prepared = Prepared::new(row, predictor, recompute(row)).map_err(|error| Error::Row {
                    file: file.to_path_buf(),
                    line: row.line,
                    error: Box::new(error),
                })?;
                Ok(prepared.step_s(&Roofline::new(prepared.device().clone())))
            })
            .collect()
    };
    let mut predicted = seconds(Row::recomputes, &rows.iter().collect::<Vec<_>>())?;
    let mut recompute: Vec<Recompute> = rows.iter().map(Row::recomputes).collect();
    let mut readings = Vec::new();
    let asked = if recomputation == Recomputation::Stated { BTreeMap::new() } else { campaigns(rows) };
    for ((source, cluster), members) in asked {
        let here: Vec<&Row> = members.iter().map(|&i| &rows[i]).collect();
        let without = seconds(|_| Recompute::None, &here)?;
        let measured: Vec<f64> = here.iter().map(|r| r.measured_step_s).collect();
        let stated: Vec<f64> = members.iter().map(|&i| predicted[i]).collect();
        let (stated, read) = (mape_percent(&stated, &measured), mape_percent(&without, &measured));
        if read < FAR_BETTER * stated {
            for (&i, &s) in members.iter().zip(&without) {
                (predicted[i], recompute[i]) = (s, Recompute::None);
            }
            readings.push(Reading {
                source,
                cluster,
                rows: members.len(),
                stated_mape_percent: stated,
                read_mape_percent: read,
            });
        }
    }
    Ok(Read { recompute, predicted_s: predicted, readings })
}

/// Rows that state full recomputation, by source and kind of node, for campaigns with enough of them.
fn campaigns(rows: &[Row]) -> BTreeMap<(String, String), Vec<usize>> {
    let mut campaigns: BTreeMap<(String, String), Vec<usize>> = BTreeMap::new();
    for (i, row) in rows.iter().enumerate().filter(|(_, r)| r.recomputes() == Recompute::Full) {
        let node = row.cluster.split([':', '/']).next().unwrap_or_default();
        campaigns.entry((row.source.clone(), node.to_string())).or_default().push(i);
    }
    campaigns.retain(|_, members| members.len() >= ENOUGH);
    campaigns
}

fn mape_percent(predicted: &[f64], measured: &[f64]) -> f64 {
    let errors = predicted.iter().zip(measured).map(|(p, m)| (p / m - 1.0).abs());
    100.0 * errors.sum::<f64>() / measured.len().max(1) as f64
}
