//! One device: a thread that walks its program's schedule with its own mesh coordinates, and the buffers that it holds.

use crate::arena::{Arena, Storage};
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
use altiplano_ir::program::{BufferId, BufferKind, Call, Message, Program, Transfer, TransferId};
use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Instant;

/// What all devices of a program share: the program, its compiled bodies, and the transfers with their messages.
pub struct Plan {
    pub index: u32,
    pub program: Program,
    pub bodies: Vec<Compiled>,
    pub transfers: Vec<(Transfer, Arc<Vec<Message>>)>,
    /// Rank of the first device of each program.
    pub first_rank: Vec<usize>,
    pub num_microbatches: u32,
    /// Whether what ops make is looked through.
    pub check_nan: bool,
}

/// What the session asks of a device.
pub enum Command {
    /// Cuts this device's part out of a global tensor.
    Load { buffer: BufferId, tensor: Arc<HostTensor> },
    /// Sends this device's part back.
    Fetch { buffer: BufferId },
    Step {
        inputs: Arc<BTreeMap<String, HostTensor>>,
        scalars: Arc<BTreeMap<String, f64>>,
        /// Send this device's parts of the results back.
        results: bool,
        /// Since when what is done is recorded, where it is.
        origin: Option<Instant>,
    },
}

/// One device's part of a result of one microbatch.
pub struct ResultPart {
    pub buffer: BufferId,
    pub microbatch: Option<u32>,
    pub part: HostTensor,
}

/// What a device answers.
pub enum Reply {
    Loaded,
    Fetched(HostTensor),
    Stepped {
        /// The loss of each microbatch, from the first device of the program that computes it.
        losses: Vec<f64>,
        results: Vec<ResultPart>,
        /// Of the first device of a program, where it was to record.
        spans: Vec<Span>,
    },
}

pub struct Device {
    pub id: u32,
    pub position: u32,
    pub coordinates: Vec<u32>,
    pub plan: Arc<Plan>,
    pub arena: Arc<Arena>,
    pub mailbox: Mailbox,
    pub threads: usize,
    buffers: HashMap<(BufferId, Option<u32>), Arc<Storage>>,
    inputs: Arc<BTreeMap<String, HostTensor>>,
    losses: Vec<f64>,
    /// Parts of results, where they are asked for.
    results: Option<Vec<ResultPart>>,
    recorder: Option<Recorder>,
    /// The first op of the step that made an infinity, where ops are checked.
    infinite: Option<Box<Place>>,
    /// What is being done, for messages.
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
        let (buffers, inputs, losses) = (HashMap::new(), Arc::default(), Vec::new());
        Ok(Device {
            id,
            position,
            coordinates,
            plan,
            arena,
            mailbox,
            threads,
            buffers,
            inputs,
            losses,
            results: None,
            recorder: None,
            infinite: None,
            place,
            empty,
        })
    }

    /// Answers one command, with the place where it failed if it did.
    pub(crate) fn answer_here(&mut self, command: Command) -> Result<Reply, RuntimeError> {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.answer(command)));
        let failed =
            |panic: Box<dyn std::any::Any + Send>| Err(KernelError::Panic { message: panic_message(panic.as_ref()) });
        outcome
            .unwrap_or_else(failed)
            .map_err(|error| RuntimeError::Device { place: Box::new(self.place.clone()), error })
    }

    /// Answers commands until the session closes the channel. After an error all devices stop.
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
            Command::Load { buffer, tensor } => {
                self.place.activity = format!("loading '{}'", self.plan.program.buffer(buffer).name);
                self.buffers.remove(&(buffer, None));
                let storage = self.cut(buffer, &tensor, None)?;
                self.buffers.insert((buffer, None), Arc::new(storage));
                Ok(Reply::Loaded)
            }
            Command::Fetch { buffer } => {
                let plan = self.plan.clone();
                let description = plan.program.buffer(buffer);
                self.place.activity = format!("reading '{}'", description.name);
                let storage = self.persistent(buffer)?;
                Ok(Reply::Fetched(self.part(buffer, storage)))
            }
            Command::Step { inputs, scalars, results, origin } => {
                self.inputs = inputs;
                self.recorder = origin.filter(|_| self.position == 0).map(Recorder::new);
                self.losses.clear();
                self.results = results.then(Vec::new);
                self.step(&scalars)?;
                let losses = std::mem::take(&mut self.losses);
                let spans = self.recorder.take().map(Recorder::finish).unwrap_or_default();
                Ok(Reply::Stepped { losses, results: self.results.take().unwrap_or_default(), spans })
            }
        }
    }

    /// This device's part of a buffer, for the host.
    fn part(&self, buffer: BufferId, storage: &Storage) -> HostTensor {
        let program = &self.plan.program;
        let description = program.buffer(buffer);
        let ty = description.sharding.local_type(&description.ty, &program.mesh);
        let data = HostData::from_bytes(Class::of(ty.dtype), storage.slice());
        HostTensor { ty, data }
    }

    /// Fills the buffers that live for the whole run with zeros where nothing was loaded.
    pub fn allocate_persistent(&mut self) -> Result<(), KernelError> {
        let plan = self.plan.clone();
        for b in (0..plan.program.buffers.len() as u32).map(BufferId) {
            let lives = matches!(
                plan.program.buffer(b).kind,
                BufferKind::Parameter { .. } | BufferKind::State { .. } | BufferKind::Accumulator { .. }
            );
            if lives {
                let storage = self.zeros(b)?;
                self.buffers.insert((b, None), Arc::new(storage));
            }
        }
        Ok(())
    }

    fn zeros(&self, buffer: BufferId) -> Result<Storage, KernelError> {
        let (class, shape) = self.local(buffer);
        self.arena.zeros(class, shape.iter().product())
    }

    /// Format and shape of this device's part of a buffer.
    fn local(&self, buffer: BufferId) -> (Class, Vec<usize>) {
        let program = &self.plan.program;
        let buffer = program.buffer(buffer);
        let shape = buffer.sharding.local_shape(&program.mesh).iter().map(|&d| d as usize).collect();
        (Class::of(buffer.ty.dtype), shape)
    }

    fn persistent(&self, buffer: BufferId) -> Result<&Arc<Storage>, KernelError> {
        self.buffers.get(&(buffer, None)).ok_or(KernelError::MissingValue { buffer, microbatch: None })
    }

    /// This device's part of a global tensor, or of a microbatch's rows of it.
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
        let mut storage = self.arena.allocate(class, selection.elements())?;
        with_class!(class, T => {
            let target = storage.slice_mut::<T>();
            match summand_of(&description.sharding, &self.coordinates) {
                None => selection.read(bytemuck::cast_slice::<u8, T>(tensor.data.as_bytes()), target),
                Some(reducer) => target.fill(T::from_f32(reducer.neutral(description.ty.dtype) as f32)),
            }
        });
        Ok(storage)
    }

    fn step(&mut self, scalars: &BTreeMap<String, f64>) -> Result<(), KernelError> {
        let plan = self.plan.clone();
        self.place.activity = "preparing a step".to_string();
        self.infinite = None;
        for (i, buffer) in plan.program.buffers.iter().enumerate() {
            let id = BufferId(i as u32);
            match &buffer.kind {
                BufferKind::Accumulator { .. } => {
                    self.buffers.remove(&(id, None));
                    let zeros = self.zeros(id)?;
                    self.buffers.insert((id, None), Arc::new(zeros));
                }
                BufferKind::Scalar { name } => {
                    let class = Class::of(buffer.ty.dtype);
                    let mut storage = self.arena.allocate(class, 1)?;
                    let value = scalars.get(name).copied().unwrap_or(0.0);
                    fill(&mut storage, value, buffer.ty.dtype);
                    self.buffers.insert((id, None), Arc::new(storage));
                }
                _ => {}
            }
        }
        for (position, call) in plan.program.schedule.iter().enumerate() {
            self.mailbox.check()?;
            self.place.op = None;
            let start = self.start();
            match *call {
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
            self.record(What::Call { position }, start);
        }
        // What no call freed does not outlive the step.
        let program = &plan.program;
        self.buffers.retain(|(b, _), _| !program.buffer(*b).kind.is_of_step());
        self.mailbox.clear();
        Ok(())
    }

    /// Where the instance of a buffer that a call sees is kept: the microbatch's, or else the step's.
    fn key(&self, buffer: BufferId, microbatch: Option<u32>) -> (BufferId, Option<u32>) {
        let own = (buffer, microbatch);
        if self.buffers.contains_key(&own) { own } else { (buffer, None) }
    }

    /// The instance of a buffer that a call writes.
    fn target_key(&self, buffer: BufferId, microbatch: Option<u32>) -> (BufferId, Option<u32>) {
        let of_microbatch = self.plan.program.buffer(buffer).kind.is_of_step();
        (buffer, if of_microbatch { microbatch } else { None })
    }

    fn find(&self, buffer: BufferId, microbatch: Option<u32>) -> Result<&Arc<Storage>, KernelError> {
        let key = self.key(buffer, microbatch);
        self.buffers.get(&key).ok_or(KernelError::MissingValue { buffer, microbatch })
    }

    /// Now, where it is recorded.
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
        for leaf in &body.leaves {
            if !self.buffers.contains_key(&self.key(leaf.buffer, microbatch))
                && let BufferKind::Input { name } = &self.plan.program.buffer(leaf.buffer).kind
            {
                let inputs = self.inputs.clone();
                let missing = KernelError::MissingValue { buffer: leaf.buffer, microbatch };
                let storage = self.cut(leaf.buffer, inputs.get(name).ok_or(missing)?, microbatch)?;
                self.buffers.insert((leaf.buffer, microbatch), Arc::new(storage));
            }
            values[leaf.value.index()] = Some(self.find(leaf.buffer, microbatch)?.clone());
        }
        for leaf in body.leaves.iter().filter(|l| l.owned) {
            self.buffers.remove(&self.key(leaf.buffer, microbatch));
        }
        let plan = self.plan.clone();
        let graph = &plan.program.bodies[index as usize].graph;
        if plan.check_nan {
            self.check_leaves(body, &values)?;
        }
        for step in &body.steps {
            self.place.op = Some((step.node, graph.nodes.get(step.node.index()).map_or("", |n| n.op.name())));
            self.mailbox.check()?;
            let start = self.start();
            self.execute(step, &mut values)?;
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
            self.buffers.remove(&self.key(*buffer, microbatch));
        }
        for &(buffer, v) in &body.writes {
            let missing = KernelError::MissingValue { buffer, microbatch };
            let storage = values[v.index()].clone().ok_or(missing)?;
            if self.plan.program.buffer(buffer).kind == BufferKind::Loss && self.position == 0 {
                let class = Class::of(self.plan.program.buffer(buffer).ty.dtype);
                self.losses.push(with_class!(class, T => storage.slice::<T>()[0].to_f32() as f64));
            }
            if matches!(self.plan.program.buffer(buffer).kind, BufferKind::Output { .. }) {
                // The host takes results away, or nobody wants them.
                let part = self.results.is_some().then(|| self.part(buffer, &storage));
                let results = self.results.iter_mut();
                results.zip(part).for_each(|(all, part)| all.push(ResultPart { buffer, microbatch, part }));
                continue;
            }
            self.buffers.insert(self.target_key(buffer, microbatch), storage);
        }
        Ok(())
    }

    /// Fails where what a body starts from is no number.
    fn check_leaves(&self, body: &Compiled, values: &[Option<Arc<Storage>>]) -> Result<(), KernelError> {
        for leaf in &body.leaves {
            let buffer = self.plan.program.buffer(leaf.buffer);
            if values[leaf.value.index()].as_ref().is_some_and(|s| oddities(s, buffer.ty.dtype).0) {
                return Err(KernelError::HoldsNaN { buffer: buffer.name.clone() });
            }
        }
        Ok(())
    }

    /// Fails where a step made a NaN. All that it read had none, or the device would have stopped before. Masks are full of negative
    /// infinities, so that only a positive one, which overflow makes, is kept for the message.
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

    fn execute(&mut self, step: &Step, values: &mut [Option<Arc<Storage>>]) -> Result<(), KernelError> {
        if let Kernel::Collective { collective, dtype, shape, .. } = &step.kernel {
            let output = step.outputs[0].value;
            let operand = step.inputs[0];
            let in_place = !step.in_place.is_empty();
            let slot = &mut values[operand.index()];
            let storage = if in_place { slot.take() } else { slot.clone() };
            let storage = storage.ok_or(KernelError::Disconnected)?;
            let mesh = &self.plan.program.mesh;
            let first = self.plan.first_rank[self.plan.index as usize];
            let group = mesh.group(collective.axes(), self.position);
            let me = group.iter().position(|&p| p == self.position).unwrap_or(0);
            let ranks = group.iter().map(|&p| first + p as usize).collect();
            let mut member = Member { mailbox: &mut self.mailbox, ranks, me };
            let mut result = member.run(collective, *dtype, shape, storage, in_place)?;
            round_stored(&mut result, *dtype);
            values[output.index()] = Some(Arc::new(result));
            return Ok(());
        }
        let mut outputs = Vec::with_capacity(step.outputs.len());
        for (i, output) in step.outputs.iter().enumerate() {
            let replaced = step.in_place.iter().find(|p| p.0 == i).and_then(|p| values[p.1.index()].take());
            outputs.push(match replaced {
                Some(storage) => own(storage, output.class(), true)?,
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
            let tag = Tag::Transfer { transfer: id, microbatch, message: number as u32 };
            self.mailbox.send(to, tag, Payload::Words(words));
        }
        if free {
            self.buffers.remove(&self.key(buffer, microbatch));
        }
        Ok(())
    }

    fn receive(&mut self, id: TransferId, microbatch: Option<u32>) -> Result<(), KernelError> {
        let plan = self.plan.clone();
        let (transfer, messages) = &plan.transfers[id.0 as usize];
        let buffer = transfer.target.1;
        let (class, shape) = self.local(buffer);
        let mut storage = self.arena.allocate(class, shape.iter().product())?;
        for (number, message) in messages.iter().enumerate().filter(|(_, m)| m.target == self.position) {
            let from = plan.first_rank[transfer.source.0 as usize] + message.source as usize;
            let tag = Tag::Transfer { transfer: id, microbatch, message: number as u32 };
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
        self.buffers.insert(self.target_key(buffer, microbatch), Arc::new(storage));
        Ok(())
    }
}

/// Whether there is a NaN among the elements, and whether there is a positive infinity.
fn oddities(storage: &Storage, dtype: DType) -> (bool, bool) {
    if !dtype.is_float() {
        return (false, false);
    }
    with_class!(Class::of(dtype), T => storage.slice::<T>().iter().fold((false, false), |(nan, infinite), x| {
        let x = x.to_f32();
        (nan || x.is_nan(), infinite || x == f32::INFINITY)
    }))
}

/// What a panic said.
fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| s.to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "without a message".to_string())
}
