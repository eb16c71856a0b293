//! `altiplano why PLAN`: what the other ways would cost to keep a parameter, split an op or cut a stage.

use crate::commands::{load_to_ask, say};
use altiplano::{Asked, Error, why_stage, why_text};
use clap::Args;
use std::path::PathBuf;

/// Say why a plan keeps a parameter, splits an op or cuts a stage as it does
#[derive(Args)]
pub struct Why {
    /// A file that `altiplano plan -o` wrote
    plan: PathBuf,
    #[command(flatten)]
    question: Question,
    /// Only in this layer, as the stages of the report count them
    #[arg(long, value_name = "N", conflicts_with = "stage")]
    layer: Option<u32>,
}

#[derive(Args)]
#[group(required = true, multiple = false)]
struct Question {
    /// A parameter: what other layouts and other storage (ZeRO) would cost. `*` stands for anything
    #[arg(long, value_name = "NAME")]
    param: Option<String>,
    /// An op, by its name, number (%12) or kind (attention): what other strategies would cost
    #[arg(long, value_name = "NAME")]
    op: Option<String>,
    /// A stage: what it holds, where its time goes, what fills its memory, and what is next to it
    #[arg(long, value_name = "N")]
    stage: Option<usize>,
}

impl Why {
    pub fn run(self) -> Result<(), Error> {
        let plan = load_to_ask(&self.plan)?;
        let Question { param, op, stage } = self.question;
        match (param, op, stage) {
            (Some(name), ..) => say(why_text(&plan, Asked::Parameter, &name, self.layer)?),
            (_, Some(name), _) => say(why_text(&plan, Asked::Op, &name, self.layer)?),
            (.., stage) => say(why_stage(&plan, stage.unwrap_or(0))?),
        }
    }
}
