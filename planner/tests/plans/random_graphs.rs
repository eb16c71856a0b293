//! Random graphs under random plans: reshapes, transposes, broadcasts, reductions, slices and joins, convolutions and
//! pooling, orders, scans, lookups and scatters, random bits, values that skip layers, parameters used on several stages.
//! Every plan computes what the whole graph computes.

use crate::support::assert_computes_the_same;
use altiplano_cost_models::preset;
use altiplano_ir::batch::LossKind;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::literal::Literal;
use altiplano_ir::op::{
    ArgSort, Binary, BitcastConvert, Combine, Concatenate, Convolution, Cumulative, Direction, DotGeneral, Gather,
    GatherDims, ImageDims, Input, Iota, KernelDims, Op, OutOfBounds, Pad, Parameter, ReduceWindow, Reducer, Reverse,
    Scatter, Slice, Threefry, ThreefryWord, Unary, WindowDim,
};
use altiplano_ir::optimizer::Optimizer;
use altiplano_ir::recompute::Recompute;
use altiplano_ir::simplify::simplify;
use altiplano_ir::types::TensorType;
use altiplano_planner::{PlanFailure, Request, Silent, plan, programs};
use altiplano_transforms::downscale::{Goal, downscale};
use proptest::prelude::*;

const SHAPE: [u64; 2] = [4, 8];

/// Rows are images of eight positions and one feature, or all rows are one image of four positions and eight features.
/// In the third case, every other position of the result is left out and put back by a transposed convolution.
fn convolution(g: &mut Graph, x: ValueId, kind: u8, mut weight: impl FnMut(&mut Graph, &[u64]) -> ValueId) -> ValueId {
    let last = ImageDims { batch: 0, feature: 2, spatial: vec![1] };
    let conv = |window: WindowDim| {
        Op::Convolution(Convolution {
            lhs: last.clone(),
            rhs: KernelDims { output: 2, input: 1, spatial: vec![0] },
            result: last.clone(),
            feature_groups: 1,
            batch_groups: 1,
            window: vec![window],
        })
    };
    let three = WindowDim { size: 3, pad_low: 1, pad_high: 1, ..WindowDim::one() };
    let result = match kind % 3 {
        0 => {
            let image = g.reshape(x, &[4, 8, 1]);
            let kernel = weight(g, &[3, 1, 2]);
            let wide = g.emit(conv(three), &[image, kernel]);
            g.reduce(wide, Reducer::Sum, &[2])
        }
        1 => {
            let image = g.reshape(x, &[1, 4, 8]);
            let kernel = weight(g, &[3, 8, 8]);
            g.emit(conv(three), &[image, kernel])
        }
        _ => {
            let image = g.reshape(x, &[2, 8, 2]);
            let (down, up) = (weight(g, &[3, 2, 4]), weight(g, &[3, 4, 2]));
            let half = g.emit(conv(WindowDim { stride: 2, ..three }), &[image, down]);
            let half = g.unary(Unary::Tanh, half);
            g.emit(conv(WindowDim { base_dilation: 2, pad_high: 2, ..three }), &[half, up])
        }
    };
    g.reshape(result, &SHAPE)
}

fn pooled(g: &mut Graph, x: ValueId, kind: u8) -> ValueId {
    let reducer = [Reducer::Max, Reducer::Sum, Reducer::Min][kind as usize % 3];
    let three = WindowDim { size: 3, pad_low: 1, pad_high: 1, ..WindowDim::one() };
    let window = if kind % 2 == 0 { vec![WindowDim::one(), three] } else { vec![three, WindowDim::one()] };
    g.emit(Op::ReduceWindow(ReduceWindow { reducer, window }), &[x])
}

/// One position in each row.
fn along_rows() -> GatherDims {
    GatherDims {
        offset_dims: vec![],
        collapsed_slice_dims: vec![1],
        operand_batching_dims: vec![0],
        indices_batching_dims: vec![0],
        start_index_map: vec![1],
        index_vector_dim: 2,
        slice_sizes: vec![1, 1],
    }
}

/// `x` where random bits, made from `ids` and the position, select it, and zero elsewhere.
fn dropout(g: &mut Graph, x: ValueId, ids: ValueId) -> ValueId {
    let ty = g.ty(ids).clone();
    let [row, column] = [0, 1].map(|dim| g.emit(Op::Iota(Iota { ty: ty.clone(), dim }), &[]));
    let seed = g.splat_like(ids, 42.0);
    let bits = g.emit(Op::Threefry(Threefry { word: ThreefryWord::Xor }), &[ids, seed, row, column]);
    let nine = g.splat_like(bits, 9.0);
    let mantissa = g.emit(Op::Binary(Binary::ShiftRightLogical), &[bits, nine]);
    let exponent = g.splat_like(bits, f64::from(1f32.to_bits()));
    let number = g.emit(Op::Binary(Binary::Or), &[mantissa, exponent]);
    let number = g.emit(Op::BitcastConvert(BitcastConvert { dtype: DType::F32 }), &[number]);
    let bound = g.splat_like(number, 1.75);
    let kept = g.compare(Direction::Lt, number, bound);
    let zero = g.splat_like(x, 0.0);
    g.select(kept, x, zero)
}

/// Each step makes a new value from earlier values of shape `[4, 8]`.
fn graph(steps: &[(u8, u8, u8)]) -> Graph {
    let shape = SHAPE;
    let ty = TensorType::new(DType::F32, shape.to_vec());
    let mut g = Graph::new("random");
    let mut values = vec![g.emit(Op::Input(Input { name: "x".into(), ty }), &[])];
    let ids_ty = TensorType::new(DType::U32, shape.to_vec());
    let ids = g.emit(Op::Input(Input { name: "ids".into(), ty: ids_ty }), &[]);
    let mut weights: Vec<ValueId> = Vec::new();
    for &(kind, a, form) in steps {
        let pick = |n: u8| values[values.len() - 1 - n as usize % values.len().min(6)];
        let (a, other) = (pick(a), pick(form));
        let mut weight = |g: &mut Graph, shape: &[u64]| {
            let reused = weights.iter().copied().find(|&w| g.shape(w) == shape && form % 3 == 0);
            reused.unwrap_or_else(|| {
                let ty = TensorType::new(DType::F32, shape.to_vec());
                let name = format!("w{}", weights.len());
                let w = g.emit(Op::Parameter(Parameter::new(name, ty)), &[]);
                weights.push(w);
                w
            })
        };
        let dot = |l: usize, r: usize, batch: &[usize]| {
            Op::DotGeneral(DotGeneral {
                lhs_batch: batch.to_vec(),
                rhs_batch: batch.to_vec(),
                lhs_contract: vec![l],
                rhs_contract: vec![r],
            })
        };
        let value = match kind {
            0 => g.add(a, other),
            1 => g.mul(a, other),
            2 => g.unary(Unary::Tanh, a),
            3 => {
                let w = weight(&mut g, &[8, 8]);
                g.emit(dot(1, 0, &[]), &[a, w])
            }
            4 => {
                // Up, split, down again: the shape of an MLP or of attention's projections.
                let up = weight(&mut g, &[8, 16]);
                let hidden = g.emit(dot(1, 0, &[]), &[a, up]);
                let hidden = g.reshape(hidden, &[4, 2, 8]);
                let hidden = g.transpose(hidden, &[1, 0, 2]);
                let sum = g.reduce(hidden, Reducer::Sum, &[0]);
                g.unary(Unary::Tanh, sum)
            }
            5 => {
                let gain = weight(&mut g, &[8]);
                let gain = g.broadcast(gain, &shape, &[1]);
                g.mul(a, gain)
            }
            6 => {
                let top = g.reduce(a, Reducer::Max, &[1]);
                let top = g.broadcast(top, &shape, &[0]);
                g.sub(other, top)
            }
            7 => {
                let half = |g: &mut Graph, v: ValueId, start: u64| {
                    let slice = Slice { start: vec![0, start], limit: vec![4, start + 4], stride: vec![1, 1] };
                    g.emit(Op::Slice(slice), &[v])
                };
                let (low, high) = (half(&mut g, a, 0), half(&mut g, other, 4));
                g.emit(Op::Concatenate(Concatenate { dim: 1 }), &[high, low])
            }
            8 => {
                // Mixes rows: a reduction over the first dimension.
                let scores = g.emit(dot(1, 1, &[]), &[a, other]);
                let scores = g.unary(Unary::Logistic, scores);
                g.emit(dot(1, 0, &[]), &[scores, a])
            }
            9 => convolution(&mut g, a, form, &mut weight),
            10 => pooled(&mut g, a, form),
            11 => {
                let reducer = [Reducer::Sum, Reducer::Max, Reducer::Product][form as usize % 3];
                let op = Cumulative { reducer, dim: form as usize % 2, reverse: form > 2 };
                g.emit(Op::Cumulative(op), &[a])
            }
            12 | 13 => {
                // Elements of one value in the order of the other: read, or written over those of a third.
                let descending = vec![form % 2 == 0];
                let order = g.emit(Op::ArgSort(ArgSort { dim: 1, descending }), &[a]);
                let order = g.reshape(order, &[4, 8, 1]);
                if kind == 12 {
                    let gather = Gather { dims: along_rows(), out_of_bounds: OutOfBounds::Clamp };
                    g.emit(Op::Gather(gather), &[other, order])
                } else {
                    // Shifted, so that one element of each row falls outside.
                    let one = g.splat_like(order, 1.0);
                    let order = g.add(order, one);
                    let combine = Combine::ALL[form as usize % Combine::ALL.len()];
                    let last = values[values.len() - 1];
                    g.emit(Op::Scatter(Scatter { dims: along_rows(), combine }), &[last, order, other])
                }
            }
            14 => {
                g.emit(Op::Reverse(Reverse { dims: [vec![0], vec![1], vec![0, 1]][form as usize % 3].clone() }), &[a])
            }
            15 => dropout(&mut g, a, ids),
            16 => {
                // Shifts the rows down by one. The first row comes from another value.
                let top = Slice { start: vec![3, 0], limit: vec![4, 8], stride: vec![1, 1] };
                let top = g.emit(Op::Slice(top), &[other]);
                let rest = Pad { low: vec![0, 0], high: vec![-1, 0], interior: vec![0, 0] };
                let zero = g.constant(Literal::splat(TensorType::scalar(DType::F32), 0.0));
                let rest = g.emit(Op::Pad(rest), &[a, zero]);
                g.emit(Op::Concatenate(Concatenate { dim: 0 }), &[top, rest])
            }
            _ => {
                let folded = g.reshape(a, &[2, 16]);
                let folded = g.unary(Unary::Sine, folded);
                g.reshape(folded, &shape)
            }
        };
        values.push(value);
    }
    // A parameter enters at the end too, so that every graph has a gradient.
    let ty = TensorType::new(DType::F32, vec![8]);
    let last_weight = g.emit(Op::Parameter(Parameter::new("last", ty)), &[]);
    let spread = g.broadcast(last_weight, &shape, &[1]);
    let last = g.mul(values[values.len() - 1], spread);
    let loss = g.reduce(last, Reducer::Sum, &[0, 1]);
    g.outputs = vec![loss];
    simplify(&g)
}

/// Plans the graph of `steps` with fixed degrees, or freely if `dp` is zero, and compares.
fn check(steps: &[(u8, u8, u8)], degrees: (u32, u32, u32), zero: u8, recompute: Recompute) {
    check_graph(&graph(steps), degrees, zero, recompute);
}

fn check_graph(graph: &Graph, (dp, tp, pp): (u32, u32, u32), zero: u8, recompute: Recompute) {
    let cluster = preset(&format!("local:{}", if dp > 0 { dp * tp * pp } else { 4 })).expect("a known preset");
    let mut request = Request::new("random", graph.clone(), LossKind::Other, cluster);
    request.baselines = false;
    // Larger sizes would need other values; `tests/importing/padding.rs` compares such plans.
    request.pad = false;
    request.training.optimizer = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
    if dp > 0 {
        (request.degrees.dp, request.degrees.tp, request.degrees.pp) = (Some(dp), Some(tp), Some(pp));
        (request.degrees.zero, request.recompute) = (Some(zero), Some(recompute));
    }
    match plan(&request, &Silent) {
        Ok(plan) => {
            assert!(plan.verify().is_empty(), "{:?}", plan.verify());
            let programs = programs(&plan).expect("programs");
            assert_computes_the_same(&plan, &programs, graph, 12.0);
        }
        // A short graph has few layers.
        Err(PlanFailure::TooFewLayers { .. } | PlanFailure::NoCombination) if pp > 1 => {}
        Err(failure) => panic!("{failure}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]
    #[test]
    fn plans_of_random_graphs(
        steps in prop::collection::vec((0u8..18, 0u8..6, 0u8..6), 2..12),
        degrees in prop::sample::select(vec![(4u32, 1u32, 1u32), (1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 1, 3), (0, 0, 0)]),
        zero in 0u8..4,
        recompute in 0..3usize,
    ) {
        check(&steps, degrees, zero, Recompute::ALL[recompute]);
    }
}

/// A twin is a graph like any other: it verifies, and its plan computes the same result.
fn check_twin(steps: &[(u8, u8, u8)], degrees: (u32, u32, u32)) {
    let whole = graph(steps);
    let twin = downscale(&whole, &Goal { parameters: 1, flop: 1, batch: 1 });
    assert!(twin.graph.verify().is_empty(), "{:?}", twin.graph.verify());
    let elements = |g: &Graph| g.nodes.iter().map(|n| n.ty.elements()).max();
    assert!(elements(&twin.graph) <= elements(&whole));
    assert_eq!(twin.map[whole.outputs[0].index()], Some(twin.graph.outputs[0]));
    check_graph(&twin.graph, degrees, 1, Recompute::None);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(100) })]
    #[test]
    fn twins_of_random_graphs(
        steps in prop::collection::vec((0u8..18, 0u8..6, 0u8..6), 2..12),
        degrees in prop::sample::select(vec![(2u32, 1u32, 1u32), (1, 2, 1), (1, 1, 2), (0, 0, 0)]),
    ) {
        check_twin(&steps, degrees);
    }
}

/// The first use of a weight has no cotangent. It only determines the order in which values are taken.
#[test]
fn gradients_of_weights_that_choose_first() {
    check(&[(9, 0, 3), (0, 0, 0), (12, 0, 2), (9, 0, 0)], (4, 1, 1), 0, Recompute::None);
}

/// Two values that a stage sends have the same cotangent. Nobody reads its second copy.
#[test]
fn cotangents_that_come_twice() {
    let steps = [(3, 0, 0), (0, 0, 0), (5, 0, 0), (2, 1, 0), (0, 2, 0), (0, 0, 0), (4, 4, 0), (0, 4, 1), (8, 0, 1)];
    check(&steps, (1, 2, 2), 0, Recompute::None);
}
