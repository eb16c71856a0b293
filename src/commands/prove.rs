//! `altiplano prove PLAN`: proves that a plan computes what one device computes, without running it.

use crate::commands::say;
use altiplano::prove::{proof_text, prove};
use altiplano::{Error, load_plan, one_line};
use clap::Args;
use std::path::PathBuf;

/// Prove at full size that a plan's programs compute what one device computes, without running them
#[derive(Args)]
pub(crate) struct Prove {
    /// A plan file, written by `altiplano plan -o`
    pub plan: PathBuf,
}

impl Prove {
    pub(crate) fn run(self) -> Result<(), Error> {
        let plan = load_plan(&self.plan)?;
        say(format!("{}: {}", plan.model, one_line(&plan)))?;
        let proof = prove(&plan)?.map_err(|gap| Error::Unproved { gap: Box::new(gap) })?;
        say(proof_text(&plan, &proof))
    }
}
