//! Values that are summed over all microbatches of a step before the first of them runs, such as the count that divides
//! a weighted mean.
//!
//! They depend on inputs alone. So a stage that needs one computes it from its own inputs, whatever stages the values
//! in between are planned on. A body that runs for every microbatch at the beginning of a step adds to the sums.
//! Forward bodies read the sums and save them for backward bodies like other values, since those may run when the next
//! step has begun its own sums. With one microbatch there is nothing to sum: a total is its operand.

use super::{Available, BodyBuilder, StageLowering};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::ValueId;
use altiplano_ir::op::{Microbatches, Op};
use altiplano_ir::program::{ALL_PARAMETERS, Body, Buffer, BufferId, BufferKind, Phase};
use altiplano_ir::sharding::Sharding;

impl<'a> StageLowering<'a> {
    /// Reads a total in the forward body.
    pub(super) fn total(&mut self, b: &mut BodyBuilder<'a>, v: ValueId, sharding: &Sharding) {
        let cx = self.cx;
        let (op, ty) = (&cx.graph.node(v).op, cx.graph.ty(v));
        let sharding = sharding.reduced();
        // A sum over many microbatches needs more precision than one over a few samples.
        let kept = ty.with_dtype(if ty.dtype.is_half() { DType::F32 } else { ty.dtype });
        let kind = BufferKind::Accumulator { parameter: ALL_PARAMETERS.to_string() };
        let buffer = self.buffer(format!("{v} of all microbatches"), kind, kept.clone(), sharding.clone());
        self.totals.insert(v, buffer);
        let mut local = b.read(buffer, &sharding, &kept);
        let count = f64::from(cx.plan.num_microbatches);
        if matches!(op, Op::Microbatches(Microbatches::Mean)) {
            let count = b.graph.splat_like(local, count);
            local = b.graph.div(local, count);
        }
        let local = b.graph.convert(local, ty.dtype);
        b.define(v, sharding, local);
    }

    /// The body that adds one microbatch to the totals that the forward body reads.
    pub(super) fn totals_body(&mut self) -> Option<Body> {
        let cx = self.cx;
        if self.totals.is_empty() {
            return None;
        }
        let graph = cx.graph;
        let mut needed = vec![false; graph.len()];
        self.totals.keys().for_each(|v| needed[graph.node(*v).operands[0].index()] = true);
        for v in graph.values().rev() {
            if needed[v.index()] {
                graph.node(v).operands.iter().for_each(|o| needed[o.index()] = true);
            }
        }
        // Inputs are read anew. Otherwise those of all microbatches would be held until their forward passes.
        let of_forward = std::mem::take(&mut self.inputs);
        let mut b = BodyBuilder::new(cx, format!("stage{} totals", cx.index), graph.len());
        for v in graph.values().filter(|v| needed[v.index()]) {
            let node = graph.node(v);
            if node.op.is_leaf() || cx.is_constant(v) {
                continue;
            }
            let available = |&o: &ValueId| match &graph.node(o).op {
                Op::Input(_) => Available::Any,
                _ if cx.is_constant(o) => Available::Any,
                _ => Available::Layouts(b.layouts(o).iter().map(|(s, _)| s.clone()).collect()),
            };
            let available: Vec<Available> = node.operands.iter().map(available).collect();
            let (strategy, shardings) = cx.choose(v, available, None);
            for (&o, to) in node.operands.iter().zip(&shardings.operands) {
                self.fetch_input(&mut b, o, to);
            }
            b.emit(v, cx.rule(v), &strategy, &shardings);
        }
        let mut writes = Vec::new();
        for (v, buffer) in self.totals.clone() {
            let Buffer { ty, sharding, .. } = self.buffers[buffer.0 as usize].clone();
            let operand = graph.node(v).operands[0];
            self.fetch_input(&mut b, operand, &sharding);
            let local = b.want(operand, &sharding);
            let local = b.graph.convert(local, ty.dtype);
            let old = b.read(buffer, &sharding, &ty);
            writes.push((buffer, b.graph.add(old, local)));
        }
        self.inputs = of_forward;
        let (graph, reads, writes) = b.finish(writes);
        let is_input = |b: &BufferId| matches!(self.buffers[b.0 as usize].kind, BufferKind::Input { .. });
        let frees = reads.iter().map(|read| read.1).filter(is_input).collect();
        let name = format!("stage{} totals", cx.index);
        Some(Body { name, stage: cx.index, phase: Phase::Totals, graph, reads, writes, frees })
    }

    fn fetch_input(&mut self, b: &mut BodyBuilder<'a>, v: ValueId, to: &Sharding) {
        if matches!(self.cx.graph.node(v).op, Op::Input(_)) {
            self.fetch_outer(b, v, to);
        }
    }
}
