//! `altiplano inspect PLAN`: the report of a plan file.

use crate::commands::say;
use altiplano::{Error, kernels_text, load_plan, programs, programs_text, report, why_text};
use clap::Args;
use std::path::PathBuf;

/// Explain a plan file
#[derive(Args)]
pub struct Inspect {
    /// A file that `altiplano plan -o` wrote
    plan: PathBuf,
    /// Print the plan as one JSON document
    #[arg(long, conflicts_with = "programs")]
    json: bool,
    /// Print the programs that the devices run
    #[arg(long)]
    programs: bool,
    /// With --programs: print the kernels that these launch on NVIDIA GPUs, as one CUDA source
    #[arg(long, requires = "programs")]
    kernels: bool,
    /// Print what other layouts of a parameter or value would cost: its name, in which `*` stands for anything
    #[arg(long, value_name = "NAME", conflicts_with_all = ["json", "programs"])]
    why: Option<String>,
}

impl Inspect {
    pub fn run(self) -> Result<(), Error> {
        let plan = load_plan(&self.plan)?;
        if let Some(name) = &self.why {
            say(why_text(&plan, name)?)
        } else if self.json {
            say(plan.to_json())
        } else if self.kernels {
            say(kernels_text(&programs(&plan)?))
        } else if self.programs {
            say(programs_text(&programs(&plan)?).trim_end())
        } else {
            say(report(&plan))
        }
    }
}
