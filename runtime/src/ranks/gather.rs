//! Gathering: all processes of a run connect to the first one, which tells them that all are there, or that there is no
//! run.
//!
//! Both sides are state machines over [`Surroundings`], which are a directory and TCP or the simulated ones of tests.
//! They are told the time, and none of their calls waits. The directory may show a file late or an old one, so only a
//! process that proves that it knows the file's token counts.

use crate::error::{RendezvousError, WatchError};
use crate::ranks::call::Call;
use crate::ranks::connect::{Channel, Hello, read_to};
use std::collections::BTreeMap;
use std::io::{Error, ErrorKind, Read, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The directory and the network, as one process sees them. No stream blocks.
pub(super) trait Surroundings {
    type Stream: Read + Write;

    /// The file of the run's first process, if it is there.
    fn call(&mut self) -> Option<Call>;

    /// Writes the file.
    fn publish(&mut self, call: &Call) -> Result<(), Error>;

    /// Begins to connect to the process that wrote a file. The outcome of an earlier request is dropped.
    fn ask(&mut self, call: &Call, hello: &Hello);

    /// The outcome of the last request, once it is known.
    fn answer(&mut self) -> Option<Result<Self::Stream, WatchError>>;

    /// The next process that has connected to this one.
    fn greeted(&mut self) -> Result<Option<(Hello, Self::Stream)>, Error>;
}

/// A process that gathers.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub rank: usize,
    pub size: usize,
    pub pid: u32,
    pub host: String,
    pub directory: PathBuf,
    pub timeout: Duration,
    pub start: Instant,
}

/// Extra time for the first process to report a timeout to all.
const LAST_WORDS: Duration = Duration::from_secs(10);
/// The final message of the first process: all are there, with their hosts, or there is no run.
const GO: u8 = 1;
const ENDED: u8 = 0;
/// A process's confirmation of a connection. A welcome may come too late for the process that connects, so only a
/// connection that is confirmed stands on both sides.
const HERE: u8 = 2;
/// Bytes of a message before its text.
const HEAD: usize = 5;
/// Bytes of a host's name and the end of its line.
const LONGEST_HOST: usize = 256;

impl Member {
    fn hello(&self, channel: Channel) -> Hello {
        Hello { channel, rank: self.rank, size: self.size, pid: self.pid, host: self.host.clone() }
    }

    fn is_over(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.start) > self.timeout
    }

    fn taken(&self, by: Call) -> RendezvousError {
        RendezvousError::Taken { directory: self.directory.clone(), pid: by.pid, host: by.host }
    }

    fn gone(&self, rank: usize, host: String) -> RendezvousError {
        RendezvousError::Gone { rank, host, size: self.size, directory: self.directory.clone() }
    }

    fn unreachable(&self, now: Instant, call: Call, error: WatchError) -> RendezvousError {
        RendezvousError::Unreachable {
            rank: self.rank,
            host: self.host.clone(),
            directory: self.directory.clone(),
            seconds: now.saturating_duration_since(self.start).as_secs(),
            first_host: call.host,
            first_pid: call.pid,
            error: Box::new(error),
        }
    }
}

/// The hosts by rank, and a process's connections for the watch and for words.
pub(super) struct Met<S> {
    pub hosts: Vec<String>,
    pub watch: Vec<(usize, S)>,
    pub words: Vec<S>,
}

/// The first process, which waits for all others.
pub(super) struct First<A: Surroundings> {
    me: Member,
    around: A,
    /// The file that this process publishes.
    call: Call,
    state: FirstState,
    /// Connections that their processes have yet to confirm, and those that have been.
    greeted: Vec<(Hello, A::Stream)>,
    confirmed: Vec<(Hello, A::Stream)>,
    come: BTreeMap<(usize, Channel), (Hello, A::Stream)>,
}

enum FirstState {
    Looks,
    /// Finds out if the process that wrote this file is there.
    Probes(Call),
    Waits,
}

impl<A: Surroundings> First<A> {
    pub fn new(me: Member, around: A, call: Call) -> First<A> {
        First {
            me,
            around,
            call,
            state: FirstState::Looks,
            greeted: Vec::new(),
            confirmed: Vec::new(),
            come: BTreeMap::new(),
        }
    }

    /// Does what is due. True once all processes are there.
    pub fn turn(&mut self, now: Instant) -> Result<bool, RendezvousError> {
        match &self.state {
            FirstState::Looks => match self.around.call() {
                Some(found) => {
                    self.around.ask(&found, &self.me.hello(Channel::Probe));
                    self.state = FirstState::Probes(found);
                }
                None => self.publish()?,
            },
            FirstState::Probes(found) => match self.around.answer() {
                None => {}
                Some(Ok(_)) => return Err(self.me.taken(found.clone())),
                Some(Err(_)) => self.publish()?,
            },
            FirstState::Waits => return self.waits(now),
        }
        Ok(false)
    }

    fn publish(&mut self) -> Result<(), RendezvousError> {
        self.state = FirstState::Waits;
        self.around.publish(&self.call).map_err(|error| {
            let (host, directory) = (self.me.host.clone(), self.me.directory.clone());
            RendezvousError::Write { rank: 0, host, directory, error }
        })
    }

    /// Takes the processes that have connected, until all have both of their connections.
    fn waits(&mut self, now: Instant) -> Result<bool, RendezvousError> {
        let listen = |host: &String, error| RendezvousError::Listen { host: host.clone(), error };
        while let Some((hello, stream)) = self.around.greeted().map_err(|error| listen(&self.me.host, error))? {
            if hello.channel != Channel::Probe {
                self.greeted.push((hello, stream));
            }
        }
        self.look_for_confirmations();
        while let Some((hello, stream)) = self.confirmed.pop() {
            self.take(hello, stream)?;
        }
        // No process sends anything after its confirmation, so data means a closed connection.
        for (hello, stream) in self.come.values_mut() {
            if is_heard(stream) {
                return Err(self.me.gone(hello.rank, hello.host.clone()));
            }
        }
        let size = self.me.size;
        if self.come.len() >= 2 * (size - 1) {
            return Ok(true);
        }
        if let Some(other) = self.around.call().filter(|other| *other != self.call) {
            return Err(self.me.taken(other));
        }
        if self.me.is_over(now) {
            let has = |rank, channel| self.come.contains_key(&(rank, channel));
            let missing = |rank: &usize| !has(*rank, Channel::Watch) || !has(*rank, Channel::Words);
            let (missing, directory) = ((1..size).filter(missing).collect(), self.me.directory.clone());
            return Err(RendezvousError::Missing { missing, size, directory, seconds: self.me.timeout.as_secs() });
        }
        Ok(false)
    }

    fn look_for_confirmations(&mut self) {
        for (hello, mut stream) in std::mem::take(&mut self.greeted) {
            let mut word = [0];
            match stream.read(&mut word) {
                Ok(1) if word == [HERE] => self.confirmed.push((hello, stream)),
                Err(error) if is_quiet(&error) => self.greeted.push((hello, stream)),
                // The process has given this connection up, since the welcome came too late for it. It connects again.
                Ok(_) | Err(_) => {}
            }
        }
    }

    /// Takes a process, or tells it that there is no run.
    fn take(&mut self, hello: Hello, mut stream: A::Stream) -> Result<(), RendezvousError> {
        let Member { size, directory, .. } = &self.me;
        let Hello { channel, rank, size: found, .. } = hello;
        let mut refuse = || stream.write_all(&message(ENDED, ""));
        if found != *size || rank >= *size {
            let _ = refuse();
            let (host, directory) = (hello.host, directory.clone());
            return Err(RendezvousError::Size { rank, host, found, size: *size, directory });
        }
        let mut come = self.come.range((rank, Channel::Probe)..=(rank, Channel::Words));
        let earlier = match rank {
            0 => Some((self.call.pid, self.call.host.clone())),
            _ => come.next().map(|(_, (earlier, _))| (earlier.pid, earlier.host.clone())),
        };
        let second = (hello.pid, hello.host.clone());
        if let Some(first) = earlier.filter(|first| *first != second) {
            let _ = refuse();
            return Err(RendezvousError::Twice { rank, directory: directory.clone(), first, second });
        }
        self.come.insert((rank, channel), (hello, stream));
        Ok(())
    }

    /// The hosts and connections of the processes that have come, and the message with which to tell them: all are
    /// there, or there is no run.
    pub fn end(self, are_all_there: bool) -> (Met<A::Stream>, Vec<u8>) {
        for (_, mut stream) in self.greeted.into_iter().chain(self.confirmed) {
            // More processes than there are ranks, or too late.
            let _ = stream.write_all(&message(ENDED, ""));
        }
        let mut hosts = vec![self.me.host.clone(); self.me.size];
        let (mut watch, mut words) = (Vec::new(), Vec::new());
        for ((rank, channel), (hello, stream)) in self.come {
            hosts[rank] = hello.host;
            match channel {
                Channel::Words => words.push(stream),
                _ => watch.push((rank, stream)),
            }
        }
        let told = if are_all_there { message(GO, &hosts.join("\n")) } else { message(ENDED, "") };
        (Met { hosts, watch, words }, told)
    }
}

/// Any other process, which waits for the first.
pub(super) struct Other<A: Surroundings> {
    me: Member,
    around: A,
    state: OtherState<A::Stream>,
    /// A process that could not be reached, and the reason. Its file may be that of an earlier run.
    failed: Option<(Call, WatchError)>,
}

enum OtherState<S> {
    Looks,
    /// Connects for words.
    Asks(Call),
    /// The first process has this one's connection for words.
    Waits(Waiting<S>),
}

struct Waiting<S> {
    call: Call,
    words: S,
    /// The part of the first process's message that has arrived.
    heard: Vec<u8>,
    /// The connection for the watch, once its outcome is known.
    watch: Option<Result<S, WatchError>>,
    until: Instant,
}

impl<A: Surroundings> Other<A> {
    pub fn new(me: Member, around: A) -> Other<A> {
        Other { me, around, state: OtherState::Looks, failed: None }
    }

    /// Does what is due. Returns the connections once the first process says that all are there.
    pub fn turn(&mut self, now: Instant) -> Result<Option<Met<A::Stream>>, RendezvousError> {
        match std::mem::replace(&mut self.state, OtherState::Looks) {
            OtherState::Looks => match self.around.call() {
                Some(call) if !self.me.is_over(now) => {
                    self.around.ask(&call, &self.me.hello(Channel::Words));
                    self.state = OtherState::Asks(call);
                }
                _ if self.me.is_over(now) => return Err(self.timed_out(now)),
                _ => {}
            },
            OtherState::Asks(call) => match self.around.answer() {
                None => self.state = OtherState::Asks(call),
                Some(Ok(mut words)) => {
                    confirm(&mut words);
                    self.around.ask(&call, &self.me.hello(Channel::Watch));
                    // The first process may have started later.
                    let until = now + self.me.timeout.saturating_add(LAST_WORDS);
                    self.state = OtherState::Waits(Waiting { call, words, heard: Vec::new(), watch: None, until });
                }
                Some(Err(error)) => self.failed = Some((call, error)),
            },
            OtherState::Waits(waiting) => return self.waits(waiting, now),
        }
        Ok(None)
    }

    fn timed_out(&mut self, now: Instant) -> RendezvousError {
        if let Some((call, error)) = self.failed.take() {
            return self.me.unreachable(now, call, error);
        }
        let Member { rank, host, directory, timeout, .. } = self.me.clone();
        RendezvousError::NoFirst { rank, host, directory, seconds: timeout.as_secs() }
    }

    /// Waits for the connection for the watch and for the first process's message.
    fn waits(&mut self, mut at: Waiting<A::Stream>, now: Instant) -> Result<Option<Met<A::Stream>>, RendezvousError> {
        let told = match read_message(&mut at.words, &mut at.heard, self.me.size.saturating_mul(LONGEST_HOST)) {
            Ok(told) => told,
            Err(_) => return Err(self.me.gone(0, at.call.host)),
        };
        if at.watch.is_none() {
            at.watch = match self.around.answer() {
                Some(Ok(mut watch)) => {
                    confirm(&mut watch);
                    Some(Ok(watch))
                }
                Some(Err(WatchError::Join { .. })) if told.is_none() && !self.me.is_over(now) => {
                    self.around.ask(&at.call, &self.me.hello(Channel::Watch));
                    None
                }
                answer => answer,
            };
        }
        match (told, at.watch.take()) {
            (Some((GO, text)), Some(Ok(watch))) => {
                let hosts: Vec<String> = text.split('\n').map(String::from).collect();
                if hosts.len() != self.me.size {
                    return Err(self.me.unreachable(now, at.call, WatchError::NoAddress));
                }
                return Ok(Some(Met { hosts, watch: vec![(0, watch)], words: vec![at.words] }));
            }
            (Some((GO, _)), Some(Err(error))) => return Err(self.me.unreachable(now, at.call, error)),
            (Some((GO, _)), None) => {}
            (Some(_), _) => return Err(RendezvousError::Ended),
            (None, watch) => at.watch = watch,
        }
        if now > at.until {
            let host = at.call.address.hosts.first().copied().unwrap_or([0, 0, 0, 0].into());
            let error = WatchError::Join { host, error: ErrorKind::TimedOut.into() };
            return Err(self.me.unreachable(now, at.call, error));
        }
        self.state = OtherState::Waits(at);
        Ok(None)
    }
}

/// Encodes the final message of the first process, with its length.
fn message(kind: u8, text: &str) -> Vec<u8> {
    [&[kind][..], &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat()
}

/// Reads what has arrived of such a message. `None` if more of it has yet to come; its text has at most `longest` bytes.
fn read_message(from: &mut impl Read, heard: &mut Vec<u8>, longest: usize) -> Result<Option<(u8, String)>, Error> {
    if !read_to(from, heard, HEAD)? {
        return Ok(None);
    }
    let length = u32::from_le_bytes([heard[1], heard[2], heard[3], heard[4]]) as usize;
    if length > longest {
        return Err(ErrorKind::InvalidData.into());
    }
    let is_whole = read_to(from, heard, HEAD + length)?;
    Ok(is_whole.then(|| (heard[0], String::from_utf8_lossy(&heard[HEAD..]).into_owned())))
}

/// Tells the first process that a connection stands on this side too.
fn confirm(stream: &mut impl Write) {
    // An error shows when the first process's message is read.
    let _ = stream.write_all(&[HERE]);
}

fn is_quiet(error: &Error) -> bool {
    [ErrorKind::WouldBlock, ErrorKind::Interrupted].contains(&error.kind())
}

/// Returns whether there is something to read, be it only the end of the connection.
fn is_heard(stream: &mut impl Read) -> bool {
    stream.read(&mut [0]).map_or_else(|error| !is_quiet(&error), |_| true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_no_longer_than_it_may_be() {
        let message = |length: u32| [&[GO], &length.to_le_bytes()[..], b"host\n"].concat();
        let read = |bytes: &[u8]| read_message(&mut &*bytes, &mut Vec::new(), 256).map_err(|error| error.kind());
        assert_eq!(read(&message(5)), Ok(Some((GO, "host\n".to_string()))));
        assert_eq!(read(&message(257)), Err(ErrorKind::InvalidData));
        assert_eq!(read(&message(u32::MAX)), Err(ErrorKind::InvalidData));
    }
}
