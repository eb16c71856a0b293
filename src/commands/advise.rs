//! `altiplano advise PLAN`: the bottlenecks of a plan, and the gain from changes.

use crate::commands::fixed::FixedOptions;
use crate::commands::{load_to_ask, say};
use crate::progress::Bar;
use altiplano::Error;
use altiplano::advice::{advice, advice_json, changes, scenarios};
use altiplano::ir::plan::Plan;
use altiplano::planner::{Progress, Request};
use altiplano::units::seconds;
use clap::Args;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Explain what limits a plan, and what another node, faster links, more memory or a larger batch would gain
#[derive(Args)]
pub(crate) struct Advise {
    /// A plan file, written by `altiplano plan -o`
    pub plan: PathBuf,
    /// Fixed choices of the plans for comparison
    #[command(flatten)]
    fixed: FixedOptions,
    /// Gradient noise scale in samples (McCandlish et al. 2018), to tell how far larger batches help
    #[arg(long, value_name = "SAMPLES", value_parser = positive)]
    noise_scale: Option<f64>,
    /// Time limit of searches in seconds; results then depend on the machine
    #[arg(long, value_name = "SECONDS", value_parser = positive, default_value = "60")]
    within: f64,
    /// Print JSON (docs/advice.schema.json)
    #[arg(long)]
    json: bool,
}

fn positive(text: &str) -> Result<f64, &'static str> {
    let value: f64 = text.parse().map_err(|_| "expected a number")?;
    if value > 0.0 && value <= 1e12 { Ok(value) } else { Err("expected a number above 0, at most 1e12") }
}

impl Advise {
    pub(crate) fn run(self) -> Result<(), Error> {
        let plan = load_to_ask(&self.plan)?;
        let bar = Bar::stoppable();
        say(self.answer(&plan, &bar)?)
    }

    /// The advice on a loaded plan.
    pub(crate) fn answer(&self, plan: &Plan, progress: &dyn Progress) -> Result<String, Error> {
        let mut request = Request::of_plan(plan);
        self.fixed.fix_all(&mut request)?;
        let start = Instant::now();
        let limit = Duration::from_secs_f64(self.within.min(1e9));
        let found = scenarios(plan, changes(&request), limit, progress);
        let took_s = start.elapsed().as_secs_f64();
        let stopped = progress.stopped() || took_s >= self.within;
        complain!("planned {} times in {}", found.len(), seconds(took_s));
        if stopped {
            complain!("note: a search ran out of time or was cancelled; some of these are its best plans by then");
        }
        if self.json {
            return Ok(format!("{:#}", advice_json(plan, &found, self.noise_scale)?));
        }
        advice(plan, &found, self.noise_scale)
    }
}
