//! Who speaks when the first rank, which else speaks for all, is lost: the lowest rank that the others still reach.
//!
//! Every rank listens for that, and knows where a few lower ones do. One that has lost the first asks those to speak for it, and speaks
//! itself, for all that have asked it, where none of them answers; so each side of a network that fell apart has one message.

use crate::ranks::connect::{Address, Channel, Hello, Hub};
use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

/// What one rank needs for finding out who speaks.
pub struct Deputy {
    hello: Hello,
    hub: Hub,
    /// Where ranks listen that this one asks to speak, each of a lower rank.
    lower: Vec<Address>,
    /// Ranks that this one speaks for, and their connections.
    followers: BTreeSet<usize>,
    links: Vec<TcpStream>,
}

/// How long those who are asked may take to answer. They notice the same loss, from beats that were sent at the same moment.
const ANSWER: Duration = Duration::from_millis(1500);
/// How long who speaks waits for others to ask, and others for it to have spoken.
const LINGER: Duration = Duration::from_secs(2);
/// How often a rank looks for news.
const TURN: Duration = Duration::from_millis(5);
/// Hosts of which a rank is asked, beside one's own.
const HOSTS: usize = 4;
/// What who speaks sends when it has.
const SPOKEN: u8 = 1;

/// What one that was asked did.
enum News {
    /// It will see to it that there is a message.
    Took,
    Spoke,
    /// It cannot be reached, or not any more; the flag says that it had answered.
    Lost(bool),
}

/// The ranks that rank `me` asks to speak, given the first rank of the machine of each: the first of the first hosts and of its own
/// that is not the first of all, as far as they are lower. So nobody asks more than a few, and all ask the same of those.
fn asked(me: usize, nodes: &[usize]) -> Vec<usize> {
    let mut hosts = BTreeSet::new();
    let firsts = (1..me.min(nodes.len())).filter(|&rank| hosts.insert(nodes[rank]));
    let firsts: Vec<usize> = firsts.collect();
    let near = |(i, rank): &(usize, usize)| *i < HOSTS || nodes.get(*rank) == nodes.get(me);
    firsts.into_iter().enumerate().filter(near).map(|(_, rank)| rank).collect()
}

impl Deputy {
    /// `hub` is where this rank listens, and `addresses` where all do. `nodes` has the first rank of the machine of each.
    pub fn new(me: usize, hub: Hub, addresses: &[Option<Address>], nodes: &[usize]) -> Deputy {
        let host = String::new();
        let hello = Hello { channel: Channel::Watch, rank: me, size: addresses.len(), pid: std::process::id(), host };
        let lower = asked(me, nodes).into_iter().filter_map(|rank| addresses.get(rank)?.clone()).collect();
        Deputy { hello, hub, lower, followers: BTreeSet::new(), links: Vec::new() }
    }

    /// Whether another rank has spoken for this one, which had lost the first. Where none has, this one is to speak, and then to call
    /// [`Deputy::spoken`].
    pub fn is_spoken_for(&mut self) -> bool {
        let (send, news) = channel();
        for address in self.lower.clone() {
            let (send, hello) = (send.clone(), self.hello.clone());
            let asks = move || ask(&address, &hello, &send);
            // One that cannot be asked is as one that does not answer.
            let _ = std::thread::Builder::new().name("ask".to_string()).spawn(asks);
        }
        // When all have been told of, there is nobody left to wait for.
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

    /// Tells all who ask that this rank has spoken. Returns when all higher ones have, or no more are to be expected.
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

    /// Takes those who ask this rank to speak for them.
    fn welcome(&mut self) {
        while let Ok(Some((hello, link))) = self.hub.next() {
            self.followers.insert(hello.rank);
            self.links.push(link);
        }
    }

    /// Tells those who have asked.
    fn tell(&mut self) {
        for mut link in self.links.drain(..) {
            // Who does not hear it is gone, or will speak.
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
    use std::sync::Arc;

    #[test]
    fn a_rank_asks_a_few_lower_ones_that_others_ask_too() {
        // Three hosts of three.
        let nodes = [0, 0, 0, 3, 3, 3, 6, 6, 6];
        let all: Vec<Vec<usize>> = (0..9).map(|me| asked(me, &nodes)).collect();
        let (one, two, three) = (vec![1], vec![1, 3], vec![1, 3, 6]);
        let expected: [&[usize]; 9] = [&[], &[], &one, &one, &two, &two, &two, &three, &three];
        assert_eq!(all, expected);
        // Of many hosts the first ones, and the own one.
        let nodes: Vec<usize> = (0..64).map(|rank| rank / 2 * 2).collect();
        assert_eq!(asked(40, &nodes), [1, 2, 4, 6]);
        assert_eq!(asked(41, &nodes), [1, 2, 4, 6, 40]);
    }

    /// Those of `ranks` that speak, of `size` that were started, when these have lost the first, each after so many milliseconds.
    fn speakers(size: usize, nodes: &[usize], ranks: &[(usize, u64)]) -> Vec<usize> {
        let hubs: Vec<Hub> = (0..size).map(|_| Hub::listen().expect("a hub")).collect();
        let addresses: Arc<Vec<Option<Address>>> = Arc::new(hubs.iter().map(|hub| Some(hub.address.clone())).collect());
        let of_rank = |(me, hub): (usize, Hub)| {
            let &(_, after_ms) = ranks.iter().find(|(rank, _)| *rank == me)?;
            let (addresses, nodes) = (addresses.clone(), nodes.to_vec());
            Some(std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(after_ms));
                let mut deputy = Deputy::new(me, hub, &addresses, &nodes);
                let speaks = !deputy.is_spoken_for();
                if speaks {
                    deputy.spoken();
                }
                speaks.then_some(me)
            }))
        };
        // What listens for ranks that are lost too is closed here.
        let threads: Vec<_> = hubs.into_iter().enumerate().filter_map(of_rank).collect();
        threads.into_iter().filter_map(|thread| thread.join().expect("it ends")).collect()
    }

    #[test]
    fn one_rank_speaks_for_all_that_reach_it() {
        let one_host = [0; 6];
        let late = [(1, 300), (2, 0), (3, 100), (4, 0), (5, 200)];
        assert_eq!(speakers(6, &one_host, &late), [1]);
        // A whole host is lost with the first: the next one's first speaks, though others notice before it.
        let two_hosts = [0, 0, 0, 3, 3, 3];
        assert_eq!(speakers(6, &two_hosts, &[(3, 100), (4, 0), (5, 0)]), [3]);
        assert_eq!(speakers(2, &[0, 0], &[(1, 0)]), [1]);
    }

    #[test]
    fn a_rank_speaks_where_who_was_asked_does_not() {
        let hub = Hub::listen().expect("a hub");
        let addresses = [None, Some(hub.address.clone()), None];
        // It is stopped: its host takes connections, and nobody answers.
        let own = Hub::listen().expect("a hub");
        let start = Instant::now();
        let mut deputy = Deputy::new(2, own, &addresses, &[0, 0, 0]);
        assert!(!deputy.is_spoken_for());
        assert!(start.elapsed() >= ANSWER && start.elapsed() < ANSWER + LINGER, "{:?}", start.elapsed());
        drop(hub);
    }
}
