//! Finds races and deadlocks of tapes without running them.
//!
//! The order of commands follows from streams, events, and joint operations of several devices. The tapes are played
//! command by command. Each command gets a vector clock: for every stream of its own device, the last command that is
//! done before it. Orders that pass through other devices do not count, so an accepted tape is ordered on the device
//! itself.
//!
//! Bytes are tracked as runs with one history each, so that the time is proportional to the commands and the regions
//! that they touch.

use super::access::Access;
use super::ranges::{Found, Ranges};
use super::{CollectiveKind, Communicator, Content, EventId, Message, Purpose, RegionId, Stream, Tape, What};
use altiplano_ir::dtype::DType;
use std::collections::{BTreeMap, HashMap};

/// The position of a command: its device and its index in the tape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct At {
    pub rank: u32,
    pub command: u32,
}

impl std::fmt::Display for At {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "command {} of rank {}", self.command, self.rank)
    }
}

/// A fault of tapes.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Flaw {
    #[error("{at} touches bytes of {content:?} that command {other} touches, and neither waits for the other")]
    Race { at: At, other: u32, content: Content },
    #[error("{at} reads bytes of {content:?} that nothing has written")]
    Unwritten { at: At, content: Content },
    #[error("{at} reads {content:?}, some bytes of which {by:?} has overwritten")]
    Overwritten { at: At, content: Content, by: Content },
    #[error("{at} writes bytes of {content:?} that it reads elsewhere")]
    Overlap { at: At, content: Content },
    #[error("{at} exceeds {content:?}: {bytes} bytes at {offset}")]
    Outside { at: At, content: Content, offset: u64, bytes: u64 },
    #[error("{at} writes a constant, {content:?}")]
    ConstantWritten { at: At, content: Content },
    #[error("{at} waits for event {}, which no earlier command records", .event.0)]
    Unrecorded { at: At, event: EventId },
    #[error("{at} records event {}, as another command does", .event.0)]
    RecordedTwice { at: At, event: EventId },
    #[error("{at} names something that is not in the tape")]
    Unknown { at: At },
    #[error("{at} has parameters that the loop program does not take")]
    Parameters { at: At },
    #[error("{at} and {other} disagree about their operation in {communicator:?}")]
    Differ { at: At, other: At, communicator: Communicator },
    #[error("{at} waits for members of {communicator:?} that never arrive")]
    Alone { at: At, communicator: Communicator },
    #[error("{at} waits forever")]
    Stuck { at: At },
    #[error("rank {rank} is not at its position among the tapes, or uses a group to which it does not belong")]
    Rank { rank: u32 },
}

/// Returns all faults of the tapes of all devices, given by rank. Without faults, they run to completion in every order
/// that streams and events allow, with the same result.
pub fn check(tapes: &[Tape]) -> Vec<Flaw> {
    let mut flaws = Vec::new();
    for (rank, tape) in (0u32..).zip(tapes) {
        if tape.rank != rank {
            flaws.push(Flaw::Rank { rank });
        }
        let before = flaws.len();
        well_formed(tape, tapes.len(), &mut flaws);
        if flaws.len() == before {
            races(tape, &mut flaws);
        }
    }
    if flaws.is_empty() {
        meet(tapes, &mut flaws);
    }
    flaws
}

/// Checks that everything that commands name exists and is large enough.
fn well_formed(tape: &Tape, ranks: usize, flaws: &mut Vec<Flaw>) {
    for communicator in &tape.communicators {
        let here = communicator.ranks.contains(&tape.rank);
        if !here || communicator.ranks.iter().any(|&r| r as usize >= ranks) {
            flaws.push(Flaw::Rank { rank: tape.rank });
        }
    }
    let mut recorded = vec![false; tape.num_events as usize];
    for (command, number) in tape.commands.iter().zip(0u32..) {
        let at = At { rank: tape.rank, command: number };
        for &event in &command.waits {
            if recorded.get(event.0 as usize) != Some(&true) {
                flaws.push(Flaw::Unrecorded { at, event });
            }
        }
        if let Some(event) = command.records {
            match recorded.get_mut(event.0 as usize) {
                Some(done) if !*done => *done = true,
                _ => flaws.push(Flaw::RecordedTwice { at, event }),
            }
        }
        if command.stream.0 as usize >= tape.streams.len() {
            flaws.push(Flaw::Unknown { at });
            continue;
        }
        let needs = match needs(tape, &command.what) {
            Some(needs) => needs,
            None => {
                flaws.push(Flaw::Unknown { at });
                continue;
            }
        };
        if let What::Launch { launch, regions, coordinates } = &command.what {
            let launch = &tape.launches[launch.0 as usize];
            if launch.params.len() != regions.len() || launch.coordinates.len() != coordinates.len() {
                flaws.push(Flaw::Parameters { at });
                continue;
            }
        }
        for (region, dtype, elements) in needs {
            let Some(region) = tape.regions.get(region.0 as usize) else {
                flaws.push(Flaw::Unknown { at });
                continue;
            };
            let short = region.bytes < elements * dtype.bytes() || region.dtype != dtype;
            // Only copies access host memory.
            let end = if matches!(command.what, What::Copy { .. }) { tape.arena.all_bytes() } else { tape.arena.bytes };
            if short || region.offset + region.bytes > end {
                let (content, offset, bytes) = (region.content, region.offset, region.bytes);
                flaws.push(Flaw::Outside { at, content, offset, bytes });
            }
        }
    }
}

/// The elements that a command needs of each region, by its own sizes. `None` if it names a region that does not exist.
fn needs(tape: &Tape, what: &What) -> Option<Vec<(RegionId, DType, u64)>> {
    let message = |m: &Message, dtype| (m.part.region, dtype, m.part.from + m.part.elements);
    let region = |id: RegionId| tape.regions.get(id.0 as usize);
    let all = |id: RegionId| Some((id, region(id)?.dtype, region(id)?.elements));
    Some(match what {
        What::Launch { launch, regions, .. } => {
            let params = &tape.launches.get(launch.0 as usize)?.params;
            regions.iter().zip(params).map(|(&r, p)| (r, p.dtype, p.elements)).collect()
        }
        What::Matmul(call) => {
            let end = |matrix: &super::Matrix, rows: u64, columns: u64, stride: fn(&super::Batch) -> u64| {
                let (major, minor) = if matrix.transposed { (columns, rows) } else { (rows, columns) };
                let last: u64 = call.batches.iter().map(|b| b.count.saturating_sub(1) * stride(b)).sum();
                let end = matrix.from + last + major.saturating_sub(1) * matrix.leading + minor;
                (matrix.region, matrix.dtype, if major * minor == 0 { 0 } else { end })
            };
            vec![
                end(&call.lhs, call.m, call.k, |b| b.lhs),
                end(&call.rhs, call.k, call.n, |b| b.rhs),
                end(&call.result, call.m, call.n, |b| b.result),
            ]
        }
        What::Fill { region, .. } => vec![all(*region)?],
        What::Copy { from, to } => {
            let from = all(*from)?;
            vec![from, (*to, from.1, from.2)]
        }
        What::Upload { to, .. } => vec![all(*to)?],
        What::Download { from, .. } => vec![all(*from)?],
        What::Collective { communicator, kind, dtype, elements, from, to } => {
            let members = tape.communicators.get(communicator.0 as usize)?.ranks.len() as u64;
            let (read, written) = match kind {
                CollectiveKind::AllReduce(_) => (1, 1),
                CollectiveKind::ReduceScatter(_) => (members, 1),
                CollectiveKind::AllGather => (1, members),
            };
            vec![(*from, *dtype, read * elements), (*to, *dtype, written * elements)]
        }
        What::Exchange { communicator, dtype, sends, receives } => {
            let members = tape.communicators.get(communicator.0 as usize)?.ranks.len() as u32;
            if sends.iter().chain(receives).any(|m| m.member >= members) {
                return None;
            }
            sends.iter().chain(receives).map(|m| message(m, *dtype)).collect()
        }
    })
}

/// Finds commands of one device that touch the same bytes without being ordered.
fn races(tape: &Tape, flaws: &mut Vec<Flaw>) {
    let mut ranges = Ranges::default();
    for (region, id) in tape.regions.iter().zip(0u32..).filter(|(r, _)| r.lasts) {
        ranges.there(RegionId(id), region.offset..region.offset + region.bytes);
    }
    let streams = tape.streams.len();
    let mut number: Vec<u32> = Vec::with_capacity(tape.commands.len());
    let mut recorded: Vec<Vec<u32>> = vec![Vec::new(); tape.num_events as usize];
    let mut last: Vec<Vec<u32>> = vec![vec![0; streams]; streams];
    let mut before = Vec::new();
    for (command, at) in tape.commands.iter().zip(0u32..) {
        let stream = command.stream.0 as usize;
        let mut known = last[stream].clone();
        for event in &command.waits {
            known.iter_mut().zip(&recorded[event.0 as usize]).for_each(|(k, r)| *k = (*k).max(*r));
        }
        let here = At { rank: tape.rank, command: at };
        let accesses = tape.accesses(&command.what);
        if let Some(region) = overlap(tape, &command.what, &accesses) {
            flaws.push(Flaw::Overlap { at: here, content: tape.region(region).content });
        }
        for access in accesses {
            let content = tape.region(access.region).content;
            if access.writes && matches!(content, Content::Constant { .. }) {
                flaws.push(Flaw::ConstantWritten { at: here, content });
            }
            before.clear();
            match ranges.touch(&access, at, stream as u32, &mut before) {
                Found::Unwritten if !access.writes => flaws.push(Flaw::Unwritten { at: here, content }),
                Found::Other(other) if !access.writes => {
                    flaws.push(Flaw::Overwritten { at: here, content, by: tape.region(other).content });
                }
                _ => {}
            }
            let unordered = |other: &&u32| {
                let of = tape.commands[**other as usize].stream.0 as usize;
                of != stream && known[of] < number[**other as usize]
            };
            if let Some(&other) = before.iter().find(unordered) {
                flaws.push(Flaw::Race { at: here, other, content });
            }
        }
        known[stream] += 1;
        number.push(known[stream]);
        if let Some(event) = command.records {
            recorded[event.0 as usize].clone_from(&known);
        }
        last[stream] = known;
    }
}

/// A region that a command writes while it reads an overlapping one. Loop programs and all-reduces may write exactly
/// where they read, element by element.
fn overlap(tape: &Tape, what: &What, accesses: &[Access]) -> Option<RegionId> {
    let in_place = match what {
        What::Launch { .. } => true,
        What::Collective { kind, .. } => matches!(kind, CollectiveKind::AllReduce(_)),
        What::Matmul(call) => call.accumulate,
        _ => false,
    };
    let read = accesses.iter().filter(|a| !a.writes);
    let mut pairs = read.flat_map(|r| accesses.iter().filter(|a| a.writes).map(move |w| (r, w)));
    let meets = |(r, w): &(&Access, &Access)| {
        let same_start = tape.region(r.region).offset == tape.region(w.region).offset;
        r.from < w.to && w.from < r.to && !(in_place && same_start)
    };
    pairs.find(meets).map(|(_, w)| w.region)
}

/// The properties on which the members of a communicator must agree.
#[derive(PartialEq)]
enum Agreed {
    /// Includes the contents read and written, which have the same names on all devices of a program.
    Collective(CollectiveKind, DType, u64, Content, Content),
    /// Elements between each pair of members, as this one sends and receives them.
    Exchange(DType, Vec<(u32, u64)>, Vec<(u32, u64)>),
}

fn agreed(tape: &Tape, what: &What) -> Option<Agreed> {
    let list = |messages: &[Message]| messages.iter().map(|m| (m.member, m.part.elements)).collect();
    match what {
        What::Collective { kind, dtype, elements, from, to, .. } => {
            let (from, to) = (tape.region(*from).content, tape.region(*to).content);
            Some(Agreed::Collective(*kind, *dtype, *elements, from, to))
        }
        What::Exchange { dtype, sends, receives, .. } => Some(Agreed::Exchange(*dtype, list(sends), list(receives))),
        _ => None,
    }
}

fn communicator<'a>(tape: &'a Tape, what: &What) -> Option<&'a Communicator> {
    match what {
        What::Collective { communicator, .. } | What::Exchange { communicator, .. } => {
            Some(&tape.communicators[communicator.0 as usize])
        }
        _ => None,
    }
}

/// Plays all devices at once and checks that joint operations agree and that none waits forever.
fn meet(tapes: &[Tape], flaws: &mut Vec<Flaw>) {
    let mut queues: Vec<Vec<(Vec<u32>, usize)>> = Vec::with_capacity(tapes.len());
    for tape in tapes {
        let mut of_tape = vec![(Vec::new(), 0); tape.streams.len()];
        for (command, at) in tape.commands.iter().zip(0u32..) {
            of_tape[command.stream.0 as usize].0.push(at);
        }
        queues.push(of_tape);
    }
    let mut recorded: Vec<Vec<bool>> = tapes.iter().map(|t| vec![false; t.num_events as usize]).collect();
    // Streams that wait for an event, and members that have arrived at a communicator's operation.
    let mut waiting: Vec<HashMap<u32, Vec<u32>>> = vec![HashMap::new(); tapes.len()];
    let mut meeting: BTreeMap<&Communicator, Vec<(u32, u32, u32)>> = BTreeMap::new();
    let mut work: Vec<(u32, u32)> =
        tapes.iter().flat_map(|t| (0..t.streams.len() as u32).map(|s| (t.rank, s))).collect();
    let finish = |(rank, stream, at): (u32, u32, u32),
                  queues: &mut Vec<Vec<(Vec<u32>, usize)>>,
                  recorded: &mut Vec<Vec<bool>>,
                  waiting: &mut Vec<HashMap<u32, Vec<u32>>>,
                  work: &mut Vec<(u32, u32)>| {
        queues[rank as usize][stream as usize].1 += 1;
        work.push((rank, stream));
        if let Some(event) = tapes[rank as usize].commands[at as usize].records {
            recorded[rank as usize][event.0 as usize] = true;
            let freed = waiting[rank as usize].remove(&event.0).unwrap_or_default();
            work.extend(freed.into_iter().map(|s| (rank, s)));
        }
    };
    while let Some((rank, stream)) = work.pop() {
        let tape = &tapes[rank as usize];
        let (queue, done) = &queues[rank as usize][stream as usize];
        let Some(&at) = queue.get(*done) else { continue };
        let command = &tape.commands[at as usize];
        let missing = command.waits.iter().find(|e| !recorded[rank as usize][e.0 as usize]);
        if let Some(event) = missing {
            waiting[rank as usize].entry(event.0).or_default().push(stream);
            continue;
        }
        let Some(group) = communicator(tape, &command.what) else {
            finish((rank, stream, at), &mut queues, &mut recorded, &mut waiting, &mut work);
            continue;
        };
        let here = meeting.entry(group).or_default();
        if here.iter().any(|h| h.0 == rank) {
            continue;
        }
        here.push((rank, stream, at));
        if here.len() < group.ranks.len() {
            continue;
        }
        let members = std::mem::take(here);
        if let Some(flaw) = differ(tapes, group, &members) {
            flaws.push(flaw);
            return;
        }
        for member in members {
            finish(member, &mut queues, &mut recorded, &mut waiting, &mut work);
        }
    }
    for (group, here) in &meeting {
        if let Some(&(rank, _, command)) = here.first() {
            flaws.push(Flaw::Alone { at: At { rank, command }, communicator: (*group).clone() });
        }
    }
    for (tape, queues) in tapes.iter().zip(&queues) {
        if let Some(&command) = queues.iter().filter_map(|(queue, done)| queue.get(*done)).min()
            && flaws.is_empty()
        {
            flaws.push(Flaw::Stuck { at: At { rank: tape.rank, command } });
        }
    }
}

/// Finds two members of a joint operation that disagree.
fn differ(tapes: &[Tape], group: &Communicator, members: &[(u32, u32, u32)]) -> Option<Flaw> {
    let of = |member: &(u32, u32, u32)| {
        let tape = &tapes[member.0 as usize];
        let command = &tape.commands[member.2 as usize];
        let channel = matches!(tape.streams[member.1 as usize], Stream::Send(_) | Stream::Receive(_));
        let fits = channel == (group.purpose == Purpose::Channel);
        Some((At { rank: member.0, command: member.2 }, agreed(tape, &command.what).filter(|_| fits)?))
    };
    let all: Option<Vec<(At, Agreed)>> = members.iter().map(of).collect();
    let first = At { rank: members[0].0, command: members[0].2 };
    let flaw = |at: At, other: At| Some(Flaw::Differ { at, other, communicator: group.clone() });
    let Some(all) = all else { return flaw(first, first) };
    for (at, one) in &all {
        let me = group.ranks.iter().position(|r| *r == at.rank).unwrap_or(0) as u32;
        for (other_at, other) in &all {
            let them = group.ranks.iter().position(|r| *r == other_at.rank).unwrap_or(0) as u32;
            let same = match (one, other) {
                (Agreed::Exchange(dtype, sends, _), Agreed::Exchange(other, _, receives)) => {
                    let to = sends.iter().filter(|s| s.0 == them).map(|s| s.1);
                    let from = receives.iter().filter(|r| r.0 == me).map(|r| r.1);
                    dtype == other && to.eq(from)
                }
                (one, other) => one == other,
            };
            if !same {
                return flaw(*at, *other_at);
            }
        }
    }
    None
}
