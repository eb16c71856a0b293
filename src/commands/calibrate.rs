//! `altiplano calibrate`: fits the constants of devices on measured steps.

use crate::commands::say;
use altiplano::fidelity::{calibrate, device_file};
use altiplano::{Error, expect_writable, write_file};
use clap::Args;
use std::path::PathBuf;

/// Fit the constants of a device on tables of measured steps and on timed kernels
#[derive(Args)]
pub(crate) struct Calibrate {
    /// Tables as for `altiplano fidelity`, Chrome traces of `torch.profiler` recorded with `record_shapes=True`, or
    /// traces of `altiplano run --trace`
    #[arg(required = true)]
    tables: Vec<PathBuf>,
    /// Write a devices file for --devices, with the fitted constants and the residual of each row
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

impl Calibrate {
    pub(crate) fn run(self) -> Result<(), Error> {
        self.output.as_deref().map_or(Ok(()), expect_writable)?;
        let fitted = calibrate(&self.tables)?;
        for device in &fitted {
            let (before, after) = (device.error_before, device.error_after);
            say(format!("{}: error {before:.4} -> {after:.4}", device.device))?;
            for (name, value) in device.at_bounds() {
                complain!("warning: {name} is {value}, the limit of the search: the measurements do not determine it");
            }
            for fit in &device.fits {
                let (rows, mape, bias) = (fit.residuals.len(), fit.mape_percent(), fit.bias_percent());
                say(format!("  {}: {rows} rows, {mape:.1} % off, bias {bias:+.1} %", fit.table.display()))?;
            }
        }
        let text = device_file(&fitted);
        match &self.output {
            Some(file) => write_file(file, &text),
            None => say(text),
        }
    }
}
