//! A timeline of a device's step: its calls and the kernels within them. Only the first device of each program is
//! recorded, since the others do the same.

use altiplano_ir::graph::ValueId;
use std::time::{Duration, Instant};

/// The work of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The call at a position of its program's schedule.
    Call { position: usize },
    /// An asynchronous collective that makes a node's value for the call at a position, from its start until its result
    /// is complete.
    Behind { position: usize, node: ValueId },
    /// The kernel that makes a node's value, within the call at a position.
    Kernel { position: usize, node: ValueId },
}

/// A span of work, in seconds from the start of the step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    pub what: What,
    pub start_s: f64,
    pub end_s: f64,
    /// Part of the span spent waiting for messages.
    pub waited_s: f64,
    /// Bytes that the device held at the end.
    pub held_bytes: u64,
}

/// The recorded step of the first device of a program.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recording {
    pub program: u32,
    pub spans: Vec<Span>,
}

/// Records spans as a device completes them.
pub(crate) struct Recorder {
    origin: Instant,
    spans: Vec<Span>,
}

/// The start of a span.
#[derive(Clone, Copy)]
pub(crate) struct Start {
    at: Instant,
    waited: Duration,
}

impl Start {
    pub fn now(waited: Duration) -> Start {
        Start { at: Instant::now(), waited }
    }
}

impl Recorder {
    pub fn new(origin: Instant) -> Recorder {
        Recorder { origin, spans: Vec::new() }
    }

    pub fn end(&mut self, what: What, start: Start, waited: Duration, held_bytes: u64) {
        let since = |at: Instant| at.saturating_duration_since(self.origin).as_secs_f64();
        let waited_s = waited.saturating_sub(start.waited).as_secs_f64();
        self.spans.push(Span { what, start_s: since(start.at), end_s: since(Instant::now()), waited_s, held_bytes });
    }

    pub fn finish(self) -> Vec<Span> {
        self.spans
    }
}
