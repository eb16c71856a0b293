//! `altiplano compare A B`: two plans. `altiplano compare PLAN --baseline '...'`: a plan against what somebody runs today.

use crate::commands::{load_to_ask, say};
use altiplano::Error;
use altiplano::compare::{Baseline, compared, duration, two_plans};
use clap::Args;
use std::path::PathBuf;

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
}

impl Compare {
    pub fn run(self) -> Result<(), Error> {
        let plan = load_to_ask(&self.plan)?;
        match (&self.baseline, &self.other) {
            (Some(baseline), _) => say(compared(&plan, &baseline.plan(&plan)?, self.measured)?),
            (None, Some(other)) => say(two_plans(["one", "other"], &plan, &load_to_ask(other)?)?),
            (None, None) => Ok(()),
        }
    }
}
