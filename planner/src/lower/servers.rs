//! Programs of a plan with parameter servers. Each worker has one, a replica that computes gradients of its
//! microbatches alone, and so has each server. Pushes and pulls are ordinary transfers, so running and pricing these
//! programs needs nothing new. Without training, workers pull the weights and run the model on their microbatches.

use super::stage::{self, Lowered, Server, lower_server, weights_alone};
use super::{Cut, StageContext, Updates};
use altiplano_cost_models::Costs;
use altiplano_cost_models::pipeline::{Order, PipelineCall};
use altiplano_ir::batch::LossKind;
use altiplano_ir::graph::ValueId;
use altiplano_ir::program::{Body, BufferId, Call, Program, Programs, Transfer, TransferId};
use altiplano_ir::servers::ParameterServers;
use std::collections::BTreeMap;

/// The programs of workers, followed by those of servers. If `alike`, only the first worker is written out, since the
/// others run the same.
pub fn programs(cut: &Cut<'_>, over: &ParameterServers, costs: &dyn Costs, dedup: bool) -> Programs {
    let plan = cut.plan;
    let cx = cut.context(0, costs);
    let worker = stage::lower_stage(&cx);
    let servers: Vec<Server> = (0..over.servers.len() as u32).map(|s| lowered_server(cut, over, s, costs)).collect();
    let links = Links::new(&cx, over, &worker, &servers);
    let workers = 0..over.workers.len();
    let mut programs: Vec<Program> = workers.map(|w| links.worker(cut, over, w, &worker, !dedup || w == 0)).collect();
    programs.extend(servers.into_iter().enumerate().map(|(s, server)| links.server(&cx, over, s, server)));
    Programs {
        programs,
        transfers: links.transfers,
        num_microbatches: plan.num_microbatches,
        microbatch: plan.graph.batch,
        loss_is_mean: plan.loss != LossKind::Sum,
    }
}

fn lowered_server(cut: &Cut<'_>, over: &ParameterServers, server: u32, costs: &dyn Costs) -> Server {
    let mut cx = cut.context(0, costs);
    cx.stage.parameters.retain(|name, _| over.holds.get(name) == Some(&server));
    cx.nodes = &[];
    cx.updates = Updates { here: true, peer: server, peers: over.servers.len() as u32 };
    if cut.plan.schedule.trains() { lower_server(&cx, cut.plan.updates_of_step()) } else { weights_alone(&cx) }
}

/// Transfers between workers and servers. Workers are programs from 0 on, followed by the servers.
struct Links {
    transfers: Vec<Transfer>,
    /// By worker and server, in the order of parameters.
    pushes: BTreeMap<(usize, usize), Vec<TransferId>>,
    pulls: BTreeMap<(usize, usize), Vec<TransferId>>,
    /// By sum, sending server and receiving server.
    shares: BTreeMap<(u32, u32, u32), TransferId>,
}

impl Links {
    fn new(cx: &StageContext<'_>, over: &ParameterServers, worker: &Lowered, servers: &[Server]) -> Links {
        let mut links =
            Links { transfers: Vec::new(), pushes: BTreeMap::new(), pulls: BTreeMap::new(), shares: BTreeMap::new() };
        let [gradients, parameters] = worker.held();
        let names: BTreeMap<ValueId, &str> = cx.graph.parameters().collect();
        let num_workers = over.workers.len();
        for w in 0..num_workers {
            for (s, server) in servers.iter().enumerate() {
                // The first push of a step goes to the buffer to which the others are added.
                let targets = if w == 0 { &server.sums } else { &server.pushes };
                for (p, &held) in &server.parameters {
                    let name = names[p];
                    let to = (num_workers + s) as u32;
                    if let Some(&target) = targets.get(p) {
                        let push = links.link((w as u32, gradients[name]), (to, target));
                        links.pushes.entry((w, s)).or_default().push(push);
                    }
                    let pull = links.link((to, held), (w as u32, parameters[name]));
                    links.pulls.entry((w, s)).or_default().push(pull);
                }
            }
        }
        for (t, receiver) in (0u32..).zip(servers) {
            for (&(sum, s), &target) in &receiver.receives_shares {
                let program = |server: u32| num_workers as u32 + server;
                let source = servers[s as usize].sends_shares[sum as usize];
                let share = links.link((program(s), source), (program(t), target));
                links.shares.insert((sum, s, t), share);
            }
        }
        links
    }

    fn link(&mut self, source: (u32, BufferId), target: (u32, BufferId)) -> TransferId {
        self.transfers.push(Transfer { source, target });
        TransferId((self.transfers.len() - 1) as u32)
    }

    /// All of a worker's microbatches, then a push to each server and a pull from each. Without training, the pulls
    /// come first.
    fn worker(&self, cut: &Cut<'_>, over: &ParameterServers, w: usize, lowered: &Lowered, whole: bool) -> Program {
        let plan = cut.plan;
        let first = w as u32 * plan.microbatches_of_worker();
        let run = |(_, call): (usize, PipelineCall)| match call {
            PipelineCall::Forward { microbatch } => Some(Call::Run { body: 0, microbatch: Some(first + microbatch) }),
            PipelineCall::Backward { microbatch } => Some(Call::Run { body: 1, microbatch: Some(first + microbatch) }),
            PipelineCall::Weights { .. } | PipelineCall::Update { .. } => None,
        };
        let runs: Vec<Call> = Order::of(plan).calls(0).filter_map(run).collect();
        let of = |links: &BTreeMap<(usize, usize), Vec<TransferId>>| -> Vec<TransferId> {
            let of_server = |s: usize| links.get(&(w, s)).into_iter().flatten().copied().collect::<Vec<_>>();
            (0..over.servers.len()).flat_map(of_server).collect()
        };
        let pushes: Vec<Call> = of(&self.pushes).into_iter().map(send).collect();
        let pulls: Vec<Call> = of(&self.pulls).into_iter().map(receive).collect();
        let trains = plan.schedule.trains();
        let schedule = if trains { [runs, pushes, pulls.clone()] } else { [pulls.clone(), runs, pushes] }.concat();
        let backward = Some(&lowered.backward).filter(|_| trains);
        let (buffers, bodies) = match whole {
            true => (lowered.buffers.clone(), std::iter::once(&lowered.forward).chain(backward).cloned().collect()),
            false => (Vec::new(), Vec::new()),
        };
        Program {
            devices: vec![over.workers[w]],
            mesh: plan.stages[0].mesh.clone(),
            buffers,
            bodies,
            schedule,
            late: Vec::new(),
            flush: if trains && over.asynchronous { pulls } else { Vec::new() },
            fused_attention: plan.execution.fused_attention,
        }
    }

    /// Pushes in the order of workers: summed, used and answered together, or each at once. Without training, only the
    /// answers.
    fn server(&self, cx: &StageContext<'_>, over: &ParameterServers, s: usize, lowered: Server) -> Program {
        let Server { buffers, add, norm, numbers, update, .. } = lowered;
        let once = |body: usize| Call::Run { body: body as u32, microbatch: None };
        // The bodies are the update, those that number workers' updates, and optional ones.
        let trains = update.is_some();
        let mut bodies: Vec<Body> = update.into_iter().chain(numbers).collect();
        let mut position = |body| {
            bodies.push(body);
            bodies.len() - 1
        };
        let (add, norm) = (add.map(&mut position), norm.map(&mut position));
        let of = |links: &BTreeMap<(usize, usize), Vec<TransferId>>, w: usize| -> Vec<TransferId> {
            links.get(&(w, s)).into_iter().flatten().copied().collect()
        };
        let workers = 0..over.workers.len();
        let pulls: Vec<Vec<Call>> =
            workers.clone().map(|w| of(&self.pulls, w).into_iter().map(send).collect()).collect();
        let mut schedule = Vec::new();
        if !trains {
            schedule.extend(pulls.iter().flatten());
        } else if over.asynchronous {
            for w in workers {
                schedule.extend(of(&self.pushes, w).into_iter().map(receive));
                // A lone worker's updates are numbered like its steps.
                schedule.extend((over.workers.len() > 1).then(|| once(1 + w)));
                schedule.push(once(0));
                schedule.extend(&pulls[w]);
            }
        } else {
            for w in workers {
                schedule.extend(of(&self.pushes, w).into_iter().map(receive));
                schedule.extend(add.filter(|_| w > 0).map(once));
            }
            if let Some(norm) = norm {
                schedule.push(once(norm));
                // The update reads and frees a server's own shares.
                let sent = self.shares.iter().filter(|((_, from, _), _)| *from as usize == s);
                schedule.extend(sent.map(|(_, &share)| send(share)));
                let received = self.shares.iter().filter(|((_, _, to), _)| *to as usize == s);
                schedule.extend(received.map(|(_, &share)| receive(share)));
            }
            schedule.push(once(0));
            schedule.extend(pulls.iter().flatten());
        }
        Program {
            devices: vec![over.servers[s]],
            mesh: cx.mesh.clone(),
            buffers,
            bodies,
            schedule,
            late: Vec::new(),
            flush: if trains && over.asynchronous { pulls.into_iter().flatten().collect() } else { Vec::new() },
            fused_attention: cx.plan.execution.fused_attention,
        }
    }
}

fn send(transfer: TransferId) -> Call {
    Call::Send { transfer, microbatch: None, free: false }
}

fn receive(transfer: TransferId) -> Call {
    Call::Receive { transfer, microbatch: None }
}
