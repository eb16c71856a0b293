//! The rendezvous of all processes of a run: a directory that shows files late and may have an old one, strangers, and
//! faults from the launcher's to the network's.
//!
//! Every process ends in time: it has met the others, or has an error that names what is wrong. A process has met the
//! others only if the first one says so, over the connections that it counted, and all know the same hosts.

use crate::error::{RendezvousError, WatchError};
use crate::ranks::call::Call;
use crate::ranks::connect::{Address, Greetings, Hello, TOKEN};
use crate::ranks::gather::{First, Member, Met, Other, Surroundings};
use crate::ranks::simulated::network::{
    Connecting, Network, Random, SharedNetwork, Stranger, Stream, accept, hosts, network,
};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Error, ErrorKind, Write};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const TIMEOUT_MS: u64 = 30_000;
/// Time within which all meet after the last has started, if nothing is wrong.
const MEET_MS: u64 = 12_000;
/// Time limit for a process to end: it may reach the first one at its last moment, which then waits as long, and ten
/// seconds for the last word. The rest is for greetings.
const LIMIT_MS: u64 = 2 * TIMEOUT_MS + 10_000 + 15_000;
/// A fault lasts for ever.
const FOREVER: u64 = u64::MAX;

/// All versions of the run's file, with the time from which each host sees them.
struct Directory {
    versions: Vec<(Vec<u64>, Option<Call>)>,
    hosts: usize,
    /// The longest time until other hosts see a version.
    late_ms: u64,
    is_writable: bool,
}

impl Directory {
    fn seen(&self, host: usize, now_ms: u64) -> Option<Call> {
        let last = self.versions.iter().rev().find(|(from_ms, _)| from_ms[host] <= now_ms);
        last.and_then(|(_, call)| call.clone())
    }

    fn change(&mut self, net: &SharedNetwork, host: usize, call: Option<Call>) {
        let mut locked = network(net);
        let now_ms = locked.now_ms;
        let mut from_ms: Vec<u64> = (0..self.hosts).map(|_| now_ms + locked.random.within(0, self.late_ms)).collect();
        from_ms[host] = now_ms;
        self.versions.push((from_ms, call));
    }
}

/// The directory and network as a process sees them.
struct Simulated {
    network: SharedNetwork,
    directory: Arc<Mutex<Directory>>,
    me: usize,
    connecting: Option<Connecting>,
    greetings: Greetings<Stream>,
}

fn token(process: usize) -> [u8; TOKEN] {
    [process as u8 + 1; TOKEN]
}

/// The address of a process: its number is the port.
fn address(process: usize) -> Address {
    Address { hosts: vec![IpAddr::from([10, 0, 0, 1])], port: process as u16, token: token(process) }
}

fn host_name(host: usize) -> String {
    format!("h{host}")
}

impl Simulated {
    fn host(&self) -> usize {
        network(&self.network).host(self.me)
    }
}

impl Surroundings for Simulated {
    type Stream = Stream;

    fn call(&mut self) -> Option<Call> {
        let now_ms = network(&self.network).now_ms;
        self.directory.lock().expect("one thread").seen(self.host(), now_ms)
    }

    fn publish(&mut self, call: &Call) -> Result<(), Error> {
        let mut directory = self.directory.lock().expect("one thread");
        if !directory.is_writable {
            return Err(ErrorKind::PermissionDenied.into());
        }
        directory.change(&self.network, self.host(), Some(call.clone()));
        Ok(())
    }

    fn ask(&mut self, call: &Call, hello: &Hello) {
        let Address { port, token, .. } = call.address;
        self.connecting = Some(Connecting::new(&self.network, self.me, port.into(), token, hello.clone()));
    }

    fn answer(&mut self) -> Option<Result<Stream, WatchError>> {
        let outcome = self.connecting.as_mut()?.outcome()?;
        self.connecting = None;
        let host = IpAddr::from([10, 0, 0, 1]);
        Some(outcome.ok_or(WatchError::Join { host, error: ErrorKind::TimedOut.into() }))
    }

    fn greeted(&mut self) -> Result<Option<(Hello, Stream)>, Error> {
        Ok(accept(&self.network, self.me, &mut self.greetings))
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Trouble {
    Nothing,
    /// A process is killed.
    Kill(usize),
    /// A process is stopped for so many milliseconds.
    Stop(usize, u64),
    /// This host is cut off from all others for so many milliseconds.
    Cut(usize, u64),
    /// A process is never started.
    Absent(usize),
    /// A process is started with another number of processes.
    Size(usize),
    /// A second process has this rank.
    Twice(usize),
    /// Another run of as many processes uses the same directory.
    TwoRuns,
    /// The first process cannot write the file.
    Unwritable,
}

/// The file that an earlier run has left.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Old {
    None,
    /// Its process has ended.
    Ended,
    /// Its address is a stranger's, who sends back what he hears.
    Stranger,
}

#[derive(Debug)]
struct Scenario {
    /// By process, of which the first `size` have the ranks of their numbers.
    hosts: Vec<usize>,
    size: usize,
    starts_ms: Vec<u64>,
    trouble: Trouble,
    at_ms: u64,
    old: Old,
    late_ms: u64,
}

fn scenario(random: &mut Random) -> Scenario {
    let mut hosts = hosts(random);
    let size = hosts.len();
    let (any, last_host) = (random.within(0, size as u64 - 1) as usize, hosts[size - 1]);
    let lasts = |random: &mut Random| [random.within(1, 4_000), random.within(5_500, 12_000), FOREVER];
    let lasts = lasts(random)[random.within(0, 2) as usize];
    let trouble = match random.within(0, 9) {
        0 | 1 => Trouble::Nothing,
        2 => Trouble::Kill(any),
        3 => Trouble::Stop(any, lasts),
        4 if last_host > 0 => Trouble::Cut(random.within(0, last_host as u64) as usize, lasts),
        4 | 5 => Trouble::Absent(any),
        6 => Trouble::Size(any),
        7 => Trouble::Twice(any),
        8 => Trouble::TwoRuns,
        _ => Trouble::Unwritable,
    };
    match trouble {
        Trouble::Twice(_) => hosts.push(random.within(0, last_host as u64) as usize),
        Trouble::TwoRuns => hosts.extend(hosts.clone()),
        _ => {}
    }
    let spread = if random.one_in(2) { 300 } else { 6_000 };
    Scenario {
        starts_ms: hosts.iter().map(|_| random.within(0, spread)).collect(),
        at_ms: random.within(0, spread + 1_000),
        old: [Old::None, Old::None, Old::Ended, Old::Stranger][random.within(0, 3) as usize],
        late_ms: if random.one_in(2) { 0 } else { 3_000 },
        hosts,
        size,
        trouble,
    }
}

impl Scenario {
    fn rank(&self, process: usize) -> usize {
        match self.trouble {
            Trouble::Twice(rank) if process == self.size => rank,
            _ => process % self.size,
        }
    }
}

enum State {
    NotStarted,
    First(First<Simulated>),
    Other(Other<Simulated>),
    Met(Met<Stream>),
    Failed(RendezvousError),
    Killed,
}

struct Process {
    state: State,
    turns_at_ms: u64,
    ended_ms: u64,
}

/// A stranger at an old address.
struct Echo {
    process: usize,
    streams: Vec<Stream>,
}

impl Echo {
    fn turn(&mut self, net: &SharedNetwork) {
        self.streams.extend(network(net).arrived(self.process));
        for stream in &mut self.streams {
            let mut buffer = [0; 256];
            if let Ok(n @ 1..) = std::io::Read::read(stream, &mut buffer) {
                // Twice, since a proof is longer than a greeting.
                let _ = stream.write(&[&buffer[..n], &buffer[..n]].concat());
            }
        }
    }
}

struct Run {
    scenario: Scenario,
    network: SharedNetwork,
    directory: Arc<Mutex<Directory>>,
    processes: Vec<Process>,
    strangers: Vec<Stranger>,
    echo: Echo,
}

impl Run {
    fn new(scenario: Scenario, random: Random) -> Run {
        // The last two addresses are those of old files.
        let count = scenario.hosts.len();
        let network = Network::new(random, [&scenario.hosts[..], &[0, 0]].concat());
        let old = match scenario.old {
            Old::None => None,
            Old::Ended => Some(count),
            Old::Stranger => Some(count + 1),
        };
        super::network::network(&network).ended.insert(count);
        let old = old.map(|process| Call { address: address(process), pid: 7, host: "old".to_string() });
        let hosts = scenario.hosts.iter().max().map_or(1, |last| last + 1);
        let is_writable = scenario.trouble != Trouble::Unwritable;
        let versions = vec![(vec![0; hosts], old)];
        let directory = Directory { versions, hosts, late_ms: scenario.late_ms, is_writable };
        let process = |start_ms: &u64| Process { state: State::NotStarted, turns_at_ms: *start_ms, ended_ms: 0 };
        let mut processes: Vec<Process> = scenario.starts_ms.iter().map(process).collect();
        if let Trouble::Absent(process) = scenario.trouble {
            processes[process].state = State::Killed;
        }
        let echo = Echo { process: count + 1, streams: Vec::new() };
        let directory = Arc::new(Mutex::new(directory));
        Run { scenario, network, directory, processes, strangers: Vec::new(), echo }
    }

    fn start(&self, me: usize) -> State {
        let (rank, host) = (self.scenario.rank(me), host_name(self.scenario.hosts[me]));
        let (directory, timeout) = (PathBuf::from("shared"), Duration::from_millis(TIMEOUT_MS));
        let size = self.scenario.size + usize::from(self.scenario.trouble == Trouble::Size(me));
        let start = network(&self.network).now();
        let member = Member { rank, size, pid: me as u32, host: host.clone(), directory, timeout, start };
        let around = Simulated {
            network: self.network.clone(),
            directory: self.directory.clone(),
            me,
            connecting: None,
            greetings: Greetings::new(token(me)),
        };
        match rank {
            0 => State::First(First::new(member, around, Call { address: address(me), pid: me as u32, host })),
            _ => State::Other(Other::new(member, around)),
        }
    }

    /// Lets a process do what is due.
    fn turn(&mut self, me: usize) {
        let (now, now_ms, pause_ms) = {
            let mut network = network(&self.network);
            (network.now(), network.now_ms, network.random.within(15, 40))
        };
        if now_ms < self.processes[me].turns_at_ms {
            return;
        }
        self.processes[me].turns_at_ms = now_ms + pause_ms;
        let state = std::mem::replace(&mut self.processes[me].state, State::Killed);
        let state = match state {
            State::NotStarted => self.start(me),
            State::First(mut first) => match first.turn(now) {
                Ok(false) => State::First(first),
                done => self.end_first(me, first, done.map(drop)),
            },
            State::Other(mut other) => match other.turn(now) {
                Ok(None) => State::Other(other),
                Ok(Some(met)) => State::Met(met),
                Err(error) => State::Failed(error),
            },
            state => state,
        };
        if matches!(state, State::Met(_) | State::Failed(_)) && self.processes[me].ended_ms == 0 {
            self.processes[me].ended_ms = now_ms;
        }
        if let State::Failed(_) = state {
            let waiting = network(&self.network).end(me);
            drop(waiting);
        }
        self.processes[me].state = state;
    }

    /// Removes the file and tells all that have come.
    fn end_first(&self, me: usize, first: First<Simulated>, done: Result<(), RendezvousError>) -> State {
        let mut directory = self.directory.lock().expect("one thread");
        let (host, now_ms) = (self.scenario.hosts[me], network(&self.network).now_ms);
        if directory.seen(host, now_ms).is_some_and(|call| call.address == address(me)) {
            directory.change(&self.network, host, None);
        }
        let (mut met, message) = first.end(done.is_ok());
        for stream in &mut met.words {
            let _ = stream.write_all(&message);
        }
        match done {
            Ok(()) => State::Met(met),
            Err(error) => State::Failed(error),
        }
    }

    /// Begins the trouble. Returns when it is over.
    fn strike(&mut self) -> u64 {
        let mut network = network(&self.network);
        let now_ms = network.now_ms;
        match self.scenario.trouble {
            Trouble::Kill(process) => {
                let waiting = network.end(process);
                drop(network);
                drop(waiting);
                self.processes[process].state = State::Killed;
            }
            Trouble::Stop(process, ms) => self.processes[process].turns_at_ms = now_ms.saturating_add(ms),
            Trouble::Cut(host, ms) => {
                network.cut(BTreeSet::from([host]));
                return now_ms.saturating_add(ms);
            }
            _ => {}
        }
        FOREVER
    }

    fn play(&mut self) {
        let (mut strikes_at_ms, mut heals_at_ms) = (self.scenario.at_ms, FOREVER);
        loop {
            let now_ms = {
                let mut network = network(&self.network);
                network.now_ms += 2;
                network.now_ms
            };
            self.strangers.iter_mut().for_each(Stranger::turn);
            self.echo.turn(&self.network);
            if now_ms >= strikes_at_ms {
                (strikes_at_ms, heals_at_ms) = (FOREVER, self.strike());
                let rank = network(&self.network).random.within(0, self.scenario.size as u64 - 1) as usize;
                self.strangers.extend((0..3).filter_map(|_| Stranger::new(&self.network, rank)));
            }
            if now_ms >= heals_at_ms {
                network(&self.network).heal();
                heals_at_ms = FOREVER;
            }
            (0..self.processes.len()).for_each(|process| self.turn(process));
            let has_ended = |process: &Process| process.ended_ms > 0 || matches!(process.state, State::Killed);
            if self.processes.iter().all(has_ended) || now_ms > LIMIT_MS + 20_000 {
                return;
            }
        }
    }

    /// Checks what holds whatever happens.
    fn check(&self) -> Result<(), String> {
        let Scenario { trouble, starts_ms, size, hosts, .. } = &self.scenario;
        for (p, process) in self.processes.iter().enumerate() {
            let late_ms = match trouble {
                Trouble::Stop(stopped, ms) if *stopped == p => *ms,
                _ => 0,
            };
            let limit_ms = (starts_ms[p] + LIMIT_MS).saturating_add(late_ms);
            match &process.state {
                State::Killed => {}
                State::Met(_) | State::Failed(_) if process.ended_ms <= limit_ms => {}
                _ if late_ms == FOREVER => {}
                _ => return Err(format!("process {p} does not end in time ({} ms)", process.ended_ms)),
            }
            if let State::Failed(RendezvousError::Gone { rank, .. }) = &process.state
                && !(0..self.processes.len()).any(|q| self.scenario.rank(q) == *rank && !self.is_alive(q))
            {
                return Err(format!("process {p} says that rank {rank} is gone, which is there"));
            }
            let State::Met(met) = &process.state else { continue };
            let of_rank = |peer: usize, rank| self.scenario.rank(peer) == rank;
            if self.scenario.rank(p) == 0 {
                let peers: BTreeMap<usize, usize> =
                    (1..).zip(&met.words).map(|(rank, words)| (rank, words.peer())).collect();
                let watched: BTreeMap<usize, usize> =
                    met.watch.iter().map(|(rank, watch)| (*rank, watch.peer())).collect();
                let truth: Vec<String> =
                    (0..*size).map(|rank| host_name(hosts[if rank == 0 { p } else { peers[&rank] }])).collect();
                if peers != watched || peers.len() + 1 != *size || truth != met.hosts {
                    return Err(format!("process {p} has met {peers:?} and watches {watched:?} on {:?}", met.hosts));
                }
                if let Some((rank, peer)) = peers.iter().find(|(rank, peer)| !of_rank(**peer, **rank)) {
                    return Err(format!("process {p} takes process {peer} for rank {rank}"));
                }
                continue;
            }
            let first = met.words[0].peer();
            let State::Met(of_first) = &self.processes.get(first).ok_or("it has met a stranger")?.state else {
                match trouble {
                    // It may be killed after its last message.
                    Trouble::Kill(killed) if *killed == first => continue,
                    _ => return Err(format!("process {p} has met {first}, which has not met the others")),
                }
            };
            let counted = of_first.words.get(self.scenario.rank(p) - 1).map(Stream::peer);
            if counted != Some(p) || of_first.hosts != met.hosts || met.watch[0].1.peer() != first {
                return Err(format!("process {p} has met {first}, which counts {counted:?} for its rank"));
            }
        }
        self.check_trouble()
    }

    fn is_alive(&self, process: usize) -> bool {
        matches!(self.processes[process].state, State::Met(_) | State::First(_) | State::Other(_))
    }

    fn has_met(&self, process: usize) -> bool {
        matches!(self.processes[process].state, State::Met(_))
    }

    /// Checks that what is wrong is named, and that all meet if nothing is.
    fn check_trouble(&self) -> Result<(), String> {
        let Scenario { trouble, starts_ms, at_ms, .. } = &self.scenario;
        let all = 0..self.processes.len();
        let met = all.clone().filter(|&process| self.has_met(process)).count();
        let first = &self.processes[0].state;
        let error = match first {
            State::Failed(error) => error.to_string(),
            _ => String::new(),
        };
        let (is_right, expected) = match trouble {
            Trouble::Nothing => (met == all.len(), "all meet"),
            Trouble::Stop(_, ms) | Trouble::Cut(_, ms) if *ms != FOREVER => (met == all.len(), "all meet"),
            Trouble::Stop(process, _) | Trouble::Kill(process) if *process > 0 => {
                let is_named = match first {
                    State::Failed(RendezvousError::Missing { missing, .. }) => missing == &[*process],
                    State::Failed(RendezvousError::Gone { rank, .. }) => rank == process,
                    _ => met + 1 >= all.len(),
                };
                (is_named, "the first process names the lost one, or the others meet")
            }
            Trouble::Stop(..) | Trouble::Kill(_) => (true, ""),
            Trouble::Cut(host, _) => {
                let of_cut = |rank: usize| (self.scenario.hosts[rank] == *host) != (self.scenario.hosts[0] == *host);
                let is_named = match first {
                    State::Failed(RendezvousError::Missing { missing, .. }) => missing.iter().all(|&rank| of_cut(rank)),
                    _ => matches!(first, State::Met(_)),
                };
                (is_named, "the first process names those that it cannot reach, or has met all")
            }
            Trouble::Absent(0) => (met == 0, "nobody meets"),
            Trouble::Absent(process) => {
                let is_named =
                    matches!(first, State::Failed(RendezvousError::Missing { missing, .. }) if missing == &[*process]);
                (met == 0 && is_named, "the first process names the missing one")
            }
            Trouble::Size(process) => {
                let is_named = |found: usize| found == *process || *process == 0;
                let is_named = matches!(first, State::Failed(RendezvousError::Size { rank, .. }) if is_named(*rank));
                (met == 0 && is_named, "the first process names the one of another size")
            }
            Trouble::Twice(rank) => {
                let names = matches!(first, State::Failed(RendezvousError::Twice { rank: found, .. }) if found == rank);
                let is_right = if *rank == 0 { met <= self.scenario.size } else { names || met == self.scenario.size };
                (is_right, "a run meets, or both processes of the rank are named")
            }
            Trouble::TwoRuns => (met % self.scenario.size == 0, "whole runs meet"),
            Trouble::Unwritable => {
                (met == 0 && matches!(first, State::Failed(RendezvousError::Write { .. })), "the file is named")
            }
        };
        if !is_right {
            return Err(format!("{met} have met, not: {expected}; {error}"));
        }
        let lasts_ms = match trouble {
            Trouble::Stop(_, ms) | Trouble::Cut(_, ms) => at_ms.saturating_add(*ms),
            _ => 0,
        };
        let last_ms = starts_ms.iter().max().map_or(0, |last| *last).max(lasts_ms).saturating_add(MEET_MS);
        let slow = self.processes.iter().position(|process| process.ended_ms > last_ms);
        match slow.filter(|_| met == all.len()) {
            Some(slow) => Err(format!("process {slow} has met all only after {} ms", self.processes[slow].ended_ms)),
            None => Ok(()),
        }
    }
}

fn plays(seeds: std::ops::Range<u64>) {
    let failed = seeds.filter_map(|seed| {
        let mut random = Random(seed);
        let scenario = scenario(&mut random);
        let mut run = Run::new(scenario, Random(random.next()));
        run.play();
        run.check().err().map(|error| format!("seed {seed}: {error} ({:?})", run.scenario))
    });
    let failed: Vec<String> = failed.collect();
    assert!(failed.is_empty(), "{} runs fail:\n{}", failed.len(), failed.join("\n"));
}

#[test]
fn all_processes_meet_or_say_in_time_why_not() {
    plays(0..300);
}

#[test]
#[ignore = "a minute of a core"]
fn ten_thousand_rendezvous_hold_the_same_rules() {
    plays(0..10_000);
}
