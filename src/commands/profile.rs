//! `altiplano profile`: what the kernels of the CPU runtime take on this machine.

use crate::commands::say;
use crate::progress::Bar;
use altiplano::planner::Progress;
use altiplano::profiled::measured_profile;
use altiplano::units::seconds;
use altiplano::{Error, expect_writable, write_file};
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Measure what kernels, collectives and transfers take on this machine, for --profile of plan, run, verify and simulate
#[derive(Args)]
pub struct Profile {
    /// What is measured: cpu, the workers of `local:N`
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
}

impl Profile {
    pub fn run(self) -> Result<(), Error> {
        let Device::Cpu = self.device;
        self.output.as_deref().map_or(Ok(()), expect_writable)?;
        let bar = Bar::new();
        let profile = measured_profile(self.quick, &mut |what, done, total| bar.step(what, done, total));
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
