//! Failover: if the first rank, which normally reports for all, is lost, the lowest reachable rank reports instead.
//!
//! Every rank listens for this case and knows the addresses of a few lower ones. A rank that has lost the first asks
//! those to report for it. If none of them answers, it reports itself, for all that have asked it. So each side of a
//! partitioned network prints one message.

use crate::ranks::connect::{Address, Channel, Hello, Hub};
use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

/// A rank's state for finding out who reports.
pub struct Failover {
    hello: Hello,
    hub: Hub,
    /// Addresses of the lower ranks that this one asks.
    lower: Vec<Address>,
    /// Ranks for which this one reports, and their connections.
    followers: BTreeSet<usize>,
    links: Vec<TcpStream>,
}

/// Time limit for an answer. The asked ranks notice the same loss, from heartbeats sent at the same moment.
const ANSWER: Duration = Duration::from_millis(1500);
/// Time for which the reporting rank waits for others to ask, and for which these wait for its report.
const LINGER: Duration = Duration::from_secs(2);
/// Polling interval.
const TURN: Duration = Duration::from_millis(5);
/// Number of hosts of which a rank is asked, besides one's own.
const HOSTS: usize = 4;
/// The byte that the reporting rank sends after its report.
const SPOKEN: u8 = 1;

/// The answer of a rank that was asked.
enum News {
    /// It takes charge of the report.
    Took,
    Spoke,
    /// It cannot be reached, or no longer; the flag is true if it had answered.
    Lost(bool),
}

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

impl Failover {
    /// `hub` is where this rank listens, `addresses` where all ranks do. `nodes` has the first rank of each rank's
    /// machine.
    pub fn new(me: usize, hub: Hub, addresses: &[Option<Address>], nodes: &[usize]) -> Failover {
        let host = String::new();
        let hello = Hello { channel: Channel::Watch, rank: me, size: addresses.len(), pid: std::process::id(), host };
        let lower = asked(me, nodes).into_iter().filter_map(|rank| addresses.get(rank)?.clone()).collect();
        Failover { hello, hub, lower, followers: BTreeSet::new(), links: Vec::new() }
    }

    /// Returns whether another rank has reported for this one, which has lost the first. If none has, this rank must
    /// report, and then call [`Failover::spoken`].
    pub fn is_spoken_for(&mut self) -> bool {
        let (send, news) = channel();
        for address in self.lower.clone() {
            let (send, hello) = (send.clone(), self.hello.clone());
            let asks = move || ask(&address, &hello, &send);
            // A failed thread counts as a rank that does not answer.
            let _ = std::thread::Builder::new().name("ask".to_string()).spawn(asks);
        }
        // Once all threads have dropped their senders, there is nothing left to wait for.
        drop(send);
        let start = Instant::now();
        let mut took = 0;
        loop {
            self.welcome();
            match news.recv_timeout(TURN) {
                Ok(News::Spoke) => {
                    self.tell();
                    return true;
                }
                Ok(News::Took) => took += 1,
                Ok(News::Lost(had_answered)) => took -= usize::from(had_answered),
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {}
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return false,
            }
            let patience = if took > 0 { ANSWER + LINGER } else { ANSWER };
            if start.elapsed() > patience {
                return false;
            }
        }
    }

    /// Tells all that ask that this rank has reported. Returns when all higher ranks have asked, or when no more are
    /// expected.
    pub fn spoken(mut self) {
        let start = Instant::now();
        let higher = self.hello.size.saturating_sub(self.hello.rank + 1);
        loop {
            self.welcome();
            self.tell();
            if self.followers.len() >= higher || start.elapsed() > LINGER {
                return;
            }
            std::thread::sleep(TURN);
        }
    }

    /// Accepts ranks that ask this one to report for them.
    fn welcome(&mut self) {
        while let Ok(Some((hello, link))) = self.hub.next() {
            self.followers.insert(hello.rank);
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

fn ask(address: &Address, hello: &Hello, news: &Sender<News>) {
    let heard = |mut link: TcpStream| -> std::io::Result<()> {
        let _ = news.send(News::Took);
        let mut word = [0];
        link.set_read_timeout(Some(ANSWER + LINGER))?;
        link.read_exact(&mut word)?;
        if word == [SPOKEN] { Ok(()) } else { Err(ErrorKind::InvalidData.into()) }
    };
    let last = match address.connect(hello) {
        Ok(link) => heard(link).map_or(News::Lost(true), |()| News::Spoke),
        Err(_) => News::Lost(false),
    };
    let _ = news.send(last);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::connect::Listen;
    use std::sync::Arc;

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

    /// The ranks that report, out of `size`. Each of `ranks` loses the first after a number of milliseconds.
    fn speakers(size: usize, nodes: &[usize], ranks: &[(usize, u64)]) -> Vec<usize> {
        let hubs: Vec<Hub> = (0..size).map(|_| Hub::listen(Listen::Loopback).expect("a hub")).collect();
        let addresses: Arc<Vec<Option<Address>>> = Arc::new(hubs.iter().map(|hub| Some(hub.address.clone())).collect());
        let of_rank = |(me, hub): (usize, Hub)| {
            let &(_, after_ms) = ranks.iter().find(|(rank, _)| *rank == me)?;
            let (addresses, nodes) = (addresses.clone(), nodes.to_vec());
            Some(std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(after_ms));
                let mut failover = Failover::new(me, hub, &addresses, &nodes);
                let speaks = !failover.is_spoken_for();
                if speaks {
                    failover.spoken();
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
        let addresses = [None, Some(hub.address.clone()), None];
        // A stopped rank: its host accepts connections, but nothing answers.
        let own = Hub::listen(Listen::Loopback).expect("a hub");
        let start = Instant::now();
        let mut failover = Failover::new(2, own, &addresses, &[0, 0, 0]);
        assert!(!failover.is_spoken_for());
        assert!(start.elapsed() >= ANSWER && start.elapsed() < ANSWER + LINGER, "{:?}", start.elapsed());
        drop(hub);
    }
}
