//! Experts in several forms. The recognised form must compute the same values, use only the chosen experts, and keep
//! samples apart.

use super::*;
use altiplano_ir::array as a;
use altiplano_ir::batch::{LossKind, find_batch, rebatch};
use altiplano_ir::dtype::DType;
use altiplano_ir::interpret::run;
use altiplano_ir::op::{ArgSort, Binary, Combine, Direction, GatherDims, Input, Parameter, Scatter, ScatterAdd};
use altiplano_ir::testing::numbers::{Rng, close, random};
use altiplano_ir::types::TensorType;

const SAMPLES: u64 = 4;
const LENGTH: u64 = 3;
const TOKENS: u64 = SAMPLES * LENGTH;
const HIDDEN: u64 = 6;
const INNER: u64 = 10;
const EXPERTS: u64 = 5;
const CHOSEN: u64 = 2;

/// A graph under construction: tokens, gates `[tokens, chosen]`, and the chosen experts.
struct Model {
    g: Graph,
    tokens: ValueId,
    gates: ValueId,
    chosen: ValueId,
}

fn f32s(shape: &[u64]) -> TensorType {
    TensorType::new(DType::F32, shape)
}

fn weight(g: &mut Graph, name: &str, shape: &[u64]) -> ValueId {
    g.push(Op::Parameter(Parameter::new(name, f32s(shape))), &[]).unwrap()
}

fn model() -> Model {
    let mut g = Graph::new("experts");
    let x = g.push(Op::Input(Input { name: "x".into(), ty: f32s(&[SAMPLES, LENGTH, HIDDEN]) }), &[]).unwrap();
    let tokens = a::reshape(&mut g, x, &[TOKENS, HIDDEN]).unwrap();
    let router = weight(&mut g, "router", &[EXPERTS, HIDDEN]);
    let logits = a::linear(&mut g, tokens, router, None).unwrap();
    let scores = a::softmax(&mut g, logits, 1).unwrap();
    let (gates, chosen) = a::top_k(&mut g, scores, 1, CHOSEN, false).unwrap();
    Model { g, tokens, gates, chosen }
}

/// The graph with a loss of the experts' result, `[tokens, hidden]`, and its recognised form.
fn finished(mut model: Model, result: ValueId) -> [Graph; 2] {
    let g = &mut model.g;
    let result = a::reshape(g, result, &[SAMPLES, LENGTH, HIDDEN]).unwrap();
    let squares = a::binary(g, Binary::Multiply, result, result).unwrap();
    let loss = a::mean(g, squares, &[0, 1, 2], false).unwrap();
    g.outputs = vec![loss];
    let found = recognise(g);
    [model.g, found]
}

/// Checks that both compute the same, that samples stay apart, and that products are those of the chosen experts.
fn check([written, found]: [Graph; 2]) {
    assert_eq!(found.verify(), [], "{found}");
    let leaf = |graph: &Graph, v: ValueId| {
        // Leaves are seeded by name, so that both graphs have the same values.
        let name = match &graph.node(v).op {
            Op::Parameter(p) => p.name.clone(),
            Op::Input(i) => i.name.clone(),
            op => panic!("{op:?} is no leaf"),
        };
        let seed = name.bytes().fold(7u64, |s, b| s.wrapping_mul(31).wrapping_add(b.into()));
        random(graph.ty(v), (-1.0, 1.0), (0, 1), &mut Rng::new(seed))
    };
    let value = |graph: &Graph| run(graph, |v| leaf(graph, v))[0].data[0];
    let (expect, got) = (value(&written), value(&found));
    assert!(expect.abs() > 1e-3 && close(expect, got, 1e-9), "{expect} became {got}: {found}");
    let batched = find_batch(&found, &[Some(0)]);
    assert_eq!((batched.doubt, batched.loss), (None, LossKind::Mean), "{found}");
    assert!(rebatch(&batched.graph, 1).is_ok());
    let products: u64 = found.values().filter(|&v| found.node(v).op.is_contraction()).map(|v| found.flop(v)).sum();
    let routing = 2 * TOKENS * HIDDEN * EXPERTS;
    assert_eq!(products, routing + 2 * 2 * TOKENS * CHOSEN * HIDDEN * INNER, "{found}");
}

fn sorted_by(g: &mut Graph, key: ValueId) -> ValueId {
    g.push(Op::ArgSort(ArgSort { dim: 0, descending: vec![false] }), &[key]).unwrap()
}

/// The ends of the groups, from the number of rows of each expert, counted in one of two ways.
fn ends(g: &mut Graph, key: ValueId, by_scatter: bool) -> ValueId {
    let counts = if by_scatter {
        let ones = a::full(g, &[TOKENS * CHOSEN], 1.0, DType::I32).unwrap();
        // Indices are clamped, and negative ones count from the end.
        let zero = a::full_like(g, key, 0.0).unwrap();
        let clipped = a::binary(g, Binary::Maximum, key, zero).unwrap();
        let negative = a::compare(g, Direction::Lt, clipped, zero).unwrap();
        let moved = a::with_number(g, Binary::Add, clipped, EXPERTS as f64).unwrap();
        let index = a::select(g, negative, moved, clipped).unwrap();
        let index = a::unsqueeze(g, index, 1).unwrap();
        let add = ScatterAdd { dims: GatherDims::rows(&[EXPERTS], 1), shape: vec![EXPERTS] };
        g.push(Op::ScatterAdd(add), &[index, ones]).unwrap()
    } else {
        let hot = a::one_hot(g, key, EXPERTS, DType::I32).unwrap();
        a::sum(g, hot, &[0], false).unwrap()
    };
    a::cumulative(g, counts, altiplano_ir::op::Reducer::Sum, 0, false).unwrap()
}

/// Experts over sorted rows. The options are how groups are counted and how the order of results is restored.
fn sorted(by_scatter: bool, back: &str) -> [Graph; 2] {
    let mut m = model();
    let g = &mut m.g;
    let rows = TOKENS * CHOSEN;
    let key = a::reshape(g, m.chosen, &[rows]).unwrap();
    let order = sorted_by(g, key);
    let token = a::with_number(g, Binary::Divide, order, CHOSEN as f64).unwrap();
    let x = a::take(g, m.tokens, 0, token, false).unwrap();
    let ends = ends(g, key, by_scatter);
    let group = a::group_of_rows(g, ends, rows).unwrap();
    let up = weight(g, "up", &[EXPERTS, INNER, HIDDEN]);
    let up = a::permute(g, up, &[0, 2, 1]).unwrap();
    let down = weight(g, "down", &[EXPERTS, INNER, HIDDEN]);
    let bias = weight(g, "bias", &[EXPERTS, INNER]);
    let inner = a::grouped_dot(g, x, up, group).unwrap();
    let sorted_key = a::take(g, key, 0, order, false).unwrap();
    let bias = a::take(g, bias, 0, sorted_key, false).unwrap();
    let inner = a::binary(g, Binary::Add, inner, bias).unwrap();
    let inner = a::silu(g, inner).unwrap();
    let made = a::grouped_dot(g, inner, down, group).unwrap();
    let gates = a::reshape(g, m.gates, &[rows]).unwrap();
    let gates = a::take(g, gates, 0, order, false).unwrap();
    let gates = a::unsqueeze(g, gates, 1).unwrap();
    let made = a::binary(g, Binary::Multiply, made, gates).unwrap();
    let summed = |g: &mut Graph, rows: ValueId| {
        let split = a::reshape(g, rows, &[TOKENS, CHOSEN, HIDDEN]).unwrap();
        a::sum(g, split, &[1], false).unwrap()
    };
    let index = |g: &mut Graph, v: ValueId| a::unsqueeze(g, v, 1).unwrap();
    let result = match back {
        "inverse" => {
            let inverse = sorted_by(g, order);
            let made = a::take(g, made, 0, inverse, false).unwrap();
            summed(g, made)
        }
        "written positions" => {
            let (none, count) =
                (a::full(g, &[rows], 0.0, DType::I32).unwrap(), a::iota(g, &[rows], 0, DType::I32).unwrap());
            let at = index(g, order);
            let write = Scatter { dims: GatherDims::rows(&[rows], 1), combine: Combine::Replace };
            let inverse = g.push(Op::Scatter(write), &[none, at, count]).unwrap();
            let made = a::take(g, made, 0, inverse, false).unwrap();
            summed(g, made)
        }
        "written rows" => {
            let none = a::full(g, &[rows, HIDDEN], 0.0, DType::F32).unwrap();
            let at = index(g, order);
            let write = Scatter { dims: GatherDims::rows(&[rows, HIDDEN], 1), combine: Combine::Replace };
            let made = g.push(Op::Scatter(write), &[none, at, made]).unwrap();
            summed(g, made)
        }
        _ => {
            let at = index(g, token);
            let add = ScatterAdd { dims: GatherDims::rows(&[TOKENS, HIDDEN], 1), shape: vec![TOKENS, HIDDEN] };
            g.push(Op::ScatterAdd(add), &[at, made]).unwrap()
        }
    };
    finished(m, result)
}

#[test]
fn sorted_rows_are_taken_as_they_were() {
    for by_scatter in [false, true] {
        for back in ["inverse", "written positions", "written rows", "added"] {
            let graphs = sorted(by_scatter, back);
            let sorts = graphs[1].nodes.iter().filter(|n| matches!(n.op, Op::ArgSort(_))).count();
            assert_eq!(sorts, 1, "the router's order alone is left ({back}): {}", graphs[1]);
            check(graphs);
        }
    }
}

#[test]
fn an_order_that_shows_stays() {
    let mut m = model();
    let g = &mut m.g;
    let rows = TOKENS * CHOSEN;
    let key = a::reshape(g, m.chosen, &[rows]).unwrap();
    let order = sorted_by(g, key);
    let token = a::with_number(g, Binary::Divide, order, CHOSEN as f64).unwrap();
    let x = a::take(g, m.tokens, 0, token, false).unwrap();
    let sorted_key = a::take(g, key, 0, order, false).unwrap();
    let up = weight(g, "up", &[EXPERTS, HIDDEN, HIDDEN]);
    let made = a::grouped_dot(g, x, up, sorted_key).unwrap();
    // A sum over runs of sorted rows depends on the order.
    let split = a::reshape(g, made, &[TOKENS, CHOSEN, HIDDEN]).unwrap();
    let result = a::sum(g, split, &[1], false).unwrap();
    let [written, found] = finished(m, result);
    let sorts = |g: &Graph| g.nodes.iter().filter(|n| matches!(n.op, Op::ArgSort(_))).count();
    assert_eq!(sorts(&written), sorts(&found));
    let loss = find_batch(&found, &[Some(0)]).loss;
    assert_eq!(loss, LossKind::Other, "{found}");
}

/// Matrices looked up for each row, in two orders of dimensions.
#[test]
fn products_with_looked_up_matrices_are_grouped() {
    for per_row in [true, false] {
        let mut m = model();
        let g = &mut m.g;
        let up = weight(g, "up", &[EXPERTS, INNER, HIDDEN]);
        let down = weight(g, "down", &[EXPERTS, INNER, HIDDEN]);
        let (inner, made);
        if per_row {
            // One matrix and one token per row.
            let rows = TOKENS * CHOSEN;
            let key = a::reshape(g, m.chosen, &[rows]).unwrap();
            let spread = a::unsqueeze(g, m.tokens, 1).unwrap();
            let spread = a::broadcast_to(g, spread, &[TOKENS, CHOSEN, HIDDEN]).unwrap();
            let x = a::reshape(g, spread, &[rows, HIDDEN, 1]).unwrap();
            let up = a::take(g, up, 0, key, false).unwrap();
            let y = a::matmul(g, up, x).unwrap();
            let y = a::silu(g, y).unwrap();
            let down = a::take(g, down, 0, key, false).unwrap();
            let down = a::permute(g, down, &[0, 2, 1]).unwrap();
            let y = a::matmul(g, down, y).unwrap();
            made = a::reshape(g, y, &[TOKENS, CHOSEN, HIDDEN]).unwrap();
        } else {
            // All matrices of a token at once.
            let up = a::take(g, up, 0, m.chosen, false).unwrap();
            let dot = |lhs_batch: &[usize], rhs_batch: &[usize], contract: [usize; 2]| {
                Op::DotGeneral(altiplano_ir::op::DotGeneral {
                    lhs_batch: lhs_batch.to_vec(),
                    rhs_batch: rhs_batch.to_vec(),
                    lhs_contract: vec![contract[0]],
                    rhs_contract: vec![contract[1]],
                })
            };
            let y = g.push(dot(&[0], &[0], [1, 3]), &[m.tokens, up]).unwrap();
            inner = a::silu(g, y).unwrap();
            let down = a::take(g, down, 0, m.chosen, false).unwrap();
            made = g.push(dot(&[0, 1], &[0, 1], [2, 2]), &[inner, down]).unwrap();
        }
        let gates = a::unsqueeze(g, m.gates, 2).unwrap();
        let made = a::binary(g, Binary::Multiply, made, gates).unwrap();
        let result = a::sum(g, made, &[1], false).unwrap();
        check(finished(m, result));
    }
}

/// Checks experts over sorted rows, by a product of rows with the matrices of all experts. `groups` has what the product
/// needs to know of the experts of the rows.
fn check_sorted_rows(
    groups: impl Fn(&mut Graph, ValueId) -> ValueId,
    product: impl Fn(&mut Graph, ValueId, ValueId, ValueId) -> ValueId,
) {
    let mut m = model();
    let g = &mut m.g;
    let rows = TOKENS * CHOSEN;
    let key = a::reshape(g, m.chosen, &[rows]).unwrap();
    let order = sorted_by(g, key);
    let token = a::with_number(g, Binary::Divide, order, CHOSEN as f64).unwrap();
    let x = a::take(g, m.tokens, 0, token, false).unwrap();
    let groups = groups(g, key);
    let up = weight(g, "up", &[EXPERTS, HIDDEN, INNER]);
    let down = weight(g, "down", &[EXPERTS, INNER, HIDDEN]);
    let inner = product(g, groups, x, up);
    let inner = a::silu(g, inner).unwrap();
    let made = product(g, groups, inner, down);
    let inverse = sorted_by(g, order);
    let made = a::take(g, made, 0, inverse, false).unwrap();
    let made = a::reshape(g, made, &[TOKENS, CHOSEN, HIDDEN]).unwrap();
    let gates = a::unsqueeze(g, m.gates, 2).unwrap();
    let made = a::binary(g, Binary::Multiply, made, gates).unwrap();
    let result = a::sum(g, made, &[1], false).unwrap();
    check(finished(m, result));
}

/// Rows repeated for all groups and masked, as XLA writes runs of rows for CPUs.
#[test]
fn products_of_masked_rows_are_grouped() {
    let masked = |g: &mut Graph, ends: ValueId, x: ValueId, w: ValueId| {
        let shape = [EXPERTS, TOKENS * CHOSEN, g.shape(x)[1]];
        let zero = a::full(g, &[1], 0.0, DType::I32).unwrap();
        let most = a::slice_dim(g, ends, 0, 0, EXPERTS as i64 - 1, 1).unwrap();
        let starts = a::concat(g, &[zero, most], 0).unwrap();
        let wide = |g: &mut Graph, v: ValueId| g.broadcast(v, &shape, &[0]);
        let (low, high) = (wide(g, starts), wide(g, ends));
        let row = a::iota(g, &shape, 1, DType::I32).unwrap();
        let (after, before) =
            (a::compare(g, Direction::Le, low, row).unwrap(), a::compare(g, Direction::Lt, row, high).unwrap());
        let inside = a::binary(g, Binary::And, after, before).unwrap();
        let spread = g.broadcast(x, &shape, &[1, 2]);
        let zero = a::full(g, &shape, 0.0, DType::F32).unwrap();
        let kept = a::select(g, inside, spread, zero).unwrap();
        let dot = altiplano_ir::op::DotGeneral {
            lhs_batch: Vec::new(),
            rhs_batch: Vec::new(),
            lhs_contract: vec![2, 0],
            rhs_contract: vec![1, 0],
        };
        g.push(Op::DotGeneral(dot), &[kept, w]).unwrap()
    };
    check_sorted_rows(|g, key| ends(g, key, true), masked);
}

/// A loop over experts, with separate weights or with parts of one tensor.
fn looped(own: bool, experts: u64) -> [Graph; 2] {
    let mut m = model();
    let g = &mut m.g;
    let rows = TOKENS * CHOSEN;
    let (up, down) = (weight(g, "up", &[EXPERTS, INNER, HIDDEN]), weight(g, "down", &[EXPERTS, HIDDEN, INNER]));
    let mut total = a::full(g, &[TOKENS, HIDDEN], 0.0, DType::F32).unwrap();
    for e in 0..experts {
        let number = a::full_like(g, m.chosen, e as f64).unwrap();
        let mask = a::compare(g, Direction::Eq, m.chosen, number).unwrap();
        let spread = g.broadcast(m.tokens, &[TOKENS, CHOSEN, HIDDEN], &[0, 2]);
        let x = a::reshape(g, spread, &[rows, HIDDEN]).unwrap();
        let part = |g: &mut Graph, w: ValueId, name: &str| {
            if own {
                let shape = g.shape(w)[1..].to_vec();
                return weight(g, &format!("{name}{e}"), &shape);
            }
            let part = a::slice_dim(g, w, 0, e as i64, e as i64 + 1, 1).unwrap();
            a::squeeze(g, part, &[0]).unwrap()
        };
        let (up, down) = (part(g, up, "up"), part(g, down, "down"));
        let bias = weight(g, &format!("bias{e}"), &[HIDDEN]);
        let y = a::linear(g, x, up, None).unwrap();
        let y = a::silu(g, y).unwrap();
        let y = a::linear(g, y, down, Some(bias)).unwrap();
        let gates = a::reshape(g, m.gates, &[rows, 1]).unwrap();
        let y = a::binary(g, Binary::Multiply, y, gates).unwrap();
        let y = a::reshape(g, y, &[TOKENS, CHOSEN, HIDDEN]).unwrap();
        let mask = a::unsqueeze(g, mask, 2).unwrap();
        let zero = a::full_like(g, y, 0.0).unwrap();
        let kept = a::select(g, mask, y, zero).unwrap();
        let term = a::sum(g, kept, &[1], false).unwrap();
        total = a::binary(g, Binary::Add, total, term).unwrap();
    }
    finished(m, total)
}

#[test]
fn loops_over_experts_are_grouped() {
    for own in [true, false] {
        check(looped(own, EXPERTS));
    }
}

/// Rows whose expert is not in the loop contribute nothing, not even biases.
#[test]
fn rows_without_an_expert_are_zero() {
    let [written, found] = looped(true, EXPERTS - 1);
    assert!(found.nodes.iter().any(|n| matches!(n.op, Op::GroupedDot(_))));
    let leaf = |graph: &Graph, v: ValueId| {
        random(graph.ty(v), (-1.0, 1.0), (0, 1), &mut Rng::new(u64::from(graph.ty(v).elements() as u32)))
    };
    let value = |graph: &Graph| run(graph, |v| leaf(graph, v))[0].data[0];
    assert!(close(value(&written), value(&found), 1e-9));
}

#[test]
fn other_graphs_stay_as_they_are() {
    let mut m = model();
    let result = a::sum(&mut m.g, m.gates, &[1], false).unwrap();
    let result = a::unsqueeze(&mut m.g, result, 1).unwrap();
    let result = a::binary(&mut m.g, Binary::Multiply, m.tokens, result).unwrap();
    let [written, found] = finished(m, result);
    assert_eq!(written, found);
}

/// Loops that mask tokens instead of choices, or take masks from a one-hot tensor.
#[test]
fn masks_of_tokens_and_one_hot_masks_are_grouped() {
    for hot in [false, true] {
        let mut m = model();
        let g = &mut m.g;
        let all = a::one_hot(g, m.chosen, EXPERTS, DType::I64).unwrap();
        let all = a::permute(g, all, &[2, 1, 0]).unwrap();
        let mut total = m.tokens;
        for e in 0..EXPERTS {
            let number = a::full_like(g, m.chosen, e as f64).unwrap();
            let equal = a::compare(g, Direction::Eq, m.chosen, number).unwrap();
            let (up, down) =
                (weight(g, &format!("up{e}"), &[INNER, HIDDEN]), weight(g, &format!("down{e}"), &[HIDDEN, INNER]));
            let expert = |g: &mut Graph, x: ValueId| {
                let y = a::linear(g, x, up, None).unwrap();
                let y = a::silu(g, y).unwrap();
                a::linear(g, y, down, None).unwrap()
            };
            let kept = |g: &mut Graph, mask: ValueId, y: ValueId| {
                let mask = a::unsqueeze(g, mask, -1).unwrap();
                let zero = a::full_like(g, y, 0.0).unwrap();
                a::select(g, mask, y, zero).unwrap()
            };
            let term = if hot {
                let mask = a::slice_dim(g, all, 0, e as i64, e as i64 + 1, 1).unwrap();
                let mask = a::squeeze(g, mask, &[0]).unwrap();
                let mask = a::convert(g, mask, DType::Bool).unwrap();
                let x = g.broadcast(m.tokens, &[CHOSEN, TOKENS, HIDDEN], &[1, 2]);
                let x = a::reshape(g, x, &[CHOSEN * TOKENS, HIDDEN]).unwrap();
                let y = expert(g, x);
                let gates = a::permute(g, m.gates, &[1, 0]).unwrap();
                let gates = a::reshape(g, gates, &[CHOSEN * TOKENS, 1]).unwrap();
                let y = a::binary(g, Binary::Multiply, y, gates).unwrap();
                let y = a::reshape(g, y, &[CHOSEN, TOKENS, HIDDEN]).unwrap();
                let kept = kept(g, mask, y);
                a::sum(g, kept, &[0], false).unwrap()
            } else {
                let mask = a::reduce(g, equal, altiplano_ir::op::Reducer::Or, &[1], false).unwrap();
                let own = g.convert(equal, DType::F32);
                let gates = a::binary(g, Binary::Multiply, m.gates, own).unwrap();
                let gates = a::sum(g, gates, &[1], true).unwrap();
                let y = expert(g, m.tokens);
                let y = a::binary(g, Binary::Multiply, y, gates).unwrap();
                kept(g, mask, y)
            };
            total = a::binary(g, Binary::Add, total, term).unwrap();
        }
        check(finished(m, total));
    }
}

/// Runs of rows that are multiplied one after the other, as XLA writes them for GPUs.
#[test]
fn products_of_runs_are_grouped() {
    let counts = |g: &mut Graph, key: ValueId| {
        let hot = a::one_hot(g, key, EXPERTS, DType::I32).unwrap();
        a::sum(g, hot, &[0], false).unwrap()
    };
    let in_runs = |g: &mut Graph, counts: ValueId, x: ValueId, w: ValueId| {
        let row = a::iota(g, g.shape(x).to_vec().as_slice(), 0, DType::I32).unwrap();
        let mut start = a::scalar(g, 0.0, DType::I32).unwrap();
        let mut total: Option<ValueId> = None;
        for e in 0..EXPERTS as i64 {
            let count = a::slice_dim(g, counts, 0, e, e + 1, 1).unwrap();
            let count = a::reshape(g, count, &[]).unwrap();
            let end = a::binary(g, Binary::Add, start, count).unwrap();
            let (after, before) =
                (a::compare(g, Direction::Ge, row, start).unwrap(), a::compare(g, Direction::Lt, row, end).unwrap());
            let inside = a::binary(g, Binary::And, after, before).unwrap();
            let zero = a::full_like(g, x, 0.0).unwrap();
            let kept = a::select(g, inside, x, zero).unwrap();
            let part = a::slice_dim(g, w, 0, e, e + 1, 1).unwrap();
            let part = a::squeeze(g, part, &[0]).unwrap();
            let y = a::matmul(g, kept, part).unwrap();
            total = Some(total.map_or(y, |t| a::binary(g, Binary::Add, t, y).unwrap()));
            start = end;
        }
        total.unwrap()
    };
    check_sorted_rows(counts, in_runs);
}
