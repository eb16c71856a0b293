//! `altiplano prove PLAN`: proves that a plan computes what one device computes, without running it.

use crate::commands::say;
use altiplano::ir::plan::Plan;
use altiplano::prove::{Proved, proof_text, prove};
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
    /// Print the proof and all sums as JSON (docs/proofs.md)
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
        let (text, warnings) = self.answer(&mut plan)?;
        say(text)?;
        warnings.iter().for_each(|warning| complain!("warning: {warning}"));
        match &self.output {
            Some(file) => write_file(file, &plan.to_json()),
            None => Ok(()),
        }
    }

    /// Proves a loaded plan. Returns the proof as text, and warnings about sums that lose precision.
    fn answer(&self, plan: &mut Plan) -> Result<(String, Vec<String>), Error> {
        let Proved { certificate, rounding } = prove(plan)?.map_err(|gap| Error::Unproved { gap: Box::new(gap) })?;
        let text = match self.json {
            true => {
                let mut json = serde_json::to_value(&certificate).unwrap_or_default();
                json["rounding"] = rounding.json();
                serde_json::to_string_pretty(&json).unwrap_or_default()
            }
            false => [proof_text(plan, &certificate), rounding.text()].join("\n\n").trim_end().to_string(),
        };
        plan.proof = Some(certificate);
        Ok((text, rounding.warnings()))
    }
}
