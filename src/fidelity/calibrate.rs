//! Fits the constants of a device on tables of measured steps: one set for all rows of a device, so that rows which were kept
//! back agree as well.
//!
//! Each constant in turn is moved up and down by a factor, and the move is kept where the mean of the absolute logarithms
//! of predicted over measured falls; the factors shrink until nothing is gained. Tables count alike, however many rows they have,
//! and by the squares of their errors, so that none is bought with another.

use super::predict::{Judge, Prepared};
use super::reading::{self, Recomputation};
use super::table::read_table;
use crate::Error;
use altiplano_cost_models::Roofline;
use altiplano_cost_models::compute::Constants;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// What was fitted for a device.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibrated {
    pub device: String,
    pub before: Constants,
    pub after: Constants,
    /// Rows, and the mean of the absolute logarithms of predicted over measured before and after.
    pub rows: usize,
    pub error_before: f64,
    pub error_after: f64,
}

/// A constant by name: how it is read and set, and its bounds.
pub type Constant = (&'static str, fn(&mut Constants) -> &mut f64, f64, f64);

/// The constants that are free, with their bounds.
pub const FREE: &[Constant] = &[
    ("matmul_efficiency", |c| &mut c.matmul_efficiency, 0.2, 0.9),
    ("memory_efficiency", |c| &mut c.memory_efficiency, 0.2, 0.95),
    ("attention_efficiency", |c| &mut c.attention_efficiency, 0.1, 0.8),
    ("misaligned_loss", |c| &mut c.misaligned_loss, 0.01, 0.6),
    ("tail_loss", |c| &mut c.tail_loss, 0.01, 1.0),
    ("skew_s", |c| &mut c.skew_s, 1e-7, 2e-4),
    ("dispatch_s", |c| &mut c.dispatch_s, 1e-7, 1e-4),
    ("collective_dispatch_s", |c| &mut c.collective_dispatch_s, 1e-7, 1e-3),
];

/// Reads tables and fits the constants of each device in them.
pub fn calibrate(files: &[PathBuf]) -> Result<Vec<Calibrated>, Error> {
    let judge = Judge::default();
    let mut of_device: BTreeMap<String, Vec<Vec<(f64, Prepared)>>> = BTreeMap::new();
    for file in files {
        let rows = read_table(file)?;
        let reading::Read { recompute, .. } = reading::read(file, &rows, &judge, Recomputation::Inferred)?;
        let prepared: Vec<Prepared> = rows
            .par_iter()
            .zip(recompute)
            .map(|(row, recompute)| {
                Prepared::new(row, &judge, recompute).map_err(|error| Error::Row {
                    file: file.clone(),
                    line: row.line,
                    error: Box::new(error),
                })
            })
            .collect::<Result<_, _>>()?;
        let mut here: BTreeMap<String, Vec<(f64, Prepared)>> = BTreeMap::new();
        for (row, prepared) in rows.iter().zip(prepared) {
            here.entry(prepared.device().name.clone()).or_default().push((row.measured_step_s, prepared));
        }
        here.into_iter().for_each(|(device, rows)| of_device.entry(device).or_default().push(rows));
    }
    Ok(of_device.into_iter().map(|(device, rows)| fit(device, &rows)).collect())
}

fn fit(device: String, tables: &[Vec<(f64, Prepared)>]) -> Calibrated {
    let error = |constants: &Constants| -> f64 {
        let each = |(measured, prepared): &(f64, Prepared)| {
            let cost = Roofline::with_constants(prepared.device().clone(), *constants);
            (prepared.step_s(&cost) / measured).ln().abs()
        };
        let of_table = |rows: &Vec<(f64, Prepared)>| {
            // In order, so that the sum does not depend on threads.
            let errors: Vec<f64> = rows.par_iter().map(each).collect();
            (errors.into_iter().sum::<f64>() / rows.len() as f64).powi(2)
        };
        (tables.iter().map(of_table).sum::<f64>() / tables.len() as f64).sqrt()
    };
    let before = altiplano_cost_models::catalogue::constants(&device);
    let error_before = error(&before);
    let (mut best, mut least) = (before, error_before);
    let mut factor: f64 = 1.4;
    while factor > 1.01 {
        let mut gained = false;
        for (_, of, low, high) in FREE {
            for step in [factor, 1.0 / factor] {
                let mut tried = best;
                let value = of(&mut tried);
                *value = (*value * step).clamp(*low, *high);
                let e = error(&tried);
                if e < least * (1.0 - 1e-4) {
                    (best, least, gained) = (tried, e, true);
                    break;
                }
            }
        }
        if !gained {
            factor = factor.sqrt();
        }
    }
    Calibrated {
        device,
        before,
        after: best,
        rows: tables.iter().map(Vec::len).sum(),
        error_before,
        error_after: least,
    }
}
