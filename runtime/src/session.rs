//! A session runs the programs of a plan. It has one thread per device, which lives as long as the session and keeps
//! the device's parameters and state between steps.

use crate::arena::Arena;
use crate::check::{check, checked_inputs, step_loss};
use crate::device::{Command, Device, Reply, ResultPart};
use crate::error::{KernelError, Place, RuntimeError};
use crate::host::HostTensor;
use crate::mailbox::Mailbox;
use crate::recording::Recording;
use crate::roster::{Holder, Roster};
use crate::team;
use crate::work::threads_of_device;
use altiplano_ir::program::{BufferKind, Programs};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant;

/// Options of a session.
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
    /// Peak bytes held by each device so far, by global id.
    pub peak_bytes: Vec<u64>,
    /// One recording per program, if the session records.
    pub recordings: Vec<Recording>,
}

/// Running programs.
///
/// Dropping a session ends its threads.
pub struct Session {
    roster: Roster,
    record: bool,
    /// For each device, its id, its own memory and its share of host memory.
    arenas: Vec<(u32, [Arc<Arena>; 2])>,
    /// Command channels, by rank.
    commands: Vec<Sender<Command>>,
    replies: Receiver<(usize, Result<Reply, RuntimeError>)>,
    /// Replies that arrived before they were asked for, by rank.
    early: Vec<VecDeque<Result<Reply, RuntimeError>>>,
    threads: Vec<JoinHandle<()>>,
    stopped: bool,
    /// Start times of the steps in progress, and the end time of the last completed step.
    begun: VecDeque<Instant>,
    last_end: Option<Instant>,
    /// Reports of completed steps that have not been collected yet.
    ended: VecDeque<StepReport>,
    /// True if calls of the last step remain.
    pending: bool,
}

/// The report of a batch, and the model's results by position, each in parts by microbatch.
pub type Evaluated = (StepReport, BTreeMap<u32, Vec<HostTensor>>);

impl Session {
    /// Checks the programs, compiles their bodies and starts the devices. All parameters and state are zero.
    pub fn new(programs: &Programs, options: &Options) -> Result<Session, RuntimeError> {
        check(programs)?;
        let roster = Roster::new(programs, options.check_nan, |_| true);
        let ranks = roster.num_ranks();
        let cores = options.cores.or_else(|| std::thread::available_parallelism().ok().map(|n| n.get())).unwrap_or(1);
        let threads_each = threads_of_device(cores, ranks);
        let (reply, replies) = channel();
        let mut session = Session {
            roster,
            record: options.record,
            arenas: Vec::new(),
            commands: Vec::new(),
            replies,
            early: (0..ranks).map(|_| VecDeque::new()).collect(),
            threads: Vec::new(),
            stopped: false,
            begun: VecDeque::new(),
            last_end: None,
            ended: VecDeque::new(),
            pending: false,
        };
        let mut mailboxes = Mailbox::network(ranks, options.by_messages).into_iter();
        for plan in session.roster.plans.clone() {
            for (position, &id) in plan.program.devices.iter().enumerate() {
                let Some(mailbox) = mailboxes.next() else { break };
                let arena = Arena::new(options.memory_limit_bytes);
                let failed = |error: KernelError| RuntimeError::Device {
                    place: Box::new(Place {
                        device: id,
                        program: plan.index,
                        activity: "allocating parameters and state".to_string(),
                        microbatch: None,
                        op: None,
                    }),
                    error,
                };
                let mut device =
                    Device::new(id, position as u32, plan.clone(), arena, mailbox, threads_each).map_err(failed)?;
                session.arenas.push((id, [device.arena.clone(), device.host.clone()]));
                device.allocate_persistent().map_err(failed)?;
                let (command, commands) = channel();
                let reply = reply.clone();
                let name = format!("device {id}");
                let thread = std::thread::Builder::new()
                    .name(name.clone())
                    .spawn(move || team::with(threads_each, &name, || device.serve(commands, reply)))
                    .map_err(|error| RuntimeError::Thread { device: id, error })?;
                session.commands.push(command);
                session.threads.push(thread);
            }
        }
        Ok(session)
    }

    /// Loads a parameter into every program that holds it, and into its `master` state. A tensor of another float type
    /// is rounded to the parameter's type; the master gets it unrounded.
    pub fn load_parameter(&mut self, name: &str, tensor: &HostTensor) -> Result<(), RuntimeError> {
        let holders = [self.roster.parameter(name)?, self.roster.masters(name)].concat();
        self.load(name, &holders, tensor)
    }

    /// Loads one tensor of optimizer state into every program that holds it.
    pub fn load_state(&mut self, parameter: &str, slot: &str, tensor: &HostTensor) -> Result<(), RuntimeError> {
        let holders = self.roster.state(parameter, slot)?;
        self.load(&format!("{parameter}/{slot}"), &holders, tensor)
    }

    fn load(&mut self, name: &str, holders: &[Holder], tensor: &HostTensor) -> Result<(), RuntimeError> {
        self.flush()?;
        for ((p, buffer), tensor) in self.roster.cast(name, holders, tensor, |_| true)? {
            self.ask(p, |_| Command::Load { buffer, tensor: tensor.clone() })?;
        }
        Ok(())
    }

    /// Returns whether a step begins before the previous one has ended. If so, call [`Session::begin_step`] ahead of
    /// [`Session::end_step`].
    pub fn overlaps(&self) -> bool {
        self.roster.plans.iter().any(|plan| plan.program.runs_ahead())
    }

    /// Starts a step on all devices, with the arguments of [`Session::step`], after those already in progress.
    pub fn begin_step(
        &mut self,
        inputs: &BTreeMap<String, HostTensor>,
        scalars: &BTreeMap<String, f64>,
    ) -> Result<(), RuntimeError> {
        self.begin_run(inputs, scalars, false)
    }

    /// Waits for the oldest step in progress and returns its report, loss included.
    ///
    /// If steps overlap, its gradients reach the weights, or all copies of them, during the next step or in
    /// [`Session::flush`]. The step's seconds count from the end of the previous step.
    pub fn end_step(&mut self) -> Result<StepReport, RuntimeError> {
        match self.ended.pop_front() {
            Some(report) => Ok(report),
            None => Ok(self.end_run()?.0),
        }
    }

    /// Runs the remaining calls of the last step, so that its gradients reach all copies of the weights. The next step
    /// then uses current weights, like the first step of a run.
    pub fn flush(&mut self) -> Result<(), RuntimeError> {
        self.settle()?;
        if self.pending {
            self.begin()?;
            let all: Vec<usize> = (0..self.commands.len()).collect();
            self.exchange(&all, |_| Command::Flush)?;
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
        Ok(self.run(inputs, scalars, false)?.0)
    }

    /// Runs programs without training on a global batch, given as in [`Session::step`]. Returns the model's results by
    /// position, each in parts by microbatch. Results that are inputs or constants are left out.
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
        let (report, parts) = self.end_run()?;
        let mut results: BTreeMap<u32, BTreeMap<Option<u32>, HostTensor>> = BTreeMap::new();
        for (rank, ResultPart { buffer, microbatch, part }) in parts {
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

    fn run(
        &mut self,
        inputs: &BTreeMap<String, HostTensor>,
        scalars: &BTreeMap<String, f64>,
        results: bool,
    ) -> Result<(StepReport, Vec<(usize, ResultPart)>), RuntimeError> {
        self.settle()?;
        self.begin_run(inputs, scalars, results)?;
        self.end_run()
    }

    fn begin_run(
        &mut self,
        inputs: &BTreeMap<String, HostTensor>,
        scalars: &BTreeMap<String, f64>,
        results: bool,
    ) -> Result<(), RuntimeError> {
        let num_microbatches = self.roster.plans.first().map_or(1, |plan| plan.num_microbatches);
        let programs = self.roster.plans.iter().map(|plan| &plan.program);
        let inputs = Arc::new(checked_inputs(programs, num_microbatches, inputs, scalars)?);
        let scalars = Arc::new(scalars.clone());
        let start = Instant::now();
        self.begin()?;
        let all: Vec<usize> = (0..self.commands.len()).collect();
        let origin = self.record.then_some(start);
        self.begun.push_back(start);
        self.pending = self.overlaps();
        self.send(&all, |_| Command::Step { inputs: inputs.clone(), scalars: scalars.clone(), results, origin })
    }

    fn end_run(&mut self) -> Result<(StepReport, Vec<(usize, ResultPart)>), RuntimeError> {
        let begun = self.begun.pop_front().ok_or(RuntimeError::NoStep)?;
        let all: Vec<usize> = (0..self.commands.len()).collect();
        let replies = self.collect(&all)?;
        // Use the time at which devices finished; the caller may collect the report later.
        let ended = |reply: &Reply| if let Reply::Stepped { ended, .. } = reply { Some(*ended) } else { None };
        let ended = replies.iter().filter_map(|(_, reply)| ended(reply)).max().unwrap_or_else(Instant::now);
        let start = self.last_end.map_or(begun, |end| end.max(begun));
        self.last_end = Some(ended);
        let seconds = ended.saturating_duration_since(start).as_secs_f64();
        // Devices record times from the moment of the command, which may precede the end of the previous step.
        let first = |reply: &Reply| match reply {
            Reply::Stepped { spans, .. } => spans.iter().map(|span| span.start_s).reduce(f64::min),
            _ => None,
        };
        let first_s =
            replies.iter().filter_map(|(_, reply)| first(reply)).fold((start - begun).as_secs_f64(), f64::min);
        let (mut losses, mut parts, mut recordings) = (Vec::new(), Vec::new(), Vec::new());
        for (rank, reply) in replies {
            if let Reply::Stepped { losses: of_device, results, mut spans, .. } = reply {
                spans
                    .iter_mut()
                    .for_each(|span| (span.start_s, span.end_s) = (span.start_s - first_s, span.end_s - first_s));
                let program = self.roster.program_of(rank);
                if self.record && self.roster.ranks(program).start == rank {
                    recordings.push(Recording { program: program as u32, spans });
                }
                losses.extend(of_device);
                parts.extend(results.into_iter().map(|part| (rank, part)));
            }
        }
        let loss = step_loss(&losses, self.roster.loss_is_mean);
        Ok((StepReport { loss, losses, seconds, peak_bytes: self.peak_bytes(), recordings }, parts))
    }

    /// Assembles a parameter from one program that holds it.
    pub fn parameter(&mut self, name: &str) -> Result<HostTensor, RuntimeError> {
        let holders = self.roster.parameter(name)?;
        self.gather(holders[0])
    }

    /// Assembles one tensor of optimizer state.
    pub fn state(&mut self, parameter: &str, slot: &str) -> Result<HostTensor, RuntimeError> {
        let holders = self.roster.state(parameter, slot)?;
        self.gather(holders[0])
    }

    /// The gradient of a parameter as the last step accumulated it. Partial sums are reduced; if several programs hold
    /// accumulators of the parameter, these are added.
    pub fn accumulator(&mut self, parameter: &str) -> Result<HostTensor, RuntimeError> {
        let holders = self.roster.accumulator(parameter)?;
        let mut sum = self.gather(holders[0])?;
        for &holder in &holders[1..] {
            let more = self.gather(holder)?.to_f64();
            let both: Vec<f64> = sum.to_f64().iter().zip(more).map(|(x, y)| x + y).collect();
            sum = HostTensor::from_f64(sum.ty, &both);
        }
        Ok(sum)
    }

    /// Names of all parameters.
    pub fn parameters(&self) -> BTreeSet<String> {
        self.roster.parameters()
    }

    /// Parameter and slot of all optimizer state.
    pub fn states(&self) -> BTreeSet<(String, String)> {
        self.roster.states()
    }

    /// Peak bytes held by each device so far, by global id.
    pub fn peak_bytes(&self) -> Vec<u64> {
        self.peaks(0)
    }

    /// Peak bytes held by each device in host memory so far, by global id.
    pub fn host_peak_bytes(&self) -> Vec<u64> {
        self.peaks(1)
    }

    fn peaks(&self, memory: usize) -> Vec<u64> {
        let devices = self.arenas.iter().map(|a| a.0 as usize + 1).max().unwrap_or(0);
        let mut peaks = vec![0; devices];
        for (id, arenas) in &self.arenas {
            peaks[*id as usize] += arenas[memory].peak_bytes();
        }
        peaks
    }

    /// Assembles a buffer from its parts, and reduces those that are partial.
    fn gather(&mut self, (p, buffer): Holder) -> Result<HostTensor, RuntimeError> {
        let plan = self.roster.plans[p].clone();
        let description = plan.program.buffer(buffer);
        let mut whole = HostTensor::zeros(description.ty.clone());
        for (rank, reply) in self.ask(p, |_| Command::Fetch { buffer })? {
            if let Reply::Fetched(part) = reply {
                plan.place_part(buffer, rank, &part.data, &mut whole);
            }
        }
        Ok(whole.out_of(description))
    }

    /// Sends a command to all devices of a program and collects their replies.
    fn ask(&mut self, p: usize, command: impl Fn(usize) -> Command) -> Result<Vec<(usize, Reply)>, RuntimeError> {
        self.settle()?;
        self.begin()?;
        let ranks: Vec<usize> = self.roster.ranks(p).collect();
        self.exchange(&ranks, command)
    }

    fn begin(&self) -> Result<(), RuntimeError> {
        if self.stopped { Err(RuntimeError::Stopped) } else { Ok(()) }
    }

    /// Sends commands and waits for all replies, in order of rank.
    fn exchange(
        &mut self,
        ranks: &[usize],
        command: impl Fn(usize) -> Command,
    ) -> Result<Vec<(usize, Reply)>, RuntimeError> {
        self.send(ranks, command)?;
        self.collect(ranks)
    }

    /// Sends a command to each of some devices.
    fn send(&mut self, ranks: &[usize], command: impl Fn(usize) -> Command) -> Result<(), RuntimeError> {
        let mut sent = true;
        for &rank in ranks {
            sent &= self.commands[rank].send(command(rank)).is_ok();
        }
        self.stopped |= !sent;
        if sent { Ok(()) } else { Err(RuntimeError::Stopped) }
    }

    /// Waits for the oldest outstanding reply of each device, in order of rank. If several fail, returns the error that
    /// caused the others.
    fn collect(&mut self, ranks: &[usize]) -> Result<Vec<(usize, Reply)>, RuntimeError> {
        let mut answers = Vec::with_capacity(ranks.len());
        let mut failure: Option<RuntimeError> = None;
        for &rank in ranks {
            while self.early[rank].is_empty() {
                match self.replies.recv() {
                    Ok((from, reply)) => self.early[from].push_back(reply),
                    Err(_) => self.early[rank].push_back(Err(RuntimeError::Stopped)),
                }
            }
            match self.early[rank].pop_front() {
                Some(Ok(reply)) => answers.push((rank, reply)),
                Some(Err(error)) => {
                    let consequence = matches!(error, RuntimeError::Device { error: KernelError::Disconnected, .. });
                    if failure.is_none() || !consequence {
                        failure = Some(error);
                    }
                }
                None => failure = failure.or(Some(RuntimeError::Stopped)),
            }
        }
        if let Some(error) = failure {
            self.stopped = true;
            return Err(error);
        }
        Ok(answers)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Devices end when their command channel closes.
        self.commands.clear();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
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
