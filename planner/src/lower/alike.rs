//! Nodes of a model that are alike: equal ops on operands of equal types. Their sharding rules are equal, and equal
//! strategies give equal layouts, so a model of many equal layers derives both once.

use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::Op;
use altiplano_ir::rule::ShardingRule;
use rustc_hash::{FxHashMap, FxHasher};
use std::hash::{Hash, Hasher};
use std::mem::discriminant;
use std::sync::OnceLock;

/// Most kinds that a node is compared with. Beyond it, the node is a kind of its own, which only derives more.
const MOST_COMPARED: usize = 32;

/// The kind of every node of a graph.
pub struct Alike {
    kinds: Vec<u32>,
    /// The rule of each kind, once it is asked for.
    rules: Vec<OnceLock<ShardingRule>>,
}

impl Alike {
    pub fn new(graph: &Graph) -> Alike {
        let mut by_hash: FxHashMap<u64, Vec<(u32, ValueId)>> = FxHashMap::default();
        let (mut kinds, mut count) = (Vec::with_capacity(graph.len()), 0);
        for v in graph.values() {
            let node = graph.node(v);
            let types = |v: ValueId| graph.node(v).operands.iter().map(|o| graph.ty(*o));
            // Leaves differ at least by name.
            let mut known = (!node.op.is_leaf()).then(|| {
                let mut hasher = FxHasher::default();
                discriminant(&node.op).hash(&mut hasher);
                node.ty.hash(&mut hasher);
                types(v).for_each(|ty| ty.hash(&mut hasher));
                by_hash.entry(hasher.finish()).or_default()
            });
            let same = |first: ValueId| {
                let other = graph.node(first);
                other.ty == node.ty && types(first).eq(types(v)) && is_same(&other.op, &node.op)
            };
            let latest = known.iter().flat_map(|known| known.iter().rev().take(MOST_COMPARED));
            let found = latest.copied().find(|(_, first)| same(*first)).map(|(kind, _)| kind);
            kinds.push(found.unwrap_or(count));
            if found.is_none() {
                known.iter_mut().for_each(|known| known.push((count, v)));
                count += 1;
            }
        }
        Alike { kinds, rules: (0..count).map(|_| OnceLock::new()).collect() }
    }

    /// The kind of a node.
    pub fn kind(&self, v: ValueId) -> u32 {
        self.kinds[v.index()]
    }

    /// The sharding rule of a node of `graph`, for which the kinds are.
    pub fn rule(&self, graph: &Graph, v: ValueId) -> &ShardingRule {
        self.rules[self.kind(v) as usize].get_or_init(|| graph.rule(v))
    }
}

fn is_same(a: &Op, b: &Op) -> bool {
    discriminant(a) == discriminant(b) && a == b
}

#[cfg(test)]
mod tests {
    use super::*;
    use altiplano_ir::dtype::DType;
    use altiplano_ir::op::{Input, Parameter, Transpose, Unary};
    use altiplano_ir::types::TensorType;

    #[test]
    fn equal_ops_on_equal_types_are_one_kind() {
        let mut g = Graph::new("alike");
        let ty = TensorType::new(DType::F32, [4, 4]);
        let x = g.emit(Op::Input(Input { name: "x".into(), ty: ty.clone() }), &[]);
        let w = g.emit(Op::Parameter(Parameter::new("w", ty)), &[]);
        let a = g.add(x, w);
        let b = g.add(a, w);
        let c = g.mul(b, w);
        let half = g.convert(x, DType::BF16);
        let d = g.add(half, half);
        let turned = g.emit(Op::Transpose(Transpose { permutation: vec![1, 0] }), &[c]);
        let kept = g.emit(Op::Transpose(Transpose { permutation: vec![0, 1] }), &[turned]);
        let e = g.emit(Op::Unary(Unary::Exponential), &[kept]);
        let alike = Alike::new(&g);
        assert_eq!(alike.kind(a), alike.kind(b));
        let mut distinct: Vec<u32> = [x, w, a, c, half, d, turned, kept, e].iter().map(|&v| alike.kind(v)).collect();
        distinct.dedup();
        assert_eq!(distinct.len(), 9, "{distinct:?}");
        for v in [a, b, c, d, turned, kept, e] {
            assert_eq!(alike.rule(&g, v), &g.rule(v));
        }
    }

    #[test]
    fn many_kinds_of_one_type_stay_apart() {
        let mut g = Graph::new("many");
        let x = g.emit(Op::Input(Input { name: "x".into(), ty: TensorType::new(DType::F32, [2, 2]) }), &[]);
        let numbers: Vec<ValueId> = (0..3 * MOST_COMPARED).map(|n| g.splat_like(x, n as f64)).collect();
        let alike = Alike::new(&g);
        let mut kinds: Vec<u32> = numbers.iter().map(|&v| alike.kind(v)).collect();
        kinds.dedup();
        assert_eq!(kinds.len(), numbers.len());
    }
}
