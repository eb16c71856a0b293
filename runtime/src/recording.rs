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
    AsyncCollective { position: usize, node: ValueId },
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

impl Span {
    /// Number of words of a span.
    pub(crate) const WORDS: usize = 6;

    /// The span as words, for another process.
    pub(crate) fn words(&self) -> [u64; Span::WORDS] {
        let Span { what, start_s, end_s, waited_s, held_bytes } = *self;
        let (position, node) = match what {
            What::Call { position } => (position as u64, 0),
            What::AsyncCollective { position, node } => (position as u64, BEHIND | node.index() as u64),
            What::Kernel { position, node } => (position as u64, node.index() as u64 + 1),
        };
        [position, node, start_s.to_bits(), end_s.to_bits(), waited_s.to_bits(), held_bytes]
    }

    pub(crate) fn of_words(words: &[u64; Span::WORDS]) -> Span {
        let position = words[0] as usize;
        let what = match words[1].checked_sub(1) {
            None => What::Call { position },
            _ if words[1] & BEHIND != 0 => What::AsyncCollective { position, node: ValueId(words[1] as u32) },
            Some(node) => What::Kernel { position, node: ValueId(node as u32) },
        };
        let [start_s, end_s, waited_s] = [words[2], words[3], words[4]].map(f64::from_bits);
        Span { what, start_s, end_s, waited_s, held_bytes: words[5] }
    }
}

/// Flag on nodes that marks asynchronous collectives, in words.
const BEHIND: u64 = 1 << 32;

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
    pub(crate) fn now(waited: Duration) -> Start {
        Start { at: Instant::now(), waited }
    }
}

impl Recorder {
    pub(crate) fn new(origin: Instant) -> Recorder {
        Recorder { origin, spans: Vec::new() }
    }

    pub(crate) fn end(&mut self, what: What, start: Start, waited: Duration, held_bytes: u64) {
        let since = |at: Instant| at.saturating_duration_since(self.origin).as_secs_f64();
        let waited_s = waited.saturating_sub(start.waited).as_secs_f64();
        self.spans.push(Span { what, start_s: since(start.at), end_s: since(Instant::now()), waited_s, held_bytes });
    }

    pub(crate) fn finish(self) -> Vec<Span> {
        self.spans
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_read_as_they_were_written() {
        for what in [
            What::Call { position: 3 },
            What::AsyncCollective { position: 4, node: ValueId(5) },
            What::Kernel { position: 9, node: ValueId(0) },
        ] {
            let span = Span { what, start_s: 0.25, end_s: 0.5, waited_s: 0.125, held_bytes: 17 };
            assert_eq!(Span::of_words(&span.words()), span);
        }
    }
}
