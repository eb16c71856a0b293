//! How long an all-reduce among the workers of one process takes, beside what this machine's memory allows.
//!
//! An all-reduce among `n` workers of `b` bytes each must read each operand once and write each result once: `2 n b` bytes. The bound is
//! those bytes at the most bytes per second, read and written, at which as many threads as there are cores copy, or update in place,
//! arrays of the same size, measured in the same rounds.
//!
//!     cargo bench --bench all_reduce [-- MIB ROUNDS]

use altiplano_ir::dtype::DType;
use altiplano_ir::mesh::AxisId;
use altiplano_ir::op::Reducer;
use altiplano_ir::reshard::Collective;
use altiplano_runtime::arena::Arena;
use altiplano_runtime::collective::Member;
use altiplano_runtime::element::Class;
use altiplano_runtime::mailbox::Mailbox;
use std::hint::black_box;
use std::sync::{Arc, Barrier};
use std::time::Instant;

/// Runs of one point in a round, of which the median counts.
const RUNS: usize = 7;

fn main() {
    let numbers: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let mib = numbers.first().copied().unwrap_or(64);
    let rounds = numbers.get(1).copied().unwrap_or(5);
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let elements = mib << 18;
    let bytes = 4.0 * elements as f64;
    // By round: bytes per second of copies and of updates, seconds with two workers and with four.
    let mut found: [Vec<f64>; 4] = Default::default();
    for _ in 0..rounds {
        let moved = 2.0 * bytes * cores as f64;
        found[0].push(moved / memory_s(cores, elements, |from, to| to.copy_from_slice(from)));
        found[1].push(moved / memory_s(cores, elements, |_, to| to.iter_mut().for_each(|x| *x += 1.0)));
        found[2].push(all_reduce_s(2, elements));
        found[3].push(all_reduce_s(4, elements));
    }
    let [copy, update, two, four] = found.map(|mut all| median(&mut all));
    let bytes_per_s = copy.max(update);
    println!("memory, {cores} threads: {:.1} GB/s copied, {:.1} GB/s updated in place", copy * 1e-9, update * 1e-9);
    for (workers, seconds) in [(2, two), (4, four)] {
        let bound_s = 2.0 * workers as f64 * bytes / bytes_per_s;
        let ratio = bound_s / seconds;
        println!(
            "all-reduce of {mib} MiB, {workers} workers: {:.2} ms, bound {:.2} ms, {ratio:.2} of it",
            1e3 * seconds,
            1e3 * bound_s
        );
    }
}

fn median(all: &mut [f64]) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Seconds in which each of so many threads does something to arrays of its own, all at once.
fn memory_s(threads: usize, elements: usize, work: impl Fn(&[f32], &mut [f32]) + Sync) -> f64 {
    together(threads, |_| {
        let (from, mut to) = (vec![1.0f32; elements], vec![0.0f32; elements]);
        let work = &work;
        move || work(black_box(&from), black_box(&mut to))
    })
}

/// Seconds of an all-reduce in place, as that of a gradient is.
fn all_reduce_s(workers: usize, elements: usize) -> f64 {
    let mailboxes: Vec<_> =
        Mailbox::network(workers, false).into_iter().map(|m| std::sync::Mutex::new(Some(m))).collect();
    let collective = Collective::AllReduce { axes: vec![AxisId(0)], reducer: Reducer::Sum };
    together(workers, |me| {
        let taken = mailboxes[me].lock().expect("a mailbox").take();
        let mut mailbox = taken.expect("each worker takes its own");
        let zeros = Arena::new(None).zeros(Class::F32, elements).expect("there is memory");
        let mut tensor = Some(Arc::new(zeros));
        let (collective, ranks): (_, Vec<usize>) = (&collective, (0..workers).collect());
        move || {
            let operand = tensor.take().expect("a tensor");
            let mut member = Member { mailbox: &mut mailbox, ranks: ranks.clone(), me };
            let result = member.run(collective, DType::F32, &[elements], operand, true).expect("it runs");
            tensor = Some(Arc::new(result));
        }
    })
}

/// The median over runs of the seconds in which all threads have done what `make` prepares for each.
fn together<F: FnMut() + Send>(threads: usize, make: impl Fn(usize) -> F + Sync) -> f64 {
    let ready = Barrier::new(threads);
    let run = |me: usize| {
        let mut work = make(me);
        let mut taken = Vec::new();
        work();
        for _ in 0..RUNS {
            ready.wait();
            let start = Instant::now();
            work();
            ready.wait();
            taken.push(start.elapsed().as_secs_f64());
        }
        median(&mut taken)
    };
    std::thread::scope(|scope| {
        let run = &run;
        let all: Vec<_> = (0..threads).map(|me| scope.spawn(move || run(me))).collect();
        all.into_iter().map(|t| t.join().expect("a thread")).fold(0.0, f64::max)
    })
}
