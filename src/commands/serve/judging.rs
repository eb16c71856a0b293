//! The method `judge`: figures of degrees that are given in full, without a search.

use crate::commands::options::{ModelOptions, PlanOptions};
use crate::commands::serve::failure::Failure;
use crate::commands::serve::session::Session;
use altiplano::cost_models::Rooflines;
use altiplano::ir::plan::Schedule;
use altiplano::planner::explain::alternatives::shape;
use altiplano::planner::{PlanFailure, fits};
use altiplano::{Error, figures};
use clap::Args;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Predict a configuration given in full, in milliseconds: its figures, or the reason why it cannot be. Open degrees are
/// 1, dp follows from the cluster, a replica has one sample at a time, and nothing is recomputed
#[derive(Args)]
pub struct Judge {
    /// A handle of `load_model`, or a model file
    model: PathBuf,
    #[command(flatten)]
    options: ModelOptions,
    #[command(flatten)]
    plan: PlanOptions,
}

/// Options of searches, which a judgement has none of.
pub const WITHOUT: [&str; 11] = [
    "pin",
    "offload",
    "update",
    "goal",
    "parameter_servers",
    "asynchronous",
    "search",
    "profile",
    "cache",
    "prefer",
    "pad",
];

impl Judge {
    pub fn answer(&self, session: &Session) -> Result<Value, Failure> {
        let source = session.source(&self.model, &self.options)?;
        let judge = source.judge(&self.plan)?;
        let mut request = judge.request().clone();
        match self.plan.fixed.fix(&mut request) {
            Err(error @ Error::Plan(_)) => return Ok(cannot_be(&error)),
            fixed => fixed?,
        }
        if request.schedule == Some(Schedule::PipeDream) {
            let problem = "pipedream is not judged, but planned: `plan` takes it";
            return Err(Error::Option { option: "--schedule", problem }.into());
        }
        let plan = match judge.judged(&request, &Rooflines::of(&request.cluster)) {
            Ok(plan) => plan,
            Err(failure) => return Ok(cannot_be(&failure.into())),
        };
        let mut figures = figures(&plan);
        if !fits(&plan) {
            let detail = shape(&plan);
            figures["kind"] = json!("memory");
            figures["reason"] = json!(PlanFailure::of_closest(plan, detail).to_string());
        }
        Ok(figures)
    }
}

/// The judgement of a configuration that no plan has.
fn cannot_be(why: &Error) -> Value {
    json!({"fits": false, "kind": why.kind(), "reason": why.to_string()})
}
