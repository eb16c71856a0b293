//! The floating-point operations that a step must compute, and a lower bound of its seconds.
//!
//! Products and convolutions count, once in the forward pass and in the backward pass once for each operand that has a
//! gradient. Of products under a mask, such as attention's, only the visible part counts, unless the convention counts
//! all. Recomputation does not count.

use altiplano_ir::cluster::{Cluster, Group};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::Op;
use altiplano_ir::plan::MfuConvention;
use altiplano_ir::types::TensorType;
use altiplano_ir::visible::{OfLeaf, Ranges, form, unknown_leaf, visible_parts};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;

/// Operations by the element type of the factors.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Work(BTreeMap<DType, f64>);

impl Work {
    fn add(&mut self, dtype: DType, flop: f64) {
        *self.0.entry(dtype).or_default() += flop;
    }

    pub fn flop(&self) -> f64 {
        self.0.values().sum()
    }

    /// Seconds at the peak rate of all devices together.
    pub fn seconds(&self, cluster: &Cluster) -> f64 {
        let rate = |dtype: DType| {
            let of_group = |group: &Group| {
                altiplano_cost_models::roofline::peak_flops(&group.device, dtype) * f64::from(group.num_devices())
            };
            cluster.groups.iter().map(of_group).sum::<f64>()
        };
        self.0.iter().map(|(&dtype, &flop)| flop / rate(dtype)).sum()
    }

    fn times(mut self, by: f64) -> Work {
        self.0.values_mut().for_each(|flop| *flop *= by);
        self
    }
}

/// Operations of the forward pass of `microbatches` microbatches and, if the model is trained, of the backward pass.
pub fn step_work(graph: &Graph, stops: &[ValueId], trains: bool, microbatches: u32, counts: MfuConvention) -> Work {
    let mut wanted = vec![false; graph.len()];
    for v in graph.values().filter(|_| trains) {
        let node = graph.node(v);
        let source = graph.is_trained(v) || node.operands.iter().any(|o| wanted[o.index()]);
        wanted[v.index()] = source && graph.ty(v).dtype.is_float() && !stops.contains(&v);
    }
    Counter { counts, known: FxHashMap::default() }.count(graph, &wanted, &unknown_leaf).times(f64::from(microbatches))
}

struct Counter {
    counts: MfuConvention,
    /// Composites that were counted before, by op, types, operands with gradients, and masks.
    known: FxHashMap<(String, Vec<TensorType>), Work>,
}

impl Counter {
    /// `wanted`: the values that have a gradient.
    fn count(&mut self, graph: &Graph, wanted: &[bool], of_leaf: OfLeaf<'_>) -> Work {
        let parts = match self.counts {
            MfuConvention::Computed => visible_parts(graph, of_leaf),
            MfuConvention::Full => vec![1.0; graph.len()],
        };
        let mut work = Work::default();
        for v in graph.values() {
            let node = graph.node(v);
            if let Op::Composite(op) = &node.op {
                let types = graph.operand_types(v);
                let gradients: Vec<bool> = node.operands.iter().map(|o| wanted[o.index()]).collect();
                // The ops that make a mask determine its visible part.
                let of_masks: String = node
                    .operands
                    .iter()
                    .filter(|o| graph.ty(**o).dtype == DType::Bool)
                    .map(|&o| form(graph, o))
                    .collect();
                let key = (format!("{op:?} {gradients:?} {of_masks}"), types.iter().map(|&ty| ty.clone()).collect());
                let inside = match self.known.get(&key) {
                    Some(known) => known.clone(),
                    None => {
                        let inside = op.body(&types).map_or(Work::default(), |body| {
                            let outer = Ranges::new(graph, of_leaf);
                            let operand = |leaf: ValueId| body.operand_of(leaf).map(|k| node.operands[k]);
                            let mut inner = vec![false; body.graph.len()];
                            for u in body.graph.values() {
                                let node = body.graph.node(u);
                                let source = operand(u).is_some_and(|o| wanted[o.index()])
                                    || node.operands.iter().any(|o| inner[o.index()]);
                                inner[u.index()] = source && node.ty.dtype.is_float();
                            }
                            let of_leaf = |leaf: ValueId, at: &[(u64, u64)]| {
                                operand(leaf).map_or_else(|| unknown_leaf(leaf, at), |o| outer.of(o, at))
                            };
                            self.count(&body.graph, &inner, &of_leaf)
                        });
                        self.known.insert(key, inside.clone());
                        inside
                    }
                };
                inside.0.iter().for_each(|(&dtype, &flop)| work.add(dtype, flop));
            } else if node.op.is_contraction() {
                let gradients = node.operands.iter().filter(|o| wanted[o.index()]).count();
                let passes = 1.0 + if wanted[v.index()] { gradients as f64 } else { 0.0 };
                let dtype = graph.ty(node.operands[0]).dtype;
                work.add(dtype, passes * parts[v.index()] * graph.flop(v) as f64);
            }
        }
        work
    }
}

#[cfg(test)]
#[path = "flop_tests.rs"]
mod tests;
