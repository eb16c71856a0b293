//! CPU devices that are threads of this process.

use crate::arena::Arena;
use crate::device::{Command, Device, Reply};
use crate::error::RuntimeError;
use crate::mailbox::Mailbox;
use crate::roster::Roster;
use crate::session::{Devices, Options, Workers};
use crate::thread_pool;
use crate::work::threads_of_device;
use std::sync::Arc;

pub(crate) struct Threads {
    workers: Workers,
    /// The memory of each device, and its share of host memory.
    arenas: Vec<[Arc<Arena>; 2]>,
}

impl Threads {
    /// Starts the devices of all programs, filled with zeros.
    pub(crate) fn start(roster: &Roster, options: &Options) -> Result<Threads, RuntimeError> {
        let ranks = roster.num_ranks();
        let cores = options.cores.or_else(|| std::thread::available_parallelism().ok().map(|n| n.get())).unwrap_or(1);
        let threads_each = threads_of_device(cores, ranks);
        let (mut devices, mut arenas) = (Vec::new(), Vec::new());
        let places = roster.plans.iter().flat_map(|plan| (0u32..).zip(&plan.program.devices).map(move |at| (plan, at)));
        for ((plan, (position, &id)), mailbox) in places.zip(Mailbox::network(ranks, options.by_messages)) {
            let (rank, arena) = (mailbox.rank, Arena::new(options.memory_limit_bytes));
            let device = Device::with_zeros(id, position, plan.clone(), arena, mailbox, threads_each)?;
            arenas.push([device.arena.clone(), device.host.clone()]);
            let serve = move |commands, replies| {
                thread_pool::with(threads_each, &format!("device {id}"), || device.serve(commands, replies));
            };
            devices.push((rank, id, serve));
        }
        Ok(Threads { workers: Workers::start(devices)?, arenas })
    }
}

impl Devices for Threads {
    fn ranks(&self) -> Vec<usize> {
        self.workers.ranks()
    }

    fn send(&mut self, rank: usize, command: Command) -> Result<(), RuntimeError> {
        self.workers.send(rank, command)
    }

    fn collect(&mut self, ranks: &[usize]) -> Result<Vec<(usize, Reply)>, RuntimeError> {
        self.workers.collect(ranks)
    }

    fn peak_bytes(&self) -> Vec<[u64; 2]> {
        self.arenas.iter().map(|arenas| arenas.each_ref().map(|arena| arena.peak_bytes())).collect()
    }

    fn queues(&self) -> bool {
        true
    }
}
