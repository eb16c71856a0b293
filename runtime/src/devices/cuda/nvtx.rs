//! Ranges for profilers (NVTX), with the plan's names: around each call of a body, and within it around each command.
//!
//! NVTX functions do nothing unless a profiler listens. If the library is not installed, there are no ranges.

use super::library::Search;
use crate::tape::{Content, Tape, What};
use altiplano_ir::program::{Call, Program};
use std::ffi::{CString, c_char, c_int};
use std::fmt::Write;

/// Names of the library: in toolkits up to 12, and in later ones.
const NAMES: [&str; 4] = ["libnvToolsExt.so.1", "libnvToolsExt.so", "libnvtx3interop.so.1", "libnvtx3interop.so"];

type Push = unsafe extern "C" fn(*const c_char) -> c_int;
type Pop = unsafe extern "C" fn() -> c_int;

/// The ranges of a tape's device, opened and closed by its thread.
#[derive(Debug)]
pub struct Ranges {
    push: Push,
    pop: Pop,
    step: CString,
    /// Names by call of the schedule.
    calls: Vec<CString>,
    /// Names by command of the tape.
    commands: Vec<CString>,
}

/// The open ranges within a step, closed on drop.
pub struct Open<'a> {
    ranges: &'a Ranges,
    /// Number of open ranges: that of the step, and that of a call inside it.
    depth: usize,
    call: Option<u32>,
}

/// A range that closes on drop.
pub struct Range<'a>(&'a Ranges);

impl Ranges {
    /// The ranges of a device's tape, if the library is installed.
    pub fn new(search: &Search, program: &Program, tape: &Tape) -> Option<Ranges> {
        let library = search.open_if_there(&NAMES)?;
        // SAFETY: the signatures are those of nvToolsExt.h, and the library is never closed.
        let (push, pop) = unsafe { (*library.get(b"nvtxRangePushA\0").ok()?, *library.get(b"nvtxRangePop\0").ok()?) };
        let call = |call: &Call| {
            let (what, microbatch) = match *call {
                Call::Run { body, microbatch } => (program.bodies[body as usize].name.clone(), microbatch),
                Call::Send { transfer, microbatch, .. } => (format!("send {transfer}"), microbatch),
                Call::Receive { transfer, microbatch } => (format!("receive {transfer}"), microbatch),
            };
            microbatch.map_or(what.clone(), |m| format!("{what} of microbatch {m}"))
        };
        Some(Ranges {
            push,
            pop,
            step: text(format!("step of device {}", tape.rank)),
            calls: program.schedule.iter().map(|c| text(call(c))).collect(),
            commands: tape.commands.iter().map(|c| text(title(program, tape, &c.what))).collect(),
        })
    }

    fn push(&self, name: &CString) -> Range<'_> {
        // SAFETY: the text ends with a zero, and NVTX keeps no pointer to it.
        unsafe { (self.push)(name.as_ptr()) };
        Range(self)
    }

    /// Opens the range of a step.
    pub fn step(&self) -> Open<'_> {
        std::mem::forget(self.push(&self.step));
        Open { ranges: self, depth: 1, call: None }
    }
}

impl<'a> Open<'a> {
    /// Opens the range of a command. If the call changes, first closes the range of the old call and opens that of the
    /// new.
    pub fn command(&mut self, index: usize, call: Option<u32>) -> Range<'a> {
        if call != self.call {
            self.close_to(1);
            if let Some(name) = call.and_then(|call| self.ranges.calls.get(call as usize)) {
                std::mem::forget(self.ranges.push(name));
                self.depth += 1;
            }
            self.call = call;
        }
        // There are as many names as the tape has commands.
        self.ranges.push(&self.ranges.commands[index])
    }

    fn close_to(&mut self, depth: usize) {
        while self.depth > depth {
            drop(Range(self.ranges));
            self.depth -= 1;
        }
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.close_to(0);
    }
}

impl Drop for Range<'_> {
    fn drop(&mut self) {
        // SAFETY: it closes the range that this thread opened last.
        unsafe { (self.0.pop)() };
    }
}

/// A C string, without zeros inside.
fn text(name: String) -> CString {
    CString::new(name.replace('\0', "")).unwrap_or_default()
}

/// Names a command by its operation and the model's value: `matmul: transformer.h.0.mlp (dot_general)`.
fn title(program: &Program, tape: &Tape, what: &What) -> String {
    let mut title = what.verb().to_string();
    let accesses = tape.accesses(what);
    // Named after the value that it writes or, if it writes none here, the one that it reads.
    let Some(access) = accesses.iter().rev().find(|a| a.writes).or(accesses.first()) else { return title };
    // Writing to a string cannot fail.
    let _ = match tape.region(access.region).content {
        Content::Buffer { buffer, .. } => write!(title, ": {}", program.buffer(buffer).name),
        Content::Value { body, value, .. } | Content::Constant { body, value } => {
            match program.bodies[body as usize].graph.nodes.get(value.index()) {
                Some(node) if node.name.is_empty() => write!(title, ": {}", node.op.name()),
                Some(node) => write!(title, ": {} ({})", node.name, node.op.name()),
                None => Ok(()),
            }
        }
        Content::Staging { .. } => Ok(()),
    };
    title
}
