//! Messages between device threads. Every device has one mailbox; what arrives before it is wanted is set aside.
//! Sending never blocks. A device that fails tells all others to stop, so that nobody waits for it for ever.

use crate::arena::Storage;
use crate::error::KernelError;
use altiplano_ir::program::TransferId;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// What a message belongs to. Collectives need no number: all members run the same ones in the same order, and
/// messages between two devices keep theirs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tag {
    Transfer { transfer: TransferId, microbatch: Option<u32>, message: u32 },
    Collective,
}

/// What a message carries.
#[derive(Debug)]
pub enum Payload {
    /// Elements that left their device, in blocks of eight bytes.
    Words(Vec<u64>),
    /// A tensor that its owner keeps unchanged until all members of a collective are done.
    Shared(Arc<Storage>),
    /// The sender no longer reads what others shared.
    Done,
}

enum Packet {
    Message { from: usize, tag: Tag, payload: Payload },
    Stop,
}

/// One device's end of the network. Devices are numbered by rank, over all programs.
pub struct Mailbox {
    pub rank: usize,
    receiver: Receiver<Packet>,
    senders: Vec<Sender<Packet>>,
    waiting: HashMap<(usize, Tag), VecDeque<Payload>>,
    stopped: Arc<AtomicBool>,
    /// For messages that had not come yet.
    pub waited: Duration,
}

impl Mailbox {
    /// Mailboxes for all ranks, connected to each other.
    pub fn network(ranks: usize) -> Vec<Mailbox> {
        let stopped = Arc::new(AtomicBool::new(false));
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..ranks).map(|_| channel()).unzip();
        let mailbox = |(rank, receiver)| Mailbox {
            rank,
            receiver,
            senders: senders.clone(),
            waiting: HashMap::new(),
            stopped: stopped.clone(),
            waited: Duration::ZERO,
        };
        receivers.into_iter().enumerate().map(mailbox).collect()
    }

    pub fn send(&self, to: usize, tag: Tag, payload: Payload) {
        // A receiver that is gone has failed, and has told everybody.
        let _ = self.senders[to].send(Packet::Message { from: self.rank, tag, payload });
    }

    /// Waits for the next message of this tag from `from`.
    pub fn receive(&mut self, from: usize, tag: Tag) -> Result<Payload, KernelError> {
        if let Some(payload) = self.waiting.get_mut(&(from, tag)).and_then(VecDeque::pop_front) {
            return Ok(payload);
        }
        loop {
            self.check()?;
            let start = Instant::now();
            let received = self.receiver.recv();
            self.waited += start.elapsed();
            match received {
                Ok(Packet::Message { from: f, tag: t, payload }) if f == from && t == tag => return Ok(payload),
                Ok(Packet::Message { from, tag, payload }) => {
                    self.waiting.entry((from, tag)).or_default().push_back(payload);
                }
                Ok(Packet::Stop) | Err(_) => return Err(KernelError::Disconnected),
            }
        }
    }

    /// Fails where another device has failed.
    pub fn check(&self) -> Result<(), KernelError> {
        if self.stopped.load(Ordering::Relaxed) { Err(KernelError::Disconnected) } else { Ok(()) }
    }

    /// Tells all devices to stop.
    pub fn stop_all(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        for sender in &self.senders {
            let _ = sender.send(Packet::Stop);
        }
    }

    /// Forgets queued messages; between steps there are none.
    pub fn clear(&mut self) {
        self.waiting.retain(|_, queue| !queue.is_empty());
    }
}
