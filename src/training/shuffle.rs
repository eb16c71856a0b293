//! The order of samples in an epoch: a permutation of any length, computed from a seed without storing it.

/// A bijection of `0..count`: a Feistel network over the smallest power of four that covers it, iterated until it hits
/// the range (cycle walking, Black & Rogaway 2002).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Permutation {
    count: u64,
    half_bits: u32,
    key: u64,
}

const ROUNDS: u64 = 6;

impl Permutation {
    /// The order of epoch `epoch` under a seed.
    pub(crate) fn new(count: u64, seed: u64, epoch: u64) -> Permutation {
        let bits = u64::BITS - count.saturating_sub(1).leading_zeros();
        Permutation { count, half_bits: bits.div_ceil(2).max(1), key: mixed(mixed(seed) ^ epoch) }
    }

    /// The sample at position `place`, which must be below the count.
    pub(crate) fn at(&self, place: u64) -> u64 {
        debug_assert!(place < self.count, "{place} of {}", self.count);
        let mut at = self.once(place);
        // Positions outside the range lie on cycles that return to it, after fewer than four iterations on average.
        while at >= self.count {
            at = self.once(at);
        }
        at
    }

    fn once(&self, value: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ mixed(self.key ^ right ^ round << 56) & mask);
        }
        left << self.half_bits | right
    }
}

/// SplitMix64's finaliser (Steele et al. 2014), after one increment.
fn mixed(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sample_comes_once() {
        for count in (1..70).chain([255, 256, 257, 1000, 4096, 10_007]) {
            for (seed, epoch) in [(0, 0), (0, 1), (7, 0), (u64::MAX, 3)] {
                let order = Permutation::new(count, seed, epoch);
                let mut seen = vec![false; count as usize];
                for place in 0..count {
                    assert!(!std::mem::replace(&mut seen[order.at(place) as usize], true), "{count} {seed} {epoch}");
                }
            }
        }
    }

    #[test]
    fn orders_are_far_from_each_other_and_from_none() {
        let count = 10_000;
        let order = |seed, epoch| {
            let order = Permutation::new(count, seed, epoch);
            (0..count).map(move |place| order.at(place)).collect::<Vec<_>>()
        };
        let (first, second, other) = (order(1, 0), order(1, 1), order(2, 0));
        let as_they_come: Vec<u64> = (0..count).collect();
        let same = |a: &[u64], b: &[u64]| a.iter().zip(b).filter(|(x, y)| x == y).count();
        // Two random orders agree in one position on average.
        for (a, b) in [(&first, &second), (&first, &other), (&first, &as_they_come), (&second, &other)] {
            assert!(same(a, b) < 10);
        }
        assert_eq!(first, order(1, 0));
        // The mean distance between consecutive samples is a third of the count.
        let apart: u64 = first.windows(2).map(|pair| pair[0].abs_diff(pair[1])).sum();
        let mean = apart as f64 / (count - 1) as f64 / count as f64;
        assert!((mean - 1.0 / 3.0).abs() < 0.02, "{mean}");
    }

    #[test]
    fn large_counts_need_no_memory() {
        let order = Permutation::new(u64::MAX / 3, 5, 0);
        let places: std::collections::BTreeSet<u64> = (0..1000).map(|place| order.at(place)).collect();
        assert_eq!(places.len(), 1000);
    }
}
