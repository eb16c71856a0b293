//! `altiplano compare A B`: two plans. `altiplano compare PLAN --baseline '...'`: a plan against what somebody runs today.

use crate::commands::{load_to_ask, say};
use altiplano::Error;
use altiplano::compare::{Baseline, Comparison, duration};
use clap::Args;
use std::path::{Path, PathBuf};

/// Set a plan beside another one, or beside a configuration that you run today
#[derive(Args)]
pub struct Compare {
    /// A file that `altiplano plan -o` wrote
    plan: PathBuf,
    /// Another one, of the same model or of another
    #[arg(required_unless_present = "baseline", conflicts_with = "baseline")]
    other: Option<PathBuf>,
    /// The configuration: tp, pp, dp, mbs (samples of a microbatch on one replica), zero, recompute, target (megatron by default),
    /// as in 'tp=4 pp=2 mbs=1 recompute'
    #[arg(long, value_name = "DEGREES")]
    baseline: Option<Baseline>,
    /// What a step of the configuration takes, measured (5.3s, 830ms)
    #[arg(long, value_name = "SECONDS", value_parser = duration, requires = "baseline", conflicts_with = "other")]
    measured: Option<f64>,
    /// JSON, as docs/comparison.schema.json says
    #[arg(long)]
    json: bool,
}

impl Compare {
    pub fn run(self) -> Result<(), Error> {
        let plan = load_to_ask(&self.plan)?;
        if let Some(baseline) = &self.baseline {
            let beside = Comparison::new(["plan", "baseline"], &plan, &baseline.plan(&plan)?)?;
            return match self.json {
                true => say(format!("{:#}", beside.json_of_baseline(self.measured))),
                false => say(beside.text_of_baseline(self.measured)),
            };
        }
        let Some(file) = &self.other else { return Ok(()) };
        let names = names([&self.plan, file]);
        let beside = Comparison::new(names.each_ref().map(String::as_str), &plan, &load_to_ask(file)?)?;
        if self.json { say(format!("{:#}", beside.json())) } else { say(beside.text()) }
    }
}

/// What two files are called in tables: by their names, where these differ and are short.
fn names(files: [&Path; 2]) -> [String; 2] {
    const SHORT: usize = 16;
    let stems = files.map(|f| f.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default());
    let plain = |s: &String| (1..=SHORT).contains(&s.chars().count()) && !s.chars().any(char::is_control);
    if stems[0] != stems[1] && stems.iter().all(plain) { stems } else { ["one", "other"].map(String::from) }
}
