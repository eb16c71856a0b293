//! The command line. Each subcommand is a file in `commands/`. This file lists them and maps errors to exit codes: 0
//! done, 1 the work failed (no plan fits, numbers differ, a worker died), 2 unusable options or input, 128 and more a
//! signal.

#![forbid(unsafe_code)]

#[macro_use]
mod complaint;
mod commands;
mod progress;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use std::process::ExitCode;

/// Planning makes many small values on many threads, for which the system's allocator takes twice as long.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Plans how the training of a large model is split over devices, explains the plan, and runs it.
#[derive(Parser)]
#[command(name = "altiplano", version, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Plan(commands::plan::Plan),
    Inspect(commands::inspect::Inspect),
    Why(commands::why::Why),
    WhyNot(commands::why_not::WhyNot),
    Advise(commands::advise::Advise),
    Scale(commands::scale::Scale),
    Trials(commands::trials::Trials),
    Serve(commands::serve::Serve),
    Compare(commands::compare::Compare),
    Judge(Box<commands::judge::Judge>),
    Show(commands::show::Show),
    Clusters(commands::clusters::Clusters),
    Probe(commands::probe::Probe),
    Devices(commands::devices::Devices),
    Profile(commands::profile::Profile),
    Import(commands::import::Import),
    Export(commands::export::Export),
    Run(Box<commands::run::Run>),
    BenchInput(Box<commands::bench_input::BenchInput>),
    Checkpoint(commands::checkpoint::Checkpoint),
    Verify(commands::verify::Verify),
    Prove(commands::prove::Prove),
    Certify(commands::certify::Certify),
    Simulate(commands::simulate::Simulate),
    Fidelity(commands::fidelity::Fidelity),
    Calibrate(commands::calibrate::Calibrate),
    Demo(commands::demo::Demo),
    Completions(commands::completions::Completions),
    Man(commands::man::Manual),
}

fn main() -> ExitCode {
    let command = commands::vocabulary::with_names(Cli::command());
    let matches = commands::config::matches(command, std::env::args_os().collect());
    let apart = matches.and_then(|matches| commands::overwrite::expect_apart(&matches).map(|()| matches));
    let cli = apart.map(|matches| Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit()));
    let done = cli.and_then(|cli| match cli.command {
        Command::Plan(command) => command.run(),
        Command::Inspect(command) => command.run(),
        Command::Why(command) => command.run(),
        Command::WhyNot(command) => command.run(),
        Command::Advise(command) => command.run(),
        Command::Scale(command) => command.run(),
        Command::Trials(command) => command.run(),
        Command::Serve(command) => command.run(),
        Command::Compare(command) => command.run(),
        Command::Judge(command) => command.run(),
        Command::Show(command) => command.run(),
        Command::Clusters(command) => command.run(),
        Command::Probe(command) => command.run(),
        Command::Devices(command) => command.run(),
        Command::Profile(command) => command.run(),
        Command::Import(command) => command.run(),
        Command::Export(command) => command.run(),
        Command::Run(command) => command.run(),
        Command::BenchInput(command) => command.run(),
        Command::Checkpoint(command) => command.run(),
        Command::Verify(command) => command.run(),
        Command::Prove(command) => command.run(),
        Command::Certify(command) => command.run(),
        Command::Calibrate(command) => command.run(),
        Command::Simulate(command) => command.run(),
        Command::Fidelity(command) => command.run(),
        Command::Demo(command) => command.run(),
        Command::Completions(command) => command.run(Cli::command()),
        Command::Man(command) => command.run(Cli::command()),
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain!("error: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}
