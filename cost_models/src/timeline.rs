//! The event simulator of a device's streams.
//!
//! A device has a host that issues work, a stream that computes, and streams that communicate. Work waits for the host,
//! for its stream and for its inputs ([`play`]). Each body is simulated once; [`crate::pipeline`] then simulates the
//! calls of a step with the bodies' lengths. Replicas of a stage do the same at the same time and are simulated once.

use crate::kernels::{Kernel, KernelKind};
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::HostRoute;
use rustc_hash::FxHashMap;

/// The stream that work runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stream {
    Compute,
    /// Collectives that the next op waits for.
    Communication,
    /// Collectives once a step: gradients and updated parameters.
    Gradients,
    /// From the memory of the host.
    Load,
    /// To the memory of the host.
    Store,
}

/// A piece of work on one device.
#[derive(Clone, Debug, PartialEq)]
pub struct Task {
    pub stream: Stream,
    pub seconds: f64,
    /// Seconds that the host takes to issue it.
    pub issue_s: f64,
    /// Earlier tasks that it waits for.
    pub after: Vec<u32>,
    /// Time at which inputs from outside are available.
    pub ready_s: f64,
}

/// The host, which issues tasks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Host {
    /// Run-ahead of the host at the start: seconds by which it is ahead of the device.
    pub ahead_s: f64,
    /// Length of the launch queue: the most tasks that the host has issued and the device has not finished.
    pub queued: usize,
}

impl Host {
    /// A host without initial run-ahead that never waits for the device.
    pub const FREE: Host = Host { ahead_s: 0.0, queued: usize::MAX };
}

impl Task {
    /// Returns true if the task runs as soon as its inputs are available: loads are prefetched, and gradients are sent
    /// as they are made. Other tasks wait for their turn among those that the host issues.
    fn runs_ahead(&self) -> bool {
        match self.stream {
            Stream::Compute => false,
            Stream::Communication => self.after.is_empty(),
            Stream::Gradients | Stream::Load | Stream::Store => true,
        }
    }
}

/// The span of each task, and the activity of the streams.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Played {
    /// Seconds from the time when the device begins, or the host if that is later, to the end of the last task.
    pub seconds: f64,
    /// Start and end of each task.
    pub spans: Vec<(f64, f64)>,
    pub host_s: f64,
    /// The host's run-ahead in seconds, at the start and at the end.
    pub ahead_s: [f64; 2],
    pub compute_s: f64,
    pub communication_s: f64,
    /// Communication that does not overlap with computation.
    pub exposed_s: f64,
}

impl Played {
    /// The same run where collectives occupy a part of the device, which does not compute meanwhile.
    pub fn shared(self, part: f64) -> Played {
        let beside_s = (self.communication_s - self.exposed_s).max(0.0);
        if self.seconds <= 0.0 || beside_s <= 0.0 {
            return self;
        }
        let longer_s = part * beside_s;
        let times = 1.0 + longer_s / self.seconds;
        Played {
            seconds: self.seconds + longer_s,
            spans: self.spans.iter().map(|(from, to)| (times * from, times * to)).collect(),
            compute_s: self.compute_s + longer_s,
            communication_s: times * self.communication_s,
            exposed_s: times * self.exposed_s,
            ..self
        }
    }
}

/// Simulates tasks in the order in which they are issued. Tasks of one stream run one after the other, from time 0. The
/// host begins to issue them earlier, by its run-ahead.
pub fn play(tasks: &[Task], host: Host) -> Played {
    let mut played = Played { spans: Vec::with_capacity(tasks.len()), ..Played::default() };
    let (mut host_s, mut free_s) = (-host.ahead_s, [0.0f64; 5]);
    // End of each task that waits for its turn.
    let mut done_s: Vec<f64> = Vec::new();
    for task in tasks {
        let runs_ahead = task.runs_ahead();
        if !runs_ahead && done_s.len() >= host.queued {
            host_s = host_s.max(done_s[done_s.len() - host.queued]);
        }
        host_s += task.issue_s;
        let stream = &mut free_s[task.stream as usize];
        let after_s = task.after.iter().map(|&t| played.spans[t as usize].1).fold(task.ready_s, f64::max);
        let issued_s = if runs_ahead { 0.0 } else { host_s };
        let start_s = issued_s.max(*stream).max(after_s);
        *stream = start_s + task.seconds;
        played.spans.push((start_s, *stream));
        if !runs_ahead {
            done_s.push(*stream);
        }
        match task.stream {
            Stream::Compute => played.compute_s += task.seconds,
            _ => played.communication_s += task.seconds,
        }
    }
    played.host_s = tasks.iter().map(|task| task.issue_s).sum();
    played.seconds = free_s.into_iter().fold(host_s, f64::max);
    played.ahead_s = [host.ahead_s, played.seconds - host_s];
    played.exposed_s = exposed_s(tasks, &played.spans);
    played
}

/// Seconds of communication without computation.
fn exposed_s(tasks: &[Task], spans: &[(f64, f64)]) -> f64 {
    let of = |computes: bool| {
        tasks.iter().zip(spans).filter(move |(t, _)| (t.stream == Stream::Compute) == computes).map(|(_, s)| *s)
    };
    let mut computing = of(true).peekable();
    let mut sending: Vec<(f64, f64)> = of(false).collect();
    sending.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut exposed = 0.0;
    let mut until = f64::NEG_INFINITY;
    for (start, end) in sending {
        // Simultaneous sends of two streams count once.
        let (start, end) = (start.max(until), end.max(until));
        until = end;
        let mut at = start;
        while let Some(&(from, to)) = computing.peek() {
            if from >= end {
                break;
            }
            exposed += (from - at).max(0.0);
            at = at.max(to);
            if to > end {
                break;
            }
            computing.next();
        }
        exposed += (end - at).max(0.0);
    }
    exposed
}

/// Prices of a body's kernels and collectives, in the order of [`crate::kernels::kernels`].
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct Price {
    pub seconds: f64,
    /// Seconds of the host to issue it.
    pub issue_s: f64,
}

/// The stream that a kernel runs on, as part of a body.
pub fn stream(kind: &KernelKind) -> Stream {
    match kind {
        KernelKind::Collective => Stream::Communication,
        KernelKind::HostCopy(HostRoute::Load) => Stream::Load,
        KernelKind::HostCopy(HostRoute::Store) => Stream::Store,
        _ => Stream::Compute,
    }
}

/// A body's kernels as tasks. Inputs from outside are available when the body starts.
pub fn tasks(kernels: &[Kernel], prices: &[Price]) -> Vec<Task> {
    let mut maker: FxHashMap<ValueId, u32> = FxHashMap::default();
    let mut tasks = Vec::with_capacity(kernels.len());
    for (i, (kernel, price)) in kernels.iter().zip(prices).enumerate() {
        let mut task = Task {
            stream: stream(&kernel.kind),
            seconds: price.seconds,
            issue_s: price.issue_s,
            after: Vec::new(),
            ready_s: 0.0,
        };
        task.after.extend(kernel.reads.iter().filter_map(|(read, _)| maker.get(read).copied()));
        for &write in &kernel.writes {
            maker.insert(write, i as u32);
        }
        tasks.push(task);
    }
    tasks
}

#[cfg(test)]
#[path = "timeline_tests.rs"]
mod tests;
