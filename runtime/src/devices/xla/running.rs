//! The programs of a process on their devices, driven by one thread.

use super::Fault;
use super::compile::Compiler;
use super::stage::{Finished, Spread, Stage};
use super::team::Share;
use super::transfer::Link;
use crate::device::Reply;
use crate::error::RuntimeError;
use crate::host::HostTensor;
use crate::mailbox::Tag;
use crate::ranks::post::Letter;
use crate::roster::Roster;
use altiplano_ir::program::{Call, Transfer, TransferId};
use altiplano_xla::pjrt::Order;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

pub(super) struct Running {
    /// The stages of this process, in the order of the programs.
    pub stages: Vec<Stage>,
    links: Vec<Link>,
    compiler: Rc<Compiler>,
    share: Rc<Share>,
    /// Values that were sent and not received yet, on the devices of their receivers.
    mail: FxHashMap<(TransferId, Option<u32>), VecDeque<Spread>>,
}

/// A call of a program: its position in the schedule and whether it belongs to the previous step, or a call of a flush.
#[derive(Clone, Copy)]
enum Turn {
    Scheduled { position: usize, late: bool },
    Flush(Call),
}

impl Running {
    /// Compiles the bodies of this process's programs, to hold few bytes where they would hold more than the limit
    /// otherwise. Parameters and state are zero.
    pub(super) fn new(
        roster: &Roster,
        compiler: &Rc<Compiler>,
        share: &Rc<Share>,
        limit_bytes: Option<u64>,
    ) -> Result<Running, RuntimeError> {
        let mut running = Running::without_weights(roster, compiler, share)?;
        let transfers: Vec<Transfer> = roster
            .plans
            .iter()
            .take(1)
            .flat_map(|plan| &plan.transfers)
            .map(|(transfer, _)| transfer.clone())
            .collect();
        for stage in &mut running.stages {
            limit_bytes.map_or(Ok(()), |bytes| stage.fit_into(bytes, &transfers))?;
        }
        running.stages.iter_mut().try_for_each(Stage::allocate)?;
        Ok(running)
    }

    /// As [`Running::new`], with no parameters and no state.
    pub(super) fn without_weights(
        roster: &Roster,
        compiler: &Rc<Compiler>,
        share: &Rc<Share>,
    ) -> Result<Running, RuntimeError> {
        let own = share.own.iter().map(|&p| roster.plans[p].clone());
        let stages =
            own.map(|plan| Stage::new(plan, compiler.clone(), Order::Overlap)).collect::<Result<Vec<Stage>, _>>()?;
        let of = |program: u32| {
            let program = &roster.plans[program as usize].program;
            (program, compiler.places(&program.devices))
        };
        let transfers = roster.plans.first().map_or(&[][..], |plan| &plan.transfers);
        let links = transfers.iter().map(|(transfer, messages)| Link::new(transfer, messages, of)).collect();
        let (compiler, share) = (compiler.clone(), share.clone());
        Ok(Running { stages, links, compiler, share, mail: FxHashMap::default() })
    }

    /// Runs a step, recorded in times from `origin` if there is one. The replies are those of this process's devices, in order of rank.
    pub(super) fn step(
        &mut self,
        inputs: &Arc<BTreeMap<String, HostTensor>>,
        scalars: &BTreeMap<String, f64>,
        results: bool,
        origin: Option<Instant>,
    ) -> Result<Vec<Reply>, RuntimeError> {
        let mut turns = Vec::new();
        for stage in &mut self.stages {
            stage.begin(inputs.clone(), scalars, results).map_err(|fault| fault.at(&stage.place))?;
            stage.record(origin)?;
            let all = stage.plan.program.turns().filter(|(_, late)| !late || stage.has_late_calls());
            turns.push(all.map(|(position, late)| Turn::Scheduled { position, late }).collect());
        }
        self.advance(turns)?;
        let mut replies = Vec::new();
        for stage in &mut self.stages {
            stage.end();
            let Finished { mut losses, parts, mut spans } = stage.finish().map_err(|fault| fault.at(&stage.place))?;
            for results in parts {
                // The first device says what is of all.
                let (losses, spans) = (std::mem::take(&mut losses), std::mem::take(&mut spans));
                replies.push(Reply::Stepped { losses, results, spans, ended: Instant::now() });
            }
        }
        Ok(replies)
    }

    /// Runs the remaining calls of the last step, then those that update copies of the weights.
    pub(super) fn flush(&mut self) -> Result<(), RuntimeError> {
        let turns = |stage: &Stage| {
            let program = &stage.plan.program;
            let late = program.num_prompt()..program.schedule.len();
            let late = late.filter(|_| stage.has_late_calls());
            let late = late.map(|position| Turn::Scheduled { position, late: true });
            late.chain(program.flush.iter().map(|&call| Turn::Flush(call))).collect()
        };
        let turns = self.stages.iter().map(turns).collect();
        self.advance(turns)?;
        for stage in &mut self.stages {
            stage.end_late();
            stage.wait().map_err(|fault| fault.at(&stage.place))?;
        }
        Ok(())
    }

    /// Runs calls of all programs. Each program goes on until it waits for a value that was not sent.
    fn advance(&mut self, mut turns: Vec<VecDeque<Turn>>) -> Result<(), RuntimeError> {
        loop {
            let mut moved = false;
            while let Some(letter) = self.share.arrived() {
                self.deliver(&letter)?;
            }
            for (p, turns) in turns.iter_mut().enumerate() {
                while let Some(&turn) = turns.front() {
                    let call = self.call_of(p, turn);
                    if let Call::Receive { transfer, microbatch } = call
                        && self.mail.get(&(transfer, microbatch)).is_none_or(VecDeque::is_empty)
                    {
                        break;
                    }
                    turns.pop_front();
                    moved = true;
                    let late = matches!(turn, Turn::Scheduled { late: true, .. });
                    if late {
                        self.stages[p].exchange();
                    }
                    self.stages[p].position = match turn {
                        Turn::Scheduled { position, .. } => Some(position),
                        Turn::Flush(_) => None,
                    };
                    let done = self.call(p, call);
                    let stage = &mut self.stages[p];
                    if let Turn::Scheduled { position, .. } = turn {
                        stage.called(position);
                    }
                    if late {
                        stage.exchange();
                    }
                    done.map_err(|fault| fault.at(&stage.place))?;
                }
            }
            match turns.iter().position(|turns| !turns.is_empty()) {
                None => return Ok(()),
                Some(_) if moved => {}
                // Another process sends the next value.
                Some(_) if self.waits_for_letter(&turns) => {
                    let letter = self.share.receive().map_err(RuntimeError::Carrier)?;
                    self.deliver(&letter)?;
                }
                Some(p) => {
                    let plan = &self.stages[p].plan;
                    let call = match turns[p].front() {
                        Some(Turn::Scheduled { position, .. }) => *position,
                        _ => plan.program.schedule.len(),
                    };
                    return Err(RuntimeError::Deadlock { program: plan.index, call });
                }
            }
        }
    }

    /// Returns whether a program's next call receives a value of another process.
    fn waits_for_letter(&self, turns: &[VecDeque<Turn>]) -> bool {
        let waits = |(p, turns): (usize, &VecDeque<Turn>)| match turns.front().map(|&turn| self.call_of(p, turn)) {
            Some(Call::Receive { transfer, .. }) => {
                let source = self.stages[p].plan.transfers[transfer.0 as usize].0.source.0;
                !self.share.has(source)
            }
            _ => false,
        };
        turns.iter().enumerate().any(waits)
    }

    /// Brings a value that another process has sent to the devices of its receivers.
    fn deliver(&mut self, letter: &Letter) -> Result<(), RuntimeError> {
        let Tag::Transfer { transfer, microbatch, .. } = Tag::decode(letter.head) else { return Ok(()) };
        let link = self.links.get(transfer.0 as usize);
        let Some(link) = link else { return Ok(()) };
        let target = self.stages[0].plan.transfers[transfer.0 as usize].0.target.0;
        let stage = self.stages.iter_mut().find(|stage| stage.plan.index == target);
        let Some(stage) = stage else { return Ok(()) };
        stage.place.activity = format!("receiving {transfer}");
        stage.place.microbatch = microbatch;
        let spread = link.unpack(&self.compiler, &letter.bytes).map_err(|fault| fault.at(&stage.place))?;
        self.mail.entry((transfer, microbatch)).or_default().push_back(spread);
        Ok(())
    }

    fn call_of(&self, p: usize, turn: Turn) -> Call {
        match turn {
            Turn::Scheduled { position, .. } => self.stages[p].plan.program.schedule[position],
            Turn::Flush(call) => call,
        }
    }

    fn call(&mut self, p: usize, call: Call) -> Result<(), Fault> {
        let stage = &mut self.stages[p];
        match call {
            Call::Run { body, microbatch } => {
                stage.place.activity = format!("body '{}'", stage.plan.program.bodies[body as usize].name);
                stage.place.microbatch = microbatch;
                stage.run(body, microbatch)
            }
            Call::Send { transfer, microbatch, free } => {
                stage.place.activity = format!("sending {transfer}");
                stage.place.microbatch = microbatch;
                let described = &stage.plan.transfers[transfer.0 as usize].0;
                let (buffer, target) = (described.source.1, described.target.0);
                let (link, value) = (&self.links[transfer.0 as usize], stage.find(buffer, microbatch)?);
                if self.share.has(target) {
                    let sent = link.carry(&self.compiler, value)?;
                    self.mail.entry((transfer, microbatch)).or_default().push_back(sent);
                } else {
                    let head = Tag::Transfer { transfer, microbatch, message: 0 }.encode();
                    self.share.send(target, Letter { head, bytes: link.pack(value)? }).map_err(Fault::Kernel)?;
                }
                if free {
                    stage.free(buffer, microbatch);
                }
                Ok(())
            }
            Call::Receive { transfer, microbatch } => {
                stage.place.activity = format!("receiving {transfer}");
                stage.place.microbatch = microbatch;
                let buffer = stage.plan.transfers[transfer.0 as usize].0.target.1;
                if let Some(spread) = self.mail.get_mut(&(transfer, microbatch)).and_then(VecDeque::pop_front) {
                    stage.insert(buffer, microbatch, spread);
                }
                Ok(())
            }
        }
    }
}
