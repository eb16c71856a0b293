//! `altiplano run PLAN|MODEL`: trains on the CPU workers of this machine, or runs a model that is not trained.

use crate::commands::options::{PlanOrModel, Start};
use crate::commands::say;
use crate::progress::Bar;
use altiplano::cost_models::profile::Profile;
use altiplano::inference::{Pass, infer};
use altiplano::ir::plan::Plan;
use altiplano::planner::Progress;
use altiplano::runtime::data::write_safetensors;
use altiplano::simulate::Simulation;
use altiplano::training::{Ran, Step, train};
use altiplano::units::{digits, seconds};
use altiplano::{Error, expect_writable, held, one_line, write_file};
use clap::Args;
use std::path::PathBuf;

/// Train a plan on CPU workers of this machine
#[derive(Args)]
pub struct Run {
    #[command(flatten)]
    plan: PlanOrModel,
    /// Optimizer steps, or batches of a model that is run and not trained (--loss none)
    #[arg(long, value_name = "N", default_value_t = 10)]
    steps: u64,
    /// Write the results of the last batch as result/0 and so on, where nothing is trained (.safetensors)
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Write the last step as a Chrome trace, with the tracks and names of `simulate --trace`
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    #[command(flatten)]
    start: Start,
}

impl Run {
    pub fn run(self) -> Result<(), Error> {
        let files = [&self.trace, &self.output];
        files.into_iter().flatten().try_for_each(|file| expect_writable(file))?;
        let (plan, given) = self.plan.plan_and_step()?;
        let profile = self.plan.profile()?;
        let training = self.start.clone().training(self.steps, given.as_ref());
        if self.output.is_some() && plan.schedule.trains() {
            let problem = "a training step gives no results; --loss none runs the model instead";
            return Err(Error::Option { option: "--output", problem });
        }
        say(format!("{}: {}", plan.model, one_line(&plan)))?;
        if let Some(profile) = &plan.profile {
            let step = if plan.schedule.trains() { "step" } else { "batch" };
            say(format!("predicted: {}/{step}, by the {profile}", seconds(plan.predicted.step_time_s)))?;
        }
        let bar = Bar::new();
        if !plan.schedule.trains() {
            let (ran, results) = infer(&plan, &training, |pass| {
                let said = bar.suspend(|| say(pass_line(pass)));
                bar.step("running", pass.number as usize, training.steps as usize);
                said
            })?;
            drop(bar);
            if let Some(file) = &self.output {
                write_safetensors(file, &results)?;
            }
            return self.end(&plan, profile.as_ref(), &ran);
        }
        let ran = train(&plan, &training, |step| {
            let said = bar.suspend(|| say(line(step)));
            bar.step("training", step.number as usize, training.steps as usize);
            said
        })?;
        drop(bar);
        self.end(&plan, profile.as_ref(), &ran)
    }

    /// What is said when all steps are done.
    fn end(&self, plan: &Plan, profile: Option<&Profile>, ran: &Ran) -> Result<(), Error> {
        say(held(plan, &ran.peak_bytes)?)?;
        let simulation = Simulation::new(plan.clone(), profile)?;
        if let Some(table) = simulation.measured_text(&ran.last) {
            say(table)?;
        }
        match &self.trace {
            Some(file) => write_file(file, &simulation.trace_of(&ran.last).to_string()),
            None => Ok(()),
        }
    }
}

/// `step 3  loss 6.2146  0.123 s/step  65.0 samples/s`
pub fn line(step: &Step) -> String {
    let Step { number, loss, seconds: time_s, samples_per_s } = step;
    format!("step {number:>4}  loss {loss:<9.6}  {}/step  {} samples/s", seconds(*time_s), digits(*samples_per_s))
}

/// `batch 3  0.123 s/batch  65.0 samples/s`
fn pass_line(pass: &Pass) -> String {
    let Pass { number, seconds: time_s, samples_per_s } = pass;
    format!("batch {number:>4}  {}/batch  {} samples/s", seconds(*time_s), digits(*samples_per_s))
}
