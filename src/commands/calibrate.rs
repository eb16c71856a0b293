//! `altiplano calibrate`: constants of devices fitted on measured steps.

use crate::commands::say;
use altiplano::Error;
use altiplano::fidelity::calibrate;
use clap::Args;
use std::path::PathBuf;

/// Fit the constants of a device on tables of measured steps
#[derive(Args)]
pub struct Calibrate {
    /// Tables as `altiplano fidelity` reads them
    #[arg(required = true)]
    tables: Vec<PathBuf>,
}

impl Calibrate {
    pub fn run(self) -> Result<(), Error> {
        for fitted in calibrate(&self.tables)? {
            say(format!(
                "{}: {} rows, error {:.4} -> {:.4}",
                fitted.device, fitted.rows, fitted.error_before, fitted.error_after
            ))?;
            say(format!("{:#?}", fitted.after))?;
        }
        Ok(())
    }
}
