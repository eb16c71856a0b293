//! Fits the constants of a device on tables of measured steps, on tables of kernels, and on kernels timed by a profiler. One set of constants
//! serves all rows of a device, so that held-out rows agree as well.
//!
//! Coordinate search: each constant in turn is moved up and down by a factor, and the move is kept if the error falls.
//! The factors shrink until nothing improves. The error of a table is the mean absolute logarithm of predicted over
//! measured, plus the mean regret of its groups, since predictions serve to choose plans. Tables have equal weight,
//! whatever their number of rows, and enter by the squares of their errors, so that none improves at the expense of
//! another.

use super::kernel_table::{MeasuredKernel, read_kernel_table};
use super::kineto::{Timed, read_trace};
use super::predict::{Prepared, RowPredictor};
use super::reading::{self, Recomputation};
use super::statistics::{Comparable, group_statistics};
use super::table::{Row, read_table};
use crate::{Error, read_bytes};
use altiplano_cost_models::compute::Compute;
use altiplano_cost_models::kernels::Kernel;
use altiplano_cost_models::{Devices, Roofline, catalogue, quoted, write_constants};
use altiplano_ir::cluster::{Constants, Device};
use altiplano_ir::recompute::Recompute;
use altiplano_runtime::random::Stream;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Number of joint moves of several constants per round.
const DRAWS: u64 = 8;

/// The result of fitting a device.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibrated {
    pub device: String,
    pub before: Constants,
    pub after: Constants,
    /// The error over all tables, before and after.
    pub error_before: f64,
    pub error_after: f64,
    /// Residuals by table.
    pub fits: Vec<Fit>,
}

/// The residuals of a table's rows of a device under the fitted constants.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    pub table: PathBuf,
    /// The line of each row, or the shape of each kernel, with predicted over measured minus one.
    pub residuals: Vec<(String, f64)>,
}

impl Calibrated {
    /// Constants that were fitted to a bound, which means that the measurements do not determine them.
    pub fn at_bounds(&self) -> Vec<(&'static str, f64)> {
        let value = |mut constants: Constants, name: &str| constants.by_name(name).copied().unwrap_or(0.0);
        let all = FREE.iter().map(|&(name, low, high)| (name, low, high, value(self.after, name)));
        let found =
            all.filter(|&(name, low, high, now)| (now <= low || now >= high) && value(self.before, name) != now);
        found.map(|(name, _, _, now)| (name, now)).collect()
    }
}

impl Fit {
    pub fn mape_percent(&self) -> f64 {
        100.0 * self.residuals.iter().map(|r| r.1.abs()).sum::<f64>() / self.residuals.len().max(1) as f64
    }

    pub fn bias_percent(&self) -> f64 {
        100.0 * self.residuals.iter().map(|r| r.1).sum::<f64>() / self.residuals.len().max(1) as f64
    }
}

/// The devices file with these constants, for `--devices`.
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
        let list =
            |each: &dyn Fn(&(String, f64)) -> String| fit.residuals.iter().map(each).collect::<Vec<_>>().join(", ");
        writeln!(out, "measured = [{}]", list(&|r| quoted(&r.0)))?;
        writeln!(out, "residuals_percent = [{}]", list(&|r| format!("{:.1}", 100.0 * r.1)))?;
    }
    writeln!(out)
}

/// The free constants, with their bounds.
const FREE: &[(&str, f64, f64)] = &[
    ("matmul_efficiency", 0.2, 0.9),
    ("sustained_efficiency", 0.5, 1.0),
    ("memory_efficiency", 0.2, 0.95),
    ("update_efficiency", 0.2, 0.95),
    ("attention_efficiency", 0.1, 0.8),
    ("misaligned_loss", 0.01, 0.6),
    ("tail_loss", 0.01, 1.0),
    ("collective_efficiency", 0.3, 1.0),
    ("skew_s", 1e-7, 1e-3),
    ("dispatch_s", 1e-7, 1e-4),
    ("collective_dispatch_s", 1e-7, 1e-3),
];

/// A measurement: a step with its group, or a kernel.
struct Measured {
    name: String,
    seconds: f64,
    what: What,
}

enum What {
    Step {
        group: String,
        gpus: u32,
        global_batch: u64,
        prepared: Box<Prepared>,
    },
    Kernel(Box<Kernel>),
    /// A row of a table of kernels.
    Alone(Box<MeasuredKernel>),
}

impl Measured {
    fn predicted_s(&self, device: &Device, constants: Constants) -> f64 {
        match &self.what {
            What::Step { prepared, .. } => prepared.step_s(&Roofline::with_constants(device.clone(), constants)),
            What::Alone(kernel) => kernel.predicted_s(constants),
            What::Kernel(kernel) => Compute::alone(device.clone(), constants).kernel(kernel).seconds,
        }
    }
}

/// The measurements of a device in one file.
struct Table<'a> {
    file: &'a Path,
    rows: Vec<Measured>,
}

impl Table<'_> {
    /// Predicted seconds of each row under these constants. They are in order, so that sums do not depend on threads.
    fn predicted(&self, device: &Device, constants: Constants) -> Vec<f64> {
        self.rows.par_iter().map(|row| row.predicted_s(device, constants)).collect()
    }

    fn error(&self, device: &Device, constants: Constants) -> f64 {
        let predicted = self.predicted(device, constants);
        let pairs = || self.rows.iter().zip(&predicted);
        let errors: f64 = pairs().map(|(row, p)| (p / row.seconds).ln().abs()).sum();
        let steps = pairs().filter_map(|(row, &p)| match &row.what {
            What::Step { group, gpus, global_batch, .. } => {
                Some((Comparable { group, gpus: *gpus, global_batch: *global_batch }, row.seconds, p))
            }
            What::Kernel(_) | What::Alone(_) => None,
        });
        let groups = group_statistics(steps);
        let regret: f64 = groups.iter().map(|g| g.regret_percent / 100.0).sum();
        errors / self.rows.len() as f64 + regret / groups.len().max(1) as f64
    }
}

/// Reads tables of steps and traces of kernels, and fits the constants of each device in them.
pub fn calibrate(files: &[PathBuf]) -> Result<Vec<Calibrated>, Error> {
    let predictor = RowPredictor::default();
    let mut of_device: BTreeMap<String, (Device, Vec<Table<'_>>)> = BTreeMap::new();
    for file in files {
        let bytes = read_bytes(file)?;
        // A table starts with its column names; a trace is a JSON document.
        let is_trace = matches!(bytes.iter().find(|b| !b.is_ascii_whitespace()), Some(b'{' | b'['));
        let measured = match read_kernel_table(file, &Devices::default())? {
            Some(table) => table.rows.into_iter().map(alone).collect(),
            None if is_trace => kernels(file, &bytes)?,
            None => steps(file, &predictor)?,
        };
        let mut here: BTreeMap<String, (Device, Vec<Measured>)> = BTreeMap::new();
        for (device, row) in measured {
            here.entry(device.name.clone()).or_insert_with(|| (device, Vec::new())).1.push(row);
        }
        for (name, (device, rows)) in here {
            of_device.entry(name).or_insert_with(|| (device, Vec::new())).1.push(Table { file, rows });
        }
    }
    Ok(of_device.into_values().map(|(device, tables)| fit(&device, &tables)).collect())
}

fn steps(file: &Path, predictor: &RowPredictor) -> Result<Vec<(Device, Measured)>, Error> {
    let rows = read_table(file)?;
    let reading::Read { recompute, .. } = reading::read(file, &rows, predictor, Recomputation::Inferred)?;
    let measured = |(row, recompute): (Row, Recompute)| {
        let wrong = |error| Error::Row { file: file.to_path_buf(), line: row.line, error: Box::new(error) };
        let prepared = Box::new(Prepared::new(&row, predictor, recompute).map_err(wrong)?);
        let device = prepared.device().clone();
        let what = What::Step { group: row.group, gpus: row.gpus, global_batch: row.global_batch, prepared };
        Ok((device, Measured { name: row.line.to_string(), seconds: row.measured_step_s, what }))
    };
    rows.into_par_iter().zip(recompute).map(measured).collect()
}

fn alone(kernel: MeasuredKernel) -> (Device, Measured) {
    let (name, seconds) = (format!("{} {}", kernel.line, kernel.name), kernel.seconds);
    (kernel.device.clone(), Measured { name, seconds, what: What::Alone(Box::new(kernel)) })
}

fn kernels(file: &Path, bytes: &[u8]) -> Result<Vec<(Device, Measured)>, Error> {
    let wrong = |error| Error::Trace { file: file.to_path_buf(), error: Box::new(error) };
    let trace = read_trace(bytes).map_err(wrong)?;
    let measured = |timed: Timed| {
        let what = What::Kernel(Box::new(timed.kernel));
        (trace.device.clone(), Measured { name: timed.name, seconds: timed.seconds, what })
    };
    Ok(trace.kernels.into_iter().map(measured).collect())
}

fn fit(device: &Device, tables: &[Table<'_>]) -> Calibrated {
    // Steps alone or kernels alone say only the product of the two.
    let of_steps = |row: &&Measured| matches!(row.what, What::Step { .. });
    let all = || tables.iter().flat_map(|table| &table.rows);
    let both = all().filter(of_steps).count() > 0 && all().any(|row| !of_steps(&row));
    let free: Vec<_> = FREE.iter().filter(|(name, ..)| both || *name != "sustained_efficiency").collect();
    let error = |constants: &Constants| -> f64 {
        let squares = tables.iter().map(|table| table.error(device, *constants).powi(2));
        (squares.sum::<f64>() / tables.len() as f64).sqrt()
    };
    let before = catalogue::constants(&device.name);
    let error_before = error(&before);
    let (mut best, mut least) = (before, error_before);
    let (directions, mut draws) = (Stream::new(1, "directions"), 0);
    let mut factor: f64 = 1.4;
    while factor > 1.005 {
        let (mut gained, mut start) = (false, best);
        let mut attempt = |exponents: &dyn Fn(usize) -> f64| {
            let mut tried = best;
            for (i, (name, low, high)) in free.iter().enumerate() {
                if let Some(value) = tried.by_name(name) {
                    *value = (*value * factor.powf(exponents(i))).clamp(*low, *high);
                }
            }
            let e = error(&tried);
            let better = e < least * (1.0 - 1e-4);
            if better {
                (best, least, gained) = (tried, e, true);
            }
            better
        };
        for i in 0..free.len() {
            let one = |up: f64| move |j: usize| if i == j { up } else { 0.0 };
            let _ = attempt(&one(1.0)) || attempt(&one(-1.0));
        }
        // Some constants only improve the error together, because absolute errors have kinks.
        for _ in 0..DRAWS {
            let drawn = |i: usize| directions.below(draws * free.len() as u64 + i as u64, 3) as f64 - 1.0;
            let _ = attempt(&drawn) || attempt(&|i| -drawn(i));
            draws += 1;
        }
        if !gained {
            factor = factor.sqrt();
            continue;
        }
        // Repeat the combined moves of a round while that helps (Hooke and Jeeves 1961).
        loop {
            let mut tried = best;
            for (name, low, high) in &free {
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
    let left = |table: &Table<'_>| {
        let pairs = table.rows.iter().zip(table.predicted(device, best));
        let residuals = pairs.map(|(row, p)| (row.name.clone(), p / row.seconds - 1.0)).collect();
        Fit { table: table.file.to_path_buf(), residuals }
    };
    let fits = tables.iter().map(left).collect();
    Calibrated { device: device.name.clone(), before, after: best, error_before, error_after: least, fits }
}
