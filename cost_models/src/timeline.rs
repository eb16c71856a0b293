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
    /// Communication over different links has channels of its own, which run side by side.
    pub channel: u8,
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
    let mut device = Device::new(host);
    let mut played = Played { spans: Vec::with_capacity(tasks.len()), ..Played::default() };
    for task in tasks {
        let span = device.run(task, &played.spans);
        played.spans.push(span);
        match task.stream {
            Stream::Compute => played.compute_s += task.seconds,
            _ => played.communication_s += task.seconds,
        }
    }
    played.host_s = tasks.iter().map(|task| task.issue_s).sum();
    played.seconds = device.end_s();
    played.ahead_s = [host.ahead_s, played.seconds - device.host_s];
    played.exposed_s = exposed_s(tasks, &played.spans);
    played
}

/// Simulates two lists of tasks side by side on the same streams. Of the next tasks of both, the host issues the one that can
/// start first, so that one list computes while the other waits for a collective. Spans are those of the first list and then of
/// the second.
pub fn play_beside(lists: [&[Task]; 2], host: Host) -> Played {
    let mut device = Device::new(host);
    let mut spans = lists.map(|list| Vec::with_capacity(list.len()));
    loop {
        let mut next = |i: usize| Some((device.start_s(lists[i].get(spans[i].len())?, &spans[i]), i));
        let first = [next(0), next(1)].into_iter().flatten().min_by(|a, b| a.0.total_cmp(&b.0));
        let Some((_, i)) = first else { break };
        let span = device.run(&lists[i][spans[i].len()], &spans[i]);
        spans[i].push(span);
    }
    let all: Vec<Task> = lists.concat();
    let seconds = |computes: bool| -> f64 {
        all.iter().filter(|task| (task.stream == Stream::Compute) == computes).map(|task| task.seconds).sum()
    };
    let spans = spans.concat();
    // The lists one after the other do not have the tasks of a stream in the order in which they ran.
    let mut in_order: Vec<usize> = (0..all.len()).collect();
    in_order.sort_by(|&a, &b| spans[a].0.total_cmp(&spans[b].0));
    let (sorted, sorted_spans): (Vec<Task>, Vec<(f64, f64)>) =
        in_order.into_iter().map(|i| (all[i].clone(), spans[i])).unzip();
    let end_s = device.end_s();
    Played {
        seconds: end_s,
        host_s: all.iter().map(|task| task.issue_s).sum(),
        ahead_s: [host.ahead_s, end_s - device.host_s],
        compute_s: seconds(true),
        communication_s: seconds(false),
        exposed_s: exposed_s(&sorted, &sorted_spans),
        spans,
    }
}

/// The streams of a device and its host, as tasks are issued.
struct Device {
    host: Host,
    host_s: f64,
    /// When each stream is free again, and each further channel.
    free_s: [f64; 5],
    channels_s: [f64; Device::CHANNELS],
    /// End of each task that waits for its turn.
    done_s: Vec<f64>,
}

impl Device {
    /// Most channels beside the first of a device. Further ones share the last.
    const CHANNELS: usize = 7;

    fn new(host: Host) -> Device {
        let host_s = -host.ahead_s;
        Device { host, host_s, free_s: [0.0; 5], channels_s: [0.0; Self::CHANNELS], done_s: Vec::new() }
    }

    fn free_s(&mut self, task: &Task) -> &mut f64 {
        match (task.stream, usize::from(task.channel)) {
            (Stream::Communication, channel) if channel > 0 => &mut self.channels_s[channel.min(Self::CHANNELS) - 1],
            (stream, _) => &mut self.free_s[stream as usize],
        }
    }

    /// The time at which the host has issued a task, if it is the next.
    fn issued_s(&self, task: &Task) -> f64 {
        let waits = !task.runs_ahead() && self.done_s.len() >= self.host.queued;
        let free_s =
            if waits { self.host_s.max(self.done_s[self.done_s.len() - self.host.queued]) } else { self.host_s };
        free_s + task.issue_s
    }

    /// The start of a task, if it is the next. `spans` are those of the tasks that it may wait for.
    fn start_s(&mut self, task: &Task, spans: &[(f64, f64)]) -> f64 {
        let after_s = task.after.iter().map(|&t| spans[t as usize].1).fold(task.ready_s, f64::max);
        let issued_s = if task.runs_ahead() { 0.0 } else { self.issued_s(task) };
        issued_s.max(*self.free_s(task)).max(after_s)
    }

    fn run(&mut self, task: &Task, spans: &[(f64, f64)]) -> (f64, f64) {
        let start_s = self.start_s(task, spans);
        self.host_s = self.issued_s(task);
        let end_s = start_s + task.seconds;
        *self.free_s(task) = end_s;
        if !task.runs_ahead() {
            self.done_s.push(end_s);
        }
        (start_s, end_s)
    }

    fn end_s(&self) -> f64 {
        self.free_s.into_iter().chain(self.channels_s).fold(self.host_s, f64::max)
    }
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
            channel: 0,
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
