//! Measures joint work of devices: collectives, and sharing too few cores.

use super::{Harness, Watch, of_this_thread};
use crate::arena::{Arena, Storage};
use crate::collective::Member;
use crate::element::Class;
use crate::mailbox::Mailbox;
use altiplano_ir::dtype::DType;
use altiplano_ir::mesh::AxisId;
use altiplano_ir::op::Reducer;
use altiplano_ir::reshard::Collective;
use std::sync::{Arc, Barrier};
use std::time::Instant;

/// The collectives of a tensor `[devices, width]` on each device. The factor gives the bytes by which each is priced,
/// relative to the tensor.
pub(crate) fn collectives(devices: usize) -> [(Collective, f64); 6] {
    let (axes, reducer) = (vec![AxisId(0)], Reducer::Sum);
    [
        (Collective::AllReduce { axes: axes.clone(), reducer }, 1.0),
        (Collective::ReduceScatter { axes: axes.clone(), reducer, dim: 0, outer: 1 }, 1.0),
        (Collective::AllGather { axes: axes.clone(), dim: 0, outer: 1 }, devices as f64),
        (
            Collective::AllToAll { axes: axes.clone(), split_dim: 0, split_outer: 1, concat_dim: 1, concat_outer: 1 },
            1.0,
        ),
        (Collective::Halo { axes: axes.clone(), dim: 0, low: 1, high: 1, reducer }, 1.0 + 2.0 / devices as f64),
        (Collective::Shift { axes, by: 1 }, 1.0),
    ]
}

/// `first` and its doublings below `most`, then `most` itself.
#[cfg(any(test, feature = "mpi"))]
pub(crate) fn doublings(first: usize, most: usize) -> Vec<usize> {
    let mut all: Vec<usize> = std::iter::successors(Some(first), |n| Some(2 * n)).take_while(|&n| n < most).collect();
    all.extend((most >= first).then_some(most));
    all
}

pub(crate) fn measure(harness: &mut Harness, cores: usize) {
    let most = if harness.quick { 2 } else { (2 * cores).clamp(4, 16) };
    let widths: &[usize] = if harness.quick { &[16, 1 << 12] } else { &[16, 1 << 10, 1 << 14, 1 << 17, 1 << 20] };
    let mut devices = 2;
    while devices <= most {
        harness.load = devices;
        for (collective, priced) in collectives(devices) {
            let seconds: Vec<f64> = widths.iter().map(|&w| together(harness, &collective, devices, w)).collect();
            let bytes: Vec<f64> = widths.iter().map(|&w| 4.0 * (w * devices) as f64 * priced).collect();
            harness.grid(collective.name(), DType::F32, devices, vec![bytes], seconds);
        }
        devices *= 2;
    }
    harness.load = 1;
}

/// Seconds of a collective among `devices` devices.
fn together(harness: &mut Harness, collective: &Collective, devices: usize, width: usize) -> f64 {
    let shape = [devices, width];
    let ready = Barrier::new(devices);
    let (samples, per_sample) = if harness.quick { (3, 4) } else { (15, ((1 << 16) / width.max(1 << 11)).max(1)) };
    let mut taken = Vec::new();
    std::thread::scope(|scope| {
        let mut first: Option<Mailbox> = None;
        let ready = &ready;
        let run = move |mut mailbox: Mailbox, mut note: Option<&mut Vec<f64>>| {
            let (arena, me) = (Arena::new(None), mailbox.rank);
            let mut tensor = arena.zeros(Class::F32, devices * width).ok().map(Arc::new);
            ready.wait();
            for _ in 0..=samples {
                let watch = Watch::start();
                for _ in 0..per_sample {
                    let Some(operand) = tensor.take() else { return };
                    let kept = operand.clone();
                    let ranks = (0..devices).collect();
                    let mut member = Member { mailbox: &mut mailbox, ranks, me };
                    let result: Option<Storage> = member.run(collective, DType::F32, &shape, operand, false).ok();
                    drop(result);
                    tensor = Some(kept);
                }
                if let Some(taken) = note.as_deref_mut() {
                    taken.push(watch.seconds() / per_sample as f64);
                }
            }
        };
        for mailbox in Mailbox::network(devices, false) {
            match first {
                None => first = Some(mailbox),
                Some(_) => drop(scope.spawn(move || run(mailbox, None))),
            }
        }
        if let Some(mailbox) = first {
            run(mailbox, Some(&mut taken));
        }
    });
    // The first run warms up. The fastest of the others counts. If another program has the core of one device, all
    // others wait, which their clocks cannot tell from waiting for each other.
    let taken = taken.split_off(1.min(taken.len()));
    let least = taken.iter().copied().fold(f64::INFINITY, f64::min);
    harness.median(taken);
    least
}

/// The slowdown of threads that outnumber the cores: they take turns, and each finds less in the caches. All run the
/// same loop for a while. Only running time counts, so that other programs do not matter.
pub(crate) fn slower_shared(harness: &Harness, cores: usize) -> Vec<(u32, f64)> {
    let rounds = if harness.quick { 20 } else { 400 };
    let at = |threads: usize| {
        let mut taken: Vec<f64> = (0..3).map(|_| all_at_once(threads, rounds)).collect();
        taken.sort_by(f64::total_cmp);
        taken[1]
    };
    let base = at(cores);
    let mut slower: Vec<(u32, f64)> = Vec::new();
    for threads in [2 * cores, 4 * cores] {
        let turns = threads as f64 / cores as f64;
        let least = slower.last().map_or(turns, |s| s.1.max(turns));
        slower.push((threads as u32, (turns * at(threads) / base).max(least)));
    }
    slower
}

/// Mean running time of concurrent threads that each sum a megabyte `rounds` times.
fn all_at_once(threads: usize, rounds: usize) -> f64 {
    let ready = Barrier::new(threads);
    let one = || {
        let terms = vec![1.0f32; 1 << 18];
        ready.wait();
        let (start, before) = (Instant::now(), of_this_thread());
        for _ in 0..rounds {
            std::hint::black_box(terms.iter().map(|x| x * x + 0.5).sum::<f32>());
        }
        match (before, of_this_thread()) {
            (Some(before), Some(after)) if after.0 > before.0 => after.0 - before.0,
            // Without such a clock, use wall-clock time, which includes the waits of threads that take turns.
            _ => start.elapsed().as_secs_f64() / threads as f64,
        }
    };
    let seconds = std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
        all.into_iter().filter_map(|t| t.join().ok()).sum::<f64>()
    });
    seconds / threads as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_devices_double_up_to_all() {
        assert_eq!(doublings(2, 1), [0; 0]);
        assert_eq!(doublings(2, 2), [2]);
        assert_eq!(doublings(1, 6), [1, 2, 4, 6]);
    }
}
