//! `altiplano plan MODEL`: searches for the fastest plan and reports it.

use crate::commands::options::{ModelOptions, PlanOptions};
use crate::commands::{explain_failure, made_by, report_for_stdout, say, warn};
use crate::progress::Bar;
use altiplano::certify::{Compiler, search_and_certify};
use altiplano::planner::timings::{self, Phase, PhaseTime};
use altiplano::planner::{Progress, Request};
use altiplano::prove::prove;
use altiplano::survive::{Loss, expect_spare, losses, losses_text};
use altiplano::{
    Error, Warning, expect_writable, frontier_json, frontier_text, ir, load_plan, moved, page_html, write_file,
};
use clap::Args;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Plan how a model is trained on a cluster
#[derive(Args)]
pub(crate) struct Plan {
    /// A model: StableHLO text as JAX prints it, a torch.export archive (.pt2), ONNX, a Hugging Face config.json, or
    /// altiplano.graph JSON
    pub model: PathBuf,
    #[command(flatten)]
    pub options: ModelOptions,
    #[command(flatten)]
    pub plan: PlanOptions,
    /// Write the plan to this file
    #[arg(short, long, value_name = "FILE", help_heading = "Output")]
    pub output: Option<PathBuf>,
    /// Write an HTML page to this file, as `altiplano inspect --html` does
    #[arg(long, value_name = "FILE", conflicts_with = "frontier", help_heading = "Output")]
    pub html: Option<PathBuf>,
    /// Show the changes from this plan, of the same model or a similar one
    #[arg(long, value_name = "OLD", conflicts_with_all = ["frontier", "json"], help_heading = "Output")]
    from: Option<PathBuf>,
    /// Print the Pareto frontier of plans in seconds, bytes, devices and price; with -o, write each plan to a numbered
    /// file
    #[arg(long, help_heading = "Output")]
    frontier: bool,
    /// Prove that the plan's programs compute what one device computes, and keep the proof in the plan (docs/proofs.md).
    /// Without a proof, the plan is written and the exit code is 1
    #[arg(long, conflicts_with = "frontier", help_heading = "Output")]
    prove: bool,
    /// Compile the plan with XLA for this target, and keep the certificate in the plan (docs/xla.md#certificates). While
    /// the compiler needs more memory than the target has, search again with less. If nothing fits, the fastest plan is
    /// written and the exit code is 2
    #[arg(long, value_name = "TARGET", conflicts_with = "frontier", help_heading = "Output")]
    certify: Option<String>,
    /// The PJRT plugin that certifies [default: that of ALTIPLANO_PJRT_PLUGIN or of the Python environment]
    #[arg(long, value_name = "FILE", requires = "certify", help_heading = "Output")]
    plugin: Option<PathBuf>,
    /// Also plan for the loss of 1 to K nodes: the step then, what of the trained state only lost nodes had, and what
    /// the others must receive; with -o, write each plan to a file of its own (docs/planning.md#lost-nodes)
    #[arg(long, value_name = "K", conflicts_with_all = ["frontier", "json"], value_parser = clap::value_parser!(u32).range(1..), help_heading = "Output")]
    survive: Option<u32>,
    /// Print on stderr where the time of the search went, by phase
    #[arg(long, help_heading = "Output")]
    timings: bool,
    /// Print the plan as JSON instead of the report; with --frontier, its table; without a plan, the reason
    #[arg(long, help_heading = "Output")]
    json: bool,
}

impl Plan {
    pub(crate) fn run(self) -> Result<(), Error> {
        self.output.as_deref().map_or(Ok(()), expect_writable)?;
        self.html.as_deref().map_or(Ok(()), expect_writable)?;
        if self.timings {
            timings::enable();
        }
        let start = Instant::now();
        let shows = self.timings;
        let result = self.answer();
        // Without a search there is nothing to tell.
        if shows && timings::phases().iter().any(|phase| phase.times > 0) {
            complain!("{}", timings_text(&timings::phases(), start.elapsed()));
        }
        result
    }

    fn answer(self) -> Result<(), Error> {
        let old = self.from.as_deref().map(load_plan).transpose()?;
        let open = |target| Compiler::open(target, self.plugin.as_deref());
        let compiler = self.certify.as_deref().map(open).transpose()?;
        let (request, warnings) = self.plan.request_quietly(&self.model, &self.options)?;
        self.survive.map_or(Ok(()), |most| expect_spare(&request, most))?;
        let bar = Bar::stoppable();
        if self.frontier {
            return self.answer_frontier(&request, bar, &warnings);
        }
        let (mut plan, uncertified) = match self.search(&request, compiler.as_ref(), &bar) {
            Ok(found) => found,
            Err(error) => {
                bar.suspend(|| warn(&warnings));
                // Contradictory options explain themselves.
                if !error.is_usage() {
                    explain_failure(&request, &error, &bar, self.json)?;
                }
                return Err(error);
            }
        };
        plan.made_by = Some(made_by());
        if bar.stopped() {
            bar.suspend(|| complain!("note: the search was cancelled; this is its best plan so far"));
        }
        drop(bar);
        let (lost, unproved) = if self.prove { keep_proof(&mut plan)? } else { (Vec::new(), None) };
        let warn = |warnings: &[Warning]| {
            warn(warnings);
            lost.iter().for_each(|lost| complain!("warning: {lost}"));
        };
        let write = || -> Result<(), Error> {
            self.output.as_ref().map_or(Ok(()), |file| write_file(file, &plan.to_json()))?;
            self.html.as_ref().map_or(Ok(()), |file| write_file(file, &page_html(&plan)?))
        };
        // The report of a large model takes about as long as its plan file.
        let report = || (!self.json).then(|| report_for_stdout(&plan));
        let (written, report) = rayon::join(|| timings::timed(Phase::Writing, write), report);
        written?;
        if self.json {
            warn(&warnings);
            say(plan.to_json())?;
            return uncertified.or(unproved).map_or(Ok(()), Err);
        }
        // The answer comes before any warnings.
        report.map_or(Ok(()), say)?;
        warn(&warnings);
        if let (Some(old), Some(file)) = (old, &self.from) {
            say(format!("\nMoved from {}\n{}", file.display(), moved(&old, &plan)))?;
        }
        self.survive.map_or(Ok(()), |most| self.answer_losses(&plan, &request, most))?;
        uncertified.or(unproved).map_or(Ok(()), Err)
    }

    fn answer_frontier(&self, request: &Request, bar: Bar, warnings: &[Warning]) -> Result<(), Error> {
        let mut points = self.plan.frontier(request, &bar)?;
        points.iter_mut().for_each(|point| point.plan.made_by = Some(made_by()));
        drop(bar);
        warn(warnings);
        for (i, point) in (1..).zip(&points) {
            if let Some(file) = &self.output {
                write_file(&numbered(file, &i.to_string()), &point.plan.to_json())?;
            }
        }
        if self.json { say(frontier_json(&points)) } else { say(frontier_text(&points)) }
    }

    /// Plans for the loss of up to `most` nodes, and writes the plans beside the plan's own file.
    fn answer_losses(&self, plan: &ir::plan::Plan, request: &Request, most: u32) -> Result<(), Error> {
        let bar = Bar::stoppable();
        let all = losses(plan, request, most, &|request| self.plan.plan(request, &bar));
        drop(bar);
        let of_groups = plan.cluster.groups.len() > 1;
        self.output.as_deref().map_or(Ok(()), |file| write_losses(file, &all, of_groups))?;
        say(format!("\n{}", losses_text(plan, &all)))
    }

    /// The plan, and why a compiler does not certify it.
    fn search(
        &self,
        request: &Request,
        compiler: Option<&Compiler>,
        bar: &Bar,
    ) -> Result<(ir::plan::Plan, Option<Error>), Error> {
        let search = |request: &Request| self.plan.plan(request, bar);
        match compiler {
            None => Ok((search(request)?, None)),
            Some(compiler) => {
                let again = |why: &Error| bar.suspend(|| complain!("note: {why}; searching again with less"));
                search_and_certify(request, &search, &|plan| compiler.certify(plan, bar), &again)
            }
        }
    }
}

/// One line for each phase that took part in a search.
fn timings_text(phases: &[PhaseTime], wall: Duration) -> String {
    let sum: f64 = phases.iter().map(|p| p.seconds).sum();
    let mut text = format!("{:.2} s by the clock; seconds of threads by phase:", wall.as_secs_f64());
    for PhaseTime { phase, unit, seconds, times } in phases.iter().filter(|p| p.times > 0) {
        let (name, part) = (format!("{phase:?}").to_lowercase(), 100.0 * seconds / sum.max(f64::MIN_POSITIVE));
        text.push_str(&format!("\n  {name:<16} {seconds:>7.3} s {part:>3.0} %  {times:>7} {unit}"));
    }
    text
}

/// Proves a plan and keeps the certificate in it. Returns the warnings about sums that lose precision, and the place
/// where the proof ends if there is none.
fn keep_proof(plan: &mut ir::plan::Plan) -> Result<(Vec<String>, Option<Error>), Error> {
    Ok(match timings::timed(Phase::Proof, || prove(plan))? {
        Ok(proved) => {
            plan.proof = Some(proved.certificate);
            (proved.rounding.warnings(), None)
        }
        Err(gap) => (Vec::new(), Some(Error::Unproved { gap: Box::new(gap) })),
    })
}

/// Writes the plans for lost nodes beside the plan: `plan.lost-1.json`, of several groups `plan.lost-1-of-group-2.json`.
fn write_losses(file: &Path, all: &[Loss], of_groups: bool) -> Result<(), Error> {
    for Loss { nodes, group, plan, .. } in all {
        let Ok(plan) = plan else { continue };
        let of_group = if of_groups { format!("-of-group-{}", group + 1) } else { String::new() };
        let plan = ir::plan::Plan { made_by: Some(made_by()), ..plan.clone() };
        write_file(&numbered(file, &format!("lost-{nodes}{of_group}")), &plan.to_json())?;
    }
    Ok(())
}

/// `plan.3.json` for `plan.json`.
fn numbered(file: &Path, number: &str) -> PathBuf {
    let mut name = file.file_stem().unwrap_or_default().to_os_string();
    name.push(format!(".{number}"));
    if let Some(extension) = file.extension() {
        name.push(".");
        name.push(extension);
    }
    file.with_file_name(name)
}
