//! `altiplano export PLAN --to TARGET -o PATH`: writes a plan as a program of the software that trains.

use crate::commands::say;
use altiplano::export::{Stack, export};
use altiplano::ir::plan::Plan;
use altiplano::{Error, expect_writable, load_plan, write_file};
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Write a plan as a program of other software: `export plan.json --to jax -o layouts.py`
#[derive(Args)]
pub struct Export {
    /// A plan file, written by `altiplano plan -o`
    pub plan: PathBuf,
    /// The software that trains
    #[arg(long, value_enum)]
    to: To,
    /// The file to write
    #[arg(short, long, value_name = "PATH")]
    pub output: PathBuf,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq)]
enum To {
    /// A Python module for JAX, with a PartitionSpec for each parameter
    Jax,
}

impl Export {
    pub fn run(self) -> Result<(), Error> {
        expect_writable(&self.output)?;
        for note in self.write(&load_plan(&self.plan)?)? {
            eprintln!("note: {note}");
        }
        say(format!("{}: the plan for {}", self.output.display(), self.stack().name()))
    }

    fn stack(&self) -> Stack {
        match self.to {
            To::Jax => Stack::Jax,
        }
    }

    /// Writes a loaded plan. Returns notes on the choices that the export leaves out or rounds.
    pub fn write(&self, plan: &Plan) -> Result<Vec<String>, Error> {
        let exported = export(plan, self.stack())?;
        write_file(&self.output, &exported.text)?;
        Ok(exported.notes)
    }
}
