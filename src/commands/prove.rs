//! `altiplano prove PLAN`: proves that a plan computes what one device computes, without running it.

use crate::commands::say;
use altiplano::ir::plan::Plan;
use altiplano::prove::{proof_text, prove};
use altiplano::{Error, expect_writable, load_plan, one_line, write_file};
use clap::Args;
use std::path::PathBuf;

/// Prove at full size that a plan's programs compute what one device computes, without running them
#[derive(Args)]
pub(crate) struct Prove {
    /// A plan file, written by `altiplano plan -o`
    pub plan: PathBuf,
    /// Write the plan with its proof to this file; it may be the plan's own
    #[arg(short, long, value_name = "PLAN")]
    pub output: Option<PathBuf>,
    /// Print the proof as JSON (docs/plan.schema.json)
    #[arg(long)]
    json: bool,
}

impl Prove {
    pub(crate) fn run(self) -> Result<(), Error> {
        self.output.as_deref().map_or(Ok(()), expect_writable)?;
        let mut plan = load_plan(&self.plan)?;
        if !self.json {
            say(format!("{}: {}", plan.model, one_line(&plan)))?;
        }
        say(self.answer(&mut plan)?)?;
        match &self.output {
            Some(file) => write_file(file, &plan.to_json()),
            None => Ok(()),
        }
    }

    /// Proves a loaded plan, and returns the proof as text.
    fn answer(&self, plan: &mut Plan) -> Result<String, Error> {
        let proof = prove(plan)?.map_err(|gap| Error::Unproved { gap: Box::new(gap) })?;
        let text = match self.json {
            true => serde_json::to_string_pretty(&proof).unwrap_or_default(),
            false => proof_text(plan, &proof),
        };
        plan.proof = Some(proof);
        Ok(text)
    }
}
