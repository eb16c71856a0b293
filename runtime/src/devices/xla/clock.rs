//! Times of bodies on devices. A thread waits for those of a stage in the order in which they run, since nothing else
//! waits for each of them.

use crate::recording::{Span, What};
use altiplano_xla::pjrt::{Launched, PjrtError};
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant;

/// A body that runs, the position of its call in the schedule, and what the devices hold after it.
struct Timed {
    launched: Launched,
    position: usize,
    held_bytes: u64,
    /// When it was started. It waits for earlier ones.
    start: Instant,
}

/// The clock of a stage, during a step.
pub(super) struct Clock {
    bodies: Sender<Timed>,
    thread: JoinHandle<Result<Vec<Span>, PjrtError>>,
}

impl Clock {
    /// Starts a clock whose times count from `origin`.
    pub(super) fn start(origin: Instant) -> io::Result<Clock> {
        let (bodies, timed) = channel();
        let thread = std::thread::Builder::new().name("clock".to_string()).spawn(move || times(&timed, origin))?;
        Ok(Clock { bodies, thread })
    }

    /// Times a body that was started just now.
    pub(super) fn time(&self, launched: Launched, position: usize, held_bytes: u64) {
        // Without the thread, which ends early only by a panic, the body is waited for here.
        let _ = self.bodies.send(Timed { launched, position, held_bytes, start: Instant::now() });
    }

    /// Waits for all bodies, and returns the first error.
    pub(super) fn end(self) -> Result<Vec<Span>, PjrtError> {
        drop(self.bodies);
        self.thread.join().unwrap_or_else(|_| Ok(Vec::new()))
    }
}

fn times(timed: &Receiver<Timed>, origin: Instant) -> Result<Vec<Span>, PjrtError> {
    let mut spans: Vec<Span> = Vec::new();
    let mut failed = Ok(());
    for Timed { mut launched, position, held_bytes, start } in timed {
        failed = failed.and(launched.wait());
        let since = |at: Instant| at.saturating_duration_since(origin).as_secs_f64();
        let end_s = since(Instant::now());
        let start_s = spans.last().map_or(0.0, |last| last.end_s).max(since(start)).min(end_s);
        spans.push(Span { what: What::Call { position }, start_s, end_s, waited_s: 0.0, held_bytes });
    }
    failed.map(|()| spans)
}
