//! A progress bar on stderr for work that lasts longer than a second, if stderr is a terminal. It also handles Ctrl-C:
//! the first ends a search with its best plan so far, the second ends the program. Answers to one of several questions
//! are lines on stderr as soon as they are known, if that takes longer than a second too.

use altiplano::ir::plan::Plan;
use altiplano::planner::{PlanFailure, Progress};
use altiplano::units::seconds;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A bar that appears after a second, and disappears on drop.
pub(crate) struct Bar {
    bar: ProgressBar,
    start: Instant,
    /// Step time of the best plan so far, and a lower bound for all plans.
    best: Mutex<Option<(f64, f64)>>,
    stopped: Arc<AtomicBool>,
    /// Dropped with the bar, which ends the thread that waits to show it.
    _done: Sender<()>,
}

impl Bar {
    pub(crate) fn new() -> Self {
        let bar = ProgressBar::with_draw_target(Some(1), ProgressDrawTarget::hidden());
        if let Ok(style) = ProgressStyle::with_template("{elapsed} {bar:30} {pos}/{len} {msg}") {
            bar.set_style(style);
        }
        let (done, wait) = channel::<()>();
        let late = bar.clone();
        std::thread::spawn(move || {
            if wait.recv_timeout(PATIENCE) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                // This target draws only on a terminal.
                late.set_draw_target(ProgressDrawTarget::stderr());
                late.enable_steady_tick(Duration::from_millis(200));
            }
        });
        Bar { bar, start: Instant::now(), best: Mutex::default(), stopped: Arc::default(), _done: done }
    }

    /// A bar whose work Ctrl-C stops.
    pub(crate) fn stoppable() -> Self {
        let bar = Bar::new();
        let stopped = bar.stopped.clone();
        // If no handler can be set, Ctrl-C ends the program at once.
        let _ = ctrlc::set_handler(move || {
            if stopped.swap(true, Ordering::Relaxed) {
                std::process::exit(INTERRUPTED);
            }
            complain!("stopping with the best plan so far (once more to stop without)");
        });
        bar
    }

    /// Prints a line of results without disturbing the bar.
    pub(crate) fn suspend<R>(&self, print: impl FnOnce() -> R) -> R {
        self.bar.suspend(print)
    }
}

impl Progress for Bar {
    fn step(&self, what: &str, done: usize, total: usize) {
        self.bar.set_length(total as u64);
        self.bar.set_position(done as u64);
        let best = self.best.lock().unwrap_or_else(PoisonError::into_inner);
        let words = best.map_or(String::new(), |(step_s, bound_s)| {
            format!("; best so far {}, lower bound {}", seconds(step_s), seconds(bound_s))
        });
        self.bar.set_message(format!("{what}{words}"));
    }

    fn best(&self, step_s: f64, bound_s: f64) {
        let mut best = self.best.lock().unwrap_or_else(PoisonError::into_inner);
        if best.is_none_or(|(known_s, _)| step_s < known_s) {
            *best = Some((step_s, bound_s));
        }
    }

    fn answered(&self, what: &str, answer: &Result<Plan, PlanFailure>) {
        if self.start.elapsed() < PATIENCE {
            return;
        }
        let answer = match answer {
            Ok(plan) => {
                format!("{} a step, MFU {:.1} %", seconds(plan.predicted.step_time_s), 100.0 * plan.predicted.mfu)
            }
            Err(failure) => failure.to_string(),
        };
        self.suspend(|| complain!("  {what}: {answer}"));
    }

    fn stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }
}

/// Work that lasts no longer is done in silence.
const PATIENCE: Duration = Duration::from_secs(1);

/// The exit code that shells expect after Ctrl-C.
const INTERRUPTED: i32 = 130;

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
