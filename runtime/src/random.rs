//! Counter-based random numbers. The number at a position depends on seed, name and position only. So a tensor is the
//! same whatever else is drawn, in any order, on any number of threads.

use rayon::prelude::*;

/// A stream of random numbers of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    key: u64,
}

/// The finaliser of splitmix64 (Steele et al. 2014): every bit of the argument flips each bit of the result with
/// probability one half.
fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

impl Stream {
    pub fn new(seed: u64, name: &str) -> Stream {
        let name = name.bytes().fold(0xcbf2_9ce4_8422_2325, |h: u64, b| (h ^ b as u64).wrapping_mul(0x0100_0000_01b3));
        Stream { key: mix(seed.wrapping_mul(GOLDEN) ^ mix(name)) }
    }

    /// 64 random bits at a position.
    pub fn bits(self, position: u64) -> u64 {
        mix(self.key ^ mix(position.wrapping_add(1).wrapping_mul(GOLDEN)))
    }

    /// An integer in `[0, bound)`, or 0 where `bound` is 0.
    pub fn below(self, position: u64, bound: u64) -> u64 {
        ((self.bits(position) as u128 * bound as u128) >> 64) as u64
    }

    /// Two independent standard normals (Box & Muller 1958).
    fn normal_pair(self, pair: u64) -> [f64; 2] {
        let unit = |bits: u64| ((bits >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        let radius = (-2.0 * unit(self.bits(2 * pair)).ln()).sqrt();
        let (sine, cosine) = (std::f64::consts::TAU * unit(self.bits(2 * pair + 1))).sin_cos();
        [radius * cosine, radius * sine]
    }

    /// The first `n` normals with this standard deviation.
    pub(crate) fn normals(self, n: usize, deviation: f64) -> Vec<f32> {
        const CHUNK: usize = 1 << 12;
        let mut values = vec![0.0f32; n];
        values.par_chunks_mut(CHUNK).enumerate().for_each(|(c, chunk)| {
            for (i, two) in chunk.chunks_mut(2).enumerate() {
                let pair = self.normal_pair((c * CHUNK / 2 + i) as u64);
                two.iter_mut().zip(pair).for_each(|(v, x)| *v = (x * deviation) as f32);
            }
        });
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normals_have_their_moments_and_do_not_depend_on_length() {
        let stream = Stream::new(3, "w");
        let values = stream.normals(100_001, 2.0);
        let mean = values.iter().map(|&x| x as f64).sum::<f64>() / values.len() as f64;
        let square = values.iter().map(|&x| (x as f64).powi(2)).sum::<f64>() / values.len() as f64;
        let fourth = values.iter().map(|&x| (x as f64).powi(4)).sum::<f64>() / values.len() as f64;
        assert!(mean.abs() < 0.03, "{mean}");
        assert!((square - 4.0).abs() < 0.08, "{square}");
        assert!((fourth - 48.0).abs() < 3.0, "{fourth}");
        assert_eq!(stream.normals(5000, 2.0), values[..5000]);
        assert_ne!(Stream::new(4, "w").normals(10, 2.0), values[..10]);
        assert_ne!(Stream::new(3, "v").normals(10, 2.0), values[..10]);
    }

    #[test]
    fn integers_fill_their_range_evenly() {
        let stream = Stream::new(1, "tokens");
        let mut counts = [0; 10];
        (0..10_000).for_each(|i| counts[stream.below(i, 10) as usize] += 1);
        assert!(counts.iter().all(|&c| (850..1150).contains(&c)), "{counts:?}");
        assert_eq!(stream.below(5, 0), 0);
    }
}
