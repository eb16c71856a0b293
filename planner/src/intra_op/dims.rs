//! The quantities that dimensions of a model's values count: samples and tokens, experts, or blocks of features.
//!
//! The strategies of a node depend on them. They follow from the sharding rules of all nodes, so they are found once for
//! a model, and not for each mesh.

use crate::features::parallelism::expert_products;
use crate::lower::alike::Alike;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::rule::{FactorKind, ShardingRule};
use std::sync::OnceLock;

/// For each value, bit masks of the dimensions that count one thing, found when they are first asked for.
#[derive(Default)]
pub struct CountedDims {
    inputs: OnceLock<Vec<u32>>,
    experts: OnceLock<Vec<u32>>,
}

impl CountedDims {
    /// The dimensions that come from the model's inputs. These are samples and tokens, as opposed to features, whose
    /// sizes depend only on parameters.
    pub fn of_inputs(&self, graph: &Graph, alike: &Alike) -> &[u32] {
        self.inputs.get_or_init(|| input_dims(graph, alike))
    }

    /// The dimensions that count experts: those of products with parameters of experts, and all that share a factor
    /// with them.
    pub fn of_experts(&self, graph: &Graph, alike: &Alike) -> &[u32] {
        self.experts.get_or_init(|| expert_dims(graph, alike))
    }
}

/// Inputs without samples, such as a router's bias for each expert, say nothing of samples where others have them.
fn input_dims(graph: &Graph, alike: &Alike) -> Vec<u32> {
    let mut dims = vec![0u32; graph.len()];
    let has_samples = |v: ValueId| graph.node(v).batch_dims != 0;
    let any = graph.inputs().any(|(v, _)| has_samples(v));
    for (v, _) in graph.inputs().filter(|(v, _)| !any || has_samples(*v)) {
        dims[v.index()] = (1u32 << graph.shape(v).len().min(31)) - 1;
    }
    for v in graph.values() {
        let node = graph.node(v);
        if node.op.is_leaf() {
            continue;
        }
        let rule = alike.rule(graph, v);
        let mut is_of_input = vec![false; rule.factors.len()];
        for (o, operand) in node.operands.iter().zip(&rule.operands) {
            for (_, factors) in operand.iter().enumerate().filter(|(d, _)| dims[o.index()] >> d & 1 == 1) {
                factors.iter().for_each(|&f| is_of_input[f as usize] = true);
            }
        }
        for (d, factors) in rule.result.iter().enumerate() {
            if factors.iter().any(|&f| is_of_input[f as usize]) {
                dims[v.index()] |= 1 << d;
            }
        }
    }
    dims
}

fn expert_dims(graph: &Graph, alike: &Alike) -> Vec<u32> {
    let mut dims = vec![0u32; graph.len()];
    for (v, dim) in expert_products(graph) {
        dims[v.index()] |= 1 << dim;
    }
    for v in graph.values().rev().chain(graph.values()) {
        let node = graph.node(v);
        if node.op.is_leaf() {
            continue;
        }
        let rule = alike.rule(graph, v);
        let tensors = || node.operands.iter().zip(&rule.operands).chain([(&v, &rule.result)]);
        let mut counts = vec![false; rule.factors.len()];
        for (value, tensor) in tensors() {
            for (_, factors) in tensor.iter().enumerate().filter(|(d, _)| dims[value.index()] >> d & 1 == 1) {
                if let [only] = factors[..] {
                    counts[usize::from(only)] = true;
                }
            }
        }
        for (value, tensor) in tensors() {
            for (d, factors) in tensor.iter().enumerate() {
                if matches!(factors[..], [only] if counts[usize::from(only)]) {
                    dims[value.index()] |= 1 << d;
                }
            }
        }
    }
    dims
}

/// Marks the factors of a node that some of the given dimensions of its operands or result have.
pub fn factors_among(graph: &Graph, v: ValueId, rule: &ShardingRule, dims_of: impl Fn(ValueId) -> u32) -> Vec<bool> {
    let mut found = vec![false; rule.factors.len()];
    for (&value, dims) in graph.node(v).operands.iter().zip(&rule.operands).chain([(&v, &rule.result)]) {
        let among = dims_of(value);
        for (_, factors) in dims.iter().enumerate().filter(|(d, _)| among >> d & 1 == 1) {
            factors.iter().for_each(|&f| found[f as usize] = true);
        }
    }
    found
}

/// For each value and dimension, the block counts within which a split is useful. If an op slices a block of
/// the dimension, as with a fused q/k/v projection, the split must run within blocks all the way back to the
/// parameter.
pub fn block_counts(graph: &Graph, alike: &Alike) -> Vec<Vec<Vec<u64>>> {
    let mut counts: Vec<Vec<Vec<u64>>> = graph.values().map(|v| vec![Vec::new(); graph.shape(v).len()]).collect();
    let add = |list: &mut Vec<u64>, outer: u64| {
        let new = outer > 1 && list.len() < 2 && !list.contains(&outer);
        if new {
            list.push(outer);
        }
        new
    };
    let mut changed = true;
    let mut rounds = 0;
    while changed && rounds < 4 {
        changed = false;
        rounds += 1;
        for v in graph.values().rev().chain(graph.values()) {
            let node = graph.node(v);
            let rule = alike.rule(graph, v);
            let tensors = || node.operands.iter().copied().zip(&rule.operands).chain([(v, &rule.result)]);
            let is_plain = |(d, factors): (&Vec<Vec<u64>>, &Vec<Vec<u8>>)| {
                d.iter().all(Vec::is_empty) && factors.iter().all(|f| f.len() <= 1)
            };
            // Most ops do not constrain blocks.
            if tensors().all(|(value, dims)| is_plain((&counts[value.index()], dims))) {
                continue;
            }
            let tensors: Vec<(ValueId, &Vec<Vec<u8>>)> = tensors().collect();
            let mut of_factor: Vec<Vec<u64>> = vec![Vec::new(); rule.factors.len()];
            for (value, dims) in &tensors {
                for (d, factors) in dims.iter().enumerate() {
                    match factors.as_slice() {
                        [single] => {
                            for &outer in &counts[value.index()][d] {
                                add(&mut of_factor[*single as usize], outer);
                            }
                        }
                        // If leading factors cannot be split, a split within their blocks is useful.
                        many => {
                            let whole =
                                many.iter().take_while(|&&f| rule.factors[f as usize].kind == FactorKind::Whole);
                            let outer: u64 = whole.map(|&f| rule.factors[f as usize].size).product();
                            let size: u64 = many.iter().map(|&f| rule.factors[f as usize].size).product();
                            if outer > 1 && outer < size {
                                changed |= add(&mut counts[value.index()][d], outer);
                            }
                        }
                    }
                }
            }
            for (value, dims) in &tensors {
                for (d, factors) in dims.iter().enumerate() {
                    if let [single] = factors.as_slice() {
                        for &outer in &of_factor[*single as usize] {
                            changed |= add(&mut counts[value.index()][d], outer);
                        }
                    }
                }
            }
        }
    }
    counts
}
