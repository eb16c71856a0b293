//! Chooses the forward values that the backward pass recomputes, and with that the values it keeps. Lowering applies
//! this to the graph without composites, and the search's estimates to the graph with them.

use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{Binary, Op};
use altiplano_ir::recompute::{Module, Modules, Recompute};
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
    /// The modules that selective recomputation repeats.
    pub selective: Modules,
    /// The modules of each value ([`modules`]); may be empty if `selective` has none but the core of attention.
    ///
    /// [`modules`]: crate::features::modules::modules
    pub modules: &'a [Modules],
}

impl Repeats<'_> {
    /// Returns the values among `nodes`, given in order, that are recomputed.
    ///
    /// * Full recomputation repeats everything that does not leave its layer.
    /// * Otherwise elementwise results and broadcasts within a layer are repeated, and so are a ring's blocks. They are
    ///   cheap, and their inputs are mostly kept anyway.
    /// * Selective recomputation also repeats the products for which [`grows`] is true, if it repeats the core of attention, and
    ///   what belongs to the other modules. With every second product it repeats everything that is no product.
    ///
    /// An addition of two kept values is kept itself, since its operands would otherwise be kept for it alone. The sum
    /// of a product and a bias is kept in place of the product, if nothing else reads that, and so is a narrower form of it.
    pub fn of(&self, nodes: impl Iterator<Item = ValueId>) -> BTreeSet<ValueId> {
        let Repeats { graph, layer_of, users, recompute, fused_attention, always, selective, modules } = *self;
        let mut again = BTreeSet::new();
        // For each value, the large kept values from which recomputed ops derive it.
        let mut sources: FxHashMap<ValueId, Vec<ValueId>> = FxHashMap::default();
        // Values that are kept in the place of products.
        let mut instead: BTreeSet<ValueId> = BTreeSet::new();
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
            let chosen = if level == Recompute::Selective { selective } else { Modules::NONE };
            let product = (fused_attention || chosen.contains(Module::AttentionCore)) && grows(graph, v);
            let full = level == Recompute::Full;
            let always = always.get(v.index()).copied().unwrap_or(false);
            // Sums of rows are kept beside products: fused attention leaves them for its backward pass.
            let keeps =
                node.op.is_contraction() || matches!(node.op, Op::Composite(_) | Op::Reduce(_) | Op::Collective(_));
            let of_module = modules.get(v.index()).is_some_and(|of| of.intersects(chosen));
            let product = product || of_module || chosen.contains(Module::SecondProducts) && !keeps;
            let passes_on = sum || matches!(node.op, Op::Convert(_));
            let replaces = |o: &ValueId| {
                let is_product = graph.node(*o).op.is_contraction() && !again.contains(o) || instead.contains(o);
                is_product && users[o.index()] == [v] && node.ty.bytes() <= graph.ty(*o).bytes()
            };
            let replaces = passes_on && large <= 1 && node.operands.iter().any(replaces);
            // When the backward pass runs, a total may be that of the next step.
            let repeat = !leaves_layer
                && !graph.is_total(v)
                && (always || full || product || self.is_cheap(v) && !replaces && !(sum && large > 1));
            if replaces && !repeat {
                instead.insert(v);
            }
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

#[cfg(test)]
mod tests {
    use super::*;
    use altiplano_ir::dtype::DType;
    use altiplano_ir::op::{DotGeneral, Input, Parameter, Unary};
    use altiplano_ir::types::TensorType;

    #[test]
    fn selective_recomputation_repeats_the_modules_that_are_chosen() {
        let mut g = Graph::new("products");
        let ty = TensorType::new(DType::F32, [4, 4]);
        let x = g.emit(Op::Input(Input { name: "x".into(), ty: ty.clone() }), &[]);
        let w = g.emit(Op::Parameter(Parameter::new("w", ty)), &[]);
        let product =
            || DotGeneral { lhs_batch: vec![], rhs_batch: vec![], lhs_contract: vec![1], rhs_contract: vec![1] };
        let [mut a, mut b, mut c] = [x; 3];
        for v in [&mut a, &mut b, &mut c] {
            *v = g.emit(Op::DotGeneral(product()), &[x, w]);
        }
        let layer_of: Vec<Option<u32>> = g.values().map(|v| (v >= a).then_some(0)).collect();
        let mut modules = vec![Modules::NONE; g.len()];
        modules[a.index()] = Modules::NONE.with(Module::Mlp);
        modules[b.index()] = Modules::NONE.with(Module::SharedExperts).with(Module::Experts);
        let of = |level: Recompute, chosen: &[Module]| {
            let repeats = Repeats {
                graph: &g,
                layer_of: &layer_of,
                users: &vec![Vec::new(); g.len()],
                recompute: &move |_| level,
                fused_attention: false,
                always: &[],
                selective: chosen.iter().copied().collect(),
                modules: &modules,
            };
            repeats.of([a, b, c].into_iter()).into_iter().collect::<Vec<_>>()
        };
        assert_eq!(of(Recompute::None, &Module::ALL), []);
        assert_eq!(of(Recompute::Selective, &[Module::Mlp]), [a]);
        assert_eq!(of(Recompute::Selective, &[Module::Experts]), [b]);
        assert_eq!(of(Recompute::Selective, &[Module::SharedExperts, Module::Mlp]), [a, b]);
        assert_eq!(of(Recompute::Selective, &[Module::AttentionCore, Module::UpProjections]), []);
        assert_eq!(of(Recompute::Full, &[]), [a, b, c]);
    }

    #[test]
    fn the_sum_of_a_product_and_a_bias_is_kept_in_place_of_the_product() {
        let mut g = Graph::new("biased");
        let ty = TensorType::new(DType::F32, [4, 4]);
        let x = g.emit(Op::Input(Input { name: "x".into(), ty: ty.clone() }), &[]);
        let w = g.emit(Op::Parameter(Parameter::new("w", ty)), &[]);
        let b = g.emit(Op::Parameter(Parameter::new("b", TensorType::new(DType::F32, [4]))), &[]);
        let dot = DotGeneral { lhs_batch: vec![], rhs_batch: vec![], lhs_contract: vec![1], rhs_contract: vec![1] };
        let product = g.emit(Op::DotGeneral(dot.clone()), &[x, w]);
        let bias = g.broadcast(b, &[4, 4], &[1]);
        let sum = g.add(product, bias);
        let hidden = g.unary(Unary::Tanh, sum);
        g.emit(Op::DotGeneral(dot), &[hidden, w]);
        let again = |g: &Graph| {
            let layer_of: Vec<Option<u32>> = g.values().map(|v| (v >= product).then_some(0)).collect();
            let repeats = Repeats {
                graph: g,
                layer_of: &layer_of,
                users: &g.users(),
                recompute: &|_| Recompute::None,
                fused_attention: false,
                always: &[],
                selective: Modules::NONE,
                modules: &[],
            };
            repeats.of(g.values().filter(|v| *v >= product)).into_iter().collect::<Vec<_>>()
        };
        assert_eq!(again(&g), [bias, hidden]);
        // A product that something else reads as well is kept for both.
        let other = g.unary(Unary::Tanh, product);
        assert_eq!(again(&g), [bias, sum, hidden, other]);
    }
}
