//! A session runs the programs of a plan: one thread per device, which lives as long as the session and keeps the
//! device's parameters and state between steps.

use crate::arena::Arena;
use crate::check::check;
use crate::compile::compile;
use crate::device::{Command, Device, Plan, Reply, ResultPart};
use crate::element::Element;
use crate::error::{KernelError, Place, RuntimeError};
use crate::host::{HostData, HostTensor};
use crate::layout::{Selection, held_indices, is_replica, summand_of};
use crate::mailbox::Mailbox;
use crate::recording::Recording;
use crate::work::threads_of_device;
use altiplano_ir::dtype::DType;
use altiplano_ir::program::{Buffer, BufferId, BufferKind, Programs, TransferId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant;

/// How a session runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    /// Cores that all devices share; all of the machine's where absent.
    pub cores: Option<usize>,
    /// Bytes that each device may hold; more is an error.
    pub memory_limit_bytes: Option<u64>,
    /// Report what devices did when.
    pub record: bool,
}

/// What a step did.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// Mean or sum of the microbatches' losses, as the plan says; NaN where no program computes a loss.
    pub loss: f64,
    pub losses: Vec<f64>,
    /// Wall-clock seconds of the step.
    pub seconds: f64,
    /// The most bytes that each device (by global id) has held so far.
    pub peak_bytes: Vec<u64>,
    /// Of each program, where the session records.
    pub recordings: Vec<Recording>,
}

/// Programs in execution.
///
/// Dropping a session ends its threads.
pub struct Session {
    plans: Vec<Arc<Plan>>,
    loss_is_mean: bool,
    record: bool,
    arenas: Vec<(u32, Arc<Arena>)>,
    /// By rank.
    commands: Vec<Sender<Command>>,
    replies: Receiver<(usize, Result<Reply, RuntimeError>)>,
    threads: Vec<JoinHandle<()>>,
    stopped: bool,
}

impl Session {
    /// Checks the programs, compiles their bodies and starts the devices, with zeros in all parameters and state.
    pub fn new(programs: &Programs, options: &Options) -> Result<Session, RuntimeError> {
        check(programs)?;
        let mut first_rank = Vec::new();
        let mut ranks = 0;
        for program in &programs.programs {
            first_rank.push(ranks);
            ranks += program.devices.len();
        }
        let transfers: Vec<_> = (0..programs.transfers.len() as u32)
            .map(|t| (programs.transfers[t as usize].clone(), Arc::new(programs.messages(TransferId(t)))))
            .collect();
        let plan = |(index, program): (usize, &altiplano_ir::program::Program)| {
            Arc::new(Plan {
                index: index as u32,
                bodies: program.bodies.iter().map(compile).collect(),
                program: program.clone(),
                transfers: transfers.clone(),
                first_rank: first_rank.clone(),
                num_microbatches: programs.num_microbatches,
            })
        };
        let plans: Vec<Arc<Plan>> = programs.programs.iter().enumerate().map(plan).collect();
        let cores = options.cores.or_else(|| std::thread::available_parallelism().ok().map(|n| n.get())).unwrap_or(1);
        let threads_each = threads_of_device(cores, ranks);
        let (reply, replies) = channel();
        let mut session = Session {
            plans: plans.clone(),
            loss_is_mean: programs.loss_is_mean,
            record: options.record,
            arenas: Vec::new(),
            commands: Vec::new(),
            replies,
            threads: Vec::new(),
            stopped: false,
        };
        let mut mailboxes = Mailbox::network(ranks).into_iter();
        for plan in &plans {
            for (position, &id) in plan.program.devices.iter().enumerate() {
                let Some(mailbox) = mailboxes.next() else { break };
                let arena = Arena::new(options.memory_limit_bytes);
                session.arenas.push((id, arena.clone()));
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
                device.allocate_persistent().map_err(failed)?;
                let (command, commands) = channel();
                let reply = reply.clone();
                let thread = std::thread::Builder::new()
                    .name(format!("device {id}"))
                    .spawn(move || device.serve(commands, reply))
                    .map_err(|error| RuntimeError::Thread { device: id, error })?;
                session.commands.push(command);
                session.threads.push(thread);
            }
        }
        Ok(session)
    }

    /// Buffers for which `wanted` holds, with the program of each.
    fn buffers(&self, wanted: impl Fn(&Buffer) -> bool) -> Vec<(usize, BufferId)> {
        let mut found = Vec::new();
        for (p, plan) in self.plans.iter().enumerate() {
            for (b, buffer) in plan.program.buffers.iter().enumerate() {
                if wanted(buffer) {
                    found.push((p, BufferId(b as u32)));
                }
            }
        }
        found
    }

    /// Loads a parameter into every program that holds it, and into its `master` state. A tensor of another float
    /// type is rounded to the parameter's; the master gets it unrounded.
    pub fn load_parameter(&mut self, name: &str, tensor: &HostTensor) -> Result<(), RuntimeError> {
        let holders = self.buffers(|b| matches!(&b.kind, BufferKind::Parameter { name: n } if n == name));
        if holders.is_empty() {
            return Err(RuntimeError::UnknownParameter { name: name.to_string() });
        }
        let masters = self.buffers(
            |b| matches!(&b.kind, BufferKind::State { parameter, slot } if parameter == name && slot == "master"),
        );
        self.load(name, &[holders, masters].concat(), tensor)
    }

    /// Loads one tensor of optimizer state into every program that holds it.
    pub fn load_state(&mut self, parameter: &str, slot: &str, tensor: &HostTensor) -> Result<(), RuntimeError> {
        let holders = self.state_buffers(parameter, slot)?;
        self.load(&format!("{parameter}/{slot}"), &holders, tensor)
    }

    fn state_buffers(&self, parameter: &str, slot: &str) -> Result<Vec<(usize, BufferId)>, RuntimeError> {
        let holders = self
            .buffers(|b| matches!(&b.kind, BufferKind::State { parameter: p, slot: s } if p == parameter && s == slot));
        if holders.is_empty() {
            return Err(RuntimeError::UnknownState { parameter: parameter.to_string(), slot: slot.to_string() });
        }
        Ok(holders)
    }

    fn load(&mut self, name: &str, holders: &[(usize, BufferId)], tensor: &HostTensor) -> Result<(), RuntimeError> {
        tensor.check()?;
        let mut casts: BTreeMap<DType, Arc<HostTensor>> = BTreeMap::new();
        for &(p, b) in holders {
            let expected = &self.plans[p].program.buffer(b).ty;
            let floats = expected.dtype.is_float() && tensor.ty.dtype.is_float();
            if expected.shape != tensor.ty.shape || !(floats || expected.dtype == tensor.ty.dtype) {
                return Err(RuntimeError::TensorType {
                    name: name.to_string(),
                    expected: expected.clone(),
                    found: tensor.ty.clone(),
                });
            }
            casts.entry(expected.dtype).or_insert_with(|| Arc::new(tensor.cast(expected.dtype)));
        }
        for &(p, b) in holders {
            let tensor = &casts[&self.plans[p].program.buffer(b).ty.dtype];
            self.ask(p, |_| Command::Load { buffer: b, tensor: tensor.clone() })?;
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

    /// One pass of programs that train nothing, over a global batch as [`Session::step`] takes it: the results of the model
    /// by position, each of them the parts of its microbatches. What is an input itself or a constant is left out.
    pub fn evaluate(
        &mut self,
        inputs: &BTreeMap<String, HostTensor>,
    ) -> Result<(StepReport, BTreeMap<u32, Vec<HostTensor>>), RuntimeError> {
        let (report, parts) = self.run(inputs, &BTreeMap::new(), true)?;
        let mut results: BTreeMap<u32, BTreeMap<Option<u32>, HostTensor>> = BTreeMap::new();
        for (rank, ResultPart { buffer, microbatch, part }) in parts {
            let program_of = self.plans.iter().rposition(|plan| plan.first_rank[plan.index as usize] <= rank);
            let plan = self.plans[program_of.unwrap_or(0)].clone();
            let description = plan.program.buffer(buffer);
            let BufferKind::Output { index } = description.kind else { continue };
            let of_microbatch = results.entry(index).or_default().entry(microbatch);
            let whole = of_microbatch.or_insert_with(|| HostTensor::zeros(description.ty.clone()));
            place_part(&plan, buffer, rank, &part, whole);
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
        let inputs = Arc::new(self.check_inputs(inputs, scalars)?);
        let scalars = Arc::new(scalars.clone());
        let start = Instant::now();
        self.begin()?;
        let all: Vec<usize> = (0..self.commands.len()).collect();
        let origin = self.record.then_some(start);
        let command = |_| Command::Step { inputs: inputs.clone(), scalars: scalars.clone(), results, origin };
        let replies = self.exchange(&all, command)?;
        let seconds = start.elapsed().as_secs_f64();
        let (mut losses, mut parts, mut recordings) = (Vec::new(), Vec::new(), Vec::new());
        for (rank, reply) in replies {
            if let Reply::Stepped { losses: of_device, results, spans } = reply {
                if let Some(program) = self.plans.iter().position(|p| p.first_rank[p.index as usize] == rank)
                    && self.record
                {
                    recordings.push(Recording { program: program as u32, spans });
                }
                losses.extend(of_device);
                parts.extend(results.into_iter().map(|part| (rank, part)));
            }
        }
        let sum: f64 = losses.iter().sum();
        let loss = match losses.len() {
            0 => f64::NAN,
            n if self.loss_is_mean => sum / n as f64,
            _ => sum,
        };
        Ok((StepReport { loss, losses, seconds, peak_bytes: self.peak_bytes(), recordings }, parts))
    }

    /// The inputs that programs use, in their buffers' element types.
    fn check_inputs(
        &self,
        given: &BTreeMap<String, HostTensor>,
        scalars: &BTreeMap<String, f64>,
    ) -> Result<BTreeMap<String, HostTensor>, RuntimeError> {
        let mut inputs = BTreeMap::new();
        for plan in &self.plans {
            for buffer in &plan.program.buffers {
                match &buffer.kind {
                    BufferKind::Scalar { name } if !scalars.contains_key(name) => {
                        return Err(RuntimeError::MissingScalar { name: name.clone() });
                    }
                    BufferKind::Input { name } => {
                        let tensor = given.get(name).ok_or(RuntimeError::MissingInput { name: name.clone() })?;
                        tensor.check()?;
                        let (expected, found) = (&buffer.ty, &tensor.ty);
                        let microbatches = plan.num_microbatches;
                        let dims = expected.shape.iter().zip(&found.shape);
                        let fits = expected.rank() == found.rank()
                            && dims.into_iter().all(|(&e, &f)| f == e || e.checked_mul(microbatches as u64) == Some(f));
                        let kinds = |d: DType| (d.is_float(), d.is_integer());
                        if !fits || kinds(expected.dtype) != kinds(found.dtype) {
                            return Err(RuntimeError::InputType {
                                name: name.clone(),
                                expected: expected.clone(),
                                found: found.clone(),
                                microbatches,
                            });
                        }
                        inputs.entry(name.clone()).or_insert_with(|| tensor.cast(expected.dtype));
                    }
                    _ => {}
                }
            }
        }
        Ok(inputs)
    }

    /// A parameter, put together from one program that holds it.
    pub fn parameter(&mut self, name: &str) -> Result<HostTensor, RuntimeError> {
        let holders = self.buffers(|b| matches!(&b.kind, BufferKind::Parameter { name: n } if n == name));
        match holders.first() {
            Some(&(p, b)) => self.gather(p, b),
            None => Err(RuntimeError::UnknownParameter { name: name.to_string() }),
        }
    }

    /// One tensor of optimizer state.
    pub fn state(&mut self, parameter: &str, slot: &str) -> Result<HostTensor, RuntimeError> {
        let holders = self.state_buffers(parameter, slot)?;
        self.gather(holders[0].0, holders[0].1)
    }

    /// The gradient of a parameter as the last step accumulated it: partial sums are added up, and where several
    /// programs hold an accumulator of the same parameter, their sum.
    pub fn accumulator(&mut self, parameter: &str) -> Result<HostTensor, RuntimeError> {
        let holders = self.buffers(|b| matches!(&b.kind, BufferKind::Accumulator { parameter: p } if p == parameter));
        let Some((&(p, b), others)) = holders.split_first() else {
            return Err(RuntimeError::UnknownParameter { name: parameter.to_string() });
        };
        let mut sum = self.gather(p, b)?;
        for &(p, b) in others {
            let more = self.gather(p, b)?.to_f64();
            let both: Vec<f64> = sum.to_f64().iter().zip(more).map(|(x, y)| x + y).collect();
            sum = HostTensor::from_f64(sum.ty, &both);
        }
        Ok(sum)
    }

    /// Names of all parameters.
    pub fn parameters(&self) -> BTreeSet<String> {
        let buffers = self.plans.iter().flat_map(|p| &p.program.buffers);
        let name = |b: &Buffer| if let BufferKind::Parameter { name } = &b.kind { Some(name.clone()) } else { None };
        buffers.filter_map(name).collect()
    }

    /// Parameter and slot of all optimizer state.
    pub fn states(&self) -> BTreeSet<(String, String)> {
        let buffers = self.plans.iter().flat_map(|p| &p.program.buffers);
        let name = |b: &Buffer| match &b.kind {
            BufferKind::State { parameter, slot } => Some((parameter.clone(), slot.clone())),
            _ => None,
        };
        buffers.filter_map(name).collect()
    }

    /// The most bytes that each device has held so far, by global id.
    pub fn peak_bytes(&self) -> Vec<u64> {
        let devices = self.arenas.iter().map(|a| a.0 as usize + 1).max().unwrap_or(0);
        let mut peaks = vec![0; devices];
        for (id, arena) in &self.arenas {
            peaks[*id as usize] += arena.peak_bytes();
        }
        peaks
    }

    /// Puts a buffer together from its parts, reducing what is partial.
    fn gather(&mut self, p: usize, b: BufferId) -> Result<HostTensor, RuntimeError> {
        let plan = self.plans[p].clone();
        let mut whole = HostTensor::zeros(plan.program.buffer(b).ty.clone());
        for (rank, reply) in self.ask(p, |_| Command::Fetch { buffer: b })? {
            if let Reply::Fetched(part) = reply {
                place_part(&plan, b, rank, &part, &mut whole);
            }
        }
        Ok(whole)
    }

    /// Gives a command to all devices of a program.
    fn ask(&mut self, p: usize, command: impl Fn(usize) -> Command) -> Result<Vec<(usize, Reply)>, RuntimeError> {
        self.begin()?;
        let first = self.plans[p].first_rank[p];
        let ranks: Vec<usize> = (first..first + self.plans[p].program.devices.len()).collect();
        self.exchange(&ranks, command)
    }

    fn begin(&self) -> Result<(), RuntimeError> {
        if self.stopped { Err(RuntimeError::Stopped) } else { Ok(()) }
    }

    /// Sends commands and waits for all answers, in order of rank. Of several errors the one that caused the others
    /// is returned.
    fn exchange(
        &mut self,
        ranks: &[usize],
        command: impl Fn(usize) -> Command,
    ) -> Result<Vec<(usize, Reply)>, RuntimeError> {
        let mut asked = 0;
        for &rank in ranks {
            asked += self.commands[rank].send(command(rank)).is_ok() as usize;
        }
        let mut answers = Vec::with_capacity(asked);
        let mut failure: Option<RuntimeError> = (asked < ranks.len()).then_some(RuntimeError::Stopped);
        for _ in 0..asked {
            match self.replies.recv() {
                Ok((rank, Ok(reply))) => answers.push((rank, reply)),
                Ok((_, Err(error))) => {
                    let consequence = matches!(error, RuntimeError::Device { error: KernelError::Disconnected, .. });
                    if failure.is_none() || !consequence {
                        failure = Some(error);
                    }
                }
                Err(_) => failure = failure.or(Some(RuntimeError::Stopped)),
            }
        }
        if let Some(error) = failure {
            self.stopped = true;
            return Err(error);
        }
        answers.sort_by_key(|a| a.0);
        Ok(answers)
    }
}

/// Puts one device's part of a buffer where it belongs in the whole, unless another device has the same.
fn place_part(plan: &Plan, buffer: BufferId, rank: usize, part: &HostTensor, whole: &mut HostTensor) {
    let program = &plan.program;
    let sharding = &program.buffer(buffer).sharding;
    let coordinates = program.mesh.coordinates((rank - plan.first_rank[plan.index as usize]) as u32);
    if is_replica(sharding, &program.mesh, &coordinates) {
        return;
    }
    let shape: Vec<usize> = whole.ty.shape.iter().map(|&d| d as usize).collect();
    let selection = Selection::new(&shape, &held_indices(sharding, &program.mesh, &coordinates));
    put(&selection, &part.data, &mut whole.data, summand_of(sharding, &coordinates));
}

/// Writes a part into the whole tensor, or combines it with what is there.
fn put(selection: &Selection, part: &HostData, whole: &mut HostData, reducer: Option<altiplano_ir::op::Reducer>) {
    fn typed<T: Element>(
        selection: &Selection,
        part: &[T],
        whole: &mut [T],
        reducer: Option<altiplano_ir::op::Reducer>,
    ) {
        match reducer {
            None => selection.write(part, whole),
            Some(reducer) => selection.combine(part, whole, reducer),
        }
    }
    match (part, whole) {
        (HostData::F32(p), HostData::F32(w)) => typed(selection, p, w, reducer),
        (HostData::F16(p), HostData::F16(w)) => typed(selection, p, w, reducer),
        (HostData::BF16(p), HostData::BF16(w)) => typed(selection, p, w, reducer),
        (HostData::I32(p), HostData::I32(w)) => typed(selection, p, w, reducer),
        (HostData::I64(p), HostData::I64(w)) => typed(selection, p, w, reducer),
        (HostData::Bool(p), HostData::Bool(w)) => typed(selection, p, w, reducer),
        _ => {}
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
