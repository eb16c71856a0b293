//! The watch and failover of all ranks, among strangers and faults: processes that are killed, stopped or late, hosts that
//! are cut off, failures of a rank.
//!
//! Every rank that is left ends in time, each side of the network says once who is lost, it names nobody who is not, and
//! no stranger is ever taken for a rank.

use crate::ranks::connect::{Greetings, TOKEN};
use crate::ranks::failover::{Failover, Reach};
use crate::ranks::simulated::network::{
    Connecting, Network, Random, SharedNetwork, Stranger, Stream, accept, hello, hosts, network,
};
use crate::ranks::watch::{Ends, Link, Peer, Shared, Watcher};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Silence after which a rank is lost: the command line's default.
const LOST_AFTER: Duration = Duration::from_secs(6);
/// Time limit for all ranks to end after a fault.
const LIMIT_MS: u64 = 11_000;

fn token(rank: usize) -> [u8; TOKEN] {
    [rank as u8 + 1; TOKEN]
}

/// A rank's connections for failover.
struct Simulated {
    network: SharedNetwork,
    me: usize,
    size: usize,
    connecting: Vec<Connecting>,
    greetings: Greetings<Stream>,
}

impl Reach for Simulated {
    type Stream = Stream;

    fn ask(&mut self, rank: usize) {
        let hello = hello(self.me, self.size);
        self.connecting.push(Connecting::new(&self.network, self.me, rank, token(rank), hello));
    }

    fn answer(&mut self) -> Option<Option<Stream>> {
        let known = (0..self.connecting.len()).find_map(|c| Some((c, self.connecting[c].outcome()?)));
        known.map(|(c, outcome)| {
            self.connecting.swap_remove(c);
            outcome
        })
    }

    fn asked_by(&mut self) -> Option<(usize, Stream)> {
        accept(&self.network, self.me, &mut self.greetings).map(|(hello, stream)| (hello.rank, stream))
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Kill(usize),
    /// Stopped for so many milliseconds.
    Stop(usize, u64),
    /// These hosts are cut off from all others for so many milliseconds.
    Cut([bool; 4], u64),
    /// A rank fails; the flag is true if that may follow from the loss of another.
    Fail(usize, bool),
}

const FOREVER: u64 = u64::MAX;

#[derive(Debug, Default)]
struct Record {
    /// By rank: with the time, in milliseconds.
    said: Vec<(usize, u64, String)>,
    exits: BTreeMap<usize, (u8, u64)>,
}

struct Process {
    watcher: Option<Watcher<Simulated>>,
    shared: Arc<Mutex<Shared<Simulated>>>,
    stopped_until_ms: u64,
    turns_at_ms: u64,
    finishes_at_ms: u64,
    /// When the process of a rank that is done ends.
    ends_at_ms: u64,
}

struct Scenario {
    hosts: Vec<usize>,
    faults: Vec<(u64, Fault)>,
    finishes_at_ms: u64,
}

/// Draws hosts, faults and their times.
fn scenario(random: &mut Random) -> Scenario {
    let hosts = hosts(random);
    let (size, several) = (hosts.len() as u64, hosts.last() > Some(&0));
    let anyone = |random: &mut Random| random.within(0, size - 1) as usize;
    let kinds = if several { 7 } else { 6 };
    let at = random.within(1_500, 6_000);
    let fault = match random.within(0, kinds) {
        0 => None,
        1 => Some(Fault::Kill(anyone(random))),
        2 => Some(Fault::Stop(anyone(random), FOREVER)),
        3 => Some(Fault::Fail(anyone(random), random.one_in(2))),
        // Not for long enough to be lost, or longer.
        4 => Some(Fault::Stop(anyone(random), random.within(1, 3_000))),
        5 => Some(Fault::Stop(anyone(random), random.within(9_000, 15_000))),
        kind => {
            let last = hosts.last().copied().unwrap_or(0) as u64;
            let mut cut = [false; 4];
            let first = random.within(0, last) as usize;
            cut[first] = true;
            // A second one, if some are left.
            let second = random.within(0, last) as usize;
            cut[second] |= last > 1 && random.one_in(2);
            let lasts = if kind == 6 { random.within(1, 3_000) } else { FOREVER };
            Some(Fault::Cut(cut, lasts))
        }
    };
    let mut faults: Vec<(u64, Fault)> = fault.into_iter().map(|fault| (at, fault)).collect();
    if let [(_, Fault::Kill(first))] = faults[..]
        && size > 3
        && random.one_in(3)
    {
        let second = anyone(random);
        if second != first {
            faults.push((at + random.within(0, 2_000), Fault::Kill(second)));
        }
    }
    // In one of four runs the fault meets ranks that finish.
    let finishes_at_ms = if random.one_in(4) { at + random.within(0, 400) } else { 20_000 };
    Scenario { hosts, faults, finishes_at_ms }
}

/// All processes of a run.
struct Run {
    network: SharedNetwork,
    hosts: Vec<usize>,
    processes: Vec<Process>,
    strangers: Vec<Stranger>,
    record: Arc<Mutex<Record>>,
}

impl Run {
    /// Lets all ranks join the first one, among strangers, and starts their watches.
    fn new(seed: u64, hosts: &[usize], finishes_at_ms: u64) -> Run {
        let network = Network::new(Random(seed), hosts.to_vec());
        let (processes, strangers, record) = (Vec::new(), Vec::new(), Arc::default());
        let mut run = Run { network, hosts: hosts.to_vec(), processes, strangers, record };
        for (reach, links) in run.joined() {
            let process = run.process(reach, links, finishes_at_ms);
            run.processes.push(process);
        }
        run
    }

    fn draw(&self, low: u64, high: u64) -> u64 {
        network(&self.network).random.within(low, high)
    }

    /// Connects all ranks to the first one.
    fn joined(&mut self) -> Vec<(Simulated, Vec<(usize, Stream)>)> {
        let size = self.hosts.len();
        let reach = |me| Simulated {
            network: self.network.clone(),
            me,
            size,
            connecting: Vec::new(),
            greetings: Greetings::new(token(me)),
        };
        let mut all: Vec<(Simulated, Vec<(usize, Stream)>)> = (0..size).map(|me| (reach(me), Vec::new())).collect();
        self.come_strangers(0);
        all.iter_mut().skip(1).for_each(|(reach, _)| reach.ask(0));
        let is_whole =
            |(rank, (_, links)): (usize, &(Simulated, Vec<_>))| links.len() == if rank == 0 { size - 1 } else { 1 };
        while !all.iter().enumerate().all(is_whole) {
            assert!(self.passes(2) < 8_000, "the ranks do not find each other");
            while let Some(link) = all[0].0.asked_by() {
                all[0].1.push(link);
            }
            for (reach, links) in &mut all[1..] {
                while let Some(answer) = reach.answer() {
                    links.push((0, answer.expect("the first rank is there")));
                }
            }
        }
        all
    }

    /// Lets some time pass. Returns what time it is.
    fn passes(&mut self, ms: u64) -> u64 {
        self.strangers.iter_mut().for_each(Stranger::turn);
        let mut network = network(&self.network);
        network.now_ms += ms;
        network.now_ms
    }

    fn come_strangers(&mut self, rank: usize) {
        for _ in 0..self.draw(0, 4) {
            self.strangers.extend(Stranger::new(&self.network, rank));
        }
    }

    fn process(&self, reach: Simulated, links: Vec<(usize, Stream)>, finishes_at_ms: u64) -> Process {
        let (me, size) = (reach.me, self.hosts.len());
        let first_on = |host: &usize| self.hosts.iter().position(|other| other == host).unwrap_or(0);
        let nodes: Vec<usize> = self.hosts.iter().map(first_on).collect();
        let peers = (0..size).map(|rank| Peer { rank, host: format!("h{}", self.hosts[rank]) }).collect();
        let (now, now_ms) = {
            let network = network(&self.network);
            (network.now(), network.now_ms)
        };
        let links = links.into_iter().map(|(peer, stream)| Link::new(peer, stream, now)).collect();
        let shared = Arc::new(Mutex::new(Shared::new()));
        shared.lock().expect("one thread").failover = Some(Failover::new(me, &nodes, reach));
        let (said, exits, of_say, of_exit) =
            (self.record.clone(), self.record.clone(), self.network.clone(), self.network.clone());
        let ends = Ends {
            say: Box::new(move |text| {
                let at = network(&of_say).now_ms;
                said.lock().expect("one thread").said.push((me, at, text.to_string()));
            }),
            exit: Box::new(move |code| {
                let at = network(&of_exit).now_ms;
                exits.lock().expect("one thread").exits.insert(me, (code, at));
            }),
        };
        let watcher = Some(Watcher::new(me, peers, links, LOST_AFTER, ends, shared.clone(), now));
        let finishes_at_ms = finishes_at_ms + self.draw(0, 300);
        let ends_at_ms = finishes_at_ms + self.draw(50, 1_000);
        Process { watcher, shared, stopped_until_ms: 0, turns_at_ms: now_ms, finishes_at_ms, ends_at_ms }
    }

    /// Ends a process: its host closes its connections.
    fn end(&mut self, rank: usize) {
        let waiting = network(&self.network).end(rank);
        drop(waiting);
        let process = &mut self.processes[rank];
        process.watcher = None;
        let mut shared = process.shared.lock().expect("one thread");
        let kept = (std::mem::take(&mut shared.kept), shared.failover.take());
        drop(shared);
        drop(kept);
    }

    fn strike(&mut self, fault: Fault) {
        match fault {
            Fault::Kill(rank) => self.end(rank),
            Fault::Stop(rank, ms) => {
                let until = network(&self.network).now_ms.saturating_add(ms);
                self.processes[rank].stopped_until_ms = until;
            }
            Fault::Cut(hosts, _) => {
                let hosts = hosts.iter().enumerate().filter(|(_, cut)| **cut).map(|(host, _)| host).collect();
                network(&self.network).cut(hosts);
            }
            Fault::Fail(rank, follows) => {
                let mut shared = self.processes[rank].shared.lock().expect("one thread");
                shared.failed = Some((FAILED, format!("rank {rank} failed"), follows));
            }
        }
    }

    /// Lets a process do what is due.
    fn turn(&mut self, rank: usize) {
        let (now, now_ms) = {
            let network = network(&self.network);
            (network.now(), network.now_ms)
        };
        let pause_ms = self.draw(1, 40);
        let process = &mut self.processes[rank];
        if now_ms < process.stopped_until_ms || now_ms < process.turns_at_ms {
            return;
        }
        process.turns_at_ms = now_ms + pause_ms;
        {
            let mut shared = process.shared.lock().expect("one thread");
            // A rank that has failed does not get to its end.
            shared.finished |= shared.failed.is_none() && now_ms >= process.finishes_at_ms;
            shared.activity = format!("in step {}", now_ms / 100);
        }
        let is_over = process.watcher.as_mut().is_some_and(|watcher| watcher.turn(now, false));
        let has_exited = self.record.lock().expect("one thread").exits.contains_key(&rank);
        if is_over {
            self.processes[rank].watcher = None;
        }
        let process = &self.processes[rank];
        if has_exited || process.watcher.is_none() && now_ms >= process.ends_at_ms {
            self.end(rank);
        }
    }

    fn is_over(&self) -> bool {
        let network = network(&self.network);
        let is_stuck = |process: &Process| process.stopped_until_ms == FOREVER;
        (0..).zip(&self.processes).all(|(rank, process)| network.ended.contains(&rank) || is_stuck(process))
    }
}

const FAILED: u8 = 7;

/// Draws a scenario and plays it. Returns an error that names a rule that does not hold.
fn play(seed: u64) -> Result<(), String> {
    let mut random = Random(seed);
    let Scenario { hosts, faults, finishes_at_ms } = scenario(&mut random);
    let mut run = Run::new(random.next(), &hosts, finishes_at_ms);
    let mut due: VecDeque<(u64, Fault)> = faults.iter().copied().collect();
    let mut heals_at_ms = FOREVER;
    loop {
        let now_ms = run.passes(2);
        while let Some((_, fault)) = due.pop_front_if(|(at, _)| *at <= now_ms) {
            run.strike(fault);
            if let Fault::Cut(_, lasts) = fault {
                heals_at_ms = now_ms.saturating_add(lasts);
            }
            let rank = run.draw(0, hosts.len() as u64 - 1) as usize;
            run.come_strangers(rank);
        }
        if now_ms >= heals_at_ms {
            network(&run.network).heal();
            heals_at_ms = FOREVER;
        }
        (0..hosts.len()).for_each(|rank| run.turn(rank));
        if run.is_over() && due.is_empty() {
            break;
        }
        if now_ms > 45_000 {
            let left: Vec<usize> = (0..hosts.len()).filter(|&rank| run.processes[rank].watcher.is_some()).collect();
            return Err(format!("ranks {left:?} never end"));
        }
    }
    let record = run.record.lock().expect("one thread");
    check(&hosts, &faults, finishes_at_ms, &record)
}

/// The ranks that a message says are lost.
fn named(text: &str) -> BTreeSet<usize> {
    let lost = text.split("; ").filter(|part| part.contains(" is gone") || part.contains(" has been silent"));
    let rank = |part: &str| part.strip_prefix("rank ")?.split(' ').next()?.parse().ok();
    lost.filter_map(rank).collect()
}

/// Compares a record with what the fault, if there is one, has to lead to.
fn check(hosts: &[usize], faults: &[(u64, Fault)], finishes_at_ms: u64, record: &Record) -> Result<(), String> {
    let lasts = |ms: u64| Duration::from_millis(ms) > LOST_AFTER;
    let all = || 0..hosts.len();
    let mut lost = BTreeSet::new();
    let mut cut = None;
    let mut code = 1;
    for &(_, fault) in faults {
        match fault {
            Fault::Kill(rank) => drop(lost.insert(rank)),
            Fault::Stop(rank, ms) if lasts(ms) => drop(lost.insert(rank)),
            Fault::Cut(hosts, ms) if lasts(ms) => cut = Some(hosts),
            Fault::Fail(..) => code = FAILED,
            Fault::Stop(..) | Fault::Cut(..) => {}
        }
    }
    let has_failed = faults.iter().any(|(_, fault)| matches!(fault, Fault::Fail(..)));
    let is_harmless = lost.is_empty() && cut.is_none() && !has_failed;
    let first_ms = faults.iter().map(|(at, _)| *at).min().unwrap_or(0);
    let last_ms = faults.iter().map(|(at, _)| *at).max().unwrap_or(0);
    // Ranks that are done, or about to be, may end without a word.
    let finishes = last_ms + 1_000 >= finishes_at_ms || is_harmless;
    let side_of = |rank: usize| cut.is_some_and(|cut: [bool; 4]| cut[hosts[rank]]);
    for side in [false, true] {
        let ranks: BTreeSet<usize> = all().filter(|&rank| side_of(rank) == side && !lost.contains(&rank)).collect();
        if ranks.is_empty() {
            continue;
        }
        let said: Vec<_> = record.said.iter().filter(|(rank, ..)| side_of(*rank) == side).collect();
        let most = if is_harmless { 0 } else { faults.len() };
        let least = usize::from(!finishes);
        if said.len() < least || said.len() > most {
            return Err(format!("{} messages of {ranks:?}, not {least} to {most}", said.len()));
        }
        for (rank, _, text) in &said {
            let named = named(text);
            let allowed: BTreeSet<usize> = all().filter(|rank| !ranks.contains(rank)).collect();
            if !named.is_subset(&allowed) || named.is_empty() && !has_failed && !finishes {
                return Err(format!("rank {rank} names {named:?}: {text}"));
            }
            if has_failed && !text.ends_with(" failed") && !finishes {
                return Err(format!("rank {rank} says {text}"));
            }
        }
        for rank in ranks {
            match record.exits.get(&rank) {
                None if finishes => {}
                None => return Err(format!("rank {rank} is not ended")),
                // The first rank may have waited for one that failed while others were done.
                Some((found, _)) if *found != code && !(finishes && *found == 1) => {
                    return Err(format!("rank {rank} ends with {found}, not {code}"));
                }
                Some((_, at)) if *at > first_ms + LIMIT_MS => return Err(format!("rank {rank} ends after {at} ms")),
                Some(_) if is_harmless => return Err(format!("rank {rank} is ended, though nothing is lost")),
                Some(_) => {}
            }
        }
    }
    Ok(())
}

fn plays(seeds: std::ops::Range<u64>) {
    let failed = seeds.filter_map(|seed| {
        play(seed).err().map(|error| {
            let Scenario { hosts, faults, finishes_at_ms } = scenario(&mut Random(seed));
            format!("seed {seed}: {error} (hosts {hosts:?}, {faults:?}, done at {finishes_at_ms} ms)")
        })
    });
    let failed: Vec<String> = failed.collect();
    assert!(failed.is_empty(), "{} runs fail:\n{}", failed.len(), failed.join("\n"));
}

#[test]
fn every_side_says_once_who_is_lost_and_ends_in_time() {
    plays(0..500);
}

#[test]
#[ignore = "half a minute of a core"]
fn ten_thousand_seeds_hold_the_same_rules() {
    plays(0..10_000);
}
