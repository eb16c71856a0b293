//! The calls of a step: each instance of a buffer is there when it is read, and comes from the one call that should
//! have made it. Bodies are examined for one microbatch that stands for all, so this check carries the proof over.

use crate::{Gap, Kind};
use altiplano_ir::program::{BufferId, BufferKind, Call, Phase, Program, Programs, TransferId};
use rustc_hash::{FxHashMap, FxHashSet};

type Instance = (BufferId, Option<u32>);

/// The facts that the schedules establish.
pub struct Calls {
    /// For each program, true for the bodies that run.
    pub runs: Vec<Vec<bool>>,
    /// For each transfer, true if it happens.
    pub happens: Vec<bool>,
}

/// State of one program's check.
struct Checked<'a> {
    number: u32,
    program: &'a Program,
    programs: &'a Programs,
    live: FxHashSet<Instance>,
    freed: FxHashSet<Instance>,
    /// How often each body has run.
    ran: Vec<u32>,
    ran_for: FxHashSet<(u32, Option<u32>)>,
    writers: FxHashMap<BufferId, Vec<u32>>,
    updated: bool,
    /// Parameters and states that have their new values.
    renewed: FxHashSet<BufferId>,
}

/// Checks the schedules of all programs.
pub fn check(programs: &Programs) -> Result<Calls, Gap> {
    let mut sent: FxHashSet<(TransferId, Option<u32>)> = FxHashSet::default();
    let mut received: FxHashSet<(TransferId, Option<u32>)> = FxHashSet::default();
    let mut runs = Vec::new();
    for (number, program) in (0u32..).zip(&programs.programs) {
        if program.runs_ahead() {
            let text = "steps overlap: there is no rule for weights of an earlier step".to_string();
            return Err(Gap::new(Kind::NoRule, text).of_program(number));
        }
        let mut checked = Checked::new(number, program, programs);
        for call in &program.schedule {
            match *call {
                Call::Run { body, microbatch } => checked.run(body, microbatch)?,
                Call::Send { transfer, microbatch, free } => {
                    checked.send(transfer, microbatch, free)?;
                    if !sent.insert((transfer, microbatch)) {
                        return Err(checked.gap(format!("{transfer} sends the same instance twice")));
                    }
                }
                Call::Receive { transfer, microbatch } => {
                    checked.receive(transfer, microbatch)?;
                    if !received.insert((transfer, microbatch)) {
                        return Err(checked.gap(format!("{transfer} receives the same instance twice")));
                    }
                }
            }
        }
        checked.complete()?;
        runs.push(checked.ran.iter().map(|&n| n > 0).collect());
    }
    if let Some((transfer, microbatch)) = sent.symmetric_difference(&received).min() {
        let which = microbatch.map_or(String::new(), |m| format!(" for microbatch {m}"));
        return Err(Gap::new(Kind::Differs, format!("{transfer} is not both sent and received{which}")));
    }
    let happens = |t: usize| received.iter().any(|(transfer, _)| transfer.0 as usize == t);
    let happens = (0..programs.transfers.len()).map(happens).collect();
    Ok(Calls { runs, happens })
}

impl<'a> Checked<'a> {
    fn new(number: u32, program: &'a Program, programs: &'a Programs) -> Checked<'a> {
        let mut writers: FxHashMap<BufferId, Vec<u32>> = FxHashMap::default();
        for (at, body) in (0u32..).zip(&program.bodies) {
            for (buffer, _) in &body.writes {
                writers.entry(*buffer).or_default().push(at);
            }
        }
        Checked {
            number,
            program,
            programs,
            live: FxHashSet::default(),
            freed: FxHashSet::default(),
            ran: vec![0; program.bodies.len()],
            ran_for: FxHashSet::default(),
            writers,
            updated: false,
            renewed: FxHashSet::default(),
        }
    }

    fn gap(&self, text: String) -> Gap {
        Gap::new(Kind::Differs, text).of_program(self.number)
    }

    fn kind(&self, buffer: BufferId) -> Result<&'a BufferKind, Gap> {
        match self.program.buffers.get(buffer.0 as usize) {
            Some(buffer) => Ok(&buffer.kind),
            None => Err(self.gap(format!("there is no {buffer}"))),
        }
    }

    fn run(&mut self, at: u32, microbatch: Option<u32>) -> Result<(), Gap> {
        let Some(body) = self.program.bodies.get(at as usize) else {
            return Err(self.gap(format!("there is no body {at}")));
        };
        let here = |gap: Gap| Gap { body: Some(body.name.clone()), ..gap };
        if body.phase.is_of_microbatch() != microbatch.is_some() {
            return Err(here(self.gap("is called for the wrong kind of instance".into())));
        }
        if microbatch.is_some_and(|m| m >= self.programs.num_microbatches) {
            return Err(here(self.gap("is called for a microbatch that is none of the step's".into())));
        }
        if !self.ran_for.insert((at, microbatch)) {
            return Err(here(self.gap("is called twice for the same instance".into())));
        }
        if self.updated && body.phase.is_of_microbatch() {
            return Err(here(self.gap("runs after the weights of its step were updated".into())));
        }
        self.updated |= body.phase == Phase::Update;
        for &(v, buffer) in &body.reads {
            let gap =
                |checked: &Self, text: String| Gap { value: Some(v), buffer: Some(buffer), ..here(checked.gap(text)) };
            match self.kind(buffer)? {
                BufferKind::Value if !self.live.contains(&(buffer, microbatch)) => {
                    return Err(gap(self, format!("is read when there is no instance{}", of(microbatch))));
                }
                BufferKind::Input { .. } if microbatch.is_none() || self.freed.contains(&(buffer, microbatch)) => {
                    return Err(gap(self, "is an input that is not there".into()));
                }
                BufferKind::Accumulator { .. } if !body.writes.iter().any(|w| w.0 == buffer) => {
                    let full = |w: &u32| self.ran[*w as usize] == self.programs.num_microbatches;
                    let writers = self.writers.get(&buffer);
                    let complete = writers.is_some_and(|w| w.len() == 1 && w.iter().all(full));
                    if !complete && self.program.writes(buffer) {
                        return Err(gap(self, "is read before all microbatches have been added".into()));
                    }
                }
                BufferKind::Parameter { .. } | BufferKind::State { .. } if self.renewed.contains(&buffer) => {
                    return Err(gap(self, "is read after its update".into()));
                }
                BufferKind::Loss | BufferKind::Output { .. } => {
                    return Err(gap(self, "is a result, and no body may read it".into()));
                }
                _ => {}
            }
        }
        for &(buffer, v) in &body.writes {
            let gap =
                |checked: &Self, text: String| Gap { value: Some(v), buffer: Some(buffer), ..here(checked.gap(text)) };
            match self.kind(buffer)? {
                BufferKind::Value if !self.live.insert((buffer, microbatch)) => {
                    return Err(gap(self, format!("overwrites an instance{}", of(microbatch))));
                }
                BufferKind::Input { .. } | BufferKind::Scalar { .. } => {
                    return Err(gap(self, "is written, but comes from outside".into()));
                }
                BufferKind::Parameter { .. } | BufferKind::State { .. } if body.phase != Phase::Update => {
                    return Err(gap(self, "is written outside the update".into()));
                }
                BufferKind::Parameter { .. } | BufferKind::State { .. } => {
                    self.renewed.insert(buffer);
                }
                _ => {}
            }
        }
        for &buffer in &body.frees {
            self.live.remove(&(buffer, microbatch));
            self.freed.insert((buffer, microbatch));
        }
        self.ran[at as usize] += 1;
        Ok(())
    }

    fn send(&mut self, transfer: TransferId, microbatch: Option<u32>, free: bool) -> Result<(), Gap> {
        let Some(of_transfer) = self.programs.transfers.get(transfer.0 as usize) else {
            return Err(self.gap(format!("there is no {transfer}")));
        };
        let (program, buffer) = of_transfer.source;
        if program != self.number || !self.live.contains(&(buffer, microbatch)) {
            let gap = self.gap(format!("{transfer} sends an instance that is not there{}", of(microbatch)));
            return Err(Gap { buffer: Some(buffer), ..gap });
        }
        if free {
            self.live.remove(&(buffer, microbatch));
        }
        Ok(())
    }

    fn receive(&mut self, transfer: TransferId, microbatch: Option<u32>) -> Result<(), Gap> {
        let Some(of_transfer) = self.programs.transfers.get(transfer.0 as usize) else {
            return Err(self.gap(format!("there is no {transfer}")));
        };
        let (program, buffer) = of_transfer.target;
        let is_value = program == self.number && *self.kind(buffer)? == BufferKind::Value;
        if !is_value || !self.live.insert((buffer, microbatch)) {
            let gap = self.gap(format!("{transfer} overwrites an instance{}", of(microbatch)));
            return Err(Gap { buffer: Some(buffer), ..gap });
        }
        Ok(())
    }

    /// Checks that every body that runs has run for every microbatch, or once.
    fn complete(&self) -> Result<(), Gap> {
        for (body, &ran) in self.program.bodies.iter().zip(&self.ran) {
            let wanted = if body.phase.is_of_microbatch() { self.programs.num_microbatches } else { 1 };
            if ran != wanted && !(ran == 0 && body.writes.is_empty()) {
                let gap = self.gap(format!("runs {ran} times instead of {wanted}"));
                return Err(Gap { body: Some(body.name.clone()), ..gap });
            }
        }
        Ok(())
    }
}

fn of(microbatch: Option<u32>) -> String {
    microbatch.map_or(String::new(), |m| format!(" of microbatch {m}"))
}
