//! Turns programs into the tapes of their devices.
//!
//! Each program's bodies are prepared once. Then each device follows the moves of a step ([`super::order`]), as in the
//! planner's memory model: buffers hold tensors, and calls make and free them. The results are commands and lifetimes.
//! Placing tensors and ordering streams come afterwards.

use super::order::{Move, Stuck, order};
use super::overlap::ordered;
use super::place::{Slot, place};
use super::prepare::{Operand, Piece, Pieces, Place, Prepared, Product, Table, Unprepared, prepare};
use super::strided::{Strided, crossed};
use super::*;
use crate::loops::Coordinate;
use altiplano_ir::graph::Graph;
use altiplano_ir::interpret::{run_all, run_mesh};
use altiplano_ir::kernels::{Kernel, KernelKind};
use altiplano_ir::mesh::{AxisId, Mesh};
use altiplano_ir::op::{HostRoute, Op};
use altiplano_ir::program::{self, BufferKind, Program, Programs, TransferId};
use altiplano_ir::storage::Step;
use std::cell::RefCell;
use std::collections::BTreeMap;

/// Options of building tapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Number of gathers of stored parameters that are issued before they are needed. Each costs the memory of its
    /// result.
    pub gathers_ahead: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options { gathers_ahead: 1 }
    }
}

/// Reasons why programs have no tapes.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum BuildError {
    #[error("program {program}: {error}")]
    Unprepared { program: u32, error: Unprepared },
    #[error(transparent)]
    Stuck(#[from] Stuck),
    #[error("program {program}, call {call}: buffer {buffer} holds nothing for microbatch {microbatch:?}")]
    Missing { program: u32, call: u32, buffer: BufferId, microbatch: Option<u32> },
    #[error("program {program}, call {call}: {value} is used before it is made")]
    Unmade { program: u32, call: u32, value: ValueId },
}

/// Builds the tapes of all devices, by rank.
///
/// # Errors
/// Fails if a kernel has no loop program, or if a schedule uses a buffer that holds nothing.
pub fn build(programs: &Programs, options: &Options) -> Result<Vec<Tape>, BuildError> {
    let moves = order(programs)?;
    let ids = 0..programs.transfers.len() as u32;
    let messages: Vec<Vec<program::Message>> = ids.map(|t| programs.messages(TransferId(t))).collect();
    let mut first_rank = vec![0u32];
    for program in &programs.programs {
        first_rank.push(first_rank[first_rank.len() - 1] + program.devices.len() as u32);
    }
    let mut tapes = Vec::new();
    for (index, program) in (0u32..).zip(&programs.programs) {
        let mut table = Table::default();
        let mut bodies = Vec::with_capacity(program.bodies.len());
        for (body, kernels) in program.bodies.iter().zip(ordered(program, options.gathers_ahead)) {
            let prepared = prepare(program, body, &kernels, &mut table);
            bodies.push(prepared.map_err(|error| BuildError::Unprepared { program: index, error })?);
        }
        let constants: Vec<_> =
            program.bodies.iter().zip(&bodies).map(|(b, p)| constants(&b.graph, p, &program.mesh)).collect();
        let shared = Shared {
            programs,
            index,
            program,
            bodies,
            constants,
            first_rank: &first_rank,
            messages: &messages,
            table: RefCell::new(table),
            placed: RefCell::default(),
        };
        let from = tapes.len();
        for position in 0..program.devices.len() as u32 {
            tapes.push(Device::new(&shared, position).tape(&moves[index as usize])?);
        }
        let launches = shared.table.into_inner().launches;
        for tape in &mut tapes[from..] {
            tape.launches.clone_from(&launches);
            events::add(tape);
        }
    }
    Ok(tapes)
}

/// Data shared by the devices of a program.
struct Shared<'a> {
    programs: &'a Programs,
    index: u32,
    program: &'a Program,
    bodies: Vec<Prepared>,
    /// The constants of each body: one for all devices, or one for each.
    constants: Vec<BTreeMap<ValueId, Vec<Arc<Tensor>>>>,
    first_rank: &'a [u32],
    messages: &'a [Vec<program::Message>],
    table: RefCell<Table>,
    placed: RefCell<Vec<(Vec<Slot>, (Vec<u64>, Arena))>>,
}

/// Evaluates the values that depend on no leaf: one for all devices, or one for each if they depend on its coordinates.
fn constants(graph: &Graph, body: &Prepared, mesh: &Mesh) -> BTreeMap<ValueId, Vec<Arc<Tensor>>> {
    let wanted: Vec<ValueId> = body.constants.keys().copied().collect();
    let all = Kernel { writes: wanted.clone(), ..Kernel::moving(KernelKind::Indexed, 0) };
    let (part, map) = all.part(graph);
    let by_device = part.values().any(|v| matches!(part.node(v).op, Op::AxisIndex(_) | Op::Collective(_)));
    let leaf = |v: ValueId| Tensor::splat(part.ty(v).clone(), 0.0);
    let values: Vec<Vec<Tensor>> = match by_device {
        true => run_mesh(&part, mesh, |v, _| leaf(v)),
        false => run_all(&part, leaf).into_iter().map(|t| vec![t]).collect(),
    };
    let of = |v: &ValueId| (*v, values[map[v].index()].iter().cloned().map(Arc::new).collect());
    wanted.iter().map(of).collect()
}

/// A region and its storage slot, which several regions may occupy in turn.
struct Draft {
    content: Content,
    dtype: DType,
    elements: u64,
    slot: usize,
}

/// The tape of one device under construction.
struct Device<'a> {
    shared: &'a Shared<'a>,
    position: u32,
    rank: u32,
    coordinates: Vec<u32>,
    regions: Vec<Draft>,
    slots: Vec<Slot>,
    /// Number of buffers and values that hold each slot.
    holders: Vec<u32>,
    buffers: BTreeMap<(BufferId, Option<u32>), RegionId>,
    offered: BTreeMap<(TransferId, Option<u32>), RegionId>,
    constants: BTreeMap<(u32, ValueId), RegionId>,
    filled: Vec<Constant>,
    streams: Vec<Stream>,
    communicators: Vec<Communicator>,
    commands: Vec<Command>,
    call: Option<u32>,
}

type Values = BTreeMap<ValueId, RegionId>;

/// A run of a body: its call in the schedule, the body, and the microbatch if it is of one.
#[derive(Clone, Copy)]
struct Turn {
    call: u32,
    body: u32,
    microbatch: Option<u32>,
}

impl<'a> Device<'a> {
    fn new(shared: &'a Shared<'a>, position: u32) -> Self {
        Device {
            shared,
            position,
            rank: shared.first_rank[shared.index as usize] + position,
            coordinates: shared.program.mesh.coordinates(position),
            regions: Vec::new(),
            slots: Vec::new(),
            holders: Vec::new(),
            buffers: BTreeMap::new(),
            offered: BTreeMap::new(),
            constants: BTreeMap::new(),
            filled: Vec::new(),
            streams: vec![Stream::Compute, Stream::Collectives, Stream::Upload, Stream::Download],
            communicators: Vec::new(),
            commands: Vec::new(),
            call: None,
        }
    }

    fn tape(mut self, moves: &[Move]) -> Result<Tape, BuildError> {
        self.start();
        for (body, prepared) in (0u32..).zip(&self.shared.bodies) {
            for (&value, ty) in &prepared.constants {
                let region = self.region(Content::Constant { body, value }, ty.dtype, ty.elements(), true);
                self.constants.insert((body, value), region);
                let values = &self.shared.constants[body as usize][&value];
                let value = values[if values.len() == 1 { 0 } else { self.position as usize }].clone();
                self.filled.push(Constant { region, value });
            }
        }
        for &next in moves {
            match next {
                Move::Run { call, body, microbatch } => {
                    self.call = Some(call);
                    self.run(call, body, microbatch)?;
                }
                Move::Offer { call, transfer, microbatch, free } => {
                    let buffer = self.shared.programs.transfers[transfer.0 as usize].source.1;
                    let key = self.key(buffer, microbatch);
                    let region = self.find(call, buffer, microbatch)?;
                    self.hold(region);
                    self.offered.insert((transfer, microbatch), region);
                    if free {
                        self.buffers.remove(&key);
                        self.release(region);
                    }
                }
                Move::Transfer { call, transfer, microbatch, sends, receives } => {
                    self.call = Some(call);
                    self.transfer(transfer, microbatch, sends, receives);
                }
            }
        }
        let Device { regions, mut slots, holders, .. } = self;
        let end = self.commands.len() as u32;
        for (slot, _) in slots.iter_mut().zip(holders).filter(|(s, held)| *held > 0 || s.lasts) {
            slot.dies = end;
        }
        slots.iter_mut().for_each(|s| s.dies = s.dies.max(s.born + 1));
        let (offsets, arena) = {
            // Most devices of a program have the same slots to place.
            let mut placed = self.shared.placed.borrow_mut();
            let known = placed.iter().find(|(same, _)| *same == slots).map(|(_, known)| known.clone());
            known.unwrap_or_else(|| {
                let new = place(&slots);
                placed.push((slots.clone(), new.clone()));
                new
            })
        };
        let finished = |Draft { content, dtype, elements, slot }: Draft| {
            let (offset, lasts) = (offsets[slot], slots[slot].lasts);
            Region { content, dtype, elements, offset, bytes: elements * dtype.bytes(), lasts }
        };
        Ok(Tape {
            program: self.shared.index,
            position: self.position,
            rank: self.rank,
            arena,
            regions: regions.into_iter().map(finished).collect(),
            constants: self.filled,
            launches: Vec::new(),
            streams: self.streams,
            communicators: self.communicators,
            num_events: 0,
            commands: self.commands,
        })
    }

    /// Creates the regions that exist before the first call.
    fn start(&mut self) {
        for (buffer, description) in (0u32..).map(BufferId).zip(&self.shared.program.buffers) {
            let ty = description.sharding.local_type(&description.ty, &self.shared.program.mesh);
            let lasts = !description.kind.is_of_step();
            if !lasts {
                continue;
            }
            let content = Content::Buffer { buffer, microbatch: None };
            let region = self.region(content, ty.dtype, ty.elements(), true);
            let slot = self.slot(region);
            self.slots[slot].host = description.host;
            self.buffers.insert((buffer, None), region);
            match description.kind {
                BufferKind::Accumulator { .. } => self.push(Stream::Compute, What::Fill { region, value: 0.0 }),
                BufferKind::Scalar { .. } => {
                    self.push(Stream::Upload, What::Upload { given: Given::Scalar { buffer }, to: region });
                }
                _ => {}
            }
        }
    }

    fn push(&mut self, stream: Stream, what: What) {
        let at = self.streams.iter().position(|s| *s == stream).unwrap_or_else(|| {
            self.streams.push(stream);
            self.streams.len() - 1
        });
        let stream = StreamId(at as u32);
        self.commands.push(Command { stream, waits: Vec::new(), records: None, call: self.call, what });
    }

    /// Creates a region with its own storage, held once.
    fn region(&mut self, content: Content, dtype: DType, elements: u64, lasts: bool) -> RegionId {
        let born = if lasts { 0 } else { self.commands.len() as u32 };
        self.slots.push(Slot { bytes: elements * dtype.bytes(), born, dies: born, lasts, host: false });
        self.holders.push(1);
        self.in_slot(content, dtype, elements, self.slots.len() - 1)
    }

    fn in_slot(&mut self, content: Content, dtype: DType, elements: u64, slot: usize) -> RegionId {
        self.regions.push(Draft { content, dtype, elements, slot });
        RegionId(self.regions.len() as u32 - 1)
    }

    fn slot(&self, region: RegionId) -> usize {
        self.regions[region.0 as usize].slot
    }

    fn hold(&mut self, region: RegionId) {
        let slot = self.slot(region);
        self.holders[slot] += 1;
    }

    fn release(&mut self, region: RegionId) {
        let slot = self.slot(region);
        self.holders[slot] = self.holders[slot].saturating_sub(1);
        if self.holders[slot] == 0 {
            self.slots[slot].dies = self.commands.len() as u32;
        }
    }

    fn is_of_step(&self, buffer: BufferId) -> bool {
        self.shared.program.buffer(buffer).kind.is_of_step()
    }

    /// The key under which the instance of a buffer that a call sees is kept: the microbatch's, or else the step's.
    fn key(&self, buffer: BufferId, microbatch: Option<u32>) -> (BufferId, Option<u32>) {
        let own = (buffer, microbatch);
        if self.buffers.contains_key(&own) { own } else { (buffer, None) }
    }

    fn find(&self, call: u32, buffer: BufferId, microbatch: Option<u32>) -> Result<RegionId, BuildError> {
        let missing = BuildError::Missing { program: self.shared.index, call, buffer, microbatch };
        self.buffers.get(&self.key(buffer, microbatch)).copied().ok_or(missing)
    }

    /// Stores a region, already held once, in a buffer.
    fn keep(&mut self, buffer: BufferId, microbatch: Option<u32>, region: RegionId) {
        if let Some(old) = self.buffers.insert((buffer, microbatch.filter(|_| self.is_of_step(buffer))), region) {
            self.release(old);
        }
    }

    fn local(&self, buffer: BufferId) -> TensorType {
        let description = self.shared.program.buffer(buffer);
        description.sharding.local_type(&description.ty, &self.shared.program.mesh)
    }

    fn run(&mut self, call: u32, body: u32, microbatch: Option<u32>) -> Result<(), BuildError> {
        let shared = self.shared;
        let (graph, steps) = (&shared.program.bodies[body as usize].graph, &shared.bodies[body as usize].steps);
        let mut values = Values::new();
        for leaf in &steps.leaves {
            let kind = &shared.program.buffer(leaf.buffer).kind;
            if !self.buffers.contains_key(&self.key(leaf.buffer, microbatch))
                && matches!(kind, BufferKind::Input { .. })
            {
                let ty = graph.ty(leaf.value);
                let content = Content::Buffer { buffer: leaf.buffer, microbatch };
                let to = self.region(content, ty.dtype, ty.elements(), false);
                let given = Given::Input { buffer: leaf.buffer, microbatch };
                self.push(Stream::Upload, What::Upload { given, to });
                self.buffers.insert((leaf.buffer, microbatch), to);
            }
            let region = self.find(call, leaf.buffer, microbatch)?;
            self.hold(region);
            values.insert(leaf.value, region);
        }
        for leaf in steps.leaves.iter().filter(|l| l.owned) {
            if let Some(region) = self.buffers.remove(&self.key(leaf.buffer, microbatch)) {
                self.release(region);
            }
        }
        for step in &steps.steps {
            self.step(step, Turn { call, body, microbatch }, &mut values)?;
        }
        for buffer in &steps.frees {
            if let Some(region) = self.buffers.remove(&self.key(*buffer, microbatch)) {
                self.release(region);
            }
        }
        for &(buffer, v) in &steps.writes {
            let unmade = BuildError::Unmade { program: shared.index, call, value: v };
            let region = *values.get(&v).ok_or(unmade)?;
            match &shared.program.buffer(buffer).kind {
                BufferKind::Output { .. } => {
                    let taken = Taken::Output { buffer, microbatch };
                    self.push(Stream::Download, What::Download { taken, from: region });
                    continue;
                }
                BufferKind::Loss if self.position == 0 => {
                    let taken = Taken::Loss { microbatch };
                    self.push(Stream::Download, What::Download { taken, from: region });
                }
                _ => {}
            }
            if !self.is_of_step(buffer) {
                let to = self.find(call, buffer, None)?;
                if self.slot(to) != self.slot(region) {
                    self.push(Stream::Compute, What::Copy { from: region, to });
                }
                continue;
            }
            self.hold(region);
            self.keep(buffer, microbatch, region);
        }
        values.into_values().for_each(|region| self.release(region));
        Ok(())
    }

    fn step(&mut self, step: &Step<Pieces>, turn: Turn, values: &mut Values) -> Result<(), BuildError> {
        let Turn { call, body, microbatch } = turn;
        let shared = self.shared;
        let pieces = &step.kernel;
        let writes = &shared.bodies[body as usize].steps.writes;
        // The values that the step makes, and the inputs whose storage they take over. The step still reads these by
        // their old regions.
        let (mut made, mut replaced) = (Values::new(), Vec::new());
        for (i, output) in step.outputs.iter().enumerate() {
            let (v, dtype, elements) = (output.value, output.dtype, output.elements as u64);
            let lasting = writes.iter().find(|w| w.1 == v && !self.is_of_step(w.0)).map(|w| w.0);
            if let Some(buffer) = lasting.filter(|_| output.bytes == 0 && elements > 0) {
                let region = self.find(call, buffer, None)?;
                let mut readers = step.inputs.iter().filter(|input| values.get(input) == Some(&region));
                if readers.all(|input| pieces.may_share.contains(&(v, *input))) {
                    self.hold(region);
                    made.insert(v, region);
                    continue;
                }
            }
            let buffer = writes.iter().find(|w| w.1 == v && self.is_of_step(w.0)).map(|w| w.0);
            let content = match buffer {
                Some(buffer) => Content::Buffer { buffer, microbatch },
                None => Content::Value { call, body, value: v },
            };
            let old = step.in_place.iter().find(|p| p.0 == i && pieces.may_share.contains(&(v, p.1)));
            let storage = old.and_then(|&(_, old)| {
                let slot = self.slot(*values.get(&old)?);
                let enough = self.slots[slot].bytes >= elements * dtype.bytes();
                (self.holders[slot] == 1 && !self.slots[slot].lasts && enough).then_some((old, slot))
            });
            let region = match storage {
                Some((old, slot)) => {
                    replaced.push(old);
                    self.in_slot(content, dtype, elements, slot)
                }
                None => {
                    let region = self.region(content, dtype, elements, false);
                    let slot = self.slot(region);
                    self.slots[slot].host = output.host;
                    region
                }
            };
            made.insert(v, region);
        }
        let mut scratch = Vec::with_capacity(pieces.scratch.len());
        for &(dtype, elements) in &pieces.scratch {
            scratch.push(self.region(Content::Staging { call }, dtype, elements, false));
        }
        for piece in &pieces.pieces {
            let unmade = |value| BuildError::Unmade { program: shared.index, call, value };
            let find = |device: &Self, place: Place| match place {
                Place::Value(v) => made.get(&v).or(values.get(&v)).copied().ok_or(unmade(v)),
                Place::Constant(v) => device.constants.get(&(body, v)).copied().ok_or(unmade(v)),
                Place::Scratch(i) => Ok(scratch[i as usize]),
            };
            let (stream, what) = self.command(piece, find)?;
            self.push(stream, what);
        }
        scratch.into_iter().for_each(|region| self.release(region));
        for old in replaced {
            values.remove(&old);
        }
        values.extend(made);
        for v in &step.dies {
            if let Some(region) = values.remove(v) {
                self.release(region);
            }
        }
        Ok(())
    }

    /// The command of a piece on this device.
    fn command(
        &mut self,
        piece: &Piece,
        find: impl Fn(&Self, Place) -> Result<RegionId, BuildError>,
    ) -> Result<(Stream, What), BuildError> {
        let mesh = &self.shared.program.mesh;
        let find = |place: Place| find(self, place);
        Ok(match piece {
            Piece::Launch { launch, params, starts } => {
                let table = self.shared.table.borrow();
                let mut starts = starts.iter().copied();
                let number = |coordinate: &Coordinate| match coordinate {
                    Coordinate::Along(axes) => mesh.index_along(axes, &self.coordinates),
                    Coordinate::Start => starts.next().unwrap_or(0),
                };
                let coordinates = table.launches[launch.0 as usize].coordinates.iter().map(number).collect();
                let regions = params.iter().map(|p| find(*p)).collect::<Result<_, _>>()?;
                (Stream::Compute, What::Launch { launch: *launch, regions, coordinates })
            }
            Piece::Matmul(product) => (Stream::Compute, What::Matmul(Box::new(matmul(product, find)?))),
            Piece::Collective { axes, kind, dtype, elements, from, to } => {
                let (from, to, communicator) = (find(*from)?, find(*to)?, self.group(axes));
                match self.communicators[communicator.0 as usize].ranks.len() {
                    1 => (Stream::Compute, What::Copy { from, to }),
                    _ => {
                        let (kind, dtype, elements) = (*kind, *dtype, *elements);
                        (Stream::Collectives, What::Collective { communicator, kind, dtype, elements, from, to })
                    }
                }
            }
            Piece::AllToAll { axes, dtype, elements, from, to } => {
                let (from, to, communicator) = (find(*from)?, find(*to)?, self.group(axes));
                let members = self.communicators[communicator.0 as usize].ranks.len() as u32;
                let elements = *elements;
                let message = |region| {
                    move |member: u32| {
                        let part = Part { region, from: u64::from(member) * elements, elements };
                        Message { member, part }
                    }
                };
                let sends = (0..members).map(message(from)).collect();
                let receives = (0..members).map(message(to)).collect();
                (Stream::Collectives, What::Exchange { communicator, dtype: *dtype, sends, receives })
            }
            Piece::Shift { axes, by, dtype, elements, from, to } => {
                let (from, to, communicator) = (find(*from)?, find(*to)?, self.group(axes));
                let members = self.communicators[communicator.0 as usize].ranks.len() as u64;
                let me = mesh.index_along(axes, &self.coordinates);
                let message = |member: u64, region| {
                    let part = Part { region, from: 0, elements: *elements };
                    vec![Message { member: (member % members) as u32, part }]
                };
                let (sends, receives) = (message(me + members - by, from), message(me + by, to));
                (Stream::Collectives, What::Exchange { communicator, dtype: *dtype, sends, receives })
            }
            Piece::Fill { place, value } => (Stream::Compute, What::Fill { region: find(*place)?, value: *value }),
            Piece::HostCopy { route, from, to } => {
                let stream = match route {
                    HostRoute::Load => Stream::Upload,
                    HostRoute::Store => Stream::Download,
                };
                (stream, What::Copy { from: find(*from)?, to: find(*to)? })
            }
            Piece::Copy { from, to } => (Stream::Compute, What::Copy { from: find(*from)?, to: find(*to)? }),
        })
    }

    fn communicator(&mut self, ranks: Vec<u32>, purpose: Purpose) -> CommunicatorId {
        let wanted = Communicator { ranks, purpose };
        let at = self.communicators.iter().position(|c| *c == wanted).unwrap_or_else(|| {
            self.communicators.push(wanted);
            self.communicators.len() - 1
        });
        CommunicatorId(at as u32)
    }

    /// The communicator of this device's group along axes of the mesh.
    fn group(&mut self, axes: &[AxisId]) -> CommunicatorId {
        let first = self.shared.first_rank[self.shared.index as usize];
        let members = self.shared.program.mesh.group(axes, self.position);
        self.communicator(members.into_iter().map(|p| first + p).collect(), Purpose::Collectives)
    }

    fn copies(&mut self, copies: &[Strided], from: RegionId, to: RegionId) {
        let size = |region: RegionId| (self.regions[region.0 as usize].dtype, self.regions[region.0 as usize].elements);
        let ((dtype, read), (_, written)) = (size(from), size(to));
        for copy in copies {
            let launch = self.shared.table.borrow_mut().add(copy.launch(dtype, read, written));
            self.push(Stream::Compute, What::Launch { launch, regions: vec![from, to], coordinates: Vec::new() });
        }
    }

    fn staging(&mut self, dtype: DType, elements: u64) -> RegionId {
        self.region(Content::Staging { call: self.call.unwrap_or(0) }, dtype, elements, false)
    }

    /// Issues the messages of a transfer from and to this device, all sends before all receives.
    fn transfer(&mut self, id: TransferId, microbatch: Option<u32>, sends: bool, receives: bool) {
        let shared = self.shared;
        let messages = &shared.messages[id.0 as usize];
        let transfer = &shared.programs.transfers[id.0 as usize];
        let source = self.offered.get(&(id, microbatch)).copied();
        let me = self.rank;
        let rank = |program: u32, position: u32| shared.first_rank[program as usize] + position;
        let ends = |m: &program::Message| (rank(transfer.source.0, m.source), rank(transfer.target.0, m.target));
        let mut staged = Vec::new();
        let mut arrived: Vec<(Vec<Strided>, RegionId)> = Vec::new();
        let target = receives.then(|| {
            let ty = self.local(transfer.target.1);
            let content = Content::Buffer { buffer: transfer.target.1, microbatch };
            self.region(content, ty.dtype, ty.elements(), false)
        });
        if let (true, Some(from)) = (sends, source) {
            let shape = self.local(transfer.source.1);
            for message in messages.iter().filter(|m| ends(m).0 == me && ends(m).1 != me) {
                let (lengths, all) = packed(&message.source_indices);
                let copies = crossed(&shape.shape, &message.source_indices, &lengths, &all);
                let part = run(&copies, from, true).unwrap_or_else(|| {
                    let elements = lengths.iter().product();
                    let region = self.staging(shape.dtype, elements);
                    self.copies(&copies, from, region);
                    staged.push(region);
                    Part { region, from: 0, elements }
                });
                let to = ends(message).1;
                let communicator = self.communicator(vec![self.rank, to], Purpose::Channel);
                let sends = vec![Message { member: 1, part }];
                let what = What::Exchange { communicator, dtype: shape.dtype, sends, receives: Vec::new() };
                self.push(Stream::Send(to), what);
            }
        }
        if let Some(to) = target {
            let ty = self.local(transfer.target.1);
            let mine: Vec<&program::Message> = messages.iter().filter(|m| ends(m).1 == me).collect();
            let count = |m: &&program::Message| m.target_indices.iter().map(|l| l.len() as u64).product::<u64>();
            // The rest is padding, since the sizes do not divide evenly.
            if mine.iter().map(count).sum::<u64>() < ty.elements() {
                self.push(Stream::Compute, What::Fill { region: to, value: 0.0 });
            }
            for message in mine {
                let sender = ends(message).0;
                if sender == self.rank {
                    if let Some(from) = source {
                        let shape = self.local(transfer.source.1).shape;
                        let copies = crossed(&shape, &message.source_indices, &ty.shape, &message.target_indices);
                        self.copies(&copies, from, to);
                    }
                    continue;
                }
                let (lengths, all) = packed(&message.target_indices);
                let copies = crossed(&lengths, &all, &ty.shape, &message.target_indices);
                let part = run(&copies, to, false).unwrap_or_else(|| {
                    let elements = lengths.iter().product();
                    let region = self.staging(ty.dtype, elements);
                    staged.push(region);
                    arrived.push((copies, region));
                    Part { region, from: 0, elements }
                });
                let communicator = self.communicator(vec![sender, self.rank], Purpose::Channel);
                let receives = vec![Message { member: 0, part }];
                let what = What::Exchange { communicator, dtype: ty.dtype, sends: Vec::new(), receives };
                self.push(Stream::Receive(sender), what);
            }
            for (copies, from) in arrived {
                self.copies(&copies, from, to);
            }
            self.keep(transfer.target.1, microbatch, to);
        }
        staged.into_iter().for_each(|region| self.release(region));
        if sends
            && self.offered.remove(&(id, microbatch)).is_some()
            && let Some(source) = source
        {
            self.release(source);
        }
    }
}

/// The sizes of a message's elements and their positions in it, for the positions of a tensor that it holds.
fn packed(lists: &[Vec<u64>]) -> (Vec<u64>, Vec<Vec<u64>>) {
    let lengths: Vec<u64> = lists.iter().map(|l| l.len() as u64).collect();
    let all = lengths.iter().map(|&n| (0..n).collect()).collect();
    (lengths, all)
}

/// The part of a region that holds a message's elements, if they are contiguous there.
fn run(copies: &[Strided], region: RegionId, is_source: bool) -> Option<Part> {
    let [copy] = copies else { return None };
    let (from, strides) = if is_source { (copy.from_offset, &copy.from) } else { (copy.to_offset, &copy.to) };
    let packed = altiplano_ir::types::strides(&copy.sizes);
    let mut dims = copy.sizes.iter().zip(strides).zip(packed);
    let even = dims.all(|((&size, stride), packed)| size == 1 || *stride == packed);
    even.then(|| Part { region, from, elements: copy.sizes.iter().product() })
}

/// The call for a product whose operands are at the regions that `find` gives.
fn matmul(product: &Product, find: impl Fn(Place) -> Result<RegionId, BuildError>) -> Result<MatmulCall, BuildError> {
    let matrix = |operand: &Operand| -> Result<Matrix, BuildError> {
        let Operand { place, dtype, from, leading, transposed } = *operand;
        Ok(Matrix { region: find(place)?, dtype, from, leading, transposed })
    };
    let [m, n, k] = product.sizes;
    let [lhs, rhs, result] = &product.operands;
    let (lhs, rhs, result) = (matrix(lhs)?, matrix(rhs)?, matrix(result)?);
    Ok(MatmulCall { m, n, k, lhs, rhs, result, batches: product.batches.clone(), accumulate: product.accumulate })
}
