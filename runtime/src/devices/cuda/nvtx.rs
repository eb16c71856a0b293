//! Ranges for profilers (NVTX), named as the plan names what is run: around each call of a body, and within it around each command.
//!
//! NVTX's functions do nothing unless a profiler listens. Where the library is not installed there are no ranges, and nothing is missed.

use super::library::Search;
use crate::tape::{Content, Tape, What};
use altiplano_ir::program::{Call, Programs};
use std::ffi::{CString, c_char, c_int};
use std::fmt::Write;

/// The library under the names that it has in toolkits up to 12 and since then.
const NAMES: [&str; 4] = ["libnvToolsExt.so.1", "libnvToolsExt.so", "libnvtx3interop.so.1", "libnvtx3interop.so"];

type Push = unsafe extern "C" fn(*const c_char) -> c_int;
type Pop = unsafe extern "C" fn() -> c_int;

/// The ranges of a tape's device, which are opened and closed by its thread.
#[derive(Debug)]
pub struct Ranges {
    push: Push,
    pop: Pop,
    step: CString,
    /// By call of the schedule.
    calls: Vec<CString>,
    /// By command of the tape.
    commands: Vec<CString>,
}

/// The ranges that are open within a step, which close when it is dropped.
pub struct Open<'a> {
    ranges: &'a Ranges,
    /// Those of the step and a call, from the outside.
    depth: usize,
    call: Option<u32>,
}

/// A range that closes when it is dropped.
pub struct Range<'a>(&'a Ranges);

impl Ranges {
    /// Those of a device's tape; none where there is no library.
    pub fn new(search: &Search, programs: &Programs, tape: &Tape) -> Option<Ranges> {
        let library = search.open_if_there(&NAMES)?;
        // SAFETY: the signatures are those of nvToolsExt.h, and the library is never closed.
        let (push, pop) = unsafe { (*library.get(b"nvtxRangePushA\0").ok()?, *library.get(b"nvtxRangePop\0").ok()?) };
        let program = &programs.programs[tape.program as usize];
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
            commands: tape.commands.iter().map(|c| text(title(programs, tape, &c.what))).collect(),
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
    /// Opens the range of a command, and before it that of its call where that is another than of the command before.
    pub fn command(&mut self, index: usize, call: Option<u32>) -> Range<'a> {
        if call != self.call {
            self.close_to(1);
            if let Some(name) = call.and_then(|call| self.ranges.calls.get(call as usize)) {
                std::mem::forget(self.ranges.push(name));
                self.depth += 1;
            }
            self.call = call;
        }
        // As many as the tape has commands.
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
        // SAFETY: it closes what this thread opened last.
        unsafe { (self.0.pop)() };
    }
}

/// What NVTX takes: nothing after a zero.
fn text(name: String) -> CString {
    CString::new(name.replace('\0', "")).unwrap_or_default()
}

/// `matmul: transformer.h.0.mlp (dot_general)`: what a command does, and for which value by the model's name.
fn title(programs: &Programs, tape: &Tape, what: &What) -> String {
    let mut title = what.verb().to_string();
    let accesses = tape.accesses(what);
    // What it writes says what it is for, or where it writes nothing here, what it reads.
    let Some(access) = accesses.iter().rev().find(|a| a.writes).or(accesses.first()) else { return title };
    let program = &programs.programs[tape.program as usize];
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
