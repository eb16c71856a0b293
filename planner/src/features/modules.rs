//! Finds the modules of layers that selective recomputation can repeat, from the products of a graph alone.
//!
//! Sums of a value and of products that derive from it are residual connections: they form the stream that runs through a model.
//! Between two values of the stream lies attention, if a product of two activations does, or a feed-forward layer. Names are not
//! read, so models from all importers are alike.

use super::parallelism::expert_products;
use crate::lower::repeat::grows;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{Binary, Op};
use altiplano_ir::recompute::{Module, Modules};
use std::collections::BTreeSet;

/// The modules of each value, without [`Module::AttentionCore`], which `grows` tells. `users` are the users of each value.
pub fn modules(graph: &Graph, layer_of: &[Option<u32>], users: &[Vec<ValueId>]) -> Vec<Modules> {
    let mut found = feed_forward_and_up_projections(graph, users);
    for (modules, is_second) in found.iter_mut().zip(second_products(graph, layer_of)) {
        if is_second {
            *modules = modules.with(Module::SecondProducts);
        }
    }
    found
}

/// The modules that a model has, apart from [`Module::SecondProducts`].
pub fn modules_of(graph: &Graph) -> Modules {
    let all = feed_forward_and_up_projections(graph, &graph.users()).into_iter().fold(Modules::NONE, Modules::union);
    let has_core = graph
        .values()
        .any(|v| grows(graph, v) || matches!(graph.node(v).op, Op::Composite(_)) && graph.node(v).op.is_contraction());
    if has_core { all.with(Module::AttentionCore) } else { all }
}

/// Every second product of each layer, in order, as torchtitan's selective checkpointing counts them (`selective_ac_option = 'op'`,
/// torchtitan/parallelisms/parallelize_llama.py, 2024): all that is no batch of products, as those inside attention are.
fn second_products(graph: &Graph, layer_of: &[Option<u32>]) -> Vec<bool> {
    let (mut layer, mut count) = (None, 0);
    let is_second = |v: ValueId| {
        let Op::DotGeneral(dot) = &graph.node(v).op else { return false };
        let Some(own) = layer_of[v.index()].filter(|_| dot.lhs_batch.is_empty()) else { return false };
        if layer != Some(own) {
            (layer, count) = (Some(own), 0);
        }
        count += 1;
        count % 2 == 0
    };
    graph.values().map(is_second).collect()
}

/// The role of a value in its block.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// A product of activations with weights.
    Weighted,
    /// The same with the weights of experts.
    Expert,
    /// A product of activations.
    Activations,
    /// A value of the stream, which separates blocks.
    Stream,
    Other,
}

/// The contents of a value's block before it.
#[derive(Clone, Copy, Default)]
struct Before {
    /// The last value of the stream; `None` before the first one.
    stream: Option<ValueId>,
    /// Products with weights on the way from there, including the value itself.
    weighted: u32,
    /// True after the core of attention and up to the next product with weights.
    core: bool,
}

/// The contents of a value's block after it.
#[derive(Clone, Copy, Default)]
struct After {
    core: bool,
    experts: bool,
    stream: bool,
}

fn feed_forward_and_up_projections(graph: &Graph, users: &[Vec<ValueId>]) -> Vec<Modules> {
    let depends = graph.depends_on(|v| matches!(graph.node(v).op, Op::Input(_)));
    let mut roles = roles(graph, &depends);
    let mut before = vec![Before::default(); graph.len()];
    let operands = |v: ValueId| graph.node(v).operands.iter().copied().filter(|o| depends[o.index()]);
    // A product of activations is the core of attention, unless it sends tokens to experts or back.
    let mut behind_experts = vec![false; graph.len()];
    for v in graph.values().filter(|v| depends[v.index()] && roles[v.index()] != Role::Stream) {
        behind_experts[v.index()] = roles[v.index()] == Role::Expert || operands(v).any(|o| behind_experts[o.index()]);
    }
    let mut after = vec![After::default(); graph.len()];
    for v in graph.values().rev().filter(|v| depends[v.index()]) {
        let mut all = After::default();
        for &u in &users[v.index()] {
            let (role, next) = (roles[u.index()], after[u.index()]);
            let next = if role == Role::Stream { After { stream: true, ..After::default() } } else { next };
            all.stream |= next.stream;
            all.experts |= next.experts || role == Role::Expert;
            all.core |= next.core || role == Role::Activations && !next.experts && !behind_experts[u.index()];
        }
        after[v.index()] = all;
    }
    for v in graph.values().filter(|v| depends[v.index()]) {
        let role = &mut roles[v.index()];
        if *role == Role::Stream {
            before[v.index()] = Before { stream: Some(v), ..Before::default() };
            continue;
        }
        let mut all = Before::default();
        for o in operands(v) {
            let of = before[o.index()];
            all.stream = all.stream.max(of.stream);
            all.weighted = all.weighted.max(of.weighted);
            all.core |= of.core;
        }
        match role {
            Role::Weighted | Role::Expert => all.weighted += 1,
            Role::Activations if behind_experts[v.index()] || after[v.index()].experts => *role = Role::Other,
            Role::Activations => all.core = true,
            Role::Stream | Role::Other => {}
        }
        before[v.index()] = all;
        if matches!(role, Role::Weighted | Role::Expert) {
            before[v.index()].core = false;
        }
    }
    let of_experts = graph.values().filter(|v| roles[v.index()] == Role::Expert);
    let with_experts: BTreeSet<Option<ValueId>> = of_experts.map(|v| before[v.index()].stream).collect();
    let mut found = vec![Modules::NONE; graph.len()];
    for v in graph.values().filter(|v| depends[v.index()]) {
        let (role, ahead) = (roles[v.index()], after[v.index()]);
        found[v.index()] = match role {
            Role::Stream | Role::Activations => Modules::NONE,
            Role::Other => operands(v).fold(Modules::NONE, |all, o| all.union(found[o.index()])),
            Role::Weighted | Role::Expert => {
                let has_core = operands(v).any(|o| before[o.index()].core);
                let here = before[v.index()];
                match () {
                    () if ahead.core && here.weighted > 1 => Modules::NONE.with(Module::UpProjections),
                    // Attention, and heads, which no stream follows.
                    () if ahead.core || has_core || !ahead.stream => Modules::NONE,
                    () if !with_experts.contains(&here.stream) => Modules::NONE.with(Module::Mlp),
                    () if behind_experts[v.index()] || ahead.experts => Modules::NONE.with(Module::Experts),
                    () => Modules::NONE.with(Module::SharedExperts).with(Module::Experts),
                }
            }
        };
    }
    found
}

fn roles(graph: &Graph, depends: &[bool]) -> Vec<Role> {
    let mut roles = vec![Role::Other; graph.len()];
    let of_experts: BTreeSet<ValueId> = expert_products(graph).into_iter().map(|(v, _)| v).collect();
    // Products on the longest way to a value.
    let mut products = vec![0u32; graph.len()];
    for v in graph.values().filter(|v| depends[v.index()]) {
        let node = graph.node(v);
        let longest = node.operands.iter().map(|o| products[o.index()]).max().unwrap_or(0);
        products[v.index()] = longest + u32::from(node.op.is_contraction());
        let has_weights = node.operands.iter().any(|o| !depends[o.index()]);
        roles[v.index()] = match &node.op {
            Op::GroupedDot(_) => Role::Expert,
            _ if of_experts.contains(&v) => Role::Expert,
            Op::DotGeneral(_) if !has_weights => Role::Activations,
            Op::Composite(_) if node.op.is_contraction() => Role::Activations,
            op if op.is_contraction() => Role::Weighted,
            Op::Binary(Binary::Add) => match node.operands[..] {
                [a, b] => match residual(graph, depends, &products, &roles, [a, b]) {
                    Some(start) => {
                        roles[start.index()] = Role::Stream;
                        Role::Stream
                    }
                    None => Role::Other,
                },
                _ => Role::Other,
            },
            _ => Role::Other,
        };
    }
    roles
}

/// The one of two summands that is of the stream, or from which the other derives through a product.
fn residual(
    graph: &Graph,
    depends: &[bool],
    products: &[u32],
    roles: &[Role],
    summands: [ValueId; 2],
) -> Option<ValueId> {
    if summands.iter().any(|s| !depends[s.index()]) {
        return None;
    }
    if let Some(stream) = summands.into_iter().find(|s| roles[s.index()] == Role::Stream) {
        return Some(stream);
    }
    let [first, last] = [summands[0].min(summands[1]), summands[0].max(summands[1])];
    if products[first.index()] >= products[last.index()] {
        return None;
    }
    let mut seen = BTreeSet::new();
    let mut open = vec![last];
    while let Some(v) = open.pop() {
        for &o in graph.node(v).operands.iter().filter(|&&o| o >= first && depends[o.index()]) {
            if o == first {
                return Some(first);
            }
            // Branches of a block have no value of the stream inside.
            if roles[o.index()] != Role::Stream && seen.insert(o) {
                open.push(o);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use altiplano_ir::dtype::DType;
    use altiplano_ir::op::{DotGeneral, Input, Parameter};
    use altiplano_ir::types::TensorType;

    /// A graph under construction, with the values that are marked as expected.
    struct Builder {
        graph: Graph,
        expected: Vec<(ValueId, Modules)>,
        weights: usize,
    }

    impl Builder {
        fn new() -> Builder {
            Builder { graph: Graph::new("blocks"), expected: Vec::new(), weights: 0 }
        }

        fn input(&mut self) -> ValueId {
            let ty = TensorType::new(DType::F32, [8, 8]);
            self.graph.emit(Op::Input(Input { name: "x".into(), ty }), &[])
        }

        fn weight(&mut self, shape: &[u64]) -> ValueId {
            self.weights += 1;
            let ty = TensorType::new(DType::F32, shape.to_vec());
            self.graph.emit(Op::Parameter(Parameter::new(format!("w{}", self.weights), ty)), &[])
        }

        fn product(&mut self, a: ValueId, b: ValueId) -> ValueId {
            let dot = DotGeneral { lhs_batch: vec![], rhs_batch: vec![], lhs_contract: vec![1], rhs_contract: vec![0] };
            self.graph.emit(Op::DotGeneral(dot), &[a, b])
        }

        /// A product with a new weight, expected in modules.
        fn weighted(&mut self, x: ValueId, modules: &[Module]) -> ValueId {
            let w = self.weight(&[8, 8]);
            let v = self.product(x, w);
            self.expected.push((v, modules.iter().copied().collect()));
            v
        }

        fn add(&mut self, a: ValueId, b: ValueId) -> ValueId {
            self.graph.emit(Op::Binary(Binary::Add), &[a, b])
        }

        /// An activation with a sum inside, which is no residual connection.
        fn activation(&mut self, x: ValueId) -> ValueId {
            let square = self.graph.emit(Op::Binary(Binary::Multiply), &[x, x]);
            self.add(x, square)
        }

        fn attention(&mut self, x: ValueId, is_latent: bool) -> ValueId {
            let heads = |b: &mut Builder| {
                let v = b.weighted(x, &[]);
                if is_latent { b.weighted(v, &[Module::UpProjections]) } else { v }
            };
            let [q, k, v] = [heads(self), heads(self), heads(self)];
            let scores = self.product(q, k);
            let mixed = self.product(scores, v);
            let out = self.weighted(mixed, &[]);
            self.add(x, out)
        }

        fn mlp(&mut self, x: ValueId, modules: &[Module]) -> ValueId {
            let wide = self.weighted(x, modules);
            let active = self.activation(wide);
            self.expected.push((active, modules.iter().copied().collect()));
            self.weighted(active, modules)
        }

        fn check(&self) {
            let found = feed_forward_and_up_projections(&self.graph, &self.graph.users());
            for (v, modules) in &self.expected {
                assert_eq!(found[v.index()], *modules, "{v} of\n{:?}", self.graph.node(*v));
            }
        }
    }

    #[test]
    fn blocks_of_attention_and_feed_forward_layers_are_told_apart() {
        let mut b = Builder::new();
        let mut x = b.input();
        for is_latent in [false, true, true] {
            x = b.attention(x, is_latent);
            let out = b.mlp(x, &[Module::Mlp]);
            x = b.add(x, out);
        }
        // The head is no feed-forward layer.
        b.weighted(x, &[]);
        b.check();
    }

    #[test]
    fn feed_forward_layers_beside_attention_are_found() {
        let mut b = Builder::new();
        let mut x = b.input();
        for _ in 0..2 {
            let attended = b.attention(x, false);
            let out = b.mlp(x, &[Module::Mlp]);
            x = b.add(attended, out);
        }
        b.weighted(x, &[]);
        b.check();
    }

    #[test]
    fn routers_experts_and_shared_experts_are_told_apart() {
        let mut b = Builder::new();
        let mut x = b.input();
        for _ in 0..2 {
            x = b.attention(x, false);
            let chosen = b.weighted(x, &[Module::Experts]);
            // Tokens on their way to experts: as many for each of 4 experts.
            let sent = b.product(chosen, x);
            let ty = |shape: &[u64]| TensorType::new(DType::F32, shape.to_vec());
            let by_expert = b.graph.emit(Op::Reshape(altiplano_ir::op::Reshape { shape: vec![4, 2, 8] }), &[sent]);
            let weights = b.weight(&[4, 8, 8]);
            let dot =
                DotGeneral { lhs_batch: vec![0], rhs_batch: vec![0], lhs_contract: vec![2], rhs_contract: vec![1] };
            let experts = b.graph.emit(Op::DotGeneral(dot), &[by_expert, weights]);
            assert_eq!(b.graph.ty(experts), &ty(&[4, 2, 8]));
            b.expected.push((experts, Modules::NONE.with(Module::Experts)));
            let back = b.graph.emit(Op::Reshape(altiplano_ir::op::Reshape { shape: vec![8, 8] }), &[experts]);
            let routed = b.product(chosen, back);
            b.expected.push((routed, Modules::NONE.with(Module::Experts)));
            let shared = b.mlp(x, &[Module::SharedExperts, Module::Experts]);
            let both = b.add(routed, shared);
            x = b.add(x, both);
        }
        b.check();
    }

    #[test]
    fn every_second_product_of_a_layer_is_counted() {
        let mut b = Builder::new();
        let x = b.input();
        let first = b.weighted(x, &[]);
        // Products in batches, as attention has them, are none of these.
        let batched =
            DotGeneral { lhs_batch: vec![0], rhs_batch: vec![0], lhs_contract: vec![1], rhs_contract: vec![1] };
        b.graph.emit(Op::DotGeneral(batched), &[first, x]);
        let second = b.weighted(first, &[]);
        let third = b.weighted(second, &[]);
        let fourth = b.weighted(third, &[]);
        let fifth = b.weighted(fourth, &[]);
        let layer = |v: ValueId| match &b.graph.node(v).op {
            op if op.is_leaf() => None,
            _ => Some(u32::from(v > third)),
        };
        let layer_of: Vec<Option<u32>> = b.graph.values().map(layer).collect();
        let found = second_products(&b.graph, &layer_of);
        let again: Vec<ValueId> = b.graph.values().filter(|v| found[v.index()]).collect();
        assert_eq!(again, [second, fifth]);
    }
}
