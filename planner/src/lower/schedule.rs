//! The order of a stage's calls: microbatches under the plan's schedule, then the reduction and the update.

use super::StageContext;
use super::stage::{Links, Lowered};
use altiplano_ir::graph::ValueId;
use altiplano_ir::plan::Schedule;
use altiplano_ir::program::{BufferId, Call, Program, TransferId};
use std::collections::BTreeMap;

/// Forward (`true`) and backward (`false`) calls of stage `stage` of `num_stages`, each with its microbatch.
pub fn order(schedule: Schedule, num_microbatches: u32, num_stages: u32, stage: u32) -> Vec<(bool, u32)> {
    let ahead = schedule.in_flight(num_microbatches, num_stages, stage);
    let forwards = (0..num_microbatches).map(|m| (true, m));
    let mut calls: Vec<(bool, u32)> = forwards.clone().take(ahead as usize).collect();
    for m in 0..num_microbatches {
        calls.push((false, m));
        calls.extend(forwards.clone().nth((ahead + m) as usize));
    }
    calls
}

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
    let stages = cx.plan.stages.len() as u32;
    for (is_forward, m) in order(cx.plan.schedule, cx.plan.num_microbatches, stages, here) {
        let microbatch = Some(m);
        let (body, receives) = if is_forward { (FORWARD, &forward_in) } else { (BACKWARD, &backward_in) };
        schedule.extend(receives.iter().map(|&transfer| Call::Receive { transfer, microbatch }));
        schedule.push(Call::Run { body, microbatch });
        if is_forward {
            schedule.extend(send(&forward_out, &lowered.backward.frees, microbatch));
        } else {
            schedule.extend(send(&backward_out, &[], microbatch));
        }
    }
    if !lowered.reduce.writes.is_empty() {
        schedule.push(Call::Run { body: REDUCE, microbatch: None });
        schedule.extend(send(&tied_out, &lowered.update.frees, None));
        schedule.extend(incoming(&links.tied).into_iter().map(|transfer| Call::Receive { transfer, microbatch: None }));
    }
    schedule.push(Call::Run { body: UPDATE, microbatch: None });
    Program {
        devices: cx.stage.devices.clone(),
        mesh: cx.mesh.clone(),
        buffers: lowered.buffers,
        bodies: vec![lowered.forward, lowered.backward, lowered.reduce, lowered.update],
        schedule,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(calls: &[(bool, u32)]) -> String {
        calls
            .iter()
            .map(|&(f, m)| format!("{}{m} ", if f { "F" } else { "B" }))
            .collect::<String>()
            .trim_end()
            .to_string()
    }

    #[test]
    fn one_forward_one_backward_after_warm_up() {
        assert_eq!(text(&order(Schedule::OneFOneB, 4, 3, 0)), "F0 F1 F2 B0 F3 B1 B2 B3");
        assert_eq!(text(&order(Schedule::OneFOneB, 4, 3, 2)), "F0 B0 F1 B1 F2 B2 F3 B3");
        assert_eq!(text(&order(Schedule::OneFOneB, 1, 3, 0)), "F0 B0");
        assert_eq!(text(&order(Schedule::GPipe, 3, 2, 1)), "F0 F1 F2 B0 B1 B2");
    }
}
