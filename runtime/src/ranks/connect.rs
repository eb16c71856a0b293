//! Connections of all ranks to the first one, the *hub*: where it listens, and a greeting in which both sides prove that
//! they know the hub's token, which itself is never sent.
//!
//! A rank sends a nonce and its identity, the hub a nonce and an HMAC over all of them, the rank another. A hub takes
//! many greetings at once, each within one time limit, so that strangers who say nothing keep nobody out.
//!
//! Both sides are state machines over streams that do not block. They are told the time, so that tests drive them over
//! a simulated network.

use crate::error::WatchError;
use hmac::{Hmac, KeyInit, Mac};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use sha2::Sha256;
use std::cell::RefCell;
use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::io::{Error, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::str::FromStr;
use std::time::{Duration, Instant};

/// The address of a hub. Whoever knows the token can prove to be a rank of the run, or its hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    pub hosts: Vec<IpAddr>,
    pub port: u16,
    pub token: [u8; TOKEN],
}

pub const TOKEN: usize = 16;

/// The interfaces on which a hub listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listen {
    /// This machine alone.
    Loopback,
    Everywhere,
    /// The first interface with an address in a network, which is another on each host.
    Within(Network),
}

/// A network of IPv4 addresses, written `10.1.0.0/16`; without a length, a single address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    address: Ipv4Addr,
    bits: u8,
}

impl Network {
    fn has(&self, host: Ipv4Addr) -> bool {
        let shift = u32::from(32 - self.bits);
        let prefix = |host: Ipv4Addr| u32::from(host).checked_shr(shift).unwrap_or(0);
        prefix(host) == prefix(self.address)
    }
}

impl FromStr for Network {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Network, Self::Err> {
        let (address, bits) = text.split_once('/').unwrap_or((text, "32"));
        let address = address.parse().map_err(|_| "an IPv4 address is expected, as in 10.1.0.7 or 10.1.0.0/16")?;
        let bits = bits.parse().ok().filter(|&bits| bits <= 32).ok_or("a network's length is 0 to 32 bits")?;
        Ok(Network { address, bits })
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.bits)
    }
}

/// The purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Channel {
    /// Only checks that the hub is there.
    Probe,
    Watch,
    Words,
}

/// The identity that a rank sends when it connects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    pub channel: Channel,
    pub rank: usize,
    /// The number of ranks with which it was started.
    pub size: usize,
    pub pid: u32,
    pub host: String,
}

/// The first rank's end, which accepts connections.
pub struct Hub {
    listener: TcpListener,
    pub address: Address,
    greetings: RefCell<Greetings<TcpStream>>,
}

/// The greetings of a hub.
pub(super) struct Greetings<S> {
    token: [u8; TOKEN],
    /// Those in progress, oldest first.
    begun: VecDeque<Greeting<S>>,
    done: VecDeque<(Hello, S)>,
}

/// A rank's side of a greeting. Its stream does not block.
pub(super) struct Joining<S> {
    pub stream: S,
    token: [u8; TOKEN],
    nonce: [u8; NONCE],
    hello: Vec<u8>,
    heard: Vec<u8>,
    /// The hub has proved that it knows the token, and was sent the rank's proof.
    proved: bool,
}

/// Time limit for the ranks' first connection, if all know where the hub is.
const CONNECT: Duration = Duration::from_secs(8);
/// Time limit for a host to accept a connection.
const ACCEPT: Duration = Duration::from_secs(1);
/// Time limit for a whole greeting, on either side.
const GREETING: Duration = Duration::from_secs(5);
/// Maximum number of greetings in progress. A further one replaces the oldest; ranks take milliseconds.
const MOST_GREETINGS: usize = 256;
/// Maximum number of bytes of a host's name; longer names are cut.
const LONGEST_NAME: usize = 255;
/// The beginning of a greeting, with the version of the protocol.
const TITLE: [u8; 8] = *b"altipln2";
const NONCE: usize = 16;
const PROOF: usize = 32;
/// Bytes of a block of SHA-256.
const BLOCK: usize = 64;
/// Bytes of a [`Hello`] before the host's name.
const HEAD: usize = 14;
/// The hub's last byte of a greeting.
const WELCOME: u8 = 1;

/// The proof that a side knows the token: an HMAC over both nonces and the rank's identity. Each side has a word of its
/// own, so that no proof can be sent back.
fn mac(token: &[u8; TOKEN], side: &[u8], nonces: [&[u8; NONCE]; 2], hello: &[u8]) -> Hmac<Sha256> {
    // Keys shorter than a block are padded with zeros.
    let mut key = [0; BLOCK];
    key[..TOKEN].copy_from_slice(token);
    let mut mac = Hmac::new(&key.into());
    [side, nonces[0], nonces[1], hello].into_iter().for_each(|part| mac.update(part));
    mac
}

const OF_HUB: &[u8] = b"hub ";
const OF_RANK: &[u8] = b"rank";

/// Bytes that nobody can guess.
fn random<const N: usize>() -> Result<[u8; N], Error> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}

/// Waits until there is something to read, or until `end`.
fn wait_to_read(stream: &TcpStream, end: Instant) -> Result<(), Error> {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(ErrorKind::TimedOut.into());
    }
    // Rounded up, so that the last millisecond is not spent in a busy loop.
    let limit = PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
    match poll(&mut [PollFd::new(stream.as_fd(), PollFlags::POLLIN)], limit) {
        Ok(_) | Err(nix::Error::EINTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

impl Address {
    /// Encodes the token in hex, the port and the hosts in one line.
    pub fn encode(&self) -> String {
        let token: String = self.token.iter().map(|byte| format!("{byte:02x}")).collect();
        let hosts: Vec<String> = self.hosts.iter().map(ToString::to_string).collect();
        format!("{token} {} {}", self.port, hosts.join(" "))
    }

    pub fn decode(text: &str) -> Option<Address> {
        let mut words = text.split(' ');
        let (hex, port) = (words.next()?, words.next()?.parse().ok()?);
        let mut token = [0; TOKEN];
        for (i, byte) in token.iter_mut().enumerate() {
            *byte = u8::from_str_radix(hex.get(2 * i..2 * i + 2)?, 16).ok()?;
        }
        Some(Address { hosts: words.filter_map(|host| host.parse().ok()).collect(), port, token })
    }

    /// Connects to the hub at the first of its addresses that answers. If none does, returns the error of the last.
    pub fn connect(&self, hello: &Hello) -> Result<TcpStream, WatchError> {
        let mut last = WatchError::NoAddress;
        for &host in &self.hosts {
            match self.greet(SocketAddr::new(host, self.port), hello) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = WatchError::Join { host, error },
            }
        }
        Err(last)
    }

    /// As [`Address::connect`], but retries for as long as a running hub may take to answer.
    pub fn join(&self, hello: &Hello) -> Result<TcpStream, WatchError> {
        let end = Instant::now() + CONNECT;
        loop {
            match self.connect(hello) {
                Err(WatchError::Join { .. }) if Instant::now() < end => std::thread::sleep(Duration::from_millis(50)),
                done => return done,
            }
        }
    }

    fn greet(&self, place: SocketAddr, hello: &Hello) -> Result<TcpStream, Error> {
        let stream = TcpStream::connect_timeout(&place, ACCEPT)?;
        let end = Instant::now() + GREETING;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        let mut joining = Joining::new(stream, self.token, hello)?;
        while !joining.go_on()? {
            wait_to_read(&joining.stream, end)?;
        }
        joining.stream.set_nonblocking(false)?;
        joining.stream.set_write_timeout(Some(GREETING))?;
        Ok(joining.stream)
    }
}

/// Reads into `heard` until it has `needed` bytes. False if more have yet to arrive.
pub(super) fn read_to(stream: &mut impl Read, heard: &mut Vec<u8>, needed: usize) -> Result<bool, Error> {
    let mut buffer = [0; TITLE.len() + NONCE + HEAD + LONGEST_NAME];
    while heard.len() < needed {
        let wanted = (needed - heard.len()).min(buffer.len());
        match stream.read(&mut buffer[..wanted]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => heard.extend(&buffer[..n]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

impl<S: Read + Write> Joining<S> {
    /// Sends a nonce and the rank's identity.
    pub fn new(mut stream: S, token: [u8; TOKEN], hello: &Hello) -> Result<Joining<S>, Error> {
        let (nonce, hello) = (random::<NONCE>()?, hello.encode());
        stream.write_all(&[&TITLE[..], &nonce, &hello].concat())?;
        Ok(Joining { stream, token, nonce, hello, heard: Vec::new(), proved: false })
    }

    /// Reads what has arrived, no byte more than the greeting has, and answers it. True once the hub has welcomed the
    /// rank.
    pub fn go_on(&mut self) -> Result<bool, Error> {
        if !self.proved {
            if !read_to(&mut self.stream, &mut self.heard, NONCE + PROOF)? {
                return Ok(false);
            }
            let (nonce, proof) = self.heard.split_at(NONCE);
            let mut other = [0; NONCE];
            other.copy_from_slice(nonce);
            let nonces = [&self.nonce, &other];
            let stranger = |_| Error::new(ErrorKind::InvalidData, "what listens there is not this run's first rank");
            mac(&self.token, OF_HUB, nonces, &self.hello).verify_slice(proof).map_err(stranger)?;
            self.stream.write_all(&mac(&self.token, OF_RANK, nonces, &self.hello).finalize().into_bytes())?;
            self.heard.clear();
            self.proved = true;
        }
        match read_to(&mut self.stream, &mut self.heard, 1)? {
            false => Ok(false),
            true if self.heard == [WELCOME] => Ok(true),
            true => Err(ErrorKind::InvalidData.into()),
        }
    }
}

impl Hello {
    fn encode(&self) -> Vec<u8> {
        let mut length = self.host.len().min(LONGEST_NAME);
        while !self.host.is_char_boundary(length) {
            length -= 1;
        }
        let mut bytes = vec![self.channel as u8, length as u8];
        [self.rank as u32, self.size as u32, self.pid].iter().for_each(|n| bytes.extend(n.to_le_bytes()));
        bytes.extend(&self.host.as_bytes()[..length]);
        bytes
    }

    fn read(mut from: impl Read) -> Option<Hello> {
        let mut head = [0; 14];
        from.read_exact(&mut head).ok()?;
        let channel = match head[0] {
            0 => Channel::Probe,
            1 => Channel::Watch,
            2 => Channel::Words,
            _ => return None,
        };
        let number = |at: usize| Some(u32::from_le_bytes(head.get(at..at + 4)?.try_into().ok()?));
        let (rank, size, pid) = (number(2)? as usize, number(6)? as usize, number(10)?);
        let mut host = vec![0; head[1].into()];
        from.read_exact(&mut host).ok()?;
        Some(Hello { channel, rank, size, pid, host: String::from_utf8_lossy(&host).into_owned() })
    }
}

/// A greeting in progress at the hub.
struct Greeting<S> {
    stream: S,
    until: Instant,
    heard: Vec<u8>,
    /// The identity that was sent, and what proves it.
    claimed: Option<(Hello, Hmac<Sha256>)>,
}

impl<S: Read + Write> Greeting<S> {
    /// Reads what has arrived, no byte more than the greeting has, and answers it. Returns the identity of a peer that
    /// has proved it, and an error for one that is gone or a stranger.
    fn go_on(&mut self, token: &[u8; TOKEN]) -> Result<Option<Hello>, Error> {
        loop {
            let needed = match &self.claimed {
                Some(_) => PROOF,
                None => TITLE.len() + NONCE + HEAD + self.heard.get(TITLE.len() + NONCE + 1).map_or(0, |&n| n.into()),
            };
            if self.heard.len() < needed {
                let is_whole = read_to(&mut self.stream, &mut self.heard, needed)?;
                if self.claimed.is_none() && !TITLE.starts_with(&self.heard[..self.heard.len().min(TITLE.len())]) {
                    return Err(ErrorKind::InvalidData.into());
                }
                if !is_whole {
                    return Ok(None);
                }
                // The length of the name may have arrived just now.
                continue;
            }
            match self.claimed.take() {
                None => self.claimed = Some(self.challenge(token)?),
                Some((hello, proof)) => {
                    proof.verify_slice(&self.heard).map_err(|_| ErrorKind::InvalidData)?;
                    self.stream.write_all(&[WELCOME])?;
                    return Ok(Some(hello));
                }
            }
            self.heard.clear();
        }
    }

    /// Answers an identity with a nonce and the hub's proof. Returns what the rank must prove.
    fn challenge(&mut self, token: &[u8; TOKEN]) -> Result<(Hello, Hmac<Sha256>), Error> {
        let (nonce, said) = self.heard[TITLE.len()..].split_at(NONCE);
        let hello = Hello::read(said).ok_or(ErrorKind::InvalidData)?;
        let (mut other, own) = ([0; NONCE], random::<NONCE>()?);
        other.copy_from_slice(nonce);
        let nonces = [&other, &own];
        let proof = mac(token, OF_HUB, nonces, said).finalize().into_bytes();
        let expected = mac(token, OF_RANK, nonces, said);
        self.stream.write_all(&[&own[..], &proof].concat())?;
        Ok((hello, expected))
    }
}

impl<S: Read + Write> Greetings<S> {
    pub fn new(token: [u8; TOKEN]) -> Greetings<S> {
        Greetings { token, begun: VecDeque::new(), done: VecDeque::new() }
    }

    /// Begins the greeting of a peer that has connected. Its stream does not block.
    pub fn begin(&mut self, stream: S, now: Instant) {
        if self.begun.len() >= MOST_GREETINGS {
            self.begun.pop_front();
        }
        self.begun.push_back(Greeting { stream, until: now + GREETING, heard: Vec::new(), claimed: None });
    }

    /// Goes on with all greetings, and returns the identity of a peer whose greeting is complete.
    pub fn next(&mut self, now: Instant) -> Option<(Hello, S)> {
        for mut greeting in std::mem::take(&mut self.begun) {
            match greeting.go_on(&self.token) {
                Ok(Some(hello)) => self.done.push_back((hello, greeting.stream)),
                Ok(None) if now < greeting.until => self.begun.push_back(greeting),
                // The peer is gone, too slow or a stranger.
                Ok(None) | Err(_) => {}
            }
        }
        self.done.pop_front()
    }
}

impl Hub {
    /// Listens on a free port, with a new token.
    pub fn listen(at: Listen) -> Result<Hub, WatchError> {
        let own = || interfaces().map_err(WatchError::Listen);
        let (bound, hosts) = match at {
            Listen::Loopback => (Ipv4Addr::LOCALHOST, vec![Ipv4Addr::LOCALHOST]),
            Listen::Everywhere => (Ipv4Addr::UNSPECIFIED, own()?),
            Listen::Within(network) => {
                let host = own()?.into_iter().find(|&host| network.has(host));
                let host = host.ok_or(WatchError::NoInterface { network: network.to_string() })?;
                (host, vec![host])
            }
        };
        let listener = TcpListener::bind((bound, 0)).map_err(WatchError::Listen)?;
        listener.set_nonblocking(true).map_err(WatchError::Listen)?;
        let port = listener.local_addr().map_err(WatchError::Listen)?.port();
        let token = random().map_err(WatchError::Listen)?;
        let hosts = hosts.into_iter().map(IpAddr::V4).collect();
        let address = Address { hosts, port, token };
        Ok(Hub { listener, address, greetings: RefCell::new(Greetings::new(token)) })
    }

    /// Goes on with all greetings, without waiting, and returns the identity of a peer whose greeting is complete.
    /// `None` if there is none.
    pub fn next(&self) -> Result<Option<(Hello, TcpStream)>, Error> {
        let mut greetings = self.greetings.borrow_mut();
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    if stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).is_ok() {
                        greetings.begin(stream, Instant::now());
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // The peer may have disconnected already.
                Err(error) if [ErrorKind::ConnectionAborted, ErrorKind::Interrupted].contains(&error.kind()) => {}
                Err(error) => return Err(error),
            }
        }
        while let Some((hello, stream)) = greetings.next(Instant::now()) {
            let blocks = stream.set_nonblocking(false).and_then(|()| stream.set_write_timeout(Some(GREETING)));
            if blocks.is_ok() {
                return Ok(Some((hello, stream)));
            }
        }
        Ok(None)
    }

    /// Accepts the connections of all other ranks, which know where the hub is.
    pub fn all(&self, ranks: usize) -> Result<Vec<(usize, TcpStream)>, WatchError> {
        self.those(&(1..ranks).collect())
    }

    /// Accepts the connections of these ranks, which know where the hub is.
    pub fn those(&self, ranks: &BTreeSet<usize>) -> Result<Vec<(usize, TcpStream)>, WatchError> {
        let end = Instant::now() + CONNECT;
        let mut links: Vec<(usize, TcpStream)> = Vec::new();
        while links.len() < ranks.len() {
            match self.next().map_err(WatchError::Listen)? {
                Some((Hello { rank, .. }, stream)) => {
                    if ranks.contains(&rank) && links.iter().all(|(other, _)| *other != rank) {
                        links.push((rank, stream));
                    }
                }
                None => std::thread::sleep(Duration::from_millis(2)),
            }
            if Instant::now() > end {
                return Err(WatchError::NotAll { joined: links.len() + 1, ranks: ranks.len() + 1 });
            }
        }
        Ok(links)
    }
}

/// The addresses of this machine. Loopback addresses come last; without a network there are no others.
fn interfaces() -> Result<Vec<Ipv4Addr>, Error> {
    let interfaces = nix::ifaddrs::getifaddrs()?;
    let address = |i: nix::ifaddrs::InterfaceAddress| i.address?.as_sockaddr_in().map(|a| a.ip());
    let mut hosts: Vec<Ipv4Addr> = interfaces.filter_map(address).collect();
    hosts.sort_by_key(|host| host.is_loopback());
    hosts.dedup();
    Ok(hosts)
}

/// The name of this host.
pub fn host_name() -> String {
    let name = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
    name.unwrap_or_else(|| "an unnamed host".to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_greetings_are_read_as_they_were_written() {
        let address = Address { hosts: vec!["10.0.0.7".parse().expect("an address")], port: 40_000, token: [7; TOKEN] };
        assert_eq!(Address::decode(&address.encode()), Some(address));
        assert_eq!(Address::decode("00 1 ::1"), None);
        for (channel, host) in [(Channel::Probe, ""), (Channel::Watch, "node-b"), (Channel::Words, "é")] {
            let hello = Hello { channel, rank: 70_000, size: 1 << 20, pid: u32::MAX, host: host.to_string() };
            let bytes = hello.encode();
            assert_eq!(Hello::read(&bytes[..bytes.len() - 1]), None);
            assert_eq!(Hello::read(&bytes[..]), Some(hello));
        }
    }

    fn hub() -> Hub {
        Hub::listen(Listen::Loopback).expect("a hub")
    }

    fn hello(rank: usize) -> Hello {
        Hello { channel: Channel::Watch, rank, size: 2, pid: 3, host: "here".to_string() }
    }

    /// The ranks that a hub takes until `end`.
    fn taken(hub: &Hub, end: Instant) -> Vec<usize> {
        let mut taken = Vec::new();
        while Instant::now() < end {
            taken.extend(hub.next().expect("it listens").map(|(hello, _)| hello.rank));
            std::thread::sleep(Duration::from_millis(2));
        }
        taken
    }

    #[test]
    fn a_hub_takes_nobody_without_its_token() {
        let hub = hub();
        let mut other = hub.address.clone();
        other.token[0] ^= 1;
        let known = hub.address.clone();
        let joins = std::thread::spawn(move || (other.connect(&hello(7)).is_err(), known.connect(&hello(1)).is_ok()));
        let mut come = Vec::new();
        while come.is_empty() {
            come.extend(hub.next().expect("it listens").map(|(hello, _)| hello));
        }
        assert_eq!(come, [hello(1)]);
        assert_eq!(joins.join().expect("it ends"), (true, true));
    }

    /// Strangers that echo what they hear, say nothing, say it slowly, or repeat what a rank or the hub has said.
    #[test]
    fn strangers_are_neither_hubs_nor_ranks_and_keep_nobody_out() {
        let echo = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = echo.local_addr().expect("an address").port();
        let echoes = std::thread::spawn(move || {
            let (mut stream, _) = echo.accept().expect("a connection");
            stream.set_read_timeout(Some(Duration::from_millis(300))).expect("a socket");
            let (mut heard, mut buffer) = (Vec::new(), [0; 512]);
            while let Ok(n @ 1..) = stream.read(&mut buffer) {
                heard.extend(&buffer[..n]);
                // Twice, since a proof is longer than a greeting.
                if stream.write_all(&[&buffer[..n], &buffer[..n]].concat()).is_err() {
                    break;
                }
            }
            heard
        });
        let hub = hub();
        let Address { hosts, token, .. } = hub.address.clone();
        let Err(WatchError::Join { error, .. }) = Address { hosts, port, token }.connect(&hello(1)) else {
            panic!("it takes an echo for the hub")
        };
        assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
        let heard = echoes.join().expect("it ends");
        assert!(!heard.windows(TOKEN).any(|part| part == token), "the token is not sent");

        let place = ("127.0.0.1", hub.address.port);
        let silent: Vec<TcpStream> = (0..50).map(|_| TcpStream::connect(place).expect("a connection")).collect();
        let mut repeats = TcpStream::connect(place).expect("a connection");
        repeats.write_all(&heard).expect("it is sent");
        repeats.write_all(&[0; PROOF]).expect("it is sent");
        let mut reflects = TcpStream::connect(place).expect("a connection");
        let refuses_reflection = std::thread::spawn(move || {
            let mut answer = [0; NONCE + PROOF];
            reflects.write_all(&heard).and_then(|()| reflects.read_exact(&mut answer)).expect("the hub answers");
            reflects.write_all(&answer[NONCE..]).expect("it is sent");
            // A closed connection, in either way.
            reflects.read(&mut [0]).unwrap_or(0) == 0
        });
        let mut slow = TcpStream::connect(place).expect("a connection");
        let dribbles = std::thread::spawn(move || {
            for byte in TITLE.into_iter().chain([0; 300]) {
                if slow.write_all(&[byte]).is_err() {
                    return true;
                }
                std::thread::sleep(Duration::from_millis(100));
            }
            false
        });
        let start = Instant::now();
        let known = hub.address.clone();
        let joins = std::thread::spawn(move || known.connect(&hello(1)).map(|_| start.elapsed()));
        assert_eq!(taken(&hub, start + GREETING + Duration::from_millis(500)), [1]);
        let took = joins.join().expect("it ends").expect("it is taken");
        assert!(took < Duration::from_secs(1), "{took:?}");
        // All others were dropped at the end of their time.
        assert!(hub.greetings.borrow().begun.is_empty());
        assert!(dribbles.join().expect("it ends"), "it was cut off");
        assert!(refuses_reflection.join().expect("it ends"), "the hub's own proof makes no rank");
        drop(silent);
    }

    /// A peer that says nothing.
    struct Silent;

    impl Read for Silent {
        fn read(&mut self, _: &mut [u8]) -> Result<usize, Error> {
            Err(ErrorKind::WouldBlock.into())
        }
    }

    impl Write for Silent {
        fn write(&mut self, bytes: &[u8]) -> Result<usize, Error> {
            Ok(bytes.len())
        }

        fn flush(&mut self) -> Result<(), Error> {
            Ok(())
        }
    }

    #[test]
    fn greetings_in_progress_are_few_and_the_newest() {
        let mut greetings = Greetings::new([7; TOKEN]);
        let start = Instant::now();
        let at = |n: usize| start + Duration::from_millis(n as u64);
        (0..MOST_GREETINGS + 9).for_each(|n| greetings.begin(Silent, at(n)));
        assert_eq!(greetings.begun.len(), MOST_GREETINGS);
        assert!(greetings.begun.iter().all(|greeting| greeting.until >= at(9) + GREETING));
        assert!(greetings.next(at(10) + GREETING).is_none());
        assert_eq!(greetings.begun.len(), MOST_GREETINGS - 2, "those whose time is over");
    }

    #[test]
    fn a_hub_of_one_machine_is_not_seen_from_others() {
        let hub = hub();
        assert_eq!(hub.address.hosts, [IpAddr::V4(Ipv4Addr::LOCALHOST)]);
        assert!(hub.listener.local_addr().expect("an address").ip().is_loopback());
        let network = |text: &str| text.parse::<Network>().expect("a network");
        let within = Hub::listen(Listen::Within(network("127.0.0.0/8"))).expect("a hub");
        assert_eq!(within.address.hosts, hub.address.hosts);
        // No interface can have this address.
        let error = Hub::listen(Listen::Within(network("0.0.0.1"))).err().expect("no interface").to_string();
        assert!(error.contains("0.0.0.1/32"), "{error}");
        assert!(network("0.0.0.0/0").has(Ipv4Addr::BROADCAST) && !network("10.1.2.3").has(Ipv4Addr::LOCALHOST));
        for wrong in ["", "10.1.0.0/33", "10.1.0.0/", "host", "::1"] {
            assert!(wrong.parse::<Network>().is_err(), "{wrong}");
        }
        let everywhere = Hub::listen(Listen::Everywhere).expect("a hub");
        assert!(everywhere.listener.local_addr().expect("an address").ip().is_unspecified());
    }
}
