//! A progress bar on stderr for work that lasts longer than a second, where stderr is a terminal.

use altiplano::planner::Progress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

/// A bar that shows itself after a second, and goes when it is dropped.
pub struct Bar {
    bar: ProgressBar,
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
        Bar { bar, _done: done }
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
        self.bar.set_message(what.to_string());
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
