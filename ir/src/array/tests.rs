//! Compares functions with their definitions, written as loops.

use super::*;
use crate::dtype::DType;
use crate::graph::{Graph, ValueId};
use crate::interpret::run;
use crate::op::{Binary, Input, Op};
use crate::tensor::Tensor;
use crate::types::TensorType;

/// A number between -2 and 2 that depends only on the position.
fn number(seed: usize, at: usize) -> f64 {
    ((at * 7919 + seed * 104_729 + 13) % 1009) as f64 / 252.0 - 2.0
}

struct Case {
    graph: Graph,
    leaves: Vec<Tensor>,
}

impl Case {
    fn new() -> Case {
        Case { graph: Graph::new("case"), leaves: Vec::new() }
    }

    fn leaf(&mut self, shape: &[u64]) -> ValueId {
        let seed = self.leaves.len();
        let n: u64 = shape.iter().product();
        let values = (0..n as usize).map(|i| number(seed, i)).collect();
        self.given(Tensor::new(TensorType::new(DType::F32, shape), values))
    }

    fn given(&mut self, tensor: Tensor) -> ValueId {
        let input = Input { name: format!("x{}", self.leaves.len()), ty: tensor.ty.clone() };
        self.leaves.push(tensor);
        self.graph.push(Op::Input(input), &[]).unwrap()
    }

    fn run(&mut self, result: ValueId) -> Tensor {
        self.graph.outputs = vec![result];
        assert_eq!(self.graph.verify(), []);
        let mut leaves = self.leaves.iter();
        run(&self.graph, |_| leaves.next().unwrap().clone()).remove(0)
    }

    /// Compares a result with a formula of its index and the leaves.
    fn check(mut self, result: ValueId, expected: impl Fn(&[u64], &[Tensor]) -> f64) {
        let found = self.run(result);
        let leaves = &self.leaves;
        let expected = Tensor::from_fn(found.ty.clone(), |index| expected(index, leaves));
        for (i, (f, e)) in found.data.iter().zip(&expected.data).enumerate() {
            assert!((f - e).abs() <= 1e-6 * (1.0 + e.abs()), "element {i}: {f} instead of {e}");
        }
    }
}

#[test]
fn shapes_broadcast_as_in_numpy() {
    for (a, b, expected) in [
        (&[3, 1][..], &[4][..], Some(&[3, 4][..])),
        (&[], &[2, 2], Some(&[2, 2])),
        (&[1, 5], &[7, 1, 1], Some(&[7, 1, 5])),
        (&[2], &[3], None),
        (&[0], &[1], Some(&[0])),
    ] {
        assert_eq!(broadcast_shapes(a, b).ok().as_deref(), expected, "{a:?} {b:?}");
    }
    let mut case = Case::new();
    let (a, b) = (case.leaf(&[3, 1, 2]), case.leaf(&[4, 1]));
    let sum = binary(&mut case.graph, Binary::Add, a, b).unwrap();
    case.check(sum, |i, x| x[0].at(&[i[0], 0, i[2]]) + x[1].at(&[i[1], 0]));
}

#[test]
fn matrix_products_follow_numpy() {
    for (a, b, shape) in [
        (&[3][..], &[3][..], &[][..]),
        (&[2, 3], &[3], &[2]),
        (&[3], &[3, 4], &[4]),
        (&[5, 2, 3], &[3, 4], &[5, 2, 4]),
        (&[3], &[5, 3, 4], &[5, 4]),
        (&[5, 1, 2, 3], &[6, 3, 4], &[5, 6, 2, 4]),
    ] {
        let mut case = Case::new();
        let (x, y) = (case.leaf(a), case.leaf(b));
        let product = matmul(&mut case.graph, x, y).unwrap();
        assert_eq!(case.graph.shape(product), shape, "{a:?} {b:?}");
        let (row, column) = (a.len() > 1, b.len() > 1);
        case.check(product, |i, x| {
            // The index in a leaf. Its batch is aligned at the right, and its dimensions of size 1 are repeated.
            let at = |t: &Tensor, matrix: &[u64], batch: &[u64]| {
                let n = t.shape().len() - matrix.len();
                let of_batch =
                    batch[batch.len() - n..].iter().zip(t.shape()).map(|(i, s)| if *s == 1 { 0 } else { *i });
                t.at(&of_batch.chain(matrix.iter().copied()).collect::<Vec<_>>())
            };
            let batch = &i[..i.len() - usize::from(row) - usize::from(column)];
            let rest = &i[batch.len()..];
            (0..3).fold(0.0, |sum, k| {
                let left = if row { vec![rest[0], k] } else { vec![k] };
                let right = if column { vec![k, rest[rest.len() - 1]] } else { vec![k] };
                sum + at(&x[0], &left, batch) * at(&x[1], &right, batch)
            })
        });
    }
}

#[test]
fn a_transposed_convolution_spreads_what_a_convolution_gathers() {
    for (groups, stride, pad, dilation, more) in [(1, 1, 0, 1, 0), (1, 2, 1, 1, 1), (2, 3, 0, 2, 0)] {
        let mut case = Case::new();
        let (x, w) = (case.leaf(&[2, 4, 5]), case.leaf(&[4, 3, 3]));
        let conv = Conv {
            stride: vec![stride],
            pad_low: vec![pad],
            pad_high: vec![pad],
            dilation: vec![dilation],
            groups,
            transposed: true,
            output_padding: vec![more],
        };
        let y = convolution(&mut case.graph, x, w, None, &conv).unwrap();
        assert_eq!(case.graph.shape(y)[2], 4 * stride + 2 * dilation + 1 + more - 2 * pad as u64);
        case.check(y, |i, x| {
            let (group, out) = (i[1] / 3, i[1] % 3);
            let mut sum = 0.0;
            for c in 0..4 / groups {
                for p in 0..5 {
                    for k in 0..3 {
                        if p * stride + k * dilation == i[2] + pad as u64 {
                            let input = group * (4 / groups) + c;
                            sum += x[0].at(&[i[0], input, p]) * x[1].at(&[input, out, k]);
                        }
                    }
                }
            }
            sum
        });
    }
}

#[test]
fn pools_take_means_and_maxima_of_what_is_there() {
    for (size, stride, pad, ceil, count_padding) in [
        (2, 2, 0, false, true),
        (3, 2, 1, false, true),
        (3, 2, 1, true, false),
        (2, 3, 1, true, true),
        (3, 3, 0, true, true),
    ] {
        let pool = Pool {
            size: vec![size],
            stride: vec![stride],
            pad_low: vec![pad],
            pad_high: vec![pad],
            dilation: vec![1],
            ceil,
        };
        let (n, p) = (8i64, pad);
        // The positions of window `o` in the operand, and the number of them that its mean counts.
        let window = move |o: u64| {
            let start = o as i64 * stride as i64 - p;
            (start.max(0)..(start + size as i64).min(n), ((start + size as i64).min(n + p) - start) as f64)
        };
        let mut case = Case::new();
        let x = case.leaf(&[1, 2, 8]);
        let y = avg_pool(&mut case.graph, x, &pool, count_padding).unwrap();
        case.check(y, |i, x| {
            let (inside, counted) = window(i[2]);
            let divisor = if count_padding { counted } else { (inside.end - inside.start) as f64 };
            inside.map(|at| x[0].at(&[0, i[1], at as u64])).sum::<f64>() / divisor
        });
        let mut case = Case::new();
        let x = case.leaf(&[1, 2, 8]);
        let y = max_pool(&mut case.graph, x, &pool).unwrap();
        case.check(y, |i, x| window(i[2]).0.map(|at| x[0].at(&[0, i[1], at as u64])).fold(f64::NEG_INFINITY, f64::max));
    }
    for parts in [1, 2, 3, 5, 8] {
        let mut case = Case::new();
        let x = case.leaf(&[1, 2, 8]);
        let y = adaptive_avg_pool(&mut case.graph, x, &[parts]).unwrap();
        case.check(y, |i, x| {
            let (from, to) = (i[2] * 8 / parts, ((i[2] + 1) * 8).div_ceil(parts));
            (from..to).map(|at| x[0].at(&[0, i[1], at])).sum::<f64>() / (to - from) as f64
        });
    }
}

#[test]
fn attention_of_grouped_queries_sees_what_the_masks_leave() {
    for (kv, causal, additive) in [(4, false, None), (2, true, None), (1, true, Some(false)), (4, false, Some(true))] {
        let mut case = Case::new();
        let (q, k, v) = (case.leaf(&[2, 4, 3, 2]), case.leaf(&[2, kv, 3, 2]), case.leaf(&[2, kv, 3, 5]));
        let mask = additive.map(|additive| {
            let dtype = if additive { DType::F32 } else { DType::Bool };
            let value = |i: &[u64]| if additive { number(9, (i[0] * 3 + i[3]) as usize) } else { f64::from(i[3] != 1) };
            case.given(Tensor::from_fn(TensorType::new(dtype, vec![2, 1, 1, 3]), value))
        });
        let y = attention(&mut case.graph, q, k, v, &Attention { scale: Some(0.5), causal, mask }).unwrap();
        case.check(y, |i, x| {
            let (b, h, s) = (i[0], i[1], i[2]);
            let head = h / (4 / kv);
            let score = |t: u64| {
                let dot: f64 = (0..2).map(|d| x[0].at(&[b, h, s, d]) * x[1].at(&[b, head, t, d])).sum();
                let mask = x.get(3).map_or(0.0, |m| match additive {
                    Some(true) => m.at(&[b, 0, 0, t]),
                    _ if m.at(&[b, 0, 0, t]) == 0.0 => f64::NEG_INFINITY,
                    _ => 0.0,
                });
                if causal && t > s { 0.0 } else { (0.5 * dot + mask).exp() }
            };
            let total: f64 = (0..3).map(score).sum();
            (0..3).map(|t| score(t) / total * x[2].at(&[b, head, t, i[3]])).sum()
        });
    }
}

/// Attention in any number of rounds equals attention in one, even if rows see no keys of some blocks. So do its
/// gradients.
#[test]
fn attention_around_a_ring_is_attention() {
    let (batch, positions, heads, width) = (2, 12, 4, 3);
    // The last keys of either sample are hidden, among them whole blocks.
    let seen = Tensor::from_fn(TensorType::new(DType::Bool, [batch, 1, 1, positions]), |i| f64::from(i[3] < 7 + i[0]));
    let infinite = Tensor::from_fn(TensorType::new(DType::F64, seen.shape()), |i| match seen.at(i) {
        1.0 => number(9, i[3] as usize),
        _ => f64::NEG_INFINITY,
    });
    for (kv_heads, causal) in [(4, false), (2, true), (1, false), (1, true)] {
        for mask in [None, Some(&seen), Some(&infinite)] {
            let computed = |blocks: u64| {
                let mut case = Case::new();
                let mut leaf = |heads: u64, width: u64| {
                    let ty = TensorType::new(DType::F64, [batch, positions, heads, width]);
                    let seed = case.leaves.len();
                    let values = (0..ty.elements() as usize).map(|i| number(seed, i)).collect();
                    let name = format!("w{seed}");
                    case.leaves.push(Tensor::new(ty.clone(), values));
                    case.graph.push(Op::Parameter(crate::op::Parameter::new(name, ty)), &[]).unwrap()
                };
                let mut operands = vec![leaf(heads, width), leaf(kv_heads, width), leaf(kv_heads, 2)];
                operands.extend(mask.map(|mask| case.given(mask.clone())));
                let attention = crate::op::Function::Attention { scale: crate::literal::Real(1.5), causal, blocks };
                let result = case.graph.push(attention.into(), &operands).unwrap();
                let square = case.graph.mul(result, result);
                let loss = sum(&mut case.graph, square, &[0, 1, 2, 3], false).unwrap();
                case.graph.outputs = vec![loss];
                let graph = crate::expand::expand(&case.graph).graph;
                let trained = crate::autodiff::differentiate(&graph, &[]).unwrap();
                // No maximum is differentiated, which would compare it with its operand.
                let equal =
                    |n: &crate::graph::Node| matches!(&n.op, Op::Compare(c) if c.direction == crate::op::Direction::Eq);
                assert!(!trained.graph.nodes.iter().any(equal), "{}", trained.graph);
                let values = crate::interpret::run_all(&trained.graph, |v| case.leaves[v.index()].clone());
                let of_leaves = (0..3).map(|leaf| {
                    let parts = trained.contributions[leaf].iter().map(|(_, part)| values[part.index()].data.clone());
                    parts.reduce(|a, b| a.iter().zip(&b).map(|(a, b)| a + b).collect()).unwrap()
                });
                [values[trained.loss.index()].data.clone()].into_iter().chain(of_leaves).collect::<Vec<_>>()
            };
            let expected = computed(1);
            for blocks in [2, 3, 4, 12] {
                for (what, (found, expected)) in computed(blocks).iter().zip(&expected).enumerate() {
                    let near = |(f, e): (&f64, &f64)| (f - e).abs() <= 1e-11 * (1.0 + e.abs());
                    assert!(found.iter().zip(expected).all(near), "{what} of {blocks} blocks: {found:?} {expected:?}");
                }
            }
        }
    }
}

#[test]
fn lookups_take_rows_and_elements() {
    let index = |shape: &[u64]| {
        Tensor::from_fn(TensorType::new(DType::I32, shape), |i| (i.iter().sum::<u64>() % 3) as f64 - 1.0)
    };
    let mut case = Case::new();
    let x = case.leaf(&[2, 3, 4]);
    let at = case.given(index(&[5, 2]));
    let y = take(&mut case.graph, x, 1, at, true).unwrap();
    case.check(y, |i, x| x[0].at(&[i[0], (x[1].at(&[i[1], i[2]]) as i64).rem_euclid(3) as u64, i[3]]));
    let mut case = Case::new();
    let x = case.leaf(&[2, 3, 4]);
    let at = case.given(index(&[2, 6, 3]));
    let y = take_along(&mut case.graph, x, 1, at, true).unwrap();
    case.check(y, |i, x| x[0].at(&[i[0], (x[1].at(i) as i64).rem_euclid(3) as u64, i[2]]));
    let mut case = Case::new();
    let x = case.leaf(&[3, 7]);
    let (values, _) = top_k(&mut case.graph, x, 1, 2, false).unwrap();
    case.check(values, |i, x| {
        let mut row: Vec<f64> = (0..7).map(|c| x[0].at(&[i[0], c])).collect();
        row.sort_by(|a, b| b.total_cmp(a));
        row[i[1] as usize]
    });
}

#[test]
fn norms_centre_and_scale() {
    let standard = |values: Vec<f64>, x: f64| {
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let spread = values.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / values.len() as f64;
        (x - mean) / (spread + 0.1).sqrt()
    };
    let mut case = Case::new();
    let (x, w, b) = (case.leaf(&[2, 3, 4]), case.leaf(&[4]), case.leaf(&[4]));
    let y = layer_norm(&mut case.graph, x, 1, Some(w), Some(b), 0.1).unwrap();
    case.check(y, |i, x| {
        let row = (0..4).map(|c| x[0].at(&[i[0], i[1], c])).collect();
        standard(row, x[0].at(i)) * x[1].at(&i[2..]) + x[2].at(&i[2..])
    });
    let mut case = Case::new();
    let (x, w) = (case.leaf(&[2, 4, 3]), case.leaf(&[4]));
    let y = group_norm(&mut case.graph, x, 2, Some(w), None, 0.1).unwrap();
    case.check(y, |i, x| {
        let first = i[1] / 2 * 2;
        let group = (first..first + 2).flat_map(|c| (0..3).map(move |p| (c, p)));
        standard(group.map(|(c, p)| x[0].at(&[i[0], c, p])).collect(), x[0].at(i)) * x[1].at(&i[1..2])
    });
    let mut case = Case::new();
    let x = case.leaf(&[2, 4, 3]);
    let y = batch_norm_training(&mut case.graph, x, 1, None, None, 0.1).unwrap();
    case.check(y, |i, x| {
        let all = (0..2).flat_map(|b| (0..3).map(move |p| (b, p)));
        standard(all.map(|(b, p)| x[0].at(&[b, i[1], p])).collect(), x[0].at(i))
    });
}

#[test]
fn losses_are_means() {
    let mut case = Case::new();
    let x = case.leaf(&[2, 5, 3]);
    let labels =
        case.given(Tensor::from_fn(TensorType::new(DType::I32, vec![2, 3]), |i| ((i[0] * 3 + i[1]) % 5) as f64));
    let y = cross_entropy(&mut case.graph, x, labels, 1).unwrap();
    case.check(y, |_, x| {
        let one = |b: u64, s: u64| {
            let powers = (0..5).map(|c| x[0].at(&[b, c, s]).exp());
            powers.sum::<f64>().ln() - x[0].at(&[b, x[1].at(&[b, s]) as u64, s])
        };
        (0..2).flat_map(|b| (0..3).map(move |s| (b, s))).map(|(b, s)| one(b, s)).sum::<f64>() / 6.0
    });
}

#[test]
fn what_does_not_fit_is_an_error() {
    let mut case = Case::new();
    let (a, b, s) = (case.leaf(&[2, 3]), case.leaf(&[4, 5]), case.leaf(&[]));
    let g = &mut case.graph;
    assert!(matmul(g, a, b).is_err() && matmul(g, a, s).is_err() && linear(g, s, a, None).is_err());
    assert!(binary(g, Binary::Add, a, b).is_err() && softmax(g, a, 2).is_err() && take(g, a, 2, b, false).is_err());
    assert!(layer_norm(g, a, 3, None, None, 0.1).is_err() && group_norm(g, a, 2, None, None, 0.1).is_err());
    assert!(split(g, a, 0, &[1, 2]).is_err() && reshape_to(g, a, &[-1, 4]).is_err() && axis(-3, 2).is_err());
    assert!(convolution(g, a, b, None, &Conv::default()).is_err() && max_pool(g, a, &Pool::default()).is_ok());
    assert!(
        attention(g, a, a, a, &Attention::default()).is_err() && full(g, &[1 << 40, 1 << 40], 0.0, DType::F32).is_err()
    );
}

/// `c' = f c + i z` and `h' = o tanh(c')`, in both directions. The caller chooses the order of the gates.
#[test]
fn a_recurrent_layer_goes_through_a_sequence() {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    for order in [[0, 1, 2, 3], [0, 3, 1, 2]] {
        for backwards in [false, true] {
            let mut case = Case::new();
            let [x, input, recurrent, b, r] =
                [&[3, 1, 1][..], &[4, 1], &[4, 1], &[4], &[4]].map(|shape| case.leaf(shape));
            let [gates, activation, shown] = [Gate::Sigmoid, Gate::Tanh, Gate::Tanh];
            let cell = Cell::Lstm { order, gates, activation, shown, peepholes: None };
            let layer = Recurrent { cell, input, recurrent, biases: Some([b, r]), backwards, lengths: None };
            let (sequence, last) = layer.run(&mut case.graph, x, None).unwrap();
            assert_eq!(last.len(), 2);
            case.check(sequence, |index, leaves| {
                let at = |leaf: usize, i: usize| leaves[leaf].data[i];
                let (mut h, mut c) = (0.0, 0.0);
                let steps: Vec<usize> = if backwards { vec![2, 1, 0] } else { vec![0, 1, 2] };
                for t in steps {
                    let [i, o, f, z] = order.map(|k| at(1, k) * at(0, t) + at(3, k) + at(2, k) * h + at(4, k));
                    c = sigmoid(f) * c + sigmoid(i) * z.tanh();
                    h = sigmoid(o) * c.tanh();
                    if t as u64 == index[0] {
                        break;
                    }
                }
                h
            });
        }
    }
    let mut case = Case::new();
    let [x, input, recurrent] = [&[3, 1, 1][..], &[4, 1], &[3, 1]].map(|shape| case.leaf(shape));
    let cell = Cell::Rnn { activation: Gate::Relu };
    let layer = Recurrent { cell, input, recurrent, biases: None, backwards: false, lengths: None };
    assert!(layer.run(&mut case.graph, x, None).is_err());
}

/// At points where a formula changes, or where the one that is not taken has no slope.
#[test]
fn special_functions_have_slopes_everywhere() {
    let euler = 0.577_215_664_901_532_9;
    let zeta = std::f64::consts::PI.powi(2) / 6.0;
    type Function = fn(&mut Graph, ValueId) -> Built;
    let cases: [(Function, &[(f64, f64)]); 6] = [
        (sinh, &[(0.0, 1.0), (-1.0, 1f64.cosh()), (1e3, f64::INFINITY)]),
        (asinh, &[(0.0, 1.0), (-1.0, 0.5f64.sqrt()), (2.0, 0.2f64.sqrt()), (1e9, 1e-9)]),
        (atanh, &[(0.0, 1.0), (-0.5, 4.0 / 3.0)]),
        (acosh, &[(2.0, (1.0 / 3f64).sqrt())]),
        (lgamma, &[(1.0, -euler), (2.0, 1.0 - euler), (3.0, 1.5 - euler), (0.5, -euler - 4f64.ln())]),
        (digamma, &[(1.0, zeta), (2.0, zeta - 1.0), (3.0, zeta - 1.25), (0.25, 17.197_329_154_507_11)]),
    ];
    for (at, (function, points)) in cases.into_iter().enumerate() {
        let values: Vec<f64> = points.iter().map(|p| p.0).collect();
        let ty = TensorType::new(DType::F64, [values.len() as u64]);
        let mut graph = Graph::new("slopes");
        let parameter = Op::Parameter(crate::op::Parameter {
            name: "x".to_string(),
            ty: ty.clone(),
            frozen: false,
            no_decay: false,
        });
        let x = graph.push(parameter, &[]).unwrap();
        let y = function(&mut graph, x).unwrap();
        graph.outputs = vec![sum(&mut graph, y, &[0], false).unwrap()];
        let trained = crate::autodiff::differentiate(&graph, &[]).unwrap();
        let parts = trained.contributions[x.index()].iter().map(|c| c.1).collect();
        let graph = Graph { outputs: parts, ..trained.graph };
        let slopes = run(&graph, |_| Tensor::new(ty.clone(), values.clone()));
        for (i, (x, expected)) in points.iter().enumerate() {
            let found: f64 = slopes.iter().map(|s| s.data[i]).sum();
            let near = (found - expected).abs() <= 1e-9 * (1.0 + expected.abs());
            assert!(near || found == *expected, "function {at} at {x}: {found} instead of {expected}");
        }
    }
}

/// Recurrences of every length along either dimension, and what a selective scan reads from its states.
#[test]
fn states_of_recurrences_are_those_of_a_loop() {
    for steps in 1..=11 {
        for dim in [0, 1] {
            let shape = if dim == 0 { [steps, 3] } else { [3, steps] };
            let mut case = Case::new();
            let (decay, inflow) = (case.leaf(&shape), case.leaf(&shape));
            let states = scan::linear_recurrence(&mut case.graph, decay, inflow, dim).unwrap();
            case.check(states, |index, leaves| {
                let place = |t: u64| if dim == 0 { [t, index[1]] } else { [index[0], t] };
                (0..=index[dim]).fold(0.0, |state, t| leaves[0].at(&place(t)) * state + leaves[1].at(&place(t)))
            });
        }
    }
    let (tokens, features, numbers) = (6, 2, 3);
    let mut case = Case::new();
    let (x, step) = (case.leaf(&[2, tokens, features]), case.leaf(&[2, tokens, features]));
    let rate = case.leaf(&[features, numbers]);
    let (taken, asked) = (case.leaf(&[2, tokens, numbers]), case.leaf(&[2, tokens, numbers]));
    let read = selective_scan(&mut case.graph, [x, step, rate, taken, asked]).unwrap();
    case.check(read, |index, leaves| {
        let &[sample, token, feature] = index else { panic!("three dimensions") };
        let one = |n: u64| {
            let state = (0..=token).fold(0.0, |state, t| {
                let step = leaves[1].at(&[sample, t, feature]);
                let inflow = step * leaves[0].at(&[sample, t, feature]) * leaves[3].at(&[sample, t, n]);
                (step * leaves[2].at(&[feature, n])).exp() * state + inflow
            });
            state * leaves[4].at(&[sample, token, n])
        };
        (0..numbers).map(one).sum()
    });
    let mut g = Graph::new("refused");
    let x = full(&mut g, &[2, 3], 0.0, DType::F32).unwrap();
    assert!(selective_scan(&mut g, [x; 5]).is_err());
}
