//! `--engine`: runs in this process alone, or as one of several that run a plan together. It also ends all of them if
//! one fails.

use crate::commands::command_line;
use altiplano::Error;
use altiplano::runtime::RuntimeError;
use altiplano::runtime::error::RendezvousError;
use altiplano::runtime::ranks::World;
use altiplano::runtime::ranks::connect::Network;
use altiplano::runtime::ranks::rendezvous::{Place, Rendezvous, meet};
use altiplano::runtime::ranks::watch::{Ends, leave};
use altiplano::training::team::Team;
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;

/// The longest time limit: a week.
const LONGEST_S: u64 = 7 * 24 * 3600;

/// The engine of a plan, and the coordination of processes that run it together.
#[derive(Args, Clone, Debug)]
pub(crate) struct RankArguments {
    /// Run all devices in this process, CPU workers as threads (threads); GPUs or XLA's devices of processes that srun or
    /// torchrun started (processes); or one device per MPI rank (mpi); see docs/cluster.md [default: threads; after a
    /// launcher: processes with --device cuda or xla, else none, which is an error]
    #[arg(long, value_name = "ENGINE", value_enum)]
    engine: Option<EngineName>,
    #[command(flatten)]
    lost: LostArguments,
    /// A shared directory in which the processes of --engine processes find each other [default: under Slurm,
    /// .altiplano-rendezvous in the submission directory]
    #[arg(long, value_name = "DIR")]
    rendezvous: Option<PathBuf>,
    /// Seconds for which processes wait for all others
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=LONGEST_S))]
    rendezvous_timeout: u64,
    /// The network in which processes of --engine processes listen for each other: 10.1.0.0/16, or an address [default:
    /// this host alone if the launcher says that all are on it, else all networks]
    #[arg(long, value_name = "NETWORK")]
    listen: Option<Network>,
    /// Sum in the order of devices, so that losses match those of threads bit by bit; slower
    #[arg(long)]
    reduce_in_order: bool,
    /// Assign ranks to devices in order, regardless of the plan's nodes
    #[arg(long)]
    ranks_anywhere: bool,
}

/// The devices that run a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Cpus,
    Gpus,
    Xla,
}

/// Measures in this process alone, or with the other MPI ranks.
#[derive(Args, Clone, Debug)]
pub(crate) struct MeasuringArguments {
    /// Measure the threads of this process, or the links between MPI ranks (docs/cluster.md) [default: threads]
    #[arg(long, value_name = "ENGINE", value_enum)]
    engine: Option<MeasuringEngine>,
    #[command(flatten)]
    lost: LostArguments,
}

#[derive(Args, Clone, Copy, Debug)]
struct LostArguments {
    /// Seconds of silence after which a rank counts as lost
    #[arg(long, value_name = "SECONDS", default_value_t = 6, value_parser = clap::value_parser!(u64).range(2..=LONGEST_S))]
    lost_after: u64,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq)]
enum EngineName {
    Threads,
    Processes,
    Mpi,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq)]
enum MeasuringEngine {
    Threads,
    Mpi,
}

impl RankArguments {
    /// The engine of the plan, for which launchers set a default.
    fn engine(&self, kind: Kind) -> Result<EngineName, Error> {
        match self.engine {
            Some(engine) => Ok(engine),
            None => match place()?.filter(|place| place.size > 1) {
                Some(_) if kind != Kind::Cpus => Ok(EngineName::Processes),
                Some(place) => Err(refused(&place, &["--engine", "mpi"])),
                None => Ok(EngineName::Threads),
            },
        }
    }

    /// The option that makes this process one of several, as the user would type it.
    pub(crate) fn option_of_many(&self, kind: Kind) -> Result<Option<&'static str>, Error> {
        Ok(match self.engine(kind)? {
            EngineName::Threads => None,
            EngineName::Processes => Some("--engine processes"),
            EngineName::Mpi => Some("--engine mpi"),
        })
    }

    /// Runs a function on the processes that run the plan. If there are several and it fails on one, it ends all of them
    /// and does not return.
    pub(crate) fn on_team(self, kind: Kind, run: impl FnOnce(Team) -> Result<(), Error>) -> Result<(), Error> {
        let engine = self.engine(kind)?;
        let of_ranks = "applies only to MPI ranks; it needs --engine mpi";
        let of_cpus = "applies only to CPU workers; NCCL and XLA choose their own order of summation";
        let of_many = "applies only to several processes; it needs --engine processes or mpi";
        let of_gpus =
            "needs --device cuda or xla; CPU workers of several processes communicate over MPI, with --engine mpi";
        let of_processes = "applies only to --engine processes";
        let refused = [
            (engine == EngineName::Processes && kind == Kind::Cpus, "--engine processes", of_gpus),
            (self.reduce_in_order && engine != EngineName::Mpi, "--reduce-in-order", of_ranks),
            (self.reduce_in_order && kind != Kind::Cpus, "--reduce-in-order", of_cpus),
            (self.ranks_anywhere && engine == EngineName::Threads, "--ranks-anywhere", of_many),
            (self.rendezvous.is_some() && engine != EngineName::Processes, "--rendezvous", of_processes),
            (self.listen.is_some() && engine != EngineName::Processes, "--listen", of_processes),
        ];
        if let Some((_, option, problem)) = refused.into_iter().find(|(refused, ..)| *refused) {
            return Err(Error::Option { option, problem });
        }
        match engine {
            EngineName::Threads => run(Team::Alone),
            EngineName::Processes => self.on_processes(run),
            EngineName::Mpi => on_ranks(self.lost, self.reduce_in_order, self.ranks_anywhere, run),
        }
    }

    fn on_processes(self, run: impl FnOnce(Team) -> Result<(), Error>) -> Result<(), Error> {
        let failed = |error| RuntimeError::Rendezvous(Box::new(error));
        let place = place()?.ok_or_else(|| failed(RendezvousError::NoLauncher))?;
        let none = || failed(RendezvousError::NoDirectory { rank: place.rank, size: place.size });
        let directory = self.rendezvous.or_else(|| place.shared.clone()).ok_or_else(none)?;
        let timeout = Duration::from_secs(self.rendezvous_timeout);
        let rendezvous = Rendezvous { directory, timeout, listen: self.listen };
        let met = meet(&place, &rendezvous, Duration::from_secs(self.lost.lost_after), ends());
        let world = match met {
            // The first process has reported the reason for all.
            Err(RuntimeError::Rendezvous(error)) if matches!(*error, RendezvousError::Ended) => leave(2),
            met => met?,
        };
        let team = |world| Team::Ranks {
            world,
            anywhere: self.ranks_anywhere,
            #[cfg(feature = "mpi")]
            mpi: None,
        };
        on_world(world, |world| run(team(world)))
    }
}

impl MeasuringArguments {
    pub(crate) fn is_mpi(&self) -> bool {
        self.engine == Some(MeasuringEngine::Mpi)
    }

    /// Refuses to measure a machine in several processes at once, as a launcher would start them.
    pub(crate) fn expect_alone(&self) -> Result<(), Error> {
        match place()?.filter(|place| place.size > 1 && self.engine.is_none()) {
            Some(place) => Err(refused(&place, &["--engine", "mpi"])),
            None => Ok(()),
        }
    }

    /// As [`RankArguments::on_team`], for ranks that run no plan.
    pub(crate) fn on_team(self, run: impl FnOnce(Team) -> Result<(), Error>) -> Result<(), Error> {
        if self.is_mpi() { on_ranks(self.lost, false, false, run) } else { run(Team::Alone) }
    }
}

/// This process's place according to its launcher.
fn place() -> Result<Option<Place>, Error> {
    let place = Place::of(|name| std::env::var(name).ok());
    place.map_err(|error| RuntimeError::Rendezvous(Box::new(error)).into())
}

/// The error for several processes that would each do all of the work. It shows the command that makes them one run.
fn refused(place: &Place, options: &[&str]) -> Error {
    let given = std::env::args().skip(1).chain(options.iter().map(ToString::to_string));
    Error::Launched { size: place.size, command: command_line(given) }
}

fn ends() -> Ends {
    Ends { say: Box::new(|message| complain!("error: {message}")), exit: Box::new(|code| leave(code)) }
}

/// Runs a function as one process of a world. An error in one ends all.
fn on_world(world: World, run: impl FnOnce(World) -> Result<(), Error>) -> Result<(), Error> {
    let watch = world.watch();
    run(world).map_err(|error| {
        let message = if error.is_of_all_ranks() { error.to_string() } else { format!("{}: {error}", watch.name) };
        watch.fail(error.exit_code(), message, error.follows())
    })
}

#[cfg(not(feature = "mpi"))]
fn on_ranks(_: LostArguments, _: bool, _: bool, _: impl FnOnce(Team) -> Result<(), Error>) -> Result<(), Error> {
    let problem = "this altiplano was built without MPI; where one is installed (Debian: libopenmpi-dev openmpi-bin libclang-dev), build it by `cargo build --release --features mpi`; GPUs and XLA's devices of several nodes need none, with --engine processes";
    Err(Error::Option { option: "--engine mpi", problem })
}

#[cfg(feature = "mpi")]
fn on_ranks(
    lost: LostArguments,
    in_order: bool,
    anywhere: bool,
    run: impl FnOnce(Team) -> Result<(), Error>,
) -> Result<(), Error> {
    use altiplano::runtime::mpi::{RankOptions, Started};
    let (world, all) = Started::new()?.watched(Duration::from_secs(lost.lost_after), ends())?;
    let mpi = Some((all, RankOptions { in_order, ..RankOptions::default() }));
    on_world(world, |world| run(Team::Ranks { world, anywhere, mpi }))
}
