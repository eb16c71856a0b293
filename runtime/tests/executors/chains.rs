//! Compares fused chains, views and in-place results with the interpreter, on random graphs.

use crate::common::{Random, check_graph, input};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::*;

/// A random graph of float ops with moderate values, and some integer ops.
fn random_graph(random: &mut Random, nodes: usize, float: DType) -> Graph {
    let mut graph = Graph::new("random");
    let sizes = [1u64, 2, 3, 4, 6, 12];
    let mut floats: Vec<ValueId> = Vec::new();
    for i in 0..4 {
        let shape: Vec<u64> = (0..random.below(4)).map(|_| random.pick(&sizes)).collect();
        floats.push(input(&mut graph, &format!("x{i}"), float, &shape));
    }
    let mut predicates: Vec<ValueId> = Vec::new();
    while graph.len() < nodes {
        let x = random.pick(&floats);
        let shape = graph.shape(x).to_vec();
        let same: Vec<ValueId> = floats.iter().copied().filter(|v| graph.shape(*v) == shape).collect();
        let y = random.pick(&same);
        let rank = shape.len();
        let made = match random.below(16) {
            0 | 1 => graph.add(x, y),
            2 => graph.sub(x, y),
            3 | 4 => {
                let product = graph.mul(x, y);
                graph.unary(Unary::Tanh, product)
            }
            5 => graph.unary(random.pick(&[Unary::Logistic, Unary::Negate, Unary::Abs, Unary::Erf, Unary::Sine]), x),
            6 => {
                let scale = graph.splat_like(x, 0.25);
                let small = graph.mul(x, scale);
                let small = graph.unary(Unary::Tanh, small);
                graph.unary(Unary::Exponential, small)
            }
            7 => {
                // A mask from positions, as in causal attention.
                if rank == 0 {
                    continue;
                }
                let ty = altiplano_ir::types::TensorType::new(DType::I32, shape.clone());
                let a = graph.emit(Op::Iota(Iota { ty: ty.clone(), dim: random.below(rank) }), &[]);
                let b = graph.emit(Op::Iota(Iota { ty, dim: random.below(rank) }), &[]);
                let mask = graph.compare(random.pick(&[Direction::Ge, Direction::Ne, Direction::Lt]), a, b);
                predicates.push(mask);
                graph.select(mask, x, y)
            }
            8 => {
                let dims: Vec<usize> = (0..rank).filter(|_| random.below(2) == 0).collect();
                let reducer = random.pick(&[Reducer::Sum, Reducer::Max, Reducer::Min]);
                let reduced = graph.reduce(x, reducer, &dims);
                let scale = graph.splat_like(reduced, 0.125);
                graph.mul(reduced, scale)
            }
            9 => {
                // Reduces trailing dimensions and subtracts the result, as softmax and norms do.
                if rank == 0 {
                    continue;
                }
                let first = random.below(rank);
                let dims: Vec<usize> = (first..rank).collect();
                let reduced = graph.reduce(x, random.pick(&[Reducer::Sum, Reducer::Max]), &dims);
                let back = graph.broadcast(reduced, &shape, &(0..first).collect::<Vec<_>>());
                let difference = graph.sub(x, back);
                graph.unary(Unary::Tanh, difference)
            }
            10 => {
                let mut permutation: Vec<usize> = (0..rank).collect();
                for i in (1..rank).rev() {
                    permutation.swap(i, random.below(i + 1));
                }
                graph.transpose(x, &permutation)
            }
            11 => {
                // Flattens, then reshapes to a factorisation of the size.
                let mut left: u64 = shape.iter().product();
                let mut to = Vec::new();
                while left > 1 && to.len() < 4 {
                    let factor = random.pick(&[1u64, 2, 3, 4, 6]);
                    if left % factor == 0 {
                        to.push(factor);
                        left /= factor;
                    }
                }
                to.push(left);
                graph.reshape(x, &to)
            }
            12 => {
                if rank == 4 {
                    continue;
                }
                let at = random.below(rank + 1);
                let mut to = shape.clone();
                to.insert(at, random.pick(&[1u64, 2, 3]));
                let dims: Vec<usize> = (0..=rank).filter(|&d| d != at).collect();
                graph.broadcast(x, &to, &dims)
            }
            13 => {
                let start: Vec<u64> = shape.iter().map(|&d| random.below(d as usize) as u64).collect();
                let stride = shape.iter().map(|_| 1 + random.below(2) as u64).collect();
                graph.emit(Op::Slice(Slice { start, limit: shape.clone(), stride }), &[x])
            }
            14 => {
                if rank == 0 {
                    continue;
                }
                let dim = rank - 1;
                let op = DotGeneral {
                    lhs_batch: vec![],
                    rhs_batch: vec![],
                    lhs_contract: vec![dim],
                    rhs_contract: vec![dim],
                };
                if rank > 2 {
                    continue;
                }
                let product = graph.emit(Op::DotGeneral(op), &[x, y]);
                graph.unary(Unary::Tanh, product)
            }
            _ => {
                if rank == 0 {
                    continue;
                }
                graph.emit(Op::Concatenate(Concatenate { dim: random.below(rank) }), &[x, y])
            }
        };
        if graph.ty(made).elements() <= 5000 {
            floats.push(made);
        }
    }
    let mut outputs: Vec<ValueId> = (0..4).map(|_| random.pick(&floats)).collect();
    outputs.push(floats[floats.len() - 1]);
    outputs.extend(predicates.first());
    graph.outputs = outputs;
    graph
}

#[test]
fn random_graphs_agree_with_the_interpreter() {
    for seed in 0..400 {
        let mut random = Random(seed);
        let nodes = 8 + random.below(60);
        let graph = random_graph(&mut random, nodes, DType::F32);
        check_graph(&graph, &mut random, 3e-5, &format!("seed {seed}"));
    }
}

#[test]
fn random_graphs_of_half_precision_stay_near() {
    for seed in 1000..1040 {
        let mut random = Random(seed);
        let graph = random_graph(&mut random, 12, DType::BF16);
        check_graph(&graph, &mut random, 0.1, &format!("seed {seed}"));
    }
}

/// Softmax over the last dimension, layer norm and gelu at sizes of several blocks; their values are read again.
#[test]
fn blocks_of_a_transformer() {
    for (rows, columns) in [(5u64, 7u64), (3, 512), (4, 513), (2, 2000), (700, 3)] {
        let mut graph = Graph::new("block");
        let shape = [rows, columns];
        let x = input(&mut graph, "x", DType::F32, &shape);
        let g = input(&mut graph, "g", DType::F32, &[columns]);
        let max = graph.reduce(x, Reducer::Max, &[1]);
        let max = graph.broadcast(max, &shape, &[0]);
        let shifted = graph.sub(x, max);
        let e = graph.unary(Unary::Exponential, shifted);
        let sum = graph.reduce(e, Reducer::Sum, &[1]);
        let sum = graph.broadcast(sum, &shape, &[0]);
        let softmax = graph.div(e, sum);
        let mean = graph.reduce(x, Reducer::Sum, &[1]);
        let n = graph.splat_like(mean, columns as f64);
        let mean = graph.div(mean, n);
        let mean = graph.broadcast(mean, &shape, &[0]);
        let centred = graph.sub(x, mean);
        let square = graph.mul(centred, centred);
        let variance = graph.reduce(square, Reducer::Sum, &[1]);
        let variance = graph.div(variance, n);
        let epsilon = graph.splat_like(variance, 1e-5);
        let variance = graph.add(variance, epsilon);
        let inverse = graph.unary(Unary::Rsqrt, variance);
        let inverse = graph.broadcast(inverse, &shape, &[0]);
        let normal = graph.mul(centred, inverse);
        let gain = graph.broadcast(g, &shape, &[1]);
        let normal = graph.mul(normal, gain);
        let three = graph.splat_like(normal, 3.0);
        let cube = graph.emit(Op::Binary(Binary::Power), &[normal, three]);
        let t = graph.unary(Unary::Tanh, cube);
        let bias = graph.reduce(t, Reducer::Sum, &[0]);
        graph.outputs = vec![softmax, normal, t, bias, sum];
        check_graph(&graph, &mut Random(rows), 1e-5, &format!("{rows} x {columns}"));
    }
}
