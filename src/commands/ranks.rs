//! `--engine mpi`: this process as one of the ranks that run a plan together, and how it ends if one of them fails.

use altiplano::Error;
use altiplano::training::engine::Team;
use clap::{Args, ValueEnum};

/// What a plan is run by, and how ranks that run it over MPI do so.
#[derive(Args, Clone, Debug)]
pub struct RankArguments {
    #[command(flatten)]
    engine: EngineArguments,
    /// Add up in the order of devices, so that losses of ranks are those of threads to the bit; slower
    #[arg(long)]
    reduce_in_order: bool,
    /// Take ranks for devices in order, wherever they are, not by the nodes that the plan is for
    #[arg(long)]
    ranks_anywhere: bool,
}

/// Whether this process is one of many.
#[derive(Args, Clone, Debug)]
pub struct EngineArguments {
    /// Run all devices as threads of this process, or this process as one device, a rank of mpirun or srun (docs/cluster.md)
    #[arg(long, value_name = "ENGINE", value_enum, default_value_t = EngineName::Threads)]
    engine: EngineName,
    /// Seconds after which a rank that nothing is heard of is lost
    #[arg(long, value_name = "SECONDS", default_value_t = 6, value_parser = clap::value_parser!(u64).range(2..))]
    lost_after: u64,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq)]
enum EngineName {
    Threads,
    Mpi,
}

impl RankArguments {
    pub fn is_mpi(&self) -> bool {
        self.engine.is_mpi()
    }

    /// Runs something on those who run the plan. Where these are ranks and it fails on one, it ends on all, and this does not return.
    pub fn on_team(self, run: impl FnOnce(Team) -> Result<(), Error>) -> Result<(), Error> {
        if self.is_mpi() {
            return self.engine.on_ranks(self.reduce_in_order, self.ranks_anywhere, run);
        }
        for (given, option) in [(self.reduce_in_order, "--reduce-in-order"), (self.ranks_anywhere, "--ranks-anywhere")]
        {
            if given {
                return Err(Error::Option { option, problem: "says how ranks run a plan; it needs --engine mpi" });
            }
        }
        run(Team::Alone)
    }
}

impl EngineArguments {
    pub fn is_mpi(&self) -> bool {
        self.engine == EngineName::Mpi
    }

    /// As [`RankArguments::on_team`], of ranks that run no plan.
    pub fn on_team(self, run: impl FnOnce(Team) -> Result<(), Error>) -> Result<(), Error> {
        if self.is_mpi() { self.on_ranks(false, false, run) } else { run(Team::Alone) }
    }

    #[cfg(not(feature = "mpi"))]
    fn on_ranks(self, _: bool, _: bool, _: impl FnOnce(Team) -> Result<(), Error>) -> Result<(), Error> {
        let problem = "this altiplano was built without MPI; where one is installed (Debian: libopenmpi-dev openmpi-bin libclang-dev), build it by `cargo build --release --features mpi`";
        Err(Error::Option { option: "--engine mpi", problem })
    }

    #[cfg(feature = "mpi")]
    fn on_ranks(
        self,
        in_order: bool,
        anywhere: bool,
        run: impl FnOnce(Team) -> Result<(), Error>,
    ) -> Result<(), Error> {
        use altiplano::runtime::mpi::watch::{Ends, leave};
        use altiplano::runtime::mpi::{RankOptions, Started};
        let ends = Ends { say: Box::new(|message| eprintln!("error: {message}")), exit: Box::new(|code| leave(code)) };
        let world = Started::new()?.watched(std::time::Duration::from_secs(self.lost_after), ends)?;
        let watch = world.watch();
        let options = RankOptions { in_order, ..RankOptions::default() };
        let done = run(Team::Ranks { world, options, anywhere });
        match done {
            Err(error) => {
                let message =
                    if error.is_of_all_ranks() { error.to_string() } else { format!("{}: {error}", watch.name) };
                watch.fail(error.exit_code(), message, error.follows())
            }
            Ok(()) => Ok(()),
        }
    }
}
