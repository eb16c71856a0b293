//! Measures the inner loops of this runtime on this machine: the families of terms of [`crate::work`], each over a grid
//! of sizes.
//!
//! Every point is warmed up and run several times in batches. Time in which another program had the core of a ready
//! thread is subtracted, if the system reports it. The median of the remaining times counts, and samples far above it
//! are counted as outliers.
//!
//! Operands rotate among several copies, so that those of medium size are not always in the L1 cache, as they are not
//! in a step. Short products and convolutions are timed one by one between other kernels, as in a step. A core that has
//! just run the same kernel has trained branch predictors and a warm instruction cache.
//!
//! The cost that a family adds to a larger loop (an instruction to a chain) is a difference of two measurements.

mod chains;
pub mod gpu;
mod kernels;
pub(crate) mod network;
mod steps;

use crate::error::RuntimeError;
use crate::thread_pool;
use altiplano_ir::dtype::DType;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Options of a measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Cores of the machine, shared by its devices.
    pub cores: usize,
    /// Measure fewer and smaller sizes: seconds instead of a minute, with less precision.
    pub quick: bool,
}

/// Times of one family over a grid of sizes, row major.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    pub family: &'static str,
    pub dtype: DType,
    /// Threads of each run, and threads of all concurrent runs.
    pub threads: usize,
    pub load: usize,
    pub axes: Vec<Vec<f64>>,
    pub seconds: Vec<f64>,
}

/// All measurements.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Measurements {
    pub measured: Vec<Measured>,
    /// For numbers of threads beyond the cores, the slowdown of each thread relative to one per core.
    pub slower_shared: Vec<(u32, f64)>,
    pub samples: u64,
    /// Samples of more than twice the median of their point, and the largest, in medians.
    pub outliers: u64,
    pub largest: f64,
}

/// A measured function, run repeatedly.
type Run = Box<dyn FnMut()>;

/// Runs shorter than this are timed between others.
const SHORT_S: f64 = 2e-5;

/// Maximum number of such runs in a sample.
const BETWEEN: u32 = 51;

/// Lower limit on a difference of two measurements, which noise may make negative.
const LEAST_S: f64 = 1e-10;

/// Measures with one thread, with one per core, and with more. `tell` receives the current measurement and the
/// progress.
///
/// # Errors
/// Fails if the system cannot start threads for devices.
pub fn measure(
    options: &Options,
    tell: &mut (dyn FnMut(&str, usize, usize) + Send),
) -> Result<Measurements, RuntimeError> {
    let cores = options.cores.max(1);
    // The pool of a device that has all cores.
    thread_pool::with(cores, "measuring", || measure_here(options.quick, cores, tell))
}

fn measure_here(
    quick: bool,
    cores: usize,
    tell: &mut dyn FnMut(&str, usize, usize),
) -> Result<Measurements, RuntimeError> {
    let mut loads = vec![1, cores];
    loads.dedup();
    let mut harness = Harness::new(quick);
    let total = 4 * loads.len() + 3;
    let mut done = 0;
    let mut next = |what: &str| {
        tell(what, done, total);
        done += 1;
    };
    for &load in &loads {
        harness.load = load;
        next("elementwise loops");
        chains::measure(&mut harness);
        next("copies, reductions, lookups and windows");
        kernels::measure(&mut harness, cores);
        next("matrix products");
        kernels::products(&mut harness, 1);
        if load == 1 && cores > 1 {
            next("matrix products of all cores");
            kernels::products(&mut harness, cores);
        }
    }
    next("collectives");
    network::measure(&mut harness, cores);
    next("calls of kernels, and steps");
    steps::measure(&mut harness, &loads)?;
    next("more threads than cores");
    harness.found.slower_shared = network::slower_shared(&harness, cores);
    Ok(harness.found)
}

pub(crate) struct Harness {
    pub quick: bool,
    /// Threads that run each point at once.
    pub load: usize,
    pub found: Measurements,
    /// Kernels that run between short runs.
    others: Vec<Run>,
    /// Seconds for a reading of the clock.
    clock_s: f64,
}

impl Harness {
    pub(crate) fn new(quick: bool) -> Harness {
        let clock_s = (0..1000).map(|_| Instant::now().elapsed().as_secs_f64()).fold(f64::INFINITY, f64::min);
        Harness { quick, load: 1, found: Measurements::default(), others: kernels::of_a_step(), clock_s }
    }

    fn add(&mut self, family: &'static str, dtype: DType, sizes: &[f64], seconds: Vec<f64>) {
        self.grid(family, dtype, 1, vec![sizes.to_vec()], seconds);
    }

    pub(crate) fn grid(
        &mut self,
        family: &'static str,
        dtype: DType,
        threads: usize,
        axes: Vec<Vec<f64>>,
        seconds: Vec<f64>,
    ) {
        let load = self.load.max(threads);
        let seconds = seconds.into_iter().map(|s| s.max(LEAST_S)).collect();
        self.found.measured.push(Measured { family, dtype, threads, load, axes, seconds });
    }

    /// The sizes of a series; fewer in quick mode.
    fn sizes(&self, all: &[usize]) -> Vec<usize> {
        if self.quick { all.iter().copied().filter(|&n| n <= 1 << 16).take(3).collect() } else { all.to_vec() }
    }

    /// Seconds of a run that `make` prepares, separately for each thread.
    fn time(&mut self, make: &(dyn Fn() -> Run + Sync)) -> f64 {
        self.timed(make, false)
    }

    /// The same with other kernels between short runs.
    fn time_among_others(&mut self, make: &(dyn Fn() -> Run + Sync)) -> f64 {
        self.timed(make, true)
    }

    fn timed(&mut self, make: &(dyn Fn() -> Run + Sync), among_others: bool) -> f64 {
        let (batch_s, samples) = if self.quick { (5e-5, 3) } else { (2e-4, 7) };
        let (stop, ready) = (AtomicBool::new(false), Barrier::new(self.load));
        let mut taken: Vec<f64> = Vec::new();
        std::thread::scope(|scope| {
            for _ in 1..self.load {
                scope.spawn(|| {
                    let mut run = make();
                    run();
                    ready.wait();
                    while !stop.load(Ordering::Relaxed) {
                        run();
                    }
                });
            }
            let mut run = make();
            run();
            ready.wait();
            let once = Watch::start();
            run();
            let once_s = once.seconds();
            // Each long run is a sample, and few suffice.
            let batch = (batch_s / once_s.max(1e-9)).clamp(1.0, 1e5) as u32;
            let samples = if once_s > 0.05 {
                2
            } else if once_s > 0.005 {
                3
            } else {
                samples
            };
            if batch == 1 {
                taken.push(once_s);
            }
            let among_others = among_others && once_s < SHORT_S;
            let batch = if among_others { batch.min(BETWEEN) } else { batch };
            while among_others && taken.len() < samples {
                let mut one = || {
                    self.others.iter_mut().for_each(|other| other());
                    let start = Instant::now();
                    run();
                    start.elapsed().as_secs_f64()
                };
                let mut each: Vec<f64> = (0..batch).map(|_| one()).collect();
                each.sort_by(f64::total_cmp);
                taken.push((each[each.len() / 2] - self.clock_s).max(LEAST_S));
            }
            while taken.len() < samples {
                let watch = Watch::start();
                (0..batch).for_each(|_| run());
                taken.push(watch.seconds() / f64::from(batch));
            }
            stop.store(true, Ordering::Relaxed);
        });
        self.median(taken)
    }

    /// The median of a point's samples; also counts outliers.
    pub(crate) fn median(&mut self, mut taken: Vec<f64>) -> f64 {
        taken.sort_by(f64::total_cmp);
        let median = taken[(taken.len() - 1) / 2];
        self.found.samples += taken.len() as u64;
        for ratio in taken.iter().map(|t| t / median).filter(|r| *r > 2.0) {
            self.found.outliers += 1;
            self.found.largest = self.found.largest.max(ratio);
        }
        median
    }
}

/// Wall-clock time, less the time in which this thread was ready but not running.
struct Watch {
    start: Instant,
    kept_s: f64,
}

impl Watch {
    fn start() -> Watch {
        let kept_s = of_this_thread().map_or(0.0, |t| t.1);
        Watch { start: Instant::now(), kept_s }
    }

    fn seconds(&self) -> f64 {
        let elapsed_s = self.start.elapsed().as_secs_f64();
        let kept_s = of_this_thread().map_or(0.0, |t| t.1) - self.kept_s;
        // Both clocks are read at slightly different times.
        (elapsed_s - kept_s).max(elapsed_s / 100.0)
    }
}

/// Seconds that this thread has run, and seconds that it was ready but not running, if Linux reports them.
fn of_this_thread() -> Option<(f64, f64)> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    let mut fields = text.split_whitespace().map(|f| f.parse::<u64>().ok());
    Some((fields.next()?? as f64 * 1e-9, fields.next()?? as f64 * 1e-9))
}

fn floats(axis: &[usize], each: f64) -> Vec<f64> {
    axis.iter().map(|&n| n as f64 * each).collect()
}

/// Copies of a value, used in rotation.
struct Ring<T> {
    all: Vec<T>,
    next: usize,
}

/// Approximate size of all copies in a ring: more than a core's private caches, less than the shared one.
const RING_BYTES: usize = 8 << 20;

impl<T> Ring<T> {
    /// Makes a ring of copies of `bytes` bytes each.
    fn new(bytes: usize, make: impl Fn() -> T) -> Ring<T> {
        Ring::of(RING_BYTES, bytes, make)
    }

    /// Makes a ring of about `all_bytes` bytes in total.
    fn of(all_bytes: usize, bytes: usize, make: impl FnMut() -> T) -> Ring<T> {
        let count = (all_bytes / bytes.max(1)).clamp(1, 32);
        Ring { all: std::iter::repeat_with(make).take(count).collect(), next: 0 }
    }

    fn next(&mut self) -> &mut T {
        self.next = (self.next + 1) % self.all.len();
        &mut self.all[self.next]
    }
}
