//! Whether a table's rows did what their column `recompute` says.
//!
//! The column is what an experimenter believed of a framework's configuration, and it moves a step by a third. A campaign (rows
//! of one source on one kind of node) used one configuration, so it can be asked which reading its steps agree with: computing
//! a layer twice makes layers dearer against embeddings and heads, which no other constant does. Where rows that state full
//! recomputation agree far better without it, all of the campaign are read so, and that is said. It is one bit a campaign,
//! for campaigns large enough that it cannot be chance; `--recompute stated` keeps to the letter.

use super::predict::{Judge, Prepared};
use super::table::Row;
use crate::Error;
use altiplano_cost_models::Roofline;
use altiplano_ir::recompute::Recompute;
use rayon::prelude::*;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// How the column `recompute` is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recomputation {
    /// As the steps of a campaign say.
    #[default]
    Inferred,
    /// As the rows state.
    Stated,
}

/// A campaign that is read otherwise than it states.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Reading {
    pub source: String,
    pub cluster: String,
    pub rows: usize,
    /// Mean absolute percentage errors of its rows as stated, with full recomputation, and as read, without any.
    pub stated_mape_percent: f64,
    pub read_mape_percent: f64,
}

/// Rows that a campaign needs to be asked.
const ENOUGH: usize = 16;

/// How much smaller the error of the other reading must be.
const FAR_BETTER: f64 = 0.85;

/// Rows as they are read.
pub struct Read {
    /// What each row computes again.
    pub recompute: Vec<Recompute>,
    /// Seconds of each row under the constants of the catalogue.
    pub predicted_s: Vec<f64>,
    pub readings: Vec<Reading>,
}

/// Reads rows, judged under the constants of the catalogue.
pub fn read(file: &Path, rows: &[Row], judge: &Judge, recomputation: Recomputation) -> Result<Read, Error> {
    let seconds = |recompute: fn(&Row) -> Recompute, rows: &[&Row]| -> Result<Vec<f64>, Error> {
        rows.par_iter()
            .map(|row| {
                let prepared = Prepared::new(row, judge, recompute(row)).map_err(|error| Error::Row {
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

/// Rows that state full recomputation, by source and kind of node, where there are enough.
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
