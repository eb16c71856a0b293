//! `altiplano certify PLAN --for TARGET`: compiles a plan for devices that are not at hand.

use crate::commands::say;
use crate::progress::Bar;
use altiplano::certify::{Compiler, certificate_text, too_large};
use altiplano::ir::plan::Plan;
use altiplano::planner::Progress;
use altiplano::{Error, expect_writable, load_plan, one_line, write_file};
use clap::Args;
use std::path::PathBuf;

/// Compile a plan with XLA for GPUs or TPUs that are not there, and compare memory and collectives with the plan's
#[derive(Args)]
pub(crate) struct Certify {
    /// A plan file, written by `altiplano plan -o`
    pub plan: PathBuf,
    /// The devices: cuda:A100, cuda:H100, cuda:H200, cuda:B200, tpu:v4, tpu:v5e, tpu:v5p or tpu:v6e
    #[arg(long = "for", value_name = "TARGET")]
    target: String,
    /// The PJRT plugin [default: that of ALTIPLANO_PJRT_PLUGIN or of the Python environment]
    #[arg(long, value_name = "FILE")]
    plugin: Option<PathBuf>,
    /// Write the plan with its certificate to this file; it may be the plan's own
    #[arg(short, long, value_name = "PLAN")]
    pub output: Option<PathBuf>,
    /// Print the certificate as JSON (docs/plan.schema.json)
    #[arg(long)]
    json: bool,
}

impl Certify {
    pub(crate) fn run(self) -> Result<(), Error> {
        self.output.as_deref().map_or(Ok(()), expect_writable)?;
        let mut plan = load_plan(&self.plan)?;
        if !self.json {
            say(format!("{}: {}", plan.model, one_line(&plan)))?;
        }
        let bar = Bar::new();
        let text = self.answer(&mut plan, &bar)?;
        drop(bar);
        say(text)?;
        if let Some(file) = &self.output {
            write_file(file, &plan.to_json())?;
        }
        plan.certificate.as_ref().and_then(too_large).map_or(Ok(()), Err)
    }

    /// Certifies a loaded plan, and returns the certificate as text.
    pub(crate) fn answer(&self, plan: &mut Plan, progress: &dyn Progress) -> Result<String, Error> {
        let certificate = Compiler::open(&self.target, self.plugin.as_deref())?.certify(plan, progress)?;
        let text = match self.json {
            true => serde_json::to_string_pretty(&certificate).unwrap_or_default(),
            false => certificate_text(&certificate),
        };
        plan.certificate = Some(certificate);
        Ok(text)
    }
}
