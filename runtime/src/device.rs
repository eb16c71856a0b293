//! One device: a thread that executes its program's schedule at its own mesh coordinates, and the buffers that it
//! holds.

use crate::arena::{Arena, Storage};
use crate::async_collectives::{AsyncCollective, AsyncCollectives, Begun, Operand, early};
use crate::collective::{Member, own};
use crate::element::{Class, Element, with_class, with_width};
use crate::error::{KernelError, Place, RuntimeError};
use crate::execute::{fill, round_stored, run_kernel};
use crate::host::{HostData, HostTensor};
use crate::layout::{Selection, held_indices, summand_of};
use crate::mailbox::{Mailbox, Payload, Tag};
use crate::recording::{Recorder, Span, Start, What};
use crate::step::{Compiled, Kernel, Step};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::program::{BufferId, BufferKind, Call, Message, Overlap, Phase, Program, Transfer, TransferId};
use altiplano_ir::reshard::Collective;
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Instant;

/// The data shared by all devices of a program: the program, its compiled bodies, and the transfers with their
/// messages.
pub struct Plan {
    pub index: u32,
    pub program: Program,
    pub bodies: Vec<Compiled>,
    pub transfers: Vec<(Transfer, Arc<Vec<Message>>)>,
    /// Rank of the first device of each program.
    pub first_rank: Vec<usize>,
    pub num_microbatches: u32,
    /// True if the results of ops are scanned for NaN.
    pub check_nan: bool,
}

/// Commands from the session to a device.
pub enum Command {
    /// Joins the groups with which the device runs collectives, when all devices are set up.
    Join,
    /// Loads this device's part of a global tensor.
    Load { buffer: BufferId, tensor: Arc<HostTensor> },
    /// Returns this device's part of a buffer.
    Fetch { buffer: BufferId },
    Step {
        inputs: Arc<BTreeMap<String, HostTensor>>,
        scalars: Arc<BTreeMap<String, f64>>,
        /// True if the device returns its parts of the results.
        results: bool,
        /// Origin of the recording's time, if the step is recorded.
        origin: Option<Instant>,
    },
    /// Runs the remaining calls of the last step, then those that update copies of the weights.
    Flush,
    /// Prepares a program that runs the model forward with this device's weights: pairs of a buffer here and the buffer
    /// there that reads it. Other devices send all other weights.
    Prepare { plan: Arc<Plan>, weights: Vec<(BufferId, BufferId)> },
    /// Runs the prepared program and returns its results.
    Evaluate { inputs: Arc<BTreeMap<String, HostTensor>> },
}

/// One device's part of a result of one microbatch.
pub struct ResultPart {
    pub buffer: BufferId,
    pub microbatch: Option<u32>,
    pub part: HostTensor,
}

/// Replies from a device to the session.
pub enum Reply {
    Done,
    Fetched(HostTensor),
    Stepped {
        /// The loss of each microbatch, from the first device of the program that computes it.
        losses: Vec<f64>,
        results: Vec<ResultPart>,
        /// From the first device of a program, if it recorded the step.
        spans: Vec<Span>,
        /// Time at which the device finished the step.
        ended: Instant,
    },
}

/// The data that a device holds for one step.
#[derive(Default)]
struct StepState {
    inputs: Arc<BTreeMap<String, HostTensor>>,
    /// Scalars, and the buffers that live no longer than the step, by microbatch.
    buffers: FxHashMap<(BufferId, Option<u32>), Arc<Storage>>,
    /// Parameters as of the start of the step, if they may be updated before it ends.
    parameters: FxHashMap<BufferId, Arc<Storage>>,
    /// Index of the accumulator instance that the step uses.
    accumulators: u32,
    /// Accumulators that have been zeroed.
    zeroed: FxHashSet<BufferId>,
}

/// First number of the messages of an evaluation. It keeps them apart from those of a step in progress.
const MESSAGES_OF_EVALUATION: u32 = 1 << 31;

pub struct Device {
    pub id: u32,
    pub position: u32,
    pub coordinates: Vec<u32>,
    pub plan: Arc<Plan>,
    pub arena: Arc<Arena>,
    /// The buffers in host memory.
    pub host: Arc<Arena>,
    pub mailbox: Mailbox,
    pub threads: usize,
    /// Number of the first transfer message. It separates the messages of several sets of programs.
    first_message: u32,
    /// The device of the prepared evaluation, and pairs of buffers, as in [`Command::Prepare`].
    evaluation: Option<Box<(Device, Vec<(BufferId, BufferId)>)>>,
    /// Buffers that outlive steps. Accumulators have two instances if two steps use them at once; all others have one.
    lasting: FxHashMap<(BufferId, u32), Arc<Storage>>,
    overlap: Overlap,
    /// Position of the schedule's last call that works on a microbatch.
    last_of_microbatch: Option<usize>,
    /// The step to which the current call belongs.
    now: StepState,
    /// The previous step, if some of its calls remain.
    before: Option<StepState>,
    /// The position of the late call at which asynchronous collectives start, and these collectives.
    early: (usize, Arc<[AsyncCollective]>),
    behind: AsyncCollectives,
    losses: Vec<f64>,
    /// Parts of the results, if the session asked for them.
    results: Option<Vec<ResultPart>>,
    recorder: Option<Recorder>,
    /// The first op of the step whose result has an infinity, if results are scanned.
    infinite: Option<Box<Place>>,
    /// The current activity, for error messages.
    place: Place,
    empty: Storage,
}

impl Device {
    pub fn new(
        id: u32,
        position: u32,
        plan: Arc<Plan>,
        arena: Arc<Arena>,
        mailbox: Mailbox,
        threads: usize,
    ) -> Result<Device, KernelError> {
        let place = Place { device: id, program: plan.index, activity: String::new(), microbatch: None, op: None };
        let empty = arena.allocate(Class::F32, 0)?;
        let coordinates = plan.program.mesh.coordinates(position);
        let program = &plan.program;
        let works = |call: &Call| matches!(call, Call::Run { body, .. } if program.bodies[*body as usize].phase.is_of_microbatch());
        let last_of_microbatch = program.schedule.iter().rposition(works);
        let overlap = program.overlap(&program.bodies);
        let (first, all) = early(program, &plan.bodies, &plan.transfers);
        Ok(Device {
            id,
            position,
            coordinates,
            plan,
            arena,
            host: Arena::new(None),
            mailbox,
            threads,
            first_message: 0,
            evaluation: None,
            lasting: FxHashMap::default(),
            overlap,
            last_of_microbatch,
            now: StepState::default(),
            before: None,
            early: (first, all.into()),
            behind: AsyncCollectives::default(),
            losses: Vec::new(),
            results: None,
            recorder: None,
            infinite: None,
            place,
            empty,
        })
    }

    /// Creates a device that holds zeros.
    pub(crate) fn with_zeros(
        id: u32,
        position: u32,
        plan: Arc<Plan>,
        arena: Arc<Arena>,
        mailbox: Mailbox,
        threads: usize,
    ) -> Result<Device, RuntimeError> {
        let activity = "allocating parameters and state".to_string();
        let place = Place { device: id, program: plan.index, activity, microbatch: None, op: None };
        let made = Device::new(id, position, plan, arena, mailbox, threads);
        let filled = made.and_then(|mut device| device.allocate_persistent().map(|()| device));
        filled.map_err(|error| RuntimeError::Device { place: Box::new(place), error })
    }

    /// Executes one command. An error carries the place where it occurred.
    pub(crate) fn answer_here(&mut self, command: Command) -> Result<Reply, RuntimeError> {
        if let Command::Evaluate { inputs } = command {
            return self.evaluate(inputs);
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| self.answer(command)));
        let failed =
            |panic: Box<dyn std::any::Any + Send>| Err(KernelError::Panic { message: panic_message(panic.as_ref()) });
        outcome
            .unwrap_or_else(failed)
            .map_err(|error| RuntimeError::Device { place: Box::new(self.place.clone()), error })
    }

    /// Executes commands until the session closes the channel. After an error all devices stop.
    pub fn serve(mut self, commands: Receiver<Command>, replies: Sender<(usize, Result<Reply, RuntimeError>)>) {
        while let Ok(command) = commands.recv() {
            let reply = self.answer_here(command);
            if reply.is_err() {
                self.mailbox.stop_all();
            }
            if replies.send((self.mailbox.rank, reply)).is_err() {
                return;
            }
        }
    }

    fn answer(&mut self, command: Command) -> Result<Reply, KernelError> {
        self.place.op = None;
        self.place.microbatch = None;
        match command {
            Command::Join => Ok(Reply::Done),
            Command::Prepare { plan, weights } => {
                self.place.activity = "preparing to evaluate".to_string();
                self.prepare(plan, weights).map(|()| Reply::Done)
            }
            // Its errors have a place of their own: see `answer_here`.
            Command::Evaluate { .. } => Err(KernelError::Closed),
            Command::Load { buffer, tensor } => {
                self.place.activity = format!("loading '{}'", self.plan.program.buffer(buffer).name);
                self.lasting.remove(&(buffer, 0));
                let storage = self.cut(buffer, &tensor, None)?;
                self.lasting.insert((buffer, 0), Arc::new(storage));
                Ok(Reply::Done)
            }
            Command::Fetch { buffer } => {
                let plan = self.plan.clone();
                let description = plan.program.buffer(buffer);
                self.place.activity = format!("reading '{}'", description.name);
                let storage = self.persistent(buffer)?;
                Ok(Reply::Fetched(self.part(buffer, storage)))
            }
            Command::Step { inputs, scalars, results, origin } => {
                self.recorder = origin.filter(|_| self.position == 0).map(Recorder::new);
                self.losses.clear();
                self.results = results.then(Vec::new);
                self.step(inputs, &scalars)?;
                let losses = std::mem::take(&mut self.losses);
                let spans = self.recorder.take().map(Recorder::finish).unwrap_or_default();
                let results = self.results.take().unwrap_or_default();
                Ok(Reply::Stepped { losses, results, spans, ended: Instant::now() })
            }
            Command::Flush => {
                if let Some(before) = self.before.take() {
                    self.now = before;
                    let schedule = self.plan.clone();
                    for position in schedule.program.num_prompt()..schedule.program.schedule.len() {
                        self.call(position)?;
                    }
                    self.end();
                }
                let plan = self.plan.clone();
                for call in &plan.program.flush {
                    match *call {
                        Call::Send { transfer, microbatch, free } => self.send(transfer, microbatch, free)?,
                        Call::Receive { transfer, microbatch } => self.receive(transfer, microbatch)?,
                        // A flush has none, by `check`.
                        Call::Run { .. } => {}
                    }
                }
                Ok(Reply::Done)
            }
        }
    }

    /// Creates the device of an evaluation.
    fn prepare(&mut self, plan: Arc<Plan>, weights: Vec<(BufferId, BufferId)>) -> Result<(), KernelError> {
        // A placeholder: while the device runs, it uses this one's mailbox.
        let mailbox = Mailbox::network(1, false).pop().ok_or(KernelError::Closed)?;
        let mut device = Device::new(self.id, self.position, plan, Arena::new(None), mailbox, self.threads)?;
        device.first_message = MESSAGES_OF_EVALUATION;
        self.evaluation = Some(Box::new((device, weights)));
        Ok(())
    }

    /// Runs the prepared evaluation with the weights of this device.
    fn evaluate(&mut self, inputs: Arc<BTreeMap<String, HostTensor>>) -> Result<Reply, RuntimeError> {
        let mut evaluation = self.evaluation.take().ok_or(RuntimeError::NoStep)?;
        let (device, weights) = &mut *evaluation;
        for &(held, read) in &*weights {
            let storage = self.persistent(held).map_err(RuntimeError::Carrier)?;
            device.lasting.insert((read, 0), storage.clone());
        }
        std::mem::swap(&mut self.mailbox, &mut device.mailbox);
        let reply = device.answer_here(Command::Step { inputs, scalars: Arc::default(), results: true, origin: None });
        std::mem::swap(&mut self.mailbox, &mut device.mailbox);
        // Drop the shared weights; otherwise the next update would have to copy them.
        device.lasting.clear();
        self.evaluation = Some(evaluation);
        reply
    }

    /// Copies this device's part of a buffer to a host tensor.
    fn part(&self, buffer: BufferId, storage: &Storage) -> HostTensor {
        let program = &self.plan.program;
        let description = program.buffer(buffer);
        let ty = description.sharding.local_type(&description.ty, &program.mesh);
        let data = HostData::from_bytes(Class::of(ty.dtype), storage.slice());
        HostTensor { ty, data }
    }

    /// Allocates the buffers that live for the whole run, filled with zeros.
    fn allocate_persistent(&mut self) -> Result<(), KernelError> {
        let plan = self.plan.clone();
        for b in (0..plan.program.buffers.len() as u32).map(BufferId) {
            let instances = match plan.program.buffer(b).kind {
                BufferKind::Accumulator { .. } if self.overlap.doubles_accumulators => 2,
                BufferKind::Parameter { .. } | BufferKind::State { .. } | BufferKind::Accumulator { .. } => 1,
                _ => 0,
            };
            for instance in 0..instances {
                let storage = self.zeros(b)?;
                self.lasting.insert((b, instance), Arc::new(storage));
            }
        }
        Ok(())
    }

    fn zeros(&self, buffer: BufferId) -> Result<Storage, KernelError> {
        let (class, shape) = self.local(buffer);
        self.arena_of(buffer).zeros(class, shape.iter().product())
    }

    /// The arena that holds a buffer: the device's, or its host's.
    fn arena_of(&self, buffer: BufferId) -> &Arc<Arena> {
        if self.plan.program.buffer(buffer).host { &self.host } else { &self.arena }
    }

    /// Storage format and shape of this device's part of a buffer.
    fn local(&self, buffer: BufferId) -> (Class, Vec<usize>) {
        let program = &self.plan.program;
        let buffer = program.buffer(buffer);
        let shape = buffer.sharding.local_shape(&program.mesh).iter().map(|&d| d as usize).collect();
        (Class::of(buffer.ty.dtype), shape)
    }

    fn persistent(&self, buffer: BufferId) -> Result<&Arc<Storage>, KernelError> {
        let missing = KernelError::MissingValue { buffer, microbatch: None };
        self.lasting.get(&self.lasting_key(buffer)).ok_or(missing)
    }

    /// The key of a buffer that outlives steps, as the current step sees it.
    fn lasting_key(&self, buffer: BufferId) -> (BufferId, u32) {
        let accumulates = matches!(self.plan.program.buffer(buffer).kind, BufferKind::Accumulator { .. });
        (buffer, if accumulates { self.now.accumulators } else { 0 })
    }

    /// Cuts this device's part out of a global tensor, or out of a microbatch's rows of it.
    fn cut(&self, buffer: BufferId, tensor: &HostTensor, microbatch: Option<u32>) -> Result<Storage, KernelError> {
        let program = &self.plan.program;
        let description = program.buffer(buffer);
        let mut indices = held_indices(&description.sharding, &program.mesh, &self.coordinates);
        for (d, list) in indices.iter_mut().enumerate() {
            let (size, given) = (description.ty.shape[d], tensor.ty.shape[d]);
            if size != given {
                let shift = size * microbatch.unwrap_or(0) as u64;
                if microbatch.is_none() || shift + size > given {
                    return Err(KernelError::InputShape {
                        name: description.name.clone(),
                        given: tensor.ty.clone(),
                        wanted: description.ty.clone(),
                        microbatch,
                    });
                }
                list.iter_mut().for_each(|i| *i += shift);
            }
        }
        let shape: Vec<usize> = tensor.ty.shape.iter().map(|&d| d as usize).collect();
        let selection = Selection::new(&shape, &indices);
        let class = Class::of(description.ty.dtype);
        let mut storage = self.arena_of(buffer).allocate(class, selection.elements())?;
        with_class!(class, T => {
            let target = storage.slice_mut::<T>();
            match summand_of(&description.sharding, &self.coordinates) {
                None => selection.read(bytemuck::cast_slice::<u8, T>(tensor.data.as_bytes()), target),
                Some(reducer) => target.fill(T::from_f32(reducer.neutral(description.ty.dtype) as f32)),
            }
        });
        Ok(storage)
    }

    fn step(
        &mut self,
        inputs: Arc<BTreeMap<String, HostTensor>>,
        scalars: &BTreeMap<String, f64>,
    ) -> Result<(), KernelError> {
        let plan = self.plan.clone();
        let program = &plan.program;
        self.place.activity = "preparing a step".to_string();
        self.infinite = None;
        let accumulators = match self.overlap.doubles_accumulators {
            true => 1 - self.now.accumulators,
            false => 0,
        };
        self.now = StepState { inputs, accumulators, ..StepState::default() };
        for (i, buffer) in program.buffers.iter().enumerate() {
            let id = BufferId(i as u32);
            match &buffer.kind {
                BufferKind::Parameter { .. } if self.overlap.stashes_parameters => {
                    let storage = self.persistent(id)?.clone();
                    self.now.parameters.insert(id, storage);
                }
                BufferKind::Scalar { name } => {
                    let class = Class::of(buffer.ty.dtype);
                    let mut storage = self.arena.allocate(class, 1)?;
                    let value = scalars.get(name).copied().unwrap_or(0.0);
                    fill(&mut storage, value, buffer.ty.dtype);
                    self.now.buffers.insert((id, None), Arc::new(storage));
                }
                _ => {}
            }
        }
        let mut made = 0;
        self.begin_behind(program.num_prompt(), made)?;
        for (position, late) in program.turns() {
            if !late {
                self.call(position)?;
                made += 1;
            } else if self.before.is_some() {
                self.of_step_before(|device| device.call(position))?;
                self.begin_behind(position + 1, made)?;
            }
        }
        self.before = None;
        // A flush runs the remaining calls one after the other.
        self.behind = AsyncCollectives::default();
        if program.late.is_empty() {
            self.end();
        } else {
            let accumulators = self.now.accumulators;
            self.before = Some(std::mem::take(&mut self.now));
            self.now.accumulators = accumulators;
        }
        self.mailbox.clear();
        Ok(())
    }

    /// Ends the step and drops the buffers that no call freed.
    fn end(&mut self) {
        self.now = StepState { accumulators: self.now.accumulators, ..StepState::default() };
    }

    /// Runs the call at a position of the schedule.
    fn call(&mut self, position: usize) -> Result<(), KernelError> {
        let plan = self.plan.clone();
        self.mailbox.check()?;
        self.place.op = None;
        let start = self.start();
        match plan.program.schedule[position] {
            Call::Run { body, microbatch } => {
                let compiled = &plan.bodies[body as usize];
                self.place.activity = format!("body '{}'", compiled.name);
                self.place.microbatch = microbatch;
                self.mailbox.note(&self.place);
                self.run(compiled, body, microbatch, position)?;
            }
            Call::Send { transfer, microbatch, free } => {
                self.place.activity = format!("sending {transfer}");
                self.place.microbatch = microbatch;
                self.mailbox.note(&self.place);
                self.send(transfer, microbatch, free)?;
            }
            Call::Receive { transfer, microbatch } => {
                self.place.activity = format!("receiving {transfer}");
                self.place.microbatch = microbatch;
                self.mailbox.note(&self.place);
                self.receive(transfer, microbatch)?;
            }
        }
        if Some(position) == self.last_of_microbatch {
            self.now.parameters.clear();
        }
        self.record(What::Call { position }, start);
        Ok(())
    }

    /// Runs a function with the state of the previous step in place of the current one.
    fn of_step_before(&mut self, with: impl FnOnce(&mut Device) -> Result<(), KernelError>) -> Result<(), KernelError> {
        let Some(before) = self.before.take() else { return Ok(()) };
        let now = std::mem::replace(&mut self.now, before);
        let done = with(self);
        self.before = Some(std::mem::replace(&mut self.now, now));
        done
    }

    /// Starts to reduce the gradients of the previous step, if they are complete and needed only later. Called before
    /// the late call at `position`, after `made` calls of this step.
    ///
    /// Devices that exchange over a network compute meanwhile. Devices that exchange through the memory in which they
    /// compute would gain nothing. All devices of a program decide alike.
    fn begin_behind(&mut self, position: usize, made: usize) -> Result<(), KernelError> {
        let program = &self.plan.program;
        let due = position.checked_sub(program.num_prompt()).and_then(|late| program.late.get(late));
        let is_later = due.is_some_and(|&due| due as usize > made);
        if position != self.early.0 || self.before.is_none() || !is_later || !self.mailbox.copies() {
            return Ok(());
        }
        self.behind.on = true;
        self.look_behind()
    }

    /// Lets asynchronous collectives make progress.
    fn look_behind(&mut self) -> Result<(), KernelError> {
        if !self.behind.on || self.behind.next >= self.early.1.len() {
            return Ok(());
        }
        self.of_step_before(|device| device.advance_behind(None))
    }

    /// Advances the asynchronous collectives as far as possible without blocking. With `needed`, blocks until the
    /// result of that call and step is there. The current state must be that of their step.
    fn advance_behind(&mut self, needed: Option<(usize, usize)>) -> Result<(), KernelError> {
        let (plan, all) = (self.plan.clone(), self.early.1.clone());
        while let Some(item) = all.get(self.behind.next) {
            if needed.is_some_and(|needed| self.behind.results.contains_key(&needed)) {
                return Ok(());
            }
            let body = &plan.bodies[item.body as usize];
            let step = &body.steps[item.step];
            let advanced = self.advance_collective(item, step, needed.is_some());
            let result = match advanced {
                Ok(Some(result)) => Arc::new(result),
                Ok(None) => return Ok(()),
                Err(error) => {
                    let name = plan.program.bodies[item.body as usize].graph.nodes.get(step.node.index());
                    self.place.activity = format!("body '{}'", body.name);
                    (self.place.microbatch, self.place.op) =
                        (None, Some((step.node, name.map_or("", |n| n.op.name()))));
                    return Err(error);
                }
            };
            let since = self.behind.since.take();
            self.record(What::AsyncCollective { position: item.position, node: step.node }, since);
            self.behind.next += 1;
            match all.get(self.behind.next) {
                Some(next) if next.operand == Operand::Before => self.behind.carried = Some(result),
                _ => drop(self.behind.results.insert((item.position, item.step), result)),
            }
        }
        Ok(())
    }

    /// Advances one collective, which it first begins if it is not in flight. Returns the result once it is complete.
    fn advance_collective(
        &mut self,
        item: &AsyncCollective,
        step: &Step,
        wait: bool,
    ) -> Result<Option<Storage>, KernelError> {
        let Kernel::Collective { collective, dtype, shape, .. } = &step.kernel else { return Ok(None) };
        if self.behind.begun.is_none() {
            let operand = match item.operand {
                Operand::Sum { buffer, .. } => {
                    let sum = self.bring(buffer, None, Phase::Update)?;
                    self.remove(buffer, None);
                    sum
                }
                Operand::Before => self.behind.carried.take().ok_or(KernelError::Disconnected)?,
            };
            self.behind.since = self.start();
            let mut member = self.member(collective);
            match Begun::new(&member, collective, *dtype, shape, operand) {
                Ok(begun) => self.behind.begun = Some(begun),
                // The collective runs synchronously, since it needs no other device.
                Err(operand) => {
                    let mut result = member.run(collective, *dtype, shape, operand, true)?;
                    round_stored(&mut result, *dtype);
                    return Ok(Some(result));
                }
            }
        }
        let Some(begun) = &mut self.behind.begun else { return Ok(None) };
        let Some(mut result) = begun.advance(&mut self.mailbox, wait)? else { return Ok(None) };
        self.behind.begun = None;
        round_stored(&mut result, *dtype);
        Ok(Some(result))
    }

    /// The key under which the step keeps the instance of a buffer that a call sees: the microbatch's, or else the
    /// step's.
    fn key(&self, buffer: BufferId, microbatch: Option<u32>) -> (BufferId, Option<u32>) {
        let own = (buffer, microbatch);
        if self.now.buffers.contains_key(&own) { own } else { (buffer, None) }
    }

    fn find(&self, buffer: BufferId, microbatch: Option<u32>) -> Result<&Arc<Storage>, KernelError> {
        let of_step = self.now.buffers.get(&self.key(buffer, microbatch));
        let lasting = || self.lasting.get(&self.lasting_key(buffer));
        of_step.or_else(lasting).ok_or(KernelError::MissingValue { buffer, microbatch })
    }

    /// Removes the instance of a buffer that a call sees.
    fn remove(&mut self, buffer: BufferId, microbatch: Option<u32>) {
        if self.now.buffers.remove(&self.key(buffer, microbatch)).is_none() {
            self.lasting.remove(&self.lasting_key(buffer));
        }
    }

    /// Stores the instance of a buffer that a call writes.
    fn insert(&mut self, buffer: BufferId, microbatch: Option<u32>, storage: Arc<Storage>) {
        if self.plan.program.buffer(buffer).kind.is_of_step() {
            self.now.buffers.insert((buffer, microbatch), storage);
        } else {
            self.lasting.insert(self.lasting_key(buffer), storage);
        }
    }

    /// The value that a body reads from a buffer. The first reader of an input loads it, and the first reader of a sum
    /// zeroes it.
    fn bring(&mut self, buffer: BufferId, microbatch: Option<u32>, phase: Phase) -> Result<Arc<Storage>, KernelError> {
        let plan = self.plan.clone();
        match &plan.program.buffer(buffer).kind {
            BufferKind::Input { name } if !self.now.buffers.contains_key(&self.key(buffer, microbatch)) => {
                let inputs = self.now.inputs.clone();
                let missing = KernelError::MissingValue { buffer, microbatch };
                let storage = self.cut(buffer, inputs.get(name).ok_or(missing)?, microbatch)?;
                self.now.buffers.insert((buffer, microbatch), Arc::new(storage));
            }
            BufferKind::Accumulator { .. } if self.now.zeroed.insert(buffer) => {
                self.lasting.remove(&self.lasting_key(buffer));
                let zeros = self.zeros(buffer)?;
                self.lasting.insert(self.lasting_key(buffer), Arc::new(zeros));
            }
            BufferKind::Parameter { .. } if phase.is_of_microbatch() => {
                if let Some(began_with) = self.now.parameters.get(&buffer) {
                    return Ok(began_with.clone());
                }
            }
            _ => {}
        }
        self.find(buffer, microbatch).cloned()
    }

    /// The current time, if the step is recorded.
    fn start(&self) -> Option<Start> {
        self.recorder.as_ref().map(|_| Start::now(self.mailbox.waited))
    }

    fn record(&mut self, what: What, start: Option<Start>) {
        if let (Some(recorder), Some(start)) = (&mut self.recorder, start) {
            recorder.end(what, start, self.mailbox.waited, self.arena.held_bytes());
        }
    }

    fn run(
        &mut self,
        body: &Compiled,
        index: u32,
        microbatch: Option<u32>,
        position: usize,
    ) -> Result<(), KernelError> {
        let mut values: Vec<Option<Arc<Storage>>> = vec![None; body.num_values];
        let phase = self.plan.program.bodies[index as usize].phase;
        // Steps with an asynchronous collective take its result instead of running it.
        let all = self.early.1.clone();
        let of_call = all.iter().filter(|item| self.behind.on && item.position == position);
        let early: Vec<&AsyncCollective> = of_call.collect();
        let is_taken = |value: ValueId| {
            early.iter().any(|item| matches!(item.operand, Operand::Sum { leaf, .. } if leaf == value))
        };
        for leaf in body.leaves.iter().filter(|leaf| !is_taken(leaf.value)) {
            values[leaf.value.index()] = Some(self.bring(leaf.buffer, microbatch, phase)?);
        }
        for leaf in body.leaves.iter().filter(|leaf| leaf.owned && !is_taken(leaf.value)) {
            self.remove(leaf.buffer, microbatch);
        }
        let plan = self.plan.clone();
        let graph = &plan.program.bodies[index as usize].graph;
        if plan.check_nan {
            self.check_leaves(body, &values)?;
        }
        for (number, step) in body.steps.iter().enumerate() {
            self.place.op = Some((step.node, graph.nodes.get(step.node.index()).map_or("", |n| n.op.name())));
            self.mailbox.check()?;
            let start = self.start();
            if early.iter().any(|item| item.step == number) {
                // The next collective consumes this one's result, so the step has no value to store.
                let continues = |pair: &[AsyncCollective]| {
                    (pair[0].position, pair[0].step) == (position, number) && pair[1].operand == Operand::Before
                };
                if all.windows(2).any(continues) {
                    continue;
                }
                self.advance_behind(Some((position, number)))?;
                values[step.outputs[0].value.index()] = self.behind.results.remove(&(position, number));
            } else {
                self.execute(step, &mut values)?;
                self.look_behind()?;
            }
            if plan.check_nan {
                self.check_outputs(step, graph, &values)?;
            }
            self.record(What::Kernel { position, node: step.node }, start);
            for v in &step.dies {
                values[v.index()] = None;
            }
        }
        self.place.op = None;
        for buffer in &body.frees {
            self.now.buffers.remove(&self.key(*buffer, microbatch));
        }
        for &(buffer, v) in &body.writes {
            let missing = KernelError::MissingValue { buffer, microbatch };
            let storage = values[v.index()].clone().ok_or(missing)?;
            if self.plan.program.buffer(buffer).kind == BufferKind::Loss && self.position == 0 {
                let class = Class::of(self.plan.program.buffer(buffer).ty.dtype);
                self.losses.push(with_class!(class, T => storage.slice::<T>()[0].to_f32() as f64));
            }
            if matches!(self.plan.program.buffer(buffer).kind, BufferKind::Output { .. }) {
                // Results go to the host if it asked for them, and are dropped otherwise.
                let part = self.results.is_some().then(|| self.part(buffer, &storage));
                let results = self.results.iter_mut();
                results.zip(part).for_each(|(all, part)| all.push(ResultPart { buffer, microbatch, part }));
                continue;
            }
            self.insert(buffer, microbatch, storage);
        }
        Ok(())
    }

    /// Fails if a buffer that a body reads holds a NaN.
    fn check_leaves(&self, body: &Compiled, values: &[Option<Arc<Storage>>]) -> Result<(), KernelError> {
        for leaf in &body.leaves {
            let buffer = self.plan.program.buffer(leaf.buffer);
            if values[leaf.value.index()].as_ref().is_some_and(|s| oddities(s, buffer.ty.dtype).0) {
                return Err(KernelError::HoldsNaN { buffer: buffer.name.clone() });
            }
        }
        Ok(())
    }

    /// Fails if a step made a NaN. Its inputs had none, or the device would have stopped before.
    ///
    /// Masks are full of negative infinities. So only a positive one, a sign of overflow, is kept for the message.
    fn check_outputs(
        &mut self,
        step: &Step,
        graph: &Graph,
        values: &[Option<Arc<Storage>>],
    ) -> Result<(), KernelError> {
        for output in &step.outputs {
            let Some(storage) = &values[output.value.index()] else { continue };
            let (nan, infinite) = oddities(storage, output.dtype);
            if nan {
                let name = |v: &ValueId| (*v, graph.nodes.get(v.index()).map_or("", |n| n.op.name()));
                let fused = step.members.iter().map(name).collect();
                return Err(KernelError::MadeNaN { fused, infinite: self.infinite.take() });
            }
            if infinite && self.infinite.is_none() {
                self.infinite = Some(Box::new(self.place.clone()));
            }
        }
        Ok(())
    }

    /// This device as a member of the group that runs a collective.
    fn member(&mut self, collective: &Collective) -> Member<'_> {
        let mesh = &self.plan.program.mesh;
        let first = self.plan.first_rank[self.plan.index as usize];
        let group = mesh.group(collective.axes(), self.position);
        let me = group.iter().position(|&p| p == self.position).unwrap_or(0);
        let ranks = group.iter().map(|&p| first + p as usize).collect();
        Member { mailbox: &mut self.mailbox, ranks, me }
    }

    fn execute(&mut self, step: &Step, values: &mut [Option<Arc<Storage>>]) -> Result<(), KernelError> {
        if let Kernel::Collective { collective, dtype, shape, .. } = &step.kernel {
            let output = step.outputs[0].value;
            let operand = step.inputs[0];
            let in_place = !step.in_place.is_empty();
            let slot = &mut values[operand.index()];
            let storage = if in_place { slot.take() } else { slot.clone() };
            let storage = storage.ok_or(KernelError::Disconnected)?;
            let mut result = self.member(collective).run(collective, *dtype, shape, storage, in_place)?;
            round_stored(&mut result, *dtype);
            values[output.index()] = Some(Arc::new(result));
            return Ok(());
        }
        let mut outputs = Vec::with_capacity(step.outputs.len());
        for (i, output) in step.outputs.iter().enumerate() {
            let replaced = step.in_place.iter().find(|p| p.0 == i).and_then(|p| values[p.1.index()].take());
            outputs.push(match replaced {
                Some(storage) => own(storage, output.class(), true)?,
                None if output.host => self.host.allocate(output.class(), output.elements)?,
                None => self.arena.allocate(output.class(), output.elements)?,
            });
        }
        let inputs: Vec<&Storage> =
            step.inputs.iter().map(|v| values[v.index()].as_deref().unwrap_or(&self.empty)).collect();
        let mesh = &self.plan.program.mesh;
        run_kernel(step, &inputs, &mut outputs, (mesh, &self.coordinates), self.threads)?;
        drop(inputs);
        for (output, storage) in step.outputs.iter().zip(outputs) {
            values[output.value.index()] = Some(Arc::new(storage));
        }
        Ok(())
    }

    fn send(&mut self, id: TransferId, microbatch: Option<u32>, free: bool) -> Result<(), KernelError> {
        let plan = self.plan.clone();
        let (transfer, messages) = &plan.transfers[id.0 as usize];
        let buffer = transfer.source.1;
        let (class, shape) = self.local(buffer);
        let storage = self.find(buffer, microbatch)?;
        for (number, message) in messages.iter().enumerate().filter(|(_, m)| m.source == self.position) {
            let selection = Selection::new(&shape, &message.source_indices);
            let mut words = vec![0u64; (selection.elements() * class.bytes()).div_ceil(8)];
            with_width!(class, T => {
                let target = &mut bytemuck::cast_slice_mut::<u64, T>(&mut words)[..selection.elements()];
                selection.read(storage.slice::<T>(), target);
            });
            let to = plan.first_rank[transfer.target.0 as usize] + message.target as usize;
            let tag = Tag::Transfer { transfer: id, microbatch, message: self.first_message + number as u32 };
            self.mailbox.send(to, tag, Payload::Words(words));
        }
        if free {
            self.now.buffers.remove(&self.key(buffer, microbatch));
        }
        Ok(())
    }

    fn receive(&mut self, id: TransferId, microbatch: Option<u32>) -> Result<(), KernelError> {
        let plan = self.plan.clone();
        let (transfer, messages) = &plan.transfers[id.0 as usize];
        let buffer = transfer.target.1;
        let (class, shape) = self.local(buffer);
        // The received value replaces the old one, which no call reads meanwhile. Freeing it first saves memory.
        if !plan.program.buffer(buffer).kind.is_of_step() {
            self.lasting.remove(&self.lasting_key(buffer));
        }
        let mut storage = self.arena.allocate(class, shape.iter().product())?;
        for (number, message) in messages.iter().enumerate().filter(|(_, m)| m.target == self.position) {
            let from = plan.first_rank[transfer.source.0 as usize] + message.source as usize;
            let tag = Tag::Transfer { transfer: id, microbatch, message: self.first_message + number as u32 };
            let Payload::Words(words) = self.mailbox.receive(from, tag)? else {
                return Err(KernelError::Disconnected);
            };
            let selection = Selection::new(&shape, &message.target_indices);
            let expected = (selection.elements() * class.bytes()).div_ceil(8);
            if words.len() != expected {
                return Err(KernelError::MessageSize { expected: 8 * expected, found: 8 * words.len() });
            }
            with_width!(class, T => {
                let source = &bytemuck::cast_slice::<u64, T>(&words)[..selection.elements()];
                selection.write(source, storage.slice_mut::<T>());
            });
        }
        self.insert(buffer, microbatch, Arc::new(storage));
        Ok(())
    }
}

/// Returns whether the elements include a NaN, and whether they include a positive infinity.
fn oddities(storage: &Storage, dtype: DType) -> (bool, bool) {
    if !dtype.is_float() {
        return (false, false);
    }
    with_class!(Class::of(dtype), T => storage.slice::<T>().iter().fold((false, false), |(nan, infinite), x| {
        let x = x.to_f32();
        (nan || x.is_nan(), infinite || x == f32::INFINITY)
    }))
}

/// The message of a panic.
fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| s.to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "without a message".to_string())
}
