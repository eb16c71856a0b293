//! Where the time of searches goes, by phase.
//!
//! A phase inside another one counts as itself only, so the seconds of all phases add up to the time that threads spent
//! in them. Figures are of the whole process, and none are taken before [`enable`] is called.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Instant;

/// A phase of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Import,
    Rewriting,
    Cuts,
    Tables,
    Stages,
    Differentiation,
    Assembly,
    Lowering,
    Kernels,
    Timing,
    Memory,
    Refinement,
    Proof,
    Writing,
}

/// The figures of one phase.
#[derive(Clone, Debug, PartialEq)]
pub struct PhaseTime {
    pub phase: Phase,
    /// The unit of `times`.
    pub unit: &'static str,
    /// Seconds of all threads.
    pub seconds: f64,
    pub times: u64,
}

const PHASES: [(Phase, &str); 14] = [
    (Phase::Import, "models read"),
    (Phase::Rewriting, "models simplified"),
    (Phase::Cuts, "microbatch sizes cut into layers"),
    (Phase::Tables, "tables of layers solved"),
    (Phase::Stages, "questions to the dynamic program"),
    (Phase::Differentiation, "graphs differentiated"),
    (Phase::Assembly, "plans assembled"),
    (Phase::Lowering, "plans lowered"),
    (Phase::Kernels, "bodies divided into kernels"),
    (Phase::Timing, "stages timed"),
    (Phase::Memory, "plans followed through memory"),
    (Phase::Refinement, "stages solved as a whole"),
    (Phase::Proof, "plans proved"),
    (Phase::Writing, "plans written"),
];

static ENABLED: AtomicBool = AtomicBool::new(false);
static NANOSECONDS: [AtomicU64; PHASES.len()] = [const { AtomicU64::new(0) }; PHASES.len()];
static TIMES: [AtomicU64; PHASES.len()] = [const { AtomicU64::new(0) }; PHASES.len()];

thread_local! {
    /// Nanoseconds of the phases inside each open phase of this thread.
    static INSIDE: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// Starts taking figures.
pub fn enable() {
    ENABLED.store(true, Relaxed);
}

/// Does work that counts once for a phase.
pub fn timed<T>(phase: Phase, work: impl FnOnce() -> T) -> T {
    if ENABLED.load(Relaxed) {
        TIMES[phase as usize].fetch_add(1, Relaxed);
    }
    part_of(phase, work)
}

/// Does a part of what [`timed`] counts, for example on another thread.
pub fn part_of<T>(phase: Phase, work: impl FnOnce() -> T) -> T {
    if !ENABLED.load(Relaxed) {
        return work();
    }
    INSIDE.with_borrow_mut(|inside| inside.push(0));
    let start = Instant::now();
    let done = work();
    let nanoseconds = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let inside = INSIDE.with_borrow_mut(|inside| {
        let own = inside.pop().unwrap_or(0);
        if let Some(outer) = inside.last_mut() {
            *outer += nanoseconds;
        }
        own
    });
    NANOSECONDS[phase as usize].fetch_add(nanoseconds.saturating_sub(inside), Relaxed);
    done
}

/// The figures of all phases so far, in the order in which a search comes to them.
pub fn phases() -> Vec<PhaseTime> {
    let figures = |&(phase, unit): &(Phase, &'static str)| PhaseTime {
        phase,
        unit,
        seconds: NANOSECONDS[phase as usize].load(Relaxed) as f64 / 1e9,
        times: TIMES[phase as usize].load(Relaxed),
    };
    PHASES.iter().map(figures).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread::sleep;
    use std::time::Duration;

    #[test]
    fn phases_count_without_the_phases_inside_them() {
        enable();
        let of = |phase: Phase| phases().into_iter().find(|p| p.phase == phase).map_or(0.0, |p| p.seconds);
        let before = [of(Phase::Import), of(Phase::Writing)];
        let long = Duration::from_millis(200);
        timed(Phase::Import, || timed(Phase::Writing, || sleep(long)));
        let [import_s, writing_s] = [of(Phase::Import) - before[0], of(Phase::Writing) - before[1]];
        assert!(writing_s >= long.as_secs_f64(), "{writing_s}");
        assert!(import_s < writing_s, "{import_s}");
        assert!(PHASES.iter().enumerate().all(|(i, (phase, _))| *phase as usize == i));
    }
}
