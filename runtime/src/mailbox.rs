//! Messages between devices, which are threads of one process or, over MPI, processes. Every device has one mailbox;
//! messages that arrive early are queued. Sending never blocks. A thread that fails tells all others to stop, so that
//! none waits for it forever; between processes the watch does so.

use crate::arena::Storage;
use crate::collective::Terms;
use crate::error::{KernelError, Place};
#[cfg(feature = "mpi")]
use crate::mpi::wire::RankWire;
use altiplano_ir::program::TransferId;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvError, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

/// The purpose of a message. Collectives need no number: all members run them in the same order, and messages between
/// two devices arrive in the order in which they were sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tag {
    Transfer {
        transfer: TransferId,
        microbatch: Option<u32>,
        message: u32,
    },
    Collective,
    /// Belongs to an asynchronous collective. All members run these in the same order, too.
    AsyncCollectives,
    /// From one device to another, in an order known to both.
    Channel,
    /// A device's report to all others on the step that it has run.
    Report,
}

impl Tag {
    /// A tag as the head of a message between processes.
    pub(crate) fn encode(self) -> [u64; 2] {
        match self {
            Tag::Transfer { transfer, microbatch, message } => {
                let microbatch = microbatch.map_or(0, |m| u64::from(m) + 1);
                [u64::from(transfer.0), (microbatch << 32) | u64::from(message)]
            }
            Tag::Collective => [1 << 32, 0],
            Tag::Channel => [2 << 32, 0],
            Tag::Report => [3 << 32, 0],
            Tag::AsyncCollectives => [4 << 32, 0],
        }
    }

    pub(crate) fn decode([first, second]: [u64; 2]) -> Tag {
        match first >> 32 {
            0 => Tag::Transfer {
                transfer: TransferId(first as u32),
                microbatch: (second >> 32).checked_sub(1).map(|m| m as u32),
                message: second as u32,
            },
            1 => Tag::Collective,
            2 => Tag::Channel,
            3 => Tag::Report,
            _ => Tag::AsyncCollectives,
        }
    }
}

/// The content of a message.
#[derive(Debug)]
pub enum Payload {
    /// Copied elements, in words of eight bytes.
    Words(Vec<u64>),
    /// A tensor that its owner keeps unchanged until all members of a collective are done.
    Shared(Arc<Storage>),
    /// A member's operand and result of an all-reduce.
    SharedTensor(Arc<Terms>),
    /// The sender no longer accesses the tensors that others shared.
    Done,
}

enum Packet {
    Message { from: usize, tag: Tag, payload: Payload },
    Stop,
}

/// The transport of messages.
enum Wire {
    /// Devices are threads of this process, and share tensors unless `copies` is set. If each thread has a core of its
    /// own, it spins for a while before it sleeps.
    Threads {
        receiver: Receiver<Packet>,
        senders: Vec<Sender<Packet>>,
        stopped: Arc<AtomicBool>,
        copies: bool,
        looks: Option<Looks>,
    },
    /// Devices are processes, and send copies.
    #[cfg(feature = "mpi")]
    Ranks(Box<RankWire>),
}

/// Time for which a device with a core of its own spins before it sleeps. It is about the cost of a wake-up, so that a
/// wait never takes more than twice as long as it must (Karlin et al. 1994, Competitive randomized algorithms for
/// nonuniform problems).
const LOOK: Duration = Duration::from_micros(50);

/// Upper limit on the number of waits without spinning after vain attempts.
const MOST_SKIPPED: u32 = 1 << 10;

/// Decides whether a device spins before it sleeps. Spinning pays if messages come soon. If other programs compete for
/// the cores, messages come late, and a thread that has spun gets a core later than one that has slept. So each vain
/// attempt doubles the number of waits that skip spinning.
#[derive(Default)]
struct Looks {
    skipped: u32,
    left: u32,
}

impl Looks {
    fn looks(&mut self) -> bool {
        let looks = self.left == 0;
        self.left = self.left.saturating_sub(1);
        looks
    }

    fn ended(&mut self, found: bool) {
        self.skipped = if found { 0 } else { (2 * self.skipped + 1).min(MOST_SKIPPED) };
        self.left = self.skipped;
    }

    /// Receives the next packet: spins for it, then sleeps.
    fn receive(&mut self, receiver: &Receiver<Packet>, start: Instant) -> Result<Packet, RecvError> {
        if !self.looks() {
            return receiver.recv();
        }
        while start.elapsed() < LOOK {
            for _ in 0..32 {
                match receiver.try_recv() {
                    Ok(packet) => {
                        self.ended(true);
                        return Ok(packet);
                    }
                    Err(TryRecvError::Disconnected) => return Err(RecvError),
                    Err(TryRecvError::Empty) => std::hint::spin_loop(),
                }
            }
        }
        self.ended(false);
        receiver.recv()
    }
}

/// One device's end of the network. Devices are numbered by rank over all programs.
pub struct Mailbox {
    pub rank: usize,
    wire: Wire,
    waiting: HashMap<(usize, Tag), VecDeque<Payload>>,
    /// Total time spent waiting for messages.
    pub waited: Duration,
}

impl Mailbox {
    /// Creates connected mailboxes for all ranks. With `copies`, they send copies as processes do.
    pub fn network(ranks: usize, copies: bool) -> Vec<Mailbox> {
        let stopped = Arc::new(AtomicBool::new(false));
        let own_cores = std::thread::available_parallelism().is_ok_and(|cores| ranks <= cores.get());
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..ranks).map(|_| channel()).unzip();
        let mailbox = |(rank, receiver)| Mailbox {
            rank,
            wire: Wire::Threads {
                receiver,
                senders: senders.clone(),
                stopped: stopped.clone(),
                copies,
                looks: own_cores.then(Looks::default),
            },
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

    /// The MPI transport, if the mailbox has one.
    #[cfg(feature = "mpi")]
    pub fn ranks(&mut self) -> Option<&mut RankWire> {
        if let Wire::Ranks(wire) = &mut self.wire { Some(wire) } else { None }
    }

    /// Returns whether messages carry copies, so that the sender need not wait until they are read.
    pub fn copies(&self) -> bool {
        !matches!(self.wire, Wire::Threads { copies: false, .. })
    }

    pub fn send(&self, to: usize, tag: Tag, payload: Payload) {
        match &self.wire {
            // A receiver that is gone has failed, and has told all others.
            Wire::Threads { senders, .. } => drop(senders[to].send(Packet::Message { from: self.rank, tag, payload })),
            #[cfg(feature = "mpi")]
            Wire::Ranks(wire) => wire.send(to, tag, payload),
        }
    }

    /// Waits for the next message with this tag from `from`.
    pub fn receive(&mut self, from: usize, tag: Tag) -> Result<Payload, KernelError> {
        if let Some(payload) = self.waiting.get_mut(&(from, tag)).and_then(VecDeque::pop_front) {
            return Ok(payload);
        }
        loop {
            self.check()?;
            let start = Instant::now();
            let received = match &mut self.wire {
                Wire::Threads { receiver, looks, .. } => {
                    let packet = match looks {
                        Some(looks) => looks.receive(receiver, start),
                        None => receiver.recv(),
                    };
                    match packet {
                        Ok(Packet::Message { from, tag, payload }) => Ok((from, tag, payload)),
                        Ok(Packet::Stop) | Err(_) => Err(KernelError::Disconnected),
                    }
                }
                #[cfg(feature = "mpi")]
                Wire::Ranks(wire) if tag == Tag::AsyncCollectives => wire.receive_behind(from).map(|words| {
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

    /// The next message of an asynchronous collective from `from`, if it has arrived.
    pub fn try_receive_behind(&mut self, from: usize) -> Result<Option<Payload>, KernelError> {
        match &self.wire {
            Wire::Threads { receiver, .. } => {
                for packet in receiver.try_iter() {
                    let Packet::Message { from, tag, payload } = packet else { return Err(KernelError::Disconnected) };
                    self.waiting.entry((from, tag)).or_default().push_back(payload);
                }
                Ok(self.waiting.get_mut(&(from, Tag::AsyncCollectives)).and_then(VecDeque::pop_front))
            }
            #[cfg(feature = "mpi")]
            Wire::Ranks(wire) => Ok(wire.try_receive_behind(from)?.map(Payload::Words)),
        }
    }

    /// Fails if another device has failed.
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

    /// Publishes the device's activity, so that the watch can report where it was lost.
    pub fn note(&self, _place: &Place) {
        #[cfg(feature = "mpi")]
        if let Wire::Ranks(wire) = &self.wire {
            wire.note(_place);
        }
    }

    /// Drops empty queues; between steps all are empty.
    pub fn clear(&mut self) {
        self.waiting.retain(|_, queue| !queue.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_read_as_they_were_written() {
        let transfer =
            |transfer, microbatch, message| Tag::Transfer { transfer: TransferId(transfer), microbatch, message };
        let all = [
            transfer(0, None, 0),
            transfer(u32::MAX, Some(u32::MAX - 1), u32::MAX),
            transfer(7, Some(0), 3),
            Tag::Collective,
            Tag::Channel,
            Tag::Report,
            Tag::AsyncCollectives,
        ];
        for tag in all {
            assert_eq!(Tag::decode(tag.encode()), tag);
        }
    }

    #[test]
    fn looks_in_vain_are_made_less_and_less_often() {
        let mut looks = Looks::default();
        let mut made = 0;
        for _ in 0..10_000 {
            if looks.looks() {
                looks.ended(false);
                made += 1;
            }
        }
        assert!((10..30).contains(&made), "{made}");
        while !looks.looks() {}
        looks.ended(true);
        assert!(looks.looks(), "one that finds something is followed by another");
    }

    #[test]
    fn messages_are_found_by_looking_and_by_sleeping() {
        let mut boxes = Mailbox::network(2, false);
        let (mut second, mut first) = (boxes.pop().expect("two"), boxes.pop().expect("two"));
        let pause = |i: u64| std::thread::sleep(if i % 2 == 0 { Duration::ZERO } else { 4 * LOOK });
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for i in 0u64..64 {
                    pause(i);
                    second.send(0, Tag::Channel, Payload::Words(vec![i]));
                    second.receive(0, Tag::Channel).expect("an answer");
                }
            });
            for i in 0u64..64 {
                let Ok(Payload::Words(words)) = first.receive(1, Tag::Channel) else { panic!("a message") };
                assert_eq!(words, [i]);
                first.send(1, Tag::Channel, Payload::Done);
            }
        });
    }
}
