//! Messages between devices, which are threads of one process or, over MPI, processes. Every device has one mailbox; what arrives
//! before it is wanted is set aside. Sending never blocks. A device that fails tells all others to stop, so that nobody waits for it
//! for ever; of processes the watch does so.

use crate::arena::Storage;
use crate::collective::Terms;
use crate::error::{KernelError, Place};
#[cfg(feature = "mpi")]
use crate::mpi::wire::RankWire;
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
    Transfer {
        transfer: TransferId,
        microbatch: Option<u32>,
        message: u32,
    },
    Collective,
    /// Of collectives that go on while their devices do other things, which are the same on all members in the same order too.
    Behind,
    /// From one device to another, in an order that both know.
    Channel,
    /// What a device tells all others of a step that it has run.
    Report,
}

/// What a message carries.
#[derive(Debug)]
pub enum Payload {
    /// Elements that left their device, in blocks of eight bytes.
    Words(Vec<u64>),
    /// A tensor that its owner keeps unchanged until all members of a collective are done.
    Shared(Arc<Storage>),
    /// What its owner reduces with others, and where the result goes.
    Lent(Arc<Terms>),
    /// The sender no longer reads what others shared, and no longer writes what they lent.
    Done,
}

enum Packet {
    Message { from: usize, tag: Tag, payload: Payload },
    Stop,
}

/// What carries messages.
enum Wire {
    /// Devices are threads of this process, and lend each other what they send, unless they are to send copies.
    Threads { receiver: Receiver<Packet>, senders: Vec<Sender<Packet>>, stopped: Arc<AtomicBool>, copies: bool },
    /// Devices are processes, and send copies.
    #[cfg(feature = "mpi")]
    Ranks(Box<RankWire>),
}

/// One device's end of the network. Devices are numbered by rank, over all programs.
pub struct Mailbox {
    pub rank: usize,
    wire: Wire,
    waiting: HashMap<(usize, Tag), VecDeque<Payload>>,
    /// For messages that had not come yet.
    pub waited: Duration,
}

impl Mailbox {
    /// Mailboxes for all ranks, connected to each other; whether they send copies as processes do.
    pub fn network(ranks: usize, copies: bool) -> Vec<Mailbox> {
        let stopped = Arc::new(AtomicBool::new(false));
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..ranks).map(|_| channel()).unzip();
        let mailbox = |(rank, receiver)| Mailbox {
            rank,
            wire: Wire::Threads { receiver, senders: senders.clone(), stopped: stopped.clone(), copies },
            waiting: HashMap::new(),
            waited: Duration::ZERO,
        };
        receivers.into_iter().enumerate().map(mailbox).collect()
    }

    /// The mailbox of a device that has a process of its own.
    #[cfg(feature = "mpi")]
    pub fn of_rank(wire: RankWire) -> Mailbox {
        Mailbox {
            rank: wire.rank(),
            wire: Wire::Ranks(Box::new(wire)),
            waiting: HashMap::new(),
            waited: Duration::ZERO,
        }
    }

    /// What carries messages, where it is MPI.
    #[cfg(feature = "mpi")]
    pub fn ranks(&mut self) -> Option<&mut RankWire> {
        if let Wire::Ranks(wire) = &mut self.wire { Some(wire) } else { None }
    }

    /// Whether others get copies of what is sent to them, so that nobody need wait until they have read it.
    pub fn copies(&self) -> bool {
        !matches!(self.wire, Wire::Threads { copies: false, .. })
    }

    pub fn send(&self, to: usize, tag: Tag, payload: Payload) {
        match &self.wire {
            // A receiver that is gone has failed, and has told everybody.
            Wire::Threads { senders, .. } => drop(senders[to].send(Packet::Message { from: self.rank, tag, payload })),
            #[cfg(feature = "mpi")]
            Wire::Ranks(wire) => wire.send(to, tag, payload),
        }
    }

    /// Waits for the next message of this tag from `from`.
    pub fn receive(&mut self, from: usize, tag: Tag) -> Result<Payload, KernelError> {
        if let Some(payload) = self.waiting.get_mut(&(from, tag)).and_then(VecDeque::pop_front) {
            return Ok(payload);
        }
        loop {
            self.check()?;
            let start = Instant::now();
            let received = match &self.wire {
                Wire::Threads { receiver, .. } => match receiver.recv() {
                    Ok(Packet::Message { from, tag, payload }) => Ok((from, tag, payload)),
                    Ok(Packet::Stop) | Err(_) => Err(KernelError::Disconnected),
                },
                #[cfg(feature = "mpi")]
                Wire::Ranks(wire) if tag == Tag::Behind => wire.receive_behind(from).map(|words| {
                    let payload = Payload::Words(words);
                    (from, tag, payload)
                }),
                #[cfg(feature = "mpi")]
                Wire::Ranks(wire) => wire.receive(from).map(|(tag, words)| (from, tag, Payload::Words(words))),
            };
            self.waited += start.elapsed();
            let (f, t, payload) = received?;
            if f == from && t == tag {
                return Ok(payload);
            }
            self.waiting.entry((f, t)).or_default().push_back(payload);
        }
    }

    /// The next message of a collective behind others from `from`, if it has come.
    pub fn try_receive_behind(&mut self, from: usize) -> Result<Option<Payload>, KernelError> {
        match &self.wire {
            Wire::Threads { receiver, .. } => {
                for packet in receiver.try_iter() {
                    let Packet::Message { from, tag, payload } = packet else { return Err(KernelError::Disconnected) };
                    self.waiting.entry((from, tag)).or_default().push_back(payload);
                }
                Ok(self.waiting.get_mut(&(from, Tag::Behind)).and_then(VecDeque::pop_front))
            }
            #[cfg(feature = "mpi")]
            Wire::Ranks(wire) => Ok(wire.try_receive_behind(from)?.map(Payload::Words)),
        }
    }

    /// Fails where another device has failed.
    pub fn check(&self) -> Result<(), KernelError> {
        match &self.wire {
            Wire::Threads { stopped, .. } if stopped.load(Ordering::Relaxed) => Err(KernelError::Disconnected),
            Wire::Threads { .. } => Ok(()),
            #[cfg(feature = "mpi")]
            Wire::Ranks(wire) => wire.check(),
        }
    }

    /// Tells all devices to stop.
    pub fn stop_all(&self) {
        match &self.wire {
            Wire::Threads { senders, stopped, .. } => {
                stopped.store(true, Ordering::Relaxed);
                for sender in senders {
                    let _ = sender.send(Packet::Stop);
                }
            }
            #[cfg(feature = "mpi")]
            Wire::Ranks(_) => {}
        }
    }

    /// Says what the device does, to those who would have to tell where it was lost.
    pub fn note(&self, _place: &Place) {
        #[cfg(feature = "mpi")]
        if let Wire::Ranks(wire) = &self.wire {
            wire.note(_place);
        }
    }

    /// Forgets queued messages; between steps there are none.
    pub fn clear(&mut self) {
        self.waiting.retain(|_, queue| !queue.is_empty());
    }
}
