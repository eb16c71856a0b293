//! Sessions whose devices are MPI ranks, one each.

use crate::arena::Arena;
use crate::check::check;
use crate::device::{Command, Device, Reply};
use crate::error::{KernelError, RanksError, RuntimeError, WatchError};
use crate::mailbox::{Mailbox, Payload, Tag};
use crate::mpi::sys::Communicator;
use crate::mpi::wire::RankWire;
use crate::ranks::connect::{Address, Channel, Hello, Hub, Listen};
use crate::ranks::watch::{Ends, Peer, Watch};
use crate::ranks::{Carrier, Layout, World};
use crate::roster::{Roster, first_ranks};
use crate::session::{Devices, Session};
use crate::work::threads_of_device;
use altiplano_ir::program::Programs;
use mpi::Threading;
use mpi::environment::Universe;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

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

/// The device of this rank. It runs on the calling thread, which is the one that may call MPI.
struct Rank {
    world: World,
    device: Device,
    replies: VecDeque<Reply>,
}

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
        let nodes = nodes(&all).map_err(RuntimeError::Carrier)?;
        let at = if nodes.iter().all(|&node| node == 0) { Listen::Loopback } else { Listen::Everywhere };
        let hub = if all.rank == 0 { Some(Hub::listen(at).map_err(watch_error)?) } else { None };
        let said = hub.as_ref().map(|hub| hub.address.encode()).unwrap_or_default();
        let address = Address::decode(&all.tell_text(&said).map_err(RuntimeError::Carrier)?[0]);
        let address = address.ok_or_else(|| watch_error(WatchError::NoAddress))?;
        let links = match hub {
            Some(hub) => hub.all(all.size),
            None => address.join(&hello).map(|stream| vec![(0, stream)]),
        };
        let watch =
            Watch::start(all.rank, peers, links.map_err(watch_error)?, lost_after, ends).map_err(watch_error)?;
        let all = Arc::new(all);
        let carrier = Universal { all: all.clone(), _universe: universe };
        Ok((World::new(Box::new(carrier), watch, nodes, at)?, all))
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

impl Session {
    /// Checks the programs, compiles this rank's, and creates its device. All parameters and state are zero.
    pub fn on_ranks(
        world: World,
        all: &Communicator,
        programs: &Programs,
        layout: &Layout,
        options: &RankOptions,
    ) -> Result<Session, RuntimeError> {
        check(programs)?;
        let all = Arc::new(placed(&world, all, programs, layout)?);
        let rank = all.rank;
        let own = first_ranks(programs).iter().rposition(|&first| first <= rank).unwrap_or(0);
        let roster = Roster::new(programs, options.check_nan, |p| p == own);
        let plan = roster.plans[own].clone();
        let position = rank - roster.ranks(own).start;
        let id = plan.program.devices[position];
        let cores = options.cores.or_else(|| std::thread::available_parallelism().ok().map(|n| n.get())).unwrap_or(1);
        let arena = Arena::new(options.memory_limit_bytes);
        let mailbox = Mailbox::of_rank(RankWire::new(all, options.in_order, world.watch()));
        let threads = threads_of_device(cores, world.local());
        let device = Device::with_zeros(id, position as u32, plan, arena, mailbox, threads)?;
        Ok(Session::over(roster, Box::new(Rank { world, device, replies: VecDeque::new() }), true))
    }
}

impl Rank {
    /// Waits until all messages of this rank have been sent.
    fn sent(&mut self) -> Result<(), RuntimeError> {
        self.device.mailbox.ranks().map_or(Ok(()), |wire| wire.flush()).map_err(RuntimeError::Carrier)
    }
}

impl Devices for Rank {
    fn ranks(&self) -> Vec<usize> {
        vec![self.device.mailbox.rank]
    }

    fn send(&mut self, _: usize, command: Command) -> Result<(), RuntimeError> {
        if let (Command::Step { scalars, .. }, Some(wire)) = (&command, self.device.mailbox.ranks()) {
            wire.step = scalars.get("step").map_or(0, |&step| step as u64);
        }
        self.replies.push_back(self.device.answer_here(command)?);
        Ok(())
    }

    fn collect(&mut self, ranks: &[usize]) -> Result<Vec<(usize, Reply)>, RuntimeError> {
        ranks.iter().map(|&rank| Ok((rank, self.replies.pop_front().ok_or(RuntimeError::NoStep)?))).collect()
    }

    fn peak_bytes(&self) -> Vec<[u64; 2]> {
        vec![[self.device.arena.peak_bytes(), self.device.host.peak_bytes()]]
    }

    fn world(&self) -> Option<&World> {
        Some(&self.world)
    }

    /// Ends the run and finalises MPI.
    fn finish(self: Box<Self>) -> Result<(), RuntimeError> {
        let Rank { world, device, .. } = *self;
        drop(device);
        world.finish()
    }

    fn tell(&mut self, words: &[u64]) -> Result<Vec<Vec<u64>>, RuntimeError> {
        let all = self.world.tell(words)?;
        // All ranks are at the same point, so all messages to them were received.
        self.sent()?;
        Ok(all)
    }

    fn tell_ahead(&mut self, report: &[u64]) {
        let mailbox = &self.device.mailbox;
        for to in (0..self.world.size()).filter(|&to| to != mailbox.rank) {
            mailbox.send(to, Tag::Report, Payload::Words(report.to_vec()));
        }
    }

    fn hear(&mut self, report: &[u64]) -> Result<Vec<Vec<u64>>, RuntimeError> {
        let mailbox = &mut self.device.mailbox;
        let heard = |rank: usize| {
            if rank == mailbox.rank {
                return Ok(report.to_vec());
            }
            match mailbox.receive(rank, Tag::Report).map_err(RuntimeError::Carrier)? {
                Payload::Words(words) => Ok(words),
                _ => Err(RuntimeError::Carrier(KernelError::Disconnected)),
            }
        };
        (0..self.world.size()).map(heard).collect()
    }
}

fn ranks(error: RanksError) -> RuntimeError {
    RuntimeError::Ranks(Box::new(error))
}

fn host_name() -> String {
    mpi::environment::processor_name().unwrap_or_else(|_| "an unnamed host".to_string())
}
