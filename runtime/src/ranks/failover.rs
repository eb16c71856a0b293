//! Failover: if the first rank, which normally reports for all, is lost, the lowest reachable rank reports instead.
//!
//! Every rank listens for this case and knows the addresses of a few lower ones. A rank that has lost the first asks
//! those to report for it. If none of them answers, it reports itself, for all that have asked it. So each side of a
//! partitioned network prints one message.
//!
//! [`Failover`] is a state machine over a [`Reach`], which is TCP or the simulated network of tests.

use crate::ranks::connect::{Address, Channel, Hello, Hub};
use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// Connections between ranks that have lost the first. No call waits, and no stream blocks.
pub(super) trait Reach {
    type Stream: Read + Write;

    /// Begins to connect to a rank.
    fn ask(&mut self, rank: usize);

    /// The next rank that has answered, with the connection, or that cannot be reached.
    fn answer(&mut self) -> Option<Option<Self::Stream>>;

    /// The next rank that has connected to this one.
    fn asked_by(&mut self) -> Option<(usize, Self::Stream)>;
}

/// A rank's state for finding out who reports.
pub(super) struct Failover<R: Reach> {
    rank: usize,
    size: usize,
    reach: R,
    /// The lower ranks that this one asks.
    lower: Vec<usize>,
    /// When this rank began to ask, or to tell that it has reported.
    since: Option<Instant>,
    /// Number of ranks that have not answered yet.
    unanswered: usize,
    /// Connections to ranks that have answered, and take charge of the report.
    took: Vec<R::Stream>,
    /// Ranks for which this one reports, and their connections.
    followers: BTreeSet<usize>,
    links: Vec<R::Stream>,
}

/// Time limit for an answer. The asked ranks notice the same loss, from heartbeats sent at the same moment.
const ANSWER: Duration = Duration::from_millis(2500);
/// Time for which the reporting rank waits for others to ask, and for which these wait for its report.
const LINGER: Duration = Duration::from_secs(2);
/// Number of hosts of which a rank is asked, besides one's own.
const HOSTS: usize = 4;
/// The byte that the reporting rank sends after its report.
const SPOKEN: u8 = 1;

/// The ranks that rank `me` asks, given the first rank of each rank's machine. They are the first ranks of the first
/// hosts and of its own, without rank 0, as far as they are lower. So each rank asks only a few, and all ask the same
/// ones.
fn asked(me: usize, nodes: &[usize]) -> Vec<usize> {
    let mut hosts = BTreeSet::new();
    let firsts = (1..me.min(nodes.len())).filter(|&rank| hosts.insert(nodes[rank]));
    let firsts: Vec<usize> = firsts.collect();
    let near = |(i, rank): &(usize, usize)| *i < HOSTS || nodes.get(*rank) == nodes.get(me);
    firsts.into_iter().enumerate().filter(near).map(|(_, rank)| rank).collect()
}

impl<R: Reach> Failover<R> {
    /// `nodes` has the first rank of each rank's machine.
    pub fn new(rank: usize, nodes: &[usize], reach: R) -> Failover<R> {
        let (took, links, followers) = (Vec::new(), Vec::new(), BTreeSet::new());
        let lower = asked(rank, nodes);
        Failover { rank, size: nodes.len(), reach, lower, since: None, unanswered: 0, took, followers, links }
    }

    /// Returns whether another rank has reported for this one, which has lost the first; `None` until that is known.
    /// If none has, this rank must report, and then call [`Failover::has_told`].
    pub fn is_spoken_for(&mut self, now: Instant) -> Option<bool> {
        let since = *self.since.get_or_insert_with(|| {
            self.lower.iter().for_each(|&rank| self.reach.ask(rank));
            self.unanswered = self.lower.len();
            now
        });
        self.welcome();
        while let Some(answer) = self.reach.answer() {
            self.unanswered = self.unanswered.saturating_sub(1);
            self.took.extend(answer);
        }
        let (mut spoke, mut word) = (false, [0]);
        self.took.retain_mut(|link| match link.read(&mut word) {
            Ok(1..) => {
                spoke |= word == [SPOKEN];
                word == [SPOKEN]
            }
            Ok(0) => false,
            Err(error) => [ErrorKind::WouldBlock, ErrorKind::Interrupted].contains(&error.kind()),
        });
        if spoke {
            self.tell();
            return Some(true);
        }
        let patience = match (self.took.len(), self.unanswered) {
            (0, 0) => Duration::ZERO,
            (0, _) => ANSWER,
            _ => ANSWER + LINGER,
        };
        let is_over = now.saturating_duration_since(since) >= patience;
        if is_over {
            self.since = None;
        }
        is_over.then_some(false)
    }

    /// Tells all that ask that this rank has reported. True once all higher ranks have asked, or no more are expected.
    pub fn has_told(&mut self, now: Instant) -> bool {
        let since = *self.since.get_or_insert(now);
        self.welcome();
        self.tell();
        let higher = self.size.saturating_sub(self.rank + 1);
        self.followers.len() >= higher || now.saturating_duration_since(since) > LINGER
    }

    /// Accepts ranks that ask this one to report for them.
    fn welcome(&mut self) {
        while let Some((rank, link)) = self.reach.asked_by() {
            self.followers.insert(rank);
            self.links.push(link);
        }
    }

    /// Tells the ranks that have asked.
    fn tell(&mut self) {
        for mut link in self.links.drain(..) {
            // A rank that does not receive it is gone, or will report itself.
            let _ = link.write_all(&[SPOKEN]);
        }
    }
}

/// Ranks over TCP.
pub(super) struct Tcp {
    hello: Hello,
    hub: Hub,
    /// Where the ranks listen.
    addresses: Vec<Option<Address>>,
    answers: (Sender<Option<TcpStream>>, Receiver<Option<TcpStream>>),
}

impl Tcp {
    /// `hub` is where this rank listens, `addresses` where all ranks do.
    pub fn new(me: usize, hub: Hub, addresses: Vec<Option<Address>>) -> Tcp {
        let host = String::new();
        let hello = Hello { channel: Channel::Watch, rank: me, size: addresses.len(), pid: std::process::id(), host };
        Tcp { hello, hub, addresses, answers: channel() }
    }
}

impl Reach for Tcp {
    type Stream = TcpStream;

    fn ask(&mut self, rank: usize) {
        let (send, hello) = (self.answers.0.clone(), self.hello.clone());
        let address = self.addresses.get(rank).cloned().flatten();
        // Connecting blocks.
        let asks = move || {
            let link = address.and_then(|address| address.connect(&hello).ok());
            let _ = send.send(link.filter(|link| link.set_nonblocking(true).is_ok()));
        };
        if std::thread::Builder::new().name("ask".to_string()).spawn(asks).is_err() {
            let _ = self.answers.0.send(None);
        }
    }

    fn answer(&mut self) -> Option<Option<TcpStream>> {
        self.answers.1.try_recv().ok()
    }

    fn asked_by(&mut self) -> Option<(usize, TcpStream)> {
        self.hub.next().ok().flatten().map(|(hello, link)| (hello.rank, link))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::connect::Listen;

    #[test]
    fn a_rank_asks_a_few_lower_ones_that_others_ask_too() {
        // Three hosts with three ranks each.
        let nodes = [0, 0, 0, 3, 3, 3, 6, 6, 6];
        let all: Vec<Vec<usize>> = (0..9).map(|me| asked(me, &nodes)).collect();
        let (one, two, three) = (vec![1], vec![1, 3], vec![1, 3, 6]);
        let expected: [&[usize]; 9] = [&[], &[], &one, &one, &two, &two, &two, &three, &three];
        assert_eq!(all, expected);
        // With many hosts: the first ones, and the rank's own.
        let nodes: Vec<usize> = (0..64).map(|rank| rank / 2 * 2).collect();
        assert_eq!(asked(40, &nodes), [1, 2, 4, 6]);
        assert_eq!(asked(41, &nodes), [1, 2, 4, 6, 40]);
    }

    /// Waits until it is known whether another rank reports.
    fn is_spoken_for(failover: &mut Failover<Tcp>) -> bool {
        loop {
            match failover.is_spoken_for(Instant::now()) {
                Some(known) => return known,
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// The ranks that report, out of `size`. Each of `ranks` loses the first after a number of milliseconds.
    fn speakers(size: usize, nodes: &[usize], ranks: &[(usize, u64)]) -> Vec<usize> {
        let hubs: Vec<Hub> = (0..size).map(|_| Hub::listen(Listen::Loopback).expect("a hub")).collect();
        let addresses: Vec<Option<Address>> = hubs.iter().map(|hub| Some(hub.address.clone())).collect();
        let of_rank = |(me, hub): (usize, Hub)| {
            let &(_, after_ms) = ranks.iter().find(|(rank, _)| *rank == me)?;
            let (addresses, nodes) = (addresses.clone(), nodes.to_vec());
            Some(std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(after_ms));
                let mut failover = Failover::new(me, &nodes, Tcp::new(me, hub, addresses));
                let speaks = !is_spoken_for(&mut failover);
                while speaks && !failover.has_told(Instant::now()) {
                    std::thread::sleep(Duration::from_millis(5));
                }
                speaks.then_some(me)
            }))
        };
        // The listeners of lost ranks are closed here.
        let threads: Vec<_> = hubs.into_iter().enumerate().filter_map(of_rank).collect();
        threads.into_iter().filter_map(|thread| thread.join().expect("it ends")).collect()
    }

    #[test]
    fn one_rank_speaks_for_all_that_reach_it() {
        let one_host = [0; 6];
        let late = [(1, 300), (2, 0), (3, 100), (4, 0), (5, 200)];
        assert_eq!(speakers(6, &one_host, &late), [1]);
        // A whole host is lost with the first: the first rank of the next host reports, though others notice before it.
        let two_hosts = [0, 0, 0, 3, 3, 3];
        assert_eq!(speakers(6, &two_hosts, &[(3, 100), (4, 0), (5, 0)]), [3]);
        assert_eq!(speakers(2, &[0, 0], &[(1, 0)]), [1]);
    }

    #[test]
    fn a_rank_speaks_where_who_was_asked_does_not() {
        let hub = Hub::listen(Listen::Loopback).expect("a hub");
        let addresses = vec![None, Some(hub.address.clone()), None];
        // A stopped rank: its host accepts connections, but nothing answers.
        let own = Hub::listen(Listen::Loopback).expect("a hub");
        let start = Instant::now();
        let mut failover = Failover::new(2, &[0, 0, 0], Tcp::new(2, own, addresses));
        assert!(!is_spoken_for(&mut failover));
        assert!(start.elapsed() >= ANSWER && start.elapsed() < ANSWER + LINGER, "{:?}", start.elapsed());
        drop(hub);
    }
}
