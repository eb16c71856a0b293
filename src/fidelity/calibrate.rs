//! Fits the constants of a device on tables of measured steps: one set for all rows of a device, so that rows which were kept
//! back agree as well.
//!
//! Each constant in turn is moved up and down by a factor, and the move is kept where the error falls; the factors shrink until
//! nothing is gained. The error of a table is the mean of the absolute logarithms of predicted over measured, and the mean
//! regret of its groups, since predictions are there to choose by. Tables count alike, however many rows they have, and by the
//! squares of their errors, so that none is bought with another.

use super::predict::{Judge, Prepared};
use super::reading::{self, Recomputation};
use super::statistics::group_statistics;
use super::table::read_table;
use crate::Error;
use altiplano_cost_models::Roofline;
use altiplano_cost_models::{quoted, write_constants};
use altiplano_ir::cluster::Constants;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// What was fitted for a device.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibrated {
    pub device: String,
    pub before: Constants,
    pub after: Constants,
    /// The error of all tables before and after.
    pub error_before: f64,
    pub error_after: f64,
    /// What is left, by table.
    pub fits: Vec<Fit>,
}

/// What is left between a table's rows of a device and the constants fitted on them.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    pub table: PathBuf,
    /// Line of each row, and predicted over measured less one.
    pub residuals: Vec<(u64, f64)>,
}

impl Fit {
    pub fn mape_percent(&self) -> f64 {
        100.0 * self.residuals.iter().map(|r| r.1.abs()).sum::<f64>() / self.residuals.len().max(1) as f64
    }

    pub fn bias_percent(&self) -> f64 {
        100.0 * self.residuals.iter().map(|r| r.1).sum::<f64>() / self.residuals.len().max(1) as f64
    }
}

/// The file of devices with these constants, which `--devices` takes.
pub fn device_file(fitted: &[Calibrated]) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = fitted.iter().try_for_each(|f| write_device(&mut out, f));
    out
}

fn write_device(out: &mut String, fitted: &Calibrated) -> std::fmt::Result {
    let name = quoted(&fitted.device);
    writeln!(out, "[device.{name}]\nlike = {name}\n")?;
    write_constants(out, &fitted.device, fitted.after)?;
    for fit in &fitted.fits {
        writeln!(out, "\n[[device.{name}.fit]]")?;
        writeln!(out, "table = {}", quoted(&fit.table.display().to_string()))?;
        writeln!(out, "rows = {}", fit.residuals.len())?;
        writeln!(out, "mape_percent = {:.2}\nbias_percent = {:.2}", fit.mape_percent(), fit.bias_percent())?;
        let list = |each: &dyn Fn(&(u64, f64)) -> String| fit.residuals.iter().map(each).collect::<Vec<_>>().join(", ");
        writeln!(out, "lines = [{}]", list(&|r| r.0.to_string()))?;
        writeln!(out, "residuals_percent = [{}]", list(&|r| format!("{:.1}", 100.0 * r.1)))?;
    }
    writeln!(out)
}

/// The constants that are free, with their bounds.
const FREE: &[(&str, f64, f64)] = &[
    ("matmul_efficiency", 0.2, 0.9),
    ("memory_efficiency", 0.2, 0.95),
    ("attention_efficiency", 0.1, 0.8),
    ("misaligned_loss", 0.01, 0.6),
    ("tail_loss", 0.01, 1.0),
    ("skew_s", 1e-7, 1e-3),
    ("dispatch_s", 1e-7, 1e-4),
    ("collective_dispatch_s", 1e-7, 1e-3),
];

/// Reads tables and fits the constants of each device in them.
pub fn calibrate(files: &[PathBuf]) -> Result<Vec<Calibrated>, Error> {
    let judge = Judge::default();
    let mut of_device: BTreeMap<String, Vec<(&Path, Vec<Measured>)>> = BTreeMap::new();
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
        let mut here: BTreeMap<String, Vec<Measured>> = BTreeMap::new();
        for (row, prepared) in rows.into_iter().zip(prepared) {
            let measured = Measured { line: row.line, group: row.group, step_s: row.measured_step_s, prepared };
            here.entry(measured.prepared.device().name.clone()).or_default().push(measured);
        }
        here.into_iter().for_each(|(device, rows)| of_device.entry(device).or_default().push((file, rows)));
    }
    Ok(of_device.into_iter().map(|(device, rows)| fit(device, &rows)).collect())
}

/// A row and what it took.
struct Measured {
    line: u64,
    group: String,
    step_s: f64,
    prepared: Prepared,
}

/// Seconds of each row under these constants, in their order, so that sums over them do not depend on threads.
fn predicted(rows: &[Measured], constants: Constants) -> Vec<f64> {
    let step_s =
        |row: &Measured| row.prepared.step_s(&Roofline::with_constants(row.prepared.device().clone(), constants));
    rows.par_iter().map(step_s).collect()
}

fn fit(device: String, tables: &[(&Path, Vec<Measured>)]) -> Calibrated {
    let error = |constants: &Constants| -> f64 {
        let of_table = |(_, rows): &(&Path, Vec<Measured>)| {
            let predicted = predicted(rows, *constants);
            let pairs = || rows.iter().zip(&predicted);
            let errors: f64 = pairs().map(|(row, p)| (p / row.step_s).ln().abs()).sum();
            let groups = group_statistics(pairs().map(|(row, &p)| (row.group.as_str(), row.step_s, p)));
            let regret: f64 = groups.iter().map(|g| g.regret_percent / 100.0).sum();
            (errors / rows.len() as f64 + regret / groups.len().max(1) as f64).powi(2)
        };
        (tables.iter().map(of_table).sum::<f64>() / tables.len() as f64).sqrt()
    };
    let before = altiplano_cost_models::catalogue::constants(&device);
    let error_before = error(&before);
    let (mut best, mut least) = (before, error_before);
    let mut factor: f64 = 1.4;
    while factor > 1.005 {
        let (mut gained, mut start) = (false, best);
        for (name, low, high) in FREE {
            for step in [factor, 1.0 / factor] {
                let mut tried = best;
                let Some(value) = tried.by_name(name) else { continue };
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
            continue;
        }
        // What a round of moves did together is done again while it helps (Hooke and Jeeves 1961).
        loop {
            let mut tried = best;
            for (name, low, high) in FREE {
                let (Some(from), Some(value)) = (start.by_name(name).copied(), tried.by_name(name)) else { continue };
                if from > 0.0 {
                    *value = (*value * *value / from).clamp(*low, *high);
                }
            }
            let e = error(&tried);
            if e >= least * (1.0 - 1e-4) {
                break;
            }
            (start, best, least) = (best, tried, e);
        }
    }
    let left = |(table, rows): &(&Path, Vec<Measured>)| {
        let residuals = rows.iter().zip(predicted(rows, best)).map(|(row, p)| (row.line, p / row.step_s - 1.0));
        Fit { table: table.to_path_buf(), residuals: residuals.collect() }
    };
    let fits = tables.iter().map(left).collect();
    Calibrated { device, before, after: best, error_before, error_after: least, fits }
}
