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
    /// Products that selective recomputation computes again beside those that grow, and with them all that is no product; as
    /// [`second_products`] has them, or none.
    pub products: &'a [bool],
}

impl Repeats<'_> {
    /// Returns the values among `nodes`, given in order, that are recomputed.
    ///
    /// * Full recomputation repeats everything that does not leave its layer.
    /// * Otherwise elementwise results and broadcasts within a layer are repeated, and so are a ring's blocks. They are
    ///   cheap, and their inputs are mostly kept anyway.
    /// * Selective recomputation also repeats the products for which [`grows`] is true, and `products`.
    ///
    /// An addition of two kept values is kept itself, since its operands would otherwise be kept for it alone.
    pub fn of(&self, nodes: impl Iterator<Item = ValueId>) -> BTreeSet<ValueId> {
        let Repeats { graph, layer_of, users, recompute, fused_attention, always, products } = *self;
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
            let is_in = |list: &[bool]| list.get(v.index()).copied().unwrap_or(false);
            let always = is_in(always);
            // Sums of rows are kept beside products: fused attention leaves them for its backward pass.
            let keeps =
                node.op.is_contraction() || matches!(node.op, Op::Composite(_) | Op::Reduce(_) | Op::Collective(_));
            let by_products = level == Recompute::Selective && !products.is_empty();
            let product = product || by_products && (is_in(products) || !keeps);
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

/// Every second product of each layer, in order, as torchtitan's selective checkpointing counts them (`selective_ac_option = 'op'`,
/// torchtitan/parallelisms/parallelize_llama.py, 2024): all that is no batch of products, as those inside attention are.
pub fn second_products(graph: &Graph, layer_of: &[Option<u32>]) -> Vec<bool> {
    let mut counts: FxHashMap<u32, u32> = FxHashMap::default();
    let is_second = |v: ValueId| {
        let Op::DotGeneral(dot) = &graph.node(v).op else { return false };
        let Some(layer) = layer_of[v.index()].filter(|_| dot.lhs_batch.is_empty()) else { return false };
        let count = counts.entry(layer).or_default();
        *count += 1;
        count.is_multiple_of(2)
    };
    graph.values().map(is_second).collect()
}

/// Returns true if a value is a product that is better recomputed than kept ([`DotGeneral::grows`]).
///
/// [`DotGeneral::grows`]: altiplano_ir::op::DotGeneral::grows
pub fn grows(graph: &Graph, v: ValueId) -> bool {
    let node = graph.node(v);
    let shape = |i: usize| graph.shape(node.operands[i]);
    matches!(&node.op, Op::DotGeneral(dot) if dot.grows(shape(0), shape(1), &node.ty.shape))
}

#[cfg(test)]
mod tests {
    use super::*;
    use altiplano_ir::dtype::DType;
    use altiplano_ir::op::{DotGeneral, Input, Parameter};
    use altiplano_ir::types::TensorType;

    #[test]
    fn every_second_product_of_a_layer_is_counted() {
        let mut g = Graph::new("products");
        let ty = TensorType::new(DType::F32, [4, 4]);
        let x = g.emit(Op::Input(Input { name: "x".into(), ty: ty.clone() }), &[]);
        let w = g.emit(Op::Parameter(Parameter::new("w", ty)), &[]);
        let product = |lhs_batch: Vec<usize>, at: usize| {
            let rhs_batch = lhs_batch.clone();
            Op::DotGeneral(DotGeneral { lhs_batch, rhs_batch, lhs_contract: vec![at], rhs_contract: vec![at] })
        };
        let plain = || product(vec![], 1);
        let a = g.emit(plain(), &[x, w]);
        // Products in batches, as attention has them, are none of these.
        let batched = g.emit(product(vec![0], 1), &[a, x]);
        let b = g.emit(plain(), &[a, w]);
        let c = g.emit(plain(), &[b, w]);
        let d = g.emit(plain(), &[c, w]);
        let e = g.emit(plain(), &[d, w]);
        let layer = |v: ValueId| match v {
            v if v == x || v == w => None,
            v if v.0 <= c.0 => Some(0),
            _ => Some(1),
        };
        let layer_of: Vec<Option<u32>> = g.values().map(layer).collect();
        let found = second_products(&g, &layer_of);
        let again: Vec<ValueId> = g.values().filter(|v| found[v.index()]).collect();
        assert_eq!(again, [b, e], "{batched}");
        // Under selective recomputation they are computed again, and without it they are not.
        let users = g.users();
        let of = |level: Recompute| {
            let recompute = &move |_| level;
            let repeats = Repeats {
                graph: &g,
                layer_of: &layer_of,
                users: &users,
                recompute,
                fused_attention: false,
                always: &[],
                products: &found,
            };
            repeats.of([a, b].into_iter()).into_iter().collect::<Vec<_>>()
        };
        assert_eq!(of(Recompute::None), []);
        assert_eq!(of(Recompute::Selective), [b]);
        assert_eq!(of(Recompute::Full), [a, b]);
    }
}
