//! `altiplano why PLAN`: explains what other layouts of a parameter, splits of an op or boundaries of a stage would
//! cost.

use crate::commands::{load_to_ask, say};
use altiplano::ir::plan::Plan;
use altiplano::{Asked, Error, why_stage, why_text};
use clap::Args;
use std::path::PathBuf;

/// Explain why a plan stores a parameter, splits an op or cuts a stage as it does
#[derive(Args)]
pub(crate) struct Why {
    /// A plan file, written by `altiplano plan -o`
    pub plan: PathBuf,
    #[command(flatten)]
    question: Question,
    /// Only in this layer, as numbered in the report's stages
    #[arg(long, value_name = "N", conflicts_with = "stage")]
    layer: Option<u32>,
}

#[derive(Args)]
#[group(required = true, multiple = false)]
struct Question {
    /// A parameter: the cost of other layouts and other storage (ZeRO); `*` matches anything
    #[arg(long, value_name = "NAME")]
    param: Option<String>,
    /// An op by name, number (%12) or kind (attention): the cost of other strategies
    #[arg(long, value_name = "NAME")]
    op: Option<String>,
    /// A stage: its contents, its time account, its memory, and the alternatives to its boundaries
    #[arg(long, value_name = "N")]
    stage: Option<usize>,
}

impl Why {
    pub(crate) fn run(self) -> Result<(), Error> {
        say(self.answer(&load_to_ask(&self.plan)?)?)
    }

    /// The answer for a loaded plan.
    pub(crate) fn answer(&self, plan: &Plan) -> Result<String, Error> {
        let Question { param, op, stage } = &self.question;
        match (param, op, stage) {
            (Some(name), ..) => why_text(plan, Asked::Parameter, name, self.layer),
            (_, Some(name), _) => why_text(plan, Asked::Op, name, self.layer),
            (.., stage) => why_stage(plan, stage.unwrap_or(0)),
        }
    }
}
