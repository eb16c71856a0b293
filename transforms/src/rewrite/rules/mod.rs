//! The rules. Each inspects one class and returns classes that equal it.

mod activation;
mod attention;
mod normalisation;
mod parallel;
mod routing;
mod softmax;
mod structure;

use super::egraph::Builder;
use egg::Id;

/// A rewrite. `apply` adds terms that equal a class and returns their classes.
pub(crate) struct Rule {
    /// The name by which tests report the rule.
    #[cfg_attr(not(test), expect(dead_code))]
    pub name: &'static str,
    pub apply: fn(&mut Builder, Id) -> Vec<Id>,
}

/// All rules, in the order in which they are tried.
pub(crate) const RULES: &[Rule] = &[
    Rule { name: "transpose of transpose", apply: structure::transpose_of_transpose },
    Rule { name: "transpose of nothing but ones", apply: structure::transpose_of_ones },
    Rule { name: "transpose of merged dimensions", apply: structure::transpose_of_merged },
    Rule { name: "transpose of broadcast", apply: structure::transpose_of_broadcast },
    Rule { name: "reshape of matmul", apply: structure::reshape_of_dot },
    Rule { name: "reshape of elementwise op", apply: structure::reshape_of_elementwise },
    Rule { name: "reshape of reshape", apply: structure::reshape_of_reshape },
    Rule { name: "broadcast that repeats nothing", apply: structure::broadcast_of_ones },
    Rule { name: "broadcast of broadcast", apply: structure::broadcast_of_broadcast },
    Rule { name: "elementwise op of broadcasts", apply: structure::elementwise_of_broadcasts },
    Rule { name: "elementwise op of unsqueezed values", apply: structure::elementwise_of_reshapes },
    Rule { name: "transpose of elementwise op", apply: structure::transpose_of_elementwise },
    Rule { name: "convert of convert", apply: structure::convert_of_convert },
    Rule { name: "matmul of transpose", apply: structure::dot_of_transpose },
    Rule { name: "matmul of scaled value", apply: structure::dot_of_scaled },
    Rule { name: "parallel matmuls", apply: parallel::parallel_matmuls },
    Rule { name: "scale of scale", apply: structure::scale_of_scale },
    Rule { name: "lookup in order", apply: structure::lookup_in_order },
    Rule { name: "negation", apply: structure::negation },
    Rule { name: "power", apply: activation::power },
    Rule { name: "division by root", apply: activation::division_by_root },
    Rule { name: "product with reciprocal", apply: activation::product_with_reciprocal },
    Rule { name: "activation", apply: activation::activation },
    Rule { name: "mean", apply: normalisation::mean },
    Rule { name: "layer norm", apply: normalisation::layer_norm },
    Rule { name: "rms norm", apply: normalisation::rms_norm },
    Rule { name: "batch norm", apply: normalisation::batch_norm },
    Rule { name: "softmax", apply: softmax::softmax },
    Rule { name: "log softmax", apply: softmax::log_softmax },
    Rule { name: "guarded softmax", apply: softmax::guarded },
    Rule { name: "order of softmax", apply: routing::order_of_softmax },
    Rule { name: "gates", apply: routing::gates },
    Rule { name: "normalised gates", apply: routing::normalised },
    Rule { name: "gates that are looked up", apply: routing::looked_up },
    Rule { name: "cross entropy", apply: softmax::cross_entropy },
    Rule { name: "rotary positions", apply: attention::rotary },
    Rule { name: "rotary positions by halves", apply: attention::rotary_of_halves },
    Rule { name: "rotary positions by pairs", apply: attention::rotary_of_pairs },
    Rule { name: "transpose of rotary positions", apply: attention::transpose_of_rotary },
    Rule { name: "attention", apply: attention::attention },
];

/// The largest number of rounds, in which all rules visit all classes.
const MAX_ROUNDS: usize = 12;

/// The largest number of classes per node of the region, and for any region.
const GROWTH: usize = 12;
const MAX_TERMS: usize = 60_000;

/// Applies the rules until none finds anything new, or until the limits are reached.
pub(crate) fn saturate(builder: &mut Builder, nodes: usize) {
    saturate_with(builder, nodes, |_, _, _, _| {});
}

/// [`saturate`] with a callback for each equality before it is recorded: (terms, rule, class, new class).
pub(crate) fn saturate_with(builder: &mut Builder, nodes: usize, mut claim: impl FnMut(&Builder, &Rule, Id, Id)) {
    let most = (GROWTH * nodes + 2000).min(MAX_TERMS);
    for _ in 0..MAX_ROUNDS {
        let mut changed = false;
        for rule in RULES {
            let mut ids: Vec<Id> = builder.egraph.classes().map(|c| c.id).collect();
            ids.sort_unstable();
            let mut equal = Vec::new();
            for id in ids {
                for new in (rule.apply)(builder, id) {
                    if !builder.same(id, new) {
                        equal.push((id, new));
                    }
                }
            }
            for (id, new) in equal {
                if !builder.same(id, new) {
                    claim(builder, rule, id, new);
                    changed |= builder.union(id, new);
                }
            }
            builder.egraph.rebuild();
            if builder.egraph.total_number_of_nodes() > most {
                return;
            }
        }
        if !changed {
            return;
        }
    }
}

/// Returns true if two numbers are the same constant, up to the rounding of a float type.
fn near(a: f64, b: f64, relative: f64) -> bool {
    (a - b).abs() <= relative * b.abs()
}
