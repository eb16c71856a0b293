//! Random bits of a batch are counted by sample, so that they do not depend on the division of the batch.
//!
//! A framework counts random bits by their position in the traced tensor. A microbatch has fewer samples, and counting
//! from zero in each would draw the same bits for all of them. So counts along the batch become arithmetic on an extra
//! input, the number of each sample in the global batch. It is split like the batch, and every split draws the same
//! bits.

use crate::dtype::DType;
use crate::graph::{Graph, Node, ValueId};
use crate::literal::Literal;
use crate::op::{Input, Iota, Op};
use crate::types::TensorType;

/// The name of the input that numbers the samples of a global batch from 0. The supplier of batches provides it.
pub const SAMPLE_INDEX: &str = "(sample index)";

/// The name of the input of two `u32` that random bits are drawn with. The supplier of batches provides a new one for
/// each step.
pub const RANDOM_KEY: &str = "(random key)";

/// Returns true if a value is the number of each sample.
pub(crate) fn is_sample_index(graph: &Graph, v: ValueId) -> bool {
    matches!(&graph.node(v).op, Op::Input(input) if input.name == SAMPLE_INDEX)
}

/// Replaces counts along the batch that only random bits use by arithmetic on the sample's number. The batch must be
/// known.
pub(crate) fn count_by_sample(graph: &Graph) -> Graph {
    let users = graph.users();
    let counts = |v: ValueId| match &graph.node(v).op {
        Op::Iota(iota) => graph.node(v).batch_dims == 1 << iota.dim && feeds_only_counts(graph, &users, v),
        _ => false,
    };
    if graph.batch == 0 || !graph.values().any(counts) {
        return graph.clone();
    }
    let mut to = Graph { name: graph.name.clone(), batch: graph.batch, ..Default::default() };
    let mut sample = None;
    let mut map: Vec<ValueId> = Vec::with_capacity(graph.len());
    for v in graph.values() {
        let node = graph.node(v);
        let operands = node.operands.iter().map(|o| map[o.index()]).collect();
        map.push(match &node.op {
            Op::Iota(iota) if counts(v) => {
                let sample = *sample.get_or_insert_with(|| {
                    let ty = TensorType::new(DType::I32, [graph.batch]);
                    let op = Op::Input(Input { name: SAMPLE_INDEX.to_string(), ty: ty.clone() });
                    to.append(Node { op, operands: Vec::new(), ty, batch_dims: 1, name: String::new() })
                });
                let count = counted(&mut to, sample, iota);
                to.nodes[count.index()].name.clone_from(&node.name);
                count
            }
            _ => to.append(Node { operands, ..node.clone() }),
        });
    }
    to.outputs = graph.outputs.iter().map(|o| map[o.index()]).collect();
    to.take_pins(graph, |v| Some(map[v.index()]));
    to
}

/// Returns true if `v` is used only in counts of random bits.
fn feeds_only_counts(graph: &Graph, users: &[Vec<ValueId>], v: ValueId) -> bool {
    let mut stack = vec![v];
    let mut seen = std::collections::BTreeSet::new();
    while let Some(at) = stack.pop() {
        if graph.outputs.contains(&at) || users[at.index()].is_empty() {
            return false;
        }
        for &user in &users[at.index()] {
            let node = graph.node(user);
            match &node.op {
                // The operands are the two words of a key, then the two words of a count.
                Op::Threefry(_) if !node.operands[..2].contains(&at) => {}
                Op::Threefry(_) => return false,
                op if op.is_elementwise() || matches!(op, Op::Reshape(_) | Op::BroadcastInDim(_) | Op::Slice(_)) => {
                    if seen.insert(user) {
                        stack.push(user);
                    }
                }
                _ => return false,
            }
        }
    }
    true
}

/// `iota` as `sample * k + (0..k)`, for samples with `k` positions each along the counted dimension.
fn counted(to: &mut Graph, sample: ValueId, iota: &Iota) -> ValueId {
    let (dim, shape) = (iota.dim, &iota.ty.shape);
    let k = shape[dim] / to.batch;
    let mark = |to: &mut Graph, v: ValueId, dims: u32| {
        to.nodes[v.index()].batch_dims = dims;
        v
    };
    let sample = to.convert(sample, iota.ty.dtype);
    let sample = mark(to, sample, 1);
    let along = if k == 1 {
        sample
    } else {
        let factor = to.constant(Literal::splat(to.ty(sample).clone(), k as f64));
        mark(to, factor, 1);
        let first = to.mul(sample, factor);
        mark(to, first, 1);
        let block = [to.batch, k];
        let first = to.broadcast(first, &block, &[0]);
        mark(to, first, 1);
        let within = Iota { ty: TensorType::new(iota.ty.dtype, block), dim: 1 };
        let within = to.emit(Op::Iota(within), &[]);
        mark(to, within, 1);
        let all = to.add(first, within);
        mark(to, all, 1);
        let all = to.reshape(all, &[shape[dim]]);
        mark(to, all, 1)
    };
    let all = to.broadcast(along, shape, &[dim]);
    mark(to, all, 1 << dim)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::{LossKind, find_batch, rebatch};
    use crate::interpret::run;
    use crate::op::{Reducer, Threefry, ThreefryWord};
    use crate::tensor::Tensor;

    /// The mean of a batch times random numbers, counted along `dim` of `[batch, 6]`, or along all elements if `flat`.
    fn noisy(flat: bool) -> Graph {
        let mut graph = Graph::new("noisy");
        let ty = |dtype: DType, shape: &[u64]| TensorType::new(dtype, shape);
        let x = graph.emit(Op::Input(Input { name: "x".into(), ty: ty(DType::F32, &[4, 6]) }), &[]);
        let key = graph.emit(Op::Input(Input { name: "key".into(), ty: ty(DType::U32, &[]) }), &[]);
        let count = if flat {
            let all = graph.emit(Op::Iota(Iota { ty: ty(DType::U32, &[24]), dim: 0 }), &[]);
            graph.reshape(all, &[4, 6])
        } else {
            let rows = graph.emit(Op::Iota(Iota { ty: ty(DType::U32, &[4, 6]), dim: 0 }), &[]);
            let columns = graph.emit(Op::Iota(Iota { ty: ty(DType::U32, &[4, 6]), dim: 1 }), &[]);
            let stride = graph.splat_like(rows, 6.0);
            let rows = graph.mul(rows, stride);
            graph.add(rows, columns)
        };
        let key = graph.broadcast_scalar(key, &[4, 6]);
        let bits = graph.emit(Op::Threefry(Threefry { word: ThreefryWord::Xor }), &[key, key, count, count]);
        let noise = graph.convert(bits, DType::F32);
        let product = graph.mul(x, noise);
        let sum = graph.reduce(product, Reducer::Sum, &[0, 1]);
        let n = graph.splat_like(sum, 24.0);
        let mean = graph.div(sum, n);
        graph.outputs = vec![mean];
        graph
    }

    #[test]
    fn microbatches_draw_the_bits_of_the_whole_batch() {
        for flat in [false, true] {
            let traced = noisy(flat);
            let found = find_batch(&traced, &[Some(0), None]);
            assert_eq!((found.loss, &found.doubt), (LossKind::Mean, &None));
            let x = Tensor::from_fn(TensorType::new(DType::F32, [4, 6]), |i| (i[0] * 7 + i[1]) as f64 - 9.0);
            let leaf = |graph: &Graph, first: u64, v: ValueId| {
                let ty = graph.ty(v).clone();
                match &graph.node(v).op {
                    Op::Input(input) if input.name == "x" => Tensor::from_fn(ty, |i| x.at(&[first + i[0], i[1]])),
                    Op::Input(input) if input.name == "key" => Tensor::splat(ty, 77.0),
                    _ => Tensor::from_fn(ty, |i| (first + i[0]) as f64),
                }
            };
            let whole = run(&traced, |v| leaf(&traced, 0, v))[0].data[0];
            for size in [1, 2, 4] {
                let micro = rebatch(&found.graph, size).expect("another batch");
                let part = |first: u64| run(&micro, |v| leaf(&micro, first, v))[0].data[0];
                let mean = (0..4 / size).map(|m| part(m * size)).sum::<f64>() / (4 / size) as f64;
                assert!((mean - whole).abs() <= 1e-9 * whole.abs(), "{size}: {mean} is not {whole}");
            }
        }
    }

    /// A count that selects rows of the batch must count the microbatch's own rows.
    #[test]
    fn other_counts_stay() {
        let mut graph = noisy(false);
        let row = graph.values().find(|&v| matches!(graph.node(v).op, Op::Iota(_))).expect("a count");
        graph.outputs.push(row);
        let found = find_batch(&graph, &[Some(0), None]);
        assert_eq!(found.loss, LossKind::Other);
        assert!(!found.graph.values().any(|v| is_sample_index(&found.graph, v)));
    }
}
