//! Tests the kernels of particular graphs, and properties that hold for all graphs.

use super::*;
use crate::literal::Literal;
use crate::mesh::{AxisId, Mesh};
use crate::op::{AxisIndex, Direction, DotGeneral, Input, Iota, Reducer, Select, Slice, Unary};
use crate::types::TensorType;

fn input(g: &mut Graph, shape: &[u64]) -> ValueId {
    let ty = TensorType::new(DType::F16, shape.to_vec());
    g.emit(Op::Input(Input { name: format!("x{}", g.len()), ty }), &[])
}

/// `[b, m, k] x [b, k, n]`, or with the second operand transposed.
fn product(g: &mut Graph, a: ValueId, b: ValueId, rhs_contract: usize) -> ValueId {
    let dot =
        DotGeneral { lhs_batch: vec![0], rhs_batch: vec![0], lhs_contract: vec![2], rhs_contract: vec![rhs_contract] };
    g.emit(Op::DotGeneral(dot), &[a, b])
}

/// Softmax over the last dimension.
fn softmax(g: &mut Graph, x: ValueId) -> ValueId {
    let shape = g.shape(x).to_vec();
    let kept: Vec<usize> = (0..shape.len() - 1).collect();
    let most = g.reduce(x, Reducer::Max, &[shape.len() - 1]);
    let most = g.broadcast(most, &shape, &kept);
    let shifted = g.sub(x, most);
    let exponential = g.unary(Unary::Exponential, shifted);
    let sum = g.reduce(exponential, Reducer::Sum, &[shape.len() - 1]);
    let sum = g.broadcast(sum, &shape, &kept);
    g.div(exponential, sum)
}

fn of(g: &Graph, outputs: &[ValueId], fused_attention: bool) -> Vec<Kernel> {
    kernels(g, &outputs.iter().copied().collect(), fused_attention)
}

#[test]
fn a_softmax_is_one_kernel_that_reads_and_writes_once() {
    let mut g = Graph::new("softmax");
    let x = input(&mut g, &[64, 1024]);
    let y = softmax(&mut g, x);
    let found = of(&g, &[y], false);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!((found[0].read_bytes, found[0].written_bytes), (64 * 1024 * 2, 64 * 1024 * 2));
}

#[test]
fn rows_that_do_not_fit_on_the_chip_are_gone_through_again() {
    let mut g = Graph::new("softmax of a vocabulary");
    let x = input(&mut g, &[8, 100_000]);
    let y = softmax(&mut g, x);
    let found = of(&g, &[y], false);
    // One kernel each for the maximum, the sum and the quotient.
    assert_eq!(found.len(), 3, "{found:?}");
    assert!(found.iter().all(|k| k.read_bytes >= 8 * 100_000 * 2));
}

#[test]
fn a_matmul_reads_through_slices_and_transposes_but_not_through_what_no_stride_describes() {
    let mut g = Graph::new("views");
    let (x, w) = (input(&mut g, &[4, 64, 96]), input(&mut g, &[4, 32, 64]));
    let slice = Slice { start: vec![0, 0, 32], limit: vec![4, 64, 64], stride: vec![1, 1, 1] };
    let part = g.emit(Op::Slice(slice), &[x]);
    let turned = g.transpose(w, &[0, 2, 1]);
    let y = product(&mut g, part, turned, 2);
    let found = of(&g, &[y], false);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].read_bytes, 2 * (4 * 64 * 32 + 4 * 32 * 64));

    // Merging heads to features also merges transposed dimensions, which is a copy.
    let mut g = Graph::new("copy");
    let (x, w) = (input(&mut g, &[1, 8, 64, 32]), input(&mut g, &[1, 256, 16]));
    let turned = g.transpose(x, &[0, 2, 1, 3]);
    let merged = g.reshape(turned, &[1, 64, 256]);
    let y = product(&mut g, merged, w, 1);
    assert_eq!(of(&g, &[y], false).len(), 2);
}

#[test]
fn a_cheap_value_is_computed_again_and_a_sum_of_two_is_kept() {
    let mut g = Graph::new("again");
    let (a, b) = (input(&mut g, &[1, 64, 64]), input(&mut g, &[1, 64, 64]));
    let first = product(&mut g, a, b, 1);
    let act = g.unary(Unary::Tanh, first);
    let second = product(&mut g, act, b, 1);
    // A value used again after the second product is read from the first product and not stored twice.
    let slope = g.mul(act, act);
    let late = g.mul(second, slope);
    let found = of(&g, &[late], false);
    let last = found.last().unwrap();
    let read: Vec<ValueId> = last.reads.iter().map(|r| r.0).collect();
    assert!(read.contains(&second) && (read.contains(&act) || read.contains(&first)), "{found:?}");
    assert_eq!(found.len(), 4);
}

#[test]
fn normalised_columns_are_computed_again_from_what_was_normalised() {
    // Batch norm: statistics of columns, which need every row, and three passes over the rows.
    let mut g = Graph::new("batch norm");
    let (rows, columns) = (4096, 64);
    let (x, slope) = (input(&mut g, &[rows, columns]), input(&mut g, &[rows, columns]));
    let mean = |g: &mut Graph, v: ValueId| {
        let sum = g.reduce(v, Reducer::Sum, &[0]);
        g.broadcast(sum, &[rows, columns], &[1])
    };
    let of_x = mean(&mut g, x);
    let centred = g.sub(x, of_x);
    let square = g.mul(centred, centred);
    let variance = mean(&mut g, square);
    let scale = g.unary(Unary::Rsqrt, variance);
    let normal = g.mul(centred, scale);
    // The gradient of the rows.
    let along = g.mul(slope, normal);
    let part = mean(&mut g, along);
    let part = g.mul(normal, part);
    let gradient = g.sub(slope, part);
    let found = of(&g, &[gradient], false);
    // Centred and normal rows differ from `x` by a few values of columns, so that neither is written.
    let large: Vec<ValueId> =
        found.iter().flat_map(|k| &k.writes).copied().filter(|w| g.shape(*w)[0] == rows).collect();
    assert_eq!(large, [gradient], "{found:?}");
    assert_eq!(found.len(), 4);
}

#[test]
fn sums_that_one_kernel_reads_are_kept_and_so_are_values_with_wide_sources() {
    assert!(!moves_more(100, 100, 3));
    assert!(!moves_more(101, 100, 3));
    assert!(moves_more(200, 100, 1));
    assert!(moves_more(150, 100, 2));
    assert!(!moves_more(200, 100, 0));
}

#[test]
fn fused_attention_never_writes_scores() {
    let mut g = Graph::new("attention");
    let [q, k, v] = [0; 3].map(|_| input(&mut g, &[16, 1024, 64]));
    let scores = product(&mut g, q, k, 2);
    let weights = softmax(&mut g, scores);
    let mixed = product(&mut g, weights, v, 1);
    let w = input(&mut g, &[16, 64, 4096]);
    let wide = product(&mut g, mixed, w, 1);
    let narrow = g.unary(Unary::Tanh, wide);
    assert_eq!(of(&g, &[narrow], false).len(), 5);

    let found = of(&g, &[narrow], true);
    let Some(Kernel {
        kind: KernelKind::Attention(Attention { flop, share, keys, tiles, backward, .. }),
        read_bytes,
        written_bytes,
        ..
    }) = found.iter().find(|k| matches!(k.kind, KernelKind::Attention(_)))
    else {
        panic!("{found:?}");
    };
    assert_eq!((*keys, *tiles, *backward), (1024, 16 * 1024 / 128, false));
    assert_eq!((*flop, *share), (2.0 * 2.0 * 16.0 * 1024.0 * 1024.0 * 64.0, 1.0));
    assert_eq!((*read_bytes, *written_bytes), (3 * 16 * 1024 * 64 * 2, 16 * 1024 * 64 * 2));
    // No product contracts the other growing product, so that one is written like any product.
    assert_eq!(found.len(), 3, "{found:?}");
    assert!(found.iter().any(|kernel| kernel.writes == [wide]), "{found:?}");
}

/// Scores of a device's queries, which come after those of earlier devices, as the mask says.
#[test]
fn the_device_that_sees_most_says_how_much_is_computed() {
    let share = |parts: u32, alike: bool| {
        let mut g = Graph::new("masked");
        let q = input(&mut g, &[16, 1024, 64]);
        let [k, v] = [0; 2].map(|_| input(&mut g, &[16, 1024 * u64::from(parts), 64]));
        let scores = product(&mut g, q, k, 2);
        let shape = g.shape(scores).to_vec();
        let iota = |g: &mut Graph, dim: usize| {
            let ty = TensorType::new(DType::I32, shape.clone());
            g.emit(Op::Iota(Iota { ty, dim }), &[])
        };
        let (mut row, column) = (iota(&mut g, 1), iota(&mut g, 2));
        let mut first = column;
        if parts > 1 {
            let mesh = Mesh::new(&[("data", parts)]);
            let index = g.emit(Op::AxisIndex(AxisIndex { axes: vec![AxisId(0)], mesh, dtype: DType::I32 }), &[]);
            let block = g.broadcast(index, &shape, &[]);
            let size = g.constant(Literal::splat(TensorType::new(DType::I32, shape.clone()), 1024.0));
            let begin = g.mul(block, size);
            row = if alike { block } else { g.add(row, begin) };
            first = if alike { g.div(block, block) } else { column };
        }
        let seen = g.compare(Direction::Ge, row, first);
        let hidden = g.sub(scores, scores);
        let scores = g.emit(Op::Select(Select {}), &[seen, scores, hidden]);
        let weights = softmax(&mut g, scores);
        let mixed = product(&mut g, weights, v, 1);
        let found = of(&g, &[mixed], true);
        let kernels = found.iter().filter_map(|kernel| match kernel.kind {
            KernelKind::Attention(Attention { share, .. }) => Some(share),
            _ => None,
        });
        kernels.collect::<Vec<f64>>()
    };
    // There are 8 x 8 tiles. Those on the diagonal count fully, and the last part sees everything before it.
    assert_eq!(share(1, false), [36.0 / 64.0]);
    assert_eq!(share(2, false), [(64.0 + 36.0) / 128.0]);
    assert_eq!(share(4, false), [(192.0 + 36.0) / 256.0]);
    assert_eq!(share(4, true), [1.0]);
}

#[test]
fn kernels_run_after_what_they_read_and_every_output_is_written_once() {
    let mut g = Graph::new("order");
    let (x, w) = (input(&mut g, &[2, 128, 128]), input(&mut g, &[2, 128, 128]));
    let mut at = x;
    let mut outputs = Vec::new();
    for i in 0..6 {
        let y = product(&mut g, at, w, 1);
        let s = softmax(&mut g, y);
        let column = g.reduce(s, Reducer::Sum, &[0, 1]);
        let column = g.broadcast(column, &[2, 128, 128], &[2]);
        let both = g.add(s, column);
        at = if i % 2 == 0 { g.add(both, at) } else { both };
        outputs.push(at);
    }
    for fused in [false, true] {
        let found = of(&g, &outputs, fused);
        let mut made: BTreeSet<ValueId> = BTreeSet::from([x, w]);
        for kernel in &found {
            for (read, _) in &kernel.reads {
                assert!(made.contains(read), "{read} is read before it is made");
            }
            for write in &kernel.writes {
                assert!(made.insert(*write), "{write} is written twice");
            }
        }
        assert!(outputs.iter().all(|o| made.contains(o)));
    }
}
