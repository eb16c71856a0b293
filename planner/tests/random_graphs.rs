//! Random graphs under random plans: reshapes, transposes, broadcasts, reductions, slices and joins, values that skip
//! layers, parameters used on several stages. Every plan computes what the whole graph computes.

mod support;

use altiplano_cost_models::preset;
use altiplano_ir::batch::LossKind;
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, ValueId};
use altiplano_ir::op::{Concatenate, DotGeneral, Input, Op, Parameter, Reducer, Slice, Unary};
use altiplano_ir::optimizer::Optimizer;
use altiplano_ir::simplify::simplify;
use altiplano_ir::types::TensorType;
use altiplano_planner::{PlanFailure, Request, Silent, plan, programs};
use proptest::prelude::*;
use support::assert_computes_the_same;

/// Each step takes earlier values of shape `[4, 8]` to a new one.
fn graph(steps: &[(u8, u8, u8)]) -> Graph {
    let shape = [4u64, 8];
    let ty = TensorType::new(DType::F32, shape.to_vec());
    let mut g = Graph::new("random");
    let mut values = vec![g.emit(Op::Input(Input { name: "x".into(), ty }), &[])];
    let mut weights: Vec<ValueId> = Vec::new();
    for (i, &(kind, a, b)) in steps.iter().enumerate() {
        let pick = |n: u8| values[values.len() - 1 - n as usize % values.len().min(6)];
        let (a, other) = (pick(a), pick(b));
        let mut weight = |g: &mut Graph, shape: &[u64]| {
            let reused = weights.iter().copied().find(|&w| g.shape(w) == shape && b % 3 == 0);
            reused.unwrap_or_else(|| {
                let ty = TensorType::new(DType::F32, shape.to_vec());
                let w = g.emit(Op::Parameter(Parameter { name: format!("w{i}"), ty }), &[]);
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
        let value = match kind % 10 {
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
            _ => {
                let folded = g.reshape(a, &[2, 16]);
                let folded = g.unary(Unary::Sine, folded);
                g.reshape(folded, &shape)
            }
        };
        values.push(value);
    }
    // Parameters enter at the end too, so that every graph has a gradient.
    let ty = TensorType::new(DType::F32, vec![8]);
    let last_weight = g.emit(Op::Parameter(Parameter { name: "last".into(), ty }), &[]);
    let spread = g.broadcast(last_weight, &shape, &[1]);
    let last = g.mul(values[values.len() - 1], spread);
    let loss = g.reduce(last, Reducer::Sum, &[0, 1]);
    g.outputs = vec![loss];
    simplify(&g)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(96) })]
    #[test]
    fn plans_of_random_graphs(
        steps in prop::collection::vec((0u8..10, 0u8..6, 0u8..6), 2..12),
        degrees in prop::sample::select(vec![(4u32, 1u32, 1u32), (1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 1, 3), (0, 0, 0)]),
        zero in 0u8..4,
        recompute in any::<bool>(),
    ) {
        let graph = graph(&steps);
        let (dp, tp, pp) = degrees;
        let cluster = preset(&format!("local:{}", if dp > 0 { dp * tp * pp } else { 4 })).expect("a known preset");
        let mut request = Request::new("random", graph.clone(), LossKind::Other, cluster);
        request.baselines = false;
        request.optimizer = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
        if dp > 0 {
            (request.dp, request.tp, request.pp) = (Some(dp), Some(tp), Some(pp));
            (request.zero, request.recompute) = (Some(zero), Some(recompute));
        }
        match plan(&request, &Silent) {
            Ok(plan) => {
                prop_assert!(plan.verify().is_empty(), "{:?}", plan.verify());
                let programs = programs(&plan).expect("programs");
                assert_computes_the_same(&plan, &programs, &graph, 1.0);
            }
            // A short graph has few layers.
            Err(PlanFailure::TooFewLayers { .. } | PlanFailure::NoCombination) if pp > 1 => {}
            Err(failure) => prop_assert!(false, "{failure}"),
        }
    }
}
