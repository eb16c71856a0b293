//! Tracks the last writer and readers of each byte of an arena, command by command.

use super::RegionId;
use super::access::Access;
use std::collections::BTreeMap;
use std::ops::Range;

/// The history of a run of bytes.
#[derive(Clone, Debug)]
struct Run {
    end: u64,
    /// The region whose content was written here.
    region: RegionId,
    writer: Option<u32>,
    /// The last reader on each stream since then. Earlier readers on the same stream come before it anyway.
    readers: Vec<(u32, u32)>,
}

/// The region as which bytes were last written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The touched region itself.
    Own,
    Other(RegionId),
    /// Some bytes were never written.
    Unwritten,
}

/// The bytes of an arena, as runs with one history each.
#[derive(Clone, Debug, Default)]
pub struct Ranges {
    runs: BTreeMap<u64, Run>,
}

impl Ranges {
    /// Marks bytes that exist before the first command.
    pub fn there(&mut self, region: RegionId, bytes: Range<u64>) {
        if !bytes.is_empty() {
            self.runs.insert(bytes.start, Run { end: bytes.end, region, writer: None, readers: Vec::new() });
        }
    }

    fn cut(&mut self, at: u64) {
        let Some((_, run)) = self.runs.range_mut(..at).next_back() else { return };
        if run.end > at {
            let right = run.clone();
            run.end = at;
            self.runs.insert(at, right);
        }
    }

    /// Records that a command touches bytes, and adds the commands that must come before it. A read comes after the
    /// writers, a write also after the readers.
    pub(crate) fn touch(&mut self, access: &Access, command: u32, stream: u32, before: &mut Vec<u32>) -> Found {
        let Access { region, from, to, writes } = *access;
        if from >= to {
            return Found::Own;
        }
        self.cut(from);
        self.cut(to);
        let mut covered = from;
        let (mut gap, mut foreign) = (false, None);
        for (&start, run) in self.runs.range_mut(from..to) {
            gap |= start > covered;
            covered = run.end;
            foreign = foreign.or((run.region != region).then_some(run.region));
            before.extend(run.writer.filter(|w| *w != command));
            if writes {
                before.extend(run.readers.iter().map(|r| r.1).filter(|r| *r != command));
                continue;
            }
            match run.readers.iter_mut().find(|r| r.0 == stream) {
                Some(reader) => reader.1 = command,
                None => run.readers.push((stream, command)),
            }
        }
        if writes {
            let old: Vec<u64> = self.runs.range(from..to).map(|(&start, _)| start).collect();
            old.iter().for_each(|start| {
                self.runs.remove(start);
            });
            self.runs.insert(from, Run { end: to, region, writer: Some(command), readers: Vec::new() });
        }
        match foreign {
            _ if gap || covered < to => Found::Unwritten,
            Some(other) => Found::Other(other),
            None => Found::Own,
        }
    }
}
