//! What a device did in a step, and when: its calls, and the kernels within them. Only the first device of each program is recorded,
//! since the others do the same.

use altiplano_ir::graph::ValueId;
use std::time::{Duration, Instant};

/// Something that a device did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The call at a position of its program's schedule.
    Call { position: usize },
    /// The collective that makes a node's value, of the call at a position, while others are made: from where it is begun until all has come.
    Behind { position: usize, node: ValueId },
    /// The kernel that makes a node's value, within the call at a position.
    Kernel { position: usize, node: ValueId },
}

/// When it did it, in seconds from the start of the step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    pub what: What,
    pub start_s: f64,
    pub end_s: f64,
    /// Of that, what it waited for messages of others.
    pub waited_s: f64,
    /// Bytes that it held at the end.
    pub held_bytes: u64,
}

/// A step of the first device of a program.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recording {
    pub program: u32,
    pub spans: Vec<Span>,
}

/// Notes down spans as a device comes to their ends.
pub(crate) struct Recorder {
    origin: Instant,
    spans: Vec<Span>,
}

/// A moment at which something starts.
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
