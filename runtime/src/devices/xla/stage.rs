//! The devices of one program: the buffers that they hold, and the bodies that they run.

use super::bytes::{decode, encode, read};
use super::clock::Clock;
use super::compile::{Compiler, Loaded};
use super::nan::{self, Found};
use super::{Fault, XlaError};
use crate::device::{Plan, ResultPart};
use crate::error::{KernelError, Place, RuntimeError};
use crate::host::HostTensor;
use crate::layout::{held_indices, summand_of};
use crate::recording::Span;
use altiplano_ir::attention;
use altiplano_ir::graph::ValueId;
use altiplano_ir::program::{BufferId, BufferKind, Call, Overlap, Phase, Transfer};
use altiplano_ir::types::TensorType;
use altiplano_xla::certify::{peak, planned};
use altiplano_xla::pjrt::{Buffer, Launched, Memory, Order};
use altiplano_xla::program::{Printing, anonymous, arguments, begun_sums, graph_of, graph_text};
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

/// The parts of a value on the devices of a program, in the order of its mesh.
pub(super) type Spread = Vec<Arc<Buffer>>;

/// A body that is compiled for the devices of its program.
struct Compiled {
    loaded: Rc<Loaded>,
    /// The buffers of its arguments.
    reads: Vec<BufferId>,
    /// The sums that the body begins.
    begun: BTreeSet<BufferId>,
    /// The arguments that results replace.
    donated: Vec<usize>,
    /// The values that the last result describes, if NaN are looked for.
    watched: Vec<ValueId>,
}

/// The data of one step.
#[derive(Default)]
struct StepState {
    inputs: Arc<BTreeMap<String, HostTensor>>,
    /// Scalars, and the buffers that live no longer than the step, by microbatch.
    buffers: FxHashMap<(BufferId, Option<u32>), Spread>,
    /// Parameters as of the start of the step, if they may be updated before it ends.
    parameters: FxHashMap<BufferId, Spread>,
    /// Index of the accumulator instance that the step uses.
    accumulators: u32,
    /// Accumulators that have been zeroed.
    zeroed: FxHashSet<BufferId>,
}

/// A result of a microbatch on the devices.
struct Output {
    buffer: BufferId,
    microbatch: Option<u32>,
    spread: Spread,
}

/// The results of a step: the losses of its microbatches, the parts of results by device, and its timeline.
pub(super) struct Finished {
    pub losses: Vec<f64>,
    pub parts: Vec<Vec<ResultPart>>,
    pub spans: Vec<Span>,
}

pub(super) struct Stage {
    pub plan: Arc<Plan>,
    compiler: Rc<Compiler>,
    /// The client's devices, in the order of the mesh.
    pub devices: Vec<usize>,
    bodies: Vec<Compiled>,
    zeros: FxHashMap<Vec<BufferId>, Rc<Loaded>>,
    /// Buffers that outlive steps. Accumulators have two instances if two steps use them at once; all others have one.
    pub lasting: FxHashMap<(BufferId, u32), Spread>,
    overlap: Overlap,
    /// Position of the schedule's last call that works on a microbatch.
    last_of_microbatch: Option<usize>,
    now: StepState,
    /// The previous step, if some of its calls remain.
    before: Option<StepState>,
    /// The bodies that run.
    launched: Vec<Launched>,
    /// Has the bodies that run, if the step is recorded.
    clock: Option<Clock>,
    /// The position of the current call in the schedule; `None` in a flush.
    pub position: Option<usize>,
    losses: Vec<(BufferId, Arc<Buffer>)>,
    /// Present if the host asked for results.
    results: Option<Vec<Output>>,
    /// The first op of the step that made an infinity, if NaN are looked for.
    infinite: Option<Box<Place>>,
    pub place: Place,
}

impl Stage {
    /// Compiles the bodies of a program; those that communicate in this order, and others to hold few bytes. All buffers
    /// are missing.
    pub(super) fn new(plan: Arc<Plan>, compiler: Rc<Compiler>, order: Order) -> Result<Stage, RuntimeError> {
        let program = &plan.program;
        let devices = compiler.places(&program.devices);
        let device = program.devices.first().copied().unwrap_or_default();
        let place = Place { device, program: plan.index, activity: String::new(), microbatch: None, op: None };
        let bodies = compiled(&plan, &compiler, &devices, order, &place)?;
        let works = |call: &Call| matches!(call, Call::Run { body, .. } if program.bodies[*body as usize].phase.is_of_microbatch());
        Ok(Stage {
            last_of_microbatch: program.schedule.iter().rposition(works),
            overlap: program.overlap(&program.bodies),
            plan,
            compiler,
            devices,
            bodies,
            zeros: FxHashMap::default(),
            lasting: FxHashMap::default(),
            now: StepState::default(),
            before: None,
            launched: Vec::new(),
            clock: None,
            position: None,
            losses: Vec::new(),
            results: None,
            infinite: None,
            place,
        })
    }

    /// The bytes that each body takes, as the compiler allocates them.
    pub(super) fn memory(&self) -> Vec<Memory> {
        self.bodies.iter().map(|body| body.loaded.memory).collect()
    }

    /// Compiles the bodies again if they would hold more than so many bytes, to hold fewer.
    pub(super) fn fit_into(&mut self, limit_bytes: u64, transfers: &[Transfer]) -> Result<(), RuntimeError> {
        if self.compiler.has_orders && peak(&self.plan.program, transfers, &self.memory()).bytes > limit_bytes {
            self.bodies = compiled(&self.plan, &self.compiler, &self.devices, Order::Memory, &self.place)?;
        }
        Ok(())
    }

    /// Fills parameters and optimizer state with zeros.
    pub(super) fn allocate(&mut self) -> Result<(), RuntimeError> {
        let buffers = (0..).map(BufferId).zip(&self.plan.program.buffers);
        let lasts = |kind: &BufferKind| matches!(kind, BufferKind::Parameter { .. } | BufferKind::State { .. });
        let ids: Vec<BufferId> = buffers.filter(|(_, buffer)| lasts(&buffer.kind)).map(|(id, _)| id).collect();
        self.place.activity = "allocating parameters and state".to_string();
        self.fill(&ids).map_err(|fault| fault.at(&self.place))
    }

    /// Replaces lasting buffers by zeros.
    fn fill(&mut self, ids: &[BufferId]) -> Result<(), Fault> {
        if ids.is_empty() {
            return Ok(());
        }
        if !self.zeros.contains_key(ids) {
            let types: Vec<TensorType> = ids.iter().map(|&id| self.local_type(id)).collect();
            let loaded = self.compiler.zeros(&types, &self.plan.program.mesh, &self.devices)?;
            self.zeros.insert(ids.to_vec(), loaded);
        }
        for &id in ids {
            self.lasting.remove(&self.lasting_key(id));
        }
        let none = vec![Vec::new(); self.devices.len()];
        let (results, launched) = self.zeros[ids].executable.launch(&none, &[])?;
        self.launched.push(launched);
        for (&id, spread) in ids.iter().zip(by_result(results)) {
            self.lasting.insert(self.lasting_key(id), spread);
        }
        Ok(())
    }

    fn local_type(&self, buffer: BufferId) -> TensorType {
        let program = &self.plan.program;
        let buffer = program.buffer(buffer);
        buffer.sharding.local_type(&buffer.ty, &program.mesh)
    }

    /// Loads one device's part of a global tensor.
    pub(super) fn load(&mut self, buffer: BufferId, position: usize, tensor: &HostTensor) -> Result<(), RuntimeError> {
        self.place.activity = format!("loading '{}'", self.plan.program.buffer(buffer).name);
        let part = self.sent(buffer, position, tensor, None).map_err(|fault| fault.at(&self.place))?;
        if let Some(spread) = self.lasting.get_mut(&(buffer, 0)) {
            spread[position] = part;
        }
        Ok(())
    }

    /// Reads one device's part of a lasting buffer.
    pub(super) fn fetch(&mut self, buffer: BufferId, position: usize) -> Result<HostTensor, RuntimeError> {
        self.place.activity = format!("reading '{}'", self.plan.program.buffer(buffer).name);
        let missing = KernelError::MissingValue { buffer, microbatch: None };
        let spread = self.lasting.get(&self.lasting_key(buffer)).ok_or(Fault::Kernel(missing));
        let read = spread.and_then(|spread| Ok(decode(&self.local_type(buffer), &spread[position].to_host()?)));
        read.map_err(|fault| fault.at(&self.place))
    }

    /// Cuts a device's part out of a global tensor, or out of a microbatch's rows of it, and sends it there.
    fn sent(
        &self,
        buffer: BufferId,
        position: usize,
        tensor: &HostTensor,
        microbatch: Option<u32>,
    ) -> Result<Arc<Buffer>, Fault> {
        let program = &self.plan.program;
        let description = program.buffer(buffer);
        let coordinates = program.mesh.coordinates(position as u32);
        let ty = self.local_type(buffer);
        let device = self.devices[position];
        if let Some(reducer) = summand_of(&description.sharding, &coordinates) {
            let neutral = vec![reducer.neutral(ty.dtype); ty.elements() as usize];
            let part = HostTensor::from_f64(ty, &neutral);
            return Ok(Arc::new(self.compiler.client.buffer(&encode(&part), &part.ty, device)?));
        }
        let mut indices = held_indices(&description.sharding, &program.mesh, &coordinates);
        for (d, list) in indices.iter_mut().enumerate() {
            let (size, given) = (description.ty.shape[d], tensor.ty.shape[d]);
            if size != given {
                let shift = size * u64::from(microbatch.unwrap_or(0));
                if microbatch.is_none() || shift + size > given {
                    return Err(Fault::Kernel(KernelError::InputShape {
                        name: description.name.clone(),
                        given: tensor.ty.clone(),
                        wanted: description.ty.clone(),
                        microbatch,
                    }));
                }
                list.iter_mut().for_each(|i| *i += shift);
            }
        }
        let part = tensor.at(&indices);
        Ok(Arc::new(self.compiler.client.buffer(&encode(&part), &ty, device)?))
    }

    /// Begins a step.
    pub(super) fn begin(
        &mut self,
        inputs: Arc<BTreeMap<String, HostTensor>>,
        scalars: &BTreeMap<String, f64>,
        results: bool,
    ) -> Result<(), Fault> {
        self.place.activity = "preparing a step".to_string();
        self.infinite = None;
        self.losses.clear();
        self.results = results.then(Vec::new);
        let accumulators = if self.overlap.doubles_accumulators { 1 - self.now.accumulators } else { 0 };
        self.now = StepState { inputs, accumulators, ..StepState::default() };
        let plan = self.plan.clone();
        for (id, buffer) in (0..).map(BufferId).zip(&plan.program.buffers) {
            match &buffer.kind {
                BufferKind::Parameter { .. } if self.overlap.stashes_parameters => {
                    let spread = self.find(id, None)?.clone();
                    self.now.parameters.insert(id, spread);
                }
                BufferKind::Scalar { name } => {
                    let value = scalars.get(name).copied().unwrap_or(0.0);
                    let tensor = HostTensor::from_f64(self.local_type(id), &[value]);
                    let client = &self.compiler.client;
                    let send = |&device: &usize| client.buffer(&encode(&tensor), &tensor.ty, device).map(Arc::new);
                    let spread = self.devices.iter().map(send).collect::<Result<Spread, _>>()?;
                    self.now.buffers.insert((id, None), spread);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns whether calls of the previous step remain.
    pub(super) fn has_late_calls(&self) -> bool {
        self.before.is_some()
    }

    /// Ends the step, or keeps it if some of its calls remain. Buffers that no call freed are dropped.
    pub(super) fn end(&mut self) {
        let accumulators = self.now.accumulators;
        let now = std::mem::take(&mut self.now);
        self.before = (!self.plan.program.late.is_empty()).then_some(now);
        self.now.accumulators = accumulators;
    }

    /// Drops the previous step, all calls of which have run.
    pub(super) fn end_late(&mut self) {
        self.before = None;
    }

    /// Exchanges the current step and the previous one.
    pub(super) fn exchange(&mut self) {
        if let Some(before) = &mut self.before {
            std::mem::swap(&mut self.now, before);
        }
    }

    /// Waits for all bodies of a step.
    pub(super) fn finish(&mut self) -> Result<Finished, Fault> {
        self.place.activity = "ending a step".to_string();
        let spans = self.clock.take().map_or_else(|| Ok(Vec::new()), Clock::end);
        self.wait()?;
        let mut losses = Vec::new();
        for (id, buffer) in std::mem::take(&mut self.losses) {
            losses.extend(decode(&self.local_type(id), &buffer.to_host()?).to_f64().first());
        }
        let mut parts: Vec<Vec<ResultPart>> = self.devices.iter().map(|_| Vec::new()).collect();
        let first = self.plan.first_rank[self.plan.index as usize];
        for Output { buffer, microbatch, spread } in self.results.take().unwrap_or_default() {
            for (position, part) in spread.iter().enumerate() {
                if !self.plan.repeats(buffer, first + position) {
                    let part = decode(&self.local_type(buffer), &part.to_host()?);
                    parts[position].push(ResultPart { buffer, microbatch, part });
                }
            }
        }
        Ok(Finished { losses, parts, spans: spans? })
    }

    /// Records the timeline of the step, in times from `origin`, if there is one.
    pub(super) fn record(&mut self, origin: Option<Instant>) -> Result<(), RuntimeError> {
        let failed = |error| RuntimeError::Thread { device: self.place.device, error };
        self.clock = origin.map(Clock::start).transpose().map_err(failed)?;
        Ok(())
    }

    /// The bytes of tensors that each device holds.
    fn held_bytes(&self) -> u64 {
        let of_step = [Some(&self.now), self.before.as_ref()].into_iter().flatten();
        let of_step = of_step.flat_map(|step| step.buffers.keys().map(|&(id, _)| id));
        of_step.chain(self.lasting.keys().map(|&(id, _)| id)).map(|id| self.local_type(id).bytes()).sum()
    }

    /// Waits for all bodies that run.
    pub(super) fn wait(&mut self) -> Result<(), Fault> {
        let waited = std::mem::take(&mut self.launched).into_iter().map(|mut launched| launched.wait());
        Ok(waited.fold(Ok(()), Result::and)?)
    }

    /// Ends the time in which calls read the parameters as the step began with them, if this was the last such call.
    pub(super) fn called(&mut self, position: usize) {
        if Some(position) == self.last_of_microbatch {
            self.now.parameters.clear();
        }
    }

    /// The key under which the step keeps the instance of a buffer that a call sees: the microbatch's, or else the
    /// step's.
    fn key(&self, buffer: BufferId, microbatch: Option<u32>) -> (BufferId, Option<u32>) {
        let own = (buffer, microbatch);
        if self.now.buffers.contains_key(&own) { own } else { (buffer, None) }
    }

    /// The key of a buffer that outlives steps, as the current step sees it.
    fn lasting_key(&self, buffer: BufferId) -> (BufferId, u32) {
        let accumulates = matches!(self.plan.program.buffer(buffer).kind, BufferKind::Accumulator { .. });
        (buffer, if accumulates { self.now.accumulators } else { 0 })
    }

    /// The instance of a buffer that a call sees.
    pub(super) fn find(&self, buffer: BufferId, microbatch: Option<u32>) -> Result<&Spread, Fault> {
        let of_step = self.now.buffers.get(&self.key(buffer, microbatch));
        let lasting = || self.lasting.get(&self.lasting_key(buffer));
        of_step.or_else(lasting).ok_or(Fault::Kernel(KernelError::MissingValue { buffer, microbatch }))
    }

    /// Removes the instance of a buffer of the step that a call sees.
    pub(super) fn free(&mut self, buffer: BufferId, microbatch: Option<u32>) {
        self.now.buffers.remove(&self.key(buffer, microbatch));
    }

    /// Stores the instance of a buffer that a call writes.
    pub(super) fn insert(&mut self, buffer: BufferId, microbatch: Option<u32>, spread: Spread) {
        if self.plan.program.buffer(buffer).kind.is_of_step() {
            self.now.buffers.insert((buffer, microbatch), spread);
        } else {
            self.lasting.insert(self.lasting_key(buffer), spread);
        }
    }

    /// The value that a body reads from a buffer. The first reader of an input loads it.
    fn bring(&mut self, buffer: BufferId, microbatch: Option<u32>, phase: Phase) -> Result<Spread, Fault> {
        let plan = self.plan.clone();
        match &plan.program.buffer(buffer).kind {
            BufferKind::Input { name } if !self.now.buffers.contains_key(&self.key(buffer, microbatch)) => {
                let inputs = self.now.inputs.clone();
                let missing = Fault::Kernel(KernelError::MissingValue { buffer, microbatch });
                let tensor = inputs.get(name).ok_or(missing)?;
                let sent = |position| self.sent(buffer, position, tensor, microbatch);
                let spread = (0..self.devices.len()).map(sent).collect::<Result<Spread, Fault>>()?;
                self.now.buffers.insert((buffer, microbatch), spread);
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

    /// Starts a body.
    pub(super) fn run(&mut self, index: u32, microbatch: Option<u32>) -> Result<(), Fault> {
        let plan = self.plan.clone();
        let body = &plan.program.bodies[index as usize];
        let reads = self.bodies[index as usize].reads.clone();
        // The first reader of a sum finds zeros.
        let is_sum = |id: &BufferId| matches!(plan.program.buffer(*id).kind, BufferKind::Accumulator { .. });
        let mut sums: Vec<BufferId> =
            reads.iter().copied().filter(is_sum).filter(|&id| self.now.zeroed.insert(id)).collect();
        let begun = &self.bodies[index as usize].begun;
        sums.retain(|&id| !begun.contains(&id) || !self.lasting.contains_key(&self.lasting_key(id)));
        self.fill(&sums)?;
        let brought = reads.iter().map(|&id| self.bring(id, microbatch, body.phase)).collect::<Result<Vec<_>, _>>()?;
        let compiled = &self.bodies[index as usize];
        for &argument in &compiled.donated {
            self.lasting.remove(&self.lasting_key(reads[argument]));
        }
        // A value that something else refers to is no gift: another step's parameters, or a value to be sent.
        let is_shared = |argument: &&usize| brought[**argument].iter().any(|part| Arc::strong_count(part) > 1);
        let keep: Vec<i64> = compiled.donated.iter().filter(is_shared).map(|&argument| argument as i64).collect();
        let of_device = |position: usize| brought.iter().map(|spread| &*spread[position]).collect();
        let lists: Vec<Vec<&Buffer>> = (0..self.devices.len()).map(of_device).collect();
        let (results, launched) = compiled.loaded.executable.launch(&lists, &keep)?;
        drop(lists);
        drop(brought);
        let mut results = by_result(results);
        if plan.check_nan {
            let flags = if compiled.watched.is_empty() { None } else { results.pop() };
            self.check(index, flags)?;
        }
        for &buffer in &body.frees {
            self.free(buffer, microbatch);
        }
        for (&(buffer, _), spread) in body.writes.iter().zip(results) {
            match plan.program.buffer(buffer).kind {
                BufferKind::Loss => self.losses.push((buffer, spread[0].clone())),
                BufferKind::Output { .. } => {
                    // Results go to the host if it asked for them, and are dropped otherwise.
                    self.results.iter_mut().for_each(|all| {
                        all.push(Output { buffer, microbatch, spread: spread.clone() });
                    });
                    continue;
                }
                _ => {}
            }
            self.insert(buffer, microbatch, spread);
        }
        match (&self.clock, self.position) {
            (Some(clock), Some(position)) => clock.time(launched, position, self.held_bytes()),
            _ => self.launched.push(launched),
        }
        Ok(())
    }

    /// Fails if a value of the body that was started last holds a NaN. `flags` describe the values on each device.
    fn check(&mut self, index: u32, flags: Option<Spread>) -> Result<(), Fault> {
        let plan = self.plan.clone();
        let body = &plan.program.bodies[index as usize];
        let watched = self.bodies[index as usize].watched.clone();
        let op = |v: ValueId| Some((v, body.graph.node(v).op.name()));
        for (flags, &device) in flags.iter().flatten().zip(&plan.program.devices) {
            let flags: Vec<i32> = read(&flags.to_host()?);
            let (nan, infinite) = nan::found(body, &watched, &flags);
            let mut place = Place { device, ..self.place.clone() };
            if self.infinite.is_none() {
                self.infinite = infinite.map(|v| Box::new(Place { op: op(v), ..place.clone() }));
            }
            let error = match nan {
                None => continue,
                Some(Found::Leaf(leaf)) => {
                    let id = body.reads.iter().find(|(v, _)| *v == leaf).map(|(_, id)| *id);
                    let buffer = id.map_or(String::new(), |id| plan.program.buffer(id).name.clone());
                    KernelError::HoldsNaN { buffer }
                }
                Some(Found::Made(v)) => {
                    place.op = op(v);
                    let infinite = self.infinite.take().filter(|infinite| **infinite != place);
                    KernelError::MadeNaN { fused: Vec::new(), infinite }
                }
            };
            self.place = place;
            return Err(Fault::Kernel(error));
        }
        Ok(())
    }
}

/// Compiles the bodies of a program for the client's devices.
fn compiled(
    plan: &Plan,
    compiler: &Compiler,
    devices: &[usize],
    order: Order,
    place: &Place,
) -> Result<Vec<Compiled>, RuntimeError> {
    let program = &plan.program;
    let mut bodies = Vec::new();
    let has_kernels = compiler.has_attention && !plan.check_nan;
    // A device that lacks the widest kernels refuses them.
    let found = if has_kernels { attention::find(program, attention::WIDEST) } else { Vec::new() };
    let mut attention = found.into_iter();
    for (body, begun) in program.bodies.iter().zip(begun_sums(program)) {
        let order = if planned(body, &program.mesh).is_empty() { Order::Memory } else { order };
        let mut graph = graph_of(&anonymous(body));
        let watched = if plan.check_nan { nan::watch(&mut graph) } else { Vec::new() };
        let passes = attention.next().unwrap_or_default();
        let mut printing = Printing::of(program, body, &begun, &passes);
        let mut loaded = compiler.program(graph_text(graph.clone(), &program.mesh, &printing), devices, order);
        if !passes.is_empty() && loaded.is_err() {
            // This device or this cuDNN lacks the kernels.
            printing.attention = &[];
            loaded = compiler.program(graph_text(graph, &program.mesh, &printing), devices, order);
        }
        let at = || Place { activity: format!("body '{}'", body.name), ..place.clone() };
        let loaded = loaded.map_err(|error| Fault::from(error).at(&at()))?;
        let donated = printing.donated.into_iter().map(|(argument, _)| argument).collect();
        bodies.push(Compiled { loaded, reads: arguments(body), begun, donated, watched });
    }
    Ok(bodies)
}

/// Results by device as results in order, each with its part on every device.
fn by_result(results: Vec<Vec<Buffer>>) -> Vec<Spread> {
    let mut devices: Vec<_> = results.into_iter().map(Vec::into_iter).collect();
    let count = devices.first().map_or(0, |first| first.len());
    (0..count).map(|_| devices.iter_mut().filter_map(Iterator::next).map(Arc::new).collect()).collect()
}

impl Fault {
    /// The fault as an error that names its place.
    pub(super) fn at(self, place: &Place) -> RuntimeError {
        let place = Box::new(place.clone());
        match self {
            Fault::Kernel(error) => RuntimeError::Device { place, error },
            Fault::Plugin(error) => XlaError::At { place, error }.into(),
        }
    }
}
