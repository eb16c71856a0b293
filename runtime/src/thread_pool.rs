//! The thread pool of a device with several cores. The device runs on one of the pool's own threads.
//!
//! Starting work from outside a pool takes two to three times as long as from one of its threads. A single pool for all
//! devices would have more threads than there are cores, since each device adds one.

use rayon::ThreadPoolBuilder;

// Minimum amounts of work, by kind, for which a kernel uses several threads. Each is the work of 30 to 100 us on one
// core of 2023 (`altiplano profile`, AMD EPYC 9004). Waking a sleeping thread takes about 25 us.
/// Multiply-adds of matrix products.
pub(crate) const PRODUCTS: usize = 1 << 21;
/// Elements of a chain, times its instructions and loads.
pub(crate) const INSTRUCTIONS: usize = 1 << 19;
/// Reduced elements.
pub(crate) const REDUCED: usize = 1 << 18;
/// Elements copied, or gathered for a convolution.
pub(crate) const COPIED: usize = 1 << 17;
/// Elements of windows, and of rows that are sorted or scanned.
pub(crate) const VISITED: usize = 1 << 16;

/// Returns whether an amount of work is spread over threads: if it is at least `least`, one of the limits above.
pub(crate) fn spreads(threads: usize, work: usize, least: usize) -> bool {
    threads > 1 && work >= least
}

/// Runs a function on one thread of a pool of `threads` threads. If the system cannot start them, it runs on the global
/// pool.
pub(crate) fn with<R: Send>(threads: usize, name: &str, run: impl FnOnce() -> R + Send) -> R {
    let name = name.to_string();
    let build = || ThreadPoolBuilder::new().num_threads(threads).thread_name(move |_| name.clone()).build().ok();
    match (threads > 1).then(build).flatten() {
        Some(pool) => pool.install(run),
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
