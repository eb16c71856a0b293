//! The threads of a device that has several cores: a pool of its own, and the device is on one of them. Setting threads of a pool to work from
//! outside takes two to three times as long as from a thread of the pool, and devices that each add a thread to one pool of all cores
//! have more threads than there are cores.

use rayon::ThreadPoolBuilder;

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

/// Whether work of which there is so much is spread over threads: where it is at least one of the above.
pub fn spreads(threads: usize, work: usize, least: usize) -> bool {
    threads > 1 && work >= least
}

/// Runs something on one of so many threads, all of which it sets to work where it spreads work. Where the system gives no threads for
/// that, those that the whole process has are set to work.
pub fn with<R: Send>(threads: usize, name: &str, run: impl FnOnce() -> R + Send) -> R {
    let name = name.to_string();
    let build = || ThreadPoolBuilder::new().num_threads(threads).thread_name(move |_| name.clone()).build().ok();
    match (threads > 1).then(build).flatten() {
        Some(team) => team.install(run),
        None => run(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rayon::prelude::*;

    #[test]
    fn it_runs_on_one_of_them() {
        let of_pool = with(3, "worker", || {
            let sum: usize = (0..1000usize).into_par_iter().sum();
            (rayon::current_num_threads(), rayon::current_thread_index().is_some(), sum)
        });
        assert_eq!(of_pool, (3, true, 499_500));
        assert!(with(1, "worker", rayon::current_thread_index).is_none());
    }
}
