//! `altiplano verify PLAN|MODEL`: verifies that a plan computes what one device computes.

use crate::commands::options::{PlanOrModel, Start};
use crate::commands::say;
use crate::progress::Bar;
use altiplano::ir::plan::Plan;
use altiplano::planner::Progress;
use altiplano::training::Training;
use altiplano::verify::{Comparison, Verdict, verify};
use altiplano::{Error, GivenStep, one_line};
use clap::Args;
use std::path::PathBuf;

/// Run a plan on its devices and on a single CPU device, and compare loss, gradients and updated weights
#[derive(Args)]
pub(crate) struct Verify {
    #[command(flatten)]
    pub plan: PlanOrModel,
    /// Also compare with this file: weights by name, input/NAME, loss, grad/NAME or result/N (.safetensors)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["data", "weights"])]
    expect: Option<PathBuf>,
    #[command(flatten)]
    start: Start,
}

impl Verify {
    pub(crate) fn run(self) -> Result<(), Error> {
        self.start.xla()?;
        self.start.cuda()?;
        let (plan, given) = self.plan.plan_and_step()?;
        say(format!("{}: {}", plan.model, one_line(&plan)))?;
        let bar = Bar::new();
        let (text, verdict) = self.answer(&plan, given.as_ref(), &bar)?;
        drop(bar);
        say(text)?;
        verdict.and_then(|()| say("the numbers agree"))
    }

    /// Runs a loaded plan. Returns the tables, and an error if the numbers differ.
    pub(crate) fn answer(
        &self,
        plan: &Plan,
        given: Option<&GivenStep>,
        progress: &dyn Progress,
    ) -> Result<(String, Result<(), Error>), Error> {
        let (xla, cuda) = (self.start.xla()?, self.start.cuda()?);
        if !plan.schedule.trains() {
            self.start.expect_no_cuda()?;
        }
        let training = Training { cuda, xla, ..self.start.clone().training(1, given) };
        let verified = verify(plan, &training, self.expect.as_deref(), given, progress)?;
        let mut lines: Vec<String> = verified.loss.map(|loss| format!("loss {loss:.6}")).into_iter().collect();
        lines.push(table("one device", &verified.one_device));
        if let Some(file) = &self.expect {
            lines.push(table(&file.display().to_string(), &verified.expected));
        }
        match given {
            Some(_) if verified.given.is_empty() => {
                let why = "not compared, since the step changes them before they can be read";
                lines.push(format!("against the step's own gradients: {why}"));
            }
            Some(_) => lines.push(table("the step's own gradients", &verified.given)),
            None => {}
        }
        if verified.no_gradient {
            complain!("warning: all gradients are zero, in the plan and on one device: their agreement means little");
        }
        let verdict = match verified.failure() {
            None => Ok(()),
            Some(failure) if failure.verdict() == Verdict::BothNaN => {
                Err(Error::NoNumbers { what: failure.quantity.name(), tensor: failure.worst.tensor.clone() })
            }
            Some(failure) => Err(Error::NumbersDiffer {
                what: failure.quantity.name(),
                tensor: failure.worst.tensor.clone(),
                difference: failure.worst.amount,
                tolerance: failure.worst.allowed,
            }),
        };
        Ok((lines.join("\n"), verdict))
    }
}

fn table(reference: &str, comparisons: &[Comparison]) -> String {
    let mut lines = vec![format!("against {reference}:")];
    for c in comparisons {
        let verdict = match c.verdict() {
            Verdict::Agrees => "agrees",
            Verdict::Differs => "DIFFERS",
            Verdict::BothNaN => "NaN on both sides",
            Verdict::NotCompared => {
                lines.push(format!("  {:<15}  not compared", c.quantity.name()));
                continue;
            }
        };
        let worst = if c.tensors > 1 { format!("  worst of {}: {}", c.tensors, c.worst.tensor) } else { String::new() };
        lines.push(format!("  {:<15}  {verdict:<7}  {}{worst}", c.quantity.name(), c.worst));
    }
    lines.join("\n")
}
