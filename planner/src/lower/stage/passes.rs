//! The backward body of a stage, and what follows from it: the values that the forward body keeps, and the buffers that
//! each body frees.

use super::super::body::BodyBuilder;
use super::super::choose::Available;
use super::super::split::split;
use super::activations::{self, Passes};
use super::layers::{Layers, Seen};
use super::update::{Gradients, Shares, Variance};
use super::{Boundary, Lowered, StageLowering};
use super::{parts_of, stages_of_contributions};
use altiplano_ir::graph::ValueId;
use altiplano_ir::program::{Body, Buffer, BufferId, BufferKind, Phase};
use altiplano_ir::sharding::Sharding;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};

/// A body and the values that it exchanges with other stages.
struct Pass<K> {
    body: Body,
    sends: BTreeMap<ValueId, BufferId>,
    receives: BTreeMap<K, BufferId>,
}

/// Accumulators of gradients over microbatches, and the writes to them so far.
#[derive(Default)]
pub struct Accumulation {
    pub accumulators: BTreeMap<ValueId, BufferId>,
    pub variance: Option<Variance>,
    pub writes: Vec<(BufferId, ValueId)>,
}

impl<'a> StageLowering<'a> {
    /// Lowers the backward pass and the bodies that run once a step, and completes the forward pass.
    pub(super) fn complete(mut self, forward: BodyBuilder<'a>, layers: Layers<'a>) -> Lowered {
        let cx = self.cx;
        let mut sums = Accumulation {
            accumulators: self.accumulators(),
            variance: self.variance_accumulator(),
            writes: Vec::new(),
        };
        let mut backward = self.backward(&forward, layers, &mut sums);
        let Accumulation { accumulators, variance, .. } = sums;
        let mut forward = self.finish_forward(forward, &backward.body);
        self.free(&mut forward.body, &mut backward);
        let mut weights = None;
        if cx.plan.splits(cx.index as usize) {
            let sent = backward.sends.values().copied().collect();
            let (first, second) = split(backward.body, &sent, &mut self.buffers);
            (backward.body, weights) = (first, Some(second));
        }
        if cx.stage.offload.activations {
            let passes = Passes {
                forward: &mut forward.body,
                later: [&mut backward.body].into_iter().chain(&mut weights).collect(),
                sent: forward.sends.values().copied().collect(),
                apart: cx.apart,
            };
            activations::offload(passes, &mut self.buffers, &cx.mesh);
        }
        let totals = self.totals_body();
        let (reduce, sends_tied, receives_tied) = self.reduce(&accumulators);
        let mut gradients = Gradients::accumulated(&accumulators, &sends_tied, &receives_tied, cx.index);
        let shares = self.norm(&mut gradients, variance.as_ref());
        let update = self.update(&accumulators, &gradients, shares.as_ref(), None);
        let (norm, sends_shares, receives_shares) = match shares {
            Some(Shares { body, own, others, .. }) => (Some(body), own, others),
            None => Default::default(),
        };
        let boundary = Boundary {
            sends_forward: forward.sends,
            receives_forward: forward.receives,
            sends_backward: backward.sends,
            receives_backward: backward.receives,
            sends_tied,
            receives_tied,
            sends_shares,
            receives_shares,
        };
        let (forward, backward) = (forward.body, backward.body);
        let (buffers, repeated) = (self.buffers, self.repeated);
        Lowered { buffers, forward, backward, weights, reduce, norm, update, totals, boundary, repeated }
    }

    fn backward(
        &mut self,
        forward: &BodyBuilder<'a>,
        layers: Layers<'a>,
        sums: &mut Accumulation,
    ) -> Pass<(ValueId, u32)> {
        let cx = self.cx;
        let training = cx.training;
        let here = |v: ValueId| cx.stage_of[v.index()] == Some(cx.index);
        let num_nodes = cx.nodes.iter().map(|v| cx.owned[v.index()].len()).sum();
        let name = format!("stage{} backward", cx.index);
        let mut b = BodyBuilder::new(cx, name.clone(), num_nodes);
        let parts = parts_of(cx);
        let mut receives = BTreeMap::new();
        let mut first_used: FxHashMap<ValueId, Vec<ValueId>> = FxHashMap::default();
        for &p in sums.accumulators.keys() {
            if let Some(&user) = cx.users[p.index()].iter().find(|u| here(**u)) {
                first_used.entry(user).or_default().push(p);
            }
        }
        let seed = training.seed().filter(|_| cx.plan.loss_scale.is_some());
        if let Some(seed) = seed.filter(|_| here(training.loss)) {
            let scaled = self.scaled_seed(&mut b);
            b.define(seed, Sharding::replicated(&[]), scaled);
        }
        let seen = Seen { parts: &parts, first_used: &first_used };
        let layers = layers.reversed(self, sums, &seen);
        self.walk(&mut b, &layers, Some(forward), sums, &mut |lowering, b, sums, nodes| {
            for v in nodes.iter().rev().copied() {
                if lowering.total_cotangent(b, v, &mut receives) {
                    for &n in cx.owned[v.index()].iter().filter(|n| !cx.is_constant(**n) && seed != Some(**n)) {
                        let wanted = parts.get(&n).map(|&of| cx.resting(of));
                        lowering.emit_gradient(b, forward, n, wanted.as_ref());
                    }
                }
                // A gradient joins its accumulator as soon as its last contribution is available. The parameter's
                // first user may itself have no cotangent.
                for &p in first_used.get(&v).into_iter().flatten() {
                    lowering.accumulate(b, p, sums);
                }
            }
        });
        let mut writes = std::mem::take(&mut sums.writes);
        if let Some(variance) = &sums.variance
            && let Some(sum) = variance.sum
        {
            let Buffer { ty, sharding, .. } = self.buffers[variance.buffer.0 as usize].clone();
            let old = b.read(variance.buffer, &sharding, &ty);
            writes.push((variance.buffer, b.graph.add(old, sum)));
        }
        // Cotangents of received values return in the layout in which the values came.
        let mut sends = BTreeMap::new();
        for (&v, to) in &cx.stage.receives {
            if let Some(total) = self.cotangent(&mut b, v, to, &[]) {
                let ty = training.graph.ty(v).cotangent();
                let buffer = self.buffer(format!("cotangent of {v}"), BufferKind::Value, ty, to.clone());
                sends.insert(v, buffer);
                writes.push((buffer, total));
            }
        }
        let (graph, reads, writes) = b.finish(writes);
        let body = Body { name, stage: cx.index, phase: Phase::Backward, graph, reads, writes, frees: Vec::new() };
        Pass { body, sends, receives }
    }

    /// Defines the cotangent of a value as the sum of its contributions, those of later stages included. Returns false
    /// if it has none.
    fn total_cotangent(
        &mut self,
        b: &mut BodyBuilder<'a>,
        v: ValueId,
        receives: &mut BTreeMap<(ValueId, u32), BufferId>,
    ) -> bool {
        let cx = self.cx;
        let Some(cotangent) = cx.training.cotangents[v.index()] else { return false };
        let to = self.left_partial(b, v).unwrap_or_else(|| cx.resting(v));
        let mut received = Vec::new();
        for stage in stages_of_contributions(cx, v).into_iter().filter(|&s| s != cx.index) {
            let name = format!("cotangent of {v} from stage{stage}");
            let buffer = self.buffer(name, BufferKind::Value, cx.training.graph.ty(v).cotangent(), to.clone());
            receives.insert((v, stage), buffer);
            received.push(buffer);
        }
        let Some(total) = self.cotangent(b, v, &to, &received) else { return false };
        b.define(cotangent, to, total);
        true
    }

    /// Emits a node of the backward graph with the strategy that its operands suggest.
    fn emit_gradient(
        &mut self,
        b: &mut BodyBuilder<'a>,
        forward: &BodyBuilder<'a>,
        n: ValueId,
        wanted: Option<&Sharding>,
    ) {
        let cx = self.cx;
        let graph = &cx.training.graph;
        let operands = &graph.node(n).operands;
        let available: Vec<Available> = operands.iter().map(|&o| self.available(b, forward, o)).collect();
        let (strategy, shardings) = cx.choose(n, available, wanted.cloned());
        for (&o, to) in operands.iter().zip(&shardings.operands) {
            self.fetch(b, forward, o, to);
        }
        b.emit(n, cx.rule(n), &strategy, &shardings);
    }

    /// Adds this microbatch's gradient of `p` to its accumulator, if there is one.
    fn accumulate(&mut self, b: &mut BodyBuilder<'a>, p: ValueId, sums: &mut Accumulation) {
        let buffer = sums.accumulators[&p];
        let Buffer { ty, sharding, .. } = self.buffers[buffer.0 as usize].clone();
        if let Some(gradient) = self.cotangent(b, p, &sharding, &[]) {
            if let Some(variance) = &mut sums.variance {
                variance.add(b, p, gradient, &sharding);
            }
            let old = b.read(buffer, &sharding, &ty);
            let gradient = b.graph.convert(gradient, ty.dtype);
            sums.writes.push((buffer, b.graph.add(old, gradient)));
        }
    }

    /// The forward body. It writes the values that the backward body reads, those that other stages need, and the loss.
    fn finish_forward(&mut self, mut forward: BodyBuilder<'a>, backward: &Body) -> Pass<ValueId> {
        let cx = self.cx;
        let read_back: BTreeSet<BufferId> = backward.reads.iter().map(|(_, b)| *b).collect();
        let mut writes = Vec::new();
        for (&v, saved) in &mut self.saved {
            saved.sort_by(|a, b| a.0.cmp(&b.0));
            for (sharding, buffer) in saved.iter().filter(|saved| read_back.contains(&saved.1)) {
                writes.push((*buffer, forward.want(v, sharding)));
            }
        }
        let mut sends = BTreeMap::new();
        for v in cx.nodes.iter().copied() {
            let later = cx.users[v.index()].iter().any(|u| cx.stage_of[u.index()] != Some(cx.index));
            if later {
                let to = cx.resting(v);
                let buffer = match self.saved_as(v, &to).filter(|b| read_back.contains(b)) {
                    Some(buffer) => buffer,
                    None => {
                        let ty = cx.graph.ty(v).clone();
                        let buffer = self.buffer(format!("{v} to later stages"), BufferKind::Value, ty, to.clone());
                        writes.push((buffer, forward.want(v, &to)));
                        buffer
                    }
                };
                sends.insert(v, buffer);
            }
        }
        let (graph, loss) = (&cx.training.graph, cx.training.loss);
        if !cx.plan.schedule.trains() {
            for (index, &v) in (0u32..).zip(&cx.graph.outputs) {
                if cx.stage_of[v.index()] == Some(cx.index) {
                    let (ty, to) = (graph.ty(v).clone(), cx.resting(v));
                    let kind = BufferKind::Output { index };
                    let buffer = self.buffer(format!("result {index}"), kind, ty, to.clone());
                    writes.push((buffer, forward.want(v, &to)));
                }
            }
        } else if cx.stage_of[loss.index()] == Some(cx.index) {
            let ty = graph.ty(loss).clone();
            let whole = Sharding::replicated(&ty.shape);
            let buffer = self.buffer("loss".into(), BufferKind::Loss, ty, whole.clone());
            writes.push((buffer, forward.want(loss, &whole)));
        }
        let (graph, reads, writes) = forward.finish(writes);
        let name = format!("stage{} forward", cx.index);
        let body = Body { name, stage: cx.index, phase: Phase::Forward, graph, reads, writes, frees: Vec::new() };
        Pass { body, sends, receives: self.received.clone() }
    }

    /// Fills in the buffers that bodies free. The forward body frees those that only it reads, the backward body all
    /// others that live per microbatch.
    fn free(&self, forward: &mut Body, backward: &mut Pass<(ValueId, u32)>) {
        let per_microbatch =
            |id: &BufferId| matches!(self.buffers[id.0 as usize].kind, BufferKind::Value | BufferKind::Input { .. });
        let read_back: BTreeSet<BufferId> = backward.body.reads.iter().map(|(_, b)| *b).collect();
        let read = forward.reads.iter().map(|(_, b)| *b);
        forward.frees = read.filter(|b| !read_back.contains(b)).filter(per_microbatch).collect();
        backward.body.frees = read_back.into_iter().filter(per_microbatch).collect();
        // Two values may have the same cotangent. Then the one received for the first is read, and the other is not.
        let received = self.received.values().chain(backward.receives.values());
        let unread = received.filter(|b| !forward.frees.contains(b) && !backward.body.frees.contains(b));
        let unread: Vec<BufferId> = unread.copied().collect();
        // A value received for a total is not read, and there may be no backward pass.
        match self.cx.plan.schedule.trains() {
            true => backward.body.frees.extend(unread),
            false => forward.frees.extend(unread),
        }
    }
}
