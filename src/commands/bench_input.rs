//! `altiplano bench-input MODEL --data PATH`: measures how fast batches are read, without training.

use crate::commands::options::{PlanOrModel, Start};
use crate::commands::say;
use altiplano::Error;
use altiplano::training::input_speed;
use altiplano::units::{bytes, digits, seconds};
use clap::Args;

/// Read batches as `run` does, and report the rate
#[derive(Args)]
pub(crate) struct BenchInput {
    #[command(flatten)]
    plan: PlanOrModel,
    /// Batches to read
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    batches: u64,
    #[command(flatten)]
    start: Start,
}

impl BenchInput {
    pub(crate) fn run(self) -> Result<(), Error> {
        let (plan, given) = self.plan.plan_and_step()?;
        let training = self.start.training(self.batches, given.as_ref());
        if training.data.file.is_none() {
            return Err(Error::Option { option: "--data", problem: "must name the file or folder to read" });
        }
        let speed = input_speed(&plan, &training)?;
        if let Some(description) = &speed.description {
            say(description)?;
        }
        let files = speed.files as f64;
        say(format!(
            "opened {} file{} in {}: {} files/s",
            speed.files,
            if speed.files == 1 { "" } else { "s" },
            seconds(speed.open_s),
            digits(files / speed.open_s.max(1e-9))
        ))?;
        let each = |amount: f64| amount / speed.seconds.max(1e-9);
        say(format!(
            "read {} batches of {} samples in {}: {} samples/s, {}/s in the model's types",
            speed.batches,
            plan.global_batch,
            seconds(speed.seconds),
            digits(each(speed.batches as f64 * plan.global_batch as f64)),
            bytes(each(speed.bytes as f64) as u64)
        ))
    }
}
