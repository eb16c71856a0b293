//! Notices that a rank is gone, hangs or is cut off, and ends all others with one message and one exit code.
//!
//! Every rank holds a TCP connection to the first one, the *hub*, apart from MPI, which says nothing when a peer is lost and may
//! wait for it for ever. What each rank does is told over it twice a second. A process that dies closes its connection at once; one
//! that is stopped or cut off falls silent. A thread looks after this, so that it does not matter what the rank itself is doing.

use crate::error::WatchError;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What is said of a rank in messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// As the launcher numbers it.
    pub rank: usize,
    pub host: String,
}

/// Where the hub is reached, and what a connection to it begins with, so that nobody else is taken for a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    pub hosts: Vec<IpAddr>,
    pub port: u16,
    pub token: [u8; TOKEN],
}

/// What is done when the run has to end. Both are called on the thread that watches.
pub struct Ends {
    /// Tells the user why.
    pub say: Box<dyn Fn(&str) + Send>,
    /// Ends the process, whatever its other threads wait for.
    pub exit: Box<dyn Fn(u8) + Send>,
}

/// Watches all ranks until [`Watch::finish`].
pub struct Watch {
    /// How this rank is called in messages: `rank 3 on node-b`.
    pub name: String,
    shared: Arc<Mutex<Shared>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Ends the process at once. What MPI does when a process exits may wait for ranks that are no more.
pub fn leave(code: u8) -> ! {
    // SAFETY: it takes no memory and does not return; what is not written yet is lost.
    unsafe { nix::libc::_exit(code.into()) }
}

pub const TOKEN: usize = 16;

/// How often a rank says that it is there.
const BEAT: Duration = Duration::from_millis(500);
/// How long the ranks have for their first connection.
const CONNECT: Duration = Duration::from_secs(8);
/// How long an error that may only follow from the loss of another rank is held back for.
const FOLLOWS: Duration = Duration::from_secs(1);
/// What a rank writes, beside a message that is never longer.
const LONGEST: usize = 4096;

#[derive(Default)]
struct Shared {
    activity: String,
    /// This rank failed; the flag says that it may be since another one was lost.
    failed: Option<(u8, String, bool)>,
    finished: bool,
    /// Connections of a rank that needs no others any more, which are open as long as its process is there.
    kept: Vec<Link>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Frame {
    /// I am there, and do this.
    Beat(String),
    /// I failed; end all.
    Failed(u8, String),
    /// End with this code, and say nothing.
    End(u8),
    /// I am done.
    Bye,
}

/// One end of a connection.
struct Link {
    /// Index of the rank at the other end.
    peer: usize,
    stream: TcpStream,
    incoming: Vec<u8>,
    outgoing: Vec<u8>,
    heard: Instant,
    activity: String,
    bye: bool,
    closed: bool,
}

impl Frame {
    fn write(&self, out: &mut Vec<u8>) {
        let (kind, code, text) = match self {
            Frame::Beat(text) => (0, 0, text.as_str()),
            Frame::Failed(code, text) => (1, *code, text.as_str()),
            Frame::End(code) => (2, *code, ""),
            Frame::Bye => (3, 0, ""),
        };
        let mut length = text.len().min(LONGEST);
        while !text.is_char_boundary(length) {
            length -= 1;
        }
        out.extend([kind, code]);
        out.extend((length as u16).to_le_bytes());
        out.extend(&text.as_bytes()[..length]);
    }

    /// Takes the first whole frame.
    fn read(from: &mut Vec<u8>) -> Option<Frame> {
        let header: [u8; 4] = from.get(..4)?.try_into().ok()?;
        let length = usize::from(u16::from_le_bytes([header[2], header[3]]));
        let text = String::from_utf8_lossy(from.get(4..4 + length)?).into_owned();
        from.drain(..4 + length);
        Some(match header[0] {
            0 => Frame::Beat(text),
            1 => Frame::Failed(header[1], text),
            2 => Frame::End(header[1]),
            _ => Frame::Bye,
        })
    }
}

impl Link {
    fn new(peer: usize, stream: TcpStream) -> std::io::Result<Link> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let (incoming, outgoing, activity) = (Vec::new(), Vec::new(), String::new());
        let heard = Instant::now();
        Ok(Link { peer, stream, incoming, outgoing, heard, activity, bye: false, closed: false })
    }

    /// Frames that have come.
    fn receive(&mut self) -> Vec<Frame> {
        let mut buffer = [0; 4096];
        while !self.closed {
            match self.stream.read(&mut buffer) {
                Ok(0) => self.closed = true,
                Ok(n) => {
                    self.heard = Instant::now();
                    self.incoming.extend(&buffer[..n]);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.closed = true,
            }
        }
        std::iter::from_fn(|| Frame::read(&mut self.incoming)).collect()
    }

    fn send(&mut self, frame: &Frame) {
        // Nobody reads at the other end; it will be noticed by its silence.
        if self.outgoing.len() < 16 * LONGEST {
            frame.write(&mut self.outgoing);
        }
        self.flush();
    }

    /// An error shows when reading.
    fn flush(&mut self) {
        while !self.outgoing.is_empty() {
            match self.stream.write(&self.outgoing) {
                Ok(n) if n > 0 => drop(self.outgoing.drain(..n)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                _ => break,
            }
        }
    }
}

/// Where a hub listens. Its address is what others [`join`].
pub fn listen() -> Result<(TcpListener, Address), WatchError> {
    let listener = TcpListener::bind("0.0.0.0:0").map_err(WatchError::Listen)?;
    let port = listener.local_addr().map_err(WatchError::Listen)?.port();
    let mut token = [0; TOKEN];
    let random = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut token));
    random.map_err(WatchError::Listen)?;
    let interfaces = nix::ifaddrs::getifaddrs().map_err(|error| WatchError::Listen(error.into()))?;
    let address = |i: nix::ifaddrs::InterfaceAddress| i.address?.as_sockaddr_in().map(|a| IpAddr::V4(a.ip()));
    let mut hosts: Vec<IpAddr> = interfaces.filter_map(address).collect();
    // On one machine without a network there is nothing else.
    hosts.sort_by_key(|host| host.is_loopback());
    hosts.dedup();
    Ok((listener, Address { hosts, port, token }))
}

/// The connections of all others to the hub.
fn accept(listener: &TcpListener, address: &Address, ranks: usize) -> Result<Vec<Link>, WatchError> {
    let end = Instant::now() + CONNECT;
    let mut links: Vec<Link> = Vec::new();
    listener.set_nonblocking(true).map_err(WatchError::Listen)?;
    while links.len() + 1 < ranks {
        match listener.accept() {
            Ok((stream, _)) => {
                let Some(rank) = greeted(&stream, address) else { continue };
                if rank > 0 && rank < ranks && links.iter().all(|link| link.peer != rank) {
                    links.push(Link::new(rank, stream).map_err(WatchError::Listen)?);
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(Duration::from_millis(2)),
            Err(error) => return Err(WatchError::Listen(error)),
        }
        if Instant::now() > end {
            return Err(WatchError::NotAll { joined: links.len() + 1, ranks });
        }
    }
    Ok(links)
}

/// The rank that a new connection says it is from, if it knows the token; it is told that it was understood.
fn greeted(mut stream: &TcpStream, address: &Address) -> Option<usize> {
    stream.set_nonblocking(false).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(1))).ok()?;
    let mut hello = [0; TOKEN + 4];
    stream.read_exact(&mut hello).ok()?;
    if hello[..TOKEN] != address.token {
        return None;
    }
    stream.write_all(&address.token).ok()?;
    Some(u32::from_le_bytes(hello[TOKEN..].try_into().ok()?) as usize)
}

/// The connection of a rank to the hub, by the first of its addresses at which it answers.
fn join(address: &Address, rank: usize) -> Result<Link, WatchError> {
    let end = Instant::now() + CONNECT;
    loop {
        let mut last = None;
        for &host in &address.hosts {
            match greet(SocketAddr::new(host, address.port), address, rank) {
                Ok(stream) => return Link::new(0, stream).map_err(|error| WatchError::Join { host, error }),
                Err(error) => last = Some(WatchError::Join { host, error }),
            }
        }
        if Instant::now() > end || address.hosts.is_empty() {
            return Err(last.unwrap_or(WatchError::NoAddress));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn greet(place: SocketAddr, address: &Address, rank: usize) -> std::io::Result<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&place, Duration::from_secs(1))?;
    stream.set_read_timeout(Some(Duration::from_secs(1)))?;
    let mut hello = address.token.to_vec();
    hello.extend((rank as u32).to_le_bytes());
    stream.write_all(&hello)?;
    let mut answer = [0; TOKEN];
    stream.read_exact(&mut answer)?;
    if answer == address.token { Ok(stream) } else { Err(ErrorKind::InvalidData.into()) }
}

impl Watch {
    /// Connects this rank, `me` of `peers`, and starts to watch. The hub, which is rank 0, gives what it [`listen`]s at.
    pub fn start(
        me: usize,
        peers: Vec<Peer>,
        listener: Option<TcpListener>,
        address: &Address,
        lost_after: Duration,
        ends: Ends,
    ) -> Result<Watch, WatchError> {
        let links = match listener {
            Some(listener) => accept(&listener, address, peers.len())?,
            None => vec![join(address, me)?],
        };
        let shared = Arc::new(Mutex::new(Shared { activity: "starting".to_string(), ..Shared::default() }));
        let parent = std::os::unix::process::parent_id();
        let name = name(&peers, me);
        let watcher = Watcher { me, peers, links, lost_after, ends, shared: shared.clone(), parent, slept: false };
        let thread = std::thread::Builder::new().name("watch".to_string());
        let thread = thread.spawn(move || watcher.run()).map_err(WatchError::Listen)?;
        Ok(Watch { name, shared, thread: Mutex::new(Some(thread)) })
    }

    fn shared<T>(&self, with: impl FnOnce(&mut Shared) -> T) -> T {
        with(&mut self.shared.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Says what this rank does now, for the message should it be lost.
    pub fn note(&self, activity: String) {
        self.shared(|shared| shared.activity = activity);
    }

    /// Ends all ranks with this message and exit code. `follows` says that the error may only be since another rank was lost, of which
    /// others know more. Does not return.
    pub fn fail(&self, code: u8, message: String, follows: bool) -> ! {
        self.shared(|shared| {
            shared.failed.get_or_insert((code, message, follows));
        });
        loop {
            std::thread::sleep(Duration::from_secs(1));
        }
    }

    /// This rank needs no others any more. The hub waits until the processes of all others have ended, or one has not for too long.
    pub fn finish(&self) {
        self.shared(|shared| shared.finished = true);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Where the thread has failed there is nobody left to wait for.
        let _ = thread.map(JoinHandle::join);
    }
}

/// How soon the thread sees what its rank says.
const TURN: Duration = Duration::from_millis(20);

/// The thread of a [`Watch`].
struct Watcher {
    me: usize,
    peers: Vec<Peer>,
    links: Vec<Link>,
    lost_after: Duration,
    ends: Ends,
    shared: Arc<Mutex<Shared>>,
    parent: u32,
    /// This process was stopped for so long that the others have taken it for lost.
    slept: bool,
}

/// Why the run ends.
struct Ending {
    code: u8,
    /// None where another rank has said it.
    message: Option<String>,
}

impl Watcher {
    fn run(mut self) {
        let (mut beaten, mut turned) = (None::<Instant>, Instant::now());
        let mut failed_at = None;
        loop {
            self.wait();
            if turned.elapsed() > self.lost_after / 3 {
                // It was this process that slept, perhaps with all others.
                self.links.iter_mut().for_each(|link| link.heard = Instant::now());
                self.slept |= turned.elapsed() > self.lost_after - BEAT;
            }
            turned = Instant::now();
            let (activity, failed, finished) = {
                let shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
                (shared.activity.clone(), shared.failed.clone(), shared.finished)
            };
            if beaten.is_none_or(|at| at.elapsed() >= BEAT) {
                self.links.iter_mut().for_each(|link| link.send(&Frame::Beat(activity.clone())));
                beaten = Some(turned);
            }
            self.links.iter_mut().for_each(Link::flush);
            if let Some(ending) = self.look() {
                return self.end(ending);
            }
            if std::os::unix::process::parent_id() != self.parent {
                let message = Some(format!("what started {} is gone", name(&self.peers, self.me)));
                return self.end(Ending { code: 1, message });
            }
            if let Some((code, message, follows)) = failed {
                let since = *failed_at.get_or_insert(turned);
                let known = if follows { self.lost_after + FOLLOWS } else { Duration::ZERO };
                if since.elapsed() >= known {
                    return self.fail(code, message);
                }
            }
            if finished {
                self.links.iter_mut().for_each(|link| link.send(&Frame::Bye));
                if self.me == 0 {
                    return self.see_off();
                }
                let links = std::mem::take(&mut self.links);
                self.shared.lock().unwrap_or_else(PoisonError::into_inner).kept = links;
                return;
            }
        }
    }

    /// Waits at the hub until all others have closed their connections, as they do when their processes end: one that is stopped after
    /// it said that it was done would keep the launcher waiting for ever.
    fn see_off(mut self) {
        let start = Instant::now();
        loop {
            self.wait();
            if let Some(ending) = self.look() {
                return self.end(ending);
            }
            let open: Vec<String> =
                self.links.iter().filter(|link| !link.closed).map(|link| name(&self.peers, link.peer)).collect();
            if open.is_empty() {
                return;
            }
            if start.elapsed() > self.lost_after {
                let seconds = self.lost_after.as_secs_f64();
                let message =
                    format!("the run is done, but after {seconds} s these have not ended: {}", open.join(", "));
                return self.end(Ending { code: 1, message: Some(message) });
            }
        }
    }

    /// Until something comes, or for a turn.
    fn wait(&self) {
        let open = self.links.iter().filter(|link| !link.closed);
        let mut all: Vec<PollFd> = open.map(|link| PollFd::new(link.stream.as_fd(), PollFlags::POLLIN)).collect();
        let turn = PollTimeout::try_from(TURN).unwrap_or(PollTimeout::ZERO);
        // Interrupted or not, what there is is read next.
        let _ = poll(&mut all, turn);
    }

    /// Reads what has come. Says why the run ends, if it does.
    fn look(&mut self) -> Option<Ending> {
        let mut lost: Vec<(usize, bool)> = Vec::new();
        let mut ending = None;
        for (l, link) in self.links.iter_mut().enumerate() {
            for frame in link.receive() {
                match frame {
                    Frame::Beat(activity) => link.activity = activity,
                    Frame::Failed(code, message) => {
                        ending = ending.or(Some(Ending { code, message: Some(message) }));
                    }
                    Frame::End(code) => ending = ending.or(Some(Ending { code, message: None })),
                    Frame::Bye => link.bye = true,
                }
            }
            if !link.bye && (link.closed || link.heard.elapsed() > self.lost_after) {
                lost.push((l, link.closed));
            }
        }
        if ending.is_some() || lost.is_empty() {
            return ending;
        }
        if self.slept && lost.iter().any(|(_, gone)| *gone) {
            return Some(Ending { code: 1, message: None });
        }
        // A host that is cut off has several ranks, whose last signs came at about the same time.
        if lost.iter().all(|(_, gone)| !gone) {
            let silent = |link: &Link| !link.bye && !link.closed && link.heard.elapsed() + 2 * BEAT > self.lost_after;
            lost = (0..self.links.len()).filter(|&l| silent(&self.links[l])).map(|l| (l, false)).collect();
        }
        let said = |&(l, gone): &(usize, bool)| {
            let link = &self.links[l];
            let how = match gone {
                true => "is gone".to_string(),
                false => format!("has not been heard of for {} s", self.lost_after.as_secs_f64()),
            };
            format!("{} {how}; it was last {}", name(&self.peers, link.peer), link.activity)
        };
        const SHOWN: usize = 4;
        let mut parts: Vec<String> = lost.iter().take(SHOWN).map(said).collect();
        if lost.len() > SHOWN {
            parts.push(format!("and so with {} more", lost.len() - SHOWN));
        }
        Some(Ending { code: 1, message: Some(parts.join("; ")) })
    }

    /// This rank has failed: the hub says so.
    fn fail(mut self, code: u8, message: String) {
        if self.me == 0 {
            return self.end(Ending { code, message: Some(message) });
        }
        self.links.iter_mut().for_each(|link| link.send(&Frame::Failed(code, message.clone())));
        let start = Instant::now();
        while start.elapsed() < self.lost_after {
            self.wait();
            if let Some(ending) = self.look() {
                return self.end(ending);
            }
        }
        self.end(Ending { code, message: Some(message) });
    }

    fn end(mut self, Ending { code, message }: Ending) {
        if let Some(message) = &message {
            // Without the hub, which the first of the others speaks for, most will be ended by the launcher while they wait.
            if self.me > 1 {
                std::thread::sleep(Duration::from_millis(2500 + 100 * (self.me as u64).min(5)));
            }
            (self.ends.say)(message);
        }
        if self.me == 0 {
            self.links.iter_mut().for_each(|link| link.send(&Frame::End(code)));
            // What was not read when a connection closes makes the other end lose what it was told.
            let start = Instant::now();
            while start.elapsed() < Duration::from_millis(300) && self.links.iter().any(|link| !link.closed) {
                self.wait();
                self.links.iter_mut().for_each(|link| drop(link.receive()));
            }
        }
        (self.ends.exit)(code);
    }
}

/// `rank 3 on node-b`
fn name(peers: &[Peer], peer: usize) -> String {
    match peers.get(peer) {
        Some(Peer { rank, host }) => format!("rank {rank} on {host}"),
        None => format!("rank {peer}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};

    #[derive(Debug, PartialEq)]
    enum Did {
        Said(usize, String),
        Exited(usize, u8),
    }

    /// Ranks of one process, and what they do in the end.
    fn ranks(count: usize) -> (Vec<Option<Watch>>, Receiver<Did>) {
        let (listener, address) = listen().expect("a hub");
        let peer = |rank| Peer { rank, host: "here".to_string() };
        let peers: Vec<Peer> = (0..count).map(peer).collect();
        let (did, all) = channel();
        let mut listener = Some(listener);
        let threads: Vec<_> = (0..count)
            .map(|me| {
                let (peers, address, said, exited) = (peers.clone(), address.clone(), did.clone(), did.clone());
                let listener = listener.take();
                std::thread::spawn(move || {
                    let ends = Ends {
                        say: Box::new(move |text| drop(said.send(Did::Said(me, text.to_string())))),
                        exit: Box::new(move |code| drop(exited.send(Did::Exited(me, code)))),
                    };
                    Watch::start(me, peers, listener, &address, Duration::from_secs(2), ends).expect("a watch")
                })
            })
            .collect();
        let watches = threads.into_iter().map(|t| t.join().ok()).collect();
        (watches, all)
    }

    fn all(from: &Receiver<Did>, patience: Duration) -> Vec<Did> {
        let end = Instant::now() + patience;
        let mut found = Vec::new();
        loop {
            match from.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(did) => found.push(did),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return found,
            }
        }
    }

    #[test]
    fn a_failure_is_said_once_and_ends_all_with_its_code() {
        let (watches, did) = ranks(4);
        let failing = watches.into_iter().nth(2).flatten().expect("a watch");
        std::thread::spawn(move || failing.fail(2, "no such file".to_string(), false));
        let did = all(&did, Duration::from_secs(1));
        let said: Vec<&Did> = did.iter().filter(|d| matches!(d, Did::Said(..))).collect();
        assert_eq!(said, [&Did::Said(0, "no such file".to_string())]);
        for rank in 0..4 {
            assert!(did.contains(&Did::Exited(rank, 2)), "{did:?}");
        }
    }

    #[test]
    fn a_rank_that_closes_its_connection_or_falls_silent_is_lost() {
        for (silent, how) in [(false, "is gone"), (true, "has not been heard of for 2 s")] {
            let (listener, address) = listen().expect("a hub");
            let peer = |rank| Peer { rank, host: "here".to_string() };
            let (did, all_did) = channel();
            let place = address.clone();
            // A rank that joins, says what it does, and then nothing more.
            let lost = std::thread::spawn(move || {
                let mut link = join(&place, 1).expect("a connection");
                link.send(&Frame::Beat("in step 7".to_string()));
                link
            });
            let (said, exited) = (did.clone(), did);
            let ends = Ends {
                say: Box::new(move |text| drop(said.send(Did::Said(0, text.to_string())))),
                exit: Box::new(move |code| drop(exited.send(Did::Exited(0, code)))),
            };
            let peers = vec![peer(0), peer(1)];
            let lost_after = Duration::from_secs(2);
            let _watch = Watch::start(0, peers, Some(listener), &address, lost_after, ends).expect("a watch");
            let mut link = lost.join().ok();
            if !silent {
                link = None;
            }
            let start = Instant::now();
            let found = all(&all_did, Duration::from_secs(4));
            let text = format!("rank 1 on here {how}; it was last in step 7");
            assert_eq!(found, [Did::Said(0, text), Did::Exited(0, 1)], "after {:?}", start.elapsed());
            drop(link);
        }
    }

    #[test]
    fn ranks_that_are_done_are_not_missed() {
        let (watches, did) = ranks(3);
        for watch in watches.into_iter().flatten().rev() {
            watch.finish();
        }
        assert_eq!(all(&did, Duration::from_secs(3)), []);
    }

    #[test]
    fn the_hub_waits_for_those_who_are_done_and_no_longer_than_it_should() {
        let (watches, did) = ranks(3);
        let mut watches: Vec<Watch> = watches.into_iter().flatten().collect();
        let hub = watches.remove(0);
        watches.iter().for_each(Watch::finish);
        // The first of the others ends; the second stays for ever.
        let stays = watches.pop();
        drop(watches);
        let start = Instant::now();
        hub.finish();
        assert!(start.elapsed() >= Duration::from_secs(2), "{:?}", start.elapsed());
        let text = "the run is done, but after 2 s these have not ended: rank 2 on here".to_string();
        assert_eq!(all(&did, Duration::from_millis(100)), [Did::Said(0, text), Did::Exited(0, 1)]);
        drop(stays);
    }

    #[test]
    fn frames_are_read_as_they_were_written() {
        let frames =
            [Frame::Beat("é".repeat(LONGEST)), Frame::Failed(3, "why".to_string()), Frame::End(143), Frame::Bye];
        let mut bytes = Vec::new();
        frames.iter().for_each(|frame| frame.write(&mut bytes));
        let Some(Frame::Beat(text)) = Frame::read(&mut bytes) else { panic!("a beat comes first") };
        assert_eq!(text, "é".repeat(LONGEST / 2));
        let rest: Vec<Frame> = std::iter::from_fn(|| Frame::read(&mut bytes)).collect();
        assert_eq!(rest, frames[1..]);
    }
}
