//! The order of a stage's calls: microbatches under the plan's schedule, then the reduction and the update.

use super::StageContext;
use super::stage::{Links, Lowered};
use altiplano_cost_models::pipeline::{PipelineCall, call_at};
use altiplano_ir::graph::ValueId;
use altiplano_ir::program::{BufferId, Call, Program, TransferId};
use std::collections::BTreeMap;

/// Puts a stage's program together.
pub fn program(cx: &StageContext<'_>, lowered: Lowered, links: &Links) -> Program {
    const FORWARD: u32 = 0;
    const BACKWARD: u32 = 1;
    const REDUCE: u32 = 2;
    const UPDATE: u32 = 3;
    let here = cx.index;
    let outgoing = |links: &BTreeMap<(ValueId, u32, u32), TransferId>, sends: &BTreeMap<ValueId, BufferId>| {
        let mut sent: Vec<(TransferId, BufferId)> = links
            .iter()
            .filter(|((_, s, _), _)| *s == here)
            .filter_map(|((v, _, _), &t)| sends.get(v).map(|&b| (t, b)))
            .collect();
        sent.sort_by_key(|&(t, b)| (b, t));
        sent
    };
    let incoming = |links: &BTreeMap<(ValueId, u32, u32), TransferId>| -> Vec<TransferId> {
        links.iter().filter(|((_, _, t), _)| *t == here).map(|(_, &t)| t).collect()
    };
    // A sent buffer is freed by its last send, unless a later body reads and frees it.
    let send = |sent: &[(TransferId, BufferId)], kept: &[BufferId], microbatch: Option<u32>| -> Vec<Call> {
        let mut calls = Vec::new();
        for (i, &(transfer, buffer)) in sent.iter().enumerate() {
            let last = sent.get(i + 1).is_none_or(|&(_, next)| next != buffer);
            calls.push(Call::Send { transfer, microbatch, free: last && !kept.contains(&buffer) });
        }
        calls
    };
    let forward_out = outgoing(&links.forward, &lowered.sends_forward);
    let backward_out = outgoing(&links.backward, &lowered.sends_backward);
    let tied_out = outgoing(&links.tied, &lowered.sends_tied);
    let forward_in = incoming(&links.forward);
    let backward_in = incoming(&links.backward);

    let mut schedule = Vec::new();
    let stages = cx.plan.stages.len();
    // The order is the cost model's, so that what is simulated is what runs.
    let call = |position| call_at(cx.plan.schedule, here as usize, stages, cx.plan.num_microbatches, position);
    for call in (0..).map_while(call) {
        let (body, receives, sends, kept, m) = match call {
            PipelineCall::Forward { microbatch } => {
                (FORWARD, &forward_in, &forward_out, lowered.backward.frees.as_slice(), microbatch)
            }
            PipelineCall::Backward { microbatch } => (BACKWARD, &backward_in, &backward_out, [].as_slice(), microbatch),
        };
        let microbatch = Some(m);
        schedule.extend(receives.iter().map(|&transfer| Call::Receive { transfer, microbatch }));
        schedule.push(Call::Run { body, microbatch });
        schedule.extend(send(sends, kept, microbatch));
    }
    if !lowered.reduce.writes.is_empty() {
        schedule.push(Call::Run { body: REDUCE, microbatch: None });
        schedule.extend(send(&tied_out, &lowered.update.frees, None));
        schedule.extend(incoming(&links.tied).into_iter().map(|transfer| Call::Receive { transfer, microbatch: None }));
    }
    if cx.plan.schedule.trains() {
        schedule.push(Call::Run { body: UPDATE, microbatch: None });
    }
    Program {
        devices: cx.stage.devices.clone(),
        mesh: cx.mesh.clone(),
        buffers: lowered.buffers,
        bodies: vec![lowered.forward, lowered.backward, lowered.reduce, lowered.update],
        schedule,
    }
}
