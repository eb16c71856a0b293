//! `altiplano export PLAN --to TARGET -o PATH`: writes a plan for the software that trains.

use crate::commands::say;
use altiplano::export::{Stack, export};
use altiplano::ir::plan::Plan;
use altiplano::stacks::Written;
use altiplano::{Error, expect_writable, load_plan, stacks, write_file};
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Write a plan for other software, as a program or as its configuration: `export plan.json --to jax -o layouts.py`
#[derive(Args)]
pub(crate) struct Export {
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
    /// A Python module for PyTorch, with DTensor placements of each parameter
    Torch,
    /// A StableHLO module of the loss and its gradients, with Shardy's shardings
    Stablehlo,
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

/// The remarks on a file that is written.
pub(crate) struct Exported {
    /// The choices that the export leaves out or rounds.
    pub notes: Vec<String>,
    /// The error for a configuration that does not fit on the devices.
    misfit: Option<Error>,
}

impl To {
    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_string())
    }
}

impl Export {
    pub(crate) fn run(self) -> Result<(), Error> {
        expect_writable(&self.output)?;
        let Exported { notes, misfit } = self.write(&load_plan(&self.plan)?)?;
        for note in notes {
            complain!("note: {note}");
        }
        match misfit {
            Some(error) => Err(error),
            None => say(format!("{}: the plan for {}", self.output.display(), self.to.name())),
        }
    }

    /// Writes a loaded plan.
    pub(crate) fn write(&self, plan: &Plan) -> Result<Exported, Error> {
        let program = match self.to {
            To::Jax => Some(Stack::Jax),
            To::Torch => Some(Stack::Torch),
            To::Stablehlo => Some(Stack::StableHlo),
            _ => None,
        };
        let configured = stacks::Stack::named(&self.to.name());
        let (text, notes, misfit) = match (program, configured) {
            (Some(stack), _) => export(plan, stack).map(|exported| (exported.text, exported.notes, None))?,
            (None, Some(stack)) => {
                let Written { text, notes, prediction, .. } = stacks::export(plan, stack)?;
                let misfit = (!prediction.fits()).then(|| Error::Misfit {
                    file: self.output.clone(),
                    stack: stack.name,
                    target: stack.target,
                    needed_bytes: prediction.peak_bytes(),
                    usable_bytes: prediction.usable_bytes(),
                });
                (text, notes, misfit)
            }
            (None, None) => unreachable!("each variant is a stack's name"),
        };
        write_file(&self.output, &text)?;
        Ok(Exported { notes, misfit })
    }
}
