//! A session of one rank. It runs the rank's device on the calling thread. With the other ranks, it combines the
//! results of steps and assembles tensors on the first rank.

use crate::arena::Arena;
use crate::check::{check, checked_inputs, step_loss};
use crate::collective::words_of;
use crate::device::{Command, Device, Reply, ResultPart};
use crate::element::Class;
use crate::error::{KernelError, Place, RanksError, RuntimeError, WatchError};
use crate::host::{HostData, HostTensor};
use crate::layout::mark_rows;
use crate::mailbox::{Mailbox, Payload, Tag};
use crate::mpi::sys::Communicator;
use crate::mpi::wire::RankWire;
use crate::ranks::connect::{Address, Channel, Hello, Hub};
use crate::ranks::watch::{Ends, Peer, Watch};
use crate::ranks::{Carrier, Layout, World};
use crate::recording::{Recording, Span, What};
use crate::roster::{Holder, Roster, first_ranks};
use crate::session::StepReport;
use crate::work::threads_of_device;
use altiplano_ir::graph::ValueId;
use altiplano_ir::program::{Buffer, BufferId, BufferKind, Programs};
use mpi::Threading;
use mpi::environment::Universe;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Options of a rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankOptions {
    /// Sum in the order of groups, as threads do, for bitwise equal results.
    pub in_order: bool,
    /// Cores shared by the ranks of this machine; all of them if absent.
    pub cores: Option<usize>,
    pub memory_limit_bytes: Option<u64>,
    pub check_nan: bool,
}

/// A process that is a rank, before it has a plan.
pub struct Started {
    all: Communicator,
    universe: Universe,
}

/// The carrier of words among all ranks, in the launcher's order. Dropping it finalises MPI.
struct Universal {
    all: Arc<Communicator>,
    _universe: Universe,
}

/// This rank's part of running programs.
pub struct RankSession {
    world: World,
    /// All ranks, in the order of the plan's programs.
    all: Arc<Communicator>,
    /// Position among them of the rank that leads, the launcher's first.
    lead: usize,
    roster: Roster,
    /// The program that this rank runs.
    own: usize,
    device: Device,
    arena: Arc<Arena>,
    spans: Vec<Span>,
    /// Steps in progress: their start times, and this rank's reports.
    begun: VecDeque<(Instant, Vec<u64>)>,
    last_end: Option<Instant>,
}

/// Programs for evaluation that run on the ranks of a session between its steps: the session's model run forward, with
/// the weights on its devices.
pub struct RankEvaluation {
    roster: Roster,
    /// The program that this rank runs.
    own: usize,
    device: Device,
    /// Pairs of buffers: weights of the session's device, and the buffers that read them here. Other ranks send all
    /// other weights.
    weights: Vec<(BufferId, BufferId)>,
}

/// First number of the messages of an evaluation. It keeps them apart from those of a step in progress.
const MESSAGES_OF_EVALUATION: u32 = 1 << 31;

impl Started {
    /// Makes this process a rank of those that were started together.
    pub fn new() -> Result<Started, RuntimeError> {
        let (universe, threading) =
            mpi::initialize_with_threading(Threading::Funneled).ok_or_else(|| ranks(RanksError::Threads))?;
        if threading < Threading::Funneled {
            return Err(ranks(RanksError::Threads));
        }
        let all = Communicator::world(&universe).map_err(RuntimeError::Carrier)?;
        Ok(Started { all, universe })
    }

    /// Rank in the launcher's numbering.
    pub fn rank(&self) -> usize {
        self.all.rank
    }

    pub fn size(&self) -> usize {
        self.all.size
    }

    /// Starts to watch all ranks before any has read its inputs. Devices communicate over the returned communicator.
    pub fn watched(self, lost_after: Duration, ends: Ends) -> Result<(World, Arc<Communicator>), RuntimeError> {
        let Started { all, universe } = self;
        let watch_error = |error: WatchError| RuntimeError::Watch(Box::new(error));
        let hosts = all.tell_text(&host_name()).map_err(RuntimeError::Carrier)?;
        let hello = Hello {
            channel: Channel::Watch,
            rank: all.rank,
            size: all.size,
            pid: std::process::id(),
            host: host_name(),
        };
        let peer = |(rank, host): (usize, String)| Peer { rank, host };
        let peers: Vec<Peer> = hosts.into_iter().enumerate().map(peer).collect();
        let hub = if all.rank == 0 { Some(Hub::listen().map_err(watch_error)?) } else { None };
        let said = hub.as_ref().map(|hub| hub.address.encode()).unwrap_or_default();
        let address = Address::decode(&all.tell_text(&said).map_err(RuntimeError::Carrier)?[0]);
        let address = address.ok_or_else(|| watch_error(WatchError::NoAddress))?;
        let links = match hub {
            Some(hub) => hub.all(all.size),
            None => address.join(&hello).map(|stream| vec![(0, stream)]),
        };
        let watch =
            Watch::start(all.rank, peers, links.map_err(watch_error)?, lost_after, ends).map_err(watch_error)?;
        let nodes = nodes(&all).map_err(RuntimeError::Carrier)?;
        let all = Arc::new(all);
        let carrier = Universal { all: all.clone(), _universe: universe };
        Ok((World::new(Box::new(carrier), watch, nodes)?, all))
    }
}

impl Carrier for Universal {
    fn rank(&self) -> usize {
        self.all.rank
    }

    fn size(&self) -> usize {
        self.all.size
    }

    fn tell(&self, words: &[u64]) -> Result<Vec<Vec<u64>>, KernelError> {
        self.all.tell(words)
    }

    fn gather(&self, words: Vec<u64>) -> Result<Option<Vec<Vec<u64>>>, KernelError> {
        self.all.gather(words)
    }
}

/// For each rank, the first rank of its machine.
fn nodes(all: &Communicator) -> Result<Vec<usize>, KernelError> {
    let first = all.node()?.tell(&[all.rank as u64])?[0][0];
    Ok(all.tell(&[first])?.iter().map(|words| words[0] as usize).collect())
}

/// The ranks in the order of the programs' devices.
fn placed(
    world: &World,
    all: &Communicator,
    programs: &Programs,
    layout: &Layout,
) -> Result<Communicator, RuntimeError> {
    let device = layout.devices(world.nodes()).map_err(ranks)?[all.rank];
    let mut devices = programs.programs.iter().flat_map(|program| &program.devices);
    let place = devices.position(|&id| id == device);
    let count = programs.programs.iter().map(|program| program.devices.len()).sum::<usize>();
    let place = place.filter(|_| count == all.size).ok_or_else(|| ranks(RanksError::Devices))?;
    all.ordered(place).map_err(RuntimeError::Carrier)
}

impl RankEvaluation {
    /// As [`RankSession::mark_rows`], for the evaluated programs.
    pub fn mark_rows(&self, input: &str, dim: usize, read: &mut [bool]) {
        mark_rows(&self.roster.plans[self.own].program, self.device.position, input, dim, read);
    }
}

impl RankSession {
    /// Checks the programs, compiles this rank's, and creates its device. All parameters and state are zero.
    pub fn new(
        world: World,
        all: &Communicator,
        programs: &Programs,
        layout: &Layout,
        options: &RankOptions,
    ) -> Result<RankSession, RuntimeError> {
        check(programs)?;
        let all = Arc::new(placed(&world, all, programs, layout)?);
        let leads = all.tell(&[u64::from(world.leads())]).map_err(RuntimeError::Carrier)?;
        let lead = leads.iter().position(|words| words[0] == 1).unwrap_or(0);
        let rank = all.rank;
        let own = first_ranks(programs).iter().rposition(|&first| first <= rank).unwrap_or(0);
        let roster = Roster::new(programs, options.check_nan, |p| p == own);
        let plan = roster.plans[own].clone();
        let position = rank - roster.ranks(own).start;
        let id = plan.program.devices[position];
        let cores = options.cores.or_else(|| std::thread::available_parallelism().ok().map(|n| n.get())).unwrap_or(1);
        let arena = Arena::new(options.memory_limit_bytes);
        let mailbox = Mailbox::of_rank(RankWire::new(all.clone(), options.in_order, world.watch()));
        let failed = |error: KernelError| {
            let activity = "allocating parameters and state".to_string();
            let place = Place { device: id, program: own as u32, activity, microbatch: None, op: None };
            RuntimeError::Device { place: Box::new(place), error }
        };
        let threads = threads_of_device(cores, world.local());
        let mut device = Device::new(id, position as u32, plan, arena.clone(), mailbox, threads).map_err(failed)?;
        device.allocate_persistent().map_err(failed)?;
        let (spans, begun, last_end) = (Vec::new(), VecDeque::new(), None);
        Ok(RankSession { world, all, lead, roster, own, device, arena, spans, begun, last_end })
    }

    pub fn world(&self) -> &World {
        &self.world
    }

    /// Ends the session and finalises MPI.
    pub fn finish(self) -> Result<(), RuntimeError> {
        let RankSession { world, all, device, .. } = self;
        drop((device, all));
        world.finish()
    }

    /// Returns whether this rank holds a part of a parameter.
    pub fn holds(&self, name: &str) -> bool {
        self.roster.parameter(name).is_ok_and(|holders| holders.iter().any(|&(p, _)| p == self.own))
    }

    /// Marks the rows of an input that this rank reads; see [`mark_rows`].
    pub fn mark_rows(&self, input: &str, dim: usize, read: &mut [bool]) {
        mark_rows(&self.roster.plans[self.own].program, self.device.position, input, dim, read);
    }

    /// Loads this rank's part of a parameter, and of its `master` state.
    pub fn load_parameter(&mut self, name: &str, tensor: &HostTensor) -> Result<(), RuntimeError> {
        let holders = [self.roster.parameter(name)?, self.roster.masters(name)].concat();
        self.load(name, &holders, tensor)
    }

    pub fn load_state(&mut self, parameter: &str, slot: &str, tensor: &HostTensor) -> Result<(), RuntimeError> {
        let holders = self.roster.state(parameter, slot)?;
        self.load(&format!("{parameter}/{slot}"), &holders, tensor)
    }

    fn load(&mut self, name: &str, holders: &[Holder], tensor: &HostTensor) -> Result<(), RuntimeError> {
        for ((_, buffer), tensor) in self.roster.cast(name, holders, tensor, |p| p == self.own)? {
            self.device.answer_here(Command::Load { buffer, tensor })?;
        }
        Ok(())
    }

    /// Assembles a parameter on the first rank; returns `None` on the others. All ranks must call it.
    pub fn parameter(&mut self, name: &str) -> Result<Option<HostTensor>, RuntimeError> {
        let holders = self.roster.parameter(name)?;
        self.gather(holders[0])
    }

    pub fn state(&mut self, parameter: &str, slot: &str) -> Result<Option<HostTensor>, RuntimeError> {
        let holders = self.roster.state(parameter, slot)?;
        self.gather(holders[0])
    }

    fn gather(&mut self, (p, buffer): Holder) -> Result<Option<HostTensor>, RuntimeError> {
        let plan = self.roster.plans[p].clone();
        let (me, lead) = (self.all.rank, self.lead);
        let mine = if p == self.own && !plan.repeats(buffer, me) {
            match self.device.answer_here(Command::Fetch { buffer })? {
                Reply::Fetched(part) => Some(part.data),
                _ => None,
            }
        } else {
            None
        };
        let mailbox = &mut self.device.mailbox;
        if me != lead {
            if let Some(part) = mine {
                mailbox.send(lead, Tag::Channel, Payload::Words(words_of(part.as_bytes())));
                // Send one tensor at a time, even if the first rank is far behind.
                mailbox.ranks().map_or(Ok(()), |wire| wire.flush()).map_err(RuntimeError::Carrier)?;
            }
            return Ok(None);
        }
        let description = plan.program.buffer(buffer);
        let part_ty = description.sharding.local_type(&description.ty, &plan.program.mesh);
        let bytes = part_ty.elements() as usize * Class::of(part_ty.dtype).bytes();
        let mut whole = HostTensor::zeros(description.ty.clone());
        for rank in self.roster.ranks(p).filter(|&rank| !plan.repeats(buffer, rank)) {
            if rank == me {
                mine.iter().for_each(|part| plan.place_part(buffer, rank, part, &mut whole));
                continue;
            }
            let Payload::Words(words) = mailbox.receive(rank, Tag::Channel).map_err(RuntimeError::Carrier)? else {
                return Err(RuntimeError::Carrier(KernelError::Disconnected));
            };
            if words.len() != bytes.div_ceil(8) {
                let error = KernelError::MessageSize { expected: bytes, found: 8 * words.len() };
                return Err(RuntimeError::Carrier(error));
            }
            let part = HostData::from_bytes(Class::of(part_ty.dtype), &bytemuck::cast_slice(&words)[..bytes]);
            plan.place_part(buffer, rank, &part, &mut whole);
        }
        Ok(Some(whole.out_of(description)))
    }

    /// Returns whether a step begins before the previous one has ended. If so, call [`RankSession::begin_step`] ahead
    /// of [`RankSession::end_step`].
    pub fn overlaps(&self) -> bool {
        self.roster.plans.iter().any(|plan| plan.program.runs_ahead())
    }

    /// Runs this rank's part of one step on a global batch, without waiting for the other ranks. `said` is a value for
    /// all ranks; 0 means nothing.
    pub fn begin_step(
        &mut self,
        inputs: &BTreeMap<String, HostTensor>,
        scalars: &BTreeMap<String, f64>,
        said: u64,
    ) -> Result<(), RuntimeError> {
        let plan = &self.roster.plans[self.own];
        let inputs = Arc::new(checked_inputs([&plan.program], plan.num_microbatches, inputs, scalars)?);
        if let Some(wire) = self.device.mailbox.ranks() {
            wire.step = scalars.get("step").map_or(0, |&step| step as u64);
        }
        let start = Instant::now();
        let command = Command::Step { inputs, scalars: Arc::new(scalars.clone()), results: false, origin: Some(start) };
        let mut words = vec![said];
        if let Reply::Stepped { losses, spans, .. } = self.device.answer_here(command)? {
            words.extend(losses.iter().map(|loss| loss.to_bits()));
            self.spans = spans;
        }
        if self.overlaps() {
            let mailbox = &self.device.mailbox;
            for to in (0..self.roster.num_ranks()).filter(|&to| to != mailbox.rank) {
                mailbox.send(to, Tag::Report, Payload::Words(words.clone()));
            }
        }
        self.begun.push_back((start, words));
        Ok(())
    }

    /// Waits for the oldest step in progress. Returns its report over all ranks and the largest `said` of any rank. The
    /// loss is the same on all ranks.
    pub fn end_step(&mut self) -> Result<(StepReport, u64), RuntimeError> {
        let (start, words) = self.begun.pop_front().ok_or(RuntimeError::NoStep)?;
        let all = if self.overlaps() {
            let mailbox = &mut self.device.mailbox;
            let mut heard = |rank: usize| {
                if rank == mailbox.rank {
                    return Ok(words.clone());
                }
                match mailbox.receive(rank, Tag::Report).map_err(RuntimeError::Carrier)? {
                    Payload::Words(words) => Ok(words),
                    _ => Err(RuntimeError::Carrier(KernelError::Disconnected)),
                }
            };
            (0..self.roster.num_ranks()).map(&mut heard).collect::<Result<Vec<_>, _>>()?
        } else {
            let all = self.all.tell(&words).map_err(RuntimeError::Carrier)?;
            // All ranks have completed the step, so all of its messages were received.
            self.device.mailbox.ranks().map_or(Ok(()), |wire| wire.flush()).map_err(RuntimeError::Carrier)?;
            all
        };
        let start = self.last_end.map_or(start, |end| end.max(start));
        self.last_end = Some(Instant::now());
        let seconds = start.elapsed().as_secs_f64();
        let said = all.iter().filter_map(|words| words.first().copied()).max().unwrap_or(0);
        let losses: Vec<f64> = all.iter().flat_map(|words| words.iter().skip(1)).map(|&w| f64::from_bits(w)).collect();
        let loss = step_loss(&losses, self.roster.loss_is_mean);
        let report = StepReport { loss, losses, seconds, peak_bytes: Vec::new(), recordings: Vec::new() };
        Ok((report, said))
    }

    /// Prepares programs that run this session's model forward on the same ranks. Each device uses its weights here, in
    /// the same layout, except for those that it receives.
    pub fn evaluation(&self, programs: &Programs) -> Result<RankEvaluation, RuntimeError> {
        check(programs)?;
        let trained = self.roster.plans[self.own].clone();
        let roster = Roster::new(programs, trained.check_nan, |p| p == self.own);
        let devices = |roster: &Roster| roster.plans.iter().map(|p| p.program.devices.clone()).collect::<Vec<_>>();
        if devices(&roster) != devices(&self.roster) {
            return Err(ranks(RanksError::Devices));
        }
        let plan = roster.plans[self.own].clone();
        let mut weights = Vec::new();
        let receives = |id: BufferId| programs.transfers.iter().any(|t| t.target == (self.own as u32, id));
        for (id, buffer) in (0u32..).map(BufferId).zip(&plan.program.buffers) {
            let BufferKind::Parameter { name } = &buffer.kind else { continue };
            if receives(id) {
                continue;
            }
            let is_it = |b: &&Buffer| b.kind == buffer.kind && (&b.ty, &b.sharding) == (&buffer.ty, &buffer.sharding);
            let held = trained.program.buffers.iter().position(|b| is_it(&b));
            let unknown = || RuntimeError::UnknownParameter { name: name.clone() };
            weights.push((BufferId(held.ok_or_else(unknown)? as u32), id));
        }
        let Device { id, position, threads, .. } = self.device;
        // A placeholder: while the device runs, it uses the session's mailbox.
        let mailbox = Mailbox::network(1, false).pop().ok_or(RuntimeError::Stopped)?;
        let place = |error| {
            let activity = "preparing to evaluate".to_string();
            let place = Place { device: id, program: self.own as u32, activity, microbatch: None, op: None };
            RuntimeError::Device { place: Box::new(place), error }
        };
        let mut device = Device::new(id, position, plan, Arena::new(None), mailbox, threads).map_err(place)?;
        device.first_message = MESSAGES_OF_EVALUATION;
        Ok(RankEvaluation { roster, own: self.own, device, weights })
    }

    /// Returns the first result of the model for each microbatch of a global batch. It must be a scalar, such as a
    /// loss. All ranks get the same values, and must call this at the same point between steps.
    pub fn evaluate(
        &mut self,
        evaluation: &mut RankEvaluation,
        inputs: &BTreeMap<String, HostTensor>,
    ) -> Result<Vec<f64>, RuntimeError> {
        let RankEvaluation { roster, device, weights, .. } = evaluation;
        let plan = roster.plans[self.own].clone();
        let inputs = Arc::new(checked_inputs([&plan.program], plan.num_microbatches, inputs, &BTreeMap::new())?);
        for &(held, read) in &*weights {
            device.hold(read, self.device.lend(held).map_err(RuntimeError::Carrier)?);
        }
        let command = Command::Step { inputs, scalars: Arc::default(), results: true, origin: None };
        std::mem::swap(&mut self.device.mailbox, &mut device.mailbox);
        let reply = device.answer_here(command);
        std::mem::swap(&mut self.device.mailbox, &mut device.mailbox);
        // Drop the shared weights; otherwise the next update would have to copy them.
        device.give_back();
        let mut words: Vec<u64> = Vec::new();
        if let Reply::Stepped { results, .. } = reply? {
            for ResultPart { buffer, microbatch, part } in results {
                let is_first = plan.program.buffer(buffer).kind == BufferKind::Output { index: 0 };
                if let (true, Some(&value)) = (is_first, part.to_f64().first())
                    && !plan.repeats(buffer, self.all.rank)
                {
                    words.extend([microbatch.map_or(0, |m| u64::from(m) + 1), value.to_bits()]);
                }
            }
        }
        let all = self.all.tell(&words).map_err(RuntimeError::Carrier)?;
        self.device.mailbox.ranks().map_or(Ok(()), |wire| wire.flush()).map_err(RuntimeError::Carrier)?;
        let told = all.iter().flat_map(|words| words.chunks_exact(2)).map(|pair| (pair[0], f64::from_bits(pair[1])));
        Ok(told.collect::<BTreeMap<u64, f64>>().into_values().collect())
    }

    /// Runs the remaining calls of the last step, so that all gradients reach the weights. All ranks must call it, and
    /// none may have a step in progress.
    pub fn flush(&mut self) -> Result<(), RuntimeError> {
        if self.overlaps() {
            self.device.answer_here(Command::Flush)?;
            self.world.meet()?;
            self.device.mailbox.ranks().map_or(Ok(()), |wire| wire.flush()).map_err(RuntimeError::Carrier)?;
        }
        Ok(())
    }

    /// Peak bytes held by each device so far, by its id; all ranks must call it.
    pub fn peak_bytes(&self) -> Result<Vec<u64>, RuntimeError> {
        let mine = [u64::from(self.device.id), self.arena.peak_bytes()];
        let all = self.all.tell(&mine).map_err(RuntimeError::Carrier)?;
        let mut peaks = vec![0; all.len()];
        for words in all {
            if let Some(peak) = peaks.get_mut(words[0] as usize) {
                *peak = words[1];
            }
        }
        Ok(peaks)
    }

    /// The timelines of the first device of each program in the last step; all ranks must call it.
    pub fn recordings(&self) -> Result<Vec<Recording>, RuntimeError> {
        let spans: &[Span] = if self.device.position == 0 { &self.spans } else { &[] };
        let words: Vec<u64> = spans.iter().flat_map(span_words).collect();
        let all = self.all.tell(&words).map_err(RuntimeError::Carrier)?;
        let of_program = |p: usize| {
            let words = all.get(self.roster.ranks(p).start).map_or(&[][..], Vec::as_slice);
            Recording { program: p as u32, spans: words.chunks_exact(SPAN).map(span_of).collect() }
        };
        Ok((0..self.roster.plans.len()).map(of_program).collect())
    }
}

fn ranks(error: RanksError) -> RuntimeError {
    RuntimeError::Ranks(Box::new(error))
}

fn host_name() -> String {
    mpi::environment::processor_name().unwrap_or_else(|_| "an unnamed host".to_string())
}

/// Flag on nodes that marks asynchronous collectives.
const BEHIND: u64 = 1 << 32;
/// Number of words of a span.
const SPAN: usize = 6;

fn span_words(span: &Span) -> [u64; SPAN] {
    let Span { what, start_s, end_s, waited_s, held_bytes } = *span;
    let (position, node) = match what {
        What::Call { position } => (position as u64, 0),
        What::Behind { position, node } => (position as u64, BEHIND | node.index() as u64),
        What::Kernel { position, node } => (position as u64, node.index() as u64 + 1),
    };
    [position, node, start_s.to_bits(), end_s.to_bits(), waited_s.to_bits(), held_bytes]
}

fn span_of(words: &[u64]) -> Span {
    let position = words[0] as usize;
    let what = match words[1].checked_sub(1) {
        None => What::Call { position },
        _ if words[1] & BEHIND != 0 => What::Behind { position, node: ValueId(words[1] as u32) },
        Some(node) => What::Kernel { position, node: ValueId(node as u32) },
    };
    let [start_s, end_s, waited_s] = [words[2], words[3], words[4]].map(f64::from_bits);
    Span { what, start_s, end_s, waited_s, held_bytes: words[5] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_read_as_they_were_written() {
        for what in [
            What::Call { position: 3 },
            What::Behind { position: 4, node: ValueId(5) },
            What::Kernel { position: 9, node: ValueId(0) },
        ] {
            let span = Span { what, start_s: 0.25, end_s: 0.5, waited_s: 0.125, held_bytes: 17 };
            assert_eq!(span_of(&span_words(&span)), span);
        }
    }
}
