//! Deals blocks of devices out to trials over time.
//!
//! A trial may take any block of some sizes, each at its own duration, and keeps its block until it is done. The packing
//! starts from allotments in which no trial takes longer than some deadline, and moves trials between sizes as long as
//! the last ones end earlier. Larger blocks are placed first, and of equal ones the longest trial.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Trials with the same durations.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    pub count: usize,
    /// Seconds of one trial on a block of each size; absent if it does not run there. At least one is present.
    pub seconds: Vec<Option<f64>>,
}

/// A trial on a block of devices.
#[derive(Clone, Debug, PartialEq)]
pub struct Placed {
    pub series: usize,
    /// The index of the block's size.
    pub size: usize,
    /// The first device of the block.
    pub first_device: usize,
    pub start_s: f64,
    pub end_s: f64,
}

/// How many trials of each series take blocks of each size.
type Allotment = Vec<Vec<usize>>;

/// Allotments from which the search goes on.
const STARTS: usize = 4;

/// Placements of single trials and devices, over all allotments that are tried.
const EFFORT: usize = 5_000_000;

/// Places trials on blocks of `sizes`, each of which divides `devices`, so that the last one ends early.
pub fn pack(sizes: &[usize], devices: usize, series: &[Series]) -> Vec<Placed> {
    let place = |allotment: &Allotment| placed(sizes, devices, series, allotment);
    let mut starts: Vec<(Ends, Allotment)> = deadlines(series)
        .into_iter()
        .map(|deadline_s| within(sizes, series, deadline_s))
        .map(|allotment| (Ends::of(&place(&allotment)), allotment))
        .collect();
    starts.sort_by(|a, b| a.0.last_s.total_cmp(&b.0.last_s));
    starts.dedup_by(|a, b| a.1 == b.1);
    starts.truncate(STARTS);
    let trials: usize = series.iter().map(|of| of.count).sum();
    let mut tries = EFFORT / (trials + devices) / starts.len().max(1);
    let improved = starts.into_iter().map(|(mut ends, mut allotment)| {
        let mut improves = true;
        while improves && tries > 0 {
            improves = false;
            for moved in moves(series, &allotment) {
                tries = tries.saturating_sub(1);
                let of_moved = Ends::of(&place(&moved));
                if of_moved.are_before(&ends) {
                    (ends, allotment, improves) = (of_moved, moved, true);
                    break;
                }
            }
        }
        (ends, allotment)
    });
    let best = improved.min_by(|a, b| a.0.last_s.total_cmp(&b.0.last_s));
    best.map(|(_, allotment)| place(&allotment)).unwrap_or_default()
}

/// The end of the last trial, and how many trials end then.
struct Ends {
    last_s: f64,
    count: usize,
}

impl Ends {
    fn of(placed: &[Placed]) -> Ends {
        let last_s = end_s(placed);
        Ends { last_s, count: placed.iter().filter(|trial| trial.end_s >= last_s * (1.0 - 1e-9)).count() }
    }

    fn are_before(&self, other: &Ends) -> bool {
        match self.last_s < other.last_s * (1.0 - 1e-9) {
            true => true,
            false => self.last_s <= other.last_s * (1.0 + 1e-9) && self.count < other.count,
        }
    }
}

/// No packing is done earlier: each trial takes its shortest time at least, and devices are busy for the least
/// device-seconds of all trials.
pub fn lower_bound_s(sizes: &[usize], devices: usize, series: &[Series]) -> f64 {
    let known = |of: &Series| -> Vec<(usize, f64)> {
        sizes.iter().zip(&of.seconds).filter_map(|(&size, seconds)| Some((size, (*seconds)?))).collect()
    };
    let least = |all: &mut dyn Iterator<Item = f64>| all.fold(f64::INFINITY, f64::min);
    let longest_s = series.iter().map(|of| least(&mut known(of).into_iter().map(|(_, seconds)| seconds)));
    let device_s: f64 = series
        .iter()
        .map(|of| of.count as f64 * least(&mut known(of).into_iter().map(|(size, seconds)| size as f64 * seconds)))
        .sum();
    longest_s.fold(device_s / devices as f64, f64::max)
}

/// The end of the last trial.
pub fn end_s(placed: &[Placed]) -> f64 {
    placed.iter().map(|trial| trial.end_s).fold(0.0, f64::max)
}

/// The durations of all trials on all sizes.
fn deadlines(series: &[Series]) -> Vec<f64> {
    let mut all: Vec<f64> = series.iter().flat_map(|of| of.seconds.iter().copied().flatten()).collect();
    all.sort_by(f64::total_cmp);
    all.dedup();
    all
}

/// Each trial on the block with the fewest device-seconds among those on which it takes no longer than a deadline, or on
/// the fastest.
fn within(sizes: &[usize], series: &[Series], deadline_s: f64) -> Allotment {
    let of = |of: &Series| {
        let known = || of.seconds.iter().enumerate().filter_map(|(size, seconds)| Some((size, (*seconds)?)));
        let device_s = |(size, seconds): &(usize, f64)| sizes[*size] as f64 * seconds;
        let fitting = known().filter(|(_, seconds)| *seconds <= deadline_s);
        let chosen = fitting
            .min_by(|a, b| device_s(a).total_cmp(&device_s(b)))
            .or_else(|| known().min_by(|a, b| a.1.total_cmp(&b.1)));
        let mut counts = vec![0; sizes.len()];
        chosen.into_iter().for_each(|(size, _)| counts[size] = of.count);
        counts
    };
    series.iter().map(of).collect()
}

/// The allotments in which one, two, four and so on trials of a series take another size.
fn moves(series: &[Series], allotment: &Allotment) -> Vec<Allotment> {
    let mut all = Vec::new();
    for (s, counts) in allotment.iter().enumerate() {
        for (from, &there) in counts.iter().enumerate() {
            for to in (0..counts.len()).filter(|&to| to != from && series[s].seconds[to].is_some()) {
                let several = (0..usize::BITS).map(|bit| 1usize << bit).take_while(|&several| several < there);
                for moved in several.chain((there > 0).then_some(there)) {
                    let mut other = allotment.clone();
                    other[s][from] -= moved;
                    other[s][to] += moved;
                    all.push(other);
                }
            }
        }
    }
    all
}

/// Places an allotment: larger blocks first, of equal ones the longest trial, each on the block that is free first.
fn placed(sizes: &[usize], devices: usize, series: &[Series], allotment: &Allotment) -> Vec<Placed> {
    let mut free_s = vec![0.0f64; devices];
    let mut largest_first: Vec<usize> = (0..sizes.len()).collect();
    largest_first.sort_by_key(|&size| Reverse(sizes[size]));
    let mut all = Vec::new();
    for size in largest_first {
        let of_series =
            |s: usize| series[s].seconds[size].filter(|_| allotment[s][size] > 0).map(|seconds| (s, seconds));
        let mut waiting: Vec<(usize, f64)> = (0..series.len()).filter_map(of_series).collect();
        if waiting.is_empty() {
            continue;
        }
        waiting.sort_by(|a, b| b.1.total_cmp(&a.1));
        let blocks = free_s.chunks(sizes[size]).map(|block| block.iter().copied().fold(0.0, f64::max));
        // Seconds are not negative, so that their bits have their order.
        let mut heap: BinaryHeap<Reverse<(u64, usize)>> =
            blocks.enumerate().map(|(block, free_s)| Reverse((free_s.to_bits(), block))).collect();
        for (s, seconds) in waiting {
            for _ in 0..allotment[s][size] {
                let Some(Reverse((bits, block))) = heap.pop() else { continue };
                let start_s = f64::from_bits(bits);
                let (end_s, first_device) = (start_s + seconds, block * sizes[size]);
                heap.push(Reverse((end_s.to_bits(), block)));
                free_s[first_device..first_device + sizes[size]].fill(end_s);
                all.push(Placed { series: s, size, first_device, start_s, end_s });
            }
        }
    }
    all
}
