//! `altiplano inspect PLAN`: the report of a plan file.

use crate::commands::say;
use altiplano::{Error, load_plan, plan_dot, programs, programs_text, report};
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
    /// Print the layers and stages with their shardings, and the bytes between them, as DOT, which Graphviz draws
    #[arg(long, conflicts_with_all = ["json", "programs"])]
    dot: bool,
}

impl Inspect {
    pub fn run(self) -> Result<(), Error> {
        let plan = load_plan(&self.plan)?;
        if self.json {
            say(plan.to_json())
        } else if self.programs {
            say(programs_text(&programs(&plan)?).trim_end())
        } else if self.dot {
            say(plan_dot(&plan).trim_end())
        } else {
            say(report(&plan))
        }
    }
}
