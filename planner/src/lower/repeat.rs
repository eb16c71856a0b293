//! Which forward values the backward pass computes again instead of keeping them, and which it therefore keeps. The lowering
//! follows this for the graph without composites, the estimates of the search for the graph with them.

use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{Binary, Op};
use altiplano_ir::recompute::Recompute;
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

/// What decides between keeping and computing again.
pub struct Repeats<'a> {
    pub graph: &'a Graph,
    /// Layer of each node; `None` for leaves and constants.
    pub layer_of: &'a [Option<u32>],
    pub users: &'a [Vec<ValueId>],
    /// How much of each layer is computed again.
    pub recompute: &'a dyn Fn(u32) -> Recompute,
    /// Products larger than their factors are, in every layer.
    pub fused_attention: bool,
    /// Values that are computed again under every plan.
    pub always: &'a [bool],
}

impl Repeats<'_> {
    /// The values among `nodes`, which are in order, that are computed again.
    ///
    /// With full recomputation, everything that does not leave its layer. Without, elementwise results and broadcasts
    /// within a layer, and what a ring brings: they are cheap, and what they are made of is mostly kept anyway; and with selective
    /// recomputation the products of which [`grows`] says so. An addition of two kept values is itself kept, since its operands would
    /// otherwise be kept for it alone.
    pub fn of(&self, nodes: impl Iterator<Item = ValueId>) -> BTreeSet<ValueId> {
        let Repeats { graph, layer_of, users, recompute, fused_attention, always } = *self;
        let mut again = BTreeSet::new();
        // Large kept values that a value is made of by ops that are computed again.
        let mut sources: FxHashMap<ValueId, Vec<ValueId>> = FxHashMap::default();
        for v in nodes {
            let node = graph.node(v);
            let layer = layer_of[v.index()];
            let leaves_layer = users[v.index()].iter().any(|u| layer_of[u.index()] != layer);
            let mut from: Vec<ValueId> = Vec::new();
            let is_constant = |o: ValueId| layer_of[o.index()].is_none() && !graph.node(o).op.is_leaf();
            for &o in node.operands.iter().filter(|o| !is_constant(**o)) {
                match sources.get(&o) {
                    Some(s) => from.extend(s),
                    None => from.push(o),
                }
            }
            from.sort_unstable();
            from.dedup();
            let large = from.iter().filter(|s| 2 * graph.ty(**s).elements() >= node.ty.elements()).count();
            let sum = matches!(node.op, Op::Binary(Binary::Add | Binary::Subtract));
            let level = layer.map_or(Recompute::None, recompute);
            let product = (fused_attention || level >= Recompute::Selective) && grows(graph, v);
            let full = level == Recompute::Full;
            let always = always.get(v.index()).copied().unwrap_or(false);
            // A total may be that of the next step when the backward pass runs.
            let repeat = !leaves_layer
                && !graph.is_total(v)
                && (always || full || product || self.is_cheap(v) && !(sum && large > 1));
            if repeat {
                again.insert(v);
                sources.insert(v, from);
            } else {
                sources.insert(v, vec![v]);
            }
        }
        again
    }

    /// Whether a result is cheap to make: by its op, or by the last op of what a composite is made of.
    pub fn is_cheap(&self, v: ValueId) -> bool {
        // What goes around a ring goes round again, so that no device keeps all of it.
        let cheap = |op: &Op| op.is_elementwise() || matches!(op, Op::BroadcastInDim(_) | Op::Reshape(_) | Op::Roll(_));
        match &self.graph.node(v).op {
            Op::Composite(op) => op
                .body(&self.graph.operand_types(v))
                .is_ok_and(|body| body.graph.outputs.iter().all(|&o| cheap(&body.graph.node(o).op))),
            op => cheap(op),
        }
    }
}

/// Whether a value is a product that is better computed again than kept ([`DotGeneral::grows`]).
///
/// [`DotGeneral::grows`]: altiplano_ir::op::DotGeneral::grows
pub fn grows(graph: &Graph, v: ValueId) -> bool {
    let node = graph.node(v);
    let shape = |i: usize| graph.shape(node.operands[i]);
    matches!(&node.op, Op::DotGeneral(dot) if dot.grows(shape(0), shape(1), &node.ty.shape))
}
