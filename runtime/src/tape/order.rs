//! A total order of the moves of all programs in a step, in which every transfer is one point.
//!
//! A send never waits in a schedule, but on a device both sides of a transfer must be present. So a transfer happens
//! when its receiver reaches it, at the point that the sender has reached by then. Waits only go backwards in this
//! order. So reusing memory after a transfer cannot cause a deadlock.

use altiplano_ir::program::{Call, Phase, Programs, TransferId};
use std::collections::BTreeMap;

/// A move of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Move {
    /// A body runs.
    Run { call: u32, body: u32, microbatch: Option<u32> },
    /// Keeps a buffer's instance for a transfer; with `free`, nothing else needs it any more.
    Offer { call: u32, transfer: TransferId, microbatch: Option<u32>, free: bool },
    /// Performs the transfer; this program sends, receives, or both.
    Transfer { call: u32, transfer: TransferId, microbatch: Option<u32>, sends: bool, receives: bool },
}

/// A deadlock of the schedules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("program {program} waits at call {call} for a transfer that is never sent")]
pub struct Stuck {
    pub program: u32,
    pub call: u32,
}

/// The moves of each program; all these orders are parts of one total order.
pub(crate) fn order(programs: &Programs) -> Result<Vec<Vec<Move>>, Stuck> {
    let mut moves: Vec<Vec<Move>> = vec![Vec::new(); programs.programs.len()];
    let mut next: Vec<usize> = vec![0; moves.len()];
    // Clocks in arbitrary units; only their order matters.
    let mut clock: Vec<u64> = vec![0; moves.len()];
    let mut offered: BTreeMap<(TransferId, Option<u32>), (u32, u64)> = BTreeMap::new();
    loop {
        let waits = |p: usize| match programs.programs[p].schedule.get(next[p]) {
            Some(&Call::Receive { transfer, microbatch }) => !offered.contains_key(&(transfer, microbatch)),
            Some(_) => false,
            None => true,
        };
        let Some(p) = (0..moves.len()).filter(|&p| !waits(p)).min_by_key(|&p| clock[p]) else { break };
        let call = next[p] as u32;
        let program = &programs.programs[p];
        match program.schedule[next[p]] {
            Call::Run { body, microbatch } => {
                clock[p] += match program.bodies.get(body as usize).map(|b| b.phase) {
                    Some(Phase::Backward) => 2,
                    _ => 1,
                };
                moves[p].push(Move::Run { call, body, microbatch });
            }
            Call::Send { transfer, microbatch, free } => {
                offered.insert((transfer, microbatch), (call, clock[p]));
                moves[p].push(Move::Offer { call, transfer, microbatch, free });
            }
            Call::Receive { transfer, microbatch } => {
                let source = programs.transfers[transfer.0 as usize].source.0 as usize;
                if let Some((sent, at)) = offered.remove(&(transfer, microbatch)) {
                    clock[p] = clock[p].max(at);
                    let both = source == p;
                    if !both {
                        let side = Move::Transfer { call: sent, transfer, microbatch, sends: true, receives: false };
                        moves[source].push(side);
                    }
                    moves[p].push(Move::Transfer { call, transfer, microbatch, sends: both, receives: true });
                }
            }
        }
        next[p] += 1;
    }
    for (p, program) in programs.programs.iter().enumerate() {
        if next[p] < program.schedule.len() {
            return Err(Stuck { program: p as u32, call: next[p] as u32 });
        }
    }
    Ok(moves)
}
