//! The memory of a lane's devices over a step, for all stages that share them: every tensor from the call that makes it
//! to the one after which it is gone.
//!
//! The runtime decides which values of a body are stored, and which take the storage of others: the steps of the CPU
//! runtime ([`altiplano_ir::storage`]), or the kernels of a GPU. All else is common. The calls of one microbatch are
//! followed tensor by tensor. This gives, for every kind of call, the bytes that it needs while it runs and those that
//! it leaves. The schedule says how many microbatches hold theirs at the same time. Microbatches are alike, so a step
//! of 512 of them costs no more than additions.

use crate::predict::on_xla::OnXla;
use crate::predict::timing::BodyWork;
use altiplano_ir::cluster::DeviceKind;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::plan::Memory;
use altiplano_ir::program::{
    Body, BufferId, BufferKind, Call, Overlap, Phase, Program, Programs, Transfer, TransferId,
};
use altiplano_ir::storage::{self, Steps, block_bytes};
use altiplano_ir::types::TensorType;
use std::collections::{BTreeMap, BTreeSet};

/// The purpose of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Category {
    Parameters,
    /// Parameters as a step began with them, if an update changes them before the step ends.
    Stashed,
    Gradients,
    OptimizerState,
    Inputs,
    /// Values that one body leaves for another.
    Activations,
    /// Values that come from other stages.
    Received,
    /// Values of one body.
    Temporaries,
    /// Workspace of ops while they run.
    Workspace,
    /// Losses, results and scalars.
    Other,
}

impl Category {
    pub const ALL: [Category; 10] = [
        Category::Parameters,
        Category::Stashed,
        Category::Gradients,
        Category::OptimizerState,
        Category::Inputs,
        Category::Activations,
        Category::Received,
        Category::Temporaries,
        Category::Workspace,
        Category::Other,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Category::Parameters => "parameters",
            Category::Stashed => "stashed parameters",
            Category::Gradients => "gradients",
            Category::OptimizerState => "optimizer state",
            Category::Inputs => "inputs",
            Category::Activations => "activations",
            Category::Received => "received",
            Category::Temporaries => "temporaries",
            Category::Workspace => "workspace",
            Category::Other => "other",
        }
    }
}

/// The value that a tensor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    Buffer(BufferId),
    Value {
        body: u32,
        value: ValueId,
    },
    /// The workspace of a node's op.
    Workspace {
        body: u32,
        value: ValueId,
    },
}

/// A point within every call of one kind. Point 0 is its start, point `i` its `i`-th step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    pub kind: u32,
    pub point: u32,
}

/// A tensor of every microbatch, or of the step.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub origin: Origin,
    pub category: Category,
    pub bytes: u64,
    /// `None` if it exists before the step.
    pub born: Option<Moment>,
    /// From here on it is gone; `None` if it stays to the end of the step.
    pub gone: Option<Moment>,
    /// It is absent from a point of these calls to another, where a body makes it anew.
    pub absent: Option<(Moment, u32)>,
}

/// Calls that do the same for different microbatches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CallKind {
    Run(u32),
    Send(TransferId),
    Receive(TransferId),
}

impl CallKind {
    fn of(call: &Call) -> (CallKind, Option<u32>) {
        match *call {
            Call::Run { body, microbatch } => (CallKind::Run(body), microbatch),
            Call::Send { transfer, microbatch, .. } => (CallKind::Send(transfer), microbatch),
            Call::Receive { transfer, microbatch } => (CallKind::Receive(transfer), microbatch),
        }
    }
}

/// The effect of a call of some kind on memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Kind {
    pub call: CallKind,
    /// Its last point.
    pub points: u32,
    /// Most bytes held during the call, beyond those held before.
    pub most_bytes: i64,
    pub most_at: u32,
    /// Bytes that the call leaves held, beyond those held before.
    pub left_bytes: i64,
}

/// The memory of each device of one lane over a step.
#[derive(Clone, Debug, PartialEq)]
pub struct LaneMemory {
    pub tensors: Vec<Tensor>,
    pub kinds: Vec<Kind>,
    /// The kind of each call of the schedule.
    pub calls: Vec<u32>,
    /// Positions in the schedule in the order in which calls are simulated. If steps overlap, these are the calls of
    /// three steps, each of which begins before the previous one has ended.
    pub played: Vec<usize>,
    /// Calls of a step that run before the next step begins; all of them if steps do not overlap.
    pub num_prompt: usize,
    /// For each simulated call, true if the parameters are held as an earlier step began with them and also as they are
    /// now.
    pub stashed: Vec<bool>,
    /// Bytes held before each call of the schedule.
    pub before: Vec<i64>,
    /// Bytes held before the step.
    pub lasting_bytes: u64,
    pub peak_bytes: u64,
    /// Peak bytes in the memory of the host.
    pub host_peak_bytes: u64,
    /// The simulated call with the peak, and the point in it.
    pub peak_at: (usize, u32),
}

/// A tensor that is held at some time, once or for several microbatches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Held {
    /// Index in [`LaneMemory::tensors`].
    pub tensor: usize,
    pub count: u64,
    /// Position in the schedule and point where the first of them is made, and where the last is gone; `None` if that
    /// is not within the step.
    pub from: Option<(usize, u32)>,
    pub to: Option<(usize, u32)>,
}

/// The steps of each body of a program on devices of a kind. `work` lists the kernels that the bodies of each stage
/// launch there.
pub fn steps(program: &Program, kind: DeviceKind, work: &[Vec<BodyWork>]) -> Vec<Steps<()>> {
    let of = |body: &Body| match kind {
        DeviceKind::Cpu => storage::compile(body).map(|_| ()),
        DeviceKind::Gpu => {
            let is_it = |w: &&BodyWork| (w.stage, w.phase) == (body.stage, body.phase);
            let kernels = work.iter().flatten().find(is_it).map_or(&[][..], |w| &w.kernels);
            storage::launched(program, body, kernels).map(|_| ())
        }
    };
    program.bodies.iter().map(of).collect()
}

/// Like [`steps`], for the CPU runtime, whatever devices the program was planned for.
pub fn cpu_steps(program: &Program) -> Vec<Steps<()>> {
    steps(program, DeviceKind::Cpu, &[])
}

/// Peak bytes of each device of each program on the CPU runtime.
pub fn cpu_peaks(programs: &Programs) -> Vec<u64> {
    let peak = |(lane, program)| LaneMemory::new(programs, lane, &cpu_steps(program), DeviceKind::Cpu).peak_bytes;
    programs.programs.iter().enumerate().map(peak).collect()
}

/// Peak bytes that each device of each program keeps in the memory of its host on the CPU runtime.
pub fn cpu_host_peaks(programs: &Programs) -> Vec<u64> {
    let peak = |program: &Program| {
        let (played, _) = played(program, program, program.overlap(&program.bodies));
        host_peak_bytes(program, played.iter().map(|&at| &program.schedule[at]), DeviceKind::Cpu)
    };
    programs.programs.iter().map(peak).collect()
}

/// Peak bytes in the memory of a device's host while it runs calls: lasting buffers, and values that a call has left
/// there and no later call has freed. Each body either leaves such values or frees them.
fn host_peak_bytes<'a>(program: &Program, calls: impl Iterator<Item = &'a Call>, device: DeviceKind) -> u64 {
    let bytes = |id: BufferId| {
        let buffer = program.buffer(id);
        let bytes = || held_bytes(&buffer.sharding.local_type(&buffer.ty, &program.mesh), device);
        if buffer.host { bytes() } else { 0 }
    };
    let lasting = (0..).map(BufferId).zip(&program.buffers).filter(|(_, b)| !b.kind.is_of_step());
    let mut held: u64 = lasting.map(|(id, _)| bytes(id)).sum();
    let of_step = |id: &BufferId| program.buffer(*id).kind.is_of_step();
    let change = |body: &Body| -> (u64, u64) {
        let left = body.writes.iter().map(|w| w.0).filter(of_step).map(bytes).sum();
        (left, body.frees.iter().copied().filter(of_step).map(bytes).sum())
    };
    let changes: Vec<(u64, u64)> = program.bodies.iter().map(change).collect();
    let mut peak = held;
    for call in calls {
        let Call::Run { body, .. } = call else { continue };
        let (left, freed) = changes.get(*body as usize).copied().unwrap_or_default();
        held += left;
        peak = peak.max(held);
        held = held.saturating_sub(freed);
    }
    peak
}

/// Bytes that a tensor takes of a memory.
fn held_bytes(ty: &TensorType, device: DeviceKind) -> u64 {
    match device {
        DeviceKind::Cpu => ty.elements() * storage::Class::of(ty.dtype).bytes() as u64,
        DeviceKind::Gpu => block_bytes(ty.bytes()),
    }
}

/// The copies that a device holds of a parameter. Products in 8 bits read weights by rows forward and by columns backward, and
/// tensor cores take one order only, so that GPU software keeps both (Transformer Engine: a transposed copy on Hopper, and
/// two scalings of MXFP8 on Blackwell).
pub fn copies_of_parameter(dtype: DType, device: DeviceKind) -> u64 {
    if dtype.is_eight_bit_float() && device == DeviceKind::Gpu { 2 } else { 1 }
}

/// Follows the calls of one microbatch.
struct Walk<'a> {
    program: &'a Program,
    transfers: &'a [Transfer],
    device: DeviceKind,
    overlap: Overlap,
    tensors: Vec<Tensor>,
    /// Number of holders of each tensor: buffers and values.
    holders: Vec<u32>,
    buffers: BTreeMap<(BufferId, bool), usize>,
    kind: u32,
    /// See [`LaneMemory::of`].
    whole: bool,
}

impl LaneMemory {
    /// Simulates the schedule of a lane's program, whose bodies run in these steps on devices of a kind.
    pub fn new(programs: &Programs, lane: usize, steps: &[Steps<()>], device: DeviceKind) -> LaneMemory {
        let program = &programs.programs[lane];
        LaneMemory::of([program, program], &programs.transfers, steps, device, false)
    }

    /// Like [`LaneMemory::new`], with the bodies of the first program and the schedule of an equal one. `whole`: XLA compiles
    /// each body, whose arguments then last to its end, and whose results take memory from its start.
    pub fn of(
        [program, scheduled]: [&Program; 2],
        transfers: &[Transfer],
        steps: &[Steps<()>],
        device: DeviceKind,
        whole: bool,
    ) -> LaneMemory {
        let mut kinds: Vec<Kind> = Vec::new();
        let mut number: BTreeMap<CallKind, u32> = BTreeMap::new();
        let schedule = &scheduled.schedule;
        let mut calls = Vec::with_capacity(schedule.len());
        let mut walk = Walk {
            program,
            transfers,
            device,
            overlap: scheduled.overlap(&program.bodies),
            tensors: Vec::new(),
            holders: Vec::new(),
            buffers: BTreeMap::new(),
            kind: 0,
            whole,
        };
        walk.start();
        // Transfers into one buffer are alike, whoever sends them.
        let mut first_to: BTreeMap<BufferId, TransferId> = BTreeMap::new();
        for call in schedule {
            let (mut kind, microbatch) = CallKind::of(call);
            if let CallKind::Receive(transfer) = &mut kind {
                *transfer = *first_to.entry(transfers[transfer.0 as usize].target.1).or_insert(*transfer);
            }
            let new = kinds.len() as u32;
            let at = *number.entry(kind).or_insert(new);
            calls.push(at);
            if at != new {
                continue;
            }
            walk.kind = at;
            let of_microbatch = microbatch.is_some();
            let points = match *call {
                Call::Run { body, .. } => match steps.get(body as usize) {
                    Some(steps) => walk.run(body, steps, of_microbatch),
                    None => 0,
                },
                Call::Send { transfer, free, .. } => {
                    walk.send(transfer, of_microbatch, free);
                    0
                }
                Call::Receive { transfer, .. } => {
                    walk.receive(transfer, of_microbatch);
                    0
                }
            };
            kinds.push(Kind { call: kind, points, most_bytes: 0, most_at: 0, left_bytes: 0 });
        }
        let mut tensors = walk.tensors;
        if whole {
            tensors.iter_mut().for_each(|tensor| tensor.last_for_bodies(&kinds));
        }
        sum_up(&mut kinds, &tensors);
        let lasts = |t: &&Tensor| t.born.is_none() && t.category != Category::Stashed;
        let lasting_bytes = tensors.iter().filter(lasts).map(|t| t.bytes).sum();
        let overlap = scheduled.overlap(&program.bodies);
        let num_prompt = scheduled.num_prompt();
        let (played, stashed) = played(scheduled, program, overlap);
        let stash_bytes: u64 = tensors.iter().filter(|t| t.category == Category::Stashed).map(|t| t.bytes).sum();
        let (peak_bytes, peak_at) = (lasting_bytes, (0, 0));
        let before = vec![lasting_bytes as i64; calls.len()];
        let mut memory = LaneMemory {
            tensors,
            kinds,
            calls,
            played,
            num_prompt,
            stashed,
            before,
            lasting_bytes,
            peak_bytes,
            host_peak_bytes: 0,
            peak_at,
        };
        memory.host_peak_bytes = host_peak_bytes(program, memory.played.iter().map(|&at| &schedule[at]), device);
        memory.find_peak(overlap.steps, stash_bytes as i64);
        memory
    }

    /// Plays the calls of the step, and finds the bytes held before each of them and the peak. `overlaps`: steps do.
    fn find_peak(&mut self, overlaps: bool, stash_bytes: i64) {
        // Tensors that no call of a step frees are gone when all calls of the step are over.
        let left_bytes: i64 = self.calls.iter().map(|&kind| self.kinds[kind as usize].left_bytes).sum();
        // While the last step drains, `before` keeps the values of overlapping steps.
        let drained = if overlaps { self.played.len() + self.num_prompt - self.calls.len() } else { usize::MAX };
        let (mut peak, mut held) = (None, self.lasting_bytes as i64);
        for (index, &position) in self.played.iter().enumerate() {
            if self.ended_before(index) > self.ended_before(index.max(1) - 1) {
                held -= left_bytes;
            }
            let kind = &self.kinds[self.calls[position] as usize];
            let stash_bytes = if self.stashed[index] { stash_bytes } else { 0 };
            let most = held + stash_bytes + kind.most_bytes;
            if index < drained {
                self.before[position] = held + stash_bytes;
            }
            if peak.is_none_or(|(bytes, _)| most > bytes) {
                peak = Some((most, (index, kind.most_at)));
            }
            held += kind.left_bytes;
        }
        if let Some((bytes, at)) = peak {
            self.peak_bytes = bytes.max(0) as u64;
            self.peak_at = at;
        }
    }

    /// Number of steps that have ended before a simulated call. After its prompt calls, each step runs as many calls as
    /// a step has.
    fn ended_before(&self, index: usize) -> usize {
        index.saturating_sub(self.num_prompt) / self.calls.len().max(1)
    }

    /// The position in the schedule of the call with the peak, and the point in it.
    pub fn peak_position(&self) -> (usize, u32) {
        (self.played.get(self.peak_at.0).copied().unwrap_or(self.calls.len()), self.peak_at.1)
    }

    /// Bytes held before each call, and the call's kind. If steps overlap, the bytes of other steps are included.
    pub fn before_calls(&self) -> impl Iterator<Item = (i64, &Kind)> {
        self.before.iter().zip(&self.calls).map(|(&before, &kind)| (before, &self.kinds[kind as usize]))
    }

    /// For each category, the bytes held beyond those at the start of a call of some kind, at each of its points; last,
    /// those that it leaves. All categories together are at most [`Kind::most_bytes`], and leave [`Kind::left_bytes`].
    pub fn course(&self, kind: u32) -> BTreeMap<Category, Vec<i64>> {
        let last = self.kinds[kind as usize].points as usize + 1;
        let mut courses: BTreeMap<Category, Vec<i64>> = BTreeMap::new();
        for t in &self.tensors {
            for (_, point, bytes) in t.changes().filter(|change| change.0 == kind) {
                let course = courses.entry(t.category).or_insert_with(|| vec![0; last + 1]);
                course[(point as usize).min(last)..].iter_mut().for_each(|held| *held += bytes);
            }
        }
        courses
    }

    /// Bytes by purpose. Activations are everything held at the peak beyond parameters, gradients and optimizer state.
    pub fn memory(&self) -> Memory {
        let of = |category: Category| {
            let lasting = self.tensors.iter().filter(|t| t.born.is_none() && t.category == category);
            lasting.map(|t| t.bytes).sum::<u64>()
        };
        let stashed = self.stashed.get(self.peak_at.0).is_some_and(|stashed| *stashed);
        let parameters_bytes = of(Category::Parameters) + if stashed { of(Category::Stashed) } else { 0 };
        let gradients_bytes = of(Category::Gradients);
        let optimizer_bytes = of(Category::OptimizerState);
        let lasting = parameters_bytes + gradients_bytes + optimizer_bytes;
        let activations_bytes = self.peak_bytes.saturating_sub(lasting);
        Memory { parameters_bytes, gradients_bytes, optimizer_bytes, activations_bytes }
    }

    /// Like [`LaneMemory::memory`], for a parameter server, whose received values are gradients.
    pub fn memory_of_server(&self) -> Memory {
        let memory = self.memory();
        let is_gradient = |held: &&Held| {
            let tensor = &self.tensors[held.tensor];
            matches!(tensor.origin, Origin::Buffer(_))
                && matches!(tensor.category, Category::Received | Category::Activations)
        };
        let held = self.held_at(self.peak_at.0, self.peak_at.1);
        let bytes: u64 = held.iter().filter(is_gradient).map(|held| held.count * self.tensors[held.tensor].bytes).sum();
        let gradients_bytes = bytes.min(memory.activations_bytes);
        Memory { gradients_bytes, activations_bytes: memory.activations_bytes - gradients_bytes, ..memory }
    }

    /// The tensors held at a point of the `index`-th simulated call.
    pub fn held_at(&self, index: usize, point: u32) -> Vec<Held> {
        // The simulated calls of each kind.
        let mut played: Vec<Vec<usize>> = vec![Vec::new(); self.kinds.len()];
        for (at, &position) in self.played.iter().enumerate() {
            played[self.calls[position] as usize].push(at);
        }
        let here = self.played.get(index).map(|&position| self.calls[position]);
        // How often a moment has occurred.
        let times = |moment: Moment| {
            let before = played[moment.kind as usize].partition_point(|&at| at < index) as u64;
            before + u64::from(here == Some(moment.kind) && moment.point <= point)
        };
        let mut held = Vec::new();
        for (tensor, t) in self.tensors.iter().enumerate() {
            let made = t.born.map_or(1, times);
            // A tensor that no call frees is gone with its step.
            let ended = |born: Moment| {
                let of_step = self.calls.iter().filter(|kind| **kind == born.kind).count();
                (of_step * self.ended_before(index)) as u64
            };
            // But a tensor that outlives steps and is made anew in each of them takes the place of the previous one.
            let lasts = matches!(t.category, Category::Parameters | Category::Gradients | Category::OptimizerState);
            let made = if lasts { made.min(1) } else { made };
            let gone = t.gone.map_or_else(|| t.born.filter(|_| !lasts).map_or(0, ended), times);
            let absent =
                t.absent.is_some_and(|(from, to)| here == Some(from.kind) && (from.point..to).contains(&point));
            let count = made.saturating_sub(gone + u64::from(absent));
            let is_there = t.category != Category::Stashed || self.stashed.get(index).is_some_and(|stashed| *stashed);
            if count == 0 || t.bytes == 0 || !is_there {
                continue;
            }
            let nth = |moment: Moment, n: u64| {
                played[moment.kind as usize].get(n as usize).map(|&at| (self.played[at], moment.point))
            };
            let from = t.born.and_then(|moment| nth(moment, gone));
            let to = t.gone.and_then(|moment| nth(moment, made - 1));
            held.push(Held { tensor, count, from, to });
        }
        held
    }
}

/// Returns [`LaneMemory::played`] and [`LaneMemory::stashed`].
fn played(scheduled: &Program, program: &Program, overlap: Overlap) -> (Vec<usize>, Vec<bool>) {
    let (prompt, end) = (scheduled.num_prompt(), scheduled.schedule.len());
    if !overlap.steps {
        return ((0..end).collect(), vec![false; end]);
    }
    let phase = |position: usize| match scheduled.schedule[position] {
        Call::Run { body, .. } => program.bodies.get(body as usize).map(|body| body.phase),
        _ => None,
    };
    // Each call with the step that it is part of, and the last step that has begun.
    let of_step = |step: usize| scheduled.turns().map(move |(at, late)| (at, step - usize::from(late), step));
    let first = (0..prompt).map(|at| (at, 0, 0));
    let last = (prompt..end).map(|at| (at, 2, 2));
    let calls: Vec<(usize, usize, usize)> = first.chain(of_step(1)).chain(of_step(2)).chain(last).collect();
    // From an update on, as long as calls follow of a step that began before it.
    let mut stashed = vec![false; calls.len()];
    for (index, &(position, _, begun)) in calls.iter().enumerate() {
        if phase(position) == Some(Phase::Update) {
            let works =
                |&(at, of, _): &(usize, usize, usize)| of <= begun && phase(at).is_some_and(Phase::is_of_microbatch);
            if let Some(last) = calls.iter().rposition(works).filter(|last| *last > index) {
                stashed[index..=last].fill(true);
            }
        }
    }
    (calls.into_iter().map(|(position, ..)| position).collect(), stashed)
}

/// The name of a tensor of a lane: that of the lasting buffer, else the model's name of the value, and its op.
pub fn name(programs: &Programs, lane: usize, origin: Origin) -> String {
    let program = &programs.programs[lane];
    match origin {
        Origin::Buffer(buffer) if program.buffer(buffer).kind == BufferKind::Value => {
            let written = |(i, body): (usize, &Body)| {
                let (_, value) = body.writes.iter().find(|w| w.0 == buffer)?;
                Some((i as u32, *value))
            };
            if let Some((body, value)) = program.bodies.iter().enumerate().find_map(written) {
                return name(programs, lane, Origin::Value { body, value });
            }
            // A received value has the name of its source.
            let here = (lane as u32, buffer);
            match programs.transfers.iter().find(|t| t.target == here) {
                Some(t) if t.source != here => name(programs, t.source.0 as usize, Origin::Buffer(t.source.1)),
                _ => program.buffer(buffer).name.clone(),
            }
        }
        Origin::Buffer(buffer) => program.buffer(buffer).name.clone(),
        Origin::Value { body, value } => {
            let body = &program.bodies[body as usize];
            let graph = &body.graph;
            if let Some((_, buffer)) = body.reads.iter().find(|r| r.0 == value) {
                return program.buffer(*buffer).name.clone();
            }
            // A value without a name is named after the operand that it is made of.
            let mut at = value;
            while graph.node(at).name.is_empty()
                && let Some(&operand) = graph.node(at).operands.first()
            {
                at = operand;
            }
            let op = graph.node(value).op.name();
            match body.reads.iter().find(|r| r.0 == at) {
                Some((_, buffer)) => format!("{op} of {}", program.buffer(*buffer).name),
                None if graph.node(at).name.is_empty() => op.to_string(),
                None => format!("{} ({op})", graph.node(at).name),
            }
        }
        Origin::Workspace { body, value } => {
            format!("workspace of {}", name(programs, lane, Origin::Value { body, value }))
        }
    }
}

impl Tensor {
    /// Lets a value that bodies exchange last for all of each of these bodies. Lasting buffers keep their memory anyway.
    fn last_for_bodies(&mut self, kinds: &[Kind]) {
        use Category::{Gradients, OptimizerState, Parameters, Stashed};
        if matches!(self.category, Parameters | Stashed | Gradients | OptimizerState) {
            return;
        }
        let [born, gone] = [self.born, self.gone].map(|moment| moment.map(|moment| moment.kind));
        let is_body = |moment: &Moment| matches!(kinds[moment.kind as usize].call, CallKind::Run(_));
        if born == gone {
            return;
        }
        if let Some(born) = self.born.as_mut().filter(|born| is_body(born)) {
            born.point = 0;
        }
        if let Some(gone) = self.gone.as_mut().filter(|gone| is_body(gone)) {
            gone.point = kinds[gone.kind as usize].points + 1;
        }
    }

    /// Points of kinds of calls at which the tensor comes and goes, and the change of the bytes held.
    fn changes(&self) -> impl Iterator<Item = (u32, u32, i64)> {
        let bytes = self.bytes as i64;
        let away = self.absent.map(|(from, to)| [(from.kind, from.point, -bytes), (from.kind, to, bytes)]);
        let born = self.born.map(|born| (born.kind, born.point, bytes));
        let gone = self.gone.map(|gone| (gone.kind, gone.point, -bytes));
        born.into_iter().chain(gone).chain(away.into_iter().flatten())
    }
}

/// Sums up the effects of tensors on each kind of call.
fn sum_up(kinds: &mut [Kind], tensors: &[Tensor]) {
    let mut changes: Vec<Vec<i64>> = kinds.iter().map(|k| vec![0; k.points as usize + 2]).collect();
    for (kind, point, bytes) in tensors.iter().flat_map(Tensor::changes) {
        let of_kind = &mut changes[kind as usize];
        let last = of_kind.len() - 1;
        of_kind[(point as usize).min(last)] += bytes;
    }
    for (kind, changes) in kinds.iter_mut().zip(changes) {
        let mut held = 0;
        let mut most = None;
        for (point, change) in (0u32..).zip(changes) {
            held += change;
            if point <= kind.points && most.is_none_or(|(bytes, _)| held > bytes) {
                most = Some((held, point));
            }
        }
        (kind.most_bytes, kind.most_at) = most.unwrap_or((0, 0));
        kind.left_bytes = held;
    }
}

impl Walk<'_> {
    /// Bytes in the device's memory.
    fn local_bytes(&self, buffer: BufferId) -> u64 {
        let description = self.program.buffer(buffer);
        if description.host {
            return 0;
        }
        let bytes = held_bytes(&description.sharding.local_type(&description.ty, &self.program.mesh), self.device);
        match description.kind {
            BufferKind::Parameter { .. } => copies_of_parameter(description.ty.dtype, self.device) * bytes,
            _ => bytes,
        }
    }

    /// A tensor that nobody holds yet.
    fn tensor(&mut self, origin: Origin, category: Category, bytes: u64, born: Option<u32>) -> usize {
        let born = born.map(|point| Moment { kind: self.kind, point });
        self.tensors.push(Tensor { origin, category, bytes, born, gone: None, absent: None });
        self.holders.push(0);
        self.tensors.len() - 1
    }

    fn release(&mut self, tensor: usize, point: u32) {
        self.holders[tensor] = self.holders[tensor].saturating_sub(1);
        if self.holders[tensor] == 0 && self.tensors[tensor].gone.is_none() {
            self.tensors[tensor].gone = Some(Moment { kind: self.kind, point });
        }
    }

    /// Puts a tensor into a buffer. The previous one is gone at `point`.
    fn keep(&mut self, key: (BufferId, bool), tensor: usize, point: u32) {
        self.holders[tensor] += 1;
        if let Some(old) = self.buffers.insert(key, tensor) {
            self.release(old, point);
        }
    }

    /// The key of the buffer instance that a call sees: the microbatch's, if there is one, else the step's.
    fn key(&self, buffer: BufferId, of_microbatch: bool) -> (BufferId, bool) {
        let own = (buffer, of_microbatch);
        if self.buffers.contains_key(&own) { own } else { (buffer, false) }
    }

    fn target_key(&self, buffer: BufferId, of_microbatch: bool) -> (BufferId, bool) {
        (buffer, of_microbatch && self.program.buffer(buffer).kind.is_of_step())
    }

    /// Creates the tensors that exist before the first call.
    fn start(&mut self) {
        let Overlap { steps, stashes_parameters, doubles_accumulators } = self.overlap;
        let writes = self.program.bodies.iter().flat_map(|body| &body.writes);
        let written: BTreeSet<BufferId> = writes.map(|w| w.0).collect();
        for (id, buffer) in (0u32..).map(BufferId).zip(&self.program.buffers) {
            let category = match buffer.kind {
                BufferKind::Parameter { .. } => Category::Parameters,
                BufferKind::State { .. } => Category::OptimizerState,
                BufferKind::Accumulator { .. } => Category::Gradients,
                BufferKind::Scalar { .. } => Category::Other,
                _ => continue,
            };
            let bytes = self.local_bytes(id);
            let tensor = self.tensor(Origin::Buffer(id), category, bytes, None);
            self.keep((id, false), tensor, 0);
            // If two steps are under way, each has its own.
            let of_other_step = match category {
                Category::Parameters if stashes_parameters && written.contains(&id) => Category::Stashed,
                Category::Gradients if doubles_accumulators => Category::Gradients,
                Category::Other if steps => Category::Other,
                _ => continue,
            };
            self.tensor(Origin::Buffer(id), of_other_step, bytes, None);
        }
    }

    fn send(&mut self, transfer: TransferId, of_microbatch: bool, free: bool) {
        let buffer = self.transfers[transfer.0 as usize].source.1;
        if free && let Some(tensor) = self.buffers.remove(&self.key(buffer, of_microbatch)) {
            self.release(tensor, 1);
        }
    }

    fn receive(&mut self, transfer: TransferId, of_microbatch: bool) {
        let buffer = self.transfers[transfer.0 as usize].target.1;
        // A lasting buffer is renewed in place.
        if !self.program.buffer(buffer).kind.is_of_step() {
            return;
        }
        let bytes = self.local_bytes(buffer);
        let tensor = self.tensor(Origin::Buffer(buffer), Category::Received, bytes, Some(0));
        self.keep(self.target_key(buffer, of_microbatch), tensor, 1);
    }

    /// Follows a body; returns its last point.
    fn run(&mut self, body: u32, steps: &Steps<()>, of_microbatch: bool) -> u32 {
        let end = steps.steps.len() as u32 + 1;
        let mut values: Vec<Option<usize>> = vec![None; steps.num_values];
        // The buffers that the body's values end up in.
        let written: BTreeMap<ValueId, BufferId> = steps.writes.iter().map(|&(b, v)| (v, b)).collect();
        let before = self.read_leaves(steps, of_microbatch, &mut values);
        let on_xla = self.whole.then(|| OnXla::new(&self.program.bodies[body as usize].graph, steps));
        let last_read = |v: ValueId, point: u32| on_xla.as_ref().map_or(point, |xla| xla.last_read(v, point));
        let joined_bytes = on_xla.as_ref().map_or(0, OnXla::joined_bytes);
        if let Some(last) = steps.steps.last().filter(|_| joined_bytes > 0) {
            let origin = Origin::Workspace { body, value: last.node };
            let joined = self.tensor(origin, Category::Workspace, joined_bytes, Some(0));
            self.release(joined, end);
        }
        for (point, step) in (1u32..).zip(&steps.steps) {
            let in_place: BTreeMap<usize, ValueId> = step.in_place.iter().copied().collect();
            for (i, output) in step.outputs.iter().enumerate() {
                let overwritten = in_place.get(&i).copied();
                let replaced = overwritten.and_then(|v| values[v.index()].take());
                let lasting = |t: &usize| self.tensors[*t].born.is_none() && self.holders[*t] == 1;
                let tensor = match replaced.filter(lasting) {
                    // The storage remains the same.
                    Some(tensor) => tensor,
                    None => {
                        if let Some(old) = replaced {
                            // Taken over, or copied because it has another holder as well.
                            let last = overwritten.map_or(point, |v| last_read(v, point));
                            let shared = self.holders[old] > 1 || last > point;
                            self.release(old, last + u32::from(shared));
                        }
                        let value = || Origin::Value { body, value: self.named(body, step.node, output.value) };
                        let (origin, category) = match written.get(&output.value) {
                            Some(&b) if self.is_fixed(b) => (Origin::Buffer(b), Category::Temporaries),
                            Some(&b) => (Origin::Buffer(b), self.category(b)),
                            None => (value(), Category::Temporaries),
                        };
                        let is_written = written.contains_key(&output.value);
                        let is_stored = on_xla.as_ref().is_none_or(|xla| xla.stores(output.value, is_written));
                        let bytes = if is_stored { output.bytes } else { 0 };
                        let tensor = self.tensor(origin, category, bytes, Some(point));
                        self.holders[tensor] = 1;
                        tensor
                    }
                };
                values[output.value.index()] = Some(tensor);
            }
            let workspace_bytes =
                on_xla.as_ref().map_or(0, |xla| xla.workspace_bytes(step.node)) + step.workspace_bytes;
            if workspace_bytes > 0 {
                let origin = Origin::Workspace { body, value: step.node };
                let tensor = self.tensor(origin, Category::Workspace, workspace_bytes, Some(point));
                self.release(tensor, point + 1);
            }
            for v in &step.dies {
                if let Some(tensor) = values[v.index()].take() {
                    self.release(tensor, last_read(*v, point) + 1);
                }
            }
        }
        for buffer in &steps.frees {
            if let Some(tensor) = self.buffers.remove(&self.key(*buffer, of_microbatch)) {
                self.release(tensor, end);
            }
        }
        for &(buffer, v) in &steps.writes {
            let Some(tensor) = values[v.index()] else { continue };
            // The host takes results away.
            if self.is_fixed(buffer) || matches!(self.program.buffer(buffer).kind, BufferKind::Output { .. }) {
                continue;
            }
            let tensor = match before.get(&buffer) {
                Some(&old) if old != tensor => self.renewed(old, tensor),
                _ => tensor,
            };
            self.keep(self.target_key(buffer, of_microbatch), tensor, end);
        }
        for tensor in values.into_iter().flatten() {
            self.release(tensor, end);
        }
        end - 1
    }

    /// Reads the leaves of a body into `values`. Returns the tensors of the buffers that the body takes over.
    fn read_leaves(
        &mut self,
        steps: &Steps<()>,
        of_microbatch: bool,
        values: &mut [Option<usize>],
    ) -> BTreeMap<BufferId, usize> {
        for leaf in &steps.leaves {
            let key = self.key(leaf.buffer, of_microbatch);
            let found = self.buffers.get(&key).copied().or_else(|| {
                // The host provides inputs when they are first read.
                let is_input = matches!(self.program.buffer(leaf.buffer).kind, BufferKind::Input { .. });
                is_input.then(|| {
                    let origin = Origin::Buffer(leaf.buffer);
                    let tensor = self.tensor(origin, Category::Inputs, leaf.bytes, Some(0));
                    self.keep((leaf.buffer, of_microbatch), tensor, 0);
                    tensor
                })
            });
            if let Some(tensor) = found {
                self.holders[tensor] += 1;
                values[leaf.value.index()] = Some(tensor);
            }
        }
        let mut before: BTreeMap<BufferId, usize> = BTreeMap::new();
        for leaf in steps.leaves.iter().filter(|l| l.owned) {
            if let Some(tensor) = self.buffers.remove(&self.key(leaf.buffer, of_microbatch)) {
                self.holders[tensor] -= 1;
                before.insert(leaf.buffer, tensor);
            }
        }
        before
    }

    /// A lasting buffer that is made anew in other storage is still one tensor. If the old storage ends before the new
    /// one starts, the tensor is absent in between. Otherwise it exists twice for a while.
    fn renewed(&mut self, old: usize, new: usize) -> usize {
        let kind = self.kind;
        let gone = self.tensors[old].gone.filter(|m| m.kind == kind);
        let born = self.tensors[new].born.filter(|m| m.kind == kind);
        let alike = self.tensors[old].bytes == self.tensors[new].bytes && self.holders[new] == 1;
        let (true, None, Some(gone), Some(born)) = (alike, self.tensors[old].born, gone, born) else { return new };
        self.tensors[old].gone = None;
        let stashes = self.overlap.stashes_parameters && self.tensors[old].category == Category::Parameters;
        if stashes {
            // It takes the room of the other version, which nobody needs any more.
            self.tensors[new].bytes = 0;
        } else if born.point < gone.point {
            self.tensors[new].gone = Some(gone);
            self.tensors[new].category = Category::Temporaries;
        } else {
            self.tensors[old].absent = Some((gone, born.point));
            self.tensors[new].bytes = 0;
        }
        old
    }

    /// The node that names a stored value. A copy has no node and takes the name of its source.
    fn named(&self, body: u32, node: ValueId, value: ValueId) -> ValueId {
        let is_node = value.index() < self.program.bodies[body as usize].graph.len();
        if is_node { value } else { node }
    }

    /// Returns true if a buffer keeps its storage when it is written: on GPUs, all lasting buffers do.
    fn is_fixed(&self, buffer: BufferId) -> bool {
        self.device == DeviceKind::Gpu && !self.program.buffer(buffer).kind.is_of_step()
    }

    fn category(&self, buffer: BufferId) -> Category {
        match self.program.buffer(buffer).kind {
            BufferKind::Parameter { .. } => Category::Parameters,
            BufferKind::State { .. } => Category::OptimizerState,
            BufferKind::Accumulator { .. } => Category::Gradients,
            BufferKind::Input { .. } => Category::Inputs,
            BufferKind::Value => Category::Activations,
            BufferKind::Scalar { .. } | BufferKind::Loss | BufferKind::Output { .. } => Category::Other,
        }
    }
}
