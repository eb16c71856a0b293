//! This process's share of a plan: whole programs, since collectives of XLA's devices stay in one process.

use crate::devices::cuda::{Search, Survey};
use crate::error::{KernelError, RanksError, RuntimeError};
use crate::ranks::post::{Letter, Post};
use crate::ranks::{Layout, World};
use altiplano_ir::program::Programs;
use std::collections::BTreeSet;
use std::ops::Range;

/// The programs that this process runs, and its connections to those that run the others.
pub(super) struct Share {
    /// Indices of the programs, in order.
    pub own: Vec<usize>,
    team: Option<Team>,
}

struct Team {
    /// The process of each program.
    process_of: Vec<usize>,
    shares: Vec<Vec<u32>>,
    post: Post,
    world: World,
}

impl Share {
    /// All programs, in one process.
    pub(super) fn whole(programs: &Programs) -> Share {
        Share { own: (0..programs.programs.len()).collect(), team: None }
    }

    /// The programs on this process's devices. All processes of the world must call it.
    pub(super) fn of(world: World, programs: &Programs, layout: &Layout) -> Result<Share, RuntimeError> {
        let failed = |error| RuntimeError::Ranks(Box::new(error));
        let shares = layout.shares(world.nodes()).map_err(failed)?;
        let process_of = processes(programs, &shares).map_err(failed)?;
        let me = world.rank();
        let peers = programs.transfers.iter().flat_map(|transfer| {
            let [source, target] = [transfer.source.0, transfer.target.0].map(|program| process_of[program as usize]);
            [(source, target), (target, source)]
        });
        let peers: BTreeSet<usize> =
            peers.filter(|&(process, other)| process == me && other != me).map(|(_, other)| other).collect();
        let post = Post::open(&world, &peers)?;
        let own = (0..process_of.len()).filter(|&program| process_of[program] == me).collect();
        Ok(Share { own, team: Some(Team { process_of, shares, post, world }) })
    }

    /// Returns whether this process runs a program.
    pub(super) fn has(&self, program: u32) -> bool {
        self.own.contains(&(program as usize))
    }

    /// Queues a value for the process that runs a program.
    pub(super) fn send(&self, program: u32, letter: Letter) -> Result<(), KernelError> {
        let team = self.team.as_ref().ok_or(KernelError::Disconnected)?;
        team.post.send(team.process_of[program as usize], letter)
    }

    /// Waits for the next value of another process.
    pub(super) fn receive(&self) -> Result<Letter, KernelError> {
        self.team.as_ref().ok_or(KernelError::Disconnected)?.post.receive()
    }

    /// The next value of another process that has arrived.
    pub(super) fn arrived(&self) -> Option<Letter> {
        self.team.as_ref()?.post.arrived()
    }

    pub(super) fn world(&self) -> Option<&World> {
        self.team.as_ref().map(|team| &team.world)
    }

    /// The GPUs of this process among those that it sees; `None` if it has all.
    pub(super) fn gpus(&self) -> Result<Option<Range<usize>>, RuntimeError> {
        let Some(Team { shares, world, .. }) = &self.team else { return Ok(None) };
        let seen = Survey::of(&Search::default()).usable()?.len();
        let gpus = world.gpus(shares, seen).map_err(|error| RuntimeError::Ranks(Box::new(error)))?;
        Ok(Some(gpus))
    }

    /// Ends the connections, and the run in all processes.
    pub(super) fn finish(self) -> Result<(), RuntimeError> {
        let Some(Team { world, post, .. }) = self.team else { return Ok(()) };
        world.meet()?;
        drop(post);
        world.finish()
    }
}

/// The process that runs each program, given the devices of each process.
fn processes(programs: &Programs, shares: &[Vec<u32>]) -> Result<Vec<usize>, RanksError> {
    let process = |device: &u32| shares.iter().position(|share| share.contains(device)).ok_or(RanksError::Devices);
    let of_program = |(stage, devices): (usize, &Vec<u32>)| {
        let processes = devices.iter().map(process).collect::<Result<BTreeSet<usize>, _>>()?;
        match processes.first() {
            Some(&only) if processes.len() == 1 => Ok(only),
            _ => Err(RanksError::Split { stage, processes: processes.len() }),
        }
    };
    programs.programs.iter().map(|program| &program.devices).enumerate().map(of_program).collect()
}
