//! Assigns tensors to offsets in the arena, so that it is little larger than the peak of the live bytes.
//!
//! Lifetimes are known, so this is dynamic storage allocation: packing intervals in time into as few bytes as possible.
//! Several greedy heuristics are tried, and the best result is taken.

use super::Arena;
use altiplano_ir::storage::block_bytes;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// A tensor to be placed, live from the command `born` to before the command `dies`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    pub bytes: u64,
    pub born: u32,
    pub dies: u32,
    pub lasts: bool,
    /// True if it is in host memory.
    pub host: bool,
}

/// Limit on the slots placed by `in_turn`, whose time is quadratic.
const MAX_BY_SIZE: usize = 20_000;

/// Limits on the pairs of slots examined in all rounds of one order, and on the rounds.
const MAX_PLACED: usize = 40_000_000;
const MAX_ROUNDS: usize = 50;

/// Returns the offset of each slot. Host slots come after all device slots.
pub fn place(slots: &[Slot]) -> (Vec<u64>, Arena) {
    let mut offsets = vec![0; slots.len()];
    let own = place_in(slots, false, 0, &mut offsets);
    let host = place_in(slots, true, own.bytes, &mut offsets);
    (offsets, Arena { host_bytes: host.bytes, ..own })
}

/// Places the slots of one memory from offset `first` on, and returns the size of that memory.
fn place_in(slots: &[Slot], host: bool, first: u64, offsets: &mut [u64]) -> Arena {
    let mut lasting_bytes = 0;
    for (slot, offset) in slots.iter().zip(offsets.iter_mut()).filter(|(s, _)| s.lasts && s.host == host) {
        *offset = first + lasting_bytes;
        lasting_bytes += block_bytes(slot.bytes);
    }
    let of_step: Vec<usize> =
        (0..slots.len()).filter(|&i| !slots[i].lasts && slots[i].host == host && slots[i].bytes > 0).collect();
    let live_bytes = lasting_bytes + most_live(slots, &of_step);
    let end_of = |placed: &[u64], k: usize| placed[k] + block_bytes(slots[of_step[k]].bytes);
    let end = |placed: &Vec<u64>| (0..of_step.len()).map(|k| end_of(placed, k)).max().unwrap_or(0);
    let mut tried = vec![best_fit(slots, &of_step)];
    if of_step.len() <= MAX_BY_SIZE {
        let life = |k: usize| (slots[of_step[k]].dies - slots[of_step[k]].born) as u64;
        let bytes = |k: usize| slots[of_step[k]].bytes;
        let keys: [&dyn Fn(usize) -> u64; 3] = [&bytes, &life, &|k| bytes(k).saturating_mul(life(k))];
        for key in keys {
            let mut order: Vec<usize> = (0..of_step.len()).collect();
            order.sort_by_key(|&k| (Reverse(key(k)), Reverse(bytes(k)), k));
            // The slot that ends highest goes first in the next round.
            for _ in 0..(MAX_PLACED / of_step.len().pow(2).max(1)).clamp(1, MAX_ROUNDS) {
                tried.push(in_turn(slots, &of_step, &order));
                let placed = &tried[tried.len() - 1];
                let Some(at) = (0..order.len()).max_by_key(|&at| end_of(placed, order[at])) else { break };
                if lasting_bytes + end_of(placed, order[at]) <= live_bytes {
                    break;
                }
                order[..=at].rotate_right(1);
            }
        }
    }
    let best = tried.into_iter().min_by_key(end).unwrap_or_default();
    let bytes = lasting_bytes + end(&best);
    of_step.iter().zip(best).for_each(|(&i, at)| offsets[i] = first + lasting_bytes + at);
    Arena { bytes, lasting_bytes, live_bytes, host_bytes: 0 }
}

/// Peak of the live bytes of these slots.
fn most_live(slots: &[Slot], which: &[usize]) -> u64 {
    let mut changes: BTreeMap<u32, i64> = BTreeMap::new();
    for &i in which {
        let bytes = block_bytes(slots[i].bytes) as i64;
        *changes.entry(slots[i].born).or_default() += bytes;
        *changes.entry(slots[i].dies).or_default() -= bytes;
    }
    let sums = changes.values().scan(0i64, |sum, change| {
        *sum += change;
        Some(*sum)
    });
    sums.max().unwrap_or(0).max(0) as u64
}

/// Best fit: places slots in order of birth, each in the smallest hole that fits.
fn best_fit(slots: &[Slot], which: &[usize]) -> Vec<u64> {
    let mut order: Vec<usize> = (0..which.len()).collect();
    order.sort_by_key(|&k| (slots[which[k]].born, Reverse(slots[which[k]].bytes), k));
    let mut dying: BTreeMap<(u32, usize), ()> = BTreeMap::new();
    let (mut placed, mut holes, mut end) = (vec![0; which.len()], BTreeMap::<u64, u64>::new(), 0u64);
    for k in order {
        let slot = slots[which[k]];
        while let Some((&(dies, dead), ())) = dying.first_key_value().filter(|((dies, _), ())| *dies <= slot.born) {
            dying.remove(&(dies, dead));
            let (mut from, mut to) = (placed[dead], placed[dead] + block_bytes(slots[which[dead]].bytes));
            if let Some((&before, &until)) = holes.range(..from).next_back().filter(|(_, until)| **until == from) {
                holes.remove(&before);
                from = before;
                debug_assert!(until <= to);
            }
            if let Some(until) = holes.remove(&to) {
                to = until;
            }
            holes.insert(from, to);
        }
        let bytes = block_bytes(slot.bytes);
        let fits = holes.iter().filter(|(from, to)| **to - **from >= bytes).min_by_key(|(from, to)| **to - **from);
        let at = match fits.map(|(&from, &to)| (from, to)) {
            Some((from, to)) => {
                holes.remove(&from);
                if from + bytes < to {
                    holes.insert(from + bytes, to);
                }
                from
            }
            // The last hole grows if it reaches the end.
            None => {
                let last = holes.last_key_value().filter(|(_, to)| **to == end).map(|(&from, _)| from);
                last.inspect(|from| {
                    holes.remove(from);
                });
                let at = last.unwrap_or(end);
                end = at + bytes;
                at
            }
        };
        placed[k] = at;
        dying.insert((slot.dies, k), ());
    }
    placed
}

/// First fit: places slots in the given order, each at the lowest offset that is free during its lifetime.
fn in_turn(slots: &[Slot], which: &[usize], order: &[usize]) -> Vec<u64> {
    let mut placed = vec![0; which.len()];
    // Placed slots by offset.
    let mut there: Vec<(u64, u64, u32, u32)> = Vec::with_capacity(which.len());
    for &k in order {
        let Slot { bytes, born, dies, .. } = slots[which[k]];
        let bytes = block_bytes(bytes);
        let mut at = 0;
        for &(from, to, other_born, other_dies) in &there {
            if from >= at + bytes {
                break;
            }
            if other_born < dies && born < other_dies {
                at = at.max(to);
            }
        }
        placed[k] = at;
        let position = there.partition_point(|t| t.0 < at);
        there.insert(position, (at, at + bytes, born, dies));
    }
    placed
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Slots that are live at the same time do not overlap, and all lie in the arena.
        #[test]
        fn slots_that_live_at_once_lie_apart(made in proptest::collection::vec((1u64..5000, 0u32..50, 1u32..30), 1..60)) {
            let slot = |&(bytes, born, life): &(u64, u32, u32)| {
                Slot { bytes, born, dies: born + life, lasts: born % 10 == 7, host: bytes % 3 == 0 }
            };
            let slots: Vec<Slot> = made.iter().map(slot).collect();
            let (offsets, arena) = place(&slots);
            prop_assert!(arena.live_bytes <= arena.bytes && arena.lasting_bytes <= arena.live_bytes);
            for (i, a) in slots.iter().enumerate() {
                let end = if a.host { arena.all_bytes() } else { arena.bytes };
                prop_assert!(offsets[i] + a.bytes <= end && offsets[i] % 512 == 0);
                prop_assert!((a.lasts && !a.host) == (offsets[i] < arena.lasting_bytes));
                prop_assert!(a.host == (offsets[i] >= arena.bytes));
                for (j, b) in slots.iter().enumerate().skip(i + 1) {
                    let together = a.lasts || b.lasts || a.born < b.dies && b.born < a.dies;
                    let apart = offsets[i] + a.bytes <= offsets[j] || offsets[j] + b.bytes <= offsets[i];
                    prop_assert!(!together || apart, "{a:?} at {} and {b:?} at {}", offsets[i], offsets[j]);
                }
            }
        }
    }
}
