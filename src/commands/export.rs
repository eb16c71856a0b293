//! `altiplano export PLAN --to TARGET -o PATH`: writes a plan as a program of the software that trains.

use crate::commands::say;
use altiplano::export::{Stack, export};
use altiplano::{Error, expect_writable, load_plan, write_file};
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Write a plan as a program of other software: `export plan.json --to jax -o layouts.py`
#[derive(Args)]
pub struct Export {
    /// A plan file, written by `altiplano plan -o`
    plan: PathBuf,
    /// The software that trains
    #[arg(long, value_enum)]
    to: To,
    /// The file to write
    #[arg(short, long, value_name = "PATH")]
    output: PathBuf,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq)]
enum To {
    /// A Python module for JAX, with a PartitionSpec for each parameter
    Jax,
    /// A StableHLO module of the loss and its gradients, with Shardy's shardings
    Stablehlo,
}

impl Export {
    pub fn run(self) -> Result<(), Error> {
        expect_writable(&self.output)?;
        let to = match self.to {
            To::Jax => Stack::Jax,
            To::Stablehlo => Stack::StableHlo,
        };
        let exported = export(&load_plan(&self.plan)?, to)?;
        for note in &exported.notes {
            eprintln!("note: {note}");
        }
        write_file(&self.output, &exported.text)?;
        say(format!("{}: the plan for {}", self.output.display(), to.name()))
    }
}
