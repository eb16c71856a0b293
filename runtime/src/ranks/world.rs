//! All processes of a run as one of them sees them: who speaks for all, what all say, and who is lost. What carries their words is a
//! [`Carrier`], of which there is one for MPI and one without; everything else is written once, here.

use crate::collective::words_of;
use crate::error::{KernelError, RanksError, RuntimeError};
use crate::ranks::connect::{Address, Hub};
use crate::ranks::deputy::Deputy;
use crate::ranks::watch::Watch;
use std::marker::PhantomData;
use std::sync::Arc;

/// Carries words between processes. All of them make the same calls in the same order.
pub trait Carrier {
    /// As the launcher numbers this process.
    fn rank(&self) -> usize;

    /// How many there are.
    fn size(&self) -> usize;

    /// What each has to say, by rank, on all.
    fn tell(&self, words: &[u64]) -> Result<Vec<Vec<u64>>, KernelError>;

    /// What each has to say, by rank, on the first; none on the others.
    fn gather(&self, words: Vec<u64>) -> Result<Option<Vec<Vec<u64>>>, KernelError>;

    /// [`Carrier::tell`] of texts.
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
    /// The first rank of the machine of each rank.
    nodes: Vec<usize>,
    /// All calls to MPI come from the thread that initialised it.
    _thread: PhantomData<*const ()>,
}

impl World {
    /// All processes must come here, who tell each other where they listen should the first be lost.
    pub fn new(carrier: Box<dyn Carrier>, watch: Watch, nodes: Vec<usize>) -> Result<World, RuntimeError> {
        let hub = Hub::listen().map_err(|error| RuntimeError::Watch(Box::new(error)))?;
        let addresses = carrier.tell_text(&hub.address.encode()).map_err(RuntimeError::Carrier)?;
        let addresses: Vec<Option<Address>> = addresses.iter().map(|text| Address::decode(text)).collect();
        watch.deputy(Deputy::new(carrier.rank(), hub, &addresses, &nodes));
        Ok(World { carrier, watch: Arc::new(watch), nodes, _thread: PhantomData })
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

    /// Whether this process speaks for all.
    pub fn leads(&self) -> bool {
        self.rank() == 0
    }

    /// The first rank of the machine of each rank.
    pub fn nodes(&self) -> &[usize] {
        &self.nodes
    }

    /// Processes of this machine.
    pub fn local(&self) -> usize {
        self.nodes.iter().filter(|&&node| node == self.nodes[self.rank()]).count()
    }

    /// See [`Carrier::tell`].
    pub fn tell(&self, words: &[u64]) -> Result<Vec<Vec<u64>>, RuntimeError> {
        self.carrier.tell(words).map_err(RuntimeError::Carrier)
    }

    /// See [`Carrier::gather`].
    pub fn gather(&self, words: Vec<u64>) -> Result<Option<Vec<Vec<u64>>>, RuntimeError> {
        self.carrier.gather(words).map_err(RuntimeError::Carrier)
    }

    /// Fails on all alike where one differs from the first in what it is to do.
    pub fn expect_same(&self, what: &'static str, text: &str) -> Result<(), RuntimeError> {
        let all = self.carrier.tell_text(text).map_err(RuntimeError::Carrier)?;
        let differs = all.iter().position(|other| *other != all[0]);
        differs.map_or(Ok(()), |rank| Err(RuntimeError::Ranks(Box::new(RanksError::Differs { rank, what }))))
    }

    /// What the first says, on all.
    pub fn hear_first(&self, text: &str) -> Result<String, RuntimeError> {
        let said = self.carrier.tell_text(if self.leads() { text } else { "" }).map_err(RuntimeError::Carrier)?;
        Ok(said.into_iter().next().unwrap_or_default())
    }

    /// The largest of what all say.
    pub fn largest(&self, value: u64) -> Result<u64, RuntimeError> {
        Ok(self.tell(&[value])?.into_iter().flatten().max().unwrap_or(value))
    }

    /// Waits for all.
    pub fn meet(&self) -> Result<(), RuntimeError> {
        self.tell(&[]).map(|_| ())
    }

    /// Says what this process does between steps, for the message should it be lost.
    pub fn note(&self, activity: &str) {
        self.watch.note(activity.to_string());
    }

    /// Ends what carries words, and then the watch, in that order: a process may be lost until it has ended.
    pub fn finish(self) -> Result<(), RuntimeError> {
        self.meet()?;
        let World { carrier, watch, .. } = self;
        drop(carrier);
        watch.finish();
        Ok(())
    }
}
