//! Compares collectives among device threads with the interpreter's, on meshes of one, two and three axes.

use crate::common::{Random, assert_close, input, run_both};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::Graph;
use altiplano_ir::mesh::{AxisId, Mesh};
use altiplano_ir::op::*;
use altiplano_ir::reshard::{Collective, reshard};
use altiplano_ir::sharding::Sharding;
use altiplano_ir::tensor::Tensor;

fn meshes() -> Vec<Mesh> {
    vec![
        Mesh::new(&[("data", 4)]),
        Mesh::new(&[("data", 2), ("tensor", 3)]),
        Mesh::new(&[("pipe", 2), ("data", 1), ("tensor", 2)]),
        Mesh::new(&[("a", 2), ("b", 2), ("c", 2)]),
    ]
}

fn check(collective: Collective, mesh: &Mesh, dtype: DType, shape: &[u64], random: &mut Random) {
    let mut graph = Graph::new("collective");
    let x = input(&mut graph, "x", dtype, shape);
    let y = graph.push(Op::collective(collective.clone(), mesh), &[x]).unwrap();
    // The operand is used again, so that a result that overwrites it would show.
    let z = graph.add(x, x);
    let own = graph.add(z, z);
    let reduced_again = graph.push(Op::collective(collective.clone(), mesh), &[own]).unwrap();
    graph.outputs = vec![y, z, reduced_again];
    let leaves = vec![(0..mesh.num_devices()).map(|_| random.tensor(graph.ty(x))).collect::<Vec<Tensor>>()];
    let (found, expected) = run_both(&graph, mesh, &leaves);
    let tolerance = if dtype == DType::BF16 { 0.03 } else { 1e-6 };
    for (f, e) in found.iter().flatten().zip(expected.iter().flatten()) {
        assert_close(f, e, tolerance, &format!("{collective:?} on {mesh} of {dtype}{shape:?}"));
    }
}

#[test]
fn collectives_agree_with_the_interpreter() {
    let mut random = Random(11);
    for mesh in meshes() {
        let all: Vec<AxisId> = mesh.axis_ids().collect();
        let mut groups: Vec<Vec<AxisId>> = all.iter().map(|&a| vec![a]).collect();
        groups.push(all.clone());
        groups.push(all.iter().rev().copied().collect());
        for axes in groups {
            let n = mesh.product(&axes);
            for dtype in [DType::F32, DType::BF16, DType::I32] {
                for reducer in [Reducer::Sum, Reducer::Max, Reducer::Min, Reducer::Product] {
                    let axes = axes.clone();
                    // A few elements, which one member reduces for all, and enough that each member has a range, the
                    // last a short one.
                    for shape in [[3, 5], [7, 31]] {
                        let all_reduce = Collective::AllReduce { axes: axes.clone(), reducer };
                        check(all_reduce, &mesh, dtype, &shape, &mut random);
                    }
                    check(Collective::KeepFirst { axes: axes.clone(), reducer }, &mesh, dtype, &[3, 5], &mut random);
                    for (low, high) in [(0, 1), (2, 0), (1, 2), (7, 9)] {
                        let halo = Collective::Halo { axes: axes.clone(), dim: 1, low, high, reducer };
                        check(halo, &mesh, dtype, &[3, 2, 5], &mut random);
                    }
                    let scatter = |dim, outer| Collective::ReduceScatter { axes: axes.clone(), reducer, dim, outer };
                    check(scatter(0, 1), &mesh, dtype, &[2 * n, 3], &mut random);
                    check(scatter(1, 2), &mesh, dtype, &[3, 4 * n, 2], &mut random);
                }
                for by in 0..=n {
                    check(Collective::Shift { axes: axes.clone(), by }, &mesh, dtype, &[3, 5], &mut random);
                }
                for (dim, outer) in [(0u8, 1u64), (0, 2), (1, 1), (1, 3)] {
                    let axes = axes.clone();
                    check(
                        Collective::AllGather { axes: axes.clone(), dim, outer },
                        &mesh,
                        dtype,
                        &[2, 3, 2],
                        &mut random,
                    );
                    let slice = Collective::LocalSlice { axes, dim, outer };
                    check(slice, &mesh, dtype, &[2 * n, 3 * n, 2], &mut random);
                }
                for (split_dim, split_outer, concat_dim, concat_outer) in
                    [(0, 1, 1, 1), (1, 1, 0, 1), (0, 2, 1, 3), (2, 1, 0, 2), (0, 2, 0, 1), (1, 1, 1, 3)]
                {
                    let axes = axes.clone();
                    let exchange = Collective::AllToAll { axes, split_dim, split_outer, concat_dim, concat_outer };
                    check(exchange, &mesh, dtype, &[2 * n, 3 * n, n], &mut random);
                }
            }
        }
    }
}

#[test]
fn a_large_all_reduce_is_computed_in_chunks() {
    let mut random = Random(12);
    for mesh in meshes() {
        let axes: Vec<AxisId> = mesh.axis_ids().collect();
        for dtype in [DType::F32, DType::BF16, DType::I64] {
            let op = Collective::AllReduce { axes: axes.clone(), reducer: Reducer::Sum };
            check(op, &mesh, dtype, &[41, 73], &mut random);
        }
    }
}

#[test]
fn axis_index_is_the_device_position() {
    let mesh = Mesh::new(&[("a", 2), ("b", 3)]);
    let mut graph = Graph::new("position");
    let x = input(&mut graph, "x", DType::I32, &[2]);
    for axes in [vec![AxisId(0)], vec![AxisId(1)], vec![AxisId(1), AxisId(0)]] {
        let i = graph.emit(Op::AxisIndex(AxisIndex { axes, mesh: mesh.clone(), dtype: DType::I32 }), &[]);
        let i = graph.broadcast_scalar(i, &[2]);
        let sum = graph.add(x, i);
        graph.outputs.push(sum);
    }
    let leaves = vec![(0..6).map(|_| Random(13).tensor(graph.ty(x))).collect::<Vec<Tensor>>()];
    let (found, expected) = run_both(&graph, &mesh, &leaves);
    assert_eq!(found, expected);
}

/// Every pair of layouts of a small tensor: the collectives that the planner prices produce the target layout.
#[test]
fn reshards_reach_their_target() {
    let mesh = Mesh::new(&[("data", 2), ("tensor", 2)]);
    let shape = [4u64, 12];
    let texts = [
        "[{}, {}]",
        "[{data}, {}]",
        "[{}, {tensor}]",
        "[{data}, {tensor}]",
        "[{tensor}, {data}]",
        "[{}, {data, tensor}]",
        "[{}, {3, 4: tensor}]",
        "[{data}, {}] partial{sum: tensor}",
        "[{}, {}] partial{sum: data, tensor}",
    ];
    let layouts: Vec<Sharding> = texts.iter().map(|t| Sharding::parse(t, &shape, &mesh).unwrap()).collect();
    let mut random = Random(14);
    for from in &layouts {
        for to in &layouts {
            let ty = altiplano_ir::types::TensorType::new(DType::F32, shape);
            let whole = random.tensor(&ty);
            let mut graph = Graph::new("reshard");
            let mut value = input(&mut graph, "x", DType::F32, &from.local_shape(&mesh));
            for step in reshard(from, to, &mesh) {
                value = graph.emit(Op::collective(step.collective, &mesh), &[value]);
            }
            graph.outputs = vec![value];
            let parts = (0..4).map(|d| altiplano_ir::interpret::shard(&whole, from, &mesh, d)).collect();
            let (found, _) = run_both(&graph, &mesh, &[parts]);
            let result = altiplano_ir::interpret::unshard(&found[0], &ty, to, &mesh);
            let what = format!("{} to {}", from.display(&mesh), to.display(&mesh));
            assert_close(&result, &whole, 1e-6, &what);
        }
    }
}
