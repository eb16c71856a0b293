//! The threads of a device that has several cores: a pool of its own, in which the device's thread is the first. Setting threads of a
//! pool to work from outside takes two to three times as long as from a thread of the pool, and a pool that devices share has more
//! threads than cores once several of them want it.

use rayon::{ThreadPool, ThreadPoolBuilder};

// What of each kind of work a kernel has at least where it is spread over threads: what one thread of a core of 2023 takes 30 to 100 us
// for (`altiplano profile`, AMD EPYC 9004). Threads that sleep take about 25 us until they work.
/// Multiplications with an addition each, of matrix products.
pub const PRODUCTS: usize = 1 << 21;
/// Elements times instructions and loads of a chain.
pub const INSTRUCTIONS: usize = 1 << 19;
/// Elements that are reduced.
pub const REDUCED: usize = 1 << 18;
/// Elements that are copied, or gathered for a convolution.
pub const COPIED: usize = 1 << 17;
/// Elements of windows, and of rows that are sorted or added up.
pub const VISITED: usize = 1 << 16;

/// A pool of so many threads with the calling one as the first, until it is dropped. Without one, a device uses the pool that the whole
/// process has.
pub fn of_this_thread(threads: usize) -> Option<ThreadPool> {
    let build = || ThreadPoolBuilder::new().num_threads(threads).use_current_thread().build().ok();
    if threads > 1 { build() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rayon::prelude::*;

    #[test]
    fn the_calling_thread_is_one_of_them() {
        let of_pool = std::thread::spawn(|| {
            let _team = of_this_thread(3);
            let sum: usize = (0..1000usize).into_par_iter().sum();
            (rayon::current_num_threads(), rayon::current_thread_index(), sum)
        });
        assert_eq!(of_pool.join().expect("it ends"), (3, Some(0), 499_500));
        assert!(of_this_thread(1).is_none());
    }
}
