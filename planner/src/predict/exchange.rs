//! Simulates how workers and parameter servers exchange gradients and weights. Each device makes its calls in order,
//! and each link carries one message at a time in each direction. So messages of all workers to one server queue
//! (incast).

use crate::lower::{DedupedPrograms, Prices};
use crate::predict::timing::{BodyWork, played_in_order};
use altiplano_cost_models::pipeline::StageTimes;
use altiplano_cost_models::timeline::{Host, play, tasks};
use altiplano_cost_models::{CostModel, Costs, transfer_path};
use altiplano_ir::cluster::Group;
use altiplano_ir::plan::Plan;
use altiplano_ir::program::{Call, Program, TransferId};
use altiplano_ir::servers::ParameterServers;
use rustc_hash::FxHashMap;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// Prediction of a step with parameter servers.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Exchanged {
    /// Seconds of a step: of a single one if servers wait for workers, otherwise of one in steady state.
    pub step_s: f64,
    /// Seconds of a step in which a worker's messages are under way.
    pub sent_s: f64,
    /// For each server, the seconds of a step in which it computes, and in which its busiest link is taken.
    pub servers: Vec<(f64, f64)>,
    /// Start and end of the calls of each program's schedule in the first step.
    pub calls: Vec<Vec<(f64, f64)>>,
}

/// Simulates the programs of a plan with servers. `times` are those of a worker's microbatch.
pub fn exchanged(
    plan: &Plan,
    over: &ParameterServers,
    deduped: &DedupedPrograms<'_>,
    times: &StageTimes,
    costs: &dyn Costs,
) -> Exchanged {
    let (group, runtime) = (plan.group_of(&plan.stages[0]), costs.runtime());
    let num_servers = over.servers.len() as u32;
    let at_work = runtime.map(|r| r.at(plan.num_devices(), num_servers));
    let cost = at_work.as_ref().map_or(costs.of_group(0), |r| r.as_cost());
    let bodies: Vec<Vec<f64>> = (0..deduped.same_as.len())
        .map(|p| match p < over.workers.len() {
            true => vec![times.forward_s, times.backward_s],
            false => seconds_of_bodies(plan, group, deduped.program_of(p), cost),
        })
        .collect();
    let messages: Vec<Message> = deduped
        .programs
        .transfers
        .iter()
        .map(|t| {
            let (source, target) = (t.source.0 as usize, t.target.0 as usize);
            let bytes = deduped.program_of(source).local_bytes(t.source.1);
            let device = |p: usize| deduped.programs.programs[p].devices[0];
            let node = |p: usize| device(p) / group.devices_per_node;
            let path = transfer_path(group, (1, 1), (1, 1), node(source) == node(target));
            let link_s = runtime.map_or_else(|| cost.transfer_s(bytes, &path), |r| r.message_s(bytes, &path));
            let [send_s, receive_s] = match &at_work {
                Some(runtime) => [runtime.send_s(bytes), runtime.receive_s(bytes)],
                None => [0.0; 2],
            };
            let ports = [source, target].map(|p| port(group, device(p), path.across));
            Message { target, ports, link_s, send_s, receive_s }
        })
        .collect();
    let stage = Stage { programs: &deduped.programs.programs, bodies: &bodies, messages: &messages };
    let alone = stage.play(1);
    // Enough steps to fill and drain the servers' queues.
    const STEPS: usize = 6;
    let step_s = match over.asynchronous {
        true => (stage.play(2 * STEPS).end_s - stage.play(STEPS).end_s) / STEPS as f64,
        false => alone.end_s,
    };
    // Seconds for which a device's busiest link in one direction is taken, plus the device's own copies.
    let link_s = |p: usize, sends: bool| {
        let mut taken_s: FxHashMap<Port, f64> = FxHashMap::default();
        let mut copied_s = 0.0;
        for call in &deduped.programs.programs[p].schedule {
            let (transfer, end) = match *call {
                Call::Send { transfer, .. } if sends => (transfer, 0),
                Call::Receive { transfer, .. } if !sends => (transfer, 1),
                _ => continue,
            };
            let message = &messages[transfer.0 as usize];
            *taken_s.entry(message.ports[end]).or_default() += message.link_s;
            copied_s += if sends { message.send_s } else { message.receive_s };
        }
        taken_s.into_values().fold(0.0, f64::max) + copied_s
    };
    let computes_s = |p: usize| -> f64 {
        let of_call = |call: &Call| if let Call::Run { body, .. } = *call { bodies[p][body as usize] } else { 0.0 };
        deduped.programs.programs[p].schedule.iter().map(of_call).sum()
    };
    let servers = (over.workers.len()..bodies.len()).map(|p| (computes_s(p), link_s(p, true).max(link_s(p, false))));
    Exchanged { step_s, sent_s: link_s(0, true) + link_s(0, false), servers: servers.collect(), calls: alone.calls }
}

/// Seconds of each of a server's bodies.
fn seconds_of_bodies(plan: &Plan, group: &Group, program: &Program, cost: &dyn CostModel) -> Vec<f64> {
    let prices = Prices::new(cost, group, (1, 1), &program.mesh);
    let seconds = |body| {
        let work = BodyWork::new(program, body, &plan.execution, cost, None);
        let priced = work.prices(&prices, &plan.execution);
        match cost.runtime() {
            Some(_) => played_in_order(&work.kernels, &priced).seconds,
            None => play(&tasks(&work.kernels, &priced), Host::FREE).seconds,
        }
    };
    program.bodies.iter().map(seconds).collect()
}

/// A link. If it leaves the node, `true` and the number of its network card, otherwise `false` and the number of its
/// device.
type Port = (bool, u32);

/// The link that a device sends and receives by. Within its node that is its own. Across nodes it is a network card,
/// which neighbours share if there are fewer cards than devices.
fn port(group: &Group, device: u32, across: bool) -> Port {
    let each = group.devices_per_node.max(1);
    let nics = group.inter_node.nics.clamp(1, each);
    if across { (true, device / each * nics + device % each * nics / each) } else { (false, device) }
}

/// A transfer: its target, the links at both ends, and its seconds on links and devices.
struct Message {
    target: usize,
    ports: [Port; 2],
    link_s: f64,
    send_s: f64,
    receive_s: f64,
}

/// Programs with the seconds of their bodies and messages.
struct Stage<'a> {
    programs: &'a [Program],
    bodies: &'a [Vec<f64>],
    messages: &'a [Message],
}

#[derive(Default)]
struct Played {
    end_s: f64,
    /// Calls of the first step.
    calls: Vec<Vec<(f64, f64)>>,
}

/// A time with a total order. Times are never NaN.
#[derive(PartialEq)]
struct At(f64);

impl Eq for At {}

impl PartialOrd for At {
    fn partial_cmp(&self, other: &At) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for At {
    fn cmp(&self, other: &At) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl Stage<'_> {
    /// Simulates `steps` steps without a wait between them. The device that reaches its next call first makes it first.
    fn play(&self, steps: usize) -> Played {
        let mut played = Played { end_s: 0.0, calls: vec![Vec::new(); self.programs.len()] };
        let mut next: BinaryHeap<Reverse<(At, usize)>> =
            (0..self.programs.len()).map(|p| Reverse((At(0.0), p))).collect();
        let mut made = vec![0usize; self.programs.len()];
        let mut free_s: FxHashMap<(bool, Port), f64> = FxHashMap::default();
        let mut arrived: FxHashMap<TransferId, VecDeque<f64>> = FxHashMap::default();
        // The program that waits for a message, and since when.
        let mut waiting: FxHashMap<TransferId, (usize, f64)> = FxHashMap::default();
        while let Some(Reverse((At(now_s), p))) = next.pop() {
            let schedule = &self.programs[p].schedule;
            played.end_s = played.end_s.max(now_s);
            if made[p] >= steps * schedule.len() {
                continue;
            }
            let end_s = match schedule[made[p] % schedule.len()] {
                Call::Run { body, .. } => now_s + self.bodies[p][body as usize],
                Call::Send { transfer, .. } => {
                    let Message { target, ports: [from, to], link_s, send_s, receive_s } =
                        self.messages[transfer.0 as usize];
                    let taken = |sends: bool, port, free_s: &FxHashMap<_, f64>| {
                        free_s.get(&(sends, port)).copied().unwrap_or(0.0)
                    };
                    let start_s = (now_s + send_s).max(taken(true, from, &free_s)).max(taken(false, to, &free_s));
                    let at_s = start_s + link_s;
                    free_s.insert((true, from), at_s);
                    free_s.insert((false, to), at_s);
                    match waiting.remove(&transfer) {
                        Some((_, since_s)) => {
                            // The waiting program continues once the message has arrived.
                            let end_s = since_s.max(at_s) + receive_s;
                            self.end(&mut played, &mut made, target, (since_s, end_s));
                            next.push(Reverse((At(end_s), target)));
                        }
                        None => arrived.entry(transfer).or_default().push_back(at_s),
                    }
                    now_s + send_s
                }
                Call::Receive { transfer, .. } => match arrived.get_mut(&transfer).and_then(VecDeque::pop_front) {
                    Some(at_s) => now_s.max(at_s) + self.messages[transfer.0 as usize].receive_s,
                    None => {
                        waiting.insert(transfer, (p, now_s));
                        continue;
                    }
                },
            };
            self.end(&mut played, &mut made, p, (now_s, end_s));
            next.push(Reverse((At(end_s), p)));
        }
        played
    }

    fn end(&self, played: &mut Played, made: &mut [usize], p: usize, span: (f64, f64)) {
        if made[p] < self.programs[p].schedule.len() {
            played.calls[p].push(span);
        }
        made[p] += 1;
    }
}
