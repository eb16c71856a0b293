//! The loop of training steps, which all processes of a run execute together.
//!
//! Only errors of the trained state end a run at once. Errors of anything beside it (stdout, metrics, data) never cost
//! completed steps: the run goes on without, or it ends after the steps in progress and writes their checkpoint.

use super::checkpoint::{CheckpointProblem, DataState, Folder, Manifest, Position, Writer, Written, load};
use super::evaluation::Evaluation;
use super::loader::{Loaded, Loader};
use super::metrics::Metrics;
use super::noise::NoiseScale;
use super::{
    AHEAD_S, Batches, Event, MAX_AHEAD, Ran, SHORT_S, Scales, Step, Training, asks_for_norm, at_step, data_state,
    measured, note, resumed, scalars, start_of, word_of,
};
use crate::error::Error;
use crate::simulate::Recorded;
use altiplano_ir::plan::Plan;
use altiplano_runtime::ranks::World;
use altiplano_runtime::{HostTensor, RuntimeError, Session, StepReport};
use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The signal as which other processes see that the leader stops because of an error beside the trained state: SIGPIPE.
const STOPPED_BESIDE: u64 = 13;

/// A step that was issued to the devices.
struct Ahead {
    number: u64,
    learning_rate: f64,
    data_wait_s: f64,
    /// Position in the data after the step.
    position: Position,
}

/// A run between two steps.
struct Steps<'a> {
    plan: &'a Plan,
    training: &'a Training,
    session: &'a mut Session,
    on_event: &'a mut dyn FnMut(Event<'_>) -> Result<(), Error>,
    writer: Option<Writer>,
    metrics: Option<Metrics>,
    evaluation: Option<Evaluation>,
    noise: NoiseScale,
    scales: Option<Scales>,
    loader: Loader,
    data: DataState,
    /// Steps in progress, and the number of the next one.
    begun: VecDeque<Ahead>,
    next: u64,
    /// Recent duration of a step.
    pace_s: f64,
    last: Recorded,
    /// The checkpoint that could not be written, until a later one is.
    failed: Option<(u64, Error)>,
    /// The first error beside the trained state for which the run ends.
    beside: Option<Error>,
    /// The signal after which no process begins another step.
    interrupted: Option<i32>,
    /// The last complete step, and the position in the data after it.
    done: Option<(u64, Position)>,
}

/// Trains the steps that remain, from the weights or the checkpoint that `training` names.
pub(super) fn train_in(
    plan: &Plan,
    training: &Training,
    session: &mut Session,
    folder: Option<Folder>,
    signal: impl Fn() -> Option<i32>,
    on_event: &mut dyn FnMut(Event<'_>) -> Result<(), Error>,
) -> Result<Ran, Error> {
    let from = match &training.checkpoints {
        Some(options) if options.resume => resumed(plan, session, options, &mut *on_event)?,
        _ => None,
    };
    // A resumed run keeps its original seeds.
    let mut training = training.clone();
    if let Some((manifest, _)) = &from {
        (training.seed, training.data.shuffle) = (manifest.data.seed, manifest.data.shuffle);
    }
    let mut steps = Steps::new(plan, &training, session, folder, from.as_ref(), on_event)?;
    steps.run(&signal)?;
    steps.finish()
}

impl<'a> Steps<'a> {
    fn new(
        plan: &'a Plan,
        training: &'a Training,
        session: &'a mut Session,
        folder: Option<Folder>,
        from: Option<&(Manifest, PathBuf)>,
        on_event: &'a mut dyn FnMut(Event<'_>) -> Result<(), Error>,
    ) -> Result<Steps<'a>, Error> {
        let writer = training.checkpoints.as_ref().map(|options| match folder {
            Some(folder) => Writer::new(folder),
            None => Writer::contributing(options.clone()),
        });
        let (weights, mut batches) = start_of(plan, training, |name| from.is_none() && session.holds(name))?;
        let done = match from {
            Some((manifest, place)) => {
                let same = manifest.data.expect_same(&data_state(training, &batches));
                same.map_err(|problem| problem.at(place))?;
                note(session, || format!("loading {}", place.display()));
                load(plan, session, manifest, place)?;
                batches.seek(manifest.data.position);
                on_event(Event::Resumed { step: manifest.step, place })?;
                manifest.step
            }
            None => {
                load_all(session, weights)?;
                if training.checkpoints.as_ref().is_some_and(|options| options.resume) {
                    on_event(Event::FromTheStart)?;
                }
                0
            }
        };
        if let Some(description) = batches.description() {
            on_event(Event::Data { description: &description })?;
        }
        let metrics = match training.metrics.as_ref().filter(|_| session.leads()) {
            Some(file) => Some(Metrics::open(file, done, |copy| on_event(Event::MetricsCopied { copy }))?),
            None => None,
        };
        let options = training.evaluation.as_ref();
        let evaluation = options.map(|options| Evaluation::new(plan, training, options, session)).transpose()?;
        let data = data_state(training, &batches);
        let mut scales = plan.loss_scale.filter(|_| plan.staleness() == 0).map(Scales::new);
        if let Some(scales) = scales.as_mut().filter(|_| from.is_some()) {
            scales.read(plan, session)?;
        }
        let loader = started(batches, session, training.steps.saturating_sub(done))?;
        let noise = NoiseScale::new(plan.global_batch);
        let (begun, last) = (VecDeque::new(), Recorded::default());
        let (next, pace_s) = (done + 1, f64::INFINITY);
        let (failed, beside, interrupted) = (None, None, None);
        Ok(Steps {
            plan,
            training,
            session,
            on_event,
            writer,
            metrics,
            evaluation,
            noise,
            scales,
            loader,
            data,
            begun,
            next,
            pace_s,
            last,
            failed,
            beside,
            interrupted,
            done: None,
        })
    }

    /// Runs all steps, or those up to a signal or an error.
    fn run(&mut self, signal: &dyn Fn() -> Option<i32>) -> Result<(), Error> {
        while !self.ends() {
            self.begin_ahead(signal)?;
            let Some(ahead) = self.begun.pop_front() else { break };
            self.session.say(self.word(signal));
            let (number, position) = (ahead.number, ahead.position);
            let step = self.end_step(ahead)?;
            self.report(&step);
            if !step.loss.is_finite() {
                return Err(Error::Diverged { step: number, loss: step.loss });
            }
            self.done = Some((number, position));
            if self.writes(number) {
                self.session.flush().map_err(|error| at_step(number, error))?;
            }
            if self.evaluates(number) {
                self.evaluate(number)?;
            }
            if self.writes(number) {
                self.checkpoint(number, position)?;
            } else if let Some(written) = self.writer.as_mut().and_then(Writer::poll) {
                self.tell(written);
            }
        }
        if self.stops() { self.stop() } else { Ok(()) }
    }

    /// Returns whether no further step begins although some remain. An error beside the trained state ends a process
    /// that is alone; several end after the step in which all hear of it.
    fn stops(&self) -> bool {
        self.interrupted.is_some() || self.beside.is_some() && self.session.world().is_none()
    }

    /// Returns whether the steps in progress are complete and no other begins.
    fn ends(&self) -> bool {
        self.begun.is_empty() && self.stops()
    }

    /// A signal, or that of an error beside the trained state, for all processes to stop after the same step.
    fn word(&self, signal: &dyn Fn() -> Option<i32>) -> u64 {
        if self.beside.is_some() { STOPPED_BESIDE } else { word_of(signal()) }
    }

    /// Returns whether a checkpoint follows a step. It needs weights that include all gradients.
    fn writes(&self, number: u64) -> bool {
        let every = self.training.checkpoints.as_ref().and_then(|options| options.every);
        let is_due = every.is_some_and(|n| n > 0 && number.is_multiple_of(n));
        self.training.checkpoints.is_some() && (is_due || number == self.training.steps)
    }

    fn evaluates(&self, number: u64) -> bool {
        let every = self.training.evaluation.as_ref().map(|options| options.every.max(1));
        every.is_some_and(|n| number.is_multiple_of(n) || number == self.training.steps)
    }

    /// Returns whether another step may begin before those in progress end.
    fn may_begin(&self) -> bool {
        let reads_state = |ahead: &Ahead| self.writes(ahead.number) || self.evaluates(ahead.number);
        !self.stops() && self.next <= self.training.steps && !self.begun.back().is_some_and(reads_state)
    }

    /// Begins steps ahead if they overlap. Short steps are queued, so that devices neither need a wake-up for each nor
    /// compete for a core with this thread.
    fn begin_ahead(&mut self, signal: &dyn Fn() -> Option<i32>) -> Result<(), Error> {
        // If state is read after each step, the next one must wait.
        let queues = self.session.queues() && !asks_for_norm(self.plan, self.training) && self.scales.is_none();
        let most = match (self.session.overlaps(), queues && self.pace_s < SHORT_S) {
            (_, true) => ((AHEAD_S / self.pace_s) as usize).clamp(2, MAX_AHEAD),
            (true, false) => 2,
            (false, false) => 1,
        };
        let refills = self.begun.len() <= most / 2;
        while refills && self.begun.len() < most && self.may_begin() {
            let number = self.next;
            note(self.session, || format!("waiting for the data of step {number}"));
            let loaded = match self.loader.next() {
                Ok(Some(loaded)) => loaded,
                Ok(None) => break,
                // Other processes may have begun the step, and cannot go on without this one.
                Err(error) if self.session.world().is_some() => return Err(error),
                Err(error) => {
                    self.beside.get_or_insert(error);
                    break;
                }
            };
            let (Loaded { batch, position }, data_wait_s) = loaded;
            let learning_rate = self.training.rate_schedule.at(number, self.training.learning_rate);
            self.session.say(self.word(signal));
            let running = self.session.begin_step(&batch, &scalars(learning_rate, number));
            running.map_err(|error| at_step(number, error))?;
            self.begun.push_back(Ahead { number, learning_rate, data_wait_s, position });
            self.next += 1;
        }
        // Wait until half of them are done.
        if refills && self.begun.len() > most / 2 && most > 2 {
            std::thread::sleep(Duration::from_secs_f64(self.pace_s * (self.begun.len() - most / 2) as f64));
        }
        Ok(())
    }

    /// Waits for a step.
    fn end_step(&mut self, ahead: Ahead) -> Result<Step, Error> {
        let Ahead { number, learning_rate, data_wait_s, .. } = ahead;
        let report = self.session.end_step().map_err(|error| at_step(number, error))?;
        let StepReport { loss, seconds, recordings, said, .. } = report;
        self.interrupted = self.interrupted.or(i32::try_from(said).ok().filter(|&signal| signal != 0));
        self.last = Recorded { seconds, recordings };
        // A single slow step says little about the next.
        self.pace_s = seconds.min(1.25 * self.pace_s).max(1e-6);
        let gradient_norm = measured(self.plan, self.training, self.session, &mut self.noise)?;
        let scaling = self.scales.as_mut().map(|scales| scales.read(self.plan, self.session)).transpose()?;
        Ok(Step {
            number,
            loss,
            learning_rate,
            seconds,
            samples_per_s: self.plan.global_batch as f64 / seconds,
            data_wait_s,
            // A skipped step has none.
            gradient_norm: gradient_norm.filter(|norm| norm.is_finite() || scaling.is_none()),
            noise_scale: self.noise.now(),
            scaling,
        })
    }

    fn report(&mut self, step: &Step) {
        self.measure(|metrics| metrics.write(step));
        self.event(Event::Step(step));
    }

    /// Writes metrics. The first failure ends them, and the run goes on.
    fn measure(&mut self, write: impl FnOnce(&mut Metrics) -> Result<(), Error>) {
        if let Some(Err(error)) = self.metrics.as_mut().map(write) {
            self.metrics = None;
            self.event(Event::MetricsEnded { error: &error });
        }
    }

    /// Reports an event. The first failure ends the run after the steps in progress.
    fn event(&mut self, event: Event<'_>) {
        if let Err(error) = (self.on_event)(event) {
            self.beside.get_or_insert(error);
        }
    }

    /// Evaluates held-out data. Data that cannot be read ends the evaluations, and the run goes on if no other process
    /// waits for this one.
    fn evaluate(&mut self, number: u64) -> Result<(), Error> {
        let Some(evaluation) = &mut self.evaluation else { return Ok(()) };
        let start = Instant::now();
        match evaluation.loss(self.session) {
            Ok(loss) => {
                self.measure(|metrics| metrics.write_evaluation(number, loss));
                self.event(Event::Evaluated { step: number, loss, seconds: start.elapsed().as_secs_f64() });
                Ok(())
            }
            Err(error) if error.is_usage() && self.session.world().is_none() => {
                self.evaluation = None;
                self.event(Event::NotEvaluated { step: number, error: &error });
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Starts to write the checkpoint of a step, once the one before it is written.
    fn checkpoint(&mut self, number: u64, position: Position) -> Result<(), Error> {
        self.finish_writing();
        let Some(writer) = &mut self.writer else { return Ok(()) };
        let data = DataState { position, ..self.data.clone() };
        note(self.session, || format!("gathering the checkpoint of step {number}"));
        writer.start(self.plan, self.session, Manifest::new(self.plan, number, data))
    }

    fn finish_writing(&mut self) {
        if let Some(written) = self.writer.as_mut().and_then(Writer::finish) {
            self.tell(written);
        }
    }

    /// Reports the outcome of a checkpoint. The last error stays until a checkpoint succeeds.
    fn tell(&mut self, Written { step, result }: Written) {
        match result {
            Ok(place) => {
                self.failed = None;
                self.event(Event::Written { step, place: &place });
            }
            Err(error) => {
                self.event(Event::NotWritten { step, error: &error });
                self.failed = Some((step, error));
            }
        }
    }

    /// Writes the checkpoint of the last step and ends the run early.
    fn stop(&mut self) -> Result<(), Error> {
        let Some((number, position)) = self.done else { return self.beside.take().map_or(Ok(()), Err) };
        if !self.writes(number) {
            self.session.flush().map_err(|error| at_step(number, error))?;
            self.checkpoint(number, position)?;
        }
        note(self.session, || format!("writing the checkpoint of step {number}"));
        self.finish_writing();
        // No process may end the run before everything is written.
        self.session.world().map_or(Ok(()), World::meet)?;
        Err(self.halted().unwrap_or(Error::Interrupted { signal: self.interrupted.unwrap_or(0), step: number }))
    }

    /// The error beside the trained state that ends the run, if there is one.
    fn halted(&mut self) -> Option<Error> {
        let error = self.beside.take()?;
        let (step, _) = self.done?;
        let saved = self.writer.is_some() && self.failed.is_none();
        Some(Error::Halted { error: Box::new(error), step, saved })
    }

    /// Writes the last checkpoint and returns the records of the run.
    fn finish(&mut self) -> Result<Ran, Error> {
        note(self.session, || "writing the last checkpoint".to_string());
        self.finish_writing();
        // The run's result is its last checkpoint, so failing to write it is an error.
        if let (Some((step, error)), Some(options)) = (self.failed.take(), &self.training.checkpoints) {
            return Err(CheckpointProblem::NotWritten { step, error: Box::new(error) }.at(&options.folder));
        }
        let Recorded { seconds, recordings } = std::mem::take(&mut self.last);
        let last = Recorded { seconds, recordings: self.session.all_recordings(recordings)? };
        let ran = Ran { peak_bytes: self.session.all_peak_bytes()?, last, noise: self.noise.estimate() };
        self.halted().map_or(Ok(ran), Err)
    }
}

/// Gives a session its initial weights.
fn load_all(session: &mut Session, weights: BTreeMap<String, HostTensor>) -> Result<(), RuntimeError> {
    weights.iter().try_for_each(|(name, weights)| session.load_parameter(name, weights))
}

/// A loader of the rows that this process reads.
fn started(mut batches: Batches, session: &Session, steps: u64) -> Result<Loader, Error> {
    batches.read_only(|input, dim, rows| session.rows_read(input, dim, rows));
    Loader::new(batches, steps)
}
