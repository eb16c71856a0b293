//! All programs of a session on their devices, driven by one thread.

use super::Fault;
use super::compile::Compiler;
use super::stage::{Spread, Stage};
use super::transfer::Link;
use crate::device::Reply;
use crate::error::RuntimeError;
use crate::host::HostTensor;
use crate::roster::Roster;
use altiplano_ir::program::{Call, TransferId};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

pub(super) struct Running {
    pub stages: Vec<Stage>,
    links: Vec<Link>,
    compiler: Rc<Compiler>,
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
    /// Compiles the bodies of all programs. Parameters and state are zero.
    pub(super) fn new(roster: &Roster, compiler: &Rc<Compiler>) -> Result<Running, RuntimeError> {
        let mut running = Running::without_weights(roster, compiler)?;
        running.stages.iter_mut().try_for_each(Stage::allocate)?;
        Ok(running)
    }

    /// As [`Running::new`], with no parameters and no state.
    pub(super) fn without_weights(roster: &Roster, compiler: &Rc<Compiler>) -> Result<Running, RuntimeError> {
        let stage = |plan: &Arc<_>| Stage::new(Arc::clone(plan), compiler.clone());
        let stages = roster.plans.iter().map(stage).collect::<Result<Vec<Stage>, _>>()?;
        let of = |program: u32| {
            let stage = &stages[program as usize];
            (&stage.plan.program, stage.devices.clone())
        };
        let transfers = roster.plans.first().map_or(&[][..], |plan| &plan.transfers);
        let links = transfers.iter().map(|(transfer, messages)| Link::new(transfer, messages, of)).collect();
        Ok(Running { stages, links, compiler: compiler.clone(), mail: FxHashMap::default() })
    }

    /// Runs a step. The replies are those of all devices, in order of rank.
    pub(super) fn step(
        &mut self,
        inputs: &Arc<BTreeMap<String, HostTensor>>,
        scalars: &BTreeMap<String, f64>,
        results: bool,
    ) -> Result<Vec<Reply>, RuntimeError> {
        let mut turns = Vec::new();
        for stage in &mut self.stages {
            stage.begin(inputs.clone(), scalars, results).map_err(|fault| fault.at(&stage.place))?;
            let all = stage.plan.program.turns().filter(|(_, late)| !late || stage.has_late_calls());
            turns.push(all.map(|(position, late)| Turn::Scheduled { position, late }).collect());
        }
        self.advance(turns)?;
        let mut replies = Vec::new();
        for stage in &mut self.stages {
            stage.end();
            let (losses, parts) = stage.finish().map_err(|fault| fault.at(&stage.place))?;
            for (position, results) in parts.into_iter().enumerate() {
                let losses = if position == 0 { losses.clone() } else { Vec::new() };
                replies.push(Reply::Stepped { losses, results, spans: Vec::new(), ended: Instant::now() });
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
                Some(program) => {
                    let call = match turns[program].front() {
                        Some(Turn::Scheduled { position, .. }) => *position,
                        _ => self.stages[program].plan.program.schedule.len(),
                    };
                    return Err(RuntimeError::Deadlock { program: program as u32, call });
                }
            }
        }
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
                let buffer = stage.plan.transfers[transfer.0 as usize].0.source.1;
                let sent = self.links[transfer.0 as usize].carry(&self.compiler, stage.find(buffer, microbatch)?)?;
                self.mail.entry((transfer, microbatch)).or_default().push_back(sent);
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
