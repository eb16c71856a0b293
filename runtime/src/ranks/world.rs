//! One process's view of all processes of a run: the leader, joint communication, and lost processes. A [`Carrier`]
//! exchanges their words. There is one for MPI and one without; everything else is shared code in this module.

use crate::collective::words_of;
use crate::error::{KernelError, RanksError, RuntimeError};
use crate::ranks::connect::{Address, Hub, Listen, host_name};
use crate::ranks::failover::{Failover, Tcp};
use crate::ranks::watch::Watch;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

/// Exchanges words between processes. All of them must make the same calls in the same order.
pub trait Carrier {
    /// Rank of this process in the launcher's numbering.
    fn rank(&self) -> usize;

    /// Number of processes.
    fn size(&self) -> usize;

    /// All-gather: returns the words of each process, by rank, on all.
    fn tell(&self, words: &[u64]) -> Result<Vec<Vec<u64>>, KernelError>;

    /// Gather: returns the words of each process, by rank, on the first; `None` on the others.
    fn gather(&self, words: Vec<u64>) -> Result<Option<Vec<Vec<u64>>>, KernelError>;

    /// [`Carrier::tell`] for texts.
    fn tell_text(&self, text: &str) -> Result<Vec<String>, KernelError> {
        let mut words = vec![text.len() as u64];
        words.extend(words_of(text.as_bytes()));
        let read = |words: Vec<u64>| {
            let (length, rest) = words.split_first().map_or((0, &[][..]), |(&n, rest)| (n as usize, rest));
            let bytes: &[u8] = bytemuck::cast_slice(rest);
            String::from_utf8_lossy(&bytes[..length.min(bytes.len())]).into_owned()
        };
        Ok(self.tell(&words)?.into_iter().map(read).collect())
    }
}

/// All processes of a run, in their launcher's order.
pub struct World {
    carrier: Box<dyn Carrier>,
    watch: Arc<Watch>,
    /// For each rank, the first rank of its machine.
    nodes: Vec<usize>,
    /// The interfaces on which processes listen.
    at: Listen,
    /// Keeps the type on its thread: all calls to MPI come from the thread that initialised it.
    _thread: PhantomData<*const ()>,
}

impl World {
    /// Creates the world. All processes must call it; they exchange the addresses at which they listen in case the
    /// first is lost, on the interfaces of `at`.
    pub fn new(carrier: Box<dyn Carrier>, watch: Watch, nodes: Vec<usize>, at: Listen) -> Result<World, RuntimeError> {
        let hub = Hub::listen(at).map_err(|error| RuntimeError::Watch(Box::new(error)))?;
        let addresses = carrier.tell_text(&hub.address.encode()).map_err(RuntimeError::Carrier)?;
        let addresses: Vec<Option<Address>> = addresses.iter().map(|text| Address::decode(text)).collect();
        let me = carrier.rank();
        watch.failover(Failover::new(me, &nodes, Tcp::new(me, hub, addresses)));
        Ok(World { carrier, watch: Arc::new(watch), nodes, at, _thread: PhantomData })
    }

    pub fn rank(&self) -> usize {
        self.carrier.rank()
    }

    pub fn size(&self) -> usize {
        self.carrier.size()
    }

    pub fn watch(&self) -> Arc<Watch> {
        self.watch.clone()
    }

    /// Returns whether this process leads.
    pub fn leads(&self) -> bool {
        self.rank() == 0
    }

    /// For each rank, the first rank of its machine.
    pub fn nodes(&self) -> &[usize] {
        &self.nodes
    }

    /// Number of processes on this machine.
    pub fn local(&self) -> usize {
        self.nodes.iter().filter(|&&node| node == self.nodes[self.rank()]).count()
    }

    /// The GPUs of this process among the `seen` ones: a process sees all of its node, or only its own. `shares` has the
    /// devices of each process.
    pub(crate) fn gpus(&self, shares: &[Vec<u32>], seen: usize) -> Result<Range<usize>, RanksError> {
        let me = self.rank();
        let on_node = |ranks: Range<usize>| {
            ranks.filter(|&rank| self.nodes[rank] == self.nodes[me]).map(|rank| shares[rank].len()).sum::<usize>()
        };
        let (before, all, count) = (on_node(0..me), on_node(0..self.size()), shares[me].len());
        match seen {
            seen if seen >= all => Ok(before..before + count),
            seen if seen >= count => Ok(0..count),
            _ => {
                let host = host_name();
                Err(RanksError::Gpus { rank: me, host, devices: count, on_node: all, gpus: seen })
            }
        }
    }

    /// See [`Carrier::tell`].
    pub fn tell(&self, words: &[u64]) -> Result<Vec<Vec<u64>>, RuntimeError> {
        self.carrier.tell(words).map_err(RuntimeError::Carrier)
    }

    /// See [`Carrier::tell_text`].
    pub fn tell_text(&self, text: &str) -> Result<Vec<String>, RuntimeError> {
        self.carrier.tell_text(text).map_err(RuntimeError::Carrier)
    }

    /// The interfaces on which the processes of the run listen.
    pub(crate) fn listens_at(&self) -> Listen {
        self.at
    }

    /// See [`Carrier::gather`].
    pub fn gather(&self, words: Vec<u64>) -> Result<Option<Vec<Vec<u64>>>, RuntimeError> {
        self.carrier.gather(words).map_err(RuntimeError::Carrier)
    }

    /// Fails on all processes if one of them has another `text` than the first.
    pub fn expect_same(&self, what: &'static str, text: &str) -> Result<(), RuntimeError> {
        let all = self.carrier.tell_text(text).map_err(RuntimeError::Carrier)?;
        let differs = all.iter().position(|other| *other != all[0]);
        differs.map_or(Ok(()), |rank| Err(RuntimeError::Ranks(Box::new(RanksError::Differs { rank, what }))))
    }

    /// Broadcasts the first process's text.
    pub fn hear_first(&self, text: &str) -> Result<String, RuntimeError> {
        let said = self.carrier.tell_text(if self.leads() { text } else { "" }).map_err(RuntimeError::Carrier)?;
        Ok(said.into_iter().next().unwrap_or_default())
    }

    /// The maximum of all processes' values.
    pub fn largest(&self, value: u64) -> Result<u64, RuntimeError> {
        Ok(self.tell(&[value])?.into_iter().flatten().max().unwrap_or(value))
    }

    /// Waits for all processes.
    pub fn meet(&self) -> Result<(), RuntimeError> {
        self.tell(&[]).map(|_| ())
    }

    /// Records this process's activity between steps, for the message if it is lost.
    pub fn note(&self, activity: &str) {
        self.watch.note(activity.to_string());
    }

    /// Ends the carrier and then the watch, in that order: a process may be lost until it has ended.
    pub fn finish(self) -> Result<(), RuntimeError> {
        self.meet()?;
        let World { carrier, watch, .. } = self;
        drop(carrier);
        watch.finish();
        Ok(())
    }
}
