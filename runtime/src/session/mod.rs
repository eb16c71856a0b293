//! A session runs the programs of a plan, wherever their devices are: threads of this process, MPI ranks, or GPUs of one
//! process or of several. [`Session`] has all that they share: inputs, steps in progress, losses, parameters, state, and
//! what processes agree on. `Devices` has what differs: how a device of this process gets a command and answers it,
//! and how its process talks to the others.

mod devices;
mod threads;

pub(crate) use devices::{Answer, Devices, Workers};

use crate::check::{check, checked_inputs, step_loss};
use crate::collective::words_of;
use crate::device::{Command, Reply, ResultPart};
use crate::element::Class;
use crate::error::{KernelError, RanksError, RuntimeError};
use crate::host::{HostData, HostTensor};
use crate::layout::mark_rows;
use crate::ranks::World;
use crate::recording::{Recording, Span};
use crate::roster::{Holder, Roster};
use altiplano_ir::program::{Buffer, BufferId, BufferKind, Program, Programs};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;
use threads::Threads;

/// Options of a session whose devices are threads.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    /// Cores shared by all devices; all of the machine's if absent.
    pub cores: Option<usize>,
    /// Limit on the bytes that each device may hold; exceeding it is an error.
    pub memory_limit_bytes: Option<u64>,
    /// Record a timeline of each step.
    pub record: bool,
    /// Stop at the first op that makes a NaN from inputs without one.
    pub check_nan: bool,
    /// Devices send copies, as processes do, instead of sharing tensors and waiting for their readers.
    pub by_messages: bool,
}

/// The results and timing of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// Mean or sum of the microbatches' losses, as the plan says; NaN if no program computes a loss.
    pub loss: f64,
    pub losses: Vec<f64>,
    /// Wall-clock seconds of the step.
    pub seconds: f64,
    /// Peak bytes held by each device of this process so far, by global id.
    pub peak_bytes: Vec<u64>,
    /// One recording per program whose first device is in this process, if the session records.
    pub recordings: Vec<Recording>,
    /// The largest value that any process has told the others by [`Session::say`].
    pub said: u64,
}

/// Running programs.
///
/// If other processes run some of the devices, each has a session, and all must make the same calls in the same order.
/// Dropping a session ends its threads.
pub struct Session {
    roster: Roster,
    devices: Box<dyn Devices>,
    /// Ranks of this process's devices.
    own: Vec<usize>,
    record: bool,
    /// True after an error.
    stopped: bool,
    begun: VecDeque<Begun>,
    last_end: Option<Instant>,
    /// Reports of completed steps that have not been collected yet.
    ended: VecDeque<StepReport>,
    /// True if calls of the last step remain.
    pending: bool,
    said: u64,
    /// The programs of [`Session::prepare_evaluation`].
    evaluated: Option<Roster>,
}

/// A step in progress.
struct Begun {
    start: Instant,
    /// The replies of this process's devices and its report, if the report went ahead of the step's end.
    ahead: Option<(Vec<(usize, Reply)>, Vec<u64>)>,
}

/// The report of a batch, and the model's results by position, each in parts by microbatch.
pub type Evaluated = (StepReport, BTreeMap<u32, Vec<HostTensor>>);

impl Session {
    /// Checks the programs, compiles their bodies and starts a thread for each device. All parameters and state are
    /// zero.
    pub fn new(programs: &Programs, options: &Options) -> Result<Session, RuntimeError> {
        check(programs)?;
        let roster = Roster::new(programs, options.check_nan, |_| true);
        let threads = Threads::start(&roster, options)?;
        Ok(Session::over(roster, Box::new(threads), options.record))
    }

    /// A session over devices that hold zeros.
    pub(crate) fn over(roster: Roster, devices: Box<dyn Devices>, record: bool) -> Session {
        Session {
            roster,
            own: devices.ranks(),
            devices,
            record,
            stopped: false,
            begun: VecDeque::new(),
            last_end: None,
            ended: VecDeque::new(),
            pending: false,
            said: 0,
            evaluated: None,
        }
    }

    /// The processes that run the devices, if there are several.
    pub fn world(&self) -> Option<&World> {
        self.devices.world()
    }

    /// Returns whether this process leads.
    pub fn leads(&self) -> bool {
        self.world().is_none_or(World::leads)
    }

    /// Ends the run in all processes.
    pub fn finish(self) -> Result<(), RuntimeError> {
        self.devices.finish()
    }

    /// Loads a parameter into every device that holds a part of it, and into its `master` state. A tensor of another
    /// float type is rounded to the parameter's type; the master gets it unrounded.
    pub fn load_parameter(&mut self, name: &str, tensor: &HostTensor) -> Result<(), RuntimeError> {
        let holders = [self.roster.parameter(name)?, self.roster.masters(name)].concat();
        self.load(name, &holders, tensor)
    }

    /// Loads one tensor of optimizer state into every device that holds a part of it.
    pub fn load_state(&mut self, parameter: &str, slot: &str, tensor: &HostTensor) -> Result<(), RuntimeError> {
        let holders = self.roster.state(parameter, slot)?;
        self.load(&format!("{parameter}/{slot}"), &holders, tensor)
    }

    fn load(&mut self, name: &str, holders: &[Holder], tensor: &HostTensor) -> Result<(), RuntimeError> {
        self.flush()?;
        for ((p, buffer), tensor) in self.roster.cast(name, holders, tensor, |p| !self.own_of(p).is_empty())? {
            self.ask(&self.own_of(p), || Command::Load { buffer, tensor: tensor.clone() })?;
        }
        Ok(())
    }

    /// Ranks of this process's devices that run a program.
    fn own_of(&self, p: usize) -> Vec<usize> {
        let ranks = self.roster.ranks(p);
        self.own.iter().copied().filter(|rank| ranks.contains(rank)).collect()
    }

    /// Returns whether this process holds a part of a parameter.
    pub fn holds(&self, name: &str) -> bool {
        let is_own = |&(p, _): &Holder| !self.own_of(p).is_empty();
        self.world().is_none() || self.roster.parameter(name).is_ok_and(|holders| holders.iter().any(is_own))
    }

    /// The rows of an input, along its batch dimension, that this process reads; `None` if it reads all.
    pub fn rows_read(&self, input: &str, dim: usize, rows: usize) -> Option<Vec<bool>> {
        self.rows_read_by(&self.roster, input, dim, rows)
    }

    fn rows_read_by(&self, roster: &Roster, input: &str, dim: usize, rows: usize) -> Option<Vec<bool>> {
        self.world()?;
        let mut read = vec![false; rows];
        for &rank in &self.own {
            let p = roster.program_of(rank);
            let position = (rank - roster.ranks(p).start) as u32;
            mark_rows(&roster.plans[p].program, position, input, dim, &mut read);
        }
        Some(read)
    }

    /// Returns whether a step begins before the previous one has ended. If so, call [`Session::begin_step`] ahead of
    /// [`Session::end_step`].
    pub fn overlaps(&self) -> bool {
        self.roster.plans.iter().any(|plan| plan.program.runs_ahead())
    }

    /// Returns whether steps without overlap can be queued, so that devices start the next one at once without a
    /// wake-up.
    pub fn queues(&self) -> bool {
        self.devices.queues()
    }

    /// Tells all processes a value, such as the number of a signal, with the next report of a step.
    pub fn say(&mut self, value: u64) {
        self.said = self.said.max(value);
    }

    /// Starts a step on all devices, with the arguments of [`Session::step`], after those already in progress.
    pub fn begin_step(
        &mut self,
        inputs: &BTreeMap<String, HostTensor>,
        scalars: &BTreeMap<String, f64>,
    ) -> Result<(), RuntimeError> {
        self.begin_run(inputs, scalars, false)
    }

    /// Waits for the oldest step in progress and returns its report over all processes, loss included.
    ///
    /// If steps overlap, its gradients reach the weights, or all copies of them, during the next step or in
    /// [`Session::flush`]. The step's seconds count from the end of the previous step.
    pub fn end_step(&mut self) -> Result<StepReport, RuntimeError> {
        let mut report = match self.ended.pop_front() {
            Some(report) => report,
            None => self.end_run()?.0,
        };
        if self.world().is_none() {
            report.said = self.said;
        }
        Ok(report)
    }

    /// Runs the remaining calls of the last step, so that its gradients reach all copies of the weights. The next step
    /// then uses current weights, like the first step of a run.
    pub fn flush(&mut self) -> Result<(), RuntimeError> {
        self.settle()?;
        if self.pending {
            self.ask(&self.own.clone(), || Command::Flush)?;
            self.devices.tell(&[])?;
            self.pending = false;
        }
        Ok(())
    }

    /// Completes all steps in progress.
    fn settle(&mut self) -> Result<(), RuntimeError> {
        while !self.begun.is_empty() {
            let report = self.end_run()?.0;
            self.ended.push_back(report);
        }
        Ok(())
    }

    /// Runs one step on a global batch. Each input is given whole: its batch dimensions are `num_microbatches` times
    /// those of the program's buffer, and microbatch `i` takes the `i`-th part of the rows.
    pub fn step(
        &mut self,
        inputs: &BTreeMap<String, HostTensor>,
        scalars: &BTreeMap<String, f64>,
    ) -> Result<StepReport, RuntimeError> {
        self.settle()?;
        self.begin_run(inputs, scalars, false)?;
        Ok(self.end_run()?.0)
    }

    /// Runs programs without training on a global batch, given as in [`Session::step`]. Returns the results that this
    /// process's devices make, by position, each in parts by microbatch. Results that are inputs or constants are left
    /// out.
    pub fn evaluate(&mut self, inputs: &BTreeMap<String, HostTensor>) -> Result<Evaluated, RuntimeError> {
        self.settle()?;
        self.begin_evaluation(inputs)?;
        self.end_evaluation()
    }

    /// Starts an evaluation on all devices, with the arguments of [`Session::evaluate`], without waiting for those in
    /// progress.
    pub fn begin_evaluation(&mut self, inputs: &BTreeMap<String, HostTensor>) -> Result<(), RuntimeError> {
        self.begin_run(inputs, &BTreeMap::new(), true)
    }

    /// Waits for the oldest batch in progress. Its seconds count from the end of the batch before it.
    pub fn end_evaluation(&mut self) -> Result<Evaluated, RuntimeError> {
        let (report, replies) = self.end_run()?;
        let mut results: BTreeMap<u32, BTreeMap<Option<u32>, HostTensor>> = BTreeMap::new();
        for (rank, ResultPart { buffer, microbatch, part }) in parts_of(replies) {
            let plan = &self.roster.plans[self.roster.program_of(rank)];
            let description = plan.program.buffer(buffer);
            let BufferKind::Output { index } = description.kind else { continue };
            let of_microbatch = results.entry(index).or_default().entry(microbatch);
            let whole = of_microbatch.or_insert_with(|| HostTensor::zeros(description.ty.clone()));
            plan.place_part(buffer, rank, &part.data, whole);
        }
        let in_order = |(index, parts): (u32, BTreeMap<_, _>)| (index, parts.into_values().collect());
        Ok((report, results.into_iter().map(in_order).collect()))
    }

    fn begin_run(
        &mut self,
        inputs: &BTreeMap<String, HostTensor>,
        scalars: &BTreeMap<String, f64>,
        results: bool,
    ) -> Result<(), RuntimeError> {
        let inputs = self.inputs_of(&self.roster, inputs, scalars)?;
        let scalars = Arc::new(scalars.clone());
        if let Some(world) = self.world() {
            world.note(&format!("in step {}", scalars.get("step").copied().unwrap_or_default()));
        }
        let (own, start) = (self.own.clone(), Instant::now());
        let origin = self.record.then_some(start);
        self.send(&own, || Command::Step { inputs: inputs.clone(), scalars: scalars.clone(), results, origin })?;
        self.pending = self.overlaps();
        let mut ahead = None;
        if self.pending && self.world().is_some() {
            let replies = self.collect(&own)?;
            let report = self.report(&replies);
            self.devices.tell_ahead(&report);
            ahead = Some((replies, report));
        }
        self.begun.push_back(Begun { start, ahead });
        Ok(())
    }

    /// Selects, checks and casts the inputs that this process's programs use.
    fn inputs_of(
        &self,
        roster: &Roster,
        inputs: &BTreeMap<String, HostTensor>,
        scalars: &BTreeMap<String, f64>,
    ) -> Result<Arc<BTreeMap<String, HostTensor>>, RuntimeError> {
        let own: BTreeSet<usize> = self.own.iter().map(|&rank| roster.program_of(rank)).collect();
        let programs = own.into_iter().map(|p| &roster.plans[p].program);
        let num_microbatches = roster.plans.first().map_or(1, |plan| plan.num_microbatches);
        Ok(Arc::new(checked_inputs(programs, num_microbatches, inputs, scalars)?))
    }

    /// This process's report on a step: the value that it says, then the losses, each after the rank that made it.
    fn report(&self, replies: &[(usize, Reply)]) -> Vec<u64> {
        let mut words = vec![self.said];
        for (rank, reply) in replies {
            if let Reply::Stepped { losses, .. } = reply {
                words.extend(losses.iter().flat_map(|loss| [*rank as u64, loss.to_bits()]));
            }
        }
        words
    }

    fn end_run(&mut self) -> Result<(StepReport, Vec<(usize, Reply)>), RuntimeError> {
        let Begun { start: begun, ahead } = self.begun.pop_front().ok_or(RuntimeError::NoStep)?;
        let (mut replies, reports) = match ahead {
            Some((replies, report)) => (replies, self.devices.hear(&report)?),
            None => {
                let replies = self.collect(&self.own.clone())?;
                let report = self.report(&replies);
                (replies, self.devices.tell(&report)?)
            }
        };
        let said = reports.iter().filter_map(|words| words.first().copied()).max().unwrap_or(0);
        let pairs = reports.iter().flat_map(|words| words.get(1..).unwrap_or_default().chunks_exact(2));
        let mut losses: Vec<(u64, f64)> = pairs.map(|pair| (pair[0], f64::from_bits(pair[1]))).collect();
        losses.sort_by_key(|&(rank, _)| rank);
        let losses: Vec<f64> = losses.into_iter().map(|(_, loss)| loss).collect();
        // Use the time at which devices finished, or heard of the others; the caller may collect the report later.
        let alone = self.world().is_none();
        let ended = |(_, reply): &(usize, Reply)| match reply {
            Reply::Stepped { ended, .. } if alone => Some(*ended),
            _ => None,
        };
        let ended = replies.iter().filter_map(ended).max().unwrap_or_else(Instant::now);
        let start = self.last_end.map_or(begun, |end| end.max(begun));
        self.last_end = Some(ended);
        let recordings = self.recordings_of(&mut replies, if alone { (start - begun).as_secs_f64() } else { 0.0 });
        let report = StepReport {
            loss: step_loss(&losses, self.roster.loss_is_mean),
            losses,
            seconds: ended.saturating_duration_since(start).as_secs_f64(),
            peak_bytes: self.peak_bytes(),
            recordings,
            said,
        };
        Ok((report, replies))
    }

    /// Takes the recordings of this process's devices out of their replies. Devices record times from the moment of the
    /// command, which may precede the end of the previous step by `early_s`.
    fn recordings_of(&self, replies: &mut [(usize, Reply)], early_s: f64) -> Vec<Recording> {
        let mut recordings = Vec::new();
        for (rank, reply) in replies {
            let p = self.roster.program_of(*rank);
            if let Reply::Stepped { spans, .. } = reply
                && self.record
                && self.roster.ranks(p).start == *rank
            {
                recordings.push(Recording { program: p as u32, spans: std::mem::take(spans) });
            }
        }
        let spans = || recordings.iter().flat_map(|recording| &recording.spans);
        let first_s = spans().map(|span| span.start_s).fold(early_s, f64::min);
        for span in recordings.iter_mut().flat_map(|recording| &mut recording.spans) {
            (span.start_s, span.end_s) = (span.start_s - first_s, span.end_s - first_s);
        }
        recordings
    }

    /// The recordings of a step from all processes, given this process's.
    pub fn all_recordings(&mut self, own: Vec<Recording>) -> Result<Vec<Recording>, RuntimeError> {
        if !self.record || self.world().is_none() {
            return Ok(own);
        }
        let mut words: Vec<u64> = Vec::new();
        for Recording { program, spans } in &own {
            words.extend([u64::from(*program), spans.len() as u64]);
            words.extend(spans.iter().flat_map(Span::words));
        }
        let mut recordings = Vec::new();
        for words in self.devices.tell(&words)? {
            let mut rest = &words[..];
            while let [program, count, after @ ..] = rest {
                let (spans, after) = after.split_at((*count as usize * Span::WORDS).min(after.len()));
                let spans = spans.as_chunks().0.iter().map(Span::of_words).collect();
                recordings.push(Recording { program: *program as u32, spans });
                rest = after;
            }
        }
        recordings.sort_by_key(|recording| recording.program);
        Ok(recordings)
    }

    /// Prepares programs that run this session's model forward on the same devices, between steps. Each device uses its
    /// weights here, in the same layout, except for those that it receives.
    pub fn prepare_evaluation(&mut self, programs: &Programs) -> Result<(), RuntimeError> {
        check(programs)?;
        let check_nan = self.roster.plans.iter().any(|plan| plan.check_nan);
        let roster = Roster::new(programs, check_nan, |p| !self.own_of(p).is_empty());
        let devices = |roster: &Roster| roster.plans.iter().map(|p| p.program.devices.clone()).collect::<Vec<_>>();
        if devices(&roster) != devices(&self.roster) {
            return Err(RuntimeError::Ranks(Box::new(RanksError::Devices)));
        }
        self.devices.will_evaluate(&roster);
        for (p, plan) in roster.plans.iter().enumerate() {
            let receives = |id: BufferId| programs.transfers.iter().any(|t| t.target == (p as u32, id));
            let weights = shared_weights(&self.roster.plans[p].program, &plan.program, receives)?;
            self.ask(&self.own_of(p), || Command::Prepare { plan: plan.clone(), weights: weights.clone() })?;
        }
        self.evaluated = Some(roster);
        Ok(())
    }

    /// As [`Session::rows_read`], for the programs of [`Session::prepare_evaluation`].
    pub fn rows_evaluated(&self, input: &str, dim: usize, rows: usize) -> Option<Vec<bool>> {
        self.rows_read_by(self.evaluated.as_ref()?, input, dim, rows)
    }

    /// Runs the programs of [`Session::prepare_evaluation`] on a global batch, with the current weights. Returns the
    /// first result of the model for each microbatch, on all processes. It must be a scalar, such as a loss.
    pub fn evaluate_weights(&mut self, inputs: &BTreeMap<String, HostTensor>) -> Result<Vec<f64>, RuntimeError> {
        let roster = self.evaluated.clone().ok_or(RuntimeError::NoStep)?;
        let inputs = self.inputs_of(&roster, inputs, &BTreeMap::new())?;
        let replies = self.ask(&self.own.clone(), || Command::Evaluate { inputs: inputs.clone() })?;
        let mut words: Vec<u64> = Vec::new();
        for (rank, ResultPart { buffer, microbatch, part }) in parts_of(replies) {
            let plan = &roster.plans[roster.program_of(rank)];
            let is_first = plan.program.buffer(buffer).kind == BufferKind::Output { index: 0 };
            if let (true, Some(&value)) = (is_first, part.to_f64().first())
                && !plan.repeats(buffer, rank)
            {
                words.extend([microbatch.map_or(0, |m| u64::from(m) + 1), value.to_bits()]);
            }
        }
        let all = self.devices.tell(&words)?;
        let told = all.iter().flat_map(|words| words.chunks_exact(2)).map(|pair| (pair[0], f64::from_bits(pair[1])));
        Ok(told.collect::<BTreeMap<u64, f64>>().into_values().collect())
    }

    /// Assembles a parameter from one program that holds it, in the process that leads.
    pub fn parameter(&mut self, name: &str) -> Result<HostTensor, RuntimeError> {
        self.gather_parameter(name)?.ok_or_else(|| RuntimeError::Elsewhere { name: name.to_string() })
    }

    /// Assembles one tensor of optimizer state, in the process that leads.
    pub fn state(&mut self, parameter: &str, slot: &str) -> Result<HostTensor, RuntimeError> {
        let elsewhere = || RuntimeError::Elsewhere { name: format!("{parameter}/{slot}") };
        self.gather_state(parameter, slot)?.ok_or_else(elsewhere)
    }

    /// As [`Session::parameter`]; `None` in the other processes, all of which must call it.
    pub fn gather_parameter(&mut self, name: &str) -> Result<Option<HostTensor>, RuntimeError> {
        let holders = self.roster.parameter(name)?;
        self.gather(holders[0])
    }

    /// As [`Session::state`]; `None` in the other processes, all of which must call it.
    pub fn gather_state(&mut self, parameter: &str, slot: &str) -> Result<Option<HostTensor>, RuntimeError> {
        let holders = self.roster.state(parameter, slot)?;
        self.gather(holders[0])
    }

    /// The gradient of a parameter as the last step accumulated it. Partial sums are reduced; if several programs hold
    /// accumulators of the parameter, these are added.
    pub fn accumulator(&mut self, parameter: &str) -> Result<HostTensor, RuntimeError> {
        let mut sum: Option<HostTensor> = None;
        for holder in self.roster.accumulator(parameter)? {
            let Some(part) = self.gather(holder)? else { continue };
            sum = Some(match sum {
                None => part,
                Some(sum) => {
                    let both: Vec<f64> = sum.to_f64().iter().zip(part.to_f64()).map(|(x, y)| x + y).collect();
                    HostTensor::from_f64(sum.ty, &both)
                }
            });
        }
        sum.ok_or_else(|| RuntimeError::Elsewhere { name: parameter.to_string() })
    }

    /// Names of all parameters.
    pub fn parameters(&self) -> BTreeSet<String> {
        self.roster.parameters()
    }

    /// Parameter and slot of all optimizer state.
    pub fn states(&self) -> BTreeSet<(String, String)> {
        self.roster.states()
    }

    /// Peak bytes held by each device of this process so far, by global id.
    pub fn peak_bytes(&self) -> Vec<u64> {
        by_device(self.peaks(0))
    }

    /// Peak bytes held by each device of this process in host memory so far, by global id.
    pub fn host_peak_bytes(&self) -> Vec<u64> {
        by_device(self.peaks(1))
    }

    /// Peak bytes held by each device of all processes so far, by global id.
    pub fn all_peak_bytes(&mut self) -> Result<Vec<u64>, RuntimeError> {
        let all = self.devices.tell(&self.peaks(0).concat())?;
        Ok(by_device(all.iter().flat_map(|words| words.as_chunks().0).copied().collect()))
    }

    /// Pairs of a device's global id and its peak bytes in one of its memories.
    fn peaks(&self, memory: usize) -> Vec<[u64; 2]> {
        let id = |rank: usize| {
            let p = self.roster.program_of(rank);
            u64::from(self.roster.plans[p].program.devices[rank - self.roster.ranks(p).start])
        };
        let ids = self.own.iter().map(|&rank| id(rank));
        ids.zip(self.devices.peak_bytes()).map(|(id, peaks)| [id, peaks[memory]]).collect()
    }

    /// Returns whether devices communicate through NCCL, as opposed to the host.
    pub fn uses_nccl(&self) -> bool {
        self.devices.uses_nccl()
    }

    /// Assembles a buffer from its parts, and reduces those that are partial, in the process that leads.
    fn gather(&mut self, (p, buffer): Holder) -> Result<Option<HostTensor>, RuntimeError> {
        let plan = self.roster.plans[p].clone();
        let own: Vec<usize> = self.own_of(p).into_iter().filter(|&rank| !plan.repeats(buffer, rank)).collect();
        let mut parts: Vec<(usize, HostData)> = Vec::new();
        for (rank, reply) in self.ask(&own, || Command::Fetch { buffer })? {
            if let Reply::Fetched(part) = reply {
                parts.push((rank, part.data));
            }
        }
        let description = plan.program.buffer(buffer);
        if let Some(world) = self.world() {
            let words = |(rank, part): &(usize, HostData)| [vec![*rank as u64], words_of(part.as_bytes())].concat();
            let Some(all) = world.gather(parts.iter().flat_map(words).collect())? else { return Ok(None) };
            parts = parts_in(&all, description, &plan.program)?;
        }
        let mut whole = HostTensor::zeros(description.ty.clone());
        for (rank, part) in parts {
            plan.place_part(buffer, rank, &part, &mut whole);
        }
        Ok(Some(whole.out_of(description)))
    }

    /// Sends a command to some devices of this process and collects their replies.
    fn ask(&mut self, ranks: &[usize], command: impl Fn() -> Command) -> Result<Vec<(usize, Reply)>, RuntimeError> {
        self.settle()?;
        self.send(ranks, command)?;
        self.collect(ranks)
    }

    fn send(&mut self, ranks: &[usize], command: impl Fn() -> Command) -> Result<(), RuntimeError> {
        if self.stopped {
            return Err(RuntimeError::Stopped);
        }
        let sent = ranks.iter().map(|&rank| self.devices.send(rank, command())).fold(Ok(()), Result::and);
        self.stopped = sent.is_err();
        sent
    }

    fn collect(&mut self, ranks: &[usize]) -> Result<Vec<(usize, Reply)>, RuntimeError> {
        let replies = self.devices.collect(ranks);
        self.stopped |= replies.is_err();
        replies
    }
}

/// The parts of results in the replies of devices, each with its rank.
fn parts_of(replies: Vec<(usize, Reply)>) -> impl Iterator<Item = (usize, ResultPart)> {
    let parts = |(rank, reply)| {
        let results = if let Reply::Stepped { results, .. } = reply { results } else { Vec::new() };
        results.into_iter().map(move |part| (rank, part))
    };
    replies.into_iter().flat_map(parts)
}

/// The parts of a buffer in the words of all processes, in order of rank. Each part follows the rank that holds it.
fn parts_in(all: &[Vec<u64>], buffer: &Buffer, program: &Program) -> Result<Vec<(usize, HostData)>, RuntimeError> {
    let ty = buffer.sharding.local_type(&buffer.ty, &program.mesh);
    let class = Class::of(ty.dtype);
    let bytes = ty.elements() as usize * class.bytes();
    let mut parts = Vec::new();
    for words in all {
        let mut rest = &words[..];
        while let [rank, after @ ..] = rest {
            let wrong = || KernelError::MessageSize { expected: bytes, found: 8 * after.len() };
            let (part, after) =
                after.split_at_checked(bytes.div_ceil(8)).ok_or_else(|| RuntimeError::Carrier(wrong()))?;
            parts.push((*rank as usize, HostData::from_bytes(class, &bytemuck::cast_slice(part)[..bytes])));
            rest = after;
        }
    }
    parts.sort_by_key(|&(rank, _)| rank);
    Ok(parts)
}

/// Pairs of buffers: a weight of trained programs, and the buffer of the evaluated program that reads it. Weights that
/// the evaluated program `receives` have none.
fn shared_weights(
    trained: &Program,
    evaluated: &Program,
    receives: impl Fn(BufferId) -> bool,
) -> Result<Vec<(BufferId, BufferId)>, RuntimeError> {
    let mut weights = Vec::new();
    for (id, buffer) in (0u32..).map(BufferId).zip(&evaluated.buffers) {
        let BufferKind::Parameter { name } = &buffer.kind else { continue };
        if receives(id) {
            continue;
        }
        let is_it = |b: &Buffer| b.kind == buffer.kind && (&b.ty, &b.sharding) == (&buffer.ty, &buffer.sharding);
        let held = trained.buffers.iter().position(is_it);
        let unknown = || RuntimeError::UnknownParameter { name: name.clone() };
        weights.push((BufferId(held.ok_or_else(unknown)? as u32), id));
    }
    Ok(weights)
}

/// A list by device id, from pairs of an id and a number.
fn by_device(pairs: Vec<[u64; 2]>) -> Vec<u64> {
    let mut list = vec![0; pairs.iter().map(|&[id, _]| id as usize + 1).max().unwrap_or(0)];
    for [id, number] in pairs {
        list[id as usize] += number;
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::programs;
    use altiplano_ir::dtype::DType;
    use altiplano_ir::graph::Graph;
    use altiplano_ir::op::{Input, Op};
    use altiplano_ir::types::TensorType;

    #[test]
    fn steps_that_are_begun_ahead_follow_each_other() {
        let mut graph = Graph::new("doubled");
        let ty = TensorType::new(DType::F32, vec![1 << 16]);
        let mut x = graph.emit(Op::Input(Input { name: "x".to_string(), ty: ty.clone() }), &[]);
        for _ in 0..3 {
            x = graph.add(x, x);
        }
        graph.outputs = vec![x];
        let options = Options { record: true, ..Options::default() };
        let mut session = Session::new(&programs(&graph, 2), &options).unwrap();
        session.load_parameter("x", &HostTensor::from_f64(ty, &vec![1.5; 1 << 16])).unwrap();
        let (start, none) = (Instant::now(), BTreeMap::new());
        session.begin_step(&none, &BTreeMap::new()).unwrap();
        let mut reports = Vec::new();
        for _ in 0..4 {
            session.begin_step(&none, &BTreeMap::new()).unwrap();
            reports.push(session.end_step().unwrap());
        }
        reports.push(session.end_step().unwrap());
        let elapsed_s = start.elapsed().as_secs_f64();
        assert!(reports.iter().map(|r| r.seconds).sum::<f64>() <= elapsed_s, "no moment is of two steps: {reports:?}");
        for report in &reports {
            let spans = &report.recordings[0].spans;
            assert!(spans.iter().all(|s| 0.0 <= s.start_s && s.start_s <= s.end_s), "{spans:?}");
        }
        assert_eq!(session.state("result0", "value").unwrap().to_f64()[5], 12.0);
        assert!(matches!(session.end_step(), Err(RuntimeError::NoStep)));
    }
}
