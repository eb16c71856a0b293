//! `altiplano compare A B`: compares two plans. `altiplano compare PLAN --baseline '...'`: compares a plan with a
//! configuration in use today.

use crate::commands::{load_to_ask, say};
use altiplano::Error;
use altiplano::compare::{Baseline, Comparison, duration};
use altiplano::ir::plan::Plan;
use clap::Args;
use std::borrow::Borrow;
use std::path::{Path, PathBuf};

/// Compare a plan with another one, or with a configuration that you run today
#[derive(Args)]
pub(crate) struct Compare {
    /// A plan file, written by `altiplano plan -o`
    plan: PathBuf,
    /// A second plan file, of the same model or another
    #[arg(required_unless_present = "baseline", conflicts_with = "baseline")]
    other: Option<PathBuf>,
    /// A configuration as in 'tp=4 pp=2 mbs=1 recompute', with tp, pp, dp, mbs (microbatch samples per replica), zero,
    /// recompute and target [default target: megatron]
    #[arg(long, value_name = "DEGREES")]
    baseline: Option<Baseline>,
    /// Measured step time of the configuration (5.3s, 830ms)
    #[arg(long, value_name = "SECONDS", value_parser = duration, requires = "baseline", conflicts_with = "other")]
    measured: Option<f64>,
    /// Print JSON (docs/comparison.schema.json)
    #[arg(long)]
    json: bool,
}

impl Compare {
    pub(crate) fn run(self) -> Result<(), Error> {
        say(self.answer(load_to_ask)?)
    }

    /// The comparison of plans that `load` reads.
    pub(crate) fn answer<P: Borrow<Plan>>(&self, load: impl Fn(&Path) -> Result<P, Error>) -> Result<String, Error> {
        let plan = load(&self.plan)?;
        let plan = plan.borrow();
        if let Some(baseline) = &self.baseline {
            let beside = Comparison::new(["plan", "baseline"], plan, &baseline.plan(plan)?)?;
            return Ok(match self.json {
                true => format!("{:#}", beside.json_of_baseline(self.measured)),
                false => beside.text_of_baseline(self.measured),
            });
        }
        let Some(file) = &self.other else { return Ok(String::new()) };
        let (names, other) = (names([&self.plan, file]), load(file)?);
        let beside = Comparison::new(names.each_ref().map(String::as_str), plan, other.borrow())?;
        Ok(if self.json { format!("{:#}", beside.json()) } else { beside.text() })
    }
}

/// The names of two files in tables: their file names, if these differ and are short.
fn names(files: [&Path; 2]) -> [String; 2] {
    const SHORT: usize = 16;
    let stems = files.map(|f| f.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default());
    let plain = |s: &String| (1..=SHORT).contains(&s.chars().count()) && !s.chars().any(char::is_control);
    if stems[0] != stems[1] && stems.iter().all(plain) { stems } else { ["one", "other"].map(String::from) }
}
