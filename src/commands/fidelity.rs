//! `altiplano fidelity`: compares predictions with a table of measured steps.

use crate::commands::say;
use altiplano::fidelity::{Fidelity as Found, KernelTable, Recomputation, fidelity, read_kernel_table};
use altiplano::{Error, load_devices};
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Predict every row of a table of measured training steps or kernels, and report the accuracy
#[derive(Args)]
pub(crate) struct Fidelity {
    /// A CSV file with a measured step or kernel per row, which may be compressed by gzip (columns in
    /// docs/simulation.md)
    table: PathBuf,
    /// Print JSON: the figures, and every row with its prediction
    #[arg(long)]
    json: bool,
    /// Use the column `recompute` as stated, or infer it per campaign (rows of one source and kind of node)
    #[arg(long, value_enum, default_value = "inferred")]
    recompute: Recompute,
    /// A devices file of `altiplano calibrate`, which replaces catalogue devices of the same names
    #[arg(long, value_name = "FILE")]
    devices: Option<PathBuf>,
    /// Print only the figures
    #[arg(long)]
    summary: bool,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq)]
enum Recompute {
    Inferred,
    Stated,
}

impl Fidelity {
    pub(crate) fn run(self) -> Result<(), Error> {
        let recomputation = match self.recompute {
            Recompute::Inferred => Recomputation::Inferred,
            Recompute::Stated => Recomputation::Stated,
        };
        let devices = self.devices.as_deref().map(load_devices).transpose()?.unwrap_or_default();
        if let Some(table) = read_kernel_table(&self.table, &devices)? {
            return self.kernels(&table);
        }
        let found = fidelity(&self.table, recomputation, devices)?;
        if self.json {
            let text = serde_json::to_string_pretty(&found).map_err(|e| Error::Output(e.into()))?;
            return say(text);
        }
        if !self.summary {
            rows(&found)?;
        }
        figures(&found)
    }

    /// Prints the errors of a table of kernels.
    fn kernels(&self, table: &KernelTable) -> Result<(), Error> {
        let errors = table.errors();
        if self.json {
            return say(serde_json::to_string_pretty(&errors).map_err(|e| Error::Output(e.into()))?);
        }
        let width = errors.iter().map(|e| e.subject.len()).max().unwrap_or(0);
        say(format!("{:16} {:width$}   rows  median  90th percentile     bias", "device", "kernels"))?;
        for e in &errors {
            say(format!(
                "{:16} {:width$} {:6} {:5.1} % {:14.1} % {:+6.1} %",
                e.device, e.subject, e.rows, e.median_percent, e.tenth_percent, e.bias_percent
            ))?;
        }
        for (system, rows) in &table.left_out {
            say(format!("note: {rows} rows of {system}, which is not in the catalogue, are left out"))?;
        }
        Ok(())
    }
}

fn rows(found: &Found) -> Result<(), Error> {
    let width = |text: fn(&altiplano::fidelity::PredictedRow) -> &str| {
        found.rows.iter().map(|r| text(r).len()).max().unwrap_or(0)
    };
    let (group, plan) = (width(|r| &r.group), width(|r| &r.plan));
    say(format!("{:group$}  {:plan$}  measured s  predicted s    error", "group", "plan"))?;
    for row in &found.rows {
        say(format!(
            "{:group$}  {:plan$}  {:10.4}  {:11.4}  {:+6.1} %",
            row.group, row.plan, row.measured_step_s, row.predicted_step_s, row.error_percent
        ))?;
    }
    say("")
}

fn figures(found: &Found) -> Result<(), Error> {
    let s = &found.statistics;
    for reading in &found.readings {
        say(format!(
            "note: {} rows on {} state full recomputation, but their step times match none, and they are predicted so (mean error {:.1} % instead of {:.1} %; --recompute stated keeps to the table)",
            reading.rows, reading.cluster, reading.read_mape_percent, reading.stated_mape_percent
        ))?;
    }
    say(format!("rows                                  {}", s.rows))?;
    say(format!("mean absolute percentage error        {:.1} %", s.mape_percent))?;
    say(format!("bias                                  {:+.1} %", s.bias_percent))?;
    if let (Some(median), Some(least)) = (s.spearman, s.spearman_least) {
        say(format!("rank correlation within groups        {median:.3} (median), {least:.3} (lowest)"))?;
    }
    if let (Some(mean), Some(most)) = (s.regret_percent, s.regret_most_percent) {
        say(format!("regret of the choice in each group    {mean:.1} % (mean), {most:.1} % (highest)"))?;
        say(format!("choice among the measured best three  {} of {} groups", s.among_best_three, s.compared_groups))?;
    }
    Ok(())
}
