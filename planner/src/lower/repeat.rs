//! Chooses the forward values that the backward pass recomputes, and with that the values it keeps. Lowering applies
//! this to the graph without composites, and the search's estimates to the graph with them.

use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{Binary, Op};
use altiplano_ir::recompute::Recompute;
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

/// Inputs of the choice between keeping and recomputing.
pub struct Repeats<'a> {
    pub graph: &'a Graph,
    /// Layer of each node; `None` for leaves and constants.
    pub layer_of: &'a [Option<u32>],
    pub users: &'a [Vec<ValueId>],
    /// Recomputation level of each layer.
    pub recompute: &'a dyn Fn(u32) -> Recompute,
    /// True if products larger than their factors are recomputed in every layer.
    pub fused_attention: bool,
    /// Values that are recomputed under every plan.
    pub always: &'a [bool],
}

impl Repeats<'_> {
    /// Returns the values among `nodes`, given in order, that are recomputed.
    ///
    /// * Full recomputation repeats everything that does not leave its layer.
    /// * Otherwise elementwise results and broadcasts within a layer are repeated, and so are a ring's blocks. They are
    ///   cheap, and their inputs are mostly kept anyway.
    /// * Selective recomputation also repeats the products for which [`grows`] is true.
    ///
    /// An addition of two kept values is kept itself, since its operands would otherwise be kept for it alone.
    pub fn of(&self, nodes: impl Iterator<Item = ValueId>) -> BTreeSet<ValueId> {
        let Repeats { graph, layer_of, users, recompute, fused_attention, always } = *self;
        let mut again = BTreeSet::new();
        // For each value, the large kept values from which recomputed ops derive it.
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
            // When the backward pass runs, a total may be that of the next step.
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

    /// Returns true if a result is cheap to compute: by its op, or by the last op of a composite's decomposition.
    pub fn is_cheap(&self, v: ValueId) -> bool {
        // A ring's blocks go round again, so that no device keeps all of them.
        let cheap = |op: &Op| op.is_elementwise() || matches!(op, Op::BroadcastInDim(_) | Op::Reshape(_) | Op::Roll(_));
        match &self.graph.node(v).op {
            Op::Composite(op) => op
                .body(&self.graph.operand_types(v))
                .is_ok_and(|body| body.graph.outputs.iter().all(|&o| cheap(&body.graph.node(o).op))),
            op => cheap(op),
        }
    }
}

/// Returns true if a value is a product that is better recomputed than kept ([`DotGeneral::grows`]).
///
/// [`DotGeneral::grows`]: altiplano_ir::op::DotGeneral::grows
pub fn grows(graph: &Graph, v: ValueId) -> bool {
    let node = graph.node(v);
    let shape = |i: usize| graph.shape(node.operands[i]);
    matches!(&node.op, Op::DotGeneral(dot) if dot.grows(shape(0), shape(1), &node.ty.shape))
}
