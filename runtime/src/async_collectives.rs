//! Asynchronous collectives: they overlap with the computation of the next step. `Begun::new` sends without blocking,
//! and `Begun::advance` collects the result where it is needed.
//!
//! Only members that send copies use them, and sums have the same bits as in blocking collectives. Candidates are the
//! collectives of late calls that need nothing but sums of gradients, which are complete when a step ends.

use crate::arena::{Arena, Storage};
use crate::collective::{Blocks, Member, expect_bytes, range_of, reduce, words_of};
use crate::element::{Class, with_class, with_width};
use crate::error::KernelError;
use crate::kernel::copy::Copy;
use crate::mailbox::{Mailbox, Payload, Tag};
use crate::recording::Start;
use crate::step::{Compiled, Kernel, Step};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::Reducer;
use altiplano_ir::program::{BufferId, BufferKind, Call, Message, Program, Transfer};
use altiplano_ir::reshard::Collective;
use altiplano_ir::storage::Leaf;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// A collective of a late call that can start as soon as the previous step has ended.
#[derive(Clone, Debug, PartialEq)]
pub struct AsyncCollective {
    /// Position of the call in the schedule.
    pub position: usize,
    pub body: u32,
    /// Index among the body's steps.
    pub step: usize,
    pub operand: Operand,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Operand {
    /// A sum of gradients that nothing else reads before it is zeroed for the next step.
    Sum { leaf: ValueId, buffer: BufferId },
    /// The result of the preceding collective in the list, which nothing else reads.
    Before,
}

/// Progress of the previous step's asynchronous collectives while the calls of a step run.
#[derive(Default)]
pub struct AsyncCollectives {
    /// True if collectives overlap in this step.
    pub on: bool,
    /// Index in the list of the collective that is in flight or starts next. All before it have finished.
    pub next: usize,
    pub begun: Option<Begun>,
    pub since: Option<Start>,
    /// The operand of the next collective, if it is the result of the one before.
    pub carried: Option<Arc<Storage>>,
    /// Finished results by call and step, until these take them.
    pub results: HashMap<(usize, usize), Arc<Storage>>,
}

/// The collectives of a program's late calls that can start early, in the order in which all devices of the program run
/// them. Also the position of the first late call that runs once a step: all late calls before it must have run first.
pub(crate) fn early(
    program: &Program,
    bodies: &[Compiled],
    transfers: &[(Transfer, Arc<Vec<Message>>)],
) -> (usize, Vec<AsyncCollective>) {
    let once = |position: &usize| match program.schedule[*position] {
        Call::Run { body, .. } => !program.bodies[body as usize].phase.is_of_microbatch(),
        Call::Send { .. } | Call::Receive { .. } => false,
    };
    let first = (program.num_prompt()..program.schedule.len()).find(once).unwrap_or(program.schedule.len());
    let mut all = Vec::new();
    // Buffers that calls in between read or write: they no longer hold the previous step's value, or are still needed.
    let mut touched: BTreeSet<BufferId> = BTreeSet::new();
    for position in first..program.schedule.len() {
        let body = match program.schedule[position] {
            Call::Run { body, .. } => body,
            Call::Send { transfer, .. } => {
                touched.insert(transfers[transfer.0 as usize].0.source.1);
                continue;
            }
            Call::Receive { transfer, .. } => {
                touched.insert(transfers[transfer.0 as usize].0.target.1);
                continue;
            }
        };
        let compiled = &bodies[body as usize];
        let mut uses: HashMap<ValueId, u32> = HashMap::new();
        let read = compiled.steps.iter().flat_map(|step| &step.inputs);
        read.chain(compiled.writes.iter().map(|(_, v)| v)).for_each(|&v| *uses.entry(v).or_default() += 1);
        let begins = |step: &Step| match &step.kernel {
            Kernel::Collective { collective, .. } => uses[&step.inputs[0]] == 1 && can_begin(collective),
            _ => false,
        };
        for (at, step) in compiled.steps.iter().enumerate().filter(|(_, step)| begins(step)) {
            let is_it = |leaf: &&Leaf| leaf.value == step.inputs[0] && !touched.contains(&leaf.buffer);
            let Some(leaf) = compiled.leaves.iter().find(is_it) else { continue };
            if !matches!(program.buffer(leaf.buffer).kind, BufferKind::Accumulator { .. }) {
                continue;
            }
            let operand = Operand::Sum { leaf: leaf.value, buffer: leaf.buffer };
            all.push(AsyncCollective { position, body, step: at, operand });
            let mut result = step.outputs[0].value;
            while let Some((at, step)) =
                compiled.steps.iter().enumerate().find(|(_, step)| step.inputs.first() == Some(&result) && begins(step))
            {
                all.push(AsyncCollective { position, body, step: at, operand: Operand::Before });
                result = step.outputs[0].value;
            }
        }
        touched.extend(compiled.leaves.iter().map(|leaf| leaf.buffer));
        touched.extend(compiled.writes.iter().map(|(buffer, _)| *buffer));
    }
    (first, all)
}

/// A collective that this device has begun. Sent and received messages do not count as memory of the device.
pub struct Begun {
    ranks: Vec<usize>,
    me: usize,
    dtype: DType,
    reducer: Reducer,
    arena: Arc<Arena>,
    /// Number of elements of the operand.
    elements: usize,
    round: Round,
    /// The data of each member in this round, this device's own included.
    pieces: Vec<Option<Vec<u64>>>,
}

/// The kind of data that members send in a round.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Round {
    /// Reduce-scatter: terms of the part that the receiver reduces and keeps.
    Parts,
    /// All-reduce, first round: terms of the part that the receiver reduces for all.
    Terms,
    /// All-reduce, second round: reduced parts.
    Sums,
}

/// Returns whether a collective can run asynchronously, or needs no other device.
fn can_begin(collective: &Collective) -> bool {
    use Collective::{AllReduce, KeepFirst, LocalSlice, ReduceScatter};
    matches!(collective, AllReduce { .. } | ReduceScatter { .. } | LocalSlice { .. } | KeepFirst { .. })
}

impl Begun {
    /// Begins a collective on an operand of `shape` and consumes it. Returns the operand if this collective does not
    /// run asynchronously; all members decide alike.
    pub fn new(
        member: &Member<'_>,
        collective: &Collective,
        dtype: DType,
        shape: &[usize],
        operand: Arc<Storage>,
    ) -> Result<Begun, Arc<Storage>> {
        let n = member.ranks.len();
        let class = Class::of(dtype);
        let elements: usize = shape.iter().product();
        if n == 1 || !member.mailbox.copies() {
            return Err(operand);
        }
        let mut begun = Begun {
            ranks: member.ranks.clone(),
            me: member.me,
            dtype,
            reducer: Reducer::Sum,
            arena: operand.arena().clone(),
            elements,
            round: Round::Terms,
            pieces: vec![None; n],
        };
        match collective {
            Collective::AllReduce { reducer, .. } => {
                begun.reducer = *reducer;
                let bytes = |to: usize| {
                    let range = range_of(elements, n, to);
                    range.start * class.bytes()..range.end * class.bytes()
                };
                begun.send(member.mailbox, |to| words_of(&operand.slice::<u8>()[bytes(to)]));
            }
            Collective::ReduceScatter { reducer, dim, outer, .. } => {
                (begun.reducer, begun.round) = (*reducer, Round::Parts);
                let blocks = Blocks::of_part(shape, *dim, *outer, n);
                let dims = [(blocks.count, blocks.length * n, blocks.length), (blocks.length, 1, 1)];
                begun.send(member.mailbox, |to| {
                    let mut words = vec![0u64; (elements / n * class.bytes()).div_ceil(8)];
                    let copy = Copy::new(to * blocks.length, 0, dims);
                    with_width!(class, T => {
                        let target = &mut bytemuck::cast_slice_mut::<u64, T>(&mut words)[..elements / n];
                        copy.run(operand.slice::<T>(), target);
                    });
                    words
                });
            }
            _ => return Err(operand),
        }
        Ok(begun)
    }

    fn send(&mut self, mailbox: &Mailbox, piece: impl Fn(usize) -> Vec<u64>) {
        for (i, &rank) in self.ranks.iter().enumerate() {
            self.pieces[i] = None;
            match i == self.me {
                true => self.pieces[i] = Some(piece(i)),
                false => mailbox.send(rank, Tag::AsyncCollectives, Payload::Words(piece(i))),
            }
        }
    }

    /// Takes the messages that have arrived and sends those of the next round. Returns the result once it is complete;
    /// with `wait`, blocks until then.
    pub fn advance(&mut self, mailbox: &mut Mailbox, wait: bool) -> Result<Option<Storage>, KernelError> {
        loop {
            let missing = (0..self.ranks.len()).filter(|&i| self.pieces[i].is_none()).collect::<Vec<_>>();
            for i in missing {
                let payload = match wait {
                    true => Some(mailbox.receive(self.ranks[i], Tag::AsyncCollectives)?),
                    false => mailbox.try_receive_behind(self.ranks[i])?,
                };
                match payload {
                    Some(Payload::Words(words)) => self.pieces[i] = Some(words),
                    Some(_) => return Err(KernelError::Disconnected),
                    // Members later in the group may have arrived, and taking their pieces now makes room for the next
                    // round.
                    None => {}
                }
            }
            if self.pieces.iter().any(Option::is_none) {
                return Ok(None);
            }
            let pieces: Vec<Vec<u64>> = self.pieces.iter_mut().filter_map(Option::take).collect();
            let (class, n) = (Class::of(self.dtype), self.ranks.len());
            match self.round {
                Round::Parts => {
                    let mut result = self.arena.allocate(class, self.elements / n)?;
                    self.add_up(&pieces, &mut result)?;
                    return Ok(Some(result));
                }
                Round::Terms => {
                    // The sums are in transit here, so they do not count as memory of the device.
                    let mut sums = Arena::new(None).allocate(class, range_of(self.elements, n, self.me).len())?;
                    self.add_up(&pieces, &mut sums)?;
                    self.round = Round::Sums;
                    self.send(mailbox, |_| words_of(sums.slice::<u8>()));
                }
                Round::Sums => {
                    let mut result = self.arena.allocate(class, self.elements)?;
                    for (i, words) in pieces.iter().enumerate() {
                        let range = range_of(self.elements, n, i);
                        let bytes = range.start * class.bytes()..range.end * class.bytes();
                        let piece = bytemuck::cast_slice::<u64, u8>(words);
                        expect_bytes(piece, bytes.len())?;
                        let length = bytes.len();
                        result.slice_mut::<u8>()[bytes].copy_from_slice(&piece[..length]);
                    }
                    return Ok(Some(result));
                }
            }
        }
    }

    /// Reduces the data of all members, in the order of the group.
    fn add_up(&self, pieces: &[Vec<u64>], target: &mut Storage) -> Result<(), KernelError> {
        for piece in pieces {
            expect_bytes(bytemuck::cast_slice(piece), target.bytes())?;
        }
        with_class!(Class::of(self.dtype), T => {
            let target = target.slice_mut::<T>();
            let terms: Vec<&[T]> = pieces.iter().map(|p| &bytemuck::cast_slice::<u64, T>(p)[..target.len()]).collect();
            reduce(&terms, 0, target, self.reducer, self.dtype);
        });
        Ok(())
    }
}
