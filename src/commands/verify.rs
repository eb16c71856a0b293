//! `altiplano verify PLAN|MODEL`: verifies that a plan computes what one device computes.

use crate::commands::options::{PlanOrModel, Start};
use crate::commands::say;
use crate::progress::Bar;
use altiplano::training::Training;
use altiplano::verify::{Comparison, Verdict, verify};
use altiplano::{Error, one_line};
use clap::Args;
use std::path::PathBuf;

/// Run a plan on its devices and on a single CPU device, and compare loss, gradients and updated weights
#[derive(Args)]
pub struct Verify {
    #[command(flatten)]
    plan: PlanOrModel,
    /// Also compare with this file: weights by name, input/NAME, loss, grad/NAME or result/N (.safetensors)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["data", "weights"])]
    expect: Option<PathBuf>,
    /// The PJRT plugin of `--device xla:cpu` [default: that of ALTIPLANO_PJRT_PLUGIN or of VIRTUAL_ENV]
    #[arg(long, value_name = "FILE", requires = "device")]
    plugin: Option<PathBuf>,
    #[command(flatten)]
    start: Start,
}

impl Verify {
    pub fn run(self) -> Result<(), Error> {
        let xla = self.start.xla(self.plugin.as_deref())?;
        let cuda = if xla.is_some() { None } else { self.start.cuda()? };
        let (plan, given) = self.plan.plan_and_step()?;
        if !plan.schedule.trains() {
            self.start.expect_cpu()?;
        }
        let training = Training { cuda, xla, ..self.start.training(1, given.as_ref()) };
        say(format!("{}: {}", plan.model, one_line(&plan)))?;
        let bar = Bar::new();
        let verified = verify(&plan, &training, self.expect.as_deref(), given.as_ref(), &bar)?;
        drop(bar);
        if let Some(loss) = verified.loss {
            say(format!("loss {loss:.6}"))?;
        }
        say(table("one device", &verified.one_device))?;
        if let Some(file) = &self.expect {
            say(table(&file.display().to_string(), &verified.expected))?;
        }
        match given {
            Some(_) if verified.given.is_empty() => {
                say(
                    "against the step's own gradients: not compared, since the step changes them before they can be read",
                )?;
            }
            Some(_) => say(table("the step's own gradients", &verified.given))?,
            None => {}
        }
        if verified.no_gradient {
            eprintln!("warning: all gradients are zero, in the plan and on one device: their agreement means little");
        }
        match verified.failure() {
            None => say("the numbers agree"),
            Some(failure) if failure.verdict() == Verdict::BothNaN => {
                Err(Error::NoNumbers { what: failure.quantity.name(), tensor: failure.worst.tensor.clone() })
            }
            Some(failure) => Err(Error::NumbersDiffer {
                what: failure.quantity.name(),
                tensor: failure.worst.tensor.clone(),
                difference: failure.worst.amount,
                tolerance: failure.worst.allowed,
            }),
        }
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
