//! Bodies that one call of a step runs after another become one program for the compiler, which then fuses across them.
//!
//! They are the bodies after the last backward pass: reductions of gradients, their norm, and updates. Backward passes
//! stay apart. Joined with the update, XLA ordered a pass that recomputes layers so that it held twice as much.

use altiplano_ir::graph::{Graph, Node, ValueId};
use altiplano_ir::op::{Input, Op, Parameter};
use altiplano_ir::program::{Body, BufferId, Call, Phase, Program};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The program with such bodies joined.
pub fn joined(program: &Program) -> Program {
    let mut result = program.clone();
    // Calls that overlap the next step stay apart, as do those that other calls repeat.
    if program.runs_ahead() {
        return result;
    }
    let groups = groups(program);
    let bodies: Vec<Joined> = groups.iter().map(|calls| Joined::new(program, calls)).collect();
    let (mut schedule, mut next) = (Vec::new(), 0);
    let mut new_bodies: Vec<Body> = Vec::new();
    let mut places = BTreeMap::new();
    for (calls, joined) in groups.iter().zip(bodies) {
        let apart = &program.schedule[next..calls.start];
        schedule.extend(apart.iter().map(|&call| moved(program, call, &mut new_bodies, &mut places)));
        schedule.push(Call::Run { body: new_bodies.len() as u32, microbatch: joined.microbatch });
        new_bodies.push(joined.body);
        next = calls.end;
    }
    let rest = &program.schedule[next..];
    schedule.extend(rest.iter().map(|&call| moved(program, call, &mut new_bodies, &mut places)));
    (result.schedule, result.bodies) = (schedule, new_bodies);
    result
}

/// A call that is not joined, with its body in its new place.
fn moved(program: &Program, call: Call, bodies: &mut Vec<Body>, places: &mut BTreeMap<u32, u32>) -> Call {
    let Call::Run { body, microbatch } = call else { return call };
    let place = *places.entry(body).or_insert_with(|| {
        bodies.push(program.bodies[body as usize].clone());
        bodies.len() as u32 - 1
    });
    Call::Run { body: place, microbatch }
}

/// The calls of a step that can be joined: runs of calls of bodies that have no other call.
fn groups(program: &Program) -> Vec<Range<usize>> {
    let mut times: BTreeMap<u32, usize> = BTreeMap::new();
    for call in &program.schedule {
        if let Call::Run { body, .. } = call {
            *times.entry(*body).or_default() += 1;
        }
    }
    let follows = |call: &Call| match call {
        Call::Run { body, .. } => {
            let phase = program.bodies[*body as usize].phase;
            times[body] == 1 && matches!(phase, Phase::Reduce | Phase::Norm | Phase::Update)
        }
        _ => false,
    };
    let mut groups: Vec<Range<usize>> = Vec::new();
    for at in (0..program.schedule.len()).filter(|&at| follows(&program.schedule[at])) {
        match groups.last_mut() {
            Some(last) if last.end == at => last.end += 1,
            _ => groups.push(at..at + 1),
        }
    }
    groups.retain(|calls| calls.len() > 1 && keeps_microbatches(program, calls));
    groups
}

fn run(call: &Call) -> Option<(u32, Option<u32>)> {
    match call {
        Call::Run { body, microbatch } => Some((*body, *microbatch)),
        _ => None,
    }
}

/// Returns true if all values that outlive the calls belong to the microbatch of the first.
fn keeps_microbatches(program: &Program, calls: &Range<usize>) -> bool {
    let all: Vec<(u32, Option<u32>)> = program.schedule[calls.clone()].iter().filter_map(run).collect();
    let freed: BTreeSet<BufferId> =
        all.iter().flat_map(|(body, _)| &program.bodies[*body as usize].frees).copied().collect();
    let first = all.first().and_then(|(_, microbatch)| *microbatch);
    all.iter().all(|&(body, microbatch)| {
        let written = program.bodies[body as usize].writes.iter().map(|(id, _)| id);
        let mut outlives = written.filter(|id| program.buffer(**id).kind.is_of_step() && !freed.contains(id));
        microbatch == first || (microbatch.is_none() && outlives.next().is_none())
    })
}

struct Joined {
    body: Body,
    microbatch: Option<u32>,
}

impl Joined {
    fn new(program: &Program, calls: &Range<usize>) -> Joined {
        let all: Vec<(u32, Option<u32>)> = program.schedule[calls.clone()].iter().filter_map(run).collect();
        let bodies: Vec<&Body> = all.iter().map(|(body, _)| &program.bodies[*body as usize]).collect();
        let mut graph = Graph::new("joined");
        let mut reads = Vec::new();
        let (mut held, mut written) = (BTreeMap::new(), BTreeSet::new());
        for body in &bodies {
            let leaves: BTreeMap<ValueId, BufferId> = body.reads.iter().copied().collect();
            let mut map: Vec<ValueId> = Vec::with_capacity(body.graph.len());
            for (v, node) in body.graph.values().zip(&body.graph.nodes) {
                let value = match leaves.get(&v) {
                    Some(id) => *held.entry(*id).or_insert_with(|| {
                        let mut leaf = node.clone();
                        if let Op::Input(Input { name, .. }) | Op::Parameter(Parameter { name, .. }) = &mut leaf.op {
                            // Stages of one program number their own buffers.
                            *name = id.to_string();
                        }
                        let leaf = graph.append(leaf);
                        reads.push((leaf, *id));
                        leaf
                    }),
                    None => {
                        let operands = node.operands.iter().map(|o| map[o.index()]).collect();
                        graph.append(Node { operands, ..node.clone() })
                    }
                };
                map.push(value);
            }
            for (id, value) in &body.writes {
                held.insert(*id, map[value.index()]);
                written.insert(*id);
            }
        }
        let freed: BTreeSet<BufferId> = bodies.iter().flat_map(|body| &body.frees).copied().collect();
        let outlives = |id: &BufferId| !(written.contains(id) && freed.contains(id));
        let writes = written.iter().copied().filter(outlives).map(|id| (id, held[&id])).collect();
        let frees = freed.iter().copied().filter(|id| !written.contains(id)).collect();
        let names: Vec<&str> = bodies.iter().map(|body| body.name.as_str()).collect();
        let first = bodies[0];
        let body = Body { name: names.join(", "), stage: first.stage, phase: first.phase, graph, reads, writes, frees };
        Joined { body, microbatch: all[0].1 }
    }
}
