//! `altiplano simulate PLAN`: simulates a step.

use crate::commands::options::predict_by;
use crate::commands::say;
use altiplano::ir::plan::Plan;
use altiplano::simulate::Simulation;
use altiplano::{Error, load_plan, write_file};
use clap::Args;
use std::path::PathBuf;

/// Simulate a step of a plan: a timeline of every stage, with reasons
#[derive(Args)]
pub(crate) struct Simulate {
    /// A plan file, written by `altiplano plan -o`
    pub plan: PathBuf,
    /// Explain the cost of the kernels that compute this value or op: a name in the model (transformer.h.0.mlp) or an
    /// op (all_reduce)
    #[arg(long, value_name = "NAME")]
    explain: Option<String>,
    /// Simulate by a profile that `altiplano profile` measured on this machine
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Show the peak memory of each stage's devices by content
    #[arg(long, conflicts_with = "explain")]
    memory: bool,
    /// With --memory: only this stage
    #[arg(long, value_name = "N", requires = "memory")]
    stage: Option<usize>,
    /// Print everything as JSON (docs/simulation.md)
    #[arg(long, conflicts_with_all = ["explain", "memory"])]
    json: bool,
    /// Write the step as a Chrome trace, for Perfetto
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

impl Simulate {
    pub(crate) fn run(self) -> Result<(), Error> {
        say(self.answer(load_plan(&self.plan)?)?)
    }

    /// The answer for a loaded plan. The trace is written if the options say so.
    pub(crate) fn answer(&self, mut plan: Plan) -> Result<String, Error> {
        let profile = match &self.profile {
            Some(file) => Some(predict_by(&mut plan, file)?),
            None => None,
        };
        if let (Some(measured), None) = (&plan.profile, &profile) {
            complain!(
                "note: the plan was predicted by the {measured}; without --profile the cluster's figures simulate it"
            );
        }
        let simulation = Simulation::new(plan, profile.as_ref())?;
        if let Some(file) = &self.trace {
            write_file(file, &simulation.trace().to_string())?;
        }
        if self.json {
            return Ok(simulation.json().to_string());
        }
        if self.memory {
            let stages = simulation.num_stages();
            if let Some(asked) = self.stage.filter(|&stage| stage >= stages) {
                return Err(Error::NoSuchStage { option: "--stage", asked, stages });
            }
            return Ok(simulation.memory_text(self.stage));
        }
        match &self.explain {
            Some(name) => simulation.explain(name).ok_or_else(|| Error::UnknownOp { name: name.clone() }),
            None => Ok(simulation.text()),
        }
    }
}
