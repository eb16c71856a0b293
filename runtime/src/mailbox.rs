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
use std::sync::mpsc::{Receiver, RecvError, Sender, TryRecvError, channel};
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
    /// Devices are threads of this process, and lend each other what they send, unless they are to send copies. Where each has a core
    /// of its own it looks for a message for a while before it sleeps.
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

/// For how long a device that has a core to itself looks for a message before it sleeps: about what waking it takes, so that it never
/// waits more than twice as long as it must (Karlin et al. 1994, Competitive randomized algorithms for nonuniform problems).
const LOOK: Duration = Duration::from_micros(50);

/// Waits for which a device does not look after looks that were in vain, at most.
const MOST_SKIPPED: u32 = 1 << 10;

/// Whether a device looks before it sleeps. Looks pay where messages come soon; where other programs want the cores they come late, and
/// who has looked gets a core later than who has slept. So after each look in vain as many waits again go without.
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

    /// The next packet, which is looked for before it is slept for.
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

#[cfg(test)]
mod tests {
    use super::*;

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
