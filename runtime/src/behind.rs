//! Collectives that go on behind what their devices compute: each is begun, which sends and does not wait, and ended where its result is
//! needed. Only members that send copies begin any; what they add up has the same bits as where they wait for each other. They are
//! those of late calls that need nothing but sums of gradients, which are there when a step ends.

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

/// A collective of a late call that can be begun as soon as the step before has ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Early {
    /// Of the call in the schedule.
    pub position: usize,
    pub body: u32,
    /// Of the body's steps.
    pub step: usize,
    pub operand: Operand,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Operand {
    /// A sum of gradients, which nobody else needs until it begins anew.
    Sum { leaf: ValueId, buffer: BufferId },
    /// What the collective before it in the list gives, which nobody else needs.
    Before,
}

/// What goes on of the step before while the calls of a step are made.
#[derive(Default)]
pub struct Behind {
    /// Whether anything does in this step.
    pub on: bool,
    /// In the list, the one that is under way or to be begun; results of those before it have come.
    pub next: usize,
    pub begun: Option<Begun>,
    pub since: Option<Start>,
    /// The operand of the next one, where that is a result.
    pub carried: Option<Arc<Storage>>,
    /// By call and step, until these take them.
    pub results: HashMap<(usize, usize), Arc<Storage>>,
}

/// The collectives of a program's late calls that can be begun early, in the order in which all devices of the program run them, and the
/// first of the calls that are made once a step, before which all late calls must have been made.
pub fn early(
    program: &Program,
    bodies: &[Compiled],
    transfers: &[(Transfer, Arc<Vec<Message>>)],
) -> (usize, Vec<Early>) {
    let once = |position: &usize| match program.schedule[*position] {
        Call::Run { body, .. } => !program.bodies[body as usize].phase.is_of_microbatch(),
        Call::Send { .. } | Call::Receive { .. } => false,
    };
    let first = (program.num_prompt()..program.schedule.len()).find(once).unwrap_or(program.schedule.len());
    let mut all = Vec::new();
    // What calls in between read or write is not what the step before left, or is still needed.
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
            all.push(Early { position, body, step: at, operand });
            let mut result = step.outputs[0].value;
            while let Some((at, step)) =
                compiled.steps.iter().enumerate().find(|(_, step)| step.inputs.first() == Some(&result) && begins(step))
            {
                all.push(Early { position, body, step: at, operand: Operand::Before });
                result = step.outputs[0].value;
            }
        }
        touched.extend(compiled.leaves.iter().map(|leaf| leaf.buffer));
        touched.extend(compiled.writes.iter().map(|(buffer, _)| *buffer));
    }
    (first, all)
}

/// A collective that this device has begun. What was sent and what has come is no part of what the device holds.
pub struct Begun {
    ranks: Vec<usize>,
    me: usize,
    dtype: DType,
    reducer: Reducer,
    arena: Arc<Arena>,
    /// Of the operand.
    elements: usize,
    round: Round,
    /// What each member has sent in this round, with what this device has itself.
    pieces: Vec<Option<Vec<u64>>>,
}

/// What members send each other.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Round {
    /// Terms of the part that a member adds up and alone is to have.
    Parts,
    /// Terms of the part that a member adds up for all.
    Terms,
    /// Parts that were added up.
    Sums,
}

/// Whether a collective need not be waited for where it begins, or needs nobody else.
fn can_begin(collective: &Collective) -> bool {
    use Collective::{AllReduce, KeepFirst, LocalSlice, ReduceScatter};
    matches!(collective, AllReduce { .. } | ReduceScatter { .. } | LocalSlice { .. } | KeepFirst { .. })
}

impl Begun {
    /// Begins a collective on the operand of `shape`, which is let go of; gives it back where it is none that goes on behind others.
    /// All members decide alike.
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
                false => mailbox.send(rank, Tag::Behind, Payload::Words(piece(i))),
            }
        }
    }

    /// Takes what has come, and sends what follows from it. The result where all has come, for which it waits if it is to.
    pub fn advance(&mut self, mailbox: &mut Mailbox, wait: bool) -> Result<Option<Storage>, KernelError> {
        loop {
            let missing = (0..self.ranks.len()).filter(|&i| self.pieces[i].is_none()).collect::<Vec<_>>();
            for i in missing {
                let payload = match wait {
                    true => Some(mailbox.receive(self.ranks[i], Tag::Behind)?),
                    false => mailbox.try_receive_behind(self.ranks[i])?,
                };
                match payload {
                    Some(Payload::Words(words)) => self.pieces[i] = Some(words),
                    Some(_) => return Err(KernelError::Disconnected),
                    // Those that come later in the group may be there, and give the next round's room.
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
                    // Sums are on their way before the device holds any.
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

    /// The reduction of what all members sent, in the order of the group.
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
