//! `altiplano why-not PLAN --tp 8`: compares the plan with the best plan under other fixed choices.

use crate::commands::fixed::FixedOptions;
use crate::commands::{explain_failure, load_to_ask, made_by, say};
use crate::progress::Bar;
use altiplano::compare::Comparison;
use altiplano::cost_models::Rooflines;
use altiplano::ir::plan::Plan;
use altiplano::planner::{Request, plan_or_closest};
use altiplano::units::{percent, seconds};
use altiplano::{Error, expect_writable, side_by_side, write_file};
use clap::Args;
use std::path::PathBuf;

/// Show what a plan with other degrees would cost: `why-not plan.json --tp 8 --pp 1`
#[derive(Args)]
pub(crate) struct WhyNot {
    /// A plan file, written by `altiplano plan -o`
    pub plan: PathBuf,
    #[command(flatten)]
    fixed: FixedOptions,
    /// Write the other plan to this file
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print JSON (docs/comparison.schema.json, or docs/failure.schema.json if there is no such plan)
    #[arg(long)]
    json: bool,
}

impl WhyNot {
    pub(crate) fn run(self) -> Result<(), Error> {
        self.output.as_deref().map_or(Ok(()), expect_writable)?;
        self.expect_fixed()?;
        let chosen = load_to_ask(&self.plan)?;
        let request = self.request(&chosen)?;
        let bar = Bar::stoppable();
        let costs = Rooflines::of(&request.cluster);
        let mut asked = match plan_or_closest(&request, &costs, &bar).map_err(Error::from) {
            Err(error) => {
                explain_failure(&request, &error, &bar, self.json)?;
                return Err(error);
            }
            Ok(plan) => plan,
        };
        drop(bar);
        asked.made_by = Some(made_by());
        say(self.answer(&chosen, &asked)?)
    }

    fn expect_fixed(&self) -> Result<(), Error> {
        let problem = "give what the plan should have had, such as --tp 8, as `altiplano plan` takes it";
        if self.fixed.is_empty() { Err(Error::Option { option: "why-not", problem }) } else { Ok(()) }
    }

    /// The request that the other plan answers.
    pub(crate) fn request(&self, chosen: &Plan) -> Result<Request, Error> {
        self.expect_fixed()?;
        let mut request = Request::of_plan(chosen);
        self.fixed.fix_all(&mut request)?;
        Ok(request)
    }

    /// The comparison with the plan that was asked for, which is written if the options say so.
    pub(crate) fn answer(&self, chosen: &Plan, asked: &Plan) -> Result<String, Error> {
        if let Some(file) = &self.output {
            write_file(file, &asked.to_json())?;
        }
        let (ours, theirs) = (chosen.predicted.step_time_s, asked.predicted.step_time_s);
        let beside = Comparison::new(["plan", "asked for"], chosen, asked)?;
        if self.json {
            return Ok(format!("{:#}", beside.json()));
        }
        let tables = side_by_side(beside.names, beside.simulations.each_ref());
        let part = percent((theirs / ours - 1.0).abs());
        let difference = match theirs > ours {
            true => format!("the requested plan takes {} a step more ({part})", seconds(theirs - ours)),
            false => format!(
                "the requested plan takes {} a step less ({part}): this plan was made with other choices fixed, or needs fewer devices or less memory",
                seconds(ours - theirs)
            ),
        };
        Ok(format!("{tables}\n\n{difference}"))
    }
}
