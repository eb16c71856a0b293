//! The bodies of a parameter server. It sums the gradients that workers push, or treats each push as an update of its
//! own. It updates its parameters like a stage updates those that it holds.

use super::super::body::BodyBuilder;
use super::super::{StageContext, Updates};
use super::update::{Gradients, Shares};
use super::{StageLowering, parameter_name};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::program::{Body, Buffer, BufferId, BufferKind, Phase};
use altiplano_ir::sharding::Sharding;
use altiplano_ir::types::TensorType;
use std::collections::{BTreeMap, BTreeSet};

/// A server's bodies, and the buffers of its gradients and parameters.
#[derive(Default)]
pub struct Server {
    pub buffers: Vec<Buffer>,
    pub parameters: BTreeMap<ValueId, BufferId>,
    /// Buffers for the push of a step's first worker, to which the others are added, and for the pushes of the others.
    /// They are the same buffers if each push is an update.
    pub sums: BTreeMap<ValueId, BufferId>,
    pub pushes: BTreeMap<ValueId, BufferId>,
    /// Adds a push to the sums.
    pub add: Option<Body>,
    /// The server's share of sums over all gradients, if any are wanted. Its own shares follow, and those of others by
    /// sum and server.
    pub norm: Option<Body>,
    pub sends_shares: Vec<BufferId>,
    pub receives_shares: BTreeMap<(u32, u32), BufferId>,
    /// For each worker, if each push is an update: writes the number of the update among all updates.
    pub numbers: Vec<Body>,
    /// `None` without training.
    pub update: Option<Body>,
}

/// Lowers a server whose parameters are those of the context's stage. `updates`: number of updates in a step.
pub fn lower_server(cx: &StageContext<'_>, updates: u32) -> Server {
    StageLowering::new(cx, BTreeSet::new()).server(updates)
}

/// A server of a plan without training: the parameters of the context's stage, for workers to pull.
pub fn weights_alone(cx: &StageContext<'_>) -> Server {
    let StageLowering { buffers, parameters, .. } = StageLowering::new(cx, BTreeSet::new());
    Server { buffers, parameters, ..Server::default() }
}

impl<'a> StageLowering<'a> {
    fn server(mut self, updates: u32) -> Server {
        let Updates { peer, .. } = self.cx.updates;
        let sums = self.gradients("gradient of");
        let (mut pushes, mut add) = (sums.clone(), None);
        let (mut numbers, mut number) = (Vec::new(), None);
        if updates > 1 {
            let kept = self.update_number();
            numbers.extend((0..updates).map(|worker| self.numbered(kept, worker, updates)));
            number = Some(kept);
        } else if self.cx.plan.num_workers() > 1 {
            pushes = self.gradients("push of");
            add = Some(self.added(&sums, &pushes));
        }
        let mut gradients = Gradients::received(&sums);
        let shares = self.norm(&mut gradients, None);
        let mut update = self.update(&sums, &gradients, shares.as_ref(), number);
        update.frees.extend(sums.values().copied().chain(number));
        let (mut norm, sends_shares, receives_shares) = match shares {
            Some(Shares { body, own, others, .. }) => (Some(body), own, others),
            None => Default::default(),
        };
        let named = [(Some(&mut update), "update"), (norm.as_mut(), "norm"), (add.as_mut(), "add")];
        for (body, what) in named {
            body.into_iter().for_each(|body| body.name = format!("server{peer} {what}"));
        }
        let (StageLowering { buffers, parameters, .. }, update) = (self, Some(update));
        Server { buffers, parameters, sums, pushes, add, norm, sends_shares, receives_shares, numbers, update }
    }

    /// Buffers for a gradient of each parameter, in the layout in which workers sum it.
    fn gradients(&mut self, what: &str) -> BTreeMap<ValueId, BufferId> {
        let cx = self.cx;
        let mut buffers = BTreeMap::new();
        for p in self.parameters.keys().copied().filter(|p| cx.graph.is_trained(*p)).collect::<Vec<_>>() {
            let name = parameter_name(cx, p);
            let ty = cx.plan.execution.accumulator(cx.graph.ty(p));
            let layout = cx.stage.parameters[name].gradient.clone();
            buffers.insert(p, self.buffer(format!("{what} {name}"), BufferKind::Value, ty, layout));
        }
        buffers
    }

    /// Adds pushes to sums.
    fn added(&mut self, sums: &BTreeMap<ValueId, BufferId>, pushes: &BTreeMap<ValueId, BufferId>) -> Body {
        let cx = self.cx;
        let mut b = BodyBuilder::new(cx, "add".to_string(), 3 * sums.len());
        let mut writes = Vec::new();
        for (p, &sum) in sums {
            let Buffer { ty, sharding, .. } = self.buffers[sum.0 as usize].clone();
            let [old, push] = [sum, pushes[p]].map(|buffer| b.read(buffer, &sharding, &ty));
            writes.push((sum, b.graph.add(old, push)));
        }
        let (graph, reads, writes) = b.finish(writes);
        let frees = pushes.values().copied().collect();
        Body { name: String::new(), stage: cx.index, phase: Phase::Reduce, graph, reads, writes, frees }
    }

    fn update_number(&mut self) -> BufferId {
        let scalar = TensorType::scalar(DType::F32);
        self.buffer("update number".to_string(), BufferKind::Value, scalar, Sharding::replicated(&[]))
    }

    /// The number of a worker's update, if each worker has one in a step. It starts at 1 like the number of a step, for
    /// averages over updates.
    fn numbered(&mut self, kept: BufferId, worker: u32, updates: u32) -> Body {
        let cx = self.cx;
        let (scalar, whole) = (TensorType::scalar(DType::F32), Sharding::replicated(&[]));
        let found = self.buffers.iter().position(|b| matches!(&b.kind, BufferKind::Scalar { name } if name == "step"));
        let step = found.map_or_else(|| self.scalar("step"), |at| BufferId(at as u32));
        let mut b = BodyBuilder::new(cx, "number".to_string(), 4);
        let step = b.read(step, &whole, &scalar);
        let of_step = b.graph.splat_like(step, f64::from(updates));
        let after = b.graph.mul(step, of_step);
        let behind = b.graph.splat_like(step, f64::from(updates - 1 - worker));
        let number = b.graph.sub(after, behind);
        let (graph, reads, writes) = b.finish(vec![(kept, number)]);
        let name = format!("server{} number of worker{worker}'s update", cx.updates.peer);
        Body { name, stage: cx.index, phase: Phase::Update, graph, reads, writes, frees: Vec::new() }
    }
}
