//! `altiplano export PLAN --to TARGET -o PATH`: writes a plan as a program of the software that trains.

use crate::commands::say;
use altiplano::export::{Stack, export};
use altiplano::{Error, expect_writable, load_plan, stacks, write_file};
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Write a plan for other software, as a program or as its configuration: `export plan.json --to jax -o layouts.py`
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
    /// Options of a command line of Megatron-LM
    Megatron,
    /// A recipe of Megatron-Bridge
    MegatronBridge,
    /// A JSON file of DeepSpeed
    Deepspeed,
    /// A YAML file of `accelerate launch`
    Accelerate,
    /// A Python module with a DistributedConfig of Transformers
    Transformers,
    /// A recipe of torchtitan
    Torchtitan,
    /// A YAML file of MaxText
    Maxtext,
}

impl To {
    /// The stack that is configured rather than programmed, if it is one.
    fn configured(self) -> Option<&'static stacks::Stack> {
        let name = self.to_possible_value()?.get_name().to_string();
        stacks::Stack::named(&name)
    }
}

impl Export {
    pub fn run(self) -> Result<(), Error> {
        expect_writable(&self.output)?;
        if let Some(stack) = self.to.configured() {
            let written = stacks::export(&load_plan(&self.plan)?, stack)?;
            for note in &written.notes {
                eprintln!("note: {note}");
            }
            write_file(&self.output, &written.text)?;
            return say(format!("{}: the plan for {}", self.output.display(), stack.name));
        }
        let to = Stack::Jax;
        let exported = export(&load_plan(&self.plan)?, to)?;
        for note in &exported.notes {
            complain!("note: {note}");
        }
        write_file(&self.output, &exported.text)?;
        say(format!("{}: the plan for {}", self.output.display(), to.name()))
    }
}
