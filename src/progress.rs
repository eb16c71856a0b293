//! A progress bar on stderr for work that lasts longer than a second, where stderr is a terminal; and Ctrl-C, which ends a search
//! with the best that it has found, and at the second time the program.

use altiplano::planner::Progress;
use altiplano::units::seconds;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// A bar that shows itself after a second, and goes when it is dropped.
pub struct Bar {
    bar: ProgressBar,
    /// Seconds of the best plan so far, and what no plan falls below.
    best: Mutex<Option<(f64, f64)>>,
    stopped: Arc<AtomicBool>,
    /// Dropped with the bar, which ends the thread that waits to show it.
    _done: Sender<()>,
}

impl Bar {
    pub fn new() -> Self {
        let bar = ProgressBar::with_draw_target(Some(1), ProgressDrawTarget::hidden());
        if let Ok(style) = ProgressStyle::with_template("{elapsed} {bar:30} {pos}/{len} {msg}") {
            bar.set_style(style);
        }
        let (done, wait) = channel::<()>();
        let late = bar.clone();
        std::thread::spawn(move || {
            if wait.recv_timeout(Duration::from_secs(1)) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                // This target draws on a terminal only.
                late.set_draw_target(ProgressDrawTarget::stderr());
                late.enable_steady_tick(Duration::from_millis(200));
            }
        });
        Bar { bar, best: Mutex::default(), stopped: Arc::default(), _done: done }
    }

    /// A bar whose work is stopped by Ctrl-C.
    pub fn stoppable() -> Self {
        let bar = Bar::new();
        let stopped = bar.stopped.clone();
        // Where no handler can be set, Ctrl-C ends the program at once, as ever.
        let _ = ctrlc::set_handler(move || {
            if stopped.swap(true, Ordering::Relaxed) {
                std::process::exit(INTERRUPTED);
            }
            eprintln!("stopping with the best plan so far (once more to stop without)");
        });
        bar
    }

    /// Prints a line of results without tearing the bar.
    pub fn suspend<R>(&self, print: impl FnOnce() -> R) -> R {
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

    fn stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }
}

/// What shells expect of a program that Ctrl-C ended.
const INTERRUPTED: i32 = 130;

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
