//! Chooses the events that commands wait for. They are as few as keep any two commands ordered that touch the same
//! bytes, one of them writing.
//!
//! A vector clock gives, for each stream, the last command that is done before a command. A command waits for another
//! stream only if neither its own stream nor its other waits imply that order.

use super::ranges::Ranges;
use super::{EventId, RegionId, Tape};

/// Fills in the waits and events of a tape whose regions are placed.
pub(crate) fn add(tape: &mut Tape) {
    let mut ranges = Ranges::default();
    for (region, id) in tape.regions.iter().zip(0u32..).filter(|(r, _)| r.lasts) {
        ranges.there(RegionId(id), region.offset..region.offset + region.bytes);
    }
    let streams = tape.streams.len();
    // The position of each command in its stream, from 1, and its vector clock.
    let mut number: Vec<u32> = Vec::with_capacity(tape.commands.len());
    let mut done: Vec<Vec<u32>> = Vec::with_capacity(tape.commands.len());
    let mut last: Vec<Vec<u32>> = vec![vec![0; streams]; streams];
    let mut waits: Vec<Vec<u32>> = Vec::with_capacity(tape.commands.len());
    let mut before = Vec::new();
    for (at, command) in tape.commands.iter().enumerate() {
        before.clear();
        let stream = command.stream.0;
        for access in tape.accesses(&command.what) {
            ranges.touch(&access, at as u32, stream, &mut before);
        }
        before.sort_unstable_by(|a, b| b.cmp(a));
        before.dedup();
        let mut known = last[stream as usize].clone();
        let mut needed = Vec::new();
        for &b in &before {
            let of = tape.commands[b as usize].stream.0 as usize;
            if of != stream as usize && known[of] < number[b as usize] {
                needed.push(b);
                known.iter_mut().zip(&done[b as usize]).for_each(|(k, d)| *k = (*k).max(*d));
            }
        }
        known[stream as usize] += 1;
        number.push(known[stream as usize]);
        last[stream as usize] = known.clone();
        done.push(known);
        waits.push(needed);
    }
    let mut events: Vec<Option<EventId>> = vec![None; tape.commands.len()];
    for (at, needed) in waits.into_iter().enumerate() {
        for b in needed {
            let event = *events[b as usize].get_or_insert_with(|| {
                tape.num_events += 1;
                EventId(tape.num_events - 1)
            });
            tape.commands[b as usize].records = Some(event);
            tape.commands[at].waits.push(event);
        }
    }
}
