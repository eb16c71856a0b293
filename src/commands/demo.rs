//! `altiplano demo`: plans, trains and verifies a small GPT that comes with the project.

use crate::commands::run::line;
use crate::commands::say;
use altiplano::planner::Silent;
use altiplano::training::{Step, Training, train};
use altiplano::verify::single_device;
use altiplano::{Error, ImportOptions, held, load_cluster, load_model, plan, report, request};
use clap::Args;
use std::path::PathBuf;

/// Plan a small GPT for four workers, train it on four and on one, and compare the losses
#[derive(Args)]
pub(crate) struct Demo {
    /// The model
    #[arg(default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/models/gpt-small-demo.mlir"), hide_default_value = true)]
    model: PathBuf,
    /// Optimizer steps
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
}

impl Demo {
    pub(crate) fn run(self) -> Result<(), Error> {
        let model = load_model(&self.model, &ImportOptions::default())?;
        let plan = plan(&request(&model, load_cluster("local:4")?), &Silent)?;
        say(report(&plan))?;

        // At this rate the loss falls from the first step on. At three times the rate it first rises, and rounding
        // differences between machines are no longer small after ten steps.
        let training = Training { steps: self.steps, learning_rate: 1e-3, ..Training::default() };
        say("\nTraining on four workers")?;
        let four = self.losses(&plan, &training)?;
        say("\nThe same on one")?;
        let one = self.losses(&single_device(&plan)?, &training)?;

        say("\nstep  four workers  one worker  relative difference")?;
        let mut worst = 0.0f64;
        for (a, b) in four.iter().zip(&one) {
            let difference = (a.loss - b.loss).abs() / b.loss.abs().max(f64::MIN_POSITIVE);
            worst = worst.max(difference);
            say(format!("{:>4}  {:<12.6}  {:<10.6}  {difference:.1e}", a.number, a.loss, b.loss))?;
        }
        // Rounding errors grow from step to step, since each step starts where the last one ended.
        let tolerance = 1e-4;
        if worst > tolerance {
            let tensor = "loss".to_string();
            return Err(Error::NumbersDiffer { what: "the course", tensor, difference: worst, tolerance });
        }
        say("The losses agree.")
    }

    fn losses(&self, plan: &altiplano::ir::plan::Plan, training: &Training) -> Result<Vec<Step>, Error> {
        let mut steps = Vec::new();
        let ran = train(plan, training, |step| {
            steps.push(*step);
            say(line(step))
        })?;
        say(held(plan, &ran.peak_bytes)?)?;
        Ok(steps)
    }
}
