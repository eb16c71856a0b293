//! Measures the accuracy of predictions. Every row of a table is a model, a machine, the degrees given to a framework,
//! and the measured step time.
//!
//! The model is built as from any config, planned with the row's degrees ([`altiplano_planner::search::fixed_degrees`]), lowered and
//! predicted like every plan. Rows of one group train the same model on the same devices, so they test how predictions
//! rank plans. The relevant measure is the regret: how much slower the plan predicted fastest is than the fastest one
//! measured.

mod calibrate;
mod kernel_table;
mod kineto;
mod predict;
mod reading;
mod statistics;
mod table;

pub use calibrate::{Calibrated, Fit, calibrate, device_file};
pub use kernel_table::{KernelErrors, KernelTable, KernelWork, MeasuredKernel, read_kernel_table};
pub use kineto::{Timed, Trace, TraceError};
pub use predict::{Prepared, RowPredictor};
pub use reading::{Reading, Recomputation};
pub use statistics::{GroupStatistics, Statistics, statistics};
pub use table::{MicroBatch, Row, RowModel, TableError, read_table};

use crate::Error;
use altiplano_cost_models::Devices;
use serde::Serialize;
use std::path::Path;

/// A row with its prediction.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PredictedRow {
    pub line: u64,
    pub group: String,
    pub gpus: u32,
    pub global_batch: u64,
    pub model: String,
    /// The degrees, in words.
    pub plan: String,
    pub measured_step_s: f64,
    pub predicted_step_s: f64,
    /// Predicted over measured minus one, in percent.
    pub error_percent: f64,
}

/// The predictions for all rows of a table, and their accuracy.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fidelity {
    #[serde(flatten)]
    pub statistics: Statistics,
    /// Campaigns whose recomputation is inferred to differ from the statement.
    pub readings: Vec<Reading>,
    pub groups: Vec<GroupStatistics>,
    #[serde(rename = "judged")]
    pub rows: Vec<PredictedRow>,
}

/// Reads a table and predicts each of its rows. A row without degrees is an error.
pub fn fidelity(file: &Path, recomputation: Recomputation, devices: Devices) -> Result<Fidelity, Error> {
    let rows = read_table(file)?;
    let reading::Read { predicted_s, readings, .. } =
        reading::read(file, &rows, &RowPredictor::new(devices), recomputation)?;
    let predicted: Vec<PredictedRow> = rows
        .iter()
        .zip(predicted_s)
        .map(|(row, predicted)| PredictedRow {
            line: row.line,
            group: row.group.clone(),
            gpus: row.gpus,
            global_batch: row.global_batch,
            model: row.model.name(),
            plan: row.plan(),
            measured_step_s: row.measured_step_s,
            predicted_step_s: predicted,
            error_percent: 100.0 * (predicted / row.measured_step_s - 1.0),
        })
        .collect();
    let (statistics, groups) = statistics(&predicted);
    Ok(Fidelity { statistics, readings, groups, rows: predicted })
}
