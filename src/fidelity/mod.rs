//! How well predictions agree with measured steps: every row of a table is a model, a machine, the degrees that a framework
//! was told, and the seconds that a step took.
//!
//! The model is built from the row as from any config, planned with the row's degrees ([`altiplano_planner::fixed`]),
//! lowered and judged like every plan. Rows of one group train the same model on the same devices, so they say whether the
//! judge ranks plans rightly: what matters is how much slower its favourite is than the fastest one measured.

mod calibrate;
mod kineto;
mod predict;
mod reading;
mod statistics;
mod table;

pub use calibrate::{Calibrated, Fit, calibrate, device_file};
pub use kineto::{Timed, Trace, TraceError, read_trace};
pub use predict::{Judge, Prepared};
pub use reading::{Reading, Recomputation};
pub use statistics::{GroupStatistics, Statistics, statistics};
pub use table::{MicroBatch, Row, TableError, read_table};

use crate::Error;
use altiplano_cost_models::Devices;
use serde::Serialize;
use std::path::Path;

/// A row with its prediction.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Judged {
    pub line: u64,
    pub group: String,
    pub gpus: u32,
    pub global_batch: u64,
    pub model: String,
    /// The degrees, for the reader.
    pub plan: String,
    pub measured_step_s: f64,
    pub predicted_step_s: f64,
    /// Predicted over measured, less one.
    pub error_percent: f64,
}

/// All rows of a table judged, and how good the judge is.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fidelity {
    #[serde(flatten)]
    pub statistics: Statistics,
    /// Campaigns whose rows are read otherwise than they state.
    pub readings: Vec<Reading>,
    pub groups: Vec<GroupStatistics>,
    pub judged: Vec<Judged>,
}

/// Reads a table and predicts each of its rows. Rows that state no plan are an error, since there is nothing to predict.
pub fn fidelity(file: &Path, recomputation: Recomputation, devices: Devices) -> Result<Fidelity, Error> {
    let rows = read_table(file)?;
    let reading::Read { predicted_s, readings, .. } = reading::read(file, &rows, &Judge::new(devices), recomputation)?;
    let judged: Vec<Judged> = rows
        .iter()
        .zip(predicted_s)
        .map(|(row, predicted)| Judged {
            line: row.line,
            group: row.group.clone(),
            gpus: row.gpus,
            global_batch: row.global_batch,
            model: row.model.clone(),
            plan: row.plan(),
            measured_step_s: row.measured_step_s,
            predicted_step_s: predicted,
            error_percent: 100.0 * (predicted / row.measured_step_s - 1.0),
        })
        .collect();
    let (statistics, groups) = statistics(&judged);
    Ok(Fidelity { statistics, readings, groups, judged })
}
