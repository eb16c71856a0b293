//! `altiplano compare PLAN --baseline '...'`: a plan against what somebody runs today.

use crate::commands::say;
use altiplano::compare::{Baseline, compared, duration};
use altiplano::{Error, load_plan};
use clap::Args;
use std::path::PathBuf;

/// Set a plan beside a configuration that you run today
#[derive(Args)]
pub struct Compare {
    /// A file that `altiplano plan -o` wrote
    plan: PathBuf,
    /// The configuration: tp, pp, dp, mbs (samples of a microbatch on one replica), zero, recompute, target (megatron by default),
    /// as in 'tp=4 pp=2 mbs=1 recompute'
    #[arg(long, value_name = "DEGREES")]
    baseline: Baseline,
    /// What a step of it takes, measured (5.3s, 830ms)
    #[arg(long, value_name = "SECONDS", value_parser = duration)]
    measured: Option<f64>,
}

impl Compare {
    pub fn run(self) -> Result<(), Error> {
        let plan = load_plan(&self.plan)?;
        let baseline = self.baseline.plan(&plan)?;
        say(compared(&plan, &baseline, self.measured))
    }
}
