//! `altiplano run PLAN|MODEL`: trains on the CPU workers of this machine, on GPUs, on XLA's devices, or as one of several
//! ranks. It also runs models without training.

use crate::commands::options::{PlanOrModel, Start};
use crate::commands::print;
use crate::commands::ranks::RankArguments;
use crate::commands::rate::Rate;
use crate::progress::Bar;
use altiplano::cost_models::profile::Profile;
use altiplano::inference::{Pass, infer};
use altiplano::ir::plan::Plan;
use altiplano::planner::Progress;
use altiplano::runtime::Session;
use altiplano::runtime::data::write_safetensors;
use altiplano::runtime::devices::cuda::CudaOptions;
use altiplano::runtime::devices::xla::XlaOptions;
use altiplano::simulate::Simulation;
use altiplano::training::checkpoint::Checkpoints;
use altiplano::training::evaluation::EvaluationOptions;
use altiplano::training::team::Team;
use altiplano::training::{DataOptions, Event, Ran, Scaling, Step, Training, train_on, train_until};
use altiplano::units::{digits, percent, seconds};
use altiplano::{Error, GivenStep, expect_writable, held, one_line, write_file};
use clap::Args;
use signal_hook::consts::{SIGALRM, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU};
use signal_hook::flag::{register, register_conditional_shutdown, register_usize};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Train a plan on CPU workers of this machine or on GPUs
#[derive(Args)]
pub(crate) struct Run {
    #[command(flatten)]
    plan: PlanOrModel,
    /// Optimizer steps, or batches of a model that is run without training (--loss none)
    #[arg(long, value_name = "N", default_value_t = 10)]
    steps: u64,
    /// Write the results of the last batch as result/0 and so on, if nothing is trained (.safetensors)
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Write the last step as a Chrome trace, with the tracks and names of `simulate --trace`
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Check the results of every op, and stop at the first that makes a NaN
    #[arg(long)]
    check_nan: bool,
    /// Write checkpoints to this folder: at the end, after a signal, and at the interval of --checkpoint-every
    #[arg(long, value_name = "DIR")]
    checkpoint: Option<PathBuf>,
    /// Steps between two checkpoints
    #[arg(long, value_name = "N", requires = "checkpoint", value_parser = clap::value_parser!(u64).range(1..))]
    checkpoint_every: Option<u64>,
    /// Keep only the newest K checkpoints
    #[arg(long, value_name = "K", requires = "checkpoint", value_parser = clap::value_parser!(u64).range(1..))]
    keep: Option<u64>,
    /// Resume from the newest complete checkpoint, up to --steps steps in all, under any plan of the model
    #[arg(long, requires = "checkpoint")]
    resume: bool,
    /// Another signal that ends the run after the step in progress, as SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGXCPU do: a
    /// name such as USR2, or a number
    #[arg(long, value_name = "NAME", value_parser = signal_named)]
    signal: Option<i32>,
    /// Write a JSON line per step (step, loss, learning_rate, seconds, samples_per_s, data_wait_s; if known,
    /// gradient_norm, noise_scale, loss_scale of the next step, skipped_steps) and per evaluation (step, eval_loss)
    #[arg(long, value_name = "FILE")]
    metrics: Option<PathBuf>,
    /// Evaluate the loss on this held-out data, in files as for --data
    #[arg(long, value_name = "FILE|DIR")]
    eval_data: Option<PathBuf>,
    /// Steps between two evaluations; one always follows the last step [default: 100]
    #[arg(long, value_name = "N", requires = "eval_data", value_parser = clap::value_parser!(u64).range(1..))]
    eval_every: Option<u64>,
    /// Batches per evaluation [default: 8]
    #[arg(long, value_name = "K", requires = "eval_data", value_parser = clap::value_parser!(u64).range(1..))]
    eval_steps: Option<u64>,
    /// Estimate the gradient noise scale: the batch size up to which larger batches save steps
    #[arg(long)]
    measure_noise_scale: bool,
    /// TOML file with options of `run`, by their names here (`lr = 0.003`); the command line takes precedence
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    ranks: RankArguments,
    #[command(flatten)]
    rate: Rate,
    #[command(flatten)]
    start: Start,
}

impl Run {
    pub(crate) fn run(self) -> Result<(), Error> {
        let kind = self.start.kind();
        let of_many = self.ranks.option_of_many(kind)?;
        self.ranks.clone().on_team(kind, |team| self.run_on(team, of_many))
    }

    /// `of_many` is the option that makes this process one of several, if any.
    fn run_on(self, team: Team, of_many: Option<&'static str>) -> Result<(), Error> {
        let leads = team.leads();
        // Only the leader prints.
        let print = |text: String| if leads { print(text) } else { Ok(()) };
        if let Some(option) = of_many {
            self.plan.expect_plan(option)?;
        }
        let (cuda, xla) = (self.start.cuda()?, self.start.xla()?);
        let files = [&self.trace, &self.output, &self.metrics].into_iter().filter(|_| leads);
        files.flatten().try_for_each(|file| expect_writable(file))?;
        let (mut plan, given) = self.plan.plan_and_step()?;
        plan.measure_noise = self.measure_noise_scale;
        self.expect_compatible(&plan)?;
        let profile = self.plan.profile()?;
        if !plan.schedule.trains() {
            self.start.expect_no_cuda()?;
            if let Some(option) = of_many {
                let problem = "supports only training so far; without it this plan runs on threads";
                return Err(Error::Option { option, problem });
            }
        }
        let (check_nan, record) = (self.check_nan, self.trace.is_some());
        let xla = xla.map(|options| XlaOptions { check_nan, record, ..options });
        let training = Training { xla, ..self.training(&plan, cuda, given.as_ref())? };
        print(format!("{}: {}", plan.model, one_line(&plan)))?;
        if let Some(profile) = &plan.profile {
            let step = if plan.schedule.trains() { "step" } else { "batch" };
            print(format!("predicted: {}/{step}, by the {profile}", seconds(plan.predicted.step_time_s)))?;
        }
        match plan.schedule.trains() {
            true => self.train(team, &plan, &training, profile.as_ref()),
            false => self.infer(&plan, &training, profile.as_ref()),
        }
    }

    /// Checks that the plan allows what the options measure and check.
    fn expect_compatible(&self, plan: &Plan) -> Result<(), Error> {
        if plan.measure_noise && plan.staleness() > 0 {
            let problem = "measures gradients at the end of a step, when the plan's late gradients are not known";
            return Err(Error::Option { option: "--measure-noise-scale", problem });
        }
        if plan.measure_noise && plan.servers.is_some() {
            let problem = "conflicts with parameter servers, which get the gradients of workers one after the other";
            return Err(Error::Option { option: "--measure-noise-scale", problem });
        }
        if self.check_nan && plan.loss_scale.is_some() {
            let problem =
                "conflicts with loss scaling, which overflows on purpose to find its scale; add --loss-scale off";
            return Err(Error::Option { option: "--check-nan", problem });
        }
        Ok(())
    }

    fn training(
        &self,
        plan: &Plan,
        mut cuda: Option<CudaOptions>,
        given: Option<&GivenStep>,
    ) -> Result<Training, Error> {
        if let Some(options) = &mut cuda {
            options.running.check_nan = self.check_nan;
        }
        let checkpoints = self.checkpoint.as_ref().map(|folder| Checkpoints {
            every: self.checkpoint_every,
            keep: self.keep,
            resume: self.resume,
            ..Checkpoints::new(folder)
        });
        let rate_schedule = self.rate.schedule(self.steps)?;
        if checkpoints.is_some() && !plan.schedule.trains() {
            return Err(Error::Option { option: "--checkpoint", problem: "nothing is trained with --loss none" });
        }
        if self.metrics.is_some() && !plan.schedule.trains() {
            return Err(Error::Option { option: "--metrics", problem: "nothing is trained with --loss none" });
        }
        let of_training =
            [("--eval-data", self.eval_data.is_some()), ("--measure-noise-scale", self.measure_noise_scale)];
        if let Some((option, _)) = of_training.into_iter().find(|(_, given)| *given && !plan.schedule.trains()) {
            return Err(Error::Option { option, problem: "nothing is trained with --loss none" });
        }
        let mut training = Training {
            check_nan: self.check_nan,
            cuda,
            checkpoints,
            rate_schedule,
            metrics: self.metrics.clone(),
            ..self.start.clone().training(self.steps, given)
        };
        training.evaluation = self.eval_data.clone().map(|file| EvaluationOptions {
            data: DataOptions { file: Some(file), token_type: training.data.token_type, shuffle: None },
            every: self.eval_every.unwrap_or(100),
            steps: self.eval_steps.unwrap_or(8),
        });
        if self.output.is_some() && plan.schedule.trains() {
            let problem = "a training step has no results; use --loss none to run the model";
            return Err(Error::Option { option: "--output", problem });
        }
        Ok(training)
    }

    /// Runs a model without training.
    fn infer(&self, plan: &Plan, training: &Training, profile: Option<&Profile>) -> Result<(), Error> {
        let bar = Bar::new();
        let (ran, results) = infer(plan, training, |pass| {
            let said = bar.suspend(|| print(pass_line(pass)));
            bar.step("running", pass.number as usize, training.steps as usize);
            said
        })?;
        drop(bar);
        if let Some(file) = &self.output {
            write_safetensors(file, &results)?;
        }
        self.end(plan, profile, &ran)
    }

    fn train(&self, team: Team, plan: &Plan, training: &Training, profile: Option<&Profile>) -> Result<(), Error> {
        team.expect_same(plan, training)?;
        let (leads, bar) = (team.leads(), Bar::new());
        // Only the leader prints.
        let print = |text: String| if leads { print(text) } else { Ok(()) };
        let stopped = signals(&bar, self.signal);
        let signal = || Some(stopped.load(Ordering::Relaxed) as i32).filter(|&signal| signal != 0);
        let (mut waited_s, mut spent_s) = (0.0, 0.0);
        let on_event = |event: Event<'_>| match event {
            _ if !leads => Ok(()),
            Event::Step(step) => {
                waited_s += step.data_wait_s;
                spent_s += step.data_wait_s + step.seconds;
                let said = bar.suspend(|| print(line(step)));
                bar.step("training", step.number as usize, training.steps as usize);
                said
            }
            event => bar.suspend(|| tell(&event, training.steps)),
        };
        let (ran, session): (Ran, Option<Session>) = match team {
            Team::Alone => (train_until(plan, training, signal, on_event)?, None),
            team => {
                let mut session = team.session(plan, training)?;
                (train_on(&mut session, plan, training, signal, on_event)?, Some(session))
            }
        };
        drop(bar);
        if training.data.file.is_some() && spent_s > 0.0 {
            print(format!("waiting for data: {} of the time of steps", percent(waited_s / spent_s)))?;
        }
        if self.measure_noise_scale {
            print(match &ran.noise {
                Some(noise) => {
                    format!("{noise}\n  `altiplano scale --noise-scale {:.0}` weighs batches by it", noise.samples)
                }
                None => "gradient noise scale: not measurable in so few steps; use more --steps or a larger batch"
                    .to_string(),
            })?;
        }
        if leads {
            self.end(plan, profile, &ran)?;
        }
        match session {
            Some(session) => Ok(session.finish()?),
            None => Ok(()),
        }
    }

    /// Writes the trace and prints the summary when all steps are done.
    fn end(&self, plan: &Plan, profile: Option<&Profile>, ran: &Ran) -> Result<(), Error> {
        let simulation = Simulation::new(plan.clone(), profile)?;
        if let Some(file) = &self.trace {
            write_file(file, &simulation.trace_of(&ran.last).to_string())?;
        }
        print(held(plan, &ran.peak_bytes)?)?;
        simulation.measured_text(&ran.last).map_or(Ok(()), print)
    }
}

/// Signals that end a run after the step in progress: those of users and of job schedulers.
const SIGNALS: [i32; 5] = [SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGXCPU];

/// The number of a signal that a program can handle.
fn signal_named(text: &str) -> Result<i32, String> {
    let names = [("HUP", SIGHUP), ("INT", SIGINT), ("QUIT", SIGQUIT), ("USR1", SIGUSR1), ("USR2", SIGUSR2)];
    let names = names.into_iter().chain([("ALRM", SIGALRM), ("TERM", SIGTERM), ("XCPU", SIGXCPU)]);
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let named = names.clone().find(|(known, _)| *known == name).map(|(_, number)| number);
    // Numbers are those of the signals above and of real-time signals, which libc leaves from 34 on.
    let numbered = text.parse().ok().filter(|&n| (34..=64).contains(&n) || names.clone().any(|(_, known)| known == n));
    named.or(numbered).ok_or_else(|| "not one of HUP, INT, QUIT, USR1, USR2, ALRM, TERM, XCPU and 34 to 64".to_string())
}

/// Returns whether the program was started with a signal ignored, as `nohup` does with SIGHUP.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// The signal that asks the run to end, once received; a second one ends it at once.
fn signals(bar: &Bar, also: Option<i32>) -> Arc<AtomicUsize> {
    let stopped = Arc::new(AtomicUsize::new(0));
    let again = Arc::new(AtomicBool::new(false));
    let also = also.filter(|signal| !SIGNALS.contains(signal));
    for signal in SIGNALS.into_iter().filter(|&signal| !is_ignored(signal)).chain(also) {
        // If no handler can be set, the signal ends the program at once. The order matters: the first signal of a kind
        // arms the shutdown by the second.
        let set = register_conditional_shutdown(signal, 128 + signal, again.clone())
            .and_then(|_| register(signal, again.clone()))
            .and_then(|_| register_usize(signal, stopped.clone(), signal as usize));
        if let Err(error) = set {
            bar.suspend(|| complain!("warning: a signal will end the run at once: {error}"));
        }
    }
    stopped
}

/// Prints an event of a run.
fn tell(event: &Event<'_>, steps: u64) -> Result<(), Error> {
    match event {
        Event::Step(step) => print(line(step)),
        Event::Evaluated { step, loss, seconds: time_s } => {
            print(format!("held out, after step {step}  loss {loss:<9.6}  {}", seconds(*time_s)))
        }
        Event::Resumed { step, place } if *step >= steps => {
            print(format!("{} has all {steps} steps: nothing to do", place.display()))
        }
        Event::Resumed { step, place } => print(format!("resuming after step {step} from {}", place.display())),
        Event::Data { description } => print(description),
        Event::FromTheStart => print("no checkpoint yet: starting from the beginning"),
        Event::Written { step, place } => print(format!("checkpoint of step {step}: {}", place.display())),
        Event::Damaged { error } => {
            complain!("warning: {error}; trying the previous one");
            Ok(())
        }
        Event::NotWritten { step, error } => {
            complain!("warning: no checkpoint of step {step} was written, and earlier ones are unaffected: {error}");
            Ok(())
        }
        Event::NotEvaluated { step, error } => {
            complain!("warning: no evaluation after step {step} and later ones, and training goes on: {error}");
            Ok(())
        }
        Event::MetricsEnded { error } => {
            complain!("warning: no more metrics are written, and training goes on: {error}");
            Ok(())
        }
        Event::MetricsCopied { copy } => {
            complain!("note: the file of metrics is cut to the steps done; {} has its former content", copy.display());
            Ok(())
        }
    }
}

/// `step 3  loss 6.2146  0.123 s/step  65.0 samples/s`
pub(crate) fn line(step: &Step) -> String {
    let Step { number, loss, seconds: time_s, samples_per_s, .. } = step;
    let skipped = match step.scaling {
        Some(Scaling { scale, skipped: true, .. }) => format!("  skipped: gradients overflow, loss scale now {scale}"),
        _ => String::new(),
    };
    format!(
        "step {number:>4}  loss {loss:<9.6}  {}/step  {} samples/s{skipped}",
        seconds(*time_s),
        digits(*samples_per_s)
    )
}

/// `batch 3  0.123 s/batch  65.0 samples/s`
fn pass_line(pass: &Pass) -> String {
    let Pass { number, seconds: time_s, samples_per_s } = pass;
    format!("batch {number:>4}  {}/batch  {} samples/s", seconds(*time_s), digits(*samples_per_s))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_have_names_and_numbers() {
        for (text, number) in
            [("usr2", SIGUSR2), ("SIGTERM", SIGTERM), ("SigXcpu", SIGXCPU), ("12", SIGUSR2), ("34", 34)]
        {
            assert_eq!(signal_named(text), Ok(number), "{text}");
        }
        // Nobody can handle some of them, and others are those of a fault.
        for text in ["KILL", "STOP", "SEGV", "9", "11", "65", "0", "-1", "", "SIG"] {
            assert!(signal_named(text).is_err(), "{text}");
        }
    }
}
