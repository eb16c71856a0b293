//! `altiplano profile`: measures the kernels of plans on this machine's CPU or GPUs or by XLA, and the communication
//! between ranks.

use crate::commands::options::{DeviceKind, gpus};
use crate::commands::ranks::{Kind, MeasuringArguments};
use crate::commands::say;
use crate::progress::Bar;
use altiplano::cost_models::profile::Profile as Measured;
#[cfg(feature = "mpi")]
use altiplano::measured_costs::{load_profile, with_links};
use altiplano::measured_costs::{measured_gpu_profile, measured_profile, measured_xla_profile};
use altiplano::planner::Progress;
use altiplano::training::team::Team;
use altiplano::units::seconds;
use altiplano::{Error, expect_writable, write_file};
use clap::Args;
use std::path::{Path, PathBuf};

/// Measure kernels, collectives and transfers on this machine, for --profile of plan, run, verify and simulate
#[derive(Args)]
pub(crate) struct Profile {
    /// Device to measure; cpu stands for the workers of `local:N`, and `altiplano devices` lists all
    #[arg(long, value_name = "DEVICE", value_enum, default_value_t = DeviceKind::Cpu)]
    device: DeviceKind,
    /// The PJRT plugin of `--device xla` [default: that of ALTIPLANO_PJRT_PLUGIN or of the Python environment]
    #[arg(long, value_name = "FILE", requires = "device")]
    plugin: Option<PathBuf>,
    /// Measure only a few small sizes, in a few seconds
    #[arg(long)]
    quick: bool,
    /// With --engine mpi: a profile of one node, in which the measured collectives between ranks replace its own
    #[arg(long, value_name = "FILE")]
    add_to: Option<PathBuf>,
    /// Write the profile to this file instead of stdout
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    engine: MeasuringArguments,
}

impl Profile {
    pub(crate) fn run(self) -> Result<(), Error> {
        if self.engine.is_mpi() && self.device.kind() != Kind::Cpus {
            let problem = "measures links between MPI ranks on CPUs, not on other devices";
            return Err(Error::Option { option: "--engine mpi", problem });
        }
        self.engine.expect_alone()?;
        match (&self.add_to, self.engine.is_mpi()) {
            (None, false) => self.measure_kernels(),
            (Some(profile), true) => self.engine.clone().on_team(|team| self.measure_links(profile, team)),
            (None, true) => {
                let problem = "measures links between ranks, and needs --add-to FILE: the profile of a node, written there by `altiplano profile -o FILE`";
                Err(Error::Option { option: "--engine mpi", problem })
            }
            (Some(_), false) => {
                let problem = "applies only to links between ranks (--engine mpi)";
                Err(Error::Option { option: "--add-to", problem })
            }
        }
    }

    fn measure_kernels(&self) -> Result<(), Error> {
        self.output.as_deref().map_or(Ok(()), expect_writable)?;
        let xla = self.device.xla(self.plugin.as_deref())?;
        let gpus = (self.device.kind() == Kind::Gpus).then(gpus).transpose()?;
        let bar = Bar::new();
        let mut tell = |what: &str, done, total| bar.step(what, done, total);
        let profile = match (&gpus, &xla) {
            (Some(options), _) => measured_gpu_profile(options, self.quick, &mut tell)?,
            (_, Some(options)) => measured_xla_profile(options, self.quick, &mut tell)?,
            _ => measured_profile(self.quick, &mut tell)?,
        };
        drop(bar);
        complain!("measured {} series in {}; {}", profile.series.len(), seconds(profile.seconds), outliers(&profile));
        self.write(&profile)
    }

    #[cfg(not(feature = "mpi"))]
    fn measure_links(&self, _: &Path, _: Team) -> Result<(), Error> {
        Ok(())
    }

    /// Only the first rank reads and writes files.
    #[cfg(feature = "mpi")]
    fn measure_links(&self, profile: &Path, team: Team) -> Result<(), Error> {
        use altiplano::runtime::mpi::measure::measure_links;
        let leads = team.leads();
        let Team::Ranks { world, mpi: Some((all, _)), .. } = team else { return Ok(()) };
        let profile = leads.then(|| load_profile(profile)).transpose()?;
        self.output.as_deref().filter(|_| leads).map_or(Ok(()), expect_writable)?;
        world.expect_same("other options", if self.quick { "quick" } else { "" })?;
        let start = std::time::Instant::now();
        let bar = leads.then(Bar::new);
        let mut tell = |what: &str, done, total| bar.iter().for_each(|bar| bar.step(what, done, total));
        let (links, world) = measure_links(world, all, self.quick, &mut tell)?;
        drop(bar);
        if let (Some(profile), Some(found)) = (profile, links.found) {
            let (count, taken_s) = (found.measured.len(), start.elapsed().as_secs_f64());
            let [nodes, ranks] = [links.nodes, links.ranks_on_node];
            let profile = with_links(profile, found, [nodes, ranks], taken_s);
            complain!("measured {count} series of links in {} on {nodes} x {ranks} ranks", seconds(taken_s));
            self.write(&profile)?;
        }
        Ok(world.finish()?)
    }

    fn write(&self, profile: &Measured) -> Result<(), Error> {
        match &self.output {
            Some(file) => write_file(file, &profile.to_json()),
            None => say(profile.to_json().trim_end()),
        }
    }
}

fn outliers(profile: &Measured) -> String {
    let found = profile.outliers;
    format!(
        "of {} samples {} took more than twice the median of their point, the worst {:.1} times",
        found.samples, found.outliers, found.largest
    )
}
