//! Messages of a device that is a process: words followed by their tag. Sends are non-blocking and own their words
//! until they have been sent. Messages between two ranks keep their order.

use crate::error::{KernelError, Place};
use crate::mailbox::{Payload, Tag};
use crate::mpi::sys::{Communicator, Receiving, Sending, Stream};
use crate::ranks::watch::Watch;
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

/// A rank's end of the network.
pub struct RankWire {
    /// All ranks, in the order of the plan's programs.
    all: Arc<Communicator>,
    /// Communicators of the groups that run collectives, by ranks.
    groups: HashMap<Vec<usize>, Arc<Communicator>>,
    sending: RefCell<Outbox>,
    /// Receives in progress of asynchronous collectives, by sender.
    receiving: RefCell<HashMap<usize, Receiving>>,
    /// True if collectives reduce in the order of their groups.
    pub in_order: bool,
    watch: Arc<Watch>,
    /// The current step, for error messages.
    pub step: u64,
}

#[derive(Default)]
struct Outbox {
    sending: Vec<Sending>,
    /// The error of a failed send. Sending itself does not fail; the next receive returns the error.
    failed: Option<KernelError>,
}

impl RankWire {
    pub(super) fn new(all: Arc<Communicator>, in_order: bool, watch: Arc<Watch>) -> RankWire {
        let (sending, receiving) = (RefCell::default(), RefCell::default());
        RankWire { all, groups: HashMap::new(), sending, receiving, in_order, watch, step: 0 }
    }

    pub fn rank(&self) -> usize {
        self.all.rank
    }

    pub fn send(&self, to: usize, tag: Tag, payload: Payload) {
        let mut words = match payload {
            Payload::Words(words) => words,
            Payload::Shared(storage) => storage.words().to_vec(),
            // Copies need neither sharing nor acknowledgement.
            Payload::SharedTensor(_) | Payload::Done => return,
        };
        // Other messages need not wait for this one.
        let stream = if tag == Tag::AsyncCollectives { Stream::AsyncCollectives } else { Stream::Main };
        if stream == Stream::Main {
            words.extend(tag.encode());
        }
        let sent = self.all.send(to, words, stream);
        let mut outbox = self.sending.borrow_mut();
        match sent {
            Ok(sending) => outbox.sending.push(sending),
            Err(error) => outbox.failed = Some(error),
        }
    }

    /// Receives the next message from a rank, with any tag.
    pub fn receive(&self, from: usize) -> Result<(Tag, Vec<u64>), KernelError> {
        let mut words = self.all.receive(from)?;
        let unknown = || KernelError::MessageSize { expected: 16, found: 8 * words.len() };
        let split = words.len().checked_sub(2).ok_or_else(unknown)?;
        let tag = Tag::decode([words[split], words[split + 1]]);
        words.truncate(split);
        Ok((tag, words))
    }

    /// The next words of an asynchronous collective from a rank, if all of them have arrived.
    pub fn try_receive_behind(&self, from: usize) -> Result<Option<Vec<u64>>, KernelError> {
        let mut receiving = self.receiving.borrow_mut();
        let begun = match receiving.remove(&from) {
            Some(begun) => Some(begun),
            None => self.all.begin_receive(from)?,
        };
        match begun.map(Receiving::done).transpose()? {
            Some(Ok(words)) => return Ok(Some(words)),
            Some(Err(begun)) => drop(receiving.insert(from, begun)),
            None => {}
        }
        Ok(None)
    }

    /// Waits for the next words of an asynchronous collective from a rank.
    pub fn receive_behind(&self, from: usize) -> Result<Vec<u64>, KernelError> {
        loop {
            if let Some(words) = self.try_receive_behind(from)? {
                return Ok(words);
            }
            // This rank's sends must make progress, too.
            self.settle(false)?;
            std::thread::yield_now();
        }
    }

    /// Drops completed sends. Between kernels, this also lets MPI make progress on large messages.
    pub fn check(&self) -> Result<(), KernelError> {
        self.settle(false)
    }

    /// Waits until all messages have been sent.
    pub fn flush(&self) -> Result<(), KernelError> {
        self.settle(true)
    }

    fn settle(&self, wait: bool) -> Result<(), KernelError> {
        let mut outbox = self.sending.borrow_mut();
        if let Some(error) = outbox.failed.take() {
            return Err(error);
        }
        let mut left = Vec::new();
        for mut sending in outbox.sending.drain(..) {
            if !sending.is_done(wait)? {
                left.push(sending);
            }
        }
        outbox.sending = left;
        Ok(())
    }

    /// The communicator of a group, created on first use. All members do so at the same point of their programs.
    pub(super) fn group(&mut self, ranks: &[usize]) -> Result<Arc<Communicator>, KernelError> {
        if let Some(found) = self.groups.get(ranks) {
            return Ok(found.clone());
        }
        let made = Arc::new(self.all.group(ranks)?);
        self.groups.insert(ranks.to_vec(), made.clone());
        Ok(made)
    }

    pub fn note(&self, place: &Place) {
        let step = if self.step > 0 { format!("in step {}: ", self.step) } else { String::new() };
        self.watch.note(format!("{step}{place}"));
    }
}
