//! A simulated network and clock: connections with latencies between the processes of several hosts, hosts that are cut
//! off, and strangers.

use crate::ranks::connect::{Channel, Greetings, Hello, Joining, TOKEN};
use std::collections::{BTreeSet, VecDeque};
use std::io::{Error, ErrorKind, Read, Write};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Time limit for a host to accept a connection.
const ACCEPT_MS: u64 = 1_000;
/// Time limit for a greeting.
const GREETING_MS: u64 = 5_000;
/// Rank that strangers claim.
const STRANGER: usize = 99;

pub(super) struct Random(pub u64);

impl Random {
    /// SplitMix64.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number of `low..=high`.
    pub fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }

    pub fn one_in(&mut self, n: u64) -> bool {
        self.next().is_multiple_of(n)
    }
}

/// Draws the host of each of two or more processes: up to three on each of up to four hosts.
pub(super) fn hosts(random: &mut Random) -> Vec<usize> {
    let mut hosts = Vec::new();
    for host in 0..random.within(1, 4) as usize {
        hosts.extend(std::iter::repeat_n(host, random.within(1, 3) as usize));
    }
    if hosts.len() < 2 {
        hosts.push(0);
    }
    hosts
}

/// A part of the data in one direction of a connection.
enum Segment {
    Bytes(Vec<u8>),
    End,
    /// The other side closed its end with data unread, so that it sends nothing again.
    Reset,
}

/// One direction of a connection.
struct Pipe {
    from: usize,
    to: usize,
    /// With the time of arrival; `None` while the hosts cannot reach each other.
    segments: VecDeque<(Option<u64>, Segment)>,
    reset: bool,
    ended: bool,
}

/// The network, and the time.
pub(super) struct Network {
    pub random: Random,
    start: Instant,
    pub now_ms: u64,
    host_of: Vec<usize>,
    /// Hosts that are cut off from all others, which reach each other.
    cut_off: BTreeSet<usize>,
    pipes: Vec<Pipe>,
    /// Connections that a process has yet to accept, with their time of arrival.
    arriving: Vec<VecDeque<(u64, Stream)>>,
    /// Processes that have ended: their hosts refuse connections.
    pub ended: BTreeSet<usize>,
    /// A message in so many is late.
    late_one_in: u64,
}

pub(super) type SharedNetwork = Arc<Mutex<Network>>;

pub(super) fn network(net: &SharedNetwork) -> MutexGuard<'_, Network> {
    net.lock().expect("one thread")
}

impl Network {
    /// Processes on these hosts. In half of all networks some messages are late.
    pub fn new(mut random: Random, host_of: Vec<usize>) -> SharedNetwork {
        let late_one_in = if random.one_in(2) { u64::MAX } else { 40 };
        let arriving = host_of.iter().map(|_| VecDeque::new()).collect();
        Arc::new(Mutex::new(Network {
            random,
            start: Instant::now(),
            now_ms: 0,
            host_of,
            cut_off: BTreeSet::new(),
            pipes: Vec::new(),
            arriving,
            ended: BTreeSet::new(),
            late_one_in,
        }))
    }

    pub fn now(&self) -> Instant {
        self.start + Duration::from_millis(self.now_ms)
    }

    /// The host of a process. Strangers have the first.
    pub fn host(&self, process: usize) -> usize {
        self.host_of.get(process).copied().unwrap_or(0)
    }

    fn reaches(&self, a: usize, b: usize) -> bool {
        let [a, b] = [a, b].map(|process| self.host(process));
        a == b || self.cut_off.contains(&a) == self.cut_off.contains(&b)
    }

    fn latency_ms(&mut self, a: usize, b: usize) -> u64 {
        if self.random.one_in(self.late_one_in) {
            return self.random.within(50, 900);
        }
        let most = if self.host(a) == self.host(b) { 1 } else { 20 };
        self.random.within(0, most)
    }

    fn send(&mut self, pipe: usize, segment: Segment) {
        let (from, to) = (self.pipes[pipe].from, self.pipes[pipe].to);
        let at = self.reaches(from, to).then(|| self.now_ms + self.latency_ms(from, to));
        let segments = &mut self.pipes[pipe].segments;
        // Bytes of a connection arrive in order.
        let at = match segments.back() {
            Some((last, _)) => last.zip(at).map(|(last, at)| at.max(last)),
            None => at,
        };
        segments.push_back((at, segment));
    }

    /// Cuts hosts off: what has not arrived is sent again later.
    pub fn cut(&mut self, hosts: BTreeSet<usize>) {
        self.cut_off = hosts;
        for p in 0..self.pipes.len() {
            let (from, to) = (self.pipes[p].from, self.pipes[p].to);
            if !self.reaches(from, to) {
                let late = self.pipes[p].segments.iter_mut().filter(|(at, _)| at.is_none_or(|at| at > self.now_ms));
                late.for_each(|(at, _)| *at = None);
            }
        }
    }

    /// Lets all hosts reach each other. TCP sends again after a while.
    pub fn heal(&mut self) {
        self.cut_off.clear();
        for p in 0..self.pipes.len() {
            let again = self.now_ms + self.random.within(0, 1_000);
            self.pipes[p].segments.iter_mut().filter(|(at, _)| at.is_none()).for_each(|(at, _)| *at = Some(again));
        }
    }

    /// Takes the connections to a process that have arrived.
    pub fn arrived(&mut self, process: usize) -> Vec<Stream> {
        let now_ms = self.now_ms;
        let waiting = std::mem::take(&mut self.arriving[process]);
        let (come, later): (VecDeque<_>, VecDeque<_>) = waiting.into_iter().partition(|(at, _)| *at <= now_ms);
        self.arriving[process] = later;
        come.into_iter().map(|(_, stream)| stream).collect()
    }

    /// Ends a process: its host refuses connections, and closes those that it has yet to accept when they are dropped.
    pub fn end(&mut self, process: usize) -> VecDeque<(u64, Stream)> {
        self.ended.insert(process);
        std::mem::take(&mut self.arriving[process])
    }

    /// Returns whether data that has arrived on a pipe is unread.
    fn has_unread(&self, pipe: usize) -> bool {
        let arrived = |(at, segment): &(Option<u64>, Segment)| {
            at.is_some_and(|at| at <= self.now_ms) && matches!(segment, Segment::Bytes(_))
        };
        self.pipes[pipe].segments.iter().any(arrived)
    }
}

/// One end of a simulated connection, which does not block. It closes when it is dropped.
pub(super) struct Stream {
    network: SharedNetwork,
    incoming: usize,
    outgoing: usize,
}

impl Stream {
    /// Both ends of a connection.
    fn pair(net: &SharedNetwork, near: usize, far: usize) -> (Stream, Stream) {
        let mut network = network(net);
        let first = network.pipes.len();
        for (from, to) in [(near, far), (far, near)] {
            network.pipes.push(Pipe { from, to, segments: VecDeque::new(), reset: false, ended: false });
        }
        let end = |incoming, outgoing| Stream { network: net.clone(), incoming, outgoing };
        (end(first + 1, first), end(first, first + 1))
    }
}

impl Stream {
    /// The process at the other end.
    pub fn peer(&self) -> usize {
        network(&self.network).pipes[self.outgoing].to
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        let mut network = network(&self.network);
        let now_ms = network.now_ms;
        let pipe = &mut network.pipes[self.incoming];
        let arrived = |at: &Option<u64>| at.is_some_and(|at| at <= now_ms);
        if pipe.reset {
            return Err(ErrorKind::ConnectionReset.into());
        }
        if pipe.ended {
            return Ok(0);
        }
        match pipe.segments.front_mut() {
            Some((at, Segment::Bytes(bytes))) if arrived(at) => {
                let taken = bytes.len().min(buffer.len());
                buffer[..taken].copy_from_slice(&bytes[..taken]);
                bytes.drain(..taken);
                if bytes.is_empty() {
                    pipe.segments.pop_front();
                }
                Ok(taken)
            }
            Some((at, Segment::End)) if arrived(at) => {
                pipe.ended = true;
                Ok(0)
            }
            Some((at, Segment::Reset)) if arrived(at) => {
                pipe.reset = true;
                Err(ErrorKind::ConnectionReset.into())
            }
            _ => Err(ErrorKind::WouldBlock.into()),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> Result<usize, Error> {
        let mut network = network(&self.network);
        if network.pipes[self.incoming].reset {
            return Err(ErrorKind::BrokenPipe.into());
        }
        network.send(self.outgoing, Segment::Bytes(bytes.to_vec()));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> Result<(), Error> {
        Ok(())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let Ok(mut network) = self.network.lock() else { return };
        let mut segment = Segment::End;
        if network.has_unread(self.incoming) {
            network.pipes[self.outgoing].segments.retain(|(at, _)| at.is_some());
            segment = Segment::Reset;
        }
        network.send(self.outgoing, segment);
    }
}

/// Connects a process to another: a stream that may be used later, or `None` if the other refuses or cannot be reached.
struct Dialing {
    /// When the outcome is known, and whether the connection stands then.
    known_ms: u64,
    stream: Option<Stream>,
}

impl Dialing {
    fn new(net: &SharedNetwork, from: usize, to: usize) -> Dialing {
        let mut locked = network(net);
        if !locked.reaches(from, to) {
            return Dialing { known_ms: locked.now_ms + ACCEPT_MS, stream: None };
        }
        let known_ms = locked.now_ms + locked.latency_ms(from, to);
        if locked.ended.contains(&to) {
            return Dialing { known_ms, stream: None };
        }
        drop(locked);
        let (near, far) = Stream::pair(net, from, to);
        network(net).arriving[to].push_back((known_ms, far));
        Dialing { known_ms, stream: Some(near) }
    }
}

/// A process's request to connect to another, until the end of the greeting.
pub(super) struct Connecting {
    network: SharedNetwork,
    dialing: Option<Dialing>,
    joining: Option<(u64, Joining<Stream>)>,
    token: [u8; TOKEN],
    hello: Hello,
}

impl Connecting {
    pub fn new(net: &SharedNetwork, from: usize, to: usize, token: [u8; TOKEN], hello: Hello) -> Connecting {
        let dialing = Some(Dialing::new(net, from, to));
        Connecting { network: net.clone(), dialing, joining: None, token, hello }
    }

    /// The connection, or `Some(None)` if there is none; `None` until that is known.
    pub fn outcome(&mut self) -> Option<Option<Stream>> {
        let now_ms = network(&self.network).now_ms;
        if let Some(dialing) = self.dialing.take_if(|dialing| dialing.known_ms <= now_ms) {
            let joining = dialing.stream.and_then(|stream| Joining::new(stream, self.token, &self.hello).ok());
            self.joining = joining.map(|joining| (now_ms + GREETING_MS, joining));
        }
        if self.dialing.is_some() {
            return None;
        }
        match self.joining.take() {
            None => Some(None),
            Some((until_ms, mut joining)) => match joining.go_on() {
                Ok(true) => Some(Some(joining.stream)),
                Ok(false) if now_ms < until_ms => {
                    self.joining = Some((until_ms, joining));
                    None
                }
                Ok(false) | Err(_) => Some(None),
            },
        }
    }
}

/// A greeting for the watch.
pub(super) fn hello(rank: usize, size: usize) -> Hello {
    Hello { channel: Channel::Watch, rank, size, pid: rank as u32, host: String::new() }
}

/// Goes on with the greetings of a process's hub.
pub(super) fn accept(
    net: &SharedNetwork,
    process: usize,
    greetings: &mut Greetings<Stream>,
) -> Option<(Hello, Stream)> {
    let (now, come) = {
        let mut network = network(net);
        (network.now(), network.arrived(process))
    };
    come.into_iter().for_each(|stream| greetings.begin(stream, now));
    let greeted = greetings.next(now);
    assert!(greeted.as_ref().is_none_or(|(hello, _)| hello.rank != STRANGER), "a stranger is taken for a rank");
    greeted
}

/// A process that is no rank, and does not know the token.
pub(super) struct Stranger {
    stream: Stream,
    /// Sends back what it hears.
    echoes: bool,
}

impl Stranger {
    pub fn new(net: &SharedNetwork, rank: usize) -> Option<Stranger> {
        let mut stream = Dialing::new(net, STRANGER, rank).stream?;
        let kind = network(net).random.within(0, 3);
        let noise: Vec<u8> = (0..80).map(|_| network(net).random.next() as u8).collect();
        match kind {
            // It connects and says nothing, sends noise, or greets with another token.
            0 => {}
            1 => drop(stream.write(&noise)),
            _ => {
                let joining = Joining::new(stream, [0; TOKEN], &hello(STRANGER, 2)).ok()?;
                return Some(Stranger { stream: joining.stream, echoes: kind == 2 });
            }
        }
        Some(Stranger { stream, echoes: kind == 0 })
    }

    pub fn turn(&mut self) {
        let mut buffer = [0; 256];
        if let Ok(n @ 1..) = self.stream.read(&mut buffer)
            && self.echoes
        {
            // A hub's challenge ends with its proof, which must not pass for a rank's.
            let _ = self.stream.write(&buffer[n.saturating_sub(32)..n]);
        }
    }
}
