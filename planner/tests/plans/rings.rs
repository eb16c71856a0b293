//! Ring attention: positions are split, no device ever has all keys, and the result is that of one device.

use crate::support::check;
use altiplano_cost_models::preset;
use altiplano_ir::array;
use altiplano_ir::batch::{LossKind, find_batch};
use altiplano_ir::dtype::DType;
use altiplano_ir::graph::{Graph, Pin, PinnedDim, ValueId};
use altiplano_ir::literal::Real;
use altiplano_ir::op::{DotGeneral, Function, Input, Op, Parameter};
use altiplano_ir::optimizer::Optimizer;
use altiplano_ir::plan::Plan;
use altiplano_ir::program::Phase;
use altiplano_ir::recompute::Recompute;
use altiplano_ir::types::TensorType;
use altiplano_planner::features::rings::Ring;
use altiplano_planner::{PlanFailure, Request, Silent, plan, programs};

const TOKENS: u64 = 24;

fn dot(g: &mut Graph, x: ValueId, w: ValueId) -> ValueId {
    let last = g.shape(x).len() - 1;
    let dot = DotGeneral { lhs_batch: vec![], rhs_batch: vec![], lhs_contract: vec![last], rhs_contract: vec![0] };
    g.emit(Op::DotGeneral(dot), &[x, w])
}

/// Layers of attention over 24 positions, with the mixed values and the sum of each.
fn model(layers: usize, (heads, kv_heads): (u64, u64), causal: bool, blocks: u64) -> (Graph, Vec<ValueId>) {
    let (batch, size) = (2, 3);
    let width = heads * size;
    let mut g = Graph::new("attention");
    let ty = TensorType::new(DType::F32, [batch, TOKENS, width]);
    let mut x = g.emit(Op::Input(Input { name: "x".into(), ty }), &[]);
    let mut split = Vec::new();
    for i in 0..layers {
        let projected = |g: &mut Graph, name: &str, heads: u64| {
            let ty = TensorType::new(DType::F32, [width, heads * size]);
            let w = g.emit(Op::Parameter(Parameter::new(format!("{name}{i}"), ty)), &[]);
            let y = dot(g, x, w);
            g.reshape(y, &[batch, TOKENS, heads, size])
        };
        let operands = [("q", heads), ("k", kv_heads), ("v", kv_heads)].map(|(n, h)| projected(&mut g, n, h));
        let attention = Function::Attention { scale: Real(0.5), causal, blocks };
        let mixed = g.emit(attention.into(), &operands);
        let joined = g.reshape(mixed, &[batch, TOKENS, width]);
        let ty = TensorType::new(DType::F32, [width, width]);
        let w = g.emit(Op::Parameter(Parameter::new(format!("o{i}"), ty)), &[]);
        let y = dot(&mut g, joined, w);
        x = g.add(x, y);
        split.extend([mixed, x]);
    }
    let square = g.mul(x, x);
    let loss = array::mean(&mut g, square, &[0, 1, 2], false).expect("a mean");
    g.outputs = vec![loss];
    (find_batch(&g, &[Some(0)]).graph, split)
}

/// Pins a split of positions over `devices`, whatever the search would choose.
fn split(graph: &Graph, values: &[ValueId], devices: u32) -> Request {
    let mut graph = graph.clone();
    for &value in values {
        let dim = |axes: &[&str]| PinnedDim { axes: axes.iter().map(ToString::to_string).collect(), open: false };
        let rank = graph.shape(value).len();
        let dims = (0..rank).map(|d| if d == 1 { dim(&["all"]) } else { dim(&[]) }).collect();
        graph.pin(Pin { value, mesh: vec![("all".into(), u64::from(devices))], dims });
    }
    let cluster = preset(&format!("local:{devices}")).expect("a preset");
    let mut request = Request::new("ring", graph, LossKind::Mean, cluster);
    request.training.optimizer = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
    request.baselines = false;
    request.batch.num_microbatches = Some(1);
    request
}

/// Collectives of a plan's bodies, with the elements that a device has afterwards.
fn sent(plan: &Plan, phase: Phase) -> Vec<(&'static str, u64)> {
    let programs = programs(plan).expect("programs");
    let bodies = programs.programs[0].bodies.iter().filter(|b| b.phase == phase);
    let of_body = |body: &altiplano_ir::program::Body| {
        let graph = &body.graph;
        let nodes = graph.values().filter_map(|v| match &graph.node(v).op {
            Op::Collective(c) if c.collective.communicates() => Some((c.collective.name(), graph.ty(v).elements())),
            _ => None,
        });
        nodes.collect::<Vec<_>>()
    };
    bodies.flat_map(of_body).collect()
}

/// No device ever has all keys or values of an attention, nor their gradients.
fn assert_keys_are_in_parts(plan: &Plan, kv_heads: u64) {
    let programs = programs(plan).expect("programs");
    let nodes = programs.programs.iter().flat_map(|p| &p.bodies).flat_map(|b| &b.graph.nodes);
    let whole = 2 * TOKENS * kv_heads * 3;
    let is_whole =
        |shape: &[u64]| shape.first() == Some(&2) && shape.last() == Some(&3) && shape.iter().product::<u64>() == whole;
    let whole: Vec<_> = nodes.filter(|n| is_whole(&n.ty.shape)).map(|n| &n.ty).collect();
    assert!(whole.is_empty(), "{whole:?}");
}

/// With as many devices as blocks, each round shifts the keys and the values of one block. The backward pass sends them
/// around again, and gradients home.
#[test]
fn devices_compute_what_one_computes() {
    for (devices, heads, causal) in [(2, (3, 1), true), (3, (2, 2), false), (4, (2, 1), true)] {
        let (graph, values) = model(2, heads, causal, u64::from(devices));
        for recompute in [Recompute::None, Recompute::Full] {
            let mut request = split(&graph, &values, devices);
            request.recompute = Some(recompute);
            let plan = check(&request);
            let shifts = |phase| sent(&plan, phase).iter().filter(|s| s.0 == "shift").count();
            let rounds = devices as usize - 1;
            assert_eq!(shifts(Phase::Forward), 2 * 2 * rounds, "{devices}");
            assert_eq!(shifts(Phase::Backward), 2 * 2 * 2 * rounds, "{devices}");
            assert_keys_are_in_parts(&plan, heads.1);
        }
    }
}

/// With more blocks than devices, only blocks that change devices are sent.
#[test]
fn blocks_may_be_more_than_devices() {
    let (graph, values) = model(1, (3, 1), true, 4);
    let plan = check(&split(&graph, &values, 2));
    let shifts: Vec<_> = sent(&plan, Phase::Forward).into_iter().filter(|s| s.0 == "shift").collect();
    // In each of three rounds, one block of keys and of values moves to the other device.
    let block = 2 * TOKENS / 4 * 3;
    assert_eq!(shifts.iter().map(|s| s.1).sum::<u64>(), 2 * 3 * block, "{shifts:?}");
    assert_keys_are_in_parts(&plan, 1);
}

/// A plan has the requested number of blocks, or there is a message.
#[test]
fn blocks_are_asked_for() {
    let (graph, values) = model(1, (2, 2), false, 1);
    let blocks = |request: &Request| {
        let plan = plan(request, &Silent)?;
        let found = plan.graph.nodes.iter().find_map(|n| match &n.op {
            Op::Composite(op) => match op.function {
                Function::Attention { blocks, .. } => Some(blocks),
                _ => None,
            },
            _ => None,
        });
        Ok::<_, PlanFailure>(found.expect("an attention"))
    };
    let mut request = split(&graph, &values, 2);
    request.ring = Ring::Blocks(2);
    assert_eq!(blocks(&request).expect("a plan"), 2);
    request.ring = Ring::None;
    assert_eq!(blocks(&request).expect("a plan"), 1);
    for refused in [0, 1, 5, 65] {
        request.ring = Ring::Blocks(refused);
        assert!(matches!(blocks(&request), Err(PlanFailure::Option { option: "ring", .. })), "{refused}");
    }
    // The request that a plan answers is about the original model.
    let (ringed, values) = model(1, (2, 2), false, 2);
    let plan = plan(&split(&ringed, &values, 2), &Silent).expect("a plan");
    assert_eq!(Request::of_plan(&plan).graph.nodes, graph.nodes);
}
