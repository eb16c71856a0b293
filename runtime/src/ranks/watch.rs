//! Notices a rank that is gone, hangs or is cut off, and ends all others with one message and one exit code.
//!
//! Every rank holds a TCP connection to the first one, the *hub*, apart from MPI and NCCL, which may wait for a lost
//! peer forever. Heartbeats report each rank's activity twice a second. A process that dies closes its connection at
//! once; one that is stopped or cut off falls silent. A separate thread does all this, whatever the rank itself is
//! doing. If the hub is lost, the remaining ranks find out who reports (`failover.rs`).
//!
//! The thread turns a state machine, `Watcher`, which is told the time and does not wait. So tests turn thousands of
//! them over a simulated network.

use crate::error::WatchError;
use crate::ranks::failover::{Failover, Reach, Tcp};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A rank as messages name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Rank in the launcher's numbering.
    pub rank: usize,
    pub host: String,
}

/// Callbacks for the end of the run. Both are called on the watching thread.
pub struct Ends {
    /// Reports the reason to the user.
    pub say: Box<dyn Fn(&str) + Send>,
    /// Ends the process, whatever its other threads wait for.
    pub exit: Box<dyn Fn(u8) + Send>,
}

/// Returns a rank's current activity, if it can be determined without the rank's help; `None` between steps.
pub type Detail = Box<dyn Fn() -> Option<String> + Send>;

/// Watches all ranks until [`Watch::finish`].
pub struct Watch {
    /// The name of this rank in messages: `rank 3 on node-b`.
    pub name: String,
    shared: Arc<Mutex<Shared<Tcp>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Ends the process at once. MPI's exit handlers might wait for lost ranks.
pub fn leave(code: u8) -> ! {
    // SAFETY: `_exit` allocates nothing and does not return; buffered output is lost.
    unsafe { nix::libc::_exit(code.into()) }
}

/// Interval of heartbeats.
const BEAT: Duration = Duration::from_millis(500);
/// The activity of a rank before it has reported any. It is sent at once, without waiting for the next heartbeat.
const STARTING: &str = "starting";
/// Delay of an error that may only be a consequence of losing another rank.
const FOLLOWS: Duration = Duration::from_secs(1);
/// Upper limit on the length of a message.
const LONGEST: usize = 4096;

pub(super) struct Shared<R: Reach> {
    pub activity: String,
    /// Determines the current activity on demand.
    detail: Option<Detail>,
    /// The error of this rank. The flag is true if losing another rank may have caused it.
    pub failed: Option<(u8, String, bool)>,
    pub finished: bool,
    /// Finds out who reports if the hub is lost.
    pub failover: Option<Failover<R>>,
    /// Connections of a finished rank, kept open while its process runs.
    pub kept: Vec<Link<R::Stream>>,
}

impl<R: Reach> Shared<R> {
    pub fn new() -> Shared<R> {
        let activity = STARTING.to_string();
        Shared { activity, detail: None, failed: None, finished: false, failover: None, kept: Vec::new() }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Frame {
    /// A heartbeat with the current activity.
    Beat(String),
    /// The rank failed; end all ranks.
    Failed(u8, String),
    /// End with this code, without a message.
    End(u8),
    /// The rank is done.
    Bye,
}

/// One end of a connection. Its stream does not block.
pub(super) struct Link<S> {
    /// Index of the rank at the other end.
    peer: usize,
    stream: S,
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

    /// Takes the first complete frame.
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

impl<S: Read + Write> Link<S> {
    pub fn new(peer: usize, stream: S, now: Instant) -> Link<S> {
        let (incoming, outgoing, activity) = (Vec::new(), Vec::new(), String::new());
        Link { peer, stream, incoming, outgoing, heard: now, activity, bye: false, closed: false }
    }

    /// Returns the frames that have arrived.
    fn receive(&mut self, now: Instant) -> Vec<Frame> {
        let mut buffer = [0; 4096];
        while !self.closed {
            match self.stream.read(&mut buffer) {
                Ok(0) => self.closed = true,
                Ok(n) => {
                    self.heard = now;
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
        // If the peer does not read, drop the frame; its silence will be noticed.
        if self.outgoing.len() < 16 * LONGEST {
            frame.write(&mut self.outgoing);
        }
        self.flush();
    }

    /// Errors surface when reading.
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

impl Watch {
    /// Starts to watch as rank `me` of `peers`. The hub, rank 0, has a connection to every other rank; each of these
    /// has one to the hub.
    pub fn start(
        me: usize,
        peers: Vec<Peer>,
        links: Vec<(usize, TcpStream)>,
        lost_after: Duration,
        ends: Ends,
    ) -> Result<Watch, WatchError> {
        let now = Instant::now();
        let link = |(peer, stream): (usize, TcpStream)| {
            stream.set_nonblocking(true)?;
            stream.set_nodelay(true)?;
            Ok(Link::new(peer, stream, now))
        };
        let links: Vec<Link<TcpStream>> =
            links.into_iter().map(link).collect::<std::io::Result<_>>().map_err(WatchError::Listen)?;
        let shared = Arc::new(Mutex::new(Shared::new()));
        let name = name(&peers, me);
        let watcher = Watcher::new(me, peers, links, lost_after, ends, shared.clone(), now);
        let thread = std::thread::Builder::new().name("watch".to_string());
        let thread = thread.spawn(move || watcher.run()).map_err(WatchError::Listen)?;
        Ok(Watch { name, shared, thread: Mutex::new(Some(thread)) })
    }

    fn shared<T>(&self, with: impl FnOnce(&mut Shared<Tcp>) -> T) -> T {
        with(&mut self.shared.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Records the rank's activity, for the message if it is lost.
    pub fn note(&self, activity: String) {
        self.shared(|shared| shared.activity = activity);
    }

    /// Appends the result of `detail` to the recorded activity from now on.
    pub fn explain(&self, detail: Detail) {
        self.shared(|shared| shared.detail = Some(detail));
    }

    /// Lets one rank alone report if the hub is lost from now on.
    pub(super) fn failover(&self, failover: Failover<Tcp>) {
        self.shared(|shared| shared.failover = Some(failover));
    }

    /// Ends all ranks with this message and exit code; does not return. With `follows`, the error may be a consequence
    /// of losing another rank, so a better message of another rank takes precedence.
    pub fn fail(&self, code: u8, message: String, follows: bool) -> ! {
        self.shared(|shared| {
            shared.failed.get_or_insert((code, message, follows));
        });
        loop {
            std::thread::sleep(Duration::from_secs(1));
        }
    }

    /// Marks this rank as done. The hub then waits until the processes of all others have ended, or reports one that
    /// takes too long.
    pub fn finish(&self) {
        self.shared(|shared| shared.finished = true);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // If the thread has failed, there is nothing left to wait for.
        let _ = thread.map(JoinHandle::join);
    }
}

/// Interval at which the thread polls its rank's state.
const TURN: Duration = Duration::from_millis(20);
/// The same where ranks find out who reports.
const SHORT_TURN: Duration = Duration::from_millis(5);
/// Time limit for others to close their connections, once they were told to end.
const DRAIN: Duration = Duration::from_millis(300);

/// The state machine of a [`Watch`]'s thread.
pub(super) struct Watcher<R: Reach> {
    me: usize,
    peers: Vec<Peer>,
    links: Vec<Link<R::Stream>>,
    lost_after: Duration,
    ends: Ends,
    shared: Arc<Mutex<Shared<R>>>,
    state: State<R>,
    /// Time of the last turn.
    turned: Instant,
    /// Time of the last heartbeat.
    beaten: Option<Instant>,
    /// The last heartbeat said no more than that this rank starts.
    said_starting: bool,
    /// When this rank was found to have failed.
    failed_at: Option<Instant>,
    /// True if this process was stopped for so long that the others consider it lost.
    slept: bool,
    /// The current activity, if it is known in more detail than recorded.
    detail: Option<String>,
}

enum State<R: Reach> {
    Watching,
    /// This rank has told the hub that it failed, and waits to be ended.
    Failed {
        code: u8,
        message: String,
        since: Instant,
    },
    /// The hub is done, and waits for the others' processes.
    SeeingOff {
        since: Instant,
    },
    /// The hub is lost. This rank asks who reports.
    Asking {
        code: u8,
        message: String,
        failover: Failover<R>,
    },
    /// This rank has reported, and tells those that ask.
    Telling {
        code: u8,
        failover: Failover<R>,
    },
    /// The hub has told all others to end. Closing a connection with unread data can discard what was just sent.
    Draining {
        code: u8,
        since: Instant,
    },
    Exiting(u8),
    Over,
}

/// The reason for the end of the run.
struct Ending {
    code: u8,
    /// `None` if another rank has reported it.
    message: Option<String>,
}

impl Watcher<Tcp> {
    fn run(mut self) {
        let parent = std::os::unix::process::parent_id();
        loop {
            self.wait();
            if self.turn(Instant::now(), std::os::unix::process::parent_id() != parent) {
                return;
            }
        }
    }

    /// Waits for data, or for one polling interval.
    fn wait(&self) {
        if matches!(self.state, State::Asking { .. } | State::Telling { .. }) {
            return std::thread::sleep(SHORT_TURN);
        }
        let open = self.links.iter().filter(|link| !link.closed);
        let mut all: Vec<PollFd> = open.map(|link| PollFd::new(link.stream.as_fd(), PollFlags::POLLIN)).collect();
        let turn = PollTimeout::try_from(TURN).unwrap_or(PollTimeout::ZERO);
        // Interrupted or not, read what has arrived next.
        let _ = poll(&mut all, turn);
    }
}

impl<R: Reach> Watcher<R> {
    pub fn new(
        me: usize,
        peers: Vec<Peer>,
        links: Vec<Link<R::Stream>>,
        lost_after: Duration,
        ends: Ends,
        shared: Arc<Mutex<Shared<R>>>,
        now: Instant,
    ) -> Watcher<R> {
        let (state, turned, beaten, said_starting) = (State::Watching, now, None, true);
        let (failed_at, slept, detail) = (None, false, None);
        Watcher {
            me,
            peers,
            links,
            lost_after,
            ends,
            shared,
            state,
            turned,
            beaten,
            said_starting,
            failed_at,
            slept,
            detail,
        }
    }

    fn shared<T>(&self, with: impl FnOnce(&mut Shared<R>) -> T) -> T {
        with(&mut self.shared.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Does what is due, without waiting. `orphaned`: the parent process is gone. True once there is nothing left to do.
    pub fn turn(&mut self, now: Instant, orphaned: bool) -> bool {
        let pause = now.saturating_duration_since(std::mem::replace(&mut self.turned, now));
        if pause > self.lost_after / 3 {
            // This process itself was suspended, perhaps with all others.
            self.links.iter_mut().for_each(|link| link.heard = now);
            self.slept |= pause > self.lost_after - BEAT;
        }
        let since = |then: Instant| now.saturating_duration_since(then);
        self.state = match std::mem::replace(&mut self.state, State::Over) {
            State::Watching => self.watch(now, orphaned),
            State::Failed { code, message, since: then } => match self.look(now) {
                Some(ending) => self.end(ending, now),
                None if since(then) >= self.lost_after => self.end(Ending { code, message: Some(message) }, now),
                None => State::Failed { code, message, since: then },
            },
            State::SeeingOff { since } => self.see_off(since, now),
            State::Asking { code, message, mut failover } => match failover.is_spoken_for(now) {
                None => State::Asking { code, message, failover },
                Some(true) => State::Exiting(code),
                Some(false) => {
                    (self.ends.say)(&message);
                    State::Telling { code, failover }
                }
            },
            State::Telling { code, mut failover } => match failover.has_told(now) {
                true => State::Exiting(code),
                false => State::Telling { code, failover },
            },
            State::Draining { code, since: then } => {
                self.links.iter_mut().for_each(|link| drop((link.flush(), link.receive(now))));
                match since(then) >= DRAIN || self.links.iter().all(|link| link.closed) {
                    true => State::Exiting(code),
                    false => State::Draining { code, since: then },
                }
            }
            over => over,
        };
        if let State::Exiting(code) = self.state {
            (self.ends.exit)(code);
            self.state = State::Over;
        }
        matches!(self.state, State::Over)
    }

    fn watch(&mut self, now: Instant, orphaned: bool) -> State<R> {
        let since = |then: Instant| now.saturating_duration_since(then);
        let (detail, activity, failed, finished) = self.shared(|shared| {
            let detail = shared.detail.as_ref().and_then(|detail| detail());
            (detail, shared.activity.clone(), shared.failed.clone(), shared.finished)
        });
        let activity = format!("{activity}{}", detail.as_ref().map(|detail| format!(": {detail}")).unwrap_or_default());
        self.detail = detail;
        let begins = self.said_starting && !activity.starts_with(STARTING);
        if begins || self.beaten.is_none_or(|at| since(at) >= BEAT) {
            self.links.iter_mut().for_each(|link| link.send(&Frame::Beat(activity.clone())));
            (self.beaten, self.said_starting) = (Some(now), activity.starts_with(STARTING));
        }
        self.links.iter_mut().for_each(Link::flush);
        if let Some(ending) = self.look(now) {
            return self.end(ending, now);
        }
        if orphaned {
            let message = Some(format!("the parent process of {} is gone", name(&self.peers, self.me)));
            return self.end(Ending { code: 1, message }, now);
        }
        if let Some((code, message, follows)) = failed {
            let at = *self.failed_at.get_or_insert(now);
            let known = if follows { self.lost_after + FOLLOWS } else { Duration::ZERO };
            if since(at) >= known {
                return self.fail(code, message, now);
            }
        }
        if finished {
            self.links.iter_mut().for_each(|link| link.send(&Frame::Bye));
            if self.me == 0 {
                return State::SeeingOff { since: now };
            }
            let links = std::mem::take(&mut self.links);
            self.shared(|shared| shared.kept = links);
            return State::Over;
        }
        State::Watching
    }

    /// Waits at the hub until all others have closed their connections, as they do when their processes end. A process
    /// that is stopped after it was done would keep the launcher waiting forever.
    fn see_off(&mut self, since: Instant, now: Instant) -> State<R> {
        if let Some(ending) = self.look(now) {
            return self.end(ending, now);
        }
        let open: Vec<String> =
            self.links.iter().filter(|link| !link.closed).map(|link| name(&self.peers, link.peer)).collect();
        if open.is_empty() {
            return State::Over;
        }
        if now.saturating_duration_since(since) > self.lost_after {
            let seconds = self.lost_after.as_secs_f64();
            let message = format!("the run is done, but these have not ended after {seconds} s: {}", open.join(", "));
            return self.end(Ending { code: 1, message: Some(message) }, now);
        }
        State::SeeingOff { since }
    }

    /// Reads all frames. Returns the reason if the run ends.
    fn look(&mut self, now: Instant) -> Option<Ending> {
        let (silence, lost_after) =
            (|link: &Link<R::Stream>| now.saturating_duration_since(link.heard), self.lost_after);
        let mut lost: Vec<(usize, bool)> = Vec::new();
        let mut ending = None;
        for (l, link) in self.links.iter_mut().enumerate() {
            for frame in link.receive(now) {
                match frame {
                    Frame::Beat(activity) => link.activity = activity,
                    Frame::Failed(code, message) => {
                        ending = ending.or(Some(Ending { code, message: Some(message) }));
                    }
                    Frame::End(code) => ending = ending.or(Some(Ending { code, message: None })),
                    Frame::Bye => link.bye = true,
                }
            }
            if !link.bye && (link.closed || silence(link) > lost_after) {
                lost.push((l, link.closed));
            }
        }
        if ending.is_some() || lost.is_empty() {
            return ending;
        }
        if self.slept && lost.iter().any(|(_, gone)| *gone) {
            return Some(Ending { code: 1, message: None });
        }
        // A host that is cut off has several ranks, whose last heartbeats arrived at about the same time.
        if lost.iter().all(|(_, gone)| !gone) {
            let silent = |link: &Link<_>| !link.bye && !link.closed && silence(link) + 2 * BEAT > lost_after;
            lost = (0..self.links.len()).filter(|&l| silent(&self.links[l])).map(|l| (l, false)).collect();
        }
        let said = |&(l, gone): &(usize, bool)| {
            let link = &self.links[l];
            let how = match gone {
                true => "is gone".to_string(),
                false => format!("has been silent for {} s", self.lost_after.as_secs_f64()),
            };
            format!("{} {how}; it was last {}", name(&self.peers, link.peer), link.activity)
        };
        const SHOWN: usize = 4;
        let mut parts: Vec<String> = lost.iter().take(SHOWN).map(said).collect();
        if lost.len() > SHOWN {
            parts.push(format!("and {} more are lost", lost.len() - SHOWN));
        }
        parts.extend(self.detail.as_ref().map(|at| format!("{} waits in {at}", name(&self.peers, self.me))));
        Some(Ending { code: 1, message: Some(parts.join("; ")) })
    }

    /// Handles a failure of this rank: the hub reports it.
    fn fail(&mut self, code: u8, message: String, now: Instant) -> State<R> {
        if self.me == 0 {
            return self.end(Ending { code, message: Some(message) }, now);
        }
        self.links.iter_mut().for_each(|link| link.send(&Frame::Failed(code, message.clone())));
        State::Failed { code, message, since: now }
    }

    fn end(&mut self, Ending { code, message }: Ending, now: Instant) -> State<R> {
        if self.me == 0 {
            message.iter().for_each(|message| (self.ends.say)(message));
            self.links.iter_mut().for_each(|link| link.send(&Frame::End(code)));
            return State::Draining { code, since: now };
        }
        let Some(message) = message else { return State::Exiting(code) };
        match self.shared(|shared| shared.failover.take()) {
            Some(failover) => State::Asking { code, message, failover },
            None => {
                (self.ends.say)(&message);
                State::Exiting(code)
            }
        }
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
    use crate::ranks::connect::{Channel, Hello, Hub, Listen};
    use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};

    fn hello(rank: usize, size: usize) -> Hello {
        Hello { channel: Channel::Watch, rank, size, pid: 1, host: "here".to_string() }
    }

    #[derive(Debug, PartialEq)]
    enum Did {
        Said(usize, String),
        Exited(usize, u8),
    }

    /// Ranks in one process, and a record of their ends.
    fn ranks(count: usize) -> (Vec<Option<Watch>>, Receiver<Did>) {
        let hub = Hub::listen(Listen::Loopback).expect("a hub");
        let address = hub.address.clone();
        let peer = |rank| Peer { rank, host: "here".to_string() };
        let peers: Vec<Peer> = (0..count).map(peer).collect();
        let (did, all) = channel();
        let mut hub = Some(hub);
        let threads: Vec<_> = (0..count)
            .map(|me| {
                let (peers, address, said, exited) = (peers.clone(), address.clone(), did.clone(), did.clone());
                let hub = hub.take();
                std::thread::spawn(move || {
                    let links = match hub {
                        Some(hub) => hub.all(count),
                        None => address.join(&hello(me, count)).map(|stream| vec![(0, stream)]),
                    };
                    let ends = Ends {
                        say: Box::new(move |text| drop(said.send(Did::Said(me, text.to_string())))),
                        exit: Box::new(move |code| drop(exited.send(Did::Exited(me, code)))),
                    };
                    Watch::start(me, peers, links.expect("links"), Duration::from_secs(2), ends).expect("a watch")
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
        for (silent, how) in [(false, "is gone"), (true, "has been silent for 2 s")] {
            let hub = Hub::listen(Listen::Loopback).expect("a hub");
            let peer = |rank| Peer { rank, host: "here".to_string() };
            let (did, all_did) = channel();
            let place = hub.address.clone();
            // A rank that joins, reports its activity, and then falls silent.
            let lost = std::thread::spawn(move || {
                let stream = place.join(&hello(1, 2)).expect("a connection");
                stream.set_nonblocking(true).expect("a socket");
                let mut link = Link::new(0, stream, Instant::now());
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
            let links = hub.all(2).expect("links");
            let _watch = Watch::start(0, peers, links, lost_after, ends).expect("a watch");
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
        // The first of the others ends; the second never does.
        let stays = watches.pop();
        drop(watches);
        let start = Instant::now();
        hub.finish();
        assert!(start.elapsed() >= Duration::from_secs(2), "{:?}", start.elapsed());
        let text = "the run is done, but these have not ended after 2 s: rank 2 on here".to_string();
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
