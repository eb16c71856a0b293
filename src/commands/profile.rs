//! `altiplano profile`: what the kernels of plans take on this machine, on its processor or its GPUs.

use crate::commands::options::gpus;
use crate::commands::say;
use crate::progress::Bar;
use altiplano::planner::Progress;
use altiplano::profiled::{measured_gpu_profile, measured_profile};
use altiplano::units::seconds;
use altiplano::{Error, expect_writable, write_file};
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Measure what kernels, collectives and transfers take on this machine, for --profile of plan, run, verify and simulate
#[derive(Args)]
pub struct Profile {
    /// What is measured: cpu, the workers of `local:N`, or cuda, GPUs
    #[arg(long, value_enum, default_value = "cpu")]
    device: Device,
    /// Few and small sizes in a few seconds, to try it out
    #[arg(long)]
    quick: bool,
    /// Write the profile to this file instead of stdout
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq)]
enum Device {
    Cpu,
    Cuda,
}

impl Profile {
    pub fn run(self) -> Result<(), Error> {
        self.output.as_deref().map_or(Ok(()), expect_writable)?;
        let gpus = (self.device == Device::Cuda).then(gpus).transpose()?;
        let bar = Bar::new();
        let mut tell = |what: &str, done, total| bar.step(what, done, total);
        let profile = match &gpus {
            Some(options) => measured_gpu_profile(options, self.quick, &mut tell)?,
            None => measured_profile(self.quick, &mut tell),
        };
        drop(bar);
        let found = profile.outliers;
        eprintln!(
            "measured {} series in {}; of {} samples {} took more than twice the median of their point, the worst {:.1} times",
            profile.series.len(),
            seconds(profile.seconds),
            found.samples,
            found.outliers,
            found.largest
        );
        match &self.output {
            Some(file) => write_file(file, &profile.to_json()),
            None => say(profile.to_json().trim_end()),
        }
    }
}
