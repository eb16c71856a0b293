//! `altiplano inspect PLAN`: reports on a plan file.

use crate::commands::{report_for_stdout, say};
use altiplano::ir::plan::Plan;
use altiplano::prove::prove;
use altiplano::units::bytes;
use altiplano::{
    Error, expect_writable, kernels_text, load_plan, page_html, plan_dot, programs, programs_text, tape_text,
    write_file,
};
use clap::Args;
use std::path::PathBuf;

/// Explain a plan file
#[derive(Args)]
pub(crate) struct Inspect {
    /// A plan file, written by `altiplano plan -o`
    pub plan: PathBuf,
    /// Print the plan as JSON
    #[arg(long, conflicts_with = "programs")]
    json: bool,
    /// Print the programs of the devices
    #[arg(long)]
    programs: bool,
    /// With --programs: print their kernels on NVIDIA GPUs, as one CUDA source
    #[arg(long, requires = "programs")]
    kernels: bool,
    /// With --programs: print the commands of this rank's device in a step, if it is a GPU
    #[arg(long, value_name = "RANK", requires = "programs", conflicts_with = "kernels")]
    tape: Option<u32>,
    /// Print the layers and stages with their shardings, and the bytes between them, in Graphviz's DOT language
    #[arg(long, conflicts_with_all = ["json", "programs"])]
    dot: bool,
    /// Write an HTML page to this file: timelines, memory, layouts, and alternatives (docs/page.md)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["json", "programs", "dot"])]
    pub html: Option<PathBuf>,
    /// With --html: prove the plan, and show how each value follows from parameters and inputs. A plan with a proof is
    /// shown so without this option
    #[arg(long, requires = "html")]
    prove: bool,
}

impl Inspect {
    pub(crate) fn run(self) -> Result<(), Error> {
        self.html.as_deref().map_or(Ok(()), expect_writable)?;
        let mut plan = load_plan(&self.plan)?;
        if self.prove && plan.proof.is_none() {
            let proved = prove(&plan)?.map_err(|gap| Error::Unproved { gap: Box::new(gap) })?;
            plan.proof = Some(proved.certificate);
        }
        match self.answer(&plan)? {
            Some(text) => say(text.trim_end()),
            None => say(report_for_stdout(&plan)),
        }
    }

    /// The answer for a loaded plan; `None` if it is the report.
    pub(crate) fn answer(&self, plan: &Plan) -> Result<Option<String>, Error> {
        Ok(Some(if let Some(file) = &self.html {
            let page = page_html(plan)?;
            write_file(file, &page)?;
            let (file, size) = (file.display(), bytes(page.len() as u64));
            format!("{file}: a page of {size}, which a browser opens without a network")
        } else if self.json {
            plan.to_json()
        } else if self.kernels {
            kernels_text(&programs(plan)?)
        } else if let Some(rank) = self.tape {
            tape_text(&programs(plan)?, rank)?
        } else if self.programs {
            programs_text(&programs(plan)?)
        } else if self.dot {
            plan_dot(plan)
        } else {
            return Ok(None);
        }))
    }
}
