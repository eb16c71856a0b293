//! Runs tapes on the host, slowly. It defines the meaning of a tape, and tests whether its events suffice.
//!
//! Every device has its arena as bytes, host memory included, in the element types that a GPU would use. Among all
//! commands that streams and events allow, a seed chooses the next. A result that depends on that choice reveals a race
//! of the tape. Launches are interpreted, products are summed in f64, and collectives reduce in the order of their
//! ranks.

use super::*;
use crate::host::HostTensor;
use crate::layout::{held_indices, is_replica, summand_of};
use crate::loops::Source;
use crate::loops::interpret::{self, Memory};
use altiplano_ir::program::{Buffer, BufferKind, Programs};
use altiplano_ir::tensor::for_each_index;
use altiplano_ir::types::strides;
use std::collections::BTreeMap;

/// Reasons why a step cannot run.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum HostError {
    #[error("no command may run: the device of rank {rank} stops at command {command}")]
    Stuck { rank: u32, command: u32 },
    #[error("the step needs an input named '{name}'")]
    MissingInput { name: String },
    #[error("the step needs a scalar named '{name}'")]
    MissingScalar { name: String },
    #[error("input '{name}' has type {found}, of which a microbatch takes {wanted}")]
    InputType { name: String, found: TensorType, wanted: TensorType },
    #[error("no device holds '{name}'")]
    Unknown { name: String },
    #[error("'{name}' has type {found}, expected {expected}")]
    TensorType { name: String, expected: TensorType, found: TensorType },
}

/// The losses of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Stepped {
    /// Mean or sum of the losses, as the programs say.
    pub loss: f64,
    /// The loss of each microbatch.
    pub losses: Vec<f64>,
}

/// The devices of tapes, with their memory.
pub struct Host<'a> {
    programs: &'a Programs,
    tapes: &'a [Tape],
    arenas: Vec<Vec<u8>>,
}

/// A command that can run next on a stream.
#[derive(Clone, Copy)]
struct Ready {
    rank: usize,
    stream: usize,
    /// Its position on the tape.
    at: u32,
}

/// The progress of all devices within a step.
struct Progress {
    /// For each device and stream, its commands and the number that are done.
    queues: Vec<Vec<(Vec<u32>, usize)>>,
    recorded: Vec<Vec<bool>>,
    losses: Vec<(Option<u32>, f64)>,
}

impl<'a> Host<'a> {
    /// Creates devices with zeros in all lasting regions and noise elsewhere.
    pub fn new(programs: &'a Programs, tapes: &'a [Tape]) -> Host<'a> {
        let arenas = tapes.iter().map(|t| vec![0xff; t.arena.all_bytes() as usize]).collect();
        let mut host = Host { programs, tapes, arenas };
        for (rank, tape) in tapes.iter().enumerate() {
            for region in (0..tape.regions.len() as u32).map(RegionId).filter(|r| tape.region(*r).lasts) {
                host.write(rank, region, &vec![0.0; tape.region(region).elements as usize]);
            }
            for constant in &tape.constants {
                host.write(rank, constant.region, &constant.value.data);
            }
        }
        host
    }

    /// Loads a parameter into every device that holds a part of it, and into its `master` state.
    pub fn load_parameter(&mut self, name: &str, tensor: &HostTensor) -> Result<(), HostError> {
        let mut found = false;
        for (rank, tape) in self.tapes.iter().enumerate() {
            let program = &self.programs.programs[tape.program as usize];
            for (b, buffer) in (0u32..).map(BufferId).zip(&program.buffers) {
                let is_it = match &buffer.kind {
                    BufferKind::Parameter { name: n } => n == name,
                    BufferKind::State { parameter, slot } => parameter == name && slot == "master",
                    _ => false,
                };
                let Some(region) = tape.lasting(b).filter(|_| is_it) else { continue };
                let expected = buffer.own_type();
                if expected.shape != tensor.ty.shape {
                    let found = tensor.ty.clone();
                    return Err(HostError::TensorType { name: name.to_string(), expected, found });
                }
                found = true;
                let held = tensor.as_in(buffer);
                let part = self.cut(rank, buffer, &held.ty.shape, &held.to_f64(), 0);
                self.write(rank, region, &part);
            }
        }
        if found { Ok(()) } else { Err(HostError::Unknown { name: name.to_string() }) }
    }

    /// Assembles a parameter from one program that holds it.
    pub fn parameter(&self, name: &str) -> Result<Tensor, HostError> {
        let is_it = |b: &Buffer| matches!(&b.kind, BufferKind::Parameter { name: n } if n == name);
        let mut holders = (0u32..).zip(&self.programs.programs);
        let found = holders.find_map(|(p, program)| Some((p, program.buffers.iter().position(is_it)?)));
        let (p, b) = found.ok_or(HostError::Unknown { name: name.to_string() })?;
        let program = &self.programs.programs[p as usize];
        let buffer = &program.buffers[b];
        let mut whole = Tensor::splat(buffer.ty.clone(), 0.0);
        for (rank, tape) in self.tapes.iter().enumerate().filter(|(_, t)| t.program == p) {
            let coordinates = program.mesh.coordinates(tape.position);
            let Some(region) = tape.lasting(BufferId(b as u32)) else { continue };
            if is_replica(&buffer.sharding, &program.mesh, &coordinates) {
                continue;
            }
            let part = self.read(rank, region);
            let mut at = 0;
            each_held(&held_indices(&buffer.sharding, &program.mesh, &coordinates), &buffer.ty.shape, 0, |i| {
                whole.data[i] = part[at];
                at += 1;
            });
        }
        Ok(HostTensor::from_reference(&whole).out_of(buffer).to_reference())
    }

    /// Cuts this device's part out of a tensor. If the tensor has more rows than the buffer, takes those of
    /// `microbatch`.
    fn cut(&self, rank: usize, buffer: &Buffer, shape: &[u64], data: &[f64], microbatch: u64) -> Vec<f64> {
        let tape = &self.tapes[rank];
        let mesh = &self.programs.programs[tape.program as usize].mesh;
        let coordinates = mesh.coordinates(tape.position);
        let mut indices = held_indices(&buffer.sharding, mesh, &coordinates);
        for (d, list) in indices.iter_mut().enumerate().filter(|(d, _)| shape[*d] != buffer.ty.shape[*d]) {
            list.iter_mut().for_each(|i| *i += buffer.ty.shape[d] * microbatch);
        }
        let neutral = summand_of(&buffer.sharding, &coordinates).map(|r| r.neutral(buffer.ty.dtype));
        let mut part = Vec::new();
        each_held(&indices, shape, 0, |i| part.push(neutral.unwrap_or(data[i])));
        part
    }

    fn bytes(&self, rank: usize, region: RegionId) -> (usize, DType, usize) {
        let region = self.tapes[rank].region(region);
        (region.offset as usize, region.dtype, region.elements as usize)
    }

    fn read(&self, rank: usize, region: RegionId) -> Vec<f64> {
        let (offset, dtype, elements) = self.bytes(rank, region);
        let width = dtype.bytes() as usize;
        let bytes = &self.arenas[rank][offset..offset + elements * width];
        let element = |b: &[u8]| {
            let mut bits = [0; 8];
            bits[..width].copy_from_slice(b);
            dtype.from_bits(u64::from_le_bytes(bits))
        };
        bytes.chunks_exact(width).map(element).collect()
    }

    fn write(&mut self, rank: usize, region: RegionId, values: &[f64]) {
        let elements = values.len() as u64;
        self.write_part(rank, Part { region, from: 0, elements }, values);
    }

    fn write_part(&mut self, rank: usize, part: Part, values: &[f64]) {
        let (offset, dtype, _) = self.bytes(rank, part.region);
        let width = dtype.bytes() as usize;
        let from = offset + part.from as usize * width;
        let bytes = &mut self.arenas[rank][from..from + values.len() * width];
        for (b, &value) in bytes.chunks_exact_mut(width).zip(values) {
            b.copy_from_slice(&dtype.to_bits(dtype.round(value)).to_le_bytes()[..width]);
        }
    }

    /// Runs one step on a global batch, as [`crate::Session::step`] takes it, in an order chosen by a seed.
    pub fn step(
        &mut self,
        inputs: &BTreeMap<String, HostTensor>,
        scalars: &BTreeMap<String, f64>,
        seed: u64,
    ) -> Result<Stepped, HostError> {
        let inputs: BTreeMap<&str, (TensorType, Vec<f64>)> =
            inputs.iter().map(|(name, t)| (name.as_str(), (t.ty.clone(), t.to_f64()))).collect();
        let mut queues: Vec<Vec<(Vec<u32>, usize)>> =
            self.tapes.iter().map(|t| vec![(Vec::new(), 0); t.streams.len()]).collect();
        for (queues, tape) in queues.iter_mut().zip(self.tapes) {
            for (at, command) in (0u32..).zip(&tape.commands) {
                queues[command.stream.0 as usize].0.push(at);
            }
        }
        let recorded = self.tapes.iter().map(|t| vec![false; t.num_events as usize]).collect();
        let mut progress = Progress { queues, recorded, losses: Vec::new() };
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        loop {
            let mut ready: Vec<Ready> = Vec::new();
            for rank in 0..self.tapes.len() {
                for stream in 0..self.tapes[rank].streams.len() {
                    ready.extend(self.head(&progress, rank, stream).map(|at| Ready { rank, stream, at }));
                }
            }
            // A joint operation is ready if all its members are; its first member represents it.
            let choices: Vec<Vec<Ready>> = ready.iter().filter_map(|&first| self.together(&ready, first)).collect();
            if choices.is_empty() {
                break;
            }
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let chosen = &choices[(state >> 11) as usize % choices.len()];
            self.execute(chosen, &inputs, scalars, &mut progress)?;
            for &Ready { rank, stream, at } in chosen {
                progress.queues[rank][stream].1 += 1;
                if let Some(event) = self.tapes[rank].commands[at as usize].records {
                    progress.recorded[rank][event.0 as usize] = true;
                }
            }
        }
        for (rank, queues) in progress.queues.iter().enumerate() {
            if let Some(&command) = queues.iter().find_map(|(queue, done)| queue.get(*done)) {
                return Err(HostError::Stuck { rank: rank as u32, command });
            }
        }
        progress.losses.sort_by_key(|l| l.0);
        let losses: Vec<f64> = progress.losses.into_iter().map(|l| l.1).collect();
        let sum: f64 = losses.iter().sum();
        let mean = if self.programs.loss_is_mean { losses.len().max(1) as f64 } else { 1.0 };
        Ok(Stepped { loss: sum / mean, losses })
    }

    /// The next command of a stream, if all events that it waits for are recorded.
    fn head(&self, progress: &Progress, rank: usize, stream: usize) -> Option<u32> {
        let (queue, done) = &progress.queues[rank][stream];
        let &at = queue.get(*done)?;
        let waits = &self.tapes[rank].commands[at as usize].waits;
        waits.iter().all(|e| progress.recorded[rank][e.0 as usize]).then_some(at)
    }

    /// The members that run a command together, if all of them are ready and this is the first of them.
    fn together(&self, ready: &[Ready], first: Ready) -> Option<Vec<Ready>> {
        let communicator = |rank: usize, at: u32| {
            let tape = &self.tapes[rank];
            match &tape.commands[at as usize].what {
                What::Collective { communicator, .. } | What::Exchange { communicator, .. } => {
                    Some(&tape.communicators[communicator.0 as usize])
                }
                _ => None,
            }
        };
        let Some(mine) = communicator(first.rank, first.at) else { return Some(vec![first]) };
        if mine.ranks.first() != Some(&(first.rank as u32)) {
            return None;
        }
        let of = |&member: &u32| {
            let is_it = |r: &&Ready| r.rank == member as usize && communicator(r.rank, r.at).is_some_and(|c| c == mine);
            ready.iter().find(is_it).copied()
        };
        mine.ranks.iter().map(of).collect()
    }

    fn execute(
        &mut self,
        members: &[Ready],
        inputs: &BTreeMap<&str, (TensorType, Vec<f64>)>,
        scalars: &BTreeMap<String, f64>,
        progress: &mut Progress,
    ) -> Result<(), HostError> {
        let Ready { rank, at, .. } = members[0];
        let tapes = self.tapes;
        let tape = &tapes[rank];
        let buffers = &self.programs.programs[tape.program as usize].buffers;
        match &tape.commands[at as usize].what {
            What::Launch { launch, regions, coordinates } => {
                self.launch(rank, &tape.launches[launch.0 as usize], regions, coordinates);
            }
            What::Matmul(call) => self.matmul(rank, call),
            What::Fill { region, value } => {
                self.write(rank, *region, &vec![*value; tape.region(*region).elements as usize]);
            }
            What::Copy { from, to } => {
                let values = self.read(rank, *from);
                self.write(rank, *to, &values);
            }
            What::Upload { given: Given::Scalar { buffer }, to } => {
                let BufferKind::Scalar { name } = &buffers[buffer.0 as usize].kind else { return Ok(()) };
                let value = scalars.get(name).ok_or(HostError::MissingScalar { name: name.clone() })?;
                self.write(rank, *to, &[*value]);
            }
            What::Upload { given: Given::Input { buffer, microbatch }, to } => {
                let buffer = &buffers[buffer.0 as usize];
                let BufferKind::Input { name } = &buffer.kind else { return Ok(()) };
                let missing = HostError::MissingInput { name: name.clone() };
                let (ty, data) = inputs.get(name.as_str()).ok_or(missing)?;
                let times = u64::from(microbatch.unwrap_or(0)) + 1;
                let fits = |(&all, &one): (&u64, &u64)| all == one || microbatch.is_some() && all >= one * times;
                if ty.rank() != buffer.ty.rank() || !ty.shape.iter().zip(&buffer.ty.shape).all(fits) {
                    let (found, wanted) = (ty.clone(), buffer.ty.clone());
                    return Err(HostError::InputType { name: name.clone(), found, wanted });
                }
                let part = self.cut(rank, buffer, &ty.shape, data, times - 1);
                self.write(rank, *to, &part);
            }
            What::Download { taken: Taken::Loss { microbatch }, from } => {
                progress.losses.push((*microbatch, self.read(rank, *from)[0]));
            }
            What::Download { .. } => {}
            What::Collective { .. } => self.collective(members),
            What::Exchange { .. } => self.exchange(members),
        }
        Ok(())
    }

    fn launch(&mut self, rank: usize, launch: &Launch, regions: &[RegionId], coordinates: &[u64]) {
        // Parameters at the same offset are one.
        let place = |r: &RegionId| self.tapes[rank].region(*r).offset;
        // A region without elements shares no storage, whatever its offset.
        let empty: Vec<bool> = launch.params.iter().map(|p| p.elements == 0).collect();
        let is_at = |j: usize, i: usize| !empty[j] && place(&regions[j]) == place(&regions[i]);
        let first = |i: usize| (0..i).find(|&j| is_at(j, i)).unwrap_or(i);
        let mut launch = launch.clone();
        let mut memory = Memory::new();
        for (i, param) in launch.params.iter_mut().enumerate() {
            let of = if empty[i] { i } else { first(i) };
            param.source = Source::Value(ValueId(of as u32));
            memory.entry(param.source.clone()).or_insert_with(|| self.read(rank, regions[i]));
        }
        interpret::run(&launch, coordinates, &mut memory);
        for (param, region) in launch.params.iter().zip(regions).filter(|(p, _)| p.written) {
            let values = memory[&param.source].clone();
            self.write(rank, *region, &values);
        }
    }

    fn matmul(&mut self, rank: usize, call: &MatmulCall) {
        let (lhs, rhs) = (self.read(rank, call.lhs.region), self.read(rank, call.rhs.region));
        let mut result = self.read(rank, call.result.region);
        let element = |matrix: &Matrix, base: u64, row: u64, column: u64| {
            let (major, minor) = if matrix.transposed { (column, row) } else { (row, column) };
            (matrix.from + base + major * matrix.leading + minor) as usize
        };
        let counts: Vec<u64> = call.batches.iter().map(|b| b.count).collect();
        for_each_index(&counts, |index| {
            let base = |stride: fn(&Batch) -> u64| index.iter().zip(&call.batches).map(|(i, b)| i * stride(b)).sum();
            let (l, r, t): (u64, u64, u64) = (base(|b| b.lhs), base(|b| b.rhs), base(|b| b.result));
            for i in 0..call.m {
                for j in 0..call.n {
                    let product = |k| lhs[element(&call.lhs, l, i, k)] * rhs[element(&call.rhs, r, k, j)];
                    let sum: f64 = (0..call.k).map(product).sum();
                    let at = element(&call.result, t, i, j);
                    result[at] = if call.accumulate { result[at] + sum } else { sum };
                }
            }
        });
        self.write(rank, call.result.region, &result);
    }

    fn collective(&mut self, members: &[Ready]) {
        let mut given = Vec::with_capacity(members.len());
        let mut targets = Vec::with_capacity(members.len());
        let mut done = None;
        for &Ready { rank, at, .. } in members {
            if let What::Collective { kind, dtype, elements, from, to, .. } =
                self.tapes[rank].commands[at as usize].what
            {
                given.push(self.read(rank, from));
                targets.push((rank, to));
                done = Some((kind, dtype, elements as usize));
            }
        }
        let Some((kind, dtype, elements)) = done else { return };
        let reduced = |reducer: Reducer, range: std::ops::Range<usize>| -> Vec<f64> {
            let combined = |i: usize| {
                let all = given.iter().map(|g| g[i]);
                all.reduce(|x, y| reducer.combine().apply(x, y, DType::F64)).unwrap_or(0.0)
            };
            range.map(combined).map(|x| dtype.wrap(x)).collect()
        };
        for (me, (rank, to)) in targets.into_iter().enumerate() {
            let result = match kind {
                CollectiveKind::AllReduce(reducer) => reduced(reducer, 0..elements),
                CollectiveKind::ReduceScatter(reducer) => reduced(reducer, me * elements..(me + 1) * elements),
                CollectiveKind::AllGather => given.concat(),
            };
            self.write(rank, to, &result);
        }
    }

    fn exchange(&mut self, members: &[Ready]) {
        let messages = |i: usize| match &self.tapes[members[i].rank].commands[members[i].at as usize].what {
            What::Exchange { sends, receives, .. } => (sends.as_slice(), receives.as_slice()),
            _ => (&[][..], &[][..]),
        };
        let mut moved = Vec::new();
        for to in 0..members.len() {
            for from in 0..members.len() {
                let sent = messages(from).0.iter().filter(|m| m.member as usize == to);
                let received = messages(to).1.iter().filter(|m| m.member as usize == from);
                for (sent, received) in sent.zip(received) {
                    let all = self.read(members[from].rank, sent.part.region);
                    let (start, n) = (sent.part.from as usize, sent.part.elements as usize);
                    moved.push((members[to].rank, received.part, all[start..start + n].to_vec()));
                }
            }
        }
        for (rank, part, values) in moved {
            self.write_part(rank, part, &values);
        }
    }
}

/// Calls `visit` with the position in a tensor of each element at the cross product of index lists.
fn each_held(indices: &[Vec<u64>], shape: &[u64], base: usize, mut visit: impl FnMut(usize)) {
    let (strides, sizes) = (strides(shape), indices.iter().map(|l| l.len() as u64).collect::<Vec<_>>());
    for_each_index(&sizes, |at| {
        let position: u64 = at.iter().zip(indices).zip(&strides).map(|((&i, list), s)| list[i as usize] * s).sum();
        visit(base + position as usize);
    });
}
